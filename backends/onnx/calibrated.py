"""Style "calibrated": a file at opset 19 with `horizon::HzCalibration` nodes, for the vendor's compiler of the nash marches.

    %y = conv2d(%x, …)     →     y = HzCalibration(Conv(HzCalibration(x), HzCalibration(weight), bias))

A node rounds a float tensor to integers on a scale, or on one for each index of `axis`, and returns their float values. Its name and
attributes are those of the `*_calibrated_model.onnx` that hb_mapper 1.24 writes for bayes-e. Whether hb_compile reads them is untested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxquant.backends.onnx.horizon import BITS, DOMAIN, HorizonCall, HorizonWriter
from fxquant.ir.integer import QParams
from fxquant.numerics.grids import ACTIVATION_TYPES

OPSET = 19  # the largest that hb_compile's documents name


def calibration(e: Any, value: str, scale: Tensor, storage: torch.dtype, axis: int | None = None) -> str:
    """Write the node that rounds a float32 value to int8 or int16 on a scale, or on one for each index of `axis`; return its result."""
    bits, scales = BITS[storage], scale.reshape(-1).float()
    largest = 2 ** (bits - 1) - 1
    place = {} if axis is None else {"axis": axis}
    result: str = e.node(
        "HzCalibration",
        value,
        domain=DOMAIN,
        qtype=f"int{bits}",
        scales=scales.tolist(),
        thresholds=(scales * largest).tolist(),
        constant=1,
        switch="ON",
        **place,
    )
    e.types[result] = torch.float32
    return result


class CalibratedCall(HorizonCall):
    """One operator, whose constants are rounded by HzCalibration nodes."""

    on_grid = staticmethod(calibration)
    uncarried = "an HzCalibration node has one scale for each index of one dimension, and this weight has more"
    remedy = "quantize this layer with one scale per output channel, or without groups"

    def stays(self, role: str) -> bool:
        return False


class CalibratedWriter(HorizonWriter):
    """Writes an integer graph of a nash target in one traversal. A quantized tensor is represented by its float value."""

    calls = CalibratedCall

    def _quantized(self, value: str, described: QParams, limited: bool = False) -> str:
        scale = torch.tensor(described.scale, dtype=torch.float32, device="cpu")
        return calibration(self.emitter, value, scale, ACTIVATION_TYPES[described.dtype].storage)
