"""1.x: a classifier with residual blocks is calibrated, trained with a scheduler, and the best epoch is kept."""

import copy

import torch
from horizon_plugin_pytorch import set_march
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_calib_8bit_fake_quant_qconfig, default_qat_8bit_fake_quant_qconfig
from torch import nn
from torch.quantization import DeQuantStub


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu, self.short_add = nn.ReLU(inplace=True), FloatFunctional()

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.short_add.add(self.bn2(self.conv2(out)), x))


class Classifier(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.layers = nn.ModuleList([Block(16) for _ in range(2)])
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, classes)

    def forward(self, x):
        x = self.stem(self.quant(x))
        for layer in self.layers:
            x = layer(x)
        return self.dequant(self.head(torch.flatten(self.pool(x), 1)))


set_march(March.BAYES_E)
torch.manual_seed(0)
float_model = Classifier()
batches = [torch.randn(8, 3, 32, 32) for _ in range(3)]
labels = [torch.randint(0, 10, (8,)) for _ in range(3)]
for batch in batches:
    float_model(batch)  # batch norms
calib_model = prepare_qat_fx(copy.deepcopy(float_model).eval(), {"": default_calib_8bit_fake_quant_qconfig})
calib_model.eval()
set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        calib_model(batch)
qat_model = prepare_qat_fx(copy.deepcopy(float_model).train(), {"": default_qat_8bit_fake_quant_qconfig})
qat_model.load_state_dict(calib_model.state_dict())
optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3, momentum=0.9, weight_decay=4e-5)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
best, state = 1e9, None
for _ in range(2):
    qat_model.train()
    set_fake_quantize(qat_model, FakeQuantState.QAT)
    for batch, label in zip(batches, labels, strict=True):
        loss = nn.functional.cross_entropy(qat_model(batch), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    qat_model.eval()
    set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
    with torch.no_grad():
        error = sum(float(nn.functional.cross_entropy(qat_model(b), t)) for b, t in zip(batches, labels, strict=True))
    if error < best:
        best, state = error, copy.deepcopy(qat_model.state_dict())
qat_model.load_state_dict(state)
quantized_model = convert_fx(qat_model)
