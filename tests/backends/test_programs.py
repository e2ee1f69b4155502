"""The integer model as a program of PyTorch's own: equal bits at every batch size, in a process that has no fxquant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.backends.aten import programs
from tests.shared.contract import all_equal, compiled
from tests.shared.networks import Network
from tests.shared.programs import program

WRITERS = {"pt2": fxq.export.export_pt2, "torchscript": fxq.export.export_torchscript}
ALONE = program("programs_alone")


class Mixed(nn.Module):
    """Integers, attention, a float operator, whole numbers, a number beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.embed(tokens)
        scores = self.head(torch.softmax(self.query(x) @ x.transpose(1, 2), -1) @ x)
        return {"best": scores.topk(2, -1), "size": tokens.shape[0], "far": torch.fft.rfft(scores).abs(), "last": scores[-2:].sum(0)}


def integer_of(model: nn.Module, batch: Tensor, target: str) -> fx.GraphModule:
    return compiled(model.eval(), [batch], target).integer


@pytest.mark.nightly
def test_programs_run_without_fxquant_at_every_batch_size(tmp_path: Path) -> None:
    tokens = torch.randint(0, 20, (7, 5))
    integer = integer_of(Mixed(), tokens[:4], "bayes-e")
    for kind, write in WRITERS.items():
        assert write(integer, tmp_path / kind) == tmp_path / kind
    wanted = {size: [v for v in pytree.tree_leaves(integer(tokens[:size])) if isinstance(v, Tensor)] for size in (2, 4, 7)}
    torch.save((tokens, wanted), tmp_path / "wanted.pt")
    names = [str(tmp_path / name) for name in ("wanted.pt", *WRITERS)]
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE, *names], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "equal\n", result.stderr


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bernoulli", "x86"])
def test_they_are_the_integer_models_bits(target: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
    image = torch.randn(5, 3, 6, 6)
    integer = integer_of(model, image, target)
    for write, load in (
        (fxq.export.export_pt2, lambda path: torch.export.load(path).module()),
        (fxq.export.export_torchscript, torch.jit.load),
    ):
        program = load(str(write(integer, tmp_path / "program.pt2")))
        for size in (5, 1):
            assert all_equal(program(image[:size]), integer(image[:size]))


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_program_of_other_bits_is_not_written(write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integer = integer_of(nn.Linear(4, 3), torch.randn(2, 4), "bayes-e")
    place = tmp_path / "kept.pt2"
    place.write_text("what was there")
    original = programs.Program.forward
    calls: list[int] = []

    def forward(self: nn.Module, *inputs: Tensor) -> Any:
        calls.append(0)
        return original(self, *inputs) + (1e-3 if len(calls) == 1 else 0)  # while it is written, and not afterwards

    monkeypatch.setattr(programs.Program, "forward", forward)
    with pytest.raises(fxq.errors.ExportError, match="not equal to the integer model"):
        write(integer, place)
    assert place.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.pt2"]


@fxq.wrap
def found(scores: Tensor) -> list[list[int]]:
    return [torch.nonzero(row).flatten().tolist() for row in scores]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("write", [fxq.export.export_pt2, fxq.export.export_torchscript, fxq.export_onnx])
def test_what_stays_python_and_cannot_be_written_is_an_error_and_no_print(
    write: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finds = Network(lambda s, x: (y := s.conv(x), found(y.mean((2, 3)))), conv=nn.Conv2d(3, 4, 1))
    integer = fxq.quantize(finds.eval(), [torch.randn(4, 3, 4, 4)]).integer
    capfd.readouterr()
    with pytest.raises(fxq.errors.ExportError, match="found"):
        write(integer, tmp_path / "model")
    printed = capfd.readouterr()
    assert not printed.out
    assert not printed.err
    assert not list(tmp_path.iterdir())
