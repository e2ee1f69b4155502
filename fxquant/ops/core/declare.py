"""Declaration of an operator by the one function that gives it an integer meaning.

    @composite(nn.CosineSimilarity, refuses=two_tensors, samples=(sample(x1=(3, 8), x2=(3, 8)),))
    def cosine_similarity(build: Builder, x1: fx.Node, x2: fx.Node, dim: int = 1, eps: float = 1e-8) -> Any:
        \"\"\"Compute Σ x1·x2 / (‖x1‖ ‖x2‖) along a dimension.\"\"\"
        ...

The function's name is the operator's, and its parameters after the first are the canonical ones, with their defaults. Parameters
annotated `fx.Node` or `Quantized` take activations. The decorator returns the float function, which takes the decorated function's
name in its module, for other composites to call.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import TensorFact, fact, is_parameter, largest_size
from fxquant.lowering.lowering import Clamp, Lowering, Quantized
from fxquant.numerics.rounding import clamped
from fxquant.ops.core.record import Adapt, Instead, Parameter, register
from fxquant.primitives import shape

Guard = Callable[[fx.Node, dict[str, Any]], str | None]
Function = Callable[..., Any]
# Annotations of parameters: as text where a file postpones their evaluation.
ACTIVATIONS, LISTS = ("fx.Node", "Quantized", fx.Node, Quantized), ("Sequence[int]", Sequence[int])


def composite(*forms: Any, **declared: Any) -> Callable[[Function], Callable[..., Tensor]]:
    """Declare a composite: the decorated function is `expand(build, **arguments)`. See `declare` for the arguments."""
    return lambda expand: declare(expand, *forms, expand=expand, **declared)


def lowered(*forms: Any, **declared: Any) -> Callable[[Function], Callable[..., Tensor]]:
    """Declare an operator that lowers to primitives directly: the decorated function is `lower(lowering, **arguments)`. See `declare`."""
    return lambda lower: declare(lower, *forms, lower=lower, **declared)


def declare(
    meaning: Function, *forms: Any, name: str | None = None, function: Function | None = None, operands: Sequence[str] | None = None,
    adapt: Adapt | None = None, takes: str = "", by_name: bool = True, calls: Mapping[Any, Adapt | None] | None = None,
    modules: Mapping[type, Function] | None = None, refuses: Guard | Iterable[Guard] = (), settings: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Callable[..., Tensor]:  # fmt: skip
    """Register an operator and return its float function.

    meaning   `expand` or `lower`: a function of a builder, or of a lowering, and of the canonical arguments
    forms     further call forms: functions, names (see `spelled`), and module classes whose attributes have the canonical names
    name      the operator's name, if it is not that of the decorated function
    function  the float function; by default PyTorch's function of that name, called with keywords
    operands  the parameters that take activations, if their annotations do not say it
    adapt     converts the arguments of a call form to canonical ones; None: they have the canonical names
    takes     the parameters of the call forms in order, if they have more than the canonical ones; see `taking`
    by_name   whether PyTorch's functions, methods and modules of the operator's name are call forms
    calls     functions and names of methods that need another conversion of their arguments, with that conversion
    modules   module classes whose attributes have other names: module -> arguments
    refuses   guards: the first that returns a reason keeps the node in float; called only if all operands are tensors of known shape
    settings  further canonical parameters, after those of `meaning`, with their defaults; `meaning` takes them as **keywords
    fields    other fields of the record (`Operator`)
    """
    name = name or meaning.__name__
    fields["samples"] = (*fields.get("samples", ()), *getattr(meaning, "samples", ()))
    parameters = {p.name: p for p in list(inspect.signature(meaning).parameters.values())[1:]}
    canonical = {p.name: p.default for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    canonical |= settings or {}
    activations = [name for name, p in parameters.items() if p.annotation in ACTIVATIONS] if operands is None else operands
    call_forms = [
        *(f for f in forms if callable(f) and not isinstance(f, type)),
        *spelled(*[name] * by_name, *(f for f in forms if isinstance(f, str))),
    ]
    lists = [name for name, p in parameters.items() if p.annotation in LISTS]
    classes = [*(form for form in forms if isinstance(form, type)), *module_of(name if by_name else "")]
    if function is None:
        homes = (*spelled(name), *call_forms) if by_name else (*call_forms, *spelled(name))
        own = _float_function(next(form for form in homes if callable(form)), name, meaning, canonical)
    else:
        own = _named(function, name, meaning)
    call_forms = [form for form in call_forms if form not in (calls or {})]
    every = {**dict.fromkeys(call_forms, taking(takes, canonical) if takes else adapt), **(calls or {})}
    register(
        name,
        own,
        tuple(activations),
        calls={form: how for form, how in every.items() if form is not own},
        modules={**{kind: settings_of((p for p in canonical if p not in activations), lists) for kind in classes}, **(modules or {})},
        refuses=_where_known(activations, first_reason(*([refuses] if callable(refuses) else refuses))),
        parameters=canonical,
        **fields,
    )
    return own


def spelled(*names: str) -> list[Any]:
    """Return the functions of these names that PyTorch has, in place or not, and the names that are methods of tensors."""
    forms: list[Any] = []
    for name in (n for plain in names for n in ((plain,) if plain.endswith("_") else (plain, f"{plain}_"))):
        homes = () if name.startswith("__") else (torch, torch.special, F)
        places = [getattr(home, name) for home in homes if hasattr(home, name)]
        forms += [*dict.fromkeys(places), *([name] if hasattr(Tensor, name) else [])]
    return forms


def function_and_method(how: Any, *names: str) -> dict[Any, Any]:
    """Map the functions of torch and the tensor methods of these names to `how`, the conversion of their arguments to canonical ones."""
    return {form: how for name in names for form in (getattr(torch, name), name)}


def bound(function: Function, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a Python function by name, with its defaults. Raise TypeError as the call would."""
    binding = inspect.signature(function).bind(*args, **kwargs)
    binding.apply_defaults()
    return dict(binding.arguments)


def listed(values: Sequence[Any]) -> list[Any]:
    """Return variadic arguments as a list: both of x.permute(0, 2, 1) and x.permute((0, 2, 1)) give [0, 2, 1]."""
    return list(values[0] if len(values) == 1 and isinstance(values[0], list | tuple) else values)


def module_of(name: str) -> list[type]:
    """Return the class of torch.nn whose name equals `name` without underscores and in any case, in a list; an empty list if none does."""
    return [kind for key, kind in vars(nn).items() if isinstance(kind, type) and key.lower() == name.replace("_", "")]


def settings_of(names: Iterable[str], lists: Collection[str] = ()) -> Callable[[Any], dict[str, Any] | str | Instead]:
    """Return a function that reads the attributes of these names off a module as arguments, a tensor as a `Parameter`, `lists` as lists."""
    attributes = tuple(names)

    def read(module: Any) -> dict[str, Any]:
        values = {name: getattr(module, name) for name in attributes if hasattr(module, name)}
        values |= {name: list(value) for name, value in values.items() if name in lists}
        return {name: Parameter(name) if isinstance(value, Tensor) else value for name, value in values.items()}

    return read


def taking(takes: str, canonical: Collection[str]) -> Adapt:
    """Return a function that converts arguments of the parameters `takes`, in order, to canonical ones.

    A `dtype` that is not canonical must be float32 or absent; others, such as `inplace`, do not affect the value and are dropped.
    """
    names = takes.split()

    def adapt(*args: Any, **named: Any) -> dict[str, Any] | str:
        arguments = {**dict(zip(names, args, strict=False)), **named}
        if len(args) > len(names) or not set(names).issuperset(arguments):
            raise TypeError(f"the parameters are {takes}")
        if "dtype" not in canonical and arguments.get("dtype") not in (None, torch.float32):
            return f"it computes in {arguments['dtype']}"
        return {name: value for name, value in arguments.items() if name in canonical}

    return adapt


def first_reason(*guards: Guard) -> Guard:
    """Return the guard that gives the first reason of several."""
    return lambda node, arguments: next((reason for guard in guards if (reason := guard(node, arguments)) is not None), None)


def _where_known(operands: Iterable[str], guard: Guard) -> Guard:
    """Return a guard that calls `guard` if all operands are tensors of known shape, and refuses nothing else by itself."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        read: list[fx.Node] = []
        fx.map_arg([arguments.get(name) for name in operands], read.append)
        return guard(node, arguments) if all(isinstance(fact(value), TensorFact) for value in read) else None

    return refuses


def _float_function(function: Function, name: str, meaning: Function, canonical: Mapping[str, Any]) -> Function:
    """Wrap PyTorch's function in one with the canonical signature, which passes all arguments but the first as keywords.

    The keyword `clamp`, of an operator that absorbs one, clamps the result.
    """
    names = tuple(canonical)
    defaults = {name: value for name, value in canonical.items() if value is not inspect.Parameter.empty}

    def called(*args: Any, clamp: Clamp | None = None, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        value = function(arguments.pop(names[0]), **arguments)
        return value if clamp is None else clamped(value, *clamp)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [inspect.Parameter(one, kind, default=canonical[one]) for one in names]
    clamps = inspect.Parameter("clamp", inspect.Parameter.KEYWORD_ONLY, default=None)
    called.__signature__ = inspect.Signature([*own, clamps])  # type: ignore[attr-defined]
    return _named(called, name, meaning)


def _named(function: Function, name: str, meaning: Function) -> Function:
    """Rename a function of fxquant's to `name`, with the module and docstring of `meaning`; PyTorch's stay. Return the function."""
    if not (function.__module__ or "").startswith("torch") and inspect.isfunction(function) and function.__name__ != name:
        function.__name__, function.__qualname__, function.__module__ = name, name, meaning.__module__
        function.__doc__ = meaning.__doc__
    return function


# ---- Guards of operator declarations: each says why a particular node must stay in float, or None --------------------
NO_DIMENSIONS = "its operand has no dimensions"
COMPUTED = "one of its settings is computed, not a number"


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape of a node's tensor; None for any other value."""
    value_fact = fact(value) if isinstance(value, fx.Node) else None
    return value_fact.shape if isinstance(value_fact, TensorFact) else None


def dtype_of(value: Any) -> torch.dtype | None:
    """Return the dtype of a node's tensor; None for any other value."""
    value_fact = fact(value) if isinstance(value, fx.Node) else None
    return value_fact.dtype if isinstance(value_fact, TensorFact) else None


def is_finite(value: Any) -> bool:
    """Return whether an argument is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def is_tensor(value: Any) -> bool:
    """Return whether an argument is a node with a tensor, an activation or a parameter."""
    return isinstance(value, fx.Node) and (isinstance(fact(value), TensorFact) or is_parameter(value))


def nodes(*names: str, because: str = "one of its operands is a number") -> Guard:
    """Refuse a number in place of a tensor."""
    return lambda node, arguments: None if all(isinstance(arguments[name], fx.Node) for name in names) else because


def numbers(*names: str, because: str = COMPUTED, finite: bool = False, none: bool = False) -> Guard:
    """Refuse settings that are computed: anything but numbers and lists of numbers, or None if `none` allows it."""

    def fits(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(map(fits, value))
        return (none and value is None) or (is_finite(value) if finite else isinstance(value, int | float))

    return lambda node, arguments: None if all(fits(arguments[name]) for name in names) else because


def needs(because: str, holds: Callable[[dict[str, Any]], bool]) -> Guard:
    """Refuse arguments that do not meet a condition."""
    return lambda node, arguments: None if holds(arguments) else because


def with_batch(spatial: int) -> Guard:
    """Refuse an operand that does not have `spatial` + 2 dimensions: batch, channels and the spatial ones."""
    return needs("its input has no batch dimension", lambda arguments: len(fact(arguments["input"]).shape) == spatial + 2)


def meets(name: str, holds: Callable[[Any], bool], because: Callable[[Any], str]) -> Guard:
    """Refuse a setting that does not meet a condition, with a reason that is made of its value."""
    return lambda node, arguments: None if holds(arguments[name]) else because(arguments[name])


def one_of(name: str, *values: Any, because: Callable[[Any], str]) -> Guard:
    """Return a guard that refuses a node whose argument `name` is not one of `values`; `because(value)` is the reason."""
    return meets(name, values.__contains__, because)


def has_dimensions(name: str = "input", because: str = NO_DIMENSIONS) -> Guard:
    """Return a guard that refuses a node whose operand `name` has no dimensions."""
    return lambda node, arguments: None if shape_of(arguments[name]) else because


def fixed(
    dim: str | int = "dim", name: str = "input", because: str = "it runs along the batch, whose size is not fixed", bounded: bool = False
) -> Guard:
    """Return a guard that refuses a node if the size of dimension `dim` of its operand is not fixed, or there are no dimensions.

    `bounded`: a size that varies between bounds is taken as well.
    """

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        sizes = shape_of(arguments[name])
        if not sizes:
            return NO_DIMENSIONS
        at = arguments[dim] if isinstance(dim, str) else dim
        return None if isinstance(at, int) and (largest_size(sizes[at]) is not None if bounded else isinstance(sizes[at], int)) else because

    return refuses


def fixed_sizes(because: str, name: str = "input", start: int | None = None) -> Guard:
    """Refuse an operand that has a size that depends on the batch size, at dimension `start` or later."""
    return lambda node, arguments: None if are_fixed(fact(arguments[name]).shape[start:]) else because


def fixed_along(dims: str, because: str, name: str = "input") -> Guard:
    """Refuse a node if the operand's size along one of the dimensions `dims` depends on the batch size."""
    return lambda node, arguments: None if are_fixed(fact(arguments[name]).shape[dim] for dim in arguments[dims]) else because


def are_fixed(sizes: Iterable[Any]) -> bool:
    """Return whether none of these sizes depends on the batch size."""
    return all(isinstance(size, int) for size in sizes)


def known_size(size: Any) -> int:
    """Return a size that does not depend on the batch size."""
    assert isinstance(size, int)
    return size


def known_sizes(sizes: Iterable[Any]) -> list[int]:
    """Convert sizes to a list of integers; assert that none of the sizes varies."""
    return list(map(known_size, sizes))


# ---- Parameters, constants and numbers as operands next to activations, on the grid of the result: for selection and concatenation
Branch = Quantized | Tensor | float


def on_the_output(lowering: Lowering, branch: Branch, role: str) -> Any:
    """Return an operand, a constant tensor or a number as integers on the output's grid."""
    if lowering.plain:  # float values that are copied
        return branch.value if isinstance(branch, Quantized) else lowering.constant(role, torch.as_tensor(branch), torch.float32)
    to = lowering.output
    if isinstance(branch, Quantized):
        return lowering.rescale(branch, to, f"{role}_")
    value = torch.as_tensor(branch, dtype=torch.float32, device=to.grid.scale.device)
    refuse_nan(lowering, value, role)
    grid = to.grid
    lowering.describe(role, grid.scale, zero_point=grid.zero_point)
    return lowering.constant(role, lowering.stored(grid.quantize(value), grid), grid.type.storage)


def refuse_nan(lowering: Lowering, branch: Branch, role: str) -> None:
    """Raise NotFinite for a constant that holds NaN; an infinite one saturates."""
    if isinstance(branch, Tensor) and bool(torch.isnan(branch).any()):
        lowering.parameters[f"its constant {role!r}"] = branch
        raise lowering.not_finite()


def real(branch: Branch) -> Any:
    """Return the float value that an operand, a constant or a number represents."""
    return branch.real() if isinstance(branch, Quantized) else branch


def selected(lowering: Lowering, value: Any, dim: int, places: Iterable[int] | Tensor, role: str = "indices") -> Any:
    """Return the integers at these places along a dimension."""
    chosen = torch.as_tensor(places if isinstance(places, Tensor) else list(places), dtype=torch.int64, device=lowering.device)
    return lowering.call(shape.select, value, dim, lowering.constant(role, chosen, torch.int64))
