"""Every spelling of every operator of the table: the float function within a stated bound, and the contract E1 to E3 by bits."""

from __future__ import annotations

import itertools
import math
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir import graph
from fxquant.ir.graph import annotation, resolve
from fxquant.ir.integer import qparams
from fxquant.ir.parts import part as part_of
from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS, Same
from fxquant.ops.core.samples import ALIGNED, NORMED
from fxquant.ops.elementwise.table import UNARY
from fxquant.ops.layers.deformable import deform_conv2d
from fxquant.ops.sampling.grid import warp
from fxquant.quantization.observers import MinMaxObserver
from tests.contract.test_integer_inputs import OF_REAL_NUMBERS, OF_WHOLE_NUMBERS
from tests.ops.test_tables_and_selection import ALSO, CASES
from tests.shared import contract, declared
from tests.shared.contract import all_equal, compiled, graph_values

Forward = Callable[..., Any]

IMAGE, LINE, VOLUME, ROW, MATRIX = (3, 6, 6), (3, 9), (3, 4, 5, 6), (8,), (6, 6)
SEQUENCE = (2, 4)
POSITIVE = (0.3, 3.0)
FORMATS = (
    ("bayes-e", "int8", "int8"),
    ("nash-e", "int8", "int8"),
    ("bayes-e", "int16", "int8"),
    ("nash-e", "int16", "int16"),
    ("x86", "uint8", "int8"),
)


def covering(activation: str = "int8", weight: str = "int8") -> fxq.QConfig:
    """A configuration with which no value of the batches is cut off."""
    return fxq.QConfig(fxq.ActivationConfig(activation, observer=MinMaxObserver), fxq.WeightConfig(weight))


def kept_integer(config: fxq.QConfig) -> fxq.QConfigMapping:
    """The configuration, by rules that name what copies several tensors: it would be in float where it only leaves the model."""
    mapping = fxq.QConfigMapping(default=config)
    for record in OPERATORS.values():
        if record.name in ("cat", "stack", "where", "setitem", "scatter", "index_put", "put_lists", "write", "to_real", "pad"):
            for spelling in (record.function, *record.functions, *record.methods, *record.modules):
                mapping = mapping.set_object_type(spelling, config)
    return mapping


# Bounds, in steps of the output's scale, on the distance between the integer model and the float function of inputs that lie
# on the input's grid. Half a step is the last rounding.
EXACT = 0.0  # values are moved or chosen, never computed
BOUND = 0.501  # limits are rounded to the grid; values are exact
ROUNDED = 0.52  # the requantization multiplier has 15 bits, and the accumulator 16 when it is multiplied
INTERPOLATED = 1.5  # with 8 fraction bits, two rounded weights along each dimension
COMPOSED = 0.6  # a last rounding of what was computed in 16 bits
ATTENDED = 1.6  # shares are rounded to the output's dtype before they are summed
HEADS = 4.0  # the same, of what is projected, and then projected again
WIDE_INSIDE = (COMPOSED, NORMED, ATTENDED, HEADS)
SAMPLED = 4.0  # positions are rounded to a part of a pixel, and neighbours may differ by the whole range
RECURRENT = 6.0  # the state of a step, rounded, is an operand of the next one
FOLDED = 3.0  # the batch norm moves the weights off the grid they were on
FINE = 1.5  # more for int16, whose step is 2^-15 of the range, as are the rounding of slopes and of weights, and float32's own
SAMPLED_FINE = 600.0  # the same in steps of int16
COMPOSED_FINE = 20.0  # and for a composite in int16, each of whose parts is rounded to 16 bits, one of them headroom
HALF_STEP = 0.5
SLOPED = 3.5  # the chip rounds a slope to 7 bits and what it multiplies to the operand's grid, whose step is 3.5 of the clamped result's
CHIP_FINE = 7  # times these on bayes-e: each requantization by 16 and 15 bits loses two more steps (CHIP.md, section 18)


def own_kernels(convolution: Callable[..., Tensor], x: Tensor, kernels: Tensor) -> Tensor:
    """Each item of the batch with kernels of its own: all items are the channels of one."""
    joined = convolution(x.reshape(1, -1, *x.shape[2:]), kernels.flatten(0, 1), padding=1, dilation=2, groups=x.shape[0])
    return joined.view(x.shape[0], kernels.shape[1], *joined.shape[2:])


class Sample(NamedTuple):
    """A small model around one spelling: `forward(model, *inputs)`, with a `layer` or a `weight` and `bias` on their grid.

    The inputs are normal, or uniform over `domain`.
    """

    operator: str
    bound: float
    shapes: tuple[tuple[int, ...], ...]
    forward: Forward
    layer: nn.Module | None = None
    weight: tuple[int, ...] | None = None
    domain: tuple[float, float] | None = None


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

    def forward(self, *inputs: Tensor) -> Any:
        return self.sample(self, *inputs)


@torch.no_grad()
def put_on_grid(weight: Tensor) -> None:
    """Multiples of 1/128 of which the largest of each channel, of either dimension, is 127/128: quantizing changes nothing."""
    weight.copy_(torch.randint(-127, 128, weight.shape) / 128)
    weight.flatten(1)[:, 0] = 127 / 128
    weight[0].reshape(weight.shape[1], -1)[:, 0] = 127 / 128


class Holder(nn.Module):
    """A parameter: on its grid if it has two dimensions or more."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(shape))


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


class Normalized(nn.Module):
    """A layer norm whose weight and bias are not trivial."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm
        for name, parameter in norm.named_parameters():
            nn.init.uniform_(parameter, *((0.5, 1.5) if name == "weight" else (-0.5, 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Unpooled(nn.Module):
    """A maximum pooling and its inverse."""

    def __init__(self, pool: nn.Module, unpool: nn.Module) -> None:
        super().__init__()
        self.pool, self.unpool = pool, unpool

    def forward(self, x: Tensor) -> Tensor:
        values, indices = self.pool(x)
        return self.unpool(values, indices, output_size=x.shape)


def unpooled3d(x: Tensor) -> Tensor:
    return F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2, output_size=x.shape)


def deformed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return deform_conv2d(x, y, m.weight, m.bias, padding=1)


def picked(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of planes at these positions."""
    return x.flatten(2).gather(2, indices.flatten(2)).view_as(indices)


class Picked(nn.Module):
    """One of the results of a layer, which are nested."""

    def __init__(self, layer: nn.Module, *path: int) -> None:
        super().__init__()
        self.layer, self.path = layer, path

    def forward(self, x: Tensor) -> Any:
        found = self.layer(x)
        for index in self.path:
            found = found[index]
        return found


class Functional(nn.Module):
    """A recurrent layer by PyTorch's function, from a state of zeros."""

    def __init__(self, layer: nn.RNNBase, function: Forward) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(1, x.shape[0], self.layer.hidden_size)
        given = (state, state) if isinstance(self.layer, nn.LSTM) else state
        return self.function(x, given, list(self.layer.parameters()), True, 1, 0.0, False, False, True)[0]


def functional_cell(function: Forward) -> Forward:
    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        parameters = m.layer.weight_ih, m.layer.weight_hh, m.layer.bias_ih, m.layer.bias_hh
        return function(x, (y, y), *parameters)[0] if function is torch.lstm_cell else function(x, y, *parameters)

    return forward


def functional_norm(m: Any, x: Tensor) -> Tensor:
    norm = m.layer.norm
    return F.batch_norm(m.layer.layer(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps)


def lone_norm(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.layer.running_mean, m.layer.running_var, m.layer.weight, m.layer.bias)


def function_norm(m: Any, x: Tensor) -> Tensor:
    norm = m.layer
    return torch.batch_norm(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, False, 0.1, norm.eps, True)


def affine_instances(m: Any, x: Tensor) -> Tensor:
    weight, bias = m.layer.value[0], m.layer.value[1]
    return torch.instance_norm(x, weight, bias, None, None, True, 0.1, 1e-5, True)


def both_results(m: Any, x: Tensor, y: Tensor) -> Tensor:
    result, weights = m.layer(x, y, y, average_attn_weights=False)
    return result + weights[:, 0]


def heads_function(m: Any, x: Tensor) -> Any:
    turned, weight = x.transpose(0, 1), torch.cat([m.layer.value] * 3)
    arguments = (turned, turned[:3], turned[:3], 6, 3, weight, None, None, None, False, 0.0, m.layer.value, None)
    return F.multi_head_attention_forward(*arguments, training=False, attn_mask=torch.tensor([[False, True, False]] * 6))[0]


def call(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


def unary(name: str, bound: float, *forwards: Forward, shape: tuple[int, ...] = IMAGE) -> list[Sample]:
    return [Sample(name, bound, (shape,), forward) for forward in forwards]


def positive(name: str, *forwards: Forward) -> list[Sample]:
    return [Sample(name, BOUND, (IMAGE,), forward, domain=POSITIVE) for forward in forwards]


def held(name: str, bound: float, value: tuple[int, ...], *forwards: Forward, shape: tuple[int, ...] = IMAGE) -> list[Sample]:
    return [Sample(name, bound, (shape,), forward, Holder(*value)) for forward in forwards]


def binary(name: str, bound: float, *forwards: Forward, shape: tuple[int, ...] = IMAGE) -> list[Sample]:
    return [Sample(name, bound, (shape, shape), forward) for forward in forwards]


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
    F.conv_transpose1d: weighted("conv_transpose1d", LINE, (3, 3, 3), lambda m, x: F.conv_transpose1d(x, m.weight, m.bias, 2).relu()),
    F.conv_transpose2d: weighted(
        "conv_transpose2d", IMAGE, (3, 1, 2, 2), lambda m, x: F.conv_transpose2d(x, m.weight, m.bias, stride=2, groups=3)
    ),
    F.conv_transpose3d: weighted("conv_transpose3d", VOLUME, (3, 3, 2, 2, 2), lambda m, x: F.conv_transpose3d(x, m.weight, m.bias, 2)),
    nn.ConvTranspose1d: layers("conv_transpose1d", ROUNDED, LINE, nn.ConvTranspose1d(3, 2, 3, 2, 1, 1)),
    nn.ConvTranspose2d: layers(
        "conv_transpose2d", ROUNDED, IMAGE, nn.ConvTranspose2d(3, 2, 4, 2, 1), nn.ConvTranspose2d(3, 2, (2, 3), dilation=2, bias=False)
    ),
    nn.ConvTranspose3d: layers("conv_transpose3d", ROUNDED, VOLUME, nn.ConvTranspose3d(3, 2, 2)),
    torch.matmul: [
        *binary("matmul", ROUNDED, lambda m, x, y: torch.matmul(x, y), shape=MATRIX),
        *binary("computed_linear", ROUNDED, lambda m, x, y: F.linear(x, y[0, 0, :5])),
        *binary("computed_conv1d", ROUNDED, lambda m, x, y: own_kernels(F.conv1d, x.flatten(2), y[:, :2, :3, :2])),
        *binary("computed_conv2d", ROUNDED, lambda m, x, y: own_kernels(F.conv2d, x, y.unflatten(1, (1, 3))[..., :3, :2])),
        *held("matmul", ROUNDED, (6, 4), lambda m, x: torch.matmul(x, m.layer.value)),
        *held("matmul", ROUNDED, (4, 6), lambda m, x: torch.matmul(m.layer.value, x)),
    ],
    operator.matmul: binary("matmul", ROUNDED, lambda m, x, y: x @ y.mT, shape=MATRIX),
    torch.bmm: binary("matmul", ROUNDED, lambda m, x, y: torch.bmm(x, y).relu(), shape=MATRIX),
    torch.mm: held("matmul", ROUNDED, (8, 3), lambda m, x: torch.mm(x, m.layer.value), shape=ROW),
    torch.addmm: weighted("matmul", ROW, (8, 8), lambda m, x: torch.addmm(m.bias, x, m.weight)),
    "matmul": binary("matmul", ROUNDED, lambda m, x, y: x.matmul(y), shape=MATRIX),
    "__matmul__": binary("matmul", ROUNDED, lambda m, x, y: x.__matmul__(y), shape=MATRIX),
    "bmm": binary("matmul", ROUNDED, lambda m, x, y: x.bmm(y), shape=MATRIX),
    "mm": held("matmul", ROUNDED, (8, 3), lambda m, x: x.mm(m.layer.value), shape=ROW),
    "addmm": weighted("matmul", ROW, (8, 8), lambda m, x: m.bias.addmm(x, m.weight).relu()),
    # ---- contractions
    torch.einsum: [
        *binary("einsum", ROUNDED, lambda m, x, y: torch.einsum("bij,bkj->bik", x, y), shape=MATRIX),
        *binary("einsum", ROUNDED, lambda m, x, y: torch.einsum("... i j, ... k j -> ... i k", x[:, 0], y[:, 0]), shape=IMAGE),
        *held("einsum", ROUNDED, (6, 4), lambda m, x: torch.einsum("bijk,kh->bhij", x, m.layer.value)),
        *binary("einsum", ROUNDED, lambda m, x, y: torch.einsum("bij,bij->bj", [x, y]), shape=MATRIX),
    ],
    torch.mv: held("einsum", ROUNDED, (3, 8), lambda m, x: torch.mv(x, m.layer.value[1]), shape=ROW),
    "mv": held("einsum", ROUNDED, (3, 8), lambda m, x: x.mv(m.layer.value[1]), shape=ROW),
    torch.dot: held("einsum", NORMED, (3, 8), lambda m, x: torch.dot(x[0], m.layer.value[1]) + x[:, 0], shape=ROW),
    torch.vdot: held("einsum", NORMED, (3, 8), lambda m, x: torch.vdot(x[0], m.layer.value[1]) + x[:, 0], shape=ROW),
    "dot": held("einsum", NORMED, (3, 8), lambda m, x: x[0].dot(m.layer.value[1]) + x[:, 0], shape=ROW),
    "vdot": held("einsum", NORMED, (3, 8), lambda m, x: x[0].vdot(m.layer.value[1]) + x[:, 0], shape=ROW),
    torch.outer: held("einsum", ROUNDED, (3, 8), lambda m, x: torch.outer(x[:, 0], m.layer.value[1]), shape=ROW),
    torch.ger: unary("einsum", ROUNDED, lambda m, x: torch.ger(x[:, 0], x[0]), shape=ROW),
    "outer": unary("einsum", ROUNDED, lambda m, x: x[:, 0].outer(x[0]), shape=ROW),
    "ger": unary("einsum", ROUNDED, lambda m, x: x[:, 0].ger(x[0]), shape=ROW),
    torch.inner: held("einsum", ROUNDED, (3, 8), lambda m, x: torch.inner(x, m.layer.value), shape=ROW),
    "inner": held("einsum", ROUNDED, (3, 8), lambda m, x: x.inner(m.layer.value), shape=ROW),
    torch.chain_matmul: held("einsum", ROUNDED, (8, 3), lambda m, x: torch.chain_matmul(x, m.layer.value), shape=ROW),
    torch.linalg.multi_dot: held("einsum", ROUNDED, (8, 3), lambda m, x: torch.linalg.multi_dot([x, m.layer.value]), shape=ROW),
    torch.tensordot: held(
        "einsum", ROUNDED, (6, 6), lambda m, x: torch.tensordot(x, m.layer.value, 1),
        lambda m, x: torch.tensordot(x, m.layer.value, ([2], [1])),
    ),
    torch.linalg.vecdot: binary("einsum", ROUNDED, lambda m, x, y: torch.linalg.vecdot(x, y, dim=1)),
    torch.addmv: held("added_product", HEADS, (3, 8), lambda m, x: torch.addmv(x[:, 0], x, m.layer.value[1], alpha=0.5), shape=ROW),
    "addmv": held("added_product", HEADS, (3, 8), lambda m, x: x[:, 0].addmv(x, m.layer.value[1], beta=0.5), shape=ROW),
    torch.addr: held("added_product", HEADS, (3, 8), lambda m, x: torch.addr(x, x[:, 0], m.layer.value[1]), shape=ROW),
    "addr": held("added_product", HEADS, (3, 8), lambda m, x: x.addr(x[:, 0], vec2=m.layer.value[1]), shape=ROW),
    torch.baddbmm: binary("added_product", HEADS, lambda m, x, y: torch.baddbmm(x, x, y, beta=0.5, alpha=0.3), shape=MATRIX),
    "baddbmm": binary("added_product", HEADS, lambda m, x, y: x.baddbmm(y, x, beta=0), shape=MATRIX),
    torch.addbmm: held(
        "added_product", HEADS, (8, 8), lambda m, x: torch.addbmm(x, x[None], m.layer.value[None]), shape=ROW
    ),
    "addbmm": held("added_product", HEADS, (8, 8), lambda m, x: x.addbmm(x[None], m.layer.value[None], beta=2), shape=ROW),
    F.bilinear: held("bilinear", HEADS, (6, 6), lambda m, x: F.bilinear(x, x.flip(1), m.layer.value[None]), shape=MATRIX),
    torch.bilinear: held("bilinear", HEADS, (6, 6), lambda m, x: torch.bilinear(x, x.flip(1), m.layer.value[None], None), shape=MATRIX),
    nn.Bilinear: [Sample("bilinear", 100.0, (MATRIX, MATRIX), lambda m, x, y: m.layer(x, y), nn.Bilinear(6, 6, 2))],
    # ---- batch norms, which are folded into the layer before them, or stand alone
    F.batch_norm: [
        Sample("conv2d", FOLDED, (IMAGE,), functional_norm, Folded(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))),
        Sample("batch_norm", ROUNDED, (IMAGE,), lone_norm, nn.BatchNorm2d(3)),
    ],
    torch.batch_norm: [Sample("batch_norm", ROUNDED, (IMAGE,), function_norm, nn.BatchNorm2d(3))],
    nn.BatchNorm1d: [
        *layers("linear", FOLDED, ROW, Folded(nn.Linear(8, 4), nn.BatchNorm1d(4))),
        *layers("conv1d", FOLDED, LINE, Folded(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))),
        *layers("batch_norm", ROUNDED, ROW, Folded(nn.Identity(), nn.BatchNorm1d(8))),
    ],
    nn.BatchNorm2d: [
        *layers("conv2d", FOLDED, IMAGE, Folded(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))),
        *layers("batch_norm", ROUNDED, IMAGE, Folded(nn.ReLU(), nn.BatchNorm2d(3))),
    ],
    nn.BatchNorm3d: layers("conv3d", FOLDED, VOLUME, Folded(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4))),
    nn.SyncBatchNorm: layers("conv2d", FOLDED, IMAGE, Folded(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))),
    # ---- recurrent layers and cells
    nn.LSTM: [
        *layers("lstm", RECURRENT, SEQUENCE, Picked(nn.LSTM(4, 3, batch_first=True), 0)),
        *layers("lstm", RECURRENT, SEQUENCE, Picked(nn.LSTM(4, 3, 2, bidirectional=True, dropout=0.2, batch_first=True), 0)),
        *layers("lstm", RECURRENT, SEQUENCE, Picked(nn.LSTM(4, 3, proj_size=2, bias=False, batch_first=True), 1, 0)),
    ],
    nn.GRU: [
        *layers("gru", RECURRENT, SEQUENCE, Picked(nn.GRU(4, 3, batch_first=True), 0)),
        *layers("gru", RECURRENT, SEQUENCE, Picked(nn.GRU(4, 3, 2, bidirectional=True, bias=False, batch_first=True), 1)),
    ],
    nn.RNN: [
        *layers("rnn", RECURRENT, SEQUENCE, Picked(nn.RNN(4, 3, batch_first=True), 0)),
        *layers("rnn", RECURRENT, SEQUENCE, Picked(nn.RNN(4, 3, nonlinearity="relu", batch_first=True), 0)),
    ],
    nn.LSTMCell: [
        Sample("lstm_cell", RECURRENT, ((4,), (3,)), lambda m, x, y: m.layer(x, (y, y))[0], nn.LSTMCell(4, 3)),
        Sample("lstm_cell", RECURRENT, ((4,), (3,)), lambda m, x, y: m.layer(x, (y, y))[1], nn.LSTMCell(4, 3)),
    ],
    nn.GRUCell: [Sample("gru_cell", RECURRENT, ((4,), (3,)), lambda m, x, y: m.layer(x, y), nn.GRUCell(4, 3))],
    nn.RNNCell: [
        Sample("rnn_cell", RECURRENT, ((4,), (3,)), lambda m, x, y: m.layer(x, y), nn.RNNCell(4, 3)),
        Sample("rnn_cell", RECURRENT, ((4,), (3,)), lambda m, x, y: m.layer(x, y), nn.RNNCell(4, 3, nonlinearity="relu")),
    ],
    torch.lstm: layers("lstm", RECURRENT, SEQUENCE, Functional(nn.LSTM(4, 3, batch_first=True), torch.lstm)),
    torch.gru: layers("gru", RECURRENT, SEQUENCE, Functional(nn.GRU(4, 3, batch_first=True), torch.gru)),
    torch.rnn_tanh: layers("rnn", RECURRENT, SEQUENCE, Functional(nn.RNN(4, 3, batch_first=True), torch.rnn_tanh)),
    torch.rnn_relu: layers("rnn", RECURRENT, SEQUENCE, Functional(nn.RNN(4, 3, batch_first=True), torch.rnn_relu)),
    torch.lstm_cell: [Sample("lstm_cell", RECURRENT, ((4,), (3,)), functional_cell(torch.lstm_cell), nn.LSTMCell(4, 3))],
    torch.gru_cell: [Sample("gru_cell", RECURRENT, ((4,), (3,)), functional_cell(torch.gru_cell), nn.GRUCell(4, 3))],
    torch.rnn_tanh_cell: [Sample("rnn_cell", RECURRENT, ((4,), (3,)), functional_cell(torch.rnn_tanh_cell), nn.RNNCell(4, 3))],
    torch.rnn_relu_cell: [Sample("rnn_cell", RECURRENT, ((4,), (3,)), functional_cell(torch.rnn_relu_cell), nn.RNNCell(4, 3))],
    # ---- composites, 16 bits wide inside
    nn.LayerNorm: [
        *layers("layer_norm", NORMED, ROW, Normalized(nn.LayerNorm(8)), Normalized(nn.LayerNorm(8, bias=False))),
        *layers("layer_norm", NORMED, IMAGE, nn.LayerNorm((3, 6, 6)), nn.LayerNorm((6, 6), elementwise_affine=False)),
    ],
    F.group_norm: unary("group_norm", NORMED, lambda m, x: F.group_norm(x, 3, eps=0.1)),
    torch.group_norm: unary("group_norm", NORMED, lambda m, x: torch.group_norm(x, 1)),
    nn.GroupNorm: layers("group_norm", NORMED, IMAGE, Normalized(nn.GroupNorm(1, 3)), nn.GroupNorm(3, 3, affine=False)),
    F.instance_norm: unary("instance_norm", NORMED, lambda m, x: F.instance_norm(x)),
    torch.instance_norm: [
        *unary("instance_norm", NORMED, lambda m, x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, True)),
        *held("instance_norm", NORMED, (2, 3), affine_instances),
    ],
    nn.InstanceNorm1d: layers("instance_norm", NORMED, LINE, Normalized(nn.InstanceNorm1d(3, affine=True))),
    nn.InstanceNorm2d: layers("instance_norm", NORMED, IMAGE, nn.InstanceNorm2d(3), nn.InstanceNorm2d(3, track_running_stats=True)),
    nn.InstanceNorm3d: layers("instance_norm", NORMED, VOLUME, nn.InstanceNorm3d(3)),
    nn.RMSNorm: layers("rms_norm", NORMED, ROW, Normalized(nn.RMSNorm(8))),
    torch.norm: unary("norm", NORMED, lambda m, x: torch.norm(x, dim=1), lambda m, x: torch.norm(x, 1, (1, 2), True)),
    torch.linalg.norm: unary("norm", NORMED, lambda m, x: torch.linalg.norm(x, dim=(2, 3))),
    torch.linalg.vector_norm: unary("norm", NORMED, lambda m, x: torch.linalg.vector_norm(x, 3, (1, 2))),
    torch.linalg.matrix_norm: unary("norm", NORMED, lambda m, x: torch.linalg.matrix_norm(x)),
    "norm": unary("norm", NORMED, lambda m, x: x.norm(math.inf, 1)),
    "var": unary("var", NORMED, lambda m, x: x.var(1, False)),
    "std": unary("std", NORMED, lambda m, x: x.std((1, 2), keepdim=True)),
    torch.var_mean: unary("var_mean", NORMED, lambda m, x: sum(torch.var_mean(x, 1))),
    torch.std_mean: unary("std_mean", NORMED, lambda m, x: sum(torch.std_mean(x, (2, 3)))),
    # ---- attention
    F.scaled_dot_product_attention: [
        *binary("scaled_dot_product_attention", ATTENDED, lambda m, x, y: F.scaled_dot_product_attention(x, y, y), shape=MATRIX),
        *binary(
            "scaled_dot_product_attention", ATTENDED,
            lambda m, x, y: F.scaled_dot_product_attention(x, y, y, is_causal=True, scale=0.4),
            lambda m, x, y: F.scaled_dot_product_attention(x, y, y, torch.eye(6).bool().logical_not()),
            lambda m, x, y: F.scaled_dot_product_attention(x, y, y, torch.eye(6).cumsum(1) - 1e9 * torch.eye(6)),
            shape=MATRIX,
        ),
        *binary(
            "scaled_dot_product_attention", ATTENDED,
            lambda m, x, y: F.scaled_dot_product_attention(x, y[:, :1], y[:, :1], enable_gqa=True), shape=IMAGE,
        ),
    ],
    nn.MultiheadAttention: [
        Sample(
            "multi_head_attention", HEADS, (MATRIX,), lambda m, x: m.layer(x, x, x)[0], nn.MultiheadAttention(6, 2, batch_first=True)
        ),
        Sample(
            "multi_head_attention", HEADS, (MATRIX, MATRIX), both_results,
            nn.MultiheadAttention(6, 1, bias=False, batch_first=True),
        ),
    ],
    F.multi_head_attention_forward: held("multi_head_attention", HEADS, (6, 6), heads_function, shape=MATRIX),
    # ---- addition
    torch.add: [
        *binary("add", ALIGNED, lambda m, x, y: torch.add(x, other=y).relu(), lambda m, x, y: torch.add(x, y, alpha=-1.3)),
        *unary("add", ALIGNED, lambda m, x: torch.add(x, 0.8)),
        *held("add", ALIGNED, (3, 1, 1), lambda m, x: torch.add(x, m.layer.value)),
    ],
    operator.add: [
        *unary("add", ALIGNED, lambda m, x: 1.5 + x, lambda m, x: x + x),
        *held("add", ALIGNED, (6, 6), lambda m, x: m.layer.value + x),
    ],
    # ---- subtraction, multiplication, division
    torch.sub: [
        *binary("sub", ALIGNED, lambda m, x, y: torch.sub(x, y, alpha=0.4).relu()),
        *unary("sub", ALIGNED, lambda m, x: torch.sub(x, 0.8)),
        *held("sub", ALIGNED, (3, 1, 1), lambda m, x: torch.sub(x, m.layer.value)),
    ],
    torch.rsub: [
        *binary("sub", ALIGNED, lambda m, x, y: torch.rsub(x, y, alpha=0.4)),
        *unary("sub", ALIGNED, lambda m, x: torch.rsub(x, 0.8)),
    ],
    operator.sub: [
        *unary("sub", ALIGNED, lambda m, x: 1 - x),
        *held("sub", ALIGNED, (6, 6), lambda m, x: m.layer.value - x),
    ],
    torch.mul: [
        *binary("mul", ROUNDED, lambda m, x, y: torch.mul(x, other=y[:, :, :1]).relu()),
        *unary("mul", ROUNDED, lambda m, x: torch.mul(x, x)),
        *held("mul", ROUNDED, (3, 1, 1), lambda m, x: torch.mul(x, m.layer.value)),
    ],
    operator.mul: held("mul", ROUNDED, (3, 6, 6), lambda m, x: m.layer.value * x),
    torch.div: unary("div", ROUNDED, lambda m, x: torch.div(x, -0.7).relu()),
    operator.truediv: unary("div", ROUNDED, lambda m, x: x / 6),
    # ---- the larger and the smaller, and sums
    torch.maximum: held("maximum", ROUNDED, (3, 6, 6), lambda m, x: torch.maximum(x, m.layer.value)),
    torch.max: binary("maximum", ROUNDED, lambda m, x, y: torch.max(x, y)),
    "max": binary("maximum", ROUNDED, lambda m, x, y: x.max(y)),
    torch.min: binary("minimum", ROUNDED, lambda m, x, y: torch.min(x, other=y)),
    "min": binary("minimum", ROUNDED, lambda m, x, y: x.min(y)),
    # ---- clamps
    torch.clamp_min: unary("clamp", BOUND, lambda m, x: torch.clamp_min(x, -0.4)),
    torch.clamp_max: unary("clamp", BOUND, lambda m, x: torch.clamp_max(x, 0.4)),
    "clamp_min": unary("clamp", BOUND, lambda m, x: x.clamp_min(-0.4)),
    "clamp_min_": unary("clamp", BOUND, lambda m, x: x.clone().clamp_min_(-0.4)),
    "clamp_max": unary("clamp", BOUND, lambda m, x: x.clamp_max(0.4)),
    "clamp_max_": unary("clamp", BOUND, lambda m, x: x.clone().clamp_max_(0.4)),
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
    # ---- tables, besides their samples
    F.silu: unary("silu", BOUND, lambda m, x: F.silu(x.clone(), inplace=True)),
    torch.rsqrt: positive("shifted", lambda m, x: torch.rsqrt(x + 1e-6), lambda m, x: torch.sigmoid(torch.sub(0.5, x, alpha=2.0))),
    F.prelu: held("prelu", ROUNDED, (3,), lambda m, x: F.prelu(x, m.layer.value).clamp(max=1)),
    "prelu": held("prelu", ROUNDED, (1,), lambda m, x: x.prelu(m.layer.value)),
    nn.PReLU: layers("prelu", ROUNDED, IMAGE, nn.PReLU(), nn.PReLU(3)),
    # ---- pools, means and sums that a clamp is fused into
    F.avg_pool2d: unary("avg_pool2d", ROUNDED, lambda m, x: F.avg_pool2d(x, 2, divisor_override=3).relu()),
    torch.mean: unary("mean", ROUNDED, lambda m, x: torch.mean(x, dim=-1, keepdim=True).relu()),
    torch.sum: unary("sum", ROUNDED, lambda m, x: torch.sum(x, dim=1, keepdim=True).relu()),
    # ---- shapes
    torch.reshape: unary("reshape", EXACT, lambda m, x: torch.reshape(x, (-1, 6, 18))),
    torch.flatten: unary("reshape", EXACT, lambda m, x: torch.flatten(x, 1), lambda m, x: torch.flatten(x, start_dim=2, end_dim=3)),
    torch.squeeze: unary("reshape", EXACT, lambda m, x: torch.squeeze(x.reshape(-1, 1, 108), 1)),
    torch.ravel: unary("reshape", EXACT, lambda m, x: torch.ravel(x)),
    torch.atleast_1d: unary("reshape", EXACT, lambda m, x: torch.atleast_1d(x).flatten(1)),
    torch.atleast_2d: unary("reshape", EXACT, lambda m, x: torch.atleast_2d(x).flatten(1)),
    torch.atleast_3d: unary("reshape", EXACT, lambda m, x: torch.atleast_3d(x), shape=ROW),
    "ravel": unary("reshape", EXACT, lambda m, x: x.ravel()),
    torch.unsqueeze: unary("reshape", EXACT, lambda m, x: torch.unsqueeze(x, 2)),
    "reshape": unary("reshape", EXACT, lambda m, x: x.reshape(x.shape[0], -1), lambda m, x: x.reshape((x.size(0), 2, 54))),
    "view": unary("reshape", EXACT, lambda m, x: x.view(-1, 108), lambda m, x: x.view(x.size(0), 3, 36)),
    "flatten": unary("reshape", EXACT, lambda m, x: x.flatten(1, 2)),
    "squeeze": unary("reshape", EXACT, lambda m, x: x.view(-1, 108, 1).squeeze(-1)),
    "unsqueeze": unary("reshape", EXACT, lambda m, x: x.unsqueeze(-1)),
    "view_as": [Sample("reshape", EXACT, (IMAGE, (6, 18)), lambda m, x, y: x.view_as(y))],
    "reshape_as": [Sample("reshape", EXACT, (IMAGE, (6, 18)), lambda m, x, y: x.reshape_as(y))],
    nn.Flatten: layers("reshape", EXACT, IMAGE, nn.Flatten(), nn.Flatten(2)),
    torch.unflatten: unary("reshape", EXACT, lambda m, x: torch.unflatten(x, 2, (2, 3))),
    "unflatten": unary("reshape", EXACT, lambda m, x: x.unflatten(-1, (3, -1))),
    nn.Unflatten: layers("reshape", EXACT, IMAGE, nn.Unflatten(1, (3, 1))),
    torch.permute: unary("permute", EXACT, lambda m, x: torch.permute(x, (0, 2, 3, 1))),
    "permute": unary("permute", EXACT, lambda m, x: x.permute(0, -1, 1, 2)),
    torch.transpose: unary("permute", EXACT, lambda m, x: torch.transpose(x, 1, -1)),
    "transpose": unary("permute", EXACT, lambda m, x: x.transpose(1, -1)),
    torch.swapdims: unary("permute", EXACT, lambda m, x: torch.swapdims(x, 1, 2)),
    "swapdims": unary("permute", EXACT, lambda m, x: x.swapdims(1, 2)),
    torch.swapaxes: unary("permute", EXACT, lambda m, x: torch.swapaxes(x, 2, 3)),
    "swapaxes": unary("permute", EXACT, lambda m, x: x.swapaxes(2, 3)),
    torch.movedim: unary("permute", EXACT, lambda m, x: torch.movedim(x, 1, -1)),
    "movedim": unary("permute", EXACT, lambda m, x: x.movedim(1, -1)),
    torch.moveaxis: unary("permute", EXACT, lambda m, x: torch.moveaxis(x, (1, 2), (3, 1))),
    "moveaxis": unary("permute", EXACT, lambda m, x: x.moveaxis((1, 2), (3, 1))),
    torch.adjoint: unary("permute", EXACT, lambda m, x: torch.adjoint(x)),
    "adjoint": unary("permute", EXACT, lambda m, x: x.adjoint()),
    torch.t: unary("permute", EXACT, lambda m, x: torch.t(x), shape=ROW),
    "t": unary("permute", EXACT, lambda m, x: x.t(), shape=ROW),
    getattr: unary("permute", EXACT, lambda m, x: x.mT, lambda m, x: x.flatten(1).T),
    operator.getitem: unary("getitem", EXACT, lambda m, x: x[:, 1], lambda m, x: x[..., ::2, None, 1:-1], lambda m, x: x[:, [2, 0]]),
    "__getitem__": unary("getitem", EXACT, lambda m, x: x.__getitem__((slice(None), 2))),
    torch.narrow: unary("getitem", EXACT, lambda m, x: torch.narrow(x, 1, 1, 2)),
    "narrow": unary("getitem", EXACT, lambda m, x: x.narrow(-1, 2, 3)),
    torch.select: unary("getitem", EXACT, lambda m, x: torch.select(x, 2, 3)),
    "select": unary("getitem", EXACT, lambda m, x: x.select(1, -1)),
    torch.index_select: unary("getitem", EXACT, lambda m, x: torch.index_select(x, 1, torch.tensor([1, 1, 0]))),
    "index_select": unary("getitem", EXACT, lambda m, x: x.index_select(-1, torch.tensor([5, 2]))),
    torch.repeat_interleave: unary("getitem", EXACT, lambda m, x: torch.repeat_interleave(x, 2, dim=1)),
    "repeat_interleave": [
        *unary("getitem", EXACT, lambda m, x: x.repeat_interleave(3, 2)),
        *unary("interleave", EXACT, lambda m, x: x.repeat_interleave(2, 0)),
    ],
    torch.flip: unary("flip", EXACT, lambda m, x: torch.flip(x, [1, -1])),
    "flip": unary("flip", EXACT, lambda m, x: x.flip(2)),
    torch.fliplr: unary("flip", EXACT, lambda m, x: torch.fliplr(x)),
    "fliplr": unary("flip", EXACT, lambda m, x: x.fliplr()),
    torch.flipud: unary("flip", EXACT, lambda m, x: torch.flipud(x.transpose(0, 1))),
    "flipud": unary("flip", EXACT, lambda m, x: x.transpose(0, 1).flipud()),
    torch.roll: unary("roll", EXACT, lambda m, x: torch.roll(x, 2, 1)),
    torch.broadcast_to: unary("expand", EXACT, lambda m, x: torch.broadcast_to(x[:, :1], x.shape)),
    "expand": [
        *unary("expand", EXACT, lambda m, x: x[:, :, :1].expand(-1, 3, 4, 6)),
        *held("expand", ROUNDED, (1, 4, 5), lambda m, x: m.layer.value.expand(x.size(0) * 2, 4, 5)),
    ],
    "expand_as": unary("expand", EXACT, lambda m, x: x[..., :1].expand_as(x)),
    "broadcast_to": unary("expand", EXACT, lambda m, x: x.broadcast_to((2, *x.shape))),
    torch.tile: unary("repeat", EXACT, lambda m, x: torch.tile(x, (2, 1))),
    "repeat": [
        *unary("repeat", EXACT, lambda m, x: x.repeat(1, 2, 1, 3)),
        *held("repeat", ROUNDED, (4, 5), lambda m, x: m.layer.value.repeat(x.size(0), 2, 1)),
    ],
    "tile": unary("repeat", EXACT, lambda m, x: x.tile(2)),
    F.pad: [
        *unary("pad", EXACT, lambda m, x: F.pad(x, (1, 2)), lambda m, x: F.pad(x, (2, -1, 1, 0), mode="reflect")),
        *unary("pad", BOUND, lambda m, x: F.pad(x, (1, 0, 2, 0, 0, 1), value=0.37)),
    ],
    nn.ZeroPad1d: layers("pad", EXACT, LINE, nn.ZeroPad1d(1)),
    nn.ConstantPad1d: layers("pad", BOUND, LINE, nn.ConstantPad1d(1, -0.5)),
    nn.ReflectionPad1d: layers("pad", EXACT, LINE, nn.ReflectionPad1d((2, 1))),
    nn.ReplicationPad1d: layers("pad", EXACT, LINE, nn.ReplicationPad1d((2, 1))),
    nn.CircularPad1d: layers("pad", EXACT, LINE, nn.CircularPad1d((2, 1))),
    nn.ZeroPad2d: layers("pad", EXACT, IMAGE, nn.ZeroPad2d(1)),
    nn.ConstantPad2d: layers("pad", BOUND, IMAGE, nn.ConstantPad2d(1, -0.5)),
    nn.ReflectionPad2d: layers("pad", EXACT, IMAGE, nn.ReflectionPad2d((2, 1, 1, 0))),
    nn.ReplicationPad2d: layers("pad", EXACT, IMAGE, nn.ReplicationPad2d((2, 1, 1, 0))),
    nn.CircularPad2d: layers("pad", EXACT, IMAGE, nn.CircularPad2d((2, 1, 1, 0))),
    nn.ZeroPad3d: layers("pad", EXACT, VOLUME, nn.ZeroPad3d(1)),
    nn.ConstantPad3d: layers("pad", BOUND, VOLUME, nn.ConstantPad3d(1, -0.5)),
    nn.ReflectionPad3d: layers("pad", EXACT, VOLUME, nn.ReflectionPad3d((2, 1, 1, 0, 1, 0))),
    nn.ReplicationPad3d: layers("pad", EXACT, VOLUME, nn.ReplicationPad3d((2, 1, 1, 0, 1, 0))),
    nn.CircularPad3d: layers("pad", EXACT, VOLUME, nn.CircularPad3d((2, 1, 1, 0, 1, 0))),
    # ---- resizing
    nn.Upsample: layers("interpolate", INTERPOLATED, IMAGE, nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True)),
    **dict.fromkeys((torch.constant_pad_nd,), unary("pad", ROUNDED, lambda m, x: torch.constant_pad_nd(x, (1, 0, 2, 1), 0.5))),
    # ---- maxima of windows that differ, where maxima are, and back
    F.max_pool1d_with_indices: [
        *unary("max_pool1d_with_indices", EXACT, lambda m, x: F.max_pool1d(x, 3, 2, 1, return_indices=True)[0], shape=LINE),
        *unary("max_pool_indices1d", EXACT, lambda m, x: F.max_unpool1d(*F.max_pool1d(x, 3, return_indices=True), 3), shape=LINE),
    ],
    torch.max_pool1d_with_indices: unary(
        "max_unpool1d", EXACT, lambda m, x: F.max_unpool1d(*torch.max_pool1d_with_indices(x, 3), 3), shape=LINE
    ),
    F.max_pool2d_with_indices: [
        *unary("max_pool2d_with_indices", EXACT, lambda m, x: F.max_pool2d_with_indices(x, 2)[0]),
        *unary("max_pool_indices2d", EXACT, lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    ],
    F.max_pool3d_with_indices: [
        *unary("max_pool3d_with_indices", EXACT, lambda m, x: F.max_pool3d(x, 2, return_indices=True)[0], shape=VOLUME),
        *unary("max_pool_indices3d", EXACT, lambda m, x: unpooled3d(x), shape=VOLUME),
    ],
    F.adaptive_max_pool1d_with_indices: [
        *unary("adaptive_max_pool1d_with_indices", EXACT, lambda m, x: F.adaptive_max_pool1d(x, 4, return_indices=True)[0], shape=LINE),
        *unary("adaptive_max_indices1d", EXACT, lambda m, x: picked(x, F.adaptive_max_pool1d(x, 4, return_indices=True)[1]), shape=LINE),
    ],
    torch.adaptive_max_pool1d: unary(
        "adaptive_max_pool1d_with_indices", EXACT, lambda m, x: torch.adaptive_max_pool1d(x, 2)[0], shape=LINE
    ),
    F.adaptive_max_pool2d_with_indices: [
        *unary("adaptive_max_pool2d_with_indices", EXACT, lambda m, x: F.adaptive_max_pool2d(x, 4, return_indices=True)[0]),
        *unary("adaptive_max_indices2d", EXACT, lambda m, x: picked(x, F.adaptive_max_pool2d(x, 4, return_indices=True)[1])),
    ],
    F.adaptive_max_pool3d_with_indices: [
        *unary("adaptive_max_pool3d_with_indices", EXACT, lambda m, x: F.adaptive_max_pool3d(x, 3, return_indices=True)[0], shape=VOLUME),
        *unary(
            "adaptive_max_indices3d", EXACT, lambda m, x: picked(x, F.adaptive_max_pool3d_with_indices(x, 3)[1]), shape=VOLUME
        ),
    ],
    F.max_unpool1d: unary(
        "max_unpool1d", EXACT, lambda m, x: F.max_unpool1d(*F.max_pool1d(x, 2, 4, 0, 1, False, True), 2, 4, 0, (9,)), shape=LINE
    ),
    F.max_unpool2d: unary("max_unpool2d", EXACT, lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 3, return_indices=True), 3).relu()),
    F.max_unpool3d: unary("max_unpool3d", EXACT, lambda m, x: unpooled3d(x), shape=VOLUME),
    nn.MaxUnpool1d: layers("max_unpool1d", EXACT, LINE, Unpooled(nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2))),
    nn.MaxUnpool2d: layers("max_unpool2d", EXACT, IMAGE, Unpooled(nn.MaxPool2d((2, 3), return_indices=True), nn.MaxUnpool2d((2, 3)))),
    nn.MaxUnpool3d: layers("max_unpool3d", EXACT, VOLUME, Unpooled(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2))),
    # ---- images read between their pixels
    F.grid_sample: [
        Sample("grid_sample", SAMPLED, (IMAGE, (4, 5, 2)), lambda m, x, y: F.grid_sample(x, y / 2, align_corners=False)),
        Sample("grid_sample", SAMPLED, (IMAGE, (4, 5, 2)), lambda m, x, y: F.grid_sample(x, y, "bilinear", "reflection", True)),
        Sample("grid_sample", SAMPLED, (IMAGE, (2, 4, 5)), lambda m, x, y: F.grid_sample(x, y.permute(0, 2, 3, 1), padding_mode="border")),
        Sample("grid_sample", SAMPLED, (VOLUME, (2, 3, 2, 3)), lambda m, x, y: F.grid_sample(x, y, align_corners=False)),
        Sample("warp", SAMPLED, (IMAGE, (4, 5, 2)), lambda m, x, y: warp(x, y)),
        Sample("deform_conv2d", SAMPLED, (IMAGE, (18, 6, 6)), deformed, weight=(4, 3, 3, 3)),
    ],
    F.affine_grid: [
        Sample("affine_grid", ROUNDED, ((2, 3),), lambda m, x: F.affine_grid(x, [x.shape[0], 1, 8, 4], align_corners=True)),
        Sample("affine_grid", ROUNDED, ((3, 4),), lambda m, x: F.affine_grid(x, (x.shape[0], 1, 2, 3, 4), align_corners=False)),
    ],
    # ---- nothing at all
    torch.detach: unary("clamp", EXACT, lambda m, x: torch.detach(x).relu()),
    "to": unary("identity", EXACT, lambda m, x: x.to(torch.float32).relu(), lambda m, x: x.to(x).relu()),
    "type": unary("identity", EXACT, lambda m, x: x.type(torch.float32).relu()),
    "type_as": unary("identity", EXACT, lambda m, x: x.type_as(x).relu()),
    "float": unary("identity", EXACT, lambda m, x: x.float().relu()),
    "double": unary("identity", EXACT, lambda m, x: x.double().float().relu()),
    "cpu": unary("identity", EXACT, lambda m, x: x.cpu().relu()),
    "positive": unary("identity", EXACT, lambda m, x: x.positive().relu()),
    torch.positive: unary("identity", EXACT, lambda m, x: torch.positive(x).relu()),
    operator.pos: unary("identity", EXACT, lambda m, x: (+x).relu()),
    torch.clone: unary("identity", EXACT, lambda m, x: torch.clone(x).relu()),
    "contiguous": unary("identity", EXACT, lambda m, x: x.contiguous().relu()),
    "clone": unary("identity", EXACT, lambda m, x: x.clone().relu()),
    "detach": unary("clamp", EXACT, lambda m, x: x.detach().relu()),
    nn.Identity: layers("identity", EXACT, IMAGE, nn.Sequential(nn.Identity(), nn.ReLU())),
    F.dropout: unary("dropout", EXACT, lambda m, x: F.dropout(x, 0.3, m.training).relu()),
    torch.dropout: unary("dropout", EXACT, lambda m, x: torch.dropout(x, 0.3, m.training).relu()),
    F.dropout1d: unary("dropout", EXACT, lambda m, x: F.dropout1d(x, 0.3, m.training).relu(), shape=LINE),
    F.dropout2d: unary("dropout", EXACT, lambda m, x: F.dropout2d(x, 0.3, m.training).relu()),
    F.dropout3d: unary("dropout", EXACT, lambda m, x: F.dropout3d(x, 0.3, m.training).relu(), shape=VOLUME),
    F.alpha_dropout: unary("dropout", EXACT, lambda m, x: F.alpha_dropout(x, 0.3, m.training).relu()),
    F.feature_alpha_dropout: unary("dropout", EXACT, lambda m, x: F.feature_alpha_dropout(x, 0.3, m.training).relu()),
    torch.alpha_dropout: unary("dropout", EXACT, lambda m, x: torch.alpha_dropout(x, 0.3, m.training).relu()),
    torch.feature_dropout: unary("dropout", EXACT, lambda m, x: torch.feature_dropout(x, 0.3, m.training).relu()),
    torch.feature_alpha_dropout: unary("dropout", EXACT, lambda m, x: torch.feature_alpha_dropout(x, 0.3, m.training).relu()),
    nn.Dropout: layers("dropout", EXACT, IMAGE, nn.Sequential(nn.Dropout(0.3), nn.ReLU())),
    nn.Dropout1d: layers("dropout", EXACT, LINE, nn.Sequential(nn.Dropout1d(0.3), nn.ReLU())),
    nn.Dropout2d: layers("dropout", EXACT, IMAGE, nn.Sequential(nn.Dropout2d(0.3), nn.ReLU())),
    nn.Dropout3d: layers("dropout", EXACT, VOLUME, nn.Sequential(nn.Dropout3d(0.3), nn.ReLU())),
    nn.AlphaDropout: layers("dropout", EXACT, IMAGE, nn.Sequential(nn.AlphaDropout(0.3), nn.ReLU())),
    nn.FeatureAlphaDropout: layers("dropout", EXACT, IMAGE, nn.Sequential(nn.FeatureAlphaDropout(0.3), nn.ReLU())),
    # ---- concatenation
    torch.cat: [
        *binary("cat", ROUNDED, lambda m, x, y: torch.cat([x, y], 1), lambda m, x, y: torch.cat((y, x, y), dim=-1)),
        *held("cat", ROUNDED, (1, 3, 6, 2), lambda m, x: torch.cat([m.layer.value.expand(x.shape[0], -1, -1, -1), x], -1)),
        *held("cat", ROUNDED, (3, 6, 6), lambda m, x: torch.cat([m.layer.value, x.flatten(0, 1)])[1:]),
    ],
    torch.embedding: held("embedding", ROUNDED, (6, 5), lambda m, x: torch.embedding(m.layer.value, x.argmax(-1))),
    F.embedding: held("embedding", ROUNDED, (6, 5), lambda m, x: F.embedding(x.argmax(-1), m.layer.value, padding_idx=2)),
    nn.Embedding: [Sample("embedding", ROUNDED, (IMAGE,), lambda m, x: m.layer(x.argmin(-1)), nn.Embedding(6, 5))],
    torch.concat: binary("cat", ROUNDED, lambda m, x, y: torch.concat([x, y], dim=2)),
    torch.hstack: binary("cat", ROUNDED, lambda m, x, y: torch.hstack([x, y])),
    torch.column_stack: binary("cat", ROUNDED, lambda m, x, y: torch.column_stack((x, y))),
    torch.vstack: binary("cat", ROUNDED, lambda m, x, y: torch.vstack((x, y))),
    torch.row_stack: binary("cat", ROUNDED, lambda m, x, y: torch.row_stack((x, y))),
    torch.dstack: binary("cat", ROUNDED, lambda m, x, y: torch.dstack([x, y])),
    torch.concatenate: binary("cat", ROUNDED, lambda m, x, y: torch.concatenate((x, y), 1)),
    torch.stack: binary("stack", ROUNDED, lambda m, x, y: torch.stack([x, y], 1), lambda m, x, y: torch.stack((y, x, y), dim=-1)),
}  # fmt: skip

CALLS = [call for call in declared.calls() if call.form not in CASES]


def within(call: declared.Call) -> float:
    """The bound of a sample on a record: what it says, or what operators of its kind keep."""
    if call.sample.within is not None:
        return call.sample.within
    if call.operator.name in UNARY:
        return BOUND
    return COMPOSED if call.operator.expand is not None else EXACT if isinstance(call.operator.demand, Same) else ROUNDED


# Of the samples on the records, the first call form of each operator is held to the contract; of the others only what they become.
OF_RECORDS = [
    Sample(call.operator.name, within(call), call.shapes, call.forward, call.layer, domain=call.sample.over)
    for call in CALLS
    if call.form == declared.forms_of(call.operator)[0]
]


def name_of(spelling: Any) -> str:
    if isinstance(spelling, str):
        return f".{spelling}"
    home = "nn" if isinstance(spelling, type) else "F" if getattr(F, spelling.__name__, None) is spelling else spelling.__module__
    return f"{home}.{spelling.__name__}"


# int16: see FINE. uint8: since its zero point is a whole number, one end of its interval lies up to half a step inside the values.
EXTRA = {"int16": FINE, "uint8": 0.5}
EVERY = [*itertools.chain.from_iterable(SAMPLES.values()), *OF_RECORDS]
OF_ITS_OPERATOR = {sample.operator: sample for sample in reversed(EVERY)}  # the first one
BY_OPERATOR = {sample.operator: sample for sample in EVERY if sample.operator not in UNARY}  # the last one, without tables
PACKED = 10


NAMED = [(f"{name_of(spelling)}-{index}", sample) for spelling, samples in SAMPLES.items() for index, sample in enumerate(samples)]
NAMED += [(f"{sample.operator} as declared-{index}", sample) for index, sample in enumerate(OF_RECORDS)]
FIRST = [(name, sample) for name, sample in NAMED if OF_ITS_OPERATOR[sample.operator] is sample]
FURTHER = [(name, sample) for name, sample in NAMED if OF_ITS_OPERATOR[sample.operator] is not sample]


def turn(sample: Sample) -> int:
    """The place of a sample's format: it depends on the sample alone, so that a new sample leaves those of the others as they are."""
    return zlib.crc32(repr((sample.shapes, sample.operator)).encode()) % 4


def quick_format(sample: Sample) -> tuple[str, str, str]:
    """The symmetric format in which an operator is alone in its model, and in `make quick`."""
    return FORMATS[turn(sample)]


def packed(named: Sequence[tuple[str, Sample]], format: tuple[str, str, str], marks: Sequence[pytest.MarkDecorator] = ()) -> Iterator[Any]:
    """Rows of several samples in one format."""
    for start in range(0, len(named), PACKED):
        names, samples = zip(*named[start : start + PACKED], strict=True)
        yield pytest.param(list(samples), *format, id="-".join([f"{names[0]} to {names[-1]}", *format]), marks=marks)


def tables(format: tuple[str, str, str]) -> list[tuple[str, Sample]]:
    """The samples of unary functions whose quick format this is."""
    return [(name, sample) for name, sample in FIRST if sample.operator in UNARY and quick_format(sample) == format]


def others(format: tuple[str, str, str]) -> list[tuple[str, Sample]]:
    """The samples of operators that are alone on the other target in the other width, and on x86 all; composites stay in float there."""
    if format[1] == "uint8":
        return [(name, sample) for name, sample in FIRST if sample.bound not in WIDE_INSIDE]
    opposite = FORMATS[3 - FORMATS.index(format)]
    return [(name, sample) for name, sample in FIRST if quick_format(sample) == opposite]


# Behind canonical.rewrite an operator is the same however it is spelled: one sample of it is held to the contract in three
# formats, both arithmetics and all widths among them, in one of them alone; the others, with arguments and operands of their
# own, in one format. tests/ops/test_operator_oracle.py holds every operator to the oracle in each format.
ROWS = [
    *(
        pytest.param([sample], *quick_format(sample), id="-".join([name, *quick_format(sample)]), marks=[pytest.mark.quick])
        for name, sample in FIRST
        if sample.operator not in UNARY
    ),
    *(row for format in FORMATS[:4] for row in packed(tables(format), format, [pytest.mark.quick])),
    *(row for format in FORMATS for row in packed(others(format), format)),
    *(row for index, format in enumerate(FORMATS[:4]) for row in packed([named for named in FURTHER if turn(named[1]) == index], format)),
]


class Pack(nn.Module):
    """The models of several samples, each with inputs of its own, as one model."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__()
        self.models = nn.ModuleList(map(model_of, samples))
        self.counts = [len(sample.shapes) for sample in samples]

    def forward(self, *inputs: Tensor) -> Any:
        left = iter(inputs)
        results = [model(*itertools.islice(left, count)) for model, count in zip(self.models, self.counts, strict=True)]
        return tuple(results)


def inputs_of(sample: Sample, count: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Of different ranges, so that no two inputs share a scale by accident."""
    generator = torch.Generator().manual_seed(seed)
    if sample.domain is not None:
        low, high = sample.domain
        return tuple(low + (high - low) * torch.rand(count, *shape, generator=generator) for shape in sample.shapes)
    return tuple(torch.randn(count, *shape, generator=generator) * (1 + 0.7 * index) for index, shape in enumerate(sample.shapes))


def model_of(sample: Sample) -> nn.Module:
    torch.manual_seed(0)
    return Model(sample).eval()


def real_of(integer: fx.GraphModule, values: dict[str, Tensor], name: str) -> Tensor:
    known = qparams(next(node for node in integer.graph.nodes if node.name == name))
    real: Tensor = (values[name].float() - known.zero_point) * known.scale
    return real


# ---- the table is complete ----------------------------------------------------------------------------------------------


def test_every_registered_spelling_has_a_sample() -> None:
    canonical = {function for function in FUNCTIONS if function.__module__.startswith("fxquant.ops.")}
    assert (set(FUNCTIONS) - canonical) | set(METHODS) | set(MODULES) == set(SAMPLES) | set(CASES) | {call.form for call in CALLS}


def test_every_call_form_of_a_record_becomes_its_operator_with_the_arguments_of_the_sample() -> None:
    samples = [Sample(call.operator.name, 0, call.shapes, call.forward, call.layer, domain=call.sample.over) for call in CALLS]
    inputs = tuple(x for sample in samples for x in inputs_of(sample, 3))
    traced = fxq.prepare(Pack(samples).eval(), inputs, until="canonical.rewrite")
    results = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    for call, result in zip(CALLS, results, strict=True):
        record = call.operator
        node = result if result.target is record.function else next(n for n in result.all_input_nodes if n.target is record.function)
        given = {key: value for key, value in call.sample.arguments.items() if not isinstance(value, tuple) or key not in record.operands}
        found = record.arguments(node)
        assert {key: found[key] for key in given} == given, call
        assert sum(isinstance(value, fx.Node) and value.op != "get_attr" for value in found.values()) == len(call.shapes), call


def test_every_operator_has_a_sample() -> None:
    elsewhere = {case.operator for case in (*CASES.values(), *ALSO.values())}
    parts = {"ranked", "pick", "quantize", "dequantize", "requantize", "scale_channels", "deformed_taps"}
    parts |= {"exponential", "inverse_root", "bounded_inverse", "of_one_magnitude", "kept", "added", "masked_softmax"}
    parts |= {"log_of_one_and_exponential", "angle_of_share"}
    parts |= {
        "dynamic_linear",
        "piece",
        "curve",
    }  # of tests/quantization/test_dynamic.py, tests/ops/test_shape_operators.py and tests/ops/test_pointwise.py
    parts |= {"sum_at", "index_sum", "log_of_base", "log2_of_one_and_power", "smooth_magnitude", "huber_magnitude", "shrinking"}
    of_samples = {sample.operator for samples in SAMPLES.values() for sample in samples}
    sampled = (
        elsewhere | set(OF_WHOLE_NUMBERS) | set(OF_REAL_NUMBERS) | of_samples | parts | {record.name for record in declared.declared()}
    )
    assert sampled == {record.name for record in OPERATORS.values()}


# ---- meaning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "target", "activation", "weight"), ROWS)
def test_a_spelling_means_the_float_function_and_holds_the_contract(
    samples: list[Sample], target: str, activation: str, weight: str, tmp_path: Path
) -> None:
    model = Pack(samples).eval()
    inputs, others = (tuple(x for sample in samples for x in inputs_of(sample, *size)) for size in ((5, 0), (1, 1)))
    batches = [tuple(factor * x for x in inputs) for factor in (1.1, 0.9)]  # so that nothing saturates
    prepared, integer = compiled(model, batches, target, kept_integer(covering(activation, weight)))
    assert_become_their_operators(samples, prepared)
    contract.assert_alive(integer, *inputs)
    assert_float_function_within_bound(samples, model, integer, inputs, activation)
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [inputs, others])
    contract.assert_train_is_validate(prepared, *inputs)
    if list(prepared.parameters()):
        contract.assert_gradients_reach_every_parameter(prepared, *inputs)


def assert_become_their_operators(samples: list[Sample], prepared: fx.GraphModule) -> None:
    """Each is there, or its composite's parts are, and nothing stays in float."""
    assert "none is left in float" in fxq.explain(prepared), fxq.explain(prepared)
    for index, sample in enumerate(samples):
        inside = [node for node in prepared.graph.nodes if graph.module_path(node).split(".")[:2] == ["models", str(index)]]
        wholes = {str(part.composite) for node in inside if (part := part_of(node)) is not None}
        operators = {resolve(prepared, str(node.target)).operator.name for node in inside if node.op == "call_module"}
        assert sample.operator in wholes | operators, sample


def assert_float_function_within_bound(
    samples: list[Sample], model: nn.Module, integer: fx.GraphModule, inputs: tuple[Tensor, ...], activation: str = "int8"
) -> None:
    """On inputs that lie on their grid, the integer model is as near to the float model as the rows say."""
    placeholders = [node for node in integer.graph.nodes if node.op == "placeholder"]
    values, used = graph_values(integer, *inputs), {node.name: node for node in integer.graph.nodes}
    on_grid = [
        real_of(integer, values, f"{p.name}_quantize") if f"{p.name}_quantize" in used else given
        for p, given in zip(placeholders, inputs, strict=True)
    ]
    with torch.no_grad():
        found, expected = (contract.flat(form(*on_grid)) for form in (integer, model))
    results = next(node for node in integer.graph.nodes if node.op == "output").all_input_nodes
    for sample, one, other, result in zip(samples, found, expected, results, strict=True):
        assert one.shape == other.shape
        if sample.bound == EXACT:
            assert torch.equal(one, other), sample
            continue
        known = qparams(result.all_input_nodes[0])
        assert known is not None
        fine = SAMPLED_FINE if sample.bound == SAMPLED else COMPOSED_FINE if sample.bound in WIDE_INSIDE else FINE
        sampled = sample.bound
        if integer.meta["target"].name == "bayes-e":
            fine = CHIP_FINE * (COMPOSED_FINE if sample.bound == RECURRENT else fine)
            if sample.operator == "minimum":  # it is found on the larger scale of the two, which rounds the other one (CHIP.md, section 12)
                sampled += HALF_STEP
            if sample.operator == "prelu" and activation == "int8":
                sampled += SLOPED
        bound = sampled + {**EXTRA, "int16": fine}.get(activation, 0)
        assert float((one.double() - other.double()).abs().max()) <= bound * known.scale, sample


# ---- an addition behind a layer that cannot be done in its accumulator ---------------------------------------------------

BEHIND_A_LAYER: dict[str, Forward] = {
    "a number": lambda m, x: m.layer(x) + 1.5,
    "a number on the left": lambda m, x: (1.5 + m.layer(x)).relu(),
    "a multiple": lambda m, x: torch.add(m.layer(x), x, alpha=2),
    "the layer itself multiplied": lambda m, x: torch.add(x, m.layer(x), alpha=0.5),
    "a multiple of a number": lambda m, x: torch.add(m.layer(x), 1.5, alpha=-2),
}


@pytest.mark.parametrize("target", contract.TARGETS)
@pytest.mark.parametrize("name", BEHIND_A_LAYER)
def test_an_addition_that_is_no_residual_keeps_its_meaning(name: str, target: str, tmp_path: Path) -> None:
    sample = Sample("add", 1.5, (IMAGE,), BEHIND_A_LAYER[name], nn.Conv2d(3, 3, 1))  # the layer's output is rounded too
    model, inputs = model_of(sample), inputs_of(sample, 5)
    prepared, integer = compiled(model, [tuple(1.1 * x for x in inputs)], target, covering())
    assert "none is left in float" in fxq.explain(prepared)
    assert_float_function_within_bound([sample], model, integer, inputs)
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [inputs])
    contract.assert_train_is_validate(prepared, *inputs)
    contract.assert_gradients_reach_every_parameter(prepared, *inputs)


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
    "add infinity": ("one of its numbers is not finite", lambda m, x: x + math.inf, None),
    "multiply too many": ("it multiplies 36 elements", lambda m, x: x.flatten(2).prod(-1), None),
    "divide by zero": ("it divides by 0.0", lambda m, x: (x.relu() + 1) / 0.0, None),
    "loss of everything": ("its reduction 'mean' runs over the batch", lambda m, x: F.mse_loss(x, x.exp()).reshape(1), None),
    "power of a negative constant": ("its base, a constant, is not positive", lambda m, x: torch.tensor(-2.0) ** x.exp(), None),
    "maximum of everything": ("it reduces the batch", lambda m, x: torch.max(x).reshape(1), None),
    "computed weight": ("its weight is computed by", lambda m, x: F.conv_transpose2d(x, m.kernel.weight * x.std()), None),
    "mean over the batch": ("it averages over the batch", lambda m, x: x.mean(0), None),
    "mean of everything": ("it averages over the batch", lambda m, x: x.mean().reshape(1), None),
    "mean to a dtype": ("a dtype argument", lambda m, x: x.mean(1, dtype=torch.float64), None),
    "overlapping windows": (
        "two elements may share an index", lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 3, 1, return_indices=True), 3, 1), None
    ),
    "memory": ("only the strides of model inputs are known", lambda m, x: x.as_strided((2, 3), (3, 1)), None),
    "norm without statistics": ("it has no running statistics", call, nn.BatchNorm2d(3, track_running_stats=False)),
    "bytes as another dtype": ("it reinterprets the bytes", lambda m, x: x.view(torch.int32).float(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_in_float_and_says_why(name: str) -> None:
    reason, forward, layer = REFUSED[name]
    images = torch.randn(4, 3, 6, 6)
    prepared, integer = compiled(Own(forward, layer).eval(), [images])
    specs = [annotation(node) for node in prepared.graph.nodes]
    reasons = [spec.because for spec in specs if spec is not None and spec.dtype is None]
    assert any(reason in because for because in reasons), reasons
    assert reason in fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, images)
    assert all_equal(integer(images), prepared(images))
