"""The kernels of `fused_layers` in PyTorch: for every device, and as the reference that those in C are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """A tensor as (outer, channels, inner) in the order of memory; `shape` is that of what broadcasts along its channels."""

    outer: int
    channels: int
    inner: int
    shape: tuple[int, ...]

    def others(self, value: Tensor) -> list[int]:
        """Return all dimensions of a tensor of this form but that of its channels."""
        return [d for d in range(value.dim()) if d != value.dim() - len(self.shape)]

    @property
    def values(self) -> int:
        """The elements of a channel."""
        return self.outer * self.inner


def form_of(value: Tensor, trailing: int) -> Form | None:
    """Return the form of a tensor with `trailing` dimensions behind its channels; None if it is neither contiguous nor channels last.

    Return None also where the channels are its only dimension, since there is nothing to sum over.
    """
    axis = value.dim() - 1 - trailing
    channels, shape = value.shape[axis], (value.shape[axis], *[1] * trailing)
    if value.numel() == 0 or value.dim() == 1:
        return None
    inner = value[(0,) * (axis + 1)].numel()
    if value.is_contiguous():
        return Form(value.numel() // (channels * inner), channels, inner, shape)
    last = axis == 1 and value.movedim(1, -1).is_contiguous()
    return Form(value.numel() // channels, channels, 1, shape) if last else None


class Accumulator(NamedTuple):
    """Sums, float32, and what is added to them.

    bias      of shape (C,); None for none
    residual  of the shape of the sums, and `factor` of shape (C,), which it is multiplied by; None for none
    """

    sums: Tensor
    form: Form
    bias: Tensor | None = None
    residual: Tensor | None = None
    factor: Tensor | None = None

    def value(self) -> Tensor:
        """Return the accumulator: sums with their bias, and the residual times its factor."""
        value = self.sums if self.bias is None else self.sums + self.bias.reshape(self.form.shape)
        if self.residual is None or self.factor is None:
            return value
        product = self.residual * self.factor.reshape(self.form.shape)
        return value + product.floor_()  # of a factor with a shift; a product of integers stays as it is


@dataclass(frozen=True)
class Rounded:
    """The constants of a requantization, one for each channel or scalars.

    factors     of `requantize_real`: the multiplier; of `requantize_fixed`: half, 2^-shift, the product, all float64
    limit, add  of `requantize_fixed`: of the intermediate, and what is added before the last rounding down
    low, high   limits of the integers, the fused clamp included
    bounds      limits of the grid, beyond which the gradient is 0
    clamp       the fused clamp, as float values
    scale       float32: the value of one step
    """

    factors: tuple[Tensor, ...]
    limit: int
    add: float
    low: int
    high: int
    bounds: tuple[int, int]
    clamp: tuple[float, float]
    scale: Tensor

    def inside(self, real: Tensor) -> Tensor:
        """Return which float values have a gradient: those within the fused clamp and the limits of the grid."""
        steps = real.clamp(*self.clamp) / self.scale
        return (steps >= self.bounds[0]) & (steps <= self.bounds[1]) & (real >= self.clamp[0]) & (real <= self.clamp[1])

    @property
    def fixed(self) -> bool:
        """Whether it is `requantize_fixed`."""
        return len(self.factors) > 1


class Gradients(NamedTuple):
    """The gradients of a requantization's results, its integers and its dequantized tensor; None where one has none."""

    of_integers: Tensor | None
    of_real: Tensor | None

    def of_steps(self, scale: Tensor) -> Tensor:
        """Return the gradient in steps of the grid."""
        if self.of_real is None:
            assert self.of_integers is not None
            return self.of_integers
        return self.of_real * scale if self.of_integers is None else self.of_integers + self.of_real * scale


class Passes:
    """The kernels in PyTorch. Per-channel tensors have one element for each channel."""

    def collect(self, sums: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance of each channel, float64, and the ends: the least and the largest, of shape (2, channels).

        With n integers x of a channel, S = Σ x and Q = Σ x²: S / n, and (n·Q - S²) / n / n. S, Q and the difference are exact,
        in any order of summation and with any number of threads. Integers too large for exact sums in float64, or of 2^31 or
        more, have PyTorch's statistics.
        """
        dims = form.others(sums)
        ends = torch.stack((sums.amin(dims), sums.amax(dims)))
        value, count = sums.double(), form.values
        largest = float(ends.abs().max())
        bits = 12 if largest < 2**24 else 16
        if largest * count >= 2**53 or largest >= 2**31 or count << (2 * bits) > 2**53:
            variance, mean = torch.var_mean(value, dims, correction=0)
            return mean, variance, ends
        if largest**2 * count < 2**53:
            squares = [int(each) for each in value.square().sum(dims).tolist()]
        else:
            high = torch.floor(value * 2.0**-bits)
            low = value - high * 2.0**bits
            parts = [(one * other).sum(dims).tolist() for one, other in ((high, high), (high, low), (low, low))]
            squares = [(int(a) << 2 * bits) + (int(b) << bits + 1) + int(c) for a, b, c in zip(*parts, strict=True)]
        totals = [int(each) for each in value.sum(dims).tolist()]
        apart = [float(count * square - total * total) / count / count for total, square in zip(totals, squares, strict=True)]
        mean = torch.tensor([float(total) / count for total in totals], dtype=torch.float64, device=sums.device)
        return mean, torch.tensor(apart, dtype=torch.float64, device=sums.device), ends

    def ends(self, accumulator: Accumulator) -> Tensor:
        """Return the least and the largest accumulator of each channel, of shape (2, channels)."""
        value, dims = accumulator.value(), accumulator.form.others(accumulator.sums)
        return torch.stack((value.amin(dims), value.amax(dims)))

    def finish(self, accumulator: Accumulator, how: Rounded) -> tuple[Tensor, Tensor]:
        """Return the integers, and the dequantized tensor, which is never -0.0."""
        value, form = accumulator.value(), accumulator.form
        if how.fixed:
            half, first, product = (each.reshape(form.shape) if each.numel() > 1 else each for each in how.factors)
            value = value.double().add_(half).mul_(first).floor_().clamp_(-how.limit, how.limit - 1)
            value = value.mul_(product).add_(how.add).floor_().clamp_(how.low, how.high).float()
        else:
            (multiplier,) = how.factors
            value = (value * (multiplier.reshape(form.shape) if multiplier.numel() > 1 else multiplier)).round_().clamp_(how.low, how.high)
        return value, (value * how.scale).add_(0.0)

    def mark(self, accumulator: Accumulator, ratio: Tensor, how: Rounded) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the results of `finish`, a saturation mask, uint8 with the strides of the sums, and how many elements have no gradient."""
        real = accumulator.value() * ratio.reshape(accumulator.form.shape)
        inside = how.inside(real)
        return *self.finish(accumulator, how), inside.to(torch.uint8), int(inside.numel() - inside.sum())

    def mark_back(
        self, form: Form, inside: Tensor | None, factor: Tensor | None, ratio: Tensor, scale: Tensor, gradients: Gradients, like: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return gradients of the sums, the residual and the bias, by the mask of `mark`. `like` has the strides of the sums."""
        whole = gradients.of_steps(scale)
        of_sums = (whole if inside is None else torch.where(inside > 0, whole, 0.0)) / scale * ratio.reshape(form.shape)
        dims = form.others(of_sums)
        return of_sums, None if factor is None else of_sums * factor.reshape(form.shape), of_sums.sum(dims)

    def finish_back(
        self, accumulator: Accumulator, ratio: Tensor, how: Rounded, gradients: Gradients
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
        """Return gradients of the sums, the residual, the bias, the ratio, and the residual's factor, float32."""
        value, (_, form, _, residual, factor) = accumulator.value(), accumulator
        each = ratio.reshape(form.shape)
        real = value * each
        inside = how.inside(real)
        of_value = torch.where(inside, gradients.of_steps(how.scale), 0.0) / how.scale
        of_sums, dims = of_value * each, form.others(value)
        of_residual = of_factor = None
        if residual is not None and factor is not None:
            of_residual = of_sums * factor.reshape(form.shape)
            of_factor = (of_sums * residual).sum(dims)
        return of_sums, of_residual, of_sums.sum(dims), (of_value * value).sum(dims), of_factor

    def centre(self, gradient: Tensor, sums: Tensor, form: Form, mean: Tensor, offset: Tensor, slope: Tensor, own: bool) -> Tensor:
        """Return gradient + offset + slope · (sums - mean); in the memory of `gradient` if `own`."""
        mean, offset, slope = (each.reshape(form.shape) for each in (mean, offset, slope))
        added = (sums - mean) * slope + offset
        return gradient.add_(added) if own and not torch.is_grad_enabled() else gradient + added

    def weight_ends(self, weight: Tensor) -> Tensor:
        """Return the largest magnitude of each channel, (channels,), of the weight's dtype. Channels are dimension 0; NaN gives NaN."""
        low, high = torch.aminmax(weight.flatten(1), dim=1)
        return torch.maximum(-low, high)

    def weigh(self, weight: Tensor, gain: Tensor | None, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return round(weight · gain / scale) within the limits, and the sum of each channel's magnitudes, float64."""
        shape = (-1, *[1] * (weight.dim() - 1))
        value = weight / scale.reshape(shape) if gain is None else (weight * gain.reshape(shape)).div_(scale.reshape(shape))
        value = value.round_().clamp_(low, high)
        return value, value.abs().flatten(1).sum(1, dtype=torch.float64)

    def weigh_back(self, weight: Tensor, gain: Tensor | None, scale: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return gradients of the weight and of the gain."""
        shape = (-1, *[1] * (weight.dim() - 1))
        of_folded = gradient / scale.reshape(shape)
        if gain is None:
            return of_folded, None
        return of_folded * gain.reshape(shape), (of_folded * weight).flatten(1).sum(1)
