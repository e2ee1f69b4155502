"""Operators that change nothing are gone before the fusions look at the graph, and fused clamps follow one another."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, members, to_train

Step = Callable[[nn.Module, Tensor], Tensor]
NOTHING: dict[str, Step] = {
    "Identity": lambda m, x: m.identity(x), "Identity of several": lambda m, x: m.identity((x, x + 1))[0],
    "Identity of names": lambda m, x: m.identity(input={"x": [x]})["x"][0],
    "Identity of pieces": lambda m, x: m.identity(x.chunk(1, 1))[0], "clone": lambda m, x: x.clone(),
    "to that of another": lambda m, x: x.to(m.layer.weight), "float": lambda m, x: x.float(),
    "type by name": lambda m, x: x.type("torch.FloatTensor"), "to where it is": lambda m, x: x.to(x.device), "cpu": lambda m, x: x.cpu(),
    "wider and back by to": lambda m, x: x.to(torch.float64).to(x.dtype), "view": lambda m, x: x.view(-1, 4, 6, 6),
    "flatten": lambda m, x: torch.flatten(x, 3), "unsqueeze and squeeze": lambda m, x: x.squeeze(2),
    "permute": lambda m, x: x.permute(0, 1, 2, 3), "expand": lambda m, x: x.expand(-1, 4, 6, 6),
    "repeat": lambda m, x: x.repeat(1, 1, 1, 1), "slice": lambda m, x: x[:, :, 0:6], "plus 0": lambda m, x: x + 0,
    "0 plus": lambda m, x: 0.0 + x, "minus 0": lambda m, x: x - 0.0, "times 1": lambda m, x: x * 1, "by 1": lambda m, x: x / 1.0,
    "pad": lambda m, x: F.pad(x, (0, 0, 0, 0)), "cat": lambda m, x: torch.cat([x], 1), "max pool": lambda m, x: F.max_pool2d(x, 1),
    "average pool": lambda m, x: F.avg_pool2d(x, 1), "adaptive pool": lambda m, x: F.adaptive_avg_pool2d(x, 6),
    "clamp": lambda m, x: x.clamp(float("-inf"), float("inf")), "Dropout(0)": lambda m, x: m.dropout(x),
    "two": lambda m, x: m.identity(x).contiguous(),
}  # fmt: skip


@members(lambda between: dict(
    layer=nn.Conv2d(3, 4, 3, padding=1), norm=nn.BatchNorm2d(4), second=nn.Conv2d(4, 4, 1), identity=nn.Identity(), dropout=nn.Dropout(0.0),
    between=between,
))  # fmt: skip
def Blocks(self, x: Tensor) -> Tensor:
    """conv-bn-relu and conv-add-relu with something between their parts."""
    between = self.between
    y = between(self, F.relu(between(self, self.norm(between(self, self.layer(x))))))
    return between(self, F.relu(between(self, between(self, self.second(y)) + y)))


def kinds(prepared: fx.GraphModule) -> list[str]:
    return [operator.operator.name for operator in quantized_operators(prepared).values()]


def of_blocks(between: Step) -> contract.Compiled:
    torch.manual_seed(3)
    model = Blocks(between).eval()
    nn.init.normal_(model.norm.bias)
    return compiled(model, [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(4))])


@pytest.fixture(scope="module")
def plain() -> contract.Compiled:
    return of_blocks(lambda m, x: x)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", NOTHING)
def test_fusions_see_through_what_changes_nothing(name: str, plain: contract.Compiled) -> None:
    prepared, integer = of_blocks(NOTHING[name])
    assert kinds(prepared) == kinds(plain.prepared) == ["quantize", "conv2d", "conv2d"]
    assert list(fxq.qparams(prepared).values()) == list(fxq.qparams(plain.prepared).values())
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(integer(x), plain.integer(x))


CHANGING: dict[str, Step] = {
    "a cast": lambda m, x: x.half().float(),
    "reversed": lambda m, x: x[:, [3, 2, 1, 0]],
    "permuted": lambda m, x: x.permute(0, 1, 3, 2),
    "a pool that slides": lambda m, x: F.max_pool2d(x, 3, 1, 1),
    "plus 1": lambda m, x: x + 1,
    "Dropout": lambda m, x: F.dropout(x, 0.5, m.training),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_something_stays(name: str) -> None:
    """Operators that keep shape and dtype, and yet change values."""
    prepared, integer = of_blocks(CHANGING[name])
    x = torch.randn(2, 3, 6, 6)
    contract.assert_validate_is_integer(prepared, integer, x)
    floating = fxq.set_state(prepared, fxq.State.FLOAT) or prepared
    torch.manual_seed(3)
    model = Blocks(CHANGING[name]).eval()
    nn.init.normal_(model.norm.bias)
    torch.testing.assert_close(floating(x), model(x), rtol=1e-5, atol=1e-5)
    assert kinds(prepared) != ["quantize", "conv2d", "conv2d"]


def dropping(dropout: nn.Module, limit: Callable[[Tensor], Tensor]) -> Network:
    return Network(lambda m, x: limit(m.dropout(m.layer(x))), layer=nn.Conv2d(3, 4, 3), dropout=dropout)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Dropout2d(0.5)], ids=str)
def test_a_relu_after_dropout_belongs_to_the_layer_and_dropout_still_acts(dropout: nn.Module) -> None:
    x = torch.randn(4, 3, 8, 8) if not isinstance(dropout, nn.Dropout1d) else torch.randn(4, 3, 8)
    model = dropping(dropout, F.relu).eval()
    model.layer = model.layer if x.dim() == 4 else nn.Conv1d(3, 4, 3)
    prepared = compiled(model, [x]).prepared
    assert kinds(prepared) == ["quantize", model.layer.__class__.__name__.lower(), "dropout"]
    expected = prepared(x)
    to_train(prepared)
    fxq.freeze(prepared)
    dropped = prepared(x)
    assert bool(((dropped == 0) | (dropped == 2 * expected)).all())
    assert bool(((dropped == 0) & (expected > 0)).any())
    assert bool((dropped > 0).any())


@pytest.mark.parametrize(
    ("dropout", "limit"),
    [(nn.Dropout(0.5), F.relu6), (nn.Dropout(0.5), lambda x: x.clamp(min=0.1)), (nn.AlphaDropout(0.5), F.relu)],
    ids=["relu6", "a limit that is not 0", "alpha dropout"],
)
def test_a_limit_that_dropout_would_move_stays_after_it(dropout: nn.Module, limit: Callable[[Tensor], Tensor]) -> None:
    prepared = compiled(dropping(dropout, limit).eval(), [torch.randn(4, 3, 8, 8)]).prepared
    assert kinds(prepared) == ["quantize", "conv2d", "dropout", "clamp"]


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu, then at most": lambda x: F.relu(x).clamp(max=0.5), "narrower": lambda x: x.clamp(-0.5, 0.5).clamp(-0.2, 0.3),
    "wider": lambda x: x.clamp(-0.2, 0.3).clamp(-0.5, 0.5), "above": lambda x: x.clamp(-0.2, 0.1).clamp(0.3, 0.5),
    "below": lambda x: F.relu(x).clamp(max=-0.25), "three": lambda x: F.hardtanh(F.relu6(x)).clamp(min=0.1),
    "crossed": lambda x: x.clamp(0.5, 0.25).clamp(-1, 0.4),
}  # fmt: skip


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("make", [nn.Identity, lambda: nn.Conv2d(3, 3, 1)], ids=["alone", "fused"])
def test_clamps_that_follow_one_another_are_one(name: str, make: Callable[[], nn.Module], tmp_path: Path) -> None:
    layer = make()
    model = Network(lambda m, x: CHAINS[name](m.layer(x)), layer=layer)
    x = torch.randn(4, 3, 6, 6)
    prepared, integer = compiled(model, [x])
    assert len(kinds(prepared)) == (3 if isinstance(layer, nn.Identity) else 2)  # an identity of the input, whose scale it has
    contract.assert_validate_is_integer(prepared, integer, x)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(x,)])
    exact = model(x).detach()
    assert float(integer(x).min()) >= float(exact.min()) - 0.01
    assert float(integer(x).max()) <= float(exact.max()) + 0.01
    fxq.set_state(prepared, fxq.State.FLOAT)
    assert torch.equal(prepared(x), model(x))
