"""Numbers for tests by properties: integers with the ends of their range, and scales with ties among their products."""

from fractions import Fraction

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

EXACT = settings(deadline=None, derandomize=True, max_examples=50)
SLOW = settings(EXACT, max_examples=20)
seeds = st.integers(0, 2**32 - 1)


def float32(value: Fraction | float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float32)


def random_integers(seed: int, size: tuple[int, ...], low: int = -128, high: int = 127, dtype: torch.dtype = torch.int8) -> Tensor:
    """Integers of the range; every other tensor consists of its ends and odd numbers next to them."""
    generator = torch.Generator().manual_seed(seed)
    if seed % 2:
        ends = torch.tensor([low, low + 1, low + 3, high - 2, high])
        return ends[torch.randint(0, 5, size, generator=generator)].to(dtype)
    return torch.randint(low, high + 1, size, generator=generator).to(dtype)
