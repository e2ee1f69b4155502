"""Counts hold speed and fusions: kernels, fusions, nodes of files, operators beside the chip.

The numbers stand in table.json; `make counts` writes it again. Nothing here depends on time, and a slow path of equal bits is seen.
"""

from collections.abc import Collection

import pytest

from tests.counts import table
from tests.counts.measures import FEWER_ARE_BETTER, MEASURES, TARGETS, Count
from tests.counts.networks import NETWORKS
from tests.counts.table import COMMAND, Row, Table

ROWS = table.read()


def compare(result: Table, held: Table) -> None:
    """Fail with a paragraph for each count that is not that of the table; skip, with the reason, where the table has no such machine."""
    column = column_of(result)
    if column not in {(row.measure, row.machine) for row in ROWS}:
        pytest.skip(f"the table has no counts of {column[0]} for this machine, {column[1]}: {COMMAND} adds them")
    changed = table.changes(held, result)
    if changed:
        end = f"Worse numbers have a cause to be found. A number that is right is kept by: {COMMAND}"
        pytest.fail("\n".join(["counts differ from tests/counts/table.json", *changed, end]), pytrace=False)


def column_of(result: Table) -> tuple[str, str]:
    """Return the measure and the machine of rows."""
    (column,) = {(row.measure, row.machine) for row in result}
    return column


def rows_of(result: Table, network: str | None = None, target: str | None = None) -> Table:
    """Return the rows of the table of the measure and machine of `result`, of a network and a target."""
    column = column_of(result)
    return {
        row: count
        for row, count in ROWS.items()
        if (row.measure, row.machine) == column and network in (None, row.network) and target in (None, row.target)
    }


# Each network has one target in `make test`, and all of them in the nightly lane.
FURTHER = {(network, target) for index, network in enumerate(NETWORKS) for target in TARGETS if target != TARGETS[index % len(TARGETS)]}
PLACES = [(measure, network, target) for measure in MEASURES for network in NETWORKS for target in table.targets_of(measure)]


def rows_of_each(chosen: Collection[str]) -> pytest.MarkDecorator:
    cases = [pytest.param(*place, marks=pytest.mark.nightly if place[1:] in FURTHER else ()) for place in PLACES if place[0] in chosen]
    return pytest.mark.parametrize(("measure", "network", "target"), cases)


@rows_of_each(MEASURES)
def test_counts_are_those_of_the_table(measure: str, network: str, target: str) -> None:
    result = table.measured(network, target, measure)
    compare(result, rows_of(result, network, target))


def test_the_table_is_of_these_networks_and_is_sorted() -> None:
    assert {(row.measure, row.network, row.target) for row in ROWS} == set(PLACES)
    assert {row.count for row in ROWS} >= FEWER_ARE_BETTER
    assert table.FILE.read_text(encoding="utf-8") == table.text(ROWS)


# ---- messages ---------------------------------------------------------------------------------------------------------
KERNELS = Row("U-Net", "bayes-e", "integer kernels", "primitives in kernels", "C")


def messages(row: Row, before: Count, now: Count) -> list[str]:
    return table.changes({row: before}, {row: now})


def test_a_fall_names_the_row_the_numbers_the_nodes_and_the_reasons() -> None:
    now = Count(8, 10, {"convolution": 2}, {"convolution": ["a", "b"]}, {"b": "it differs"})
    (message,) = messages(KERNELS, Count(9, 10, {"convolution": 1}), now)
    assert message.splitlines() == [
        "WORSE    U-Net on bayes-e, integer kernels: primitives in kernels [C] fell from 9 of 10 (90.0 %) to 8 of 10 (80.0 %)",
        "           convolution, not among them: 1 before, 2 now: %a, %b",
        "             %b: it differs",
    ]
