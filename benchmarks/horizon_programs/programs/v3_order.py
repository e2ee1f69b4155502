"""3.x: a name after the templates keeps the weights that they chose."""

import copy

import torch
from horizon_plugin_pytorch import set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QconfigSetter,
    QuantStub,
    get_qconfig,
    prepare,
    qint8,
    qint16,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import ConvDtypeTemplate, ModuleNameTemplate
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.stem(self.quant(x))
        x = torch.relu(self.deep(x) + x)
        return self.dequant(self.head(x))


march = "nash-m"
set_march(march)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
qconfig_setter = QconfigSetter(
    get_qconfig(observer=HistogramObserver),
    templates=[
        ModuleNameTemplate({"": qint8}),
        ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint16),
        ModuleNameTemplate({"deep": qint16}),
    ],
)
qat_model = prepare(copy.deepcopy(float_model), (batches[0],), qconfig_setter=qconfig_setter)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
