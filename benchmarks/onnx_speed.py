"""How fast do the exported files run?   python -m benchmarks.onnx_speed

One row per model: milliseconds of the float model's file (written by PyTorch's exporter) in onnxruntime, on one thread. Beside it, how
many times faster the model's quantized files are in each style, and the file of onnxruntime's own quantization (uint8, int8 weights for
each channel); medians of runs taken in turn. Styles "exact" and "fast" are verified in the same run; of "qdq", the
signal-to-noise ratio against the integer model is shown.
"""

import argparse
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from rich.console import Console
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.accuracy.peers.ort import Reader
from benchmarks.shared import in_turn, table_of
from benchmarks.zoo import zoo
from benchmarks.zoo.mobilenet import MobileNetV2
from benchmarks.zoo.resnet import ResNet18
from fxquant.support.progress import progress

STYLES = ("exact", "fast", "qdq")


def chain() -> tuple[nn.Module, list[Tensor]]:
    """Six convolutions of 64 channels, 3×3, at 56×56."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), [torch.randn(1, 64, 56, 56) for _ in range(4)]


def perceptron() -> tuple[nn.Module, list[Tensor]]:
    """Three linear layers, 256 rows at once."""
    layers = (nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 512))
    return nn.Sequential(*layers), [torch.randn(256, 512) for _ in range(4)]


def _of_the_zoo(name: str) -> Callable[[], tuple[nn.Module, list[Tensor]]]:
    def build() -> tuple[nn.Module, list[Tensor]]:
        entry = zoo()[name]()
        return entry.model, [batch[:1] for batch in entry.calibration_batches]

    return build


def _large(build: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, list[Tensor]]]:
    """A network on eight images of 224²."""
    return lambda: (build(), [torch.randn(8, 3, 224, 224) for _ in range(2)])


LARGE = {"ResNet-18, 8 × 224²": _large(ResNet18), "MobileNetV2, 8 × 224²": _large(MobileNetV2)}
MODELS = {"chain": chain, "perceptron": perceptron, **{name: _of_the_zoo(name) for name in zoo()}, **LARGE}


def _own_file(float_file: Path, batches: list[Tensor], path: Path) -> Path:
    """onnxruntime's own quantized file, with a zero point."""
    name = onnxruntime.InferenceSession(str(float_file), providers=["CPUExecutionProvider"]).get_inputs()[0].name
    settings = {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(str(float_file), str(path), Reader(batches, name), **settings)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--target", default="nash-e", help="a target")
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of PyTorch's exporter, and of the quantization of onnxruntime
    table = table_of("model", "float", *STYLES, "onnxruntime's", "integer kernels", "mismatches", "qdq SQNR")
    for name in progress(options.models, len(options.models), "models"):
        table.add_row(name, *measure(*MODELS[name](), options.target, options.runs))
    Console(width=120).print(table)


def measure(model: nn.Module, batches: list[Tensor], target: str, runs: int) -> list[str]:
    """The row's own columns."""
    result = fxq.quantize(model.eval(), batches, target=target)
    input = batches[0]
    with tempfile.TemporaryDirectory() as directory:
        files = {"float": _float_file(model, input, Path(directory) / "float.onnx")}
        files.update({style: result.export(Path(directory) / f"{style}.onnx", style=style) for style in STYLES})
        files["own"] = _own_file(files["float"], batches, Path(directory) / "own.onnx")
        times = medians({style: _session(path) for style, path in files.items()}, input, runs)
        mismatches = [str(result.verify(files[style], [input]).mismatches) for style in STYLES if style != "qdq"]
        deviation = result.verify(files["qdq"], [input])
        kernels = fxq.export.onnx_metadata(files["fast"])["kernels"]["integer"]
    assert isinstance(deviation, fxq.results.DeviationReport)
    return [
        f"{1000 * times['float']:.2f} ms",
        *(f"{times['float'] / times[style]:.2f} ×" for style in (*STYLES, "own")),
        f"{len(kernels)}",
        " / ".join(mismatches),
        f"{min(output.sqnr for outputs in deviation.outputs.values() for output in outputs):.1f} dB",
    ]


def _float_file(model: nn.Module, input: Tensor, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (input,), str(path), dynamo=True, verbose=False)
    return path


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if path.stem in STYLES:
        for name, value in fxq.export.onnx_metadata(path)["session_options"].items():
            options.add_session_config_entry(name, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def medians(sessions: dict[str, onnxruntime.InferenceSession], input: Tensor, runs: int) -> dict[str, float]:
    """Return the median seconds of one run of each session."""
    feeds = {style: {session.get_inputs()[0].name: input.numpy()} for style, session in sessions.items()}
    times = in_turn({style: partial(session.run, None, feeds[style]) for style, session in sessions.items()}, runs, warm=3)
    return {style: statistics.median(values) for style, values in times.items()}


if __name__ == "__main__":
    main()
