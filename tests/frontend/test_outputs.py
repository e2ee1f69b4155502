"""What a model returns, its compiled forms return: registered classes as they are, other objects as dicts of their tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.frontend import assumptions, tracer


class Outcome(OrderedDict):
    """As `ModelOutput` of transformers is: a dict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


pytree.register_pytree_node(
    Outcome,
    lambda outcome: (list(outcome.values()), list(outcome)),
    lambda values, names: Outcome(zip(names, values, strict=True)),
    flatten_with_keys_fn=lambda outcome: ([(pytree.MappingKey(key), value) for key, value in outcome.items()], list(outcome)),
)


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@dataclasses.dataclass
class Unknown:
    value: Any
    count: int = 3


class Cache:
    def __init__(self, value: torch.Tensor) -> None:
        self.layers, self.kind, self.length = [Unknown(value)], Cache, 3


torch.export.register_dataclass(Pair)


class Net(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return self.wrap(y, torch.relu(y))


CASES = {
    "mapping": lambda y, z: Outcome(last=y, hidden=(y, z)),
    "dataclass": lambda y, z: Pair(y, [z, {"again": z}]),
    "inside": lambda y, z: (Outcome(last=Pair(y, z)), z),
    "unknown dataclass": lambda y, z: Unknown((y, z)),
    "cache": lambda y, z: Outcome(last=y, cache=Cache(z)),
}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Cache):
        return [layer.value for layer in value.layers]
    if isinstance(value, Unknown):
        return leaves(value.value)
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in pytree.tree_leaves(value) for leaf in leaves(item)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_every_form_returns_what_the_model_does(case: str, tmp_path: Path) -> None:
    model, x = Net(CASES[case]).eval(), torch.randn(3, 4)
    expected = model(x)
    prepared = fxq.calibrate(fxq.prepare(model, (x,)), [x], show_progress=False)
    integer = fxq.convert(prepared)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert all(torch.equal(a, b) for a, b in zip(leaves(fxq.trace(model, (x,))(x)), leaves(expected), strict=True))
    for form in (prepared, integer, loaded):
        assert type(form(x)) is type(expected)
        assert all(torch.equal(a, b) for a, b in zip(leaves(form(x)), leaves(integer(x)), strict=True))
    assert all(torch.allclose(a, b, atol=0.1) for a, b in zip(leaves(integer(x)), leaves(expected), strict=True))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert fxq.verify(integer, path, [x], show_progress=False)


def test_an_object_of_another_library_is_told_of() -> None:
    traced = fxq.trace(Net(CASES["cache"]).eval(), (torch.randn(3, 4),))
    told = "forward returned a Cache, whose tensors are returned as a dict of its attributes, without 'kind', 'length'"
    assert any(told in a for a in assumptions(traced))
    assert list(traced(torch.randn(2, 4))["cache"]) == ["layers"]


def test_a_class_that_nobody_registered_again_is_a_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    path = fxq.save(fxq.trace(Net(CASES["mapping"]).eval(), (x,)), tmp_path / "model.fxq")
    monkeypatch.delitem(pytree.SUPPORTED_NODES, Outcome)
    assert type(fxq.load(path)(x)) is dict


def test_a_dataclass_keeps_its_numbers_and_is_a_dict_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    traced = fxq.trace(Net(CASES["unknown dataclass"]).eval(), (x,))
    assert isinstance(traced(x), Unknown)
    assert traced(x).count == 3
    path = fxq.save(traced, tmp_path / "model.fxq")
    monkeypatch.delitem(tracer._DATACLASSES, f"{Unknown.__module__}.{Unknown.__qualname__}")
    found = fxq.load(path)(x)
    assert type(found) is dict
    assert found["count"] == 3
