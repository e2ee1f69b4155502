"""A prepared model follows a change of its modules or raises, and their state decides what VALIDATE computes."""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import fxquant as fxq
from fxquant.quantization.learning import Remembered
from tests.shared.networks import descend, to_train, to_validate, written

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


TARGETS = {"uint8": "x86", "int8": "bayes-e", "int4": "nash-e"}
METHODS = [  # of activations, and of weights
    ("int8", "statistics", "learned"),
    ("int8", "frozen", "learned"),
    ("int8", "pact", "statistics"),
    ("uint8", "lsq+", "tqt"),
    ("uint8", "pact", "learned"),
    ("int4", "learned", "learned"),
    ("int4", "tqt", "tqt"),
]
BATCHES = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def net() -> Any:
    """A residual, a fused batch norm, a channel whose weights are 0, and a constant that is added."""
    model = written(
        lambda m, x: m.last(torch.relu(x + m.bn(m.conv(x))) + m.shift),
        conv=nn.Conv2d(3, 3, 3, padding=1),
        bn=nn.BatchNorm2d(3),
        last=nn.Conv2d(3, 2, 1),
        shift=nn.Parameter(torch.randn(3, 1, 1)),
    )
    with torch.no_grad():
        model.last.weight[1] = 0
    return model


@functools.cache
def _calibrated(dtype: str, activations: str, weights: str, rounded: bool) -> fx.GraphModule:
    model = _uncalibrated(dtype, activations, weights)
    return fxq.calibrate(model, BATCHES, options=fxq.Options(round_weights=rounded, correct_bias=rounded))


def _uncalibrated(dtype: str, activations: str, weights: str) -> fx.GraphModule:
    torch.manual_seed(7)
    weight = fxq.WeightConfig("int4" if dtype == "int4" else "int8", training=weights)
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype, training=activations), weight)
    return fxq.prepare(net(), BATCHES[0], TARGETS[dtype], qconfig)


def step(model: fx.GraphModule, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    descend(model, [batch], loss=lambda output: (output - 1).square().mean(), optimizer=optimizer)


def assert_one_meaning(model: fx.GraphModule, fresh: fx.GraphModule) -> None:
    """Two calls agree, the integer graph has their bits, and so has a model that has loaded the state."""
    state = copy.deepcopy(model.state_dict())
    integer = fxq.convert(model.eval())
    fxq.set_state(model, fxq.State.VALIDATE)
    with torch.no_grad():
        output = model(BATCHES[0])
        assert torch.equal(model(BATCHES[0]), output)
    assert fxq.verify(model, integer, BATCHES[:2])
    assert fxq.verify(model, fxq.convert(model), BATCHES[:1])
    for held in (state, model.state_dict()):
        loaded = copy.deepcopy(fresh)
        loaded.load_state_dict(held)
        to_validate(loaded)
        assert torch.equal(fxq.convert(loaded)(BATCHES[0]), integer(BATCHES[0]))
        with torch.no_grad():
            assert torch.equal(loaded(BATCHES[0]), output)


@torch.no_grad()
def _averaged_in_place(model: nn.Module, source: nn.Module) -> None:
    for own, other in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
        own.copy_(own * 0.75 + other * 0.25 if own.is_floating_point() else other)


@torch.no_grad()
def _averaged_by_loading(model: nn.Module, source: nn.Module) -> None:
    theirs = source.state_dict()
    model.load_state_dict({n: v * 0.75 + theirs[n] * 0.25 if v.is_floating_point() else v for n, v in model.state_dict().items()})


@torch.no_grad()
def _copied(model: nn.Module, source: nn.Module) -> None:
    for own, other in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
        own.copy_(other)


COPIES: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "averaged in place": _averaged_in_place,
    "averaged by loading": _averaged_by_loading,
    "copied": _copied,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("dtype", "activations", "weights"), METHODS, ids=["-".join(method) for method in METHODS])
def test_no_copy_changes_what_validate_computes(dtype: str, activations: str, weights: str) -> None:
    """The copies are made before the first batch of training, when learned scales of weights have not started."""
    model = copy.deepcopy(_calibrated(dtype, activations, weights, rounded=dtype != "int8"))
    fresh = _uncalibrated(dtype, activations, weights)
    to_train(model)
    copies = {how: copy.deepcopy(model) for how in COPIES}
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for index in range(3):
        step(model, optimizer, BATCHES[index])
        if index == 2:
            fxq.freeze(model, batch_norm=False)
        for how, copied in copies.items():
            COPIES[how](copied, model)
    for copied in copies.values():
        assert_one_meaning(copied, fresh)
    assert_one_meaning(copy.deepcopy(model), fresh)


@pytest.mark.parametrize("buffers", [False, True])
def test_averaged_models_of_pytorch_average_prepared_ones(buffers: bool) -> None:
    model, fresh = copy.deepcopy(_calibrated("int4", "learned", "learned", rounded=True)), _uncalibrated("int4", "learned", "learned")
    to_train(model)
    averaged = AveragedModel(model, use_buffers=buffers)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in BATCHES:
        step(model, optimizer, batch)
        averaged.update_parameters(model)
    assert_one_meaning(averaged.module, fresh)
    assert not fxq.verify(averaged.module, fxq.convert(model), BATCHES[:1])


def test_a_copy_that_takes_over_the_buffers_of_a_frozen_model_is_frozen() -> None:
    model = copy.deepcopy(_calibrated("int4", "learned", "learned", rounded=False))
    averaged = AveragedModel(model)
    fxq.freeze(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert all(each.quantizer.frozen for each in averaged.module.quantized.children() if hasattr(each, "quantizer"))


def test_a_fact_is_remembered_until_its_buffer_changes() -> None:
    buffer, calls = torch.zeros(2), []
    fact = Remembered(0.0)

    def total() -> float:
        calls.append(1)
        return float(buffer.sum())

    assert (fact.get(total, buffer), fact.get(total, buffer), len(calls)) == (0.0, 0.0, 1)
    buffer.add_(1)
    assert (fact.get(total, buffer), len(calls)) == (2.0, 2)
    buffer = torch.ones(2) * 3
    assert fact.get(total, buffer) == 6.0
    assert fact.get(total, buffer.to("meta")) == 6.0
