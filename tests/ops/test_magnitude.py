"""Norms of items of very different size: what brings them to one magnitude is the oracle's, and keeps the small ones."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import part
from fxquant.ir.integer import qparams
from fxquant.ops.reduction.moments import COARSE
from tests.shared import contract, oracle
from tests.shared.contract import compiled
from tests.shared.networks import members, sqnr
from tests.shared.oracle import Grid, Rules

pytestmark = pytest.mark.nightly

EPS, SIZE = 1e-5, 24


def items(decades: float, count: int = 8, seed: int = 0, offset: float = 0.0) -> Tensor:
    """Float32 rows of the shape (count, 6, SIZE) whose deviations span so many decades; the first row of each is constant."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, SIZE, generator=generator) * 10 ** (-decades * torch.rand(count, 6, 1, generator=generator)) + offset
    x[:, 0] = 0.7 + offset
    return x


def by_hand(x: Tensor) -> Tensor:
    """Layer norm as it is written by hand, of which only the squares and what is computed from them have 16 bits."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)


@members(lambda hand: dict(hand=hand))
def Row(self, x: Tensor) -> Tensor:
    return by_hand(x) if self.hand else F.layer_norm(x, (SIZE,), eps=EPS)


def gain(decades: float, target: str, dtype: str) -> float:
    """By how many dB a layer norm is nearer to the float model's than one that is written by hand."""
    calibration, x = [items(decades, 32, seed)[:, 1:] for seed in (1, 2)], items(decades, 32)[:, 1:]
    wide = fxq.QConfig(fxq.ActivationConfig(dtype), input=fxq.ActivationConfig("int16"))
    exact = F.layer_norm(x, (SIZE,), eps=EPS)
    hand, norm = (sqnr(exact, compiled(Row(each), calibration, target, wide)[1](x)) for each in (True, False))
    return norm - hand


def roles(integer: fx.GraphModule, role: str) -> list[fx.Node]:
    return [node for node in integer.graph.nodes if str(part(node)) == f"layer_norm: {role}" and qparams(node) is not None]


def grid_of(node: fx.Node) -> Grid:
    grid = qparams(node)
    return Grid(Fraction(float(grid.scale)), -(2**15), 2**15 - 1, 16)


def test_elements_over_their_extents_are_the_oracles() -> None:
    rules = Rules("real")
    x = items(3, 16)
    _, integer = compiled(Row(False), [x], "nash-e", fxq.QConfig(fxq.ActivationConfig("int16")))
    values = contract.graph_values(integer, x)
    extent, centred = sorted(roles(integer, "sub"), key=lambda node: values[node.name].shape[-1])
    result = next(node for node in roles(integer, "of_one_magnitude") if values[node.name].shape[-1] == SIZE)
    on, least = grid_of(centred), math.sqrt(EPS)
    scale = float(grid_of(extent).scale)
    step = Fraction(oracle.float32(min(1 / least, 1 / (COARSE * scale)) / (2**15 - 1)))
    extents = values[extent.name].flatten(0, 1).flatten().tolist()
    rows = values[centred.name].flatten(0, 1).tolist()
    for size, row, actual in zip(extents, rows, values[result.name].flatten(0, 1).tolist(), strict=True):
        factor = 0 if size == 0 else min(max(math.floor(1 / (max(size * scale, least) * float(step))), 1), 2**15 - 1)
        sums = [q * factor for q in row]
        assert actual == [
            oracle.requantized(total, rules.product_step(on.scale, step), grid_of(result), rules, kind="product") for total in sums
        ]
    assert 0 in extents
    assert min(filter(None, extents)) * 30 < max(extents)


def test_spread_items_gain() -> None:
    """A square on one linear grid has no bits left for an item a hundred times smaller: its root is that of 0."""
    assert gain(2, "nash-e", "int16") > 15
    assert gain(1, "nash-e", "int16") > 1
    assert gain(0, "nash-e", "int8") > -0.2


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_a_constant_item_becomes_exactly_the_bias(dtype: str) -> None:
    """Far from 0, the rounding of its mean is larger than √ε, and would be brought to a deviation of 1."""
    norm = nn.LayerNorm(SIZE, EPS).eval()
    nn.init.zeros_(norm.bias)
    x = items(0, 16, offset=-60.0)
    _, integer = compiled(norm, [x], "nash-e", fxq.QConfig(fxq.ActivationConfig(dtype)))
    output = integer(x)
    assert torch.equal(output[:, 0], torch.zeros(16, SIZE))
    assert sqnr(norm(x), output) > (20 if dtype == "int16" else 2)


def test_factors_of_items_change_no_gradient() -> None:
    x = items(2)[:, 1:].requires_grad_()
    prepared = fxq.prepare(Row(False), x.detach(), "nash-e")
    fxq.set_state(prepared, "FLOAT")
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    actual, expected = (torch.autograd.grad((each(x) * upstream).sum(), x)[0] for each in (prepared, Row(False)))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
