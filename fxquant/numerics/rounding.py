"""How real weights become whole numbers, and the gradient that passes straight through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.numerics.clamping import clamped


class Rounding(nn.Module):
    """How a weight becomes integers. A subclass is another way; what it learns are its parameters, which train with the model's.

    It is made from the shape of the weight it is to round, output channels first, and lives as long as the prepared model.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        """Whole numbers from low to high for the weight in steps of its scale, float32, both of the shape this was made from.

        The same numbers with and without gradients, which reach `real` and the parameters. Where one of these is NaN the result has
        to be, so that it is found and told.
        """
        raise NotImplementedError


class Nearest(Rounding):
    """To the nearest whole number, a half to the even one; the gradient passes straight through."""

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        exact = torch.round(real.detach()).clamp_(low, high)
        return straight_through(real, exact) if real.requires_grad else exact


class AdaptiveRounding(Rounding):
    """To the nearest whole number once an offset is added, which `fxq.tuning` chooses for each weight: 0 until then, so that it is Nearest.

    What `settle` has decided stays decided where a weight or a scale moves by less than half a step, and moves along where they move by
    more. The offsets are no parameters: what trains the model trains its weights. A weight that is exactly 0 has the integer 0, whatever
    its offset: pruned weights stay pruned.

    offset  float32 buffer of the weight's shape, in steps
    soft    None; or, while it is decided, a function of the weight in steps that gives a real number between the two integers beside it
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
        """Make these whole numbers what the weight, in steps, becomes; zeros of the weight stay 0."""
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
    """The same for functorch's transforms, in the form they ask for, whose calls take several times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(smooth: Tensor, exact: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def straight_through(smooth: Tensor, exact: Tensor) -> Tensor:
    """`exact`, bit for bit, with the gradient of `smooth`; also inside of torch.func's transforms."""
    transformed = torch._C._are_functorch_transforms_active()
    function = _TransformedStraightThrough if transformed else _StraightThrough
    result: Tensor = function.apply(smooth, exact)  # type: ignore[no-untyped-call]
    return result
