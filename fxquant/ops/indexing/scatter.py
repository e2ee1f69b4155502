"""Places of elements: argmax and argmin, sort, argsort and top-k, gathering by indices; and elements written, or added, at such places.

Indices are integers without a scale (`Plain`). Of equal elements the first counts.

    x.scatter_add(1, index, source)   →   x + Σ of the source at each place, an accumulator of at most as many terms as the source is long

Where the places are a constant, the sum is a product with a matrix of zeros and ones.
"""

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, fact, inherit, is_parameter, set_fact, shape_of
from fxquant.ops.core import FLOAT32_EXACT, Builder, Call, Lowering, Quantized, Ratio, are_fixed, composite, known_size, lowered
from fxquant.ops.core.casting import made_number
from fxquant.ops.core.declare import Branch, Guard, first_reason, function_and_method, has_dimensions, is_finite, meets, on_the_output, real
from fxquant.ops.core.record import INNER, Instead, Plain, Same, Trait, register
from fxquant.ops.core.samples import EXACT, NORMED, sampled, written
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.comparison import amax, amin, largest_along, smallest_along
from fxquant.ops.elementwise.whole import alike
from fxquant.ops.indexing.index import WHOLE, getitem, places_of, refuses_index, refuses_index_along
from fxquant.ops.movement.shape import rank_of
from fxquant.ops.pooling.pool import too_many
from fxquant.ops.reduction.progression import along, length_of, sums_along
from fxquant.primitives import PRIMITIVES, selection

PLACES = Plain("int64")


def fixed_dimension(verb: str, whole: bool = False) -> tuple[Guard, ...]:
    """Refuse a dimension whose size is not fixed, or depends on the data; `whole`: without one, all dimensions are meant."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        sizes, dim = shape_of(arguments["input"]), arguments["dim"]
        chosen = [sizes[dim]] if dim is not None else sizes if whole else [None]
        return None if are_fixed(chosen) else f"it {verb} the batch, whose size is not fixed"

    def refuses_size(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        computed = any(isinstance(value, fx.Node) for name, value in arguments.items() if name != "input")
        return "its size is computed" if computed else None

    return has_dimensions(), refuses, refuses_size


_LOOKS, _RANKS = fixed_dimension("looks through"), fixed_dimension("ranks")


@lowered(demand=PLACES, refuses=_LOOKS, integers=alike("argmax"))
@sampled("argmax(x, 1, True)", "argmax(x.flatten(1), 1)")
def argmax(lowering: Lowering, input: Quantized, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the place of the largest element along a dimension."""
    return lowering.call(selection.arg_extremum, input.value, dim, keepdim, True)


@lowered(demand=PLACES, refuses=_LOOKS)
@sampled("argmin(x, dim=-1)")
def argmin(lowering: Lowering, input: Quantized, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the place of the smallest element along a dimension."""
    return lowering.call(selection.arg_extremum, input.value, dim, keepdim, False)


@lowered(
    function=lambda input, dim, count, largest: torch.argsort(input, dim=dim, descending=largest, stable=True).narrow(dim, 0, count),
    moves=True,
    refuses=_RANKS,
    onnx=lambda c: c.do("TopK", c.input, c.integers([c["count"]]), axis=c["dim"], largest=int(c["largest"]), sorted=1),
    demand=PLACES,
)
@sampled("x.topk(2, 2, largest=False)[1]", share=0.1)
def ranked(lowering: Lowering, input: Quantized, dim: int, count: int, largest: bool) -> Any:
    """Return the places of the `count` largest, or smallest, elements along a dimension, in their order."""
    return lowering.call(selection.ranking, input.value, dim, count, largest)


def _taken(input: Any, indices: Any, dim: int | None = None) -> dict[str, Any] | str:
    if dim is None:
        return "it indexes the flattened tensor"
    mine, other = list(shape_of(input)), list(shape_of(indices))
    del mine[dim], other[dim]
    return {"input": input, "dim": dim, "index": indices} if mine == other else "its operand or its indices are broadcast"


@lowered(
    adapt=lambda input, dim, index, *, sparse_grad=False: {"input": input, "dim": dim, "index": index},
    calls=function_and_method(_taken, "take_along_dim"),
    moves=True,
    reads=("index",),
    refuses=refuses_index_along,
    demand=Same(),
)
@sampled("gather(x, 2, y.argmax(2, True))", "gather(x, 3, y.argsort(3))", "take_along_dim(x, y.argmax(1, True), 1)")
def gather(lowering: Lowering, input: Quantized, dim: int, index: Any) -> Quantized:
    """Return the elements at these places along a dimension."""
    places = lowering.given("index", index, torch.int64)
    return input.with_value(lowering.call(selection.take_along, input.value, dim % len(input.shape), places))


def _extreme(name: str, function: Any, extremum: Any, place: Any) -> None:
    def expand(build: Builder, input: fx.Node, dim: int, keepdim: bool) -> Any:
        return build(extremum, input, [dim], keepdim), build(place, input, dim, keepdim)

    samples = written(f"{name[:3]}(x, 1)[0]", f"{name[:3]}(x, -1, keepdim=True)[1]", within=EXACT)
    register(name, function, ("input",), expand=expand, refuses=first_reason(*_LOOKS), samples=samples)


_extreme("max_along", largest_along, amax, argmax)
_extreme("min_along", smallest_along, amin, argmin)


@sampled("kthvalue(x, 2, 1, True)[0]", within=EXACT)
def _expand_kthvalue(build: Builder, input: fx.Node, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the k-th smallest element along a dimension, and where it is."""
    places = along(build, build(ranked, input, dim, k, False), dim, slice(k - 1, k))
    values = build(gather, input, dim, places)
    return (values, places) if keepdim else (along(build, values, dim, 0), along(build, places, dim, 0))


def _with_places(build: Builder, input: fx.Node, dim: int, count: int, largest: bool) -> Any:
    places = build(ranked, input, dim, count, largest)
    return build(gather, input, dim, places), places


def _sorted(input: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = False) -> dict[str, Any]:
    return {"input": input, "dim": dim, "descending": descending, "stable": bool(stable)}


@composite(moves=True, refuses=_RANKS)
@sampled("topk(x, 2, 1)[0]", within=EXACT)
def topk(build: Builder, input: fx.Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest, or smallest, elements along a dimension, and where they are."""
    return _with_places(build, input, dim, k, largest)


@composite(adapt=_sorted, moves=True, refuses=_RANKS)
@sampled("sort(x, descending=True)[0]", "sort(x, 2)[1]", within=EXACT)
def sort(build: Builder, input: fx.Node, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return the elements along a dimension in order, and where they were."""
    return _with_places(build, input, dim, length_of(input, dim), descending)


kthvalue = composite(name="kthvalue", moves=True, refuses=_RANKS)(_expand_kthvalue)


@composite(
    "nanmedian",
    function=lambda input, dim=None, keepdim=False: torch.median(input) if dim is None else torch.median(input, dim, keepdim),
    moves=True,
    refuses=_RANKS,
)
@sampled("median(x, 2)[0]", "nanmedian(x, 1)[0]", within=EXACT)
def median(build: Builder, input: fx.Node, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the lower median along a dimension, and its index."""
    return _expand_kthvalue(build, input, (length_of(input, dim) + 1) // 2, dim, keepdim)


@composite(adapt=_sorted, moves=True, demand=PLACES, refuses=_RANKS)
@sampled("argsort(x, 1)", "argsort(x, descending=True)")
def argsort(build: Builder, input: fx.Node, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return the indices that sort the elements along a dimension."""
    return build(ranked, input, dim, length_of(input, dim), descending)


# ---- Elements that are brought to places -----------------------------------------------------------------------------
SUMMING_OPSET = 16  # the first whose ScatterElements adds
FLOAT32_MAX = torch.finfo(torch.float32).max


def as_large_as_index(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Crop a source that is larger than the index to its first elements."""
    source, index = (fact(value) if isinstance(value, fx.Node) else None for value in (arguments["src"], arguments["index"]))
    if not isinstance(source, TensorFact) or not isinstance(index, TensorFact) or source.shape == index.shape:
        return arguments
    if len(source.shape) != len(index.shape):
        return "its source and its index differ in their number of dimensions"
    if not source.shape:  # a number, as a tensor
        return arguments
    entries = [WHOLE if own == size else slice(0, size) for own, size in zip(source.shape, index.shape, strict=True)]
    if not all(entry == WHOLE or isinstance(entry.stop, int) for entry in entries):
        return "it scatters to a part of the batch"
    with node.graph.inserting_before(node):
        cut = inherit(node.graph.call_function(getitem, (arguments["src"], entries)), node, "canonical.rewrite")
    set_fact(cut, TensorFact(index.shape, source.dtype))
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
    traits=frozenset({Trait.COLLECTS}),
    reads=("index",),
    onnx=_onnx_scatter,
    refuses=(meets("src", lambda src: isinstance(src, fx.Node) or is_finite(src), lambda src: f"it scatters {src!r}"), refuses_index),
    normalize=as_large_as_index,
)
@sampled("scatter(x, 1, y.argmax(1, True), y[:, :1])", "x.scatter(3, y.argsort(3), y)", "x.scatter(1, y.argmax(1, True), y)")
def scatter(lowering: Lowering, input: Branch, dim: int, index: Any, src: Branch) -> Quantized:
    """Return the tensor with other elements, or one number, at these places along a dimension."""
    places = lowering.given("index", index, torch.int64)
    number = (True,) if not isinstance(src, Quantized) and (not isinstance(src, Tensor) or src.dim() == 0) else ()

    def exact() -> Any:
        values = on_the_output(lowering, input, "input"), on_the_output(lowering, src, "src")
        return lowering.call(selection.put_along, *values, dim, places, *number)

    return lowering.result(exact, lambda: torch.scatter(real(input), dim, index, real(src)))


def _zeros(src: Tensor, dim: int, size: int) -> Tensor:
    return src.new_zeros([*src.shape[:dim], size, *src.shape[dim + 1 :]])


def _refuses_sum_at(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    terms = fact(arguments["src"]).shape[arguments["dim"]]
    return too_many([terms], 2**31) if isinstance(terms, int) else "it adds up the batch, whose size is not fixed"


def _summed(c: Call, places: str) -> str:
    return PRIMITIVES[selection.sum_along].onnx(c.e, c.operand("src"), c["dim"], places, c["size"], False)


@lowered(
    function=lambda src, dim, index, size: _zeros(src, dim, size).scatter_add(dim, index, src),
    reads=("index",),
    refuses=_refuses_sum_at,
    onnx=lambda c: c.exported() if c.e.opset < SUMMING_OPSET else _summed(c, places_of(c)),
)
@sampled("torch.zeros_like(x).scatter_add(1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y)")
def sum_at(lowering: Lowering, src: Quantized, dim: int, index: Any, size: int) -> Quantized:
    """Compute Σ of the elements of `src` that have each place, 0 to size - 1, along a dimension; `index` has the shape of `src`."""
    terms = known_size(src.shape[dim])
    largest = lowering.prove(terms * src.grid.magnitude, "the sum")
    places = lowering.given("index", index, torch.int64)
    total = lowering.call(selection.sum_along, src.value, dim, places, size, largest >= FLOAT32_EXACT)
    return lowering.requantize(total, Ratio((src.scale,)))


def _onnx_index_sum(c: Call) -> str:
    """Avoid a Transpose where there is another form: onnxruntime cannot move QuantizeLinear of opset 21 after one by itself."""
    order = [d for d in range(len(fact(c.node).shape)) if d != c["dim"]] + [c["dim"]]
    matrix = c.real("places")
    if c.e.opset >= SUMMING_OPSET:
        places = c.e.constant(matrix.argmax(0).reshape([-1 if d == c["dim"] else 1 for d in range(len(order))]))
        return _summed(c, c.do("Expand", places, c.do("Shape", c.operand("src"))))
    total = c.do("MatMul", c.do("Transpose", c.operand("src"), perm=order), c.e.constant(matrix.float().t().contiguous()))
    return c.do("Transpose", total, perm=[order.index(d) for d in range(len(order))])


@lowered(function=lambda src, dim, index, size: _zeros(src, dim, size).index_add(dim, index, src), onnx=_onnx_index_sum)
@sampled("torch.zeros_like(x).index_add(2, torch.tensor([1, 1]), y[:, :, :2])")
def index_sum(lowering: Lowering, src: Quantized, dim: int, index: Tensor, size: int) -> Quantized:
    """Sum the slices of `src` along `dim` by their `index` (constant int64): slice i of the result is Σ of slices with index i.

    Return the product with a matrix of zeros and ones, along the last dimension.
    """
    matrix = torch.nn.functional.one_hot(index.flatten() % size, size).t().to(torch.float32)
    lowering.describe("places", torch.empty(0, device="cpu", dtype=torch.float32))
    return sums_along(lowering, src, dim, matrix, "places")


def _refuses_source(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    src, dim = arguments["src"], arguments["dim"]
    src_fact, expected = fact(src) if isinstance(src, fx.Node) else None, list(fact(arguments["input"]).shape)
    if not isinstance(src_fact, TensorFact) or is_parameter(src):
        return "its source is not an activation"
    if not isinstance(src_fact.shape[dim], int):
        return "it adds up the batch, whose size is not fixed"
    expected[dim] = src_fact.shape[dim]
    return None if list(src_fact.shape) == expected else "its source and its input differ in a size that is not indexed"


ADDS = {
    "operands": ("input", "src"),
    "reads": ("index",),
    "refuses": (refuses_index, _refuses_source),
    "normalize": as_large_as_index,
    "traits": frozenset({Trait.COLLECTS}),
}


def _refuses_index_add(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if not isinstance(arguments["index"], fx.Node) or not is_parameter(arguments["index"]):
        return "its index is computed"
    if not isinstance(fact(arguments["input"]).shape[arguments["dim"]], int):
        return "it adds to a part of the batch"
    supported = isinstance(arguments["source"], fx.Node) and isinstance(arguments["alpha"], int | float)
    return None if supported else "its source is not an activation"


def scatter_added(input: Any, dim: int, index: Any, src: Any) -> dict[str, Any]:
    """Return the canonical arguments of `scatter_add`, with a nonnegative `dim`."""
    return {"input": input, "dim": dim % max(rank_of(input), 1), "index": index, "src": src}


def _index_added(input: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> dict[str, Any]:
    return {"input": input, "dim": dim % max(rank_of(input), 1), "index": index, "source": source, "alpha": alpha}


@composite(adapt=scatter_added, **ADDS)
@sampled("scatter_add(x, 1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y)", within=NORMED)
@sampled("scatter_add(x, 3, y.argmax(3, True), y)", within=NORMED)
@sampled("scatter_reduce(x, 1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y, 'sum')", within=NORMED)
def scatter_add(build: Builder, input: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> Any:
    """Return the tensor with the elements of `src` added at their places along a dimension."""
    alone = made_number(input) == 0
    total = build(sum_at, src, dim, index, length_of(input, dim), demand=None if alone else INNER)
    return total if alone else build(add, input, total)


@composite(operands=("input", "source"), adapt=_index_added, refuses=_refuses_index_add, traits=frozenset({Trait.COLLECTS}))
@sampled("index_add(x, 1, torch.tensor([0, 2]), y[:, 1:], alpha=-0.5)", "x.index_add(3, torch.tensor([5, 0]), y[..., :2])")
def index_add(build: Builder, input: fx.Node, dim: int, index: fx.Node, source: fx.Node, alpha: float = 1) -> Any:
    """Return the tensor with alpha times the slices of `source` added at their places along a dimension."""
    alone = made_number(input) == 0
    if is_parameter(source):
        return build(add, input, build.host(index_sum, source, dim, index, length_of(input, dim)), float(alpha))
    if alpha != 1:
        source = build(mul, source, alpha, demand=INNER)
    total = build(index_sum, source, dim, index, length_of(input, dim), demand=None if alone else INNER)
    return total if alone else build(add, input, total)


# ---- The largest and the smallest of the elements at each place, where integers give the places: scatter_reduce ------
def _scatter_extremum(input: Tensor, dim: int, index: Tensor, src: Tensor, largest: bool, include_self: bool = True) -> Tensor:
    return torch.scatter_reduce(input, dim, index, src, "amax" if largest else "amin", include_self=include_self)


def _onnx_scatter_extremum(c: Call) -> str:
    """Both on the result's scale."""
    places, value = places_of(c), c.rounded(c.operand("input"))
    if not c["include_self"]:
        end = c.do("Expand", c.number(-FLOAT32_MAX if c["largest"] else FLOAT32_MAX), c.do("Shape", places))
        value = c.do("ScatterElements", value, places, end, axis=c["dim"])
    write, node = PRIMITIVES[selection.extremum_along].onnx, c.primitive(selection.extremum_along)
    assert node is not None
    return write(c.e, value, c.rounded(c.operand("src")), c["dim"], places, node.args[4], c["largest"])


_REDUCTIONS = {"sum": None, "add": None, "amax": True, "amin": False}  # the words for `reduce`: whether it is the largest


def _scatter_reduced(
    input: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> dict[str, Any] | str | Instead:
    arguments = scatter_added(input, dim, index, src)
    largest = _REDUCTIONS.get(reduce)
    if largest is None and reduce in _REDUCTIONS and (include_self or made_number(input) == 0):
        return Instead(scatter_add, arguments)
    if largest is None:
        return f"a {reduce} of any number of elements exceeds every accumulator: add logarithms instead"
    return {**arguments, "largest": largest, "include_self": include_self}


@lowered("scatter_reduce", function=_scatter_extremum, adapt=_scatter_reduced, onnx=_onnx_scatter_extremum, **ADDS)
@sampled("scatter_reduce(x, 1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y, 'amax')")
@sampled("x.scatter_reduce(1, torch.tensor([2, 0, 0]).view(1, 3, 1, 1).expand_as(x), y, 'amin', include_self=False)")
def scatter_extremum(
    lowering: Lowering, input: Branch, dim: int, index: Any, src: Quantized, largest: bool, include_self: bool = True
) -> Quantized:
    """Scatter `src` into `input` with maximum or minimum; without `include_self` the old elements at `index` are ignored.

    Without the elements themselves: these are as small, or as large, as can be, where a place is named.
    """
    places = lowering.given("index", index, torch.int64)
    terms = src.shape[dim]
    grid = lowering.output.grid

    def exact() -> Any:
        value, other = on_the_output(lowering, input, "input"), on_the_output(lowering, src, "src")
        if not include_self:
            end = torch.tensor(float(grid.bounds[0] if largest else grid.bounds[1]), dtype=torch.float32, device=grid.scale.device)
            stored = lowering.constant("end", lowering.stored(end, grid), grid.type.storage)
            value = lowering.call(selection.put_along, value, stored, dim, places, True)
        return lowering.call(selection.extremum_along, value, other, dim, places, terms, largest)

    return lowering.result(exact, lambda: scatter_extremum(real(input), dim, index, real(src), largest, include_self))
