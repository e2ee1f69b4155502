"""Features of boxes with the plugin's signatures, over `fxquant.nn.RoIAlign`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.errors import ConfigurationError

CLIPS = 4  # parts of a box that are cut off: at x1, y1, x2, y2


def _unserved(called: str, argument: str, because: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{called}({argument}=…) cannot be done", because=because, remedy=remedy)


def _lists(boxes: Any) -> list[Tensor]:
    """Return the boxes of each item, (K, 4), from a list, or from (N, K, 4) or (N, K, 6), whose scores and classes are left out."""
    listed = list(boxes.unbind(0)) if isinstance(boxes, Tensor) else list(boxes)
    return [each[:, :4] for each in listed]


def _batched(features: Sequence[Tensor], boxes: list[Tensor], align: Any) -> Tensor:
    """Apply `align` to features and boxes (N, K, 4), as (N · K, C, h, w); item by item if the items' numbers of boxes differ."""
    if len({len(each) for each in boxes}) == 1:
        found: Tensor = align(features, torch.stack(boxes)).flatten(0, 1)
        return found
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
        found: Tensor = self.align(features, boxes)
        return found


class RoIAlign(nn.Module):
    """The features of boxes: forward(features (N, C, H, W), rois), (sum of K, C, h, w). rois are a list of (K, 4), or (N, K, 4).

    As torchvision's, with its default `aligned` False: without half-pixel offsets. Points outside of a map have the values
    of its border. In a traced model every item has the same number of boxes. Raises ConfigurationError for sampling_ratio -1, which
    depends on data, and for another mode than "bilinear".
    """

    def __init__(
        self,
        output_size: Any,
        spatial_scale: float = 1.0,
        sampling_ratio: int = 1,
        aligned: bool | None = None,
        interpolate_mode: str = "bilinear",
    ) -> None:
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
    next coarser one. Without `aligned` (False, or None as on bernoulli2) half-pixel offsets are not used. box_clip_ratio cuts these parts
    off a box at x1, y1, x2 and y2. Every level is read for every box, and one result is chosen, so that positions may be integers.

    Raises ConfigurationError for sampling_ratio below 1, another mode than "bilinear", and ratios that remove the whole box.
    """

    def __init__(
        self, output_size: Any, feature_strides: Sequence[int], sampling_ratio: int = 1, interpolate_mode: str = "bilinear",
        canonical_box_size: int = 224, canonical_level: int = 4, aligned: bool | None = False, box_clip_ratio: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check("MultiScaleRoIAlign", sampling_ratio, interpolate_mode)
        self.levels = nn.ModuleList(_Level(output_size, 1 / stride, sampling_ratio, bool(aligned)) for stride in feature_strides)
        self.sides = [canonical_box_size * stride / 2**canonical_level for stride in feature_strides[1:]]
        self.clip = None if box_clip_ratio is None else _clips(box_clip_ratio)

    def forward(self, x: Sequence[Tensor], box_lists: Any) -> Tensor:
        boxes = _lists(box_lists)
        boxes = boxes if self.clip is None else bbox_clip(boxes, self.clip)
        return _batched(list(x), boxes, self._aligned)

    def _aligned(self, features: Sequence[Tensor], boxes: Tensor) -> Tensor:
        sides = boxes[..., 2:] - boxes[..., :2] + 1
        area = (sides[..., 0] * sides[..., 1])[:, :, None, None, None]
        read = [level(maps, boxes) for level, maps in zip(self.levels, features, strict=True)]
        found: Tensor = read[0]
        for side, coarser in zip(self.sides, read[1:], strict=True):
            found = torch.where(area >= side * side, coarser, found)
        return found


def _check(called: str, sampling_ratio: int, mode: str) -> None:
    if sampling_ratio < 1:
        raise _unserved(called, "sampling_ratio", "how many points a cell has would depend on the boxes", "pass 1 or more")
    if mode != "bilinear":
        raise _unserved(called, "interpolate_mode", "features are read between pixels", "pass 'bilinear'")


def _clips(ratio: Any) -> tuple[float, ...]:
    parts = tuple(float(part) for part in ratio)
    if len(parts) != CLIPS or parts[0] + parts[2] >= 1 or parts[1] + parts[3] >= 1:
        raise _unserved(
            "MultiScaleRoIAlign", "box_clip_ratio", f"{ratio!r} clips boxes to nothing", "pass four parts, two of which are below 1"
        )
    return parts


def bbox_clip(boxes: Any, clip_ratio: Any) -> list[Tensor]:
    """Return boxes, a list of (K, 4), without these parts of their widths and heights, at x1, y1, x2 and y2."""
    left, top, right, bottom = _clips(clip_ratio)
    found = []
    for each in boxes:
        x1, y1, x2, y2 = each.unbind(1)
        width, height = x2 - x1, y2 - y1
        found.append(torch.stack((x1 + width * left, y1 + height * top, x2 - width * right, y2 - height * bottom), 1))
    return found
