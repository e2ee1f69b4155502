"""What backends offer in place of PyTorch: implementations of one protocol each, which say what tensors they are for."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Implementation = TypeVar("Implementation")


class Offers(Generic[Implementation]):
    """The implementations of one protocol, tried in the order in which they were offered; `takes` of each says what it is for."""

    def __init__(self) -> None:
        self.known: list[Implementation] = []

    def add(self, implementation: Implementation) -> None:
        """Have this one tried after those before it."""
        self.known.append(implementation)

    def first(self, *values: Any) -> Implementation | None:
        """The first that takes these values; None where none does."""
        for each in self.known:
            if each.takes(*values):  # type: ignore[attr-defined]
                return each
        return None
