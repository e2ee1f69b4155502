"""The demonstration `fxquant demo`, from the data to the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant import backends
from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel
from fxquant.demo.digits import DigitsDataset, load_digits_dataset
from fxquant.demo.network import build_demo_network
from fxquant.demo.training import OnBatch, accuracy, train_float, train_quantized
from fxquant.support.arguments import FOLDER, checked
from fxquant.support.files import write_file
from fxquant.support.progress import bar, progress, shown
from fxquant.target import Target

SEED = 0
FLOAT_EPOCHS = 20
QUANTIZED_EPOCHS = 4
CALIBRATION_BATCHES = 8
BATCH_SIZE = 64


@dataclass(frozen=True)
class Outcome:
    """The measurements of the demonstration, and the folder of its files. Accuracies are fractions of the test split."""

    target: str
    accuracies: dict[str, float]
    weight_bytes: tuple[int, int]
    report: fxq.Report
    float_nodes: int
    directory: Path
    seconds: float


@checked(out=FOLDER)
def run_demo(
    target: str | Target = "bayes-e",
    out: str | Path = "fxquant-demo",
    console: Console | None = None,
    show_progress: bool | None = None,
    adapt: bool = False,
) -> Outcome:
    """Train, quantize, export and verify; the table is printed and the files are in `out`. `adapt` is that of `prepare`.

    Writes model.onnx, explain.txt and passes/ (the graph after each pass). Raises UnknownTarget before any work.
    """
    chosen = backends.get(target)
    console = console or Console()
    directory = Path(out)
    with one_thread():
        return _run(chosen, directory, console, show_progress, adapt)


def _run(chosen: Target, directory: Path, console: Console, show_progress: bool | None, adapt: bool) -> Outcome:
    start = time.perf_counter()
    dataset = load_digits_dataset()
    counts = f"{len(dataset.train_labels)} handwritten digits to train on, {len(dataset.test_labels)} to test on"
    console.print(f"{counts}; target {chosen.name}: {chosen.description}", soft_wrap=True)
    network = build_demo_network(SEED)
    with _batches("training the float network", show_progress) as step:
        train_float(network, dataset, FLOAT_EPOCHS, SEED, step)

    passes = directory / "passes"
    prepared = fxq.prepare(network, (dataset.train_images[:1],), target=chosen, adapt=adapt, dump=passes)
    calibration = list(torch.split(dataset.train_images, BATCH_SIZE))[:CALIBRATION_BATCHES]
    fxq.calibrate(prepared, calibration, show_progress=show_progress)
    calibrated = accuracy(prepared, dataset.test_images, dataset.test_labels)
    fxq.set_state(prepared, fxq.State.TRAIN)
    with _batches("training it quantization-aware", show_progress) as step:
        train_quantized(prepared, dataset, QUANTIZED_EPOCHS, SEED, on_batch=step)
    fxq.set_state(prepared, fxq.State.VALIDATE)

    integer = fxq.convert(prepared, dump=passes)
    path = fxq.export_onnx(integer, directory / "model.onnx")
    write_file(directory / "explain.txt", fxq.explain(integer))
    test = list(torch.split(dataset.test_images, BATCH_SIZE))
    report = fxq.verify(integer, path, test, show_progress=show_progress)
    validated = fxq.verify(prepared, integer, test)
    report.merge(validated)

    outcome = Outcome(
        chosen.name, _accuracies(dataset, network, calibrated, prepared, integer, path, show_progress),
        (_parameter_bytes(network), _weight_bytes(integer)), report, count_float_nodes(integer), directory, time.perf_counter() - start,
    )  # fmt: skip
    _print(outcome, console)
    return outcome


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread within the context.

    Its sums then have one order, so that the accuracies in the table are reproducible; tensors of this size gain
    nothing from a second thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _batches(description: str, show: bool | None) -> Iterator[OnBatch]:
    """Yield a callback that advances a progress bar."""
    if not shown(show):
        yield lambda done, total, loss: None
        return
    with bar() as display:
        task = display.add_task(description, total=None)
        yield lambda done, total, loss: display.update(task, completed=done, total=total)


def _accuracies(
    dataset: DigitsDataset,
    network: nn.Module,
    calibrated: float,
    prepared: fx.GraphModule,
    integer: fx.GraphModule,
    path: Path,
    show: bool | None,
) -> dict[str, float]:
    images, labels = dataset.test_images, dataset.test_labels
    opened = OnnxModel(path)
    runner = opened.runner(RUNTIME_NAMES[0], [])

    def onnx(batch: Tensor) -> Tensor:
        return runner({opened.input_names[0]: batch})[opened.output_names[0]]

    forms: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("float", network), ("prepared (VALIDATE)", prepared), ("integer", integer), ("ONNX (onnxruntime)", onnx),
    ]  # fmt: skip
    measured = {name: accuracy(form, images, labels) for name, form in progress(forms, len(forms), "evaluating", show)}
    return {"float": measured.pop("float"), "calibrated, not yet trained": calibrated, **measured}


def _parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _weight_bytes(integer: fx.GraphModule) -> int:
    """Return the bytes of the integer weights and biases, as the integer model stores them."""
    return sum(b.numel() * b.element_size() for name, b in integer.named_buffers() if name.rsplit(".", 1)[-1] in ("weight", "bias"))


def count_float_nodes(integer: fx.GraphModule) -> int:
    """Count the operators of an integer model that compute floating-point values, except those of its boundary."""
    return sum(not layer.integer and not layer.boundary for layer in fxq.layers(integer))


def _print(outcome: Outcome, console: Console) -> None:
    table = Table(title=f"fxquant demo, target {outcome.target}", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in outcome.accuracies.items():
        table.add_row(f"accuracy, {name}", f"{100 * value:.2f} %")
    table.add_section()
    before, after = outcome.weight_bytes
    table.add_row("bytes of the weights, float", f"{before:,}")
    table.add_row("bytes of the weights, integer", f"{after:,}")
    table.add_section()
    table.add_row("quantized tensors compared", f"{outcome.report.tensors}")
    table.add_row("elements compared, over all runtimes", f"{outcome.report.elements:,}")
    table.add_row("mismatching elements", f"{outcome.report.mismatches}")
    table.add_row("float nodes between the boundary nodes", f"{outcome.float_nodes}")
    console.print(table)
    if outcome.report.first is not None:
        console.print(str(outcome.report.first))
    console.print(f"ONNX file                 {outcome.directory / 'model.onnx'}")
    console.print(f"the graph after each pass {outcome.directory / 'passes'}/")
    console.print(f"why every node is integer {outcome.directory / 'explain.txt'}")
    console.print(f"{outcome.seconds:.0f} seconds")
