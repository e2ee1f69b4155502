"""Addition, subtraction and multiplication: of activations, of constants, of numbers.

Sums are formed on a common scale, 2^-14 of the largest term's, and requantized once; a number or a constant tensor
is added in whole steps of that scale, which is coarser where it dwarfs the terms. Products are formed as they are: a
constant tensor is quantized like a weight, a number is an exact factor.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.clamping import clamped
from fxquant.facts import TensorFact
from fxquant.graph import fact, is_parameter
from fxquant.lowering import Clamp, Lowering, Quantized
from fxquant.numerics import FLOAT32_EXACT
from fxquant.ops.activation import clamp
from fxquant.ops.form import Call
from fxquant.ops.record import Instead, Operator, register
from fxquant.ops.selection import where
from fxquant.primitives import elementwise
from fxquant.quantization.rounding import straight_through
from fxquant.rescaling import LARGEST_NARROW_MULTIPLIER, Ratio, narrow_multipliers

Operand = Quantized | Tensor | float
LARGEST_CONSTANT = 2**22  # steps of the common scale; with int8 terms beside it the sum stays below 2^24
LARGEST_CONSTANT_WIDE = 2**29  # the same beside an int16 term, for sums below 2^31


def _clamped(value: Tensor, clamp: Clamp | None) -> Tensor:
    return value if clamp is None else clamped(value, *clamp)


def needs_activation(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Why the node must stay in float: one operand has to be an activation, and what is not must be a constant."""
    operands = [arguments["input"], arguments["other"]]
    if not any(isinstance(o, fx.Node) and not is_parameter(o) and isinstance(fact(o), TensorFact) for o in operands):
        return "none of its operands is an activation"
    if any(isinstance(o, fx.Node) and not isinstance(fact(o), TensorFact) and not is_parameter(o) for o in operands):
        return "one of its operands depends on the batch size"
    numbers = [arguments.get("alpha", 1), *(o for o in operands if not isinstance(o, fx.Node))]
    return None if all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) else "one of its numbers is not finite"


def constant_operand(lowering: Lowering, operand: Operand, role: str) -> Quantized | float:
    """A constant tensor as integers with one scale; activations and numbers as they are."""
    return lowering.quantize_constant(operand, role) if isinstance(operand, Tensor) else operand


# ---- sums -----------------------------------------------------------------------------------------------------------


def add(input: Tensor, other: Tensor, alpha: float = 1, *, clamp: Clamp | None = None) -> Tensor:
    """input + alpha · other, and a fused clamp."""
    return _clamped(torch.add(input, other, alpha=alpha) if isinstance(input, Tensor) else input + alpha * other, clamp)


def sub(input: Tensor, other: Tensor, alpha: float = 1, *, clamp: Clamp | None = None) -> Tensor:
    """input - alpha · other, and a fused clamp."""
    return _clamped(torch.sub(input, other, alpha=alpha) if isinstance(input, Tensor) else input - alpha * other, clamp)


def lower_add(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    """The integer meaning of input + alpha · other."""
    return _lower_sum(lowering, {"input": (input, 1), "other": (other, alpha)}, clamp)


def _lower_sub(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    return _lower_sum(lowering, {"input": (input, 1), "other": (other, -alpha)}, clamp)


def _lower_sum(lowering: Lowering, terms: dict[str, tuple[Operand, float]], clamp: Clamp | None) -> Quantized:
    """The terms that are activations on the common scale, and a constant in whole steps of it, requantized once."""
    tensors = {role: (operand, factor) for role, (operand, factor) in terms.items() if isinstance(operand, Quantized)}
    if len(tensors) == len(terms) and _in_output_steps(lowering, tensors):
        return _lower_narrow_sum(lowering, tensors, clamp)
    constants = {role: (operand, factor) for role, (operand, factor) in terms.items() if not isinstance(operand, Quantized)}
    steps = {role: _step(operand, factor) for role, (operand, factor) in tensors.items()}
    larger = max(steps.values(), key=lambda ratio: float(ratio.approximate()))
    wide = any(operand.dtype.bits > 8 for operand, _ in tensors.values())
    lowering.parameters |= {f"its constant {role!r}": operand for role, (operand, _) in constants.items() if isinstance(operand, Tensor)}
    magnitude = max((_magnitude(operand) * abs(factor) for operand, factor in constants.values()), default=0.0)
    if not math.isfinite(magnitude):
        raise lowering.not_finite()
    bits = _fraction_bits(lowering.arithmetic.add_fraction_bits, magnitude, larger, LARGEST_CONSTANT_WIDE if wide else LARGEST_CONSTANT)
    unit = _factor(2.0**bits, larger)

    bound = torch.zeros((), dtype=torch.float64, device="cpu")
    total: Any = None
    for role, (operand, factor) in tensors.items():
        aligned = lowering.align(operand, steps[role].times(unit).over(*larger.numerators), role, wide)
        if total is None:
            total = aligned if factor > 0 else lowering.call(elementwise.negate, aligned)
        else:
            total = lowering.call(elementwise.add if factor > 0 else elementwise.subtract, total, aligned)
        bound = bound + math.ceil(2.0**bits * operand.grid.magnitude)
    for role, (constant, factor) in constants.items():
        if magnitude:
            held = _held(lowering, role, constant, factor, Ratio((unit,), larger.numerators))
            bound = bound + float(held.detach().abs().max())
            name = role if isinstance(constant, Tensor) else "number"
            total = lowering.call(elementwise.add_constant, total, lowering.constant(name, held, torch.int32))
    lowering.prove(bound, "the sum")
    return lowering.requantize(total, Ratio(larger.numerators, (unit,)), clamp)


def _in_output_steps(lowering: Lowering, tensors: dict[str, tuple[Quantized, float]]) -> bool:
    narrow = all(operand.dtype.bits <= 8 for operand, _ in tensors.values()) and lowering.output.dtype.bits <= 8
    return lowering.arithmetic.adds_in_output_steps and narrow


def _lower_narrow_sum(lowering: Lowering, terms: dict[str, tuple[Quantized, float]], clamp: Clamp | None) -> Quantized:
    """The terms in whole numbers of 2^-n of a step of the result, of 15 bits: float32 adds them and what is left exactly, in any order."""

    def total() -> tuple[Any, Tensor]:
        ratios = {role: _step(operand, factor).over(lowering.output.grid.scale) for role, (operand, factor) in terms.items()}
        bits, multipliers = narrow_multipliers(list(ratios.values()))
        total: Any = None
        for (role, (operand, factor)), multiplier in zip(terms.items(), multipliers, strict=True):
            held = lowering.constant(f"{role}_multiplier", multiplier.float(), torch.float32)
            step = ratios[role].times(_factor(2.0**bits, ratios[role]))
            aligned = lowering.multiplied(elementwise.align_real, operand.value, step, held, False)
            if total is None:
                total = aligned if factor > 0 else lowering.call(elementwise.negate, aligned)
            else:
                total = lowering.call(elementwise.add if factor > 0 else elementwise.subtract, total, aligned)
        return total, _factor(2.0**-bits, next(iter(ratios.values())))

    def real() -> Tensor:
        total: Any = sum(operand.real() * factor for operand, factor in terms.values())
        return _clamped(total, clamp)

    largest = sum(LARGEST_NARROW_MULTIPLIER * operand.grid.magnitude for operand, _ in terms.values())
    lowering.prove(torch.tensor(float(largest), dtype=torch.float64, device="cpu"), "the sum")
    return lowering.requantize_in_steps(total, real, clamp, [operand.scale for operand, _ in terms.values()])


def _magnitude(constant: Tensor | float) -> float:
    return float(constant.detach().double().abs().max()) if isinstance(constant, Tensor) else abs(constant)


def _held(lowering: Lowering, role: str, constant: Tensor | float, factor: float, steps: Ratio) -> Tensor:
    """round_half_even(constant · factor · steps), exactly, with its sign: the constant in whole steps of the common scale.

    The gradient of a tensor passes straight through.
    """
    value = constant if isinstance(constant, Tensor) else _factor(float(constant), steps)
    whole = steps.times(value.detach().double().abs(), _factor(abs(factor), steps)).rounded(
        torch.zeros((), dtype=torch.int64, device="cpu")
    )
    exact = whole * torch.sign(value.detach() * factor).long()
    if isinstance(constant, Tensor):
        lowering.describe(role, (1 / (steps.approximate() * factor)).float())
    if value.requires_grad and torch.is_grad_enabled():
        return straight_through(value * (steps.approximate() * factor), exact.double())
    return exact


def _step(operand: Quantized, factor: float) -> Ratio:
    return Ratio(
        (operand.scale,) if abs(factor) == 1 else (operand.scale, torch.tensor(abs(float(factor)), dtype=torch.float64, device="cpu"))
    )


def _factor(value: float, like: Ratio) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.numerators[0].device)


def _fraction_bits(most: int, magnitude: float, larger: Ratio, largest: int) -> int:
    """The n for which the common scale is 2^-n of the larger step: the largest, up to `most`, for which a constant has few enough steps.

    It is negative where a constant dwarfs the terms: the output's scale covers the constant, so it is coarser still.
    """
    if not magnitude:
        return most
    steps = magnitude / float(larger.approximate())
    return min(most, math.floor(math.log2(largest / steps)))


def _adds_zero(arguments: dict[str, Any]) -> bool:
    return _is(arguments["input"], 0) or _is(arguments["other"], 0)


def _subtracts_zero(arguments: dict[str, Any]) -> bool:
    return _is(arguments["other"], 0)


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _reversed_sub(input: Any, other: Any, alpha: float = 1) -> dict[str, Any]:
    """torch.rsub: other - alpha · input."""
    return {"input": other, "other": input, "alpha": alpha}


def _scaled(c: Call, role: str) -> str:
    if role not in c.arguments and role not in c.constants:  # a constant of zeros, which is not held
        return c.number(0)
    alpha = c.arguments.get("alpha", 1)
    return c.operand(role) if alpha == 1 else c.do("Mul", c.operand(role), c.number(alpha))


def _term(c: Call) -> str:
    return c.operand("input") if "input" in c.arguments or "input" in c.constants else c.number(0)


def _onnx_add(c: Call) -> str:
    return c.epilogue(c.do("Add", _term(c), _scaled(c, "other")))


def _onnx_sub(c: Call) -> str:
    return c.epilogue(c.do("Sub", _term(c), _scaled(c, "other")))


for _name, _function, _lower, _spellings, _methods in (
    ("add", add, lower_add, (torch.add, operator.add, operator.iadd), ("add", "add_", "__add__", "__radd__", "__iadd__")),
    (
        "sub",
        sub,
        _lower_sub,
        (torch.sub, torch.subtract, operator.sub, operator.isub),
        ("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__"),
    ),
):
    register(
        Operator(
            _name,
            _function,
            ("input", "other"),
            _lower,
            functions={**dict.fromkeys(_spellings), **({torch.rsub: _reversed_sub} if _name == "sub" else {})},
            methods=dict.fromkeys(_methods),
            absorbs=frozenset({"clamp"}),
            adds=True,
            refuses=needs_activation,
            idle=_adds_zero if _name == "add" else _subtracts_zero,
            onnx=_onnx_add if _name == "add" else _onnx_sub,
        )
    )


# ---- products -------------------------------------------------------------------------------------------------------


def mul(input: Tensor, other: Tensor, *, clamp: Clamp | None = None) -> Tensor:
    """input · other, and a fused clamp."""
    return _clamped(input * other, clamp)


def _lower_mul(lowering: Lowering, input: Operand, other: Operand, *, clamp: Clamp | None = None) -> Quantized:
    """The product of the integers; a number only changes the step and, if negative, the sign."""
    left, right = constant_operand(lowering, input, "input"), constant_operand(lowering, other, "other")
    if isinstance(left, Quantized) and isinstance(right, Quantized):
        largest = lowering.prove(
            torch.tensor(float(left.grid.magnitude * right.grid.magnitude), dtype=torch.float64, device="cpu"), "the product"
        )
        product = lowering.call(elementwise.multiply, left.value, right.value, largest >= FLOAT32_EXACT)
        return lowering.requantize(product, Ratio((left.scale, right.scale)), clamp)
    tensor, number = (left, right) if isinstance(left, Quantized) else (right, left)
    assert isinstance(tensor, Quantized)
    assert not isinstance(number, Quantized)
    step = Ratio((tensor.scale, torch.tensor(abs(float(number)), dtype=torch.float64, device=tensor.scale.device)))
    return lowering.requantize(lowering.call(elementwise.widen if number > 0 else elementwise.negate, tensor.value), step, clamp)


def _refuses_mul(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return "it multiplies by zero" if 0 in (arguments["input"], arguments["other"]) else needs_activation(node, arguments)


def _multiplied(input: Any, other: Any) -> dict[str, Any] | Instead:
    """A product with truth values chooses: the tensor where they hold, else 0. One with 0 limits it to 0."""
    for mask, tensor in ((input, other), (other, input)):
        known = fact(mask) if isinstance(mask, fx.Node) and not is_parameter(mask) else None
        if isinstance(known, TensorFact) and known.dtype == torch.bool and isinstance(tensor, fx.Node):
            return Instead(where, {"condition": mask, "input": tensor, "other": 0.0})
        known = fact(tensor) if isinstance(tensor, fx.Node) and not is_parameter(tensor) else None
        if _is(mask, 0) and isinstance(known, TensorFact) and known.dtype == torch.float32:
            return Instead(clamp, {"input": tensor, "min": 0.0, "max": 0.0})
    return {"input": input, "other": other}


def _onnx_mul(c: Call) -> str:
    return c.epilogue(c.do("Mul", c.operand("input"), c.operand("other")))


register(
    Operator(
        "mul",
        mul,
        ("input", "other"),
        _lower_mul,
        functions=dict.fromkeys((torch.mul, torch.multiply, operator.mul, operator.imul), _multiplied),
        methods=dict.fromkeys(("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__"), _multiplied),
        idle=lambda arguments: _is(arguments["input"], 1) or _is(arguments["other"], 1),
        absorbs=frozenset({"clamp"}),
        refuses=_refuses_mul,
        onnx=_onnx_mul,
    )
)
register(
    Operator(
        "neg",
        torch.neg,
        ("input",),
        lambda lowering, input: _lower_mul(lowering, input, -1.0),
        functions=dict.fromkeys((torch.neg_, torch.negative, torch.negative_, operator.neg)),
        methods=dict.fromkeys(("neg", "neg_", "negative", "negative_", "__neg__")),
        parameters={"input": inspect.Parameter.empty},
        onnx=lambda c: c.do("Neg", c.input),
    )
)
