"""A program of `torch.export` compiles to the bits of the module it was exported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.errors import TraceError


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.up, self.pool, self.head = nn.ConvTranspose2d(8, 8, 2, 2, groups=2), nn.MaxPool2d(2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = F.avg_pool2d(self.pool(self.act(self.bn(self.conv(x)))), 2)
        y = F.interpolate(F.hardswish(self.up(y)), scale_factor=2, mode="bilinear", align_corners=False)
        y = F.leaky_relu(F.pad(y, (1, 0, 0, 1)), 0.1)[:, ::2].repeat(1, 2, 1, 1)
        return {"classes": F.softmax(self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)), -1), "map": F.silu(y, inplace=True)}


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Dropout(0.1)
        self.token, self.out = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)
        scores = self.norm(x) @ x.transpose(1, 2) / 8**0.5
        return self.out(self.drop(F.gelu(scores.softmax(-1) @ x))).view(ids.shape[0], -1, 4).contiguous().mean(1)


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "vision": (Vision, lambda batch: torch.randn(batch, 3, 16, 16)),
    "text": (Text, lambda batch: torch.randint(0, 20, (batch, 5))),
}


def bits(value: Any) -> list[torch.Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_the_bits_of_its_module(case: str, tmp_path: Path) -> None:
    kind, draw = CASES[case]
    model, batches = kind().eval(), [draw(4) for _ in range(3)]
    program = torch.export.export(model, (batches[0],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    results = [fxq.quantize(source, batches, show_progress=False) for source in (model, program)]
    mine, theirs = (result.integer for result in results)
    assert all(torch.equal(a, b) for a, b in zip(bits(mine(batches[0])), bits(theirs(batches[0])), strict=True))
    kinds = [{layer.operator for layer in fxq.layers(result.prepared)} for result in results]
    assert kinds[0] == kinds[1]
    assert all(layer.integer or layer.boundary for layer in fxq.layers(results[1].prepared))
    lines = {layer.source.partition(" ")[0].partition(":")[0] for layer in fxq.layers(results[1].prepared)}
    assert lines - {""} == {"test_exported.py"}  # an input has no line
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(results[1].prepared.named_parameters()).keys() & parameters.keys()
    assert fxq.verify(theirs, results[1].export(tmp_path / "model.onnx"), [draw(3)], show_progress=False)


def test_a_program_with_a_fixed_batch() -> None:
    x = torch.randn(2, 3, 16, 16)
    program = torch.export.export(Vision().eval(), (x,))
    with pytest.raises(TraceError, match="the batch size of the example, 2, is written into forward"):
        fxq.trace(program, (x,))
    assert fxq.trace(program, (x,), {})(x)["map"].shape[0] == 2
