"""How long do a step of training and one of calibration take?   python -m benchmarks.training_speed

One row for each network and target: milliseconds of the float model's step of training (forward, cross entropy, backward, SGD), and how
many times as long fxquant's step and torch.ao's (prepare_qat_fx) take; the same of a step of calibration, over the float model's forward in
eval mode; and the peak of the memory that a step of training allocates, over the float model's. Medians of warm steps taken in turn, so
that what else the machine does falls on all alike; after them in brackets half the distance between the quartiles, in percent.

Before anything is timed, three steps of training are taken with fused functions and without ("bits"): outputs, scales and running
statistics have to be equal, bit for bit, at every step that starts from equal parameters. Fused gradients round elsewhere: the largest
difference over the largest gradient, of all parameters, is next to it, once with live statistics and once with frozen ones.

`--tensors` leaves out the functions in C, as on a machine without a compiler. With --device cuda everything is measured there.
"""

import argparse
import copy
import gc
import logging
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.shared import in_turn, table_of
from benchmarks.zoo.life import live
from benchmarks.zoo.mobilenet import MobileNetV2
from benchmarks.zoo.resnet import ResNet18, ResNet50
from benchmarks.zoo.sequence import ViT
from benchmarks.zoo.unet import UNet
from fxquant.support.progress import progress
from fxquant.training.fused_layers import unfused

Step = Callable[[], Any]


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-18": lambda size: ResNet18(),
    "MobileNetV2": lambda size: MobileNetV2(),
    "ViT": lambda size: ViT(size=size),
    "U-Net": lambda size: UNet(),
    "ResNet-50": lambda size: ResNet50(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["ResNet-18", "MobileNetV2", "ViT", "U-Net"], choices=list(NETWORKS))
    parser.add_argument("--targets", nargs="*", default=["bayes-e", "nash-e", "x86"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensors", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    if options.tensors:
        os.environ["FXQUANT_NATIVE"] = "0"
    logging.getLogger("fxquant").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    title = f"batch {options.batch} at {options.size}², {options.threads} threads, {options.device}"
    head = ("network", "target", "float step", "fxquant ×", "torch.ao ×", "calibration ×", "torch.ao ×", "peak ×", "bits")
    table = table_of(*head, labels=2, title=title)
    jobs = [(network, target) for network in options.networks for target in options.targets]
    for network, target in progress(jobs, len(jobs), "networks"):
        row = (network, target, *measure(network, target, options))
        print(" | ".join(row), file=sys.stderr, flush=True)  # what is measured is seen, should the rest be interrupted
        table.add_row(*row)
    Console(width=150).print(table)
    print(f"{platform.machine()}, {os.cpu_count()} processors, PyTorch {torch.__version__}")


def measure(network: str, target: str, options: argparse.Namespace) -> tuple[str, ...]:
    """The row of a network on a target."""
    torch.manual_seed(0)
    model = live(NETWORKS[network](options.size), 3, options.size, options.size).to(options.device)
    images = _images(options.batch, options.size, 1).to(options.device)
    with torch.no_grad():
        targets = _targets(model(images))
    prepared = fxq.prepare(model, (images,), target=target)
    fxq.calibrate(prepared, [images], show_progress=False)
    bits = compared(prepared, images, targets)

    forms: dict[str, nn.Module] = {"float": copy.deepcopy(model).train(), "fxquant": trained(copy.deepcopy(prepared))}
    if not options.no_peers and (theirs := torch_ao(model, images)) is not None:
        forms["torch.ao"] = theirs
    steps = {name: training_step(form, images, targets) for name, form in forms.items()}
    training = in_turn(steps, options.runs, wait=partial(_wait, options.device))
    peaks = {name: peak(steps[name], options.device) for name in ("float", "fxquant")}

    forms["float"].eval()
    fxq.set_state(prepared, "calibrate")
    forms["fxquant"] = prepared.eval()
    if "torch.ao" in forms:
        forms["torch.ao"].eval()
    calibration_steps = {name: calibration_step(form, images) for name, form in forms.items()}
    calibration = in_turn(calibration_steps, options.runs, wait=partial(_wait, options.device))
    return (
        f"{1000 * statistics.median(training['float']):.0f} ms",
        *(ratio(training, name) for name in ("fxquant", "torch.ao")),
        *(ratio(calibration, name) for name in ("fxquant", "torch.ao")),
        f"{peaks['fxquant'] / peaks['float']:.2f}",
        bits,
    )


def _images(batch: int, size: int, seed: int) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def _targets(output: Tensor) -> Tensor:
    """A class for each item, or for each of its places."""
    shape = (output.shape[0], *output.shape[2:])
    return torch.randint(output.shape[1], shape, generator=torch.Generator().manual_seed(3)).to(output.device)


def trained(prepared: nn.Module) -> nn.Module:
    """A prepared model in state TRAIN."""
    fxq.set_state(prepared, "train")
    return prepared.train()


def training_step(model: nn.Module, images: Tensor, targets: Tensor) -> Step:
    """One step of SGD, so small that the network hardly changes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()

    return step


def calibration_step(model: nn.Module, images: Tensor) -> Step:
    def step() -> None:
        with torch.no_grad():
            model(images)

    return step


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def ratio(times: dict[str, list[float]], name: str) -> str:
    """How many times as long as float, each run over the one beside it, and how far the quartiles are apart."""
    if name not in times:
        return "–"
    each = sorted(own / reference for own, reference in zip(times[name], times["float"], strict=True))
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({100 * (high - low) / 2 / middle:.0f} %)"


def peak(step: Step, device: str) -> int:
    """The most bytes of tensors that are allocated at once in a step, on top of what was there."""
    gc.collect()
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def torch_ao(model: nn.Module, images: Tensor) -> nn.Module | None:
    """torch.ao's model with fake quantization; None where this PyTorch has none, or it cannot be prepared, for a reason that is printed."""
    try:
        from torch.ao.quantization import get_default_qat_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_qat_fx
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            prepared: nn.Module = prepare_qat_fx(copy.deepcopy(model).train(), get_default_qat_qconfig_mapping("x86"), (images,))
            prepared(images)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            print(f"torch.ao: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr, flush=True)
            return None
    return prepared


def compared(prepared: nn.Module, images: Tensor, targets: Tensor) -> str:
    """Return whether fused and unfused steps have equal bits, and how far their gradients are apart."""
    apart = []
    for frozen in (False, True):
        ours, reference = (trained(copy.deepcopy(prepared)) for _ in range(2))
        if frozen:
            for form in (ours, reference):
                fxq.freeze(form)
        largest = 0.0
        for _ in range(1 if frozen else 2):
            own = _gradients(ours, images, targets)
            with unfused():
                expected = _gradients(reference, images, targets)
            assert torch.equal(own[0], expected[0]), "the outputs differ"
            for (name, one), other in zip(ours.named_buffers(), reference.buffers(), strict=True):
                assert torch.equal(one, other) or bool((one != one).all()), f"{name} differs"
            top = max(float(value.abs().max()) for value in expected[1:])
            largest = max(largest, *(float((a - b).abs().max()) / top for a, b in zip(own[1:], expected[1:], strict=True)))
        apart.append(f"{largest:.0e}")
    return f"equal; {', '.join(apart)}"


def _gradients(model: nn.Module, images: Tensor, targets: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(4)  # of dropouts
    output = model(images)
    F.cross_entropy(output, targets).backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


if __name__ == "__main__":
    main()
