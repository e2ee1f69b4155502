"""Model after model: what is drawn, what became of it, and what is printed of a failure."""

from __future__ import annotations

import itertools
import resource
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from benchmarks.fuzz.check import FAILED, REFUSED, Outcome, run
from benchmarks.fuzz.generate import Case, draw
from benchmarks.fuzz.shrink import shrink

SHRUNK_OF_A_KIND = 3  # failures of one check or one error that are shrunk; there can be several causes
# Functions whose result can be as far from the float model's as it likes, and what changes the model or its precision.
STEEP = {"log", "rsqrt", "reciprocal", "pow", "exp", "square", "sin", "cos", "sub", "tanhshrink", "sqrt", "batch_norm", "float"}
SUSPICIOUS = 8.0  # dB, of a model of few int8 operators on plain data


@dataclass
class Tally:
    """Counts of the cases that were drawn, and of their outcomes."""

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
    """Whether the integer model should be near the float model: few operators, no steep one, default precision, plain data."""
    return (
        len(case.steps) <= 4
        and not case.rules
        and not any("scale" in part or "threshold" in part or "int4" in str(part) for part in vars(case.config).values())
        and all(entry.data == "torch.randn({sizes})" for entry in case.inputs)
        and all(step.spelling.operator not in STEEP and not step.options.get("odd") for step in case.steps)
    )


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
