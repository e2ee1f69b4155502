"""Proofs of kernels that are kept for later processes: what a model costs before it runs fast is counted, in proofs and in passes."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.backends.cpu import native
from fxquant.backends.cpu.proofs import Proofs
from fxquant.ir.graph import Interpreter
from fxquant.kernels import runner
from fxquant.kernels.admission import prove

pytestmark = pytest.mark.skipif(isinstance(native.library(), str), reason="there is no C compiler")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(5)
    )


def integer(value: float = 0.0) -> torch.fx.GraphModule:
    """An integer model, whose first weight is changed by a value."""
    model, inputs = network(), torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    model(inputs)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += value
    return fxq.quantize(model, [inputs], target="x86").integer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "proofs.txt"


def counted(model: torch.fx.GraphModule, file: Path, monkeypatch: pytest.MonkeyPatch, *batches: int) -> tuple[list[int], list[int]]:
    """Run a model as a new process would; return the numbers of proofs and of passes of primitives that each batch took."""
    kept, proofs, passes = Proofs(file), list[int](), list[int]()
    monkeypatch.setattr(runner, "PROOFS", [lambda: kept])
    for size in batches:
        with (
            mock.patch.object(runner, "prove", side_effect=prove) as proved,
            mock.patch.object(runner._Recorder, "run", autospec=True, side_effect=runner._Recorder.run) as run,
        ):
            x = torch.randn(size, 3, 12, 12, generator=torch.Generator().manual_seed(size))
            result = model(x)
        proofs.append(proved.call_count)
        passes.append(run.call_count)
        assert torch.equal(result, Interpreter(model).run(x))
    return proofs, passes


def test_a_model_is_proved_once_on_a_machine_and_a_new_size_costs_one_pass(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, passes = counted(integer(), file, monkeypatch, 2, 2, 2, 4, 4)
    assert proofs[0] == proofs[2] == proofs[3] == proofs[4] == 0
    assert proofs[1] == len(file.read_text().split()) > 3
    assert passes == [1, 0, 0, 1, 0]
    assert counted(integer(), file, monkeypatch, 2, 2, 4, 4) == ([0, 0, 0, 0], [1, 0, 1, 0])


def test_another_constant_is_proved_again_and_so_is_what_a_damaged_file_does_not_hold(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, proved), _ = counted(integer(), file, monkeypatch, 2, 2)
    assert counted(integer(0.5), file, monkeypatch, 2, 2)[0][1] > 0
    file.write_bytes(b"\xff" * 40)
    assert counted(integer(), file, monkeypatch, 2, 2)[0] == [0, proved]
