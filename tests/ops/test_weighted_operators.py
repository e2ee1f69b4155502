"""Geometries, paddings and computed weights that no sample has: the contract by bits, and closeness to the float model."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation, is_parameter
from fxquant.quantization.observers import MinMaxObserver
from tests.shared import contract
from tests.shared.networks import descend, to_train

Parameter = nn.Parameter
LINE, IMAGE, VOLUME = (4, 3, 9), (3, 3, 6, 7), (2, 2, 4, 5, 4)
COVERING = fxq.QConfig(output=fxq.ActivationConfig(observer=MinMaxObserver))  # no value of a few small batches is cut off


class Case(nn.Module):
    """A forward function with the modules and parameters it uses, and the shape of its input."""

    def __init__(self, shape: tuple[int, ...], function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.shape, self.function = shape, function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def layer(shape: tuple[int, ...], module: nn.Module, norm: nn.Module | None = None) -> Case:
    """A layer, and a batch norm after it."""
    return Case(shape, lambda s, x: s.norm(s.layer(x)), layer=module, norm=nn.Identity() if norm is None else norm)


def weights(*shape: int) -> Parameter:
    return Parameter(torch.randn(shape))


CASES: dict[str, Callable[[], Case]] = {
    # transposed convolution
    "conv_transpose1d, groups": lambda: layer((4, 4, 7), nn.ConvTranspose1d(4, 6, 4, 3, 1, 2, groups=2), nn.BatchNorm1d(6)),
    "conv_transpose2d, dilation": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 2, (2, 1), 1, dilation=2)),
    "conv_transpose2d, output padding of a stride": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 1, 1, (1, 0), dilation=2)),
    "conv_transpose2d, groups and dilation": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2, dilation=(1, 2))),
    "conv_transpose2d, depthwise": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 4, 4, 2, 1, groups=4)),
    "conv_transpose2d, cropped": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 4, 2, 2, 2, groups=2)),
    "conv_transpose2d, output size": lambda: Case((4, 4, 5, 6), lambda s, x: s.conv(x, (10, 11)), conv=nn.ConvTranspose2d(4, 6, 3, 2, 1)),
    "conv_transpose2d, residual": lambda: Case(
        (4, 4, 5, 6), lambda s, x: F.relu6(s.a(x) + s.b(x)), a=nn.ConvTranspose2d(4, 6, 4, 2, 1), b=nn.ConvTranspose2d(4, 6, 2, 2)
    ),
    "conv_transpose3d, groups": lambda: layer((2, 2, 3, 4, 3), nn.ConvTranspose3d(2, 4, (2, 3, 2), (1, 2, 2), (0, 1, 0), groups=2)),
    "conv_transpose2d, groups": lambda: layer(
        (4, 4, 5, 6), nn.ConvTranspose2d(4, 8, 3, (2, 3), 1, 1, groups=2, bias=False), nn.BatchNorm2d(8)
    ),
    # additions after a layer that its accumulator cannot hold
    "a multiple added": lambda: Case(IMAGE, lambda s, x: torch.add(s.a(x), x, alpha=2), a=nn.Conv2d(3, 3, 1)),
    "the layer multiplied": lambda: Case(IMAGE, lambda s, x: torch.add(x, s.a(x), alpha=0.5), a=nn.Conv2d(3, 3, 1)),
    # batch norm that follows no layer
    "batch_norm, features": lambda: Case((8, 3), lambda s, x: s.norm(x), norm=nn.BatchNorm1d(3)),
    "batch_norm, one channel": lambda: Case((8, 1, 5), lambda s, x: s.norm(x), norm=nn.BatchNorm1d(1)),
    "batch_norm, 3d and no affine": lambda: Case(
        (8, 3, 2, 2, 2), lambda s, x: s.norm(x) + s.plain(x), norm=nn.BatchNorm3d(3), plain=nn.BatchNorm3d(3, affine=False)
    ),
    "linear, three dimensions": lambda: Case((4, 3, 8), lambda s, x: s.a(x).relu() + s.b(x), a=nn.Linear(8, 5), b=nn.Linear(8, 5)),
    # matrix products
    "matmul, attention": lambda: Case((2, 3, 6, 8), lambda s, x: (s.a(x) @ s.b(x).mT) @ x, a=nn.Linear(8, 4), b=nn.Linear(8, 4)),
    "matmul, broadcast": lambda: Case((2, 3, 6, 6), lambda s, x: torch.matmul(s.a(x), x.mean(1, keepdim=True)), a=nn.Linear(6, 6)),
    "matmul, itself": lambda: Case((4, 6, 6), lambda s, x: s.a(x).matmul(s.a(x)), a=nn.Linear(6, 6)),
    "matmul, transposed parameter": lambda: Case((4, 6, 8), lambda s, x: x @ s.w.t() + torch.matmul(x, s.w.T), w=weights(5, 8)),
    "matmul, parameter on the left": lambda: Case((4, 6, 8), lambda s, x: s.w @ x, w=weights(5, 6)),
    "matmul, batch of parameters": lambda: Case((4, 3, 6, 8), lambda s, x: x @ s.w, w=weights(3, 8, 5)),
    # prelu
    "prelu, steep": lambda: Case((8, 3), lambda s, x: F.prelu(x, s.w), w=Parameter(torch.tensor([30.0, -7.0, 0.0]))),
    # reductions and extrema
    "minimum": lambda: Case((8, 3, 4), lambda s, x: torch.min(s.a(x), x.minimum(s.w)), a=nn.Linear(4, 4), w=weights(4)),
    # convolutions with every padding
    "reflect, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 5, padding=3, padding_mode="reflect"), nn.BatchNorm1d(4)),
    "replicate, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 4, 2, padding=5, padding_mode="replicate")),
    "circular, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 3, padding=2, dilation=2, padding_mode="circular")),
    "reflect, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), nn.BatchNorm2d(4)),
    "replicate, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 6, 3, 2, padding=1, groups=3, padding_mode="replicate", bias=False)),
    "circular, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 4, (2, 3), padding=(0, 4), padding_mode="circular")),
    "reflect, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, 3, padding=(1, 2, 0), padding_mode="reflect"), nn.BatchNorm3d(3)),
    "replicate, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, 2, padding=1, padding_mode="replicate")),
    "circular, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular")),
    "same, even, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 4, padding="same"), nn.BatchNorm1d(4)),
    "same, even, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 4, (2, 5), padding="same", dilation=(3, 1)), nn.BatchNorm2d(4)),
    "same, even, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, (2, 3, 4), padding="same")),
    "same, even, reflect": lambda: layer(IMAGE, nn.Conv2d(3, 4, (4, 2), padding="same", padding_mode="reflect")),
    "same, odd, circular": lambda: layer(IMAGE, nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular")),
    "valid, reflect": lambda: layer(IMAGE, nn.Conv2d(3, 4, 3, padding="valid", padding_mode="reflect")),
    "function, same": lambda: Case(LINE, lambda s, x: F.conv1d(x, s.w, s.b, padding="same"), w=weights(4, 3, 4), b=weights(4)),
    "function, same, 2d": lambda: Case(IMAGE, lambda s, x: F.conv2d(x, s.w, None, 1, "same", (1, 2)).relu(), w=weights(4, 3, 2, 3)),
    "function, valid": lambda: Case(VOLUME, lambda s, x: F.conv3d(x, s.w, padding="valid"), w=weights(4, 2, 2, 2, 2)),
    "function, same, odd": lambda: Case(VOLUME, lambda s, x: F.conv3d(x, s.w, padding="same", groups=2), w=weights(4, 1, 3, 1, 3)),
    "residual": lambda: Case(
        IMAGE,
        lambda s, x: F.relu(s.a(x) + s.b(x)),
        a=nn.Conv2d(3, 4, 2, padding="same"),
        b=nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    ),
}

COMPUTED: dict[str, Callable[[], Case]] = {
    "linear, transposed": lambda: Case((4, 8), lambda s, x: F.linear(x, s.w.t()), w=weights(8, 5)),
    "linear, product": lambda: Case(
        (4, 8), lambda s, x: F.linear(x, s.w * s.gain, s.b * 2 + 1), w=weights(5, 8), gain=weights(5, 1), b=weights(5),
    ),
    "conv, reshaped": lambda: Case(
        IMAGE, lambda s, x: s.norm(F.conv2d(x, s.w.reshape(4, 3, 2, 2))), w=weights(12, 4), norm=nn.BatchNorm2d(4),
    ),
    "conv, standardised": lambda: Case(
        IMAGE, lambda s, x: F.conv2d(x, standardised(s.w), s.b, padding="same"), w=weights(4, 3, 2, 3), b=weights(4),
    ),
    "conv transpose, permuted": lambda: Case(
        IMAGE, lambda s, x: F.conv_transpose2d(x, s.w.permute(1, 0, 2, 3), s.w.sum((1, 2, 3)), 2), w=weights(4, 3, 2, 2),
    ),
    "matmul": lambda: Case(
        (4, 6, 8), lambda s, x: x @ (s.w.T * 0.5) + torch.matmul(x, s.v.view(8, 5)), w=weights(5, 8), v=weights(40),
    ),
    "addmm": lambda: Case((4, 8), lambda s, x: torch.addmm(-s.b, x, s.w.t()), w=weights(5, 8), b=weights(5)),
    "matrix on the left": lambda: Case((4, 6, 8), lambda s, x: s.w.t() @ x, w=weights(6, 5)),
    "added": lambda: Case((4, 6), lambda s, x: x + (s.w + s.v) * x, w=weights(6), v=weights(6)),
    "prelu": lambda: Case((4, 6), lambda s, x: F.prelu(x, s.w.abs() / 4), w=weights(6)),
    "batch norm": lambda: Case(
        (4, 6), lambda s, x: F.batch_norm(x, s.mean[0], s.var.exp(), s.gain * 0.5, s.b.neg()), mean=torch.randn(2, 6), var=torch.randn(6),
        gain=weights(6), b=weights(6),
    ),
    "two parts": lambda: Case(
        (4, 8), lambda s, x: F.linear(x, s.w.split(3)[1]) + F.linear(x, s.w.chunk(2)[0]), w=weights(6, 8),
    ),
}  # fmt: skip


def standardised(weight: Tensor) -> Tensor:
    mean = weight.mean((1, 2, 3), keepdim=True)
    return (weight - mean) / (weight.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()


def built(make: Callable[[], Case], count: int = 3) -> tuple[Case, list[tuple[Tensor, ...]]]:
    """Return the case with random statistics of batch norms in place of initial ones, and `count` batches for it."""
    model = make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    nn.init.normal_(tensor)
            if module.running_var is not None:
                nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval(), [(torch.randn(model.shape),) for _ in range(count)]


def assert_contract(compiled: contract.Compiled, path: Path, batches: list[tuple[Tensor, ...]]) -> None:
    contract.assert_validate_is_integer(*compiled, *batches[0])
    other = (torch.randn(batches[0][0].shape[0] + 1, *batches[0][0].shape[1:]),)
    contract.assert_integer_is_onnx(compiled.integer, path, [batches[0], other])
    contract.assert_alive(compiled.integer, *batches[0])
    contract.assert_train_is_validate(compiled.prepared, *batches[0])
    if list(compiled.prepared.parameters()):
        contract.assert_gradients_reach_every_parameter(compiled.prepared, *batches[0])


def left_in_float(prepared: fx.GraphModule) -> list[str]:
    """The operators that stayed in float and are used."""
    specs = {node.name: annotation(node) for node in prepared.graph.nodes if node.users}
    return [name for name, spec in specs.items() if spec is not None and spec.dtype is None and not name.endswith("dequantize")]


# A case's geometry has nothing to do with the arithmetic: one target after the other.
TARGETS = {
    **dict(zip([*CASES, *COMPUTED], itertools.cycle(contract.TARGETS), strict=False)),
    "prelu, steep": "nash-e",
}  # it saturates on bayes-e


@pytest.mark.sweep(20)
@pytest.mark.parametrize(("name", "target"), TARGETS.items())
def test_contract(name: str, target: str, tmp_path: Path) -> None:
    model, batches = built({**CASES, **COMPUTED}[name])
    compiled = contract.compiled(model, batches, target, COVERING)
    assert left_in_float(compiled.prepared) == []
    assert not any(is_parameter(node) and node.op != "get_attr" for node in compiled.integer.graph.nodes), "it computes with floats"
    expected, actual = model(*batches[0]), compiled.integer(*batches[0])
    assert actual.shape == expected.shape
    assert (actual - expected).square().mean() < 0.005 * expected.var(), "far from the float model"
    assert_contract(compiled, tmp_path / "model.onnx", batches)


WIDE: dict[str, Callable[[], Case]] = {
    "transposed_convolution_wide": lambda: layer((1, 300, 4, 4), nn.ConvTranspose2d(300, 2, 5, 1)),
    "transposed_convolution_wide, groups": lambda: layer((1, 600, 3, 3), nn.ConvTranspose2d(600, 4, 5, 2, groups=2)),
    "matrix_product_wide": lambda: Case((2, 2, 1100), lambda s, x: x @ s.a(x).reshape(-1, 1100, 2), a=nn.Linear(1100, 1100)),
    "linear_wide": lambda: Case((2, 3, 6000), lambda s, x: x @ s.w, w=weights(6000, 3)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", contract.TARGETS)
@pytest.mark.parametrize("name", WIDE)
def test_wide_sums(name: str, target: str, tmp_path: Path) -> None:
    model, batches = built(WIDE[name], 1)
    compiled = contract.compiled(model, batches, target)
    assert any(getattr(node.target, "__name__", "") == name.split(",")[0] for node in compiled.integer.graph.nodes)
    assert_contract(compiled, tmp_path / "model.onnx", batches)


# ---- paddings, and weights that are computed ------------------------------------------------------------------------
def test_padded_zeros_are_zeros_and_no_other_number() -> None:
    """With a kernel that picks the last element of its window, the padding after "same" is seen by itself."""
    conv = nn.Conv1d(1, 1, 2, padding="same", bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[0.0, 1.0]]]))
    batch = torch.randn(4, 1, 6)
    integer = contract.compiled(conv, [batch], qconfig=COVERING).integer
    assert torch.equal(integer(batch)[:, :, -1], torch.zeros(4, 1))
    assert torch.equal(integer(batch)[:, :, :-1].sign(), batch[:, :, 1:].sign())


def test_a_computed_weight_is_trained_and_is_the_one_of_the_moment() -> None:
    model, batches = built(COMPUTED["linear, product"])
    prepared, _ = contract.compiled(model, batches)
    to_train(prepared)
    before = prepared.gain.detach().clone()
    descend(prepared, batches[0] * 3, 0.05)
    assert not torch.equal(before, prepared.gain)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    prepared.eval()
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, batches)
    assert not torch.equal(integer(*batches[0]), model(*batches[0]))


def test_a_weight_with_noise_is_no_parameter() -> None:
    """Random values must not become a constant, nor must dropout of a weight, which acts while training."""
    drawn = {
        "randn_like": lambda w: w + torch.randn_like(w),
        "dropout": lambda w: F.dropout(w, 0.5, False),
        "bernoulli": lambda w: torch.bernoulli(w.sigmoid()),
    }
    for name, noise in drawn.items():
        model, batches = built(lambda noise=noise: Case((4, 8), lambda s, x: F.linear(x, noise(s.w)), w=weights(5, 8)))
        assert name in left_in_float(fxq.prepare(model, batches[0]))


def test_a_margin_is_an_operator_of_its_own() -> None:
    """The padding of a layer is explained, follows the rules for its layer, and has the limits of a pad."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")).eval()
    batch = torch.randn(2, 3, 6, 6)
    prepared = fxq.prepare(model, (batch,))
    assert [node.name for node in prepared.graph.nodes if node.op == "call_module"] == ["input_1_quantize", "_0_pad", "_0"]
    assert "%_0_pad" in fxq.explain(prepared)
    for rule in (fxq.QConfigMapping().set_module_name("0", None), fxq.QConfigMapping().set_object_type(nn.Conv2d, None)):
        in_float = fxq.prepare(model, (batch,), qconfig=rule)
        assert {"_0_pad", "_0"} <= set(left_in_float(in_float))
        assert torch.equal(fxq.set_state(in_float, fxq.State.FLOAT) or in_float(batch), model(batch))
