"""A network for clips: three dimensions, residual blocks, pooling over time and space."""

import torch
from torch import Tensor, nn


def _conv_bn(
    in_channels: int, out_channels: int, kernel: int | tuple[int, int, int], stride: int | tuple[int, int, int] = 1
) -> nn.Sequential:
    sizes = (kernel,) * 3 if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2, sizes[2] // 2)
    return nn.Sequential(nn.Conv3d(in_channels, out_channels, sizes, stride, padding, bias=False), nn.BatchNorm3d(out_channels))  # type: ignore[arg-type]


class VolumeBlock(nn.Module):
    """A convolution in space, then one in time, with a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.space = _conv_bn(in_channels, out_channels, (1, 3, 3), (1, stride, stride))
        self.time = _conv_bn(out_channels, out_channels, (3, 1, 1), (stride, 1, 1))
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None if stride == 1 and in_channels == out_channels else _conv_bn(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.time(self.relu(self.space(x)))
        return self.relu(out + (x if self.shortcut is None else self.shortcut(x)))


class VolumeNetwork(nn.Module):
    """[batch, 3, frames, size, size] gives the class of the clip."""

    def __init__(self, num_classes: int = 10, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_bn(3, channels, 3), nn.ReLU(inplace=True))
        self.maxpool = nn.MaxPool3d((1, 2, 2))
        self.blocks = nn.Sequential(VolumeBlock(channels, channels, 1), VolumeBlock(channels, 2 * channels, 2))
        self.smooth = nn.AvgPool3d(2)
        self.gate = nn.Sequential(
            nn.ConvTranspose3d(2 * channels, 2 * channels, 2, stride=2, bias=False), nn.BatchNorm3d(2 * channels), nn.Sigmoid()
        )
        self.last = VolumeBlock(2 * channels, 4 * channels, 2)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(4 * channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.maxpool(self.stem(x)))
        x = x * self.gate(self.smooth(x))
        return self.fc(torch.flatten(self.avgpool(self.last(x)), 1))
