"""Functions of PyTorch without an operator stand between quantized layers in float: right, saved, and named with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.contract import all_equal, assert_integer_is_onnx, compiled
from tests.shared.networks import Network

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="none", log_target=True),
    "renorm": lambda x, y: torch.renorm(x, 2, 1, 1.0),
    "trapezoid": lambda x, y: torch.trapezoid(x, dim=2),
    "diff": lambda x, y: torch.diff(x, dim=1),
    "matrix_power": lambda x, y: torch.matrix_power(x, 3),
    "kron": lambda x, y: torch.kron(x, torch.tensor([[0.5], [-2.0]])),
    "rot90": lambda x, y: torch.rot90(x, 1, (2, 3)),
    "cross": lambda x, y: torch.cross(x, y, dim=1),
    "copysign": torch.copysign,
    "heaviside": torch.heaviside,
    "ldexp": lambda x, y: torch.ldexp(x, torch.tensor(2)),
    "xlogy": lambda x, y: torch.xlogy(x, torch.tensor(2.5)),
    "logaddexp2": torch.logaddexp2,
    "quantile": lambda x, y: torch.quantile(x, 0.3, dim=2),
    "cummax": lambda x, y: torch.cummax(x, 2)[0],
    "bucketize": lambda x, y: torch.bucketize(x, torch.tensor([0.0, 1.0])),
    "isin": lambda x, y: torch.isin(x.argmax(1), torch.tensor([0, 2])),
    "grid_sample": lambda x, y: F.grid_sample(x, y.permute(0, 2, 3, 1)[..., :2], mode="bicubic", align_corners=False),
}

OF_INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "fmod": lambda n: torch.fmod(n, 4),
    "sign": torch.sign,
    "amax": lambda n: n.amax(1),
    "amin": lambda n: n.amin((1, 2)),
    "argmin": lambda n: n.argmin(1) + 1,
    "max_along": lambda n: n.max(1),
    "min_along": lambda n: n.min(2)[0] * 2,
}

BAGS: dict[str, Callable[[], nn.Module]] = {
    "leave out the rows of its padding_idx": lambda: Network(
        lambda s, x: [(bag := s.bag(x)), s.l(bag)], bag=nn.EmbeddingBag(10, 5, padding_idx=0), l=nn.Linear(5, 3)
    ),
    "begin at offsets": lambda: Network(
        lambda s, x: [*(bags := (s.bag(x.flatten()[:7], s.offsets), s.last(x.flatten()[:5], s.offsets))), *map(s.l, bags)],
        bag=nn.EmbeddingBag(10, 5),
        last=nn.EmbeddingBag(10, 5, include_last_offset=True),
        l=nn.Linear(5, 3),
        offsets=torch.tensor([0, 2, 5]),
    ),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        one, other = self.one(x), self.other(x)
        return [one, other, *(function(one, other) for function in FUNCTIONS.values())]


def test_they_are_right_and_named_and_stand_in_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 6, 6)
    prepared, integer = compiled(Model(), [batch])
    left = {layer.operator: layer.reason for layer in fxq.inspect.layers(prepared) if not layer.integer and not layer.boundary}
    assert all(left[name] for name in FUNCTIONS)
    assert all(f"no registered operator matches {name}" in fxq.explain(prepared) for name in FUNCTIONS if name != "grid_sample")
    one, other, *results = integer(batch)
    for function, result in zip(FUNCTIONS.values(), results, strict=True):
        assert torch.equal(result, function(one, other))
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert all(torch.equal(known, wanted) for known, wanted in zip(loaded(batch), (one, other, *results), strict=True))


def test_integers_that_no_operator_takes_are_computed_on_the_host_exactly(tmp_path: Path) -> None:
    model = Network(lambda _, n: [function(n) for function in OF_INTEGERS.values()]).eval()
    batches = [(torch.randint(-(2**40), 2**40, (count, 3, 4)),) for count in (4, 2)]
    prepared, integer = compiled(model, batches[:1])
    left = {layer.operator: layer.reason for layer in fxq.inspect.layers(prepared) if not layer.integer}
    assert all("int64, and only float32 tensors are quantized" in left[name] for name in OF_INTEGERS)
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    for batch in batches:
        assert all(all_equal(model(*batch), form(*batch)) for form in (prepared, integer, loaded))
    assert_integer_is_onnx(integer, tmp_path / "model.onnx", batches)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("reason", BAGS)
def test_bags_of_other_sizes_are_summed_on_the_host(reason: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BAGS[reason]().eval()
    batches = [(torch.randint(0, 10, (4, 6)),) for _ in range(2)]
    prepared, integer = compiled(model, batches, dynamic_shapes={})
    assert reason in fxq.explain(prepared)
    results, wanted = integer(*batches[1]), model(*batches[1])
    assert all(torch.equal(*pair) for pair in zip(results[: len(wanted) // 2], wanted, strict=False))  # the bags
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert all_equal(loaded(*batches[1]), integer(*batches[1]))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), batches, show_progress=False)
