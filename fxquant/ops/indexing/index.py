"""Choosing elements: indexing, splitting, selecting; the sum, mean or largest of the rows of a table that a bag of indices names."""

import builtins
import itertools
import operator
from collections.abc import Sequence
from fractions import Fraction
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import BatchDim, Size, TensorFact, fact, is_parameter, shape_of
from fxquant.ops.core import NORMED, Builder, Call, Layer, Lowering, Quantized, are_fixed, declare, known_size, places, selected
from fxquant.ops.core.declare import bound, dtype_of, fixed, function_and_method, listed, lowered, needs, on_the_output, settings_of
from fxquant.ops.core.places import constant_value, counts_the_batch, is_list, pick_each, plain_entries
from fxquant.ops.core.record import Instead, Own, Plain, Same, Trait, operator_named
from fxquant.ops.core.samples import ROUNDED, sampled
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.comparison import amax
from fxquant.ops.movement.shape import interleave, piece, pieces_of, rank_of, reshape, sizes_of
from fxquant.ops.pooling import totals
from fxquant.primitives import selection, shape

FOR_GRADIENTS = ("padding_idx", "scale_grad_by_freq", "sparse")  # arguments of an embedding that do not change its result
CHANGES = "it changes its weight while it runs (max_norm)"


def _function(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    """Adapt F.embedding."""
    arguments = bound(F.embedding, *args, **kwargs)
    return CHANGES if arguments["max_norm"] is not None else {name: arguments[name] for name in ("input", "weight", *FOR_GRADIENTS)}


def _aten(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> dict[str, Any]:
    """Adapt torch.embedding, and that of an exported program, which take the weight first."""
    padding = None if padding_idx < 0 else padding_idx
    return {"input": indices, "weight": weight, "padding_idx": padding, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}


def refuses_embedding(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why rows of its table cannot be taken as integers."""
    weight, indices = arguments["weight"], fact(arguments["input"])
    if not isinstance(weight, fx.Node) or not is_parameter(weight):
        return "its table is an activation, where an integer form takes a constant"
    table = fact(weight)
    if isinstance(table, TensorFact) and table.dtype != torch.float32:
        return f"its table is {str(table.dtype).removeprefix('torch.')}, and only float32 tensors are quantized"
    return None if isinstance(indices, TensorFact) and not indices.dtype.is_floating_point else "its indices are not an integer tensor"


@lowered(
    function=lambda input, weight, padding_idx=None, scale_grad_by_freq=False, sparse=False: F.embedding(
        input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    ),
    adapt=_function,
    calls={torch.embedding: _aten},
    modules={nn.Embedding: lambda module: CHANGES if module.max_norm is not None else settings_of(("weight", *FOR_GRADIENTS))(module)},
    reads=("input",),
    refuses=refuses_embedding,
    layer=Layer(table=lambda arguments: arguments["weight"]),
    onnx=lambda c: c.do("Gather", c.e.constant(c.real("weight")), c.operand("input"), axis=0),
)
@sampled("torch.embedding({P(6, 5)}, x.argmax(-1))", "F.embedding(x.argmax(-1), {P(6, 5)}, padding_idx=2)")
@sampled("{nn.Embedding(6, 5)}(x.argmin(-1))")
def embedding(
    lowering: Lowering, input: Any, weight: Tensor, padding_idx: int | None = None, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Quantized:
    """Look up rows of `weight` [rows, features] at the indices `input`, int64 or int32 of any shape.

    Take rows of the table, which is on the output's grid. The other arguments say how its gradient is formed.
    """
    indices = lowering.given("input", input, torch.int64)
    return lowering.result(
        lambda: lowering.call(shape.rows, on_the_output(lowering, weight, "weight"), indices),
        lambda: embedding(input, weight, padding_idx, scale_grad_by_freq, sparse),
    )


WHOLE = builtins.slice(None)


def _bounds(entry: int | builtins.slice, size: Size) -> tuple[Any, Any, int]:
    """Return (start, stop, step) of an index entry, numbers or nodes; nonnegative if `size` and bounds do not vary."""
    if isinstance(entry, int):
        entry = builtins.slice(entry, None if entry == -1 else entry + 1)
    if isinstance(size, int) and not any(isinstance(bound, fx.Node) for bound in (entry.start, entry.stop)):
        start, stop, step = entry.indices(size)
        return start, max(start, stop), step
    start, stop, step = entry.start, entry.stop, entry.step
    return start or 0, shape.UNBOUNDED if stop is None else stop, step or 1


def _sliced(entry: Any, size: Size) -> Size:
    """Return the size that an entry leaves of a dimension; one that varies stands for all that vary."""
    if not isinstance(entry, int | builtins.slice):
        return len(entry)
    bounds = _bounds(entry, size)
    return len(range(*bounds)) if isinstance(size, int) and not any(isinstance(bound, fx.Node) for bound in bounds) else BatchDim()


def places_of(c: Call) -> str:
    """Return the index of a call, which may be a constant."""
    index = c.arguments.get("index")
    return index if isinstance(index, str) else c.e.constant(c.real("index"))


_OF_INTEGERS = needs("its index is not an integer tensor", lambda arguments: dtype_of(arguments["index"]) in (torch.int64, torch.int32))
refuses_index = declare.first_reason(_OF_INTEGERS, fixed(because="it indexes the batch"))
refuses_index_along = declare.first_reason(_OF_INTEGERS, fixed(because="it indexes the batch", bounded=True))


def _computed(entry: Any) -> bool:
    return isinstance(entry, fx.Node) and not is_parameter(entry) and isinstance(fact(entry), TensorFact)


@lowered(
    operands=("input",),
    function=lambda input, dim, index: input[tuple([*[WHOLE] * dim, index])],
    moves=True,
    reads=("index",),
    layer=Layer(table=lambda arguments: arguments["input"] if isinstance(arguments["input"], Tensor) else None),
    onnx=lambda c: c.do("Gather", c.operand("input"), places_of(c), axis=c["dim"]),
    refuses=(
        refuses_index,
        needs(
            "it indexes a constant that is not a float32 tensor",
            lambda arguments: not is_parameter(arguments["input"]) or dtype_of(arguments["input"]) == torch.float32,
        ),
    ),
    demand=lambda node, arguments: Own() if is_parameter(arguments["input"]) else Same(),
)
@sampled("torch.linspace(-1, 1, 6)[x.argmax(3)]", within=ROUNDED)
def pick(lowering: Lowering, input: Quantized | Tensor, dim: int, index: Any) -> Quantized:
    """Index `input` along `dim` with a computed or constant int64 tensor, whose dimensions replace `dim` in the result."""
    at = lowering.given("index", index, torch.int64)
    if isinstance(input, Quantized):
        return input.with_value(lowering.call(selection.pick, input.value, dim, at))
    return lowering.result(
        lambda: lowering.call(selection.pick, on_the_output(lowering, input, "input"), dim, at), lambda: pick(input, dim, index)
    )


def _indexed(input: Any, index: Any) -> dict[str, Any] | str | Instead:
    """Rewrite input[index] as canonical arguments or another call, or return why it cannot be; a list of pieces gives its piece."""
    input_fact = fact(input)
    if isinstance(input_fact, list | tuple):
        return _piece(input, index)
    if not isinstance(input_fact, TensorFact):
        return "it indexes a value that is not a tensor"
    whole = whole_index(input_fact.shape, entries_of(index))
    if whole is None:
        return "its index has too many entries"
    computed = [dim for dim, entry in enumerate(whole) if _computed(entry)]
    if len(computed) == 1 and all(entry == WHOLE for dim, entry in enumerate(whole) if dim != computed[0]):
        return _selected(input, computed[0], whole[computed[0]])
    if len(computed) == 1 and all(isinstance(entry, int | builtins.slice | None) for entry in whole if not _computed(entry)):
        if fact(whole[computed[0]]).dtype == torch.bool:
            return "the size of its result depends on the data: its index is a mask"
        first = [WHOLE if _computed(entry) else entry for entry in whole]
        dim = sum(not isinstance(entry, int) for entry in whole[: computed[0]])
        return Instead(places.pick_parts, {"input": input, "index": first, "dim": dim, "places": whole[computed[0]]})
    if _of_each_item(input, whole, computed):
        return Instead(pick_each, {"input": input, "dim": computed[-1], "places": whole[computed[-1]]})
    part = _of_the_batch(input_fact.shape, whole)
    if part is not None:
        return Instead(piece, {"input": input, **part})
    if sum(map(is_list, whole)) > 1 or any(is_list(entry) and any(map(is_list, entry)) for entry in whole):
        return _by_lists(input, whole)
    return {"input": input, "index": whole}


def entries_of(index: Any) -> list[Any]:
    """Return the entries of an index; a list that holds more than numbers counts as a tuple, as in PyTorch."""
    if isinstance(index, list):
        kinds: Any = (list, tuple, range, builtins.slice, EllipsisType, type(None))
        if any(isinstance(entry, kinds) or (isinstance(entry, fx.Node) and isinstance(fact(entry), TensorFact)) for entry in index):
            return list(index)
    return list(index) if isinstance(index, tuple) else [index]


def whole_index(shape: Sequence[Size], entries: list[Any]) -> list[Any] | None:
    """Return the entries of an index, one for every dimension and every new one; None where there are too many."""
    missing = len(shape) - sum(map(dimensions, entries))
    position = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    return None if missing < 0 else plain_entries([*entries[:position], *[WHOLE] * missing, *entries[position + 1 :]])


def _of_the_batch(shape: tuple[Size, ...], entries: list[Any]) -> dict[str, int] | None:
    """Return the piece of the batch that a slice with computed bounds picks alone: x[:n] of 2n items; None for any other index."""
    sliced = [(dim, entry) for dim, entry in enumerate(entries) if entry != WHOLE]
    if len(sliced) != 1 or not isinstance(sliced[0][1], builtins.slice) or sliced[0][1].step not in (None, 1):
        return None
    ((dim, entry),) = sliced
    bounds = (entry.start or 0, shape[dim] if entry.stop is None else entry.stop)
    start, stop = (fact(bound) if isinstance(bound, fx.Node) else bound for bound in bounds)
    if not isinstance(start, int | BatchDim) or not isinstance(stop, BatchDim) or (isinstance(start, int) and start != 0):
        return None
    begin = start if isinstance(start, BatchDim) else BatchDim(Fraction(0))
    size = BatchDim(stop.coefficient - begin.coefficient, stop.offset - begin.offset)
    pieces = pieces_of(shape[dim], begin, size)
    return None if pieces is None else {"dim": dim, "count": pieces[0], "number": pieces[1]}


def _of_each_item(input: fx.Node, entries: list[Any], computed: list[int]) -> bool:
    """Return whether an index picks from each item of the batch at different places: x[torch.arange(len(x)), places]."""
    others = sum(entry == WHOLE for entry in entries if not isinstance(entry, fx.Node))
    if not computed or computed[-1] == 0 or others != len(entries) - 2 or not isinstance(entries[0], fx.Node):
        return False
    return fact(entries[computed[-1]]).dtype == torch.int64 and counts_the_batch(entries[0], input, entries[computed[-1]])


def dimensions(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index consumes."""
    entry_fact = fact(entry) if isinstance(entry, fx.Node) else None
    if isinstance(entry_fact, TensorFact) and entry_fact.dtype == torch.bool:
        return len(entry_fact.shape)
    return int(entry is not None and entry is not Ellipsis)


def _by_lists(input: fx.Node, entries: list[Any]) -> dict[str, Any] | str | Instead:
    """Index by numbers, slices and new dimensions first, then by the lists."""
    if not all(entry is None or is_list(entry) or isinstance(entry, int | builtins.slice) for entry in entries):
        return "its index is computed"
    if any(isinstance(entry, bool) for entry in entries):
        return "its index is a mask"
    first = [WHOLE if is_list(entry) else entry for entry in entries]
    lists = [entry if is_list(entry) else None for entry in entries if not isinstance(entry, int)]
    if first == [WHOLE] * len(first):
        return Instead(places.index, {"input": input, "lists": lists})
    return Instead(places.index_parts, {"input": input, "index": first, "lists": lists})


def _refuses_getitem(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    index = arguments["index"]
    if is_parameter(arguments["input"]):
        return "none of its operands is an activation"
    entries = zip([entry for entry in index if entry is not None], shape_of(arguments["input"]), strict=True)
    reason = next((reason for reason in itertools.starmap(_refuses_entry, entries) if reason is not None), None)
    if reason is not None:
        return reason
    several = sum(not isinstance(entry, int | builtins.slice | None) for entry in index) > 1
    return "it indexes several dimensions by lists" if several else None


def _keeps_everything(arguments: dict[str, Any]) -> bool:
    """Return whether an index whose result has its operand's shape has it at every batch size; `[:20]` has not."""
    input_fact = fact(arguments["input"])
    return isinstance(input_fact, TensorFact) and all(
        isinstance(entry, builtins.slice) and (isinstance(size, int) or (not entry.start and entry.stop is None))
        for entry, size in zip(arguments["index"], input_fact.shape, strict=False)
    )


def _refuses_entry(entry: Any, size: Size) -> str | None:
    """Return why an index of a dimension of this size has no integer form."""
    if isinstance(entry, builtins.slice):
        bounds = [fact(bound) if isinstance(bound, fx.Node) else bound for bound in (entry.start, entry.stop, entry.step)]
        plain = all(bound is None or isinstance(bound, int | BatchDim) for bound in bounds) and not isinstance(bounds[2], BatchDim)
        return None if plain else "the bounds of its index are computed"
    if isinstance(entry, bool):
        return "its index is a mask"
    if isinstance(entry, int):
        return None
    if isinstance(entry, fx.Node):
        entry_fact = fact(entry)
        if not is_parameter(entry) or not isinstance(entry_fact, TensorFact):
            return f"its index is computed by %{entry.name}"
        if len(entry_fact.shape) != 1 or entry_fact.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            return "its index is a constant that is not a list of integers"
    elif not isinstance(entry, list | tuple) or not all(type(number) is int for number in entry):
        return "its index is not a list of integers"
    return None if isinstance(size, int) else "it indexes the batch by a list"


def along_dimension(input: Any, dim: int, entry: Any) -> dict[str, Any]:
    """Return the arguments (input, index) of `index` that apply an entry along `dim`, and whole slices elsewhere."""
    index: list[Any] = [WHOLE] * rank_of(input)
    index[dim] = entry
    return {"input": input, "index": index}


def _narrowed(input: Any, dim: int, start: Any, length: Any) -> dict[str, Any] | str:
    if not isinstance(start, int) or not isinstance(length, int):
        return "the bounds of its index are computed"
    size = shape_of(input)[dim]
    if start < 0 and not isinstance(size, int):
        return "it counts from the end of the batch"
    begin = start % size if isinstance(size, int) and size else start
    return along_dimension(input, dim, builtins.slice(begin, begin + length))


def _selected(input: Any, dim: int, index: Any) -> dict[str, Any] | str | Instead:
    if _computed(index):
        if fact(index).dtype == torch.bool:
            return "the size of its result depends on the data: its index is a mask"
        if is_parameter(input) and dim == 0 and rank_of(input) == 2:
            return Instead(embedding, {"input": index, "weight": input})
        return Instead(pick, {"input": input, "dim": dim % rank_of(input), "index": index})
    return along_dimension(input, dim, index)


def _interleaved(input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> dict[str, Any] | str | Instead:
    if dim is None and rank_of(input) != 1:
        return "it repeats each element of the flattened tensor"
    dim = dim or 0
    dim, size = dim % rank_of(input), shape_of(input)[dim]
    if not isinstance(size, int) and isinstance(repeats, int) and repeats > 0:
        return Instead(interleave, {"input": input, "dim": dim, "repeats": repeats})
    if not isinstance(size, int):
        return "it repeats along the batch"
    counts = constant_value(repeats)
    each = [repeats] if isinstance(repeats, int) else None if counts is None else counts.flatten().tolist()
    if each is None:
        return "how often it repeats each element is computed"
    each = each * size if len(each) == 1 else each
    return along_dimension(input, dim, [position for position, count in enumerate(each) for _ in range(count)])


# What returns a tensor in pieces, with where the dimension stands among its arguments, or the dimension from the rank.
_SPLITS = function_and_method(None, "chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
_SPLITS_ALONG: dict[Any, Any] = {
    **function_and_method(lambda rank: min(1, rank - 1), "hsplit"),
    **function_and_method(lambda rank: 0, "vsplit"),
    **function_and_method(lambda rank: 2, "dsplit"),
}
_UNBINDS = function_and_method(None, "unbind")


def _piece(pieces: fx.Node, number: Any) -> dict[str, Any] | str | Instead:
    """Return one piece of a split tensor, as an index of the whole."""
    position = 1 if pieces.target in _UNBINDS else 2 if pieces.target in _SPLITS or pieces.target in _SPLITS_ALONG else None
    source = pieces.args[0] if pieces.args else pieces.kwargs.get("input", pieces.kwargs.get("tensor"))
    if position is None or not isinstance(source, fx.Node) or not isinstance(number, int):
        return f"it selects a result of %{pieces.name}, which is computed in float"
    dim = pieces.kwargs.get("dim", pieces.args[position] if len(pieces.args) > position else 0)
    if pieces.target in _SPLITS_ALONG:
        dim = _SPLITS_ALONG[pieces.target](rank_of(source))
    assert isinstance(dim, int)
    facts = fact(pieces)
    number %= len(facts)
    if pieces.target in _UNBINDS:
        return along_dimension(source, dim, number)
    sizes = [piece.shape[dim] for piece in facts]
    if not are_fixed(sizes):
        equal_pieces = pieces_of(shape_of(source)[dim], 0, sizes[0]) if len(set(sizes)) == 1 else None
        if equal_pieces is None:
            return "it splits the batch, whose size is not fixed"
        return Instead(piece, {"input": source, "dim": dim % rank_of(source), "count": equal_pieces[0], "number": number})
    start = sum(sizes[:number])
    return along_dimension(source, dim, builtins.slice(start, start + sizes[number]))


@lowered(
    "select",
    "index_select",
    function=lambda input, index: input[tuple(index)],
    adapt=_selected,
    calls={
        **dict.fromkeys((operator.getitem, "__getitem__"), _indexed),
        **function_and_method(_narrowed, "narrow"),
        **function_and_method(_interleaved, "repeat_interleave"),
    },
    traits=frozenset({Trait.VIEWS}),
    moves=True,
    reads=("index",),
    idle=_keeps_everything,
    refuses=_refuses_getitem,
    demand=Same(),
)
@sampled("x[:, 1]", "x[..., ::2, None, 1:-1]", "x[:, [2, 0]]", "x.__getitem__((slice(None), 2))", "narrow(x, -1, 2, 3)", "select(x, 2, 3)")
@sampled("index_select(x, 1, torch.tensor([1, 1, 0]))", "repeat_interleave(x, 2, dim=1)", "x.repeat_interleave(3, 2)")
def getitem(lowering: Lowering, input: Quantized, index: list[Any]) -> Quantized:
    """Return input[index]: one entry for every dimension (slice, number, list or constant tensor of numbers), and None for a new one.

    Lower to a crop, a selection, and a reshape that drops and adds dimensions; each only where it is needed.
    """
    value = input.value
    entries = list(zip([entry for entry in index if entry is not None], input.shape, strict=True))
    crops = {dim: _bounds(entry, size) for dim, (entry, size) in enumerate(entries) if isinstance(entry, int | builtins.slice)}
    crops = {dim: bounds for dim, bounds in crops.items() if bounds != (0, entries[dim][1], 1) and bounds != (0, shape.UNBOUNDED, 1)}
    if crops:
        starts, stops, steps = ([bounds[part] for bounds in crops.values()] for part in range(3))
        value = lowering.call(shape.crop, value, list(crops), starts, stops, steps)
    for dim, (entry, size) in enumerate(entries):
        if not isinstance(entry, int | builtins.slice):
            chosen = torch.as_tensor(entry, dtype=torch.int64, device=lowering.device) % known_size(size)
            value = selected(lowering, value, dim, chosen)
    if any(entry is None or isinstance(entry, int) for entry in index):
        sizes = iter(sizes_of(lowering, value, [_sliced(entry, size) for entry, size in entries]))
        left = [(entry, 1 if entry is None else next(sizes)) for entry in index]
        value = lowering.call(shape.reshape, value, [size for entry, size in left if not isinstance(entry, int)])
    return input.with_value(value)


# ---- Bags of embeddings ----------------------------------------------------------------------------------------------
@lowered(
    adapt=lambda tensor, num_classes=-1: {"input": tensor, "num_classes": num_classes},
    reads=("input",),
    refuses=(
        needs("its operand is not an integer tensor", lambda arguments: dtype_of(arguments["input"]) == torch.int64),
        needs(
            "the size of its result depends on the data",
            lambda arguments: isinstance(arguments["num_classes"], int) and arguments["num_classes"] > 0,
        ),
    ),
    demand=Plain("int64"),
)
@sampled("one_hot(x.argmax(3), 6)")
def one_hot(lowering: Lowering, input: Any, num_classes: int) -> Any:
    """Return for each integer a vector of zeros with a 1 at its place, along a new last dimension: int64.

    Take rows of the unit matrix.
    """
    unit = lowering.given("unit", torch.eye(num_classes, dtype=torch.int64, device="cpu"), torch.int64)
    return lowering.call(shape.rows, unit, lowering.given("input", input, torch.int64))


def _counted_along(input: Any, dim: Any = None) -> dict[str, Any] | str:
    if fact(input).dtype != torch.bool:
        return "its operand is not a boolean tensor"
    rank = len(shape_of(input))
    return {"input": input, "dim": [d % rank for d in (range(rank) if dim is None else listed([dim]))]}


@lowered(
    adapt=_counted_along,
    reads=("input",),
    onnx=lambda c: c.reduced("ReduceSum", c.do("Cast", c.operand("input"), to=torch.int64), list(c["dim"]), False),
    refuses=(declare.has_dimensions(), declare.fixed_along("dim", "it counts over the batch, whose size is not fixed")),
    demand=Plain("int64"),
)
@sampled("torch.count_nonzero(x > 0.2, (1, 2))", "(x > 0.2).count_nonzero(1)")
def count_nonzero(lowering: Lowering, input: Any, dim: list[int]) -> Any:
    """Count how many of the booleans along dimensions are true: int64."""
    return lowering.call(selection.count, lowering.given("input", input, torch.bool), list(dim), False)


OFFSETS = "its bags begin at offsets: give bags of one size, [bags, size]"


def _why_no_bags(max_norm: float | None, padding_idx: int | None, include_last_offset: bool, scale_grad_by_freq: bool) -> str | None:
    """Return why bags with these settings have no integer form; None where they have one."""
    reasons = {
        CHANGES: max_norm is not None,
        "its bags leave out the rows of its padding_idx": padding_idx is not None,
        "PyTorch divides the gradient of a bag by counts of other rows (scale_grad_by_freq)": scale_grad_by_freq,
        OFFSETS: include_last_offset,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


WHY = ("max_norm", "padding_idx", "include_last_offset", "scale_grad_by_freq")


def _bag_function(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    arguments = bound(F.embedding_bag, *args, **kwargs)
    because = _why_no_bags(*(arguments[name] for name in WHY))
    return because or {name: arguments[name] for name in operator_named("embedding_bag").parameter_names}


_bag_settings = settings_of(("weight", "mode", "sparse"))


def _refuses_bags(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    input_fact = fact(arguments["input"])
    if not isinstance(input_fact, TensorFact) or not isinstance(input_fact.shape[-1], int):
        return "the sizes of its bags depend on the batch size"
    return None if len(input_fact.shape) == 2 else OFFSETS


@declare.composite(
    operands=("per_sample_weights",),
    function=lambda input, offsets=None, per_sample_weights=None, weight=None, mode="mean", sparse=False: F.embedding_bag(
        input, weight, offsets, mode=mode, per_sample_weights=per_sample_weights, sparse=sparse
    ),
    by_name=False,
    calls={F.embedding_bag: _bag_function},
    modules={nn.EmbeddingBag: lambda module: _why_no_bags(*(getattr(module, name) for name in WHY)) or _bag_settings(module)},
    reads=("input",),
    refuses=(_refuses_bags, refuses_embedding),
)
@sampled("F.embedding_bag(x[:, 0].argmax(2), {P(6, 5)}, mode='max')", "{nn.EmbeddingBag(6, 5)}(x[:, 1].argmax(2))", within=NORMED)
@sampled("F.embedding_bag(x[:, 0].argmax(2), {P(6, 5)}, mode='sum', per_sample_weights=y[:, 0, 0])", within=NORMED)
def embedding_bag(
    build: Builder, input: fx.Node, offsets: None = None, per_sample_weights: fx.Node | None = None, weight: Any = None, mode: str = "mean",
    sparse: bool = False,
) -> Any:  # fmt: skip
    """Return the "sum", "mean" or "max" of the rows of `weight` that each bag names, [bags, features].

    The bags are the rows of `input`, int64 [bags, size]; `offsets`, for bags of different sizes, have no integer form. In a
    sum each row may have a factor, `per_sample_weights`, of the shape of `input`.
    """
    rows = build(embedding, input, weight, None, False, sparse)
    if per_sample_weights is not None:
        rows = build(mul, rows, build(reshape, per_sample_weights, [-1, build.fact(per_sample_weights).shape[1], 1]))
    return build({"sum": totals.sum, "mean": totals.mean, "max": amax}[mode], rows, [1], False)
