"""Operators with weights, products and reductions: the contract by bits on both arithmetics, and closeness to the float model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import MinMaxObserver
from tests.shared import contract

Parameter = nn.Parameter
COVERING = fxq.QConfig(output=fxq.ActivationConfig(observer=MinMaxObserver))  # no value of a few small batches is cut off


class Case(nn.Module):
    """A forward function with the modules and parameters it uses, and the shape of its input."""

    def __init__(self, shape: tuple[int, ...], function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.shape, self.function = shape, function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def layer(shape: tuple[int, ...], module: nn.Module, norm: nn.Module | None = None) -> Case:
    """A layer, and a batch norm behind it."""
    return Case(shape, lambda s, x: s.norm(s.layer(x)), layer=module, norm=nn.Identity() if norm is None else norm)


def weights(*shape: int) -> Parameter:
    return Parameter(torch.randn(shape))


CASES: dict[str, Callable[[], Case]] = {
    # transposed convolution
    "conv_transpose1d": lambda: layer((4, 4, 7), nn.ConvTranspose1d(4, 6, 3, 2, 1, 1)),
    "conv_transpose1d, groups": lambda: layer((4, 4, 7), nn.ConvTranspose1d(4, 6, 4, 3, 1, 2, groups=2), nn.BatchNorm1d(6)),
    "conv_transpose2d": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), nn.BatchNorm2d(6)),
    "conv_transpose2d, groups": lambda: layer(
        (4, 4, 5, 6), nn.ConvTranspose2d(4, 8, 3, (2, 3), 1, 1, groups=2, bias=False), nn.BatchNorm2d(8)
    ),
    "conv_transpose2d, dilation": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 2, (2, 1), 1, dilation=2)),
    "conv_transpose2d, output padding of a stride": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 1, 1, (1, 0), dilation=2)),
    "conv_transpose2d, groups and dilation": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2, dilation=(1, 2))),
    "conv_transpose2d, depthwise": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 4, 4, 2, 1, groups=4)),
    "conv_transpose2d, cropped": lambda: layer((4, 4, 5, 6), nn.ConvTranspose2d(4, 4, 2, 2, 2, groups=2)),
    "conv_transpose2d, output size": lambda: Case((4, 4, 5, 6), lambda s, x: s.conv(x, (10, 11)), conv=nn.ConvTranspose2d(4, 6, 3, 2, 1)),
    "conv_transpose2d, function": lambda: Case(
        (4, 4, 5, 6), lambda s, x: F.conv_transpose2d(x, s.w, s.b, stride=2, groups=2).relu(), w=weights(4, 3, 3, 3), b=weights(6)
    ),
    "conv_transpose2d, residual": lambda: Case(
        (4, 4, 5, 6), lambda s, x: F.relu6(s.a(x) + s.b(x)), a=nn.ConvTranspose2d(4, 6, 4, 2, 1), b=nn.ConvTranspose2d(4, 6, 2, 2)
    ),
    "conv_transpose3d": lambda: layer((2, 2, 3, 4, 3), nn.ConvTranspose3d(2, 4, 2, 2), nn.BatchNorm3d(4)),
    "conv_transpose3d, groups": lambda: layer((2, 2, 3, 4, 3), nn.ConvTranspose3d(2, 4, (2, 3, 2), (1, 2, 2), (0, 1, 0), groups=2)),
    # batch norm that follows no layer
    "batch_norm": lambda: Case((8, 3, 4, 4), lambda s, x: s.norm(x).relu(), norm=nn.BatchNorm2d(3)),
    "batch_norm, features": lambda: Case((8, 3), lambda s, x: s.norm(x), norm=nn.BatchNorm1d(3)),
    "batch_norm, one channel": lambda: Case((8, 1, 5), lambda s, x: s.norm(x), norm=nn.BatchNorm1d(1)),
    "batch_norm, 3d and no affine": lambda: Case(
        (8, 3, 2, 2, 2), lambda s, x: s.norm(x) + s.plain(x), norm=nn.BatchNorm3d(3), plain=nn.BatchNorm3d(3, affine=False)
    ),
    "batch_norm, function": lambda: Case(
        (8, 3, 4), lambda s, x: F.batch_norm(x, s.norm.running_mean, s.norm.running_var, s.norm.weight, s.norm.bias), norm=nn.BatchNorm1d(3)
    ),
    # layers with batch norm
    "conv1d": lambda: layer((4, 6, 9), nn.Conv1d(6, 5, 3), nn.BatchNorm1d(5)),
    "conv3d": lambda: layer((2, 2, 5, 5, 5), nn.Conv3d(2, 5, 3, groups=1), nn.BatchNorm3d(5)),
    "linear": lambda: layer((16, 8), nn.Linear(8, 5), nn.BatchNorm1d(5)),
    "linear, three dimensions": lambda: Case((4, 3, 8), lambda s, x: s.a(x).relu() + s.b(x), a=nn.Linear(8, 5), b=nn.Linear(8, 5)),
    # matrix products
    "matmul": lambda: Case((4, 6, 8), lambda s, x: torch.matmul(s.a(x), s.b(x)), a=nn.Linear(8, 6), b=nn.Linear(8, 5)),
    "matmul, attention": lambda: Case((2, 3, 6, 8), lambda s, x: (s.a(x) @ s.b(x).mT) @ x, a=nn.Linear(8, 4), b=nn.Linear(8, 4)),
    "matmul, broadcast": lambda: Case((2, 3, 6, 6), lambda s, x: torch.matmul(s.a(x), x.mean(1, keepdim=True)), a=nn.Linear(6, 6)),
    "matmul, itself": lambda: Case((4, 6, 6), lambda s, x: s.a(x).matmul(s.a(x)), a=nn.Linear(6, 6)),
    "bmm": lambda: Case((4, 6, 8), lambda s, x: torch.bmm(s.a(x), x).clamp(-4, 4), a=nn.Linear(8, 6)),
    "matmul, parameter": lambda: Case((4, 6, 8), lambda s, x: (x @ s.w).relu(), w=weights(8, 5)),
    "matmul, transposed parameter": lambda: Case((4, 6, 8), lambda s, x: x @ s.w.t() + torch.matmul(x, s.w.T), w=weights(5, 8)),
    "matmul, parameter on the left": lambda: Case((4, 6, 8), lambda s, x: s.w @ x, w=weights(5, 6)),
    "matmul, batch of parameters": lambda: Case((4, 3, 6, 8), lambda s, x: x @ s.w, w=weights(3, 8, 5)),
    "mm": lambda: Case((8, 8), lambda s, x: torch.mm(x, s.w), w=weights(8, 5)),
    "addmm": lambda: Case((8, 8), lambda s, x: torch.addmm(s.b, x, s.w).relu(), w=weights(8, 5), b=weights(5)),
    # prelu
    "prelu": lambda: Case((8, 3, 4, 4), lambda s, x: s.prelu(x), prelu=nn.PReLU()),
    "prelu, channels": lambda: Case((8, 3, 4, 4), lambda s, x: F.prelu(x, s.w).clamp(-1, 2), w=weights(3)),
    "prelu, steep": lambda: Case((8, 3), lambda s, x: F.prelu(x, s.w), w=Parameter(torch.tensor([30.0, -7.0, 0.0]))),
    # reductions and extrema
    "sum": lambda: Case((4, 3, 4, 4), lambda s, x: s.a(x).sum(-1).relu() + torch.sum(x, dim=(2, 3)).unsqueeze(-1), a=nn.Conv2d(3, 3, 1)),
    "sum, keepdim": lambda: Case((4, 3, 4), lambda s, x: s.a(x).sum((1, 2), keepdim=True), a=nn.Linear(4, 5)),
    "maximum": lambda: Case((8, 3, 4), lambda s, x: torch.maximum(s.a(x), s.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
    "minimum": lambda: Case((8, 3, 4), lambda s, x: torch.min(s.a(x), x.minimum(s.w)), a=nn.Linear(4, 4), w=weights(4)),
    "amax": lambda: Case((8, 3, 4), lambda s, x: s.a(x).amax(1, keepdim=True) + x.amax((1, 2), True), a=nn.Linear(4, 4)),
    "amax, image": lambda: Case((8, 3, 4, 4), lambda s, x: torch.amax(s.a(x), (-2, -1)), a=nn.Conv2d(3, 4, 2)),
}

WIDE: dict[str, Callable[[], Case]] = {
    "transposed_convolution_wide": lambda: layer((1, 300, 4, 4), nn.ConvTranspose2d(300, 2, 5, 1)),
    "transposed_convolution_wide, groups": lambda: layer((1, 600, 3, 3), nn.ConvTranspose2d(600, 4, 5, 2, groups=2)),
    "matrix_product_wide": lambda: Case((2, 2, 1100), lambda s, x: x @ s.a(x).reshape(-1, 1100, 2), a=nn.Linear(1100, 1100)),
    "linear_wide": lambda: Case((2, 3, 6000), lambda s, x: x @ s.w, w=weights(6000, 3)),
}


def built(make: Callable[[], Case], count: int = 3) -> tuple[Case, list[tuple[Tensor, ...]]]:
    """The case with statistics that are not those of a new batch norm, and batches for it."""
    model = make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    nn.init.normal_(tensor)
            if module.running_var is not None:
                nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval(), [(torch.randn(model.shape),) for _ in range(count)]


def assert_contract(compiled: contract.Compiled, path: Path, batches: list[tuple[Tensor, ...]]) -> None:
    contract.assert_validate_is_integer(*compiled, *batches[0])
    other = (torch.randn(batches[0][0].shape[0] + 1, *batches[0][0].shape[1:]),)
    contract.assert_integer_is_onnx(compiled.integer, path, [batches[0], other])
    contract.assert_alive(compiled.integer, *batches[0])
    contract.assert_train_is_validate(compiled.prepared, *batches[0])
    if list(compiled.prepared.parameters()):
        contract.assert_gradients_reach_every_parameter(compiled.prepared, *batches[0])


def left_in_float(prepared: fx.GraphModule) -> list[str]:
    """The operators that stayed in float and are used."""
    specs = {node.name: annotation(node) for node in prepared.graph.nodes if node.users}
    return [name for name, spec in specs.items() if spec is not None and spec.dtype is None and not name.endswith("dequantize")]


def reason(prepared: fx.GraphModule, name: str) -> str:
    spec = next(annotation(node) for node in prepared.graph.nodes if node.name == name)
    assert spec is not None
    assert spec.dtype is None
    return spec.because


# A case's geometry has nothing to do with the arithmetic: one target after the other.
TARGETS = {**dict(zip(CASES, itertools.cycle(contract.TARGETS), strict=False)), "prelu, steep": "nash-e"}  # it saturates on bayes-e


@pytest.mark.sweep(14)
@pytest.mark.parametrize(("name", "target"), TARGETS.items())
def test_contract(name: str, target: str, tmp_path: Path) -> None:
    model, batches = built(CASES[name])
    compiled = contract.compiled(model, batches, target, COVERING)
    assert left_in_float(compiled.prepared) == []
    expected, found = model(*batches[0]), compiled.integer(*batches[0])
    assert found.shape == expected.shape
    assert (found - expected).square().mean() < 0.005 * expected.var(), "far from the float model"
    assert_contract(compiled, tmp_path / "model.onnx", batches)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", contract.TARGETS)
@pytest.mark.parametrize("name", WIDE)
def test_wide_sums(name: str, target: str, tmp_path: Path) -> None:
    model, batches = built(WIDE[name], 1)
    compiled = contract.compiled(model, batches, target)
    assert any(getattr(node.target, "__name__", "") == name.split(",")[0] for node in compiled.integer.graph.nodes)
    assert_contract(compiled, tmp_path / "model.onnx", batches)


# ---- batch norm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch_norm, features", "conv_transpose2d, groups", "conv3d", "linear"])
def test_live_statistics(name: str) -> None:
    model, batches = built(CASES[name], 1)
    prepared = contract.compiled(model, batches, qconfig=COVERING).prepared
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    before = prepared.norm.running_mean.clone()
    trained = prepared(*batches[0])
    model.norm.train()
    expected = model(*batches[0])
    assert (trained - expected).square().mean() < 0.005 * expected.var()
    for statistic in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(prepared.norm, statistic), getattr(model.norm, statistic), rtol=5e-3, atol=5e-3)
    assert not torch.equal(prepared.norm.running_mean, before)


class Shared(nn.Module):
    """One convolution with two batch norms: its output read twice, or called twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.conv, self.one, self.other = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv(x)
        return self.one(first) * self.other(self.conv(x) if self.twice else first)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("target", contract.TARGETS)
def test_two_batch_norms_on_one_convolution(twice: bool, target: str, tmp_path: Path) -> None:
    model, batches = built(lambda: Case((4, 3, 6, 6), lambda s, x: s.shared(x), shared=Shared(twice)))
    compiled = contract.compiled(model, batches, target)
    kinds = [operator.operator.name for operator in quantized_operators(compiled.prepared).values()]
    assert kinds.count("conv2d") == (2 if twice else 1)
    assert kinds.count("batch_norm") == (0 if twice else 2)
    assert_contract(compiled, tmp_path / "model.onnx", batches)
    compiled.prepared.eval()
    for state in (fxq.State.FLOAT, fxq.State.CALIBRATE):
        fxq.set_state(compiled.prepared, state)
        torch.testing.assert_close(compiled.prepared(*batches[0]), model(*batches[0]), rtol=1e-5, atol=1e-5)


# ---- exact meanings -------------------------------------------------------------------------------------------------


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Case], str, str]] = {
    "batch product": (lambda: Case((4, 8), lambda s, x: x.t() @ x), "matmul", "it sums over the batch"),
    "batch sum": (lambda: Case((4, 8), lambda s, x: x.sum()), "sum_1", "it sums over the batch"),
    "batch amax": (lambda: Case((4, 8), lambda s, x: x.amax(0)), "amax", "it reduces the batch"),
    "computed slope": (lambda: Case((4, 3), lambda s, x: F.prelu(x, s.w * x.std()), w=weights(3)), "prelu", "its weight is computed"),
    "batch statistics": (
        lambda: Case((4, 3), lambda s, x: s.norm(x), norm=nn.BatchNorm1d(3, track_running_stats=False)),
        "norm",
        "it has no running statistics",
    ),
    "computed weight": (
        lambda: Case((4, 8), lambda s, x: F.conv_transpose1d(x[..., None], s.w * x.std()), w=weights(8, 5, 1)),
        "conv_transpose1d",
        "its weight is computed",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, node, because = REFUSED[name]
    model, batches = built(make)
    compiled = contract.compiled(model, batches)
    assert because in reason(compiled.prepared, node)
    assert fxq.verify(compiled.prepared, compiled.integer, batches)
    fxq.set_state(compiled.prepared, fxq.State.FLOAT)
    # Float in both, with batch norms and constants multiplied in another order: hence a tolerance.
    torch.testing.assert_close(compiled.prepared(*batches[0]), model(*batches[0]), rtol=1e-5, atol=1e-5)


def test_the_transpose_of_a_weight_is_not_left_behind() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w.t()

    prepared = fxq.prepare(Product(), (torch.randn(4, 8),))
    assert "none is left in float" in fxq.explain(prepared)
