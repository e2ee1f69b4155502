"""Every operator that computes, bit for bit the oracle's: each arithmetic and rounding, int4 to int16 and uint8, on scales that are given.

The operators stand side by side in one model, each an output, so that one compilation holds all of them. What they read lies on
grids of the test's choice, and consists of integers of its choice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.bpu import WIDTHS
from fxquant.ir.integer import qparams
from fxquant.primitives.arithmetic import FixedArithmetic
from fxquant.primitives.quantization import dequantize
from fxquant.target import Target
from tests.shared import oracle
from tests.shared.contract import compiled, graph_values
from tests.shared.networks import members
from tests.shared.oracle import Grid, Nested, Rules, array, at, each, nested, shape_of

FLOOR = Target("floor", "int16 that is rounded down", FixedArithmetic("fixed", final_rounding="floor", widths=WIDTHS), ("int8", "int16"))


class Function(nn.Module):
    """A function of both operands, with the module's own layer or constant."""

    def __init__(self, function: Callable[..., Tensor], layer: Callable[[], nn.Module] | None = None, constant: Any = None) -> None:
        super().__init__()
        self.function, self.layer = function, None if layer is None else layer()
        if constant is not None:
            self.register_buffer("constant", torch.tensor(constant))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function(self, a, b)


class Turned(nn.Module):
    """Moves values, so that the grid of its operand is its own `QConfig.input`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


@members(lambda cases: dict(first=Turned(), second=Turned(), operators=nn.ModuleDict({name: case.made() for name, case in cases.items()})))
def Model(self, x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = self.first(x), self.second(y)
    return [operator(a, b.mT if name == "matmul" else b) for name, operator in self.operators.items()]


@dataclass(frozen=True)
class Known:
    """Arguments of the oracle: centred integers, grids, the rules of the target, and real parameters."""

    a: oracle.Array
    b: oracle.Array
    x: Grid
    y: Grid
    to: Grid
    rules: Rules
    module: Any

    def brought(self, sums: Nested, step: Fraction, clamp: oracle.Clamp | None = None, bits: int = 32, kind: str = "value") -> Nested:
        return each(lambda total: oracle.requantized(total, step, self.to, self.rules, clamp, bits, kind), sums)

    def times(self, number: float) -> Nested:
        return each(lambda q: oracle.times_number(q, Fraction(number), self.x, self.to, self.rules), self.a)

    def mean(self, terms: list[int], window: bool = False) -> int:
        return oracle.averaged(terms, len(terms), self.x, self.to, self.rules, window, image=not window)

    def with_number(self, number: float, factor: float = 1) -> Nested:
        on = Fraction(number), self.x, self.to, self.rules, Fraction(factor)
        return each(lambda q: oracle.added_number(q, *on), self.a)

    def sum(self, alpha: float = 1, clamp: oracle.Clamp | None = None) -> Nested:
        on = self.x, self.y, self.to, self.rules, Fraction(alpha), clamp
        return each(lambda q, r: oracle.added(q, r, *on), self.a, self.b)

    def with_constant(self, constants: list[float], factor: float = 1) -> Nested:
        """One constant per channel, or one for all."""
        exact = [Fraction(constant) for constant in constants]
        on = max(map(abs, exact)), self.x, self.to, self.rules, Fraction(factor)
        shape = shape_of(self.a)
        return nested(shape, lambda index: oracle.added_constant(at(self.a, index), exact[index[1] % len(exact)], *on))

    def layer(self, sums: Callable[[Nested, list[int]], Nested], out: int = 0, **after: Any) -> Nested:
        weight = self.module.layer.weight.detach().transpose(0, out)
        output = oracle.layer(weight.tolist(), self.module.layer.bias.tolist(), self.x, self.rules)
        return oracle.finished(sums(output.weight, output.bias), output, self.x, self.to, self.rules, transposed=out == 1, **after)

    def convolution(self, stride: int, padding: int, groups: int, **after: Any) -> Nested:
        return self.layer(lambda w, b: oracle.convolution(self.a, array(w), array(b), [stride] * 2, [padding] * 2, [1, 1], groups), **after)


@dataclass(frozen=True)
class Case:
    """An operator, and the oracle's result; `own` if its result has a grid of its own, not its operand's."""

    made: Callable[[], nn.Module]
    expected: Callable[[Known], Nested]
    own: bool = True


def plain(function: Callable[[Tensor, Tensor], Tensor], expected: Callable[[Known], Nested], own: bool = True) -> Case:
    return Case(lambda: Function(lambda m, a, b: function(a, b)), expected, own)


SLOPES, OFFSETS, FACTORS = [0.25, -0.7, 1.9], [[[0.3]], [[-7.1]], [[1e-3]]], [[[0.3]], [[-1.1]], [[0.77]]]


def prelu() -> nn.Module:
    built = nn.PReLU(3)
    built.weight.data = torch.tensor(SLOPES)
    return built


def scaled_layer(layer: nn.Module, factor: float) -> nn.Module:
    layer.weight.data *= factor
    return layer


def batch_norm() -> nn.Module:
    """One whose gain is its weight, exactly."""
    built = nn.BatchNorm2d(3, eps=2.0**-10)
    built.running_var.fill_(1 - 2.0**-10)
    built.weight.data, built.bias.data = torch.tensor([0.9, -1.3, 0.05]), torch.tensor([0.2, -0.4, 1.5])
    return built


def slopes_of(facts: Known) -> Nested:
    slopes = [Fraction(value) for value in facts.module.layer.weight.tolist()]
    on = max(map(abs, slopes)), facts.x, facts.to, facts.rules
    return nested(shape_of(facts.a), lambda index: oracle.prelu(at(facts.a, index), slopes[index[1]], *on))


def multiplied(facts: Known) -> Nested:
    products = each(lambda q, r: q * r, facts.a, facts.b)
    return facts.brought(products, facts.rules.product_step(facts.x.scale, facts.y.scale), kind="product")


def averages(facts: Known) -> Nested:
    """A kernel of 3, stride 2, padding 1 that is not counted, ceil mode."""
    sums = oracle.taps(facts.a, [3, 3], [2, 2], [1, 1], [1, 2], [1, 1], 0).sum(-1)
    counts = oracle.window_counts(shape_of(facts.a)[2:], [3, 3], [2, 2], [1, 1], True, False)
    on = facts.x, facts.to, facts.rules, True
    return nested(shape_of(sums), lambda index: oracle.averaged([at(sums, index)], at(counts, index[2:]), *on))


def means(facts: Known) -> Nested:
    """Of windows that differ: 5 by 4 elements become 3 by 3."""
    axes = oracle.adaptive_windows(5, 3), oracle.adaptive_windows(4, 3)

    def element(index: tuple[int, ...]) -> int:
        places = [(row, column) for row in axes[0][index[2]] for column in axes[1][index[3]]]
        total = sum(at(facts.a, (*index[:2], *place)) for place in places)
        return oracle.requantized(total, facts.x.scale / len(places), facts.to, facts.rules)

    return nested((*shape_of(facts.a)[:2], 3, 3), element)


def planes(facts: Known, function: Callable[[list[int]], int]) -> Nested:
    """A function of every plane's elements."""
    return [[function([value for row in plane for value in row]) for plane in sample] for sample in facts.a]


def products(facts: Known) -> Nested:
    """a · bᵀ of every plane."""
    step = facts.rules.product_step(facts.x.scale, facts.y.scale)
    return facts.brought(
        facts.a @ facts.b.swapaxes(2, 3), step, bits=oracle.bits_of_sum(4 * facts.x.magnitude * facts.y.magnitude), kind="matrix"
    )


def joined(facts: Known) -> Nested:
    parts = [
        each(lambda q, on=on: oracle.rescaled(q, on, facts.to, facts.rules), tensor)  # type: ignore[misc]
        for tensor, on in ((facts.a, facts.x), (facts.b, facts.y))
    ]
    return [one + other for one, other in zip(*parts, strict=True)]


def larger(facts: Known) -> Nested:
    to, rules = facts.to, facts.rules
    return each(lambda q, r: max(oracle.rescaled(q, facts.x, to, rules), oracle.rescaled(r, facts.y, to, rules)), facts.a, facts.b)


def smaller(facts: Known) -> Nested:
    return each(lambda q, r: oracle.smaller(q, r, facts.x, facts.y, facts.to, facts.rules), facts.a, facts.b)


def padded(facts: Known) -> Nested:
    """0.3 on every side of the last dimension."""
    margin = oracle.clamp_bound(0.3, float(facts.to.scale), 0, facts.to.low, facts.to.high)
    rows = each(lambda q: oracle.rescaled(q, facts.x, facts.to, facts.rules), facts.a)
    return [[[[margin, *row, margin, margin] for row in plane] for plane in sample] for sample in rows]


def limited(facts: Known) -> Nested:
    low, high = oracle.limits(facts.x, (-0.5, 0.75), facts.rules)
    return each(lambda q: oracle.limited(q, low, high), facts.a)


def table(function: Callable[[float], float]) -> Callable[[Known], Nested]:
    def expected(facts: Known) -> Nested:
        scales = float(facts.x.scale), float(facts.to.scale)
        if facts.rules.measured and not facts.x.wide:
            return each(lambda q: oracle.measured_table(function, facts.x.scale, facts.to, range(q, q + 1))[0], facts.a)
        return each(lambda q: oracle.table(function, *scales, range(q, q + 1), facts.to.low, facts.to.high)[0], facts.a)

    return expected


def moved_clamp(facts: Known) -> Nested:
    """Limits that leave out 0: a table on measured targets."""
    if facts.rules.measured and not facts.x.wide:
        return table(lambda value: min(max(value, 0.25), 1.1))(facts)
    return facts.brought(facts.a, facts.x.scale, (0.25, 1.1))


def leaky(facts: Known) -> Nested:
    slope = Fraction(oracle.float32(0.3))
    if facts.rules.by_layers and not facts.x.wide:
        return each(lambda q: oracle.by_slope(q, slope, facts.x, facts.to, facts.rules, False), facts.a)
    return table(lambda value: value if value > 0 else float(slope) * value)(facts)


def layers(built: Callable[[], nn.Module], expected: Callable[[Known], Nested], function: Any = None) -> Case:
    return Case(lambda: Function(function or (lambda m, a, b: m.layer(a)), built), expected)


def residual(facts: Known) -> Nested:
    return facts.convolution(1, 1, 1, residual=(facts.b, facts.y), clamp=(0.0, None))


def times_constant(facts: Known) -> Nested:
    """A factor for each channel is a layer of one weight for each."""
    return scaled_channels(facts, facts.module.constant.flatten().tolist(), [0.0] * 3)


def scaled_channels(facts: Known, weights: list[float], biases: list[float]) -> Nested:
    output = oracle.layer([[weight] for weight in weights], biases, facts.x, facts.rules)
    sums = nested(shape_of(facts.a), lambda index: at(facts.a, index) * output.weight[index[1]][0] + output.bias[index[1]])
    return oracle.finished(sums, output, facts.x, facts.to, facts.rules)


def added_after(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(m.layer(a) + b)


PLACES = torch.tensor([2, 0, 2])


def brought_together(facts: Known) -> Nested:
    """Of three planes the first and the last at place 2, the second at place 0."""
    sums = [[one[1], each(lambda q: 0, one[1]), each(lambda q, r: q + r, one[0], one[2])] for one in facts.a]
    return facts.brought(sums, facts.x.scale)


CASES: dict[str, Case] = {
    "add": plain(lambda a, b: a + b, lambda k: k.sum()),
    "sub": plain(lambda a, b: a - b, lambda k: k.sum(-1)),
    "add_alpha": plain(lambda a, b: torch.add(a, b, alpha=0.37), lambda k: k.sum(0.37)),
    "sub_alpha": plain(lambda a, b: torch.sub(a, b, alpha=3), lambda k: k.sum(-3)),
    "add_clamp": plain(lambda a, b: (a + b).clamp(-0.5, 1.25), lambda k: k.sum(1, (-0.5, 1.25))),
    "add_number": plain(lambda a, b: a + 0.37, lambda k: k.with_number(0.37)),
    "sub_number": plain(lambda a, b: 3.3 - a, lambda k: k.with_number(3.3, -1)),
    "add_constant": Case(
        lambda: Function(lambda m, a, b: a + m.constant, constant=OFFSETS), lambda k: k.with_constant(k.module.constant.flatten().tolist())
    ),
    "mul": plain(lambda a, b: a * b, multiplied),
    "mul_number": plain(lambda a, b: a * -1.37, lambda k: k.times(-1.37)),
    "mul_constant": Case(lambda: Function(lambda m, a, b: a * m.constant, constant=FACTORS), times_constant),
    "div_number": plain(lambda a, b: a / 3.7, lambda k: k.brought(k.a, k.x.scale / Fraction(3.7))),
    "prelu": layers(prelu, slopes_of),
    "leaky_relu": plain(lambda a, b: F.leaky_relu(a, 0.3), leaky),
    "conv_relu6": layers(
        lambda: scaled_layer(nn.Conv2d(3, 4, 3), 9), lambda k: k.convolution(1, 0, 1, clamp=(0.0, 6.0)), lambda m, a, b: F.relu6(m.layer(a))
    ),
    "nearest": plain(lambda a, b: F.interpolate(a, (10, 2)), lambda k: oracle.resized_nearest(k.a, (10, 2)), False),
    "bilinear": plain(
        lambda a, b: F.interpolate(a, (7, 9), mode="bilinear"), lambda k: oracle.resized_linear(k.a, (7, 9), False, k.rules), False
    ),
    "bilinear_corners": plain(
        lambda a, b: F.interpolate(a, (4, 6), mode="bilinear", align_corners=True),
        lambda k: oracle.resized_linear(k.a, (4, 6), True, k.rules),
        False,
    ),
    "bilinear_halves": plain(
        lambda a, b: F.interpolate(a, scale_factor=2, mode="bilinear"), lambda k: oracle.resized_linear(k.a, (10, 8), False, k.rules), False
    ),
    "bicubic": plain(
        lambda a, b: F.interpolate(a, (7, 3), mode="bicubic"), lambda k: oracle.resized_cubic(k.a, (7, 3), k.x, k.to, k.rules)
    ),
    "area": plain(lambda a, b: F.interpolate(a, (3, 3), mode="area"), means),
    "adaptive_avg_pool_uneven": plain(lambda a, b: F.adaptive_avg_pool2d(a, 3), means),
    "grid_sample": plain(
        lambda a, b: F.grid_sample(a, b[:, :2].permute(0, 2, 3, 1), align_corners=False),
        lambda k: oracle.sampled(k.a, [one[:2] for one in k.b], k.x, k.y, k.rules),
        False,
    ),
    "avg_pool": plain(lambda a, b: F.avg_pool2d(a, 3, 2, 1, True, False), averages),
    "max_pool": plain(
        lambda a, b: F.max_pool2d(a, 2, 1, 1),
        lambda k: oracle.taps(k.a, [2, 2], [1, 1], [1, 1], [1, 1], [1, 1], -(2**20)).max(-1).tolist(),
        False,
    ),
    "mean": plain(lambda a, b: a.mean((2, 3)), lambda k: planes(k, k.mean)),
    "sum": plain(lambda a, b: a.sum((2, 3)), lambda k: k.brought(planes(k, sum), k.x.scale)),
    "amax": plain(lambda a, b: torch.amax(a, 3), lambda k: [[[*map(max, plane)] for plane in sample] for sample in k.a], False),
    "adaptive_avg_pool": plain(
        lambda a, b: F.adaptive_avg_pool2d(a, (1, 2)),
        lambda k: each(
            lambda total: oracle.averaged([total], 10, k.x, k.to, k.rules, True),
            oracle.taps(k.a, [5, 2], [5, 2], [0, 0], [0, 0], [1, 1], 0).sum(-1),
        ),
    ),
    "scatter_add": plain(lambda a, b: torch.zeros_like(a).scatter_add(1, PLACES.view(1, 3, 1, 1).expand_as(a), a), brought_together),
    "index_add": plain(lambda a, b: torch.zeros_like(a).index_add(1, PLACES, a), brought_together),
    "neg": plain(lambda a, b: -a, lambda k: k.times(-1)),
    "stack": plain(lambda a, b: torch.stack((a, b), 1), lambda k: [[one[:3], one[3:]] for one in joined(k)]),
    "cat": plain(lambda a, b: torch.cat((a, b), 1), joined),
    "maximum": plain(torch.maximum, larger),
    "minimum": plain(torch.minimum, smaller),
    "pad": plain(lambda a, b: F.pad(a, (1, 2), value=0.3), padded),
    "pad_zero": plain(lambda a, b: F.pad(a, (1, 0)), lambda k: [[[[0, *row] for row in plane] for plane in one] for one in k.a], False),
    "clamp": plain(lambda a, b: a.clamp(-0.5, 0.75), limited, False),
    "clamp_beside_zero": plain(lambda a, b: a.clamp(0.25, 1.1), moved_clamp),
    "tanh": plain(lambda a, b: torch.tanh(a), table(math.tanh)),
    "exp": plain(lambda a, b: torch.exp(a), table(math.exp)),
    "matmul": plain(lambda a, b: a @ b, products),
    "linear": layers(lambda: nn.Linear(4, 6), lambda k: k.layer(lambda w, b: k.a @ array(w).T + array(b), channels=3)),
    "conv": layers(lambda: nn.Conv2d(3, 4, 3, 2, 1), lambda k: k.convolution(2, 1, 1)),
    "conv_groups": layers(
        lambda: nn.Conv2d(3, 6, 2, groups=3), lambda k: k.convolution(1, 0, 3, clamp=(0.0, 1.0)), lambda m, a, b: m.layer(a).clamp(0, 1)
    ),
    "conv_transpose": layers(
        lambda: nn.ConvTranspose2d(3, 2, 3, 2, 1, 1),
        lambda k: k.layer(lambda w, b: oracle.transposed(k.a, array(w).swapaxes(0, 1), array(b), [2, 2], [1, 1], [1, 1], [1, 1], 1), out=1),
    ),
    "batch_norm": layers(batch_norm, lambda k: scaled_channels(k, k.module.layer.weight.tolist(), k.module.layer.bias.tolist())),
    "residual_in_the_accumulator": layers(lambda: scaled_layer(nn.Conv2d(3, 3, 3, padding=1), 0.2), residual, added_after),
    "residual_after_the_layer": layers(lambda: scaled_layer(nn.Conv2d(3, 3, 3, padding=1), 30), residual, added_after),
}


# ---- the formats ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Format:
    """A target, the dtypes of both operands and of the result, and that of weights."""

    target: Any
    first: str
    second: str
    output: str
    rules: Rules
    weight: str = "int8"

    @property
    def cases(self) -> dict[str, Case]:
        """All but concatenations whose operands have to share one scale; slopes on bernoulli2's chip are on their operand's.

        Functions of 16 bits by segments are compared with the simulator's integers (`test_chip_segments`), and a transposed convolution
        with a result of 16 bits is rounded on a scale of 8 bits first, which calibration chooses.
        """
        left_out = {"cat", "stack"} if self.target == "bernoulli" else set[str]()
        if self.rules.measured:
            left_out |= {"tanh", "exp", "leaky_relu"} if self.first == "int16" else set()
            left_out |= {"conv_transpose"} if self.output == "int16" else set()
        result = {name: case for name, case in CASES.items() if name not in left_out}
        if self.rules.by_layers:
            result |= {name: replace(result[name], own=False) for name in ("prelu", "leaky_relu")}
        return result

    def __str__(self) -> str:
        target = self.target if isinstance(self.target, str) else self.target.name
        return "-".join((target, self.first, self.second, self.output, self.weight))


FIXED, REAL = Rules("fixed"), Rules("real")
CHIP, CHIP_8 = Rules("fixed", measured=True), Rules("fixed", resize_bits=8, measured=True, by_layers=True)
FORMATS = (
    Format("bernoulli", "int8", "int8", "int8", Rules("fixed", "half_step", 8, power_of_two_weights=True)),
    Format(FLOOR, "int16", "int16", "int16", Rules("fixed", "floor")),
    Format("nash-e", "int8", "int8", "int8", REAL),
    Format("nash-m", "int16", "int16", "int16", REAL),
    Format("nash-e", "int16", "int8", "int16", replace(REAL, weight_bits=16), "int16"),
    Format("x86", "uint8", "uint8", "uint8", replace(REAL, in_output_steps=True)),
    Format("bayes-e", "int8", "int8", "int8", CHIP),
    Format("bernoulli2", "int8", "int8", "int8", CHIP_8),
    Format("bayes", "int16", "int16", "int16", CHIP),
    Format("bayes-e", "int16", "int8", "int8", CHIP),
    Format("bayes-e", "int8", "int16", "int16", CHIP),
    Format("qnnpack", "uint8", "int8", "uint8", Rules("real", per_channel=False, in_output_steps=True)),
)
BITS = {"int4": 4, "int8": 8, "uint8": 8, "int16": 16}
HOW = ("any scale", "powers of two", "next to powers of two")  # of two the sums are ties; next to them a mantissa is rounded up to one


def grid(dtype: str, low: float, high: float, how: str, generator: torch.Generator) -> Grid:
    """A grid that covers about the interval: a little less, so that something saturates, or a little more."""
    bits, factor = BITS[dtype], 0.7 + 0.6 * float(torch.rand((), generator=generator))
    span = (max(high, 0.0) - min(low, 0.0)) / 255 if dtype == "uint8" else max(-low, high) / (2 ** (bits - 1) - 0.5)
    if how == "any scale":
        scale = oracle.float32(span * factor)
    else:
        nearest = Fraction(2) ** round(math.log2(span))
        scale = nearest if how == "powers of two" else nearest * (1 - Fraction(1, 2**24) if factor < 1 else 1 + Fraction(1, 2**23))
    zero_point = min(max(round(-min(low, 0.0) / float(scale)), 0), 255) if dtype == "uint8" else 2 ** (bits - 1)
    return Grid(scale, -zero_point, 2**bits - 1 - zero_point, bits)


def config(dtype: str, on: Grid) -> fxq.ActivationConfig:
    return fxq.ActivationConfig(dtype, scale=float(on.scale), zero_point=-on.low if dtype == "uint8" else None)


def integers(on: Grid, generator: torch.Generator, size: tuple[int, ...] = (2, 3, 4, 5)) -> Tensor:
    """Centred integers of the range, of which a third are its ends and what is next to them, or around zero."""
    drawn = torch.randint(on.low, on.high + 1, size, generator=generator)
    ends = torch.tensor([on.low, on.low + 1, on.low + 3, on.high - 2, on.high, -1, 0, 1]).clamp(on.low, on.high)
    edges = ends[torch.randint(0, len(ends), size, generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < 1 / 3, edges, drawn)


def real(values: Tensor, on: Grid) -> Tensor:
    return values.float() * float(on.scale)


def result_nodes(integer: fx.GraphModule) -> list[fx.Node]:
    """The quantized tensors that become the outputs."""
    (output,) = [node for node in integer.graph.nodes if node.op == "output"]
    dequantized = output.args[0]
    assert all(node.target is dequantize for node in dequantized)
    return [node.args[0] for node in dequantized]


@pytest.mark.usefixtures("with_vnni")
@pytest.mark.sweep(5)
@pytest.mark.parametrize("number", range(len(FORMATS)), ids=lambda number: str(FORMATS[number]))
def test_every_operator_is_the_oracles(number: int) -> None:
    format, generator = FORMATS[number], torch.Generator().manual_seed(number)
    torch.manual_seed(number)
    x, y = (grid(dtype, -2.3, 1.9, HOW[number % 3], generator) for dtype in (format.first, format.second))
    first, second = integers(x, generator), integers(y, generator)
    inputs = real(first, x), real(second, y)
    cases = format.cases
    model = Model(cases).eval()
    with torch.no_grad():
        floats = zip(cases, model(*inputs), strict=True)
    grids = {
        name: grid(format.output, float(value.min()), float(value.max()), HOW[(number + index // 2) % 3], generator)
        for index, (name, value) in enumerate(floats)
        if cases[name].own
    }
    mapping = fxq.QConfigMapping()
    for name, dtype, on in (("first", format.first, x), ("second", format.second, y)):
        mapping = mapping.set_module_name(name, fxq.QConfig(config(dtype, on), input=config(dtype, on)))
    for name, on in grids.items():
        mapping = mapping.set_module_name(f"operators.{name}", fxq.QConfig(config(format.output, on), fxq.WeightConfig(format.weight)))
    integer = compiled(model, [inputs], format.target, mapping, correct_bias=False).integer

    values, results = graph_values(integer, *inputs), result_nodes(integer)
    wrong = []
    for (name, case), node in zip(cases.items(), results, strict=True):
        to, on_grid = grids[name] if case.own else x, qparams(node)
        assert on_grid is not None, name
        assert Fraction(float(on_grid.scale)) == to.scale, name
        batches_given = Known(array(first.mT.tolist()), array(second.mT.tolist()), x, y, to, format.rules, model.operators[name])
        assert len(values[node.name].unique()) > 3, name
        result = (values[node.name].long() - on_grid.zero_point).tolist()
        if result != case.expected(batches_given):
            wrong.append(name)
    assert not wrong
