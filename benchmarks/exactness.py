"""Are the bits equal?   python -m benchmarks.exactness

One row per model and target. Everything up to the fifth column must be zero:

    E1  mismatching elements between the integer graph and its ONNX file in every runtime, over all quantized tensors
    E2  the same between the prepared model in VALIDATE and the integer graph
    E3  the same between TRAIN with frozen statistics and VALIDATE, at the outputs
    E4  accumulators whose values did not fit the bits that were proved for them
    E5  planted faults that `verify` did not locate: one bias of the middle layer is changed in a copy

each over two batch sizes. Further columns are the quantized tensors compared, the widest proven accumulator, and the float nodes between
the boundary nodes. Then come the ratio of signal to quantization noise at the outputs, beside that of torch.ao's FX flow on the same
model and data in the same run. The column qdq is the ONNX file in that style, which is not exact by nature: how many output
elements differ from the integer graph's in onnxruntime, and by how many steps at most. "int16" rows have int16 weights where
the target has them. With --keep the rows go to a file as well, and those it holds are not measured again.
"""

import argparse
import copy
import logging
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from rich.console import Console
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxquant as fxq
from benchmarks.shared import keep_row, kept_rows, quantized_engine, table_of, torch_ao
from benchmarks.zoo import ZooEntry, zoo
from examples.demo import count_float_nodes
from fxquant import backends
from fxquant.ir.integer import origin

TARGETS = ("bernoulli", "bernoulli2", "bayes", "bayes-e", "nash-e", "nash-m", "x86", "qnnpack")
DTYPES = ("int8",)
ENGINES = ("x86", "qnnpack")
WRITTEN = Path(__file__).parent / "results" / "exactness.md"
SMALL, LARGE = (4, 3), (16, 3)  # batch sizes: ONNX's own evaluator, in numpy, runs the small ones


@dataclass(frozen=True)
class Row:
    """The measurements of one model on one target."""

    model: str
    target: str
    dtype: str
    e1: int
    e2: int
    e3: int
    e4: int
    e5: int
    tensors: int
    accumulator_bits: int
    float_nodes: int
    sqnr: float
    weight: str
    qdq_share: float  # of the output elements
    qdq_steps: float
    theirs: dict[str, float | str]  # torch.ao's ratio for each engine, or why there is none

    @property
    def exact(self) -> bool:
        return not (self.e1 or self.e2 or self.e3 or self.e4 or self.e5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(zoo()), choices=list(zoo()), metavar="MODEL", help="which models of the zoo")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES), help="of the activations; targets that do not have one are left out")
    parser.add_argument("--processes", type=int, default=1, help="models measured at once, each on one thread")
    parser.add_argument("--keep", type=Path, help="a file of rows, read first and written as they are measured")
    parser.add_argument("--write", action="store_true", help=f"write the table to {WRITTEN.parent.name}/{WRITTEN.name} too")
    options = parser.parse_args()
    pairs = [(t, d) for t in options.targets for d in options.dtype if d in backends.get(t).activations]
    by_key = {(row.model, row.target, row.dtype): row for row in (Row(**fields) for fields in kept_rows(options.keep))}
    missing = {name: [pair for pair in pairs if (name, *pair) not in by_key] for name in options.models}
    for row in measured({name: chosen for name, chosen in missing.items() if chosen}, options.processes):
        by_key[row.model, row.target, row.dtype] = row
        print(line(row), flush=True)
        keep_row(options.keep, row)
    rows = [by_key[name, target, dtype] for name in options.models for target, dtype in pairs]
    show(rows)
    if options.write:
        WRITTEN.parent.mkdir(exist_ok=True)
        WRITTEN.write_text(markdown(rows), encoding="utf-8")
    raise SystemExit(0 if all(row.exact for row in rows) else 1)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measured(chosen: dict[str, list[tuple[str, str]]], processes: int) -> Iterator[Row]:
    """Measure models, in parallel if there are several `processes`, and yield the rows of each model when that is measured."""
    if processes <= 1:
        for name, pairs in chosen.items():
            yield from _measure_model(name, pairs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_all_of, name, pairs) for name, pairs in chosen.items()]):
            yield from future.result()


def _all_of(name: str, pairs: list[tuple[str, str]]) -> list[Row]:
    return list(_measure_model(name, pairs))


def _measure_model(name: str, pairs: list[tuple[str, str]]) -> Iterator[Row]:
    torch.set_num_threads(1)
    logging.getLogger("fxquant").setLevel(logging.ERROR)  # limits that some of these networks break are not the question here
    entry = zoo()[name]()
    theirs = {engine: in_a_process(_theirs, name, engine) for engine in ENGINES}
    for target, dtype in pairs:
        yield measure(name, entry, target, dtype, theirs)


def _theirs(name: str, engine: str) -> float | str:
    torch.set_num_threads(1)
    return torch_ao_sqnr(zoo()[name](), engine)


def in_a_process(function: Callable[..., float | str], *arguments: str) -> float | str:
    """Return the result of a peer's kernels, which can end a process: torch.ao's for transposed convolutions do on some processors."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            return "its kernels ended the process"


def measure(name: str, entry: ZooEntry, target: str, dtype: str, theirs: dict[str, float | str]) -> Row:
    """One row."""
    weight = dtype if dtype in backends.get(target).weights else "int8"
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype), fxq.WeightConfig(weight))
    prepared = fxq.prepare(entry.model, entry.example_inputs, target, qconfig)
    fxq.calibrate(prepared, entry.calibration_batches, show_progress=False)
    integer = fxq.convert(prepared)
    small, large = ([entry.test_batches[index][:size] for index, size in enumerate(sizes)] for sizes in (SMALL, LARGE))
    with tempfile.TemporaryDirectory() as directory:
        path = fxq.export_onnx(integer, Path(directory) / "model.onnx", style="exact")
        e1 = fxq.verify(integer, path, small, show_progress=False)
        qdq = fxq.export_onnx(integer, Path(directory) / "qdq.onnx", style="qdq", opset=21)
        report = fxq.verify(integer, qdq, large, show_progress=False)
        assert isinstance(report, fxq.results.DeviationReport)
        deviations = report.outputs["onnxruntime"]
    return Row(
        name,
        target,
        dtype,
        e1=e1.mismatches,
        e2=fxq.verify(prepared, integer, large, show_progress=False).mismatches,
        e4=overflows(integer, large),
        e5=faults_not_located(integer, small[0]),
        sqnr=sqnr(entry.model, prepared, entry.test_batches),
        e3=train_mismatches(prepared, large),  # last, for it freezes the model
        tensors=e1.tensors,
        accumulator_bits=max(layer.accumulator_bits for layer in fxq.inspect.layers(integer)),
        float_nodes=count_float_nodes(integer),
        weight=weight,
        qdq_share=sum(d.differing for d in deviations) / sum(d.elements for d in deviations),
        qdq_steps=max(d.largest for d in deviations),
        theirs=theirs,
    )


def tensors_of(result: Any) -> list[Tensor]:
    """All tensors of a model's result."""
    return [value for value in tree_leaves(result) if isinstance(value, Tensor)]


def train_mismatches(prepared: fx.GraphModule, batches: Sequence[Tensor]) -> int:
    """Elements in which TRAIN, in train mode with frozen statistics, differs from VALIDATE."""
    with torch.no_grad():
        expected = [tensors_of(prepared(batch)) for batch in batches]
    fxq.freeze(prepared)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    for module in prepared.modules():
        if isinstance(module, nn.Dropout) or getattr(getattr(module, "operator", None), "name", "") == "dropout":
            module.eval()  # dropout is random by intent
    results = [tensors_of(prepared(batch)) for batch in batches]
    return sum(int((a != b).sum()) for ours, theirs in zip(results, expected, strict=True) for a, b in zip(ours, theirs, strict=True))


def overflows(integer: fx.GraphModule, batches: Sequence[Tensor]) -> int:
    """Accumulators that held a value beyond the bits proved for their operator."""
    proved = {layer.name: layer.accumulator_bits for layer in fxq.inspect.layers(integer)}
    of = {node.name: proved.get(origin(node)) for node in integer.graph.nodes}
    beyond: set[str] = set()
    for sums in fxq.inspect.record(integer, batches, "accumulators"):
        beyond |= {name for name, value in sums.items() if (bits := of[name]) and int(value.abs().max()) >= 2 ** (bits - 1)}
    return len(beyond)


def faults_not_located(integer: fx.GraphModule, batch: Tensor) -> int:
    """0 if `verify` names the layer whose bias is changed in a copy of the model, 1 if it does not."""
    faulty = copy.deepcopy(integer)
    biases = [node for node in faulty.graph.nodes if node.op == "get_attr" and str(node.target).endswith(".bias")]
    chosen = biases[len(biases) // 2]
    *_, layer, _ = str(chosen.target).split(".")
    bias = faulty.get_buffer(str(chosen.target))
    bias += 2**22 if float(bias.flatten()[0]) < 0 else -(2**22)
    first = fxq.verify(integer, faulty, [batch], show_progress=False).first
    named = next((node for node in integer.graph.nodes if first is not None and node.name == first.name), None)
    return 0 if named is not None and origin(named) == layer else 1


def sqnr(model: nn.Module, quantized: nn.Module, batches: Sequence[Tensor]) -> float:
    """10·log10 of the outputs' power over that of their error, in dB, over all batches."""
    signal = noise = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            for exact, actual in zip(tensors_of(model(batch)), tensors_of(quantized(batch)), strict=True):
                signal = signal + exact.double().square().sum()
                noise = noise + (exact - actual).double().square().sum()
    return float(10 * torch.log10(signal / noise))


def torch_ao_sqnr(entry: ZooEntry, engine: str) -> float | str:
    """Return the SQNR of torch.ao's FX graph mode with its default configuration for this engine; or its error."""
    try:
        with quantized_engine(engine):
            return sqnr(entry.model, torch_ao(entry.model, entry.calibration_batches, engine), entry.test_batches)
    except Exception as error:  # whatever it is, it is theirs to explain
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"


# ---- showing --------------------------------------------------------------------------------------------------------

Cell = Callable[[Row], str]
COLUMNS: dict[str, Cell] = {
    "model": lambda row: row.model,
    "target": lambda row: row.target,
    "activations": lambda row: row.dtype,
    "weights": lambda row: row.weight,
    **{f"E{number}": partial(lambda row, name: str(getattr(row, name)), name=f"e{number}") for number in range(1, 6)},
    "tensors": lambda row: str(row.tensors),
    "accumulator": lambda row: f"{row.accumulator_bits} bits",
    "float nodes": lambda row: str(row.float_nodes),
    "qdq": lambda row: f"{100 * row.qdq_share:.1f} %, {row.qdq_steps:.0f}",
    "SQNR": lambda row: f"{row.sqnr:.1f}",
    **{f"torch.ao {engine}": partial(lambda row, engine: _ratio(row.theirs[engine]), engine=engine) for engine in ENGINES},
}


LABELS = ("model", "target", "activations", "weights")


def _ratio(value: float | str) -> str:
    return "–" if isinstance(value, str) else f"{value:.1f}"


def line(row: Row) -> str:
    """The row as one line, for a reader who waits for it."""
    return "  ".join(f"{name} {cell(row)}" if name not in LABELS else cell(row) for name, cell in COLUMNS.items())


def show(rows: Sequence[Row]) -> None:
    """The table in the terminal, and under it why torch.ao has no number somewhere."""
    table = table_of(*COLUMNS, labels=len(LABELS))
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    console = Console(width=180)
    console.print(table)
    for note in footnotes(rows):
        console.print(note, soft_wrap=True, markup=False)


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Why torch.ao has no number: once for each model and engine."""
    reasons = {(row.model, engine, why): None for row in rows for engine, why in row.theirs.items() if isinstance(why, str)}
    return [f"torch.ao, {engine}, on {model}: {why}" for model, engine, why in reasons]


def markdown(rows: Sequence[Row]) -> str:
    """The table as a page."""
    total = sum(row.exact for row in rows)
    lines = [
        "# Are the bits equal?",
        "",
        "Written by `python -m benchmarks.exactness --write`; the columns are described by `--help`. SQNR in dB, of a calibrated model",
        "with random weights on real data: it compares tools, and says nothing of a model's quality.",
        "",
        f"{total} of {len(rows)} rows are exact. Python {platform.python_version()}, torch {torch.__version__}, onnx {onnx.__version__}, "
        f"onnxruntime {onnxruntime.__version__}; batches of {SMALL[0]} and {SMALL[1]} for E1, of {LARGE[0]} and {LARGE[1]} for E2 to E4.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "|".join("---" if index < len(LABELS) else "---:" for index in range(len(COLUMNS))) + "|",
        *("| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in rows),
    ]
    notes_below = footnotes(rows)
    return "\n".join([*lines, *([""] if notes_below else []), *(f"- {note}" for note in notes_below)]) + "\n"


if __name__ == "__main__":
    main()
