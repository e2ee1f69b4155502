"""Requantizations worked step by step from backends/bpu/ARITHMETIC.md, against the oracle and both paths of the primitives.

Each vector of golden/requantization.json holds every intermediate value of sections 8 and 9 of the text, so
that it can be checked by hand.
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.silicon.vectors import FOLDER, TIES, cases, computed, rebuilt
from fxquant.backends.bpu import REAL, WIDTHS
from fxquant.numerics.grids import ACTIVATION_TYPES, Ratio, fixed_requantization, real_multiplier
from fxquant.primitives.quantization import requantize_fixed, requantize_real
from tests.shared import oracle

ROOT = Path(__file__).parents[2]
VECTORS: dict[str, list[dict[str, Any]]] = json.loads((ROOT / "tests" / "golden" / "requantization.json").read_text(encoding="utf-8"))
Vector = dict[str, Any]


def every(kind: str) -> Any:
    return pytest.mark.parametrize("vector", VECTORS[kind], ids=[vector["name"] for vector in VECTORS[kind]])


def scales(vector: Vector) -> tuple[Ratio, Fraction]:
    """The ratio of the three float32 scales, for the implementation and exactly."""
    exact = [Fraction(text) for text in vector["scales"]]
    tensors = [torch.tensor(float(value), dtype=torch.float32) for value in exact]
    assert [Fraction(float(tensor)) for tensor in tensors] == exact  # each is a float32 number
    ratio = Ratio((tensors[0], tensors[1]), (tensors[2],))
    assert ratio.exact() == [Fraction(vector["m"])]
    return ratio, Fraction(vector["m"])


def accumulators(vector: Vector) -> list[Tensor]:
    """The accumulator as the integer path sees it, and as the floating one does: float32 if it is exact there."""
    value = vector["accumulator"]
    wide = torch.float64 if abs(value) >= 2**24 else torch.float32
    return [torch.tensor([value], dtype=torch.int32), torch.tensor([value], dtype=wide), torch.tensor([value], dtype=torch.float64)]


@every("fixed")
def test_fixed_vector(vector: Vector) -> None:
    ratio, m = scales(vector)
    dtype, widths = ACTIVATION_TYPES[vector["output"]], WIDTHS[vector["output"]]
    expected = vector["a"], vector["M"], vector["b"]
    oracle_widths = oracle.INT8_WIDTHS if vector["output"] == "int8" else oracle.INT16_WIDTHS
    assert oracle.fixed_parameters(m, oracle_widths, dtype.high) == expected
    fixed = fixed_requantization(ratio, widths, dtype)
    assert (int(fixed.shift), int(fixed.multiplier), int(fixed.right_shift)) == expected

    tail = widths.intermediate_bits, vector["rounding"], vector["low"], vector["high"]
    assert oracle.requantize_fixed(vector["accumulator"], *expected, *tail) == vector["result"]
    for accumulator in accumulators(vector):
        result = requantize_fixed(accumulator, fixed.shift, fixed.multiplier, fixed.right_shift, *tail, dtype.storage)
        storage = torch.float32 if accumulator.is_floating_point() else dtype.storage
        assert torch.equal(result, torch.tensor([vector["result"]], dtype=storage))
        assert result.dtype == storage


@every("real")
def test_real_vector(vector: Vector) -> None:
    ratio, m = scales(vector)
    dtype = ACTIVATION_TYPES[vector["output"]]
    assert oracle.real_multiplier(m) == Fraction(vector["multiplier"])
    multiplier = real_multiplier(ratio)
    assert multiplier.dtype == torch.float32
    assert Fraction(float(multiplier)) == Fraction(vector["multiplier"])

    bounds = vector["low"], vector["high"]
    assert oracle.requantize_real(vector["accumulator"], Fraction(vector["multiplier"]), *bounds) == vector["result"]
    for accumulator in accumulators(vector):
        result = requantize_real(accumulator, multiplier, *bounds, dtype.storage)
        storage = torch.float32 if accumulator.is_floating_point() else dtype.storage
        assert torch.equal(result, torch.tensor([vector["result"]], dtype=storage))
        assert result.dtype == storage


def test_the_text_shows_the_same_numbers() -> None:
    text = (ROOT / "backends" / "bpu" / "ARITHMETIC.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    shown = 0
    for kind, columns in (
        ("fixed", ("M", "k", "a", "b", "accumulator", "t", "product", "rounded", "result")),
        ("real", ("accumulator", "accumulator_float32", "product_float32", "rounded", "result")),
    ):
        vectors = {vector["name"]: vector for vector in VECTORS[kind]}
        for row in rows:
            if len(row) == len(columns) + 2 and row[-1] in vectors:
                vector = vectors[row[-1]]
                assert [float(cell) for cell in row[1:-1]] == [float(Fraction(vector[column])) for column in columns]
                shown += 1
    assert shown >= 15


def test_the_widths_are_those_of_the_text() -> None:
    for name, widths in (("int8", oracle.INT8_WIDTHS), ("int16", oracle.INT16_WIDTHS)):
        row = WIDTHS[name]
        assert (row.intermediate_bits, row.multiplier_bits, row.first_shift, row.largest_shift) == (
            widths.intermediate_bits, widths.multiplier_bits, widths.first_shift, widths.largest_shift,
        )  # fmt: skip
    assert REAL.add_fraction_bits == 14


# ---- what the vendor's compiled program gave; benchmarks.silicon recorded it, and the tool is not needed here --------------
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
    result = computed(rebuilt(group["rows"], group["scales"], march, dtype, scales))
    differing = {
        name: int((ours != theirs).sum())
        for name, ours, theirs in zip(group["rows"], result, recorded, strict=True)
        if not torch.equal(ours, theirs)
    }
    assert not differing, differing


def test_a_multiplier_rounded_half_to_even_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of ties tell the compiler's rounding from the one that differs in ties alone."""
    monkeypatch.setattr("fxquant.numerics.grids._nearest", lambda value, halves_up: round(value))
    (case,) = [each for each in CASES if TIES in str(each.id) and "prelu" in each.values[3]["rows"]]
    march, dtype, scales, group, recorded = case.values
    result = computed(rebuilt(group["rows"], group["scales"], march, dtype, scales))
    unequal = {name for name, ours, theirs in zip(group["rows"], result, recorded, strict=True) if not torch.equal(ours, theirs)}
    assert unequal == {"prelu"}


def test_each_march_has_vectors() -> None:
    """No file was lost: an empty folder would hold nothing to anything."""
    names = {"bayes-e-int8", "bernoulli2-int8", f"bayes-e-int8{TIES}", f"bayes-e-int16{TIES}"}
    assert {path.stem for path in FOLDER.glob("b*.npz")} >= names
