"""Requantize elementwise accumulators of two tensors by fused kernels, without materializing the accumulators.

There are three forms: a product of two activations, a sum of terms on a common scale, and a factor of every channel. The calls of
primitives that compute one are deferred (`Deferred`) until it is requantized. If they have one of these forms (`Join`), and a backend
offers kernels for it, these are three: one finds the ends of the accumulators, one computes the integers and the dequantized tensor,
one is backward. Saved for backward are the operands of a product, and a saturation mask if any elements have no gradient. All else is
composed of the primitives.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.grids import Grid, ends_of
from fxquant.primitives import PRIMITIVES, Role, elementwise, role_of
from fxquant.support import Offers
from fxquant.training import fused_layers
from fxquant.training.fused_layers import Gradients, Rounded


@dataclass(frozen=True)
class Deferred:
    """A deferred call of a primitive, whose arguments may be deferred calls as well.

    `slope` is the gradient of the result to the first argument, if it is not that of the primitive: see `Lowering.multiplied`.
    """

    primitive: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    slope: float | None = None


_MADE = frozenset({Role.ALIGNMENT, Role.ADDITION, Role.CHANNEL_SCALING, Role.MULTIPLICATION})


def defers(primitive: Callable[..., Tensor], arguments: Sequence[Any]) -> bool:
    """Return whether a call may be deferred: the primitive's role is in `_MADE`, and an operand is deferred, or large with kernels."""
    if role_of(primitive) not in _MADE:
        return False
    return any(isinstance(a, Deferred) or (isinstance(a, Tensor) and a.numel() >= SMALLEST and offered(a) is not None) for a in arguments)


class Layout(NamedTuple):
    """The index of an operand's element for a row and a column: (row mod rows) · stride + column · step."""

    rows: int
    stride: int
    step: int


ALONE = Layout(1, 0, 0)  # of one number


class Join(NamedTuple):
    """An accumulator: a · b + c, or sign_a · round(a · factor_a) + sign_b · round(b · factor_b) + c."""

    a: Tensor  # a, b: float32 tensors of integers; a has the shape of the result, b may be smaller, or absent from a sum
    b: Tensor | None
    c: Tensor | None  # float64 tensor of integers, or None
    product: bool  # whether it is the product
    wide: bool  # whether its numbers are float64, else float32
    down: bool = True  # whether the terms of a sum are rounded down; else to the nearest, half to even
    each: bool = False  # whether b and c have one element for each column, and the requantization's constants too
    factors: tuple[float, float] = (1.0, 1.0)
    slopes: tuple[float, float] = (1.0, 1.0)  # the gradients of the terms of a sum: their factors before rounding
    signs: tuple[float, float] = (1.0, 1.0)
    columns: int = 1
    of_b: Layout = ALONE
    of_c: Layout = ALONE

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.a.numel() // self.columns

    @property
    def same(self) -> bool:
        """Whether it is a square."""
        return self.product and self.a is self.b


def join_of(value: Tensor | Deferred) -> Join | None:
    """Return the form of an accumulator; None if it has none of these forms."""
    form = _form(value)
    if form is None or not fused_layers.plain(form.a, form.b) or (form.c is not None and type(form.c) is not Tensor):
        return None
    join = _laid_out(form)
    return None if join is None or join.a.numel() < SMALLEST or offered(join.a) is None else join


def _form(value: Tensor | Deferred) -> Join | None:
    if isinstance(value, Tensor):
        return Join(value, None, None, product=False, wide=False)
    primitive, arguments = value.primitive, value.arguments
    if primitive is elementwise.multiply:
        a, b, wide = (*arguments, False)[:3]  # `wide` may be left out
        return Join(a, b, None, product=True, wide=wide) if isinstance(a, Tensor) and isinstance(b, Tensor) else None
    if role_of(primitive) is Role.CHANNEL_SCALING:
        a, weight, bias, trailing = arguments
        if not isinstance(a, Tensor) or a.dim() == 0 or trailing != 0 or not weight.numel() == a.shape[-1] > 1:
            return None
        c = torch.zeros(a.shape[-1], dtype=torch.float64, device=a.device) if bias is None else bias.double()
        return Join(a, weight, c, product=True, wide=PRIMITIVES[primitive].wide, each=True)
    return _sum(value)


class _Term(NamedTuple):
    """An operand times a factor, with a sign; rounded down to whole steps or not, wide or not. Its gradient is the slope, with the sign."""

    operand: Tensor
    factor: float
    slope: float
    sign: float
    down: bool
    wide: bool


def _sum(value: Deferred) -> Join | None:
    """Return the form of a sum of one or two terms, and at most one constant; None for any other value."""
    terms: list[_Term] = []
    constants: list[Tensor] = []
    if not _gather(value, 1.0, terms, constants) or len(terms) > 2 or len(constants) > 1 or len({each[4:] for each in terms}) > 1:
        return None
    (a, factor, slope, sign, down, wide), *rest = terms
    b, other, others, against = rest[0][:4] if rest else (None, 0.0, 0.0, 1.0)
    c = constants[0].double() if constants else None
    return Join(a, b, c, product=False, wide=wide, down=down, factors=(factor, other), slopes=(slope, others), signs=(sign, against))


def _gather(value: Any, sign: float, terms: list[_Term], constants: list[Tensor]) -> bool:
    """Return whether a value is a sum; add its terms and constants to the lists."""
    # Not a function inside of `_sum`: one that calls itself would keep the tensors until garbage is collected.
    if not isinstance(value, Deferred):
        return False
    primitive, arguments = value.primitive, value.arguments
    if role_of(primitive) is Role.ALIGNMENT:
        fixed = primitive is elementwise.align_fixed
        operand, wide = arguments[0], bool(arguments[-1]) if isinstance(arguments[-1], bool) else False
        if not isinstance(operand, Tensor) or arguments[1].numel() != 1:
            return False
        factor = float(arguments[1]) * 2.0 ** -int(arguments[2]) if fixed else float(arguments[1])
        terms.append(_Term(operand, factor, factor if value.slope is None else value.slope, sign, fixed, wide))
        return True
    if primitive is elementwise.negate:
        return _gather(arguments[0], -sign, terms, constants)
    if primitive is elementwise.add_constant:
        constants.append(arguments[1])
        return sign > 0 and _gather(arguments[0], sign, terms, constants)
    second = -sign if primitive is elementwise.subtract else sign
    return _gather(arguments[0], sign, terms, constants) and _gather(arguments[1], second, terms, constants)


def _laid_out(join: Join) -> Join | None:
    """Return the form as rows and columns: along the columns, a smaller operand has one element, or all. None where it cannot be."""
    shape = join.a.shape
    if not all(each is None or each.numel() for each in (join.a, join.b)):
        return None
    if any(each is not None and not _within(each.shape, shape) for each in (join.b, join.c)):
        if join.b is None or join.each or not all(each is None or _within(each.shape, join.b.shape) for each in (join.a, join.c)):
            return None
        shape = join.b.shape
        join = join._replace(a=join.b, b=join.a, factors=join.factors[::-1], slopes=join.slopes[::-1], signs=join.signs[::-1])
    smaller = [each for each in (join.b, join.c) if each is not None and each.shape != shape]
    if not shape:
        return None
    ones = (count for count, size in enumerate(reversed(smaller[0].shape)) if size != 1) if smaller else iter((0,))
    trailing = next(ones, len(shape))  # the dimensions that have one element
    if not trailing:
        trailing = 1
        while not smaller and trailing < len(shape) and shape[len(shape) - trailing :].numel() < COLUMNS:
            trailing += 1
    join = join._replace(columns=shape[len(shape) - trailing :].numel())
    of_b, of_c = (ALONE if each is None else _layout(each.shape, shape, trailing, join.columns) for each in (join.b, join.c))
    if of_b is None or of_c is None:
        return None
    join = join._replace(of_b=of_b, of_c=of_c)
    if join.b is not None and join.b.requires_grad and torch.is_grad_enabled() and not join.each and join.of_b.rows != join.rows:
        return None  # its gradient is a sum over rows
    return join


def _within(own: torch.Size, shape: torch.Size) -> bool:
    """Return whether the shape `own` broadcasts to `shape`."""
    return len(own) <= len(shape) and all(size in (1, other) for size, other in zip(reversed(own), reversed(shape), strict=False))


def _layout(own: Sequence[int], shape: Sequence[int], trailing: int, columns: int) -> Layout | None:
    """Return the layout with which an operand of sizes `own` broadcasts to `shape`; None if no kernel has it.

    The last `trailing` dimensions must all equal those of `shape`, or all be 1. The earlier ones, without leading 1s, must equal those of
    `shape`.
    """
    own = [*[1] * (len(shape) - len(own)), *own]
    split = len(shape) - trailing
    after, before = own[split:], own[:split]
    whole = list(after) == list(shape[split:])
    if not whole and any(size != 1 for size in after):
        return None
    while before and before[0] == 1:
        before = before[1:]
    if list(before) != list(shape[split - len(before) : split]):
        return None
    return Layout(math.prod(before), columns if whole else 1, int(whole))


COLUMNS = 256  # in a row, or more, where it may be


SMALLEST = 2**8  # elements of a tensor
OFFERS = Offers[Any]()  # the kernels of `joining.c`


def offered(value: Tensor) -> Any:
    """Return the kernels for a tensor; None if no backend offers any."""
    return OFFERS.first(value) if fused_layers.admitted(value) else None


def _operand(value: Tensor, join: Join) -> Tensor:
    """Return an operand as it is saved for backward: in int16 where that holds it; unchanged for a square, whose operand is kept anyway."""
    if join.same:
        return value
    low, high = (float(end) for end in torch.aminmax(value))
    return value.to(torch.int16) if low >= -(2**15) and high < 2**15 else value


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, c: Tensor | None, join: Join, how: Rounded, ratio: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        integers, real, inside, without = offered(a).forward(join, how, ratio, True)
        saved = (_operand(a, join), None if a is b else b) if join.product else (None, None)
        ctx.save_for_backward(*saved, None if inside is None else fused_layers.kept_mask(inside, without))
        empty = torch.empty(0, device=a.device, dtype=torch.float32)
        ctx.join = join._replace(a=empty, b=None, c=None)
        ctx.shapes = a.shape, None if b is None else b.shape, None if c is None else c.shape
        ctx.same, ctx.c_dtype = join.same, None if c is None else c.dtype
        ctx.scale, ctx.ratio = how.scale, ratio
        return integers, real

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 6
        a, b, mask = ctx.saved_tensors
        join, ratio, (shape, of_b_shape, of_c_shape) = ctx.join, ctx.ratio, ctx.shapes
        gradient: Tensor = of_integers if of_integers is not None else of_real  # type: ignore[assignment]
        inside = fused_layers.opened_mask(mask, torch.empty(shape, device="meta", dtype=torch.float32))
        a = gradient if a is None else a.float()
        if ctx.same:
            b, ratio = a, 2 * ratio
        join = join._replace(a=a, b=b)
        needs_a, needs_b, needs_c = ctx.needs_input_grad[:3]
        needs_b = needs_b and not ctx.same
        passes = None if torch.is_grad_enabled() else offered(gradient)
        arguments = join, ctx.scale, ratio, inside, of_integers, of_real
        of_a, of_b, of_c = _back(*arguments, shape) if passes is None else passes.backward(*arguments)
        if of_c is None and needs_c:
            of_c = of_a / (join.slopes[0] * join.signs[0])
        to_b = of_b.reshape(of_b_shape) if of_b is not None and needs_b else None
        to_c = of_c.sum_to_size(of_c_shape).to(ctx.c_dtype) if of_c is not None and needs_c else None
        return of_a if needs_a else None, to_b, to_c, None, None, None


def _back(
    join: Join, scale: Tensor, ratio: Tensor, inside: Tensor | None, of_integers: Tensor | None, of_real: Tensor | None,
    shape: Sequence[int],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the kernel `backward` with PyTorch's operators: differentiable, on every device."""
    whole = Gradients(of_integers, of_real).of_steps(scale)
    of = (whole if inside is None else torch.where(inside.view(shape) > 0, whole, 0.0)) / scale
    of = (of * ratio.to(of.dtype)).reshape(join.rows, join.columns)

    def of_rows(gradient: Tensor) -> Tensor:
        return gradient if join.of_b.step else gradient.sum(1)

    if not join.product:
        first, other = (slope * sign for slope, sign in zip(join.slopes, join.signs, strict=True))
        return (of * first).view(shape), of_rows(of * other), None
    assert join.b is not None
    rows = join.b.reshape(-1, join.columns if join.of_b.step else 1)
    rows = rows.repeat(join.rows // len(rows), 1)
    of_a, of_b = (of * rows).view(shape), of * join.a.reshape(join.rows, join.columns)
    return (of_a, of_b.sum(0), of.sum(0)) if join.each else (of_a, of_rows(of_b), None)


def joined(join: Join, how: Rounded, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of a requantized accumulator, and the dequantized tensor.

    Gradients run through the float value of the accumulator, accumulator · `ratio`, within the fused clamp and the limits of the grid.
    """
    if not torch.is_grad_enabled():
        return offered(join.a).forward(join, how, ratio, False)[:2]  # type: ignore[no-any-return]
    return _Joined.apply(join.a, join.b, join.c, join, how, ratio)  # type: ignore[no-untyped-call,no-any-return]


def ends(join: Join) -> Tensor:
    """Return the least and the largest accumulator, float64; for each column where constants are per column."""
    with torch.no_grad():
        return offered(join.a).ends(join)  # type: ignore[no-any-return]


# ---- functions by a table, with one fused kernel forward and one backward --------------------------------------------
FEW = 2**8  # integers of a grid: all of them are in its tables


class Curve(NamedTuple):
    """A function at all integers of a grid from `low` on: its values and slopes, float32."""

    values: Tensor
    slopes: Tensor | None
    low: int


def curve_of(function: Callable[[Tensor], Tensor], grid: Grid, slopes: bool, integers: Tensor) -> Curve:
    """Return the values of a function at these consecutive float64 integers of a grid, and its slopes, 0 where they are not finite."""
    points, low = grid.dequantize(integers.float()), int(integers[0])
    if not slopes:
        with torch.no_grad():
            return Curve(function(points), None, low)
    with torch.enable_grad():
        points.requires_grad_()
        values = function(points)
        derivative = torch.autograd.grad(values.sum(), points)[0] if values.requires_grad else torch.zeros_like(points)
    return Curve(values.detach(), torch.where(torch.isfinite(derivative), derivative, 0.0), low)


def tabulated(value: Tensor, grid: Grid) -> bool:
    """Return whether a table of a tensor's grid is small enough to pay, and a backend offers kernels for the tensor."""
    few = grid.high - grid.low < min(value.numel(), 2**16)
    return few and value.numel() >= SMALLEST and not grid.scale.requires_grad and offered(value) is not None


def integers_of(value: Tensor, grid: Grid) -> Tensor:
    """Return all integers of a small grid, as float64; for a larger grid the integers from the tensor's minimum to its maximum."""
    low, high = grid.bounds
    if high - low >= FEW:
        low, high = map(int, ends_of(value))
    return torch.arange(low, high + 1, dtype=torch.float64, device=value.device)


def occurring(value: Tensor, integers: Tensor) -> Tensor:
    """Return which of these consecutive integers a tensor holds, as booleans. It must hold no others."""
    with torch.no_grad():
        return offered(value).occurs(value, int(integers[0]), int(integers[-1]))  # type: ignore[no-any-return]


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, table: Tensor, slopes: Tensor, low: int, scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        integers, real, places = offered(value).look_up(value, table, low, scale, True)
        ctx.save_for_backward(places, slopes)
        ctx.scale = scale
        return integers, real

    @staticmethod
    def backward(ctx: Any, of_integers: Tensor | None, of_real: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_integers is None and of_real is None:
            return (None,) * 5
        places, slopes = ctx.saved_tensors
        gradient: Tensor = of_integers if of_integers is not None else of_real  # type: ignore[assignment]
        passes = None if torch.is_grad_enabled() else offered(gradient)
        if passes is not None:
            return passes.look_back(places, slopes, ctx.scale, of_integers, of_real), None, None, None, None
        return Gradients(of_integers, of_real).of_steps(ctx.scale) * slopes[places.long() & 0xFFFF], None, None, None, None


def looked_up(value: Tensor, input: Grid, curve: Curve, table: Tensor, output: Grid) -> tuple[Tensor, Tensor]:
    """Return the table's integers and the dequantized tensor, float32; gradients run along the curve, as far as the grid reaches."""
    table = table.float()
    if curve.slopes is None or not torch.is_grad_enabled():
        return offered(value).look_up(value, table, curve.low, output.scale, False)[:2]  # type: ignore[no-any-return]
    steps = curve.values / output.scale
    inside = (steps >= output.low) & (steps <= output.high)
    slopes = torch.where(inside, curve.slopes, 0.0) / output.scale * input.scale
    return _LookedUp.apply(value, table, slopes, curve.low, output.scale)  # type: ignore[no-untyped-call,no-any-return]


# ---- operands of integer products, saved for backward in as many bits as they need, mostly a quarter of the memory ---
PRODUCTS = (Role.LINEAR, Role.MATRIX_PRODUCT)  # of convolutions a step would cost 3 to 7 % more, and they are within float's memory anyway
SAVED_FROM = 2**12  # elements of a tensor
_DTYPES = (torch.int8, torch.uint8, torch.int16)


def kept_narrow(primitive: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a context in which a primitive may be called: if it is one of `PRODUCTS`, its operands are saved in a narrow dtype."""
    record = PRIMITIVES[primitive]
    narrow = record.role in PRODUCTS and not record.wide and torch.is_grad_enabled() and fused_layers.admitted(*arguments[:2])
    return torch.autograd.graph.saved_tensors_hooks(_narrow, _wide) if narrow else contextlib.nullcontext()


def _narrow(value: Tensor) -> Tensor:
    """Convert float32 integers to the first of `_DTYPES` that holds them all, with the same strides; small or other tensors unchanged."""
    if value.dtype != torch.float32 or value.numel() < SAVED_FROM:
        return value
    flat = torch.empty_like(value, dtype=torch.int8, device="meta").stride() == value.stride()
    passes = offered(value) if flat else None
    if passes is not None:
        narrow = passes.to_bytes(value.as_strided((value.numel(),), (1,)))
        if narrow is not None:
            return narrow.as_strided(value.shape, value.stride())  # type: ignore[no-any-return]
    low, high = (float(end) for end in torch.aminmax(value))
    limits = map(torch.iinfo, _DTYPES)
    return value.to(next((dtype for dtype, ends in zip(_DTYPES, limits, strict=True) if ends.min <= low and high <= ends.max), value.dtype))


def _wide(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.float()
