"""Comparisons: booleans from integers, and operators on booleans alone.

A comparison with a number is exact: q · scale is in the relation to the number, as a float32, just where q is in it to a certain
integer. Two tensors on different grids are brought to the common scale of a sum first.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import BOUNDARY_LIMIT, Grid
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import Operator, Plain, Same, register
from fxquant.ops.core.traits import Trait
from fxquant.primitives import comparison, selection

NEVER = 2 * int(BOUNDARY_LIMIT)  # no integer of a grid is as large
REVERSED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def threshold(value: Tensor | float, grid: Grid, relation: str) -> Tensor:
    """Return the integers to which centred integers of the grid are in the relation exactly where their float values are to `value`.

    `value` is read as float32, as PyTorch compares it. The quotient of two float32 numbers in float64 shows whether it is an integer.
    """
    real = torch.as_tensor(value, device=grid.scale.device).detach().to(torch.float32)
    quotient = (real.double() / grid.scale.double()).clamp(-BOUNDARY_LIMIT, BOUNDARY_LIMIT)
    if relation in ("gt", "le"):
        return quotient.floor()
    return quotient.ceil() if relation in ("ge", "lt") else torch.where(quotient == quotient.round(), quotient, float(NEVER))


def _common(lowering: Lowering, input: Quantized, other: Quantized) -> tuple[Any, Any]:
    """Return the integers of two tensors on one scale: their own, or 2^-14 of the larger one, as in a sum."""
    if input.grid.equals(other.grid):
        return input.value, other.value
    larger = input.scale if bool(input.scale >= other.scale) else other.scale
    unit = torch.tensor(2.0**lowering.arithmetic.add_fraction_bits, dtype=torch.float64, device=larger.device)
    wide = max(input.dtype.bits, other.dtype.bits) > 8
    left, right = (
        lowering.align(operand, Ratio((operand.scale, unit), (larger,)), role, wide)
        for role, operand in (("input", input), ("other", other))
    )
    return left, right


def _lower_comparison(relation: str) -> Callable[..., Any]:
    def lower(lowering: Lowering, input: Quantized | Tensor | float, other: Quantized | Tensor | float) -> Any:
        if isinstance(input, Quantized) and isinstance(other, Quantized):
            return lowering.call(comparison.compare, *_common(lowering, input, other), relation)
        first = isinstance(input, Quantized)
        tensor, value, holds = (input, other, relation) if first else (other, input, REVERSED[relation])
        assert isinstance(tensor, Quantized)
        assert not isinstance(value, Quantized)
        role = "other" if first else "input"
        lowering.describe(role, tensor.scale)
        limit = lowering.constant(role, threshold(value, tensor.grid, holds), torch.int32)
        return lowering.call(comparison.compare, tensor.value, limit, holds)

    return lower


def _refuses_comparison(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for value in (arguments["input"], arguments["other"]):
        if isinstance(value, fx.Node) and not isinstance(fact(value), TensorFact) and not is_parameter(value):
            return "it compares with a number that is computed"
        if not isinstance(value, fx.Node) and (not isinstance(value, int | float) or math.isnan(value)):
            return f"it compares with {value!r}"
    return None


def _onnx_comparison(relation: str) -> Callable[[Call], str]:
    name = {"eq": "Equal", "ne": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}[relation]

    def write(c: Call) -> str:
        result = c.do(name, c.operand("input"), c.operand("other"))
        return c.do("Not", result) if relation == "ne" else result

    return write


for _name, _long in (("eq", ""), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")):
    _spellings = [getattr(torch, _long)] if _long else []
    register(
        Operator(
            _name,
            getattr(torch, _name),
            ("input", "other"),
            _lower_comparison(_name),
            Plain("bool"),
            functions=dict.fromkeys([getattr(operator, _name), *_spellings]),
            methods=dict.fromkeys([_name, f"__{_name}__", *([_long] if _long else [])]),
            refuses=_refuses_comparison,
            parameters={"input": inspect.Parameter.empty, "other": inspect.Parameter.empty},
        )
    )

register(
    Operator(
        "signbit",
        torch.signbit,
        ("input",),
        lambda lowering, input: _lower_comparison("lt")(lowering, input, 0.0),  # integers have no -0
        Plain("bool"),
        dtypes={"input": "int16"},  # on 8 bits, what is negative and small is 0
        methods={"signbit": None},
        parameters={"input": inspect.Parameter.empty},
    )
)

# ---- of booleans -----------------------------------------------------------------------------------------------------


def _lower_logic(operation: str) -> Callable[..., Any]:
    def lower(lowering: Lowering, input: Any, other: Any) -> Any:
        names = [lowering.given(role, value, torch.bool) for role, value in (("input", input), ("other", other))]
        return lowering.call(comparison.logic, *names, operation)

    return lower


def _lower_not(lowering: Lowering, input: Any) -> Any:
    return lowering.call(comparison.opposite, lowering.given("input", input, torch.bool))


def _refuses_logic(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for name, value in arguments.items():
        known = fact(value) if isinstance(value, fx.Node) else None
        if not isinstance(known, TensorFact) or known.dtype != torch.bool:
            return f"its {name!r} is not a boolean tensor"
    return None


for _operation, _bitwise in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
    register(
        Operator(
            f"logical_{_operation}",
            getattr(torch, f"logical_{_operation}"),
            (),
            _lower_logic(_operation),
            Plain("bool"),
            reads=("input", "other"),
            functions=dict.fromkeys((_bitwise, getattr(torch, f"bitwise_{_operation}"))),
            methods=dict.fromkeys(
                name
                for plain in (f"logical_{_operation}", f"bitwise_{_operation}", f"__{_operation}__")
                for name in ((plain,) if plain.startswith("__") else (plain, f"{plain}_"))
            ),
            refuses=_refuses_logic,
            parameters={"input": inspect.Parameter.empty, "other": inspect.Parameter.empty},
        )
    )
register(
    Operator(
        "logical_not",
        torch.logical_not,
        (),
        _lower_not,
        Plain("bool"),
        reads=("input",),
        functions=dict.fromkeys((operator.invert, torch.bitwise_not)),
        methods=dict.fromkeys(("logical_not", "logical_not_", "bitwise_not", "bitwise_not_", "__invert__")),
        refuses=_refuses_logic,
        parameters={"input": inspect.Parameter.empty},
    )
)

# ---- what no integer is ----------------------------------------------------------------------------------------------


def _lower_constant(relation: str) -> Callable[..., Any]:
    def lower(lowering: Lowering, input: Quantized) -> Any:
        """Integers stand for finite numbers alone: what is said of each of them is said of it and itself."""
        return lowering.call(comparison.compare, input.value, input.value, relation)

    return lower


for _name, _relation in (("isnan", "ne"), ("isinf", "ne"), ("isposinf", "ne"), ("isneginf", "ne"), ("isfinite", "eq"), ("isreal", "eq")):
    register(
        Operator(
            _name,
            getattr(torch, _name),
            ("input",),
            _lower_constant(_relation),
            Plain("bool"),
            methods=dict.fromkeys((_name,)) if hasattr(Tensor, _name) else {},
            parameters={"input": inspect.Parameter.empty},
        )
    )

# ---- of all along dimensions -----------------------------------------------------------------------------------------


def any(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return whether any of the booleans along dimensions is true."""
    return torch.any(input, dim, keepdim)


def all(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return whether all booleans along dimensions are true."""
    return torch.all(input, dim, keepdim)


def _lower_truth(every: bool) -> Callable[..., Any]:
    def lower(lowering: Lowering, input: Any, dim: Any, keepdim: bool) -> Any:
        return lowering.call(selection.truth, input, list(dim) if isinstance(dim, list | tuple) else [dim], keepdim, every)

    return lower


def _refuses_truth(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    known = fact(arguments["input"])
    if not isinstance(known, TensorFact) or known.dtype != torch.bool:
        return "its operand is not a boolean tensor"
    if not known.shape:
        return "its operand is a single boolean without dimensions"
    dim = arguments["dim"]
    reduced = range(len(known.shape)) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    return None if dim is not None and builtins.all(isinstance(known.shape[d], int) for d in reduced) else "it reduces the batch"


for _function, _every in ((any, False), (all, True)):
    _name = _function.__name__
    register(
        Operator(
            _name,
            _function,
            (),
            _lower_truth(_every),
            Plain("bool"),
            reads=("input",),
            functions={getattr(torch, _name): None},
            methods={_name: None},
            refuses=_refuses_truth,
        )
    )


def nan_to_num(input: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Replace NaN and infinite elements of a tensor by numbers."""
    return torch.nan_to_num(input, nan, posinf, neginf)


register(
    Operator(
        "nan_to_num",
        nan_to_num,
        ("input",),
        lambda lowering, input, nan, posinf, neginf: input,
        Same(),
        traits=frozenset({Trait.CHOOSES}),
        functions={torch.nan_to_num: None, torch.nan_to_num_: None},
        methods={"nan_to_num": None, "nan_to_num_": None},
    )
)
