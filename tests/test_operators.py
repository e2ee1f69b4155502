"""Every spelling of every operator of the table: the float function within a stated bound, and the contract E1 to E3 by bits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.graph import qparams
from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS
from tests import contract
from tests.contract import all_equal, compiled, graph_values

Forward = Callable[..., Any]

IMAGE, LINE, VOLUME, ROW = (3, 6, 6), (3, 9), (3, 4, 5, 6), (8,)

# Bounds, in steps of the output's scale, on the distance between the integer model and the float function of inputs that lie
# on the input's grid. Half a step is the last rounding.
EXACT = 0.0  # values are moved or chosen, never computed
BOUND = 0.501  # limits are rounded to the grid; values are exact
ROUNDED = 0.52  # the requantization multiplier has 15 bits, and the accumulator 16 when it is multiplied
ALIGNED = 0.54  # operands are brought to a common scale first
FOLDED = 3.0  # the batch norm moves the weights off the grid they were on


class Sample(NamedTuple):
    """A small model around one spelling: `forward(model, *inputs)`, with a `layer` or a `weight` and `bias` on their grid."""

    operator: str
    bound: float
    shapes: tuple[tuple[int, ...], ...]
    forward: Forward
    layer: nn.Module | None = None
    weight: tuple[int, ...] | None = None


class Model(nn.Module):
    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample.forward
        self.layer = sample.layer
        if sample.weight is not None:
            self.weight, self.bias = nn.Parameter(torch.empty(sample.weight)), nn.Parameter(torch.empty(sample.weight[0]))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                put_on_grid(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.sample(self, x) if y is None else self.sample(self, x, y)


@torch.no_grad()
def put_on_grid(weight: Tensor) -> None:
    """Multiples of 1/128 of which each channel's largest is 127/128: quantizing the weight changes nothing."""
    weight.copy_(torch.randint(-127, 128, weight.shape) / 128)
    weight.flatten(1)[:, 0] = 127 / 128


class Folded(nn.Module):
    """A layer with a batch norm behind it whose statistics are not trivial."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def functional_norm(m: Any, x: Tensor) -> Tensor:
    norm = m.layer.norm
    return F.batch_norm(m.layer.layer(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps)


def call(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


def iadd(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x += y
    return x


def unary(name: str, bound: float, *forwards: Forward, shape: tuple[int, ...] = IMAGE) -> list[Sample]:
    return [Sample(name, bound, (shape,), forward) for forward in forwards]


def binary(name: str, bound: float, *forwards: Forward) -> list[Sample]:
    return [Sample(name, bound, (IMAGE, IMAGE), forward) for forward in forwards]


def layers(name: str, bound: float, shape: tuple[int, ...], *modules: nn.Module) -> list[Sample]:
    return [Sample(name, bound, (shape,), call, module) for module in modules]


def weighted(name: str, shape: tuple[int, ...], weight: tuple[int, ...], *forwards: Forward) -> list[Sample]:
    return [Sample(name, ROUNDED, (shape,), forward, weight=weight) for forward in forwards]


SAMPLES: dict[Any, list[Sample]] = {
    # ---- layers with weights
    F.conv1d: weighted("conv1d", LINE, (4, 3, 3), lambda m, x: F.conv1d(x, m.weight, m.bias, 2, 1)),
    F.conv2d: weighted(
        "conv2d", IMAGE, (6, 1, 3, 3),
        lambda m, x: F.conv2d(x, m.weight, m.bias, groups=3, padding=1),
        lambda m, x: F.conv2d(x, m.weight, m.bias, groups=3, dilation=2, stride=(1, 2)),
    ),
    F.conv3d: weighted("conv3d", VOLUME, (2, 3, 2, 3, 3), lambda m, x: F.conv3d(x, weight=m.weight, bias=m.bias, padding=(0, 1, 1))),
    F.linear: weighted("linear", ROW, (5, 8), lambda m, x: F.linear(x, m.weight, m.bias)),
    nn.Conv1d: layers("conv1d", ROUNDED, LINE, nn.Conv1d(3, 4, 3, padding="same")),
    nn.Conv2d: layers(
        "conv2d", ROUNDED, IMAGE,
        nn.Conv2d(3, 5, (3, 1), stride=(2, 1), padding=(1, 0)), nn.Conv2d(3, 6, 3, groups=3, bias=False),
        nn.Conv2d(3, 2, 3, dilation=2, padding="same"), nn.Conv2d(3, 1, 1, padding="valid"),
    ),
    nn.Conv3d: layers("conv3d", ROUNDED, VOLUME, nn.Conv3d(3, 2, 2)),
    nn.Linear: [*layers("linear", ROUNDED, ROW, nn.Linear(8, 3)), *layers("linear", ROUNDED, (3, 5, 8), nn.Linear(8, 4, bias=False))],
    # ---- batch norms, which are folded into the layer before them
    F.batch_norm: [Sample("conv2d", FOLDED, (IMAGE,), functional_norm, Folded(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))],
    nn.BatchNorm1d: [
        *layers("linear", FOLDED, ROW, Folded(nn.Linear(8, 4), nn.BatchNorm1d(4))),
        *layers("conv1d", FOLDED, LINE, Folded(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))),
    ],
    nn.BatchNorm2d: layers("conv2d", FOLDED, IMAGE, Folded(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))),
    nn.BatchNorm3d: layers("conv3d", FOLDED, VOLUME, Folded(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4))),
    nn.SyncBatchNorm: layers("conv2d", FOLDED, IMAGE, Folded(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))),
    # ---- addition
    torch.add: binary("add", ALIGNED, lambda m, x, y: torch.add(x, y), lambda m, x, y: torch.add(x, other=y).relu()),
    operator.add: binary("add", ALIGNED, lambda m, x, y: x + y, lambda m, x, y: operator.add(y, x)),
    operator.iadd: binary("add", ALIGNED, iadd, lambda m, x, y: operator.iadd(x.clone(), y)),
    "add": binary("add", ALIGNED, lambda m, x, y: x.add(y)),
    "add_": binary("add", ALIGNED, lambda m, x, y: x.clone().add_(y)),
    "__add__": binary("add", ALIGNED, lambda m, x, y: x.__add__(y)),
    "__radd__": binary("add", ALIGNED, lambda m, x, y: x.__radd__(y)),
    "__iadd__": binary("add", ALIGNED, lambda m, x, y: x.clone().__iadd__(y)),
    # ---- clamps
    torch.clamp: unary("clamp", BOUND, lambda m, x: torch.clamp(x, -0.5, 0.7), lambda m, x: torch.clamp(x, max=0.3)),
    torch.clip: unary("clamp", BOUND, lambda m, x: torch.clip(x, min=-1)),
    torch.relu: unary("clamp", EXACT, lambda m, x: torch.relu(x)),
    torch.relu_: unary("clamp", EXACT, lambda m, x: torch.relu_(x.clone())),
    F.relu: unary("clamp", EXACT, lambda m, x: F.relu(x), lambda m, x: F.relu(x.clone(), inplace=True)),
    F.relu_: unary("clamp", EXACT, lambda m, x: F.relu_(x.clone())),
    F.relu6: unary("clamp", BOUND, lambda m, x: F.relu6(x)),
    F.hardtanh: unary("clamp", BOUND, lambda m, x: F.hardtanh(x), lambda m, x: F.hardtanh(x, -2, 0.25)),
    F.hardtanh_: unary("clamp", BOUND, lambda m, x: F.hardtanh_(x.clone())),
    "relu": unary("clamp", EXACT, lambda m, x: x.relu()),
    "relu_": unary("clamp", EXACT, lambda m, x: x.clone().relu_()),
    "clamp": unary("clamp", BOUND, lambda m, x: x.clamp(min=0.1)),
    "clamp_": unary("clamp", BOUND, lambda m, x: x.clone().clamp_(-1, 1)),
    "clip": unary("clamp", BOUND, lambda m, x: x.clip(-0.3, 0.9)),
    "clip_": unary("clamp", BOUND, lambda m, x: x.clone().clip_(max=0.9)),
    nn.ReLU: layers("clamp", EXACT, IMAGE, nn.ReLU(), nn.ReLU(inplace=True)),
    nn.ReLU6: layers("clamp", BOUND, IMAGE, nn.ReLU6()),
    nn.Hardtanh: layers("clamp", BOUND, IMAGE, nn.Hardtanh(-0.5, 1.5)),
    # ---- tables
    torch.sigmoid: unary("sigmoid", BOUND, lambda m, x: torch.sigmoid(x)),
    F.sigmoid: unary("sigmoid", BOUND, lambda m, x: F.sigmoid(x)),
    "sigmoid": unary("sigmoid", BOUND, lambda m, x: x.sigmoid()),
    "sigmoid_": unary("sigmoid", BOUND, lambda m, x: x.clone().sigmoid_()),
    nn.Sigmoid: layers("sigmoid", BOUND, IMAGE, nn.Sigmoid()),
    # ---- pools
    F.max_pool1d: unary("max_pool1d", EXACT, lambda m, x: F.max_pool1d(x, 3, 2, 1), shape=LINE),
    F.max_pool2d: unary(
        "max_pool2d", EXACT, lambda m, x: F.max_pool2d(x, (3, 2), ceil_mode=True), lambda m, x: F.max_pool2d(x, 2, 1, dilation=2)
    ),
    F.max_pool3d: unary("max_pool3d", EXACT, lambda m, x: F.max_pool3d(x, 2, padding=1), shape=VOLUME),
    torch.max_pool1d: unary("max_pool1d", EXACT, lambda m, x: torch.max_pool1d(x, 2), shape=LINE),
    torch.max_pool2d: unary("max_pool2d", EXACT, lambda m, x: torch.max_pool2d(x, 2)),
    torch.max_pool3d: unary("max_pool3d", EXACT, lambda m, x: torch.max_pool3d(x, 2), shape=VOLUME),
    nn.MaxPool1d: layers("max_pool1d", EXACT, LINE, nn.MaxPool1d(4, 3, ceil_mode=True)),
    nn.MaxPool2d: layers("max_pool2d", EXACT, IMAGE, nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((1, 3))),
    nn.MaxPool3d: layers("max_pool3d", EXACT, VOLUME, nn.MaxPool3d(3, 2, 1)),
    F.avg_pool1d: unary("avg_pool1d", ROUNDED, lambda m, x: F.avg_pool1d(x, 3, 2, 1), shape=LINE),
    F.avg_pool2d: unary(
        "avg_pool2d", ROUNDED,
        lambda m, x: F.avg_pool2d(x, 3, 2, 1), lambda m, x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda m, x: F.avg_pool2d(x, (2, 4), stride=(1, 3), ceil_mode=True), lambda m, x: F.avg_pool2d(x, 2, divisor_override=3).relu(),
    ),
    F.avg_pool3d: unary("avg_pool3d", ROUNDED, lambda m, x: F.avg_pool3d(x, (2, 2, 3)), shape=VOLUME),
    nn.AvgPool1d: layers("avg_pool1d", ROUNDED, LINE, nn.AvgPool1d(3)),
    nn.AvgPool2d: layers(
        "avg_pool2d", ROUNDED, IMAGE, nn.AvgPool2d(2), nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False)
    ),
    nn.AvgPool3d: layers("avg_pool3d", ROUNDED, VOLUME, nn.AvgPool3d(2, padding=1)),
    F.adaptive_avg_pool1d: unary("adaptive_avg_pool1d", ROUNDED, lambda m, x: F.adaptive_avg_pool1d(x, 3), shape=LINE),
    F.adaptive_avg_pool2d: unary(
        "adaptive_avg_pool2d", ROUNDED, lambda m, x: F.adaptive_avg_pool2d(x, (1, 1)), lambda m, x: F.adaptive_avg_pool2d(x, (3, None))
    ),
    F.adaptive_avg_pool3d: unary("adaptive_avg_pool3d", ROUNDED, lambda m, x: F.adaptive_avg_pool3d(x, (2, 1, 3)), shape=VOLUME),
    nn.AdaptiveAvgPool1d: layers("adaptive_avg_pool1d", ROUNDED, LINE, nn.AdaptiveAvgPool1d(1)),
    nn.AdaptiveAvgPool2d: layers("adaptive_avg_pool2d", ROUNDED, IMAGE, nn.AdaptiveAvgPool2d((2, 3))),
    nn.AdaptiveAvgPool3d: layers("adaptive_avg_pool3d", ROUNDED, VOLUME, nn.AdaptiveAvgPool3d(1)),
    torch.mean: unary("mean", ROUNDED, lambda m, x: torch.mean(x, (2, 3)), lambda m, x: torch.mean(x, dim=-1, keepdim=True).relu()),
    "mean": unary("mean", ROUNDED, lambda m, x: x.mean((-1, -2), keepdim=True), lambda m, x: x.mean(1)),
    # ---- shapes
    torch.reshape: unary("reshape", EXACT, lambda m, x: torch.reshape(x, (-1, 6, 18))),
    torch.flatten: unary("reshape", EXACT, lambda m, x: torch.flatten(x, 1), lambda m, x: torch.flatten(x, start_dim=2, end_dim=3)),
    torch.squeeze: unary("reshape", EXACT, lambda m, x: torch.squeeze(x.reshape(-1, 1, 108), 1)),
    torch.unsqueeze: unary("reshape", EXACT, lambda m, x: torch.unsqueeze(x, 2)),
    "reshape": unary("reshape", EXACT, lambda m, x: x.reshape(x.shape[0], -1), lambda m, x: x.reshape((x.size(0), 2, 54))),
    "view": unary("reshape", EXACT, lambda m, x: x.view(-1, 108), lambda m, x: x.view(x.size(0), 3, 36)),
    "flatten": unary("reshape", EXACT, lambda m, x: x.flatten(1, 2)),
    "squeeze": unary("reshape", EXACT, lambda m, x: x.view(-1, 108, 1).squeeze(-1)),
    "unsqueeze": unary("reshape", EXACT, lambda m, x: x.unsqueeze(-1)),
    "view_as": [Sample("reshape", EXACT, (IMAGE, (6, 18)), lambda m, x, y: x.view_as(y))],
    "reshape_as": [Sample("reshape", EXACT, (IMAGE, (6, 18)), lambda m, x, y: x.reshape_as(y))],
    nn.Flatten: layers("reshape", EXACT, IMAGE, nn.Flatten(), nn.Flatten(2)),
    # ---- nothing at all
    torch.clone: unary("identity", EXACT, lambda m, x: torch.clone(x).relu()),
    "contiguous": unary("identity", EXACT, lambda m, x: x.contiguous().relu()),
    "clone": unary("identity", EXACT, lambda m, x: x.clone().relu()),
    "detach": unary("identity", EXACT, lambda m, x: x.detach().relu()),
    nn.Identity: layers("identity", EXACT, IMAGE, nn.Sequential(nn.Identity(), nn.ReLU())),
    F.dropout: unary("dropout", EXACT, lambda m, x: F.dropout(x, 0.3, m.training).relu()),
    torch.dropout: unary("dropout", EXACT, lambda m, x: torch.dropout(x, 0.3, m.training).relu()),
    nn.Dropout: layers("dropout", EXACT, IMAGE, nn.Sequential(nn.Dropout(0.3), nn.ReLU())),
    # ---- concatenation
    torch.cat: binary("cat", ROUNDED, lambda m, x, y: torch.cat([x, y], 1), lambda m, x, y: torch.cat((y, x, y), dim=-1)),
    torch.concat: binary("cat", ROUNDED, lambda m, x, y: torch.concat([x, y], dim=2)),
    torch.concatenate: binary("cat", ROUNDED, lambda m, x, y: torch.concatenate((x, y), 1)),
}  # fmt: skip


def name_of(spelling: Any) -> str:
    if isinstance(spelling, str):
        return f".{spelling}"
    home = "nn" if isinstance(spelling, type) else "F" if getattr(F, spelling.__name__, None) is spelling else spelling.__module__
    return f"{home}.{spelling.__name__}"


ROWS = [
    pytest.param(sample, target, id=f"{name_of(spelling)}-{index}-{target}")
    for spelling, samples in SAMPLES.items()
    for index, sample in enumerate(samples)
    for target in contract.TARGETS
]


def inputs_of(sample: Sample, count: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Of different ranges, so that no two inputs share a scale by accident."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, *shape, generator=generator) * (1 + 0.7 * index) for index, shape in enumerate(sample.shapes))


def model_of(sample: Sample) -> nn.Module:
    torch.manual_seed(0)
    return Model(sample).eval()


def scale_of(integer: fx.GraphModule, name: str) -> float:
    return qparams(next(node for node in integer.graph.nodes if node.name == name)).scale


# ---- the table is complete ----------------------------------------------------------------------------------------------


def test_every_registered_spelling_has_a_sample() -> None:
    ours = {function for function in FUNCTIONS if function.__module__.startswith("fxquant.")}  # the canonical functions
    assert (set(FUNCTIONS) - ours) | set(METHODS) | set(MODULES) == set(SAMPLES)


def test_every_operator_has_a_sample() -> None:
    sampled = {sample.operator for samples in SAMPLES.values() for sample in samples} | {"batch_norm", "quantize", "dequantize"}
    assert sampled == {record.name for record in OPERATORS.values()}


@pytest.mark.parametrize("spelling", SAMPLES, ids=name_of)
def test_a_spelling_becomes_its_operator_and_nothing_stays_in_float(spelling: Any) -> None:
    for sample in SAMPLES[spelling]:
        prepared = fxq.prepare(model_of(sample), inputs_of(sample, 4))
        assert "none is left in float" in fxq.explain(prepared), fxq.explain(prepared)
        assert sample.operator in {operator.operator.name for operator in contract.quantized_operators(prepared).values()}


# ---- meaning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sample", "target"), ROWS)
def test_a_spelling_means_the_float_function_and_holds_the_contract(sample: Sample, target: str, tmp_path: Path) -> None:
    model, inputs = model_of(sample), inputs_of(sample, 5)
    prepared, integer = compiled(model, [tuple(1.1 * x for x in inputs)], target)  # so that nothing saturates
    contract.assert_alive(integer, *inputs)
    assert_float_function_within_bound(sample, model, prepared, integer, inputs)
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [inputs, inputs_of(sample, 1, seed=1)])
    contract.assert_train_is_validate(prepared, *inputs)
    if list(prepared.parameters()):
        contract.assert_gradients_reach_every_parameter(prepared, *inputs)


def assert_float_function_within_bound(
    sample: Sample, model: nn.Module, prepared: fx.GraphModule, integer: fx.GraphModule, inputs: tuple[Tensor, ...]
) -> None:
    """On inputs that lie on their grid, the integer model is as near to the float model as the row says."""
    placeholders = [node for node in integer.graph.nodes if node.op == "placeholder"]
    values, used = graph_values(integer, *inputs), {node.name: node for node in integer.graph.nodes}
    on_grid = [
        values[f"{p.name}_quantize"].float() * scale_of(integer, f"{p.name}_quantize") if f"{p.name}_quantize" in used else given
        for p, given in zip(placeholders, inputs, strict=True)
    ]
    with torch.no_grad():
        found, expected = integer(*on_grid), model(*on_grid)
    scale = fxq.qparams(prepared)[next(reversed(fxq.qparams(prepared)))]
    assert found.shape == expected.shape
    if sample.bound == EXACT:
        assert torch.equal(found, expected)
    else:
        assert float((found.double() - expected.double()).abs().max()) <= sample.bound * scale


# ---- what has no integer form stays in float, with its reason -----------------------------------------------------------


class Own(nn.Module):
    def __init__(self, forward: Forward, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = forward, layer
        self.constant = nn.Parameter(torch.randn(3, 6, 6))
        self.kernel = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.kernel(x))


REFUSED: dict[str, tuple[str, Forward, nn.Module | None]] = {
    "add with alpha": ("add with alpha other than 1", lambda m, x: torch.add(x, x, alpha=2), None),
    "add a number": ("its argument 'other' is a number", lambda m, x: x + 1.5, None),
    "add a parameter": ("its argument 'other' is a parameter or constant", lambda m, x: x + m.constant, None),
    "clamp by tensors": ("its bound 'min' is a tensor", lambda m, x: torch.clamp(x, m.constant), None),
    "reflected padding": ("padding_mode='reflect'", call, nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect")),
    "even kernel, same size": ("padding='same' with an even kernel", call, nn.Conv2d(3, 2, 2, padding="same")),
    "functional same padding": ("padding='same'", lambda m, x: F.conv2d(x, m.kernel.weight, padding="same"), None),
    "computed weight": ("its weight is computed by", lambda m, x: F.conv2d(x, m.kernel.weight * 2), None),
    "uneven windows": ("its windows differ in size", call, nn.AdaptiveAvgPool2d(4)),
    "mean over the batch": ("it averages over the batch", lambda m, x: x.mean(0), None),
    "mean of everything": ("it averages over the batch", lambda m, x: x.mean().reshape(1), None),
    "mean to a dtype": ("a dtype argument", lambda m, x: x.mean(1, dtype=torch.float64), None),
    "indices of a pool": ("return_indices=True", lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], None),
    "norm alone": ("it follows no convolution", lambda m, x: m.layer(x.relu()), nn.BatchNorm2d(3)),
    "norm without statistics": ("it has no running statistics", call, nn.BatchNorm2d(3, track_running_stats=False)),
    "bytes as another dtype": ("it reinterprets the bytes", lambda m, x: x.view(torch.int32).float(), None),
    "constant in a concatenation": (
        "one of its operands is a parameter or constant", lambda m, x: torch.cat([x.flatten(0, 1), m.constant]), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_in_float_and_says_why(name: str) -> None:
    reason, forward, layer = REFUSED[name]
    images = torch.randn(4, 3, 6, 6)
    prepared, integer = compiled(Own(forward, layer).eval(), [images])
    lines = [line for line in fxq.explain(prepared).splitlines() if re.search(r"^%\w+ +float ", line)]
    assert any(reason in line for line in lines), fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, images)
    assert all_equal(integer(images), prepared(images))
