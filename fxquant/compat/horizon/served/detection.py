"""Horizon's functions and modules of boxes, regions and points. In float where choices depend on data: on the host.

Operators whose choices depend on data are single Python calls in a model's graph, after its integers: the plugin also calls them after its
DeQuantStubs. Boxes are x1 y1 x2 y2.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat.common import refused, unserved

LARGEST_LOG_RATIO = math.log(1000 / 16)  # of dw and dh: a box of 1000 pixels for an anchor of 16, as in torchvision


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


def _decoded(deltas: Tensor, anchors: Tensor) -> Tensor:
    """Return the boxes of deltas (…, 4), dx dy dw dh in units of their anchors (…, 4)."""
    size = anchors[..., 2:] - anchors[..., :2]
    centre = anchors[..., :2] + size / 2 + deltas[..., :2] * size
    half = deltas[..., 2:].clamp(max=LARGEST_LOG_RATIO).exp() * size / 2
    return torch.cat((centre - half, centre + half), -1)


def _clipped(boxes: Tensor, size: Any) -> Tensor:
    height, width = (float(length) for length in size)
    return boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height], dtype=boxes.dtype, device=boxes.device))


def _rows(maps: Tensor, count: int, batch: int) -> Tensor:
    """Return maps (N, anchors · count, H, W) as (N, H · W · anchors, count), pixel by pixel; (A, count) and (N, A, count) likewise."""
    if maps.dim() == 4:
        return maps.permute(0, 2, 3, 1).reshape(len(maps), -1, count)
    return maps.expand(batch, -1, -1) if maps.dim() == 2 else maps


@fxq.wrap
def _detect(
    boxes: list[Tensor], scores: list[Tensor], regressions: list[Tensor], image_shapes: Tensor | None, settings: dict[str, Any]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    batch, each = len(scores[0]), settings["nms_on_each_level"]
    detections = []
    for item in range(batch):
        size = settings["image_size"] if image_shapes is None else image_shapes[item]
        levels = []
        for anchors, score, delta in zip(boxes, scores, regressions, strict=True):
            count = anchors.shape[1] // 4 if anchors.dim() == 4 else 0
            classes = score.shape[1] // count if count else score.shape[-1]
            coded = delta.shape[1] // count if count else delta.shape[-1]
            parts = [_rows(maps, width, batch)[item] for maps, width in ((anchors, 4), (score, classes), (delta, coded))]
            level = _of_level(parts[0], parts[1], parts[2], size, settings)
            levels.append(_best(level, settings) if each else level)
        boxes_, best, labels = (torch.cat(parts) for parts in zip(*levels, strict=True))
        detections.append((boxes_, best, labels) if each else _best((boxes_, best, labels), settings))
    return tuple(zip(*detections, strict=True))  # type: ignore[return-value]


def _of_level(anchors: Tensor, scores: Tensor, deltas: Tensor, size: Any, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the boxes, scores and labels of a level: one box for each anchor and class."""
    indices = (scores.amax(1) >= settings["score_threshold"]).nonzero()[:, 0]
    if settings["pre_decode_top_n"]:
        indices = indices[scores[indices, 0].argsort(descending=True, stable=True)[: settings["pre_decode_top_n"]]]
    anchors, scores, deltas = anchors[indices], scores[indices], deltas[indices]
    classes = scores.shape[1]
    if settings["regression_scale"] is not None:
        scale = torch.tensor(settings["regression_scale"], dtype=deltas.dtype, device=deltas.device)
        deltas = deltas * scale.repeat(deltas.shape[1] // 4)
    own = deltas.reshape(len(deltas), -1, 4).expand(-1, classes, -1)
    decoded = _decoded(own, anchors[:, None].expand(-1, classes, -1))
    decoded = decoded if size is None else _clipped(decoded, size)
    labels = torch.arange(classes, dtype=torch.int64, device=scores.device).expand(len(scores), -1)
    stays = torch.ones_like(labels, dtype=torch.bool)
    if settings["background_class_idx"] is not None:
        stays &= labels != settings["background_class_idx"]
    if settings["size_threshold"] is not None:
        stays &= ((decoded[..., 2:] - decoded[..., :2]) >= settings["size_threshold"]).all(-1)
    boxes, best, kinds = decoded[stays], scores[stays], labels[stays]
    if settings["post_decode_top_n"]:
        order = best.argsort(descending=True, stable=True)[: settings["post_decode_top_n"]]
        boxes, best, kinds = boxes[order], best[order], kinds[order]
    return boxes, best, kinds


def _best(detections: tuple[Tensor, Tensor, Tensor], settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    if settings["iou_threshold"] is None:
        return detections
    limits = [settings[name] for name in ("iou_threshold", "score_threshold", "pre_nms_top_n", "post_nms_top_n")]
    return nms_of_scores(*detections, *limits)  # type: ignore[no-any-return]


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor that a graph can hold: numbers, strings, None and lists of numbers."""
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {name: list(v) if isinstance(v, list | tuple) else v for name, v in plain.items() if isinstance(v, kinds)}


class DetectionPostProcess(nn.Module):
    """Post-processing of a detector's outputs to (boxes, scores, labels), each a tuple of one tensor (M, 4) or (M,) per item; int64 labels.

    forward(boxes, scores, regressions, image_shapes=None), lists with an entry for each level: anchors (N, anchors · 4, H, W), scores
    (N, anchors · classes, H, W), deltas (N, anchors · 4, H, W) or (N, anchors · classes · 4, H, W); or anchors (A, 4), scores
    (N, A, classes) and deltas (N, A, 4). image_shapes (N, 2), height and width, overrides image_size. In this order:

    score_threshold       anchors are dropped whose largest score is below it
    pre_decode_top_n      of each level, the best by their first score
    regression_scale      four factors of the deltas; each class of an anchor is a separate box
    image_size            (height, width): boxes are clipped to it
    background_class_idx  boxes of this class are dropped; size_threshold: so are those that are less wide or high
    post_decode_top_n     of each level, the best
    iou_threshold         of boxes of one class that overlap more, the best stays; None: all stay, and later arguments have no effect
    pre_nms_top_n, post_nms_top_n, nms_on_each_level   the best before and after that, of all levels or of each

    Raises ConfigurationError for another mode than "normal".
    """

    def __init__(
        self, score_threshold: float = 0, regression_scale: Any = None, background_class_idx: int | None = None,
        size_threshold: float | None = None, image_size: Any = None, pre_decode_top_n: int | None = None,
        post_decode_top_n: int | None = None, iou_threshold: float | None = None, pre_nms_top_n: int | None = None,
        post_nms_top_n: int | None = None, nms_on_each_level: bool = False, mode: str = "normal",
    ) -> None:  # fmt: skip
        super().__init__()
        if mode != "normal":
            raise refused("DetectionPostProcess(mode)", mode=mode)
        self.settings = _settings(locals())

    def forward(self, boxes: Any, scores: Any, regressions: Any, image_shapes: Tensor | None = None) -> Any:
        lists = [list(each) if isinstance(each, list | tuple) else [each] for each in (boxes, scores, regressions)]
        return _detect(*lists, image_shapes, self.settings)


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


class BevPoolV2(nn.Module):
    """Σ depth · features over the points of each cell of a bird's-eye-view map, as (N, C, Z, H, W).

    forward(depth (N, cameras, D, h, w), feat (N, cameras, C, h, w), ranks_depth, ranks_feat, ranks_bev, interval_starts,
    interval_lengths, bev_feat_shape=None): for each point its element of depth, pixel of feat and cell, counted over the batch.
    The intervals are the runs of equal numbers in ranks_bev, and are not read.

    bev_feat_shape   (H, W), (Z, H, W) or (N, Z, H, W, C), given here or to the call

    Raises ConfigurationError for another shape, and without one.
    """

    def __init__(self, bev_feat_shape: Any = None) -> None:
        super().__init__()
        self.bev_feat_shape = bev_feat_shape

    def forward(
        self, depth: Tensor, feat: Tensor, ranks_depth: Tensor, ranks_feat: Tensor, ranks_bev: Tensor,
        interval_starts: Tensor | None = None, interval_lengths: Tensor | None = None, bev_feat_shape: Any = None,
    ) -> Tensor:  # fmt: skip
        shape = self.bev_feat_shape if bev_feat_shape is None else bev_feat_shape
        if shape is None or len(shape) not in (2, 3, 5):
            raise refused("BevPoolV2(bev_feat_shape)")
        space = [1, *shape] if len(shape) == 2 else list(shape[1:4]) if len(shape) == 5 else list(shape)
        batch, channels = feat.shape[0], feat.shape[2]
        points = feat.permute(0, 1, 3, 4, 2).reshape(-1, channels).index_select(0, ranks_feat.long())
        weighted = points * depth.reshape(-1).index_select(0, ranks_depth.long()).unsqueeze(1)
        cells = torch.zeros(batch * space[0] * space[1] * space[2], channels, dtype=weighted.dtype, device=weighted.device)
        return cells.index_add(0, ranks_bev.long(), weighted).reshape(batch, *space, channels).permute(0, 4, 1, 2, 3)
