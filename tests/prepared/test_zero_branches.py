"""Branches that are 0, or next to it, when training starts: their gradients are the float model's, and their scales follow them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.training import fused_layers

pytestmark = pytest.mark.usefixtures("default_outputs")

IMAGES = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
ROWS = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Gate(nn.Module):
    """ReZero, NAFNet, layer scales."""

    trains, batches = "gate", IMAGES

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 3, 1), nn.Parameter(torch.full((1, 3, 1, 1), start))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.conv(x) * self.gate
        return y


class LastNorm(nn.Module):
    """torchvision's `zero_init_residual`."""

    trains, batches = "norm.weight", IMAGES

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x - self.norm(self.conv(x))
        return y


class LastConv(nn.Module):
    """Diffusion models, ControlNet, flows."""

    trains, batches = "last.weight", IMAGES

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.alone = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1), alone
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.silu(self.first(x)))
        return y if self.alone else x + y


class Lora(nn.Module):
    trains, batches = "up.weight", ROWS

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.up(self.down(x)) * 2
        return y


class Tanh(nn.Module):
    """Flamingo's gated attention."""

    trains, batches = "gate", IMAGES

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 3, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.gate) * self.conv(x)
        return y


MODELS: dict[str, Callable[[], Any]] = {
    "gate": Gate,
    "norm": LastNorm,
    "conv": LastConv,
    "head": lambda: LastConv(alone=True),
    "lora": Lora,
    "tanh": Tanh,
}


SMALL = {"small gate": lambda: Gate(1e-6)}


def calibrated(
    model: Any, target: str, activations: str = "statistics", weights: str = "statistics", dtype: str | None = None
) -> fx.GraphModule:
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype, training=activations), fxq.WeightConfig(training=weights))
    prepared = fxq.calibrate(fxq.prepare(model, model.batches[0], target, qconfig), model.batches, show_progress=False)
    fxq.set_state(prepared, fxq.State.TRAIN)
    return prepared.train()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["bayes-e", "x86", "qnnpack"])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_gradient_is_the_float_models(name: str, target: str) -> None:
    """Batch norms have running statistics on both sides: integers that are all 0 show nothing of those of a batch."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    prepared = calibrated(model, target)
    loss(prepared, model.batches[0]).backward()
    loss(model, model.batches[0]).backward()
    found, wanted = (each.get_parameter(model.trains).grad.flatten() for each in (prepared, model))
    assert float(F.cosine_similarity(found, wanted, 0)) > 0.99
    assert 0.9 < float(found.norm() / wanted.norm()) < 1.1


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
@pytest.mark.parametrize("start", [1e-9, 1e-6, 1e-4, -1e-5])
def test_a_small_term_of_a_sum_has_its_gradient(start: float, dtype: str, fused: bool) -> None:
    """Its multiplier is rounded, to 0 or to few bits; its gradient is not."""
    torch.manual_seed(3)
    model = Gate(start)
    prepared = calibrated(model, "x86" if dtype == "uint8" else "nash-e", dtype=dtype)
    if fused:
        loss(prepared, IMAGES[0]).backward()
    else:
        with fused_layers.unfused():
            loss(prepared, IMAGES[0]).backward()
    loss(model, IMAGES[0]).backward()
    torch.testing.assert_close(prepared.gate.grad, model.gate.grad, rtol=0.03, atol=0.003)


SETTINGS = [  # target, training of activations, training of weights
    ("x86", "statistics", "statistics"),
    ("x86", "lsq+", "learned"),
    ("x86", "frozen", "statistics"),
    ("bayes-e", "learned", "tqt"),
    ("bayes-e", "pact", "learned"),
    ("qnnpack", "tqt", "statistics"),
]
CASES = [(name, *SETTINGS[(at + other) % len(SETTINGS)]) for at, name in enumerate(MODELS | SMALL) for other in (0, 3)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "target", "activations", "weights"), CASES, ids=["-".join(case) for case in CASES])
def test_a_branch_that_starts_at_zero_trains_as_the_float_one_does(name: str, target: str, activations: str, weights: str) -> None:
    torch.manual_seed(3)
    model = (MODELS | SMALL)[name]().train()
    prepared = calibrated(model, target, activations, weights)
    losses: dict[nn.Module, Tensor] = {}
    for each in (prepared, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.2)
        for step in range(25):
            optimizer.zero_grad()
            losses[each] = loss(each, model.batches[step % 3])
            if step == 0:
                start = losses[each].detach()
            losses[each].backward()
            optimizer.step()
    assert float(prepared.get_parameter(model.trains).detach().abs().max()) > 0.01
    gained = float(start - losses[model].detach())
    assert float(start - losses[prepared].detach()) > 0.6 * gained > 0
    fxq.set_state(prepared.eval(), fxq.State.VALIDATE)
    assert fxq.verify(prepared, fxq.convert(prepared), model.batches[:1])


def test_calibration_names_the_tensors_that_were_zero(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = calibrated(Lora(), "bayes-e", "learned")
    (said,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    assert "%up (" in said
    assert f"{__file__}:" in said or "test_zero_branches.py:" in said
    assert "%down" not in said
    assert prepared.quantized.up.quantizer.was_zero
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fxquant"):
        calibrated(Gate(1.0), "bayes-e", "learned")
    assert not caplog.records


class Overwritten(nn.Module):
    """Zeros that are overwritten, and an input that is zero."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :2] = x[:, :2] * 2
        return y + memory


def test_zeros_that_forward_makes_are_not_named_and_zeros_that_it_is_given_are(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.WARNING, "fxquant"):
        fxq.calibrate(fxq.prepare(Overwritten().eval(), (x, x * 0)), [(x, x * 0)])
    (said,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    assert said.count("%") == 1
    assert "%memory_quantize" in said


def test_calibrating_again_lets_a_scale_that_was_zero_learn() -> None:
    model = LastConv(alone=True)
    prepared = calibrated(model, "bayes-e", "learned")
    quantizer: Quantizer = prepared.quantized.last.quantizer
    loss(prepared, IMAGES[0]).backward()
    assert quantizer.scale_change.grad is None
    with torch.no_grad():
        prepared.get_parameter("last.weight").fill_(0.1)
    fxq.calibrate(prepared, IMAGES, show_progress=False)
    fxq.set_state(prepared, fxq.State.TRAIN)
    loss(prepared, IMAGES[0]).backward()
    assert not quantizer.was_zero
    assert bool(quantizer.scale_change.grad != 0)


def test_a_scale_that_is_given_stays_where_the_tensor_is_zero() -> None:
    model = LastConv(alone=True)
    prepared = calibrated(model, "bayes-e")
    fxq.set_qparams(prepared, {"last": 0.5})
    prepared(IMAGES[0])
    assert fxq.qparams(prepared)["last"] == 0.5


class Scaled(nn.Module):
    """A branch times 1e-6, which only the sum reads, and a tensor just as small that is an output, too."""

    batches = ROWS

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch, shown = torch.relu(x) * 1e-6, x.tanh() * 1e-6
        return x + branch.reshape(-1, 8) * 2.0 + shown, shown


def test_tensors_that_a_sum_does_not_see_follow_their_batches(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = calibrated(Scaled(), "bayes-e", "learned")
    unseen = {operator.output.name for operator in quantized_operators(prepared).values() if operator.output.unseen}
    assert unseen == {"mul", "mul_2"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "%mul (" in said
    assert "below half a step of the sum that reads them" in said
    loaded = fxq.load(fxq.save(prepared, tmp_path / "model.fxq"))
    assert {operator.output.name for operator in quantized_operators(loaded).values() if operator.output.unseen} == unseen
    before = fxq.qparams(prepared)
    for model in (prepared, loaded):
        model(ROWS[0] / 2)
    after = fxq.qparams(prepared)
    assert {name for name in after if after[name] != before[name]} == unseen
    assert after == fxq.qparams(loaded)


def test_a_tensor_that_something_else_reads_is_seen() -> None:
    class Read(nn.Module):
        batches = ROWS

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 1e-6
            return x + y, self.head(y)

    prepared = calibrated(Read(), "nash-e", "learned")
    assert not any(operator.output.unseen for operator in quantized_operators(prepared).values())
