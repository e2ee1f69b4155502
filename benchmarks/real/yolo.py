"""YOLOv8n, with the parameter names of its checkpoints, whose batch norms are folded into convolutions.

Jocher, Chaurasia, Qiu: Ultralytics YOLOv8, 2023. Its output (N, 4 + classes, places) holds centre and size of a box in pixels, and a score
in 0 to 1 for each class. Every SiLU is written as its ONNX file has it, as a product with a sigmoid.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STRIDES, LEVELS = (8, 16, 32), 16  # pixels between places; distances that a side of a box is the mean of


class Conv(nn.Module):
    def __init__(self, channels: int, out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * torch.sigmoid(x)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, adds: bool) -> None:
        super().__init__()
        self.cv1, self.cv2, self.adds = Conv(channels, channels, 3), Conv(channels, channels, 3), adds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x)) if self.adds else self.cv2(self.cv1(x))


class Split(nn.Module):
    """C2f: half of the channels goes through bottlenecks, and all of their outputs are concatenated."""

    def __init__(self, channels: int, out: int, count: int, adds: bool) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(channels, out), Conv((2 + count) * out // 2, out)
        self.m = nn.ModuleList(Bottleneck(out // 2, adds) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """SPPF: three poolings, one after the other, concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(channels, channels // 2), Conv(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.cv2(torch.cat(parts, 1))


class Detect(nn.Module):
    def __init__(self, channels: tuple[int, ...], classes: int, size: int) -> None:
        super().__init__()
        self.cv2, self.cv3 = (
            nn.ModuleList(nn.Sequential(Conv(each, 64, 3), Conv(64, 64, 3), nn.Conv2d(64, out, 1)) for each in channels)
            for out in (4 * LEVELS, classes)
        )
        self.dfl = nn.Module()
        self.dfl.conv = nn.Conv2d(LEVELS, 1, 1, bias=False)
        grids = [torch.arange(size // stride) + 0.5 for stride in STRIDES]
        places = [torch.stack(torch.meshgrid(grid, grid, indexing="xy")).flatten(1) for grid in grids]
        self.register_buffer("anchors", torch.cat(places, 1), persistent=False)
        strides = [torch.full((place.shape[1],), float(stride)) for place, stride in zip(places, STRIDES, strict=True)]
        self.register_buffer("strides", torch.cat(strides), persistent=False)

    def forward(self, maps: list[Tensor]) -> Tensor:
        sides, scores = (
            torch.cat([head(x).flatten(2) for head, x in zip(heads, maps, strict=True)], 2)  # type: ignore[operator]
            for heads in (self.cv2, self.cv3)
        )
        sides = sides.reshape(-1, 4, LEVELS, sides.shape[2]).transpose(1, 2)
        low, high = self.dfl.conv(sides.softmax(1)).flatten(1, 2).chunk(2, 1)  # type: ignore[operator]
        low, high = self.anchors - low, self.anchors + high
        return torch.cat((torch.cat(((low + high) / 2, high - low), 1) * self.strides, torch.sigmoid(scores)), 1)


class YoloV8n(nn.Module):
    """Boxes of square images (N, 3, size, size), from 0 to 1."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        up, joined = nn.Upsample(scale_factor=2), nn.Identity()
        self.model = nn.ModuleList((
            Conv(3, 16, 3, 2), Conv(16, 32, 3, 2), Split(32, 32, 1, True), Conv(32, 64, 3, 2), Split(64, 64, 2, True),
            Conv(64, 128, 3, 2), Split(128, 128, 2, True), Conv(128, 256, 3, 2), Split(256, 256, 1, True), Pyramid(256),
            up, joined, Split(384, 128, 1, False), up, joined, Split(192, 64, 1, False),
            Conv(64, 64, 3, 2), joined, Split(192, 128, 1, False), Conv(128, 128, 3, 2), joined, Split(384, 256, 1, False),
            Detect((64, 128, 256), classes, size),
        ))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        joins, outputs = {11: 6, 14: 4, 17: 12, 20: 9}, list[Tensor]()
        for index, layer in enumerate(self.model[:-1]):
            x = torch.cat((x, outputs[joins[index]]), 1) if index in joins else layer(x)
            outputs.append(x)
        return self.model[-1]([outputs[15], outputs[18], outputs[21]])
