"""The examples run, and write what they say; with a few steps of training, so that what they reach is not looked at."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.nightly

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
