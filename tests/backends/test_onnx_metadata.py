"""The metadata of a file describes its tensors, inputs and outputs; malformed metadata is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.contract import needs_vnni, same_bytes
from tests.shared.networks import Network
from tests.shared.onnx_files import integer_of, linear_of, rows


class Chosen(nn.Module):
    """An input that nothing reads, a mask, and two images, of which the second is read first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, unused: Tensor, mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(mask, self.layer(y).relu(), self.layer(x)).tanh()


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_a_file_of_integers_takes_every_input_in_the_order_of_the_model(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 2), torch.rand(4, 3) > 0.5, torch.randn(4, 3), torch.randn(4, 3))
    result = fxq.quantize(Chosen(), [batch], "nash-e", show_progress=False)
    path = fxq.export_onnx(result.integer, tmp_path / "model.onnx", style=style, io="integer")
    session = onnxruntime.InferenceSession(path)
    assert [entry.name for entry in session.get_inputs()] == ["unused", "mask", "x", "y"]
    assert [entry["dtype"] for entry in fxq.export.onnx_metadata(path)["inputs"]] == ["float", "bool", "int8", "int8"]
    values = next(fxq.inspect.record(result.integer, [batch]))
    integers = {name: values[f"{name}_quantize"].to(torch.int8) for name in ("x", "y")}
    feeds = {"unused": batch[0], "mask": batch[1], **integers}
    found = session.run(None, {name: value.numpy() for name, value in feeds.items()})[0]
    assert torch.equal(torch.from_numpy(found).long(), values["tanh"].long())


@pytest.mark.sweep
@needs_vnni
@pytest.mark.parametrize("width", ["int4", "int8", "int16", "int32"])
@pytest.mark.parametrize("io", ["float", "integer"])
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_metadata_is_true_of_what_a_file_takes_and_returns(style: str, io: str, width: str, tmp_path: Path) -> None:
    if (style, io, width) == ("qdq", "integer", "int32"):
        return  # refused, as another test shows
    torch.manual_seed(0)
    last = fxq.QConfigMapping().set_module_name("b", fxq.QConfig(fxq.ActivationConfig(width)))
    integer = integer_of(
        Network(lambda s, x: (s.b(F.relu(s.a(x))), F.relu(s.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 3)), rows(), "nash-e", last
    )
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, io=io, opset=21, output_names=["scores", "features"])
    said = fxq.export.onnx_metadata(path)
    session = onnxruntime.InferenceSession(str(path))
    (taken,) = said["inputs"]
    scale = said["tensors"][taken["tensor"]]["scale"]
    quantized = torch.clamp(torch.round(rows() / scale), -128, 127)
    feed = rows().numpy() if io == "float" else _stored(quantized, said["tensors"][taken["tensor"]])
    assert session.get_inputs()[0].type == f"tensor({taken['dtype']})"
    assert feed.dtype == helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, taken["dtype"].upper()))
    for entry, found, wanted in zip(said["outputs"], session.run(None, {taken["name"]: feed}), integer(rows()), strict=True):
        assert found.dtype == helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, entry["dtype"].upper()))
        assert list(found.shape[1:]) == entry["shape"][1:]
        real = torch.from_numpy(found)
        if io == "integer":
            described = said["tensors"][entry["tensor"]]
            assert str(found.dtype) == described["storage"]
            known = torch.tensor(described["scale"])
            real = (real.to(torch.int64) - described["zero_point"]).float() * known
        if style == "qdq":
            assert (real - wanted).abs().max() <= 0.1 * wanted.abs().max()
        else:
            assert same_bytes(real, wanted)


def _stored(integers: Tensor, entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    return (integers + entry["zero_point"]).numpy().astype(entry["storage"])


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, str]], object]:
    """A change of the entry fxquant.tensors."""

    def edit(entries: dict[str, str]) -> None:
        tensors = json.loads(entries["tensors"])
        change(tensors)
        entries["tensors"] = json.dumps(tensors)

    return edit


def put(name: str, value: str) -> Callable[[dict[str, str]], object]:
    return lambda entries: entries.update({name: value})


TAMPERED: dict[str, tuple[Callable[[dict[str, str]], object], str]] = {
    **{
        f"no {name}": (lambda entries, name=name: entries.pop(name), name)
        for name in ("style", "io", "target", "version", "inputs", "outputs")
    },
    "no tensors": (lambda entries: entries.pop("tensors"), "was not written by fxquant"),
    "no JSON": (put("tensors", "{"), "Expecting property name"),
    "no JSON of inputs": (put("inputs", "x"), "Expecting value"),
    "deep JSON": (put("float", "[" * 100_000), ""),
    "a list of tensors": (put("tensors", "[]"), "fxquant.tensors is not an object"),
    "another style": (put("style", "qqd"), "fxquant.style is 'qqd'"),
    "another io": (put("io", ""), "fxquant.io is ''"),
    "a tensor that is a number": (edited(lambda t: t.update(l=3)), "what kind of value 'l' is"),
    "an unknown kind": (edited(lambda t: t["l"].update(kind="odd")), "what kind of value 'l' is"),
    "a kind that is a list": (edited(lambda t: t["l"].update(kind=[])), "what kind of value 'l' is"),
    "a tensor that is not there": (edited(lambda t: t.update(gone=t["l"])), "'gone', a value that the graph does not have"),
    "a scale that is a text": (edited(lambda t: t["l"].update(scale="1")), "the scale of 'l'"),
    "a scale of zero": (edited(lambda t: t["l"].update(scale=0)), "the scale of 'l'"),
    "a scale that is no number": (edited(lambda t: t["l"].update(scale=float("nan"))), "the scale of 'l'"),
    "an enormous scale": (edited(lambda t: t["l"].update(scale=10**400)), ""),
    "no scales": (edited(lambda t: t["l"].update(scale=[])), "the scale of 'l'"),
    "an axis from the front": (edited(lambda t: t["l"].update(scale=[1.0, 1.0], axis=0)), "the axis of the scales of 'l'"),
    "an unknown dtype": (edited(lambda t: t["l"].update(dtype="int9")), "the dtype of 'l'"),
    "an unknown storage": (edited(lambda t: t["l"].update(storage="float")), "the storage of 'l'"),
    "no storage": (edited(lambda t: t["l"].pop("storage")), "the storage of 'l'"),
    "a zero point that is none": (edited(lambda t: t["l"].update(zero_point=None)), "the zero point of 'l'"),
    "inputs of another model": (put("inputs", '[{"name": "y", "dtype": "float", "shape": []}]'), "fxquant.inputs names"),
    "no outputs": (put("outputs", "[]"), "fxquant.outputs names"),
    "outputs that are texts": (put("outputs", '["y"]'), "fxquant.outputs is not a list"),
    "an output of no tensor": (
        lambda entries: entries.update(outputs=entries["outputs"].replace('"tensor": "l"', '"tensor": ["l"]')),
        "that is not described",
    ),
    "reasons that are numbers": (put("float", '{"a": 1}'), "fxquant.float is not an object of texts"),
    "options in a list": (put("session_options", "[]"), "fxquant.session_options is not an object"),
    "an unknown option": (put("session_options", '{"session.use_env_allocators": "1"}'), "which fxquant never writes"),
    "an option's other value": (put("session_options", '{"session.x64quantprecision": "0"}'), "which fxquant never writes"),
    "an option that loads": (put("session_options_without_vnni", '{"session.load_model_format": "ORT"}'), "which fxquant never writes"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[fx.GraphModule, Path]:
    integer = linear_of(lambda s, x: s.l(x))
    return integer, fxq.export_onnx(integer, tmp_path_factory.mktemp("written") / "model.onnx")


def tamper(path: Path, copy: Path, change: Callable[[dict[str, str]], object]) -> Path:
    model = onnx.load(path)
    entries = {entry.key.removeprefix("fxquant."): entry.value for entry in model.metadata_props}
    change(entries)
    del model.metadata_props[:]
    helper.set_model_props(model, {f"fxquant.{name}": value for name, value in entries.items()})
    onnx.save(model, copy)
    return copy


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_metadata(name: str, written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    integer, path = written
    change, text = TAMPERED[name]
    copy = tamper(path, tmp_path / "model.onnx", change)
    for use in (lambda: fxq.verify(integer, copy, [rows()], show_progress=False), lambda: fxq.export.onnx_metadata(copy)):
        with pytest.raises(fxq.errors.ExportError) as caught:
            use()
        assert text in str(caught.value)
        assert "fxq.export_onnx" in str(caught.value)


def test_the_file_of_another_version_is_read_or_its_version_is_told(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    integer, path = written
    newer = tamper(path, tmp_path / "newer.onnx", put("version", "99.0"))
    assert fxq.verify(integer, newer, [rows()], show_progress=False)
    with pytest.raises(fxq.errors.ExportError, match=r"written by fxquant 99\.0"):
        fxq.export.onnx_metadata(tamper(newer, newer, put("style", "newest")))


def test_a_file_of_other_inputs_is_another_models(written: tuple[fx.GraphModule, Path]) -> None:
    other = integer_of(Network(lambda s, x: (s.l(x), x), l=nn.Linear(8, 4)), rows())
    with pytest.raises(fxq.errors.ExportError, match="it has 1 inputs and 1 outputs, and this model has 1 and 2"):
        fxq.verify(other, written[1], [rows()], show_progress=False)


def test_a_graph_that_cannot_be_run_is_an_error_of_ours(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    model = onnx.load(written[1])
    model.graph.node[0].domain = "nobody"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(fxq.errors.ExportError, match="cannot be run"):
        fxq.verify(written[0], tmp_path / "model.onnx", [rows()], show_progress=False)
