"""Reading images at computed positions: grid_sample, affine_grid, and warp by a flow of pixels.

Positions are integers in steps of 2^-c of a pixel, c as in the vendor's: 8, and less for an image larger than 128 pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from fxquant.ir.graph import fact, shape_of
from fxquant.numerics.grids import EVERYTHING, FLOAT32_EXACT, INT16, Grid
from fxquant.ops.core import IMAGES, SAMPLED, Call, Lowering, Quantized, Ratio, Same, are_fixed, lowered, sampled
from fxquant.ops.core.declare import fixed_sizes, known_sizes, real
from fxquant.primitives import elementwise, product, shape
from fxquant.primitives.resize import sample

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
    largest = input.grid.magnitude * (1 if mode == "nearest" else 2 ** (bits * len(spatial)))
    return lowering.call(sample, input.value, coordinates, spatial, bits, mode, padding, positions.corners, 0, largest >= FLOAT32_EXACT)


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
    node: Any = c.primitive(sample)
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
