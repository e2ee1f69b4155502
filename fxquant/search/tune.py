"""One tuner: remedies from the cheapest on, each a record, until the drop is within the tolerance.

A *recipe* describes how a model is made from the float model: the mapping that it is prepared with, and the methods that tune it then,
in order. A remedy proposes recipes, which `tune` builds, evaluates on held-out batches, and keeps or drops.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxquant.accuracy import STEPS
from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import ACTIVATION, Choices
from fxquant.accuracy.measure import decibels, outputs_of
from fxquant.accuracy.ranks import digest
from fxquant.accuracy.simulation import taking_over
from fxquant.accuracy.step import Step
from fxquant.accuracy.walk import Samples, inputs_of
from fxquant.analysis.recording import still
from fxquant.analysis.text import table
from fxquant.errors import CalibrationError
from fxquant.options import DEFAULTS, WIDTHS, Options
from fxquant.prepared.batches import as_batches
from fxquant.quantization import observers as kinds
from fxquant.quantization.spec import ActivationConfig, Chosen, QConfig, QConfigMapping
from fxquant.quantization.spec import State as OperatorState
from fxquant.reporting.verdict import TRIED
from fxquant.search import bit_widths
from fxquant.search.bit_widths import BUDGET, Budget, Work, costs, fits, work_of
from fxquant.search.sensitivity import METRIC, Metric, find, reference_of, score_of
from fxquant.serialization.qconfig import read, written
from fxquant.support import logger
from fxquant.support.arguments import COUNT, FINITE, Kind, checked, such
from fxquant.target import Target


@dataclass(frozen=True)
class Recipe:
    """The mapping that a model is prepared with, the methods that tune it then, in order, and changed options of calibration."""

    mapping: QConfigMapping
    methods: tuple[str, ...] = ()
    corrections: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the recipe as values for JSON. Raises ExportError for classes and functions that a file cannot name."""
        return {"mapping": written(self.mapping), "methods": list(self.methods), "corrections": dict(self.corrections)}

    @staticmethod
    def of(document: dict[str, Any]) -> "Recipe":
        """Return the recipe of a document."""
        return Recipe(read(document["mapping"], "the checkpoint's mapping"), tuple(document["methods"]), document["corrections"])


@dataclass(frozen=True, eq=False)
class State:
    """The state that a remedy starts from: the calibrated float model, the best recipe so far, and arguments of `tune`."""

    work: Work
    recipe: Recipe
    budget: Budget | None
    steps: int

    def untuned(self) -> Work:
        """Return the work with the best mapping so far, before any method."""
        mapping, options = self.recipe.mapping, replace(self.work.options, **self.recipe.corrections)
        prepared, observed = self.work.with_mapping(mapping, options), self.work.seen_with(options)
        return replace(self.work, prepared=prepared, base=mapping, seen=observed, options=options)


# Recipes to judge, with what each is in words, one after the other until the drop is within the tolerance; none where there is nothing to
# try.
Proposals = Iterator[tuple[str, Recipe]]
Remedy = Callable[[State], Proposals]  # one way to lose less


OBSERVERS: Mapping[str, Any] = {
    **{"Histogram": kinds.HistogramObserver, "MSE": kinds.MSEObserver, "KL": kinds.KLObserver},
    **{"MinMax": kinds.MinMaxObserver, "MovingAverageMinMax": kinds.MovingAverageMinMaxObserver},
    **{f"Lp {p:g}": kinds.LpObserver(p) for p in (2.4, 3.0, 4.0)},
    **{f"Percentile {percentile:g}": kinds.PercentileObserver(percentile) for percentile in (99.999, 99.99, 99.9)},
    **{f"ClipStd {deviations:g}": kinds.ClipStdObserver(deviations) for deviations in (4.0, 6.0)},
}


def with_observer(mapping: QConfigMapping, observer: Any) -> QConfigMapping:
    """Return the mapping with this observer in every config."""

    def changed(chosen: Chosen) -> Chosen:
        if chosen is None or chosen.dynamic:  # nothing is observed for these
            return chosen
        read = None if chosen.input is None else replace(chosen.input, observer=observer)
        return replace(chosen, output=replace(chosen.output, observer=observer), input=read)

    rules: tuple[Mapping[Any, Chosen], ...] = (mapping.types, mapping.patterns, mapping.names, mapping.calls)
    return QConfigMapping(changed(mapping.default), *({key: changed(chosen) for key, chosen in each.items()} for each in rules))


def _observers(state: State) -> Proposals:
    """Propose the observer that leaves the least noise on the samples of calibration where all tensors have it."""
    work = state.untuned()
    reference = reference_of(work.prepared, work.samples)
    observed = [choice.operators[0].output for choice in Choices(work.prepared, ()).values() if choice.kind == ACTIVATION]
    served = [
        name for name, each in OBSERVERS.items() if observed and taking_over(observed[0], ActivationConfig(observer=each)) is not None
    ]
    mappings = {f"{name} for all": with_observer(work.base, OBSERVERS[name]) for name in served}

    def noise_of(model: fx.GraphModule) -> float:
        return reference.noise(partial(outputs_of, model)).pooled

    noise = {"as given": noise_of(work.prepared)} | {name: noise_of(work.with_mapping(each)) for name, each in mappings.items()}
    best = min(noise, key=noise.__getitem__)
    if best in mappings:
        yield best, replace(state.recipe, mapping=mappings[best])


def _sixteen(state: State) -> Proposals:
    """Propose sixteen bits for the most sensitive tensors and weights: one, two, four, …, at most a quarter of all choices."""
    if state.budget is not None:
        return
    work = state.untuned()
    choices = Choices(work.prepared, WIDTHS)
    gains = find(work.prepared, work.samples, replace(work.options, measured=False, widths=WIDTHS), work.show).gains(16)
    for power in range(min(max(1, len(choices) // 4), len(gains)).bit_length()):
        dtypes = {name: gains[name][0] for name in list(gains)[: 2**power]}
        yield f"int16 for {', '.join(dtypes)}", replace(state.recipe, mapping=choices.mapping(work.base, dtypes))


def _within_budget(state: State) -> Proposals:
    """Propose the best dtypes within the budget."""
    if state.budget is not None:
        result = bit_widths.search(state.untuned(), state.budget, None)
        yield result.chosen.name, replace(state.recipe, mapping=result.qconfig)


def _step(step: Step, state: State) -> Proposals:
    """Propose recipes with each other value of the step's option, and a recipe that runs the step as a method after calibration."""
    recipe = state.recipe
    for words, value in () if step.remedies is None else step.remedies(state.untuned().prepared):
        assert step.option is not None
        yield words, replace(recipe, corrections={**recipe.corrections, step.option: value})
    if step.learn is not None:
        words = f"{state.steps} steps" if step.find is None else "by all samples"
        yield words, replace(recipe, methods=(*recipe.methods, step.name))


_WIDER: dict[str, Remedy] = {"observers": _observers, "16 bits": _sixteen, "mixed precision": _within_budget}
_STEPS = {step.name: step for step in STEPS}
REMEDIES: dict[str, Remedy] = {name: _WIDER.get(name) or partial(_step, _STEPS[name]) for name in TRIED}
WITHIN_BUDGET = "mixed precision"
WITHIN = 0.01  # of the float model's score, where no tolerance is given


@dataclass(frozen=True)
class TuneStep:
    """One trial of `tune`.

    remedy  the name of the remedy
    tried   a description of the trial
    score   the metric
    noise   the noise-to-signal ratio of the outputs on held-out batches
    gain    the score minus the best one before
    kept    whether the model keeps it: if the score is better, or the same with less noise
    """

    remedy: str
    tried: str
    score: float
    noise: float
    gain: float
    kept: bool


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of `tune`; prints as a table of the steps that were tried.

    prepared   the best model, in state VALIDATE
    qconfig    the mapping that it was prepared with
    methods    the methods that tuned it then, in order
    corrections  the changed fields of `fxq.Options` for calibration
    steps      the steps that were tried, in order
    reference  the float model's score
    score      the best model's score
    tolerance  the largest acceptable drop
    """

    prepared: fx.GraphModule
    qconfig: QConfigMapping
    methods: tuple[str, ...]
    steps: tuple[TuneStep, ...]
    reference: float
    score: float
    tolerance: float
    corrections: Mapping[str, bool] = field(default_factory=dict)

    @property
    def drop(self) -> float:
        """The difference of the float model's score and the score."""
        return self.reference - self.score

    @property
    def reached(self) -> bool:
        """Whether the drop is within the tolerance."""
        return self.drop <= self.tolerance

    def __str__(self) -> str:
        rows = []
        for step in self.steps:
            figures = f"{step.score:.5g}", f"{self.reference - step.score:+.4g}", f"{decibels(step.noise):.2f} dB", f"{step.gain:+.4g}"
            rows.append((step.remedy, *figures, "kept" if step.kept else "dropped", step.tried))
        within = f"{'within' if self.reached else 'beyond'} the tolerance of {self.tolerance:.4g}"
        head = ("remedy", "score", "drop", "SQNR", "gain", "", "what")
        return f"float {self.reference:.5g}, tuned {self.score:.5g}: a drop of {self.drop:.4g}, {within}\n{table(head, rows)}"


@checked(
    metric=METRIC,
    budget=Kind(BUDGET.right, BUDGET.take).or_none("none"),
    tolerance=such("a finite number from 0 on", FINITE.take, lambda value: value >= 0).or_none("one hundredth of the float model's score"),
    steps=COUNT,
)
def tune(
    model: nn.Module, batches: Any, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    metric: Metric | None = None, budget: Budget | None = None, tolerance: float | None = None, steps: int = 1000,
    options: Options = DEFAULTS, show_progress: bool | None = None,
) -> Tuned:  # fmt: skip
    """Quantize a model so that it loses no more than the tolerance, trying one remedy after the other, the cheapest first.

    Three of four batches are for calibration and training; every fourth is held out. The score is `metric`, for instance the accuracy on a
    validation set; by default it is minus the relative root mean square error of the outputs in percent, 0 for the float model. A recipe
    of a remedy is kept if its score is higher, or equal with less error on the held-out batches. The search ends when the score is at
    most `tolerance` below the float model's.

    The remedies are, in this order: calibration with the qconfig; if that exceeds a `budget`, the best dtypes within it; 32-bit
    outputs of the layers whose sums the model returns; other observers; the corrections of calibration, off and on: biases, the rounding
    of weights by samples, and equalization; int16 for the most sensitive tensors, or, with a budget, which leaves out 32-bit outputs and
    int16, the best dtypes within it; distillation, in `steps` for the model; AdaRound and block reconstruction, in `steps` for each layer
    or block.

    Raises CalibrationError for fewer than two batches, and the errors of `prepare`, `calibrate` and, with a budget, `mixed_precision`.
    """
    every = list(as_batches(batches))
    if len(every) < 2:
        because = f"`batches` yielded {len(every)}; most calibrate and teach, and every fourth is held out to judge"
        remedy = "pass at least 2 batches, or smaller ones: torch.split(images, 16)"
        raise CalibrationError("there is too little to tune with", because=because, remedy=remedy)
    split = Samples(every)
    learning, judged = ([every[index] for index in part] for part in (split.learning, split.judging))
    work = work_of(model, learning, target, qconfig, replace(options, checkpoint=None), show_progress)
    judging = inputs_of(work.prepared, judged, None, options)
    call = {"function": "tune", "steps": steps, "seed": options.seed, "metric": metric is not None, "budget": budget}
    about = call_of(work.prepared, Samples([*work.samples, *judging]), **call, widths=options.widths)
    journal = Checkpoint(options.checkpoint, about)
    budget = None if budget is None else budget.on(work.prepared.meta["target"])
    return _Session(work, judging, journal, steps, budget, metric).run(tolerance)


class _Session:
    """One search: the best recipe so far, and the trials."""

    def __init__(
        self, work: Work, judging: list[list[Any]], journal: Checkpoint, steps: int, budget: Budget | None, metric: Metric | None
    ) -> None:
        self.work, self.journal, self.steps, self.budget, self.metric = work, journal, steps, budget, metric
        self.judge = reference_of(work.prepared, judging)
        self.recipe = Recipe(work.base)
        self.made: fx.GraphModule | None = work.prepared
        self.best: TuneStep | None = None
        self.tried: list[TuneStep] = []

    def run(self, tolerance: float | None) -> Tuned:
        """Try one remedy after the other until the drop is within the tolerance."""
        reference = self.journal.at("float", self._float_score)
        enough = tolerance if tolerance is not None else WITHIN * (abs(reference) if self.metric is not None else 100.0)
        choices = Choices(self.work.prepared)
        too_large = self.budget is not None and not fits(costs(choices, choices.dtypes(), self.budget.speed), self.budget)
        self._try("calibration", lambda state: iter([("as the qconfig says", state.recipe)]), reference - enough, refused=too_large)
        for name in sorted(REMEDIES, key=lambda name: name != WITHIN_BUDGET) if too_large else REMEDIES:
            if self.best is None or self.best.score < reference - enough:
                self._try(name, REMEDIES[name], reference - enough)
        assert self.best is not None
        model, best = self._built(self.recipe), self.recipe
        return Tuned(model, best.mapping, best.methods, tuple(self.tried), reference, self.best.score, enough, best.corrections)

    def _float_score(self) -> float:
        with still(self.work.prepared, OperatorState.FLOAT):
            return 0.0 if self.metric is None else score_of(self.metric, self.work.prepared)

    def _try(self, name: str, remedy: Remedy, enough: float, refused: bool = False) -> None:
        """Evaluate the recipes that a remedy proposes, and keep the best one."""
        document = self.journal.at(name, lambda: {"tried": [], "done": False})
        for entry in document["tried"]:
            self._take(TuneStep(**entry["step"]), Recipe.of(entry["recipe"]), None)
        if not document["done"]:
            for index, (label, recipe) in enumerate(remedy(State(self.work, self.recipe, self.budget, self.steps))):
                if index < len(document["tried"]):
                    continue
                model = self._built(recipe)
                noise = self.judge.noise(partial(outputs_of, model)).pooled
                score = -100 * noise**0.5 if self.metric is None else score_of(self.metric, model)
                gain = 0.0 if self.best is None else score - self.best.score
                better = self.best is None or (score, -noise) > (self.best.score, -self.best.noise)
                step = TuneStep(name, label, score, noise, gain, better and not refused)
                self._take(step, recipe, model)
                if self.journal.path is not None:
                    document["tried"].append({"step": asdict(step), "recipe": recipe.document()})
                    self.journal.write()
                if self.best is not None and self.best.score >= enough:
                    break
            document["done"] = True
            self.journal.write()

    def _take(self, step: TuneStep, recipe: Recipe, model: fx.GraphModule | None) -> None:
        self.tried.append(step)
        logger.info("tune: %s (%s): score %.5g, %s", step.remedy, step.tried, step.score, "kept" if step.kept else "dropped")
        if step.kept:
            self.best, self.recipe, self.made = step, recipe, model

    def _built(self, recipe: Recipe) -> fx.GraphModule:
        """Return the model of a recipe, built on the best model so far if the recipe only appends methods to it."""
        if self.made is None and recipe != self.recipe:
            self.made = self._built(self.recipe)
        if self.made is not None and recipe == self.recipe:
            return self.made
        applied = self.recipe.methods
        same = replace(recipe, methods=applied) == self.recipe
        if self.made is not None and same and recipe.methods[: len(applied)] == applied:
            model = copy.deepcopy(self.made)
        else:
            model, applied = self.work.with_mapping(recipe.mapping, replace(self.work.options, **recipe.corrections)), ()
        for count in range(len(applied), len(recipe.methods)):
            part = replace(recipe, methods=recipe.methods[: count + 1])
            step, options = _STEPS[part.methods[-1]], replace(self.work.options, checkpoint=self._file(part))
            assert step.learn is not None
            steps = {"steps": self.steps} if step.find is None else {}  # a step of calibration is not learned in steps
            step.learn(model, self.work.samples, **steps, options=options, show_progress=self.work.show)
        if recipe == self.recipe:
            self.made = model
        return model

    def _file(self, recipe: Recipe) -> str | None:
        """Return the path of the checkpoint of a recipe's last method; None without a checkpoint."""
        if self.journal.path is None:
            return None
        text = torch.frombuffer(bytearray(repr(recipe.document()).encode()), dtype=torch.uint8)
        return f"{self.journal.path}.{digest([text])}"
