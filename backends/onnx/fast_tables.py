"""A table of style "fast" as its function in float32, which onnxruntime computes in a fifth of the time of a look-up.

A table has 256 entries, so the effect of float32 rounding on each entry is known. If the float value of every entry is further from the
next tie than the error of the operators, all runtimes with the accuracy `ACCURACY` give the entries of the table. The order of computation
and fused kernels then do not matter. Otherwise the table is looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx

from fxquant.backends.onnx.emitter import Emitter
from fxquant.backends.onnx.fast_parts import OPSET, is_8_bits
from fxquant.ir.graph import resolve
from fxquant.ir.integer import Operation, QParams, operation, qparams
from fxquant.ops import BY_NAME
from fxquant.ops.core.form import WHOLE_OPSET, Call
from fxquant.ops.elementwise.table import exact
from fxquant.primitives.elementwise import lookup

ACCURACY = 2.0**-20
"""How far a function's float32 result may be off, of the largest of 1, its operand and its result: 16 times what rounding does."""


def computes(integer: fx.GraphModule, node: fx.Node, opset: int) -> bool:
    """Return whether float32 operators compute every entry of the table that a node looks up."""
    if node.target is not lookup or opset < OPSET:
        return False
    operand, table = node.args[:2]
    assert isinstance(operand, fx.Node)
    assert isinstance(table, fx.Node)
    entries: Tensor = resolve(integer, str(table.target)).cpu()
    given, made, known = qparams(operand), qparams(node), operation(node)
    if given is None or made is None or known is None or entries.numel() != _BYTES or not (is_8_bits(operand) and is_8_bits(node)):
        return False
    function = exact(known.name, known.arguments)
    return function is not None and _is_of(function, entries, given, made) and _has_form(node, known, opset)


def _has_form(node: fx.Node, known: Operation, opset: int) -> bool:
    """Return whether the operator's record writes it, with these arguments, by operators of ONNX."""
    if BY_NAME[known.name].onnx is None:
        return False
    scratch = Emitter({}, opset)
    scratch.types.update(stored=torch.uint8, zero=torch.uint8)
    try:
        compute(scratch, node, "stored", lambda end: "zero")
    except _Exported:
        return False
    return True


def _is_of(function: Callable[[float], float], entries: Tensor, given: QParams, made: QParams) -> bool:
    """Return whether the entries are those of this function, for its float values and for any within `ACCURACY`."""
    limits = torch.iinfo(entries.dtype)
    assert isinstance(given.scale, float)
    assert isinstance(made.scale, float)
    for index, entry in enumerate(entries.tolist()):
        stored = index if given.dtype == "uint8" else index - _BYTES // 2
        x = given.scale * (stored - given.zero_point)
        try:
            value, *beside = (function(x * factor) for factor in (1.0, 1 - ACCURACY / 4, 1 + ACCURACY / 4))
        except (OverflowError, ValueError):
            return False
        if not math.isfinite(value):
            return False
        error = ACCURACY * max(1.0, abs(x), abs(value)) + max(abs(value - other) for other in beside)
        ends = ((value + sign * error) / made.scale + made.zero_point for sign in (-1, 1))
        if {min(max(round(end), limits.min), limits.max) for end in ends} != {entry}:
            return False
    return True


def compute(e: Emitter, node: fx.Node, stored: str, zero: Callable[[fx.Node], str]) -> str:
    """Append the function of the value named `stored`, from uint8 to uint8; `zero` returns the zero points of stored values."""
    operand, known = node.args[0], operation(node)
    assert isinstance(operand, fx.Node)
    assert isinstance(known, Operation)
    real = e.node("DequantizeLinear", stored, e.constant(_scale(operand)), zero(operand))
    arguments = {name: real if name == "input" else value for name, value in known.arguments.items()}
    whole = e.opset >= WHOLE_OPSET  # onnxruntime computes such operators fast
    call = Call(e, known.name, arguments, {}, None, lambda value: value, node, [node], _exported, whole)
    form = BY_NAME[known.name].onnx
    assert form is not None
    return e.node("QuantizeLinear", form(call), e.constant(_scale(node)), zero(node))


def _scale(node: fx.Node) -> Tensor:
    known = qparams(node)
    assert known is not None
    return torch.tensor(known.scale, dtype=torch.float32, device="cpu")


class _Exported(Exception):
    """Raised by a form that leaves an operator to PyTorch's exporter."""


def _exported() -> str:
    raise _Exported


_BYTES = 256
