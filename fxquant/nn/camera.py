"""Conversions of camera images for networks: YUV by ITU-R BT.601, with chroma at half the resolution (NV12).

    camera ──NV12──▶ Nv12ToYuv444 ──▶ YuvToRgb(mean, std) ──▶ a network that was trained on normalised RGB
    RGB image ──▶ RgbToYuv444(centred=True) ──▶ ChromaLoss ──▶ a network that is trained on images like the camera's

Conventions, for 8 bits a channel: "full" swing has Y, U and V in 0…255, "studio" has Y in 16…235 and U, V in 16…240. U and V are centred
on 128, and `centred` subtracts 128 from every channel, so that a byte becomes the int8 of the image inputs of the BPU targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- Colour spaces: a product with a three by three matrix, as a convolution of kernel 1 -----------------------------


# ITU-R BT.601, full swing: Y in 0…255, U and V around 128.
FULL = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
STUDIO = ((0.256788, 0.504129, 0.097906), (-0.148223, -0.290993, 0.439216), (0.439216, -0.367788, -0.071427))  # Y in 16…235


class RgbToYuv444(nn.Module):
    """(N, 3, H, W) in 0…255, red first, to Y, U, V by ITU-R BT.601.

    swing     "full" (Y in 0…255) or "studio" (Y in 16…235, U and V in 16…240)
    centred   whether 128 is subtracted from every channel, as the image inputs of the BPU targets require
    """

    weight: Tensor
    bias: Tensor
    order: tuple[int, ...] = (0, 1, 2)  # the positions of red, green and blue

    def __init__(self, swing: str = "full", centred: bool = False) -> None:
        super().__init__()
        if swing not in ("full", "studio"):
            raise ValueError(f"swing is 'full' or 'studio', not {swing!r}")
        self.swing, self.centred = swing, centred
        matrix = torch.tensor(FULL if swing == "full" else STUDIO)
        offset = torch.tensor([0.0 if swing == "full" else 16.0, 128.0, 128.0])
        placed = torch.empty_like(matrix)
        placed[:, list(self.order)] = matrix
        self.register_buffer("weight", placed.reshape(3, 3, 1, 1))
        self.register_buffer("bias", offset - 128.0 if centred else offset)

    def forward(self, image: Tensor) -> Tensor:
        return F.conv2d(image, self.weight, self.bias)


class BgrToYuv444(RgbToYuv444):
    """`RgbToYuv444` for an image whose first channel is blue."""

    order = (2, 1, 0)


HALF = 2  # NV12 has one U and one V for two by two pixels


class YuvToRgb(nn.Module):
    """(N, 3, H, W) of Y, U, V to red, green, blue in 0…255, normalised: (rgb - mean) / std; one convolution of kernel 1.

    It is the inverse of `RgbToYuv444` with equal `swing` and `centred`. Nothing is clamped: colours outside of RGB are kept.

    mean, std   numbers of 0…255 for each of red, green and blue
    """

    weight: Tensor
    bias: Tensor
    order: tuple[int, ...] = (0, 1, 2)  # the colour of each output channel

    def __init__(
        self, swing: str = "full", centred: bool = False, mean: Sequence[float] = (0.0, 0.0, 0.0), std: Sequence[float] = (1.0, 1.0, 1.0)
    ) -> None:
        super().__init__()
        if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
            raise ValueError(f"mean and std have a number for each of red, green and blue, std a positive one, not {mean!r} and {std!r}")
        there = RgbToYuv444(swing, centred)
        back = torch.linalg.inv(there.weight.double().reshape(3, 3))
        scale = torch.tensor(std, dtype=torch.float64)
        matrix = back / scale[:, None]
        offset = -(back @ there.bias.double() + torch.tensor(mean, dtype=torch.float64)) / scale
        self.swing, self.centred = swing, centred
        self.register_buffer("weight", matrix[list(self.order)].float().reshape(3, 3, 1, 1))
        self.register_buffer("bias", offset[list(self.order)].float())

    def forward(self, image: Tensor) -> Tensor:
        return F.conv2d(image, self.weight, self.bias)


class YuvToBgr(YuvToRgb):
    """`YuvToRgb` with blue as the first channel; `mean` and `std` are still those of red, green and blue."""

    order = (2, 1, 0)


class RgbToGray(nn.Module):
    """(N, 3, H, W) in 0…255, red first, to (N, 1, H, W): the Y of `RgbToYuv444` with equal `swing` and `centred`."""

    weight: Tensor
    bias: Tensor
    order: tuple[int, ...] = (0, 1, 2)

    def __init__(self, swing: str = "full", centred: bool = False) -> None:
        super().__init__()
        whole = RgbToYuv444(swing, centred)
        self.swing, self.centred = swing, centred
        self.register_buffer("weight", whole.weight[:1, list(self.order)].clone())
        self.register_buffer("bias", whole.bias[:1].clone())

    def forward(self, image: Tensor) -> Tensor:
        return F.conv2d(image, self.weight, self.bias)


class BgrToGray(RgbToGray):
    """`RgbToGray` for an image whose first channel is blue."""

    order = (2, 1, 0)


class Nv12ToYuv444(nn.Module):
    """Y (N, H, W, 1) and UV (N, H/2, W/2, 2) to (N, 3, H, W): each U and V covers two by two pixels.

    Both are the content of NV12, row by row, in the form of the image inputs of the BPU targets. For bytes the result is float32 with equal
    values; for float tensors it has their dtype. `centred` subtracts 128 from every channel.
    """

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, y: Tensor, uv: Tensor) -> Tensor:
        y, uv = (plane.permute(0, 3, 1, 2) if plane.is_floating_point() else plane.permute(0, 3, 1, 2).float() for plane in (y, uv))
        image = torch.cat([y, F.interpolate(uv, scale_factor=HALF, mode="nearest")], 1)
        return image - 128.0 if self.centred else image


class ChromaLoss(nn.Module):
    """(N, 3, H, W) of Y, U, V after a conversion to NV12 and back: U and V are means of two by two pixels, repeated. H and W are even.

    In training it follows the conversion of RGB images, so that the network learns on images like the camera's.
    """

    def forward(self, image: Tensor) -> Tensor:
        chroma = F.avg_pool2d(image[:, 1:], HALF)
        return torch.cat([image[:, :1], F.interpolate(chroma, scale_factor=HALF, mode="nearest")], 1)


def rgb_to_nv12(image: Tensor, swing: str = "full") -> tuple[Tensor, Tensor]:
    """Return the NV12 of uint8 images (N, 3, H, W), red first: Y (N, H, W, 1) and UV (N, H/2, W/2, 2), uint8.

    It is computed in float64 and rounded once, half up, so that every machine returns equal bytes: U and V are means of the exact values of
    two by two pixels. Libraries that round before they average, or take one pixel of four, differ by a few steps. Raises ValueError for
    images of another dtype or shape, or of odd sizes.
    """
    if image.dtype != torch.uint8 or image.dim() != 4 or image.shape[1] != 3 or image.shape[2] % HALF or image.shape[3] % HALF:
        raise ValueError(f"images are uint8 (N, 3, H, W) with even H and W, not {image.dtype} {tuple(image.shape)}")
    yuv = RgbToYuv444(swing).double()(image.double())
    y, uv = yuv[:, :1], F.avg_pool2d(yuv[:, 1:], HALF)
    return tuple((plane + 0.5).floor().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous() for plane in (y, uv))  # type: ignore[return-value]


def split_nv12(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Return Y (N, H, W, 1) and UV (N, H/2, W/2, 2) of a camera's NV12 images, uint8 (N, 3H/2, W), as views without a copy.

    Raises ValueError for a buffer of another dtype or shape.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 3 or buffer.shape[1] % 3 or buffer.shape[2] % HALF:
        raise ValueError(f"a buffer of NV12 is uint8 (N, 3H/2, W) with even H and W, not {buffer.dtype} {tuple(buffer.shape)}")
    count, rows, width = buffer.shape
    height = rows * 2 // 3
    return buffer[:, :height, :, None], buffer[:, height:].reshape(count, height // HALF, width // HALF, HALF)
