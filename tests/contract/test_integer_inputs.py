"""Whole numbers and truth values that are given: what PyTorch computes of them, exactly, in every form of a model."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ops import OPERATORS
from tests.shared import contract
from tests.shared.contract import all_equal, compiled
from tests.shared.networks import Network, held, sqnr

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # of numbers, of others, of narrow ones, and of truth values

# By the operator that each becomes.
OF_WHOLE_NUMBERS: dict[str, list[Function]] = {
    "whole_add": [lambda x, y, n, m: x + y, lambda x, y, n, m: torch.add(x, 3, alpha=2), lambda x, y, n, m: n + n],
    "whole_sub": [lambda x, y, n, m: 1 - x, lambda x, y, n, m: -y, lambda x, y, n, m: ~x, lambda x, y, n, m: torch.rsub(n, 7)],
    "whole_mul": [lambda x, y, n, m: x * y, lambda x, y, n, m: n * 5, lambda x, y, n, m: x.square(), lambda x, y, n, m: m * 3],
    "whole_floor_divide": [lambda x, y, n, m: x // 3, lambda x, y, n, m: torch.div(x, y.abs() + 1, rounding_mode="floor")],
    "whole_trunc_divide": [lambda x, y, n, m: torch.div(x, -3, rounding_mode="trunc")],
    "whole_remainder": [lambda x, y, n, m: x % -3, lambda x, y, n, m: x % (y.abs() + 1), lambda x, y, n, m: n % 7],
    "whole_maximum": [lambda x, y, n, m: torch.maximum(x, y)],
    "whole_minimum": [lambda x, y, n, m: torch.minimum(n, n * 2)],
    "whole_and": [lambda x, y, n, m: x & y, lambda x, y, n, m: n & -4, lambda x, y, n, m: torch.bitwise_and(x, 6)],
    "whole_or": [lambda x, y, n, m: x | y, lambda x, y, n, m: n | 3],
    "whole_xor": [lambda x, y, n, m: x ^ y, lambda x, y, n, m: x.bitwise_xor(-5)],
    "whole_abs": [lambda x, y, n, m: x.abs()],
    "whole_clamp": [lambda x, y, n, m: x.clamp(-2, 5), lambda x, y, n, m: torch.clamp(x, max=y), lambda x, y, n, m: x.relu()],
    "whole_pow": [lambda x, y, n, m: x**3],
    **{
        f"whole_{side}": [
            lambda x, y, n, m, side=side: getattr(operator, side)(x, 2),
            lambda x, y, n, m, side=side: getattr(operator, f"i{side}")(x.clone(), 3),
            lambda x, y, n, m, long=long: getattr(torch, f"bitwise_{long}")(n, 1),
            *[
                lambda x, y, n, m, method=method: getattr(x * 3, method)(1)
                for method in (f"__{side}__", f"__i{side}__", f"bitwise_{long}", f"bitwise_{long}_")
            ],
        ]
        for side, long in (("lshift", "left_shift"), ("rshift", "right_shift"))
    },
    **{
        f"whole_{name}": [
            lambda x, y, n, m, name=name: getattr(torch, name)(x, y),
            lambda x, y, n, m, name=name: getattr(torch, name)(n, 2.5),
        ]
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "whole_where": [lambda x, y, n, m: torch.where(x > 2, x, 0), lambda x, y, n, m: n.masked_fill(m, 9)],
    "whole_sum": [lambda x, y, n, m: x.sum(1), lambda x, y, n, m: m.sum((1, 2)), lambda x, y, n, m: n.sum(-1, keepdim=True)],
    "whole_cumsum": [lambda x, y, n, m: x.cumsum(-1), lambda x, y, n, m: m.long().cumsum(1) - 1],
    "whole_argmax": [lambda x, y, n, m: x.argmax(-1)],
    "whole_cat": [lambda x, y, n, m: torch.cat((x, y), 1), lambda x, y, n, m: torch.stack((m, x > 0), -1)],
    "to_integer": [
        *[lambda x, y, n, m, cast=cast: getattr(x * 40, cast)() for cast in ("int", "short", "char", "byte", "long")],
        *[lambda x, y, n, m: m.long(), lambda x, y, n, m: n.transpose(1, 2), lambda x, y, n, m: n.flatten(1)[:, ::2]],
    ],
    "logical_and": [lambda x, y, n, m: torch.logical_and(x, n), lambda x, y, n, m: m * (x > 0)],
    "logical_or": [lambda x, y, n, m: torch.logical_or(m, y), lambda x, y, n, m: m | True],
    "logical_not": [lambda x, y, n, m: torch.logical_not(x), lambda x, y, n, m: ~m],
    "ne": [],
    "any": [lambda x, y, n, m: x.any(1)],
}
LARGE = 2**40


def exact() -> nn.Module:
    functions = [function for functions in OF_WHOLE_NUMBERS.values() for function in functions]
    return Network(lambda _, *inputs: [function(*inputs) for function in functions]).eval()


def inputs_of(count: int, large: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    most = LARGE if large else 9
    numbers = [torch.randint(-most, most + 1, (count, 3, 4), generator=generator) for _ in range(2)]
    narrow = torch.randint(-128, 128, (count, 3, 4), generator=generator, dtype=torch.int8)
    return *numbers, narrow, torch.rand(count, 3, 4, generator=generator) < 0.5


@pytest.mark.nightly
def test_arithmetic_on_whole_numbers_is_pytorchs_in_every_form(tmp_path: Path) -> None:
    model, batches = exact(), [inputs_of(4), inputs_of(2), inputs_of(3, large=True)]
    prepared, integer = compiled(model, batches[:1])
    assert not [layer.name for layer in fxq.inspect.layers(prepared) if not layer.integer]
    for batch in batches:
        wanted = model(*batch)
        for form in (prepared, integer):
            results = form(*batch)
            assert all(one.dtype == other.dtype for one, other in zip(contract.flat(wanted), contract.flat(results), strict=True))
            assert all_equal(wanted, results)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", batches)
    before = fxq.export_onnx(integer, tmp_path / "before.onnx", opset=17)  # without operators on bits
    report = fxq.verify(integer, before, batches, show_progress=False)
    assert report, str(report)


def test_each_becomes_its_operator() -> None:
    prepared = fxq.prepare(exact(), inputs_of(4), until="canonical.rewrite")
    found = {OPERATORS[node.target].name for node in prepared.graph.nodes if node.target in OPERATORS}
    assert found >= OF_WHOLE_NUMBERS.keys() - {"ne"}


def casts(_: Any, x: Tensor, image: Tensor) -> Any:
    """Bytes become floats, and floats integers."""
    pixels = image.permute(0, 3, 1, 2).float() / 255 - 0.5
    rounded = [cast(x.round()) for cast in (Tensor.long, Tensor.int, Tensor.short, Tensor.char)]
    real = [x.half(), x.to(torch.float64), x.half().float() * 2, x.bfloat16().float() + 1, (x > 0).sum(1, keepdim=True) * x]
    return [pixels, x.long(), x.abs().byte(), x.bool(), x.sign().long(), *rounded, *real, (x > 0).sum(1).float() / 6]


def integer_contract(model: nn.Module, batches: list[tuple[Tensor, ...]], path: Path, target: str = "bayes-e", qconfig: Any = None) -> Any:
    """Hold a model to the contract, all of it in integers; returns the float results and the integer model's of the second batch."""
    prepared, integer = held(model, batches, path, target, qconfig)
    assert not [layer.name for layer in fxq.inspect.layers(prepared) if not layer.integer and not layer.boundary]
    return zip(model(*batches[1]), integer(*batches[1]), strict=True)


def peaks(_: Any, x: Tensor) -> Any:
    """Places of the largest elements, decoded to columns and rows as by HRNet and CenterNet, and otherwise."""
    width, place, best = x.shape[3], x.flatten(2).argmax(2), torch.topk(x.flatten(1), 3)[1]
    inside, real = best % (x.shape[2] * width), place.float()
    return [
        torch.stack((real % width, torch.floor(real / width)), -1) * 4,
        torch.cat((torch.stack(((inside % width).int().float(), (inside / width).int().float()), 2), best[..., None].float()), 2),
        *(
            place / width,
            torch.fmod(real, width),
            real // width,
            place.to(torch.float32) * 2.0 - 0.5,
            x.flatten(2).max(2)[1].float().trunc(),
        ),
        *(torch.where(x.amax((2, 3)) > 0.5, real, -1.0) * 1.5, (-x).flatten(2).argmin(2).type(torch.float32).clamp(max=70) / width),
    ]


@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
def test_an_index_that_becomes_a_number_stays_exact(target: str, tmp_path: Path) -> None:
    x = torch.rand(4, 3, 16, 12, generator=torch.Generator().manual_seed(0)) * 0.1
    for item, channel in itertools.product(range(4), range(3)):
        x[item, channel, (5 * item + channel) % 16, (7 * channel + 3 * item) % 12] = 1 + channel + 0.1 * item
    model = Network(peaks)
    _, integer = held(model, [(x,), (x,)], tmp_path / "model.onnx", target)
    assert all(map(torch.equal, integer(x), model(x)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("bayes-e", "int8"), ("nash-e", "int16"), ("x86", "uint8")])
def test_casts_hold_the_contract(target: str, dtype: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def batch(count: int) -> tuple[Tensor, ...]:
        images = torch.randint(0, 256, (count, 6, 6, 3), generator=generator, dtype=torch.uint8)
        return torch.randn(count, 3, 6, 6, generator=generator) * 3, images

    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype))
    for wanted, found in integer_contract(Network(casts), [batch(4), batch(3)], tmp_path / "model.onnx", target, qconfig):
        assert wanted.dtype == found.dtype
        if wanted.dtype.is_floating_point:
            assert sqnr(wanted, found) > 22
        else:
            assert float((wanted == found).double().mean()) > 0.93


def test_powers_that_are_whole_numbers_have_the_sign_of_their_base(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def batch(count: int) -> tuple[Tensor, ...]:
        x = torch.randn(count, 6, 8, generator=generator)
        x[0, 0] = 0
        return x, torch.randint(1, 4, (count, 6, 8), generator=generator)

    model = Network(lambda _, x, n: [x ** (n % 4), torch.pow(x, n - 1), x.abs() ** n])
    for wanted, found in integer_contract(model, [batch(4), batch(8)], tmp_path / "model.onnx"):
        assert sqnr(wanted, found) > 25
        large = wanted.abs() > 0.1 * float(wanted.abs().max())
        assert bool((wanted[large] < 0).any()) == bool((found[large] < 0).any())
        assert torch.equal(wanted[large].sign(), found[large].sign())


def buckets(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Distances of positions that are given, in buckets that grow with them: the logarithm of 0 is passed over."""
    apart = (positions.unsqueeze(-2) - positions.unsqueeze(-1)).abs()
    far = 4 + (torch.log(apart.float() / 4) / 3.0 * 4).to(torch.long)
    far = torch.min(far, torch.full_like(far, 7))
    return model.linear(x) + model.biases(torch.where(apart < 4, apart, far)).sum(2)


def test_whole_numbers_computed_from_whole_ones_are_those_of_the_model(tmp_path: Path) -> None:
    model = Network(buckets, biases=nn.Embedding(8, 4), linear=nn.Linear(4, 4)).eval()
    batches = [(torch.randn(3, 5, 4), torch.randint(0, 200, (3, 5))) for _ in range(2)]
    prepared, integer = contract.compiled(model, batches)
    assert fxq.verify(prepared, integer, batches, show_progress=False)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), batches, show_progress=False)
    wanted, found = model(*batches[0]), integer(*batches[0])
    assert sqnr(wanted, found) > 30.5  # in another bucket it would be the whole of an embedding
    assert "before they are truncated" in fxq.explain(prepared)
