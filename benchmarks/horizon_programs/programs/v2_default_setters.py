"""2.x: ready setters for calibration and training."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, PrepareMethod, QuantStub, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter, default_qat_qconfig_setter
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


set_march(March.NASH_E)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
calib_model = prepare(
    copy.deepcopy(float_model), example_inputs=batches[0], qconfig_setter=default_calibration_qconfig_setter, method=PrepareMethod.JIT_STRIP
)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = prepare(
    copy.deepcopy(float_model).train(), example_inputs=batches[0], qconfig_setter=default_qat_qconfig_setter, method=PrepareMethod.JIT_STRIP
)
qat_model.load_state_dict(calib_model.state_dict())
optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3)
qat_model.train()
set_fake_quantize(qat_model, FakeQuantState.QAT)
for batch in batches:
    optimizer.zero_grad()
    qat_model(batch).square().mean().backward()
    optimizer.step()
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
