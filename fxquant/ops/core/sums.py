"""Lowering of sums: of two operands (one may be a constant), and of a tensor along one dimension with an integer matrix."""

import functools
import math
import string
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, fact, is_parameter
from fxquant.lowering.lowering import Clamp, Lowering, Quantized
from fxquant.numerics import grids
from fxquant.numerics.grids import FLOAT32_EXACT, INT32, WEIGHT_INT8, Grid, Ratio
from fxquant.numerics.rounding import clamped, straight_through
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import Instead
from fxquant.primitives import elementwise
from fxquant.primitives.arithmetic import SUM, ShiftedSums
from fxquant.primitives.resize import transform

Operand = Quantized | Tensor | float
LARGEST_CONSTANT = 2**22  # steps of the common scale; with int8 terms beside it the sum stays below 2^24
LARGEST_CONSTANT_WIDE = 2**29  # the same beside an int16 term, for sums below 2^31


def lower_add(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    """Lower input + alpha · other."""
    return _lower_sum(lowering, {"input": (input, 1), "other": (other, alpha)}, clamp)


def _lower_sum(lowering: Lowering, terms: dict[str, tuple[Operand, float]], clamp: Clamp | None) -> Quantized:
    """Add the activations on a common scale, and a constant in whole steps of it, and requantize once."""
    terms = {role: grids.to_float32(term) for role, term in terms.items()}
    wide = any(operand.dtype.bits > 8 for operand, _ in terms.values() if isinstance(operand, Quantized))
    tensors = {role: (operand, factor) for role, (operand, factor) in terms.items() if isinstance(operand, Quantized)}
    narrow = not wide and lowering.output.dtype.bits <= 8
    if len(tensors) == len(terms) and narrow and lowering.arithmetic.adds_in_output_steps:
        return _lower_narrow_sum(lowering, tensors, clamp)
    constants = {role: (operand, factor) for role, (operand, factor) in terms.items() if not isinstance(operand, Quantized)}
    whole = lowering.output.dtype.bits > 8 or not wide  # whether constant tensors have a scale of their own
    plain = {role: (term, factor) for role, (term, factor) in terms.items() if not isinstance(term, Tensor) or (whole and abs(factor) == 1)}
    counting = all(isinstance(operand, Quantized) or 0 < _magnitude(operand) * abs(factor) < math.inf for operand, factor in plain.values())
    if lowering.arithmetic.shifted_sums is not None and len(plain) == 2 and counting:
        return _lower_shifted_sum(lowering, plain, lowering.arithmetic.shifted_sums, clamp)
    steps = {role: _step(operand, factor) for role, (operand, factor) in tensors.items()}
    larger = max(steps.values(), key=lambda ratio: float(ratio.approximate()))
    lowering.parameters |= {f"its constant {role!r}": operand for role, (operand, _) in constants.items() if isinstance(operand, Tensor)}
    magnitude = max((_magnitude(operand) * abs(factor) for operand, factor in constants.values()), default=0.0)
    if not math.isfinite(magnitude):
        raise lowering.not_finite()
    bits = _fraction_bits(lowering.arithmetic.add_fraction_bits, magnitude, larger, LARGEST_CONSTANT_WIDE if wide else LARGEST_CONSTANT)
    unit = _factor(2.0**bits, larger)

    bound = torch.zeros((), dtype=torch.float64, device="cpu")
    total: Any = None
    for role, (operand, factor) in tensors.items():
        aligned = lowering.align(operand, steps[role].times(unit).over(*larger.numerators), role, wide)
        total = _added(lowering, total, aligned, factor)
        bound = bound + math.ceil(2.0**bits * operand.grid.magnitude)
    for role, (constant, factor) in constants.items():
        if magnitude:
            integers = _held(lowering, role, constant, factor, Ratio((unit,), larger.numerators))
            bound = bound + float(integers.detach().abs().max())
            name = role if isinstance(constant, Tensor) else "number"
            total = lowering.call(elementwise.add_constant, total, lowering.constant(name, integers, torch.int32))
    lowering.prove(bound, "the sum")
    return lowering.requantize(total, Ratio(larger.numerators, (unit,)), clamp)


def _added(lowering: Lowering, total: Any, term: Any, factor: float) -> Any:
    """Return total + term, or total - term if `factor` is negative; a `total` of None is an empty sum."""
    if total is None:
        return term if factor > 0 else lowering.call(elementwise.negate, term)
    return lowering.call(elementwise.add if factor > 0 else elementwise.subtract, total, term)


LARGEST_FACTOR = 2**15 - 1  # of the operand of the smaller scale: a ratio that rounds up to 2^15 is one less


def _lower_shifted_sum(lowering: Lowering, terms: dict[str, tuple[Operand, float]], how: ShiftedSums, clamp: Clamp | None) -> Quantized:
    """Add two terms as x · 2^n + e · E, x of the larger scale, and requantize the sum once; a constant term has its own scale."""
    device = next(operand.scale.device for operand, _ in terms.values() if isinstance(operand, Quantized))
    held = {role: _integers_of(lowering, role, *term, device) for role, term in terms.items() if not isinstance(term[0], Quantized)}
    on = {role: operand.grid if isinstance(operand, Quantized) else held[role][1] for role, (operand, _) in terms.items()}
    steps = {role: Ratio((on[role].scale,)) if role in held else _step(operand, factor) for role, (operand, factor) in terms.items()}  # type: ignore[arg-type]
    (larger, x), (smaller, e) = sorted(steps.items(), key=lambda item: -float(item[1].approximate()))
    ratio = e.over(*x.numerators)
    wide_x, wide_e = (on[role].type.bits > 8 for role in (larger, smaller))
    # A bit is spared, or a sum of 16-bit integers would saturate after the largest first shift of its requantization to 8 bits.
    spared = (wide_x or wide_e) and lowering.output.grid.type.bits <= 8
    largest = how.largest_wide if wide_x else how.largest
    exponent = ratio.mantissa(15 - spared, carries=False)[1].clamp_max(largest - spared)
    exponent = exponent - (ratio.approximate().detach() * grids.power_of_two(exponent) > LARGEST_FACTOR).long()
    exponent = exponent if how.fixed is None else torch.full_like(exponent, how.fixed)
    factors = {larger: torch.ones_like(exponent) << exponent, smaller: ratio.rounded(exponent).clamp_max(LARGEST_FACTOR)}
    bound = torch.zeros((), dtype=torch.float64, device=device)
    for role in terms:
        bound = bound + factors[role].double() * on[role].magnitude
    wide = lowering.prove(bound, "the sum") >= FLOAT32_EXACT
    total: Any = None
    for role, (operand, factor) in terms.items():
        if isinstance(operand, Quantized):
            zero = torch.zeros((), dtype=torch.int32, device=device)
            stored = lowering.constant(f"{role}_multiplier", factors[role], torch.int32)
            shift = lowering.constant(f"{role}_right_shift", zero, torch.int32)
            exact = steps[role].over(*x.numerators).times(grids.power_of_two(exponent))
            term = lowering.multiplied(elementwise.align_fixed, operand.value, exact, stored, shift, wide)
            total = _added(lowering, total, term, factor)
    for role, (integers, grid) in held.items():
        constant, factor = terms[role]
        if isinstance(constant, Tensor):
            lowering.describe(role, grid.scale, times=int(math.copysign(max(int(factors[role]), 1), factor)))
        name = role if isinstance(constant, Tensor) else "number"
        total = lowering.call(elementwise.add_constant, total, lowering.constant(name, integers.double() * factors[role], torch.int32))
    unit = x.over(grids.power_of_two(exponent))
    if terms[larger][1] > 0 or not isinstance(terms[larger][0], Quantized | Tensor) or lowering.output.dtype == INT32:
        return lowering.requantize(total, unit, clamp, kind=SUM)

    def lift(scale: Tensor) -> Tensor:  # it is x · 2^n - e · E that is rounded, and multiplied by a negative number
        return lowering.arithmetic.negated(unit.over(scale), lowering.output.grid)

    if not lowering.lifts_late:
        stored = lowering.constant("rest", lift(lowering.output.grid.scale), torch.int32)
        total = lowering.call(elementwise.add_constant, total, stored)
    return lowering.requantize(total, unit, clamp, lift=lift, kind=SUM)


def _integers_of(lowering: Lowering, role: str, constant: Operand, factor: float, device: torch.device) -> tuple[Tensor, Grid]:
    """Return the integers of a constant term and their grid: ±127 of a number; a tensor has 16 bits where the result has."""
    if isinstance(constant, Tensor):
        integers, grid = lowering.constant_integers(constant, role, lowering.output.dtype.bits > 8)
        return integers * int(factor), grid
    number = float(constant) * factor  # type: ignore[arg-type]
    scale = torch.tensor(abs(number), dtype=torch.float32, device=device) / WEIGHT_INT8.high
    return torch.tensor(math.copysign(WEIGHT_INT8.high, number), device=device), Grid(WEIGHT_INT8, scale)


def _lower_narrow_sum(lowering: Lowering, terms: dict[str, tuple[Quantized, float]], clamp: Clamp | None) -> Quantized:
    """Add the terms as integers in units of 2^-n of a step of the result, with 15-bit multipliers.

    They are so small that float32 adds them and the zero point exactly, in any order.
    """

    def total() -> tuple[Any, Tensor]:
        ratios = {role: _step(operand, factor).over(lowering.output.grid.scale) for role, (operand, factor) in terms.items()}
        bits, multipliers = grids.narrow_multipliers(list(ratios.values()))
        total: Any = None
        for (role, (operand, factor)), multiplier in zip(terms.items(), multipliers, strict=True):
            stored = lowering.constant(f"{role}_multiplier", multiplier.float(), torch.float32)
            step = ratios[role].times(_factor(2.0**bits, ratios[role]))
            aligned = lowering.multiplied(elementwise.align_real, operand.value, step, stored, False)
            total = _added(lowering, total, aligned, factor)
        return total, _factor(2.0**-bits, next(iter(ratios.values())))

    def real() -> Tensor:
        every = (operand.real() if factor == 1 else operand.real() * factor for operand, factor in terms.values())
        summed: Any = functools.reduce(torch.add, every)
        result: Tensor = summed if clamp is None else clamped(summed, *clamp)
        return result

    largest = sum(grids.LARGEST_NARROW_MULTIPLIER * operand.grid.magnitude for operand, _ in terms.values())
    lowering.prove(largest, "the sum")
    return lowering.requantize_in_steps(total, real, clamp, [operand.scale for operand, _ in terms.values()])


def _magnitude(constant: Tensor | float) -> float:
    return float(constant.detach().double().abs().max()) if isinstance(constant, Tensor) else abs(constant)


def _held(lowering: Lowering, role: str, constant: Tensor | float, factor: float, steps: Ratio) -> Tensor:
    """Compute round_half_even(constant · factor · steps), exactly, with its sign: the constant in whole steps of the common scale.

    The gradient of a tensor is that of the identity (straight-through).
    """
    value = constant if isinstance(constant, Tensor) else _factor(float(constant), steps)
    exponent = torch.zeros((), dtype=torch.int64, device="cpu")
    whole = steps.times(value.detach().double().abs(), _factor(abs(factor), steps)).rounded(exponent)
    exact = whole * torch.sign(value.detach() * factor).long()
    if isinstance(constant, Tensor):
        lowering.describe(role, (1 / (steps.approximate() * factor)).float())
    if value.requires_grad and torch.is_grad_enabled():
        return straight_through(value * (steps.approximate() * factor), exact.double())
    return exact


def _step(operand: Quantized, factor: float) -> Ratio:
    factors = () if abs(factor) == 1 else (torch.tensor(abs(float(factor)), dtype=torch.float64, device="cpu"),)
    return Ratio((operand.scale, *factors))


def _factor(value: float, like: Ratio) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.numerators[0].device)


def _fraction_bits(most: int, magnitude: float, larger: Ratio, largest: int) -> int:
    """Return the n for which the common scale is 2^-n of the larger step: the largest, up to `most`, at which a constant has few steps.

    It is negative where a constant is much larger than the terms: the output's scale covers the constant, so it is coarser still.
    """
    if not magnitude:
        return most
    steps = magnitude / float(larger.approximate())
    return min(most, math.floor(math.log2(largest / steps)))


# ---- Sums along single dimensions by integer matrices ----------------------------------------------------------------
#
# Windows of unequal sizes, and interpolation by more than two neighbours.
HALF = Fraction(1, 2)
CUBIC = Fraction(-3, 4)  # the coefficient of PyTorch's bicubic interpolation,
CUBIC_ANTIALIASED = Fraction(-1, 2)  # and with antialias=True
ACCUMULATOR_BITS = 46  # of a sum, without its sign: its largest magnitude is below 2^47

Row = tuple[tuple[int, Fraction], ...]  # the elements that an output is made of, with their weights


def weighted_sums(
    lowering: Lowering, input: Quantized, matrices: Sequence[Tensor | None], steps: Ratio, clamp: Clamp | None = None
) -> Quantized:
    """Multiply the last dimensions by one integer matrix each (None: as it is), and requantize.

    `steps` is the value of one integer of the sum.
    """
    value, largest, rank = input.value, float(input.grid.magnitude), len(input.shape)
    for dim in range(-1, -len(matrices) - 1, -1):
        matrix = matrices[dim]
        if matrix is None:
            continue
        largest *= float(matrix.abs().sum(1).max())
        stored = lowering.constant(f"matrix{-dim}", matrix.float().to(input.scale.device), torch.int32)
        value = lowering.call(transform, value, stored, dim, rank, largest >= FLOAT32_EXACT)
    lowering.prove(largest, "the weighted sum", grids.INT48_MAX)
    if all(matrix is None for matrix in matrices):
        value = lowering.call(elementwise.widen, value)
    return lowering.requantize(value, steps, clamp, bound=largest)


def onnx_matrices(c: Call, value: str, shape: Sequence[Any], matrices: Sequence[Tensor | None]) -> str:
    """Write `weighted_sums` in ONNX on float values: for each matrix a product along its dimension, the last dimension first.

    `shape` is the shape of `value`. A Transpose is avoided: onnxruntime cannot move QuantizeLinear of opset 21 before one by itself.
    """
    rank = len(shape)
    sizes = list(shape[rank - len(matrices) :])
    for dim in range(-1, -len(matrices) - 1, -1):
        matrix = matrices[dim]
        if matrix is None:
            continue
        real = matrix.float().contiguous()
        sizes[dim] = real.shape[0]
        if dim == -1:
            value = c.do("MatMul", value, c.e.constant(real.t().contiguous()))
            continue
        leading, after = [0] * (rank + dim), sizes[dim:]
        flat = value if dim == -2 else c.do("Reshape", value, c.integers([*leading, real.shape[1], -1]))
        product = c.do("MatMul", c.e.constant(real), flat)
        value = product if dim == -2 else c.do("Reshape", product, c.integers([*leading, *after]))
    return value


def uneven_windows(length: int, count: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the windows of PyTorch's adaptive pooling: together they cover a dimension, and may overlap by one."""
    return [(index * length // count, -(-(index + 1) * length // count)) for index in range(count)]


def box(length: int, count: int) -> Tensor | None:
    """Return a float32 matrix [count, length] that is 1 where an element is in an adaptive pooling window; None if count == length."""
    if length == count:
        return None
    matrix = torch.zeros(count, length, device="cpu", dtype=torch.float32)
    for index, (start, stop) in enumerate(uneven_windows(length, count)):
        matrix[index, start:stop] = 1
    return matrix


def window_sizes(lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return the number of elements of each window, over all dimensions together: float32, a scalar if all are equal."""
    sizes = torch.ones((), device="cpu", dtype=torch.float32)
    for length, count in zip(lengths, counts, strict=True):
        along = torch.tensor([float(stop - start) for start, stop in uneven_windows(length, count)], device="cpu", dtype=torch.float32)
        sizes = sizes.unsqueeze(-1) * along
    return sizes.flatten()[0] if bool((sizes == sizes.flatten()[0]).all()) else sizes


def fraction_bits(arithmetic_bits: int, operand_bits: int, axes: int, doublings: int) -> int:
    """Return the fraction bits of a weight, limited by the target and by the room in a sum over all axes that grows by 2^doublings."""
    return min(arithmetic_bits, (ACCUMULATOR_BITS - (operand_bits - 1) - doublings) // max(axes, 1))


def _spacing(length: int, count: int, factor: float | None, align_corners: bool) -> Fraction:
    if align_corners:
        return Fraction(length - 1, count - 1) if count > 1 else Fraction(0)
    return Fraction(length, count) if factor is None else 1 / Fraction(factor)


def cubic_weight(distance: Fraction, a: Fraction) -> Fraction:
    """Return the weight of an element at a distance, of a cubic interpolation with this coefficient."""
    x = abs(distance)
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else Fraction(0)


@functools.cache
def cubic_rows(length: int, count: int, factor: float | None, align_corners: bool) -> tuple[Row, ...]:
    """Return the weights of PyTorch's bicubic interpolation along one dimension: four neighbours per output, edges repeated."""
    step, rows = _spacing(length, count, factor, align_corners), []
    for output in range(count):
        source = output * step if align_corners else (output + HALF) * step - HALF
        first = math.floor(source)
        row: dict[int, Fraction] = {}
        for place in range(first - 1, first + 3):
            inside = min(max(place, 0), length - 1)
            row[inside] = row.get(inside, Fraction(0)) + cubic_weight(source - place, CUBIC)
        rows.append(tuple(row.items()))
    return tuple(rows)


@functools.cache
def linear_rows(length: int, count: int, factor: float | None, align_corners: bool) -> tuple[Row, ...]:
    """Linear interpolation along one dimension."""
    step, rows = _spacing(length, count, factor, align_corners), []
    for output in range(count):
        source = output * step if align_corners else max((output + HALF) * step - HALF, Fraction(0))
        first = min(math.floor(source), length - 1)
        share = source - first if first + 1 < length else Fraction(0)
        rows.append(((first, 1 - share), *(((first + 1, share),) if share else ())))
    return tuple(rows)


@functools.cache
def antialiased_rows(length: int, count: int, factor: float | None, align_corners: bool, cubic: bool) -> tuple[Row, ...]:
    """Return the weights of PyTorch's interpolation with antialias=True: for downsampling, the filter is wider by the factor."""
    step, rows = _spacing(length, count, factor, align_corners), []
    wider = max(step, Fraction(1))
    support = (2 if cubic else 1) * wider
    for output in range(count):
        centre = step * (output + HALF)
        start, stop = max(math.trunc(centre - support + HALF), 0), min(math.trunc(centre + support + HALF), length)
        weights = []
        for place in range(start, stop):
            distance = (place - centre + HALF) / wider
            weights.append(cubic_weight(distance, CUBIC_ANTIALIASED) if cubic else max(1 - abs(distance), Fraction(0)))
        total = sum(weights, Fraction(0))
        rows.append(tuple((start + index, weight / total) for index, weight in enumerate(weights) if weight))
    return tuple(rows)


def is_unchanged(rows: Sequence[Row], length: int) -> bool:
    """Return whether every output is its own element."""
    weights = [[(place, weight) for place, weight in row if weight] for row in rows]
    return weights == [[(index, Fraction(1))] for index in range(length)]


def fixed_point(rows: Sequence[Row], length: int, bits: int) -> Tensor | None:
    """Return the weights as integers in units of 2^-bits, float64 [outputs, length], or None if every output copies its own element.

    Weights are rounded half up; the largest of each row absorbs the rounding error, so that a row sums to 2^bits.
    """
    if is_unchanged(rows, length):
        return None
    matrix = torch.zeros(len(rows), length, dtype=torch.float64, device="cpu")
    for output, row in enumerate(rows):
        whole = {place: math.floor(weight * 2**bits + HALF) for place, weight in row}
        largest = max(whole, key=lambda place: whole[place])
        whole[largest] += 2**bits - sum(whole.values())
        matrix[output, list(whole)] = torch.tensor([float(value) for value in whole.values()], dtype=torch.float64, device="cpu")
    return matrix


def real_matrix(rows: Sequence[Row], length: int) -> Tensor | None:
    """Return the weights as float values."""
    exact = fixed_point(rows, length, 40)
    return None if exact is None else exact * 2.0**-40


# ---- The float functions of contractions, and equations of einsum in their canonical form ----------------------------
def einsum(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """Compute torch.einsum, its equation with one letter for every dimension, and its result after an arrow."""
    return torch.einsum(equation, *operands)


def added_product(input: Tensor, one: Tensor, other: Tensor, equation: str, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute beta · input + alpha · einsum(equation, one, other); if beta is 0, `input` is not read, and may hold NaN."""
    product = alpha * torch.einsum(equation, one, other)
    return product if beta == 0 else beta * input + product


def computed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear with a weight that the model computes."""
    return torch.nn.functional.linear(input, weight, bias)


def is_computed(weight: Any) -> bool:
    """Return whether a weight is a node that depends on activations: neither a constant nor computed from parameters alone."""
    return isinstance(weight, fx.Node) and not is_parameter(weight) and weight.op != "get_attr"


def spelled(equation: str, *operands: Any) -> dict[str, Any] | str:
    """Return the canonical arguments of an equation: an ellipsis as letters, and the result, where it is not given, in their order."""
    facts = [operand_fact for operand in operands if isinstance(operand, fx.Node) and isinstance(operand_fact := fact(operand), TensorFact)]
    if len(facts) < len(operands):
        return "one of its operands is not a tensor"
    subscripts, arrow, result = equation.replace(" ", "").partition("->")
    letters = subscripts.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    wide = [len(tensor.shape) - len(each.replace("...", "")) for each, tensor in zip(letters, facts, strict=True)]
    most = max((number for each, number in zip(letters, wide, strict=True) if "..." in each), default=0)
    names = "".join(free[:most])
    shapes = [each.replace("...", names[most - number :]) if "..." in each else each for each, number in zip(letters, wide, strict=True)]
    if not arrow:
        once = sorted(letter for letter in set(subscripts.replace(",", "").replace(".", "")) if subscripts.count(letter) == 1)
        result = ("..." if "..." in subscripts else "") + "".join(once)
    return {"equation": f"{','.join(shapes)}->{result.replace('...', names)}", "operands": list(operands)}


def with_vectors(input: Any, other: Any) -> dict[str, Any] | str | Instead:
    """Adapt torch.matmul: return an einsum if one operand is a vector, else the arguments unchanged."""
    left, right = (fact(operand) if isinstance(operand, fx.Node) else None for operand in (input, other))
    if not isinstance(left, TensorFact) or not isinstance(right, TensorFact) or min(len(left.shape), len(right.shape)) != 1:
        return {"input": input, "other": other}
    matrices = len(left.shape) > 1, len(right.shape) > 1
    equation = f"{'...' * matrices[0]}k,{'...k' if matrices[1] else 'k'}{'n' * matrices[1]}->{'...' * any(matrices)}{'n' * matrices[1]}"
    arguments = spelled(equation, input, other)
    return arguments if isinstance(arguments, str) else Instead(einsum, arguments)
