"""Branches that are 0, or next to it, when training starts: their gradients are the float model's, and their scales follow them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.training import fused_layers
from tests.shared.written import to_train, to_validate, written

pytestmark = pytest.mark.usefixtures("default_outputs")

IMAGES = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
ROWS = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Model(NamedTuple):
    """Return the float model by `build`; `trains` is the parameter that starts at 0."""

    trains: str
    batches: list[Tensor]
    build: Callable[[], nn.Module]


def gate(start: float = 0.0) -> nn.Module:
    return written(lambda m, x: x + m.conv(x) * m.gate, conv=nn.Conv2d(3, 3, 1), gate=nn.Parameter(torch.full((1, 3, 1, 1), start)))


def tanh_gate() -> nn.Module:
    return written(lambda m, x: x + torch.tanh(m.gate) * m.conv(x), conv=nn.Conv2d(3, 3, 1), gate=nn.Parameter(torch.zeros(1)))


def last_norm() -> nn.Module:
    model = written(lambda m, x: x - m.norm(m.conv(x)), conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.BatchNorm2d(3))
    nn.init.zeros_(model.norm.weight)
    return model


def last_layer(forward: Callable[..., Tensor]) -> nn.Module:
    model = written(forward, first=nn.Conv2d(3, 8, 3, padding=1), last=nn.Conv2d(8, 3, 1))
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)
    return model


def head() -> nn.Module:
    return last_layer(lambda m, x: m.last(F.silu(m.first(x))))


def lora() -> nn.Module:
    layers = {"linear": nn.Linear(8, 8), "down": nn.Linear(8, 4, bias=False), "up": nn.Linear(4, 8, bias=False)}
    model = written(lambda m, x: m.linear(x) + m.up(m.down(x)) * 2, **layers)
    nn.init.zeros_(model.up.weight)
    return model


MODELS = {
    "gate": Model("gate", IMAGES, gate),  # ReZero, NAFNet, layer scales
    "norm": Model("norm.weight", IMAGES, last_norm),  # torchvision's `zero_init_residual`
    "conv": Model("last.weight", IMAGES, lambda: last_layer(lambda m, x: x + m.last(F.silu(m.first(x))))),  # diffusion models, flows
    "head": Model("last.weight", IMAGES, head),
    "lora": Model("up.weight", ROWS, lora),
    "tanh": Model("gate", IMAGES, tanh_gate),  # Flamingo's gated attention
}
SMALL = {"small gate": Model("gate", IMAGES, lambda: gate(1e-6))}


def calibrated(
    model: nn.Module,
    batches: list[Tensor],
    target: str,
    activations: str = "statistics",
    weights: str = "statistics",
    dtype: str | None = None,
) -> fx.GraphModule:
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype, training=activations), fxq.WeightConfig(training=weights))
    return to_train(fxq.calibrate(fxq.prepare(model, batches[0], target, qconfig), batches, show_progress=False))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["bayes-e", "x86", "qnnpack"])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_gradient_is_the_float_models(name: str, target: str) -> None:
    """Batch norms have running statistics on both sides: integers that are all 0 show nothing of those of a batch."""
    torch.manual_seed(3)
    trains, batches, build = MODELS[name]
    model = build().eval()
    prepared = calibrated(model, batches, target)
    loss(prepared, batches[0]).backward()
    loss(model, batches[0]).backward()
    found, wanted = (each.get_parameter(trains).grad.flatten() for each in (prepared, model))
    assert float(F.cosine_similarity(found, wanted, 0)) > 0.99
    assert 0.9 < float(found.norm() / wanted.norm()) < 1.1


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
@pytest.mark.parametrize("start", [1e-9, 1e-6, 1e-4, -1e-5])
def test_a_small_term_of_a_sum_has_its_gradient(start: float, dtype: str, fused: bool) -> None:
    """Its multiplier is rounded, to 0 or to few bits; its gradient is not."""
    torch.manual_seed(3)
    model = gate(start)
    prepared = calibrated(model, IMAGES, "x86" if dtype == "uint8" else "nash-e", dtype=dtype)
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
    trains, batches, build = (MODELS | SMALL)[name]
    model = build().train()
    prepared = calibrated(model, batches, target, activations, weights)
    losses: dict[nn.Module, Tensor] = {}
    for each in (prepared, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.2)
        for step in range(25):
            optimizer.zero_grad()
            losses[each] = loss(each, batches[step % 3])
            if step == 0:
                start = losses[each].detach()
            losses[each].backward()
            optimizer.step()
    assert float(prepared.get_parameter(trains).detach().abs().max()) > 0.01
    gained = float(start - losses[model].detach())
    assert float(start - losses[prepared].detach()) > 0.6 * gained > 0
    to_validate(prepared)
    assert fxq.verify(prepared, fxq.convert(prepared), batches[:1])


def test_calibration_names_the_tensors_that_were_zero(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = calibrated(lora(), ROWS, "bayes-e", "learned")
    (said,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    assert "%up (" in said
    assert f"{__file__}:" in said or "test_zero_branches.py:" in said
    assert "%down" not in said
    assert prepared.quantized.up.quantizer.was_zero
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fxquant"):
        calibrated(gate(1.0), IMAGES, "bayes-e", "learned")
    assert not caplog.records


def overwritten(m: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :2] = x[:, :2] * 2
    return y + memory


def test_zeros_that_forward_makes_are_not_named_and_zeros_that_it_is_given_are(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.WARNING, "fxquant"):
        fxq.calibrate(fxq.prepare(written(overwritten), (x, x * 0)), [(x, x * 0)])
    (said,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    assert said.count("%") == 1
    assert "%memory_quantize" in said


def test_calibrating_again_lets_a_scale_that_was_zero_learn() -> None:
    prepared = calibrated(head(), IMAGES, "bayes-e", "learned")
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


def scaled(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A branch times 1e-6, which only the sum reads, and a tensor just as small that is an output, too."""
    branch, shown = torch.relu(x) * 1e-6, x.tanh() * 1e-6
    return x + branch.reshape(-1, 8) * 2.0 + shown, shown


def test_tensors_that_a_sum_does_not_see_follow_their_batches(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = calibrated(written(scaled), ROWS, "bayes-e", "learned")
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
    model = written(lambda m, x: (x + (y := x * 1e-6), m.head(y)), head=nn.Linear(8, 4))
    prepared = calibrated(model, ROWS, "nash-e", "learned")
    assert not any(operator.output.unseen for operator in quantized_operators(prepared).values())
