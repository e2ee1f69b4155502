"""A float model to an ONNX file with equal bits, in twenty lines: those of README.md."""

import torch
from torch import nn

import fxquant as fxq


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.conv, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.conv(x))
        return self.head(x.mean((2, 3)))


model, batches = Net().eval(), [torch.randn(8, 3, 32, 32) for _ in range(4)]  # yours: a float model, and batches like the application's
prepared = fxq.prepare(model, batches[0], target="bayes-e")  # trace, fuse, give every operator a quantizer
fxq.calibrate(prepared, batches)  # find the scales; then train it, if you want to
integer = fxq.convert(prepared)  # a graph of integer operations
path = fxq.export_onnx(integer, "model.onnx")
print(fxq.verify(prepared, integer, batches))  # every bit, of every quantized tensor
print(fxq.verify(integer, path, batches))
