"""Do models that nobody adapted compile as they are?   python -m benchmarks.zoo [--only NAME …] [--target T] [--dtype int8|int16|mixed]

One row for each class of Hugging Face's `transformers` in `hugging_face`: random live weights, a small configuration, no edit.

    stage      how far it came: traced, prepared, calibrated, converted, validated, exported, verified
    MACs       the share of its multiply-accumulates that is integer, counted while it runs
    nodes      the share of its operators that is integer; a composite counts as one
    float      operators left in float; the reasons stand below the table
    cross      tensors that cross between float and integer inside of the model
    E1, E2     mismatching elements of the contract: ONNX file and integer graph in every runtime, integer graph and VALIDATE
    SQNR       signal to quantization noise of the worst output in dB, of weights of int8; with activations of int8, of int16, and, "mixed",
               of int16 only where branches are added and in the composites, which always are
    ideal      the same, at 8 bits, where nothing but the operands of products and of additions of branches is rounded, in float and without
               fxquant: what the network itself makes of 8 bits. A row below it by much is the compiler's, or its calibration's.
    seconds    to compile (trace, prepare, convert), and to export

It needs the extra "zoo". The exit status is 1 if a model did not compile or a bit differs.
"""

import argparse
import functools
import logging
import operator
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxquant as fxq
from benchmarks.zoo.any_life import enliven
from benchmarks.zoo.hugging_face import ENTRIES, Entry
from benchmarks.zoo.measure import Row, measure

BATCH = 4
CALIBRATION_SEEDS, TEST_SEEDS, LIFE_SEEDS = (0, 1, 2, 3), (11, 12), (21, 22)
DTYPES = ("int8", "int16", "mixed")
ADDITIONS = (operator.add, torch.add, operator.iadd, "add", "add_")  # as models spell them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ENTRIES), choices=list(ENTRIES), metavar="NAME", help="which models")
    parser.add_argument("--target", default="bayes-e")
    parser.add_argument("--dtype", default="int8", choices=DTYPES, help="of the activations")
    parser.add_argument("--no-export", action="store_true", help="leave out the ONNX file, and so E1")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    quiet()
    rows = []
    for name in options.only:
        rows.append(row(name, ENTRIES[name], options.target, options.dtype, not options.no_export))
        print(line(rows[-1]), flush=True)
    show(rows)
    raise SystemExit(0 if all(each.sound for each in rows) else 1)


def quiet() -> None:
    """Keeps what libraries say of small configurations, and fxquant of limits, out of the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for logger in ("fxquant", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)


def row(name: str, entry: Entry, target: str, dtype: str, export: bool) -> Row:
    """Measure one model."""
    try:
        model = entry.build()
        enliven(model, [entry.inputs(BATCH, seed) for seed in LIFE_SEEDS])
    except (ImportError, ValueError) as error:
        return Row(name, error=f"it cannot be built: {error}")
    calibration, test = ([entry.inputs(BATCH, seed) for seed in seeds] for seeds in (CALIBRATION_SEEDS, TEST_SEEDS))
    return measure(name, model, calibration, test, target, qconfig_of(dtype), export)


def qconfig_of(dtype: str) -> Any:
    """Activations of one dtype, or of int16 only where branches are added."""
    wide = fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int8"))
    if dtype == "mixed":
        return functools.reduce(lambda rules, spelling: rules.set_object_type(spelling, wide), ADDITIONS, fxq.QConfigMapping())
    return wide if dtype == "int16" else None


def line(row: Row) -> str:
    """A row as text, while others are measured."""
    return f"{row.name}: " + ", ".join(cells(row)[1:])


def cells(row: Row) -> list[str]:
    """The cells of a row."""
    compiling = sum(row.seconds.get(step, 0) for step in ("traced", "prepared", "converted"))
    return [
        row.name, row.stage + (" ✗" if row.error else ""), f"{row.macs:.1%}", f"{row.nodes:.1%}", str(sum(map(len, row.floats.values()))),
        str(row.crossings), "–" if row.e1 < 0 else str(row.e1), "–" if row.e2 < 0 else str(row.e2),
        f"{row.worst:.1f}", f"{row.ideal:.1f}", f"{compiling:.1f}", f"{row.seconds.get('exported', float('nan')):.1f}",
    ]  # fmt: skip


def show(rows: Iterable[Row]) -> None:
    """The table, what stopped models, and the operators left in float by reason."""
    rows = list(rows)
    table = Table("model", "stage", "MACs", "nodes", "float", "cross", "E1", "E2", "SQNR", "ideal", "compile s", "export s")
    for row in rows:
        table.add_row(*cells(row))
    console = Console(width=140)
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"{row.name}: {row.error}\n", markup=False)
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for reason, names in row.floats.items():
            reasons[reason].append(f"{row.name}: {len(names)} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    for reason, places in sorted(reasons.items(), key=lambda item: -len(item[1])):
        console.print(f"{reason}\n    " + "\n    ".join(places), markup=False)


if __name__ == "__main__":
    main()
