"""Files for the nash marches, held by a reference implementation of HzCalibration."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import fxquant as fxq
from benchmarks.horizon_programs.calibrated import computed

CONFIGS = {
    "int8": None,
    "int16": fxq.QConfig(fxq.ActivationConfig("int16")),
    "learned": fxq.QConfig(weight=fxq.WeightConfig(training="learned")),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_computes_the_integers_of_the_model(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    batches = [torch.randn(1, 3, 8, 8) for _ in range(2)]
    result = fxq.quantize(model, batches, target="nash-e", qconfig=CONFIGS[kind], show_progress=False)
    folder = fxq.board.export_horizon(result.integer, tmp_path / "net")
    file = onnx.load(folder / "model.onnx")
    assert {each.domain: each.version for each in file.opset_import}[""] == 19
    nodes = [node for node in file.graph.node if node.op_type == "HzCalibration"]
    assert len(nodes) >= 5
    assert "untried" in (folder / "README.txt").read_text().lower()
    assert "hb_compile" in (folder / "compile.sh").read_text()
    assert torch.equal(computed(folder / "model.onnx", batches[0]), result.integer(batches[0]))


def test_what_hb_mapper_does_not_compile_is_refused(tmp_path: Path) -> None:
    result = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), [torch.randn(1, 3, 4, 4)], target="nash-e", show_progress=False)
    folder = fxq.board.export_horizon(result.integer, tmp_path / "net")
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be compiled here") as refused:
        fxq.board.compile_horizon(folder)
    assert "hb_mapper compiles for bernoulli2, bayes, bayes-e" in refused.value.because
    assert "optimize_level: 'O2'" in (folder / "model.yaml").read_text()  # its highest


@pytest.mark.parametrize("target", ["nash-e/requantize", "nash-e-level1", "bernoulli"])
def test_other_integers_are_refused(target: str, tmp_path: Path) -> None:
    result = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), [torch.randn(1, 3, 4, 4)], target=target, show_progress=False)
    with pytest.raises(fxq.errors.ConfigurationError, match=f"an integer model of {target} cannot be written"):
        fxq.board.export_horizon(result.integer, tmp_path / "net")
