"""Ctrl-C in the middle of everything that may take long: the model is as it was or can be used, and what was done is kept."""

import copy
import functools
import gc
import io
import linecache
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.accuracy import bias, checkpoint, weights
from fxquant.compat.horizon.served import flow
from fxquant.compat.torch_ao import functions
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.observers import Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.support import progress as shown
from tests.shared.contract import same_state
from tests.shared.networks import Network, descend, to_train


def forward(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.relu(m.norm(m.conv(x))).mean((2, 3)))


torch.manual_seed(5)
FLOAT = Network(forward, conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4), head=nn.Linear(4, 3)).eval()
BATCHES = [torch.randn(4, 2, 6, 6) for _ in range(6)]
STEP = 2  # batches, or layers, or trials, before Ctrl-C


def cut_short(items: Any, after: int = STEP) -> Iterator[Any]:
    """Yield the first `after` items, then raise a Ctrl-C."""
    for index, item in enumerate(items):
        if index == after:
            raise KeyboardInterrupt
        yield item


def interrupted(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """The next loop of a module that shows progress is interrupted."""
    monkeypatch.setattr(module, "progress", lambda items, *_: cut_short(items))


@pytest.fixture(scope="module")
def result() -> fxq.results.Result:
    return fxq.quantize(FLOAT, BATCHES, "nash-e", options=fxq.Options(correct_bias=False, choose_ranges=False))


def bits(prepared: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prepared.state_dict().items()}


# ---- what was done is kept ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("where", "error"), [("loader", OSError), ("layer", KeyboardInterrupt)])
@pytest.mark.parametrize(("before", "ends"), [(0, 0), (0, STEP), (0, len(BATCHES)), (1, 1), (1, STEP), (1, len(BATCHES))])
def test_a_calibration_that_does_not_end_leaves_the_state_and_ends_with_what_is_left(
    where: str, error: type[BaseException], before: int, ends: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, stopped = (fxq.prepare(FLOAT, BATCHES[0], "nash-e") for _ in range(2))
    fxq.calibrate(whole, BATCHES)
    if before:
        fxq.calibrate(stopped, BATCHES[:before])
    was, seen, count = fxq.qparams(stopped), list[Any](), ends - before

    def stop(head: QuantizedOperator, _: Any) -> None:
        seen.extend([0] * (head.state is fxq.State.CALIBRATE))  # not where the float model is looked at
        if len(seen) > count:
            raise error

    def loader() -> Iterator[Tensor]:
        yield from BATCHES[before:ends]
        if where == "loader":
            raise error
        yield BATCHES[0]

    handle = quantized_operators(stopped)["head"].register_forward_pre_hook(stop)
    with pytest.raises(error):
        fxq.calibrate(stopped, loader())
    handle.remove()
    state = fxq.State.VALIDATE if before else fxq.State.CALIBRATE
    assert {operator.state for operator in quantized_operators(stopped).values()} == {state}
    assert str(fxq.qparams(stopped)) == str(was)  # NaN where it had none
    assert (f"calibration was stopped after {count} batch" in caplog.text) is (count > 0)
    if count and not before:
        with pytest.raises(fxq.errors.NotCalibrated, match="its calibration has not ended"):
            fxq.convert(stopped)
    fxq.calibrate(stopped, BATCHES[ends:] if count or ends < len(BATCHES) else BATCHES)
    assert same_state(stopped, whole)
    with pytest.raises(fxq.errors.CalibrationError, match="nothing to calibrate with"):
        fxq.calibrate(stopped, [])
    assert same_state(stopped, whole)


ONE_BY_ONE: dict[str, tuple[str, Callable[[fx.GraphModule], Any]]] = {  # and what each operator is changed by
    "set_state": ("update_scale", lambda prepared: fxq.set_state(prepared, "validate")),
    "set_qparams": ("set_scale", lambda prepared: fxq.set_qparams(prepared, dict.fromkeys(fxq.qparams(prepared), 0.5))),
    "freeze": ("freeze", fxq.freeze),
    "disable_observer": ("freeze", functions.disable_observer),
    "set_fake_quantize": ("update_scale", lambda prepared: flow.set_fake_quantize(prepared, flow.FakeQuantState.VALIDATION)),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_changes_operators_one_by_one_changes_all_or_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = fxq.prepare(FLOAT, BATCHES[0], "nash-e")
    prepared(BATCHES[0])  # observed, without scales
    (method, call), was = ONE_BY_ONE[name], bits(prepared)
    original, calls = getattr(Quantizer, method), []

    def stop(quantizer: Quantizer, *arguments: Any) -> None:
        original(quantizer, *arguments)
        calls.append(quantizer)
        if len(calls) == STEP:
            raise KeyboardInterrupt

    monkeypatch.setattr(Quantizer, method, stop)
    with pytest.raises(KeyboardInterrupt):
        call(prepared)
    assert same_state(bits(prepared), was)
    assert {operator.state for operator in quantized_operators(prepared).values()} == {fxq.State.CALIBRATE}
    call(prepared)


def test_a_comparison_has_the_batches_before(result: fxq.results.Result) -> None:
    with pytest.raises(fxq.errors.Interrupted, match="compare was interrupted after 2 batches") as stop:
        fxq.compare(FLOAT, result.integer, cut_short(BATCHES))
    actual, wanted = stop.value.result, fxq.compare(FLOAT, result.integer, BATCHES[:STEP], advice=False)
    assert (actual.batches, actual.layers, actual.outputs) == (STEP, wanted.layers, wanted.outputs)
    assert not actual.advice


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
    result = fxq.quantize(model, BATCHES, "nash-e")
    style = {"exact": "exact", "flips": "exact", "qdq": "qdq"}.get(form)
    second = {"prepared": result.prepared, "kernels": result.integer}.get(form) or result.export(tmp_path / "model.onnx", style=style)
    with pytest.raises(fxq.errors.Interrupted, match=r"verify was interrupted after \d+ comparisons") as stop:
        fxq.verify(result.integer, second, cut_short(BATCHES))
    wanted = fxq.verify(result.integer, second, iter(BATCHES[:STEP]))
    assert wanted.elements > 0
    assert stop.value.result == wanted


# ---- a repeated call continues from the results in its file ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "module", "loops"), [(fxq.tuning.correct_bias, bias, bias), (fxq.tuning.round_weights, weights, checkpoint)]
)
def test_a_method_leaves_the_model_as_it_was_and_continues(
    method: Callable[..., Any], module: Any, loops: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_bits = fxq.QConfig(weight=fxq.WeightConfig("int4"))
    torch.manual_seed(1)  # a network whose outputs keep its corrections
    network = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()) for _ in range(4))).eval()

    def calibrated() -> fx.GraphModule:
        prepared = fxq.prepare(network, BATCHES[0], "nash-e", few_bits)
        return fxq.calibrate(
            prepared, BATCHES, options=fxq.Options(equalize=False, round_weights=False, correct_bias=False, choose_ranges=False)
        )

    whole, stopped = calibrated(), calibrated()
    before = bits(stopped)
    rows = method(whole, BATCHES).layers
    with monkeypatch.context() as patch:
        interrupted(patch, loops)
        with pytest.raises(KeyboardInterrupt):
            method(stopped, BATCHES, options=fxq.Options(checkpoint=tmp_path / "done"))
    assert same_state(bits(stopped), before)
    asked: list[Any] = []
    monkeypatch.setattr(module, "weight_of", lambda *arguments, original=module.weight_of: asked.append(0) or original(*arguments))
    resumed = method(stopped, BATCHES, options=fxq.Options(checkpoint=tmp_path / "done"))
    assert resumed.layers == rows
    assert any(row.kept for row in rows[:STEP])  # what is from the file is in the model
    assert same_state(stopped, whole)
    done = len(asked)
    asked.clear()
    method(fresh := calibrated(), BATCHES)
    assert 0 < done < len(asked)
    with pytest.raises(fxq.errors.ConfigurationError, match="of another call"):
        method(fresh, BATCHES, options=fxq.Options(batch_size=1, checkpoint=tmp_path / "done"))


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


def test_equalization_has_no_checkpoint_and_changes_nothing_when_it_is_interrupted() -> None:
    prepared = fxq.prepare(FLOAT, BATCHES[0], "nash-e")
    before = bits(prepared)
    with pytest.raises(KeyboardInterrupt):
        fxq.tuning.equalize(prepared, cut_short(BATCHES))
    assert same_state(bits(prepared), before)
    fxq.tuning.equalize(prepared, BATCHES)


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


# ---- Ctrl-C at any line: the model is in one state, and a second call ends with the bits of one that nothing disturbed -------------------
FEW_BITS = fxq.QConfig(weight=fxq.WeightConfig("int4"))
ALL = fxq.Options(correct_bias=True, choose_ranges=True)
UNEQUAL = [BATCHES[index] * (index % 3 + 1) for index in range(4)]
FOLDERS = tuple(f"{Path(fxq.__file__).parents[1] / name}{os.sep}" for name in ("fxquant", "passes", "backends"))


@contextmanager
def stopped_at(line: int) -> Iterator[list[int]]:
    """Count the library's lines that run inside; raise a Ctrl-C at number `line`, or after it if it is a `with` (never interrupted)."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        count[0] += event == "line"
        due = event == "line" and count[0] >= line > 0
        if due and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            raise KeyboardInterrupt
        return trace if frame.f_code.co_filename.startswith(FOLDERS) else None

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(former)


@functools.cache
def calibrated(count: int) -> fx.GraphModule:
    """A model that has seen so many batches, to be copied."""
    prepared = fxq.prepare(FLOAT, UNEQUAL[0], "nash-e", FEW_BITS)
    return fxq.calibrate(prepared, UNEQUAL[:count], options=ALL) if count else prepared


def calibrate(prepared: fx.GraphModule) -> None:
    """All batches that the model has not seen, as somebody does who goes on."""
    seen = max(int(module.count) for module in prepared.modules() if isinstance(module, Observer))
    pending = any(module.pending for module in prepared.modules() if isinstance(module, Quantizer))
    if pending or seen < len(UNEQUAL):
        fxq.calibrate(prepared, UNEQUAL[seen:], options=ALL)


def train(prepared: fx.GraphModule) -> None:
    """One step, from the state that a checkpoint holds."""
    prepared.load_state_dict(bits(calibrated(len(UNEQUAL))))
    descend(to_train(prepared), UNEQUAL[:1], 0.1)
    fxq.set_state(prepared.eval(), "validate")


def tune(prepared: fx.GraphModule) -> None:
    prepared.load_state_dict(bits(calibrated(len(UNEQUAL))))
    fxq.tuning.reconstruct(prepared, UNEQUAL, steps=2)


def convert(prepared: fx.GraphModule) -> None:
    integer = fxq.convert(prepared)
    assert torch.equal(integer(UNEQUAL[0]), prepared(UNEQUAL[0]))


CALLS: dict[str, tuple[Callable[[fx.GraphModule], None], int]] = {  # and how many batches the model has seen before
    "calibrate": (calibrate, 0),
    "calibrate again": (calibrate, 2),
    "tune": (tune, len(UNEQUAL)),
    "train": (train, len(UNEQUAL)),
    "convert": (convert, len(UNEQUAL)),
}


def facts(prepared: nn.Module) -> list[Any]:
    """Return the settings of a model that no state_dict holds."""
    modules, parameters = [*prepared.modules()], [*prepared.parameters()]
    states = [(each.state, each.left_out, len(each._forward_hooks)) for each in modules if isinstance(each, QuantizedOperator)]
    flags = [[each.training for each in modules], [each.paused for each in modules if isinstance(each, Quantizer)]]
    return [states, flags, [each.requires_grad for each in parameters], torch.get_num_threads(), gc.isenabled(), torch.is_grad_enabled()]


@functools.cache
def undisturbed(name: str) -> tuple[dict[str, Tensor], list[Any], int]:
    """The bits and the facts that a call leaves, and how many lines it runs when caches are filled."""
    call, before = CALLS[name]
    for _ in range(2):
        prepared = copy.deepcopy(calibrated(before))
        with stopped_at(0) as count:
            call(prepared)
    return bits(prepared), facts(prepared), count[0]


@pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_after_an_interrupt_at_any_line_ends_with_the_bits_of_one(name: str, times: int) -> None:
    wanted, facts_wanted, count = undisturbed(name)
    (call, before), generator = CALLS[name], random.Random(name)
    was, facts_before = bits(calibrated(before)), facts(calibrated(before))
    scales = [key for key in was if not re.search(r"\.(observer|range|others|factors)\.", key)]
    for at in [generator.randint(1, count) for _ in range(times)]:
        prepared = copy.deepcopy(calibrated(before))
        with suppress(KeyboardInterrupt), stopped_at(at):
            call(prepared)
        result = bits(prepared)
        if name != "train" and not same_state(result, wanted):  # it has not ended
            assert same_state({key: result[key] for key in scales}, {key: was[key] for key in scales}), at
            assert facts(prepared) == facts_before, at
        states = {operator.state for operator in quantized_operators(prepared).values()}
        assert len(states) == 1, at
        if states != {fxq.State.CALIBRATE}:
            fxq.set_state(other := copy.deepcopy(prepared).eval(), "validate")
            assert torch.equal(other(BATCHES[0]), fxq.convert(other)(BATCHES[0])), at
        call(prepared)
        assert same_state(bits(prepared), wanted), at
        assert facts(prepared) == facts_wanted, at
