"""Horizon's functions of boxes: in float, on the host, since choices depend on data.

Operators whose choices depend on data are single Python calls in a model's graph, after its integers: the plugin also calls them after its
DeQuantStubs. Boxes are x1 y1 x2 y2.
"""

import torch
from torch import Tensor

import fxquant as fxq


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
