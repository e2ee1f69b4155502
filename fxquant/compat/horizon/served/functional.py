"""Horizon's functions of images and tensors: colours by ITU-R BT.601, and functions that PyTorch has under other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.errors import ConfigurationError

STUDIO = "studio"  # the plugin's default, with Y in 16…235


def _to_yuv(kind: Callable[..., nn.Module], centred: bool) -> Callable[..., Tensor]:
    """Return a function that converts images (N, 3, H, W) of 0…255 to Y, U, V; minus 128 if `centred`.

    swing   "studio" (Y in 16…235) or "full"
    """

    def convert(input: Tensor, swing: str = STUDIO) -> Tensor:
        converted: Tensor = kind(swing, centred=centred).to(input.device)(input.float())
        return converted

    return convert


def _to_gray(kind: Callable[..., nn.Module], centre: int) -> Callable[[Tensor], Tensor]:
    """Return a function that converts images (N, 3, H, W) of 0…255 to (N, 1, H, W) of 0…255, minus `centre`."""

    def convert(input: Tensor) -> Tensor:
        converted: Tensor = kind("full").to(input.device)(input.float())
        return converted - centre if centre else converted

    return convert


rgb2yuv, bgr2yuv = _to_yuv(fxq.nn.RgbToYuv444, False), _to_yuv(fxq.nn.BgrToYuv444, False)
rgb2centered_yuv, bgr2centered_yuv = _to_yuv(fxq.nn.RgbToYuv444, True), _to_yuv(fxq.nn.BgrToYuv444, True)
rgb2gray, bgr2gray = _to_gray(fxq.nn.RgbToGray, 0), _to_gray(fxq.nn.BgrToGray, 0)
rgb2centered_gray, bgr2centered_gray = _to_gray(fxq.nn.RgbToGray, 128), _to_gray(fxq.nn.BgrToGray, 128)


def rgb2bgr(input: Tensor) -> Tensor:
    """Reverse the channels of images (N, 3, H, W)."""
    return input.flip(1)


bgr2rgb = rgb2bgr


def bgr_to_yuv444(input: Tensor, channel_reversal: bool = False, swing: str = "full") -> Tensor:
    """Convert images (N, 3, H, W) of 0…255 to Y, U, V; blue first, or red with `channel_reversal`."""
    return (rgb2yuv if channel_reversal else bgr2yuv)(input, swing)


def _colours(kind: Any, input: Tensor, swing: str, mean: Any, std: Any) -> Tensor:
    if input.dtype is torch.int8:
        raise ConfigurationError(
            "colours of int8 cannot be converted",
            because="this function computes in float, and a graph quantizes it",
            remedy="insert fxq.nn.YuvToRgb before the model, and prepare both together",
        )
    each = [list(torch.as_tensor(value, dtype=torch.float32).flatten().tolist()) for value in (mean, std)]
    means, stds = (values * 3 if len(values) == 1 else values for values in each)
    converted: Tensor = kind(swing, centred=True, mean=means, std=stds).to(input.device)(input)
    return converted


def centered_yuv2rgb(input: Tensor, swing: str = STUDIO, mean: Any = (128.0,), std: Any = (128.0,), q_scale: Any = 1 / 128) -> Tensor:
    """Convert Y, U, V minus 128 to normalised red, green and blue: float values, which their readers quantize.

    Before a model it is a convolution with integers; its scale is observed as that of any other, so `q_scale` has no effect.
    """
    return _colours(fxq.nn.YuvToRgb, input, swing, mean, std)


def centered_yuv2bgr(input: Tensor, swing: str = STUDIO, mean: Any = (128.0,), std: Any = (128.0,), q_scale: Any = 1 / 128) -> Tensor:
    """Convert as `centered_yuv2rgb`, with blue as the first channel; `mean` and `std` are those of blue, green and red."""
    means, stds = (torch.as_tensor(value).flatten().flip(0) for value in (mean, std))
    return _colours(fxq.nn.YuvToBgr, input, swing, means, stds)


def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Compute `torch.sort`, in which equal elements keep their order."""
    return torch.sort(input, dim=dim, descending=descending, stable=stable)


stable_sort = sort


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Compute `torch.argmax`."""
    return torch.argmax(input, dim, keepdim)


def point_pillars_scatter(voxel_features: Tensor, coords: Tensor, output_shape: Any) -> Tensor:
    """Scatter features of pillars (P, C) at coordinates (P, 4), batch, z, y, x, to maps of this shape (N, C, H, W)."""
    batch, _, height, width = (int(size) for size in output_shape)
    found: Tensor = fxq.nn.PointPillarsScatter((height, width), batch)(voxel_features.flatten(1), coords)
    return found


def filter(*inputs: Tensor, threshold: float, idx_range: tuple[int, int] | None = None) -> list[list[Tensor]]:
    """Select the pixels of maps (N, C, H, W) whose largest channel in the first map exceeds a threshold, for each item of the batch.

    Each result is [largest values (M,), their channels (M,), row and column (M, 2), and of every map (M, C)]; in float, on the host.
    """
    first = inputs[0] if idx_range is None else inputs[0][:, idx_range[0] : idx_range[1]]
    best, index = first.max(1)
    found = []
    for item in range(len(best)):
        places = (best[item] > threshold).nonzero()
        rows, columns = places[:, 0], places[:, 1]
        picked = [each[item].permute(1, 2, 0)[rows, columns] for each in inputs]
        found.append([best[item][rows, columns], index[item][rows, columns] + (idx_range[0] if idx_range else 0), places, *picked])
    return found


@fxq.wrap
def rle(input: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Encode each item of a tensor (N, …) as [pairs, value, number, value, number, …], int64: consecutive runs of equal values.

    dtype   torch.int8: a run has at most 255 values; torch.int16: 65,535. Raises ConfigurationError for another.
    """
    longest = {torch.int8: 255, torch.int16: 65535}.get(dtype)
    if longest is None:
        raise ConfigurationError(
            f"rle(dtype={dtype}) cannot be done", because="it is int8 or int16", remedy="pass torch.int8 or torch.int16"
        )
    found = []
    for item in input.flatten(1):
        values, counts = torch.unique_consecutive(item.long(), return_counts=True)
        parts = [
            (value, min(longest, count - start))
            for value, count in zip(values.tolist(), counts.tolist(), strict=True)
            for start in range(0, count, longest)
        ]
        flat = [len(parts), *(number for part in parts for number in part)]
        found.append(torch.tensor(flat, dtype=torch.int64, device=input.device))
    return found


def window_partition(x: Tensor, window_size: int) -> Tensor:
    """Split a map (N, H, W, C) into windows (N · windows, size, size, C), row by row."""
    height, width, channels = x.shape[1:]
    tiles = x.view(-1, height // window_size, window_size, width // window_size, window_size, channels)
    return tiles.permute(0, 1, 3, 2, 4, 5).reshape(-1, window_size, window_size, channels)


def window_reverse(windows: Tensor, window_size: int, H: int, W: int) -> Tensor:
    """Merge windows (N · windows, size, size, C) to the map (N, H, W, C)."""
    tiles = windows.view(-1, H // window_size, W // window_size, window_size, window_size, windows.shape[-1])
    return tiles.permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, windows.shape[-1])
