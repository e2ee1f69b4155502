"""The functions of PyTorch that ATen operators stand for: an exported program speaks ATen, the operator table speaks PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
        return _in_place(_WITH_FLAG[name[:-1]])
    if name in _WITH_FLAG:
        return _WITH_FLAG[name]
    found = next((getattr(home, name) for home in (torch, Tensor, torch._C._nn) if hasattr(home, name)), None)
    return overload if found is None or name.startswith("_") else found


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs, inplace=True)


def _elu(input: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False) -> Tensor:
    if (scale, input_scale) != (1.0, 1.0):
        return F.selu(input, inplace=inplace)
    return F.elu(input, alpha, inplace=inplace)


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


def _max_pool(rank: int, indices: bool) -> Callable[..., Any]:
    def pool(input: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
        function = getattr(F, f"max_pool{rank}d")
        return function(input, kernel, stride or None, padding, dilation, ceil_mode, return_indices=indices)

    return pool


def _avg_pool(rank: int) -> Callable[..., Any]:
    def pool(input: Any, kernel: Any, stride: Any = (), *rest: Any, **named: Any) -> Any:
        return getattr(F, f"avg_pool{rank}d")(input, kernel, stride or None, *rest, **named)

    return pool


def _upsample(mode: str, aligned: bool) -> Callable[..., Any]:
    """aten::upsample_…: output sizes, then align_corners where the mode has it, then scales: a list, or one for each dimension."""

    def resize(input: Any, size: Any, *rest: Any, **named: Any) -> Any:
        align = rest[0] if aligned else None
        given = rest[1:] if aligned else rest
        scales = given[0] if given and isinstance(given[0], (list, tuple)) else [scale for scale in given if scale is not None]
        return F.interpolate(input, size=size, scale_factor=list(scales) or None if size is None else None, mode=mode, align_corners=align)

    return resize


def _slice(input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    start, end = None if start in (0, None) else start, None if end is None or (type(end) is int and end >= _END) else end
    if start is None and end is None and step == 1:
        return input
    places = (*[slice(None)] * (dim % input.dim()), slice(start, end, step))
    return input[places]


def _select(input: Any, dim: int, index: Any) -> Any:
    places = (*[slice(None)] * (dim % input.dim()), index)
    return input[places]


def _index(input: Any, indices: Any) -> Any:
    return input[tuple(slice(None) if index is None else index for index in indices)]


def _index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if accumulate or all(index is not None for index in indices):
        return torch.index_put(input, indices, values, accumulate)
    result = input.clone()
    result[tuple(slice(None) if index is None else index for index in indices)] = values
    return result


def _dropout(name: str) -> Callable[..., Any]:
    return lambda input, p, train: getattr(F, name)(input, p, train)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": lambda *args: (_batch_norm(*args[:5], False, *args[5:]), None, None),
    "instance_norm": lambda x, w, b, mean, var, own, momentum, eps, *_: F.instance_norm(x, mean, var, w, b, own, momentum, eps),
    "layer_norm": _layer_norm,
    "native_layer_norm": lambda *args: (_layer_norm(*args), None, None),
    "rms_norm": lambda input, shape, weight=None, eps=None: F.rms_norm(input, shape, weight, eps),
    "group_norm": lambda input, groups, weight=None, bias=None, eps=1e-5, *_: F.group_norm(input, groups, weight, bias, eps),
    "native_group_norm": lambda input, weight, bias, n, c, hw, groups, eps: (F.group_norm(input, groups, weight, bias, eps), None, None),
    "convolution": _convolution,
    **{f"max_pool{rank}d": _max_pool(rank, False) for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices": _max_pool(rank, True) for rank in (2, 3)},
    **{f"avg_pool{rank}d": _avg_pool(rank) for rank in (1, 2, 3)},
    **{f"adaptive_avg_pool{rank}d": getattr(F, f"adaptive_avg_pool{rank}d") for rank in (2, 3)},
    **{f"_adaptive_avg_pool{rank}d": getattr(F, f"adaptive_avg_pool{rank}d") for rank in (2, 3)},
    **{f"upsample_nearest{rank}d": _upsample("nearest", False) for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": _upsample("nearest-exact", False) for rank in (1, 2, 3)},
    "upsample_linear1d": _upsample("linear", True),
    "upsample_bilinear2d": _upsample("bilinear", True),
    "upsample_bicubic2d": _upsample("bicubic", True),
    "upsample_trilinear3d": _upsample("trilinear", True),
    "softmax": lambda input, dim, dtype=None: F.softmax(input, dim, dtype=dtype),
    "_softmax": lambda input, dim, _: F.softmax(input, dim),
    "log_softmax": lambda input, dim, dtype=None: F.log_softmax(input, dim, dtype=dtype),
    "_log_softmax": lambda input, dim, _: F.log_softmax(input, dim),
    "glu": F.glu,
    "pad": F.pad,
    "constant_pad_nd": lambda input, pad, value=0: F.pad(input, list(pad), "constant", value),
    "embedding": lambda weight, indices, padding_idx=-1, *_: F.embedding(indices, weight),
    **{name: _dropout(name) for name in ("dropout", "alpha_dropout")},
    "feature_dropout": _dropout("dropout2d"),
    "native_dropout": lambda input, p, train: (F.dropout(input, p, bool(train)), None),
    "slice": _slice,
    "select": _select,
    "index": _index,
    "index_put": _index_put,
    "_to_copy": lambda input, *, dtype=None, **_: input if dtype is None else input.to(dtype),
    "_unsafe_view": torch.reshape,
    **dict.fromkeys(("lift_fresh", "lift_fresh_copy", "alias"), lambda input: input),
    "detach": Tensor.detach,
    "detach_": Tensor.detach_,
    "sym_size": lambda input, dim: input.shape[dim],
}

CHECKS = frozenset((
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
))  # fmt: skip
