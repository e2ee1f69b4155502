"""Train mode of parts of a prepared model: modules frozen by `module.eval()` stay frozen, with the meaning of the float model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.networks import members, to_train, written

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BATCH = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@members(lambda: dict(norm=nn.BatchNorm2d(4)))
def Functional(self, x: Tensor) -> Tensor:
    """A batch norm and a dropout that are functions."""
    bn = self.norm
    x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training, 0.1, bn.eps)
    return F.dropout(x, 0.5, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            written(
                lambda m, x: m.dropout(m.conv(m.norm(x))),
                norm=nn.BatchNorm2d(4),
                conv=nn.Conv2d(4, 4, 3, padding=1),
                dropout=nn.Dropout(0.5),
            ),
        )
        self.conv, self.functional, self.head = nn.Conv2d(4, 4, 3, padding=1), Functional(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.functional(self.conv(self.backbone(x).relu())).mean((2, 3)))


def calibrated(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return to_train(fxq.calibrate(fxq.prepare(model, x), [x]))


@pytest.fixture(scope="module")
def net() -> fx.GraphModule:
    torch.manual_seed(0)
    return calibrated(Net(), BATCH)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name and "quantized" not in name}


def moved(model: nn.Module, x: Tensor) -> set[str]:
    before = statistics(model)
    model(x)
    return {name for name, value in statistics(model).items() if not torch.equal(value, before[name])}


def norms(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, NORMS)]


def evaluate_norms(model: nn.Module) -> None:
    for norm in norms(model):
        norm.eval()


WAYS: dict[str, Callable[[Any], Any]] = {
    "train mode": lambda model: None,
    "every batch norm": evaluate_norms,
    "a container": lambda model: model.backbone.eval(),
    "a nested module": lambda model: model.get_submodule("backbone.3").eval(),
    "by name": lambda model: [module.train(False) for name, module in model.named_modules() if "backbone" in name],
    "one batch norm": lambda model: model.get_submodule("backbone.1").eval(),
    "the convolution alone": lambda model: model.get_submodule("backbone.0").eval(),
    "momentum of 0": lambda model: [setattr(norm, "momentum", 0.0) for norm in norms(model)],
    "no running statistics": lambda model: [setattr(norm, "track_running_stats", False) for norm in norms(model)],
    "a function's module": lambda model: model.functional.eval(),
    "the convolution in front of a function": lambda model: model.conv.eval(),
    "all but the model": lambda model: [child.eval() for child in model.children()],
}


@pytest.mark.parametrize("name", WAYS)
def test_statistics_move_where_those_of_the_float_model_do(net: fx.GraphModule, name: str) -> None:
    prepared, model = copy.deepcopy(net), Net().train()
    WAYS[name](prepared), WAYS[name](model)
    assert moved(prepared, BATCH) == moved(model, BATCH)


@pytest.mark.parametrize("again", ["copied", "pickled", "saved"])
def test_what_a_copy_and_a_file_hold_obeys_as_well(net: fx.GraphModule, again: str, tmp_path: Path) -> None:
    copies: dict[str, Callable[[], fx.GraphModule]] = {
        "copied": lambda: copy.copy(copy.deepcopy(net)),
        "pickled": lambda: pickle.loads(pickle.dumps(net)),
        "saved": lambda: fxq.load(fxq.save(net, tmp_path / "net.fxq")),
    }
    prepared = copies[again]()
    prepared.functional.eval()  # type: ignore[union-attr, operator]
    assert {name.split(".")[0] for name in moved(prepared, BATCH)} == {"backbone"}
    evaluate_norms(prepared)
    assert not moved(prepared, BATCH)


def test_with_everything_frozen_by_hand_train_is_validate(net: fx.GraphModule) -> None:
    prepared, x = copy.deepcopy(net), BATCH
    fxq.freeze(prepared, batch_norm=False)
    for child in ("backbone", "conv", "functional", "head"):
        prepared.get_submodule(child).eval()
    trained = prepared(x)
    fxq.set_state(prepared, "validate")
    assert torch.equal(trained, prepared(x))


@pytest.mark.parametrize("part", ["inner.dropout", "inner"])
def test_a_dropout_that_is_evaluated_drops_nothing(part: str) -> None:
    x, inner = torch.randn(16, 4), nn.ModuleDict({"dropout": nn.Dropout(0.5)})
    prepared = calibrated(written(lambda m, x: m.linear(m.inner["dropout"](x)), inner=inner, linear=nn.Linear(4, 4)), x)
    fxq.freeze(prepared)
    assert not torch.equal(prepared(x), prepared(x))
    prepared.get_submodule(part).eval()
    evaluated, expected = prepared(x), fxq.convert(prepared)(x)
    assert torch.equal(evaluated, expected)
    fxq.set_state(prepared.train(), fxq.State.VALIDATE)
    assert torch.equal(prepared(x), expected)


def test_scales_of_a_part_in_eval_mode_follow_no_batch(net: fx.GraphModule) -> None:
    prepared = copy.deepcopy(net)
    before = fxq.qparams(prepared)
    prepared.get_submodule("backbone").eval()
    prepared(3 * BATCH)
    after = fxq.qparams(prepared)
    still = {name for name in before if before[name] == after[name]}
    assert {name for name in before if name.startswith("backbone")} <= still
    assert "head" not in still


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize("fused", [True, False])
def test_every_kind_of_batch_norm_obeys(kind: Any, fused: bool) -> None:
    rank = {nn.BatchNorm1d: 1, nn.BatchNorm3d: 3}.get(kind, 2)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](2, 4, 1) if fused else nn.ReLU()
    x = torch.randn(4, 2 if fused else 4, *[4] * rank)
    prepared = calibrated(nn.Sequential(layer, kind(4)), x)
    norm = prepared.get_submodule("1")
    before = {name: value.clone() for name, value in norm.named_buffers()}
    norm.eval()
    prepared(x)
    assert all(torch.equal(value, before[name]) for name, value in norm.named_buffers())
    norm.train()
    prepared(x)
    assert not any(torch.equal(value, before[name]) for name, value in norm.named_buffers())


class KeepsNorms(Net):
    """As detectors do: batch norms of the backbone stay in eval mode, and its first layer is frozen."""

    def train(self, mode: bool = True) -> KeepsNorms:
        super().train(mode)
        evaluate_norms(self.backbone)
        self.backbone[0].weight.requires_grad_(False)
        return self


def test_what_the_models_own_train_freezes_stays_frozen() -> None:
    model = KeepsNorms()
    prepared = calibrated(model, BATCH)
    assert model.backbone[0].weight.requires_grad  # the caller's model is not changed
    assert {name.split(".")[0] for name in moved(prepared, BATCH)} == {"functional"}
    assert [name for name, parameter in prepared.named_parameters() if not parameter.requires_grad] == ["backbone.0.weight"]
    assert "KeepsNorms.train keeps backbone.1, backbone.3.norm in eval mode and freezes backbone.0.weight" in fxq.explain(prepared)
