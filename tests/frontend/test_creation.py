"""Tensors that a model makes anew at every run are constants where an activation gives the size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared import contract
from tests.shared.contract import compiled

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "like it": lambda x: torch.maximum((x + torch.ones_like(x)) * torch.full_like(x, 0.5), torch.zeros_like(x)),
    "new": lambda x: (x - x.new_ones(x.shape[0], 1, 6)) * x.new_full((x.size(0), 4, 6), -0.3) + x.new_tensor(0.25),
    "joined": lambda x: torch.cat((x, torch.zeros_like(x), x.new_ones(x.shape[0], 1, 6), torch.full((x.size(0), 2, 6), 0.5)), 1).tanh(),
    "of its size": lambda x: x * torch.full((x.shape[0], 4, 1), 2.0) + torch.ones(x.shape[0], 4, 6),
    "of a layer": lambda x: (
        F.linear(torch.zeros_like(x), torch.eye(6), torch.linspace(-1, 1, 6)) + torch.matmul(x, x.new_ones(x.shape[0], 6, 6))
    ),
    "of a composite": lambda x: F.scaled_dot_product_attention(x, x.tanh(), torch.ones_like(x)) + torch.lerp(torch.zeros_like(x), x, 0.3),
    "of a size without the batch": lambda x: (x + _groups(x, 4, 6)).softmax(-1),
    "of a parameter": lambda x: F.linear(x, torch.eye(6), _without_middle(torch.linspace(-1, 1, 6))),
    "written over": lambda x: torch.empty(x.shape).copy_(x),
}


def _groups(x: Tensor, height: int, width: int) -> Tensor:
    """A mask as that of shifted windows: which elements are of another group than the first."""
    groups = x.new_zeros((height, width))
    for number, columns in enumerate((slice(0, 4), slice(4, 6))):
        groups[1:, columns] = number
    return groups.masked_fill(groups != 0, -100.0)


def _without_middle(bias: Tensor) -> Tensor:
    bias = bias.clone()
    bias[2:4].zero_()
    return bias


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer(x))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_anew_is_a_constant_at_every_batch_size(name: str, tmp_path: Path) -> None:
    model = Model(MADE[name]).eval()
    batches = [(torch.randn(5, 4, 6),), (torch.randn(2, 4, 6),)]
    prepared, integer = compiled(model, batches, integer_tail=True)
    assert "none is left in float" in fxq.explain(prepared)
    for (x,) in batches:
        contract.assert_validate_is_integer(prepared, integer, x)
        assert float((integer(x) - model(x)).detach().abs().max()) < 0.1
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", batches)
    contract.assert_train_is_validate(prepared, *batches[0])


def test_what_only_gives_its_own_size_stays_in_float() -> None:
    prepared, integer = compiled(Model(lambda x: x.new_zeros(x.shape[0], 3)).eval(), [torch.randn(5, 4, 6)])
    assert "no registered operator matches new_zeros" in fxq.explain(prepared)
    assert torch.equal(integer(torch.randn(2, 4, 6)), torch.zeros(2, 3))


class Padded(nn.Module):
    """Sizes and bounds that are computed as tensors from buffers, as the codecs of sound have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 5, 2)
        self.register_buffer("reach", torch.tensor(3))
        self.table = nn.Parameter(torch.randn(9, 10))

    def forward(self, x: Tensor) -> Tensor:
        frames = (x.shape[-1] - 5 + self.reach) / 2 + 1
        more = (torch.ceil(frames).to(torch.int64) - 1) * 2 + 5 - self.reach - x.shape[-1]
        y = self.conv(F.pad(x, (self.reach, more)))
        return y[..., : self.reach * 2] + self.table[self.reach : self.reach + 4, : y[..., : self.reach * 2].shape[-1]]


def test_sizes_that_follow_from_constants_are_numbers() -> None:
    model, batch = Padded().eval(), (torch.randn(3, 2, 16),)
    result = fxq.quantize(model, [batch], show_progress=False)
    assert "none is left in float" in fxq.explain(result.prepared)
    assert fxq.verify(result.prepared, result.integer, [batch], show_progress=False)
