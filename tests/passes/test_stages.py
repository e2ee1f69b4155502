"""The stage verifier finds what is broken on purpose, and scales that cannot be shared are a conflict with an explanation."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends import get as get_target
from fxquant.ir.graph import Annotation, TensorFact, annotate, annotation, fact, inherit, set_fact
from fxquant.ir.integer import set_kernel
from fxquant.ops import OPERATORS
from fxquant.passes import PREPARE
from fxquant.pipeline import Context, Dial, Pass, run
from fxquant.prepared.stage import SPECS, Stage, verify_stage, violations
from fxquant.quantization.spec import QConfigMapping
from tests.conftest import Golden
from tests.shared.contract import compiled

pytestmark = pytest.mark.quick

Break = Callable[[fx.GraphModule], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv(x).relu())
        return self.head(torch.flatten(x, 1))


def image() -> Tensor:
    return torch.randn(4, 2, 6, 6)


def graph_at(stage: Stage) -> fx.GraphModule:
    if stage is Stage.TRACED:
        return fxq.trace(Net(), image())
    prepared, fused = compiled(Net(), [image()])
    if stage >= Stage.PREPARED:
        return {Stage.PREPARED: prepared, Stage.FUSED: fused}.get(stage) or fxq.convert(prepared, kernels="reference")
    return fxq.prepare(Net(), image(), until=stage)


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


# ---- one way to break a graph of every stage ----------------------------------------------------------------------------


def name_a_module_that_does_not_exist(gm: fx.GraphModule) -> None:
    node(gm, "pool").target = "pol"


def name_a_tensor_that_does_not_exist(gm: fx.GraphModule) -> None:
    node(gm, "conv_weight").target = "conv.weigth"


def call_a_tensor(gm: fx.GraphModule) -> None:
    node(gm, "pool").target = "conv.weight"


def use_before_definition(gm: fx.GraphModule) -> None:
    node(gm, "flatten").append(node(gm, "pool"))


def drop_an_argument(gm: fx.GraphModule) -> None:
    pool = node(gm, "pool")
    pool.args = pool.args[:1]


def add_an_unknown_argument(gm: fx.GraphModule) -> None:
    node(gm, "pool").kwargs = {"kernel": 3}


def forget_a_shape(gm: fx.GraphModule) -> None:
    set_fact(node(gm, "conv"), None)


def forget_an_annotation(gm: fx.GraphModule) -> None:
    node(gm, "pool").meta.pop("annotation")


def read_a_float(gm: fx.GraphModule) -> None:
    conv = node(gm, "conv")
    conv.args = (node(gm, "x"), *conv.args[1:])


def return_an_integer(gm: fx.GraphModule) -> None:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = (node(gm, "head"),)


def tear_a_group_apart(gm: fx.GraphModule) -> None:
    pool = node(gm, "pool")
    annotate(pool, replace(annotation(pool), group=99))


def call_an_operator_directly(gm: fx.GraphModule) -> None:
    pool = node(gm, "pool")
    pool.op, pool.target = "call_function", next(f for f, operator in OPERATORS.items() if operator.name == "max_pool2d")


def set_a_negative_scale(gm: fx.GraphModule) -> None:
    gm.quantized.conv.output.base_scale.fill_(-0.5)


def set_an_infinite_scale(gm: fx.GraphModule) -> None:
    gm.quantized.head.output.base_scale.fill_(float("inf"))


def leave_an_operator(gm: fx.GraphModule) -> None:
    gm.add_module("left", fxq.prepare(Net(), image()).quantized.conv)
    pool = node(gm, "pool")
    pool.op, pool.target = "call_module", "left"


def make_an_accumulator_float(gm: fx.GraphModule) -> None:
    accumulator = node(gm, "conv_convolution")
    set_fact(accumulator, TensorFact(fact(accumulator).shape, torch.float32))


def forget_a_dtype(gm: fx.GraphModule) -> None:
    set_fact(node(gm, "conv"), None)


def cover_what_is_not_there(gm: fx.GraphModule) -> None:
    set_kernel(node(gm, "conv"), "sum of products", ("nothing", "conv"))


def cover_what_others_read(gm: fx.GraphModule) -> None:
    set_kernel(node(gm, "conv"), "sum of products", ("x_quantize", "conv"))


BREAKS: list[tuple[Stage, Break]] = [
    (Stage.TRACED, name_a_module_that_does_not_exist),
    (Stage.TRACED, call_a_tensor),
    (Stage.TRACED, use_before_definition),
    (Stage.CANONICAL, name_a_tensor_that_does_not_exist),
    (Stage.CANONICAL, drop_an_argument),
    (Stage.CANONICAL, add_an_unknown_argument),
    (Stage.CANONICAL, forget_a_shape),
    (Stage.ANNOTATED, forget_an_annotation),
    (Stage.BOUNDED, read_a_float),
    (Stage.BOUNDED, return_an_integer),
    (Stage.BOUNDED, tear_a_group_apart),
    (Stage.PREPARED, call_an_operator_directly),
    (Stage.PREPARED, set_a_negative_scale),
    (Stage.PREPARED, set_an_infinite_scale),
    (Stage.INTEGER, leave_an_operator),
    (Stage.INTEGER, make_an_accumulator_float),
    (Stage.INTEGER, forget_a_dtype),
    (Stage.FUSED, cover_what_is_not_there),
    (Stage.FUSED, cover_what_others_read),
]


@pytest.mark.parametrize(("stage", "damage"), BREAKS, ids=lambda value: value.name if isinstance(value, Stage) else value.__name__)
def test_a_broken_graph_is_found_and_its_node_named(stage: Stage, damage: Break, golden: Golden) -> None:
    gm = graph_at(stage)
    assert violations(gm, stage) == []
    damage(gm)
    with pytest.raises(fxq.errors.StageViolation) as caught:
        verify_stage(gm, stage, "some.pass")
    golden(re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n", f"{stage.name.lower()}-{damage.__name__}.txt")


@pytest.mark.nightly
def test_every_rule_is_broken_by_some_test() -> None:
    caught = set()
    for stage, damage in BREAKS:
        gm = graph_at(stage)
        damage(gm)
        caught |= {rule for rule in SPECS[stage] if list(rule(gm))}
    assert {rule for rules in SPECS.values() for rule in rules} == caught


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_a_sound_graph_has_no_violations_up_to_its_stage(stage: Stage) -> None:
    assert violations(graph_at(stage), stage) == []


def test_the_pipeline_stops_behind_the_pass_that_broke_the_graph(golden: Golden) -> None:
    def spoil(gm: fx.GraphModule, context: Context) -> int:
        forget_a_shape(gm)
        return 1

    gm = fxq.prepare(Net(), image(), until="canonical.rewrite")
    later: list[int] = []
    passes = (Pass(spoil, Stage.CANONICAL), Pass(lambda gm, context: later.append(1) or 0, Stage.CANONICAL))
    with pytest.raises(fxq.errors.StageViolation) as caught:
        run(gm, passes, Context(get_target("bayes-e"), QConfigMapping()), Dial(0, None))
    golden(re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n", "pipeline.txt")
    assert later == []


def test_many_violations_are_counted_not_listed() -> None:
    gm = fxq.prepare(nn.Sequential(*(nn.Linear(2, 2) for _ in range(25))), torch.randn(2, 2), until="canonical.rewrite")
    for each in gm.graph.nodes:
        set_fact(each, None)
    with pytest.raises(fxq.errors.StageViolation, match="and 5 more"):
        verify_stage(gm, Stage.CANONICAL, "some.pass")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_an_error_inside_a_pass_says_which_one() -> None:
    with pytest.raises(fxq.errors.ScaleConflict) as caught:
        fxq.prepare(Net(), image(), qconfig=conflicting())
    assert caught.value.__notes__ == ["raised by pass scales.share"]  # type: ignore[attr-defined]


def test_a_new_node_inherits_its_place() -> None:
    gm = graph_at(Stage.TRACED)
    made = inherit(gm.graph.create_node("call_function", torch.relu, (node(gm, "conv"),)), node(gm, "conv"), "some.pass")
    assert made.meta["source"] == node(gm, "conv").meta["source"]
    assert made.meta["made_by"] == "some.pass"


# ---- shared scales ------------------------------------------------------------------------------------------------------


def fixed(scale: float, dtype: str = "int8") -> fxq.QConfig:
    return fxq.QConfig(output=fxq.ActivationConfig(dtype, scale=scale))


def conflicting() -> QConfigMapping:
    return QConfigMapping().set_module_name("conv", fixed(0.5)).set_module_name("pool", fixed(0.25))


class Ladder(nn.Module):
    """Two layers whose outputs a chain of operators without arithmetic ties together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = F.max_pool2d(F.max_pool2d(self.first(x), 2).flatten(1).reshape(-1, 4, 2, 2), 2)
        right = F.max_pool2d(self.second(x), 4)
        return torch.cat([left.flatten(1), right.flatten(1)], 1)


def conflict_text(model: nn.Module, mapping: QConfigMapping) -> str:
    with pytest.raises(fxq.errors.ScaleConflict) as caught:
        fxq.prepare(model, image(), qconfig=mapping)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n"


def test_two_fixed_scales_tied_by_a_pool_conflict(golden: Golden) -> None:
    golden(conflict_text(Net(), conflicting()), "conflict-pool.txt")


def test_the_path_between_the_two_is_the_explanation(golden: Golden) -> None:
    mapping = QConfigMapping().set_module_name("first", fixed(0.5)).set_module_name("max_pool2d_1", fixed(0.125))
    golden(conflict_text(Ladder(), mapping), "conflict-chain.txt")


@pytest.mark.usefixtures("default_outputs")
def test_a_fixed_scale_on_one_member_is_that_of_its_group() -> None:
    mapping = QConfigMapping().set_module_name("pool", fixed(0.5))
    scales = fxq.qparams(compiled(Net(), [image()], qconfig=mapping).prepared)
    assert scales["conv"] == scales["pool"] == scales["flatten"] == 0.5 != scales["head"]


def test_the_default_is_no_wish_of_an_operator_that_shares_a_scale() -> None:
    mapping = QConfigMapping(default=fixed(0.25)).set_module_name("conv", fixed(0.5))
    scales = fxq.qparams(compiled(Net(), [image()], qconfig=mapping).prepared)
    assert (scales["conv"], scales["pool"], scales["head"]) == (0.5, 0.5, 0.25)


def test_equal_wishes_are_no_conflict() -> None:
    mapping = QConfigMapping().set_module_name("conv", fixed(0.5)).set_module_name("pool", fixed(0.5))
    assert fxq.qparams(compiled(Net(), [image()], qconfig=mapping).prepared)["pool"] == 0.5


def test_groups_are_connected_components_whatever_the_order() -> None:
    gm = fxq.prepare(Ladder(), image(), until="scales.share")
    groups: dict[int, set[str]] = {}
    for each in gm.graph.nodes:
        spec = annotation(each)
        if isinstance(spec, Annotation) and spec.group is not None:
            groups.setdefault(spec.group, set()).add(each.name)
    assert {"first", "max_pool2d", "flatten", "reshape", "max_pool2d_1", "flatten_1", "flatten_1_dequantize"} in groups.values()
    assert {"second", "max_pool2d_2", "flatten_2", "flatten_2_dequantize"} in groups.values()


def test_the_stages_are_the_pipelines() -> None:
    assert {step.reaches for step in PREPARE} == {Stage.TRACED, Stage.CANONICAL, Stage.ANNOTATED, Stage.BOUNDED, Stage.PREPARED}
