"""Whether two numbers are close to each other: a composite of a difference and a comparison.

isclose(x, y)   →   |x - y| <= rtol · |y| + atol
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import composite
from fxquant.ops.core.demands import INNER, Plain
from fxquant.ops.elementwise.arithmetic import add, mul, sub


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = [fact(arguments[name]) for name in ("input", "other")]
    if not all(isinstance(one, TensorFact) and one.dtype == torch.float32 for one in known):
        return "its operands are not float32 tensors: compare integers by =="
    given = [arguments[name] for name in ("rtol", "atol")]
    return None if all(isinstance(one, int | float) and math.isfinite(one) for one in given) else "rtol or atol is computed"


def _spelled(input: Any, other: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> dict[str, Any]:
    return {"input": input, "other": other, "rtol": rtol, "atol": atol}  # no grid has a NaN


@composite(adapt=_spelled, demand=Plain("bool"), refuses=_refuses)
def isclose(build: Builder, input: fx.Node, other: fx.Node, rtol: float = 1e-05, atol: float = 1e-08) -> Any:
    """Return whether |input - other| <= rtol · |other| + atol."""
    if is_parameter(input) and rtol == 0:
        input, other = other, input
    distance = build(torch.abs, build(sub, input, other, demand=INNER), demand=INNER)
    if rtol == 0:
        return build(torch.le, distance, float(atol))
    share = build(mul, build(torch.abs, other, demand=INNER), float(rtol), demand=INNER)
    return build(torch.le, distance, build(add, share, float(atol), demand=INNER))
