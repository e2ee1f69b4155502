"""Bad input is met by an error that says what, where, why and what to do, and nothing is lost; a few texts are golden."""

import copy
import functools
import logging
import re
from collections.abc import Callable
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
from tests.shared.networks import written

pytestmark = pytest.mark.usefixtures("default_outputs")

SHAPE = (2, 6, 6)


def small() -> Any:
    return written(lambda m, image: m.head(m.conv(image).relu().flatten(1)), conv=nn.Conv2d(2, 4, 3), head=nn.Linear(64, 3))


def batch(count: int = 4) -> Tensor:
    return torch.randn(count, *SHAPE)


@functools.cache
def made() -> Compiled:
    return compiled(small(), [batch()])


@pytest.fixture
def integer() -> fx.GraphModule:
    return copy.deepcopy(made().integer)


def observations(prepared: fx.GraphModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prepared.state_dict().items() if ".observer." in name}


# ---- calibration --------------------------------------------------------------------------------------------------------
def with_value(value: float) -> Tensor:
    bad = batch()
    bad[1, 0, 2, 3] = value
    return bad


BAD_BATCHES: dict[str, Callable[[], Any]] = {
    "nan": lambda: with_value(float("nan")), "infinite": lambda: with_value(float("inf")), "shape": lambda: torch.randn(4, 2, 6, 7),
    "rank": lambda: torch.randn(2, 6, 6), "dtype": lambda: batch().double(), "not-a-tensor": lambda: "image",
    "missing-key": lambda: {"picture": batch(), "label": 3}, "no-items": lambda: (),
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [*BAD_BATCHES, "overflow"])
def test_a_bad_batch_is_refused_and_earlier_ones_are_kept(name: str) -> None:
    """A batch that overflows inside, too; calibration goes on, and what comes of it holds the contract."""
    prepared = fxq.prepare(small(), batch(), "bayes-e")
    if name == "overflow":
        torch.nn.init.constant_(prepared.conv.weight, 10.0)
    good, reference = batch(), copy.deepcopy(prepared)
    fxq.calibrate(reference, [good])
    bad = torch.full((4, *SHAPE), 1e38) if name == "overflow" else BAD_BATCHES[name]()
    with pytest.raises(fxq.errors.CalibrationError, match=r"because[\s\S]*remedy"):
        fxq.calibrate(prepared, [good, bad])
    expected = observations(reference)
    assert all(torch.equal(value, expected[key]) for key, value in observations(prepared).items())
    assert {module.state for module in prepared.modules() if hasattr(module, "state")} == {fxq.State.CALIBRATE}
    fxq.calibrate(prepared, [batch()])
    assert_validate_is_integer(prepared, fxq.convert(prepared), batch())


# ---- the wrong model at the wrong time ------------------------------------------------------------------------------------
def branches(_: Any, x: Tensor) -> Tensor:
    if x.mean() > 0:
        return x.relu()
    return -x


ERRORS: dict[str, tuple[type[fxq.FxQuantError], Callable[[], object]]] = {
    "model-lazy": (fxq.errors.ConfigurationError, lambda: fxq.prepare(nn.Sequential(nn.LazyConv2d(4, 3)), batch())),
    "argument-target": (fxq.errors.UnknownTarget, lambda: fxq.prepare(small(), batch(), "byes-e")),
    "control-flow": (fxq.errors.TraceError, lambda: fxq.prepare(written(branches), torch.randn(2, 3))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_where_why_and_what_to_do(name: str, golden: Golden) -> None:
    kind, action = ERRORS[name]
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    golden(re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n", f"{name}.txt")


# ---- files ------------------------------------------------------------------------------------------------------------------
def write_foreign_model(path: Path) -> None:
    value = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *SHAPE])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *SHAPE])
    onnx.save(helper.make_model(helper.make_graph([helper.make_node("Relu", ["image"], ["y"])], "foreign", [value], [result])), path)


BAD_FILES: dict[str, tuple[Callable[[Path, bytes], object], str]] = {  # of a path and of the right content, and what is said
    "missing": (lambda path, content: None, "cannot be read as ONNX"),
    "empty": (lambda path, content: path.write_bytes(b""), "was not written by fxquant"),
    "text": (lambda path, content: path.write_text("no model at all"), "cannot be read as ONNX"),
    **{
        f"truncated to {share}": (
            lambda path, content, share=share: path.write_bytes(content[: int(len(content) * share)]), "cannot be read as ONNX"
        )
        for share in (0.1, 0.5, 0.9, 0.999)
    },
    "foreign": (lambda path, content: write_foreign_model(path), "was not written by fxquant"),
    "other model": (
        lambda path, content: fxq.export_onnx(compiled(nn.Conv2d(2, 4, 3), [batch()]).integer, path), "is the file of another model"
    ),
    "integer interface": (lambda path, content: fxq.export_onnx(made().integer, path, io="integer"), "cannot be verified"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_the_export_of_the_model(integer: fx.GraphModule, name: str, tmp_path: Path) -> None:
    write, said = BAD_FILES[name]
    content = fxq.export_onnx(integer, tmp_path / "right.onnx").read_bytes()
    path = tmp_path / "model.onnx"
    write(path, content)
    with pytest.raises(fxq.errors.ExportError, match=rf"model\.onnx {said}\n  because .*\n  remedy "):
        fxq.verify(integer, path, [batch()])
    with pytest.raises(fxq.errors.ExportError):
        fxq.verify(path, copy.deepcopy(made().prepared), [batch()])


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_verifying_with_a_bad_batch(integer: fx.GraphModule, name: str, tmp_path: Path) -> None:
    """Compare NaN and infinity, too: their integers are defined."""
    exported, batches = fxq.export_onnx(integer, tmp_path / "model.onnx"), [batch(), BAD_BATCHES[name]()]
    if name in ("nan", "infinite"):
        assert fxq.verify(integer, exported, batches)
        return
    with pytest.raises(fxq.errors.CalibrationError):
        fxq.verify(integer, exported, batches)


# ---- an operator that no record takes ---------------------------------------------------------------------------------------
def odd(m: Any, image: Tensor) -> Tensor:
    """Between two layers stand operators that have no integer form."""
    x = m.conv(image).relu()
    x = x.softmax(0).softmax(0)
    return m.head(x)


def test_an_unknown_operator_stays_in_float_and_every_integer_segment_is_equal_and_what_floats_flip_is_counted_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fxquant"):
        prepared, integer = compiled(written(odd, conv=nn.Conv2d(2, 4, 3), head=nn.Conv2d(4, 3, 1)), [batch()])
    assert "2 are left in float" in caplog.text
    assert "2 because softmax: amax: it reduces the batch, whose size is not fixed" in caplog.text
    assert_validate_is_integer(prepared, integer, batch())
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    batches = [batch(16), batch(1)]
    report = fxq.verify(integer, path, batches)
    assert report, str(report)
    assert {"conv", "head"} <= report.names
    assert report.flips == count_flips(integer, path, batches)
    model = onnx.load(path)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "LogSoftmax"  # a float operator that computes something else
    onnx.save(model, path)
    report = fxq.verify(integer, path, batches)
    assert report, "equal inputs of a segment give equal outputs"
    assert report.flips == count_flips(integer, path, batches) > 0
    assert f"{report.flips} elements flipped" in str(report)


def count_flips(integer: fx.GraphModule, path: Path, batches: list[Tensor]) -> int:
    """The integers that differ where the float part of the file ends, when the file runs on its own."""
    name = "softmax_1_quantize"
    run = OnnxModel(path).runner("onnxruntime", [name])
    return sum(int((run({"image": image})[name] != graph_values(integer, image)[name]).sum()) for image in batches)
