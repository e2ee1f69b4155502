"""Requantizations worked step by step from backends/bpu/ARITHMETIC.md, against the oracle and both paths of the primitives.

Each vector of golden/requantization.json holds every intermediate value of sections 8 and 9 of the text, so
that it can be checked by hand.
"""

from __future__ import annotations

import json
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_there_are_enough_of_each() -> None:
    assert len(VECTORS["fixed"]) >= 30
    assert len(VECTORS["real"]) >= 20
    assert {vector["rounding"] for vector in VECTORS["fixed"]} == {"half_up", "floor"}
    assert {vector["output"] for vector in VECTORS["fixed"]} == {"int8", "int16"}


@every("fixed")
def test_fixed_steps_follow_the_text(vector: Vector) -> None:
    m, bits = Fraction(vector["m"]), {"int8": 15, "int16": 21}[vector["output"]]
    first = vector["output"] == "int8"
    scaled = m * Fraction(2) ** vector["k_before"]
    assert 2 ** (bits - 1) <= scaled < 2**bits or (not first and vector["k_before"] == 47 and scaled < 2**bits)
    assert vector["M_before"] == round(scaled)
    assert (vector["M_before"] == 2**bits) == (vector["k"] == vector["k_before"] - 1)
    multiplier = 2 ** (bits - 1) if vector["M_before"] == 2**bits else vector["M_before"]
    reach = [32767 * 2**a * multiplier * Fraction(2) ** -vector["k"] >= Fraction(255, 2) for a in range(32)]
    assert vector["a"] == (reach.index(True) if True in reach else 31) * first
    wanted, most = vector["k"] - vector["a"], 31 if first else 47
    assert (vector["M"], vector["b"]) == ((2**bits - 1, 1) if wanted < 1 else (0, most) if wanted > most else (multiplier, wanted))
    assert vector["shifted"] == vector["accumulator"] // 2 ** vector["a"]
    limit = 2**15 if first else 2**31
    assert vector["t"] == max(-limit, min(limit - 1, vector["shifted"]))
    assert vector["product"] == vector["t"] * vector["M"]
    half = Fraction(1, 2) if vector["rounding"] == "half_up" else 0
    assert vector["rounded"] == floor(Fraction(vector["product"], 2 ** vector["b"]) + half)
    assert vector["result"] == max(vector["low"], min(vector["high"], vector["rounded"]))


@every("real")
def test_real_steps_follow_the_text(vector: Vector) -> None:
    multiplier, accumulator = Fraction(vector["multiplier"]), Fraction(vector["accumulator_float32"])
    for rounded, exact in (
        (multiplier, Fraction(vector["m"])),
        (accumulator, Fraction(vector["accumulator"])),
        (Fraction(vector["product_float32"]), Fraction(vector["product"])),
    ):
        number = torch.tensor(float(rounded), dtype=torch.float32)
        assert Fraction(float(number)) == rounded  # a float32 number, and no other is nearer
        distances = [abs(Fraction(float(torch.nextafter(number, torch.tensor(end)))) - exact) for end in (-torch.inf, torch.inf)]
        assert abs(rounded - exact) <= min(distances)
        if abs(rounded - exact) == min(distances):
            assert int(number.view(torch.int32)) % 2 == 0
    assert Fraction(vector["product"]) == multiplier * accumulator
    assert vector["rounded"] == round(Fraction(vector["product_float32"]))
    assert vector["result"] == max(vector["low"], min(vector["high"], vector["rounded"]))


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
