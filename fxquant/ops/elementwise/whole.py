"""Arithmetic on integers and booleans that do not belong to a quantized tensor: tokens, places, counts, masks that are given.

All of them are int64 in the graph, and exact: sums and products wrap around beyond 64 bits, as PyTorch's do. Numbers of a narrower
dtype are made int64 first, and a result of one is brought back to it, so that they wrap around where that dtype does.
`fxquant.ops.core.promotion` says which calls become these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.lowering.lowering import Lowering
from fxquant.ops.core.demands import Plain
from fxquant.ops.core.record import Operator, register
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


def _register(
    function: Callable[..., Any],
    steps: Callable[..., Any],
    reads: tuple[str, ...] = ("input", "other"),
    demand: Plain = WHOLE_NUMBERS,
    refuses: Callable[[fx.Node, dict[str, Any]], str | None] | None = None,
    functions: dict[Any, Any] | None = None,
    methods: dict[str, Any] | None = None,
) -> None:
    def lower(lowering: Lowering, **arguments: Any) -> Any:
        return steps(Steps(lowering), **arguments)

    register(
        Operator(
            function.__name__,
            function,
            (),
            lower,
            demand,
            reads=reads,
            refuses=refuses or needs_numbers(*reads),
            functions=functions or {},
            methods=methods or {},
        )
    )


# ---- two numbers ----------------------------------------------------------------------------------------------------


def whole_add(input: Tensor, other: Tensor, alpha: int = 1) -> Tensor:
    """input + alpha · other."""
    return as_whole(input + alpha * other)


def whole_sub(input: Tensor, other: Tensor, alpha: int = 1) -> Tensor:
    """Compute input - alpha · other."""
    return as_whole(input - alpha * other)


def whole_mul(input: Tensor, other: Tensor) -> Tensor:
    """Compute input · other."""
    return as_whole(input * other)


def whole_floor_divide(input: Tensor, other: Tensor) -> Tensor:
    """Compute ⌊input / other⌋."""
    return torch.div(as_whole(input), as_whole(other), rounding_mode="floor")


def whole_trunc_divide(input: Tensor, other: Tensor) -> Tensor:
    """Compute input / other, rounded towards 0."""
    return torch.div(as_whole(input), as_whole(other), rounding_mode="trunc")


def whole_remainder(input: Tensor, other: Tensor) -> Tensor:
    """Compute input - other · ⌊input / other⌋."""
    return torch.remainder(as_whole(input), as_whole(other))


def whole_fmod(input: Tensor, other: Tensor) -> Tensor:
    """Compute the remainder of input divided by other, with the sign of input."""
    return torch.fmod(as_whole(input), as_whole(other))


def whole_maximum(input: Tensor, other: Tensor) -> Tensor:
    """Return the larger of two integers."""
    return torch.maximum(as_whole(input), as_whole(other))


def whole_minimum(input: Tensor, other: Tensor) -> Tensor:
    """Return the smaller of two integers."""
    return torch.minimum(as_whole(input), as_whole(other))


def whole_and(input: Tensor, other: Tensor) -> Tensor:
    """Return the bits that both have, in two's complement."""
    return torch.bitwise_and(as_whole(input), as_whole(other))


def whole_or(input: Tensor, other: Tensor) -> Tensor:
    """Return the bits that one has or the other, in two's complement."""
    return torch.bitwise_or(as_whole(input), as_whole(other))


def whole_xor(input: Tensor, other: Tensor) -> Tensor:
    """Return the bits that only one of the two has, in two's complement."""
    return torch.bitwise_xor(as_whole(input), as_whole(other))


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


def _join(operation: str) -> Callable[..., Any]:
    return lambda steps, input, other: steps(operation, input, other)


_register(whole_add, lambda steps, input, other, alpha: steps("add", input, _scaled(steps, other, alpha)))
_register(whole_sub, lambda steps, input, other, alpha: steps("subtract", input, _scaled(steps, other, alpha)))
_register(whole_mul, _join("multiply"))
_register(whole_floor_divide, _join("quotient"), refuses=_refuses_division)
_register(whole_trunc_divide, lambda steps, input, other: steps.truncated_quotient(input, other), refuses=_refuses_division)
_register(whole_remainder, _join("remainder"), refuses=_refuses_division)
_register(whole_fmod, _fmod, refuses=_refuses_division)
_register(whole_maximum, _join("larger"))
_register(whole_minimum, _join("smaller"))
_register(whole_and, _join("and"))
_register(whole_or, _or)
_register(whole_xor, _xor)

# ---- one number -----------------------------------------------------------------------------------------------------


def whole_abs(input: Tensor) -> Tensor:
    """Without the sign."""
    return torch.abs(input)


def whole_sign(input: Tensor) -> Tensor:
    """Return -1, 0 or 1."""
    return torch.sign(input)


def whole_clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Limit to [min, max], which are numbers or tensors; None means no limit."""
    limited = input if min is None else torch.maximum(input, as_whole(min).to(input.device))
    return limited if max is None else torch.minimum(limited, as_whole(max).to(input.device))


def whole_pow(input: Tensor, exponent: int) -> Tensor:
    """Compute input · input · …, as many factors as the exponent says."""
    return torch.pow(input, exponent)


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


_register(whole_abs, lambda steps, input: steps.magnitude(input), ("input",))
_register(whole_sign, lambda steps, input: steps.sign(input), ("input",))
_register(whole_clamp, _clamp, ("input", "min", "max"), refuses=_refuses_clamp)
_register(whole_pow, _power, ("input",), refuses=_refuses_power)

# ---- shifts ---------------------------------------------------------------------------------------------------------


def whole_lshift(input: Tensor, other: int) -> Tensor:
    """Compute input · 2^other."""
    return as_whole(torch.bitwise_left_shift(input, other))


def whole_rshift(input: Tensor, other: int) -> Tensor:
    """Compute ⌊input / 2^other⌋."""
    return as_whole(torch.bitwise_right_shift(input, other))


def _refuses_shift(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    other = arguments["other"]
    return None if isinstance(other, int) and 0 <= other <= 62 else f"it shifts by {other!r}, which is not an integer from 0 to 62"


def _shifts(function: Callable[..., Any], step: str, side: str) -> None:
    long = f"bitwise_{_SIDES[side]}_shift"
    _register(
        function,
        lambda steps, input, other: steps(step, input, 2**other),
        ("input",),
        refuses=_refuses_shift,
        functions=dict.fromkeys((getattr(operator, f"{side}shift"), getattr(operator, f"i{side}shift"), getattr(torch, long))),
        methods=dict.fromkeys((f"__{side}shift__", f"__i{side}shift__", long, f"{long}_")),
    )


_SIDES = {"l": "left", "r": "right"}
_shifts(whole_lshift, "multiply", "l")
_shifts(whole_rshift, "quotient", "r")

# ---- comparisons ----------------------------------------------------------------------------------------------------


def _comparison(relation: str) -> Callable[..., Any]:
    def compared(input: Tensor, other: Tensor) -> Tensor:
        result: Tensor = getattr(torch, relation)(as_whole(input), as_whole(other))
        return result

    compared.__name__ = compared.__qualname__ = f"whole_{relation}"
    compared.__doc__ = f"torch.{relation} of integers."
    _register(compared, lambda steps, input, other: steps.compare(input, other, relation), demand=TRUTH_VALUES)
    return compared


COMPARISONS = {relation: _comparison(relation) for relation in comparison.RELATIONS}
