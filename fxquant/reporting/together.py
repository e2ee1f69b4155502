"""Advice about tensors that are held together on one grid, which is too coarse for some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxquant.analysis.shared_grids import CLEARLY
from fxquant.reporting.advice import AUDIBLE, Advice, gain_of
from fxquant.reporting.cures import Cures
from fxquant.reporting.statistics import Steps, decibels, ratio
from fxquant.reporting.tensor_rules import POOR, Judged


def held_together(tensors: Sequence[Judged], effect_of: Callable[[Judged, Steps], float], total: float, cures: Cures) -> Iterator[Advice]:
    """Yield advice on tensors that hold others: one loses clearly by the common grid, and the outputs show it or its SQNR is poor.

    `effect_of` measures what rounding a tensor to these steps loses at the outputs; `total` is what the whole loses there.
    """
    known = {tensor.name: tensor for tensor in tensors}
    for whole in tensors:
        steps = Steps.of(whole.facts.grid)
        losing = [(known[name], loss) for name, loss in whole.facts.parts if loss >= CLEARLY and name in known]
        if steps is None or not losing:
            continue
        worst, loss = max(losing, key=lambda each: each[1])
        seen = worst.statistics
        left = decibels(seen.signal, seen.noise_at(steps.scale / seen.steps.scale)) if seen.steps is not None else 0.0
        effect = effect_of(worst, steps)
        if left >= POOR and effect < AUDIBLE:
            continue
        share = ratio(seen.noise_at(1.0), seen.signal)
        gain = gain_of(max(total, effect), effect, min(share / max(10 ** (-left / 10), 1e-12), 1.0))
        cause = (
            f"it holds tensors of different ranges on one scale, {steps.scale:.4g}: %{worst.name} loses {loss:.0f} dB by it, and "
            f"{left:.1f} dB are left"
        )
        floats = cures.in_float(whole.name, whole.reference)
        cure = (
            "keep the tensors apart where they are read apart, or bring them to one range before; or "
            f"{cures.wider(whole.name, whole.reference)}" + (f"; or leave it in float, {floats}" if floats and cures.has_wide else "")
        )
        yield Advice(whole.name, "held_together", cause, cure, effect, gain, whole.facts.source)
