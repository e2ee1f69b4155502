"""Sizes that depend on the batch."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fxquant.ir.graph import BATCH_SIZES, BatchDim

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (BatchDim(), "B"),
        (BatchDim(Fraction(2)), "2B"),
        (BatchDim(Fraction(1, 2)), "B/2"),
        (BatchDim(offset=Fraction(-1)), "B-1"),
        (BatchDim(Fraction(3, 2), Fraction(4)), "3B/2+4"),
    ],
)
def test_a_size_prints_as_what_it_is_for_a_batch_of_b(size: BatchDim, text: str) -> None:
    assert str(size) == text


def test_two_sizes_determine_how_one_grows_with_the_batch() -> None:
    assert BatchDim.between(7, 7) == 7
    assert BatchDim.between(2 * BATCH_SIZES[0] + 1, 2 * BATCH_SIZES[1] + 1) == BatchDim(Fraction(2), Fraction(1))


def test_a_size_that_is_not_whole_is_an_error() -> None:
    with pytest.raises(ValueError, match="B/2 is not an integer at batch size 3"):
        BatchDim(Fraction(1, 2)).at(3)
