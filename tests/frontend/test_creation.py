"""Tensors that forward creates with the size of an activation are constants; sizes and shapes are computed without running."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.frontend import fake
from fxquant.frontend.values import Value
from fxquant.ir.graph import BatchDim, fact
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import members

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "like it": lambda x: torch.maximum((x + torch.ones_like(x)) * torch.full_like(x, 0.5), torch.zeros_like(x)),
    "new": lambda x: (x - x.new_ones(x.shape[0], 1, 6)) * x.new_full((x.size(0), 4, 6), -0.3) + x.new_tensor(0.25),
    "joined": lambda x: torch.cat((x, torch.zeros_like(x), x.new_ones(x.shape[0], 1, 6), torch.full((x.size(0), 2, 6), 0.5)), 1).tanh(),
    "of its size": lambda x: x * torch.full((x.shape[0], 4, 1), 2.0) + torch.ones(x.shape[0], 4, 6),
    "of a layer": lambda x: (
        F.linear(torch.zeros_like(x), torch.eye(6), torch.linspace(-1, 1, 6)) + torch.matmul(x, x.new_ones(x.shape[0], 6, 6))
    ),
    "of a composite": lambda x: F.scaled_dot_product_attention(x, x.tanh(), torch.ones_like(x)) + torch.lerp(torch.zeros_like(x), x, 0.3),
    "of a size without the batch": lambda x: (x + _groups(x, 4, 6)).softmax(-1),
    "of a parameter": lambda x: F.linear(x, torch.eye(6), _without_middle(torch.linspace(-1, 1, 6))),
    "positions": lambda x: x + _positions(x).permute(0, 2, 1).sin() * 0.5,
    "positions of a layer": lambda x: torch.relu(x + F.linear(_positions(x).transpose(1, 2), torch.eye(6), torch.linspace(-1, 1, 6))),
    "positions beside it": lambda x: torch.cat((x, _positions(x).transpose(1, 2)), 1).tanh(),
    "written over": lambda x: torch.empty(x.shape).copy_(x),
}


def _groups(x: Tensor, height: int, width: int) -> Tensor:
    """A mask as that of shifted windows: which elements are of another group than the first."""
    groups = x.new_zeros((height, width))
    for number, columns in enumerate((slice(0, 4), slice(4, 6))):
        groups[1:, columns] = number
    return groups.masked_fill(groups != 0, -100.0)


def _positions(x: Tensor) -> Tensor:
    """Numbers from 0 to 1 along a dimension, of a mask that is made for the batch, as detection transformers embed them: (N, 6, 4)."""
    count = (~torch.zeros((x.shape[0], 6, 4), dtype=torch.bool, device=x.device)).cumsum(1, dtype=torch.float32)
    return count / (count[:, -1:] + 1e-6)


def _without_middle(bias: Tensor) -> Tensor:
    bias = bias.clone()
    bias[2:4].zero_()
    return bias


@members(lambda body: dict(layer=nn.Linear(6, 6), body=body))
def Model(self, x: Tensor) -> Tensor:
    return self.body(self.layer(x))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_anew_is_a_constant_at_every_batch_size(name: str, tmp_path: Path) -> None:
    model = Model(MADE[name]).eval()
    batches = [(torch.randn(5, 4, 6),), (torch.randn(2, 4, 6),)]
    prepared, integer = compiled(model, batches, integer_tail=True)
    assert "none is left in float" in fxq.explain(prepared)
    for (x,) in batches:
        contract.assert_validate_is_integer(prepared, integer, x)
        assert float((integer(x) - model(x)).detach().abs().max()) < 0.1
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", batches)
    contract.assert_train_is_validate(prepared, *batches[0])


@members(lambda: dict(layer=nn.Linear(6, 6), embedding=nn.Linear(6, 6)))
def Placed(self, x: Tensor) -> Tensor:
    """A layer's result, with a layer of positions and zeros added."""
    return self.layer(x) + self.embedding(_positions(x).transpose(1, 2)) + torch.zeros_like(x)


def test_a_layer_of_positions_is_computed_once_and_trains() -> None:
    prepared, x = fxq.prepare(Placed().eval(), torch.randn(5, 4, 6)), torch.randn(3, 4, 6)
    text = fxq.text(prepared)
    assert "%embedding = linear(%transpose_made" in text
    assert "cumsum" not in text
    fxq.calibrate(prepared, [x])
    prepared.train()(x).sum().backward()
    assert float(prepared.embedding.bias.grad.abs().min()) > 0


def test_what_only_gives_its_own_size_stays_in_float() -> None:
    prepared, integer = compiled(Model(lambda x: x.new_zeros(x.shape[0], 3)).eval(), [torch.randn(5, 4, 6)])
    assert "no registered operator matches new_zeros" in fxq.explain(prepared)
    assert torch.equal(integer(torch.randn(2, 4, 6)), torch.zeros(2, 3))


@members(lambda: dict(conv=nn.Conv1d(2, 4, 5, 2), reach=torch.tensor(3), table=nn.Parameter(torch.randn(9, 10))))
def Padded(self, x: Tensor) -> Tensor:
    """Sizes and bounds that are computed as tensors from buffers, as the codecs of sound have them."""
    frames = (x.shape[-1] - 5 + self.reach) / 2 + 1
    more = (torch.ceil(frames).to(torch.int64) - 1) * 2 + 5 - self.reach - x.shape[-1]
    y = self.conv(F.pad(x, (self.reach, more)))
    return y[..., : self.reach * 2] + self.table[self.reach : self.reach + 4, : y[..., : self.reach * 2].shape[-1]]


def test_sizes_that_follow_from_constants_are_numbers() -> None:
    model, batch = Padded().eval(), (torch.randn(3, 2, 16),)
    result = fxq.quantize(model, [batch])
    assert "none is left in float" in fxq.explain(result.prepared)
    assert fxq.verify(result.prepared, result.integer, [batch])


# ---- the shape of a batch norm's result, known without running it ----------------------------------------------------
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@members(lambda dim: dict(norm=NORMS[dim](6), one=NORMS[dim](1), plain=NORMS[dim](6, affine=False)))
def Norms(self, x: Tensor) -> Any:
    """Batch norms of a new tensor and of tensors with unusual strides, of which one tensor has one channel."""
    turned = x.flip(0).transpose(0, 1).contiguous().transpose(0, 1)
    return self.norm(x), self.plain(x), self.norm(turned), self.one(x[:, :1]), self.one(x[:, :1].clone())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_it_is_what_running_the_norm_gives(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    norms_run, original = [], fake.known_result

    def compared(function: Any, args: Any, kwargs: Any) -> Value | None:
        computed = original(function, args, kwargs)
        if computed is not None:
            inputs: Value = args[0].value.abstract
            for side, result in zip(inputs.tensors, computed.tensors, strict=True):
                real = function(torch.empty_strided(side.shape, side.stride()).zero_())
                assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)
                norms_run.append(real)
        return computed

    x = torch.randn(4, 6, *[3] * (dim - 2))
    monkeypatch.setattr(fake, "known_result", compared)
    short = fxq.trace(Norms(dim).eval(), x)
    assert len(norms_run) >= 4
    monkeypatch.setattr(fake, "known_result", lambda *_: None)
    whole = fxq.trace(Norms(dim).eval(), x)
    assert [(node.name, fact(node)) for node in short.graph.nodes] == [(node.name, fact(node)) for node in whole.graph.nodes]


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(5), nn.BatchNorm1d(6), nn.Linear(5, 2), nn.LayerNorm((6, 4))])
def test_a_layer_of_another_size_is_refused_as_before(layer: nn.Module) -> None:
    with pytest.raises((fxq.errors.TraceError, RuntimeError, ValueError)):
        fxq.trace(nn.Sequential(layer).eval(), torch.randn(2, 6, 4, 4))


# ---- sizes that depend on the batch ----------------------------------------------------------------------------------
@pytest.mark.quick
@pytest.mark.parametrize(
    ("size", "text"),
    [
        (BatchDim(), "B"),
        (BatchDim(Fraction(2)), "2B"),
        (BatchDim(Fraction(1, 2)), "B/2"),
        (BatchDim(offset=Fraction(-1)), "B-1"),
        (BatchDim(Fraction(3, 2), Fraction(4)), "3B/2+4"),
    ],
)
def test_a_size_prints_as_what_it_is_for_a_batch_of_b(size: BatchDim, text: str) -> None:
    assert str(size) == text


def test_a_size_that_is_not_whole_is_an_error() -> None:
    with pytest.raises(ValueError, match="B/2 is not an integer at batch size 3"):
        BatchDim(Fraction(1, 2)).at(3)
