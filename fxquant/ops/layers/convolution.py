"""Convolution and transposed convolution in one to three dimensions: one description, two kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx

from fxquant.ir.graph import fact, resolve
from fxquant.ops.core.declare import lowered, module_of, settings_of, with_batch
from fxquant.ops.core.operators import FOLDED, IMAGES, Call, Clamp, Layer, Lowering, Quantized, TensorFact, Trait, written
from fxquant.ops.core.weighted import ABSORBED, Product, absorbing, lower_weighted, refuses_weighted, rescaled, shape_of, sizes
from fxquant.ops.layers.computed import COMPUTED, convolved
from fxquant.ops.movement.pad import pad_before
from fxquant.primitives import accumulate, transposed
from fxquant.primitives.accumulate import CONVOLUTIONS
from fxquant.primitives.transposed import TRANSPOSED, swap_channels
from fxquant.quantization.weights import BatchNorm, fold


@dataclass(frozen=True)
class Kind:
    """Properties in which the kinds of convolution differ.

    kernels     the float functions by rank
    attributes  the parameters after weight and bias, with defaults, in PyTorch's order
    order       the attributes in the primitives' order
    arrange     weight and groups -> the weight as (out, in/groups, …); it is its own inverse. Folded and quantized in this form, the
                weight has one scale per output channel
    channels    the dimension of the output channels in PyTorch's form of the weight
    narrow      the primitive for sums below 2^24, wide the other one
    spread      the tensor whose elements each meet a whole kernel of one channel group, for counting MACs: the result, or the input
    """

    name: str
    kernels: dict[int, Callable[..., Tensor]]
    attributes: dict[str, Any]
    order: tuple[str, ...]
    arrange: Callable[[Tensor, int], Tensor]
    channels: int
    narrow: Callable[..., Tensor]
    wide: Callable[..., Tensor]
    spread: str


PLAIN = Kind(
    "conv", CONVOLUTIONS, {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}, ("stride", "padding", "dilation", "groups"),
    lambda weight, groups: weight, 0, accumulate.convolution, accumulate.convolution_wide, "result",
)  # fmt: skip
REVERSED = Kind(
    "conv_transpose", TRANSPOSED, {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1},
    ("stride", "padding", "output_padding", "dilation", "groups"), swap_channels, 1,
    transposed.transposed_convolution, transposed.transposed_convolution_wide, "input",
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
    """Padding that is not symmetric zeros, done by a separate pad: `around` and `mode` are arguments of F.pad."""

    around: list[int]
    mode: str


def _numbers(padding: Any, kernel: list[int], dilation: Any, mode: str = "zeros") -> Any:
    """Return padding as one number per spatial dimension, or as a `Margin` if its mode is not zeros, or "same" is asymmetric."""
    rank = len(kernel)
    if padding == "same":
        totals = [taps * (size - 1) for taps, size in zip(sizes(dilation, rank), kernel, strict=True)]
        pairs = [(total // 2, total - total // 2) for total in totals]
    else:
        pairs = [(size, size) for size in sizes(0 if padding == "valid" else padding, rank)]
    if all(before == behind for before, behind in pairs) and (mode == "zeros" or not any(before for before, _ in pairs)):
        return [before for before, _ in pairs]
    return Margin([size for pair in reversed(pairs) for size in pair], "constant" if mode == "zeros" else mode)


def _padded(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return padding by name as numbers; a margin becomes a pad before the convolution, which then has none.

    %y = conv2d(%x, %w, padding="same")     →       %y_pad = pad(%x, [0, 1, 0, 1])
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
    return {"kernel_shape": kernel, "strides": stride, "pads": padding * 2, "dilations": dilation, "group": c["groups"]}


def _onnx_convolution(c: Call) -> str:
    attributes = _onnx_window(c)
    rank = len(attributes["kernel_shape"])
    operand = c.selected()  # with its own elements around it, where it is padded with those
    if rank == 1 and c.as_convolution():
        before, behind = attributes["pads"]
        attributes |= {name: [*attributes[name], 1] for name in ("kernel_shape", "strides", "dilations")}
        attributes["pads"] = [before, 0, behind, 0]
        flat = c.unsqueezed(operand, 3)
        output = c.with_bias(lambda *bias: c.do("Conv", flat, c.weight(lambda weight: weight[..., None]), *bias, **attributes), 2)
        return c.epilogue(c.squeezed(output, 3))
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
        traits=frozenset({Trait.SUMS, Trait.OUTPUTS_FIRST} if kind is PLAIN else {Trait.SUMS}),
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
