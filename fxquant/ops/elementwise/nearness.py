"""Whether two numbers are close to each other: a composite of a difference and a comparison.

isclose(x, y)   →   |x - y| <= rtol · |y| + atol
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxquant.ops.core.operators import INNER, Builder, Plain, TensorFact, composite, fact, is_parameter, numbers, sampled
from fxquant.ops.elementwise.arithmetic import add, mul, sub


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = [fact(arguments[name]) for name in ("input", "other")]
    real = all(isinstance(one, TensorFact) and one.dtype == torch.float32 for one in known)
    return None if real else "its operands are not float32 tensors: compare integers by =="


@composite(
    takes="input other rtol atol equal_nan",  # no grid has a NaN
    demand=Plain("bool"),
    refuses=(_refuses, numbers("rtol", "atol", because="rtol or atol is computed", finite=True)),
)
@sampled("isclose(x, y, atol=0.2)", "isclose(x, y[:, :1], rtol=0, atol=0.3)", share=0.02)
def isclose(build: Builder, input: fx.Node, other: fx.Node, rtol: float = 1e-05, atol: float = 1e-08) -> Any:
    """Return whether |input - other| <= rtol · |other| + atol."""
    if is_parameter(input) and rtol == 0:
        input, other = other, input
    distance = build(torch.abs, build(sub, input, other, demand=INNER), demand=INNER)
    if rtol == 0:
        return build(torch.le, distance, float(atol))
    share = build(mul, build(torch.abs, other, demand=INNER), float(rtol), demand=INNER)
    return build(torch.le, distance, build(add, share, float(atol), demand=INNER))
