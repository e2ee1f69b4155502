"""What is brought together at places: by a loop over Python's numbers, at every opset; what has no integer form says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.graph import BatchDim, TensorFact
from fxquant.primitives import PRIMITIVES, scatter
from fxquant.primitives.record import Unproved, Value
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import sqnr


class Model(nn.Module):
    """A function of a live tensor of shape (B, 3, 4, 5)."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Conv2d(3, 3, 1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, 3, 4, 5, generator=generator) for count in (4, 3)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31), st.sampled_from((torch.int8, torch.int16)))
def test_sums_and_extremes_at_places_are_those_of_a_loop(terms: int, size: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.iinfo(dtype)
    source, input = (torch.randint(ends.min, ends.max + 1, (2, count), generator=generator, dtype=dtype) for count in (terms, size))
    index = torch.randint(0, size, (2, terms), generator=generator)
    found = [
        [[int(q) for q, place in zip(row, at, strict=True) if int(place) == wanted] for wanted in range(size)]
        for row, at in zip(source, index, strict=True)
    ]
    sums = [[sum(each) for each in row] for row in found]

    def extremes(choose: Callable[..., int]) -> list[list[int]]:
        pairs = [zip(row, each, strict=True) for row, each in zip(input.tolist(), found, strict=True)]
        return [[choose([old, *each]) for old, each in row] for row in pairs]

    for values in (source, source.float()):  # as the integer graph has them, and as the prepared model does
        for wide in (False, True):
            total = scatter.sum_along(values, 1, index, size, wide)
            assert total.tolist() == sums
            assert total.is_floating_point() == values.is_floating_point()
        for expected, flag in ((extremes(max), True), (extremes(min), False)):
            assert scatter.extremum_along(input.to(values.dtype), values, 1, index, terms, flag).tolist() == expected
    bound = 2.0 ** (torch.iinfo(dtype).bits - 1)
    known = Value(torch.tensor(-bound).double(), torch.tensor(bound).double(), TensorFact(tuple(source.shape), dtype))
    record = PRIMITIVES[scatter.sum_along].bounds
    assert record is not None
    reached = record(source=known, dim=1, index=None, size=size, wide=False)
    assert float(reached.high) == terms * bound >= max(abs(each) for row in sums for each in row)


def test_a_sum_whose_terms_are_not_known_is_not_proved() -> None:
    one, bounds = torch.ones((), dtype=torch.float64), PRIMITIVES[scatter.sum_along].bounds
    assert bounds is not None
    source = Value(-one, one, TensorFact((BatchDim(1, 0), 3), torch.int8))
    with pytest.raises(Unproved, match="depends on the batch"):
        bounds(source, 0, None, 3, False)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("opset", [17, 21])
def test_places_are_written_at_every_opset(opset: int, tmp_path: Path) -> None:
    def brought(x: Tensor) -> Any:
        index = x.argmax(2, keepdim=True).expand_as(x)
        return (
            x.scatter_add(2, index, x),
            x.scatter_reduce(2, index, x.flip(3), "amax"),
            x.scatter_reduce(1, x.argmin(1, keepdim=True), x, "amin", include_self=False),
            torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), 1.0),
        )

    prepared, integer = compiled(Model(brought).eval(), batches())
    assert "none is left in float" in fxq.explain(prepared)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", opset=opset)
    assert fxq.verify(integer, path, [(batch,) for batch in batches()])
    contract.assert_validate_is_integer(prepared, integer, batches()[0])


def assigned(x: Tensor, index: Any) -> Tensor:
    result = x * 1.5
    result[index] = 0.25
    return result


LISTS: dict[str, list[Any]] = {
    "slices": [slice(None), slice(0, 2)],
    "an ellipsis": [..., 0],
    "lists": [slice(None), [0, 1], [1, 2]],
    "tensors": [slice(None), torch.tensor([0, 2]), torch.tensor([1, 1])],
    "a range": [slice(None), range(2)],
    "steps": [slice(None), slice(None, None, 2), 1],
}


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_entries_is_the_index_that_pytorch_takes_it_for(name: str, tmp_path: Path) -> None:
    index = LISTS[name]
    model = Model(lambda x: (x[index], assigned(x, index))).eval()
    prepared, integer = compiled(model, batches())
    contract.assert_contract(prepared, tmp_path / "model.onnx", batches()[0], integer=integer)
    assert next(layer.dtype for layer in fxq.inspect.layers(prepared) if layer.name == "getitem") == "int8"
    for wanted, found in zip(model(batches()[1]), integer(batches()[1]), strict=True):
        assert wanted.shape == found.shape
        assert sqnr(wanted, found) > 20
