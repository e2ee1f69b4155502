"""A quantizer: the dtype, scale and zero point of one tensor (or of a group that shares them), and the observer that chooses them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.errors import CalibrationError, NotCalibrated, NotFinite
from fxquant.numerics import grids
from fxquant.numerics.grids import INT32, SMALLEST_SCALE, Grid, IntType, float32, round_up_to_power_of_two, scale_from_range
from fxquant.quantization.learning import LSQ, LSQ_PLUS, METHODS, Remembered, TrainableScale, method_of
from fxquant.quantization.observers import ranges
from fxquant.quantization.observers.histogram import HistogramObserver, beside, many_at_ends, observe_together, on_step
from fxquant.quantization.observers.ranges import Method, MinMaxObserver, MovingAverageMinMaxObserver, Observer, in_numbers, stays
from fxquant.quantization.spec import FROZEN, STATISTICS


class Quantizer(TrainableScale):
    """The dtype and scale of one quantized tensor, and the zero point of an affine dtype.

    `scale` is a float32 scalar, NaN before calibration. With an observer, calibration chooses it; without one it is constant. `training`
    determines how it changes in state TRAIN (see ActivationConfig), unless it is `frozen`. "statistics" and "lsq+" change the zero point
    with the scale; other learned scales keep the calibrated zero point. A tensor that `was_zero` in calibration, or is `unseen`, follows
    the range of its batches in TRAIN, whatever `training` is, until it is calibrated again.

    headroom     the factor of an observed scale of a symmetric dtype, for values beyond the observed ones
    items        whether dimension 0 of the observed tensor is the batch dimension; observers may then distinguish samples by their norms
    is_output    whether the tensor is an output of the model, or read by a float operator
    read         the elementwise functions that read the tensor; () if another operator reads it, too. See `Observer.read_by`
    range        the range of the batches, which "statistics" follow; None if the scale is constant
    others       further observers, by class, that observe in calibration, so that its statistics suffice for any of fxquant's observers:
                 see `observations`. They do not affect the scale
    batches_used int64 scalar: the number of batches that the scale was computed from; `range` may have observed more
    zero_point   int64 scalar, of affine dtypes: the integer of 0.0, before "lsq+" changes it
    ends         float32 of shape (2,), of affine dtypes: the interval of float values from which scale and zero point were computed, NaN
                 if they are constant. "statistics" move this interval, not the rounded one of scale and zero point
    """

    batches_used: Tensor
    zero_point: Tensor
    ends: Tensor

    def __init__(
        self, dtype: IntType, observer: Observer | None, *, scale: float | None = None, zero_point: int = 0, training: str = STATISTICS,
        power_of_two: bool = False, headroom: float = 1.0, items: bool = False, is_output: bool = False, name: str = "",
        source: str = "", module: str = "",
    ) -> None:  # fmt: skip
        start = torch.tensor(float("nan") if scale is None else scale, dtype=torch.float32, device="cpu")
        method = METHODS.get(training) if observer is not None else None
        super().__init__(start, LSQ if method is LSQ_PLUS and not dtype.affine else method)
        self.dtype = dtype
        self.observer = observer
        self.mode = training  # `training` is PyTorch's flag of every module
        self.power_of_two = power_of_two or (method is not None and method.power_of_two)
        self.headroom = headroom
        self.items, self.is_output = items, is_output
        self.read: tuple[Callable[[Tensor], Tensor], ...] = ()
        self.range = None if observer is None else observer.range_observer()
        self.others = nn.ModuleDict({} if observer is None else beside(observer))
        self.paused = False  # whether batches pass by unobserved
        self.waiting: list[Tensor] | None = None  # the parts of a batch, such as steps of a loop, until `follow_all`; None elsewhere
        self.chosen_by = Method.ERROR  # how the range is chosen from what was observed
        self.unseen = False  # whether it follows its batches, being too small for a sum that reads it
        self._was_zero, self._many = Remembered(False), Remembered((False, False))
        self.name, self.source, self.module_path = name, source, module
        self.register_buffer("batches_used", torch.zeros((), dtype=torch.int64, device="cpu"))
        if dtype.affine:
            self.register_buffer("zero_point", torch.tensor(zero_point, dtype=torch.int64, device="cpu"))
            self.register_buffer("ends", torch.full((2,), float("nan"), dtype=torch.float32, device="cpu"))
        self.frozen = False
        self._last_grid: tuple[Any, Any] = (), None  # the values of a grid, and that grid

    @property
    def grid(self) -> Grid:
        """The current grid. Without learned scales, the same object is returned until the scale, the zero point or `frozen` changes."""
        base = self._buffers["base_scale"]  # much faster than the attribute
        if self.method is not None or base is None or not in_numbers(base) or torch.is_inference_mode_enabled():
            return self._grid_of(self.scale)
        values = float(base), int(self.zero_point) if self.dtype.affine else 0, self.frozen
        if self._last_grid[0] != values:
            scale = self.scale
            self._last_grid = values, self._grid_of(scale.clone() if scale is base else scale)
        return self._last_grid[1]  # type: ignore[no-any-return]

    def _grid_of(self, scale: Tensor) -> Grid:
        return Grid(self.dtype, scale, self._zero_point(scale) if self.dtype.affine else 0)

    def _zero_point(self, scale: Tensor) -> int:
        """Return the current zero point for this scale."""
        if self.method is None or not self.method.moves_end or self.frozen or not self.calibrated:
            return int(self.zero_point)
        end = self.method.end(self.base_scale, -self.zero_point * self.base_scale, self._values())
        return self._zero_point_at(end, scale)

    def _zero_point_at(self, end: Tensor, scale: Tensor) -> int:
        """Return the zero point with which the lowest integer stands for `end`, or for the nearest possible float value."""
        return int(torch.round(-end / scale).clamp(self.dtype.low, self.dtype.high))

    @property
    def reach(self) -> float:
        """The largest magnitude of a centred integer."""
        return self._reach_at(int(self.zero_point) if self.dtype.affine else 0)

    def _reach_at(self, zero_point: int) -> float:
        return float(max(self.dtype.high - zero_point, zero_point - self.dtype.low))

    def _reach_in(self, state_dict: Mapping[str, Any], prefix: str) -> float:
        zero_point = state_dict.get(prefix + "zero_point") if self.dtype.affine else None
        return self.reach if zero_point is None else self._reach_at(int(zero_point))

    @torch.no_grad()
    def assign(self, scale: Tensor, zero_point: Tensor | int | None = None) -> None:
        """Set the scale that training starts from, with this zero point or the current one."""
        if self.dtype.affine:
            self.zero_point.fill_(self._zero_point(self.scale) if zero_point is None else zero_point)
        super().assign(scale)

    @property
    def scale(self) -> Tensor:
        """The current scale; a calibrated or learned one is rounded up to a power of two if the target or the config requires it."""
        scale = self.current()
        if scale is self.base_scale and (torch.is_grad_enabled() or self.moves):
            scale = scale.clone()  # where operators share it, one of them moves it after another has kept it
        return scale if self.frozen else self._rounded(scale)

    def _rounded(self, scale: Tensor) -> Tensor:
        """Round a calibrated scale up to a power of two if the target or the config requires it; return other scales unchanged."""
        return round_up_to_power_of_two(scale) if self.power_of_two and self.observer is not None else scale

    @property
    def follows_sum(self) -> bool:
        """Whether the tensor is a sum as it stands: a 32-bit output, whose scale is the sum's step and not kept here."""
        return self.dtype == INT32

    @property
    def calibrated(self) -> bool:
        """Whether the scale is known."""
        return math.isfinite(self._buffers["base_scale"]) or self.follows_sum  # type: ignore[arg-type]

    @property
    def was_zero(self) -> bool:
        """Whether calibration has observed nothing but zeros, so that training lacks a scale to start from or to keep."""
        observer = self.observer
        return observer is not None and not self.frozen and self._was_zero.get(lambda: observer.only_zeros, observer.count)

    @property
    def learns(self) -> bool:
        """Whether gradients reach the scale."""
        return self.method is not None and not self._starts_anew and super().learns

    @property
    def _starts_anew(self) -> bool:
        """Whether TRAIN ignores the calibrated range: the tensor was 0, or `unseen`, and the scale is not frozen."""
        return not self.frozen and (self.unseen or self.was_zero)

    @property
    def follows_training(self) -> bool:
        """Whether batches in state TRAIN can set the scale."""
        return self.observer is not None and not self.frozen and (self.mode != FROZEN or self._starts_anew)

    @property
    def moves(self) -> bool:
        """Whether a batch in state TRAIN moves the scale by its values: a learned scale is moved by its gradient alone."""
        return self.follows_training and (self.mode == STATISTICS or self.at_first)

    @property
    def at_first(self) -> bool:
        """Whether TRAIN has no scale to start from, so that the next batch sets it."""
        return not self.calibrated or self._starts_anew

    def follow_all(self) -> None:
        """Take in the parts that `follow` has kept in `waiting`, as one batch."""
        parts, self.waiting = self.waiting, None
        if parts:
            self.follow(torch.cat(parts))

    @property
    def pending(self) -> bool:
        """Whether something was observed that is not in the scale yet."""
        return self.range is not None and bool(self.range.count != self.batches_used)

    @property
    def given(self) -> bool:  # type: ignore[override]
        """Whether the scale is constant, from the config or the operator, rather than observed."""
        return self.observer is None and not self.follows_sum

    @property
    def observers(self) -> list[Observer]:
        """All observers of calibration: the one that chooses the scale, the range, and the others; empty where the scale is fixed."""
        return [child for child in (self.observer, self.range, *self.others.values()) if isinstance(child, Observer)]

    def observe(self, value: Tensor) -> None:
        """Let the observers take in a float tensor; a sum has none. Raises CalibrationError if any value is NaN or infinite."""
        if self.given or self.frozen or self.paused:
            return
        self._take(self.observers, value, self.items)

    def update_scale(self) -> None:
        """Set the scale from new observations; it is unchanged if there are none, or if it is constant or frozen."""
        if self.observer is not None and self.observer.observed and not self.frozen and (self.pending or not self.calibrated):
            self._choose()
        if self.range is not None:
            self.batches_used.copy_(self.range.count)

    def chooser(self, observer: Observer) -> Observer:
        """Return an observer configured for this tensor: as a model output, by the calibration method, and with the functions in `read`."""
        chosen = observer.of_output() if self.is_output else observer.by(self.chosen_by)
        return chosen.read_by(self.read) if self.read else chosen

    def _choose(self) -> None:
        assert self.observer is not None
        observer = self.chooser(self.observer)
        if self.dtype.affine:
            self._cover(*observer.interval(self.dtype))
        else:
            self.assign(self.scale_by(observer, self.dtype))

    @property
    def can_choose(self) -> bool:
        """Whether calibration may replace the range with the least error: the observer is the default one, and the scale is not frozen."""
        return type(self.observer) is HistogramObserver and self.observer.observed and not self.frozen

    @torch.no_grad()
    def choose_by(self, method: Method) -> None:
        """Choose the scale from the observations by this method, if it was another one."""
        if method is not self.chosen_by:
            self.chosen_by = method
            self._choose()

    @torch.no_grad()
    def narrow(self, factor: float) -> None:
        """Multiply the calibrated range by a factor, until the next calibration."""
        if self.dtype.affine:
            self._cover(*(self.ends * factor))
        else:
            self.assign(self._rounded(self.base_scale * factor))

    def scale_by(self, observer: Observer, dtype: IntType) -> Tensor:
        """Return the scale that an observer finds for a symmetric dtype. The range ends on a step if many values lie at its end."""
        if self.power_of_two:
            return observer.scale_before_rounding(dtype) * self.headroom
        return on_step(observer.scale(dtype) * self.headroom, dtype, self.observers)

    def affine_grid(self, low: Tensor, high: Tensor, dtype: IntType) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of an affine dtype for an interval, float32. An end at which many values lie is on a step."""
        return grids.grid_from_range(low, high, dtype, self._many_at_ends(dtype))

    def _many_at_ends(self, dtype: IntType) -> tuple[bool, bool]:
        """Return whether many values lie at the ends of what was calibrated, as the histograms among the observers know."""
        counts = [each.count for each in self.observers if isinstance(each, HistogramObserver)]
        return self._many.get(lambda: many_at_ends(self.observers, dtype), *counts)

    def covered(self) -> tuple[Tensor, Tensor]:
        """Return the calibrated range (low, high) from the observations, regardless of later changes of the scale."""
        assert self.observer is not None
        observer = self.chooser(self.observer)
        if self.dtype.affine:
            return observer.interval(self.dtype)
        threshold = self._rounded(self.scale_by(observer, self.dtype)) * self.dtype.high
        return -threshold, threshold

    @torch.no_grad()
    def _cover(self, low: Tensor, high: Tensor) -> None:
        """Set the interval that the integers of an affine dtype stand for."""
        scale, zero_point = self.affine_grid(low, high, self.dtype)
        self.ends.copy_(torch.stack((low, high)))
        self.assign(scale, zero_point)

    @property
    def can_follow_ends(self) -> bool:
        """Whether `follow` needs only the smallest and the largest value of a batch."""
        observe = None if self.range is None else type(self.range).observe
        return self.calibrated and observe in (MinMaxObserver.observe, MovingAverageMinMaxObserver.observe)

    @torch.no_grad()
    def follow(self, value: Tensor) -> None:
        """Take in one batch, a float tensor, in state TRAIN. Raises CalibrationError if any value is NaN or infinite.

        "statistics" multiply the scale by the factor by which the largest magnitude of the range changes, so that a threshold keeps its
        ratio to the largest value; on an affine grid each end of the interval, by the factor of that end of the range. A scale that no
        calibration has set is set by this batch.
        """
        if self.range is None or not self.follows_training:
            return
        if self.waiting is not None:
            self.waiting.append(torch.stack(torch.aminmax(value)) if self.can_follow_ends else value.detach().flatten())
        elif not self.calibrated:
            self.observe(value)
            self.update_scale()
        elif self._starts_anew:
            self._cover_batch(value)
        elif self.mode == STATISTICS and not self._follow_in_numbers(value, self.range):
            before, ends_before = self.range.largest, self.range.ends
            self._take([self.range], value)
            if self.dtype.affine:
                ends, covered = self.range.ends, self.ends
                moved = torch.where(stays(covered, ends_before, ends), covered, covered * (ends / ends_before))
                self._cover(*torch.where(ends_before != 0, moved, ends))
            else:
                largest = self.range.largest
                moved = (self.base_scale * (largest / before)).clamp_min(SMALLEST_SCALE)
                moved = torch.where(stays(self.base_scale.double() * self.dtype.high, before, largest), self.base_scale, moved)
                self.base_scale.copy_(torch.where(before > 0, moved, self.range.scale(self.dtype) * self.headroom))
            self.batches_used.copy_(self.range.count)

    def _follow_in_numbers(self, value: Tensor, range: MinMaxObserver) -> bool:
        """Take in one batch by Python numbers, with the same bits as tensors; return False, and change nothing, where they do not do."""
        moved = ranges.moved_range(value, range) if in_numbers(self.base_scale) else None
        if moved is None:
            return False
        if self.dtype.affine:
            with_zero = ((min(least, 0.0), max(most, 0.0)) for least, most in moved)
            threes = zip(self.ends.tolist(), *with_zero, strict=True)
            low, high = (each[0] if each[1] and stays(*each) else _moved(*each) for each in threes)
            step, zero_point = grids.grid_of_numbers(low, high, self.dtype, self._many_at_ends(self.dtype))
        else:
            step, start, end = float(self.base_scale), *(max(map(abs, each)) for each in moved)
            step = step if stays(step * self.dtype.high, start, end) else max(_moved(step, start, end), SMALLEST_SCALE)
        if not math.isfinite(step):
            return False
        if self.dtype.affine:
            self.ends.copy_(torch.tensor((low, high), dtype=torch.float32, device="cpu"))
            self.zero_point.fill_(zero_point)
        for buffer, number in zip((range.low, range.high, self.base_scale), (*moved[1], step), strict=True):
            buffer.fill_(number)
        self.batches_used.copy_(range.count.add_(1))
        return True

    def _cover_batch(self, value: Tensor) -> None:
        """Cover this batch, and the average of the batches, of a tensor that was 0 from the first on that was not.

        A tensor that starts at 0 grows manyfold within a few steps. A range that averaged the zeros would stop its gradients.
        """
        assert self.range is not None
        assert self.observer is not None
        batch = self.observer.range_observer()
        batch.to(self.base_scale.device)
        self._take([batch], value)
        if bool(self.range.largest == 0):
            self.range.reset()
        self.range.observe(value)
        own = self.range.ends
        low, high = torch.minimum(own[0], batch.ends[0]), torch.maximum(own[1], batch.ends[1])
        if self.dtype.affine:
            self._cover(low, high)
        else:
            self.assign(scale_from_range(low, high, self.dtype) * self.headroom)
        self.batches_used.copy_(self.range.count)

    def _take(self, observers: list[Observer], value: Tensor, items: bool = False) -> None:
        """Let these observers take in a float tensor. Raises CalibrationError if any value is NaN or infinite."""
        try:
            observe_together(observers, value, items)
        except ValueError as error:
            what = f"the values of %{self.name} cannot be observed"
            because = f"{error}; a scale computed from them would be meaningless"
            remedy = "look at the batch and at the layers before this one; what was observed earlier is kept"
            if "infinite" in str(error):
                remedy += ". Where forward writes -inf itself, as a masked_fill in front of an exp: write a number whose exp is 0, as -20"
            raise CalibrationError(what, at=self.source, module=self.module_path, because=because, remedy=remedy) from None

    def set_scale(self, scale: float, zero_point: int | None = None) -> None:
        """Fix the scale at `scale`, and the zero point at `zero_point` (None: at its current value); they follow nothing any more."""
        self.assign(torch.full_like(self.base_scale, scale), zero_point)
        self.stop()

    def freeze(self) -> None:
        """Fix the scale at its current value."""
        if not self.frozen:
            self.assign(self.scale)
            self.stop()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state_dict: convert a learned zero point for another method, and keep observations if its scale is stopped."""
        saved, stopped = method_of(state_dict, prefix), bool(state_dict.get(prefix + "stopped", False))
        if self.dtype.affine and saved is not None and saved.moves_end and self.method != saved and not stopped:
            base, values = state_dict[prefix + "base_scale"], tuple(state_dict[prefix + name] for name in saved.parameters)
            end, scale = saved.end(base, -state_dict[prefix + "zero_point"] * base, values), saved.scale(base, values, self.reach)
            state_dict[prefix + "zero_point"] = torch.tensor(
                self._zero_point_at(end, self._rounded(scale)), device=base.device, dtype=torch.int64
            )
        if self.dtype.affine and self.given and not bool(state_dict.get(prefix + "stopped", True)):
            for name in ("zero_point", "ends"):  # as the scale that was given here stays
                state_dict[prefix + name] = getattr(self, name).clone()
        if stopped:
            for name, value in self.state_dict(prefix=prefix).items():
                if name.startswith((prefix + "observer.", prefix + "range.", prefix + "others.")):
                    state_dict.setdefault(name, value)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def require(self) -> None:
        """Raise NotCalibrated if the scale is unknown, and NotFinite if training has made it NaN or infinite."""
        if self.method is not None and self.calibrated and not bool(torch.isfinite(self.current())):
            what = f"the scale of %{self.name} is {float(self.current())}"
            because = f"it is learned, and training has made its parameter `{next(iter(self.trained))}` NaN or infinite"
            remedy = "load the last checkpoint whose parameters are finite; then lower the learning rate or clip gradients"
            raise NotFinite(what, at=self.source, module=self.module_path, because=because, remedy=remedy)
        if not self.calibrated:
            because = "its calibration has not ended" if self.pending else "no calibration batch has passed through it"
            remedy = "run fxq.calibrate(prepared, batches) first, or set its scale with fxq.set_qparams"
            raise NotCalibrated(f"%{self.name} has no scale yet", at=self.source, module=self.module_path, because=because, remedy=remedy)

    def extra_repr(self) -> str:
        zero_point = f", zero_point={self.grid.zero_point}" if self.dtype.affine else ""
        mode = "fixed" if self.observer is None or self.frozen else self.mode
        return f"{self.dtype}, scale={self.scale.item():.6g}{zero_point}, {mode}"


def _moved(own: float, before: float, after: float) -> float:
    """Return a number times after / before, each rounded to float32; `after` itself where the range had nothing on that side."""
    return float32(own * float32(after / before)) if before else after
