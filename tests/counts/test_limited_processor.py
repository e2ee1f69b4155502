"""The counts of kernels on a processor without instructions for sums of products of bytes, which this one imitates."""

from __future__ import annotations

import pytest

from tests.counts import table
from tests.counts.test_counts import compare, rows_of


@pytest.mark.nightly
@pytest.mark.skipif(not table.can_imitate(), reason="this processor cannot be limited to AVX2")
def test_counts_without_sums_of_products_of_bytes_are_those_of_the_table() -> None:
    found = table.no_dot_products()
    compare(found, rows_of(found))
