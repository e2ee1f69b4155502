"""Comparisons: booleans from integers, operators on booleans alone, the selection between two tensors by a boolean, and extrema.

A comparison with a number is exact: q · scale is in the relation to the number, as a float32, just where q is in it to a certain
integer. Two tensors on different grids are brought to the common scale of a sum first.
"""

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import largest_size
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import BOUNDARY_LIMIT, Grid, Ratio
from fxquant.ops.core import NORMED, Builder, Call, Instead, Plain, Same, TensorFact, Trait, fact, is_parameter, lowered, register
from fxquant.ops.core.declare import NO_DIMENSIONS, Branch, are_fixed, dtype_of, is_finite, nodes, on_the_output, real, refuse_nan
from fxquant.ops.core.record import Adapt
from fxquant.ops.core.samples import ALIGNED, sample, sampled, written
from fxquant.ops.elementwise.activation import clamp, clamp_between
from fxquant.ops.elementwise.whole import WHOLE, alike
from fxquant.primitives import pool, product, selection, shape

NEVER = 2 * int(BOUNDARY_LIMIT)  # no integer of a grid is as large


def threshold(value: Tensor | float, grid: Grid, relation: str) -> Tensor:
    """Return the integers to which centred integers of the grid are in the relation exactly where their float values are to `value`.

    `value` is read as float32, as PyTorch compares it. The quotient of two float32 numbers in float64 shows whether it is an integer.
    """
    real = torch.as_tensor(value, device=grid.scale.device).detach().to(torch.float32)
    quotient = (real.double() / grid.scale.double()).clamp(-BOUNDARY_LIMIT, BOUNDARY_LIMIT)
    rounding = selection.RELATIONS[relation].rounding
    if rounding is None:
        return torch.where(quotient == quotient.round(), quotient, float(NEVER))
    return quotient.floor() if rounding == "floor" else quotient.ceil()


def _common(lowering: Lowering, input: Quantized, other: Quantized) -> tuple[Any, Any]:
    """Return the integers of two tensors on one scale: their own, or 2^-14 of the larger one, as in a sum."""
    if input.grid.equals(other.grid):
        return input.value, other.value
    larger = input.scale if bool(input.scale >= other.scale) else other.scale
    unit = torch.tensor(2.0**lowering.arithmetic.add_fraction_bits, dtype=torch.float64, device=larger.device)
    wide = max(input.dtype.bits, other.dtype.bits) > 8

    def aligned(operand: Quantized, role: str) -> Any:
        return lowering.align(operand, Ratio((operand.scale, unit), (larger,)), role, wide)

    return aligned(input, "input"), aligned(other, "other")


def _lower_comparison(relation: str) -> Callable[..., Any]:
    def lower(lowering: Lowering, input: Quantized | Tensor | float, other: Quantized | Tensor | float) -> Any:
        if isinstance(input, Quantized) and isinstance(other, Quantized):
            return lowering.call(selection.compare, *_common(lowering, input, other), relation)
        first = isinstance(input, Quantized)
        tensor, value, holds = (input, other, relation) if first else (other, input, selection.RELATIONS[relation].swapped)
        assert isinstance(tensor, Quantized)
        assert not isinstance(value, Quantized)
        role = "other" if first else "input"
        lowering.describe(role, tensor.scale)
        limit = lowering.constant(role, threshold(value, tensor.grid, holds), torch.int32)
        return lowering.call(selection.compare, tensor.value, limit, holds)

    return lower


def _refuses_comparison(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for value in (arguments["input"], arguments["other"]):
        if isinstance(value, fx.Node) and not isinstance(fact(value), TensorFact) and not is_parameter(value):
            return "it compares with a number that is computed"
        if not isinstance(value, fx.Node) and (not isinstance(value, int | float) or math.isnan(value)):
            return f"it compares with {value!r}"
    return None


def _compares(name: str, *long: str) -> None:
    """Register one of PyTorch's comparisons; in place, `lt_` and the like, they make numbers, and are not among its call forms."""
    lowered(
        name=name,
        by_name=False,
        calls=dict.fromkeys((getattr(operator, name), *(getattr(torch, each) for each in long), name, f"__{name}__", *long)),
        function=getattr(torch, name),
        operands=("input", "other"),
        demand=Plain("bool"),
        refuses=_refuses_comparison,
        traits=frozenset({Trait.POINTWISE}),
        samples=(sample(input=(3, 6, 6), other=(3, 6, 6), share=0.02), *written(f"x.{name}(0.3)", *(["x.bool()"] if name == "ne" else []))),
    )(_lower_comparison(name))


for _words in ("eq", "ne not_equal", "lt less", "le less_equal", "gt greater", "ge greater_equal"):
    _compares(*_words.split())


@lowered(function=torch.signbit, demand=Plain("bool"), dtypes={"input": "int16"})  # on 8 bits, what is negative and small is 0
@sampled("signbit(x)")
def signbit(lowering: Lowering, input: Quantized) -> Any:
    """Return whether elements are below 0: integers have no -0."""
    return _lower_comparison("lt")(lowering, input, 0.0)


LOGIC = frozenset({Trait.POINTWISE, Trait.COMPARES_WITH_ZERO})


def _refuses_logic(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return next((f"its {name!r} is not a boolean tensor" for name, value in arguments.items() if dtype_of(value) != torch.bool), None)


def _combines(operation: str, bitwise: Callable[..., Any]) -> None:
    """Register one of PyTorch's functions of two booleans."""

    def lower(lowering: Lowering, input: Any, other: Any) -> Any:
        names = [lowering.given(role, value, torch.bool) for role, value in (("input", input), ("other", other))]
        return lowering.call(selection.logic, *names, operation)

    lowered(
        f"bitwise_{operation}",
        f"__{operation}__",
        bitwise,
        name=f"logical_{operation}",
        function=getattr(torch, f"logical_{operation}"),
        operands=(),
        demand=Plain("bool"),
        reads=("input", "other"),
        refuses=_refuses_logic,
        traits=LOGIC,
        integers=alike(operation),
        samples=written(
            f"logical_{operation}(x > 0, y > 0.5)",
            f"bitwise_{operation}(x > 0, y > 0.5)",
            f"operator.{bitwise.__name__}(x > 0, y > 0.5)",
            f"(x > 0).__{operation}__(y > 0.5)",
        ),
    )(lower)


_combines("and", operator.and_)
_combines("or", operator.or_)
_combines("xor", operator.xor)


@lowered(
    *("bitwise_not", "__invert__", operator.invert),
    function=torch.logical_not,
    reads=("input",),
    refuses=_refuses_logic,
    demand=Plain("bool"),
    traits=LOGIC,
    integers=lambda arguments, operand: (WHOLE["sub"], {"input": -1, "other": arguments["input"], "alpha": 1}),
)
@sampled("logical_not(x > 0)", "bitwise_not(x > 0)", "~(x > 0)", "(x > 0).__invert__()")
def logical_not(lowering: Lowering, input: Any) -> Any:
    """Compute torch.logical_not."""
    return lowering.call(selection.opposite, lowering.given("input", input, torch.bool))


def _of_finite_numbers(name: str, relation: str, *traits: Trait) -> None:
    """Register a test that all elements of a quantized tensor pass, or none."""

    def lower(lowering: Lowering, input: Quantized) -> Any:
        """Compare the integers with themselves: they are finite, so all elements pass `relation`, or none."""
        return lowering.call(selection.compare, input.value, input.value, relation)

    lowered(name=name, function=getattr(torch, name), demand=Plain("bool"), traits=frozenset(traits), samples=written(f"{name}(x)"))(lower)


_of_finite_numbers("isnan", "ne", Trait.POINTWISE)
_of_finite_numbers("isinf", "ne", Trait.POINTWISE)
_of_finite_numbers("isposinf", "ne")
_of_finite_numbers("isneginf", "ne")
_of_finite_numbers("isfinite", "eq", Trait.POINTWISE)
_of_finite_numbers("isreal", "eq")


def _refuses_truth(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if dtype_of(arguments["input"]) != torch.bool:
        return "its operand is not a boolean tensor"
    sizes, dim = fact(arguments["input"]).shape, arguments["dim"]
    if not sizes:
        return "its operand is a single boolean without dimensions"
    reduced = dim if isinstance(dim, list | tuple) else [dim]
    bounded = dim is not None and None not in [largest_size(sizes[d]) for d in reduced]
    return None if bounded else "it reduces the batch"


def _truth(every: bool, *texts: str) -> Callable[..., Tensor]:
    @lowered(
        name="all" if every else "any",
        demand=Plain("bool"),
        reads=("input",),
        refuses=_refuses_truth,
        traits=frozenset({Trait.COMPARES_WITH_ZERO}),
        samples=written(*texts),
    )
    def truth(lowering: Lowering, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """Reduce booleans along dimensions by any, or, if `every`, by all."""
        return lowering.call(selection.truth, input, list(dim) if isinstance(dim, list | tuple) else [dim], keepdim, every)

    return truth


any = _truth(False, "any((x > 0) & (y > 0.5), 1)", "any(x > 1, (2, 3), True)")
all = _truth(True, "all((x > -1) | (y > 0.5), 2, keepdim=True)")


@lowered(demand=Same(), traits=frozenset({Trait.CHOOSES, Trait.POINTWISE}))
@sampled("nan_to_num(x, 1.0).relu()")
def nan_to_num(
    lowering: Lowering, input: Quantized, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Quantized:
    """Replace NaN and infinite elements of a tensor by numbers: no grid has them."""
    return input


# ---- selection between two tensors, by a boolean mask
def _where(condition: Tensor, input: Tensor | float, other: Tensor | float) -> Tensor:
    result = torch.where(condition, input, other)
    return result if result.is_floating_point() else result.float()


def _refuses_where(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if dtype_of(arguments["condition"]) != torch.bool:
        return "its condition is not a boolean tensor"
    for name in ("input", "other"):
        value = arguments[name]
        if not isinstance(value, fx.Node) and not is_finite(value):
            return f"its {name!r} is {value!r}"
    return None


def _function(condition: Any, input: Any = None, other: Any = None, **named: Any) -> dict[str, Any] | str:
    input = named.get("self", input)
    if input is None or other is None:
        return "the size of its result depends on the data"
    return {"condition": condition, "input": input, "other": other}


@lowered(
    "masked_fill",
    operands=("input", "other"),
    function=_where,
    adapt=lambda input, mask, value: {"condition": mask, "input": value, "other": input},
    calls={torch.where: _function, "where": lambda input, condition, other: {"condition": condition, "input": input, "other": other}},
    carries=("input", "other"),
    reads=("condition",),
    refuses=_refuses_where,
    traits=frozenset({Trait.CHOOSES, Trait.REARRANGES, Trait.POINTWISE}),
    onnx=lambda c: c.do("Where", c.operand("condition"), c.operand("input"), c.operand("other")),
)
@sampled("torch.where(x > 0, x, y)", "torch.where(x > y, x, y)", "x.where(y < 0.7, 0.2)", "masked_fill(x, y > 0.5, -0.7)")
@sampled("x.masked_fill((y > 0.5)[:, :1], 0.3)", "torch.where((x > 0)[:, :1].expand(-1, 3, -1, -1).flip(2), x, y)", within=ALIGNED)
@sampled("(x > 0).float() * y + x * (y > 0.5)", within=ALIGNED)
def where(lowering: Lowering, condition: Any, input: Branch, other: Branch) -> Quantized:
    """Return `input` where the condition holds, else `other`; each is a tensor or a number.

    Bring each branch to the output's scale, then choose.
    """
    chosen = lowering.given("condition", condition, torch.bool)
    return lowering.result(
        lambda: lowering.call(selection.choose, on_the_output(lowering, input, "input"), on_the_output(lowering, other, "other"), chosen),
        lambda: where(condition, real(input), real(other)),
    )


# ---- Extrema ---------------------------------------------------------------------------------------------------------
def _reduced(rank: int, dim: Any) -> list[int]:
    chosen = dim if isinstance(dim, list | tuple) else [dim]
    return sorted(int(d) % rank for d in chosen) or list(range(rank))


def _refuses_amax(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    sizes = fact(arguments["input"]).shape
    if not sizes:
        return NO_DIMENSIONS
    bounded = builtins.all(largest_size(sizes[d]) is not None for d in _reduced(len(sizes), arguments["dim"]))
    return None if bounded else "it reduces the batch, whose size is not fixed"


def _onnx_extremum(c: Call, operator: str, opposite: str) -> str:
    axes = (list(c["dim"]) if isinstance(c["dim"], list | tuple) else [c["dim"]]) or None
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
