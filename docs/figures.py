"""Hold measured figures of pages to what they rest on: python docs/figures.py [stale | measured MODULE …].

docs/figures.tsv has a row for each measured figure, and one for each table of them:

page      the page it stands on
figure    a text of that page, on one line; of a table, one of its rows; the page's heading where the command writes the page
command   how it is measured
folders   the folders and files it rests on, each with the start of its Git tree hash when it was measured
commit    the commit at which it was measured

Without an argument, print each row that is wrong, and each paragraph or table with a measured figure that no row covers.
`stale` prints the figures whose folders have changed since they were measured. Trees are compared, not commits: so the answer is the same
after a squash or a rebase, and in a clone without history.
`measured` sets the commit and the trees of all rows whose command runs this module.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = "docs/figures.tsv"
COLUMNS = ("page", "figure", "command", "folders", "commit")
PAGES = ("*.md", "docs/**/*.md", "backends/**/*.md", "benchmarks/**/*.md")
NUMBER = r"\d[\d.,–]*"
MEASURED = re.compile(
    rf"{NUMBER} (?:to {NUMBER} )?(?:%|dB|ms|MiB|MB|GB|points|minutes|hours)(?!\w)|{NUMBER} times (?!the )|{NUMBER} of \d+ |× \|"
    rf"|{NUMBER} s (?:and|for|\|)|\| \d+\.\d+(?:–\d+\.\d+)? \|(?: [^|]* \|)* \d+\.\d+ \|"
    r"|\b(?:two|three|four|five|ten|twenty|thirty) (?:to \w+ )?(?:seconds|minutes|hours)"
)
STATED = (  # figures that a page states and nobody measures: settings, limits, sizes of examples
    "99.99 %", "--minutes 10", "-- minutes", "2 GB", "at least 8 times", "gain 0.2 dB", "from 30 dB on",
    "visible from 15 dB on", "| 0.5 | 1.5 | 2.5 |", "1.6 % of the value for 3x3 and 4.3 % for 7x7",
)  # fmt: skip


class NoHistory(Exception):
    """Git cannot say what the folders hold: this is no checkout of a repository, or Git is not installed."""


class Row(NamedTuple):
    """A row of the table; each of `folders` is a path, @, and the start of its tree hash."""

    page: str
    figure: str
    command: str
    folders: tuple[str, ...]
    commit: str


def rows(root: Path) -> list[Row]:
    """Return the rows of the table, without its heading."""
    _, *lines = (root / TABLE).read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines]
    return [Row(page, figure, command, tuple(folders.split()), commit) for page, figure, command, folders, commit in cells]


def git(root: Path, *arguments: str) -> str:
    """Return what Git prints, without the last line feed. Raises NoHistory."""
    try:
        process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoHistory(str(error)) from error
    if process.returncode:
        raise NoHistory(process.stderr.strip())
    return process.stdout.strip()


def tree(root: Path, folder: str) -> str:
    """Return the start of the hash of a folder or file at HEAD. Raises NoHistory."""
    return git(root, "rev-parse", f"HEAD:{folder}")[:10]


def stale(root: Path) -> Iterator[str]:
    """Yield each figure of which a folder has changed, with the last commit that changed it, and the command. Raises NoHistory."""
    for row in rows(root):
        measured = dict(each.split("@") for each in row.folders)
        changed = [folder for folder, then in measured.items() if tree(root, folder) != then]
        if changed:
            last = [f"{folder} ({git(root, 'log', '-1', '--format=%h, %cs', '--', folder)})" for folder in changed]
            yield f"{row.page}: {row.figure}\n  measured at {row.commit}; changed since: {', '.join(last)}\n  {row.command}"


def measure(root: Path, modules: list[str]) -> Iterator[str]:
    """Set the commit and the trees of all rows of these modules to those of HEAD, and yield the rows' figures. Raises NoHistory."""
    text, commit = (root / TABLE).read_text(encoding="utf-8"), git(root, "rev-parse", "--short=10", "HEAD")
    for row in rows(root):
        if module(row.command) in modules:
            paths = [folder.partition("@")[0] for folder in row.folders]
            if changed := git(root, "status", "--porcelain", "--", *paths):
                raise NoHistory(f"commit what was measured first:\n{changed}")
            folders = " ".join(f"{path}@{tree(root, path)}" for path in paths)
            text = text.replace("\t".join((*row[:3], " ".join(row.folders), row.commit)), "\t".join((*row[:3], folders, commit)))
            yield f"{row.page}: {row.figure}"
    (root / TABLE).write_text(text, encoding="utf-8")


def module(command: str) -> str:
    """Return the module that a command runs, or the file of tests."""
    match = re.match(r"python -m (?:pytest )?([\w./]+)", command)
    return match[1] if match else ""


def parts(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph, list item and table of a page, without its programs."""
    page = re.sub(r"(?ms)^ *```.*?^ *```$", lambda match: "\n" * match[0].count("\n"), page)
    for match in re.finditer(r"(?m)^\|.*(?:\n\|.*)*|^(?!\s*$).*(?:\n(?! *(?:[-*#|]|\d+\.) |\s*$).*)*", page):
        yield page[: match.start()].count("\n") + 1, match[0]


def wrong(root: Path) -> Iterator[str]:
    """Yield what is wrong with each row, and each part of a page with a measured figure that no row covers."""
    pages = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for each in PAGES for path in sorted(root.glob(each))}
    table_rows = rows(root)
    for row in table_rows:
        place = root / module(row.command).replace(".", "/")
        if row.figure not in pages.get(row.page, ""):
            yield f"{TABLE}: {row.page} does not show {row.figure!r}: measure it again, or remove the row"
        if not any(path.is_file() for path in (place.with_suffix(".py"), place / "__main__.py", root / module(row.command))):
            yield f"{TABLE}: there is no module for {row.command!r}"
        yield from (f"{TABLE}: there is no {path}" for path, *_ in (each.split("@") for each in row.folders) if not (root / path).exists())
    for page, text in pages.items():
        figures = [row.figure for row in table_rows if row.page == page]
        for line, part in parts(text):
            prose = " ".join(re.sub("|".join(map(re.escape, STATED)), "", part).split())
            if (match := MEASURED.search(prose)) and not any(figure in part or figure.startswith("# ") for figure in figures):
                yield f"{page}:{line}: {match[0]!r} is measured, and {TABLE} has no row for it"


def main(arguments: list[str]) -> int:
    """Print what is wrong, stale or newly measured; return 1 for wrong rows, and where Git cannot say what the folders hold."""
    kind = arguments[0] if arguments else "wrong"
    try:
        lines = list(stale(ROOT) if kind == "stale" else measure(ROOT, arguments[1:]) if kind == "measured" else wrong(ROOT))
    except NoHistory as error:
        print(f"what the figures rest on is unknown: {error}", file=sys.stderr)
        return 1
    for each in lines:
        print(each)
    return int(kind == "wrong" and bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
