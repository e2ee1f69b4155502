"""The quick start for the X5 to its end: the model is compiled, priced and drawn."""

import copy

import torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantStub,
    check_model,
    compile_model,
    convert_fx,
    perf_model,
    prepare_qat_fx,
    set_fake_quantize,
    visualize_model,
)
from horizon_plugin_pytorch.quantization.qconfig import (
    default_calib_8bit_fake_quant_qconfig,
    default_calib_8bit_weight_32bit_out_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_32bit_out_fake_quant_qconfig,
)
from torch import nn
from torch.quantization import DeQuantStub


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.stem(self.quant(x))
        x = torch.relu(self.deep(x) + x)
        return self.dequant(self.head(x))


set_march(March.BAYES_E)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
calib_model = prepare_qat_fx(
    copy.deepcopy(float_model),
    {"": default_calib_8bit_fake_quant_qconfig, "module_name": {"head": default_calib_8bit_weight_32bit_out_fake_quant_qconfig}},
)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
qat_model = prepare_qat_fx(
    copy.deepcopy(float_model).train(),
    {"": default_qat_8bit_fake_quant_qconfig, "module_name": {"head": default_qat_8bit_weight_32bit_out_fake_quant_qconfig}},
)
qat_model.load_state_dict(calib_model.state_dict())
optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3)
qat_model.train()
set_fake_quantize(qat_model, FakeQuantState.QAT)
for batch in batches:
    optimizer.zero_grad()
    qat_model(batch).square().mean().backward()
    optimizer.step()
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)

quantized_model = convert_fx(qat_model)
script_model = torch.jit.trace(quantized_model.cpu(), batches[0])
assert check_model(script_model, [batches[0]]) == 0
compile_model(script_model, [batches[0]], hbm="model.hbm", input_source="ddr", opt="O3")
perf_model(script_model, [batches[0]], out_dir="perf_out", hbm="model.hbm", input_source="ddr", opt="O3", layer_details=True)
visualize_model(script_model, [batches[0]], save_path="model.svg", show=False)
