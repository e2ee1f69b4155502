"""`dynamic_shapes` says which dimension of each input is the batch: that is the one that varies, everywhere."""

import copy
import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

import fxquant as fxq
from fxquant.accuracy import BY_SAMPLES
from fxquant.accuracy.step import Run
from fxquant.analysis.sample import batches_from
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import fact
from tests.backends import test_reference_c
from tests.shared import contract
from tests.shared.networks import Network, held, members

BATCH = Dim("batch")


def steps(m: Any, x: Tensor) -> Tensor:
    """A recurrent layer over sequences that have their steps in front: (T, B, 6)."""
    return m.head(m.cells(x)[0])


def attention(m: Any, x: Tensor) -> Tensor:
    """Attention over sequences that have their steps in front, with a position for each step."""
    x = m.project(x) + m.positions
    return x + m.attention(x, x, x, need_weights=False)[0]


@members(lambda: dict(cells=nn.LSTM(6, 4, 2), head=nn.Linear(4, 3)))
def States(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A recurrent layer that takes its states, (layers, B, 4), and returns the next ones."""
    y, (h, c) = self.cells(x, (h, c))
    return self.head(y), h, c


def inputs(name: str, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [[5, batch, 6], *([[2, batch, 4]] * 2 if name == "states" else [])]
    return tuple(torch.rand(size, generator=generator) * 2 - 1 for size in sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Network(steps, cells=nn.LSTM(6, 4), head=nn.Linear(4, 3)),
    "attention": lambda: Network(
        attention, project=nn.Linear(6, 8), attention=nn.MultiheadAttention(8, 2), positions=nn.Parameter(torch.randn(5, 1, 8))
    ),
    "states": States,
}
SHAPES: dict[str, Any] = {
    "lstm": ({1: BATCH},),
    "attention": {"x": (None, Dim.DYNAMIC, None)},
    "states": ({1: BATCH}, {1: BATCH}, {1: BATCH}),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


@functools.cache
def compiled(name: str, target: str = "bayes-e") -> contract.Compiled:
    """A model that tests leave as it is."""
    batches = [inputs(name, size, seed) for seed, size in enumerate((4, 4, 3))]
    return contract.compiled(made(name), batches, target, dynamic_shapes=SHAPES[name])


def input_shapes(graph: fx.GraphModule) -> list[str]:
    return [str(fact(node)) for node in graph.graph.find_nodes(op="placeholder")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
@pytest.mark.parametrize("name", MODELS)
def test_the_batch_is_the_dimension_that_is_named_and_every_form_has_the_same_bits(name: str, target: str, tmp_path: Path) -> None:
    prepared, integer = copy.deepcopy(compiled(name, target))
    assert input_shapes(integer) == [f"f32[{len(value)},B,{value.shape[2]}]" for value in inputs(name, 4)]
    for size in (2, 7):
        contract.assert_validate_is_integer(prepared, integer, *inputs(name, size, 9))
    path = tmp_path / "model.onnx"
    fxq.export_onnx(integer, path, style="exact")
    report = fxq.verify(integer, path, [inputs(name, 2, 9), inputs(name, 7, 9)])
    assert report, str(report)
    for value in onnx.load(path).graph.input:
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["", "batch", ""]
    contract.assert_train_is_validate(prepared, *inputs(name, 3, 9))


@pytest.mark.nightly
def test_the_c_program_has_its_batch_there(tmp_path: Path) -> None:
    if not test_reference_c.COMPILERS:
        assert shutil.which("gcc") is None
        return
    test_reference_c.assert_equal(compiled("states").integer, inputs("states", 3, 9), tmp_path / "states.c", 3)


@pytest.mark.nightly
def test_an_exported_program_has_its_batch_there(tmp_path: Path) -> None:
    integer = compiled("attention").integer
    program = torch.export.load(fxq.export.export_pt2(integer, tmp_path / "attention.pt2")).module()
    assert contract.all_equal(program(*inputs("attention", 7, 9)), integer(*inputs("attention", 7, 9)))


@pytest.mark.nightly
def test_samples_are_counted_and_cut_along_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    batches = [inputs("lstm", 32, seed) for seed in range(2)]
    prepared = fxq.prepare(made("lstm"), batches[0], options=fxq.Options(dynamic_shapes=SHAPES["lstm"]))
    first = Run(prepared, BY_SAMPLES)
    first.take(batches[0])
    assert first.kept.seen == first.kept.samples == 32
    with caplog.at_level("INFO", "fxquant"):
        fxq.calibrate(prepared, batches)
    assert any(message.startswith("biases are") for message in caplog.messages)  # there are 64, though dimension 0 counts ten
    result = fxq.tuning.adaround(prepared, batches, steps=3)
    assert result.layers
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), *inputs("lstm", 3, 9))


def test_comparisons_and_searches_have_the_batch_of_the_form_that_says_it() -> None:
    batches = [inputs("attention", size, seed) for seed, size in enumerate((4, 3))]
    prepared, integer = compiled("attention")
    assert fxq.compare(made("attention"), integer, batches, advice=False).batches == 2
    assert fxq.compare(prepared, made("attention"), batches, advice=False).batches == 2
    batches = [inputs("attention", 8, seed) for seed in range(4)]
    traced = fxq.trace(made("attention"), batches[0], options=fxq.Options(dynamic_shapes=SHAPES["attention"]))
    sensitivity = fxq.search.sensitivity(traced, batches, "bayes-e", options=fxq.Options(measured=False))
    assert "project" in str(sensitivity)


def test_a_file_of_data_is_cut_along_the_batch(tmp_path: Path) -> None:
    integer = compiled("states").integer
    names = [str(node.target) for node in integer.graph.find_nodes(op="placeholder")]
    np.savez(tmp_path / "data.npz", **{name: value.numpy() for name, value in zip(names, inputs("states", 70), strict=True)})
    result = batches_from(tmp_path / "data.npz", integer, 32)
    assert [[tuple(value.shape) for value in batch.values()] for batch in result] == [
        [(5, size, 6), (2, size, 4), (2, size, 4)] for size in (32, 32, 6)
    ]


def test_another_size_or_another_batch_is_refused_at_the_call() -> None:
    prepared = fxq.prepare(made("states"), inputs("states", 4), options=fxq.Options(dynamic_shapes=SHAPES["states"]))
    x, h, c = inputs("states", 4)
    with pytest.raises(ConfigurationError, match=r"dimension 0 has size 4[\s\S]*f32\[5,B,6\], and dimension 0 is fixed"):
        prepared(x[:4], h, c)
    with pytest.raises(ConfigurationError, match=r"input c does not fit the graph: its batch is 3[\s\S]*input x has a batch of 4"):
        prepared(x, h, c[:, :3])
    with pytest.raises(ConfigurationError, match="empty batch"):
        fxq.prepare(made("states"), inputs("states", 0), options=fxq.Options(dynamic_shapes=SHAPES["states"]))


class Nested(nn.Module):
    """Inputs of every kind that dynamic_shapes may speak of."""

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], named: dict[str, Tensor], *more: Tensor, scale: float = 1.0) -> Tensor:
        return (x + pair[0] + pair[1] + named["y"] + sum(more)) * scale


def nest(size: int = 3) -> dict[str, Any]:
    x = torch.ones(5, size, 2)
    return {"x": x, "pair": (x, x[:, :1]), "named": {"y": x[:1]}, "scale": 2.0}


FORMS: dict[str, tuple[Any, list[str]]] = {
    "None": (None, ["B,3,2", "B,3,2", "B,1,2", "1,3,2"]),
    "nothing": ({}, ["5,3,2", "5,3,2", "5,1,2", "1,3,2"]),
    "named": ({"x": {1: BATCH}, "pair": ({1: BATCH}, None), "named": {"y": {1: BATCH}}}, ["5,B,2", "5,B,2", "5,1,2", "1,B,2"]),
    "in order": (({1: BATCH}, ({1: BATCH}, None), {"y": {1: BATCH}}, None), ["5,B,2", "5,B,2", "5,1,2", "1,B,2"]),
    "lists": ([(None, BATCH, None), [[None, BATCH, 2], {}], {"y": [1, BATCH, 2]}, None], ["5,B,2", "5,B,2", "5,1,2", "1,B,2"]),
    "without names": (
        {"x": {1: Dim.AUTO}, "pair": ({1: Dim.DYNAMIC}, {0: Dim.STATIC}), "named": {"y": {1: Dim.DYNAMIC(min=2)}}, "scale": None},
        ["5,B,2", "5,B,2", "5,1,2", "1,B,2"],
    ),
    "a string": ({"x": {1: "b"}, "pair": ({1: "b"}, None), "named": {"y": {1: "b"}}}, ["5,B,2", "5,B,2", "5,1,2", "1,B,2"]),
    "all fixed": ({"x": None, "pair": (None, {}), "named": None, "scale": None}, ["5,3,2", "5,3,2", "5,1,2", "1,3,2"]),
    "dimension 0": ({"x": {0: BATCH}, "pair": ({0: BATCH}, {0: BATCH})}, ["B,3,2", "B,3,2", "B,1,2", "1,3,2"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_torch_export_is_taken(form: str) -> None:
    said, wanted = FORMS[form]
    traced = fxq.trace(Nested(), nest(), options=fxq.Options(dynamic_shapes=said))
    assert input_shapes(traced) == [f"f32[{sizes}]" for sizes in wanted]


def test_a_collection_of_shapes_is_taken_and_inputs_after_a_star_have_their_own_entries() -> None:
    states, shapes = inputs("states", 4), torch.export.ShapesCollection()
    for value in states:
        shapes[value] = {1: BATCH}
    traced = fxq.trace(made("states"), states, options=fxq.Options(dynamic_shapes=shapes))
    assert input_shapes(traced) == ["f32[5,B,6]", "f32[2,B,4]", "f32[2,B,4]"]
    x, starred = torch.ones(5, 3, 2), ({1: BATCH}, ({1: BATCH},) * 2, {"y": {1: BATCH}}, ({1: BATCH},) * 2)
    traced = fxq.trace(Nested(), (x, (x, x), {"y": x}, x, x[:1]), options=fxq.Options(dynamic_shapes=starred))
    assert input_shapes(traced) == [*["f32[5,B,2]"] * 5, "f32[1,B,2]"]


REFUSED: dict[str, tuple[Any, str]] = {
    "unlike sizes": ({"x": {0: BATCH}, "pair": ({1: BATCH}, None)}, "differ in size in the example: 5 in dimension 0, 3 in dimension 1"),
    "computed": ({"x": {1: BATCH * 2}}, r"dimension 1 of x is 2\*batch, computed from another"),
    "no such input": ({"z": {1: BATCH}}, "an entry for z, and forward is called with x, pair, named, scale"),
    "too few": (({1: BATCH},), "a tuple of 1 entries, and forward is called with x, pair, named, scale"),
    "no such dimension": ({"x": {3: BATCH}}, "x has no dimension 3, but 3 dimensions"),
    "from after": ({"x": {-1: BATCH}}, "x has no dimension -1"),
    "another number": ({"x": {1: 4}}, "dimension 1 of x, whose size is 3, is said to be 4"),
    "no form": ({"x": 1}, "its entry for x, a tensor of 3 dimensions, is 1"),
    "too long": ({"x": (None, BATCH)}, "its entry for x, a tensor of 3 dimensions, is"),
    "no pair": ({"pair": ({1: BATCH},)}, "its entry for pair does not have the structure of that argument, a tuple of 2"),
    "no such key": ({"named": {"z": {1: BATCH}}}, "its entry for named does not have the structure of that argument, a dict of 1"),
    "a number": ({"scale": {0: BATCH}}, "it has an entry for scale, which is a float"),
    "dimensions alone": ({1: BATCH}, "an entry for 1, and forward is called with"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_does_not_fit_is_refused_by_name(form: str) -> None:
    said, because = REFUSED[form]
    with pytest.raises(ConfigurationError, match=because):
        fxq.trace(Nested(), nest(), options=fxq.Options(dynamic_shapes=said))


# ---- numbers that Python computes of the batch size, and activations that are written into constants -----------------------
@members(lambda body: dict(layer=nn.Linear(4, 4), body=body, held=torch.randn(3, 4), row=nn.Parameter(torch.randn(1, 4))), seed=0)
def Model(self, x: Tensor) -> Tensor:
    """A layer, and what a function makes of its result; it stands here, for numbers are followed where `forward` is written."""
    return self.body(self, self.layer(x))


SIZES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a quotient": lambda model, x: x.relu().reshape(int(x.shape[0] / 1), 2, 2),
    "a length": lambda model, x: x.relu().reshape(len(x), 2, 2),
    "rounded": lambda model, x: x.relu().reshape(round(x.shape[0] / 1), 2, 2),
    "a root": lambda model, x: x.relu().reshape(int(math.sqrt(x.shape[0] ** 2)), 2, 2),
    "a float": lambda model, x: x.relu().reshape(int(float(x.shape[0])), 2, 2),
    "an exponent": lambda model, x: x.relu().reshape(int(2 ** math.log2(x.shape[0]) + 0.5), 2, 2),
    "repeated": lambda model, x: torch.cat((x, model.row.expand(int(x.shape[0] / 1), 4)), 1).tanh(),
    "repeated, rounded down": lambda model, x: torch.cat((x, model.row.expand(math.floor(x.shape[0] * 1.5 - x.shape[0] / 2), 4)), 1).tanh(),
    "repeated, rounded up": lambda model, x: torch.cat((x, model.row.expand(math.ceil(math.sqrt(x.shape[0] * x.shape[0])), 4)), 1).tanh(),
}


def put(model: Any, x: Tensor, index: Any, value: Tensor) -> Tensor:
    held = model.held.clone()
    held[index] = value
    return x + held.mean(0).tanh()


WRITES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a row": lambda model, x: put(model, x, 1, x.amax(0) if x.shape[0] == 0 else x[0]),
    "a slice": lambda model, x: put(model, x, slice(0, 1), x[:1]),
    "an element": lambda model, x: put(model, x, (slice(None), 0), x[0, :3]),
    "by a list": lambda model, x: put(model, x, [2, 0], x[:2]),
    "by slice_scatter": lambda model, x: x + model.held.slice_scatter(x[:1], 0, 1, 2).mean(0).tanh(),
    "by a view": lambda model, x: x + model.held.clone().diagonal_scatter(x[0, :3]).mean(0).tanh(),
    "into a factor": lambda model, x: x @ model.held.new_zeros(4, 4).index_copy(0, torch.tensor([1]), x[:1]),
}

FILLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ones times a number": lambda model, x: x + x.new_ones(x.shape[0], 4) * 0.1,
    "zeros plus a number": lambda model, x: x * (torch.zeros(x.shape[0], 4) + 3),
    "a number less zeros": lambda model, x: x + (2 - torch.zeros_like(x)),
    "beside": lambda model, x: torch.cat((x, (torch.zeros_like(x[:, :1]) + 2).div(4)), 1).tanh(),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", [*SIZES, *WRITES, *FILLED])
def test_a_size_that_python_computes_and_what_is_written_or_filled_hold_the_contract(name: str, tmp_path: Path) -> None:
    model = Model({**SIZES, **WRITES, **FILLED}[name])
    prepared, _ = held(model, [torch.randn(4, 4), torch.randn(3, 4)], tmp_path / "model.onnx", train=False)
    assert name in WRITES or "none is left in float" in fxq.explain(prepared)


# ---- empty batches ---------------------------------------------------------------------------------------------------------
@members(lambda: dict(conv=nn.Conv2d(256, 8, 3, padding=1), norm=nn.BatchNorm2d(8), same=nn.Conv2d(8, 8, 1), linear=nn.Linear(2000, 4)))
def Wide(self, x: Tensor) -> Tensor:
    """Sums that can exceed 2^24, with and without a batch norm and a residual, and a table of 16 bits."""
    y = self.norm(self.conv(x))
    y = torch.relu(self.same(y) + y)
    return self.linear(torch.sigmoid(y).flatten(1).repeat(1, 10))


WIDE_BATCH = torch.randn(4, 256, 5, 5, generator=torch.Generator().manual_seed(0))
LEARNED = fxq.QConfig(fxq.ActivationConfig(training="learned"), weight=fxq.WeightConfig(training="learned"))
FROZEN = fxq.QConfig(fxq.ActivationConfig(training="frozen"))
INT16 = fxq.QConfig(fxq.ActivationConfig("int16"))
CASES: dict[str, tuple[str, Any]] = {
    "bayes-e": ("bayes-e", None), "nash-e": ("nash-e", None), "x86": ("x86", None), "qnnpack": ("qnnpack", None),
    "learned": ("x86", LEARNED), "frozen": ("bayes-e", FROZEN), "int16": ("nash-e", INT16),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_an_empty_batch(case: str) -> None:
    torch.manual_seed(0)
    prepared, integer = contract.compiled(Wide().eval(), [WIDE_BATCH], *CASES[case])
    for form in (integer, integer, prepared):
        assert form(WIDE_BATCH[:0]).shape == (0, 4)
    fxq.set_state(prepared, "float")
    assert prepared(WIDE_BATCH[:0]).shape == (0, 4)
    fxq.set_state(prepared, "train")
    prepared(WIDE_BATCH)
    before = {name: value.clone() for name, value in prepared.state_dict().items() if not value.isnan().any()}
    with pytest.raises(fxq.FxQuantError, match=r"cannot be observed|cannot use the statistics"):
        prepared(WIDE_BATCH[:0])
    after = prepared.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    fxq.freeze(prepared)
    output = prepared(WIDE_BATCH[:0])
    assert output.shape == (0, 4)
    output.sum().backward()
    assert all(float(each.grad.abs().sum()) == 0 for each in prepared.parameters() if each.grad is not None)
    fxq.set_state(prepared, "validate")
    assert fxq.verify(prepared, fxq.convert(prepared), [WIDE_BATCH])


@members(lambda: dict(conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8 * 36, 4)))
def Sizes(self, image: Tensor) -> tuple[Tensor, ...]:
    """Sizes of the batch in views, in new tensors and on the host, beside layers and float operators."""
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
    types = {info.name: info.type.tensor_type for info in (*inferred.input, *inferred.value_info, *inferred.output)}
    shapes = {name: value.shape.dim for name, value in types.items() if value.HasField("shape")}
    names = [info.name for info in inferred.input] + [name for node in inferred.node for name in node.output if name]
    assert len(names) > 3
    return [name for name in names if name not in shapes or not all(dim.HasField("dim_value") for dim in shapes[name])]


@pytest.fixture(scope="module")
def result() -> fxq.results.Result:
    torch.manual_seed(0)
    return fxq.quantize(Sizes().eval(), [images(2), images(2)], "nash-e")


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
    """ONNX's reference evaluator gives such an output as an array of negative strides."""
    result = fxq.quantize(Network(lambda s, x: s.linear(x).flip(0), linear=nn.Linear(4, 4)).eval(), [torch.randn(4, 4)])
    path = result.export(tmp_path / "m.onnx", batch_size=1)
    assert unfixed(path) == []
    assert result.verify(path, [torch.randn(1, 4)])


def test_batches_of_another_size_are_refused_by_name(result: fxq.results.Result, tmp_path: Path) -> None:
    path = result.export(tmp_path / "m.onnx", batch_size=1, style="exact")
    for run in (lambda: fxq.verify(result.integer, path, [images(2)]), lambda: next(iter(fxq.inspect.record(path, [images(2)])))):
        with pytest.raises(fxq.errors.ExportError, match=r"input 'image' has the sizes \[1, 3, 8, 8\], and this one \[2, 3, 8, 8\]"):
            run()


def test_a_batch_size_that_the_model_does_not_hold_for(tmp_path: Path) -> None:
    only_even = Network(lambda s, image: s.conv(image).view(image.shape[0] // 2, 2, 4, 8, 8).sum(1), conv=nn.Conv2d(3, 4, 1))
    halves = fxq.quantize(only_even.eval(), [images(4)])
    with pytest.raises(fxq.errors.ConfigurationError, match=r"batch_size=1 cannot be used[\s\S]*because[\s\S]*remedy"):
        halves.export(tmp_path / "m.onnx", batch_size=1)
    assert halves.verify(halves.export(tmp_path / "m.onnx", batch_size=2), [images(2)])
    static = fxq.quantize(nn.Conv2d(3, 4, 1).eval(), [images(2)], options=fxq.Options(dynamic_shapes={}))
    assert static.export(tmp_path / "a.onnx", batch_size=2).read_bytes() == static.export(tmp_path / "b.onnx").read_bytes()
    with pytest.raises(fxq.errors.ConfigurationError, match="traced with fixed sizes, and a batch of 2"):
        static.export(tmp_path / "m.onnx", batch_size=1)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_batch_size_is_a_positive_whole_number(value: Any, result: fxq.results.Result, tmp_path: Path) -> None:
    write: Callable[..., Any] = fxq.export_onnx
    with pytest.raises(fxq.errors.ConfigurationError, match=r"batch_size=.* is not usable"):
        write(result.integer, tmp_path / "m.onnx", batch_size=value)
