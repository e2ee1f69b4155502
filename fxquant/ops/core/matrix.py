"""Sums along single dimensions by integer matrices: windows of unequal sizes, and interpolation by more than two neighbours."""

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
from fxquant.numerics.grids import FLOAT32_EXACT, INT48_MAX, Ratio
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import Instead
from fxquant.primitives import elementwise
from fxquant.primitives.resize import transform

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
    lowering.prove(largest, "the weighted sum", INT48_MAX)
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


def _step(length: int, count: int, factor: float | None, align_corners: bool) -> Fraction:
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
    step, rows = _step(length, count, factor, align_corners), []
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
    step, rows = _step(length, count, factor, align_corners), []
    for output in range(count):
        source = output * step if align_corners else max((output + HALF) * step - HALF, Fraction(0))
        first = min(math.floor(source), length - 1)
        share = source - first if first + 1 < length else Fraction(0)
        rows.append(((first, 1 - share), *(((first + 1, share),) if share else ())))
    return tuple(rows)


@functools.cache
def antialiased_rows(length: int, count: int, factor: float | None, align_corners: bool, cubic: bool) -> tuple[Row, ...]:
    """Return the weights of PyTorch's interpolation with antialias=True: for downsampling, the filter is wider by the factor."""
    step, rows = _step(length, count, factor, align_corners), []
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
