"""Channel factors: powers of two that channels of a prepared model are multiplied by, and divided by again where they are read.

    W'[o, i] = W[o, i] · 2^(outputs[o] - inputs[i]),   b'[o] = b[o] · 2^outputs[o]

They stand on the operators, beside the parameters, which stay those of the float model: what is trained, loaded and saved means what
it meant. Products with powers of two are exact, so the float function keeps its bits as long as nothing leaves the range of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fxquant.numerics.grids import power_of_two

Fact = TypeVar("Fact")


class Remembered(Generic[Fact]):
    """A fact that follows from buffers. It is computed again once a buffer was replaced or written on, by whatever code.

    Reading a value of a buffer can wait for a device; looking at its version does not.
    Buffers that one of torch.func's transforms has wrapped, or that are on the meta device, have no value to read: the fact is the last
    one that was computed, or `unknown`.
    """

    def __init__(self, unknown: Fact) -> None:
        self._unknown = unknown
        self._seen: tuple[tuple[Tensor, int], ...] | None = None
        self._fact = unknown

    def get(self, compute: Callable[[], Fact], *buffers: Tensor) -> Fact:
        """Return the fact that `compute` returns for these buffers."""
        if any(buffer.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(buffer) for buffer in buffers):
            return self._fact
        if any(buffer.is_inference() for buffer in buffers):  # these have no version
            return compute()
        seen = self._seen
        if (
            seen is None
            or len(seen) != len(buffers)
            or any(known is not buffer or version != buffer._version for (known, version), buffer in zip(seen, buffers, strict=True))
        ):
            self._fact = compute()
            self._seen = tuple((buffer, buffer._version) for buffer in buffers)
        return self._fact

    def __deepcopy__(self, memo: Any) -> Remembered[Fact]:
        return Remembered(self._unknown)

    def __reduce__(self) -> tuple[Any, ...]:
        return Remembered, (self._unknown,)


LARGEST_EXPONENT = 16  # of either sign


class ChannelFactors(nn.Module):
    """The factors of one operator: of the channels it reads, and of those it gives.

    inputs   int8 buffer of shape (channels read,): its operand is the float model's times 2^inputs
    outputs  int8 buffer of shape (channels given,): its result is the float model's times 2^outputs
    """

    inputs: Tensor
    outputs: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._active = Remembered(False)
        self.register_buffer("inputs", torch.zeros(inputs, dtype=torch.int8, device="cpu"))
        self.register_buffer("outputs", torch.zeros(outputs, dtype=torch.int8, device="cpu"))

    @property
    def active(self) -> bool:
        """Whether any factor is not 1."""
        return self._active.get(lambda: bool(self.inputs.any()) or bool(self.outputs.any()), self.inputs, self.outputs)

    @property
    def description(self) -> str:
        """Which of the channels that it gives are multiplied by what, in words; empty where none is."""
        if not self.active or not (count := int(self.outputs.count_nonzero())):
            return ""
        return f"equalized: {count} of {len(self.outputs)} channels times 2^{int(self.outputs.min())} to 2^{int(self.outputs.max())}"

    @torch.no_grad()
    def assign(self, inputs: Tensor, outputs: Tensor) -> None:
        """Set the exponents."""
        self.inputs.copy_(inputs)
        self.outputs.copy_(outputs)

    def of(self, operator: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the operator, given by its record, with its parameters multiplied by the factors."""
        if not self.active:
            return arguments
        inputs, outputs = (power_of_two(exponents.to(torch.int64)).float() for exponents in (self.inputs, self.outputs))
        return {**arguments, **operator.layer.rescaled(arguments, inputs, outputs)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state_dict; one without factors is that of a model that has none."""
        for name, own in (("inputs", self.inputs), ("outputs", self.outputs)):
            state_dict.setdefault(prefix + name, torch.zeros_like(own))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{len(self.inputs)} → {len(self.outputs)}"
