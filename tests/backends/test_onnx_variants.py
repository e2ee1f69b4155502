"""What else becomes ONNX: prepared and float models; inputs with their channels last; files for other loaders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.backends.onnx import export
from tests.shared.contract import Compiled, compiled, needs_vnni
from tests.shared.onnx_files import run


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.deep, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(72, 10)

    def forward(self, image: Tensor, gain: Tensor) -> Tensor:
        x = self.stem(image)
        x = torch.max_pool2d(self.deep(x) + x, 2)
        return (self.head(x.flatten(1)) * gain).softmax(1)


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.rand(4, 1, generator=generator) + 0.5


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().eval()


@pytest.fixture(scope="module")
def both(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Compiled:
    return compiled(model, [batch], "nash-e")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("opset", [11, 18])
def test_a_float_model_is_a_file_of_any_batch_size(model: nn.Module, batch: tuple[Tensor, Tensor], opset: int, tmp_path: Path) -> None:
    path = fxq.export_onnx(model, tmp_path / "float.onnx", opset=opset, example_inputs=batch, output_names=["scores"])
    few = [value[:3] for value in batch]
    assert (run(path, *few)[0] - model(*few)).abs().max() < 1e-6  # scores up to 1, whose sums are rounded in another order
    assert onnx.load(str(path)).opset_import[0].version == opset
    described = fxq.export.onnx_metadata(path)
    assert (described["style"], [one["name"] for one in described["outputs"]]) == ("float", ["scores"])
    if opset == 18:
        again = fxq.export_onnx(fxq.trace(model, batch), tmp_path / "again.onnx", output_names=["scores"])
        assert again.read_bytes() == path.read_bytes()


def test_a_float_file_that_computes_something_else_is_not_written(
    model: nn.Module, batch: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxquant.backends.onnx.export.apart", lambda found, wanted: 0.5)
    with pytest.raises(fxq.errors.ExportError, match="of its largest number away"):
        fxq.export_onnx(model, tmp_path / "float.onnx", example_inputs=batch)
    assert not list(tmp_path.iterdir())


@needs_vnni
def test_a_prepared_model_is_a_file_with_its_grids(both: Compiled, batch: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    prepared, integer = both
    path = fxq.export_onnx(prepared, tmp_path / "prepared.onnx", opset=21)
    assert fxq.export.onnx_metadata(path)["style"] == "qdq"
    assert path.read_bytes() == fxq.export_onnx(integer, tmp_path / "integer.onnx", "qdq", opset=21).read_bytes()
    scales = {name: entry["scale"] for name, entry in fxq.export.onnx_metadata(path)["tensors"].items() if "scale" in entry}
    known = fxq.qparams(prepared)
    assert scales
    assert all(known[name] == pytest.approx(scale) for name, scale in scales.items() if name in known)  # printed as float64
    report = fxq.verify(prepared, path, [batch], show_progress=False)
    assert isinstance(report, fxq.results.DeviationReport)
    (output,) = report.outputs["onnxruntime"]
    assert output.largest <= 1
    assert fxq.verify(prepared, fxq.export_onnx(prepared, tmp_path / "exact.onnx", "exact"), [batch], show_progress=False)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_an_input_may_have_its_channels_last(style: str, batch: tuple[Tensor, Tensor], both: Compiled, tmp_path: Path) -> None:
    integer = both.integer
    options = {"opset": 21, "layouts": {"image": "NHWC"}}
    path = fxq.export_onnx(integer, tmp_path / "last.onnx", style, **options)
    plain = fxq.export_onnx(integer, tmp_path / "plain.onnx", style, opset=21)
    image, gain = batch
    assert torch.equal(run(path, image.permute(0, 2, 3, 1).contiguous(), gain)[0], run(plain, image, gain)[0])
    (described, other) = fxq.export.onnx_metadata(path)["inputs"]
    assert (described["layout"], described["shape"]) == ("NHWC", ["batch", 8, 8, 3])
    assert "layout" not in other
    if style != "qdq":
        assert fxq.verify(integer, path, [batch], show_progress=False)  # given in PyTorch's layout
        path = fxq.export_onnx(integer, tmp_path / "integers.onnx", style, io="integer", **options)
        assert fxq.export.onnx_metadata(path)["inputs"][0]["shape"] == ["batch", 8, 8, 3]
        assert fxq.verify(integer, plain, [batch], show_progress=False)


@pytest.mark.nightly
def test_layouts_of_other_ranks_and_of_float_files(tmp_path: Path) -> None:
    rows, volumes = torch.randn(2, 4, 9), torch.randn(2, 2, 4, 4, 4)
    for values, layer, layout in ((rows, nn.Conv1d(4, 3, 3), "NWC"), (volumes, nn.Conv3d(2, 3, 3), "NDHWC")):
        path = fxq.export_onnx(layer, tmp_path / "float.onnx", example_inputs=values, layouts={"input": layout})
        (found,) = run(path, values.movedim(1, -1).contiguous())
        assert (found - layer(values)).abs().max() < 1e-5  # sums of 54 products in another order


def test_a_large_model_has_its_weights_beside_it_once(
    both: Compiled, batch: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integer = both.integer
    together = fxq.export_onnx(integer, tmp_path / "together.onnx", "exact")
    monkeypatch.setattr(export, "LARGEST_FILE", 5000)
    monkeypatch.setattr(export, "SMALLEST_EXTERNAL", 64)
    path = fxq.export_onnx(integer, tmp_path / "apart.onnx", "exact")
    beside = tmp_path / "apart.onnx.data"
    stored = sum(len(tensor.raw_data) for tensor in onnx.load(str(together)).graph.initializer if len(tensor.raw_data) >= 64)
    assert stored > 5000
    assert stored <= beside.stat().st_size <= stored + 4096 * len(onnx.load(str(together)).graph.initializer)  # each tensor may be aligned
    assert path.stat().st_size < together.stat().st_size - stored + 200 * len(onnx.load(str(together)).graph.initializer)
    assert fxq.verify(integer, path, [batch], show_progress=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["apart.onnx", "apart.onnx.data", "together.onnx"]


@pytest.mark.parametrize("opset", [13, 21])
def test_openvino_reads_qdq_and_gives_onnxruntimes_numbers(
    both: Compiled, batch: tuple[Tensor, Tensor], opset: int, tmp_path: Path
) -> None:
    openvino, integer = pytest.importorskip("openvino", reason="the package openvino is not installed"), both.integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", "qdq", opset=opset)
    read = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found, wanted = read([value.numpy() for value in batch])[0], run(path, *batch)[0].numpy()
    step = next(layer.grid.scale for layer in reversed(fxq.inspect.layers(integer)) if layer.grid)
    assert np.abs(found - wanted).max() <= 1.01 * step  # a float sum next to a tie may be rounded to either side


def test_what_is_no_model_to_be_written(model: nn.Module, both: Compiled, batch: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    integer, path = both.integer, tmp_path / "model.onnx"
    for call, because in (
        (lambda: fxq.export_onnx(model, path), "without example inputs"),
        (lambda: fxq.export_onnx(model, path, "exact", example_inputs=batch), "it has no integers"),
        (lambda: fxq.export_onnx(integer, path, example_inputs=batch), "graphs already"),
        (lambda: fxq.export_onnx(integer, path, layouts={"imgae": "NHWC"}), "not an input of the file"),
        (lambda: fxq.export_onnx(integer, path, layouts={"image": "NWC"}), "it has 4 dimensions"),
    ):
        with pytest.raises(fxq.errors.ConfigurationError, match=because):
            call()
    assert not list(tmp_path.iterdir())
