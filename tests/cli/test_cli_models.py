"""The commands that take a model from Python to files: their files, findings and messages of refusal."""

import argparse
import importlib
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import runtime
from fxquant.cli.photographs import PAD, Preprocessing, camera_batches, samples_of
from tests.cli.test_cli import called
from tests.shared.networks import members
from tests.shared.programs import program

NETWORKS = program("cli_models_networks")
ROWS = 24
IMAGES = torch.randn(ROWS, 2, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands run in a folder with a module of networks and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "networks.py").write_text(NETWORKS)
    (tmp_path / "broken.py").write_text("import torch\nx = 1 / 0\n")
    (tmp_path / "unwritten.py").write_text("def f(:\n")
    np.save(tmp_path / "images.npy", IMAGES.numpy())
    yield
    for name in ("networks", "broken", "unwritten"):
        sys.modules.pop(name, None)


def network_of(name: str) -> Any:
    return getattr(importlib.import_module("networks"), name)()


def files_of(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def by_hand(target: str = "bayes-e", qconfig: Any = None) -> fxq.results.Result:
    """Quantize by Python's functions with the same samples, of which the last fifth is held back."""
    batches = [{"image": rows} for rows in IMAGES[: -(ROWS // 5)].split(8)]
    return fxq.quantize(network_of("Network"), batches, target, qconfig)


def test_a_command_imports_from_the_current_folder_and_leaves_the_paths_of_imports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sys.path.remove(str(tmp_path))
    paths = list(sys.path)
    assert called(capsys, "check", "networks:Network", "--target", "bayes", "--shape", "1,2,8,8")[0] == 0
    assert sys.path == paths


# ---- quantize -----------------------------------------------------------------------------------------------------------
def test_quantize_writes_what_pythons_functions_make(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("quantize", "networks:Network", "--data", "images.npy", "--batch-size", 8, "--target", "nash-e", "--out", "out")
    status, shown, _ = called(capsys, *command)
    assert status == 0
    assert files_of("out") == ["integer.fxq", "model.onnx", "report.html", "summary.json"]
    result = by_hand("nash-e")
    assert Path("out/integer.fxq").read_bytes() == fxq.save(result.integer, "mine.fxq").read_bytes()
    held = IMAGES[-(ROWS // 5) :]
    verified = result.verify("out/model.onnx", [held])
    assert verified
    compared = result.compare([held])
    summary = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))
    assert summary["verified"] == {"equal": True, "mismatches": 0, "elements": verified.elements, "tensors": verified.tensors}
    assert summary["samples"] == {"calibrated": ROWS - ROWS // 5, "held_back": ROWS // 5}
    assert [output["sqnr_db"] for output in summary["outputs"]] == [output.sqnr for output in compared.outputs]
    assert summary["files"] == {name: Path("out", name).stat().st_size for name in files_of("out") if name != "summary.json"}
    assert (summary["target"], summary["integer_operators"]) == ("nash-e", 3)
    assert summary["findings"] == [vars(finding) for finding in fxq.check(result.prepared)]
    assert re.search(r"broken limits\s+│\s+1 ", shown)
    assert f"{compared.outputs[0].sqnr:.1f} dB" in shown
    assert re.search(r"mismatching elements\s+│\s+0 ", shown)
    assert all(name in shown for name in files_of("out"))
    assert "networks:Network" in Path("out/report.html").read_text(encoding="utf-8")


def test_quantize_reaches_an_accuracy_and_says_otherwise_what_it_would_need(capsys: pytest.CaptureFixture[str]) -> None:
    rules = fxq.save_qconfig(fxq.QConfigMapping(fxq.QConfig(fxq.ActivationConfig("int4"))), "rules.json")
    files = ("--data", "images.npy", "--qconfig", rules, "--out", "out", "--no-report")
    command = ("quantize", "networks:Network", *files, "--target", "nash-e")
    assert_refused(called(capsys, *command[:-2], "--accuracy", "30", "--target", "x86"), "x86 has no int16 activations", "option accuracy")
    assert_refused(called(capsys, *command, "--accuracy", "0"), "accuracy=0.0 is not usable")
    shown = called(capsys, *command)[1]
    assert re.search(r"--accuracy 30 would give 16 bits for \w+ \([\d.]+ dB alone\)", shown)
    assert json.loads(Path("out/summary.json").read_text(encoding="utf-8"))["widened"] is None
    assert "would give" not in called(capsys, *command, "--accuracy", "30")[1]
    widened = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))["widened"]
    assert widened["before"] < widened["goal"] == 30 <= widened["after"]
    again = fxq.inspect.layers(fxq.prepare(network_of("Network"), IMAGES[:1], "nash-e", fxq.load_qconfig("out/qconfig.json")))
    dtypes = {layer.name: layer.dtype for layer in again}
    assert {name: dtype for name, dtype in widened["dtypes"].items() if name in dtypes}.items() <= dtypes.items()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("factory", ["made", "ready", "Holder.network"])
def test_a_factory_is_a_class_a_function_or_a_module(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("quantize", f"networks:{factory}", "--data", "images.npy", "--batch-size", 8, "--out", "out", "--no-report")
    assert called(capsys, *command)[0] == 0
    assert files_of("out") == ["integer.fxq", "model.onnx", "summary.json"]
    assert Path("out/integer.fxq").read_bytes() == fxq.save(by_hand().integer, "mine.fxq").read_bytes()


def test_rules_of_a_file_are_those_of_the_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    mapping = fxq.QConfigMapping().set_module_name("conv", fxq.QConfig(output=fxq.ActivationConfig("int16"))).set_module_name("head", None)
    fxq.save_qconfig(mapping, "rules.json")
    command = ("--data", "images.npy", "--batch-size", 8, "--out", "out", "--no-report", "--qconfig", "rules.json")
    status, shown, _ = called(capsys, "quantize", "networks:Network", *command)
    assert status == 0
    assert Path("out/integer.fxq").read_bytes() == fxq.save(by_hand(qconfig=mapping).integer, "mine.fxq").read_bytes()
    findings = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))["findings"]
    assert [(result["layer"], result["kind"]) for result in findings] == [("mean", "limit"), ("head", "float")]
    assert re.search(r"operators in float\s+│\s+1 ", shown)


def test_the_form_of_the_file_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--data", "images.npy", "--out", "out", "--no-report", "--style", "exact", "--opset", 17, "--fixed-batch", 3, "--horizon")
    shown = called(capsys, "quantize", "networks:Network", *command, "--measure")[1]
    assert re.search(r"style of the ONNX file, and runtime.* exact, onnxruntime(.|\n)* speed in .* [\d.]+ × float", shown)
    metadata = fxq.export.onnx_metadata("out/model.onnx")
    assert metadata["style"] == "exact"
    assert "image f32[3,2,8,8]" in called(capsys, "inspect", "out/model.onnx")[1]
    summary = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))
    assert summary["samples"]["held_back"] == 3, "whole batches of the file"
    assert summary["speed"] > 0
    horizon = ["compile.sh", "layers.json", "model.onnx", "model.yaml"]
    assert files_of("out") == [*(f"horizon/{name}" for name in horizon), "integer.fxq", "model.onnx", "summary.json"]
    assert Path("out/horizon/compile.sh").stat().st_mode & 0o111 == 0o111


def test_the_runtime_of_the_file_is_chosen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime stands in for TVM."""
    monkeypatch.setitem(runtime.OTHER_RUNTIMES, "tvm", lambda model: runtime.Runner(model, *runtime.RUNTIMES[0][1:])._run)
    command = ("quantize", "networks:Network", "--data", "images.npy", "--out", "out", "--no-report", "--without-vnni")
    for name, style, target in (("onnxruntime", "fast", "bayes-e"), ("tvm", "exact", "x86"), ("onnxruntime", "fast", "x86")):
        assert called(capsys, *command, "--target", target, "--runtime", name)[0] == 0
        summary = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))
        assert (summary["runtime"], summary["style"], summary["speed"]) == (name, style, None)
    assert summary["without_vnni"] == "none"
    assert "(integer = tvm)" in called(capsys, "verify", "out/integer.fxq", "out/model.onnx", "--runtime", "tvm")[1]


@pytest.mark.parametrize("sizes", [["image:2=height:5:32,3=width"], []])
def test_one_file_runs_at_the_sizes_that_vary(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ("quantize", "networks:Network", "--data", "images.npy", "--out", "out", "--no-report", "--dynamic", *sizes)
    assert called(capsys, *command)[0] == 0
    integer, session = fxq.load("out/integer.fxq"), onnxruntime.InferenceSession("out/model.onnx")
    for height, width in ((8, 8), (32, 9)):
        image = torch.randn(3, 2, height, width)
        assert torch.equal(integer(image), torch.from_numpy(session.run(None, {"image": image.numpy()})[0]))
    if sizes:
        assert "image f32[B,2,8≤32,8≤512]" in called(capsys, "inspect", "out/integer.fxq")[1]
    wide = ("--shape", "1,2,8,8", "--dynamic", "image:2=height:5:1024,3=width:5:1024")
    assert "declare smaller sizes" in called(capsys, "check", "networks:Network", "--target", "x86", *wide)[1]


def test_a_file_that_differs_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    export = fxq.results.Result.export

    def other(self: fxq.results.Result, path: Any, **options: Any) -> Path:
        fxq.set_qparams(self.prepared, {"conv": 1.0})
        return export(fxq.results.Result(self.float, self.prepared, fxq.convert(self.prepared)), path, **options)

    monkeypatch.setattr(fxq.results.Result, "export", other)
    status, shown, _ = called(capsys, "quantize", "networks:Network", "--data", "images.npy", "--out", "out", "--no-report")
    assert status == 1
    assert "NOT equal" in shown
    verified = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))["verified"]
    assert not verified["equal"]
    assert verified["mismatches"] > 0


# ---- check --------------------------------------------------------------------------------------------------------------
def test_check_lists_what_is_broken_with_line_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "check", "networks:Network", "--target", "bernoulli2", "--shape", "1,2,13,13")
    assert status == 1
    findings = fxq.check(network_of("Network").eval(), torch.randn(1, 2, 13, 13), "bernoulli2")
    assert len(findings) >= 1
    assert shown == f"{findings}\n"
    assert "networks.py:14 in forward:  return self.head(" in shown
    assert called(capsys, "check", "networks:Network", "--target", "bernoulli2", "--data", "images.npy")[0] == 0


# ---- photographs and hubs -----------------------------------------------------------------------------------------------
def write_photographs() -> None:
    generator = np.random.default_rng(0)
    for number in range(10):
        Path(f"photos/{number % 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9 + number, 20 - number, 3), np.uint8)).save(f"photos/{number % 3}/{number}.png")


def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package in timm's place, with its functions and one model."""
    stand_in = types.ModuleType("timm")
    normalized = Preprocessing((8, 8), 0, (0.0,) * 3, (1.0,) * 3, False)
    stand_in.create_model = lambda name, pretrained, width: nn.Conv2d(3, {"tiny": width}[name], 3) if pretrained else None  # type: ignore[attr-defined]
    stand_in.data = types.SimpleNamespace(  # type: ignore[attr-defined]
        resolve_model_data_config=lambda model: {"channels": model.in_channels},
        create_transform=lambda channels, is_training: normalized if (channels, is_training) == (3, False) else None,
    )
    monkeypatch.setitem(sys.modules, "timm", stand_in)


def test_photographs_become_samples_as_the_options_say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_photographs()
    hub(monkeypatch)
    stated = {"size": (6, 8), "resize": 8, "mean": (0.5,) * 3, "std": (0.25, 0.5, 1), "bgr": True}
    photographs = {f"photo_{name}": value for name, value in stated.items()}
    options = argparse.Namespace(model="networks:Network", data=Path("photos"), images=None, **photographs)
    samples = samples_of(options, network_of("Network"))["image"]
    with Image.open(sorted(Path("photos").rglob("*.png"))[0]) as image:  # 9 high and 20 wide: 6 × 8 fits in 6 high, and so in 8
        pixels = torch.tensor(np.asarray(image.resize((18, 8), 2).crop((5, 1, 13, 7)))).permute(2, 0, 1).flip(0) / 255
    wanted = (pixels - 0.5) / torch.tensor([0.25, 0.5, 1])[:, None, None]
    assert samples.shape == (10, 3, 6, 8)
    assert sum(torch.equal(sample, wanted) for sample in samples) == 1
    monkeypatch.setattr("fxquant.cli.quantizing.find_spec", lambda name: None)  # plotly is not installed
    shown = called(capsys, "quantize", "timm:tiny?width=4", "--data", "photos", "--out", "out")[1]
    assert "no report.html is written: it needs plotly" in shown
    assert files_of("out") == ["integer.fxq", "model.onnx", "summary.json"]
    assert "10 of 10 photographs in photos: RGB, resized to 8 × 8" in shown
    assert called(capsys, "check", "timm:tiny?width=4", "--data", "photos", "--size", "6,8", "--bgr")[0] == 0


@members(lambda: dict(stem=nn.Conv2d(3, 4, 3, 2, 1), boxes=nn.Conv2d(4, 8, 1), classes=nn.Conv2d(4, 2, 1)))
def Detector(self, image: torch.Tensor) -> torch.Tensor:
    """A head of one stride, and its decoding: the mean of a softmax of distances, and a sigmoid."""
    x = torch.relu(self.stem(image))
    distances = F.conv2d(self.boxes(x).view(1, 2, 4, 16).transpose(2, 1).softmax(1), torch.arange(4.0).view(1, 4, 1, 1))
    return torch.cat([distances.view(1, 2, 16), self.classes(x).flatten(2).sigmoid()], 1)


def test_a_detectors_file_and_a_folder_of_pictures_become_a_model_of_a_camera(capsys: pytest.CaptureFixture[str]) -> None:
    write_photographs()
    torch.manual_seed(0)
    torch.onnx.export(Detector().eval(), (torch.rand(1, 3, 8, 8),), "yolo.onnx", dynamo=False, opset_version=17)
    one, usual = "photos/1/1.png", ("quantize", "yolo.onnx", "--mean", 0, "--std", 1, "--no-report")
    status, shown, _ = called(capsys, *usual, "--cut", "--images", "photos", one, "--resize", "pad")
    assert status == 0
    assert shown.startswith("output 0: /boxes/Conv\noutput 1: /classes/Conv\n11 of 11 photographs in photos: RGB, with gray margins 8 × 8")
    padded = Preprocessing((8, 8), PAD, (0.0,) * 3, (1.0,) * 3, False)(Image.new("RGB", (20, 10)))
    assert torch.equal(padded[0, :, 0] * 255, torch.tensor([114.0, 114, 0, 0, 0, 0, 114, 114]))
    fxq.save(fxq.board.with_camera(fxq.load("quantized/integer.fxq"), std=(255,) * 3), "camera.fxq")
    assert called(capsys, "export", "camera.fxq", "--onnx", "camera.onnx")[0] == 0
    status, shown, _ = called(capsys, "verify", "camera.fxq", "camera.onnx", "--images", one, "photos/2")
    assert (status, "4 of 4 photographs in photos" in shown) == (0, True)
    for swing in ("rgb", "bgr"):
        colours = fxq.board.with_camera(fxq.load("quantized/integer.fxq"), std=(255,) * 3, swing=swing)
        options = argparse.Namespace(images=[Path(one)], data=None, batch_size=1)
        (image,) = camera_batches(options, fxq.load(fxq.save(colours, f"{swing}.fxq")))
        pixels = Preprocessing((8, 8), 0, (128 / 255,) * 3, (1 / 255,) * 3, swing == "bgr")(Image.open(one).convert("RGB"))
        assert torch.equal(image[0], pixels.round())
    capsys.readouterr()
    assert_refused(called(capsys, "verify", "quantized/integer.fxq", "camera.onnx", "--images", one), "--images mean nothing to this model")
    assert_refused(
        called(capsys, *usual, "--cut", "/stem", "--images", one), "there is no such node in it: /stem", "/boxes/Conv, /classes/Conv"
    )
    assert_refused(called(capsys, "quantize", "networks:Network", "--cut", "--images", one), "--cut means nothing here")


def test_photographs_that_cannot_be_samples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_photographs()
    hub(monkeypatch)
    Path("broken").mkdir()
    Path("broken/1.jpg").write_bytes(b"not an image")
    cases = {
        ("networks:Network", "--data", "photos"): "--size is needed",
        ("networks:Network", "--data", "photos", "--size", 8, "--resize", 4): "--resize is too small",
        ("networks:Network", "--data", "images.npy", "--size", 8): "--size means nothing here",
        ("networks:Network", "--data", "broken", "--size", 8): "broken/1.jpg cannot be read as an image",
        ("networks:Two", "--data", "photos", "--size", 8): "forward takes image, mask",
        ("networks:sized?width", "--data", "images.npy"): "'width' is not key=value",
        ("timm:absent?width=4", "--data", "photos"): "timm:absent cannot be loaded",
        ("torchvision:resnet18", "--data", "photos"): "pip install torchvision",
    }
    for command, said in cases.items():
        assert_refused(called(capsys, "quantize", *command, "--out", "out", "--no-report"), said)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert_refused(called(capsys, "quantize", "timm:tiny?width=4", "--data", "photos", "--out", "out"), "Pillow is not installed")


# ---- errors -------------------------------------------------------------------------------------------------------------
FACTORIES = {
    "networks": "does not name a model", "networks:": "does not name a model", "networks.py:Network": "networks.py cannot be imported",
    "net works:Network": "does not name a model", "absent:Network": "No module named 'absent'", "broken:f": "ZeroDivisionError",
    "unwritten:f": "SyntaxError", "networks:Netwerk": "did you mean 'Network'?", "networks:raising": "weights.pt is not there",
    "networks:leaving": "SystemExit: 4", "networks:number": "it returns a int", "networks:sized": "it requires width",
    "networks:figure": "it is a int",
}  # fmt: skip
LINES = {"broken:f": "broken.py:2", "unwritten:f": "unwritten.py:1", "networks:raising": "networks.py:32 in raising:  raise OSError("}


def assert_refused(outcome: tuple[int, str, str], *parts: str) -> None:
    status, shown, error = outcome
    assert (status, shown) == (2, "")
    assert error.startswith("fxquant: ")
    assert "  because  " in error
    assert "  remedy   " in error
    assert "Traceback" not in error
    assert all(part in error for part in parts), error
    assert not Path("out").exists()


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_that_gives_no_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = (FACTORIES[name], LINES.get(name, ""))
    assert_refused(called(capsys, "quantize", name, "--data", "images.npy", "--out", "out", "--no-report"), *said)
    sys.modules.pop(name.partition(":")[0], None)
    assert_refused(called(capsys, "check", name, "--shape", "1,2,8,8"), *said)


def test_data_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    image = IMAGES.numpy()
    np.savez("missing.npz", image=image, other=image)
    np.savez("uneven.npz", image=image, mask=np.zeros((5, 4, 6, 6), np.float32))
    np.save("wide.npy", image.astype(np.float64))
    np.save("channels.npy", np.zeros((ROWS, 3, 8, 8), np.float32))
    np.save("scalar.npy", np.float32(1))
    np.save("single.npy", image[:1])
    np.save("nan.npy", np.full_like(image, np.nan))
    cases = {
        ("Two", "missing.npz"): "has no array for mask", ("Two", "uneven.npz"): "24 of image, 5 of mask",
        ("Two", "images.npy"): "has no array for image, mask", ("Network", "wide.npy"): "is float64, NumPy's default",
        ("Network", "channels.npy"): "networks.py:14 in forward", ("Network", "scalar.npy"): "does not hold samples",
        ("Network", "single.npy"): "holds too few samples", ("Network", "nan.npy"): "NaN", ("Network", "absent.npy"): "No such file",
        ("Network", "networks.py"): "data is read from .npy",
    }  # fmt: skip
    for (network, data), said in cases.items():
        assert_refused(called(capsys, "quantize", f"networks:{network}", "--data", data, "--out", "out", "--no-report"), said)


DYNAMIC = {
    "picture:2=height": "the inputs are image", "image": "'' is not DIMENSION=NAME", "image:0=rows": "dimension 0 is the batch",
    "image:2=height:8": "'2=height:8' is not", "image:2=height:9:8": "height goes from 9 to 8",
}  # fmt: skip


def test_other_arguments_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    usual = ("quantize", "networks:Network", "--data", "images.npy", "--no-report")
    Path("file").write_text("kept")
    Path("rules.json").write_text('{"format": "fxquant qconfig", "version": 1, "names": {"conv": {"output": {"dtype": "int9"}}}}')
    Path("keys.json").write_text('{"format": "fxquant qconfig", "version": 1, "names": {"conv": {"outputs": {}}}}')
    assert_refused(called(capsys, *usual, "--out", "out", "--target", "bayes-f"), "the target 'bayes-f' is not known", "bayes-e")
    assert_refused(called(capsys, *usual, "--out", "file"), "is a file")
    assert_refused(called(capsys, *usual, "--out", "file/below"), "is a file")
    assert_refused(called(capsys, *usual, "--out", ""), "--out")
    assert_refused(called(capsys, *usual, "--out", "/proc/none/out"), "cannot be written")
    assert_refused(called(capsys, *usual, "--out", "out", "--qconfig", "rules.json"), "conv, output", "int9", "int16")
    assert_refused(called(capsys, *usual, "--out", "out", "--qconfig", "keys.json"), "'outputs' is unknown", "output, weight, input")
    assert_refused(called(capsys, *usual, "--out", "out", "--qconfig", "absent.json"), "absent.json")
    assert_refused(called(capsys, *usual, "--out", "out", "--opset", 3), "opset")
    early = ("quantize", "absent:Network", "--data", "absent.npy", "--horizon", "--target", "x86")
    assert_refused(called(capsys, *early), "an integer model of x86")
    assert_refused(called(capsys, *usual, "--out", "out", "--fixed-batch", 24), "holds too few samples")
    assert_refused(called(capsys, "check", "networks:Two", "--shape", "1,2,8,8"), "mask")
    assert_refused(called(capsys, "check", "networks:Network", "--shape", "1,2,8,8", "--target", "bayes-f"), "bayes-f")
    assert_refused(called(capsys, *usual, "--out", "out", "--dynamic", "--horizon"), "files of one size", "leave out one")
    for sizes, said in DYNAMIC.items():
        assert_refused(called(capsys, *usual, "--out", "out", "--dynamic", sizes), f"--dynamic {sizes}", said, "2=height:32:512")
    assert Path("file").read_text() == "kept"


@pytest.mark.parametrize("name", ["model.onnx", "integer.fxq", "summary.json"])
def test_a_file_that_cannot_be_replaced_is_found_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quantize(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was quantized before the error")

    monkeypatch.setattr(fxq, "quantize", quantize)
    (Path("results") / name).mkdir(parents=True)
    command = ("quantize", "networks:Network", "--data", "images.npy", "--out", "results", "--no-report")
    assert_refused(called(capsys, *command), f"{name} cannot be written", "Is a directory")


def test_ctrl_c_leaves_no_folder_and_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fxq.results.Result, "compare", interrupt)
    command = ("quantize", "networks:Network", "--data", "images.npy", "--out", "out", "--no-report")
    assert called(capsys, *command) == (130, "", "fxquant: interrupted\n")
    assert not Path("out").exists()
