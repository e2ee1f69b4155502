"""ONNX operators as functions of tensors and numbers, one record each: what an ONNX file says in PyTorch's calls.

Sizes and indices, what `Shape` returns and what is computed from it alone, are Python numbers and tuples of numbers; everything else is
tensors. A function takes the inputs of its operator in order, None for one that is left out, and the attributes by their names. An input
that was an attribute in older opsets has the attribute's name, so one function serves all opsets.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Numbers = Any  # a number, or a tuple of numbers
FEW = 64  # a constant of integers with no more elements than this is a tuple


@dataclass(frozen=True)
class OnnxOperator:
    """An operator: the function that computes it, and how its inputs and attributes reach that function."""

    function: Callable[..., Any]
    numbers: tuple[int, ...] = ()  # the inputs whose floats are read as numbers
    weights: tuple[int, ...] = ()  # the inputs that train, where they are constants; initializers train everywhere
    statistics: tuple[int, ...] = ()  # the inputs that do not
    elementwise: bool = False  # whether a float constant of one element is a number
    results: bool = False  # whether the function is told the number of its results, as `results`
    opset: bool = False  # whether the function is told the opset of the file, as `opset`


OPERATORS: dict[str, OnnxOperator] = {}
REFUSED: dict[str, str] = {}  # by operator, what to do about it


def reads(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        if function.__name__ in ("<lambda>", "reduce", "layer", "softmax", "function"):
            function.__name__ = function.__qualname__ = names[0].lower()  # in generated code
        OPERATORS.update(dict.fromkeys(names, OnnxOperator(function, **settings)))
        return function

    return declare


# ---- numbers and tensors -----------------------------------------------------------------------------------------------------
def simplified(value: Any) -> Any:
    """Return the number or the tuple of a tensor of few integers or bools without or with one dimension; any other value unchanged."""
    if not isinstance(value, Tensor) or value.dim() > 1 or value.numel() > FEW or value.is_floating_point() or value.is_complex():
        return value
    return value.item() if value.dim() == 0 else tuple(value.tolist())


def as_numbers(value: Any) -> Numbers:
    """Return the number or the tuple of a tensor of no or one dimension; any other value unchanged."""
    return (value.item() if value.dim() == 0 else tuple(value.tolist())) if isinstance(value, Tensor) else value


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """Return a tensor of numbers, on the device of another; a tensor unchanged."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, device=None if like is None else like.device)


def as_row(value: Numbers) -> tuple[Any, ...]:
    """Return numbers as a tuple."""
    value = as_numbers(value)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def each(function: Callable[..., Any], *values: Numbers) -> Numbers:
    """Return a function of numbers, element by element; a number, and a tuple of one, go with tuples of any length."""
    if not any(isinstance(value, (tuple, list)) for value in values):
        return function(*values)
    rows = [as_row(value) for value in values]
    length = max(map(len, rows)) if all(rows) else 0
    return tuple(function(*column) for column in zip(*(row * length if len(row) == 1 else row for row in rows), strict=True))


def _elementwise(name: str, of_tensors: Callable[..., Any], of_numbers: Callable[..., Any] | None = None) -> None:
    """Declare an operator that computes each element of its result from one element of every input."""

    def function(*values: Any) -> Any:
        like = next((value for value in values if isinstance(value, Tensor)), None)
        if like is None and of_numbers is not None:
            return each(of_numbers, *values)
        return of_tensors(*(value if isinstance(value, (int, float)) and like is not None else as_tensor(value, like) for value in values))

    reads(name, elementwise=True)(function)


def _divide(a: Any, b: Any) -> Any:
    """Return a quotient; that of integers is rounded toward zero."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        whole = not any(each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float) for each in (a, b))
        return torch.div(a, b, rounding_mode="trunc") if whole else torch.div(a, b)
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return torch.where(as_tensor(condition), as_tensor(a), as_tensor(b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else (a if condition else b)


def _power(a: Any, b: Any) -> Any:
    return a * a if isinstance(b, (int, float)) and b == 2 else torch.pow(a, b)


def _chained(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def of_all(first: Any, *others: Any) -> Any:
        for other in others:
            first = function(first, other)
        return first

    return of_all


def _bound(function: Callable[[Tensor, Tensor], Tensor], name: str) -> Callable[[Any, Any], Any]:
    def bounded(a: Any, b: Any) -> Any:
        a, b = (b, a) if isinstance(a, (int, float)) else (a, b)
        return torch.clamp(a, **{name: b}) if isinstance(b, (int, float)) else function(a, b)

    return bounded


for _name, _both in {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide, "Where": _choose, "Equal": operator.eq,
    "Greater": operator.gt, "Less": operator.lt, "GreaterOrEqual": operator.ge, "LessOrEqual": operator.le, "And": operator.and_,
    "Or": operator.or_, "Xor": operator.xor, "Neg": operator.neg, "Abs": abs, "Sum": _chained(operator.add), "Identity": lambda x: x,
}.items():  # fmt: skip
    _elementwise(_name, _both, _both)
for _name, _function, _of_numbers in (
    ("Pow", _power, operator.pow), ("Max", _chained(_bound(torch.maximum, "min")), max), ("Not", torch.logical_not, operator.not_),
    ("Min", _chained(_bound(torch.minimum, "max")), min), ("Floor", torch.floor, math.floor), ("Ceil", torch.ceil, math.ceil),
    ("Sqrt", torch.sqrt, math.sqrt),
):  # fmt: skip
    _elementwise(_name, _function, _of_numbers)
for _name, _of_tensors in {
    "Round": torch.round, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Log": torch.log,
    "Erf": torch.erf, "Reciprocal": torch.reciprocal, "Sign": torch.sign, "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan,
    "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh,
    "Acosh": torch.acosh, "Atanh": torch.atanh, "Softplus": F.softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
    "IsNaN": torch.isnan,
}.items():  # fmt: skip
    _elementwise(_name, _of_tensors)


@reads("Mod", elementwise=True)
def _modulo(a: Any, b: Any, fmod: int = 0) -> Any:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return each(math.fmod if fmod else operator.mod, a, b)
    return torch.fmod(as_tensor(a), b) if fmod else torch.remainder(as_tensor(a), b)


@reads("Cast")
def _cast(x: Any, to: torch.dtype = torch.float32, saturate: int = 1) -> Any:
    if isinstance(x, Tensor):
        return x.to(to)
    return each(float if to.is_floating_point else bool if to is torch.bool else int, x)


reads("MatMul", weights=(0, 1))(torch.matmul)
reads("BatchNormalization", weights=(1, 2), statistics=(3, 4))(
    lambda x, scale, bias, mean, var, epsilon=1e-5, **_: F.batch_norm(x, mean, var, scale, bias, False, 0.1, epsilon)
)
for _name, _simple in {
    "CastLike": lambda x, like: x.to(like.dtype),
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Celu": lambda x, alpha=1.0: F.celu(x, alpha),
    "Selu": lambda x, alpha=1.6732632, gamma=1.050701: F.elu(x, alpha) * gamma,
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "ThresholdedRelu": lambda x, alpha=1.0: F.threshold(x, alpha, 0.0),
    "Einsum": lambda *tensors, equation: torch.einsum(equation, *tensors),
    "InstanceNormalization": lambda x, scale, bias, epsilon=1e-5: F.instance_norm(x, weight=scale, bias=bias, eps=epsilon),
    "RMSNormalization": lambda x, scale, axis=-1, epsilon=1e-5, **_: F.rms_norm(x, list(x.shape[axis:]), scale, epsilon),
    "LpNormalization": lambda x, axis=-1, p=2: F.normalize(x, float(p), axis),
    "LRN": lambda x, size, alpha=1e-4, beta=0.75, bias=1.0: F.local_response_norm(x, size, alpha, beta, bias),
    "Dropout": lambda x, *_, **__: x,
    "GlobalAveragePool": lambda x: x.mean(list(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(list(range(2, x.dim())), keepdim=True),
    "ArgMax": lambda x, axis=0, keepdims=1, **_: torch.argmax(x, axis, bool(keepdims)),
    "ArgMin": lambda x, axis=0, keepdims=1, **_: torch.argmin(x, axis, bool(keepdims)),
}.items():
    reads(_name)(_simple)


@reads("HardSigmoid")
def _hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-3) and beta == 0.5:  # what exporters of older frameworks round to 0.1667
        return F.hardsigmoid(x) if math.isclose(alpha, 1 / 6, rel_tol=1e-6) else torch.clamp(x * alpha + beta, 0.0, 1.0)
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


@reads("Clip", numbers=(1, 2))
def _clip(x: Any, min: Any = None, max: Any = None) -> Any:
    if min == 0 and max == 6:
        return F.relu6(x)
    low, high = (None if bound is None or abs(bound) > 3e38 else bound for bound in (min, max))
    return x if low is None and high is None else torch.clamp(x, low, high)


@reads("PRelu", weights=(1,))
def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    slope = as_tensor(slope, x)
    if slope.numel() == 1 or (slope.dim() == x.dim() - 1 and slope.numel() == slope.shape[0] == x.shape[1]):
        return F.prelu(x, slope.flatten())
    return torch.where(x < 0, x * slope, x)


# ---- layers ------------------------------------------------------------------------------------------------------------------
def _pads(size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], pads: Any, how: str) -> list[int]:
    """Return the zeros before and after each dimension of a window: all those before, then all those after."""
    if not how.startswith("SAME"):
        return [0] * (2 * len(kernel)) if how == "VALID" or not pads else list(pads)
    windows = zip(size, kernel, stride, dilation, strict=True)
    total = [max((-(-extent // step) - 1) * step + (each - 1) * apart + 1 - extent, 0) for extent, each, step, apart in windows]
    less, more = [each // 2 for each in total], [each - each // 2 for each in total]
    return less + more if how == "SAME_UPPER" else more + less


def _even(x: Tensor, pads: list[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Return a tensor and the padding that a layer adds on both sides; what differs between the sides is around the tensor already."""
    half = len(pads) // 2
    if pads[:half] == pads[half:]:
        return x, pads[:half]
    around = [each for pair in zip(reversed(pads[:half]), reversed(pads[half:]), strict=True) for each in pair]
    return F.pad(x, around, value=value), [0] * half


_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


@reads("Conv", weights=(1, 2))
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: int = 1, auto_pad: str = "NOTSET", pads: Any = None, strides: Any = None,
    dilations: Any = None, kernel_shape: Any = None,
) -> Tensor:  # fmt: skip
    """Return a convolution of 1 to 3 dimensions."""
    kernel = list(weight.shape[2:])
    stride, dilation = (list(each or [1] * len(kernel)) for each in (strides, dilations))
    x, padding = _even(x, _pads(x.shape[2:], kernel, stride, dilation, pads, auto_pad))
    return _CONVOLUTIONS[weight.dim()](x, weight, bias, stride, padding, dilation, group)


@reads("ConvTranspose", weights=(1, 2))
def _transposed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: int = 1, auto_pad: str = "NOTSET", pads: Any = None, strides: Any = None,
    dilations: Any = None, kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None,
) -> Tensor:  # fmt: skip
    rank = weight.dim() - 2
    half, stride, dilation = list(pads or [0] * 2 * rank), strides or [1] * rank, dilations or [1] * rank
    more = list(output_padding or [0] * rank)
    if auto_pad.startswith("SAME") or output_shape:
        raise NotImplementedError("auto_pad and output_shape of ConvTranspose are not read")
    before, after = half[:rank], half[rank:]
    y = _TRANSPOSED[weight.dim()](x, weight, bias, stride, [min(a, b) for a, b in zip(before, after, strict=True)], more, group, dilation)
    for dim, (a, b) in enumerate(zip(before, after, strict=True)):
        if a != b:
            y = y.narrow(2 + dim, max(a - b, 0), y.shape[2 + dim] - abs(a - b))
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer: a MatMul or Gemm by a constant matrix, which is held as PyTorch holds it."""
    return F.linear(x, weight, bias)


@reads("Gemm")
def _gemm(a: Tensor, b: Tensor, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0) -> Tensor:
    product = torch.matmul(a.t() if transA else a, b.t() if transB else b)
    product = product if alpha == 1 else product * alpha
    return product if c is None else product + (c if beta == 1 else c * beta)


@reads("LayerNormalization", weights=(1, 2))
def _layer_norm(
    x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.layer_norm(x, list(x.shape[axis:]), scale, bias, epsilon)


def written_norm(x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int, epsilon: float) -> Tensor:
    """Return a norm over one dimension, that files before opset 17 write out, with its factor and its offset over the last one."""
    if axis in (-1, x.dim() - 1):
        return F.layer_norm(x, [x.shape[-1]], scale, bias, epsilon)
    centred = x - x.mean(axis, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(axis, keepdim=True) + epsilon)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


@reads("GroupNormalization", weights=(1, 2), opset=True)
def _group_norm(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1, opset: int) -> Tensor:
    if opset < 21:  # one factor for each group
        scale, bias = (each.repeat_interleave(x.shape[1] // num_groups) for each in (scale, bias))
    return F.group_norm(x, num_groups, scale, bias, epsilon)


def _flat_softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def softmax(x: Tensor, axis: int | None = None, *, opset: int) -> Tensor:
        if opset >= 13:
            return function(x, -1 if axis is None else axis)
        axis = (1 if axis is None else axis) % x.dim()
        return function(x, -1) if axis == x.dim() - 1 else function(x.flatten(axis), -1).reshape(x.shape)  # all dimensions from axis on

    return softmax


reads("Softmax", opset=True)(_flat_softmax(torch.softmax))
reads("LogSoftmax", opset=True)(_flat_softmax(torch.log_softmax))


def _recurrent(kind: str, gates: tuple[int, ...]) -> Callable[..., Any]:
    """Return the function of a recurrent layer; `gates` are the places of PyTorch's gates among those of ONNX."""

    def reordered(parameter: Tensor) -> Tensor:
        parts = parameter.chunk(len(gates))
        return torch.cat([parts[gate] for gate in gates]) if len(gates) > 1 else parameter

    def layer(
        x: Tensor, weight: Tensor, hidden: Tensor, bias: Tensor | None = None, lengths: Any = None, h: Any = None, c: Any = None,
        peepholes: Any = None, *, hidden_size: int, direction: str = "forward", layout: int = 0, linear_before_reset: int = 0, results: int = 3,
        activations: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        known = [[b"Sigmoid", b"Tanh", b"Tanh"], [b"Sigmoid", b"Tanh"], [b"Tanh"]]
        odd = [name for name, value in others.items() if value] + ["layout"] * layout + ["P"] * (peepholes is not None)
        odd += ["activations"] * (activations is not None and activations[: len(activations) // len(weight)] not in known)
        odd += ["sequence_lens"] * (lengths is not None and (not isinstance(lengths, tuple) or {*lengths} != {x.shape[0]}))
        odd += ["linear_before_reset=0"] * (kind == "gru" and not linear_before_reset) + ["direction=reverse"] * (direction == "reverse")
        if odd:
            raise NotImplementedError(f"{', '.join(odd)} of a recurrent layer is not read")
        parameters, directions = [], len(weight)
        for index in range(directions):
            parameters += [reordered(weight[index]), reordered(hidden[index])]
            parameters += [] if bias is None else [reordered(each) for each in bias[index].chunk(2)]
        states = [x.new_zeros(directions, x.shape[1], hidden_size) if each is None else each for each in (h, c)[: 2 if kind == "lstm" else 1]]
        settings = (bias is not None, 1, 0.0, False, directions > 1, False)
        y, *last = getattr(torch, kind)(x, states if kind == "lstm" else states[0], parameters, *settings)
        y = y.reshape(x.shape[0], -1, directions, hidden_size).transpose(1, 2) if directions > 1 else y.unsqueeze(1)
        return (y, *last)[:results] if results > 1 else y

    return layer


reads("LSTM", weights=(1, 2, 3), results=True)(_recurrent("lstm", (0, 2, 3, 1)))
reads("GRU", weights=(1, 2, 3), results=True)(_recurrent("gru", (1, 0, 2)))
reads("RNN", weights=(1, 2, 3), results=True)(_recurrent("rnn_tanh", (0,)))

# ---- pooling and reductions --------------------------------------------------------------------------------------------------
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@reads("MaxPool")
def _max_pool(
    x: Tensor, *, kernel_shape: Any, strides: Any = None, pads: Any = None, dilations: Any = None, ceil_mode: int = 0,
    auto_pad: str = "NOTSET", storage_order: int = 0,
) -> Tensor:  # fmt: skip
    rank = len(kernel_shape)
    stride, dilation = list(strides or [1] * rank), list(dilations or [1] * rank)
    x, padding = _even(x, _pads(x.shape[2:], kernel_shape, stride, dilation, pads, auto_pad), -math.inf)
    return _MAX[rank](x, list(kernel_shape), stride, padding, dilation, bool(ceil_mode))


@reads("AveragePool")
def _average_pool(
    x: Tensor, *, kernel_shape: Any, strides: Any = None, pads: Any = None, dilations: Any = None, ceil_mode: int = 0,
    auto_pad: str = "NOTSET", count_include_pad: int = 0,
) -> Tensor:  # fmt: skip
    rank = len(kernel_shape)
    stride, ones = list(strides or [1] * rank), [1] * rank
    around = _pads(x.shape[2:], kernel_shape, stride, ones, pads, auto_pad)
    uneven = around[:rank] != around[rank:]
    if (dilations and list(dilations) != ones) or (uneven and not count_include_pad):
        raise NotImplementedError("an AveragePool with dilations, or with uneven padding that is not counted, is not read")
    x, padding = _even(x, around)
    return _AVERAGE[rank](x, list(kernel_shape), stride, padding, bool(ceil_mode), bool(count_include_pad))


def _reduction(name: str, function: Callable[[Tensor, list[int], bool], Tensor], of_numbers: Callable[[Any], Any] | None) -> None:
    def reduce(x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        if not isinstance(x, Tensor) and of_numbers is not None:
            value = of_numbers(as_row(x))
            return (value,) if keepdims else value
        if not axes and noop_with_empty_axes:
            return x
        return function(x, list(as_row(axes)) if axes is not None else list(range(x.dim())), bool(keepdims))

    reads(name)(reduce)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((each % x.dim() for each in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


for _name, _reduce, _of_row in (
    ("ReduceMean", torch.mean, None), ("ReduceSum", torch.sum, sum), ("ReduceMax", torch.amax, max), ("ReduceMin", torch.amin, min),
    ("ReduceProd", _product, math.prod), ("ReduceL1", lambda x, axes, keep: x.abs().sum(axes, keep), None),
    ("ReduceL2", lambda x, axes, keep: (x * x).sum(axes, keep).sqrt(), None),
    ("ReduceSumSquare", lambda x, axes, keep: (x * x).sum(axes, keep), None), ("ReduceLogSumExp", torch.logsumexp, None),
):  # fmt: skip
    _reduction(_name, _reduce, _of_row)


@reads("TopK", results=True)
def _top_k(x: Tensor, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1, results: int = 2) -> Any:
    return tuple(torch.topk(x, as_row(k)[0], axis, bool(largest), bool(sorted)))[:results]


@reads("CumSum")
def _cumulated(x: Tensor, axis: Any, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = as_row(axis)[0]
    total = torch.cumsum(x.flip(dim) if reverse else x, dim)
    total = total.flip(dim) if reverse else total
    return total - x if exclusive else total
