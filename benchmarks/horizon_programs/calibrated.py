"""Compute a file of HzCalibration nodes, for marches whose compiler cannot be installed: a reference in onnx's evaluator."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor


class HzCalibration(OpRun):
    """Round x / scale to even, clamp to the integers, multiply by the scale."""

    op_domain = "horizon"

    def _run(self, x: Any, qtype: str, scales: list[float], axis: int | None = None, **_: Any) -> tuple[Any]:
        limit = 2 ** (int(qtype.removeprefix("int")) - 1)
        scale = np.asarray(scales, np.float32)
        scale = scale.reshape(()) if axis is None else scale.reshape([-1 if index == axis else 1 for index in range(x.ndim)])
        return ((np.clip(np.rint(x / scale), -limit, limit - 1) * scale).astype(np.float32),)


def computed(path: Path, batch: Tensor) -> Tensor:
    """The first output of a file for one input, whose batch is 1."""
    file = onnx.load(path)
    (output, *_) = ReferenceEvaluator(file, new_ops=[HzCalibration]).run(None, {file.graph.input[0].name: batch.numpy()})
    return torch.from_numpy(output)
