"""A qconfig by observers and their settings."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantStub,
    convert_fx,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.stem(self.quant(x))
        x = torch.relu(self.deep(x) + x)
        return self.dequant(self.head(x))


set_march(March.BAYES)
qconfig = get_default_qconfig(
    activation_fake_quant="fake_quant",
    weight_fake_quant="fake_quant",
    activation_observer="percentile",
    weight_observer="min_max",
    activation_qkwargs={"percentile": 99.99, "dtype": "qint16"},
    weight_qkwargs={"qscheme": torch.per_channel_symmetric, "ch_axis": 0},
)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
calib_model = prepare_qat_fx(copy.deepcopy(float_model), {"": qconfig})
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = calib_model

quantized_model = convert_fx(qat_model)
