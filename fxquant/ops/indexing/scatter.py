"""Elements written, or added, at places that integers give: scatter, scatter_add, index_add.

    x.scatter_add(1, index, source)   →   x + Σ of the source at each place, an accumulator of at most as many terms as the source is long

Where the places are a constant, the sum is a product with a matrix of zeros and ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, inherit, is_parameter, set_fact
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.numerics.rescaling import Ratio
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.constants import Branch, on_the_output, real
from fxquant.ops.core.creation import made_number
from fxquant.ops.core.declare import composite, lowered
from fxquant.ops.core.demands import INNER
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import Instead
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.indexing.ranking import refuses_index
from fxquant.ops.pooling.pool import too_many
from fxquant.primitives import PRIMITIVES, accumulate, selection, shape
from fxquant.primitives import scatter as primitives

SUMMING_OPSET = 16  # the first whose ScatterElements adds
LARGEST = torch.finfo(torch.float32).max

# ---- in the place of others ---------------------------------------------------------------------------------------------


def _refuses_scatter(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    value = arguments["src"]
    if isinstance(value, fx.Node) and not isinstance(fact(value), TensorFact):
        return "it scatters a number that is computed"
    if not isinstance(value, fx.Node) and (not isinstance(value, int | float) or not math.isfinite(value)):
        return f"it scatters {value!r}"
    return refuses_index(node, arguments)


def as_large_as_index(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Crop a source that is larger than the index to its first elements."""
    known, index = (fact(value) if isinstance(value, fx.Node) else None for value in (arguments["src"], arguments["index"]))
    if not isinstance(known, TensorFact) or not isinstance(index, TensorFact) or known.shape == index.shape:
        return arguments
    if len(known.shape) != len(index.shape):
        return "its source and its index differ in their number of dimensions"
    if not known.shape:  # a number, as a tensor
        return arguments
    entries = [WHOLE if own == size else slice(0, size) for own, size in zip(known.shape, index.shape, strict=True)]
    if not all(entry == WHOLE or isinstance(entry.stop, int) for entry in entries):
        return "it scatters to a part of the batch"
    with node.graph.inserting_before(node):
        cut = inherit(node.graph.call_function(getitem, (arguments["src"], entries)), node, "canonical.rewrite")
    set_fact(cut, TensorFact(index.shape, known.dtype))
    return {**arguments, "src": cut}


def _scattered(
    input: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> dict[str, Any] | str | Instead:
    if reduce == "add" and isinstance(src, fx.Node):
        return Instead(scatter_add, scatter_added(input, dim, index, src))
    if reduce is not None:
        return f"it reduces by {reduce!r}"
    return {"input": input, "dim": dim, "index": index, "src": value if src is None else src}


def _onnx_scatter(c: Call) -> str:
    """Both on the result's scale; a number as often as there are places."""
    places, source = places_of(c), c.rounded(c.operand("src"))
    if isinstance(c.arguments.get("src"), int | float):
        source = c.do("Expand", source, c.do("Shape", places))
    return c.do("ScatterElements", c.rounded(c.operand("input")), places, source, axis=c["dim"])


@lowered(
    function=lambda input, dim, index, src: torch.scatter(input, dim, index, src),
    operands=("input", "src"),
    adapt=_scattered,
    carries=("input", "src"),
    reads=("index",),
    onnx=_onnx_scatter,
    refuses=_refuses_scatter,
    normalize=as_large_as_index,
)
def scatter(lowering: Lowering, input: Branch, dim: int, index: Any, src: Branch) -> Quantized:
    """Return the tensor with other elements, or one number, at these places along a dimension."""
    places = lowering.given("index", index, torch.int64)
    number = (True,) if not isinstance(src, Quantized) and (not isinstance(src, Tensor) or src.dim() == 0) else ()

    def exact() -> Any:
        values = on_the_output(lowering, input, "input"), on_the_output(lowering, src, "src")
        return lowering.call(selection.put_along, *values, dim, places, *number)

    return lowering.result(exact, lambda: torch.scatter(real(input), dim, index, real(src)))


# ---- sums --------------------------------------------------------------------------------------------------------------


def _sum_at(src: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    zeros = src.new_zeros([*src.shape[:dim], size, *src.shape[dim + 1 :]])
    return zeros.scatter_add(dim, index, src)


def _refuses_sum_at(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    terms = fact(arguments["src"]).shape[arguments["dim"]]
    return too_many([terms], 2**31) if isinstance(terms, int) else "it adds up the batch, whose size is not fixed"


def places_of(c: Call) -> str:
    """Return the index of a call, which may be a constant."""
    index = c.arguments.get("index")
    return index if isinstance(index, str) else c.e.constant(c.real("index"))


def _onnx_sum_at(c: Call) -> str:
    if c.e.opset < SUMMING_OPSET:
        return c.exported()
    return PRIMITIVES[primitives.sum_along].onnx(c.e, c.operand("src"), c["dim"], places_of(c), c["size"], False)


@lowered(function=_sum_at, reads=("index",), refuses=_refuses_sum_at, onnx=_onnx_sum_at)
def sum_at(lowering: Lowering, src: Quantized, dim: int, index: Any, size: int) -> Quantized:
    """Compute Σ of the elements of `src` that have each place, 0 to size - 1, along a dimension; `index` has the shape of `src`."""
    terms = src.shape[dim]
    assert isinstance(terms, int)
    largest = lowering.prove(torch.tensor(float(terms * src.grid.magnitude), dtype=torch.float64, device="cpu"), "the sum")
    places = lowering.given("index", index, torch.int64)
    total = lowering.call(primitives.sum_along, src.value, dim, places, size, largest >= FLOAT32_EXACT)
    return lowering.requantize(total, Ratio((src.scale,)))


def _index_sum(src: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    zeros = src.new_zeros([*src.shape[:dim], size, *src.shape[dim + 1 :]])
    return zeros.index_add(dim, index, src)


def _onnx_index_sum(c: Call) -> str:
    """Avoid a Transpose where there is another form: onnxruntime cannot move QuantizeLinear of opset 21 after one by itself."""
    order = [d for d in range(len(fact(c.node).shape)) if d != c["dim"]] + [c["dim"]]
    matrix = c.real("places")
    if c.e.opset >= SUMMING_OPSET:
        places = c.e.constant(matrix.argmax(0).reshape([-1 if d == c["dim"] else 1 for d in range(len(order))]))
        index = c.do("Expand", places, c.do("Shape", c.operand("src")))
        return PRIMITIVES[primitives.sum_along].onnx(c.e, c.operand("src"), c["dim"], index, c["size"], False)
    total = c.do("MatMul", c.do("Transpose", c.operand("src"), perm=order), c.e.constant(matrix.float().t().contiguous()))
    return c.do("Transpose", total, perm=[order.index(d) for d in range(len(order))])


@lowered(function=_index_sum, onnx=_onnx_index_sum)
def index_sum(lowering: Lowering, src: Quantized, dim: int, index: Tensor, size: int) -> Quantized:
    """Compute Σ of the slices of `src` that have each place, 0 to size - 1, along a dimension; `index` is a constant row of places.

    Return the product with a matrix of zeros and ones, along the last dimension.
    """
    rank = len(src.shape)
    matrix = torch.nn.functional.one_hot(index.flatten() % size, size).t().to(torch.float32)
    terms = float(matrix.sum(1).max())
    largest = lowering.prove(torch.tensor(terms * src.grid.magnitude, dtype=torch.float64, device="cpu"), "the sum")
    order = [d for d in range(rank) if d != dim] + [dim]
    value = lowering.call(shape.permute, src.value, order)
    lowering.describe("places", torch.empty(0, device="cpu", dtype=torch.float32))
    summing = accumulate.linear if largest < FLOAT32_EXACT else accumulate.linear_wide
    total = lowering.call(summing, value, lowering.constant("places", matrix, torch.int8), None)
    result = lowering.requantize(total, Ratio((src.scale,)))
    return result.with_value(lowering.call(shape.permute, result.value, [order.index(d) for d in range(rank)]))


def size_along(build: Builder, input: fx.Node, dim: int) -> int:
    """Return how many places there are along a dimension, which is not the batch."""
    size = build.fact(input).shape[dim]
    assert isinstance(size, int)
    return size


def refuses_scatter_add(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why what is added at places has no integer form."""
    because = refuses_index(node, arguments)
    if because is not None:
        return because
    src, dim = arguments["src"], arguments["dim"]
    known, wanted = fact(src) if isinstance(src, fx.Node) else None, list(fact(arguments["input"]).shape)
    if not isinstance(known, TensorFact) or is_parameter(src):
        return "its source is not an activation"
    if not isinstance(known.shape[dim], int):
        return "it adds up the batch, whose size is not fixed"
    wanted[dim] = known.shape[dim]
    return None if list(known.shape) == wanted else "its source and its input differ in a size that is not indexed"


def _refuses_index_add(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if not isinstance(arguments["index"], fx.Node) or not is_parameter(arguments["index"]):
        return "its index is computed"
    if not isinstance(fact(arguments["input"]).shape[arguments["dim"]], int):
        return "it adds to a part of the batch"
    source = arguments["source"]
    if not isinstance(source, fx.Node) or not isinstance(arguments["alpha"], int | float):
        return "its source is not an activation"
    return None


def _with_dim(dim: int, input: Any) -> int:
    return dim % max(len(fact(input).shape), 1)


def scatter_added(input: Any, dim: int, index: Any, src: Any) -> dict[str, Any]:
    """Return the arguments of what adds at places, by name."""
    return {"input": input, "dim": _with_dim(dim, input), "index": index, "src": src}


def _index_added(input: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> dict[str, Any]:
    return {"input": input, "dim": _with_dim(dim, input), "index": index, "source": source, "alpha": alpha}


@composite(operands=("input", "src"), adapt=scatter_added, reads=("index",), refuses=refuses_scatter_add, normalize=as_large_as_index)
def scatter_add(build: Builder, input: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> Any:
    """Return the tensor with the elements of `src` added at their places along a dimension."""
    alone = made_number(input) == 0
    total = build(sum_at, src, dim, index, size_along(build, input, dim), demand=None if alone else INNER)
    return total if alone else build(add, input, total)


@composite(operands=("input", "source"), adapt=_index_added, refuses=_refuses_index_add)
def index_add(build: Builder, input: fx.Node, dim: int, index: fx.Node, source: fx.Node, alpha: float = 1) -> Any:
    """Return the tensor with alpha times the slices of `source` added at their places along a dimension."""
    alone = made_number(input) == 0
    if is_parameter(source):
        return build(add, input, build.host(index_sum, source, dim, index, size_along(build, input, dim)), float(alpha))
    if alpha != 1:
        source = build(mul, source, alpha, demand=INNER)
    total = build(index_sum, source, dim, index, size_along(build, input, dim), demand=None if alone else INNER)
    return total if alone else build(add, input, total)
