"""Files of the plugin's and its compiler's names, wrapped functions that are kept whole, and lines of the log."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.horizon_programs.calibrated import computed
from fxquant.compat import horizon
from fxquant.compat.horizon import served as march
from tests.shared.networks import members

fx_helper, jit_scheme = horizon.fx.fx_helper, horizon.fx.jit_scheme
compiler, hbdk4, QuantAnalysis = horizon.hbdk4.compiler, horizon.quantization.hbdk4, horizon.profiler.QuantAnalysis
BATCHES = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
NARROW = horizon.QconfigSetter(templates=[horizon.ModuleNameTemplate({"": "qint8"})])


@members(lambda: dict(quant=horizon.QuantStub(), dequant=horizon.DeQuantStub(), conv=nn.Conv2d(3, 8, 3), head=nn.Conv2d(8, 4, 1)), seed=0)
def Net(self, x: Tensor) -> Tensor:
    """Two layers between stubs."""
    return self.dequant(self.head(torch.relu(self.conv(self.quant(x)))))


@pytest.fixture(autouse=True)
def _nash() -> Iterator[None]:
    horizon.set_march("nash-e")
    yield
    march._march.clear()


def calibrated(model: nn.Module | None = None, setter: Any = NARROW) -> Any:
    prepared = horizon.prepare(Net().eval() if model is None else model, BATCHES[0], setter)
    horizon.set_fake_quantize(prepared, horizon.FakeQuantState.CALIBRATION)
    for batch in BATCHES:
        prepared(batch)
    horizon.set_fake_quantize(prepared, horizon.FakeQuantState.VALIDATION)
    return prepared


# ---- modules of the compiler ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setter", [NARROW, horizon.default_calibration_qconfig_setter], ids=["int8", "int32"])
def test_a_module_whose_ends_were_left_out_takes_and_returns_integers(setter: Any, tmp_path: Path) -> None:
    built = compiler.convert(hbdk4.export(calibrated(setter=setter), BATCHES[0], name="net"), "nash-e")
    assert torch.equal(built(BATCHES[0]), built.model(BATCHES[0]))
    built.functions[0].remove_io_op(op_types=["Dequantize", "Quantize"])
    compiler.save(built, tmp_path / "quantized.bc")
    again = compiler.load(tmp_path / "quantized.bc")
    assert (again.name, again.io) == ("net", "integer")
    held = next(fxq.inspect.record(built.model, [BATCHES[0]], ("quantized", "accumulators")))
    names = list(held)
    inputs = held[names[0]].to(torch.int8)
    file = compiler.visualize(again, tmp_path / "quantized.onnx")
    session = onnxruntime.InferenceSession(str(file))
    (expected,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    for module in (built, again):
        result = module(inputs)
        assert result.dtype is (torch.int8 if setter is NARROW else torch.int32)
        assert torch.equal(result, torch.from_numpy(expected))
        assert torch.equal(result.long(), held[names[-1]])


@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_a_module_takes_the_image_of_a_camera(order: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = 1 if order == "rgb" else -1
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    colours = {"rgb": fxq.nn.YuvToRgb, "bgr": fxq.nn.YuvToBgr}[order](mean=[255 * m for m in mean], std=[255 * s for s in std])
    planes = fxq.nn.rgb_to_nv12(torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    yuv = fxq.nn.Nv12ToYuv444()(*planes)
    prepared = horizon.prepare(Net().eval(), colours(yuv), NARROW)
    fxq.calibrate(prepared, [colours(yuv)])
    module = compiler.convert(hbdk4.export(prepared, colours(yuv)), "nash-e")
    (expected,) = module.functions[0](colours(yuv).numpy())
    taken = module.graphs[0].flatten_inputs[0].insert_transpose([0, 3, 1, 2])
    assert torch.equal(module[0](colours(yuv).permute(0, 2, 3, 1))[0], expected)
    taken = taken.insert_image_preprocess(f"yuvbt601full2{order}", 255, mean[::step], std[::step])
    (of_bytes,) = module[0](yuv.permute(0, 2, 3, 1).to(torch.uint8))
    assert [one.name for one in taken.insert_image_convert("nv12")] == [one.name for one in module[0].inputs] == ["x_y", "x_uv"]
    compiler.save(module, tmp_path / "nv12.bc")
    (result,) = compiler.load(tmp_path / "nv12.bc")[0](*planes)
    assert torch.equal(result, of_bytes)
    assert torch.equal(hbdk4.get_hbir_output_unflattener(module)(module[0](*planes)), result)
    assert (result - expected).norm() < 0.1 * expected.norm()
    file = compiler.visualize(module, tmp_path / "nv12.onnx")
    assert torch.equal(computed(file, yuv - 128), result)
    assert any("Y, U and V minus 128, times 1; calls of the module take nv12" in record.getMessage() for record in caplog.records)


def test_a_model_of_yuv_takes_the_bytes_that_it_was_trained_with() -> None:
    planes = fxq.nn.rgb_to_nv12(torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    image = fxq.nn.Nv12ToYuv444(centred=True)(*planes) / 128
    module = compiler.convert(calibrated(), "nash-e")
    expected = module(image)
    module[0].inputs[0].insert_transpose([0, 3, 1, 2]).insert_image_preprocess(None, 1, [128] * 3, [128] * 3).insert_image_convert()
    assert torch.equal(module(*planes), expected)


WRONG_ENDS: dict[str, Callable[[Any], Any]] = {
    "one of two": lambda built: built[0].remove_io_op(op_types=["Dequantize"]),
    "another operator": lambda built: built[0].remove_io_op(op_types=["Quantize", "Dequantize", "Softmax"]),
    "a name": lambda built: built[0].remove_io_op(op_names=["conv"]),
    "floats inside": lambda built: compiler.Module(calibrated())[0].remove_io_op(),
    "an image before its steps": lambda built: built[0].inputs[0].insert_image_convert("nv12"),
    "another order": lambda built: built[0].inputs[0].insert_transpose([0, 2, 3, 1]),
    "another conversion": lambda built: built[0].inputs[0].insert_transpose([0, 3, 1, 2]).insert_image_preprocess("yuvbt601video2rgb"),
    "a mean of its own": lambda built: built[0].inputs[0].insert_transpose([0, 3, 1, 2]).insert_image_preprocess(None, 255, [0.5] * 3),
    "another edit": lambda built: built[0].inputs[0].insert_split(0),
    "an image of a function": lambda built: built[0].insert_image_convert("nv12"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", WRONG_ENDS)
def test_ends_that_cannot_be_changed(name: str) -> None:
    module = compiler.convert(calibrated(), "nash-e")
    with pytest.raises(fxq.errors.ConfigurationError) as caught:
        WRONG_ENDS[name](module)
    assert caught.value.remedy
    assert module.io == "float"


def test_the_folder_for_hb_compile_is_left_where_its_compiler_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    integer = horizon.convert_fx(calibrated())
    with caplog.at_level("INFO", "fxquant"), pytest.raises(fxq.errors.ConfigurationError, match="cannot be compiled here") as refused:
        horizon.compile_model(integer, [BATCHES[0]], hbm=tmp_path / "model.hbm", opt="O3")
    assert "hb_compile" in refused.value.remedy
    assert any("O3 is replaced by O2" in record.getMessage() for record in caplog.records)
    assert "optimize_level: 'O2'" in (tmp_path / "model" / "model.yaml").read_text()
    assert torch.equal(computed(tmp_path / "model" / "model.onnx", BATCHES[0][:1]), integer(BATCHES[0][:1]))
    module = compiler.convert(calibrated(), "nash-e")
    module[0].remove_io_op()
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be compiled here"):
        compiler.compile(module, tmp_path / "other.hbm", "nash-e")
    assert any("float tensors" in record.getMessage() for record in caplog.records)


def test_what_stays_in_float_is_named_for_the_processor(tmp_path: Path) -> None:
    horizon.set_march("bayes-e")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 1)).eval()
    prepared = calibrated(model, horizon.QconfigSetter(templates=[horizon.ModuleNameTemplate({"": "qint8"})]))
    folder = fxq.board.export_horizon(horizon.convert_fx(prepared), tmp_path / "whole")
    assert "run_on_cpu" not in (folder / "model.yaml").read_text()
    hybrid = horizon.prepare_qat_fx(
        model, {"": horizon.default_calib_8bit_fake_quant_qconfig}, hybrid=True, hybrid_dict={"module_name": ["1", "2"]},
        example_inputs=BATCHES[0],
    )  # fmt: skip
    fxq.calibrate(hybrid, BATCHES)
    folder = fxq.board.export_horizon(fxq.convert(hybrid), tmp_path / "hybrid")
    (line,) = [line for line in (folder / "model.yaml").read_text().splitlines() if "run_on_cpu" in line]
    named = line.split("'")[1].split(";")
    assert [name.rpartition("/")[2] for name in named] == ["Conv", "Tanh"]


# ---- wrapped --------------------------------------------------------------------------------------------------------------
@fx_helper.wrap(skip_compile=True)
def ranked(x: Tensor) -> Tensor:
    return x * 2 if float(x.detach().sum()) > 0 else x * 3


@fx_helper.wrap()
def traced(x: Tensor) -> Tensor:
    return torch.relu(x)


@fx_helper.wrap(skip_compile=True)
class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.detach().sum()) > 0 else x - 1


@fx_helper.wrap
class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with jit_scheme.Tracer.dynamic_block(self, "read"):
            return self.conv(x)


@members(lambda: dict(first=nn.Conv2d(3, 8, 3), read=Read(), whole=Whole()), seed=0)
def Marked(self, x: Tensor) -> Tensor:
    return self.whole(ranked(self.read(traced(self.first(x)))))


def test_what_is_wrapped_is_traced_unless_it_is_not_to_be_compiled() -> None:
    prepared = calibrated(Marked().eval())
    layers = {layer.name: layer.integer for layer in fxq.inspect.layers(prepared) if not layer.boundary}
    assert layers == {"first": True, "read_conv": True, "ranked": False, "whole": False}
    integer = horizon.convert_fx(prepared)
    held = next(fxq.inspect.record(integer, [BATCHES[0]], real=True))
    assert torch.equal(integer(BATCHES[0]), Whole()(ranked(held["read_conv"])))
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be wrapped"):
        fx_helper.wrap()(5)


# ---- the log ----------------------------------------------------------------------------------------------------------------
def test_options_without_effect_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net().eval()
    with caplog.at_level("INFO", "fxquant"):
        analysis = QuantAnalysis(copy.deepcopy(model), calibrated(model), "fake_quant", device_ids=[0], out_dir=tmp_path)
        analysis.auto_find_bad_case(BATCHES, topk=3)
        analysis.run(device_id=0)
        analysis.compare_per_layer(prefixes=("conv",))
        assert [row[0] for row in analysis.sensitivity(metric="L1")]
    with pytest.raises(fxq.errors.ConfigurationError, match="plot_opinfo"):
        analysis.plot_opinfo("conv")
    analysis.clean()
    with pytest.raises(fxq.errors.ConfigurationError, match="a bad case was not set"):
        analysis.run()
    lines = [record.getMessage().split(": ")[-1] for record in caplog.records if "without effect here" in record.getMessage()]
    assert lines == ["device_ids", "topk", "device_id", "prefixes", "metric"]
