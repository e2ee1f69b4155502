"""Horizon's functions and modules of boxes, regions and points. In float where choices depend on data: on the host.

Operators whose choices depend on data are single Python calls in a model's graph, after its integers: the plugin also calls them after its
DeQuantStubs. Boxes are x1 y1 x2 y2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat.common import unserved


def _kept(boxes: Tensor, scores: Tensor, threshold: float, labels: Tensor | None) -> Tensor:
    """Return indices (int64) of boxes that no better box of the same label overlaps by more than `threshold`, the best first."""
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    left, right = torch.maximum(boxes[:, None, :2], boxes[None, :, :2]), torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (right - left).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(-1)
    union = area[:, None] + area[None, :] - common
    beats = torch.where(union > 0, common / union, torch.zeros_like(common)) > threshold
    if labels is not None:
        beats &= labels[order][:, None] == labels[order][None, :]
    stays = torch.ones(len(order), dtype=torch.bool, device=boxes.device)
    for index in range(len(order)):
        if stays[index]:
            stays[index + 1 :] &= ~beats[index, index + 1 :]
    return order[stays]


@fxq.wrap
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the int64 indices of the kept boxes (N, 4), best first: a box is dropped if a better one overlaps it above the threshold."""
    return _kept(boxes, scores, iou_threshold, None)


@fxq.wrap
def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Compute `nms` separately for the boxes of each category, `idxs` (N,)."""
    return _kept(boxes, scores, iou_threshold, idxs)


@fxq.wrap
def nms_of_scores(
    boxes: Tensor, scores: Tensor, category_idxs: Tensor, iou_threshold: float, score_threshold: float | None = None,
    pre_nms_top_n: int | None = None, output_num: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `nms` of the plugin's nn.functional: return the kept boxes, scores and categories, best first, at most `output_num`.

    Of the boxes (N, 4) whose score (N,) is not below the threshold, the best `pre_nms_top_n` are used. None sets no limit.
    """
    order = scores.argsort(descending=True, stable=True)
    if score_threshold is not None:
        order = order[scores[order] >= score_threshold]
    order = order[:pre_nms_top_n]
    order = order[_kept(boxes[order], scores[order], iou_threshold, category_idxs[order])][:output_num]
    return boxes[order], scores[order], category_idxs[order]


# ---- features of boxes, over `fxquant.nn.RoIAlign` ---------------------------------------------------------------------
def _lists(boxes: Any) -> list[Tensor]:
    """Return the boxes of each item, (K, 4), from a list, or from (N, K, 4) or (N, K, 6), whose scores and classes are left out."""
    return [each[:, :4] for each in (list(boxes.unbind(0)) if isinstance(boxes, Tensor) else list(boxes))]


def _batched(features: Sequence[Tensor], boxes: list[Tensor], align: Any) -> Tensor:
    """Apply `align` to features and boxes (N, K, 4), as (N · K, C, h, w); item by item if the items' numbers of boxes differ."""
    if len({len(each) for each in boxes}) == 1:
        return align(features, torch.stack(boxes)).flatten(0, 1)  # type: ignore[no-any-return]
    parts = [align([level[item : item + 1] for level in features], each[None]).flatten(0, 1) for item, each in enumerate(boxes)]
    return torch.cat(parts)


class _Level(nn.Module):
    """`fxquant.nn.RoIAlign` of one level; without `aligned` boxes have no half-pixel offset, and are at least one pixel of the level."""

    def __init__(self, output_size: Any, scale: float, sampling_ratio: int, aligned: bool) -> None:
        super().__init__()
        self.align, self.pixel, self.aligned = fxq.nn.RoIAlign(output_size, scale, sampling_ratio), 1 / scale, aligned

    def forward(self, features: Tensor, boxes: Tensor) -> Tensor:
        if not self.aligned:  # compensates the half-pixel offset
            start = boxes[..., :2] + self.pixel / 2
            boxes = torch.cat((start, start + (boxes[..., 2:] - boxes[..., :2]).clamp(min=self.pixel)), -1)
        return self.align(features, boxes)  # type: ignore[no-any-return]


class RoIAlign(nn.Module):
    """The features of boxes: forward(features (N, C, H, W), rois), (sum of K, C, h, w). rois are a list of (K, 4), or (N, K, 4).

    As torchvision's, with its default `aligned` False: without half-pixel offsets. Points outside of a map have the values
    of its border. In a traced model every item has the same number of boxes. Raises ConfigurationError for sampling_ratio -1, which
    depends on data, and for another mode than "bilinear".
    """

    def __init__(
        self, output_size: Any, spatial_scale: float = 1.0, sampling_ratio: int = 1, aligned: bool | None = None,
        interpolate_mode: str = "bilinear",
    ) -> None:  # fmt: skip
        super().__init__()
        _check("RoIAlign", sampling_ratio, interpolate_mode)
        self.level = _Level(output_size, spatial_scale, sampling_ratio, bool(aligned))

    def forward(self, features: Tensor, rois: Any) -> Tensor:
        return _batched([features], _lists(rois), lambda levels, boxes: self.level(levels[0], boxes))


class MultiScaleRoIAlign(nn.Module):
    """The features of boxes, each from the level of a pyramid that fits its size: forward(features, boxes), (sum of K, C, h, w).

    features  maps (N, C, H, W), one for each of the strides, which are powers of two, the smallest first
    boxes     a list of (K, 4) in the image's pixels for each item, or (N, K, 4 or 6)

    A box of side √((w + 1)(h + 1)) = canonical_box_size is read from the level of stride 2^canonical_level, one of twice the side from the
    next coarser one. Without `aligned` (False, or None as on bernoulli2) half-pixel offsets are not used. Every level is read for every
    box, and one result is chosen, so that positions may be integers.

    Raises ConfigurationError for sampling_ratio below 1, another mode than "bilinear", and box_clip_ratio.
    """

    def __init__(
        self, output_size: Any, feature_strides: Sequence[int], sampling_ratio: int = 1, interpolate_mode: str = "bilinear",
        canonical_box_size: int = 224, canonical_level: int = 4, aligned: bool | None = False, box_clip_ratio: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check("MultiScaleRoIAlign", sampling_ratio, interpolate_mode)
        if box_clip_ratio is not None:
            raise unserved("MultiScaleRoIAlign", "box_clip_ratio", "boxes are read whole", "clip the boxes before the call")
        self.levels = nn.ModuleList(_Level(output_size, 1 / stride, sampling_ratio, bool(aligned)) for stride in feature_strides)
        self.sides = [canonical_box_size * stride / 2**canonical_level for stride in feature_strides[1:]]

    def forward(self, x: Sequence[Tensor], box_lists: Any) -> Tensor:
        return _batched(list(x), _lists(box_lists), self._aligned)

    def _aligned(self, features: Sequence[Tensor], boxes: Tensor) -> Tensor:
        sides = boxes[..., 2:] - boxes[..., :2] + 1
        area = (sides[..., 0] * sides[..., 1])[:, :, None, None, None]
        read = [level(maps, boxes) for level, maps in zip(self.levels, features, strict=True)]
        pooled: Tensor = read[0]
        for side, coarser in zip(self.sides, read[1:], strict=True):
            pooled = torch.where(area >= side * side, coarser, pooled)
        return pooled


def _check(called: str, sampling_ratio: int, mode: str) -> None:
    if sampling_ratio < 1:
        raise unserved(called, "sampling_ratio", "how many points a cell has would depend on the boxes", "pass 1 or more")
    if mode != "bilinear":
        raise unserved(called, "interpolate_mode", "features are read between pixels", "pass 'bilinear'")


# ---- points as pillars, and pixels as a bird's-eye-view map ------------------------------------------------------------
SPACE = 3  # dimensions in which cells lie: x, y, z


@fxq.wrap
def voxelization(
    points: Tensor, voxel_size: Tensor, pc_range: Tensor, max_voxels: int, max_points_per_voxel: int, use_max: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Group points (P, 3 + features), x y z first, by cells: (voxels (M, points, 3 + features), cells (M, 3) z y x, numbers (M,)), int32.

    Cells are in the order of their first points, and points in a cell keep their order. Points outside of pc_range, x y z and x y z, are
    dropped, and so are cells and points beyond the maximum numbers. With `use_max` M is max_voxels: empty slots hold 0, their cells -1.
    """
    size, low, high = (part.to(points.device) for part in (voxel_size, pc_range[:SPACE], pc_range[SPACE:]))
    grid = ((high - low) / size).round().long()
    places = ((points[:, :SPACE] - low) / size).floor().long()
    inside = ((places >= 0) & (places < grid)).all(1)
    points, places = points[inside], places[inside]
    flat = (places[:, 2] * grid[1] + places[:, 1]) * grid[0] + places[:, 0]
    flat_cells, which = torch.unique(flat, return_inverse=True)
    order = torch.arange(len(flat), dtype=torch.int64, device=flat.device)
    first = torch.full((len(flat_cells),), len(flat), dtype=torch.int64, device=flat.device).scatter_reduce(0, which, order, "amin")
    rank = first.argsort().argsort()[which]  # for each point, the rank of its cell in the order of first points
    sorted_rank, source = rank.sort(stable=True)
    starts = torch.searchsorted(sorted_rank, torch.arange(len(flat_cells), dtype=torch.int64, device=flat.device))
    nth = order - starts[sorted_rank]
    fits = (sorted_rank < max_voxels) & (nth < max_points_per_voxel)
    cell, nth, source = sorted_rank[fits], nth[fits], source[fits]
    count = max_voxels if use_max else min(len(flat_cells), max_voxels)
    voxels = torch.zeros(count, max_points_per_voxel, points.shape[1], dtype=points.dtype, device=points.device)
    cells = torch.full((count, SPACE), -1, dtype=torch.int32, device=points.device)
    numbers = torch.zeros(count, dtype=torch.int32, device=points.device)
    voxels[cell, nth] = points[source]
    cells[cell] = places[source].flip(1).int()
    numbers.index_add_(0, cell, torch.ones_like(cell, dtype=torch.int32))
    return voxels, cells, numbers


@fxq.wrap
def point_pillars_preprocess(
    points_list: list[Tensor], pc_range: Tensor, voxel_size: Tensor, max_voxels: int, max_points_per_voxel: int, use_max: bool,
    norm_range: Tensor | None = None, norm_dims: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convert clouds of points (P, D) to (features (1, D, pillars, points), coordinates (pillars, 4) int32: item, z, y, x).

    Dimensions `norm_dims` are scaled to 0…1 over `norm_range`, its smallest values before its largest; by default, the
    first three over pc_range. Slots without a point hold 0; pillars without one, of `use_max`, have the coordinates item, -1, -1, -1.
    """
    ranges = pc_range if norm_range is None or norm_range.numel() == 0 else norm_range
    dims = torch.arange(SPACE, dtype=torch.int64, device=pc_range.device) if norm_dims is None else norm_dims.long()
    features, coordinates = [], []
    for item, points in enumerate(points_list):
        voxels, cells, numbers = voxelization(points, voxel_size, pc_range, max_voxels, max_points_per_voxel, use_max)
        if len(dims):
            low, high = (ends.to(voxels)[dims.to(ends.device)] for ends in ranges.reshape(2, -1))
            voxels[:, :, dims] = (voxels[:, :, dims] - low) / (high - low)
        place = torch.arange(max_points_per_voxel, dtype=torch.int32, device=voxels.device)
        features.append(voxels * (place < numbers[:, None]).unsqueeze(-1))
        coordinates.append(torch.cat((torch.full_like(cells[:, :1], item), cells), 1))
    return torch.cat(features).permute(2, 0, 1).unsqueeze(0).contiguous(), torch.cat(coordinates)
