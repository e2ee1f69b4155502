"""Facts that follow from buffers, remembered until one of the buffers changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Fact = TypeVar("Fact")


class Remembered(Generic[Fact]):
    """A fact that follows from buffers. It is computed again once a buffer was replaced or written on, by whatever code.

    Reading a value of a buffer can wait for a device; looking at its version does not.
    Buffers that one of torch.func's transforms has wrapped, or that are on the meta device, have no value to read: the fact is the last
    one that was computed, or `unknown`.
    """

    def __init__(self, unknown: Fact) -> None:
        self._unknown = unknown
        self._seen: tuple[tuple[Tensor, int], ...] | None = None
        self._fact = unknown

    def get(self, compute: Callable[[], Fact], *buffers: Tensor) -> Fact:
        """Return the fact that `compute` returns for these buffers."""
        if any(buffer.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(buffer) for buffer in buffers):
            return self._fact
        if any(buffer.is_inference() for buffer in buffers):  # these have no version
            return compute()
        seen = self._seen
        if (
            seen is None
            or len(seen) != len(buffers)
            or any(known is not buffer or version != buffer._version for (known, version), buffer in zip(seen, buffers, strict=True))
        ):
            self._fact = compute()
            self._seen = tuple((buffer, buffer._version) for buffer in buffers)
        return self._fact

    def __deepcopy__(self, memo: Any) -> Remembered[Fact]:
        return Remembered(self._unknown)

    def __reduce__(self) -> tuple[Any, ...]:
        return Remembered, (self._unknown,)
