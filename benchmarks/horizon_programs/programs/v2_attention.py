"""2.x: attention, whose products are 8-bit between 16-bit tensors."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, PrepareMethod, QuantStub, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig_template import gemm_int8_calibration_qconfig_setter
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


set_march(March.NASH_E)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 10, 16) for _ in range(4)]
calib_model = prepare(
    copy.deepcopy(float_model),
    example_inputs=batches[0],
    qconfig_setter=gemm_int8_calibration_qconfig_setter,
    method=PrepareMethod.JIT_STRIP,
)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = calib_model
