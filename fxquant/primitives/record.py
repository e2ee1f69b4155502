"""The record of an integer primitive: a function whose body defines it, its ONNX form and its range.

The decorated function is itself the `call_function` target in an integer graph, so the graph runs in
PyTorch as it is, and is its own specification. Given integer tensors, a primitive computes and returns
integers. Given the same integers as floating-point tensors, as in a prepared model that trains, it returns
the same numbers as floats. Lowering the graph proves the bounds of the operands.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from fxquant.ir.graph import BatchDim, TensorFact, largest_size
from fxquant.numerics.grids import FLOAT32_EXACT, accumulator_bound
from fxquant.primitives.steps import Op, Steps

# ---- the range of a primitive: the bounds of its result, from those of its operands and from its constants -----------
#
#     def _bounds_add(input: Value, other: Value) -> Range:
#         need(input.exact == other.exact, "its operands have different widths")
#         return within(input.magnitude + other.magnitude, input.exact)
#
# `fxquant.primitives.proof` checks a graph against them.
FLOAT64_EXACT = 2**53


class Unproved(ValueError):
    """Raised where a graph computes something that is not proved to be right for every input."""


@dataclass(frozen=True)
class Value:
    """The values that a node can hold."""

    low: Tensor  # low, high: closed bounds, float64, which broadcast against the node's tensor
    high: Tensor
    fact: TensorFact  # the shape and dtype of the tensor
    exact: int = FLOAT32_EXACT  # the magnitude below which integers are exact in the dtype in which runtimes hold it
    constant: Tensor | None = None  # the tensor itself, if the node is a constant

    @property
    def magnitude(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def largest(self) -> int:
        """The largest magnitude over all elements; 0 for an empty tensor."""
        return int(self.magnitude.max()) if self.magnitude.numel() else 0

    def size(self, dim: int) -> int:
        """Return the size of a dimension; raise Unproved if it varies."""
        size = self.fact.shape[dim]
        if isinstance(size, BatchDim):
            refuse(f"it picks from dimension {dim}, whose size varies")
        return size

    def terms(self, *dims: int) -> int:
        """Return the largest number of elements along dimensions; raise Unproved if it has no bound, as that of a batch."""
        sizes = [largest_size(self.fact.shape[dim]) for dim in dims]
        need(None not in sizes, f"it reduces dimensions {dims}, of which one depends on the batch")
        return math.prod(size for size in sizes if size is not None)


@dataclass(frozen=True)
class Range:
    """The bounds of a result, and the magnitude below which it is exact."""

    low: Any
    high: Any
    exact: int = FLOAT32_EXACT


BOOLEAN = Range(0.0, 1.0)


def refuse(because: str) -> NoReturn:
    """Raise Unproved."""
    raise Unproved(because)


def need(condition: bool | Tensor, because: str) -> None:
    """Raise Unproved if the condition does not hold."""
    if not bool(condition):
        refuse(because)


def within(bound: Any, exact: int) -> Range:
    """Return the range of an accumulator of at most this magnitude."""
    bound = as_double(bound)
    return Range(-bound, bound, exact)


def as_double(bound: Any) -> Tensor:
    """Return a number or a tensor as a float64 tensor; a number is on the CPU, whatever PyTorch's default device is."""
    return bound.double() if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")


def exact_below(wide: bool) -> int:
    """Return the magnitude below which a sum is exact, formed in float64 if `wide`, else in float32."""
    return FLOAT64_EXACT if wide else FLOAT32_EXACT


def constant_of(value: Value | None, what: str) -> Tensor:
    """Return a constant's tensor; raise Unproved if the value is not a constant."""
    if value is None or value.constant is None:
        refuse(f"its {what} is not a constant")
    return value.constant


def sum_of_products(x: Value, weight: Tensor, bias: Value | None, trailing: int, exact: int) -> Range:
    """Return the range of a sum of products with a weight, and a constant bias.

    Output channels are the weight's dimension 0; in the result `trailing` dimensions follow them.
    """
    added = None if bias is None else constant_of(bias, "bias")
    return within(accumulator_bound(weight, added, 0, x.largest).reshape(-1, *[1] * trailing), exact)


def multipliers(value: Value) -> Tensor:
    """Return the multipliers of the *real* arithmetic as float64; raise Unproved if any is infinite, NaN or negative."""
    factors = constant_of(value, "multiplier")
    need(factors.dtype == torch.float32 and torch.isfinite(factors).all() and (factors >= 0).all(), "its multiplier is out of range")
    return factors.double()


def union(*values: Value) -> Range:
    """Return the range (lowest, highest) of a result whose elements all come from its operands."""
    return Range(torch.stack([value.low.min() for value in values]).min(), torch.stack([value.high.max() for value in values]).max())


def stored_limits(low: int, high: int, zero_point: int) -> Range:
    """Return the range of stored integers, given the limits of the centred ones."""
    need(type(zero_point) is int, f"its zero point is {zero_point!r}")
    return Range(float(low + zero_point), float(high + zero_point))


class Emitter(Protocol):
    """The ONNX writer that a primitive's `onnx` function receives. Values are names (str); constants are torch tensors."""

    opset: int  # the version of the standard operators
    portable: bool  # whether several runtimes read the file, of which some compute float64 in float32; else onnxruntime alone
    wide: torch.dtype  # of products and sums beyond 24 bits: float64, or int32 where their readers cast to float32, or add

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append one standard operator with one output, and return the name of the output."""

    def results(self, operator: str, dtypes: Sequence[torch.dtype], *inputs: str, **attributes: Any) -> list[str]:
        """Append one standard operator with several outputs, of these dtypes, and return their names."""

    def constant(self, value: Tensor | float | int | list[int], dtype: torch.dtype | None = None) -> str:
        """Return the name of an initializer with this value; equal values share one."""

    def table(self, value: Tensor) -> str:
        """Return the name of a table (entries,), which nodes before all others compute from lines where that takes fewer bytes."""

    def own_constant(self, value: Tensor) -> str:
        """Return the name of an initializer with this value that no other node shares."""

    def call(self, name: str, body: Callable[..., str], *inputs: str) -> str:
        """Append the nodes of `body(emitter, *inputs)`, or one call of a model-local function of it; equal bodies are one function."""

    def dtype(self, value: str) -> torch.dtype:
        """Return the element type of a value in the ONNX graph."""


class Role(Enum):
    """An enum of what a primitive computes (convolution, sum, elementwise, movement, …), for code that fuses or emits it."""

    CONVOLUTION = "Sums of products over windows, with a bias: (input, weight, bias, stride, padding, dilation, groups, …)."
    TRANSPOSED = "Sums of products spread over windows, with a bias: (input, weight, bias, stride, padding, output padding, …)."
    LINEAR = "Sums of products over the last dimension, with a bias: (input, weight, bias, …)."
    SUM = "Sums over windows or over dimensions: (input, windows or dimensions, …)."
    MATRIX_PRODUCT = "Sums of products of two activations: (input, other, …)."
    CHANNEL_SCALING = "A factor and a bias for each channel: (input, weight, bias, trailing)."
    RESIDUAL = "An accumulator and an activation times a factor: (accumulator, residual, multiplier, …)."
    ALIGNMENT = "Elementwise: an operand brought to a common scale."
    ADDITION = "Elementwise: a sum with signs: f(2x, 2y) = 2 f(x, y)."
    MULTIPLICATION = "Elementwise: a product of two activations."
    REQUANTIZATION = "Elementwise: an accumulator rounded into a grid: (accumulator, constants, …)."
    POINTWISE = "Elementwise: any other function of one tensor or two, by constants that all elements share."
    MOVEMENT = "Returns elements of activations, in any order, and no others; its ONNX form takes floats as well."
    LOOP = "Stands between the steps of a loop: (input, frame, …)."
    LEAVING = "Returns what the steps of a loop carried: (input of the first step, frame, position, …)."


POINTWISE = frozenset({Role.ALIGNMENT, Role.ADDITION, Role.MULTIPLICATION, Role.REQUANTIZATION, Role.POINTWISE})


class ZeroPoint(Enum):
    """The behaviour of a primitive f on stored integers q + z in place of centred ones q, with the zero point z."""

    CENTRED = "It reads centred integers only."
    EQUIVARIANT = "f(q + z) = f(q) + z."
    INVARIANT = "f(q + z) = f(q)."


@dataclass(frozen=True)
class Primitive:
    """A primitive's record.

    name       the name of the function
    function   the function that defines it
    onnx       emits the ONNX form, which computes the same numbers; receives the emitter and the call's arguments, values as names
    bounds     the range of the result, from the `Value` of each operand and constant: bounds(**arguments). Raises Unproved where the
               result is not proved right for every input. None for a "float" result alone; for a "dynamic" one, the range of its sum
    surrogate  a differentiable float function of the same arguments whose gradient training uses; None where
               the body itself is differentiable
    kind       "quantized" if the result is a tensor of the quantized model, "accumulator" if it is an intermediate between
               two of them, "plain" if it is a bool or integer tensor without a scale, "float" if it is a dequantized tensor,
               "dynamic" if it is a float tensor that was computed from float operands by integer arithmetic
    chip_bits  the largest width of an operand for which the vendor's compiler for bernoulli2, bayes and bayes-e computes the
               result; it brings wider operands to 8 bits first, or gives unrelated values
    role       its role in fusions of several primitives; None if it is always computed alone
    wide       whether it is the form of its role that sums in float64
    view       whether PyTorch's result shares the operand's memory, element for element
    casts      whether its ONNX form begins with a cast of its quantized operands to float32, so that a writer may give it floats
    zero_point how the result depends on a zero point that its operands are stored with
    layout     "windows" if it slides windows over the dimensions after dimension 1, the channels; "same" if its result has the dimensions
               of its operands; "" for any other, or if its role determines the layout
    steps      writes it as elementwise steps (see `primitives.steps`), or returns None for arguments without such a form; None if it is
               not elementwise
    reduces    returns the operation by which it reduces each row, from the operand's sizes and the further arguments, or None where it
               reduces other dimensions; None for a primitive that reduces nothing
    counts     the primitive that it computes with constants out of tables, by a number of elements that varies; None for any other
    fixed      the calls that compute it for fixed sizes, each a primitive and its arguments after the operand: fixed(lengths, *arguments);
               None for one that reads no sizes
    shifted    the parameters that are integers on the operands' scale, such as bounds: the zero point is added to these as well
    """

    name: str
    function: Callable[..., Tensor]
    onnx: Callable[..., str]
    bounds: Callable[..., Range] | None
    surrogate: Callable[..., Tensor] | None = None
    kind: str = "quantized"
    chip_bits: int = 16
    role: Role | None = None
    wide: bool = False
    view: bool = False
    casts: bool = False
    zero_point: ZeroPoint = ZeroPoint.CENTRED
    shifted: tuple[str, ...] = ()
    layout: str = ""
    steps: Steps | None = None
    reduces: Callable[..., Op | None] | None = None
    counts: Callable[..., Tensor] | None = None
    fixed: Callable[..., list[tuple[Any, ...]]] | None = None

    @cached_property
    def signature(self) -> inspect.Signature:
        """The parameters of the function."""
        return inspect.signature(self.function)

    def stored_arguments(self, arguments: tuple[Any, ...], zero: int) -> tuple[Any, ...]:
        """Return the arguments for operands stored with the zero point `zero`, given the arguments for centred operands."""
        if not self.shifted:
            return arguments
        bound = self.signature.bind(*arguments)
        bound.apply_defaults()
        for name in self.shifted:
            bound.arguments[name] += zero
        return bound.args


PRIMITIVES: dict[Callable[..., Any], Primitive] = {}  # by function
BY_NAME: dict[str, Primitive] = {}


def role_of(target: Any) -> Role | None:
    """Return the role of a primitive; None for a primitive without one, and for anything else."""
    record = PRIMITIVES.get(target)
    return None if record is None else record.role


Function = TypeVar("Function", bound=Callable[..., Tensor])


def primitive(onnx: Callable[..., str], *, bounds: Callable[..., Range] | None, **facts: Any) -> Callable[[Function], Function]:
    """Return a decorator that declares a function an integer primitive; `facts` are the other fields of its record."""

    def declare(function: Function) -> Function:
        record = Primitive(function.__name__, function, onnx, bounds, **facts)
        PRIMITIVES[function] = BY_NAME[record.name] = record
        return function

    return declare


def stored(value: Tensor, operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` as the result of a primitive: float32 where the operand is floating-point, else in the storage dtype."""
    return value.to(torch.float32 if operand.is_floating_point() else dtype)


def full_precision(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which float32 kernels are exact on integers below 2^24.

    Autocast, bfloat16 and TF32 products, and Winograd and FFT convolutions are disabled inside. Process-wide settings that allow
    these are changed while any thread is inside, and restored afterwards. Gradients are computed outside, with the precision that the
    user has set, like those of the float model.
    """
    if torch.compiler.is_compiling():
        return _NOTHING
    device = tensor.device.type
    switches = SWITCHES.get(device)
    if device == "meta" or (not torch.is_autocast_enabled(device) and (switches is None or switches.right)):
        return _NOTHING
    return _full_precision(device, switches)


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _full_precision(device: str, switches: "Switches | None") -> Iterator[None]:
    with torch.autocast(device, enabled=False), _NOTHING if switches is None else switches:
        yield


class Switch(NamedTuple):
    """A setting of the process: how it is read and set, the values that leave float32 kernels exact, and the one to set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    exact: tuple[Any, ...]
    value: Any


class Switches(AbstractContextManager[None]):
    """A context that sets all precision settings of one kind of device (TF32, …) to exact float32 while any thread is inside.

    `deciding` are read to decide whether a change is needed. `switches` are set, parents first: a setting that is not set itself
    reads as its parent's value.
    """

    def __init__(self, deciding: Sequence[Switch], switches: Sequence[Switch]) -> None:
        self.deciding, self.switches = deciding, switches
        self.lock = Lock()
        self.inside = 0
        self.before: dict[Switch, Any] = {}  # the values of the switches that were changed

    @property
    def right(self) -> bool:
        """Whether kernels are exact by the switches as the user set them: no thread is inside this context, which sets them."""
        with self.lock:
            return not self.inside and all(switch.get() in switch.exact for switch in self.deciding)

    def __enter__(self) -> None:
        with self.lock:
            for switch in self.switches:
                value = switch.get()
                if value not in switch.exact:
                    self.before[switch] = value
                    switch.set(switch.value)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            for switch, value in self.before.items():
                if switch.get() == switch.value:  # unless someone has set it meanwhile
                    switch.set(value)
            self.before.clear()


def _precision(backend: str, operators: str) -> Switch:
    """Return the switch of the precision to which float32 products of a backend may be rounded."""
    get = partial(torch._C._get_fp32_precision_getter, backend, operators)
    return Switch(get, partial(torch._C._set_fp32_precision_setter, backend, operators), ("none", "ieee"), "ieee")


def _switches() -> dict[str, Switches]:
    """Return the switches of each kind of device."""
    # cuDNN may choose Winograd or FFT algorithms, which are not exact on integers.
    cudnn = Switch(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, (False,), False)
    if not hasattr(torch._C, "_get_fp32_precision_getter"):  # before PyTorch 2.9
        products = Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest",), "highest")
        return {"cpu": Switches([products], [products]), "cuda": Switches([cudnn, products], [cudnn, products])}
    switches = {}
    for device, backend, others in (("cpu", "mkldnn", []), ("cuda", "cuda", [cudnn])):
        deciding = [*others, _precision(backend, "matmul"), _precision(backend, "conv")]
        switches[device] = Switches(deciding, [_precision("generic", "all"), _precision(backend, "all"), *deciding])
    return switches


SWITCHES = _switches()
