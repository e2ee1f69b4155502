"""How a target brings one scale to another: an arithmetic is one class, and the targets that use it are rows of data.

The two here are specified in backends/bpu/ARITHMETIC.md, sections 8 to 11. A third one is a class beside them: which primitives it
composes, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fxquant.numerics import Grid, IntType
from fxquant.primitives.elementwise import align_fixed, align_real
from fxquant.primitives.requantize import requantize_fixed, requantize_real
from fxquant.rescaling import FixedWidths, Ratio, fixed_requantization, real_multiplier

Function = Callable[..., Tensor]


class Composer(Protocol):
    """What composes primitives: a `Lowering`, which computes with them or writes them down."""

    def call(self, primitive: Function, *arguments: Any) -> Any:
        """Apply a primitive."""

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Any:
        """A parameter of the operator as an operand of primitives; stored with `dtype` when deployed."""

    def offset(self, grid: Grid) -> tuple[int, ...]:
        """The zero point that a primitive adds to its result, as a further argument, where it adds one."""


@dataclass(frozen=True)
class Arithmetic:
    """How one family of targets computes. Its values are data: a difference from hardware changes a row, not the code."""

    name: str
    power_of_two_scales: bool = False  # of activations
    power_of_two_weights: bool = False
    share_concat: bool = False  # concat's operands share one scale, instead of being requantized
    add_fraction_bits: int = 14  # the common scale of an addition is 2^-14 of the larger one
    resize_fraction_bits: int = 16
    residual: str = "accumulator"  # what is added to a layer: to its sum of products, or, "requantize", to its requantized 8 bits

    primitives: ClassVar[frozenset[Function]] = frozenset()  # with which it requantizes and aligns
    multiplies_by: ClassVar[str] = ""  # what brings an accumulator to a scale, in words
    adds_zero_points: ClassVar[bool] = False  # whether it requantizes to affine grids

    @property
    def adds_in_output_steps(self) -> bool:
        """Whether a sum of 8-bit tensors is formed in fractions of a step of its result, and not of its largest term's."""
        return False

    def requantize(
        self,
        composer: Composer,
        accumulator: Any,
        ratio: Ratio,
        low: int,
        high: int,
        grid: Grid,
        role: str = "",
        accumulator_bits: int = 32,
    ) -> Any:
        """An accumulator of so many bits times `ratio`, as integers on a grid, whose centred ones are limited to [low, high].

        `role` begins the constants' names.
        """
        raise NotImplementedError

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        """Integers of `dtype` times `ratio`, as an accumulator on the finer scale that `ratio` leads to; `wide` beyond 2^24."""
        raise NotImplementedError

    def refuses(self, primitive: Function, arguments: Mapping[str, Any], storage: torch.dtype) -> str | None:
        """Why a call with these constants, whose result is stored in `storage`, is none that this arithmetic makes; None if it may be."""
        if primitive in _rescaling() and primitive not in self.primitives:
            return f"its target requantizes by {self.multiplies_by}"
        return None


def _rescaling() -> set[Function]:
    """The primitives that belong to some arithmetic; all others are any target's."""
    found: set[Function] = set()
    kinds = [Arithmetic]
    while kinds:
        kind = kinds.pop()
        found |= kind.primitives
        kinds += kind.__subclasses__()
    return found


@dataclass(frozen=True)
class FixedArithmetic(Arithmetic):
    """*fixed*: a shift, a product with whole numbers, a shift."""

    final_rounding: str = "half_up"  # or "floor", or "half_step": see `requantize_fixed`
    widths: Mapping[str, FixedWidths] = field(default_factory=dict)  # by name of the output dtype

    primitives = frozenset((requantize_fixed, align_fixed))
    multiplies_by = "a 15-bit multiplier and shifts"

    def requantize(
        self,
        composer: Composer,
        accumulator: Any,
        ratio: Ratio,
        low: int,
        high: int,
        grid: Grid,
        role: str = "",
        accumulator_bits: int = 32,
    ) -> Any:
        widths = self.widths[grid.type.name]
        fixed = fixed_requantization(ratio, widths, grid.type, accumulator_bits)
        constants = [
            composer.constant(role + name, value, torch.int32)
            for name, value in (("shift", fixed.shift), ("multiplier", fixed.multiplier), ("right_shift", fixed.right_shift))
        ]
        rest = widths.intermediate_bits, self.final_rounding, low, high, grid.type.storage
        return composer.call(requantize_fixed, accumulator, *constants, *rest)

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        multiplier, shift = ratio.mantissa(self.widths[dtype.name].multiplier_bits, largest_exponent=31)
        constants = (
            composer.constant(role + "_multiplier", multiplier, torch.int32),
            composer.constant(role + "_right_shift", shift, torch.int32),
        )
        return composer.call(align_fixed, value, *constants, wide)

    def refuses(self, primitive: Function, arguments: Mapping[str, Any], storage: torch.dtype) -> str | None:
        if primitive is not requantize_fixed:
            return super().refuses(primitive, arguments, storage)
        widths = self.widths["int16" if storage == torch.int16 else "int8"]
        if (arguments["rounding"], arguments["intermediate_bits"]) != (self.final_rounding, widths.intermediate_bits):
            return "it is not requantized as its target does"
        for name, least, most in (
            ("shift", 0, 47),
            ("multiplier", 0, 2**widths.multiplier_bits - 1),
            ("right_shift", 1, widths.largest_shift),
        ):
            if bool(((arguments[name] < least) | (arguments[name] > most)).any()):
                return f"its {name.replace('_', ' ')} is not in {least}…{most}"
        return None


@dataclass(frozen=True)
class RealArithmetic(Arithmetic):
    """*real*: one product with a float32 number, rounded half to even."""

    primitives = frozenset((requantize_real, align_real))
    multiplies_by = "a float32 multiplier"
    adds_zero_points = True

    @property
    def adds_in_output_steps(self) -> bool:
        return self.residual == "requantize"

    def requantize(
        self,
        composer: Composer,
        accumulator: Any,
        ratio: Ratio,
        low: int,
        high: int,
        grid: Grid,
        role: str = "",
        accumulator_bits: int = 32,
    ) -> Any:
        multiplier = composer.constant(role + "multiplier", real_multiplier(ratio), torch.float32)
        return composer.call(requantize_real, accumulator, multiplier, low, high, grid.type.storage, *composer.offset(grid))

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        return composer.call(align_real, value, composer.constant(role + "_multiplier", real_multiplier(ratio), torch.float32), wide)
