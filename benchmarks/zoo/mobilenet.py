"""MobileNetV2 and MobileNetV3-small, in torchvision's shape."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_bn(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, activation: Callable[[], nn.Module] | None = nn.ReLU
) -> nn.Sequential:
    """Return a convolution without bias, its batch norm, and an activation if there is one."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), *([] if activation is None else [activation()]))


_conv_bn_relu6 = partial(conv_bn, activation=partial(nn.ReLU6, inplace=True))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, depthwise 3×3, narrow without activation."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        widen = [] if expansion == 1 else [_conv_bn_relu6(in_channels, hidden, kernel=1)]
        filter_and_narrow = [
            _conv_bn_relu6(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*widen, *filter_and_narrow)
        self.use_res_connect = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.use_res_connect else out


class MobileNetV2(nn.Module):
    """torchvision's MobileNetV2 with torchvision's parameter names; `small` drops the first two strides for 32×32 images."""

    # expansion, output channels at width 1, number of blocks, stride of the first block
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, num_classes: int = 1000, width: float = 1.0, small: bool = False) -> None:
        super().__init__()
        channels = _divisible_by_eight(32 * width)
        last_channels = _divisible_by_eight(1280 * max(1.0, width))
        layers: list[nn.Module] = [_conv_bn_relu6(3, channels, kernel=3, stride=1 if small else 2)]
        for stage, (expansion, base_channels, blocks, stage_stride) in enumerate(self.STAGES):
            out_channels = _divisible_by_eight(base_channels * width)
            for block in range(blocks):
                stride = stage_stride if block == 0 and not (small and stage == 1) else 1
                layers.append(InvertedResidual(channels, out_channels, stride, expansion))
                channels = out_channels
        layers.append(_conv_bn_relu6(channels, last_channels, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last_channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        return self.classifier(x)


def _divisible_by_eight(channels: float) -> int:
    """The nearest multiple of eight, at least eight, and never more than a tenth below `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


# -------------------------------------------------------------------------------------------------- MobileNetV3


class SqueezeExcitation(nn.Module):
    """Every channel times a gate, which two 1×1 convolutions make of the channels' means."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation
        self.scale_activation = gate

    def forward(self, x: Tensor) -> Tensor:
        scale = self.activation(self.fc1(self.avgpool(x)))
        scale = self.scale_activation(self.fc2(scale))
        return scale * x


class InvertedResidualV3(nn.Module):
    """MobileNetV3's block: widen, depthwise, squeeze-excitation, narrow without activation."""

    def __init__(
        self, in_channels: int, kernel: int, hidden: int, out_channels: int, squeeze: bool, activation: type[nn.Module], stride: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [] if hidden == in_channels else [conv_bn(in_channels, hidden, 1, activation=activation)]
        layers.append(conv_bn(hidden, hidden, kernel, stride, groups=hidden, activation=activation))
        if squeeze:
            layers.append(SqueezeExcitation(hidden, _divisible_by_eight(hidden // 4), nn.ReLU(), nn.Hardsigmoid()))
        layers.append(conv_bn(hidden, out_channels, 1, activation=None))
        self.block = nn.Sequential(*layers)
        self.use_res_connect = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        if self.use_res_connect:
            result += x
        return result


class MobileNetV3Small(nn.Module):
    """torchvision's MobileNetV3-small; `small` drops the first two strides for 32×32 images."""

    # kernel, hidden channels, output channels, squeeze-excitation, hardswish, stride
    BLOCKS = (
        (3, 16, 16, True, False, 2), (3, 72, 24, False, False, 2), (3, 88, 24, False, False, 1), (5, 96, 40, True, True, 2),
        (5, 240, 40, True, True, 1), (5, 240, 40, True, True, 1), (5, 120, 48, True, True, 1), (5, 144, 48, True, True, 1),
        (5, 288, 96, True, True, 2), (5, 576, 96, True, True, 1), (5, 576, 96, True, True, 1),
    )  # fmt: skip

    def __init__(self, num_classes: int = 1000, small: bool = False) -> None:
        super().__init__()
        channels = 16
        layers: list[nn.Module] = [conv_bn(3, channels, 3, 1 if small else 2, activation=nn.Hardswish)]
        for index, (kernel, hidden, out_channels, squeeze, hardswish, stride) in enumerate(self.BLOCKS):
            activation = nn.Hardswish if hardswish else nn.ReLU
            stride = 1 if small and index == 0 else stride
            layers.append(InvertedResidualV3(channels, kernel, hidden, out_channels, squeeze, activation, stride))
            channels = out_channels
        layers.append(conv_bn(channels, 6 * channels, 1, activation=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, 1024), nn.Hardswish(inplace=True), nn.Dropout(0.2), nn.Linear(1024, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x)
