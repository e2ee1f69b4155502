"""An arithmetic is one class: a third one, made here, holds the contract, and files know each from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant import backends
from fxquant.backends.bpu import CHIP, REAL, WIDTHS
from fxquant.numerics.grids import IntType, Ratio
from fxquant.primitives.arithmetic import Arithmetic, Composer, FixedArithmetic, RealArithmetic
from fxquant.primitives.elementwise import align_fixed, align_real
from fxquant.primitives.proof import unproved
from fxquant.primitives.quantization import requantize_fixed, requantize_real
from fxquant.target import Target
from tests.shared import contract

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Mixed(FixedArithmetic):
    """Operands are aligned by float32 numbers, sums requantized by whole ones, which round down."""

    final_rounding: str = "floor"

    primitives = frozenset((requantize_fixed, align_real))

    def align(self, composer: Composer, value: Any, ratio: Ratio, dtype: IntType, role: str, wide: bool) -> Any:
        return RealArithmetic.align(self, composer, value, ratio, dtype, role, wide)  # type: ignore[arg-type]


MIXED = Target("mixed", "an example", Mixed("mixed", widths=WIDTHS))


class Net(nn.Module):
    """A sum of products, an addition, a join and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.relu(self.left(x)), self.right(x)
        return torch.cat((torch.sigmoid(left) + right, right), 1).mean((2, 3))


def targets_of(integer: Any) -> set[Callable[..., Any]]:
    return {node.target for node in integer.graph.nodes if node.op == "call_function"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is known by name, as a family in a folder of its own would be."""
    monkeypatch.setitem(backends.TARGETS, MIXED.name, MIXED)


@pytest.mark.usefixtures("known")
def test_a_third_arithmetic_holds_the_contract(tmp_path: Path) -> None:
    batch = torch.randn(4, 3, 8, 8)
    prepared, integer = contract.compiled(Net(), [batch], "mixed")
    found = targets_of(integer)
    assert Mixed.primitives <= found
    assert not found & {requantize_real, align_fixed}
    contract.assert_validate_is_integer(prepared, integer, batch)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batch,)])
    contract.assert_train_is_validate(prepared, batch)
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert torch.equal(loaded(batch), integer(batch))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "fast.onnx", style="fast"), [batch], show_progress=False)


@pytest.mark.parametrize("other", [CHIP, REAL, FixedArithmetic("down", widths=WIDTHS, final_rounding="floor")], ids=lambda a: a.name)
def test_a_graph_is_that_of_its_own_arithmetic_alone(other: Arithmetic) -> None:
    integer = contract.compiled(Net(), [torch.randn(4, 3, 8, 8)], MIXED).integer  # type: ignore[arg-type]
    assert not list(unproved(integer, MIXED.arithmetic))
    _, because = next(unproved(integer, other))
    assert because == f"its target requantizes by {other.multiplies_by}" or "as its target does" in because
