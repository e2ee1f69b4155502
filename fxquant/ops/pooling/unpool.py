"""Maximum pooling that says where the maxima are, and its inverse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, shape_of
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import FLOAT32_EXACT
from fxquant.ops.core.composite import Builder
from fxquant.ops.core.demands import Plain, Same
from fxquant.ops.core.form import Call
from fxquant.ops.core.record import Operator, register
from fxquant.ops.core.weighted import sizes
from fxquant.ops.pooling.adaptive import (
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    lower_windows,
    refuses_adaptive,
    window_counts,
)
from fxquant.ops.pooling.pool import max_pool1d, max_pool2d, max_pool3d, refuses_max_pool, spatial, window_padding
from fxquant.primitives import position

POOLS = {1: max_pool1d, 2: max_pool2d, 3: max_pool3d}
ADAPTIVE = {1: adaptive_max_pool1d, 2: adaptive_max_pool2d, 3: adaptive_max_pool3d}
UNPOOLS: dict[int, Callable[..., Tensor]] = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


# ---- where the maxima are -------------------------------------------------------------------------------------------


def _pool_indices(rank: int) -> Callable[..., Tensor]:
    def function(
        input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Tensor:
        found: Tensor = getattr(F, f"max_pool{rank}d_with_indices")(input, kernel_size, stride, padding, dilation, ceil_mode)[1]
        return found

    def lower(lowering: Lowering, input: Quantized, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
        planes = spatial(input.shape, rank)
        kernel, steps, begin, end, spread = window_padding(planes, kernel_size, stride, padding, dilation, ceil_mode)
        wide = (input.grid.magnitude + 256) * math.prod(planes) >= FLOAT32_EXACT  # stored integers may be larger by a zero point
        return lowering.call(position.pool_indices, input.value, kernel, steps, begin, end, spread, planes, wide)

    function.__name__ = function.__qualname__ = f"max_pool_indices{rank}d"
    function.__doc__ = f"The positions of the maxima of windows in {rank} dimensions: int64."
    register(Operator(function.__name__, function, ("input",), lower, Plain("int64"), refuses=refuses_max_pool(rank)))
    return function


def _with_indices(rank: int, indices: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(
        input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        values, found = getattr(F, f"max_pool{rank}d_with_indices")(input, kernel_size, stride, padding, dilation, ceil_mode)
        return values, found

    def expand(build: Builder, input: fx.Node, *window: Any, **named: Any) -> Any:
        return build(POOLS[rank], input, *window, **named), build(indices, input, *window, **named)

    function.__name__ = function.__qualname__ = f"max_pool{rank}d_with_indices"
    function.__doc__ = f"The maxima of windows in {rank} dimensions, and their positions."
    functions = [getattr(F, function.__name__), *([torch.max_pool1d_with_indices] if rank == 1 else [])]
    register(
        Operator(
            function.__name__,
            function,
            ("input",),
            expand=expand,
            functions=dict.fromkeys(functions, _window_arguments),
            refuses=refuses_max_pool(rank),
        )
    )
    return function


def _window_arguments(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = True,
) -> dict[str, Any]:
    return {"input": input, "kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}


max_pool_indices1d = _pool_indices(1)
max_pool_indices2d = _pool_indices(2)
max_pool_indices3d = _pool_indices(3)
max_pool1d_with_indices = _with_indices(1, max_pool_indices1d)
max_pool2d_with_indices = _with_indices(2, max_pool_indices2d)
max_pool3d_with_indices = _with_indices(3, max_pool_indices3d)
INDICES = {1: max_pool_indices1d, 2: max_pool_indices2d, 3: max_pool_indices3d}


def _adaptive_indices(rank: int) -> Callable[..., Tensor]:
    def function(input: Tensor, output_size: Any) -> Tensor:
        found: Tensor = getattr(F, f"adaptive_max_pool{rank}d_with_indices")(input, output_size)[1]
        return found

    def lower(lowering: Lowering, input: Quantized, output_size: Any) -> Any:
        lengths = spatial(input.shape, rank)
        value, kernel, chosen = lower_windows(lowering, input, window_counts(input.shape, output_size, rank))
        position_of = torch.arange(math.prod(lengths), device="cpu").reshape(lengths)
        for axis, elements in enumerate(chosen):
            position_of = position_of.index_select(axis, torch.tensor(elements, device="cpu", dtype=torch.int64))
        places = lowering.constant("places", position_of.flatten().to(input.scale.device), torch.int64)
        planes = [len(elements) for elements in chosen]
        wide = (input.grid.magnitude + 256) * math.prod(planes) >= FLOAT32_EXACT
        zeros, ones = [0] * rank, [1] * rank
        return lowering.call(position.pool_indices, value, kernel, kernel, zeros, zeros, ones, planes, wide, places)

    function.__name__ = function.__qualname__ = f"adaptive_max_indices{rank}d"
    function.__doc__ = f"The positions of the maxima of windows that give the wanted size in {rank} dimensions: int64."
    register(Operator(function.__name__, function, ("input",), lower, Plain("int64"), refuses=refuses_adaptive(rank, False)))
    return function


adaptive_max_indices1d = _adaptive_indices(1)
adaptive_max_indices2d = _adaptive_indices(2)
adaptive_max_indices3d = _adaptive_indices(3)
ADAPTIVE_INDICES = {1: adaptive_max_indices1d, 2: adaptive_max_indices2d, 3: adaptive_max_indices3d}


def _adaptive_with_indices(rank: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(input: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
        values, found = getattr(F, f"adaptive_max_pool{rank}d_with_indices")(input, output_size)
        return values, found

    def expand(build: Builder, input: fx.Node, output_size: Any) -> Any:
        return build(ADAPTIVE[rank], input, output_size), build(ADAPTIVE_INDICES[rank], input, output_size)

    def arguments(input: Any, output_size: Any, return_indices: bool = True) -> dict[str, Any]:
        return {"input": input, "output_size": output_size}

    function.__name__ = function.__qualname__ = f"adaptive_max_pool{rank}d_with_indices"
    function.__doc__ = f"The maxima of windows that give the wanted size in {rank} dimensions, and their positions."
    functions = [getattr(F, function.__name__), *([torch.adaptive_max_pool1d] if rank == 1 else [])]
    register(
        Operator(
            function.__name__,
            function,
            ("input",),
            expand=expand,
            functions=dict.fromkeys(functions, arguments),
            refuses=refuses_adaptive(rank, False),
        )
    )
    return function


adaptive_max_pool1d_with_indices = _adaptive_with_indices(1)
adaptive_max_pool2d_with_indices = _adaptive_with_indices(2)
adaptive_max_pool3d_with_indices = _adaptive_with_indices(3)


# ---- back to where they were ----------------------------------------------------------------------------------------


def _max_unpool(rank: int) -> Callable[..., Tensor]:
    def function(input: Tensor, indices: Tensor, size: list[int], disjoint: bool = True) -> Tensor:
        planes = torch.zeros(*input.shape[:2], math.prod(size), dtype=input.dtype, device=input.device)
        return planes.scatter(2, indices.flatten(2), input.flatten(2)).reshape(*input.shape[:2], *size)

    def lower(lowering: Lowering, input: Quantized, indices: Any, size: list[int], disjoint: bool) -> Quantized:
        return input.with_value(lowering.call(position.unpool, input.value, lowering.given("indices", indices, torch.int64), list(size), 0))

    def arguments(
        input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
    ) -> dict[str, Any]:
        return {"input": input, "indices": indices, "size": [], "disjoint": _disjoint(kernel_size, stride, rank)}

    def module(m: Any) -> dict[str, Any]:
        return {"size": [], "disjoint": _disjoint(m.kernel_size, m.stride, rank)}

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        known = fact(arguments["input"])
        if isinstance(known, TensorFact) and len(known.shape) != rank + 2:
            return "its input has no batch dimension"
        if not arguments["disjoint"]:
            return "its windows overlap, so that two elements may share an index"
        given = arguments["indices"]
        if not isinstance(given, fx.Node) or INDICES[rank] is not given.target:
            return "its indices are not those of a maximum pooling"
        kernel, steps, _, _, spread = window_padding([0] * rank, given.args[1], given.args[2], 0, given.args[4], False)
        if any(step < apart * (taps - 1) + 1 for taps, step, apart in zip(kernel, steps, spread, strict=True)):
            return "its windows overlap, so that two elements may share an index"
        planes = shape_of(given.args[0])[2:]  # type: ignore[arg-type]
        if math.prod(planes) > math.prod(arguments["size"]):  # type: ignore[arg-type]
            return "its result is smaller than the input of the pooling"
        return None

    function.__name__ = function.__qualname__ = f"max_unpool{rank}d"
    function.__doc__ = f"Planes of the size in {rank} dimensions that hold each element where it was, and 0 elsewhere."
    register(
        Operator(
            function.__name__,
            function,
            ("input",),
            lower,
            Same(),
            reads=("indices",),
            functions={UNPOOLS[rank]: arguments},
            modules={getattr(nn, f"MaxUnpool{rank}d"): module},
            read_off=frozenset({"output_size"}),
            normalize=_planes,
            refuses=refuses,
            onnx=_onnx_unpool,
        )
    )
    return function


def _onnx_unpool(c: Call) -> str:
    """Write the primitive's form on float values, flattened first on the result's grid, which is the operand's."""
    size = c["size"]
    flat = c.integers([0, 0, -1])
    value = c.rounded(c.do("Reshape", c.input, flat))
    planes = c.do("Slice", c.do("Shape", c.input), c.integers([0]), c.integers([2]))
    empty = c.do(
        "Expand",
        c.e.constant(torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")),
        c.do("Concat", planes, c.integers([math.prod(size)]), axis=0),
    )
    placed = c.do("ScatterElements", empty, c.do("Reshape", c.operand("indices"), flat), value, axis=2)
    return c.do("Reshape", placed, c.integers([0, 0, *size]))


def _disjoint(kernel_size: Any, stride: Any, rank: int) -> bool:
    """Return whether windows do not overlap."""
    steps = sizes(kernel_size if stride in (None, [], ()) else stride, rank)
    return all(step >= taps for step, taps in zip(steps, sizes(kernel_size, rank), strict=True))


def _planes(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    size = list(shape_of(node)[2:])
    return {**arguments, "size": size} if all(isinstance(one, int) for one in size) else "its size depends on the batch size"


max_unpool1d = _max_unpool(1)
max_unpool2d = _max_unpool(2)
max_unpool3d = _max_unpool(3)
