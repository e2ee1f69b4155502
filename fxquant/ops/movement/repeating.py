"""Repeating a tensor along dimensions: expand, repeat, and broadcasting; cat and stack."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional
from fxquant.ir.graph import fact, inherit, is_parameter, set_fact, shape_of
from fxquant.numerics.grids import PLAIN_TYPES
from fxquant.ops.core import ALIGNED, EXACT, Builder, Call, Lowering, Quantized, Size, TensorFact, Trait, lowered, sampled
from fxquant.ops.core.declare import Branch, listed, needs, on_the_output, real
from fxquant.ops.core.record import Demand, Own, Plain, Same
from fxquant.ops.movement.shape import rank_of, sizes_of
from fxquant.primitives import shape


def _of(lowering: Lowering, input: Quantized | Tensor, repeated: Callable[[Any], Any], real: Callable[[], Tensor]) -> Any:
    """Repeat an activation on its scale, or a parameter (a class token) quantized on the output's scale, bool and integers without one."""
    if isinstance(input, Quantized):
        return input.with_value(repeated(input.value))
    if input.dtype in PLAIN_TYPES.values():
        return repeated(lowering.given("input", input, input.dtype))
    return lowering.result(lambda: repeated(on_the_output(lowering, input, "input")), real)


def _repeats_of(c: Call, role: str) -> str:
    """Write a list of sizes or repeat counts as one int64 tensor; batch-dependent ones are names of values. Return its name."""
    parts = [c.do("Reshape", size, c.integers([1])) if isinstance(size, str) else c.integers([max(size, 1)]) for size in c[role]]
    return c.do("Concat", *parts, axis=0)


def _demanded_by(node: fx.Node, arguments: dict[str, Any]) -> Demand:
    """Return the demand of a repeated tensor: an activation keeps its grid, a parameter gets a new one, booleans and integers have none."""
    if not isinstance(arguments["input"], fx.Node) or not is_parameter(arguments["input"]):
        return Same()
    plain = next((name for name, dtype in PLAIN_TYPES.items() if isinstance(fact(node), TensorFact) and fact(node).dtype == dtype), None)
    return Own() if plain is None else Plain(plain)


def _refuses_parameter(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Refuse to repeat a parameter for the batch if its dtype is neither float32 nor an unquantized one (bool, int64)."""
    input = arguments["input"]
    dtype = fact(input).dtype if isinstance(input, fx.Node) and is_parameter(input) else torch.float32
    if dtype not in (torch.float32, *PLAIN_TYPES.values()):
        return f"its operand %{input.name} is {str(dtype).removeprefix('torch.')}, and only float32 tensors are quantized"
    return None


def _expanded(input: Any, *sizes: Any, **keywords: Any) -> dict[str, Any] | str:
    """Adapt `expand` and `expand_as`: return sizes as numbers or nodes, -1 for an unchanged size; or a reason against it."""
    requested = listed([keywords.get("size", keywords.get("other", listed(sizes)))])
    if len(requested) == 1 and isinstance(requested[0], fx.Node) and isinstance(fact(requested[0]), TensorFact):
        (other,) = requested
        requested = [size if isinstance(size, int) else _computed_size(other, dim) for dim, size in enumerate(shape_of(other))]
    present = [*[1] * (len(requested) - rank_of(input)), *shape_of(input)]
    plain = [_size_of(size, old) for size, old in zip(requested, present, strict=True)]
    return "it is repeated for each sample of the batch" if None in plain else {"input": input, "sizes": plain}


def _copied(tensor: Any, source: Any) -> dict[str, Any] | str:
    """Turn a copy into a tensor into its source, broadcast to the tensor's shape."""
    source_fact, tensor_fact = (fact(value) if isinstance(value, fx.Node) else None for value in (source, tensor))
    if not isinstance(source_fact, TensorFact) or not isinstance(tensor_fact, TensorFact) or source_fact.dtype != tensor_fact.dtype:
        return "it changes the dtype"
    return _expanded(source, tensor)


def _computed_size(tensor: fx.Node, dim: int) -> fx.Node:
    """Insert and return a node that computes the size of a tensor's dimension, which depends on the batch."""
    with tensor.graph.inserting_after(tensor):
        size_node = inherit(tensor.graph.call_method("size", (tensor, dim)), tensor, "canonical.rewrite")
    set_fact(size_node, shape_of(tensor)[dim])
    return size_node


def _size_of(requested: Any, present: Size) -> Any:
    """Return the size to expand to: a number, -1 if the dimension is unchanged, or the node of a batch-dependent size; else None."""
    if isinstance(requested, int):
        return requested
    if present != 1:
        return -1
    return requested if isinstance(requested, fx.Node) else None


@lowered(
    "broadcast_to",
    "expand_as",
    operands=("input",),
    function=lambda input, sizes: input.expand(sizes),
    adapt=_expanded,
    calls={functional.copy: _copied},
    traits=frozenset({Trait.RESHAPES, Trait.REARRANGES, Trait.VIEWS}),
    moves=True,
    reads=("sizes",),
    refuses=_refuses_parameter,
    onnx=lambda c: c.do("Expand", c.operand("input"), _repeats_of(c, "sizes")),
    idle=lambda arguments: True,
    demand=_demanded_by,
)
@sampled("broadcast_to(x[:, :1], x.shape)", "x[:, :, :1].expand(-1, 3, 4, 6)", "x[..., :1].expand_as(x)", within=EXACT)
@sampled("x.broadcast_to((2, *x.shape))", within=EXACT)
@sampled("{P(1, 4, 5)}.expand(x.size(0) * 2, 4, 5)", within=ALIGNED)
def expand(lowering: Lowering, input: Quantized | Tensor, sizes: list[Any]) -> Any:
    """Dimensions of size 1 repeated to these sizes, new ones in front; -1 keeps a size."""
    old_sizes = [*[None] * (len(sizes) - len(input.shape)), *input.shape]
    same = all(isinstance(size, int) and (size == -1 or size == old) for size, old in zip(sizes, old_sizes, strict=True))
    if same and isinstance(input, Quantized):
        return input
    return _of(lowering, input, lambda value: lowering.call(shape.expand, value, sizes), lambda: expand(input, sizes))


def _tiled(lowering: Lowering, value: Any, sizes: Callable[[Any], list[Any]], repeats: list[Any]) -> Any:
    old = sizes(value)
    if len(repeats) > len(old):
        value = lowering.call(shape.reshape, value, [*[1] * (len(repeats) - len(old)), *old])
    if any(count != 1 for count in repeats):
        value = lowering.call(shape.tile, value, repeats)
    return value


def _repeated(input: Any, *repeats: Any, **keywords: Any) -> dict[str, Any]:
    counts = listed([keywords.get("repeats", keywords.get("dims", listed(repeats)))])
    return {"input": input, "repeats": [1] * (rank_of(input) - len(counts)) + counts}


def _onnx_repeat(c: Call) -> str:
    value, rank = c.operand("input"), len(c.operand_shape) if "input" not in c.constants else c.real("input").dim()
    for _ in range(len(c["repeats"]) - rank):
        value = c.unsqueezed(value, 0)
    return c.do("Tile", value, _repeats_of(c, "repeats"))


@lowered(
    "tile",
    operands=("input",),
    function=lambda input, repeats: input.repeat(repeats),
    adapt=_repeated,
    traits=frozenset({Trait.VIEWS}),
    moves=True,
    reads=("repeats",),
    idle=lambda arguments: True,
    refuses=(
        needs("its result is empty", lambda arguments: all(isinstance(count, fx.Node) or count > 0 for count in arguments["repeats"])),
        _refuses_parameter,
    ),
    onnx=_onnx_repeat,
    demand=_demanded_by,
)
@sampled("tile(x, (2, 1))", "x.tile(2)", "x.repeat(1, 2, 1, 3)", within=EXACT)
@sampled("{P(4, 5)}.repeat(x.size(0), 2, 1)")
def repeat(lowering: Lowering, input: Quantized | Tensor, repeats: list[Any]) -> Any:
    """Return the whole tensor this many times along each dimension, new ones in front."""
    sizes = functools.partial(sizes_of, lowering, shape=input.shape)
    return _of(lowering, input, lambda value: _tiled(lowering, value, sizes, repeats), lambda: repeat(input, repeats))


def repeated(build: Builder, input: fx.Node, sizes: Sequence[Size]) -> Any:
    """Return a tensor repeated to these sizes; one that has them is itself."""
    present = build.fact(input).shape
    old = [*[1] * (len(sizes) - len(present)), *present]
    if old == list(sizes) and len(present) == len(sizes):
        return input
    requested = [-1 if one == other and not isinstance(other, int) else other for one, other in zip(old, sizes, strict=True)]
    return build(expand, input, requested)


def why_not_repeated(shapes: Sequence[Sequence[Size]], common: Sequence[Size]) -> str | None:
    """Return why tensors of these shapes cannot be repeated to a common one."""
    for sizes in shapes:
        present = [*[1] * (len(common) - len(sizes)), *sizes]
        if any(one != other and not isinstance(other, int) for one, other in zip(present, common, strict=True)):
            return "it is repeated for each sample of the batch"
    return None


# ---- Tensors one after another ---------------------------------------------------------------------------------------
DEMAND = Own(shared_where="share_concat")


def _concatenated(lowering: Lowering, tensors: list[Branch], dim: int, shaped: Callable[[Any], Any], function: Any) -> Any:
    """Concatenate the tensors along `dim`, after `shaped`; bool and integer tensors unchanged, others requantized to the output's scale."""

    def placed(role: str, tensor: Any) -> Any:
        if not lowering.plain:
            return on_the_output(lowering, tensor, role)
        return tensor.value if isinstance(tensor, Quantized) else lowering.given(role, tensor, tensor.dtype)

    def exact() -> Any:
        parts = [placed(f"operand{index}", tensor) for index, tensor in enumerate(tensors)]
        return lowering.call(shape.concatenate, list(map(shaped, parts)), dim)

    return exact() if lowering.plain else lowering.result(exact, lambda: function([real(tensor) for tensor in tensors], dim))


def _refuses_cat(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for tensor in arguments["tensors"]:
        tensor_fact = fact(tensor)
        if is_parameter(tensor) and isinstance(tensor_fact, TensorFact) and tensor_fact.dtype not in (torch.float32, fact(node).dtype):
            return f"its operand %{tensor.name} is {str(tensor_fact.dtype).removeprefix('torch.')}, and only float32 tensors are quantized"
    return None


def _along(dim: int, rank: int) -> Callable[..., dict[str, Any] | str]:
    """Return a function that maps `tensors` to the arguments of `cat` along `dim`, or to why not: one has fewer than `rank` dimensions."""

    def adapt(tensors: Sequence[Any]) -> dict[str, Any] | str:
        shapes = [shape_of(tensor) for tensor in tensors]
        if any(each is None or len(each) < rank for each in shapes):
            return f"one of its operands has fewer than {rank} dimensions"
        return {"tensors": list(tensors), "dim": dim}

    return adapt


def _without_nothing(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop empty tensors from a concatenation, unless all are empty; PyTorch ignores an empty 1-d tensor, the initial value of a cache."""
    nonempty = [tensor for tensor in arguments["tensors"] if not isinstance(fact(tensor), TensorFact) or 0 not in fact(tensor).shape]
    return {**arguments, "tensors": nonempty or arguments["tensors"]}


def _joined(c: Call) -> list[str]:
    """Return the names of the concatenated float values; parameters are written as constants."""
    return [c.operand(f"operand{index}") if value is None else value for index, value in enumerate(c["tensors"])]


@lowered(
    operands=("tensors",),
    calls={
        **dict.fromkeys((torch.cat, torch.concat, torch.concatenate)),
        **dict.fromkeys((torch.hstack, torch.column_stack), _along(1, 2)),
        **dict.fromkeys((torch.vstack, torch.row_stack), _along(0, 2)),
        torch.dstack: _along(2, 3),
    },
    demand=lambda node, arguments: DEMAND,
    traits=frozenset({Trait.COLLECTS}),
    moves=True,
    refuses=_refuses_cat,
    normalize=_without_nothing,
    idle=lambda arguments: len(arguments["tensors"]) == 1,
    onnx=lambda c: c.do("Concat", *_joined(c), axis=c["dim"]),
)
@sampled("torch.cat([x, y], 1)", "torch.cat((y, x, y), dim=-1)", "torch.concat([x, y], dim=2)", "torch.concatenate((x, y), 1)")
@sampled("torch.hstack([x, y])", "torch.column_stack((x, y))", "torch.vstack((x, y))", "torch.row_stack((x, y))", "torch.dstack([x, y])")
@sampled("torch.cat([{P(1, 3, 6, 2)}.expand(x.shape[0], -1, -1, -1), x], -1)", "torch.cat([{P(3, 6, 6)}, x.flatten(0, 1)])[1:]")
def cat(lowering: Lowering, tensors: list[Branch], dim: int = 0) -> Any:
    """Return the tensors one after another along `dim`.

    Requantize each operand to the output's scale, round a parameter to it, and concatenate them.
    """
    return _concatenated(lowering, tensors, dim, lambda part: part, torch.cat)


def _onnx_stack(c: Call) -> str:
    axis = c["dim"] % len(fact(c.node).shape)
    # Each part is on the result's scale already: onnxruntime cannot move QuantizeLinear of opset 21 after Unsqueeze by itself.
    return c.do("Concat", *(c.rounded(c.unsqueezed(tensor, axis)) for tensor in _joined(c)), axis=axis)


@lowered(
    operands=("tensors",),
    demand=lambda node, arguments: DEMAND,
    traits=frozenset({Trait.COLLECTS}),
    moves=True,
    refuses=_refuses_cat,
    onnx=_onnx_stack,
)
@sampled("stack([x, y], 1)", "stack((y, x, y), dim=-1)")
def stack(lowering: Lowering, tensors: list[Branch], dim: int = 0) -> Any:
    """Return the tensors one after another along a new dimension.

    Requantize each operand to the output's scale, insert the new dimension, and concatenate them.
    """
    first = next(tensor for tensor in tensors if isinstance(tensor, Quantized))
    position = dim % (len(first.shape) + 1)

    def widened(part: Any) -> Any:
        sizes = sizes_of(lowering, part, first.shape)
        return lowering.call(shape.reshape, part, [*sizes[:position], 1, *sizes[position:]])

    return _concatenated(lowering, tensors, position, widened, torch.stack)
