"""Colour spaces: a product with a three by three matrix, as a convolution of kernel 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
