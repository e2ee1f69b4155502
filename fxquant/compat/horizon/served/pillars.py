"""Points as pillars, and pixels as a bird's-eye-view map, with the plugin's signatures. In float: element positions are data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.errors import ConfigurationError

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
    known, which = torch.unique(flat, return_inverse=True)
    order = torch.arange(len(flat), dtype=torch.int64, device=flat.device)
    first = torch.full((len(known),), len(flat), dtype=torch.int64, device=flat.device).scatter_reduce(0, which, order, "amin")
    rank = first.argsort().argsort()[which]  # for each point, the rank of its cell in the order of first points
    sorted_rank, source = rank.sort(stable=True)
    starts = torch.searchsorted(sorted_rank, torch.arange(len(known), dtype=torch.int64, device=flat.device))
    nth = order - starts[sorted_rank]
    taken = (sorted_rank < max_voxels) & (nth < max_points_per_voxel)
    cell, nth, source = sorted_rank[taken], nth[taken], source[taken]
    count = max_voxels if use_max else min(len(known), max_voxels)
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
            raise ConfigurationError(
                f"BevPoolV2(bev_feat_shape={shape!r}) cannot be done",
                because="the size of the map is not in the ranks",
                remedy="pass (H, W), (Z, H, W) or (N, Z, H, W, C)",
            )
        space = [1, *shape] if len(shape) == 2 else list(shape[1:4]) if len(shape) == 5 else list(shape)
        batch, channels = feat.shape[0], feat.shape[2]
        points = feat.permute(0, 1, 3, 4, 2).reshape(-1, channels).index_select(0, ranks_feat.long())
        weighted = points * depth.reshape(-1).index_select(0, ranks_depth.long()).unsqueeze(1)
        cells = torch.zeros(batch * space[0] * space[1] * space[2], channels, dtype=weighted.dtype, device=weighted.device)
        return cells.index_add(0, ranks_bev.long(), weighted).reshape(batch, *space, channels).permute(0, 4, 1, 2, 3)
