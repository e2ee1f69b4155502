"""3.x for the S100: NV12 is inserted at the input of the integer module, before it is compiled."""

import torch
from hbdk4.compiler import compile, convert, load, save
from horizon_plugin_pytorch import set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QconfigSetter, QuantStub, get_qconfig, prepare, set_fake_quantize
from horizon_plugin_pytorch.quantization.hbdk4 import export, get_hbir_input_flattener, get_hbir_output_unflattener
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


march = "nash-e"
set_march(march)
torch.manual_seed(0)
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
qat_model = prepare(Net().eval(), (batches[0],), qconfig_setter=QconfigSetter(get_qconfig()))
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
qat_bc = export(qat_model, (batches[0],), name="net")
save(convert(qat_bc, march), "float_input.bc")
quantized = load("float_input.bc")
flat = quantized.functions[0](*get_hbir_input_flattener(quantized)(batches[0]))
assert torch.equal(get_hbir_output_unflattener(quantized)(flat), qat_model(batches[0]))
image = quantized[0].flatten_inputs[0].insert_transpose(permutes=[0, 3, 1, 2])
image = image.insert_image_preprocess(
    mode="yuvbt601full2rgb", divisor=255, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225], is_signed=True
)
y, uv = image.insert_image_convert("nv12")
planes = torch.randint(0, 256, (1, 16, 16, 1), dtype=torch.uint8), torch.randint(0, 256, (1, 8, 8, 2), dtype=torch.uint8)
assert quantized[0](*planes)[0].shape == (1, 4, 16, 16)
save(quantized, "quantized.bc")
compile(quantized, "model.hbm", march, opt=2, jobs=16, progress_bar=False)
