"""Training of today: mixed precision, accumulated gradients, averaged models, compilation, and going on after a kill."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.prepared.test_training import BATCHES, Net, config
from tests.shared import contract
from tests.shared.networks import copies, descend, to_train, to_validate

TARGETS = torch.arange(8) % 4
SCALES = {"learned": "learned", "statistics": "statistics", "lsq+": "tqt", "pact": "learned"}  # of activations, and of weights


@copies
def student(activations: str = "learned", host: str | None = None, batch_norm: str = "live") -> fx.GraphModule:
    torch.manual_seed(3)
    mapping = fxq.QConfigMapping(config(activations, SCALES[activations], bits=4))
    rules = mapping.set_host(host) if host else mapping
    prepared = fxq.prepare(Net(), BATCHES[0], "nash-e", rules, options=fxq.Options(batch_norm=batch_norm))
    fxq.calibrate(prepared, BATCHES)
    return to_train(prepared)


def step(prepared: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    descend(prepared, [batch], loss=lambda output: F.cross_entropy(output, TARGETS), optimizer=optimizer)


def mixed_step(prepared: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """As PyTorch's guide has it: the forward pass and the loss under autocast."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(prepared(batch), TARGETS)
    loss.backward()
    optimizer.step()


# ---- mixed precision ------------------------------------------------------------------------------------------------------
def test_autocast_changes_no_bit_of_integers_nor_of_their_training() -> None:
    plain, mixed = student(), student()
    optimizers = [torch.optim.SGD(model.parameters(), 0.02, momentum=0.9) for model in (plain, mixed)]
    for batch in BATCHES:
        step(plain, optimizers[0], batch)
        mixed_step(mixed, optimizers[1], batch)
    assert contract.same_state(plain, mixed)


@pytest.mark.parametrize("host", ["conv1", "head"])
def test_float_layers_compute_in_bfloat16_beside_integers(host: str) -> None:
    """Before the integers, and after them: the integers have the bits that their inputs have without autocast, and train in float32."""
    prepared = student(host=host)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    wanted = contract.operator_outputs(prepared, BATCHES[0])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = contract.operator_outputs(prepared, BATCHES[0])
        assert prepared(BATCHES[0]).dtype == (torch.bfloat16 if host == "head" else torch.float32)
    assert all(value.dtype == torch.float32 for value in mixed.values())
    equal = [name for name in wanted if torch.equal(mixed[name], wanted[name])]
    assert len(equal) == len(wanted) if host == "head" else 0 < len(equal) < len(wanted)
    to_train(prepared)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.02)
    mixed_step(prepared, optimizer, BATCHES[0])
    gradients = {name: parameter.grad for name, parameter in prepared.named_parameters() if "intermediate" not in name}
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients.values())
    prepared.eval()
    assert fxq.verify(prepared, fxq.convert(prepared), BATCHES)


# ---- accumulation ----------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize("activations", ["learned", "lsq+", "pact"])
def test_gradients_of_parts_of_a_batch_add_up_to_those_of_the_batch(activations: str) -> None:
    """Gradients of scales, too: none depends on the number of elements."""
    whole, parts = student(activations, batch_norm="frozen"), student(activations, batch_norm="frozen")
    batch = BATCHES[0]
    F.cross_entropy(whole(batch), TARGETS).backward()
    for part in torch.arange(8).split(2):
        (F.cross_entropy(parts(batch[part]), TARGETS[part]) / 4).backward()
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        if "intermediate" in name:  # the residual is added in the accumulator, so nothing is quantized before it
            continue
        assert one.grad is not None, name
        assert other.grad is not None, name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)  # sums in another order


# ---- compilation ------------------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_a_compiled_model_has_the_same_bits() -> None:
    """Only code beside the operators is compiled: the layer on the host, in one graph after that of the input's check."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    mapping = fxq.QConfigMapping(config("learned", "learned", bits=4)).set_host("2")
    rows = [batch[:, 0, 0] for batch in BATCHES]
    prepared = fxq.calibrate(fxq.prepare(network, rows[0], "nash-e", mapping), rows)
    fxq.set_state(prepared, fxq.State.TRAIN)
    reference = copy.deepcopy(prepared)
    compiled = torch.compile(prepared, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), 0.02) for model in (prepared, reference)]
    for model, optimizer in ((compiled, optimizers[0]), (reference, optimizers[1])):
        step(model, optimizer, rows[0])
    assert contract.same_state(prepared, reference)
    assert len(graphs) == 2
    for model in (prepared, reference):
        to_validate(model)
    with torch.no_grad():
        assert torch.equal(compiled(rows[1]), reference(rows[1]))
    torch._dynamo.reset()


# ---- going on ---------------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("activations", "kept"), [*((name, "state_dict") for name in SCALES), ("lsq+", "file")])
def test_training_goes_on_as_if_it_had_not_been_stopped(activations: str, kept: str, tmp_path: Path) -> None:
    """Bit by bit, the optimizer's moments and the schedule with it."""

    def course(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)

    def go(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        for batch in BATCHES[:2]:
            step(model, optimizer, batch)
            schedule.step()

    one = student(activations)
    optimizer, schedule = course(one)
    go(one, optimizer, schedule)
    torch.save({"model": one.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, tmp_path / "run.pt")
    fxq.save(one, tmp_path / "run.fxq")
    go(one, optimizer, schedule)

    state = torch.load(tmp_path / "run.pt")
    other = fxq.load(tmp_path / "run.fxq") if kept == "file" else student(activations)
    if kept == "state_dict":
        other.load_state_dict(state["model"])
    assert not contract.same_state(other, one)
    optimizer, schedule = course(other)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    go(other, optimizer, schedule)
    assert contract.same_state(other, one)
