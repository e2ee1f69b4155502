"""1.x: the checkpoint of a network with ten classes starts the training of one with four."""

import torch
from horizon_plugin_pytorch import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_calib_8bit_fake_quant_qconfig, default_qat_8bit_fake_quant_qconfig
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


def calibrated(model):
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


set_march(March.BAYES)
torch.manual_seed(0)
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
large = calibrated(prepare_qat_fx(Net(classes=10).eval(), {"": default_calib_8bit_fake_quant_qconfig}))
torch.save(large.state_dict(), "large.pth")
qat_model = prepare_qat_fx(Net().train(), {"": default_qat_8bit_fake_quant_qconfig}, example_inputs=batches[0])
missing, unexpected = qat_model.load_state_dict(torch.load("large.pth"), strict=False)
assert {"head.weight", "head.bias"} <= set(missing)
calibrated(qat_model)
qat_model.train()
set_fake_quantize(qat_model, FakeQuantState.QAT)
optimizer = torch.optim.AdamW(qat_model.parameters(), lr=1e-4)
for batch in batches:
    optimizer.zero_grad()
    qat_model(batch).square().mean().backward()
    optimizer.step()
torch.save({"model": qat_model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pth")

resumed = torch.load("last.pth")
qat_model = prepare_qat_fx(Net().train(), {"": default_qat_8bit_fake_quant_qconfig}, example_inputs=batches[0])
qat_model.load_state_dict(resumed["model"])
optimizer = torch.optim.AdamW(qat_model.parameters(), lr=1e-4)
optimizer.load_state_dict(resumed["optimizer"])
set_fake_quantize(qat_model, FakeQuantState.QAT)
qat_model(batches[0]).square().mean().backward()
optimizer.step()
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
quantized_model = convert_fx(qat_model)
