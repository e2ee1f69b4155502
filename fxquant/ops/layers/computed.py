"""Layers whose weight is computed by the model, convolutions with one for all items or one for each: composites.

linear(x, w, b)                         →   x · wᵀ + b
conv2d(x, w)                            →   w as a matrix · unfold(x)
conv2d(x as one item, w, groups=B)      →   for each item, its w as a matrix · unfold(x)
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import fact, is_parameter, shape_of
from fxquant.ops.core import ROUNDED, BatchDim, Builder, are_fixed, composite, known_size, matrix, sampled, written
from fxquant.ops.core.declare import Guard, known_sizes, needs
from fxquant.ops.core.matrix import is_computed
from fxquant.ops.core.record import Instead, Layer, Shape, operator_named
from fxquant.ops.core.weighted import sizes
from fxquant.ops.elementwise.arithmetic import add
from fxquant.ops.layers.linear import matmul
from fxquant.ops.movement.patches import unfold
from fxquant.ops.movement.shape import permute, reshape


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
    function=matrix.computed_linear,
    operands=("input", "weight", "bias"),
    refuses=needs("its weight is computed and is not a matrix", lambda arguments: len(shape_of(arguments["weight"])) == 2),
    layer=Layer(macs=_products),
)
@sampled("F.linear(x, y[0, 0, :5])", within=ROUNDED)
def computed_linear(build: Builder, input: fx.Node, weight: fx.Node, bias: Any = None) -> Any:
    """Compute x · wᵀ + b with a weight that the model computes."""
    product = build(matmul, input, build(permute, weight, [1, 0]))
    return product if bias is None else build(add, product, bias)
