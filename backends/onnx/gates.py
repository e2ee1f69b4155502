"""The product of two tensors of bytes as one kernel of style "fast": gates after a squeeze, hard swish, SiLU.

onnxruntime fuses DequantizeLinear, DequantizeLinear, Mul and QuantizeLinear to one QLinearMul. Where fxquant computes

    q = round_half_even(float32(p · m)),   p = (a - a_zero) · (b - b_zero)

ONNX divides by a scale, and runtimes do so in different ways: by a division, as the reference evaluator does, or by the reciprocal, as
onnxruntime's QLinearMul does (MlasQLinearMul), with the zero point added before the rounding, in one rounding or two. There are
65,536 pairs of bytes, so all are tried to find a divisor that gives equal integers in every way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fxquant.backends.onnx.writer import Emitter

BYTES = 256
FARTHEST = 4  # steps of float32 from 1 / m, either way


@functools.lru_cache(maxsize=1024)
def divisor(multiplier: float, left_zero: int, right_zero: int, zero: int) -> float | None:
    """Return a float32 divisor that is exact in every runtime for all products of two bytes with these zero points, or None."""
    products = torch.unique(
        torch.outer(torch.arange(BYTES, device="cpu") - left_zero, torch.arange(BYTES, device="cpu") - right_zero)
    ).float()
    wanted = _stored(torch.round(products * torch.tensor(multiplier, dtype=torch.float32, device="cpu")), zero)
    start = 1 / torch.tensor(multiplier, dtype=torch.float32, device="cpu")
    for candidate in _near(start):
        if all(torch.equal(_stored(found, zero), wanted) for found in _ways(products, candidate, zero)):
            return float(candidate)
    return None


def _near(value: Tensor) -> Iterator[Tensor]:
    """Yield the value and its float32 neighbours, the nearest first."""
    yield value
    above = below = value
    for _ in range(FARTHEST):
        above, below = (
            torch.nextafter(above, torch.tensor(torch.inf, dtype=torch.float32, device="cpu")),
            torch.nextafter(below, torch.tensor(0.0, dtype=torch.float32, device="cpu")),
        )
        yield above
        yield below


def _ways(products: Tensor, divisor: Tensor, zero: int) -> Iterator[Tensor]:
    """Yield the integers that a runtime may compute."""
    reciprocal = 1 / divisor
    for quotient in (products / divisor, products * reciprocal):
        yield torch.round(quotient)
        yield torch.round(quotient + zero) - zero
    for exact in (products.double() / divisor.double(), products.double() * reciprocal.double()):
        yield torch.round((exact + zero).float()).double() - zero  # a single rounding, as in a fused multiply-add


def _stored(whole: Tensor, zero: int) -> Tensor:
    return (whole.double() + zero).clamp(0, BYTES - 1)


def emit(e: Emitter, left: tuple[str, str], right: tuple[str, str], divided_by: float, zero: str) -> str:
    """Append the product of two values, each uint8 with its zero point, as uint8 with the zero point `zero`."""
    one = e.constant(1.0)
    operands = [e.node("DequantizeLinear", value, one, its_zero) for value, its_zero in (left, right)]
    return e.node("QuantizeLinear", e.node("Mul", *operands), e.constant(divided_by), zero)
