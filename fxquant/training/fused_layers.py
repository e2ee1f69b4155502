"""Autograd functions for large tensors in training, with few kernels and a custom backward.

    collected    the mean and the variance of each channel of sums, and their least and largest
    finished     accumulators to integers and the dequantized tensor
    whole        a weight, times the gain of a batch norm, to integers

Each has the bits of the composition of primitives that it replaces. Operands that are not admitted here use the composition; inside
`unfused` all do, so that the two can be compared. The kernels are the methods of `Passes`: in PyTorch on every device, and
in C if a backend offers them (`OFFERS`) for this processor.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import Grid, largest_pairs, power_of_two
from fxquant.primitives.quantization import HALF_STEPS, half_step, requantize_fixed, requantize_real
from fxquant.support import Offers
from fxquant.support.files import start


# ---- The kernels of `fused_layers` in PyTorch: for every device, and as the reference that those in C are compared with ----
class Form(NamedTuple):
    """A tensor's sizes as (outer, channels, inner) in memory order; `shape` is the shape of per-channel constants that broadcast to it."""

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
    """Return the form of a tensor with `trailing` dimensions after its channels; None for other layouts, or a tensor of channels alone."""
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
    """Sums, float32, with a bias and a residual to be added."""

    sums: Tensor
    form: Form
    bias: Tensor | None = None  # of shape (C,), or None
    residual: Tensor | None = None  # of the shape of the sums, or None; it is multiplied by `factor`, of shape (C,)
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
    """The numbers of one requantization, by channel or scalars: multiplier and shift, rounding, integer limits, fused clamp."""

    factors: tuple[Tensor, ...]  # of `requantize_real`: the multiplier; of `requantize_fixed`: half, 2^-shift, the product, all float64
    limit: int  # limit, add: of `requantize_fixed`: the limit of the intermediate, and the rounding constant of the last shift
    add: float
    low: int  # low, high: limits of the integers, the fused clamp included
    high: int
    bounds: tuple[int, int]  # limits of the dtype, beyond which the gradient is 0
    clamp: tuple[float, float]  # the fused clamp, as float values
    scale: Tensor  # float32: the value of one step

    def inside(self, real: Tensor) -> Tensor:
        """Return a bool mask of the float values with a gradient: within the fused clamp and the limits of the dtype."""
        steps = real.clamp(*self.clamp) / self.scale
        return (steps >= self.bounds[0]) & (steps <= self.bounds[1]) & (real >= self.clamp[0]) & (real <= self.clamp[1])

    @property
    def fixed(self) -> bool:
        """Whether the requantization is `requantize_fixed`: by several factors."""
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

    def finish(self, accumulator: Accumulator, how: Rounded, ratio: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return the integers, and the dequantized tensor, which is never -0.0; and, given a ratio, what has a gradient.

        That is a saturation mask, uint8 with the sums' strides, and the number of elements without gradient.
        """
        value, form, inside, without = accumulator.value(), accumulator.form, None, 0
        if ratio is not None:
            marks = how.inside(value * ratio.reshape(form.shape))
            inside, without = marks.to(torch.uint8), int(marks.numel() - marks.sum())
        if how.fixed:
            half, first, product = (each.reshape(form.shape) if each.numel() > 1 else each for each in how.factors)
            value = value.double().add_(half).mul_(first).floor_().clamp_(-how.limit, how.limit - 1)
            value = value.mul_(product).add_(how.add).floor_().clamp_(how.low, how.high).float()
        else:
            (multiplier,) = how.factors
            value = (value * (multiplier.reshape(form.shape) if multiplier.numel() > 1 else multiplier)).round_().clamp_(how.low, how.high)
        return value, (value * how.scale).add_(0.0), inside, without

    def mark_back(
        self, form: Form, inside: Tensor | None, factor: Tensor | None, ratio: Tensor, scale: Tensor, gradients: Gradients, like: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return gradients of the sums, the residual and the bias, by the mask of `finish`. `like` has the strides of the sums."""
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

    def weight_pairs(self, weight: Tensor, gain: Tensor | None) -> Tensor:
        """Return `largest_pairs` of each channel of weight · gain, (channels,)."""
        return largest_pairs(weight if gain is None else weight * gain.reshape(-1, *[1] * (weight.dim() - 1)))

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

    def quantize(self, value: Tensor, grid: Grid, bounds: tuple[float, float] | None) -> tuple[Tensor, tuple[Tensor | None, int]]:
        """Return the centred integers of a float tensor on a grid; and the result of `within_grid`, if bounds are given."""
        return grid.quantize(value), (None, 0) if bounds is None else within_grid(value, grid.scale, bounds)

    def quantize_back(self, gradient: Tensor, inside: Tensor | None, scale: Tensor) -> Tensor:
        """Return gradient / scale, and 0 where the mask is 0."""
        return (gradient if inside is None else torch.where(inside.bool(), gradient, 0.0)) / scale


def within_grid(value: Tensor, scale: Tensor, bounds: tuple[float, float]) -> tuple[Tensor | None, int]:
    """Return the mask of elements within `bounds` in units of the scale, uint8, or None if all are, and the number of others."""
    low, high = bounds
    if scale.numel() == 1 and value.numel():
        least, most = (torch.stack(torch.aminmax(value)) / scale.flatten()).tolist()  # a quotient rises with its dividend, rounded too
        if least >= low and most <= high:
            return None, 0
    steps = value / scale
    inside = (steps >= low).logical_and_(steps <= high).contiguous()
    return inside.view(torch.uint8), inside.numel() - int(torch.count_nonzero(inside))


class _Switch(threading.local):
    on = True


_SWITCH = _Switch()


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Inside, in this thread, fused kernels are off: operators call one primitive after the other."""
    before, _SWITCH.on = _SWITCH.on, False
    try:
        yield
    finally:
        _SWITCH.on = before


def admitted(*tensors: Tensor | None) -> bool:
    """Return whether fused kernels are on (no `unfused`) and `tensors` are plain float32, outside of torch.func's transforms."""
    return _SWITCH.on and plain(*tensors)


def plain(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Return whether `tensors` are plain (not of a subclass), of one of `dtypes`, and outside of torch.func's transforms."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.dtype not in dtypes):
            return False
    return not torch._C._are_functorch_transforms_active()


_PLAIN = (Tensor, torch.nn.Parameter)

_TENSORS = Passes()
OFFERS = Offers[Any]()  # tried before those in PyTorch


def _passes(*tensors: Tensor | None) -> Passes:
    if _SWITCH.on and not torch.is_grad_enabled():  # a backward that is to be differentiated is made of PyTorch's operators
        return OFFERS.first(tensors) or _TENSORS
    return _TENSORS


class Token:
    """The address of a gradient that only the next backward function reads, so that this function may overwrite it."""

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
    """Sums with their statistics per channel; `ends` are the minimum and the maximum."""

    sums: Tensor
    mean: Tensor
    variance: Tensor
    ends: Tensor
    token: Token


def collected(sums: Tensor, form: Form) -> Collected:
    """Return mean and variance, float32, of the channels of sums, which are integers; differentiable."""
    token = Token()
    result, mean, variance, ends = _Collected.apply(sums, form, token)  # type: ignore[no-untyped-call]
    return Collected(result, mean, variance, ends, token)


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None, ratio: Tensor,
        ending: tuple[Form, Rounded, Token | None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sums, bias, residual, factor, ratio)
        ctx.ending = form, how, _ = ending
        return _passes(sums, residual).finish(Accumulator(sums, form, bias, residual, factor), how)[:2]

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 6
        sums, bias, residual, factor, ratio = ctx.saved_tensors
        passes = _passes(sums, residual, of_integers, of_real)
        form, how, token = ctx.ending
        results = passes.finish_back(Accumulator(sums, form, bias, residual, factor), ratio, how, Gradients(of_integers, of_real))
        of_sums, of_residual, of_bias, of_ratio, of_factor = results
        if token is not None:
            token.start = start(of_sums)
        needs = ctx.needs_input_grad
        gradients = (of_sums, of_bias, of_residual, of_factor, of_ratio)
        return *(value if needed else None for value, needed in zip(gradients, needs, strict=False)), None


class _Marked(torch.autograd.Function):
    """`_Finished` where neither factor nor ratio has a gradient: a saturation mask is saved for backward in place of the operands."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None, ratio: Tensor, form: Form, how: Rounded
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        integers, real, inside, without = _passes(sums, residual).finish(Accumulator(sums, form, bias, residual, factor), how, ratio)
        ctx.save_for_backward(kept_mask(inside, without), factor, ratio)
        ctx.form, ctx.scale = form, how.scale
        ctx.like = torch.empty_strided(sums.shape, sums.stride(), device="meta", dtype=torch.float32)
        return integers, real

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 7
        mask, factor, ratio = ctx.saved_tensors
        inside = opened_mask(mask, ctx.like)
        passes = _passes(of_integers, of_real)
        gradients = Gradients(of_integers, of_real)
        of_sums, of_residual, of_bias = passes.mark_back(ctx.form, inside, factor, ratio, ctx.scale, gradients, ctx.like)
        pairs = zip((of_sums, of_bias, of_residual), ctx.needs_input_grad, strict=False)
        return *(value if needed else None for value, needed in pairs), None, None, None, None


def finished(
    sums: Tensor, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None, ratio: Tensor, form: Form, how: Rounded,
    token: Token | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the integers of requantized accumulators, and the dequantized tensor.

    Gradients run through the float value of the accumulator, accumulator · `ratio` for each channel, within the fused clamp and the
    limits of the grid. `token` is that of the `collected` whose sums these are.
    """
    if not torch.is_grad_enabled():
        return _passes(sums, residual).finish(Accumulator(sums, form, bias, residual, factor), how)[:2]
    if token is None and not ratio.requires_grad and (factor is None or not factor.requires_grad):
        return _Marked.apply(sums, bias, residual, factor, ratio, form, how)  # type: ignore[no-untyped-call,no-any-return]
    return _Finished.apply(sums, bias, residual, factor, ratio, (form, how, token))  # type: ignore[no-untyped-call,no-any-return]


def ends(sums: Tensor, form: Form, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None) -> Tensor:
    """Return the least and the largest accumulator of each channel, (2, channels)."""
    with torch.no_grad():
        return _passes(sums, residual).ends(Accumulator(sums, form, bias, residual, factor))


class Constants:
    """A recorder of one requantization: it stores the primitive and the arguments that an `arithmetic.Composer` would emit as a node."""

    primitive: Any = None
    arguments: tuple[Any, ...] = ()

    def call(self, primitive: Any, *arguments: Any) -> None:
        """Record the primitive and its arguments, where a `Composer` would emit a node."""
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
    def forward(ctx: Any, value: Tensor, integers: Tensor, scale: Tensor, marks: tuple[Tensor | None, int]) -> Tensor:
        ctx.save_for_backward(kept_mask(*marks), scale)
        return integers.view_as(integers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        mask, scale = ctx.saved_tensors
        inside = opened_mask(mask, torch.empty(gradient.shape, device="meta", dtype=torch.float32))
        return _passes(gradient).quantize_back(gradient, inside, scale), None, None, None


def on_grid(value: Tensor, integers: Tensor, scale: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return `integers`, bit for bit, of their shape and dtype, with the gradient of (value / scale).clamp(*bounds)."""
    return _OnGrid.apply(value, integers, scale, within_grid(value, scale, bounds))  # type: ignore[no-untyped-call,no-any-return]


def quantized(value: Tensor, grid: Grid, bounds: tuple[float, float]) -> Tensor:
    """Return the centred integers of a float tensor on a grid, with the gradient of (value / scale).clamp(*bounds)."""
    marked = bounds if value.requires_grad and torch.is_grad_enabled() else None
    with torch.no_grad():
        integers, marks = _passes(value).quantize(value, grid, marked)
    return integers if marked is None else _OnGrid.apply(value, integers, grid.scale, marks)  # type: ignore[no-untyped-call]


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
        magnitudes = _passes(weight).weight_ends(weight)
        return magnitudes if gain is None else magnitudes * gain.abs()


def pairs(weight: Tensor, gain: Tensor | None) -> Tensor:
    """Return the `largest_pairs` of each channel of a weight times the gain, (channels,)."""
    with torch.no_grad():
        return _passes(weight).weight_pairs(weight, gain)


def whole(weight: Tensor, gain: Tensor | None, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Return round(weight · gain / scale) within the limits, float32, with a straight-through gradient; and Σ |·| per channel, float64."""
    return _Whole.apply(weight, gain, scale, low, high)  # type: ignore[no-untyped-call,no-any-return]


# ---- saturation masks, saved for backward: bytes that are 1 where an element has a gradient, or the indices of the few that have none
FEW = 32  # times fewer places than elements, of 4 bytes each


MASKS = Offers[Any]()  # of a backend: `places` returns what `kept_mask` does, and `marks` what `opened_mask` does


def kept_mask(inside: Tensor | None, without: int) -> Tensor | None:
    """Compress a mask for backward: None if it has no zeros, int32 indices (`without`,) of its zeros if they are few, else itself."""
    if inside is None or not without:
        return None
    if without * FEW > inside.numel() or inside.numel() >= 2**31:
        return inside
    flat = inside.as_strided((inside.numel(),), (1,))
    offered = MASKS.first(flat)
    return torch.nonzero(flat == 0).flatten().int() if offered is None else offered.places(flat, without)


def opened_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a saved mask as bytes with the shape and strides of another tensor."""
    if mask is None or mask.dtype != torch.int32:
        return mask
    offered = MASKS.first(mask)
    if offered is None:
        flat = torch.ones(like.numel(), dtype=torch.uint8, device=mask.device)
        flat[mask.long()] = 0
    else:
        flat = offered.marks(mask, like.numel())
    return flat.as_strided(like.shape, like.stride())
