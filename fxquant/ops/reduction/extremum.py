"""The larger and the smaller of two tensors, and the largest element along dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import Grid
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.declare import spelled
from fxquant.ops.core.demands import Same
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import Adapt, Instead, Operator, register
from fxquant.ops.core.traits import Trait
from fxquant.ops.elementwise.activation import clamp, clamp_between
from fxquant.primitives import pool, product, selection, shape

# ---- of two tensors -------------------------------------------------------------------------------------------------


def _extremum(
    float_function: Callable[[Tensor, Tensor], Tensor], primitive: Callable[..., Tensor]
) -> Callable[[Lowering, Quantized | Tensor, Quantized | Tensor], Quantized]:
    def lower(lowering: Lowering, input: Quantized | Tensor, other: Quantized | Tensor) -> Quantized:
        """Bring each operand to the output's scale, then compare."""
        to = lowering.output
        for role, operand in (("input", input), ("other", other)):
            if isinstance(operand, Tensor) and bool(torch.isnan(operand).any()):  # an infinite one saturates
                lowering.parameters[f"its constant {role!r}"] = operand
                raise lowering.not_finite()

        def integers(operand: Quantized | Tensor, role: str) -> Any:
            if isinstance(operand, Quantized):
                return lowering.rescale(operand, to, f"{role}_")
            grid = to.grid
            lowering.describe(role, grid.scale, zero_point=grid.zero_point)
            return lowering.constant(role, lowering.stored(grid.quantize(operand), grid), grid.type.storage)

        def real(operand: Quantized | Tensor) -> Tensor:
            return operand.real() if isinstance(operand, Quantized) else operand

        def compared() -> Any:
            whole = isinstance(input, Quantized) and isinstance(other, Quantized)
            if whole and primitive is product.minimum and lowering.arithmetic.smallest_at_larger_scale:
                return _at_larger_scale(lowering, primitive, input, other)  # type: ignore[arg-type]
            return lowering.call(primitive, integers(input, "input"), integers(other, "other"))

        return lowering.result(compared, lambda: float_function(real(input), real(other)))

    return lower


def _at_larger_scale(lowering: Lowering, primitive: Callable[..., Tensor], input: Quantized, other: Quantized) -> Any:
    """Bring the operand of the smaller scale to the larger one, compare, and bring the result to the output's scale."""
    grid = max(input.grid, other.grid, key=lambda each: float(each.scale))

    def brought(operand: Quantized, role: str) -> Any:
        return operand.value if operand.grid.equals(grid) else _between(lowering, operand.value, operand.grid, grid, role)

    least = lowering.call(primitive, brought(input, "input_"), brought(other, "other_"))
    to = lowering.output
    return least if to.grid.equals(grid) else _between(lowering, least, grid, to.grid, "")


def _between(lowering: Lowering, value: Any, given: Grid, to: Grid, role: str) -> Any:
    ratio = Ratio((given.scale,), (to.scale,))
    return lowering.holds(lowering.arithmetic.requantize(lowering, value, ratio, *to.bounds, to, role, given.type.bits), to)


def maximum(input: Tensor, other: Tensor) -> Tensor:
    """Return the larger of two tensors, element by element."""
    return torch.maximum(input, other)


def minimum(input: Tensor, other: Tensor) -> Tensor:
    """Return the smaller of two tensors, element by element."""
    return torch.minimum(input, other)


def _refuses_extremum(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = all(isinstance(arguments[name], fx.Node) and isinstance(fact(arguments[name]), TensorFact) for name in ("input", "other"))
    return None if known else "one of its operands is not a tensor"


def largest_along(input: Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return the largest elements along a dimension, and where they are."""
    return torch.max(input, dim, keepdim)


def smallest_along(input: Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return the smallest elements along a dimension, and where they are."""
    return torch.min(input, dim, keepdim)


def _one_or_two(over_all: Callable[..., Any], along: Callable[..., Any]) -> Adapt:
    """max and min are three operators: of two tensors, of all elements, and of those along a dimension, with their places."""

    def adapt(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> dict[str, Any] | Instead:
        other = dim if isinstance(dim, fx.Node) else other
        if other is not None:
            return {"input": input, "other": other}
        if dim is None:
            return Instead(over_all, {"input": input, "dim": []})
        return Instead(along, {"input": input, "dim": dim, "keepdim": keepdim})

    return adapt


def _onnx_extremum(operator: str) -> Callable[[Call], str]:
    return lambda c: c.do(operator, c.operand("input"), c.operand("other"))


def amax(input: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """Return the largest element along dimensions (all of them if there are none)."""
    return torch.amax(input, dim, keepdim)


def amin(input: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """Return the smallest element along dimensions (all of them if there are none)."""
    return torch.amin(input, dim, keepdim)


def _of_two(function: Callable[..., Tensor], primitive: Callable[..., Tensor], onnx: str, calls: dict[Any, Any], *traits: Trait) -> None:
    register(
        Operator(
            function.__name__,
            function,
            ("input", "other"),
            _extremum(function, primitive),
            functions={form: adapt for form, adapt in calls.items() if callable(form)},
            methods={form: adapt for form, adapt in calls.items() if isinstance(form, str)},
            refuses=_refuses_extremum,
            traits=frozenset({Trait.HOMOGENEOUS, *traits}),
            onnx=_onnx_extremum(onnx),
        )
    )


_larger = {**dict.fromkeys((torch.max, "max"), _one_or_two(amax, largest_along)), **dict.fromkeys((torch.fmax, "fmax"))}
_of_two(maximum, product.maximum, "Max", {**dict.fromkeys(spelled("maximum")), **_larger}, Trait.BOUNDED_BELOW)
_smaller = {**dict.fromkeys((torch.min, "min"), _one_or_two(amin, smallest_along)), **dict.fromkeys((torch.fmin, "fmin"))}
_of_two(minimum, product.minimum, "Min", {**dict.fromkeys(spelled("minimum")), **_smaller})


# ---- along dimensions -----------------------------------------------------------------------------------------------


def _reduced(rank: int, dim: Any) -> list[int]:
    chosen = dim if isinstance(dim, list | tuple) else [dim]
    return sorted(int(d) % rank for d in chosen) or list(range(rank))


def _lower_amax(lowering: Lowering, input: Quantized, dim: Any, keepdim: bool) -> Quantized:
    """Move the dimensions to the end and pool them as one window, on the operand's own scale."""
    reduced = _reduced(len(input.shape), dim)
    kept = [d for d in range(len(input.shape)) if d not in reduced]
    lengths: list[int] = [input.shape[d] for d in reduced]  # type: ignore[misc]
    count = math.prod(lengths)
    sizes = [1 if d in reduced else size if isinstance(size, int) else -1 for d, size in enumerate(input.shape) if keepdim or d in kept]
    rows = lowering.call(shape.reshape, lowering.call(shape.permute, input.value, [*kept, *reduced]), [-1, 1, count])
    largest = lowering.call(pool.max_pool, rows, [count], [count], [0], [0], [1])
    return input.with_value(lowering.call(shape.reshape, largest, sizes))


def _refuses_amax(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    operand = fact(arguments["input"])
    if not isinstance(operand, TensorFact):
        return "its operand is not a tensor"
    if not operand.shape:
        return "its operand has no dimensions"
    reduced = _reduced(len(operand.shape), arguments["dim"])
    if any(not isinstance(operand.shape[d], int) for d in reduced):
        return "it reduces the batch, whose size is not fixed"
    depending = [size for size in operand.shape if not isinstance(size, int)]
    return "two of its sizes depend on the batch" if len(depending) > 1 else None


def _onnx_amax(c: Call) -> str:
    dims = c["dim"]
    axes = (list(dims) if isinstance(dims, list | tuple) else [dims]) or None
    if c.e.opset >= 12 or c.by_layers:
        return c.reduced("ReduceMax", c.input, axes, c["keepdim"])
    # onnxruntime would make one operator on int8 of the three, which that opset does not have.
    return c.do("Neg", c.reduced("ReduceMin", c.do("Neg", c.input), axes, c["keepdim"]))


register(
    Operator(
        "amax",
        amax,
        ("input",),
        _lower_amax,
        Same(),
        traits=frozenset({Trait.REDUCTION, Trait.HOMOGENEOUS}),
        functions={torch.amax: None},
        methods={"amax": None},
        refuses=_refuses_amax,
        onnx=_onnx_amax,
    )
)


def _lower_amin(lowering: Lowering, input: Quantized, dim: Any, keepdim: bool) -> Quantized:
    return input.with_value(lowering.call(selection.least, input.value, _reduced(len(input.shape), dim), keepdim))


def _onnx_amin(c: Call) -> str:
    dims = c["dim"]
    return c.reduced("ReduceMin", c.input, (list(dims) if isinstance(dims, list | tuple) else [dims]) or None, c["keepdim"])


register(
    Operator(
        "amin",
        amin,
        ("input",),
        _lower_amin,
        Same(),
        traits=frozenset({Trait.REDUCTION, Trait.HOMOGENEOUS}),
        functions={torch.amin: None},
        methods={"amin": None},
        refuses=_refuses_amax,
        onnx=_onnx_amin,
    )
)


# ---- limits that are tensors -----------------------------------------------------------------------------------------


def _expand_clamp_between(build: Builder, input: fx.Node, min: Any, max: Any) -> Any:
    """Return the larger of it and its lower limit, then the smaller of that and its upper one; a number limits as a clamp."""
    if min is not None:
        input = build(maximum, input, min) if isinstance(min, fx.Node) else build(clamp, input, min, None)
    if max is not None:
        input = build(minimum, input, max) if isinstance(max, fx.Node) else build(clamp, input, None, max)
    return input


register(Operator("clamp_between", clamp_between, ("input", "min", "max"), expand=_expand_clamp_between))
