"""Composites that bring tensors to one shape, and read a tensor by strides."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import fact, shape_of
from fxquant.ops.core.declare import composite, function_and_method, listed, needs
from fxquant.ops.core.operators import EXACT, Builder, are_fixed, sampled
from fxquant.ops.indexing.index import getitem
from fxquant.ops.movement.repeating import repeated, why_not_repeated
from fxquant.ops.movement.shape import numbers, reshape
from fxquant.ops.reduction.progression import along


def _listed(*tensors: Any, **named: Any) -> dict[str, Any]:
    """Return the canonical arguments for tensors passed by position, or as one list."""
    return {"tensors": listed(tensors), **{name: value for name, value in named.items() if value is not None}}


@composite(
    operands=("tensors",),
    function=lambda tensors: tuple(torch.broadcast_tensors(*tensors)),  # type: ignore[no-untyped-call]
    adapt=_listed,
    refuses=lambda node, arguments: why_not_repeated([shape_of(tensor) for tensor in arguments["tensors"]], fact(node)[0].shape),
)
@sampled("broadcast_tensors(x, y[:, :1])[1]", within=EXACT)
def broadcast_tensors(build: Builder, tensors: list[fx.Node]) -> Any:
    """Return the tensors, each repeated to the shape of all of them."""
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


def _places(arguments: dict[str, Any]) -> Tensor:
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
    places = _places(arguments)
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
    places = _places({"size": size, "stride": stride, "storage_offset": storage_offset})
    shape = build.fact(input).shape
    if not isinstance(shape[0], int):
        input, shape = along(build, input, 0, slice(0, 1)), (1, *shape[1:])
    flat = build(reshape, input, [math.prod(numbers(shape))])
    return build(reshape, build(getitem, flat, [places.flatten().tolist()]), list(size))
