"""Scatter of points to bird's-eye-view maps. The positions of elements are data, so these run in float."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
