"""Requirements on the tensors that are given to the tracer: they must be dense and have values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from fxquant.errors import ConfigurationError


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
