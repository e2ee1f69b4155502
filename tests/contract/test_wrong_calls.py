"""Every argument of every public function with a wrong type, name or value, None, or an empty one: an error that says what is right.

`WRONG` has what is wrong for an argument of a name, `ROWS` a call of each function that works and what is special there, `ACCEPTED` what
looks wrong and is accepted.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.cli import main
from fxquant.reporting.forms import saved_model
from tests.shared.written import written


def network() -> Any:
    return written(lambda m, image: m.head(m.conv(image).relu().mean((2, 3))), conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3))


def batch() -> Tensor:
    return torch.randn(4, 2, 6, 6)


class Writer:
    def add_scalar(self, *args: Any) -> None: ...

    def add_text(self, *args: Any) -> None: ...

    def add_histogram_raw(self, *args: Any, **kwargs: Any) -> None: ...


RULES = fxq.QConfigMapping()


class World:
    """Models in every form, and files, made once; the calls under test are to change none of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = network().eval()
        self.result = fxq.quantize(self.model, [batch()], "nash-e", show_progress=False)
        self.prepared, self.integer = self.result.prepared, self.result.integer
        self.onnx, self.file = fxq.export_onnx(self.integer, directory / "model.onnx"), fxq.save(self.integer, directory / "model.fxq")
        self.rules = fxq.save_qconfig(RULES, directory / "rules.json")
        self.segments = fxq.export.export_segments(self.integer, directory / "segments").parent
        self.text = directory / "text.txt"
        self.text.write_text("no model", encoding="utf-8")
        self.uncalibrated = fxq.prepare(self.model, batch(), "nash-e")
        self.observations = fxq.observers.observations(self.prepared)
        self.comparison = self.result.compare([batch()], advice=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.manual_seed(0)
    return World(tmp_path_factory.mktemp("world"))


class Colour(enum.Enum):
    RED = "red"


UNPRINTABLE = type("Unprintable", (), {"__repr__": lambda self: 1 / 0})()
FLAGS = ["True", 1, 0, 1.0, [], "", "yes", torch.tensor(True)]
COUNTS = [True, False, -1, 1.5, "3", float("nan"), [], (1,), torch.tensor([1, 2]), Colour.RED]
ABOVE_ZERO = [*COUNTS, 0]
NAMES = [5, [5], [None], b"conv", [""], "", {"a": 1}.values(), 1.5, True]
NUMBERS = [0, 0.0, -1.0, float("nan"), float("inf"), -float("inf"), True, "1", "", [], [1.0], 1j, Colour.RED, torch.ones(2)]
PATHS = [5, 1.5, "", b"model", [], ["a", "b"], "a\0b", True, UNPRINTABLE]
CALLABLES = [5, "identity", [], "", {}, 1.5, True]
METRICS = [*CALLABLES, lambda model: "good", lambda model: float("nan"), lambda model: None]
CHOSEN = ("int8", 5, {}, [], True, fxq.QConfig, fxq.ActivationConfig(), torch.int8)
NO_QCONFIG = (*CHOSEN, RULES)  # where a mapping is wrong, too
MODELS = [5, "model", [], {}, lambda x: x, nn.Module, torch.ones(2), Path("model.fxq"), UNPRINTABLE]
GRAPHS = [*MODELS, nn.Linear(2, 2)]
FORMS = [5, "", "none.onnx", [], {}, torch.ones(2), UNPRINTABLE]
EXAMPLES = [5, "image", [], (), {}, {"imag": torch.zeros(1)}, {5: torch.zeros(1)}, (1, 2), (None,), np.zeros((4, 2, 6, 6)), {"image": 5}]
TARGETS = [5, "", "bayse", "bayes e", [], True, 1.5, {}, Colour.RED, UNPRINTABLE]
WRONG_BATCHES = [5, 1.5, True, nn.Linear(2, 2), Colour.RED, {}, [5], [None], "images", [[]], [{}], np.zeros((4, 2, 6, 6))]
NO_BATCHES = ["", [], (), iter(())]
UNTIL = ["", "activation.fold", "fuse", 5, True, [], 1.5, "CANONICAL", Colour.RED]
OPERATOR_NAMES = [5, "", b"wave", ["wave"], True, nn.Conv2d, "relu", "two words", "1st"]

# What is wrong for an argument of this name in any function. To a list, None is added where it is not the default.
WRONG: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("a", "b"), FORMS),
    **dict.fromkeys(("adapt", "advice", "choose_ranges", "check", "correct_bias", "distributed", "equalize", "external_data"), FLAGS),
    **dict.fromkeys(
        ("integer_tail", "machine", "measured", "only_missing", "power_of_two", "real", "round_weights", "show_progress"), FLAGS
    ),
    "training_branch": FLAGS,
    **dict.fromkeys(("batch_fn", "expand", "fake", "function", "lower", "number"), CALLABLES),
    **dict.fromkeys(("bit_operations", "bytes_per_second", "latency", "macs_per_second", "scale", "threshold", "weight_bytes"), NUMBERS),
    **dict.fromkeys(("checkpoint", "folder", "path"), PATHS),
    **dict.fromkeys(("gm", "integer", "prepared"), GRAPHS),
    **dict.fromkeys(("seed", "step"), COUNTS),
    **dict.fromkeys(("batch_size", "n", "num_batches", "steps"), ABOVE_ZERO),
    "batch_norm": ["", "dead", "lively", True, 5, [], ["live"]],
    "batches": [*WRONG_BATCHES, *NO_BATCHES],
    "bins": [0, 1, 3, -2, "2048", 2048.0, True, []],
    "budget": [5, 5.0, {}, {"weight_bits": 5}, fxq.search.Budget],
    "cut": [5, True, 1.5, "cnv", "conv", [5], [None], [[5]], ["cnv"], [["conv", "cnv"]], [""], Colour.RED],
    "debug": [True, -1, 4, "1", "abc", 1.5, [], ""],
    "dump": [5, 1.5, "", b"dump", [], True, "a\0b"],
    "dynamic_shapes": [5, "batch", [], {"image": 0}, 1.5, Colour.RED],
    "example_inputs": EXAMPLES,
    "input_names": [*NAMES, ["a;b"]],
    "io": ["", "int", True, 5, [], ["float"]],
    "kernels": ["", "fast", True, 5, ["auto"]],
    "leaf": [*CALLABLES, [5], ["conv", "cnv"], nn.LSTM, [nn.LSTM], "model"],
    "metric": METRICS,
    "model": MODELS,
    "observations": ["seen", 5, {}, [], True, {"conv": (0.0, 1.0)}, fxq.observers.Observations, Path("seen.fxq")],
    "options": [5, {}, [], "leaf", True, fxq.Options, {"adapt": True}],
    "opset": [True, 9, 22, -1, "17", 17.0, [], 1.5, ""],
    "output_names": NAMES,
    "preserve": [*NAMES, ["naems"], ["conv.strid"], ["graph"], ["training"]],
    "qconfig": CHOSEN,
    "sample": [0, -1, "9", 1.5, True, []],
    "style": ["", "qdqq", "EXACT", 5, [], True, ["exact"], Colour.RED],
    "target": TARGETS,
    "title": ["", 5, [], b"title"],
    "training": ["", "learn", True, 5, []],
    "widths": ["8", 5, [5], [], 8.0, [None], True],
}


@functools.wraps(fxq.inspect.record)
def recorded(*args: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
    """All that is recorded: a batch that does not fit is met when its turn comes."""
    return list(fxq.inspect.record(*args, **kwargs))


@functools.wraps(fxq.export.run_segments)
def segments_run(*args: Any, inputs: Sequence[Any] = (), **kwargs: Any) -> tuple[Tensor, ...]:
    """What takes its inputs by position alone, by name like everything else that is called here."""
    return fxq.export.run_segments(*(args if not inputs else (kwargs.pop("folder"), *inputs)), **kwargs)


@dataclass(frozen=True)
class Row:
    """A function, arguments of a call that works, and wrong values of every argument; `self` among the arguments makes it a method."""

    function: Callable[..., Any]
    right: Callable[[World], dict[str, Any]]
    wrong: Mapping[str, Sequence[Any]]

    def call(self, world: World) -> tuple[Callable[..., Any], dict[str, Any]]:
        right = self.right(world)
        return (self.function.__get__(right.pop("self")) if "self" in right else self.function), right  # type: ignore[attr-defined]


def row(function: Callable[..., Any], right: Callable[[World], dict[str, Any]], /, **special: Sequence[Any]) -> Row:
    """The wrong values by the names of the arguments; `special` are those that have another meaning in this function."""
    signature = inspect.signature(function).parameters
    wrong = {name: WRONG[name] for name, parameter in signature.items() if name in WRONG and parameter.kind is not parameter.VAR_KEYWORD}
    wrong.update(special)
    for name, values in wrong.items():
        if name in signature and signature[name].default is not None and isinstance(values, list):
            wrong[name] = [None, *values]
    return Row(function, right, wrong)


def spread(function: Callable[..., Any], options: str) -> Callable[..., Any]:
    """The function with these options as keywords of its own."""
    fields = {name: inspect.signature(fxq.Options).parameters[name] for name in options.split()}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in fields if name in kwargs}
        return function(*args, **{**({"options": fxq.Options(**chosen)} if chosen else {}), **kwargs})

    signature = inspect.signature(function)
    call.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *fields.values()])
    return call


TRACING = "dynamic_shapes leaf preserve training_branch"
PREPARING = f"{TRACING} batch_norm adapt passes integer_tail debug dump"
CALIBRATING = "batch_fn distributed equalize round_weights correct_bias choose_ranges"
PASSES = [5, "rules.match", [], {5: None}, {"rules.match": 5}, {"rules.match": [5]}, {"": len}, {"nonsense": len}]
TUNING: tuple[Callable[..., Any], ...] = (
    *(fxq.tuning.correct_bias, fxq.tuning.reestimate_batch_norm, fxq.tuning.round_weights),
    *(fxq.tuning.adaround, fxq.tuning.reconstruct, fxq.tuning.distill),
)
MODULES = ("board", "errors", "export", "extend", "inspect", "nn", "observers", "primitives", "results", "search", "tuning")
PASSIVE = {  # public names that nobody calls with arguments of his own
    "Finding", "Findings", "Observer", "MinMaxObserver", "Observations", "Rounding", "Nearest", "AdaptiveRounding", "Stage", "Target",
    "Intermediate", "Layer", "Segment", "Sensitivity", "TensorSensitivity", "MixedPrecision", "ObserverSearch", "ObserverTrial", "Tuned",
    "TuneStep", "Result", "Advice", "Estimate", "LayerEstimate", "CompiledCost", "Conformance", "ProbeResult", "Comparison",
    "GraphDifference", "LayerComparison", "Report", "DeviationReport", "__version__", *MODULES,
}  # fmt: skip
ROWS = (
    row(spread(fxq.trace, TRACING), lambda w: {"model": w.model, "example_inputs": batch()}),
    row(
        spread(fxq.prepare, PREPARING),
        lambda w: {"model": w.model, "example_inputs": batch()},
        passes=PASSES,
        until=[*UNTIL, "integer.lower", fxq.results.Stage.INTEGER],
    ),
    row(
        spread(fxq.check, "dynamic_shapes adapt leaf"),
        lambda w: {"model": w.model, "example_inputs": batch()},
        example_inputs=(None, *EXAMPLES),
    ),
    row(
        spread(fxq.convert, "debug dump"),
        lambda w: {"prepared": w.prepared},
        until=[*UNTIL, "rules.match", fxq.results.Stage.PREPARED, fxq.results.Stage.TRACED],
    ),
    row(fxq.wrap, lambda w: {"function": len}, function=[5, "", "no such", "nothing_here", [], 1.5, True, nn.Linear, nn.Linear(1, 1)]),
    row(spread(fxq.calibrate, CALIBRATING), lambda w: {"prepared": w.uncalibrated, "batches": [batch()]}),
    row(spread(fxq.tuning.equalize, "batch_fn distributed"), lambda w: {"prepared": w.uncalibrated, "batches": [batch()]}),
    row(spread(fxq.quantize, f"{PREPARING} {CALIBRATING}"), lambda w: {"model": w.model, "batches": [batch()]}, passes=PASSES),
    row(fxq.Options, lambda w: {}, leaf=[*CALLABLES[:1], [5], [None], [""]], preserve=NAMES, passes=PASSES[:-1], dynamic_shapes=[]),
    row(
        fxq.verify,
        lambda w: {"first": w.prepared, "second": w.integer, "batches": [batch()]},
        first=[*MODELS[:-2], "", "none.onnx"],
        second=[*MODELS[:-2], "", "none.onnx"],
        batches=WRONG_BATCHES,
    ),
    row(
        recorded,
        lambda w: {"model": w.prepared, "batches": [batch()]},
        model=[*GRAPHS, "", "none.onnx"],
        batches=WRONG_BATCHES,
        kinds=[*NAMES, "covn", ["quantized", "covn"], {"quantized"}],
        state=[5, "", "TRAN", [], True, Colour.RED, fxq.results.Stage.PREPARED],
        runtime=["", 5, "onnx", [], True, "onnxruntime"],
    ),
    row(
        fxq.set_state,
        lambda w: {"prepared": w.prepared, "state": fxq.State.VALIDATE},
        state=[5, "", "TRAN", "validated", [], True, Colour.RED, fxq.results.Stage.PREPARED],
        modules=[*NAMES, "cnv", ["conv", "cnv"]],
    ),
    row(fxq.freeze, lambda w: {"prepared": w.prepared}, scales=FLAGS, batch_norm=[*FLAGS, "live"]),
    row(fxq.observers.observations, lambda w: {"prepared": w.prepared}),
    row(fxq.qparams, lambda w: {"prepared": w.prepared}),
    row(
        fxq.set_qparams,
        lambda w: {"prepared": w.uncalibrated, "scales": {"conv": 0.5}},
        scales=[
            *(5, "conv", 0.5, [], ["conv"], [("conv", 0.5)], {5: 0.5}, {"cnv": 0.5}, {"": 0.5}),
            *({"conv": number} for number in [*NUMBERS, None]),
        ],
    ),
    row(fxq.inspect.layers, lambda w: {"model": w.integer}, model=GRAPHS),
    row(fxq.explain, lambda w: {"model": w.integer}, model=GRAPHS, steps=FLAGS),
    row(fxq.text, lambda w: {"gm": w.integer}, steps=FLAGS),
    row(fxq.inspect.segments, lambda w: {"model": w.integer}, model=GRAPHS),
    row(fxq.export.export_segments, lambda w: {"integer": w.integer, "folder": w.directory / "cut"}),
    row(
        fxq.board.export_horizon,
        lambda w: {"integer": w.integer, "folder": w.directory / "horizon"},
        name=[5, "", "a/b", "it's", b"net", []],
        camera=["rgb", 1, "", []],
        options=[fxq.Options()],
    ),
    row(
        fxq.board.board_kit,
        lambda w: {"folder": w.directory / "board", "integer": w.integer, "compiled": w.directory / "none.bin", "batches": [batch()]},
        compiled=[*PATHS, "nowhere.bin"],
    ),
    row(
        fxq.board.HorizonOptions,
        lambda w: {},
        optimize_level=["O4", 2, "", "o2", []],
        compile_mode=["fast", 1, "", []],
        core_num=[0, 3, "1", 1.5, []],
        jobs=[0, -1, "9", 1.5, []],
        outputs=["int32", 1, "", []],
        layout=["NCHW", 1, "", []],
    ),
    row(
        fxq.board.with_camera,
        lambda w: {"integer": w.integer},
        train_type=["yuv", "RGB", 1, "", []],
        mean=[5, "", (1, 2), ("a", 1, 2), (float("nan"), 1, 2)],
        std=[5, "", (1, 2), ("a", 1, 2), (0, 1, 1), (-1, 1, 1)],
    ),
    row(fxq.board.compile_horizon, lambda w: {"folder": w.directory}, folder=[*PATHS, "nowhere"]),
    row(
        fxq.board.conformance_kit,
        lambda w: {"folder": w.directory / "kit", "target": "bayes-e"},
        target=[*TARGETS, "nash-e"],
        dtypes=[5, [], ["int4"], [8]],
        operators=[5, [], ["conv 3x4"], [3]],
        scales=[5, [], ["other"]],
    ),
    row(fxq.board.check_conformance, lambda w: {"folder": w.directory, "results": w.directory}, folder=[*PATHS, "nowhere"], results=PATHS),
    row(fxq.board.simulate_conformance, lambda w: {"folder": w.directory}, folder=[*PATHS, "nowhere"], results=PATHS),
    row(fxq.export.export_pt2, lambda w: {"integer": w.integer, "path": w.directory / "exported.pt2"}),
    row(fxq.export.export_torchscript, lambda w: {"integer": w.integer, "path": w.directory / "exported.torchscript"}),
    row(fxq.export.export_c, lambda w: {"integer": w.integer, "path": w.directory / "net.c"}, path=[*PATHS, "net.onnx", "net"]),
    row(
        segments_run,
        lambda w: {"folder": w.segments, "inputs": (batch(),)},
        folder=[*PATHS, "none"],
        inputs=[(), (batch(), batch()), (None,), ("image",), (np.zeros((4, 2, 6, 6)),)],
        runtime=["", 5, "onnx", [], True],
        python=[5, "", [], {"a": 1}, {1: len}, True],
    ),
    row(fxq.extend.unary, lambda w: {"name": "never_declared", "function": torch.exp}, name=OPERATOR_NAMES),
    row(
        fxq.extend.operator,
        lambda w: {"name": "never_declared", "function": lambda a, b: a + b, "operands": [], "expand": None},
        name=OPERATOR_NAMES,
        operands=NAMES,
    ),
    row(fxq.dump, lambda w: {"model": w.integer, "path": w.directory / "dump"}, model=GRAPHS),
    row(fxq.save, lambda w: {"model": w.integer, "path": w.directory / "saved.fxq"}, model=GRAPHS),
    row(fxq.load, lambda w: {"path": w.file}, path=[*PATHS, "none.fxq"]),
    row(fxq.export.onnx_metadata, lambda w: {"path": w.onnx}, path=[*PATHS, "none.onnx"]),
    row(
        fxq.export_onnx,
        lambda w: {"model": w.integer, "path": w.directory / "exported.onnx"},
        model=GRAPHS,
        input_names=[*NAMES, "image", [], ["a", "b"]],
        output_names=[*NAMES, "score", [], ["a", "b"]],
        layouts=[5, "NHWC", [], {"image": "NHCW"}, {"imgae": "NHWC"}, {"image": "NWC"}, {5: "NHWC"}, True],
        example_inputs=[*EXAMPLES, batch()],
    ),
    row(
        fxq.results.Result.export,
        lambda w: {"self": w.result, "path": w.directory / "exported.onnx"},
        style=(None, *WRONG["style"]),
        opset=["17", True],
    ),
    row(
        fxq.results.Result.verify,
        lambda w: {"self": w.result, "path": w.onnx, "batches": [batch()]},
        path=[*PATHS, "none.onnx"],
        batches=WRONG_BATCHES,
    ),
    row(
        spread(fxq.compare, "batch_fn"),
        lambda w: {"a": w.prepared, "b": w.integer, "batches": [batch()]},
        states=["float", ("float",), ("flaot", None), (None, "float"), 5, [], (1, 2), ("float", "train", None)],
        prepared=[*GRAPHS, fx.symbolic_trace(nn.Linear(2, 2))],
    ),
    row(
        spread(fxq.report, "batch_fn"),
        lambda w: {"model": w.integer, "path": w.directory / "report.html"},
        model=GRAPHS,
        batches=[*WRONG_BATCHES, [batch()]],
        reference=[5, [], torch.ones(2)],
        comparison=[5, "found", [], True],
        num_batches=[True, -1, 1.5, "3", [], Colour.RED],
    ),
    row(fxq.inspect.diff, lambda w: {"a": w.integer, "b": w.integer}, a=[*GRAPHS, "", "none.fxq"], b=[*GRAPHS, "", "none.fxq"]),
    *(row(check, lambda w: {"prepared": w.prepared}) for check in (fxq.inspect.not_fused, fxq.inspect.suspicious_settings)),
    *(
        row(check, lambda w: {"model": w.integer}, model=GRAPHS)
        for check in (fxq.inspect.shared_scales, fxq.inspect.memory, fxq.inspect.devices)
    ),
    row(fxq.inspect.compare_weights, lambda w: {"a": w.prepared, "b": w.integer}, a=GRAPHS, b=GRAPHS),
    row(fxq.inspect.call_counts, lambda w: {"model": w.model, "example_inputs": batch()}),
    row(spread(fxq.inspect.value_ranges, "batch_fn"), lambda w: {"model": w.prepared, "batches": [batch()]}, model=FORMS, spread=NUMBERS),
    row(fxq.results.Result.compare, lambda w: {"self": w.result, "batches": [batch()]}),
    row(
        fxq.results.Result.report,
        lambda w: {"self": w.result, "path": w.directory / "report.html", "batches": [batch()]},
        title=(None, "", 5),
    ),
    row(fxq.results.Comparison.worst, lambda w: {"self": w.comparison}),
    row(
        fxq.results.Comparison.write_tensorboard,
        lambda w: {"self": w.comparison, "writer": Writer()},
        writer=[5, "folder", [], nn.Linear(2, 2)],
    ),
    row(fxq.results.Report.merge, lambda w: {"self": fxq.results.Report(), "other": fxq.results.Report()}, other=[5, "report", [], True]),
    row(
        fxq.ActivationConfig,
        lambda w: {},
        dtype=["", "int7", "INT8", "quint8", 8, [], True, torch.float32, int, Colour.RED],
        observer=[
            *(5, "max", "", [], int, nn.Linear, nn.Identity(), fxq.observers.Observer, fxq.observers.Observer(), lambda x: x, lambda: 5),
            *(
                functools.partial(fxq.observers.PercentileObserver, 101),
                "Mse",
                "clip",
                fxq.observers.ClipObserver,
                fxq.observers.FixedScaleObserver,
            ),
        ],
        zero_point=["", "3", 1.5, True, [], -1, 256],
    ),
    row(
        fxq.WeightConfig,
        lambda w: {},
        dtype=["", "int32", "int7", 8, [], True, torch.float32],
        per_channel=FLAGS,
        training=["", "frozen", True, 5, []],
        p=["", "2", 0, 0.5, -1, 17, True, [], float("nan"), float("inf")],
        rounding=["nearest", 5, [], torch.round, nn.Identity, fxq.observers.MinMaxObserver, fxq.tuning.Rounding, fxq.tuning.Nearest()],
    ),
    row(
        fxq.QConfig,
        lambda w: {},
        output=["int8", 5, [], {}, fxq.ActivationConfig, fxq.WeightConfig(), fxq.QConfig(), torch.int8],
        weight=["int8", 5, [], {}, fxq.WeightConfig, fxq.ActivationConfig(), torch.int8],
        input=["int8", 5, [], fxq.WeightConfig(), fxq.ActivationConfig, fxq.ActivationConfig("int32")],
        dynamic=["yes", 5, [], fxq.WeightConfig()],
    ),
    row(
        fxq.QConfigMapping,
        lambda w: {},
        default=NO_QCONFIG,
        types=[[], 5, "conv", {5: None}, {None: None}, {nn.Conv2d: "int8"}, {nn.Identity(): None}],
        patterns=[[], 5, {5: None}, {"(": None}, {"": None}, {"conv": "int8"}],
        names=[[], 5, {5: None}, {"": None}, {"conv": "int8"}, {nn.Conv2d: None}],
        calls=[[], 5, {5: None}, {"conv": None}, {("", nn.Conv2d): None}, {("", nn.Conv2d, -1): None}, {("", 5, 0): None}],
    ),
    row(RULES.set_global, lambda w: {"qconfig": None}, qconfig=NO_QCONFIG),
    row(
        RULES.set_object_type,
        lambda w: {"kind": nn.Conv2d, "qconfig": None},
        qconfig=NO_QCONFIG,
        kind=[5, [], True, nn.Identity(), 1.5, Path("a")],
    ),
    row(
        RULES.set_module_name,
        lambda w: {"name": "conv", "qconfig": None},
        qconfig=NO_QCONFIG,
        name=[5, "", b"conv", ["conv"], True, nn.Conv2d],
    ),
    row(
        RULES.set_module_name_object_type_order,
        lambda w: {"module_name": "", "object_type": nn.Conv2d, "index": 0, "qconfig": None},
        qconfig=NO_QCONFIG,
        module_name=[5, b"conv", ["conv"], True, nn.Conv2d],
        object_type=[5, [], True, nn.Identity(), 1.5, Path("a")],
        index=COUNTS,
    ),
    row(
        RULES.set_module_name_regex,
        lambda w: {"pattern": "conv.*", "qconfig": None},
        qconfig=NO_QCONFIG,
        pattern=[5, "", b"conv", ["conv"], True, "(", "*conv", "[a"],
    ),
    row(
        spread(fxq.search.sensitivity, f"widths measured seed checkpoint {PREPARING} {CALIBRATING}"),
        lambda w: {"model": w.model, "batches": [batch()], "widths": 8, "measured": False},
        passes=PASSES,
    ),
    row(
        spread(fxq.search.mixed_precision, "widths measured batch_fn seed checkpoint"),
        lambda w: {"model": w.model, "batches": [batch()], "budget": fxq.search.Budget(weight_bits=8), "widths": 8, "measured": False},
    ),
    row(
        spread(fxq.search.search_observers, "batch_fn checkpoint"),
        lambda w: {"model": w.model, "batches": [batch()]},
        observers=[5, "min-max", [], [5], [None], [nn.Identity], [fxq.observers.Observer]],
        metric=CALLABLES,
    ),
    row(
        spread(fxq.tune, "batch_fn seed checkpoint"),
        lambda w: {"model": w.model, "batches": [batch(), batch()], "tolerance": 100.0},
        batches=[*WRONG_BATCHES, *NO_BATCHES, [batch()]],
        tolerance=[-1, -0.5, float("nan"), float("inf"), "1", True, [], 1j],
        steps=COUNTS,
    ),
    row(
        fxq.search.Budget,
        lambda w: {"weight_bits": 5},
        weight_bits=(*NUMBERS, None),
        speed=[5, "fast", {}, fxq.search.Speed, fxq.search.Speed(1, 1)],
    ),
    row(fxq.search.Speed, lambda w: {"macs_per_second": 1e9, "bytes_per_second": 1e9}),
    row(
        fxq.extend.Roofline,
        lambda w: {"macs_per_second": 1e9, "bytes_per_second": 1e9},
        source=[5, "", [], True, UNPRINTABLE],
        assumed=FLAGS,
    ),
    row(
        fxq.estimate,
        lambda w: {"integer": w.integer},
        target=[*TARGETS, "x86"],
        roofline=[5, 1e9, "fast", {}, fxq.extend.Roofline, fxq.search.Speed(1, 1)],
        compiled=[*PATHS, "nowhere.bin"],
    ),
    row(fxq.results.Estimate.to_html, lambda w: {"self": fxq.estimate(w.integer), "path": w.directory / "estimate.html"}),
    row(
        fxq.save_qconfig,
        lambda w: {"mapping": fxq.QConfigMapping(), "path": w.directory / "mapping.json"},
        mapping=["int8", 5, {}, [], fxq.QConfig, fxq.ActivationConfig()],
    ),
    row(fxq.load_qconfig, lambda w: {"path": w.rules}, path=[*PATHS, "none.json"]),
    *(
        row(observer, lambda w: {})
        for observer in (fxq.observers.HistogramObserver, fxq.observers.MSEObserver, fxq.observers.KLObserver, fxq.observers.MixObserver)
    ),
    row(fxq.observers.PercentileObserver, lambda w: {}, percentile=[0, -1, 101, "99", True, float("nan"), []]),
    row(fxq.observers.LpObserver, lambda w: {}, p=[0, 0.9, 17, "2", True, float("nan"), []]),
    row(fxq.observers.ClipStdObserver, lambda w: {}, deviations=[0, -1, "3", True, float("inf"), []]),
    row(
        fxq.observers.ClipObserver,
        lambda w: {"lowest": -1.0, "highest": 1.0},
        lowest=[1.5, "0", True, float("-inf"), []],
        highest=[-2.0, "0", True, float("nan"), []],
    ),
    row(
        fxq.observers.FixedScaleObserver,
        lambda w: {"scale": 0.5},
        scale=(None, 0, -1.0, "1", True, float("inf"), []),
        threshold=[1.0, 0, "1", True, float("nan")],
    ),
    row(fxq.observers.MovingAverageMinMaxObserver, lambda w: {}, averaging_constant=[0, -1, 1.5, "1", True, float("nan"), []]),
    *(
        row(spread(method, "batch_fn batch_size seed checkpoint"), lambda w: {"prepared": w.prepared, "batches": [batch()]})
        for method in TUNING
    ),
    row(fxq.State, lambda w: {"value": "train"}, value=[5, "", "TRAN", [], True, Colour.RED]),
    row(main, lambda w: {"arguments": ["inspect", str(w.file)]}, arguments=[5, "inspect", [5], True, 1.5, [None]]),
)
CALLS = {each.function.__qualname__: each for each in ROWS}
CASES = [(name, argument) for name, each in CALLS.items() for argument in each.wrong]


def assert_ours(error: fxq.FxQuantError) -> None:
    """The shape of an error that says what is right."""
    assert error.what.strip()
    assert error.because.strip(), error
    assert error.remedy.strip(), error
    assert str(error).startswith(error.what.splitlines()[0])


@pytest.fixture
def unchanged(world: World) -> Iterator[None]:
    """A call that is refused changes no tensor and no state of a model."""

    def found() -> Iterator[tuple[str, Any]]:
        for model in (world.uncalibrated, world.prepared):
            yield from model.state_dict().items()
            yield from ((name, module.state) for name, module in model.named_modules() if hasattr(module, "state"))

    before = [(name, value.clone() if isinstance(value, Tensor) else value) for name, value in found()]
    yield
    for (name, value), (now, other) in zip(before, found(), strict=True):
        assert name == now
        assert torch.equal(value.nan_to_num(-1), other.nan_to_num(-1)) if isinstance(value, Tensor) else value == other, name


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_wrong_argument(name: str, argument: str, world: World) -> None:
    accepted = []
    call, right = CALLS[name].call(world)
    for index, value in enumerate(CALLS[name].wrong[argument]):
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
    call, right = CALLS[name].call(world)
    with pytest.raises(fxq.errors.ConfigurationError, match="nonsense") as caught:
        call(**right, nonsense=1)
    assert_ours(caught.value)
    parameters = inspect.signature(call).parameters.values()
    if all(p.kind is not p.VAR_POSITIONAL for p in parameters):
        with pytest.raises(fxq.errors.ConfigurationError, match="too many positional") as caught:
            call(*range(20))
        assert_ours(caught.value)
    if any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters):
        with pytest.raises(fxq.errors.ConfigurationError, match="missing"):
            call()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "State"])
def test_every_argument_is_in_the_table(name: str, world: World) -> None:
    call, _ = CALLS[name].call(world)
    parameters = {p.name for p in inspect.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert parameters <= set(CALLS[name].wrong)


def test_every_public_name_is_in_the_table() -> None:
    modules = [getattr(fxq, name) for name in MODULES if name not in ("errors", "nn", "primitives", "results")]
    names = {"FxQuantError", *(name for module in (fxq, *modules) for name in module.__all__)}
    assert names - {"FxQuantError"} - PASSIVE <= set(CALLS)


# ---- what is accepted, and what it means -----------------------------------------------------------------------------------------


ACCEPTED: dict[str, Callable[[World], Any]] = {
    "a state by name": lambda w: fxq.set_state(w.prepared, "VALIDATE"),
    "modules: an empty list is none of them": lambda w: fxq.set_state(w.prepared, fxq.State.FLOAT, []),
    "modules: a generator": lambda w: fxq.set_state(w.prepared, "validate", (name for name in ("conv", "head"))),
    "a target in another spelling": lambda w: fxq.prepare(w.model, batch(), "Bayes_E"),
    "a chip": lambda w: fxq.check(w.model, batch(), "x5"),
    "a pathlib.Path as dump": lambda w: fxq.prepare(w.model, batch(), options=fxq.Options(dump=w.directory / "graphs")),
    "num_batches: numpy's": lambda w: fxq.calibrate(fxq.prepare(w.model, batch()), [batch()], np.int64(1), show_progress=False),
    "show_progress: numpy's": lambda w: fxq.verify(w.prepared, w.integer, [batch()], show_progress=np.bool_(False)),
    "scales: numpy's": lambda w: fxq.set_qparams(fxq.prepare(w.model, batch()), {"conv": np.float32(0.5)}),
    "scales: a tensor": lambda w: fxq.set_qparams(fxq.prepare(w.model, batch()), {"conv": torch.tensor(0.5)}),
    "scales: none": lambda w: fxq.set_qparams(fxq.prepare(w.model, batch()), {}),
    "scale: numpy's, an int": lambda w: (fxq.ActivationConfig(scale=np.float64(0.5)), fxq.ActivationConfig(threshold=6)),
    "saved models by their paths": lambda w: (
        fxq.verify(w.integer, str(w.file), [batch()]),
        fxq.verify(w.file, w.onnx, [batch()]),
        next(fxq.inspect.record(w.file, [batch()])),
        fxq.compare(w.model, w.file, [batch()]),
    ),
    "a dtype of PyTorch's": lambda w: (fxq.ActivationConfig(torch.int16), fxq.WeightConfig(torch.int8)),
    "opset: numpy's": lambda w: fxq.export_onnx(w.integer, w.directory / "numpy.onnx", opset=np.int32(17)),
    "names: a tuple": lambda w: fxq.export_onnx(w.integer, w.directory / "names.onnx", input_names=("a",), output_names=("b",)),
    "a mapping without rules": lambda w: fxq.prepare(w.model, batch(), "bayes", fxq.QConfigMapping()),
    "types: a class, a function, a method": lambda w: fxq.QConfigMapping(types={nn.Conv2d: None, F.relu: None, "relu": None}),
}


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted(call: Callable[[World], Any], world: World) -> None:
    call(world)


@pytest.mark.parametrize("batches", NO_BATCHES, ids=lambda batches: type(batches).__name__)
def test_verifying_with_no_batches_is_never_true(batches: Any, world: World) -> None:
    assert not fxq.verify(world.prepared, world.integer, batches, show_progress=False)


# ---- arguments that do not fit together; of paths see tests/support/test_files.py ------------------------------------------------


class Scaled(Tensor):
    """A weight as torchao's: integers and a scale, which replace PyTorch's operators."""

    @staticmethod
    def __new__(cls, integers: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, integers.shape)  # type: ignore[attr-defined]

    def __init__(self, integers: Tensor) -> None:
        self.integers = integers

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers)
        raise NotImplementedError(f"{func} of {cls}")


def with_scaled_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].weight = nn.Parameter(Scaled(torch.ones(3, 6)), requires_grad=False)
    return model


TOGETHER: dict[str, Callable[[World], Any]] = {
    "load: a text": lambda w: fxq.load(w.text),
    "load: an ONNX file": lambda w: fxq.load(w.onnx),
    "metadata: a text": lambda w: fxq.export.onnx_metadata(w.text),
    "run_segments: doubles": lambda w: fxq.export.run_segments(
        fxq.export.export_segments(w.integer, w.directory / "of_doubles").parent, batch().double()
    ),
    "record: doubles for a file": lambda w: next(fxq.inspect.record(w.onnx, [batch().double()])),
    "verify: two files": lambda w: fxq.verify(w.onnx, w.onnx, [batch()]),
    "observations of another model": lambda w: fxq.prepare(nn.Linear(6, 2), batch(), observations=w.observations),
    "observations and until": lambda w: fxq.prepare(w.model, batch(), observations=w.observations, until="rules.match"),
    "observations of nothing": lambda w: fxq.observers.observations(w.uncalibrated),
    "a file of observations as a model": lambda w: saved_model(fxq.save(w.observations, w.directory / "seen.fxq")),
    "record: a state of an integer model": lambda w: fxq.inspect.record(w.integer, [batch()], state="validate"),
    "record: a state of a file": lambda w: fxq.inspect.record(w.onnx, [batch()], state="validate"),
    "record: a runtime of PyTorch's": lambda w: fxq.inspect.record(w.integer, [batch()], runtime="reference"),
    "no batches for a prepared model": lambda w: fxq.search.sensitivity(w.prepared, [], options=fxq.Options(widths=(8,), measured=False)),
    "verify: a float model": lambda w: fxq.verify(w.model, w.onnx, [batch()]),
    "validate: no scales yet": lambda w: (fxq.set_state(model := copy.deepcopy(w.uncalibrated), "validate"), model(batch())),
    "prepare: a float64 model": lambda w: fxq.prepare(copy.deepcopy(w.model).double(), batch().double()),
    "prepare: a float16 model": lambda w: fxq.prepare(copy.deepcopy(w.model).half(), batch().half()),
    "prepare: a meta model": lambda w: fxq.prepare(copy.deepcopy(w.model).to("meta"), batch()),
    "prepare: a meta layer": lambda w: fxq.prepare(nn.Sequential(w.model, nn.Linear(3, 2, device="meta")), batch()),
    "prepare: a meta input": lambda w: fxq.prepare(w.model, batch().to("meta")),
    "prepare: a parameter as torchao makes them": lambda w: fxq.prepare(with_scaled_weight(), batch()),
    "prepare: a sparse input": lambda w: fxq.prepare(nn.Linear(6, 3), torch.eye(6).to_sparse()),
    "prepare: a nested input": lambda w: fxq.prepare(nn.Linear(6, 3), torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])),
    "export: no scales yet": lambda w: fxq.export_onnx(w.uncalibrated, w.directory / "uncalibrated.onnx"),
    "export: a float model of unknown shapes": lambda w: fxq.export_onnx(w.model, w.directory / "float.onnx"),
    "convert: no scales yet": lambda w: fxq.convert(w.uncalibrated),
    "convert: an integer model": lambda w: fxq.convert(w.integer),
    "calibrate: an integer model": lambda w: fxq.calibrate(w.integer, [batch()]),
    "calibrate: a traced model": lambda w: fxq.calibrate(fxq.trace(w.model, batch()), [batch()]),
    "freeze: an integer model": lambda w: fxq.freeze(w.integer),
    "qparams: an integer model": lambda w: fxq.qparams(w.integer),
    "set_state: an integer model": lambda w: fxq.set_state(w.integer, fxq.State.TRAIN),
    "set_state: a wrapped model": lambda w: fxq.set_state(nn.ModuleDict({"module": w.prepared}), fxq.State.TRAIN),
    "set_qparams: an integer model": lambda w: fxq.set_qparams(w.integer, {"conv": 0.1}),
    "scale and threshold": lambda w: fxq.ActivationConfig(scale=1.0, threshold=1.0),
    "a scale for a sum": lambda w: fxq.ActivationConfig("int32", scale=1.0),
    "a threshold for a sum": lambda w: fxq.ActivationConfig("int32", threshold=1.0),
}


@pytest.mark.parametrize("call", TOGETHER.values(), ids=TOGETHER)
def test_what_does_not_fit_together(call: Callable[[World], Any], world: World) -> None:
    with pytest.raises(fxq.FxQuantError) as caught:
        call(world)
    assert_ours(caught.value)


@pytest.mark.parametrize("level", ["abc", "-1", "4", "1.5", "True", " "])
def test_the_environment(level: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_DEBUG", level)
    with pytest.raises(fxq.errors.ConfigurationError, match="FXQUANT_DEBUG") as caught:
        fxq.prepare(world.model, batch())
    assert_ours(caught.value)
    fxq.prepare(world.model, batch(), options=fxq.Options(debug=0))  # the option takes precedence over the environment


def test_a_dump_by_the_environment_that_is_a_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_DUMP", str(world.text))
    with pytest.raises(fxq.errors.ConfigurationError, match="FXQUANT_DUMP"):
        fxq.prepare(world.model, batch())
