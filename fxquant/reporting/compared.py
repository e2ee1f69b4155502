"""How far one tensor is apart in two forms of a model: a row of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxquant.analysis.recording import Facts
from fxquant.ir.integer import QParams
from fxquant.reporting.statistics import TensorStatistics, ratio, sqnr_of


@dataclass(frozen=True)
class LayerComparison:
    """How far one tensor is apart in the two forms, in units of the second form.

    name        of the layer, in the second form; "output 0", … of what the models return
    reference   of the tensor of the first form that it is compared with
    operator    what computes it
    dtype       of the second form's tensor; "float" where it has no grid
    grid        its scale and dtype, None without
    source      the user's line
    because     why it is integer or float
    elements    how many numbers were compared
    cosine      Σ r·v / √(Σ r² · Σ v²), of the reference r and the value v
    sqnr        10·log10(Σ r² / Σ (r - v)²) in dB: with all errors that came from the layers before
    mse         Σ (r - v)² / elements
    largest     max |r - v|
    steps       the same in steps of the grid; NaN without one
    own         the same ratio as sqnr, in dB, of what this grid alone makes of the reference: without errors from before
    clipped     share of the reference beyond the grid's ends
    zeroed      share of the reference's numbers that are not 0 and become 0
    reach       the end of the reference over the end of the grid: 1 where it just fits
    error       which part of its own error is larger: "truncation", "rounding", or "none" where there is none
    effect      the noise to signal ratio at the outputs, where it was measured: of this grid alone; NaN elsewhere
    try_this    what to try if this layer is to be better; "" where its own error is none
    low, high   the ends of the reference
    times       how many tensors it stands for: those of a recurrence that are alike at its time steps
    """

    name: str
    reference: str
    operator: str
    dtype: str
    grid: QParams | None
    source: str
    because: str
    elements: int
    cosine: float
    sqnr: float
    mse: float
    largest: float
    steps: float
    own: float
    clipped: float
    zeroed: float
    reach: float
    error: str
    effect: float
    try_this: str
    low: float
    high: float
    times: int = 1


def row(name: str, reference: str, facts: Facts, seen: TensorStatistics, effect: float = math.nan, times: int = 1) -> LayerComparison:
    """Return the row of a tensor; `effect` is its effect on the outputs, NaN where that was not measured."""
    count = max(seen.elements - seen.not_a_number - seen.infinite, 1)
    made = seen.truncation + seen.rounding
    worse = "truncation" if seen.truncation > seen.rounding else "rounding"
    error = "" if seen.steps is None else worse if made else "none"
    return LayerComparison(
        name=name,
        reference=reference,
        operator=facts.operator,
        dtype="float" if facts.grid is None else facts.grid.dtype,
        grid=facts.grid,
        source=facts.source,
        because=facts.because,
        elements=seen.elements,
        cosine=seen.product / math.sqrt(seen.signal * seen.power) if seen.signal and seen.power else float(seen.signal == seen.power),
        sqnr=sqnr_of(seen.signal, seen.noise),
        mse=seen.noise / count,
        largest=seen.largest,
        steps=seen.largest / seen.steps.scale if seen.steps is not None else math.nan,
        own=sqnr_of(seen.signal, made) if seen.steps is not None else math.nan,
        clipped=seen.clipped / count if seen.steps is not None else math.nan,
        zeroed=ratio(seen.zeroed, seen.nonzero) if seen.steps is not None else math.nan,
        reach=seen.reach,
        error=error,
        effect=effect,
        try_this=_try(error, seen),
        low=seen.low,
        high=seen.high,
        times=times,
    )


def _try(error: str, seen: TensorStatistics) -> str:
    if error == "truncation":
        return "a larger scale: more calibration data, or an observer that clips less (MinMaxObserver)"
    if error == "rounding":
        small = seen.reach < 0.5
        return "a smaller scale: the grid reaches further than the values" if small else "more bits (int16), or fxq.equalize"
    return ""
