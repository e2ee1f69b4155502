"""Facts on the nodes of integer graphs.

qparams     the grid of the quantized tensor that a node holds
operation   the operator of the table that a node is the result of
origin      the name of the prepared node that a node was lowered from
notes       facts recorded while lowering, as the bits of an accumulator
kernel      the kernel that computes a node, and the nodes computed with it
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

T = TypeVar("T")
Reads = Callable[[fx.Node], T]


def reads(key: str, default: T) -> Reads[T]:
    """Return a function of a node that returns the fact under this key, or this value for a node without it."""
    return lambda node: node.meta.get(key, default)


def writes(key: str, kind: type[T]) -> Callable[[fx.Node, T], None]:
    """Return a function of a node and a value of this class, which becomes a fact on the node under this key."""
    return lambda node, value: node.meta.update({key: value})


def marks(key: str) -> Callable[[fx.Node], None]:
    """Return a function of a node that sets the fact under this key to True."""
    write = writes(key, bool)
    return lambda node: write(node, True)


def notes(node: fx.Node) -> dict[str, Any]:
    """Return the facts recorded while lowering: "accumulator_bits", "residual", "wide"."""
    value: dict[str, Any] = node.meta.setdefault("notes", {})
    return value


def noted(node: fx.Node, key: str) -> Any:
    """Return one of the facts in `notes`; None where it was not recorded."""
    return node.meta.get("notes", {}).get(key)


def channel_exponents(node: fx.Node) -> list[Any] | None:
    """Return the exponents e of a node of an integer graph: its tensor is the float model's times 2^e. None where it is that tensor.

    They are nested lists of its shape without the batch, where a list of one element is for a whole dimension.
    """
    exponents = noted(node, "exponents")
    return None if exponents is None else list(json.loads(exponents))


def set_channel_exponents(node: fx.Node, value: list[Any]) -> None:
    """Write the exponents that `channel_exponents` returns."""
    notes(node)["exponents"] = json.dumps(value)


@dataclass(frozen=True)
class QParams:
    """The grid of a quantized tensor in an integer graph: an integer q of this dtype stands for (q - zero_point) · scale.

    A 32-bit output may have several scales, along dimension `axis` of the tensor, counted from the end (-1 is the last).
    """

    scale: float | tuple[float, ...]
    dtype: str
    axis: int | None = None
    zero_point: int = 0


qparams: Reads[QParams | None] = reads("qparams", None)  # of the quantized tensor that a node of an integer graph holds


def zero_point(node: fx.Node) -> int:
    """Return the integer that stands for 0 in the tensor a node of an integer graph holds."""
    grid = qparams(node)
    return 0 if grid is None else grid.zero_point


@dataclass(frozen=True)
class Reference:
    """A reference, among the arguments of an `Operation`, to the node of this name."""

    node: str


@dataclass(frozen=True)
class Constant:
    """A quantized parameter: the node that holds its integers, its scale and its zero point.

    Several scales run along dimension `axis`, counted from the end. For a transposed convolution's weight they are
    those of the output channels, group after group. `zero_point` is one integer, or one for each index of
    `axis`: for a bias that includes half a step of the output. The scale () marks unscaled integers: a mask, an index.
    A term of a sum is held `times` a factor.
    """

    node: str
    scale: float | tuple[float, ...]
    axis: int | None = None
    zero_point: int | tuple[int, ...] = 0
    times: int | None = None


@dataclass(frozen=True)
class Operation:
    """The operator that was lowered to the primitives that compute a quantized tensor."""

    name: str  # the operator's name
    arguments: dict[str, Any]  # its canonical arguments, with a `Reference` for every value of the graph; parameters are absent
    constants: dict[str, Constant]  # its parameters, by role ("weight", "bias")
    # The scale and dtype of the value that a residual is added to; None if it is added in the accumulator.
    intermediate: QParams | None = None


operation: Reads[Operation | None] = reads("operation", None)  # the operator that a node of an integer graph is the result of
set_qparams, set_operation = writes("qparams", QParams), writes("operation", Operation)
kernel: Reads[tuple[str, tuple[str, ...]] | None] = reads("kernel", None)  # its name, and those of the nodes computed with it
kernel_results: Reads[tuple[str, ...]] = reads("kernel_results", ())  # the names of those of them that others read


def set_kernel(node: fx.Node, name: str, covers: tuple[str, ...], results: tuple[str, ...] = ()) -> None:
    """Note on a node the name of its kernel, the nodes that the kernel `covers`, and the covered nodes that others read (`results`)."""
    node.meta["kernel"], node.meta["kernel_results"] = (name, covers), results


def origin(node: fx.Node) -> str:
    """Return the name of the prepared node an integer node was lowered from."""
    return str(node.meta.get("origin", node.name))


def is_inner(node: fx.Node) -> bool:
    """Return whether a node of an integer graph is an inner primitive of a lowered operator, and not its result."""
    return origin(node) != node.name
