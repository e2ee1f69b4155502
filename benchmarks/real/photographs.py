"""Crops of photographs that ship inside of wheels."""

from collections.abc import Callable
from functools import cache

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from benchmarks.real.wheels import folder

Colours = tuple[float, float, float]
SCIKIT_IMAGE = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")
PEOPLE = ("astronaut.png", "camera.png", "coffee.png", "imagenet_00_243.jpg", "imagenet_13_471.jpg")  # whole persons, faces, arms and legs
SMALLEST = 0.5  # of a photograph's shorter side that a crop has


@cache
def photographs() -> tuple[Tensor, ...]:
    """Return 27 photographs, float32 of shape (3, height, width), from 0 to 1."""
    paths = sorted((folder("foolbox", "foolbox") / "data").glob("imagenet_*.jpg"))
    paths += [folder("skimage", "scikit-image") / "data" / name for name in SCIKIT_IMAGE]
    paths += [folder("sklearn", "scikit-learn") / "datasets" / "images" / name for name in ("china.jpg", "flower.jpg")]
    return tuple(_read(Image.open(path)) for path in paths)


@cache
def people() -> tuple[Tensor, ...]:
    """Return five photographs with persons, float32 of shape (3, height, width), from 0 to 1."""
    places = {"imagenet": folder("foolbox", "foolbox") / "data"}
    return tuple(_read(Image.open(places.get(name[:8], folder("skimage", "scikit-image") / "data") / name)) for name in PEOPLE)


def _read(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def crops(
    count: int, size: int, seed: int, mean: Colours, deviation: Colours, sources: Callable[[], tuple[Tensor, ...]] = photographs
) -> Tensor:
    """Return square crops, float32 of shape (count, 3, size, size), normalized; the photographs of `sources` take turns.

    Place, extent and mirroring follow from `seed`.
    """
    generator, images = torch.Generator().manual_seed(seed), []
    for index in range(count):
        image = sources()[index % len(sources())]
        height, width = image.shape[1:]
        extent = int(min(height, width) * (SMALLEST + (1 - SMALLEST) * float(torch.rand((), generator=generator))))
        top, left = (int(torch.randint(0, side - extent + 1, (), generator=generator)) for side in (height, width))
        crop = image[None, :, top : top + extent, left : left + extent]
        resized = F.interpolate(crop, size=(size, size), mode="bilinear", align_corners=False, antialias=True)[0]
        images.append(resized.flip(-1) if bool(torch.rand((), generator=generator) < 0.5) else resized)
    return (torch.stack(images) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
