"""Indexing several dimensions at once: its float functions, and the conversion of a model's index entries.

PyTorch applies numbers, slices and None first; the remaining lists are broadcast with each other, and the dimensions of the picked
elements take the place of the first list, or come first if the lists are not adjacent.
"""

import builtins
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, fact, is_parameter, parameter_value, shape_of

SHAPING = ("view", "reshape", "unsqueeze", "getitem", "to")  # what gives a row of numbers further dimensions
WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def tensors(lists: Sequence[Any], device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """Return lists of integers as entries of an index; None is a whole dimension."""
    return tuple(builtins.slice(None) if entry is None else torch.tensor(entry, device=device) for entry in lists)


def index(input: Tensor, lists: list[Any]) -> Tensor:
    """Return input[lists]: for every dimension None, which leaves it whole, or a list of integers, which may be nested."""
    return input[tensors(lists, input.device)]


def index_parts(input: Tensor, index: list[Any], lists: list[Any]) -> Tensor:
    """Return input[index], an index without lists, and of that result [lists]."""
    return _index(input[tuple(index)], lists)


def index_put(input: Tensor, lists: list[Any], value: Tensor | float) -> Tensor:
    """Return a copy of `input` in which input[lists] is one number."""
    result = input.clone()
    result[tensors(lists, input.device)] = value
    return result


def pick_parts(input: Tensor, index: list[Any], dim: int, places: Tensor) -> Tensor:
    """Return input[index], an index without lists, and of that result the slices along a dimension at the places."""
    where: tuple[Any, ...] = (*[builtins.slice(None)] * dim, places)
    return input[tuple(index)][where]


_index = index


def pick_each(input: Tensor, dim: int, places: Tensor) -> Tensor:
    """Index `input` along `dim` with a different list `places` [batch, …] for each item: [batch, …, the other dimensions]."""
    order = [0, dim, *(d for d in range(1, input.dim()) if d != dim)]
    items = torch.arange(input.shape[0], device=input.device).reshape(-1, *[1] * (places.dim() - 1))
    return input.permute(order)[items, places]


def constant_value(entry: Any) -> Tensor | None:
    """Return the value of a parameter's node; None of anything else."""
    if not isinstance(entry, fx.Node) or not is_parameter(entry) or entry.graph.owning_module is None:
        return None
    value = parameter_value(entry.graph.owning_module, entry)
    return value if isinstance(value, Tensor) else None


def plain_entries(entries: list[Any]) -> list[Any]:
    """Return the entries of an index, with constant tensors as lists if there are several, one is a mask, or one has several dimensions.

    A mask is the lists of the places where it holds.
    """
    values = [constant_value(entry) for entry in entries]
    lists = sum(value is not None or isinstance(entry, list | tuple | range) for value, entry in zip(values, entries, strict=True))
    plain: list[Any] = []
    for entry, value in zip(entries, values, strict=True):
        if isinstance(entry, range):
            plain.append(list(entry))
        elif isinstance(entry, list | tuple) and entry and all(isinstance(number, bool) for number in entry):
            plain.append([place for place, holds in enumerate(entry) if holds])
        elif value is not None and value.dtype == torch.bool and value.dim():
            plain.extend(places.tolist() for places in torch.nonzero(value, as_tuple=True))
        elif value is not None and value.dtype in WHOLE_NUMBERS and (lists > 1 or value.dim() != 1):
            plain.append(value.tolist())
        else:
            plain.append(entry)
    return plain


def is_list(entry: Any) -> bool:
    """Return whether an entry of an index is a list."""
    return isinstance(entry, list | tuple)


def counts_the_batch(entry: Any, input: fx.Node, places: fx.Node) -> bool:
    """Return whether an entry of an index is `torch.arange` of the batch size of `input`, one number for each item of `places`."""
    entry_fact, other, batch = fact(entry), fact(places), shape_of(input)[0]
    if not isinstance(entry_fact, TensorFact) or not isinstance(other, TensorFact) or not other.shape:
        return False
    if entry_fact.shape != (batch, *[1] * (len(other.shape) - 1)) or other.shape[0] != batch:
        return False
    value = constant_value(entry)
    if value is not None:
        return torch.equal(value.flatten(), torch.arange(value.numel(), device=value.device))
    while (
        entry.target is not torch.arange
        and getattr(entry.target, "__name__", entry.target) in SHAPING
        and isinstance(entry.args[0], fx.Node)
    ):
        entry = entry.args[0]
    if entry.target is not torch.arange:
        return False
    start, step = entry.kwargs.get("start", 0), entry.kwargs.get("step", 1)
    if len(entry.args) > 1:
        start, step = entry.args[0], entry.args[2] if len(entry.args) > 2 else step
    return bool(start == 0 and step == 1)


def is_arange(node: fx.Node) -> bool:
    """Return whether a node is a call of torch.arange."""
    return node.op == "call_function" and node.target is torch.arange
