"""Does calibration's memory grow with the number of batches?   python -m benchmarks.calibration_memory

The peak of a fresh process that calibrates ResNet-18 with 4 and with 64 batches of 16 photographs, which a generator makes
one at a time, for every observer; the first row is what the process has reached before. It must not grow: a ratio above
1.05 makes the exit status 1.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

OBSERVERS = ("MovingAverageMinMaxObserver", "MinMaxObserver", "HistogramObserver", "PercentileObserver")
FEW, MANY = 4, 64
BATCH_SIZE, IMAGE_SIZE = 16, 64
MOST = 1.05
BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observers", nargs="*", default=list(OBSERVERS), choices=OBSERVERS, metavar="OBSERVER")
    parser.add_argument("--batches", nargs=2, type=int, default=[FEW, MANY], metavar=("FEW", "MANY"))
    parser.add_argument("--calibrate", nargs=2, metavar=("OBSERVER", "BATCHES"), help=argparse.SUPPRESS)  # what the fresh process does
    options = parser.parse_args()
    if options.calibrate is not None:
        print(peak_of_calibration(options.calibrate[0], int(options.calibrate[1])))
        return
    few, many = options.batches
    table = Table("observer", f"{few} batches", f"{many} batches", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("(before calibrating)", f"{in_fresh_process(OBSERVERS[0], 0) / 2**20:.0f} MiB", "", "")
    worst = 0.0
    for observer in options.observers:
        peaks = [in_fresh_process(observer, count) for count in (few, many)]
        worst = max(worst, peaks[1] / peaks[0])
        table.add_row(observer, *(f"{peak / 2**20:.0f} MiB" for peak in peaks), f"{peaks[1] / peaks[0]:.3f}")
    Console(width=100).print(table)
    raise SystemExit(0 if worst <= MOST else 1)


def in_fresh_process(observer: str, batches: int) -> int:
    """Return the peak, in bytes, of a new process; the parent process stays small, for a child begins with its parent's peak."""
    command = [sys.executable, "-m", "benchmarks.calibration_memory", "--calibrate", observer, str(batches)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_of_calibration(observer: str, count: int) -> int:
    """The peak of this process, in bytes, once it has calibrated with so many batches."""
    import torch

    import fxquant as fxq
    from benchmarks.zoo import ResNet18, initialise, photographs

    def batches() -> Iterator[Any]:
        for seed in range(count):
            yield photographs(BATCH_SIZE, IMAGE_SIZE, seed)

    torch.set_num_threads(1)
    model = ResNet18(100)
    initialise(model, 0)
    config = fxq.QConfig(fxq.ActivationConfig(observer=getattr(fxq.observers, observer)))
    prepared = fxq.prepare(model, (photographs(1, IMAGE_SIZE),), qconfig=config)
    if count:
        fxq.calibrate(prepared, batches(), show_progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES


if __name__ == "__main__":
    main()
