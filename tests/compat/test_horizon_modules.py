"""The plugin's modules and functions, each against numbers that are computed here in another way.

Operands are integers and fractions of powers of two, so that every order of additions gives the same bits.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat import horizon

functional, hnn, hF = horizon.functional, horizon.nn, horizon.nn.functional
G = torch.Generator().manual_seed(0)


def whole(*shape: int, low: int = -8, high: int = 8) -> Tensor:
    return torch.randint(low, high, shape, generator=G, dtype=torch.int64).float()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    G.manual_seed(7)


def boxes_of(count: int, side: int = 32) -> Tensor:
    corner, size = whole(count, 2, low=0, high=side), whole(count, 2, low=1, high=side)
    return torch.cat((corner, corner + size), 1)


# ---- suppression --------------------------------------------------------------------------------------------------------
def overlap(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    area = [(each[2] - each[0]) * (each[3] - each[1]) for each in (a, b)]
    return width * height / (sum(area) - width * height)


def greedy(boxes: Tensor, scores: Tensor, limit: float, labels: Tensor | None = None) -> list[int]:
    """Indices of the boxes that stay, one after the other."""
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda index: -float(scores[index])):
        alike = [other for other in kept if labels is None or labels[other] == labels[index]]
        if all(overlap(boxes[other].tolist(), boxes[index].tolist()) <= limit for other in alike):
            kept.append(index)
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_of_boxes_that_overlap_the_better_stays(seed: int) -> None:
    G.manual_seed(seed)
    boxes, scores, labels = boxes_of(40), torch.rand(40, generator=G), whole(40, low=0, high=3).long()
    assert functional.nms(boxes, scores, 0.3).tolist() == greedy(boxes, scores, 0.3)
    assert functional.batched_nms(boxes, scores, labels, 0.3).tolist() == greedy(boxes, scores, 0.3, labels)
    expected = [index for index in greedy(boxes, scores, 0.3, labels) if scores[index] >= 0.25][:7]
    boxes_found = hF.nms(boxes, scores, labels, 0.3, score_threshold=0.25, pre_nms_top_n=40, output_num=7)
    assert all(torch.equal(part, inputs[expected]) for part, inputs in zip(boxes_found, (boxes, scores, labels), strict=True))


# ---- the others -----------------------------------------------------------------------------------------------------------
X = whole(2, 4, 6, 8)
POSITIVE = X.abs() + 1
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "Pow": (lambda: hnn.Pow(2)(X), lambda: X * X),
    "Pow of a call": (lambda: hnn.Pow()(X, 3), lambda: X * X * X),
    "Exp": (lambda: hnn.Exp()(X), lambda: torch.exp(X)),
    "HardLog": (lambda: hnn.HardLog()(POSITIVE), lambda: torch.log(POSITIVE)),
    "Div": (lambda: hnn.Div()(X, POSITIVE), lambda: X / POSITIVE),
    "Where": (lambda: hnn.Where()(X > 0, X, -X), lambda: X.abs()),
    "Topk": (lambda: hnn.Topk()(X, 2, 1)[0], lambda: X.sort(1, descending=True)[0][:, :2]),
    "Norm": (lambda: hnn.Norm(1, 1)(X), lambda: X.abs().sum(1)),
    "SetItem": (
        lambda: hnn.SetItem()(X, (slice(None), 1), 5.0),
        lambda: torch.stack((X[:, 0], torch.full_like(X[:, 1], 5), X[:, 2], X[:, 3]), 1),
    ),
    "Interpolate": (lambda: hnn.Interpolate(scale_factor=2, mode="nearest")(X), lambda: X.repeat_interleave(2, 2).repeat_interleave(2, 3)),
    "GridSample": (lambda: hnn.GridSample()(X, torch.ones(2, 6, 8, 2)), lambda: F.pad(X[:, :, 1:, 1:], (0, 1, 0, 1))),
    "warp": (lambda: hnn.warp(padding_mode="border")(X, torch.ones(2, 6, 8, 2)), lambda: F.pad(X[:, :, 1:, 1:], (0, 1, 0, 1), "replicate")),
    "LayerNorm of the channels": (
        lambda: hnn.LayerNorm([4, 1, 1], dim=1)(X),
        lambda: F.layer_norm(X.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
    ),
    "LayerNorm2d": (lambda: hnn.LayerNorm2d(4)(X), lambda: F.layer_norm(X.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2)),
    "LookUpTable": (lambda: hnn.LookUpTable(torch.sigmoid)(X), lambda: torch.sigmoid(X)),
    "SegmentLUT": (lambda: hnn.SegmentLUT(torch.tanh, True, input_range=(-4, 4))(X), lambda: torch.tanh(X)),
    "BgrToYuv444": (
        lambda: hnn.BgrToYuv444()(torch.full((1, 3, 2, 2), 200.0)).round(),
        lambda: torch.tensor([200.0, 128, 128]).reshape(1, 3, 1, 1).expand(1, 3, 2, 2),
    ),
    "BgrToYuv444 of RGB": (lambda: hnn.BgrToYuv444(True)(X[:, :3]), lambda: fxq.nn.RgbToYuv444()(X[:, :3])),
    "windows": (lambda: hF.window_reverse(hF.window_partition(X, 2), 2, 4, 6), lambda: X),
    "a window": (lambda: hF.window_partition(X, 2)[4], lambda: X[0, 2:4, 2:4]),
    "Matmul": (lambda: hnn.Matmul()(X, X.transpose(2, 3)), lambda: X @ X.transpose(2, 3)),
    "argmax": (lambda: functional.argmax(X, 1), lambda: X.max(1)[1]),
    "a stable sort": (lambda: functional.sort(X.flatten() * 0, 0)[1], lambda: torch.arange(X.numel())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_module_computes(name: str) -> None:
    actual, expected = (make() for make in OTHERS[name])
    assert torch.equal(actual, expected)


REFUSED: dict[str, Callable[[], Any]] = {
    "align_corners": lambda: hnn.GridSample(align_corners=False),
    "output_shape": lambda: hnn.PointPillarsScatter()(X, X),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_an_argument_that_cannot_be_served_is_refused(argument: str) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=argument) as caught:
        REFUSED[argument]()
    assert caught.value.because
    assert caught.value.remedy
