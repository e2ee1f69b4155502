"""Locks that are free in a forked child: it has one thread, and locks held by other threads of its parent would never be released."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_OWNERS: weakref.WeakKeyDictionary[Any, list[Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def in_child(owner: Any, function: Callable[[Any], None]) -> None:
    """Call the function with the owner, while that lives, in every process forked from this one, before anything else there.

    The owner is not kept alive; the function must not refer to it.
    """
    _OWNERS.setdefault(owner, []).append(function)


def free_in_child(owner: Any, name: str, make: Callable[[], Any], interrupted: Callable[[Any], None] | None = None) -> None:
    """In a forked child, replace the owner's lock of that name by a new one where another thread of the parent held it.

    `interrupted` is then called with the owner, whose state that thread may have left between two changes.
    """

    def free(owner: Any) -> None:
        lock = getattr(owner, name)
        if lock.acquire(blocking=False):
            lock.release()
            return
        setattr(owner, name, make())
        if interrupted is not None:
            interrupted(owner)

    in_child(owner, free)


def _in_child() -> None:
    for owner, functions in list(_OWNERS.items()):
        for function in functions:
            function(owner)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)


# ---- Take the addresses of tensors for functions in C, which read memory as it is ------------------------------------
#
# PyTorch may keep a sign, a conjugation, or that all elements are 0, as a mark on a tensor instead of in its memory. Such a tensor is
# copied first. A tensor without memory on the CPU is refused.


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
