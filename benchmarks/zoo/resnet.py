"""ResNet-18 and ResNet-50 as torchvision has them, parameter names included."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut, which is a 1×1 convolution where the shape changes."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _downsample(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, the last four times as wide, with the same shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(in_channels, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


class ResNet(nn.Module):
    """A stem, four stages of blocks, a classifier; `small` keeps 32×32 images from vanishing in the stem."""

    def __init__(self, block: Callable[[int, int, int], nn.Module], expansion: int, blocks: tuple[int, ...], num_classes: int, small: bool):
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        in_channels = 64
        for stage, count in enumerate(blocks):
            channels = 64 * 2**stage
            layers = [block(in_channels, channels, 1 if stage == 0 else 2)]
            in_channels = channels * expansion
            layers += [block(in_channels, channels, 1) for _ in range(count - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class ResNet18(ResNet):
    """torchvision's ResNet-18."""

    def __init__(self, num_classes: int = 1000, small: bool = False) -> None:
        super().__init__(BasicBlock, BasicBlock.expansion, (2, 2, 2, 2), num_classes, small)


class ResNet50(ResNet):
    """torchvision's ResNet-50."""

    def __init__(self, num_classes: int = 1000, small: bool = False) -> None:
        super().__init__(Bottleneck, Bottleneck.expansion, (3, 4, 6, 3), num_classes, small)
