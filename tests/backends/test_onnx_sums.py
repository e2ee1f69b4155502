"""Style "fast" of targets that requantize by shifts: convolutions as sums of products of bytes, with the integer model's bits."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import export, fast_parts
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import OnnxModel, constants
from fxquant.ir.graph import resolve
from fxquant.ir.integer import qparams
from tests.shared.contract import needs_vnni
from tests.shared.networks import Network
from tests.shared.onnx_files import assert_verified, batch, conv, exported, integer_of, kernels_of, operators, residual  # fmt: skip

pytestmark = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24), reason="this onnxruntime has no ConvInteger of int8"
)
FIXED = ("bayes-e", "bayes", "bernoulli2", "bernoulli")

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many layers are sums of bytes
    "plain": (lambda: Network(lambda s, x: s.b(F.relu(s.a(x))), a=conv(3, 8), b=conv(8, 8)), 1),
    "many products": (lambda: Network(lambda s, x: s.b(F.relu(s.a(x))), a=conv(3, 64, 11), b=conv(64, 8)), 1),
    "clamped": (lambda: Network(lambda s, x: F.relu6(3 * s.b(F.relu6(s.a(x)))), a=conv(3, 8), b=conv(8, 8)), 1),
    "no bias, stride, dilation": (
        lambda: Network(lambda s, x: s.b(s.a(x)), a=conv(3, 8), b=nn.Conv2d(8, 6, (3, 4), (2, 1), (2, 0), 2, bias=False)),
        1,
    ),
    "residual": (lambda: Network(lambda s, x: s.c(residual(s.b, s.a(x))), a=conv(3, 8), b=conv(8, 8), c=conv(8, 4)), 2),
    "in groups, and short": (
        lambda: Network(lambda s, x: s.c(s.b(s.a(x))), a=conv(3, 32), b=conv(32, 32, groups=2), c=nn.Conv2d(32, 4, 1)),
        0,
    ),
    "beyond 24 bits": (lambda: Network(lambda s, x: F.relu(s.b(s.a(x))), a=conv(3, 256), b=nn.Conv2d(256, 4, 3)), 1),
    "beyond 24 bits, linear": (lambda: Network(lambda s, x: s.b(s.a(x[:, 0].flatten(1))), a=nn.Linear(64, 1200), b=nn.Linear(1200, 4)), 2),
    "an accumulator that is returned": (lambda: Network(lambda s, x: s.b(s.a(x)), a=conv(3, 8), b=conv(8, 8)), 1),
    "linear": (lambda: Network(lambda s, x: s.b(F.relu(s.a(x.flatten(1)))), a=nn.Linear(192, 64), b=nn.Linear(64, 5, bias=False)), 2),
    "rows, read twice": (
        lambda: Network(
            lambda s, x: s.b(F.gelu(s.a(x.flatten(2)))) + s.c(F.gelu(s.a(x.flatten(2)))),
            **{"a": nn.Linear(64, 64), "b": nn.Linear(64, 9), "c": nn.Linear(64, 9)},
        ),
        4,
    ),
    "one dimension": (lambda: Network(lambda s, x: s.b(s.a(x.flatten(2))), a=nn.Conv1d(3, 16, 3), b=nn.Conv1d(16, 8, 5, padding=2)), 1),
    "three dimensions": (
        lambda: Network(lambda s, x: s.b(F.relu(s.a(x[:, None]))), a=nn.Conv3d(1, 4, 3, padding=1), b=nn.Conv3d(4, 4, 3)),
        1,
    ),
}


@functools.cache
def known(name: str, target: str = "bayes-e", activation: str = "int8", weight: str = "int8") -> fx.GraphModule:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if name.startswith("beyond 24 bits"):
        model.b.weight.data = model.b.weight.data.sign() * 0.1
    mapping = fxq.QConfigMapping(fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig(weight)))
    if name == "an accumulator that is returned":
        mapping = mapping.set_module_name("b", fxq.QConfig(fxq.ActivationConfig("int32")))
    return integer_of(model, None, target, mapping)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("target", FIXED)
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_bytes_give_the_integer_models_bits(name: str, target: str, tmp_path: Path) -> None:
    integer = known(name, target)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="fast")
    report = assert_verified(integer, path)
    assert {node.name for node in integer.graph.nodes if qparams(node) is not None} <= report.names
    convolutions, linears = (operators(path).count(kind) for kind in ("ConvInteger", "MatMulInteger"))
    kernels, refused = kernels_of(path)
    assert kernels + refused == convolutions + linears + refused == MODELS[name][1]
    metadata = fxq.export.onnx_metadata(path)
    assert metadata["relies_on_vnni"] is bool(convolutions)
    assert metadata["session_options_without_vnni"] == (PRECISE if linears else {})  # which no ConvInteger heeds


@pytest.mark.parametrize(("low", "high"), [(-128, 127), (0, 127), (-8, 7), (-20, 90)])
def test_placed_requantizations_are_equal_everywhere(low: int, high: int) -> None:
    generator = torch.Generator().manual_seed(0)
    multiplier = torch.cat([torch.tensor([0, 2**14, 2**15 - 1, 3]), torch.randint(2**14, 2**15, (20,), generator=generator)])
    shift = torch.cat([torch.full((2,), 22), torch.tensor([23, 9]), torch.randint(21, 23, (20,), generator=generator)])
    sums = torch.arange(-(2**16), 2**16)
    alone = [fast_parts.placed((int(m),), (int(b),), 2**15, low, high) for m, b in zip(multiplier, shift, strict=True)]
    assert sum(how is not None for how in alone) >= 20
    for how, m, b in zip(alone, multiplier, shift, strict=True):
        if how is None:
            continue
        rounded = ((sums + how[0].bias).float() / how[0].divisor).round() + how[0].zero
        assert torch.equal(rounded.clamp(-128, 127).clamp(low, high).long(), ((sums * m) >> b).clamp(low, high))


def test_a_requantization_without_proved_numbers_is_written_as_in_style_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fast_parts.placed((32767,), (23,), 2**5, -128, 127) is None  # it steps beyond the limit of the intermediate
    monkeypatch.setattr(fast_parts, "placed", lambda *_: None)
    path = exported(known("residual"), tmp_path / "model.onnx", style="fast")
    described = constants(OnnxModel(path))
    zeros = [described[node.input[2]] for node in onnx.load(path).graph.node if node.op_type == "QuantizeLinear"]
    assert [bool(zero.any()) for zero in zeros] == [False] * 4  # of the input and three layers; of placed ones they are others


def test_a_sum_whose_bias_would_leave_24_bits_in_float_is_written_as_in_style_exact() -> None:
    integer = copy.deepcopy(known("plain"))
    node = next(node for node in integer.graph.nodes if node.name == "a")
    parts = fast_parts.layer_of(node)
    assert fast_parts.placed_in(integer, node, parts, False) is not None
    resolve(integer, parts[0].args[2].target).fill_(2**24 - 1)
    assert fast_parts.placed_in(integer, node, parts, False) is None
    assert fast_parts.placed_in(integer, node, parts, True) is not None


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("activation", "weight", "count"), [("int16", "int8", 0), ("int8", "int4", 1), ("int4", "int4", 1)])
def test_only_bytes_are_summed(activation: str, weight: str, count: int, tmp_path: Path) -> None:
    path = exported(known("plain", "bayes-e", activation, weight), tmp_path / "model.onnx", style="fast")
    assert operators(path).count("ConvInteger") + kernels_of(path)[1] == count


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli"])
def test_no_half_step_becomes_a_part_of_a_bias(target: str, tmp_path: Path) -> None:
    """A runtime that adds a constant to the bias of a convolution would round every partial sum."""
    exported(known("plain", target, "int8", "int4"), tmp_path / "model.onnx", [3 * batch(64, seed) for seed in range(2)], style="exact")


# ---- runtimes that compute otherwise --------------------------------------------------------------------------------------
Changed = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def saturating(by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clamp(-(2**15), 2**15 - 1) for name, value in by_name.items()}


def lacking(by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    raise fxq.errors.ExportError("the model cannot be run", because="there is no ConvInteger", remedy="none")


def run_otherwise(monkeypatch: pytest.MonkeyPatch, change: Changed) -> None:
    """Let the runtime change what single kernels compute."""
    honest = export._run

    def otherwise(model: Any, *arguments: Any) -> dict[str, Tensor]:
        result = honest(model, *arguments)
        return change(result) if model.graph.name == "kernel" else result

    monkeypatch.setattr(export, "_run", otherwise)


@pytest.mark.parametrize("change", [pytest.param(saturating, marks=pytest.mark.disagrees), lacking])
def test_a_sum_that_the_runtime_does_not_compute_is_written_as_in_style_exact(
    change: Changed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_otherwise(monkeypatch, change)
    path = exported(known("residual"), tmp_path / "model.onnx", style="fast")
    assert "for 2 of 2 operators" in caplog.text or "for 2 of 2 layers" in caplog.text
    metadata = fxq.export.onnx_metadata(path)
    assert (metadata["relies_on_vnni"], len(metadata["kernels"]["refused"]), operators(path).count("ConvInteger")) == (False, 2, 0)


@needs_vnni
@pytest.mark.parametrize(("name", "warned"), [("plain", True), ("many products", False)])
def test_a_network_of_few_products_is_told_to_be_slower_than_float_and_all_to_rely_on_the_processor(
    name: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fxq.export_onnx(known(name), tmp_path / "model.onnx", style="fast")
    assert ("onnxruntime is likely to run the float model's file faster" in caplog.text) is warned
    assert "without VNNI" in caplog.text


def test_auto_stays_exact_where_numbers_would_rely_on_the_processor(tmp_path: Path) -> None:
    assert fxq.export.onnx_metadata(fxq.export_onnx(known("plain"), tmp_path / "model.onnx"))["style"] == "exact"
