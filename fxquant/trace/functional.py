"""Out-of-place spellings for in-place operations that PyTorch offers no function for."""

from __future__ import annotations

from typing import Any

import torch


def setitem(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """A copy of `tensor` in which `tensor[index]` is `value`."""
    result = tensor.clone()
    result[index] = value
    return result


def copy(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`source`, broadcast to the shape of `tensor` and converted to its type."""
    return source.to(tensor.dtype).expand_as(tensor)


def fill(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """A tensor like `tensor` that holds `value` everywhere."""
    return torch.full_like(tensor, value)


def zero(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor` that holds zeros."""
    return torch.zeros_like(tensor)
