"""Name the parameters of operators in errors, and find those that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

from fxquant.errors import NotFinite
from fxquant.quantization.batch_norm import BatchNorm


def first_not_finite(parameters: Mapping[str, Tensor | None]) -> str | None:
    """Return a text that names the first tensor with NaN or infinite values; None if all are finite. The keys are the names."""
    for name, value in parameters.items():
        if value is not None and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"{name} holds {'NaN' if bool(torch.isnan(value).any()) else 'infinite values'}"
    return None


def named_parameters(weight: Tensor | None, bias: Tensor | None, batch_norm: BatchNorm | None) -> dict[str, Tensor | None]:
    """Return the parameters that the integers of a layer are computed from, by their descriptions in errors."""
    named = {"its weight": weight, "its bias": bias}
    if batch_norm is not None:
        for name in ("weight", "bias", "running_mean", "running_var"):
            named[f"the {name} of its batch norm"] = getattr(batch_norm, name)
    return named


def cannot_be_integers(name: str, because: str, at: str, module: str) -> NotFinite:
    """Return the error for parameters that are not finite."""
    return NotFinite(
        f"the parameters of %{name} cannot become integers",
        at=at,
        module=module,
        because=because,
        remedy="load the last checkpoint whose parameters are finite; if training made them so, lower the learning rate or clip gradients",
    )


class Place(TypedDict):
    """The user's line and module that an operator came from, as errors take them."""

    at: str
    module: str
