"""Advice on a model's tensors: cause and cure, ordered by the gain.

A rule of the table (`tensor_rules`) proposes a cure, with the remaining share of the tensor's own error. The noise that rounding this
tensor alone adds to the outputs is measured, so the gain there follows:

    gain = 10·log10(T / (T - e + e·left))      T the outputs' noise, e the part that this tensor causes

Advice that gains less than `MIN_GAIN_DB` dB, or concerns noise too small to matter at the outputs, is left out. A healthy model has none.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fxquant.analysis.layers import CLEARLY
from fxquant.ir.integer import QParams
from fxquant.reporting.effects import Effects, Inside
from fxquant.reporting.statistics import Steps, ratio, sqnr_of
from fxquant.reporting.tensor_rules import GAP, POOR, RULES, SCALES, UNUSED, Cures, Found, Judged, mask_cure, own_error
from fxquant.support import reached

MIN_GAIN_DB = 1.0  # dB at the outputs that a cure must gain
AUDIBLE = 1e-4  # an effect below this noise to signal ratio of the outputs, 40 dB, is not reported
MEASURED = 32  # tensors whose effect is measured, the ones with the largest local error first
CLIPPED = 0.05  # the share of an input's values that no observer leaves out
MOVED = 0.01  # the noise to signal ratio that another batch's statistics, which are never quite the same, must make


@dataclass(frozen=True)
class Advice:
    """The advice on one layer.

    layer   its name, as in fxq.inspect.layers and fxq.inspect.record
    rule    the name of the rule
    cause   the cause, with the numbers that show it
    effect  the noise-to-signal ratio Σ(y' - y)² / Σy² at the outputs from this layer's error alone; for quiet channels, in the elements
            that these change
    gain    the gain of the outputs' SQNR in dB by the cure; infinite if the float model itself is wrong
    source  the user's line
    """

    layer: str
    rule: str
    cause: str
    cure: str
    effect: float = 0.0
    gain: float = 0.0
    source: str = ""

    def __str__(self) -> str:
        gained = "" if math.isinf(self.gain) else f" (about {self.gain:.1f} dB at the outputs)"
        return f"%{self.layer}: {self.cause}{gained}\n    {self.cure}" + (f"\n    [{self.source}]" if self.source else "")


def advise(tensors: Sequence[Judged], effects: Effects, cures: Cures) -> tuple[Advice, ...]:
    """Return the advice, ordered by its gain at the outputs; inputs come before everything that is computed from them.

    Scales that are wrong come first: the statistics of a batch norm, which the float model has as well, explain no difference to it.
    """
    advice = list(_no_numbers(tensors))
    first: dict[str, tuple[Judged, str, Found]] = {}
    for tensor in _owners(tensors):  # of each what the first rule says that applies
        for rule in RULES:
            if tensor.name not in first and (proposal := rule(tensor, cures)) is not None:
                first[tensor.name] = tensor, rule.__name__, proposal
    wrong_input = any(name == "input_range" for _, name, _ in first.values())
    asked = sorted(first.values(), key=lambda each: -own_error(each[0]))[:MEASURED]
    measured = [(tensor, name, proposal, effects.of(tensor)) for tensor, name, proposal in asked]
    measured = _with_followers(measured, effects)
    total = max([effects.noise, *(effect for *_, effect in measured)])
    follow = [effect * (1 - proposal.left) for _, name, proposal, effect in measured if wrong_input and name in SCALES]
    for tensor, name, proposal, effect in measured:
        if wrong_input and name in SCALES:
            continue  # its scale is that of other inputs
        statistics = tensor.statistics
        # An input that differs from calibration's: no observer clips as much, or leaves as much of a grid unused.
        certain = name == "input_range" and (statistics.reach <= 1 / UNUSED or statistics.clipped > CLIPPED * statistics.elements)
        if name == "input_range":
            effect = max([effect, *follow])  # layers after an input are calibrated for it
        gain = gain_of(total, effect, proposal.left)
        if effect >= AUDIBLE and (gain >= MIN_GAIN_DB or certain):
            advice.append(Advice(tensor.name, name, proposal.cause, proposal.cure, effect, gain, tensor.facts.source))
    advice += _batch_norms(effects, wrong_input)
    advice += _inside(tensors, effects, total, cures)
    return tuple(sorted(advice, key=_order))


Measured = tuple[Judged, str, Found, float]


def _with_followers(measured: Sequence[Measured], effects: Effects) -> list[Measured]:
    """Reorder tensors with an outlier channel: the source of an outlier comes before tensors that inherit it, with their largest effect."""
    outliers = {each[0].reference: each for each in measured if each[1] == "outlier_channel"}
    sources: dict[str, list[str]] = {}
    for name, (tensor, *_) in outliers.items():
        chain = {name, *reached(effects.operands(tensor.nodes) or (), lambda read: effects.operands((read,)) or ())}
        sources[name] = [each for each in outliers if each in chain]
    counted: list[Measured] = []
    for name in sorted(outliers, key=lambda each: len(sources[each])):
        tensor, rule, proposal, _ = outliers[name]
        followers = [outliers[each] for each in outliers if name in sources[each]]
        worst = max(followers, key=lambda each: each[3] * (1 - each[2].left))
        counted.append((tensor, rule, replace(proposal, left=worst[2].left), worst[3]))
    return [*counted, *(each for each in measured if each[0].reference not in outliers)]


def _owners(tensors: Sequence[Judged]) -> Iterator[Judged]:
    """Yield the tensors, without the ones that share the scale of an earlier tensor."""
    there: set[object] = set()
    for tensor in tensors:
        grid = tensor.facts.grid
        if tensor.is_input or grid is None or grid not in there:
            yield tensor
        there.add(grid)


def _order(advice: Advice) -> tuple[int, float, float]:
    first = {"no_numbers": 0, **dict.fromkeys(SCALES, 1), "batch_norm_statistics": 2, "input_range": 3}
    return first.get(advice.rule, 4), -advice.gain, -advice.effect


def gain_of(total: float, effect: float, remaining: float) -> float:
    """Return the gain in dB at the outputs, whose noise is `total`, if the share `remaining` of one tensor's effect remains."""
    after = max(total - effect * (1 - remaining), total * 1e-12)
    return 10 * math.log10(total / after) if total > 0 else 0.0


def _no_numbers(tensors: Iterable[Judged]) -> Iterator[Advice]:
    """Yield the first tensor with NaN in it; later ones get theirs from it."""
    for tensor in tensors:
        if count := tensor.statistics.not_a_number:
            cause = f"{count} of its {tensor.statistics.elements} values are NaN, in the reference itself"
            cure = "inspect the operands of this layer (of its division, logarithm or root): fxq.inspect.record(model, batches, [name])"
            yield Advice(tensor.name, "no_numbers", cause, cure, math.inf, math.inf, tensor.facts.source)
            return


def _batch_norms(effects: Effects, wrong_input: bool) -> Iterator[Advice]:
    """Yield advice on batch norms whose statistics differ from the data's and change the outputs, not merely through an earlier one."""
    mended: list[str] = []
    while len(mended) < MEASURED:
        suspects = {
            name: moved
            for name, moved in effects.moved_statistics(mended).items()
            if name not in mended and (moved.initial or (not wrong_input and (moved.mean > 2 or not 1 / 16 <= moved.variance <= 16)))
        }
        if not suspects:
            return
        name, moved = next(iter(suspects.items()))
        effect = effects.of_batch_statistics(name, mended)
        mended.append(name)
        if effect < (AUDIBLE if moved.initial else MOVED):
            continue
        what = f"are those of a new batch norm, {' and '.join(moved.initial)}" if moved.initial else "are not those of the data"
        far = f"means are {moved.mean:.2g} σ away, and variances {moved.variance:.2g} times"
        cause = f"its running statistics {what}: on these batches {far}"
        cure = (
            "load the statistics with the weights (running_mean and running_var of the state_dict), or find them before the model is "
            "prepared: torch.optim.swa_utils.update_bn(batches, model)"
        )
        yield Advice(name, "batch_norm_statistics", cause, cure, effect, math.inf)


def _inside(tensors: Sequence[Judged], effects: Effects, total: float, cures: Cures) -> Iterator[Advice]:
    """Yield advice on operators whose error exceeds that of operands and result scale: it comes from a constant, weight or inner tensor."""
    shares = {tensor.reference: ratio(tensor.statistics.noise, tensor.statistics.signal) for tensor in tensors}
    asked = []
    for tensor in tensors:
        read = effects.operands(tensor.nodes)
        before = sum(shares.get(name, 0.0) for name in read or ())
        if read is not None and shares[tensor.reference] > 4 * (before + own_error(tensor)) and tensor.facts.grid is not None:
            asked.append((shares[tensor.reference], tensor))
    for _, tensor in sorted(asked, key=lambda each: -each[0])[:MEASURED]:
        inside = effects.inside(tensor.nodes)
        own = own_error(tensor)
        hidden = effects.hidden(tensor.nodes)
        if inside is None or inside.noise <= 10 * (1 + len(hidden)) * own * inside.signal or inside.effect < AUDIBLE:
            continue
        gain = gain_of(max(total, inside.effect), inside.effect, min(own * inside.signal / inside.noise, 1.0))
        if gain < MIN_GAIN_DB:
            continue
        holder = hidden[0] if hidden else tensor.name
        rule, cause, cure = _of_constants(tensor, inside, holder, cures)
        yield Advice(holder if rule == "inside" else tensor.name, rule, cause, cure, inside.effect, gain, tensor.facts.source)


def _of_constants(tensor: Judged, inside: Inside, holder: str, cures: Cures) -> tuple[str, str, str]:
    """Return (rule, cause, remedy) for a tensor whose operator adds the error itself: by a mask among its constants, or by its weight."""
    reaches = max(abs(tensor.statistics.low), abs(tensor.statistics.high))
    for name, value in inside.constants.items():
        largest = float(torch.nan_to_num(value.detach().abs(), posinf=torch.finfo(torch.float32).max).max()) if value.numel() else 0.0
        if largest > GAP * reaches and not isinstance(value, nn.Parameter):  # which no mask is
            cause = f"{name} reaches {largest:.3g}, where its result reaches {reaches:.3g}: a mask sets one scale for all"
            return "masked", cause, mask_cure(reaches)
    far = sqnr_of(inside.signal, inside.noise)
    cause = f"given the same operands it is {far:.1f} dB from float, more than its grid explains: by its weight or its inner tensors"
    cure = f"{_LOOK_INSIDE}fxq.inspect.compare_weights(model, integer) says how far its weight is off; {cures.weight(holder)}"
    return "inside", cause, cure


_LOOK_INSIDE = "compare with prepared=, the prepared model, which names the tensor inside that is wrong, its scale say; if none is, "


def of_parts(advice: Sequence[Advice], parts: Sequence[Advice]) -> Iterator[Advice]:
    """Yield the advice; for a composite with the rule "inside", its parts' advice instead, or without parts' advice its own, shortened."""
    there = {each.layer for each in advice}
    for each in advice:
        inner = [part for part in parts if part.layer.startswith(f"{each.layer}_") and part.layer not in there and part.rule != "inside"]
        alone = replace(each, cure=each.cure.removeprefix(_LOOK_INSIDE))
        yield from inner if inner and each.rule == "inside" else [alone]


def grid_text(grid: QParams | None) -> str:
    """Return a dtype and a scale in a few characters."""
    if grid is None:
        return "float"
    return f"{grid.dtype} {grid.scale:.4g}" if isinstance(grid.scale, float) else f"{grid.dtype}, a scale for each channel"


# ---- tensors, or channels of one, on one grid that is too coarse for some of them ------------------------------------
FEW_STEPS = 4.0  # that a channel reaches, with less than about 15 dB
ASKED = 8  # tensors whose channels are looked at, at most


def held_together(tensors: Sequence[Judged], effects: Effects, cures: Cures) -> Iterator[Advice]:
    """Yield advice on concatenations and the like, a part of which loses much by the common grid: in the outputs, or by a poor SQNR."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for whole in tensors:
        steps = whole.statistics.steps
        losing = [(by_name[name], loss) for name, loss in whole.facts.parts if loss >= CLEARLY and name in by_name]
        if steps is None or not losing:
            continue
        worst, loss = max(losing, key=lambda each: each[1])
        observed = worst.statistics
        sqnr = sqnr_of(observed.signal, observed.noise_at(steps.scale / observed.steps.scale)) if observed.steps is not None else 0.0
        effect = effects.of_grids([worst], steps)
        if sqnr >= POOR and effect < AUDIBLE:
            continue
        share = ratio(observed.noise_at(1.0), observed.signal)
        gain = gain_of(max(effects.noise, effect), effect, min(share / max(10 ** (-sqnr / 10), 1e-12), 1.0))
        cause = (
            f"it holds tensors of different ranges on one scale, {steps.scale:.4g}: %{worst.name} loses {loss:.0f} dB by it, and "
            f"{sqnr:.1f} dB are left"
        )
        what = "keep the tensors apart where they are read apart, or bring them to one range before"
        cure = cures.apart(what, whole.name, whole.reference)
        yield Advice(whole.name, "held_together", cause, cure, effect, gain, whole.facts.source)


def quiet_channels(tensors: Sequence[Judged], effects: Effects, cures: Cures, advised: Iterable[str]) -> Iterator[Advice]:
    """Yield advice on tensors that an output returns, some of whose channels are so much smaller that they are lost by the common scale.

    In the noise of a whole output these channels do not count, so it is measured in the elements that they change. Tensors with other
    advice, the names in `advised`, are left out, and so are tensors that are computed from one with advice.
    """
    names, remaining = set(advised), ASKED
    followed = {tensor.reference for tensor in tensors if tensor.name in names}
    for tensor in tensors:
        values = tensor.statistics
        if followed & {tensor.reference, *(effects.operands(tensor.nodes) or ())}:
            followed.add(tensor.reference)
        elif remaining and not tensor.is_input and values.steps is not None and values.axis is not None and values.channels is not None:
            steps, channels, largest = values.steps, values.channels, float(values.channels.max())
            quiet = (channels > 0) & (channels < min(FEW_STEPS * steps.scale, largest / GAP))
            if not bool(quiet.any()):
                continue
            remaining -= 1
            noise = effects.of_channels(tensor.reference, steps, tensor.factors, values.axis, quiet)
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
