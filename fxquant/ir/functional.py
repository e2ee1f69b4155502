"""Out-of-place forms of in-place operations that PyTorch offers no function for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def stopped(value: Any) -> Any:
    """Detach a tensor, or a nest of them."""
    return tree_map(lambda each: each.detach() if isinstance(each, torch.Tensor) else each, value)


def setitem(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Return a copy of `tensor` in which `tensor[index]` is `value`."""
    result = tensor.clone()
    result[index] = value
    return result


def copy(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return `source`, broadcast to the shape of `tensor` and converted to its dtype."""
    return source.to(tensor.dtype).expand_as(tensor)


def fill(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """Return a tensor like `tensor` that holds `value` everywhere."""
    return torch.full_like(tensor, value)


def zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `tensor` that holds zeros."""
    return torch.zeros_like(tensor)


def write(tensor: torch.Tensor, value: torch.Tensor, way: Any) -> torch.Tensor:
    """Return a copy of `tensor` in which a view of it holds `value`.

    `way` leads there: (name, arguments, keyword arguments) of one method after the other, each one of VIEWS. Raises ValueError for
    another method.
    """
    result = tensor.clone()
    view_of(result, way).copy_(value)
    return result


def view_of(tensor: torch.Tensor, way: Any) -> Any:
    """Return the view of `tensor` that `way` leads to, as in `write`. Raises ValueError for a method that makes no view."""
    view: Any = tensor
    for name, args, kwargs in way:
        if name == "getattr" and args in (("T",), ("mT",)):
            view = getattr(view, args[0])
        elif name in VIEWS and name != "getattr":
            view = getattr(view, name)(*args, **kwargs) if isinstance(view, torch.Tensor) else view[args[0]]
        else:
            raise ValueError(f"{name} does not make a view")
    return view


# Methods whose results are views of the tensor, and share its elements out among the items of a sequence.
PARTITIONS = frozenset(("chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind"))
# All methods that `write` can follow.
VIEWS = PARTITIONS | frozenset((
    "__getitem__", "diagonal", "expand", "expand_as", "flatten", "getattr", "movedim", "moveaxis", "narrow", "permute", "ravel",
    "reshape", "reshape_as", "select", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unflatten", "unsqueeze", "view", "view_as",
))  # fmt: skip
