"""What export takes and what verify says: outputs of every kind, names, dtypes, float operators, signed zeros, tampered metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.analysis.report import FloatDifference, differing
from fxquant.backends.onnx.float_export import FloatRegions
from fxquant.backends.onnx.independent_parts import split
from fxquant.backends.onnx.regions import settings_of
from fxquant.backends.onnx.runtime import OnnxModel
from fxquant.backends.onnx.translations import built_once
from tests.ops.test_operators import BY_OPERATOR, inputs_of, model_of
from tests.shared.contract import assert_train_is_validate, compiled, needs_vnni, same_bytes


class Net(nn.Module):
    """Layers by name, and a forward that uses them."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def rows(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def images(count: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def integer_of(model: nn.Module, batch: Any, target: str = "nash-e", qconfig: Any = None) -> fx.GraphModule:
    return compiled(model.eval(), [batch], target, qconfig).integer


def linear_of(function: Callable[..., Any], batch: Tensor | None = None) -> fx.GraphModule:
    torch.manual_seed(0)
    return integer_of(Net(function, l=nn.Linear(8, 4), i=nn.Buffer(torch.arange(3))), rows() if batch is None else batch)


# ---- signed zeros -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["nash-e", "nash-m", "x86", "qnnpack", "bayes-e", "bernoulli", "bernoulli2"])
def test_no_form_gives_a_negative_zero(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prepared, integer = compiled(
        Net(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1, bias=False)).eval(), [images()], target
    )
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    batch = images(8, seed=2)
    wanted = integer(batch)
    assert not torch.signbit(wanted[wanted == 0]).any()
    assert (wanted == 0).any()
    fxq.set_state(prepared, fxq.State.VALIDATE)
    assert same_bytes(prepared(batch), wanted)
    for _, run in OnnxModel(path).runners([]):
        assert same_bytes(next(iter(run({"x": batch}).values())), wanted)
    assert_train_is_validate(prepared, batch)
    assert same_bytes(prepared(batch), wanted)


def test_what_a_float_operator_makes_of_zeros_is_equal() -> None:
    torch.manual_seed(0)
    prepared, integer = compiled(
        Net(lambda s, x: (s.a(x) - 0.0).relu().double() ** -1.0, a=nn.Conv2d(3, 4, 1)).eval(), [images(8)], "nash-e"
    )
    assert fxq.verify(prepared, integer, [images(8)], show_progress=False)


def test_verify_compares_bytes() -> None:
    zeros, nan = torch.zeros(2), torch.tensor([torch.nan, 1.0])
    assert differing(zeros, -zeros) == 2
    assert differing(nan, nan.clone()) == 0
    assert differing(zeros, zeros.double()) == 2
    assert differing(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1
    assert differing(torch.complex(zeros, zeros), torch.complex(zeros, -zeros)) == 2


# ---- float operators in the report ------------------------------------------------------------------------------------


def softmax_between() -> fx.GraphModule:
    torch.manual_seed(0)
    return integer_of(
        Net(
            lambda s, x: (lambda y: (s.b(y), y.asinh()))(torch.logaddexp(s.a(x), torch.atan(s.a(x)))), a=nn.Linear(8, 6), b=nn.Linear(6, 4)
        ),
        rows(32),
        "bayes-e",
    )


def test_a_model_that_ends_in_a_float_operator_is_equal(tmp_path: Path) -> None:
    """A softmax over the batch is rounded in a way of its own by every runtime; the integers before it are equal."""
    torch.manual_seed(0)
    prepared, integer = compiled(Net(lambda s, x: s.a(x).softmax(0), a=nn.Linear(8, 6)).eval(), [rows(64)], "bayes-e")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    for form in (integer, prepared):
        report = fxq.verify(form, path, [rows(64)], show_progress=False)
        assert report, str(report)
        assert report.first is None
        (difference,) = report.floats.values()
        assert (difference.name, difference.elements) == ("output 0", 4 * 64 * 6)
        assert difference.largest < 1e-5
        if difference.differing:
            assert 0 < difference.ulps <= 64
            assert f"output 0: {difference.differing} of {difference.elements} elements differ, by" in str(report)
    assert fxq.verify(prepared, integer, [rows(64)], show_progress=False)


def test_a_difference_in_a_float_output_is_counted_in_steps() -> None:
    found = FloatDifference("output 0")
    one = torch.tensor([1.0, 0.0, -1.0, torch.nan, torch.inf])
    found.add(one, one.clone())
    assert (found.differing, found.largest, found.ulps) == (0, 0.0, 0)
    found.add(torch.tensor([1.0, -0.0]), torch.tensor([1.0 + 2**-22, 0.0]))
    assert (found.differing, found.largest, found.ulps) == (2, 2**-22, 2)
    found.add(torch.tensor([torch.nan]), torch.tensor([1.0]))
    assert found.largest == float("inf")


def plant(path: Path, consumer: Callable[[onnx.NodeProto], bool]) -> None:
    """Add a step to a bias that a node of the file reads."""
    model = onnx.load(path)
    name = next(node.input[1] for node in model.graph.node if consumer(node))
    cast = next((node for node in model.graph.node if name in node.output), None)
    tensor = next(t for t in model.graph.initializer if t.name == (name if cast is None else cast.input[0]))
    tensor.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(tensor) + np.array(2000, numpy_helper.to_array(tensor).dtype), tensor.name)
    )
    onnx.save(model, path)


@pytest.mark.parametrize("layer", ["a", "b"])
def test_a_fault_on_either_side_of_a_float_operator_is_located(layer: str, tmp_path: Path) -> None:
    integer = softmax_between()
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert fxq.verify(integer, path, [rows(16)], show_progress=False)
    plant(path, lambda node: node.op_type == "Add" and node.output[0].startswith(f"{layer}_linear"))
    report = fxq.verify(integer, path, [rows(16)], show_progress=False)
    assert not report
    assert report.first is not None
    assert report.first.name.startswith(layer)


# ---- one model with every operator and every width --------------------------------------------------------------------


class Many(nn.Module):
    """Operators beside each other, each behind an input of its own."""

    def __init__(self, models: list[nn.Module], counts: list[int]) -> None:
        super().__init__()
        self.models, self.counts = nn.ModuleList(models), counts

    def forward(self, *inputs: Tensor) -> list[Any]:
        found, start = [], 0
        for model, count in zip(self.models, self.counts, strict=True):
            found.append(model(*inputs[start : start + count]))
            start += count
        return found


WIDTHS = ("int4", "int8", "int16")


@pytest.mark.quick
@pytest.mark.parametrize("target", ["nash-e", "bayes-e"])
def test_operators_of_every_width_in_one_file(target: str, tmp_path: Path) -> None:
    """Every second operator is there twice, in two widths, so what a file names by too little would be shared wrongly."""
    torch.manual_seed(0)
    samples = list(BY_OPERATOR.values())[2 * (target == "bayes-e") :: 4]
    inputs = [inputs_of(sample, 2) for sample in samples for _ in range(2)]
    model = Many([model_of(sample) for sample in samples for _ in range(2)], [len(x) for x in inputs]).eval()
    config = fxq.QConfigMapping()
    for index in range(len(inputs)):
        width = WIDTHS[(index + index // 2) % 3] if target == "nash-e" else WIDTHS[1 + index % 2]
        weight = fxq.WeightConfig("int4") if index % 4 == 0 else fxq.WeightConfig()
        config = config.set_module_name(f"models.{index}", fxq.QConfig(fxq.ActivationConfig(width), weight))
    batch = tuple(value for values in inputs for value in values)
    integer = compiled(model, [batch], target, config).integer
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [batch], show_progress=False)
    assert report, str(report)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("target", ["bernoulli2", "bayes-e", "nash-e", "x86"])
def test_zeros_before_a_pool_are_zeros_for_every_runtime(target: str, opset: int, tmp_path: Path) -> None:
    """Runtimes make a padding of zeros the pool's own, which no maximum sees; here the values around it are negative."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)
            self.pools = nn.ModuleList(
                [nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2, padding=1), nn.AvgPool2d(3, 2), nn.AvgPool2d(3, 2, padding=1)]
            )
            with torch.no_grad():
                self.layer.bias.fill_(-1.0)

        def forward(self, x: Tensor) -> list[Tensor]:
            x = F.pad(self.layer(x), (0, 1, 0, 1))
            return [pool(x) for pool in self.pools] + [F.max_pool1d(F.pad(x.mean(2), (2, 0)), 3)]

    x = torch.randn(2, 3, 12, 12)
    integer = compiled(Model(), [x], target).integer
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", opset=opset), [x], show_progress=False)
    assert report, str(report)


def test_tables_of_one_length_and_two_dtypes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    wide = fxq.QConfig(fxq.ActivationConfig("int16"))
    mapping = fxq.QConfigMapping().set_module_name("3", wide).set_module_name("4", fxq.QConfig(fxq.ActivationConfig("int32")))
    integer = integer_of(model, rows(), qconfig=mapping)
    for style in ("exact", "fast"):
        report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style=style), [rows()], show_progress=False)
        assert report, str(report)


def test_modules_named_like_constants(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {f"constant_{i}": nn.Linear(8, 8) for i in range(3)}
    integer = integer_of(Net(lambda s, x: s.constant_2(s.constant_1(s.constant_0(x))), **layers), rows())
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [rows()], show_progress=False)


def test_modules_without_parameters_are_told_apart() -> None:
    one, other = nn.PairwiseDistance(1.0), nn.PairwiseDistance(2.0)
    assert repr(one) == repr(other)
    assert settings_of(one) != settings_of(other)
    assert settings_of(one) == settings_of(nn.PairwiseDistance(1.0))
    assert settings_of(nn.Linear(1, 1)) is None


# ---- outputs, names, dtypes -------------------------------------------------------------------------------------------

OUTPUTS: dict[str, Callable[..., Any]] = {
    "a constant": lambda s, x: (s.l(x), torch.ones(3)),
    "a buffer, twice": lambda s, x: (s.i, s.l(x), s.i),
    "a parameter": lambda s, x: (s.l(x), s.l.weight),
    "what is computed of a parameter": lambda s, x: (s.l(x), s.l.weight * 2),
    "nothing else": lambda s, x: torch.ones(3),
    "an input": lambda s, x: (x, s.l(x)),
    "one tensor twice": lambda s, x: (lambda y: (y, y))(s.l(x)),
    "None": lambda s, x: (s.l(x), None),
    "a number": lambda s, x: (s.l(x), 3),
    "a text": lambda s, x: {"y": s.l(x), "kind": "map"},
    "a size": lambda s, x: (s.l(x), x.shape[0]),
    "a comparison": lambda s, x: {"y": s.l(x) > 0},
    "another dtype": lambda s, x: [s.l(x).double(), s.l(x).half()],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_model_may_return(name: str, tmp_path: Path) -> None:
    integer = linear_of(OUTPUTS[name])
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [rows(), rows(1)], show_progress=False)
    assert report, str(report)


REFUSED_OUTPUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "no tensor": (lambda s, x: (s.l(x).shape[0], 3), "it returns no tensor"),
    "complex numbers": (lambda s, x: torch.fft.fft(s.l(x)), "it is complex64"),
    "bfloat16": (lambda s, x: s.l(x).bfloat16(), "it is bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED_OUTPUTS)
def test_a_file_cannot_return(name: str, tmp_path: Path) -> None:
    function, text = REFUSED_OUTPUTS[name]
    with pytest.raises(fxq.ExportError, match=text):
        fxq.export_onnx(linear_of(function), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


BAD_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "an inner tensor, for an output": ({"output_names": ["l"]}, "'l' in output_names is taken"),
    "an inner tensor, for an input": ({"input_names": ["l"]}, "'l' in input_names is taken"),
    "an initializer": ({"input_names": ["constant_0"]}, "'constant_0' in input_names is taken"),
    "the input's": ({"output_names": ["x"]}, "'x' in output_names is taken"),
    "too many": ({"output_names": ["a", "b"]}, "output_names has 2 names"),
    "none": ({"input_names": []}, "input_names has 0 names"),
    "an empty one": ({"output_names": [""]}, "is not usable"),
    "a text": ({"output_names": "y"}, "is not usable"),
    "a number": ({"input_names": [1]}, "is not usable"),
    "a set": ({"input_names": {"a"}}, "is not usable"),
}


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be_had(name: str, style: str, tmp_path: Path) -> None:
    options, text = BAD_NAMES[name]
    with pytest.raises(fxq.ConfigurationError, match=text):
        fxq.export_onnx(linear_of(lambda s, x: s.l(x)), tmp_path / "model.onnx", style=style, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_name_given_twice(tmp_path: Path) -> None:
    with pytest.raises(fxq.ConfigurationError, match="'y' more than once"):
        fxq.export_onnx(linear_of(lambda s, x: (s.l(x), s.i)), tmp_path / "model.onnx", output_names=["y", "y"])


def test_names_that_can_be_had(tmp_path: Path) -> None:
    integer = linear_of(lambda s, x: (s.l(x), s.i))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", input_names=("image",), output_names=["x", "l_dequantize_2"])
    assert [entry["name"] for entry in fxq.onnx_metadata(path)["outputs"]] == ["x", "l_dequantize_2"]
    assert fxq.verify(integer, path, [rows()], show_progress=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_constants_whose_dtype_was_changed(dtype: torch.dtype, tmp_path: Path) -> None:
    integer = linear_of(lambda s, x: s.l(x))
    for name, value in list(integer.named_buffers()):
        if value.is_floating_point():
            *parents, last = name.split(".")
            setattr(integer.get_submodule(".".join(parents)), last, value.to(dtype))
    with pytest.raises(fxq.ExportError, match="has lost the dtypes of its constants"):
        fxq.export_onnx(integer, tmp_path / "model.onnx")


# ---- float operators in the file --------------------------------------------------------------------------------------


def between(function: Callable[[Tensor], Tensor], outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Net(lambda s, x: s.b(function(s.a(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(outputs, 4, 1))


def recurrent(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layer = kind(8, 6, batch_first=True)
    return Net(lambda s, x: s.b(s.r(s.a(x.flatten(2)))[0]), a=nn.Linear(64, 8), r=layer, b=nn.Linear(6, 4))


class Windows(nn.Module):
    """Attention of five dimensions within windows, cut out and put back by permutes, as in Hiera and NesT."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.qkv, self.out = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.conv, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        blocks = x.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(2, 3).reshape(batch, -1, 4, channels)
        q, k, v = self.qkv(self.norm(blocks)).reshape(batch, 4, 4, 3, 2, 4).permute(3, 0, 4, 1, 2, 5).unbind(0)
        q = q.view(batch, 2, 4, 2, 2, 4).max(dim=3).values.repeat_interleave(2, 3)
        y = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 4, 1).reshape(batch, 4, 4, channels)
        x = (blocks + self.out(y)).reshape(batch, 2, 2, 2, 2, channels).transpose(2, 3).reshape(batch, height, width, channels)
        x = self.conv(x.permute(0, 3, 1, 2))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Flow(nn.Module):
    """A correlation volume that a loop samples at moving places, as in RAFT."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.context = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(3, 8, 3, 2, 1)
        self.motion, self.head = nn.Conv2d(11, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.chunk(self.features(torch.cat([x, x.flip(3)], 0)), 2, 0)
        batch, channels, height, width = one.shape
        volume = torch.matmul(one.view(batch, channels, -1).transpose(1, 2), two.view(batch, channels, -1))
        volume = volume.view(batch, height, width, 1, height, width).reshape(-1, 1, height, width)
        rows_, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        start = torch.stack([columns, rows_], 0).float()[None].repeat(batch, 1, 1, 1)
        steps = torch.linspace(-1, 1, 3)
        around = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).view(1, 3, 3, 2)
        place, state = start, torch.tanh(self.context(x))
        for _ in range(2):
            centre = place.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) + around
            across, down = centre.split([1, 1], dim=-1)
            grid = torch.cat([2 * across / (width - 1) - 1, 2 * down / (height - 1) - 1], -1)
            sampled = F.grid_sample(volume, grid, align_corners=True).view(batch, height, width, -1).permute(0, 3, 1, 2)
            state = F.relu(self.motion(torch.cat([sampled, place - start], 1))) + state
            place = place + self.head(state)
        return place - start


FLOAT_MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "joins": (lambda: between(lambda y: torch.hstack([torch.dstack([y, y])[:, :, 4:12], torch.vstack([y, -y]).chunk(2)[0]])[:, 2:6]), None),
    "a join of float tensors": (lambda: between(lambda y: torch.column_stack([y.asinh(), y])[:, 2:6]), None),
    "rnn": (lambda: recurrent(nn.RNN), None),
    "embedding bag": (
        lambda: Net(lambda s, i: s.b(s.e(i)), e=nn.EmbeddingBag(10, 8, mode="sum"), b=nn.Linear(8, 4)),
        torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(0)),
    ),
    "windows": (Windows, None),
    "flow": (Flow, None),
}


@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float_operators_beside_integer_parts(name: str, tmp_path: Path) -> None:
    make, given = FLOAT_MODELS[name]
    torch.manual_seed(0)
    batch = images() if given is None else given
    prepared, integer = compiled(make().eval(), [batch], "nash-e")
    assert fxq.verify(prepared, integer, [batch], show_progress=False)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    report = fxq.verify(integer, path, [batch, batch[:1]], show_progress=False)
    assert report, str(report)
    for difference in report.floats.values():
        assert difference.largest < 1e-3, str(report)


def test_joins_by_their_other_names_are_integer() -> None:
    integer = integer_of(between(lambda y: torch.hstack([y, y])[:, :4]), images())
    assert "none is left in float" in fxq.explain(integer)


def test_a_float_operator_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    integer = integer_of(between(torch.special.bessel_j0), images())
    with pytest.raises(fxq.ExportError, match="bessel_j0") as caught:
        fxq.export_onnx(integer, tmp_path / "model.onnx")
    text = str(caught.value)
    assert "test_onnx_files.py" in text
    assert "\x1b" not in text
    assert "bessel_j0" in text.split("because")[1]


class Islands(nn.Module):
    """Three parts between linear layers that bernoulli2, which has no 16-bit tensors, leaves in float; the second reads parameters."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.last = last
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.c(self.norm(self.b(self.a(x).log_softmax(1)))))


def islands(last: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    batch = torch.randn(4, 6)
    return integer_of(Islands(last), batch, "bernoulli2"), batch


def test_all_float_parts_are_written_by_one_call_of_the_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = list[object](), torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *given, **named: (calls.append(given), original(*given, **named))[1])
    integer, batch = islands(lambda y: y.log_softmax(1))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert len(calls) == 1
    assert len(FloatRegions(integer, 18).regions) == 3
    assert fxq.verify(integer, path, [batch, batch[:1]], show_progress=False)


def test_of_several_float_parts_the_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    integer, _ = islands(torch.special.bessel_j0)
    with pytest.raises(fxq.ExportError, match="bessel_j0"):
        fxq.export_onnx(integer, tmp_path / "model.onnx")


def test_a_model_of_parts_is_cut_also_where_graphs_inside_of_nodes_read_values() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 18]>
    parts (float[2] x, bool flag, float[2] y) => (float[2] one, float[2] two) <float[2] c = {1, 2}> {
        one = Abs(x)
        two = If (flag) <
            then_branch = then () => (float[2] r) { r = Add(c, OPERAND) },
            else_branch = other () => (float[2] r) { r = Neg(c) }>
    }
    """
    one, two = split(onnx.parser.parse_model(text.replace("OPERAND", "y")), [(1, 1), (2, 1)])
    assert [node.op_type for node in one.graph.node] == ["Abs"]
    assert [tensor.name for tensor in two.graph.initializer] == ["c"]
    onnx.checker.check_model(two)
    with pytest.raises(ValueError, match="'x', which is an input of another"):
        split(onnx.parser.parse_model(text.replace("OPERAND", "x")), [(1, 1), (2, 1)])


# ---- metadata ---------------------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    """An input that nothing reads, a mask, and two images, of which the second is read first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, unused: Tensor, mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(mask, self.layer(y).relu(), self.layer(x)).tanh()


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_a_file_of_integers_takes_every_input_in_the_order_of_the_model(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 2), torch.rand(4, 3) > 0.5, torch.randn(4, 3), torch.randn(4, 3))
    result = fxq.quantize(Chosen(), [batch], "nash-e", show_progress=False)
    path = fxq.export_onnx(result.integer, tmp_path / "model.onnx", style=style, io="integer")
    session = onnxruntime.InferenceSession(path)
    assert [entry.name for entry in session.get_inputs()] == ["unused", "mask", "x", "y"]
    assert [entry["dtype"] for entry in fxq.onnx_metadata(path)["inputs"]] == ["float", "bool", "int8", "int8"]
    values = next(fxq.record(result.integer, [batch]))
    integers = {name: values[f"{name}_quantize"].to(torch.int8) for name in ("x", "y")}
    feeds = {"unused": batch[0], "mask": batch[1], **integers}
    found = session.run(None, {name: value.numpy() for name, value in feeds.items()})[0]
    assert torch.equal(torch.from_numpy(found).long(), values["tanh"].long())


@needs_vnni
@pytest.mark.parametrize("width", ["int4", "int8", "int16", "int32"])
@pytest.mark.parametrize("io", ["float", "integer"])
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_metadata_is_true_of_what_a_file_takes_and_returns(style: str, io: str, width: str, tmp_path: Path) -> None:
    if (style, io, width) == ("qdq", "integer", "int32"):
        return  # refused, as another test shows
    torch.manual_seed(0)
    last = fxq.QConfigMapping().set_module_name("b", fxq.QConfig(fxq.ActivationConfig(width)))
    integer = integer_of(
        Net(lambda s, x: (s.b(F.relu(s.a(x))), F.relu(s.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 3)), rows(), "nash-e", last
    )
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, io=io, opset=21, output_names=["scores", "features"])
    said = fxq.onnx_metadata(path)
    session = onnxruntime.InferenceSession(str(path))
    (taken,) = said["inputs"]
    scale = said["tensors"][taken["tensor"]]["scale"]
    quantized = torch.clamp(torch.round(rows() / scale), -128, 127)
    feed = rows().numpy() if io == "float" else _stored(quantized, said["tensors"][taken["tensor"]])
    assert session.get_inputs()[0].type == f"tensor({taken['dtype']})"
    assert feed.dtype == helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, taken["dtype"].upper()))
    for entry, found, wanted in zip(said["outputs"], session.run(None, {taken["name"]: feed}), integer(rows()), strict=True):
        assert found.dtype == helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, entry["dtype"].upper()))
        assert list(found.shape[1:]) == entry["shape"][1:]
        real = torch.from_numpy(found)
        if io == "integer":
            described = said["tensors"][entry["tensor"]]
            assert str(found.dtype) == described["storage"]
            known = torch.tensor(described["scale"])
            real = (real.to(torch.int64) - described["zero_point"]).float() * known
        if style == "qdq":
            assert (real - wanted).abs().max() <= 0.1 * wanted.abs().max()
        else:
            assert same_bytes(real, wanted)


def _stored(integers: Tensor, entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    return (integers + entry["zero_point"]).numpy().astype(entry["storage"])


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, str]], object]:
    """A change of the entry fxquant.tensors."""

    def edit(entries: dict[str, str]) -> None:
        tensors = json.loads(entries["tensors"])
        change(tensors)
        entries["tensors"] = json.dumps(tensors)

    return edit


def put(name: str, value: str) -> Callable[[dict[str, str]], object]:
    return lambda entries: entries.update({name: value})


TAMPERED: dict[str, tuple[Callable[[dict[str, str]], object], str]] = {
    **{
        f"no {name}": (lambda entries, name=name: entries.pop(name), name)
        for name in ("style", "io", "target", "version", "inputs", "outputs")
    },
    "no tensors": (lambda entries: entries.pop("tensors"), "was not written by fxquant"),
    "no JSON": (put("tensors", "{"), "Expecting property name"),
    "no JSON of inputs": (put("inputs", "x"), "Expecting value"),
    "deep JSON": (put("float", "[" * 100_000), ""),
    "a list of tensors": (put("tensors", "[]"), "fxquant.tensors is not an object"),
    "another style": (put("style", "qqd"), "fxquant.style is 'qqd'"),
    "another io": (put("io", ""), "fxquant.io is ''"),
    "a tensor that is a number": (edited(lambda t: t.update(l=3)), "what kind of value 'l' is"),
    "an unknown kind": (edited(lambda t: t["l"].update(kind="odd")), "what kind of value 'l' is"),
    "a kind that is a list": (edited(lambda t: t["l"].update(kind=[])), "what kind of value 'l' is"),
    "a tensor that is not there": (edited(lambda t: t.update(gone=t["l"])), "'gone', a value that the graph does not have"),
    "a scale that is a text": (edited(lambda t: t["l"].update(scale="1")), "the scale of 'l'"),
    "a scale of zero": (edited(lambda t: t["l"].update(scale=0)), "the scale of 'l'"),
    "a scale that is no number": (edited(lambda t: t["l"].update(scale=float("nan"))), "the scale of 'l'"),
    "an enormous scale": (edited(lambda t: t["l"].update(scale=10**400)), ""),
    "no scales": (edited(lambda t: t["l"].update(scale=[])), "the scale of 'l'"),
    "an axis from the front": (edited(lambda t: t["l"].update(scale=[1.0, 1.0], axis=0)), "the axis of the scales of 'l'"),
    "an unknown dtype": (edited(lambda t: t["l"].update(dtype="int9")), "the dtype of 'l'"),
    "an unknown storage": (edited(lambda t: t["l"].update(storage="float")), "the storage of 'l'"),
    "no storage": (edited(lambda t: t["l"].pop("storage")), "the storage of 'l'"),
    "a zero point that is none": (edited(lambda t: t["l"].update(zero_point=None)), "the zero point of 'l'"),
    "inputs of another model": (put("inputs", '[{"name": "y", "dtype": "float", "shape": []}]'), "fxquant.inputs names"),
    "no outputs": (put("outputs", "[]"), "fxquant.outputs names"),
    "outputs that are texts": (put("outputs", '["y"]'), "fxquant.outputs is not a list"),
    "an output of no tensor": (
        lambda entries: entries.update(outputs=entries["outputs"].replace('"tensor": "l"', '"tensor": ["l"]')),
        "that is not described",
    ),
    "reasons that are numbers": (put("float", '{"a": 1}'), "fxquant.float is not an object of texts"),
    "options in a list": (put("session_options", "[]"), "fxquant.session_options is not an object"),
    "an unknown option": (put("session_options", '{"session.use_env_allocators": "1"}'), "which fxquant never writes"),
    "an option's other value": (put("session_options", '{"session.x64quantprecision": "0"}'), "which fxquant never writes"),
    "an option that loads": (put("session_options_without_vnni", '{"session.load_model_format": "ORT"}'), "which fxquant never writes"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[fx.GraphModule, Path]:
    integer = linear_of(lambda s, x: s.l(x))
    return integer, fxq.export_onnx(integer, tmp_path_factory.mktemp("written") / "model.onnx")


def tamper(path: Path, copy: Path, change: Callable[[dict[str, str]], object]) -> Path:
    model = onnx.load(path)
    entries = {entry.key.removeprefix("fxquant."): entry.value for entry in model.metadata_props}
    change(entries)
    del model.metadata_props[:]
    helper.set_model_props(model, {f"fxquant.{name}": value for name, value in entries.items()})
    onnx.save(model, copy)
    return copy


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_metadata(name: str, written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    integer, path = written
    change, text = TAMPERED[name]
    copy = tamper(path, tmp_path / "model.onnx", change)
    for use in (lambda: fxq.verify(integer, copy, [rows()], show_progress=False), lambda: fxq.onnx_metadata(copy)):
        with pytest.raises(fxq.ExportError) as caught:
            use()
        assert text in str(caught.value)
        assert "fxq.export_onnx" in str(caught.value)


def test_the_file_of_another_version_is_read_or_its_version_is_told(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    integer, path = written
    newer = tamper(path, tmp_path / "newer.onnx", put("version", "99.0"))
    assert fxq.verify(integer, newer, [rows()], show_progress=False)
    with pytest.raises(fxq.ExportError, match=r"written by fxquant 99\.0"):
        fxq.onnx_metadata(tamper(newer, newer, put("style", "newest")))


def test_a_known_session_option_is_taken(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    copy = tamper(written[1], tmp_path / "model.onnx", put("session_options", '{"session.x64quantprecision": "1"}'))
    assert fxq.verify(written[0], copy, [rows()], show_progress=False)


def test_a_file_of_other_inputs_is_another_models(written: tuple[fx.GraphModule, Path]) -> None:
    other = integer_of(Net(lambda s, x: (s.l(x), x), l=nn.Linear(8, 4)), rows())
    with pytest.raises(fxq.ExportError, match="it has 1 inputs and 1 outputs, and this model has 1 and 2"):
        fxq.verify(other, written[1], [rows()], show_progress=False)


def test_a_graph_that_cannot_be_run_is_an_error_of_ours(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    model = onnx.load(written[1])
    model.graph.node[0].domain = "nobody"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(fxq.ExportError, match="cannot be run"):
        fxq.verify(written[0], tmp_path / "model.onnx", [rows()], show_progress=False)


def test_pytorchs_table_of_translations_is_built_once_and_left_as_it_was() -> None:
    registry = pytest.importorskip("torch.onnx._internal.exporter._registration").ONNXRegistry
    before = registry.__dict__["from_torchlib"]
    with built_once():
        first = registry.from_torchlib()
        functions = {operator: list(known) for operator, known in first.functions.items()}
        first.functions.clear()
        second = registry.from_torchlib()
    assert second is not first
    assert second.functions == functions
    assert functions
    assert registry.__dict__["from_torchlib"] is before


def test_a_tensor_without_elements_is_flattened(tmp_path: Path) -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(x), torch.sin(x)[:, :0].flatten(1)

    result = fxq.quantize(Empty(), [torch.randn(2, 3, 4, 4)], qconfig=fxq.QConfigMapping(default=None), show_progress=False)
    path = result.export(tmp_path / "empty.onnx")
    found = OnnxModel(path).runner("onnxruntime", [], [])({"x": torch.randn(5, 3, 4, 4)})
    assert [tuple(value.shape) for value in found.values()] == [(5, 3, 4, 4), (5, 0)]
