"""The command line: what it says when it is misused, and the demonstration from end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fxquant import backends
from fxquant.cli import main
from fxquant.demo import run
from fxquant.passes import PIPELINE


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["demo", "--unknown"]])
def test_misuse_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: fxquant" in capsys.readouterr().err


def test_a_wrong_target_lists_the_right_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--target", "wrong", "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "there is no target 'wrong'" in message
    for target in backends.TARGETS.values():
        for name in (target.name, *target.aliases):
            assert name in message
    assert not (tmp_path / "out").exists(), "nothing is done before the target is known"


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[run.Outcome]:
    """What the demonstrations of this test returned; they train briefly."""
    monkeypatch.setattr(run, "FLOAT_EPOCHS", 2)
    monkeypatch.setattr(run, "QUANTIZED_EPOCHS", 1)
    kept: list[run.Outcome] = []
    original: Callable[..., run.Outcome] = run.run_demo

    def keep(*arguments: object, **keywords: object) -> run.Outcome:
        kept.append(original(*arguments, **keywords))
        return kept[-1]

    monkeypatch.setattr(run, "run_demo", keep)
    return kept


@pytest.mark.parametrize("target", ["bayes-e", "j6e"])
def test_the_demonstration(target: str, outcomes: list[run.Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--target", target, "--out", str(tmp_path)]) == 0
    (outcome,) = outcomes
    assert outcome.report
    assert outcome.report.mismatches == 0
    assert outcome.report.flips == 0
    assert outcome.report.tensors >= 20
    assert len(outcome.report.pairs) == 5, "four runtimes, and the prepared model"
    assert outcome.float_nodes == 0
    assert outcome.target == backends.get(target).name
    exact = {value for name, value in outcome.accuracies.items() if name.startswith(("prepared", "integer", "ONNX"))}
    assert len(exact) == 1
    before, after = outcome.weight_bytes
    assert after < before / 3

    steps = ["trace", *(step.name for step in PIPELINE)]
    assert sorted(file.name for file in (tmp_path / "passes").iterdir()) == [f"{i:02d}-{name}.txt" for i, name in enumerate(steps)]
    assert steps[-1] == "integer.lower"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["explain.txt", "model.onnx", "passes"]
    assert "none is left in float" in (tmp_path / "explain.txt").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "mismatching elements" in shown
    assert str(tmp_path / "model.onnx") in shown.replace("\n", "")
