"""Random networks: any mixture of operators and spellings, through the whole pipeline, with equal bits everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.zoo import make_alive
from tests import contract
from tests.contract import compiled

Step = Callable[["Random", Tensor], Tensor]

CLAMPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nn.ReLU": lambda m, x: m.relu(x),
    "nn.ReLU in place": lambda m, x: m.relu_in_place(x),
    "F.relu": lambda m, x: F.relu(x),
    "F.relu in place": lambda m, x: F.relu(x, inplace=True),
    "relu_": lambda m, x: x.relu_(),
    "nn.ReLU6": lambda m, x: m.relu6(x),
    "F.relu6": lambda m, x: F.relu6(x),
    "hardtanh": lambda m, x: F.hardtanh(x, -0.75, 1.25),
    "clamp": lambda m, x: x.clamp(-1.5, 2.0),
    "sigmoid": lambda m, x: x.sigmoid(),
    "nn.Dropout": lambda m, x: m.dropout(x),
    "F.dropout": lambda m, x: F.dropout(x, 0.4, m.training),
}

ADDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda a, b: a + b,
    "torch.add": torch.add,
    "add": lambda a, b: b.add(a),
    "+=": lambda a, b: a.clone().add_(b),
}

POOLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nn.MaxPool2d": lambda m, x: m.pool(x),
    "F.max_pool2d": lambda m, x: F.max_pool2d(x, 2, ceil_mode=True),
    "F.avg_pool2d": lambda m, x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg over padding": lambda m, x: F.avg_pool2d(x, 2, 1, 1),
}

HEADS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nn.AdaptiveAvgPool2d": lambda m, x: m.adaptive(x).flatten(1),
    "mean": lambda m, x: x.mean((2, 3)),
    "torch.mean": lambda m, x: torch.mean(x, dim=[-1, -2], keepdim=True).view(x.size(0), -1),
    "F.adaptive": lambda m, x: torch.flatten(F.adaptive_avg_pool2d(x, 1), 1),
    "all of it": lambda m, x: x.reshape(x.shape[0], -1),
}


@dataclass
class Plan:
    """What hypothesis draws, readable when an example fails: the steps of the body, each with what it needs."""

    channels: int
    height: int
    width: int
    steps: list[tuple[str, ...]] = field(default_factory=list)
    head: str = "mean"
    seed: int = 0


class Random(nn.Module):
    """Executes a plan; every layer is made where the plan first needs it, and its channels follow from what reaches it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleDict()
        self.relu, self.relu_in_place, self.relu6, self.dropout = nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Dropout(0.3)
        self.pool, self.adaptive = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((1, 1))
        with torch.no_grad():
            self.forward(torch.zeros(2, plan.channels, plan.height, plan.width))  # makes the layers

    def layer(self, name: str, make: Callable[[], nn.Module]) -> Any:
        if name not in self.layers:
            self.layers[name] = make()
        return self.layers[name]

    def forward(self, x: Tensor) -> Tensor:
        for index, (kind, *details) in enumerate(self.plan.steps):
            x = getattr(self, f"step_{kind}")(str(index), x, *details)
        x = HEADS[self.plan.head](self, x)
        return self.layer("head", lambda: nn.Linear(x.shape[1], 3))(x)

    def step_conv(self, name: str, x: Tensor, form: str, normalise: str) -> Tensor:
        channels = x.shape[1]
        outputs = channels if form in ("depthwise", "twice") else 1 + (channels * 5 + len(name)) % 8
        make = {
            "3x3": lambda: nn.Conv2d(channels, outputs, 3, padding=1, bias=normalise == "plain"),
            "1x1": lambda: nn.Conv2d(channels, outputs, 1),
            "strided": lambda: nn.Conv2d(channels, outputs, (3, 2), stride=(2, 1), padding=1),
            "depthwise": lambda: nn.Conv2d(channels, channels, 3, padding="same", groups=channels, bias=False),
            "twice": lambda: nn.Conv2d(channels, channels, 3, padding=1),
            "functional": lambda: nn.Conv2d(channels, outputs, 3, dilation=2, padding=2),
        }[form]
        layer = self.layer(name, make)
        x = F.conv2d(x, layer.weight, layer.bias, dilation=2, padding=2) if form == "functional" else layer(x)
        if form == "twice":
            x = layer(F.relu(x))
        return self.layer(name + "_bn", lambda: nn.BatchNorm2d(x.shape[1]))(x) if normalise == "bn" else x

    def step_clamp(self, name: str, x: Tensor, spelling: str) -> Tensor:
        return CLAMPS[spelling](self, x)

    def step_pool(self, name: str, x: Tensor, spelling: str) -> Tensor:
        return POOLS[spelling](self, x) if min(x.shape[2:]) >= 3 else x

    def step_residual(self, name: str, x: Tensor, spelling: str, normalise: str, after: str) -> Tensor:
        y = self.step_conv(name, x, "3x3", normalise)
        if y.shape != x.shape:
            x = self.layer(name + "_shortcut", lambda: nn.Conv2d(x.shape[1], y.shape[1], 1))(x)
        return CLAMPS[after](self, ADDITIONS[spelling](x, y))

    def step_fork(self, name: str, x: Tensor, spelling: str, fused: str) -> Tensor:
        """A layer that is read twice must not absorb what only one of its readers does."""
        y = self.step_conv(name, x, "depthwise", "plain")
        if fused == "batch norm":
            return ADDITIONS[spelling](self.layer(name + "_bn", lambda: nn.BatchNorm2d(y.shape[1]))(y), y)
        if fused == "clamp":
            return ADDITIONS[spelling](F.relu(y), y.sigmoid())
        return ADDITIONS[spelling](x + y, y.sigmoid())

    def step_branch(self, name: str, x: Tensor, spelling: str, third: str) -> Tensor:
        parts = [self.step_conv(name + "_a", x, "1x1", "bn"), self.step_conv(name + "_b", x, "depthwise", "plain").relu()]
        if third == "input":
            parts.append(x)
        joined = torch.concat(parts, dim=1) if spelling == "concat" else torch.cat(parts, 1)
        return joined if joined.shape[1] <= 8 else self.layer(name + "_narrow", lambda: nn.Conv2d(joined.shape[1], 8, 1))(joined)


def choose(names: Any) -> st.SearchStrategy[str]:
    return st.sampled_from(list(names))


norms = choose(("bn", "plain"))
steps = st.one_of(
    st.tuples(st.just("conv"), choose(("3x3", "1x1", "strided", "depthwise", "twice", "functional")), norms),
    st.tuples(st.just("residual"), choose(ADDITIONS), norms, choose(CLAMPS)),
    st.tuples(st.just("fork"), choose(ADDITIONS), choose(("batch norm", "addition", "clamp"))),
    st.tuples(st.just("branch"), choose(("cat", "concat")), choose(("input", "none"))),
    st.tuples(st.just("pool"), choose(POOLS)),
    st.tuples(st.just("clamp"), choose(CLAMPS)),
)
plans = st.builds(
    Plan,
    channels=st.integers(1, 4),
    height=st.integers(5, 11),
    width=st.integers(5, 11),
    # a clamp first would change the caller's input in place, which a layer in between prevents
    steps=st.tuples(st.tuples(st.just("conv"), choose(("3x3", "1x1", "depthwise")), norms), st.lists(steps, min_size=1, max_size=6)).map(
        lambda drawn: [drawn[0], *drawn[1]]
    ),
    head=choose(HEADS),
    seed=st.integers(0, 5),
)


def build(plan: Plan) -> tuple[nn.Module, Tensor]:
    """The network, with batch norms that know their inputs, and a batch."""
    torch.manual_seed(plan.seed)
    batch = torch.randn(6, plan.channels, plan.height, plan.width)
    model = Random(plan)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    make_alive(model, batch)
    return model, batch


def qconfig_of(model: nn.Module, target: str, precision: str, seed: int) -> fxq.QConfigMapping:
    """All int8, all int16, or either for each layer, by lot; int16 with int16 weights where the target has them."""
    lot = random.Random(seed)
    weights = ["int8", "int16"] if target == "nash-e" else ["int8"]
    wide = fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig(weights[-1]))
    mapping = fxq.QConfigMapping(wide if precision == "int16" else fxq.QConfig())
    if precision == "mixed":
        for name, module in model.named_modules():
            if not list(module.children()):
                config = fxq.QConfig(fxq.ActivationConfig(lot.choice(["int8", "int16"])), fxq.WeightConfig(lot.choice(weights)))
                mapping.set_module_name(name, config)
    return mapping


@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(plan=plans, target=st.sampled_from(contract.TARGETS), precision=st.sampled_from(["int8", "int16", "mixed"]))
def test_a_random_network_holds_the_contract(tmp_path_factory: pytest.TempPathFactory, plan: Plan, target: str, precision: str) -> None:
    model, batch = build(plan)
    prepared, integer = compiled(model, [batch], target, qconfig_of(model, target, precision, plan.seed))
    assert {node.op for node in integer.graph.nodes} == {"placeholder", "get_attr", "call_function", "output"}
    assert float(integer(batch).std()) > 0
    assert_float_state_is_the_model(prepared, model, batch)
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    contract.assert_validate_is_integer(prepared, integer, batch)
    contract.assert_integer_is_onnx(integer, path, [(batch,), (batch[:1],)])
    contract.assert_train_is_validate(prepared, batch)
    steps_of_learning(prepared, batch)
    contract.assert_validate_is_integer(prepared, compiled_again(prepared), batch)


def assert_float_state_is_the_model(prepared: Any, model: nn.Module, batch: Tensor) -> None:
    """Up to the rounding of float32, which folding moves: no pass has changed what the network means."""
    fxq.set_state(prepared, fxq.State.FLOAT)
    with torch.no_grad():
        torch.testing.assert_close(prepared(batch), model(batch), rtol=1e-4, atol=1e-4)


def steps_of_learning(prepared: Any, batch: Tensor) -> None:
    """The weights move, as in training; statistics stay frozen."""
    loss = prepared(batch).square().sum()
    loss.backward()
    with torch.no_grad():
        for parameter in prepared.parameters():
            assert parameter.grad is not None
            assert bool(torch.isfinite(parameter.grad).all())
            parameter -= 0.01 * parameter.grad.sign()


def compiled_again(prepared: Any) -> Any:
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return fxq.convert(prepared)
