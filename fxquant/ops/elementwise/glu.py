"""The gated linear unit: one half of the channels times the sigmoid of the other. A composite."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.ops.core.operators import NORMED, Builder, Fixed, composite, fixed, sample
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.reduction.progression import along, length_of

GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))


@composite(refuses=fixed(because="it splits the batch, whose size is not fixed"), samples=(sample(within=NORMED, input=(3, 6, 6), dim=-2),))
def glu(build: Builder, input: fx.Node, dim: int = -1) -> Any:
    """Return the first half along a dimension times the sigmoid of the second."""
    half = length_of(input, dim) // 2
    first, second = (along(build, input, dim, slice(start, start + half)) for start in (0, half))
    return build(mul, first, build(torch.sigmoid, second, demand=GATE))
