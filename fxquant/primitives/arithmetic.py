"""How a target rescales integers: an arithmetic is one class, and the targets that use it are rows of data.

The two arithmetics here are specified in backends/bpu/ARITHMETIC.md, sections 8 to 11. A third one is another class, which defines
the primitives that it composes, and how.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fxquant.numerics.grids import FixedWidths, Grid, IntType, Ratio, bias_integers, power_of_two, real_multiplier, round_away
from fxquant.primitives.elementwise import align_fixed, align_real
from fxquant.primitives.quantization import TIES, requantize_fixed, requantize_real

Function = Callable[..., Tensor]
# The kinds of an accumulator, for `Arithmetic.requantize`.
LAYER, WIDE_LAYER, MATRIX, SUM, PRODUCT, VALUE = "layer", "layer of 16 bits", "matrix", "sum", "product", "value"
LAYERS = (LAYER, WIDE_LAYER)
READ_ONCE = "read once"  # of operands: those that nothing else reads, whose elements are then rounded once instead of twice
LARGEST_BIAS = 2**30  # of a layer's integers, half a step of its output included


class Composer(Protocol):
    """An object that composes primitives: a `Lowering`, which calls them or records their calls in a graph."""

    def call(self, primitive: Function, *arguments: Any) -> Any:
        """Apply a primitive."""

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Any:
        """Return a parameter of the operator as an operand of primitives; stored with `dtype` when deployed."""

    def offset(self, grid: Grid) -> tuple[int, ...]:
        """Return the zero point of `grid` as a further argument of a primitive, (zero_point,), or () if the primitive adds none."""


@dataclass(frozen=True)
class ShiftedSums:
    """Sums of two tensors whose larger scale is shifted left and whose other one is multiplied: x · 2^n + e · E.

    n is the exponent of the ratio's 15-bit mantissa, limited by `largest`, or by `largest_wide` where x has 16 bits; or always `fixed`.
    """

    largest: int = 23
    largest_wide: int = 15
    fixed: int | None = None


@dataclass(frozen=True)
class Arithmetic:
    """The integer arithmetic of a family of targets, as data: a difference found on hardware changes a field, not the code."""

    name: str
    power_of_two_scales: bool = False  # of activations
    power_of_two_weights: bool = False
    share_concat: bool | str = False  # concat's operands share its scale, instead of being requantized: all, or those of READ_ONCE
    add_fraction_bits: int = 14  # the common scale of an addition is 2^-14 of the larger one
    resize_fraction_bits: int = 16
    resize_positions: bool = False  # whether linear resizing steps through positions with that many fractional bits; weights have 8
    resize_floors: bool = False  # whether it rounds down along each dimension, the last one first, instead of once to the nearest
    residual: str = "accumulator"  # what is added to a layer: to its sum of products, or, "requantize", to its requantized 8 bits
    residual_bits: int = 0  # of the multiplier of a residual in the accumulator, before a right shift; 0: an integer multiplier, no shift
    # Below this integer multiplier, rounding it costs more than half a step of the largest residual of 8 bits: it is added apart.
    smallest_residual_multiplier: int = 256
    shifted_sums: ShiftedSums | None = None  # how two tensors are added; None: on the common scale of `add_fraction_bits`
    multiplies_by_layers: bool = False  # whether a number multiplies as a layer with one weight, and an average pooling is one
    slope_bits: int = 0  # of slopes below zero, on the operand's grid; 0: a leaky relu is a table, and a prelu multiplies by 16 bits
    rescales_by_layers: bool = False  # whether a tensor is brought to another scale as a layer with the weight 1
    rounds_image_means: bool = False  # whether the first shift of a mean over height and width rounds half up, instead of down
    smallest_at_larger_scale: bool = False  # whether the smaller of two tensors is found on the larger of their scales, not on its own
    leaves_out_clamps: bool = False  # whether a clamp to ±127 steps or more is, and the upper limit of a layer that ends at 0
    float32_tables: bool = False  # whether a table's entries are float32 quotients, rounded half away from zero
    segments: bool = False  # whether the table of a 16-bit operand has the integers of six small tables between two straight lines
    # Whether the step of a product is the float32 product of two scales, rounded, instead of the exact one, and the scale s of a weight is
    # f32(f32(127 · s) / 127): the compiler reads the threshold 127 · s.
    float32_steps: bool = False

    primitives: ClassVar[frozenset[Function]] = frozenset()  # with which it requantizes and aligns
    multiplies_by: ClassVar[str] = ""  # what brings an accumulator to a scale, in words
    adds_zero_points: ClassVar[bool] = False  # whether it requantizes to affine grids

    @property
    def adds_in_output_steps(self) -> bool:
        """Whether a sum of 8-bit tensors is formed in fractions of a step of its result, and not of its largest term's."""
        return False

    @property
    def rounds_by_adding(self) -> bool:
        """Whether a constant and a floor make its last rounding, as the passes of `sweeps` do; ties by sign or parity have none."""
        return True

    @property
    def half_step_in_bias(self) -> bool:
        """Whether the bias of a layer with weights holds half a step of the output, and its requantization rounds down."""
        return False

    def step(self, scale: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        """Return the factors, float32, whose product is the step of a product of integers on two scales."""
        return (scale * other,) if self.float32_steps else (scale, other)

    def bias(self, bias: Tensor, scale: Tensor, other: Tensor) -> Tensor:
        """Return the integers of a bias, float64 of its shape, in steps of the product of an operand's and a weight's scale."""
        return bias_integers(bias, scale, other)

    def layer_bias(self, bias: Tensor, step: Tensor, scale: Tensor, transposed: bool = False) -> Tensor:
        """Return the integers that a layer, or a transposed convolution, stores as its bias, float64.

        Where `half_step_in_bias`, they include half a step of an output on `scale`, in steps of the sum.
        """
        return bias

    def half_of_first_shift(self, ratio: Ratio, grid: Grid) -> Tensor:
        """Return the constant, float64, to add to an accumulator so that the first shift of its requantization rounds half up."""
        return torch.zeros((), dtype=torch.float64, device=grid.scale.device)

    def negated(self, ratio: Ratio, grid: Grid) -> Tensor:
        """Return the constant, float64, to add to a negated sum so that it is requantized as the sum with a negative multiplier."""
        return torch.zeros((), dtype=torch.float64, device=grid.scale.device)

    def requantize(
        self, composer: Composer, value: Any, ratio: Ratio, low: int, high: int, to: Grid, role: str = "", bits: int = 32, kind: str = VALUE
    ) -> Any:
        """Requantize an accumulator of `bits` bits by `ratio` to integers on the grid `to`, centred ones limited to [low, high].

        `role` is the prefix of the constants' names. `kind` is the kind of the accumulator: LAYER, WIDE_LAYER (an operand of 16 bits),
        MATRIX (a product of two activations), SUM, PRODUCT, or any other VALUE.
        """
        raise NotImplementedError

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        """Rescale integers of `dtype` by `ratio` to an accumulator on a finer scale; `wide` says that it can reach 2^24."""
        raise NotImplementedError

    def refuses(self, primitive: Function, arguments: Mapping[str, Any], storage: torch.dtype) -> str | None:
        """Return why this arithmetic never makes a call with these constants and a result stored in `storage`; None if it may."""
        if primitive in _rescaling() and primitive not in self.primitives:
            return f"its target requantizes by {self.multiplies_by}"
        return None


def _rescaling(kind: type[Arithmetic] = Arithmetic) -> set[Function]:
    """Return the primitives that belong to some arithmetic; every target may use all others."""
    return set(kind.primitives).union(*map(_rescaling, kind.__subclasses__()))


def _without_last_bits(value: Tensor, bits: int) -> Tensor:
    """Round integers, float64, towards zero to this many significant bits; the bits below are 0."""
    shifts = torch.zeros_like(value, dtype=torch.int64)
    for shift in range(1, 32 - bits + 1):
        below = torch.floor(value * 2.0 ** -(shift - 1))
        shifts = torch.where((below > 2 ** (bits - 1) - 1) | (below < -(2 ** (bits - 1))), shift, shifts)
    return torch.trunc(value * power_of_two(-shifts)) * power_of_two(shifts)


@dataclass(frozen=True)
class FixedArithmetic(Arithmetic):
    """The *fixed* arithmetic: a shift, a product with an integer, a shift."""

    final_rounding: str = "half_up"  # or another of `requantize_fixed`
    roundings: Mapping[str, str] = field(default_factory=dict)  # of kinds that differ; a LAYER that rounds down has half a step in its bias
    bias_bits: int = 32  # a bias of more bits gives up its last ones, towards zero
    transposed_bias_bits: int = 32  # the same for transposed convolutions
    widths: Mapping[str, FixedWidths] = field(default_factory=dict)  # by name of the output dtype

    largest_of_two: int | None = None  # the largest multiplier of a sum or product of two tensors; of 16 bits, a power of two has it too

    primitives = frozenset((requantize_fixed, align_fixed))
    multiplies_by = "a 15-bit multiplier and shifts"

    @property
    def rounds_by_adding(self) -> bool:
        return not {self.final_rounding, *self.roundings.values()}.intersection(TIES)

    @property
    def half_step_in_bias(self) -> bool:
        return self.roundings.get(LAYER) == "floor"

    def bias(self, bias: Tensor, scale: Tensor, other: Tensor) -> Tensor:
        if not self.float32_steps:
            return super().bias(bias, scale, other)
        return round_away(bias.double() / (scale * other).double())

    def layer_bias(self, bias: Tensor, step: Tensor, scale: Tensor, transposed: bool = False) -> Tensor:
        half = round_away(scale.double() / (2 * step.double()))
        whole = (bias + half).clamp(1 - LARGEST_BIAS, LARGEST_BIAS - 1)
        bits = self.transposed_bias_bits if transposed else self.bias_bits
        return whole if bits >= 32 else _without_last_bits(whole, bits)

    def half_of_first_shift(self, ratio: Ratio, grid: Grid) -> Tensor:
        return torch.floor(power_of_two(self._first_shift(ratio, grid)) / 2)

    def negated(self, ratio: Ratio, grid: Grid) -> Tensor:
        return power_of_two(self._first_shift(ratio, grid)) - 1  # ⌊-acc / 2^shift⌋ is a step less than -⌊acc / 2^shift⌋ if bits are lost

    def _first_shift(self, ratio: Ratio, grid: Grid) -> Tensor:
        return self.widths[grid.type.name].constants(ratio, grid.type, 32, False).shift

    def requantize(
        self, composer: Composer, value: Any, ratio: Ratio, low: int, high: int, to: Grid, role: str = "", bits: int = 32, kind: str = VALUE
    ) -> Any:
        widths = self.widths[to.type.name]
        fixed = widths.constants(ratio, to.type, bits, kind in (*LAYERS, MATRIX), kind == WIDE_LAYER)
        if kind in (SUM, PRODUCT) and self.largest_of_two is not None:
            if to.type.bits > 8:
                doubles = (ratio.mantissa(31)[0] == 2**30).to(fixed.multiplier).int()  # 2^14 becomes 2^15
                fixed = replace(fixed, multiplier=fixed.multiplier << doubles, right_shift=fixed.right_shift + doubles)
            fixed = replace(fixed, multiplier=fixed.multiplier.clamp_max(self.largest_of_two))
        constants = [composer.constant(role + name, number, torch.int32) for name, number in vars(fixed).items()]
        rounding = self.roundings.get(LAYER if kind in LAYERS else kind, self.final_rounding)
        rest = widths.intermediate_bits, rounding, low, high, to.type.storage
        return composer.call(requantize_fixed, value, *constants, *rest)

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        multiplier, shift = self.widths[dtype.name].aligning(ratio)
        numbers = ("_multiplier", multiplier), ("_right_shift", shift)
        constants = [composer.constant(role + name, number, torch.int32) for name, number in numbers]
        return composer.call(align_fixed, value, *constants, wide)

    def refuses(self, primitive: Function, arguments: Mapping[str, Any], storage: torch.dtype) -> str | None:
        if primitive is not requantize_fixed:
            return super().refuses(primitive, arguments, storage)
        widths = self.widths["int16" if storage == torch.int16 else "int8"]
        roundings = {self.final_rounding, *self.roundings.values()}
        if arguments["rounding"] not in roundings or arguments["intermediate_bits"] != widths.intermediate_bits:
            return "it is not requantized as its target does"
        limits = ("shift", 0, 47), ("multiplier", 0, 2**widths.multiplier_bits - 1), ("right_shift", 1, widths.last_shift)
        for name, least, most in limits:
            if bool(((arguments[name] < least) | (arguments[name] > most)).any()):
                return f"its {name.replace('_', ' ')} is not in {least}…{most}"
        return None


@dataclass(frozen=True)
class RealArithmetic(Arithmetic):
    """The *real* arithmetic: one product with a float32 number, rounded half to even."""

    primitives = frozenset((requantize_real, align_real))
    multiplies_by = "a float32 multiplier"
    adds_zero_points = True

    @property
    def adds_in_output_steps(self) -> bool:
        return self.residual == "requantize"

    def requantize(
        self, composer: Composer, value: Any, ratio: Ratio, low: int, high: int, to: Grid, role: str = "", bits: int = 32, kind: str = VALUE
    ) -> Any:
        multiplier = composer.constant(role + "multiplier", real_multiplier(ratio), torch.float32)
        return composer.call(requantize_real, value, multiplier, low, high, to.type.storage, *composer.offset(to))

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        return composer.call(align_real, value, composer.constant(role + "_multiplier", real_multiplier(ratio), torch.float32), wide)
