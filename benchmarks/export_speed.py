"""How long do export and verification take?   python -m benchmarks.export_speed

One row per model and target: the size of the integer graph, how many of its operators are float, the megabytes of the file, and the
seconds of `export_onnx` and of `verify`. That has one sample for every runtime, form of the integer model and quantized tensor.
bernoulli2 has no 16-bit tensors, so that the transformers have float parts there. Transformers need the extra "zoo".
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

import fxquant as fxq
from benchmarks.shared import table_of, timed
from benchmarks.zoo.any_life import enliven
from benchmarks.zoo.hugging_face import ENTRIES
from benchmarks.zoo.resnet import ResNet50
from fxquant.analysis.layers import layers, left_in_float
from fxquant.support.progress import progress


class Case(NamedTuple):
    """A model with a batch of two and one sample."""

    model: nn.Module
    batch: Any
    sample: Any


def _hugging_face(name: str) -> Callable[[], Case]:
    def build() -> Case:
        entry = ENTRIES[name]
        model, batch = entry.build(), entry.inputs(2, 0)
        enliven(model, [batch])
        return Case(model, batch, entry.inputs(1, 1))

    return build


def _resnet50() -> Case:
    images = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return Case(ResNet50().eval(), images[:2], images[2:])


MODELS: dict[str, Callable[[], Case]] = {
    "SegFormer": _hugging_face("SegFormer"),
    "Swin": _hugging_face("Swin"),
    "ResNet-50, 224²": _resnet50,
}
TARGETS = ("bernoulli2", "bayes-e", "x86")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = table_of("model", "target", "nodes", "float", "file", "export", "verify", "mismatches", labels=2)
    rows = [(name, target) for name in options.models for target in options.targets]
    for name, target in progress(rows, len(rows), "exports"):
        table.add_row(name, target, *_measured(MODELS[name](), target))
    Console(width=120).print(table)


def _measured(case: Case, target: str) -> tuple[str, ...]:
    prepared = fxq.prepare(case.model, case.batch, target)
    fxq.calibrate(prepared, [case.batch], show_progress=False)
    integer = fxq.convert(prepared)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _, exporting = timed(lambda: fxq.export_onnx(integer, path))
        report, verifying = timed(lambda: fxq.verify(integer, path, [case.sample], show_progress=False))
        size = path.stat().st_size / 1e6
    cells = f"{len(integer.graph.nodes):,}", str(len(left_in_float(layers(integer)))), f"{size:.1f} MB"
    return *cells, f"{exporting:.2f} s", f"{verifying:.2f} s", str(report.mismatches)


if __name__ == "__main__":
    main()
