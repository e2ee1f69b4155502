"""Operators that change the shape or order of a tensor's elements, split or repeat the batch, or return their operand unchanged."""

import builtins
import functools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn

from fxquant.ir.graph import fact, largest_size, reshape_sizes, shape_of, size_node
from fxquant.ops.core import BatchDim, Call, Instead, Lowering, Quantized, Same, Size, TensorFact, Trait, known_size, selected
from fxquant.ops.core.casting import CASTS, asked_dtype, changed, in_dtype
from fxquant.ops.core.declare import Guard, fixed_along, fixed_sizes, function_and_method, known_sizes, listed, lowered, needs
from fxquant.ops.core.declare import numbers as numeric
from fxquant.ops.core.samples import LIMITED, sample, sampled
from fxquant.ops.elementwise.unary import raised
from fxquant.primitives import shape

MANY_SIZES = "more than one of its sizes varies"


class ManySizes(Exception):
    """A shape cannot be written as numbers, since more than one of its sizes varies."""


def numbers(sizes: Sequence[Size]) -> list[int]:
    """Return a shape as numbers, with -1 for the one size that varies. Raise ManySizes where there are more."""
    plain = [size if isinstance(size, int) else -1 for size in sizes]
    if plain.count(-1) > 1:
        raise ManySizes
    return plain


def sizes_of(lowering: Lowering, value: Any, shape: Sequence[Size]) -> list[Any]:
    """Return the shape of a value for a reshape: numbers, -1 for the first size that varies, and others read at run time."""
    return reshape_sizes(shape, lambda dim: lowering.size(value, dim))


def many_sizes(node: fx.Node) -> bool:
    """Return whether a reshape could not infer the sizes of the result."""
    result = fact(node)
    return isinstance(result, TensorFact) and varying_sizes(result.shape) > 1


def varying_sizes(sizes: Sequence[Size]) -> int:
    """Return the number of sizes that vary."""
    return len(sizes) - sum(isinstance(size, int) for size in sizes)


def one_varying(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why not, if more than one size of the operand varies; else None."""
    return MANY_SIZES if varying_sizes(shape_of(arguments["input"])) > 1 else None


def result_varying(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why not, if more than one size of the result varies; else None."""
    return MANY_SIZES if many_sizes(node) else None


def _any_sizes(input: Any, *sizes: Any, **keywords: Any) -> dict[str, Any] | str:
    """x.view(2, -1), x.view((2, -1)), torch.flatten(x, 1), …: the shape is read off the result."""
    if any(isinstance(size, torch.dtype) for size in sizes):
        return "it reinterprets the bytes as another dtype"
    return {"input": input, "shape": listed(sizes)}


def _plain_shape(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return the shape as numbers, read off the result; where several sizes vary, all but one are nodes: as written, or of the operand."""
    shape, written = shape_of(node), arguments["shape"]
    if not many_sizes(node):
        return {**arguments, "shape": numbers(shape)}
    sizes: list[Any] = [size if isinstance(size, int) else None for size in shape]
    if len(written) == len(shape):
        sizes = [
            each if size is None and isinstance(each, fx.Node) and isinstance(fact(each), BatchDim) else size
            for size, each in zip(sizes, written, strict=True)
        ]
    before = shape_of(arguments["input"])
    for dim, size in enumerate(shape):
        if sizes[dim] is None and size in before and sizes.count(None) > 1:
            sizes[dim] = size_node(arguments["input"], before.index(size), node)
    return MANY_SIZES if sizes.count(None) > 1 else {**arguments, "shape": [-1 if size is None else size for size in sizes]}


_shape = shape
_RESHAPES = ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")


@lowered(
    calls={
        form: functools.partial(_any_sizes)  # one for each: a rule for flatten is not about squeeze
        for form in (
            *(*function_and_method(None, *_RESHAPES), "view", "view_as", "reshape_as"),
            *(torch.atleast_1d, torch.atleast_2d, torch.atleast_3d),
        )
    },
    modules=dict.fromkeys((nn.Flatten, nn.Unflatten), lambda m: {"shape": []}),
    traits=frozenset({Trait.RESHAPES, Trait.REARRANGES, Trait.VIEWS}),
    moves=True,
    reads=("shape",),
    normalize=_plain_shape,
    idle=lambda arguments: True,
    demand=Same(),
)
@sampled("reshape(x, (-1, 6, 18))", "x.reshape(x.shape[0], -1)", "x.view(-1, 108)", "x.view(x.size(0), 3, 36)", "flatten(x, 1)", "ravel(x)")
@sampled("torch.flatten(x, start_dim=2, end_dim=3)", "squeeze(x.reshape(-1, 1, 108), 1)", "unsqueeze(x, 2)", "unflatten(x, 2, (2, -1))")
@sampled("nn.Flatten()", "nn.Flatten(2)", "nn.Unflatten(1, (3, 1))", "torch.atleast_1d(x).flatten(1)", "torch.atleast_2d(x).flatten(1)")
@sampled("torch.atleast_3d(x)", x=(8,))
@sampled("x.view_as(y)", "x.reshape_as(y)", x=(3, 6, 6), y=(6, 18))
def reshape(lowering: Lowering, input: Quantized, shape: Any) -> Quantized:
    """Return the elements in another shape."""
    return input.with_value(lowering.call(_shape.reshape, input.value, list(shape)))


_PASSING = (*function_and_method(None, "clone", "detach", "positive"), operator.pos, "contiguous", "cpu")
_UNASKED = ("non_blocking", "copy", "memory_format")


def _cast(input: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | str | Instead:
    """Adapt x.to(…), x.type(…), x.float(): the identity where the tensor has the requested dtype.

    A device is ignored: a graph runs where its tensors are. A cast from float32 to float64 and back is the identity.
    """
    asked = [value for name, value in (*enumerate(args), *kwargs.items()) if name not in _UNASKED and not isinstance(value, bool)]
    dtypes = {dtype for dtype in map(asked_dtype, asked) if dtype is not None}
    source, input_fact = input, fact(input)
    if not isinstance(input_fact, TensorFact):
        return "its operand is not a tensor"
    if input_fact.dtype == torch.float64 and (is_cast(source) or source.target is in_dtype):
        source = source.args[0]
    if dtypes == {torch.float32} and is_power(source):
        power = raised(*source.args, *source.kwargs.values())
        return power if isinstance(power, Instead) else Instead(torch.pow, power)
    before = fact(source)
    if isinstance(before, TensorFact) and dtypes <= {before.dtype}:
        return {"input": source}
    return changed(input, input_fact.dtype, next(iter(dtypes))) if len(dtypes) == 1 else "it changes the dtype"


def is_cast(node: fx.Node) -> bool:
    """Return whether a node, as the user wrote it, only gives a tensor another dtype."""
    return node.op == "call_method" and node.target in ("to", "type", *CASTS) and bool(node.args) and isinstance(node.args[0], fx.Node)


def is_power(node: fx.Node) -> bool:
    """Return whether a node is a power that PyTorch computes in float64."""
    return node.target in (torch.float_power, "float_power")


def _cast_to(dtype: torch.dtype) -> Callable[..., dict[str, Any] | str | Instead]:
    """Return the adapter of a method that names its dtype, as `Tensor.half` does."""
    return lambda input, **_: _cast(input, dtype)


@lowered(
    function=lambda input: input,
    calls={
        **{form: (lambda input, **_: {"input": input}) for form in _PASSING},  # one for each, as above
        **dict.fromkeys(("to", "type", "type_as"), _cast),
        **{name: _cast_to(dtype) for name, dtype in CASTS.items()},
    },
    traits=frozenset({Trait.HOMOGENEOUS, Trait.REARRANGES, Trait.VIEWS}),
    moves=True,
    idle=lambda arguments: True,
    demand=Same(),
)
@sampled("clone(x).relu()", "positive(x).relu()", "(+x).relu()", "x.contiguous().relu()", "x.cpu().relu()", "{nn.Identity()}(x).relu()")
@sampled("x.to(torch.float32).relu()", "x.to(x).relu()", "x.type(torch.float32).relu()", "x.type_as(x).relu()", "x.float().relu()")
@sampled("x.double().float().relu()")
def identity(lowering: Lowering, input: Quantized) -> Quantized:
    """Return the input itself."""
    return input


def rank_of(input: Any) -> int:
    """Return the number of dimensions of a node's tensor."""
    return len(shape_of(input))


def with_dims(input: Any, *dims: Any, **keywords: Any) -> dict[str, Any]:
    """Return the canonical arguments of a permutation: its dimensions as a list, counted from the front."""
    return {"input": input, "dims": [dim % rank_of(input) for dim in keywords.get("dims", listed(dims))]}


def _swapped(input: Any, one: int, other: int) -> dict[str, Any]:
    dims = list(range(rank_of(input)))
    dims[one], dims[other] = dims[other], dims[one]
    return {"input": input, "dims": dims}


def _reversed(input: Any) -> dict[str, Any]:
    return {"input": input, "dims": list(reversed(range(rank_of(input))))}


def _moved(input: Any, source: Any, destination: Any) -> dict[str, Any]:
    """torch.movedim: the dimensions `source` become the dimensions `destination`; the others keep their order."""
    rank = rank_of(input)
    sources, destinations = ([d % rank for d in listed([dims])] for dims in (source, destination))
    rest = iter(dim for dim in range(rank) if dim not in sources)
    source_of = dict(zip(destinations, sources, strict=True))
    return {"input": input, "dims": [source_of[dim] if dim in source_of else next(rest) for dim in range(rank)]}


def _property(input: Any, name: str) -> dict[str, Any] | str:
    if not isinstance(fact(input), TensorFact) or name not in ("T", "H", "mT", "mH"):
        return f"the attribute {name} is not an operator"
    return _reversed(input) if name == "T" else _swapped(input, -1, -2)


@lowered(
    calls={
        builtins.getattr: _property,
        **function_and_method(with_dims, "permute"),
        **function_and_method(_reversed, "t"),
        **function_and_method(lambda input, dim0, dim1: _swapped(input, dim0, dim1), "transpose", "swapdims"),
        **function_and_method(lambda input, axis0, axis1: _swapped(input, axis0, axis1), "swapaxes"),
        **function_and_method(_moved, "movedim", "moveaxis"),
        **function_and_method(lambda input: _swapped(input, -1, -2), "adjoint"),
    },
    traits=frozenset({Trait.REARRANGES, Trait.VIEWS}),
    moves=True,
    idle=lambda arguments: arguments["dims"] == sorted(arguments["dims"]),
    demand=Same(),
)
@sampled("permute(x, (0, 2, 3, 1))", "x.permute(0, -1, 1, 2)", "transpose(x, 1, -1)", "swapdims(x, 1, 2)", "swapaxes(x, 2, 3)", "x.mT")
@sampled("movedim(x, 1, -1)", "moveaxis(x, (1, 2), (3, 1))", "adjoint(x)", "x.flatten(1).T")
@sampled("t(x)", x=(8,))
def permute(lowering: Lowering, input: Quantized, dims: list[int]) -> Quantized:
    """Return the elements with dimensions in another order."""
    return input.with_value(lowering.call(shape.permute, input.value, dims))


@lowered(
    adapt=with_dims,
    calls={
        **function_and_method(lambda input: {"input": input, "dims": [1]}, "fliplr"),
        **function_and_method(lambda input: {"input": input, "dims": [0]}, "flipud"),
    },
    moves=True,
    refuses=fixed_along("dims", "it reverses the batch"),
    demand=Same(),
)
@sampled("flip(x, [1, -1])", "x.flip(2)", "fliplr(x)", "flipud(x.transpose(0, 1))")
def flip(lowering: Lowering, input: Quantized, dims: list[int]) -> Quantized:
    """Return the elements in reverse order along `dims`."""
    value = input.value
    for dim in dims:
        value = selected(lowering, value, dim, reversed(range(known_size(input.shape[dim]))), f"indices{dim}")
    return input.with_value(value)


def _rolled(input: Any, shifts: Any, dims: Any = None) -> dict[str, Any] | str:
    rolled = listed([() if dims is None else dims])
    if not rolled:
        return "it rolls the flattened tensor"
    return {"input": input, "shifts": [shifts] if isinstance(shifts, int) else list(shifts), "dims": [d % rank_of(input) for d in rolled]}


@lowered(
    adapt=_rolled,
    moves=True,
    refuses=(numeric("shifts", because="its shifts are computed"), fixed_along("dims", "it rolls along a size that varies")),
    demand=Same(),
    samples=(sample(input=(3, 6, 6), shifts=[1, -2], dims=[2, 3]),),
)
def roll(lowering: Lowering, input: Quantized, shifts: list[int], dims: list[int]) -> Quantized:
    """Shift the elements by `shifts` along `dims`, cyclically, as torch.roll.

    Crop the two parts of each dimension, and concatenate them in the other order.
    """
    value = input.value
    for shift, dim in zip(shifts, dims, strict=True):
        size = known_size(input.shape[dim])
        if size and shift % size:
            cut = size - shift % size
            ends = [lowering.call(shape.crop, value, [dim], [a], [b], [1]) for a, b in ((cut, size), (0, cut))]
            value = lowering.call(shape.concatenate, ends, dim)
    return input.with_value(value)


def _rearrange(lowering: Lowering, input: Quantized, trailing: int, split: list[Any], order: list[int], joined: list[Any]) -> Quantized:
    """Split the last `trailing` dimensions into the sizes `split`, permute the sizes by `order`, and merge to the sizes `joined`.

    The dimensions before them are flattened into one, so that no more than one size varies.
    """
    before = sizes_of(lowering, input.value, input.shape[: len(input.shape) - trailing])
    value = lowering.call(shape.reshape, input.value, [-1, *split])
    value = lowering.call(shape.permute, value, [0, *(position + 1 for position in order)])
    return input.with_value(lowering.call(shape.reshape, value, [*before, *joined]))


def _trailing(lowering: Lowering, input: Quantized, count: int) -> list[Any]:
    """Return the last sizes, numbers or read at run time."""
    trailing = enumerate(input.shape[-count:], len(input.shape) - count)
    return [size if isinstance(size, int) else lowering.size(input.value, dim) for dim, size in trailing]


def _refuses(start: int) -> tuple[Guard, Guard]:
    """Refuse an operator that rearranges channels, dimension `start`, of a number that varies, or a batch after it."""
    first = f"the size of dimension {start} is not fixed"
    bounded = needs("it rearranges the batch", lambda arguments: None not in map(largest_size, shape_of(arguments["input"])[start:]))
    return bounded, needs(first, lambda arguments: isinstance(shape_of(arguments["input"])[start], int))


def _onnx_shuffle(c: Call) -> str:
    shape = shape_of(c.node)
    if len(shape) != 4 or (c.images_alone and known_size(shape[1]) % 4):  # bernoulli2's returns fours of channels
        return c.exported()
    return c.do("DepthToSpace", c.input, blocksize=c["upscale_factor"], mode="CRD")


@lowered(demand=Same(), carries=("input",), refuses=_refuses(-3), onnx=_onnx_shuffle, samples=(sample(input=(8, 2, 3), upscale_factor=2),))
def pixel_shuffle(lowering: Lowering, input: Quantized, upscale_factor: int) -> Quantized:
    """Channels moved into blocks of `upscale_factor`² pixels."""
    factor = upscale_factor
    channels, height, width = _trailing(lowering, input, 3)
    channels //= factor * factor
    joined = [channels, lowering.times(height, factor), lowering.times(width, factor)]
    return _rearrange(lowering, input, 3, [channels, factor, factor, height, width], [0, 3, 1, 4, 2], joined)


@lowered(
    demand=Same(),
    carries=("input",),
    refuses=fixed_sizes("it rearranges sizes that vary", start=-3),
    samples=(sample(input=(3, 6, 6), downscale_factor=3),),
)
def pixel_unshuffle(lowering: Lowering, input: Quantized, downscale_factor: int) -> Quantized:
    """Blocks of `downscale_factor`² pixels moved into channels."""
    factor = downscale_factor
    channels, height, width = known_sizes(input.shape[-3:])
    height, width = height // factor, width // factor
    joined = [channels * factor * factor, height, width]
    return _rearrange(lowering, input, 3, [channels, height, factor, width, factor], [0, 2, 4, 1, 3], joined)


@lowered("native_channel_shuffle", demand=Same(), carries=("input",), refuses=_refuses(1), samples=(sample(input=(6, 2, 2), groups=2),))
def channel_shuffle(lowering: Lowering, input: Quantized, groups: int) -> Quantized:
    """Return the channels of `groups` groups in turn."""
    channels, *spatial = _trailing(lowering, input, len(input.shape) - 1)
    order = [1, 0, *range(2, 2 + len(spatial))]
    split = [groups, channels // groups, *spatial]
    return _rearrange(lowering, input, len(input.shape) - 1, split, order, [channels, *spatial])


# ---- Pieces of the batch and repetitions of its items: several images of one sample, stacked along the batch ---------
def pieces_of(whole: Size, start: Size, size: Size) -> tuple[int, int] | None:
    """Return the number of pieces of length `size` in `whole`, and the index of the piece at `start`; None if they vary with the batch."""
    if not isinstance(whole, BatchDim) or not isinstance(size, BatchDim) or size.coefficient < 1 or size.coefficient.denominator != 1:
        return None
    begin = start if isinstance(start, BatchDim) else BatchDim(Fraction(0), Fraction(start))
    count, number = whole.coefficient / size.coefficient, begin.coefficient / size.coefficient
    exact = whole.offset == begin.offset == size.offset == 0 and count.denominator == number.denominator == 1
    return (int(count), int(number)) if exact and number < count else None


@lowered(
    function=lambda input, dim, count, number: torch.unflatten(input, dim, (count, -1)).select(dim, number),
    moves=True,
    refuses=(one_varying, result_varying),
    demand=Same(),
)
@sampled("torch.cat((x, x.relu())).chunk(2)[1]", within=LIMITED)
def piece(lowering: Lowering, input: Quantized, dim: int, count: int, number: int) -> Quantized:
    """Return one of `count` pieces of equal size along a dimension."""
    before, after = input.shape[:dim], input.shape[dim + 1 :]
    value = lowering.call(shape.reshape, input.value, [*before, count, -1, *after])
    value = lowering.call(shape.crop, value, [dim], [number], [number + 1], [1])
    return input.with_value(lowering.call(shape.reshape, value, [*before, -1, *after]))


@lowered(
    function=lambda input, dim, repeats: input.repeat_interleave(repeats, dim),
    moves=True,
    refuses=(one_varying, result_varying),
    demand=Same(),
)
@sampled("x.repeat_interleave(2, 0)")
def interleave(lowering: Lowering, input: Quantized, dim: int, repeats: int) -> Quantized:
    """Repeat each item along a dimension this many times, one after another."""
    before, after = input.shape[:dim], input.shape[dim + 1 :]
    value = lowering.call(shape.reshape, input.value, [*before, -1, 1, *after])
    value = lowering.call(shape.tile, value, [*[1] * (dim + 1), repeats, *[1] * len(after)])
    return input.with_value(lowering.call(shape.reshape, value, [*before, -1, *after]))
