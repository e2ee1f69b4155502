"""Tasks of the networks: noisy digits, letters of many typefaces, photographs under noise. Made at run time, nothing is downloaded.

A task is a function of a seed: the seed chooses the split, the transformations and the noise, so that the same seed gives the
same tensors in every process. Sizes and noise were chosen on float networks alone.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.demo import load_digits_dataset, split_by_class
from fxquant.errors import ConfigurationError

CALIBRATION_SAMPLES = 64
CALIBRATION_BATCH = 16

DIGIT_TEST_PER_CLASS = 90
DIGIT_TRAIN_COPIES = 4  # of every image, each with noise of its own
DIGIT_TEST_COPIES = 8
DIGIT_NOISE = 0.7  # standard deviation; the pixels lie in [-1, 1]

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"  # lower case only where its shape differs from the capital's
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmb10", "cmss10", "cmtt10", "cmti10",
)  # fmt: skip
GLYPH_SIZE = 20
GLYPH_TRAIN, GLYPH_TEST = 6000, 5000
GLYPH_NOISE = 0.25
GLYPH_TURN = 0.35  # radians, the largest
GLYPH_SHIFT = 0.15  # of half the image, the largest
GLYPH_SCALE = (0.75, 1.2)
_TEMPLATE = 64  # pixels; a character is drawn at this size, then turned, shifted and shrunk

PATCH = 24  # pixels, in training and in the test
PATCHES = 2400
PHOTOGRAPH_NOISE = 25 / 255  # standard deviation; the pixels lie in [0, 1]
HELD_OUT = 480  # the columns from here on of each photograph are seen by the test alone


@dataclass(frozen=True)
class Data:
    """Inputs and what is wanted for them, to train on and to test on; the first training inputs calibrate."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    @property
    def calibration(self) -> list[Tensor]:
        """64 training inputs, in batches of 16."""
        return list(torch.split(self.train_inputs[:CALIBRATION_SAMPLES], CALIBRATION_BATCH))


@dataclass(frozen=True)
class Task:
    """How the data of a seed is made, what training minimises, and what is reported.

    unit       of the score: "%" right, or "dB" of PSNR; more is better
    channels   of an input
    size       of an input in training, in pixels
    outputs    classes, or channels of an image
    """

    name: str
    unit: str
    channels: int
    size: int
    outputs: int
    make: Callable[[int], Data]
    recipe: str

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.05) if self.unit == "%" else F.l1_loss(output, target)

    def score(self, output: Tensor, target: Tensor) -> float:
        """Of all outputs of the test: percent right, or the mean PSNR of its images in dB."""
        if self.unit == "%":
            return 100 * int((output.argmax(1) == target).sum()) / len(target)
        error = (output.double().clamp(0, 1) - target.double()).square().mean((1, 2, 3))
        return float((-10 * error.log10()).mean())


# ---- digits -----------------------------------------------------------------------------------------------------------


def _digits(seed: int) -> Data:
    """scikit-learn's handwritten digits at 16 × 16 pixels, under noise; the digits of the test are not digits of the training."""
    whole = load_digits_dataset()
    images = F.avg_pool2d(torch.cat([whole.train_images, whole.test_images]), 2)
    labels = torch.cat([whole.train_labels, whole.test_labels])
    train, test = split_by_class(labels, DIGIT_TEST_PER_CLASS, seed)
    generator = torch.Generator().manual_seed(seed)
    train = train.repeat(DIGIT_TRAIN_COPIES)
    train = train[torch.randperm(len(train), generator=generator)]
    test = test.repeat(DIGIT_TEST_COPIES)

    def noisy(chosen: Tensor) -> Tensor:
        return images[chosen] + DIGIT_NOISE * torch.randn(images[chosen].shape, generator=generator)

    return Data(noisy(train), labels[train], noisy(test), labels[test])


# ---- glyphs -----------------------------------------------------------------------------------------------------------


def _glyphs(seed: int) -> Data:
    """Characters in 21 typefaces, turned, shifted, stretched, of any contrast, under noise."""
    generator = torch.Generator().manual_seed(seed)
    train, test = _drawn(GLYPH_TRAIN, generator), _drawn(GLYPH_TEST, generator)
    return Data(*train, *test)


def _drawn(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [count, 1, 20, 20] and their labels."""
    templates = _templates()

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    label = torch.randint(len(CHARACTERS), (count,), generator=generator)
    font = torch.randint(len(FONTS), (count,), generator=generator)
    turn, stretch, size = uniform(-GLYPH_TURN, GLYPH_TURN), uniform(0.85, 1.18), uniform(*GLYPH_SCALE)
    cosine, sine = turn.cos() / size, turn.sin() / size
    rows = (cosine * stretch, -sine, uniform(-GLYPH_SHIFT, GLYPH_SHIFT), sine, cosine / stretch, uniform(-GLYPH_SHIFT, GLYPH_SHIFT))
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 1, 2 * GLYPH_SIZE, 2 * GLYPH_SIZE], align_corners=False)
    sampled = torch.cat(
        [
            F.avg_pool2d(F.grid_sample(templates[f, c].unsqueeze(1), g, align_corners=False), 2)
            for f, c, g in zip(font.split(500), label.split(500), grid.split(500), strict=True)
        ]
    )
    contrast = uniform(0.5, 1.0).view(-1, 1, 1, 1)
    images = contrast * (2 * sampled - 1) + uniform(-0.3, 0.3).view(-1, 1, 1, 1)
    return images + GLYPH_NOISE * torch.randn(images.shape, generator=generator), label


@cache
def _templates() -> Tensor:
    """Every character in every typeface, in the middle of an image: [fonts, characters, 64, 64] in 0..1."""
    folder = _font_folder()
    return torch.stack([torch.stack([_template(folder / f"{font}.ttf", character) for character in CHARACTERS]) for font in FONTS])


def _template(path: Path, character: str) -> Tensor:
    from PIL import Image, ImageDraw

    image = Image.new("L", (_TEMPLATE, _TEMPLATE))
    ImageDraw.Draw(image).text((_TEMPLATE / 2, _TEMPLATE / 2), character, fill=255, font=_font(path), anchor="mm")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(_TEMPLATE, _TEMPLATE).float() / 255


@cache
def _font(path: Path) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(str(path), int(0.75 * _TEMPLATE))


def _font_folder() -> Path:
    """Where matplotlib keeps its fonts: the first folder on the path that has every typeface, which an older matplotlib may lack.

    It is not imported.
    """
    for entry in sys.path:
        folder = Path(entry) / "matplotlib" / "mpl-data" / "fonts" / "ttf"
        if all((folder / f"{font}.ttf").is_file() for font in FONTS):
            return folder
    raise ConfigurationError(
        "the glyphs cannot be drawn",
        because="their typefaces come with matplotlib, which is not installed",
        remedy='pip install "fxquant[accuracy]", or leave the task out: --task digits denoising',
    )


# ---- denoising --------------------------------------------------------------------------------------------------------


def _denoising(seed: int) -> Data:
    """Patches of scikit-learn's two photographs under noise; the test's tiles lie in columns that training does not see."""
    generator = torch.Generator().manual_seed(seed)
    photographs = _photographs()
    patches = []
    for index in range(PATCHES):
        photograph = photographs[index % len(photographs)]
        top = int(torch.randint(photograph.shape[1] - PATCH + 1, (), generator=generator))
        left = int(torch.randint(HELD_OUT - PATCH + 1, (), generator=generator))
        patch = photograph[:, top : top + PATCH, left : left + PATCH]
        patches.append(patch.flip(-1) if index // 2 % 2 else patch)
    clean = torch.stack(patches)
    tiles = torch.stack(
        [
            photograph[:, top : top + PATCH, left : left + PATCH]
            for photograph in photographs
            for top in range(0, photograph.shape[1] - PATCH + 1, PATCH)
            for left in range(HELD_OUT, photograph.shape[2] - PATCH + 1, PATCH)
        ]
    )

    def noisy(images: Tensor) -> Tensor:
        return images + PHOTOGRAPH_NOISE * torch.randn(images.shape, generator=generator)

    return Data(noisy(clean), clean, noisy(tiles), tiles)


@cache
def _photographs() -> tuple[Tensor, ...]:
    """scikit-learn's two sample photographs, each [3, 427, 640] in 0..1."""
    from sklearn.datasets import load_sample_images  # type: ignore[import-untyped,unused-ignore]

    return tuple((torch.tensor(image, dtype=torch.float32) / 255).permute(2, 0, 1).contiguous() for image in load_sample_images().images)


# ---- the table --------------------------------------------------------------------------------------------------------

TASKS = {
    task.name: task
    for task in (
        Task(
            "digits", "%", 1, 16, 10, _digits,
            f"{DIGIT_TEST_PER_CLASS} {DIGIT_TRAIN_COPIES} {DIGIT_TEST_COPIES} {DIGIT_NOISE}",
        ),
        Task(
            "glyphs", "%", 1, GLYPH_SIZE, len(CHARACTERS), _glyphs,
            f"{CHARACTERS} {FONTS} {GLYPH_TRAIN} {GLYPH_TEST} {GLYPH_NOISE} {GLYPH_TURN} {GLYPH_SHIFT} {GLYPH_SCALE}",
        ),
        Task("denoising", "dB", 3, PATCH, 3, _denoising, f"{PATCH} {PATCHES} {PHOTOGRAPH_NOISE} {HELD_OUT}"),
    )
}  # fmt: skip


@cache
def data_of(task: str, seed: int) -> Data:
    """The task's data for a seed, made once in a process."""
    return TASKS[task].make(seed)
