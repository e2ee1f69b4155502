"""The entries of the zoo: a live model, and real data to calibrate it and to test it with."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.zoo.densenet import DenseNet
from benchmarks.zoo.efficientnet import EfficientNetB0
from benchmarks.zoo.inception import Inception
from benchmarks.zoo.life import check_alive, initialise, make_alive
from benchmarks.zoo.mobilenet import MobileNetV2, MobileNetV3Small
from benchmarks.zoo.photographs import clips, photographs, signals
from benchmarks.zoo.resnet import ResNet18, ResNet50
from benchmarks.zoo.sequence import SignalNetwork
from benchmarks.zoo.shufflenet import ShuffleNetV2
from benchmarks.zoo.unet import UNet
from benchmarks.zoo.volume import VolumeNetwork
from examples.demo import build_demo_network, load_digits_dataset, train
from fxquant.support import seeded

Batches = list[Tensor]


class ZooEntry(NamedTuple):
    """A live model in eval mode, the arguments to trace it with, and batches of real data to calibrate and to test on."""

    model: nn.Module
    example_inputs: tuple[Tensor, ...]
    calibration_batches: Batches
    test_batches: Batches


RESNET_IMAGE_SIZE = 64
MOBILENET_IMAGE_SIZE = 32
_ALIVE_SEED, _CALIBRATION_SEED, _TEST_SEED = 0, 1, 2
_BATCHES, _BATCH_SIZE = 4, 16
_COUNT = _BATCHES * _BATCH_SIZE

Data = Callable[[int, int], Tensor]
"""From a number of items and a seed, items of real data: [number, ...]."""


def build_resnet18(num_classes: int = 100, small: bool = False, image_size: int = RESNET_IMAGE_SIZE, seed: int = 0) -> nn.Module:
    """A live ResNet-18 for images of shape [batch, 3, image_size, image_size]."""
    return _alive(lambda: ResNet18(num_classes, small), _images(image_size), seed)


def build_mobilenet_v2(
    num_classes: int = 100, width: float = 1.0, small: bool = True, image_size: int = MOBILENET_IMAGE_SIZE, seed: int = 0
) -> nn.Module:
    """A live MobileNetV2 for images of shape [batch, 3, image_size, image_size]."""
    return _alive(lambda: MobileNetV2(num_classes, width, small), _images(image_size), seed)


def _images(size: int) -> Data:
    return lambda count, seed: photographs(count, size, seed)


def _alive(build: Callable[[], nn.Module], data: Data, seed: int = 0) -> nn.Module:
    with seeded(seed):
        model = build()
    initialise(model, seed)
    batch = data(_COUNT, seed)
    make_alive(model, batch)
    check_alive(model, batch)
    return model


def _entry(model: nn.Module, calibration: Tensor, test: Tensor) -> ZooEntry:
    return ZooEntry(model, (calibration[:1],), list(torch.split(calibration, _BATCH_SIZE)), list(torch.split(test, _BATCH_SIZE)))


def _built(build: Callable[[], nn.Module], data: Data) -> Callable[[], ZooEntry]:
    """An entry whose batch norms come from other items than it is calibrated and tested with."""
    return lambda: _entry(_alive(build, data, _ALIVE_SEED), data(_COUNT, _CALIBRATION_SEED), data(_COUNT, _TEST_SEED))


def _demo_entry() -> ZooEntry:
    dataset = load_digits_dataset()
    network = build_demo_network(seed=0)
    train(network, dataset, epochs=5, seed=0)
    return _entry(network, dataset.train_images[:_COUNT], dataset.test_images[:_COUNT])


def zoo() -> dict[str, Callable[[], ZooEntry]]:
    """Builders by name; each call builds anew, and always the same. The first trains for a few seconds."""
    return {
        "demo network": _demo_entry,
        "ResNet-18": _built(lambda: ResNet18(100), _images(RESNET_IMAGE_SIZE)),
        "ResNet-50": _built(lambda: ResNet50(100), _images(RESNET_IMAGE_SIZE)),
        "MobileNetV2": _built(lambda: MobileNetV2(100, small=True), _images(MOBILENET_IMAGE_SIZE)),
        "MobileNetV3-small": _built(lambda: MobileNetV3Small(100, small=True), _images(MOBILENET_IMAGE_SIZE)),
        "EfficientNet-B0 ×0.5": _built(lambda: EfficientNetB0(100, width=0.5, small=True), _images(MOBILENET_IMAGE_SIZE)),
        "ShuffleNetV2 ×0.5": _built(lambda: ShuffleNetV2(100, small=True), _images(64)),
        "DenseNet": _built(lambda: DenseNet(100), _images(64)),
        "Inception": _built(lambda: Inception(100), _images(64)),
        "U-Net": _built(lambda: UNet(6), _images(32)),
        "signal network (1-d)": _built(lambda: SignalNetwork(10), lambda count, seed: signals(count, 256, seed)),
        "clip network (3-d)": _built(lambda: VolumeNetwork(10), lambda count, seed: clips(count, 8, 24, seed)),
    }
