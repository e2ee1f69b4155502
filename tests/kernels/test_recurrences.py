"""Recurrences that run as one program over their steps: its bits are those of the primitives, and it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.analysis.explain import operator_runs
from fxquant.backends.cpu import chains, native
from fxquant.ir.graph import fact
from tests.kernels.test_kernels import INT8, assert_same, both, choices, images, ordinary
from tests.shared.networks import Network

TARGETS = ("bayes-e", "bernoulli", "x86", "qnnpack")
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
NETWORKS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Callable[[], nn.Module]], int]] = {
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


def programs(integer: Any) -> list[str]:
    return [name for name, choice in choices(integer).items() if choice.implementation == PROGRAM]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrences_have_the_bits_of_their_primitives(target: str, network: str) -> None:
    forward, layers, count = NETWORKS[network]
    integer, reference = both(Network(forward, **{name: make() for name, make in layers.items()}), target, ordinary(4, 5, 8))
    for batch in (1, 4, 19):  # one row, as many as are computed together, and more than those
        assert_same(integer, reference, images(batch, 5, 8, seed=batch), runs=1)
        assert_same(integer, reference, ordinary(batch, 5, 8) * 9, runs=1)
    assert_same(integer, reference, images(8, 5, 3).permute(2, 1, 0))
    assert [name for name, choice in choices(integer).items() if choice.disagrees] == []
    if not isinstance(native.chains_library(), str):
        assert len(programs(integer)) == count
        slow = [run.layer.name for run in operator_runs(integer) if "layer" in run.layer.name and not run.fast and not run.moves]
        assert [name for name in slow if not any(joined in name for joined in ("stack", "cat"))] == []


@pytest.mark.parametrize("instructions", ["avx2", None])
def test_every_set_of_instructions_gives_the_same(instructions: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none at all: without a compiler the primitives run."""
    monkeypatch.setenv(*((native.INSTRUCTIONS, instructions) if instructions else (native.SWITCH, "0")))
    limited = native.chains_library.__wrapped__()
    monkeypatch.setattr(native, "chains_library", lambda: limited)
    integer, reference = both(Network(lambda s, x: s.layer(x)[0], layer=nn.LSTM(9, 70, batch_first=True)), "bayes-e", ordinary(4, 3, 9))
    for batch in (1, 6):
        assert_same(integer, reference, images(batch, 3, 9), runs=1)
    assert len(programs(integer)) == (0 if isinstance(limited, str) else 1)
    assert instructions is None or not isinstance(limited, str) or isinstance(native.library(), str)


def test_a_program_of_64_bits_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_is_wide", lambda *_: True)
    integer, reference = both(Network(lambda s, x: s.layer(x)[0], layer=nn.GRU(8, 12, batch_first=True)), "bayes-e", ordinary(4, 3, 8))
    assert_same(integer, reference, images(5, 3, 8))
    assert isinstance(native.chains_library(), str) or len(programs(integer)) == 1


def test_a_recurrence_that_others_read_between_its_steps_says_so() -> None:
    layers = {"cell": nn.GRUCell(8, 8), "between": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))}
    integer, reference = both(Network(_looked_at, **layers), "bayes-e", ordinary(4, 4, 8))
    assert_same(integer, reference, images(3, 4, 8))
    assert programs(integer) == []


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
