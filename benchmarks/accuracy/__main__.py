"""python -m benchmarks.accuracy [--task …] [--network …] [--setting …] [--mode …] [--method …] [--seeds …] [--page]."""

import argparse
import math
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown

import benchmarks.accuracy as package
from benchmarks.accuracy import environments
from benchmarks.accuracy.floats import CACHE, checkpoint, checkpoints, path_of
from benchmarks.accuracy.networks import NETWORKS
from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.rows import NOT_RUN, OURS, Result, Row, every, measure, rows
from benchmarks.accuracy.settings import MODES, SETTINGS
from benchmarks.accuracy.table import markdown
from benchmarks.accuracy.tasks import TASKS
from fxquant.support.progress import progress

PAGE = Path(__file__).parents[1] / "results" / "accuracy.md"
SEEDS = (0, 1, 2)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("task", TASKS), ("network", NETWORKS), ("setting", SETTINGS), ("mode", MODES), ("method", (OURS, *PEERS))):
        options.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices), metavar="NAME", help=", ".join(choices))
    options.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options.add_argument("--cache", type=Path, default=CACHE, help="where checkpoints, results and environments are kept")
    options.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[2])}")
    options.add_argument("--again", action="store_true", help="measure what was measured before")
    options.add_argument(
        "--minutes", type=float, help="begin nothing new after so many; what is measured is kept, and the same command goes on from there"
    )
    options.add_argument("--kept", action="store_true", help="measure nothing: show what was measured before")
    options.add_argument("--install", nargs="+", choices=list(PEERS), metavar="PEER", help="make the environments of these peers, and end")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    if options.install:
        environments.main(options.install, options.cache)
        return
    chosen = rows(options.task, options.network, options.setting, options.mode)
    needed = checkpoints(options.task, options.network, options.seeds)
    if options.kept:
        needed = [one for one in needed if path_of(*one, options.cache).exists()]
        chosen = [row for row in chosen if all((row.task, row.network, seed) in needed for seed in options.seeds)]
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    for task, network, seed in progress(needed, len(needed), "float networks"):
        if path_of(task, network, seed, options.cache).exists() or time.monotonic() < end:
            checkpoint(task, network, seed, options.cache)
    trained = {one for one in needed if path_of(*one, options.cache).exists()}
    untrained = [row for row in chosen if not all((row.task, row.network, seed) in trained for seed in options.seeds)]
    chosen = [row for row in chosen if row not in untrained]
    left_out: list[str] = [f"{' '.join(row)}: no time to train the float network" for row in untrained]

    def run(row: Row, method: str, seed: int) -> Result:
        late = time.monotonic() > end
        result = measure(row, method, seed, options.cache, again=options.again and not late, kept_only=options.kept or late)
        if late and result.reason == NOT_RUN:
            left_out.append(f"{' '.join(row)}, {method}, seed {seed}: the time was up")
        return result

    results: dict[Row, list[Result]] = {row: [] for row in chosen}
    total = len(chosen) * len(options.method) * len(options.seeds)
    for row, result in progress(every(chosen, options.method, options.seeds, run), total, "quantized networks"):
        results[row].append(result)
    text = markdown(results, options.seeds)
    if options.page:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    Console(width=200).print(Markdown(text))
    if left_out:
        print(f"left out: {len(left_out)}", *left_out, sep="\n  ")


if __name__ == "__main__":
    main()
