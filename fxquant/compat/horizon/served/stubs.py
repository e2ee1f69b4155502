"""The modules that Horizon's programs place in a float model: where integers begin and end, and arithmetic as a module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxquant.errors import ConfigurationError
from fxquant.support.arguments import NUMBER, accepted

logger = logging.getLogger("fxquant")

BY_FUNCTION: Any = object()  # the scale that the function gives which prepares the model
SCALE = NUMBER.or_none("it is observed")
_given: list[float | None] = [None]  # what stubs have meanwhile that are given no scale


class QuantStub(nn.Module):
    """Integers begin here.

    scale    None: it is observed. Where none is given, `prepare_qat_fx` and `prepare_qat` for a march up to bayes-e take 1/128, as the
             plugin's releases for these do, and `prepare`, or any march of nash, observes it
    qconfig  a qconfig of its own: the dtype, and how the scale is found
    """

    def __init__(self, scale: float | None = BY_FUNCTION, zero_point: int | None = None, qconfig: Any = None) -> None:
        super().__init__()
        if zero_point:
            raise ConfigurationError(
                f"zero_point={zero_point} cannot be used", because="the marches' integers are symmetric", remedy="leave it at 0"
            )
        self._scale = scale if scale is BY_FUNCTION else accepted("QuantStub", "scale", scale, SCALE)
        if qconfig is not None:
            self.qconfig = qconfig

    @property
    def scale(self) -> float | None:
        """The scale that it has where it is prepared; None if it is observed."""
        return _given[0] if self._scale is BY_FUNCTION else self._scale

    @scale.setter
    def scale(self, scale: float | None) -> None:
        self._scale = accepted("QuantStub", "scale", scale, SCALE)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_scale" or value is not BY_FUNCTION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_scale", BY_FUNCTION)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantStub:
        copied = type(self).__new__(type(self))
        copied.__setstate__({**self.__getstate__(), "_modules": {}, "_parameters": {}, "_buffers": {}})
        return copied

    def forward(self, input: Tensor) -> Tensor:
        """The input itself."""
        return input


@contextmanager
def scale_of_stubs(model: nn.Module, scale: float | None, why: str) -> Iterator[None]:
    """Inside, stubs that are given no scale have this one; a line of the log says which those are, and why."""
    open_ = [path for path, module in model.named_modules() if isinstance(module, QuantStub) and module._scale is BY_FUNCTION]
    if open_:
        taken = "observed" if scale is None else f"{scale:g}"
        logger.info("the scale of QuantStub %s is %s: %s", ", ".join(open_), taken, why)
    before, _given[0] = _given[0], scale
    try:
        yield
    finally:
        _given[0] = before


class DeQuantStub(nn.Module):
    """Integers end here."""

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """The input itself."""
        return input


class FloatFunctional(nn.Module):
    """Arithmetic on tensors and numbers, as methods of a module."""

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        if qconfig is not None:
            self.qconfig = qconfig

    FUNCTIONS: ClassVar[Mapping[str, Callable[..., Tensor]]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
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

    @staticmethod
    def cap(x: list[Tensor], dim: int = 0) -> Tensor:
        """The tensors, one behind the other: the name that older releases have for `cat`."""
        return torch.cat(x, dim)

    @staticmethod
    def matmul(x: Tensor, y: Tensor, x_trans: bool = False, y_trans: bool = False) -> Tensor:
        """The product, of matrices that are transposed first where that is asked for."""
        return torch.matmul(x.transpose(-2, -1) if x_trans else x, y.transpose(-2, -1) if y_trans else y)

    def forward(self, *_: Any) -> Tensor:
        """Raises ConfigurationError: its methods are what is called."""
        raise ConfigurationError("a FloatFunctional was called", because="it stands for several functions", remedy="call one: f.add(x, y)")
