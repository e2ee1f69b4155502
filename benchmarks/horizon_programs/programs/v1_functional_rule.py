"""1.x: a module of one's own adds by FloatFunctional, and a rule for its name gives the sum 16 bits."""

import torch
from horizon_plugin_pytorch import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import get_default_qconfig
from torch import nn
from torch.quantization import DeQuantStub


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mul, self.skip = nn.Conv2d(8, 8, 1), FloatFunctional(), FloatFunctional()

    def forward(self, x):
        return self.skip.add(self.mul.mul(x, torch.sigmoid(self.conv(x))), x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=None), DeQuantStub()
        self.stem, self.gate, self.head = nn.Conv2d(3, 8, 3, padding=1), Gate(), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.dequant(self.head(self.gate(self.stem(self.quant(x)))))


set_march(March.BAYES_E)
torch.manual_seed(0)
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
narrow = get_default_qconfig(activation_qkwargs={"observer": "mse"})
wide = get_default_qconfig(activation_qkwargs={"observer": "mse", "dtype": "qint16"})
qat_model = prepare_qat_fx(Net().eval(), {"": narrow, "module_name": {"gate.skip": wide}})
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
quantized_model = convert_fx(qat_model)
