"""Horizon's BPU, march by march: the whole target in one screen. The arithmetic is specified in ARITHMETIC.md."""

from fxquant.numerics import Arithmetic, FixedWidths
from fxquant.target import Target

FIXED = Arithmetic(
    "fixed",
    requantize="fixed",
    final_rounding="half_up",
    widths={
        "int8": FixedWidths(intermediate_bits=16, multiplier_bits=15, first_shift=True),
        # 16 bits in between would leave half of the int16 codes unused.
        "int16": FixedWidths(intermediate_bits=32, multiplier_bits=21, first_shift=False),
    },
)
REAL = Arithmetic("real", requantize="real", final_rounding="half_even")

TARGETS = (
    Target("bayes-e", "BPU Bayes-e: fixed-point requantization", FIXED, aliases=("x5", "rdk-x5")),
    Target("nash-e", "BPU Nash-e: float32 requantization", REAL, aliases=("j6e", "s100", "rdk-s100")),
)
