"""Primitives that compare, rank, choose and place: against plain loops over Python integers, and their ONNX forms in two runtimes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from fxquant.backends.onnx.emitter import Emitter, value_info
from fxquant.primitives import PRIMITIVES, comparison, matrix, position, selection
from tests.shared import oracle

EXACT = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)
sizes = st.lists(st.integers(1, 4), min_size=2, max_size=3)
narrow = st.sampled_from([torch.int8, torch.int16, torch.uint8])


def drawn(seed: int, size: Sequence[int], dtype: torch.dtype = torch.int8, few: bool = True) -> Tensor:
    """Integers of the dtype; `few` different ones, so that there are equal ones."""
    generator, limits = torch.Generator().manual_seed(seed), torch.iinfo(dtype)
    if few:
        kinds = torch.tensor([limits.min, limits.max, 0, 1, 7])
        return kinds[torch.randint(0, 5, tuple(size), generator=generator)].to(dtype)
    return torch.randint(limits.min, limits.max + 1, tuple(size), generator=generator).to(dtype)


def in_runtimes(primitive: Callable[..., Tensor], *arguments: Any, opset: int = 21) -> list[Tensor]:
    """The primitive's ONNX form on these arguments, of which the tensors are inputs, in onnxruntime and in the reference evaluator."""
    given = {f"given_{index}": value for index, value in enumerate(arguments) if isinstance(value, Tensor)}
    emitter = Emitter({}, opset, taken=set(given))
    emitter.types.update({name: value.dtype for name, value in given.items()})
    names = iter(given)
    result = PRIMITIVES[primitive].onnx(emitter, *(next(names) if isinstance(value, Tensor) else value for value in arguments))
    inputs = [value_info(name, value.dtype, value.shape) for name, value in given.items()]
    expected = primitive(*arguments)
    graph = helper.make_graph(emitter.nodes, "one", inputs, [value_info(result, expected.dtype, expected.shape)], emitter.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model)
    feeds = {name: value.numpy() for name, value in given.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(run.run(None, feeds)[0].copy()) for run in (session, ReferenceEvaluator(model))]


def agree(primitive: Callable[..., Tensor], expected: Any, *arguments: Any) -> None:
    """The primitive, and its form in both runtimes, give this nested list, of one dtype."""
    found = primitive(*arguments)
    assert found.tolist() == expected
    for other in in_runtimes(primitive, *arguments):
        assert other.dtype == found.dtype
        assert torch.equal(other, found)


def along(size: Sequence[int], dim: int, count: int | None = None) -> tuple[int, ...]:
    """The size with another count along a dimension; without it where there is none."""
    return tuple(n if d != dim else count for d, n in enumerate(size) if d != dim or count is not None)  # type: ignore[misc]


def lines(value: Tensor, dim: int) -> Callable[[tuple[int, ...]], list[int]]:
    """The elements along `dim` through a place of the other dimensions."""
    values = value.tolist()
    return lambda index: [oracle.at(values, (*index[:dim], i, *index[dim:])) for i in range(value.shape[dim])]


@EXACT
@given(seeds, sizes, st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]), narrow)
def test_compare(seed: int, size: list[int], relation: str, dtype: torch.dtype) -> None:
    one, other = drawn(seed, size, dtype), drawn(seed + 1, size, dtype)
    a, b = one.tolist(), other.tolist()
    expected = oracle.nested(size, lambda index: getattr(operator, relation)(oracle.at(a, index), oracle.at(b, index)))
    agree(comparison.compare, expected, one, other, relation)


@pytest.mark.parametrize("relation", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_whole_numbers_that_no_float_holds_are_compared_as_they_are(relation: str) -> None:
    one, other = torch.tensor([2**53, 2**62, -(2**62)]), torch.tensor([2**53 + 1, 2**62 - 1, -(2**62)])
    agree(
        comparison.compare,
        [getattr(operator, relation)(a, b) for a, b in zip(one.tolist(), other.tolist(), strict=True)],
        one,
        other,
        relation,
    )


@EXACT
@given(seeds, sizes, st.sampled_from([("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)]))
def test_logic_and_opposite(seed: int, size: list[int], operation: tuple[str, Any]) -> None:
    one, other = (drawn(seed + i, size) > 0 for i in range(2))
    name, joined = operation
    a, b = one.tolist(), other.tolist()
    agree(comparison.logic, oracle.nested(size, lambda index: joined(oracle.at(a, index), oracle.at(b, index))), one, other, name)
    agree(comparison.opposite, oracle.nested(size, lambda index: not oracle.at(a, index)), one)


@EXACT
@given(seeds, sizes, narrow)
def test_choose(seed: int, size: list[int], dtype: torch.dtype) -> None:
    one, other, condition = drawn(seed, size, dtype, False), drawn(seed + 1, size, dtype, False), drawn(seed + 2, size) > 0
    a, b, c = one.tolist(), other.tolist(), condition.tolist()
    expected = oracle.nested(size, lambda index: oracle.at(a if oracle.at(c, index) else b, index))
    agree(comparison.choose, expected, one, other, condition)


@EXACT
@given(seeds, sizes, st.integers(0, 1), st.booleans(), narrow)
def test_arg_extremum_and_ranking(seed: int, size: list[int], dim: int, largest: bool, dtype: torch.dtype) -> None:
    value = drawn(seed, size, dtype)
    line = lines(value, dim)

    def order(index: tuple[int, ...]) -> list[int]:
        found = line(index)
        return sorted(range(len(found)), key=lambda i: (-found[i] if largest else found[i], i))

    agree(selection.arg_extremum, oracle.nested(along(size, dim), lambda index: order(index)[0]), value, dim, False, largest)
    count = 1 + seed % size[dim]
    ranked = oracle.nested(along(size, dim, count), lambda index: order((*index[:dim], *index[dim + 1 :]))[index[dim]])
    agree(selection.ranking, ranked, value, dim, count, largest)


@EXACT
@given(seeds, sizes, st.integers(0, 1), st.integers(1, 5), narrow)
def test_take_along_and_pick(seed: int, size: list[int], dim: int, count: int, dtype: torch.dtype) -> None:
    value = drawn(seed, size, dtype, False)
    values, generator = value.tolist(), torch.Generator().manual_seed(seed)
    taken = along(size, dim, count)
    index = torch.randint(0, size[dim], taken, generator=generator)
    places = index.tolist()
    expected = oracle.nested(taken, lambda at: oracle.at(values, (*at[:dim], oracle.at(places, at), *at[dim + 1 :])))
    agree(selection.take_along, expected, value, dim, index)
    chosen = torch.randint(-size[dim], size[dim], (count,), generator=generator)
    named = chosen.tolist()
    expected = oracle.nested(taken, lambda at: oracle.at(values, (*at[:dim], named[at[dim]] % size[dim], *at[dim + 1 :])))
    agree(selection.pick, expected, value, dim, chosen)


@EXACT
@given(seeds, sizes, st.integers(0, 1), narrow)
def test_put_along(seed: int, size: list[int], dim: int, dtype: torch.dtype) -> None:
    value, source = drawn(seed, size, dtype, False), drawn(seed + 1, size, dtype, False)
    generator = torch.Generator().manual_seed(seed)
    count = 1 + seed % size[dim]
    index = torch.rand(tuple(size), generator=generator).argsort(dim).narrow(dim, 0, count)  # no place twice
    source = source.narrow(dim, 0, count).contiguous()
    result = value.tolist()
    for at in oracle.every(index.shape):
        place = (*at[:dim], int(index[at]), *at[dim + 1 :])
        oracle.at(result, place[:-1])[place[-1]] = int(source[at])
    agree(selection.put_along, result, value, source, dim, index.contiguous())


@EXACT
@given(seeds, sizes, st.integers(0, 1), st.booleans(), narrow)
def test_least_and_truth(seed: int, size: list[int], dim: int, every: bool, dtype: torch.dtype) -> None:
    value = drawn(seed, size, dtype, False)
    line = lines(value, dim)
    agree(selection.least, oracle.nested(along(size, dim), lambda index: min(line(index))), value, [dim], False)
    true = drawn(seed, size) > 0
    found = lines(true, dim)
    agree(selection.truth, oracle.nested(along(size, dim), lambda index: (all if every else any)(found(index))), true, [dim], False, every)


@EXACT
@given(seeds, st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(-3, -1), st.integers(1, 4), narrow)
def test_transform(seed: int, size: list[int], dim: int, rows: int, dtype: torch.dtype) -> None:
    value = drawn(seed, size, dtype, False)
    factors = torch.randint(-64, 65, (rows, size[dim]), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    line, weights = lines(value, dim % 3), factors.tolist()

    def total(index: tuple[int, ...]) -> int:
        others = (*index[: dim % 3], *index[dim % 3 + 1 :])
        return sum(w * q for w, q in zip(weights[index[dim]], line(others), strict=True))

    expected = oracle.nested(along(size, dim % 3, rows), total)
    for wide in (False, True):
        found = matrix.transform(value, factors, dim, 3, wide)
        assert found.tolist() == expected
        assert matrix.transform(value.float(), factors, dim, 3, wide).tolist() == expected


@EXACT
@given(seeds, st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.integers(3, 6), st.integers(3, 5))
def test_pool_indices_and_unpool(seed: int, kernel: int, stride: int, padding: int, height: int, width: int) -> None:
    """The first of the largest elements of every window; put back, each stands where it was."""
    padding = min(padding, kernel // 2)
    value = drawn(seed, (2, 1, height, width))
    starts = [oracle.window_starts(n, kernel, stride, padding, 1, False) for n in (height, width)]

    def winner(index: tuple[int, ...]) -> int:
        plane, top, left = value[index[0], 0].tolist(), starts[0][index[2]], starts[1][index[3]]
        places = [(y, x) for y in range(top, top + kernel) for x in range(left, left + kernel) if 0 <= y < height and 0 <= x < width]
        y, x = min(places, key=lambda place: (-plane[place[0]][place[1]], place))
        return y * width + x

    windows = (2, 1, len(starts[0]), len(starts[1]))
    arguments = value, [kernel] * 2, [stride] * 2, [padding] * 2, [padding] * 2, [1, 1], [height, width]
    for wide in (False, True):
        agree(position.pool_indices, oracle.nested(windows, winner), *arguments, wide)
    if stride < kernel:
        return  # windows that overlap may name one place twice
    found = position.pool_indices(*arguments, False)
    largest = value.flatten(2).gather(2, found.flatten(2)).reshape(found.shape)
    back = [[[[-3] * width for _ in range(height)]] for _ in range(2)]
    for at in oracle.every(windows):
        place = int(found[at])
        back[at[0]][0][place // width][place % width] = int(largest[at])
    agree(position.unpool, back, largest, found, [height, width], -3)


def test_whole_numbers_that_no_float_holds_are_moved_as_they_are() -> None:
    one, other = torch.tensor([2**53 + 1, -(2**62) + 1, 5]), torch.tensor([-(2**40) - 1, 2**24 + 1, 7])
    a, b = one.tolist(), other.tolist()
    agree(comparison.choose, [a[0], b[1], a[2]], one, other, torch.tensor([True, False, True]))
    agree(selection.take_along, [a[2], a[0], a[1]], one, 0, torch.tensor([2, 0, 1]))
    agree(selection.put_along, [a[0], b[0], a[2]], one, other[:1].clone(), 0, torch.tensor([1]))
