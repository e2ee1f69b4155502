"""Plot what `compare`, `sensitivity`, `mixed_precision`, `tune` and the methods of `tuning` find, a call each; needs matplotlib.

Each returns a figure of matplotlib, which a notebook shows, and writes it where a path is given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fxquant.errors import ConfigurationError
from fxquant.reporting.comparing import Comparison
from fxquant.reporting.pictures import PICTURE, figure_class, short, write_picture
from fxquant.search.budget import LIMITS
from fxquant.search.mixed_precision import Candidate, MixedPrecision
from fxquant.search.sensitivity import Sensitivity, decibels
from fxquant.search.tune import Tuned
from fxquant.support.arguments import POSITIVE, Kind, checked, choice, instance
from fxquant.tuning.result import TuningResult

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")  # of Okabe and Ito
MARKERS = "osD^vP*X"
WIDTH, ROW, REST = 8.0, 0.24, 1.4  # inches: of a figure, of a row with a name, and of title and axis
SHOWN = 60  # rows
FEW = 50  # steps, each of which is marked on a curve
GOOD = 30.0  # dB: the outputs of a comparison are called good from here on
UNITS = {
    "weight_bytes": "bytes of the weights",
    "weight_bits": "bits of a weight, on average",
    "bit_operations": "bit operations",
    "latency": "seconds, estimated",
}


@checked(comparison=instance("what fxq.compare returned", Comparison), path=PICTURE, n=POSITIVE)
def plot_errors(comparison: Comparison, path: str | os.PathLike[str] | None = None, *, n: int = SHOWN) -> Any:
    """Plot the SQNR of each layer in dB, in the order they run from the top, and of the outputs; return the figure.

    Dots are the error with all that came from the layers before, squares the error of a layer's own grid. A tensor that is equal in both
    forms has a triangle at the right end. Of more than `n` layers, those with the lowest SQNR are shown.

    Raises ConfigurationError if nothing was compared or matplotlib is missing.
    """
    kept = {id(layer) for layer in sorted(comparison.layers, key=lambda layer: layer.sqnr)[:n]}
    rows = [*(layer for layer in comparison.layers if id(layer) in kept), *comparison.outputs]
    figure, axes = _rows([layer.name for layer in rows], "the comparison has no layers")
    _values(axes, {"with errors from before": [layer.sqnr for layer in rows], "of its own grid": [layer.own for layer in rows]})
    axes.axvline(GOOD, color="#999999", linestyle=":", linewidth=1, label="good outputs", zorder=0)
    left = len(comparison.layers) - len(kept)
    title = f"{comparison.labels[1]} against {comparison.labels[0]}" + (f"; {left} layers with less error are left out" if left else "")
    return _finished(figure, axes, title, "SQNR in dB, more is better", path)


@checked(found=instance("what fxq.sensitivity returned", Sensitivity), path=PICTURE, n=POSITIVE)
def plot_sensitivity(found: Sensitivity, path: str | os.PathLike[str] | None = None, *, n: int = SHOWN) -> Any:
    """Plot the SQNR of the outputs in dB with one tensor alone rounded, a curve for each dtype; return the figure.

    The most sensitive tensors come first; of more than `n`, these are shown. Raises ConfigurationError if there are none, or matplotlib
    is missing.
    """
    ranked = found.ranked()[:n]
    figure, axes = _rows([tensor.name for tensor in ranked], "the model has no tensor whose dtype can be chosen")
    dtypes = sorted({dtype for tensor in ranked for dtype in tensor.loss}, key=lambda dtype: (len(dtype), dtype))
    curves = {dtype: [decibels(tensor.loss[dtype]) if dtype in tensor.loss else math.nan for tensor in ranked] for dtype in dtypes}
    _values(axes, curves, line="-")
    left = len(found) - len(ranked)
    title = "one tensor alone rounded" + (f"; {left} less sensitive ones are left out" if left else "")
    return _finished(figure, axes, title, "SQNR of the outputs in dB, more is better", path)


def _results(value: Any) -> list[MixedPrecision]:
    found = [value] if isinstance(value, MixedPrecision) else list(value)
    if not found or not all(isinstance(each, MixedPrecision) for each in found):
        raise TypeError
    return found


RESULTS = Kind("what fxq.mixed_precision returned, or several of these for several budgets", _results)


@checked(results=RESULTS, path=PICTURE, cost=choice(*LIMITS).or_none("the first limit of the first budget"))
def plot_pareto(
    results: MixedPrecision | Iterable[MixedPrecision], path: str | os.PathLike[str] | None = None, *, cost: str | None = None
) -> Any:
    """Plot the candidates of one or several searches by cost and measured SQNR of the outputs in dB; return the figure.

    The line is the Pareto front: no other candidate costs less and has a higher SQNR. A ring marks what a search chose.

    cost  "weight_bytes", "weight_bits", "bit_operations" or "latency"

    Raises ConfigurationError if candidates do not have this cost, or matplotlib is missing.
    """
    found = _results(results)
    asked = cost or next(iter(found[0].budget.limits))
    candidates = [candidate for result in found for candidate in (result.before, *result.candidates) if candidate.noise is not None]
    if not all(asked in candidate.costs for candidate in candidates):
        raise ConfigurationError(
            f"the candidates have no {asked}",
            because=f"their costs are {', '.join(set.intersection(*(set(candidate.costs) for candidate in candidates)))}",
            remedy="pass one of these, or search with a budget that limits it",
        )
    figure = figure_class()(figsize=(WIDTH, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(candidate.name for candidate in candidates))
    for index, name in enumerate(names):
        points = [_point(candidate, asked) for candidate in candidates if candidate.name == name]
        axes.plot(*zip(*points, strict=True), label=name, linestyle="", marker=MARKERS[index % len(MARKERS)], color=_colour(index))
    chosen = [_point(result.chosen, asked) for result in found]
    ring: Any = {"marker": "o", "markersize": 14, "markerfacecolor": "none", "markeredgecolor": "#333333", "linestyle": ""}
    axes.plot(*zip(*chosen, strict=True), label="chosen", **ring)
    front = pareto_front([_point(candidate, asked) for candidate in candidates])
    axes.plot(*zip(*front, strict=True), label="Pareto front", color="#999999", linewidth=1, drawstyle="steps-post", zorder=0)
    axes.set_xlabel(UNITS[asked])
    return _finished(figure, axes, "mixed precision", None, path, across="SQNR of the outputs in dB")


def _point(candidate: Candidate, cost: str) -> tuple[float, float]:
    assert candidate.noise is not None
    return candidate.costs[cost], decibels(candidate.noise)


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of (cost, gain) of which no other one costs no more and gains more, by cost."""
    front: list[tuple[float, float]] = []
    for cost, gain in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def _course(value: Any) -> TuningResult | Tuned | dict[str, list[float]]:
    if isinstance(value, TuningResult | Tuned):
        return value
    curves = value if isinstance(value, Mapping) else {"loss": value}
    if isinstance(value, str | bytes) or not curves:
        raise TypeError
    found = {str(name): [float(number) for number in numbers] for name, numbers in curves.items()}
    if not all(numbers and any(map(math.isfinite, numbers)) for numbers in found.values()):
        raise ValueError("a curve has no finite number")
    return found


COURSE = Kind("a list of losses, a dict of such lists by name, or the result of fxq.tune or of a method of fxq.tuning", _course)


@checked(course=COURSE, path=PICTURE)
def plot_training(
    course: TuningResult | Tuned | Sequence[float] | Mapping[str, Sequence[float]], path: str | os.PathLike[str] | None = None
) -> Any:
    """Plot how training or tuning went; return the figure.

    A list of losses, or several by name, is a curve over the steps, logarithmic if they are positive and span more than a factor of 10;
    a number that is not finite is a gap. Of `fxq.tune` the scores of what was tried are plotted, of `distill` the loss of each step, and of
    other methods of `fxq.tuning` the SQNR of each layer before and after.

    Raises ConfigurationError if there is nothing to plot, or matplotlib is missing.
    """
    if isinstance(course, TuningResult) and not course.losses:
        return _plot_layers(course, path)
    if isinstance(course, Tuned):
        return _plot_steps(course, path)
    curves: Any = {f"loss of {course.method}": course.losses} if isinstance(course, TuningResult) else course
    figure = figure_class()(figsize=(WIDTH, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, numbers) in enumerate(curves.items()):
        marker = "." if len(numbers) < FEW else ""
        axes.plot(range(1, len(numbers) + 1), numbers, label=name, color=_colour(index), linewidth=1.2, marker=marker)
    every = [number for numbers in curves.values() for number in numbers if math.isfinite(number)]
    if min(every) > 0 and max(every) > 10 * min(every):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    return _finished(figure, axes, "training", None, path, across=", ".join(curves) if len(curves) == 1 else "")


def _plot_layers(result: TuningResult, path: Any) -> Any:
    figure, axes = _rows([layer.name for layer in result], f"{result.method} tuned no layer")

    def ratio(signal: float, noise: float) -> float:
        return decibels(noise / signal) if signal > 0 else math.nan

    before = [ratio(layer.signal, layer.before) for layer in result]
    after = [ratio(layer.signal, layer.after) for layer in result]
    for row, ends in enumerate(zip(before, after, strict=True)):
        axes.plot(ends, (row, row), color="#999999", linewidth=1, zorder=0)
    kept, dropped = (
        [value if layer.kept is is_kept else math.nan for layer, value in zip(result, after, strict=True)] for is_kept in (True, False)
    )
    _values(axes, {"before": before, "after": kept, "after, not kept": dropped})
    return _finished(figure, axes, result.summary, "SQNR of the layer's result in dB, held-out samples", path)


def _plot_steps(tuned: Tuned, path: Any) -> Any:
    figure, axes = _rows([step.remedy for step in tuned.steps], "nothing was tried")
    for label, kept, marker in (("kept", True, "o"), ("dropped", False, "X")):
        rows = [(step.score, row) for row, step in enumerate(tuned.steps) if step.kept is kept]
        if rows:
            axes.plot(*zip(*rows, strict=True), label=label, linestyle="", marker=marker, color=_colour(0 if kept else 1))
    axes.axvline(tuned.reference, color="#333333", linewidth=1, label="float model")
    axes.axvline(tuned.reference - tuned.tolerance, color="#999999", linestyle="--", linewidth=1, label="tolerance")
    return _finished(figure, axes, "what was tried, from the top", "score, more is better", path)


# ---- what figures share --------------------------------------------------------------------------------------------------


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _rows(names: Sequence[str], missing: str) -> tuple[Any, Any]:
    """Return a figure with a row for each name, from the top, and its axes. Raises ConfigurationError if there are none."""
    if not names:
        raise ConfigurationError("there is nothing to plot", because=missing, remedy="pass a result that has some")
    figure = figure_class()(figsize=(WIDTH, REST + ROW * len(names)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=8)
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _values(axes: Any, curves: Mapping[str, Sequence[float]], line: str = "") -> None:
    """Plot the value of each row in several curves by name; infinite ones are triangles at the right end, beyond all finite ones."""
    end = max([0.0, *(value for values in curves.values() for value in values if math.isfinite(value))]) * 1.05 + 5
    for index, (label, values) in enumerate(curves.items()):
        marker: Any = {"color": _colour(index), "markersize": 5}
        if any(map(math.isfinite, values)):
            shown = [value if math.isfinite(value) else math.nan for value in values]
            axes.plot(shown, range(len(shown)), label=label, linestyle=line, linewidth=0.8, marker=MARKERS[index], **marker)
        equal = [row for row, value in enumerate(values) if value == math.inf]
        if equal:
            axes.plot([end] * len(equal), equal, label=f"{label}: equal", linestyle="", marker=">", **marker)


def _finished(figure: Any, axes: Any, title: str, along: str | None, path: Any, across: str = "") -> Any:
    """Label the axes, write the figure where a path is given, and return it."""
    axes.set_title(title, fontsize=10, loc="left")
    if along is not None:
        axes.set_xlabel(along)
    if across:
        axes.set_ylabel(across)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if path is not None:
        write_picture(figure, path)
    return figure
