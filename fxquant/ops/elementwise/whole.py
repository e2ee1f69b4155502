"""Arithmetic on integers and booleans that do not belong to a quantized tensor: tokens, places, counts, masks that are given.

All of them are int64 in the graph, and exact: sums and products wrap around beyond 64 bits, as PyTorch's do. Numbers of a narrower
dtype are made int64 first, and a result of one is brought back to it, so that they wrap around where that dtype does.
`fxquant.ops.core.promotion` says which calls become these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core.operators import Lowering, Operator, Plain, Sample, TensorFact, fact, is_parameter, register, written
from fxquant.primitives import comparison
from fxquant.primitives import whole as primitives

WHOLE_NUMBERS, TRUTH_VALUES = Plain("int64"), Plain("bool")
Value = Any  # a value of the lowering, a constant tensor, or a number


class Steps:
    """Writer of primitives on integers for one operator; constants become int64 ones."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._numbers: dict[int, Any] = {}
        self._constants = 0

    def __call__(self, operation: str, input: Value, other: Value) -> Any:
        """Combine two values by an operation of `primitives.joined`."""
        return self._lowering.call(primitives.joined, self.held(input), self.held(other), operation)

    def compare(self, input: Value, other: Value, relation: str) -> Any:
        """Return whether they are in the relation."""
        return self._lowering.call(comparison.compare, self.held(input), self.held(other), relation)

    def held(self, value: Value) -> Any:
        """Return a value as primitives take it."""
        if not isinstance(value, int):
            self._constants += isinstance(value, Tensor)
            return self._lowering.given(f"constant_{self._constants}", value, torch.int64)
        if value not in self._numbers:
            self._constants += 1
            number = torch.tensor(value, dtype=torch.int64, device="cpu")
            self._numbers[value] = self._lowering.given(f"constant_{self._constants}", number, torch.int64)
        return self._numbers[value]

    def sign(self, value: Value) -> Any:
        return self("smaller", self("larger", value, -1), 1)

    def magnitude(self, value: Value) -> Any:
        return self("larger", value, self("subtract", 0, value))

    def truncated_quotient(self, input: Value, other: Value) -> Any:
        quotient = self("quotient", self.magnitude(input), self.magnitude(other))
        return self("multiply", quotient, self("multiply", self.sign(input), self.sign(other)))


def as_whole(value: Any) -> Tensor:
    """Return a number, or a tensor of integers or booleans, as int64."""
    return (value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")).to(torch.int64)


def needs_numbers(*names: str) -> Callable[[fx.Node, dict[str, Any]], str | None]:
    """Return a check that these arguments are tensors or known integers."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        for name in names:
            value = arguments[name]
            if isinstance(value, fx.Node) and not is_parameter(value) and not isinstance(fact(value), TensorFact):
                return f"its {name!r} is a number that depends on the batch size"
            if not isinstance(value, fx.Node | int | None):
                return f"its {name!r} is {value!r}"
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                return f"its {name!r} has more than 64 bits"
        return None

    return refuses


def _whole(
    name: str,
    doc: str,
    function: Callable[..., Any],
    steps: Callable[..., Any],
    reads: tuple[str, ...] = ("input", "other"),
    demand: Plain = WHOLE_NUMBERS,
    refuses: Callable[[fx.Node, dict[str, Any]], str | None] | None = None,
    samples: Sequence[Sample] = (),
    **forms: Any,
) -> Callable[..., Tensor]:
    """Register an operator on integers with this float meaning, and return it under its name; `steps` writes its primitives."""

    def lower(lowering: Lowering, **arguments: Any) -> Any:
        return steps(Steps(lowering), **arguments)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    given: dict[str, Any] = {"reads": reads, "refuses": refuses or needs_numbers(*reads), "samples": tuple(samples)}
    register(Operator(name, function, (), lower, demand, **given, **forms))
    return function


def _pairs(
    name: str, doc: str, combined: Callable[..., Tensor], operation: str | Callable[..., Any], rounding: str = "", **fields: Any
) -> Callable[..., Tensor]:
    """Register an operator on two integers: PyTorch's function, and an operation of `primitives.joined`, or the steps that write it.

    `rounding` is the function's rounding mode.
    """
    modes = {"rounding_mode": rounding} if rounding else {}
    text = f"torch.{combined.__name__}(x.argmax(3) - 3, y.argmax(3) + 1{''.join(f', {key}={mode!r}' for key, mode in modes.items())})"

    def join(steps: Steps, input: Value, other: Value) -> Any:
        return steps(operation, input, other) if isinstance(operation, str) else operation(steps, input, other)

    own = lambda input, other: as_whole(combined(as_whole(input), as_whole(other), **modes))  # noqa: E731
    return _whole(name, doc, own, join, samples=written(text), **fields)


# ---- two numbers ----------------------------------------------------------------------------------------------------


def _scaled(steps: Steps, other: Value, alpha: int) -> Value:
    return other if alpha == 1 else steps("multiply", other, alpha)


def _or(steps: Steps, input: Value, other: Value) -> Any:
    """a + b - (a and b)."""
    return steps("subtract", steps("add", input, other), steps("and", input, other))


def _xor(steps: Steps, input: Value, other: Value) -> Any:
    """a + b - 2 · (a and b)."""
    return steps("subtract", steps("add", input, other), steps("multiply", steps("and", input, other), 2))


def _fmod(steps: Steps, input: Value, other: Value) -> Any:
    return steps("subtract", input, steps("multiply", steps.truncated_quotient(input, other), other))


def _refuses_division(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return "it divides by 0" if arguments["other"] == 0 else needs_numbers("input", "other")(node, arguments)


_DIVIDES: dict[str, Any] = {"refuses": _refuses_division}
whole_add = _whole(
    "whole_add",
    "input + alpha · other.",
    lambda input, other, alpha=1: as_whole(input + alpha * other),
    lambda steps, input, other, alpha: steps("add", input, _scaled(steps, other, alpha)),
    samples=written("torch.add(x.argmax(3), y.argmax(3), alpha=2)"),
)
whole_sub = _whole(
    "whole_sub",
    "Compute input - alpha · other.",
    lambda input, other, alpha=1: as_whole(input - alpha * other),
    lambda steps, input, other, alpha: steps("subtract", input, _scaled(steps, other, alpha)),
    samples=written("x.argmax(3) - y.argmax(3)"),
)
whole_mul = _pairs("whole_mul", "Compute input · other.", torch.mul, "multiply")
whole_floor_divide = _pairs("whole_floor_divide", "Compute ⌊input / other⌋.", torch.floor_divide, "quotient", **_DIVIDES)
whole_trunc_divide = _pairs(
    "whole_trunc_divide", "Compute input / other, rounded towards 0.", torch.div, Steps.truncated_quotient, "trunc", **_DIVIDES
)
whole_remainder = _pairs("whole_remainder", "Compute input - other · ⌊input / other⌋.", torch.remainder, "remainder", **_DIVIDES)
whole_fmod = _pairs("whole_fmod", "Compute the remainder of input divided by other, with the sign of input.", torch.fmod, _fmod)
whole_maximum = _pairs("whole_maximum", "Return the larger of two integers.", torch.maximum, "larger")
whole_minimum = _pairs("whole_minimum", "Return the smaller of two integers.", torch.minimum, "smaller")
whole_and = _pairs("whole_and", "Return the bits that both have, in two's complement.", torch.bitwise_and, "and")
whole_or = _pairs("whole_or", "Return the bits that one has or the other, in two's complement.", torch.bitwise_or, _or)
whole_xor = _pairs("whole_xor", "Return the bits that only one of the two has, in two's complement.", torch.bitwise_xor, _xor)

# ---- one number -----------------------------------------------------------------------------------------------------


def _clamp_number(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    limited = input if min is None else torch.maximum(input, as_whole(min).to(input.device))
    return limited if max is None else torch.minimum(limited, as_whole(max).to(input.device))


def _clamp(steps: Steps, input: Value, min: Value, max: Value) -> Any:
    value = input if min is None else steps("larger", input, min)
    return value if max is None else steps("smaller", value, max)


def _power(steps: Steps, input: Value, exponent: int) -> Any:
    value = input
    for _ in range(exponent - 1):
        value = steps("multiply", value, input)
    return value


def _refuses_clamp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    none = arguments["min"] is None and arguments["max"] is None
    return "neither min nor max is given" if none else needs_numbers("min", "max")(node, arguments)


def _refuses_power(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    exponent = arguments["exponent"]
    return None if isinstance(exponent, int) and 1 < exponent <= 64 else f"its exponent is {exponent!r}"


whole_abs = _whole(
    "whole_abs",
    "Without the sign.",
    lambda input: torch.abs(input),
    lambda steps, input: steps.magnitude(input),
    ("input",),
    samples=written("(x.argmax(3) - 3).abs()"),
)
whole_sign = _whole(
    "whole_sign",
    "Return -1, 0 or 1.",
    lambda input: torch.sign(input),
    lambda steps, input: steps.sign(input),
    ("input",),
    samples=written("(x.argmax(3) - 3).sign()"),
)
whole_clamp = _whole(
    "whole_clamp",
    "Limit to [min, max], which are numbers or tensors; None means no limit.",
    _clamp_number,
    _clamp,
    ("input", "min", "max"),
    refuses=_refuses_clamp,
    samples=written("x.argmax(3).clamp(1, 4)", "x.argmax(3).clamp(max=y.argmax(3))"),
)
whole_pow = _whole(
    "whole_pow",
    "Compute input · input · …, as many factors as the exponent says.",
    lambda input, exponent: torch.pow(input, exponent),
    _power,
    ("input",),
    refuses=_refuses_power,
    samples=written("x.argmax(3) ** 3"),
)

# ---- shifts ---------------------------------------------------------------------------------------------------------


def _refuses_shift(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    other = arguments["other"]
    return None if isinstance(other, int) and 0 <= other <= 62 else f"it shifts by {other!r}, which is not an integer from 0 to 62"


def _shifts(name: str, doc: str, function: Callable[..., Tensor], step: str) -> Callable[..., Tensor]:
    short = name.removeprefix("whole_")
    return _whole(
        name,
        doc,
        lambda input, other: as_whole(function(input, other)),
        lambda steps, input, other: steps(step, input, 2**other),
        ("input",),
        refuses=_refuses_shift,
        samples=written(
            f"{function.__name__}(x.argmax(3), 1)",
            *(f"operator.{i}{short}(x.argmax(3), 1)" for i in ("", "i")),
            *(f"x.argmax(3).__{i}{short}__(1)" for i in ("", "i")),
        ),
        calls=dict.fromkeys(
            (
                *(getattr(operator, short), getattr(operator, f"i{short}"), function),
                *(f"__{short}__", f"__i{short}__", function.__name__, f"{function.__name__}_"),
            )
        ),
    )


whole_lshift = _shifts("whole_lshift", "Compute input · 2^other.", torch.bitwise_left_shift, "multiply")
whole_rshift = _shifts("whole_rshift", "Compute ⌊input / 2^other⌋.", torch.bitwise_right_shift, "quotient")

# ---- comparisons ----------------------------------------------------------------------------------------------------


def _comparison(relation: str) -> Callable[..., Any]:
    return _whole(
        f"whole_{relation}",
        f"torch.{relation} of integers.",
        lambda input, other: getattr(torch, relation)(as_whole(input), as_whole(other)),
        lambda steps, input, other: steps.compare(input, other, relation),
        demand=TRUTH_VALUES,
        samples=written(f"torch.{relation}(x.argmax(3), y.argmax(3))"),
    )


COMPARISONS = {relation: _comparison(relation) for relation in comparison.RELATIONS}
