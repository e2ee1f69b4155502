"""Files for the nash marches, held by a reference implementation of HzCalibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import nn

import fxquant as fxq


class HzCalibration(OpRun):
    """Round x / scale to even, clamp to the integers, multiply by the scale."""

    op_domain = "horizon"

    def _run(self, x: Any, qtype: str, scales: list[float], axis: int | None = None, **_: Any) -> tuple[Any]:
        limit = 2 ** (int(qtype.removeprefix("int")) - 1)
        scale = np.asarray(scales, np.float32)
        scale = scale.reshape(()) if axis is None else scale.reshape([-1 if index == axis else 1 for index in range(x.ndim)])
        return ((np.clip(np.rint(x / scale), -limit, limit - 1) * scale).astype(np.float32),)


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
    folder = fxq.export_horizon(result.integer, tmp_path / "net")
    file = onnx.load(folder / "model.onnx")
    assert {each.domain: each.version for each in file.opset_import}[""] == 19
    nodes = [node for node in file.graph.node if node.op_type == "HzCalibration"]
    assert len(nodes) >= 5
    assert "untried" in (folder / "README.txt").read_text().lower()
    assert "hb_compile" in (folder / "compile.sh").read_text()
    (found,) = ReferenceEvaluator(file, new_ops=[HzCalibration]).run(None, {file.graph.input[0].name: batches[0].numpy()})
    assert torch.equal(torch.from_numpy(found), result.integer(batches[0]))


def test_what_hb_mapper_does_not_compile_is_refused(tmp_path: Path) -> None:
    result = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), [torch.randn(1, 3, 4, 4)], target="nash-e", show_progress=False)
    folder = fxq.export_horizon(result.integer, tmp_path / "net")
    with pytest.raises(fxq.ConfigurationError, match="cannot be compiled here") as refused:
        fxq.compile_horizon(folder)
    assert "hb_mapper compiles for bernoulli2, bayes, bayes-e" in refused.value.because
    with pytest.raises(fxq.ConfigurationError, match="is unknown to hb_compile"):
        fxq.export_horizon(result.integer, tmp_path / "other", optimize="O3")


@pytest.mark.parametrize("target", ["nash-e/requantize", "nash-e-level1", "bernoulli"])
def test_other_integers_are_refused(target: str, tmp_path: Path) -> None:
    result = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), [torch.randn(1, 3, 4, 4)], target=target, show_progress=False)
    with pytest.raises(fxq.ConfigurationError, match=f"an integer model of {target} cannot be written"):
        fxq.export_horizon(result.integer, tmp_path / "net")
