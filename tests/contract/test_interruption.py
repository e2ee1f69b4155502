"""Ctrl-C in the middle of everything that may take long: the model is as it was or can be used, and what was done is kept."""

from __future__ import annotations

import copy
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from fxquant.search import observer_search
from fxquant.support import progress as shown
from fxquant.tuning import bias, checkpoint, second_moment
from tests.shared.networks import Network


def forward(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.relu(m.norm(m.conv(x))).mean((2, 3)))


torch.manual_seed(5)
FLOAT = Network(forward, conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4), head=nn.Linear(4, 3)).eval()
BATCHES = [torch.randn(4, 2, 6, 6) for _ in range(6)]
STEP = 2  # batches, or layers, or trials, before Ctrl-C


def cut_short(items: Any, after: int = STEP) -> Iterator[Any]:
    """The items, and a Ctrl-C after some of them."""
    for index, item in enumerate(items):
        if index == after:
            raise KeyboardInterrupt
        yield item


def interrupted(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """The next loop of a module that shows progress is interrupted."""
    monkeypatch.setattr(module, "progress", lambda items, *_: cut_short(items))


@pytest.fixture(scope="module")
def result() -> fxq.results.Result:
    return fxq.quantize(FLOAT, BATCHES, "nash-e", show_progress=False)


def bits(prepared: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prepared.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value.nan_to_num(), right[name].nan_to_num()) for name, value in left.items())


# ---- what was done is kept ----------------------------------------------------------------------------------------------------


def test_calibration_keeps_what_it_has_observed_and_goes_on() -> None:
    whole, stopped = (fxq.prepare(FLOAT, BATCHES[0], "nash-e") for _ in range(2))
    fxq.calibrate(whole, BATCHES)
    with pytest.raises(KeyboardInterrupt):
        fxq.calibrate(stopped, cut_short(BATCHES))
    assert {operator.state for operator in quantized_operators(stopped).values()} == {fxq.State.CALIBRATE}
    fxq.calibrate(stopped, BATCHES[STEP:])
    assert same(bits(stopped), bits(whole))


def test_calibration_that_stops_inside_a_batch_has_not_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, few = (fxq.prepare(FLOAT, BATCHES[0], "nash-e") for _ in range(2))
    fxq.calibrate(few, BATCHES[:1])

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    fxq.calibrate(prepared, BATCHES[:1])
    handle = quantized_operators(prepared)["head"].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        fxq.calibrate(prepared, BATCHES[1:])
    handle.remove()
    fxq.set_state(prepared, "validate")
    assert same(bits(prepared), bits(few))


def test_a_comparison_has_the_batches_before(result: fxq.results.Result) -> None:
    with pytest.raises(fxq.errors.Interrupted, match="compare was interrupted after 2 batches") as stop:
        fxq.compare(FLOAT, result.integer, cut_short(BATCHES))
    found, wanted = stop.value.result, fxq.compare(FLOAT, result.integer, BATCHES[:STEP], advice=False)
    assert (found.batches, found.layers, found.outputs) == (STEP, wanted.layers, wanted.outputs)
    assert not found.advice


def test_a_report_that_is_interrupted_is_no_file_and_hands_over_the_comparison(result: fxq.results.Result, tmp_path: Path) -> None:
    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            return cut_short(BATCHES)

    with pytest.raises(fxq.errors.Interrupted) as stop:
        result.report(tmp_path / "report.html", Loader())
    assert not list(tmp_path.iterdir())
    page = result.report(tmp_path / "report.html", comparison=stop.value.result)
    assert "</html>" in page.read_text(encoding="utf-8")


def test_verify_reports_what_it_has_compared(result: fxq.results.Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = result.export(tmp_path / "model.onnx")
    monkeypatch.setattr("fxquant.reporting.forms.progress", lambda items, *_: cut_short(items, 5))
    with pytest.raises(fxq.errors.Interrupted, match="after 5 of") as stop:
        fxq.verify(result.integer, path, BATCHES)
    assert stop.value.result.mismatches == 0
    monkeypatch.undo()
    assert 0 < stop.value.result.elements < fxq.verify(result.integer, path, BATCHES).elements


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", ["prepared", "kernels", "exact", "flips", "qdq"])
def test_a_loader_that_is_interrupted_leaves_the_report_of_the_batches_before(form: str, tmp_path: Path) -> None:
    over_the_batch = lambda m, x: m.head(torch.softmax(m.conv(x).mean((2, 3)), 0))  # noqa: E731  # stays in float
    model = FLOAT if form != "flips" else Network(over_the_batch, conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3)).eval()
    made = fxq.quantize(model, BATCHES, "nash-e", show_progress=False)
    style = {"exact": "exact", "flips": "exact", "qdq": "qdq"}.get(form)
    second = {"prepared": made.prepared, "kernels": made.integer}.get(form) or made.export(tmp_path / "model.onnx", style=style)
    with pytest.raises(fxq.errors.Interrupted, match=r"verify was interrupted after \d+ comparisons") as stop:
        fxq.verify(made.integer, second, cut_short(BATCHES))
    wanted = fxq.verify(made.integer, second, iter(BATCHES[:STEP]))
    assert wanted.elements > 0
    assert stop.value.result == wanted


# ---- a repeated call continues from the results in its file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "module", "loops"), [(fxq.tuning.correct_bias, bias, bias), (fxq.tuning.round_weights, second_moment, checkpoint)]
)
def test_a_method_leaves_the_model_as_it_was_and_continues(
    method: Callable[..., Any], module: Any, loops: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_bits = fxq.QConfig(weight=fxq.WeightConfig("int4"))
    torch.manual_seed(1)  # a network whose outputs keep its corrections
    network = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()) for _ in range(4))).eval()

    def calibrated() -> fx.GraphModule:
        prepared = fxq.prepare(network, BATCHES[0], "nash-e", few_bits)
        return fxq.calibrate(prepared, BATCHES, options=fxq.Options(equalize=False, round_weights=False))

    whole, stopped = calibrated(), calibrated()
    before = bits(stopped)
    rows = method(whole, BATCHES).layers
    with monkeypatch.context() as patch:
        interrupted(patch, loops)
        with pytest.raises(KeyboardInterrupt):
            method(stopped, BATCHES, options=fxq.Options(checkpoint=tmp_path / "done"))
    assert same(bits(stopped), before)
    asked: list[Any] = []
    monkeypatch.setattr(module, "weight_of", lambda *given, original=module.weight_of: asked.append(0) or original(*given))
    resumed = method(stopped, BATCHES, options=fxq.Options(checkpoint=tmp_path / "done"))
    assert resumed.layers == rows
    assert any(row.kept for row in rows[:STEP])  # what is from the file is in the model
    assert same(bits(stopped), bits(whole))
    done = len(asked)
    asked.clear()
    method(fresh := calibrated(), BATCHES)
    assert 0 < done < len(asked)
    with pytest.raises(fxq.errors.ConfigurationError, match="of another call"):
        method(fresh, BATCHES, options=fxq.Options(batch_size=1, checkpoint=tmp_path / "done"))


@pytest.mark.nightly
def test_a_search_over_observers_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {"target": "nash-e", "observers": [fxq.observers.MinMaxObserver, fxq.observers.PercentileObserver(80.0)]}
    whole = fxq.search.search_observers(FLOAT, BATCHES, **given)
    with monkeypatch.context() as patch:
        interrupted(patch, checkpoint)
        with pytest.raises(KeyboardInterrupt):
            fxq.search.search_observers(FLOAT, BATCHES, options=fxq.Options(checkpoint=tmp_path / "search"), **given)
    tried: list[str] = []
    original = observer_search._trial
    monkeypatch.setattr(observer_search, "_trial", lambda *each: tried.append(each[1].name) or original(*each))
    resumed = fxq.search.search_observers(FLOAT, BATCHES, options=fxq.Options(checkpoint=tmp_path / "search"), **given)
    assert tried == [trial.name for trial in whole.tensors][STEP:]
    assert (resumed.tensors, resumed.measured, resumed.chosen) == (whole.tensors, whole.measured, whole.chosen)
    tried.clear()
    again = fxq.search.search_observers(FLOAT, BATCHES, options=fxq.Options(checkpoint=tmp_path / "search"), **given)
    assert not tried
    assert same(bits(again.prepared), bits(whole.prepared))


# ---- an interrupted call without results leaves no file ---------------------------------------------------------------------------------


class Stops(nn.Module):
    """A layer whose forward is interrupted while it is armed."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if Stops.armed:
            raise KeyboardInterrupt
        return x + 1


def test_an_interrupted_trace_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), Stops()).train()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    monkeypatch.setattr(Stops, "armed", True)
    with pytest.raises(KeyboardInterrupt):
        fxq.prepare(model, BATCHES[0])
    assert before == {name: dict(module.__dict__) for name, module in model.named_modules()}
    monkeypatch.setattr(Stops, "armed", False)
    assert fxq.prepare(model, BATCHES[0])


@pytest.mark.parametrize("method", [fxq.tuning.reestimate_batch_norm, fxq.tuning.equalize])
def test_a_method_without_a_checkpoint_changes_nothing_when_it_is_interrupted(
    method: Callable[..., Any], result: fxq.results.Result
) -> None:
    prepared = fxq.prepare(FLOAT, BATCHES[0], "nash-e") if method is fxq.tuning.equalize else copy.deepcopy(result.prepared)
    before = bits(prepared)
    with pytest.raises(KeyboardInterrupt):
        method(prepared, cut_short(BATCHES))
    assert same(bits(prepared), before)
    method(prepared, BATCHES)


# ---- progress ----------------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_seen_in_a_terminal_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(shown, "MOMENT", 0.05)
    started: list[float] = []
    monkeypatch.setattr(Progress, "start", lambda self: started.append(time.perf_counter()))
    threads = threading.active_count()
    list(shown.progress(range(3), 3, "quick"))
    assert not started
    with shown.working("slow"):
        while not started:
            time.sleep(0.01)
    list(shown.progress(range(3), 3, "asked for", True))
    assert len(started) == 2
    assert threading.active_count() == threads
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown.working("into a file"):
        assert not shown._displays
