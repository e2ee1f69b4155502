"""Writing into a view of a tensor: the written value is spread out to where the view has its elements, and chosen there."""

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional
from fxquant.ir.graph import Size, TensorFact, fact, shape_of
from fxquant.ops.core import ALIGNED, EXACT, ROUNDED, Builder, Trait, sampled
from fxquant.ops.core.casting import made_number
from fxquant.ops.core.declare import are_fixed, composite, function_and_method, listed, needs
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.indexing.index import WHOLE, getitem
from fxquant.ops.movement.repeating import repeated, why_not_repeated
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.ops.reduction.progression import along


def _places(shape: tuple[Size, ...], way: Any) -> Tensor | None:
    """Return the flat indices, int64, of a view's elements in the base tensor, or in each item of the batch; None if items differ.

    They are in the shape of the view, which, of a batch, has a first dimension of 1.
    """
    if are_fixed(shape):
        return _view(shape, way)
    rest: tuple[Any, ...] = shape[1:]
    if not are_fixed(rest):
        return None
    one, two = (_view((count, *rest), way) for count in (1, 2))
    if one is None or two is None or one.shape[:1] != (1,) or two.shape != (2, *one.shape[1:]):
        return None
    return one if torch.equal(two, torch.cat((one, one + math.prod(rest)))) else None


def reach(shape: tuple[Size, ...], way: Any, dim: int) -> tuple[int, int] | None:
    """Return the range (start, stop) of indices along `dim` of the base tensor that a view reads; None if it depends on the batch size."""
    nodes: list[fx.Node] = []
    fx.map_arg(way, nodes.append)
    places, size = None if nodes else _places(shape, way), shape[dim]
    after: tuple[Any, ...] = shape[dim + 1 :]
    if places is None or not places.numel() or not isinstance(size, int) or not are_fixed(after):
        return None
    along = places // math.prod(after) % size
    return int(along.min()), int(along.max()) + 1


def _view(shape: Any, way: Any) -> Tensor | None:
    numbers = torch.arange(math.prod(shape), device="cpu").reshape(shape)
    try:
        view: Tensor = functional.view_of(numbers, way)
    except (RuntimeError, IndexError, TypeError):
        return None
    return view


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    nodes: list[fx.Node] = []
    fx.map_arg(arguments["way"], nodes.append)
    value_fact = fact(arguments["value"]) if isinstance(arguments["value"], fx.Node) else None
    if nodes or not isinstance(value_fact, TensorFact):
        return "the region it writes is computed"
    shape = shape_of(arguments["input"])
    places = _places(shape, arguments["way"])
    if places is None or places.numel() == 0:
        return "it writes to a part of the batch"
    start = not are_fixed(shape)
    return None if value_fact.shape[start:] == places.shape[start:] else "the value and the region differ in shape"


@composite(
    function=lambda input, value, way: functional.write(input, value, way),
    calls={
        functional.write: lambda tensor, value, way: {"input": tensor, "value": value, "way": way},
        **function_and_method(
            lambda input, src, offset=0, dim1=0, dim2=1: {"input": input, "value": src, "way": [("diagonal", (offset, dim1, dim2), {})]},
            "diagonal_scatter",
        ),
    },
    carries=("input", "value"),
    traits=frozenset({Trait.COLLECTS}),
    refuses=_refuses,
)
@sampled("diagonal_scatter(x, y[..., 0], 0, 2, 3)", "x.diagonal_scatter(y[..., :5, 0], 1, 2, 3)", within=ROUNDED)
@sampled("z = x * 0.5; z.narrow(1, 1, 2).copy_(x[:, :2]); z.diagonal(dim1=2, dim2=3).fill_(0.3); return z", within=ALIGNED)
def write(build: Builder, input: fx.Node, value: fx.Node, way: Any) -> Any:
    """Return a copy of `input` in which the view of it that `way` leads to (`functional.write`) holds `value`."""
    shape = build.fact(input).shape
    places = _places(shape, way)
    assert places is not None
    rest = [size for size in shape if isinstance(size, int)]
    batch = [-1] * (len(shape) - len(rest))
    source = torch.full((math.prod(rest),), -1, device="cpu", dtype=torch.int64)
    source[places.flatten()] = torch.arange(places.numel(), device="cpu")
    mask = build.constant((source >= 0).reshape([1] * len(batch) + rest))
    number = made_number(value)
    if number is not None:
        return build(where, mask, number, input)
    flat = build(reshape, value, [*batch, places.numel()])
    spread = build(getitem, flat, [*[WHOLE] * len(batch), source.clamp(min=0).tolist()])
    return build(where, mask, build(reshape, spread, [*batch, *rest]), input)


# ---- Composites that bring tensors to one shape, and read a tensor by strides ----------------------------------------
def _listed(*tensors: Any, **named: Any) -> dict[str, Any]:
    """Return the canonical arguments, {"tensors": [...], ...}, of a call with tensors by position or in one list."""
    return {"tensors": listed(tensors), **{name: value for name, value in named.items() if value is not None}}


@composite(
    operands=("tensors",),
    function=lambda tensors: tuple(torch.broadcast_tensors(*tensors)),  # type: ignore[no-untyped-call]
    adapt=_listed,
    refuses=lambda node, arguments: why_not_repeated([shape_of(tensor) for tensor in arguments["tensors"]], fact(node)[0].shape),
)
@sampled("broadcast_tensors(x, y[:, :1])[1]", within=EXACT)
def broadcast_tensors(build: Builder, tensors: list[fx.Node]) -> Any:
    """Return the tensors, each repeated to the shape that they broadcast to."""
    common = fact(build.node)[0].shape
    return tuple(repeated(build, tensor, tuple(common)) for tensor in tensors)


@composite(
    operands=("tensors",),
    function=lambda tensors, indexing="ij": tuple(torch.meshgrid(*tensors, indexing=indexing)),
    adapt=_listed,
    refuses=needs(
        "one of its dimensions is the batch, whose size is not fixed",
        lambda arguments: all(are_fixed(shape_of(tensor)) for tensor in arguments["tensors"]),
    ),
)
@sampled("torch.meshgrid(x.flatten()[:2], y.flatten()[:3], indexing='xy')[0]", within=EXACT)
def meshgrid(build: Builder, tensors: list[fx.Node], indexing: str = "ij") -> Any:
    """Return each 1-d tensor laid along a different dimension of the result and repeated along the others, as torch.meshgrid."""
    places = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        places[:2] = [1, 0]
    results = []
    for tensor, place, result in zip(tensors, places, fact(build.node), strict=True):
        shape = [1] * len(tensors)
        (shape[place],) = numbers(build.fact(tensor).shape) or [1]
        results.append(repeated(build, build(reshape, tensor, shape), tuple(result.shape)))
    return tuple(results)


def _strided_places(arguments: dict[str, Any]) -> Tensor:
    """Return the place of each element of the result."""
    places = torch.tensor(arguments["storage_offset"] or 0, device="cpu", dtype=torch.int64)
    for count, step in zip(arguments["size"], arguments["stride"], strict=True):
        places = places.unsqueeze(-1) + torch.arange(count, device="cpu") * step
    return places


def _refuses_as_strided(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    input, steps = arguments["input"], [*arguments["size"], *arguments["stride"], arguments["storage_offset"] or 0]
    if input.op != "placeholder":
        return "it reads the memory of its operand, and only the strides of model inputs are known"
    sizes = shape_of(input)
    if not sizes or not are_fixed([*steps, *sizes[1:]]):
        return "its sizes, strides or offset are computed, or the shape of its input is not fixed"
    count = math.prod(size for size in sizes if isinstance(size, int))
    places = _strided_places(arguments)
    return None if places.numel() and int(places.max()) < count else "it reads more than the first sample's memory"


@composite(
    function=lambda input, size, stride, storage_offset=None: torch.as_strided(input.contiguous(), size, stride, storage_offset),
    by_name=False,
    calls=function_and_method(None, "as_strided"),
    refuses=_refuses_as_strided,
)
@sampled("as_strided(x, (2, 3), (3, 1), 4)", "x.as_strided((2, 2, 2), (1, 6, 36))", within=EXACT)
def as_strided(build: Builder, input: fx.Node, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return elements of an input by their places in memory, where the first sample's elements are contiguous."""
    places = _strided_places({"size": size, "stride": stride, "storage_offset": storage_offset})
    shape = build.fact(input).shape
    if not isinstance(shape[0], int):
        input, shape = along(build, input, 0, slice(0, 1)), (1, *shape[1:])
    flat = build(reshape, input, [math.prod(numbers(shape))])
    return build(reshape, build(getitem, flat, [places.flatten().tolist()]), list(size))
