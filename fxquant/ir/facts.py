"""Facts of a tensor before it is computed: its shape for every batch size, and its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

# Two batch sizes stand for "any": a dimension that differs between them depends on the batch.
# Both are even, so that `batch // 2` is exact, and neither is 1, so that nothing broadcasts by accident.
BATCH_SIZES = (4, 6)


@dataclass(frozen=True)
class BatchDim:
    """A size that grows with the batch: `coefficient * batch + offset`."""

    coefficient: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)

    @staticmethod
    def between(a: int, b: int) -> int | BatchDim:
        """Return the size that is `a` and `b` at the two tracing batch sizes: a plain int if they agree."""
        if a == b:
            return int(a)
        coefficient = Fraction(b - a, BATCH_SIZES[1] - BATCH_SIZES[0])
        return BatchDim(coefficient, a - coefficient * BATCH_SIZES[0])

    def at(self, batch: int) -> int:
        """Return the size at this batch size; raises ValueError where it is not an integer."""
        value = self.coefficient * batch + self.offset
        if value.denominator != 1:
            raise ValueError(f"{self} is not an integer at batch size {batch}")
        return int(value)

    def __str__(self) -> str:
        numerator, denominator = self.coefficient.numerator, self.coefficient.denominator
        text = ("" if numerator == 1 else str(numerator)) + "B" + ("" if denominator == 1 else f"/{denominator}")
        return text if self.offset == 0 else f"{text}{'+' if self.offset > 0 else ''}{self.offset}"


Size = int | BatchDim


@dataclass(frozen=True)
class TensorFact:
    """Shape and dtype of a tensor, for every batch size at once."""

    shape: tuple[Size, ...]
    dtype: torch.dtype

    @staticmethod
    def between(a: torch.Tensor, b: torch.Tensor) -> TensorFact:
        """Return the fact of a tensor seen at the two tracing batch sizes."""
        return TensorFact(tuple(BatchDim.between(m, n) for m, n in zip(a.shape, b.shape, strict=True)), a.dtype)

    def at(self, batch: int) -> tuple[int, ...]:
        """Return the shape at this batch size."""
        return tuple(size if isinstance(size, int) else size.at(batch) for size in self.shape)

    @property
    def batch_axis(self) -> int | None:
        """The first dimension whose size depends on the batch: of an input, the batch itself. None if every size is fixed."""
        return next((axis for axis, size in enumerate(self.shape) if isinstance(size, BatchDim)), None)

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{','.join(str(size) for size in self.shape)}]"


def on_meta(value: Any, batch: int) -> Any:
    """Return a tensor without data for a TensorFact, and an integer for a BatchDim, at a batch size; any other value as it is."""
    if isinstance(value, TensorFact):
        return torch.empty(value.at(batch), dtype=value.dtype, device="meta")
    return value.at(batch) if isinstance(value, BatchDim) else value


DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def unusual_kind(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return the kind of a tensor that has no values in dense memory, and how to convert it; None for a dense tensor with values."""
    if tensor.is_nested:
        return "nested", "pad it to one size with .to_padded_tensor(0.0)"
    if getattr(tensor, "is_quantized", False):  # PyTorch is removing them
        return "quantized", "convert it with .dequantize()"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch."), "convert it with .to_dense()"
    if tensor.is_meta:
        return "meta", "pass a tensor on the device of the model"
    return None
