"""U-Net: down by pooling, up by transposed convolution, and what was seen on the way down concatenated on the way up."""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.zoo.mobilenet import conv_bn


def _double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return convolution, batch norm and relu, twice."""
    relu = partial(nn.ReLU, inplace=True)
    return nn.Sequential(*conv_bn(in_channels, out_channels, 3, activation=relu), *conv_bn(out_channels, out_channels, 3, activation=relu))


class UNet(nn.Module):
    """A class for every pixel: [batch, 3, size, size] gives [batch, num_classes, size, size]; size is divisible by 8."""

    def __init__(self, num_classes: int = 6, channels: int = 16) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        self.down = nn.ModuleList(_double_conv(3 if level == 0 else widths[level - 1], widths[level]) for level in range(4))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[level], widths[level - 1], 2, stride=2) for level in (3, 2, 1))
        self.join = nn.ModuleList(_double_conv(widths[level], widths[level - 1]) for level in (3, 2, 1))
        self.head = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)
