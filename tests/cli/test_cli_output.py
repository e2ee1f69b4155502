"""What a command returns to the shell when its output cannot be written, when it is interrupted, and when sizes are absurd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.cli import main

ROOT = Path(__file__).parents[2]
MODEL = """
import time

from torch import nn


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def slow():
    print("begun", flush=True)
    time.sleep(60)
"""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fxquant.cli", *map(str, arguments)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model, next to a module with networks."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "networks.py").write_text(MODEL)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(2))).eval()
    return fxq.save(fxq.quantize(model, [torch.randn(2, 3, 4, 4)], show_progress=False).integer, folder / "model.fxq")


@pytest.fixture
def file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(saved.parent)
    return saved


@pytest.mark.sweep(1)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error_of_use(unbuffered: str, file: Path) -> None:
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(command("inspect", file), stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    said = ["fxquant: the output cannot be written", "  because  No space left on device", "  remedy   free space"]
    assert (ended.returncode, ended.stderr.splitlines()) == (2, said)


@pytest.mark.nightly
def test_output_that_nobody_reads_any_more_is_neither_equal_nor_different(file: Path) -> None:
    running = subprocess.Popen(command("inspect", "--graph", file), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()  # long before the command has loaded the file
    assert (running.wait(), running.stderr.read()) == (141, "")


@pytest.mark.nightly
def test_ctrl_c_is_status_130_without_a_traceback(file: Path) -> None:
    running = subprocess.Popen(
        command("check", "networks:slow", "--shape", "1,3,8,8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background is started with it ignored
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline() == "begun\n"
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    assert (running.wait(), running.stderr.read()) == (130, "fxquant: interrupted\n")


SIZES = {
    "0,3,8,8": "0 is not a positive number", "1,-3,8,8": "-3 is not a positive number", "1,3,,8": "invalid shape value",
    "1,3,x,8": "invalid shape value", "1.5,3": "invalid shape value", "": "invalid shape value", f"1,3,{10**12},8": "cannot be made",
    f"{10**30}": "cannot be made", f"1,{2**62},8,8": "cannot be made", "1,3,2,2": "because", "1,5,8,8": "because",
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_absurd_sizes_are_an_error_of_use(sizes: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["check", "networks:Network", f"--shape={sizes}"])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert SIZES[sizes] in said


def test_a_tilde_after_an_equals_sign_is_the_home_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["export", str(file), "--c=~/model.c"]) == 0
    assert main(["diff", str(file), "~/model.c"]) == 2
    assert (tmp_path / "model.c").exists()
    assert not Path("~").exists()
