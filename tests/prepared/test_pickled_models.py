"""Models are pickled, as `torch.save` and processes that are spawned do, whatever functions they call."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import spelling
from tests.shared.contract import compiled

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2), "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2), "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 3),
    "max_pool3d": lambda x: F.max_pool3d(x, 2), "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x), "pad": lambda x: F.pad(x, (1, 1)), "getitem": lambda x: x[:, 1:],
}  # fmt: skip


class Pooled(nn.Module):
    """A convolution, and a function of its output."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, 8, 3), name

    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.name](self.conv(x))


def saved(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    found: nn.Module = torch.load(stream, weights_only=False)
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_model_is_pickled_in_every_form(name: str) -> None:
    torch.manual_seed(0)
    model, x = Pooled(name).eval(), torch.randn(2, 3, 16, 16)
    traced = fxq.prepare(model, x, until="canonical.rewrite")
    prepared, integer = compiled(model, [x])
    for form in (traced, prepared, integer):
        for copied in (pickle.loads(pickle.dumps(form)), saved(form)):
            assert torch.equal(copied(x), form(x))
            pairs = zip(form.graph.nodes, copied.graph.nodes, strict=True)
            assert all((a.name, a.target, spelling(a)) == (b.name, b.target, spelling(b)) for a, b in pairs)
    copied = pickle.loads(pickle.dumps(prepared))
    gradients: list[Any] = []
    for form in (prepared, copied):
        fxq.set_state(form, "train")
        form(x).square().sum().backward()
        gradients.append(form.get_parameter("conv.weight").grad)
    assert torch.equal(*gradients)
    assert torch.equal(fxq.convert(copied)(x), fxq.convert(prepared)(x))
