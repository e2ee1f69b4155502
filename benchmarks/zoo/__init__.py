"""Models and real data for tests and benchmarks, made from seeds: nothing is downloaded, nothing is kept on disk.

Pretrained weights are not needed to test arithmetic, but activations that are alive are: a network whose values have
collapsed to zero agrees with anything. Every model here has BatchNorm statistics taken from real images, and
`check_alive` holds it to that.
"""

from benchmarks.zoo.chain import residual_chain
from benchmarks.zoo.entries import ZooEntry, build_mobilenet_v2, build_resnet18, zoo
from benchmarks.zoo.life import check_alive, initialise, make_alive
from benchmarks.zoo.mobilenet import MobileNetV2, MobileNetV3Small
from benchmarks.zoo.photographs import photographs
from benchmarks.zoo.resnet import ResNet18
from benchmarks.zoo.sequence import SignalNetwork
from benchmarks.zoo.unet import UNet

__all__ = [
    "MobileNetV2", "MobileNetV3Small", "ResNet18", "SignalNetwork", "UNet", "ZooEntry", "build_mobilenet_v2", "build_resnet18",
    "check_alive", "initialise", "make_alive", "photographs", "residual_chain", "zoo",
]  # fmt: skip
