"""Decode the boxes of a detector, suppress overlapping ones, and score them against other boxes by F1."""

from typing import NamedTuple

import torch
from torch import Tensor

THRESHOLD = 0.2  # of a score
OVERLAP = 0.45  # of two boxes that show one object
MATCHED = 0.5  # overlap of a box with the float network's


class Detections(NamedTuple):
    """The boxes of one picture, the best first: corners (boxes, 4) as left, top, right, bottom; scores and classes (boxes,)."""

    corners: Tensor
    scores: Tensor
    classes: Tensor


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union (M, N) of boxes (M, 4) and (N, 4)."""
    low, high = torch.maximum(first[:, None, :2], second[None, :, :2]), torch.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (high - low).clamp_min(0).prod(-1)
    areas = [(each[:, 2:] - each[:, :2]).prod(-1) for each in (first, second)]
    return common / (areas[0][:, None] + areas[1][None] - common).clamp_min(1e-12)


def detections(output: Tensor) -> Detections:
    """Return the boxes of YOLOv8's output for one picture, shape (4 + classes, places): centre, size, and a score for each class."""
    scores, classes = output[4:].max(0)
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] > THRESHOLD]
    centre, half = output[:2, order].T, output[2:4, order].T / 2
    corners = torch.cat((centre - half, centre + half), 1)
    indices = suppressed(corners)
    return Detections(corners[indices], scores[order][indices], classes[order][indices])


def suppressed(corners: Tensor) -> Tensor:
    """Return the indices of the boxes, the best first, that overlap no better one that stays: non-maximum suppression."""
    overlapping, indices = overlaps(corners, corners) > OVERLAP, list[int]()
    for index in range(len(corners)):
        if not bool(overlapping[index, indices].any()):
            indices.append(index)
    return torch.tensor(indices, dtype=torch.long)


def matches(actual: Detections, expected: Detections) -> int:
    """Return how many boxes have a partner of their class, each partner once; the best box chooses first."""
    fits = overlaps(actual.corners, expected.corners) * (actual.classes[:, None] == expected.classes[None])
    count = 0
    for row in range(len(fits)):
        column = int(fits[row].argmax()) if fits.shape[1] else 0
        if fits.shape[1] and fits[row, column] >= MATCHED:
            fits[:, column] = 0
            count += 1
    return count


def f1(actual: Tensor, expected: Tensor) -> float:
    """Return the F1 score in percent of the boxes of outputs (pictures, 4 + classes, places), pooled; 100 where neither has one."""
    pairs = [(detections(mine), detections(theirs)) for mine, theirs in zip(actual, expected, strict=True)]
    boxes = sum(len(mine.scores) + len(theirs.scores) for mine, theirs in pairs)
    return 200 * sum(matches(*pair) for pair in pairs) / boxes if boxes else 100.0
