"""Boxes: the anchors of a detector, and post-processing of its outputs. On the host, in float, because choices depend on data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
        found = []
        for level, (feature, stride) in enumerate(zip(features, self.strides, strict=True)):
            boxes: Tensor = getattr(self, f"boxes{level}")
            height, width = feature.shape[2:]
            y, x = torch.meshgrid(torch.arange(height) * stride, torch.arange(width) * stride, indexing="ij")
            shifts = torch.stack((x, y, x, y), -1).reshape(-1, 1, 4).to(boxes)
            found.append((shifts + boxes).reshape(-1, 4))
        return found


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
        boxes = _decode(deltas, anchors).gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        labels = labels.gather(1, order)
        left, right = (
            torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2]),
            torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:]),
        )
        common = (right - left).clamp(min=0).prod(-1)
        area = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
        alike = labels[:, :, None] == labels[:, None, :]
        over = alike & (common > self.overlap * (area[:, :, None] + area[:, None, :] - common))
        kept = best > self.score_threshold
        for index in range(best.shape[1]):
            beaten = over[:, index] & kept[:, index : index + 1] & (torch.arange(best.shape[1], device=best.device) > index)
            kept = kept & ~beaten
        return boxes, torch.where(kept, best, torch.zeros_like(best)), torch.where(kept, labels, torch.full_like(labels, -1))


def _decode(deltas: Tensor, anchors: Tensor) -> Tensor:
    size = anchors[:, 2:] - anchors[:, :2]
    centre = anchors[:, :2] + size / 2 + deltas[..., :2] * size
    half = size * deltas[..., 2:].exp() / 2
    return torch.cat((centre - half, centre + half), -1)


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
        maps = empty.index_copy(0, index, features)[:nowhere]
        return maps.reshape(self.batch, height, width, -1).permute(0, 3, 1, 2)


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
        shares = depth.flatten(1).index_select(1, self.ranks_depth)
        points = features.transpose(1, 2).flatten(2).index_select(2, self.ranks_feat)
        weighted = points * shares.unsqueeze(1)
        cells = torch.zeros(points.shape[0], points.shape[1], height * width, dtype=weighted.dtype, device=weighted.device)
        return cells.index_add(2, self.ranks_bev, weighted).reshape(weighted.shape[0], -1, height, width)
