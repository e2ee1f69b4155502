"""Save the operands of integer products for backward in as many bits as they need, mostly a quarter of the memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fxquant.primitives import PRIMITIVES, Role
from fxquant.training import fused_elementwise, fused_layers

PRODUCTS = (Role.LINEAR, Role.MATRIX_PRODUCT)  # of convolutions a step would cost 3 to 7 % more, and they are within float's memory anyway
SMALLEST = 2**12  # elements of a tensor
_DTYPES = (torch.int8, torch.uint8, torch.int16)


def kept_narrow(primitive: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a context in which a primitive may be called: if it is one of `PRODUCTS`, its operands are saved in a narrow dtype."""
    record = PRIMITIVES[primitive]
    narrow = record.role in PRODUCTS and not record.wide and torch.is_grad_enabled() and fused_layers.admitted(*arguments[:2])
    return torch.autograd.graph.saved_tensors_hooks(_narrow, _wide) if narrow else contextlib.nullcontext()


def _narrow(value: Tensor) -> Tensor:
    """Return integers in the first of `_DTYPES` that holds them all, with their strides; small or other tensors as they are."""
    if value.dtype != torch.float32 or value.numel() < SMALLEST:
        return value
    flat = torch.empty_like(value, dtype=torch.int8, device="meta").stride() == value.stride()
    passes = fused_elementwise.offered(value) if flat else None
    if passes is not None:
        found = passes.to_bytes(value.as_strided((value.numel(),), (1,)))
        if found is not None:
            return found.as_strided(value.shape, value.stride())
    low, high = (float(end) for end in torch.aminmax(value))
    for dtype in _DTYPES:
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return value.to(dtype)
    return value


def _wide(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.float()
