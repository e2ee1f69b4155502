"""Kernels give the bits of the primitives they stand for, or are not used: on any sizes, at ties and ends, in threads, in copies."""

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends
from fxquant.analysis.explain import OperatorRun, operator_runs
from fxquant.backends.cpu import compiled as in_c
from fxquant.backends.cpu import native, training
from fxquant.ir.graph import fact, resolve
from fxquant.ir.integer import kernel
from fxquant.ir.model import RUNNER
from fxquant.kernels import constants
from fxquant.kernels.admission import Layer, evaluate
from fxquant.kernels.constants import EACH_CALL
from fxquant.kernels.kernel import Disagrees, Kernel, NotApplicable
from fxquant.kernels.program import Choice, Program
from fxquant.kernels.runner import MOST_PROGRAMS, Runner
from fxquant.prepared.stage import Stage
from fxquant.reporting.page import contents
from tests.shared.contract import all_equal, compiled, flat
from tests.shared.networks import Network, members
from tests.shared.programs import program, run_python

TARGETS = ("bayes-e", "nash-e", "x86", "bernoulli")
pytestmark = pytest.mark.skipif(isinstance(native.library(), str), reason="a C compiler was not found")
INT8 = fxq.QConfig(fxq.ActivationConfig("int8"))  # also of a last layer, which returns its sum by default


@members(lambda: dict(
    stem=nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    same=nn.Conv2d(16, 16, 3, 1, 1), depthwise=nn.Conv2d(16, 16, 3, 1, 1, groups=16), wide=nn.Conv2d(16, 22, 1),
    groups=nn.Conv2d(22, 12, 3, 1, 2, dilation=2, groups=2), scores=nn.Linear(28, 5),
))  # fmt: skip
def Everything(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """An operator for every kernel: sums of all kinds, maxima, tables of one tensor and of two, concatenation."""
    x = self.stem(x)
    x = F.relu(self.same(x) + x)
    x = self.depthwise(x) * torch.sigmoid(x.mean((2, 3), keepdim=True)) - x
    y = torch.cat([self.groups(F.silu(self.wide(x))), x], 1)
    return self.scores(y.mean((2, 3))), y


def images(*sizes: int, seed: int = 0) -> Tensor:
    """Return random values (float32) that include ties of the quantization, zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(sizes, generator=generator) * 2
    marks = torch.randint(0, 40, sizes, generator=generator)
    for index, number in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 0.5)):
        value[marks == index] = number
    return value


def ordinary(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(7))


def both(model: nn.Module, target: str, *batches: Tensor, qconfig: Any = None) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The integer model with kernels, and without."""
    torch.manual_seed(0)
    prepared, integer = compiled(model.eval(), batches, target, qconfig)
    return integer, fxq.convert(prepared, kernels="reference")


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "everything": (Everything, (4, 3, 18, 22)),
    "small": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), (4, 3, 8, 8)),
    "large": (lambda: nn.Sequential(nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 512)), (4, 256)),
}


@functools.cache
def _known(name: str, target: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    make, sizes = NETWORKS[name]
    return both(make(), target, ordinary(*sizes))


def known(name: str = "everything", target: str = "nash-e") -> tuple[fx.GraphModule, fx.GraphModule]:
    """One of the networks with kernels, which are chosen anew, and without."""
    integer, reference = _known(name, target)
    return copy.deepcopy(integer), reference


def runner_of(integer: fx.GraphModule) -> Runner:
    return integer.__dict__[RUNNER]


def plain_of(integer: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that runs its primitives."""
    plain = copy.deepcopy(integer)
    del plain.__dict__[RUNNER]
    return plain


def assert_same(integer: fx.GraphModule, reference: fx.GraphModule, *inputs: Tensor, runs: int = 2) -> None:
    """Bits and strides, in the first run, which is the primitives', and after it."""
    wanted = reference(*inputs)
    for _ in range(1 + runs):
        output = integer(*inputs)
        assert all_equal(output, wanted)
        assert [tensor.stride() for tensor in flat(output)] == [tensor.stride() for tensor in flat(wanted)]


def chosen(integer: fx.GraphModule) -> dict[str, str | None]:
    """The implementation at each node with a kernel."""
    return {name: choice.implementation for name, choice in choices(integer).items()}


def choices(integer: fx.GraphModule) -> dict[str, Choice]:
    """The choice at each node with a kernel."""
    return {node.name: choice for node, choice in runner_of(integer).choices(integer).items() if choice.kernel}


def slow(integer: fx.GraphModule) -> list[tuple[str, str]]:
    """The operators that run primitives, with their reasons."""
    runs = [(run.layer.name, run.because) for run in computed(integer) if not run.fast]
    assert all(because for _, because in runs)
    return runs


# ---- equal bits -----------------------------------------------------------------------------------------------------
@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
def test_a_network_of_every_kernel_has_the_bits_of_its_primitives(target: str) -> None:
    integer, reference = known(target=target)
    for batch in (1, 3):  # an odd number, too
        assert_same(integer, reference, images(batch, 3, 18, 22, seed=batch))
    assert_same(integer, reference, images(2, 3, 18, 22).contiguous(memory_format=torch.channels_last))
    assert_same(integer, reference, images(22, 18, 3, 2).permute(3, 2, 1, 0))
    assert_same(integer, reference, images(0, 3, 18, 22))
    with torch.inference_mode():
        assert_same(integer, reference, images(1, 3, 18, 22))
    report = fxq.verify(reference, integer, [ordinary(2, 3, 18, 22)])
    assert report
    assert report.pairs == ["integer = integer", "integer = kernels"]


def test_without_a_compiler_the_primitives_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("library", "chains_library"):
        monkeypatch.setattr(native, name, lambda: "a C compiler was not found")
    integer, reference = known(target="bayes-e")
    assert_same(integer, reference, images(3, 3, 18, 22))
    assert set(chosen(integer).values()) <= {None, "moved bytes"}


def test_constants_and_inputs_are_returned_by_every_run() -> None:
    anchors = torch.arange(6.0).view(2, 3)
    returning = Network(lambda s, x: (s.anchors, s.conv(x), x, s.anchors), conv=nn.Conv2d(3, 4, 3), anchors=nn.Buffer(anchors.clone()))
    integer, reference = both(returning, "bayes-e", ordinary(2, 3, 6, 6))
    assert_same(integer, reference, images(2, 3, 6, 6), runs=3)
    assert torch.equal(integer(images(2, 3, 6, 6))[0], anchors)


def sums_of_products(
    channels: int, out: int, size: Any, taps: Any, stride: Any, padding: Any, dilation: Any, kind: str, target: str, batch: int,
    bias: bool, clamp: bool, signed: bool, instructions: str,
) -> None:  # fmt: skip
    """A layer has the bits of its primitives in the kernels of a set of instructions, also where each operand is at an end of its range."""
    reach = [around * 2 + length - spread * (tap - 1) for around, length, spread, tap in zip(padding, size, dilation, taps, strict=True)]
    if min(reach) < 1:
        return
    groups = {"plain": 1, "depthwise": channels, "groups": 2}[kind]
    channels, out = (channels, channels) if kind == "depthwise" else (channels * groups, out * groups)
    conv = nn.Conv2d(channels, out, taps, stride, padding, dilation, groups, bias)
    with torch.no_grad():
        conv.weight[0] = conv.weight[0].sign()  # sums as large as they can be
    model = nn.Sequential(*[nn.ReLU()] * (not signed), conv, *[nn.ReLU()] * clamp)
    with pytest.MonkeyPatch.context() as patch:
        limited = limited_to(instructions)
        patch.setattr(native, "library", lambda: limited)
        integer, reference = both(model, target, ordinary(2, channels, *size))
        x = images(batch, channels, *size)
        assert_same(integer, reference, x, runs=1)
        assert_same(integer, reference, x.sign() * 100, runs=1)
        assert [name for name, choice in choices(integer).items() if choice.disagrees] == []


@functools.cache
def limited_to(instructions: str, compiled: Callable[[], Any] = native.library.__wrapped__) -> Any:
    """The kernels in C for a set of instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.INSTRUCTIONS, instructions)
        return compiled()


random_layers = given(
    channels=st.integers(1, 20), out=st.integers(1, 40), size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)), stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    kind=st.sampled_from(("plain", "depthwise", "groups")), target=st.sampled_from(TARGETS), batch=st.integers(1, 3),
    bias=st.booleans(), clamp=st.booleans(), signed=st.booleans(), instructions=st.sampled_from([*native.LIMITS]),
)  # fmt: skip
test_sums_of_products = settings(max_examples=12, deadline=None)(random_layers(sums_of_products))
test_many_sums_of_products = pytest.mark.nightly(settings(max_examples=300, deadline=None)(random_layers(sums_of_products)))


@settings(max_examples=5, deadline=None)
@given(rows=st.integers(1, 7), inner=st.integers(1, 70), outer=st.integers(1, 70), target=st.sampled_from(TARGETS), last=st.booleans())
def test_linear_layers(rows: int, inner: int, outer: int, target: str, last: bool) -> None:
    model = nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, 3))
    qconfig = fxq.QConfigMapping().set_module_name("2", fxq.QConfig(fxq.ActivationConfig("int32"))) if last else None
    integer, reference = both(model, target, ordinary(5, inner), qconfig=qconfig)
    assert_same(integer, reference, images(rows, inner), runs=1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("x86", "int4"), ("nash-e", "int4"), ("x86", "int8")])
def test_affine_tensors_and_narrow_ones(target: str, dtype: str) -> None:
    integer, reference = both(Everything(), target, ordinary(4, 3, 18, 22), qconfig=fxq.QConfig(fxq.ActivationConfig(dtype)))
    assert_same(integer, reference, images(2, 3, 18, 22), runs=1)


def test_what_runs_on_the_host_has_the_strides_it_had() -> None:
    mixed = Network(
        lambda s, x: s.second(torch.erfinv(torch.tanh(s.first(x)) * 0.5).cumsum(3)), first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 4, 3)
    )
    mapping = fxq.QConfigMapping().set_module_name("second", None)
    integer, reference = both(mixed, "nash-e", ordinary(2, 3, 9, 9), qconfig=mapping)
    assert_same(integer, reference, ordinary(2, 3, 9, 9))
    assert_same(integer, reference, ordinary(2, 3, 9, 9).contiguous(memory_format=torch.channels_last))


class Pair(NamedTuple):
    """A named tuple that a model returns."""

    first: Tensor
    rest: dict[str, Any]


def test_what_is_returned_has_the_same_containers() -> None:
    returns = Network(lambda s, x: Pair(y := s.conv(x), {"list": [y, x], "tuple": (y, None, 3)}), conv=nn.Conv2d(3, 4, 1))
    integer, reference = both(returns, "nash-e", ordinary(2, 3, 5, 5))
    for _ in range(3):
        actual, wanted = integer(ordinary(2, 3, 5, 5)), reference(ordinary(2, 3, 5, 5))
        assert type(actual) is type(wanted)
        kinds = [[type(part) for part in (each.rest, each.rest["list"], each.rest["tuple"])] for each in (actual, wanted)]
        assert kinds[0] == kinds[1] == [dict, list, tuple]
        assert all_equal(actual, wanted)


@members(lambda: dict(
    stem=nn.Conv1d(3, 32, 5, 2, 2), same=nn.Conv1d(32, 32, 3, padding=2, dilation=2), depthwise=nn.Conv1d(32, 32, 5, padding=2, groups=32),
    groups=nn.Conv1d(32, 24, 3, 1, 1, groups=2), largest=nn.MaxPool1d(3, 2, 1), mean=nn.AvgPool1d(2), scores=nn.Linear(56, 5),
))  # fmt: skip
def Sequences(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """An operator for every kernel, on sequences (N, C, L)."""
    x = self.largest(F.relu(self.stem(x)))
    x = F.relu(self.same(x) + x)
    x = self.depthwise(x) * torch.sigmoid(x.mean(2, keepdim=True)) - x
    y = torch.cat([self.groups(F.silu(x)), x], 1)
    return self.scores(self.mean(y).mean(2)), y


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", TARGETS)
def test_a_network_of_sequences_has_the_bits_of_its_primitives(target: str) -> None:
    integer, reference = both(Sequences(), target, ordinary(4, 3, 90))
    for batch in (1, 3):
        assert_same(integer, reference, images(batch, 3, 90, seed=batch))
    assert_same(integer, reference, images(90, 3, 2).permute(2, 1, 0))
    kernels = {kernel for choice in choices(integer).values() if choice.implementation is not None and (kernel := choice.kernel)}
    assert kernels == {each.name for each in backends.kernels()} - {"dynamic layer", "loop", "product", "recurrence"}
    assert [name for name, choice in choices(integer).items() if choice.disagrees] == []


def test_a_linear_layer_and_a_convolution_of_one_sequence() -> None:
    """One has its channels last, the other as dimension 1."""
    both_kinds = Network(
        lambda s, x: s.conv(y := F.relu(s.first(x))) + s.second(y), first=nn.Linear(12, 20), second=nn.Linear(20, 20),
        conv=nn.Conv1d(12, 12, 3, padding=1),
    )  # fmt: skip
    integer, reference = both(both_kinds, "bayes-e", ordinary(4, 12, 12))
    assert_same(integer, reference, images(2, 12, 12))
    because = [choice.because for choice in choices(integer).values()]
    assert any("held with another dimension" in each for each in because)


@members(lambda width=24, heads=3: dict(
    heads=heads, norm=nn.LayerNorm(width), three=nn.Linear(width, 3 * width), out=nn.Linear(width, width), wide=nn.Linear(width, 2 * width),
    narrow=nn.Linear(2 * width, width), last=nn.LayerNorm(width),
))  # fmt: skip
def Attention(self, x: Tensor) -> Tensor:
    """A block of a transformer: products of activations, softmax, normalization, GELU."""
    q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.three(self.norm(x)).chunk(3, 2))
    scores = torch.softmax(q @ k.transpose(2, 3) * 0.35, 3)
    x = self.out((scores @ v).transpose(1, 2).flatten(2)) + x
    return self.last(self.narrow(F.gelu(self.wide(x))) + x)


@pytest.mark.sweep
@pytest.mark.parametrize("instructions", ["", "vnni", "avx2"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_block_of_a_transformer_has_the_bits_of_its_primitives(target: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.INSTRUCTIONS, instructions)
    limited = native.library.__wrapped__()
    monkeypatch.setattr(native, "library", lambda: limited)
    integer, reference = both(Attention(), target, ordinary(4, 21, 24))
    for batch in (1, 3):
        assert_same(integer, reference, images(batch, 21, 24, seed=batch).nan_to_num(0, 3, -3), runs=1)
    assert_same(integer, reference, ordinary(24, 21, 2).permute(2, 1, 0))
    assert [name for name, choice in choices(integer).items() if choice.disagrees] == []
    if not isinstance(limited, str) and limited.fxq_has_sums_of_products():
        used = [choice.implementation for choice in choices(integer).values()]
        assert used.count("native product") == 2
        assert used.count("native elementwise chain") + used.count("native program on rows") > 3
        assert None not in used


def test_a_long_chain_is_matched_without_recursion() -> None:
    """As many elementwise primitives of 16 bits, each after the other, as a recurrence of a hundred steps has."""

    def repeated(_: Any, x: Tensor) -> Tensor:
        y = x
        for _ in range(150):
            y = y * 0.9 + x
        return y

    integer, reference = both(Network(repeated), "bayes-e", ordinary(2, 8), qconfig=fxq.QConfig(fxq.ActivationConfig("int16")))
    assert_same(integer, reference, images(2, 8).nan_to_num(0, 3, -3), runs=1)
    used = {choice.implementation for choice in choices(integer).values() if choice.kernel == "chain"}
    assert used == {"native elementwise chain"}


def test_integers_of_other_signs_are_multiplied() -> None:
    """Operands that hold the ends of their dtypes, of which one is not negative, and products over more than one block of channels."""
    for target in ("bayes-e", "x86"):
        products = Network(lambda s, x, y: (torch.relu(x) @ y, y @ torch.relu(x), x @ torch.relu(y)))
        integer, reference = both(products, target, (ordinary(2, 3, 37, 37), ordinary(3, 37, 37).expand(2, 3, 37, 37)))
        x, y = images(2, 3, 37, 37).sign() * 9, images(2, 3, 37, 37, seed=1).sign() * 9
        assert_same(integer, reference, x, y, runs=1)
        assert_same(integer, reference, x.mT, y.mT, runs=1)
        assert [name for name, choice in choices(integer).items() if choice.disagrees] == []
        centred = {len(how[1]) for node in integer.graph.nodes if (how := kernel(node)) and how[0] == "product"}
        assert centred == ({3} if target == "x86" else {1})  # with both operands less their zero points


@members(lambda: dict(
    first=nn.Conv2d(70, 40, 3, 1, 1), strided=nn.Conv2d(40, 33, (3, 2), 2), groups=nn.Conv2d(40, 72, 3, 1, 2, dilation=2, groups=2),
    pointwise=nn.Conv2d(72, 40, 1), scores=nn.Linear(33, 100),
))  # fmt: skip
def Deep(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of products that are large enough for tiles: of any window, stride, group and number of pixels."""
    x = F.relu(self.first(x))
    x = F.relu(self.pointwise(F.relu(self.groups(x))) + x)
    return self.scores(self.strided(x).flatten(2).transpose(1, 2)), x


@pytest.mark.sweep(2)
@pytest.mark.parametrize("instructions", list(native.LIMITS))
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_every_set_of_instructions_gives_the_same(target: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.INSTRUCTIONS, instructions)
    limited = native.library.__wrapped__()
    if isinstance(limited, str):
        pytest.skip(limited)
    monkeypatch.setattr(native, "library", lambda: limited)
    has = _flags()
    assert bool(limited.fxq_has_dot_products()) is ("avx512_vnni" in has and not instructions.startswith("avx"))
    assert bool(limited.fxq_has_sums_of_products()) is ("avx2" in has)
    assert limited.fxq_has_tiles() <= ("amx_int8" in has and not instructions)  # a system may not permit them
    for model, sizes in ((Deep(), (70, 17, 13)), (Everything(), (3, 18, 22))):
        integer, reference = both(model, target, ordinary(2, *sizes))
        for batch in (1, 5):
            assert_same(integer, reference, images(batch, *sizes), runs=1)
            assert_same(integer, reference, images(batch, *sizes).sign() * 100, runs=1)
        assert [name for name, choice in choices(integer).items() if choice.disagrees] == []
        assert ("native convolution" in chosen(integer).values()) is bool(limited.fxq_has_sums_of_products())


def _flags() -> set[str]:
    """The instructions of this processor, as Linux names them."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


@pytest.mark.parametrize(
    ("name", "value", "right"), [(native.INSTRUCTIONS, "avx9", "'vnni', 'avxvnni', 'avx2'"), (native.SWITCH, "nope", "no")]
)
def test_what_the_environment_cannot_mean_is_an_error(name: str, value: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(fxq.errors.ConfigurationError, match=f"{name}='{value}' is not usable[\\s\\S]*{right}"):
        native.library.__wrapped__()


# ---- admission ------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli", "bernoulli2", "nash-e", "x86"])
def test_layers_after_a_clamp_at_zero_are_proved_for_integers_that_they_read(target: str) -> None:
    """Their operands hold no negative integers, so an operand drawn for the proof must hold none either: no byte stands for one."""
    limited = Network(
        lambda s, x: (
            s.pool(y := F.relu6(s.stem(x))), s.groups(z := s.depthwise(y).clamp(0, 3)), s.scores(F.relu(s.add(z) + y).mean((2, 3))),
        ), stem=nn.Conv2d(3, 16, 3, padding=1), depthwise=nn.Conv2d(16, 16, 3, padding=1, groups=16), groups=nn.Conv2d(16, 8, 3, groups=2),
        add=nn.Conv2d(16, 16, 1), scores=nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)), pool=nn.MaxPool2d(2),
    )  # fmt: skip
    integer, reference = both(limited, target, ordinary(2, 3, 12, 12))
    assert_same(integer, reference, images(2, 3, 12, 12))
    assert len(choices(integer)) > 8
    assert [name for name, choice in choices(integer).items() if choice.disagrees or choice.implementation is None] == []


class Wrong:
    """A kernel that runs the primitives themselves and is wrong for some operands: it computes `change(honest, zero)`."""

    reads_held, strided = True, False

    def __init__(self, name: str, change: Callable[[Any, int], Callable[[Any, Tensor], None]]) -> None:
        self.name, self.change = name, change

    def build(self, site: Any) -> Any:
        (read,) = site.match.reads

        def honest(inputs: Any, output: Tensor) -> None:
            form = site.held(read).of(inputs[0])
            value = form.plain(inputs[0], fact(read).dtype, torch.empty(form.sizes).stride())
            site.result().of(output).pack(evaluate(site.model, site.match, {read: value})[0], output)

        return SimpleNamespace(bind=lambda: self.change(honest, site.held(read).zero))


def saturates(honest: Any, zero: int) -> Callable[[Any, Tensor], None]:
    """Where an operand is at the end of its range, as sums of 16 bits do."""
    return lambda inputs, output: honest([inputs[0].clamp(1)], output)


def saturates_at_pairs(honest: Any, zero: int) -> Callable[[Any, Tensor], None]:
    """For two neighbouring largest integers and zeros else: sums of pairs saturate there, and no limit of the output hides it."""

    def wrong(inputs: Any, output: Tensor) -> None:
        honest(inputs, output)
        pairs, others = inputs[0][:, :2] == 255, inputs[0][:, 2:] == zero
        output[pairs.all(1) & others.all(1)] += 1

    return wrong


def only(*implementations: Any) -> tuple[Kernel, ...]:
    return tuple(Kernel(each.name, each.match, implementations if each.name == "sum of products" else ()) for each in backends.kernels())


@pytest.mark.parametrize(
    ("wrong", "layer", "target", "actual", "x"),
    [
        (Wrong("saturating", saturates), nn.Conv2d(3, 8, 3), "nash-e", ordinary(2, 3, 9, 9), images(2, 3, 9, 9)),
        (Wrong("saturating", saturates_at_pairs), nn.Linear(4, 4), "bayes-e", ordinary(2, 4), torch.tensor([[10.0, 10.0, 0.0, 0.0]])),
    ],
    ids=["operands at their ends", "pairs of the largest integer"],
)
@pytest.mark.disagrees
def test_an_implementation_that_is_wrong_is_not_admitted_and_explain_says_so(
    wrong: Wrong, layer: nn.Module, target: str, actual: Tensor, x: Tensor,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(backends, "KERNELS", only(wrong))
    integer, reference = both(copy.deepcopy(layer), target, actual, qconfig=INT8)
    assert_same(integer, reference, x)
    runner_of(integer).reset()  # kernels are proved again
    assert_same(integer, reference, x)
    (node,) = (name for name, choice in choices(integer).items() if choice.disagrees == ("saturating",))
    (warning,) = (record.getMessage() for record in caplog.records if "saturating" in record.getMessage())  # one for both proofs
    assert f"the kernel 'saturating' is not used for %{node}, because it differs from the primitives in" in warning
    assert [each[:2] for each in contents(integer, None, {}, [], "")["disagreements"]] == [[f"%{node}", "the kernel 'saturating'"]]
    assert contents(reference, None, {}, [], "")["disagreements"] == []
    assert f"%{node}" in fxq.report(integer, tmp_path / "page.html").read_text(encoding="utf-8").split('"disagreements":')[1][:40]
    assert [run.layer.name for run in operator_runs(integer) if run.disagrees] == [node]
    assert set(chosen(integer).values()) == {None}
    told = "runs its primitives: the kernel for a sum of products is not used (saturating: it differs from the primitives"
    assert told in fxq.explain(integer)


@pytest.mark.disagrees
def test_counting_that_differs_from_that_of_pytorch_is_recorded_like_a_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signed = training.NativeCounting.signed
    monkeypatch.setattr(training.NativeCounting, "signed", lambda *arguments: signed(*arguments).roll(1))
    assert not any(training._admitted.__wrapped__() for _ in range(2))
    assert caplog.text.count("the counting of observers in C is not used for histograms, because it differs from torch.histc in") == 1
    assert contents(known()[0], None, {}, [], "")["disagreements"][0][0] == "histograms"


FAULT = program("kernels_fault")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("mark", "change", "status", "told"),
    [
        ("", "kernels.saturates", 1, "the kernel 'saturating' at %conv2d: it differs from the primitives"),
        ("@pytest.mark.disagrees", "kernels.saturates", 0, "1 passed"),
        ("@pytest.mark.disagrees", "lambda honest, zero: honest", 1, "no implementation disagreed"),
    ],
)
def test_pytest_fails_where_an_implementation_disagrees_that_no_test_planted(
    mark: str, change: str, status: int, told: str, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "test_fault.py").write_text(FAULT.format(mark=mark, change=change), encoding="utf-8")
    settings = "-q", "-p", "no:xdist", "-p", "tests.conftest", "--rootdir", str(root), "-c", str(root / "pyproject.toml")
    done = run_python("-m", "pytest", *settings, str(tmp_path / "test_fault.py"), folder=root, OMP_NUM_THREADS="1")
    assert done.returncode == status, done.stdout + done.stderr
    assert told in done.stdout


def convolution_in_c(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The site at which the model's 4-channel convolution gets its kernel in C. Skips the test where no kernel in C is built."""
    sites: list[Any] = []
    integer, _ = both(model, "bayes-e", ordinary(2, 4, 9, 9), qconfig=INT8)
    build = in_c.convolution.build
    with monkeypatch.context() as patched:
        patched.setattr(in_c.convolution, "build", lambda site: (sites.append(site), build(site))[1])
        integer(images(1, 4, 9, 9)), integer(images(1, 4, 9, 9))
    if not sites:
        pytest.skip("no kernel in C here")
    return sites[0]


def kernel_in_c(site: Any) -> Any:
    """The kernel of a site. Skips the test where the processor has none."""
    try:
        return in_c.convolution.build(site)
    except NotApplicable as refused:
        pytest.skip(str(refused))


def too_late(built: Any, result: int, late: int) -> Callable[[Tensor], Tensor]:
    """A requantization one of whose results begins that many sums too late."""

    def wrong(sums: Tensor) -> Tensor:
        actual, later = (built.requantized(each).to(torch.int64) for each in (sums, sums - late))
        return torch.where(actual == result, later, actual)

    return wrong


@pytest.mark.parametrize("shifted", [False, True])
def test_a_requantization_is_compared_where_its_steps_are(shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong for one sum of 2^20, which operands at random would not find; with a first shift also from a step to its next multiple."""
    model = nn.Conv2d(4, 4, 1)
    if shifted:
        model.weight.data.mul_(torch.rand_like(model.weight) + 0.5)
    site = convolution_in_c(model, monkeypatch)
    layer, built = Layer.of(site), kernel_in_c(site)
    layer.prove_requantization(site, built.requantized)
    shift = int(site.constant(site.match.root.args[1]).max())
    assert shift > 1 or not shifted
    for result, late in ((130, 1), (130, 2**shift - 1)) if shifted else ((200, 1),):
        with pytest.raises(Disagrees, match="requantization differs"):
            layer.prove_requantization(site, too_late(built, result, late))


def test_the_compared_sums_stand_on_both_sides_of_every_step_after_a_first_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with all possible sums: wherever the result changes, the sums before and after the change are compared ones."""
    site = convolution_in_c(nn.Conv2d(4, 4, 1), monkeypatch)
    layer, root = Layer.of(site), site.match.root
    constants = [site.constant(node) if isinstance(node, fx.Node) else node for node in root.args[1:]]
    largest = int(layer.largest)
    sums = torch.arange(-largest, largest + 1, dtype=torch.int32)[:, None].expand(-1, 4)
    results = root.target(sums[..., None, None], *constants)[..., 0, 0]
    compared = layer._steps(site)
    for channel in range(4):
        changes = torch.nonzero(results[1:, channel] != results[:-1, channel]).flatten()
        assert len(changes) > 100
        below = sums[changes, channel]
        assert bool(torch.isin(below, compared[:, channel]).all())
        assert bool(torch.isin(below + 1, compared[:, channel]).all())


def test_explain_tells_of_the_machine_when_asked() -> None:
    integer, reference = known()
    assert "runs the kernel" not in fxq.explain(integer)
    told = fxq.explain(integer, machine=True)
    assert told.count("the kernel for a") == sum(kernel(node) is not None for node in integer.graph.nodes)
    assert "runs its primitives: it runs the primitives without kernels" in fxq.explain(reference, machine=True)


def computed(integer: fx.GraphModule) -> list[OperatorRun]:
    """Return the operators between the boundaries, without operators that only move memory."""
    return [run for run in operator_runs(integer) if not run.layer.boundary and not run.moves]


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_explain_has_a_reason_for_every_operator_without_a_kernel(target: str) -> None:
    several = Network(
        lambda s, x, y: (
            s.volume(s.plane(x).unsqueeze(2)).mean((2, 3, 4)), s.uneven(x), torch.matmul(x, x), x.amax(1), torch.cat([x, x], 2),
            s.up(x).float().cumsum(1), F.adaptive_avg_pool2d(s.plane(x), 4), s.recurrent(s.line(y).transpose(1, 2))[0],
        ), line=nn.Conv1d(3, 4, 3), plane=nn.Conv2d(3, 4, 3), volume=nn.Conv3d(4, 4, 1), recurrent=nn.LSTM(4, 4, batch_first=True),
        uneven=nn.AvgPool2d(3, 2, 1, count_include_pad=False), up=nn.ConvTranspose2d(3, 4, 2, 2),
    )  # fmt: skip
    integer, _ = both(several, target, (ordinary(2, 3, 8, 8), ordinary(2, 3, 7)))
    lines = {line.split()[0]: line for line in fxq.explain(integer, machine=True).split("\n\n")[1].splitlines()}
    runs = operator_runs(integer)
    assert [run.layer.name for run in runs if f"%{run.layer.name}" not in lines] == []
    assert [run.layer.name for run in runs if not run.fast and not run.moves and run.because not in lines[f"%{run.layer.name}"]] == []
    expected = {"no kernel computes transform", "it joins along another dimension than the channels"}
    assert {run.because for run in runs} >= expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", TARGETS)
def test_means_over_windows_and_images_have_kernels(target: str) -> None:
    means = Network(
        lambda s, x: (s.window(y := s.conv(x)), s.strided(y), s.around(y), F.adaptive_avg_pool2d(y, 2), y.mean((2, 3)), s.wide(x)),
        conv=nn.Conv2d(3, 6, 3, padding=1), window=nn.AvgPool2d(2), strided=nn.AvgPool2d((3, 2), (1, 2)), around=nn.AvgPool2d(3, 2, 1),
        wide=nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    integer, reference = both(means, target, ordinary(2, 3, 8, 10))
    assert_same(integer, reference, images(3, 3, 8, 10))
    assert_same(integer, reference, images(3, 3, 8, 10).sign() * 100)
    assert slow(integer) == []


@pytest.mark.sweep
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("channels", [3, 8])
def test_sums_that_are_outputs_have_kernels_whatever_their_channels(target: str, channels: int) -> None:
    """A pixel of three channels is padded in bytes, of a residual, and in accumulators alike."""
    sums = Network(
        lambda s, x: (x + s.plain(x), x + s.depthwise(x), s.alone(x), F.relu(s.clamped(x)), s.scores(x.mean((2, 3)))),
        plain=nn.Conv2d(channels, channels, 3, padding=1), depthwise=nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        alone=nn.Conv2d(channels, channels, 3, groups=channels), clamped=nn.Conv2d(channels, 5, 1), scores=nn.Linear(channels, 3),
    )  # fmt: skip
    x = ordinary(2, channels, 6, 7)
    layers = [name for name, _ in sums.eval().named_children()]
    qconfig = fxq.QConfigMapping()
    for name in layers:
        qconfig = qconfig.set_module_name(name, fxq.QConfig(fxq.ActivationConfig("int32")))
    integer, reference = both(sums, target, x, qconfig=qconfig)
    assert_same(integer, reference, images(3, channels, 6, 7))
    wide = [run for run in computed(integer) if run.layer.dtype == "int32"]
    assert len(wide) == len(layers)
    assert [(run.layer.name, run.macs) for run in wide] == [(run.layer.name, run.layer.macs) for run in wide]
    assert {run.because for run in wide} == {"", "no kernel computes clamp_accumulator"}


# ---- the graph, files, copies, threads --------------------------------------------------------------------------------
def test_the_stage_and_the_reference_graph() -> None:
    fused, reference = known()
    assert (fused.meta["stage"], reference.meta["stage"]) == ("FUSED", "INTEGER")
    assert Stage.FUSED > Stage.INTEGER
    assert [node.format_node() for node in fused.graph.nodes] == [node.format_node() for node in reference.graph.nodes]
    assert all(kernel(node) is None for node in reference.graph.nodes)
    kernels = {each.name for each in backends.kernels()} - {"dynamic layer", "loop", "product", "recurrence", "rows"}  # which others hold
    assert {name for node in fused.graph.nodes if (name := (kernel(node) or ("",))[0])} == kernels
    assert "# kernel: sum of products" in fxq.text(fused)


def test_a_file_holds_the_primitives_and_kernels_are_fused_when_it_is_loaded(tmp_path: Path) -> None:
    integer, reference = known(target="bayes-e")
    one, other = fxq.save(integer, tmp_path / "fused.fxq"), fxq.save(reference, tmp_path / "reference.fxq")
    assert one.read_bytes() == other.read_bytes()
    loaded = fxq.load(one)
    assert loaded.meta["stage"] == "FUSED"
    for form in (loaded, integer):
        assert_same(form, reference, images(2, 3, 18, 22))
    assert set(chosen(loaded).values()) == set(chosen(integer).values())


def test_copies_run_on_their_own_and_follow_their_constants() -> None:
    integer, reference = known()
    x = images(2, 3, 18, 22)
    before = integer(x)
    assert_same(integer, reference, x)
    for other in (copy.deepcopy(integer), copy.copy(integer), pickle.loads(pickle.dumps(integer))):
        assert other.__dict__[RUNNER] is not integer.__dict__[RUNNER]
        assert_same(other, reference, x)
    changed = copy.deepcopy(integer)
    changed(x), changed(x)
    node = next(node for node in changed.graph.nodes if node.name == "same_bias")
    resolve(changed, str(node.target)).add_(2000)  # in place
    plain = plain_of(changed)
    assert not all_equal(plain(x), before)
    assert_same(changed, plain, x)
    *path, name = str(node.target).split(".")
    holder = resolve(changed, ".".join(path))
    setattr(holder, name, getattr(holder, name) - 2000)  # another tensor
    assert_same(changed, integer, x)
    assert_same(integer, reference, x)


MORE = images(MOST_PROGRAMS + 4, 3, 8, 8)  # sizes than are remembered


@pytest.mark.parametrize(
    ("name", "batches", "places"),
    [
        ("everything", [images(1 + index % 3, 3, 18, 22, seed=index) for index in range(6)], range(12)),
        ("small", [MORE[:size] for size in range(1, len(MORE) + 1)], [step // 2 for step in range(60)]),
    ],
    ids=["a model at once", "more sizes than are remembered"],
)
def test_several_threads_run(name: str, batches: list[Tensor], places: Sequence[int]) -> None:
    integer, reference = known(name, "bayes-e")
    wanted = [reference(batch) for batch in batches]

    def run(first: int) -> bool:
        turns = [(first * 5 + place) % len(batches) for place in places]
        return all(all_equal(integer(batches[index]), wanted[index]) for index in turns)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


@pytest.mark.nightly
def test_any_number_of_threads_gives_the_same() -> None:
    integer, reference = known()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert_same(integer, reference, images(5, 3, 18, 22))
    finally:
        torch.set_num_threads(1)


def test_what_is_traced_or_transformed_runs_the_primitives() -> None:
    integer, reference = both(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "nash-e", ordinary(2, 3, 9, 9))
    x = ordinary(2, 3, 9, 9)
    assert_same(integer, reference, x)
    assert all_equal(torch.compile(integer, backend="eager")(x), reference(x))
    assert all_equal(torch.func.vmap(integer)(x[None])[0], reference(x))


@pytest.mark.parametrize(("off", "on"), [("0", "1"), ("false", "True"), ("no", "yes"), ("OFF", "on"), ("0", "")])
def test_the_switch_leaves_out_what_is_compiled(off: str, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, off)
    assert native.library.__wrapped__() == f"FXQUANT_NATIVE is {off}"
    monkeypatch.setenv(native.SWITCH, on)
    monkeypatch.setenv("PATH", "")
    native._say_once.cache_clear()
    assert native.library.__wrapped__() == "a C compiler was not found"


# ---- sizes that are remembered --------------------------------------------------------------------------------------
def test_more_sizes_than_are_remembered_come_again_and_again() -> None:
    integer, reference = known("small")
    runner = runner_of(integer)
    x = MORE
    wanted = [reference(x[:size]) for size in range(len(x) + 1)]
    for _ in range(3):
        for size in range(1, len(x) + 1):
            assert torch.equal(integer(x[:size]), wanted[size])
    for size in [*range(1, 18), *range(17, 0, -1), 1, 1, 3, 3, *range(1, 18)]:
        assert torch.equal(integer(x[:size]), wanted[size])
    strided = [torch.empty_strided((2, 3, 8, 8), (200 + index, 64, 8, 1)).copy_(x[:2]) for index in range(40)]
    assert all(torch.equal(integer(each), wanted[2]) for each in strided)
    assert len(runner.programs) == MOST_PROGRAMS
    integer(x[:3]), integer(x[:3])
    assert isinstance(next(reversed(runner.programs.values())), Program)


def test_what_was_chosen_for_sizes_is_bounded() -> None:
    """Rows of a reshaped tensor that grow with the batch are sizes of their own for a proof."""
    rows = Network(lambda s, x: s.second(torch.relu(s.first(x).permute(1, 0, 2))), first=nn.Linear(6, 8), second=nn.Linear(8, 4))
    integer, reference = both(rows, "nash-e", ordinary(4, 5, 6))
    for size in range(1, 40):
        x = images(size, 5, 6)
        assert_same(integer, reference, x, runs=2)
    kernels = sum(kernel(node) is not None for node in integer.graph.nodes)
    assert 0 < len(runner_of(integer).chosen) <= MOST_PROGRAMS * kernels


# ---- constants that are written to ----------------------------------------------------------------------------------
EDITS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda constant: constant.neg_(), "data": lambda constant: constant.data.copy_(-constant.data),
    "another data": lambda constant: setattr(constant, "data", -constant.data),
    "inference mode": lambda constant: torch.inference_mode()(constant.neg_)(),
    "NumPy": lambda constant: np.negative(constant.numpy(), out=constant.numpy()), "detached": lambda constant: constant.detach().neg_(),
    "one element": lambda constant: constant.data.view(-1)[7:8].add_(1),
    "shared memory": lambda constant: torch.empty(0, dtype=constant.dtype).set_(constant.untyped_storage()).neg_(),
    "DLPack": lambda constant: torch.utils.dlpack.from_dlpack(constant.detach()).neg_(),
    "strides": lambda constant: setattr(constant, "data", constant.data.as_strided(constant.shape, (27, 9, 1, 3))),
    "the same memory again": lambda constant: [setattr(constant, "data", -constant.data), setattr(constant, "data", constant.data + 0)],
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize("edit", EDITS)
def test_kernels_follow_every_edit_of_a_constant(edit: str) -> None:
    integer, _ = known("small")
    x = images(2, 3, 8, 8)
    before = integer(x)
    integer(x), integer(x)
    constant = next(buffer for buffer in integer.buffers() if buffer.dtype == torch.int8 and buffer.shape[1:] == (3, 3, 3))
    with torch.no_grad():
        EDITS[edit](constant)
    if edit == "strides":
        for _ in range(len(list(integer.buffers()))):  # one tensor is compared in each call
            integer(x)
    wanted = plain_of(integer)(x)
    assert not torch.equal(wanted, before)
    assert torch.equal(integer(x), wanted)
    assert torch.equal(integer(x), wanted)


def large() -> tuple[fx.GraphModule, Tensor, Tensor]:
    """An integer model with more constants than one call looks at, its input, and the weight of its second layer."""
    integer, _ = known("large")
    weight = next(buffer for buffer in integer.buffers() if buffer.dtype == torch.int8 and buffer.shape == (512, 300))
    assert weight.nbytes > 2 * EACH_CALL
    return integer, ordinary(2, 256), weight


@pytest.mark.parametrize("compiler", [True, False])
def test_an_edit_of_one_element_of_a_large_constant_is_found_by_turns(
    compiler: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not compiler:
        monkeypatch.setattr(constants.WATCHES, "known", [])
    integer, x, weight = large()
    integer(x), integer(x)
    weight.data[200, 100] ^= 64
    for _ in range(8):
        integer(x)
    assert len(caplog.records) == 1
    assert "Write to it under torch.no_grad()" in caplog.text
    assert torch.equal(integer(x), plain_of(integer)(x))


@pytest.mark.parametrize("look", ["save", "export", "verify", "whole"])
def test_large_constants_are_looked_at_before_files_are_written(look: str, tmp_path: Path) -> None:
    integer, x, weight = large()
    integer(x), integer(x)
    if look == "whole":
        weight.data.neg_()  # samples of every tensor are looked at in every call
    else:
        weight.data[200, 100] ^= 64
        {
            "save": lambda: fxq.save(integer, tmp_path / "model.fxq"),
            "export": lambda: fxq.export_onnx(integer, tmp_path / "model.onnx"),
            "verify": lambda: fxq.verify(integer, copy.deepcopy(integer), [x]),
        }[look]()
    assert torch.equal(integer(x), plain_of(integer)(x))
