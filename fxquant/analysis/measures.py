"""Measures of an operator at its place in a graph: the quantities that a target's limits are about.

Windows have a file of their own. A measure returns nothing where it does not apply: to another operator, or to a size that depends on the
batch.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from torch import fx

from fxquant.analysis import windows
from fxquant.analysis.site import MEASURES, Site, known, measure
from fxquant.ir.facts import Size, TensorFact
from fxquant.ir.graph import annotation, fact, is_parameter
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops.core.boundary import DEQUANTIZE
from fxquant.ops.elementwise.activation import clamp

__all__ = ["MEASURES", "Site", "windows"]


def is_power_of_two(value: Fraction) -> bool:
    """Return whether a positive number is a power of two, or one divided by one."""
    return all(part & (part - 1) == 0 for part in (value.numerator, value.denominator))


# ---- channels and weights -----------------------------------------------------------------------------------------------


@measure("channels")
def _channels(site: Site) -> list[Any]:
    """Return the channels of every activation that it reads."""
    shapes = [fact(operand).shape for operand in site.operands]
    return known(shape[1] for shape in shapes if len(shape) > 1)


@measure("output channels")
def _output_channels(site: Site) -> list[Any]:
    return known(site.result[1:2])


@measure("output channels inside the model")
def _inner_channels(site: Site) -> list[Any]:
    return _output_channels(site) if _inner_readers(site) else []


def _inner_readers(site: Site) -> list[fx.Node]:
    """Who reads the result, besides the output."""
    return [user for user in site.node.users if user.op != "output" and user.target is not DEQUANTIZE.function]


@measure("number of readers inside the model")
def _readers(site: Site) -> list[Any]:
    return [len(_inner_readers(site))]


@measure("channels of a kernel without groups")
def _plain_channels(site: Site) -> list[Any]:
    return [site.shape("weight")[1]] if site.arguments.get("groups") == 1 else []


@measure("channels of a kernel with groups")
def _group_channels(site: Site) -> list[Any]:
    return [site.shape("weight")[1]] if site.arguments.get("groups", 1) > 1 else []


@measure("groups")
def _groups(site: Site) -> list[Any]:
    return [site.arguments["groups"]]


@measure("weights for one output channel")
def _weight_size(site: Site) -> list[Any]:
    weight, groups = site.shape("weight"), site.arguments["groups"]
    inputs = known(site.shape()[1:2])
    return [math.prod(known(weight[2:])) * inputs[0] // groups] if inputs else []


@measure("features")
def _features(site: Site) -> list[Any]:
    return known(site.shape("weight"))


@measure("matrix sizes")
def _matrix(site: Site) -> list[Any]:
    return [*known(site.shape("input")[-2:]), *known(site.shape("other")[-2:])]


# ---- shapes -------------------------------------------------------------------------------------------------------------


@measure("rank")
def _rank(site: Site) -> list[Any]:
    ranks = {len(fact(operand).shape) for operand in site.operands} | (
        {len(site.result)} if isinstance(fact(site.node), TensorFact) else set()
    )
    return sorted(ranks)


@measure("batch")
def _batch(site: Site) -> list[Any]:
    return known(site.result[:1])


@measure("sizes")
def _sizes(site: Site) -> list[Any]:
    """Return the sizes of every dimension but the batch, of what it reads and of its result."""
    found = {size for shape in (*(fact(operand).shape for operand in site.operands), site.result) for size in known(shape[1:])}
    return sorted(found)


@measure("bytes")
def _bytes(site: Site) -> list[Any]:
    """Return the bytes of its result; of one item where the batch is not fixed."""
    return [math.prod(known(site.result)) * bits // 8 for bits in _result_bits(site)]


@measure("elements, aligned")
def _aligned(site: Site) -> list[Any]:
    """For each item, in the tighter of the two layouts: channels in fours and columns in eights, or channels in thirty-twos."""
    if len(site.result) != 4:
        return []
    channels, rows, columns = (size if isinstance(size, int) else 1 for size in site.result[1:])
    narrow = _up(channels, 4) * rows * _up(columns, 8)
    return [min(narrow, _up(channels, 32) * rows * columns)]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@measure("number of operands")
def _operand_count(site: Site) -> list[Any]:
    return [len(site.operands)]


@measure("number of constant operands")
def _constants(site: Site) -> list[Any]:
    """Tensors; a number is folded into the scale."""
    values = [site.arguments.get(name) for name in site.operator.operands]
    return [sum(isinstance(value, fx.Node) and is_parameter(value) for value in values)]


@measure("concatenated dimension")
def _joined(site: Site) -> list[Any]:
    return [site.arguments["dim"] % len(site.result)]


@measure("reduced dimension")
def _reduced(site: Site) -> list[Any]:
    dim, rank = site.arguments["dim"], len(site.shape())
    chosen = range(rank) if dim in (None, (), []) else dim if isinstance(dim, list | tuple) else [dim]
    return sorted(int(d) % rank for d in chosen)


@measure("number of reduced dimensions")
def _reduced_count(site: Site) -> list[Any]:
    return [len(_reduced(site))]


@measure("reduced size")
def _reduced_size(site: Site) -> list[Any]:
    return known(site.shape()[d] for d in _reduced(site))


@measure("broadcasting")
def _broadcasting(site: Site) -> list[Any]:
    """Return how the smaller operand's shape is to the result's: "equal", "NC11", "1111", "other"."""
    return [_pattern(fact(operand).shape, site.result) for operand in site.operands]


def _pattern(shape: tuple[Size, ...], result: tuple[Size, ...]) -> str:
    if shape == result:
        return "equal"
    if len(shape) == len(result) == 4 and shape[2:] == (1, 1) and shape[:2] in (result[:2], (1, 1)):
        return "NC11" if shape[:2] == result[:2] else "1111"
    return "other"


@measure("dimension that is broadcast")
def _broadcast_dimensions(site: Site) -> list[Any]:
    found: set[int] = set()
    for operand in site.operands:
        shape = fact(operand).shape
        missing = len(site.result) - len(shape)
        found.update(d + missing for d, size in enumerate(shape) if size != site.result[d + missing])
    return sorted(found)


@measure("number of operands that are broadcast")
def _broadcast_operands(site: Site) -> list[Any]:
    return [sum(fact(operand).shape != site.result for operand in site.operands)]


@measure("place of the batch")
def _batch_place(site: Site) -> list[Any]:
    """Return the position at which a permutation puts dimension 0."""
    dims = site.arguments["dims"]
    return [[int(d) % len(dims) for d in dims].index(0)]


@measure("bounds")
def _bounds(site: Site) -> list[Any]:
    """Return the bounds of a clamp that is an operator by itself, or is fused into one."""
    if site.operator.function is clamp:
        return [(site.arguments["min"], site.arguments["max"])]
    return [] if site.arguments.get("clamp") is None else [tuple(site.arguments["clamp"])]


@measure("resize factor")
def _resize_factor(site: Site) -> list[Any]:
    return [Fraction(a, b) for a, b in zip(known(site.result[2:]), known(site.shape()[2:]), strict=True)]


@measure("resize factor that is not a power of two")
def _odd_factor(site: Site) -> list[Any]:
    return [factor for factor in _resize_factor(site) if not is_power_of_two(factor)]


@measure("approximation")
def _approximation(site: Site) -> list[Any]:
    return [site.arguments["approximate"]]


@measure("image size")
def _image_size(site: Site) -> list[Any]:
    return known(site.shape()[2:])


@measure("image area")
def _image_area(site: Site) -> list[Any]:
    return [math.prod(known(site.shape()[2:]))]


@measure("align_corners")
def _align_corners(site: Site) -> list[Any]:
    return [bool(site.arguments["align_corners"])]


# ---- dtypes -------------------------------------------------------------------------------------------------------------


def _dtype_bits(node: fx.Node) -> list[int]:
    spec = annotation(node)
    known = None if spec is None else ACTIVATION_TYPES.get(spec.dtype or "")
    return [] if known is None else [known.bits]


def _result_bits(site: Site) -> list[int]:
    return _dtype_bits(site.node)


@measure("bits")
def _bits(site: Site) -> list[Any]:
    """Return the bits of what it reads; the result of a sum of products may be wider."""
    return sorted({bits for operand in site.operands for bits in _dtype_bits(operand)})


@measure("bits of the result where it is dilated")
def _bits_dilated(site: Site) -> list[Any]:
    return _result_bits(site) if any(d > 1 for d in site.spatial("dilation")) else []
