"""A user's own model on a board: stand-ins for the runtimes return what the integer model computes, or something else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.analysis.sample import random_batches
from fxquant.backends.horizon.export import nv12_of
from fxquant.cli import main
from fxquant.conformance.manifest import Array, packed, read_arrays
from tests.shared.networks import members
from tests.shared.programs import program

# Samples come in order: the stand-ins return the rows of answers.npz one after another, and keep what they are given.
ANSWERS = program("board_kit_answers")
HOBOT = """
class Model:
    def forward(self, given):
        return [SimpleNamespace(name=name, buffer=value) for name, value in computed(given if isinstance(given, list) else [given]).items()]
def load(path):
    assert path.endswith("model.bin")
    return [Model()]
"""
INFER = program("board_kit_infer")
HBM = """
class HB_HBMRuntime:
    def __init__(self, path):
        self.model_names, self.input_names = ["m"], {"m": ["first", "second"]}
    def run(self, given):
        ((name, inputs),) = given.items()
        assert list(inputs) == self.input_names["m"][: len(inputs)]
        return {name: dict(reversed(computed(list(inputs.values())).items()))}
"""
RUNTIMES = {"hobot_dnn": ("__init__.py", HOBOT), "bpu_infer_lib": ("bpu_infer_lib.py", INFER), "hbm_runtime": ("hbm_runtime.py", HBM)}


@members(lambda: dict(a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1)))
def Two(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Two images, two maps: one for each channel's own scale."""
    y = torch.relu(self.a(image)) * mask
    return y, self.b(y)


def two(**options: Any) -> tuple[fx.GraphModule, list[Tensor], Any]:
    torch.manual_seed(0)
    batch = [torch.randn(3, 3, 8, 8), torch.rand(3, 1, 6, 6)]
    mapping = fxq.QConfigMapping().set_module_name("b", fxq.QConfig(fxq.ActivationConfig("int32")))
    result = fxq.quantize(Two().eval(), [batch], "bayes-e", mapping)
    return result.integer, batch, {"output_names": ["y", "z"], "options": fxq.board.HorizonOptions(**options)}


def program_of(integer: fx.GraphModule, folder: Path, **arguments: Any) -> Path:
    """Export the folder for the vendor's compiler, write a stand-in for the compiled program, and return the program's path."""
    exported = fxq.board.export_horizon(integer, folder, **arguments)
    (exported / "model_output").mkdir()
    (exported / "model_output" / "model.bin").write_bytes(b"a program")
    return exported / "model_output" / "model.bin"


def install(kit: Path, runtime: str, answers: dict[str, Array]) -> None:
    """Put a stand-in for a runtime next to the kit's script."""
    file, text = RUNTIMES[runtime]
    place = kit / "hobot_dnn" / "pyeasy_dnn" / file if file == "__init__.py" else kit / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(ANSWERS + text, encoding="utf-8")
    (place.parent / "answers.npz").write_bytes(packed(answers))


def run(kit: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "run.py", *options], cwd=kit, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("options", [{}, {"outputs": "integer"}, {"layout": "NHWC"}, {"outputs": "integer", "layout": "NHWC"}])
def test_a_board_that_computes_the_integer_model_is_equal(options: dict[str, str], runtime: str, tmp_path: Path) -> None:
    integer, batch, names = two(**options)
    kit = fxq.board.board_kit(tmp_path / "kit", integer, program_of(integer, tmp_path / "net", **names), [batch])
    assert sorted(path.name for path in kit.iterdir()) == ["expected.npz", "inputs.npz", "model.bin", "programs.json", "run.py"]
    answers = dict(zip(("y", "z"), integer(*batch), strict=True))
    if "outputs" in options:
        recorded = next(fxq.inspect.record(integer, [batch], ["quantized", "accumulators"]))
        answers = {"y": recorded["mul"].to(torch.int8), "z": recorded["b"].to(torch.int32)}
    shown = {name: value.permute(0, 2, 3, 1) if "layout" in options else value for name, value in answers.items()}
    install(kit, runtime, {name: value.numpy() for name, value in shown.items()})
    done = run(kit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "y: 0 of 432 integers differ\n  z: 0 of 216 integers differ\n  equal\n" in done.stdout
    assert eval((kit / "given.txt").read_text()) == [[("float32", (1, 3, 8, 8)), ("float32", (1, 1, 6, 6))]] * 3
    results = read_arrays(kit / "results" / "model.npz")
    assert {name: value.shape for name, value in results.items()} == {name: tuple(value.shape) for name, value in shown.items()}


def test_the_first_integer_that_differs_is_named(tmp_path: Path) -> None:
    integer, batch, names = two()
    kit = fxq.board.board_kit(tmp_path / "kit", integer, program_of(integer, tmp_path / "net", **names), [batch])
    y, z = (value.numpy().copy() for value in integer(*batch))
    step = read_arrays(kit / "expected.npz")["z/step"].reshape(-1)
    z[1, 1, 2, 3] += 2 * step[-1]
    z[2, 0, 0, 0] += 0.4 * step[0]
    install(kit, "hobot_dnn", {"y": y, "z": z})
    done = run(kit)
    assert done.returncode == 1
    wanted = read_arrays(kit / "expected.npz")["z"][1, 1, 2, 3]
    assert "y: 0 of 432 integers differ\n  z: 2 of 216 integers differ\n" in done.stdout
    assert f"z is the first that differs: at (1, 1, 2, 3) it is {wanted + 2}, and {wanted} is expected" in done.stdout


def test_other_inputs_are_compared_with_what_is_given(tmp_path: Path) -> None:
    integer, batch, names = two()
    program = program_of(integer, tmp_path / "net", **names)
    kit = fxq.board.board_kit(tmp_path / "kit", integer, program, [batch])
    other = fxq.board.board_kit(tmp_path / "other", integer, program, [[-batch[0][:2], batch[1][:2]]])
    answers = dict(zip(("y", "z"), (value.numpy() for value in integer(-batch[0][:2], batch[1][:2])), strict=True))
    install(kit, "bpu_infer_lib", answers)
    done = run(kit, "--inputs", str(other / "inputs.npz"), "--expected", str(other / "expected.npz"), "--results", "out")
    assert (done.returncode, done.stdout.count("  equal\n")) == (0, 1), done.stderr
    done = run(kit, "--inputs", str(other / "inputs.npz"))  # nothing to compare with
    assert (done.returncode, "differ" in done.stdout) == (0, False)
    (kit / "few.npz").write_bytes(packed({"image": batch[0].numpy()}))
    assert "failed: 'mask is not a file in the archive'" in run(kit, "--inputs", "few.npz").stderr
    assert "give --inputs FILE.npz" in run(kit, "--images", "a.png").stderr
    install(kit, "bpu_infer_lib", {"y": answers["y"]})
    assert "failed: it has 1 outputs, and 2 are expected" in run(kit).stderr


CV2 = """
import numpy as np
def imread(path):
    return np.load(path)[..., ::-1] if path.endswith(".npy") else None
def resize(image, size):
    return image[: size[1], : size[0]]
"""


@pytest.mark.parametrize("camera", ["nv12", "yuv444"])
def test_a_program_that_reads_a_camera_is_given_its_bytes(camera: str, tmp_path: Path) -> None:
    pictures = torch.randint(0, 256, (2, 3, 8, 12), dtype=torch.uint8)
    model, planes = nn.Conv2d(3, 4, 3).eval(), fxq.nn.rgb_to_nv12(pictures)
    yuv = fxq.nn.Nv12ToYuv444(centred=True)(*planes)
    integer = fxq.board.with_camera(fxq.quantize(model, [pictures.float()], "bayes-e").integer)
    kit = fxq.board.board_kit(tmp_path / "kit", integer, program_of(integer, tmp_path / "net", camera=camera, output_names=["y"]), [yuv])
    install(kit, "hobot_dnn", {"y": integer(yuv).numpy()})
    assert run(kit).returncode == 0
    inputs = read_arrays(kit / "inputs.npz")
    bytes_of = {
        "nv12": torch.cat([planes[0][..., 0], planes[1].reshape(2, 4, 12)], 1),
        "yuv444": (yuv + 128).permute(0, 2, 3, 1).to(torch.uint8),
    }
    (name,) = inputs
    assert np.array_equal(inputs[name], bytes_of[camera].numpy())
    shape = (1, 12, 12) if camera == "nv12" else (1, 8, 12, 3)
    assert eval((kit / "given.txt").read_text()) == [[("uint8", shape)]] * 2
    (kit / "cv2.py").write_text(CV2, encoding="utf-8")
    for index, image in enumerate(pictures):
        np.save(kit / f"{index}.npy", image.permute(1, 2, 0).numpy())
    done = run(kit, "--images", "0.npy", "1.npy", "--expected", "expected.npz")
    if camera == "nv12":
        assert (done.returncode, done.stdout.count("  equal\n")) == (0, 1), done.stderr
        assert "none.png is not a picture that cv2 reads" in run(kit, "--images", "none.png").stderr
    else:
        assert "does not take NV12" in done.stderr


def test_an_output_in_float_is_shown_and_not_compared(tmp_path: Path) -> None:
    model, batch = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh()).eval(), torch.randn(2, 3, 4, 4)
    mapping = fxq.QConfigMapping().set_object_type(nn.Tanh, None)
    integer = fxq.quantize(model, [batch], "bayes-e", mapping).integer
    kit = fxq.board.board_kit(tmp_path / "kit", integer, program_of(integer, tmp_path / "net", output_names=["y"]), [batch])
    install(kit, "hobot_dnn", {"y": integer(batch).numpy() + np.float32(0.25)})
    done = run(kit)
    assert (done.returncode, "y: computed in float, at most 0.25 off" in done.stdout) == (0, True), done.stdout + done.stderr


def test_another_program_is_refused(tmp_path: Path) -> None:
    integer, batch, names = two()
    program = program_of(integer, tmp_path / "net", **names)
    other = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), batch[:1], "bayes-e").integer
    for model, path in ((other, program), (integer, tmp_path / "none.bin"), (integer, tmp_path / "net" / "model.onnx")):
        with pytest.raises(fxq.errors.ConfigurationError, match="is not the program of this model"):
            fxq.board.board_kit(tmp_path / "kit", model, path, [batch])
    with pytest.raises(fxq.errors.ConfigurationError, match="there is nothing to run"):
        fxq.board.board_kit(tmp_path / "kit", integer, program, [])
    assert not (tmp_path / "kit").exists()


def compiled(folder: Path, **options: Any) -> Path:
    """A stand-in for the compiler."""
    (folder / "model_output").mkdir()
    (folder / "model_output" / "model.bin").write_bytes(b"a program")
    return folder / "model_output" / "model.bin"


def test_the_command_line_has_the_options_and_writes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fxq.board, "compile_horizon", compiled)
    monkeypatch.chdir(tmp_path)
    images = torch.randn(2, 3, 8, 12)
    integer = fxq.quantize(nn.Conv2d(3, 4, 3).eval(), [images], "bayes-e").integer
    fxq.save(integer, "model.fxq")
    yuv = fxq.nn.Nv12ToYuv444(centred=True)(*fxq.nn.rgb_to_nv12(torch.randint(0, 256, (2, 3, 8, 12), dtype=torch.uint8)))
    np.savez("yuv.npz", yuv.numpy())
    colours = ("--camera", "nv12", "--train-type", "bgr", "--mean", "123.7", "116.3", "103.5", "--std", "58.4", "57.1", "57.4")
    fields = ("--option", "debug", "False", "--option", "outputs", "integer", "--option", "layout", "NHWC", "--option", "jobs", "3")
    to = ("export", "model.fxq", "--to", "horizon", "--out", "net")
    assert main([*to, *colours, *fields, "--board", "kit", "--data", "yuv.npz"]) == 0
    assert capsys.readouterr().out.split() == ["net/camera.fxq", "net/model_output/model.bin", "kit"]
    written = Path("net/model.yaml").read_text()
    assert all(line in written for line in ("debug: False", "jobs: 3", "remove_node_type: 'Dequantize'", "input_type_rt: 'nv12'"))
    camera = fxq.board.with_camera(integer, "bgr", mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))
    assert torch.equal(fxq.load("net/camera.fxq")(yuv), camera(yuv))
    step = next(node for node in integer.graph.nodes if node.op == "output").args[0].args[1].target
    expected = read_arrays(Path("kit/expected.npz"))
    (value,) = (value for name, value in expected.items() if not name.endswith("/step"))
    scale = integer.get_buffer(step).double()
    assert np.array_equal(value, (camera(yuv).double() / scale).round().permute(0, 2, 3, 1).numpy())
    assert read_arrays(Path("kit/inputs.npz"))["input_1"].shape == (2, 12, 12)
    assert main([*to, "--option", "optimise_level", "O2"]) == 2
    assert "did you mean 'optimize_level'?" in capsys.readouterr().err
    assert main([*to, "--option", "jobs", "many"]) == 2
    assert "jobs='many' is not usable" in capsys.readouterr().err
    for option in (("--compile",), ("--option", "jobs", "2"), ("--train-type", "rgb"), ("--camera", "nv12"), ("--board", "kit")):
        assert main(["export", "model.fxq", "--onnx", "m.onnx", *option]) == 2
        assert f"{option[0]} means nothing here" in capsys.readouterr().err
    refused = {
        ("--std", "1", "1", "2"): "--std means nothing here",
        ("--option", "core_num", "2"): "bayes-e has one core",
        ("--board", "other", "--data", "model.fxq"): "model.fxq cannot be read as data",
        ("--board", "other", "--data", "wide.npz"): "float64",
        ("--camera", "nv12", "--train-type", "rgb", "--board", "other", "--data", "rgb.npz"): "--images at the command line",
        ("--images", "a.png"): "--images means nothing here",
        ("--option", "compile_mode", "balance"): "balance and balance_factor go together",
    }
    np.savez("wide.npz", yuv.double().numpy())
    np.savez("rgb.npz", images.numpy())
    monkeypatch.setattr(fxq.board, "compile_horizon", None)  # nothing is compiled before it is refused
    for options, said in refused.items():
        assert main([*to, *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["export", "model.fxq", "--pt2", "m.pt2", "--output-names", "logits"]) == 2
    assert main([*to, "--onnx", "m.onnx", "--output-names", "logits"]) == 0
    assert "logits" in Path("net/layers.json").read_text()
    (batch, _) = random_batches(camera, (2, 1))  # verify camera.fxq draws images that NV12 can hold
    (image,) = batch.values()
    assert nv12_of((image[:1].permute(0, 2, 3, 1)).round().clamp(-128, 127)).shape == (12, 12)
