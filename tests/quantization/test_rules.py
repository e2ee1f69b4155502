"""What a qconfig's rules come to where several operators of the model became one, and what is told of a rule that does nothing."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation, fused
from fxquant.ir.integer import qparams
from tests.shared.contract import VNNI, assert_train_is_validate, assert_validate_is_integer, compiled
from tests.shared.written import written

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
    """A mapping of rules, each the setter's name without set_, its key, and what it chooses."""
    made = fxq.QConfigMapping()
    for kind, key, chosen in rules:
        made = getattr(made, f"set_{kind}")(key, chosen)
    return made


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
    """What applies to the block, once it is one operator."""
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
    found = fused_config(*asked(how, part, INT4))
    assert found.output.dtype == "int4"
    assert found.weight.dtype == ("int4" if part == "conv" else "int8")


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
    prepared = fxq.calibrate(
        fxq.prepare(model, batch(), "bayes-e", qconfig, options=fxq.Options(batch_norm=batch_norm)), [batch()], show_progress=False
    )
    assert_validate_is_integer(prepared, fxq.convert(prepared), batch())
    assert_train_is_validate(prepared, batch())


# ---- conflicts -------------------------------------------------------------------------------------------------------------------

CONFLICTS: dict[str, tuple[list[tuple[str, Any, Any]], str, str]] = {  # rules, dtype of the output, dtype of the weight
    "names": ([rule("name", "conv", WIDE), rule("name", "relu", EIGHT)], "int8", "int8"),
    "names, in another order": ([rule("name", "relu", EIGHT), rule("name", "conv", WIDE)], "int8", "int8"),
    "patterns": ([rule("pattern", "conv", WIDE), rule("pattern", "relu", INT4)], "int4", "int8"),
    "types": ([rule("type", "conv", INT4), rule("type", "relu", WIDE)], "int16", "int4"),
    "a name before, a type behind": ([rule("name", "conv", INT4), rule("type", "relu", WIDE)], "int16", "int4"),
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
    made = mapping(*(rule for rule in rules if rule[0] != "global"))
    if rules[0][0] == "global":
        made = made.set_global(None)
    found = fused_config(made)
    assert (found.output.dtype, found.weight.dtype) == (output, weight)


def test_attributes_give_way_like_other_rules() -> None:
    model = network()
    model.qconfig = EIGHT  # type: ignore[assignment]
    model.block.conv.qconfig = INT4  # type: ignore[assignment]
    assert fused_config(None, model).output.dtype == "int4"
    model.block.relu.qconfig = WIDE  # type: ignore[assignment]
    assert (fused_config(None, model).output.dtype, fused_config(None, model).weight.dtype) == ("int16", "int4")
    model.block.qconfig = EIGHT  # type: ignore[assignment]
    assert fused_config(None, model).output.dtype == "int16"


def test_a_relu_that_is_asked_to_be_integer_behind_a_float_layer_is_not_fused() -> None:
    found = parts(annotated(mapping(rule("name", "conv", None), rule("name", "add", EIGHT))))
    assert found["block_conv"] == (None, ("block_bn",))
    assert found["add"] == ("int8", ("block_relu",))


def test_a_functional_relu_by_type_name_and_node() -> None:
    model = written(lambda m, x: F.relu(m.conv(x)).relu(), conv=nn.Conv2d(2, 4, 3))

    for made in (mapping(("object_type", F.relu, WIDE)), mapping(("module_name", "relu", WIDE)), mapping(("object_type", "relu", WIDE))):
        gm = fxq.prepare(model, batch(), "nash-e", made, until="activation.fuse")
        assert "relu" in fxq.text(gm)
        config = {node.name: annotation(node) for node in annotated(made, model).graph.nodes}["conv"].config
        assert config.output.dtype == "int16"  # clamps in a chain are one, and so is what is asked of them


def test_the_scale_of_a_relu_rule_is_the_layers() -> None:
    made = mapping(rule("type", "relu", fxq.QConfig(ACT(scale=0.25))))
    assert fxq.qparams(fxq.prepare(network(), batch(), qconfig=made))["block_conv"] == 0.25


# ---- the mapping is only read -------------------------------------------------------------------------------------------------------


def not_done(model: fx.GraphModule) -> list[str]:
    """What explain says was asked for and is not done."""
    return [
        line for line in fxq.explain(model).splitlines() if "qconfig" in line and "operator" not in line and not line.startswith("%stem ")
    ]


def test_a_mapping_serves_several_models() -> None:
    made = mapping(rule("name", "conv", WIDE), ("module_name", "typo", WIDE))
    before = copy.deepcopy(made)
    for model in (network(), nn.Sequential(nn.Conv2d(2, 2, 1))):
        found = not_done(fxq.prepare(model, batch(), "nash-e", made))
        expected = ["name block.conv", "name typo"] if isinstance(model, nn.Sequential) else ["name typo"]
        assert found == [f"this rule of the qconfig matched nothing: {name}" for name in expected]
    assert made == before


# ---- nothing that was asked is lost in silence ----------------------------------------------------------------------------------------


def test_rules_and_attributes_that_match_nothing_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model.block.spare = nn.Linear(2, 2)  # type: ignore[assignment]
    model.block.spare.qconfig = WIDE  # type: ignore[assignment]
    made = mapping(("module_name_regex", "blok", WIDE), ("object_type", nn.GELU, None), ("object_type", F.gelu, None))
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = fxq.prepare(model, batch(), "nash-e", made)
    expected = [
        f"this rule of the qconfig matched nothing: {name}" for name in ("pattern blok", "type GELU", "type gelu", "attribute block.spare")
    ]
    assert not_done(prepared) == expected
    assert [record.getMessage() for record in caplog.records] == expected


def test_a_type_that_the_table_does_not_know_is_matched() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.FractionalMaxPool2d(2, output_size=2))
    assert not_done(fxq.prepare(model, batch(), qconfig=mapping(("object_type", nn.FractionalMaxPool2d, None)))) == []


def test_a_rule_that_others_go_before_everywhere_is_told() -> None:
    made = mapping(("object_type", nn.BatchNorm2d, WIDE), rule("name", "relu", EIGHT), rule("name", "conv", EIGHT))
    assert not_done(fxq.prepare(network(), batch(), "nash-e", made)) == [
        "this rule of the qconfig has no effect, since other rules override it wherever it matches: type BatchNorm2d"
    ]


def test_a_dtype_that_an_operator_cannot_have_is_told() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2))
    prepared = fxq.prepare(model, batch(), "nash-e", mapping(("object_type", nn.MaxPool2d, fxq.QConfig(ACT("int32")))))
    assert not_done(prepared) == ["%_1 is int8, as the graph requires, and not int32 as the qconfig's type MaxPool2d says"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("target", "first", "second"), [("bayes-e", "int8", "int16"), ("nash-e", "int16", "int8"), ("x86", "uint8", "int8")]
)
def test_an_operator_that_moves_values_is_given_another_dtype_by_a_requantization(
    target: str, first: str, second: str, tmp_path: Path
) -> None:
    """Where a rule says so, and where the input is configured apart from what is computed of it."""
    model, data = nn.Sequential(nn.Conv2d(2, 4, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)), torch.randn(4, 2, 8, 8)
    asked = fxq.QConfigMapping(fxq.QConfig(ACT(first))).set_object_type(nn.MaxPool2d, fxq.QConfig(ACT(second)))
    for each, config in ((model, asked), (model[1:3], fxq.QConfig(ACT(second), input=ACT(first)))):
        result = compiled(each, [data], target, qconfig=config)
        assert not_done(result.prepared) == []
        assert f" is {first}, and %" in fxq.explain(result.prepared)
        assert {first, second} <= {known.dtype for node in result.integer.graph.nodes if (known := qparams(node)) is not None}
        assert_validate_is_integer(result.prepared, result.integer, data)
        assert_train_is_validate(result.prepared, data)
        path = fxq.export_onnx(result.integer, tmp_path / "exact.onnx", style="exact", opset=21)
        assert not fxq.verify(result.integer, path, [data], show_progress=False).mismatches
        path = fxq.export_onnx(result.integer, tmp_path / "qdq.onnx", style="qdq", opset=21)
        report = fxq.verify(result.integer, path, [data], show_progress=False)
        assert isinstance(report, fxq.results.DeviationReport)
        assert not VNNI or max(output.largest for outputs in report.outputs.values() for output in outputs) <= 1  # ties are rounded to even


INPUT = fxq.QConfig(input=ACT("int16", scale=1 / 1024))


def fork() -> nn.Module:
    """Two layers that read one input, and one behind them."""
    return written(lambda m, x: (m.left(x), m.last(m.right(x))), left=nn.Conv2d(2, 2, 1), right=nn.Conv2d(2, 2, 1), last=nn.Conv2d(2, 2, 1))


@pytest.mark.parametrize("name", ["left", "right"])
def test_readers_that_ask_for_different_inputs_have_a_quantize_each(name: str, tmp_path: Path) -> None:
    result = compiled(fork(), [batch()], "nash-e", qconfig=mapping(("module_name", name, INPUT)))
    scales = fxq.qparams(result.prepared)
    names = {"left": ("x_quantize", "x_quantize_right"), "right": ("x_quantize_right", "x_quantize")}[name]
    assert [scales[entry] == 1 / 1024 for entry in names] == [True, False]
    assert_validate_is_integer(result.prepared, result.integer, batch())
    assert fxq.verify(result.integer, fxq.export_onnx(result.integer, tmp_path / "model.onnx"), [batch()], show_progress=False)


def test_an_input_is_honoured_behind_a_float_operator() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), written(lambda m, x: torch.special.bessel_j0(x)), nn.Conv2d(2, 2, 1))
    prepared = fxq.prepare(model, batch(), "nash-e", mapping(("module_name", "2", INPUT)))
    assert fxq.qparams(prepared)["special_bessel_j0_quantize"] == 1 / 1024
    assert not_done(prepared) == []


def test_an_input_that_means_nothing_is_told() -> None:
    pooled = nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2))
    prepared = fxq.prepare(pooled, batch(), "nash-e", mapping(("object_type", nn.MaxPool2d, INPUT)))
    assert not_done(prepared) == ["the input= of the qconfig's type MaxPool2d is not used by %_1: what is read there is quantized already"]
    assert not_done(fxq.prepare(fork(), batch(), "nash-e", INPUT)) == []  # the default's input is the model's


def test_a_message_names_a_few_of_the_many_operators_of_a_recurrent_layer() -> None:
    rules = fxq.QConfigMapping().set_object_type(nn.LSTM, fxq.QConfig(input=fxq.ActivationConfig("int16")))
    (text,) = not_done(fxq.prepare(nn.Sequential(nn.LSTM(4, 5, batch_first=True)), torch.randn(2, 7, 4), "bayes-e", rules))
    assert text.count("%") == 8
    assert re.search(r" and \d+ more: what is read there is quantized already$", text)


def test_what_was_told_is_kept_by_copies_files_and_the_integer_model(tmp_path: Path) -> None:
    rules = mapping(("module_name", "left", WIDE), ("module_name", "typo", None), ("object_type", nn.Linear, None))
    result = compiled(fork(), [batch()], "nash-e", qconfig=rules)
    expected = not_done(result.prepared)
    assert len(expected) == 2
    for model in (result.integer, copy.deepcopy(result.prepared), fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))):
        assert not_done(model) == expected


def test_an_input_of_the_default_is_for_every_reader() -> None:
    made = fxq.QConfigMapping(default=fxq.QConfig(input=ACT(scale=1 / 64))).set_module_name("right", WIDE)
    scales = fxq.qparams(fxq.prepare(fork(), batch(), "nash-e", made))
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
    made = maker if isinstance(maker, fxq.observers.Observer) else maker()
    found = observers(prepared)
    assert len(found) >= 4
    assert len({id(observer) for observer in found}) == len(found)
    assert not any(observer is maker for observer in found)
    assert {(observer.percentile, observer.bins) for observer in found} == {(made.percentile, made.bins)}
    assert len({float(observer.largest) for observer in found}) > 1


@pytest.mark.parametrize("maker", ["a class", "an instance", "a partial"])
def test_observers_are_kept_in_a_file(maker: str, tmp_path: Path) -> None:
    prepared = fxq.prepare(network(), batch(), qconfig=fxq.QConfig(ACT(observer=MAKERS[maker])))
    loaded = fxq.load(fxq.save(prepared, tmp_path / "model.fxq"))
    assert [observer.extra_repr() for observer in observers(loaded)] == [observer.extra_repr() for observer in observers(prepared)]


def test_an_observer_of_the_users() -> None:
    class Halved(fxq.observers.MinMaxObserver):
        def scale(self, dtype: Any) -> Tensor:
            return super().scale(dtype) / 2

    data, model = batch(), nn.Conv2d(2, 2, 1)
    whole = fxq.qparams(compiled(model, [data], qconfig=fxq.QConfig(ACT(observer=fxq.observers.MinMaxObserver))).prepared)
    for maker in (Halved, Halved()):
        halved = fxq.qparams(compiled(model, [data], qconfig=fxq.QConfig(ACT(observer=maker))).prepared)
        assert halved == {name: scale / 2 for name, scale in whole.items()}
