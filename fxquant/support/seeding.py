"""Draw from PyTorch's global generator without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, PyTorch's global CPU generator starts from `seed`; afterwards it has its former state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
