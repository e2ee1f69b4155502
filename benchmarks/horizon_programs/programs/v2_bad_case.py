"""2.x: the analysis of a bad case gives the layers that a second calibration makes wide."""

import copy

import torch
from horizon_plugin_profiler import QuantAnalysis
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, PrepareMethod, QuantStub, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig_template import (
    default_calibration_qconfig_setter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
)
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


def calibrated(setters):
    model = prepare(copy.deepcopy(float_model), (batches[0],), setters, PrepareMethod.JIT_STRIP).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


set_march(March.NASH_M)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
analysis = QuantAnalysis(float_model, calibrated(default_calibration_qconfig_setter), "fake_quant", out_dir="./analysis")
analysis.auto_find_bad_case(batches, num_steps=3)
analysis.save_bad_case()
analysis.clean()
analysis.load_bad_case()
analysis.run()
analysis.compare_per_layer()
table = [row for row in analysis.sensitivity() if row[1] == "activation" and row[0] in ("stem_0", "deep")]
qat_model = calibrated((sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(table, topk=2), default_calibration_qconfig_setter))
