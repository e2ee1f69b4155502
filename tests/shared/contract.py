"""The contract E1 to E3 as assertions, for any model: used by the tests of whole models, of operators and of random graphs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.analysis.layers import left_in_float
from fxquant.analysis.recording import kernel_forms
from fxquant.backends.onnx.runtime import RUNTIME_NAMES
from fxquant.ir import graph, loops
from fxquant.ir.integer import qparams
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.quantization import quantize

VNNI = torch.cpu._is_vnni_supported()  # without it, sums of pairs of products saturate, and kernels that form them are refused
needs_vnni = pytest.mark.skipif(not VNNI, reason="without VNNI, sums of pairs of products saturate, and such kernels are refused")
TARGETS = ("bayes-e", "nash-e")
NOT_LOWERED = ("identity", "dropout", "nan_to_num", "requantize", "in_dtype", "finely")  # operators that may leave no primitive after

Inputs = tuple[Tensor, ...]


class Compiled(NamedTuple):
    """A model in two forms."""

    prepared: fx.GraphModule
    integer: fx.GraphModule


def compiled(model: nn.Module, batches: Sequence[Any], target: str = "bayes-e", qconfig: Any = None, **options: Any) -> Compiled:
    """The model prepared on the first batch, calibrated on all batches, and converted."""
    chosen = fxq.Options(**options)
    prepared = fxq.calibrate(fxq.prepare(model, batches[0], target, qconfig, options=chosen), batches, options=chosen)
    return Compiled(prepared, fxq.convert(prepared))


def calibrated(model: nn.Module, batches: Sequence[Any], target: str = "bayes-e", qconfig: Any = None, **options: Any) -> fx.GraphModule:
    """The model prepared on the first batch and calibrated on all batches, with options of the calibration."""
    return fxq.calibrate(fxq.prepare(model, batches[0], target, qconfig), batches, options=fxq.Options(**options))


# ---- values ---------------------------------------------------------------------------------------------------------
def operator_outputs(prepared: fx.GraphModule, *inputs: Tensor) -> dict[str, Tensor]:
    """Return the dequantized output of every quantized operator."""
    by_name: dict[str, Tensor] = {}
    hooks = [
        operator.register_forward_hook(lambda module, _, result: by_name.update({module.name: result.detach().clone()}))
        for operator in quantized_operators(prepared).values()
    ]
    try:
        prepared(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return by_name


def graph_values(integer: fx.GraphModule, *inputs: Tensor) -> dict[str, Tensor]:
    """The value of every node of an integer graph that is a tensor."""
    by_name: dict[str, Tensor] = {}

    class Recorder(graph.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor):
                by_name[n.name] = result
            return result

    with torch.no_grad():
        Recorder(integer).run(*inputs)
    return by_name


def primitive_kind(node: fx.Node) -> str | None:
    """ "quantized", "accumulator", "plain", "float" or "dynamic" for a primitive; None for any other node."""
    record = PRIMITIVES.get(node.target) if node.op == "call_function" else None
    if record is None or (record.kind == "quantized" and graph.fact(node).dtype in (torch.bool, torch.int64)):
        return None if record is None else "plain"
    return record.kind


def quantized_names(integer: fx.GraphModule) -> set[str]:
    """The names of all quantized tensors of an integer graph."""
    return {node.name for node in integer.graph.nodes if primitive_kind(node) == "quantized"}


def crossings(integer: fx.GraphModule) -> set[str]:
    """The quantized tensors that are made of float operators' results; `verify` gives them to the file as inputs."""
    return {node.name for node in integer.graph.nodes if node.target is quantize and node.args[0].op != "placeholder"}


def flat(result: Any) -> list[Tensor]:
    """All tensors of a nested result."""
    tensors: list[Tensor] = []
    fx.node.map_aggregate(result, lambda value: tensors.append(value) if isinstance(value, Tensor) else None)
    return tensors


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes: 0.0 is not -0.0."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.detach().contiguous().cpu().numpy().tobytes() == other.detach().contiguous().cpu().numpy().tobytes()


def all_equal(one: Any, other: Any) -> bool:
    """Whether two results hold equal tensors, byte for byte, in the same order."""
    left, right = flat(one), flat(other)
    return len(left) == len(right) > 0 and all(same_bytes(a, b) for a, b in zip(left, right, strict=True))


def same_state(one: Any, other: Any) -> bool:
    """Whether two models, or two dicts of tensors, hold the same names with equal bytes; NaN is what NaN is."""
    left, right = (each.state_dict() if isinstance(each, nn.Module) else each for each in (one, other))
    return left.keys() == right.keys() and all(same_bytes(left[name], right[name]) for name in left)


# ---- the contract ---------------------------------------------------------------------------------------------------
def assert_validate_is_integer(prepared: fx.GraphModule, integer: fx.GraphModule, *inputs: Tensor) -> None:
    """E2: VALIDATE gives the integers of the integer model, times their scale, at every operator and at the outputs."""
    fxq.set_state(prepared, fxq.State.VALIDATE)
    with torch.no_grad():
        assert all_equal(prepared(*inputs), integer(*inputs))
        real, integers = operator_outputs(prepared, *inputs), graph_values(integer, *inputs)  # of a loop, what its last step gave
    nodes = {node.name: node for node in integer.graph.nodes}
    compared = [name for name in real if name in nodes and qparams(nodes[name]) is not None]
    for name in compared:
        grid = qparams(nodes[name])
        scale = torch.tensor(grid.scale).reshape(-1, *[1] * (-grid.axis - 1)) if grid.axis is not None else torch.tensor(grid.scale)
        assert same_bytes(real[name], (integers[name].float() - grid.zero_point) * scale), name
    plain = [name for name in real if name in nodes and primitive_kind(nodes[name]) in ("plain", "dynamic")]
    for name in plain:
        assert same_bytes(real[name], integers[name]), name
    missing = {name: operator.operator.name for name, operator in quantized_operators(prepared).items() if name not in compared + plain}
    assert not [name for name, kind in missing.items() if kind not in NOT_LOWERED], missing
    assert fxq.verify(prepared, integer, [inputs]).mismatches == 0


def assert_integer_is_onnx(integer: fx.GraphModule, path: Path, batches: Sequence[Inputs]) -> None:
    """E1: every runtime gives the integer model's bits at every quantized tensor, and the file as it is gives its outputs."""
    fxq.export_onnx(integer, path, style="exact")
    report = fxq.verify(integer, path, batches)
    assert report, str(report)
    assert len(report.pairs) == len(RUNTIME_NAMES) + len(kernel_forms(integer))
    assert len(RUNTIME_NAMES) == 4
    inside = {node.name for nodes in loops.bodies(integer.graph).values() for node in nodes}  # of loops a file shows the results
    assert quantized_names(integer) - crossings(integer) - inside <= report.names
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for inputs in batches:
        output = session.run(None, {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), inputs, strict=True)})
        assert all_equal([torch.from_numpy(value) for value in output], integer(*inputs))


def assert_contract(
    prepared: fx.GraphModule, path: Path | None, *inputs: Tensor, few: int = 1, integer: fx.GraphModule | None = None
) -> fx.GraphModule:
    """E2 of a calibrated model, E1 where a path is given, also on the first few items, and E3; returns the integer model."""
    integer = fxq.convert(prepared) if integer is None else integer
    assert_validate_is_integer(prepared, integer, *inputs)
    if path is not None:
        assert_integer_is_onnx(integer, path, [inputs, tuple(value[:few] for value in inputs)])
    assert_train_is_validate(prepared, *inputs)
    return integer


def assert_train_is_validate(prepared: fx.GraphModule, *inputs: Tensor) -> None:
    """E3: with frozen statistics and no dropout, TRAIN in train mode gives VALIDATE's bits; this function freezes the model."""
    fxq.set_state(prepared, fxq.State.VALIDATE)
    prepared.eval()
    with torch.no_grad():
        expected, inner = prepared(*inputs), operator_outputs(prepared, *inputs)
    train_without_noise(prepared)
    assert all_equal(prepared(*inputs), expected)
    for name, value in operator_outputs(prepared, *inputs).items():
        assert same_bytes(value, inner[name]), name


def train_without_noise(prepared: fx.GraphModule) -> None:
    """TRAIN in train mode with everything frozen that VALIDATE keeps fixed."""
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    fxq.freeze(prepared)
    for operator in quantized_operators(prepared).values():
        if operator.operator.name == "dropout":
            operator.eval()


def assert_gradients_reach_every_parameter(prepared: fx.GraphModule, *inputs: Tensor) -> None:
    """All gradients are finite, and none is zero everywhere."""
    prepared.zero_grad()
    outputs = flat(prepared(*inputs))
    generator = torch.Generator().manual_seed(0)
    sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs).backward()
    for name, parameter in prepared.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert bool(torch.isfinite(parameter.grad).all()), f"{name} has a gradient that is not finite"
        assert bool((parameter.grad != 0).any()), f"{name} has a gradient of zeros"


LEAVING = (
    "only outputs of the model read its parts",
    "it only passes on the values",
    "it converts integers to float",
    "it copies constants",
)


def assert_all_is_integer(prepared: fx.GraphModule) -> None:
    """Only operators that copy elements for the outputs stay in float."""
    left = left_in_float(fxq.inspect.layers(prepared))
    assert all(layer.reason.startswith(LEAVING) for layer in left), fxq.explain(prepared)


def assert_alive(integer: fx.GraphModule, *inputs: Tensor) -> None:
    """No quantized tensor is constant: a network that has collapsed agrees with anything."""
    values = graph_values(integer, *inputs)
    names = (name for name in quantized_names(integer) if not name.endswith("scatter_reduce_to_real"))  # the ones that are counted
    dead = [name for name in names if values[name].numel() > 1 and values[name].float().std() == 0]
    assert not dead, f"{dead} are constant"
