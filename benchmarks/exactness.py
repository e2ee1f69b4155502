"""Are the bits equal?   python -m benchmarks.exactness

One row per model and target: mismatching elements in E1 (integer graph = ONNX in every runtime), E2 (prepared
in VALIDATE = integer graph) and E3 (TRAIN with frozen statistics = VALIDATE), over all quantized tensors and two
batch sizes; the widest proven accumulator; the float nodes between the boundary nodes; and the ratio of signal
to quantization noise at the output, beside that of torch.ao's FX flow on the same model and data in the same run.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import fxquant as fxq
from benchmarks.zoo import ZooEntry, zoo
from fxquant.demo.run import count_float_nodes
from fxquant.graph import notes
from fxquant.progress import progress

TARGETS = ("bayes-e", "nash-e")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(zoo()), help="which models of the zoo")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    options = parser.parse_args()
    table = Table("model", "target", "E1", "E2", "E3", "tensors", "accumulator", "float nodes", "SQNR", "torch.ao x86", "torch.ao qnnpack")
    for column in table.columns[2:]:
        column.justify = "right"
    for name in progress(options.models, len(options.models), "models"):
        entry = zoo()[name]()
        theirs = {engine: torch_ao_sqnr(entry, engine) for engine in ("x86", "qnnpack")}
        for target in options.targets:
            table.add_row(name, target, *measure(entry, target), *(f"{value:.1f} dB" for value in theirs.values()))
    Console(width=150).print(table)


def measure(entry: ZooEntry, target: str) -> list[str]:
    """The row's own columns."""
    prepared = fxq.prepare(entry.model, entry.example_inputs, target=target)
    fxq.calibrate(prepared, entry.calibration_batches)
    integer = fxq.convert(prepared)
    batches = [entry.test_batches[0], entry.test_batches[1][:3]]
    with tempfile.TemporaryDirectory() as directory:
        path = fxq.export_onnx(integer, Path(directory) / "model.onnx")
        e1 = fxq.verify(integer, path, batches)
    e2 = fxq.verify(prepared, integer, batches)
    ratio = sqnr(entry.model, prepared, entry.test_batches)
    e3 = train_mismatches(prepared, batches)
    bits = max(notes(node).get("accumulator_bits", 0) for node in integer.graph.nodes)
    return [
        str(e1.mismatches),
        str(e2.mismatches),
        str(e3),
        str(e1.tensors),
        f"{bits} bits",
        str(count_float_nodes(integer)),
        f"{ratio:.1f} dB",
    ]


def train_mismatches(prepared: fx.GraphModule, batches: list[Tensor]) -> int:
    """Elements in which TRAIN, in train mode with frozen statistics, differs from VALIDATE."""
    with torch.no_grad():
        expected = [prepared(batch) for batch in batches]
    fxq.freeze(prepared)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    for module in prepared.modules():
        if isinstance(module, nn.Dropout) or getattr(getattr(module, "operator", None), "name", "") == "dropout":
            module.eval()  # dropout is random by intent
    return sum(int((prepared(batch) != wanted).sum()) for batch, wanted in zip(batches, expected, strict=True))


def sqnr(model: nn.Module, quantized: nn.Module, batches: list[Tensor]) -> float:
    """10·log10 of the output's power over that of its error, in dB, over all batches."""
    with torch.no_grad():
        exact = torch.cat([model(batch) for batch in batches])
        error = exact - torch.cat([quantized(batch) for batch in batches])
    return float(10 * torch.log10(exact.square().mean() / error.square().mean()))


def torch_ao_sqnr(entry: ZooEntry, engine: str) -> float:
    """The same for torch.ao's FX graph mode with its default configuration for this engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine
        try:
            prepared = prepare_fx(copy.deepcopy(entry.model), get_default_qconfig_mapping(engine), entry.example_inputs)
            with torch.no_grad():
                for batch in entry.calibration_batches:
                    prepared(batch)
            return sqnr(entry.model, convert_fx(prepared), entry.test_batches)
        finally:
            torch.backends.quantized.engine = before


if __name__ == "__main__":
    main()
