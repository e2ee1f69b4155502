"""Models and real data for tests and benchmarks, made from seeds: nothing is downloaded, nothing is kept on disk.

Pretrained weights are not needed to test arithmetic, but activations that are alive are: a network whose values have
collapsed to zero agrees with anything. Every model here has BatchNorm statistics taken from real images, and
`check_alive` holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxquant.demo.digits import load_digits_dataset
from fxquant.demo.network import build_demo_network
from fxquant.demo.training import seeded, train_float

Batches = list[Tensor]


# ---------------------------------------------------------------------------------------------------- ResNet-18


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class ResNet18(nn.Module):
    """torchvision's ResNet-18 with torchvision's parameter names; `small` keeps 32×32 images from vanishing in the stem."""

    def __init__(self, num_classes: int = 1000, small: bool = False) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        logits: Tensor = self.fc(x)
        return logits


# -------------------------------------------------------------------------------------------------- MobileNetV2


def _conv_bn_relu6(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, depthwise 3×3, narrow without activation."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        widen = [] if expansion == 1 else [_conv_bn_relu6(in_channels, hidden, kernel=1)]
        filter_and_narrow = [
            _conv_bn_relu6(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*widen, *filter_and_narrow)
        self.use_res_connect = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.use_res_connect else out


class MobileNetV2(nn.Module):
    """torchvision's MobileNetV2 with torchvision's parameter names; `small` drops the first two strides for 32×32 images."""

    # expansion, output channels at width 1, number of blocks, stride of the first block
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, num_classes: int = 1000, width: float = 1.0, small: bool = False) -> None:
        super().__init__()
        channels = _divisible_by_eight(32 * width)
        last_channels = _divisible_by_eight(1280 * max(1.0, width))
        layers: list[nn.Module] = [_conv_bn_relu6(3, channels, kernel=3, stride=1 if small else 2)]
        for stage, (expansion, base_channels, blocks, stage_stride) in enumerate(self.STAGES):
            out_channels = _divisible_by_eight(base_channels * width)
            for block in range(blocks):
                stride = stage_stride if block == 0 and not (small and stage == 1) else 1
                layers.append(InvertedResidual(channels, out_channels, stride, expansion))
                channels = out_channels
        layers.append(_conv_bn_relu6(channels, last_channels, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last_channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        logits: Tensor = self.classifier(x)
        return logits


def _divisible_by_eight(channels: float) -> int:
    """The nearest multiple of eight, at least eight, and never more than a tenth below `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


# ------------------------------------------------------------------------------------------------ residual chain


class ChainBlock(nn.Module):
    """Seven graph nodes: conv, bn, relu, conv, bn, add, relu."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu2(x + y)
        return out


CHAIN_CHANNELS = 4
CHAIN_IMAGE_SIZE = 8


def residual_chain(nodes: int, seed: int = 0) -> nn.Module:
    """A model in eval mode that traces to `nodes` graph nodes, give or take three (nine at least), for images [batch, 4, 8, 8].

    Its BatchNorm statistics come from noise. Up to a few hundred nodes every relu is alive; far beyond, values are finite still.
    """
    blocks = max(1, round((nodes - 2) / 7))  # two nodes are the input and the output
    with seeded(seed):
        chain = nn.Sequential(*(ChainBlock(CHAIN_CHANNELS) for _ in range(blocks)))
        for block in chain:
            _initialise_chain_block(block)
        make_alive(chain, torch.randn(32, CHAIN_CHANNELS, CHAIN_IMAGE_SIZE, CHAIN_IMAGE_SIZE))
    return chain


def _initialise_chain_block(block: nn.Module) -> None:
    """A downward drift in each block: without it values grow along the chain until no relu has anything left to do."""
    assert isinstance(block, ChainBlock)
    _initialise(block)
    nn.init.normal_(block.bn2.bias, mean=-0.2, std=0.1)


# ------------------------------------------------------------------------------------------- weights that are alive


def initialise(model: nn.Module, seed: int) -> None:
    """Kaiming weights; BatchNorm weights in 0.5..1.5 and biases from N(0, 0.2), so that folding them is not trivial."""
    with seeded(seed):
        _initialise(model)


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.2)
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.normal_(module.bias, 0.0, 0.2)


def make_alive(model: nn.Module, images: Tensor, batch_size: int = 32) -> None:
    """Set every BatchNorm's running statistics to their mean over batches of `images`; the model is left in eval mode.

    Everything but BatchNorm runs as in evaluation, so the result is a function of the weights and the images alone.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    model.eval()
    with _cumulative(norms), torch.no_grad():
        for batch in torch.split(images, batch_size):
            model(batch)


@contextmanager
def _cumulative(norms: Sequence[nn.BatchNorm2d]) -> Iterator[None]:
    """Inside, statistics start afresh and are averaged over all batches; afterwards each momentum is what it was."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


class Activity(NamedTuple):
    """What one relu put out: the fraction of exact zeros, and the standard deviation."""

    zeros: float
    std: float

    @property
    def is_alive(self) -> bool:
        return 0.1 <= self.zeros <= 0.9 and self.std > 0


class _ReluRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the output of each relu and relu6, however the model spells them."""

    RELUS = (torch.ops.aten.relu, torch.ops.aten.relu_, torch.ops.aten.hardtanh, torch.ops.aten.hardtanh_)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activities: list[Activity] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.RELUS:
            self.activities.append(Activity((out == 0).double().mean().item(), out.std().item()))
        return out


def relu_activities(model: nn.Module, images: Tensor) -> list[Activity]:
    """The activity of each relu call of `model`, in the order of execution."""
    recorder = _ReluRecorder()
    with torch.no_grad(), recorder:
        model(images)
    return recorder.activities


def check_alive(model: nn.Module, images: Tensor) -> None:
    """Raise ValueError if a relu puts out fewer than 10 % or more than 90 % zeros, or a constant."""
    dead = [f"relu {index}: {activity}" for index, activity in enumerate(relu_activities(model, images)) if not activity.is_alive]
    if dead:
        raise ValueError("the model is not alive:\n" + "\n".join(dead))


# ------------------------------------------------------------------------------------------------------- real data


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


# ------------------------------------------------------------------------------------------------------------- zoo


class ZooEntry(NamedTuple):
    """A live model in eval mode, the arguments to trace it with, and batches of real images to calibrate and to test on."""

    model: nn.Module
    example_inputs: tuple[Tensor, ...]
    calibration_batches: Batches
    test_batches: Batches


RESNET_IMAGE_SIZE = 64
MOBILENET_IMAGE_SIZE = 32
_CALIBRATION_SEED, _TEST_SEED = 1, 2
_BATCHES, _BATCH_SIZE = 4, 16


def build_resnet18(num_classes: int = 100, small: bool = False, image_size: int = RESNET_IMAGE_SIZE, seed: int = 0) -> nn.Module:
    """A live ResNet-18 for images of shape [batch, 3, image_size, image_size]."""
    with seeded(seed):
        model = ResNet18(num_classes, small)
    return _alive_on_photographs(model, image_size, seed)


def build_mobilenet_v2(
    num_classes: int = 100, width: float = 1.0, small: bool = True, image_size: int = MOBILENET_IMAGE_SIZE, seed: int = 0
) -> nn.Module:
    """A live MobileNetV2 for images of shape [batch, 3, image_size, image_size]."""
    with seeded(seed):
        model = MobileNetV2(num_classes, width, small)
    return _alive_on_photographs(model, image_size, seed)


def _alive_on_photographs(model: nn.Module, image_size: int, seed: int) -> nn.Module:
    initialise(model, seed)
    images = photographs(64, image_size, seed)
    make_alive(model, images)
    check_alive(model, images)
    return model


def _demo_entry() -> ZooEntry:
    dataset = load_digits_dataset()
    network = build_demo_network(seed=0)
    train_float(network, dataset, epochs=5, seed=0)
    count = _BATCHES * _BATCH_SIZE
    return _entry(network, dataset.train_images[:count], dataset.test_images[:count])


def _photograph_entry(model: nn.Module, image_size: int) -> ZooEntry:
    count = _BATCHES * _BATCH_SIZE
    return _entry(model, photographs(count, image_size, _CALIBRATION_SEED), photographs(count, image_size, _TEST_SEED))


def _entry(model: nn.Module, calibration: Tensor, test: Tensor) -> ZooEntry:
    return ZooEntry(model, (calibration[:1],), list(torch.split(calibration, _BATCH_SIZE)), list(torch.split(test, _BATCH_SIZE)))


def zoo() -> dict[str, Callable[[], ZooEntry]]:
    """Builders by name; each call builds anew, and always the same. The first trains for a few seconds."""
    return {
        "demo network": _demo_entry,
        "ResNet-18": lambda: _photograph_entry(build_resnet18(), RESNET_IMAGE_SIZE),
        "MobileNetV2": lambda: _photograph_entry(build_mobilenet_v2(), MOBILENET_IMAGE_SIZE),
    }
