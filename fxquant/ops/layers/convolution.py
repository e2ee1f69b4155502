"""Convolution and transposed convolution in one to three dimensions: one description, two kinds. Deformable convolution.

Layers whose weight is computed by the model, convolutions with one for all items or one for each, are composites:

linear(x, w, b)                         →   x · wᵀ + b
conv2d(x, w)                            →   w as a matrix · unfold(x)
conv2d(x as one item, w, groups=B)      →   for each item, its w as a matrix · unfold(x)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from fxquant.ir.graph import BatchDim, TensorFact, fact, is_parameter, resolve
from fxquant.numerics.grids import EVERYTHING
from fxquant.ops.core import ROUNDED, Builder, Call, Clamp, Lowering, Quantized, Same, Trait, composite, known_size, selected, sums
from fxquant.ops.core.declare import Guard, are_fixed, fixed_sizes, known_sizes, lowered, module_of, needs, settings_of, with_batch
from fxquant.ops.core.record import Instead, Layer, Shape, operator_named
from fxquant.ops.core.samples import FOLDED, IMAGES, SAMPLED, sampled, written
from fxquant.ops.core.sums import is_computed
from fxquant.ops.core.weighted import ABSORBED, Product, absorbing, lower_weighted, refuses_weighted, rescaled, shape_of, sizes
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.layers.linear import matmul
from fxquant.ops.movement.pad import pad_before, unfold
from fxquant.ops.movement.repeating import expand
from fxquant.ops.movement.shape import permute, reshape
from fxquant.ops.sampling.resize import GRID_SAMPLE_OPSET, LINEAR_OPSET, Positions, lower_sample, refuses_image, spatial_of
from fxquant.primitives import Role, accumulate, role_of, shape
from fxquant.primitives.accumulate import CONVOLUTIONS, TRANSPOSED, convolve, sides, swap_channels
from fxquant.primitives.resize import sample
from fxquant.quantization.weights import BatchNorm, fold


def convolved(rank: int) -> Callable[..., dict[str, Any] | Instead]:
    """Return the adapter of a convolution's call forms, which maps one with a computed weight to the operator computed_conv{rank}d."""

    def adapt(*args: Any, **kwargs: Any) -> dict[str, Any] | Instead:
        computed = operator_named(f"computed_conv{rank}d")
        arguments = computed.bind(args, kwargs)
        return Instead(computed.function, arguments) if is_computed(arguments["weight"]) else arguments

    return adapt


def _each(size: Any, groups: Any) -> int:
    """Return the size per group: the coefficient of the batch size if both depend on the batch, else the size if it is fixed, else 0."""
    if isinstance(size, BatchDim) and isinstance(groups, BatchDim):
        return int(size.coefficient)
    return int(size) if isinstance(size, int) else 0


def _number_of(groups: Any) -> Any:
    return fact(groups) if isinstance(groups, fx.Node) else groups


def _margins(padding: Any, kernel: list[int], dilation: list[int]) -> list[int]:
    """Return the symmetric zero padding of a convolution as one number per spatial dimension; "same" is resolved."""
    if padding == "same":
        return [apart * (taps - 1) // 2 for apart, taps in zip(dilation, kernel, strict=True)]
    return sizes(0 if padding == "valid" else padding, len(kernel))


def _expand(
    build: Builder, rank: int, input: fx.Node, weight: fx.Node, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Any:
    number = _number_of(groups)
    by_item = isinstance(number, BatchDim)
    inner = int(number.coefficient) if isinstance(number, BatchDim) else number
    shape, weights = build.fact(input).shape, build.fact(weight).shape
    channels, results = _each(shape[1], number), _each(weights[0], number)
    kernel, image = known_sizes(weights[2:]), known_sizes(shape[2:])
    steps, apart = sizes(stride, rank), sizes(dilation, rank)
    around = _margins(padding, kernel, apart)
    if rank == 1:
        kernel, image, steps, around, apart = [1, *kernel], [1, *image], [1, *steps], [0, *around], [1, *apart]
    if by_item or rank == 1:
        input = build(reshape, input, [-1, channels, *image])
    columns = build(unfold, input, kernel, apart, around, steps)
    taps = known_size(weights[1]) * kernel[0] * kernel[1]
    windows = build.fact(columns).shape[2]
    matrix = build(reshape, weight, [-1 if by_item else 1, inner, results // inner, taps])
    result = build(matmul, matrix, build(reshape, columns, [-1, inner, taps, windows]))
    if bias is not None:
        result = build(add, result, build(reshape, bias, [-1 if by_item else 1, inner, results // inner, 1]))
    size = [
        (length + 2 * margin - apart_ * (taps_ - 1) - 1) // step + 1
        for length, margin, apart_, taps_, step in zip(image, around, apart, kernel, steps, strict=True)
    ]
    return build(reshape, result, [1, -1, *size[-rank:]] if by_item else [-1, results, *size[-rank:]])


def _refuses(rank: int) -> Guard:
    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        input_fact, weight, number = fact(arguments["input"]), fact(arguments["weight"]), _number_of(arguments["groups"])
        if len(input_fact.shape) != rank + 2:
            return "its input has no batch dimension"
        by_item = isinstance(number, BatchDim)
        if by_item and (input_fact.shape[0] != 1 or number.offset != 0 or number.coefficient.denominator != 1):
            return "its groups depend on the batch size, and its input is not one sample"
        fixed = [*input_fact.shape[2:], *weight.shape[1:], *(() if by_item else (input_fact.shape[1], weight.shape[0], number))]
        if not are_fixed(fixed) or not _each(weight.shape[0], number) or not _each(input_fact.shape[1], number):
            return "one of its sizes depends on the batch and is not the size of one sample"
        apart, taps = sizes(arguments["dilation"], rank), weight.shape[2:]
        if arguments["padding"] == "same" and any(each * (size - 1) % 2 for each, size in zip(apart, taps, strict=True)):
            return "its weight is computed, and padding='same' pads one more element after than before: pass padding as numbers"
        bias = arguments["bias"]
        return "its bias is a parameter, not computed per sample" if by_item and bias is not None and is_parameter(bias) else None

    return refuses


def _products(shapes: Mapping[str, Shape], result: Shape) -> int | Fraction:
    """Return the number of multiply-accumulates of a layer: elements of the result times elements of a row of the weight."""
    return math.prod(result) * math.prod(shapes["weight"][1:])


OWN_KERNELS = {  # different kernels for each item of the batch: all items become the channels of one
    1: "k = y[:, :2, :3, :2]; o = F.conv1d(x.reshape(1, -1, 36), k.flatten(0, 1), padding=1, dilation=2, groups=x.shape[0]);"
    " return o.view(x.shape[0], 2, -1)",
    2: "k = y.unflatten(1, (1, 3))[..., :3, :2]; o = F.conv2d(x.reshape(1, -1, 6, 6), k.flatten(0, 1), padding=1, dilation=2,"
    " groups=x.shape[0]); return o.view(x.shape[0], 1, *o.shape[2:])",
}


def _computed(rank: int) -> Callable[..., Tensor]:
    convolution = getattr(torch, f"conv{rank}d")

    @composite(
        name=f"computed_conv{rank}d",
        function=lambda *arguments: convolution(*arguments),
        operands=("input", "weight", "bias"),
        refuses=_refuses(rank),
        layer=Layer(macs=_products),
        samples=written(OWN_KERNELS[rank], within=ROUNDED),
    )
    def computed(
        build: Builder, input: fx.Node, weight: fx.Node, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: Any = 1,
    ) -> Any:  # fmt: skip
        """Compute a convolution with a weight that the model computes."""
        return _expand(build, rank, input, weight, bias, stride, padding, dilation, groups)

    return computed


computed_conv1d, computed_conv2d = _computed(1), _computed(2)
COMPUTED = (1, 2)  # the ranks of convolutions with a computed weight


@composite(
    function=sums.computed_linear,
    operands=("input", "weight", "bias"),
    refuses=needs("its weight is computed and is not a matrix", lambda arguments: len(shape_of(arguments["weight"]) or ()) == 2),
    layer=Layer(macs=_products),
)
@sampled("F.linear(x, y[0, 0, :5])", within=ROUNDED)
def computed_linear(build: Builder, input: fx.Node, weight: fx.Node, bias: Any = None) -> Any:
    """Compute x · wᵀ + b with a weight that the model computes."""
    product = build(matmul, input, build(permute, weight, [1, 0]))
    return product if bias is None else build(add, product, bias)


# ---- Convolutions with a constant weight: one description, two kinds -------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """Properties in which the kinds of convolution differ."""

    name: str
    kernels: dict[int, Callable[..., Tensor]]  # the float functions by rank
    attributes: dict[str, Any]  # the parameters after weight and bias, with defaults, in PyTorch's order
    order: tuple[str, ...]  # the attributes in the primitives' order
    # Weight and groups -> the weight as (out, in/groups, …); it is its own inverse. Folded and quantized in this form, the weight has one
    # scale per output channel.
    arrange: Callable[[Tensor, int], Tensor]
    channels: int  # the dimension of the output channels in PyTorch's form of the weight
    narrow: Callable[..., Tensor]  # the primitive for sums below 2^24, wide the other one
    wide: Callable[..., Tensor]
    spread: str  # the tensor whose elements each meet a whole kernel of one channel group, for counting MACs: the result, or the input


PLAIN = Kind(
    "conv", dict.fromkeys(CONVOLUTIONS, convolve), {"stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    ("stride", "padding", "dilation", "groups"), lambda weight, groups: weight, 0,
    accumulate.convolution, accumulate.convolution_wide, "result",
)  # fmt: skip
REVERSED = Kind(
    "conv_transpose", TRANSPOSED, {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1},
    ("stride", "padding", "output_padding", "dilation", "groups"), swap_channels, 1,
    accumulate.transposed_convolution, accumulate.transposed_convolution_wide, "input",
)  # fmt: skip


def _lower(kind: Kind, rank: int) -> Callable[..., Quantized]:
    def lower(
        lowering: Lowering, input: Quantized, weight: Tensor, bias: Tensor | None = None, *, batch_norm: BatchNorm | None = None,
        residual: Quantized | None = None, clamp: Clamp | None = None, **attributes: Any,
    ) -> Quantized:  # fmt: skip
        """Compute a convolution, or a transposed one, with the batch norm, residual and clamp that are fused into it."""
        settings: dict[str, Any] = {name: value if name == "groups" else sizes(value, rank) for name, value in attributes.items()}
        groups = settings["groups"]
        product = Product(
            kind.narrow, kind.wide, attributes=tuple(settings[name] for name in kind.order), trailing=rank, channels=kind.channels,
            layout=lambda integers: kind.arrange(integers, groups), transposed=kind is REVERSED, in_parts=True,
        )  # fmt: skip
        return lower_weighted(lowering, product, input, kind.arrange(weight, groups), bias, residual, clamp, batch_norm)

    return lower


class Margin(NamedTuple):
    """Padding with something else than zeros, done by a separate pad: `around` and `mode` are arguments of F.pad."""

    around: list[int]
    mode: str


def _numbers(padding: Any, kernel: list[int], dilation: Any, mode: str = "zeros") -> Any:
    """Return padding as one number per spatial dimension, or as all sizes before, then all after; a `Margin` if it is not of zeros."""
    rank = len(kernel)
    if padding == "same":
        totals = [taps * (size - 1) for taps, size in zip(sizes(dilation, rank), kernel, strict=True)]
        pairs = [(total // 2, total - total // 2) for total in totals]
    else:
        pairs = [(size, size) for size in sizes(0 if padding == "valid" else padding, rank)]
    if mode == "zeros" or not any(map(any, pairs)):
        return padding_of(pairs)
    return Margin([size for pair in reversed(pairs) for size in pair], mode)


def padding_of(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the canonical padding with these zeros before and after each dimension: one number for each if the two are always equal."""
    before, after = ([pair[side] for pair in pairs] for side in range(2))
    return before if before == after else [*before, *after]


def _padded(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return padding by name as numbers; a margin becomes a pad before the convolution, which then has none.

    %y = conv2d[circular](%x, %w, padding=[1, 1])     →       %y_pad = pad(%x, [1, 1, 1, 1], mode=circular)
                                                              %y = conv2d(%y_pad, %w)
    """
    padding = arguments["padding"]
    if isinstance(padding, str):
        kernel = shape_of(arguments["weight"])
        if kernel is None:
            return f"padding={padding!r} depends on its weight, which is not a tensor"
        padding = _numbers(padding, [int(size) for size in kernel[2:]], arguments["dilation"])  # type: ignore[arg-type]
    if not isinstance(padding, Margin):
        return {**arguments, "padding": padding}
    return {**arguments, "input": pad_before(node, arguments["input"], padding.around, padding.mode), "padding": 0}


def _convolution_module(module: Any) -> dict[str, Any]:
    padding = _numbers(module.padding, list(module.kernel_size), module.dilation, module.padding_mode)
    settings: Any = settings_of(("weight", "bias", *PLAIN.attributes))(module)
    return {**settings, "padding": padding}


def _output_padding(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the padding that gives the output size a module was called with: it is read off the result."""
    operand, result = fact(arguments["input"]), fact(node)
    has_size = len(node.args) > 1 or "output_size" in node.kwargs
    if node.op != "call_module" or not has_size or not isinstance(operand, TensorFact) or not isinstance(result, TensorFact):
        return arguments
    kernel = resolve(node.graph.owning_module, str(node.target)).kernel_size  # type: ignore[arg-type]
    names = ("stride", "padding", "dilation")
    rows = zip(operand.shape[2:], result.shape[2:], kernel, *(sizes(arguments[name], len(kernel)) for name in names), strict=True)
    extra = [after - (size - 1) * stride + 2 * padding - dilation * (taps - 1) - 1 for size, after, taps, stride, padding, dilation in rows]
    return {**arguments, "output_padding": extra}


def _onnx_window(c: Call) -> dict[str, Any]:
    kernel = list(c.constants["weight"][0].shape[2:])
    stride, padding, dilation = (sizes(c[name], len(kernel)) for name in ("stride", "padding", "dilation"))
    before, after = sides(padding, len(kernel))
    return {"kernel_shape": kernel, "strides": stride, "pads": [*before, *after], "dilations": dilation, "group": c["groups"]}


def _onnx_convolution(c: Call) -> str:
    attributes = _onnx_window(c)
    rank = len(attributes["kernel_shape"])
    operand = c.selected()  # with its own elements around it, where it is padded with those
    if rank == 1 and c.as_convolution():
        before, after = attributes["pads"]
        attributes |= {name: [*attributes[name], 1] for name in ("kernel_shape", "strides", "dilations")}
        attributes["pads"] = [before, 0, after, 0]
        sums = next(node for node in c.primitives if role_of(node.target) is Role.CONVOLUTION)
        image = c.do("ToImage", operand, shape=fact(sums.all_input_nodes[0]).at(1), axes=[0, 1, 2])
        output = c.with_bias(lambda *bias: c.do("Conv", image, c.weight(lambda weight: weight[..., None]), *bias, **attributes), 2)
        return c.epilogue(c.do("FromImage", output, shape=fact(sums).at(1), axes=[0, 1, 2]))
    return c.epilogue(c.with_bias(lambda *bias: c.do("Conv", operand, c.weight(), *bias, **attributes), rank))


def _onnx_transposed(c: Call) -> str:
    attributes = _onnx_window(c)
    rank = len(attributes["kernel_shape"])
    attributes["output_padding"] = sizes(c["output_padding"], rank)
    return c.epilogue(c.with_bias(lambda *bias: c.do("ConvTranspose", c.input, c.weight(), *bias, **attributes), rank))


FOLDING = (
    "{nn.SyncBatchNorm(4)}({nn.Conv2d(3, 4, 3)}(x))",
    "F.batch_norm({nn.Conv2d(3, 4, 3)}(x), {B(torch.randn(4))}, {B(torch.rand(4) + 0.5)}, {P(4)}, {P(4)})",
)


def _declare(
    rank: int, *texts: str, kind: Kind, extract: Callable[[Any], dict[str, Any]], normalize: Any, onnx: Callable[[Call], str],
    folding: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Declare a convolution; `texts` are its samples, with "{name}" for its function and "{layer}" for its class."""
    name = f"{kind.name}{rank}d"

    def folded(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, groups: int = 1, **_: Any) -> tuple[Tensor, Tensor]:
        weight, bias = fold(kind.arrange(weight, groups), bias, batch_norm, 0)
        return kind.arrange(weight, groups), bias

    layer = f"nn.{module_of(name)[0].__name__}"
    declared = lowered(
        name=name,
        function=absorbing(kind.kernels[rank], folded, tuple(kind.attributes)),
        settings=kind.attributes,
        adapt=convolved(rank) if kind is PLAIN and rank in COMPUTED else None,
        modules=dict.fromkeys(module_of(name), extract),
        traits=frozenset({Trait.SUMS, Trait.OUTPUTS_FIRST, Trait.PADS_ZEROS} if kind is PLAIN else {Trait.SUMS}),
        absorbs=ABSORBED,
        refuses=(with_batch(rank), refuses_weighted),
        read_off=frozenset({"output_size"} if kind is REVERSED else ()),
        normalize=normalize,
        layer=Layer(
            weight=lambda weight, groups=1, **_: kind.arrange(weight, groups),
            folded=folded,
            channels=lambda arguments: 1,
            rescaled=lambda arguments, inputs, outputs: rescaled(arguments, inputs, outputs, kind.arrange),
            # PyTorch's weight is (out, in/groups, …), and (in, out/groups, …) of a transposed one.
            macs=lambda shapes, result: math.prod({**shapes, "result": result}[kind.spread]) * math.prod(shapes["weight"][1:]),
        ),
        onnx=onnx,
        samples=(
            *written(*(text.format(name=f"F.{name}", layer=layer) for text in texts), x=IMAGES[rank]),
            *written(f"{{nn.BatchNorm{rank}d(4)}}({{{layer}(3, 4, 2, bias=False)}}(x))", within=FOLDED, x=IMAGES[rank]),
            *written(*folding, within=FOLDED),
        ),
    )
    return declared(_lower(kind, rank))


_plain = partial(_declare, kind=PLAIN, extract=_convolution_module, normalize=_padded, onnx=_onnx_convolution)
conv1d = _plain(1, "{name}(x, {{P(4, 3, 3)}}, {{P(4)}}, 2, 1)", "{layer}(3, 4, 3, padding='same')")
conv2d = _plain(
    2,
    *("{name}(x, {{P(6, 1, 3, 3)}}, {{P(6)}}, groups=3, padding=1)", "{layer}(3, 6, 3, groups=3, bias=False)"),
    *("{name}(x, {{P(6, 1, 3, 3)}}, {{P(6)}}, groups=3, dilation=2, stride=(1, 2))", "{layer}(3, 2, 3, dilation=2, padding='same')"),
    *("{layer}(3, 5, (3, 1), stride=(2, 1), padding=(1, 0))", "{layer}(3, 1, 1, padding='valid')"),
    folding=FOLDING,
)
conv3d = _plain(3, "{name}(x, weight={{P(2, 3, 2, 3, 3)}}, bias={{P(2)}}, padding=(0, 1, 1))", "{layer}(3, 2, 2)")

_taken: Any = settings_of(("weight", "bias", *REVERSED.attributes))
_reversed = partial(_declare, kind=REVERSED, extract=_taken, normalize=_output_padding, onnx=_onnx_transposed)
conv_transpose1d = _reversed(1, "{name}(x, {{P(3, 3, 3)}}, {{P(3)}}, 2).relu()", "{layer}(3, 2, 3, 2, 1, 1)")
conv_transpose2d = _reversed(
    2,
    *("{name}(x, {{P(3, 1, 2, 2)}}, {{P(3)}}, stride=2, groups=3)", "{layer}(3, 2, 4, 2, 1)"),
    "{layer}(3, 2, (2, 3), dilation=2, bias=False)",
)
conv_transpose3d = _reversed(3, "{name}(x, {{P(3, 3, 2, 2, 2)}}, {{P(3)}}, 2)", "{layer}(3, 2, 2)")


# ---- Deformable convolution: a convolution whose every tap is read where an offset moves it --------------------------
#
# taps (N, C, H'·kh, W'·kw), read between the pixels;   y = conv(taps · mask, weight), kernel and stride (kh, kw)
Geometry = tuple[Any, Any, Any, Any]  # kernel, stride, padding, dilation


def _deform_conv2d(
    input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tensors = tuple(value for value in (input, offset, weight, bias, mask) if value is not None)
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(deform_conv2d, tensors, input, offset, weight, bias, stride, padding, dilation, mask)
        return result
    kernel = list(weight.shape[2:])
    taps = deformed_taps(input, offset, kernel, stride, padding, dilation)
    if mask is not None:
        taps = taps * _spread_mask(mask, taps, kernel)
    return F.conv2d(taps, weight, bias, kernel, 0, 1, input.shape[1] // weight.shape[1])


def _base(height: int, width: int, geometry: Geometry) -> Tensor:
    """Return (x, y) of every tap of every output where nothing moves it: float64 (H'·kh, W'·kw, 2)."""
    axes = []
    for count, taps, stride, padding, dilation in zip((height, width), *(sizes(value, 2) for value in geometry), strict=True):
        starts = torch.arange(count, dtype=torch.float64, device="cpu") * stride - padding
        axes.append((starts.unsqueeze(1) + torch.arange(taps, dtype=torch.float64, device="cpu") * dilation).flatten())
    rows, columns = axes
    return torch.stack((columns.expand(len(rows), -1), rows.unsqueeze(1).expand(-1, len(columns))), -1)


def _deformed_taps(input: Tensor, offset: Tensor, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Tensor:
    (rows, columns), (height, width) = sizes(kernel_size, 2), offset.shape[2:]
    groups = offset.shape[1] // (2 * rows * columns)
    moved = offset.reshape(-1, rows, columns, 2, height, width).permute(0, 4, 1, 5, 2, 3).flip(-1)
    moved = moved.reshape(-1, height * rows, width * columns, 2)
    absolute = moved + _base(height, width, (kernel_size, stride, padding, dilation)).to(moved)
    images = input.reshape(-1, input.shape[1] // groups, *input.shape[2:])
    extent = torch.tensor([input.shape[3], input.shape[2]], dtype=moved.dtype, device=moved.device)
    taps = F.grid_sample(images, (2 * absolute + 1) / extent - 1, "bilinear", "zeros", False)
    return taps.reshape(-1, input.shape[1], height * rows, width * columns)


def _onnx_taps(c: Call) -> str:
    """Write a GridSample at the taps' positions; the offsets are scaled first: onnxruntime cannot move a DequantizeLinear after Reshape."""
    node: Any = c.primitive(sample)
    height, width = spatial_of(c)
    channels, rows, columns = (int(size) for size in fact(c.node).shape[1:])
    taps = sizes(c["kernel_size"], 2)
    geometry = c["kernel_size"], c["stride"], c["padding"], c["dilation"]
    groups = channels // fact(node.args[0]).shape[1]
    factors = torch.tensor([2 / height, 2 / width], device="cpu", dtype=torch.float32).repeat(groups * taps[0] * taps[1])
    moved = c.do("Mul", c.operand("offset"), c.e.constant(factors.reshape(1, -1, 1, 1)))
    moved = c.do("Reshape", moved, c.integers([-1, *taps, 2, rows // taps[0], columns // taps[1]]))
    moved = c.do("Gather", c.do("Transpose", moved, perm=[0, 4, 1, 5, 2, 3]), c.integers([1, 0]), axis=5)
    base = _base(rows // taps[0], columns // taps[1], geometry)
    start = (2 * base + 1) / torch.tensor([width, height], dtype=torch.float64, device="cpu") - 1
    grid = c.do("Add", c.do("Reshape", moved, c.integers([-1, rows, columns, 2])), c.e.constant(start.float()))
    image = c.operand("input")
    if groups > 1:  # on the result's grid, which is the image's: rounding it changes nothing
        image = c.rounded(c.do("Reshape", image, c.integers([-1, channels // groups, height, width])))
    mode = "linear" if c.e.opset >= LINEAR_OPSET else "bilinear"
    value = c.do("GridSample", image, grid, mode=mode, padding_mode="zeros", align_corners=0)
    return value if groups == 1 else c.do("Reshape", value, c.integers([-1, channels, rows, columns]))


_REFUSES_TAPS: tuple[Guard, Guard] = (
    fixed_sizes("the size of its offsets is not known", "offset", 1),
    lambda node, arguments: refuses_image(arguments["input"], "bilinear", "zeros"),
)


@lowered(
    function=_deformed_taps,
    dtypes={"offset": "int16"},
    keeps=lambda arguments, after, bits: EVERYTHING,
    refuses=_REFUSES_TAPS,
    onnx=lambda c: c.exported() if c.e.opset < GRID_SAMPLE_OPSET else _onnx_taps(c),
    demand=Same(("input",)),
)
@sampled("{fxq.nn.DeformConv2d(3, 2, 1)}(x, y)", within=SAMPLED, x=(3, 6, 6), y=(2, 6, 6))
def deformed_taps(
    lowering: Lowering, input: Quantized, offset: Quantized, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> Quantized:
    """Return (N, C, H'·kh, W'·kw): the sampled input of each tap of each output, in blocks of kh by kw."""
    (rows, columns), (moves, height, width) = sizes(kernel_size, 2), known_sizes(offset.shape[1:])
    channels, *spatial = known_sizes(input.shape[1:])
    groups = moves // (2 * rows * columns)

    def exact() -> Any:
        moved = lowering.call(shape.reshape, offset.value, [-1, rows, columns, 2, height, width])
        moved = lowering.call(shape.permute, moved, [0, 4, 1, 5, 2, 3])
        moved = selected(lowering, moved, 5, [1, 0], "order")
        moved = lowering.call(shape.reshape, moved, [-1, height * rows, width * columns, 2])
        images = input.value
        if groups > 1:
            images = lowering.call(shape.reshape, images, [-1, channels // groups, *spatial])
        image = replace(input, value=images, shape=(input.shape[0], channels // groups, *spatial))
        positions = Positions([1.0, 1.0], _base(height, width, (kernel_size, stride, padding, dilation)), False)
        taps = lower_sample(lowering, image, offset.with_value(moved), positions, "bilinear", "zeros")
        return lowering.call(shape.reshape, taps, [-1, channels, height * rows, width * columns])

    return lowering.result(exact, lambda: deformed_taps(input.real(), offset.real(), kernel_size, stride, padding, dilation))


def _spread_mask(mask: Tensor, taps: Tensor, kernel: list[int]) -> Tensor:
    """Return the factor of every tap, in the taps' shape."""
    (rows, columns), (height, width) = kernel, mask.shape[2:]
    groups, channels = mask.shape[1] // (rows * columns), taps.shape[1]
    spread = mask.reshape(-1, groups, rows, columns, height, width).permute(0, 1, 4, 2, 5, 3)
    spread = spread.reshape(-1, groups, 1, height * rows, width * columns).expand(-1, -1, channels // groups, -1, -1)
    return spread.reshape(-1, channels, height * rows, width * columns)


@composite(
    operands=("input", "offset", "mask"),
    function=_deform_conv2d,
    refuses=(
        needs("its weight is not a tensor of known shape", lambda arguments: shape_of(arguments["weight"]) is not None),
        needs("the size of its mask is not known", lambda arguments: are_fixed((shape_of(arguments["mask"]) or ())[1:])),
        *_REFUSES_TAPS,
    ),
)
@sampled("{fxq.nn.DeformConv2d(3, 4, 3, padding=1)}(x, y)", within=SAMPLED, x=(3, 6, 6), y=(18, 6, 6))
def deform_conv2d(
    build: Builder, input: fx.Node, offset: fx.Node, weight: fx.Node, bias: fx.Node | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, mask: fx.Node | None = None,
) -> Any:  # fmt: skip
    """Deformable convolution, version 2 with a mask, with the arguments of torchvision.ops.deform_conv2d.

    input (N, C, H, W); offset (N, 2·groups·kh·kw, H', W'), in pixels, y before x; mask (N, groups·kh·kw, H', W'), a factor for each tap;
    weight (O, C / groups of the convolution, kh, kw). Outside of the image is 0. From: Zhu et al., Deformable ConvNets v2, 2019.
    """
    _, inputs, rows, columns = known_sizes(shape_of(weight) or ())
    taps = build(deformed_taps, input, offset, [rows, columns], stride, padding, dilation)
    channels, tall, wide = known_sizes(build.fact(taps).shape[1:])
    if mask is not None:
        mask_channels, height, width = known_sizes(build.fact(mask).shape[1:])
        groups = mask_channels // (rows * columns)
        factors = build(permute, build(reshape, mask, [-1, groups, rows, columns, height, width]), [0, 1, 4, 2, 5, 3])
        factors = build(reshape, factors, [-1, groups, 1, tall, wide])
        if groups > 1:
            factors = build(expand, factors, [-1, -1, channels // groups, -1, -1])
        taps = build(mul, taps, build(reshape, factors, [-1, channels if groups > 1 else 1, tall, wide]))
    return build(conv2d, taps, weight, bias, [rows, columns], 0, 1, channels // inputs)
