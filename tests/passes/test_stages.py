"""The stage verifier finds what is broken on purpose, and scales that cannot be shared are a conflict with an explanation."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends import get as get_target
from fxquant.ir import loops
from fxquant.ir.graph import Annotation, TensorFact, annotate, annotation, fact, set_fact
from fxquant.ir.integer import set_kernel
from fxquant.ops import BY_NAME
from fxquant.pipeline import Context, Dial, Pass, run
from fxquant.prepared.stage import SPECS, Stage, verify_stage, violations
from fxquant.quantization.spec import QConfigMapping
from tests.conftest import Golden
from tests.shared.contract import compiled
from tests.shared.networks import members

pytestmark = pytest.mark.quick

Break = Callable[[fx.GraphModule], object]


@members(lambda: dict(conv=nn.Conv2d(2, 4, 3), pool=nn.MaxPool2d(2), head=nn.Linear(16, 3)))
def Net(self, x: Tensor) -> Tensor:
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
def change(gm: fx.GraphModule, name: str, **values: Any) -> None:
    for key, value in values.items():
        setattr(node(gm, name), key, value)


def leave_an_operator(gm: fx.GraphModule) -> None:
    gm.add_module("left", fxq.prepare(Net(), image()).quantized.conv)
    change(gm, "pool", op="call_module", target="left")


def begin_a_loop(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(node(gm, "pool")):
        gm.graph.call_function(loops.begin, (3,))


def as_float(gm: fx.GraphModule, name: str) -> None:
    set_fact(node(gm, name), TensorFact(fact(node(gm, name)).shape, torch.float32))


BREAKS: list[tuple[Stage, str, Break]] = [
    (Stage.TRACED, "name_a_module_that_does_not_exist", lambda gm: change(gm, "pool", target="pol")),
    (Stage.TRACED, "call_a_tensor", lambda gm: change(gm, "pool", target="conv.weight")),
    (Stage.TRACED, "use_before_definition", lambda gm: node(gm, "flatten").append(node(gm, "pool"))),
    (Stage.CANONICAL, "name_a_tensor_that_does_not_exist", lambda gm: change(gm, "conv_weight", target="conv.weigth")),
    (Stage.CANONICAL, "drop_an_argument", lambda gm: change(gm, "pool", args=node(gm, "pool").args[:1])),
    (Stage.CANONICAL, "add_an_unknown_argument", lambda gm: change(gm, "pool", kwargs={"kernel": 3})),
    (Stage.CANONICAL, "forget_a_shape", lambda gm: set_fact(node(gm, "conv"), None)),
    (Stage.ANNOTATED, "forget_an_annotation", lambda gm: node(gm, "pool").meta.pop("annotation")),
    (Stage.BOUNDED, "read_a_float", lambda gm: change(gm, "conv", args=(node(gm, "x"), *node(gm, "conv").args[1:]))),
    (Stage.BOUNDED, "return_an_integer", lambda gm: change(gm, "output", args=(node(gm, "head"),))),
    (Stage.BOUNDED, "tear_a_group_apart", lambda gm: annotate(node(gm, "pool"), replace(annotation(node(gm, "pool")), group=99))),
    (Stage.PREPARED, "call_an_operator_directly", lambda gm: change(gm, "pool", op="call_function", target=BY_NAME["max_pool2d"].function)),
    (Stage.PREPARED, "set_a_negative_scale", lambda gm: gm.quantized.conv.output.base_scale.fill_(-0.5)),
    (Stage.PREPARED, "set_an_infinite_scale", lambda gm: gm.quantized.head.output.base_scale.fill_(float("inf"))),
    (Stage.PREPARED, "begin_a_loop_that_does_not_end", begin_a_loop),
    (Stage.INTEGER, "leave_an_operator", leave_an_operator),
    (Stage.INTEGER, "make_an_accumulator_float", lambda gm: as_float(gm, "conv_convolution")),
    (Stage.INTEGER, "forget_a_dtype", lambda gm: set_fact(node(gm, "conv"), None)),
    (Stage.FUSED, "cover_what_is_not_there", lambda gm: set_kernel(node(gm, "conv"), "sum of products", ("nothing", "conv"))),
    (Stage.FUSED, "cover_what_others_read", lambda gm: set_kernel(node(gm, "conv"), "sum of products", ("x_quantize", "conv"))),
]


@pytest.mark.parametrize(("stage", "name", "damage"), BREAKS, ids=[f"{stage.name}-{name}" for stage, name, _ in BREAKS])
def test_a_broken_graph_is_found_and_its_node_named(stage: Stage, name: str, damage: Break, golden: Golden) -> None:
    gm = graph_at(stage)
    assert violations(gm, stage) == []
    damage(gm)
    with pytest.raises(fxq.errors.StageViolation) as caught:
        verify_stage(gm, stage, "some.pass")
    golden(re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n", f"{stage.name.lower()}-{name}.txt")


@pytest.mark.nightly
def test_every_rule_is_broken_by_some_test() -> None:
    caught = set()
    for stage, _, damage in BREAKS:
        gm = graph_at(stage)
        damage(gm)
        caught |= {rule for rule in SPECS[stage] if list(rule(gm))}
    assert {rule for rules in SPECS.values() for rule in rules} == caught


def test_the_pipeline_stops_after_the_pass_that_broke_the_graph(golden: Golden) -> None:
    def spoil(gm: fx.GraphModule, context: Context) -> int:
        set_fact(node(gm, "conv"), None)
        return 1

    gm = fxq.prepare(Net(), image(), until="canonical.rewrite")
    later: list[int] = []
    passes = (Pass(spoil, Stage.CANONICAL), Pass(lambda gm, context: later.append(1) or 0, Stage.CANONICAL))
    with pytest.raises(fxq.errors.StageViolation) as caught:
        run(gm, passes, Context(get_target("bayes-e"), QConfigMapping()), Dial(0, None))
    golden(re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n", "pipeline.txt")
    assert later == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_an_error_inside_a_pass_says_which_one() -> None:
    with pytest.raises(fxq.errors.ScaleConflict) as caught:
        fxq.prepare(Net(), image(), qconfig=conflicting())
    assert caught.value.__notes__ == ["raised by pass scales.share"]  # type: ignore[attr-defined]


# ---- shared scales ------------------------------------------------------------------------------------------------------
def fixed(scale: float, dtype: str = "int8") -> fxq.QConfig:
    return fxq.QConfig(output=fxq.ActivationConfig(dtype, scale=scale))


def conflicting() -> QConfigMapping:
    return QConfigMapping().set_module_name("conv", fixed(0.5)).set_module_name("pool", fixed(0.25))


@members(lambda: dict(first=nn.Conv2d(2, 4, 3), second=nn.Conv2d(2, 4, 3)))
def Ladder(self, x: Tensor) -> Tensor:
    """Two layers whose outputs a chain of operators without arithmetic ties together."""
    left = F.max_pool2d(F.max_pool2d(self.first(x), 2).flatten(1).reshape(-1, 4, 2, 2), 2)
    right = F.max_pool2d(self.second(x), 4)
    return torch.cat([left.flatten(1), right.flatten(1)], 1)


def conflict_text(model: nn.Module, mapping: QConfigMapping) -> str:
    with pytest.raises(fxq.errors.ScaleConflict) as caught:
        fxq.prepare(model, image(), qconfig=mapping)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n"


def test_two_fixed_scales_tied_by_a_pool_conflict_and_the_path_between_the_two_is_the_explanation(golden: Golden) -> None:
    golden(conflict_text(Net(), conflicting()), "conflict-pool.txt")
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


def test_groups_are_connected_components_whatever_the_order() -> None:
    gm = fxq.prepare(Ladder(), image(), until="scales.share")
    groups: dict[int, set[str]] = {}
    for each in gm.graph.nodes:
        spec = annotation(each)
        if isinstance(spec, Annotation) and spec.group is not None:
            groups.setdefault(spec.group, set()).add(each.name)
    assert {"first", "max_pool2d", "flatten", "reshape", "max_pool2d_1", "flatten_1", "flatten_1_dequantize"} in groups.values()
    assert {"second", "max_pool2d_2", "flatten_2", "flatten_2_dequantize"} in groups.values()
