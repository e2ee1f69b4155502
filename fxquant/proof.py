"""What an integer graph computes for every input: shapes, dtypes, and the range of every value, from the constants at hand.

`integer.lower` proves that accumulators fit while it chooses primitives and constants. Here the same is found again from the graph
alone, primitive by primitive, without trusting what the graph says about itself: a graph that comes from a file is held against it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fxquant.arithmetic import Arithmetic
from fxquant.facts import BATCH_SIZES, BatchDim, TensorFact
from fxquant.graph import QParams, fact, noted, origin, qparams, resolve, zero_point
from fxquant.numerics import ACTIVATION_TYPES, FLOAT32_EXACT, INT32_MAX, INT48_MAX, accumulator_bound, bits_of, is_scale
from fxquant.primitives import PRIMITIVES, accumulate, boundary, elementwise, pool, product, requantize, resize, shape, transposed
from fxquant.primitives.accumulate import Split, split
from fxquant.primitives.transposed import swap_channels

FLOAT64_EXACT = 2**53
POOLED_EXACT = 2**22  # sums over windows stay below, so that ONNX can recover them from a float32 mean


class Shapes:
    """Shapes and dtypes of primitives, by running them on tensors without data; equal calls are run once."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def infer(self, node: fx.Node) -> Any:
        key = (node.target, _key(node.args), _key(node.kwargs))
        if key not in self.known:
            known = _requantized(node)
            self.known[key] = TensorFact.between(*(self._run(node, batch) for batch in BATCH_SIZES)) if known is None else known
        return self.known[key]

    @staticmethod
    def _run(node: fx.Node, batch: int) -> Tensor:
        def example(operand: fx.Node) -> Any:
            value = fact(operand)
            return torch.empty(value.at(batch), dtype=value.dtype, device="meta") if isinstance(value, TensorFact) else value

        result: Tensor = node.target(*fx.map_arg(node.args, example), **fx.map_arg(node.kwargs, example))  # type: ignore[operator]
        return result


def _requantized(node: fx.Node) -> TensorFact | None:
    """The result of a requantization whose parameters broadcast to its operand: most do, and PyTorch takes long to say so."""
    if node.target not in (requantize.requantize_fixed, requantize.requantize_real, boundary.quantize) or node.kwargs:
        return None
    operand, *parameters = (fact(argument) for argument in node.args if isinstance(argument, fx.Node))
    dtype = next((argument for argument in node.args if isinstance(argument, torch.dtype)), None)
    if not isinstance(operand, TensorFact) or dtype is None:
        return None
    if operand.dtype.is_floating_point != (node.target is boundary.quantize):
        return None
    for parameter in parameters:
        sizes = parameter.shape if isinstance(parameter, TensorFact) else (None,)
        behind = operand.shape[len(operand.shape) - len(sizes) :] if len(sizes) <= len(operand.shape) else ()
        if len(behind) != len(sizes) or any(size not in (1, whole) for size, whole in zip(sizes, behind, strict=True)):
            return None
    return TensorFact(operand.shape, dtype)


def _key(value: Any) -> Any:
    """Arguments as a dictionary key, with nodes replaced by their facts."""
    if isinstance(value, fx.Node):
        known = fact(value)
        return known if isinstance(known, TensorFact) else repr(known)
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return value


# ---- ranges -----------------------------------------------------------------------------------------------------------


class Unproved(ValueError):
    """A graph computes something that is not proved to be right for every input."""


@dataclass(frozen=True)
class Value:
    """What a node can hold: float64 bounds that broadcast against it, closed, and below which it is exact where runtimes hold it.

    constant  the tensor itself, where it is one
    """

    low: Tensor
    high: Tensor
    fact: TensorFact
    exact: int = FLOAT32_EXACT
    constant: Tensor | None = None

    @property
    def magnitude(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def largest(self) -> int:
        """The largest magnitude of all."""
        return int(self.magnitude.max()) if self.magnitude.numel() else 0

    def size(self, dim: int) -> int:
        """A size, which must not depend on the batch."""
        found = self.fact.shape[dim]
        if isinstance(found, BatchDim):
            _refuse(f"it reduces or picks from dimension {dim}, whose size depends on the batch")
        return found


@dataclass(frozen=True)
class Range:
    """What a rule says of a result: its bounds, and below what it is exact; None for the exactness of its operands."""

    low: Any
    high: Any
    exact: int = FLOAT32_EXACT


def _refuse(because: str) -> NoReturn:
    raise Unproved(because)


def _need(condition: bool | Tensor, because: str) -> None:
    if not bool(condition):
        _refuse(because)


def _within(bound: Any, exact: int) -> Range:
    """An accumulator of that magnitude."""
    bound = torch.as_tensor(bound, dtype=torch.float64)
    return Range(-bound, bound, exact)


def _width(wide: bool) -> int:
    return FLOAT64_EXACT if wide else FLOAT32_EXACT


def _table(value: Value | None, what: str) -> Tensor:
    """A constant's tensor."""
    if value is None or value.constant is None:
        _refuse(f"its {what} is no constant")
    return value.constant


def _optional(value: Value | None) -> Tensor | None:
    return None if value is None else _table(value, "bias")


Rule = Callable[..., Range]
RULES: dict[Callable[..., Any], Rule] = {}


def _rule(*primitives: Callable[..., Any]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(primitives, rule))
        return rule

    return register


# ---- sums of products -------------------------------------------------------------------------------------------------


def _per_channel(x: Value, weight: Tensor, bias: Tensor | None, trailing: int, exact: int) -> Range:
    """Output channels are the weight's dimension 0, followed by `trailing` dimensions in the result."""
    return _within(accumulator_bound(weight, bias, 0, x.largest).reshape(-1, *[1] * trailing), exact)


def _check_cut(x: Value, weight: Tensor, cut: list[int]) -> None:
    """Every sum of parts stays below 2^24, and the parts hold all bits of what they are parts of."""
    chosen = Split(*cut)
    _need(min(chosen) >= 1 and max(chosen) <= 64, f"it cuts its operands into {list(chosen)} parts and bits")
    part = 2 ** (chosen.bits - 1)
    _need(x.largest <= part * 2 ** (chosen.bits * (chosen.parts - 1)), "the parts of its operand hold fewer bits than it has")
    held = 2 ** (chosen.weight_parts * chosen.weight_bits - 1)
    _need(int(weight.abs().max()) < held, "the parts of its weight hold fewer bits than it has")
    for factor in split(weight.double(), chosen.weight_parts, chosen.weight_bits):
        largest = float(accumulator_bound(factor, None, 0, part).max())
        _need(largest < FLOAT32_EXACT, f"a sum of its parts can reach {largest:.0f}")


@_rule(accumulate.convolution, accumulate.convolution_wide)
def _convolution(input: Value, weight: Value, bias: Value | None, groups: int, cut: list[int] | None = None, **_: Any) -> Range:
    tensor = _table(weight, "weight")
    if cut is not None:
        _check_cut(input, tensor, cut)
    return _per_channel(input, tensor, _optional(bias), tensor.dim() - 2, _width(cut is not None))


@_rule(transposed.transposed_convolution, transposed.transposed_convolution_wide)
def _transposed_convolution(input: Value, weight: Value, bias: Value | None, groups: int, cut: list[int] | None = None, **_: Any) -> Range:
    tensor = swap_channels(_table(weight, "weight"), groups)
    if cut is not None:
        _check_cut(input, tensor, cut)
    return _per_channel(input, tensor, _optional(bias), tensor.dim() - 2, _width(cut is not None))


@_rule(accumulate.linear)
def _linear(input: Value, weight: Value, bias: Value | None) -> Range:
    return _per_channel(input, _table(weight, "weight"), _optional(bias), 0, FLOAT32_EXACT)


@_rule(accumulate.linear_wide)
def _linear_wide(input: Value, weight: Value, bias: Value | None) -> Range:
    return _per_channel(input, _table(weight, "weight"), _optional(bias), 0, FLOAT64_EXACT)


@_rule(product.scale_channels)
def _scale_channels(input: Value, weight: Value, bias: Value | None, trailing: int) -> Range:
    return _per_channel(input, _table(weight, "weight").reshape(-1, 1), _optional(bias), trailing, FLOAT32_EXACT)


@_rule(product.scale_channels_wide)
def _scale_channels_wide(input: Value, weight: Value, bias: Value | None, trailing: int) -> Range:
    return _per_channel(input, _table(weight, "weight").reshape(-1, 1), _optional(bias), trailing, FLOAT64_EXACT)


@_rule(accumulate.add_residual)
def _add_residual(accumulator: Value, residual: Value, multiplier: Value) -> Range:
    factors = _table(multiplier, "multiplier").double().abs()
    return _within(accumulator.magnitude + factors * residual.largest, accumulator.exact)


@_rule(product.matrix_product)
def _matrix_product(input: Value, other: Value) -> Range:
    return _within(input.size(-1) * input.largest * other.largest, FLOAT32_EXACT)


@_rule(product.matrix_product_wide)
def _matrix_product_wide(input: Value, other: Value) -> Range:
    return _within(input.size(-1) * input.largest * other.largest, FLOAT64_EXACT)


# ---- element by element -----------------------------------------------------------------------------------------------


@_rule(product.rectify)
def _rectify(input: Value, positive: int, negative: Value, wide: bool = False) -> Range:
    steepest = max(abs(positive), int(_table(negative, "slope").abs().max()))
    return _within(steepest * input.largest, _width(wide))


@_rule(elementwise.align_fixed)
def _align_fixed(input: Value, multiplier: Value, right_shift: Value, wide: bool = False) -> Range:
    factors, shift = _table(multiplier, "multiplier").double(), _table(right_shift, "shift").double()
    _need((factors >= 0).all() and (shift >= 0).all() and (shift <= 63).all(), "its multiplier or its shift is out of range")
    _need(float((factors * input.largest).max()) < (2.0**63 if wide else FLOAT32_EXACT), "its product is too large for its width")
    return _within(torch.ceil(factors * input.largest * torch.exp2(-shift)), _width(wide))


@_rule(elementwise.align_real)
def _align_real(input: Value, multiplier: Value, wide: bool = False) -> Range:
    return _within(torch.round(input.largest * _factors(multiplier)), _width(wide))


@_rule(elementwise.add, elementwise.subtract)
def _add(input: Value, other: Value) -> Range:
    _need(input.exact == other.exact, "its operands have different widths")
    return _within(input.magnitude + other.magnitude, input.exact)


@_rule(elementwise.add_constant)
def _add_constant(input: Value, constant: Value) -> Range:
    return _within(input.magnitude + constant.magnitude, input.exact)


@_rule(elementwise.multiply)
def _multiply(input: Value, other: Value, wide: bool = False) -> Range:
    return _within(input.largest * other.largest, _width(wide))


@_rule(elementwise.widen, elementwise.negate)
def _same_magnitude(input: Value) -> Range:
    return _within(input.magnitude, input.exact)


@_rule(elementwise.centre)
def _centre(input: Value, zero_point: int) -> Range:
    _need(type(zero_point) is int, f"its zero point is {zero_point!r}")
    return Range(input.low - zero_point, input.high - zero_point, input.exact)


@_rule(elementwise.shift_right)
def _shift_right(input: Value, bits: int) -> Range:
    _need(0 < bits < 64, f"it shifts by {bits} bits")
    low, high = (torch.floor(end * 2.0**-bits + 0.5) for end in (input.low, input.high))
    return Range(low, high, input.exact)


@_rule(elementwise.clamp)
def _clamp(input: Value, low: int, high: int) -> Range:
    _need(low <= high, f"its limits are {low} and {high}")
    return Range(input.low.clamp(low, high), input.high.clamp(low, high))


@_rule(elementwise.lookup)
def _lookup(input: Value, table: Value, first: int | None = None) -> Range:
    entries = _table(table, "table")
    _need(entries.dim() == 1 and (first is not None or entries.numel() % 2 == 0), f"its table has {entries.numel()} entries")
    lowest = -(entries.numel() // 2) if first is None else first
    covers = lowest <= int(input.low.min()) and int(input.high.max()) < lowest + entries.numel()
    _need(covers, f"its table of {entries.numel()} entries does not cover its operand")
    return Range(table.low, table.high)


@_rule(product.maximum, product.minimum)
def _extremum(input: Value, other: Value) -> Range:
    return Range(torch.minimum(input.low.min(), other.low.min()), torch.maximum(input.high.max(), other.high.max()))


# ---- reductions -------------------------------------------------------------------------------------------------------


@_rule(pool.sum)
def _sum(input: Value, dim: list[int], keepdim: bool, wide: bool = False) -> Range:
    return _within(math.prod(input.size(d) for d in dim) * input.largest, _width(wide))


@_rule(pool.sum_pool)
def _sum_pool(input: Value, kernel: list[int], stride: list[int], begin: list[int], end: list[int], wide: bool = False) -> Range:
    terms = math.prod(kernel)
    _need(terms * 2**7 < POOLED_EXACT, f"its windows have {terms} elements")
    return _within(terms * input.largest, FLOAT64_EXACT if wide else POOLED_EXACT)


@_rule(pool.max_pool)
def _max_pool(input: Value, kernel: list[int], stride: list[int], begin: list[int], end: list[int], dilation: list[int]) -> Range:
    for taps, before, behind, spread in zip(kernel, begin, end, dilation, strict=True):
        _need(0 <= before <= spread * (taps - 1) and 0 <= behind <= spread * (taps - 1), "one of its windows lies wholly in the padding")
    return Range(input.low, input.high)


@_rule(resize.resize_linear)
def _resize_linear(input: Value, rows: Value | None, columns: Value | None, bits: int, wide: bool) -> Range:
    matrices = [_table(matrix, "matrix") for matrix in (rows, columns) if matrix is not None]
    for matrix in matrices:
        _need((matrix >= 0).all() and (matrix.long().sum(1) == 2**bits).all(), "the weights of its neighbours do not sum to 1")
    largest = input.largest * 2 ** (bits * len(matrices))
    _need(largest < _width(wide), f"its sum can reach {largest}")
    return Range(input.low, input.high)


# ---- the boundary and requantization ------------------------------------------------------------------------------------


def _factors(value: Value) -> Tensor:
    """Multipliers of *real*: finite, and not negative."""
    factors = _table(value, "multiplier")
    _need(factors.dtype == torch.float32 and torch.isfinite(factors).all() and (factors >= 0).all(), "its multiplier is out of range")
    return factors.double()


@_rule(boundary.quantize)
def _quantize(input: Value | None, scale: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    tensor = _table(scale, "scale")
    _need(tensor.dim() == 0 and tensor.dtype == torch.float32 and is_scale(float(tensor)), f"its scale is {tensor.tolist()}")
    return _offset(low, high, zero_point)


def _offset(low: int, high: int, zero_point: int) -> Range:
    """Centred limits as stored integers."""
    _need(type(zero_point) is int, f"its zero point is {zero_point!r}")
    return Range(float(low + zero_point), float(high + zero_point))


@_rule(requantize.requantize_real)
def _requantize_real(accumulator: Value, multiplier: Value, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> Range:
    _factors(multiplier)
    return _offset(low, high, zero_point)


@_rule(requantize.requantize_fixed)
def _requantize_fixed(
    accumulator: Value,
    shift: Value,
    multiplier: Value,
    right_shift: Value,
    intermediate_bits: int,
    rounding: str,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Range:
    for name, value in (("shift", shift), ("multiplier", multiplier), ("right shift", right_shift)):
        _need(_table(value, name).dtype == torch.int32, f"its {name} is no int32")
    return Range(float(low), float(high))


@_rule(requantize.accumulator_output)
def _accumulator_output(accumulator: Value) -> Range:
    return _within(accumulator.magnitude, FLOAT64_EXACT)


@_rule(requantize.clamp_accumulator)
def _clamp_accumulator(input: Value, low: Value, high: Value) -> Range:
    _need((_table(low, "limit") <= _table(high, "limit")).all(), "its limits are the wrong way round")
    return _within(torch.maximum(low.magnitude, high.magnitude), FLOAT64_EXACT)


# ---- moving integers about ----------------------------------------------------------------------------------------------


@_rule(shape.reshape, shape.permute, shape.crop, shape.expand, shape.tile)
def _moved(input: Value, *_: Any, **__: Any) -> Range:
    return Range(input.low.min(), input.high.max(), input.exact)


@_rule(shape.concatenate)
def _concatenate(tensors: list[Value], dim: int) -> Range:
    return Range(torch.stack([t.low.min() for t in tensors]).min(), torch.stack([t.high.max() for t in tensors]).max())


@_rule(shape.select)
def _select(input: Value, dim: int, indices: Value) -> Range:
    chosen = _table(indices, "indices")
    _need((chosen >= 0).all() and (chosen < input.size(dim)).all(), "it picks elements that do not exist")
    return Range(input.low.min(), input.high.max())


@_rule(shape.pad)
def _pad(input: Value, begin: list[int], end: list[int], value: int) -> Range:
    return Range(input.low.min().clamp_max(value), input.high.max().clamp_min(value))


# ---- the graph --------------------------------------------------------------------------------------------------------


def unproved(gm: fx.GraphModule, arithmetic: Arithmetic) -> Iterator[tuple[fx.Node, str]]:
    """The nodes of an integer graph that are not what they are said to be, or not proved for every input, and why.

    What is found of a constant, a shape or a range counts, and not what the graph notes about it; each offender is reported once.
    """
    values: dict[fx.Node, Value] = {}
    bits: dict[str, int] = {}  # of the largest accumulator, by operator
    shapes = Shapes()
    for node in gm.graph.nodes:
        try:
            if node.op == "get_attr":
                value = _constant(gm, node)
            elif node.op == "call_function" and node.target in PRIMITIVES:
                _need(shapes.infer(node) == fact(node), f"its result is {shapes.infer(node)}, and said to be {fact(node)}")
                value = _proved(node, values, arithmetic)
            else:
                continue
        except Unproved as error:
            yield node, str(error)
            return  # whatever reads it is not proved either
        if value is not None:
            values[node] = value
            # What is centred is an operand of the sum, and no part of it.
            if node.op == "call_function" and PRIMITIVES[node.target].kind == "accumulator" and node.target is not elementwise.centre:
                bits[origin(node)] = max(bits.get(origin(node), 0), bits_of(value.largest))
    for node in gm.graph.nodes:
        said = noted(node, "accumulator_bits")
        if said is not None and said < bits.get(node.name, 0):
            yield node, f"its accumulator has {bits[node.name]} bits, and is said to have {said}"


def _constant(gm: fx.GraphModule, node: fx.Node) -> Value | None:
    tensor, known = resolve(gm, str(node.target)), fact(node)
    if not isinstance(tensor, Tensor) or not isinstance(known, TensorFact):
        return None
    found = TensorFact(tuple(tensor.shape), tensor.dtype)
    _need(found == known, f"it is {found}, and said to be {known}")
    if tensor.is_complex() or tensor.numel() == 0:
        zero = torch.zeros((), dtype=torch.float64)
        return Value(zero, zero, known, constant=tensor.detach())
    # A few numbers may be one for each channel, and broadcast; of many the extremes are enough.
    plain = tensor.detach().double()
    low, high = (plain, plain) if tensor.numel() <= 2**16 else (plain.min(), plain.max())
    return Value(low, high, known, constant=tensor.detach())


def _proved(node: fx.Node, values: Mapping[fx.Node, Value], arithmetic: Arithmetic) -> Value | None:
    record, known = PRIMITIVES[node.target], fact(node)  # type: ignore[index]
    described = qparams(node)
    if record.kind == "float":
        _check_dequantize(node, values)
        return None
    rule = RULES.get(node.target)  # type: ignore[arg-type]
    if rule is None:
        _refuse(f"nothing is known of the range of {record.name}")

    def value_of(operand: fx.Node) -> Any:
        return values.get(operand)

    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    arguments = inspect.signature(record.function).bind(*args, **kwargs).arguments
    if any(value is None for name, value in arguments.items() if name in _ACTIVATIONS and node.target is not boundary.quantize):
        _refuse("it reads something that is no integer of this graph")
    found = rule(**arguments)
    held = {name: value.constant if isinstance(value, Value) else value for name, value in arguments.items()}
    because = arithmetic.refuses(record.function, held, known.dtype)
    if because is not None:
        _refuse(because)
    low, high = (torch.as_tensor(end, dtype=torch.float64) for end in (found.low, found.high))
    value = Value(low, high, known, found.exact)
    _check_range(value, record.kind, described)
    _check_zero_points(node, described)
    return value


_ACTIVATIONS = frozenset(("input", "other", "accumulator", "residual"))


def _check_range(value: Value, kind: str, described: QParams | None) -> None:
    low, high = float(value.low.min()), float(value.high.max())
    _need(low <= high, f"its limits are {low:.0f} and {high:.0f}")
    storage = torch.iinfo(value.fact.dtype)
    if kind == "accumulator":
        limit = INT48_MAX if value.fact.dtype == torch.int64 else min(INT32_MAX, storage.max + (storage.bits < 32))
        _need(value.largest <= limit, f"its sum can reach {value.largest}, and fits up to {limit}")
        _need(value.largest < value.exact, f"its sum can reach {value.largest}, and is exact below {value.exact}")
        return
    _need(storage.min <= low and high <= storage.max, f"its values lie in {low:.0f}…{high:.0f}, which {value.fact.dtype} does not hold")
    if described is None:
        return
    dtype = ACTIVATION_TYPES.get(described.dtype)
    scales = described.scale if isinstance(described.scale, tuple) else (described.scale,)
    if dtype is None or dtype.storage != value.fact.dtype:
        _refuse(f"it is {value.fact.dtype}, and said to be {described.dtype}")
    _need(dtype.low <= low and high <= dtype.high, f"its values lie in {low:.0f}…{high:.0f}, beyond {described.dtype}")
    _need(all(0 < scale < math.inf for scale in scales), f"its scale is {described.scale}")
    zero = described.zero_point
    _need(zero == 0 or (dtype.affine and dtype.low <= zero <= dtype.high), f"its zero point is {zero}")


def _check_zero_points(node: fx.Node, described: QParams | None) -> None:
    """What is added to a result, or taken from an operand, is the zero point that the quantized tensor is said to have."""
    arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    if node.target in (boundary.quantize, requantize.requantize_real) and described is not None:
        said, used = described.zero_point, arguments.get("zero_point", 0)
    elif node.target in (elementwise.centre, boundary.dequantize):
        said, used = zero_point(node.args[0]), arguments.get("zero_point", 0)  # type: ignore[arg-type]
    else:
        return
    _need(said == used, f"its zero point is {used!r}, and said to be {said}")


def _check_dequantize(node: fx.Node, values: Mapping[fx.Node, Value]) -> None:
    """The real number is the integer times the scale that the quantized tensor is said to be on."""
    operand, scale = node.args[:2]
    _check_zero_points(node, None)
    assert isinstance(operand, fx.Node)
    assert isinstance(scale, fx.Node)
    _need(operand in values, "it reads something that is no integer of this graph")
    tensor = _table(values.get(scale), "scale")
    _need(torch.isfinite(tensor).all() and (tensor > 0).all(), f"its scale is {tensor.tolist()}")
    described = qparams(operand)
    if described is not None:
        said = described.scale if isinstance(described.scale, tuple) else (described.scale,)
        _need(list(said) == tensor.flatten().tolist(), "its scale is not that of what it reads")
