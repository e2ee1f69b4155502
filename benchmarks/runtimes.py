"""How do other runtimes compute an exported file?   python -m benchmarks.runtimes [RUNTIME …] [--write]

One row for each runtime and style, one column for each network, which is compiled for the targets of TARGETS. `verify` runs the file on one
batch, and compares the integers of every quantized tensor and the outputs with the integer model's:

    equal     no bit differs
    12 differ so many elements differ, inner ones included
    2 steps   so far outputs of style "qdq" are from the integer model's, which are not equal by nature
    refused   the runtime does not open or run the file; the reasons stand under the table
    –         the target has no such dtype

With --write the table replaces that of the page.
"""

import argparse
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends

BEGIN, END = "<!-- runtimes -->\n", "<!-- /runtimes -->\n"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "onnx.md"
TARGETS, STYLES = ("bayes-e", "nash-e", "x86"), ("exact", "fast", "qdq")
SHOWN = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO", "tvm": "TVM", "iree": "IREE", "litert": "LiteRT"}
PACKAGES = {
    "onnxruntime": "onnxruntime", "openvino": "openvino", "tvm": "apache-tvm", "iree": "iree-base-compiler", "litert": "ai-edge-litert",
}  # fmt: skip
# operators that a message may name
REFUSED = r"QLinear\w+|\w+Integer|Loop|(?<=\"onnx\.)\w+|quantized_dimension|ONNX_\w+|(?<=\d \()\w+(?=\) failed)"


class Residual(nn.Module):
    """Convolutions, also of single channels, a hard swish, a residual, a pool and a mean, with batch norms and a layer of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.apart = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.joined, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.sigmoid(self.head(F.max_pool2d(x + self.joined(self.apart(x)), 2).mean((2, 3))))


class Attention(nn.Module):
    """A layer norm, an attention and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(len(x), -1, 2, 8).transpose(1, 2) for part in self.mixed(self.norm(x)).chunk(3, -1))
        weighed = torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, -1) @ v
        return F.gelu(self.out(weighed.transpose(1, 2).flatten(2)) + x)


class Upsampling(nn.Module):
    """A mean of windows, a transposed convolution, a resize, a gate and a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.first(F.avg_pool2d(x, 2)), 0.1)
        y = self.up(y) + F.interpolate(y, scale_factor=2.0)
        return torch.clamp(self.last(y * torch.sigmoid(y.mean((2, 3), keepdim=True))) - x, -1, 1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (4, 3, 32, 32)),
    "attention": (Attention, (4, 12, 16)),
    "LSTM": (lambda: nn.LSTM(8, 16, batch_first=True), (4, 6, 8)),
    "upsampling": (Upsampling, (4, 3, 16, 16)),
    "int16": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 1, 1), nn.ReLU()), (4, 8, 12, 12)),
}


@dataclass
class Row:
    """The results of a runtime and a style: `cells` has that of each target, by the network, and `reasons` why files are refused."""

    runtime: str
    style: str
    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)

    def line(self) -> str:
        version = metadata.version(PACKAGES[self.runtime])
        return f"| {SHOWN[self.runtime]} {version} | `{self.style}` | " + " | ".join(map(_joined, self.cells.values())) + " |"


def _joined(results: dict[str, str]) -> str:
    """Return the result of all targets if it is one, or each result after its targets."""
    targets: dict[str, list[str]] = {}
    for target, result in results.items():
        targets.setdefault(result, []).append(target)
    return next(iter(targets)) if len(targets) == 1 else "; ".join(f"{', '.join(named)}: {result}" for result, named in targets.items())


def table(runtimes: Sequence[str]) -> Iterator[Row]:
    """Yield a row of the table for each runtime and style: runtime, style, and the outcome for each network."""
    torch.set_num_threads(1)
    logging.getLogger("fxquant").setLevel(logging.ERROR)
    models = {name: {target: compiled(name, target) for target in TARGETS} for name in NETWORKS}
    for row in (Row(runtime, style) for runtime in runtimes for style in STYLES):
        for name, of in models.items():
            row.cells[name] = {target: _measured(row, *of[target]) for target in TARGETS}
        yield row


def compiled(name: str, target: str) -> tuple[Any, Tensor]:
    """Return the integer model, or None if the target has no such dtype, and a batch."""
    torch.manual_seed(0)
    network, shape = NETWORKS[name]
    *batches, last = (torch.randn(shape) for _ in range(5))
    qconfig = fxq.QConfig(fxq.ActivationConfig("int16" if name == "int16" else "int8"))
    if name == "int16" and name not in backends.get(target).activations:
        return None, last
    return fxq.quantize(network().eval(), batches, target, qconfig, show_progress=False).integer, last


def _measured(row: Row, integer: Any, batch: Tensor) -> str:
    if integer is None:
        return "–"
    with tempfile.TemporaryDirectory() as folder:
        path = fxq.export_onnx(integer, Path(folder) / "model.onnx", row.style)
        try:
            report: Any = fxq.verify(integer, path, [batch], runtime=row.runtime, show_progress=False)
        except fxq.errors.ExportError as error:
            named = re.search(REFUSED, f"{error.because} {error.__cause__}")
            row.reasons[named[0] if named else str(error.because)[:160]] = None
            return "refused"
    if isinstance(report, fxq.results.DeviationReport):
        steps = max(round(output.largest) for outputs in report.outputs.values() for output in outputs)
        return f"{steps} step{'s' * (steps != 1)}"
    return "equal" if report else f"{report.mismatches} differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtimes", nargs="*", metavar="RUNTIME", help=f"of {', '.join(SHOWN)}; by default all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/guide/onnx.md")
    options = parser.parse_args()
    lines = ["| runtime | style | " + " | ".join(NETWORKS) + " |", "|---" * (2 + len(NETWORKS)) + "|"]
    print("\n".join(lines))
    notes = [""]
    for row in table(options.runtimes or list(SHOWN)):
        lines.append(row.line())
        notes += [f"- {SHOWN[row.runtime]} refuses `{row.style}` files for: {'; '.join(row.reasons)}."] if row.reasons else []
        print(row.line(), flush=True)
    print("\n".join(notes))
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join([*lines, *notes]) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
