"""A search over observers, from one calibration; the vendor's tool has it as auto calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from torch import fx, nn

from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import ACTIVATION, Choice, Choices
from fxquant.accuracy.measure import FloatOutputs, Noise, best_of, decibels, outputs_of
from fxquant.accuracy.simulation import grid_for, rounded, taking_over
from fxquant.accuracy.walk import Samples
from fxquant.analysis.text import table
from fxquant.errors import ConfigurationError
from fxquant.numerics.grids import Grid
from fxquant.options import DEFAULTS, Options
from fxquant.quantization import observers as kinds
from fxquant.quantization.spec import OBSERVER, ActivationConfig, Chosen, QConfig, QConfigMapping
from fxquant.search.bit_widths import Work, work_of
from fxquant.search.sensitivity import METRIC, Metric, reference_of, score_of
from fxquant.support.arguments import Kind, checked
from fxquant.target import Target

OBSERVERS: tuple[Any, ...] = (
    *(kinds.HistogramObserver, kinds.MSEObserver),
    *map(kinds.LpObserver, (2.4, 3.0, 4.0)),
    *(kinds.MinMaxObserver, kinds.MovingAverageMinMaxObserver),
    *map(kinds.PercentileObserver, (99.999, 99.99, 99.9)),
    *map(kinds.ClipStdObserver, (4.0, 6.0)),
    *(kinds.KLObserver, kinds.MixObserver),
)


def _observers(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes):
        raise TypeError
    observers = tuple(OBSERVER.take(one) for one in value)
    if not observers:
        raise ValueError
    return observers


@dataclass(frozen=True)
class ObserverTrial:
    """The noise of each observer at the outputs, where one tensor alone is quantized.

    name    of the tensor
    noise   the noise to signal ratio of the outputs, by observer
    before  the observer that it has
    chosen  the one with clearly less noise than that, or else that
    """

    name: str
    noise: Mapping[str, float]
    before: str
    chosen: str


@dataclass(frozen=True, eq=False)
class ObserverSearch:
    """The result of `search_observers`; prints as a table.

    qconfig   the mapping with the observers that are best together
    prepared  the model prepared with it, in VALIDATE
    tensors   the noise of each observer, tensor by tensor
    measured  the noise at the integer model's outputs: with the original qconfig, the best observer per tensor, and each for all tensors
    scores    the metric of each of these; empty without a metric
    chosen    the name of the chosen one
    left_out  observers without the calibration statistics that they need
    """

    qconfig: QConfigMapping
    prepared: fx.GraphModule
    tensors: tuple[ObserverTrial, ...]
    measured: Mapping[str, float]
    scores: Mapping[str, float]
    chosen: str
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            (name, f"{decibels(noise):.2f} dB", f"{self.scores[name]:.4g}" if name in self.scores else "", "chosen" * (name == self.chosen))
            for name, noise in self.measured.items()
        ]
        names = list(dict.fromkeys(name for tensor in self.tensors for name in tensor.noise))
        each = [
            (tensor.name, *(f"{decibels(tensor.noise[name]):.1f}" if name in tensor.noise else "" for name in names), tensor.chosen)
            for tensor in self.tensors
        ]
        left_out = "".join(f"\nleft out, since calibration gathered nothing for it: {name}" for name in self.left_out)
        return f"{table(('observers', 'measured', 'metric', ''), rows)}\n\n{table(('tensor', *names, 'chosen'), each)}{left_out}"


@checked(observers=Kind("a list of observers: classes, or observers with settings", _observers), metric=METRIC)
def search_observers(
    model: nn.Module, batches: Any, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    observers: Sequence[Any] = OBSERVERS, metric: Metric | None = None, options: Options = DEFAULTS, show_progress: bool | None = None,
) -> ObserverSearch:  # fmt: skip
    """Choose for every tensor the observer with the least error at the outputs, from one calibration.

    Each tensor alone is quantized by each observer. The model with the best observer of each tensor, and models with one observer for all
    tensors, are then prepared and measured in integers, and the best of these is chosen: by `metric`, and then by the error of the
    outputs; the original qconfig is kept if none is better. Constant scales are not changed.

    Raises the errors of `prepare` and `calibrate`, and ConfigurationError for the checkpoint of another call.
    """
    return search(work_of(model, batches, target, qconfig, options, show_progress), observers, metric)


def search(work: Work, observers: Sequence[Any], metric: Metric | None) -> ObserverSearch:
    """Return the best observers for a model that is prepared and calibrated."""
    choices = Choices(work.prepared, ())
    tensors = [choice for choice in choices.values() if choice.kind == ACTIVATION]
    if not tensors:
        because = "every scale of this model is given, or demanded"
        raise ConfigurationError("no observer can be chosen", because=because, remedy="leave scales to calibration")
    named = {label(observer): observer for observer in observers}
    output = tensors[0].operators[0].output
    configs = {name: ActivationConfig(observer=observer) for name, observer in named.items()}
    served = {name: named[name] for name, config in configs.items() if taking_over(output, config) is not None}
    call = {"function": "search_observers", "observers": tuple(named), "metric": metric is not None}
    journal = Checkpoint(work.options.checkpoint, call_of(work.prepared, Samples(work.samples), **call), work.options.distributed)
    reference = reference_of(work.prepared, work.samples)

    tasks = {choice.name: partial(_trial, reference, choice, served) for choice in tensors}
    results = journal.gather(tasks, "observers", work.show)
    trials = [ObserverTrial(**results[choice.name]) for choice in tensors]
    configs = {trial.name: configs[trial.chosen] for trial in trials if trial.chosen != trial.before}
    mappings = {"as given": work.base}
    if configs:
        mappings["the best for each"] = choices.mapping(work.base, {}, configs)
    mappings |= {f"{name} for all": with_observer(work.base, observer) for name, observer in served.items()}

    @cache
    def together(name: str) -> fx.GraphModule:
        return work.prepared if name == "as given" else work.with_mapping(mappings[name])

    def judged(name: str) -> tuple[float, float | None]:
        model = together(name)
        return reference.noise(partial(outputs_of, model)).pooled, None if metric is None else score_of(metric, model)

    judgements = journal.gather({f"together: {name}": partial(judged, name) for name in mappings}, "observers together", work.show)
    measured = {name: judgements[f"together: {name}"][0] for name in mappings}
    scores = {name: score for name in mappings if (score := judgements[f"together: {name}"][1]) is not None}
    chosen = max(mappings, key=lambda name: (scores.get(name, 0.0), -measured[name]))
    left_out = tuple(name for name in named if name not in served)
    return ObserverSearch(mappings[chosen], together(chosen), tuple(trials), measured, scores, chosen, left_out)


def _trial(reference: FloatOutputs, choice: Choice, observers: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the noise of each observer for one tensor, an ObserverTrial as a dict; observers with the same grid are measured once."""
    quantizer = choice.operators[0].output
    before = label(quantizer.observer)
    measurements: dict[tuple[float, int], Noise] = {}
    noise = {}

    def measured(grid: Grid) -> Noise:
        with rounded({choice.name: choice}, {choice.name: grid}):
            return reference.noise(reference.float_form)

    for name, observer in observers.items():
        grid = grid_for(quantizer, choice.dtype, ActivationConfig(observer=observer))
        key = float(grid.scale), grid.zero_point
        if key not in measurements:
            measurements[key] = measured(grid)
        noise[name] = measurements[key]
    if before not in noise:
        noise[before] = measured(quantizer.grid)
    return asdict(ObserverTrial(choice.name, {name: each.pooled for name, each in noise.items()}, before, best_of(noise, before)))


_TELLING: Mapping[Any, str] = {kinds.PercentileObserver: "percentile", kinds.LpObserver: "p", kinds.ClipStdObserver: "deviations"}


def label(observer: Any) -> str:
    """Return a description of an observer: its class and settings."""
    instance = observer if isinstance(observer, kinds.Observer) else observer()
    usual = type(instance).__name__.removesuffix("Observer")
    setting = next((getattr(instance, name) for kind, name in _TELLING.items() if isinstance(instance, kind)), None)
    return usual if setting is None else f"{usual} {setting:g}"


def with_observer(mapping: QConfigMapping, observer: Any) -> QConfigMapping:
    """Return the mapping with this observer in every config."""

    def changed(chosen: Chosen) -> Chosen:
        if chosen is None or chosen.dynamic:  # nothing is observed for these
            return chosen
        read = None if chosen.input is None else replace(chosen.input, observer=observer)
        return replace(chosen, output=replace(chosen.output, observer=observer), input=read)

    rules: tuple[Mapping[Any, Chosen], ...] = (mapping.types, mapping.patterns, mapping.names, mapping.calls)
    return QConfigMapping(changed(mapping.default), *({key: changed(chosen) for key, chosen in each.items()} for each in rules))
