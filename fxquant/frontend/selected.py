"""Elements selected by a mask: their number is unknown while tracing, so only elementwise functions may read them.

    x[x < 0] *= 0.1   →   x = where(x < 0, x * 0.1, x)

The functions are computed on all elements; the assignment back to the selected positions becomes a `where`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fxquant.frontend.values import COMPARISONS, Functions, TracedTensor, active, python_name, refuse
from fxquant.ir import graph

# Defined for all numbers, and hardly larger than these: computed everywhere, they neither make NaN nor widen a scale.
_ELEMENTWISE = frozenset((
    "add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "neg", "negative", "abs", "absolute", "sign", "square",
    "relu", "relu6", "leaky_relu", "clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "tanh", "sigmoid", "sin", "cos",
    "atan", "erf", "round", "floor", "ceil", "trunc", "silu", "gelu", "softsign", "clone", "detach", "contiguous", "float",
))  # fmt: skip
_PURE = frozenset(
    ("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert", "isnan", "isfinite", "isinf", "logical_not", "abs", "clone", "getitem")
)


class Selected:
    """The result of `input[mask]`, for a mask of the input's shape.

    whole  a tensor of that shape that holds the elements where the mask is true, and anything elsewhere
    mask   where they are
    """

    def __init__(self, whole: Tensor, mask: TracedTensor, at: Any = None) -> None:
        self._whole, self._mask, self._at = whole, mask, at or active().source()

    def refuse_as_output(self) -> NoReturn:
        """Raise the error of a model that returns it, at the line that selects."""
        _refuse(self._at)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _everywhere(func, getattr(func, "__name__", ""), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.removesuffix("_") not in _ELEMENTWISE:
            _refuse()
        return lambda *args, **kwargs: _everywhere(getattr(torch.Tensor, name.removesuffix("_")), name, (self, *args), kwargs)

    def __pow__(self, exponent: Any) -> Selected:
        if not isinstance(exponent, int) or exponent < 1:
            _refuse()
        return self._with(self._whole**exponent)

    def __ipow__(self, exponent: Any) -> Selected:
        return _into(self, self**exponent)

    def _with(self, whole: Tensor) -> Selected:
        return Selected(whole, self._mask, self._at)


def _binary(function: Callable[..., Any]) -> None:
    """Define a Python operator, its reflected form and its in-place form."""
    name = function.__name__
    setattr(Selected, f"__{name}__", lambda self, other: _everywhere(function, name, (self, other), {}))
    setattr(Selected, f"__r{name}__", lambda self, other: _everywhere(function, name, (other, self), {}))
    setattr(Selected, f"__i{name}__", lambda self, other: _everywhere(function, f"{name}_", (self, other), {}))


for _operator in (operator.add, operator.sub, operator.mul):
    _binary(_operator)
for _name, _written in (("__truediv__", "true_divide"), ("__itruediv__", "true_divide_")):
    setattr(Selected, _name, lambda self, other, written=_written: _everywhere(operator.truediv, written, (self, other), {}))
for _name, _function in (("__neg__", operator.neg), ("__abs__", operator.abs)):
    setattr(Selected, _name, lambda self, function=_function: _everywhere(function, function.__name__, (self,), {}))
_REFUSED: Functions = (operator.index, operator.getitem, operator.setitem, *COMPARISONS)
for _name in ("bool", "len", "iter", "float", "int", *map(python_name, _REFUSED)):
    setattr(Selected, f"__{_name}__", lambda *_: _refuse())


def _refuse(at: Any = None) -> NoReturn:
    refuse(
        "the model's Python depends on the content of a tensor",
        because="getitem needs numbers that are known only when the graph runs",
        remedy="use torch.where or a mask instead of a branch or an index, or move the decision out of forward",
        at=at,
    )


def _everywhere(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Selected:
    """Apply an elementwise function to selected elements and numbers. In place it changes the elements, never the tensor they are from."""
    of = [each for each in (*args, *kwargs.values()) if isinstance(each, Selected)]
    others = [each for each in (*args, *kwargs.values()) if not isinstance(each, Selected)]
    written = name.removesuffix("_")
    divided = "div" in name and (not isinstance(args[0], Selected) or len(of) > 1 or "rounding_mode" in kwargs)
    plain = all(each is None or (isinstance(each, int | float) and math.isfinite(each)) for each in others)
    together = all(_same(each._mask.node, of[0]._mask.node) for each in of)
    if written not in _ELEMENTWISE or divided or not plain or not together:
        _refuse()
    if name.endswith("_") and hasattr(torch.Tensor, written) and function is getattr(torch.Tensor, name, None):
        function = getattr(torch.Tensor, written)
    wholes = [each._whole if isinstance(each, Selected) else each for each in args]
    result = of[0]._with(function(*wholes, **{key: each._whole if isinstance(each, Selected) else each for key, each in kwargs.items()}))
    return _into(of[0], result) if name.endswith("_") else result


def _into(target: Selected, result: Selected) -> Selected:
    target._whole = result._whole
    return target


def _same(one: Any, other: Any) -> bool:
    """Return whether two nodes have one value: they are one, or the same comparison of the same."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and bool(one == other)
    if one is other:
        return True
    alike = one.op == other.op != "placeholder" and one.target == other.target and one.kwargs == other.kwargs
    pure = alike and graph.target_name(one) in _PURE and len(one.args) == len(other.args)
    return pure and all(map(_same, one.args, other.args))


def _as_it_is(tensor: TracedTensor) -> TracedTensor:
    """Return the present value of a tensor, which later changes do not affect."""
    tensor.shape  # noqa: B018  # brings it up to date with what was written through views
    return TracedTensor(tensor.node, tensor.value)


def _is_list_of_truth_values(place: Any) -> bool:
    return type(place) is list and bool(place) and all(type(item) is bool for item in place)


def select(input: Any, index: Any) -> Any:
    """Return `input[index]`, where the index is a mask of its shape, or holds lists of booleans; NotImplemented otherwise."""
    places = index if isinstance(index, tuple) else (index,)
    if any(map(_is_list_of_truth_values, places)):
        return input[tuple(torch.tensor(place, device="cpu") if _is_list_of_truth_values(place) else place for place in places)]
    if not isinstance(input, TracedTensor) or not isinstance(index, TracedTensor) or index.dtype != torch.bool or index.value.real:
        return NotImplemented
    if not input.is_floating_point() or input.value.shapes != index.value.shapes:
        return NotImplemented
    return Selected(_as_it_is(input), _as_it_is(index))


def assign(input: Any, index: Any, value: Any) -> Any:
    """Record `input[index] = value` as a `where` if `value` was selected with the same mask; return NotImplemented for other values."""
    if not isinstance(value, Selected):
        return NotImplemented
    if not isinstance(index, TracedTensor) or not _same(_as_it_is(index).node, value._mask.node):
        _refuse()
    if input.dtype != value._whole.dtype or input.shape != value._whole.shape:
        _refuse()
    input.copy_(torch.where(index, value._whole, input))
    return None
