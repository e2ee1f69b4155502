"""The example inputs: which tensors become placeholders, what they are called, and which batch they have."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError, TraceError
from fxquant.frontend.batch_dimensions import batch_dimensions
from fxquant.frontend.handler import new_graph
from fxquant.frontend.signature import signature_of


@dataclass(frozen=True)
class ExampleInputs:
    """The arguments of one forward call.

    leaves     everything in the arguments, flattened
    names      the placeholder's name for every leaf that is a tensor, else None
    spec       how to rebuild (args, kwargs) from leaves
    axes       of every leaf the dimension that is the batch; None if no size of it is to vary
    signature  how forward was called
    renamed    what the user calls the inputs whose names generated code cannot use, by placeholder name
    """

    leaves: tuple[Any, ...]
    names: tuple[str | None, ...]
    spec: Any
    axes: tuple[int | None, ...]
    signature: list[list[Any]]
    renamed: dict[str, str]

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with other tensors, by placeholder name."""
        leaves = [leaf if name is None else tensors[name] for name, leaf in zip(self.names, self.leaves, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(args), kwargs

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the example tensors by placeholder name, in order."""
        return {name: leaf for name, leaf in zip(self.names, self.leaves, strict=True) if name is not None}

    @property
    def batch(self) -> int | None:
        """The batch size of the example; None if it is not to vary."""
        return next((int(leaf.shape[axis]) for leaf, axis in zip(self.leaves, self.axes, strict=True) if axis is not None), None)

    def fixed(self) -> ExampleInputs:
        """Return these inputs with every size fixed."""
        return replace(self, axes=(None,) * len(self.leaves))

    def with_batch(self, batch: int) -> dict[str, torch.Tensor]:
        """Return the example tensors with their samples repeated or truncated to another batch size."""

        def resized(tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor.index_select(axis, torch.arange(batch, device=tensor.device) % max(tensor.shape[axis], 1))

        entries = zip(self.names, self.leaves, self.axes, strict=True)
        return {name: leaf if axis is None else resized(leaf, axis) for name, leaf, axis in entries if name is not None}


def bind_inputs(model: nn.Module, example_inputs: Any, dynamic_shapes: Any, compared: bool = True) -> ExampleInputs:
    """Name the tensors of the example inputs after the parameters of the model's forward; `compared`: see `require_values`."""
    args, kwargs = _as_call(example_inputs)
    order = list(inspect.signature(model.forward).parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            "the example inputs do not fit the model's forward",
            because=str(error),
            remedy="pass a tuple of positional arguments, or a dict of keyword arguments",
        ) from error
    by_path = {**dict(zip(_positional_names(model, len(args)), args, strict=True)), **kwargs}
    leaves, spec = pytree.tree_flatten((list(args), kwargs))
    names = [name for path, value in by_path.items() for name in _leaf_names(path, value)]
    if not any(name is not None for name in names):
        raise ConfigurationError(
            "the example inputs hold no tensor",
            because="tensors among the inputs become the inputs of the graph",
            remedy="pass at least one tensor, for example (torch.randn(1, 3, 224, 224),)",
        )
    require_values(model, zip(names, leaves, strict=True), compared)
    written = _unique(names)
    graph = new_graph()
    legal = {name: graph.placeholder(name).name for name in written if name is not None}  # no keywords, no names of generated code
    names = [name if name is None or (hasattr(builtins, name) and name not in _BUILT_IN) else legal[name] for name in written]
    axes = batch_dimensions(model, args, kwargs, dynamic_shapes)
    tensors = [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    batches = [leaf.shape[axis] for leaf, axis in tensors if axis is not None] or [leaf.shape[0] for leaf, _ in tensors[:1]]
    if 0 in batches:
        raise ConfigurationError(
            "the example inputs hold an empty batch",
            because="the graph is compared with the model on them, and nothing would be compared",
            remedy="pass at least one row, for example (torch.randn(1, 3, 224, 224),)",
        )
    return ExampleInputs(
        leaves=tuple(leaves),
        names=tuple(names),
        spec=spec,
        axes=axes,
        signature=signature_of(model, args, kwargs, iter(names)),
        renamed={new: old for new, old in zip(names, written, strict=True) if new is not None and old is not None and new != old},
    )


def _as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict) and all(isinstance(name, str) for name in example_inputs):
        return (), dict(example_inputs)
    raise ConfigurationError(
        f"example inputs of type {type(example_inputs).__name__} cannot be used",
        because="forward is called with them",
        remedy="pass a tuple of positional arguments, or a dict of keyword arguments",
    )


def _positional_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def _leaf_names(path: str, value: Any) -> list[str | None]:
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return [path if isinstance(value, torch.Tensor) else None]
    return [f"{path}_{index}" if isinstance(leaf, torch.Tensor) else None for index, leaf in enumerate(leaves)]


def _unique(names: list[str | None]) -> list[str | None]:
    unique: list[str | None] = []
    for name in names:
        while name is not None and name in unique:
            name += "_"
        unique.append(name)
    return unique


# The built-in names that generated code may use. An input may have the name of any other: `input` is a common one.
_BUILT_IN = frozenset((
    "Ellipsis", "abs", "bool", "complex", "dict", "float", "frozenset", "getattr", "int", "len", "list", "max", "min", "pow", "range",
    "round", "set", "slice", "str", "sum", "tuple",
))  # fmt: skip


# ---- requirements on the tensors: they are dense and have values -----------------------------------------------------


def require_values(model: nn.Module, inputs: Iterable[tuple[str | None, Any]], compared: bool = True) -> None:
    """Raise ConfigurationError for example inputs that are sparse or nested, and for inputs or parameters without values.

    `inputs` are the leaves of the example inputs, each with its name if it is a tensor. Where graph and model are not `compared` on
    them, their shapes are enough.
    """
    for name, value in inputs:
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_nested or value.layout is not torch.strided:
            kind = "a nested" if value.is_nested else f"a {str(value.layout).removeprefix('torch.')}"
            raise ConfigurationError(
                f"the example input {name} is {kind} tensor",
                because="the inputs of a graph are dense: every element is stored",
                remedy="pad it with torch.nested.to_padded_tensor" if value.is_nested else "convert it with .to_dense()",
            )
        if value.is_meta and compared:
            raise ConfigurationError(
                f"the example input {name} has no values",
                because="it is on the device meta, and the graph is compared with the model on the example inputs",
                remedy="pass a tensor with values, of the device the model is on",
            )
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(parameter, UninitializedTensorMixin):
            raise ConfigurationError(
                f"the model's {name} has no shape yet",
                because="it belongs to a lazy module, which learns its sizes from the first inputs",
                remedy="call the model on the example inputs once",
            )
        if parameter.is_meta:
            raise ConfigurationError(
                f"the model's {name} has no values",
                because="it is on the device meta, and values become integers",
                remedy='give the model memory with model.to_empty(device="cpu"), and load its parameters',
            )
