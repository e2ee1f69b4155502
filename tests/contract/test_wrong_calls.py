"""Every argument of every public function with a wrong type, name or value, None, or an empty one: an error that says what is right.

An argument gets each of `VALUES` that it does not take by `TAKEN`, and what is wrong by its name in `LATER`. `ROWS` has a call of each
function that works and what is special there, `ACCEPTED` what looks wrong and is accepted.
"""

import copy
import enum
import functools
import inspect
import math
import re
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
from fxquant.support.arguments import Kind, shown
from tests.conftest import Golden
from tests.shared.networks import written


def batch() -> Tensor:
    return torch.randn(4, 2, 6, 6)


class Writer:
    def add_scalar(self, *args: Any) -> None: ...

    def add_text(self, *args: Any) -> None: ...

    def add_histogram_raw(self, *args: Any, **kwargs: Any) -> None: ...


RULES = fxq.QConfigMapping()


class World:
    """Models in every form, and files, made once; the calls under test are to change no model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        layers = {"conv": nn.Conv2d(2, 4, 3), "head": nn.Linear(4, 3)}
        self.model = written(lambda m, image: m.head(m.conv(image).relu().mean((2, 3))), **layers).eval()
        self.result = fxq.quantize(self.model, [batch()], "nash-e")
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
TRUE, COLOURS, ARRAY = torch.tensor(True), (0, 1, 1), np.zeros((4, 2, 6, 6))
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 4, 5, 17, 101, 0.0, 0.5, 0.9, 1.0, 1.5, -1.0, 1j, math.nan, math.inf, torch.ones(2), TRUE),
    *("", "no such", "3", "INT8", "two words", "1st", "a/b", "a\0b", "(", b"conv", Path("no such"), Colour.RED, UNPRINTABLE, object()),
    *([], (), (1,), (1, 2), (1, 2, "a"), (1, 2, math.nan), COLOURS, [5], [1.0], [None], [""], ["a", "no such"], {"set"}, [[]], [[5]]),
    *({}, {"a": 1}, {"a": 1}.values(), {5: None}, {None: None}, {"": None}, {"": len}, {"(": None}),
    *({"a": [5]}, {"a": "NHCW"}, {nn.Conv2d: ""}),
    *(len, int, nn.Module, nn.Conv2d, nn.Linear(2, 2), nn.Identity(), [nn.Identity], torch.float32, torch.int8, ARRAY),
    *(fxq.QConfig, fxq.WeightConfig, fxq.ActivationConfig, fxq.Options, fxq.search.Budget, fxq.search.Speed, fxq.extend.Roofline),
    *(fxq.QConfig(), fxq.WeightConfig(), fxq.ActivationConfig("int32"), RULES, fxq.Options(), fxq.search.Speed(1, 1), lambda: 5),
    *(fxq.observers.Observer, fxq.observers.Observer(), fxq.observers.Observations, fxq.tuning.Rounding, fxq.tuning.Nearest()),
)
# What of VALUES an argument without a kind may be, by its name. What a kind takes is in the golden file of this test.
TAKEN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("a", "b", "first", "model", "reference", "second"), lambda value: isinstance(value, nn.Module)),
    "batches": lambda value: isinstance(value, str | list | tuple) and not value,
    "dynamic_shapes": lambda value: isinstance(value, bool | dict) or (type(value) is list and value == [None]),
    "example_inputs": lambda value: isinstance(value, Tensor),
    "qconfig": lambda value: isinstance(value, fxq.QConfig | fxq.QConfigMapping),
    **dict.fromkeys(("gm", "integer", "prepared", "target", "until"), lambda value: False),
    "opset": lambda value: value is None or type(value) is int,
    "title": lambda value: isinstance(value, str) and value != "",
    **dict.fromkeys(("io", "state", "style", "training", "value", "zero_point"), lambda value: value is UNPRINTABLE or value is ARRAY),
}
NUMBERS = [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, "1", "", [], [1.0], 1j, Colour.RED, torch.ones(2)]
NO_BATCHES = ["", [], (), iter(())]
# Values of an argument that are wrong in any function and no VALUES, or that its kind takes and the function refuses.
LATER: dict[str, Sequence[Any]] = {
    "batches": [[{}], *NO_BATCHES], "bins": [-2, "2048", 2048.0], "cut": ["cnv", ["cnv"], [["conv", "cnv"]]], "debug": ["1", "abc"],
    "dynamic_shapes": [{"image": 0}], "example_inputs": [{"imag": torch.zeros(1)}, {5: torch.zeros(1)}, (None,), {"image": 5}],
    "input_names": [["a;b"]], "leaf": [["conv", "cnv"], nn.LSTM, [nn.LSTM], "model"],
    "metric": [lambda model: "good", lambda model: math.nan, lambda model: None], "num_batches": [0],
    "observations": [{"conv": (0.0, 1.0)}], "opset": [9, 28, -1], "options": [{"adapt": True}],
    "passes": [{"rules.match": 5}, {"nonsense": len}], "preserve": [["naems"], ["conv.strid"], ["graph"], ["training"]],
    **{"io": ["int", ["float"]], "style": ["EXACT", "qdqq", ["exact"]]}, "target": ["bayse", "bayes e"],
    "until": ["activation.fold", "fuse", "CANONICAL"],
}  # fmt: skip


def taken(kind: Kind, value: Any) -> bool:
    try:
        kind.take(value)
    except (TypeError, ValueError, OSError, fxq.FxQuantError):
        return False
    return True


@functools.wraps(fxq.inspect.record)
def recorded(*args: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
    """All that is recorded: a batch that does not fit is met when its turn comes."""
    return list(fxq.inspect.record(*args, **kwargs))


@functools.wraps(fxq.export.run_segments)
def segments_run(*args: Any, inputs: Sequence[Any] = (), **kwargs: Any) -> tuple[Tensor, ...]:
    """Call with inputs by name, like every function here, a function that takes them by position alone."""
    return fxq.export.run_segments(*(args if not inputs else (kwargs.pop("folder"), *inputs)), **kwargs)


@dataclass(frozen=True)
class Row:
    """A function, arguments of a call that works, wrong values of every argument, and kinds; with `self` it is a method."""

    function: Callable[..., Any]
    right: Mapping[str, Callable[[World], Any]]
    wrong: Mapping[str, Sequence[Any]]
    kinds: Mapping[str, Kind]

    def call(self, world: World) -> tuple[Callable[..., Any], dict[str, Any]]:
        right = {name: make(world) for name, make in self.right.items()}
        return (self.function.__get__(right.pop("self")) if "self" in right else self.function), right  # type: ignore[attr-defined]


def row(function: Callable[..., Any], right: Mapping[str, Callable[[World], Any]] | None = None, /, **special: Sequence[Any]) -> Row:
    """The wrong values by the names of the arguments; `special` are values that this function refuses, in place of the values of LATER."""
    parameters, owner = inspect.signature(function).parameters, function.__qualname__.partition(".")[0]
    checked = {**fxq.Options.__init__.checked, **getattr(function.__init__ if isinstance(function, type) else function, "checked", {})}  # type: ignore[attr-defined, misc]
    kinds = {name: kind for name, kind in checked.items() if name in parameters}
    wrong = {name: [*special.get(name, LATER.get(name, ()))] for name in (*parameters, *special)}
    for name, result in wrong.items():
        if name in kinds:
            result += [value for value in VALUES if not taken(kinds[name], value)]
            if kinds[name].right.startswith("one of"):
                (first, *_) = re.findall("'([^']*)'", kinds[name].right)
                result += [first.swapcase(), f"{first}s", [first]]
        elif name in TAKEN and function is not fxq.Options:  # it leaves dynamic_shapes to those who read them
            none = name in parameters and parameters[name].default is None
            result += [value for value in VALUES if not (TAKEN[name](value) or (none and value is None))]
    by_name = {name: RIGHT.get(owner if name == "self" else name) for name, each in parameters.items() if each.default is each.empty}
    rights = {name: make for name, make in {**by_name, **(right or {})}.items() if make is not None}
    return Row(function, rights, {name: result for name, result in wrong.items() if result}, kinds)


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
TUNING: tuple[Callable[..., Any], ...] = (
    *(fxq.tuning.correct_bias, fxq.tuning.round_weights),
    *(fxq.tuning.adaround, fxq.tuning.reconstruct, fxq.tuning.distill),
)
MODULES = ("board", "errors", "export", "extend", "inspect", "nn", "observers", "primitives", "results", "search", "tuning")
PASSIVE = {  # public names that nobody calls with arguments of his own
    "Finding", "Findings", "Observer", "MinMaxObserver", "Observations", "Rounding", "Nearest", "AdaptiveRounding", "Stage", "Target",
    "Intermediate", "Layer", "Segment", "Sensitivity", "TensorSensitivity", "MixedPrecision", "Tuned",
    "TuneStep", "Result", "Advice", "Estimate", "LayerEstimate", "CompiledCost", "Conformance", "ProbeResult", "Comparison",
    "GraphDifference", "LayerComparison", "Report", "DeviationReport", "Speed", "__version__", *MODULES,
}  # fmt: skip
GRAPHS = [5, nn.Linear(2, 2), "none.onnx"]
EMPTY = [[{}]]  # batches: none at all are left to the function
# What is right for an argument that is required, by its name; for `self` by its class.
RIGHT: dict[str, Callable[[World], Any]] = {
    "Comparison": lambda w: w.comparison, "Estimate": lambda w: fxq.estimate(w.integer), "Report": lambda w: fxq.results.Report(),
    "Result": lambda w: w.result, **dict.fromkeys(("a", "b", "gm", "integer"), lambda w: w.integer),
    **dict.fromkeys(("batches", "inputs"), lambda w: [batch()]), **dict.fromkeys(("bytes_per_second", "macs_per_second"), lambda w: 1e9),
    "compiled": lambda w: w.directory / "none.bin", "example_inputs": lambda w: batch(), "expand": lambda w: None,
    "first": lambda w: w.prepared, "folder": lambda w: w.directory / "folder", "function": lambda w: torch.exp,
    "kind": lambda w: nn.Conv2d, "mapping": lambda w: fxq.QConfigMapping(), "model": lambda w: w.integer,
    "name": lambda w: "never_declared", "operands": lambda w: [], "other": lambda w: fxq.results.Report(),
    "path": lambda w: w.directory / "path", "pattern": lambda w: "conv.*", "prepared": lambda w: w.prepared, "qconfig": lambda w: None,
    "results": lambda w: w.directory, "second": lambda w: w.integer, "state": lambda w: fxq.State.VALIDATE, "target": lambda w: "bayes-e",
    "writer": lambda w: Writer(),
}  # fmt: skip
FLOAT = {"model": lambda w: w.model}
UNCALIBRATED = {"prepared": lambda w: w.uncalibrated}
ROWS = (
    *map(row, (fxq.observers.observations, fxq.qparams, fxq.inspect.layers, fxq.text, fxq.inspect.segments, fxq.export.export_segments)),
    *map(row, (fxq.board.HorizonOptions, fxq.export.export_pt2, fxq.inspect.not_fused, fxq.QConfig)),
    *map(row, (fxq.inspect.suspicious_settings, fxq.inspect.shared_scales, fxq.inspect.memory, fxq.inspect.devices)),
    *map(row, (fxq.inspect.compare_weights, fxq.results.Result.compare, fxq.results.Comparison.worst)),
    *map(row, (fxq.results.Comparison.write_tensorboard, fxq.extend.Roofline)),
    *map(row, (RULES.set_global, RULES.set_object_type, RULES.set_module_name, fxq.save_qconfig)),
    *map(row, (fxq.observers.HistogramObserver, fxq.observers.MSEObserver, fxq.observers.KLObserver)),
    *map(row, (fxq.observers.PercentileObserver, fxq.observers.LpObserver, fxq.observers.ClipStdObserver)),
    row(fxq.observers.MovingAverageMinMaxObserver),
    row(fxq.inspect.parse, {"written": lambda w: "%x = input"}, written=["", 5, "%x = "], attributes=[5, "conv"]),
    *(row(spread(method, "batch_fn batch_size seed checkpoint")) for method in TUNING),
    row(spread(fxq.inspect.value_ranges, "batch_fn")),
    row(spread(fxq.trace, TRACING), FLOAT),
    row(spread(fxq.prepare, PREPARING), FLOAT, until=[*LATER["until"], "integer.lower", fxq.results.Stage.INTEGER]),
    row(spread(fxq.check, "dynamic_shapes adapt leaf"), FLOAT, example_inputs=[None, *LATER["example_inputs"]]),
    row(spread(fxq.convert, "debug dump"), until=[*LATER["until"], "rules.match", fxq.results.Stage.PREPARED, fxq.results.Stage.TRACED]),
    row(fxq.wrap, {"function": lambda w: len}, function=["nothing_here", nn.Linear, nn.Linear(1, 1)]),
    row(spread(fxq.calibrate, CALIBRATING), UNCALIBRATED),
    row(spread(fxq.tuning.equalize, "batch_fn distributed"), UNCALIBRATED),
    row(spread(fxq.quantize, f"{PREPARING} {CALIBRATING}"), FLOAT),
    row(fxq.Options, leaf=(), preserve=(), passes=[{"rules.match": 5}], num_batches=(), dynamic_shapes=()),
    row(fxq.verify, first=GRAPHS, second=GRAPHS, batches=EMPTY),
    row(
        recorded,
        {"model": lambda w: w.prepared},
        **{"model": GRAPHS, "batches": EMPTY, "kinds": ["covn", ["quantized", "covn"], {"quantized"}], "runtime": ["onnxruntime"]},
        state=["TRAN", fxq.results.Stage.PREPARED],
    ),
    row(fxq.set_state, state=["TRAN", "validated", fxq.results.Stage.PREPARED], modules=["cnv", ["conv", "cnv"]]),
    row(fxq.freeze, batch_norm=["live"]),
    row(
        fxq.set_qparams,
        {**UNCALIBRATED, "scales": lambda w: {"conv": 0.5}},
        scales=[0.5, ["conv"], [("conv", 0.5)], {5: 0.5}, {"cnv": 0.5}, {"": 0.5}, *({"conv": number} for number in [*NUMBERS, None])],
    ),
    *(row(function, model=GRAPHS) for function in (fxq.explain, fxq.dump, fxq.save)),
    row(fxq.at_sizes),
    row(fxq.board.export_horizon, {"folder": lambda w: w.directory / "horizon"}, name=["it's"]),
    row(fxq.board.board_kit, compiled=["nowhere.bin"]),
    row(fxq.board.with_camera, mean=[("a", 1, 2)], std=[("a", 1, 2), COLOURS, (-1, 1, 1)]),
    *(row(f, folder=["nowhere"]) for f in (fxq.board.compile_horizon, fxq.board.check_conformance, fxq.board.simulate_conformance)),
    row(
        fxq.board.conformance_kit,
        **{"target": [*LATER["target"], "nash-e"], "dtypes": [[], ["int4"], [8]], "operators": [[], ["conv 3x4"], [3]]},
        scales=[[], ["other"]],
    ),
    row(fxq.export.export_c, path=["net.onnx", "net"]),
    row(fxq.export.unrolled),
    row(
        segments_run,
        {"folder": lambda w: w.segments},
        folder=["none"],
        inputs=[None, (), (batch(), batch()), (None,), ("image",), (np.zeros((4, 2, 6, 6)),)],
        python=[{1: len}],
    ),
    *(row(function, name=["relu"]) for function in (fxq.extend.unary, fxq.extend.operator)),
    row(fxq.load, {"path": lambda w: w.file}, path=["none.fxq"]),
    row(fxq.export.onnx_metadata, {"path": lambda w: w.onnx}, path=["none.onnx"]),
    row(
        fxq.export_onnx,
        **{"model": GRAPHS, "input_names": [[], ["a", "b"]], "output_names": [[], ["a", "b"]]},
        layouts=[{"image": "NHCW"}, {"imgae": "NHWC"}, {"image": "NWC"}, {5: "NHWC"}],
        example_inputs=[*LATER["example_inputs"], batch()],
    ),
    row(fxq.results.Result.export, opset=["17"], style=LATER["style"]),
    row(fxq.results.Result.verify, {"path": lambda w: w.onnx}, path=["none.onnx"], batches=EMPTY),
    row(
        spread(fxq.compare, "batch_fn"),
        states=["float", ("float",), ("flaot", None), (None, "float"), ("float", "train", None)],
        prepared=[fx.symbolic_trace(nn.Linear(2, 2))],
    ),
    row(spread(fxq.report, "batch_fn"), batches=[*EMPTY, [batch()]], num_batches=()),
    row(fxq.inspect.diff, a=[*GRAPHS, "none.fxq"], b=[*GRAPHS, "none.fxq"]),
    row(fxq.results.Result.report, title=[b"title"]),
    row(fxq.inspect.call_counts, FLOAT),
    row(
        fxq.ActivationConfig,
        dtype=["", "INT8", "int7", "quint8", 8, torch.float32],
        observer=[
            "Mse",
            "clip",
            functools.partial(fxq.observers.PercentileObserver, 101),
            fxq.observers.ClipObserver,
            fxq.observers.FixedScaleObserver,
        ],
        zero_point=["", "3", 1.5, True, [], -1, 256],
    ),
    row(
        fxq.WeightConfig,
        dtype=["", "int32", "int7", torch.float32],
        training=["frozen"],
        rounding=[torch.round, fxq.observers.MinMaxObserver],
    ),
    row(
        fxq.QConfigMapping,
        **{"types": [{nn.Identity(): None}], "patterns": [{"conv": "int8"}], "names": [{"conv": "int8"}, {nn.Conv2d: None}]},
        calls=[{"conv": None}, {("", nn.Conv2d): None}, {("", nn.Conv2d, -1): None}, {("", 5, 0): None}],
    ),
    row(RULES.set_module_name_object_type_order, {"module_name": lambda w: "", "object_type": lambda w: nn.Conv2d, "index": lambda w: 0}),
    row(RULES.set_module_name_regex, pattern=["*conv", "[a"]),
    row(
        spread(fxq.search.sensitivity, f"widths measured seed checkpoint {PREPARING} {CALIBRATING}"),
        FLOAT | {"widths": lambda w: 8, "measured": lambda w: False},
    ),
    row(
        spread(fxq.search.mixed_precision, "widths measured batch_fn seed checkpoint"),
        FLOAT | {"budget": lambda w: fxq.search.Budget(weight_bits=8), "widths": lambda w: 8, "measured": lambda w: False},
    ),
    row(
        spread(fxq.tune, "batch_fn seed checkpoint"),
        FLOAT | {"batches": lambda w: [batch(), batch()], "tolerance": lambda w: 100.0},
        batches=[*LATER["batches"], [batch()]],
        tolerance=[-0.5],
    ),
    row(fxq.search.Budget, {"weight_bits": lambda w: 5}, weight_bits=(None,), speed=[fxq.search.Speed(1, 1)]),
    row(fxq.estimate, target=[*LATER["target"], "x86"], compiled=["nowhere.bin"]),
    row(fxq.load_qconfig, {"path": lambda w: w.rules}, path=["none.json"]),
    row(fxq.observers.ClipObserver, {"lowest": lambda w: -1.0, "highest": lambda w: 1.0}, lowest=[1.5], highest=[-2.0]),
    row(fxq.observers.FixedScaleObserver, {"scale": lambda w: 0.5}, scale=(None,), threshold=[1.0]),
    row(fxq.State, {"value": lambda w: "train"}, value=["TRAN"]),
    row(main, {"arguments": lambda w: ["inspect", str(w.file)]}, arguments=["inspect"]),
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


def test_what_each_kind_takes(golden: Golden) -> None:
    kinds = {kind.right: kind for each in ROWS for kind in each.kinds.values()}
    lines = (f"{right}: {', '.join(shown(value) for value in VALUES if taken(kinds[right], value))}" for right in sorted(kinds))
    golden("\n".join(lines) + "\n", "kinds.txt")


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


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("State", "Options")])
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
    "a target with a capital and an underscore": lambda w: fxq.prepare(w.model, batch(), "Bayes_E"),
    "a chip": lambda w: fxq.check(w.model, batch(), "x5"),
    "a pathlib.Path as dump": lambda w: fxq.prepare(w.model, batch(), options=fxq.Options(dump=w.directory / "graphs")),
    "num_batches: numpy's": lambda w: fxq.calibrate(fxq.prepare(w.model, batch()), [batch()], np.int64(1)),
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
    assert not fxq.verify(world.prepared, world.integer, batches)


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

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.integers * 0.5


def with_scaled_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].weight = nn.Parameter(Scaled(torch.ones(3, 6)), requires_grad=False)
    return model


def test_the_line_that_makes_weights_of_torchao_plain_works() -> None:
    model = with_scaled_weight()
    with pytest.raises(fxq.errors.ConfigurationError) as caught:
        fxq.prepare(model, batch())
    exec(caught.value.remedy.partition("plain: ")[2], {"torch": torch, "model": model})
    assert torch.equal(model[0].weight, torch.full((3, 6), 0.5))
    assert fxq.quantize(model, [batch()]).integer(batch()).shape[-1] == 3


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
    """A level of messages that is none, and a folder for graphs that is a file."""
    for name, value in (("FXQUANT_DUMP", str(world.text)), ("FXQUANT_DEBUG", level)):
        monkeypatch.setenv(name, value)
        with pytest.raises(fxq.errors.ConfigurationError, match=name) as caught:
            fxq.prepare(world.model, batch())
        assert_ours(caught.value)
        monkeypatch.delenv("FXQUANT_DUMP", raising=False)
    fxq.prepare(world.model, batch(), options=fxq.Options(debug=0))  # the option takes precedence over the environment
