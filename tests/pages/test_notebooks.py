"""The notebooks run, and hold what their cells print and draw; --update-golden writes it into them."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.pages.test_readme import broken, prints

plt = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("sklearn")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 400_000  # bytes of a notebook with its pictures


def outputs(source: str, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run a cell, and return what it prints and draws, as a notebook holds it."""
    pictures: list[str] = []

    def show() -> None:
        with io.BytesIO() as file:
            plt.gcf().savefig(file, dpi=80, format="png", metadata={"Software": None})
            pictures.append(base64.b64encode(file.getvalue()).decode())
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell.py", "exec"), namespace)
    text = printed.getvalue()
    found: list[dict[str, Any]] = [
        {"output_type": "display_data", "data": {"image/png": each, "text/plain": ["<Figure>"]}, "metadata": {}} for each in pictures
    ]
    return [*found, {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else found


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_holds(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FXQUANT_HORIZON", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without the vendor's tool
    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        found = outputs("".join(cell["source"]), namespace, monkeypatch)
        if request.config.getoption("--update-golden"):
            cell["outputs"], cell["execution_count"] = found, number
            continue
        assert [each["output_type"] for each in cell["outputs"]] == [each["output_type"] for each in found], f"cell {number}"
        for held, made in zip(cell["outputs"], found, strict=True):
            assert prints("".join(held.get("text", ())), "".join(made.get("text", ()))), f"cell {number} prints {made['text']}"
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert len(cells) >= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_its_links_lead_somewhere(path: Path, tmp_path: Path) -> None:
    assert path.stat().st_size < LARGEST
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "docs" / "guide").symlink_to(path.parents[1] / "guide")
    (folder / "page.md").write_text(text, encoding="utf-8")
    assert "](" in text
    assert broken(folder / "page.md") == []


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["classifier", "detector"]
