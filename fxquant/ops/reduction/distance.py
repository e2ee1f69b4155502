"""Composites of sums, products and quotients: fused arithmetic, distances, similarity, angles, gates. They are 16 bits wide inside.

Where an inner tensor is a sum of squares or of products, 8 bits will do on a target that has no more.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ops.core import INNER, WIDE, Builder, Fixed, are_fixed, composite, fact, is_parameter
from fxquant.ops.core.declare import fixed, needs, nodes, one_of
from fxquant.ops.core.samples import COMPOSED, NORMED, POSITIVE, sample, sampled
from fxquant.ops.elementwise.arithmetic import add, mul, sub, true_divide
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.table import SHIFTED, tabled
from fxquant.ops.indexing.index import getitem
from fxquant.ops.movement.pad import pad
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.extremum import maximum
from fxquant.ops.reduction.progression import along, length_of


@composite(samples=(sample(input=(3, 6), tensor1=(3, 6), tensor2=(3, 6), value=-0.7),))
def addcmul(build: Builder, input: fx.Node, tensor1: fx.Node, tensor2: fx.Node, value: float = 1) -> Any:
    """input + value · tensor1 · tensor2."""
    return build(add, input, build(mul, tensor1, tensor2, demand=INNER), value)


@composite(samples=(sample(over=POSITIVE, input=(3, 6), tensor1=(3, 6), tensor2=(3, 6), value=0.5),))
def addcdiv(build: Builder, input: fx.Node, tensor1: fx.Node, tensor2: fx.Node, value: float = 1) -> Any:
    """input + value · tensor1 / tensor2."""
    return build(add, input, build(true_divide, tensor1, tensor2, demand=INNER if is_parameter(tensor2) else WIDE), value)


@composite(operands=("input", "end", "weight"), samples=(sample(input=(3, 6), end=(3, 6), weight=0.3),))
def lerp(build: Builder, input: fx.Node, end: fx.Node, weight: Any) -> Any:
    """input + weight · (end - input)."""
    difference = build(sub, end, input, demand=INNER)
    if isinstance(weight, fx.Node):
        return build(add, input, build(mul, difference, weight, demand=INNER))
    return build(add, input, difference, weight)


TWO = (sample(input=(3, 6), other=(3, 6)),)


@composite(refuses=nodes("input", "other"), samples=TWO)
def hypot(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute √(input² + other²)."""
    squares = (build(torch.square, value, demand=WIDE) for value in (input, other))
    return build(torch.sqrt, build(add, *squares, demand=WIDE))


@tabled(lambda x: math.log1p(math.exp(-abs(x))))
@sampled("torch.logaddexp(x, y)", within=COMPOSED)
def log_of_one_and_exponential(input: Tensor) -> Tensor:
    """Compute log(1 + exp(-|input|))."""
    return torch.log1p(torch.exp(-input.abs()))


@composite(refuses=nodes("input", "other"), samples=TWO)
def logaddexp(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute log(exp(input) + exp(other))."""
    more = build(log_of_one_and_exponential, build(sub, input, other, demand=INNER), demand=INNER)
    return build(add, build(maximum, input, other, demand=INNER), more)


NOT_ZERO = 2.0**-24  # a divisor of 0, at the origin alone, whose angle is 0 then


@tabled(lambda x: math.atan2(x, 1 - abs(x)))
@sampled("torch.atan2(x, y)", within=NORMED, share=0.02)
def angle_of_share(input: Tensor) -> Tensor:
    """Return the angle in ±π/2 of a point whose ordinate is this share of |ordinate| + |abscissa|."""
    return torch.atan2(input, 1 - input.abs())


@composite("arctan2", refuses=nodes("input", "other"), samples=TWO)
def atan2(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Return the angle of the point (other, input).

    By the ordinate's share t of |y| + |x|, which is bounded; on the left it is mirrored: ±π minus the angle.
    """
    length = build(add, build(torch.abs, input, demand=WIDE), build(torch.abs, other, demand=WIDE), demand=WIDE)
    inverse = build(SHIFTED.function, length, "reciprocal", 1.0, NOT_ZERO, {}, demand=WIDE)
    angle = build(angle_of_share, build(mul, input, inverse, demand=WIDE), demand=WIDE)
    half_turn = build(where, build(torch.lt, input, 0.0), -math.pi, math.pi, demand=WIDE)
    return build(where, build(torch.lt, other, 0.0), build(sub, half_turn, angle, demand=WIDE), angle)


@composite(
    refuses=one_of("p", 1, 2, because=lambda p: f"its norm is the {p}-norm, and 1 and 2 are computed in integers"),
    samples=(sample(x1=(4, 6), x2=(3, 6)), sample(x1=(4, 6), x2=(3, 6), p=1.0)),
)
def cdist(build: Builder, x1: fx.Node, x2: fx.Node, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Any:
    """Return the distance of every row of x1 from every row of x2."""
    rows = build(getitem, x1, [*[slice(None)] * (len(build.fact(x1).shape) - 1), None, slice(None)])
    columns = build(getitem, x2, [*[slice(None)] * (len(build.fact(x2).shape) - 2), None, slice(None), slice(None)])
    difference = build(sub, rows, columns, demand=INNER)
    if p == 1:
        return build(sum, build(torch.abs, difference, demand=INNER), [-1], False)
    return build(torch.sqrt, build(sum, build(torch.square, difference, demand=WIDE), [-1], False, demand=WIDE))


def _repeats(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    one, other, dim = fact(arguments["x1"]).shape, fact(arguments["x2"]).shape, arguments["dim"]
    alike = (dim < 0 or len(one) == len(other)) and one[dim] == other[dim]
    return None if alike else "one of its operands is repeated along the dimension of its sums"


@composite(refuses=_repeats, samples=(sample(within=NORMED, x1=(3, 8), x2=(3, 8)), sample(within=NORMED, x1=(3, 8), x2=(3, 8), dim=-1)))
def cosine_similarity(build: Builder, x1: fx.Node, x2: fx.Node, dim: int = 1, eps: float = 1e-8) -> Any:
    """Compute Σ x1·x2 / (‖x1‖ ‖x2‖) along a dimension."""
    product = build(sum, build(mul, x1, x2, demand=WIDE), [dim], False, demand=WIDE)
    for operand in (x1, x2):
        total = build(sum, build(torch.square, operand, demand=WIDE), [dim], False, demand=WIDE)
        inverse = build(SHIFTED.function, total, "rsqrt", 1.0, max(float(eps), NOT_ZERO) ** 2, {}, demand=WIDE)
        product = build(mul, product, inverse, demand=WIDE if operand is x1 else None)
    return product


@composite(
    refuses=needs(
        "its operand has no channels of a fixed number",
        lambda arguments: len(fact(arguments["input"]).shape) > 2 and are_fixed(fact(arguments["input"]).shape[1:2]),
    ),
    samples=(sample(input=(4, 5, 5), size=3, alpha=0.5), sample(input=(4, 5, 5), size=2)),
)
def local_response_norm(build: Builder, input: fx.Node, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    """Compute input / (k + alpha · the mean of the squares of `size` neighbouring channels) ** beta."""
    channels = length_of(input, 1)
    squares = build(torch.square, input, demand=WIDE)
    around = [0, 0] * (len(build.fact(input).shape) - 2) + [size // 2, (size - 1) // 2]
    padded = build(pad, squares, around, "constant", 0.0)
    total: Any = None
    for first in range(size):
        window = along(build, padded, 1, slice(first, first + channels))
        total = window if total is None else build(add, total, window, demand=WIDE)
    factor = build(SHIFTED.function, total, "pow", float(alpha) / size, float(k), {"exponent": -float(beta)}, demand=WIDE)
    return build(mul, input, factor)


GATE = Fixed(2.0**-15, "int16", otherwise=Fixed(2.0**-7, "int8"))  # from 0 to 1


@composite(refuses=fixed(because="it splits the batch, whose size is not fixed"), samples=(sample(within=NORMED, input=(3, 6, 6), dim=-2),))
def glu(build: Builder, input: fx.Node, dim: int = -1) -> Any:
    """Return the first half along a dimension times the sigmoid of the second."""
    half = length_of(input, dim) // 2
    first, second = (along(build, input, dim, slice(start, start + half)) for start in (0, half))
    return build(mul, first, build(torch.sigmoid, second, demand=GATE))
