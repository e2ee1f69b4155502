"""Sampling and comparison of feature maps at computed positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.ops.layers.deformable import deform_conv2d
from fxquant.ops.sampling.grid import warp


class Warp(nn.Module):
    """The image (N, C, H, W) sampled at (x + flow[…, 0], y + flow[…, 1]) for each pixel (x, y) of a flow (N, H', W', 2) of pixels.

    mode is "bilinear" or "nearest", padding_mode "zeros", "border" or "reflection". Integer on every target.
    """

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros") -> None:
        super().__init__()
        self.mode, self.padding_mode = mode, padding_mode

    def forward(self, image: Tensor, flow: Tensor) -> Tensor:
        return warp(image, flow, self.mode, self.padding_mode)


class DeformConv2d(nn.Conv2d):
    """Deformable convolution, with torchvision's arguments: forward(input, offset, mask=None). Integer on every target.

    offset (N, 2·groups·kh·kw, H', W') in pixels, y before x; mask (N, groups·kh·kw, H', W'), a factor for each tap.
    From: Zhu et al., Deformable ConvNets v2, 2019.
    """

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return deform_conv2d(input, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)


class Correlation(nn.Module):
    """The similarity of two feature maps at every displacement: (N, D², H, W), the mean over channels of x · y moved, row by row.

    The displacements are -max_displacement, …, max_displacement in steps of `stride`, D in each direction; outside of y is 0.
    The correlation layer of Dosovitskiy et al., FlowNet, 2015, with a kernel of one pixel. Integer on every target.
    """

    def __init__(self, max_displacement: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.max_displacement, self.stride = max_displacement, stride

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reach, (height, width) = self.max_displacement, x.shape[2:]
        padded = F.pad(y, (reach, reach, reach, reach))
        starts = range(0, 2 * reach + 1, self.stride)
        moved = [(x * padded[:, :, row : row + height, column : column + width]).mean(1) for row in starts for column in starts]
        return torch.stack(moved, 1)


class RoIAlign(nn.Module):
    """The features (N, C, H, W) of boxes (N, K, 4), x1 y1 x2 y2 in the image's pixels, each resized to output_size: (N, K, C, h, w).

    Every cell is the mean of sampling_ratio² points, interpolated between pixels; every image has the same number of boxes. As RoI Align
    of He et al., Mask R-CNN, 2017, with half-pixel offsets (aligned=True). Boxes should have 16 bits, which they get by default.
    """

    down: Tensor
    across: Tensor

    def __init__(self, output_size: Any, spatial_scale: float = 1.0, sampling_ratio: int = 2) -> None:
        super().__init__()
        self.output_size = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
        self.spatial_scale, self.sampling_ratio = spatial_scale, sampling_ratio
        for name, count in zip(("down", "across"), self.output_size, strict=True):
            points = (torch.arange(count * sampling_ratio) + 0.5) / (count * sampling_ratio)
            self.register_buffer(name, points, persistent=False)

    def forward(self, features: Tensor, boxes: Tensor) -> Tensor:
        (height, width), count, rows, columns = features.shape[2:], boxes.shape[1], len(self.down), len(self.across)
        x = self._along(boxes[:, :, 0::2], self.across, 2 * self.spatial_scale / width)
        y = self._along(boxes[:, :, 1::2], self.down, 2 * self.spatial_scale / height)
        x = x.unsqueeze(2).expand(-1, -1, rows, -1)
        y = y.unsqueeze(3).expand(-1, -1, -1, columns)
        grid = torch.stack((x, y), -1).reshape(-1, count * rows, columns, 2)
        points = F.grid_sample(features, grid, padding_mode="border", align_corners=False)
        cells = F.avg_pool2d(points, self.sampling_ratio)
        unflattened: Tensor = cells.unflatten(2, (count, self.output_size[0]))  # type: ignore[no-untyped-call]
        return unflattened.transpose(1, 2)

    @staticmethod
    def _along(ends: Tensor, points: Tensor, scale: float) -> Tensor:
        """Return the positions of sampling points on a grid from -1 to 1, (N, K, points), from the two ends of boxes (N, K, 2)."""
        return F.linear(ends, torch.stack((1 - points, points), 1) * scale, -torch.ones_like(points))


class MultiScaleRoIAlign(nn.Module):
    """RoIAlign of each box on the feature map of a pyramid that fits its size: forward(features, boxes), (N, K, C, h, w).

    features is a list of maps, level l of which has `spatial_scales`[l] of the image's size, the finest first; boxes are those of RoIAlign.
    A box of canonical_scale² pixels is read from the level of scale 2^-canonical_level, one of twice the side from the next coarser one,
    as Lin et al., Feature Pyramid Networks, 2017, assign them. Boxes are read from every level, and one result is chosen.
    """

    def __init__(
        self,
        output_size: Any,
        spatial_scales: Sequence[float],
        sampling_ratio: int = 2,
        canonical_scale: float = 224,
        canonical_level: int = 4,
    ) -> None:
        super().__init__()
        self.levels = nn.ModuleList(RoIAlign(output_size, scale, sampling_ratio) for scale in spatial_scales)
        steps = [-math.log2(scale) - canonical_level for scale in spatial_scales[1:]]
        self.sides = [canonical_scale * 2.0**step for step in steps]  # the least side of a box of the next level

    def forward(self, features: Sequence[Tensor], boxes: Tensor) -> Tensor:
        size = (boxes[:, :, 2:] - boxes[:, :, :2]).clamp(min=0)
        area = (size[:, :, 0] * size[:, :, 1])[:, :, None, None, None]
        aligned = [level(maps, boxes) for level, maps in zip(self.levels, features, strict=True)]
        found: Tensor = aligned[0]
        for side, coarser in zip(self.sides, aligned[1:], strict=True):
            found = torch.where(area >= side * side, coarser, found)
        return found


class MultiScaleDeformableAttention(nn.Module):
    """The sampling of Zhu et al., Deformable DETR, 2020: forward(value, spatial_shapes, sampling_locations, attention_weights).

    value (N, Σ H·W, heads, channels) of concatenated feature maps, whose sizes, a list of (H, W), are given to the constructor or
    to the call; sampling_locations (N, queries, heads, levels, points, 2), x first, from 0 to 1; attention_weights (N, queries, heads,
    levels, points). Returns (N, queries, heads · channels). Integer if the target has int16 or the locations tolerate int8.
    """

    def __init__(self, spatial_shapes: Any = None) -> None:
        super().__init__()
        self.spatial_shapes = spatial_shapes

    def forward(self, value: Tensor, sampling_locations: Tensor, attention_weights: Tensor, spatial_shapes: Any = None) -> Tensor:
        shapes = [(int(height), int(width)) for height, width in (spatial_shapes or self.spatial_shapes)]
        heads, channels = value.shape[2:]
        queries, _, _, points = sampling_locations.shape[1:5]
        grids = 2 * sampling_locations - 1
        levels, start = [], 0
        for level, (height, width) in enumerate(shapes):
            image = value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(-1, channels, height, width)
            grid = grids[:, :, :, level].transpose(1, 2).reshape(-1, queries, points, 2)
            levels.append(F.grid_sample(image, grid, align_corners=False))
            start += height * width
        weights = attention_weights.transpose(1, 2).reshape(-1, 1, queries, len(shapes) * points)
        summed = (torch.cat(levels, -1) * weights).sum(-1)
        return summed.reshape(-1, heads * channels, queries).transpose(1, 2)
