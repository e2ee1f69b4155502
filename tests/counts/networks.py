"""Nine small networks: classifiers, a U-Net, a detector's head, transformers, one for signals, a recurrent one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.dynamic import Recurrent
from benchmarks.silicon.networks import Detector
from benchmarks.zoo import MobileNetV2, MobileNetV3Small, SignalNetwork, UNet
from benchmarks.zoo.life import initialise, make_alive
from benchmarks.zoo.resnet import BasicBlock, ResNet
from benchmarks.zoo.sequence import ViT
from fxquant.support import seeded
from tests.shared.networks import members


class Network(NamedTuple):
    """A network, and the sizes of one item."""

    make: Callable[[], nn.Module]
    item: tuple[int, ...]


@members(lambda channels=16: dict(
    stem=nn.Conv2d(3, channels, 4, 4),
    depthwise=nn.ModuleList(nn.Conv2d(channels, channels, 7, padding=3, groups=channels) for _ in range(2)),
    norm=nn.ModuleList(nn.LayerNorm(channels) for _ in range(2)), up=nn.ModuleList(nn.Linear(channels, 4 * channels) for _ in range(2)),
    down=nn.ModuleList(nn.Linear(4 * channels, channels) for _ in range(2)),
    scale=nn.ParameterList(torch.linspace(0.5, 1.5, channels) for _ in range(2)), head=nn.Linear(channels, 10),
))  # fmt: skip
def LayerScales(self, x: Tensor) -> Tensor:
    """Two blocks as in ConvNeXt: a depthwise convolution, two linear layers, and a factor for each channel before the addition."""
    x = self.stem(x)
    for depthwise, norm, up, down, scale in zip(self.depthwise, self.norm, self.up, self.down, self.scale, strict=True):
        y = down(F.gelu(up(norm(depthwise(x).permute(0, 2, 3, 1))))) * scale
        x = x + y.permute(0, 3, 1, 2)
    return self.head(x.mean((2, 3)))


class ShortMobileNetV2(MobileNetV2):
    """The first blocks, which are of every kind."""

    STAGES = MobileNetV2.STAGES[:3]


class ShortMobileNetV3(MobileNetV3Small):
    """The first blocks, which are of every kind."""

    BLOCKS = MobileNetV3Small.BLOCKS[:4]


NETWORKS: dict[str, Network] = {
    "ResNet": Network(lambda: ResNet(BasicBlock, 1, (1, 1, 1, 1), 10, small=True), (3, 16, 16)),
    "MobileNetV2": Network(lambda: ShortMobileNetV2(10, width=0.25, small=True), (3, 32, 32)),
    "MobileNetV3": Network(lambda: ShortMobileNetV3(10, small=True), (3, 32, 32)),
    "U-Net": Network(lambda: UNet(6, channels=8), (3, 16, 16)),
    "detector": Network(lambda: Detector(12, width=8), (3, 32, 32)),
    "ViT": Network(lambda: ViT(10, size=64, width=32, depth=2, heads=2), (3, 64, 64)),
    "layer scales": Network(LayerScales, (3, 32, 32)),
    "signals": Network(lambda: SignalNetwork(10, channels=16), (3, 256)),
    "recurrent": Network(lambda: Recurrent(nn.LSTM), (1, 4, 16)),
}
BATCH = 8


def built(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network in eval mode, and a batch for it: always the same."""
    network = NETWORKS[name]
    with seeded(0):
        model = network.make()
        batch = torch.randn(BATCH, *network.item)
    initialise(model, 0)
    make_alive(model, batch)
    return model.eval(), batch
