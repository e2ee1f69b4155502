"""ONNX operators as functions of tensors and numbers, one record each: what an ONNX file says, in PyTorch's calls.

Sizes and indices (what `Shape` returns, and what is computed of it alone) are Python numbers and tuples of numbers; the rest is tensors. A
function takes the inputs of its operator in order, None for one that is left out, and the attributes by name. An input that was an
attribute in older opsets has the attribute's name, so that one function serves all opsets; `opset` and `results`, the number of results,
are given to functions with such an argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Numbers = Any  # a number, or a tuple of numbers
FEW = 64  # a constant of integers with no more elements is a tuple


@dataclass(frozen=True)
class OnnxOperator:
    """An operator: the function that computes it, and what its inputs are."""

    function: Callable[..., Any]
    numbers: tuple[int, ...] = ()  # the inputs whose constants are numbers, floats too
    weights: tuple[int, ...] = ()  # the inputs whose constants train; initializers train everywhere else, too
    statistics: tuple[int, ...] = ()  # the inputs whose constants do not train
    elementwise: bool = False  # whether a constant of one float is a number


OPERATORS: dict[str, OnnxOperator] = {}


def reads(*names: str, **inputs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that declares the function of these operators."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__name__ = names[0].lower()  # in the generated code of a module
        OPERATORS.update(dict.fromkeys(names, OnnxOperator(function, **inputs)))
        return function

    return declare


# ---- numbers and tensors -----------------------------------------------------------------------------------------------------
def simplified(value: Any) -> Any:
    """Return the number or the tuple of a tensor of few integers or bools without or with one dimension; any other value unchanged."""
    if not isinstance(value, Tensor) or value.dim() > 1 or value.numel() > FEW or value.is_floating_point():
        return value
    return as_numbers(value)


def as_numbers(value: Any) -> Numbers:
    """Return the number or the tuple of a tensor without or with one dimension; any other value unchanged."""
    return (value.item() if value.dim() == 0 else tuple(value.tolist())) if isinstance(value, Tensor) else value


def as_row(value: Any) -> tuple[Any, ...]:
    """Return numbers as a tuple."""
    value = as_numbers(value)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def as_tensor(value: Any, like: Tensor | None = None) -> Tensor:
    """Return a tensor of numbers, on the device of another; a tensor unchanged."""
    return value if isinstance(value, Tensor) else torch.tensor(value, device=None if like is None else like.device)


def without(setting: Any, result: Any) -> Any:
    """Return a result, where the setting that it leaves out is not set. Raises NotImplementedError where it is."""
    if setting:
        raise NotImplementedError("one of its attributes has a value that is not read")
    return result


def _by_element(function: Callable[..., Any], *values: Numbers) -> Numbers:
    """Return a function of numbers, element by element; a number, and a tuple of one, go with tuples of any length."""
    if not any(isinstance(value, tuple) for value in values):
        return function(*values)
    rows = [as_row(value) for value in values]
    length = max(map(len, rows)) if all(rows) else 0
    return tuple(map(function, *(row * length if len(row) == 1 else row for row in rows)))


def _divide(a: Any, b: Any) -> Any:
    """Return a quotient; that of integers is rounded toward zero."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        floats = [each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float) for each in (a, b)]
        return a / b if any(floats) else torch.div(a, b, rounding_mode="trunc")
    return a / b if isinstance(a, float) or isinstance(b, float) else a // b if (a >= 0) == (b > 0) else -(-a // b)


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if any(isinstance(each, Tensor) for each in (condition, a, b)):
        return torch.where(as_tensor(condition), a, b)
    return a if condition else b


def _bound(function: Callable[[Tensor, Tensor], Tensor], side: str) -> Callable[[Any, Any], Any]:
    def bounded(a: Any, b: Any) -> Any:
        a, b = (a, b) if isinstance(a, Tensor) else (b, a)
        return function(a, b) if isinstance(b, Tensor) else torch.clamp(a, **{side: b})

    return lambda *values: reduce(bounded, values)


def _elementwise(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the function of an operator that computes each element of its result from one of every input."""

    def function(*values: Any) -> Any:
        like = next((value for value in values if isinstance(value, Tensor)), None)
        if like is None and of_numbers is not None:
            return _by_element(of_numbers, *values)
        return of_tensors(*(as_tensor(value, like) if like is None or isinstance(value, tuple) else value for value in values))

    return function


_OF_BOTH: dict[str, Any] = {  # of tensors, and of numbers
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide, "Where": _choose, "Equal": operator.eq,
    "Greater": operator.gt, "Less": operator.lt, "GreaterOrEqual": operator.ge, "LessOrEqual": operator.le, "And": operator.and_,
    "Or": operator.or_, "Xor": operator.xor, "Neg": operator.neg, "Abs": abs, "Sum": lambda *values: reduce(operator.add, values),
    "Identity": lambda x: x,
}  # fmt: skip
_OF_EACH: dict[str, tuple[Any, Any]] = {
    "Pow": (lambda a, b: a * a if isinstance(b, (int, float)) and b == 2 else torch.pow(a, b), operator.pow),
    "Max": (_bound(torch.maximum, "min"), max), "Min": (_bound(torch.minimum, "max"), min), "Not": (torch.logical_not, operator.not_),
    "Floor": (torch.floor, math.floor), "Ceil": (torch.ceil, math.ceil), "Sqrt": (torch.sqrt, math.sqrt),
}  # fmt: skip
_OF_TENSORS: dict[str, Any] = {
    "Round": torch.round, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Log": torch.log,
    "Erf": torch.erf, "Reciprocal": torch.reciprocal, "Sign": torch.sign, "Sin": torch.sin, "Cos": torch.cos, "Atan": torch.atan,
    "IsNaN": torch.isnan, "Softplus": F.softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
}  # fmt: skip
for _name, (_of_tensors, _of_numbers) in (
    {name: (each, each) for name, each in _OF_BOTH.items()} | _OF_EACH | {name: (each, None) for name, each in _OF_TENSORS.items()}
).items():
    reads(_name, elementwise=True)(_elementwise(_of_tensors, _of_numbers))


@reads("Cast")
def _cast(x: Any, to: torch.dtype, saturate: int = 1) -> Any:
    if isinstance(x, Tensor):
        return x.to(to)
    if to.is_floating_point or to is torch.bool:
        return _by_element(lambda number: number * 1.0 if to.is_floating_point else number != 0, x)
    return _by_element(math.trunc, x)  # int() would make a size that varies a constant


@reads("Clip", numbers=(1, 2))
def _clip(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    low, high = (None if bound is None or abs(bound) > 3e38 else bound for bound in (min, max))
    return F.relu6(x) if (low, high) == (0, 6) else x if low is high is None else torch.clamp(x, low, high)


@reads("PRelu", weights=(1,))
def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    per_channel = slope.dim() == x.dim() - 1 and slope.numel() == slope.shape[0] == x.shape[1]
    return F.prelu(x, slope.flatten()) if per_channel or slope.numel() == 1 else torch.where(x < 0, x * slope, x)


# ---- layers ------------------------------------------------------------------------------------------------------------------
def _window(x: Tensor, kernel: Sequence[int], window: dict[str, Any], value: float = 0.0) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Return a padded tensor, and stride, padding and dilation of a window; the padding is 0 where it differs between the two sides."""
    rank, how = len(kernel), window.get("auto_pad", "NOTSET")
    stride, dilation = (list(window.get(name) or [1] * rank) for name in ("strides", "dilations"))
    before, after = list(window.get("pads") or [0] * 2 * rank)[:rank], list(window.get("pads") or [0] * 2 * rank)[rank:]
    if how.startswith("SAME"):
        windows = zip(x.shape[2:], kernel, stride, dilation, strict=True)
        total = [max((-(-size // step) - 1) * step + (each - 1) * apart + 1 - size, 0) for size, each, step, apart in windows]
        before, after = [each // 2 for each in total], [each - each // 2 for each in total]
        before, after = (before, after) if how == "SAME_UPPER" else (after, before)
    if before == after:
        return x, stride, before, dilation
    around = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    return F.pad(x, around, value=value), stride, [0] * rank, dilation


@reads("Conv", weights=(1, 2))
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: int = 1, **window: Any) -> Tensor:
    """Return a convolution of 1 to 3 dimensions."""
    x, stride, padding, dilation = _window(x, weight.shape[2:], window)
    return (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3](x, weight, bias, stride, padding, dilation, group)


@reads("ConvTranspose", weights=(1, 2))
def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: int = 1, **window: Any) -> Tensor:
    rank, pads = weight.dim() - 2, window.get("pads")
    if window.get("auto_pad", "NOTSET") != "NOTSET" or window.get("output_shape") or (pads and pads[:rank] != pads[rank:]):
        raise NotImplementedError("auto_pad, output_shape and uneven pads of ConvTranspose are not read")
    _, stride, padding, dilation = _window(x, weight.shape[2:], window)
    more = window.get("output_padding") or [0] * rank
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    return function(x, weight, bias, stride, padding, more, group, dilation)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer: a MatMul or Gemm by a constant matrix, which is held as PyTorch holds it."""
    return F.linear(x, weight, bias)


@reads("Gemm", weights=(1, 2))
def _gemm(a: Tensor, b: Tensor, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0) -> Tensor:
    product = alpha * torch.matmul(a.t() if transA else a, b.t() if transB else b)
    return product if c is None else product + beta * c


@reads("Softmax", "LogSoftmax")
def _softmax(x: Tensor, axis: int | None = None, *, opset: int, operator: str) -> Tensor:
    axis = (-1 if opset >= 13 else 1) if axis is None else axis
    function = torch.softmax if operator == "Softmax" else torch.log_softmax
    if opset >= 13 or axis in (-1, x.dim() - 1):
        return function(x, axis)
    return function(x.flatten(axis), -1).reshape(x.shape)  # of all dimensions from `axis` on


_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}  # PyTorch's, by their places in ONNX


def by_direction(operator: str, parameter: Tensor, parts: int) -> list[list[Tensor]]:
    """Return the parts, one or two, of a recurrent layer's parameter for each direction, with the gates in PyTorch's order."""
    gates = _GATES[operator]
    split = parameter.reshape(len(parameter), parts, len(gates), -1, *parameter.shape[2:])[:, :, list(gates)].flatten(2, 3)
    return [[part.contiguous() for part in direction] for direction in split]


@reads("LSTM", "GRU", "RNN")
def recurrent(
    x: Tensor, weights: Any, h: Tensor | None, c: Tensor | None, *, hidden_size: int, direction: str = "forward", results: int,
    operator: str, **others: Any,
) -> Any:  # fmt: skip
    """Return the results of a recurrent layer; `weights` are PyTorch's parameters, one direction after the other."""
    directions = 2 if direction == "bidirectional" else 1
    same = others.pop("linear_before_reset", 0) == (operator == "GRU") and direction != "reverse"
    if not same or any(others.values()):
        raise NotImplementedError("only PyTorch's form is read: no activations, clip, layout, direction=reverse or linear_before_reset=0")
    states = [x.new_zeros(directions, x.shape[1], hidden_size) if each is None else each for each in (h, c)]
    if any(each.shape[1] != x.shape[1] for each in states):  # torch.lstm does not look
        raise RuntimeError("the initial states of a recurrent layer are of another batch size than its input")
    function: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}[operator]
    biases = len(weights) == 4 * directions
    y, *last = function(x, states if operator == "LSTM" else states[0], weights, biases, 1, 0.0, False, directions == 2, False)
    y = y.unflatten(2, (2, hidden_size)).transpose(1, 2) if directions == 2 else y.unsqueeze(1)
    return (y, *last)[:results] if results > 1 else y


# ---- pooling and reductions --------------------------------------------------------------------------------------------------
@reads("MaxPool")
def _max_pool(x: Tensor, *, kernel_shape: Any, ceil_mode: int = 0, **window: Any) -> Tensor:
    x, stride, padding, dilation = _window(x, kernel_shape, window, -math.inf)
    return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel_shape) - 1](x, kernel_shape, stride, padding, dilation, bool(ceil_mode))


@reads("AveragePool")
def _average_pool(x: Tensor, *, kernel_shape: Any, ceil_mode: int = 0, count_include_pad: int = 0, **window: Any) -> Tensor:
    padded, stride, padding, dilation = _window(x, kernel_shape, window)
    if max(dilation) > 1 or (padded is not x and not count_include_pad):
        raise NotImplementedError("an AveragePool with dilations, or with uneven padding that is not counted, is not read")
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel_shape) - 1]
    return function(padded, kernel_shape, stride, padding, bool(ceil_mode), bool(count_include_pad))


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return reduce(lambda product, axis: product.prod(axis, keepdim=keep), sorted((axis % x.dim() for axis in axes), reverse=True), x)


def _reduction(function: Callable[..., Tensor], of_numbers: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    def reduction(x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        if not isinstance(x, Tensor) and of_numbers is not None:
            value = of_numbers(as_row(x))
            return (value,) if keepdims else value
        if not axes and noop_with_empty_axes:
            return x
        return function(x, list(as_row(axes)) if axes is not None else list(range(x.dim())), bool(keepdims))

    return reduction


reads("MatMul", weights=(0, 1))(lambda a, b: torch.matmul(a, b))
reads("LayerNormalization", weights=(1, 2))(
    lambda x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1: F.layer_norm(x, list(x.shape[axis:]), scale, bias, epsilon)
)
reads("BatchNormalization", weights=(1, 2), statistics=(3, 4))(
    lambda x, scale, bias, mean, var, *, epsilon=1e-5, momentum=0.9, training_mode=0, spatial=1: without(
        training_mode or spatial != 1, F.batch_norm(x, mean, var, scale, bias, False, 0.1, epsilon)
    )
)
reads("InstanceNormalization", weights=(1, 2))(
    lambda x, scale, bias, epsilon=1e-5: F.instance_norm(x, None, None, scale, bias, eps=epsilon)
)
reads("Mod", elementwise=True)(lambda a, b, fmod=0: (torch.fmod if fmod else _elementwise(operator.mod, operator.mod))(a, b))
_SIMPLE: dict[str, Callable[..., Any]] = {
    "CastLike": lambda x, like: x.to(like.dtype),
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Selu": lambda x, alpha=1.6732632, gamma=1.050701: F.elu(x, alpha) * gamma,
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (
        F.hardsigmoid(x) if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5 else torch.clamp(x * alpha + beta, 0.0, 1.0)
    ),
    "Dropout": lambda x, *_, **__: x,
    "Einsum": lambda *tensors, equation: torch.einsum(equation, *tensors),
    "GlobalAveragePool": lambda x: x.mean(list(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(list(range(2, x.dim())), keepdim=True),
    "ArgMax": lambda x, axis=0, keepdims=1, select_last_index=0: without(select_last_index, torch.argmax(x, axis, bool(keepdims))),
    "ArgMin": lambda x, axis=0, keepdims=1, select_last_index=0: without(select_last_index, torch.argmin(x, axis, bool(keepdims))),
    "ReduceMean": _reduction(torch.mean), "ReduceSum": _reduction(torch.sum, sum), "ReduceProd": _reduction(_product, math.prod),
    "ReduceMax": _reduction(torch.amax, max), "ReduceMin": _reduction(torch.amin, min),
    "ReduceL1": _reduction(lambda x, axes, keep: x.abs().sum(axes, keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: (x * x).sum(axes, keep).sqrt()),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: (x * x).sum(axes, keep)), "ReduceLogSumExp": _reduction(torch.logsumexp),
    "TopK": lambda x, k, *, axis=-1, largest=1, sorted=1, results=2: tuple(
        torch.topk(x, as_row(k)[0], axis, bool(largest), bool(sorted))
    )[:results],
}  # fmt: skip
for _name, _function in _SIMPLE.items():
    reads(_name)(_function)
