"""How fast do integer models run in PyTorch?   python -m benchmarks.integer_speed

One row for each network, target, batch size and number of threads: milliseconds of the float model, run eagerly, and how many times
faster the integer model runs by its primitives ("reference"), and with kernels; torch.ao's int8 model in the same run, where this
PyTorch has one. Medians of warm runs taken in turn, so that what else the machine does falls on all alike, and the quickest run beside
them. Before anything is timed, the kernels' results are compared with the primitives', bit for bit, at every output and tensor. The last
column counts the operators that kernels compute: those between the boundaries, without those that only move memory. `--networks all
--targets bayes-e x86 --batches 1 --threads 1` is one row for each of them, in minutes.

--device cuda is not measured: kernels are for the CPU.
"""

import argparse
import logging
import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.real.yolo import YoloV8n
from benchmarks.shared import in_turn, table_of, torch_ao
from benchmarks.zoo.densenet import DenseNet
from benchmarks.zoo.efficientnet import EfficientNetB0
from benchmarks.zoo.life import live
from benchmarks.zoo.mobilenet import MobileNetV2, MobileNetV3Small
from benchmarks.zoo.resnet import ResNet18, ResNet50
from benchmarks.zoo.sequence import Conformer, SignalNetwork, Swin, ViT
from benchmarks.zoo.unet import UNet
from benchmarks.zoo.volume import VolumeNetwork
from fxquant.analysis.explain import operator_runs
from fxquant.support.progress import progress


class Recurrent(nn.Module):
    """An LSTM of one layer with as many units as features."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(units, units, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


IMAGE = None  # the sizes of an image, which the command line says
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "ResNet-18": (ResNet18, IMAGE),
    "MobileNetV2": (MobileNetV2, IMAGE),
    "MobileNetV3-small": (MobileNetV3Small, IMAGE),
    "EfficientNet-B0": (EfficientNetB0, IMAGE),
    "U-Net": (UNet, (3, 128, 128)),
    "YOLOv8n": (lambda: YoloV8n(80, 256), (3, 256, 256)),
    "DenseNet": (DenseNet, IMAGE),
    "ViT": (ViT, IMAGE),
    "Swin": (Swin, (3, 112, 112)),
    "Conformer": (Conformer, (100, 144)),
    "signals": (lambda: SignalNetwork(channels=64), (3, 4096)),
    "clips": (lambda: VolumeNetwork(channels=32), (3, 8, 64, 64)),
    "LSTM-64": (lambda: Recurrent(64), (20, 64)),
    "LSTM-256": (lambda: Recurrent(256), (20, 256)),
    "ResNet-50": (ResNet50, IMAGE),
}
TABLE = [name for name in NETWORKS if name != "ResNet-50"]
TARGETS = ("bayes-e", "nash-e", "x86")
COLUMNS = ("float", "reference", "kernels", "torch.ao")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["ResNet-18", "MobileNetV2"], choices=[*NETWORKS, "all"])
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    logging.getLogger("fxquant").setLevel(logging.ERROR)
    head = ("network", "target", "batch", "threads", "float", "reference", "kernels", "quickest", "torch.ao", "in kernels")
    table = table_of(*head, labels=2)
    networks = TABLE if "all" in options.networks else options.networks
    jobs = [(network, target) for network in networks for target in options.targets]
    for network, target in progress(jobs, len(jobs), "networks"):
        for row in measure(network, target, options):
            table.add_row(*row)
    Console(width=130).print(table)
    print(f"{platform.machine()}, {os.cpu_count()} processors, PyTorch {torch.__version__}; times are those of float over each")


def measure(network: str, target: str, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """The rows of a network on a target."""
    torch.manual_seed(0)
    make, fixed = NETWORKS[network]
    sizes = fixed or (3, options.size, options.size)
    model = live(make(), *sizes)
    generator = torch.Generator().manual_seed(1)
    result = fxq.quantize(model, [torch.randn(4, *sizes, generator=generator)], target=target, show_progress=False)
    reference, fused = fxq.convert(result.prepared, kernels="reference"), result.integer
    theirs = peer(model, sizes)
    rows = []
    for batch in options.batches:
        images = torch.randn(batch, *sizes, generator=generator)
        report = fxq.verify(reference, fused, [images], show_progress=False)
        assert report, str(report)
        forms: dict[str, Callable[[Tensor], Any]] = {"float": model, "reference": reference, "kernels": fused}
        if theirs is not None:
            forms["torch.ao"] = theirs
        for threads in options.threads:
            torch.set_num_threads(threads)
            assert all(map(torch.equal, leaves(fused(images)), leaves(reference(images))))
            with torch.no_grad():
                times = in_turn({name: partial(form, images) for name, form in forms.items()}, options.runs, twice=True)
            middle = {name: statistics.median(values) for name, values in times.items()}
            quickest = min(times["float"]) / min(times["kernels"])
            ratios = [f"{middle['float'] / middle[name]:.2f}" if name in middle else "–" for name in ("reference", "kernels", "torch.ao")]
            runs = [run for run in operator_runs(fused) if not run.layer.boundary and not run.moves]
            fast_runs = f"{sum(run.fast for run in runs)} of {len(runs)}"
            head = network, target, str(batch), str(threads), f"{1000 * middle['float']:.1f} ms"
            rows.append((*head, *ratios[:2], f"{quickest:.2f}", ratios[2], fast_runs))
        torch.set_num_threads(1)
    return rows


def leaves(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    return [output] if isinstance(output, Tensor) else [leaf for part in output for leaf in leaves(part)]


def peer(model: nn.Module, sizes: tuple[int, ...]) -> nn.Module | None:
    """Return torch.ao's int8 model; None where this PyTorch has none, or torch.ao does not trace or convert the network."""
    try:
        return torch_ao(model, [torch.randn(4, *sizes, generator=torch.Generator().manual_seed(1))])
    except Exception:  # of many kinds
        return None


if __name__ == "__main__":
    main()
