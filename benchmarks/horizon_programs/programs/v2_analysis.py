"""2.x: QuantAnalysis from the bad case to the sensitive operators, and scales set anew."""

import copy

import torch
from horizon_plugin_profiler import QuantAnalysis
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, PrepareMethod, QuantStub, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
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
qat_model = calib_model
analysis = QuantAnalysis(float_model, calib_model, "fake_quant", out_dir="analysis")
analysis.auto_find_bad_case(batches)
analysis.run()
analysis.compare_per_layer()
table = analysis.sensitivity()
assert table[0][1] in ("activation", "weight")
HistogramObserver.reset_scale(calib_model, method="percentile", method_kwargs={"percentile": 0.9999})
