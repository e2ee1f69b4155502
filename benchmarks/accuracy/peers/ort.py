"""onnxruntime.quantization: a static QDQ model of PyTorch's ONNX file, run by onnxruntime's integer kernels."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized
from benchmarks.accuracy.settings import CALIBRATION, Setting

INPUT = "input"


def refuses(setting: Setting, mode: str, **_: object) -> str | None:
    if mode != CALIBRATION:
        return "calibration only"
    if setting.power_of_two:
        return "no power-of-two scales"
    return "no 4-bit convolution" if min(setting.weights, setting.activations) < 8 else None


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str, *, affine: bool, method: str = "MinMax") -> Quantized:
    from onnxruntime import quantization as ort

    with tempfile.TemporaryDirectory() as folder:
        plain, ready, quantized = (Path(folder) / f"{name}.onnx" for name in ("float", "ready", "quantized"))
        export(checkpoint, plain)
        ort.quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
        ort.quantize_static(
            str(ready),
            str(quantized),
            Reader(checkpoint.data.calibration),
            quant_format=ort.QuantFormat.QDQ,
            activation_type=ort.QuantType.QUInt8 if affine else ort.QuantType.QInt8,
            weight_type=ort.QuantType.QInt8,
            per_channel=setting.per_channel,
            calibrate_method=ort.CalibrationMethod[method],
            extra_options={"ActivationSymmetric": not affine, "WeightSymmetric": True},
        )
        _require_quantized(quantized)
        return run(quantized)


def export(checkpoint: Checkpoint, path: Path) -> None:
    """The float network as ONNX, with any batch size."""
    example = checkpoint.data.calibration[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            checkpoint.load(),
            (example,),
            str(path),
            input_names=[INPUT],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
            external_data=False,
        )


def run(path: Path) -> Quantized:
    """The file as a function of a batch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI its default kernels saturate sums of two products
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def call(batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {INPUT: batch.numpy()})[0])

    return call


class Reader:
    """The calibration samples as onnxruntime asks for them."""

    def __init__(self, batches: list[Tensor], name: str = INPUT) -> None:
        self.left, self.name = iter(batches), name

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.left, None)
        return None if batch is None else {self.name: batch.numpy()}


def _require_quantized(path: Path) -> None:
    """Raise AssertionError where a layer's weight is a float."""
    import onnx

    graph = onnx.load(str(path)).graph
    producers = {name: node.op_type for node in graph.node for name in node.output}
    layers = [node for node in graph.node if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm")]
    in_float = [node.name for node in layers if any(producers.get(name) != "DequantizeLinear" for name in node.input[:2])]
    assert not in_float, f"onnxruntime leaves layers in float: {in_float}"
