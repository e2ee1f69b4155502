"""Run exported files in OpenVINO, TVM, IREE and LiteRT: equal bits of style "exact", and the rows of the page's table."""

import functools
import re
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fxquant as fxq
from benchmarks import runtimes
from fxquant.backends.onnx import runtime
from tests.counts.measures import compiled
from tests.counts.networks import NETWORKS
from tests.shared.networks import Network
from tests.shared.onnx_files import assert_verified, batch, known

OTHERS = list(runtime.OTHER_RUNTIMES)


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "litert"])  # which is equal on some: the page's rows
def test_a_file_has_equal_bits_in_another_runtime(name: str, network: str, target: str, tmp_path: Path) -> None:
    pytest.importorskip(name if name != "iree" else "iree.compiler", reason=f"the package {name} is not installed")
    built = compiled(network, target)
    path = fxq.export_onnx(built.integer, tmp_path / "model.onnx", "exact")
    scale = next(iter(fxq.export.onnx_metadata(path)["tensors"].values()))["scale"]
    on_grid = (built.batch / scale).round() * scale  # OpenVINO multiplies inputs by a reciprocal, which is off next to ties
    report = fxq.verify(built.integer, path, [on_grid], runtime=name)
    assert report, str(report)


@pytest.mark.parametrize("name", OTHERS)
def test_a_runtime_that_is_not_installed_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, "iree.runtime", "ai_edge_litert"):
        monkeypatch.setitem(sys.modules, module, None)
    path = fxq.export_onnx(known("silu"), tmp_path / "model.onnx", "exact")
    with pytest.raises(fxq.errors.ConfigurationError, match=rf'runtime={name!r} cannot be used(.|\n)*pip install "fxquant\[{name}\]"'):
        fxq.verify(known("silu"), path, [batch()], runtime=name)


def test_litert_runs_what_the_command_onnx2tf_makes_by_the_names_of_inputs_and_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for both: a command copies the ONNX file, and an interpreter runs it, its inputs and outputs in another order."""

    class Interpreter:
        def __init__(self, model_content: bytes, num_threads: int) -> None:
            session, feeds = onnxruntime.InferenceSession(model_content, providers=["CPUExecutionProvider"]), dict[str, Any]()
            places = [
                [{"index": each.name, "name": each.name} for each in reversed(of())] for of in (session.get_inputs, session.get_outputs)
            ]
            self.get_input_details, self.get_output_details = (functools.partial(list, each) for each in places)
            self.allocate_tensors = self.invoke = lambda: None
            self.set_tensor, self.get_tensor = feeds.__setitem__, lambda name: session.run([name], feeds)[0]

    for name, module in (("", types.SimpleNamespace()), (".interpreter", types.SimpleNamespace(Interpreter=Interpreter))):
        monkeypatch.setitem(sys.modules, f"ai_edge_litert{name}", module)  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", str(tmp_path))
    model = Network(lambda m, x, y: m.a(x) + m.b(y).mean((2, 3), keepdim=True), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1)).eval()
    inputs = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 8, 8)
    integer = fxq.quantize(model, [inputs], "nash-e").integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", "exact")
    with pytest.raises(fxq.errors.ConfigurationError, match="the command onnx2tf"):
        fxq.verify(integer, path, [inputs], runtime="litert")
    command = tmp_path / "onnx2tf"
    command.write_text('#!/bin/sh\n/bin/cp "$2" "$4/model_float32.tflite"\n')
    command.chmod(0o755)
    assert fxq.verify(integer, path, [inputs], runtime="litert")
    command.write_text("#!/bin/sh\necho unsupported operator Wave\n")
    with pytest.raises(fxq.errors.ExportError, match="litert says: onnx2tf: unsupported operator Wave"):
        fxq.verify(integer, path, [inputs], runtime="litert")


def test_verify_runs_one_runtime_at_the_sizes_of_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a runtime: onnxruntime, with the first output increased by `added`."""
    sizes, added = [], [0.0]

    def stands_in(model: onnx.ModelProto) -> runtime.Run:
        sizes.append(model.graph.input[0].type.tensor_type.shape.dim[0].dim_value)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return lambda feeds: [value + np.float32(added[0]) if value.dtype == np.float32 else value for value in session.run(None, feeds)]

    monkeypatch.setitem(runtime.OTHER_RUNTIMES, "tvm", stands_in)
    integer = known("silu")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", "exact")
    assert fxq.verify(integer, path, [batch(3), batch(2), batch(3)], runtime="tvm")
    assert sorted(sizes) == [2, 2, 3, 3]  # the file as it is, and with its inner tensors
    added[0] = 1.0
    assert not fxq.verify(integer, path, [batch(3)], runtime="tvm")
    with pytest.raises(fxq.errors.ConfigurationError, match="only ONNX files"):
        fxq.verify(integer, integer, [batch()], runtime="tvm")


@pytest.mark.parametrize("target", ["nash-e", "x86", "bayes-e"])
def test_elementwise_products_beyond_24_bits_are_int32(target: str, tmp_path: Path) -> None:
    integer, x = runtimes.compiled("LSTM", target)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", "exact")
    assert not fxq.export.onnx_metadata(path)["relies_on_float64"]
    assert max(int(value.abs().max()) for value in next(iter(fxq.inspect.record(integer, [40 * x], "accumulators"))).values()) > 2**24
    assert_verified(integer, path, [x, 40 * x])


def test_a_runtime_without_a_kernel_is_told_apart_from_a_damaged_file() -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.BFLOAT16, [1]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Atan", ["x"], ["y"])], "none", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10)
    with pytest.raises(fxq.errors.ExportError, match=r"NOT_IMPLEMENTED(.|\n)*needs 1.24"):
        runtime.Runner(model, runtime.RUNTIMES[0][1], 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["onnxruntime", *OTHERS])
def test_the_page_says_what_each_runtime_makes_of_each_style(name: str) -> None:
    """Of the versions that the page names, the rows of its table are written again."""
    written = runtimes.PAGE.read_text(encoding="utf-8")
    package, version = runtimes.PACKAGES[name], re.search(rf"\| {runtimes.SHOWN[name]} ([\d.post]+) \|", written)
    pytest.importorskip(name if name != "iree" else "iree.compiler", reason=f"the package {name} is not installed")
    if version is None or metadata.version(package) != version[1]:
        pytest.skip(f"the page has another version of {package}")
    for row in runtimes.table([name]):
        assert row.line() in written
