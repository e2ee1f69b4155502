"""Nodes that form one kernel of style "fast": sums and products of 8-bit tensors, and tables that float32 computes."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.analysis.explain import PRODUCTS
from fxquant.backends.onnx.writer import Emitter
from fxquant.ir.graph import TensorFact, fact, resolve
from fxquant.ir.integer import QParams, operation, qparams, zero_point
from fxquant.numerics.grids import FLOAT32_EXACT, LARGEST_NARROW_MULTIPLIER, NARROW_BITS, accumulator_bound, power_of_two
from fxquant.ops import BY_NAME
from fxquant.ops.core.form import WHOLE_OPSET, Call
from fxquant.ops.elementwise.table import exact
from fxquant.primitives import PRIMITIVES, Role, elementwise, role_of
from fxquant.primitives.elementwise import lookup
from fxquant.primitives.quantization import NEIGHBOURS, requantize_fixed, requantize_real, steps_of

ZERO_POINT = 128  # of tensors that other styles store as int8
OPSET = 19  # in older opsets ONNX's own evaluator has no DequantizeLinear of uint8
EIGHT_BITS = (torch.int8, torch.uint8)
_BYTES = 256
_NARROW_STEPS = frozenset(2.0**-bits for bits in range(NARROW_BITS + 1))


def plain(value: Any) -> Any:
    """Return the operand of a node that centres integers, because kernels apply zero points themselves; any other value as it is."""
    return value.args[0] if isinstance(value, fx.Node) and value.target is elementwise.centre else value


def _terms(total: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands of a sum, each in steps of the sum's grid."""
    return tuple(term for term in total.args if isinstance(term, fx.Node) and term.target is elementwise.align_real)


def stored_zero_point(node: Any) -> int:
    """Return the stored value of 0 if a node's value is uint8; for a constant or an int8 tensor it is 128."""
    return zero_point(node) if isinstance(node, fx.Node) and fact(node).dtype == torch.uint8 else ZERO_POINT


def is_8_bits(node: Any) -> bool:
    """Return whether a node holds a tensor of 8 bits."""
    node_fact = fact(node) if isinstance(node, fx.Node) else None
    return isinstance(node_fact, TensorFact) and node_fact.dtype in EIGHT_BITS


def parts_of(integer: fx.GraphModule, node: fx.Node, opset: int) -> tuple[fx.Node, ...]:
    """Return the nodes that form one kernel with this requantization, in order: a sum of 8-bit products or tensors; or none."""
    if node.target is not requantize_real or node.args[4] not in EIGHT_BITS:
        return ()
    total = node.all_input_nodes[0]
    if len(total.users) != 1:
        return ()
    if role_of(total.target) in PRODUCTS - {Role.TRANSPOSED}:
        return (total,) if all(is_8_bits(plain(operand)) for operand in total.args[:2]) else ()
    if total.target is elementwise.multiply:
        return (total,) if divisor(integer, node, total, opset) is not None else ()
    return (*_terms(total), total) if _adds_exactly(integer, node, total, opset) else ()


def divisor(integer: fx.GraphModule, node: fx.Node, total: fx.Node, opset: int) -> float | None:
    """Return the divisor of a product of two 8-bit tensors; None if the product is not a kernel."""
    left, right = (plain(operand) for operand in total.args[:2])
    multiplier = resolve(integer, str(node.args[1].target))  # type: ignore[union-attr]
    if opset < OPSET or not (is_8_bits(left) and is_8_bits(right)) or multiplier.numel() != 1:
        return None
    return exact_divisor(float(multiplier), stored_zero_point(left), stored_zero_point(right), stored_zero_point(node))


def _adds_exactly(integer: fx.GraphModule, node: fx.Node, total: fx.Node, opset: int) -> bool:
    """Return whether float32 adds two tensors of 8 bits, as fractions of a step of the result, exactly: ARITHMETIC.md, section 21."""
    terms = _terms(total)
    if opset < OPSET or role_of(total.target) is not Role.ADDITION or len(terms) != 2:
        return False
    if not all(len(term.users) == 1 and is_8_bits(plain(term.args[0])) and plain(term.args[0]).op != "get_attr" for term in terms):
        return False
    factors = [resolve(integer, str(term.args[1].target)) for term in terms]  # type: ignore[union-attr]
    step = float(resolve(integer, str(node.args[1].target)))  # type: ignore[union-attr]
    whole = all(factor.numel() == 1 and float(factor) == int(factor) <= LARGEST_NARROW_MULTIPLIER for factor in factors)
    return whole and step in _NARROW_STEPS


# ---- a layer's requantization by shifts: its offset in the bias and in the stored zero points -------------------------
#
# Where fxquant computes k = ⌊t · M / 2^b⌋ of a shifted sum t, QuantizeLinear computes round_half_even((t + offset) / divisor) + zero. Both
# are monotonic in t, so they are equal everywhere if they step at the same integers. Half a step of the result, which turns rounding to
# the nearest into rounding down, is rarely an integer. But zero + ½ steps are near one for some of the 256 zero points of a byte. An
# integer offset is part of the layer's bias, and nothing is added after the shift.
class Placed(NamedTuple):
    """Numbers for each channel, of shape (channels,), with which QuantizeLinear rounds a shifted sum down to its result."""

    bias: Tensor  # int64, an offset in steps of the shifted sum; of a layer: its bias with the offset
    divisor: Tensor  # float32
    zero: Tensor  # int8, the stored zero points


@functools.lru_cache(maxsize=1024)
def placed(multiplier: tuple[int, ...], right_shift: tuple[int, ...], limit: int, low: int, high: int) -> tuple[Placed, int] | None:
    """Return the numbers for clip(⌊t · multiplier / 2^right_shift⌋, low, high), proved equal at every step, or None.

    Beside them is the largest magnitude of t, offset included, at which a result steps. The multiplier and the shift have one number for
    each channel. Without the offset, results step within ±`limit`, or nothing is returned.
    """
    factor, shift = torch.tensor(multiplier, device="cpu"), torch.tensor(right_shift, device="cpu")
    none, open_ = torch.zeros_like(factor), factor > 0
    steps = steps_of(none, factor, shift, none, low, high)
    if bool((steps[open_].abs() >= limit).any()):
        return None
    results, width = torch.arange(low + 1, high + 1, device="cpu"), power_of_two(shift) / factor.double()
    placement = Placed(torch.zeros_like(factor), torch.full(factor.shape, 2.0**32, device="cpu", dtype=torch.float32), none.to(torch.int8))
    for near, zero in itertools.product((1 / 16, 1 / 2), sorted(range(-ZERO_POINT, ZERO_POINT), key=abs)):
        exact_offset = -(zero + 0.5) * width
        places = (open_ & ((exact_offset - exact_offset.round()).abs() <= near)).nonzero().flatten()
        offset = exact_offset[places].round().long()
        reached, rank = steps[places] + offset[:, None], results - zero
        ends = torch.stack([reached.double(), reached.double() - 1]) / (rank - 0.5)
        divisor = ((ends.amin(0).amax(1) + ends.amax(0).amin(1)) / 2).float()
        over, under = ((whole.float() / divisor[:, None]).round() for whole in (reached, reached - 1))
        right = ((over >= rank) & (under < rank)).all(1) & (divisor > 0)
        finished = places[right]
        placement.bias[finished], placement.divisor[finished], placement.zero[finished] = offset[right], divisor[right], zero
        open_[finished] = False
    farthest = (steps + placement.bias[:, None]).abs()[factor > 0]
    return None if bool(open_.any()) else (placement, int(farthest.max()) + 1 if len(farthest) else 0)


def layer_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the convolution and the residual additions that only this requantization to int8 by shifts reads, or an empty tuple."""
    if node.target is not requantize_fixed or node.args[5] != "floor" or node.args[8] != torch.int8:
        return ()
    total: Any = node.args[0]
    layer, *residuals = parts = (total.args[0], total) if role_of(total.target) is Role.RESIDUAL else (total,)
    if role_of(layer.target) is not Role.CONVOLUTION or any(len(part.users) != 1 for part in parts):
        return ()
    constants = all(each is None or each.op == "get_attr" for each in layer.args[1:3])
    read = [layer.args[0], *(residual.args[1] for residual in residuals)]
    return parts if constants and all(fact(value).dtype == torch.int8 for value in read) else ()


def placed_in(integer: fx.GraphModule, node: fx.Node, parts: Sequence[fx.Node], in_bytes: bool) -> Placed | None:
    """Return the numbers with which a requantization is written with its layer, whose sums are int32 if `in_bytes`, else float32.

    Numbers from 2^24 on are rounded in float32. They are beyond every step then, where the result is a limit.
    """
    layer, *residuals = parts

    def constants(nodes: Sequence[Any]) -> list[Tensor]:
        return [resolve(integer, str(each.target)).cpu() for each in nodes if each is not None]

    shift, multiplier, right_shift, weight, *bias = constants((*node.args[1:4], *layer.args[1:3]))
    factors = [constants(residual.args[2:]) for residual in residuals]
    channels, shape = len(weight), (len(weight), *[1] * (weight.dim() - 2))
    shapes = [value.shape for value in (shift, multiplier, right_shift, *itertools.chain(*factors)) if value.numel() > 1]
    whole = all(fact(residual.args[1]).shape[-len(shape)] == channels for residual in residuals)  # type: ignore[arg-type]
    if any(each != shape for each in shapes) or not whole or (PRIMITIVES[layer.target].wide and not in_bytes):  # type: ignore[index]
        return None
    own = [tuple(value.flatten().expand(channels).tolist()) for value in (multiplier, right_shift)]
    result = placed(*own, 2 ** (node.args[4] - 1), *node.args[6:8])  # type: ignore[operator, arg-type]
    if result is None:
        return None
    placement, farthest = result
    moved = (placement.bias << shift.flatten()) + sum(value.long() for value in bias)
    largest = float(accumulator_bound(weight, moved, 0, ZERO_POINT).max())
    products = sum(float(factor.abs().max()) * ZERO_POINT for factor, *_ in factors)
    added = sum(float((factor.abs() * (power_of_two(-by[0]) if by else 1)).max()) * ZERO_POINT + 1 for factor, *by in factors)
    in_float = max(farthest * 2.0 ** int(shift.max()) + added, products, 0.0 if in_bytes else largest)
    return placement._replace(bias=moved) if in_float < FLOAT32_EXACT and largest < 2**31 else None


# ---- the product of two tensors of bytes as one kernel: gates after a squeeze, hard swish, SiLU ----------------------
#
# onnxruntime fuses DequantizeLinear, DequantizeLinear, Mul and QuantizeLinear to one QLinearMul. Where fxquant computes
#
#     q = round_half_even(float32(p · m)),   p = (a - a_zero) · (b - b_zero)
#
# ONNX divides by a scale, and runtimes do so in different ways: by a division, as the reference evaluator does, or by the reciprocal, as
# onnxruntime's QLinearMul does (MlasQLinearMul), with the zero point added before the rounding, in one rounding or two. There are
# 65,536 pairs of bytes, so all are tried to find a divisor that gives equal integers in every way.
@functools.lru_cache(maxsize=1024)
def exact_divisor(multiplier: float, left_zero: int, right_zero: int, zero: int) -> float | None:
    """Return a float32 divisor that is exact in every runtime for all products of two bytes with these zero points, or None."""
    every = torch.arange(_BYTES, device="cpu")
    products = torch.unique(torch.outer(every - left_zero, every - right_zero)).float()
    expected = _stored(torch.round(products * torch.tensor(multiplier, dtype=torch.float32, device="cpu")), zero)
    start = 1 / torch.tensor(multiplier, dtype=torch.float32, device="cpu")
    for distance in NEIGHBOURS:
        candidate = (start.view(torch.int32) + distance).view(torch.float32)
        if all(torch.equal(_stored(actual, zero), expected) for actual in _ways(products, candidate, zero)):
            return float(candidate)
    return None


def _ways(products: Tensor, divisor: Tensor, zero: int) -> Iterator[Tensor]:
    """Yield the integers that a runtime may compute."""
    reciprocal = 1 / divisor
    for quotient in (products / divisor, products * reciprocal):
        yield torch.round(quotient)
        yield torch.round(quotient + zero) - zero
    for unrounded in (products.double() / divisor.double(), products.double() * reciprocal.double()):
        yield torch.round((unrounded + zero).float()).double() - zero  # a single rounding, as in a fused multiply-add


def _stored(whole: Tensor, zero: int) -> Tensor:
    return (whole.double() + zero).clamp(0, _BYTES - 1)


def multiply(e: Emitter, left: tuple[str, str], right: tuple[str, str], divided_by: float, zero: str) -> str:
    """Append the product of two values, each uint8 with its zero point, as uint8 with the zero point `zero`."""
    one = e.constant(1.0)
    operands = [e.node("DequantizeLinear", value, one, its_zero) for value, its_zero in (left, right)]
    return e.node("QuantizeLinear", e.node("Mul", *operands), e.constant(divided_by), zero)


# ---- tables as their functions in float32, of operators that onnxruntime computes faster than it looks up --------------
#
# A table has 256 entries, so the effect of float32 rounding on each entry is known. If the float value of every entry is further from the
# next tie than the error of the operators, all runtimes with the accuracy `ACCURACY` give the entries of the table. The order of
# computation and fused kernels then do not matter. Otherwise the table is looked up.
ACCURACY = 2.0**-20
"""How far a function's float32 result may be off, of the largest of 1, its operand and its result: 16 times what rounding does."""


def computes(integer: fx.GraphModule, node: fx.Node, opset: int) -> bool:
    """Return whether float32 operators compute every entry of the table that a node looks up."""
    if node.target is not lookup or opset < OPSET:
        return False
    operand, table = node.all_input_nodes[:2]
    entries: Tensor = resolve(integer, str(table.target)).cpu()
    read_grid, grid, described = qparams(operand), qparams(node), operation(node)
    if read_grid is None or grid is None or described is None or entries.numel() != _BYTES or not (is_8_bits(operand) and is_8_bits(node)):
        return False
    function = exact(described.name, described.arguments)
    return function is not None and _is_quick(node, opset) and _is_of(function, entries, read_grid, grid)


QUICK = frozenset({"Sigmoid", "LeakyRelu", "HardSigmoid", "Tanh"})


def _is_quick(node: fx.Node, opset: int) -> bool:
    """Return whether the operator's record writes it, with these arguments, by one operator of ONNX that is faster than a look-up."""
    scratch = Emitter({}, opset)
    scratch.types.update(stored=torch.uint8, zero=torch.uint8)
    try:
        compute(scratch, node, "stored", lambda end: "zero")
    except _Exported:
        return False
    between = [each.op_type for each in scratch.nodes][1:-1]
    return len(between) == 1 and between[0] in QUICK


def _is_of(function: Callable[[float], float], entries: Tensor, input_grid: QParams, output_grid: QParams) -> bool:
    """Return whether a table holds the rounded values of a function, also where a runtime has a relative error of `ACCURACY`."""
    limits = torch.iinfo(entries.dtype)
    assert isinstance(input_grid.scale, float)
    assert isinstance(output_grid.scale, float)
    for index, entry in enumerate(entries.tolist()):
        stored = index if input_grid.dtype == "uint8" else index - _BYTES // 2
        x = input_grid.scale * (stored - input_grid.zero_point)
        try:
            value, *beside = (function(x * factor) for factor in (1.0, 1 - ACCURACY / 4, 1 + ACCURACY / 4))
        except (OverflowError, ValueError):
            return False
        if not math.isfinite(value):
            return False
        error = ACCURACY * max(1.0, abs(x), abs(value)) + max(abs(value - other) for other in beside)
        ends = ((value + sign * error) / output_grid.scale + output_grid.zero_point for sign in (-1, 1))
        if {min(max(round(end), limits.min), limits.max) for end in ends} != {entry}:
            return False
    return True


def compute(e: Emitter, node: fx.Node, stored: str, zero: Callable[[fx.Node], str]) -> str:
    """Append the function of the value named `stored`, from uint8 to uint8; `zero` returns the zero points of stored values."""
    operand, described, output_grid = node.all_input_nodes[0], operation(node), qparams(node)
    input_grid = qparams(operand)
    assert described is not None
    assert input_grid is not None
    assert output_grid is not None
    real = e.node("DequantizeLinear", stored, e.constant(input_grid.scale), zero(operand))  # type: ignore[arg-type]
    arguments = {name: real if name == "input" else value for name, value in described.arguments.items()}
    whole = e.opset >= WHOLE_OPSET  # onnxruntime computes such operators fast
    call = Call(e, described.name, arguments, {}, None, lambda value: value, node, [node], _exported, whole)
    form = BY_NAME[described.name].onnx or _exported
    return e.node("QuantizeLinear", form(call), e.constant(output_grid.scale), zero(node))  # type: ignore[arg-type]


class _Exported(Exception):
    """Raised by a form that leaves an operator to PyTorch's exporter."""


def _exported(*_: Any) -> str:
    raise _Exported
