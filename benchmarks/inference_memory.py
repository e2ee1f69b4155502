"""How much memory does a run of an integer model take?   python -m benchmarks.inference_memory

One row for each network: MiB that a run of 8 inputs, images of 224² or the network's own, needs at most beyond the model itself, with what
is kept from run to run. The columns are the float model, run eagerly, and the integer model of each target. Each is measured in a fresh
process that does nothing but load the model and run it some times, on one thread. The peak is that of the resident memory, which Linux
resets on demand.
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import fxquant as fxq
from benchmarks.integer_speed import NETWORKS, live
from benchmarks.shared import table_of
from fxquant.support.progress import progress

TARGETS = ("bayes-e", "nash-e", "x86")
SIZE, IMAGES = 224, 8
WARM = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["ResNet-18", "MobileNetV2"], choices=list(NETWORKS))
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run:
        print(peak_of_run(*options.run))
        return
    table = table_of("network", "float", *options.targets)
    jobs = [(network, form) for network in options.networks for form in ("float", *options.targets)]
    peaks = {job: in_fresh_process(*job) for job in progress(jobs, len(jobs), "networks")}
    for network in options.networks:
        whole = peaks[network, "float"]
        shares = [f"{peaks[network, target] / 2**20:.0f} MiB, {peaks[network, target] / whole:.2f}" for target in options.targets]
        table.add_row(network, f"{whole / 2**20:.0f} MiB", *shares)
    Console(width=110).print(table)


def in_fresh_process(network: str, form: str) -> int:
    """The peak, in bytes, of a process that has not made the model itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        torch.manual_seed(0)
        model = live(NETWORKS[network][0](), *sizes_of(network))
        if form == "float":
            torch.save(model.state_dict(), path)
        else:
            path = fxq.save(fxq.quantize(model, [torch.randn(4, *sizes_of(network))], target=form, show_progress=False).integer, path)
        command = [sys.executable, "-m", "benchmarks.inference_memory", "--run", network, form, str(path)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def sizes_of(network: str) -> tuple[int, ...]:
    """Return the sizes of one input of a network."""
    return NETWORKS[network][1] or (3, SIZE, SIZE)


def peak_of_run(network: str, form: str, path: str) -> int:
    """The peak of a run beyond what is resident when the model was loaded, with all that it keeps from one run to the next, in bytes."""
    model: nn.Module = NETWORKS[network][0]() if form == "float" else fxq.load(path)
    if form == "float":
        model.load_state_dict(torch.load(path))
        model.eval()
    images = torch.randn(IMAGES, *sizes_of(network))
    trim()
    loaded = resident("VmRSS")
    with torch.no_grad():
        for _ in range(WARM):  # the first run is of the primitives, the second makes the kernels and proves them
            model(images)
        trim()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        model(images)
    return resident("VmHWM") - loaded


def trim() -> None:
    """Give freed memory back, so that it is not resident."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident(name: str) -> int:
    """A figure of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
