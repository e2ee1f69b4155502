"""Measured figures of pages know what they rest on: docs/figures.py finds those that are older than it, whatever became of the history."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
PAGE = "# Page\n\nFast: 3.5 times float, by a command.\n\n| | ms |\n|---|---|\n| net | 1.5 ms |\n\nAs given: 0.5.\n"
COMMAND = "python -m bench.speed --runs 3"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_of_the_docs", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=someone", "-c", "user.email=someone@example.com", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def commit(repository: Path, message: str) -> None:
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", message)


@pytest.fixture
def repository(figures: ModuleType, tmp_path: Path) -> Path:
    """A repository with a page of two figures, one of which rests on a folder and one on a file, just measured."""
    root = tmp_path / "repository"
    for name, text in {"page.md": PAGE, "bench/speed.py": "1\n", "kernels/one.py": "1\n", "other.py": "1\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    rows = [
        ("page.md", "3.5 times float", COMMAND, "kernels@ other.py@", "none"),
        ("page.md", "| net | 1.5 ms |", COMMAND, "other.py@", "none"),
    ]
    (root / "docs").mkdir()
    (root / figures.TABLE).write_text("".join("\t".join(row) + "\n" for row in (figures.COLUMNS, *rows)), encoding="utf-8")
    git(tmp_path, "init", "-q", str(root))
    commit(root, "first")
    assert len(list(figures.measure(root, ["bench.speed"]))) == 2
    commit(root, "measured")
    return root


def test_nothing_is_stale_until_a_folder_changes(figures: ModuleType, repository: Path) -> None:
    assert list(figures.stale(repository)) == []
    (repository / "page.md").write_text(PAGE + "More.\n", encoding="utf-8")
    commit(repository, "words")
    assert list(figures.stale(repository)) == []
    (repository / "kernels/one.py").write_text("2\n", encoding="utf-8")
    commit(repository, "a kernel")
    (found,) = figures.stale(repository)
    assert found.startswith("page.md: 3.5 times float\n")
    assert "changed since: kernels (" in found
    assert COMMAND in found
    assert len(list(figures.measure(repository, ["bench.speed"]))) == 2
    assert list(figures.stale(repository)) == []


@pytest.mark.parametrize("changes", [False, True])
def test_the_answer_survives_a_squash_and_a_clone_without_history(changes: bool, figures: ModuleType, repository: Path) -> None:
    if changes:
        (repository / "other.py").write_text("2\n", encoding="utf-8")
        commit(repository, "another")
    git(repository, "checkout", "-q", "--orphan", "squashed")
    commit(repository, "all in one")
    git(repository.parent, "clone", "-q", "--depth", "1", "--branch", "squashed", repository.as_uri(), "clone")
    for each in (repository, repository.parent / "clone"):
        assert len(list(figures.stale(each))) == (2 if changes else 0)


def test_without_a_repository_there_is_a_message(
    figures: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "ROOT", repository)
    assert figures.main(["stale"]) == 0
    assert capsys.readouterr() == ("", "")
    (repository / ".git").rename(repository / "kept")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
    assert figures.main(["stale"]) == 1
    assert capsys.readouterr().err.startswith("what the figures rest on is unknown: fatal: not a git repository")
    monkeypatch.setenv("PATH", "")
    assert figures.main(["stale"]) == 1
    assert "git" in capsys.readouterr().err


def test_what_is_not_committed_cannot_be_recorded_as_measured(figures: ModuleType, repository: Path) -> None:
    (repository / "other.py").write_text("2\n", encoding="utf-8")
    with pytest.raises(figures.NoHistory, match="commit what was measured first"):
        list(figures.measure(repository, ["bench.speed"]))


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("page.md", "3.5 times float", "3.6 times float", "does not show '3.5 times float'"),
        ("page.md", "As given: 0.5.", "It loses 0.5 dB.", "page.md:9: '0.5 dB' is measured"),
        ("page.md", "As given: 0.5.", "It takes twenty minutes.", "page.md:9: 'twenty minutes' is measured"),
        ("page.md", "As given: 0.5.", "| a | 1.5 | 2.5 |", "page.md:9: '| 1.5 | 2.5 |' is measured"),
        ("page.md", "As given: 0.5.", "Equal: 12 of 12 networks.", "page.md:9: '12 of 12 ' is measured"),
        ("docs/figures.tsv", "bench.speed", "bench.gone", "no module for 'python -m bench.gone"),
        ("docs/figures.tsv", "kernels@", "nowhere@", "there is no nowhere"),
    ],
)
def test_what_is_wrong_is_found(file: str, old: str, new: str, expected: str, figures: ModuleType, repository: Path) -> None:
    assert list(figures.wrong(repository)) == []
    text = (repository / file).read_text(encoding="utf-8")
    assert old in text
    (repository / file).write_text(text.replace(old, new), encoding="utf-8")
    assert any(expected in each for each in figures.wrong(repository))
