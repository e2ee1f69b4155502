"""Horizon's functions and modules, built on PyTorch's and on `fxquant.nn`; float models call them unchanged.

Colours are those of ITU-R BT.601. Other functions are PyTorch's under other names; the modules have their own signatures.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat.common import refused, unserved

STUDIO = "studio"  # the plugin's default, with Y in 16…235


def _to_yuv(kind: Callable[..., nn.Module], centred: bool) -> Callable[..., Tensor]:
    """Return a function that converts images (N, 3, H, W) of 0…255 to Y, U, V; minus 128 if `centred`.

    swing   "studio" (Y in 16…235) or "full"
    """
    return lambda input, swing=STUDIO: kind(swing, centred=centred).to(input.device)(input.float())


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
        raise refused("centered_yuv2rgb")
    each = [list(torch.as_tensor(value, dtype=torch.float32).flatten().tolist()) for value in (mean, std)]
    means, stds = (values * 3 if len(values) == 1 else values for values in each)
    return kind(swing, centred=True, mean=means, std=stds).to(input.device)(input)  # type: ignore[no-any-return]


def centered_yuv2rgb(input: Tensor, swing: str = STUDIO, mean: Any = (128.0,), std: Any = (128.0,), q_scale: Any = 1 / 128) -> Tensor:
    """Convert Y, U, V minus 128 to normalised red, green and blue: float values, which their readers quantize.

    Before a model it is a convolution with integers; its scale is observed as that of any other, so `q_scale` has no effect.
    """
    return _colours(fxq.nn.YuvToRgb, input, swing, mean, std)


def centered_yuv2bgr(input: Tensor, swing: str = STUDIO, mean: Any = (128.0,), std: Any = (128.0,), q_scale: Any = 1 / 128) -> Tensor:
    """Convert as `centered_yuv2rgb`, with blue as the first channel; `mean` and `std` are in the order blue, green, red."""
    means, stds = (torch.as_tensor(value).flatten().flip(0) for value in (mean, std))
    return _colours(fxq.nn.YuvToBgr, input, swing, means, stds)


def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Compute `torch.sort`, in which equal elements keep their order."""
    return torch.sort(input, dim=dim, descending=descending, stable=stable)


stable_sort = sort

argmax = torch.argmax


def point_pillars_scatter(voxel_features: Tensor, coords: Tensor, output_shape: Any) -> Tensor:
    """Scatter features of pillars (P, C) at coordinates (P, 4), batch, z, y, x, to maps of this shape (N, C, H, W)."""
    if output_shape is None:
        raise unserved("PointPillarsScatter", "output_shape", "the size of the maps is not in the coordinates", "pass (N, C, H, W)")
    batch, _, height, width = (int(size) for size in output_shape)
    return fxq.nn.PointPillarsScatter((height, width), batch)(voxel_features.flatten(1), coords)  # type: ignore[no-any-return]


def window_partition(x: Tensor, window_size: int) -> Tensor:
    """Split a map (N, H, W, C) into windows (N · windows, size, size, C), row by row."""
    height, width, channels = x.shape[1:]
    tiles = x.view(-1, height // window_size, window_size, width // window_size, window_size, channels)
    return tiles.permute(0, 1, 3, 2, 4, 5).reshape(-1, window_size, window_size, channels)


def window_reverse(windows: Tensor, window_size: int, H: int, W: int) -> Tensor:
    """Merge windows (N · windows, size, size, C) to the map (N, H, W, C)."""
    tiles = windows.view(-1, H // window_size, W // window_size, window_size, window_size, windows.shape[-1])
    return tiles.permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, windows.shape[-1])


def _module(name: str, function: Callable[..., Any], operands: int = 1, **defaults: Any) -> type[nn.Module]:
    """Return a class of modules that are one function; its constructor takes the arguments `defaults`, and a call too, after operands."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(each, kind, default=value) for each, value in defaults.items()])

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.options = {**defaults, **signature.bind(*args, **kwargs).arguments}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count = operands if defaults else len(args)
        return function(*args[:count], **{**self.options, **dict(zip(defaults, args[count:], strict=False)), **kwargs})

    members = {"__doc__": f"{getattr(function, '__name__', name)} as a module.", "__module__": __name__, "__qualname__": name}
    return type(name, (nn.Module,), {**members, "__init__": initialize, "forward": forward})


FUNCTIONS = """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Div Erf Exp Floor Log Matmul Reciprocal Remainder Rsqrt Selu Sign Sin Sinh
Sqrt Tan Topk Where"""  # functions that PyTorch has under these names, in lower case
OF_TORCH = """
GELU GRU LSTM ChannelShuffle GroupNorm GRUCell Identity LSTMCell MultiheadAttention RMSNorm Softmax TransformerDecoder
TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer
"""  # modules that PyTorch has under the same names
globals().update({name: _module(name, getattr(torch, name.lower())) for name in FUNCTIONS.split()})
globals().update({name: getattr(nn, name) for name in OF_TORCH.split()})
HardLog, Pow = _module("HardLog", torch.log), _module("Pow", torch.pow, exponent=None)
PointPillarsScatter = _module("PointPillarsScatter", point_pillars_scatter, 2, output_shape=None)
BgrToYuv444 = _module("BgrToYuv444", bgr_to_yuv444, channel_reversal=False)
Norm = _module("Norm", lambda x, p, **options: torch.linalg.vector_norm(x, p, **options), p=2, dim=None, keepdim=False)
Interpolate = _module("Interpolate", F.interpolate, size=None, scale_factor=None, mode="bilinear", align_corners=None,
                      recompute_scale_factor=None, antialias=False)  # fmt: skip


class GridSample(fxq.nn.Warp):
    """Samples an image (N, C, H, W) at (x + flow[…, 0], y + flow[…, 1]) of a flow (N, H', W', 2) in pixels: `fxquant.nn.Warp`."""

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None) -> None:
        if align_corners is False:
            raise unserved("GridSample", "align_corners", "positions are pixels, which have no corners to align", "leave it out")
        super().__init__(mode, padding_mode)


LookUpTable = fxq.nn.SegmentLUT


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
            return self.norm(input)  # type: ignore[no-any-return]
        return self.norm(input.transpose(self.dim, -1)).transpose(self.dim, -1)  # type: ignore[no-any-return]


class LayerNorm2d(LayerNorm):
    """The norm over the channels of (N, C, H, W)."""

    def __init__(self, num_channels: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__([num_channels], eps, dim=1, **options)


class SetItem(nn.Module):
    """A tensor with some of its elements set."""

    def forward(self, tensor: Tensor, indices: Any, val: Any) -> Tensor:
        changed = tensor.clone()
        changed[indices] = val
        return changed
