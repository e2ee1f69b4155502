"""Train recurrent layers with all steps at once: bits, gradients and scales against step by step, and the cases that run so."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fxquant as fxq
from fxquant.backends.cpu import native
from fxquant.ir import loops
from fxquant.prepared import through_time
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.support import disagreements
from tests.contract.test_loops import LAYERS, network, sequences
from tests.shared.contract import all_equal

compiler = pytest.mark.skipif(isinstance(native.chains_library(), str), reason="a C compiler was not found")
pytestmark = [pytest.mark.filterwarnings("ignore:LSTM with projections"), compiler]
STEPS = 9


def in_training(name: str, target: str, training: str) -> Any:
    weights = fxq.WeightConfig(training="learned" if training == "learned" else "statistics")
    prepared = fxq.prepare(network(name), sequences(3, STEPS), target, fxq.QConfig(fxq.ActivationConfig(training=training), weights))
    fxq.calibrate(prepared, [sequences(3, STEPS)])
    fxq.set_state(prepared.train(), "train")
    return prepared


def assert_equals_its_steps(prepared: Any, patch: pytest.MonkeyPatch, calls: int, *, through: Any = None, second: bool = False) -> None:
    """Hold a training step, whose operators are called at most `calls` times, to that of the steps one by one.

    Bits and scales are equal, and gradients, or those of a gradient's square if `second`, as far as sums of a few hundred float32 numbers
    are in another order. Values saturate.
    """
    integer, results = QuantizedOperator._integer, list[tuple[int, list[Tensor], Any]]()
    for model, at_once in ((copy.deepcopy(prepared), [through_time.wait]), (prepared, loops.AT_ONCE)):
        counts, x = dict[str, int](), (2 * sequences(3, STEPS)).requires_grad_()

        def counted(self: QuantizedOperator, *args: Any, counts: dict[str, int] = counts) -> Tensor:
            counts[self.name] = counts.get(self.name, 0) + 1
            return integer(self, *args)

        with patch.context() as within:
            within.setattr(QuantizedOperator, "_integer", counted)
            within.setattr(loops, "AT_ONCE", at_once)
            outputs = tree_leaves(model(x) if through is None or model is not prepared else through(model, x))
            times, bits = max(counts.values()), [*outputs, *(each.clone() for each in model.buffers())]
            loss = torch.stack([(each * torch.linspace(-1, 1, each.numel()).view_as(each)).sum() for each in outputs]).sum()
            if second:
                loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            gradients = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True, materialize_grads=True)
        results.append((times, bits, gradients))
    (slow, bits, expected), (fast, own, gradients) = results
    assert (slow, fast) == (STEPS - 1, calls)
    assert all_equal(own, bits)
    for one, other in zip(gradients, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
@pytest.mark.parametrize("training", ["statistics", "learned", "frozen"])
def test_all_steps_at_once(name: str, target: str, training: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, x = in_training(name, target, training), 2 * sequences(3, STEPS)
    with torch.no_grad():
        outputs = tree_leaves(copy.deepcopy(prepared)(x))
    assert all_equal(outputs, tree_leaves(copy.deepcopy(prepared)(x))), "with gradients as without"
    assert_equals_its_steps(prepared, monkeypatch, calls=1)


@pytest.mark.parametrize("watch", ["hook", "anomaly", "checkpoint"])
def test_steps_run_one_by_one_where_something_could_see_one(watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, through = in_training("gru", "x86", "frozen"), partial(checkpoint, use_reentrant=False) if watch == "checkpoint" else None
    if watch == "hook":
        node = next(iter(loops.bodies(prepared.graph).values()))[0]
        quantized_operators(prepared)[node.name].register_forward_hook(lambda *_: None)
    with torch.autograd.set_detect_anomaly(watch == "anomaly"):
        assert_equals_its_steps(prepared, monkeypatch, calls=STEPS - 1, through=through)


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equals_its_steps(in_training("lstm", "bayes-e", "statistics"), monkeypatch, calls=1, second=True)


@pytest.mark.disagrees
def test_gradients_that_disagree_with_autograd_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a factor is missing, the steps run one by one in backward, and from then on."""
    prepared, terms = in_training("tanh", "bayes-e", "frozen"), through_time.Body._terms
    monkeypatch.setattr(through_time.Body, "_terms", lambda *args: terms(*args)[:-1])
    assert_equals_its_steps(prepared, monkeypatch, calls=1)
    assert [each.implementation for each in disagreements(prepared)] == [through_time.IMPLEMENTATION]
    assert_equals_its_steps(prepared, monkeypatch, calls=STEPS - 1)
