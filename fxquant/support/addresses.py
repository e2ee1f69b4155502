"""Take the addresses of tensors for functions in C, which read memory as it is.

PyTorch may keep a sign, a conjugation, or that all elements are 0, as a mark on a tensor instead of in its memory. Such a tensor is
copied first. A tensor without memory on the CPU is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its memory holds its values, else a copy whose memory does."""
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        return torch.empty_like(tensor).copy_(tensor)
    return tensor


def address(tensor: Tensor) -> int:
    """Return the address of the first element of a tensor of any dtype and strides; 0 if it has no elements.

    Raises RuntimeError if its memory does not hold its values, or is not on the CPU: meta, sparse, fake or transformed tensors.
    """
    plain = tensor.is_cpu and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # else a class may keep values elsewhere
    found = tensor.data_ptr() if plain else 0
    if tensor.is_neg() or tensor.is_conj() or (not found and tensor.numel()):
        raise RuntimeError(f"a function in C cannot read the memory of a tensor: {tensor.layout}, on {tensor.device}")
    return found


memory_start = Tensor.data_ptr  # of a tensor with memory, to be compared with what it was


def start(tensor: Tensor) -> int | None:
    """Return the address of a tensor in the memory of its device; None if its memory does not hold its values, or it has none."""
    return None if tensor.is_neg() or tensor.is_conj() or tensor.is_meta else tensor.data_ptr()


def point(structure: ctypes.Structure, tensors: Iterable[tuple[str, Tensor | None]]) -> list[Tensor]:
    """Set fields of a structure to the addresses of tensors, and leave a field as it is where the tensor is None.

    The result owns the memory: keep it until the function in C has returned. What C writes to has to be a new tensor, which
    has no mark.
    """
    held = [(name, readable(tensor)) for name, tensor in tensors if tensor is not None]
    for name, tensor in held:
        setattr(structure, name, address(tensor))
    return [tensor for _, tensor in held]
