"""Files of the plugin's and its compiler's names, wrapped functions that are kept whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.horizon_programs.calibrated import computed
from fxquant.compat import horizon
from fxquant.compat.horizon import served as march
from tests.shared.networks import members

fx_helper, jit_scheme = horizon.fx.fx_helper, horizon.fx.jit_scheme
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


# ---- folders ---------------------------------------------------------------------------------------------------------------
def test_the_folder_for_hb_compile_is_left_where_its_compiler_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    integer = horizon.convert_fx(calibrated())
    with caplog.at_level("INFO", "fxquant"), pytest.raises(fxq.errors.ConfigurationError, match="cannot be compiled here") as refused:
        horizon.compile_model(integer, [BATCHES[0]], hbm=tmp_path / "model.hbm", opt="O3")
    assert "hb_compile" in refused.value.remedy
    assert any("O3 is replaced by O2" in record.getMessage() for record in caplog.records)
    assert "optimize_level: 'O2'" in (tmp_path / "model" / "model.yaml").read_text()
    assert torch.equal(computed(tmp_path / "model" / "model.onnx", BATCHES[0][:1]), integer(BATCHES[0][:1]))


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
