"""Passes and operators of the user's own."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ops import operator_of
from fxquant.ops.core.record import BY_NAME, FUNCTIONS, METHODS, MODULES, OPERATORS
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from tests.shared.networks import members, written

TABLES: tuple[dict[Any, Any], ...] = (OPERATORS, BY_NAME, FUNCTIONS, METHODS, MODULES)


def gated() -> nn.Module:
    return written(lambda m, x: F.hardswish(m.conv(x)), conv=nn.Conv2d(3, 4, 1))


BATCH = torch.randn(4, 3, 5, 5)


def to_silu(gm: fx.GraphModule, context: Any) -> int:
    result = [node for node in gm.graph.nodes if (operator := operator_of(node)) is not None and operator.name == "hardswish"]
    for node in result:
        node.target = F.silu
    return len(result)


def operators(model: fx.GraphModule) -> list[str]:
    return [layer.operator for layer in fxq.inspect.layers(model) if not layer.boundary]


def test_a_pass_runs_after_the_one_it_is_named_after_and_the_whole_contract_holds(tmp_path: Path) -> None:
    seen: list[str] = []

    def watch(gm: fx.GraphModule, context: Any) -> int:
        seen.append(str(gm.meta["stage"]))
        return 0

    model = gated().eval()
    prepared = fxq.prepare(model, BATCH, "nash-e", options=fxq.Options(passes={"rules.match": [to_silu, watch], "boundary.insert": watch}))
    assert seen == ["CANONICAL", "BOUNDED"]
    assert operators(prepared) == ["conv2d", "silu"]
    fxq.calibrate(prepared, [BATCH])
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, [BATCH])
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "own.onnx"), [BATCH])
    stopped = fxq.prepare(gated().eval(), BATCH, options=fxq.Options(passes={"rules.match": to_silu}), until="test_own_passes.to_silu")
    assert "silu" in fxq.text(stopped)


def test_what_a_pass_leaves_is_held_against_the_stage_even_if_it_says_that_it_changed_nothing(tmp_path: Path) -> None:
    def breaks(gm: fx.GraphModule, context: Any) -> int:
        next(node for node in gm.graph.nodes if operator_of(node) is not None).meta.pop("fact")
        return 0

    with pytest.raises(fxq.errors.StageViolation, match="breaks"):
        fxq.prepare(gated().eval(), BATCH, options=fxq.Options(passes={"canonical.rewrite": breaks}, dump=tmp_path))
    assert "hardswish" in next(tmp_path.glob("*.breaks.txt")).read_text(encoding="utf-8")  # the broken graph itself


def test_any_exception_in_a_pass_names_the_pass() -> None:
    def fails(gm: fx.GraphModule, context: Any) -> int:
        return int(getattr(gm.graph, "there_is_no_such_attribute"))  # noqa: B009

    with pytest.raises(AttributeError) as raised:
        fxq.prepare(gated().eval(), BATCH, options=fxq.Options(passes={"canonical.rewrite": fails}))
    assert sys.version_info < (3, 11) or "raised by pass test_own_passes.fails" in raised.value.__notes__


def test_a_pass_that_counts_nothing_and_a_name_of_no_pass_are_told() -> None:
    def to_nothing(gm: fx.GraphModule, context: Any) -> None: ...

    with pytest.raises(fxq.errors.ConfigurationError, match=r"to_nothing returned None[\s\S]*return an integer"):
        fxq.prepare(gated().eval(), BATCH, options=fxq.Options(passes={"rules.match": to_nothing}))
    with pytest.raises(fxq.errors.ConfigurationError, match=r"names no pass[\s\S]*canonical.rewrite, gradients.move, rules.match"):
        fxq.prepare(gated().eval(), BATCH, options=fxq.Options(passes={"rules.macht": to_silu}))


# ---- operators -----------------------------------------------------------------------------------------------------------------
def faded(first: Tensor, second: Tensor, weight: Tensor, gain: float = 1.0) -> Tensor:
    share = torch.sigmoid(weight)
    return (first * share + second * (1 - share)) * gain


def expanded(build: Any, first: Any, second: Any, weight: Any, gain: float) -> Any:
    share = build(torch.sigmoid, weight)
    return build(mul, build(add, build(mul, first, share), build(mul, second, build(sub, 1, share))), gain)


@pytest.fixture(scope="module", autouse=True)
def fade() -> Iterator[Callable[..., Tensor]]:
    """The operator, declared for this file alone: other files hold the whole table against theirs."""
    before = [dict(table) for table in TABLES]
    yield fxq.extend.operator("fade", faded, ["first", "second"], expand=expanded)
    for table, kept in zip(TABLES, before, strict=True):
        table.clear()
        table.update(kept)


@members(lambda fade: dict(fade=fade, left=nn.Conv2d(3, 4, 1), right=nn.Conv2d(3, 4, 1), weight=nn.Parameter(torch.randn(4, 1, 1))))
def Fade(self, x: Tensor) -> Tensor:
    return self.fade(self.left(x), second=self.right(x), weight=self.weight, gain=0.5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bernoulli2", "nash-e", "x86"])
def test_an_operator_of_several_tensors_is_integer_on_every_target(target: str, fade: Callable[..., Tensor], tmp_path: Path) -> None:
    model = Fade(fade).eval()
    assert torch.equal(model(BATCH), faded(model.left(BATCH), model.right(BATCH), model.weight, 0.5))
    result = fxq.quantize(model, [BATCH], target)
    assert all(layer.integer for layer in fxq.inspect.layers(result.integer) if not layer.boundary)
    assert "fade: mul" in fxq.explain(result.integer)
    assert fxq.verify(result.prepared, result.integer, [BATCH])
    assert result.verify(result.export(tmp_path / "fade.onnx"), [BATCH])
    loaded = fxq.load(fxq.save(result.prepared, tmp_path / "fade.fxq"))
    assert fxq.verify(loaded, result.integer, [BATCH])
    fxq.set_state(result.prepared, "train")
    result.prepared.train()(BATCH).sum().backward()
    assert result.prepared.get_parameter("weight").grad.abs().sum() > 0
    assert copy.deepcopy(result.prepared)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no meaning": ({}, "no integer form"),
    "two meanings": ({"expand": expanded, "lower": expanded}, "two integer forms"),
    "a parameter that there is not": ({"operands": ["third"], "expand": expanded}, "no parameter 'third'"),
    "a field that there is not": ({"expand": expanded, "granularity": 1}, "no field 'granularity'"),
    "a name that is taken": ({"name": "fade", "expand": expanded}, "registered already"),
    "a name of PyTorch's": ({"name": "hypot", "expand": expanded}, "cannot be declared"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_operator_that_cannot_be_declared_says_why(case: str) -> None:
    inputs, told = WRONG[case]
    with pytest.raises(fxq.errors.ConfigurationError, match=told):
        fxq.extend.operator(**{"name": "fades", "function": faded, "operands": ["first", "second"], **inputs})


def by_content(first: Tensor, second: Tensor) -> Tensor:
    return first + second if first.sum() > 0 else first - second


def test_an_operator_that_branches_on_what_a_tensor_holds_is_named() -> None:
    model = written(lambda m, x: chosen(torch.relu(x), x))

    chosen = fxq.extend.operator(
        "chosen_by_content", by_content, ["first", "second"], expand=lambda build, first, second: build(add, first, second)
    )
    assert torch.equal(model(BATCH), by_content(torch.relu(BATCH), BATCH))
    with pytest.raises(fxq.errors.TraceError, match=r"test_own_passes.py[\s\S]*chosen_by_content needs numbers[\s\S]*use torch.where"):
        fxq.prepare(model.eval(), BATCH, "nash-e")
