"""Numbers and constant tensors that are added: held by the oracle, and within a step or a few of the true sum whatever their size."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.integer import qparams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.quantization.observers import MinMaxObserver
from tests.shared import oracle
from tests.shared.contract import compiled, graph_values

FORMATS = (("bayes-e", "int8"), ("bayes-e", "int16"), ("nash-e", "int8"), ("nash-e", "int16"), ("bernoulli", "int8"), ("qnnpack", "int8"))
SIZES = (1e-9, 1e-3, 0.4, 3.0, 273.15, 1e4, 1e9, 1e20)  # beside values of about 1


def beyond(errors: list[float], forms: Sequence[str], target: str, dtype: str) -> list[float]:
    """The errors above the steps that a sum may be off by.

    int16 on bayes-e is requantized by 16 and 15 bits, which loses two more, and a number is 127 steps (CHIP.md, sections 16 and 18); a
    ReLU that no layer has is a table there, which loses one (section 10).
    """
    wide = (target, dtype) == ("bayes-e", "int16")
    return [
        error for error, form in zip(errors, itertools.cycle(forms), strict=False) if not error <= (4 + (form == "relu") if wide else 1)
    ]


by_format = pytest.mark.parametrize(("target", "dtype"), FORMATS, ids=lambda value: str(value))

Form = Callable[[Tensor, Any], Tensor]
FORMS: dict[str, Form] = {
    "x + c": lambda x, c: x + c, "c - x": lambda x, c: c - x, "x - c": lambda x, c: x - c, "rsub": lambda x, c: torch.rsub(x, c),
    "x + 3c": lambda x, c: torch.add(x, c, alpha=3), "relu": lambda x, c: torch.relu(x + c), "clamp": lambda x, c: (c - x).clamp(-5, 1e4),
}  # fmt: skip


class Sums(nn.Module):
    """Every form of the input and every constant, each an output."""

    def __init__(self, *constants: Any, forms: Sequence[str] = tuple(FORMS)) -> None:
        super().__init__()
        self.forms, self.plain = forms, constants
        for index, constant in enumerate(constants):
            if isinstance(constant, Tensor):
                self.register_buffer(f"constant{index}", constant)

    def forward(self, x: Tensor) -> list[Tensor]:
        constants = [getattr(self, f"constant{index}", plain) for index, plain in enumerate(self.plain)]
        return [FORMS[form](x, constant) for constant in constants for form in self.forms]


def quantized(model: nn.Module, x: Tensor, target: str, dtype: str) -> dict[str, tuple[Tensor, float]]:
    """The integers and the scale of the input, then of every sum, by name."""
    integer = compiled(model, [x], target, fxq.QConfig(fxq.ActivationConfig(dtype, observer=MinMaxObserver))).integer
    values = graph_values(integer, x)
    return {node.name: (values[node.name], float(grid.scale)) for node in integer.graph.nodes if (grid := qparams(node)) is not None}


def errors_in_steps(model: Sums, x: Tensor, target: str, dtype: str) -> list[float]:
    """The distance of each sum from the true one, of what the quantized input stands for, in steps of the sum."""
    (integers, scale), *sums = quantized(model, x, target, dtype).values()
    exact = model.double()(integers.double() * scale)
    assert len(sums) == len(exact)
    return [float((value.double() - true / step).abs().max()) for (value, step), true in zip(sums, exact, strict=True)]


@pytest.mark.sweep(2)
@by_format
def test_a_number_of_any_size_is_added_within_one_step(target: str, dtype: str) -> None:
    x = torch.randn(64, 3)
    numbers = [sign * size for size in SIZES for sign in (1, -1)]
    errors = errors_in_steps(Sums(*numbers, forms=("x + c", "c - x", "relu")), x, target, dtype)
    assert beyond(errors, ("x + c", "c - x", "relu"), target, dtype) == []


@pytest.mark.sweep(2)
@by_format
def test_a_constant_tensor_of_any_size_is_added_within_one_step(target: str, dtype: str) -> None:
    """Also of int16, whose steps are finer than an int8 constant's."""
    errors = errors_in_steps(Sums(*(torch.tensor([1.0, -0.7371, 0.0123]) * size for size in SIZES)), torch.randn(64, 3), target, dtype)
    assert beyond(errors, tuple(FORMS), target, dtype) == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), FORMATS[2:4], ids=str)
def test_the_sum_with_a_constant_is_the_oracles(target: str, dtype: str) -> None:
    numbers = (1e-3, 0.37, 61.0, 273.15, 1e6, -1e12)
    kind, rules = ACTIVATION_TYPES[dtype], oracle.Rules("real")
    for constants in (numbers, tuple(torch.tensor([number]) for number in numbers)):
        (integers, scale), *sums = quantized(Sums(*constants, forms=("x + c",)), torch.randn(200, 1), target, dtype).values()
        for number, (result, output) in zip(constants, sums, strict=True):
            exact = Fraction(float(number))
            x, to = (oracle.Grid(Fraction(step), kind.low, kind.high, kind.bits) for step in (scale, output))
            slow = [oracle.added_constant(q, exact, exact, x, to, rules) for q in integers.flatten().tolist()]
            assert result.flatten().tolist() == slow, number
