"""Small networks of the architectures that are quantized, as their authors write them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy.tasks import Task
from benchmarks.zoo.mobilenet import conv_bn


class Residual(nn.Module):
    """Two 3 × 3 convolutions with batch norms, a shortcut, and ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four residual blocks of 16 to 48 channels, a pooling, a linear layer."""

    def __init__(self, channels: int, size: int, outputs: int) -> None:
        super().__init__()
        self.stem = conv_bn(channels, 16, 3, 2)
        shapes = ((16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 2))
        self.blocks = nn.Sequential(*(Residual(*shape) for shape in shapes))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(48, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, filter each channel on its own, narrow; a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = conv_bn(inputs, hidden, 1, activation=activation)
        self.depthwise = conv_bn(hidden, hidden, 3, stride, hidden, activation)
        self.project = conv_bn(hidden, outputs, 1, activation=None)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.has_shortcut else y


class MobileNetV2(nn.Module):
    """A stem, six inverted residuals, a 1 × 1 convolution, a pooling, a linear layer."""

    def __init__(self, channels: int, size: int, outputs: int, activation: Callable[[], nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.stem = conv_bn(channels, 12, 3, 2, activation=activation)
        shapes = ((12, 12, 1), (12, 16, 2), (16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 24, 1))
        self.blocks = nn.Sequential(*(InvertedResidual(*shape, 4, activation) for shape in shapes))
        self.last = conv_bn(24, 96, 1, activation=activation)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(96, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.last(self.blocks(self.stem(x)))), 1))


def mobilenet_relu(channels: int, size: int, outputs: int) -> MobileNetV2:
    """MobileNetV2 with ReLU in place of ReLU6: through ReLU, a channel may be rescaled."""
    return MobileNetV2(channels, size, outputs, nn.ReLU)


def rescale(network: nn.Module, seed: int) -> nn.Module:
    """Rescale channels by powers of two, 2^-3 to 2^3, without changing the function: in a batch norm before a ReLU and the layer after it.

    The factors are powers of two, so in float the two networks give the same bits unless a number gets subnormal. What a shortcut
    reads keeps its scale.
    """
    assert isinstance(network, MobileNetV2)
    network = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(1000 + seed)

    def between(norm: nn.BatchNorm2d, layer: nn.Conv2d | nn.Linear) -> None:
        factors = 2.0 ** torch.randint(-3, 4, (norm.num_features,), generator=generator)
        norm.weight.mul_(factors)
        norm.bias.mul_(factors)
        depthwise = isinstance(layer, nn.Conv2d) and layer.groups > 1
        shape = [1] * layer.weight.dim()
        shape[0 if depthwise else 1] = -1
        layer.weight.div_(factors.view(shape))

    with torch.no_grad():
        for block in network.blocks:
            between(block.expand[1], block.depthwise[0])
            between(block.depthwise[1], block.project[0])
        between(network.last[1], network.head)
    return network


class SqueezeExcite(nn.Module):
    """Weighs each channel by a function of all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.relu, self.gate = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.relu(self.down(self.pool(x)))))


class Bneck(nn.Module):
    """MobileNetV3's block: MobileNetV2's with squeeze and excite, and Hardswish or ReLU."""

    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int, excite: bool, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_bn(inputs, hidden, 1, activation=activation),
            *conv_bn(hidden, hidden, 3, stride, hidden, activation),
            SqueezeExcite(hidden) if excite else nn.Identity(),
            *conv_bn(hidden, outputs, 1, activation=None),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.has_shortcut else self.body(x)


class MobileNetV3(nn.Module):
    """A stem, five blocks, and MobileNetV3's head: a convolution, a pooling, two linear layers with Hardswish."""

    def __init__(self, channels: int, size: int, outputs: int) -> None:
        super().__init__()
        self.stem = conv_bn(channels, 12, 3, 2, activation=nn.Hardswish)
        self.blocks = nn.Sequential(
            Bneck(12, 32, 12, 1, False, nn.ReLU),
            Bneck(12, 48, 16, 2, True, nn.ReLU),
            Bneck(16, 64, 16, 1, True, nn.Hardswish),
            Bneck(16, 64, 24, 2, True, nn.Hardswish),
            Bneck(24, 96, 24, 1, True, nn.Hardswish),
        )
        self.last = conv_bn(24, 96, 1, activation=nn.Hardswish)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Linear(96, 96), nn.Hardswish(), nn.Linear(96, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.last(self.blocks(self.stem(x)))), 1))


class Attention(nn.Module):
    """Self-attention with several heads, written with matrix products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.each = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).reshape(-1, x.shape[1], self.heads, self.each).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        shares = torch.softmax(torch.matmul(query, key.transpose(-2, -1)) * self.each**-0.5, -1)
        return self.out(torch.matmul(shares, value).transpose(1, 2).reshape(-1, x.shape[1], self.heads * self.each))


class Block(nn.Module):
    """A transformer's layer, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer: patches of 4 × 4 pixels and a class token, three layers 64 wide."""

    def __init__(self, channels: int, size: int, outputs: int) -> None:
        super().__init__()
        width = 64
        self.patch = nn.Conv2d(channels, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, (size // 4) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(3)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*conv_bn(inputs, outputs, 3), *conv_bn(outputs, outputs, 3))


class UNet(nn.Module):
    """Three levels of 16, 24 and 32 channels with batch norm; ups by transposed convolution; the noise is what is predicted."""

    def __init__(self, channels: int, size: int, outputs: int) -> None:
        super().__init__()
        self.down1, self.down2, self.deep = _twice(channels, 16), _twice(16, 24), _twice(24, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 24, 2, 2), nn.ConvTranspose2d(24, 16, 2, 2)
        self.join2, self.join1 = _twice(48, 24), _twice(32, 16)
        self.last = nn.Conv2d(16, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(self.pool(one))
        y = self.join2(torch.cat((self.up2(self.deep(self.pool(two))), two), 1))
        y = self.join1(torch.cat((self.up1(y), one), 1))
        return x + self.last(y)


class PlainResidual(nn.Module):
    """EDSR's block: two convolutions, no batch norm, no activation after the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class EDSR(nn.Module):
    """A head, four residual blocks under a long shortcut, a tail; without batch norm."""

    def __init__(self, channels: int, size: int, outputs: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(channels, 16, 3, padding=1)
        self.body = nn.Sequential(*(PlainResidual(16) for _ in range(4)), nn.Conv2d(16, 16, 3, padding=1))
        self.tail = nn.Conv2d(16, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.tail(x + self.body(x))


@dataclass(frozen=True)
class Network:
    """How it is built for a task, and how it is trained: epochs, and the largest learning rate of OneCycle.

    batch     items in a batch
    derived   from the trained network of another name, by a function of it and the seed
    """

    name: str
    build: Callable[[int, int, int], nn.Module]
    unit: str
    epochs: int
    rate: float
    batch: int = 128
    derived: tuple[str, Callable[[nn.Module, int], nn.Module]] | None = None

    def suits(self, task: Task) -> bool:
        return task.unit == self.unit

    def new(self, task: Task) -> nn.Module:
        return self.build(task.channels, task.size, task.outputs)


NETWORKS = {
    network.name: network
    for network in (
        Network("resnet", ResNet, "%", 10, 0.01),
        Network("mobilenetv2", MobileNetV2, "%", 10, 0.01),
        Network("mobilenetv2-relu", mobilenet_relu, "%", 10, 0.01),
        Network("mobilenetv2-rescaled", mobilenet_relu, "%", 0, 0, derived=("mobilenetv2-relu", rescale)),
        Network("mobilenetv3", MobileNetV3, "%", 10, 0.01),
        Network("vit", ViT, "%", 24, 0.003, 64),
        Network("unet", UNet, "dB", 12, 0.005, 32),
        Network("edsr", EDSR, "dB", 10, 0.004),
    )
}
