"""Two forms of a model compared tensor by tensor: how far they are apart, why, and what to do about it."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from torch import fx

from fxquant.analysis.record import Values
from fxquant.arguments import COUNT, FLAG, POSITIVE, Kind, checked, instance, such
from fxquant.errors import Interrupted
from fxquant.graph import QParams, stage_of
from fxquant.progress import in_one_piece, progress
from fxquant.quantization.batches import as_batches, first_batches, length, no_batches
from fxquant.quantization.state import State
from fxquant.reporting.advice import Advice, Judged, advise, grid_text, of_parts
from fxquant.reporting.effects import Effects
from fxquant.reporting.rows import as_html, as_text
from fxquant.reporting.sides import Side, pairs, shift, shifted, side_of
from fxquant.reporting.statistics import Steps, TensorStatistics, decibels, drawn, ratio
from fxquant.reporting.together import held_together


def _writer(value: Any) -> Any:
    if not all(callable(getattr(value, name, None)) for name in ("add_scalar", "add_text", "add_histogram_raw")):
        raise TypeError
    return value


WRITER = Kind("a SummaryWriter of torch.utils.tensorboard", _writer)
SHOWN = 20  # layers in the text


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


@dataclass(frozen=True)
class Comparison(Mapping[str, LayerComparison]):
    """What `compare` found: a layer by its name, in the order they run; prints as a table of the worst, and the advice.

    labels      what the two forms are
    layers      a row for each tensor that both forms have
    outputs     the same for what the models return
    advice      what to do, in the order of what it would gain; empty for a healthy model
    unmatched   tensors of the second form that the first does not have: the inner parts of composite operators
    batches     how many batches were taken
    statistics  what was kept of each, for histograms
    """

    labels: tuple[str, str]
    layers: tuple[LayerComparison, ...]
    outputs: tuple[LayerComparison, ...]
    advice: tuple[Advice, ...]
    unmatched: tuple[str, ...]
    batches: int
    statistics: Mapping[str, TensorStatistics] = field(repr=False)

    def __getitem__(self, name: str) -> LayerComparison:
        return next((layer for layer in (*self.layers, *self.outputs) if layer.name == name), None) or _missing(name)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @checked(n=POSITIVE)
    def worst(self, n: int = 10) -> tuple[LayerComparison, ...]:
        """The layers with the largest effect on the outputs, where that was measured, then those with the largest error of their own."""
        return tuple(sorted(self.layers, key=_badness)[:n])

    def __rich__(self) -> Table:
        title = f"{self.labels[1]} against {self.labels[0]}, {self.batches} batches"
        heads = ("layer", "grid", "cosine", "SQNR", "own SQNR", "steps", "clipped", "to zero", "range", "error is")
        table = Table(*heads, title=title, title_justify="left")
        for layer in (*self.worst(SHOWN), *self.outputs) if self.layers else self.outputs:
            numbers = (_db(layer.sqnr), _db(layer.own), _short(layer.steps), _percent(layer.clipped), _percent(layer.zeroed))
            table.add_row(layer.name, grid_text(layer.grid), f"{layer.cosine:.5f}", *numbers, _short(layer.reach), layer.error)
        return table

    def __str__(self) -> str:
        lines = [as_text(self.__rich__())]
        if len(self.layers) > SHOWN:
            lines.append(f"{len(self.layers) - SHOWN} more layers, with less effect")
        if not self.layers:
            lines.append("no tensor is in both forms: are they of one model?")
        lines += [str(each) for each in self.advice] or ["no advice: no single layer stands out"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        told = [(html.escape(text) for text in (each.layer, each.cause, each.cure)) for each in self.advice]
        advice = "".join(f"<li><b>{layer}</b>: {cause}<br><i>{cure}</i></li>" for layer, cause, cure in told)
        return as_html(self.__rich__()) + (f"<p>Advice</p><ol>{advice}</ol>" if advice else "<p>No advice: no single layer stands out.</p>")

    @checked(writer=WRITER, step=COUNT)
    def write_tensorboard(self, writer: Any, step: int = 0) -> None:
        """Write a scalar for each figure of each layer, histograms, and the advice, at the global step `step`.

        `writer` is a SummaryWriter of torch.utils.tensorboard, or anything with its methods.
        """
        for layer in (*self.layers, *self.outputs):
            for figure in FIGURES:
                value = getattr(layer, figure)
                if math.isfinite(value):
                    writer.add_scalar(f"{figure}/{layer.name}", value, step)
            statistics = self.statistics[layer.name]
            if statistics.steps is not None and statistics.elements:
                _histogram(writer, layer, statistics, step)
        writer.add_text("advice", "\n\n".join(map(str, self.advice)) or "no advice", step)


FIGURES = ("sqnr", "own", "cosine", "mse", "steps", "clipped", "zeroed", "reach", "effect")


def _histogram(writer: Any, layer: LayerComparison, seen: TensorStatistics, step: int) -> None:
    """What of the reference is within DRAWN ranges of the grid, in the columns of the page."""
    assert seen.steps is not None
    low, high = (end * seen.steps.scale for end in drawn(seen.steps))
    counts = seen.columns[1:-1]
    limits = [low + (high - low) * (index + 1) / len(counts) for index in range(len(counts))]
    number = int(counts.sum())
    mean = seen.signal / max(number, 1)
    writer.add_histogram_raw(
        f"values/{layer.name}", min=seen.low, max=seen.high, num=number, sum=0.0, sum_squares=mean * number,
        bucket_limits=limits, bucket_counts=counts.tolist(), global_step=step,
    )  # fmt: skip


def _missing(name: str) -> LayerComparison:
    raise KeyError(name)


def _badness(layer: LayerComparison) -> tuple[float, float]:
    return (-layer.effect if not math.isnan(layer.effect) else 0.0, layer.own if not math.isnan(layer.own) else layer.sqnr)


def _db(value: float) -> str:
    return "" if math.isnan(value) else "equal" if value == math.inf else f"{value:.1f} dB"


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.2g} %"


def _states(value: Any) -> tuple[Any, Any]:
    first, second = value
    return tuple(state if state is None else State(state) for state in (first, second))  # type: ignore[return-value]


GRAPH = instance("", fx.GraphModule)
PREPARED = such("a prepared model", GRAPH.take, lambda model: stage_of(model) == "PREPARED").or_none("its parts are not looked at")
STATES = Kind("two states, or None for each, of the first model and of the second", _states)


@checked(advice=FLAG, states=STATES, prepared=PREPARED)
def compare(
    a: Any,
    b: Any,
    batches: Any,
    *,
    states: tuple[State | str | None, State | str | None] = (None, None),
    advice: bool = True,
    prepared: fx.GraphModule | None = None,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    show_progress: bool | None = None,
) -> Comparison:
    """How far every tensor of `b` is from the one of `a`, which is taken as right; and what to do about it.

    Both are any form of one model: a float model or its traced graph, a prepared model, an integer model, or the path of an ONNX file,
    which onnxruntime runs. Tensors are matched by where they came from: a convolution with the batch norm and the relu that were fused
    into it is compared with the float model's relu; channels that `equalize` multiplied are multiplied for it. A prepared model is run in
    its `states`, by default the one it is in, and is left as it was.

    Nothing is kept of a batch that has passed but sums, so memory does not grow with their number. With `advice`, and an `a` that computes
    in float, the first batch is run again for each tensor that looks wrong (32 at most), with that one alone rounded. Where a composite
    operator of a float model is wrong inside, `prepared`, the prepared model that `b` was made from, tells which of its tensors it is.

    Raises ConfigurationError for what is no form of a model, CalibrationError if there is no batch or one does not fit, and what `trace`
    raises. A KeyboardInterrupt is raised as `Interrupted`, whose `result` is the comparison on the batches before, without advice.
    """
    source = as_batches(batches)
    total = length(source, num_batches)
    taken = (batch if batch_fn is None else batch_fn(batch) for batch in first_batches(source, num_batches))
    first = next(taken, None)
    if first is None:
        raise no_batches(num_batches)
    left, right = side_of(a, first, states[0], b), side_of(b, first, states[1], a)
    found = pairs(left, right)
    factors = {name: shift(left, right, name, reference) for name, reference in found.items()}
    seen: dict[str, TensorStatistics] = {}
    effects: Effects | None = None
    count = 0
    try:
        for batch in progress(itertools.chain([first], taken), total, "comparing", show_progress):
            inputs = left.form.inputs(batch, count)
            values = _add(seen, left, right, found, factors, inputs, right.form.inputs(batch, count))
            if not count and advice and left.real:
                others = {found[name]: shifted(value, _negative(factors[name])) for name, value in values.items() if name in found}
                effects = Effects(left, inputs, others)
            count += 1
        result = _compared(left, right, found, factors, seen, effects, count)
        if prepared is not None and any(each.rule == "inside" for each in result.advice):
            parts = compare(prepared, b, [first], states=(State.FLOAT, states[1]), show_progress=show_progress)
            result = replace(result, advice=tuple(of_parts(result.advice, parts.advice)))
        return result
    except KeyboardInterrupt:
        so_far = _compared(left, right, found, factors, seen, None, count)
        raise Interrupted(f"compare was interrupted behind {count} batches", so_far) from None


def _compared(
    left: Side,
    right: Side,
    found: Mapping[str, str],
    factors: Mapping[str, Any],
    seen: dict[str, TensorStatistics],
    effects: Effects | None,
    count: int,
) -> Comparison:
    """What was found in all, with advice where effects can be measured."""
    tensors = [
        Judged(name, right.facts[name], seen[name], reference, reference in left.inputs)
        for name, reference in found.items()
        if name in seen
    ]
    outputs = {name: statistics for name, statistics in seen.items() if name not in found}
    measured: dict[str, float] = {}

    def effect_of(tensor: Judged) -> float:
        assert effects is not None
        steps = Steps.of(tensor.facts.grid)
        assert steps is not None
        if tensor.name not in measured:
            measured[tensor.name] = effects.of_grid(tensor.reference, steps, factors[tensor.name])
        return measured[tensor.name]

    noise = [ratio(statistics.noise, statistics.signal) for statistics in outputs.values()]
    total = sum(noise) / max(len(noise), 1)
    told = advise(tensors, effects, effect_of, total) if effects is not None else ()
    if effects is not None:
        held = held_together(tensors, lambda tensor, steps: effects.of_grid(tensor.reference, steps, factors[tensor.name]), total)
        told = (*held, *told)
    rows = tuple(_row(tensor, measured.get(tensor.name, math.nan)) for tensor in tensors)
    ends = tuple(_output(name, statistics) for name, statistics in outputs.items())
    unmatched = tuple(name for name in right.facts if name not in seen)
    return Comparison((left.form.label, right.form.label), rows, ends, told, unmatched, count, seen)


def _add(
    seen: dict[str, TensorStatistics],
    left: Side,
    right: Side,
    found: Mapping[str, str],
    factors: Mapping[str, Any],
    inputs: list[Any],
    others: list[Any],
) -> Values:
    """Take one batch into account; returns what the second form has."""
    mine = left.values(inputs, list(found.values()))
    theirs = right.values(others, list(found))
    with in_one_piece():
        for name, value in theirs.items():
            reference = mine.get(found.get(name, name))
            if reference is None or reference.shape != value.shape or reference.is_complex():
                continue
            if name not in seen:
                known = right.facts.get(name)
                seen[name] = TensorStatistics(None if known is None else known.grid, _channel_axis(reference))
            seen[name].add(shifted(reference, factors.get(name)), value)
    return theirs


def _negative(exponents: torch.Tensor | None) -> torch.Tensor | None:
    return None if exponents is None else -exponents


def _channel_axis(value: torch.Tensor) -> int | None:
    """The dimension of channels: behind the batch in maps, the last one otherwise."""
    return None if value.dim() < 2 else 1 if value.dim() > 3 else -1


def _row(tensor: Judged, effect: float) -> LayerComparison:
    seen, facts = tensor.statistics, tensor.facts
    own = decibels(seen.signal, seen.truncation + seen.rounding) if seen.steps is not None else math.nan
    worse = "truncation" if seen.truncation > seen.rounding else "rounding"
    error = "" if seen.steps is None else worse if seen.truncation + seen.rounding else "none"
    return _layer(tensor.name, tensor.reference, facts.operator, facts.grid, facts.source, facts.because, seen, own, error, effect)


def _output(name: str, seen: TensorStatistics) -> LayerComparison:
    return _layer(name, name, "output", None, "", "", seen, math.nan, "", math.nan)


def _layer(
    name: str,
    reference: str,
    operator: str,
    grid: QParams | None,
    source: str,
    because: str,
    seen: TensorStatistics,
    own: float,
    error: str,
    effect: float,
) -> LayerComparison:
    count = max(seen.elements - seen.not_a_number - seen.infinite, 1)
    gridded = seen.steps is not None
    return LayerComparison(
        name=name,
        reference=reference,
        operator=operator,
        dtype="float" if grid is None else grid.dtype,
        grid=grid,
        source=source,
        because=because,
        elements=seen.elements,
        cosine=seen.product / math.sqrt(seen.signal * seen.power) if seen.signal and seen.power else float(seen.signal == seen.power),
        sqnr=decibels(seen.signal, seen.noise),
        mse=seen.noise / count,
        largest=seen.largest,
        steps=seen.largest / seen.steps.scale if seen.steps is not None else math.nan,
        own=own,
        clipped=seen.clipped / count if gridded else math.nan,
        zeroed=ratio(seen.zeroed, seen.nonzero) if gridded else math.nan,
        reach=seen.reach,
        error=error,
        effect=effect,
        try_this=_try(error, seen),
        low=seen.low,
        high=seen.high,
    )


def _try(error: str, seen: TensorStatistics) -> str:
    if error == "truncation":
        return "a larger scale: more calibration data, or an observer that clips less (MinMaxObserver)"
    if error == "rounding":
        small = seen.reach < 0.5
        return "a smaller scale: the grid reaches further than the values" if small else "more bits (int16), or fxq.equalize"
    return ""
