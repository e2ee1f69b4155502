"""The manual's hybrid program, compiled: chosen operators run on the processor."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, compile_model, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_calib_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.utils.quant_profiler import check_deploy_device
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
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
calib_model = prepare_qat_fx(
    copy.deepcopy(float_model), {"": default_calib_8bit_fake_quant_qconfig}, hybrid=True, hybrid_dict={"module_name": ["deep"]}
)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = calib_model

quantized_model = convert_fx(qat_model)
devices = check_deploy_device(qat_model)
assert devices["deep"] == "host", devices
compile_model(quantized_model, [batches[0]], hbm="model.hbm", input_source="ddr", opt="O2")
