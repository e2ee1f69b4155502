"""Examples and notebooks run, and measured figures of pages name the files that they depend on."""

import base64
import contextlib
import importlib.util
import io
import json
import math
import runpy
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.pages.test_readme import broken, prints

pytestmark = pytest.mark.nightly

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
WRITTEN = {
    "classify_digits": {"classifier.onnx", "mistakes.png"},
    "denoise_photographs": {"denoiser.onnx", "cuttings.png"},
    "detect_glyphs": {"detector.onnx", "pages.png"},
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_an_example_runs_and_writes_its_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    figures = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](8, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == WRITTEN[name]
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert {"float", "integer"} <= set(figures)
    for values in figures.values():
        assert all(math.isfinite(value) for value in (values if isinstance(values, tuple) else (values,)))


def test_the_first_steps_are_those_of_the_readme() -> None:
    """tests/pages/test_readme.py runs them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (EXAMPLES / "first_steps.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert f"```python\n{lines}```\n" in readme
    assert lines.count("\n") <= 30


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*WRITTEN, "first_steps", "find_faces", "demo"}


def test_faces_are_decoded_from_integers() -> None:
    """Two neighbours see one face; another label, an unlikely face and a face elsewhere."""
    example = runpy.run_path(str(EXAMPLES / "find_faces.py"))
    integers, outputs = {}, {}
    for stride in (8, 16, 32):
        side = 320 // stride
        integers |= {f"classes{stride}": np.full((1, side, side, 18), -500), f"boxes{stride}": np.zeros((1, side, side, 64), np.int64)}
        outputs |= {f"classes{stride}": {"scale": [0.01] * 18}, f"boxes{stride}": {"scale": 0.5}}
    for cell, label, logit in (((4, 5), 1, 300), ((4, 6), 1, 200), ((9, 9), 3, 300), ((12, 2), 12, -1)):
        integers["classes16"][0][cell][label] = logit
    for cell, (left, right) in (((4, 5), (2, 3)), ((4, 6), (3, 2))):
        for place, distance in enumerate((left, 1, right, 4)):
            integers["boxes16"][0][cell][16 * place + distance] = 100
    integers["classes32"][0, 8, 1, 12] = 100
    first, second = example["decoded"](integers, outputs)
    assert (first[0], round(first[1], 3)) == (1, 0.953)
    assert np.allclose(first[2], (88 - 32, 72 - 16, 88 + 48, 72 + 64))
    assert (second[0], round(second[1], 3)) == (12, 0.731)


def test_without_a_wheel_the_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="the package onnx2torch is not installed: pip install onnx2torch"):
        runpy.run_path(str(EXAMPLES / "find_faces.py"))["main"](8, tmp_path)


# ---- notebooks -------------------------------------------------------------------------------------------------------------
plt = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("sklearn")
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 400_000  # bytes of a notebook with its pictures


def outputs(source: str, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run a cell, and return its printed text and pictures as outputs of a notebook."""
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
    rows: list[dict[str, Any]] = [
        {"output_type": "display_data", "data": {"image/png": each, "text/plain": ["<Figure>"]}, "metadata": {}} for each in pictures
    ]
    return [*rows, {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else rows


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
        result = outputs("".join(cell["source"]), namespace, monkeypatch)
        if request.config.getoption("--update-golden"):
            cell["outputs"], cell["execution_count"] = result, number
            continue
        assert [each["output_type"] for each in cell["outputs"]] == [each["output_type"] for each in result], f"cell {number}"
        for held, built in zip(cell["outputs"], result, strict=True):
            assert prints("".join(held.get("text", ())), "".join(built.get("text", ()))), f"cell {number} prints {built['text']}"
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


# ---- the site --------------------------------------------------------------------------------------------------------------
def script_of_docs(name: str) -> ModuleType:
    """Return a script in the folder docs as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- measured figures: docs/figures.py finds those that are older than what they rest on -----------------------------------
PAGE = "# Page\n\nFast: 3.5 times float, by a command.\n\n| | ms |\n|---|---|\n| net | 1.5 ms |\n\nAs given: 0.5.\n"
COMMAND = "python -m bench.speed --runs 3"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return script_of_docs("figures")


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
    (result,) = figures.stale(repository)
    assert result.startswith("page.md: 3.5 times float\n")
    assert "changed since: kernels (" in result
    assert COMMAND in result
    assert len(list(figures.measure(repository, ["bench.speed"]))) == 2
    assert list(figures.stale(repository)) == []


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
