"""Elementwise primitives as steps on registers, by which a kernel computes a chain of primitives while it reads memory once.

A register holds one integer of every element, or one float32 number. `Writer` collects the steps of a chain; each primitive's record has
a function `steps` that writes it. The integers have 32 bits, or 64 where a primitive says that it needs them.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Op(IntEnum):
    """The operations, each of one or two registers a and b."""

    ADD = 0
    SUBTRACT = 1
    MULTIPLY = 2
    SHIFT = 3  # a >> b
    LEAST = 4
    LARGEST = 5
    CLIP = 6  # a limited to [low, high]
    LOOK_UP = 7  # table[a - low]
    ROUND = 8  # round_half_even(float32(a) · b), limited to [low, high]; b is float32
    SCALE = 9  # float32(a) · b; b and the result are float32
    TOTAL = 10  # the sum of a row of a
    LOWEST = 11  # the smallest element of a row of a
    HIGHEST = 12  # the largest


MOST_REAL = 2**30  # largest magnitude of a ROUND result without bounds; proofs keep it below


class Step(NamedTuple):
    """One operation: it reads the registers `a` and `b` and writes `to`."""

    op: Op
    to: int
    a: int
    b: int = 0
    low: int = 0
    high: int = 0
    table: Tensor | None = None  # int32, of one dimension


@dataclass
class Writer:
    """The steps of a chain of primitives, its operands, and whether it needs 64 bits."""

    steps: list[Step] = field(default_factory=list)
    # The register of each tensor that is read, with the key of an activation, or a constant.
    operands: list[tuple[int, Any]] = field(default_factory=list)
    registers: Iterator[int] = field(default_factory=itertools.count)  # the numbers of free registers
    wide: bool = False

    def operand(self, value: Any) -> int:
        """Return the register of an activation's key, or of a constant tensor or number, which broadcasts against the result."""
        if isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.int64, device="cpu")
        self.operands.append((next(self.registers), value))
        return self.operands[-1][0]

    def write(self, op: Op, a: Any, b: Any = None, low: int = 0, high: int = 0, table: Tensor | None = None) -> int:
        """Write a step and return the register of its result; `a` and `b`, `a` if None, are registers, or tensors of constants."""
        a, b = (self.operand(each) if isinstance(each, Tensor) else each for each in (a, a if b is None else b))
        self.steps.append(Step(op, next(self.registers), a, b, low, high, table))
        return self.steps[-1].to


Steps = Callable[..., int | None]  # from a writer and a call's arguments, registers in place of activations, to the register of the result


def over_rows(op: Op) -> Callable[..., Op | None]:
    """Return the function `reduces` of a primitive: it returns `op` for a reduction of the last dimension with keepdim, else None."""
    return lambda sizes, dim, keepdim, wide=False: op if keepdim and list(dim) in ([-1], [len(sizes) - 1]) else None


def binary(op: Op) -> Steps:
    """Return the steps of a primitive that is one operation of two operands."""
    return lambda w, input, other, *_: w.write(op, input, other)
