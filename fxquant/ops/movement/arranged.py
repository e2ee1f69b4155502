"""Composites that move and multiply whole tensors: turns, grids, broadcasts, cross and Kronecker products, powers of matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import fact, shape_of
from fxquant.ops.core.declare import composite, function_and_method, listed
from fxquant.ops.core.operators import EXACT, INNER, NORMED, Builder, Same, are_fixed, fixed_along, fixed_sizes, sample, sampled
from fxquant.ops.elementwise.arithmetic import mul, sub
from fxquant.ops.indexing.index import getitem
from fxquant.ops.indexing.reversing import flip
from fxquant.ops.layers.linear import matmul
from fxquant.ops.movement.repeating import repeated, why_not_repeated
from fxquant.ops.movement.shape import MANY_SIZES, numbers, permute, rank_of, reshape, varying_sizes
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.progression import along

MOST_MATRICES = 64  # the largest power of a matrix


ROTATED = (sample(input=(4, 6, 6), k=1, dims=(2, 3)), sample(input=(4, 6, 6), k=-1, dims=(1, 2)))

# ---- turns -----------------------------------------------------------------------------------------------------------


@composite(demand=Same(), refuses=fixed_along("dims", "it rotates the batch"), samples=ROTATED)
def rot90(build: Builder, input: fx.Node, k: int = 1, dims: Any = (0, 1)) -> Any:
    """Return the plane of two dimensions turned by k quarters, from the first towards the second."""
    rank = rank_of(input)
    one, other = (dim % rank for dim in dims)
    if k % 4 == 2:
        return build(flip, input, [one, other])
    order = list(range(rank))
    order[one], order[other] = other, one
    if k % 4 == 1:
        return build(permute, build(flip, input, [other]), order)
    return build(flip, build(permute, input, order), [other]) if k % 4 == 3 else input


# ---- several tensors in one shape ------------------------------------------------------------------------------------


def _refuses_broadcast(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return why_not_repeated([shape_of(tensor) for tensor in arguments["tensors"]], fact(node)[0].shape)


def _refuses_meshgrid(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    fixed = all(are_fixed(shape_of(tensor)) for tensor in arguments["tensors"])
    return None if fixed else "one of its dimensions is the batch, whose size is not fixed"


def _listed(*tensors: Any, **named: Any) -> dict[str, Any]:
    """Tensors by position, or one list of them."""
    return {"tensors": listed(tensors), **{name: value for name, value in named.items() if value is not None}}


@composite(
    operands=("tensors",),
    function=lambda tensors: tuple(torch.broadcast_tensors(*tensors)),  # type: ignore[no-untyped-call]
    adapt=_listed,
    refuses=_refuses_broadcast,
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
    refuses=_refuses_meshgrid,
)
@sampled("torch.meshgrid(x.flatten()[:2], y.flatten()[:3], indexing='xy')[0]", within=EXACT)
def meshgrid(build: Builder, tensors: list[fx.Node], indexing: str = "ij") -> Any:
    """Return each line along a dimension of its own, repeated along the others."""
    places = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        places[:2] = [1, 0]
    found = []
    for tensor, place, known in zip(tensors, places, fact(build.node), strict=True):
        shape = [1] * len(tensors)
        (shape[place],) = numbers(build.fact(tensor).shape) or [1]
        found.append(repeated(build, build(reshape, tensor, shape), tuple(known.shape)))
    return tuple(found)


def _refuses_sum_to_size(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    present, wanted = shape_of(arguments["input"]), shape_of(node)
    return None if varying_sizes(wanted) == varying_sizes(present) <= 1 else "it sums over the batch, whose size is not fixed"


def _summed(input: Any, *sizes: Any, **named: Any) -> dict[str, Any]:
    return {"input": input, "sizes": list(named.get("size", listed(sizes)))}


@composite(function=lambda input, sizes: input.sum_to_size(sizes), adapt=_summed, refuses=_refuses_sum_to_size)
@sampled("x.sum_to_size(x.shape[0], 3, 1, 6)")
def sum_to_size(build: Builder, input: fx.Node, sizes: list[Any]) -> Any:
    """Return the sums over dimensions that are 1, or missing in front, in a shape that the tensor could have been repeated from."""
    present, wanted = build.fact(input).shape, build.fact(build.node).shape
    new = len(present) - len(wanted)
    dims = [dim for dim, size in enumerate(present) if dim < new or (size != 1 and wanted[dim - new] == 1)]
    if not dims:
        return input
    total = build(sum, input, dims, True)
    return build(reshape, total, numbers(wanted)) if new else total


# ---- memory ----------------------------------------------------------------------------------------------------------


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


# ---- products --------------------------------------------------------------------------------------------------------


def _refuses_kron(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    return None if varying_sizes((*shape_of(arguments["input"]), *shape_of(arguments["other"]))) <= 1 else MANY_SIZES


def _crossed(input: Any, other: Any, dim: int | None = None) -> dict[str, Any] | str:
    """torch.cross: along the first dimension of three where none is named, and the sizes are fixed."""
    sizes = shape_of(input)
    if dim is None and not are_fixed(sizes):
        return "it takes the first dimension of size three, which may be the batch; pass dim=…"
    return {"input": input, "other": other, "dim": sizes.index(3) if dim is None else dim}


def _refuses_cross(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    vectors = {shape_of(arguments[name])[arguments["dim"]] for name in ("input", "other")}
    return None if vectors == {3} else "its vectors run along the batch, or have not three elements"


def _refuses_matrix_power(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    n = arguments["n"]
    fits = isinstance(n, int) and 1 <= n <= MOST_MATRICES
    return None if fits else f"its exponent is {n}, and only 1 to {MOST_MATRICES} have an integer form"


@composite(refuses=_refuses_kron)
@sampled("kron(x, torch.tensor([[1.0, -0.5]]))")
def kron(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Return every element of one tensor times the whole of another, block by block."""
    shapes = [numbers(build.fact(value).shape) for value in (input, other)]
    rank = max(map(len, shapes))
    one, two = ([*[1] * (rank - len(shape)), *shape] for shape in shapes)
    rows = build(reshape, input, [size for each in one for size in (each, 1)])
    columns = build(reshape, other, [size for each in two for size in (1, each)])
    blocks = [-1 if -1 in pair else pair[0] * pair[1] for pair in zip(one, two, strict=True)]
    return build(reshape, build(mul, rows, columns), blocks)


@composite(
    adapt=_crossed,
    calls={torch.linalg.cross: lambda input, other, *, dim=-1: {"input": input, "other": other, "dim": dim}},
    refuses=_refuses_cross,
    samples=(sample(input=(3, 6), other=(3, 6), dim=1), sample(input=(6, 3), other=(6, 3), dim=-1)),
)
def cross(build: Builder, input: fx.Node, other: fx.Node, dim: int = -1) -> Any:
    """Return the vector products of vectors of three along a dimension."""
    (one, two), (three, four) = ((along(build, value, dim, [1, 2, 0]), along(build, value, dim, [2, 0, 1])) for value in (input, other))
    return build(sub, build(mul, one, four, demand=INNER), build(mul, two, three, demand=INNER))


@composite(torch.linalg.matrix_power, refuses=(_refuses_matrix_power, fixed_sizes("its matrices are as large as the batch", start=-2)))
@sampled("matrix_power(x, 2)", "torch.linalg.matrix_power(x, 3)", within=NORMED, x=(6, 6))
def matrix_power(build: Builder, input: fx.Node, n: int) -> Any:
    """Return a square matrix times itself, n factors.

    Expand to repeated squares, by the bits of n.
    """
    square, result = input, None
    for bit in range(n.bit_length()):
        if bit:
            square = build(matmul, square, square, demand=INNER)
        if n >> bit & 1:
            result = square if result is None else build(matmul, result, square, demand=INNER)
    return result
