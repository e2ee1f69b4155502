"""DenseNet: every layer reads all that came before it, through a batch norm of its own that no convolution precedes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DenseLayer(nn.Module):
    """Batch norm, relu, 1×1 convolution; batch norm, relu, 3×3 convolution."""

    def __init__(self, in_channels: int, scale_change: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, 4 * scale_change, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * scale_change)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * scale_change, scale_change, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.Module):
    """Layers whose outputs are all kept and concatenated."""

    def __init__(self, layers: int, in_channels: int, scale_change: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(in_channels + index * scale_change, scale_change) for index in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """Half the channels, half the resolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.pool = nn.AvgPool2d(kernel_size=2, stride=2)


class DenseNet(nn.Module):
    """torchvision's DenseNet with these block sizes and this scale_change."""

    def __init__(self, num_classes: int = 1000, blocks: tuple[int, ...] = (3, 4, 6, 4), scale_change: int = 16) -> None:
        super().__init__()
        channels = 2 * scale_change
        self.conv0 = nn.Conv2d(3, channels, 7, 2, padding=3, bias=False)
        self.norm0 = nn.BatchNorm2d(channels)
        stages: list[nn.Module] = []
        for index, layers in enumerate(blocks):
            stages.append(DenseBlock(layers, channels, scale_change))
            channels += layers * scale_change
            if index < len(blocks) - 1:
                stages.append(Transition(channels, channels // 2))
                channels //= 2
        self.stages = nn.Sequential(*stages)
        self.norm5 = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm0(self.conv0(x)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = F.relu(self.norm5(self.stages(x)), inplace=True)
        x = torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)
        return self.classifier(x)
