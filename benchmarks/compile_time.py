"""How long does compiling take?   python -m benchmarks.compile_time

Residual chains of 400 to 100,000 nodes: the seconds of trace, prepare and convert, medians of warm runs, and
torch.ao's prepare_fx and convert_fx on the same chain in the same run, up to the size where it still finishes.
The exponent is the slope of log time over log nodes.
"""

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from torch import nn

import fxquant as fxq
from benchmarks.shared import table_of, timed
from benchmarks.zoo import residual_chain
from fxquant.support.progress import progress

SIZES = (400, 800, 1_600, 10_000, 100_000)
LARGEST_FOR_TORCH_AO = 1_600  # 3,200 nodes do not finish in six minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--torch-ao-up-to", type=int, default=LARGEST_FOR_TORCH_AO)
    parser.add_argument("--runs", type=int, default=3, help="runs up to 1,600 nodes; larger chains run once")
    options = parser.parse_args()
    torch.set_num_threads(1)  # compiling is sequential; a second thread only adds noise to the small tensors in it
    compile_once(residual_chain(100))  # warm: imports and caches
    torch_ao_once(residual_chain(30))
    head = ("nodes", "trace", "prepare", "convert", "total", "torch.ao prepare", "convert", "total", "ratio")
    table = table_of(*head, labels=0)
    totals: dict[int, float] = {}
    for size in progress(options.sizes, len(options.sizes), "chains"):
        runs = options.runs if size <= 1_600 else 1
        ours = medians(partial(lambda count: compile_once(residual_chain(count)), size), runs)
        totals[size] = sum(ours)
        row = [f"{size:,}", *(f"{value:.2f} s" for value in ours), f"{totals[size]:.2f} s"]
        if size <= options.torch_ao_up_to:
            theirs = medians(partial(lambda count: torch_ao_once(residual_chain(count)), size), runs if size < 1_600 else 1)
            row += [*(f"{value:.2f} s" for value in theirs), f"{sum(theirs):.2f} s", f"{sum(theirs) / totals[size]:.1f} ×"]
        else:
            row += ["–"] * 4
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    if len(totals) > 1:
        console.print(f"exponent from {min(totals):,} to {max(totals):,} nodes: {exponent(totals):.2f}")


def medians(run: Callable[[], list[float]], runs: int) -> list[float]:
    """The median of each column over the runs."""
    return [statistics.median(column) for column in zip(*(run() for _ in range(runs)), strict=True)]


def compile_once(model: nn.Module) -> list[float]:
    """Seconds of trace, prepare and convert; calibration with one batch stands between and is not counted."""
    example = torch.randn(2, 4, 8, 8)
    traced, first = timed(lambda: fxq.trace(model, (example,)))
    prepared, second = timed(lambda: fxq.prepare(traced, (example,)))
    fxq.calibrate(prepared, [example])
    _, third = timed(lambda: fxq.convert(prepared))
    return [first, second, third]


def torch_ao_once(model: nn.Module) -> list[float]:
    """Seconds of prepare_fx (which traces) and convert_fx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        example = torch.randn(2, 4, 8, 8)
        prepared, first = timed(lambda: prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), (example,)))
        with torch.no_grad():
            prepared(example)
        _, second = timed(lambda: convert_fx(prepared))
    return [first, second]


def exponent(totals: dict[int, float]) -> float:
    """The slope of log seconds over log nodes, by least squares."""
    points = [(math.log(nodes), math.log(seconds)) for nodes, seconds in totals.items()]
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


if __name__ == "__main__":
    main()
