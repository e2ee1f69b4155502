"""How tensors of different shapes are read beside each other: steps along common dimensions, as few of these as will do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def strides_of(shape: Sequence[int]) -> list[int]:
    """How far apart neighbours along each dimension lie, of elements one after another."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def steps(shape: Sequence[int], to: Sequence[int]) -> list[int]:
    """How far one moves in a tensor of a shape with each step along the dimensions of a larger one that it is repeated to."""
    own = [0] * (len(to) - len(shape)) + [step if size != 1 else 0 for size, step in zip(shape, strides_of(shape), strict=True)]
    return own


def joined(size: Sequence[int], *moved: Sequence[int]) -> tuple[list[int], ...]:
    """Sizes, and steps of several tensors, with dimensions joined that all of them go through one after another; at least one."""
    kept = [dim for dim in range(len(size)) if size[dim] != 1]
    sizes, found = [size[dim] for dim in kept], [[step[dim] for dim in kept] for step in moved]
    for dim in reversed(range(len(sizes) - 1)):
        if all(step[dim] == step[dim + 1] * sizes[dim + 1] for step in found):
            sizes[dim] *= sizes.pop(dim + 1)
            for step in found:
                step[dim] = step.pop(dim + 1)
    return (sizes or [1], *([*step] or [0] for step in found))


def around(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """The sizes before, at and behind a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def broadcast(*shapes: Sequence[int]) -> list[int]:
    """The shape that these are repeated to."""
    turned = [tuple(reversed(shape)) for shape in shapes]
    return [max(sizes) if 0 not in sizes else 0 for sizes in itertools.zip_longest(*turned, fillvalue=1)][::-1]
