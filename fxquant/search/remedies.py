"""The remedies that `tune` tries, the cheapest first; each is a record.

A *recipe* describes how a model is made from the float model: the mapping that it is prepared with, and the methods that tune it then,
in order. A remedy proposes recipes, which `tune` builds, evaluates on held-out batches, and keeps or drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxquant.numerics.rounding import AdaptiveRounding
from fxquant.options import WIDTHS, Options
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import QConfigMapping
from fxquant.reporting.verdict import TRIED
from fxquant.search import mixed_precision, observer_search
from fxquant.search.budget import Budget
from fxquant.search.mixed_precision import Work
from fxquant.search.sensitivity import find
from fxquant.serialization.qconfig import read, written
from fxquant.tuning import adaround, correct_bias, distill, reconstruct
from fxquant.tuning.choices import Choices, bits


@dataclass(frozen=True)
class Recipe:
    """The mapping that a model is prepared with, the methods that tune it then, in order, and changed options of calibration."""

    mapping: QConfigMapping
    methods: tuple[str, ...] = ()
    corrections: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON holds it. Raises ExportError for what a file cannot name."""
        return {"mapping": written(self.mapping), "methods": list(self.methods), "corrections": dict(self.corrections)}

    @staticmethod
    def of(document: dict[str, Any]) -> Recipe:
        """The recipe of a document."""
        mapping = read(document["mapping"], "the checkpoint's mapping")
        return Recipe(mapping, tuple(document["methods"]), document["corrections"])


@dataclass(frozen=True, eq=False)
class State:
    """The state that a remedy starts from: the float model, calibrated as it was given, the best recipe so far, and arguments of `tune`."""

    work: Work
    recipe: Recipe
    budget: Budget | None
    steps: int

    def untuned(self) -> Work:
        """Return the work with the best mapping so far, before any method."""
        mapping, options = self.recipe.mapping, replace(self.work.options, **self.recipe.corrections)
        prepared, seen = self.work.with_mapping(mapping, options), self.work.seen_with(options)
        return replace(self.work, prepared=prepared, base=mapping, seen=seen, options=options)


Proposals = Iterator[tuple[str, Recipe]]


@dataclass(frozen=True)
class Remedy:
    """One way to lose less.

    name     as the report calls it
    propose  recipes to judge, with what each is in words, one after the other until the drop is within the tolerance; nothing where
             there is nothing to try
    """

    name: str
    propose: Callable[[State], Proposals]


def _observers(state: State) -> Proposals:
    """The observer that is best for each tensor, and the best one for all."""
    found = observer_search.search(state.untuned(), observer_search.OBSERVERS, None)
    if found.chosen != "as given":
        yield found.chosen, replace(state.recipe, mapping=found.qconfig)


def _sixteen(state: State) -> Proposals:
    """Sixteen bits for the most sensitive tensors and weights: one, two, four, …, a quarter of them at most."""
    if state.budget is not None:
        return
    work = state.untuned()
    choices = Choices(work.prepared, WIDTHS)
    known = find(work.prepared, work.samples, replace(work.options, measured=False, widths=WIDTHS), work.show)
    gains = {}
    for tensor in known.tensors:
        wide = [dtype for dtype in tensor.loss if bits(dtype) == 16]
        if wide and tensor.dtype != wide[0]:
            gains[tensor.name] = tensor.loss[tensor.dtype] - tensor.loss[wide[0]], wide[0]
    ranked = sorted(gains, key=lambda name: gains[name][0], reverse=True)
    count = 1
    while count <= max(1, len(choices) // 4) and count <= len(ranked):
        dtypes = {name: gains[name][1] for name in ranked[:count]}
        yield f"int16 for {', '.join(dtypes)}", replace(state.recipe, mapping=choices.mapping(work.base, dtypes))
        count *= 2


def _within_budget(state: State) -> Proposals:
    """The dtypes that are best within the budget."""
    if state.budget is not None:
        found = mixed_precision.search(state.untuned(), state.budget, None)
        yield found.chosen.name, replace(state.recipe, mapping=found.qconfig)


def _with(state: State, **corrections: bool) -> Recipe:
    return replace(state.recipe, corrections={**state.recipe.corrections, **corrections})


def _bias_correction(state: State) -> Proposals:
    """No bias correction, where calibration made one; and one by all samples."""
    operators = quantized_operators(state.untuned().prepared).values()
    if any(operator.weight_quantizer.correction is not None for operator in operators):
        yield "off", _with(state, correct_bias=False)
    yield "by all samples", replace(state.recipe, methods=(*state.recipe.methods, "bias correction"))


def _rounding(state: State) -> Proposals:
    """Weights of every dtype rounded by samples; and to the nearest, where calibration rounded some by samples."""
    operators = quantized_operators(state.untuned().prepared).values()
    yield "by samples, all weights", _with(state, round_weights=True)
    if any(isinstance(operator.weight_quantizer.rounding, AdaptiveRounding) for operator in operators):
        yield "to the nearest", _with(state, round_weights=False)


def _equalization(state: State) -> Proposals:
    """No powers of two for channels, where calibration chose some."""
    operators = quantized_operators(state.untuned().prepared).values()
    if any(operator.factors is not None and operator.factors.active for operator in operators):
        yield "off", _with(state, equalize=False)


Tuner = Callable[[fx.GraphModule, list[list[Any]], int, Options, bool | None], Any]  # model, samples, steps, options, show progress


def _learning(method: Callable[..., Any]) -> Tuner:
    return lambda model, samples, steps, options, show: method(model, samples, steps=steps, options=options, show_progress=show)


METHODS: dict[str, Tuner] = {
    "bias correction": lambda model, samples, _, options, show: correct_bias(
        model, samples, options=replace(options, checkpoint=None), show_progress=show
    ),
    "distillation": _learning(distill),
    "AdaRound": _learning(adaround),
    "reconstruction": _learning(reconstruct),
}


def _method(name: str) -> Remedy:
    def propose(state: State) -> Proposals:
        yield f"{state.steps} steps", replace(state.recipe, methods=(*state.recipe.methods, name))

    return Remedy(name, propose)


_PROPOSALS: dict[str, Callable[[State], Proposals]] = {
    "observers": _observers,
    "bias correction": _bias_correction,
    "rounding of weights": _rounding,
    "equalization": _equalization,
    "16 bits": _sixteen,
    "mixed precision": _within_budget,
}
REMEDIES: tuple[Remedy, ...] = tuple(Remedy(name, _PROPOSALS[name]) if name in _PROPOSALS else _method(name) for name in TRIED)
BUDGET = REMEDIES[TRIED.index("mixed precision")]
