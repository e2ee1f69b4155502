"""EfficientNet in B0's layout: SiLU, depthwise convolutions, squeeze-excitation, stochastic depth's residuals."""

import torch
from torch import Tensor, nn

from benchmarks.zoo.mobilenet import SqueezeExcitation, conv_bn


class MBConv(nn.Module):
    """Widen, depthwise, squeeze-excitation, narrow without activation."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [conv_bn(in_channels, hidden, 1, activation=nn.SiLU)]
        layers += [
            conv_bn(hidden, hidden, kernel, stride, groups=hidden, activation=nn.SiLU),
            SqueezeExcitation(hidden, max(1, in_channels // 4), nn.SiLU(), nn.Sigmoid()),
            conv_bn(hidden, out_channels, 1, activation=None),
        ]
        self.block = nn.Sequential(*layers)
        self.use_res_connect = stride == 1 and in_channels == out_channels

    @property
    def damped(self) -> list[nn.Module]:
        """The layers that `initialise` makes small: training would as well, and otherwise sixteen such blocks amplify any noise."""
        return [self.block[-1][1]] if self.use_res_connect else []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        if self.use_res_connect:
            result = result + x
        return result


class EfficientNetB0(nn.Module):
    """torchvision's EfficientNet-B0 at a given width; `small` drops the first stride for small images."""

    # expansion, kernel, stride of the first block, output channels at width 1, number of blocks
    STAGES = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
    )  # fmt: skip

    def __init__(self, num_classes: int = 1000, width: float = 1.0, small: bool = False) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            return max(8, round(channels * width / 8) * 8)

        channels = scaled(32)
        layers: list[nn.Module] = [conv_bn(3, channels, 3, 1 if small else 2, activation=nn.SiLU)]
        for expansion, kernel, stride, base_channels, blocks in self.STAGES:
            for block in range(blocks):
                layers.append(MBConv(channels, scaled(base_channels), kernel, stride if block == 0 else 1, expansion))
                channels = scaled(base_channels)
        layers.append(conv_bn(channels, 4 * channels, 1, activation=nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(4 * channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x)
