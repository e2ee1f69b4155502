"""Moves along the batch, odd indices, sums at places, resizing, tensors without dimensions: integer, equal in all forms, as PyTorch's."""

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import BatchDim, TensorFact, annotation
from fxquant.ir.integer import qparams
from fxquant.ops.sampling.resize import _nearest, _neighbours, _weights
from fxquant.primitives import PRIMITIVES, selection
from fxquant.primitives.record import Unproved, Value
from tests.shared import contract
from tests.shared.contract import TARGETS
from tests.shared.networks import Network, members, sqnr

Body = Callable[[Tensor], Any]


def _thirds(x: Tensor, batch: int) -> tuple[Tensor, ...]:
    return x[:batch], x[batch : 2 * batch], x[batch * 2 :]


# What samples on records do not have: moves along the batch, mixed indices, factors that are not whole. Bounds in steps of the result.
EXACT: dict[str, Body] = {
    "x[0]": lambda x: x[0],
    "mixed index": lambda x: x[:, 1, ..., [0, 2], None],
    "constant mask": lambda x: x[:, torch.tensor([True, False] * 4)],
    "two lists": lambda x: x[:, [0, 1], [1, 2]],
    "repeat_interleave, the batch after": lambda x: x.transpose(0, 1).repeat_interleave(2, 1),
    "Tensor.split": lambda x: x.split([1, 3, 4], 1),
    "torch.hsplit": lambda x: torch.hsplit(x, 2)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "pieces of the batch": lambda x: torch.cat((x, x.flip(1), x.roll(1, 1))).chunk(3),
    "slices of the batch": lambda x: _thirds(torch.cat((x, x.flip(1), x.roll(1, 1))), x.shape[0]),
    "split by the batch": lambda x: torch.cat((x, x.flip(1)), 0).transpose(0, 1).split(x.shape[0], 1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, (2, 5), dim=1),
    "expand to the batch": lambda x: x[:, :, :1, :1].expand(x.shape[0], 8, 4, 4),
    "repeat, more dimensions": lambda x: x.repeat(2, 1, 1, 2, 1),
    "F.pad, replicate": lambda x: F.pad(x, (2, 3, 1, 0), mode="replicate"),
    "nearest-exact": nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
    "nearest, 3d": lambda x: F.interpolate(x.unflatten(1, (2, 4)), scale_factor=(1, 2, 1.3)),
    "x[::2]": lambda x: x[::2],
}
ROUNDING: dict[str, Body] = {
    "F.pad, value": lambda x: F.pad(x, (1, 2, 0, 1, 3, 0), value=0.37),
    "bilinear, factors": nn.Upsample(scale_factor=(1.7, 0.6), mode="bilinear"),
    "bilinear, recomputed": nn.Upsample(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
    "bilinear, one dimension": lambda x: F.interpolate(x, scale_factor=(2.0, 1.0), mode="bilinear", align_corners=True),
    "linear": lambda x: F.interpolate(x.flatten(2), scale_factor=2.5, mode="linear"),
}


@members(lambda body: dict(convolution=nn.Conv2d(3, 8, 3, padding=1), body=body))
def Net(self, x: Tensor) -> Any:
    """Return a convolution's result, and the body's result of that tensor."""
    x = self.convolution(x)
    return x, self.body(x)


def network(body: Body) -> nn.Module:
    torch.manual_seed(0)
    return Net(body).eval()


def left_in_float(body: Body, target: str) -> dict[str, str]:
    """The reasons of the nodes that stay in float, by name."""
    graph = fxq.prepare(network(body), BATCHES[0], target, until="specs.annotate").graph
    return {node.name: spec.because for node in graph.nodes if (spec := annotation(node)) is not None and spec.dtype is None}


def assert_within(body: Body, target: str, path: Path, steps: float) -> None:
    """The body is integer as a whole, agrees with itself everywhere, and is within `steps` of its float function."""
    assert left_in_float(body, target) == {}
    prepared, integer = contract.compiled(network(body), BATCHES, target)
    contract.assert_integer_is_onnx(integer, path / "model.onnx", BATCHES)
    contract.assert_validate_is_integer(prepared, integer, *BATCHES[0])
    source, *output = contract.flat(integer(*BATCHES[0]))
    expected = contract.flat(body(source))
    if steps == 0:
        assert contract.all_equal(output, expected)
    step = max(grid.scale for node in integer.graph.nodes if (grid := qparams(node)) is not None)
    for one, other in zip(output, expected, strict=True):
        assert float((one - other).abs().max()) <= steps * step + 1e-6
    contract.assert_train_is_validate(prepared, *BATCHES[0])
    contract.assert_gradients_reach_every_parameter(prepared, *BATCHES[0])


@members(lambda bodies: dict(bodies=bodies, modules_of_bodies=nn.ModuleList(body for body in bodies if isinstance(body, nn.Module))))
def Several(self, x: Tensor) -> list[Any]:
    """Bodies beside each other."""
    return [body(x) for body in self.bodies]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("bodies", "steps"), [(EXACT, 0), (ROUNDING, 1.5)], ids=["exact", "rounding"])
def test_moves_and_resizing_keep_the_contract(bodies: dict[str, Body], steps: float, target: str, tmp_path: Path) -> None:
    assert_within(Several(list(bodies.values())), target, tmp_path, steps)


def test_eight_fraction_bits_keep_the_contract_in_float32(tmp_path: Path) -> None:
    assert_within(nn.Upsample(scale_factor=(1.7, 0.6), mode="bilinear"), "bernoulli2", tmp_path, 2.5)  # each dimension rounds down


@pytest.mark.usefixtures("default_outputs")
def test_infinity_pads_with_the_largest_integer() -> None:
    _, integer = contract.compiled(network(lambda x: F.pad(x, (1, 1), value=-math.inf)), BATCHES)
    source, padded = integer(*BATCHES[0])
    scale = max(grid.scale for node in integer.graph.nodes if node.name == "pad" and (grid := qparams(node)) is not None)
    assert torch.equal(padded[..., 1:-1], source)
    assert bool((padded[..., 0] == torch.tensor(-128.0) * torch.tensor(scale)).all())


# ---- the vectors and matrices of resizing -----------------------------------------------------------------------------
AXES = [(length, size, None) for length in (1, 2, 5, 8, 13) for size in (1, 3, 8, 26)] + [(9, None, factor) for factor in (0.4, 1.3, 2.0)]
PLANES = torch.randn(7, 3, 4, 5, generator=torch.Generator().manual_seed(1)).split(4)
BATCHES = [(x,) for x in torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(1)).split([4, 6])]


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
    _, integer = contract.compiled(pool.eval(), [x])
    report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x])
    assert report, str(report)
    assert len(report.pairs) == 5


SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.amax().mean(-1), "sum": lambda x: x.amax().sum(0) + 1, "amax": lambda x: x.amax().amax(-1),
    "transpose": lambda x: x.amax().transpose(0, -1), "flip": lambda x: x.amax().flip(0), "roll": lambda x: x.amax().roll(1),
    "stack": lambda x: torch.stack([x.amax(), x.amax()]), "expand": lambda x: x.amax().expand(3),
    "unsqueeze": lambda x: x.amax().unsqueeze(0), "its product with many": lambda x: x.amax() * x, "many times it": lambda x: x * x.amax(),
    "its sum with many": lambda x: x.amax() + x, "the larger": lambda x: torch.maximum(x.amax() / 2, x),
}  # fmt: skip


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dynamic_shapes", [None, {}], ids=["batch", "fixed"])
@pytest.mark.parametrize("name", SCALARS)
def test_tensors_without_dimensions(name: str, dynamic_shapes: Any, tmp_path: Path) -> None:
    """PyTorch promotes them differently, and lets dimension 0 of a scalar be named."""
    x = torch.randn(4, 3, 5)
    prepared, integer = contract.compiled(Network(lambda _, x: SCALARS[name](x)), [x], "nash-e", dynamic_shapes=dynamic_shapes)
    contract.assert_validate_is_integer(prepared, integer, x)
    if "none is left in float" in fxq.explain(integer):
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x])
    with torch.no_grad():
        torch.testing.assert_close(integer(x), SCALARS[name](x), atol=0.1, rtol=0.02)  # a few steps of eight bits


# ---- indices, and what is brought together at places -----------------------------------------------------------------
def live(function: Callable[[Tensor], Any]) -> nn.Module:
    """A function of a layer's output of shape (B, 3, 4, 5)."""
    return Network(lambda m, x: function(m.layer(x)), layer=nn.Conv2d(3, 3, 1)).eval()


def test_a_sum_whose_terms_are_not_known_is_not_proved() -> None:
    one, bounds = torch.ones((), dtype=torch.float64), PRIMITIVES[selection.sum_along].bounds
    assert bounds is not None
    source = Value(-one, one, TensorFact((BatchDim(1, 0), 3), torch.int8))
    with pytest.raises(Unproved, match="whose size varies"):
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

    prepared, integer = contract.compiled(live(brought), PLANES)
    assert "none is left in float" in fxq.explain(prepared)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", opset=opset)
    assert fxq.verify(integer, path, [(batch,) for batch in PLANES])
    contract.assert_validate_is_integer(prepared, integer, PLANES[0])


def assigned(x: Tensor, index: Any) -> Tensor:
    result = x * 1.5
    result[index] = 0.25
    return result


LISTS: dict[str, list[Any]] = {
    "slices": [slice(None), slice(0, 2)], "an ellipsis": [..., 0], "lists": [slice(None), [0, 1], [1, 2]],
    "tensors": [slice(None), torch.tensor([0, 2]), torch.tensor([1, 1])], "a range": [slice(None), range(2)],
    "steps": [slice(None), slice(None, None, 2), 1],
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_entries_is_the_index_that_pytorch_takes_it_for(name: str, tmp_path: Path) -> None:
    index = LISTS[name]
    model = live(lambda x: (x[index], assigned(x, index)))
    prepared, integer = contract.compiled(model, PLANES)
    contract.assert_contract(prepared, tmp_path / "model.onnx", PLANES[0], integer=integer)
    assert next(layer.dtype for layer in fxq.inspect.layers(prepared) if layer.name == "getitem") == "int8"
    for wanted, actual in zip(model(PLANES[1]), integer(PLANES[1]), strict=True):
        assert wanted.shape == actual.shape
        assert sqnr(wanted, actual) > 20
