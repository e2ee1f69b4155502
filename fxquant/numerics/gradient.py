"""Modules that change gradients and no values: tensor hooks, and the backward of a custom `torch.autograd.Function`.

Each is called in the graph and returns its first operand. It acts while gradients are recorded; an integer graph has no such module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxquant.numerics.rounding import straight_through


class GradientRule(nn.Module):
    """Returns its first operand, with another gradient.

    label  its name in messages
    """

    label: str

    def same(self, other: GradientRule) -> bool:
        """Return whether `other`, of another trace of the model, is the rule of the same call."""
        return type(self) is type(other) and self.label == other.label

    def extra_repr(self) -> str:
        return self.label


class GradientHooks(GradientRule):
    """Calls the hooks of `Tensor.register_hook` on the gradient of its operand, in the order in which they were registered."""

    def __init__(self, hooks: Sequence[Callable[[Tensor], Tensor | None]]) -> None:
        super().__init__()
        self.hooks = tuple(hooks)
        self.label = "register_hook(" + ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in self.hooks) + ")"

    def forward(self, value: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not value.requires_grad:
            return value
        result = value.view_as(value)
        for hook in self.hooks:
            result.register_hook(hook)  # type: ignore[no-untyped-call]
        return result


@dataclass(frozen=True)
class Slot:
    """A reference, among the arguments of a custom function, to the operand of this position."""

    position: int


class CustomBackward(GradientRule):
    """Returns its first operand, with the gradient that a custom `torch.autograd.Function` passes on.

    The function runs in float on the other operands, dequantized, to save the context that its backward needs.
    Without other operands it runs on the first one: its backward reads no values, and it returns its argument.
    A function with several results has one `CustomBackward` per result; its backward is then called once for each, with zeros for the
    others.

    function   the user's class
    arguments  the arguments of `apply`, with a `Slot` for each tensor
    index      the index of the first operand among the function's results; None if it returns one tensor
    """

    def __init__(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...], index: int | None) -> None:
        super().__init__()
        self.function, self.arguments, self.index = function, arguments, index
        self.label = f"{function.__qualname__}.backward"

    def same(self, other: GradientRule) -> bool:
        """Return whether the other is of the same function and the same result."""
        return isinstance(other, CustomBackward) and (self.function, self.index) == (other.function, other.index)

    def forward(self, value: Tensor, *operands: Any) -> Tensor:
        operands = operands or (value,)
        if not torch.is_grad_enabled() or not any(isinstance(each, Tensor) and each.requires_grad for each in operands):
            return value

        def filled(argument: Any) -> Any:
            if not isinstance(argument, Slot):
                return argument
            operand = operands[argument.position]
            # A clone, since the function may change its argument in place.
            return operand.clone() if isinstance(operand, Tensor) and operand.is_floating_point() else operand

        outputs = self.function.apply(*(tree_map(filled, argument) for argument in self.arguments))  # type: ignore[no-untyped-call]
        result = outputs if self.index is None else outputs[self.index]
        return straight_through(result, value.detach()) if result.requires_grad else value.detach()


class Overwritten(GradientRule):
    """Returns its first operand, with the gradient of the second: a tensor that was changed in place where no gradient was recorded."""

    label = "a change in place without gradients"

    def forward(self, value: Tensor, before: Tensor) -> Tensor:
        return straight_through(before, value.detach()) if torch.is_grad_enabled() and before.requires_grad else value
