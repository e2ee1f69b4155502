"""What an integer primitive is: a function whose body is its meaning, with its ONNX form beside it.

The decorated function is itself the `call_function` target in an integer graph, so the graph runs in
PyTorch as it stands and is its own specification. Given integer tensors a primitive computes and returns
integers; given the same integers as floating-point tensors (the prepared model, which trains) it returns
the same numbers as floats. The operands are bounded by proofs made when the graph was lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor


class Emitter(Protocol):
    """What an ONNX form needs of the exporter. Values are names; constants are tensors."""

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append one standard operator with one output; returns the name of the output."""

    def constant(self, value: Tensor | float | int | list[int], dtype: torch.dtype | None = None) -> str:
        """The name of an initializer with this value, shared between equal values."""

    def call(self, name: str, body: Callable[..., str], *inputs: str) -> str:
        """Append one call of the model-local function that `body(emitter, *inputs)` defines; equal bodies of one name are one function."""

    def dtype(self, value: str) -> torch.dtype:
        """The element type of a value in the ONNX graph."""


@dataclass(frozen=True)
class Primitive:
    """A primitive's record.

    onnx       emits the same numbers; receives the emitter and the arguments of the call, values as names
    surrogate  a differentiable float function of the same arguments whose gradient training uses; None where
               the body itself is differentiable
    kind       "quantized" if the result is a tensor of the quantized model, "accumulator" if it lives between
               two of them, "float" if it is the real number again
    """

    name: str
    function: Callable[..., Tensor]
    onnx: Callable[..., str]
    surrogate: Callable[..., Tensor] | None
    kind: str


PRIMITIVES: dict[Callable[..., Any], Primitive] = {}

Function = TypeVar("Function", bound=Callable[..., Tensor])


def primitive(
    onnx: Callable[..., str], *, surrogate: Callable[..., Tensor] | None = None, kind: str = "quantized"
) -> Callable[[Function], Function]:
    """Declare the decorated function an integer primitive."""

    def declare(function: Function) -> Function:
        PRIMITIVES[function] = Primitive(function.__name__, function, onnx, surrogate, kind)
        return function

    return declare


def stored(value: Tensor, operand: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as the result of a primitive: float32 where the operand was floating, else the storage dtype."""
    return value.to(torch.float32 if operand.is_floating_point() else dtype)


def full_precision(tensor: Tensor) -> AbstractContextManager[None]:
    """Float kernels inside are exact on integers below 2^24: no autocast, no TF32, no transformed convolutions."""
    device = tensor.device.type
    if device == "meta" or (device == "cpu" and not torch.is_autocast_enabled("cpu")):
        return _NOTHING
    return _full_precision(device)


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _full_precision(device: str) -> Iterator[None]:
    with torch.autocast(device, enabled=False):
        if device != "cuda":
            yield
            return
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            # cuDNN may choose Winograd or FFT algorithms, which are not exact on integers.
            with torch.backends.cudnn.flags(enabled=False):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32
