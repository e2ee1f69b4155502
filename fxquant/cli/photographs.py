"""Photographs of a folder as samples, read and preprocessed as the model expects them: by its hub's own transform, or by options."""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.analysis.sample import Named, arguments_of, samples_from
from fxquant.cli.factories import positive, transform_of
from fxquant.errors import ConfigurationError
from fxquant.support.progress import progress

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
MOST = 1024  # photographs that are read: at 224 × 224 they are 600 MB
BILINEAR = 2  # PIL.Image.Resampling.BILINEAR
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by which most classifiers are trained


@dataclass(frozen=True)
class Preprocessing:
    """From a PIL image to float32 (3, height, width): its shorter side is resized, the middle cropped, its values normalized."""

    size: tuple[int, int]  # height, width
    resize: int  # the shorter side before the crop, in pixels; 0: the whole image is resized to `size`
    mean: tuple[float, ...]  # mean, std: by channel, of values from 0 to 1
    std: tuple[float, ...]
    bgr: bool

    def __call__(self, image: Any) -> Tensor:
        height, width = self.size
        if self.resize:
            least = max(height / image.height, width / image.width)  # from which on the crop is inside of the image
            scale = least * self.resize / min(self.size)
            image = image.resize([max(round(side * scale), end) for side, end in zip(image.size, (width, height), strict=True)], BILINEAR)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        image = image.resize((width, height), BILINEAR)
        values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1) / 255
        values = values.flip(0) if self.bgr else values
        return (values - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]

    def __str__(self) -> str:
        height, width = self.size
        order, resized = "BGR" if self.bgr else "RGB", f"resized to {self.resize}, the middle of " if self.resize else "resized to "
        return f"{order}, {resized}{height} × {width}, mean {', '.join(map(str, self.mean))}, std {', '.join(map(str, self.std))}"


def add_photographs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how photographs in --data become samples."""
    about = "where --data is a folder of images; a model of timm, torchvision or hf has its own preprocessing, which these replace"
    group = parser.add_argument_group("photographs", about)
    group.add_argument("--size", dest="photo_size", type=sizes, metavar="H[,W]", help="height and width of the model's input, in pixels")
    group.add_argument(
        "--resize",
        dest="photo_resize",
        type=int,
        metavar="N",
        help="shorter side before the crop; 0: none is cropped (default: --size / 0.875)",
    )
    group.add_argument(
        "--mean", dest="photo_mean", type=three, metavar="R,G,B", help="subtracted from values from 0 to 1 (default: ImageNet's)"
    )
    group.add_argument(
        "--std", dest="photo_std", type=three, metavar="R,G,B", help="what the difference is divided by (default: ImageNet's)"
    )
    group.add_argument(
        "--bgr",
        dest="photo_bgr",
        action="store_true",
        help="channels in the order blue, green, red; --mean and --std are in that order, too",
    )


def sizes(text: str) -> tuple[int, int]:
    """Return the height and width in an option."""
    numbers = [positive(part) for part in text.split(",")]
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text} is not H or H,W")
    return numbers[0], numbers[-1]


def three(text: str) -> tuple[float, ...]:
    """Return the three numbers in an option, or one for all channels."""
    numbers = tuple(map(float, text.split(",")))
    if len(numbers) not in (1, 3):
        raise argparse.ArgumentTypeError(f"{text} is not one number or three")
    return numbers * 3 if len(numbers) == 1 else numbers


def samples_of(options: argparse.Namespace, model: nn.Module, most: int = MOST) -> Named:
    """Return the samples in --data by the arguments of forward; at most `most` photographs, float32 (N, 3, H, W).

    Raises ConfigurationError for data that cannot be read, and for options that do not fit it.
    """
    path = options.data
    files = sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES) if path.is_dir() else []
    stated = [f"--{name[6:]}" for name, value in vars(options).items() if name.startswith("photo_") and value not in (None, False)]
    if not files:
        if stated:
            because = f"{path} is not a folder of images ({', '.join(SUFFIXES)})"
            raise ConfigurationError(f"{stated[0]} means nothing here", because=because, remedy="leave it out, or give photographs")
        return samples_from(path, model)
    names = arguments_of(model)
    if len(names) != 1:
        because = f"forward takes {', '.join(names)}"
        raise ConfigurationError(f"{path} has photographs for one input", because=because, remedy="save the inputs in a .npz file")
    return {names[0]: _read(path, files, preprocessing(options, model, bool(stated)), most)}


def preprocessing(options: argparse.Namespace, model: nn.Module, stated: bool) -> Callable[[Any], Tensor]:
    """Return the function from a PIL image to a sample: that of the options, or that of the model's hub."""
    own = None if stated else transform_of(options.model, model)
    if own is not None:
        return own
    if options.photo_size is None:
        because = "photographs have sizes of their own, and the model does not say which one it takes"
        raise ConfigurationError("--size is needed", because=because, remedy="give --size, and --mean and --std as the model was trained")
    resize = round(min(options.photo_size) / 0.875) if options.photo_resize is None else options.photo_resize
    if resize and resize < min(options.photo_size):
        because = f"{resize} pixels are fewer than --size has"
        raise ConfigurationError("--resize is too small", because=because, remedy="give a larger one, or 0")
    return Preprocessing(options.photo_size, resize, options.photo_mean or MEAN, options.photo_std or STD, options.photo_bgr)


def _read(path: Path, files: list[Path], transform: Callable[[Any], Tensor], most: int) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        remedy = 'pip install "fxquant[photographs]", or save the samples in a .npz file'
        raise ConfigurationError("photographs cannot be read", because="Pillow is not installed", remedy=remedy) from error
    random.Random(0).shuffle(files)  # the samples that are held back are then of all folders, each of which may be a class
    chosen, samples = files[:most], []
    for file in progress(chosen, len(chosen), "reading photographs"):
        try:
            with Image.open(fp=file, mode="r") as image:
                samples.append(transform(ImageOps.exif_transpose(image).convert("RGB")))
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged files
            because = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigurationError(f"{file} cannot be read as an image", because=because, remedy="mend or remove it") from error
    print(f"{len(chosen)} of {len(files)} photographs in {path}: {transform}")
    return torch.stack(samples)
