"""1.x: a detector with two levels, whose heads have 32-bit outputs and share their layers."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import Interpolate
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import (
    default_calib_8bit_fake_quant_qconfig,
    default_calib_8bit_weight_32bit_out_fake_quant_qconfig,
)
from torch import nn
from torch.quantization import DeQuantStub


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.c3 = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.c4 = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up, self.add = Interpolate(scale_factor=2, mode="bilinear", recompute_scale_factor=True), FloatFunctional()
        self.tower = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(16, 6, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        c3 = self.c3(self.quant(x))
        c4 = self.c4(c3)
        outs = []
        for level in (self.add.add(c3, self.up(c4)), c4):
            feat = self.tower(level)
            outs += [self.dequant(self.cls(feat)).flatten(1), self.dequant(self.reg(feat)).flatten(1)]
        return torch.cat(outs, 1)


set_march(March.BAYES_E)
torch.manual_seed(0)
float_model = Detector().eval()
batches = [torch.randn(2, 3, 32, 32) for _ in range(3)]
sums = default_calib_8bit_weight_32bit_out_fake_quant_qconfig
qat_model = prepare_qat_fx(
    copy.deepcopy(float_model), {"": default_calib_8bit_fake_quant_qconfig, "module_name": [("cls", sums), ("reg", sums)]}
)
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
quantized_model = convert_fx(qat_model)
