"""Other ways in which a chip may compute: changes of a target's arithmetic, each with a name in words.

A variant is data, the difference in words and a target: the integer model is converted again for that target, so nothing is computed here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fxquant import backends
from fxquant.numerics.grids import FixedWidths, MeasuredWidths
from fxquant.primitives.arithmetic import LAYER, MATRIX, PRODUCT, SUM, VALUE, Arithmetic, FixedArithmetic, ShiftedSums
from fxquant.target import Target

# The difference in words, and the change of an arithmetic: those of roundings and widths are changes of a FixedArithmetic.
Change = tuple[str, Callable[[Any], Arithmetic]]

KINDS = {LAYER: "layers", MATRIX: "matrix products", SUM: "sums", PRODUCT: "products", VALUE: "other tensors"}
ROUNDINGS = {
    "floor": "rounded down",
    "half_up": "halves rounded up",
    "half_away": "halves rounded away from zero",
    "half_even": "halves rounded to even",
    "half_step": "rounded down, half a step added before the shifts",
    "nearest_half_step": "rounded down, the nearest half a step added before the shifts",
}
# For an arithmetic with these attributes; a missing attribute, or one with this value already, does not make a variant.
WIDTHS: tuple[tuple[str, Mapping[str, int]], ...] = (
    *((f"multipliers of {bits} bits", {"multiplier_bits": bits}) for bits in (13, 14)),
    ("32 bits after the first shift", {"intermediate_bits": 32}),
    ("32 bits after the first shift, multipliers of 21 bits", {"intermediate_bits": 32, "multiplier_bits": 21}),
    *((f"last shifts of at most {bits} bits", {"largest_shift": bits, "layer_shift": bits}) for bits in (21, 22, 23)),
)
FIELDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("multiplies_by_layers", "average pools and products with a number are {}layers", (False, True)),
    ("rescales_by_layers", "changes of scale are {}layers", (False, True)),
    ("smallest_at_larger_scale", "the smaller of two tensors is {}found on the larger scale", (False, True)),
    ("leaves_out_clamps", "clamps at the ends of a range are {}left out", (False, True)),
    ("float32_tables", "tables are {}quotients of float32, rounded half away from zero", (False, True)),
    ("float32_steps", "steps of sums are {}rounded to float32", (False, True)),
    ("resize_positions", "linear resizing {}steps through positions of so many fractional bits", (False, True)),
    ("resize_floors", "linear resizing is {}rounded down along each dimension", (False, True)),
    ("resize_fraction_bits", "linear resizing with {} fractional bits", (8, 16)),
    ("residual_bits", "residuals with multipliers of {} bits", (0, 15)),
    ("smallest_residual_multiplier", "residuals added apart below a multiplier of {}", (1, 256)),
    ("residual", "residuals added by way of: {}", ("accumulator", "requantize")),
    ("slope_bits", "slopes of {} bits", (0, 7)),
    ("bias_bits", "biases of {} bits", (16, 32)),
    ("transposed_bias_bits", "biases of transposed convolutions of {} bits", (16, 32)),
    ("rounds_image_means", "first shifts of means over images {}round half up", (False, True)),
    ("add_fraction_bits", "sums in fractions of {} bits", (12, 14, 16)),
    ("shifted_sums", "sums: {}", (None, ShiftedSums(), ShiftedSums(largest=15), ShiftedSums(fixed=6))),
)


class PlainFloor(FixedArithmetic):
    """Layers are rounded down, without half a step in the bias."""

    half_step_in_bias = False


def variants_of(target: Target) -> list[tuple[str, Target]]:
    """Return the target with each other arithmetic that differs from its own, and from each other; the difference in words before it."""
    variants: list[tuple[str, Target]] = []
    arithmetics = [target.arithmetic]
    widths: list[Change] = [(name, partial(_width, changed=changed)) for name, changed in WIDTHS]
    widths.append(("the smallest first shift that covers the output's range", _smallest_first_shift))
    fixed = (*_roundings(), *widths) if isinstance(target.arithmetic, FixedArithmetic) else ()
    for name, change in (*fixed, *_fields(), *_others(target)):
        changed = change(target.arithmetic)
        if changed not in arithmetics:
            arithmetics.append(changed)
            variants.append((name, replace(target, arithmetic=changed)))
    return variants


def _roundings() -> Iterator[Change]:
    for kind, words in KINDS.items():
        for rounding, how in ROUNDINGS.items():
            yield f"{words}: {how}", partial(_rounding, changed={kind: rounding})
    for rounding, how in ROUNDINGS.items():
        if rounding != "floor":
            yield f"everything: {how}", partial(_rounding, changed=dict.fromkeys(KINDS, rounding))
    plain = "layers: rounded down, without half a step in the bias"
    yield plain, lambda old: PlainFloor(**{**vars(old), "roundings": {**_spelt_out(old), LAYER: "floor"}})


def _rounding(old: FixedArithmetic, changed: Mapping[str, str]) -> Arithmetic:
    return replace(old, roundings={**_spelt_out(old), **changed})


def _spelt_out(old: FixedArithmetic) -> dict[str, str]:
    return {kind: old.roundings.get(kind, old.final_rounding) for kind in KINDS}


def _width(old: FixedArithmetic, changed: Mapping[str, int]) -> Arithmetic:
    widths = {}
    for dtype, each in old.widths.items():
        changes: dict[str, Any] = {name: value for name, value in changed.items() if hasattr(each, name)}
        widths[dtype] = replace(each, **changes)
    return replace(old, widths=widths)


def _smallest_first_shift(old: FixedArithmetic) -> Arithmetic:
    plain = {
        dtype: FixedWidths(widths.intermediate_bits, widths.multiplier_bits, first_shift=True)
        for dtype, widths in old.widths.items()
        if isinstance(widths, MeasuredWidths)
    }
    return replace(old, widths={**old.widths, **plain})


def _fields() -> Iterator[Change]:
    for name, words, values in FIELDS:
        for value in values:
            shown = ("" if value else "not ") if isinstance(value, bool) else _said(value)
            yield words.format(shown), partial(replace, **{name: value})


def _said(value: Any) -> str:
    if value is None:
        return "both operands on a common finer scale"
    if not isinstance(value, ShiftedSums):
        return str(value)
    return f"the larger scale shifted by {'at most ' + str(value.largest) if value.fixed is None else value.fixed} bits"


def _others(target: Target) -> Iterator[Change]:
    """Yield the whole arithmetic of other targets with the same class."""
    for other in backends.TARGETS.values():
        same_class = type(other.arithmetic) is type(target.arithmetic)
        if same_class and other.arithmetic.power_of_two_scales == target.arithmetic.power_of_two_scales:
            yield f"the arithmetic of {other.name}", partial(lambda chosen, _: chosen, other.arithmetic)
