"""A scale that may be learned, and the step of training that integers on it take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.numerics.grids import Grid, IntType
from fxquant.quantization.factors import Remembered
from fxquant.quantization.learning.method import LSQ, LSQ_PLUS, PACT, TQT, Method, Parameters, Step


class TrainableScale(nn.Module):
    """A scale that may be learned.

    base_scale   float32 buffer of shape () or (C,); the scale that training starts from, NaN until it is known
    stopped      int8 buffer, 0 or 1: whether nothing moves it any more, since it is `frozen` or was `given`. A copy that takes over the
                 buffers of another model is as frozen as that; int8, since averages of models subtract buffers, and bool has no difference
    method       how it is learned; None: it is not. The method's parameters are this module's, under the names the method gives them
    """

    base_scale: Tensor
    stopped: Tensor

    derived = ("stopped",)  # buffers that follow from other facts
    given = False  # whether the scale was given rather than found

    def __init__(self, base_scale: Tensor, method: Method | None) -> None:
        super().__init__()
        self._stopped = Remembered(False)
        self.method = method
        self.register_buffer("base_scale", base_scale)
        self.register_buffer("stopped", torch.zeros((), dtype=torch.int8, device="cpu"))
        if method is not None:
            for name, value in zip(method.parameters, method.start(base_scale, 1.0), strict=True):
                self.register_parameter(name, nn.Parameter(value))

    @property
    def reach(self) -> float:
        """The largest magnitude of an integer on the scale."""
        return 1.0

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained parameters by name, or their substitutes while FSDP holds them; empty where nothing is learned."""
        return {} if self.method is None else {name: getattr(self, name) for name in self.method.parameters}

    @property
    def frozen(self) -> bool:
        """Whether the scale was stopped."""
        return not self.given and self._stopped.get(lambda: bool(self.stopped), self.stopped)

    @frozen.setter
    def frozen(self, value: bool) -> None:
        with torch.no_grad():
            self.stopped.fill_(value or self.given)

    @property
    def learns(self) -> bool:
        """Whether gradients reach the scale."""
        return self.method is not None and not self.frozen and any(parameter.requires_grad for parameter in self.trained.values())

    def current(self, base: Tensor | None = None) -> Tensor:
        """Return the current scale, detached: that which training has made of `base`, or of `base_scale` where it is not given."""
        base = self.base_scale if base is None else base
        return base if self.method is None or self.frozen else self.method.scale(base, self._values(), self.reach)

    def _values(self) -> Parameters:
        return tuple(parameter.detach() for parameter in self.trained.values())

    @torch.no_grad()
    def assign(self, scale: Tensor) -> None:
        """Set the scale that training starts from."""
        self.base_scale.copy_(scale)
        if self.method is not None:
            for parameter, value in zip(self.trained.values(), self.method.start(self.base_scale, self.reach), strict=True):
                parameter.copy_(value)

    def stop(self) -> None:
        """The scale stays what it is, also for an optimizer that holds its parameter."""
        self.assign(self.current())
        self.frozen = True
        for parameter in self.trained.values():
            parameter.requires_grad_(False)
            parameter.grad = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Scales that were learned load where they are not, or are otherwise, and the other way round; one that stood still does so again.

        A scale that was given here gives way to one that stood still there, and to no other.
        """
        base, stopped = prefix + "base_scale", prefix + "stopped"
        saved = method_of(state_dict, prefix)
        if stopped in state_dict:
            moved = not bool(state_dict[stopped])
            if moved and self.given:
                state_dict[base] = self.base_scale.clone()
                _popped(state_dict, prefix, saved)
                saved = None
            if self.frozen != (not moved):
                for parameter in self.trained.values():
                    parameter.requires_grad_(moved)
            self.frozen = not moved and not self.given
            state_dict[stopped] = self.stopped.clone()
        if saved != self.method and base in state_dict:
            if saved is not None:
                values = _popped(state_dict, prefix, saved)
                if not self.frozen:
                    state_dict[base] = saved.scale(state_dict[base], values, self._reach_in(state_dict, prefix))
            if self.method is not None:
                start = self.method.start(state_dict[base].detach(), self._reach_in(state_dict, prefix))
                state_dict.update({prefix + name: value for name, value in zip(self.method.parameters, start, strict=True)})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _reach_in(self, state_dict: Mapping[str, Any], prefix: str) -> float:
        """The reach that a state_dict says."""
        return self.reach


def method_of(state_dict: Mapping[str, Any], prefix: str) -> Method | None:
    """How the scale was learned that a state_dict holds under a prefix."""
    known = (LSQ_PLUS, LSQ, PACT, TQT)  # one that has the parameters of another, and more, goes first
    return next((method for method in known if all(prefix + name in state_dict for name in method.parameters)), None)


def _popped(state_dict: dict[str, Any], prefix: str, method: Method | None) -> Parameters:
    """The parameters of a method, which the state_dict then has no more."""
    return () if method is None else tuple(state_dict.pop(prefix + name) for name in method.parameters)


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, exact: Tensor, scale: Tensor, base: Tensor, factor: Tensor | None, *how: Any
    ) -> Tensor:  # how: the method, low, high, and the parameters
        ctx.save_for_backward(value, exact, scale, base, factor)
        ctx.method, ctx.low, ctx.high, *_ = how
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, exact, scale, base, factor = ctx.saved_tensors
        real = value / scale
        inside = (real >= ctx.low) & (real <= ctx.high)
        of_real = gradient / scale  # of the dequantized value
        of_value = (of_real * inside).to(value.dtype) if ctx.needs_input_grad[0] else None
        of_exact = gradient if ctx.needs_input_grad[1] else None
        step = Step(of_real, real, exact, inside, scale, base, factor, ctx.low, ctx.high)
        return of_value, of_exact, *(None,) * 6, *(each.float() for each in ctx.method.gradients(step))


class _TransformedLearnedStep(torch.autograd.Function):
    """`_LearnedStep` in the form that functorch's transforms require, whose calls take several times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, exact: Tensor, scale: Tensor, base: Tensor, factor: Tensor | None, *how: Any) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.method, ctx.low, ctx.high, *_ = inputs[5:]

    backward = _LearnedStep.backward


def learned_step(
    value: Tensor, exact: Tensor, scale: Tensor, trained: TrainableScale, limits: IntType | Grid, factor: Tensor | None = None
) -> Tensor:
    """`exact`, the integers of `value` on `scale`, bit for bit, with the method's gradients to `value` and to what is trained of the scale.

    `scale` broadcasts against `value` and holds as many numbers as the trained one: that times `factor`. A factor
    of 0 marks a scale that another took the place of; the trained one then has no gradient.
    If `exact` requires a gradient, of what else decides on it, it has that of the result.
    """
    function = _TransformedLearnedStep if torch._C._are_functorch_transforms_active() else _LearnedStep
    result: Tensor = function.apply(  # type: ignore[no-untyped-call]
        value, exact, scale, trained.base_scale.clone(), factor, trained.method, limits.low, limits.high, *trained.trained.values()
    )
    return result
