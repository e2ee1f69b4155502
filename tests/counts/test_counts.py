"""What can be counted is held by a count: kernels, fusions, nodes of files, operators beside the chip.

The numbers stand in table.json; `make counts` writes it again. Nothing here depends on time, and a slow path of equal bits is seen.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.counts import measures, table
from tests.counts.measures import ANY, FEWER_ARE_BETTER, MEASURES, TARGETS, Count
from tests.counts.networks import NETWORKS
from tests.counts.table import COMMAND, DEPENDENT, Row, Table

ROWS = table.read()


def compare(found: Table, held: Table) -> None:
    """Fail with a paragraph for each count that is not that of the table; skip, with the reason, where the table has no such machine."""
    column = column_of(found)
    if column not in {(row.measure, row.machine) for row in ROWS}:
        pytest.skip(f"the table has no counts of {column[0]} for this machine, {column[1]}: {COMMAND} adds them")
    changed = table.changes(held, found)
    if changed:
        end = f"Worse numbers have a cause to be found. A number that is right is written down by: {COMMAND}"
        pytest.fail("\n".join(["counts differ from tests/counts/table.json", *changed, end]), pytrace=False)


def column_of(found: Table) -> tuple[str, str]:
    """Return the measure and the machine of rows."""
    (column,) = {(row.measure, row.machine) for row in found}
    return column


def rows_of(found: Table, network: str | None = None, target: str | None = None) -> Table:
    """Return the rows of the table that are of the same measure and machine as these, of a network and a target."""
    column = column_of(found)
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
    found = table.measured(network, target, measure)
    compare(found, rows_of(found, network, target))


@rows_of_each(DEPENDENT)
def test_counts_without_a_compiler_are_those_of_the_table(measure: str, network: str, target: str) -> None:
    measures.compiled(network, target)  # by the kernels of a machine with a compiler, as when the table is written
    with table.no_compiler():
        found = table.measured(network, target, measure)
    compare(found, rows_of(found, network, target))


def test_the_table_is_of_these_networks_and_is_sorted() -> None:
    assert {(row.measure, row.network, row.target) for row in ROWS} == set(PLACES)
    assert {row.count for row in ROWS} >= FEWER_ARE_BETTER
    assert table.FILE.read_text(encoding="utf-8") == table.text(ROWS)


# ---- messages ---------------------------------------------------------------------------------------------------------

KERNELS = Row("U-Net", "bayes-e", "integer kernels", "primitives in kernels", "C")
NODES = Row("U-Net", "bayes-e", "passes", "requantize nodes", ANY)


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


def test_a_rise_is_to_be_written_down() -> None:
    (message,) = messages(KERNELS, Count(8, 10, {"convolution": 2}), Count(10, 10))
    assert message.startswith("BETTER ")
    assert "rose from 8 of 10 (80.0 %) to 10 of 10 (100.0 %): write it down" in message
    assert "convolution, not among them: 2 before, 0 now" in message


@pytest.mark.parametrize(("before", "now", "verdict"), [(1, 3, "WORSE "), (3, 1, "BETTER ")])
def test_fewer_nodes_are_better(before: int, now: int, verdict: str) -> None:
    (message,) = messages(NODES, Count(before, None, {"requantize": before}), Count(now, None, {"requantize": now}))
    assert message.startswith(verdict)
    assert f"{'rose' if now > before else 'fell'} from {before} to {now}, and fewer are better" in message


def test_equal_numbers_of_other_nodes_are_a_change() -> None:
    (message,) = messages(KERNELS, Count(9, 10, {"convolution": 1}), Count(9, 10, {"linear": 1}, {"linear": ["fc"]}))
    assert message.splitlines()[1:] == [
        "           convolution, not among them: 1 before, 0 now",
        "           linear, not among them: 0 before, 1 now: %fc",
    ]
    assert messages(KERNELS, Count(9, 10), Count(9, 10)) == []


def test_a_machine_that_the_table_does_not_have_is_said() -> None:
    found = {KERNELS._replace(machine="another"): Count(1, 1)}
    with pytest.raises(pytest.skip.Exception, match=r"no counts of integer kernels for this machine, another: make counts adds them"):
        compare(found, rows_of(found))


def test_rows_of_other_machines_stay_when_the_table_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = KERNELS._replace(network="ResNet"), KERNELS._replace(network="ResNet", machine="another")
    gone = other._replace(network="a network that is gone")
    monkeypatch.setattr(table, "measured", lambda network, target, measure: {own: Count(2, 2)})
    monkeypatch.setattr(table, "can_imitate", lambda: False)
    assert table.written({own: Count(1, 2), other: Count(1, 2), gone: Count(1, 2)}) == {own: Count(2, 2), other: Count(1, 2)}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx2 avx512_vnni avx_vnni", measures.VNNI),
        ("fpu avx2 avx_vnni", measures.AVX_VNNI),
        ("fpu avx2", measures.AVX2),
        ("fpu sse2", "x86_64 of Linux"),
    ],
)
def test_instructions_are_those_of_the_processor(flags: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures.Path, "read_text", lambda *_, **__: f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(measures.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(measures.platform, "system", lambda: "Linux")
    assert measures.instructions() == name
