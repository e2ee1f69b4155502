"""Arithmetic on integer and boolean tensors without a scale: tokens, positions, counts, masks that the model takes as inputs.

All of them are int64 in the graph, and exact: sums and products wrap around beyond 64 bits, as PyTorch's do. Operands of a narrower
dtype are converted to int64 first, and the result back to that dtype, so that it wraps around at the same values.
The pass `canonical.rewrite` converts calls to these operators; any other call, such as a maximum of integers, runs on the host.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core import Lowering, Plain, TensorFact, fact, is_parameter, register, written
from fxquant.ops.core.declare import Guard, first_reason, fixed, meets, needs
from fxquant.ops.core.record import OnIntegers
from fxquant.primitives import selection, shape
from fxquant.primitives import whole as primitives

WHOLE_NUMBERS, TRUTH_VALUES = Plain("int64"), Plain("bool")
Value = Any  # a value of the lowering, or a number


class Steps:
    """Writer of primitives on integers for one operator; numbers become int64 constants."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.call = lowering, lowering.call
        self._numbers: dict[int, Any] = {}

    def __call__(self, operation: str, input: Value, other: Value) -> Any:
        """Combine two values by an operation of `primitives.whole.joined`."""
        return self.call(primitives.joined, self.held(input), self.held(other), operation)

    def held(self, value: Value) -> Any:
        """Return a value as primitives take it."""
        if not isinstance(value, int):
            return value
        if value not in self._numbers:
            number = torch.tensor(value, dtype=torch.int64, device="cpu")
            self._numbers[value] = self.lowering.given(f"constant_{len(self._numbers) + 1}", number, torch.int64)
        return self._numbers[value]


def as_whole(value: Any) -> Tensor:
    """Return a number, or a tensor of integers or booleans, as int64."""
    return (value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")).to(torch.int64)


def _needs_numbers(*names: str) -> Guard:
    """Return a check that these arguments are tensors or integers that do not depend on the batch size."""

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
    name: str, function: Callable[..., Any], steps: Callable[..., Any], *samples: str, reads: tuple[str, ...] = ("input", "other"),
    demand: Any = WHOLE_NUMBERS, refuses: Guard | None = None, **forms: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Register an operator on integers with this float meaning, and return that; `steps(Steps, **arguments)` writes its primitives."""

    def lower(lowering: Lowering, **arguments: Any) -> Any:
        held = {name: lowering.given(name, arguments[name], torch.bool if name == "condition" else torch.int64) for name in reads}
        return steps(Steps(lowering), **arguments | held)

    function.__name__ = function.__qualname__ = f"whole_{name}"
    fields: dict[str, Any] = {"reads": reads, "refuses": refuses or _needs_numbers(*reads), "samples": written(*samples)}
    register(function.__name__, function, (), lower, demand, **fields, **forms)
    return function


def alike(name: str) -> OnIntegers:
    """Return the field `integers` of an operator that is the one of this name in `WHOLE`, with arguments of the same names."""
    return lambda arguments, operand: (WHOLE[name], arguments)


def _scaled(steps: Steps, other: Value, alpha: int) -> Value:
    return other if alpha == 1 else steps("multiply", other, alpha)


def _magnitude(steps: Steps, input: Value) -> Any:
    return steps("larger", input, steps("subtract", 0, input))


def _truncated_quotient(steps: Steps, input: Value, other: Value) -> Any:
    """Divide the magnitudes, and multiply by the signs, which are the numbers limited to [-1, 1]."""
    quotient = steps("quotient", _magnitude(steps, input), _magnitude(steps, other))
    signs = [steps("smaller", steps("larger", value, -1), 1) for value in (input, other)]
    return steps("multiply", quotient, steps("multiply", *signs))


def _refuses_division(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return "it divides by 0" if arguments["other"] == 0 else _needs_numbers("input", "other")(node, arguments)


def _pairs(
    name: str, combined: Callable[..., Tensor], operation: str | Callable[..., Any], modes: dict[str, str] | None = None, **fields: Any
) -> Callable[..., Any]:
    """Register a function of two integers, and its modes: an operation of `primitives.whole.joined`, or steps."""
    settings = "".join(f", {key}={mode!r}" for key, mode in (modes or {}).items())
    return _whole(
        name,
        lambda input, other: as_whole(combined(as_whole(input), as_whole(other), **(modes or {}))),
        lambda steps, input, other: steps(operation, input, other) if isinstance(operation, str) else operation(steps, input, other),
        f"torch.{combined.__name__}(x.argmax(3) - 3, y.argmax(3) + 1{settings})",
        **fields,
    )


def _compared(relation: str) -> Callable[..., Any]:
    return _whole(
        relation,
        lambda input, other: getattr(torch, relation)(as_whole(input), as_whole(other)),
        lambda steps, input, other: steps.call(selection.compare, steps.held(input), steps.held(other), relation),
        f"torch.{relation}(x.argmax(3), y.argmax(3))",
        demand=TRUTH_VALUES,
    )


def _shifts(name: str, function: Callable[..., Tensor], step: str) -> Callable[..., Any]:
    """Register a shift by a number of bits, which multiplies by a power of two, or divides by one."""
    return _whole(
        name,
        lambda input, other: as_whole(function(input, other)),
        lambda steps, input, other: steps(step, input, 2**other),
        f"{function.__name__}(x.argmax(3), 1)",
        *(f"operator.{i}{name}(x.argmax(3), 1)" for i in ("", "i")),
        *(f"x.argmax(3).__{i}{name}__(1)" for i in ("", "i")),
        reads=("input",),
        refuses=meets("other", lambda n: isinstance(n, int) and 0 <= n <= 62, lambda n: f"it shifts by {n!r}, not by 0 to 62 bits"),
        integers=alike(name),
        calls=dict.fromkeys(
            (
                *(getattr(operator, name), getattr(operator, f"i{name}"), function),
                *(f"__{name}__", f"__i{name}__", function.__name__, f"{function.__name__}_"),
            )
        ),
    )


def _clamp_number(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    limited = input if min is None else torch.maximum(input, as_whole(min).to(input.device))
    return limited if max is None else torch.minimum(limited, as_whole(max).to(input.device))


def _clamp(steps: Steps, input: Value, min: Value, max: Value) -> Any:
    value = input if min is None else steps("larger", input, min)
    return value if max is None else steps("smaller", value, max)


def _refuses_clamp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    none = arguments["min"] is None and arguments["max"] is None
    return "neither min nor max is given" if none else _needs_numbers("min", "max")(node, arguments)


def _power(steps: Steps, input: Value, exponent: int) -> Any:
    value = input
    for _ in range(exponent - 1):
        value = steps("multiply", value, input)
    return value


def _where(condition: Tensor, input: Any, other: Any) -> Tensor:
    device = condition.device
    return torch.where(condition, as_whole(input).to(device), as_whole(other).to(device))


def _chosen(steps: Steps, condition: Value, input: Value, other: Value) -> Any:
    return steps.call(primitives.chosen, steps.held(input), steps.held(other), condition)


def _cat(steps: Steps, tensors: list[Any], dim: int) -> Any:
    dtype = next((tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)), torch.int64)
    return steps.call(shape.concatenate, [steps.lowering.given(f"tensor_{i}", tensor, dtype) for i, tensor in enumerate(tensors)], dim)


def _argmax(steps: Steps, input: Value, dim: int, keepdim: bool) -> Any:
    """Return the int64 index of the first element along `dim` that equals the largest."""
    largest = steps.call(primitives.reduced, input, [dim], True, "largest")
    equal = steps.call(primitives.converted, steps.call(selection.compare, input, largest, "eq"), torch.int64)
    return steps.call(selection.arg_extremum, equal, dim, keepdim, True)


# ---- the operators, by the name of the one that a call of integers is promoted from -----------------------------------
WHOLE: dict[str, Callable[..., Any]] = {
    function.__name__.removeprefix("whole_"): function
    for function in (
        _whole("add", lambda input, other, alpha=1: as_whole(input + alpha * other),
               lambda steps, input, other, alpha: steps("add", input, _scaled(steps, other, alpha)),
               "torch.add(x.argmax(3), y.argmax(3), alpha=2)"),
        _whole("sub", lambda input, other, alpha=1: as_whole(input - alpha * other),
               lambda steps, input, other, alpha: steps("subtract", input, _scaled(steps, other, alpha)), "x.argmax(3) - y.argmax(3)"),
        _pairs("mul", torch.mul, "multiply"),
        _pairs("floor_divide", torch.floor_divide, "quotient", refuses=_refuses_division),
        _pairs("trunc_divide", torch.div, _truncated_quotient, {"rounding_mode": "trunc"}, refuses=_refuses_division),
        _pairs("remainder", torch.remainder, "remainder", refuses=_refuses_division),
        _pairs("maximum", torch.maximum, "larger"), _pairs("minimum", torch.minimum, "smaller"), _pairs("and", torch.bitwise_and, "and"),
        *(  # a + b - (a and b), once and twice
            _pairs(function.__name__.removeprefix("bitwise_"), function, lambda steps, input, other, times=times: steps(
                "subtract", steps("add", input, other), _scaled(steps, steps("and", input, other), times)))
            for function, times in ((torch.bitwise_or, 1), (torch.bitwise_xor, 2))
        ),
        *map(_compared, selection.RELATIONS),
        _shifts("lshift", torch.bitwise_left_shift, "multiply"), _shifts("rshift", torch.bitwise_right_shift, "quotient"),
        _whole("abs", lambda input: torch.abs(input), _magnitude, "(x.argmax(3) - 3).abs()", reads=("input",)),
        _whole("clamp", _clamp_number, _clamp, "x.argmax(3).clamp(1, 4)", "x.argmax(3).clamp(max=y.argmax(3))",
               reads=("input", "min", "max"), refuses=_refuses_clamp),
        _whole("pow", lambda input, exponent: torch.pow(input, exponent), _power, "x.argmax(3) ** 3", reads=("input",),
               refuses=meets("exponent", lambda n: isinstance(n, int) and 1 < n <= 64, lambda n: f"its exponent is {n!r}")),
        _whole("where", _where, _chosen, "torch.where(x > 0, x.argmax(1, True), y.argmax(1, True))", reads=("condition", "input", "other"),
               refuses=_needs_numbers("input", "other")),
        _whole("cat", lambda tensors, dim=0: torch.cat(tensors, dim), _cat, "torch.cat((x.argmax(1), y.argmin(1)), 1)", reads=("tensors",),
               demand=lambda node, arguments: TRUTH_VALUES if fact(node).dtype == torch.bool else WHOLE_NUMBERS,
               refuses=lambda node, arguments: None),
        _whole("sum", lambda input, dim, keepdim=False: torch.sum(input, dim, keepdim),
               lambda steps, input, dim, keepdim: steps.call(primitives.reduced, input, list(dim), keepdim, "sum"),
               "torch.sum(x.argmax(1), 1)", reads=("input",)),
        _whole("cumsum", lambda input, dim: torch.cumsum(input, dim),
               lambda steps, input, dim: steps.call(primitives.running, input, dim), "x.argmax(1).cumsum(1)", reads=("input",)),
        _whole("argmax", lambda input, dim, keepdim=False: torch.argmax(input, dim, keepdim), _argmax, "torch.argmax(x.argmax(1), 1)",
               reads=("input",), refuses=first_reason(
                   needs("it reduces all elements", lambda arguments: arguments["dim"] is not None),
                   fixed(because="it reduces the batch, whose size is not fixed"))),
    )
}  # fmt: skip
