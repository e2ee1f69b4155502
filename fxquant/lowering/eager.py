"""The lowerings that compute values: as primitives mean them, and, with the same bits, by fused kernels where a prepared model runs."""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.lowering.lowering import Clamp, Epilogue, Found, Lowering, Quantized, ResidualFactor, limited
from fxquant.numerics.grids import FLOAT32_EXACT, INT32, Grid, Ratio, ends_of
from fxquant.numerics.rounding import clamped, straight_through
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.arithmetic import Arithmetic, FixedArithmetic, RealArithmetic
from fxquant.quantization.learning import learned_step
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightQuantizer
from fxquant.training import fused_elementwise, fused_layers
from fxquant.training.fused_layers import Rounded, form_of

FUSED = (RealArithmetic, FixedArithmetic)  # whose requantization `fused_layers` has; another class may compose other primitives


class Mode(NamedTuple):
    """The mode of an operator."""

    training: bool = False  # whether dropout is active, and large tables are computed only at the integers that occur
    observing: bool = False  # whether scales follow the batch
    live_batch_norm: bool = False  # whether batch norms use the batch's statistics, and update the running ones


_ONCE: ContextVar[Callable[[], dict[Any, Any] | None]] = ContextVar("constants", default=lambda: None)


@contextmanager
def constants_kept() -> Iterator[None]:
    """Inside, operators compute the integers of weights and other constants once, without gradients; no parameter or scale changes."""
    kept = OrderedDict[Any, Any]()  # is gone with this call, also where Ctrl-C meets the line that resets
    token = _ONCE.set(weakref.ref(kept))
    try:
        yield
    finally:
        _ONCE.reset(token)


class EagerLowering(Lowering):
    """Calls the primitives on integer-valued float tensors, with straight-through gradients.

    If it is `observing`, scales that follow the batches are updated: those of the output and of the intermediate, each with its range.
    """

    keeps_start = True
    lifts_late = True  # the output's scale may follow this call's result

    def __init__(
        self, name: str, arithmetic: Arithmetic, output: Quantizer | None, intermediate: Quantizer | None, weight: WeightQuantizer,
        mode: Mode,
    ) -> None:  # fmt: skip
        super().__init__(name, arithmetic, output, intermediate, weight)
        self.training, self.observing, self.live_batch_norm = mode
        self.dequantized_by_id: dict[int, tuple[Tensor, Tensor, Grid]] = {}  # integers, dequantized tensor, grid; by `id` of the integers
        self.scale_updated = False  # whether the output's scale has followed this call's result
        self.last_quantized: Tensor | None = None  # the last tensor that was made of integers on a grid

    def call(self, primitive: Callable[..., Tensor], *arguments: Any) -> Any:
        record = PRIMITIVES[primitive]
        if record.surrogate is None or not torch.is_grad_enabled():
            value = primitive(*arguments)
        else:
            with torch.no_grad():
                exact = primitive(*arguments)
            value = straight_through(record.surrogate(*arguments), exact)
        if record.kind == "quantized":
            self.last_quantized = value
        if record.view and id(arguments[0]) in self.dequantized_by_id:
            real, grid = self.dequantized_by_id[id(arguments[0])][1:]
            self.dequantized_by_id[id(value)] = value, primitive(real, *arguments[1:]), grid
        return value

    def once(self, role: str, compute: Callable[[], Found]) -> Found:
        cache = _ONCE.get()()
        if cache is None or self.training or self.observing or self.live_batch_norm or torch.is_grad_enabled():
            return compute()
        key = type(self), self.name, self.weight, role
        if key not in cache:
            cache[key] = compute()
        value: Found = cache[key]
        return value

    def remember(self, operand: Quantized) -> None:
        """Keep the dequantized tensor of this operand, if it was computed, so that views of its integers are also views of that tensor."""
        if operand.dequantized is not None:
            self.dequantized_by_id[id(operand.value)] = operand.value, operand.dequantized, operand.grid

    def remembered(self, result: Quantized) -> Quantized:
        """Return the result with its dequantized tensor, where views have been made of that too."""
        _, real, grid = self.dequantized_by_id.get(id(result.value), (None, None, None))
        return replace(result, dequantized=real) if result.dequantized is None and grid is result.grid else result

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value

    def align(self, operand: Quantized, ratio: Ratio, role: str, wide: bool) -> Any:
        return self._sloped(lambda: super(EagerLowering, self).align(operand, ratio, role, wide), operand.value, ratio)

    def multiplied(self, primitive: Callable[..., Tensor], value: Any, ratio: Ratio, *constants: Any) -> Any:
        return self._sloped(lambda: self.call(primitive, value, *constants), value, ratio)

    def _sloped(self, multiply: Callable[[], Any], value: Any, ratio: Ratio) -> Any:
        """Return the result of `multiply` on a value, with the ratio as gradient: a term whose multiplier rounds to 0 still trains."""
        if not torch.is_grad_enabled():
            return multiply()
        with torch.no_grad():
            exact, slope = multiply(), ratio.approximate()
        return self._with_slope(exact, value, slope)

    def _with_slope(self, exact: Any, value: Any, slope: Any) -> Any:
        """Return the exact product, with the slope as its derivative by the value."""
        return straight_through(value * slope, exact) if value.requires_grad else exact

    def result(self, exact: Callable[[], Tensor], real: Callable[[], Tensor], to: Quantizer | None = None) -> Quantized:
        to = to or self.output
        follows = self._follows(to)
        value = real() if follows or torch.is_grad_enabled() else None
        self._set(to, lambda: value if self.observed_instead is None or to is not self._output else self.observed_instead)  # type: ignore[arg-type, return-value]
        with torch.no_grad():
            integers = exact()
        grid = to.grid
        if value is not None and to.learns and torch.is_grad_enabled():
            integers = learned_step(value, integers, grid.scale, to, grid)
        elif value is not None and value.requires_grad:
            if fused_layers.admitted(value, integers):
                integers = fused_layers.on_grid(value, integers, grid.scale, grid.bounds)
            else:
                integers = straight_through(clamped(value / grid.scale, *grid.bounds), integers)
        return self._on(grid, integers)

    def _on(self, grid: Grid, integers: Tensor, real: Tensor | None = None) -> Quantized:
        """Return a `Quantized` of these integers, with their dequantized tensor if it has been computed."""
        self.last_quantized = integers
        return Quantized(integers, grid, tuple(integers.shape), real)

    def _follows(self, to: Quantizer) -> bool:
        """Return whether a scale follows the value that is computed now."""
        return self.observing and to.follows_training and not (self.scale_updated and to is self._output)

    def _set(self, to: Quantizer, observed: Callable[[], Tensor]) -> None:
        """Update a scale that follows the batches from the observed value; require any other intermediate to be calibrated."""
        if self._follows(to):
            with torch.no_grad():
                to.follow(limited(observed(), self.observed_range) if to is self.output else observed())
        elif to is self.intermediate:
            to.require()

    def quantize(self, input: Tensor) -> Quantized:
        return self.result(lambda: self.output.grid.quantize(input), lambda: input)


class FusedLowering(EagerLowering):
    """An `EagerLowering` that uses the fused kernels of training wherever one is admitted, with the same bits."""

    def call(self, primitive: Callable[..., Tensor], *arguments: Any) -> Any:
        if fused_elementwise.defers(primitive, arguments):
            return fused_elementwise.Deferred(primitive, arguments)
        operands = tuple(map(self.computed, arguments))
        with fused_elementwise.kept_narrow(primitive, operands):
            return super().call(primitive, *operands)

    def _with_slope(self, exact: Any, value: Any, slope: Any) -> Any:
        if isinstance(exact, fused_elementwise.Deferred):
            return replace(exact, slope=float(slope))
        return super()._with_slope(exact, value, slope)

    def computed(self, value: Any) -> Any:
        """Compute a deferred call; return any other value unchanged."""
        if not isinstance(value, fused_elementwise.Deferred):
            return value
        arguments = [self.computed(argument) for argument in value.arguments]
        if value.slope is None or not torch.is_grad_enabled():
            return super().call(value.primitive, *arguments)
        with torch.no_grad():
            exact = value.primitive(*arguments)
        return straight_through(arguments[0] * value.slope, exact)

    def quantize(self, input: Tensor) -> Quantized:
        if (self.output.learns and torch.is_grad_enabled()) or not fused_layers.admitted(input):
            return super().quantize(input)
        self._set(self.output, lambda: input if self.observed_instead is None else self.observed_instead)
        grid = self.output.grid
        return self._on(grid, fused_layers.quantized(input, grid, grid.bounds))

    def _fuses(self, to: Quantizer) -> bool:
        """Return whether a fused kernel can requantize to this grid: its scale learns nothing, and follows nothing but ends."""
        learns, observed = to.learns and torch.is_grad_enabled(), self.observed_instead is not None and to is self._output
        return not learns and to.dtype != INT32 and (not self._follows(to) or (not observed and to.can_follow_ends))

    def _has_passes(self, end: Epilogue, to: Quantizer) -> bool:
        """Return whether `fused_layers` and `fused_elementwise` requantize as this arithmetic does."""
        passes = type(self.arithmetic) in FUSED and self.arithmetic.rounds_by_adding
        return passes and not self.ends_in_table(end.clamp, to, end.kind)

    def requantize_by(self, accumulator: Any, end: Epilogue) -> Quantized:
        joined = self._joined(accumulator, end)
        return super().requantize_by(self.computed(accumulator), end) if joined is None else joined

    def requantize_in_steps(
        self, total: Callable[[], tuple[Any, Tensor]], real: Callable[[], Tensor], clamp: Clamp | None, scales: Sequence[Tensor]
    ) -> Quantized:
        to = self.output
        learns = to.learns or any(scale.requires_grad for scale in scales)
        if (learns and torch.is_grad_enabled()) or type(self.arithmetic) is not RealArithmetic:
            return super().requantize_in_steps(total, real, clamp, scales)
        if self._follows(to):
            self._set(to, lambda: real() if self.observed_instead is None else self.observed_instead)
            self.scale_updated = True
        accumulator, step = total()
        return self.requantize(accumulator, Ratio((to.grid.scale * step,)), clamp)

    def _joined(self, accumulator: Any, end: Epilogue) -> Quantized | None:
        """Requantize an accumulator of two tensors without materializing it; return None where no fused kernel can."""
        to, clamp = end.to or self.output, end.clamp
        if not isinstance(accumulator, fused_elementwise.Deferred | Tensor) or not self._has_passes(end, to) or not self._fuses(to):
            return None
        join = fused_elementwise.join_of(accumulator)
        if join is None:
            return None
        step = end.ratio.approximate()
        if (step.requires_grad and torch.is_grad_enabled()) or step.numel() not in (1, join.columns if join.each else 1):
            return None
        step = step.detach().flatten()

        def observed() -> Tensor:
            ends = fused_elementwise.ends(join)
            real = ends * step if join.wide else ends.float() * step.float()
            return real if clamp is None else real.clamp(*clamp)

        self._set(to, observed)
        return self._on(to.grid, *fused_elementwise.joined(join, self._rounded(end, to), step))

    def _rounded(self, end: Epilogue, to: Quantizer) -> Rounded:
        """Return the constants (`Rounded`) by which fused kernels requantize an accumulator to the grid of `to`."""
        least, most = end.clamp or (None, None)
        limits = -math.inf if least is None else least, math.inf if most is None else most
        grid = to.grid
        with torch.no_grad():
            constants = fused_layers.Constants()
            ratio, bounds = end.ratio.over(grid.scale), self.bounds(end.clamp, to, end.kind)
            self.arithmetic.requantize(constants, None, ratio, *bounds, grid, "", end.accumulator_bits, end.kind)
            return constants.rounded(grid.bounds, limits, grid.scale, None if end.lift is None else end.lift(grid.scale))

    def look_up(
        self, input: Quantized, entries: Callable[..., Tensor], function: Callable[[Tensor], Tensor], tamed: Callable[[Tensor], Tensor]
    ) -> Quantized:
        to, value = self.output, input.value
        follows = self._follows(to)
        if follows and isinstance(value, Tensor) and 4 * value.numel() < input.grid.high - input.grid.low and fused_layers.admitted(value):
            places = value.detach().flatten().double().cpu()
            return self.result(lambda: entries(places).view(value.shape).float(), lambda: tamed(input.real()))
        if not self._fuses(to) or not fused_elementwise.tabulated(input.value, input.grid):
            return super().look_up(input, entries, function, tamed)
        integers = fused_elementwise.integers_of(value, input.grid)
        curve = fused_elementwise.curve_of(function, input.grid, torch.is_grad_enabled() and value.requires_grad, integers)
        if follows:
            occurring = curve.values[fused_elementwise.occurring(value, integers)]
            if not bool(torch.isfinite(occurring).all()):
                return super().look_up(input, entries, function, tamed)
            self._set(to, lambda: occurring)
        large = self.training and len(integers) > fused_elementwise.FEW
        table = entries(integers) if large else entries()[integers[0].int() - input.grid.low :]
        return self._on(to.grid, *fused_elementwise.looked_up(value, input.grid, curve, table, to.grid))

    def complete(
        self, accumulator: Any, end: Epilogue, bias: Tensor | None = None, residual: Quantized | None = None,
        multiplier: ResidualFactor | None = None, statistics: fused_layers.Collected | None = None,
    ) -> Quantized:  # fmt: skip
        to, ratio, clamp, bound = end.to or self.output, end.ratio, end.clamp, end.bound
        if self.noise_module is not None and self.noise_module.training:
            accumulator, bias, statistics = self._noisy(self.computed(accumulator), bias, ratio), None, None
        if isinstance(accumulator, fused_elementwise.Deferred):
            alone = bias is None and residual is None and statistics is None
            joined = self._joined(accumulator, end) if alone else None
            if joined is not None:
                return joined
            accumulator = self.computed(accumulator)
        other = None if residual is None else residual.value
        fits = (
            self._fuses(to)
            and self._has_passes(end, to)
            and fused_layers.admitted(accumulator, other)
            and (other is None or other.shape == accumulator.shape)
            and self._is_exact(accumulator, bound, bias, residual, multiplier, statistics)
        )
        factors, _ = self.once(f"factors {id(end)}", lambda: (ratio.approximate().to(torch.float32), end))  # `end` keeps its id
        form = form_of(accumulator, factors.dim() - 1 if factors.dim() else 0) if fits else None
        if form is None:
            return super().complete(accumulator, end, bias, residual, multiplier, statistics)
        added = None if bias is None else bias.to(torch.float32).reshape(-1).expand(form.channels)
        factor = None if multiplier is None else multiplier.value().to(torch.float32).reshape(-1).expand(form.channels)
        factors = factors.reshape(-1).expand(form.channels)

        def observed() -> Tensor:
            if statistics is not None and other is None:
                ends = statistics.ends if added is None else statistics.ends + added
            else:
                ends = fused_layers.ends(accumulator, form, added, other, factor)
            real = ends.double() * ratio.approximate().reshape(-1) if bound >= FLOAT32_EXACT else ends * factors
            return real if clamp is None else real.clamp(*clamp)

        self._set(to, observed)
        token = None if statistics is None else statistics.token
        rounded, _ = self.once(f"rounded {id(end)}", lambda: (self._rounded(end, to), end))
        return self._on(to.grid, *fused_layers.finished(accumulator, added, other, factor, factors, form, rounded, token))

    def _noisy(self, accumulator: Tensor, bias: Tensor | None, ratio: Ratio) -> Tensor:
        """Return the rounded accumulator, bias included, after the user's module has drawn noise for its float values."""
        assert self.noise_module is not None
        step = ratio.approximate().to(accumulator.dtype)
        real = (accumulator if bias is None else accumulator + bias.to(accumulator.dtype)) * step
        noisy: Tensor = type(self.noise_module).forward(self.noise_module, real) / step
        return straight_through(noisy, noisy.detach().round())

    @staticmethod
    def _is_exact(
        sums: Tensor, bound: float, bias: Tensor | None, residual: Quantized | None, multiplier: ResidualFactor | None,
        statistics: fused_layers.Collected | None,
    ) -> bool:  # fmt: skip
        """Return whether the accumulator stays below 2^24 in magnitude: by its proved `bound`, or else by the present values."""
        if bound < FLOAT32_EXACT:
            return True
        if sums.dtype != torch.float32:
            return False
        with torch.no_grad():
            largest = max(map(abs, ends_of(sums))) if statistics is None else float(statistics.ends.abs().max())
            largest += 0.0 if bias is None else float(bias.abs().max())
            if residual is not None and multiplier is not None:
                largest += float(multiplier.value().abs().max()) * residual.grid.magnitude
        return largest < FLOAT32_EXACT

    def parts(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> int:
        if not fused_layers.admitted(input, weight):
            return 0
        with torch.no_grad():
            low, high = ends_of(input)
            low, high = max(-low, 0.0), max(high, 0.0)
            for parts in (1, 2, 4):
                if weight.shape[1] % parts:
                    break
                each = weight.reshape(len(weight), parts, -1)
                above, below = self.once(f"signs {tuple(each.shape)}", partial(_sums_by_sign, each, self.weight.dtype.high))
                most = torch.maximum(above * high + below * low, above * low + below * high)
                if bias is not None and parts == 1:
                    most = most + bias.abs().unsqueeze(1)
                if float(most.max()) < FLOAT32_EXACT:
                    return parts
        return 0


def _sums_by_sign(rows: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the sums of the positive, and of the negative weights in the last dimension, float64; none is above `largest`."""
    dtype = torch.float64 if rows.shape[-1] * largest >= FLOAT32_EXACT else torch.float32
    total, signed = rows.abs().sum(-1, dtype=dtype).double(), rows.sum(-1, dtype=dtype).double()
    return (total + signed) / 2, (total - signed) / 2
