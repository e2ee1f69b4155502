"""Element by element: addition, clamping, and unary functions by table."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.graph import TensorFact, fact
from fxquant.lowering import Clamp, Lowering, Quantized
from fxquant.numerics import Ratio, table
from fxquant.ops.record import Operator, Scale, register
from fxquant.primitives import elementwise

# ---- addition -------------------------------------------------------------------------------------------------------


def add(input: Tensor, other: Tensor, alpha: float = 1, *, clamp: Clamp | None = None) -> Tensor:
    """input + other, and a fused clamp."""
    value = torch.add(input, other, alpha=alpha)
    return value if clamp is None else value.clamp(*clamp)


def lower_add(lowering: Lowering, input: Quantized, other: Quantized, alpha: float = 1, clamp: Clamp | None = None) -> Quantized:
    """Both operands aligned to a common scale, 2^-14 of the larger one, added, and requantized once."""
    larger = torch.maximum(input.scale, other.scale)
    unit = torch.tensor(2.0**lowering.arithmetic.add_fraction_bits, dtype=torch.float64, device=larger.device)
    aligned = [
        lowering.align(operand, Ratio((operand.scale, unit), (larger,)), role) for operand, role in ((input, "input"), (other, "other"))
    ]
    lowering.prove(unit * (input.dtype.magnitude + other.dtype.magnitude), "the sum")
    return lowering.requantize(lowering.call(elementwise.add, *aligned), Ratio((larger,), (unit,)), clamp)


def _refuses_add(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if arguments["alpha"] != 1:
        return "add with alpha other than 1 has no integer form yet"
    return needs_tensors(arguments, "input", "other")


def needs_tensors(arguments: dict[str, Any], *names: str) -> str | None:
    """Why the node must stay in float if one of these arguments is no activation."""
    for name in names:
        value = arguments[name]
        if not isinstance(value, fx.Node) or not isinstance(fact(value), TensorFact):
            return f"its argument {name!r} is a number, not an activation"
        if value.op == "get_attr":
            return f"its argument {name!r} is a parameter or constant, not an activation"
    return None


register(
    Operator(
        "add",
        add,
        ("input", "other"),
        lower_add,
        functions={torch.add: None, operator.add: None, operator.iadd: None},
        methods={"add": None, "add_": None, "__add__": None, "__radd__": None, "__iadd__": None},
        absorbs=frozenset({"clamp"}),
        refuses=_refuses_add,
    )
)

# ---- clamping -------------------------------------------------------------------------------------------------------


def clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """The values, limited to [min, max]; None is no limit. relu is clamp(0, None), relu6 is clamp(0, 6)."""
    return input.clamp(min, max)


def lower_clamp(lowering: Lowering, input: Quantized, min: float | None = None, max: float | None = None) -> Quantized:
    """The integers limited to ⌊bound/scale + ½⌋, on the operand's own scale."""
    low, high = lowering.bounds((min, max), lowering.output)
    return input.with_value(lowering.call(elementwise.clamp, input.value, low, high))


def _refuses_clamp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for name in ("min", "max"):
        if not isinstance(arguments[name], int | float | None):
            return f"its bound {name!r} is a tensor"
    return None


def _relu(input: Any, inplace: bool = False) -> dict[str, Any]:
    return {"input": input, "min": 0.0, "max": None}


def _relu6(input: Any, inplace: bool = False) -> dict[str, Any]:
    return {"input": input, "min": 0.0, "max": 6.0}


def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> dict[str, Any]:
    return {"input": input, "min": float(min_val), "max": float(max_val)}


register(
    Operator(
        "clamp",
        clamp,
        ("input",),
        lower_clamp,
        Scale.SAME,
        functions={
            torch.clamp: None,
            torch.clip: None,
            torch.relu: _relu,
            torch.relu_: _relu,
            F.relu: _relu,
            F.relu_: _relu,
            F.relu6: _relu6,
            F.hardtanh: _hardtanh,
            F.hardtanh_: _hardtanh,
        },
        methods={"relu": _relu, "relu_": _relu, "clamp": None, "clamp_": None, "clip": None, "clip_": None},
        modules={
            nn.ReLU: lambda m: {"min": 0.0, "max": None},
            nn.ReLU6: lambda m: {"min": 0.0, "max": 6.0},
            nn.Hardtanh: lambda m: {"min": float(m.min_val), "max": float(m.max_val)},
        },
        refuses=_refuses_clamp,
    )
)

# ---- unary functions by table ---------------------------------------------------------------------------------------


def unary(name: str, function: Callable[[Tensor], Tensor], exact: Callable[[float], float], *spellings: Any) -> Operator:
    """Declare a unary function.

    `function` is its float meaning on tensors, `exact` the one on a Python float that the table is made of;
    `spellings` are further functions, method names and module classes.
    """

    def lower(lowering: Lowering, input: Quantized) -> Quantized:
        def look_up() -> Any:
            scales = float(input.scale), float(lowering.output.scale)
            entries = table(exact, *scales, input.dtype, lowering.output.dtype)
            return lowering.call(elementwise.lookup, input.value, lowering.constant("table", entries, entries.dtype))

        return lowering.result(look_up, lambda: function(input.real()))

    return register(
        Operator(
            name,
            function,
            ("input",),
            lower,
            functions={s: None for s in spellings if callable(s) and not isinstance(s, type)},
            methods={s: None for s in spellings if isinstance(s, str)},
            modules={s: lambda m: {} for s in spellings if isinstance(s, type)},
            parameters=("input",),
        )
    )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


unary("sigmoid", torch.sigmoid, _sigmoid, F.sigmoid, "sigmoid", "sigmoid_", nn.Sigmoid)
