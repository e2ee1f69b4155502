"""Networks of programs for Horizon's plugin, as users write them for it."""

import functools

import horizon_plugin_pytorch.nn as hnn
import torch
from horizon_plugin_pytorch.nn import Interpolate
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import QuantStub, fuse_known_modules
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    """Three convolutions, the middle one with a residual; `stub` are the arguments of its QuantStub."""

    shape = (4, 3, 16, 16)

    def __init__(self, classes=4, **stub):
        super().__init__()
        self.quant, self.dequant = QuantStub(**stub), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, classes, 1)

    def features(self, x):
        x = self.stem(self.quant(x))
        return torch.relu(self.deep(x) + x)

    def forward(self, x):
        return self.dequant(self.head(self.features(x)))


class WithAuxiliaryLoss(Net):
    """`Net` with a second head, in training alone."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        x = self.features(x)
        return (self.dequant(self.head(x)), self.aux(x)) if self.training else self.dequant(self.head(x))


class Eager(nn.Module):
    """A network for eager mode: modules alone, which `fuse_model` fuses by hand."""

    shape = (4, 3, 16, 16)

    def __init__(self, **stub):
        super().__init__()
        self.quant, self.dequant = QuantStub(**stub), DeQuantStub()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.add, self.relu2 = nn.Conv2d(16, 16, 3, padding=1), FloatFunctional(), nn.ReLU()
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.relu1(self.bn1(self.conv1(self.quant(x))))
        x = self.relu2(self.add.add(self.conv2(x), x))
        return self.dequant(self.head(x))

    def fuse_model(self):
        torch.quantization.fuse_modules(self, ["conv1", "bn1", "relu1"], inplace=True, fuser_func=fuse_known_modules)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu, self.short_add = nn.ReLU(inplace=True), FloatFunctional()

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.short_add.add(self.bn2(self.conv2(out)), x))


class Classifier(nn.Module):
    """A classifier with residual blocks."""

    shape = (8, 3, 32, 32)

    def __init__(self, classes=10):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.layers = nn.ModuleList([Block(16) for _ in range(2)])
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, classes)

    def forward(self, x):
        x = self.stem(self.quant(x))
        for layer in self.layers:
            x = layer(x)
        return self.dequant(self.head(torch.flatten(self.pool(x), 1)))


class Detector(nn.Module):
    """A detector with two levels, whose heads share their layers."""

    shape = (2, 3, 32, 32)

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.c3 = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.c4 = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up, self.add = Interpolate(scale_factor=2, mode="bilinear", recompute_scale_factor=True), FloatFunctional()
        self.tower = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(16, 6, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        c3 = self.c3(self.quant(x))
        c4 = self.c4(c3)
        outs = []
        for level in (self.add.add(c3, self.up(c4)), c4):
            feat = self.tower(level)
            outs += [self.dequant(self.cls(feat)).flatten(1), self.dequant(self.reg(feat)).flatten(1)]
        return torch.cat(outs, 1)


class Gate(nn.Module):
    """A module of one's own that multiplies and adds by FloatFunctional."""

    def __init__(self):
        super().__init__()
        self.conv, self.mul, self.skip = nn.Conv2d(8, 8, 1), FloatFunctional(), FloatFunctional()

    def forward(self, x):
        return self.skip.add(self.mul.mul(x, torch.sigmoid(self.conv(x))), x)


class Gated(nn.Module):
    shape = (4, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.stem, self.gate, self.head = nn.Conv2d(3, 8, 3, padding=1), Gate(), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.dequant(self.head(self.gate(self.stem(self.quant(x)))))


class Attention(nn.Module):
    shape = (4, 10, 16)

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.q, self.k, self.v, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.quant(x)
        scores = torch.matmul(self.q(x), self.k(x).transpose(1, 2)) * 0.25
        return self.dequant(self.head(torch.matmul(scores.softmax(-1), self.v(x))))


class OfPluginModules(nn.Module):
    """A network with the plugin's Interpolate, LayerNorm and Exp."""

    shape = (4, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), hnn.Interpolate(scale_factor=2, mode="nearest")
        self.norm, self.exp, self.head = hnn.LayerNorm([8, 1, 1], dim=1), hnn.Exp(), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.norm(self.up(self.conv(self.quant(x))))
        return self.dequant(self.head(self.exp(-x * x)))


OBSERVED = functools.partial(Net, scale=None)  # the scale of the stub is observed; of Net alone it is the release's
GIVEN = functools.partial(Net, scale=1 / 128)
OBSERVED_EAGER = functools.partial(Eager, scale=None)
