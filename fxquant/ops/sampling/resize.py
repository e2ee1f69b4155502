"""Resizing: nearest neighbours as selections, interpolation as products with fixed-point weights, areas as means of windows.

The result of one or two linear interpolations lies between the operand's values and shares its scale; other modes have a separate scale.
Images are read at computed positions too: grid_sample, affine_grid, and warp by a flow of pixels. Positions are integers in steps of 2^-c
of a pixel, c as in the vendor's: 8, and less for an image larger than 128 pixels.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from fxquant.ir.graph import fact, largest_size, shape_of
from fxquant.numerics.grids import EVERYTHING, FLOAT32_EXACT, INT16, Grid, Ratio
from fxquant.ops.core import IMAGES, NORMED, SAMPLED, Call, Lowering, Own, Quantized, Same, Trait, sample, sampled, selected, sums
from fxquant.ops.core.declare import are_fixed, bound, fixed_sizes, known_sizes, lowered, one_of, real, settings_of
from fxquant.ops.core.sums import Row, fixed_point, fraction_bits, onnx_matrices, weighted_sums
from fxquant.ops.pooling.totals import lower_means, onnx_means
from fxquant.primitives import elementwise, product, resize, shape, varying

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
    rows = sums.linear_rows(length, _count(length, size, factor), factor, align_corners)
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
        return sums.antialiased_rows(length, _count(*axis), factor, align_corners, mode == "bicubic")
    return (sums.cubic_rows if mode == "bicubic" else sums.linear_rows)(length, _count(*axis), factor, align_corners)


def _lower_weighted(lowering: Lowering, input: Quantized, axes: list[Axis], mode: str, align_corners: bool, antialias: bool) -> Quantized:
    """Apply weights along every dimension, and requantize once. Cubic weights sum to less than 2 in magnitude."""
    rows = [_rows(axis, mode, align_corners, antialias) for axis in axes]
    changed = len(rows) - [sums.is_unchanged(row, axis[0]) for row, axis in zip(rows, axes, strict=True)].count(True)
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
        return onnx_matrices(c, c.input, before, [sums.real_matrix(row, axis[0]) for row, axis in zip(rows, axes, strict=True)])
    factors = c["scale_factor"] or [_factor(old, new) for old, new in zip(before[2:], after[2:], strict=True)]
    align = "align_corners" if c["align_corners"] else "half_pixel"
    attributes: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": align}
    if c["mode"] == "bicubic":
        attributes |= {"mode": "cubic", "cubic_coeff_a": float(sums.CUBIC)}
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


# ---- Computed positions ----------------------------------------------------------------------------------------------
MODES, PADDINGS = ("bilinear", "nearest"), ("zeros", "border", "reflection")
FRACTION_BITS = 8
LARGEST_IMAGE = 2**13
BASE_BITS = 14  # of the coordinates, from -1 to 1, that an affine grid is made of
GRID_SAMPLE_OPSET, LINEAR_OPSET = 16, 20  # the first that has the operator, and that calls "bilinear" so


@dataclass(frozen=True)
class Positions:
    """Where an image is read: factor · value + offset pixels, per coordinate, of a value that an operator reads."""

    factor: list[float]
    offset: Tensor  # a number per coordinate, or one for every place as well
    corners: bool  # whether the middles of the outermost pixels are the image's ends


def normalized(spatial: Sequence[int], align_corners: bool) -> Positions:
    """Return the positions of a grid whose -1 and 1 are the ends of the image."""
    reversed_sizes = list(reversed(spatial))
    factor = [(size - 1) / 2 if align_corners else size / 2 for size in reversed_sizes]
    return Positions(factor, torch.tensor([(size - 1) / 2 for size in reversed_sizes], dtype=torch.float64, device="cpu"), align_corners)


def bits_of_positions(spatial: Sequence[int]) -> int:
    """c: 16 bits hold any position beside the image, as well."""
    return min(FRACTION_BITS, 15 - max(spatial).bit_length())


def lower_sample(lowering: Lowering, input: Quantized, where: Quantized | Tensor, positions: Positions, mode: str, padding: str) -> Any:
    """Return the integers of the image at these positions, on its own grid."""
    spatial = known_sizes(input.shape[2:])
    bits, coordinates = bits_of_positions(spatial), coordinates_of(lowering, input, where, positions)
    large = input.grid.magnitude * (1 if mode == "nearest" else 2 ** (bits * len(spatial))) >= FLOAT32_EXACT
    return lowering.call(resize.sample, input.value, coordinates, spatial, bits, mode, padding, positions.corners, 0, large)


def coordinates_of(lowering: Lowering, input: Quantized, where: Quantized | Tensor, positions: Positions) -> Any:
    """Return the positions in steps of a part of a pixel from the middle of the image's first one: an accumulator."""
    bits = bits_of_positions(known_sizes(input.shape[2:]))
    device = input.scale.device
    offset = torch.round(positions.offset.to(device) * 2.0**bits)
    if isinstance(where, Quantized):
        grid = Grid(INT16, torch.tensor(2.0**-bits, dtype=torch.float32, device=device))
        factor = torch.tensor(positions.factor, dtype=torch.float64, device=device).clamp_min(2.0**-20)  # of an image of one pixel
        ratio = Ratio((where.scale, factor), (grid.scale,))
        moved = lowering.arithmetic.requantize(lowering, where.value, ratio, *grid.bounds, grid, "positions_")
        widened = lowering.call(elementwise.widen, moved)
        return lowering.call(elementwise.add_constant, widened, lowering.constant("offset", offset.float(), torch.int32))
    exact = where.to(device).double() * torch.tensor(positions.factor, dtype=torch.float64, device=device) * 2.0**bits
    return lowering.constant("coordinates", torch.round(exact).clamp(INT16.low, INT16.high) + offset, torch.int32)


def spatial_of(c: Call) -> list[int]:
    """Return the size of the image that an operator reads."""
    node: Any = c.primitive(resize.sample)
    return list(node.args[2])


def refuses_image(input: Any, mode: str, padding: str) -> str | None:
    """Return why an image cannot be read between its pixels."""
    sizes: Any = shape_of(input)[2:]
    if mode not in MODES:
        return f"mode={mode!r} has no integer form"
    if padding not in PADDINGS:
        return f"padding_mode={padding!r} has no integer form"
    if len(sizes) not in (2, 3) or not are_fixed(sizes) or 0 in sizes:
        return "the size of its image is not known"
    return None if max(sizes) <= LARGEST_IMAGE else f"its image is larger than {LARGEST_IMAGE}"


def _refuses_image(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return refuses_image(arguments["input"], arguments["mode"], arguments["padding_mode"])


def _sampled(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> dict[str, Any]:
    return {"input": input, "grid": grid, "mode": mode, "padding_mode": padding_mode, "align_corners": bool(align_corners)}


def _by_number(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> dict[str, Any]:
    """Adapt torch.grid_sampler, which takes the modes by their places in a list."""
    return _sampled(input, grid, (*MODES, "bicubic")[interpolation_mode], PADDINGS[padding_mode], align_corners)


def _onnx_read(c: Call, grid: str, align_corners: bool) -> str:
    mode = "linear" if c["mode"] == "bilinear" and c.e.opset >= LINEAR_OPSET else c["mode"]
    return c.do("GridSample", c.operand("input"), grid, mode=mode, padding_mode=c["padding_mode"], align_corners=int(align_corners))


@lowered(
    operands=("input", "grid"),
    function=lambda input, grid, mode="bilinear", padding_mode="zeros", align_corners=None: F.grid_sample(
        input, grid, mode, padding_mode, bool(align_corners)
    ),
    calls={F.grid_sample: _sampled, **dict.fromkeys((torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d), _by_number)},
    dtypes={"grid": "int16"},
    keeps=lambda arguments, after, bits: EVERYTHING,  # what limits the image does not limit the positions
    refuses=_refuses_image,
    onnx=lambda c: c.exported() if c.e.opset < GRID_SAMPLE_OPSET else _onnx_read(c, c.operand("grid"), bool(c["align_corners"])),
    demand=Same(("input",)),
)
@sampled("F.grid_sample(x, y / 2, align_corners=False)", within=SAMPLED, x=(3, 6, 6), y=(4, 5, 2))
@sampled("F.grid_sample(x, y, 'bilinear', 'reflection', True)", within=SAMPLED, x=(3, 6, 6), y=(4, 5, 2))
@sampled("torch.grid_sampler(x, y, 0, 0, True)", "torch.grid_sampler_2d(x, y, 0, 0, True)", within=SAMPLED, x=(3, 6, 6), y=(4, 5, 2))
@sampled("F.grid_sample(x, y.permute(0, 2, 3, 1), padding_mode='border')", within=SAMPLED, x=(3, 6, 6), y=(2, 4, 5))
@sampled("F.grid_sample(x, y, align_corners=False)", within=SAMPLED, x=IMAGES[3], y=(2, 3, 2, 3))
@sampled("torch.grid_sampler_3d(x, y, 0, 2, False)", within=SAMPLED, x=IMAGES[3], y=(2, 3, 2, 3))
def grid_sample(
    lowering: Lowering, input: Quantized, grid: Quantized | Tensor, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Quantized:  # fmt: skip
    """Sample the image at the positions of a grid, (N, …, rank), x first, whose -1 and 1 are the image's ends."""
    positions = normalized(known_sizes(input.shape[2:]), bool(align_corners))
    return lowering.result(
        lambda: lower_sample(lowering, input, grid, positions, mode, padding_mode),
        lambda: grid_sample(input.real(), real(grid), mode, padding_mode, align_corners),
    )


def _warp(input: Tensor, flow: Tensor, mode: str = "bilinear", padding_mode: str = "zeros") -> Tensor:
    if has_torch_function((input, flow)):
        result: Tensor = handle_torch_function(warp, (input, flow), input, flow, mode, padding_mode)
        return result
    height, width = input.shape[2:]
    sizes = torch.tensor([width, height], dtype=flow.dtype, device=flow.device)
    absolute = flow + _pixels(flow.shape[1], flow.shape[2]).to(flow)
    return F.grid_sample(input, (2 * absolute + 1) / sizes - 1, mode, padding_mode, False)


def _pixels(height: int, width: int) -> Tensor:
    """Return (x, y) of every pixel: float64 (height, width, 2)."""
    rows, columns = torch.arange(height, dtype=torch.float64, device="cpu"), torch.arange(width, dtype=torch.float64, device="cpu")
    return torch.stack((columns.expand(height, width), rows.unsqueeze(1).expand(height, width)), -1)


def _onnx_warp(c: Call) -> str:
    """Write GridSample of the positions on a grid from -1 to 1."""
    if c.e.opset < GRID_SAMPLE_OPSET:
        return c.exported()
    height, width = spatial_of(c)
    rows, columns = fact(c.node).shape[2:]
    sizes = torch.tensor([width, height], dtype=torch.float64, device="cpu")
    start = (2 * _pixels(rows, columns) + 1) / sizes - 1
    grid = c.do("Add", c.do("Mul", c.operand("flow"), c.e.constant((2 / sizes).float())), c.e.constant(start.float()))
    return _onnx_read(c, grid, False)


@lowered(
    operands=("input", "flow"),
    function=_warp,
    dtypes={"flow": "int16"},
    keeps=lambda arguments, after, bits: EVERYTHING,
    refuses=(fixed_sizes("the size of its flow is not known", "flow", 1), _refuses_image),
    onnx=_onnx_warp,
    demand=Same(("input",)),
)
@sampled("{fxq.nn.Warp()}(x, y)", within=SAMPLED, x=(3, 6, 6), y=(6, 6, 2))
def warp(lowering: Lowering, input: Quantized, flow: Quantized | Tensor, mode: str = "bilinear", padding_mode: str = "zeros") -> Quantized:
    """Return the image (N, C, H, W) read at (x + flow[…, 0], y + flow[…, 1]) for each pixel (x, y) of a flow (N, H', W', 2) of pixels."""
    positions = Positions([1.0, 1.0], _pixels(*known_sizes(flow.shape[1:3])), False)
    return lowering.result(
        lambda: lower_sample(lowering, input, flow, positions, mode, padding_mode),
        lambda: warp(input.real(), real(flow), mode, padding_mode),
    )


def _base(size: Sequence[int], align_corners: bool) -> Tensor:
    """Return (x, y, …, 1) of every place in steps of 2^-14: float64 (places, rank + 1)."""
    axes = []
    for count in size:
        places = torch.arange(count, dtype=torch.float64, device="cpu")
        axes.append((2 * places / max(count - 1, 1) - int(count > 1)) if align_corners else (2 * places + 1) / count - 1)
    columns = [axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")]
    return torch.round(torch.stack([*reversed(columns), torch.ones_like(columns[0])], 1) * 2.0**BASE_BITS)


def _spatial_size(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    size = list(shape_of(node)[1:-1])
    return {**arguments, "size": size} if are_fixed(size) else "its size depends on the batch size"


def _onnx_affine_grid(c: Call) -> str:
    size = c["size"]
    base = (_base(size, bool(c["align_corners"])) * 2.0**-BASE_BITS).float()
    # Rounded first: onnxruntime cannot move QuantizeLinear of opset 21 in front of Transpose by itself.
    grid = c.rounded(c.do("MatMul", c.operand("theta"), c.e.constant(base.t().contiguous())))
    return c.do("Reshape", c.do("Transpose", grid, perm=[0, 2, 1]), c.integers([-1, *size, len(size)]))


@lowered(
    function=lambda theta, size, align_corners=None: F.affine_grid(theta, [theta.shape[0], 1, *size], bool(align_corners)),
    dtypes={"theta": "int16"},
    normalize=_spatial_size,
    onnx=_onnx_affine_grid,
)
@sampled("F.affine_grid(x, [x.shape[0], 1, 8, 4], align_corners=True)", x=(2, 3))
@sampled("F.affine_grid(x, (x.shape[0], 1, 2, 3, 4), align_corners=False)", x=(3, 4))
def affine_grid(lowering: Lowering, theta: Quantized, size: list[int], align_corners: bool | None = None) -> Quantized:
    """Return the grid that reads an image of this spatial size, transformed by theta, (N, rank, rank + 1): (N, *size, rank).

    Multiply the places, held as 16 bits, by every matrix.
    """
    base = lowering.constant("base", _base(size, bool(align_corners)).float().to(theta.scale.device), torch.int16)
    turned = lowering.call(shape.permute, theta.value, [0, 2, 1])
    largest = float((len(size) + 1) * 2**BASE_BITS * theta.grid.magnitude)
    wide = largest >= FLOAT32_EXACT
    lowering.prove(largest, "the grid", 2**47 - 1)
    total = lowering.call(product.matrix_product_wide if wide else product.matrix_product, base, turned)
    step = torch.tensor(2.0**-BASE_BITS, dtype=torch.float64, device=theta.scale.device)
    grid = lowering.requantize(total, Ratio((theta.scale, step)), bound=largest)
    return grid.with_value(lowering.call(shape.reshape, grid.value, [-1, *size, len(size)]))
