"""Modules and markers that Horizon's programs place in a float model: the ends of its integer part, arithmetic, and code kept whole."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat.common import refused
from fxquant.errors import ConfigurationError
from fxquant.frontend import default_leaf
from fxquant.prepared.undo import Having, having
from fxquant.support import logger
from fxquant.support.arguments import NUMBER, accepted

SCALE = NUMBER.or_none("it is observed")


class ByFunction:
    """Stands for the scale that the preparing function sets. Copies and files of a stub hold the class itself."""

    scale: float | None = None  # the current one


BY_FUNCTION: Any = ByFunction


class QuantStub(nn.Module):
    """The beginning of the integer part.

    scale    None: it is observed. By default, `prepare_qat_fx` and `prepare_qat` for a march up to bayes-e use 1/128, as the
             plugin's releases for these do; `prepare`, or any march of nash, observes it
    qconfig  the stub's qconfig: its dtype and observer
    """

    def __init__(self, scale: float | None = BY_FUNCTION, zero_point: int | None = None, qconfig: Any = None) -> None:
        super().__init__()
        if zero_point:
            raise refused("QuantStub", zero_point=zero_point)
        self._scale = scale if scale is BY_FUNCTION else accepted("QuantStub", "scale", scale, SCALE)
        if qconfig is not None:
            self.qconfig = qconfig

    @property
    def scale(self) -> float | None:
        """Return the scale that the stub is prepared with; None if it is observed."""
        return ByFunction.scale if self._scale is BY_FUNCTION else self._scale

    @scale.setter
    def scale(self, scale: float | None) -> None:
        self._scale = accepted("QuantStub", "scale", scale, SCALE)

    def forward(self, input: Tensor) -> Tensor:
        return input


def scale_of_stubs(model: nn.Module, scale: float | None, why: str) -> Having:
    """Return a context in which stubs without a scale of their own have `scale`; log the names of these stubs and the reason `why`."""
    open_ = [path for path, module in model.named_modules() if isinstance(module, QuantStub) and module._scale is BY_FUNCTION]
    if open_:
        logger.info("the scale of QuantStub %s is %s: %s", ", ".join(open_), "observed" if scale is None else f"{scale:g}", why)
    return having([ByFunction], scale=scale)


class DeQuantStub(nn.Module):
    """The end of the integer part."""

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return input


def _matmul(x: Tensor, y: Tensor, x_trans: bool = False, y_trans: bool = False) -> Tensor:
    return torch.matmul(x.transpose(-2, -1) if x_trans else x, y.transpose(-2, -1) if y_trans else y)


class FloatFunctional(nn.Module):
    """Arithmetic on tensors and numbers, as methods of a module."""

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        if qconfig is not None:
            self.qconfig = qconfig

    FUNCTIONS: ClassVar[Mapping[str, Callable[..., Tensor]]] = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "add_scalar": torch.add, "mul_scalar": torch.mul,
        "cat": torch.cat, "stack": torch.stack, "sum": torch.sum, "mean": torch.mean, "exp": torch.exp, "log": torch.log,
        "sqrt": torch.sqrt, "pow": torch.pow, "sin": torch.sin, "cos": torch.cos, "maximum": torch.maximum, "minimum": torch.minimum,
        "reciprocal": torch.reciprocal, "add_relu": lambda input, other: torch.relu(torch.add(input, other)), "matmul": _matmul,
        "cap": torch.cat,  # the name of `cat` in older releases
    }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Return one of these functions as a call of the module, whose path its operators then have; or the module's attribute."""
        return functools.partial(self, name) if name in self.FUNCTIONS else super().__getattr__(name)

    def forward(self, name: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the function of this name. Raises ConfigurationError for a call of the module without one."""
        if isinstance(name, str):
            return self.FUNCTIONS[name](*args, **kwargs)
        raise ConfigurationError("a FloatFunctional was called", because="it stands for several functions", remedy="call one: f.add(x, y)")


def with_paths(model: nn.Module) -> Having:
    """Return a context in which the FloatFunctional modules of a model, PyTorch's too, are of this file's class, for rules by path."""
    kinds = [(module, type(module)) for module in model.modules()]
    functionals = [module for module, kind in kinds if f"{kind.__module__[:6]}{kind.__name__}" == "torch.FloatFunctional"]
    return having(functionals, __class__=FloatFunctional)


_WHOLE: set[type] = set()  # classes of modules that `wrap(skip_compile=True)` has marked


def wrap(skip_compile: Any = False) -> Any:
    """Decorate a function, a method or a module's class.

    skip_compile  False: the decorated object is traced as anything else, so that its operators become integers; True: it is kept whole,
                  in float, on the host, as `fxquant.wrap` keeps a function, and the option `leaf` a module

    Raises ConfigurationError if any other object is decorated.
    """
    if not isinstance(skip_compile, bool):  # @wrap, without a call
        return wrap()(skip_compile)

    def mark(what: Any) -> Any:
        if not callable(what) and not isinstance(what, str):
            raise refused("wrap", kind=type(what).__name__)
        if not skip_compile:
            return what
        if isinstance(what, type) and issubclass(what, nn.Module):
            _WHOLE.add(what)
            return what
        return fxq.wrap(what)

    return mark


def leaves(model: nn.Module) -> Callable[[nn.Module, str], bool] | None:
    """Return which modules of a model stay whole; None if none of its classes was marked."""
    if not any(type(module) in _WHOLE for module in model.modules()):
        return None
    return lambda module, path: type(module) in _WHOLE or default_leaf(module, path)


class Tracer:
    """The plugin's tracer: programs use one marker of it."""

    @staticmethod
    @contextlib.contextmanager
    def dynamic_block(model: nn.Module, name: str) -> Iterator[None]:
        """Mark a part of forward whose Python depends on data. It is traced like the rest, with TraceError if that is impossible."""
        yield


def typechecked(function: Any) -> Any:
    """Return the function unchanged: arguments are checked where they are used."""
    return function
