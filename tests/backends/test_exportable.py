"""Float operators that PyTorch's exporter cannot write, beside integer layers: the file computes what PyTorch does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.backends.onnx import exportable

Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "cdist": torch.cdist,
    "cdist, 3-norm": lambda x, y: torch.cdist(x, y, p=3.0, compute_mode="donot_use_mm_for_euclid_dist"),
    "hypot, a method": lambda x, y: x.hypot(y),
    "copysign": torch.copysign,
    "cumprod": lambda x, y: torch.cumprod(x + y, -1),
}


class Beside(nn.Module):
    """A function of two quantized layers in front of a third."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.function = function

    def forward(self, rows: Tensor, others: Tensor) -> Tensor:
        return self.head(self.function(self.one(rows), self.other(others)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_exported_between_integer_layers(name: str, tmp_path: Path) -> None:
    batches = [(torch.randn(3, 4, 4), torch.randn(3, 4, 4)) for _ in range(2)]
    mapping = fxq.QConfigMapping()
    for kind in (torch.cdist, "hypot", torch.copysign, torch.cumprod):
        mapping = mapping.set_object_type(kind, None)
    result = fxq.quantize(Beside(FUNCTIONS[name]).eval(), batches, "nash-e", mapping, show_progress=False)
    assert sum(not layer.integer and not layer.boundary for layer in fxq.layers(result.integer)) == 1
    path = result.export(tmp_path / "m.onnx", style="exact")
    report = result.verify(path, batches)
    assert report
    assert report.tensors >= 5
    assert report.flips == 0


@pytest.mark.parametrize("name", ["hypot, a method"])
def test_of_a_float_model(name: str, tmp_path: Path) -> None:
    model, rows = Beside(FUNCTIONS[name]).eval(), (torch.randn(3, 4, 4), torch.randn(3, 4, 4))
    path = fxq.export_onnx(model, tmp_path / "m.onnx", example_inputs=rows)
    found = next(iter(fxq.record(path, [rows], "outputs")))["output 0"]
    assert (found - model(*rows)).abs().max() < 1e-5


def test_what_is_called_instead_computes_the_same() -> None:
    edges = torch.tensor([0.0, -0.0, 1.0, -2.0, 3e-30, 3e30, -3e30, math.inf, -math.inf, 0.3])
    x, y = (grid.flatten() for grid in torch.meshgrid(edges, edges, indexing="ij"))
    assert torch.equal(exportable.copysign(x, y), torch.copysign(x, y))
    assert torch.equal(exportable.copysign(x, y).signbit(), torch.copysign(x, y).signbit())
    torch.testing.assert_close(exportable.hypot(x, y), torch.hypot(x, y), rtol=1e-6, atol=0)
    torch.testing.assert_close(exportable.cumprod(torch.arange(1.0, 12), 0), torch.cumprod(torch.arange(1.0, 12), 0), rtol=1e-6, atol=0)
    one, other = torch.randn(2, 5, 4), torch.randn(3, 1, 6, 4).round()
    for p in (0.0, 0.5, 1.0, 2.0, 3.0, math.inf):
        torch.testing.assert_close(exportable.cdist(one, other, p), torch.cdist(one, other, p), rtol=1e-5, atol=1e-6)
