"""Properties of all export styles: external weights, metadata, opsets; exports of prepared and float models, and of other layouts."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import export
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.backends.onnx.writer import Emitter
from fxquant.ir.integer import is_inner, qparams
from fxquant.reporting.inspection import read
from tests.shared.contract import VNNI, Compiled, compiled, needs_vnni
from tests.shared.networks import Network, members
from tests.shared.onnx_files import assert_verified, batch, exported, known, rows, run

every_style = pytest.mark.parametrize("style", ["exact", "fast", "qdq"])


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


# ---- external data ----------------------------------------------------------------------------------------------------
@needs_vnni
@every_style
def test_weights_beside_the_file(style: str, tmp_path: Path) -> None:
    integer = known("linear")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, external_data=True)
    assert sorted(contents(tmp_path)) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx.data").stat().st_size >= 192 * 16
    plain = fxq.export_onnx(integer, tmp_path / "plain.onnx", style=style)
    assert plain.stat().st_size - path.stat().st_size > 2000
    assert torch.equal(run(path, batch())[0], run(plain, batch())[0])
    one, two = read(path), read(plain)
    described = [node for node in integer.graph.nodes if qparams(node) is not None]  # float operators have no inner tensors
    assert [row.name for row in one.rows] == [node.name for node in described if style != "qdq" or not is_inner(node)]
    assert {name: value.tolist() for name, value in one.tensors.items()} == {name: value.tolist() for name, value in two.tensors.items()}
    if style == "qdq":
        report = fxq.verify(integer, path, [batch(3, seed=3)])
        assert max(output.largest for outputs in report.outputs.values() for output in outputs) <= 3  # type: ignore[attr-defined]
    else:
        assert len(assert_verified(integer, path).pairs) == 5


def test_a_model_that_is_too_large_for_one_file_gets_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LARGEST_FILE", 3000)
    exported(known("linear"), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").exists()
    monkeypatch.chdir(tmp_path)  # where the model is written is where the program runs
    exported(known("silu"), Path("model.onnx"), style="exact", external_data=True)  # which replaces both
    with pytest.raises(fxq.errors.ExportError, match="cannot be one file"):
        fxq.export_onnx(known("linear"), tmp_path / "one.onnx", external_data=False)
    assert not list(tmp_path.glob("one.onnx*"))
    monkeypatch.undo()
    fxq.export_onnx(known("linear"), tmp_path / "one.onnx", external_data=False)
    assert not (tmp_path / "one.onnx.data").exists()


@pytest.mark.parametrize(
    ("where", "name", "said"), [(onnx.checker, "check_model", "would not be valid"), (export, "open_file", "could not open")]
)
def test_a_file_appears_whole_or_not_at_all(where: Any, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fxq.export_onnx(known("linear"), tmp_path / "model.onnx", external_data=True)
    before = contents(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise onnx.checker.ValidationError("no")

    monkeypatch.setattr(where, name, fails)
    with pytest.raises(fxq.errors.ExportError, match=said):
        fxq.export_onnx(known("silu"), path, external_data=True)
    assert contents(tmp_path) == before


# ---- metadata ---------------------------------------------------------------------------------------------------------
@every_style
def test_what_a_file_says_about_itself(style: str, tmp_path: Path) -> None:
    integer = known("silu")
    metadata = fxq.export.onnx_metadata(
        fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, input_names=["image"], output_names=["y"])
    )
    assert (metadata["version"], metadata["style"], metadata["io"], metadata["target"]) == (fxq.__version__, style, "float", "nash-e")
    assert metadata["inputs"] == [{"name": "image", "dtype": "float", "shape": ["batch", 3, 8, 8], "tensor": "x_quantize"}]
    assert metadata["outputs"] == [{"name": "y", "dtype": "float", "shape": ["batch", 8, 8, 8], "tensor": "silu_1"}]
    storage, zero_point = ("uint8", 128) if style == "fast" else ("int8", 0)
    same = {"kind": "quantized", "dtype": "int8", "storage": storage, "zero_point": zero_point}
    scales = {node.name: qparams(node).scale for node in integer.graph.nodes if qparams(node) is not None}
    assert {name: metadata["tensors"][name] for name in scales} == {name: {**same, "scale": scale} for name, scale in scales.items()}


@pytest.mark.parametrize(("style", "opset"), [("exact", 16), ("fast", 13), ("qdq", 10), ("qdq", 0)])
def test_an_opset_is_refused_by_the_style(style: str, opset: int, tmp_path: Path) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=f"opset={opset} is unknown"):
        fxq.export_onnx(known("convolution"), tmp_path / "model.onnx", style=style, opset=opset)


def test_the_evaluators_operators_are_corrected_where_a_product_rounds_to_a_tie() -> None:
    """Accumulators near ties, by zero inputs and any bias, a channel each: float32(acc) · m is a tie that the exact product is not."""
    generator = np.random.default_rng(0)
    sums = generator.integers(2**24, 2**30, 4000).astype(np.int32)
    multipliers = ((generator.integers(-120, 120, 4000) + 0.5) / sums).astype(np.float32)
    sums, multipliers = np.where(multipliers < 0, -sums, sums).astype(np.int32), np.abs(multipliers)
    e, zero = Emitter({}, 21), torch.tensor(128, dtype=torch.uint8)
    weight, weight_zero = torch.zeros(4000, 1, 1, 1, dtype=torch.int8), torch.zeros(4000, dtype=torch.int8)
    constants = [e.constant(value) for value in (1.0, zero, weight, torch.from_numpy(multipliers), weight_zero, 1.0, zero)]
    e.types["x"] = torch.uint8
    result = e.node("QLinearConv", "x", *constants, e.constant(torch.from_numpy(sums)))
    inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 1, 1, 1])]
    outputs = [helper.make_tensor_value_info(result, TensorProto.UINT8, None)]
    graph = helper.make_graph(e.nodes, "ties", inputs, outputs, e.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    wanted = np.clip(np.rint(sums.astype(np.float32) * multipliers).astype(np.int64) + 128, 0, 255)
    for _, level, threads in RUNTIMES:
        output = Runner(model, level, threads)({"x": torch.full((1, 1, 1, 1), 128, dtype=torch.uint8)})[result].flatten()
        assert np.array_equal(output.numpy(), wanted), level


# ---- prepared and float models, inputs with their channels last, files for other loaders -----------------------------
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
def pictures() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.rand(4, 1, generator=generator) + 0.5


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().eval()


@pytest.fixture(scope="module")
def both(model: nn.Module, pictures: tuple[Tensor, Tensor]) -> Compiled:
    return compiled(model, [pictures], "nash-e")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("opset", [11, 18])
def test_a_float_model_is_a_file_of_any_batch_size(model: nn.Module, pictures: tuple[Tensor, Tensor], opset: int, tmp_path: Path) -> None:
    path = fxq.export_onnx(model, tmp_path / "float.onnx", opset=opset, example_inputs=pictures, output_names=["scores"])
    few = [value[:3] for value in pictures]
    assert (run(path, *few)[0] - model(*few)).abs().max() < 1e-6  # scores up to 1, whose sums are rounded in another order
    assert onnx.load(str(path)).opset_import[0].version == opset
    described = fxq.export.onnx_metadata(path)
    assert (described["style"], [one["name"] for one in described["outputs"]]) == ("float", ["scores"])
    if opset == 18:
        again = fxq.export_onnx(fxq.trace(model, pictures), tmp_path / "again.onnx", output_names=["scores"])
        assert again.read_bytes() == path.read_bytes()


def test_a_float_file_that_computes_something_else_is_not_written(
    model: nn.Module, pictures: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxquant.backends.onnx.export.apart", lambda actual, wanted: 0.5)
    with pytest.raises(fxq.errors.ExportError, match="of its largest number away"):
        fxq.export_onnx(model, tmp_path / "float.onnx", example_inputs=pictures)
    assert not list(tmp_path.iterdir())


@needs_vnni
def test_a_prepared_model_is_a_file_with_its_grids(both: Compiled, pictures: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    prepared, integer = both
    path = fxq.export_onnx(prepared, tmp_path / "prepared.onnx", opset=21)
    assert fxq.export.onnx_metadata(path)["style"] == "qdq"
    assert path.read_bytes() == fxq.export_onnx(integer, tmp_path / "integer.onnx", "qdq", opset=21).read_bytes()
    scales = {name: entry["scale"] for name, entry in fxq.export.onnx_metadata(path)["tensors"].items() if "scale" in entry}
    scale_of = fxq.qparams(prepared)
    assert scales
    assert all(scale_of[name] == pytest.approx(scale) for name, scale in scales.items() if name in scale_of)  # printed as float64
    report = fxq.verify(prepared, path, [pictures])
    (output,) = report.outputs["onnxruntime"]  # type: ignore[attr-defined]
    assert output.largest <= 1
    assert fxq.verify(prepared, fxq.export_onnx(prepared, tmp_path / "exact.onnx", "exact"), [pictures])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_an_input_may_have_its_channels_last(style: str, pictures: tuple[Tensor, Tensor], both: Compiled, tmp_path: Path) -> None:
    integer = both.integer
    options = {"opset": 21, "layouts": {"image": "NHWC"}}
    path = fxq.export_onnx(integer, tmp_path / "last.onnx", style, **options)
    plain = fxq.export_onnx(integer, tmp_path / "plain.onnx", style, opset=21)
    image, gain = pictures
    assert torch.equal(run(path, image.permute(0, 2, 3, 1).contiguous(), gain)[0], run(plain, image, gain)[0])
    (described, other) = fxq.export.onnx_metadata(path)["inputs"]
    assert (described["layout"], described["shape"]) == ("NHWC", ["batch", 8, 8, 3])
    assert "layout" not in other
    if style != "qdq":
        assert fxq.verify(integer, path, [pictures])  # given in PyTorch's layout
        path = fxq.export_onnx(integer, tmp_path / "integers.onnx", style, io="integer", **options)
        assert fxq.export.onnx_metadata(path)["inputs"][0]["shape"] == ["batch", 8, 8, 3]
        assert fxq.verify(integer, plain, [pictures])


@pytest.mark.nightly
def test_layouts_of_other_ranks_and_of_float_files(tmp_path: Path) -> None:
    rows, volumes = torch.randn(2, 4, 9), torch.randn(2, 2, 4, 4, 4)
    for values, layer, layout in ((rows, nn.Conv1d(4, 3, 3), "NWC"), (volumes, nn.Conv3d(2, 3, 3), "NDHWC")):
        path = fxq.export_onnx(layer, tmp_path / "float.onnx", example_inputs=values, layouts={"input": layout})
        (output,) = run(path, values.movedim(1, -1).contiguous())
        assert (output - layer(values)).abs().max() < 1e-5  # sums of 54 products in another order


def test_what_is_no_model_to_be_written(model: nn.Module, both: Compiled, pictures: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    integer, path = both.integer, tmp_path / "model.onnx"
    for call, because in (
        (lambda: fxq.export_onnx(model, path), "without example inputs"),
        (lambda: fxq.export_onnx(model, path, "exact", example_inputs=pictures), "it has no integers"),
        (lambda: fxq.export_onnx(integer, path, example_inputs=pictures), "graphs already"),
        (lambda: fxq.export_onnx(integer, path, layouts={"imgae": "NHWC"}), "not an input of the file"),
        (lambda: fxq.export_onnx(integer, path, layouts={"image": "NWC"}), "it has 4 dimensions"),
    ):
        with pytest.raises(fxq.errors.ConfigurationError, match=because):
            call()
    assert not list(tmp_path.iterdir())


# ---- style qdq: sizes of a layer's result, and files that onnxruntime can change -----------------------------------------
SIZED: dict[str, Any] = {
    "expand": lambda token, y: torch.cat((token.expand(y.shape[0], -1, -1), y), 1),
    "zeros": lambda token, y: torch.cat((torch.zeros(y.shape[0], 2, 4), y), 1),
    "repeat": lambda token, y: torch.cat((token.repeat(len(y), 1, 1), y), 1),
    "computed": lambda token, y: y.view(y.shape[0] * 6 // 3, -1),
}


@members(lambda form: dict(form=form, linear=nn.Linear(4, 4), again=nn.Linear(4, 4), token=nn.Parameter(torch.randn(1, 2, 4))))
def Sized(self, x: Tensor) -> Any:
    return SIZED[self.form](self.token, self.again(self.linear(x)))


@pytest.mark.parametrize("form", SIZED)
def test_a_size_is_read_from_a_sum_of_32_bits(form: str, tmp_path: Path) -> None:
    integer = compiled(Sized(form).eval(), [torch.randn(6, 4, 4)], "nash-e").integer
    path, x = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq"), torch.randn(3, 4, 4)
    (report,) = fxq.verify(integer, path, [x]).outputs["onnxruntime, no optimisation"]  # type: ignore[attr-defined]
    assert report.largest < 1e-5  # sums of 32 bits, as float32


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_verify_compares_inputs_that_are_not_finite(target: str, tmp_path: Path) -> None:
    both = compiled(nn.Linear(4, 3).eval(), [torch.randn(6, 4)], target)
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30]])
    assert torch.equal(both.integer(x), both.integer(torch.tensor([[0, 1e30, -1e30, 1e30]])))
    assert fxq.verify(both.prepared, both.integer, [x])
    for style, runtime in (("exact", None), ("fast", "onnxruntime"), ("fast", "onnxruntime, no optimisation")):
        assert fxq.verify(both.integer, fxq.export_onnx(both.integer, tmp_path / "model.onnx", style=style), [x], runtime=runtime)


@members(lambda: dict(first=nn.Linear(40, 40), last=nn.Linear(40, 40)))
def Tied(self, x: Tensor) -> Tensor:
    return F.relu(self.last(F.relu(self.first(x))))


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_onnxruntime_opens_qdq_with_the_options_that_its_metadata_names(target: str, opset: int, tmp_path: Path) -> None:
    """Layers of rows with one weight, for a fixed batch: onnxruntime converts weights and their zero points in place."""
    net, x = Tied().eval(), torch.randn(4, 6, 40)
    net.last.weight = net.first.weight
    integer = compiled(net, [x], target).integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="qdq", opset=opset, batch_size=4)
    metadata = fxq.export.onnx_metadata(path)
    named = {} if target == "x86" and not VNNI else PRECISE  # none where weights follow the processor
    assert (metadata["session_options_without_vnni"], metadata["relies_on_vnni"]) == (named, False)
    apart = fxq.export_onnx(integer, tmp_path / "apart.onnx", style="qdq", opset=opset, external_data=True)
    assert apart.with_name("apart.onnx.data").stat().st_size == 40 * 40  # of both layers
    runtime = onnx.load(path), *RUNTIMES[0][1:], None
    plain, precise = (next(iter(Runner(*runtime, settings)({"x": x}).values())) for settings in ({}, PRECISE))
    step = metadata["tensors"][metadata["outputs"][0]["tensor"]]["scale"]
    assert (precise - integer(x)).abs().max() <= 1.01 * step  # a float sum next to a tie may be rounded to either side
    assert (plain - precise).abs().max() <= 1.01 * step or not VNNI


# ---- x86 processors without VNNI, whose kernels add products in pairs -----------------------------------------------------
def in_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """The sums of rows of bytes times the rows of a weight, with pairs of products added in 16 bits."""
    products = F.pad(x.int()[:, None] * weight.int(), (0, weight.shape[1] % 2)).unflatten(2, (-1, 2))
    return products.sum(3).clamp(-(2**15), 2**15 - 1).sum(2)


LAYERS: dict[str, Any] = {  # a layer, the sizes of one result's operand, and its groups: none where it has kernels of its own
    "linear": (lambda: nn.Linear(33, 8), (33,), 1), "matrix": (lambda: Network(lambda s, x: x @ s.w, w=nn.Parameter(rows(9).t())), (8,), 1),
    "convolution": (lambda: nn.Conv2d(5, 8, 3), (5, 3, 3), 1), "groups": (lambda: nn.Conv1d(8, 6, 4, groups=2), (8, 4), 2),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (8, 3, 3), 0),
}  # fmt: skip


@pytest.mark.parametrize("without_vnni", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_which_no_pair_of_products_saturates(name: str, without_vnni: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, sizes, groups = LAYERS[name]
    net, options = nn.Sequential(make(), nn.ReLU()).eval(), fxq.Options(without_vnni=without_vnni)
    result = fxq.quantize(net, [torch.randn(64, *sizes)], target="x86", options=options)
    weight = next(value for path, value in result.integer.named_buffers() if path.endswith(".weight"))
    taps = weight.movedim(1, -1).flatten(1)
    worst = torch.cat([(taps > 0) * 255, (taps < 0) * 255])
    equal = not groups or all(torch.equal(in_pairs(worst, part), worst @ part.long().t()) for part in taps.chunk(groups))
    assert equal is (without_vnni or not groups)
    assert int(taps.abs().max()) > 64
    loaded = fxq.load(fxq.save(result.prepared, tmp_path / "prepared.fxq"))
    assert fxq.verify(loaded, result.integer, [torch.randn(2, *sizes)])
    for style in ("qdq", "fast"):
        metadata = fxq.export.onnx_metadata(result.export(tmp_path / f"{style}.onnx", style=style))
        assert metadata["session_options_without_vnni"] == ({} if equal or (style == "fast" and not VNNI) else PRECISE)
    assert result.verify(tmp_path / "fast.onnx", [torch.randn(3, *sizes)])


def test_weights_follow_the_processor_for_x86_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.backends.onnx.runtime.adds_pairs", lambda: True)
    explained = {target: fxq.explain(fxq.prepare(nn.Linear(4, 3), torch.ones(2, 4), target)) for target in ("x86", "qnnpack", "bayes-e")}
    assert [target for target, text in explained.items() if "no pair of products beyond 16 bits" in text] == ["x86"]
