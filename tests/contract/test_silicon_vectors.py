"""The integer graph, derived anew from weights and scales, gives the integers that the vendor's compiled program gave.

benchmarks.silicon recorded them; the tool is not needed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.silicon.__main__ import main
from benchmarks.silicon.vectors import FOLDER, TIES, cases, computed, rebuilt

CASES = [
    pytest.param(march, dtype, about["scales"], group, recorded, id=f"{path.stem}-{index}")
    for path in sorted(FOLDER.glob("b*-int*.npz"))
    for march, dtype in [path.stem.removesuffix(TIES).rsplit("-", 1)]
    for index, (about, group, recorded) in enumerate(cases(path))
]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("march", "dtype", "scales", "group", "recorded"), CASES)
def test_the_integer_graph_gives_what_the_compiled_program_gave(
    march: str, dtype: str, scales: str, group: dict[str, Any], recorded: list[Tensor]
) -> None:
    """Every operator of the group, by name."""
    found = computed(rebuilt(group["rows"], group["scales"], march, dtype, scales))
    differing = {
        name: int((ours != theirs).sum())
        for name, ours, theirs in zip(group["rows"], found, recorded, strict=True)
        if not torch.equal(ours, theirs)
    }
    assert not differing, differing


def test_a_multiplier_rounded_half_to_even_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of ties tell the compiler's rounding from the one that differs in ties alone."""
    monkeypatch.setattr("fxquant.numerics.grids._nearest", lambda value, halves_up: round(value))
    (case,) = [each for each in CASES if TIES in str(each.id) and "prelu" in each.values[3]["rows"]]
    march, dtype, scales, group, recorded = case.values
    found = computed(rebuilt(group["rows"], group["scales"], march, dtype, scales))
    unequal = {name for name, ours, theirs in zip(group["rows"], found, recorded, strict=True) if not torch.equal(ours, theirs)}
    assert unequal == {"prelu"}


def test_each_march_has_vectors() -> None:
    """No file was lost: an empty folder would hold nothing to anything."""
    assert {path.stem for path in FOLDER.glob("b*.npz")} >= {"bayes-e-int8", "bernoulli2-int8", f"bayes-e-int8{TIES}"}


def test_without_the_tool_the_benchmark_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that is named holds no programs."""
    monkeypatch.setenv("FXQUANT_HORIZON", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["benchmarks.silicon", "--operators"])
    with pytest.raises(SystemExit, match="make vendor"):
        main()
