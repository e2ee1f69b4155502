"""Comparison of two forms of a model tensor by tensor: errors, causes, and advice."""

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rich.table import Table
from torch import Tensor, fx

from fxquant.accuracy.measure import Parts, is_real
from fxquant.accuracy.result import as_html, as_text
from fxquant.analysis.layers import GRAPH, layers, recurrent_parts
from fxquant.analysis.recording import Facts, Form, GraphForm, Values
from fxquant.errors import Interrupted
from fxquant.ir.graph import stage_of
from fxquant.numerics.grids import EVERYTHING
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, first_batches, length, model_inputs, no_batches
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import State
from fxquant.reporting.advice import Advice, advise, grid_text, held_together, of_parts, quiet_channels
from fxquant.reporting.effects import Effects, shifted
from fxquant.reporting.forms import form_of
from fxquant.reporting.statistics import LayerComparison, Steps, TensorStatistics, in_decibels, row
from fxquant.reporting.tensor_rules import Cures, Judged
from fxquant.reporting.verdict import Verdict, causes_of, verdict_on
from fxquant.support.arguments import COUNT, FLAG, POSITIVE, Kind, checked, such
from fxquant.support.progress import in_one_piece, progress


def pairs(a: Form, b: Form) -> dict[str, str]:
    """Map the name of every tensor of `b` that `a` has to its name in `a`, in the order of `b`.

    In a graph that was not prepared it is the last of the nodes that became the one; of several that one became a part of, the last has it.
    """
    order = {name: index for index, name in enumerate([*a.input_names, *a.tensors])}
    holders = {other: name for name, entry in b.facts.items() for other in entry.fused}
    names = {}
    for name, facts in b.facts.items():
        if name in a.facts and a.facts[name].fused == facts.fused:
            names[name] = name
            continue
        last = max([each for each in (name, *facts.fused, facts.reads) if each in order], key=order.__getitem__, default=None)
        if last is not None and holders.get(last, name) == name:
            names[name] = last
    return names


def shift(a: Form, b: Form, name: str, reference: str) -> Tensor | None:
    """Return the exponents by which `a`'s tensor is to be multiplied to be on the scale of `b`'s; None where they are on the same."""
    mine, theirs = a.exponents.get(reference), b.exponents.get(name)
    if mine is None or theirs is None:
        return theirs if mine is None else -mine
    difference = theirs - mine
    return difference if bool(difference.any()) else None


class Reference(NamedTuple):
    """A tensor that another is compared with: the form that has it, its name there, and the exponents that it is multiplied by 2 to."""

    form: Form
    name: str
    factors: Tensor | None = None


class Pairing:
    """Two forms, and the pairs of their tensors.

    left, right  the forms; the left one is the reference
    forms        the forms with references: the left one, and, if there is one, the prepared model in float, for parts of recurrences
    """

    def __init__(self, left: Form, right: Form, prepared: fx.GraphModule | None) -> None:
        self.left, self.right, self.forms = left, right, [left]
        references = {name: Reference(left, other, shift(left, right, name, other)) for name, other in pairs(left, right).items()}
        self.parts: frozenset[str] = frozenset()  # the names of parts of recurrences that the left form does not have
        self.limits: dict[str, tuple[float, float]] = {}  # the interval of a tensor's values that its readers distinguish
        # The statistics of each pair by the right form's name, of each output, and of each part of an output.
        self.seen: dict[str, TensorStatistics] = {}
        self.outputs: Parts | None = None  # the parts of outputs, from the first batch on
        model = right.model if isinstance(right, GraphForm) else None
        if model is not None:
            self.parts = recurrent_parts(layers(model)) & right.facts.keys() - references.keys()
            prepared = model if stage_of(model) == "PREPARED" else prepared
        self.whole = prepared or model  # the graph from which parts of outputs are read, or None
        operators = {} if prepared is None else quantized_operators(prepared)
        if self.parts and prepared is not None and left.real:
            inner = GraphForm(prepared, State.FLOAT)
            self.forms.append(inner)
            for name in self.parts & inner.facts.keys():
                references[name] = Reference(inner, name, shift(inner, right, name, name))
                if (steps := Steps.of(right.facts[name].grid)) is not None and operators[name].output.observer is None:
                    self.limits[name] = steps.low * steps.scale, steps.high * steps.scale
        # For every name of the right form its reference.
        self.pairs = {name: references[name] for name in right.facts if name in references}
        for name, operator in operators.items():
            if operator.observed != EVERYTHING and name in references and references[name].factors is None:
                self.limits[name] = operator.observed

    def add(self, batch: Any, index: int) -> tuple[list[Any], Values]:
        """Take one batch into account; returns the inputs of the left form, and the values of the right one."""
        inputs, mine = list[Any](), dict[Form, Values]()
        for form in reversed(self.forms):
            inputs = form.inputs(batch, index)
            mine[form] = form.values(inputs, [pair.name for pair in self.pairs.values() if pair.form is form])
        theirs = self.right.values(self.right.inputs(batch, index), list(self.pairs))
        with in_one_piece():
            for name, value in theirs.items():
                pair = self.pairs.get(name, Reference(self.left, name))
                reference = mine[pair.form].get(pair.name)
                if reference is None or reference.shape != value.shape or reference.is_complex():
                    continue
                if name in self.limits:
                    reference, value = (each.clamp(*self.limits[name]) for each in (reference, value))
                if name not in self.seen:
                    facts = self.right.facts.get(name)
                    axis = None if reference.dim() < 2 else 1 if reference.dim() > 3 else -1  # of channels: after the batch in maps
                    self.seen[name] = TensorStatistics(None if facts is None else facts.grid, axis)
                self.seen[name].add(shifted(reference, pair.factors), value)
            for name, reference, value in self._parts(batch, index, mine[self.left], theirs):
                self.seen.setdefault(name, TensorStatistics(None, None)).add(reference, value)
        return inputs, theirs

    def _parts(self, batch: Any, index: int, mine: Values, theirs: Values) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name, the reference and the value of each part of a concatenated output."""
        if self.whole is None:
            return
        if self.outputs is None:
            state = State.FLOAT if stage_of(self.whole) == "PREPARED" else None
            self.outputs = Parts(self.whole, model_inputs(self.whole, batch, index), state)
        names = [name for name, value in theirs.items() if name.startswith("output ") and is_real(value) and is_real(mine.get(name))]
        same = all(mine[name].shape == theirs[name].shape for name in names)
        if not same or len(names) != len(self.outputs.labels):
            return
        both = [self.outputs.of([side[name] for name in names]) for side in (mine, theirs)]
        for name, references, values in zip(names, *both, strict=True):
            for (number, reference), (_, value) in zip(references, values, strict=True) if len(references) > 1 else ():
                source = self.outputs.names.get(number, "constant").removesuffix("_dequantize")
                yield f"{name} (%{source})", reference, value

    def effects(self, inputs: list[Any], values: Values) -> Effects:
        """Return the effects of errors of single tensors on the outputs, on one batch."""
        others = {
            pair.name: shifted(value, None if pair.factors is None else -pair.factors)
            for name, value in values.items()
            if (pair := self.pairs.get(name)) is not None and pair.form is self.left
        }
        results = {int(name.removeprefix("output ")): value for name, value in values.items() if name.startswith("output ")}
        assert isinstance(self.left, GraphForm)
        return Effects(self.left, inputs, others, results, self.outputs)

    def judged(self) -> list[Judged]:
        """Return the pairs in the order of the right form."""
        return [
            Judged(name, self.right.facts[name], self.seen[name], pair.name, pair.name in self.left.input_names, pair.factors)
            for name, pair in self.pairs.items()
            if name in self.seen
        ]

    def of_left(self, tensors: Iterable[Judged]) -> list[Judged]:
        """Return the tensors whose reference is in the left form."""
        return [tensor for tensor in tensors if self.pairs[tensor.name].form is self.left]


WRITER = such(
    "a SummaryWriter of torch.utils.tensorboard",
    lambda value: value,
    lambda value: all(callable(getattr(value, name, None)) for name in ("add_scalar", "add_text")),
)
SHOWN = 20  # layers in the text
NO_ADVICE = "no advice about a single layer: none stands out"


@dataclass(frozen=True)
class Comparison(Mapping[str, LayerComparison]):
    """The result of `compare`: a layer by its name, in the order they run; prints as a table of the worst, and the advice.

    labels      names of the two forms
    layers      a row for each tensor that both forms have; of a tensor in a loop at all steps
    outputs     a row for each output
    verdict     the grade of the outputs, and the composition of their noise if no single layer dominates; None if the models return
                no floating-point tensors
    batches     the number of batches
    statistics  the statistics of each tensor, for histograms
    hidden      tensors inside of recurrent layers that are not compared, since no prepared model was given
    """

    labels: tuple[str, str]
    layers: tuple[LayerComparison, ...]
    outputs: tuple[LayerComparison, ...]
    advice: tuple[Advice, ...]
    batches: int
    statistics: Mapping[str, TensorStatistics] = field(repr=False)
    verdict: Verdict | None = None
    hidden: int = 0

    def __getitem__(self, name: str) -> LayerComparison:
        return {layer.name: layer for layer in (*self.layers, *self.outputs)}[name]

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @checked(n=POSITIVE)
    def worst(self, n: int = 10) -> tuple[LayerComparison, ...]:
        """Return the n worst layers: by measured effect on the outputs, then by local error."""
        return tuple(sorted(self.layers, key=_badness)[:n])

    def __rich__(self) -> Table:
        heads = ("layer", "grid", "cosine", "SQNR", "own SQNR", "steps", "clipped", "to zero", "range", "error is")
        table = Table(*heads, title=f"{self.labels[1]} against {self.labels[0]}, {self.batches} batches", title_justify="left")
        for layer in (*self.worst(SHOWN), *self.outputs) if self.layers else self.outputs:
            ratios = (in_decibels(layer.sqnr), in_decibels(layer.own))
            numbers = (*ratios, _short(layer.steps), *(_short(100 * share, "{:.2g} %") for share in (layer.clipped, layer.zeroed)))
            table.add_row(layer.name, grid_text(layer.grid), f"{layer.cosine:.5f}", *numbers, _short(layer.reach), layer.error)
        return table

    def __str__(self) -> str:
        lines = [] if self.verdict is None else [str(self.verdict)]
        lines.append(as_text(self.__rich__()))
        if len(self.layers) > SHOWN:
            lines.append(f"{len(self.layers) - SHOWN} more layers, with less effect")
        if self.hidden:
            lines.append(f"{self.hidden} tensors inside of recurrent layers are not compared: pass prepared=, the prepared model")
        if not self.layers:
            lines.append("no tensor is in both forms: are they of one model?")
        lines += [str(each) for each in self.advice] or [NO_ADVICE]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        verdict = "" if self.verdict is None else "".join(f"<p>{html.escape(line)}</p>" for line in self.verdict.lines)
        texts = [(html.escape(text) for text in (each.layer, each.cause, each.cure)) for each in self.advice]
        advice = "".join(f"<li><b>{layer}</b>: {cause}<br><i>{cure}</i></li>" for layer, cause, cure in texts)
        return verdict + as_html(self.__rich__()) + (f"<p>Advice</p><ol>{advice}</ol>" if advice else f"<p>{NO_ADVICE}</p>")

    @checked(writer=WRITER, step=COUNT)
    def write_tensorboard(self, writer: Any, step: int = 0) -> None:
        """Write a scalar for each figure of each layer, and the advice, at the global step `step`.

        `writer` is a SummaryWriter of torch.utils.tensorboard, or anything with its methods.
        """
        for layer in (*self.layers, *self.outputs):
            for figure in FIGURES:
                value = getattr(layer, figure)
                if math.isfinite(value):
                    writer.add_scalar(f"{figure}/{layer.name}", value, step)
        if self.verdict is not None:
            writer.add_text("verdict", "\n\n".join(self.verdict.lines), step)
        writer.add_text("advice", "\n\n".join(map(str, self.advice)) or "no advice", step)


FIGURES = ("sqnr", "own", "cosine", "mse", "steps", "clipped", "zeroed", "reach", "effect")


def _badness(layer: LayerComparison) -> tuple[float, float]:
    return (-layer.effect if not math.isnan(layer.effect) else 0.0, layer.own if not math.isnan(layer.own) else layer.sqnr)


def _short(value: float, form: str = "{:.3g}") -> str:
    return "" if math.isnan(value) else form.format(value)


def _states(value: Any) -> tuple[Any, Any]:
    first, second = value
    return tuple(state if state is None else State(state) for state in (first, second))  # type: ignore[return-value]


PREPARED = such("a prepared model", GRAPH.take, lambda model: stage_of(model) == "PREPARED").or_none("its parts are not looked at")
STATES = Kind("two states, or None for each, of the first model and of the second", _states)


@checked(advice=FLAG, states=STATES, prepared=PREPARED)
def compare(
    a: Any, b: Any, batches: Any, *, states: tuple[State | str | None, State | str | None] = (None, None), advice: bool = True,
    prepared: fx.GraphModule | None = None, num_batches: int | None = None, options: Options = DEFAULTS, show_progress: bool | None = None,
) -> Comparison:  # fmt: skip
    """Compute the error of every tensor of `b` against that of `a`, the reference, and give advice.

    Both are any form of one model: a float model or its traced graph, a prepared model, an integer model, or the path of an ONNX file,
    which onnxruntime runs. Tensors are matched by where they came from: a convolution with the batch norm and the relu that were fused
    into it is compared with the float model's relu; channels that `equalize` multiplied are multiplied for it. A prepared model is run in
    its `states`, by default the one it is in, and is left as it was.

    Nothing is kept of a batch that has passed but sums, so memory does not grow with their number. With `advice`, and an `a` that computes
    in float, the first batch is run again for each tensor that looks wrong (32 at most), with that one alone rounded. Where a composite
    operator of a float model is wrong inside, `prepared`, the prepared model that `b` was made from, tells which of its tensors it is.
    Tensors inside of a recurrent layer, which a float model does not have, are compared with those of `prepared` in float; those that are
    alike at each time step are one row.

    The verdict comes first: the outputs are good from 30 dB on, visible from 15 dB on, and poor below. Where they are not good and no
    single layer stands out, it says what the noise is made of, by further runs of the first batch (20 at most), and what `tune` tries.

    Raises ConfigurationError for an argument that is not a form of a model, CalibrationError without batches or if one does not fit, and
    the errors of `trace`. A KeyboardInterrupt is raised as `Interrupted`, whose `result` is the comparison on the batches before, without
    advice.
    """
    source = as_batches(batches)
    total = length(source, num_batches)
    batch_inputs = map(options.inputs, first_batches(source, num_batches))
    first = next(batch_inputs, None)
    if first is None:
        raise no_batches(num_batches)
    pairing = Pairing(form_of(a, first, states[0], b), form_of(b, first, states[1], a), prepared)
    effects: Effects | None = None
    count = 0
    try:
        for batch in progress(itertools.chain([first], batch_inputs), total, "comparing", show_progress):
            inputs, values = pairing.add(batch, count)
            if not count and advice and pairing.left.real:
                effects = pairing.effects(inputs, values)
            count += 1
        result = _compared(pairing, effects, count, prepared)
        if prepared is not None and any(each.rule == "inside" for each in result.advice):
            parts = compare(prepared, b, [first], states=(State.FLOAT, states[1]), show_progress=show_progress)
            result = replace(result, advice=tuple(of_parts(result.advice, parts.advice)))
        verdict = result.verdict
        if effects is not None and verdict is not None and verdict.grade != "good" and not result.advice:
            causes, tries = causes_of(pairing.of_left(pairing.judged()), effects, show_progress)
            result = replace(result, verdict=replace(verdict, causes=causes, tries=tries))
        return result
    except KeyboardInterrupt:
        raise Interrupted(f"compare was interrupted after {count} batches", _compared(pairing, None, count)) from None


def _compared(pairing: Pairing, effects: Effects | None, count: int, prepared: fx.GraphModule | None = None) -> Comparison:
    """Return the whole comparison, with advice where effects can be measured."""
    tensors, advice = pairing.judged(), tuple[Advice, ...]()
    outputs = {name: statistics for name, statistics in pairing.seen.items() if name not in pairing.pairs}
    if effects is not None:
        cures = Cures(pairing.left, pairing.right, prepared)
        asked = pairing.of_left(tensors)
        advice = (*held_together(asked, effects, cures), *advise(asked, effects, cures))
        advice += tuple(quiet_channels(asked, effects, cures, [each.layer for each in advice]))
    measured = {} if effects is None else effects.measured
    rows = tuple(row(each.name, each.reference, each.facts, each.statistics, measured.get(each.name, math.nan)) for each in tensors)
    ends = tuple(row(name, name, Facts("output"), statistics) for name, statistics in outputs.items())
    verdict = verdict_on([end for end in ends if outputs[end.name].real])
    labels = (pairing.left.label, pairing.right.label)
    return Comparison(labels, rows, ends, advice, count, pairing.seen, verdict, 0 if len(pairing.forms) > 1 else len(pairing.parts))
