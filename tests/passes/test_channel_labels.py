"""Factors of channels pass through whatever works along channels as the elements do, or stop in front of it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import TensorFact, fact
from fxquant.prepared.channels import Channels, channels, multiply
from tests.shared import contract

Body = Callable[[nn.Module, Tensor], Tensor]


class Between(nn.Module):
    """Something between two layers, `a` and `c`, of whose channels the first gives `given`."""

    def __init__(self, body: Body, a: nn.Module, c: nn.Module) -> None:
        super().__init__()
        self.a, self.c, self.body = a, c, body
        with torch.no_grad():
            spread = torch.exp2(torch.arange(float(len(a.weight))) % 7 - 3)  # type: ignore[arg-type]
            a.weight.mul_(spread.reshape(-1, *[1] * (a.weight.dim() - 1)))  # type: ignore[operator,union-attr]
            a.bias.mul_(spread)  # type: ignore[operator,union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.c, self.a(x))


def convs(read: int, written: int = 4, kernel: int = 1) -> Callable[[], tuple[nn.Module, nn.Module]]:
    return lambda: (nn.Conv2d(3, written, 3), nn.Conv2d(read, 8, kernel, padding=kernel // 2))


def lines(read: int) -> Callable[[], tuple[nn.Module, nn.Module]]:
    return lambda: (nn.Linear(12, 6), nn.Linear(read, 3))


IMAGE, TABLE, ROWS, SOUND, VOLUME = (4, 3, 8, 8), (8, 12), (4, 6, 12), (4, 3, 9), (2, 3, 5, 5, 5)
# What lies between, the layers, the shape of the input, and how many labels there are besides 0.
CASES: dict[str, tuple[Body, Callable[[], tuple[nn.Module, nn.Module]], tuple[int, ...], int]] = {
    "option A": (lambda c, h: F.relu(c(h) + F.pad(h, (0, 0, 0, 0, 2, 2))), convs(4, kernel=3), IMAGE, 0),
    "padded channels": (lambda c, h: c(F.pad(h, (0, 0, 0, 0, 1, 1))), convs(6), IMAGE, 4),
    "padded channels and a relu": (lambda c, h: c(F.relu(F.pad(h, (0, 0, 0, 0, 0, 2)))), convs(6), IMAGE, 4),
    "padded everywhere": (lambda c, h: c(F.pad(h, (1, 0, 0, 1, 2, 0))), convs(6), IMAGE, 4),
    "padded by one": (lambda c, h: c(F.pad(h, (0, 0, 0, 0, 1, 1), value=1.0)), convs(6), IMAGE, 0),
    "padded features": (lambda c, h: c(F.pad(h, (0, 2))), lines(8), TABLE, 6),
    "padded steps": (lambda c, h: c(F.pad(h, (0, 0, 1, 0))[:, :-1]), lines(6), ROWS, 6),
    "replicated features": (lambda c, h: c(F.pad(h, (1, 1), "replicate")), lines(8), ROWS, 6),
    "reflected features": (lambda c, h: c(F.pad(h, (2, 1), "reflect")), lines(9), ROWS, 6),
    "features wrapped around": (lambda c, h: c(F.pad(h, (2, 0), "circular")), lines(8), ROWS, 6),
    "pooled features": (lambda c, h: c(F.avg_pool1d(h, 2)), lines(3), ROWS, 0),
    "largest features": (lambda c, h: c(F.max_pool1d(F.relu(h), 2)), lines(3), ROWS, 0),
    "adaptive features": (lambda c, h: c(F.adaptive_avg_pool1d(h, 3)), lines(3), ROWS, 0),
    "resized features": (lambda c, h: c(F.interpolate(h, scale_factor=2)), lines(12), ROWS, 0),
    "cropped channels": (lambda c, h: c(F.pad(h, (0, 0, 0, 0, -1, 0))), convs(3), IMAGE, 4),
    "channels cropped by a slice": (lambda c, h: c(h[:, 1:]), convs(3), IMAGE, 4),
    "a residual of cropped channels": (lambda c, h: c(h)[:, :4] + F.pad(h, (0, 0, 0, 0, 2, -2)), convs(4), IMAGE, 6),
    "pooled channels": (lambda c, h: c(F.max_pool3d(h.unsqueeze(1), (2, 1, 1)).squeeze(1)), convs(2), IMAGE, 0),
    "responses": (lambda c, h: c(F.local_response_norm(h, 3)), convs(4), IMAGE, 0),
    "zeros beside": (lambda c, h: F.relu(c(h) + torch.cat([h, torch.zeros_like(h)], 1)), convs(4), IMAGE, 0),
    "a padded gate": (lambda c, h: c(h) * F.pad(h, (0, 0, 0, 0, 2, 2)), convs(4), IMAGE, 0),
    "turned around": (lambda c, h: c(h.flip(1)), convs(4), IMAGE, 0),
    "rolled": (lambda c, h: c(h.roll(1, 1)), convs(4), IMAGE, 0),
    "shuffled": (lambda c, h: c(F.channel_shuffle(h, 2)), convs(4), IMAGE, 4),
    "padded sound": (lambda c, h: c(F.pad(h, (0, 0, 1, 1))), lambda: (nn.Conv1d(3, 4, 3), nn.Conv1d(6, 2, 1)), SOUND, 4),
    "padded volume": (lambda c, h: c(F.pad(h, (0, 0) * 3 + (2, 0))), lambda: (nn.Conv3d(3, 4, 3), nn.Conv3d(6, 2, 1)), VOLUME, 4),
    "padded pixels": (lambda c, h: c(F.max_pool2d(F.pad(h, (1, 1, 1, 1)), 2)), convs(4), IMAGE, 4),
}


def prepared_of(name: str, target: str = "nash-e") -> tuple[fx.GraphModule, list[Tensor]]:
    body, layers, shape, _ = CASES[name]
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(3)]
    return fxq.prepare(Between(body, *layers()).eval(), batches[0], target), batches


def float_result(prepared: fx.GraphModule, x: Tensor) -> Tensor:
    fxq.set_state(prepared, "float")
    with torch.no_grad():
        result: Tensor = prepared(x)
    return result


def misshapen(labels: Channels) -> list[str]:
    """Tensors whose labels are not of their shape."""
    shapes = {node: result.shape[1:] for node in labels.tensors if isinstance(result := fact(node), TensorFact)}
    return [
        node.name
        for node, shape in shapes.items()
        if len(shape) != labels.tensors[node].dim()
        or any(label not in (1, size) for label, size in zip(labels.tensors[node].shape, shape, strict=True))
    ]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_factors_of_any_size_leave_the_float_function_its_bits(name: str) -> None:
    prepared, (batch, *_) = prepared_of(name)
    prepared.requires_grad_(False)
    before = float_result(prepared, batch)
    expected = channels(prepared)
    drawn = torch.randint(-5, 6, (expected.number,), generator=torch.Generator().manual_seed(2))
    drawn[0] = 0
    multiply(prepared, expected, drawn)
    assert not misshapen(expected)
    assert expected.number - 1 == CASES[name][3]
    assert torch.equal(float_result(prepared, batch), before)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["option A", "padded features", "reflected features", "cropped channels", "padded sound"])
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_they_are_calibrated_and_equal_in_every_form(name: str, target: str) -> None:
    prepared, batches = prepared_of(name, target)
    fxq.calibrate(prepared, batches)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batches[0])
