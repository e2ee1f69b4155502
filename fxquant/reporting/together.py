"""Advice about tensors, or channels of one, that are held together on one grid, which is too coarse for some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.analysis.layers import CLEARLY
from fxquant.reporting.advice import AUDIBLE, Advice, gain_of
from fxquant.reporting.cures import Cures
from fxquant.reporting.effects import Effects
from fxquant.reporting.statistics import Steps, ratio, sqnr_of
from fxquant.reporting.tensor_rules import GAP, POOR, Judged

FEW_STEPS = 4.0  # that a channel reaches, with less than about 15 dB
ASKED = 8  # tensors whose channels are looked at, at most


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
        left = sqnr_of(seen.signal, seen.noise_at(steps.scale / seen.steps.scale)) if seen.steps is not None else 0.0
        effect = effect_of(worst, steps)
        if left >= POOR and effect < AUDIBLE:
            continue
        share = ratio(seen.noise_at(1.0), seen.signal)
        gain = gain_of(max(total, effect), effect, min(share / max(10 ** (-left / 10), 1e-12), 1.0))
        cause = (
            f"it holds tensors of different ranges on one scale, {steps.scale:.4g}: %{worst.name} loses {loss:.0f} dB by it, and "
            f"{left:.1f} dB are left"
        )
        what = "keep the tensors apart where they are read apart, or bring them to one range before"
        cure = cures.apart(what, whole.name, whole.reference)
        yield Advice(whole.name, "held_together", cause, cure, effect, gain, whole.facts.source)


def quiet_channels(
    tensors: Sequence[Judged], factors: Mapping[str, Any], effects: Effects, cures: Cures, told: Iterable[str]
) -> Iterator[Advice]:
    """Yield advice on tensors that an output returns, some of whose channels are so much smaller that they are lost by the common scale.

    In the noise of a whole output these channels do not count, so it is measured in the elements that they change. Tensors with other
    advice, `told` by name, are left out, and so are tensors that are computed from one with advice.
    """
    names, left = set(told), ASKED
    followed = {tensor.reference for tensor in tensors if tensor.name in names}
    for tensor in tensors:
        seen = tensor.statistics
        if followed & {tensor.reference, *(effects.operands(tensor.reference, (tensor.name, *tensor.facts.fused)) or ())}:
            followed.add(tensor.reference)
        elif left and not tensor.is_input and seen.steps is not None and seen.axis is not None and seen.channels is not None:
            steps, channels, largest = seen.steps, seen.channels, float(seen.channels.max())
            quiet = (channels > 0) & (channels < min(FEW_STEPS * steps.scale, largest / GAP))
            if not bool(quiet.any()):
                continue
            left -= 1
            noise = effects.of_channels(tensor.reference, steps, factors[tensor.name], seen.axis, quiet)
            if sqnr_of(1.0, noise) < POOR:
                followed.add(tensor.reference)
                yield _quiet(tensor, steps, channels, quiet, noise, cures)


def _quiet(tensor: Judged, steps: Steps, channels: Tensor, quiet: Tensor, noise: float, cures: Cures) -> Advice:
    reach, where = float(channels[quiet].max()), torch.nonzero(quiet).flatten().tolist()
    cause = (
        f"{len(where)} of its {len(channels)} channels ({', '.join(map(str, where[:4]))}{', …' * (len(where) > 4)}) reach {reach:.3g} at "
        f"most, and others {float(channels.max()):.3g}: on one scale, {steps.scale:.4g}, what an output holds of them has "
        f"{sqnr_of(1.0, noise):.1f} dB"
    )
    what = "compute these channels by a layer of their own and return them apart, or bring all channels to one range"
    cure = cures.apart(what, tensor.name, tensor.reference)
    gain = gain_of(noise, noise, min((reach / max(steps.high, -steps.low) / steps.scale) ** 2, 1.0))
    return Advice(tensor.name, "quiet_channels", cause, cure, noise, gain, tensor.facts.source)
