"""Sampling and comparison of feature maps at computed positions, boxes, points in bird's-eye-view maps, and functions as tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.errors import ConfigurationError
from fxquant.ops import FUNCTIONS
from fxquant.ops.core import custom
from fxquant.ops.layers.convolution import deform_conv2d
from fxquant.ops.sampling.resize import warp


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
            self.register_buffer(name, (torch.arange(count * sampling_ratio) + 0.5) / (count * sampling_ratio), persistent=False)

    def forward(self, features: Tensor, boxes: Tensor) -> Tensor:
        (height, width), count, rows, columns = features.shape[2:], boxes.shape[1], len(self.down), len(self.across)
        x = self._along(boxes[:, :, 0::2], self.across, 2 * self.spatial_scale / width)
        y = self._along(boxes[:, :, 1::2], self.down, 2 * self.spatial_scale / height)
        x = x.unsqueeze(2).expand(-1, -1, rows, -1)
        y = y.unsqueeze(3).expand(-1, -1, -1, columns)
        grid = torch.stack((x, y), -1).reshape(-1, count * rows, columns, 2)
        cells = F.avg_pool2d(F.grid_sample(features, grid, padding_mode="border", align_corners=False), self.sampling_ratio)
        unflattened: Tensor = cells.unflatten(2, (count, self.output_size[0]))  # type: ignore[no-untyped-call]
        return unflattened.transpose(1, 2)

    @staticmethod
    def _along(ends: Tensor, points: Tensor, scale: float) -> Tensor:
        """Return the positions of sampling points on a grid from -1 to 1, (N, K, points), from the two ends of boxes (N, K, 2)."""
        return F.linear(ends, torch.stack((1 - points, points), 1) * scale, -torch.ones_like(points))


class MultiScaleRoIAlign(nn.Module):
    """RoIAlign of each box on the feature map of a pyramid that fits its size: forward(features, boxes), (N, K, C, h, w).

    features is a list of maps, the finest first; map l has `spatial_scales[l]` times the image's size. boxes are as in RoIAlign.
    A box of canonical_scale² pixels is read from the level of scale 2^-canonical_level, one of twice the side from the next coarser one,
    as in Lin et al., Feature Pyramid Networks, 2017. Boxes are read from every level, and one result is chosen.
    """

    def __init__(
        self, output_size: Any, spatial_scales: Sequence[float], sampling_ratio: int = 2, canonical_scale: float = 224,
        canonical_level: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        self.levels = nn.ModuleList(RoIAlign(output_size, scale, sampling_ratio) for scale in spatial_scales)
        steps = [-math.log2(scale) - canonical_level for scale in spatial_scales[1:]]
        self.sides = [canonical_scale * 2.0**step for step in steps]  # the least side of a box of the next level

    def forward(self, features: Sequence[Tensor], boxes: Tensor) -> Tensor:
        size = (boxes[:, :, 2:] - boxes[:, :, :2]).clamp(min=0)
        area = (size[:, :, 0] * size[:, :, 1])[:, :, None, None, None]
        aligned = [level(maps, boxes) for level, maps in zip(self.levels, features, strict=True)]
        pooled: Tensor = aligned[0]
        for side, coarser in zip(self.sides, aligned[1:], strict=True):
            pooled = torch.where(area >= side * side, coarser, pooled)
        return pooled


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
        return (torch.cat(levels, -1) * weights).sum(-1).reshape(-1, heads * channels, queries).transpose(1, 2)


# ---- Boxes: the anchors of a detector, and post-processing of its outputs. On the host, in float: choices depend on data
class AnchorGenerator(nn.Module):
    """The reference boxes x1 y1 x2 y2 of a detector: for each feature map (N, C, H, W) of a list, (H·W·anchors, 4), row by row.

    sizes, ratios  of every feature map: the square root of a box's area, and its height by its width; one box for each pair
    strides        how many pixels of the image a pixel of each feature map covers; boxes are centred on multiples of it
    As in Ren et al., Faster R-CNN, 2015. They depend only on shapes, and are constants of a compiled model.
    """

    def __init__(self, sizes: Sequence[Sequence[float]], ratios: Sequence[Sequence[float]], strides: Sequence[int]) -> None:
        super().__init__()
        self.strides = list(strides)
        for level, (lengths, shapes) in enumerate(zip(sizes, ratios, strict=True)):
            boxes = [
                (-size / math.sqrt(ratio), -size * math.sqrt(ratio), size / math.sqrt(ratio), size * math.sqrt(ratio))
                for ratio in shapes
                for size in lengths
            ]
            self.register_buffer(f"boxes{level}", torch.tensor(boxes) / 2, persistent=False)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        anchors = []
        for level, (feature, stride) in enumerate(zip(features, self.strides, strict=True)):
            boxes: Tensor = getattr(self, f"boxes{level}")
            height, width = feature.shape[2:]
            y, x = torch.meshgrid(torch.arange(height) * stride, torch.arange(width) * stride, indexing="ij")
            shifts = torch.stack((x, y, x, y), -1).reshape(-1, 1, 4).to(boxes)
            anchors.append((shifts + boxes).reshape(-1, 4))
        return anchors


class DetectionPostProcess(nn.Module):
    """Scores (N, A, classes), deltas (N, A, 4) and anchors (A, 4) to (boxes (N, keep, 4), scores (N, keep), labels (N, keep)).

    The `keep` best boxes whose score exceeds the threshold, decoded (dx, dy, dw, dh in units of their anchors), without those that overlap
    a better one of their class by more than `overlap`: as in Ren et al., Faster R-CNN, 2015. Unused slots have score 0 and
    label -1. The selection depends on data and is sequential, so it is best called on the outputs of a compiled model, on the host.
    """

    def __init__(self, keep: int = 100, score_threshold: float = 0.05, overlap: float = 0.5) -> None:
        super().__init__()
        self.keep, self.score_threshold, self.overlap = keep, score_threshold, overlap

    def forward(self, scores: Tensor, deltas: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best, labels = scores.max(-1)
        best, order = best.topk(min(self.keep, best.shape[1]), 1)
        size = anchors[:, 2:] - anchors[:, :2]
        centre = anchors[:, :2] + size / 2 + deltas[..., :2] * size
        half = size * deltas[..., 2:].exp() / 2
        boxes = torch.cat((centre - half, centre + half), -1).gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        labels = labels.gather(1, order)
        left = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
        right = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
        common = (right - left).clamp(min=0).prod(-1)
        area = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
        alike = labels[:, :, None] == labels[:, None, :]
        over = alike & (common > self.overlap * (area[:, :, None] + area[:, None, :] - common))
        mask = best > self.score_threshold
        for index in range(best.shape[1]):
            beaten = over[:, index] & mask[:, index : index + 1] & (torch.arange(best.shape[1], device=best.device) > index)
            mask = mask & ~beaten
        return boxes, torch.where(mask, best, torch.zeros_like(best)), torch.where(mask, labels, torch.full_like(labels, -1))


# ---- Scatter of points to bird's-eye-view maps. The positions of elements are data, so these run in float ------------
class PointPillarsScatter(nn.Module):
    """Features of pillars (P, C) at coordinates (P, 4), batch, z, y, x, as maps (batch, C, H, W); 0 in cells without a pillar.

    Pillars with a negative coordinate are dropped: they are padding to a fixed number of pillars for every cloud of points.
    From: Lang et al., PointPillars, 2019.
    """

    def __init__(self, size: Sequence[int], batch: int = 1) -> None:
        super().__init__()
        self.size, self.batch = tuple(size), batch

    def forward(self, features: Tensor, coordinates: Tensor) -> Tensor:
        height, width = self.size
        places = coordinates.long()
        index = (places[:, 0] * height + places[:, 2]) * width + places[:, 3]
        nowhere = self.batch * height * width
        index = torch.where((places < 0).any(1), nowhere, index)
        empty = torch.zeros(nowhere + 1, features.shape[1], dtype=features.dtype, device=features.device)
        return empty.index_copy(0, index, features)[:nowhere].reshape(self.batch, height, width, -1).permute(0, 3, 1, 2)


class BEVPool(nn.Module):
    """Σ depth · features over the points in each cell of a bird's-eye-view map: (N, C, H, W).

    depth (N, cameras, D, h, w), features (N, cameras, C, h, w); ranks_depth, ranks_feat and ranks_bev give, for each point in use, its
    element of depth, pixel of features (both without the batch) and cell. From: Huang et al., BEVDet / BEVPoolv2, 2022.
    """

    ranks_depth: Tensor
    ranks_feat: Tensor
    ranks_bev: Tensor

    def __init__(self, size: Sequence[int], ranks_depth: Tensor, ranks_feat: Tensor, ranks_bev: Tensor) -> None:
        super().__init__()
        self.size = tuple(size)
        for name, ranks in (("ranks_depth", ranks_depth), ("ranks_feat", ranks_feat), ("ranks_bev", ranks_bev)):
            self.register_buffer(name, ranks.long())

    def forward(self, depth: Tensor, features: Tensor) -> Tensor:
        height, width = self.size
        points = features.transpose(1, 2).flatten(2).index_select(2, self.ranks_feat)
        weighted = points * depth.flatten(1).index_select(1, self.ranks_depth).unsqueeze(1)
        cells = torch.zeros(points.shape[0], points.shape[1], height * width, dtype=weighted.dtype, device=weighted.device)
        return cells.index_add(2, self.ranks_bev, weighted).reshape(weighted.shape[0], -1, height, width)


_DECLARED: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {}


class SegmentLUT(nn.Module):
    """An elementwise function of one tensor as one table: of 256 entries in int8 and uint8, of 65,536 in int16.

    function  differentiable; one of PyTorch's, or composed of several
    name      that of its operator in graphs; a function made with `def` has its own. Two modules of one function share it.

    A march's form of a 16-bit table, lines and segments of 64 entries, is its compiler's compression of an equivalent table. Raises
    ConfigurationError if the name is another function's, and if there is none: a lambda, a partial and a callable object have none.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], name: str | None = None) -> None:
        super().__init__()
        registered = function in FUNCTIONS or function in _DECLARED
        called = name or str(getattr(function, "__name__", ""))
        if not registered and not called.isidentifier():
            because = f"{called or type(function).__name__} is not a name, and a file identifies the function of a table by its name"
            remedy = 'name it: SegmentLUT(function, name="…"), a different name for each function'
            raise ConfigurationError("the table of a function without a name cannot be declared", because=because, remedy=remedy)
        if not registered:
            _DECLARED[function] = custom.unary(called, function)
        self.function = _DECLARED.get(function, function)

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)
