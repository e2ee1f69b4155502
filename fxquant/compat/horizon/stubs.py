"""The modules that Horizon's programs place in a float model: where integers begin and end, and arithmetic as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxquant.arguments import NUMBER, checked
from fxquant.errors import ConfigurationError


class QuantStub(nn.Module):
    """Integers begin here, on a scale of 1/128 unless another is given; None has it observed."""

    @checked(scale=NUMBER.or_none("it is observed"))
    def __init__(self, scale: float | None = 1.0 / 128.0, zero_point: int | None = 0, qconfig: Any = None) -> None:
        super().__init__()
        if zero_point:
            raise ConfigurationError(
                f"zero_point={zero_point} cannot be used", because="the marches' integers are symmetric", remedy="leave it at 0"
            )
        self.scale = scale
        if qconfig is not None:
            self.qconfig = qconfig

    def forward(self, input: Tensor) -> Tensor:
        """The input itself."""
        return input


class DeQuantStub(nn.Module):
    """Integers end here."""

    def forward(self, input: Tensor) -> Tensor:
        """The input itself."""
        return input


class FloatFunctional(nn.Module):
    """Arithmetic on tensors and numbers, as methods of a module."""

    FUNCTIONS: ClassVar[Mapping[str, Callable[..., Tensor]]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "matmul": torch.matmul,
        "add_scalar": torch.add,
        "mul_scalar": torch.mul,
        "cat": torch.cat,
        "stack": torch.stack,
        "sum": torch.sum,
        "mean": torch.mean,
        "exp": torch.exp,
        "log": torch.log,
        "sqrt": torch.sqrt,
        "pow": torch.pow,
        "sin": torch.sin,
        "cos": torch.cos,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "reciprocal": torch.reciprocal,
    }

    def __getattr__(self, name: str) -> Any:
        """One of these functions, or what a module has of that name."""
        return self.FUNCTIONS[name] if name in self.FUNCTIONS else super().__getattr__(name)

    @staticmethod
    def add_relu(input: Tensor, other: Tensor) -> Tensor:
        """relu(input + other)"""
        return torch.relu(torch.add(input, other))

    def forward(self, *_: Any) -> Tensor:
        """Raises ConfigurationError: its methods are what is called."""
        raise ConfigurationError("a FloatFunctional was called", because="it stands for several functions", remedy="call one: f.add(x, y)")
