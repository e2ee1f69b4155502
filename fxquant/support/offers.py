"""Registries of implementations that backends offer in place of PyTorch's: one for each protocol, tried by the tensors they take."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Implementation = TypeVar("Implementation")


class Offers(Generic[Implementation]):
    """The implementations of one protocol, in the order in which they were offered; `takes` of each says which tensors it is for."""

    def __init__(self) -> None:
        self.known: list[Implementation] = []

    def add(self, implementation: Implementation) -> None:
        """Add an implementation, which is tried after the earlier ones."""
        self.known.append(implementation)

    def first(self, *values: Any) -> Implementation | None:
        """Return the first implementation that takes these values; None where none does."""
        for each in self.known:
            if each.takes(*values):  # type: ignore[attr-defined]
                return each
        return None
