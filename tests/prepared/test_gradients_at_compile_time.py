"""What has no gradient, or raises by itself, is met while a model is compiled: without gradients, and with the user's own errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ops import BY_NAME, FUNCTIONS, OPERATORS
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.written import written


class RoundedWeight(nn.Module):
    """A linear layer whose weight goes through PyTorch's fake quantization, with scales that are parameters."""

    def __init__(self, rounded: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.rounded, self.layer = rounded, nn.Linear(8, 8)
        self.scale, self.scales = nn.Parameter(torch.tensor([0.05])), nn.Parameter(torch.full((8,), 0.05))
        self.zero, self.zeros = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded(self), self.layer.bias)


ROUNDED: dict[str, Callable[[Any], Tensor]] = {
    "per channel": lambda m: torch.fake_quantize_per_channel_affine(m.layer.weight, m.scales, m.zeros.int(), 0, -128, 127),
    "per tensor": lambda m: torch.fake_quantize_per_tensor_affine(m.layer.weight, m.scale, m.zero.int(), -128, 127),
    "computed": lambda m: torch.fake_quantize_per_channel_affine(m.layer.weight, m.scales.abs() + 0.01, m.zeros.int(), 0, -128, 127),
    "learned": lambda m: torch._fake_quantize_learnable_per_channel_affine(m.layer.weight, m.scales, m.zeros, 0, -128, 127, 1.0),
    "without a gradient": lambda m: torch.fake_quantize_per_channel_affine(
        m.layer.weight, m.scales.detach(), m.zeros.detach().int(), 0, -128, 127
    ),
}


@pytest.mark.parametrize("form", ROUNDED)
def test_a_weight_with_fake_quantization_is_compiled_whatever_its_scale_is(form: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 8) for _ in range(3)]
    prepared, integer = compiled(RoundedWeight(ROUNDED[form]).eval(), batches)
    assert fxq.explain(prepared).count("none is left in float") == 1
    contract.assert_validate_is_integer(prepared, integer, batches[0])


class OutOfReachError(Exception):
    """An error of the user's own."""


def raises(function: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    """A model that can be traced, and that raises when it is called on numbers."""
    return written(lambda m, x: m.function(m, m.layer(x)), layer=nn.Linear(8, 8), function=function)


def own(model: nn.Module, y: Tensor) -> Tensor:
    if type(y) is Tensor:
        raise OutOfReachError("the lidar is off")
    return y


RAISED: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "its own": (own, OutOfReachError, "raise OutOfReachError"),
    "an index": (lambda m, y: F.embedding((y * 1000).long(), m.layer.weight), IndexError, "F.embedding"),
    "a singular matrix": (lambda m, y: torch.linalg.inv(torch.zeros_like(y.t() @ y)), RuntimeError, "linalg.inv"),
    "a class": (lambda m, y: F.cross_entropy(y, (y[:, 0] * 0).long() + 99), IndexError, "cross_entropy"),
    "a gather": (lambda m, y: y.gather(1, (y * 0).long() + 8), RuntimeError, "gather"),
    "no such row": (lambda m, y: y.index_select(0, (y[:, 0] * 0).long() + 8), IndexError, "index_select"),
}


@pytest.mark.parametrize("form", RAISED)
def test_an_error_of_the_float_model_comes_through_as_it_is_with_a_note_where(form: str, caplog: pytest.LogCaptureFixture) -> None:
    function, kind, line = RAISED[form]
    with pytest.raises(kind) as raised, caplog.at_level(logging.ERROR, "fxquant"):
        fxq.prepare(raises(function).eval(), torch.rand(4, 8))
    (note,) = getattr(raised.value, "__notes__", None) or caplog.messages  # Python 3.10 has no notes
    assert "raised by the float model, which fxquant calls on the example inputs" in note
    assert "test_gradients_at_compile_time.py" in note
    assert line in note


@pytest.fixture
def declared() -> Iterator[list[Callable[..., Tensor]]]:
    """Functions that are operators as long as a test runs."""
    found: list[Callable[..., Tensor]] = []
    yield found
    for function in found:
        del BY_NAME[OPERATORS[function].name]
        for table in (OPERATORS, FUNCTIONS):
            del table[function]


@pytest.mark.parametrize("function", [torch.tanh, F.mish, nn.Tanh(), nn.Softplus(2.0)], ids=["torch", "functional", "module", "settings"])
def test_a_function_of_pytorchs_may_be_a_table_of_another_name(function: Any, declared: list[Any]) -> None:
    table = fxq.extend.unary("bent_elsewhere", function)
    declared.append(table)
    batches = [torch.randn(8, 8) for _ in range(2)]
    prepared, integer = compiled(raises(lambda m, y: table(y)).eval(), batches)
    assert "bent_elsewhere" in fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, batches[0])
