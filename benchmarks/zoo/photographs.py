"""Real images, and signals and clips cut from such images: nothing is downloaded, nothing is kept on disk."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_SMALLEST_CROP = 64  # pixels of the photograph; smaller crops are mostly blur


def photographs(batch: int, size: int, seed: int = 0) -> Tensor:
    """Square crops of two photographs, resized: float32 [batch, 3, size, size], normalised as ImageNet images are.

    A crop's photograph, place, extent and mirroring follow from `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([_random_crop(size, generator) for _ in range(batch)])


def _random_crop(size: int, generator: torch.Generator) -> Tensor:
    sources = _sample_photographs()
    photograph = sources[_random_integer(0, len(sources), generator)]
    _, height, width = photograph.shape
    extent = _random_integer(_SMALLEST_CROP, min(height, width) + 1, generator)
    top = _random_integer(0, height - extent + 1, generator)
    left = _random_integer(0, width - extent + 1, generator)
    crop = photograph[:, top : top + extent, left : left + extent].unsqueeze(0)
    resized = F.interpolate(crop, size=(size, size), mode="bilinear", align_corners=False, antialias=True)[0]
    return resized.flip(-1) if _random_integer(0, 2, generator) else resized


def _random_integer(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


@cache
def _sample_photographs() -> tuple[Tensor, ...]:
    """scikit-learn's two sample photographs, each float32 [3, 427, 640], normalised; reading them needs Pillow."""
    from sklearn.datasets import load_sample_images  # type: ignore[import-untyped,unused-ignore]

    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    pixels = (torch.tensor(image, dtype=torch.float32) / 255 for image in load_sample_images().images)
    return tuple(((image - mean) / std).permute(2, 0, 1).contiguous() for image in pixels)


def signals(batch: int, length: int, seed: int = 0) -> Tensor:
    """Lines scanned across the photographs, in red, green and blue: float32 [batch, 3, length], normalised."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        photograph = _sample_photographs()[_random_integer(0, 2, generator)]
        row = photograph[:, _random_integer(0, photograph.shape[1], generator)]
        start = _random_integer(0, row.shape[1] - length + 1, generator)
        rows.append(row[:, start : start + length])
    return torch.stack(rows)


def clips(batch: int, frames: int, size: int, seed: int = 0) -> Tensor:
    """A camera that moves across the photographs: float32 [batch, 3, frames, size, size], normalised."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(batch):
        photograph = _sample_photographs()[_random_integer(0, 2, generator)][:, ::2, ::2]
        _, height, width = photograph.shape
        ends = [[_random_integer(0, extent - size + 1, generator) for extent in (height, width)] for _ in range(2)]
        places = [[begin + (end - begin) * frame // (frames - 1) for begin, end in zip(*ends, strict=True)] for frame in range(frames)]
        sequences.append(torch.stack([photograph[:, top : top + size, left : left + size] for top, left in places], 1))
    return torch.stack(sequences)
