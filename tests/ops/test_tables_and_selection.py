"""A function of a user as one table, and comparisons with numbers at every integer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.integer import qparams
from fxquant.ops import BY_NAME, FUNCTIONS, OPERATORS
from tests.shared import contract
from tests.shared.contract import compiled


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 3, 6, 6, generator=generator) for _ in range(2)]


def test_a_function_of_ones_own_is_one_table(tmp_path: Path) -> None:
    bent = fxq.extend.unary("bent_by_a_test", lambda x: x * torch.sigmoid(1.5 * x) + torch.sin(x))

    class Bent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return bent(x)

    images = batches()
    prepared, integer = compiled(Bent(), images)
    assert [layer.operator for layer in fxq.inspect.layers(integer)] == ["quantize", "bent_by_a_test", "dequantize"]
    contract.assert_validate_is_integer(prepared, integer, images[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(images[1],)])
    assert float((integer(images[0]) - bent(images[0])).abs().max()) < 0.05
    with pytest.raises(fxq.errors.ConfigurationError, match="bent_by_a_test"):
        fxq.extend.unary("bent_by_a_test", torch.sin)
    function = BY_NAME.pop("bent_by_a_test").function
    for table in (OPERATORS, FUNCTIONS):
        del table[function]


def test_thresholds_are_exact() -> None:
    """A comparison with a number is the comparison of what the integers stand for, at every integer and at numbers between."""
    images = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16).expand(2, -1, -1, -1)
    numbers = [0.0, 0.25, 1e-3, -0.5, 0.99, 5.0, -5.0]

    class Compared(nn.Module):
        def forward(self, x: Tensor) -> Any:
            relations = (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne)
            return torch.relu(x), x.abs(), tuple([relation(torch.clamp(x, -1, 1), number) for number in numbers for relation in relations])

    _, integer = compiled(Compared(), [images])
    values = contract.graph_values(integer, images)
    known = {node.name: node for node in integer.graph.nodes}
    compared = next(node for node in known.values() if node.name.startswith("clamp") and qparams(node) is not None)
    scale = qparams(compared).scale
    real = values[compared.name].double() * scale
    found = integer(images)[2]
    relations = (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne)
    for index, number in enumerate(numbers):
        single = float(torch.tensor(number, dtype=torch.float32))
        for offset, relation in enumerate(relations):
            assert torch.equal(found[index * 6 + offset], relation(real, single)), (number, relation)
