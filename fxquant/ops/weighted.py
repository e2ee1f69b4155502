"""What operators with weights have in common: their sums of products, and everything that is fused into them.

The integer meaning, per output channel c:

    acc = Σ x·w_q + b_q  (+ r·k_c),   w_q = round(w/s_c),  b_q = round(b/(s_x·s_c)),  k_c = round(s_r/(s_x·s_c))
    y   = requantize(acc, s_x·s_c/s_y), limited to the fused clamp

An int16 operand whose sums could exceed the accumulator is first brought to a scale 2^n larger, rounding half up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.errors import ConfigurationError
from fxquant.facts import Size, TensorFact
from fxquant.graph import fact, is_parameter, resolve
from fxquant.lowering import Clamp, Lowering, Quantized, named_parameters, straight_through
from fxquant.numerics import (
    FLOAT32_EXACT,
    INT32_MAX,
    INT48_MAX,
    SMALLEST_SCALE,
    Grid,
    IntType,
    Ratio,
    accumulator_bound,
    bias_integers,
    bias_limit,
    raise_for_bias,
    raise_for_residual,
)
from fxquant.ops.arithmetic import lower_add
from fxquant.primitives import accumulate, elementwise
from fxquant.quantization.batch_norm import BatchNorm, correct_batch, fold, running_gain
from fxquant.quantization.learning import learned_step

MOST_NARROWED = 8  # bits an int16 operand may give up so that its sums fit the accumulator
SMALLEST_RESIDUAL_MULTIPLIER = 256  # of int8: below it, rounding k_c to a whole number costs more than half a step of the largest residual

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


def _weight_integers(lowering: Lowering, weight: Tensor, scale: Tensor, used: Tensor, gain: Tensor | None) -> Tensor:
    """round_half_even(w / s), float32 integers, gradients straight through; on a learned scale limited to the dtype's range.

    `used` says of each scale whether it is the learned one, times `gain`; one that was raised for the bias has no gradient.
    """
    shaped = scale.reshape(-1, *[1] * (weight.dim() - 1))
    real = weight / shaped
    exact = torch.round(real.detach())
    if lowering.learned is None:
        return straight_through(real, exact) if real.requires_grad else exact
    dtype = lowering.weight.type
    exact = exact.clamp(dtype.low, dtype.high)
    if not torch.is_grad_enabled():
        return exact
    if lowering.learned.learns:
        return learned_step(weight, exact, shaped, lowering.learned, dtype, lowering.learned.factor(gain) * used)
    return straight_through(real.clamp(dtype.low, dtype.high), exact)


def _bias_integers(bias: Tensor, input_scale: Tensor, scale: Tensor) -> Tensor:
    """round_half_even(b / (s_x · s)), float64 integers, gradients straight through."""
    exact = bias_integers(bias.detach(), input_scale, scale)
    return straight_through(bias / (input_scale * scale), exact) if bias.requires_grad else exact


def lower_weighted(
    lowering: Lowering,
    input: Quantized,
    weight: Tensor,
    bias: Tensor | None,
    residual: Quantized | None,
    clamp: Clamp | None,
    *,
    batch_norm: BatchNorm | None = None,
    narrow: Callable[..., Tensor],
    wide: Callable[..., Tensor],
    attributes: tuple[Any, ...],
    trailing: int,
    in_parts: bool = False,
    layout: Callable[[Tensor], Tensor] = lambda weight: weight,
    channels: int = 0,
) -> Quantized:
    """A sum of products; output channels are the weight's dimension 0, followed by `trailing` dimensions in the output.

    `narrow` is the primitive whose sums stay below 2^24, `wide` the one for larger ones; with `in_parts` it takes a
    `Split` that keeps the sums of parts below 2^24. Both take the weight as `layout` arranges it, which puts the output
    channels at dimension `channels`.

    A batch norm is folded in with its running statistics, in every state, so that the integers of the weight are those
    that are deployed. Where it is live, the sums then have the statistics of the batch: another bias and another step.
    """
    dtype, per_channel = lowering.weight.type, lowering.weight.per_channel
    unfolded, live, gain = bias, False, None
    lowering.parameters.update(named_parameters(weight, bias, batch_norm))
    if batch_norm is not None:
        live, gain = lowering.live_batch_norm, running_gain(batch_norm)
        weight, bias = fold(weight, bias, batch_norm, 0)
    chosen = scale = lowering.weight_scale(weight, gain)
    if bias is not None:
        scale = raise_for_bias(scale, bias if per_channel else bias.abs().max(), input.scale, bias_limit(input.dtype, dtype))
    if live and not bool(torch.isfinite(scale).all()):  # before any statistics move
        raise lowering.not_finite()
    limit = INT48_MAX if dtype.bits > 8 else INT32_MAX
    if residual is not None:
        scale = raise_for_residual(scale, residual.scale, residual.grid.magnitude, input.scale, (limit + 1) // 2)
    used = scale == chosen
    scale = lowering.settle(scale)
    integers = _weight_integers(lowering, weight, scale, used, gain)
    input, magnitude = _narrowed(lowering, input, integers, bias, scale, limit)

    def form(largest: float, bias_q: Tensor | None) -> Any:
        operands = (
            input.value,
            lowering.constant("weight", layout(integers), dtype.storage),
            None if bias_q is None else lowering.constant("bias", bias_q, torch.int64 if dtype.bits > 8 else torch.int32),
            *attributes,
        )
        if largest < FLOAT32_EXACT:
            return lowering.call(narrow, *operands)
        cut = [list(_cut(integers.detach(), magnitude, dtype))] if in_parts else []
        lowering.note("wide", f"a sum can reach {largest:.0f}, beyond 2^24, so it is formed " + ("in parts" if in_parts else "in float64"))
        return lowering.call(wide, *operands, *cut)

    steps: tuple[Tensor, ...] = (input.scale, scale)
    if live:
        assert batch_norm is not None
        bound = accumulator_bound(integers, None, 0, magnitude)
        sums = form(lowering.prove(bound, "the sum", limit), None)
        step, axis = input.scale * scale, sums.dim() - 1 - trailing
        _check_statistics(lowering, sums.numel() // sums.shape[axis])
        alive = integers.detach().flatten(1).abs().amax(1) > 0 if scale.numel() > 1 else torch.ones_like(used)
        correction, bias = correct_batch(batch_norm, unfolded, sums, step, axis, used & alive & (scale > SMALLEST_SCALE))
        steps = (*steps, correction)
    bias_q = None if bias is None else _bias_integers(bias, input.scale, scale)

    bound = accumulator_bound(integers, bias_q, 0, magnitude)
    multiplier = None
    if residual is not None:
        multiplier, bound = _residual_multiplier(lowering, residual, steps, bound)
    largest = lowering.prove(bound, "the sum", limit)
    lowering.describe("weight", scale, channels - weight.dim())
    lowering.describe("bias", input.scale * scale, -1)
    if live:
        assert bias_q is not None
        sums = sums if largest < FLOAT32_EXACT else sums.double()
        accumulator = sums + _broadcast(bias_q, trailing).to(sums.dtype)
    else:
        accumulator = form(largest, bias_q)

    ratio = Ratio(tuple(_broadcast(factor, trailing) for factor in steps))
    if residual is None:
        return lowering.requantize(accumulator, ratio, clamp, bound=largest)
    if multiplier is None:
        between = lowering.requantize(accumulator, ratio, to=lowering.intermediate, role="intermediate_", bound=largest)
        return lower_add(lowering, between, residual, clamp=clamp)
    shaped = lowering.constant("residual_multiplier", _broadcast(multiplier, trailing), torch.int64 if dtype.bits > 8 else torch.int32)
    accumulator = lowering.call(accumulate.add_residual, accumulator, residual.value, shaped)
    return lowering.requantize(accumulator, ratio, clamp, bound=largest)


def _check_statistics(lowering: Lowering, values: int) -> None:
    if values < 2:
        raise ConfigurationError(
            f"the batch norm of %{lowering.name} cannot use the statistics of this batch",
            **lowering.place,
            because=f"the batch has {values} value{'' if values == 1 else 's'} for each channel, and fewer than 2 have no variance",
            remedy="train with a larger batch (drop_last=True in a DataLoader), or call fxq.freeze(prepared, scales=False) first",
        )


def _narrowed(
    lowering: Lowering, input: Quantized, integers: Tensor, bias: Tensor | None, scale: Tensor, limit: int
) -> tuple[Quantized, int]:
    """The operand and its magnitude: on a scale 2^n larger where int16 sums could exceed the limit, by the least n that fits."""
    bits = input.dtype.bits
    if bits <= 8:
        return input, input.grid.magnitude
    for n in range(MOST_NARROWED + 1):
        raised = input.scale * 2.0**n
        bias_q = None if bias is None else bias_integers(bias.detach(), raised, scale)
        if float(accumulator_bound(integers, bias_q, 0, 2 ** (bits - 1 - n)).max()) <= limit:
            break
    if n == 0:
        return input, input.grid.magnitude
    lowering.note("narrowed", f"its operand gives up {n} of its {bits} bits, so that the sum fits the accumulator")
    value = lowering.call(elementwise.shift_right, input.value, n)
    return Quantized(value, Grid(input.dtype, raised), input.shape), 2 ** (bits - 1 - n)


def _cut(integers: Tensor, magnitude: int, dtype: IntType) -> accumulate.Split:
    """The fewest parts of an operand of this magnitude, and of the weight, for which every sum of parts stays below 2^24."""
    bits = (magnitude - 1).bit_length() + 1
    largest: dict[int, float] = {}  # Σ|w_j| of the worst part, by the number of the weight's parts
    for parts, weight_parts in sorted(itertools.product(range(1, bits + 1), range(1, dtype.bits + 1)), key=lambda p: (p[0] * p[1], p[1])):
        cut = accumulate.Split(parts, -(-bits // parts), weight_parts, -(-dtype.bits // weight_parts))
        if weight_parts not in largest:
            factors = accumulate.split(integers, weight_parts, cut.weight_bits)
            largest[weight_parts] = max(float(accumulator_bound(factor, None, 0, 1).max()) for factor in factors)
        if largest[weight_parts] * 2 ** (cut.bits - 1) < FLOAT32_EXACT:
            return cut
    raise AssertionError("parts of one bit always fit: a channel has fewer than 2^24 weights")


def _broadcast(channels: Tensor, trailing: int) -> Tensor:
    """Per-channel values, shaped against an output with `trailing` dimensions after the channel; a single one stays a scalar."""
    return channels.reshape(-1, *[1] * trailing) if channels.numel() > 1 else channels.reshape(())


def _residual_multiplier(lowering: Lowering, residual: Quantized, steps: tuple[Tensor, ...], bound: Tensor) -> tuple[Tensor | None, Tensor]:
    """(k_c, bound with the residual), or (None, bound) where the residual has to be added after a requantization."""
    ratio = Ratio((residual.scale,), steps)
    shape = torch.broadcast_shapes(*(factor.shape for factor in steps))  # type: ignore[no-untyped-call]
    multiplier = ratio.rounded(torch.zeros(shape, dtype=torch.int64, device=bound.device))
    with_residual = bound + multiplier.double() * residual.grid.magnitude
    smallest = min(SMALLEST_RESIDUAL_MULTIPLIER, 2**residual.dtype.bits)
    if int(multiplier.min()) < smallest:
        reason = f"its multiplier falls to {int(multiplier.min())}, below {smallest}"
    elif float(with_residual.max()) > (INT48_MAX if lowering.weight.type.bits > 8 else INT32_MAX):
        reason = f"the accumulator could reach {float(with_residual.max()):.0f}"
    else:
        lowering.note("residual", "added in the accumulator")
        real = ratio.approximate()
        return straight_through(real, multiplier.double()) if real.requires_grad and torch.is_grad_enabled() else multiplier, with_residual
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
        if isinstance(value, fx.Node) and not is_parameter(value):
            return f"its {name} is computed by %{value.name} from more than parameters"
    return None
