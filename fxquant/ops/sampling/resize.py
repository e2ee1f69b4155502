"""Resizing: nearest neighbours as selections, interpolation as products with fixed-point weights, areas as means of windows.

The result of one or two linear interpolations lies between the operand's values and shares its scale; other modes have a separate scale.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import fact, largest_size, shape_of
from fxquant.numerics.grids import EVERYTHING, FLOAT32_EXACT
from fxquant.ops.core import IMAGES, NORMED, Call, Lowering, Own, Quantized, Ratio, Same, Trait, matrix, sample, selected
from fxquant.ops.core.declare import are_fixed, bound, lowered, one_of, settings_of
from fxquant.ops.core.matrix import Row, fixed_point, fraction_bits, onnx_matrices, weighted_sums
from fxquant.ops.pooling.adaptive import lower_means, onnx_means
from fxquant.primitives import resize, varying

NEAREST = ("nearest", "nearest-exact")
LINEAR = ("linear", "bilinear")
OWN_GRID = ("trilinear", "bicubic", "area")
FLOAT64_EXACT = 2**53
HALF = Fraction(1, 2)
STEPPED_BITS = 8  # of a position's fraction that weigh, where positions are stepped through
SYMBOLIC_SIZE = "the size of its input or output varies, and is not computed by a line of the model"
Axis = tuple[int, int | None, float | None]  # the length, the wanted one, or the factor


def _count(length: int, size: int | None, factor: float | None) -> int:
    """Return the output size along one dimension, from `size` or `factor`."""
    return size if size is not None else math.floor(length * (factor or 1))


# Plain numbers are cached from one call to the next: a tensor would belong to the mode, the dtype and the device of the first
# call, and a tensor of inference mode could not be used in training.


@functools.cache
def _nearest(length: int, size: int | None, factor: float | None, mode: str) -> tuple[int, ...]:
    """Return which of `length` elements stands at each position: PyTorch's own answer, for the positions themselves."""
    positions = torch.arange(length, dtype=torch.float32, device="cpu").reshape(1, 1, length)
    return tuple(F.interpolate(positions, size, factor, mode).flatten().int().tolist())


def _lower_nearest(lowering: Lowering, input: Quantized, axes: list[Axis], mode: str) -> Quantized:
    value = input.value
    for axis, (length, size, factor) in enumerate(axes):
        indices = _nearest(length, size, factor, mode)
        if indices != tuple(range(length)):
            value = selected(lowering, value, axis + 2, indices, f"indices{axis}")
    return input.with_value(value)


@functools.cache
def _neighbours(length: int, size: int | None, factor: float | None, align_corners: bool, bits: int) -> tuple[tuple[int, int], ...]:
    """Return for every output (index of its first neighbour, weight of the second in units of 2^-bits); both weights sum to 2^bits.

    The source of output i lies at (i + ½)/factor - ½, or, with `align_corners`, such that both ends coincide;
    its two neighbours have the weights of linear interpolation, rounded half up. At the end the only neighbour has all the weight.
    """
    rows = matrix.linear_rows(length, _count(length, size, factor), factor, align_corners)
    return tuple((row[0][0], _second_weight(row[1][1], bits) if len(row) > 1 else 0) for row in rows)


@functools.lru_cache(maxsize=256)
def _stepped_neighbours(length: int, size: int | None, factor: float | None, align_corners: bool, bits: int) -> tuple[tuple[int, int], ...]:
    """Return `_neighbours` with positions rounded down to 2^-bits; the upper 8 bits of a position's fraction are the second weight."""
    size = _count(length, size, factor)
    ratio = Fraction(length, size) if factor is None else 1 / Fraction(factor)
    step = ((length - 1) << bits) // max(size - 1, 1) if align_corners else math.floor(ratio * 2**bits)
    start = 0 if align_corners else (step - (1 << bits)) >> 1
    neighbours = []
    for output in range(size):
        place = min(max(output * step + start, 0), (length - 1) << bits)
        first, fraction = place >> bits, (place & ((1 << bits) - 1)) >> (bits - STEPPED_BITS)
        neighbours.append((first, fraction if first + 1 < length else 0))
    return tuple(neighbours)


def _weights(neighbours: tuple[tuple[int, int], ...], length: int, bits: int, device: torch.device) -> Tensor:
    """Return the float32 weights [outputs, length] in steps of 2^-bits, from each output's (first index, second weight)."""
    first, second = torch.tensor(neighbours, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
    weights = torch.zeros(len(neighbours), length, dtype=torch.float32, device=device)
    weights.scatter_(1, first.unsqueeze(1), (2**bits - second).float().unsqueeze(1))
    return weights.scatter_add_(1, (first + 1).clamp_max(length - 1).unsqueeze(1), second.float().unsqueeze(1))


def _second_weight(share: Fraction, bits: int) -> int:
    """Return `share` in units of 2^-bits. It and 1 - share are rounded half up; the larger of the two is corrected so that the sum is 1."""
    if share <= HALF:
        return int((share * 2**bits + HALF) // 1)
    return int(2**bits - ((1 - share) * 2**bits + HALF) // 1)


def _lower_linear(lowering: Lowering, input: Quantized, axes: list[Axis], align_corners: bool) -> Quantized:
    stepped, floors = lowering.arithmetic.resize_positions, lowering.arithmetic.resize_floors
    places = lowering.arithmetic.resize_fraction_bits
    bits = STEPPED_BITS if stepped else places
    matrices: list[Any] = []
    for role, axis in zip(("columns", "rows"), reversed(axes), strict=False):
        neighbours = _stepped_neighbours(*axis, align_corners, places) if stepped else _neighbours(*axis, align_corners, bits)
        unchanged = neighbours == tuple((position, 0) for position in range(axis[0]))
        weights = None if unchanged else _weights(neighbours, axis[0], bits, input.scale.device)
        matrices.append(None if weights is None else lowering.constant(role, weights, torch.int32))
    largest = float(input.grid.magnitude * 2 ** (bits * (len(matrices) - matrices.count(None))))
    wide = largest >= FLOAT32_EXACT
    lowering.prove(largest, "the interpolated sum", limit=(FLOAT64_EXACT if wide else FLOAT32_EXACT) - 1)
    columns, rows = [*matrices, None][:2]
    if columns is None and rows is None:
        return input
    if not floors:
        return input.with_value(lowering.call(resize.resize_linear, input.value, rows, columns, bits, wide))
    value = input.value
    for row, column in ((None, columns), (rows, None)):
        if row is not None or column is not None:
            value = lowering.call(resize.resize_linear, value, row, column, bits, False, False)
    return input.with_value(value)


def _rows(axis: Axis, mode: str, align_corners: bool, antialias: bool) -> tuple[Row, ...]:
    """Return the weights of interpolation along one dimension."""
    length, _, factor = axis
    if antialias:
        return matrix.antialiased_rows(length, _count(*axis), factor, align_corners, mode == "bicubic")
    return (matrix.cubic_rows if mode == "bicubic" else matrix.linear_rows)(length, _count(*axis), factor, align_corners)


def _lower_weighted(lowering: Lowering, input: Quantized, axes: list[Axis], mode: str, align_corners: bool, antialias: bool) -> Quantized:
    """Apply weights along every dimension, and requantize once. Cubic weights sum to less than 2 in magnitude."""
    rows = [_rows(axis, mode, align_corners, antialias) for axis in axes]
    changed = len(rows) - [matrix.is_unchanged(row, axis[0]) for row, axis in zip(rows, axes, strict=True)].count(True)
    bits = fraction_bits(lowering.arithmetic.resize_fraction_bits, input.dtype.bits, changed, changed if mode == "bicubic" else 0)
    matrices = [fixed_point(row, axis[0], bits) for row, axis in zip(rows, axes, strict=True)]
    worth = torch.tensor(2.0 ** (bits * changed), dtype=torch.float64, device=input.scale.device)
    return weighted_sums(lowering, input, matrices, Ratio((input.scale,), (worth,)))


def _axes(shape: Sequence[Any], size: list[int] | None, scale_factor: list[float] | None) -> list[Axis]:
    lengths: list[Any] = list(shape[2:])
    unknown: list[Any] = [None] * len(lengths)
    return list(zip(lengths, size or unknown, scale_factor or unknown, strict=True))


def _interpolate_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    arguments = bound(F.interpolate, *args, **kwargs)
    recomputed = arguments.pop("recompute_scale_factor")
    return {**arguments, "scale_factor": None} if recomputed else arguments


def _interpolate_module(module: Any) -> dict[str, Any]:
    settings: Any = settings_of(("size", "scale_factor", "mode", "align_corners"))(module)
    return {**settings, "scale_factor": None} if module.recompute_scale_factor else settings


def _plain_sizes(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return the arguments with a factor for every spatial dimension, or with the result's sizes where no factors are given."""
    result, factors = shape_of(node)[2:], arguments["scale_factor"]
    if factors is not None:
        factors = list(factors) if isinstance(factors, list | tuple) else [factors] * len(result)
        plain = all(isinstance(factor, int | float) for factor in factors)
        return {**arguments, "scale_factor": factors} if plain else "its scale factor is computed"
    written = arguments["size"] if isinstance(arguments["size"], list | tuple) else [arguments["size"]] * len(result)
    sizes = [size if isinstance(size, int) else each for size, each in zip(result, written, strict=True)]
    return {**arguments, "size": sizes} if all(isinstance(size, int | fx.Node) for size in sizes) else SYMBOLIC_SIZE


def _refuses_sizes(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Refuse sizes that vary where weights are not computed at run time."""
    if are_fixed(shape_of(arguments["input"])[2:]) and are_fixed(shape_of(node)[2:]):
        return None
    if arguments["mode"] in OWN_GRID or arguments["antialias"] or any(largest_size(size) is None for size in shape_of(node)[2:]):
        return f"it is resized to sizes that vary, which mode={arguments['mode']!r} takes no weights for"
    return None if all(map(varying.fits, arguments["scale_factor"] or ())) else "its factor is not a quotient of small numbers"


def _lower_varying(
    lowering: Lowering, input: Quantized, size: Sequence[Any] | None, scale_factor: list[float] | None, mode: str, align_corners: bool
) -> Quantized:
    """Resize to sizes that vary."""
    factors: list[Any] = scale_factor or [None] * len(input.shape[2:])
    wanted = size or [None] * len(factors)
    if mode in NEAREST:
        return input.with_value(lowering.call(varying.resize_nearest_to, input.value, wanted, factors, mode != "nearest"))
    stepped, places = lowering.arithmetic.resize_positions, lowering.arithmetic.resize_fraction_bits
    bits, floors = STEPPED_BITS if stepped else places, lowering.arithmetic.resize_floors
    largest = float(input.grid.magnitude * 2 ** (bits * len(factors)))
    rest = factors, align_corners, bits, places if stepped else 0, floors
    return input.with_value(lowering.call(varying.resize_linear_to, input.value, wanted, *rest, largest >= FLOAT32_EXACT))


def _onnx_interpolate(c: Call) -> str:
    before, after = c.operand_shape, fact(c.node).shape
    nearest = c["mode"].startswith("nearest")
    if nearest and any(new % old for old, new in zip(before[2:], after[2:], strict=True)):
        return c.selected()  # the source of a pixel may depend on the runtime's rounding
    if c["mode"] == "area":
        return onnx_means(c, list(after[2:]))
    if c["antialias"]:
        axes = _axes(before, c["size"], c["scale_factor"])
        rows = [_rows(axis, c["mode"], bool(c["align_corners"]), True) for axis in axes]
        return onnx_matrices(c, c.input, before, [matrix.real_matrix(row, axis[0]) for row, axis in zip(rows, axes, strict=True)])
    factors = c["scale_factor"] or [_factor(old, new) for old, new in zip(before[2:], after[2:], strict=True)]
    align = "align_corners" if c["align_corners"] else "half_pixel"
    attributes: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": align}
    if c["mode"] == "bicubic":
        attributes |= {"mode": "cubic", "cubic_coeff_a": float(matrix.CUBIC)}
    if nearest:
        attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = c.e.constant(torch.tensor([1.0, 1.0, *factors], dtype=torch.float32, device="cpu"))
    roi = c.e.constant(torch.zeros(0, dtype=torch.float32, device="cpu")) if c.e.opset < 13 else ""
    return c.do("Resize", c.input, roi, scales, **attributes)


def _factor(old: Any, new: Any) -> float:
    """Return the least float32 factor, from new/old upwards, that gives the new size."""
    factor = torch.tensor(new / old, dtype=torch.float32, device="cpu")
    while math.floor(float(factor) * old) < new or math.floor(float(factor * old)) < new:
        factor = torch.nextafter(factor, torch.full_like(factor, math.inf))
    return float(factor)


@lowered(
    adapt=_interpolate_arguments,
    modules=dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), _interpolate_module),
    keeps=lambda arguments, after, bits: after if arguments["mode"] in NEAREST else EVERYTHING,  # what is averaged matters whole
    traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
    normalize=_plain_sizes,
    refuses=(one_of("mode", *NEAREST, *LINEAR, *OWN_GRID, because=lambda mode: f"mode={mode!r} has no integer form"), _refuses_sizes),
    reads=("size",),
    onnx=_onnx_interpolate,
    demand=lambda node, arguments: Own() if arguments["mode"] in OWN_GRID or arguments["antialias"] else Same(),
    samples=(
        *(sample(input=IMAGES[2], size=size, within=0.0) for size in ([4, 9], [8, 8])),
        *(sample(input=IMAGES[2], scale_factor=[factor, factor], within=0.0) for factor in (2.0, 1.5)),
        sample(input=IMAGES[1], size=[7], mode="linear", align_corners=True, within=NORMED),
        *(sample(input=IMAGES[2], size=[4, 9], mode=mode, within=NORMED) for mode in ("bilinear", "bicubic", "area")),
        *(sample(input=IMAGES[2], scale_factor=[0.7, 1.7], mode=mode, antialias=True, within=NORMED) for mode in ("bilinear", "bicubic")),
        sample(input=IMAGES[3], scale_factor=[1.0, 2.0, 1.5], mode="trilinear", within=NORMED),
    ),
)
def interpolate(
    lowering: Lowering, input: Quantized, size: list[int] | None = None, scale_factor: list[float] | None = None, mode: str = "nearest",
    align_corners: bool | None = None, antialias: bool = False,
) -> Quantized:  # fmt: skip
    """Return the tensor resized over its spatial dimensions, to `size` or by `scale_factor`."""
    if not are_fixed((*input.shape[2:], *(size or ()))):
        return _lower_varying(lowering, input, size, scale_factor, mode, bool(align_corners))
    axes = _axes(input.shape, size, scale_factor)
    if mode in NEAREST:
        return _lower_nearest(lowering, input, axes, mode)
    if mode == "area":
        return lower_means(lowering, input, [_count(*axis) for axis in axes])
    if mode in OWN_GRID or antialias:
        return _lower_weighted(lowering, input, axes, mode, bool(align_corners), antialias)
    return _lower_linear(lowering, input, axes, bool(align_corners))
