"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows under their head; the first `left` columns and the last are aligned to the left, all others to the right."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    written = []
    for line in lines:
        cells = [
            cell.ljust(width) if column < left or column == len(head) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        written.append("  ".join(cells).rstrip())
    return "\n".join(written)
