"""ONNX operators as functions of tensors and numbers, one record each: what an ONNX file says, in PyTorch's calls.

Sizes and indices (what `Shape` returns, and what is computed of it alone) are Python numbers and tuples of numbers; the rest is tensors. A
function takes the inputs of its operator in order, None for one that is left out, and the attributes by name. An input that was an
attribute in older opsets has the attribute's name, so that one function serves all opsets; `opset` and `results`, the number of results,
are given to functions with such an argument.
"""

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
    """Return a decorator that makes a function the record of the ONNX operators `names`."""

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
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide, "Equal": operator.eq,
    "Greater": operator.gt, "Less": operator.lt, "GreaterOrEqual": operator.ge, "LessOrEqual": operator.le, "And": operator.and_,
    "Or": operator.or_, "Xor": operator.xor, "Neg": operator.neg, "Abs": abs, "Sum": lambda *values: reduce(operator.add, values),
    "Identity": lambda x: x,
}  # fmt: skip
_OF_EACH: dict[str, tuple[Any, Any]] = {
    "Pow": (lambda a, b: a * a if isinstance(b, (int, float)) and b == 2 else torch.pow(a, b), operator.pow),
    "Max": (_bound(torch.maximum, "min"), max), "Min": (_bound(torch.minimum, "max"), min), "Not": (torch.logical_not, operator.not_),
    "Where": (lambda c, a, b: torch.where(as_tensor(c), a, b), lambda c, a, b: a if c else b),
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


def _reduction(function: Callable[..., Tensor], of_numbers: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    def reduction(x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        if not isinstance(x, Tensor) and of_numbers is not None:
            value = of_numbers(as_row(x))
            return (value,) if keepdims else value
        if not axes and noop_with_empty_axes:
            return x
        return function(x, list(as_row(axes)) if axes is not None else list(range(x.dim())), bool(keepdims))

    return reduction


# ---- shapes, indices, padding and interpolation ---------------------------------------------------------------------------------
@reads("Reshape")
def reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    """Return a tensor in another shape; a size of 0 is the tensor's own. Numbers become a number or a tuple."""
    sizes = as_row(shape)
    if not isinstance(x, Tensor) and len(sizes) < 2:
        return as_row(x) if sizes else as_row(x)[0]
    return as_tensor(x).reshape([x.shape[dim] if size == 0 and not allowzero else size for dim, size in enumerate(sizes)])


@reads("Unsqueeze")
def _unsqueeze(x: Any, axes: Any) -> Any:
    dims = as_row(axes)
    if isinstance(x, (int, float)) and len(dims) == 1:
        return (x,)
    x = as_tensor(x)
    for dim in sorted(dim % (x.dim() + len(dims)) for dim in dims):
        x = x.unsqueeze(dim)
    return x


@reads("Concat")
def _concatenated(*values: Any, axis: int) -> Any:
    if any(isinstance(value, Tensor) for value in values):
        return torch.cat([as_tensor(value) for value in values], axis)
    return tuple(number for value in values for number in as_row(value))


@reads("Split")
def _split(x: Any, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, results: int) -> Any:
    size = x.shape[axis] if isinstance(x, Tensor) else len(x)
    sizes = list(as_row(split)) if split is not None else [-(-size // results)] * (results - 1)
    sizes += [size - sum(sizes)] * (split is None)
    parts = (
        torch.split(x, sizes, axis) if isinstance(x, Tensor) else [x[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    )
    return tuple(parts) if results > 1 else parts[0]


@reads("Slice")
def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    begins, stops = as_row(starts), as_row(ends)
    dims, strides = as_row(axes) if axes is not None else range(len(begins)), as_row(steps) if steps is not None else (1,) * len(begins)
    index = [slice(None)] * (x.dim() if isinstance(x, Tensor) else 1)
    for dim, begin, stop, stride in zip(dims, begins, stops, strides, strict=True):
        if stride > 0:
            index[dim] = slice(None if begin == 0 else begin, None if stop >= 2**31 - 1 else stop, None if stride == 1 else stride)
        elif (begin == -1 or begin >= x.shape[dim] - 1) and stop <= -(2**31) and stride == -1:
            x = x.flip(dim)
        else:
            raise NotImplementedError("a Slice with a negative step is read only where it reverses a whole dimension")
    while len(index) > 1 and index[-1] == slice(None):
        index.pop()
    return x[tuple(index)] if isinstance(x, Tensor) else x[index[0]]


@reads("Gather")
def _gather(x: Any, indices: Any, axis: int = 0) -> Any:
    if not isinstance(x, Tensor) and not isinstance(indices, Tensor):
        return tuple(x[index] for index in indices) if isinstance(indices, tuple) else x[indices]
    x = as_tensor(x)
    if isinstance(indices, int):
        return x.select(axis, indices)
    negative = isinstance(indices, tuple) and any(index < 0 for index in indices)
    indices = as_tensor([index % x.shape[axis] for index in indices] if negative else indices, x)
    if isinstance(x, torch.nn.Parameter) and x.dim() == 2 and axis == 0:
        return F.embedding(indices, x)
    return torch.index_select(x, axis, indices) if indices.dim() == 1 else x[(slice(None),) * (axis % x.dim()) + (indices,)]


@reads("ConstantOfShape")
def _filled(shape: Any, value: float = 0.0) -> Any:
    sizes = as_row(shape)
    few = len(sizes) == 1 and type(value) is not float and type(sizes[0]) is int and sizes[0] <= FEW
    return (value,) * sizes[0] if few else torch.full(sizes, value)


@reads("Expand")
def _broadcast(x: Any, shape: Any) -> Any:
    sizes = as_row(shape)
    if not isinstance(x, Tensor) and len(sizes) == 1 and type(sizes[0]) is int and sizes[0] <= FEW:
        return as_row(x) * (sizes[0] if len(as_row(x)) == 1 else 1)
    x = as_tensor(x)
    sizes = (1,) * (x.dim() - len(sizes)) + sizes
    return x.expand([-1 if dim >= len(sizes) - x.dim() and size == 1 else size for dim, size in enumerate(sizes)])


@reads("DepthToSpace")
def _to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@reads("Pad", numbers=(2,))
def _padded(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    around, dims = as_row(pads), range(x.dim()) if axes is None else [dim % x.dim() for dim in as_row(axes)]
    pairs = {dim: (around[index], around[index + len(dims)]) for index, dim in enumerate(dims)}
    flat = [side for dim in reversed(range(x.dim())) for side in pairs.get(dim, (0, 0))]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    if mode == "constant":
        return F.pad(x, flat, value=0.0 if value is None else as_row(value)[0])
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


@reads("Resize", "Upsample", numbers=(1, 2))
def _resized(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, opset: int, mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor", coordinate_transformation_mode: str = "half_pixel", **others: Any,
) -> Tensor:  # fmt: skip
    if opset < 11:  # these had no roi, counted from the corner and rounded down
        scales, coordinate_transformation_mode, nearest_mode = roi if scales is None else scales, "asymmetric", "floor"
    antialias = bool(others.pop("antialias", 0))
    spatial, place = x.dim() - 2, coordinate_transformation_mode
    factors, wanted = (None if each in (None, ()) else [*as_row(each)] for each in (scales, sizes))
    rest = [(name, value) for name, value in others.items() if value not in (0, None, "stretch") and name != "extrapolation_value"]
    rest = [pair for pair in rest if pair not in (("cubic_coeff_a", -0.75), ("axes", [*range(2, x.dim())]))]
    whole = factors is not None and all(float(factor).is_integer() for factor in factors)
    down = (place, nearest_mode) == ("asymmetric", "floor") or (whole and place != "asymmetric" and nearest_mode == "round_prefer_floor")
    read = down if mode == "nearest" else place in ("half_pixel", "pytorch_half_pixel", "align_corners")
    if rest or not read or any(factor != 1 for factor in (factors or [])[:-spatial]):
        raise NotImplementedError(f"Resize is not read with {mode}, {place}, {nearest_mode}, scales={factors}, {rest}")
    kind = {"nearest": mode, "linear": {1: mode, 2: "bilinear", 3: "trilinear"}[spatial], "cubic": "bicubic"}[mode]
    how = {} if mode == "nearest" else {"align_corners": place == "align_corners", "antialias": antialias}
    if wanted is not None:
        return F.interpolate(x, size=wanted[-spatial:], mode=kind, **how)
    return F.interpolate(x, scale_factor=[float(factor) for factor in (factors or [])[-spatial:]], mode=kind, **how)


def _positive(x: Tensor, indices: Any, axis: int) -> Tensor:
    indices = as_tensor(indices, x)
    return torch.where(indices < 0, indices + x.shape[axis], indices)


# ---- operators that are one call ---------------------------------------------------------------------------------------------
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
reads("Range", numbers=(0, 1, 2))(lambda start, limit, delta: torch.arange(start, limit, delta))
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
    "ReduceMean": _reduction(torch.mean), "ReduceSum": _reduction(torch.sum, sum), "ReduceProd": _reduction(
        lambda x, axes, keep: reduce(lambda row, axis: row.prod(axis, keepdim=keep), sorted(axis % x.dim() for axis in axes)[::-1], x),
        math.prod,
    ),
    "ReduceMax": _reduction(torch.amax, max), "ReduceMin": _reduction(torch.amin, min),
    "ReduceL1": _reduction(lambda x, axes, keep: x.abs().sum(axes, keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: (x * x).sum(axes, keep).sqrt()),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: (x * x).sum(axes, keep)), "ReduceLogSumExp": _reduction(torch.logsumexp),
    "TopK": lambda x, k, *, axis=-1, largest=1, sorted=1, results=2: tuple(
        torch.topk(x, as_row(k)[0], axis, bool(largest), bool(sorted))
    )[:results],
    "Shape": lambda x, start=0, end=None: (tuple(x.shape) if isinstance(x, Tensor) else (len(x),) * isinstance(x, tuple))[start:end],
    "Size": lambda x: math.prod(x.shape) if isinstance(x, Tensor) else len(as_row(x)),
    "Transpose": lambda x, perm=None: x.permute(perm or [*reversed(range(x.dim()))]) if isinstance(x, Tensor) else x,
    "Flatten": lambda x, axis=1: torch.flatten(x, 1) if axis == 1 else x.reshape(math.prod(x.shape[:axis]), -1),
    "Squeeze": lambda x, axes=None: (
        as_row(x)[0] if not isinstance(x, Tensor) else x.squeeze() if axes is None else x.squeeze(list(as_row(axes)))
    ),
    "Tile": lambda x, repeats: as_tensor(x).repeat(as_row(repeats)),
    "GatherND": lambda x, indices, batch_dims=0: without(batch_dims, x[as_tensor(indices, x).unbind(-1)]),
    "GatherElements": lambda x, indices, axis=0: torch.gather(x, axis, _positive(x, indices, axis)),
    "ScatterElements": lambda x, indices, updates, axis=0: torch.scatter(x, axis, _positive(x, indices, axis), updates),
    "GridSample": lambda x, grid, mode="bilinear", padding_mode="zeros", align_corners=0: F.grid_sample(
        x, grid, str({"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)), padding_mode, bool(align_corners)
    ),
    "Trilu": lambda x, k=0, upper=1: (torch.triu if upper else torch.tril)(x, as_row(k)[0]),
    "CumSum": lambda x, axis, exclusive=0, reverse=0: without(exclusive or reverse, torch.cumsum(x, as_row(axis)[0])),
}  # fmt: skip
for _name, _function in _SIMPLE.items():
    reads(_name)(_function)
