"""Every limit of every march, just inside and just outside; what a finding says; and that nothing else is reported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.analysis.measures import MEASURES
from fxquant.backends import TARGETS
from fxquant.ops import OPERATORS
from tests.shared.networks import members, written


class Built(NamedTuple):
    """A model, and the shapes of its inputs."""

    model: nn.Module
    shapes: tuple[tuple[int, ...], ...]


def built(model: nn.Module, *shapes: tuple[int, ...]) -> Built:
    return Built(model, shapes)


def of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Built:
    """A function of one tensor or of two as a model."""
    return built(written(lambda m, x: function(x)) if len(shapes) == 1 else written(lambda m, x, y: function(x, y)), *shapes)


def swapped(x: Tensor, channels: int) -> Tensor:
    """Shuffle channels, or permute the images themselves."""
    return x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2).relu() if channels == 1 else x.permute(0, channels, 1, 2).relu()


def flattened(height: int) -> Built:
    return built(nn.Sequential(nn.Flatten(), nn.Linear(2 * height, 2)), image(2, height, 1))


def with_residual(stride: int) -> Built:
    size = 6 // stride + 1
    return built(written(lambda m, x, y: m.conv(x) + y, conv=nn.Conv2d(2, 2, 3, stride)), image(2, 9, 9), image(2, size, size))


def with_constants(count: int, function: Callable[[Any, Any], Tensor]) -> Built:
    """A parameter is the second operand where one is wanted."""
    model = written(lambda m, x, y: function(x, m.one if count else y), one=nn.Parameter(torch.ones(1, 2, 1, 1)))
    return built(model, image(), image())


def image(channels: int = 2, height: int = 8, width: int = 8, batch: int = 4) -> tuple[int, ...]:
    return batch, channels, height, width


def conv(size: tuple[int, ...] = (4, 2, 40, 40), **options: Any) -> Built:
    options = {"in_channels": size[1], "out_channels": 2, "kernel_size": 1, **options}
    return built(nn.Conv2d(**options), size)


def transposed(size: tuple[int, ...] = (4, 2, 4, 4), **options: Any) -> Built:
    options = {"in_channels": size[1], "out_channels": 1, "kernel_size": 4, "stride": 2, **options}
    return built(nn.ConvTranspose2d(**options), size)


def conv3d(size: tuple[int, ...] = (4, 2, 12, 12, 12), **options: Any) -> Built:
    return built(nn.Conv3d(**{"in_channels": 2, "out_channels": 2, "kernel_size": 1, **options}), size)


def joined(count: int) -> Built:
    return of(lambda x: torch.cat([x] * count, 1), image(1, 1, 1))


def chain(channels: int) -> Built:
    """A layer with so many channels that is not the last."""
    return built(nn.Sequential(nn.Conv2d(1, channels, 1), nn.Conv2d(channels, 1, 1)), image(1, 2, 2))


def index(x: Tensor, function: str) -> Tensor:
    """Where the largest or the smallest channel is."""
    return getattr(torch, function)(x, 1, True)


def read(function: Callable[[Tensor], Tensor], reader: Callable[[Tensor, Tensor], Tensor], count: int) -> Built:
    """A function of an image, and a reader of the image and the function's result, if there is to be one."""
    return of(lambda x: reader(x, function(x)) if count else function(x), image())


def largest(**options: Any) -> Built:
    return of(lambda x: torch.amax(x, **options), image(4))


INT16 = fxq.QConfig(output=fxq.ActivationConfig("int16"))

FAMILIES = {"bernoulli2": ("bernoulli2",), "bayes": ("bayes", "bayes-e"), "nash": ("nash-e", "nash-p")}
CURVES, PLACES = (nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU), ("argmax", "argmin")
READERS, CONSTANT = "number of readers inside the model", "broadcasting of a constant operand"
Limit = tuple[str, str, Callable[[Any], Built], Any, Any]  # the fields of a Row but its family
ARITHMETIC: dict[str, Callable[[Any, Any], Tensor]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}


class Row(NamedTuple):
    """A limit: its family, operator and measure; a model for a value; a value that is allowed and one that is not."""

    family: str
    operator: str
    measure: str
    model: Callable[[Any], Built]
    inside: Any
    outside: Any


BERNOULLI2: list[Limit] = [
    ("", "rank", lambda rank: built(nn.Sigmoid(), (4, *[2] * (rank - 1))), 2, 1),
    ("", "rank", lambda rank: built(nn.Sigmoid(), (4, *[2] * (rank - 1))), 4, 5),
    ("", "batch", lambda batch: built(nn.ReLU(), image(batch=batch)), 128, 129),
    ("pixel_shuffle", "output channels beyond a multiple of 4", lambda c: built(nn.PixelShuffle(2), image(4 * c)), 4, 3),
    ("reshape", "number of rearranged dimensions", lambda n: built(nn.Flatten(), image(2, n, 1)), 1, 8),
    ("permute", "number of rearranged dimensions", lambda n: of(lambda x: swapped(x, n), image(4)), 1, 3),
    ("linear", "area of an image that is flattened before it", flattened, 1, 8),
    ("conv2d", "kernel", lambda k: conv(kernel_size=(1, k)), 7, 8),
    ("conv2d", "channels of a kernel without groups", lambda c: conv(image(c, 1, 1)), 4096, 4097),
    ("conv2d", "channels of a kernel with groups", lambda c: conv(image(2 * c, 1, 1), groups=2), 2048, 2049),
    ("conv2d", "weights for one output channel", lambda c: conv(image(c, 4, 4), kernel_size=4), 2048, 2049),
    ("conv2d", "dilation", lambda d: conv(kernel_size=3, dilation=d), 4, 3),
    ("conv2d", "dilation", lambda d: conv(kernel_size=3, dilation=d), 2, 8),
    ("conv_transpose2d", "kernel", lambda k: transposed(kernel_size=k), 2, 1),
    ("conv_transpose2d", "stride", lambda s: transposed(kernel_size=5, stride=s), 4, 5),
    ("conv_transpose2d", "stride", lambda s: transposed(kernel_size=5, stride=s), 2, 1),
    ("conv_transpose2d", "padding beyond (kernel - 1) / 2", lambda p: transposed(kernel_size=5, padding=p), 2, 3),
    ("avg_pool2d", "kernel", lambda k: built(nn.AvgPool2d(k), image(2, 16, 16)), 7, 11),
    ("adaptive_avg_pool2d", "kernel", lambda k: built(nn.AdaptiveAvgPool2d(2), image(2, 2 * k, 2 * k)), 7, 11),
    ("avg_pool2d", "stride", lambda s: built(nn.AvgPool2d(2, s), image(1, 200, 4)), 185, 186),
    ("adaptive_avg_pool2d", "area of a global average", lambda h: built(nn.AdaptiveAvgPool2d(1), image(1, h, 2)), 4096, 4097),
    ("adaptive_avg_pool2d", "side of an averaged image", lambda s: built(nn.AdaptiveAvgPool2d(1), image(2, s, 4)), 7, 11),
    ("mean", "side of an averaged image", lambda s: of(lambda x: x.mean((2, 3), True), image(2, s, 4)), 14, 17),
    ("max_pool2d", "kernel", lambda k: built(nn.MaxPool2d((k, 1)), image(1, 70, 4)), 64, 65),
    ("max_pool2d", "stride", lambda s: built(nn.MaxPool2d(2, s), image(1, 300, 4)), 256, 257),
    ("mul", "broadcasting", lambda shape: of(torch.mul, image(), shape), (1, 1, 1, 1), (2, 8, 8)),
    ("cat", "channels", lambda c: of(lambda x: torch.cat([x, x], 2), image(c, 1, 1)), 2048, 2049),
    ("cat", "output channels", lambda c: of(lambda x: torch.cat([x, x], 1), image(c, 1, 1)), 1024, 1025),
    ("interpolate", "resize factor", lambda n: built(nn.Upsample(size=(n, 1)), image(1, 1, 1)), 256, 257),
    ("interpolate", "resize factor", lambda n: built(nn.Upsample(size=(1, 1)), image(1, n, 1)), 256, 257),
    ("interpolate", "resize factor that is not a power of two", lambda f: built(nn.Upsample(scale_factor=f), image()), 4, 3),
    ("interpolate", "resize factor that is not a power of two", lambda f: built(nn.Upsample(scale_factor=f), image()), 0.5, 0.75),
    ("mean", "reduced dimension besides those of an averaged image", lambda d: of(lambda x: x.mean(d, True), image()), (2, 3), 1),
    ("getitem", "number of lists of indices", lambda n: of(lambda x: x[:, [1, 0]] if n else x[:, 1:], image()), 0, 1),
    ("sum", "reduced dimension", lambda d: of(lambda x: x.sum(d, keepdim=True), image()), 1, 2),
    ("amax", "reduced dimension", lambda d: largest(dim=d, keepdim=True), 1, 2),
    ("amax", READERS, lambda n: read(lambda x: torch.amax(x, 1, True), lambda x, y: torch.sigmoid(y), n), 0, 1),
    ("pad", "padding mode", lambda mode: of(lambda x: F.pad(x, [1, 1, 1, 1], mode), image()), "constant", "replicate"),
    ("exp", "elements, aligned", lambda c: of(torch.exp, image(c, 16, 16)), 32, 33),
    ("sigmoid", "elements, aligned", lambda w: built(nn.Sigmoid(), image(4, 16, w)), 128, 129),
    ("", "bounds", lambda high: built(nn.Hardtanh(0, high), image()), 6, 4),
    ("", "bounds", lambda low: built(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Hardtanh(low, 6)), image()), 0, -1),
    *((kind.__name__.lower(), "elements, aligned", lambda c, kind=kind: built(kind(), image(c, 16, 16)), 32, 33) for kind in CURVES),
    *(
        row
        for name, f in ARITHMETIC.items()
        for row in (
            (name, "channels", lambda c, f=f: of(f, image(c, 1, 1), image(c, 1, 1)), 2048, 2049),
            (name, "number of constant operands", lambda n, f=f: with_constants(n, f), 0, 1),
            (name, "broadcasting", lambda shape, f=f: of(f, image(), shape), image(), image(1)),
            (name, "broadcasting", lambda shape, f=f: of(f, image(), shape), image(2, 1, 1), image(2, 1, 8)),
        )
    ),
    *((name, "reduced dimension", lambda d, name=name: of(lambda x: getattr(torch, name)(x, d, True), image()), 1, 2) for name in PLACES),
]
BAYES: list[Limit] = [
    ("", "batch", lambda batch: built(nn.ReLU(), image(1, 1, 1, batch)), 4096, 4097),
    ("", "sizes", lambda width: built(nn.ReLU(), image(1, 1, width)), 65536, 65537),
    ("", "bytes", lambda width: built(nn.ReLU(), image(1, 4096, width)), 65536, 65537),
    ("conv2d", "kernel", lambda k: conv(kernel_size=(1, k)), 31, 32),
    ("conv2d", "channels", lambda c: conv(image(c, 1, 1)), 8192, 8193),
    ("conv2d", "output channels inside the model", chain, 8192, 8193),
    ("conv2d", "output channels", lambda c: conv(image(1, 1, 1), out_channels=c), 65536, 65537),
    ("conv2d", "weights for one output channel", lambda k: conv(image(255, 1, k), kernel_size=(1, k)), 257, 258),
    ("conv2d", "stride", lambda s: conv(image(1, 1, 300), stride=(1, s)), 256, 257),
    ("conv2d", "dilation", lambda d: conv(kernel_size=2, dilation=d), 16, 17),
    ("conv2d", "padding", lambda p: conv(image(1, 1, 1), padding=(0, p)), 256, 257),
    ("conv_transpose2d", "output channels", lambda c: transposed(image(1, 2, 2), out_channels=c), 2048, 2049),
    ("conv_transpose2d", "batch", lambda batch: transposed((batch, 2, 2, 2)), 128, 129),
    ("conv_transpose2d", "padding beyond kernel / stride", lambda p: transposed(kernel_size=5, stride=2, padding=p), 2, 3),
    ("max_pool2d", "sizes", lambda w: built(nn.MaxPool2d(2), image(1, 2, w)), 8192, 8193),
    ("permute", "place of the batch", lambda d: of(lambda x: x.transpose(d, 1), image()), 2, 0),
    ("conv_transpose2d", "stride", lambda s: transposed(kernel_size=15, stride=s), 14, 15),
    ("conv_transpose2d", "stride beyond the kernel", lambda s: transposed(kernel_size=3, stride=s), 3, 4),
    ("conv_transpose2d", "output padding", lambda p: transposed(kernel_size=4, stride=3, output_padding=p), 1, 2),
    ("conv_transpose2d", "weights for one output channel", lambda c: transposed(image(c, 2, 2), kernel_size=6), 1820, 1821),
    ("linear", "features", lambda n: built(nn.Linear(n, 1), (4, n)), 8192, 8193),
    ("linear", "features", lambda n: built(nn.Linear(1, n), (4, 1)), 8192, 8193),
    ("avg_pool2d", "kernel", lambda k: built(nn.AvgPool2d((1, k)), image(1, 1, 300)), 256, 257),
    ("adaptive_avg_pool2d", "kernel", lambda k: built(nn.AdaptiveAvgPool2d((1, 2)), image(1, 1, 2 * k)), 256, 257),
    ("avg_pool2d", "stride", lambda s: built(nn.AvgPool2d(1, s), image(1, 1, 300)), 256, 257),
    ("avg_pool2d", "padding", lambda p: built(nn.AvgPool2d((1, 514), 1, (0, p)), image(1, 1, 8)), 256, 257),
    ("max_pool2d", "kernel", lambda k: built(nn.MaxPool2d((1, k)), image(1, 1, 300)), 256, 257),
    ("max_pool2d", "stride", lambda s: built(nn.MaxPool2d(1, s), image(1, 1, 300)), 256, 257),
    ("max_pool2d", "padding", lambda p: built(nn.MaxPool2d((1, 513), 1, (0, p)), image(1, 1, 8)), 255, 256),
    ("cat", "number of operands", joined, 1024, 1025),
    ("cat", "number of operands", joined, 2, 1),
    ("cat", "concatenated dimension", lambda d: of(lambda x, y: torch.cat([x, y], d).tanh(), image(), image()), 1, 0),
    ("matmul", "matrix sizes", lambda n: of(torch.matmul, (4, 1, n), (4, n, 1)), 8192, 8193),
    ("interpolate", "sizes", lambda w: built(nn.Upsample(scale_factor=2), image(1, 1, w)), 4096, 4097),
    ("pad", "padding mode", lambda mode: of(lambda x: F.pad(x, [1, 1, 1, 1], mode), image()), "circular", "reflect"),
    (
        "",
        "bits of a function without segments",
        lambda name: built(written(lambda m, x: getattr(torch, name)(m.c(x)), c=nn.Conv2d(2, 2, 1)), image()),
        "sqrt",
        "log1p",
    ),
    ("", "bounds that do not begin at 0", lambda low: built(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Hardtanh(low, 6)), image()), 0, -1),
    ("sum", "number of reduced dimensions", lambda d: of(lambda x: x.sum(d), image()), 2, (2, 3)),
    ("amax", "number of reduced dimensions", lambda d: of(lambda x: x.amax(d), image()), 2, (2, 3)),
    ("mean", "number of reduced dimensions", lambda d: of(lambda x: x.mean(d), image()), (2, 3), (1, 2, 3)),
    ("expand", "number of operands", lambda n: with_constants(1 - n, lambda x, y: x + y.expand(4, 2, 8, 8)), 0, 1),
    ("scale_channels", "rank", lambda r: built(nn.GroupNorm(1, 2), (4, *[2] * (r - 1))), 4, 3),
    ("scale_channels", "place of the channels", lambda p: built(nn.GroupNorm(1, 2) if p == 1 else nn.LayerNorm(8), image()), 1, 3),
    ("conv3d", "rank", lambda r: conv3d() if r == 5 else conv(), 4, 5),
    ("mul", CONSTANT, lambda shape: built(written(lambda m, x: x * m.k, k=torch.rand(shape)), image()), (2, 1, 1), (8,)),
    ("add", CONSTANT, lambda shape: built(written(lambda m, x: x + m.k, k=torch.rand(shape)), image()), (1, 1, 1), (2, 1, 1)),
    *(
        row
        for name, f in ARITHMETIC.items()
        for row in (
            (name, "rank", lambda r, f=f: of(f, (4, *[2] * (r - 1)), (4, *[2] * (r - 1))), 5, 6),
            (name, "rank", lambda r, f=f: of(f, (4, *[2] * (r - 1)), (4, *[2] * (r - 1))), 2, 1),
            (name, "number of operands that are broadcast", lambda w, f=f: of(f, image(2, 1, 8), image(2, 8, w)), 8, 1),
            (name, "dimension that is broadcast", lambda shape, f=f: of(f, image(), shape), (4, 1, 1, 1), (1, 2, 8, 8)),
        )
    ),
]
NASH: list[Limit] = [
    ("max_pool1d", "dilation", lambda d: built(nn.MaxPool1d(2, 1, 0, d), (4, 2, 8)), 1, 2),
    ("max_pool2d", "dilation", lambda d: built(nn.MaxPool2d(2, 1, 0, d), image()), 1, 2),
    ("pad", "padding mode", lambda mode: of(lambda x: F.pad(x, [1, 1, 1, 1], mode), image()), "constant", "reflect"),
    ("gelu", "approximation", lambda a: built(nn.GELU(a), image()), "none", "tanh"),
    ("mean", "number of reduced dimensions", lambda d: of(lambda x: x.mean(d), image()), 2, (2, 3)),
    ("sum", "number of reduced dimensions", lambda d: of(lambda x: x.sum(d), image()), 2, (2, 3)),
    ("argmax", "reduced size", lambda n: of(lambda x: torch.argmax(x, 1), (4, n)), 32767, 32768),
    ("argmin", "reduced size", lambda n: of(lambda x: torch.argmin(x, 1), (4, n)), 32767, 32768),
    ("all", "reduced size", lambda n: of(lambda x: torch.all(x > 0, 1), (4, n)), 65535, 65536),
    ("any", "reduced size", lambda n: of(lambda x: torch.any(x > 0, 1), (4, n)), 65535, 65536),
]
BOTH: list[Limit] = [
    ("shifted", "number added to its operand", lambda c: of(lambda x: torch.sigmoid(x + c if c else x), image()), 0, 1),
    ("curve", "number of steps", lambda c: of(lambda x: torch.where(x > c, x, 0.01 * x), image()), 0, 1),
    ("argmax", "number of outputs", lambda n: of(lambda x: index(x, "argmax") if n else x.gather(1, index(x, "argmax")), image()), 0, 1),
    ("conv2d", "stride where it is dilated", lambda s: conv(kernel_size=3, dilation=2, stride=s), 1, 2),
    ("conv2d", "stride with a residual added", with_residual, 2, 3),
    ("conv_transpose2d", "kernel", lambda k: transposed(kernel_size=k), 14, 15),
    ("conv_transpose2d", "channels", lambda c: transposed(image(c, 2, 2)), 2048, 2049),
    ("conv_transpose2d", "dilation", lambda d: transposed(kernel_size=3, dilation=d), 1, 2),
    ("interpolate", "align_corners", lambda a: built(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=a), image()), False, True),
    ("amax", "reduced size", lambda c: of(lambda x: torch.amax(x, 1, True), image(c)), 64, 65),
    *((name, "reduced size", lambda c, name=name: of(lambda x: index(x, name), image(c)), 64, 65) for name in PLACES),
    *((name, READERS, lambda n, name=name: read(lambda x: index(x, name), lambda x, y: x.gather(1, y), n), 0, 1) for name in PLACES),
]
EVERY: list[Limit] = [
    ("avg_pool2d", "count_include_pad", lambda c: built(nn.AvgPool2d(3, 1, 1, count_include_pad=c), image()), True, False),
    ("avg_pool2d", "divisor_override", lambda d: built(nn.AvgPool2d(3, divisor_override=d), image()), None, 7),
]
ROWS = [Row("bernoulli2", *row) for row in BERNOULLI2 + BOTH + EVERY]
ROWS += [Row("bayes", *row) for row in BAYES + BOTH + EVERY] + [Row("nash", *row) for row in NASH + EVERY]


def check(one: Built, target: str, qconfig: Any = None, options: fxq.Options | None = None) -> fxq.results.Findings:
    """Return a target's findings for a model and a batch of these shapes; large tensors have no content."""
    large = max(torch.Size(shape).numel() for shape in one.shapes) > 2**24
    inputs = tuple(torch.empty(shape, device="meta" if large else "cpu") for shape in one.shapes)
    traced = fxq.trace(one.model, inputs, options=fxq.Options(dynamic_shapes={}), check=False)
    return fxq.check(traced, inputs, target, qconfig, options=options or fxq.Options())


def broken(findings: fxq.results.Findings, operator: str, measure: str) -> bool:
    return any(f.limit.startswith(f"its {measure} is ") and operator in ("", f.operator) for f in findings if f.kind == "limit")


def test_every_nash_march_has_the_limits_of_nash() -> None:
    nash = [target for target in TARGETS.values() if target.name.startswith("nash")]
    assert {target.name for target in nash} >= {"nash-e", "nash-m", "nash-b", "nash-p", "nash-h"}
    assert all(target.limits == TARGETS["nash-e"].limits for target in nash)


@pytest.mark.sweep(60)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.family}-{row.operator or 'any'}-{row.measure}-{row.outside}".replace(" ", "_"))
def test_just_inside_and_just_outside(row: Row) -> None:
    for target in FAMILIES[row.family]:
        inside, outside = check(row.model(row.inside), target), check(row.model(row.outside), target)
        assert not broken(inside, row.operator, row.measure), str(inside)
        assert broken(outside, row.operator, row.measure), str(outside)
        finding = next(f for f in outside if f.limit.startswith(f"its {row.measure} is "))
        assert f"{target} allows " in finding.limit
        assert finding.remedy
        assert finding.layer


def test_limits_speak_of_operators_and_measures_that_exist() -> None:
    names = {operator.name for operator in OPERATORS.values()}
    for target in TARGETS.values():
        for limit in target.limits:
            assert set(limit.operators) <= names
            assert limit.measure is None or limit.measure in MEASURES
            assert limit.remedy


WIDE = {
    "conv_transpose2d": transposed(),
    "linear": built(nn.Linear(4, 4), (4, 4)),
    "interpolate": built(nn.Upsample(scale_factor=2), image()),
    "avg_pool2d": built(nn.AvgPool2d(2), image()),
    "adaptive_avg_pool2d": built(nn.AdaptiveAvgPool2d(2), image()),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("operator", WIDE)
def test_bayes_computes_int16_in_some_operators_only(operator: str) -> None:
    wide = replace(TARGETS["bayes"], activations=("int8", "int16"))
    inputs = tuple(torch.zeros(shape) for shape in WIDE[operator].shapes)
    assert broken(fxq.check(WIDE[operator].model, inputs, wide, INT16), operator, "bits")
    assert not broken(fxq.check(WIDE[operator].model, inputs, wide), operator, "bits")
    plain, dilated = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, dilation=2)
    measure = "bits of the result where it is dilated"
    assert broken(fxq.check(dilated, torch.zeros(4, 2, 8, 8), wide, INT16), "conv2d", measure)
    assert not broken(fxq.check(dilated, torch.zeros(4, 2, 8, 8), wide), "conv2d", measure)
    assert len(fxq.check(plain, torch.zeros(4, 2, 8, 8), wide, INT16)) == 0
    ends = [layer.dtype for layer in fxq.inspect.layers(fxq.prepare(transposed().model, torch.zeros(4, 2, 4, 4), wide, INT16))]
    assert ends[-3:-1] == ["int8", "int16"], "as the compiler rounds it"


ABSENT: dict[str, tuple[str, Built]] = {
    "conv3d": ("bernoulli2", conv3d()),
    "expand": ("bernoulli2", of(lambda x: x.expand(4, 2, 8, 8), image(2, 1, 1))),
    "repeat": ("bernoulli2", of(lambda x: x.repeat(1, 2, 1, 1), image())),
    "matmul": ("bernoulli2", of(torch.matmul, image(), image())),
    "maximum": ("bernoulli2", of(torch.maximum, image(), image())),
    "grid_sample": ("bayes", of(lambda x, y: F.grid_sample(x, y.tanh(), align_corners=False), image(), (4, 2, 2, 2))),
    "amin": ("bayes-e", of(lambda x: x.amin(1), image())),
    "conv_transpose3d": ("nash-e", built(nn.ConvTranspose3d(2, 2, 1), (4, 2, 4, 4, 4))),
    "avg_pool1d": ("nash-m", built(nn.AvgPool1d(2), (4, 2, 8))),
    "max_pool3d": ("nash-e", built(nn.MaxPool3d(2), (4, 2, 4, 4, 4))),
}


@pytest.mark.parametrize("operator", ABSENT)
def test_an_operator_the_march_lacks(operator: str) -> None:
    target, one = ABSENT[operator]
    result = [f for f in check(one, target) if f.operator == operator]
    assert [f.limit for f in result] == [f"{target} has no {operator}"], "and nothing else is said of it"
    assert result[0].remedy
    assert not any("has no" in f.limit for f in check(one, "nash-e" if target.startswith("bayes") else "bayes"))


# ---- the report -------------------------------------------------------------------------------------------------------------
@members(lambda: dict(layers=nn.Sequential(nn.Conv2d(2, 2, 9), nn.BatchNorm2d(2), nn.ReLU()), head=nn.Conv2d(2, 2, 3, dilation=3)))
def Network(self, x: Tensor) -> Tensor:
    """Two limits broken in one layer, one operator that is unknown."""
    x = self.layers(x)
    x = torch.special.bessel_j0(x)
    return self.head(x)


def test_a_finding_says_where_and_what_to_do() -> None:
    findings = fxq.check(Network(), torch.randn(2, 2, 20, 20), "x3")
    assert not findings
    assert len(findings) == 3
    kernel, unknown, dilation = findings
    assert (kernel.layer, kernel.operator, kernel.kind) == ("layers.0", "conv2d", "limit")
    assert kernel.limit == "its kernel is 9; bernoulli2 allows 1 to 7"
    assert "test_check.py" in kernel.source
    assert "x = self.layers(x)" in kernel.source
    assert unknown.kind == "float"
    assert "no registered operator matches special_bessel_j0" in unknown.limit
    assert (dilation.layer, dilation.limit) == ("head", "its dilation is 3; bernoulli2 allows 1, 2, 4")
    assert "self.head(x)" in dilation.source
    text = str(findings)
    assert text.startswith("2 limits of bernoulli2 are broken, 1 operator would stay in float on bernoulli2\n")
    for finding in findings:
        assert all(part in text for part in (finding.layer, finding.limit, finding.source, finding.remedy))


@pytest.mark.parametrize("target", ["x86", "qnnpack", "bernoulli"])
def test_targets_without_limits(target: str) -> None:
    findings = fxq.check(nn.Conv2d(2, 2, 9, dilation=3), torch.randn(2, 2, 40, 40), target)
    assert findings
    assert list(findings) == []
    assert str(findings) == f"within every limit of {target} that is known"


def test_what_the_qconfig_keeps_in_float_is_not_held_against_limits() -> None:
    mapping = fxq.QConfigMapping().set_module_name("layers", None)
    findings = fxq.check(Network(), torch.randn(2, 2, 20, 20), "x3", mapping)
    assert not any("kernel" in f.limit for f in findings)
    assert ("layers.0", "give it a QConfig") in [(f.layer, f.remedy) for f in findings]


def test_prepare_says_in_one_line_that_limits_are_broken(caplog: pytest.LogCaptureFixture) -> None:
    fxq.prepare(Network(), torch.randn(2, 2, 20, 20), "x3")
    assert caplog.messages == ["limits of bernoulli2 that are broken: 2; fxq.check says where, and what to do"]
    caplog.clear()
    fxq.prepare(Network(), torch.randn(2, 2, 20, 20), "x86")
    assert caplog.records == []


def test_checking_changes_nothing() -> None:
    model = Network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fxq.check(model, torch.randn(2, 2, 20, 20), "x3")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
