"""Which operators become integer, in which call form, on which target; and is anything wrong?

Each call form is a model of its own, compiled on live random input: traced with a batch of any size, prepared, calibrated, converted and
exported (where all of it is integer; --float-onnx exports the others too). It is

    integer   if every one of its nodes is, and the contract holds: prepared, integer and exported model have equal bits
    float     if some of them stay in float, with a reason each; what is integer of it has equal bits
    refused   if an error of fxquant says why it cannot be compiled
    crash     if any other error is raised
    wrong     if bits differ, or the result is far from that of the float model

Exit status 1 if there is a crash or a wrong result. Crashes, wrong results and refusals are always listed; what stays in float is
with --reasons. "of the lists" counts the spellings of operators that stand on Horizon's and PyTorch's public lists.
"""

import argparse
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from benchmarks.operators import measure, page
from benchmarks.operators.measure import CRASH, FLOAT, INTEGER, KINDS, REFUSED, WRONG, Result, Wanted, has, several, timed
from benchmarks.operators.rows import FAMILIES
from benchmarks.operators.spelling import Spelling, spelled
from benchmarks.shared import keep_row, kept_rows, table_of

TARGETS = ("bayes-e",)
PAGE = Path(__file__).parents[2] / "docs" / "OPERATORS.md"
TOGETHER = 24  # spellings that a process is given at once


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.operators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="*", default=list(TARGETS), metavar="TARGET", help="%(default)s")
    parser.add_argument("--dtype", nargs="*", default=["int8"], help="of the activations; a target that does not have one is left out")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="a regular expression that is found in 'family | operator | call form'"
    )
    parser.add_argument("--seed", action="store_true", help="only operators of the public lists")
    parser.add_argument("--list", action="store_true", help="print the spellings and try none")
    parser.add_argument("--reasons", action="store_true", help="print what stays in float, and why")
    parser.add_argument(
        "--no-onnx", dest="onnx", action="store_const", const=measure.NONE, default=measure.WHOLE, help="write no ONNX files"
    )
    parser.add_argument(
        "--float-onnx", dest="onnx", action="store_const", const=measure.ALL, help="also of spellings with float parts: seconds each"
    )
    parser.add_argument("--processes", type=int, default=1, help="that try spellings at once, each on one thread")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="a file of results, read first and written as they come")
    parser.add_argument(
        "--page",
        action="store_true",
        help=f"write {PAGE.parent.name}/{PAGE.name}: held to the contract on its first target, prepared for the others",
    )
    options = parser.parse_args()
    if options.page:
        write_page(options.processes, options.keep)
        return
    chosen = [s for s in spelled(FAMILIES) if re.search(options.only, s.name) and (s.seed or not options.seed)]
    if options.list:
        print("\n".join(spelling.name for spelling in chosen))
        return
    pairs = [(target, dtype) for target in options.target for dtype in options.dtype if dtype == "int8" or has(target, dtype)]
    by_key = {(result.name, result.target, result.dtype): result for result in read(options.keep)}
    missing = [(s, *pair) for pair in pairs for s in chosen if (s.name, *pair) not in by_key]
    for result in measured(missing, options.onnx, options.processes):
        by_key[result.name, result.target, result.dtype] = result
        keep_row(options.keep, result)
    results = [by_key[s.name, pair[0], pair[1]] for pair in pairs for s in chosen]
    for pair in pairs:
        show(chosen, [result for result in results if (result.target, result.dtype) == pair], options.reasons)
    raise SystemExit(1 if any(result.kind in (CRASH, WRONG) for result in results) else 0)


def write_page(processes: int, keep: Path | None) -> None:
    """Measure what the page needs, and write it."""
    by_key = {(result.name, result.target, result.dtype): result for result in read(keep)}
    needed = list(page.wanted())
    missing = [entry for entry in needed if (entry[0].name, *entry[1:]) not in by_key]
    proved = [entry for entry in missing if entry[1:] == page.FIRST]
    decided = [entry for entry in missing if entry[1:] != page.FIRST]
    for result in itertools.chain(measured(decided, measure.DECIDED, processes), measured(proved, measure.NONE, processes)):
        by_key[result.name, result.target, result.dtype] = result
        keep_row(keep, result)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page.text([by_key[s.name, target, dtype] for s, target, dtype in needed]), encoding="utf-8")


def measured(entries: Sequence[Wanted], onnx: str, processes: int) -> Iterator[Result]:
    """The results as they come, in order."""
    if processes <= 1:
        for spelling, target, dtype in entries:
            yield timed(spelling, target, dtype, onnx)
        return
    groups = [entries[start : start + TOGETHER] for start in range(0, len(entries), TOGETHER)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for results in pool.map(several, groups, [onnx] * len(groups)):
            yield from results


def read(path: Path | None) -> list[Result]:
    """The results a file holds; none if there is no file."""
    tuples = ("reasons", "nodes", "operators")
    return [Result(**{**fields, **{name: tuple(fields[name]) for name in tuples}}) for fields in kept_rows(path)]


# ---- showing ----------------------------------------------------------------------------------------------------------


def show(chosen: Sequence[Spelling], results: Sequence[Result], reasons: bool) -> None:
    """The table of one target and dtype, and the lists under it."""
    console = Console(width=200)
    title = f"{results[0].target}, {results[0].dtype}" if results else ""
    table = table_of("family", *KINDS, "call forms", "lowest SQNR", title=title)
    of = dict(zip((s.name for s in chosen), chosen, strict=True))
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[of[result.name].family].append(result)
    for family, members in groups.items():
        table.add_row(family, *_cells(members))
    table.add_section()
    table.add_row("all", *_cells(results))
    table.add_row("of the lists", *_cells([result for result in results if of[result.name].seed]))
    console.print(table)
    for kind in (CRASH, WRONG, REFUSED, *([FLOAT] if reasons else [])):
        for result in results:
            if result.kind == kind:
                console.print(line(result), soft_wrap=True, markup=False, highlight=False)


def _cells(results: Sequence[Result]) -> list[str]:
    kinds = Counter(result.kind for result in results)
    share = f"{kinds[INTEGER]} ({100 * kinds[INTEGER] / len(results):.0f} %)" if results else "0"
    ratios = [result.sqnr for result in results if result.kind == INTEGER]
    lowest = f"{min(ratios):.1f}" if ratios else "–"
    return [share, *(str(kinds[kind]) if kinds[kind] else "" for kind in KINDS[1:]), str(len(results)), lowest]


def line(result: Result) -> str:
    """One result that has something to say, as a line."""
    place = f" [{result.place}]" if result.place else ""
    return f"{result.kind.upper():8} {result.name}{place}: {'; '.join(result.reasons)}"


if __name__ == "__main__":
    main()
