"""Norms, softmax and recurrences that run as one program on rows or steps: the program runs, and its bits equal the primitives'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.zoo.sequence import ViT
from fxquant.analysis.explain import operator_runs
from fxquant.backends.cpu import chains, native
from fxquant.ir.graph import fact
from fxquant.primitives.steps import Op
from tests.kernels.test_kernels import INT8, assert_same, both, choices, images, ordinary
from tests.shared.networks import Network, members

TARGETS = ("bayes-e", "nash-e")
compiler = pytest.mark.skipif(isinstance(native.chains_library(), str), reason="a C compiler was not found")


def _attention(network: Any, x: Tensor) -> Tensor:
    """Attention with a bias for each pair of places and head, which differs between rows."""
    q, k, v = (part(x).unflatten(-1, (2, 6)).transpose(1, 2) for part in (network.q, network.k, network.v))
    weights = torch.softmax(q @ k.transpose(-2, -1) * 6**-0.5 + network.bias(x.new_ones(2, 7, 7)), -1)
    return F.hardtanh(weights @ v)


@members(lambda: dict(bias=nn.Parameter(torch.randn(2, 7, 7))))
def _Bias(self, ones: Tensor) -> Tensor:
    return self.bias


# A network with these layers, and how many programs it has.
NETWORKS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Callable[[], nn.Module]], int]] = {
    "layer norm": (lambda s, x: s.norm(x), {"norm": lambda: nn.LayerNorm(12)}, 1),
    "plain norm": (lambda s, x: F.layer_norm(x, (12,)), {}, 1),
    "rms norm": (lambda s, x: s.norm(x), {"norm": lambda: nn.RMSNorm(12)}, 1),
    "instance norm": (lambda s, x: s.norm(x), {"norm": lambda: nn.InstanceNorm1d(7, affine=True)}, 1),
    "softmax": (lambda s, x: torch.softmax(x, -1), {}, 1),
    "log softmax": (lambda s, x: torch.log_softmax(x, -1), {}, 1),
    "largest and sum": (lambda s, x: x.abs().logsumexp(-1, keepdim=True), {}, 1),
    "attention": (_attention, {**dict.fromkeys("qkv", lambda: nn.Linear(12, 12)), "bias": _Bias}, 1),
}


def programs(integer: Any) -> list[str]:
    return [name for name, choice in choices(integer).items() if choice.kernel == "rows" and choice.implementation]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("target", TARGETS)
def test_norms_and_softmax_have_the_bits_of_their_primitives(target: str, network: str) -> None:
    forward, layers, count = NETWORKS[network]
    output = Network(lambda s, x: forward(s, s.first(x)), first=nn.Hardtanh(-4, 4), **{name: make() for name, make in layers.items()})
    integer, reference = both(output, target, ordinary(4, 7, 12))
    for batch in (1, 4, 23):
        assert_same(integer, reference, images(batch, 7, 12, seed=batch), runs=1)
        assert_same(integer, reference, ordinary(batch, 7, 12) * 9, runs=1)
        assert_same(integer, reference, torch.zeros(batch, 7, 12), runs=1)
    assert_same(integer, reference, images(12, 7, 5).permute(2, 1, 0))
    assert [name for name, choice in choices(integer).items() if choice.disagrees] == []
    if not isinstance(native.chains_library(), str):
        assert len(programs(integer)) == count
        assert [run.layer.name for run in operator_runs(integer) if not (run.fast or run.moves or run.layer.boundary)] == []


@compiler
def test_a_block_of_16_bits_runs_in_programs() -> None:
    """A norm is one, and the table of the function after the second norm is part of that one's."""
    layers = {"norm": nn.LayerNorm(12), "linear": nn.Linear(12, 12), "second": nn.LayerNorm(12), "last": nn.Linear(12, 12)}
    network = Network(lambda s, x: s.last(F.gelu(s.second(x + s.linear(s.norm(x))))), **layers)
    wide = fxq.QConfigMapping().set_global(fxq.QConfig(fxq.ActivationConfig("int16")))
    integer, reference = both(network, "bayes-e", ordinary(4, 7, 12), qconfig=wide)
    assert_same(integer, reference, images(5, 7, 12))
    assert programs(integer) == ["norm", "gelu"]


IN_PROGRAMS: dict[str, tuple[Callable[[], Network], tuple[int, ...], int]] = {  # the sizes of an item, and how many programs there are
    "norm and softmax": (lambda: Network(lambda s, x: torch.softmax(s.norm(x), -1), norm=nn.LayerNorm(70)), (3, 70), 2),
    "lstm": (lambda: Network(lambda s, x: s.layer(x)[0], layer=nn.LSTM(9, 70, batch_first=True)), (3, 9), 1),
    "gru": (lambda: Network(lambda s, x: s.layer(x)[0], layer=nn.GRU(8, 12, batch_first=True)), (3, 8), 1),
}


@pytest.mark.parametrize("name", IN_PROGRAMS)
@pytest.mark.parametrize("change", ["avx2", "no compiler", "64 bits"])
def test_every_set_of_instructions_and_width_gives_the_same(change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the primitives run."""
    if change == "64 bits":
        monkeypatch.setattr(chains, "_is_wide", lambda *_: True)
    else:
        monkeypatch.setenv(*((native.INSTRUCTIONS, change) if change == "avx2" else (native.SWITCH, "0")))
    limited = native.chains_library.__wrapped__()
    monkeypatch.setattr(native, "chains_library", lambda: limited)
    network, sizes, count = IN_PROGRAMS[name]
    integer, reference = both(network(), "bayes-e", ordinary(4, *sizes))
    for batch in (1, 6, 40):
        assert_same(integer, reference, images(batch, *sizes), runs=1)
    running = [each for each in choices(integer).values() if each.kernel == "rows" or each.implementation == PROGRAM]
    assert sum(bool(each.implementation) for each in running) == (0 if isinstance(limited, str) else count)
    assert change == "no compiler" or not isinstance(limited, str) or isinstance(native.library(), str)


@compiler
def test_a_vision_transformer_runs_in_kernels() -> None:
    """Nine norms and four softmaxes are a program each; what is left are the sum over tokens and moves."""
    integer, reference = both(ViT(10, 48, 24, 4, 2), "bayes-e", ordinary(2, 3, 48, 48))
    assert_same(integer, reference, images(3, 3, 48, 48))
    assert len(programs(integer)) == 13
    runs = [run for run in operator_runs(integer) if not run.layer.boundary and not run.moves]
    assert sum(run.fast for run in runs) >= len(runs) - 1


@compiler
def test_steps_by_constant_numbers_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requantization is a step or two; what limits a number that is within its limits is none."""
    written: list[list[Any]] = []
    fused = chains.fused
    monkeypatch.setattr(chains, "fused", lambda *each: written.append(fused(*each)[0]) or fused(*each))
    integer, reference = both(Network(lambda s, x: torch.softmax(x, -1)), "bayes-e", ordinary(4, 12))
    assert_same(integer, reference, images(3, 12))
    (steps,) = (each for each in written if len(each) > 3)
    assert not {Op.CLIP, Op.SHIFT, Op.ADD} & {step.op for step in steps}
    assert sum(step.op == chains.AFFINE for step in steps) <= 8


TARGETS_OF_RECURRENCES = ("bayes-e", "bernoulli", "x86", "qnnpack")
PROGRAM = "native program on rows"


def _with_cells(network: Any, x: Tensor) -> Tensor:
    """A loop over an LSTM cell, as users write it."""
    hidden = cell = x.new_zeros(x.shape[0], 12)
    states = []
    for step in range(5):
        hidden, cell = network.cell(x[:, step], (hidden, cell))
        states.append(hidden)
    return torch.stack(states, 1)


def _looked_at(network: Any, x: Tensor) -> Tensor:
    """A loop in which another layer reads a state, and the next step reads that layer."""
    hidden = x.new_zeros(x.shape[0], 8)
    for step in range(4):
        hidden = network.cell(torch.relu(network.between[step](hidden)) + x[:, step], hidden)
    return hidden


# A network with these layers, and how many programs it has.
RECURRENCES: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Callable[[], nn.Module]], int]] = {
    "lstm": (lambda s, x: s.layer(x)[0], {"layer": lambda: nn.LSTM(8, 12, batch_first=True)}, 1),
    "gru": (lambda s, x: s.layer(x.transpose(0, 1))[0], {"layer": lambda: nn.GRU(8, 13)}, 1),
    "relu": (lambda s, x: s.layer(x)[0], {"layer": lambda: nn.RNN(8, 12, nonlinearity="relu", batch_first=True)}, 1),
    "projected": (lambda s, x: s.layer(x)[0], {"layer": lambda: nn.LSTM(8, 12, proj_size=5, batch_first=True)}, 1),
    "results": (lambda s, x: s.layer(x), {"layer": lambda: nn.LSTM(8, 12, 2, batch_first=True)}, 2),
    "state": (lambda s, x: s.layer(x, (s.first(x[:, 0])[None],) * 2)[1], {"layer": lambda: nn.LSTM(8, 12, batch_first=True),
              "first": lambda: nn.Linear(8, 12)}, 1),
    "directions": (lambda s, x: s.layer(x)[0], {"layer": lambda: nn.GRU(8, 12, bidirectional=True, batch_first=True)}, 2),
    "last": (lambda s, x: s.out(s.layer(x)[1][-1]), {"layer": lambda: nn.GRU(8, 12, batch_first=True), "out": lambda: nn.Linear(12, 3)}, 1),
    "cells": (_with_cells, {"cell": lambda: nn.LSTMCell(8, 12)}, 1),
}  # fmt: skip


def recurrences(integer: Any) -> list[str]:
    return [name for name, choice in choices(integer).items() if choice.implementation == PROGRAM]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("network", RECURRENCES)
@pytest.mark.parametrize("target", TARGETS_OF_RECURRENCES)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrences_have_the_bits_of_their_primitives(target: str, network: str) -> None:
    forward, layers, count = RECURRENCES[network]
    integer, reference = both(Network(forward, **{name: make() for name, make in layers.items()}), target, ordinary(4, 5, 8))
    for batch in (1, 4, 19):  # one row, as many as are computed together, and more than those
        assert_same(integer, reference, images(batch, 5, 8, seed=batch), runs=1)
        assert_same(integer, reference, ordinary(batch, 5, 8) * 9, runs=1)
    assert_same(integer, reference, images(8, 5, 3).permute(2, 1, 0))
    assert [name for name, choice in choices(integer).items() if choice.disagrees] == []
    if not isinstance(native.chains_library(), str):
        assert len(recurrences(integer)) == count
        slow = [run.layer.name for run in operator_runs(integer) if "layer" in run.layer.name and not run.fast and not run.moves]
        assert [name for name in slow if not any(joined in name for joined in ("stack", "cat"))] == []


def test_a_recurrence_that_others_read_between_its_steps_says_so() -> None:
    layers = {"cell": nn.GRUCell(8, 8), "between": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))}
    integer, reference = both(Network(_looked_at, **layers), "bayes-e", ordinary(4, 4, 8))
    assert_same(integer, reference, images(3, 4, 8))
    assert recurrences(integer) == []


@pytest.mark.parametrize("layer", [nn.Linear(24, 24), nn.Conv1d(6, 7, 3, 1, 1)])
def test_sums_that_become_16_bits_have_a_kernel(layer: nn.Module) -> None:
    wide = fxq.QConfigMapping().set_global(INT8).set_module_name("layer", fxq.QConfig(fxq.ActivationConfig("int16")))
    network = Network(lambda s, x: s.last(s.layer(s.first(x))), layer=layer, first=nn.Hardtanh(), last=nn.Hardtanh())
    integer, reference = both(network, "bayes-e", ordinary(4, 6, 24), qconfig=wide)
    assert_same(integer, reference, images(3, 6, 24).nan_to_num(0, 3, -3))
    if not isinstance(native.library(), str) and native.library().fxq_has_sums_of_products():
        sums = {name: choice.implementation for name, choice in choices(integer).items() if choice.kernel == "sum of products"}
        assert list(sums.values()) == ["native convolution"]
        assert fact(next(node for node in integer.graph.nodes if node.name in sums)).dtype == torch.int32
