"""The record of a step that chooses numbers of a prepared model, and the run of several steps over the batches of one call.

A run reads each batch once, and keeps the first samples: all steps after the observation know these samples alone. A second calibration
takes back what the steps of the one before did by its samples, and finds it anew by the samples of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

import fxquant.accuracy.ranks as ranks
from fxquant.accuracy.measure import FloatOutputs
from fxquant.accuracy.result import TuningResult
from fxquant.accuracy.states import owned_quantizers
from fxquant.accuracy.walk import HELD_OUT_OF, Samples, batch_axes, count_of, cut, weighted_nodes
from fxquant.ir.model import SAMPLES
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import first_batches, length, model_inputs
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.ranges import Method
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import Parts
from fxquant.support import logger, timed
from fxquant.support.progress import progress

ENOUGH = 64  # samples: so many are kept, of the first batches
FEW = 16  # samples, from which on ranges are judged and biases corrected
LARGEST_KEPT = 2**24  # elements of what is kept
LARGEST_FOR_BIAS = 2**21  # a mean needs fewer
CHUNK = 16  # samples
JUDGES = 32  # samples by which the outputs are judged
CHOSEN = "chosen"  # in the meta of a prepared model: what each step of its calibration did

Given = Mapping[str, tuple[Parts, Parts]]  # by layer: what it was given, and what it had before


@dataclass(frozen=True, kw_only=True)
class Step:
    """One choice of numbers, a row of the table `STEPS`."""

    name: str  # in the log, in the record of a calibration, and in the table of `fxq.tune`
    because: str  # the reason for its place
    # Return what is to be changed, None for nothing; the model stays as it was. Without it `fxq.tune` alone takes the step.
    find: Callable[[Run], Any] | None = None
    # Put what was found into the model, and return a few words about it, none where nothing changed.
    apply: Callable[[Run, Any], str] = lambda run, change: ""
    # Take back what the step of this name of an earlier calibration did, before it is found anew.
    undo: Callable[[Run, str], None] | None = None
    option: str | None = None  # the field of `fxq.Options` that turns it off (False)
    least: int = 0  # how many samples it takes at least, unless the option is True, or an earlier calibration has taken it
    has_work: Callable[[Run], bool] = lambda run: True  # whether the model has anything to choose
    sampled: bool = True  # whether it takes the samples that are kept, and not the batches
    # Values of `option` that `fxq.tune` tries for a calibrated model, each after a few words about it.
    remedies: Callable[[fx.GraphModule], Iterable[tuple[str, bool]]] | None = None
    # The function of `fxq.tuning` that does this by all samples, which `fxq.tune` tries too.
    learn: Callable[..., TuningResult] | None = None

    def is_wanted(self, run: Run) -> bool:
        """Return whether a run takes this step: its option is not off, and there is work, or what an earlier calibration did by it."""
        on = self.find is not None and (self.option is None or getattr(run.options, self.option) is not False)
        return on and (bool(run.before.given.get(self.name)) or self.has_work(run))


@dataclass(frozen=True)
class Kept:
    """The state that a calibration leaves on the model, so that a second one that goes on ends as one call with all batches would."""

    inputs: list[list[Any]] = field(default_factory=list)  # the model's inputs of the first batches
    samples: int = 0  # how many samples these have, and how many elements
    elements: int = 0
    seen: int = 0  # how many samples have gone by
    counts: int = 0  # what the observers have counted by then: if it is another number, something else has observed since
    given: Mapping[str, Given] = field(default_factory=dict)  # by step, what layers were given by these samples


@dataclass(eq=False)
class Run:
    """A run of steps on one prepared model: the batches, the samples kept from the batches, and a record of what each step did.

    Where batches were observed whose samples are not there (`lost`), what was done by them stays.

    taken         how many batches were taken, and the inputs of the first
    given         by step, what layers were given by samples, and what they had before
    record        by step, a few words about what it did
    """

    prepared: fx.GraphModule
    steps: Sequence[Step]
    batches: Iterable[Any] = ()  # what the caller passes; the model's inputs of each batch are in `inputs`, each taken once
    num_batches: int | None = None
    options: Options = DEFAULTS
    show: bool | None = False
    only_missing: bool = False  # whether tensors with a scale keep it
    method: Method | None = None  # by which ranges are chosen; all that was observed before then counts as observed in this run

    def __post_init__(self) -> None:
        self.several = self.options.distributed and dist.is_available() and dist.is_initialized()
        self.show = False if self.show is None and self.several and ranks.index() else self.show
        self.observed_before = counts(self.prepared) if self.method is None else {}
        counted, previous = _counts(self.prepared), self.prepared.__dict__.get(SAMPLES)
        self.kept: Kept = previous if previous is not None and previous.counts == counted else Kept(counts=counted)
        self.lost = counted > 0 and self.kept is not previous
        self.before, self.given = self.kept, dict(self.kept.given)
        self.taken, self.first_inputs, self.record = 0, list[Any](), dict[str, str]()
        wanted = first_batches(self.batches, self.num_batches), length(self.batches, self.num_batches)
        own = map(self.options.inputs, progress(*wanted, "calibrating", self.show))
        every = enumerate(ranks.of_all(own, self.prepared) if self.several else own)
        self.inputs: Iterator[list[Any]] = (model_inputs(self.prepared, batch, index) for index, batch in every)

    def perform(self) -> None:
        """Take the steps one after the other. Several ranks do the same work, on the batches of all."""
        if self.several:
            ranks.require_equal(self.prepared)
        for step in reversed(self.steps):
            if step.undo is not None and step.is_wanted(self):
                step.undo(self, step.name)
        for step in self.steps:
            if step.is_wanted(self):
                with timed(step.name):
                    change, before = self._change(step), _parts(self.prepared)
                    if change is not None:
                        self.record[step.name] = step.apply(self, change)
                    if change is not None and step.undo is not None:
                        self._note(step.name, before)
        if self.several:
            ranks.agree(self.prepared)
        self.prepared.meta[CHOSEN] = [f"{name}: {words}" for name, words in self.record.items() if words]
        logger.info("calibration chose: %s", "; ".join(self.prepared.meta[CHOSEN]))

    def _change(self, step: Step) -> Any:
        """Return what a step finds; None for a step that lacks samples."""
        asked = bool(step.option and getattr(self.options, step.option)) or bool(self.before.given.get(step.name))
        if step.sampled and not (self.kept.inputs and (asked or not step.least or self.kept.seen >= step.least)):
            return None
        assert step.find is not None
        return step.find(self)

    # ---- batches and samples ----

    def first_batch(self) -> list[Any] | None:
        """Return the model's inputs of the first batch, which stays among `inputs`; None without one."""
        first = list(itertools.islice(self.inputs, 1))
        self.inputs = _popped(first, self.inputs)
        return first[0] if first else None

    def take(self, inputs: Sequence[Any]) -> None:
        """Count the model's inputs of the next batch, and keep them if they are among the first samples."""
        count, elements = count_of(inputs, batch_axes(self.prepared)), sum(value.numel() for value in inputs if isinstance(value, Tensor))
        kept = replace(self.kept, seen=self.kept.seen + count)
        wanted = kept.samples < ENOUGH and kept.elements < LARGEST_KEPT and any(isinstance(value, Tensor) for value in inputs)
        wanted = wanted and any(step.sampled and step.is_wanted(self) for step in self.steps)
        if wanted or not self.taken:
            own = [value.clone() if isinstance(value, Tensor) else value for value in inputs]  # a loader may reuse its memory
            self.first_inputs = self.first_inputs or own
        if wanted:
            stored = [*(_beside(inputs, each) for each in kept.inputs), own]
            kept = replace(kept, inputs=stored, samples=kept.samples + count, elements=kept.elements + elements)
        self.kept = kept
        self.taken += 1

    def remember(self, *, ended: bool) -> None:
        """Store in the model the samples that the next calibration continues with; without `ended`, with the former record of weights."""
        changes = self.given if ended else self.before.given
        self.prepared.__dict__[SAMPLES] = replace(self.kept, given=changes, counts=_counts(self.prepared))

    @cached_property
    def few(self) -> Samples:
        """The samples, evenly spaced among all that are kept, by which biases are corrected: a mean learns little of each."""
        return Samples(_spread(self._chunks, self._count))

    @cached_property
    def held_out(self) -> list[list[Any]]:
        """The samples by which corrected biases are judged: `JUDGES` of `ENOUGH`, of fewer samples others than `few`."""
        chosen = {id(chunk) for chunk in self.few.chunks}
        others = _spread([chunk for chunk in self._chunks if id(chunk) not in chosen], self._count)
        if self.kept.samples >= ENOUGH:
            return _spread(self.few.chunks + others, max(JUDGES // self._size, 1))
        return others or [self.few.chunks[index] for index in self.few.judging]

    @property
    def judging(self) -> list[list[Any]]:
        """The samples by which ranges are judged."""
        return self.held_out if self.kept.samples >= ENOUGH else self.few.chunks

    @cached_property
    def judge(self) -> FloatOutputs:
        """The float outputs by which ranges are judged."""
        return FloatOutputs(self.prepared, self.judging)

    @property
    def _each(self) -> int:
        return max(self.kept.elements // max(self.kept.samples, 1), 1)

    @property
    def _size(self) -> int:
        return max(1, min(CHUNK, LARGEST_FOR_BIAS // (HELD_OUT_OF * self._each)))

    @property
    def _count(self) -> int:
        return max(HELD_OUT_OF, LARGEST_FOR_BIAS // (self._size * self._each))

    @cached_property
    def _chunks(self) -> list[list[Any]]:
        return cut(self.prepared, self.kept.inputs, self._size).chunks if self.kept.inputs else []

    # ---- what layers are given by samples, and have had before ----

    def _note(self, name: str, before: Mapping[str, Parts]) -> None:
        """Note which layers a step has changed: what each has since, and had before."""
        pairs = {layer: (now, before[layer]) for layer, now in _parts(self.prepared).items()}
        changed = {layer: pair for layer, pair in pairs.items() if any(new is not had for new, had in zip(*pair, strict=True))}
        self.given[name] = {**self.given.get(name, {}), **changed}

    def take_back(self, name: str) -> None:
        """Restore the weights of layers (except left-out ones) from before the step `name`; a part that was changed since then stays."""
        now, operators = _parts(self.prepared), quantized_operators(self.prepared)
        for layer, pair in self.given.get(name, {}).items():
            if not operators[layer].left_out:
                parts = (before if part is new else part for part, new, before in zip(now[layer], *pair, strict=True))
                operators[layer].weight_quantizer.put(tuple(parts))
        self.given[name] = {layer: pair for layer, pair in self.given.get(name, {}).items() if operators[layer].left_out}

    def warn_of_lost_samples(self) -> None:
        """Warn if layers are changed by samples, and the batches that were observed before have none here."""
        if self.lost and not self.only_missing and any(step.undo is not None and step.is_wanted(self) for step in self.steps):
            logger.warning(
                "this calibration goes on from batches whose samples are not there any more: weights are rounded, and biases corrected,"
                " by the samples of this call alone; to have what one call gives, calibrate a model that fxq.prepare has just returned"
            )

    def observed(self) -> dict[str, Quantizer]:
        """Return the quantizers that have observed anything in this run, by name."""
        there, before = owned_quantizers_by_name(self.prepared), self.observed_before
        return {name: each for name, each in there.items() if each.observer is not None and int(each.observer.count) > before.get(name, 0)}


def _popped(first: list[Any], others: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of `first`, removing each from the list, and then `others`; no reference to a yielded item is kept."""
    while first:
        yield first.pop()
    yield from others


def has_layers(run: Run) -> bool:
    """Return whether the model has operators with a constant weight."""
    return bool(weighted_nodes(run.prepared))


def _spread(chunks: list[list[Any]], count: int) -> list[list[Any]]:
    """Return `count` chunks, evenly spaced: neighbouring batches may show one scene."""
    return [chunks[index * len(chunks) // count] for index in range(count)] if count < len(chunks) else chunks


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


def counts(prepared: fx.GraphModule) -> dict[str, int]:
    """Return how many batches each observer has seen, by operator and index, without quantizers whose scale is `pending`."""
    there = {name: quantizer for name, quantizer in owned_quantizers_by_name(prepared).items() if not quantizer.pending}
    return {name: int(quantizer.observer.count) for name, quantizer in there.items() if quantizer.observer is not None}


def owned_quantizers_by_name(prepared: fx.GraphModule) -> dict[str, Quantizer]:
    """Return the quantizers of results and of what residuals are added to, by name."""
    return {
        f"{name}.{index}": quantizer
        for name, operator in quantized_operators(prepared).items()
        if not operator.plain
        for index, quantizer in enumerate(owned_quantizers(operator))
    }
