"""The vendor's compiler without the vendor's compiler: files for the compiler, and the reading of its answers."""

import itertools
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.horizon_programs.calibrated import computed
from benchmarks.vendor import install
from fxquant.backends.horizon import tool as compiling
from fxquant.backends.horizon.export import refusals
from fxquant.backends.horizon.tool import STEPS
from fxquant.backends.onnx.horizon import fixed_shape
from fxquant.cli import main
from fxquant.compat import horizon
from fxquant.compat.horizon import served as march
from fxquant.ir.integer import qparams
from tests.shared.horizon_tool import DATE, FakeTool, integers
from tests.shared.networks import Network


def small() -> nn.Module:
    return Network(lambda s, x: s.b(torch.relu(s.a(x))), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 1))


def batches() -> list[Tensor]:
    return [torch.randn(2, 3, 6, 6) for _ in range(2)]


X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def converted(model: nn.Module, target: str = "bayes-e", qconfig: fxq.QConfig | None = None, **scales: float) -> fx.GraphModule:
    inputs = batches()
    prepared = fxq.calibrate(fxq.prepare(model.eval(), inputs[0], target, qconfig), inputs)
    fxq.set_qparams(prepared, scales)
    return fxq.convert(prepared)


def in_powers_of_two(model: nn.Module) -> fx.GraphModule:
    return converted(model, qconfig=fxq.QConfig(weight=fxq.WeightConfig(power_of_two=True)))


def program(integer: fx.GraphModule, tmp_path: Path) -> Path:
    """The file that the tool makes of a model."""
    return fxq.board.compile_horizon(fxq.board.export_horizon(integer, tmp_path / "net"))


@pytest.fixture(scope="module")
def integer() -> fx.GraphModule:
    torch.manual_seed(0)
    return converted(small(), qconfig=fxq.QConfig(fxq.ActivationConfig("int8")))  # the last layer's output as well


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTool]:
    """Yield a stand-in for the tool, whose programs write a log to the folder that they run in: never to the caller's."""
    built, here = FakeTool(tmp_path / "tool"), tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("FXQUANT_HORIZON", str(built.folder))
    monkeypatch.chdir(here)
    yield built
    assert list(here.iterdir()) == []


def test_the_installer_tries_every_program_and_leaves_no_log(tool: FakeTool) -> None:
    tool.tell(python=0)
    install.check(tool.folder)
    assert [call.split()[0] for call in tool.calls] == [*install.PROGRAMS, "python"]
    tool.tell(python=1)
    with pytest.raises(SystemExit, match="python does not run"):
        install.check(tool.folder)


# ---- writing ------------------------------------------------------------------------------------------------------------
def test_a_file_has_opset_11_and_a_batch_of_one(integer: fx.GraphModule, tmp_path: Path) -> None:
    folder = fxq.board.export_horizon(integer, tmp_path, "net", options=fxq.board.HorizonOptions(optimize_level="O1"))
    model = onnx.load(folder / "net.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 11, "horizon": 1}
    assert [fixed_shape(info) for info in (*model.graph.input, *model.graph.output)] == [[1, 3, 6, 6], [1, 4, 4, 4]]
    assert all(dim.WhichOneof("value") == "dim_value" for info in model.graph.input for dim in info.type.tensor_type.shape.dim)
    written = (folder / "net.yaml").read_text()
    assert re.search(r"march: 'bayes-e'\n[\s\S]*input_shape: '1x3x6x6'\n[\s\S]*optimize_level: 'O1'", written)
    assert "--config net.yaml" in (folder / "compile.sh").read_text()
    assert fxq.export.onnx_metadata(folder / "net.onnx")["style"] == "horizon"


def test_outputs_can_be_integers_with_channels_last(tmp_path: Path) -> None:
    integer = converted(small())
    options = fxq.board.HorizonOptions(outputs="integer", layout="NHWC", jobs=4)
    folder = fxq.board.export_horizon(integer, tmp_path, output_names=["y"], options=options)
    text = (folder / "model.yaml").read_text()
    assert "remove_node_type: 'Dequantize'" in text
    assert "optimize_level: 'O3'\n  debug: True\n  core_num: 1\n  jobs: 4\n" in text
    (output,) = onnx.load(folder / "model.onnx").graph.output
    assert (output.name, fixed_shape(output)) == ("y", [1, 4, 4, 4])
    grid = next(value for node in integer.graph.nodes if node.name == "b" and (value := qparams(node)) is not None)
    scale = list(grid.scale) if isinstance(grid.scale, tuple) else grid.scale
    described = json.loads((folder / "layers.json").read_text())["outputs"]
    assert described == {"y": {"shape": [1, 4, 4, 4], "layout": "NHWC", "dtype": grid.dtype, "scale": scale}}


@pytest.mark.parametrize(("size", "expected"), [("batch", 1), ("3batch", 3), ("4batch/2", 2), ("batch+2", 3), ("2batch-1", 1)])
def test_sizes_that_grow_with_the_batch_are_those_of_one(size: str, expected: int) -> None:
    assert fixed_shape(onnx.helper.make_tensor_value_info("x", 1, [size, 5])) == [expected, 5]


HEADS: dict[str, Callable[[], nn.Module]] = {
    "vector": lambda: Network(lambda s, x: s.fc(x.mean((2, 3))), fc=nn.Linear(3, 5)),
    "last": lambda: Network(lambda s, x: s.fc(x.permute(0, 2, 3, 1)), fc=nn.Linear(3, 5)),
    "conv1d": lambda: Network(lambda s, x: s.fc(x.flatten(2)), fc=nn.Conv1d(3, 4, 3)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_layer_whose_weight_is_after_a_pair_is_a_convolution(kind: str, tmp_path: Path) -> None:
    nodes = onnx.load(fxq.board.export_horizon(in_powers_of_two(HEADS[kind]()), tmp_path) / "model.onnx").graph.node
    operators = {node.op_type for node in nodes}
    assert {"HzQuantize", "Conv"} <= operators
    assert not operators & {"Gemm", "MatMul"}  # the compiler dies of the first, and leaves the second to the processor


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("z", "a", "pads"),
    [
        (nn.ZeroPad2d((0, 1, 2, 3)), nn.Conv2d(4, 4, 3, padding=(1, 0)), [3, 0, 4, 1]),
        (nn.Identity(), nn.Conv2d(4, 4, 4, padding="same", groups=4), [1, 1, 2, 2]),
        (nn.ConstantPad2d(1, 0.5), nn.Conv2d(4, 4, 3), None),
        (nn.ZeroPad2d((-1, 1, 0, 0)), nn.Conv2d(4, 4, 3), None),
        (nn.ZeroPad2d(1), nn.MaxPool2d(3), None),
    ],
    ids=["uneven", "same", "number", "crop", "pool"],
)
def test_zeros_around_what_convolutions_read_are_their_padding(z: nn.Module, a: nn.Module, pads: list[int] | None, tmp_path: Path) -> None:
    integer = converted(Network(lambda s, x: s.b(F.relu(s.a(s.z(F.relu(s.c(x)))))), c=nn.Conv2d(3, 4, 1), z=z, a=a, b=nn.Conv2d(4, 4, 1)))
    nodes = onnx.load(fxq.board.export_horizon(integer, tmp_path) / "model.onnx").graph.node
    assert ("Pad" in {node.op_type for node in nodes}) == (pads is None)
    if pads is not None:
        (layer,) = (node for node in nodes if node.name.startswith("a/Conv"))
        assert next(list(entry.ints) for entry in layer.attribute if entry.name == "pads") == pads


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("size", "kernels"), [(7, [7]), (12, [6, 2]), (32, [4, 4, 2]), (56, [7, 4, 2])])
@pytest.mark.parametrize("how", ["mean", "keepdim", "pool", "window"])
def test_the_mean_of_an_image_is_several_on_bernoulli2(how: str, size: int, kernels: list[int], tmp_path: Path) -> None:
    integer = averaged(how, size)
    nodes = onnx.load(fxq.board.export_horizon(integer, tmp_path) / "model.onnx").graph.node
    means = [node for node in nodes if node.op_type == "Conv" and next(entry.i for entry in node.attribute if entry.name == "group") == 4]
    shapes = [next(list(entry.ints) for entry in node.attribute if entry.name == "kernel_shape") for node in means]
    assert shapes == [[k, k] for k in kernels]
    assert [b.op_type for a, b in itertools.pairwise(nodes) if a.op_type in ("Reshape", "Flatten")] == ["Identity"]


def test_layers_of_vectors_are_convolutions_of_images_on_bernoulli2(tmp_path: Path) -> None:
    model = Network(lambda s, x: s.b(s.a(x.squeeze(1))[0][:, -1]), a=nn.LSTM(6, 4, batch_first=True), b=nn.Linear(4, 3)).eval()
    integer = fxq.quantize(model, [torch.randn(2, 1, 3, 6)], "bernoulli2").integer
    nodes = onnx.load(fxq.board.export_horizon(integer, tmp_path) / "model.onnx").graph.node
    used = [node.op_type for node in nodes]
    assert not {"Gemm", "MatMul", "ToImage", "FromImage"} & set(used)
    assert used.count("Add") == 4  # two of each step but the first, which adds nothing to the input's part
    quantized = [at for at, name in enumerate(used) if name == "QuantizeLinear"]
    inside = used[quantized[1] : quantized[-1]]
    assert not {"Reshape", "Transpose"} & set(inside)


def _shuffled(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(y.view(y.shape[0], 2, y.shape[1] // 2, *y.shape[2:]).transpose(1, 2).reshape(y.shape))


SHUFFLED = Network(_shuffled, a=nn.Conv2d(8, 8, 1), b=nn.Conv2d(8, 8, 1)).eval()
CAUSAL = Network(
    lambda s, x: s.c(F.max_pool1d(F.relu(s.b(F.pad(F.relu(s.a(F.pad(x, (2, 0)))), (4, 0))) + s.d(x)), 2)),
    a=nn.Conv1d(8, 6, 3), b=nn.Conv1d(6, 6, 3, dilation=2), c=nn.Conv1d(6, 4, 1), d=nn.Conv1d(8, 6, 1),
).eval()  # fmt: skip


def test_a_channel_shuffle_is_three_bare_moves(tmp_path: Path) -> None:
    file = onnx.load(
        fxq.board.export_horizon(fxq.quantize(SHUFFLED, [torch.randn(2, 8, 6, 6)], "bayes-e").integer, tmp_path) / "model.onnx"
    )
    at = [node.op_type for node in file.graph.node].index("Transpose")
    assert [node.op_type for node in file.graph.node[at - 2 : at + 3]] == [
        "DequantizeLinear", "Reshape", "Transpose", "Reshape", "QuantizeLinear",
    ]  # fmt: skip
    shapes = [each for each in file.graph.initializer if each.name in {file.graph.node[at - 1].input[1], file.graph.node[at + 1].input[1]}]
    assert all(onnx.numpy_helper.to_array(each)[0] == 1 for each in shapes)


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "nash-e"])
def test_layers_of_sequences_are_layers_of_images(target: str, tmp_path: Path) -> None:
    flat = Network(lambda s, x: F.max_pool1d(s.c(x).flatten(2), 2), c=nn.Conv2d(3, 4, 1)).eval()  # its operand is an image of its own
    flat_pool = fxq.board.export_horizon(fxq.quantize(flat, [torch.randn(1, 3, 4, 4)], target).integer, tmp_path / "flat") / "model.onnx"
    integer = fxq.quantize(CAUSAL, [torch.randn(2, 8, 24)], target).integer
    nodes = [*onnx.load(fxq.board.export_horizon(integer, tmp_path) / "model.onnx").graph.node]
    used = [node.op_type for node in nodes]
    assert not {"Squeeze", "Unsqueeze", "ToImage", "FromImage"} & set(used)
    inside = used[used.index("Conv") : len(used) - used[::-1].index("Conv")]
    assert not {"Reshape", "Transpose"} & set(inside)
    nodes += onnx.load(flat_pool).graph.node
    assert {len(entry.ints) for node in nodes for entry in node.attribute if entry.name == "kernel_shape"} == {2}


@pytest.mark.parametrize(
    ("layer", "size"), [(nn.AdaptiveAvgPool1d(2), (3, 8)), (nn.Conv3d(3, 4, 1), (3, 2, 4, 4))], ids=["sequence", "volume"]
)
def test_what_the_compiler_computes_differently_is_refused(layer: nn.Module, size: tuple[int, ...], tmp_path: Path) -> None:
    integer = fxq.quantize(layer.eval(), [torch.randn(2, *size)], "bayes-e").integer
    with pytest.raises(fxq.errors.ExportError, match="cannot be compiled for the chip"):
        fxq.board.export_horizon(integer, tmp_path)


def averaged(how: str, size: int) -> fx.GraphModule:
    means = {
        "mean": lambda x: x.mean((2, 3)),
        "keepdim": lambda x: x.mean((-1, -2), keepdim=True).flatten(1),
        "pool": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
        "window": lambda x: F.avg_pool2d(x, size).flatten(1),
    }
    model = Network(lambda s, x: s.fc(means[how](s.a(x))), a=nn.Conv2d(3, 4, 1), fc=nn.Linear(4, 5))
    return fxq.quantize(model.eval(), [torch.randn(2, 3, size, size)], "bernoulli2").integer


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", ["mean", "keepdim", "pool", "window"])
def test_the_mean_of_an_image_of_prime_sides_is_refused(how: str, tmp_path: Path) -> None:
    integer = averaged(how, 22)
    with pytest.raises(fxq.errors.ExportError, match="cannot be compiled for the chip") as refused:
        fxq.board.export_horizon(integer, tmp_path / "out")
    assert "is 11; bernoulli2 allows" in refused.value.because or "is 22; bernoulli2 allows" in refused.value.because
    assert "test_horizon_program.py" in str(refused.value.at)
    assert str(refused.value) in map(str, refusals(integer))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("low", "high", "lone", "which"),
    [(0.0, 6.0, False, None), (-0.5, 0.5, False, "lower"), (-0.5, 0.5, True, "lower"), (0.0, 6.0, True, None)],
)
def test_a_clamp_that_the_compiler_drops_is_refused(low: float, high: float, lone: bool, which: str | None, tmp_path: Path) -> None:
    """After a layer, or alone after a pool."""
    names = {"a": high / 50, **({"max_pool2d": high / 50, "clamp": high / 50} if lone else {})}
    model = Network(lambda s, x: torch.clamp(F.max_pool2d(s.a(x), 2) if lone else s.a(x), low, high), a=nn.Conv2d(3, 4, 3))
    integer = converted(model, **names)
    if which is None:
        assert fxq.board.export_horizon(integer, tmp_path / "out").is_dir()
        return
    with pytest.raises(fxq.errors.ExportError, match=f"the {which} clamp of") as refused:
        fxq.board.export_horizon(integer, tmp_path / "out")
    assert "test_horizon_program.py" in str(refused.value.at)
    assert "set_qparams" in str(refused.value)
    assert not (tmp_path / "out").exists()


NARROWED: dict[str, tuple[Callable[[Network, Tensor], Tensor], dict[str, nn.Module]]] = {
    "window": (lambda s, x: F.avg_pool2d(x, 2), {}),
    "adaptive": (lambda s, x: F.adaptive_avg_pool2d(x, 2), {}),
    "mean": (lambda s, x: x.mean((2, 3)), {}),
    "whole": (lambda s, x: F.adaptive_avg_pool2d(x, 1), {}),
    "dilated": (lambda s, x: s.b(x), {"b": nn.Conv2d(4, 4, 3, padding=2, dilation=2)}),
    "strided": (lambda s, x: s.b(x), {"b": nn.Conv2d(4, 4, 3, stride=2, groups=4)}),
    "transposed": (lambda s, x: s.b(x), {"b": nn.ConvTranspose2d(4, 4, 2, 2)}),
    "product": (lambda s, x: x @ x, {}),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", NARROWED)
def test_what_the_compiler_brings_from_16_bits_to_8_is_refused(kind: str, tmp_path: Path) -> None:
    """Its program has other integers there, as much as half a step of 8 bits; average pools in windows are off by up to 32543 steps."""
    function, modules = NARROWED[kind]

    def made(dtype: str) -> fx.GraphModule:
        network = Network(lambda s, x: function(s, s.a(x)), a=nn.Conv2d(3, 4, 3), **modules)
        return converted(network, qconfig=fxq.QConfig(fxq.ActivationConfig(dtype)))

    with pytest.raises(fxq.errors.ExportError, match=r"16") as refused:
        fxq.board.export_horizon(made("int16"), tmp_path)
    assert "test_horizon_program.py" in str(refused.value)
    assert "int8" in refused.value.remedy
    assert not list(tmp_path.iterdir())
    fxq.board.export_horizon(made("int8"), tmp_path / "narrow")


AS_INTEGERS = fxq.board.HorizonOptions(outputs="integer")
REFUSED: dict[str, tuple[Callable[[], fx.GraphModule], fxq.board.HorizonOptions | None, str]] = {
    "a softmax as an integer": (
        lambda: converted(nn.Sequential(small(), nn.Softmax(1)), "bernoulli2"),
        AS_INTEGERS,
        "cannot be an integer",
    ),
    "nash-e as an integer": (lambda: converted(small(), "nash-e"), AS_INTEGERS, "cannot be an integer"),
    "a prepared model": (lambda: fxq.prepare(small(), batches()[0]), None, r"fxq\.convert"),
    "bernoulli": (lambda: converted(small(), "bernoulli"), None, r"of bernoulli cannot be written[\s\S]*bernoulli2, bayes, bayes-e"),
    "other scales": (lambda: converted(small(), "nash-e-level1"), None, "an integer model of nash-e-level1 cannot be written"),
    "other roundings": (lambda: converted(small(), "nash-e/requantize"), None, "an integer model of nash-e/requantize cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_program_of_the_chip_is_refused(name: str, tmp_path: Path) -> None:
    make, options, because = REFUSED[name]
    with pytest.raises(fxq.errors.ConfigurationError, match=because):
        fxq.board.export_horizon(make(), tmp_path / "out", **({} if options is None else {"options": options}))


def test_scales_that_have_no_place_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 4, 3, 2, groups=2))
    assert fxq.board.export_horizon(converted(model), tmp_path / "statistics").is_dir()
    with pytest.raises(fxq.errors.ExportError, match="weight scales"):
        fxq.board.export_horizon(in_powers_of_two(model), tmp_path / "out")


# ---- compiling ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("named", [None, "nowhere"])
def test_an_absent_tool_is_an_error_that_says_how_to_get_it(
    named: str | None, integer: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FXQUANT_HORIZON", named) if named else monkeypatch.delenv("FXQUANT_HORIZON", raising=False)
    with pytest.raises(fxq.errors.ConfigurationError, match="not installed") as absent:
        program(integer, tmp_path)
    assert "make vendor" in str(absent.value)
    assert (named or "not set") in str(absent.value)


def test_a_folder_is_compiled_with_progress(
    integer: fx.GraphModule, tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def watched(items: Iterator[int], total: int, description: str, show: bool | None) -> Iterator[int]:
        shown.append((list(items), total, description, show))
        return iter(())

    monkeypatch.setattr(compiling, "progress", watched)
    tool.tell(log=[f"{DATE} \x1b[92mINFO\x1b[0m {step}." for step in STEPS])
    folder = fxq.board.export_horizon(integer, tmp_path / "net")
    assert fxq.board.compile_horizon(folder, show_progress=True) == folder / "model_output" / "model.bin"
    assert tool.calls == ["hb_mapper makertbin --model-type onnx -c model.yaml"]
    assert shown == [(list(range(len(STEPS))), len(STEPS), "compiling for bayes-e", True)]
    assert (folder / "hb_mapper.log").read_text().count("INFO Start to") == 5


def test_the_tool_is_found_in_path(integer: fx.GraphModule, tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXQUANT_HORIZON")
    monkeypatch.setenv("PATH", str(tool.folder))
    assert program(integer, tmp_path).is_file()


def test_a_refusal_names_the_layer_and_its_source_line(integer: fx.GraphModule, tool: FakeTool, tmp_path: Path) -> None:
    message = "error message: unsupported model: layer b/Conv_1 does not support kernels of 99"
    tool.tell(log=[f"{DATE} \x1b[91mERROR\x1b[0m *** ERROR-OCCUR-DURING {{x}} ***, {message}", f"{DATE} INFO End"], makes=False, code=255)
    with pytest.raises(fxq.errors.CompilationError, match="hb_mapper failed at layer %b") as failed:
        program(integer, tmp_path)
    assert "s.b(torch.relu(s.a(x)))" in str(failed.value.at)
    assert failed.value.because == message.removeprefix("error message: ")
    assert "adapt=True" in failed.value.remedy
    assert str(tmp_path / "net" / "hb_mapper.log") in failed.value.remedy


def test_a_death_is_told_with_the_step_and_leaves_no_file(integer: fx.GraphModule, tool: FakeTool, tmp_path: Path) -> None:
    folder = fxq.board.export_horizon(integer, tmp_path / "net")
    assert fxq.board.compile_horizon(folder).is_file()
    tool.tell(log=[f"{DATE} INFO {STEPS[3]}."], signal=int(signal.SIGFPE))
    with pytest.raises(fxq.errors.CompilationError, match="SIGFPE after 'Start to quantize the model'"):
        fxq.board.compile_horizon(folder)
    assert not (folder / "model_output" / "model.bin").exists()


def test_success_without_a_file_is_a_failure_and_any_other_folder_is_refused(
    integer: fx.GraphModule, tool: FakeTool, tmp_path: Path
) -> None:
    tool.tell(log=["the end"], makes=False)
    with pytest.raises(fxq.errors.CompilationError, match="because  the end"):
        program(integer, tmp_path)
    with pytest.raises(fxq.errors.ConfigurationError, match="export_horizon"):
        fxq.board.compile_horizon(tmp_path)


# ---- verifying ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_program_is_verified_in_its_order_of_dimensions(
    channels_last: bool, integer: fx.GraphModule, tool: FakeTool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.computes(integer, "b", integers(integer, "b", X), channels_last)
    saved, folder = str(fxq.save(integer, tmp_path / "net.fxq")), tmp_path / "net"
    assert main(["export", saved, "--to", "horizon", "--out", str(folder), "--compile"]) == 0
    binary = folder / "model_output" / "model.bin"
    assert capsys.readouterr().out.strip() == str(binary)
    report = fxq.verify(integer, binary, [X])
    assert report
    assert (report.elements, report.names, report.given, report.unseen) == (64, {"b"}, ["x_quantize"], {})
    assert [call.split()[0] for call in tool.calls] == ["hb_mapper", "hb_extract_hbm", "hbdk-disas", "hbdk-sim"]
    np.save(tmp_path / "x.npy", X.numpy())
    assert main(["verify", str(binary), saved, "--data", str(tmp_path / "x.npy")]) == 0
    assert "hbdk-sim for bayes-e" in capsys.readouterr().out


def test_a_difference_is_named_with_both_values(integer: fx.GraphModule, tool: FakeTool, tmp_path: Path) -> None:
    wanted = integers(integer, "b", X)
    planted = wanted.clone()
    planted[0, 2, 1, 3] += 1
    tool.computes(integer, "b", planted)
    report = fxq.verify(integer, program(integer, tmp_path), [X])
    assert not report
    assert report.mismatches == 1
    assert (report.first.name, report.first.index) == ("b", (0, 2, 1, 3))
    assert report.first.values == (float(wanted[0, 2, 1, 3]), float(wanted[0, 2, 1, 3] + 1))
    assert "test_horizon_program.py" in report.first.source


def test_the_program_of_another_model_is_refused(integer: fx.GraphModule, tool: FakeTool, tmp_path: Path) -> None:
    tool.computes(integer, "other", integers(integer, "b", X))
    binary = program(integer, tmp_path)
    with pytest.raises(fxq.errors.ExportError, match="program of another model"):
        fxq.verify(integer, binary, batches())
    with pytest.raises(fxq.errors.ConfigurationError, match="prepared model"):
        fxq.verify(fxq.prepare(small(), batches()[0]), binary, batches())
    tool.computes(integer, "b", integers(integer, "b", X))
    tool.told["programs"][0]["input features"][0]["valid dim"][0] = 2
    tool.tell()
    with pytest.raises(fxq.errors.ExportError, match="is input_batch in its configuration"):
        fxq.verify(integer, program(integer, tmp_path), [X])


def test_estimate_shows_the_figures_of_the_compiler(integer: fx.GraphModule, tool: FakeTool, tmp_path: Path) -> None:
    tool.computes(integer, "b", integers(integer, "b", X))
    table = [["layer"], ["a/Conv_1", "1,024", "", "", "<1 us", "2 us", "0 ~ 2 us"]]
    figures = {"model name": "part_0", "latency (us)": 8.7, "FPS": 114573.79, "DDR bytes per run": 3552, "BPU OPs per run (effective)": 9}
    tool.tell(figures=[{**figures, "layer details": table}])
    binary = program(integer, tmp_path)
    estimate = fxq.estimate(integer, compiled=binary)
    assert [(cost.microseconds, cost.bytes, cost.layers[0].layer) for cost in estimate.compiled] == [(8.7, 3552, "a/Conv_1")]
    assert "8.7 µs, 3,552 bytes moved, of 1 BPU programs" in str(estimate)
    assert fxq.estimate(integer).compiled == ()


# ---- Horizon's names ----------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("default_outputs")
def test_horizons_names_compile_what_is_prepared(
    tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(march, "_march", ["bayes-e"])
    integer = converted(small())
    tool.computes(integer, "b", integers(integer, "b", X))
    assert horizon.compile_model(integer, [X], hbm=tmp_path / "net.hbm", opt="fast") == 0
    assert {"net.bin", "net.hbm", "net"} <= {file.name for file in tmp_path.iterdir()}
    assert "optimize_level: 'O3'" in (tmp_path / "net" / "model.yaml").read_text()
    assert fxq.verify(integer, tmp_path / "net.bin", [X])
    assert horizon.export_hbir(integer, [X], tmp_path / "other.hbir") == (["x"], ["b_dequantize"])
    assert horizon.check_model(integer, [X]) == 0
    tool.tell(makes=False, code=1, log=["unsupported model"])
    assert horizon.check_model(integer, [X]) == 1
    assert "unsupported model" in capsys.readouterr().out
    with pytest.raises(fxq.errors.ConfigurationError, match="bernoulli2"):
        horizon.compile_model(integer, [X], hbm=tmp_path / "net.hbm", march="bernoulli2")


# ---- files for the nash marches, held by a reference implementation of HzCalibration ---------------------------------
CONFIGS = {
    "int8": None,
    "int16": fxq.QConfig(fxq.ActivationConfig("int16")),
    "learned": fxq.QConfig(weight=fxq.WeightConfig(training="learned")),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_computes_the_integers_of_the_model(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    batches = [torch.randn(1, 3, 8, 8) for _ in range(2)]
    result = fxq.quantize(model, batches, target="nash-e", qconfig=CONFIGS[kind])
    folder = fxq.board.export_horizon(result.integer, tmp_path / "net")
    file = onnx.load(folder / "model.onnx")
    assert {each.domain: each.version for each in file.opset_import}[""] == 19
    nodes = [node for node in file.graph.node if node.op_type == "HzCalibration"]
    assert len(nodes) >= 5
    assert "untried" in (folder / "README.txt").read_text().lower()
    assert "hb_compile" in (folder / "compile.sh").read_text()
    assert torch.equal(computed(folder / "model.onnx", batches[0]), result.integer(batches[0]))
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be compiled here") as refused:
        fxq.board.compile_horizon(folder)
    assert "hb_mapper compiles for bernoulli2, bayes, bayes-e" in refused.value.because
    assert "optimize_level: 'O2'" in (folder / "model.yaml").read_text()  # its highest
