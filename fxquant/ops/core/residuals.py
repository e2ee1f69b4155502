"""A residual in the accumulator of a layer: its multiplier per output channel, and why it is not added there."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.lowering.epilogue import ResidualFactor
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import INT32, power_of_two
from fxquant.numerics.rescaling import Ratio
from fxquant.numerics.rounding import straight_through
from fxquant.ops.core.products import LayerSum

SMALLEST_RESIDUAL_MULTIPLIER = 256  # of int8: below it, rounding k_c to an integer costs more than half a step of the largest residual


def residual_factor(layer: LayerSum, residual: Quantized, steps: tuple[Tensor, ...], bound: Tensor) -> tuple[ResidualFactor | None, Tensor]:
    """Return (factor, bound with the residual), or (None, bound) where the residual has to be added after a requantization."""
    lowering = layer.lowering
    if requantizes_residuals(lowering):
        lowering.note("residual", "added after a requantization, as this target does")
        return None, bound
    factor, added = scaled_residual(layer, residual, Ratio((residual.scale,), steps), steps)
    with_residual = bound + added
    shifts = factor.right_shift is not None
    reason = _not_in_accumulator(layer, residual, factor.value().detach(), float(with_residual.max()), shifts)
    if reason is not None:
        lowering.note("residual", f"added after a requantization: {reason}")
        return None, bound
    lowering.note("residual", "added in the accumulator")
    return factor, with_residual


def scaled_residual(layer: LayerSum, residual: Quantized, ratio: Ratio, steps: tuple[Tensor, ...]) -> tuple[ResidualFactor, Tensor]:
    """Return the factor that brings a residual to steps of the sum, and how much the residual can add to an accumulator."""
    bits, right_shift = layer.lowering.arithmetic.residual_bits, None
    if bits:
        mantissa, exponent = ratio.mantissa(bits, largest_exponent=31, carries=False)
        multiplier, right_shift = mantissa << (-exponent).clamp_min(0), exponent.clamp_min(0)
    else:
        shape = torch.broadcast_shapes(*(factor.shape for factor in steps))  # type: ignore[no-untyped-call]
        multiplier = ratio.rounded(torch.zeros(shape, dtype=torch.int64, device=steps[0].device))
    added = torch.ceil(ResidualFactor(multiplier, right_shift).value() * residual.grid.magnitude)
    real = ratio.approximate()
    if real.requires_grad and torch.is_grad_enabled():
        multiplier = straight_through(real if right_shift is None else real * power_of_two(right_shift), multiplier.double())
    return ResidualFactor(multiplier, right_shift), added


def _not_in_accumulator(layer: LayerSum, residual: Quantized, factor: Tensor, largest: float, shifts: bool) -> str | None:
    """Return why a residual times these factors is not added to the accumulator, which can reach `largest` with it; None if it is."""
    smallest = min(SMALLEST_RESIDUAL_MULTIPLIER, 2**residual.dtype.bits)
    output = layer.lowering.output.dtype  # a 32-bit one is the sum itself
    if shifts and max(residual.dtype.bits, layer.input.dtype.bits, 0 if output == INT32 else output.bits) > 8:
        return "its target adds 16-bit tensors in a separate step"
    if not shifts and int(factor.min()) < smallest:
        return f"its multiplier falls to {int(factor.min())}, below {smallest}"
    return f"the accumulator could reach {largest:.0f}" if largest > layer.limit else None


def requantizes_residuals(lowering: Lowering) -> bool:
    """Return whether what is added to a layer is added to its output's 8 bits; an output of more bits is the sum with it."""
    return lowering.arithmetic.residual == "requantize" and lowering.output.dtype.bits <= 8
