"""Operators that move values about, and resizing: every spelling is integer, keeps the contract, and means what PyTorch means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation
from fxquant.ir.integer import qparams
from fxquant.ops.sampling.resize import _nearest, _neighbours, _weights
from tests.shared.contract import (
    TARGETS,
    all_equal,
    assert_gradients_reach_every_parameter,
    assert_integer_is_onnx,
    assert_train_is_validate,
    assert_validate_is_integer,
    compiled,
    flat,
)

Body = Callable[[Tensor], Any]


def _thirds(x: Tensor, batch: int) -> tuple[Tensor, ...]:
    return x[:batch], x[batch : 2 * batch], x[batch * 2 :]


# Operators that only move values: the integer result is the float result of the same integers.
MOVES: dict[str, Body] = {
    "Tensor.permute": lambda x: x.permute(0, 2, 3, 1),
    "torch.permute": lambda x: torch.permute(x, (0, -1, 1, 2)),
    "Tensor.transpose": lambda x: x.transpose(1, -1),
    "torch.transpose": lambda x: torch.transpose(x, dim0=1, dim1=2),
    "Tensor.movedim": lambda x: x.movedim(1, -1),
    "torch.movedim": lambda x: torch.movedim(x, (1, 2), (3, 1)),
    "Tensor.swapaxes": lambda x: x.swapaxes(1, 2),
    "torch.swapdims": lambda x: torch.swapdims(x, 1, 2),
    "mT": lambda x: x.mT,
    "T": lambda x: x.flatten(1).T,
    "t": lambda x: x.flatten(1).t(),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "select": lambda x: x.select(1, -1),
    "x[:, 1]": lambda x: x[:, 1],
    "x[0]": lambda x: x[0],
    "x[::2]": lambda x: x[::2],
    "steps": lambda x: x[:, ::3, 1:-1, None, ::2],
    "ellipsis": lambda x: x[..., 0],
    "list": lambda x: x[:, [0, -1, 2]],
    "constant index": lambda x: x[:, :, torch.tensor([3, -1])],
    "mixed index": lambda x: x[:, 1, ..., [0, 2], None],
    "constant mask": lambda x: x[:, torch.tensor([True, False] * 4)],
    "two lists": lambda x: x[:, [0, 1], [1, 2]],
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([1, 1, 0])),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave, the batch": lambda x: x.repeat_interleave(3, 0),
    "repeat_interleave, the batch behind": lambda x: x.transpose(0, 1).repeat_interleave(2, 1),
    "Tensor.chunk": lambda x: x.chunk(2, 1),
    "torch.chunk": lambda x: torch.chunk(x, 3, dim=1)[2],
    "Tensor.split": lambda x: x.split([1, 3, 4], 1),
    "torch.split": lambda x: torch.split(x, 3, dim=-1),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, 1)[1],
    "torch.hsplit": lambda x: torch.hsplit(x, 2)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "pieces of the batch": lambda x: torch.cat((x, x.flip(1), x.roll(1, 1))).chunk(3),
    "slices of the batch": lambda x: _thirds(torch.cat((x, x.flip(1), x.roll(1, 1))), x.shape[0]),
    "split by the batch": lambda x: torch.cat((x, x.flip(1)), 0).transpose(0, 1).split(x.shape[0], 1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, (2, 5), dim=1),
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(-1),
    "unflatten": lambda x: x.unflatten(1, (2, 4)),
    "nn.Unflatten": nn.Unflatten(1, (4, 2)),
    "Tensor.expand": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "expand to the batch": lambda x: x[:, :, :1, :1].expand(x.shape[0], 8, 4, 4),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "Tensor.repeat": lambda x: x.repeat(1, 2, 1, 3),
    "repeat, more dimensions": lambda x: x.repeat(2, 1, 1, 2, 1),
    "torch.tile": lambda x: torch.tile(x, (2, 1)),
    "Tensor.tile": lambda x: x.tile(2),
    "Tensor.roll": lambda x: x.roll((1, -2), (2, 3)),
    "torch.roll": lambda x: torch.roll(x, 3, 1),
    "Tensor.flip": lambda x: x.flip(1, 2),
    "torch.flip": lambda x: torch.flip(x, [-1]),
    "F.pad": lambda x: F.pad(x, (1, 2)),
    "F.pad, negative": lambda x: F.pad(x, (-1, 2)),
    "F.pad, reflect": lambda x: F.pad(x, (2, 3, 1, 0), mode="reflect"),
    "F.pad, replicate": lambda x: F.pad(x, (2, 3, 1, 0), mode="replicate"),
    "F.pad, circular": lambda x: F.pad(x, (2, 3, 1, 0), mode="circular"),
    "nn.ZeroPad2d": nn.ZeroPad2d(1),
    "nn.ReflectionPad2d": nn.ReflectionPad2d(2),
    "nn.ReplicationPad2d": nn.ReplicationPad2d((1, 2, 3, 4)),
    "nn.CircularPad2d": nn.CircularPad2d(1),
    "nn.PixelShuffle": nn.PixelShuffle(2),
    "nn.PixelUnshuffle": nn.PixelUnshuffle(2),
    "nn.ChannelShuffle": nn.ChannelShuffle(4),
    "F.pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "nearest": nn.Upsample(scale_factor=2),
    "nearest, size": nn.Upsample(size=(7, 5)),
    "nearest-exact": nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
    "nn.UpsamplingNearest2d": nn.UpsamplingNearest2d(scale_factor=3),
    "nearest, 1d": lambda x: F.interpolate(x.flatten(2), size=23),
    "nearest, 3d": lambda x: F.interpolate(x.unflatten(1, (2, 4)), scale_factor=(1, 2, 1.3)),
}

# Operators that round: the integer result is within some steps of the float result of the same integers.
ROUNDING: dict[str, tuple[float, Body]] = {
    "F.pad, value": (1, lambda x: F.pad(x, (1, 2, 0, 1, 3, 0), value=0.37)),
    "nn.ConstantPad2d": (1, nn.ConstantPad2d((1, 0, 2, 1), -0.5)),
    "stack": (1, lambda x: torch.stack([x, x.relu()], 1)),
    "stack, last": (1, lambda x: torch.stack((x, x.flip(1), x), dim=-1)),
    "nn.UpsamplingBilinear2d": (1.5, nn.UpsamplingBilinear2d(scale_factor=2)),
    "bilinear": (1.5, nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear, size": (1.5, nn.Upsample(size=5, mode="bilinear")),
    "bilinear, factors": (1.5, nn.Upsample(scale_factor=(1.7, 0.6), mode="bilinear")),
    "bilinear, recomputed": (1.5, nn.Upsample(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)),
    "bilinear, one dimension": (1.5, lambda x: F.interpolate(x, scale_factor=(2.0, 1.0), mode="bilinear", align_corners=True)),
    "F.upsample": (1.5, lambda x: F.upsample(x, scale_factor=2, mode="bilinear")),
    "linear": (1.5, lambda x: F.interpolate(x.flatten(2), scale_factor=2.5, mode="linear")),
}

REFUSED: dict[str, tuple[str, Body]] = {
    "resizing with the batch": (
        "the size of its input or output depends on the batch size",
        lambda x: F.interpolate(x.transpose(0, 2), scale_factor=2),
    ),
    "list of the batch": ("it indexes the batch by a list", lambda x: x[[0, 1]]),
    "roll of the batch": ("it rolls along the batch", lambda x: x.roll(1, 0)),
    "flip of the batch": ("it reverses the batch", lambda x: x.flip(0)),
    "roll of everything": ("it rolls the flattened tensor", lambda x: x.roll(1)),
    "repeats of the batch": ("it repeats along the batch", lambda x: x.repeat_interleave(torch.tensor([2]), 0)),
    "slice of the batch": ("the bounds of its index are computed", lambda x: x[: x.shape[0] // 2]),
    "piece of the batch": ("it splits the batch, whose size is not fixed", lambda x: x.chunk(2, 0)[0]),
    "pieces of a sort": ("it selects a result of %sort, which is computed in float", lambda x: torch.sort(x, 0)[0]),
}


class Net(nn.Module):
    """A convolution, and what the body makes of it; both are returned."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        x = self.convolution(x)
        return x, self.body(x)


def network(body: Body) -> nn.Module:
    torch.manual_seed(0)
    return Net(body).eval()


def batches() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(batch, 3, 8, 8, generator=generator),) for batch in (4, 6)]


def left_in_float(body: Body, target: str) -> dict[str, str]:
    """The reasons of the nodes that stay in float, by name."""
    graph = fxq.prepare(network(body), batches()[0], target, until="specs.annotate").graph
    return {node.name: spec.because for node in graph.nodes if (spec := annotation(node)) is not None and spec.dtype is None}


def assert_contract(body: Body, target: str, path: Path, steps: float) -> None:
    """The body is integer as a whole, agrees with itself everywhere, and is within `steps` of its float function."""
    assert left_in_float(body, target) == {}
    prepared, integer = compiled(network(body), batches(), target)
    assert_integer_is_onnx(integer, path / "model.onnx", batches())
    assert_validate_is_integer(prepared, integer, *batches()[0])
    source, *found = flat(integer(*batches()[0]))
    expected = flat(body(source))
    if steps == 0:
        assert all_equal(found, expected)
    step = max(known.scale for node in integer.graph.nodes if (known := qparams(node)) is not None)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= steps * step + 1e-6
    assert_train_is_validate(prepared, *batches()[0])
    assert_gradients_reach_every_parameter(prepared, *batches()[0])


class Several(nn.Module):
    """Bodies beside each other."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        super().__init__()
        self.bodies = bodies
        self.modules_of_bodies = nn.ModuleList(body for body in bodies if isinstance(body, nn.Module))

    def forward(self, x: Tensor) -> list[Any]:
        return [body(x) for body in self.bodies]


NAMES = list(MOVES)
PACKS = [NAMES[start : start + 8] for start in range(0, len(NAMES), 8)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("names", PACKS, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_moves_are_exact(names: list[str], target: str, tmp_path: Path) -> None:
    assert_contract(Several([MOVES[name] for name in names]), target, tmp_path, 0)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_operators_keep_the_contract(name: str, target: str, tmp_path: Path) -> None:
    steps, body = ROUNDING[name]
    assert_contract(body, target, tmp_path, steps)


def test_eight_fraction_bits_keep_the_contract_in_float32(tmp_path: Path) -> None:
    assert_contract(nn.Upsample(scale_factor=(1.7, 0.6), mode="bilinear"), "bernoulli2", tmp_path, 2.5)  # each dimension rounds down


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_integer_form_stays_in_float_and_says_why(name: str) -> None:
    reason, body = REFUSED[name]
    assert reason in left_in_float(body, "bayes-e").values()
    prepared, integer = compiled(network(body), batches())
    assert all_equal(prepared(*batches()[0]), integer(*batches()[0]))


@pytest.mark.usefixtures("default_outputs")
def test_infinity_pads_with_the_largest_integer() -> None:
    _, integer = compiled(network(lambda x: F.pad(x, (1, 1), value=-math.inf)), batches())
    source, padded = integer(*batches()[0])
    scale = max(known.scale for node in integer.graph.nodes if node.name == "pad" and (known := qparams(node)) is not None)
    assert torch.equal(padded[..., 1:-1], source)
    assert bool((padded[..., 0] == torch.tensor(-128.0) * torch.tensor(scale)).all())


# ---- the vectors and matrices of resizing -----------------------------------------------------------------------------

AXES = [(length, size, None) for length in (1, 2, 5, 8, 13) for size in (1, 3, 8, 26)] + [(9, None, factor) for factor in (0.4, 1.3, 2.0)]


def weights_of(length: int, size: int | None, factor: float | None, align_corners: bool, bits: int) -> Tensor:
    """The matrix that an interpolation of so many elements multiplies by."""
    return _weights(_neighbours(length, size, factor, align_corners, bits), length, bits, torch.device("cpu"))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_neighbours_are_pytorchs(mode: str) -> None:
    for length, size, factor in AXES:
        values = torch.randn(1, 2, length)
        expected = F.interpolate(values, size, factor, mode)
        assert torch.equal(values.index_select(2, torch.tensor(_nearest(length, size, factor, mode))), expected)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("align_corners", [False, True])
def test_weights_sum_to_one_and_are_those_of_linear_interpolation(align_corners: bool, bits: int) -> None:
    for length, size, factor in AXES:
        weights = weights_of(length, size, factor, align_corners, bits)
        identity = torch.eye(length, dtype=torch.float64).unsqueeze(0)
        expected = F.interpolate(identity, size, factor, "linear", align_corners)[0].t() * 2**bits
        assert bool((weights.sum(1) == 2**bits).all())
        assert bool((weights >= 0).all())
        # Both weights are rounded, and the larger one takes what their sum is off by: less than one step in all.
        assert float((weights - expected).abs().max()) <= 0.5 + 1e-6 * 2**bits


def test_weights_by_hand() -> None:
    share = Fraction(1, 2) * Fraction(3, 5) - Fraction(1, 2) + Fraction(3, 5)  # the source of output 1 of 5 from 3
    second = math.floor(share * 256 + Fraction(1, 2))
    assert weights_of(3, 5, None, False, 8)[1].tolist() == [256 - second, second, 0]
    assert weights_of(2, 4, None, False, 8).tolist() == [[256, 0], [192, 64], [64, 192], [0, 256]]
    assert weights_of(3, 2, None, True, 8).tolist() == [[256, 0, 0], [0, 0, 256]]


@pytest.mark.parametrize(("pool", "shape"), [(nn.MaxPool1d(3, 1, 1), (2, 3, 9)), (nn.MaxPool3d(3, 1, 1), (2, 3, 4, 5, 6))])
def test_padded_pools_that_move_by_one_run_in_every_runtime(pool: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    """ONNX's own evaluator forgets their padding, but for that of images."""
    x = torch.randn(shape)
    _, integer = compiled(pool.eval(), [x])
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x], show_progress=False)
    assert report, str(report)
    assert len(report.pairs) == 5


SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.amax().mean(-1),
    "sum": lambda x: x.amax().sum(0) + 1,
    "amax": lambda x: x.amax().amax(-1),
    "transpose": lambda x: x.amax().transpose(0, -1),
    "flip": lambda x: x.amax().flip(0),
    "roll": lambda x: x.amax().roll(1),
    "stack": lambda x: torch.stack([x.amax(), x.amax()]),
    "expand": lambda x: x.amax().expand(3),
    "unsqueeze": lambda x: x.amax().unsqueeze(0),
    "its product with many": lambda x: x.amax() * x,
    "many times it": lambda x: x * x.amax(),
    "its sum with many": lambda x: x.amax() + x,
    "the larger": lambda x: torch.maximum(x.amax() / 2, x),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dynamic_shapes", [None, {}], ids=["batch", "fixed"])
@pytest.mark.parametrize("name", SCALARS)
def test_tensors_without_dimensions(name: str, dynamic_shapes: Any, tmp_path: Path) -> None:
    """PyTorch promotes them differently, and lets dimension 0 of them be named."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5)
    prepared, integer = compiled(Written(SCALARS[name]), [x], "nash-e", dynamic_shapes=dynamic_shapes)
    assert_validate_is_integer(prepared, integer, x)
    if "none is left in float" in fxq.explain(integer):
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x], show_progress=False)
    with torch.no_grad():
        torch.testing.assert_close(integer(x), SCALARS[name](x), atol=0.1, rtol=0.02)  # a few steps of eight bits


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
