"""Scales that training learns: LSQ, learned step size quantization.

Esser, McKinstry, Bablani, Appuswamy, Modha: Learned Step Size Quantization, ICLR 2020, section 2. For a real
number v on a scale s, with q = clip(round(v / s), low, high) and v̂ = q · s:

    ∂v̂/∂v = 1 where low ≤ v/s ≤ high, 0 elsewhere
    ∂v̂/∂s = q - v/s where low ≤ v/s ≤ high, q elsewhere

The gradient of s is summed over the numbers that share it and multiplied by 1 / sqrt(n · high), n being the size of
the tensor, which keeps its steps in proportion to those of the weights. On an affine grid q and the limits are centred, the zero point
is held, and -low - 1 takes the place of high where it is larger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxquant.numerics import SMALLEST_SCALE, Grid, IntType


class TrainableScale(nn.Module):
    """A scale that may be learned.

    base_scale   float32 buffer of shape () or (C,); the scale that calibration found, NaN until it is known
    scale_change       None, or a parameter of that shape, 0 at first: what training has made of it
    stopped      bool buffer: whether nothing moves it any more, since it is `frozen` or was `given`. It says so in `state_dict`,
                 and follows from the two, so that looking at it never waits for a device

        scale = base_scale · (1 + scale_change) where scale_change ≥ 0,   base_scale / (1 - scale_change) where scale_change < 0

    It is positive whatever an optimizer does. The gradient of `scale_change` is LSQ's gradient of the scale, divided by
    base_scale: a step of SGD moves the scale by what LSQ says (less and less where it shrinks), and a step of
    Adam, whose length depends on no gradient, moves it by a fraction of itself, so scales of 0.001 and of 10
    train alike. Weight decay pulls it to what calibration found.
    """

    base_scale: Tensor
    stopped: Tensor
    scale_change: nn.Parameter | None

    derived = ("stopped",)  # buffers that follow from other facts
    given = False  # whether the scale was given rather than found

    def __init__(self, base_scale: Tensor, learned: bool) -> None:
        super().__init__()
        self._frozen = False
        self.register_buffer("base_scale", base_scale)
        self.register_buffer("stopped", torch.zeros((), dtype=torch.bool))
        self.register_parameter("scale_change", nn.Parameter(torch.zeros_like(base_scale)) if learned else None)

    @property
    def frozen(self) -> bool:
        """Whether the scale was stopped."""
        return self._frozen

    @frozen.setter
    def frozen(self, value: bool) -> None:
        self._frozen = value
        with torch.no_grad():
            self.stopped.fill_(value or self.given)

    @property
    def learns(self) -> bool:
        """Whether gradients reach the scale."""
        return self.scale_change is not None and self.scale_change.requires_grad and not self.frozen

    def current(self) -> Tensor:
        """The scale of this moment, detached."""
        if self.scale_change is None or self.frozen:
            return self.base_scale
        return _changed(self.base_scale, self.scale_change.detach())

    @torch.no_grad()
    def assign(self, scale: Tensor) -> None:
        """Make this the scale that training starts from."""
        self.base_scale.copy_(scale)
        if self.scale_change is not None:
            self.scale_change.zero_()

    def stop(self) -> None:
        """The scale stays what it is, also for an optimizer that holds its parameter."""
        self.assign(self.current())
        self.frozen = True
        if self.scale_change is not None:
            self.scale_change.requires_grad_(False)
            self.scale_change.grad = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Scales that were learned load where they are not, and the other way round; one that stood still does so again.

        A scale that was given here gives way to one that stood still there, and to no other.
        """
        base, scale_change, stopped = prefix + "base_scale", prefix + "scale_change", prefix + "stopped"
        if stopped in state_dict:
            moved = not bool(state_dict[stopped])
            if moved and self.given:
                state_dict[base] = self.base_scale.clone()
                state_dict.pop(scale_change, None)
            if self.scale_change is not None and self.frozen != (not moved):
                self.scale_change.requires_grad_(moved)
            self.frozen = not moved and not self.given
        state_dict[stopped] = self.stopped.clone()  # a state_dict of an earlier version says nothing
        if self.scale_change is not None:
            state_dict.setdefault(scale_change, torch.zeros_like(self.scale_change))
        elif scale_change in state_dict and base in state_dict:
            grown = state_dict.pop(scale_change)
            if not self.frozen:
                state_dict[base] = _changed(state_dict[base], grown)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _changed(base_scale: Tensor, scale_change: Tensor) -> Tensor:
    scale = torch.where(scale_change < 0, base_scale / (1 + scale_change.abs()), base_scale * (1 + scale_change))
    return scale.clamp_min(SMALLEST_SCALE)


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, exact: Tensor, scale: Tensor, scale_change: Tensor, unit: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(value, exact, scale, unit)
        ctx.low, ctx.high, ctx.shape = low, high, scale_change.shape
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, exact, scale, unit = ctx.saved_tensors
        real = value / scale
        inside = (real >= ctx.low) & (real <= ctx.high)
        of_real = gradient / scale  # of the real number that the integer stands for
        of_value = (of_real * inside).to(value.dtype) if ctx.needs_input_grad[0] else None
        of_scale = (of_real * (exact - real * inside)).sum_to_size(scale.shape).reshape(ctx.shape)
        of_exact = gradient if ctx.needs_input_grad[1] else None
        steps = value.numel() * max(ctx.high, -ctx.low - 1)
        return of_value, of_exact, None, (of_scale * unit / steps**0.5).float(), None, None, None


class _TransformedLearnedStep(torch.autograd.Function):
    """The same for functorch's transforms, in the form they ask for, whose calls take several times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, exact: Tensor, scale: Tensor, scale_change: Tensor, unit: Tensor, low: int, high: int) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, exact, scale, scale_change, unit, ctx.low, ctx.high = inputs
        ctx.save_for_backward(value, exact, scale, unit)
        ctx.shape = scale_change.shape

    backward = _LearnedStep.backward


def learned_step(
    value: Tensor, exact: Tensor, scale: Tensor, trained: TrainableScale, limits: IntType | Grid, factor: Tensor | float = 1
) -> Tensor:
    """`exact`, the integers of `value` on `scale`, bit for bit, with LSQ's gradients to `value` and to the trained scale.

    `scale` broadcasts against `value` and holds as many numbers as the trained one: that times `factor`. A factor
    of 0 marks a scale that another took the place of; the trained one then has no gradient.
    If `exact` requires a gradient, of what else decides on it, it has that of the result.
    """
    unit = factor / trained.base_scale
    function = _TransformedLearnedStep if torch._C._are_functorch_transforms_active() else _LearnedStep
    result: Tensor = function.apply(value, exact, scale, trained.scale_change, unit, limits.low, limits.high)  # type: ignore[no-untyped-call]
    return result
