"""2.x: the eager method."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import FakeQuantState, PrepareMethod, QuantStub, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
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


set_march(March.NASH_E)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
calib_model = prepare(
    copy.deepcopy(float_model), example_inputs=batches[0], qconfig_setter=default_calibration_qconfig_setter, method=PrepareMethod.EAGER
)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = calib_model
