"""Rules of a qconfig where several operators of the model became one, and warnings of rules without effect."""

import copy
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation, fused
from fxquant.ir.integer import qparams
from fxquant.ops.core.record import is_meant
from tests.shared.contract import VNNI, assert_train_is_validate, assert_validate_is_integer, compiled
from tests.shared.networks import members, written

ACT, INT4 = fxq.ActivationConfig, fxq.QConfig(fxq.ActivationConfig("int4"), fxq.WeightConfig("int4"))
WIDE = fxq.QConfig(fxq.ActivationConfig("int16"))
EIGHT = fxq.QConfig()
PARTS = ("conv", "bn", "add", "relu")


def network() -> nn.Module:
    """A block with everything that can be fused into a layer, between two layers."""
    return written(
        lambda m, x: m.head(m.block(m.stem(x))),
        stem=nn.Conv2d(2, 4, 1),
        block=written(lambda m, x: m.relu(m.bn(m.conv(x)) + x), conv=nn.Conv2d(4, 4, 3, padding=1), bn=nn.BatchNorm2d(4), relu=nn.ReLU()),
        head=nn.Conv2d(4, 2, 1),
    )


def batch() -> Tensor:
    return torch.randn(4, 2, 8, 8)


def mapping(*rules: tuple[str, Any, Any]) -> fxq.QConfigMapping:
    """Return a mapping of rules, each the setter's name without set_, its key, and the qconfig it sets."""
    built = fxq.QConfigMapping()
    for kind, key, chosen in rules:
        built = getattr(built, f"set_{kind}")(key, chosen)
    return built


def annotated(qconfig: Any, model: nn.Module | None = None) -> fx.GraphModule:
    return fxq.prepare(network() if model is None else model, batch(), "nash-e", qconfig, until="specs.annotate")


def parts(gm: fx.GraphModule) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """Of every operator of the block: its dtype, and what was fused into it."""
    return {
        node.name: (annotation(node).dtype, fused(node))
        for node in gm.graph.nodes
        if annotation(node) and node.name not in ("stem", "head")
    }


def fused_config(qconfig: Any, model: nn.Module | None = None) -> fxq.QConfig:
    """Return the config of the block, once it is one operator."""
    (node,) = (node for node in annotated(qconfig, model).graph.nodes if len(fused(node)) == 3)
    assert isinstance(annotation(node).config, fxq.QConfig)
    return annotation(node).config


def rule(how: str, part: str, chosen: Any) -> tuple[str, Any, Any]:
    """A rule of some kind for one part of the block."""
    path, written = part if part == "add" else f"block.{part}", {"conv": nn.Conv2d, "bn": nn.BatchNorm2d, "relu": nn.ReLU}
    if how == "type":
        return "object_type", written.get(part, operator.add), chosen
    return ("module_name", path, chosen) if how == "name" else ("module_name_regex", f"block.{part}$", chosen)


# ---- each part of a fused operator, by every kind of rule ------------------------------------------------------------------
KINDS = [
    (how, part)
    for how in ("name", "pattern", "type", "attribute")
    for part in PARTS
    if (how, part) not in (("pattern", "add"), ("attribute", "add"))
]


def asked(how: str, part: str, chosen: Any) -> tuple[Any, nn.Module]:
    """A mapping and a model that ask for something for one part of the block."""
    model = network()
    if how == "attribute":
        getattr(model.block, part).qconfig = chosen
        return None, model
    return mapping(rule(how, part, chosen)), model


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("how", "part"), KINDS)
def test_a_rule_for_any_part_decides_the_output(how: str, part: str) -> None:
    result = fused_config(*asked(how, part, INT4))
    assert result.output.dtype == "int4"
    assert result.weight.dtype == ("int4" if part == "conv" else "int8")


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("how", "part"), KINDS)
def test_none_for_one_part_keeps_it_apart_and_in_float(how: str, part: str) -> None:
    assert (
        parts(annotated(*asked(how, part, None)))
        == {
            "conv": {"block_conv": (None, ("block_bn", "add", "block_relu"))},
            "bn": {"block_conv": ("int8", ()), "block_bn": (None, ()), "add": ("int8", ("block_relu",))},
            "add": {"block_conv": ("int8", ("block_bn",)), "add": (None, ("block_relu",))},
            "relu": {"block_conv": ("int8", ("block_bn", "add")), "block_relu": (None, ())},
        }[part]
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("batch_norm", ["live", "frozen", "folded"])
def test_what_is_kept_apart_holds_the_contract(part: str, batch_norm: str) -> None:
    qconfig, model = asked("name", part, None)
    prepared = fxq.calibrate(fxq.prepare(model, batch(), "bayes-e", qconfig, options=fxq.Options(batch_norm=batch_norm)), [batch()])
    assert_validate_is_integer(prepared, fxq.convert(prepared), batch())
    assert_train_is_validate(prepared, batch())


# ---- conflicts -------------------------------------------------------------------------------------------------------------------
CONFLICTS: dict[str, tuple[list[tuple[str, Any, Any]], str, str]] = {  # rules, dtype of the output, dtype of the weight
    "names": ([rule("name", "conv", WIDE), rule("name", "relu", EIGHT)], "int8", "int8"),
    "names, in another order": ([rule("name", "relu", EIGHT), rule("name", "conv", WIDE)], "int8", "int8"),
    "patterns": ([rule("pattern", "conv", WIDE), rule("pattern", "relu", INT4)], "int4", "int8"),
    "types": ([rule("type", "conv", INT4), rule("type", "relu", WIDE)], "int16", "int4"),
    "a name before, a type after": ([rule("name", "conv", INT4), rule("type", "relu", WIDE)], "int16", "int4"),
    "the addition and the layer": ([rule("name", "conv", INT4), rule("name", "add", WIDE)], "int16", "int4"),
    "batch norm and layer": ([rule("name", "conv", WIDE), rule("name", "bn", INT4)], "int4", "int8"),
    "batch norm and relu": ([rule("name", "relu", WIDE), rule("name", "bn", INT4)], "int16", "int8"),
    "a name for the block gives way to one in it": ([("module_name", "block", EIGHT), rule("name", "conv", WIDE)], "int16", "int8"),
    "a name for the block, and one for its last part": ([("module_name", "block", INT4), rule("name", "relu", WIDE)], "int16", "int4"),
    "a pattern for the block": ([("module_name_regex", "block", EIGHT), rule("name", "conv", INT4)], "int4", "int4"),
    "the first pattern that matches": ([rule("pattern", "conv", INT4), ("module_name_regex", "block", EIGHT)], "int4", "int4"),
    "a default of None": ([("global", None, None), rule("type", "conv", INT4)], "int4", "int4"),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("rules", "output", "weight"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflicts_in_one_fused_operator(rules: list[tuple[str, Any, Any]], output: str, weight: str) -> None:
    built = mapping(*(rule for rule in rules if rule[0] != "global"))
    if rules[0][0] == "global":
        built = built.set_global(None)
    result = fused_config(built)
    assert (result.output.dtype, result.weight.dtype) == (output, weight)


def test_attributes_give_way_like_other_rules() -> None:
    model = network()
    model.qconfig = EIGHT  # type: ignore[assignment]
    model.block.conv.qconfig = INT4  # type: ignore[assignment]
    assert fused_config(None, model).output.dtype == "int4"
    model.block.relu.qconfig = WIDE  # type: ignore[assignment]
    assert (fused_config(None, model).output.dtype, fused_config(None, model).weight.dtype) == ("int16", "int4")
    model.block.qconfig = EIGHT  # type: ignore[assignment]
    assert fused_config(None, model).output.dtype == "int16"


def test_a_relu_that_is_asked_to_be_integer_after_a_float_layer_is_not_fused() -> None:
    result = parts(annotated(mapping(rule("name", "conv", None), rule("name", "add", EIGHT))))
    assert result["block_conv"] == (None, ("block_bn",))
    assert result["add"] == ("int8", ("block_relu",))


def test_a_functional_relu_by_type_name_and_node() -> None:
    model = written(lambda m, x: F.relu(m.conv(x)).relu(), conv=nn.Conv2d(2, 4, 3))

    for built in (mapping(("object_type", F.relu, WIDE)), mapping(("module_name", "relu", WIDE)), mapping(("object_type", "relu", WIDE))):
        gm = fxq.prepare(model, batch(), "nash-e", built, until="activation.fuse")
        assert "relu" in fxq.text(gm)
        config = {node.name: annotation(node) for node in annotated(built, model).graph.nodes}["conv"].config
        assert config.output.dtype == "int16"  # clamps in a chain are one, and so is what is asked of them


def test_the_scale_of_a_relu_rule_is_the_layers() -> None:
    built = mapping(rule("type", "relu", fxq.QConfig(ACT(scale=0.25))))
    assert fxq.qparams(fxq.prepare(network(), batch(), qconfig=built))["block_conv"] == 0.25


# ---- the mapping is only read -------------------------------------------------------------------------------------------------------
def not_done(model: fx.GraphModule) -> list[str]:
    """Return the rules without effect that explain names."""
    lines = [line for line in fxq.explain(model).splitlines() if "qconfig" in line and "operator" not in line]
    return [line for line in lines if not line.startswith("%stem ")]


INPUT = fxq.QConfig(input=ACT("int16", scale=1 / 1024))


def fork() -> nn.Module:
    """Two layers that read one input, and one after them."""
    return written(lambda m, x: (m.left(x), m.last(m.right(x))), left=nn.Conv2d(2, 2, 1), right=nn.Conv2d(2, 2, 1), last=nn.Conv2d(2, 2, 1))


def with_spare_layer() -> nn.Module:
    """The network, and a layer that is not called and has a qconfig."""
    model = network()
    model.block.spare = nn.Linear(2, 2)  # type: ignore[assignment]
    model.block.spare.qconfig = WIDE  # type: ignore[assignment]
    return model


def after_a_layer(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), *layers)


POOLED, BESSEL = after_a_layer(nn.MaxPool2d(2)), after_a_layer(written(lambda m, x: torch.special.bessel_j0(x)), nn.Conv2d(2, 2, 1))
NOTHING = "this rule of the qconfig matched nothing: "
TOLD: dict[str, tuple[nn.Module, Any, list[str]]] = {  # of a model and a mapping
    "nothing that matches": (
        with_spare_layer(), mapping(("module_name_regex", "blok", WIDE), ("object_type", nn.GELU, None), ("object_type", F.gelu, None)),
        [NOTHING + name for name in ("pattern blok", "type GELU", "type gelu", "attribute block.spare")],
    ),
    "a name of another model": (network(), mapping(rule("name", "conv", WIDE), ("module_name", "typo", WIDE)), [NOTHING + "name typo"]),
    "a type that the table does not know": (
        after_a_layer(nn.FractionalMaxPool2d(2, output_size=2)), mapping(("object_type", nn.FractionalMaxPool2d, None)), []
    ),
    "others go before": (
        network(), mapping(("object_type", nn.BatchNorm2d, WIDE), rule("name", "relu", EIGHT), rule("name", "conv", EIGHT)),
        ["this rule of the qconfig has no effect, since other rules override it wherever it matches: type BatchNorm2d"],
    ),
    "a dtype that an operator cannot have": (
        POOLED, mapping(("object_type", nn.MaxPool2d, fxq.QConfig(ACT("int32")))),
        ["%_1 is int8, as the graph requires, and not int32 as the qconfig's type MaxPool2d says"],
    ),
    "an input that means nothing": (
        POOLED, mapping(("object_type", nn.MaxPool2d, INPUT)),
        ["the input= of the qconfig's type MaxPool2d is not used by %_1: what is read there is quantized already"],
    ),
    "the input of the default, which is the model's": (fork(), INPUT, []),
    "an input after a float operator": (BESSEL, mapping(("module_name", "2", INPUT)), []),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_what_is_asked_for_and_not_done_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, qconfig, expected = TOLD[name]
    before = copy.deepcopy(qconfig)
    prepared = fxq.prepare(model, batch(), "nash-e", qconfig)
    assert not_done(prepared) == [record.getMessage() for record in caplog.records] == expected
    assert qconfig == before
    assert fxq.qparams(prepared).get("special_bessel_j0_quantize", 1 / 1024) == 1 / 1024


# ---- nothing that was asked is lost in silence ----------------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("target", "first", "second"), [("bayes-e", "int8", "int16"), ("nash-e", "int16", "int8"), ("x86", "uint8", "int8")]
)
def test_an_operator_that_moves_values_is_given_another_dtype_by_a_requantization(
    target: str, first: str, second: str, tmp_path: Path
) -> None:
    """Where a rule says so, and where the input is configured apart from the values that are computed of the input."""
    model, data = nn.Sequential(nn.Conv2d(2, 4, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)), torch.randn(4, 2, 8, 8)
    asked = fxq.QConfigMapping(fxq.QConfig(ACT(first))).set_object_type(nn.MaxPool2d, fxq.QConfig(ACT(second)))
    for each, config in ((model, asked), (model[1:3], fxq.QConfig(ACT(second), input=ACT(first)))):
        result = compiled(each, [data], target, qconfig=config)
        assert not_done(result.prepared) == []
        assert f" is {first}, and %" in fxq.explain(result.prepared)
        assert {first, second} <= {grid.dtype for node in result.integer.graph.nodes if (grid := qparams(node)) is not None}
        assert_validate_is_integer(result.prepared, result.integer, data)
        assert_train_is_validate(result.prepared, data)
        path = fxq.export_onnx(result.integer, tmp_path / "exact.onnx", style="exact", opset=21)
        assert not fxq.verify(result.integer, path, [data]).mismatches
        path = fxq.export_onnx(result.integer, tmp_path / "qdq.onnx", style="qdq", opset=21)
        report = fxq.verify(result.integer, path, [data])
        assert isinstance(report, fxq.results.DeviationReport)
        assert not VNNI or max(output.largest for outputs in report.outputs.values() for output in outputs) <= 1  # ties are rounded to even


@pytest.mark.parametrize("name", ["left", "right"])
def test_readers_that_ask_for_different_inputs_have_a_quantize_each(name: str, tmp_path: Path) -> None:
    result = compiled(fork(), [batch()], "nash-e", qconfig=mapping(("module_name", name, INPUT)))
    scales = fxq.qparams(result.prepared)
    names = {"left": ("x_quantize", "x_quantize_right"), "right": ("x_quantize_right", "x_quantize")}[name]
    assert [scales[entry] == 1 / 1024 for entry in names] == [True, False]
    assert_validate_is_integer(result.prepared, result.integer, batch())
    assert fxq.verify(result.integer, fxq.export_onnx(result.integer, tmp_path / "model.onnx"), [batch()])


def test_what_was_told_is_kept_by_copies_files_and_the_integer_model(tmp_path: Path) -> None:
    rules = mapping(("module_name", "left", WIDE), ("module_name", "typo", None), ("object_type", nn.Linear, None))
    result = compiled(fork(), [batch()], "nash-e", qconfig=rules)
    expected = not_done(result.prepared)
    assert len(expected) == 2
    for model in (result.integer, copy.deepcopy(result.prepared), fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))):
        assert not_done(model) == expected


def test_an_input_of_the_default_is_for_every_reader() -> None:
    mapping = fxq.QConfigMapping(default=fxq.QConfig(input=ACT(scale=1 / 64))).set_module_name("right", WIDE)
    scales = fxq.qparams(fxq.prepare(fork(), batch(), "nash-e", mapping))
    assert {name: scale for name, scale in scales.items() if "quantize" in name} == {"x_quantize": 1 / 64}


# ---- observers: whatever makes one ---------------------------------------------------------------------------------------------------
MAKERS: dict[str, Any] = {
    "a class": fxq.observers.PercentileObserver,
    "an instance": fxq.observers.PercentileObserver(99.5, bins=64),
    "a partial": functools.partial(fxq.observers.PercentileObserver, percentile=99.0),
    "a function": lambda: fxq.observers.PercentileObserver(98.0),
}


def observers(model: nn.Module) -> list[fxq.observers.PercentileObserver]:
    return [module for module in model.modules() if isinstance(module, fxq.observers.PercentileObserver)]


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_every_tensor_has_an_observer_of_its_own(maker: Any) -> None:
    prepared = compiled(network(), [batch()], qconfig=fxq.QConfig(ACT(observer=maker))).prepared
    built = maker if isinstance(maker, fxq.observers.Observer) else maker()
    result = observers(prepared)
    assert len(result) >= 4
    assert len({id(observer) for observer in result}) == len(result)
    assert not any(observer is maker for observer in result)
    assert {(observer.percentile, observer.bins) for observer in result} == {(built.percentile, built.bins)}
    assert len({float(observer.largest) for observer in result}) > 1


# ---- a rule for a function is about that function however the model calls it; a rule for a class is about that class -------
ONE_FUNCTION: dict[str, list[Any]] = {
    "softmax": [torch.softmax, F.softmax, torch.Tensor.softmax, "softmax", torch.special.softmax, torch.ops.aten.softmax],
    "add": [torch.add, operator.add, operator.iadd, "add", "add_", torch.Tensor.add, torch.Tensor.__add__, torch.ops.aten.add.Tensor],
    "sub": [torch.sub, torch.subtract, operator.sub, operator.isub, "sub", "subtract_", torch.Tensor.__sub__],
    "mul": [torch.mul, torch.multiply, operator.mul, operator.imul, "mul", "mul_", torch.Tensor.__mul__],
    "div": [torch.div, torch.divide, torch.true_divide, operator.truediv, "div", "true_divide", torch.Tensor.__truediv__],
    "matmul": [torch.matmul, operator.matmul, "matmul", torch.Tensor.__matmul__, torch.linalg.matmul],
    "relu": [torch.relu, F.relu, torch.relu_, F.relu_, "relu", "relu_", torch.Tensor.relu],
    "sigmoid": [torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid", "sigmoid_", torch.Tensor.sigmoid],
    "cat": [torch.cat, torch.concat, torch.concatenate],
    "clamp": [torch.clamp, torch.clip, "clamp", "clip_"],
    "pow": [torch.pow, operator.pow, "pow", torch.Tensor.__pow__],
    "mean": [torch.mean, "mean", torch.Tensor.mean],
    "flatten": [torch.flatten, "flatten", torch.Tensor.flatten],
    "log_softmax": [torch.log_softmax, F.log_softmax, "log_softmax"],
    "transpose": [torch.transpose, torch.swapdims, "transpose"],
}
MODULES: dict[Any, type] = {
    torch.softmax: nn.Softmax, F.relu: nn.ReLU, F.relu6: nn.ReLU6, F.hardtanh: nn.Hardtanh, F.linear: nn.Linear, F.conv2d: nn.Conv2d,
    F.layer_norm: nn.LayerNorm, F.batch_norm: nn.BatchNorm2d, F.interpolate: nn.Upsample, F.gelu: nn.GELU, F.dropout: nn.Dropout,
    F.embedding: nn.Embedding, torch.lstm: nn.LSTM, "sigmoid": nn.Sigmoid, torch.flatten: nn.Flatten,
    F.multi_head_attention_forward: nn.MultiheadAttention,
}  # fmt: skip
OTHERS: list[tuple[Any, Any]] = [
    (F.relu, F.relu6), (F.relu, nn.ReLU6), (F.relu, torch.clamp), (torch.clamp, nn.ReLU), (F.dropout, nn.Dropout2d),
    (torch.add, operator.sub), (torch.mul, operator.truediv), (torch.hstack, torch.cat), (torch.hstack, torch.vstack),
    (torch.softmax, F.log_softmax), (torch.flatten, "squeeze"), (torch.flatten, "reshape"), (F.conv2d, nn.Linear), (torch.dot, torch.trace),
    ("nonsense", operator.add), (nn.Softmax, F.softmax), (nn.Softmax, "softmax"), (nn.ReLU, F.relu), (nn.Linear, F.linear),
    (nn.BatchNorm2d, nn.BatchNorm1d),
]  # fmt: skip


@pytest.mark.parametrize("name", ONE_FUNCTION)
def test_every_spelling_of_a_function_means_every_other(name: str) -> None:
    spellings = ONE_FUNCTION[name]
    assert [(one, other) for one in spellings for other in spellings if not is_meant(one, other)] == []


def test_a_function_means_the_layer_that_calls_it_and_no_other() -> None:
    assert [(one, other) for one, other in MODULES.items() if not is_meant(one, other)] == []
    assert [(one, other) for one, other in MODULES.items() if is_meant(other, one)] == []
    assert [(one, other) for one, other in OTHERS if is_meant(one, other)] == []


@members(lambda function: dict(layer=nn.Linear(8, 8), function=function))
def Followed(self, x: Tensor) -> Tensor:
    """A layer, and a function after it."""
    return self.function(self.layer(x), x)


def added_in_place(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return y


CALLS: dict[str, tuple[list[Callable[[Tensor, Tensor], Tensor]], list[Any]]] = {
    "softmax": (
        [lambda y, x: torch.softmax(y, 1), lambda y, x: F.softmax(y, dim=1), lambda y, x: y.softmax(dim=-1), lambda y, x: nn.Softmax(1)(y)],
        [torch.softmax, F.softmax, "softmax", torch.Tensor.softmax],
    ),
    "add": (
        [torch.add, operator.add, added_in_place, lambda y, x: y.add(x), lambda y, x: x.add_(y)],
        [torch.add, operator.add, operator.iadd, "add", torch.Tensor.__iadd__],
    ),
}


def in_float(model: nn.Module, kind: Any) -> tuple[bool, bool]:
    """Whether a rule keeps something in float, and whether the prepared model says that it matched nothing."""
    torch.manual_seed(0)
    prepared = fxq.prepare(model, torch.randn(4, 8), "nash-e", fxq.QConfigMapping().set_object_type(kind, None))
    said = fxq.explain(prepared)
    return "the qconfig keeps it in float" in said, "matched nothing" in said


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_reaches_the_function_however_it_is_called(name: str) -> None:
    calls, kinds = CALLS[name]
    for index, call in enumerate(calls):
        for kind in kinds:
            assert in_float(Followed(call), kind) == (True, False), (index, kind)


def test_a_rule_for_a_class_is_about_its_modules_alone_and_says_where_it_matched_nothing() -> None:
    layer, model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)), Followed(lambda y, x: y.softmax(1))
    assert in_float(layer, nn.Softmax) == (True, False)
    assert in_float(model, nn.Softmax) == (False, True)
    assert in_float(model, torch.add) == (False, True)


def test_the_spelling_that_the_model_has_goes_before_others() -> None:
    asked = fxq.QConfigMapping().set_object_type(F.linear, None).set_object_type(nn.Linear, fxq.QConfig(fxq.ActivationConfig("int16")))
    for rules in (asked, fxq.QConfigMapping(types=dict(reversed(asked.types.items())))):
        said = fxq.explain(fxq.prepare(Followed(lambda y, x: F.linear(y, torch.ones(2, 8))), torch.randn(4, 8), "nash-e", rules))
        assert [line.split()[0] for line in said.splitlines() if line.startswith("%") and "keeps it in float" in line] == ["%linear"]
        assert "matched nothing" not in said
    rules = fxq.QConfigMapping().set_object_type(F.softmax, None).set_object_type("softmax", fxq.QConfig())
    said = fxq.explain(fxq.prepare(Followed(lambda y, x: y.softmax(1)), torch.randn(4, 8), "nash-e", rules))
    assert "the qconfig keeps it in float" not in said
