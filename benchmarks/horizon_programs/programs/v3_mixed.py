"""3.x: a network of 8 bits whose stem returns, and whose head reads and returns 16 bits, by templates in order."""

import torch
from horizon_plugin_pytorch import set_march
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.quantization import FakeQuantState, QconfigSetter, QuantStub, get_qconfig, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.observer_v2 import MSEObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import ConvDtypeTemplate, ModuleNameTemplate
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        x = self.stem(self.quant(x))
        return self.dequant(self.head(torch.relu(self.deep(x) + x)))


set_march("nash-e")
torch.manual_seed(0)
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
setter = QconfigSetter(
    reference_qconfig=get_qconfig(observer=MSEObserver),
    templates=[
        ModuleNameTemplate({"": qint8, "stem": qint16}),
        ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8),
        ModuleNameTemplate({"head": {"dtype": {"input": qint16, "output": qint16}, "threshold": {"output": 8.0}}}),
    ],
    save_dir="./qconfig",
)
qat_model = prepare(Net().train(), (batches[0],), qconfig_setter=setter)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
qat_model.train()
set_fake_quantize(qat_model, FakeQuantState.QAT)
optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3)
for batch in batches:
    optimizer.zero_grad()
    qat_model(batch).square().mean().backward()
    optimizer.step()
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
