"""Inception: parallel branches of different kernels, some asymmetric, and a branch that averages."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicConv2d(nn.Module):
    """Convolution, batch norm with torchvision's epsilon, relu."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int | tuple[int, int], stride: int = 1, padding: bool = True) -> None:
        super().__init__()
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        margins = (sizes[0] // 2, sizes[1] // 2) if padding else (0, 0)
        self.conv = nn.Conv2d(in_channels, out_channels, sizes, stride, margins, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    """1×1; 5×5; two 3×3; an average over 3×3, whose windows at the edge count the padding."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, channels, 1)
        self.branch5x5 = nn.Sequential(BasicConv2d(in_channels, channels, 1), BasicConv2d(channels, channels, 5))
        self.branch3x3 = nn.Sequential(
            BasicConv2d(in_channels, channels, 1), BasicConv2d(channels, channels, 3), BasicConv2d(channels, channels, 3)
        )
        self.branch_pool = BasicConv2d(in_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return torch.cat([self.branch1x1(x), self.branch5x5(x), self.branch3x3(x), self.branch_pool(pooled)], 1)


class InceptionB(nn.Module):
    """Half the resolution: strided convolutions and a maximum."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(in_channels, channels, 3, stride=2, padding=False)
        self.branch_double = nn.Sequential(
            BasicConv2d(in_channels, channels, 1), BasicConv2d(channels, channels, 3), BasicConv2d(channels, channels, 3, 2, False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch3x3(x), self.branch_double(x), F.max_pool2d(x, kernel_size=3, stride=2)], 1)


class InceptionC(nn.Module):
    """7×7 as 1×7 and 7×1, and an average whose windows at the edge do not count the padding."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, channels, 1)
        self.branch7x7 = nn.Sequential(
            BasicConv2d(in_channels, channels, 1), BasicConv2d(channels, channels, (1, 7)), BasicConv2d(channels, channels, (7, 1))
        )
        self.branch_pool = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), BasicConv2d(in_channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1x1(x), self.branch7x7(x), self.branch_pool(x)], 1)


class InceptionE(nn.Module):
    """A branch that itself splits in two."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.stem = BasicConv2d(in_channels, channels, 1)
        self.wide = BasicConv2d(channels, channels, (1, 3))
        self.tall = BasicConv2d(channels, channels, (3, 1))
        self.branch_pool = BasicConv2d(in_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        split = self.stem(x)
        split = torch.cat([self.wide(split), self.tall(split)], 1)
        return torch.cat([split, self.branch_pool(F.avg_pool2d(x, 3, 1, 1))], 1)


class Inception(nn.Module):
    """One or two of each of Inception-v3's blocks, narrow."""

    def __init__(self, num_classes: int = 1000, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(BasicConv2d(3, 24, 3, stride=2), BasicConv2d(24, 32, 3), nn.MaxPool2d(3, 2, ceil_mode=True))
        self.mixed = nn.Sequential(
            InceptionA(32, channels),
            InceptionA(4 * channels, channels),
            InceptionB(4 * channels, channels),
            InceptionC(6 * channels, channels),
            InceptionC(3 * channels, channels),
            InceptionE(3 * channels, 2 * channels),
        )
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(6 * channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(self.stem(x))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(torch.flatten(self.dropout(x), 1))
