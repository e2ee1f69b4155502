"""The operators, a small network each: after a convolution or, for two operands, after two convolutions of different scales."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.support import seeded

CHANNELS, SIZE = 8, 16
Function = Callable[[Any, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Row:
    """A probe of an operator: `apply(layers, x, y)` of two tensors [B, 8, 16, 16], y about `ratio` times x; `layers` makes the modules."""

    name: str
    apply: Function
    layers: Callable[[], dict[str, nn.Module]] = field(default=dict)
    ratio: float = 0.3
    int32: bool = False  # whether its output is an int32 accumulator
    alone: bool = False  # whether some march refuses it, so that it needs a separate file

    def build(self) -> nn.Module:
        """Return the network, seeded by its name; its parameters are float16 values, which files hold in few bytes."""
        with seeded(sum(map(ord, self.name))), torch.no_grad():
            network = Network(self)
            for value in network.state_dict().values():
                if value.is_floating_point():
                    value.copy_(value.half())
            return network


class Network(nn.Module):
    """Two convolutions followed by an operator."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.x = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.y = nn.Conv2d(3, CHANNELS, 3, padding=1)
        with torch.no_grad():
            self.y.weight.mul_(row.ratio)
            self.y.bias.mul_(row.ratio)  # type: ignore[union-attr]
        self.layers = nn.ModuleDict(row.layers())
        self.row = row

    def forward(self, image: Tensor) -> Any:
        return self.row.apply(self.layers, self.x(image), self.y(image))


def conv(*arguments: Any, **named: Any) -> Callable[[], dict[str, nn.Module]]:
    """Return a factory of one convolution of eight channels, as "c"."""
    return lambda: {"c": nn.Conv2d(CHANNELS, *arguments, **named)}


def deconv(*arguments: Any, **named: Any) -> Callable[[], dict[str, nn.Module]]:
    """Return a factory of one transposed convolution of eight channels, as "c"."""
    return lambda: {"c": nn.ConvTranspose2d(CHANNELS, *arguments, **named)}


def unary(name: str, function: Callable[[Tensor], Tensor], **named: Any) -> Row:
    """Return the row of a function of one tensor."""
    return Row(name, lambda m, x, y: function(x), **named)


def binary(name: str, function: Callable[[Tensor, Tensor], Tensor], **named: Any) -> Row:
    """Return the row of a function of two tensors."""
    return Row(name, lambda m, x, y: function(x, y), **named)


def layer(name: str, layers: Callable[[], dict[str, nn.Module]], then: Callable[[Tensor], Tensor] = lambda x: x, **named: Any) -> Row:
    """Return the row of a layer "c" of one tensor, followed by a function."""
    return Row(name, lambda m, x, y: then(m["c"](x)), layers, **named)


def fixed(kind: Callable[[], nn.Module], ready: Callable[[Any], None]) -> Callable[[], dict[str, nn.Module]]:
    """Return a factory of a module "c" whose parameters and statistics `ready` sets."""

    def build() -> dict[str, nn.Module]:
        module = kind()
        with torch.no_grad():
            ready(module)
        return {"c": module}

    return build


def _alive(norm: nn.BatchNorm2d) -> None:
    for values, low, high in ((norm.weight, 0.5, 1.5), (norm.bias, -0.5, 0.5), (norm.running_mean, -0.3, 0.3), (norm.running_var, 0.3, 2)):
        nn.init.uniform_(values, low, high)  # type: ignore[arg-type]


def positive(x: Tensor) -> Tensor:
    """Return values whose logarithm, root and reciprocal are finite."""
    return F.relu(x) + 0.5


def of_positive(function: Callable[[Tensor], Tensor]) -> Row:
    """Return the row of a function of positive values."""
    return unary(function.__name__, lambda x: function(positive(x)))


def small(x: Tensor) -> Tensor:
    """Return a tensor of 4x4: the windows of bernoulli2 are too small for 16x16."""
    return F.max_pool2d(x, 4)


LAYERS = (
    layer("conv 3x3", conv(12, 3, padding=1)),
    layer("conv 1x1", conv(12, 1)),
    layer("conv 5x3, stride (2, 1)", conv(8, (5, 3), stride=(2, 1), padding=(2, 1))),
    layer("conv, dilation 2", conv(8, 3, dilation=2)),
    layer("conv, 4 groups", conv(8, 3, groups=4)),
    layer("conv depthwise", conv(8, 3, padding=1, groups=8)),
    layer("conv depthwise 5x5, stride 2", conv(8, 5, stride=2, padding=2, groups=8)),
    layer("conv without bias", conv(8, 3, bias=False)),
    layer("conv, relu", conv(8, 3), F.relu),
    layer("conv, relu6", conv(8, 3), lambda x: F.relu6(8 * x)),
    layer("conv, clamp", conv(8, 3), lambda x: x.clamp(-0.3, 0.4)),
    layer("conv, hardtanh", conv(8, 3), lambda x: F.hardtanh(3 * x)),
    layer("conv, hardswish", conv(8, 3), F.hardswish),
    Row("conv, batch norm, relu", lambda m, x, y: F.relu(m["n"](m["d"](x))),
        lambda: {"d": nn.Conv2d(CHANNELS, 8, 3), "n": fixed(lambda: nn.BatchNorm2d(8), _alive)()["c"]}),
    layer("conv 3x3, 32 bits", conv(12, 3, padding=1), int32=True),
    layer("batch norm", fixed(lambda: nn.BatchNorm2d(8), _alive), lambda x: x),
    layer("conv transposed 2x2, stride 2", deconv(4, 2, 2)),
    layer("conv transposed 3x3, stride 2", deconv(4, 3, 2, 1, 1)),
    layer("conv transposed 4x4, stride 2", deconv(4, 4, 2, 1)),
    layer("conv transposed 4x4, 2 groups", deconv(4, 4, 2, 1, groups=2)),
    layer("conv transposed depthwise", deconv(8, 4, 2, 1, groups=8)),
    layer("conv transposed, relu", deconv(4, 3, 2, 1), F.relu),
    layer("conv transposed, bias beyond 16 bits", fixed(lambda: nn.ConvTranspose2d(CHANNELS, 4, 2, 2), lambda m: m.bias.mul_(64))),
    Row("linear on 2 dimensions", lambda m, x, y: m["c"](small(x).mean((2, 3))), lambda: {"c": nn.Linear(CHANNELS, 10)}),
    Row("linear on 2 dimensions, 32 bits", lambda m, x, y: m["c"](small(x).mean((2, 3))),
        lambda: {"c": nn.Linear(CHANNELS, 10)}, int32=True),
    Row("linear on flattened", lambda m, x, y: m["c"](x.flatten(1)), lambda: {"c": nn.Linear(CHANNELS * SIZE * SIZE, 10)}),
    Row("linear on 3 dimensions", lambda m, x, y: m["c"](x.flatten(2)), lambda: {"c": nn.Linear(SIZE * SIZE, 10)}, alone=True),
    Row("linear on tokens", lambda m, x, y: m["c"](x.flatten(2).transpose(1, 2)), lambda: {"c": nn.Linear(CHANNELS, 10)}, alone=True),
    binary("matmul of activations", lambda x, y: x @ y, alone=True),
    binary("matmul, transposed", lambda x, y: x.flatten(2) @ y.flatten(2).transpose(1, 2), alone=True),
)  # fmt: skip
SUMS = (
    Row("residual", lambda m, x, y: m["c"](x) + y, conv(8, 3, padding=1)),
    Row("residual, relu", lambda m, x, y: F.relu(m["c"](x) + y), conv(8, 3, padding=1)),
    Row("residual, relu6", lambda m, x, y: F.relu6(8 * (m["c"](x) + y)), conv(8, 3, padding=1)),
    Row("residual much smaller", lambda m, x, y: m["c"](x) + y, conv(8, 3, padding=1), ratio=0.002),
    Row("residual much larger", lambda m, x, y: m["c"](x) + y, conv(8, 3, padding=1), ratio=200.0),
    Row("residual of its input", lambda m, x, y: m["c"](x) + x, conv(8, 3, padding=1)),
    binary("add", lambda x, y: F.max_pool2d(x, 2) + F.max_pool2d(y, 2)),
    binary("add, relu", lambda x, y: F.relu(F.max_pool2d(x, 2) + F.max_pool2d(y, 2))),
    binary("add, other much smaller", lambda x, y: F.max_pool2d(x, 2) + F.max_pool2d(y, 2), ratio=0.003),
    binary("add, other much larger", lambda x, y: F.max_pool2d(x, 2) + F.max_pool2d(y, 2), ratio=60.0),
    binary("add with alpha", lambda x, y: torch.add(F.max_pool2d(x, 2), F.max_pool2d(y, 2), alpha=1.7)),
    unary("add to itself", lambda x: F.max_pool2d(x, 2) + F.max_pool2d(x, 2, 2)),
    unary("add a number", lambda x: F.max_pool2d(x, 2) + 0.7),
    unary("subtract a number", lambda x: F.max_pool2d(x, 2) - 0.7),
    unary("subtract from a number", lambda x: 0.7 - F.max_pool2d(x, 2)),
    binary("sub", lambda x, y: F.max_pool2d(x, 2) - F.max_pool2d(y, 2)),
    binary("sub with alpha", lambda x, y: torch.sub(F.max_pool2d(x, 2), F.max_pool2d(y, 2), alpha=0.6)),
    binary("sub, broadcast", lambda x, y: F.max_pool2d(x, 2) - F.max_pool2d(y, 2).mean(1, keepdim=True)),
    binary("mul", lambda x, y: x * y),
    binary("mul by channels", lambda x, y: x * torch.sigmoid(F.adaptive_avg_pool2d(small(y), 1))),
    binary("mul, broadcast over channels", lambda x, y: x * torch.sigmoid(y.mean(1, keepdim=True))),
    unary("square", lambda x: x * x),
    unary("mul by a number", lambda x: F.max_pool2d(x, 2) * 0.7),
    unary("mul by a negative number", lambda x: F.max_pool2d(x, 2) * -1.3),
    unary("divide by a number", lambda x: F.max_pool2d(x, 2) / 3.0),
    unary("neg", lambda x: -F.max_pool2d(x, 2)),
    unary("abs", torch.abs),
    binary("maximum", torch.maximum),
    binary("minimum", torch.minimum),
    binary("concat", lambda x, y: torch.cat([x, y], 1)),
    binary("concat of three", lambda x, y: torch.cat([x, y, F.relu(x)], 1)),
    binary("concat of a tensor that is read again", lambda x, y: torch.cat((x, y, F.relu(y)), 1)),
    binary("concat along width", lambda x, y: torch.cat([x, y], 3)),
)  # fmt: skip
FUNCTIONS = (
    unary("relu", lambda x: F.relu(F.max_pool2d(x, 2))),
    unary("relu6", lambda x: F.relu6(F.max_pool2d(x, 2))),
    unary("clamp", lambda x: F.max_pool2d(x, 2).clamp(-0.4, 0.9)),
    unary("hardtanh", lambda x: F.hardtanh(F.max_pool2d(x, 2))),
    unary("leaky relu", lambda x: F.leaky_relu(x, 0.1)),
    unary("leaky relu, slope 0.01", F.leaky_relu),
    unary("leaky relu, slope 0.1, ties", lambda x: F.leaky_relu(F.hardtanh(x), 0.1)),  # on one scale, where the slope's last bit decides
    unary("leaky relu, slope 0.3, ties", lambda x: F.leaky_relu((0.9 * x).clamp(-0.9, 0.9), 0.3)),
    unary("leaky relu, slope 0.3, pool", lambda x: F.leaky_relu(F.max_pool2d(x, 2), 0.3)),
    layer("prelu by channel", fixed(lambda: nn.PReLU(CHANNELS), lambda prelu: prelu.weight.copy_(torch.linspace(-0.4, 1.2, CHANNELS)))),
    layer("prelu", lambda: {"c": nn.PReLU()}),
    *(unary(f.__name__, f) for f in (torch.sigmoid, torch.tanh, F.silu, F.mish, F.gelu)),
    unary("gelu by tanh", lambda x: F.gelu(x, approximate="tanh"), alone=True),
    *(unary(f.__name__, f) for f in (F.elu, F.selu, F.softplus, F.hardsigmoid, F.hardswish, torch.exp)),
    *map(of_positive, (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal)),
    unary("pow 2", lambda x: x**2),
    unary("pow 3", lambda x: x**3),
    *(unary(f.__name__, f) for f in (torch.sin, torch.erf)),
)  # fmt: skip
POOLS = (
    unary("max pool 3x3, stride 2", lambda x: F.max_pool2d(x, 3, 2, 1)),
    unary("max pool 2x2", lambda x: F.max_pool2d(x, 2)),
    unary("max pool, ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)),
    unary("avg pool 2x2", lambda x: F.avg_pool2d(x, 2)),
    unary("avg pool 3x3, padding", lambda x: F.avg_pool2d(x, 3, 2, 1)),
    unary("avg pool 3x3, stride 1", lambda x: F.avg_pool2d(x, 3, 1, 1)),
    unary("avg pool, ceil", lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True)),
    unary("avg pool, padding not counted", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    unary("adaptive pool to 1", lambda x: F.adaptive_avg_pool2d(small(x), 1)),
    unary("adaptive pool to 4", lambda x: F.adaptive_avg_pool2d(x, 4)),
    unary("adaptive pool to 3", lambda x: F.adaptive_avg_pool2d(x, 3), alone=True),
    unary("adaptive max pool to 4", lambda x: F.adaptive_max_pool2d(x, 4)),
    unary("mean over h, w", lambda x: small(x).mean((2, 3))),
    unary("mean over h, w of many elements", lambda x: F.interpolate(F.relu(x), scale_factor=4.0, mode="nearest").mean((2, 3))),
    unary("mean over h, w, kept", lambda x: small(x).mean((2, 3), keepdim=True)),
    unary("mean over channels", lambda x: x.mean(1, keepdim=True)),
    unary("mean over h", lambda x: x.mean(2, keepdim=True)),
    unary("mean over w", lambda x: x.mean(3, keepdim=True)),
    unary("sum over h, w", lambda x: x.sum((2, 3), keepdim=True)),
    unary("sum over channels", lambda x: x.sum(1, keepdim=True)),
    unary("max over channels", lambda x: x.amax(1, keepdim=True)),
)  # fmt: skip
PLACES = (
    unary("nearest x2", lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    unary("bilinear x2", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    unary("bilinear x4", lambda x: F.interpolate(x, scale_factor=4, mode="bilinear")),
    unary("bilinear x2, aligned", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)),
    unary("bilinear to 24x20", lambda x: F.interpolate(x, size=(24, 20), mode="bilinear")),
    unary("bilinear to 11x13", lambda x: F.interpolate(x, size=(11, 13), mode="bilinear")),
    unary("bilinear, pool", lambda x: F.max_pool2d(F.interpolate(x, scale_factor=2, mode="bilinear"), 2)),
    unary("pad", lambda x: F.pad(x, (1, 2, 3, 0))),
    Row("pad, conv", lambda m, x, y: m["c"](F.pad(x, (0, 1, 0, 1))), conv(8, 3, 2)),
    Row("pad, conv of a sequence", lambda m, x, y: m["c"](F.pad(x.flatten(2), (2, 0))), lambda: {"c": nn.Conv1d(CHANNELS, 8, 3)}),
    unary("slice of channels", lambda x: x[:, 2:6]),
    unary("slice with steps", lambda x: x[:, :, ::2, 1::2]),
    unary("split", lambda x: torch.cat(torch.split(x, 4, 1)[::-1], 1)),
    Row("split, add", lambda m, x, y: torch.add(*x.chunk(2, 1))),
    unary("permute", lambda x: x.permute(0, 2, 3, 1)),
    unary("transpose of h, w", lambda x: x.transpose(2, 3)),
    unary("reshape", lambda x: x.reshape(x.shape[0], 4, 2, 16, 16)),
    unary("flatten", lambda x: x.flatten(1)),
    unary("channel shuffle", lambda x: x.reshape(x.shape[0], 2, 4, 16, 16).transpose(1, 2).reshape(x.shape[0], 8, 16, 16)),
    unary("pixel shuffle", lambda x: F.pixel_shuffle(x, 2)),
    unary("pixel unshuffle", lambda x: F.pixel_unshuffle(x, 2)),
    unary("flip", lambda x: x.flip(3)),
    unary("expand", lambda x: x[:, :1].expand(-1, 4, -1, -1)),
)  # fmt: skip
COMPOSITES = (
    unary("softmax over channels", lambda x: F.softmax(x, 1), alone=True),
    layer("layer norm", lambda: {"c": nn.LayerNorm(SIZE)}, alone=True),
    layer("instance norm", lambda: {"c": nn.InstanceNorm2d(CHANNELS)}, alone=True),
    Row("mean, linear head", lambda m, x, y: m["c"](F.adaptive_avg_pool2d(small(F.relu(x)), 1).flatten(1)),
        lambda: {"c": nn.Linear(CHANNELS, 10)}),
    Row("squeeze and excitation", lambda m, x, y: x * F.hardsigmoid(m["b"](F.relu(m["c"](F.adaptive_avg_pool2d(small(x), 1))))),
        lambda: {"c": nn.Conv2d(CHANNELS, 4, 1), "b": nn.Conv2d(4, CHANNELS, 1)}),
    unary("argmax", lambda x: x.argmax(1)),
    binary("divide", lambda x, y: x / positive(y)),
)  # fmt: skip
ROWS = {row.name: row for row in (*LAYERS, *SUMS, *FUNCTIONS, *POOLS, *PLACES, *COMPOSITES)}
