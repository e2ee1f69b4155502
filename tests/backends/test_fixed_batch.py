"""A file of a fixed batch from a model whose batch is dynamic: every size in it is a number, and the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from tests.shared.networks import Network


class Sizes(nn.Module):
    """Sizes of the batch in views, in new tensors and on the host, beside layers and float operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        features = self.conv(image).relu()
        batch = features.shape[0]
        rows = features.flatten(2).transpose(1, 2).reshape(batch, -1)
        halves = rows.view(image.size(0) * 2, -1).sinh().sum(1)
        return self.head(rows), features.new_zeros(batch, 2) + 1, halves, rows.sort(1).values.cumsum(1)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 8, 8)


def unfixed(path: Path) -> list[str]:
    """The values of a file that onnx checks and infers whose shape is not all numbers."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    known = {info.name: info.type.tensor_type for info in (*inferred.input, *inferred.value_info, *inferred.output)}
    names = [info.name for info in inferred.input] + [name for node in inferred.node for name in node.output if name]
    assert len(names) > 3
    return [
        name
        for name in names
        if name not in known or not known[name].HasField("shape") or not all(dim.HasField("dim_value") for dim in known[name].shape.dim)
    ]


@pytest.fixture(scope="module")
def result() -> fxq.results.Result:
    torch.manual_seed(0)
    return fxq.quantize(Sizes().eval(), [images(2), images(2)], "nash-e", show_progress=False)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("style", "batch"), [("exact", 1), ("fast", 3), ("qdq", 1)])
def test_every_size_is_a_number_and_the_bits_are_the_models(style: str, batch: int, result: fxq.results.Result, tmp_path: Path) -> None:
    options: dict[str, Any] = {"style": style, "opset": 21}
    dynamic = fxq.export_onnx(result.integer, tmp_path / "dynamic.onnx", **options)
    fixed = result.export(tmp_path / "fixed.onnx", batch_size=batch, **options)
    assert unfixed(dynamic)
    assert unfixed(fixed) == []
    batches = [images(batch) for _ in range(2)]
    report: Any = result.verify(fixed, batches)
    if style == "qdq":
        assert max(output.largest for outputs in report.outputs.values() for output in outputs) < 4
    else:
        assert report
        assert report.tensors > 10
    ours, theirs = (next(iter(fxq.inspect.record(path, batches[:1], ["quantized", "outputs"]))) for path in (dynamic, fixed))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [entry["shape"][0] for entry in fxq.export.onnx_metadata(fixed)["inputs"]] == [batch]


@pytest.mark.nightly
def test_of_prepared_and_float_models(result: fxq.results.Result, tmp_path: Path) -> None:
    path = fxq.export_onnx(result.prepared, tmp_path / "prepared.onnx", batch_size=1)
    assert unfixed(path) == []
    assert fxq.export.onnx_metadata(path)["style"] == "qdq"
    path = fxq.export_onnx(Sizes().eval(), tmp_path / "float.onnx", example_inputs=images(2), batch_size=3)
    assert unfixed(path) == []
    assert next(iter(fxq.inspect.record(path, [images(3)], "outputs")))["output 0"].shape == (3, 4)


def test_a_batch_of_one_may_be_flipped(tmp_path: Path) -> None:
    """It is what ONNX's reference evaluator gives as an array of negative strides."""
    result = fxq.quantize(
        Network(lambda s, x: s.linear(x).flip(0), linear=nn.Linear(4, 4)).eval(), [torch.randn(4, 4)], show_progress=False
    )
    path = result.export(tmp_path / "m.onnx", batch_size=1)
    assert unfixed(path) == []
    assert result.verify(path, [torch.randn(1, 4)])


def test_batches_of_another_size_are_refused_by_name(result: fxq.results.Result, tmp_path: Path) -> None:
    path = result.export(tmp_path / "m.onnx", batch_size=1, style="exact")
    for run in (lambda: fxq.verify(result.integer, path, [images(2)]), lambda: next(iter(fxq.inspect.record(path, [images(2)])))):
        with pytest.raises(fxq.errors.ExportError, match=r"input 'image' has the sizes \[1, 3, 8, 8\], and this one \[2, 3, 8, 8\]"):
            run()


def test_a_batch_size_that_the_graph_does_not_hold_for(tmp_path: Path) -> None:
    only_even = Network(lambda s, image: s.conv(image).view(image.shape[0] // 2, 2, 4, 8, 8).sum(1), conv=nn.Conv2d(3, 4, 1))
    halves = fxq.quantize(only_even.eval(), [images(4)], show_progress=False)
    with pytest.raises(fxq.errors.ConfigurationError, match=r"batch_size=1 cannot be used[\s\S]*because[\s\S]*remedy"):
        halves.export(tmp_path / "m.onnx", batch_size=1)
    assert halves.verify(halves.export(tmp_path / "m.onnx", batch_size=2), [images(2)])


def test_a_model_that_was_traced_with_a_fixed_batch(tmp_path: Path) -> None:
    static = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), [images(2)], options=fxq.Options(dynamic_shapes={}), show_progress=False)
    assert static.export(tmp_path / "a.onnx", batch_size=2).read_bytes() == static.export(tmp_path / "b.onnx").read_bytes()
    with pytest.raises(fxq.errors.ConfigurationError, match="traced with fixed sizes, and a batch of 2"):
        static.export(tmp_path / "m.onnx", batch_size=1)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_batch_size_is_a_positive_whole_number(value: Any, result: fxq.results.Result, tmp_path: Path) -> None:
    write: Callable[..., Any] = fxq.export_onnx
    with pytest.raises(fxq.errors.ConfigurationError, match=r"batch_size=.* is not usable"):
        write(result.integer, tmp_path / "m.onnx", batch_size=value)
