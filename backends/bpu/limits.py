"""The limits of each march on an operator's parameters, as far as Horizon's public documents state them, and its chip's peak rates.

Sources: the operator lists of the RDK X3 (Bernoulli2) and RDK Ultra (Bayes) user guides, and the lists of the conversion tool for the same
chips where they state more. For Nash: the constraints that its export publishes. Where the documents give two different values, the
looser one is used, and the note of the row gives the other. The rows are those of limits.tsv, in the order in which they are reported.

A composite is checked against the limits of its parts, not against limits published for the composite as a whole.
A softmax, for example, accepts any rank and axis that its parts accept.

A limit that is missing here is unknown. For Bernoulli no limits are published. For Bayes-e the limits of Bayes are used, since no others
are published. For Nash the published tables give dtypes, and few sizes.
"""

import csv
from ast import literal_eval
from fractions import Fraction
from pathlib import Path
from typing import Any

from fxquant.target import Limit, Roofline


def _limits(march: str) -> tuple[Limit, ...]:
    """Return the rows of limits.tsv of a march; a row without a measure says that the march has no such operator."""
    with Path(__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if march in row["marches"].split()]
    return tuple(
        Limit(
            tuple(row["operators"].split()), row["measure"] or None, _number(row["low"]), _number(row["high"]),
            literal_eval(row["among"]) if row["among"] else None, row["remedy"], row["allows"], bool(row["always"]),
        )
        for row in rows
    )  # fmt: skip


def _number(text: str) -> Any:
    return None if not text else Fraction(text) if "/" in text else int(text)


BERNOULLI2, BAYES, NASH = map(_limits, ("bernoulli2", "bayes", "nash"))


# ---- the peak rates of the chips
#
# Published TOPS count a multiply-accumulate of int8 numbers as two operations. Memory is published as its width and its speed: bits / 8
# times transfers per second. Where only its kind is published, the width is assumed from chips of the same class, and the row says so.
# No source says what fraction of the peak a program reaches.
def peak(tops: float, bits: int, megatransfers: int, source: str, assumed: bool = True) -> Roofline:
    """Return the rates of a chip by its published TOPS, the width of its memory in bits, and the memory's million transfers a second."""
    return Roofline(tops * 1e12 / 2, bits / 8 * megatransfers * 1e6, source, assumed)


JOURNEY_2 = peak(4, 32, 2400, "Journey 2: 4 TOPS (the vendor's announcement, 2019); memory assumed, 32 bits of LPDDR4-2400")
JOURNEY_3 = peak(
    5, 32, 3200, "Journey 3: 5 TOPS, 32 bits of memory at 3200 MT/s (eet-china.com/mp/a330998.html); X3 is the same", assumed=False
)
JOURNEY_5 = peak(
    128, 128, 3200, "Journey 5: 128 TOPS (42how.com, 2021-07-31), RDK Ultra 96; memory assumed, 128 bits of LPDDR4 at 3200 MT/s"
)
RDK_X5 = peak(10, 32, 4266, "RDK X5: 10 TOPS (the vendor's announcement); memory assumed, 32 bits of LPDDR4-4266")
JOURNEY_6E = peak(80, 96, 6400, "Journey 6E, RDK S100: 80 TOPS (the vendor's announcement, 2024); memory assumed, 96 bits of LPDDR5-6400")
JOURNEY_6M = peak(128, 96, 6400, "Journey 6M, RDK S100P: 128 TOPS (the same); memory assumed, 96 bits of LPDDR5-6400")
JOURNEY_6B = peak(18, 32, 4266, "Journey 6B: 18 TOPS (the same); memory assumed, 32 bits of LPDDR4X-4266")
JOURNEY_6P = peak(560, 256, 6400, "Journey 6P: 560 TOPS (chinaevtimes.com, 2025-07-22); memory assumed, 256 bits of LPDDR5-6400")
JOURNEY_6H = peak(420, 192, 6400, "Journey 6H: 420 TOPS (the vendor's announcement, 2024); memory assumed, 192 bits of LPDDR5-6400")


# ---- The float16 operators of Nash-p and Nash-h: every operator of their export that has no integer form, except sums of products
#
# Source: the table of operators that Horizon's export for Nash publishes, and its advice for these marches: sums of products in integers,
# all else in float16. Such an operator runs on the march, so no tensor is transferred to the host for it. Its values are not covered by the
# integer contract: PyTorch and ONNX compute it in float32 here.
_NAMES = """
abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil cos cosh erf exp floor log maximum minimum
neg negative reciprocal rsqrt sigmoid sign sin sinh sqrt tan tanh pow add sub subtract rsub mul multiply div divide true_divide truediv
remainder fmod eq ne lt le gt ge greater greater_equal less less_equal logical_and logical_or logical_not zeros_like ones_like full_like
relu relu6 hardtanh hardsigmoid elu gelu leaky_relu prelu silu softplus softmax log_softmax clamp clip clamp_min clamp_max
batch_norm batch_norm1d batch_norm2d batch_norm3d layer_norm instance_norm instance_norm1d instance_norm2d instance_norm3d normalize norm
scale_channels avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d interpolate
upsample grid_sample affine_grid pad pixel_shuffle pixel_unshuffle all argmax argmin max min amax amin mean sum cumsum topk sort argsort
cat concat concatenate stack split chunk unbind reshape view flatten squeeze unsqueeze permute transpose t expand expand_as repeat tile flip
roll gather index_select getitem setitem slice_scatter scatter scatter_add scatter_reduce masked_fill where tril triu dropout identity
embedding contiguous clone detach to float
"""
FLOAT16 = frozenset(_NAMES.split())
