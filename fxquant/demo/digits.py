"""The handwritten digits of scikit-learn, as images of a size that a vision network expects.

The images travel inside the scikit-learn package, so nothing is downloaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.errors import ConfigurationError

IMAGE_SIZE = 32
NUM_CLASSES = 10
TEST_IMAGES_PER_CLASS = 36
_SPLIT_SEED = 20
_LARGEST_PIXEL = 16  # scikit-learn's pixels are the integers 0..16


class DigitsDataset(NamedTuple):
    """1,797 digits, split into 1,437 to train on and 360 (36 of each digit) to test on.

    Images are float32 of shape [count, 1, 32, 32] with values in [-1, 1]; labels are int64 of shape [count], 0..9.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits_dataset() -> DigitsDataset:
    """Return the digits with their fixed split: every call, in every process, returns equal tensors."""
    raw = _load_raw_digits()
    images = _normalise(torch.tensor(raw.images, dtype=torch.float32))
    labels = torch.tensor(raw.target, dtype=torch.int64)
    train, test = split_by_class(labels, TEST_IMAGES_PER_CLASS, _SPLIT_SEED)
    return DigitsDataset(images[train], labels[train], images[test], labels[test])


def split_by_class(labels: Tensor, test_images_per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return disjoint ascending indices (train, test); the test set has equally many images of each class."""
    generator = torch.Generator().manual_seed(seed)
    is_test = torch.zeros_like(labels, dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero().flatten()
        chosen = torch.randperm(len(members), generator=generator)[:test_images_per_class]
        is_test[members[chosen]] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def _normalise(pixels: Tensor) -> Tensor:
    """Scale and resize [count, 8, 8] in 0..16 to [count, 1, 32, 32] in [-1, 1]."""
    centred = pixels.unsqueeze(1) / (_LARGEST_PIXEL / 2) - 1
    return F.interpolate(centred, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)


def _load_raw_digits() -> Any:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            "the digits cannot be loaded",
            because="they come with scikit-learn, which is not installed",
            remedy='pip install "fxquant[demo]"',
        ) from error
    return load_digits()
