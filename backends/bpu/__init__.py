"""Horizon's BPU: the complete target of each march. The arithmetic is specified in ARITHMETIC.md."""

from dataclasses import replace
from typing import Any

from fxquant.backends.bpu.limits import BAYES, BERNOULLI2, FLOAT16, NASH, PEAKS
from fxquant.numerics.grids import FixedWidths, MeasuredWidths
from fxquant.primitives.arithmetic import LAYER, PRODUCT, READ_ONCE, SUM, FixedArithmetic, RealArithmetic, ShiftedSums
from fxquant.target import Limit, Target

_SHORT = FixedWidths(intermediate_bits=16, multiplier_bits=15, first_shift=True)
WIDTHS = {
    "int4": _SHORT,  # int4 is stored and computed as int8; only the range differs
    "int8": _SHORT,
    # 16 bits in between would leave half of the int16 codes unused, and a last shift of at most 31 would cost small ratios bits of M.
    "int16": FixedWidths(intermediate_bits=32, multiplier_bits=21, first_shift=False, largest_shift=47),
}
SHIFT = FixedArithmetic(
    "shift",
    final_rounding="half_step",
    widths=WIDTHS,
    power_of_two_scales=True,
    power_of_two_weights=True,
    share_concat=True,
    resize_fraction_bits=8,
)
MEASURED = {  # as the vendor's compiler of these marches computes: CHIP.md names the evidence, section by section
    "int4": _SHORT,
    "int8": MeasuredWidths(16, 15, True, largest_shift=22, layer_shift=23, largest_first_shift=15),
    "int16": MeasuredWidths(16, 15, True, largest_shift=14, layer_shift=14, largest_first_shift=31),
}
CHIP = FixedArithmetic(
    "fixed",
    widths=MEASURED,
    roundings={LAYER: "floor"},
    float32_steps=True,
    smallest_at_larger_scale=True,
    leaves_out_clamps=True,
    float32_tables=True,
    segments=True,
    largest_of_two=2**15 - 2,
    residual_bits=15,
    shifted_sums=ShiftedSums(),
    multiplies_by_layers=True,
    rounds_image_means=True,
    share_concat=READ_ONCE,
    transposed_bias_bits=16,
    resize_positions=True,
)
CHIP_8 = replace(
    CHIP,
    largest_of_two=None,
    roundings={LAYER: "floor", SUM: "floor", PRODUCT: "nearest_half_step"},
    bias_bits=16,
    residual_bits=0,
    smallest_residual_multiplier=1,  # the chip's sum of two tensors has 6 bits and rounds down, which costs more
    shifted_sums=ShiftedSums(fixed=6),
    slope_bits=7,
    rescales_by_layers=True,
    resize_fraction_bits=8,
    resize_floors=True,
)
REAL = RealArithmetic("real")
ACTIVATIONS = ("int4", "int8", "int32")
ACTIVATIONS_16 = ("int4", "int8", "int16", "int32")
WEIGHTS = ("int4", "int8")
WEIGHTS_16 = ("int4", "int8", "int16")


def _fixed(name: str, arithmetic: FixedArithmetic, dtypes: tuple[str, ...], limits: tuple[Limit, ...], *aliases: str) -> Target:
    words, row = f"BPU {name.capitalize()}: fixed-point requantization", {"limits": limits, "roofline": PEAKS[name], "aliases": aliases}
    return Target(name, words, arithmetic, dtypes, WEIGHTS, normalizes_items=False, compiler="hb_mapper", **row)  # type: ignore[arg-type]


def _nash(name: str, *aliases: str, float16: frozenset[str] = frozenset()) -> Target:
    row: dict[str, Any] = {"limits": NASH, "roofline": PEAKS[name], "aliases": aliases, "float16": float16, "compiler": "hb_compile"}
    return Target(name, f"BPU {name.capitalize()}: float32 requantization", REAL, ACTIVATIONS_16, WEIGHTS_16, **row)


def _consistent(target: Target, level: int) -> Target:
    """Return a march at a consistency level: at 1, activation scales are powers of two; at 2, weight scales are too.

    Both need a model that was trained or calibrated for that level. The published level 1 also makes resizing and means agree between
    training and device, which they do here at every level.
    """
    return replace(
        target,
        name=f"{target.name}-level{level}",
        description=f"{target.description}, {'power-of-two scales' if level == 2 else 'power-of-two scales of activations'}",
        arithmetic=replace(REAL, power_of_two_scales=True, power_of_two_weights=level == 2),
        aliases=tuple(f"{alias}-level{level}" for alias in target.aliases),
        consistency=level,
        compiler=None,
    )


NASH_E = _nash("nash-e", "j6e", "s100", "rdk-s100", "nash-e-level0")
NASH_M = _nash("nash-m", "j6m", "s100p", "rdk-s100p", "nash-m-level0")
SHIFTED = "BPU Bernoulli: power-of-two scales, requantization by shifting"

TARGETS = (
    Target("bernoulli", SHIFTED, SHIFT, ACTIVATIONS, WEIGHTS, aliases=("xj2",), roofline=PEAKS["bernoulli"]),
    _fixed("bernoulli2", CHIP_8, ACTIVATIONS, BERNOULLI2, "x3", "j3", "rdk-x3"),
    _fixed("bayes", CHIP, ACTIVATIONS_16, BAYES, "j5", "rdk-ultra"),
    _fixed("bayes-e", CHIP, ACTIVATIONS_16, BAYES, "x5", "rdk-x5"),
    NASH_E,
    NASH_M,
    _nash("nash-b", "j6b", "nash-b-lite", "nash-b-plus"),
    _nash("nash-p", "j6p", float16=FLOAT16),
    _nash("nash-h", "j6h", float16=FLOAT16),
    *(_consistent(target, level) for target in (NASH_E, NASH_M) for level in (1, 2)),
)
