"""The limits of each march on an operator's parameters, as far as Horizon's public documents state them, and its chip's peak rates.

Sources: the operator lists of the RDK X3 (Bernoulli2) and RDK Ultra (Bayes) user guides, and the lists of the conversion tool for the same
chips where they state more. For Nash: the constraints that its export publishes. Where the documents give two different values, the
looser one is used, and the note of the row gives the other. The rows are those of limits.tsv, in the order in which they are reported.

A composite is checked against the limits of its parts, not against limits published for the composite as a whole.
A softmax, for example, accepts any rank and axis that its parts accept.

A limit that is missing here is unknown. For Bernoulli no limits are published. For Bayes-e the limits of Bayes are used, since no others
are published. For Nash the published tables give dtypes, and few sizes.
"""

import csv
from ast import literal_eval
from fractions import Fraction
from pathlib import Path
from typing import Any

from fxquant.target import Limit, Roofline


def _rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a file of this folder, by the names of its columns."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _limits(march: str) -> tuple[Limit, ...]:
    """Return the rows of limits.tsv of a march; a row without a measure says that the march has no such operator."""
    rows = [row for row in _rows("limits.tsv") if march in row["marches"].split()]
    return tuple(
        Limit(
            tuple(row["operators"].split()), row["measure"] or None, _number(row["low"]), _number(row["high"]),
            literal_eval(row["among"]) if row["among"] else None, row["remedy"], row["allows"], bool(row["always"]),
        )
        for row in rows
    )  # fmt: skip


def _number(text: str) -> Any:
    return None if not text else Fraction(text) if "/" in text else int(text)


BERNOULLI2, BAYES, NASH = map(_limits, ("bernoulli2", "bayes", "nash"))


def _peak(row: dict[str, str]) -> Roofline:
    """Return the rates of a chip: a published TOPS counts a multiply-accumulate as two operations, a transfer moves `bits` of memory."""
    rates = float(row["TOPS"]) * 1e12 / 2, int(row["bits"]) / 8 * int(row["megatransfers"]) * 1e6
    return Roofline(*rates, row["source"], row["memory"] == "assumed")


# Where only the kind of a memory is published, its width is assumed from chips of the same class. No source says what fraction of the peak
# a program reaches.
PEAKS = {row["march"]: _peak(row) for row in _rows("peaks.tsv")}

# What Nash-p and Nash-h compute in float16: every operator in the table of Horizon's export that has no integer form, except sums of
# products. No tensor is transferred to the host; the values are not covered by the integer contract: float32 computes them here.
FLOAT16 = frozenset(row["operator"] for row in _rows("float16.tsv"))
