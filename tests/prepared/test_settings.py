"""A prepared model follows a change of its modules, or raises where it is made, or when it is next called; it never ignores one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq

X = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.epoch, self.steps, self.inner = 2.0, 0, [1, 2], nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = x * step
        return self.inner(x * self.scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.drop, self.block, self.fc = nn.Dropout(0.0), Block(), nn.Linear(8, 5)
        self.temperature, self.skip, self.function, self.seen = 4.0, True, F.silu, 0

    def cool(self) -> None:
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        y = self.block(self.act(self.bn(self.conv(x))).mean((2, 3)))
        z = self.drop(self.function(y) / self.temperature)
        return self.fc(z + y if self.skip else z)


def _prepared() -> Any:
    torch.manual_seed(0)
    return fxq.calibrate(fxq.prepare(Net().eval(), X), [X])


def _assign(path: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *parents, name = path.split(".")
        setattr(model.get_submodule(".".join(parents)), name, value)

    return change


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_assign("temperature", 2.0), "temperature is 2.0, and was 4.0"),
        (_assign("skip", False), "skip is False, and was True"),
        (_assign("function", F.gelu), "function is torch._C._nn.gelu, and was torch.nn.functional.silu"),
        (lambda model: model.cool(), "temperature is 1.0, and was 4.0"),
        (_assign("act", nn.SiLU()), "act is torch.nn.modules.activation.SiLU"),
        (_assign("bn", nn.Identity()), "bn is torch.nn.modules.linear.Identity"),
        (_assign("fc", nn.Linear(8, 7)), "fc.out_features is 7, and was 5"),
        (_assign("block", nn.Sequential(nn.ReLU())), "block.inner is none, and was a module"),
    ],
)
def test_a_change_that_the_graph_does_not_follow_raises_where_it_is_assigned_to_the_model(change: Any, what: str) -> None:
    model = _prepared()
    before = model(X)
    with pytest.raises(fxq.errors.ConfigurationError) as raised:
        change(model)
    assert what in str(raised.value)
    assert "test_settings.py" in str(raised.value.at)
    assert torch.equal(model(X), before)  # nothing was changed


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_assign("conv.stride", (2, 2)), "conv.stride is (2, 2), and was (1, 1)"),
        (_assign("conv.padding_mode", "circular"), "conv.padding_mode is circular, and was zeros"),
        (_assign("block.scale", 3.0), "block.scale is 3.0, and was 2.0"),
        (_assign("block.steps", [1, 2, 3]), "block.steps is (1, 2, 3), and was (1, 2)"),
        (_assign("drop.p", 0.5), "drop.p is 0.5, and was 0.0"),
        (lambda model: setattr(model.fc, "forward", MethodType(lambda self, x: x, model.fc)), "fc.forward is another function"),
    ],
)
@pytest.mark.parametrize("use", [lambda model: model(X), fxq.convert], ids=["call", "convert"])
def test_a_change_inside_of_a_module_raises_when_the_model_is_next_used(change: Any, what: str, use: Any) -> None:
    model = _prepared()
    change(model)
    with pytest.raises(fxq.errors.ConfigurationError) as raised:
        use(model)
    assert what in str(raised.value)
    change(unchanged := copy.deepcopy(_prepared()))
    with pytest.raises(fxq.errors.ConfigurationError):
        use(copy.deepcopy(unchanged))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "change",
    [
        _assign("fc", nn.Linear(8, 5)),
        _assign("seen", 7),
        _assign("block.epoch", 3),
        _assign("bn.momentum", 0.5),
        _assign("bn.eps", 1.0),
        _assign("fc.bias", None),
        _assign("fc.weight", nn.Parameter(torch.ones(5, 8))),
        lambda model: nn.utils.parametrizations.weight_norm(model.fc),
    ],
)
def test_what_no_graph_reads_and_what_it_reads_when_it_runs_may_change(change: Any) -> None:
    torch.manual_seed(0)
    wanted = Net().eval()
    model = _prepared()
    torch.manual_seed(1)
    change(wanted)
    change(model)
    fxq.set_state(model, "float")
    torch.testing.assert_close(model(X), wanted(X))


@pytest.mark.parametrize("batch_norm", ["folded", "live"])
def test_a_batch_norm_that_is_folded_into_its_layer_is_no_change(batch_norm: str) -> None:
    model = fxq.prepare(Net().eval(), X, options=fxq.Options(batch_norm=batch_norm))
    assert torch.equal(copy.deepcopy(model)(X), model(X))


def test_a_loaded_model_refuses_the_changes_of_its_layers_sizes_and_settings(tmp_path: Any) -> None:
    model = fxq.load(fxq.save(_prepared(), tmp_path / "model.fxq"))
    with pytest.raises(fxq.errors.ConfigurationError, match=r"temperature is 2\.0"):
        model.temperature = 2.0
    model.conv.stride = (2, 2)
    with pytest.raises(fxq.errors.ConfigurationError, match="stride"):
        model(X)


def _classifier(classes: int, target: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
    learned = fxq.QConfig(fxq.ActivationConfig(training="learned"), fxq.WeightConfig(training="learned"))
    return fxq.calibrate(fxq.prepare(model.eval(), X, target=target, qconfig=learned), [X])


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("default_outputs")
@pytest.mark.parametrize(("source", "target", "classes"), [("bayes-e", "bayes-e", 7), ("bayes-e", "x86", 5), ("x86", "bayes-e", 5)])
def test_scales_of_other_channels_and_grids_are_named_and_left_out_of_a_checkpoint(
    source: str, target: str, classes: int, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = {key: value + 1 for key, value in _classifier(5, source).state_dict().items() if classes == 5 or not key.startswith("5.")}
    model, fresh = _classifier(classes, target), _classifier(classes, target).state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(checkpoint)
    result = model.load_state_dict(checkpoint, strict=False)
    assert "%_5" in caplog.messages[-1]
    assert "load it with strict=False, and calibrate" in caplog.messages[-1]
    loaded = model.state_dict()
    assert torch.equal(loaded["0.weight"], checkpoint["0.weight"])
    for key in loaded:
        if ".factors." in key:
            assert key not in checkpoint or loaded[key].shape != checkpoint[key].shape or torch.equal(loaded[key], checkpoint[key])
        elif key.startswith("quantized._5.") or (classes == 5 and key.startswith("quantized._2.")):
            assert key in result.missing_keys or key.endswith("stopped")  # a flag that a state_dict may be without
            assert torch.equal(loaded[key].nan_to_num(7), fresh[key].nan_to_num(7))
