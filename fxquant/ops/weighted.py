"""What operators with weights have in common: their sums of products, and everything that is fused into them.

The integer meaning, per output channel c:

    acc = Σ x·w_q + b_q  (+ r·k_c),   w_q = round(w/s_c),  b_q = round(b/(s_x·s_c)),  k_c = round(s_r/(s_x·s_c))
    y   = requantize(acc, s_x·s_c/s_y), limited to the fused clamp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.graph import Size, TensorFact, fact, resolve
from fxquant.lowering import Clamp, Lowering, Quantized, straight_through
from fxquant.numerics import FLOAT32_EXACT, Ratio, accumulator_bound, bias_integers, raise_for_bias, weight_scale
from fxquant.ops.arithmetic import lower_add
from fxquant.primitives import accumulate

SMALLEST_RESIDUAL_MULTIPLIER = 256  # below it, rounding k_c to a whole number costs more than 2^-9 of the residual

ABSORBED = frozenset({"batch_norm", "residual", "clamp"})

Tap = Callable[[Tensor], None]


def epilogue(value: Tensor, residual: Tensor | None, clamp: Clamp | None, tap: Tap | None) -> Tensor:
    """What is fused behind the sum: residual, then clamp. `tap` is shown the value before the residual."""
    if residual is not None:
        if tap is not None:
            tap(value)
        value = value + residual
    return value if clamp is None else value.clamp(*clamp)


# ---- the integer meaning --------------------------------------------------------------------------------------------


def _weight_integers(weight: Tensor, scale: Tensor) -> Tensor:
    """round_half_even(w / s), float32 integers, gradients straight through."""
    real = weight / scale.reshape(-1, *[1] * (weight.dim() - 1))
    exact = torch.round(real.detach())
    return straight_through(real, exact) if real.requires_grad else exact


def _bias_integers(bias: Tensor, input_scale: Tensor, scale: Tensor) -> Tensor:
    """round_half_even(b / (s_x · s)), float32 integers below 2^23, gradients straight through."""
    exact = bias_integers(bias.detach(), input_scale, scale).float()
    return straight_through(bias / (input_scale * scale), exact) if bias.requires_grad else exact


def lower_weighted(
    lowering: Lowering,
    input: Quantized,
    weight: Tensor,
    bias: Tensor | None,
    residual: Quantized | None,
    clamp: Clamp | None,
    *,
    narrow: Callable[..., Tensor],
    wide: Callable[..., Tensor],
    attributes: tuple[Any, ...],
    trailing: int,
    layout: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> Quantized:
    """A sum of products; output channels are the weight's dimension 0, followed by `trailing` dimensions in the output.

    `narrow` is the primitive whose sums stay below 2^24, `wide` the one that splits its operand to keep them there;
    both take the weight as `layout` arranges it.
    """
    per_channel = lowering.weight.per_channel
    scale = weight_scale(weight, 0 if per_channel else None, lowering.weight.type)
    if bias is not None:
        scale = raise_for_bias(scale, bias if per_channel else bias.abs().max(), input.scale)
    scale = lowering.settle(scale)
    integers = _weight_integers(weight, scale)
    bias_q = None if bias is None else _bias_integers(bias, input.scale, scale)

    bound = accumulator_bound(integers, bias_q, 0, input.dtype.magnitude)
    multiplier = None
    if residual is not None:
        multiplier, bound = _residual_multiplier(lowering, residual, input.scale, scale, bound)
    largest = lowering.prove(bound, "the sum")

    operands = (
        input.value,
        lowering.constant("weight", layout(integers), lowering.weight.type.storage),
        None if bias_q is None else lowering.constant("bias", bias_q, torch.int32),
        *attributes,
    )
    if largest < FLOAT32_EXACT:
        accumulator = lowering.call(narrow, *operands)
    else:
        bits = _split_bits(input)
        halves = accumulator_bound(integers, None, 0, 2 ** (bits - 1))
        lowering.prove(halves, f"the sum over {bits} of the operand's bits", limit=FLOAT32_EXACT - 1)
        lowering.note("wide", f"a sum can reach {largest:.0f}, beyond 2^24, so the operand is split in two")
        accumulator = lowering.call(wide, *operands, bits)

    ratio = Ratio((input.scale, _broadcast(scale, trailing)))
    if residual is None:
        return lowering.requantize(accumulator, ratio, clamp)
    if multiplier is None:
        return lower_add(
            lowering, lowering.requantize(accumulator, ratio, to=lowering.intermediate, role="intermediate_"), residual, clamp=clamp
        )
    shaped = lowering.constant("residual_multiplier", _broadcast(multiplier, trailing), torch.int32)
    return lowering.requantize(lowering.call(accumulate.add_residual, accumulator, residual.value, shaped), ratio, clamp)


def _broadcast(channels: Tensor, trailing: int) -> Tensor:
    """Per-channel values, shaped against an output with `trailing` dimensions after the channel; a single one stays a scalar."""
    return channels.reshape(-1, *[1] * trailing) if channels.numel() > 1 else channels.reshape(())


def _split_bits(input: Quantized) -> int:
    """Where a wide sum splits its operand: in the middle of its bits."""
    return (input.dtype.high + 1).bit_length() // 2


def _residual_multiplier(
    lowering: Lowering, residual: Quantized, input_scale: Tensor, scale: Tensor, bound: Tensor
) -> tuple[Tensor | None, Tensor]:
    """(k_c, bound with the residual), or (None, bound) where the residual has to be added after a requantization."""
    multiplier = Ratio((residual.scale,), (input_scale, scale)).rounded(torch.zeros_like(scale, dtype=torch.int64))
    with_residual = bound + multiplier.double() * residual.dtype.magnitude
    if int(multiplier.min()) < SMALLEST_RESIDUAL_MULTIPLIER:
        reason = f"its multiplier falls to {int(multiplier.min())}, below {SMALLEST_RESIDUAL_MULTIPLIER}"
    elif float(with_residual.max()) >= 2**31:
        reason = f"the accumulator could reach {float(with_residual.max()):.0f}"
    else:
        lowering.note("residual", "added in the accumulator")
        return multiplier, with_residual
    lowering.note("residual", f"added after a requantization: {reason}")
    return None, bound


# ---- what their records share ------------------------------------------------------------------------------------------


def sizes(value: Any, rank: int) -> list[int]:
    """One whole number per dimension."""
    values = [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]
    return values * rank if len(values) == 1 else values


def shape_of(value: Any) -> tuple[Size, ...] | None:
    """The shape of an argument: a parameter's own, or what was traced; None if it is no tensor."""
    if isinstance(value, fx.Node) and value.op == "get_attr" and value.graph.owning_module is not None:
        parameter = resolve(value.graph.owning_module, str(value.target))
        return tuple(parameter.shape) if isinstance(parameter, Tensor) else None
    known = fact(value) if isinstance(value, fx.Node) else None
    return known.shape if isinstance(known, TensorFact) else None


def refuses_weighted(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for name in ("weight", "bias"):
        value = arguments[name]
        if isinstance(value, fx.Node) and value.op != "get_attr":
            return f"its {name} is computed by %{value.name}, not a parameter"
    return None
