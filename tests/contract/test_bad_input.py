"""Bad input is met by an error that says what, where, why and what to do; the texts are golden, and nothing is lost."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.backends.onnx.runtime import OnnxModel
from tests.conftest import Golden
from tests.shared.contract import Compiled, assert_validate_is_integer, compiled, graph_values

pytestmark = pytest.mark.usefixtures("default_outputs")

SHAPE = (2, 6, 6)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(64, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.conv(image).relu().flatten(1))


def batch(count: int = 4) -> Tensor:
    return torch.randn(count, *SHAPE)


@functools.cache
def made() -> Compiled:
    return compiled(Small(), [batch()])


@pytest.fixture
def prepared() -> fx.GraphModule:
    return fxq.prepare(Small(), batch(), "bayes-e")


@pytest.fixture
def calibrated() -> fx.GraphModule:
    return copy.deepcopy(made().prepared)


@pytest.fixture
def integer() -> fx.GraphModule:
    return copy.deepcopy(made().integer)


@pytest.fixture
def exported(integer: fx.GraphModule, tmp_path: Path) -> Path:
    return fxq.export_onnx(integer, tmp_path / "model.onnx")


def error_text(action: Callable[[], object], kind: type[fxq.FxQuantError], directory: Path | None = None) -> str:
    """The text of the error that the action raises, without line numbers and temporary directories."""
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    text = re.sub(r"\.py:\d+", ".py:N", str(caught.value))
    return (text if directory is None else text.replace(str(directory), "…")) + "\n"


def observations(prepared: fx.GraphModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prepared.state_dict().items() if ".observer." in name}


def states(prepared: fx.GraphModule) -> set[fxq.State]:
    return {module.state for module in prepared.modules() if hasattr(module, "state")}


def assert_still_usable(prepared: fx.GraphModule) -> None:
    """Calibration goes on, and what comes of it holds the contract."""
    fxq.calibrate(prepared, [batch()], show_progress=False)
    assert_validate_is_integer(prepared, fxq.convert(prepared), batch())


# ---- calibration --------------------------------------------------------------------------------------------------------


def with_value(value: float) -> Tensor:
    bad = batch()
    bad[1, 0, 2, 3] = value
    return bad


BAD_BATCHES: dict[str, Callable[[], Any]] = {
    "nan": lambda: with_value(float("nan")),
    "infinite": lambda: with_value(float("inf")),
    "shape": lambda: torch.randn(4, 2, 6, 7),
    "rank": lambda: torch.randn(2, 6, 6),
    "dtype": lambda: batch().double(),
    "not-a-tensor": lambda: "image",
    "missing-key": lambda: {"picture": batch(), "label": 3},
    "no-items": lambda: (),
}


OVERFLOWS = torch.full((4, *SHAPE), 1e38)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [*BAD_BATCHES, "overflow"])
def test_a_bad_batch_is_refused_and_earlier_ones_are_kept(prepared: fx.GraphModule, name: str, golden: Golden) -> None:
    """A batch that overflows inside, too."""
    if name == "overflow":
        torch.nn.init.constant_(prepared.conv.weight, 10.0)
    good, reference = batch(), copy.deepcopy(prepared)
    fxq.calibrate(reference, [good], show_progress=False)
    bad = OVERFLOWS if name == "overflow" else BAD_BATCHES[name]()
    golden(
        error_text(lambda: fxq.calibrate(prepared, [good, bad], show_progress=False), fxq.errors.CalibrationError), f"calibrate-{name}.txt"
    )
    expected = observations(reference)
    assert all(torch.equal(value, expected[key]) for key, value in observations(prepared).items())
    assert states(prepared) == {fxq.State.CALIBRATE}
    assert_still_usable(prepared)


def used_up() -> Iterator[Tensor]:
    batches = iter([batch()])
    next(batches)
    return batches


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("none", ([],)), ("used-up", (used_up(),)), ("zero-asked-for", ([torch.ones(4, *SHAPE)], 0))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_batches(calibrated: fx.GraphModule, name: str, arguments: tuple[Any, ...], golden: Golden) -> None:
    scales = fxq.qparams(calibrated)
    golden(error_text(lambda: fxq.calibrate(calibrated, *arguments), fxq.errors.CalibrationError), f"no-batches-{name}.txt")
    assert fxq.qparams(calibrated) == scales
    assert_still_usable(calibrated)


def test_an_error_of_the_data_itself_passes_through(prepared: fx.GraphModule) -> None:
    def broken() -> Iterator[Tensor]:
        yield batch()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fxq.calibrate(prepared, broken(), show_progress=False)
    assert_still_usable(prepared)


# ---- the wrong model at the wrong time ------------------------------------------------------------------------------------


def validated(prepared: fx.GraphModule) -> None:
    fxq.set_state(prepared, fxq.State.VALIDATE)
    prepared(batch())


@pytest.mark.parametrize(("name", "use"), [("convert", fxq.convert), ("validate", validated)])
def test_using_a_model_before_calibrating(name: str, use: Callable[[Any], object], prepared: fx.GraphModule, golden: Golden) -> None:
    golden(error_text(lambda: use(prepared), fxq.errors.NotCalibrated), f"{name}-before-calibrate.txt")
    assert_still_usable(prepared)


WRONG_MODELS: dict[str, Callable[[Any], object]] = {
    "calibrate": lambda model: fxq.calibrate(model, [batch()]),
    "convert": fxq.convert,
    "freeze": fxq.freeze,
    "qparams": fxq.qparams,
    "set-state": lambda model: fxq.set_state(model, fxq.State.TRAIN),
    "set-qparams": lambda model: fxq.set_qparams(model, {"conv": 0.1}),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WRONG_MODELS)
def test_a_model_that_is_not_prepared(name: str, golden: Golden, integer: fx.GraphModule) -> None:
    before, image = {key: value.clone() for key, value in integer.state_dict().items()}, batch()
    expected = integer(image)
    for model in (integer, Small(), fxq.prepare(Small(), image, until="batchnorm.fold")):
        text = error_text(lambda model=model: WRONG_MODELS[name](model), fxq.errors.ConfigurationError)
        golden(re.sub(r"^\w+", "Model", text), "not-prepared.txt")
    assert torch.equal(integer(image), expected)
    assert all(torch.equal(value, before[key]) for key, value in integer.state_dict().items())


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return x.relu()
        return -x


# ---- arguments --------------------------------------------------------------------------------------------------------------


def with_head_on_meta() -> nn.Module:
    model = Small()
    model.head.to("meta")
    return model


def with_sums_that_cannot_fit() -> fx.GraphModule:
    layer = nn.Linear(140_000, 2)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    ones = torch.ones(1, 140_000)  # so that their sum is the same on every processor
    return fxq.calibrate(fxq.prepare(nn.Sequential(layer), ones), [ones], show_progress=False)


ERRORS: dict[str, Callable[[], object]] = {
    "argument-model": lambda: fxq.prepare(torch.relu, batch()),
    "convert-until": lambda: fxq.convert(made().prepared, until="batchnorm.fold"),
    # Models and example inputs of which no graph is made.
    "model-float64": lambda: fxq.prepare(Small().double(), batch().double()),
    "model-float16": lambda: fxq.prepare(Small().half(), batch().half()),
    "model-meta-model": lambda: fxq.prepare(Small().to("meta"), batch()),
    "model-meta-layer": lambda: fxq.prepare(with_head_on_meta(), batch()),
    "model-meta-input": lambda: fxq.prepare(Small(), batch().to("meta")),
    "model-lazy": lambda: fxq.prepare(nn.Sequential(nn.LazyConv2d(4, 3)), batch()),
    "model-sparse-input": lambda: fxq.prepare(nn.Linear(6, 3), torch.eye(6).to_sparse()),
    "model-nested-input": lambda: fxq.prepare(nn.Linear(6, 3), torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])),
    "model-nothing": lambda: fxq.prepare(Small(), None),
}
OTHER_ERRORS: dict[str, tuple[type[fxq.FxQuantError], Callable[[], object]]] = {
    "argument-target": (fxq.errors.UnknownTarget, lambda: fxq.prepare(Small(), batch(), "byes-e")),
    "argument-target-far-off": (fxq.errors.UnknownTarget, lambda: fxq.prepare(Small(), batch(), "toaster")),
    "control-flow": (fxq.errors.TraceError, lambda: fxq.prepare(Branches(), torch.randn(2, 3))),
    "quantize-no-batches": (fxq.errors.CalibrationError, lambda: fxq.quantize(Small(), [])),
    "accumulator-overflow": (fxq.errors.AccumulatorOverflow, lambda: fxq.convert(with_sums_that_cannot_fit())),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ERRORS, *OTHER_ERRORS])
def test_an_error_says_what_where_why_and_what_to_do(name: str, golden: Golden) -> None:
    kind, action = OTHER_ERRORS[name] if name in OTHER_ERRORS else (fxq.errors.ConfigurationError, ERRORS[name])
    golden(error_text(action, kind), f"{name}.txt")


class Complex(nn.Module):
    """Numbers that are not real, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(6, 6), nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(self.layer(x)) * self.turn + self.layer(x) * self.turn).real


def test_complex_numbers_stay_in_float_and_say_so() -> None:
    prepared, integer = compiled(Complex(), [torch.randn(4, 6)])
    assert "its result is complex64, and only float32 tensors are quantized" in fxq.explain(prepared)
    assert_validate_is_integer(prepared, integer, torch.randn(4, 6))


@pytest.mark.parametrize(
    ("name", "scales"),
    [("nan", {"conv": float("nan")}), ("unknown", {"tail": 0.5})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scale_that_is_no_scale(calibrated: fx.GraphModule, name: str, scales: dict[str, float], golden: Golden) -> None:
    before = fxq.qparams(calibrated)
    golden(error_text(lambda: fxq.set_qparams(calibrated, {"head": 0.5, **scales}), fxq.errors.ConfigurationError), f"scale-{name}.txt")
    assert fxq.qparams(calibrated) == before


def test_the_state_of_an_unknown_module(calibrated: fx.GraphModule, golden: Golden) -> None:
    action = error_text(lambda: fxq.set_state(calibrated, fxq.State.TRAIN, ["conv", "cnv"]), fxq.errors.ConfigurationError)
    golden(action, "state-unknown.txt")
    assert states(calibrated) == {fxq.State.VALIDATE}


# ---- files ------------------------------------------------------------------------------------------------------------------

BAD_EXPORTS: dict[str, dict[str, Any]] = {
    "output-names": {"output_names": ["logits", "extra"]},
    "input-names": {"input_names": []},
    "style": {"style": "qdq-ish"},
    "io": {"io": "bits"},
    "opset": {"opset": 9},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", BAD_EXPORTS)
def test_a_bad_argument_of_export_writes_no_file(integer: fx.GraphModule, name: str, tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "model.onnx"
    golden(error_text(lambda: fxq.export_onnx(integer, path, **BAD_EXPORTS[name]), fxq.errors.ConfigurationError), f"export-{name}.txt")
    assert not path.exists()
    assert fxq.verify(integer, fxq.export_onnx(integer, path), [batch()], show_progress=False)


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [("prepared", lambda: fxq.prepare(Small(), batch()), fxq.errors.NotCalibrated), ("float", Small, fxq.errors.ConfigurationError)],
)
def test_exporting_what_cannot_be_exported_yet(
    name: str, make: Callable[[], nn.Module], error: type[fxq.FxQuantError], tmp_path: Path, golden: Golden
) -> None:
    """A prepared model without scales, and a float model of which no shape is known."""
    golden(error_text(lambda: fxq.export_onnx(make(), tmp_path / "model.onnx"), error), f"export-{name}.txt")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(integer: fx.GraphModule, exported: Path, kept: float, tmp_path: Path) -> None:
    content = exported.read_bytes()
    exported.write_bytes(content[: int(len(content) * kept)])
    text = error_text(lambda: fxq.verify(integer, exported, [batch()]), fxq.errors.ExportError, tmp_path)
    assert text.startswith("…/model.onnx cannot be read as ONNX\n  because  ")
    assert text.endswith("  remedy   pass a file written by fxq.export_onnx\n")


def write_foreign_model(path: Path) -> None:
    value = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *SHAPE])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *SHAPE])
    onnx.save(helper.make_model(helper.make_graph([helper.make_node("Relu", ["image"], ["y"])], "foreign", [value], [result])), path)


def write_other_model(path: Path) -> None:
    fxq.export_onnx(compiled(nn.Sequential(nn.Conv2d(2, 4, 3)), [batch()]).integer, path)


def write_integer_interface(path: Path) -> None:
    fxq.export_onnx(made().integer, path, io="integer")


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no model at all"),
    "foreign": write_foreign_model,
    "other-model": write_other_model,
    "integer-interface": write_integer_interface,
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_the_export_of_the_model(
    integer: fx.GraphModule, calibrated: fx.GraphModule, name: str, tmp_path: Path, golden: Golden
) -> None:
    path = tmp_path / "model.onnx"
    BAD_FILES[name](path)
    text = error_text(lambda: fxq.verify(integer, path, [batch()]), fxq.errors.ExportError, tmp_path)
    golden(re.sub("(?<=Error parsing message).*", " …", text), f"file-{name}.txt")  # some versions of protobuf say more
    error_text(lambda: fxq.verify(path, calibrated, [batch()]), fxq.errors.ExportError, tmp_path)


def test_verifying_a_float_model(exported: Path, golden: Golden) -> None:
    golden(error_text(lambda: fxq.verify(Small(), exported, [batch()]), fxq.errors.ConfigurationError), "verify-float.txt")


def test_verifying_two_files(exported: Path, golden: Golden, tmp_path: Path) -> None:
    text = error_text(lambda: fxq.verify(exported, exported, [batch()]), fxq.errors.ConfigurationError)
    golden(text.replace(type(exported).__name__, "Path"), "verify-files.txt")


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_verifying_with_a_bad_batch(integer: fx.GraphModule, exported: Path, name: str) -> None:
    error_text(lambda: fxq.verify(integer, exported, [batch(), BAD_BATCHES[name]()], show_progress=False), fxq.errors.CalibrationError)


# ---- an operator that no record takes ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Between two layers stand operators that have no integer form."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image).relu()
        x = x.softmax(0).softmax(0)
        return self.head(x)


def test_an_unknown_operator_stays_in_float_and_says_so(caplog: pytest.LogCaptureFixture, golden: Golden) -> None:
    with caplog.at_level(logging.INFO, "fxquant"):
        prepared = fxq.prepare(Odd(), batch(), "bayes-e")
    assert "2 are left in float" in caplog.text
    assert "2 because softmax: amax: it reduces the batch, whose size is not fixed" in caplog.text
    fxq.calibrate(prepared, [torch.ones(4, *SHAPE)], show_progress=False)
    golden(re.sub(r"\.py:\d+", ".py:N", re.sub(r"\d\.\d+(e-\d+)?", "s", fxq.explain(prepared))), "explain-unknown-operator.txt")


def test_an_unknown_operator_is_exported_and_every_integer_segment_is_equal(tmp_path: Path) -> None:
    prepared, integer = compiled(Odd(), [batch()])
    assert_validate_is_integer(prepared, integer, batch())
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    batches = [batch(16), batch(1)]
    report = fxq.verify(integer, path, batches, show_progress=False)
    assert report, str(report)
    assert {"conv", "head"} <= report.names
    assert report.flips == count_flips(integer, path, batches)


def test_what_float_operators_flip_is_counted_apart(tmp_path: Path) -> None:
    integer = compiled(Odd(), [batch()]).integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    model = onnx.load(path)
    next(
        node for node in model.graph.node if node.op_type == "Softmax"
    ).op_type = "LogSoftmax"  # a float operator that computes something else
    onnx.save(model, path)
    batches = [batch(16), batch(1)]
    report = fxq.verify(integer, path, batches, show_progress=False)
    assert report, "equal inputs of a segment give equal outputs"
    assert report.flips == count_flips(integer, path, batches) > 0
    assert f"{report.flips} elements flipped" in str(report)


def count_flips(integer: fx.GraphModule, path: Path, batches: list[Tensor]) -> int:
    """The integers that differ where the float part of the file ends, when the file runs on its own."""
    name = "softmax_1_quantize"
    run = OnnxModel(path).runner("onnxruntime", [name])
    return sum(int((run({"image": image})[name] != graph_values(integer, image)[name]).sum()) for image in batches)
