"""Operators without an integer form run in float between quantized layers: right, saved, and named with a reason."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.contract import all_equal, assert_integer_is_onnx, assert_validate_is_integer, compiled
from tests.shared.networks import Network

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="none", log_target=True),
    "trapezoid": lambda x, y: torch.trapezoid(x, dim=2),
    "matrix_power": lambda x, y: torch.matrix_power(x, 3),
    "kron": lambda x, y: torch.kron(x, torch.tensor([[0.5], [-2.0]])),
    "copysign": torch.copysign,
    "quantile": lambda x, y: torch.quantile(x, 0.3, dim=2),
    "bucketize": lambda x, y: torch.bucketize(x, torch.tensor([0.0, 1.0])),
    "isin": lambda x, y: torch.isin(x.argmax(1), torch.tensor([0, 2])),
    "grid_sample": lambda x, y: F.grid_sample(x, y.permute(0, 2, 3, 1)[..., :2], mode="bicubic", align_corners=False),
}

OF_INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "fmod": lambda n: torch.fmod(n, 4), "sign": torch.sign, "amax": lambda n: n.amax(1), "amin": lambda n: n.amin((1, 2)),
    "argmin": lambda n: n.argmin(1) + 1, "max_along": lambda n: n.max(1), "min_along": lambda n: n.min(2)[0] * 2,
}  # fmt: skip

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


def test_they_are_right_and_named_and_stand_in_files(tmp_path: Path) -> None:
    batch = torch.randn(4, 3, 6, 6)
    layers = {name: nn.Conv2d(3, 3, 3, padding=1) for name in ("one", "other")}
    model = Network(lambda m, x: [one := m.one(x), other := m.other(x), *(each(one, other) for each in FUNCTIONS.values())], **layers)
    prepared, integer = compiled(model, [batch])
    left = {layer.operator: layer.reason for layer in fxq.inspect.layers(prepared) if not layer.integer and not layer.boundary}
    assert all(left[name] for name in FUNCTIONS)
    assert all(f"no registered operator matches {name}" in fxq.explain(prepared) for name in FUNCTIONS if name != "grid_sample")
    one, other, *results = integer(batch)
    for function, result in zip(FUNCTIONS.values(), results, strict=True):
        assert torch.equal(result, function(one, other))
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert all(torch.equal(output, wanted) for output, wanted in zip(loaded(batch), (one, other, *results), strict=True))


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
    model = BAGS[reason]().eval()
    batches = [(torch.randint(0, 10, (4, 6)),) for _ in range(2)]
    prepared, integer = compiled(model, batches, dynamic_shapes={})
    assert reason in fxq.explain(prepared)
    results, wanted = integer(*batches[1]), model(*batches[1])
    assert all(torch.equal(*pair) for pair in zip(results[: len(wanted) // 2], wanted, strict=False))  # the bags
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert all_equal(loaded(*batches[1]), integer(*batches[1]))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), batches)


# An operator has no integer form here: the reason, and the function, of a convolution's output of shape (B, 3, 6, 6).
REFUSED: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "add infinity": ("one of its numbers is not finite", lambda m, x: x + math.inf),
    "multiply too many": ("it multiplies 36 elements", lambda m, x: x.flatten(2).prod(-1)),
    "divide by zero": ("it divides by 0.0", lambda m, x: (x.relu() + 1) / 0.0),
    "power of a negative constant": ("its base, a constant, is not positive", lambda m, x: torch.tensor(-2.0) ** x.exp()),
    "power of integers": ("its exponent holds integers", lambda m, x: x ** x.argmax(1, True)),
    "powers of several numbers": ("holds several numbers", lambda m, x: x ** torch.tensor([1.0, 2, 3, 2, 1, 2])),
    "a similarity of what is repeated": ("is repeated along the dimension", lambda m, x: F.cosine_similarity(x[:, :1], x, 1)),
    "maximum of everything": ("it reduces the batch", lambda m, x: torch.max(x).reshape(1)),
    "extremum of the batch": ("it reduces the batch", lambda m, x: x.amax(0)),
    "product over the batch": ("it sums over the batch", lambda m, x: x.flatten(1).t() @ x.flatten(1)),
    "sum of the batch": ("it sums over the batch", lambda m, x: x.sum()),
    "computed weight": ("its weight is computed by", lambda m, x: F.conv_transpose2d(x, m.layer.weight * x.std())),
    "computed slope": ("its weight is computed", lambda m, x: F.prelu(x, m.slopes * x.std())),
    "mean over the batch": ("it averages over the batch", lambda m, x: x.mean(0)),
    "mean of everything": ("it averages over the batch", lambda m, x: x.mean().reshape(1)),
    "mean to a dtype": ("a dtype argument", lambda m, x: x.mean(1, dtype=torch.float64)),
    "overlapping windows": (
        "two elements may share an index", lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 3, 1, return_indices=True), 3, 1)
    ),
    "memory": ("only the strides of model inputs are known", lambda m, x: x.as_strided((2, 3), (3, 1))),
    "norm without statistics": ("it has no running statistics", lambda m, x: m.norm(x)),
    "bytes as another dtype": ("it reinterprets the bytes", lambda m, x: x.view(torch.int32).float()),
    "resizing with the batch": ("it is resized to sizes that vary", lambda m, x: F.interpolate(x.transpose(0, 2), scale_factor=2)),
    "a pool of maps without channels": ("its input has no batch dimension", lambda m, x: F.max_pool2d(x.mean(1), 2)),
    "a norm of the maps of one sample": ("its input has no batch dimension", lambda m, x: m.maps(x[0])),
    "list of the batch": ("it indexes the batch by a list", lambda m, x: x[[0, 1]]),
    "roll of the batch": ("it rolls along a size that varies", lambda m, x: x.roll(1, 0)),
    "flip of the batch": ("it reverses the batch", lambda m, x: x.flip(0)),
    "roll of everything": ("it rolls the flattened tensor", lambda m, x: x.roll(1)),
    "repeats of the batch": ("it repeats along the batch", lambda m, x: x.repeat_interleave(torch.tensor([2]), 0)),
    "piece of the batch": ("it splits the batch, whose size is not fixed", lambda m, x: x.chunk(2, 0)[0]),
    "pieces of a sort": ("it selects a result of %sort, which is computed in float", lambda m, x: torch.sort(x, 0)[0]),
    "an order of the batch": ("it ranks the batch", lambda m, x: torch.sort(x, 0)[0]),
    "reduced by a product": ("exceeds every accumulator", lambda m, x: x.scatter_reduce(1, x.argmax(1, True), x, "prod")),
    "what is multiplied": ("it reduces by 'multiply'", lambda m, x: x.scatter(1, x.argmax(1, True), 2.0, reduce="multiply")),
    "bags of any size": (
        "depend on the batch size", lambda m, x: F.embedding_bag(x[:, 0, 0].argmax(1), torch.eye(6), offsets=torch.tensor([0]))
    ),
    "the second item": ("samples of the batch other than the first", lambda m, x: torch.take(x, torch.tensor([109]))),
    "lists of the batch": ("it indexes the batch by a list", lambda m, x: x[[0, 1], [1, 2]]),
    "counts of the batch": ("it counts over the batch", lambda m, x: torch.count_nonzero(x > 0, 0)),
    "what is accumulated": (
        "accumulates values at one index", lambda m, x: x.index_put((torch.tensor([0, 0]),), x[:1].expand(2, -1, -1, -1), accumulate=True),
    ),
}  # fmt: skip


@pytest.mark.sweep(20)
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_integer_form_stays_in_float_and_says_why(name: str) -> None:
    reason, function = REFUSED[name]
    members = {"layer": nn.Conv2d(3, 3, 1), "norm": nn.BatchNorm2d(3, track_running_stats=False), "slopes": nn.Parameter(torch.randn(3))}
    members["maps"] = nn.InstanceNorm2d(3)
    model = Network(lambda m, x: function(m, m.layer(x)), **members).eval()
    images = torch.randn(4, 3, 6, 6)
    prepared, integer = compiled(model, [images])
    reasons = [layer.reason for layer in fxq.inspect.layers(prepared) if not layer.integer and not layer.boundary]
    assert any(reason in because for because in reasons), reasons
    assert reason in fxq.explain(prepared)
    assert_validate_is_integer(prepared, integer, images)
    fxq.set_state(prepared, fxq.State.FLOAT)
    # Constants are multiplied in another order than in the float model: hence a tolerance.
    torch.testing.assert_close(prepared(images), model(images), rtol=1e-5, atol=1e-5, equal_nan=True)
