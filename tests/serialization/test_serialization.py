"""Models as files: what is kept, what is refused, and what damaged files do."""

import copy
import dataclasses
import functools
import inspect
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.files.mutations import mutated_archive
from fxquant import backends
from fxquant.ops import OPERATORS
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.proof import unproved
from fxquant.serialization import as_text, names, pack, unpack
from fxquant.serialization.document import write_model
from fxquant.serialization.values import RECORDS, decode, encode
from tests.shared.networks import descend, members

torch.set_num_threads(1)

Save = Callable[[Any], Path]


class Network(nn.Module):
    """Convolutions, batch norm, a residual, a shared scale, a constant, a float leaf, a tied and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block, self.again = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()), nn.Conv2d(8, 8, 3, padding=1)
        self.again.weight = self.block[0].weight  # type: ignore[assignment]
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 5)
        self.head.bias.requires_grad_(False)
        self.register_buffer("offset", torch.randn(8, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = F.relu6(self.norm(self.stem(x)))
        x = self.pool(self.again(F.hardswish(self.block(x))) + x) + self.offset
        x = F.silu(torch.cat([x, -x], 1)[:, :8])
        scores = self.head(x.mean((2, 3)))
        return {"scores": scores, "ranks": (F.softmax(scores, -1), scores.topk(2).indices)}


@members(lambda: dict(
    embed=nn.Linear(6, 8), attention=nn.MultiheadAttention(8, 2, batch_first=True),
    recurrent=nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True), norm=nn.RMSNorm(16),
))  # fmt: skip
def Leaves(self, x: Tensor) -> Tensor:
    """Layers that stay in float."""
    x = self.embed(x)
    x, _ = self.attention(x, x, x, need_weights=False)
    x, _ = self.recurrent(x)
    return torch.softmax(self.norm(x).flatten(1).view(x.shape[0], -1), -1)


def images(count: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(count)]


@functools.cache
def traced() -> Any:
    torch.manual_seed(0)
    return fxq.trace(Network().eval(), (images()[0],))


def prepared(calibrated: bool = True, target: str = "bayes-e", **options: Any) -> Any:
    if calibrated and not options:
        return copy.deepcopy(_calibrated(target))
    return fxq.prepare(traced(), (images()[0],), target, **options)


@functools.cache
def _calibrated(target: str) -> Any:
    return fxq.calibrate(fxq.prepare(traced(), (images()[0],), target), images())


def training(steps: int = 2) -> Any:
    """A model in the middle of training, with operators in several states."""
    model = prepared()
    fxq.set_state(model, fxq.State.TRAIN)
    fxq.set_state(model, fxq.State.FLOAT, "head")
    train(model, steps)
    model.again.eval()
    return model


def train(model: Any, steps: int) -> list[Tensor]:
    descend(model.train(), images(steps), 0.01, lambda output: output["scores"].square().mean())
    return [parameter.detach().clone() for parameter in model.parameters()]


STAGES: dict[str, Callable[[], Any]] = {
    "traced": traced, "uncalibrated": lambda: prepared(calibrated=False), "calibrated": prepared, "real": lambda: prepared(target="nash-e"),
    "training": training, "integer": lambda: fxq.convert(prepared()), "integer real": lambda: fxq.convert(prepared(target="nash-e")),
    **{f"until {name}": functools.partial(prepared, False, until=name) for name in ("canonical.rewrite", "specs.annotate", "scales.share")},
}  # fmt: skip


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return lambda model: fxq.save(model, tmp_path / "model.fxq")


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[name], second[name]) for name in first)
    return len(first) == len(second) and all(equal(a, b) for a, b in zip(first, second, strict=True))


# ---- what is kept -----------------------------------------------------------------------------------------------------
@pytest.mark.sweep(4)
@pytest.mark.quick
@pytest.mark.parametrize("stage", STAGES)
def test_saved_loaded_and_saved_again_is_the_same_file(stage: str, save: Save, tmp_path: Path) -> None:
    model = STAGES[stage]()
    path = save(model)
    loaded = fxq.load(path)
    assert fxq.save(loaded, tmp_path / "again.fxq").read_bytes() == path.read_bytes()
    assert fxq.text(loaded) == fxq.text(model)
    assert fxq.explain(loaded) == fxq.explain(model)
    assert {name: module.training for name, module in loaded.named_modules()} == {n: m.training for n, m in model.named_modules()}
    assert [(n, p.requires_grad) for n, p in loaded.named_parameters()] == [(n, p.requires_grad) for n, p in model.named_parameters()]
    assert list(loaded.state_dict()) == list(model.state_dict())
    model, loaded = copy.deepcopy(model), copy.deepcopy(loaded)
    with torch.no_grad():
        assert all(equal(model(x), loaded(x)) for x in images())


def test_a_loaded_model_goes_on_where_the_saved_one_was(save: Save) -> None:
    model = prepared(calibrated=False)
    loaded = fxq.load(save(model))
    for each in (model, loaded):
        fxq.calibrate(each, images())
    assert fxq.qparams(loaded) == fxq.qparams(model)

    model = training()
    loaded = fxq.load(save(model))
    assert equal(train(loaded, 3), train(model, 3))
    for each in (model, loaded):
        fxq.freeze(each)
        fxq.set_state(each, fxq.State.VALIDATE)
    frozen = fxq.load(save(model))
    assert fxq.qparams(loaded) == fxq.qparams(model) == fxq.qparams(frozen)
    first, second = fxq.convert(model), fxq.convert(fxq.load(save(loaded)))
    assert fxq.text(first) == fxq.text(second)
    assert equal(first(images()[0]), second(images()[0]))
    assert fxq.verify(frozen, second, images())


def test_what_is_shared_stays_shared(save: Save) -> None:
    for model in (traced(), prepared()):
        loaded = fxq.load(save(model))
        assert loaded.again.weight is loaded.block.get_submodule("0").weight
    operators = {module.name: module for module in loaded.modules() if type(module).__name__ == "QuantizedOperator"}
    shared = [operator for operator in operators.values() if not operator.plain and not operator.owns_output]
    assert shared
    quantizers = {id(operator.quantizer) for operator in operators.values() if operator.owns_output}
    assert all(id(operator.output) in quantizers for operator in shared)


def test_a_loaded_model_is_exported_to_the_same_file(save: Save, tmp_path: Path) -> None:
    rows = [torch.randn(4, 6)]
    integer = fxq.quantize(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval(), rows).integer
    path = fxq.export_onnx(fxq.load(save(integer)), tmp_path / "loaded.onnx")
    assert path.read_bytes() == fxq.export_onnx(integer, tmp_path / "model.onnx").read_bytes()
    assert fxq.verify(integer, path, rows)


@pytest.mark.nightly
def test_layers_that_stay_in_float(save: Save) -> None:
    rows = [torch.randn(4, 5, 6)]
    model = fxq.quantize(Leaves().eval(), rows)
    for each in (fxq.trace(Leaves().eval(), (rows[0],)), model.prepared, model.integer):
        with torch.no_grad():
            assert torch.equal(fxq.load(save(each))(rows[0]), each(rows[0]))


def test_attention_of_which_each_batch_gives_the_scales(save: Save) -> None:
    inputs = (torch.randn(2, 5, 8),) * 3
    prepared = fxq.prepare(nn.MultiheadAttention(8, 2, batch_first=True).eval(), inputs, "x86", fxq.QConfig(dynamic=True))
    fxq.calibrate(prepared, [inputs])
    assert equal(fxq.load(save(prepared))(*inputs)[0], prepared(*inputs)[0])


def test_a_file_that_tells_of_the_steps_of_loops_gives_the_same_bits(save: Save) -> None:
    x = torch.randn(4, 6)
    integer = fxq.quantize(nn.Softmax(-1), [x], target="bayes-e").integer
    document, tensors = unpack((path := save(integer)).read_bytes())
    for step, node in enumerate(node for node in document["nodes"] if "part" in node["meta"]):
        node["meta"]["part"]["Part"]["step"] = step or None
    path.write_bytes(pack(document, tensors))
    assert b'"step":1}' in path.read_bytes()
    assert torch.equal(fxq.load(path)(x), integer(x))


def test_a_layout_is_kept(save: Save) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 3)).eval().to(memory_format=torch.channels_last)
    loaded: Any = fxq.load(save(fxq.trace(model, (torch.randn(2, 4, 6, 6),))))
    weight = loaded.get_submodule("0").weight
    assert weight.stride() == model[0].weight.stride()
    assert torch.equal(weight, model[0].weight)


def test_a_fresh_process_computes_the_same_bits(save: Save, tmp_path: Path) -> None:
    model = fxq.convert(prepared())
    x = images()[0]
    torch.save((x, model(x)), tmp_path / "expected.pt")
    code = f"""
import torch, fxquant as fxq
torch.set_num_threads(1)
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
found = fxq.load({str(save(model))!r})(x)
assert torch.equal(found["scores"], expected["scores"]) and torch.equal(found["ranks"][0], expected["ranks"][0])
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_random_numbers_are_left_alone(save: Save) -> None:
    model = prepared()
    before = torch.random.get_rng_state()
    fxq.load(save(model))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", [kind for kind in names.ARGUMENTS if issubclass(kind, nn.Module)], ids=lambda kind: kind.__name__)
def test_the_arguments_of_a_class_are_its_constructors(kind: type[nn.Module]) -> None:
    """Every listed argument is one of the constructor's: nothing else could be rebuilt."""
    taken = {"nonlinearity"} if kind is nn.RNN else set()  # taken from its keywords
    for base in kind.__mro__:
        if "__init__" in vars(base):
            taken.update(inspect.signature(vars(base)["__init__"]).parameters)
    assert set(names.ARGUMENTS[kind]) <= taken


VALUES = [
    None, True, -3, 0.1, -0.0, float("inf"), float("-inf"), "é\n'\"", [1, [2.5]], (1, (None,)), {"a": 1, 2: (3,)}, slice(1, None, 2), ...,
    torch.float16, torch.device("cpu"), torch.channels_last, torch.strided, 1 + 2j, fxq.QConfig(),
    fxq.QConfig(fxq.ActivationConfig("int16", functools.partial(fxq.observers.MovingAverageMinMaxObserver, averaging_constant=0.5))),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert repr(again) == repr(value)
    assert encode(again) == encode(value)


def test_records_name_every_field() -> None:
    for kind, fields in RECORDS.items():
        assert [field.name for field in dataclasses.fields(kind)] == list(fields)


@pytest.mark.quick
def test_every_operator_and_primitive_has_a_name_of_its_own_and_says_what_it_can_reach() -> None:
    for function in (*OPERATORS, *PRIMITIVES):
        name = names.function_name(function)
        assert name is not None
        assert names.function_named(name) is function
    assert [record.name for record in PRIMITIVES.values() if (record.bounds is None) != (record.kind == "float")] == []


# ---- what is refused --------------------------------------------------------------------------------------------------
class OwnObserver(fxq.observers.MinMaxObserver):
    pass


def _hooked() -> Any:
    model = fxq.prepare(Network().eval(), (images()[0],))  # not the shared trace: modules of a copy share its hooks
    model.head.register_forward_hook(lambda module, inputs, output: None)
    return model


def _foreign_function() -> Any:
    model = copy.deepcopy(traced())
    next(node for node in model.graph.nodes if node.op == "call_function").target = foreign
    return model


def foreign(*arguments: Any) -> None:
    """A function of the user's."""


def _altered() -> Any:
    model = copy.deepcopy(traced())
    model.stem.output_padding = (1, 1)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a float model": (Network, "not a model of fxquant"),
    "an observer": (lambda: prepared(False, qconfig=fxq.QConfig(fxq.ActivationConfig(observer=OwnObserver))), "OwnObserver"),
    "a hook": (_hooked, "hooks"),
    "a function": (_foreign_function, "foreign"),
    "an altered layer": (_altered, "output_padding"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    path = tmp_path / "model.fxq"
    path.write_bytes(b"before")
    with pytest.raises(fxq.errors.ExportError, match=words) as raised:
        fxq.save(make(), path)
    assert raised.value.remedy
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.fxq"]


# ---- damaged files ----------------------------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", ["traced", "training", "integer"])
def test_a_damaged_file_is_an_error_and_nothing_else(stage: str, save: Save, tmp_path: Path) -> None:
    """Each of 150 mutations is refused, or says something that fxquant writes and is all kept; none hangs or imports."""
    path = save(STAGES[stage]())
    content = path.read_bytes()
    fxq.load(path)
    before = set(sys.modules)
    chance = random.Random(stage)
    refused = 0
    for index in range(150):
        changed = mutated_archive(content, chance)
        path.write_bytes(changed)
        start = time.perf_counter()
        try:
            loaded = fxq.load(path)
        except fxq.errors.ExportError:
            refused += 1
        else:
            document, tensors = unpack(changed)
            again, kept = write_model(loaded, backends.get)
            assert as_text(again) == as_text(document), index
            assert set(kept) == set(tensors)
        assert time.perf_counter() - start < 60, index  # a hang, not a slow machine
    assert set(sys.modules) == before
    assert refused > 75


def test_code_in_names_is_never_run(save: Save, tmp_path: Path) -> None:
    """Names become part of the graph's generated code, so none may hold any."""
    path = save(prepared())
    document, tensors = unpack(path.read_bytes())
    evil = f"__import__('pathlib').Path({str(tmp_path / 'evil')!r}).touch()"
    placeholder, *_, output = document["nodes"]
    call = next(node for node in document["nodes"] if node["op"] == "call_module")
    for holder, key, value in (
        (placeholder, "target", f"x={evil}"), (placeholder, "name", evil), (call, "target", f'a"){evil}#'), (call, "name", f"y={evil}"),
        (output, "name", evil), (call, "kwargs", {f"a={evil}, b": 1}), (document, "name", evil),
        (call, "op", "call_method"), (call, "op", "root"),
    ):  # fmt: skip
        kept, holder[key] = holder[key], value
        path.write_bytes(pack(document, tensors))
        with pytest.raises(fxq.errors.ExportError):
            fxq.load(path)
        holder[key] = kept
    assert not (tmp_path / "evil").exists()
    path.write_bytes(pack(document, tensors))
    fxq.load(path)


# ---- files that claim what is not so ---------------------------------------------------------------------------------------
@members(lambda: dict(
    conv=nn.Conv2d(3, 8, 3, padding=1), act=nn.SiLU(), again=nn.Conv2d(8, 8, 3, padding=1, groups=2), norm=nn.BatchNorm2d(8),
    slope=nn.PReLU(8), up=nn.ConvTranspose2d(8, 4, 2, stride=2), resize=nn.Upsample(scale_factor=2, mode="bilinear"),
    pool=nn.MaxPool2d(2, padding=1), mean=nn.AvgPool2d(2), offset=nn.Parameter(torch.randn(4, 1, 1)), head=nn.Linear(8, 5),
))  # fmt: skip
def Everything(self, x: Tensor) -> Tensor:
    """Most primitives: wide and narrow sums, tables, means, interpolation, joins, residuals, constants."""
    x = self.act(self.conv(x))
    x = self.slope(self.norm(self.mean(torch.relu(self.again(x) + x))))
    y = torch.nn.functional.pad(self.resize(self.pool(self.up(x) + self.offset)), (1, 1)).clamp(-1, 1)
    y = torch.cat((y, y * 0.5 + 1.0), 1)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    y = torch.maximum(y, -y).flatten(2)
    scores = torch.matmul(y, y.transpose(1, 2)) * 0.1
    return self.head(scores.mean(1))


@functools.cache
def everything(target: str) -> Any:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    wide = fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int16" if target == "nash-e" else "int8"))
    mapping = fxq.QConfigMapping().set_module_name("act", wide).set_module_name("again", wide)
    mapping = mapping.set_module_name("head", fxq.QConfig(fxq.ActivationConfig("int32")))
    return fxq.quantize(Everything().eval(), [x], target, mapping).integer


@pytest.mark.parametrize("target", ["bayes-e", "nash-e"])
def test_what_is_converted_is_proved_once_more_from_the_graph_alone(target: str, save: Save) -> None:
    integer = everything(target)
    assert list(unproved(integer, integer.meta["target"].arithmetic)) == []
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(fxq.load(save(integer))(x), integer(x))
    for node in integer.graph.nodes:
        noted = node.meta.get("notes", {}).get("accumulator_bits")
        assert noted is None or 1 < noted <= 48


Tamper = Callable[[Any, dict[str, Tensor]], None]  # of a document and its tensors


def entry_of(document: Any, primitive: str) -> Any:
    return next(entry for entry in document["nodes"] if entry["target"] == f"primitive:{primitive}")


def parameter(name: str, edit: Callable[[Tensor], Tensor]) -> Tamper:
    def apply(document: Any, tensors: dict[str, Tensor]) -> None:
        tensors[name] = edit(tensors[name]).contiguous()

    return apply


def change(primitive: str, position: int, edit: Callable[[Tensor], Tensor]) -> Tamper:
    """Change the constant that stands at a place among the arguments of a primitive."""

    def apply(document: Any, tensors: dict[str, Tensor]) -> None:
        constant = entry_of(document, primitive)["args"][position]["node"]
        name = next(str(entry["target"]) for entry in document["nodes"] if entry["name"] == constant)
        parameter(name, edit)(document, tensors)

    return apply


def argue(primitive: str, position: int, value: Any) -> Tamper:
    def apply(document: Any, tensors: dict[str, Tensor]) -> None:
        entry = entry_of(document, primitive)
        assert entry["args"][position] != value
        entry["args"][position] = value

    return apply


def say(primitive: str, key: str, edit: Callable[[Any], Any]) -> Tamper:
    def apply(document: Any, tensors: dict[str, Tensor]) -> None:
        entry = next(entry for entry in document["nodes"] if entry["target"] == f"primitive:{primitive}" and key in entry["meta"])
        entry["meta"][key] = edit(entry["meta"][key])

    return apply


def with_(field: str, value: Any) -> Callable[[Any], Any]:
    return lambda record: {"QParams": {**record["QParams"], field: value}}


def narrow(document: Any, tensors: dict[str, Tensor]) -> None:
    """A sum beyond 2^24 by the primitive for smaller ones."""
    entry = entry_of(document, "convolution_wide")
    entry["target"] = "primitive:convolution"
    entry["args"] = entry["args"][:7]


SCALE = "quantized.head.output.base_scale"
TAMPERED: dict[str, tuple[str, Tamper, str]] = {
    "a bias beyond 2^24": ("bayes-e", change("convolution", 2, lambda t: torch.full_like(t, 2**30)), "is exact below 16777216"),
    "a bias beyond int32": ("nash-e", change("linear", 2, lambda t: torch.full_like(t, 2**31 - 1)), "its sum can reach"),
    "a weight of another shape": ("bayes-e", change("convolution", 1, lambda t: t[..., :1]), "declared as"),
    "a weight of another dtype": ("bayes-e", change("convolution", 1, lambda t: t.to(torch.int16)), "declared as"),
    "a bias of another length": ("bayes-e", change("convolution", 2, lambda t: t[:1]), "declared as"),
    "a narrow sum": ("bayes-e", narrow, "is exact below 16777216"),
    "parts that are too few": ("bayes-e", argue("convolution_wide", 7, [1, 16, 1, 8]), "a sum of its parts can reach"),
    "parts without all bits": ("bayes-e", argue("convolution_wide", 7, [1, 4, 8, 1]), "fewer bits than it has"),
    "a short table": ("bayes-e", change("lookup", 1, lambda t: t[:200]), "declared as"),
    "limits beyond the dtype": ("bayes-e", argue("requantize_fixed", 7, 300), "beyond int8|does not hold"),
    "limits the wrong way round": ("nash-e", argue("requantize_real", 2, 200), "its limits are|beyond int8|does not hold"),
    "a clamp the wrong way round": ("bayes-e", argue("clamp", 1, 120), "its limits are"),
    "a multiplier that is too wide": ("bayes-e", change("requantize_fixed", 2, lambda t: t + 2**15), "its multiplier is not in 0…32767"),
    "a negative multiplier": ("bayes-e", change("requantize_fixed", 2, lambda t: -t), "its multiplier is not in"),
    "a negative shift": ("bayes-e", change("requantize_fixed", 1, lambda t: t - 64), "its shift is not in"),
    "a right shift of nothing": ("bayes-e", change("requantize_fixed", 3, lambda t: t * 0), "its right shift is not in"),
    "another rounding": ("bayes-e", argue("requantize_fixed", 5, "half_step"), "not requantized as its target does"),
    "another width": ("bayes-e", argue("requantize_fixed", 4, 24), "not requantized as its target does"),
    "a multiplier that is NaN": ("nash-e", change("requantize_real", 1, lambda t: t * float("nan")), "its multiplier is out of range"),
    "an infinite multiplier": ("nash-e", change("requantize_real", 1, lambda t: t * float("inf")), "its multiplier is out of range"),
    "a negative scale": ("nash-e", change("quantize", 1, lambda t: -t), "its scale is"),
    "a scale of nothing": ("nash-e", change("quantize", 1, lambda t: t * 0), "its scale is"),
    "another scale at the end": ("nash-e", change("dequantize", 1, lambda t: t * 2), "its scale is not the scale of its operand"),
    "an accumulator that is declared as small": ("bayes-e", say("requantize_fixed", "notes", lambda n: _bits(n, 3)), "is declared with 3"),
    "another dtype": ("bayes-e", say("requantize_fixed", "qparams", with_("dtype", "int4")), "beyond int4"),
    "another storage": ("bayes-e", say("lookup", "qparams", with_("dtype", "int8")), "declared as int8"),
    "a scale that is said to be negative": ("bayes-e", say("lookup", "qparams", with_("scale", -1.0)), "its scale is"),
    "another shape": ("bayes-e", say("lookup", "fact", lambda f: {"tensor": [f["tensor"][0], [3, 3]]}), "declared as"),
    "another stride": ("bayes-e", argue("convolution", 3, [2, 2]), "declared as|stride"),
    "indices that do not exist": ("bayes-e", change("select", 2, lambda t: t + 5), "indexes elements that do not exist"),
    "weights of neighbours": ("bayes-e", change("resize_linear", 1, lambda t: t + 1), "do not sum to 1"),
    "a residual beyond all": ("nash-e", change("add_residual", 2, lambda t: torch.full_like(t, 2**46)), "its sum can reach"),
    "a number beyond all": ("bayes-e", change("add_constant", 1, lambda t: t * 0 + 2**31 - 1), "its sum can reach"),
    "a parameter of another shape": ("prepared", parameter("head.weight", lambda t: t[:1]), "does not have the shape that its arguments"),
    "a parameter of another dtype": ("prepared", parameter("head.weight", lambda t: t.double()), "it is f64"),
    "a negative scale of a quantizer": ("prepared", parameter(SCALE, lambda t: -t), "its scale is -"),
    "a scale of 0 of a quantizer": ("prepared", parameter(SCALE, lambda t: t * 0), "its scale is 0"),
    "an infinite scale of a quantizer": ("prepared", parameter(SCALE, lambda t: t * float("inf")), "its scale is inf"),
    "a scale of a quantizer below float32": ("prepared", parameter(SCALE, lambda t: t * 0 + 1e-42), "its scale is 1"),
}  # fmt: skip


def _bits(notes: Any, bits: int) -> Any:
    return {"dict": [[key, bits if key == "accumulator_bits" else value] for key, value in notes["dict"]]}


@functools.cache
def content(model: str) -> bytes:
    """The file of a model: of a prepared one, or of everything for a target."""
    with tempfile.TemporaryDirectory() as folder:
        return fxq.save(prepared() if model == "prepared" else everything(model), Path(folder) / "model.fxq").read_bytes()


@pytest.mark.parametrize("claim", TAMPERED)
def test_a_file_that_claims_what_is_not_so_is_refused(claim: str, tmp_path: Path) -> None:
    target, tamper, because = TAMPERED[claim]
    document, tensors = unpack(content(target))
    tamper(document, tensors)
    (tmp_path / "model.fxq").write_bytes(pack(document, tensors))
    with pytest.raises(fxq.errors.ExportError, match=because) as caught:
        fxq.load(tmp_path / "model.fxq")
    assert "holds no model that can be loaded" in caught.value.what


def test_a_layer_that_was_cut_is_not_saved(tmp_path: Path) -> None:
    model = fxq.prepare(Leaves().eval(), torch.randn(4, 3, 6))
    with torch.no_grad():
        model.norm.weight = nn.Parameter(model.norm.weight[:4])
    with pytest.raises(fxq.errors.ExportError, match=r"its weight is of shape \[4\], and of \[16\] in a RMSNorm"):
        fxq.save(model, tmp_path / "model.fxq")
