"""In-place operations on views: the graph computes what eager execution computes, at every batch size."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.errors import TraceError
from fxquant.frontend import trace
from fxquant.ir.functional import write
from tests.shared import contract


class Model(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.conv, self.body = nn.Conv2d(3, 8, 3, padding=1), body

    def forward(self, x):
        return self.body(self.conv(x))


def augmented(y):
    y[:, 0] += 1.0
    return y


def augmented_twice(y):
    y[:, 0] += 1.0
    y[:, 1:3] *= 2.0
    y[:, 0] -= y[:, 1]
    return y


def one_piece(y):
    a, b = y.chunk(2, 1)
    a.relu_()
    return torch.cat([b, a], 1)


def every_piece(y):
    a, b = torch.split(y, 4, 1)
    a.relu_()
    b.sigmoid_()
    return y, a + b


def the_whole_after_a_piece(y):
    a, b = y.chunk(2, 1)
    a.mul_(2)
    y.add_(1)
    b.neg_()
    return a, b, y


def a_view_of_a_view(y):
    row = y.flatten(2)[:, 1]
    row[:, :3] = 0.5
    row[:, 4] += 1
    return y, row


def a_piece_of_the_batch(y):
    half = y[: y.shape[0] // 2]
    half.zero_()
    return y + 1


def transposed(y):
    last = y.permute(0, 2, 3, 1)
    last[..., 0] = last[..., 1]
    last[0, 0].T[0].add_(1)
    y.select(1, 2).fill_(3)
    y.narrow(1, 4, 2).copy_(y.narrow(1, 6, 2))
    return y, last


def from_itself(y):
    y[:, 1:3].copy_(y[:, 3:5])
    y.copy_(y[:, :1])
    return y, y[:, 2]


def unbound(y):
    first, *others = y.unbind(1)
    first.clamp_(min=0)
    others[0].add_(first)
    return torch.stack([first, *others], 1), y


def reshaped(y):
    flat = y.view(y.shape[0], -1)
    flat.mul_(2)
    flat[:, ::2].neg_()
    return y.view_as(y) + flat.view(y.shape)


def seen_in_another_way(y):
    kept = y.detach()
    y.transpose_(1, 2)
    y.add_(1)
    y.squeeze_(0)
    return y, kept


def by_a_function(y):
    F.relu(y[:, :4], inplace=True)
    a, b = y[:, :4], y[:, 4:]
    b += a
    return y


BODIES = [
    augmented, augmented_twice, one_piece, every_piece, the_whole_after_a_piece, a_view_of_a_view, a_piece_of_the_batch, transposed,
    from_itself, unbound, reshaped, seen_in_another_way, by_a_function,
]  # fmt: skip


def same(mine, theirs):
    pairs = zip(mine, theirs, strict=True) if isinstance(theirs, tuple) else [(mine, theirs)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("body", BODIES)
def test_eager_numbers_at_every_batch_size(body):
    model = Model(body).eval()
    traced = trace(model, torch.randn(2, 3, 5, 5))
    with torch.no_grad():
        for batch in (2, 4, 6):
            x = torch.randn(batch, 3, 5, 5)
            assert same(traced(x), model(x))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("body", [augmented, one_piece, a_view_of_a_view, transposed, unbound])
def test_they_are_compiled(body, tmp_path):
    model, x = Model(body).eval(), torch.randn(2, 3, 5, 5)
    result = fxq.quantize(model, [x], show_progress=False)
    assert fxq.verify(result.prepared, result.integer, [x])
    again = fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))
    assert same(again(x), result.integer(x))
    fxq.set_state(result.prepared, fxq.State.FLOAT)
    with torch.no_grad():
        assert same(result.prepared(x), model(x))


def test_disjoint_pieces_are_not_written_together():
    result = fxq.quantize(Model(one_piece).eval(), [torch.randn(2, 3, 5, 5)], show_progress=False)
    contract.assert_all_is_integer(result.prepared)


def test_what_write_follows_is_a_closed_list():
    tensor = torch.zeros(2, 4)
    assert torch.equal(write(tensor, torch.ones(2), (("t", (), {}), ("__getitem__", (1,), {})))[:, 1], torch.ones(2))
    assert torch.equal(tensor, torch.zeros(2, 4))
    for step in (("zero_", (), {}), ("getattr", ("data",), {}), ("__class__", (), {})):
        with pytest.raises(ValueError, match="does not make a view"):
            write(tensor, torch.ones(2), (step,))


def test_a_view_that_cannot_be_taken_again_is_refused():
    def body(y):
        view = torch.as_strided(y, (2, 2), (1, 1))
        view.add_(1)
        return y

    with pytest.raises(TraceError, match="a tensor is read after its memory was changed through a view"):
        trace(Model(body), torch.randn(2, 3, 5, 5))
