"""Steps of transformers in few passes give what the primitives give, one by one: bits forward, gradients backward."""

import copy
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.bpu import CHIP, REAL, SHIFT
from fxquant.backends.cpu import native
from fxquant.backends.cpu.training import NativeNumbers
from fxquant.numerics import grids
from fxquant.numerics.grids import ACTIVATION_TYPES, INT8, INT16, UINT8, Grid, IntType, Ratio, table
from fxquant.ops.elementwise.table import _made, _plain
from fxquant.primitives import elementwise, pool, product
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.observers import MinMaxObserver, MovingAverageMinMaxObserver
from fxquant.quantization.quantizer import Quantizer
from fxquant.training import fused_elementwise, fused_layers
from tests.shared.contract import compiled
from tests.shared.networks import members, to_train

pytestmark = pytest.mark.skipif(isinstance(native.joining_library(), str), reason="a C compiler was not found")

TOLERANCE = 1e-6


@members(lambda: dict(
    norm=nn.LayerNorm(24), norm2=nn.LayerNorm(24), qkv=nn.Linear(24, 72), out=nn.Linear(24, 24), up=nn.Linear(24, 48),
    down=nn.Linear(48, 24), places=nn.Parameter(0.1 * torch.randn(1, 20, 24)),
))  # fmt: skip
def Block(self, x: Tensor) -> Tensor:
    x = x.transpose(1, 2) + self.places  # no layout that passes take
    q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4).unbind(0)
    weights = torch.softmax(q @ k.transpose(-2, -1) * 12**-0.5, -1)
    x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
    x = x + self.down(F.gelu(self.up(self.norm2(x))))
    return (x * torch.sigmoid(x.mean(1, keepdim=True)))[:, 1:]


def prepared_on(target: str) -> tuple[fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 24, 20)
    prepared = compiled(Block().eval(), [x], target).prepared
    return to_train(prepared), x


def step(model: fx.GraphModule, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    output = model(x)
    (output * torch.linspace(-1, 1, 24)).sum().backward()
    return output.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_near(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= TOLERANCE * max(float(other.abs().max()), 1e-30)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("target", "frozen"), [("bayes-e", False), ("bernoulli2", False), ("nash-e", True), ("nash-e", False), ("x86", False)]
)
def test_a_fused_step_is_the_primitives(target: str, frozen: bool) -> None:
    own, x = prepared_on(target)
    if frozen:
        fxq.freeze(own)
    reference = copy.deepcopy(own)
    for batch in (x, 1.5 * x):  # the second saturates
        result, gradients = step(own, batch)
        with fused_layers.unfused():
            wanted, expected = step(reference, batch)
        assert torch.equal(result, wanted)
        largest = max(float(each.abs().max()) for each in expected)
        assert largest > 0
        assert len(gradients) == len(expected)
        assert all(float((a - b).abs().max()) <= 2 * TOLERANCE * largest for a, b in zip(gradients, expected, strict=True))
        for (name, one), other in zip(own.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), name
    fxq.set_state(own, "validate")
    with torch.no_grad():
        validated = own(x)
        with fused_layers.unfused():
            assert torch.equal(validated, own(x))


# ---- accumulators -----------------------------------------------------------------------------------------------------
class Calling:
    """A composer that calls the primitives at once."""

    def call(self, primitive: Any, *arguments: Any) -> Tensor:
        return primitive(*arguments)

    def constant(self, role: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value

    def offset(self, grid: Grid) -> tuple[int, ...]:
        return ()


def whole(shape: tuple[int, ...], magnitude: int, seed: int) -> Tensor:
    """Return integers of the whole range, a third at its ends."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randint(-magnitude, magnitude, shape, generator=generator).float()
    choice = torch.randint(0, 6, shape, generator=generator)
    return torch.where(choice == 0, -float(magnitude), torch.where(choice == 1, float(magnitude - 1), value)).requires_grad_()


def aligned(arithmetic: Arithmetic, value: Tensor, ratio: float, wide: bool, deferred: bool) -> Any:
    composer = Deferring() if deferred else Calling()
    return arithmetic.align(composer, value, Ratio((torch.tensor(ratio),)), INT16 if wide else INT8, "", wide)


class Deferring(Calling):
    def call(self, primitive: Any, *arguments: Any) -> Any:
        return fused_elementwise.Deferred(primitive, arguments)


def accumulators(arithmetic: Arithmetic, deferred: bool) -> Iterator[tuple[str, Any, list[Tensor], Tensor]]:
    """Accumulators of every form, the tensors they are of, and what one of their steps is worth."""

    def call(primitive: Any, *arguments: Any) -> Any:
        return fused_elementwise.Deferred(primitive, arguments) if deferred else primitive(*arguments)

    a, b = whole((3, 7, 40), 2**15, 1), whole((3, 7, 40), 2**15, 2)
    row, small = whole((3, 7, 1), 2**15, 3), whole((3, 7, 40), 2**7, 4)
    other = whole((3, 7, 40), 2**7, 5)
    step = torch.tensor(2.0**-22, dtype=torch.float64)
    yield "product", call(elementwise.multiply, a, b, True), [a, b], step
    yield "narrow product", call(elementwise.multiply, small, other, False), [small, other], step * 2**15
    yield "of rows", call(elementwise.multiply, row, a, True), [a, row], step
    yield "square", call(elementwise.multiply, a, a, True), [a], step
    strided = whole((3, 40, 7), 2**15, 6)
    yield "strided", call(elementwise.multiply, strided.transpose(1, 2), b, True), [strided, b], step
    images, gates = whole((2, 5, 12, 12), 2**7, 7), whole((2, 5, 1, 1), 2**7, 8)
    yield "of images", call(elementwise.multiply, images, gates, False), [images, gates], step * 2**15
    one, two = (aligned(arithmetic, value, ratio, True, deferred) for value, ratio in ((a, 2.0**14 / 1.37), (row, 2.0**14)))
    yield "difference", call(elementwise.subtract, one, two), [a, row], step
    one, two = (aligned(arithmetic, value, ratio, False, deferred) for value, ratio in ((small, 2.0**14), (other, 2.0**14 / 3.3)))
    yield "sum", call(elementwise.add, call(elementwise.negate, one), two), [small, other], step * 2**9
    constant = torch.randint(-(2**20), 2**20, (1, 7, 40), generator=torch.Generator().manual_seed(9)).double().requires_grad_()
    yield (
        "constant",
        call(elementwise.add_constant, aligned(arithmetic, small, 2.0**14, False, deferred), constant),
        [small, constant],
        step * 2**9,
    )
    yield "one", small, [small], step * 2**22
    weight, bias = whole((40,), 2**7, 10), torch.randint(-(2**20), 2**20, (40,)).double().requires_grad_()
    each = step * 2**7 * torch.rand(40, generator=torch.Generator().manual_seed(11)).double().add(0.5)
    torch.manual_seed(12)
    yield "channels", call(product.scale_channels_wide, a, weight, bias, 0), [a, weight, bias], each


@pytest.mark.parametrize("arithmetic", [CHIP, SHIFT, REAL], ids=lambda arithmetic: arithmetic.name)
@pytest.mark.parametrize("clamp", [None, (0.0, 53.3)])
@pytest.mark.parametrize("type", [INT8, INT16], ids=str)
def test_a_join_is_its_primitives(arithmetic: Arithmetic, clamp: tuple[float, float] | None, type: Any) -> None:
    grid = Grid(type, torch.tensor(0.93 if type is INT8 else 0.0037))
    low, high = grid.bounds if clamp is None else (0, grid.bound(clamp[1], grid.high))
    forms = list(accumulators(arithmetic, True))
    torch.manual_seed(0)
    for (name, deferred, tensors, step), (_, plain, references, _) in zip(forms, accumulators(arithmetic, False), strict=True):
        join = fused_elementwise.join_of(deferred)
        assert join is not None, name
        with torch.no_grad():
            exact = arithmetic.requantize(Calling(), plain, Ratio((step.float(),), (grid.scale,)), low, high, grid)
            constants = fused_layers.Constants()
            arithmetic.requantize(constants, None, Ratio((step.float(),), (grid.scale,)), low, high, grid)
        limits = (-math.inf, math.inf) if clamp is None else clamp
        how = constants.rounded(grid.bounds, limits, grid.scale)
        integers, real = fused_elementwise.joined(join, how, step.float().double())
        assert torch.equal(integers, exact), name
        assert torch.equal(real, grid.dequantize(exact)), name
        assert not bool((torch.signbit(real) & (real == 0)).any())
        with torch.no_grad():
            assert torch.equal(fused_elementwise.joined(join, how, step.float().double())[0], exact), name
            dims = (0, 1) if step.numel() > 1 else tuple(range(plain.dim()))
            wanted = torch.stack((plain.double().amin(dims), plain.double().amax(dims))).view(2, -1)
            assert torch.equal(fused_elementwise.ends(join), wanted), name

        value = surrogate(name, arithmetic, references) * step.float().double()
        value = value.to(plain.dtype) if clamp is None else value.to(plain.dtype).clamp(*clamp)
        expected = fused_layers.on_grid(value, exact, grid.scale, grid.bounds)
        weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(13))
        wanted_gradients = torch.autograd.grad((expected * weights).sum(), references)
        differentiable = torch.autograd.grad((integers * weights).sum(), tensors, create_graph=True)
        both = torch.autograd.grad((integers * weights).sum() + (real * weights).sum(), tensors)
        for result, again, reference in zip(both, differentiable, wanted_gradients, strict=True):
            assert float(reference.abs().max()) > 0, name
            assert_near(again.detach(), reference)
            assert_near(result, reference * (1 + grid.scale))


def surrogate(name: str, arithmetic: Arithmetic, tensors: list[Tensor]) -> Tensor:
    """The accumulator without its roundings, float64."""

    def factor(ratio: float, wide: bool) -> float:
        call = aligned(arithmetic, tensors[0], ratio, wide, True)
        number = float(call.arguments[1])
        return number if arithmetic is REAL else number * 2.0 ** -int(call.arguments[2])

    first, *rest = (tensor.double() for tensor in tensors)
    if name == "square":
        return first * first
    if name == "strided":
        return first.transpose(1, 2) * rest[0]
    if name == "difference":
        return first * factor(2.0**14 / 1.37, True) - rest[0] * factor(2.0**14, True)
    if name == "sum":
        return rest[0] * factor(2.0**14 / 3.3, False) - first * factor(2.0**14, False)
    if name == "constant":
        return first * factor(2.0**14, False) + rest[0]
    if name == "one":
        return first
    return first * rest[0] + (rest[1] if name == "channels" else 0.0)


def test_what_has_no_pass_is_composed() -> None:
    a, row, column = whole((4, 8, 16), 100, 0), whole((1, 1, 16), 100, 1), whole((1, 8, 1), 100, 1)

    def joins(*operands: Tensor) -> bool:
        return fused_elementwise.join_of(fused_elementwise.Deferred(elementwise.multiply, (*operands, False))) is not None

    assert joins(a, row.detach())
    assert not any((joins(a, row), joins(a, column), joins(a[:, :0], a[:, :0])))  # a gradient over rows; columns; nothing
    assert all(fused_elementwise.join_of(alone) is None for alone in (whole((2, 3), 100, 0), torch.empty(0, 3), a.double()))
    with fused_layers.unfused():
        assert fused_elementwise.join_of(a) is None


# ---- tables -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("function", "name", "type"), [(F.gelu, "gelu", "int8"), (F.gelu, "gelu", "uint8"), (torch.exp, "exp", "int16")])
def test_a_table_is_looked_up_in_one_pass(function: Any, name: str, type: str) -> None:
    kind = ACTIVATION_TYPES[type]
    input = Grid(kind, torch.tensor(4.0 / kind.magnitude), 93 if kind.affine else 0)
    output = Grid(INT8, torch.tensor(0.02))
    value = torch.cat((torch.arange(input.low, input.high + 1), torch.randint(input.low, input.high, (70000,)))).float().requires_grad_()
    entries = _made(name, 1.0, 0.0, (), _plain(input), _plain(output), False)
    points = fused_elementwise.integers_of(value, input)
    assert torch.equal(points, torch.arange(input.low, input.high + 1).double())
    curve = fused_elementwise.curve_of(function, input, True, points)
    integers, real = fused_elementwise.looked_up(value, input, curve, entries, output)
    exact = elementwise.lookup(value.detach(), entries, input.low)
    assert torch.equal(integers, exact)
    assert torch.equal(real, output.dequantize(exact))
    assert torch.equal(fused_elementwise.occurring(value[:1000], points), torch.isin(points, value[:1000].double()))
    if type == "int16":
        part = value.detach()[30000:40000]  # none of the random ones
        points = fused_elementwise.integers_of(part, input)
        assert float(points[0]) == float(part.min()) > input.low
        table = _made(name, 1.0, 0.0, (), _plain(input), _plain(output), False, points)
        again, _ = fused_elementwise.looked_up(part, input, fused_elementwise.curve_of(function, input, False, points), table, output)
        assert torch.equal(again, exact[30000:40000])
    expected = fused_layers.on_grid(function(input.dequantize(value)), exact, output.scale, output.bounds)
    weights = torch.randn(value.shape)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), value)
    (again,) = torch.autograd.grad((integers * weights).sum(), value, create_graph=True)
    (result,) = torch.autograd.grad((integers * weights).sum() + (real * weights).sum(), value)
    assert_near(again.detach(), wanted)
    assert_near(result, wanted * (1 + output.scale))
    few = value.detach()[::997]
    assert torch.equal(_made(name, 1.0, 0.0, (), _plain(input), _plain(output), False, few.double()).float(), exact[::997])


@pytest.mark.parametrize(("name", "offset"), [("rsqrt", 1e-5), ("log", 0.0), ("sqrt", -0.01)])
def test_where_a_function_has_no_value_it_is_not_asked(name: str, offset: float) -> None:
    from fxquant.ops.elementwise.table import UNARY, WITHOUT_NEGATIVE

    input, output = Grid(INT16, torch.tensor(3e-5)), Grid(INT16, torch.tensor(1e-3))
    function, exact = UNARY[name]
    assert name in WITHOUT_NEGATIVE
    slow = table(lambda x: exact(x + offset), input, output, lambda x: function(x + offset))
    assert torch.equal(_made(name, 1.0, offset, (), _plain(input), _plain(output), False), slow)


def test_the_largest_of_all_is_a_pool() -> None:
    value = torch.randint(-3, 3, (50, 1, 9)).float()
    actual, wanted = (value.clone().requires_grad_() for _ in range(2))
    largest = pool.max_pool(actual, [9], [9], [0], [0], [1])
    expected = F.max_pool1d(wanted, 9)
    assert torch.equal(largest, expected)
    weights = torch.randn(50, 1, 1)
    assert torch.equal(*(torch.autograd.grad((y * weights).sum(), x)[0] for y, x in ((largest, actual), (expected, wanted))))


# ---- marks and numbers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("without", [0, 1, 7, 900])
def test_marks_come_back(without: int) -> None:
    inside = torch.ones(1013, dtype=torch.uint8)
    inside[torch.randperm(1013)[:without]] = 0
    inside = inside.as_strided((1013, 1), (1, 1013))
    kept = fused_layers.kept_mask(inside, without)
    assert kept is None if not without else kept is not None and kept.dtype == (torch.int32 if without < 32 else torch.uint8)
    opened = fused_layers.opened_mask(kept, torch.empty_like(inside, device="meta"))
    assert opened is None if not without else opened is not None and torch.equal(opened, inside)
    with mock.patch.object(fused_layers.MASKS, "known", []):
        plain = fused_layers.kept_mask(inside, without)
        assert plain is None if kept is None else torch.equal(plain, kept)  # type: ignore[arg-type]
        again = fused_layers.opened_mask(plain, torch.empty_like(inside, device="meta"))
        assert again is None if not without else again is not None and torch.equal(again, inside)


def test_constants_in_c_are_those_of_tensors() -> None:
    scales = torch.cat((torch.rand(40) * 10.0 ** torch.randint(-9, 4, (40,)), torch.tensor([1.0, 0.5, 2.0**-40, 3.0, 1e9])))
    ratios = [Ratio((scale, torch.tensor(by)), (torch.tensor(by**2),)) for scale in (scales[:40], *scales) for by in (0.0371, 1.0)]
    kinds = [(32, False, False), (48, False, False), (32, True, False), (32, True, True), (16, False, False)]  # bits, a layer, wide

    def constants(ratio: Ratio) -> list[Tensor]:
        tensors = [*ratio.mantissa(15, 31), *ratio.mantissa(15, 31, carries=False)]
        widths = ((arithmetic.widths[dtype.name], dtype) for arithmetic, dtype in ((CHIP, INT8), (CHIP, INT16), (SHIFT, INT8)))
        return tensors + [each for own, dtype in widths for kind in kinds for each in vars(own.constants(ratio, dtype, *kind)).values()]

    with mock.patch.object(NativeNumbers, "constants", autospec=True, side_effect=NativeNumbers.constants) as in_c:
        actual = [constants(ratio) for ratio in ratios]
    assert in_c.call_count == len(ratios) * 3 * len(kinds)
    with mock.patch.object(grids.OFFERS, "known", []):
        for ratio, own in zip(ratios, actual, strict=True):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(own, constants(ratio), strict=True)), ratio.numerators


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_a_scale_follows_as_tensors_do(observer: Any, share: float, dtype: IntType) -> None:
    own = Quantizer(dtype, observer())
    own.observe(torch.cat([torch.tensor([-1.0, 0.7]), torch.full((1000,), 0.7)]))  # many at an end, as affine scales note
    own.update_scale()
    own.narrow(share)  # of the range, as where an observer clips
    other = copy.deepcopy(own)
    torch.manual_seed(0)
    for index in range(50):
        value = torch.randn(100) * 10.0 ** float(torch.randn(()))
        own.follow(value.double() if index % 3 == 0 else value)
        with mock.patch("fxquant.quantization.observers.ranges.moved_range", return_value=None):
            other.follow(value.double() if index % 3 == 0 else value)
        for one, reference in zip(own.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, reference)
    with pytest.raises(fxq.errors.CalibrationError):
        own.follow(torch.tensor([1.0, math.nan]))
    unseen = Quantizer(dtype, observer())  # has a scale, and no range that could grow
    unseen.assign(torch.tensor(0.5))
    unseen.follow(torch.tensor([-1.0, 2.0]))
    assert float(unseen.scale) == pytest.approx(3 / 255 if dtype.affine else 2 / 127.5)
