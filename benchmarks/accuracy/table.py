"""The table: a line for each row, fxquant beside the best peer, and who wins."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.rows import NOT_RUN, OURS, Result, Row
from benchmarks.accuracy.settings import MODES, SETTINGS
from benchmarks.accuracy.tasks import TASKS

WON, TIED, LOST = "won", "tied", "lost"
EXACT = 1e-9  # of a score: what is nearer than this is equal
Found = Mapping[Row, Sequence[Result]]


@dataclass(frozen=True)
class Summary:
    """A method's results over all seeds of a row: means, and the standard deviation of the drop, 0 for one seed."""

    method: str
    unquantized: float
    score: float
    spread: float
    sqnr: float

    @property
    def drop(self) -> float:
        return self.unquantized - self.score

    def __str__(self) -> str:
        return f"{self.score:.2f}" + (f" ± {self.spread:.2f}" if self.spread else "")


def summary(results: Sequence[Result], method: str) -> Summary | str:
    """The method's summary, or the reason why some seed has no result."""
    own = [result for result in results if result.method == method]
    if not own:
        return NOT_RUN
    for result in own:
        if result.reason:
            return result.reason
    drops = [result.drop for result in own]
    return Summary(
        method,
        statistics.fmean(result.unquantized for result in own),
        statistics.fmean(result.score for result in own),
        statistics.stdev(drops) if len(drops) > 1 else 0.0,
        statistics.fmean(result.sqnr for result in own),
    )


def best_peer(results: Sequence[Result]) -> Summary | None:
    """The peer with the smallest mean drop; of equal ones the one with the larger SQNR."""
    names = dict.fromkeys(result.method for result in results if result.method != OURS)
    peers = [each for name in names if isinstance(each := summary(results, name), Summary)]
    return min(peers, key=lambda peer: (peer.drop, -peer.sqnr), default=None)


def verdict(ours: Summary, best: Summary | None) -> str:
    """Won where the drop is smaller than the best peer's by more than the spread of the smaller one; tied within it."""
    if best is None:
        return "alone"
    spread = max((ours if ours.drop < best.drop else best).spread, EXACT)
    if abs(ours.drop - best.drop) <= spread:
        return TIED
    return WON if ours.drop < best.drop else LOST


def markdown(by_row: Found, seeds: Sequence[int]) -> str:
    """The whole page: a count, a section for each mode and setting, the reasons."""
    sections = []
    counts: dict[str, int] = {}
    for mode in dict.fromkeys(row.mode for row in by_row):
        for setting in dict.fromkeys(row.setting for row in by_row if row.mode == mode):
            lines = {row: results for row, results in by_row.items() if (row.mode, row.setting) == (mode, setting)}
            sections.append(_section(mode, setting, lines, counts))
    totals = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    single = " One seed has no spread: differences of a hundredth are noise." if len(seeds) == 1 else ""
    return f"{HEAD}\nSeeds: {', '.join(map(str, seeds))}.{single} fxquant's rows: {totals or 'none'}.\n\n" + "\n".join(sections)


HEAD = """# Accuracy

Written by `python -m benchmarks.accuracy --page`. Every method starts from the same float checkpoint and the same 64 calibration
samples; what trains sees the same batches in the same order with the same optimizer. Scores are percent right, or dB of PSNR; SQNR, in
dB, is that of the outputs against float's. A mean over several seeds stands with the standard deviation of the drop. *Won*: the drop is
smaller than the best peer's by more than the spread of the smaller one; *tied*: within it. fxquant's outputs are those of the integer
model, equal to the prepared model's in every bit, which each run asserts. A peer that has no integer kernels for a row is simulated by its
own fake quantization; PT2E quantizes what layers read, and leaves the sums of shortcuts in float.
"""


def _section(mode: str, setting: str, lines: Found, counts: dict[str, int]) -> str:
    peers = list(dict.fromkeys(result.method for results in lines.values() for result in results if result.method != OURS))
    peers = [name for name in peers if any(isinstance(summary(results, name), Summary) for results in lines.values())]
    head = ["task", "network", "float", OURS, "SQNR", "best peer", "SQNR", "", *peers]
    text = [f"## {setting}, {mode}", "", f"fxquant for {SETTINGS[setting].target}. {MODES[mode][:1].upper()}{MODES[mode][1:]}.", ""]
    text += ["| " + " | ".join(head) + " |", "|" + "|".join(["---", "---", *["---:"] * (len(head) - 2)]) + "|"]
    reasons: dict[str, dict[str, list[str]]] = {}
    for row, results in lines.items():
        if all(result.reason for result in results):
            continue
        ours, best = summary(results, OURS), best_peer(results)
        word = ""
        if isinstance(ours, Summary):
            word = verdict(ours, best)
            counts[word] = counts.get(word, 0) + 1
        unquantized = next(each.unquantized for each in (ours, best) if isinstance(each, Summary))
        cells = [f"{row.task}, {TASKS[row.task].unit}", row.network, f"{unquantized:.2f}", *_cells(ours)]
        cells += [f"{best} ({best.method})", f"{best.sqnr:.1f}"] if best else ["–", "–"]
        cells += [f"**{word}**" if word == LOST else word, *(_cells(summary(results, name))[0] for name in peers)]
        text.append("| " + " | ".join(cells) + " |")
        for name in dict.fromkeys(result.method for result in results):
            reason = summary(results, name)
            if isinstance(reason, str):
                reasons.setdefault(name, {}).setdefault(reason, []).append(f"{row.task} {row.network}")
    text.append("")
    for name, own in reasons.items():
        for reason, places in own.items():
            where = "" if len(places) == len(lines) else f" ({', '.join(places)})"
            text.append(f"- {name}: {reason}{where}")
    return "\n".join([*text, ""])


def _cells(cell: Summary | str) -> list[str]:
    return ["–", "–"] if isinstance(cell, str) else [str(cell), f"{cell.sqnr:.1f}"]
