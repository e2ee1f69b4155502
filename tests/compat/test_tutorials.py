"""Whole programs for torch.ao and PT2E, and the lines of the guide: each runs, or is refused by a remedy that works."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

WITHOUT = "" if importlib.util.find_spec("torchao") else "pip install torchao"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "from-torch-ao.md"
START = """
import copy, io, os, tempfile
import torch
from torch import nn
torch.manual_seed(0)
images = [torch.randn(8, 3, 12, 12) for _ in range(4)]
def error(model, quantized, batches):
    model.eval()
    with torch.no_grad():
        exact, found = (torch.cat([each(batch) for batch in batches]) for each in (model, quantized))
    return float((found - exact).square().mean() / exact.var())
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.block, self.head, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4), nn.Dropout(0.2)
    def forward(self, x):
        x = self.features(x)
        x = nn.functional.relu(x + self.block(x))
        return self.head(self.drop(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1)))
class Stubbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.bn, self.relu, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 4)
        self.add = nn.quantized.FloatFunctional()
    def forward(self, x):
        x = self.relu(self.bn(self.conv(self.quant(x))))
        x = self.add.add(x, x)
        return self.dequant(self.fc(x.mean([2, 3])))
"""

# By name: the program, the words of its refusal (empty: it runs), and the edit that its remedy asks for.
PROGRAMS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "modules in place": ("""
model = Stubbed().eval()
exact = copy.deepcopy(model)
torch.ao.quantization.fuse_modules(model, [["conv", "bn", "relu"]], inplace=True)
model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
torch.ao.quantization.prepare(model, inplace=True)
for batch in images:
    model(batch)
torch.ao.quantization.convert(model, inplace=True)
assert error(exact, model, images) < 1e-3
model.eval()
file = os.path.join(tempfile.mkdtemp(), "model.pt")
torch.jit.save(torch.jit.script(model), file)
assert torch.equal(torch.jit.load(file)(images[0][:3]), model(images[0][:3]))
""", "", ("", "")),
    "half precision, dynamic": ("""
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)
assert quantized(torch.randn(3, 8)).shape == (3, 2)
""", "leave dtype out", (", dtype=torch.float16", "")),
    "an exported program, trained": ("""
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
exported = torch.export.export(Classifier().train(), (images[0],)).module()
quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_qat=True))
prepared = prepare_qat_pt2e(exported, quantizer)
optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
for batch in images:
    move_exported_model_to_train(prepared)
    nn.functional.cross_entropy(prepared(batch), torch.arange(8) % 4).backward()
    optimizer.step(); optimizer.zero_grad()
move_exported_model_to_eval(prepared)
quantized = convert_pt2e(prepared)
move_exported_model_to_eval(quantized)
assert torch.equal(quantized(images[0]), quantized(images[0]))
assert torch.equal(quantized(images[0]), prepared(images[0]))
""", "", ("", "")),
    "weights alone": ("""
model = Classifier().eval()
try:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    quantize_(model, Int8WeightOnlyConfig())
except ModuleNotFoundError:
    raise AssertionError("the remedy is hidden")
assert model(images[0]).shape == (8, 4)
""", WITHOUT, ("from torchao.quantization import Int8WeightOnlyConfig, quantize_", "Int8WeightOnlyConfig = quantize_ = lambda *_: None")),
    "values between layers": ("""
from torch.ao.ns._numeric_suite_fx import OutputLogger, add_loggers
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
import fxquant as fxq
model = Classifier().eval()
prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (images[0],))
prepared(images[0])
quantized = convert_fx(prepared)
add_loggers("float", model, "quantized", quantized, OutputLogger)
""", "fxq.compare", ('add_loggers("float", model, "quantized", quantized, OutputLogger)', "fxq.compare(model, quantized, images)")),
    "integers of a result": ("""
from torch.ao.quantization import MinMaxObserver, QuantWrapper
observer = MinMaxObserver(dtype=torch.quint8); observer(images[0])
scale, zero_point = observer.calculate_qparams()
exact = torch.quantize_per_tensor(images[0], scale.item(), zero_point.item(), torch.quint8)
assert exact.int_repr().dtype == torch.uint8 and exact.q_scale() > 0
model = QuantWrapper(nn.Conv2d(3, 4, 3)).eval()
model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
torch.ao.quantization.prepare(model, inplace=True)(images[0])
torch.ao.quantization.convert(model, inplace=True)
import fxquant as fxq
print(model(images[0]).int_repr())
""", "fxq.inspect.record", ("model(images[0]).int_repr()", "[values.keys() for values in fxq.inspect.record(model, images[:1])]")),
    "saved and loaded": ("""
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
mapping = get_default_qconfig_mapping("x86")
model = Classifier().eval()
prepared = prepare_fx(model, mapping, (images[0],)); prepared(images[0])
torch.save(prepared.state_dict(), "prepared.pth")
again = prepare_fx(Classifier().eval(), mapping, (images[0],))
quantized = convert_fx(again); again.load_state_dict(torch.load("prepared.pth"))
assert torch.equal(quantized(images[1]), convert_fx(prepared)(images[1]))
""", "before it is converted", ("quantized = convert_fx(again); again.load_state_dict(torch.load(\"prepared.pth\"))",
                              "again.load_state_dict(torch.load(\"prepared.pth\")); quantized = convert_fx(again)")),
    "names that torch.export replaced": ("""
from torch.ao.quantization.backend_config import get_executorch_backend_config
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.ao.quantization.quantize_pt2e import convert_pt2e, prepare_pt2e
from torch.ao.quantization.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch.export import export_for_training
from torch._export import capture_pre_autograd_graph
model = Classifier().eval()
mapping = torch.ao.quantization.get_default_qconfig_mapping("qnnpack")
prepare_fx(model, mapping, (images[0],), backend_config=get_executorch_backend_config())
for exported in (export_for_training(model, (images[0],)).module(), capture_pre_autograd_graph(model, (images[0],))):
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True)).set_module_name("head", None)
    prepared = prepare_pt2e(exported, quantizer)
    for batch in images:
        prepared(batch)
    assert error(model, convert_pt2e(prepared), images) < 1e-3
""", "", ("", "")),
    "a language model, steps first": ("""
class Words(nn.Module):
    def __init__(self):
        super().__init__(); self.embed, self.lstm, self.out = nn.Embedding(20, 16), nn.LSTM(16, 24, 2), nn.Linear(24, 20)
    def forward(self, tokens, hidden):
        output, hidden = self.lstm(self.embed(tokens), hidden)
        return self.out(output), hidden
model = Words().eval()
quantized = torch.quantization.quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
hidden = (torch.zeros(2, 3, 24), torch.zeros(2, 3, 24))
for tokens in torch.randint(0, 20, (4, 5, 3)):
    output, hidden = quantized(tokens, hidden)
import fxquant as fxq
assert sum(layer.dynamic for layer in fxq.inspect.layers(quantized)) > 5
assert quantized(torch.randint(0, 20, (5, 1)), (torch.zeros(2, 1, 24), torch.zeros(2, 1, 24)))[0].shape == (5, 1, 20)
""", "", ("", "")),
}  # fmt: skip


def lines() -> list[tuple[str, str]]:
    """Return the rows of the guide's table: a line of code, and what happens."""
    table = PAGE.read_text(encoding="utf-8").split("## Line by line\n")[1].split("\n## ")[0]
    return [(code.replace("\\|", "|"), told) for code, told in re.findall(r"^\| `(.+?)` \| (.+?) \|$", table, re.MULTILINE)]


def _run(code: str, namespace: dict[str, Any]) -> str:
    """Run code; return "" if it ran, the error of fxquant, or what was raised instead."""
    from fxquant.errors import FxQuantError

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "program", "exec"), namespace)
    except FxQuantError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"raw {type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Run all programs, and then the lines of the table, in this installed process; print what each did, as JSON."""
    said: dict[str, Any] = {}
    for name, (program, _, (before, after)) in PROGRAMS.items():
        said[name] = [_run(START + each, {"__name__": name}) for each in (program, program.replace(before, after) if before else "")]
    namespace: dict[str, Any] = {"__name__": "lines"}
    exec(START, namespace)
    namespace.update(x=namespace["images"][0], model=namespace["Classifier"]().eval(), eager=namespace["Stubbed"]().eval())
    said["lines"] = [_run(code, namespace) for code, _ in lines()]
    print(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fxquant.compat.torch_ao", __file__],
        cwd=tmp_path_factory.mktemp("tutorials"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_or_says_what_to_write(name: str, said: Any) -> None:
    _, words, _ = PROGRAMS[name]
    first, followed = said[name]
    assert followed == ""
    if words:
        assert first.startswith("refused: ")
        assert words in first.split("remedy")[1]
    else:
        assert first == ""


def test_every_line_of_the_guide_does_what_it_says(said: Any) -> None:
    rows = lines()
    assert len(rows) >= 40
    for (code, told), result in zip(rows, said["lines"], strict=True):
        refused = told.startswith("refused") and (bool(WITHOUT) or not told.startswith("refused without torchao"))
        assert result.startswith("refused: ") if refused else result == "", (code, result)


if __name__ == "__main__":
    main()
