"""Operator records: each operator is one record.

The record says how the operator is called in PyTorch, what it demands of its result's grid, and either how it lowers to
integer primitives or how it expands into calls of other records. Its shape function is its float function, run on tensors
without data. A function has many call forms: torch.softmax, F.softmax, x.softmax() and nn.Softmax; torch.add, +, += and x.add().
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import TensorFact, fact, is_parameter, stated_demand
from fxquant.lowering.lowering import Quantized
from fxquant.numerics.grids import EVERYTHING, PLAIN_TYPES, Interval
from fxquant.ops.core.form import Call
from fxquant.ops.core.samples import Sample
from fxquant.primitives.arithmetic import READ_ONCE, Arithmetic


# ---- Grids that an operator demands of its result: its own, its operand's, a fixed one, or none ----------------------
@dataclass(frozen=True)
class Own:
    """A demand for a separate, calibrated scale, with this dtype, or with that of the qconfig if `dtype` is None.

    A target that has no activations of the dtype refuses the operator, which then stays in float, unless `otherwise` names another dtype.
    """

    dtype: str | None = None
    # A field of `Arithmetic`: if it is true, all operands share the scale of the result; if it is READ_ONCE, only operands that no other
    # node reads share it.
    shared_where: str | None = None
    otherwise: str | None = None  # the dtype on a target without activations of the first: `Own("int16", otherwise="int8")`
    headroom: float = 1.0  # a factor of the calibrated scale, so that values above the calibrated range do not saturate; only for `dtype`
    limit: float | None = None


# For an inner tensor of a composite: what its result needs, and what its result is better with.
WIDE = Own("int16", headroom=2.0)
OWN = Own()
INNER = Own("int16", otherwise="int8")


@dataclass(frozen=True)
class Same:
    """The grid of the operands of these parameters; of all operands, where none is named."""

    operands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A demand for a constant scale and dtype, which need no calibration."""

    scale: float
    dtype: str
    zero_point: int | None = None  # of an affine dtype; None: the zero point whose range is that of a symmetric dtype
    otherwise: "Fixed | Own | None" = None  # the demand on a target without activations of the dtype; None: it refuses the operator


@dataclass(frozen=True)
class Plain:
    """A demand for no quantization: the result is a bool or int64 tensor ("bool", "int64"), without scale or gradient."""

    dtype: str


Demand = Own | Same | Fixed | Plain


def supported_demand(demanded: Demand, dtypes: Collection[str]) -> Demand:
    """Return the demand that applies on a target with activations of these dtypes: its alternative, where the target lacks the first."""
    if not isinstance(demanded, Own | Fixed) or demanded.otherwise is None or demanded.dtype in dtypes:
        return demanded
    if isinstance(demanded, Own):
        return replace(demanded, dtype=demanded.otherwise, otherwise=None, headroom=1.0)
    return supported_demand(demanded.otherwise, dtypes)


# ---- Traits of operators: what passes and backends rely on instead of an operator's name -----------------------------
#
# An operator that has a trait meets its criterion; tests/ops/test_traits.py runs each of them. One without it may meet it all the same:
# then no pass relies on it yet. In a criterion f is the operator's float function, x and y are activations, c and z are numbers.
class Trait(Enum):
    """Criteria that operators meet."""

    ELEMENTWISE = "A function of each element of one tensor: f of a permuted x is the permuted f(x)."
    HOMOGENEOUS = "f(2x) = 2 f(x), for all activations together; bounds of a clamp are 0, and no divisor is given."
    AFFINE = "With a number as one of its two operands: f((x + y) / 2, c) = (f(x, c) + f(y, c)) / 2."
    SPATIAL = "Mixes elements along the dimensions after the channels only: f of permuted channels is f(x) with its channels permuted."
    REDUCTION = "Reduces dimensions, in whatever order: f of x, permuted along them, is f(x)."
    SUMMATION = "A reduction that adds up: f(x + y) = f(x) + f(y)."
    STATISTIC = "A reduction of squares: f(-x) = f(x), and f(2x) is 2 f(x) or 4 f(x)."
    SOFTMAX = "Depends on the differences of the elements of a row, and keeps their order: f(x + c) = f(x), and f(x) is sorted like x."
    MATRIX_PRODUCT = "Sums of products of two operands: f(2x, y) = f(x, 2y) = 2 f(x, y), and not of elements at the same index."
    DIVIDES = "Has a pole where its second operand is 0: f(c, 0) is not finite."
    CHOOSES = "Selects for each element: values that are not selected may be NaN, and its result is still finite."
    EXTREMUM = "The larger or the smaller of two elements: each element of f(x, y) is that of x or of y, and f(y, x) = f(x, y)."
    INTEGERS = "Its float values are integers: f(x) = round(f(x))."
    KEEPS_INTEGERS = "Its values are integers where its operands and its numbers are: f(round(x)) = round(f(round(x)))."
    BOUNDED_BELOW = "Raises values below a bound to it: no element of f(x, c) is less than c."
    RESHAPES = "Reshapes its elements in the same order; it may repeat them, and drops none."
    REARRANGES = "Returns elements of its operands, in entire rows and any order, without arithmetic."
    ADDS = "Its operands are terms of a sum, brought to one scale, so that one may be too small for the others: f(x + c, y) = f(x, y) + c."
    SUMS = "Without a bias a sum of products, which may stand as it is, a 32-bit output: f(x + z, y) = f(x, y) + f(z, y)."
    DYNAMIC = (
        "Computes float values of float values: no operand has a grid, and x is quantized at run time: f(x + z, y) = f(x, y) + f(z, y)."
    )
    VIEWS = "Returns elements of one tensor, at places that its other arguments give, booleans as well as floats: f(x > 0) is f(x) > 0."
    COLLECTS = "Each operand is a part of its result, or added to one: of zeros it is zeros, and not with a number in any of them."
    POINTWISE = "With tensors of one shape, each element depends on those at its index: f of permuted x and y is the permuted f(x, y)."
    COMPARES_WITH_ZERO = "Reads whether numbers are 0, and nothing else of them: f(x) = f(x != 0)."
    CONJUNCTION = "Of 0 and 1 it is 0 where either is: f(x > 0, y > 0) is x > 0 and y > 0."
    DISJUNCTION = "Of 0 and 1 it is 0 where both are: f(x > 0, y > 0) is not 0 where x > 0 or y > 0."
    LEAVES_INTEGERS = "Returns integers as they are: f(round(x)) = round(x)."
    SINGULAR_AT_ZERO = "f(0) is infinite."
    PADS_ZEROS = "Its `padding` is zeros around x, before each trailing dimension and then after each: f(x, padding=p) = f(padded x)."
    OUTPUTS_FIRST = "Dimension 0 of its weight is the output channels: twice the weight at one index doubles that channel only."


# How the arguments of one call form become canonical ones, by name; a string is the reason why they cannot.
Adapt = Callable[..., "dict[str, Any] | str | Instead"]
Shape = tuple[int | Fraction, ...]  # at one batch size; a size at half a batch need not be an integer

# The call (a function, and its arguments by name) that an operator is of integers; None, or a reason, where it is none.
OnIntegers = Callable[[dict[str, Any], "TensorFact | None"], "tuple[Callable[..., Any], dict[str, Any]] | str | None"]


@dataclass(frozen=True)
class Parameter:
    """Marks, among the arguments taken from a module, the module's own parameter or buffer of this name."""

    name: str


@dataclass(frozen=True)
class Instead:
    """Call of another operator, which an adaption returns in place of arguments: its function, and its arguments by name."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


def _never_lowered(*_: Any, **__: Any) -> Quantized:
    raise AssertionError("a composite is expanded before anything is lowered")


@dataclass(frozen=True)
class Layer:
    """Functions of an operator's arguments that state its weight, channels, MACs and windows; None: the operator has none.

    weight     arguments by name -> the weight that `lower` quantizes, output channels first; learned scales and roundings have its shape
    folded     weight, bias, batch norm and the other arguments -> weight and bias with the batch norm folded in
    channels   arguments -> the channel dimension of the operand and of the result
    rescaled   arguments by name, factors of the input channels, factors of the output channels -> the changed arguments, with which an
               operand multiplied by the first gives the result multiplied by the second
    macs       shapes of the arguments by name, and shape of the result -> number of multiply-accumulates
    window     arguments -> the window sizes of a maximum pooling along the last dimensions
    table      arguments -> the table that the result's rows are copied from (an embedding); its scale covers the whole table, since a batch
               shows only some rows
    """

    weight: Callable[..., Tensor | None] = lambda **arguments: None
    folded: Callable[..., tuple[Tensor, Tensor]] | None = None
    channels: Callable[[dict[str, Any]], int] | None = None
    rescaled: Callable[[dict[str, Any], Tensor, Tensor], dict[str, Any]] | None = None
    macs: Callable[[Mapping[str, Shape], Shape], Fraction | int] | None = None
    window: Callable[[dict[str, Any]], list[int]] | None = None
    table: Callable[[dict[str, Any]], Tensor | None] = lambda arguments: None


@dataclass(frozen=True)
class Operator:
    """One operator.

    name       its name, PyTorch's
    function   its float meaning, differentiable; the target of its canonical node; its signature is the canonical one
    operands   the parameters that take activations (a tensor, or a list of them)
    moves      whether its result holds elements of its operands in another order, or their indices: it then takes bool and integer tensors
               as well, without a scale, which `lower` gets as a `Quantized` without a grid
    carries    the parameters (tensors, constants, numbers) whose elements it copies to its result unchanged, so that float values would be
               copied exactly too. By default the operands of an operator that `moves`
    reads      the parameters that take bool or integer tensors without a scale: a mask, an index
    dtypes     the preferred dtype of an operand, by parameter, if the target has it and no rule asks for another
    demand     the scale and dtype of the result, or a function of a node and its arguments that returns them
    keeps      its arguments, the interval of result values that later operators distinguish, and the bits of its operand or None ->
               the interval of operand values that the result distinguishes, to within a quarter of a step of 2^-bits. A scale need not
               cover more. None: all values; if operand and result share a scale, the interval of the result
    lower      its integer form: lower(lowering, **arguments) -> Quantized, or a tensor if its demand is `Plain`. Every operator has one
               but a composite. An argument that is not an operand, a mask or an index is passed unchanged: a value of the lowering, or
               a tensor if it is a constant (`Lowering.given`)
    integers   its form on bool and integer tensors: arguments by name, as int64, and the fact of `input` -> another operator's function
               and arguments, a reason against it, or None if there is no such form
    expand     a composite's form in other operators: expand(build, **arguments) -> the node of its result, or a nest of nodes;
               `build` is a `composite.Builder`
    calls      its functions in PyTorch, and names of Tensor methods, each with how its arguments become canonical ones (None: by name)
    modules    the same for modules, by exact class: module -> arguments
    absorbs    operations that may be fused into it: "batch_norm", "residual", "clamp"; each is a keyword of `function`
    read_off   keywords of a module's call that `normalize` reads off the size of its result: "output_size"
    normalize  brings the arguments of a node to their simplest form, or says why they have none
    parameters the canonical parameters with their defaults, where `function` is PyTorch's own; else read off its signature
    refuses    says why a particular node must stay in float, or None
    element    its float meaning on elements without their channels, of an operator of one tensor whose channels differ but in a parameter
    idle       whether a node whose result has its operand's shape and dtype also has its operand's values, in every state
    layer      its weight, channels, MACs and table (`Layer`)
    onnx       its float meaning in standard operators of ONNX: onnx(call) -> the name of the result's value. None: its primitives,
               where these only move elements, or else `function` as PyTorch's exporter writes it
    traits     the criteria that it meets, by which passes and backends distinguish operators
    samples    small calls of it, from which tests and benchmarks make inputs for each of its call forms
    recurs     whether it is a recurrence, whose inner tensors may have other dtypes: see `Target.recurrent`
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[str, ...]
    lower: Callable[..., Any] = _never_lowered
    demand: Demand | Callable[[fx.Node, dict[str, Any]], Demand] = OWN
    moves: bool = False
    carries: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    expand: Callable[..., Any] | None = None
    integers: OnIntegers | None = None
    keeps: Callable[[dict[str, Any], Interval, int | None], Interval | None] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[Callable[..., Any] | str, Adapt | None] = field(default_factory=dict)
    modules: Mapping[type, Callable[[Any], dict[str, Any] | str | Instead]] = field(default_factory=dict)
    absorbs: frozenset[str] = frozenset()
    refuses: Callable[[fx.Node, dict[str, Any]], str | None] = lambda node, arguments: None
    element: Callable[..., Tensor] | None = None
    idle: Callable[[dict[str, Any]], bool] = lambda arguments: False
    read_off: frozenset[str] = frozenset()
    normalize: Callable[[fx.Node, dict[str, Any]], dict[str, Any] | str] = lambda node, arguments: arguments
    parameters: Mapping[str, Any] = field(default_factory=dict)
    layer: Layer = Layer()
    onnx: Callable[[Call], str] | None = None
    traits: frozenset[Trait] = frozenset()
    samples: tuple[Sample, ...] = ()
    recurs: bool = False

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Copied and pickled by name: its functions are code.
        return (operator_named, (self.name,)) if OPERATORS.get(self.function) is self else super().__reduce__()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return canonical arguments by name, with defaults filled in. Raise TypeError as a call would."""
        signature = _SIGNATURES[self.function]
        if len(args) > len(signature):
            raise TypeError(f"{self.name} takes {len(signature)} arguments, got {len(args)}")
        bound = dict(signature)
        bound.update(zip(signature, args, strict=False))
        for name, value in kwargs.items():
            name = _ALIASES.get(name, name) if name not in signature else name
            if name in signature:
                bound[name] = value
            elif value is not None:  # of a keyword that is None, PyTorch's default, nothing is asked
                raise TypeError(f"{self.name} has no argument {name!r}")
        for name, value in bound.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.name} is missing its argument {name!r}")
        return bound

    def of_element(self, arguments: Mapping[str, Any]) -> Callable[[Tensor], Tensor] | None:
        """Return the function of one element, on tensors, that a call with these arguments is; None where it is none, or steep near 0."""
        others = {name: value for name, value in arguments.items() if name not in self.operands}
        if (self.element is None and Trait.ELEMENTWISE not in self.traits) or any(isinstance(value, fx.Node) for value in others.values()):
            return None
        function = partial(self._on_elements, **others)
        near = 2.0 ** -torch.arange(0, 12, dtype=torch.float32, device="cpu")
        slopes = _slopes(function, torch.cat([-near, near]))
        return None if has_poles(function) or bool((slopes.abs() > STEEPEST).any()) else function

    def _on_elements(self, input: Tensor, **others: Any) -> Tensor:  # a method, since a lambda cannot be pickled
        result: Tensor = (self.element or self.function)(input, **others)
        return result

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the canonical parameters, in order, without the keywords of `function` for fused operations."""
        return tuple(_SIGNATURES[self.function])

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """Return the arguments of a canonical node, by name; keywords that were not given are absent."""
        return self.bind_call(node.args, node.kwargs)

    def bind_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return by name the arguments of a call to `function` that a canonical node makes; keywords that were not given are absent."""
        return {**dict(zip(_SIGNATURES[self.function], args, strict=False)), **kwargs}


STEEPEST = 8.0  # the slope near 0 of a function after which an error is judged: a logarithm makes only the smallest values count


def has_poles(function: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function has no finite slope where elementwise functions have their poles."""
    return not bool(torch.isfinite(_slopes(function, torch.tensor([-1.0, 0.0, 1.0], device="cpu", dtype=torch.float32))).all())


def _slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x.requires_grad_()
    with torch.enable_grad():
        value = function(x)
        return torch.autograd.grad(value.sum(), x)[0] if value.requires_grad else torch.zeros_like(x)


def operator_named(name: str) -> Operator:
    """Return the operator of this name, which there is."""
    return BY_NAME[name]


_SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {}
_ALIASES = {"self": "input", "x": "input", "tensor": "input"}
OPERATORS: dict[Callable[..., Any], Operator] = {}  # by canonical function
BY_NAME: dict[str, Operator] = {}
FUNCTIONS: dict[Callable[..., Any], tuple[Operator, Adapt | None]] = {}
METHODS: dict[str, tuple[Operator, Adapt | None]] = {}
MODULES: dict[type, tuple[Operator, Callable[[Any], dict[str, Any] | str | Instead]]] = {}


def register(*record: Any, **fields: Any) -> Operator:
    """Add an operator with this record to the table. Raise ValueError if one of its call forms is taken."""
    operator = Operator(*record, **fields)
    if operator.parameters:
        _SIGNATURES[operator.function] = dict(operator.parameters)
    else:
        signature = inspect.signature(operator.function).parameters.values()
        _SIGNATURES[operator.function] = {p.name: p.default for p in signature if p.kind is not inspect.Parameter.KEYWORD_ONLY}
    _claim(OPERATORS, operator.function, operator)
    BY_NAME[operator.name] = operator
    for form, adapt in {operator.function: None, **operator.calls}.items():
        _claim(METHODS if isinstance(form, str) else FUNCTIONS, form, (operator, adapt))
    for module, extract in operator.modules.items():
        _claim(MODULES, module, (operator, extract))
    return operator


def _claim(table: dict[Any, Any], key: Any, value: Any) -> None:
    if key in table:
        raise ValueError(f"{key!r} is already a call form of an operator")
    table[key] = value


def operator_of(node: fx.Node) -> Operator | None:
    """Return the record of a canonical node; None if the node is not a known operator, or computes a parameter."""
    return OPERATORS.get(node.target) if node.op == "call_function" and not is_parameter(node) else None  # type: ignore[arg-type]


def calls(node: fx.Node, function: Callable[..., Any]) -> bool:
    """Return whether a node is canonical and calls this function."""
    return node.target is function and operator_of(node) is not None


def traits_of(node: fx.Node) -> frozenset[Trait]:
    """Return the traits of a canonical node's operator; none for a node that is not a known operator."""
    operator = operator_of(node)
    return frozenset() if operator is None else operator.traits


def has_weights(node: fx.Node) -> bool:
    """Return whether a canonical node forms sums of products, or has a weight."""
    operator = operator_of(node)
    return operator is not None and (Trait.SUMS in operator.traits or "weight" in operator.arguments(node))


def demand(node: fx.Node) -> Demand | None:
    """Return the demand (scale and dtype) of a canonical node's result; None if the node is not an operator of the table.

    A part of a composite takes its demand from the composite, any other node from its operator.
    """
    operator = operator_of(node)
    if operator is None:
        return None
    node_fact, stated = fact(node), stated_demand(node)
    if stated is not None:
        return stated  # type: ignore[no-any-return]
    if moved_plain(operator, operator.arguments(node)) and isinstance(node_fact, TensorFact):
        return Plain(str(node_fact.dtype).removeprefix("torch."))
    return operator.demand if isinstance(operator.demand, Own | Same | Fixed | Plain) else operator.demand(node, operator.arguments(node))


def shares(node: fx.Node) -> bool:
    """Return whether a canonical node demands its operands' grid."""
    return isinstance(demand(node), Same)


def sharing_operands(node: fx.Node, arithmetic: Arithmetic) -> list[fx.Node]:
    """Return the operands with which a node has one grid on a target of this arithmetic."""
    operator, demanded = operator_of(node), demand(node)
    where = demanded.shared_where if isinstance(demanded, Own) else None
    if operator is not None and where is not None and getattr(arithmetic, where) not in (False, READ_ONCE):
        return operand_nodes(operator, operator.arguments(node))
    return on_grid_of(node)


def on_grid_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose grid a canonical node demands, on any target."""
    operator, demanded = operator_of(node), demand(node)
    if operator is None or not isinstance(demanded, Same):
        return []
    arguments = operator.arguments(node)
    named = {name: value for name, value in arguments.items() if name in demanded.operands} if demanded.operands else arguments
    return operand_nodes(operator, named)


def preferred_dtypes(graph: fx.Graph, offered: Collection[str]) -> dict[fx.Node, str]:
    """Return, by node, the dtype among `offered` that its readers, direct or not, compute best with (`Operator.dtypes`)."""
    preferred: dict[fx.Node, str] = {}
    for reader in reversed(graph.nodes):
        for operand in reader.all_input_nodes:
            dtype = preferred_by(reader, operand, preferred)
            if dtype is not None and dtype in offered:
                preferred[operand] = dtype
    return preferred


def preferred_by(reader: fx.Node, operand: fx.Node, preferred: Mapping[fx.Node, str]) -> str | None:
    """Return the dtype that a canonical node prefers for this operand, or None; `preferred` holds the dtypes preferred for results.

    An operator without weights passes the preference for its result on to its operands, since a coarse operand makes its result coarse.
    """
    operator = operator_of(reader)
    if operator is None:
        return None
    arguments = operator.arguments(reader)
    for name, dtype in operator.dtypes.items():
        if arguments.get(name) is operand:
            return dtype
    if reader not in preferred or has_weights(reader):
        return None
    passed_on = on_grid_of(reader) if shares(reader) else operand_nodes(operator, arguments)
    return preferred[reader] if operand in passed_on else None


def matters(node: fx.Node, after: Interval, shares: bool, bits: int | None = None) -> Interval:
    """Return the interval of operand values that a node's result distinguishes, if later operators distinguish its values in `after`.

    `shares` says whether operands and result share one scale. With `bits`, the operands' width, values at which the function is flat to
    within a quarter of a step are left out as well.
    """
    operator = operator_of(node)
    distinguished = None if operator is None or operator.keeps is None else operator.keeps(operator.arguments(node), after, bits)
    return distinguished or (after if shares else EVERYTHING)


def operand_nodes(operator: Operator, arguments: Mapping[str, Any]) -> list[fx.Node]:
    """Return the nodes of all activations among the arguments, the residual included, in order; parameters are none."""
    values: list[fx.Node] = []
    for name in (*operator.operands, "residual"):
        value = arguments.get(name)
        values.extend(value if isinstance(value, list | tuple) else [] if value is None else [value])
    nodes = [value for value in values if isinstance(value, fx.Node) and not is_parameter(value)]
    return [value for value in nodes if not _is_plain(value)] if operator.moves else nodes


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the operand nodes of a canonical node; none for a node that is not a known operator."""
    operator = operator_of(node)
    return [] if operator is None else operand_nodes(operator, operator.arguments(node))


def read_nodes(operator: Operator, arguments: Mapping[str, Any]) -> list[fx.Node]:
    """Return the nodes whose bool or integer tensors an operator reads without a scale, in order, without parameters."""
    values: list[fx.Node] = []
    fx.map_arg([arguments.get(name) for name in operator.reads], values.append)
    return [*moved_plain(operator, arguments), *(value for value in values if not is_parameter(value))]


def moved_plain(operator: Operator, arguments: Mapping[str, Any]) -> list[fx.Node]:
    """Return the nodes of the booleans and integers that an operator moves, without parameters."""
    values: list[fx.Node] = []
    fx.map_arg([arguments.get(name) for name in operator.operands if operator.moves], values.append)
    return [value for value in values if not is_parameter(value) and _is_plain(value)]


def _is_plain(value: fx.Node) -> bool:
    """Return whether a node holds booleans or integers that do not belong to a quantized tensor."""
    value_fact = fact(value)
    return isinstance(value_fact, TensorFact) and value_fact.dtype in PLAIN_TYPES.values()


def map_operands(operator: Operator, arguments: Mapping[str, Any], function: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the arguments with `function(parameter, value)` in place of every activation."""
    mapped = dict(arguments)
    for name in (*operator.operands, "residual"):
        value = mapped.get(name)
        if isinstance(value, list | tuple):
            mapped[name] = [function(name, item) for item in value]
        elif isinstance(value, fx.Node | Tensor):
            mapped[name] = function(name, value)
    return mapped


class _Entry(NamedTuple):
    """An entry of the operator table: the record, the conversion of arguments to canonical ones, and the name without call form marks."""

    operator: Operator
    adapt: Any
    name: str


def is_meant(asked: Any, written: Any) -> bool:
    """Return whether a rule for one call form applies to another: `asked` as the user gives it to a rule, `written` as a node has it.

    A module's class means itself alone. A function, or the name of a method, means the function, however it is called. Several
    functions may be call forms of one operator (relu, relu6 and clamp). They match where they have the same name, or where the
    same code reads their arguments.
    """
    if asked == written:
        return True
    one, other = _entry(asked), _entry(written)
    if one is None or other is None or _is_module(asked) or one.operator is not other.operator:
        return False
    if one.name == other.name or (one.adapt is other.adapt and not _is_module(written)):
        return True
    return _is_module(written) and len(_names(one.operator)) == 1


def _is_module(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def _entry(kind: Any) -> _Entry | None:
    if _is_module(kind):
        return _Entry(*MODULES[kind], _bare(kind.__name__)) if kind in MODULES else None
    name = kind if isinstance(kind, str) else _function_name(kind)
    if not isinstance(kind, str) and kind in FUNCTIONS:
        return _Entry(*FUNCTIONS[kind], _bare(name))
    if isinstance(kind, str) or getattr(torch.Tensor, name, None) in (kind, getattr(kind, "__wrapped__", kind)):
        return _Entry(*METHODS[name], _bare(name)) if name in METHODS else None
    if isinstance(kind, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        homes = (getattr(home, name, None) for home in (torch, F))
        return next((_Entry(*FUNCTIONS[home], _bare(name)) for home in homes if home in FUNCTIONS), None)
    return None


def _function_name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    return str(getattr(function, "__name__", ""))


def _bare(name: str) -> str:
    """Return a name without case, underscores and "special_": LogSoftmax and log_softmax_ give logsoftmax."""
    return name.removeprefix("special_").replace("_", "").lower()


def _names(operator: Operator) -> frozenset[str]:
    """Return the bare names of an operator's function forms; of forms with the same `adapt` only the first name."""
    first: dict[Any, str] = {}
    for function, (owner, adapt) in FUNCTIONS.items():
        if owner is operator and function is not operator.function:
            first.setdefault(adapt, _bare(_function_name(function)))
    return frozenset(first.values())
