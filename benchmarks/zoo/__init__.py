"""Models and real data for tests and benchmarks, made from seeds: nothing is downloaded, nothing is kept on disk.

Pretrained weights are not needed to test arithmetic, but activations that are alive are: a network whose values have
collapsed to zero agrees with anything. Every model here has BatchNorm statistics taken from real images, and
`check_alive` holds it to that.
"""

from benchmarks.zoo.chain import residual_chain
from benchmarks.zoo.densenet import DenseNet
from benchmarks.zoo.efficientnet import EfficientNetB0
from benchmarks.zoo.entries import ZooEntry, build_mobilenet_v2, build_resnet18, zoo
from benchmarks.zoo.inception import Inception
from benchmarks.zoo.life import Activity, activities, check_alive, initialise, make_alive
from benchmarks.zoo.mobilenet import MobileNetV2, MobileNetV3Small
from benchmarks.zoo.photographs import clips, photographs, signals
from benchmarks.zoo.resnet import ResNet18, ResNet50
from benchmarks.zoo.sequence import SignalNetwork
from benchmarks.zoo.shufflenet import ShuffleNetV2
from benchmarks.zoo.unet import UNet
from benchmarks.zoo.volume import VolumeNetwork

__all__ = [
    "Activity",
    "DenseNet",
    "EfficientNetB0",
    "Inception",
    "MobileNetV2",
    "MobileNetV3Small",
    "ResNet18",
    "ResNet50",
    "ShuffleNetV2",
    "SignalNetwork",
    "UNet",
    "VolumeNetwork",
    "ZooEntry",
    "activities",
    "build_mobilenet_v2",
    "build_resnet18",
    "check_alive",
    "clips",
    "initialise",
    "make_alive",
    "photographs",
    "residual_chain",
    "signals",
    "zoo",
]
