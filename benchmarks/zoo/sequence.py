"""A network for signals: one dimension, dilated convolutions, and a decoder that brings the length back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DilatedBlock(nn.Module):
    """A dilated convolution with its batch norm, an activation, a 1×1 convolution, and the shortcut."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilated = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.bn = nn.BatchNorm1d(channels)
        self.act = nn.LeakyReLU(0.1)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.act(self.bn(self.dilated(x))))
        return out


class SignalNetwork(nn.Module):
    """[batch, 3, length] gives the class of the signal and a filtered signal of the same length, which is divisible by 8."""

    def __init__(self, num_classes: int = 10, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, channels, 9, stride=2, padding=4, bias=False), nn.BatchNorm1d(channels), nn.ReLU())
        self.pool = nn.MaxPool1d(2)
        self.blocks = nn.Sequential(*(DilatedBlock(channels, 2**level) for level in range(4)))
        self.smooth = nn.AvgPool1d(2)
        self.up1 = nn.Sequential(nn.ConvTranspose1d(channels, channels, 4, stride=4, bias=False), nn.BatchNorm1d(channels), nn.ReLU())
        self.up2 = nn.ConvTranspose1d(2 * channels, 3, 4, stride=2, padding=1)
        self.head = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.BatchNorm1d(2 * channels), nn.ReLU(), nn.Linear(2 * channels, num_classes)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.stem(x)
        deep = self.smooth(self.blocks(self.pool(low)))
        filtered = self.up2(torch.cat([low, self.up1(deep)], 1))
        return self.head(deep.mean(-1)), filtered
