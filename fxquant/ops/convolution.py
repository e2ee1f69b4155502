"""Convolution and transposed convolution in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from fxquant.batch_norm import BatchNorm, fold
from fxquant.graph import TensorFact, fact, resolve
from fxquant.lowering import Clamp, Lowering, Quantized
from fxquant.ops.record import Operator, Parameter, register
from fxquant.ops.weighted import ABSORBED, Tap, epilogue, lower_weighted, refuses_weighted, shape_of, sizes
from fxquant.primitives import accumulate, transposed
from fxquant.primitives.accumulate import CONVOLUTIONS
from fxquant.primitives.transposed import TRANSPOSED, swap_channels

# ---- convolution ----------------------------------------------------------------------------------------------------


def _convolution(rank: int) -> tuple[Callable[..., Tensor], Callable[..., Quantized]]:
    """The float function and the lowering of convolution in `rank` dimensions."""
    kernel = CONVOLUTIONS[rank]

    def function(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        batch_norm: BatchNorm | None = None,
        residual: Tensor | None = None,
        clamp: Clamp | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        if batch_norm is not None:
            weight, bias = fold(weight, bias, batch_norm, 0)
        return epilogue(kernel(input, weight, bias, stride, padding, dilation, groups), residual, clamp, tap)

    def lower(
        lowering: Lowering,
        input: Quantized,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        *,
        batch_norm: BatchNorm | None = None,
        residual: Quantized | None = None,
        clamp: Clamp | None = None,
    ) -> Quantized:
        attributes = sizes(stride, rank), sizes(padding, rank), sizes(dilation, rank), groups
        weight, bias = lowering.fold(weight, bias, batch_norm, 0, lambda w, b: kernel(input.real(), w, b, *attributes))
        return lower_weighted(
            lowering,
            input,
            weight,
            bias,
            residual,
            clamp,
            narrow=accumulate.convolution,
            wide=accumulate.convolution_wide,
            attributes=attributes,
            trailing=rank,
            in_parts=True,
        )

    function.__name__ = function.__qualname__ = f"conv{rank}d"
    function.__doc__ = f"{rank}-dimensional convolution, with the batch norm, residual and clamp that are fused into it."
    return function, lower


def _convolution_module(module: Any) -> dict[str, Any] | str:
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r} has no integer form yet"
    padding = module.padding
    if padding == "valid":
        padding = 0
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(total % 2 for total in totals):
            return "padding='same' with an even kernel is asymmetric, which has no integer form yet"
        padding = tuple(total // 2 for total in totals)
    return {
        "weight": Parameter("weight"),
        "bias": None if module.bias is None else Parameter("bias"),
        "stride": module.stride,
        "padding": padding,
        "dilation": module.dilation,
        "groups": module.groups,
    }


def _refuses_convolution(rank: int) -> Callable[[fx.Node, dict[str, Any]], str | None]:
    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        if isinstance(arguments["padding"], str):
            return f"padding={arguments['padding']!r} has no integer form yet"
        operand = fact(arguments["input"])
        if isinstance(operand, TensorFact) and len(operand.shape) != rank + 2:
            return "its input has no batch dimension"
        return refuses_weighted(node, arguments)

    return refuses


conv1d, _lower_conv1d = _convolution(1)
conv2d, _lower_conv2d = _convolution(2)
conv3d, _lower_conv3d = _convolution(3)
for _rank, _function, _lower, _module in (
    (1, conv1d, _lower_conv1d, nn.Conv1d),
    (2, conv2d, _lower_conv2d, nn.Conv2d),
    (3, conv3d, _lower_conv3d, nn.Conv3d),
):
    register(
        Operator(
            f"conv{_rank}d",
            _function,
            ("input",),
            _lower,
            functions={CONVOLUTIONS[_rank]: None},
            modules={_module: _convolution_module},
            absorbs=ABSORBED,
            refuses=_refuses_convolution(_rank),
            sums=True,
        )
    )


# ---- transposed convolution -----------------------------------------------------------------------------------------


def _transposed_convolution(rank: int) -> tuple[Callable[..., Tensor], Callable[..., Quantized]]:
    """The float function and the lowering of transposed convolution in `rank` dimensions.

    The weight is (in, out/groups, …), so it is folded and quantized as (out, in/groups, …), one scale per output channel.
    """
    kernel = TRANSPOSED[rank]

    def function(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
        *,
        batch_norm: BatchNorm | None = None,
        residual: Tensor | None = None,
        clamp: Clamp | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        if batch_norm is not None:
            folded, bias = fold(swap_channels(weight, groups), bias, batch_norm, 0)
            weight = swap_channels(folded, groups)
        return epilogue(kernel(input, weight, bias, stride, padding, output_padding, groups, dilation), residual, clamp, tap)

    def lower(
        lowering: Lowering,
        input: Quantized,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        output_padding: Any,
        groups: int,
        dilation: Any,
        *,
        batch_norm: BatchNorm | None = None,
        residual: Quantized | None = None,
        clamp: Clamp | None = None,
    ) -> Quantized:
        steps, margins, extra, spread = (sizes(value, rank) for value in (stride, padding, output_padding, dilation))

        def forward(weight: Tensor, bias: Tensor | None) -> Tensor:
            return kernel(input.real(), swap_channels(weight, groups), bias, steps, margins, extra, groups, spread)

        weight, bias = lowering.fold(swap_channels(weight, groups), bias, batch_norm, 0, forward)
        return lower_weighted(
            lowering,
            input,
            weight,
            bias,
            residual,
            clamp,
            narrow=transposed.transposed_convolution,
            wide=transposed.transposed_convolution_wide,
            attributes=(steps, margins, extra, spread, groups),
            trailing=rank,
            in_parts=True,
            layout=lambda integers: swap_channels(integers, groups),
        )

    function.__name__ = function.__qualname__ = f"conv_transpose{rank}d"
    function.__doc__ = f"{rank}-dimensional transposed convolution, with the batch norm, residual and clamp that are fused into it."
    return function, lower


def _transposed_module(module: Any) -> dict[str, Any]:
    return {
        "weight": Parameter("weight"),
        "bias": None if module.bias is None else Parameter("bias"),
        **{name: getattr(module, name) for name in ("stride", "padding", "output_padding", "groups", "dilation")},
    }


def _output_padding(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """The padding that gives the output size a module was called with: it is read off the result."""
    operand, result = fact(arguments["input"]), fact(node)
    if node.op != "call_module" or len(node.args) < 2 or not isinstance(operand, TensorFact) or not isinstance(result, TensorFact):
        return arguments
    kernel = resolve(node.graph.owning_module, str(node.target)).kernel_size  # type: ignore[arg-type]
    names = ("stride", "padding", "dilation")
    rows = zip(operand.shape[2:], result.shape[2:], kernel, *(sizes(arguments[name], len(kernel)) for name in names), strict=True)
    extra = [found - (size - 1) * stride + 2 * padding - dilation * (taps - 1) - 1 for size, found, taps, stride, padding, dilation in rows]
    return {**arguments, "output_padding": extra}


def _refuses_transposed(rank: int) -> Callable[[fx.Node, dict[str, Any]], str | None]:
    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        operand = shape_of(arguments["input"])
        if operand is not None and len(operand) != rank + 2:
            return "its input has no batch dimension"
        return refuses_weighted(node, arguments)

    return refuses


conv_transpose1d, _lower_conv_transpose1d = _transposed_convolution(1)
conv_transpose2d, _lower_conv_transpose2d = _transposed_convolution(2)
conv_transpose3d, _lower_conv_transpose3d = _transposed_convolution(3)
for _rank, _function, _lower, _transposed in (
    (1, conv_transpose1d, _lower_conv_transpose1d, nn.ConvTranspose1d),
    (2, conv_transpose2d, _lower_conv_transpose2d, nn.ConvTranspose2d),
    (3, conv_transpose3d, _lower_conv_transpose3d, nn.ConvTranspose3d),
):
    register(
        Operator(
            f"conv_transpose{_rank}d",
            _function,
            ("input",),
            _lower,
            functions={TRANSPOSED[_rank]: None},
            modules={_transposed: _transposed_module},
            absorbs=ABSORBED,
            refuses=_refuses_transposed(_rank),
            sums=True,
            normalize=_output_padding,
        )
    )
