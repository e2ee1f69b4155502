"""PyTorch's functions in the call forms of the operator table: ATen's, wrappers of other functions, methods, operators and functions.

    torch.ops.aten.convolution(…)   →   F.conv2d(…)
    torch.argmax(x)                 →   torch.argmax(x.flatten(), 0)
    a.__add__(b)                    →   operator.add(a, b)

Exported programs speak ATen (`python_form`). The moves, copies and concatenations of a function that only calls others are recorded as
those others (`written_out`): each form has the arguments of the function that it replaces and gives the same numbers. If one returns
NotImplemented, the function itself is recorded with these arguments. `spelling_of` gives the call form of anything else.
"""

import builtins
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fxquant.frontend.environment import calls_from
from fxquant.frontend.values import COMPARISONS, ON_TENSORS, UNARY, Functions, TracedTensor, active, python_name, refuse
from fxquant.ir import functional

_END = 2**63 - 1  # how ATen says that a slice goes to the end


def python_form(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the function of PyTorch with this meaning and these arguments; the overload itself where there is none.

    Most have the name and the arguments of a function, or of a method, of PyTorch; others are spelled here.
    """
    name = overload._schema.name.partition("::")[2]
    special = _SPECIAL.get(name)
    if special is not None:
        return special
    if name.endswith("_") and name[:-1] in _WITH_FLAG:
        function = _WITH_FLAG[name[:-1]]
        return lambda *args, **kwargs: function(*args, **kwargs, inplace=True)
    if name in _WITH_FLAG:
        return _WITH_FLAG[name]
    public = next((getattr(home, name) for home in (torch, Tensor, torch._C._nn) if hasattr(home, name)), None)
    return overload if public is None or name.startswith("_") else public


def _elu(input: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False) -> Tensor:
    return F.elu(input, alpha, inplace=inplace) if (scale, input_scale) == (1.0, 1.0) else F.selu(input, inplace=inplace)


# Functions with a flag for their in-place form.
_WITH_FLAG: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.selu, F.celu)
} | {"elu": _elu}


def _batch_norm(input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *_: Any) -> Any:
    return F.batch_norm(input, mean, var, weight, bias, training, momentum, eps)


def _layer_norm(input: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    return F.layer_norm(input, shape, weight, bias, eps)


def _convolution(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:
    rank = len(stride)
    if transposed:
        return getattr(F, f"conv_transpose{rank}d")(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return getattr(F, f"conv{rank}d")(input, weight, bias, stride, padding, dilation, groups)


def _pool(name: str, **fixed: Any) -> Callable[..., Any]:
    def pool(input: Any, kernel: Any, stride: Any = (), *rest: Any, **named: Any) -> Any:
        return getattr(F, name)(input, kernel, stride or None, *rest, **named, **fixed)

    return pool


def _upsample(mode: str, aligned: bool) -> Callable[..., Any]:
    """aten::upsample_…: output sizes, then align_corners where the mode has it, then scales: a list, or one for each dimension."""

    def resize(input: Any, size: Any, *rest: Any, **named: Any) -> Any:
        align = rest[0] if aligned else None
        factors = rest[1:] if aligned else rest
        scales = factors[0] if factors and isinstance(factors[0], (list, tuple)) else [scale for scale in factors if scale is not None]
        return F.interpolate(input, size=size, scale_factor=list(scales) or None if size is None else None, mode=mode, align_corners=align)

    return resize


def _slice(input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    start, end = None if start in (0, None) else start, None if end is None or (type(end) is int and end >= _END) else end
    if start is None and end is None and step == 1:
        return input
    places = (*[slice(None)] * (dim % input.dim()), slice(start, end, step))
    return input[places]


def _put_at_indices(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if accumulate or all(index is not None for index in indices):
        return torch.index_put(input, indices, values, accumulate)
    result = input.clone()
    result[tuple(slice(None) if index is None else index for index in indices)] = values
    return result


def _dropout(name: str) -> Callable[..., Any]:
    return lambda input, p, train: getattr(F, name)(input, p, train)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm, "cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": lambda *args: (_batch_norm(*args[:5], False, *args[5:]), None, None),
    "instance_norm": lambda x, w, b, mean, var, own, momentum, eps, *_: F.instance_norm(x, mean, var, w, b, own, momentum, eps),
    "layer_norm": _layer_norm, "native_layer_norm": lambda *args: (_layer_norm(*args), None, None),
    "rms_norm": lambda input, shape, weight=None, eps=None: F.rms_norm(input, shape, weight, eps),
    "group_norm": lambda input, groups, weight=None, bias=None, eps=1e-5, *_: F.group_norm(input, groups, weight, bias, eps),
    "native_group_norm": lambda input, weight, bias, n, c, hw, groups, eps: (F.group_norm(input, groups, weight, bias, eps), None, None),
    "convolution": _convolution, **{f"{kind}_pool{rank}d": _pool(f"{kind}_pool{rank}d") for kind in ("max", "avg") for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices": _pool(f"max_pool{rank}d", return_indices=True) for rank in (2, 3)},
    **{f"adaptive_avg_pool{rank}d": getattr(F, f"adaptive_avg_pool{rank}d") for rank in (2, 3)},
    **{f"_adaptive_avg_pool{rank}d": getattr(F, f"adaptive_avg_pool{rank}d") for rank in (2, 3)},
    **{f"upsample_nearest{rank}d": _upsample("nearest", False) for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": _upsample("nearest-exact", False) for rank in (1, 2, 3)},
    "upsample_linear1d": _upsample("linear", True), "upsample_bilinear2d": _upsample("bilinear", True),
    "upsample_bicubic2d": _upsample("bicubic", True), "upsample_trilinear3d": _upsample("trilinear", True),
    "softmax": lambda input, dim, dtype=None: F.softmax(input, dim, dtype=dtype), "_softmax": lambda input, dim, _: F.softmax(input, dim),
    "log_softmax": lambda input, dim, dtype=None: F.log_softmax(input, dim, dtype=dtype),
    "_log_softmax": lambda input, dim, _: F.log_softmax(input, dim), "glu": F.glu, "pad": F.pad,
    "constant_pad_nd": lambda input, pad, value=0: F.pad(input, list(pad), "constant", value),
    "embedding": lambda weight, indices, padding_idx=-1, *flags: F.embedding(
        indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, *flags
    ),
    **{name: _dropout(name) for name in ("dropout", "alpha_dropout")}, "feature_dropout": _dropout("dropout2d"),
    "native_dropout": lambda input, p, train: (F.dropout(input, p, bool(train)), None), "slice": _slice,
    "select": lambda input, dim, index: input[(slice(None),) * (dim % input.dim()) + (index,)],
    "index": lambda input, indices: input[tuple(slice(None) if index is None else index for index in indices)],
    "index_put": _put_at_indices, "_to_copy": lambda input, *, dtype=None, **_: input if dtype is None else input.to(dtype),
    "_unsafe_view": torch.reshape, **dict.fromkeys(("lift_fresh", "lift_fresh_copy", "alias"), lambda input: input),
    "detach": Tensor.detach, "detach_": Tensor.detach_, "sym_size": lambda input, dim: input.shape[dim],
}  # fmt: skip

CHECKS = frozenset((
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
))  # fmt: skip


# ---- functions of PyTorch that only call others ----------------------------------------------------------------------


# keywords that PyTorch accepts as well -> its own
NUMPY = {"axis": "dim", "keepdims": "keepdim", "x1": "input", "a": "input", "x2": "other"}
WRITTEN: dict[Callable[..., Any], Callable[..., Any]] = {}


def written_out(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of the function's decomposition into other calls, or NotImplemented if it has none."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = getattr(function, function.overloads()[0])  # type: ignore[no-untyped-call]  # all of them have one Python form
    if isinstance(function, torch._ops.OpOverload):
        form = python_form(function)
        return NotImplemented if form is function or function._schema.is_mutable else form(*args, **kwargs)
    try:
        written = WRITTEN.get(function)
        return NotImplemented if written is None else written(*args, **kwargs)
    except TypeError:  # it cannot be hashed, or this is an overload with other arguments
        return NotImplemented


def by_own_names(function: Any, kwargs: Any) -> Any:
    """Rename keywords that PyTorch accepts as aliases, such as `axis` and `keepdims`, to its own; return the keyword arguments."""
    if not kwargs or NUMPY.keys().isdisjoint(kwargs) or inspect.isfunction(function):
        return kwargs
    return {NUMPY.get(name, name): value for name, value in kwargs.items()}


def _stands_for(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def declare(form: Callable[..., Any]) -> Callable[..., Any]:
        WRITTEN.update(dict.fromkeys(functions, form))
        return form

    return declare


def _methods(*names: str) -> list[Any]:
    """Return the functions of these names, and the methods."""
    return [getattr(home, name) for name in names for home in (torch, Tensor) if hasattr(home, name)]


def _fixed(input: Any) -> bool:
    """Return whether no size of a tensor depends on the batch."""
    return all(type(size) is int for size in input.shape)


@_stands_for(Tensor.__getitem__)
def _by_truth_values(input: Tensor, index: Any) -> Any:
    """Return `input[index]` where the index holds lists of booleans."""

    def is_list(place: Any) -> bool:
        return type(place) is list and bool(place) and all(type(item) is bool for item in place)

    if isinstance(index, _AsGiven):
        return input
    places = index if isinstance(index, tuple) else (index,)
    if not any(map(is_list, places)):
        return NotImplemented
    return input[tuple(torch.tensor(place, device="cpu") if is_list(place) else place for place in places)]


@_stands_for(torch._assert, torch._assert_async)
def _asserted(condition: Any, *_: Any, **__: Any) -> Any:
    if not isinstance(condition, TracedTensor):
        return NotImplemented
    active().note("an assertion about the content of a tensor is left out: the graph does not check it")
    return None


@_stands_for(*_methods("conj", "resolve_conj", "resolve_neg"), torch.real)
def _real(input: Tensor) -> Any:
    return NotImplemented if input.is_complex() else input


@_stands_for(*_methods("conj_physical"))
def _real_copy(input: Tensor) -> Any:
    return NotImplemented if input.is_complex() else input.clone()


@_stands_for(Tensor.new_tensor)
def _new_tensor(input: Tensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    if isinstance(data, Tensor) or not _of_numbers(data):
        return NotImplemented
    return torch.tensor(data, dtype=dtype or input.dtype, device=device or input.device)


def _of_numbers(data: Any) -> bool:
    return all(map(_of_numbers, data)) if isinstance(data, tuple | list) else type(data) in (int, float, bool)


for _name in ("convolution", "native_layer_norm", "native_group_norm"):
    WRITTEN[getattr(torch, _name)] = python_form(getattr(torch.ops.aten, _name).default)


def _flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` (a reduction over all elements) as one over a flattened row; NotImplemented if a size depends on the batch."""

    def reduce(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        has_dim = args or "dim" in kwargs or "axis" in kwargs
        if (has_dim and (args[0] if args else kwargs.get("dim", 0)) is not None) or not input.dim() or not _fixed(input):
            return NotImplemented
        named = {name: value for name, value in kwargs.items() if name not in ("dim", "keepdim")}
        keepdim = bool(kwargs.get("keepdim", args[1] if len(args) > 1 else False))
        result = function(input.flatten(), **{**named, "dim": 0})
        result = result if isinstance(result, Tensor) else result.values
        return result.reshape([*result.shape, *[1] * input.dim()]) if keepdim else result

    return reduce


for _reduction in (torch.argmax, torch.argmin, torch.any, torch.all, torch.median, torch.nanmedian):
    for _function in _methods(_reduction.__name__):
        WRITTEN[_function] = _flattened(_reduction)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*tensors: Any) -> Any:
        several = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
        return tuple(function(each) for each in several) if several is not tensors or len(tensors) > 1 else NotImplemented

    return apply


for _function in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d):
    WRITTEN[_function] = _each(_function)


# ---- Packed sequences: their data is the padded sequences, [batch, steps, …], since the sum of lengths has no fact -------
def _lengths_of(sizes: Tensor) -> Any:
    """Return the lengths, int64 (batch,), of a `PackedSequence` by its batch sizes; raise TraceError if forward did not pack it."""
    lengths = active().lengths.get(getattr(sizes, "node", id(sizes)))
    if lengths is None:
        because = "how many items each step has is not known before the graph runs, and a graph has a fixed number of operations"
        remedy = "let forward take the padded sequences and their lengths, and call torch.nn.utils.rnn.pack_padded_sequence in it"
        refuse("a packed sequence that forward did not make of padded ones cannot be traced", because=because, remedy=remedy)
    return lengths


def _steps(padded: Tensor) -> Tensor:
    return active().call(torch.arange, (padded.shape[1],), {})  # type: ignore[no-any-return]


class _AsGiven(Tensor):
    """The identity permutation of a batch, which packing returns here: padded sequences are not sorted by length."""


@_stands_for(*_methods("sort"))
def _sorted_for_packing(input: Tensor, *_: Any, **__: Any) -> Any:
    return (input, torch.arange(int(input.shape[0])).as_subclass(_AsGiven)) if calls_from("torch/nn/utils/rnn.py") else NotImplemented


@_stands_for(*_methods("index_select"))
def _selected(input: Tensor, dim: int, index: Any) -> Any:
    return input if isinstance(index, _AsGiven) else NotImplemented


@_stands_for(torch._pack_padded_sequence)
def _packed(input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    padded, lengths = input if batch_first else input.transpose(0, 1), lengths.clamp(min=1)  # PyTorch refuses 0, which exporters draw
    sizes = (lengths > _steps(padded).unsqueeze(1)).sum(1)
    active().lengths[getattr(sizes, "node", id(sizes))] = lengths
    return padded, sizes


@_stands_for(torch._pad_packed_sequence)
def _padded(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int) -> Any:
    lengths = _lengths_of(batch_sizes)
    active().warn("pad_packed_sequence returns all steps, as with total_length=x.shape[1]; the longest sequence may have fewer")
    outside = (_steps(data) >= lengths.unsqueeze(1)).reshape(*data.shape[:2], *[1] * (data.dim() - 2))
    padded = data.masked_fill(outside, padding_value)
    if total_length != data.shape[1]:
        padded = F.pad(padded, (*[0, 0] * (data.dim() - 2), 0, total_length - data.shape[1]), value=padding_value)
    return padded if batch_first else padded.transpose(0, 1), lengths


def over_packed(layer: nn.RNNBase, sequence: PackedSequence, hx: Any = None) -> Any:
    """Return what a recurrent layer makes of a packed sequence: a `PackedSequence` of its outputs, and its last states."""
    lengths = _lengths_of(sequence.batch_sizes)
    kind, initial = layer.mode.lower().removeprefix("rnn_"), None if hx is None else layer.permute_hidden(hx, sequence.sorted_indices)
    settings = kind, layer.num_layers, layer.bidirectional, layer.dropout
    places = (lengths.unsqueeze(1) - _steps(sequence.data) - 1).abs().unsqueeze(2)
    arguments = (sequence.data, initial, places, list(layer._flat_weights), *settings)
    output, *last = active().record("call_function", functional.over_lengths, functional.over_lengths, arguments, {})
    state: Any = tuple(last) if kind == "lstm" else last[0]
    return sequence._replace(data=output), layer.permute_hidden(state, sequence.unsorted_indices)


# ---- The call form of a PyTorch function in the graph: a method, an operator or a function ---------------------------
@dataclass(frozen=True)
class Spelling:
    """One entry of the graph's vocabulary."""

    op: str  # op, target: as in an `fx.Node`
    target: Any
    function: Callable[..., Any]  # the function that is run to infer the shape of the result
    swapped: bool = False  # whether the two arguments change places
    mutates: bool = False  # whether the original changes its first argument; `target` does not
    content: bool = True  # whether the result's content follows from the arguments
    flag: int | None = None  # position of an argument named `inplace`, or None


# Python's operators, and those that PyTorch reports by these names when the left operand is not a traced tensor.
_PYTHON: Functions = (*ON_TENSORS, *UNARY, *COMPARISONS, operator.getitem)
_DUNDERS = {python_name(function): function for function in _PYTHON} | {"div": operator.truediv}
_OPERATORS = {
    function.__name__: function
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.matmul, operator.pow, operator.neg),
        *(operator.gt, operator.ge, operator.lt, operator.le),
    )
} | {"div": operator.truediv, "true_divide": operator.truediv, "remainder": operator.mod}
_FUNCTIONAL: dict[str, Callable[..., Any]] = {"copy_": functional.copy, "fill_": functional.fill, "zero_": functional.zero}
_NOT_MUTATING = frozenset(("requires_grad_", "retain_grad", "share_memory_"))
_REFUSED = frozenset((
    "resize_", "resize_as_", "set_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "apply_", "map_", "as_strided_", "fill_diagonal_",
))  # fmt: skip
_RANDOM = frozenset((
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli", "multinomial", "poisson",
))  # fmt: skip
_WITHOUT_CONTENT = _RANDOM | frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
))  # fmt: skip


def python_operator(func: Any) -> Callable[..., Any] | None:
    """Return the operator a tensor method stands for if it was called with as many operands as the operator has."""
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    function = _OPERATORS.get(name[:-1] if in_place else name)
    return function if function is not None and is_method(func) else None


def is_random(func: Any) -> bool:
    """Return whether a function draws random numbers, so that it must be recorded even if its arguments are constants."""
    return getattr(func, "__name__", None) in _RANDOM


def is_method(func: Any) -> bool:
    """Return whether a function is a method of `torch.Tensor`, or wrapped for an operator by PyTorch: for `**` it reports `pow`."""
    method = getattr(torch.Tensor, func.__name__, None)
    return method is not None and bool(method == func or method == getattr(func, "__wrapped__", None))


@functools.cache
def spelling_of(func: Any) -> Spelling:
    """Return the call form of a function as `__torch_function__` or `__torch_dispatch__` reported it."""
    if isinstance(func, torch._ops.OpOverload):
        return _overload(func)
    name: str = getattr(func, "__name__", str(func))
    content = name not in _WITHOUT_CONTENT
    if name in _REFUSED:
        _refuse_in_place(name)
    if name.startswith("__") and name.endswith("__"):
        return _dunder(func, name[2:-2])
    if name.endswith("_") and not name.startswith("_") and name not in _NOT_MUTATING:
        return _in_place(func, name)
    if is_method(func):
        return Spelling("call_method", name, func, content=content)
    return Spelling("call_function", func, func, content=content, flag=_inplace_position(func))


def _dunder(func: Any, name: str) -> Spelling:
    if name == "setitem":
        return Spelling("call_function", functional.setitem, functional.setitem, mutates=True)
    if name in _DUNDERS:
        return Spelling("call_function", _DUNDERS[name], _DUNDERS[name])
    if name[0] in "ri" and name[1:] in _DUNDERS:
        function = _DUNDERS[name[1:]]
        return Spelling("call_function", function, function, swapped=name[0] == "r", mutates=name[0] == "i")
    return Spelling("call_method", f"__{name}__", func)


def _in_place(func: Any, name: str) -> Spelling:
    if name in _FUNCTIONAL and is_method(func):
        return Spelling("call_function", _FUNCTIONAL[name], _FUNCTIONAL[name], mutates=True)
    if is_method(func):
        function = getattr(torch.Tensor, name[:-1], None)
        if function is not None:
            return Spelling("call_method", name[:-1], function, mutates=True)
    for home in (torch, torch.nn.functional):
        if getattr(home, name, None) is func and hasattr(home, name[:-1]):
            function = getattr(home, name[:-1])
            return Spelling("call_function", function, function, mutates=True)
    return _refuse_in_place(name)


def _overload(func: torch._ops.OpOverload) -> Spelling:
    if not func._schema.is_mutable:
        return Spelling("call_function", func, func)
    packet, overload = func._schema.name.partition("::")[2], func._schema.overload_name
    pure = getattr(getattr(torch.ops.aten, packet[:-1], None), overload or "default", None) if packet.endswith("_") else None
    if pure is None or pure._schema.is_mutable:
        return _refuse_in_place(str(func))
    return Spelling("call_function", pure, pure, mutates=True)


def _refuse_in_place(name: str) -> Spelling:
    because = "a graph computes new tensors and changes none, and this operation has no out-of-place form"
    remedy = "compute a new tensor instead of changing one"
    refuse(f"the in-place operation {name} cannot be traced", because=because, remedy=remedy)


def _inplace_position(func: Any) -> int | None:
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


_NODE_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))


def property_name(func: Any) -> str | None:
    """Return the name of the tensor property `func` reads, or None if it is not a property getter."""
    if getattr(func, "__name__", None) != "__get__":
        return None
    owner = func.__self__
    return owner.fget.__name__ if isinstance(owner, property) and owner.fget is not None else owner.__name__


@functools.cache
def property_spelling(name: str) -> Spelling | None:
    """Return the call form with which reading a property is recorded; None if its value is known while tracing."""
    if name in _NODE_PROPERTIES:
        return Spelling("call_function", builtins.getattr, lambda tensor, _: getattr(tensor, name))
    return Spelling("call_method", "detach", torch.Tensor.detach) if name == "data" else None
