"""1.x: the tools that compare two stages, with the plugin's arguments."""

import copy
from pathlib import Path

import torch
from horizon_plugin_pytorch import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, prepare_qat_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_calib_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.quant_profiler import (
    check_qconfig,
    check_unfused_operations,
    compare_weights,
    featuremap_similarity,
    get_module_called_count,
)
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


set_march(March.BAYES_E)
torch.manual_seed(0)
float_model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
check_unfused_operations(copy.deepcopy(float_model), batches[0], print_tabulate=True)
assert get_module_called_count(copy.deepcopy(float_model), batches[0], check_leaf_module=None, print_tabulate=True)["deep"] == 1
qat_model = prepare_qat_fx(copy.deepcopy(float_model), {"": default_calib_8bit_fake_quant_qconfig})
qat_model.eval()
set_fake_quantize(qat_model, FakeQuantState.CALIBRATION)
with torch.no_grad():
    for batch in batches:
        qat_model(batch)
set_fake_quantize(qat_model, FakeQuantState.VALIDATION)
check_qat_model(qat_model, batches[0], save_results=True, out_dir="./debug")
assert Path("./debug/model_check_result.txt").read_text()
check_qconfig(qat_model, batches[0], prefixes=("stem",), out_dir="./debug")
compare_weights(float_model, qat_model, similarity_func="Cosine", with_tensorboard=False, tensorboard_dir=None, out_dir="./debug")
quantized_model = convert_fx(qat_model)
featuremap_similarity(qat_model, quantized_model, batches[0], similarity_func="L1", threshold=0.1, out_dir="./debug")
