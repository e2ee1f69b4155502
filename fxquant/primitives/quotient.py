"""Requantization to 8 bits by one rounded float32 operation in ONNX files: proved at every integer where the result steps.

The requantizations of `fxquant.primitives.requantize` are monotonic in the accumulator, and so is a rounded float32 quotient by a
positive number. Two such functions are equal everywhere if both step to each of the 255 results at the same integer. For each
channel, a divisor that places every step correctly is searched among the float32 numbers next to the step's size. ONNX's
QuantizeLinear then divides, rounds, saturates and stores in one operator. The search returns None where it finds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.primitives.quantization import clipped
from fxquant.primitives.record import Emitter

FRACTIONS = (0.0, 2.0**-9, -(2.0**-9), 2.0**-8, -(2.0**-8), 2.0**-7)  # of a step; their sums with integers below 2^15 are exact
LOWERED_FRACTIONS = (0.0, *(2.0**-n for n in range(11, 2, -1)))  # the sums with half a result less are rounded, as they are tried
NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3)  # float32 numbers from the nearest one, in the order in which they are tried
QUOTIENT_LIMIT = 2**30  # reference implementations round larger quotients wrongly


def steps_of_fixed(multiplier: Tensor, right_shift: Tensor, low: int, high: int) -> Tensor:
    """Return the least integers c with ⌊c · multiplier / 2^right_shift + ½⌋ ≥ k, for k from low + 1 to high.

    The result is int64 of shape (channels, results). `multiplier` has fewer than 24 bits, and `right_shift` is 1 to 31. Where the
    multiplier is 0, an integer above 2^24 means that none reaches k, and one below -2^24 that all do.
    """
    odd = 2 * torch.arange(low + 1, high + 1, device="cpu") - 1
    whole = multiplier.flatten().to(torch.int64)[:, None]
    product = odd << (right_shift.flatten().to(torch.int64)[:, None] - 1)  # (k - ½) · 2^right_shift
    return torch.where(whole == 0, odd.sign() * 2 * FLOAT32_EXACT, -torch.div(-product, whole.clamp_min(1), rounding_mode="floor"))


def steps_of_half_step(shift: Tensor, multiplier: Tensor, right_shift: Tensor, half: Tensor, low: int, high: int) -> Tensor:
    """Return the least integers a with ⌊⌊(a + half) / 2^shift⌋ · multiplier / 2^right_shift⌋ ≥ k, in the form of `steps_of_fixed`."""
    results = torch.arange(low + 1, high + 1, device="cpu")
    whole, first = multiplier.flatten().to(torch.int64)[:, None], shift.flatten().to(torch.int64)[:, None]
    product = results << right_shift.flatten().to(torch.int64)[:, None]
    floored = -torch.div(-product, whole.clamp_min(1), rounding_mode="floor")
    beyond = torch.where(results > 0, 2 * FLOAT32_EXACT, -2 * FLOAT32_EXACT)
    return torch.where(whole == 0, beyond, (floored << first) - half.flatten().to(torch.int64)[:, None])


class Rounded(NamedTuple):
    """One rounded float32 operation: QuantizeLinear by divisors, or after a product.

    by       divisors or factors, float32 of shape (channels,), or () where one applies to all
    divides  whether `by` are divisors
    axis     the dimension of the channels, counted from the end; None where one number applies to all
    add      the float32 constant that is added to the integers first, which broadcasts against them; None for nothing
    """

    by: Tensor
    divides: bool
    axis: int | None
    add: Tensor | None = None


def rounded(steps: Tensor, size: Tensor, low: int, high: int, add: Tensor | None = None, lowered: bool = False) -> Rounded | None:
    """Find the operation that steps to each result at these integers, for all integers below 2^24 in magnitude; None if none is found.

    `steps` is int64 of shape (channels, results). `size`, float64, is about the size of a result in steps of the integers, and `add`,
    float32, is added to them first; both are shaped to broadcast against them. Without `add`, a fraction of a step is added where a
    divisor alone does not suffice: it moves ties away from the middle between two results. Results that are `lowered` are rounded down,
    which is rounding to the nearest after half a result is subtracted. Runtimes divide quickly by a number per channel only where the
    elements of a channel are contiguous, so factors are used where channels are the last dimension.
    """
    axes = [dim - size.dim() for dim, count in enumerate(size.shape) if count > 1]
    if len(axes) > 1:
        return None
    axis = axes[0] if axes else None
    divides = axis != -1
    nearest = (size if divides else 1 / size).flatten().float()
    if not bool((torch.isfinite(nearest) & (nearest > torch.finfo(torch.float32).tiny)).all()):
        return None
    by, more = torch.zeros_like(nearest), torch.zeros_like(nearest)
    half = -(size.flatten() / 2).float() if lowered else torch.zeros_like(nearest)
    for fraction in (LOWERED_FRACTIONS if lowered else FRACTIONS) if add is None else (add.flatten(),):
        open_ = by == 0
        tried = (half + torch.as_tensor(fraction, dtype=torch.float32, device="cpu")).expand(nearest.shape)[open_]
        by[open_] = _found(steps[open_] if len(steps) > 1 else steps, nearest[open_], tried, low, high, divides)
        more[open_] = tried
        if bool((by > 0).all()):
            added = more.reshape(size.shape) if bool(more.any()) else None
            return Rounded(by[0] if axis is None else by, divides, axis, added)
    return None


def _found(steps: Tensor, nearest: Tensor, add: Tensor, low: int, high: int, divides: bool) -> Tensor:
    """Return float32 f with round_half_even((c + add) / f or (c + add) · f) ≥ k exactly from the step of k on.

    The result has one f for each channel; 0 where there is none. Where `low` is 0, the integer 0 gives 0 or more: a rectified operand
    needs no other lower limit.
    """
    results = torch.arange(low + 1, high + 1, device="cpu")
    limit = torch.full((1,), FLOAT32_EXACT, dtype=torch.int64, device="cpu")
    reached, below, last = (whole.clamp(-FLOAT32_EXACT, FLOAT32_EXACT).float() + add[:, None] for whole in (steps, steps - 1, limit))
    never, always = steps > FLOAT32_EXACT, steps - 1 < -FLOAT32_EXACT  # results beyond what the integers can be
    chosen, at_zero = torch.zeros_like(nearest), add[:, None]
    for distance in NEIGHBOURS:
        by = (nearest.view(torch.int32) + distance).view(torch.float32)[:, None]
        over, under, largest = (whole / by if divides else whole * by for whole in (reached, below, last))
        right = (never | (over.round() >= results)) & (always | (under.round() < results)) & (largest < QUOTIENT_LIMIT)
        if low == 0:
            right = right & ((at_zero / by if divides else at_zero * by).round() >= 0)
        chosen = torch.where((chosen == 0) & right.all(1), by[:, 0], chosen)
    return chosen


def onnx_constants(e: Emitter, how: Rounded, dtype: torch.dtype, zero_point: int = 0) -> list[str]:
    """Return the constants that `onnx_rounded` reads besides the value; as operands of a function, they let layers share it."""
    zeros = torch.full(how.by.shape if how.divides else (), zero_point, dtype=dtype, device="cpu")
    return [e.constant(constant) for constant in (how.by, zeros, how.add) if constant is not None]


def onnx_rounded(
    e: Emitter, value: str, how: Rounded, constants: Sequence[str], low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str:
    """Emit clip(round_half_even(value · f or value / d), low, high) + zero_point, stored as `dtype`; `value` is float32."""
    by, zeros, *add = constants
    value = e.node("Add", value, *add) if add else value
    if how.divides:
        axis = {} if how.axis is None else {"axis": how.axis}
        stored = e.node("QuantizeLinear", value, by, zeros, **axis)
    else:
        stored = e.node("QuantizeLinear", e.node("Mul", value, by), e.constant(1.0), zeros)
    return clipped(e, stored, low + zero_point, high + zero_point, dtype)
