"""Norms, softmax and their kin run as one program on rows: its bits are those of the primitives, and it runs."""

from __future__ import annotations

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
from fxquant.primitives.steps import Op
from tests.kernels.test_kernels import assert_same, both, choices, images, ordinary
from tests.shared.networks import Network

TARGETS = ("bayes-e", "nash-e")
compiler = pytest.mark.skipif(isinstance(native.chains_library(), str), reason="a C compiler was not found")


def _attention(network: Any, x: Tensor) -> Tensor:
    """Attention with a bias for each pair of places and head, which differs between rows."""
    q, k, v = (part(x).unflatten(-1, (2, 6)).transpose(1, 2) for part in (network.q, network.k, network.v))
    weights = torch.softmax(q @ k.transpose(-2, -1) * 6**-0.5 + network.bias(x.new_ones(2, 7, 7)), -1)
    return F.hardtanh(weights @ v)


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 7, 7))

    def forward(self, ones: Tensor) -> Tensor:
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
    made = Network(lambda s, x: forward(s, s.first(x)), first=nn.Hardtanh(-4, 4), **{name: make() for name, make in layers.items()})
    integer, reference = both(made, target, ordinary(4, 7, 12))
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


@pytest.mark.parametrize("instructions", ["avx2", None])
def test_every_set_of_instructions_gives_the_same(instructions: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none at all: without a compiler the primitives run."""
    monkeypatch.setenv(*((native.INSTRUCTIONS, instructions) if instructions else (native.SWITCH, "0")))
    limited = native.chains_library.__wrapped__()
    monkeypatch.setattr(native, "chains_library", lambda: limited)
    integer, reference = both(Network(lambda s, x: torch.softmax(s.norm(x), -1), norm=nn.LayerNorm(70)), "bayes-e", ordinary(4, 3, 70))
    for batch in (1, 40):
        assert_same(integer, reference, images(batch, 3, 70), runs=1)
    assert len(programs(integer)) == (0 if isinstance(limited, str) else 2)


@compiler
def test_a_program_of_64_bits_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_is_wide", lambda *_: True)
    integer, reference = both(Network(lambda s, x: torch.softmax(s.norm(x), -1), norm=nn.LayerNorm(12)), "bayes-e", ordinary(4, 3, 12))
    assert_same(integer, reference, images(5, 3, 12))
    assert len(programs(integer)) == 2


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
