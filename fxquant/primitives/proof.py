"""Proofs about an integer graph for every input: shapes, dtypes, and the range of every value, derived from its constants.

`integer.lower` proves that accumulators fit while it chooses primitives and constants. This module proves it again from the graph
alone, primitive by primitive, without trusting the graph's annotations. `convert`, `save`, `load` and the exporters check their graph
in this way, by the rules of the stage INTEGER.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, fact, inferred, on_meta, resolve
from fxquant.ir.integer import QParams, noted, origin, qparams, zero_point
from fxquant.numerics.grids import ACTIVATION_TYPES, INT32_MAX, INT48_MAX, PLAIN_TYPES, bits_of
from fxquant.primitives import PRIMITIVES, Role, elementwise, loop, quantization, role_of
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.primitives.record import Range, Value, as_double, constant_of, need, refuse


class Shapes:
    """Shapes and dtypes of primitives' results, inferred by running them on meta tensors; equal calls are run once."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def infer(self, node: fx.Node) -> Any:
        key = (node.target, _key(node.args), _key(node.kwargs))
        if key not in self.known:
            self.known[key] = _requantized(node) or inferred_call(node)
        return self.known[key]


def inferred_call(node: fx.Node) -> TensorFact:
    """Return the shape and dtype of a function's result, by running it on meta tensors of the facts of its operands."""

    def run(point: int) -> Tensor:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: on_meta(fact(operand), point))
        return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]

    return inferred(node, run)


def _requantized(node: fx.Node) -> TensorFact | None:
    """Return the shape and dtype of a requantization whose parameters broadcast to its operand; None for any other call.

    Most requantizations are of this form, and running them on meta tensors is slow.
    """
    if (role_of(node.target) is not Role.REQUANTIZATION and node.target is not quantization.quantize) or node.kwargs:
        return None
    operand, *parameters = (fact(argument) for argument in node.args if isinstance(argument, fx.Node))
    dtype = next((argument for argument in node.args if isinstance(argument, torch.dtype)), None)
    if not isinstance(operand, TensorFact) or dtype is None:
        return None
    if operand.dtype.is_floating_point != (node.target is quantization.quantize):
        return None
    for parameter in parameters:
        sizes = parameter.shape if isinstance(parameter, TensorFact) else (None,)
        after = operand.shape[len(operand.shape) - len(sizes) :] if len(sizes) <= len(operand.shape) else ()
        if len(after) != len(sizes) or any(size not in (1, whole) for size, whole in zip(sizes, after, strict=True)):
            return None
    return TensorFact(operand.shape, dtype)


def _key(value: Any) -> Any:
    """Return arguments as a dictionary key, with nodes replaced by their facts."""
    if isinstance(value, fx.Node):
        node_fact = fact(value)
        return node_fact if isinstance(node_fact, TensorFact) else repr(node_fact)
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return value


def unproved(gm: fx.GraphModule, arithmetic: Arithmetic) -> Iterator[tuple[fx.Node, str]]:
    """Yield the nodes of an integer graph that contradict their annotations, or are not proved for every input, and why.

    Constants, shapes and ranges are derived from the graph and not taken from its annotations. Each such node is reported once.
    """
    values: dict[fx.Node, Value] = {}
    bits: dict[str, int] = {}  # of the largest accumulator, by operator
    shapes = Shapes()
    for node in gm.graph.nodes:
        try:
            if node.op == "get_attr":
                value = _constant(gm, node)
            elif node.op == "call_function" and node.target in PRIMITIVES:
                need(shapes.infer(node) == fact(node), f"its result is {shapes.infer(node)}, and declared as {fact(node)}")
                value = _proved(node, values, arithmetic)
            else:
                continue
        except Exception as error:  # or whatever PyTorch says about arguments that were changed
            yield node, str(error) or type(error).__name__
            return  # whatever reads it is not proved either
        if value is not None:
            values[node] = value
            # The result of `centre` is an operand of a sum, and not an accumulator of it.
            if node.op == "call_function" and PRIMITIVES[node.target].kind == "accumulator" and node.target is not elementwise.centre:
                bits[origin(node)] = max(bits.get(origin(node), 0), bits_of(value.largest))
    for node in gm.graph.nodes:
        declared = noted(node, "accumulator_bits")
        if declared is not None and declared < bits.get(node.name, 0):
            yield node, f"its accumulator has {bits[node.name]} bits, and is declared with {declared}"


def ranges(gm: fx.GraphModule) -> dict[fx.Node, Value]:
    """Return the range of every integer tensor of a graph that was proved."""
    values: dict[fx.Node, Value] = {}
    for node in gm.graph.nodes:
        value = _constant(gm, node) if node.op == "get_attr" else None
        if node.op == "call_function" and node.target in PRIMITIVES and PRIMITIVES[node.target].bounds is not None:
            bounds = PRIMITIVES[node.target].bounds(**_arguments(node, values))  # type: ignore[misc]
            value = Value(as_double(bounds.low), as_double(bounds.high), fact(node), bounds.exact)
        if value is not None:
            values[node] = value
    return values


def _arguments(node: fx.Node, values: Mapping[fx.Node, Value]) -> dict[str, Any]:
    """Return the arguments of a primitive's call by name, with the range of each tensor in its place; None where it has none."""

    def value_of(operand: fx.Node) -> Any:
        return values.get(operand, _given(operand))

    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return PRIMITIVES[node.target].signature.bind(*args, **kwargs).arguments  # type: ignore[index]


def _constant(gm: fx.GraphModule, node: fx.Node) -> Value | None:
    tensor, declared = resolve(gm, str(node.target)), fact(node)
    if not isinstance(tensor, Tensor) or not isinstance(declared, TensorFact):
        return None
    actual = TensorFact(tuple(tensor.shape), tensor.dtype)
    need(actual == declared, f"it is {actual}, and declared as {declared}")
    tensor = tensor.detach().cpu()
    if tensor.is_complex() or tensor.numel() == 0:
        return Value(as_double(0.0), as_double(0.0), declared, constant=tensor)
    # A small constant may hold one number per channel, and broadcast; for a large one the extremes are enough.
    low, high = (tensor, tensor) if tensor.numel() <= 2**16 else torch.aminmax(tensor)
    return Value(low.double(), high.double(), declared, constant=tensor)


def _proved(node: fx.Node, values: Mapping[fx.Node, Value], arithmetic: Arithmetic) -> Value | None:
    record, declared = PRIMITIVES[node.target], fact(node)  # type: ignore[index]
    described = qparams(node)
    if record.kind == "float":
        _check_dequantize(node, values)
        return None
    if record.bounds is None:
        refuse(f"the range is not known of {record.name}")
    arguments = _arguments(node, values)
    real = node.target is quantization.quantize or record.kind == "dynamic"
    if not real and any(value is None for name, value in arguments.items() if name in _ACTIVATIONS):
        refuse("it reads a value that is not an integer tensor of this graph")
    bounds = record.bounds(**arguments)
    if described is not None and record.bounds is loop.carried_bounds:  # by induction: each step's result is proved there
        carried = [qparams(user) for user in node.args[1].users if user.target is loop.carry and user.args[2] == node.args[2]]  # type: ignore[union-attr]
        need(all(each is not None and each.dtype == described.dtype for each in carried), "its loop carries another dtype")
        _check_range(arguments["input"], record.kind, described)
        bounds = Range(ACTIVATION_TYPES[described.dtype].low, ACTIVATION_TYPES[described.dtype].high)
    if record.kind == "dynamic":
        return None  # a float tensor, computed from a sum that fits
    operands = {name: value.constant if isinstance(value, Value) else value for name, value in arguments.items()}
    because = arithmetic.refuses(record.function, operands, declared.dtype)
    if because is not None:
        refuse(because)
    value = Value(as_double(bounds.low), as_double(bounds.high), declared, bounds.exact)
    _check_range(value, "plain" if declared.dtype in PLAIN_TYPES.values() and record.kind == "quantized" else record.kind, described)
    _check_zero_points(node, described)
    return value


def _given(node: fx.Node) -> Value | None:
    """Return the range of a bool or integer tensor that is an input or that float operators computed: any value of its dtype."""
    node_fact = fact(node)
    if not isinstance(node_fact, TensorFact) or node_fact.dtype.is_floating_point or node_fact.dtype.is_complex:
        return None
    low, high = (0, 1) if node_fact.dtype == torch.bool else (torch.iinfo(node_fact.dtype).min, torch.iinfo(node_fact.dtype).max)
    return Value(as_double(float(low)), as_double(float(high)), node_fact)


_ACTIVATIONS = frozenset(("input", "other", "accumulator", "residual"))


def _check_range(value: Value, kind: str, described: QParams | None) -> None:
    low, high = float(value.low.min()), float(value.high.max())
    need(low <= high, f"its limits are {low:.0f} and {high:.0f}")
    if kind == "plain":
        return
    storage = torch.iinfo(value.fact.dtype)
    if kind == "accumulator":
        limit = INT48_MAX if value.fact.dtype == torch.int64 else min(INT32_MAX, storage.max + (storage.bits < 32))
        need(value.largest <= limit, f"its sum can reach {value.largest}, and fits up to {limit}")
        need(value.largest < value.exact, f"its sum can reach {value.largest}, and is exact below {value.exact}")
        return
    need(storage.min <= low and high <= storage.max, f"its values lie in {low:.0f}…{high:.0f}, which {value.fact.dtype} does not hold")
    if described is None:
        return
    dtype = ACTIVATION_TYPES.get(described.dtype)
    scales = described.scale if isinstance(described.scale, tuple) else (described.scale,)
    if dtype is None or dtype.storage != value.fact.dtype:
        refuse(f"it is {value.fact.dtype}, and declared as {described.dtype}")
    need(dtype.low <= low and high <= dtype.high, f"its values lie in {low:.0f}…{high:.0f}, beyond {described.dtype}")
    need(all(0 < scale < math.inf for scale in scales), f"its scale is {described.scale}")
    zero = described.zero_point
    need(zero == 0 or (dtype.affine and dtype.low <= zero <= dtype.high), f"its zero point is {zero}")


def _check_zero_points(node: fx.Node, described: QParams | None) -> None:
    """Raise Unproved unless the zero point that a primitive adds or subtracts is that of the quantized tensor's annotation."""
    record = PRIMITIVES[node.target]  # type: ignore[index]
    rounds = record.kind == "quantized"
    if "zero_point" not in record.signature.parameters or (rounds and described is None):
        return
    used = record.signature.bind(*node.args, **node.kwargs).arguments.get("zero_point", 0)
    declared = described.zero_point if rounds and described is not None else zero_point(node.args[0])  # type: ignore[arg-type]
    need(declared == used, f"its zero point is {used!r}, and declared as {declared}")


def _check_dequantize(node: fx.Node, values: Mapping[fx.Node, Value]) -> None:
    """Raise Unproved unless a tensor is dequantized with the scale and the zero point of its annotation."""
    operand, scale = node.args[:2]
    _check_zero_points(node, None)
    assert isinstance(operand, fx.Node)
    assert isinstance(scale, fx.Node)
    need(operand in values, "it reads a value that is not an integer tensor of this graph")
    tensor = constant_of(values.get(scale), "scale")
    need(torch.isfinite(tensor).all() and (tensor > 0).all(), f"its scale is {tensor.tolist()}")
    described = qparams(operand)
    if described is not None:
        scales = described.scale if isinstance(described.scale, tuple) else (described.scale,)
        need(list(scales) == tensor.flatten().tolist(), "its scale is not the scale of its operand")
