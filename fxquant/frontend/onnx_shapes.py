"""ONNX operators that move, read or make elements, in the form of `onnx_operators`: shapes, indices, padding and interpolation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.frontend.onnx_operators import FEW, Numbers, as_row, as_tensor, each, reads


@reads("Shape")
def _shape(x: Any, start: int = 0, end: int | None = None) -> Numbers:
    return tuple(x.shape)[start:end] if isinstance(x, Tensor) else ((len(x),) if isinstance(x, tuple) else ())[start:end]


@reads("Reshape")
def reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    """Return a tensor in another shape; a size of 0 is the tensor's own. Numbers become a number or a tuple."""
    sizes = as_row(shape)
    if not isinstance(x, Tensor):
        row = as_row(x)
        return row[0] if not sizes else row if len(sizes) == 1 else torch.tensor(row).reshape(sizes)
    return x.reshape([x.shape[dim] if not allowzero and size == 0 else size for dim, size in enumerate(sizes)])


@reads("Flatten")
def _flatten(x: Tensor, axis: int = 1) -> Tensor:
    if axis == 1:
        return torch.flatten(x, 1)
    axis = axis if axis >= 0 else axis + x.dim()
    return x.reshape(math.prod(x.shape[:axis]), -1)


@reads("Squeeze")
def _squeeze(x: Any, axes: Any = None) -> Any:
    if not isinstance(x, Tensor):
        return as_row(x)[0]
    return x.squeeze() if axes is None else x.squeeze(list(as_row(axes)))


@reads("Unsqueeze")
def _unsqueeze(x: Any, axes: Any) -> Any:
    dims = as_row(axes)
    if not isinstance(x, Tensor):
        if not isinstance(x, tuple) and len(dims) == 1:
            return (x,)
        x = torch.tensor(x)
    rank = x.dim() + len(dims)
    for dim in sorted(dim % rank for dim in dims):
        x = x.unsqueeze(dim)
    return x


@reads("Concat")
def _concatenated(*values: Any, axis: int) -> Any:
    if any(isinstance(value, Tensor) for value in values):
        return torch.cat([as_tensor(value) for value in values], axis)
    return tuple(number for value in values for number in as_row(value))


@reads("Split", results=True)
def _split(x: Any, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, results: int) -> Any:
    size = x.shape[axis] if isinstance(x, Tensor) else len(x)
    sizes = list(as_row(split)) if split is not None else [-(-size // results)] * (results - 1)
    sizes += [size - sum(sizes)] * (split is None)
    if not isinstance(x, Tensor):
        ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        return tuple(x[a:b] for a, b in zip(ends, ends[1:], strict=False))
    return tuple(torch.split(x, sizes, axis)) if results > 1 else x


@reads("Slice")
def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    begins, stops = as_row(starts), as_row(ends)
    dims, strides = as_row(axes) if axes is not None else tuple(range(len(begins))), as_row(steps) if steps is not None else (1,) * len(begins)
    if not isinstance(x, Tensor):
        return x[begins[0] : (None if abs(stops[0]) >= 2**31 - 1 else stops[0]) : strides[0]]
    index = [slice(None)] * x.dim()
    for dim, begin, stop, stride in zip(dims, begins, stops, strides, strict=True):
        if stride < 0:
            if begin not in (-1, x.shape[dim] - 1) or stop > -(2**31) or stride != -1:
                raise NotImplementedError("a Slice with a negative step is read only where it reverses a whole dimension")
            x = x.flip(dim)
        else:
            index[dim] = slice(None if begin == 0 else begin, None if stop >= 2**31 - 1 else stop, None if stride == 1 else stride)
    while index and index[-1] == slice(None):
        index.pop()
    return x[tuple(index)] if index else x


@reads("Gather")
def _gather(x: Any, indices: Any, axis: int = 0) -> Any:
    if not isinstance(x, Tensor):
        if not isinstance(indices, Tensor):
            return tuple(x[index] for index in indices) if isinstance(indices, tuple) else x[indices]
        x = torch.tensor(x, device=indices.device)
    if isinstance(indices, int):
        return x.select(axis, indices)
    indices = as_tensor(indices, x)
    if axis % x.dim() == 0 and x.dim() == 2 and x.is_floating_point() and isinstance(x, torch.nn.Parameter):
        return F.embedding(indices, x)
    if indices.dim() == 1:
        return torch.index_select(x, axis, indices)
    return x[(slice(None),) * (axis % x.dim()) + (indices,)]


def _elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    return torch.where(indices < 0, indices + x.shape[axis], indices)


@reads("GatherND")
def _gather_nd(x: Tensor, indices: Any, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise NotImplementedError("batch_dims of GatherND is not read")
    return x[as_tensor(indices, x).unbind(-1)]


@reads("ConstantOfShape")
def _filled(shape: Any, value: float = 0.0) -> Any:
    sizes = as_row(shape)
    if len(sizes) == 1 and not isinstance(value, float) and type(sizes[0]) is int and sizes[0] <= FEW:
        return (value,) * sizes[0]
    return torch.full(sizes, value)


def _broadcast(x: Any, shape: Any) -> Any:
    sizes = as_row(shape)
    if not isinstance(x, Tensor):
        if len(sizes) == 1 and type(sizes[0]) is int and sizes[0] <= FEW:
            return as_row(x) * (sizes[0] if len(as_row(x)) == 1 else 1)
        x = torch.tensor(x)
    own = (1,) * (len(sizes) - x.dim()) + tuple(x.shape)
    sizes = (1,) * (len(own) - len(sizes)) + sizes
    return x.expand([-1 if dim >= len(own) - x.dim() and size == 1 else size for dim, size in enumerate(sizes)])


def _windows(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


def _in_depth(x: Tensor, blocksize: int) -> Tensor:
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@reads("Pad", numbers=(2,))
def _padded(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    around, rank = as_row(pads), x.dim()
    dims = [dim % rank for dim in as_row(axes)] if axes is not None else list(range(len(around) // 2))
    pairs = {dim: (around[index], around[index + len(dims)]) for index, dim in enumerate(dims)}
    flat = [side for dim in reversed(range(rank)) for side in pairs.get(dim, (0, 0))]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    if mode == "constant":
        return F.pad(x, flat, value=0.0 if value is None else as_row(value)[0]) if any(flat) else x
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


@reads("Resize", "Upsample", numbers=(1, 2), opset=True)
def _resized(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, opset: int, mode: str = "nearest", nearest_mode: str | None = None,
    coordinate_transformation_mode: str | None = None, cubic_coeff_a: float = -0.75, axes: Any = None, antialias: int = 0, **others: Any,
) -> Tensor:  # fmt: skip
    if opset < 11:  # from input to output, without roi, and rounding down
        roi, scales = None, roi if scales is None else scales
        coordinates, rounding = "asymmetric", "floor"
    else:
        coordinates, rounding = coordinate_transformation_mode or "half_pixel", nearest_mode or "round_prefer_floor"
    factors, wanted = list(as_row(scales)) if scales not in (None, ()) else None, list(as_row(sizes)) if sizes not in (None, ()) else None
    spatial = x.dim() - 2
    if axes is not None and [axis % x.dim() for axis in axes] != list(range(x.dim() - len(axes), x.dim())):
        raise NotImplementedError("axes of a Resize that are not the last ones are not read")
    if factors is not None and any(factor != 1 for factor in factors[:-spatial]):
        raise NotImplementedError("a Resize of batch or channels is not read")
    kept = {name: value for name, value in others.items() if value and value not in ("stretch", b"stretch")}
    kind = {"nearest": "nearest", "linear": ("linear", "bilinear", "trilinear")[spatial - 1], "cubic": "bicubic"}[mode]
    whole = factors is not None and all(float(factor).is_integer() for factor in factors)
    nearest = mode == "nearest" and (
        (coordinates == "asymmetric" and rounding == "floor")
        or (whole and coordinates in ("half_pixel", "pytorch_half_pixel") and rounding == "round_prefer_floor")
    )
    smooth = mode != "nearest" and coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners")
    if kept or cubic_coeff_a != -0.75 or not (nearest or smooth):
        raise NotImplementedError(f"a Resize with mode {mode}, {coordinates}, {rounding} {kept or ''} is not read")
    corners = {} if mode == "nearest" else {"align_corners": coordinates == "align_corners", "antialias": bool(antialias)}
    if wanted is not None:
        return F.interpolate(x, size=wanted[-spatial:], mode=kind, **corners)
    assert factors is not None
    return F.interpolate(x, scale_factor=[float(factor) for factor in factors[-spatial:]], mode=kind, **corners)


@reads("GridSample")
def _sampled(x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: int = 0) -> Tensor:
    kind = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, mode=kind, padding_mode=padding_mode, align_corners=bool(align_corners))


@reads("Range", numbers=(0, 1, 2))
def _range(start: Any, limit: Any, delta: Any) -> Tensor:
    return torch.arange(start, limit, delta)


for _name, _function in {
    "Size": lambda x: math.prod(x.shape) if isinstance(x, Tensor) else len(as_row(x)),
    "Transpose": lambda x, perm=None: x.permute(*(perm if perm is not None else range(x.dim() - 1, -1, -1))) if isinstance(x, Tensor) else x,
    "Expand": _broadcast,
    "Tile": lambda x, repeats: as_tensor(x).repeat(*as_row(repeats)),
    "DepthToSpace": _windows,
    "SpaceToDepth": _in_depth,
    "GatherElements": lambda x, indices, axis=0: torch.gather(x, axis, _elements(x, as_tensor(indices, x), axis)),
    "ScatterElements": lambda x, indices, updates, axis=0: torch.scatter(x, axis, _elements(x, as_tensor(indices, x), axis), updates),
    "Trilu": lambda x, k=0, upper=1: (torch.triu if upper else torch.tril)(x, as_row(k)[0]),
}.items():
    reads(_name)(_function)
