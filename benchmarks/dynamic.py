"""How much does dynamic quantization cost and gain, beside static quantization and torch.ao?   python -m benchmarks.dynamic

An LSTM, a GRU and a transformer read scikit-learn's handwritten digits row by row, at 16 × 16 pixels under noise, as in
`benchmarks.accuracy`, and are trained in float. Each is quantized dynamically, by fxquant and by torch.ao's `quantize_dynamic`, and
statically by fxquant on 64 training inputs, for x86: accuracy on the test, SQNR of the logits against float, and milliseconds for a batch
of 16 on one thread, the least of several. fxquant's rows are those of its integer model, which `verify` compares with its primitives in
the same run. Under it, linear layers alone.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization as ao

import fxquant as fxq
from benchmarks.accuracy.floats import sqnr
from benchmarks.accuracy.tasks import TASKS
from fxquant.support.progress import progress

DYNAMIC = fxq.QConfig(dynamic=True)
SIZE = 64
LAYERS = ((16, 128, 512), (32, 768, 768), (32, 768, 3072), (128, 512, 512))  # rows, inputs, outputs


class Recurrent(nn.Module):
    """The class of an image by the state after its last row."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(16, SIZE, batch_first=True), nn.Linear(SIZE, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layer(x.squeeze(1))[0][:, -1])


class Block(nn.Module):
    """An encoder layer; torch.ao's `quantize_dynamic` breaks PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.before, self.between = nn.MultiheadAttention(SIZE, 4, batch_first=True), nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.wide, self.narrow = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Any:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(torch.relu(self.wide(self.between(x))))


class Transformer(nn.Module):
    """The class of an image by the mean of its rows, after two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(16, SIZE), nn.Parameter(torch.zeros(1, 16, SIZE))
        self.encoder = nn.Sequential(Block(), Block())
        self.head = nn.Linear(SIZE, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.place).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Transformer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'network':12} {'method':22} {'accuracy %':>10} {'SQNR dB':>8} {'ms':>8}")
    for name in progress(options.networks, len(options.networks), "networks"):
        for row in rows(name, options.epochs, options.seed):
            print(row, flush=True)
    print(f"\n{'linear layer':16} {'float':>8} {'fxquant':>8} {'torch.ao':>8}   ms")
    for sizes in LAYERS:
        print(layer(*sizes), flush=True)


def rows(name: str, epochs: int, seed: int) -> list[str]:
    """Return the rows of a network."""
    data = TASKS["digits"].make(seed)
    model = trained(NETWORKS[name], data.train_inputs, data.train_targets, epochs, seed)
    inputs, targets, batch = data.test_inputs[:720], data.test_targets[:720], data.test_inputs[:16]
    calibration = data.calibration
    dynamic = fxq.quantize(model, calibration[:1], "x86", DYNAMIC, show_progress=False)
    static = fxq.quantize(model, calibration, "x86", show_progress=False)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "float": model,
        "fxquant, dynamic": dynamic.integer,
        "torch.ao, dynamic": ao.quantize_dynamic(model),
        "fxquant, static": static.integer,
    }
    for result in (dynamic, static):
        report = fxq.verify(result.prepared, result.integer, [batch], show_progress=False)
        assert report, str(report)
    expected, lines = outputs(model, inputs), []
    for method, form in forms.items():
        logits = outputs(form, inputs)
        accuracy = 100 * float((logits.argmax(1) == targets).float().mean())
        distance = "" if form is model else f"{sqnr(expected, logits):.2f}"
        lines.append(f"{name:12} {method:22} {accuracy:10.2f} {distance:>8} {milliseconds(form, batch):8.3f}")
    return lines


def trained(make: Callable[[], nn.Module], inputs: Tensor, targets: Tensor, epochs: int, seed: int) -> nn.Module:
    """A float network that has learned the task."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(inputs) // 64))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=generator).split(64)[: len(inputs) // 64]:
            loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def outputs(form: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """The logits, in batches of 16, as a grid that is found at run time sees them."""
    with torch.no_grad():
        return torch.cat([form(batch) for batch in inputs.split(16)])


def milliseconds(form: Callable[[Tensor], Tensor], batch: Tensor, runs: int = 30) -> float:
    """The least time of several runs."""
    with torch.no_grad():
        for _ in range(3):
            form(batch)
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            form(batch)
            seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def layer(count: int, inputs: int, outputs: int) -> str:
    """The row of a linear layer."""
    generator = torch.Generator().manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(inputs, outputs)).eval(), torch.randn(count, inputs, generator=generator)
    integer = fxq.quantize(model, [batch], "x86", DYNAMIC, show_progress=False).integer
    times = [milliseconds(form, batch) for form in (model, integer, ao.quantize_dynamic(model))]
    return f"{f'{count}×{inputs}→{outputs}':16} " + " ".join(f"{value:8.3f}" for value in times)


if __name__ == "__main__":
    main()
