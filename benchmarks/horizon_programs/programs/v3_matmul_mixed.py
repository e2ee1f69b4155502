"""3.x: a product of two dtypes."""

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
from horizon_plugin_pytorch.quantization.qconfig_setter import MatmulDtypeTemplate, ModuleNameTemplate
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.q, self.k, self.v, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.quant(x)
        scores = torch.matmul(self.q(x), self.k(x).transpose(1, 2)) * 0.25
        return self.dequant(self.head(torch.matmul(scores.softmax(-1), self.v(x))))


march = "nash-e"
set_march(march)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 10, 16) for _ in range(4)]
qconfig_setter = QconfigSetter(
    get_qconfig(observer=HistogramObserver), templates=[ModuleNameTemplate({"": qint8}), MatmulDtypeTemplate(input_dtypes=[qint8, qint16])]
)
qat_model = prepare(copy.deepcopy(float_model), (batches[0],), qconfig_setter=qconfig_setter)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
