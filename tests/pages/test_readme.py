"""Documents are true: their code runs and prints the text shown there, and their diffs apply.

README.md and docs/guide: the ```python blocks of a page run in order in one namespace; a ```text block right after one is what it
prints, in words and integers. Decimal fractions are near; a line of … means any lines, and … in a line any text.
CONTRIBUTING.md: its ```diff blocks are applied to a copy of the repository, and its ```python blocks run in that copy.
"""

import contextlib
import io
import random
import re
import runpy
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operators import page
from benchmarks.operators.__main__ import PAGE
from benchmarks.operators.measure import NONE, has, measure
from benchmarks.operators.rows import FAMILIES
from benchmarks.operators.spelling import Spelling
from fxquant.ops import BY_NAME, FUNCTIONS, METHODS, MODULES, OPERATORS
from fxquant.ops.elementwise.table import UNARY

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
PLACES = (".", "docs", "docs/guide", "backends/bpu")  # of pages
CODE = ("fxquant", "passes", "backends", "tests", "benchmarks", "docs", "pyproject.toml")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document: its language, its text, the line it begins at, and whether it follows the block before at once."""

    language: str
    text: str
    line: int
    follows: bool


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    pieces, end = [], 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL):
        follows = bool(pieces) and document[end : match.start()].strip() == ""
        pieces.append(Block(match[1], match[2], document[: match.start()].count("\n") + 2, follows))
        end = match.end()
    return pieces


DECIMAL = re.compile(r"(?<![\d.])\d[\d,]*(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?!\d|\.\d)")


def lines(text: str) -> list[str]:
    """Return the lines, each run of blanks and rules as one blank; hashes of tensors, which hold the last bits of scales, are masked."""
    text = re.sub(r"#[0-9a-f]{8}\b", "#hash", text)
    return [line for line in (re.sub(r"[\s─━]+", " ", line).strip() for line in text.splitlines()) if line]


def pattern(line: str) -> str:
    """Return the regular expression of a line on a page: each decimal fraction is a group, and … inside of the line is any text."""
    if line == "…":
        return r"(?:.*\n)*"
    return "(.+?)".join(re.escape(part).replace("…", ".*") for part in DECIMAL.split(line)) + r"\n"


def near(shown: str, printed: str) -> bool:
    """Return whether two decimal fractions agree to 1 %, or to the last digit that is shown.

    The float kernels of a processor decide the last bits of scales, and what training makes of them. Integers are equal.
    """
    unit = Decimal((0, (1,), int(Decimal(shown).as_tuple().exponent)))
    return abs(Decimal(shown) - Decimal(printed)) <= max(unit, Decimal(shown) / 100)


def prints(shown: str, printed: str) -> bool:
    """Return whether the text on a page is what was printed, in words and integers; decimals are near, and … stands for anything."""
    expected = lines(shown)
    match = re.fullmatch("".join(map(pattern, expected)), "".join(line + "\n" for line in lines(printed)))
    decimals = [each for line in expected for each in DECIMAL.findall(line)]
    return match is not None and all(
        DECIMAL.fullmatch(one) is not None and near(each.replace(",", ""), one.replace(",", ""))
        for each, one in zip(decimals, match.groups(), strict=True)
    )


@pytest.fixture
def _own_operators() -> Iterator[None]:
    """The operators that a page declares are unknown to the tests after it."""
    tables: tuple[dict[Any, Any], ...] = (OPERATORS, BY_NAME, FUNCTIONS, METHODS, MODULES, UNARY)
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


PAGES = sorted(page.stem for page in GUIDE.glob("*.md") if page.name != "README.md")
# Outputs that a page shows; others show 3.
COMPARED = dict.fromkeys(("README", "four-bits", "outputs", "python"), 2) | dict.fromkeys(("board", "dynamic", "sizes", "train", "yolo"), 1)
OLD_AND_NEW = ("from-torch-ao", "from-horizon")  # tests/compat/test_guides.py runs their programs

GIVEN: dict[str, Any] = {}  # names that a page has before its first block: in README.md the reader's own model and batches


def run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Run the programs of a page, and return how many blocks ran and how many outputs were as shown."""
    document = blocks(page.read_text(encoding="utf-8"))
    code = [block for block in document if block.language == "python"]
    file = folder / "example.py"  # so that source lines in the outputs are those of one file a reader would have
    file.write_text("\n".join(block.text for block in code), encoding="utf-8")
    module = types.ModuleType("example")
    vars(module).update(GIVEN)
    monkeypatch.setitem(sys.modules, "example", module)  # PyTorch's compiler imports the module of a function
    offset, printed, compared = 0, "", 0
    for block in document:
        if block.language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * offset + block.text, str(file), "exec"), vars(module))
            offset += block.text.count("\n") + 1
            printed = output.getvalue()
        elif block.language == "text" and block.follows:
            assert prints(block.text, printed), f"{page}, line {block.line} shows\n{block.text}\nand what is printed is\n{printed}"
            compared += 1
    return len(code), compared


LONG = {"four-bits": pytest.mark.nightly}  # a page that trains


@pytest.mark.sweep(3)
@pytest.mark.usefixtures("_own_operators")
@pytest.mark.parametrize("name", ["README", *(pytest.param(page, marks=LONG.get(page, ())) for page in PAGES if page not in OLD_AND_NEW)])
def test_the_code_of_a_page_runs_and_prints_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "README":
        monkeypatch.setitem(GIVEN, "model", (steps := runpy.run_path(str(ROOT / "examples" / "first_steps.py")))["model"])
        monkeypatch.setitem(GIVEN, "batches", steps["batches"])
    ran, compared = run(ROOT / "README.md" if name == "README" else GUIDE / f"{name}.md", tmp_path, monkeypatch)
    assert ran >= 1
    assert compared >= COMPARED.get(name, 3)


def test_the_guide_lists_every_page_once() -> None:
    linked = re.findall(r"^\|.*\]\(([\w-]+)\.md\) \|$", (GUIDE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(linked) == PAGES


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of one."""
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    links = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (place and place not in anchors(target.read_text(encoding="utf-8"))):
            links.append(link)
    return links


@pytest.mark.parametrize("name", sorted(str(page.relative_to(ROOT)) for folder in PLACES for page in (ROOT / folder).glob("*.md")))
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    assert broken(ROOT / name) == []


def apply(diff: str, root: Path) -> None:
    """Apply one ```diff block: each hunk's old lines stand in the file exactly once."""
    header, *hunks = re.split(r"^@@ .* @@\n", diff, flags=re.MULTILINE)
    path = root / re.findall(r"^\+\+\+ b/(.*)$", header, re.MULTILINE)[0]
    created = "--- /dev/null" in header
    assert path.exists() != created, path
    text = "" if created else path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = [line or " " for line in hunk.splitlines()]
        old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
        new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
        assert created or text.count(old) == 1, f"this stands {text.count(old)} times in {path.relative_to(root)}, not once:\n{old}"
        text = new if created else text.replace(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy_of_the_code(destination: Path) -> Path:
    for name in CODE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, destination / name)
    return destination


@pytest.mark.nightly
def test_the_changes_in_contributing_apply_and_work(tmp_path: Path) -> None:
    contributing = blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    repository = copy_of_the_code(tmp_path)
    for block in contributing:
        if block.language == "diff":
            apply(block.text, repository)
    checks = [block.text for block in contributing if block.language == "python"]
    script = repository / "check.py"
    script.write_text("\n".join([*checks, f"assert str(fxq.__file__).startswith({str(repository)!r}), fxq.__file__"]), encoding="utf-8")
    result = subprocess.run([sys.executable, script], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(checks) == 12
    added = "every_registered or every_operator or fftshift or LaplaceObserver or roll"  # of the others see the test below
    files = ("ops/test_operators", "quantization/test_observers", "primitives/test_definitions")
    assert_passes(repository, added, *(f"tests/{name}.py" for name in files))


def assert_passes(repository: Path, chosen: str, *files: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files, "-k", chosen]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


ONE_EDIT = {"fxquant/ops/elementwise/unary.py": "spherical_bessel_j0", "fxquant/ops/reduction/distance.py": "multilabel_soft_margin_loss"}


@pytest.mark.nightly
def test_an_elementwise_operator_and_a_composite_are_one_edit_in_one_file_each(tmp_path: Path) -> None:
    """All tests that list operators are green after the two diffs, and hold the two to their float functions and to the contract."""
    diffs = [block.text for block in blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) if block.language == "diff"]
    repository = copy_of_the_code(tmp_path)
    for path, name in ONE_EDIT.items():
        (diff,) = [diff for diff in diffs if name in diff]
        assert re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE) == [path]
        apply(diff, repository)
    listing = "every_registered or every_operator or every_call_form or written_somehow or every_row or second_time"
    names = ("ops/test_operators", "ops/test_unary_oracle", "contract/test_random_graphs")
    files = [f"tests/{name}.py" for name in (*names, "pages/test_readme")]
    assert_passes(repository, " or ".join((listing, *ONE_EDIT.values())), *files)


# ---- the page of operators -------------------------------------------------------------------------------------------------
SAMPLE = 6
COLUMNS = 8  # of a table of operators


def cells() -> list[list[str]]:
    """The cells of every row of every table of the page."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0")[2:-2].split(" | ")] for line in lines]


def written() -> dict[tuple[str, str], list[str]]:
    """The cells of the tables of operators, by operator and first call form."""
    return {(row[0], row[1].strip("`")): row for row in cells() if len(row) == COLUMNS and row[1].startswith("`")}


def test_every_operator_that_is_tried_has_its_row() -> None:
    assert set(written()) == {(row.operator, row.texts[0]) for family in FAMILIES.values() for row in family}


def test_every_limit_has_its_row_and_every_row_of_a_record_is_true() -> None:
    """A record that is newer than the page has no row until the page is written again."""
    result = [tuple(row) for row in cells()]
    names = {record.name for record in OPERATORS.values()}
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index("## Operator records") : text.index("## Limits")].splitlines()
    written = [tuple(cell.strip() for cell in line[2:-2].split(" | ")) for line in lines if line.startswith("| ")][1:]
    of_records = {tuple(cell.strip() for cell in row) for row in page.record_rows()}
    assert {row[0] for row in page.record_rows()} == names
    assert set(written) <= of_records
    assert len(written) > len(names) / 2
    assert {tuple(cell.strip() for cell in row) for row in page.limit_rows()} <= {row[:5] for row in result}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("index", range(SAMPLE))
def test_a_cell_is_what_is_measured(index: int) -> None:
    """One row of each sixth of the table, on one target."""
    every = [(family, row) for family, entries in FAMILIES.items() for row in entries if not row.random]
    family, row = random.Random(index).choice(every[index::SAMPLE])
    target = page.TARGETS[index % len(page.TARGETS)]
    spelling = Spelling(family, row, row.texts[0])
    dtypes = [dtype for dtype in page.DTYPES if dtype == page.DTYPES[0] or has(target, dtype)]
    cells = {(spelling.name, target, dtype): measure(spelling, target, dtype, NONE) for dtype in dtypes}
    assert written()[row.operator, row.texts[0]][3 + page.TARGETS.index(target)] == page.cell(spelling, target, cells)
