"""Integer tensors without a grid, int64: counts, indices, tokens. Beyond 64 bits they wrap around, in PyTorch and in ONNX.

Division is computed from the remainder, which has the sign of the divisor: runtimes round the quotient of negative numbers in
different ways.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fxquant.primitives.record import Emitter, Range, Value, need, primitive
from fxquant.primitives.selection import onnx_reduced
from fxquant.primitives.shape import named

ANY = Range(-(2.0**63), 2.0**63)
DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # of integers without a grid


# The operations of `joined`, with ONNX's operators where these are alike.
JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "add": (torch.add, "Add"),
    "subtract": (torch.sub, "Sub"),
    "multiply": (torch.mul, "Mul"),
    "quotient": (lambda input, other: torch.div(input - torch.remainder(input, other), other, rounding_mode="trunc"), ""),
    "remainder": (torch.remainder, "Mod"),
    "larger": (torch.maximum, ""),
    "smaller": (torch.minimum, ""),
    "and": (torch.bitwise_and, ""),
}


def _whole(e: Emitter, value: str | Tensor) -> str:
    return named(e, value) if isinstance(value, str) else named(e, value.to(torch.int64))


def _onnx_joined(e: Emitter, input: str | Tensor, other: str | Tensor, operation: str) -> str:
    left, right = _whole(e, input), _whole(e, other)
    if operation in ("quotient", "remainder") and isinstance(other, str):
        # Division by 0 is an error in PyTorch; integer division by 0 may end the process that runs a file.
        right = e.node("Where", e.node("Equal", right, e.constant(0, torch.int64)), e.constant(1, torch.int64), right)
    if operation == "quotient":
        return e.node("Div", e.node("Sub", left, e.node("Mod", left, right)), right)
    if operation == "and":
        return e.node("BitwiseAnd", left, right) if e.opset >= 18 else _onnx_bits(e, left, right)
    if operation in ("larger", "smaller"):  # onnxruntime's Max, Min and ReduceMax compare the last 32 bits of an int64 alone
        return e.node("Where", e.node("Less", *((right, left) if operation == "larger" else (left, right))), left, right)
    return e.node(JOINED[operation][1], left, right)


def _onnx_bits(e: Emitter, left: str, right: str) -> str:
    """Emit the bitwise "and" of two int64 values before opset 18, which has no operator for it.

    The bits of both get a dimension of their own; their products are weighted by powers of two and summed.
    """
    powers = e.constant([2**bit for bit in range(63)])
    zero, two = e.constant(0, torch.int64), e.constant(2, torch.int64)

    def bits(value: str) -> str:
        tall = e.node("Unsqueeze", value, e.constant([-1]))
        return e.node("Mod", e.node("Div", e.node("Sub", tall, e.node("Mod", tall, powers)), powers), two)

    def sign(value: str) -> str:
        return e.node("Cast", e.node("Less", value, zero), to=torch.int64)

    both = e.node("Mul", e.node("Mul", bits(left), bits(right)), powers)
    lowest = e.constant(-(2**63), torch.int64)
    negative = e.node("Mul", e.node("Mul", sign(left), sign(right)), lowest)
    return e.node("Add", _onnx_sum(e, both, [-1], False), negative)


HALF = 2**31


def _halves(e: Emitter, input: str) -> tuple[str, str]:
    """Emit ⌊x / 2^31⌋ and the 31 bits below."""
    half = e.constant(HALF, torch.int64)
    lower = e.node("Mod", input, half)
    return e.node("Div", e.node("Sub", input, lower), half), lower


def _onnx_sum(e: Emitter, input: str, dim: list[int], keepdim: bool) -> str:
    """Emit a sum of int64, of the upper and the lower halves separately: onnxruntime sums in float64, which is exact below 2^53."""
    upper, lower = (e.node("ReduceSum", part, e.constant(list(dim)), keepdims=int(keepdim)) for part in _halves(e, input))
    return e.node("Add", e.node("Mul", upper, e.constant(HALF, torch.int64)), lower)


def _bounds_joined(input: Value | None, other: Value | None, operation: str) -> Range:
    need(operation in JOINED, f"its operation is {operation!r}")
    if operation in ("quotient", "remainder") and other is not None and other.constant is not None:
        need((other.constant != 0).all(), "it divides by 0")
    return ANY


@primitive(_onnx_joined, bounds=_bounds_joined, kind="plain")
def joined(input: Tensor, other: Tensor, operation: str) -> Tensor:
    """Combine two int64 tensors element by element: int64.

    The operations are "add", "subtract", "multiply", "quotient" (⌊input / other⌋), "remainder" (with the sign of `other`), "larger",
    "smaller", and "and" (bitwise, in two's complement). A quotient is right for operands below 2^62.
    """
    return JOINED[operation][0](input, other)


def _bounds_converted(input: Value | None, dtype: torch.dtype) -> Range:
    need(dtype in DTYPES, f"it is to be {dtype}")  # an integer graph holds no float tensors
    return ANY


@primitive(lambda e, input, dtype: e.node("Cast", input, to=dtype), bounds=_bounds_converted, kind="plain")
def converted(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a bool tensor, as 0 and 1, or an integer tensor to an integer dtype; values beyond its range wrap around."""
    return input.to(dtype)


def _onnx_truncated(e: Emitter, input: str, scale: Tensor, margin: Tensor) -> str:
    number = e.node("Cast", input, to=torch.float32)
    beyond = e.node("Mul", e.node("Sign", number), e.constant(margin))
    return e.node("Cast", e.node("Add", e.node("Mul", number, e.constant(scale)), beyond), to=torch.int64)


def _bounds_truncated(input: Value, scale: Value, margin: Value) -> Range:
    for name, value in (("scale", scale), ("margin", margin)):
        need(value.constant is not None and value.constant.dtype == torch.float32, f"its {name} is not a constant")
    return ANY


@primitive(_onnx_truncated, bounds=_bounds_truncated, kind="plain")
def truncated(input: Tensor, scale: Tensor, margin: Tensor) -> Tensor:
    """Compute float32(q) · scale ± margin, away from 0, and drop the fraction; the result is int64, and 0 for 0.

    The product and the sum are rounded to float32; `scale` and `margin` are float32.
    """
    number = input.float()
    return (number * scale + torch.sign(number) * margin).to(torch.int64)


@primitive(
    lambda e, input, other, condition: e.node("Where", named(e, condition), _whole(e, input), _whole(e, other)),
    bounds=lambda **_: ANY,
    kind="plain",
)
def chosen(input: Tensor, other: Tensor, condition: Tensor) -> Tensor:
    """Return the integer of `input` where the condition (bool) holds, else that of `other`: int64."""
    return torch.where(condition, input, other)


REDUCED: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "largest": torch.amax}


def _onnx_reduced(e: Emitter, input: str, dim: list[int], keepdim: bool, operation: str) -> str:
    if operation == "sum":
        return _onnx_sum(e, input, dim, keepdim)

    def largest(value: str, keeps: bool) -> str:
        """Emit the largest of integers below 2^53, found in float64."""
        return e.node("Cast", onnx_reduced(e, "ReduceMax", e.node("Cast", value, to=torch.float64), dim, keeps), to=torch.int64)

    # The largest upper half, and the largest lower half of the elements that have it.
    half, (upper, lower) = e.constant(HALF, torch.int64), _halves(e, input)
    first = e.node("Equal", upper, largest(upper, True))
    below = e.constant(-1, torch.int64)
    return e.node("Add", e.node("Mul", largest(upper, keepdim), half), largest(e.node("Where", first, lower, below), keepdim))


def _bounds_reduced(input: Value | None, dim: list[int], keepdim: bool, operation: str) -> Range:
    need(operation in REDUCED, f"its operation is {operation!r}")
    return ANY


@primitive(_onnx_reduced, bounds=_bounds_reduced, kind="plain")
def reduced(input: Tensor, dim: list[int], keepdim: bool, operation: str) -> Tensor:
    """Compute the "sum" of at most 2^21 integers along dimensions, or their "largest": int64."""
    return REDUCED[operation](input, dim, keepdim=keepdim)


@primitive(lambda e, input, dim: e.node("CumSum", input, e.constant(dim, torch.int64)), bounds=lambda **_: ANY, kind="plain")
def running(input: Tensor, dim: int) -> Tensor:
    """Compute the cumulative sum of the integers along a dimension: int64."""
    return torch.cumsum(input, dim)
