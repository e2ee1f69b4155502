"""Numbers that Python computes of the batch size, and activations that are written into constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from tests.shared.networks import held


class Model(nn.Module):
    """A layer, and what a function makes of its result; it stands here, for numbers are followed where `forward` is written."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(4, 4), body
        self.register_buffer("held", torch.randn(3, 4))
        self.row = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x))


SIZES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a quotient": lambda model, x: x.relu().reshape(int(x.shape[0] / 1), 2, 2),
    "a length": lambda model, x: x.relu().reshape(len(x), 2, 2),
    "rounded": lambda model, x: x.relu().reshape(round(x.shape[0] / 1), 2, 2),
    "a root": lambda model, x: x.relu().reshape(int(math.sqrt(x.shape[0] ** 2)), 2, 2),
    "a float": lambda model, x: x.relu().reshape(int(float(x.shape[0])), 2, 2),
    "an exponent": lambda model, x: x.relu().reshape(int(2 ** math.log2(x.shape[0]) + 0.5), 2, 2),
    "repeated": lambda model, x: torch.cat((x, model.row.expand(int(x.shape[0] / 1), 4)), 1).tanh(),
    "repeated, rounded down": lambda model, x: torch.cat((x, model.row.expand(math.floor(x.shape[0] * 1.5 - x.shape[0] / 2), 4)), 1).tanh(),
    "repeated, rounded up": lambda model, x: torch.cat((x, model.row.expand(math.ceil(math.sqrt(x.shape[0] * x.shape[0])), 4)), 1).tanh(),
}


def put(model: Any, x: Tensor, index: Any, value: Tensor) -> Tensor:
    held = model.held.clone()
    held[index] = value
    return x + held.mean(0).tanh()


WRITES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a row": lambda model, x: put(model, x, 1, x.amax(0) if x.shape[0] == 0 else x[0]),
    "a slice": lambda model, x: put(model, x, slice(0, 1), x[:1]),
    "an element": lambda model, x: put(model, x, (slice(None), 0), x[0, :3]),
    "by a list": lambda model, x: put(model, x, [2, 0], x[:2]),
    "by slice_scatter": lambda model, x: x + model.held.slice_scatter(x[:1], 0, 1, 2).mean(0).tanh(),
    "by a view": lambda model, x: x + model.held.clone().diagonal_scatter(x[0, :3]).mean(0).tanh(),
    "into a factor": lambda model, x: x @ model.held.new_zeros(4, 4).index_copy(0, torch.tensor([1]), x[:1]),
}


FILLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ones times a number": lambda model, x: x + x.new_ones(x.shape[0], 4) * 0.1,
    "zeros plus a number": lambda model, x: x * (torch.zeros(x.shape[0], 4) + 3),
    "a number less zeros": lambda model, x: x + (2 - torch.zeros_like(x)),
    "beside": lambda model, x: torch.cat((x, (torch.zeros_like(x[:, :1]) + 2).div(4)), 1).tanh(),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", [*SIZES, *WRITES, *FILLED])
def test_a_size_that_python_computes_and_what_is_written_or_filled_hold_the_contract(name: str, tmp_path: Path) -> None:
    model = Model({**SIZES, **WRITES, **FILLED}[name])
    prepared, _ = held(model, [torch.randn(4, 4), torch.randn(3, 4)], tmp_path / "model.onnx", train=False)
    assert name in WRITES or "none is left in float" in fxq.explain(prepared)
