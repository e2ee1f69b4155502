"""Autograd functions for large tensors in training, of as few kernels as they need and with a backward of their own.

    collected    the mean and the variance of each channel of sums, and their least and largest
    finished     accumulators to integers and the dequantized tensor
    whole        a weight, times the gain of a batch norm, to integers

Each has the bits of the composition of primitives that it stands for. That composition computes whatever is not admitted here; inside
`unfused` it computes everything, so that the two can be compared. The kernels are those of `Passes`: in PyTorch on every device, and
in C where a backend offers them (`OFFERS`) for this processor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import power_of_two
from fxquant.primitives.requantize import HALF_STEPS, half_step, requantize_fixed, requantize_real
from fxquant.support.forks import start
from fxquant.support.offers import Offers
from fxquant.training import saturation_masks
from fxquant.training.reference_kernels import Accumulator, Form, Gradients, Passes, Rounded


class _Switch(threading.local):
    on = True


_SWITCH = _Switch()


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Inside, and in this thread, everything is composed of primitives, each of them a call of its own."""
    before, _SWITCH.on = _SWITCH.on, False
    try:
        yield
    finally:
        _SWITCH.on = before


def admitted(*tensors: Tensor | None) -> bool:
    """Return whether these are plain float32 tensors outside of torch.func's transforms and of `unfused`."""
    return _SWITCH.on and plain(*tensors)


def plain(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Return whether these are tensors of such a dtype and of no class of their own, outside of torch.func's transforms."""
    given = all(type(t) in _PLAIN and t.dtype in dtypes for t in tensors if t is not None)
    return given and not torch._C._are_functorch_transforms_active()


_PLAIN = (Tensor, torch.nn.Parameter)

_TENSORS = Passes()
OFFERS = Offers[Any]()  # tried before those in PyTorch


def _passes(*tensors: Tensor | None) -> Passes:
    if _SWITCH.on and not torch.is_grad_enabled():  # a backward that is to be differentiated is made of PyTorch's operators
        return OFFERS.first(tensors) or _TENSORS
    return _TENSORS


# ---- statistics of a batch --------------------------------------------------------------------------------------------


class Token:
    """The address of a gradient that only the next function reads, so that this may write to it."""

    start: int | None = None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, form: Form, token: Token) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, ends = _passes(sums).collect(sums, form)
        ctx.save_for_backward(sums, mean)
        ctx.form, ctx.token = form, token
        ctx.mark_non_differentiable(ends)
        return sums.view_as(sums), mean.float(), variance.float(), ends

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor, of_mean: Tensor, of_variance: Tensor, _: Any) -> tuple[Tensor, None, None]:
        sums, mean = ctx.saved_tensors
        rounded, count = mean.float(), ctx.form.values
        slope = of_variance * (2.0 / count)
        offset = of_mean / count + slope * (rounded - mean).float()
        own = ctx.token.start not in (None, 0) and start(of_sums) == ctx.token.start
        return _passes(of_sums, sums).centre(of_sums, sums, ctx.form, rounded, offset, slope, own), None, None


class Collected(NamedTuple):
    """Sums whose statistics are known: `ends` are the least and the largest of each channel."""

    sums: Tensor
    mean: Tensor
    variance: Tensor
    ends: Tensor
    token: Token


def collected(sums: Tensor, form: Form) -> Collected:
    """Return mean and variance, float32, of the channels of sums, which are integers; differentiable."""
    token = Token()
    found, mean, variance, ends = _Collected.apply(sums, form, token)  # type: ignore[no-untyped-call]
    return Collected(found, mean, variance, ends, token)


# ---- requantization ---------------------------------------------------------------------------------------------------


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sums: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        factor: Tensor | None,
        ratio: Tensor,
        ending: tuple[Form, Rounded, Token | None],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sums, bias, residual, factor, ratio)
        ctx.ending = form, how, _ = ending
        return _passes(sums, residual).finish(Accumulator(sums, form, bias, residual, factor), how)

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 6
        sums, bias, residual, factor, ratio = ctx.saved_tensors
        passes = _passes(sums, residual, of_integers, of_real)
        form, how, token = ctx.ending
        found = passes.finish_back(Accumulator(sums, form, bias, residual, factor), ratio, how, Gradients(of_integers, of_real))
        of_sums, of_residual, of_bias, of_ratio, of_factor = found
        if token is not None:
            token.start = start(of_sums)
        wanted = ctx.needs_input_grad
        given = (of_sums, of_bias, of_residual, of_factor, of_ratio)
        return *(value if needed else None for value, needed in zip(given, wanted, strict=False)), None


class _Marked(torch.autograd.Function):
    """`_Finished` where neither factor nor ratio has a gradient: a saturation mask is saved for backward in place of the operands."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None, ratio: Tensor, form: Form, how: Rounded
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        integers, real, inside, without = _passes(sums, residual).mark(Accumulator(sums, form, bias, residual, factor), ratio, how)
        ctx.save_for_backward(saturation_masks.kept(inside, without), factor, ratio)
        ctx.form, ctx.scale = form, how.scale
        ctx.like = torch.empty_strided(sums.shape, sums.stride(), device="meta", dtype=torch.float32)
        return integers, real

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 7
        kept, factor, ratio = ctx.saved_tensors
        inside = saturation_masks.opened(kept, ctx.like)
        passes = _passes(of_integers, of_real)
        of_sums, of_residual, of_bias = passes.mark_back(
            ctx.form, inside, factor, ratio, ctx.scale, Gradients(of_integers, of_real), ctx.like
        )
        wanted = ctx.needs_input_grad
        given = (of_sums, of_bias, of_residual)
        return *(value if needed else None for value, needed in zip(given, wanted, strict=False)), None, None, None, None


def finished(
    sums: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    ratio: Tensor,
    form: Form,
    how: Rounded,
    token: Token | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the integers of requantized accumulators, and the dequantized tensor.

    Gradients run through the float value of the accumulator, accumulator · `ratio` for each channel, within the fused clamp and the
    limits of the grid. `token` is that of the `collected` whose sums these are.
    """
    if not torch.is_grad_enabled():
        return _passes(sums, residual).finish(Accumulator(sums, form, bias, residual, factor), how)
    result: tuple[Tensor, Tensor]
    if token is None and not ratio.requires_grad and (factor is None or not factor.requires_grad):
        result = _Marked.apply(sums, bias, residual, factor, ratio, form, how)  # type: ignore[no-untyped-call]
        return result
    result = _Finished.apply(sums, bias, residual, factor, ratio, (form, how, token))  # type: ignore[no-untyped-call]
    return result


def ends(sums: Tensor, form: Form, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None) -> Tensor:
    """Return the least and the largest accumulator of each channel, (2, channels)."""
    with torch.no_grad():
        return _passes(sums, residual).ends(Accumulator(sums, form, bias, residual, factor))


class Constants:
    """An `arithmetic.Composer` that keeps the arguments of a requantization."""

    def __init__(self) -> None:
        self.primitive: Any = None
        self.arguments: tuple[Any, ...] = ()

    def call(self, primitive: Any, *arguments: Any) -> None:
        """Keep the call."""
        self.primitive, self.arguments = primitive, arguments

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the constant as it is."""
        return value

    def offset(self, grid: Any) -> tuple[int, ...]:
        """Return no zero point, since integers are centred."""
        return ()

    def rounded(self, bounds: tuple[int, int], clamp: tuple[float, float], scale: Tensor, lift: Tensor | None = None) -> Rounded:
        """Return the requantization of this call, with the float64 `lift` added to the accumulator before."""
        if self.primitive is requantize_real:
            _, multiplier, low, high, *_ = self.arguments
            return Rounded((multiplier,), 0, 0.0, low, high, bounds, clamp, scale)
        assert self.primitive is requantize_fixed
        _, shift, multiplier, right_shift, bits, rounding, low, high, *_ = self.arguments
        single = lift is None or lift.numel() == 1
        if shift.dim() == 0 and shift.device.type == "cpu" and rounding not in HALF_STEPS and single:
            numbers = 0.0 if lift is None else float(lift), 2.0 ** -int(shift), float(multiplier) * 2.0 ** -int(right_shift)
            one = torch.tensor(numbers, dtype=torch.float64, device="cpu").unbind()
            return Rounded(one, 2 ** (bits - 1), 0.5 if rounding == "half_up" else 0.0, low, high, bounds, clamp, scale)
        half = half_step(shift, multiplier, right_shift, rounding) if rounding in HALF_STEPS else lift
        half = torch.zeros_like(shift, dtype=torch.float64) if half is None else half
        shift, multiplier, right_shift = (each.expand_as(half) if half.numel() > 1 else each for each in (shift, multiplier, right_shift))
        factors = half, power_of_two(-shift), multiplier.double() * power_of_two(-right_shift)
        return Rounded(factors, 2 ** (bits - 1), 0.5 if rounding == "half_up" else 0.0, low, high, bounds, clamp, scale)


class _OnGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, integers: Tensor, scale: Tensor, bounds: tuple[float, float]) -> Tensor:
        inside, without = _within_grid(value, scale, bounds)
        ctx.save_for_backward(None if inside is None else saturation_masks.kept(inside, without), scale)
        return integers.view_as(integers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        kept, scale = ctx.saved_tensors
        inside = saturation_masks.opened(kept, torch.empty(gradient.shape, device="meta", dtype=torch.float32))
        return (gradient if inside is None else torch.where(inside.bool(), gradient, 0.0)) / scale, None, None, None


def _within_grid(value: Tensor, scale: Tensor, bounds: tuple[float, float]) -> tuple[Tensor | None, int]:
    """Return which elements are within the grid, as bytes in the order of the shape, and how many are not; None where all are."""
    low, high = bounds
    if scale.numel() == 1 and value.numel():
        least, most = (torch.stack(torch.aminmax(value)) / scale.flatten()).tolist()  # a quotient rises with its dividend, rounded too
        if least >= low and most <= high:
            return None, 0
    steps = value / scale
    inside = (steps >= low).logical_and_(steps <= high).contiguous()
    return inside.view(torch.uint8), inside.numel() - int(torch.count_nonzero(inside))


def on_grid(value: Tensor, integers: Tensor, scale: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return `integers`, bit for bit, of their shape and dtype, with the gradient of (value / scale).clamp(*bounds)."""
    result: Tensor = _OnGrid.apply(value, integers, scale, bounds)  # type: ignore[no-untyped-call]
    return result


# ---- weights ----------------------------------------------------------------------------------------------------------


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gain: Tensor | None, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        integers, total = _passes(weight).weigh(weight, gain, scale, low, high)
        ctx.save_for_backward(weight, gain, scale)
        ctx.mark_non_differentiable(total)
        return integers, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weight, gain, scale = ctx.saved_tensors
        of_weight, of_gain = _passes(weight, gradient).weigh_back(weight, gain, scale, gradient)
        return of_weight if ctx.needs_input_grad[0] else None, of_gain if ctx.needs_input_grad[1] else None, None, None, None


def largest(weight: Tensor, gain: Tensor | None) -> Tensor:
    """Return the largest magnitude of each channel of a weight times the gain, (channels,). It is rounded as every element's product."""
    with torch.no_grad():
        found = _passes(weight).weight_ends(weight)
        return found if gain is None else found * gain.abs()


def whole(weight: Tensor, gain: Tensor | None, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Return round(weight · gain / scale) within the limits, float32, with a straight-through gradient; and Σ |·| per channel, float64."""
    result: tuple[Tensor, Tensor] = _Whole.apply(weight, gain, scale, low, high)  # type: ignore[no-untyped-call]
    return result
