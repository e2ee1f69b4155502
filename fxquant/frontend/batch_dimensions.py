"""Which dimension of each example input is the batch: what `dynamic_shapes` says, in the forms that `torch.export` takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError
from fxquant.support import logger

_HINT = type(Dim.AUTO)
_FORMS = "a tuple with an entry for each argument, or a dict by their names: dynamic_shapes=({1: torch.export.Dim('batch')},)"


@dataclass(frozen=True)
class _Varying:
    """A dimension that is said to vary.

    name   of the `Dim`; None for Dim.AUTO and Dim.DYNAMIC, which have no name
    """

    path: str
    dim: int
    name: str | None
    size: int


def batch_dimensions(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> tuple[int | None, ...]:
    """For each leaf of the arguments, flat, the dimension that is the batch; None for an input whose sizes are all fixed.

    With dynamic_shapes=None it is dimension 0 of every tensor whose size there is that of the first tensor. Otherwise it is
    the one dimension that `dynamic_shapes` marks: by a Dim, a name, Dim.AUTO or Dim.DYNAMIC; what is not mentioned is fixed.

    Raises ConfigurationError for what has none of these forms, and where more than one size would vary.
    """
    leaves = pytree.tree_leaves((list(args), dict(kwargs)))
    if dynamic_shapes is None or dynamic_shapes is True:
        first = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
        return tuple(0 if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == first else None for leaf in leaves)
    if dynamic_shapes is False or dynamic_shapes == {}:
        return (None,) * len(leaves)
    if isinstance(dynamic_shapes, torch.export.ShapesCollection | torch.export.AdditionalInputs):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, dict(kwargs))  # type: ignore[no-untyped-call]
    named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    if isinstance(dynamic_shapes, tuple | list) and len(dynamic_shapes) == len(named):
        dynamic_shapes = dict(zip(named, dynamic_shapes, strict=True))
    if not isinstance(dynamic_shapes, Mapping):
        entries = f" of {len(dynamic_shapes)} entries" if isinstance(dynamic_shapes, tuple | list) else ""
        _refuse(f"it is a {type(dynamic_shapes).__name__}{entries}, and forward is called with {', '.join(named)}")
    unknown = [str(name) for name in dynamic_shapes if name not in named]
    if unknown:
        _refuse(f"it has an entry for {', '.join(unknown)}, and forward is called with {', '.join(named)}")
    found = [mark for name, value in named.items() for mark in _marks(name, value, dynamic_shapes.get(name))]
    _require_one([mark for mark in found if mark is not None])
    return tuple(None if mark is None else mark.dim for mark in found)


def _marks(path: str, value: Any, said: Any) -> list[_Varying | None]:
    """Return the mark of each leaf of an argument: its batch dimension, or None."""
    if isinstance(value, Tensor):
        return [_of_tensor(path, value, said)]
    if said is None or (isinstance(said, Mapping | tuple | list) and not said):
        return [None] * len(pytree.tree_leaves(value))
    children, _ = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if len(children) == 1 and children[0] is value:
        _refuse(f"it has an entry for {path}, which is a {type(value).__name__} and has no dimensions")
    keys: list[Any] = list(value) if isinstance(value, Mapping) else list(range(len(children)))
    if isinstance(said, tuple | list) and len(said) == len(keys):
        said = dict(zip(keys, said, strict=True))
    if not isinstance(said, Mapping) or not set(said) <= set(keys):
        _refuse(f"its entry for {path} does not have the structure of that argument, a {type(value).__name__} of {len(keys)}")
    return [mark for key, child in zip(keys, children, strict=True) for mark in _marks(f"{path}[{key!r}]", child, said.get(key))]


def _of_tensor(path: str, tensor: Tensor, said: Any) -> _Varying | None:
    if isinstance(said, tuple | list) and len(said) == tensor.dim():
        said = dict(enumerate(said))
    if said is not None and not isinstance(said, Mapping):
        _refuse(f"its entry for {path}, a tensor of {tensor.dim()} dimensions, is {said!r}")
    found: list[_Varying] = []
    for dim, entry in (said or {}).items():
        if type(dim) is not int or not 0 <= dim < tensor.dim():
            _refuse(f"{path} has no dimension {dim!r}, but {tensor.dim()} dimensions, counted from 0")
        size = int(tensor.shape[dim])
        varies, name = _varies(path, dim, size, entry)
        if varies:
            found.append(_Varying(path, dim, name, size))
    if len(found) > 1:
        _refuse_several([f"dimension {each.dim} of {path}" for each in found])
    return found[0] if found else None


def _varies(path: str, dim: int, size: int, entry: Any) -> tuple[bool, str | None]:
    """Return whether a dimension varies that is marked so, and the name that it is given."""
    if entry is None or (isinstance(entry, _HINT) and entry.type.name == "STATIC"):
        return False, None
    if type(entry) is int and entry == size:
        return False, None
    if isinstance(entry, str):
        return True, entry
    if type(entry) is Dim or isinstance(entry, _HINT):
        if (entry.min or 0) > 2 or isinstance(entry.max, int):  # torch.export gives its own names 0 and infinity
            logger.info("dynamic_shapes: the bounds of %s are ignored; the model takes every batch size that its operators allow", entry)
        return True, entry.__name__ if isinstance(entry, Dim) else None
    if isinstance(entry, Dim):
        _refuse(f"dimension {dim} of {path} is {entry.__name__}, computed from another, and the batch has one size in all inputs")
    _refuse(f"dimension {dim} of {path}, whose size is {size}, is said to be {entry!r}")


def _require_one(marks: list[_Varying]) -> None:
    names = {mark.name for mark in marks if mark.name is not None}
    if len(names) > 1:
        _refuse_several(sorted(names))
    if len({mark.size for mark in marks}) > 1:
        sizes = ", ".join(f"{mark.size} in dimension {mark.dim} of {mark.path}" for mark in marks)
        _refuse(f"the dimensions that it marks differ in size in the example: {sizes}")


def _refuse_several(which: list[str]) -> NoReturn:
    raise ConfigurationError(
        f"dynamic_shapes lets more than one size vary: {', '.join(which)}",
        because="one size can vary, that of the batch, which all inputs that have it share",
        remedy="mark only the batch, with the same Dim in each input; a prepared model for each of the other sizes",
    )


def _refuse(because: str) -> NoReturn:
    raise ConfigurationError(
        "dynamic_shapes does not fit the example inputs",
        because=because,
        remedy=f"pass None where dimension 0 is the batch, {{}} to fix every size, or {_FORMS}",
    )
