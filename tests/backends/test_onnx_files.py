"""Inputs of export and answers of verify: outputs of every kind, names, dtypes, float operators, signed zeros, tampered metadata."""

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
from fxquant.backends.onnx.export import STYLES
from fxquant.backends.onnx.float_export import agrees, built_once, settings_of
from fxquant.backends.onnx.runtime import OnnxModel, text
from fxquant.backends.onnx.writer import value_info
from fxquant.ir.graph import TensorFact
from fxquant.reporting import inspection
from tests.ops.test_operators import BY_OPERATOR, Pack, inputs_of
from tests.shared.contract import assert_train_is_validate, compiled, needs_vnni, same_bytes
from tests.shared.networks import Network, members
from tests.shared.onnx_files import assert_verified, batch, exported, integer_of, known, linear_of, rows


# ---- functions of a file, which few runtimes read -------------------------------------------------------------------
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_a_file_has_functions_only_where_they_are_asked_for(target: str, tmp_path: Path) -> None:
    integer = known("silu", target)
    for style in ("exact", "fast", "qdq"):
        model = onnx.load(fxq.export_onnx(integer, tmp_path / f"{style}.onnx", style))
        assert (len(model.functions), [entry.domain for entry in model.opset_import]) == (0, [""])
    newest = STYLES["exact"].opsets[-1]
    exported(integer, tmp_path / "newest.onnx", style="exact", opset=newest)
    path = exported(integer, tmp_path / "called.onnx", style="exact", functions=True, opset=newest)
    called = onnx.load(path)
    assert {entry.domain: entry.version for entry in called.opset_import} == {"": newest, "fxquant": 1}
    for function in called.functions:
        assert f"function {function.name}(" in text(OnnxModel(path))
    assert (
        {node.op_type for node in called.graph.node if node.domain == "fxquant"}
        == {function.name for function in called.functions}
        != set()
    )
    with pytest.raises(fxq.errors.ConfigurationError, match="functions cannot be written in style 'qdq'"):
        fxq.export_onnx(integer, tmp_path / "qdq.onnx", "qdq", functions=True)


# ---- signed zeros -----------------------------------------------------------------------------------------------------
@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", ["nash-e", "nash-m", "x86", "qnnpack", "bayes-e", "bernoulli", "bernoulli2"])
def test_no_form_gives_a_negative_zero(target: str, tmp_path: Path) -> None:
    net = Network(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1, bias=False)).eval()
    (prepared, integer), inputs = compiled(net, [batch(2)], target), batch(8, seed=2)
    wanted = integer(inputs)
    assert not torch.signbit(wanted[wanted == 0]).any()
    assert (wanted == 0).any()
    fxq.set_state(prepared, fxq.State.VALIDATE)
    assert same_bytes(prepared(inputs), wanted)
    for _, run in OnnxModel(fxq.export_onnx(integer, tmp_path / "model.onnx")).runners([]):
        assert same_bytes(next(iter(run({"x": inputs}).values())), wanted)
    assert_train_is_validate(prepared, inputs)
    assert same_bytes(prepared(inputs), wanted)


def test_what_a_float_operator_makes_of_zeros_is_equal() -> None:
    net = Network(lambda s, x: (s.a(x) - 0.0).relu().double() ** -1.0, a=nn.Conv2d(3, 4, 1)).eval()
    assert fxq.verify(*compiled(net, [batch(8)], "nash-e"), [batch(8)])


ZEROS, NAN = torch.zeros(2), torch.tensor([torch.nan, 1.0])


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        (ZEROS, -ZEROS, 2), (NAN, NAN.clone(), 0), (ZEROS, ZEROS.double(), 2), (torch.tensor([1, 2]), torch.tensor([1, 3]), 1),
        (torch.complex(ZEROS, ZEROS), torch.complex(ZEROS, -ZEROS), 2),
    ],
    ids=["signs", "NaN", "dtypes", "integers", "complex numbers"],
)  # fmt: skip
def test_verify_compares_bytes(one: Tensor, other: Tensor, count: int) -> None:
    assert differing(one, other) == count


# ---- float operators in the report ------------------------------------------------------------------------------------
def test_a_model_that_ends_in_a_float_operator_is_equal(tmp_path: Path) -> None:
    """A softmax over the batch is rounded in a way of its own by every runtime; the integers before it are equal."""
    prepared, integer = compiled(Network(lambda s, x: s.a(x).softmax(0), a=nn.Linear(8, 6)).eval(), [rows(64)], "bayes-e")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    for form in (integer, prepared):
        report = assert_verified(form, path, [rows(64)])
        assert report.first is None
        (difference,) = report.floats.values()
        assert (difference.name, difference.elements) == ("output 0", 4 * 64 * 6)
        assert difference.largest < 1e-5
        if difference.differing:
            assert 0 < difference.ulps <= 64
            assert f"output 0: {difference.differing} of {difference.elements} elements differ, by" in str(report)
    assert fxq.verify(prepared, integer, [rows(64)])


def test_a_difference_in_a_float_output_is_counted_in_steps() -> None:
    difference = FloatDifference("output 0")
    one = torch.tensor([1.0, 0.0, -1.0, torch.nan, torch.inf])
    difference.add(one, one.clone())
    assert (difference.differing, difference.largest, difference.ulps) == (0, 0.0, 0)
    difference.add(torch.tensor([1.0, -0.0]), torch.tensor([1.0 + 2**-22, 0.0]))
    assert (difference.differing, difference.largest, difference.ulps) == (2, 2**-22, 2)
    difference.add(torch.tensor([torch.nan]), torch.tensor([1.0]))
    assert difference.largest == float("inf")


def plant(path: Path, consumer: Callable[[onnx.NodeProto], bool]) -> None:
    """Add a step to a bias that a node of the file reads."""
    model = onnx.load(path)
    name = next(node.input[1] for node in model.graph.node if consumer(node))
    cast = next((node for node in model.graph.node if name in node.output), None)
    tensor = next(t for t in model.graph.initializer if t.name == (name if cast is None else cast.input[0]))
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(values + np.array(2000, values.dtype), tensor.name))
    onnx.save(model, path)


@pytest.mark.parametrize("layer", ["a", "b"])
def test_a_fault_on_either_side_of_a_float_operator_is_located(layer: str, tmp_path: Path) -> None:
    forward = lambda s, x: (s.b(y := torch.logaddexp(s.a(x), torch.atan(s.a(x)))), y.asinh())  # noqa: E731
    integer = integer_of(Network(forward, a=nn.Linear(8, 6), b=nn.Linear(6, 4)), rows(32), "bayes-e")
    path = exported(integer, tmp_path / "model.onnx", [rows(16)])
    plant(path, lambda node: node.op_type == "Add" and node.output[0].startswith(f"{layer}_linear"))
    report = fxq.verify(integer, path, [rows(16)])
    assert not report
    assert report.first.name.startswith(layer)


# ---- one model with every operator and every width --------------------------------------------------------------------
WIDTHS = ("int4", "int8", "int16")


@pytest.mark.parametrize("target", [pytest.param("nash-e", marks=pytest.mark.quick), pytest.param("bayes-e", marks=pytest.mark.nightly)])
def test_operators_of_every_width_in_one_file(target: str, tmp_path: Path) -> None:
    """Every fourth operator is there twice, in two widths, so what a file names by too little would be shared wrongly."""
    samples = list(BY_OPERATOR.values())[4 * (target == "bayes-e") :: 8]
    twice = [sample for sample in samples for _ in range(2)]
    inputs, model = [inputs_of(sample, 2) for sample in twice], Pack(twice).eval()
    config = fxq.QConfigMapping()
    for index in range(len(inputs)):
        width = WIDTHS[(index + index // 2) % 3] if target == "nash-e" else WIDTHS[1 + index % 2]
        weight = fxq.WeightConfig("int4") if index % 4 == 0 else fxq.WeightConfig()
        config = config.set_module_name(f"models.{index}", fxq.QConfig(fxq.ActivationConfig(width), weight))
    batches_given = tuple(value for values in inputs for value in values)
    exported(compiled(model, [batches_given], target, config).integer, tmp_path / "model.onnx", [batches_given])


@pytest.mark.sweep
@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("target", ["bernoulli2", "bayes-e", "nash-e", "x86"])
def test_zeros_before_a_pool_are_zeros_for_every_runtime(target: str, opset: int, tmp_path: Path) -> None:
    """Runtimes make a padding of zeros the pool's own, which no maximum sees; here the values around it are negative."""
    pools = nn.ModuleList([nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2, padding=1), nn.AvgPool2d(3, 2), nn.AvgPool2d(3, 2, padding=1)])

    def forward(s: Any, x: Tensor) -> list[Tensor]:
        x = F.pad(s.layer(x), (0, 1, 0, 1))
        return [pool(x) for pool in s.pools] + [F.max_pool1d(F.pad(x.mean(2), (2, 0)), 3)]

    model, x = Network(forward, layer=nn.Conv2d(3, 4, 3), pools=pools), torch.randn(2, 3, 12, 12)
    nn.init.constant_(model.layer.bias, -1.0)
    exported(integer_of(model, x, target), tmp_path / "model.onnx", [x], opset=opset)


@pytest.mark.parametrize("style", ["exact", "fast"])
def test_tables_of_one_length_and_two_dtypes(style: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    wide = fxq.QConfig(fxq.ActivationConfig("int16"))
    mapping = fxq.QConfigMapping().set_module_name("3", wide).set_module_name("4", fxq.QConfig(fxq.ActivationConfig("int32")))
    exported(integer_of(model, rows(), qconfig=mapping), tmp_path / "model.onnx", [rows()], style=style)


def test_modules_named_like_constants(tmp_path: Path) -> None:
    layers = {f"constant_{i}": nn.Linear(8, 8) for i in range(3)}
    integer = integer_of(Network(lambda s, x: s.constant_2(s.constant_1(s.constant_0(x))), **layers), rows())
    exported(integer, tmp_path / "model.onnx", [rows()])


def test_modules_without_parameters_are_told_apart() -> None:
    one, other = nn.PairwiseDistance(1.0), nn.PairwiseDistance(2.0)
    assert repr(one) == repr(other)
    assert settings_of(one) != settings_of(other)
    assert settings_of(one) == settings_of(nn.PairwiseDistance(1.0))
    assert settings_of(nn.Linear(1, 1)) is None


# ---- outputs, names, dtypes -------------------------------------------------------------------------------------------
OUTPUTS: dict[str, Callable[..., Any]] = {
    "a constant": lambda s, x: (s.l(x), torch.ones(3)), "a buffer, twice": lambda s, x: (s.i, s.l(x), s.i),
    "a parameter": lambda s, x: (s.l(x), s.l.weight), "what is computed of a parameter": lambda s, x: (s.l(x), s.l.weight * 2),
    "nothing else": lambda s, x: torch.ones(3), "an input": lambda s, x: (x, s.l(x)),
    "one tensor twice": lambda s, x: (lambda y: (y, y))(s.l(x)), "None": lambda s, x: (s.l(x), None), "a number": lambda s, x: (s.l(x), 3),
    "a text": lambda s, x: {"y": s.l(x), "kind": "map"}, "a size": lambda s, x: (s.l(x), x.shape[0]),
    "a comparison": lambda s, x: {"y": s.l(x) > 0}, "another dtype": lambda s, x: [s.l(x).double(), s.l(x).half()],
}  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_model_may_return(name: str, tmp_path: Path) -> None:
    exported(linear_of(OUTPUTS[name]), tmp_path / "model.onnx", [rows(), rows(1)])


REFUSED_OUTPUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "no tensor": (lambda s, x: (s.l(x).shape[0], 3), "it returns no tensor"),
    "complex numbers": (lambda s, x: torch.fft.fft(s.l(x)), "it is complex64"),
    "bfloat16": (lambda s, x: s.l(x).bfloat16(), "it is bfloat16"),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", REFUSED_OUTPUTS)
def test_a_file_cannot_return(name: str, tmp_path: Path) -> None:
    function, text = REFUSED_OUTPUTS[name]
    with pytest.raises(fxq.errors.ExportError, match=text):
        fxq.export_onnx(linear_of(function), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


BAD_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "an inner tensor of integers": ({"input_names": ["l"], "io": "integer"}, "'l' in input_names is taken"),
    "the input's": ({"output_names": ["y", "x"]}, "'x' in output_names is taken"),
    "too many": ({"output_names": ["a", "b", "c"]}, "output_names has 3 names"),
    "none": ({"input_names": []}, "input_names has 0 names"),
    "an empty one": ({"output_names": ["y", ""]}, "is not usable"),
    "a text": ({"output_names": "y"}, "is not usable"),
    "a number": ({"input_names": [1]}, "is not usable"),
    "a set": ({"input_names": {"a"}}, "is not usable"),
    "one twice": ({"output_names": ["y", "y"]}, "'y' more than once"),
}


@pytest.fixture(scope="module")
def pair() -> fx.GraphModule:
    """A model of two outputs."""
    return linear_of(lambda s, x: (s.l(x), s.i))


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be_had(name: str, style: str, pair: fx.GraphModule, tmp_path: Path) -> None:
    options, text = BAD_NAMES[name]
    with pytest.raises(fxq.errors.ConfigurationError, match=text):
        fxq.export_onnx(pair, tmp_path / "model.onnx", style=style, **options)
    assert list(tmp_path.iterdir()) == []


INNER_NAMES: dict[str, dict[str, Any]] = {
    "no inner tensor's": {"input_names": ("image",), "output_names": ["x", "l_dequantize_2"]},
    "a layer's, for its output": {"output_names": ["l", "i"]},
    "another layer's": {"output_names": ["i", "l"]},
    "another output's": {"output_names": ["i_dequantize", "l_dequantize"]},
    "a layer's, for an input": {"input_names": ["l"]},
    "a layer's and an output's": {"input_names": ["l_dequantize"], "output_names": ["l", "x_quantize"]},
    "initializers'": {"input_names": ["constant_0"], "output_names": ["constant_1", "y"]},
    "what an inner tensor would be called": {"input_names": ["l_inner"], "output_names": ["l", "y"]},
    "nodes inside": {"output_names": ["l_dequantize/Cast_1", "l_convolution"]},
}


@pytest.mark.sweep
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
@pytest.mark.parametrize("name", INNER_NAMES)
def test_the_names_that_a_user_gives_win(name: str, style: str, pair: fx.GraphModule, tmp_path: Path) -> None:
    plain = OnnxModel(fxq.export_onnx(pair, tmp_path / "plain.onnx", style=style))
    opened = OnnxModel(fxq.export_onnx(pair, tmp_path / "model.onnx", style=style, **INNER_NAMES[name]))
    assert opened.output_names == list(INNER_NAMES[name].get("output_names", opened.output_names))
    assert opened.input_names == list(INNER_NAMES[name].get("input_names", ["x"]))
    report, wanted = (fxq.verify(pair, each.path, [rows()]) for each in (opened, plain))
    assert bool(report) == bool(wanted) == (style != "qdq")
    assert report.names == wanted.names or style == "qdq"  # every inner tensor is compared, whatever the file calls it
    assert [*opened.tensors] == [*plain.tensors]
    assert inspection.read(opened.path).rows == inspection.read(plain.path).rows


def test_an_inner_tensor_keeps_its_name_where_the_compiler_needs_it(pair: fx.GraphModule, tmp_path: Path) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=r"'l' in output_names is taken[\s\S]*compiled program"):
        fxq.board.export_horizon(pair, tmp_path, output_names=["l", "y"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_constants_whose_dtype_was_changed(dtype: torch.dtype, tmp_path: Path) -> None:
    integer = linear_of(lambda s, x: s.l(x))
    for name, value in list(integer.named_buffers()):
        if value.is_floating_point():
            *parents, last = name.split(".")
            setattr(integer.get_submodule(".".join(parents)), last, value.to(dtype))
    for write in (fxq.export_onnx, fxq.export.export_c, fxq.export.export_pt2):
        with pytest.raises(
            fxq.errors.ExportError, match=r"it is f(16|64)\[\], and declared as f32\[\][\s\S]*remedy[\s\S]*fxq.convert\(prepared\) again"
        ):
            write(integer, tmp_path / "model.c")


# ---- PyTorch's exporter ----------------------------------------------------------------------------------------------
def test_pytorchs_table_of_translations_is_built_once_and_left_as_it_was() -> None:
    registry = pytest.importorskip("torch.onnx._internal.exporter._registration").ONNXRegistry
    before = registry.__dict__["from_torchlib"]
    with built_once():
        first = registry.from_torchlib()
        functions = {operator: list(forms) for operator, forms in first.functions.items()}
        first.functions.clear()
        second = registry.from_torchlib()
    assert second is not first
    assert second.functions == functions
    assert functions
    assert registry.__dict__["from_torchlib"] is before


def test_a_tensor_without_elements_is_flattened(tmp_path: Path) -> None:
    empty = Network(lambda s, x: (torch.relu(x), torch.sin(x)[:, :0].flatten(1)))
    result = fxq.quantize(empty, [torch.randn(2, 3, 4, 4)], qconfig=fxq.QConfigMapping(default=None))
    path = result.export(tmp_path / "empty.onnx")
    output = OnnxModel(path).runner("onnxruntime", [], [])({"x": torch.randn(5, 3, 4, 4)})
    assert [tuple(value.shape) for value in output.values()] == [(5, 3, 4, 4), (5, 0)]


@pytest.mark.parametrize(("module", "right"), [(nn.ReLU(), True), (nn.Sigmoid(), False)])
def test_a_part_that_computes_other_numbers_does_not_agree(module: nn.Module, right: bool) -> None:
    ends = [value_info(name, torch.float32, (2, 3)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "part", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    assert agrees(model, fx.symbolic_trace(module), [TensorFact((2, 3), torch.float32)]) == right


@members(lambda: dict(layer=nn.Linear(3, 3)))
def Chosen(self, unused: Tensor, mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """An input that nothing reads, a mask, and two images, of which the second is read first."""
    return torch.where(mask, self.layer(y).relu(), self.layer(x)).tanh()


@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_a_file_of_integers_takes_every_input_in_the_order_of_the_model(style: str, tmp_path: Path) -> None:
    batch = (torch.randn(4, 2), torch.rand(4, 3) > 0.5, torch.randn(4, 3), torch.randn(4, 3))
    result = fxq.quantize(Chosen(), [batch], "nash-e")
    path = fxq.export_onnx(result.integer, tmp_path / "model.onnx", style=style, io="integer")
    session = onnxruntime.InferenceSession(path)
    assert [entry.name for entry in session.get_inputs()] == ["unused", "mask", "x", "y"]
    assert [entry["dtype"] for entry in fxq.export.onnx_metadata(path)["inputs"]] == ["float", "bool", "int8", "int8"]
    values = next(fxq.inspect.record(result.integer, [batch]))
    integers = {name: values[f"{name}_quantize"].to(torch.int8) for name in ("x", "y")}
    feeds = {"unused": batch[0], "mask": batch[1], **integers}
    output = session.run(None, {name: value.numpy() for name, value in feeds.items()})[0]
    assert torch.equal(torch.from_numpy(output).long(), values["tanh"].long())


@pytest.mark.sweep
@needs_vnni
@pytest.mark.parametrize("width", ["int4", "int8", "int16", "int32"])
@pytest.mark.parametrize("io", ["float", "integer"])
@pytest.mark.parametrize("style", ["exact", "fast", "qdq"])
def test_metadata_is_true_of_what_a_file_takes_and_returns(style: str, io: str, width: str, tmp_path: Path) -> None:
    if (style, io, width) == ("qdq", "integer", "int32"):
        return  # refused, as another test shows
    last = fxq.QConfigMapping().set_module_name("b", fxq.QConfig(fxq.ActivationConfig(width)))
    model = Network(lambda s, x: (s.b(F.relu(s.a(x))), F.relu(s.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 3))
    integer = integer_of(model, rows(), "nash-e", last)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, io=io, opset=21, output_names=["scores", "features"])
    said = fxq.export.onnx_metadata(path)
    session = onnxruntime.InferenceSession(str(path))
    (taken,) = said["inputs"]
    grid = said["tensors"][taken["tensor"]]
    quantized = torch.clamp(torch.round(rows() / grid["scale"]), -128, 127) + grid["zero_point"]
    feed = rows().numpy() if io == "float" else quantized.numpy().astype(grid["storage"])
    assert session.get_inputs()[0].type == f"tensor({taken['dtype']})"
    assert feed.dtype == helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, taken["dtype"].upper()))
    for entry, actual, wanted in zip(said["outputs"], session.run(None, {taken["name"]: feed}), integer(rows()), strict=True):
        assert actual.dtype == helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, entry["dtype"].upper()))
        assert list(actual.shape[1:]) == entry["shape"][1:]
        real = torch.from_numpy(actual)
        if io == "integer":
            described = said["tensors"][entry["tensor"]]
            assert str(actual.dtype) == described["storage"]
            scales = torch.tensor(described["scale"])
            real = (real.to(torch.int64) - described["zero_point"]).float() * scales
        if style == "qdq":
            assert (real - wanted).abs().max() <= 0.1 * wanted.abs().max()
        else:
            assert same_bytes(real, wanted)


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
    "a scale of NaN": (edited(lambda t: t["l"].update(scale=float("nan"))), "the scale of 'l'"),
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
    for use in (lambda: fxq.verify(integer, copy, [rows()]), lambda: fxq.export.onnx_metadata(copy)):
        with pytest.raises(fxq.errors.ExportError) as caught:
            use()
        assert text in str(caught.value)
        assert "fxq.export_onnx" in str(caught.value)


def test_the_file_of_another_version_is_read_or_its_version_is_told(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    integer, path = written
    newer = tamper(path, tmp_path / "newer.onnx", put("version", "99.0"))
    assert fxq.verify(integer, newer, [rows()])
    with pytest.raises(fxq.errors.ExportError, match=r"written by fxquant 99\.0"):
        fxq.export.onnx_metadata(tamper(newer, newer, put("style", "newest")))


def test_a_file_of_other_inputs_is_another_models(written: tuple[fx.GraphModule, Path]) -> None:
    other = integer_of(Network(lambda s, x: (s.l(x), x), l=nn.Linear(8, 4)), rows())
    with pytest.raises(fxq.errors.ExportError, match="it has 1 inputs and 1 outputs, and this model has 1 and 2"):
        fxq.verify(other, written[1], [rows()])


def test_a_graph_that_cannot_be_run_is_an_error_of_ours(written: tuple[fx.GraphModule, Path], tmp_path: Path) -> None:
    model = onnx.load(written[1])
    model.graph.node[0].domain = "nobody"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(fxq.errors.ExportError, match="cannot be run"):
        fxq.verify(written[0], tmp_path / "model.onnx", [rows()])
