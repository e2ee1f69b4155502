"""Round weights to integers, with a straight-through gradient; and modules that change gradients alone."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# ---- Clamp tensors, with a gradient that does not depend on the version of PyTorch -----------------------------------
#
#     y = min(max(x, low), high),    ∂y/∂x = 1 where low ≤ x ≤ high, 0 elsewhere
#
# `torch.clamp` has this gradient up to PyTorch 2.13, and 0 at the limits themselves from 2.14 on. On a grid many elements are at a limit.
Limit = Tensor | float | None


@functools.lru_cache(maxsize=4096)
def _beyond(limit: float, to: float, dtype: torch.dtype) -> float:
    """Return the next number of a dtype beyond a limit, towards `to`."""
    ends = (torch.tensor(each, dtype=torch.float64, device="cpu").to(dtype) for each in (limit, to))
    return float(torch.nextafter(*ends))


def _of_value(gradient: Tensor, value: Tensor, low: Limit, high: Limit) -> Tensor:
    """Return the gradient of a clamp's operand from that of its result: `gradient` inside of the bounds, 0 outside."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        inside = torch.ones_like(value, dtype=torch.bool)
        inside = inside if low is None else inside & (value >= low)
        return torch.where(inside if high is None else inside & (value <= high), gradient, 0.0)
    # One kernel, in every version: hardtanh has a gradient between its limits, and none at them.
    bottom = -math.inf if low is None else _beyond(low, -math.inf, value.dtype)
    top = math.inf if high is None else _beyond(high, math.inf, value.dtype)
    result: Tensor = torch.ops.aten.hardtanh_backward(gradient, value, bottom, top)
    return result


class Transformable(torch.autograd.Function):
    """A function in the form that functorch's transforms ask for: `forward` without a context, and `setup_context`.

    Calls of this form take several times as long, so where no transform is active `call` takes another form, which is made of it.
    """

    generate_vmap_rule = True
    _direct: type[torch.autograd.Function]

    def __init_subclass__(cls) -> None:
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = cls.forward(*inputs)
            cls.setup_context(ctx, inputs, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(cls.backward)}
        cls._direct = type(f"{cls.__name__}Directly", (torch.autograd.Function,), members)

    @classmethod
    def call(cls, *inputs: Any) -> Any:
        """Return the function's result, in the form that fits."""
        return (cls if torch._C._are_functorch_transforms_active() else cls._direct).apply(*inputs)  # type: ignore[no-untyped-call]


class _Clamped(Transformable):
    @staticmethod
    def forward(value: Tensor, low: Limit, high: Limit) -> Tensor:
        return torch.clamp(value, low, high)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.limits = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _of_value(gradient, *ctx.saved_tensors, *ctx.limits), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _of_value(tangent, *ctx.saved_tensors, *ctx.limits)


def clamped(value: Tensor, low: Limit = None, high: Limit = None) -> Tensor:
    """Return `value.clamp(low, high)`, of the value's shape and dtype, with the gradient above. Limits that are tensors have no gradient.

    While a graph is traced, `torch.clamp` itself is called.
    """
    if low is None and high is None:
        return value
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    without_gradient = traced or not value.requires_grad or not torch.is_grad_enabled()
    if without_gradient and not torch._C._are_functorch_transforms_active():
        return torch.clamp(value, low, high)  # type: ignore[arg-type]
    result: Tensor = _Clamped.call(value, low, high)
    return result


class Rounding(nn.Module):
    """The rounding of a weight to integers. Subclasses round in other ways; their parameters train with the model's parameters.

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


class _StraightThrough(Transformable):
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
    """Return `exact`, bit for bit, of its shape and dtype, with the gradient of `smooth`; also inside of torch.func's transforms."""
    result: Tensor = _StraightThrough.call(smooth, exact)
    return result


# ---- Modules that change gradients and no values ---------------------------------------------------------------------
@dataclass(frozen=True)
class Slot:
    """A reference, among the arguments of a custom function, to the operand of this position."""

    position: int


class GradientRule(nn.Module):
    """Returns its first operand unchanged, with the gradient that a custom `torch.autograd.Function` passes on.

    It is called in the graph, and acts while gradients are recorded; an integer graph has no such module.
    The function runs in float on the other operands, dequantized, to save the context that its backward needs.
    Without other operands it runs on the first one: its backward reads no values, and it returns its argument.
    A function with several results has one rule per result; its backward is then called once for each, with zeros for the others.

    function   the user's class
    arguments  the arguments of `apply`, with a `Slot` for each tensor
    index      the index of the first operand among the function's results; None if it returns one tensor
    """

    def __init__(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...], index: int | None) -> None:
        super().__init__()
        self.function, self.arguments, self.index = function, arguments, index
        self.label = f"{function.__qualname__}.backward"  # its name in messages

    def extra_repr(self) -> str:
        return self.label

    def same(self, other: "GradientRule") -> bool:
        """Return whether `other`, of another trace of the model, is of the same function and the same result."""
        return (self.function, self.index) == (other.function, other.index)

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
