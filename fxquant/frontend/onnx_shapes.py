"""ONNX operators that move, read or make elements, as `onnx_operators` declares them: shapes, indices, padding, interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.frontend.onnx_operators import FEW, as_row, as_tensor, reads, without


@reads("Reshape")
def reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    """Return a tensor in another shape; a size of 0 is the tensor's own. Numbers become a number or a tuple."""
    sizes = as_row(shape)
    if not isinstance(x, Tensor) and len(sizes) < 2:
        return as_row(x) if sizes else as_row(x)[0]
    return as_tensor(x).reshape([x.shape[dim] if size == 0 and not allowzero else size for dim, size in enumerate(sizes)])


@reads("Unsqueeze")
def _unsqueeze(x: Any, axes: Any) -> Any:
    dims = as_row(axes)
    if isinstance(x, (int, float)) and len(dims) == 1:
        return (x,)
    x = as_tensor(x)
    for dim in sorted(dim % (x.dim() + len(dims)) for dim in dims):
        x = x.unsqueeze(dim)
    return x


@reads("Concat")
def _concatenated(*values: Any, axis: int) -> Any:
    if any(isinstance(value, Tensor) for value in values):
        return torch.cat([as_tensor(value) for value in values], axis)
    return tuple(number for value in values for number in as_row(value))


@reads("Split")
def _split(x: Any, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, results: int) -> Any:
    size = x.shape[axis] if isinstance(x, Tensor) else len(x)
    sizes = list(as_row(split)) if split is not None else [-(-size // results)] * (results - 1)
    sizes += [size - sum(sizes)] * (split is None)
    parts = (
        torch.split(x, sizes, axis) if isinstance(x, Tensor) else [x[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    )
    return tuple(parts) if results > 1 else parts[0]


@reads("Slice")
def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    begins, stops = as_row(starts), as_row(ends)
    dims, strides = as_row(axes) if axes is not None else range(len(begins)), as_row(steps) if steps is not None else (1,) * len(begins)
    index = [slice(None)] * (x.dim() if isinstance(x, Tensor) else 1)
    for dim, begin, stop, stride in zip(dims, begins, stops, strides, strict=True):
        if stride > 0:
            index[dim] = slice(None if begin == 0 else begin, None if stop >= 2**31 - 1 else stop, None if stride == 1 else stride)
        elif (begin == -1 or begin >= x.shape[dim] - 1) and stop <= -(2**31) and stride == -1:
            x = x.flip(dim)
        else:
            raise NotImplementedError("a Slice with a negative step is read only where it reverses a whole dimension")
    while len(index) > 1 and index[-1] == slice(None):
        index.pop()
    return x[tuple(index)] if isinstance(x, Tensor) else x[index[0]]


@reads("Gather")
def _gather(x: Any, indices: Any, axis: int = 0) -> Any:
    if not isinstance(x, Tensor) and not isinstance(indices, Tensor):
        return tuple(x[index] for index in indices) if isinstance(indices, tuple) else x[indices]
    x = as_tensor(x)
    if isinstance(indices, int):
        return x.select(axis, indices)
    indices = as_tensor(indices, x)
    if isinstance(x, torch.nn.Parameter) and x.dim() == 2 and axis == 0:
        return F.embedding(indices, x)
    return torch.index_select(x, axis, indices) if indices.dim() == 1 else x[(slice(None),) * (axis % x.dim()) + (indices,)]


@reads("ConstantOfShape")
def _filled(shape: Any, value: float = 0.0) -> Any:
    sizes = as_row(shape)
    few = len(sizes) == 1 and type(value) is not float and type(sizes[0]) is int and sizes[0] <= FEW
    return (value,) * sizes[0] if few else torch.full(sizes, value)


@reads("Expand")
def _broadcast(x: Any, shape: Any) -> Any:
    sizes = as_row(shape)
    if not isinstance(x, Tensor) and len(sizes) == 1 and type(sizes[0]) is int and sizes[0] <= FEW:
        return as_row(x) * (sizes[0] if len(as_row(x)) == 1 else 1)
    x = as_tensor(x)
    sizes = (1,) * (x.dim() - len(sizes)) + sizes
    return x.expand([-1 if dim >= len(sizes) - x.dim() and size == 1 else size for dim, size in enumerate(sizes)])


@reads("DepthToSpace")
def _to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@reads("Pad", numbers=(2,))
def _padded(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    around, dims = as_row(pads), range(x.dim()) if axes is None else [dim % x.dim() for dim in as_row(axes)]
    pairs = {dim: (around[index], around[index + len(dims)]) for index, dim in enumerate(dims)}
    flat = [side for dim in reversed(range(x.dim())) for side in pairs.get(dim, (0, 0))]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    if mode == "constant":
        return F.pad(x, flat, value=0.0 if value is None else as_row(value)[0])
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


@reads("Resize", "Upsample", numbers=(1, 2))
def _resized(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, opset: int, mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor", coordinate_transformation_mode: str = "half_pixel", **others: Any,
) -> Tensor:  # fmt: skip
    if opset < 11:  # these had no roi, counted from the corner and rounded down
        scales, coordinate_transformation_mode, nearest_mode = roi if scales is None else scales, "asymmetric", "floor"
    antialias = bool(others.pop("antialias", 0))
    spatial, place = x.dim() - 2, coordinate_transformation_mode
    factors, wanted = (None if each in (None, ()) else [*as_row(each)] for each in (scales, sizes))
    rest = [(name, value) for name, value in others.items() if value not in (0, None, "stretch") and name != "extrapolation_value"]
    rest = [pair for pair in rest if pair not in (("cubic_coeff_a", -0.75), ("axes", [*range(2, x.dim())]))]
    whole = factors is not None and all(float(factor).is_integer() for factor in factors)
    down = (place, nearest_mode) == ("asymmetric", "floor") or (whole and place != "asymmetric" and nearest_mode == "round_prefer_floor")
    read = down if mode == "nearest" else place in ("half_pixel", "pytorch_half_pixel", "align_corners")
    if rest or not read or any(factor != 1 for factor in (factors or [])[:-spatial]):
        raise NotImplementedError(f"Resize is not read with {mode}, {place}, {nearest_mode}, scales={factors}, {rest}")
    kind = {"nearest": mode, "linear": {1: mode, 2: "bilinear", 3: "trilinear"}[spatial], "cubic": "bicubic"}[mode]
    how = {} if mode == "nearest" else {"align_corners": place == "align_corners", "antialias": antialias}
    if wanted is not None:
        return F.interpolate(x, size=wanted[-spatial:], mode=kind, **how)
    return F.interpolate(x, scale_factor=[float(factor) for factor in (factors or [])[-spatial:]], mode=kind, **how)


def _positive(x: Tensor, indices: Any, axis: int) -> Tensor:
    indices = as_tensor(indices, x)
    return torch.where(indices < 0, indices + x.shape[axis], indices)


reads("Range", numbers=(0, 1, 2))(lambda start, limit, delta: torch.arange(start, limit, delta))
_SIMPLE: dict[str, Callable[..., Any]] = {
    "Shape": lambda x, start=0, end=None: (tuple(x.shape) if isinstance(x, Tensor) else (len(x),) * isinstance(x, tuple))[start:end],
    "Size": lambda x: math.prod(x.shape) if isinstance(x, Tensor) else len(as_row(x)),
    "Transpose": lambda x, perm=None: x.permute(perm or [*reversed(range(x.dim()))]) if isinstance(x, Tensor) else x,
    "Flatten": lambda x, axis=1: torch.flatten(x, 1) if axis == 1 else x.reshape(math.prod(x.shape[:axis]), -1),
    "Squeeze": lambda x, axes=None: (
        as_row(x)[0] if not isinstance(x, Tensor) else x.squeeze() if axes is None else x.squeeze(list(as_row(axes)))
    ),
    "Tile": lambda x, repeats: as_tensor(x).repeat(as_row(repeats)),
    "GatherND": lambda x, indices, batch_dims=0: without(batch_dims, x[as_tensor(indices, x).unbind(-1)]),
    "GatherElements": lambda x, indices, axis=0: torch.gather(x, axis, _positive(x, indices, axis)),
    "ScatterElements": lambda x, indices, updates, axis=0: torch.scatter(x, axis, _positive(x, indices, axis), updates),
    "GridSample": lambda x, grid, mode="bilinear", padding_mode="zeros", align_corners=0: F.grid_sample(
        x, grid, str({"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)), padding_mode, bool(align_corners)
    ),
    "Trilu": lambda x, k=0, upper=1: (torch.triu if upper else torch.tril)(x, as_row(k)[0]),
    "CumSum": lambda x, axis, exclusive=0, reverse=0: without(exclusive or reverse, torch.cumsum(x, as_row(axis)[0])),
}
for _name, _function in _SIMPLE.items():
    reads(_name)(_function)
