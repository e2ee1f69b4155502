"""The larger and the smaller of two tensors, and the largest element along dimensions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import largest_size
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import Grid
from fxquant.ops.core import NORMED, Builder, Call, Instead, Ratio, Same, Trait, fact, lowered, register
from fxquant.ops.core.declare import NO_DIMENSIONS, Branch, are_fixed, nodes, on_the_output, real, refuse_nan
from fxquant.ops.core.record import Adapt
from fxquant.ops.core.samples import sample, written
from fxquant.ops.elementwise.activation import clamp, clamp_between
from fxquant.ops.elementwise.whole import alike
from fxquant.primitives import pool, product, selection, shape


def _reduced(rank: int, dim: Any) -> list[int]:
    chosen = dim if isinstance(dim, list | tuple) else [dim]
    return sorted(int(d) % rank for d in chosen) or list(range(rank))


def _refuses_amax(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = fact(arguments["input"]).shape
    if not sizes:
        return NO_DIMENSIONS
    bounded = all(largest_size(sizes[d]) is not None for d in _reduced(len(sizes), arguments["dim"]))
    return None if bounded else "it reduces the batch, whose size is not fixed"


def _axes(c: Call) -> list[int] | None:
    dims = c["dim"]
    return (list(dims) if isinstance(dims, list | tuple) else [dims]) or None


def _onnx_extremum(c: Call, operator: str, opposite: str) -> str:
    axes = _axes(c)
    if c.e.opset >= 12 or c.by_layers:
        return c.reduced(operator, c.input, axes, c["keepdim"])
    # onnxruntime would make one operator on int8 of the three, which that opset does not have.
    return c.do("Neg", c.reduced(opposite, c.do("Neg", c.input), axes, c["keepdim"]))


REDUCES: dict[str, Any] = {"demand": Same(), "refuses": _refuses_amax, "traits": frozenset({Trait.REDUCTION, Trait.HOMOGENEOUS})}


@lowered(onnx=lambda c: _onnx_extremum(c, "ReduceMax", "ReduceMin"), **REDUCES, samples=(sample(input=(3, 6, 6), dim=[1, 3]),))
def amax(lowering: Lowering, input: Quantized, dim: Any = (), keepdim: bool = False) -> Quantized:
    """Return the largest element along the dimensions `dim` (all dimensions if it is empty).

    Move the dimensions to the end and pool them as one window, on the operand's own scale.
    """
    reduced = _reduced(len(input.shape), dim)
    if sum(not isinstance(size, int) for size in input.shape) > 1 or not are_fixed(input.shape[d] for d in reduced):
        return input.with_value(lowering.call(selection.greatest, input.value, reduced, keepdim))
    others = [d for d in range(len(input.shape)) if d not in reduced]
    lengths: list[int] = [input.shape[d] for d in reduced]  # type: ignore[misc]
    count = math.prod(lengths)
    sizes = [1 if d in reduced else size if isinstance(size, int) else -1 for d, size in enumerate(input.shape) if keepdim or d in others]
    rows = lowering.call(shape.reshape, lowering.call(shape.permute, input.value, [*others, *reduced]), [-1, 1, count])
    largest = lowering.call(pool.max_pool, rows, [count], [count], [0], [0], [1])
    return input.with_value(lowering.call(shape.reshape, largest, sizes))


@lowered(onnx=lambda c: _onnx_extremum(c, "ReduceMin", "ReduceMax"), **REDUCES, samples=(sample(input=(3, 6, 6), dim=[2], keepdim=True),))
def amin(lowering: Lowering, input: Quantized, dim: Any = (), keepdim: bool = False) -> Quantized:
    """Return the smallest element along the dimensions `dim` (all dimensions if it is empty)."""
    return input.with_value(lowering.call(selection.least, input.value, _reduced(len(input.shape), dim), keepdim))


def _at_larger_scale(lowering: Lowering, primitive: Callable[..., Tensor], input: Quantized, other: Quantized) -> Any:
    """Bring the operand of the smaller scale to the larger one, compare, and bring the result to the output's scale."""
    grid = max(input.grid, other.grid, key=lambda each: float(each.scale))

    def brought(operand: Quantized, role: str) -> Any:
        return operand.value if operand.grid.equals(grid) else _between(lowering, operand.value, operand.grid, grid, role)

    least = lowering.call(primitive, brought(input, "input_"), brought(other, "other_"))
    to = lowering.output
    return least if to.grid.equals(grid) else _between(lowering, least, grid, to.grid, "")


def _between(lowering: Lowering, value: Any, before: Grid, to: Grid, role: str) -> Any:
    ratio = Ratio((before.scale,), (to.scale,))
    return lowering.holds(lowering.arithmetic.requantize(lowering, value, ratio, *to.bounds, to, role, before.type.bits), to)


def largest_along(input: Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return the largest elements along a dimension, and where they are."""
    return torch.max(input, dim, keepdim)


def smallest_along(input: Tensor, dim: int, keepdim: bool = False) -> Any:
    """Return the smallest elements along a dimension, and where they are."""
    return torch.min(input, dim, keepdim)


def _one_or_two(over_all: Callable[..., Any], along: Callable[..., Any]) -> Adapt:
    """Adapt torch.max and torch.min, which are three operators: of two tensors, over all elements, and along a dimension with indices."""

    def adapt(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> dict[str, Any] | Instead:
        other = dim if isinstance(dim, fx.Node) else other
        if other is not None:
            return {"input": input, "other": other}
        if dim is None:
            return Instead(over_all, {"input": input, "dim": []})
        return Instead(along, {"input": input, "dim": dim, "keepdim": keepdim})

    return adapt


def _extremum(primitive: Callable[..., Tensor], name: str, over_all: Any, along: Any, onnx: str, *traits: Trait) -> Callable[..., Tensor]:
    short, function = name[:3], getattr(torch, name)

    @lowered(
        f"f{short}",
        name=name,
        operands=("input", "other"),
        calls=dict.fromkeys((getattr(torch, short), short), _one_or_two(over_all, along)),
        refuses=nodes("input", "other", because="one of its operands is not a tensor"),
        traits=frozenset({Trait.HOMOGENEOUS, Trait.EXTREMUM, Trait.POINTWISE, *traits}),
        integers=alike(name),
        onnx=lambda c: c.do(onnx, c.operand("input"), c.operand("other")),
        samples=(sample(input=(3, 6), other=(3, 6)),),
    )
    def extremum(lowering: Lowering, input: Branch, other: Branch) -> Quantized:
        """Return the larger, or the smaller, of two tensors, element by element.

        Bring each operand to the output's scale, then compare.
        """
        for operand, role in ((input, "input"), (other, "other")):  # before its values are observed
            refuse_nan(lowering, operand, role)

        def compared() -> Any:
            whole = isinstance(input, Quantized) and isinstance(other, Quantized)
            if whole and primitive is product.minimum and lowering.arithmetic.smallest_at_larger_scale:
                return _at_larger_scale(lowering, primitive, input, other)  # type: ignore[arg-type]
            return lowering.call(primitive, on_the_output(lowering, input, "input"), on_the_output(lowering, other, "other"))

        return lowering.result(compared, lambda: function(real(input), real(other)))

    return extremum


maximum = _extremum(product.maximum, "maximum", amax, largest_along, "Max", Trait.BOUNDED_BELOW, Trait.DISJUNCTION)
minimum = _extremum(product.minimum, "minimum", amin, smallest_along, "Min", Trait.CONJUNCTION)


def _expand_clamp_between(build: Builder, input: fx.Node, min: Any, max: Any) -> Any:
    """Expand clamp: the maximum with `min`, then the minimum with `max`, each None, a tensor, or a number, which becomes a clamp."""
    if min is not None:
        input = build(maximum, input, min) if isinstance(min, fx.Node) else build(clamp, input, min, None)
    if max is not None:
        input = build(minimum, input, max) if isinstance(max, fx.Node) else build(clamp, input, None, max)
    return input


_LIMITS: dict[str, Any] = {"integers": alike("clamp"), "samples": written("clamp(x, y - 1, y)", within=NORMED)}
register("clamp_between", clamp_between, ("input", "min", "max"), expand=_expand_clamp_between, **_LIMITS)
