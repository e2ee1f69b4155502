"""Round weights to integers, with a straight-through gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.numerics.clamping import clamped


class Rounding(nn.Module):
    """The rounding of a weight to integers. A subclass rounds in another way; what it learns are its parameters, trained with the model's.

    It is constructed with the shape of the weight that it rounds, output channels first, and lives as long as the prepared model.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        """Return integers from low to high for the weight in steps of its scale: float32, both of the shape given at construction.

        The integers are the same with and without gradients, which reach `real` and the parameters. Where one of these is NaN the
        result must be NaN, so that it is found and reported.
        """
        raise NotImplementedError


class Nearest(Rounding):
    """Round to the nearest integer, halves to even; the gradient passes straight through."""

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        exact = torch.round(real.detach()).clamp_(low, high)
        return straight_through(real, exact) if real.requires_grad else exact


class AdaptiveRounding(Rounding):
    """Round to the nearest integer after an offset is added. `fxq.tuning` chooses it for each weight; until then it is 0, as in Nearest.

    An integer that `settle` has chosen stays where a weight or a scale moves by less than half a step, and moves along where they move
    by more. The offsets are not parameters: training the model trains its weights. A weight that is exactly 0 has the integer 0,
    whatever its offset: pruned weights stay pruned.

    offset  float32 buffer of the weight's shape, in steps
    soft    None; or, during tuning, a function of the weight in steps that returns a float between the two integers next to it
    """

    offset: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.shape = tuple(shape)
        self.soft: Callable[[Tensor], Tensor] | None = None
        self.register_buffer("offset", torch.zeros(self.shape, dtype=torch.float32, device="cpu"))

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        zero = real.detach() == 0
        if self.soft is not None:
            return clamped(self.soft(real), low, high).masked_fill(zero, 0)
        exact = torch.round(real.detach() + self.offset).clamp_(low, high).masked_fill_(zero, 0)
        return straight_through(real, exact) if real.requires_grad else exact

    @torch.no_grad()
    def settle(self, real: Tensor, chosen: Tensor) -> None:
        """Set the offsets so that the weight, in steps, rounds to these integers; zeros of the weight stay 0."""
        self.offset.copy_((chosen - real).masked_fill(real == 0, 0))

    def extra_repr(self) -> str:
        return f"shape={self.shape}"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, smooth: Tensor, exact: Tensor) -> Tensor:
        ctx.dtype = smooth.dtype
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _TransformedStraightThrough(torch.autograd.Function):
    """`_StraightThrough` in the form that functorch's transforms ask for, whose calls take several times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(smooth: Tensor, exact: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    backward = _StraightThrough.backward


def straight_through(smooth: Tensor, exact: Tensor) -> Tensor:
    """Return `exact`, bit for bit, of its shape and dtype, with the gradient of `smooth`; also inside of torch.func's transforms."""
    transformed = torch._C._are_functorch_transforms_active()
    function = _TransformedStraightThrough if transformed else _StraightThrough
    result: Tensor = function.apply(smooth, exact)  # type: ignore[no-untyped-call]
    return result
