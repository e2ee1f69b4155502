"""Every argument of every public function with a wrong type, name or value, None, or an empty one: an error that says what is right.

Each function has a call that works, and for each of its arguments what is wrong. What looks wrong and is accepted stands in a table of its
own, with what it means.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.cli import main
from fxquant.reporting.inspection import saved_model


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.conv(image).relu().mean((2, 3)))


def batch() -> Tensor:
    return torch.randn(4, 2, 6, 6)


class Writer:
    def add_scalar(self, *args: Any) -> None: ...

    def add_text(self, *args: Any) -> None: ...

    def add_histogram_raw(self, *args: Any, **kwargs: Any) -> None: ...


class World:
    """Models in every form, and files, made once; the calls under test are to change none of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = Network().eval()
        self.prepared, self.integer = self._compiled()
        self.onnx, self.file = fxq.export_onnx(self.integer, directory / "model.onnx"), fxq.save(self.integer, directory / "model.fxq")
        self.segments = fxq.export_segments(self.integer, directory / "segments").parent
        self.text = directory / "text.txt"
        self.text.write_text("no model", encoding="utf-8")
        self.result = fxq.Result(self.model, self.prepared, self.integer)
        self.uncalibrated = fxq.prepare(self.model, batch(), "nash-e")
        self.report = fxq.Report()
        self.observations = fxq.observations(self.prepared)
        budget = fxq.Budget(weight_bits=8)
        self.searched = fxq.mixed_precision(self.model, [batch()], budget=budget, widths=8, measured=False, show_progress=False)

    def _compiled(self) -> tuple[Any, Any]:
        prepared = fxq.prepare(self.model, batch(), "nash-e")
        fxq.calibrate(prepared, [batch()], show_progress=False)
        return prepared, fxq.convert(prepared)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.manual_seed(0)
    return World(tmp_path_factory.mktemp("world"))


class Colour(enum.Enum):
    RED = "red"


UNPRINTABLE = type("Unprintable", (), {"__repr__": lambda self: 1 / 0})()
FLAGS = ["True", 1, 0, 1.0, [], "", "yes", torch.tensor(True)]
COUNTS = [True, False, -1, 1.5, "3", float("nan"), [], (1,), torch.tensor([1, 2]), Colour.RED]
NAMES = [5, [5], [None], b"conv", [""], "", {"a": 1}.values(), 1.5, True]
NUMBERS = [0, 0.0, -1.0, float("nan"), float("inf"), -float("inf"), True, "1", "", [], [1.0], 1j, Colour.RED, torch.ones(2)]
PATHS = [None, 5, 1.5, "", b"model", [], ["a", "b"], "a\0b", True, UNPRINTABLE]
PICTURES = [*PATHS[1:], "graph", "graph.gif"]
CALLABLES = [5, "identity", [], "", {}, 1.5, True]
CHOSEN = ["int8", 5, {}, [], True, fxq.QConfig, fxq.ActivationConfig(), fxq.QConfigMapping(), torch.int8]
MODELS = [None, 5, "model", [], {}, lambda x: x, nn.Module, torch.ones(2), Path("model.fxq"), UNPRINTABLE]
OBSERVATIONS = ["seen", 5, {}, [], True, {"conv": (0.0, 1.0)}, fxq.Observations, Path("seen.fxq")]
GRAPHS = [*MODELS, nn.Linear(2, 2)]
EXAMPLES = [
    None,
    5,
    "image",
    [],
    (),
    {},
    {"imag": torch.zeros(1)},
    {5: torch.zeros(1)},
    (1, 2),
    (None,),
    np.zeros((4, 2, 6, 6)),
    {"image": 5},
]
TARGETS = [None, 5, "", "bayse", "bayes e", [], True, 1.5, {}, Colour.RED, UNPRINTABLE]
WRONG_BATCHES = [None, 5, 1.5, True, nn.Linear(2, 2), Colour.RED, {}, [5], [None], "images", [[]], [{}], np.zeros((4, 2, 6, 6))]
NO_BATCHES = ["", [], (), iter(())]
BATCHES = [*WRONG_BATCHES, *NO_BATCHES]
UNTIL = ["", "activation.fold", "fuse", 5, True, [], 1.5, "CANONICAL", Colour.RED]
DEBUGS = [True, -1, 4, "1", "abc", 1.5, [], ""]
CUTS = [5, True, 1.5, "cnv", "conv", [5], [None], [[5]], ["cnv"], [["conv", "cnv"]], [""], Colour.RED]
KEPT = {
    "leaf": [*CALLABLES, [5], ["conv", "cnv"], nn.LSTM, [nn.LSTM], "model"],
    "preserve": [*NAMES, None, ["naems"], ["conv.strid"], ["graph"], ["training"]],
    "training_branch": [*FLAGS, None],
}  # what is kept of the model's Python
SEARCH = {
    "widths": [None, "8", 5, [5], [], 8.0, [None], True],
    "measured": [*FLAGS, None],
    "metric": [*CALLABLES, lambda model: "good", lambda model: float("nan"), lambda model: None],
    "seed": [*COUNTS, None],
    "checkpoint": PATHS[1:],
    "show_progress": FLAGS,
}  # what searches have in common
STYLES = [None, "", "qdqq", "EXACT", 5, [], True, ["exact"], Colour.RED]


@functools.wraps(fxq.record)
def recorded(*args: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
    """All that is recorded: a batch that does not fit is met when its turn comes."""
    return list(fxq.record(*args, **kwargs))


@functools.wraps(fxq.run_segments)
def segments_run(*args: Any, inputs: Sequence[Any] = (), **kwargs: Any) -> tuple[Tensor, ...]:
    """What takes its inputs by position alone, by name like everything else that is called here."""
    return fxq.run_segments(*(args if not inputs else (kwargs.pop("folder"), *inputs)), **kwargs)


LEARNING: tuple[Callable[..., Any], ...] = (fxq.tuning.adaround, fxq.tuning.reconstruct, fxq.tuning.distill)

Call = Callable[..., Any]
CALLS: dict[str, tuple[Callable[[World], tuple[Call, dict[str, Any]]], dict[str, list[Any]]]] = {
    "trace": (
        lambda w: (fxq.trace, {"model": w.model, "example_inputs": batch()}),
        {
            "model": MODELS,
            "example_inputs": EXAMPLES,
            "dynamic_shapes": [5, "batch", [], {"image": 0}, 1.5, Colour.RED],
            **KEPT,
            "check": FLAGS,
        },
    ),
    "prepare": (
        lambda w: (fxq.prepare, {"model": w.model, "example_inputs": batch()}),
        {
            "model": MODELS,
            "example_inputs": EXAMPLES,
            "target": TARGETS,
            "qconfig": [value for value in CHOSEN if not isinstance(value, fxq.QConfigMapping)],
            "dynamic_shapes": [5, "batch", [], {"image": 0}],
            "batch_norm": [None, "", "dead", True, 5, [], ["live"]],
            "observations": OBSERVATIONS,
            "adapt": [*FLAGS, None],
            **KEPT,
            "passes": [5, "rules.match", [], {5: None}, {"rules.match": 5}, {"rules.match": [5]}, {"": len}, {"nonsense": len}],
            "until": [*UNTIL, "integer.lower", fxq.Stage.INTEGER],
            "debug": DEBUGS,
            "dump": [5, 1.5, "", b"dump", [], True, "a\0b"],
        },
    ),
    "check": (
        lambda w: (fxq.check, {"model": w.model, "example_inputs": batch()}),
        {
            "model": MODELS,
            "example_inputs": EXAMPLES,
            "target": TARGETS,
            "qconfig": CHOSEN[:7],
            "dynamic_shapes": [5, "batch", []],
            "adapt": [*FLAGS, None],
            "leaf": KEPT["leaf"],
        },
    ),
    "convert": (
        lambda w: (fxq.convert, {"prepared": w.prepared}),
        {
            "prepared": GRAPHS,
            "kernels": ["", "fast", None, True, 5, ["auto"]],
            "until": [*UNTIL, "rules.match", fxq.Stage.PREPARED, fxq.Stage.TRACED],
            "debug": DEBUGS,
            "dump": [5, "", b"dump", []],
        },
    ),
    "wrap": (
        lambda w: (fxq.wrap, {"function": len}),
        {"function": [5, "", "no such", "nothing_here", [], 1.5, True, nn.Linear, nn.Linear(1, 1)], "fake": CALLABLES},
    ),
    "calibrate": (
        lambda w: (fxq.calibrate, {"prepared": w.uncalibrated, "batches": [batch()]}),
        {
            "prepared": GRAPHS,
            "batches": BATCHES,
            "num_batches": [*COUNTS, 0],
            "batch_fn": CALLABLES,
            "distributed": [*FLAGS, None],
            "only_missing": [*FLAGS, None],
            "equalize": [*FLAGS, None],
            "round_weights": FLAGS,
            "correct_bias": FLAGS,
            "balance_samples": FLAGS,
            "show_progress": FLAGS,
        },
    ),
    "equalize": (
        lambda w: (fxq.equalize, {"prepared": w.uncalibrated, "batches": [batch()]}),
        {
            "prepared": GRAPHS,
            "batches": BATCHES,
            "num_batches": [*COUNTS, 0],
            "batch_fn": CALLABLES,
            "distributed": [*FLAGS, None],
            "show_progress": FLAGS,
        },
    ),
    "quantize": (
        lambda w: (fxq.quantize, {"model": w.model, "batches": [batch()]}),
        {
            "model": MODELS,
            "batches": BATCHES,
            "target": TARGETS,
            "qconfig": CHOSEN[:7],
            "batch_norm": ["lively", None, 3, "", True],
            "observations": OBSERVATIONS,
            "adapt": [*FLAGS, None],
            "leaf": KEPT["leaf"],
            "preserve": KEPT["preserve"],
            "num_batches": [*COUNTS, 0],
            "batch_fn": CALLABLES,
            "distributed": [*FLAGS, None],
            "equalize": [*FLAGS, None],
            "show_progress": FLAGS,
        },
    ),
    "verify": (
        lambda w: (fxq.verify, {"first": w.prepared, "second": w.integer, "batches": [batch()]}),
        {"first": [*MODELS[:-2], "", "none.onnx"], "second": [*MODELS[:-2], "", "none.onnx"],
         "batches": WRONG_BATCHES, "show_progress": FLAGS},
    ),
    "record": (
        lambda w: (recorded, {"model": w.prepared, "batches": [batch()]}),
        {
            "model": [*GRAPHS, "", "none.onnx"],
            "batches": WRONG_BATCHES,
            "kinds": [*NAMES, None, "covn", ["quantized", "covn"], {"quantized"}],
            "real": [*FLAGS, None],
            "state": [5, "", "TRAN", [], True, Colour.RED, fxq.Stage.PREPARED],
            "runtime": ["", 5, "onnx", [], True, "onnxruntime"],
        },
    ),
    "set_state": (
        lambda w: (fxq.set_state, {"prepared": w.prepared, "state": fxq.State.VALIDATE}),
        {
            "prepared": GRAPHS,
            "state": [None, 5, "", "TRAN", "validated", [], True, Colour.RED, fxq.Stage.PREPARED],
            "modules": [*NAMES, "cnv", ["conv", "cnv"]],
        },
    ),
    "freeze": (
        lambda w: (fxq.freeze, {"prepared": w.prepared}),
        {"prepared": GRAPHS, "scales": [*FLAGS, None], "batch_norm": [*FLAGS, None, "live"]},
    ),
    "observations": (lambda w: (fxq.observations, {"prepared": w.prepared}), {"prepared": GRAPHS}),
    "qparams": (lambda w: (fxq.qparams, {"prepared": w.prepared}), {"prepared": GRAPHS}),
    "set_qparams": (
        lambda w: (fxq.set_qparams, {"prepared": w.uncalibrated, "scales": {"conv": 0.5}}),
        {
            "prepared": GRAPHS,
            "scales": [
                None, 5, "conv", 0.5, [], ["conv"], [("conv", 0.5)], {5: 0.5}, {"cnv": 0.5}, {"": 0.5},
                *({"conv": number} for number in [*NUMBERS, None]),
            ],
        },
    ),
    "layers": (lambda w: (fxq.layers, {"model": w.integer}), {"model": GRAPHS}),
    "explain": (
        lambda w: (fxq.explain, {"model": w.integer}),
        {"model": GRAPHS, "steps": [*FLAGS, None], "machine": [*FLAGS, None]},
    ),
    "text": (lambda w: (fxq.text, {"gm": w.integer}), {"gm": GRAPHS, "steps": [*FLAGS, None], "kernels": ["", "fast", None, True, 5]}),
    "segments": (lambda w: (fxq.segments, {"model": w.integer}), {"model": GRAPHS, "cut": CUTS}),
    "export_segments": (
        lambda w: (fxq.export_segments, {"integer": w.integer, "folder": w.directory / "cut"}),
        {"integer": GRAPHS, "folder": PATHS, "cut": CUTS, "opset": [True, 9, 22, -1, "17", 17.0, [], 1.5, ""]},
    ),
    "export_horizon": (
        lambda w: (fxq.export_horizon, {"integer": w.integer, "folder": w.directory / "horizon"}),
        {
            "integer": GRAPHS,
            "folder": PATHS,
            "name": [None, 5, "", "a/b", "it's", b"net", []],
            "optimize": [None, "O4", 2, "", "o2", []],
            "mode": [None, "fast", 1, "", []],
            "camera": ["rgb", 1, "", []],
            "input_names": [*NAMES, ["a;b"]],
            "output_names": NAMES,
        },
    ),
    "compile_horizon": (
        lambda w: (fxq.compile_horizon, {"folder": w.directory}),
        {"folder": [*PATHS, "nowhere"], "show_progress": FLAGS},
    ),
    "conformance_kit": (
        lambda w: (fxq.conformance_kit, {"folder": w.directory / "kit", "target": "bayes-e"}),
        {
            "folder": PATHS, "target": [*TARGETS, "nash-e"], "dtypes": [None, 5, [], ["int4"], [8]],
            "operators": [5, [], ["conv 3x4"], [3]], "scales": [None, 5, [], ["other"]], "show_progress": FLAGS,
        },
    ),
    "check_conformance": (
        lambda w: (fxq.check_conformance, {"folder": w.directory, "results": w.directory}),
        {"folder": [*PATHS, "nowhere"], "results": PATHS, "show_progress": FLAGS},
    ),
    "simulate_conformance": (
        lambda w: (fxq.simulate_conformance, {"folder": w.directory}),
        {"folder": [*PATHS, "nowhere"], "results": [path for path in PATHS if path is not None], "show_progress": FLAGS},
    ),
    **{
        f"export_{kind}": (
            lambda w, export=export, kind=kind: (export, {"integer": w.integer, "path": w.directory / f"exported.{kind}"}),
            {"integer": GRAPHS, "path": PATHS},
        )
        for kind, export in {"pt2": fxq.export_pt2, "torchscript": fxq.export_torchscript}.items()
    },
    "export_c": (
        lambda w: (fxq.export_c, {"integer": w.integer, "path": w.directory / "net.c"}),
        {"integer": GRAPHS, "path": [*PATHS, "net.onnx", "net"], "batch_size": [0, -1, True, None, "1", 1.5, []], "external_data": FLAGS},
    ),
    "run_segments": (
        lambda w: (segments_run, {"folder": w.segments, "inputs": (batch(),)}),
        {
            "folder": [*PATHS, "none"],
            "inputs": [(), (batch(), batch()), (None,), ("image",), (np.zeros((4, 2, 6, 6)),)],
            "runtime": [None, "", 5, "onnx", [], True],
            "python": [5, "", [], {"a": 1}, {1: len}, True],
        },
    ),
    "unary": (
        lambda w: (fxq.unary, {"name": "never_declared", "function": torch.exp}),
        {
            "name": [None, 5, "", b"wave", ["wave"], True, nn.Conv2d, "relu", "two words", "1st"],
            "function": [None, *CALLABLES],
            "number": CALLABLES,
        },
    ),
    "operator": (
        lambda w: (fxq.operator, {"name": "never_declared", "function": lambda a, b: a + b, "operands": [], "expand": None}),
        {
            "name": [None, 5, "", b"wave", ["wave"], True, nn.Conv2d, "relu", "two words", "1st"],
            "function": [None, *CALLABLES],
            "operands": [None, *NAMES],
            "expand": CALLABLES,
            "lower": CALLABLES,
        },
    ),
    "dump": (lambda w: (fxq.dump, {"model": w.integer, "path": w.directory / "dump"}), {"model": GRAPHS, "path": PATHS}),
    "save": (lambda w: (fxq.save, {"model": w.integer, "path": w.directory / "saved.fxq"}), {"model": GRAPHS, "path": PATHS}),
    "load": (lambda w: (fxq.load, {"path": w.file}), {"path": [*PATHS, "none.fxq"], "kernels": ["", "fast", None, True, 5]}),
    "onnx_metadata": (lambda w: (fxq.onnx_metadata, {"path": w.onnx}), {"path": [*PATHS, "none.onnx"]}),
    "export_onnx": (
        lambda w: (fxq.export_onnx, {"model": w.integer, "path": w.directory / "exported.onnx"}),
        {
            "model": GRAPHS,
            "path": PATHS,
            "style": STYLES,
            "io": [None, "", "int", True, 5, [], ["float"]],
            "opset": [True, 9, 22, -1, "17", 17.0, [], 1.5, ""],
            "input_names": [*NAMES, "image", [], ["a", "b"]],
            "output_names": [*NAMES, "score", [], ["a", "b"]],
            "external_data": FLAGS,
            "layouts": [5, "NHWC", [], {"image": "NHCW"}, {"imgae": "NHWC"}, {"image": "NWC"}, {5: "NHWC"}, True],
            "example_inputs": [5, "image", batch()],
            "batch_size": [0, -1, True, "1", 1.5, []],
        },
    ),
    "Result.export": (
        lambda w: (w.result.export, {"path": w.directory / "exported.onnx"}),
        {"path": PATHS, "style": STYLES, "opset": ["17", True]},
    ),
    "Result.verify": (
        lambda w: (w.result.verify, {"path": w.onnx, "batches": [batch()]}),
        {"path": [*PATHS, "none.onnx"], "batches": WRONG_BATCHES},
    ),
    "compare": (
        lambda w: (fxq.compare, {"a": w.prepared, "b": w.integer, "batches": [batch()]}),
        {
            "a": [None, 5, "", "none.onnx", [], {}, torch.ones(2), UNPRINTABLE],
            "b": [None, 5, "", "none.onnx", [], {}, torch.ones(2), UNPRINTABLE],
            "batches": BATCHES,
            "states": [None, "float", ("float",), ("flaot", None), (None, "float"), 5, [], (1, 2), ("float", "train", None)],
            "advice": [*FLAGS, None],
            "prepared": [5, "model", [], nn.Linear(2, 2), fx.symbolic_trace(nn.Linear(2, 2))],
            "num_batches": [*COUNTS, 0],
            "batch_fn": CALLABLES,
            "show_progress": FLAGS,
        },
    ),
    "report": (
        lambda w: (fxq.report, {"model": w.integer, "path": w.directory / "report.html"}),
        {
            "model": GRAPHS,
            "path": PATHS,
            "batches": [*WRONG_BATCHES[1:], [batch()]],
            "reference": [5, [], torch.ones(2)],
            "comparison": [5, "found", [], True],
            "prepared": [5, "model", [], nn.Linear(2, 2)],
            "title": [None, "", 5, [], b"title"],
            "advice": [*FLAGS, None],
            "num_batches": [True, -1, 1.5, "3", [], Colour.RED],
            "batch_fn": CALLABLES,
            "show_progress": FLAGS,
        },
    ),
    "draw": (
        lambda w: (fxq.draw, {"model": w.integer, "path": w.directory / "graph.svg"}),
        {"model": GRAPHS, "path": PICTURES, "depth": [*COUNTS, 0]},
    ),
    "plot_errors": (
        lambda w: (fxq.plot_errors, {"comparison": fxq.compare(w.model, w.integer, [batch()], advice=False)}),
        {"comparison": [None, 5, [], {}, fxq.Report()], "path": PICTURES, "n": [*COUNTS, 0, None]},
    ),
    "plot_sensitivity": (
        lambda w: (fxq.plot_sensitivity, {"found": fxq.sensitivity(w.prepared, [batch()], widths=8, measured=False)}),
        {"found": [None, 5, [], {}, fxq.Report(), fxq.Sensitivity(())], "path": PICTURES, "n": [*COUNTS, 0, None]},
    ),
    "plot_pareto": (
        lambda w: (fxq.plot_pareto, {"results": w.searched}),
        {"results": [None, 5, [], [5], fxq.Report()], "path": PICTURES, "cost": ["", 5, "bytes", [], "latency"]},
    ),
    "plot_training": (
        lambda w: (fxq.plot_training, {"course": [1.0, 0.5]}),
        {
            "course": [
                None, 5, "losses", b"losses", [], {}, [[]], ["one"], {"loss": []}, {"loss": 5}, [float("nan")], {"a": [1.0], "b": []},
                fxq.tuning.TuningResult("distill", ()),
            ],
            "path": PICTURES,
        },
    ),
    "diff": (
        lambda w: (fxq.diff, {"a": w.integer, "b": w.integer}),
        {"a": [*GRAPHS, "", "none.fxq"], "b": [*GRAPHS, "", "none.fxq"]},
    ),
    **{
        f"checks.{check.__name__}": (lambda w, check=check: (check, {"prepared": w.prepared}), {"prepared": GRAPHS})
        for check in (fxq.checks.not_fused, fxq.checks.suspicious_settings)
    },
    **{
        f"checks.{check.__name__}": (lambda w, check=check: (check, {"model": w.integer}), {"model": GRAPHS})
        for check in (fxq.checks.shared_scales, fxq.checks.memory, fxq.checks.devices)
    },
    "checks.compare_weights": (
        lambda w: (fxq.checks.compare_weights, {"a": w.prepared, "b": w.integer}),
        {"a": GRAPHS, "b": GRAPHS},
    ),
    "checks.call_counts": (
        lambda w: (fxq.checks.call_counts, {"model": w.model, "example_inputs": batch()}),
        {"model": MODELS, "example_inputs": EXAMPLES},
    ),
    "checks.value_ranges": (
        lambda w: (fxq.checks.value_ranges, {"model": w.prepared, "batches": [batch()]}),
        {
            "model": [None, 5, "", "none.onnx", [], {}, torch.ones(2), UNPRINTABLE],
            "batches": BATCHES,
            "spread": NUMBERS,
            "num_batches": [*COUNTS, 0],
            "batch_fn": CALLABLES,
            "show_progress": FLAGS,
        },
    ),
    "Result.compare": (lambda w: (w.result.compare, {"batches": [batch()]}), {"batches": BATCHES}),
    "Result.report": (
        lambda w: (w.result.report, {"path": w.directory / "report.html", "batches": [batch()]}),
        {"path": PATHS, "batches": [value for value in BATCHES if value is not None], "title": [None, "", 5]},
    ),
    "Comparison.worst": (
        lambda w: (w.result.compare([batch()], advice=False).worst, {}),
        {"n": [*COUNTS, 0, None]},
    ),
    "Comparison.write_tensorboard": (
        lambda w: (w.result.compare([batch()], advice=False).write_tensorboard, {"writer": Writer()}),
        {"writer": [None, 5, "folder", [], nn.Linear(2, 2)], "step": [*COUNTS, None]},
    ),
    "Report.merge": (lambda w: (fxq.Report().merge, {"other": w.report}), {"other": [None, 5, "report", [], True]}),
    "ActivationConfig": (
        lambda w: (fxq.ActivationConfig, {}),
        {
            "dtype": ["", "int7", "INT8", "quint8", 8, [], True, torch.float32, int, Colour.RED],
            "observer": [
                None, 5, "max", "", [], int, nn.Linear, nn.Identity(), fxq.Observer, fxq.Observer(), lambda x: x, lambda: 5,
                functools.partial(fxq.PercentileObserver, 101), "Mse", "clip", fxq.ClipObserver, fxq.FixedScaleObserver,
            ],
            "scale": NUMBERS,
            "threshold": NUMBERS,
            "training": [None, "", "learn", True, 5, []],
            "power_of_two": [*FLAGS, None],
            "zero_point": ["", "3", 1.5, True, [], -1, 256],
        },
    ),
    "WeightConfig": (
        lambda w: (fxq.WeightConfig, {}),
        {
            "dtype": [None, "", "int32", "int7", 8, [], True, torch.float32],
            "per_channel": [*FLAGS, None],
            "training": [None, "", "frozen", True, 5, []],
            "power_of_two": [*FLAGS, None],
            "p": ["", "2", 0, 0.5, -1, 17, True, [], float("nan"), float("inf")],
            "rounding": [None, "nearest", 5, [], torch.round, nn.Identity, fxq.MinMaxObserver, fxq.Rounding, fxq.Nearest()],
        },
    ),
    "QConfig": (
        lambda w: (fxq.QConfig, {}),
        {
            "output": [None, "int8", 5, [], {}, fxq.ActivationConfig, fxq.WeightConfig(), fxq.QConfig(), torch.int8],
            "weight": [None, "int8", 5, [], {}, fxq.WeightConfig, fxq.ActivationConfig(), torch.int8],
            "input": ["int8", 5, [], fxq.WeightConfig(), fxq.ActivationConfig, fxq.ActivationConfig("int32")],
            "dynamic": [None, "yes", 5, [], fxq.WeightConfig()],
        },
    ),
    "QConfigMapping": (
        lambda w: (fxq.QConfigMapping, {}),
        {
            "default": CHOSEN,
            "types": [None, [], 5, "conv", {5: None}, {None: None}, {nn.Conv2d: "int8"}, {nn.Identity(): None}],
            "patterns": [None, [], 5, {5: None}, {"(": None}, {"": None}, {"conv": "int8"}],
            "names": [None, [], 5, {5: None}, {"": None}, {"conv": "int8"}, {nn.Conv2d: None}],
            "calls": [None, [], 5, {5: None}, {"conv": None}, {("", nn.Conv2d): None}, {("", nn.Conv2d, -1): None}, {("", 5, 0): None}],
        },
    ),
    "QConfigMapping.set_global": (lambda w: (fxq.QConfigMapping().set_global, {"qconfig": None}), {"qconfig": CHOSEN}),
    "QConfigMapping.set_object_type": (
        lambda w: (fxq.QConfigMapping().set_object_type, {"kind": nn.Conv2d, "qconfig": None}),
        {"kind": [None, 5, [], True, nn.Identity(), 1.5, Path("a")], "qconfig": CHOSEN},
    ),
    "QConfigMapping.set_module_name": (
        lambda w: (fxq.QConfigMapping().set_module_name, {"name": "conv", "qconfig": None}),
        {"name": [None, 5, "", b"conv", ["conv"], True, nn.Conv2d], "qconfig": CHOSEN},
    ),
    "QConfigMapping.set_module_name_object_type_order": (
        lambda w: (
            fxq.QConfigMapping().set_module_name_object_type_order,
            {"module_name": "", "object_type": nn.Conv2d, "index": 0, "qconfig": None},
        ),
        {
            "module_name": [None, 5, b"conv", ["conv"], True, nn.Conv2d],
            "object_type": [None, 5, [], True, nn.Identity(), 1.5, Path("a")],
            "index": [*COUNTS, None],
            "qconfig": CHOSEN,
        },
    ),
    "QConfigMapping.set_module_name_regex": (
        lambda w: (fxq.QConfigMapping().set_module_name_regex, {"pattern": "conv.*", "qconfig": None}),
        {"pattern": [None, 5, "", b"conv", ["conv"], True, "(", "*conv", "[a"], "qconfig": CHOSEN},
    ),
    "sensitivity": (
        lambda w: (fxq.sensitivity, {"model": w.prepared, "batches": [batch()], "widths": 8, "measured": False}),
        {"model": MODELS, "batches": BATCHES, "target": [], "qconfig": [], "num_batches": [*COUNTS, 0], "batch_fn": CALLABLES, **SEARCH},
    ),
    "high_precision_outputs": (
        lambda w: (fxq.high_precision_outputs, {"model": w.model, "example_inputs": batch()}),
        {"model": MODELS, "example_inputs": [], "target": TARGETS[:3], "qconfig": CHOSEN[:3]},
    ),
    "mixed_precision": (
        lambda w: (
            fxq.mixed_precision,
            {"model": w.model, "batches": [batch()], "budget": fxq.Budget(weight_bits=8), "widths": 8, "measured": False},
        ),
        {
            "model": MODELS,
            "batches": BATCHES,
            "target": TARGETS[:3],
            "qconfig": CHOSEN[:3],
            "budget": [None, 5, 5.0, {}, {"weight_bits": 5}, fxq.Budget],
            "batch_fn": CALLABLES[:2],
            **SEARCH,
        },
    ),
    "search_observers": (
        lambda w: (fxq.search_observers, {"model": w.model, "batches": [batch()]}),
        {
            "model": MODELS,
            "batches": BATCHES,
            "target": TARGETS[:3],
            "qconfig": CHOSEN[:3],
            "observers": [None, 5, "min-max", [], [5], [None], [nn.Identity], [fxq.Observer]],
            "metric": CALLABLES,
            "batch_fn": CALLABLES[:2],
            "checkpoint": PATHS[1:],
            "show_progress": FLAGS[:3],
        },
    ),
    "tune": (
        lambda w: (fxq.tune, {"model": w.model, "batches": [batch(), batch()], "tolerance": 100.0}),
        {
            "model": MODELS,
            "batches": [*WRONG_BATCHES, *NO_BATCHES, [batch()]],
            "target": TARGETS[:3],
            "qconfig": CHOSEN[:3],
            "metric": [*CALLABLES, lambda model: "good", lambda model: float("nan"), lambda model: None],
            "budget": [5, 5.0, {}, {"weight_bits": 5}, fxq.Budget],
            "tolerance": [-1, -0.5, float("nan"), float("inf"), "1", True, [], 1j],
            "steps": [*COUNTS, None],
            "batch_fn": CALLABLES[:2],
            "seed": [*COUNTS, None],
            "checkpoint": PATHS[1:],
            "show_progress": FLAGS[:3],
        },
    ),
    "Budget": (
        lambda w: (fxq.Budget, {"weight_bits": 5}),
        {
            "weight_bytes": NUMBERS, "weight_bits": [*NUMBERS, None], "bit_operations": NUMBERS,
            "latency": NUMBERS, "speed": [5, "fast", {}, fxq.Speed, fxq.Speed(1, 1)],
        },
    ),
    "Speed": (
        lambda w: (fxq.Speed, {"macs_per_second": 1e9, "bytes_per_second": 1e9}),
        {"macs_per_second": [*NUMBERS, None], "bytes_per_second": [*NUMBERS, None]},
    ),
    "Roofline": (
        lambda w: (fxq.Roofline, {"macs_per_second": 1e9, "bytes_per_second": 1e9}),
        {
            "macs_per_second": [*NUMBERS, None],
            "bytes_per_second": [*NUMBERS, None],
            "source": [None, 5, "", [], True, UNPRINTABLE],
            "assumed": [*FLAGS, None],
        },
    ),
    "estimate": (
        lambda w: (fxq.estimate, {"integer": w.integer}),
        {
            "integer": GRAPHS, "target": [*TARGETS[1:], "x86"], "roofline": [5, 1e9, "fast", {}, fxq.Roofline, fxq.Speed(1, 1)],
            "compiled": [*(path for path in PATHS if path is not None), "nowhere.bin"],
        },
    ),
    "Estimate.to_html": (
        lambda w: (fxq.estimate(w.integer).to_html, {"path": w.directory / "estimate.html"}),
        {"path": PATHS},
    ),
    "save_qconfig": (
        lambda w: (fxq.save_qconfig, {"mapping": fxq.QConfigMapping(), "path": w.directory / "mapping.json"}),
        {"mapping": [None, "int8", 5, {}, [], fxq.QConfig, fxq.ActivationConfig()], "path": PATHS},
    ),
    "load_qconfig": (
        lambda w: (fxq.load_qconfig, {"path": fxq.save_qconfig(fxq.QConfig(), w.directory / "mapping.json")}),
        {"path": [*PATHS, "none.json"]},
    ),
    "HistogramObserver": (
        lambda w: (fxq.HistogramObserver, {}),
        {"bins": [None, 0, 1, 3, -2, "2048", 2048.0, True, []], "sample": [None, 0, -1, "9", 1.5, True, []]},
    ),
    "PercentileObserver": (
        lambda w: (fxq.PercentileObserver, {}),
        {"percentile": [None, 0, -1, 101, "99", True, float("nan"), []], "bins": [0, 3, "2", None], "sample": [0, "9", None]},
    ),
    "LpObserver": (
        lambda w: (fxq.LpObserver, {}),
        {"p": [None, 0, 0.9, 17, "2", True, float("nan"), []], "bins": [0, 3, "2", None], "sample": [0, "9", None]},
    ),
    "MSEObserver": (lambda w: (fxq.MSEObserver, {}), {"bins": [0, 3, "2", None], "sample": [0, "9", None]}),
    "KLObserver": (lambda w: (fxq.KLObserver, {}), {"bins": [0, 3, "2", None], "sample": [0, "9", None]}),
    "MixObserver": (lambda w: (fxq.MixObserver, {}), {"bins": [0, 3, "2", None], "sample": [0, "9", None]}),
    "ClipStdObserver": (
        lambda w: (fxq.ClipStdObserver, {}),
        {"deviations": [None, 0, -1, "3", True, float("inf"), []], "bins": [0, 3, "2", None], "sample": [0, "9", None]},
    ),
    "ClipObserver": (
        lambda w: (fxq.ClipObserver, {"lowest": -1.0, "highest": 1.0}),
        {"lowest": [None, 1.5, "0", True, float("-inf"), []], "highest": [None, -2.0, "0", True, float("nan"), []]},
    ),
    "FixedScaleObserver": (
        lambda w: (fxq.FixedScaleObserver, {"scale": 0.5}),
        {"scale": [None, 0, -1.0, "1", True, float("inf"), []], "threshold": [1.0, 0, "1", True, float("nan")]},
    ),
    "MovingAverageMinMaxObserver": (
        lambda w: (fxq.MovingAverageMinMaxObserver, {}),
        {"averaging_constant": [None, 0, -1, 1.5, "1", True, float("nan"), []]},
    ),
    **{
        f"tuning.{method.__name__}": (
            lambda w, method=method: (method, {"prepared": w.prepared, "batches": [batch()]}),
            {
                "prepared": GRAPHS,
                "batches": BATCHES,
                "num_batches": [*COUNTS, 0],
                "batch_fn": CALLABLES,
                "show_progress": FLAGS,
                **({} if method is fxq.tuning.reestimate_batch_norm else {
                    "batch_size": [*COUNTS, None, 0], "checkpoint": [path for path in PATHS if path is not None],
                }),
                **({} if method not in LEARNING else {
                    "steps": [*COUNTS, None, 0], "seed": [*COUNTS, None],
                }),
            },
        )
        for method in (fxq.tuning.correct_bias, fxq.tuning.reestimate_batch_norm, fxq.tuning.round_weights, *LEARNING)
    },
    "State": (lambda w: (fxq.State, {"value": "train"}), {"value": [None, 5, "", "TRAN", [], True, Colour.RED]}),
    "main": (lambda w: (main, {"arguments": ["inspect", str(w.file)]}), {"arguments": [5, "inspect", [5], True, 1.5, [None]]}),
}  # fmt: skip

CASES = [
    (name, argument, index) for name, (_, wrong) in CALLS.items() for argument, values in wrong.items() for index in range(len(values))
]


def assert_ours(error: fxq.FxQuantError) -> None:
    """The shape of an error that says what is right."""
    assert error.what.strip()
    assert error.because.strip(), error
    assert error.remedy.strip(), error
    assert str(error).startswith(error.what.splitlines()[0])


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 300


@pytest.mark.parametrize(("name", "argument"), dict.fromkeys(case[:2] for case in CASES))
def test_a_wrong_argument(name: str, argument: str, world: World) -> None:
    accepted = []
    for index, value in enumerate(CALLS[name][1][argument]):
        call, right = CALLS[name][0](world)
        if name == "State":
            call, right = fxq.State, {"value": value}
        try:
            call(**{**right, argument: value})
        except fxq.FxQuantError as error:
            assert_ours(error)
        except Exception as error:
            raise AssertionError(f"number {index}, {value!r}, raised {type(error).__name__}: {error}") from error
        else:
            accepted.append((index, value))
    assert not accepted


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("State", "Result.export")])
def test_an_argument_that_there_is_not_and_one_that_is_missing(name: str, world: World) -> None:
    call, right = CALLS[name][0](world)
    with pytest.raises(fxq.ConfigurationError, match="nonsense") as caught:
        call(**right, nonsense=1)
    assert_ours(caught.value)
    parameters = inspect.signature(call).parameters.values()
    if all(p.kind is not p.VAR_POSITIONAL for p in parameters):
        with pytest.raises(fxq.ConfigurationError, match="too many positional") as caught:
            call(*range(20))
        assert_ours(caught.value)
    if any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters):
        with pytest.raises(fxq.ConfigurationError, match="missing"):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_in_the_table(name: str, world: World) -> None:
    call, _ = CALLS[name][0](world)
    if isinstance(call, type) and issubclass(call, enum.Enum):
        return
    parameters = [p.name for p in inspect.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert set(parameters) <= set(CALLS[name][1]) | {"dynamic_shapes"}


def test_every_public_name_is_in_the_table() -> None:
    passive = {
        "Finding",
        "Findings",
        "Observer",
        "MinMaxObserver",
        "Observations",
        "Rounding",
        "Nearest",
        "AdaptiveRounding",
        "Stage",
        "Target",
        "Intermediate",
        "Layer",
        "Segment",
        "Sensitivity",
        "TensorSensitivity",
        "MixedPrecision",
        "ObserverSearch",
        "ObserverTrial",
        "Tuned",
        "TuneStep",
        "Result",
        "Advice",
        "Estimate",
        "LayerEstimate",
        "CompiledCost",
        "Conformance",
        "ProbeResult",
        "Comparison",
        "GraphDifference",
        "LayerComparison",
        "Report",
        "DeviationReport",
        "__version__",
        "primitives",
        "checks",
        "nn",
        "tuning",
    }
    errors = {name for name in fxq.__all__ if isinstance(getattr(fxq, name), type) and issubclass(getattr(fxq, name), BaseException)}
    assert set(fxq.__all__) - errors - passive <= set(CALLS)


# ---- what is accepted, and what it means -----------------------------------------------------------------------------------------


ACCEPTED: dict[str, Callable[[World], Any]] = {
    "a state by name": lambda w: fxq.set_state(w.prepared, "VALIDATE"),
    "a state by its value": lambda w: fxq.set_state(w.prepared, "validate"),
    "modules: an empty list is none of them": lambda w: fxq.set_state(w.prepared, fxq.State.FLOAT, []),
    "modules: a generator": lambda w: fxq.set_state(w.prepared, "validate", (name for name in ("conv", "head"))),
    "a target in another spelling": lambda w: fxq.prepare(w.model, batch(), "Bayes_E"),
    "a chip": lambda w: fxq.check(w.model, batch(), "x5"),
    "a pathlib.Path as dump": lambda w: fxq.prepare(w.model, batch(), dump=w.directory / "graphs"),
    "until: a stage": lambda w: fxq.prepare(w.model, batch(), until=fxq.Stage.CANONICAL),
    "num_batches: numpy's": lambda w: fxq.calibrate(fxq.prepare(w.model, batch()), [batch()], np.int64(1), show_progress=False),
    "num_batches: more than there are": lambda w: fxq.calibrate(fxq.prepare(w.model, batch()), [batch()], 9, show_progress=False),
    "show_progress: numpy's": lambda w: fxq.verify(w.prepared, w.integer, [batch()], show_progress=np.bool_(False)),
    "scales: numpy's": lambda w: fxq.set_qparams(fxq.prepare(w.model, batch()), {"conv": np.float32(0.5)}),
    "scales: a tensor": lambda w: fxq.set_qparams(fxq.prepare(w.model, batch()), {"conv": torch.tensor(0.5)}),
    "scales: none": lambda w: fxq.set_qparams(fxq.prepare(w.model, batch()), {}),
    "scale: numpy's, an int": lambda w: (fxq.ActivationConfig(scale=np.float64(0.5)), fxq.ActivationConfig(threshold=6)),
    "a dtype of PyTorch's": lambda w: (fxq.ActivationConfig(torch.int16), fxq.WeightConfig(torch.int8)),
    "opset: numpy's": lambda w: fxq.export_onnx(w.integer, w.directory / "numpy.onnx", opset=np.int32(17)),
    "names: a tuple": lambda w: fxq.export_onnx(w.integer, w.directory / "names.onnx", input_names=("a",), output_names=("b",)),
    "a string as path": lambda w: fxq.load(str(w.file)),
    "dynamic_shapes: nothing varies": lambda w: fxq.trace(w.model, batch(), {}),
    "one tensor as batches": lambda w: fxq.calibrate(fxq.prepare(w.model, batch()), batch(), show_progress=False),
    "observations from a file": lambda w: fxq.prepare(
        w.model, batch(), "nash-e", observations=fxq.load(fxq.save(w.observations, w.directory / "seen.fxq"))
    ),
    "a mapping without rules": lambda w: fxq.prepare(w.model, batch(), "bayes", fxq.QConfigMapping()),
    "types: a class, a function, a method": lambda w: fxq.QConfigMapping(types={nn.Conv2d: None, F.relu: None, "relu": None}),
    "an observer by class, instance, partial, function": lambda w: [
        fxq.ActivationConfig(observer=made)
        for made in (
            fxq.MinMaxObserver,
            fxq.MinMaxObserver(),
            functools.partial(fxq.PercentileObserver, 99.0),
            lambda: fxq.MinMaxObserver(),
        )
    ],
}


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted(call: Callable[[World], Any], world: World) -> None:
    call(world)


@pytest.mark.parametrize("batches", NO_BATCHES, ids=lambda batches: type(batches).__name__)
def test_verifying_with_no_batches_is_never_true(batches: Any, world: World) -> None:
    assert not fxq.verify(world.prepared, world.integer, batches, show_progress=False)


def test_a_state_by_name_is_that_state(world: World) -> None:
    assert {fxq.State(name) for name in ("TRAIN", "train", "Train", fxq.State.TRAIN)} == {fxq.State.TRAIN}
    assert fxq.WeightConfig(torch.int8) == fxq.WeightConfig("int8")
    assert fxq.WeightConfig(torch.int8).dtype == "int8"


# ---- places: files where folders are wanted, and the reverse ----------------------------------------------------------------------

PLACES: dict[str, Callable[[World], Any]] = {
    "dump: a file": lambda w: fxq.prepare(w.model, batch(), dump=w.text),
    "dump: below a file": lambda w: fxq.prepare(w.model, batch(), dump=w.text / "graphs"),
    "dump of a graph: a file": lambda w: fxq.dump(w.integer, w.text),
    "save: a folder": lambda w: fxq.save(w.integer, w.directory),
    "save: below a file": lambda w: fxq.save(w.integer, w.text / "model.fxq"),
    "export: a folder": lambda w: fxq.export_onnx(w.integer, w.directory),
    "export of a program: a folder": lambda w: fxq.export_torchscript(w.integer, w.directory),
    "export: below a file": lambda w: fxq.export_onnx(w.integer, w.text / "model.onnx"),
    "load: a folder": lambda w: fxq.load(w.directory),
    "load: a text": lambda w: fxq.load(w.text),
    "load: an ONNX file": lambda w: fxq.load(w.onnx),
    "metadata: a folder": lambda w: fxq.onnx_metadata(w.directory),
    "metadata: a text": lambda w: fxq.onnx_metadata(w.text),
    "verify: a folder": lambda w: fxq.verify(w.integer, w.directory, [batch()]),
    "verify: a saved model": lambda w: fxq.verify(w.integer, w.file, [batch()]),
    "verify: two files": lambda w: fxq.verify(w.onnx, w.onnx, [batch()]),
    "observations of another model": lambda w: fxq.prepare(nn.Linear(6, 2), batch(), observations=w.observations),
    "observations and until": lambda w: fxq.prepare(w.model, batch(), observations=w.observations, until="rules.match"),
    "observations of nothing": lambda w: fxq.observations(w.uncalibrated),
    "a file of observations as a model": lambda w: saved_model(fxq.save(w.observations, w.directory / "seen.fxq")),
    "record: a state of an integer model": lambda w: fxq.record(w.integer, [batch()], state="validate"),
    "record: a state of a file": lambda w: fxq.record(w.onnx, [batch()], state="validate"),
    "record: a runtime of PyTorch's": lambda w: fxq.record(w.integer, [batch()], runtime="reference"),
    "scale and threshold": lambda w: fxq.ActivationConfig(scale=1.0, threshold=1.0),
    "a scale for a sum": lambda w: fxq.ActivationConfig("int32", scale=1.0),
    "a threshold for a sum": lambda w: fxq.ActivationConfig("int32", threshold=1.0),
}


@pytest.mark.parametrize("call", PLACES.values(), ids=PLACES)
def test_a_place_that_does_not_suit(call: Callable[[World], Any], world: World) -> None:
    with pytest.raises(fxq.FxQuantError) as caught:
        call(world)
    assert_ours(caught.value)


@pytest.mark.parametrize("level", ["abc", "-1", "4", "1.5", "True", " "])
def test_the_environment(level: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_DEBUG", level)
    with pytest.raises(fxq.ConfigurationError, match="FXQUANT_DEBUG") as caught:
        fxq.prepare(world.model, batch())
    assert_ours(caught.value)
    fxq.prepare(world.model, batch(), debug=0)  # a keyword goes before it


def test_a_dump_by_the_environment_that_is_a_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_DUMP", str(world.text))
    with pytest.raises(fxq.ConfigurationError, match="FXQUANT_DUMP"):
        fxq.prepare(world.model, batch())


# ---- the command line ---------------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[World], list[str]]] = {
    "no command": lambda w: [],
    "an unknown command": lambda w: ["inspct", str(w.file)],
    "inspect without a file": lambda w: ["inspect"],
    "inspect: no such file": lambda w: ["inspect", "none.fxq"],
    "inspect: a folder": lambda w: ["inspect", str(w.directory)],
    "inspect: a text": lambda w: ["inspect", str(w.text)],
    "inspect: an empty name": lambda w: ["inspect", ""],
    "inspect: an unknown option": lambda w: ["inspect", str(w.file), "--grph"],
    "diff: one file": lambda w: ["diff", str(w.file)],
    "diff: of different kinds": lambda w: ["diff", str(w.file), str(w.onnx)],
    "diff: a folder": lambda w: ["diff", str(w.file), str(w.directory)],
    "verify: one file": lambda w: ["verify", str(w.file)],
    "verify: two ONNX files": lambda w: ["verify", str(w.onnx), str(w.onnx)],
    "verify: a text": lambda w: ["verify", str(w.file), str(w.text)],
    "verify: no such data": lambda w: ["verify", str(w.file), str(w.onnx), "--data", "none.npz"],
    "verify: data that is a folder": lambda w: ["verify", str(w.file), str(w.onnx), "--data", str(w.directory)],
    "verify: data that is a text": lambda w: ["verify", str(w.file), str(w.onnx), "--data", str(w.text)],
    "verify: a batch size of zero": lambda w: ["verify", str(w.file), str(w.onnx), "--batch-size", "0"],
    "verify: a batch size in words": lambda w: ["verify", str(w.file), str(w.onnx), "--batch-size", "many"],
    "demo: an unknown target": lambda w: ["demo", "--target", "bayse", "--out", str(w.directory / "demo")],
    "demo: out is a file": lambda w: ["demo", "--out", str(w.text)],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_the_command_line_ends_with_status_2_and_says_why(
    arguments: Callable[[World], list[str]], world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(arguments(world))
    except SystemExit as exit:  # argparse's own
        status = exit.code
    assert status == 2
    said = capsys.readouterr().err
    assert said.strip()
    assert "Traceback" not in said


# ---- nothing was changed ---------------------------------------------------------------------------------------------------------------


def test_wrong_calls_change_nothing(world: World) -> None:
    def state() -> Iterator[Mapping[str, Any]]:
        for model in (world.uncalibrated, world.prepared):
            yield {
                **model.state_dict(),
                **{f"{name} state": module.state for name, module in model.named_modules() if hasattr(module, "state")},
            }

    before = [{name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()} for found in state()]
    for name, argument, index in CASES:
        if name in ("set_state", "set_qparams", "freeze", "calibrate", "equalize"):
            call, right = CALLS[name][0](world)
            with pytest.raises(fxq.FxQuantError):
                call(**{**right, argument: CALLS[name][1][argument][index]})
    for one, other in zip(before, state(), strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            same = torch.equal(value.nan_to_num(-1), other[name].nan_to_num(-1)) if isinstance(value, Tensor) else value == other[name]
            assert same, name
