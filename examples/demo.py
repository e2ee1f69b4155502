"""Train, quantize, export and verify a small network on real digits: `make demo`, or python examples/demo.py --target bayes-e."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends
from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel
from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.support import seeded
from fxquant.support.files import write_file
from fxquant.support.progress import progress
from fxquant.target import Target

# ---- A minimal training loop, for the float network and for the prepared one -----------------------------------------


LEARNING_RATE = 0.01  # of the float network
QUANTIZED_LEARNING_RATE = LEARNING_RATE / 20  # of a prepared network, which was trained before
_WEIGHT_DECAY = 1e-2
_LABEL_SMOOTHING = 0.1


def accuracy(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, batch_size: int = 256) -> float:
    """Return the fraction, 0..1, of images whose largest logit is their label's; a module in train mode is evaluated in eval mode."""
    network = model if isinstance(model, nn.Module) and model.training else None
    if network is not None:
        network.eval()
    try:
        with torch.no_grad():
            pairs = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
            right = sum(int((model(batch).argmax(1) == expected).sum()) for batch, expected in pairs)
    finally:
        if network is not None:
            network.train()
    return right / len(labels)


def train(
    network: nn.Module, dataset: DigitsDataset, epochs: int, seed: int, learning_rate: float = LEARNING_RATE, description: str = "training"
) -> None:
    """Train in place from the current weights of a float or prepared network, which is left in eval mode.

    Equal weights, seed and number of threads give equal results, bit for bit, on one machine.
    """
    images, labels = dataset.train_images, dataset.train_labels
    total = epochs * -(-len(labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=total)
    shuffled = (chosen for _ in range(epochs) for chosen in torch.split(torch.randperm(len(labels)), BATCH_SIZE))
    network.train()
    with seeded(seed):
        for chosen in progress(shuffled, total, description):
            loss = F.cross_entropy(network(images[chosen]), labels[chosen], label_smoothing=_LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    network.eval()


# ---- A small residual network for 32×32 digits, as a typical PyTorch user would write it -----------------------------
#
# Activations, additions and reshapes are written in several forms on purpose: as modules, as functions and as operators.


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut; shape and number of channels are unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(x + y)


class InvertedResidual(nn.Module):
    """Expand, filter each channel separately (depthwise), reduce; a shortcut if input and output have equal shapes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = nn.Sequential(nn.Conv2d(in_channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6())
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False)
        self.depthwise_bn = nn.BatchNorm2d(hidden)
        self.project = nn.Sequential(nn.Conv2d(hidden, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels))
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        wide = self.expand(x)
        wide = F.relu6(self.depthwise_bn(self.depthwise(wide)))
        narrow: Tensor = self.project(wide)
        if self.has_shortcut:
            narrow += x
        return narrow


class DemoNetwork(nn.Module):
    """A network from digits of shape [batch, 1, 32, 32] to logits of shape [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.block1 = ResidualBlock(24)
        self.block2 = InvertedResidual(24, 32, stride=2, expansion=4)
        self.block3 = InvertedResidual(32, 32, stride=1, expansion=3)
        self.block4 = InvertedResidual(32, 48, stride=2, expansion=3)
        self.block5 = InvertedResidual(48, 48, stride=1, expansion=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.block1(x)
        x = self.block3(self.block2(x))
        x = self.block5(self.block4(x))
        x = torch.flatten(self.pool(x), 1)
        return self.head(x)  # type: ignore[no-any-return]


def build_demo_network(seed: int) -> DemoNetwork:
    """Return an untrained network whose weights depend only on `seed`; PyTorch's global generator is left unchanged."""
    with seeded(seed):
        return DemoNetwork()


# ---- The handwritten digits of scikit-learn, as images of a size that a vision network expects -----------------------
#
# The images travel inside the scikit-learn package, so nothing is downloaded.


IMAGE_SIZE = 32
TEST_IMAGES_PER_CLASS = 36
_SPLIT_SEED = 20
_LARGEST_PIXEL = 16  # scikit-learn's pixels are the integers 0..16


class DigitsDataset(NamedTuple):
    """1,797 digits, split into 1,437 to train on and 360 (36 of each digit) to test on.

    Images are float32 of shape [count, 1, 32, 32] with values in [-1, 1]; labels are int64 of shape [count], 0..9.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits_dataset() -> DigitsDataset:
    """Return the digits with their fixed split: every call, in every process, returns equal tensors."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            "the digits cannot be loaded",
            because="they come with scikit-learn, which is not installed",
            remedy='pip install "fxquant[demo]"',
        ) from error
    raw = load_digits()
    centred = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / (_LARGEST_PIXEL / 2) - 1
    images = F.interpolate(centred, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    train, test = split_by_class(labels, TEST_IMAGES_PER_CLASS, _SPLIT_SEED)
    return DigitsDataset(images[train], labels[train], images[test], labels[test])


def split_by_class(labels: Tensor, test_images_per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return disjoint ascending indices (train, test); the test set has equally many images of each class."""
    generator = torch.Generator().manual_seed(seed)
    is_test = torch.zeros_like(labels, dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero().flatten()
        chosen = torch.randperm(len(members), generator=generator)[:test_images_per_class]
        is_test[members[chosen]] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


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
    reports: tuple[fxq.results.Report, ...]
    float_nodes: int
    directory: Path
    seconds: float


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread inside: sums then have one order, and the accuracies in the table are reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def run_demo(target: str | Target = "bayes-e", out: str | Path = "fxquant-demo", adapt: bool = False) -> Outcome:
    """Train, quantize, export and verify; the table is printed and the files are in `out`. `adapt` is that of `prepare`.

    Writes model.onnx, explain.txt and passes/ (the graph after each pass). Raises UnknownTarget before any work.
    """
    chosen, directory = backends.get(target), Path(out)
    if directory.exists() and not directory.is_dir():  # known before any work
        raise ConfigurationError(
            f"{directory} is not a folder", because="the results are written into one", remedy="pass another path as out"
        )
    console = Console()
    start = time.perf_counter()
    dataset = load_digits_dataset()
    counts = f"{len(dataset.train_labels)} handwritten digits to train on, {len(dataset.test_labels)} to test on"
    console.print(f"{counts}; target {chosen.name}: {chosen.description}", soft_wrap=True)
    network = build_demo_network(SEED)
    train(network, dataset, FLOAT_EPOCHS, SEED, description="training the float network")

    options = fxq.Options(adapt=adapt, dump=directory / "passes")
    prepared = fxq.prepare(network, (dataset.train_images[:1],), target=chosen, options=options)
    calibration = list(torch.split(dataset.train_images, BATCH_SIZE))[:CALIBRATION_BATCHES]
    fxq.calibrate(prepared, calibration)
    calibrated = accuracy(prepared, dataset.test_images, dataset.test_labels)
    fxq.set_state(prepared, fxq.State.TRAIN)
    train(prepared, dataset, QUANTIZED_EPOCHS, SEED, QUANTIZED_LEARNING_RATE, "training it quantization-aware")
    fxq.set_state(prepared, fxq.State.VALIDATE)

    integer = fxq.convert(prepared, options=options)
    path = fxq.export_onnx(integer, directory / "model.onnx")
    write_file(directory / "explain.txt", fxq.explain(integer))
    test = list(torch.split(dataset.test_images, BATCH_SIZE))
    reports = fxq.verify(integer, path, test), fxq.verify(prepared, integer, test)

    outcome = Outcome(
        chosen.name, _accuracies(dataset, network, calibrated, prepared, integer, path),
        (sum(p.numel() * p.element_size() for p in network.parameters()), _weight_bytes(integer)),
        reports, count_float_nodes(integer), directory, time.perf_counter() - start,
    )  # fmt: skip
    _print(outcome, console)
    return outcome


def _accuracies(
    dataset: DigitsDataset, network: nn.Module, calibrated: float, prepared: fx.GraphModule, integer: fx.GraphModule, path: Path
) -> dict[str, float]:
    images, labels = dataset.test_images, dataset.test_labels
    opened = OnnxModel(path)
    runner = opened.runner(RUNTIME_NAMES[0], [])

    def onnx(batch: Tensor) -> Tensor:
        return runner({opened.input_names[0]: batch})[opened.output_names[0]]

    forms: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("float", network), ("prepared (VALIDATE)", prepared), ("integer", integer), ("ONNX (onnxruntime)", onnx),
    ]  # fmt: skip
    measured = {name: accuracy(form, images, labels) for name, form in progress(forms, len(forms), "evaluating")}
    return {"float": measured.pop("float"), "calibrated, not yet trained": calibrated, **measured}


def _weight_bytes(integer: fx.GraphModule) -> int:
    """Return the bytes of the integer weights and biases, as the integer model stores them."""
    return sum(b.numel() * b.element_size() for name, b in integer.named_buffers() if name.rsplit(".", 1)[-1] in ("weight", "bias"))


def count_float_nodes(integer: fx.GraphModule) -> int:
    """Count the operators of an integer model that compute in float, except those of its boundary."""
    return sum(not layer.integer and not layer.boundary for layer in fxq.inspect.layers(integer))


def _print(outcome: Outcome, console: Console) -> None:
    table = Table(title=f"demonstration, target {outcome.target}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    before, after = outcome.weight_bytes
    rows = {
        **{f"accuracy, {name}": f"{100 * value:.2f} %" for name, value in outcome.accuracies.items()},
        "bytes of the weights, float": f"{before:,}",
        "bytes of the weights, integer": f"{after:,}",
        "quantized tensors compared": f"{max(report.tensors for report in outcome.reports)}",
        "elements compared, over all runtimes": f"{sum(report.elements for report in outcome.reports):,}",
        "mismatching elements": f"{sum(report.mismatches for report in outcome.reports)}",
        "float nodes between the boundary nodes": f"{outcome.float_nodes}",
    }
    for row in rows.items():
        table.add_row(*row)
    console.print(table)
    for first in (report.first for report in outcome.reports if report.first is not None):
        console.print(str(first))
    console.print(f"ONNX file                 {outcome.directory / 'model.onnx'}")
    console.print(f"the graph after each pass {outcome.directory / 'passes'}/")
    console.print(f"why every node is integer {outcome.directory / 'explain.txt'}")
    console.print(f"{outcome.seconds:.0f} seconds")


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration with the options of a command line; return 0 if every bit is equal and no operator is left in float."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bayes-e", help="target to compile for: a march, a chip, x86 or qnnpack (default: bayes-e)")
    parser.add_argument("--out", type=Path, default=Path("fxquant-demo"), help="folder of the results (default: fxquant-demo)")
    parser.add_argument("--adapt", action="store_true", help="rewrite operators that exceed a limit of the target")
    options = parser.parse_args(arguments)
    try:
        outcome = run_demo(options.target, options.out, adapt=options.adapt)
    except FxQuantError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return 0 if all(outcome.reports) and outcome.float_nodes == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
