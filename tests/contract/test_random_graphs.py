"""Random networks: any mixture of operators and spellings, through the whole pipeline, with equal bits everywhere.

They are drawn by `benchmarks.fuzz`, which draws fresh ones when it is run by itself; here is a sample that never changes.
"""

import itertools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxquant as fxq
from benchmarks.fuzz.check import ALWAYS, CHECKS, FAILED, PASSED, REFUSED, becomes_integer, block, run
from benchmarks.fuzz.generate import TARGETS, Case, Config, draw
from benchmarks.fuzz.shrink import shrink
from benchmarks.fuzz.spellings import UNWRITTEN, unspelled
from fxquant.ops import OPERATORS
from fxquant.primitives import elementwise

pytestmark = pytest.mark.nightly

SAMPLE = range(3)  # seeds for each target; benchmarks.fuzz draws as many as it has time for
NAMES = sorted(record.name for record in OPERATORS.values() if record.name not in UNWRITTEN)


# ---- the sample ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "seed"),
    [
        pytest.param(target, seed, marks=pytest.mark.quick if seed == 0 and target in ("bernoulli2", "bayes-e", "nash-e", "x86") else ())
        for target in TARGETS
        for seed in SAMPLE
    ],
)
def test_a_random_network_holds_the_contract(target: str, seed: int) -> None:
    case = draw(TARGETS.index(target) * len(SAMPLE) + seed, (target,))
    outcome = run(case)
    assert outcome.kind in (PASSED, REFUSED), f"{outcome.block}: {outcome.reason}\n{outcome.text}\n\n{outcome.program}"


# ---- every operator ------------------------------------------------------------------------------------------------------------
def test_every_operator_of_the_table_is_written_somehow() -> None:
    assert unspelled() == []


@pytest.mark.parametrize("operator", NAMES)
def test_an_operator_that_is_asked_for_becomes_integer(operator: str) -> None:
    drawn = (draw(seed, ("nash-e",), operator, steps=steps) for steps in (1, 2) for seed in range(16))  # some are refused, or only returned
    cases = (replace(case, checks=(), rules=(), optimizer=None) for case in drawn)
    assert any(operator in becomes_integer(case) for case in cases)


# ---- findings, and how they are reported -------------------------------------------------------------------------------------------
@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negation is off by one in the integer graph, and right while training."""
    off_by_one = lambda input: -input if input.is_floating_point() else 1 - input.to(torch.int32)  # noqa: E731
    monkeypatch.setattr(elementwise.negate, "__code__", off_by_one.__code__)


def large(operator: str) -> Iterator[Case]:
    """Cases of many operators that end in another one than that they are about."""
    cases = (draw(seed, ("nash-e",), operator) for seed in itertools.count())
    fits = (case for case in cases if len(case.steps) >= 6 and case.steps[-1].spelling.operator != operator)
    return (case for case in fits if operator in becomes_integer(case))


@pytest.mark.usefixtures("defect")
def test_a_planted_defect_is_shrunk_to_a_program_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (replace(case, checks=("every_tensor_is_integer",)) for case in itertools.islice(large("neg"), 20))
    outcomes = ((case, run(case)) for case in cases)  # in some, the negation is a part of a table
    case, outcome = next((case, outcome) for case, outcome in outcomes if outcome.kind == FAILED)
    smallest, shrunk = shrink(case, outcome)
    assert (shrunk.kind, shrunk.like, len(smallest.steps)) == (FAILED, outcome.like, 1)
    assert math.prod(smallest.inputs[0].sizes) <= 2
    assert (smallest.target, smallest.config, smallest.rules, smallest.optimizer) == ("nash-e", Config(), (), None)
    assert shrunk.program.count("\n") < 30, shrunk.program
    with pytest.raises(AssertionError, match="first difference at %neg"):
        exec(shrunk.program, {})
    monkeypatch.undo()
    exec(shrunk.program, {})  # and it is the defect that it shows


def test_an_error_of_ours_refuses_and_any_other_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(draw(0), checks=())

    def raising(error: Exception) -> Any:
        def convert(*_: Any) -> None:
            raise error

        return convert

    monkeypatch.setattr(fxq, "convert", raising(fxq.errors.ScaleConflict("two scales", because="so", remedy="do")))
    assert (run(case).kind, run(case).like) == (REFUSED, ("convert", "ScaleConflict"))
    monkeypatch.setattr(fxq, "convert", raising(fxq.errors.StageViolation("a defect of a pass", because="so", remedy="none")))
    assert run(case).kind == FAILED
    monkeypatch.setattr(fxq, "convert", raising(KeyError("a name")))
    assert (run(case).kind, run(case).like) == (FAILED, ("convert", "KeyError"))
    assert run(case).program.endswith("integer = fxq.convert(prepared)\n")


def test_every_check_stands_alone_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    case = replace(draw(1, ("bayes-e",), "clamp"), checks=tuple(CHECKS), rules=(), optimizer=None)
    assert set(ALWAYS) <= set(CHECKS)
    for name in CHECKS:
        alone = run(replace(case, checks=(name,)))
        assert alone.kind in (PASSED, REFUSED), alone.text
        assert block(name)[1].endswith(f"{name}(model, prepared, integer, batches)")
    assert not list(tmp_path.iterdir())
