"""Horizon's BPU, march by march: the whole target in one screen. The arithmetic is specified in ARITHMETIC.md."""

from fxquant.arithmetic import FixedArithmetic, RealArithmetic
from fxquant.backends.bpu.limits import limited
from fxquant.numerics import FixedWidths
from fxquant.target import Target

_SHORT = FixedWidths(intermediate_bits=16, multiplier_bits=15, first_shift=True)
WIDTHS = {
    "int4": _SHORT,  # int4 is stored and computed as int8; only the range differs
    "int8": _SHORT,
    # 16 bits in between would leave half of the int16 codes unused, and a last shift of at most 31 would cost small ratios bits of M.
    "int16": FixedWidths(intermediate_bits=32, multiplier_bits=21, first_shift=False, largest_shift=47),
}
SHIFT = FixedArithmetic(
    "shift",
    final_rounding="floor",
    widths=WIDTHS,
    power_of_two_scales=True,
    power_of_two_weights=True,
    share_concat=True,
    resize_fraction_bits=8,
)
FIXED_8 = FixedArithmetic("fixed", widths=WIDTHS, resize_fraction_bits=8)
FIXED = FixedArithmetic("fixed", widths=WIDTHS)
REAL = RealArithmetic("real")
ACTIVATIONS = ("int4", "int8", "int32")
ACTIVATIONS_16 = ("int4", "int8", "int16", "int32")
WEIGHTS = ("int4", "int8")
WEIGHTS_16 = ("int4", "int8", "int16")

TARGETS = limited(
    Target("bernoulli", "BPU Bernoulli: power-of-two scales, requantization by shifting", SHIFT, ACTIVATIONS, WEIGHTS, aliases=("xj2",)),
    Target("bernoulli2", "BPU Bernoulli2: fixed-point requantization", FIXED_8, ACTIVATIONS, WEIGHTS, aliases=("x3", "j3", "rdk-x3")),
    Target("bayes", "BPU Bayes: fixed-point requantization", FIXED, ACTIVATIONS_16, WEIGHTS, aliases=("j5", "rdk-ultra")),
    Target("bayes-e", "BPU Bayes-e: fixed-point requantization", FIXED, ACTIVATIONS_16, WEIGHTS, aliases=("x5", "rdk-x5")),
    Target("nash-e", "BPU Nash-e: float32 requantization", REAL, ACTIVATIONS_16, WEIGHTS_16, aliases=("j6e", "s100", "rdk-s100")),
    Target("nash-m", "BPU Nash-m: float32 requantization", REAL, ACTIVATIONS_16, WEIGHTS_16, aliases=("j6m", "s100p", "rdk-s100p")),
)
