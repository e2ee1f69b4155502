"""The first samples of a calibration, by which ranges are judged, weights are rounded and biases are corrected after it.

Ranges are chosen by the method that leaves the least noise in the outputs (below), if there are samples enough to judge by. Weights of few
bits are rounded by them (`second_moment`).

Biases are corrected (`bias`) if there are samples enough for a mean. They take back the mean of three errors: the remainder of the errors
of rounded weights, the errors of 8-bit weights at an operand whose mean is not 0, and the shift of clipped operands. And where an
arithmetic rounds the middle between two integers up, every pixel that is the mean of four is an eighth of a step too large on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

import fxquant.calibration.distributed as ranks
from fxquant.analysis.recording import Seen, still
from fxquant.calibration.calibration import WIDE, owned_quantizers
from fxquant.ir.model import SAMPLES, autocast_off, repeatable
from fxquant.ops.core.composite import QUANTIZE
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.undo import Snapshot
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.ranges import Method
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.quantization.weights import Parts
from fxquant.support import logger, timed
from fxquant.tuning import bias, second_moment
from fxquant.tuning.checkpoint import Checkpoint
from fxquant.tuning.choices import tuning
from fxquant.tuning.effects import FloatOutputs, Noise, best_of, is_real, support
from fxquant.tuning.walk import HELD_OUT_OF, Samples, batch_axes, count_of, cut, weighted_nodes

ENOUGH = 64  # samples: so many are kept, of the first batches, and biases are corrected if there are so many
LARGEST = 2**24  # elements of what is kept
LARGEST_FOR_BIAS = 2**21  # a mean needs fewer
CHUNK = 16  # samples
JUDGES = 32  # samples by which the outputs are judged

Found = TypeVar("Found")
Given = Mapping[str, tuple[Parts, Parts]]  # by layer: what it was given, and what it had before


@dataclass(frozen=True)
class Kept:
    """The state that a calibration leaves on the model, so that a second one that goes on ends as one call with all batches would.

    inputs       the model's inputs of the first batches
    samples      how many samples these have, and how many elements
    seen         how many samples have gone by
    counts       what the observers have counted by then: if it is another number, something else has observed since
    roundings    of each layer that was rounded by these samples: what it has since, and what it had before
    corrections  and of each whose bias was corrected
    """

    inputs: list[list[Any]] = field(default_factory=list)
    samples: int = 0
    elements: int = 0
    seen: int = 0
    counts: int = 0
    roundings: Given = field(default_factory=dict)
    corrections: Given = field(default_factory=dict)


class FirstSamples:
    """Collects them; none are kept where nothing is to be done by them.

    The options say what is done; where they leave it open, it is if at least `ENOUGH` samples go by, in all ranks together. What was
    `observed` before counts as observed of these samples. With a `method` ranges are chosen by it.

    A calibration that goes on begins with what the one before has kept on the model, and does what that did to weights and biases again.
    Where batches were observed whose samples are not there (`lost`), what was done by them stays.

    batches  how many batches were taken, and the inputs of the first
    """

    def __init__(self, prepared: fx.GraphModule, options: Options = DEFAULTS, observed: bool = False, method: Method | None = None) -> None:
        self.prepared, self.method = prepared, method
        self.chooses, self.observed_before = options.choose_ranges, {} if observed else counts(prepared)
        counted, previous = _counts(prepared), prepared.__dict__.get(SAMPLES)
        self.kept: Kept = previous if previous is not None and previous.counts == counted else Kept(counts=counted)
        self.lost = counted > 0 and self.kept is not previous
        self.before = self.first = self.kept
        self.batches, self.first_inputs, self.judge = 0, list[Any](), FloatOutputs(prepared, [])
        rounds = options.round_weights
        self.bits = second_moment.FEW_BITS if rounds is None else second_moment.ALL_BITS if rounds else 0
        with Snapshot(_weight_modules(prepared), always=True):
            _undo(prepared, self.kept.roundings)
            self.rounds = second_moment.is_wanted(prepared, self.bits)
        self.corrects = options.correct_bias is not False and bool(weighted_nodes(prepared))
        self.enough = ENOUGH if options.correct_bias is None else 0

    def take(self, inputs: Sequence[Any]) -> None:
        """Take the model's inputs of the next batch."""
        count, elements = count_of(inputs, batch_axes(self.prepared)), sum(value.numel() for value in inputs if isinstance(value, Tensor))
        data = replace(self.kept, seen=self.kept.seen + count)
        wanted = self.rounds or self.corrects or self.chooses is not False
        wanted = wanted and data.samples < ENOUGH and data.elements < LARGEST and any(isinstance(value, Tensor) for value in inputs)
        if wanted or not self.batches:
            own = [value.clone() if isinstance(value, Tensor) else value for value in inputs]  # a loader may reuse its memory
            self.first_inputs = self.first_inputs or own
        if wanted:
            stored = [*(_beside(inputs, each) for each in data.inputs), own]
            data = replace(data, inputs=stored, samples=data.samples + count, elements=data.elements + elements)
        self.kept = self.first = data
        self.batches += 1

    def remember(self, *, ended: bool) -> None:
        """Keep in the model what the next calibration goes on with: where this one has not `ended`, the weights are as they were before."""
        kept = self.kept if ended else replace(self.kept, roundings=self.before.roundings, corrections=self.before.corrections)
        self.prepared.__dict__[SAMPLES] = replace(kept, counts=_counts(self.prepared))

    def use(self, distributed: bool, show_progress: bool | None) -> None:
        """Choose ranges, round weights and correct biases by the samples; several ranks use those of rank 0, and divide the first two."""
        prepared, data, several = self.prepared, self.kept, distributed and ranks.count() > 1
        total = sum(ranks.gathered(data.seen)) if several else data.seen  # by all ranks
        self.first = self._of_rank_0() if several else data
        corrects, few, judging = self.corrects and total >= self.enough, Samples([]), list[list[Any]]()
        if self.first.inputs:
            few, judging = self._few()
        self.judge = FloatOutputs(prepared, judging if self.first.samples >= ENOUGH else few.chunks)

        @timed("rounding weights")
        def rounded() -> second_moment.Rounded:
            return second_moment.rounded(prepared, cut(prepared, self.first.inputs, 4), self.bits, show_progress, several)

        @timed("correcting biases")
        def corrected() -> dict[str, list[float]]:
            judge = self.judge if self.first.samples >= ENOUGH else FloatOutputs(prepared, judging)
            return bias.corrections(prepared, few, judge, show_progress) if not (several and ranks.index()) else {}

        roundings, corrections = data.roundings, data.corrections
        if self.rounds:
            _undo(prepared, roundings)
        if corrects:
            _undo(prepared, corrections)
        self._choose_ranges(total, several, show_progress)  # of layers that are as they were before these samples
        if self.rounds:
            roundings = self._again(roundings, lambda: second_moment.apply(prepared, self._agreed(several, rounded)))
            self.judge.current = None
        if corrects:
            corrections = self._again(corrections, lambda: bias.apply(prepared, self._agreed(several, corrected)))
        self.kept = replace(data, roundings=roundings, corrections=corrections)

    @timed("choosing ranges")
    def _choose_ranges(self, total: int, several: bool, show_progress: bool | None) -> None:
        """Choose ranges by the method that is best for the outputs, and narrow those of lost inputs, where that is better for them."""
        prepared, observed = self.prepared, observed_since(self.prepared, self.observed_before)
        free = [quantizer for quantizer in observed.values() if quantizer.can_choose]
        method = self.method or Method.ERROR
        judging = self.judge.chunks
        if judging and free and self.method is None and (self.chooses or (self.chooses is None and total >= ENOUGH)):
            method = best_method(self.judge, free, show_progress, several)
        choose(free, method)
        if judging and self.chooses is not False:
            narrow(prepared, narrower(self.judge, observed, show_progress, several))

    def _again(self, prior: Given, method: Callable[[], None]) -> Given:
        """Run a method again and return the new and former parts of each layer that it changed; excluded layers keep their `prior` ones."""
        before, operators = _parts(self.prepared), quantized_operators(self.prepared)
        method()
        now = _parts(self.prepared)
        replaced = {name: (now[name], had) for name, had in before.items() if any(a is not b for a, b in zip(now[name], had, strict=True))}
        return {name: pair for name, pair in prior.items() if operators[name].left_out} | replaced

    def _agreed(self, several: bool, find: Callable[[], dict[str, Found]]) -> dict[str, Found]:
        """Return what rank 0 finds; nothing without samples."""
        changes: dict[str, Found] = {}
        try:
            changes = find() if self.first.inputs else changes
        finally:
            changes = ranks.of_first(changes) if several else changes  # also where it raises: others wait
        return changes

    def _of_rank_0(self) -> Kept:
        """Return the samples of rank 0, on the device of this model."""
        first: Kept = ranks.of_first(Kept(_on("cpu", self.kept.inputs), self.kept.samples, self.kept.elements))
        return replace(first, inputs=_on(next(self.prepared.buffers(), torch.empty(0, device="cpu")).device, first.inputs))

    def _few(self) -> tuple[Samples, list[list[Any]]]:
        """Return as many samples as a mean needs, from all that are kept, and the samples by which outputs are judged after it.

        A mean of `ENOUGH` samples learns little of each, so `JUDGES` of all samples judge, these among them. Of fewer samples others judge,
        or those that are held out, where no others are left.
        """
        each = max(self.first.elements // max(self.first.samples, 1), 1)
        size = max(1, min(CHUNK, LARGEST_FOR_BIAS // (HELD_OUT_OF * each)))
        chunks = cut(self.prepared, self.first.inputs, size).chunks
        count = max(HELD_OUT_OF, LARGEST_FOR_BIAS // (size * each))
        few = Samples(_spread(chunks, count))
        chosen = {id(chunk) for chunk in few.chunks}
        others = _spread([chunk for chunk in chunks if id(chunk) not in chosen], count)
        if self.first.samples >= ENOUGH:
            return few, _spread(few.chunks + others, max(JUDGES // size, 1))
        return few, others or [few.chunks[index] for index in few.judging]


def _spread(chunks: list[list[Any]], count: int) -> list[list[Any]]:
    """Return `count` chunks, evenly spaced: neighbouring batches may show one scene."""
    return [chunks[index * len(chunks) // count] for index in range(count)] if count < len(chunks) else chunks


def _on(device: torch.device | str, chunks: list[list[Any]]) -> list[list[Any]]:
    return [[value.to(device) if isinstance(value, Tensor) else value for value in inputs] for inputs in chunks]


def _beside(inputs: Sequence[Any], stored: Sequence[Any]) -> list[Any]:
    """Return what was kept, on the devices of other inputs: the model may have moved between two calls."""
    pairs = zip(stored, inputs, strict=True)
    return [mine.to(other.device) if isinstance(mine, Tensor) and isinstance(other, Tensor) else mine for mine, other in pairs]


def _counts(prepared: fx.GraphModule) -> int:
    """Return how many batches all observers together have seen."""
    counts = [module.count for module in prepared.modules() if isinstance(module, Observer)]
    return int(torch.stack([count.cpu() for count in counts]).sum()) if counts else 0


def _parts(prepared: fx.GraphModule) -> dict[str, Parts]:
    """Return the rounding, coverage and correction of every layer."""
    return {name: operator.weight_quantizer.parts for name, operator in quantized_operators(prepared).items()}


def _undo(prepared: fx.GraphModule, changes: Given) -> None:
    """Layers that are not left out have again what they had, each part where it is still the one that was given."""
    now, operators = _parts(prepared), quantized_operators(prepared)
    for name, pair in changes.items():
        if not operators[name].left_out:
            parts = (before if part is new else part for part, new, before in zip(now[name], *pair, strict=True))
            operators[name].weight_quantizer.put(tuple(parts))  # type: ignore[arg-type]


def _weight_modules(prepared: fx.GraphModule) -> list[nn.Module]:
    """Return all weight quantizers, with the modules in them."""
    return [module for operator in quantized_operators(prepared).values() for module in operator.weight_quantizer.modules()]


# ---- Ranges that calibration chooses by the outputs of the model, after observers have chosen each by the error of its own tensor
#
# A choice has candidates, the usual one first. Each is put into the model, whose outputs are then measured on a few samples (`effects`).
# Another one than the usual is taken where the outputs clearly gain by it. There are two choices.
#
# *All tensors but outputs, by one method* (`Method`). The squared error of all samples together is that of the samples with the largest
# values: it keeps these, and gives all others a coarse step. The noise of a sample in decibels, on average over samples, clips more of the
# largest values. The smallest and the largest value keep rare values, which may carry what a detector finds. No method is better for every
# network. Percentiles are not candidates: they cut off values of other samples.
#
# *An input many of whose values round to 0, divided by a power of two.* A few large values set the scale of a power spectrogram, say. They
# make up its squared error, so no observer cuts them off, but often they do the same to the outputs at half their size. So are tensors of
# 16 bits, all of them together: the squares whose root is a spectrogram.


FEWEST = 3  # samples that gain by another choice than the usual, or half of all: one huge activation chooses no range for the others
MANY = 0.2  # of an input's values that are not 0, and become 0
FACTORS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def counts(prepared: fx.GraphModule) -> dict[str, int]:
    """Return how many batches each quantizer's observer has seen, by operator and role, where the scale follows from all of them."""
    there = {name: quantizer for name, quantizer in _quantizers(prepared).items() if not quantizer.pending}
    return {name: int(quantizer.observer.count) for name, quantizer in there.items() if quantizer.observer is not None}


def observed_since(prepared: fx.GraphModule, before: Mapping[str, int]) -> dict[str, Quantizer]:
    """Return the quantizers that have observed anything since `counts` were `before`."""
    there = _quantizers(prepared)
    return {name: each for name, each in there.items() if each.observer is not None and int(each.observer.count) > before.get(name, 0)}


def method_of(prepared: fx.GraphModule) -> Method:
    """Return the method by which calibration has chosen ranges."""
    return next((each.chosen_by for each in _quantizers(prepared).values() if each.chosen_by is not Method.ERROR), Method.ERROR)


def choose(quantizers: Sequence[Quantizer], method: Method) -> None:
    """Choose the scales of these quantizers anew by this method."""
    for quantizer in quantizers:
        quantizer.choose_by(method)


def best_method(judge: FloatOutputs, quantizers: Sequence[Quantizer], show: bool | None, several: bool) -> Method:
    """Return the method whose ranges are clearly best for the outputs; the scales stay what they were."""
    candidates = {method.value: partial(choose, quantizers, method) for method in Method}
    best, noise = _chosen(judge, candidates, "ranges are chosen by", show, several)
    judge.current = noise.get(best)  # of the model that has the ranges of this method
    return Method(best)


@timed("narrowing ranges")
def narrower(judge: FloatOutputs, observed: Mapping[str, Quantizer], show_progress: bool | None, several: bool = False) -> dict[str, float]:
    """Return the factors below 1 of the ranges of lost tensors with which the outputs are best, by node; the ranges stay.

    Inputs and tensors of 16 bits that the default observer has `observed` have other candidates: each input, and all others together.
    """
    prepared, nonzero, survivors = judge.prepared, Counter[str](), Counter[str]()
    owned = [(name.removesuffix(".0"), quantizer) for name, quantizer in observed.items() if name.endswith(".0")]
    owners = {id(quantizer): name for name, quantizer in reversed(owned)}  # the first of those that share it
    quantizes = {name for name, operator in quantized_operators(prepared).items() if operator.operator is QUANTIZE}
    sources = {node.name: node.all_input_nodes[0].name for node in prepared.graph.nodes if node.name in quantizes}

    def see(node: fx.Node, value: Any, read: tuple[Any, ...]) -> Any:
        quantizer = observed.get(f"{node.name}.0") if is_real(value) else None
        if quantizer is not None and quantizer.can_choose and (quantizer.dtype.name == WIDE or node.name in sources):
            name = owners[id(quantizer)]
            nonzero[name] += int((value != 0).sum())
            survivors[name] += int((torch.round(value / quantizer.scale.to(value.device)) != 0).sum())
        return value

    placeholders = [node.name for node in prepared.graph.find_nodes(op="placeholder")]
    runs = any(quantizer.can_choose and quantizer.dtype.name == WIDE and name not in sources for name, quantizer in owned)
    with torch.no_grad(), repeatable(), still(prepared, State.FLOAT), autocast_off():
        for chunk in judge.chunks:
            if runs:
                Seen(prepared, see).run(*chunk)
                continue
            values = dict(zip(placeholders, chunk, strict=True))
            for node in (node for node in prepared.graph.nodes if sources.get(node.name) in values):
                see(node, values[sources[node.name]], ())
    groups, ratios = dict[str, list[str]](), dict[str, float]()
    for name in (name for name, count in nonzero.items() if count - survivors[name] >= max(MANY * count, 1)):
        what = f"the range of input {sources[name]} is" if name in sources else "the ranges of tensors of 16 bits are"
        groups.setdefault(what, []).append(name)
    for what, names in (ranks.of_first(groups) if several else groups).items():
        factors = {f"{factor:g}": partial(narrow, prepared, dict.fromkeys(names, factor) if factor < 1 else {}) for factor in FACTORS}
        best, noise = _chosen(judge, factors, f"{what} multiplied by", show_progress, several)
        judge.current, factor = noise.get("1"), float(best)
        ratios.update(dict.fromkeys(names, factor) if factor < 1 else {})
    judge.current = None if ratios else judge.current
    return ratios


def narrow(prepared: fx.GraphModule, factors: Mapping[str, float]) -> None:
    """Multiply the ranges of these quantize nodes."""
    operators = quantized_operators(prepared)
    for name, factor in factors.items():
        operators[name].output.narrow(factor)


def _chosen(
    judge: FloatOutputs, candidates: Mapping[str, Callable[[], None]], what: str, show: bool | None, several: bool
) -> tuple[str, dict[str, Noise]]:
    """Return the candidate that is clearly best for the outputs, or the first, which the model has again; and the noise of each."""
    usual, *others = candidates
    with tuning(judge.prepared) as tuned, repeatable():

        def measured(name: str) -> Noise:
            candidates[name]()
            noise = judge.measure()
            tuned.undo()
            return noise

        asked = [name for name in candidates if name != usual or judge.current is None] if judge.there else []
        try:
            noise: dict[str, Noise] = Checkpoint(None, {}, several).gather(
                {name: partial(measured, name) for name in asked}, "comparing ranges", show
            )
        finally:
            candidates[usual]()
    if not noise:
        return usual, {}
    noise.setdefault(usual, judge.current)  # type: ignore[arg-type]
    fewest = min(FEWEST, sum(judge.counts) / 2)
    best = best_of({name: each for name, each in noise.items() if name == usual or support(each, noise[usual]) >= fewest}, usual)
    other = max(others, key=lambda name: noise[name].level) if best == usual else usual
    logger.info("%s %s: the outputs have %.1f dB, and %.1f dB with %s", what, best, noise[best].level, noise[other].level, other)
    return best, noise


def _quantizers(prepared: fx.GraphModule) -> dict[str, Quantizer]:
    """Return the quantizers of results and of what residuals are added to, by name."""
    return {
        f"{name}.{index}": quantizer
        for name, operator in quantized_operators(prepared).items()
        if not operator.plain
        for index, quantizer in enumerate(owned_quantizers(operator))
    }
