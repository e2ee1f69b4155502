"""What training keeps for the way back: fewer bits, the same gradients, the first and the second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.accuracy.walk import real_result
from fxquant.numerics.rounding import straight_through
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives.accumulate import linear
from fxquant.primitives.product import matrix_product
from fxquant.training import fused_elementwise, fused_layers
from tests.shared import contract


def whole(*shape: int, low: int = -128, high: int = 127, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def kept_by(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """What is kept of a product's operands, in its own context; and its gradients, twice, equal those of PyTorch's own."""

    def gradients(narrowed: bool) -> list[Tensor]:
        given = [operand.clone(memory_format=torch.preserve_format).requires_grad_() for operand in operands]
        arguments = (*given, None) if function is linear else tuple(given)
        if narrowed:
            with fused_elementwise.kept_narrow(function, arguments):
                result = function(*arguments)
        else:
            result = function(*arguments)
        once = torch.autograd.grad((result * torch.cos(result.detach())).sum(), given, create_graph=True)
        return [result, *once, *torch.autograd.grad(sum((each.sin()).sum() for each in once), given)]

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, wanted)
        assert float(wanted.detach().abs().max()) > 0
    return [fused_elementwise._narrow(operand) for operand in operands]


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(-128, 127, torch.int8), (0, 255, torch.uint8), (-129, 5, torch.int16), (-32768, 32767, torch.int16), (0, 32768, torch.float32)],
)
def test_operands_are_kept_in_the_bits_they_need(low: int, high: int, dtype: torch.dtype) -> None:
    x, weight = whole(2, 48, 64, low=low, high=high), whole(80, 64, low=-2, high=2, seed=1)
    x.view(-1)[:2] = torch.tensor((low, high))
    kept, of_weight = kept_by(linear, x, weight)
    assert (kept.dtype, of_weight.dtype) == (dtype, torch.int8)
    assert torch.equal(kept.float(), x)


def test_operands_lie_as_they_did() -> None:
    x, other = whole(4, 64, 3, 32).permute(0, 2, 1, 3), whole(4, 64, 3, 32, seed=1).permute(0, 2, 3, 1)
    for kept, value in zip(kept_by(matrix_product, x, other), (x, other), strict=True):
        assert kept.dtype == torch.int8
        assert kept.stride() == value.stride()
        assert torch.equal(kept.float(), value)
    repeated = whole(1, 64, 128).expand(3, 64, 128)
    assert torch.equal(fused_elementwise._wide(fused_elementwise._narrow(repeated)), repeated)


def test_little_is_kept_as_it_is() -> None:
    x = whole(8, 64)
    assert fused_elementwise._narrow(x) is x


@pytest.mark.parametrize("reach", [0.9, 1.5, float("nan")])
def test_gradients_end_where_the_grid_does(reach: float) -> None:
    value = torch.linspace(-1, 1, 1001)
    value[500] *= reach
    value, scale, bounds = value * (0.9 if reach != reach else reach) * 128, torch.tensor(1.0), (-128.0, 127.0)
    integers = value.nan_to_num().round().clamp(*bounds)
    one, other = (value.clone().requires_grad_() for _ in range(2))
    found, wanted = fused_layers.on_grid(one, integers, scale, bounds), straight_through((other / scale).clamp(*bounds), integers)
    assert torch.equal(found, integers)
    weights = torch.cos(value.nan_to_num())
    assert torch.equal(torch.autograd.grad((found * weights).sum(), one)[0], torch.autograd.grad((wanted * weights).sum(), other)[0])


def test_operands_that_are_not_rounded_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    x, layer = torch.randint(-64, 65, (128, 64), generator=generator) / 16, nn.Linear(64, 64)  # their sums are exact
    qconfig = fxq.QConfig(fxq.ActivationConfig(power_of_two=True), fxq.WeightConfig(power_of_two=True))
    prepared = contract.calibrated(layer, [x], "nash-e", qconfig)
    (operator,) = (each for each in quantized_operators(prepared).values() if each.operator.name == "linear")
    result = real_result(operator, {"input": x, "weight": layer.weight, "bias": layer.bias})
    weights = torch.randint(-8, 9, result.shape, generator=generator).float()
    (found,) = torch.autograd.grad((result * weights).sum(), layer.weight)
    assert torch.equal(found, weights.t() @ x)
