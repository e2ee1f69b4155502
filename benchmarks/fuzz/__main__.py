"""Does any model break the contract?   python -m benchmarks.fuzz --minutes 10

Models are drawn from fresh seeds: any mixture of operators, shapes, dtypes, configurations and targets, with training in between.
Each is compiled and held to the contract: E1 integer = ONNX, E2 VALIDATE = integer, compared as bytes, E3 TRAIN = VALIDATE, E4 no
accumulator beyond what was proved; saving, loading and copying keep the bits; what is refused is refused by an FxQuantError.

A model that fails is shrunk, and printed as a program that fails in the same way; the exit status is 1 then.
`--models 1 --seed S --target T` draws a model again. Outputs far from the float model are listed as suspicious; they are no
failure, since some functions magnify the smallest error.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fuzz.check import CHECKS, FAILED, INVALID, PASSED, REFUSED, Outcome, run
from benchmarks.fuzz.generate import TARGETS, Case, draw
from benchmarks.fuzz.shrink import shrink
from benchmarks.fuzz.spellings import BOUNDARY
from fxquant.ops import OPERATORS

SHRUNK_OF_A_KIND = 3  # failures of one check or one error that are shrunk; there can be several causes
# Functions whose result can be as far from the float model's as it likes, and what changes the model or its precision.
STEEP = {"log", "rsqrt", "reciprocal", "pow", "exp", "square", "sin", "cos", "sub", "tanhshrink", "sqrt", "batch_norm", "float"}
SUSPICIOUS = 8.0  # dB, of a model of few int8 operators on plain data


@dataclass
class Tally:
    """What was drawn, and what became of it."""

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)  # by target and kind
    operators: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by block and error
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    programs: set[str] = field(default_factory=set)
    suspicious: list[tuple[float, int, str]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # MiB, early and late

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count a case."""
        self.kinds[case.target, outcome.kind] += 1
        self.operators.update(outcome.operators)
        if outcome.kind == REFUSED:
            self.refused[outcome.like] += 1
        if outcome.kind == FAILED:
            self.failures[outcome.like] += 1
        worst = min(outcome.ratios, default=float("inf"))
        if worst < SUSPICIOUS and is_plain(case):
            self.suspicious.append((worst, case.seed, case.target))

    def merge(self, other: Tally) -> None:
        """Add another process's."""
        for name in ("kinds", "operators", "refused", "failures"):
            getattr(self, name).update(getattr(other, name))
        self.programs |= other.programs
        self.suspicious += other.suspicious
        self.memory = [max(pair) for pair in itertools.zip_longest(self.memory, other.memory, fillvalue=0)]


def is_plain(case: Case) -> bool:
    """Whether the integer model should be near the float model: few operators, none of them steep, default precision, plain data."""
    return (
        len(case.steps) <= 4
        and not case.rules
        and not any("scale" in part or "threshold" in part or "int4" in str(part) for part in vars(case.config).values())
        and all(entry.data == "torch.randn({sizes})" for entry in case.inputs)
        and all(step.spelling.operator not in STEEP and not step.options.get("odd") for step in case.steps)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw")
    parser.add_argument("--models", type=int, help="how many models at most")
    parser.add_argument("--target", choices=TARGETS, help="one target; all by default")
    parser.add_argument("--seed", type=int, help="the seed of the first model; the next ones follow")
    parser.add_argument("--without", nargs="*", default=[], choices=list(CHECKS), metavar="CHECK", help="checks that are left out")
    parser.add_argument("--processes", type=int, default=1, help="models drawn at once, each on one thread")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    targets = TARGETS if options.target is None else (options.target,)
    print(f"--seed {seed}", flush=True)
    tally = Tally()
    if options.processes <= 1:
        tally = fuzz(seed, 1, options.minutes, options.models, targets, options.without)
    else:
        models = None if options.models is None else -(-options.models // options.processes)
        with ProcessPoolExecutor(options.processes, get_context("spawn"), faulthandler.enable) as pool:
            parts = [
                pool.submit(fuzz, seed + part, options.processes, options.minutes, models, targets, options.without)
                for part in range(options.processes)
            ]
            for part in parts:
                tally.merge(part.result())
    show(tally)
    raise SystemExit(1 if tally.failures else 0)


def fuzz(seed: int, step: int, minutes: float, models: int | None, targets: tuple[str, ...], without: Collection[str] = ()) -> Tally:
    """The models of seed, seed + step, … for so long; failures are printed as they are found."""
    torch.set_num_threads(1)
    tally, deadline = Tally(), time.monotonic() + 60 * minutes
    for count in itertools.count():
        if time.monotonic() > deadline or count == models:
            break
        case = draw(seed + step * count, targets)
        case = replace(case, checks=tuple(check for check in case.checks if check not in without))
        outcome = run(case)
        tally.add(case, outcome)
        if outcome.kind == FAILED and tally.failures[outcome.like] <= SHRUNK_OF_A_KIND:
            report(case, outcome, tally)
        if count in (20, 0):
            tally.memory = [_memory()]
    tally.memory.append(_memory())
    return tally


def report(case: Case, outcome: Outcome, tally: Tally) -> None:
    """Shrink a failure and print its program, unless the same program has been printed."""
    smallest, shrunk = shrink(case, outcome)
    key = shrunk.program.replace(str(case.seed), "")
    if key in tally.programs:
        return
    tally.programs.add(key)
    lines = [
        f"==== seed {case.seed} on {case.target}: {outcome.block}: {outcome.reason}",
        f"# {len(case.steps)} operators, shrunk to {len(smallest.steps)}",
        f"# drawn again by: python -m benchmarks.fuzz --models 1 --seed {case.seed} --target {case.target}",
        *(f"# {line}" for line in shrunk.text.splitlines()[:6]),
        shrunk.program,
    ]
    print("\n".join(lines), flush=True)


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def show(tally: Tally) -> None:
    """The tables: models by target, what was refused and why, failures, operators that were never reached."""
    console = Console(width=140)
    models = Table("target", "models", PASSED, REFUSED, FAILED, title="models drawn")
    for target in [*TARGETS, "in all"]:
        counts = {
            kind: sum(n for (t, k), n in tally.kinds.items() if k == kind and target in (t, "in all")) for kind in (PASSED, REFUSED, FAILED)
        }
        if sum(counts.values()):
            models.add_row(target, str(sum(counts.values())), *map(str, counts.values()))
    console.print(models)
    for title, counted in (("refused", tally.refused), (FAILED, tally.failures)):
        if counted:
            table = Table("during", "error", "models", title=title)
            for (during, error), number in counted.most_common():
                table.add_row(during, error, str(number))
            console.print(table)
    known = [record.name for record in OPERATORS.values() if record.name not in BOUNDARY]
    reached = [name for name in known if tally.operators[name]]
    missing = ", ".join(name for name in known if name not in reached) or "none"
    console.print(f"operators that became integer: {len(reached)} of {len(known)}; not reached: {missing}")
    if tally.suspicious:
        worst = [f"{ratio:.1f} dB (seed {seed}, {target})" for ratio, seed, target in sorted(tally.suspicious)[:12]]
        console.print(f"suspicious, {len(tally.suspicious)} models far from the float model: {', '.join(worst)}")
    invalid = sum(number for (_, kind), number in tally.kinds.items() if kind == INVALID)
    console.print(f"{invalid} drawn models do not run in PyTorch and were left out; memory {' MiB, '.join(map(str, tally.memory))} MiB")


if __name__ == "__main__":
    faulthandler.enable()  # if a runtime crashes, the names of the files have the seed
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
