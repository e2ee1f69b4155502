"""Strides for reading tensors of different shapes together over common dimensions, with as few dimensions as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def steps(shape: Sequence[int], to: Sequence[int]) -> list[int]:
    """Return the strides of a tensor of one shape along the dimensions of a larger shape that it is broadcast to."""
    own = [0] * (len(to) - len(shape)) + [step if size != 1 else 0 for size, step in zip(shape, strides_of(shape), strict=True)]
    return own


def joined(size: Sequence[int], *moved: Sequence[int]) -> tuple[list[int], ...]:
    """Merge adjacent dimensions that all tensors traverse contiguously; return the sizes and each tensor's strides, at least one."""
    kept = [dim for dim in range(len(size)) if size[dim] != 1]
    sizes, found = [size[dim] for dim in kept], [[step[dim] for dim in kept] for step in moved]
    for dim in reversed(range(len(sizes) - 1)):
        if all(step[dim] == step[dim + 1] * sizes[dim + 1] for step in found):
            sizes[dim] *= sizes.pop(dim + 1)
            for step in found:
                step[dim] = step.pop(dim + 1)
    return (sizes or [1], *([*step] or [0] for step in found))


def around(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Return the products of the sizes before, at and after a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def broadcast(*shapes: Sequence[int]) -> list[int]:
    """Return the shape that these shapes broadcast to."""
    turned = [tuple(reversed(shape)) for shape in shapes]
    return [max(sizes) if 0 not in sizes else 0 for sizes in itertools.zip_longest(*turned, fillvalue=1)][::-1]
