"""Describe the integer function of an operator once, for training and for deployment.

An operator's `lower` receives a `Lowering` and its arguments, with every quantized operand as a `Quantized`.
It composes primitives through the lowering. `EagerLowering` calls them on integer-valued float tensors, so that the prepared model
*computes* the integer function and trains through it; `FusedLowering` does so by fewer kernels. The pass `integer.lower` writes the
same calls into a graph. All use one function, so training, validation and the integer graph agree by construction.
The package's docstring names two more lowerings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from fxquant.errors import AccumulatorOverflow, NotFinite
from fxquant.ir.graph import Size
from fxquant.numerics import grids
from fxquant.numerics.grids import EVERYTHING, FLOAT32_EXACT, INT32, INT32_MAX, WEIGHT_INT8, Grid, IntType, Ratio, bits_of, clamp_bound
from fxquant.numerics.rounding import clamped, straight_through
from fxquant.primitives.accumulate import add_residual, add_residual_shifted
from fxquant.primitives.arithmetic import LAYER, LAYERS, VALUE, Arithmetic
from fxquant.primitives.elementwise import lookup, shift_right, widen
from fxquant.primitives.product import scale_channels, scale_channels_wide
from fxquant.primitives.quantization import accumulator_output, clamp_accumulator, quantize, requantize_real
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import BatchNorm, WeightQuantizer
from fxquant.training import fused_layers

# ---- how an accumulator becomes a quantized tensor -------------------------------------------------------------------
Found = TypeVar("Found")
Clamp = tuple[float | None, float | None]

Lift = Callable[[Tensor], Tensor]
"""What the bias of a layer becomes larger by for an output on a scale: half a step, in steps of the sum; float64, shaped to broadcast."""


class ResidualFactor(NamedTuple):
    """The factor of a residual that is added to an accumulator: per channel, shaped to broadcast."""

    multiplier: Any  # integers, with gradients while training
    right_shift: Any = None  # of the product, rounding down; None for none

    def value(self) -> Tensor:
        """Return the factor as a tensor; only for eager lowering."""
        factor: Tensor = self.multiplier
        return factor if self.right_shift is None else factor * grids.power_of_two(-self.right_shift)


@dataclass(frozen=True)
class Epilogue:
    """The requantization of an accumulator."""

    ratio: Ratio  # the scale of the accumulator
    clamp: Clamp | None = None  # the fused clamp, as a float interval, or None
    bound: float = 0  # the largest magnitude of the accumulator, if it may exceed 32 bits
    # The half step of the output that a layer's bias includes for rounding, as a function of the output's scale, or None.
    lift: Lift | None = None
    kind: str = VALUE  # the kind of the accumulator: VALUE, LAYER, …
    to: Quantizer | None = None  # the quantizer of the result; None for the operator's output
    role: str = ""  # the beginning of the names of its constants

    @property
    def accumulator_bits(self) -> int:
        """The bits that hold the accumulator."""
        return 32 if self.bound <= INT32_MAX else 48


class Place(TypedDict):
    """The user's line and module that an operator came from, as errors take them."""

    at: str
    module: str


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor during lowering: its integers, their grid, its shape, and its dequantized tensor if it has been computed.

    The integers are a tensor of centred ones, or the node of a graph that holds the stored ones; `Lowering.call` converts them to
    the form that a primitive takes.
    """

    value: Any
    grid: Grid
    shape: tuple[Size, ...]
    dequantized: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        return self.grid.scale

    @property
    def dtype(self) -> IntType:
        return self.grid.type

    def real(self) -> Tensor:
        """Return the dequantized tensor, with gradients; only for eager lowering. It equals the integer model's, byte for byte."""
        return self.grid.dequantize(self.value) if self.dequantized is None else self.dequantized

    def with_value(self, value: Any) -> "Quantized":
        """Return another value on the same grid (its shape is no longer that of the operand)."""
        return replace(self, value=value, dequantized=None)


def plainly(value: Any, shape: tuple[Size, ...]) -> Quantized:
    """Return booleans or integers as operators that move elements take them: a quantized tensor with scale 1."""
    return Quantized(value, Grid(INT32, torch.ones((), dtype=torch.float32, device="cpu")), shape)


class Lowering:
    """The composition of primitives for one operator. Subclasses implement `call` and `constant`."""

    def __init__(
        self, name: str, arithmetic: Arithmetic, output: Quantizer | None, intermediate: Quantizer | None, weight: WeightQuantizer
    ) -> None:
        self.name, self.arithmetic, self.weight = name, arithmetic, weight
        self._output, self.intermediate = output, intermediate
        self.training = False
        self.user_module: Any = None  # the user's module of the call, where it is one of the model's
        self.noise_module: Any = None  # the user's module that draws noise for the result in train mode
        self.shares = False  # whether the output is on the operand's scale
        self.observed_range = EVERYTHING  # beyond it, values of the output are observed as the nearer end
        self.observed_instead: Tensor | None = None  # the tensor that the output's scale follows in place of the result
        self.parameters: dict[str, Tensor | None] = {}  # what the operator's integers are made of, for errors
        self.live_batch_norm = False  # whether batch norms use, and move, statistics: in training alone
        self.accumulator_bits = 0  # of the largest accumulator so far

    count: Any = None  # the node of the number of elements by which constants are tables; see `primitives.varying`
    keeps_start = False  # whether a learned scale that has not started yet starts from the weight at hand
    lifts_late = False  # whether half a step is added where an accumulator is requantized, and not with the bias

    @property
    def output(self) -> Quantizer:
        """The quantizer of the result; an operator with a plain result (bool, int64) has none."""
        assert self._output is not None, f"the result of %{self.name} has no grid"
        return self._output

    @property
    def plain(self) -> bool:
        """Whether its result has no grid: it is a boolean or an integer tensor."""
        return self._output is None

    @property
    def device(self) -> torch.device:
        """The device of the operator's constants: the device of the output's scale, or the CPU if the output has no grid."""
        return torch.device("cpu") if self.plain else self.output.grid.scale.device

    def call(self, primitive: Callable[..., Tensor], *arguments: Any) -> Any:
        raise NotImplementedError

    def computed(self, value: Any) -> Any:
        """Return the tensor of a result of `call`, which a subclass may defer until it is read. Here: the value itself."""
        return value

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Any:
        """Return a parameter of the operator as an operand of primitives; stored with `dtype` when deployed."""
        raise NotImplementedError

    def size(self, value: Any, dim: int) -> Any:
        """Return the size of a value's dimension at run time: a number, or a node in a graph."""
        return self.computed(value).shape[dim]

    def times(self, size: Any, number: int) -> Any:
        """Return the product of a size and a number: a number, or a node in a graph."""
        return size * number

    def once(self, role: str, compute: Callable[[], Found]) -> Found:
        """Return what `compute` returns, a function of parameters and scales alone. Here: it is called each time."""
        return compute()

    def stored(self, value: Tensor, grid: Grid) -> Tensor:
        """Convert centred integers to the form in which this lowering stores tensors on a grid. Here: no conversion."""
        return value

    def offset(self, grid: Grid) -> tuple[int, ...]:
        """Return the zero point that a primitive adds to its result, as a further argument, where it adds one. Here: none."""
        return ()

    def describe(self, role: str, scale: Tensor, axis: int | None = None, zero_point: int | Tensor = 0, times: int | None = None) -> None:
        """Record the scale of a constant: one number for all, or one for each index of its dimension `axis` (negative).

        An empty `scale` is that of a constant without one: a mask, an index.

        `zero_point` is the integer that stands for 0, or a tensor of one for each index. `times`: the factor of held integers.
        """

    def holds(self, value: Any, grid: Grid) -> Any:
        """Return the value, recorded as a quantized tensor on a grid."""
        return value

    def note(self, key: str, value: object) -> None:
        """Record a fact about the lowering of this operator."""

    def result(self, exact: Callable[[], Any], real: Callable[[], Tensor], to: Quantizer | None = None) -> Quantized:
        """Return the operator's output: `exact()` returns its integers, `real()` its float values before quantization.

        `real` is observed, and gradients flow through it; it is not called when deploying.
        """
        to = to or self.output
        if to is self.intermediate:
            to.require()
        return Quantized(exact(), to.grid, ())

    @property
    def place(self) -> Place:
        """The user's line and module, as errors take them; both are empty for an operator whose output shares another's quantizer."""
        own = self._output is not None and self._output.name == self.name
        return {"at": self.output.source if own else "", "module": self.output.module_path if own else ""}

    def not_finite(self) -> NotFinite:
        """Return the error for integers that cannot be computed since a parameter, or a value computed from some, is NaN or infinite."""
        culprit = first_not_finite({**self.parameters, **self.weight.trained()})
        together = "its weight, bias and batch norm are finite, but their product is NaN or infinite"
        return cannot_be_integers(self.name, culprit or together, **self.place)

    def requantize(
        self, accumulator: Any, ratio: Ratio, clamp: Clamp | None = None, *, bound: float = 0, lift: Lift | None = None, kind: str = VALUE
    ) -> Quantized:
        """Requantize the accumulator, whose scale is `ratio`, to the output's scale, with the fused `clamp`, a float interval.

        If the output is int32, the accumulator itself is the output, with scale `ratio`. For `bound`, `kind` and `lift` see `Epilogue`.
        """
        return self.requantize_by(accumulator, Epilogue(ratio, clamp, bound, lift, kind))

    def requantize_by(self, accumulator: Any, end: Epilogue) -> Quantized:
        target = end.to or self.output
        late = end.lift if self.lifts_late else None
        if target.dtype == INT32:
            return self._keep(accumulator if late is None else accumulator.double() + late(accumulator.new_zeros(())), end)

        def exact() -> Any:
            limits = self.bounds(end.clamp, target, end.kind)
            lifted = accumulator if late is None else accumulator.double() + late(target.scale)
            ratio, bits = end.ratio.over(target.scale), end.accumulator_bits
            value = self.arithmetic.requantize(self, lifted, ratio, *limits, target.grid, end.role, bits, end.kind)
            return self.holds(self.as_table(value, target.grid) if self.ends_in_table(end.clamp, target, end.kind) else value, target.grid)

        def real() -> Tensor:
            return clamped(accumulator * end.ratio.approximate().to(accumulator.dtype), *(end.clamp or (None, None)))

        return self.result(exact, real, target)

    def requantize_in_steps(
        self, total: Callable[[], tuple[Any, Tensor]], real: Callable[[], Tensor], clamp: Clamp | None, scales: Sequence[Tensor]
    ) -> Quantized:
        """Requantize an accumulator, whose scale is the output's times a power of two, by one float32 product on every target.

        `total` returns the accumulator and that power; it is called when the output's scale is known. `real` returns the accumulator's
        float value, and `scales` are the scales of its operands.
        """

        def exact() -> Any:
            accumulator, step = total()
            low, high = self.bounds(clamp, self.output)
            factor, grid = self.constant("multiplier", step.float(), torch.float32), self.output.grid
            return self.holds(self.call(requantize_real, accumulator, factor, low, high, grid.type.storage, *self.offset(grid)), grid)

        return self.result(exact, real)

    def complete(
        self, accumulator: Any, end: Epilogue, bias: Tensor | None = None, residual: Quantized | None = None,
        multiplier: ResidualFactor | None = None, statistics: fused_layers.Collected | None = None,
    ) -> Quantized:  # fmt: skip
        """Requantize a layer's accumulator, plus its bias and the residual times its multiplier.

        Bias and multiplier are shaped to broadcast. `statistics` are those of the accumulator, if they have been computed.
        """
        accumulator = wide_enough(accumulator, end.bound)
        if bias is not None:
            accumulator = accumulator + bias.to(accumulator.dtype)
        if residual is not None and multiplier is not None:
            primitive = add_residual if multiplier.right_shift is None else add_residual_shifted
            factors = [factor for factor in multiplier if factor is not None]
            accumulator = self.call(primitive, accumulator, residual.value, *factors)
        return self.requantize_by(accumulator, end)

    def parts(self, input: Any, weight: Tensor, bias: Tensor | None) -> int:
        """Return the number of parts of the input channels with which all partial sums of the current operand stay below 2^24.

        Other operands may exceed it. Return 0 if there is no operand (a graph), or too many parts would be needed.
        """
        return 0

    def _keep(self, accumulator: Any, end: Epilogue) -> Quantized:
        """Return the accumulator as int32, with its step as the scale, rounded once to float32.

        One that may exceed 32 bits is brought to a scale 2^n larger, rounding half up, by the least n that fits.
        """
        bits, ratio, clamp, bound = 0, end.ratio, end.clamp, end.bound
        while math.floor(bound / 2**bits + 0.5) > INT32_MAX:
            bits += 1
        if bits:
            self.note("narrowed", f"its sum can have {bits_of(bound)} bits, so the 32-bit output leaves out the last {bits}")
            accumulator = self.call(shift_right, accumulator, bits)
            ratio = ratio.times(torch.tensor(2.0**bits, dtype=torch.float32, device=ratio.numerators[0].device))
        scale = grids.real_multiplier(ratio)
        if torch.is_grad_enabled() and (real := ratio.approximate()).requires_grad:
            scale = straight_through(real.float(), scale)
        value = self.call(accumulator_output, accumulator)
        if clamp is not None and clamp != (None, None):
            constants = []
            for role, limit, default in zip(("low", "high"), clamp, (INT32.low, INT32.high), strict=True):
                limits = [clamp_bound(limit, float(s), default, INT32) for s in scale.flatten()]
                ends = torch.tensor(limits, dtype=torch.float64, device=scale.device).reshape(scale.shape)
                constants.append(self.constant(role, ends, torch.int32))
            value = self.call(clamp_accumulator, value, *constants)
        return Quantized(value, Grid(INT32, scale), ())

    def look_up(
        self, input: Quantized, entries: Callable[..., Tensor], function: Callable[[Tensor], Tensor], tamed: Callable[[Tensor], Tensor]
    ) -> Quantized:
        """Compute a function of one tensor with a lookup table over its integers.

        `entries` returns the table's centred integers for the output's current grid, or only those at float64 centred integers.
        `function` is the float function, `tamed` the same without infinite values and slopes.
        """

        def exact() -> Any:
            to, first = self.output.grid, (input.grid.low,) if input.dtype.affine else ()
            table = self.constant("table", self.stored(entries(), to), to.type.storage)
            return self.call(lookup, input.value, table, *first)

        return self.result(exact, lambda: tamed(input.real()))

    def bounds(self, clamp: Clamp | None, to: Quantizer, kind: str = VALUE) -> tuple[int, int]:
        """Return the centred integers (low, high) that limit the output: the dtype's, narrowed by a float clamp: ⌊bound/scale + ½⌋.

        `kind` is the kind of the accumulator. If the target leaves out clamps, a layer whose clamp begins at 0 has only the upper limit.
        """
        grid = to.grid
        if clamp is None or clamp == (None, None):
            return grid.bounds
        scale = 1.0 if clamp in ((0, None), (0.0, None)) else float(grid.scale)
        low, high = clamp_bound(clamp[0], scale, grid.low, grid), clamp_bound(clamp[1], scale, grid.high, grid)
        if not self.arithmetic.leaves_out_clamps:
            return low, high
        if kind in LAYERS and clamp[0] == 0:
            return low, grid.high
        return grid.bounds if low <= -grid.high and high >= grid.high else (low, high)

    def ends_in_table(self, clamp: Clamp | None, to: Quantizer, kind: str = VALUE) -> bool:
        """Return whether a clamp that begins at 0 is a table of 16 bits on the chip: wherever no layer with weights has it."""
        return self.arithmetic.segments and to.dtype.bits == 16 and kind not in LAYERS and clamp is not None and clamp[0] == 0

    def as_table(self, value: Any, grid: Grid) -> Any:
        """Return integers on a grid, at least 0, as the chip's table has them: on a line whose slope, 1 / s · s, can be below 1."""
        slope = Ratio((1 / grid.scale * grid.scale,))
        return self.arithmetic.requantize(self, self.call(widen, value), slope, 0, grid.high, grid, "relu_", 16)

    def align(self, operand: Quantized, ratio: Ratio, role: str, wide: bool) -> Any:
        """Rescale the operand's integers by `ratio` to an accumulator on a finer scale; `wide` says that it can reach 2^24."""
        return self.arithmetic.align(self, operand.value, ratio, operand.dtype, role, wide)

    def quantize_constant(self, value: Tensor, role: str, wide: bool = False) -> Quantized:
        """Quantize a constant tensor with one scale, as a weight is, or to int16 if `wide`; its gradient passes straight through."""
        integers, grid = self.constant_integers(value, role, wide)
        self.describe(role, grid.scale)
        return Quantized(self.constant(role, integers, grid.type.storage), grid, tuple(value.shape))

    def constant_integers(self, value: Tensor, role: str, wide: bool) -> tuple[Tensor, Grid]:
        """Return the integers of a constant tensor and their grid, of 16 bits if `wide`, else a weight's."""
        if not value.is_floating_point():  # a mask, or integers: next to an activation they count as float values
            value = value.to(torch.float32)
        self.parameters[f"its constant {role!r}"] = value
        quantizer = WeightQuantizer(grids.WEIGHT_INT16) if wide else self.weight
        rounded = quantizer.integers(value.reshape(1, -1), by_threshold=self.arithmetic.float32_steps)  # the weight of one channel
        scale, dtype = rounded.scale.reshape(()), quantizer.dtype
        if not bool(torch.isfinite(scale)):
            raise self.not_finite()
        return rounded.integers.reshape(value.shape), Grid(dtype, scale)

    def multiplied(self, primitive: Callable[..., Tensor], value: Any, ratio: Ratio, *constants: Any) -> Any:
        """Return `call(primitive, value, *constants)`: integers times `ratio`, rounded in the constants but not in the gradient."""
        return self.call(primitive, value, *constants)

    def given(self, role: str, value: Any, dtype: torch.dtype) -> Any:
        """Return a mask or an index, which is not an operand, as an argument of primitives: a constant one is stored with `dtype`."""
        if not isinstance(value, Tensor):
            return value
        self.describe(role, torch.empty(0, device="cpu", dtype=torch.float32))
        return self.constant(role, value, dtype)

    def rescale(self, operand: Quantized, to: Quantizer, role: str) -> Any:
        """Return the operand's integers on the grid of `to`; the operand's own where the grids are equal."""
        grid = to.grid
        if operand.grid.equals(grid):
            return operand.value
        if self.arithmetic.rescales_by_layers:
            return self._rescale_by_layer(operand, to, role)
        ratio = Ratio((operand.scale,), (grid.scale,))
        return self.holds(self.arithmetic.requantize(self, operand.value, ratio, *grid.bounds, grid, role, operand.dtype.bits), grid)

    def _rescale_by_layer(self, operand: Quantized, to: Quantizer, role: str) -> Any:
        """Return the operand's integers times 127, half a step added, rounded down by the constants of a layer with the weight 1."""
        unit = torch.tensor(1.0, dtype=torch.float32, device=operand.scale.device) / WEIGHT_INT8.high
        steps = self.arithmetic.step(operand.scale, unit)
        half = self.arithmetic.layer_bias(torch.zeros((), dtype=torch.float64, device=unit.device), steps[0], to.grid.scale)
        largest = self.prove(half.abs() + float(WEIGHT_INT8.high * operand.grid.magnitude), "the sum")
        weight = self.constant(role + "weight", torch.full((1,), WEIGHT_INT8.high, dtype=torch.int8, device=unit.device), torch.int8)
        bias = self.constant(role + "bias", half.reshape(1), torch.int32)
        total = self.call(scale_channels if largest < FLOAT32_EXACT else scale_channels_wide, operand.value, weight, bias, 0)
        ratio = Ratio(steps, (to.grid.scale,))
        return self.holds(self.arithmetic.requantize(self, total, ratio, *to.grid.bounds, to.grid, role, kind=LAYER), to.grid)

    def quantize(self, input: Any) -> Quantized:
        grid = self.output.grid
        scale = self.constant("scale", grid.scale, torch.float32)
        return self.result(lambda: self.call(quantize, input, scale, *grid.bounds, grid.type.storage, *self.offset(grid)), lambda: input)

    def prove(self, bound: Tensor | float, what: str, limit: int = INT32_MAX) -> float:
        """Return the largest element of a bound on |accumulator|, one for each output channel or one number, and note its bits.

        Raises AccumulatorOverflow beyond the limit, and NotFinite if it is NaN or infinite.
        """
        bound = bound if isinstance(bound, Tensor) else torch.tensor(float(bound), dtype=torch.float64, device="cpu")
        largest = float(bound.max())
        if not math.isfinite(largest):
            raise self.not_finite()
        if largest > limit:
            channel = int(bound.flatten().argmax())
            what = f"{what} of output channel {channel} can reach {largest:.0f} in magnitude, and is exact up to {limit}"
            remedy = "use fewer inputs per output, a smaller bias, or keep this operator in float"
            unproved = f"the accumulator of %{self.name} cannot be proved to fit"
            raise AccumulatorOverflow(unproved, **self.place, because=what, remedy=remedy)
        self.accumulator_bits = max(self.accumulator_bits, bits_of(largest))
        self.note("accumulator_bits", self.accumulator_bits)
        return largest


def wide_enough(accumulator: Any, bound: float) -> Any:
    """Return the accumulator as float64, where it is a floating tensor whose bound requires that."""
    wide = bound >= FLOAT32_EXACT and isinstance(accumulator, Tensor) and accumulator.is_floating_point()
    return accumulator.double() if wide else accumulator


def limited(value: Tensor, interval: grids.Interval) -> Tensor:
    """Clamp the values to the interval."""
    return value if interval == EVERYTHING else value.clamp(*interval)


# ---- parameters that are not finite, and their names in errors -------------------------------------------------------
def first_not_finite(parameters: Mapping[str, Tensor | None]) -> str | None:
    """Return a text that names the first tensor with NaN or infinite values; None if all are finite. The keys are the names."""
    for name, value in parameters.items():
        if value is not None and value.is_floating_point() and not (bool(value.sum().isfinite()) or bool(value.isfinite().all())):
            return f"{name} holds {'NaN' if bool(torch.isnan(value).any()) else 'infinite values'}"
    return None


def named_parameters(weight: Tensor | None, bias: Tensor | None, batch_norm: BatchNorm | None) -> dict[str, Tensor | None]:
    """Return the parameters that the integers of a layer are computed from, by their descriptions in errors."""
    named = {"its weight": weight, "its bias": bias}
    if batch_norm is not None:
        for name in ("weight", "bias", "running_mean", "running_var"):
            named[f"the {name} of its batch norm"] = getattr(batch_norm, name)
    return named


def cannot_be_integers(name: str, because: str, at: str, module: str) -> NotFinite:
    """Return the error for parameters that are not finite."""
    remedy = "load the last checkpoint whose parameters are finite; if training made them so, lower the learning rate or clip gradients"
    return NotFinite(f"the parameters of %{name} cannot become integers", at=at, module=module, because=because, remedy=remedy)
