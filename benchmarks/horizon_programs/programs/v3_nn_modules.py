"""3.x: modules of the plugin: Interpolate, LayerNorm, Exp."""

import copy

import torch
from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch import set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QconfigSetter, QuantStub, get_qconfig, prepare, qint16, set_fake_quantize
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), hnn.Interpolate(scale_factor=2, mode="nearest")
        self.norm, self.exp, self.head = hnn.LayerNorm([8, 1, 1], dim=1), hnn.Exp(), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.norm(self.up(self.conv(self.quant(x))))
        return self.dequant(self.head(self.exp(-x * x)))


march = "nash-e"
set_march(march)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
qconfig_setter = QconfigSetter(get_qconfig(observer=HistogramObserver), templates=[ModuleNameTemplate({"": qint16})])
qat_model = prepare(copy.deepcopy(float_model), (batches[0],), qconfig_setter=qconfig_setter)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
