"""2.x: qconfigs by name before a ready setter, a stub among them."""

import copy

import torch
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, PrepareMethod, QuantStub, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import FixedScaleObserver, MinMaxObserver
from horizon_plugin_pytorch.quantization.qconfig import QConfig
from horizon_plugin_pytorch.quantization.qconfig_template import ModuleNameQconfigSetter, default_calibration_qconfig_setter
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
    copy.deepcopy(float_model),
    example_inputs=batches[0],
    qconfig_setter=(
        ModuleNameQconfigSetter(
            {
                "quant": QConfig(output=FakeQuantize.with_args(observer=FixedScaleObserver, dtype=qint16, scale=4 / 32768)),
                "deep": QConfig(
                    output=FakeQuantize.with_args(observer=MinMaxObserver, dtype=qint16),
                    weight=FakeQuantize.with_args(observer=MinMaxObserver, dtype=qint8, qscheme=torch.per_channel_symmetric, ch_axis=0),
                ),
            }
        ),
        default_calibration_qconfig_setter,
    ),
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
