"""Eager mode: fused by hand, qconfigs as attributes."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert, get_default_qat_qconfig, prepare_qat, set_fake_quantize
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.add, self.relu2 = nn.Conv2d(16, 16, 3, padding=1), FloatFunctional(), nn.ReLU()
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.relu1(self.bn1(self.conv1(self.quant(x))))
        x = self.relu2(self.add.add(self.conv2(x), x))
        return self.dequant(self.head(x))

    def fuse_model(self):
        from horizon_plugin_pytorch.quantization import fuse_known_modules

        torch.quantization.fuse_modules(self, ["conv1", "bn1", "relu1"], inplace=True, fuser_func=fuse_known_modules)


set_march(March.BAYES)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
float_model.fuse_model()
float_model.qconfig = get_default_qat_qconfig()
qat_model = prepare_qat(copy.deepcopy(float_model))
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)

optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3)
qat_model.train()
set_fake_quantize(qat_model, FakeQuantState.QAT)
for batch in batches:
    optimizer.zero_grad()
    qat_model(batch).square().mean().backward()
    optimizer.step()
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)

quantized_model = convert(qat_model)
