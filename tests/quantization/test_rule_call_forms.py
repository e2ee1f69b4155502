"""A rule for a function is about that function however the model calls it; a rule for a module's class is about that class."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ops.core.record import is_meant

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
    torch.softmax: nn.Softmax,
    F.relu: nn.ReLU,
    F.relu6: nn.ReLU6,
    F.hardtanh: nn.Hardtanh,
    F.linear: nn.Linear,
    F.conv2d: nn.Conv2d,
    F.layer_norm: nn.LayerNorm,
    F.batch_norm: nn.BatchNorm2d,
    F.interpolate: nn.Upsample,
    F.gelu: nn.GELU,
    F.dropout: nn.Dropout,
    F.embedding: nn.Embedding,
    torch.lstm: nn.LSTM,
    "sigmoid": nn.Sigmoid,
    torch.flatten: nn.Flatten,
    F.multi_head_attention_forward: nn.MultiheadAttention,
}
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


def test_a_function_means_the_layer_that_calls_it() -> None:
    assert [(one, other) for one, other in MODULES.items() if not is_meant(one, other)] == []
    assert [(one, other) for one, other in MODULES.items() if is_meant(other, one)] == []


def test_other_functions_and_classes_are_not_meant() -> None:
    assert [(one, other) for one, other in OTHERS if is_meant(one, other)] == []


class Written(nn.Module):
    """A layer, and a function behind it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
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
            assert in_float(Written(call), kind) == (True, False), (index, kind)


def test_a_rule_for_a_class_is_about_its_modules_alone_and_says_where_it_matched_nothing() -> None:
    layer, model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)), Written(lambda y, x: y.softmax(1))
    assert in_float(layer, nn.Softmax) == (True, False)
    assert in_float(model, nn.Softmax) == (False, True)
    assert in_float(model, torch.add) == (False, True)


def test_the_spelling_that_the_model_has_goes_before_others() -> None:
    asked = fxq.QConfigMapping().set_object_type(F.linear, None).set_object_type(nn.Linear, fxq.QConfig(fxq.ActivationConfig("int16")))
    for rules in (asked, fxq.QConfigMapping(types=dict(reversed(asked.types.items())))):
        said = fxq.explain(fxq.prepare(Written(lambda y, x: F.linear(y, torch.ones(2, 8))), torch.randn(4, 8), "nash-e", rules))
        assert [line.split()[0] for line in said.splitlines() if line.startswith("%") and "keeps it in float" in line] == ["%linear"]
        assert "matched nothing" not in said


def test_a_rule_for_two_spellings_of_a_function_takes_the_models_own() -> None:
    rules = fxq.QConfigMapping().set_object_type(F.softmax, None).set_object_type("softmax", fxq.QConfig())
    said = fxq.explain(fxq.prepare(Written(lambda y, x: y.softmax(1)), torch.randn(4, 8), "nash-e", rules))
    assert "the qconfig keeps it in float" not in said
