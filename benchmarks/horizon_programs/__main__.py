"""Run programs written for Horizon's plugin without edits, and compare the outcome of each with its expected outcome.

`python -m benchmarks.horizon_programs` runs all; `--only WORD` those whose name has it. A program passes where its layers have the dtypes
and the scales that it asks for, and its integer model has the bits of its prepared one. Its outputs have to be near the float model's, and
its file has to compute the integer model. A program that cannot be served has to end in an error of fxquant's that says what to do. With
FXQUANT_HORIZON programs are compiled by the vendor's tool, and simulated. The exit status is 1 if one does not pass.
"""

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

import fxquant as fxq
from benchmarks.horizon_programs.calibrated import computed
from benchmarks.horizon_programs.expected import EXPECTED, Expected
from fxquant.backends.horizon.tool import Tool
from fxquant.compat import horizon
from fxquant.compat.horizon import served as march
from fxquant.ir.graph import fact
from fxquant.ir.integer import qparams
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.support.progress import progress

PROGRAMS = Path(__file__).parent / "programs.py"
IMPORTS = Path(__file__).parent / "imports.txt"


def import_lines() -> list[str]:
    """The import lines of public documents."""
    return [line for line in IMPORTS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def try_import(line: str) -> str:
    """Run an import line; return "served", or "refused" for an error with a remedy. Other errors are raised."""
    try:
        exec(line, {})
    except ImportError as error:
        if not isinstance(error, fxq.errors.ConfigurationError) or not error.remedy:
            raise
        return "refused"
    return "served"


def run(name: str) -> dict[str, Any]:
    """Run a program, and return its variables by name: `qat_model`, `batches`, and where it converts `quantized_model`."""
    left: dict[str, Any] = importlib.import_module("benchmarks.horizon_programs.programs").run(name)
    return left


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """Inside, a program finds the plugin, an empty folder, and no march that another has set."""
    horizon.install(replace=True)
    before = os.getcwd()
    march._march.clear()
    horizon.set_qat_mode(horizon.QATMode.FuseBN)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.chdir(before)
        march._march.clear()
        horizon.set_qat_mode(horizon.QATMode.FuseBN)


def judge(name: str, folder: Path) -> str:
    """Return the defects of a program's outcome; empty if there are none."""
    expected = EXPECTED[name]
    refused = refusal(expected)
    try:
        with fresh(folder):
            scope = run(name)
    except fxq.FxQuantError as error:
        if not refused:
            return f"it is refused: {error.what}"
        if refused not in str(error) or not error.remedy:
            return f"another error: {error.what}"
        return "; ".join(_wrong_folder(folder / expected.file)) if expected.file and expected.refused else ""
    except Exception as error:  # a raw error is what this looks for
        return f"raw {type(error).__name__}: {error}"
    if refused:
        return "it is not refused"
    with fresh(folder):
        return "; ".join(_differences(scope, expected))


def refusal(expected: Expected) -> str:
    """Words of the error that a program has to end in on this machine; empty where it has to run."""
    return expected.refused or ("" if is_installed() else expected.without)


def is_installed() -> bool:
    """Whether the vendor's compiler is."""
    try:
        Tool.find()
    except fxq.errors.ConfigurationError:
        return False
    return True


def _wrong_file(integer: fx.GraphModule, path: Path, batch: torch.Tensor) -> Iterator[str]:
    """Yield the defects of an ONNX file or a compiled program."""
    if not (report := fxq.verify(integer, path, [batch], show_progress=False)):
        yield f"the file is not the integer model: {report}"


def _wrong_folder(folder: Path) -> Iterator[str]:
    """Yield the defects of a folder for hb_compile, held against the integer model beside it, at a batch of 1."""
    integer = fxq.load(folder.with_name("quantized.bc"))
    (input_fact,) = [fact(node) for node in integer.graph.find_nodes(op="placeholder")]
    batch = torch.randn(input_fact.at(1), generator=torch.Generator().manual_seed(0))
    exact = integer(batch)
    step = [grid.scale for node in integer.graph.nodes if (grid := qparams(node)) is not None][-1]  # that of the output
    steps = ((computed(folder / f"{folder.name}.onnx", batch) - exact) / step).abs()
    if not (float(steps.max()) < 1.5 and float((steps > 0.5).float().mean()) < 0.05):  # a sum of float values may round another way
        yield f"the file for hb_compile is {float(steps.max()):.2g} steps off, in {int((steps > 0.5).sum())} elements"


def _differences(scope: dict[str, Any], expected: Expected) -> Iterator[str]:
    model, batch = scope["qat_model"], scope["batches"][0]
    integer = scope.get("quantized_model")
    if fx_stage(model) == "PREPARED":
        operators = quantized_operators(model)
        yield from _wrong(model, operators, expected)
        integer = fxq.convert(model) if integer is None else integer
        report = fxq.verify(model, integer, [batch], show_progress=False)
        if not report:
            yield f"integer is not QAT: {report}"
        fxq.set_state(model, "float")
        with torch.no_grad():
            exact = model.eval()(batch)
        fxq.set_state(model, "validate")
        ratio = _decibels(exact, integer(batch))
        if not ratio >= expected.sqnr:
            yield f"{ratio:.1f} dB in place of {expected.sqnr:g}"
        if expected.file:
            yield from _wrong_file(integer, Path(expected.file), batch)
    elif not fxq.inspect.layers(model):
        yield "there are no layers"


def fx_stage(model: nn.Module) -> str:
    """The stage of a graph."""
    return str(getattr(model, "meta", {}).get("stage", "")) if isinstance(model, fx.GraphModule) else ""


def _decibels(exact: torch.Tensor, actual: torch.Tensor) -> float:
    noise = (exact - actual).detach().square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise)) if noise > 0 else float("inf")


def _wrong(model: nn.Module, operators: dict[str, QuantizedOperator], expected: Expected) -> Iterator[str]:
    """Yield layers whose dtypes or scales differ from the ones that are asked for."""
    for path, (output, weight, input) in expected.layers.items():
        mine = [
            operator
            for operator in operators.values()
            if operator.path == path and not operator.plain and operator.operator.name != "requantize"
        ]
        if not mine:
            yield f"{path} is not an operator"
            continue
        operator = mine[0]
        read = operator.inputs.get("input")
        dtypes = operator.output.dtype.name, operator.weight_quantizer.dtype.name, None if read is None else read.dtype.name
        for what, asked, has in zip(("output", "weight", "input"), (output, weight, input), dtypes, strict=True):
            if asked is not None and asked != has:
                yield f"the {what} of {path} is {has} in place of {asked}"
    for path, scale in expected.scales.items():
        mine = [operator for operator in operators.values() if operator.path == path and operator.owns_output]
        has = [float(operator.output.scale.detach()) for operator in mine]
        if not any(abs(one - scale) <= 1e-6 * scale for one in has):
            yield f"the scale of {path} is {has} in place of {scale:g}"
    layers = {layer.name: layer for layer in fxq.inspect.layers(model)}  # type: ignore[arg-type]
    for path in expected.floats:
        if path not in layers or layers[path].integer:
            yield f"{path} is not in float"


def main() -> int:
    """Run the programs, and print the outcome of each."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.horizon_programs", description="programs for Horizon's plugin, run as they are"
    )
    parser.add_argument("--only", default="", help="the programs whose name has this")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    names = [name for name in sorted(EXPECTED) if arguments.only in name]
    table, wrong = Table("program", "seconds", "what became of it"), 0
    for name in progress(names, len(names), "running"):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            problems = judge(name, Path(folder))
        wrong += bool(problems)
        meant = "refused with a remedy" if refusal(EXPECTED[name]) else "as asked"
        table.add_row(name, f"{time.perf_counter() - start:.1f}", problems or meant)
    horizon.install(replace=True)
    outcomes = [try_import(line) for line in import_lines()]
    Console().print(table)
    refused = sum(bool(refusal(EXPECTED[name])) for name in names)
    print(f"{len(names)} programs: {len(names) - wrong} as asked, {refused} of them refused with a remedy, {wrong} wrong")
    print(f"{len(outcomes)} import lines: {outcomes.count('served')} served, {outcomes.count('refused')} refused with a remedy, none raw")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
