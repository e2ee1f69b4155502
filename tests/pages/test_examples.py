"""The examples run, and write what they say; with a few steps of training, so that what they reach is not looked at."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
EXAMPLES = Path(__file__).parents[2] / "examples"
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
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    lines = (EXAMPLES / "first_steps.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert f"```python\n{lines}```\n" in readme
    assert lines.count("\n") <= 30


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*WRITTEN, "first_steps"}
