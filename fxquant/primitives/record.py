"""What an integer primitive is: a function whose body is its meaning, with its ONNX form and its range beside it.

The decorated function is itself the `call_function` target in an integer graph, so the graph runs in
PyTorch as it stands and is its own specification. Given integer tensors a primitive computes and returns
integers; given the same integers as floating-point tensors (the prepared model, which trains) it returns
the same numbers as floats. The operands are bounded by proofs made when the graph was lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fxquant.forks import free_in_child
from fxquant.primitives.bounds import Range


class Emitter(Protocol):
    """What an ONNX form needs of the exporter. Values are names; constants are tensors.

    opset   the version of the standard operators
    """

    opset: int

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append one standard operator with one output; returns the name of the output."""

    def results(self, operator: str, dtypes: Sequence[torch.dtype], *inputs: str, **attributes: Any) -> list[str]:
        """Append one standard operator with several outputs, of these dtypes; returns their names."""

    def constant(self, value: Tensor | float | int | list[int], dtype: torch.dtype | None = None) -> str:
        """The name of an initializer with this value, shared between equal values."""

    def call(self, name: str, body: Callable[..., str], *inputs: str) -> str:
        """Append one call of the model-local function that `body(emitter, *inputs)` defines; equal bodies of one name are one function."""

    def dtype(self, value: str) -> torch.dtype:
        """The element type of a value in the ONNX graph."""


@dataclass(frozen=True)
class Primitive:
    """A primitive's record.

    bounds     the range of the result, from the `Value` of each operand and constant: bounds(**arguments); raises Unproved where the
               arguments do not make it right for every input. None of a "float" result alone; of a "dynamic" one, the range of its sum
    onnx       emits the same numbers; receives the emitter and the arguments of the call, values as names
    surrogate  a differentiable float function of the same arguments whose gradient training uses; None where
               the body itself is differentiable
    kind       "quantized" if the result is a tensor of the quantized model, "accumulator" if it lives between
               two of them, "plain" if it is truth values or whole numbers that have no scale, "float" if it is the real number again,
                "dynamic" if it is a real number that was computed, by way of integers, from real ones
    chip_bits  the most bits of an operand of which the programs of the vendor's compiler for bernoulli2, bayes and bayes-e compute it
               within a step of its own 8 bits; with more they give other values altogether
    """

    name: str
    function: Callable[..., Tensor]
    onnx: Callable[..., str]
    bounds: Callable[..., Range] | None
    surrogate: Callable[..., Tensor] | None
    kind: str
    chip_bits: int = 16


PRIMITIVES: dict[Callable[..., Any], Primitive] = {}

Function = TypeVar("Function", bound=Callable[..., Tensor])


def primitive(
    onnx: Callable[..., str],
    *,
    bounds: Callable[..., Range] | None,
    surrogate: Callable[..., Tensor] | None = None,
    kind: str = "quantized",
    chip_bits: int = 16,
) -> Callable[[Function], Function]:
    """Declare the decorated function an integer primitive."""

    def declare(function: Function) -> Function:
        PRIMITIVES[function] = Primitive(function.__name__, function, onnx, bounds, surrogate, kind, chip_bits)
        return function

    return declare


def stored(value: Tensor, operand: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as the result of a primitive: float32 where the operand was floating, else the storage dtype."""
    return value.to(torch.float32 if operand.is_floating_point() else dtype)


# ---- float kernels that are exact -----------------------------------------------------------------------------------


def full_precision(tensor: Tensor) -> AbstractContextManager[None]:
    """Float kernels inside are exact on integers below 2^24: no autocast, no bfloat16 or TF32 within, no transformed convolutions.

    Settings of the whole process that say otherwise are right as long as any thread is inside, and then what they were. Gradients
    are computed outside, with the precision that the user has set, as those of the float model are.
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
def _full_precision(device: str, switches: Switches | None) -> Iterator[None]:
    with torch.autocast(device, enabled=False), _NOTHING if switches is None else switches:
        yield


class Switch(NamedTuple):
    """A setting of the process: how it is read and set, the values that leave float32 kernels exact, and the one to set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    exact: tuple[Any, ...]
    value: Any


class Switches(AbstractContextManager[None]):
    """What lets the float32 kernels of one kind of device round more coarsely; none of it does as long as any thread is inside.

    `deciding` are read to see whether anything is to be done. `switches` are set, those that others inherit from first: what is
    read of a setting is what it inherits where it has no value of its own.
    """

    def __init__(self, deciding: Sequence[Switch], switches: Sequence[Switch]) -> None:
        self.deciding, self.switches = deciding, switches
        self.lock = Lock()
        free_in_child(self, "lock", Lock)
        self.inside = 0
        self.before: dict[Switch, Any] = {}  # the values of the switches that were changed

    @property
    def right(self) -> bool:
        """Whether kernels are exact as it is, by no one's making who may leave soon."""
        with self.lock:
            return not self.inside and all(switch.get() in switch.exact for switch in self.deciding)

    def __enter__(self) -> None:
        with self.lock:
            for switch in self.switches:
                found = switch.get()
                if found not in switch.exact:
                    self.before[switch] = found
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
    """What float32 products of a backend may be rounded to."""
    get = partial(torch._C._get_fp32_precision_getter, backend, operators)
    return Switch(get, partial(torch._C._set_fp32_precision_setter, backend, operators), ("none", "ieee"), "ieee")


def _switches() -> dict[str, Switches]:
    """By kind of device."""
    # cuDNN may choose Winograd or FFT algorithms, which are not exact on integers.
    cudnn = Switch(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, (False,), False)
    if not hasattr(torch._C, "_get_fp32_precision_getter"):  # before PyTorch 2.9
        products = Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest",), "highest")
        return {"cpu": Switches([products], [products]), "cuda": Switches([cudnn, products], [cudnn, products])}
    found = {}
    for device, backend, others in (("cpu", "mkldnn", []), ("cuda", "cuda", [cudnn])):
        deciding = [*others, _precision(backend, "matmul"), _precision(backend, "conv")]
        found[device] = Switches(deciding, [_precision("generic", "all"), _precision(backend, "all"), *deciding])
    return found


SWITCHES = _switches()
