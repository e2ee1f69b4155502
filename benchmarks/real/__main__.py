"""python -m benchmarks.real [--networks …] [--targets …] [--settings …] [--peers …]."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown

import benchmarks.real as package
from benchmarks.accuracy.floats import CACHE
from benchmarks.real import voices
from benchmarks.real.measure import COMPARED, SETTINGS, Cell, ours, outputs_of, theirs
from benchmarks.real.networks import NETWORKS, TESTED
from benchmarks.real.table import markdown
from benchmarks.real.wheels import AbsentWheel

TARGETS = ("bayes-e", "bernoulli2", "nash-e", "x86")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("networks", tuple(NETWORKS)), ("targets", TARGETS), ("settings", ("W8A8", "W4A8"))):
        flags.add_argument(f"--{name}", nargs="+", choices=choices, default=choices, metavar="NAME", help=", ".join(choices))
    flags.add_argument("--peers", nargs="*", choices=COMPARED, default=None, metavar="NAME", help=f"all, or some of {', '.join(COMPARED)}")
    flags.add_argument(
        "--samples", type=int, default=TESTED, help=f"how many test samples (default: {TESTED}); one point of agreement needs some 432"
    )
    flags.add_argument("--cache", type=Path, default=CACHE, help="where the environments of peers are")
    return flags


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    peers = () if options.peers is None else tuple(options.peers) or COMPARED
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for name in options.networks:
        network = replace(NETWORKS[name], tested=options.samples)
        columns = (*options.targets, *peers)
        try:
            expected = outputs_of(network.load(), network.data.test_inputs)
        except AbsentWheel as error:
            rows[name, "–"] = dict.fromkeys(columns, Cell(reason=f"not installed: {error.remedy}"))
            continue
        for setting in (SETTINGS[each] for each in options.settings):
            cells = rows.setdefault((name, setting.name), {})
            for column in columns:
                measured = column in options.targets
                cell = ours(network, expected, column, setting) if measured else theirs(network, expected, column, setting, options.cache)
                cells[column] = cell
                outcome = cell.reason or f"{cell}, {cell.seconds:.0f} s"
                print(f"{name}, {setting.name}, {column}: {outcome}", file=sys.stderr, flush=True)
    Console(width=200).print(Markdown(markdown(rows, (*options.targets, *peers), voices.source())))


if __name__ == "__main__":
    main()
