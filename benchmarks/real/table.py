"""The table: a line for each network and setting, a column for each target and peer."""

from collections.abc import Mapping, Sequence

from benchmarks.real.measure import Cell

Rows = Mapping[tuple[str, str], Mapping[str, Cell]]  # by network and setting: a cell for each column


def markdown(rows: Rows, columns: Sequence[str], voices: str) -> str:
    """Return the table as Markdown, with the reason for each cell that is empty."""
    lines = ["| " + " | ".join(["network", "setting", *columns]) + " |", "|---|---|" + "---:|" * len(columns)]
    reasons: dict[str, list[str]] = {}
    for (network, setting), cells in rows.items():
        lines.append("| " + " | ".join([network, setting, *(str(cells[name]) for name in columns)]) + " |")
        for name, cell in cells.items():
            if cell.reason:
                reasons.setdefault(f"{name}: {cell.reason}", []).append(f"{network} {setting}")
    text = [*lines, "", f"Voices are those of {voices}.", ""]
    return "\n".join(text + [f"- {reason} ({', '.join(where)})" for reason, where in reasons.items()])
