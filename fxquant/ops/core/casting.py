"""Casts: between float dtypes, from float values to integers, and from integers to float values.

A quantized tensor that is cast to another float dtype stays what it is, and the host casts it where it is dequantized.
A cast to float16 and back rounds to 11 bits, and one to bfloat16 to 8: an int8 grid has no more. On a wider grid the
rounding is left out, as it is for every operator between two grids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.declare import lowered
from fxquant.ops.core.demands import Plain, Same
from fxquant.ops.core.record import OPERATORS, Instead, operator_of
from fxquant.ops.core.samples import NORMED, ROUNDED, sampled
from fxquant.ops.elementwise.selection import where
from fxquant.primitives import whole as primitives
from fxquant.primitives.whole import DTYPES

WHOLE_NUMBERS = Plain("int64")
CASTS: dict[str, torch.dtype] = {  # methods that only change the dtype
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16, "bool": torch.bool,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip
REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if arguments["dtype"] != torch.bfloat16 or all(user.target in (in_dtype, "float", "to", "type") for user in node.users):
        return None
    return "bfloat16 is computed on the host: no ONNX runtime returns it"


@lowered(function=lambda input, dtype=torch.float32: input.to(dtype), demand=Same(), carries=("input",), refuses=_refuses)
@sampled("x.half().float() * 2", "x.bfloat16().float() * 2", within=ROUNDED)
def in_dtype(lowering: Lowering, input: Quantized, dtype: torch.dtype = torch.float32) -> Quantized:
    """Return float values in another float dtype."""
    return input.with_value(lowering.call(primitives.converted, input.value, dtype)) if lowering.plain else input


IN_DTYPE = OPERATORS[in_dtype]

# ---- other dtypes ---------------------------------------------------------------------------------------------------


def _refuses_dtype(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    dtype = arguments["dtype"]
    return None if dtype in primitives.DTYPES else f"it converts integers to {str(dtype).removeprefix('torch.')}"


@lowered(function=lambda input, dtype=torch.int64: input.to(dtype), demand=WHOLE_NUMBERS, reads=("input",), refuses=_refuses_dtype)
@sampled("(x > 0).long()")
def to_integer(lowering: Lowering, input: Any, dtype: torch.dtype = torch.int64) -> Any:
    """Return booleans or integers in an integer dtype."""
    return lowering.call(primitives.converted, input, dtype)


@lowered(function=lambda input, whole=False: input.to(torch.int64), demand=WHOLE_NUMBERS)
@sampled("(x * 3).long()", "(x * 3).int()", "(x * 3).short()", "(x * 3).char()", "(x * 3).abs().byte()", share=0.1)
def truncated(lowering: Lowering, input: Quantized, whole: bool = False) -> Any:
    """Return float values without their fraction, as int64; `whole` states that they have none except for the rounding to a grid.

    Lower a truncation; with `whole`, round to the nearest integer, since a grid need not hold integers exactly.
    """
    margin = torch.tensor(0.5 if whole else 0.0, dtype=torch.float32, device=input.scale.device)
    constants = [lowering.constant(role, value.detach(), torch.float32) for role, value in (("scale", input.scale), ("margin", margin))]
    return lowering.call(primitives.truncated, input.value, *constants)


@lowered(function=lambda input: input.to(torch.float32), carries=("input",), reads=("input",))
@sampled("x.argmax(1).float() * 0.3", within=NORMED)
def to_real(lowering: Lowering, input: Any) -> Any:
    """Return booleans or integers as float values, on a grid.

    Put the integers on a grid, or, where the result has none, return them as they are.
    """
    if lowering.plain:
        return lowering.call(primitives.converted, input, torch.float32)
    return lowering.quantize(input.float() if isinstance(input, Tensor) else input)


# ---- which of them --------------------------------------------------------------------------------------------------

_WHOLE = ("round", "floor", "ceil", "trunc", "sign", "floor_divide", "trunc_divide", "to_real")


def _has_no_fraction(value: Any) -> bool:
    """Return whether a number, or the float values of a node or of each of several, are integers, judged by what they are computed from."""
    if isinstance(value, list | tuple):
        return all(map(_has_no_fraction, value))
    if not isinstance(value, fx.Node):
        return value is None or float(value).is_integer()
    record = operator_of(value)
    if record is None:
        return False
    if record.name in ("neg", "abs", "clamp", "add", "sub", "mul") or record.moves:
        read = (*record.operands, "min", "max", "alpha")
        return all(_has_no_fraction(argument) for name, argument in record.arguments(value).items() if name in read)
    return record.name in _WHOLE


def changed(input: fx.Node, before: torch.dtype, wanted: torch.dtype) -> str | Instead:
    """Return the operator that a cast to another dtype is."""
    if wanted == torch.bool:
        return Instead(torch.ne, {"input": input, "other": 0})
    if before == torch.bool and wanted == torch.float32:
        return Instead(where, {"condition": input, "input": 1.0, "other": 0.0})
    if wanted in DTYPES:
        if before == torch.bool or before in DTYPES:
            return Instead(to_integer, {"input": input, "dtype": wanted})
        return Instead(truncated, {"input": input, "whole": _has_no_fraction(input)}) if before in REAL_DTYPES else "it changes the dtype"
    if wanted == torch.float32 and before in DTYPES:
        return Instead(to_real, {"input": input})
    if wanted in REAL_DTYPES and (before == torch.float32 or input.target is in_dtype):
        return Instead(in_dtype, {"input": input, "dtype": wanted})
    return "it changes the dtype"


def asked_dtype(asked: Any) -> torch.dtype | None:
    """Return the dtype that an argument of a cast asks for; None of a device."""
    known = fact(asked) if isinstance(asked, fx.Node) else asked
    if isinstance(known, TensorFact | torch.dtype):
        return known if isinstance(known, torch.dtype) else known.dtype
    name = str(asked)
    if name.startswith("torch.") and name.endswith("Tensor"):  # "torch.FloatTensor"
        return torch.empty(0, dtype=torch.float32, device="cpu").type(name).dtype if ".cuda." not in name else None
    return None
