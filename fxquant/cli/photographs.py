"""Photographs of a folder as samples, read and preprocessed as the model expects them: by its hub's own transform, or by options."""

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.analysis.sample import Named, arguments_of, samples_from, yuv_size
from fxquant.cli.factories import positive, transform_of
from fxquant.errors import ConfigurationError
from fxquant.frontend import inputs_of_file
from fxquant.nn.camera import Nv12ToYuv444, rgb_to_nv12, swing_of
from fxquant.support.progress import progress

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
MOST = 1024  # photographs that are read: at 224 × 224 they are 600 MB
BILINEAR = 2  # PIL.Image.Resampling.BILINEAR
PAD, GRAY = -1, 114  # the proportions are kept, as those of YOLO's images; GRAY is around them
RESIZED = {0: "resized to ", PAD: "with gray margins "}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by which most classifiers are trained


@dataclass(frozen=True)
class Preprocessing:
    """From a PIL image to float32 (3, height, width): its shorter side is resized, the middle cropped, its values normalized."""

    size: tuple[int, int]  # height, width
    resize: int  # the shorter side before the crop, in pixels; 0: the whole image is resized to `size`; PAD: it keeps its proportions
    mean: tuple[float, ...]  # mean, std: by channel, of values from 0 to 1
    std: tuple[float, ...]
    bgr: bool

    def __call__(self, image: Any) -> Tensor:
        height, width = self.size
        if self.resize == PAD:
            from PIL import ImageOps

            image = ImageOps.pad(image, (width, height), BILINEAR, (GRAY,) * 3)
        elif self.resize:
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
        order, resized = "BGR" if self.bgr else "RGB", RESIZED.get(self.resize, f"resized to {self.resize}, the middle of ")
        return f"{order}, {resized}{height} × {width}, mean {', '.join(map(str, self.mean))}, std {', '.join(map(str, self.std))}"


def add_photographs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how photographs in --data or --images become samples."""
    group = parser.add_argument_group("photographs", "a model of timm, torchvision or hf has its own preprocessing, which these replace")
    shorter = "shorter side before the crop; 0: none is cropped; pad: gray margins, as of YOLO (default: --size / 0.875)"
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "--size": ("height and width of the model's input (default: those of an ONNX file)", {"type": sizes, "metavar": "H[,W]"}),
        "--resize": (shorter, {"type": lambda text: PAD if text == "pad" else int(text), "metavar": "N"}),
        "--mean": ("subtracted from values from 0 to 1 (default: ImageNet's)", {"type": three, "metavar": "R,G,B"}),
        "--std": ("what the difference is divided by (default: ImageNet's)", {"type": three, "metavar": "R,G,B"}),
        "--bgr": ("channels in the order blue, green, red; --mean and --std are in that order, too", {"action": "store_true"}),
    }
    for name, (purpose, settings) in options.items():
        group.add_argument(name, dest=f"photo_{name[2:]}", help=purpose, **settings)


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
    """Return the samples in --data or --images by the arguments of forward; at most `most` photographs, float32 (N, 3, H, W).

    Raises ConfigurationError for data that cannot be read, and for options that do not fit it.
    """
    files = photographs_in(options)
    stated = [f"--{name[6:]}" for name, value in vars(options).items() if name.startswith("photo_") and value not in (None, False)]
    if not files:
        if stated:
            because = f"{options.data} is not a folder of images ({', '.join(SUFFIXES)})"
            raise ConfigurationError(f"{stated[0]} means nothing here", because=because, remedy="leave it out, or give photographs")
        return samples_from(options.data, model)
    names = arguments_of(model)
    if len(names) != 1:
        because = f"forward takes {', '.join(names)}"
        raise ConfigurationError("photographs are for one input", because=because, remedy="save the inputs in a .npz file")
    return {names[0]: _read(files, preprocessing(options, model, bool(stated)), most)}


def photographs_in(options: argparse.Namespace) -> list[Path]:
    """Return the photographs that --images names, or that are in the folder --data. Raises ConfigurationError if --images has none."""
    paths = options.images or [options.data] * options.data.is_dir()
    inside = [each for path in paths for each in path.rglob("*") if each.suffix.lower() in SUFFIXES]
    files = sorted([*inside, *(path for path in paths if not path.is_dir())])
    if options.images and not files:
        because, remedy = f"no file in them ends in {', '.join(SUFFIXES)}", "name photographs, or folders of them"
        raise ConfigurationError("--images has no photographs", because=because, remedy=remedy)
    return files


def camera_batches(options: argparse.Namespace, model: fx.GraphModule) -> list[Any]:
    """Return the photographs in --images as batches for `with_camera`'s models, float32 (N, 3, H, W): YUV of NV12, or colours, less 128."""
    image, *others = model.graph.find_nodes(op="placeholder")
    size = None if others else yuv_size(model, image)
    if size is None:
        because = "photographs become a camera's images, and its input is not YUV or colours less 128 of even sizes"
        remedy = "export it with --camera and --train-type, and verify the camera.fxq of that folder; or give --data"
        raise ConfigurationError("--images mean nothing to this model", because=because, remedy=remedy)
    asked = getattr(options, "camera", None)
    swing = asked if asked in ("rgb", "bgr") else swing_of(model)
    pixels = _read(photographs_in(options), Preprocessing(size, 0, (0.0,) * 3, (1 / 255,) * 3, swing == "bgr"), MOST).round()
    images = pixels - 128 if swing in ("rgb", "bgr") else Nv12ToYuv444(centred=True)(*rgb_to_nv12(pixels.to(torch.uint8)))
    return list(images.split(options.batch_size or 1))


def preprocessing(options: argparse.Namespace, model: nn.Module, stated: bool) -> Callable[[Any], Tensor]:
    """Return the function from a PIL image to a sample: that of the options, or that of the model's hub."""
    own = None if stated else transform_of(options.model, model)
    if own is not None:
        return own
    size = options.photo_size
    for image in (inputs_of_file(model) or ()) if size is None else ():
        size = (image.shape[2], image.shape[3]) if image.dim() == 4 else None
    if size is None:
        because = "photographs have sizes of their own, and the model does not say which one it takes"
        raise ConfigurationError("--size is needed", because=because, remedy="give --size, and --mean and --std as the model was trained")
    resize = round(min(size) / 0.875) if options.photo_resize is None else options.photo_resize
    if resize not in RESIZED and resize < min(size):
        because = f"{resize} pixels are fewer than --size has"
        raise ConfigurationError("--resize is too small", because=because, remedy="give a larger one, or 0")
    return Preprocessing(size, resize, options.photo_mean or MEAN, options.photo_std or STD, options.photo_bgr)


def _read(files: list[Path], transform: Callable[[Any], Tensor], most: int) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        remedy = 'pip install "fxquant[photographs]", or save the samples in a .npz file'
        raise ConfigurationError("photographs cannot be read", because="Pillow is not installed", remedy=remedy) from error
    folder = os.path.commonpath([file.parent for file in files])
    random.Random(0).shuffle(files)  # the samples that are held back are then of all folders, each of which may be a class
    chosen, samples = files[:most], []
    for file in progress(chosen, len(chosen), "reading photographs"):
        try:
            with Image.open(fp=file, mode="r") as image:
                samples.append(transform(ImageOps.exif_transpose(image).convert("RGB")))
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged files
            because = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigurationError(f"{file} cannot be read as an image", because=because, remedy="mend or remove it") from error
    print(f"{len(chosen)} of {len(files)} photographs in {folder}: {transform}")
    return torch.stack(samples)
