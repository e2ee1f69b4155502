"""1.x: a prepared model is trained in DistributedDataParallel, whose state is loaded into another."""

import torch
from horizon_plugin_pytorch import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_calib_8bit_fake_quant_qconfig, default_qat_8bit_fake_quant_qconfig
from torch import distributed, nn
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


set_march(March.BAYES_E)
torch.manual_seed(0)
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
calib_model = prepare_qat_fx(Net().eval(), {"": default_calib_8bit_fake_quant_qconfig})
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
trained = prepare_qat_fx(Net().train(), {"": default_qat_8bit_fake_quant_qconfig})
trained.load_state_dict(calib_model.state_dict())
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
wrapped = nn.parallel.DistributedDataParallel(trained)
set_fake_quantize(wrapped, FakeQuantState.QAT)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
for batch in batches:
    optimizer.zero_grad()
    wrapped(batch).square().mean().backward()
    optimizer.step()
torch.save({"state_dict": wrapped.state_dict()}, "epoch.pth")
distributed.destroy_process_group()

qat_model = prepare_qat_fx(Net().eval(), {"": default_qat_8bit_fake_quant_qconfig}, example_inputs=batches[0])
qat_model.load_state_dict(torch.load("epoch.pth")["state_dict"])
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
quantized_model = convert_fx(qat_model)
