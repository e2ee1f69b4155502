"""ShuffleNetV2: half of the channels pass by, and the halves are shuffled."""

import torch
from torch import Tensor, nn

from benchmarks.zoo.mobilenet import conv_bn


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """The channels of the groups, one of each in turn."""
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(batch, channels, height, width)


class ShuffleBlock(nn.Module):
    """One branch passes by (or is convolved as well, where the stride is 2); the results are concatenated and shuffled."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        half = out_channels // 2
        self.branch1: nn.Module = nn.Identity()
        if stride > 1:
            self.branch1 = nn.Sequential(
                conv_bn(in_channels, in_channels, 3, stride, groups=in_channels, activation=None), conv_bn(in_channels, half, 1)
            )
        self.branch2 = nn.Sequential(
            conv_bn(in_channels if stride > 1 else half, half, 1),
            conv_bn(half, half, 3, stride, groups=half, activation=None),
            conv_bn(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    """torchvision's ShuffleNetV2 at width 0.5; `small` drops the stem's pooling for small images."""

    REPEATS, CHANNELS = (4, 8, 4), (24, 48, 96, 192, 1024)

    def __init__(self, num_classes: int = 1000, small: bool = False) -> None:
        super().__init__()
        channels = self.CHANNELS[0]
        self.conv1 = conv_bn(3, channels, 3, 2)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        stages = []
        for repeats, out_channels in zip(self.REPEATS, self.CHANNELS[1:-1], strict=True):
            blocks = [ShuffleBlock(channels, out_channels, 2), *(ShuffleBlock(out_channels, out_channels, 1) for _ in range(repeats - 1))]
            stages.append(nn.Sequential(*blocks))
            channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.conv5 = conv_bn(channels, self.CHANNELS[-1], 1)
        self.fc = nn.Linear(self.CHANNELS[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv5(self.stages(self.maxpool(self.conv1(x))))
        x = x.mean([2, 3])
        return self.fc(x)
