"""Unary functions by a table: their declaration, the table's integers, and such a function of a sum with a number."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import EVERYTHING, Grid, Interval, IntType, Segments, by_segments, table, to_float32
from fxquant.ops.core import OPERATORS, Call, Instead, Operator, Own, Plain, Trait, clamped, fact, is_parameter, operator_of, register
from fxquant.ops.core.declare import module_of, settings_of, spelled
from fxquant.ops.core.record import BY_NAME, Adapt, OnIntegers, has_poles
from fxquant.ops.core.samples import LIMITED, POSITIVE, Sample, sample, written

UNARY: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {}  # on tensors, and on one Python float
WITHOUT_NEGATIVE: set[str] = set()  # those of them that have no value below 0
POLE = frozenset({Trait.SINGULAR_AT_ZERO})
SINGULAR: set[str] = set()  # those of them that have poles, or slopes without a bound
SEGMENTS: dict[str, Callable[..., Segments | None]] = {}  # of those that a chip has segments for, from the settings
ON_TENSORS: set[str] = set()  # those of them whose table is made by the function on tensors alone
MAPPING = "mapping"  # ("mapping", ((name, value), …)) stands for a dict among the arguments
STEEP = 2.0**7  # a slope at which one step of an 8-bit operand of ±1 is the whole of a result of 1


def by_table(lowering: Lowering, input: Quantized, name: str, factor: float = 1.0, offset: float = 0.0, **settings: Any) -> Quantized:
    """Return the integers of a unary function of factor · input + offset, by a table on the operand's grid; of float32 numbers."""
    as_chip = lowering.arithmetic.float32_tables if input.dtype.bits <= 8 else lowering.arithmetic.segments
    numbers: tuple[float, float, Settings] = to_float32((factor, offset, tuple(settings.items())))

    def entries(points: Tensor | None = None) -> Tensor:
        chosen = name, *numbers, _plain(input.grid), _plain(lowering.output.grid), as_chip
        return (_entries(*chosen) if points is None else _made(*chosen, points)).to(input.scale.device)

    def function(x: Tensor) -> Tensor:
        return shifted(x, name, factor, offset, settings)

    return lowering.look_up(input, entries, function, lambda x: _tamed(function, x, name))


def hashable(value: Any) -> Any:
    """Return an argument of a call that is not a tensor as a nest of tuples, which is hashable."""
    if isinstance(value, dict):
        return (MAPPING, tuple((name, hashable(item)) for name, item in value.items()))
    return tuple(hashable(item) for item in value) if isinstance(value, list | tuple) else value


def _tamed(function: Callable[[Tensor], Tensor], x: Tensor, name: str) -> Tensor:
    """Compute function(x) without gradients where it has no finite slope.

    Infinite values become the most extreme of the other values, undefined ones become 0.
    A grid holds 0 where a float tensor rarely does: small values are rounded to it. There the root, the logarithm and the quotient have
    poles, whose gradient would dominate that of the whole layer; and the table has its last integer. A grid may reach a step beyond
    where the function has values, as that of a tanh reaches beyond 1; there the table has 0.
    """
    if name not in SINGULAR:
        return function(x)
    if x.requires_grad and torch.is_grad_enabled():
        inner = x.detach().requires_grad_()
        slope = torch.autograd.grad(function(inner).sum(), inner)[0]
        x = torch.where(torch.isfinite(slope), x, x.detach())
    value = function(x)
    infinite = torch.isinf(value)
    if bool(infinite.any()) and not bool(infinite.all()):
        finite = value.detach()[~infinite]
        value = clamped(value, float(finite.nan_to_num(math.inf).min()), float(finite.nan_to_num(-math.inf).max()))
    undefined = torch.isnan(value) & ~torch.isnan(x)
    return torch.where(undefined, 0.0, value) if bool(undefined.any()) else value


PlainGrid = tuple[IntType, float, int]  # type, scale and zero point, which can be a dictionary's key


def _plain(grid: Grid) -> PlainGrid:
    return grid.type, float(grid.scale), grid.zero_point


def _grid(kind: IntType, scale: float, zero_point: int) -> Grid:
    return Grid(kind, torch.tensor(scale, dtype=torch.float32, device="cpu"), zero_point)


Settings = tuple[tuple[str, Any], ...]


def segments_of(name: str, factor: float, offset: float, settings: Settings) -> Segments | None:
    """Return how a chip knows the unary function of factor · x + offset; None where it has no segments for that."""
    form, offsets = SEGMENTS.get(name), {"offset": offset} if offset else {}
    if form is None or factor != 1 or not offsets.keys() <= inspect.signature(form).parameters.keys():
        return None
    return form(**dict(settings), **offsets)


def _made(
    name: str, factor: float, offset: float, settings: Settings, input: PlainGrid, output: PlainGrid, as_chip: bool,
    points: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the table of a unary function of factor · x + offset, or its entries at these points alone."""
    wide = input[0].bits > 8
    form = segments_of(name, factor, offset, settings) if as_chip and wide else None
    if form is not None:
        every = torch.arange(input[0].low, input[0].high + 1, device="cpu") if points is None else points.long()
        return by_segments(form, _grid(*input).scale, _grid(*output), every)
    function, exact = UNARY[name]
    chosen = dict(settings)

    def on_tensors(x: Tensor) -> Tensor:
        return function(_moved(x, factor, offset), **chosen)

    def on_numbers(x: float) -> float:
        return exact(_moved(x, factor, offset), **chosen)

    def has_none(x: Tensor) -> Tensor:
        below: Tensor = _moved(x, factor, offset) < 0
        return below

    undefined = has_none if name in WITHOUT_NEGATIVE else None
    return table(
        None if name in ON_TENSORS else on_numbers, _grid(*input), _grid(*output), on_tensors, undefined, points, as_chip and not wide
    )


# Callers must not write into what is held: 64 MiB of int16 tables. While scales do not change, the same ones are requested at every step.
_entries = lru_cache(maxsize=256)(_made)


def _moved(x: Any, factor: float, offset: float) -> Any:
    """Return factor · x + offset; x itself, -0.0 included, if factor is 1 and offset 0."""
    scaled = x if factor == 1 else x * factor
    return scaled + offset if offset else scaled


def for_positive(function: Callable[[float], float], at_zero: float) -> Callable[[float], float]:
    """Return a function of positive numbers with its limit at 0, NaN below."""

    def on_numbers(x: float) -> float:
        return function(x) if x > 0 else at_zero if x == 0 else math.nan

    _FOR_POSITIVE.append(on_numbers)
    return on_numbers


_FOR_POSITIVE: list[Callable[[float], float]] = []


def unary(
    name: str, function: Callable[..., Tensor], exact: Callable[..., float], *forms: Any, over: Interval | None = None,
    tried: Mapping[str, Any] | None = None, samples: tuple[Sample, ...] = (), varies: Interval = EVERYTHING, saturates: bool = False,
    onnx: str | Callable[[Call], str] | None = None, adapted: Mapping[Any, Adapt] | None = None,
    module: tuple[type, Callable[[Any], dict[str, Any] | str]] | None = None, lowered: Callable[..., Quantized] | None = None,
    demand: Own = Own(),  # noqa: B008 - it does not change
    integers: OnIntegers | None = None, traits: frozenset[Trait] = frozenset(), **settings: Any,
) -> Operator:  # fmt: skip
    """Declare a unary function.

    `function` computes it on tensors, `exact` on a Python float for the table's entries: NaN where the function is undefined.
    PyTorch's call forms of `name` call it: functions of torch, torch.special and torch.nn.functional, methods, in place or not, and the
    class of torch.nn. `forms` are further functions and names. `adapted` holds call forms, and `module` a class, that take more than the
    settings, or other operands. `settings` are the parameters of `function` and `exact` after the first, with their defaults; a module
    has attributes of these names. Outside of `varies` the function is constant; one that `saturates` tends to a constant on one side of 0
    or on both. `onnx` names the ONNX operator that computes it, or writes several; see `Operator.onnx`. `demand` and `integers` are
    fields of the record. `lowered` replaces the lowering to a table. `traits` are added to that of all unary functions. By default its
    sample is a tensor of normal elements, or of elements uniform `over` an interval, with the default settings; `samples` replaces it,
    and `tried` adds one with these settings.
    """

    def lower(lowering: Lowering, input: Quantized, **chosen: Any) -> Quantized:
        return by_table(lowering, input, name, **chosen) if lowered is None else lowered(lowering, input, **chosen)

    UNARY[name] = function, exact
    if exact in _FOR_POSITIVE:
        WITHOUT_NEGATIVE.add(name)
    if has_poles(partial(function, **{key: 0.5 if isinstance(value, float) else value for key, value in settings.items()})):
        SINGULAR.add(name)
    others = adapted or {}
    call_forms = [form for form in (*forms, *spelled(name, *(f for f in forms if isinstance(f, str)))) if form not in others]

    def arguments(input: Any, *args: Any, inplace: bool = False, **named: Any) -> dict[str, Any]:
        """By name; PyTorch's `inplace` flag says nothing about the value."""
        return {"input": input, **settings, **dict(zip(settings, args, strict=False)), **named}

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        computed = [setting for setting in settings if isinstance(arguments[setting], fx.Node)]
        return f"its {computed[0]} is computed, not a number" if computed else None

    def keeps(arguments: dict[str, Any], after: Interval, bits: int | None) -> Interval | None:
        return None if bits is None else _changing(name, tuple((key, arguments[key]) for key in settings), bits)

    every = {**dict.fromkeys((function, *call_forms), arguments), **others}
    return register(
        name,
        function,
        ("input",),
        lower,
        demand,
        calls={form: how for form, how in every.items() if callable(form) or hasattr(Tensor, form)},
        modules={kind: settings_of(settings) for kind in module_of(name)} if module is None else dict([module]),
        keeps=keeps if saturates else None if varies == EVERYTHING else lambda arguments, after, bits: varies,
        refuses=refuses,
        integers=integers,
        parameters={"input": inspect.Parameter.empty, **settings},
        onnx=(lambda c: c.do(onnx, c.input)) if isinstance(onnx, str) else onnx,
        traits=traits | {Trait.ELEMENTWISE},
        samples=(
            *(samples or (sample(over, input=(3, 6, 6), **values) for values in ([tried, {}] if tried else [{}]))),
            *getattr(function, "samples", ()),
        ),
    )


FARTHEST = 64  # beyond this magnitude no function is looked at


@lru_cache(maxsize=256)
def _changing(name: str, settings: Settings, bits: int) -> Interval:
    """Return the interval, in halves, beyond which a function is within a quarter of a step of 2^-bits of its limit."""
    function, tolerance, chosen = UNARY[name][1], 2.0 ** -(bits + 2), dict(settings)

    def end(sign: int) -> float:
        limit = function(float(sign * FARTHEST), **chosen)
        away = (half for half in range(2 * FARTHEST, -1, -1) if abs(function(sign * half / 2, **chosen) - limit) > tolerance)
        first = next(away, 0) + 1
        return sign * (math.inf if first >= 2 * FARTHEST else first / 2)

    return end(-1), end(1)


def tabled(
    exact: Callable[..., float], *forms: Any, name: str | None = None, **fields: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Declare the decorated function as a unary operator; the parameters after the first are its settings. See `unary`."""

    def declared(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        settings = {p.name: p.default for p in list(inspect.signature(function).parameters.values())[1:]}
        unary(name or function.__name__, function, exact, *forms, **fields, **settings)
        return function

    return declared


def steep(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the operator of this name, with these arguments, is a unary function with poles, or with slopes without a bound."""
    if name == "shifted":
        return steep(arguments["function"], arguments["settings"])
    if name in ON_TENSORS:
        return _has_steep_slopes(name, hashable([item for item in arguments.items() if item[0] != "input"]))
    exponent = arguments.get("exponent")
    return name in SINGULAR and not (name == "pow" and isinstance(exponent, int | float) and exponent >= 1)


@lru_cache(maxsize=256)
def _has_steep_slopes(name: str, settings: Settings) -> bool:
    """Return whether a slope within ±1 is larger than `STEEP`, or not finite, at 0, ±1, ±1/2, ±1/4, …."""
    ends = 2.0 ** torch.arange(-20, 1, dtype=torch.float64, device="cpu")
    x = torch.cat([-ends, torch.zeros(1, dtype=torch.float64, device="cpu"), ends]).requires_grad_()
    with torch.enable_grad():
        value = UNARY[name][0](x, **dict(settings))
        slope = torch.autograd.grad(value.sum(), x)[0] if value.requires_grad else torch.zeros_like(x)
    return not bool((slope.abs() <= STEEP).all())


def exact(name: str, arguments: Mapping[str, Any]) -> Callable[[float], float] | None:
    """Return the function of one float that this operator computes with these arguments; None unless it is unary and without poles."""
    if name == "shifted":
        inner = exact(arguments["function"], arguments["settings"])
        return None if inner is None else lambda x: inner(_moved(x, arguments["factor"], arguments["offset"]))
    if name not in UNARY or steep(name, arguments):
        return None
    settings = {setting: value for setting, value in arguments.items() if setting != "input"}
    return lambda x: UNARY[name][1](x, **settings)


def has_pole(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the operator of this name, with these arguments, is a unary function that is infinite at 0."""
    if name == "shifted":
        return has_pole(arguments["function"], arguments["settings"])
    exponent = arguments.get("exponent")
    operator = BY_NAME.get(name)
    if name in ON_TENSORS:
        return math.isinf(UNARY[name][1](0.0, **{key: value for key, value in arguments.items() if key != "input"}))
    of_any = operator is not None and Trait.SINGULAR_AT_ZERO in operator.traits
    return of_any or (name == "pow" and isinstance(exponent, int | float) and exponent < 0)


def shifted(input: Tensor, function: str, factor: float, offset: float, settings: dict[str, Any]) -> Tensor:
    """Return the unary function of this name of factor · input + offset."""
    return UNARY[function][0](_moved(input, factor, offset), **settings)


def _onnx_shifted(c: Call) -> str:
    function = OPERATORS[UNARY[c["function"]][0]]
    if function.onnx is None:
        return c.exported()
    scaled = c.input if c["factor"] == 1 else c.do("Mul", c.input, c.number(c["factor"]))
    arguments = {"input": c.do("Add", scaled, c.number(c["offset"])), **c["settings"]}
    return function.onnx(replace(c, name=function.name, arguments=arguments))


SHIFTED = register(
    "shifted",
    shifted,
    ("input",),
    # By one table on the operand's own grid: a number far below a step of the sum, the ε under a square root, is not lost.
    lambda lowering, input, function, factor, offset, settings: by_table(lowering, input, function, factor, offset, **settings),
    onnx=_onnx_shifted,
    traits=frozenset({Trait.ELEMENTWISE, Trait.POINTWISE}),
    samples=written("torch.rsqrt(x + 1e-6)", "torch.sigmoid(torch.sub(0.5, x, alpha=2.0))", over=POSITIVE, within=LIMITED),
)


def is_table(node: fx.Node) -> bool:
    """Return whether a canonical node is a unary function that is looked up in a table."""
    operator = operator_of(node)
    return operator is not None and (operator.name in UNARY or operator is SHIFTED)


def of_inverse(input: Any) -> dict[str, Any] | Instead:
    """1 / exp(x) is exp(-x), one table: of small exponentials, no grid has enough to divide by."""
    operator = operator_of(input) if isinstance(input, fx.Node) else None
    if operator is None or operator.function is not torch.exp:
        return {"input": input}
    return Instead(shifted, {"input": input.args[0], "function": "exp", "factor": -1.0, "offset": 0.0, "settings": {}})


def with_offset(function: Operator, arguments: dict[str, Any], addition: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of `shifted` for a unary function of the sum or difference of a number and a tensor; else None."""
    operator = operator_of(addition)
    if operator is None or Trait.ADDS not in operator.traits or function.name not in UNARY or len(addition.users) > 1 or addition.kwargs:
        return None
    terms = operator.arguments(addition)
    left, right, alpha = terms["input"], terms["other"], terms["alpha"]
    sign = operator.function(0, 1)  # of a sum, or of a difference
    settings = {name: value for name, value in arguments.items() if name != "input"}
    if isinstance(right, int | float) and isinstance(left, fx.Node):
        tensor, factor, offset = left, 1.0, sign * alpha * right
    elif isinstance(left, int | float) and isinstance(right, fx.Node):
        tensor, factor, offset = right, float(sign * alpha), left
    else:
        return None
    if is_parameter(tensor) or fact(tensor) != fact(addition) or not math.isfinite(offset) or not math.isfinite(factor):
        return None
    return {"input": tensor, "function": function.name, "factor": factor, "offset": float(offset), "settings": settings}


def is_pointwise(name: str) -> bool:
    """Return whether the operator of this name may be a part of a function that becomes one table, if its operands have one size."""
    return name in BY_NAME and (name in UNARY or Trait.POINTWISE in BY_NAME[name].traits)


def by_torch(function: Callable[..., Tensor]) -> Callable[..., float]:
    """Return a function on one number that `math` does not have: PyTorch's, in float64."""
    return lambda x, **settings: float(function(torch.tensor(x, dtype=torch.float64, device="cpu"), **settings))


# ---- A function of one tensor that is made of several operators: one table in integers -------------------------------
#
# Its meaning is written as a nest, which a file holds as it is: `INPUT` stands for the operand, and ("sub", ("sqrt", INPUT), 1.0, 1) for a
# call of an operator of the table with its arguments in order. Only operators for which `is_pointwise` holds occur.
INPUT = "input"

Steps = Any  # a nest as above


def curve(input: Tensor, steps: Steps) -> Tensor:
    """Compute the function that the nest describes. Raise ValueError for an entry that is not an operator that it may contain."""
    result: Tensor = _value(steps, input, {})
    return result.to(input.dtype)  # of numbers alone, a choice is float32


def _value(steps: Steps, input: Tensor, values: dict[Steps, Any]) -> Any:
    """Evaluate nested calls on `input`; `values` caches the parts already evaluated, so that each is computed once."""
    if steps == INPUT:
        return input
    if not isinstance(steps, list | tuple):
        return steps
    name, *arguments = steps
    if name == MAPPING:
        return {key: _value(value, input, values) for key, value in arguments[0]}
    if not isinstance(name, str) or not is_pointwise(name):
        raise ValueError(f"{name!r} is not an elementwise function of one tensor")
    key = hashable(steps)
    if key not in values:
        record, operands = BY_NAME[name], [_value(argument, input, values) for argument in arguments]
        if isinstance(record.demand, Plain) or Trait.EXTREMUM in record.traits:  # PyTorch's takes no number, or none on the left
            operands = [input.new_full((), value) if isinstance(value, float) else value for value in operands]
        values[key] = record.function(*operands)
    return values[key]


# The interval in which it changes, and the operator of PyTorch that computes the same.
_SIDE = torch.cat([torch.arange(2 * FARTHEST + 1, device="cpu") / 2, torch.tensor([96, 128, 192, 256, 384, 512], device="cpu")]).double()
_SMALL = 2.0 ** -torch.arange(-5, 20, dtype=torch.float64, device="cpu")  # functions may differ close to 0 alone
_EVERYWHERE = torch.cat([torch.linspace(-37.3, 41.9, 1001, dtype=torch.float64, device="cpu"), -_SMALL, _SMALL])
_SAME = 2.0**-23  # how far two ways to write one function may be apart, which round numbers like √2 to float32


@lru_cache(maxsize=256)
def _keeps(steps: Steps, bits: int) -> Interval:
    """Return the interval beyond which it is within a quarter of a step of 2^-bits, times its change at ±1, of its limit."""
    with torch.no_grad():
        sides = [curve(sign * _SIDE, steps) for sign in (-1, 1)]
    near = torch.cat([side[:3] for side in sides])
    tolerance = min(1.0, float(near.max() - near.min())) * 2.0 ** -(bits + 2)

    def end(side: Tensor) -> float:
        changing = torch.nonzero(~((side - side[-1]).abs() <= tolerance)).flatten().tolist()  # NaN is none
        after = max(changing, default=-1) + 1
        return after / 2 if tolerance > 0 and after < 2 * FARTHEST else math.inf

    return -end(sides[0]), end(sides[1])


def chosen_settings(name: str, **settings: Any) -> dict[str, Any]:
    """Return all settings of the unary operator of this name: `settings`, and the defaults of the others."""
    return {key: value for key, value in BY_NAME[name].bind((None,), settings).items() if key != "input"}


@lru_cache(maxsize=256)
def same_as(steps: Steps) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of the unary operator with a form in ONNX that computes this function; None if there is none."""
    with torch.no_grad():
        own = curve(_EVERYWHERE, steps)
        for name, (function, _) in UNARY.items():
            record = BY_NAME.get(name)
            if record is None or record.onnx is None or name == "curve":
                continue
            for each in ({}, *(call.arguments for call in record.samples if not call.text)):
                settings = chosen_settings(name, **{key: value for key, value in each.items() if key != "input"})
                if torch.allclose(function(_EVERYWHERE, **settings), own, rtol=_SAME, atol=_SAME):
                    return name, settings
    return None


def _lower(lowering: Lowering, input: Quantized, steps: Steps) -> Quantized:
    same = same_as(hashable(steps))
    return by_table(lowering, input, "curve", steps=hashable(steps)) if same is None else by_table(lowering, input, same[0], **same[1])


def _onnx(c: Call) -> str:
    same = same_as(hashable(c["steps"]))
    if same is None:
        return c.exported()
    record = BY_NAME[same[0]]
    assert record.onnx is not None
    return record.onnx(replace(c, name=record.name, arguments={"input": c.input, **same[1]}))


UNARY["curve"] = curve, by_torch(curve)
SINGULAR.add("curve")  # some have poles, or slopes without a bound
ON_TENSORS.add("curve")
register(
    "curve",
    curve,
    ("input",),
    _lower,
    element=curve,
    keeps=lambda arguments, after, bits: None if bits is None else _keeps(hashable(arguments["steps"]), bits),
    onnx=_onnx,
    traits=frozenset({Trait.ELEMENTWISE}),
    samples=written("torch.where(x > 0, x.sqrt(), x)", within=LIMITED),
)
