"""Maximum pooling that says where the maxima are, and its inverse."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import shape_of
from fxquant.ops.core import EXACT, FLOAT32_EXACT, IMAGES, Builder, Call, Lowering, Plain, Quantized, Same, sampled, written
from fxquant.ops.core.declare import Guard, composite, known_sizes, lowered, module_of, with_batch
from fxquant.ops.core.record import operator_named
from fxquant.ops.pooling.pool import WINDOW, kernel_and_steps, refuses_max_pool, window_padding
from fxquant.ops.pooling.totals import lower_windows, refuses_adaptive, window_counts
from fxquant.primitives import pool


def _is_wide(input: Quantized, planes: list[int]) -> bool:
    """Return whether keys of an element and its place exceed float32; stored integers may be larger by a zero point."""
    return (input.grid.magnitude + 256) * math.prod(planes) >= FLOAT32_EXACT


def _values(name: str) -> Callable[..., dict[str, Any]]:
    """Return the adapter of a pooling that returns places: its arguments by name, without `return_indices`."""

    def adapt(*args: Any, return_indices: bool = True, **kwargs: Any) -> dict[str, Any]:
        operator = operator_named(name)
        return operator.bind(args[: len(operator.parameter_names)], kwargs)

    return adapt


def _with_places(rank: int) -> tuple[Callable[..., Tensor], ...]:
    """Declare maximum poolings of this rank that return values and indices, and others that return the indices alone."""
    name, adaptive = f"max_pool{rank}d", f"adaptive_max_pool{rank}d"

    @lowered(
        name=f"max_pool_indices{rank}d",
        function=lambda input, *window, **named: getattr(F, f"{name}_with_indices")(input, *window, **named)[1],
        demand=Plain("int64"),
        refuses=refuses_max_pool(rank),
        settings=WINDOW,
        samples=written(f"F.max_pool{rank}d(x, 2, return_indices=True)[1]", x=IMAGES[rank]),
    )
    def max_pool_indices(lowering: Lowering, input: Quantized, **window: Any) -> Any:
        """Return the positions of the maxima of windows in one, two or three dimensions: int64."""
        planes = known_sizes(input.shape[-rank:])
        placed = window_padding(planes, **window)
        return lowering.call(pool.pool_indices, input.value, *placed, planes, _is_wide(input, planes))

    with_places = f"{name}_with_indices"

    @composite(name=with_places, adapt=_values(with_places), refuses=refuses_max_pool(rank), settings=WINDOW)
    @sampled(f"F.{name}(x, 3, 2, 1, return_indices=True)[0]", f"{with_places}(x, 2)[0]", within=EXACT, x=IMAGES[rank])
    def max_pool_with_indices(build: Builder, input: fx.Node, **window: Any) -> Any:
        """Return the maxima of windows in one, two or three dimensions, and their positions."""
        return build(operator_named(name).function, input, **window), build(max_pool_indices, input, **window)

    @lowered(
        name=f"adaptive_max_indices{rank}d",
        function=lambda input, output_size: getattr(F, f"{adaptive}_with_indices")(input, output_size)[1],
        demand=Plain("int64"),
        refuses=refuses_adaptive(rank, False),
        samples=written(f"F.{adaptive}(x, 4, return_indices=True)[1]", x=IMAGES[rank]),
    )
    def adaptive_max_indices(lowering: Lowering, input: Quantized, output_size: Any) -> Any:
        """Return the positions of the maxima of windows that give the wanted size in one, two or three dimensions: int64."""
        lengths = known_sizes(input.shape[-rank:])
        value, kernel, chosen = lower_windows(lowering, input, window_counts(input.shape, output_size, rank))
        position_of = torch.arange(math.prod(lengths), device="cpu").reshape(lengths)
        for axis, elements in enumerate(chosen):
            position_of = position_of.index_select(axis, torch.tensor(elements, device="cpu", dtype=torch.int64))
        places = lowering.constant("places", position_of.flatten().to(input.scale.device), torch.int64)
        planes, zeros, ones = [len(elements) for elements in chosen], [0] * rank, [1] * rank
        wide = _is_wide(input, planes)
        return lowering.call(pool.pool_indices, value, kernel, kernel, zeros, zeros, ones, planes, wide, places)

    @composite(
        *([torch.adaptive_max_pool1d] if rank == 1 else []),
        name=f"{adaptive}_with_indices",
        adapt=_values(f"{adaptive}_with_indices"),
        refuses=refuses_adaptive(rank, False),
    )
    @sampled(f"F.{adaptive}(x, 4, return_indices=True)[0]", f"F.{adaptive}_with_indices(x, 3)[0]", within=EXACT, x=IMAGES[rank])
    @sampled(*["torch.adaptive_max_pool1d(x, 2)[0]"] * (rank == 1), within=EXACT, x=IMAGES[rank])
    def adaptive_max_pool_with_indices(build: Builder, input: fx.Node, output_size: Any) -> Any:
        """Return the maxima of windows that give the wanted size in one, two or three dimensions, and their positions."""
        return build(operator_named(adaptive).function, input, output_size), build(adaptive_max_indices, input, output_size)

    return max_pool_indices, max_pool_with_indices, adaptive_max_indices, adaptive_max_pool_with_indices


max_pool_indices1d, max_pool1d_with_indices, adaptive_max_indices1d, adaptive_max_pool1d_with_indices = _with_places(1)
max_pool_indices2d, max_pool2d_with_indices, adaptive_max_indices2d, adaptive_max_pool2d_with_indices = _with_places(2)
max_pool_indices3d, max_pool3d_with_indices, adaptive_max_indices3d, adaptive_max_pool3d_with_indices = _with_places(3)
INDICES = {1: max_pool_indices1d, 2: max_pool_indices2d, 3: max_pool_indices3d}


def _unpool(input: Tensor, indices: Tensor, size: list[int]) -> Tensor:
    planes = torch.zeros(*input.shape[:2], math.prod(size), dtype=input.dtype, device=input.device)
    return planes.scatter(2, indices.flatten(2), input.flatten(2)).reshape(*input.shape[:2], *size)


def _refuses_unpool(rank: int) -> Guard:
    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        if not arguments["disjoint"]:
            return "its windows overlap, so that two elements may share an index"
        indices = arguments["indices"]
        if not isinstance(indices, fx.Node) or INDICES[rank] is not indices.target:
            return "its indices are not those of a maximum pooling"
        kernel, steps, _, _, spread = window_padding([0] * rank, indices.args[1], indices.args[2], 0, indices.args[4], False)
        if any(step < apart * (taps - 1) + 1 for taps, step, apart in zip(kernel, steps, spread, strict=True)):
            return "its windows overlap, so that two elements may share an index"
        planes = shape_of(indices.args[0])[2:]  # type: ignore[arg-type]
        fits = math.prod(planes) <= math.prod(arguments["size"])  # type: ignore[arg-type]
        return None if fits else "its result is smaller than the input of the pooling"

    return refuses


def _max_unpool(rank: int) -> Callable[..., Tensor]:
    name = f"max_unpool{rank}d"

    def arguments(
        input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
    ) -> dict[str, Any]:
        return {"input": input, "indices": indices, "size": [], "disjoint": _disjoint(kernel_size, stride, rank)}

    @lowered(
        name=name,
        function=lambda input, indices, size, disjoint=True: _unpool(input, indices, size),
        by_name=False,
        calls={getattr(F, name): arguments},
        modules=dict.fromkeys(module_of(name), lambda m: {"size": [], "disjoint": _disjoint(m.kernel_size, m.stride, rank)}),
        demand=Same(),
        reads=("indices",),
        read_off=frozenset({"output_size"}),
        normalize=_planes,
        refuses=(with_batch(rank), _refuses_unpool(rank)),
        onnx=_onnx_unpool,
        samples=written(
            f"F.{name}(*F.max_pool{rank}d(x, 3, return_indices=True), 3, output_size=x.shape).relu()",
            f"v, p = {{nn.MaxPool{rank}d(2, return_indices=True)}}(x); return {{nn.MaxUnpool{rank}d(2)}}(v, p, output_size=x.shape)",
            x=IMAGES[rank],
        ),
    )
    def max_unpool(lowering: Lowering, input: Quantized, indices: Any, size: list[int], disjoint: bool = True) -> Quantized:
        """Return planes of this size in one, two or three dimensions that hold each element where it was, and 0 elsewhere."""
        return input.with_value(lowering.call(pool.unpool, input.value, lowering.given("indices", indices, torch.int64), list(size), 0))

    return max_unpool


def _onnx_unpool(c: Call) -> str:
    """Write the primitive's form on float values, flattened first on the result's grid, which is the operand's."""
    size = c["size"]
    flat = c.integers([0, 0, -1])
    value = c.rounded(c.do("Reshape", c.input, flat))
    planes = c.do("Slice", c.do("Shape", c.input), c.integers([0]), c.integers([2]))
    zero = c.e.constant(torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu"))
    empty = c.do("Expand", zero, c.do("Concat", planes, c.integers([math.prod(size)]), axis=0))
    placed = c.do("ScatterElements", empty, c.do("Reshape", c.operand("indices"), flat), value, axis=2)
    return c.do("Reshape", placed, c.integers([0, 0, *size]))


def _disjoint(kernel_size: Any, stride: Any, rank: int) -> bool:
    """Return whether windows do not overlap."""
    return all(step >= taps for taps, step in zip(*kernel_and_steps(kernel_size, stride, rank), strict=True))


def _planes(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | str:
    size = list(shape_of(node)[2:])
    return {**arguments, "size": size} if all(isinstance(one, int) for one in size) else "its size depends on the batch size"


max_unpool1d, max_unpool2d, max_unpool3d = map(_max_unpool, (1, 2, 3))
