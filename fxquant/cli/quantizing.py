"""`fxquant quantize`: from the name of a model to its files, its report and its summary."""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fxquant as fxq
from fxquant.accuracy.walk import inputs_of
from fxquant.api.files import check_horizon, speed_of
from fxquant.cli.factories import dynamic_shapes, model_named
from fxquant.cli.photographs import samples_of
from fxquant.errors import ConfigurationError
from fxquant.reporting.statistics import in_decibels
from fxquant.reporting.verdict import GOOD
from fxquant.search.bit_widths import Widening
from fxquant.support.arguments import FOLDER, accepted
from fxquant.support.files import check_place, place_files, write_file

HELD_OUT_EVERY, MOST_HELD_OUT = 5, 32  # one sample of HELD_OUT_EVERY, at most MOST_HELD_OUT, is held back to verify
HORIZON = "horizon"
Samples = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Figures about a quantized model."""

    model: str
    calibrated: int  # calibrated, held: numbers of samples
    held: int
    verified: fxq.results.Report  # the ONNX file against the integer model, on the samples that were held back
    compared: fxq.results.Comparison  # the integer model against the float one, on the same
    findings: fxq.results.Findings  # broken limits of the target, and operators that stay in float
    operators: int  # the number of integer operators
    style: str  # of the ONNX file
    runtime: str  # that it was verified in
    without_vnni: str  # what onnxruntime needs for the same numbers on x86 processors without VNNI
    speed: float | None  # of the ONNX file in onnxruntime, in times that of the float model's file; None if it was not measured
    files: Mapping[str, int]  # the size of each, in bytes, by its path in the folder
    widened: fxq.results.Widened | None  # what has 16 bits for --accuracy; None without it

    def __rich__(self) -> Table:
        table = Table(title=f"{self.model} for {self.findings.target}", title_justify="left", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        table.add_row("samples, calibrated on and held back", f"{self.calibrated} and {self.held}")
        table.add_row("integer operators", str(self.operators))
        for kind, words in KINDS.items():
            table.add_row(words, str(sum(finding.kind == kind for finding in self.findings)), end_section=kind == "host")
        for output in self.compared.outputs:
            table.add_row(f"SQNR of {output.name}, to the float model", in_decibels(output.sqnr, "not float"))
        table.add_section()
        table.add_row("elements compared with the ONNX file", f"{self.verified.elements:,}")
        table.add_row("mismatching elements", f"{self.verified.mismatches:,}", end_section=True)
        table.add_row("style of the ONNX file, and runtime", f"{self.style}, {self.runtime}")
        table.add_row("session options of onnxruntime on x86 without VNNI", self.without_vnni)
        slower = ": SLOWER than float here" if self.speed is not None and self.speed < 1 else ""
        likely = "SLOWER than float: it has its products, and more passes" if self.style == "exact" else "not measured"
        speed = f"{likely} (--measure)" if self.speed is None else f"{self.speed:.2f} × float{slower}"
        table.add_row("speed in onnxruntime, one thread", speed, end_section=True)
        for name, size in self.files.items():
            table.add_row(name, f"{size:,} bytes")
        return table

    def document(self) -> dict[str, Any]:
        """Return the summary as JSON has it; a figure that is not finite is null."""
        return {
            "fxquant": fxq.__version__,
            "model": self.model,
            "target": self.findings.target,
            "samples": {"calibrated": self.calibrated, "held_back": self.held},
            "integer_operators": self.operators,
            **{name: getattr(self, name) for name in ("style", "runtime", "without_vnni")},
            "speed": self.speed,
            "findings": [dict(vars(finding)) for finding in self.findings],
            "outputs": [
                {"name": each.name, "sqnr_db": _finite(each.sqnr), "cosine": each.cosine, "largest_error": _finite(each.largest)}
                for each in self.compared.outputs
            ],
            "verified": {"equal": bool(self.verified), **{name: getattr(self.verified, name) for name in COUNTED}},
            "advice": [dict(vars(each), gain=_finite(each.gain), effect=_finite(each.effect)) for each in self.compared.advice],
            "widened": self.widened and {**{name: _finite(getattr(self.widened, name)) for name in WIDENED}, "dtypes": self.widened.dtypes},
            "files": dict(self.files),
        }


WIDENED = ("goal", "before", "after", "cost")
COUNTED = ("mismatches", "elements", "tensors")  # of a report
KINDS = {"float": "operators in float", "limit": "broken limits", "host": "operators moved to the host"}


def run(options: argparse.Namespace) -> int:
    """Quantize the model that the options name; print the outcome and return the exit status."""
    out = _folder(options)
    if options.horizon:
        check_horizon(options.target)
    mapping = None if options.qconfig is None else fxq.load_qconfig(options.qconfig)
    model = model_named(options.model, options.cut)
    samples = samples_of(options, model)
    calibration, held_out = _split(samples, options)
    varying = dynamic_shapes(options.dynamic, model, samples)
    named = {name: getattr(options, name) for name in ("adapt", "without_vnni", "accuracy")}
    settings = fxq.Options(dynamic_shapes=varying, **named)
    result = fxq.quantize(model, _batches(calibration, options.batch_size), options.target, mapping, options=settings)
    with tempfile.TemporaryDirectory(prefix="fxquant-") as temporary:
        folder = Path(temporary)
        outcome = _written(result, folder, held_out, _count(calibration), options)
        write_file(folder / SUMMARY, json.dumps(outcome.document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        place_files(folder, out, SUMMARY)
    Console().print(outcome)
    for advice in outcome.compared.advice:
        print(advice)
    if outcome.widened is not None:
        print(outcome.widened)
    elif (
        min((each.sqnr for each in outcome.compared.outputs), default=GOOD) < GOOD and "int16" in result.prepared.meta["target"].activations
    ):
        held = inputs_of(result.prepared, _batches(held_out, options.batch_size), None, settings)
        print(f"--accuracy {GOOD:.0f} would give {Widening(result.prepared, held, settings).proposed(GOOD)}")
    print(out / SUMMARY)
    if not outcome.verified:
        print(outcome.verified)
    return 0 if outcome.verified else 1


MODEL, INTEGER, REPORT, SUMMARY = "model.onnx", "integer.fxq", "report.html", "summary.json"


def _folder(options: argparse.Namespace) -> Path:
    """Return the folder of the files. Raise before any work if it cannot be written, or if a file cannot be made."""
    if options.dynamic and (options.horizon or options.fixed_batch):
        because, remedy = "--horizon and --fixed-batch write files of one size", "leave out one of them"
        raise ConfigurationError("sizes cannot vary in these files", because=because, remedy=remedy)
    out = Path(accepted("quantize", "--out", options.out, FOLDER))
    for name in (MODEL, INTEGER, SUMMARY, *([REPORT] * options.report)):
        check_place(out / name)
    if options.report and find_spec("plotly") is None:
        options.report = False
        print('no report.html is written: it needs plotly, which pip install "fxquant[report]" installs')
    return out


def _count(samples: Samples) -> int:
    return len(next(iter(samples.values())))


def _split(samples: Samples, options: argparse.Namespace) -> tuple[Samples, Samples]:
    """Split samples into samples to calibrate with and samples held back to verify, a multiple of the file's fixed batch size."""
    count, least = _count(samples), options.fixed_batch or 1
    held_out = min(count // HELD_OUT_EVERY, MOST_HELD_OUT)
    held_out = max(held_out - held_out % least, least)
    if held_out >= count:
        because = f"there are {count}, of which {held_out} would be held back to verify the file"
        remedy = f"give {held_out + 1} or more; calibration needs some hundred"
        raise ConfigurationError(f"{options.data or '--images'} holds too few samples", because=because, remedy=remedy)
    return {name: array[:-held_out] for name, array in samples.items()}, {name: array[-held_out:] for name, array in samples.items()}


def _batches(samples: Samples, size: int) -> list[dict[str, Tensor]]:
    pieces = [torch.split(array, size) for array in samples.values()]
    return [dict(zip(samples, batch, strict=True)) for batch in zip(*pieces, strict=True)]


def _written(result: fxq.results.Result, folder: Path, held_out: Samples, calibrated: int, options: argparse.Namespace) -> Outcome:
    """Write the files of a result into a folder, verify them, and return the outcome."""
    if options.horizon:
        fxq.board.export_horizon(result.integer, folder / HORIZON)
    form = {name: getattr(options, name) for name in ("style", "opset", "runtime")}
    path = result.export(folder / MODEL, batch_size=options.fixed_batch, **form)
    fxq.save(result.integer, folder / INTEGER)
    if result.widened is not None:
        fxq.save_qconfig(result.widened.qconfig, folder / "qconfig.json")
    verified = result.verify(path, _batches(held_out, options.fixed_batch or options.batch_size), runtime=options.runtime)
    batches = _batches(held_out, options.batch_size)
    compared = result.compare(batches)
    if options.report:
        fxq.report(result.integer, folder / REPORT, batches, prepared=result.prepared, comparison=compared, title=options.model)
    operators = sum(layer.integer and not layer.boundary for layer in fxq.inspect.layers(result.prepared))
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    speed = speed_of(path, result.float, _batches(held_out, options.fixed_batch or options.batch_size)[0]) if options.measure else None
    metadata, findings, runtime = fxq.export.onnx_metadata(path), fxq.check(result.prepared), options.runtime or "onnxruntime"
    needed = ", ".join(f"{name}={value}" for name, value in metadata.get("session_options_without_vnni", {}).items())
    needed = "other numbers with any" if metadata.get("relies_on_vnni") else needed or "none"
    rest = metadata["style"], runtime, needed, speed, files, result.widened
    return Outcome(options.model, calibrated, _count(held_out), verified, compared, findings, operators, *rest)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
