"""Eager mode: some layers wide, one in float."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert, get_default_qat_qconfig, prepare_qat, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_weight_16bit_act_fake_quant_qconfig
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
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
model = copy.deepcopy(float_model)
model.qconfig = get_default_qat_qconfig()
model.conv2.qconfig = default_qat_8bit_weight_16bit_act_fake_quant_qconfig
model.head.qconfig = None
qat_model = prepare_qat(model, example_inputs=(batches[0],))
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)

quantized_model = convert(qat_model)
