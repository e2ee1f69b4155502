"""The table of counts: reading, comparing, and writing it.     python -m tests.counts.table

One row for each network, target and count. A count that depends on the machine has a row for each kind of machine; rows of other machines
stay as they are.
"""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from fxquant import backends
from fxquant.support.progress import progress
from tests.counts.measures import ANY, FEWER_ARE_BETTER, MEASURES, TARGETS, Count
from tests.counts.networks import NETWORKS

FILE = Path(__file__).with_name("table.json")
ROOT = Path(__file__).parents[2]
COMMAND = "make counts"
LISTED = 12  # names of nodes in a message


class Row(NamedTuple):
    """Where a count stands: `measure` is its group, `machine` the kind of machine; "" of a count that is the same on all."""

    network: str
    target: str
    measure: str
    count: str
    machine: str

    def __str__(self) -> str:
        machine = f" [{self.machine}]" if self.machine else ""
        return f"{self.network} on {self.target}, {self.measure}: {self.count}{machine}"


Table = dict[Row, Count]


def read() -> Table:
    """Return the table in the repository."""
    return _rows(FILE.read_text(encoding="utf-8"))


def _rows(written: str) -> Table:
    """Return the rows of a text; the names of nodes are not in it."""
    return {Row(*row["row"]): Count(row["number"], row["of"], row["parts"]) for row in json.loads(written)}


def text(table: Table) -> str:
    """Return the rows as text, sorted, one in each line."""
    rows = [
        json.dumps({"row": row, "number": count.number, "of": count.of, "parts": dict(sorted(count.parts.items()))}, ensure_ascii=False)
        for row, count in sorted(table.items(), key=lambda item: item[0])
    ]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def targets_of(measure: str) -> tuple[str, ...]:
    """Return the targets of a measure: files for the vendor's compiler are of its own."""
    return tuple(target for target in TARGETS if measure != "board's file" or backends.get(target).compiler)


def measured(network: str, target: str, measure: str) -> Table:
    """Count, here and now."""
    counts, machine = MEASURES[measure].count(network, target), MEASURES[measure].machine()
    return {Row(network, target, measure, name, machine): count for name, count in counts.items()}


# ---- comparing --------------------------------------------------------------------------------------------------------
def changes(held: Mapping[Row, Count], result: Mapping[Row, Count]) -> list[str]:
    """Return a paragraph for each count that is not the one in the table; the falls first."""
    falls, others = [], []
    for row in sorted({*held, *result}):
        before, now = held.get(row), result.get(row)
        if before is None or now is None:
            others.append(f"{row} is {'no longer counted' if now is None else 'not in the table'}: write the table again")
        elif (before.number, before.of, dict(before.parts)) != (now.number, now.of, dict(now.parts)):
            verdict = _verdict(row, before, now)
            (falls if verdict.startswith("WORSE") else others).append("\n".join([verdict, *_moved(before, now)]))
    return falls + others


def _verdict(row: Row, before: Count, now: Count) -> str:
    share, shared = (count.number if count.of is None else count.number / max(1, count.of) for count in (before, now))
    fewer = row.count in FEWER_ARE_BETTER
    if share == shared:
        return f"CHANGED  {row}: {_text(before)} before, {_text(now)} now; if that is right, write it down"
    said = f"{row} {'rose' if shared > share else 'fell'} from {_text(before)} to {_text(now)}{', and fewer are better' if fewer else ''}"
    return f"WORSE    {said}" if (shared > share) is fewer else f"BETTER   {said}: write it down, so that it stays"


def _text(count: Count) -> str:
    return f"{count.number}" if count.of is None else f"{count.number} of {count.of} ({100 * count.number / max(1, count.of):.1f} %)"


def _moved(before: Count, now: Count) -> Iterator[str]:
    """Yield a line for each kind of node whose number has changed, with the nodes of that kind now and why."""
    for kind in sorted({*before.parts, *now.parts}):
        numbers = before.parts.get(kind, 0), now.parts.get(kind, 0)
        if numbers[0] != numbers[1]:
            names = [name for name in now.nodes.get(kind, ()) if name]
            shown = [name for name in names if name != kind]
            more = f" and {len(shown) - LISTED} more" if len(shown) > LISTED else ""
            listed = ", ".join(f"%{name}" for name in shown[:LISTED]) + more
            apart = "" if now.of is None else ", not among them"
            yield f"           {kind}{apart}: {numbers[0]} before, {numbers[1]} now" + (f": {listed}" if listed else "")
            yield from (f"             %{name}: {now.why[name]}" for name in names[:LISTED] if name in now.why)


# ---- writing ----------------------------------------------------------------------------------------------------------
def written(before: Mapping[Row, Count]) -> Table:
    """Return the table as it is to be written: everything that this machine can count, and the rows of other machines."""
    jobs = [(network, target) for network in NETWORKS for target in TARGETS]
    table: Table = {}
    for network, target in progress(jobs, len(jobs), "counting"):
        for measure in (each for each in MEASURES if target in targets_of(each)):
            table |= measured(network, target, measure)
    columns = {(row.measure, row.machine) for row in table}
    counts = {row._replace(machine=ANY) for row in table}
    kept = {row: count for row, count in before.items() if (row.measure, row.machine) not in columns}
    return table | {row: count for row, count in kept.items() if row._replace(machine=ANY) in counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.getLogger("fxquant").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    before = read() if FILE.exists() else {}
    table = written(before)
    FILE.write_text(text(table), encoding="utf-8")
    print("\n".join(changes(before, table)) or "nothing has changed")


if __name__ == "__main__":
    main()
