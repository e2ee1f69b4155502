"""Plots hold the numbers that they are made of, and edges of a drawn graph pass beside its boxes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fxquant as fxq
from fxquant.figures import pareto_front
from fxquant.reporting.layout import drawing
from fxquant.search.sensitivity import decibels
from fxquant.tuning.result import TunedLayer, TuningResult
from tests.shared.written import written

pytest.importorskip("matplotlib")


def block() -> nn.Module:
    return written(
        lambda m, x: torch.relu(m.two(torch.relu(m.one(x))) + x), one=nn.Conv2d(4, 4, 3, padding=1), two=nn.Conv2d(4, 4, 3, padding=1)
    )


class Network(nn.Module):
    """Two stages of blocks, a module that is called twice, and an operator that stays in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.ModuleList([nn.Sequential(block(), block()), nn.Sequential(block(), block())])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
        x = x.mean((2, 3))
        return self.head(self.head(x) + 1).cumsum(0)


class World:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Network().eval()
        self.batches = [torch.randn(4, 3, 10, 10) for _ in range(2)]
        self.result = fxq.quantize(self.model, self.batches, "nash-e", show_progress=False)
        self.comparison = self.result.compare(self.batches, advice=False)
        self.sensitivity = fxq.sensitivity(self.result.prepared, self.batches, measured=False, show_progress=False)
        self.searched = [
            fxq.mixed_precision(
                self.model, self.batches, "nash-e", budget=fxq.Budget(weight_bits=bits), measured=False, show_progress=False
            )
            for bits in (5, 8)
        ]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def lines(figure: Any) -> dict[str, Any]:
    """The points of every line of a figure's only axes, by the text in the legend."""
    (axes,) = figure.axes
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return {name: ([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]) for name, line in found.items()}


def names(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def same(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))


def overlaps(boxes: list[Any]) -> list[tuple[Any, Any]]:
    return [(one, other) for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]


def text_boxes(figure: Any) -> list[Any]:
    """Where a figure's texts are drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    texts = [*axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label, axes.title, axes.yaxis.label]
    for legend in figure.legends:
        texts += legend.get_texts()
    return [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]


# ---- the error of each layer --------------------------------------------------------------------------------------------


def test_the_error_of_every_layer_is_plotted(world: World) -> None:
    figure = fxq.plot_errors(world.comparison)
    rows = [*world.comparison.layers, *world.comparison.outputs]
    assert names(figure) == [layer.name for layer in rows]
    found = lines(figure)
    assert found["with errors from before"] == ([layer.sqnr for layer in rows], list(range(len(rows))))
    assert same(found["of its own grid"][0], [layer.own for layer in rows])
    assert found["good outputs"][0] == [30, 30]
    low, high = figure.axes[0].get_ylim()
    assert low > high, "the first layer is at the top"


def test_of_many_layers_the_worst_are_plotted_in_their_order(world: World) -> None:
    figure = fxq.plot_errors(world.comparison, n=3)
    worst = sorted(layer.sqnr for layer in world.comparison.layers)[:3]
    kept = [layer.name for layer in world.comparison.layers if layer.sqnr in worst]
    assert names(figure) == [*kept, *(output.name for output in world.comparison.outputs)]
    assert f"{len(world.comparison) - 3} layers with less error are left out" in figure.axes[0].get_title(loc="left")


def test_what_is_equal_has_a_mark_at_the_end(world: World) -> None:
    equal = fxq.compare(world.result.prepared, world.result.integer, world.batches, advice=False)
    assert all(layer.sqnr == math.inf for layer in equal.layers)
    found = lines(fxq.plot_errors(equal))
    assert "with errors from before" not in found
    ends, rows = found["with errors from before: equal"]
    assert len(ends) == len(equal.layers) + len(equal.outputs)
    assert rows == list(range(len(ends)))
    assert len(set(ends)) == 1
    assert ends[0] > max(value for value in found["of its own grid"][0] if math.isfinite(value))


# ---- sensitivity --------------------------------------------------------------------------------------------------------


def test_a_sensitivity_is_a_curve_for_each_dtype(world: World) -> None:
    figure = fxq.plot_sensitivity(world.sensitivity)
    ranked = world.sensitivity.ranked()
    assert len(ranked) <= 60
    assert names(figure) == [tensor.name for tensor in ranked]
    found = lines(figure)
    assert list(found) == ["int4", "int8", "int16"]
    for dtype, (values, _) in found.items():
        assert same(values, [decibels(tensor.loss[dtype]) if dtype in tensor.loss else math.nan for tensor in ranked])
    few = fxq.plot_sensitivity(world.sensitivity, n=4)
    assert names(few) == [tensor.name for tensor in ranked[:4]]


# ---- mixed precision ----------------------------------------------------------------------------------------------------


def test_candidates_of_several_budgets_are_one_plot(world: World) -> None:
    found = lines(fxq.plot_pareto(world.searched))
    candidates = [each for result in world.searched for each in (result.before, *result.candidates)]
    for name in {candidate.name for candidate in candidates}:
        wanted = [(each.costs["weight_bits"], decibels(each.noise)) for each in candidates if each.name == name]
        assert list(zip(*found[name], strict=True)) == wanted
    chosen = [(result.chosen.costs["weight_bits"], decibels(result.chosen.noise)) for result in world.searched]
    assert list(zip(*found["chosen"], strict=True)) == chosen
    points = {(each.costs["weight_bits"], decibels(each.noise)) for each in candidates}
    front = [point for point in sorted(points) if not any(a <= point[0] and b >= point[1] and (a, b) != point for a, b in points)]
    assert list(zip(*found["Pareto front"], strict=True)) == front
    assert set(lines(fxq.plot_pareto(world.searched[0]))) <= set(found)
    with pytest.raises(fxq.ConfigurationError, match=r"weight_bits[\s\S]*remedy"):
        fxq.plot_pareto(world.searched, cost="latency")


@pytest.mark.parametrize("seed", range(20))
def test_a_front_holds_what_nothing_else_beats(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = [(float(a), float(b)) for a, b in torch.randint(0, 8, (12, 2), generator=generator)]
    beaten = {p for p in points if any(a <= p[0] and b >= p[1] and (a, b) != p for a, b in points)}
    assert pareto_front(points) == sorted(set(points) - beaten)


# ---- training -----------------------------------------------------------------------------------------------------------


def test_losses_are_curves_over_the_steps() -> None:
    losses: Any = {"float": [2.0, 1.0, 0.1], "quantized": [2.0, math.nan, torch.tensor(0.5)]}
    figure = fxq.plot_training(losses)
    found = lines(figure)
    assert found["float"] == ([1, 2, 3], [2.0, 1.0, 0.1])
    assert same(found["quantized"][1], [2.0, math.nan, 0.5])
    assert figure.axes[0].get_yscale() == "log"
    figure = fxq.plot_training([2.0, 1.0])
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("linear", "loss")


def test_a_tuning_result_is_plotted_before_and_after() -> None:
    rows = (TunedLayer("a", ("a",), 0.1, 0.01, True, 1.0), TunedLayer("b", ("b",), 0.1, 0.2, False, 1.0))
    figure = fxq.plot_training(TuningResult("adaround", rows))
    found = lines(figure)
    assert names(figure) == ["a", "b"]
    assert found["before"][0] == pytest.approx([10, 10])
    assert found["after"][0] == pytest.approx([20, math.nan], nan_ok=True)
    assert found["after, not kept"][0] == pytest.approx([math.nan, 10 * math.log10(5)], nan_ok=True)


def test_a_distillation_is_plotted_by_its_losses() -> None:
    rows = (TunedLayer("output", ("a",), 0.1, 0.01, True, 1.0),)
    figure = fxq.plot_training(TuningResult("distill", rows, losses=(2.0, 1.5, 1.0)))
    assert lines(figure) == {"loss of distill": ([1, 2, 3], [2.0, 1.5, 1.0])}


def test_what_a_tuner_tried_is_plotted_with_the_reference() -> None:
    steps = tuple(fxq.TuneStep(name, name, score, 0.1, 0.0, kept) for name, score, kept in (("a", 0.8, True), ("b", 0.7, False)))
    tuned = fxq.Tuned(torch.fx.GraphModule({}, torch.fx.Graph()), fxq.QConfigMapping(), (), steps, 0.9, 0.8, 0.05)
    figure = fxq.plot_training(tuned)
    found = lines(figure)
    assert names(figure) == ["a", "b"]
    assert (found["kept"], found["dropped"]) == (([0.8], [0.0]), ([0.7], [1.0]))
    assert found["float model"][0] == [0.9, 0.9]
    assert found["tolerance"][0] == pytest.approx([0.85, 0.85])


# ---- all of them --------------------------------------------------------------------------------------------------------

PLOTS: dict[str, Callable[..., Any]] = {
    "errors": lambda world, path=None: fxq.plot_errors(world.comparison, path),
    "sensitivity": lambda world, path=None: fxq.plot_sensitivity(world.sensitivity, path),
    "pareto": lambda world, path=None: fxq.plot_pareto(world.searched, path),
    "training": lambda world, path=None: fxq.plot_training({"loss": [float(n) for n in range(1, 80)]}, path),
}


@pytest.mark.parametrize("name", PLOTS)
def test_no_text_is_on_top_of_another(name: str, world: World) -> None:
    boxes = text_boxes(PLOTS[name](world))
    assert len(boxes) > 6
    assert overlaps(boxes) == []


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_written_by_the_ending(name: str, world: World, tmp_path: Path) -> None:
    PLOTS[name](world, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    PLOTS[name](world, tmp_path / "again.svg")
    assert text == (tmp_path / "again.svg").read_text(encoding="utf-8")
    figure = PLOTS[name](world, tmp_path / "plot.png")
    assert all(f">{label}<" in text for label in lines(figure))
    assert Image.open(tmp_path / "plot.png").size == tuple(round(float(inches) * 100) for inches in figure.get_size_inches())


@pytest.mark.parametrize("name", PLOTS)
def test_without_matplotlib_the_error_says_what_to_install(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fxq.ConfigurationError, match=r"matplotlib is needed[\s\S]*fxquant\[report\]"):
        PLOTS[name](world)


# ---- graphs -------------------------------------------------------------------------------------------------------------


def test_edges_pass_beside_boxes() -> None:
    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = torch.tanh(x), torch.sigmoid(x), torch.relu(x)
            d = torch.tanh(a) + torch.sigmoid(b)
            e = torch.tanh(torch.tanh(d)) + torch.relu(torch.relu(c))
            return torch.tanh(e) + a + b * c + d + x

    for model in (fxq.trace(Skips(), torch.randn(2, 3)), fxq.trace(Network().eval(), torch.randn(2, 3, 10, 10))):
        found = drawing(model)
        assert found.lanes
        assert all(found.places[one][1] - found.places[other][1] > 1 for one, other in found.lanes)
        for one, other in found.lanes:
            for (x, y), (to_x, to_y) in itertools.pairwise(found.path(one, other)):
                for name, (middle, row) in found.places.items():
                    if name in (one, other):
                        continue
                    for share in (step / 50 for step in range(51)):
                        inside = abs(x + share * (to_x - x) - middle) < 0.35 and abs(y + share * (to_y - y) - row) < 0.25
                        assert not inside, (one, other, name)


def test_long_names_lose_their_middle() -> None:
    name = "a_module_with_a_name_that_is_much_too_long_for_a_row"
    (shown,) = names(fxq.plot_training(TuningResult("adaround", (TunedLayer(name, (name,), 0.1, 0.01, True, 1.0),))))
    start, end = shown.split("…")
    assert name.startswith(start)
    assert name.endswith(end)
    assert 24 <= len(shown) <= 30


def test_a_comparison_with_nothing_in_it_is_an_error(world: World) -> None:
    with pytest.raises(fxq.ConfigurationError, match="nothing to plot"):
        fxq.plot_errors(replace(world.comparison, layers=(), outputs=()))
