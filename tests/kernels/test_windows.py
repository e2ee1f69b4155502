"""Layers with other windows than images have: volumes, transposed, grouped, padded unevenly; and operators that move bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.cpu import native
from fxquant.kernels.admission import Layer
from fxquant.primitives import shape
from tests.kernels.test_kernels import _flags, assert_same, both, choices, chosen, computed, images, ordinary, slow
from tests.shared.networks import Network, members

TARGETS = ("bayes-e", "x86", "bernoulli2")
pytestmark = [
    pytest.mark.skipif(isinstance(native.library(), str), reason="a C compiler was not found"), pytest.mark.usefixtures("with_vnni"),
]  # fmt: skip
BYTES, WORDS, TRANSFORMED, MOVED = 1, 2, 3, 4  # what AVX2 multiplies


def assert_kernels(model: nn.Module, target: str, *sizes: int, moves: bool = True) -> None:
    """Kernels compute each operator of a model, and each movement of bytes, with the primitives' bits, also at the ends of the range."""
    integer, reference = both(model, target, ordinary(*sizes))
    for x in (images(*sizes), images(*sizes, seed=1).sign() * 100):
        assert_same(integer, reference, x)
    assert slow(integer) == []
    assert sum(run.macs for run in computed(integer)) == sum(run.layer.macs for run in computed(integer)) > 0
    assert not moves or {choice.implementation for choice in choices(integer).values()} >= {"moved bytes"}


TRANSPOSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "no overlap": (lambda: nn.ConvTranspose2d(5, 6, 2, 2), (5, 5, 6)),
    "overlap": (lambda: nn.ConvTranspose2d(8, 6, 4, 2, 1), (8, 5, 6)),
    "uneven": (lambda: nn.ConvTranspose2d(8, 6, (3, 5), (2, 3), (1, 2), (1, 2)), (8, 5, 6)),
    "gaps": (lambda: nn.ConvTranspose2d(8, 6, (1, 2), (3, 4), 0, (2, 3)), (8, 4, 5)),
    "dilated": (lambda: nn.ConvTranspose2d(8, 6, 3, (2, 4), 2, (1, 3), dilation=(3, 2)), (8, 5, 6)),
    "as a convolution": (lambda: nn.ConvTranspose2d(8, 6, 3, 1, 1), (8, 5, 6)),
    "groups": (lambda: nn.ConvTranspose2d(6, 4, 4, 2, 1, groups=2), (6, 5, 6)),
    "depthwise": (lambda: nn.ConvTranspose2d(6, 6, 4, 2, 1, groups=6), (6, 5, 6)),
    "sequence": (lambda: nn.ConvTranspose1d(16, 3, 10, 5, 3, 1), (16, 9)),
    "volume": (lambda: nn.ConvTranspose3d(6, 5, (2, 3, 4), 2, (0, 1, 1)), (6, 3, 4, 5)),
    "cropped": (lambda: nn.ConvTranspose1d(8, 4, 3, 4, 4), (8, 9)),
    "residual": (
        lambda: Network(lambda s, x: s.up(s.down(x)) + x, down=nn.Conv2d(3, 6, 2, 2), up=nn.ConvTranspose2d(6, 3, 4, 2, 1)),
        (3, 8, 6),
    ),
}
GROUPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    f"{outputs} of {inputs} in {groups} groups": (
        lambda inputs=inputs, outputs=outputs, groups=groups: nn.Conv2d(inputs, outputs, 3, (1, 2), 1, groups=groups),  # type: ignore[misc]
        (inputs, 6, 7),
    )
    for inputs, outputs, groups in ((6, 9, 3), (10, 10, 5), (3, 6, 3), (12, 24, 12), (8, 4, 4), (7, 14, 7))
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*TRANSPOSED, *GROUPS])
def test_transposed_convolutions_and_groups_of_any_size(name: str, target: str) -> None:
    make, sizes = (TRANSPOSED | GROUPS)[name]
    assert_kernels(Network(lambda s, x: F.relu(s.layer(x)), layer=make()), target, 3, *sizes, moves=False)


@members(lambda: dict(
    stem=nn.Conv3d(3, 8, (3, 3, 5), padding=(1, 1, 2)), strided=nn.Conv3d(8, 12, 3, (2, 1, 3), (1, 2, 0), (1, 2, 1)),
    depthwise=nn.Conv3d(12, 12, (2, 3, 3), padding=(1, 1, 1), groups=12), groups=nn.Conv3d(12, 6, (3, 1, 1), groups=2),
    flat=nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1)), scores=nn.Linear(12, 4),
))  # fmt: skip
def Volumes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolutions, pools, an addition, a concatenation and a mean of volumes."""
    x = F.relu(self.stem(x))
    x = F.relu(self.flat(x) + x)
    y = F.max_pool3d(x, 2, 2, ceil_mode=True)
    z = F.avg_pool3d(torch.cat([x, x.sigmoid()], 1), (2, 2, 3), (1, 2, 2))
    w = self.groups(self.depthwise(self.strided(y)))
    return self.scores(torch.cat([w, w], 1).mean((2, 3, 4))), z, y


@pytest.mark.parametrize("target", TARGETS)
def test_volumes(target: str) -> None:
    assert_kernels(Volumes(), target, 2, 3, 6, 10, 12, moves=False)


# a layer, the sizes of an input, and whether tiles read it in place
IN_PLACE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "first layer": (lambda: nn.Conv2d(3, 20, 7, 2, 3), (3, 40, 43), True),
    "several images together": (lambda: nn.Conv2d(64, 40, 3, 1, 1), (64, 7, 7), True),
    "parts of an image": (lambda: nn.Conv2d(20, 17, (3, 5), 1, (0, 2)), (20, 41, 37), True),
    "parts of a line": (lambda: nn.Conv1d(36, 33, 5, 1, 4, 2), (36, 2100), True),
    "a padding wider than the kernel's reach": (lambda: nn.Conv1d(32, 16, 2, 3, 1), (32, 5000), True),
    "volumes": (lambda: nn.Conv3d(8, 16, (3, 2, 3), (2, 1, 1), 1), (8, 7, 13, 21), True),
    "pixels": (lambda: nn.Conv2d(40, 24, 1), (40, 23, 29), True),
    "few pixels": (lambda: nn.Conv2d(64, 24, 3), (64, 5, 5), False),
    "every second pixel": (lambda: nn.Conv2d(64, 24, 1, 2), (64, 17, 15), False),
    "narrow": (lambda: nn.Conv2d(64, 24, 3, 2, 1), (64, 13, 13), False),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_tiles_read_the_pixels_of_a_window_in_place(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, sizes, reads = IN_PLACE[name]
    library, answers = native.library(), list[int]()
    if not isinstance(library, str):
        function = library.fxq_reads_in_place
        monkeypatch.setattr(library, "fxq_reads_in_place", lambda place: answers.append(function(place)) or answers[-1])
    model = Network(lambda s, x: F.relu(s.layer(x)), layer=make())
    for batch in (1, 9):
        assert_kernels(model, target, batch, *sizes, moves=False)
    assert not answers or set(answers) == {int(reads and bool(library.fxq_has_tiles()))}


def arranged(instructions: str, monkeypatch: pytest.MonkeyPatch) -> list[native.Sum]:
    """Let kernels use these instructions alone; return a list to which each layer's sums are appended once its weight is arranged."""
    monkeypatch.setenv(native.INSTRUCTIONS, instructions)
    library = native.library.__wrapped__()
    if isinstance(library, str):
        pytest.skip(library)
    function, structure_at, all_sums = library.fxq_arrange, native.Sum.from_address, list[native.Sum]()
    monkeypatch.setattr(
        library, "fxq_arrange", lambda place: function(place) or all_sums.append(native.Sum.from_buffer_copy(structure_at(place)))
    )
    monkeypatch.setattr(native, "library", lambda: library)
    return all_sums


@pytest.mark.parametrize(("target", "layer", "sizes", "way"), [
    ("bayes-e", nn.Linear(93, 44), (3, 25, 93), MOVED), ("x86", nn.Linear(64, 20), (5, 64), MOVED),
    ("x86", nn.Conv2d(8, 12, (2, 3), 1, 1), (2, 8, 9, 7), MOVED), ("bayes-e", nn.Conv2d(3, 21, 4, 4), (2, 3, 22, 19), MOVED),
    ("x86", nn.Sequential(nn.ReLU(), nn.Conv2d(3, 9, 7, 2, 3)), (2, 3, 13, 12), WORDS),
    ("bayes-e", nn.Sequential(nn.ReLU(), nn.Conv2d(3, 9, (3, 2), 2, 1)), (2, 3, 9, 12), BYTES),
])  # fmt: skip
def test_weights_that_are_not_proved(
    target: str, layer: nn.Module, sizes: tuple[int, ...], way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVX2 moves an operand around 128, and multiplies the excess of large pairs apart; windows leave out a channel of padding."""
    all_sums = arranged("avx2", monkeypatch)
    [*layer.modules()][-1].weight.data.sign_()  # type: ignore[union-attr, operator]
    assert_kernels(nn.Sequential(layer), target, *sizes, moves=False)
    assert not all_sums or {(sums.arranged, sums.squeezed) for sums in all_sums} == {(way, int(sizes[1] == 3))}


@pytest.mark.parametrize("instructions", ["avxvnni", "avx2"])
@pytest.mark.parametrize(("target", "ways"), [("bayes-e", [BYTES, BYTES, BYTES]), ("x86", [WORDS, BYTES, TRANSFORMED])])
def test_weights_prove_sums_in_16_bits(target: str, ways: list[int], instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX2 multiplies bytes in pairs where the sums of a layer's weights, by the operand's range, fit in 16 bits; else it widens them."""
    all_sums = arranged(instructions, monkeypatch)
    layers = [nn.Conv2d(*shape) for shape in ((3, 20, 1), (20, 16, (1, 3)), (16, 24, (3, 1)), (24, 24, 3))]
    for index, layer in enumerate(layers):  # with weights of which few are large, as in trained layers
        layer.weight.data.normal_(generator=torch.Generator().manual_seed(index)).pow_(3)
    for layer in layers[1::2]:
        layer.weight.data.sign_()  # a pair of products reaches 2 · 127 · 127, or 2 · 255 · 127
    assert_kernels(nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU()))), target, 2, 3, 12, 11, moves=False)
    if all_sums and (instructions == "avx2" or "avx_vnni" not in _flags()):
        assert [sums.arranged for sums in all_sums[1:]] == ways
        assert all_sums[1].steps == 2 * 3 * 5  # of four products each: none is split
        assert all_sums[2].steps < 1.5 * 3 * 3 * 4  # so many steps were split, where their own weights do not fit
        assert all_sums[2].runs < 0.6 * all_sums[2].steps


@pytest.mark.parametrize("target", TARGETS)
def test_linear_layers_of_more_dimensions(target: str) -> None:
    model = Network(
        lambda s, x: (
            F.relu((y := F.relu(s.conv(x))) + s.down(F.relu(s.up(y.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)),
            s.volume(s.rows(y.unsqueeze(2).permute(0, 2, 3, 4, 1))),
        ), conv=nn.Conv2d(3, 6, 3, padding=1), up=nn.Linear(6, 24), down=nn.Linear(24, 6), rows=nn.Linear(6, 5), volume=nn.Linear(5, 3),
    )  # fmt: skip
    assert_kernels(model, target, 2, 3, 5, 7)


@pytest.mark.parametrize("target", TARGETS)
def test_padding_is_part_of_a_window_and_crops_move_bytes(target: str) -> None:
    valued = target in ("nash-e", "x86")  # chips pad images, whose rank no kernel changes
    model = Network(
        lambda s, x: (
            s.last(s.causal(F.pad(x, (4, 0)))[:, :, 2:]), s.last(s.same(F.pad(y := s.wide(x), (1, 2)))[:, 1:-1, :-3]),
            s.last(torch.cat([*map(F.relu, y.chunk(2, 1))], 1)[:, 2:]), s.last((F.pad(y, (2, 1), value=1.5) if valued else y)[:, :6, ::2]),
            s.last(s.causal(F.pad(x, (1, 3)))),
        ), causal=nn.Conv1d(3, 6, 3, dilation=2), wide=nn.Conv1d(3, 8, 1), same=nn.Conv1d(8, 8, 3, padding=1), last=nn.Conv1d(6, 4, 2),
    )  # fmt: skip
    assert_kernels(model, target, 3, 3, 17)
    integer, _ = both(model, target, ordinary(3, 3, 17))
    assert [node.args[3] != 0 for node in integer.graph.nodes if node.target is shape.pad] == [True] * valued  # that of 1.5 alone


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("area", [(9,), (5, 6), (3, 4, 5)])
def test_choices_of_rows_and_of_channels_move_bytes(area: tuple[int, ...], target: str) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(area) - 1]
    model = Network(
        lambda s, x: (s.last(F.interpolate(y := s.wide(x), scale_factor=2)), s.last(y[:, [4, 0, 0, 6, 1]]), s.last(y.flip(-1))),
        wide=conv(3, 7, 1), last=Network(lambda s, x: s.five(x[:, :5]), five=conv(5, 4, 1)),
    )  # fmt: skip
    assert_kernels(model, target, 2, 3, *area)


@pytest.mark.parametrize("target", TARGETS)
def test_means_divided_by_the_elements_of_each_window(target: str) -> None:
    model = Network(
        lambda s, x: (
            F.avg_pool2d(y := s.conv(x), 3, 2, 1, count_include_pad=False), F.avg_pool2d(y, 2, 2, ceil_mode=True),
            F.avg_pool2d(y, 3, 2, 1, ceil_mode=True), F.avg_pool3d(y.unsqueeze(2), (1, 3, 3), (1, 2, 2), (0, 1, 1), False, False),
        ), conv=nn.Conv2d(3, 6, 3, padding=1),
    )  # fmt: skip
    integer, reference = both(model, target, ordinary(2, 3, 7, 9))
    assert_same(integer, reference, images(2, 3, 7, 9))
    assert_same(integer, reference, images(2, 3, 7, 9).sign() * 100)
    assert slow(integer) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("channels", "area"), [(6, ()), (1, (5,)), (67, (5, 6)), (5, (3, 4, 5))])
def test_functions_of_one_tensor_with_constants_for_each_channel_are_tables(channels: int, area: tuple[int, ...], target: str) -> None:
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(area)](channels)
    slopes, steps = nn.PReLU(channels), torch.linspace(-1, 1.5, channels)
    norm.weight.data, norm.bias.data, slopes.weight.data = steps * 2, steps - 0.1, steps
    model = Network(lambda s, x: (F.relu(s.norm(torch.sigmoid(x))), s.slopes(torch.tanh(x))), norm=norm, slopes=slopes)
    integer, reference = both(model, target, ordinary(3, channels, *area))
    assert_same(integer, reference, images(4, channels, *area))
    ways = chosen(integer)
    assert {ways[next(name for name in ways if layer in name)] for layer in ("norm", "slopes")} <= {"native table", "PyTorch's table"}


@pytest.mark.parametrize("target", TARGETS)
def test_functions_with_a_slope_for_each_channel_are_chains(target: str) -> None:
    slopes = nn.PReLU(6)
    slopes.weight.data = torch.linspace(-0.5, 1.5, 6)
    model = Network(
        lambda s, x: (s.slopes(s.conv(x)), torch.where((y := s.conv(x)) >= s.other(x), y, s.other(x)), torch.where(y < 0.25, y * 2, y)),
        conv=nn.Conv1d(3, 6, 3), other=nn.Conv1d(3, 6, 3), slopes=slopes,
    )  # fmt: skip
    integer, reference = both(model, target, ordinary(2, 3, 30))
    assert_same(integer, reference, images(2, 3, 30))
    assert_same(integer, reference, images(2, 3, 30).sign() * 100)
    assert "slopes" not in {run.layer.name for run in computed(integer) if not run.fast}


def test_a_transposed_convolution_of_a_large_stride_stays_primitives() -> None:
    integer, reference = both(nn.Sequential(nn.ConvTranspose1d(3, 8, 64, 48), nn.ReLU()), "bayes-e", ordinary(2, 3, 9))
    assert_same(integer, reference, images(2, 3, 9))
    assert any("its strides make 48 convolutions of it" in choice.because for choice in choices(integer).values())


def test_the_windows_of_a_transposed_convolution_are_those_of_convolutions() -> None:
    """A stride of 2 along both dimensions is four convolutions, each with a quarter of the taps."""
    weight = torch.arange(16).reshape(1, 1, 1, 4, 4).to(torch.int8)
    window: Any = {"stride": [1, 2, 2], "padding": [0, 1, 1], "dilation": [1, 1, 1], "groups": 1, "transposed": True}
    parts = list(Layer(weight, None, 0.0, window).convolutions((1, 8, 8)))
    assert [part.weight.flatten().tolist() for part, _ in parts] == [[15, 13, 7, 5], [14, 12, 6, 4], [11, 9, 3, 1], [10, 8, 2, 0]]
    assert [outputs[1] for _, outputs in parts] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert {tuple(outputs[0]) for _, outputs in parts} == {(1, 4, 4)}


@members(lambda: dict(conv=nn.Conv2d(3, 4, 1)))
def Compared(self, x: Tensor, index: Tensor) -> Tensor:
    """A layer whose result is kept where an integer input is less than 2."""
    return self.conv(x) * (index < 2).float()


def test_a_comparison_of_integers_that_may_have_64_bits_is_the_primitives() -> None:
    """A chain compares by the sign of a difference, which wraps there."""
    index = torch.tensor([-(2**63), 2**63 - 1, 1, 2]).reshape(4, 1, 1, 1)
    model, x = Compared().eval(), torch.randn(4, 3, 5, 5)
    prepared = fxq.calibrate(fxq.prepare(model, (x, index), "bayes-e"), [(x, index)])
    integer, reference = fxq.convert(prepared), fxq.convert(prepared, kernels="reference")
    assert torch.equal(integer(x, index), reference(x, index))
    assert torch.equal(integer(x, index)[:, 0, 0, 0] != 0, torch.tensor([True, False, True, False]))
