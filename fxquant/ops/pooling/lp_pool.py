"""Pools by a power: the p-norm of windows, a composite that is 16 bits wide inside.

(Σ x^p)^(1/p) = (k · mean x^p)^(1/p)    of windows of k elements, as PyTorch has it: a sum that is negative has a root for p = 1 alone
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxquant.ops.core.operators import IMAGES, NORMED, POSITIVE, WIDE, Builder, composite, sample
from fxquant.ops.core.weighted import sizes
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.table import SHIFTED
from fxquant.ops.pooling.pool import avg_pool1d, avg_pool2d, avg_pool3d, needs_batch

AVERAGES = {1: avg_pool1d, 2: avg_pool2d, 3: avg_pool3d}


def _refuses_norm(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    p = arguments["norm_type"]
    return None if isinstance(p, int | float) and 0 < p < math.inf else f"the {p}-norm has no integer form"


def _lp_pool(rank: int) -> Callable[..., Any]:
    samples = (
        sample(input=IMAGES[rank], norm_type=2.0, kernel_size=3, stride=2),
        sample(input=IMAGES[rank], norm_type=1.0, kernel_size=(2, 3, 2)[:rank] if rank > 1 else 2, ceil_mode=True, within=NORMED),
        sample(over=POSITIVE, input=IMAGES[rank], norm_type=3.0, kernel_size=2),
    )

    @composite(name=f"lp_pool{rank}d", refuses=(_refuses_norm, needs_batch(rank)), samples=samples)
    def lp_pool(build: Builder, input: fx.Node, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Any:
        """Return the p-norm of windows in one, two or three dimensions."""
        count = float(math.prod(sizes(kernel_size, rank)))
        if norm_type == 1:
            return build(mul, build(AVERAGES[rank], input, kernel_size, stride, 0, ceil_mode, demand=WIDE), count)
        powers = build(torch.square, input, demand=WIDE) if norm_type == 2 else build(torch.pow, input, float(norm_type), demand=WIDE)
        means = build(AVERAGES[rank], powers, kernel_size, stride, 0, ceil_mode, demand=WIDE)
        return build(SHIFTED.function, means, "pow", count, 0.0, {"exponent": 1 / norm_type})

    return lp_pool


lp_pool1d, lp_pool2d, lp_pool3d = map(_lp_pool, (1, 2, 3))
