"""How far is what is trained from what is deployed?   python -m benchmarks.train_gap

Two small networks learn scikit-learn's digits in integers, with scales that follow statistics or are learned in every way there is. At
some steps, copies of the model see one batch in TRAIN and in VALIDATE, and every layer's integers are compared:

    frozen   scales and statistics stand still: the share of elements that differ must be 0, or the exit status is 1
    live     as the next step sees them: batch norms by the batch, scales moved by its range

With --all, each layer has a line; else those have one in which elements differ, and the number of all is said.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.accuracy.networks import Block
from examples.demo import load_digits_dataset
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.support import seeded
from fxquant.support.progress import progress

BATCH = 16
MEASURED = (0, 1, 4, 16)  # steps after which the gap is measured
RATE = 0.003  # of Adam


class Residual(nn.Module):
    """Convolutions with batch norm, a shortcut, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12))
        self.down = nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.down(F.relu(x + self.body(x))).mean((2, 3)))


class Transformer(nn.Module):
    """Patches of 4 × 4 pixels, and a layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, 16))
        self.block = Block(16, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patch(x).flatten(2).transpose(1, 2) + self.position).mean(1))


@dataclass(frozen=True)
class Way:
    """A way to train scales: of activations, of weights, and the target with the dtype that shows it."""

    activations: str
    weights: str
    target: str = "nash-e"
    dtype: str = "int8"

    def __str__(self) -> str:
        return f"{self.activations}, weights {self.weights}: {self.target}, {self.dtype}"


NETWORKS: dict[str, Callable[[], nn.Module]] = {"residual": Residual, "transformer": Transformer}
WAYS = {
    "statistics": Way("statistics", "statistics", "bayes-e"),
    "frozen": Way("frozen", "statistics"),
    "learned": Way("learned", "learned", "bayes-e", "int4"),
    "lsq+": Way("lsq+", "learned", "x86", "uint8"),
    "pact": Way("pact", "learned", "x86", "uint8"),
    "tqt": Way("tqt", "tqt"),
}


@dataclass(frozen=True)
class Gap:
    """The number of elements of one layer at one step, and of different elements, frozen and live."""

    elements: int
    frozen: int
    live: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="*", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--training", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", nargs="*", type=int, default=list(MEASURED), help="after which the gap is measured")
    parser.add_argument("--all", action="store_true", help="a line for each layer")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args()
    torch.set_num_threads(1)
    broken = 0
    for network in options.network:
        for training in options.training:
            by_step = dict(gaps(network, WAYS[training], sorted(set(options.steps)), False if options.quiet else None))
            broken += sum(gap.frozen for layers in by_step.values() for gap in layers.values())
            Console(width=120).print(table(f"{network}; {WAYS[training]}", by_step, options.all))
    print(f"elements that differ with frozen statistics: {broken}")
    raise SystemExit(1 if broken else 0)


def gaps(network: str, way: Way, steps: list[int], show: bool | None) -> Iterator[tuple[int, dict[str, Gap]]]:
    """Each of these steps of a course of training, with the gap of every layer after it."""
    images, labels = load_digits_dataset()[:2]
    images = F.avg_pool2d(images, 2)
    with seeded(0):
        model = NETWORKS[network]()
        order = torch.randperm(len(images)).split(BATCH)
    qconfig = fxq.QConfig(
        fxq.ActivationConfig(way.dtype, training=way.activations),
        fxq.WeightConfig("int4" if way.dtype == "int4" else "int8", training=way.weights),
    )
    prepared = fxq.prepare(model, images[:BATCH], way.target, qconfig)
    fxq.calibrate(prepared, [images[chosen] for chosen in order[:4]], show_progress=False)
    fxq.set_state(prepared, fxq.State.TRAIN)
    optimizer = torch.optim.Adam(prepared.train().parameters(), RATE)
    for step in progress(range(max(steps) + 1), max(steps) + 1, f"{network}, {way.activations}", show):
        chosen = order[step % len(order)]
        if step in steps:
            yield step, gap(prepared, images[chosen])
        optimizer.zero_grad()
        F.cross_entropy(prepared(images[chosen]), labels[chosen]).backward()
        optimizer.step()


def gap(prepared: fx.GraphModule, batch: Tensor) -> dict[str, Gap]:
    """Compare TRAIN and VALIDATE for one batch, layer by layer; the model is not changed."""
    deployed, frozen, live = (copy.deepcopy(prepared) for _ in range(3))
    fxq.set_state(deployed, fxq.State.VALIDATE)
    fxq.freeze(frozen)
    expected = outputs(deployed.eval(), batch)
    still, moving = (outputs(model, batch) for model in (frozen, live))
    return {
        name: Gap(value.numel(), int((still[name] != value).sum()), int((moving[name] != value).sum())) for name, value in expected.items()
    }


def outputs(prepared: fx.GraphModule, batch: Tensor) -> dict[str, Tensor]:
    """The integers of every layer, each on the scale of its moment; of a 32-bit sum the float values."""
    integers: dict[str, Tensor] = {}

    def keep(operator: nn.Module, inputs: Any, result: Tensor) -> None:
        assert isinstance(operator, QuantizedOperator)
        plain = operator.plain or operator.output.follows_sum
        integers[operator.name] = result.detach() if plain else torch.round(result.detach() / operator.output.scale)

    for operator in quantized_operators(prepared).values():
        operator.register_forward_hook(keep)
    prepared(batch)
    return integers


def table(title: str, by_step: dict[int, dict[str, Gap]], whole: bool) -> Table:
    """A line for each layer; of each step the elements that differ with frozen statistics, and the share that does with live ones."""
    result = Table("layer", "elements", title=title, title_justify="left")
    for step in by_step:
        result.add_column(f"step {step}: frozen", justify="right")
        result.add_column("live", justify="right")
    layers = list(next(iter(by_step.values())))
    for layer in layers:
        row = [gaps[layer] for gaps in by_step.values()]
        if whole or any(gap.frozen or gap.live for gap in row):
            cells = [cell for gap in row for cell in (str(gap.frozen), f"{100 * gap.live / gap.elements:.2f} %")]
            result.add_row(layer, f"{row[0].elements:,}", *cells)
    total = [[sum(getattr(gap, part) for gap in gaps.values()) for part in ("elements", "frozen", "live")] for gaps in by_step.values()]
    cells = [cell for elements, frozen, live in total for cell in (str(frozen), f"{100 * live / elements:.2f} %")]
    result.add_section()
    result.add_row(f"all {len(layers)}", f"{total[0][0]:,}", *cells)
    return result


if __name__ == "__main__":
    main()
