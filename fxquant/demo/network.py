"""A small residual network for 32×32 digits, as a typical PyTorch user would write it.

Activations, additions and reshapes are written in several forms on purpose: as modules, as functions and as operators.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.support.seeding import seeded


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut; shape and number of channels are unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(x + y)


class InvertedResidual(nn.Module):
    """Expand, filter each channel separately (depthwise), reduce; a shortcut if input and output have equal shapes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = nn.Sequential(nn.Conv2d(in_channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6())
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False)
        self.depthwise_bn = nn.BatchNorm2d(hidden)
        self.project = nn.Sequential(nn.Conv2d(hidden, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels))
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        wide = self.expand(x)
        wide = F.relu6(self.depthwise_bn(self.depthwise(wide)))
        narrow: Tensor = self.project(wide)
        if self.has_shortcut:
            narrow += x
        return narrow


class DemoNetwork(nn.Module):
    """A network from digits of shape [batch, 1, 32, 32] to logits of shape [batch, 10]."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.block1 = ResidualBlock(24)
        self.block2 = InvertedResidual(24, 32, stride=2, expansion=4)
        self.block3 = InvertedResidual(32, 32, stride=1, expansion=3)
        self.block4 = InvertedResidual(32, 48, stride=2, expansion=3)
        self.block5 = InvertedResidual(48, 48, stride=1, expansion=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(48, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.block1(x)
        x = self.block3(self.block2(x))
        x = self.block5(self.block4(x))
        x = torch.flatten(self.pool(x), 1)
        logits: Tensor = self.head(x)
        return logits


def build_demo_network(seed: int) -> DemoNetwork:
    """Return an untrained network whose weights depend only on `seed`; PyTorch's global generator is left unchanged."""
    with seeded(seed):
        return DemoNetwork()
