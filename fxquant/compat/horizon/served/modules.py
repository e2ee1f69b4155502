"""Horizon's modules with their own signatures, over PyTorch's and `fxquant.nn`. Float models use them as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat.common import unserved
from fxquant.compat.horizon.served import functional


class Function(nn.Module):
    """A module that is one function of tensors."""

    function: Callable[..., Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return type(self).function(*args, **kwargs)


def _module(name: str, function: Callable[..., Any]) -> type[Function]:
    made = type(name, (Function,), {"function": staticmethod(function), "__module__": __name__, "__qualname__": name})
    made.__doc__ = f"{getattr(function, '__name__', name)} as a module."
    return made


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh, "Atan": torch.atan,
    "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh, "Div": torch.div, "Erf": torch.erf, "Exp": torch.exp,
    "Floor": torch.floor, "HardLog": torch.log, "Log": torch.log, "Reciprocal": torch.reciprocal, "Remainder": torch.remainder,
    "Rsqrt": torch.rsqrt, "Selu": F.selu, "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Tan": torch.tan, "Where": torch.where,
    "Topk": torch.topk, "Sign": torch.sign, "Matmul": torch.matmul,
}  # fmt: skip
OF_TORCH = """
GELU GRU LSTM ChannelShuffle GroupNorm GRUCell Identity LSTMCell MultiheadAttention RMSNorm Softmax TransformerDecoder
TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer
"""  # modules that PyTorch has under the same names
globals().update({name: _module(name, function) for name, function in FUNCTIONS.items()})
globals().update({name: getattr(nn, name) for name in OF_TORCH.split()})


class Pow(nn.Module):
    """x ** exponent, given to the module or to the call."""

    def __init__(self, exponent: float | None = None) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, input: Tensor, exponent: Any = None) -> Tensor:
        by: Any = self.exponent if exponent is None else exponent
        return torch.pow(input, by)


class Interpolate(nn.Module):
    """`torch.nn.functional.interpolate` as a module."""

    def __init__(
        self, size: Any = None, scale_factor: Any = None, mode: str = "bilinear", align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None, antialias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options = {"size": size, "scale_factor": scale_factor, "mode": mode, "align_corners": align_corners, "antialias": antialias,
                        "recompute_scale_factor": recompute_scale_factor}  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = F.interpolate(x, **self.options)
        return found


class GridSample(fxq.nn.Warp):
    """Samples an image (N, C, H, W) at (x + flow[…, 0], y + flow[…, 1]) of a flow (N, H', W', 2) in pixels: `fxquant.nn.Warp`."""

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None) -> None:
        if align_corners is False:
            raise unserved("GridSample", "align_corners", "positions are pixels, which have no corners to align", "leave it out")
        super().__init__(mode, padding_mode)


class BaseGridGenerator(nn.Module):
    """The coordinates of every pixel: (H, W, 2), x first, or (H, W, 3) with ones appended."""

    grid: Tensor

    def __init__(self, size: Any, with_third_channel: bool = False) -> None:
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        y, x = torch.meshgrid(
            torch.arange(height, dtype=torch.float32, device=None), torch.arange(width, dtype=torch.float32, device=None), indexing="ij"
        )
        self.register_buffer("grid", torch.stack([x, y, *([torch.ones_like(x)] if with_third_channel else [])], -1), persistent=False)

    def forward(self) -> Tensor:
        return self.grid


class BgrToYuv444(nn.Module):
    """Conversion of images of 0…255 to Y, U, V: blue first, or red with `channel_reversal`."""

    def __init__(self, channel_reversal: bool = False) -> None:
        super().__init__()
        self.convert = fxq.nn.RgbToYuv444() if channel_reversal else fxq.nn.BgrToYuv444()

    def forward(self, input: Tensor) -> Tensor:
        converted: Tensor = self.convert(input)
        return converted


class Correlation(nn.Module):
    """The similarity of two feature maps at every displacement. forward(data1, data2), both (N, C, H, W): (N, D², H, W).

    Raises ConfigurationError for a kernel of more than one pixel, for strides of the first map, and for differences:
    `fxquant.nn.Correlation` has a kernel of one pixel, and pads as far as it reaches.
    """

    def __init__(
        self, kernel_size: int = 1, max_displacement: int = 1, stride1: int = 1, stride2: int = 1, pad_size: int = 0,
        is_multiply: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if kernel_size != 1:
            raise unserved("Correlation", "kernel_size", "pixels are compared one by one", "pass 1, and pool the maps before or after it")
        if stride1 != 1:
            raise unserved("Correlation", "stride1", "every pixel of the first map is compared", "pass 1, and slice the result")
        if not is_multiply:
            raise unserved("Correlation", "is_multiply", "maps are compared by products", "pass True")
        if pad_size not in (0, max_displacement):
            raise unserved("Correlation", "pad_size", "maps are padded by max_displacement, or not", "pass 0 or max_displacement")
        self.cut = max_displacement - pad_size
        self.correlate = fxq.nn.Correlation(max_displacement, stride2)

    def forward(self, data1: Tensor, data2: Tensor) -> Tensor:
        found: Tensor = self.correlate(data1, data2)
        return found[:, :, self.cut : -self.cut, self.cut : -self.cut] if self.cut else found


class AnchorGenerator(fxq.nn.AnchorGenerator):
    """The reference boxes of a detector, a tensor (N, anchors · 4, H, W) for each feature map of a list.

    feat_strides   how many pixels of the image a pixel of each map covers
    scales         box sizes in units of the stride; ratios: height by width
    base_sizes     the size that scales multiply, in place of the stride
    legacy_bbox, add_legacy_cell_anchor   raise ConfigurationError: widths are real intervals
    """

    def __init__(
        self, feat_strides: Any, scales: Any, ratios: Any, base_sizes: Any = None, num_layers: int | None = None,
        legacy_bbox: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if legacy_bbox or options:
            raise unserved(
                "AnchorGenerator", next(iter(options), "legacy_bbox"), "boxes are real intervals, in units of the stride", "leave it out"
            )
        strides = list(feat_strides)
        bases = strides if base_sizes is None else list(base_sizes)
        sizes = [[base * scale for scale in scales] for base in bases]
        super().__init__(sizes, [list(ratios)] * len(strides), [int(stride) for stride in strides])
        self.anchors = len(list(scales)) * len(list(ratios))

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for feature, boxes in zip(features, super().forward(features), strict=True):
            height, width = feature.shape[2:]
            flat = boxes.reshape(height, width, self.anchors * 4).permute(2, 0, 1)
            found.append(flat.unsqueeze(0).expand(feature.shape[0], -1, -1, -1))
        return found


class PointPillarsScatter(nn.Module):
    """Scatters features of pillars (P, C) at coordinates (P, 4) to maps; output_shape (N, C, H, W), given here or to the call."""

    def __init__(self, output_shape: Any = None) -> None:
        super().__init__()
        self.output_shape = output_shape

    def forward(self, voxel_features: Tensor, coords: Tensor, output_shape: Any = None) -> Tensor:
        shape = self.output_shape if output_shape is None else output_shape
        if shape is None:
            raise unserved("PointPillarsScatter", "output_shape", "the size of the maps is not in the coordinates", "pass (N, C, H, W)")
        return functional.point_pillars_scatter(voxel_features, coords, shape)


class LookUpTable(fxq.nn.SegmentLUT):
    """A function of one tensor as one table."""

    def __init__(self, func: Callable[[Tensor], Tensor], name: str | None = None) -> None:
        super().__init__(func, name)


class SegmentLUT(fxq.nn.SegmentLUT):
    """A function of one tensor as one table of 65,536 entries in 16 bits, whatever segments the march's compiler makes of it.

    simulated_func   the function; the other arguments configure segments, and have no effect
    """

    def __init__(
        self, simulated_func: Callable[[Tensor], Tensor], is_centrosymmetric: bool = False, dividing_points: Any = None,
        input_range: Any = None, auto_divide_strategy: str = "evenly", inverse_func: Any = None, name: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(simulated_func, name)


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm`, or with `dim` a layer norm over one dimension, whose weight has its shape at that dimension."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, device: Any = None, dtype: Any = None,
        dim: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.dim = dim
        length = shape if dim is None else (next(size for size in shape if size != 1),) if any(size != 1 for size in shape) else (1,)
        self.norm = nn.LayerNorm(length, eps, elementwise_affine, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None or self.dim in (-1, input.dim() - 1):
            found: Tensor = self.norm(input)
            return found
        return self.norm(input.transpose(self.dim, -1)).transpose(self.dim, -1)  # type: ignore[no-any-return]


class LayerNorm2d(LayerNorm):
    """The norm over the channels of (N, C, H, W)."""

    def __init__(self, num_channels: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__([num_channels], eps, dim=1, **options)


class Norm(nn.Module):
    """The 2-norm over dimensions."""

    def __init__(self, p: Any = 2, dim: Any = None, keepdim: bool = False) -> None:
        super().__init__()
        self.p, self.dim, self.keepdim = p, dim, keepdim

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(input, self.p, self.dim, self.keepdim)
        return found


class SetItem(nn.Module):
    """A tensor with some of its elements set."""

    def forward(self, tensor: Tensor, indices: Any, val: Any) -> Tensor:
        changed = tensor.clone()
        changed[indices] = val
        return changed


class MultiScaleDeformableAttention(nn.Module):
    """The attention of Deformable DETR with its layers: forward(query, key, value, …, reference_points, spatial_shapes).

    Raises ConfigurationError where spatial_shapes is a tensor: they are sizes of the graph. See `fxquant.nn.MultiScaleDeformableAttention`.
    """

    def __init__(
        self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 4, num_points: int = 4, im2col_step: int = 64,
        dropout: float = 0.1, batch_first: bool = False, value_proj_ratio: float = 1.0, split_weight_mul: bool = False,
        split_batch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        inner = int(embed_dims * value_proj_ratio)
        self.heads, self.levels, self.points, self.batch_first = num_heads, num_levels, num_points, batch_first
        self.sampling_offsets = nn.Linear(embed_dims, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(embed_dims, num_heads * num_levels * num_points)
        self.value_proj, self.output_proj = nn.Linear(embed_dims, inner), nn.Linear(inner, embed_dims)
        self.dropout, self.sample = nn.Dropout(dropout), fxq.nn.MultiScaleDeformableAttention()

    def forward(
        self, query: Tensor, key: Any = None, value: Tensor | None = None, identity: Tensor | None = None, query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None, reference_points: Tensor | None = None, spatial_shapes: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if isinstance(spatial_shapes, Tensor) or spatial_shapes is None:
            raise unserved("MultiScaleDeformableAttention", "spatial_shapes", "sizes are part of the graph", "pass a list of (H, W)")
        if reference_points is None or key_padding_mask is not None:
            name = "reference_points" if reference_points is None else "key_padding_mask"
            raise unserved(
                "MultiScaleDeformableAttention", name, "positions are needed, and values are not masked", "pass points (N, Q, levels, 2)"
            )
        value, identity = query if value is None else value, query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        batch, queries = query.shape[:2]
        values = self.value_proj(value).view(batch, value.shape[1], self.heads, -1)
        offsets = self.sampling_offsets(query).view(batch, queries, self.heads, self.levels, self.points, 2)
        weights = self.attention_weights(query).view(batch, queries, self.heads, self.levels * self.points).softmax(-1)
        sizes = torch.tensor([[width, height] for height, width in spatial_shapes], dtype=query.dtype, device=query.device)
        where = reference_points[:, :, None, :, None, :] + offsets / sizes[None, None, None, :, None, :]
        found = self.output_proj(
            self.sample(values, where, weights.view(batch, queries, self.heads, self.levels, self.points), spatial_shapes)
        )
        found = found if self.batch_first else found.transpose(0, 1)
        return self.dropout(found) + identity  # type: ignore[no-any-return]
