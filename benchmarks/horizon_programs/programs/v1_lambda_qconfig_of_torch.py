"""A QConfig of PyTorch's with the plugin's fake quantizes, as the old algorithm toolkit wrote it."""

import copy

import torch
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantize,
    FakeQuantState,
    MovingAverageMinMaxObserver,
    QuantStub,
    convert_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from torch import nn
from torch.quantization import DeQuantStub, QConfig


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
weight = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype="qint8", qscheme=torch.per_channel_symmetric, ch_axis=0)
narrow = QConfig(activation=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver), weight=weight)
wide = QConfig(activation=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype=qint16), weight=weight)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
calib_model = prepare_qat_fx(copy.deepcopy(float_model), {"": narrow, "module_name": {"deep": wide}})
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = calib_model

quantized_model = convert_fx(qat_model)
