"""Pooling over windows of one size: sums of integers, with the division inside the requantization multiplier."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import Size, TensorFact, at_point, fact, largest_size, shape_of
from fxquant.numerics.grids import FLOAT32_EXACT, INT8, SMALLEST_SCALE, WEIGHT_INT8, Ratio
from fxquant.ops.core import IMAGES, NORMED, POSITIVE, Builder, Call, Clamp, Lowering, Quantized, clamped, lowered, sample
from fxquant.ops.core.declare import Guard, are_fixed, composite, first_reason, fixed_sizes, is_finite, meets, module_of, with_batch
from fxquant.ops.core.record import WIDE, Instead, Layer, Same, Trait, operator_named
from fxquant.ops.core.weighted import Product, lower_uniform, sizes
from fxquant.ops.elementwise.arithmetic import mul
from fxquant.ops.elementwise.table import SHIFTED
from fxquant.primitives import accumulate, elementwise, pool
from fxquant.primitives.arithmetic import LAYER
from fxquant.primitives.pool import POOLED_EXACT


# ---- Average pooling with windows that reach over an edge, for targets whose average pooling is a layer ---------------
#
# Windows of one size and divisor become one layer, whose weight is 1 / divisor; the layers' results are concatenated.
def lower_uneven(lowering: Lowering, input: Quantized, total: Any, largest: float, divisor: Tensor, clamp: Clamp | None) -> Quantized:
    """Requantize window sums, at most `largest`, as a layer does: times the integer weight 127 of the scale 1 / (127 · divisor)."""
    device = input.scale.device
    scale = (1 / divisor.to(device) / WEIGHT_INT8.high).clamp_min(SMALLEST_SCALE)
    steps = lowering.arithmetic.step(input.scale, scale)
    wide = lowering.prove(largest * WEIGHT_INT8.high, "the sum") >= FLOAT32_EXACT
    weight = lowering.constant("weight", torch.tensor(float(WEIGHT_INT8.high), device=device), torch.int32)
    scaled = lowering.call(elementwise.multiply, total, weight, wide)

    def lift(to: Tensor) -> Tensor:
        return lowering.arithmetic.layer_bias(torch.zeros_like(scale, dtype=torch.float64), steps[0], to.detach())

    if not lowering.lifts_late:
        bias = lowering.constant("bias", lift(lowering.output.grid.scale), torch.int32)
        scaled = lowering.call(elementwise.add_constant, scaled, bias)
    return lowering.requantize(scaled, Ratio(steps), clamp, lift=lift, kind=LAYER)


class Run(NamedTuple):
    """Consecutive windows along one dimension with one length and divisor; `start` is the first element of the first window."""

    start: int
    length: int
    divisor: int
    windows: int


def runs(size: int, taps: int, step: int, padding: int, windows: int, counts_padding: bool) -> list[Run]:
    """Return the windows along one dimension, grouped into runs of one length and divisor."""
    grouped: list[Run] = []
    for start in range(-padding, -padding + windows * step, step):
        low, high = max(start, 0), min(start + taps, size)
        divisor = min(start + taps, size + padding) - start if counts_padding else high - low
        last = grouped[-1] if grouped else None
        if last is not None and (last.length, last.divisor, last.start + last.windows * step) == (high - low, divisor, low):
            grouped[-1] = last._replace(windows=last.windows + 1)
        else:
            grouped.append(Run(low, high - low, divisor, 1))
    return grouped


def onnx_uneven(c: Call, along: list[list[Run]], stride: list[int], channels: int) -> str:
    """Write an average pooling as a depthwise Conv for each pair of runs, requantized to the result's scale and concatenated."""
    rows = []
    for high in along[0]:
        row = []
        for wide in along[1]:
            pair = (high, wide)
            ends = [run.start + (run.windows - 1) * step + run.length for run, step in zip(pair, stride, strict=True)]
            part = c.do("Slice", c.input, c.integers([run.start for run in pair]), c.integers(ends), c.integers([2, 3]))
            value = torch.tensor(1 / float(high.divisor * wide.divisor), dtype=torch.float32, device="cpu")
            weight = c.e.constant(value.expand(channels, 1, high.length, wide.length).contiguous())
            shape = [high.length, wide.length]
            mean = c.do("Conv", part, weight, kernel_shape=shape, strides=list(stride), pads=[0, 0, 0, 0], group=channels)
            row.append(c.rounded(c.epilogue(mean)))
        rows.append(row[0] if len(row) == 1 else c.do("Concat", *row, axis=3))
    return rows[0] if len(rows) == 1 else c.do("Concat", *rows, axis=2)


WINDOW = {"kernel_size": inspect.Parameter.empty, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}  # of a maximum


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> tuple[int, int]:
    """Return (number of windows, padding needed at the end) along one dimension, by PyTorch's rule."""
    extent = dilation * (kernel - 1) + 1
    free = size + 2 * padding - extent
    count = (-(-free // stride) if ceil_mode else free // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # a window may not start in the padding at the end
    return count, max((count - 1) * stride + extent - size - padding, 0)


def needs_batch(rank: int) -> Guard:
    """Refuse an operand without a batch dimension, or whose windows would run along it."""
    return first_reason(with_batch(rank), fixed_sizes("its windows would run along the batch", start=-rank))


def slides(rank: int) -> Guard:
    """Refuse what `needs_batch` refuses, but take sizes that vary where every window has the same number of elements in any case."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        lengths = shape_of(arguments["input"])[-rank:]
        if are_fixed(lengths):
            return None
        if any(largest_size(length) is None for length in lengths):
            return "its windows would run along the batch"
        uneven = not arguments.get("count_include_pad", True) and any(sizes(arguments["padding"], rank))
        return "its last windows depend on a size that varies" if arguments["ceil_mode"] or uneven else None

    return first_reason(with_batch(rank), refuses)


def kernel_and_steps(kernel_size: Any, stride: Any, rank: int) -> tuple[list[int], list[int]]:
    """Return kernel and stride as lists with a number for each dimension; the default stride is the kernel."""
    return sizes(kernel_size, rank), sizes(kernel_size if stride in (None, [], ()) else stride, rank)


def window_padding(
    lengths: Sequence[Size], kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return kernel, stride, padding before, padding after and dilation, each with one number per dimension of these lengths.

    Along a length that varies the padding after is that before, of which the last window may see nothing.
    """
    rank = len(lengths)
    kernel, steps = kernel_and_steps(kernel_size, stride, rank)
    begin, spread = sizes(padding, rank), sizes(dilation, rank)
    rows = zip(lengths, kernel, steps, begin, spread, strict=True)
    end = [_windows(row[0], *row[1:], ceil_mode)[1] if isinstance(row[0], int) else row[3] for row in rows]
    return kernel, steps, begin, end, spread


def refuses_max_pool(rank: int) -> Guard:
    """Refuse operands that `needs_batch` refuses, and windows that lie completely in the padding."""

    def refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
        lengths = [at_point(size, 2) for size in shape_of(arguments["input"])[-rank:]]
        kernel, steps = kernel_and_steps(arguments["kernel_size"], arguments["stride"], rank)
        rows = zip(lengths, kernel, steps, sizes(arguments["padding"], rank), sizes(arguments["dilation"], rank), strict=True)
        empty = any(_sees_only_padding(*row, arguments["ceil_mode"]) for row in rows)
        return "one of its windows covers padding only" if empty else None

    return first_reason(slides(rank), refuses)


def _sees_only_padding(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> bool:
    """Return whether some window along one dimension meets no element; only a dilated one can."""
    count, _ = _windows(size, kernel, stride, padding, dilation, ceil_mode)
    starts = range(-padding, -padding + count * stride, stride)
    return dilation > 1 and any(not any(0 <= start + tap * dilation < size for tap in range(kernel)) for start in starts)


def with_places_too(name: str) -> dict[str, Any]:
    """Return the call forms of a maximum pooling; with `return_indices` they call the operator {name}_with_indices."""

    def chosen(arguments: dict[str, Any], return_indices: bool) -> dict[str, Any] | Instead:
        return Instead(operator_named(f"{name}_with_indices").function, arguments) if return_indices else arguments

    def adapt(*args: Any, return_indices: bool = False, **kwargs: Any) -> dict[str, Any] | Instead:
        pooling = operator_named(name)
        count = len(pooling.parameter_names)
        return chosen(pooling.bind(args[:count], kwargs), any(args[count:]) or return_indices)

    def from_module(module: Any) -> dict[str, Any] | Instead:
        settings = operator_named(name).parameter_names[1:]
        return chosen({setting: getattr(module, setting) for setting in settings}, module.return_indices)

    return {"adapt": adapt, "modules": dict.fromkeys(module_of(name), from_module)}


def _window(rank: int) -> Callable[[dict[str, Any]], list[int]]:
    """Return a function of the arguments that returns the window sizes; 0 for a dilated window, which could lie in the padding."""

    def window(arguments: dict[str, Any]) -> list[int]:
        kernel, dilation = sizes(arguments["kernel_size"], rank), sizes(arguments["dilation"], rank)
        return [taps if step == 1 else 0 for taps, step in zip(kernel, dilation, strict=True)]

    return window


def _onnx_max_pool(c: Call) -> str:
    node = c.primitive(pool.max_pool)
    assert node is not None
    _, kernel, stride, begin, end, dilation = node.args
    attributes = {"kernel_shape": list(kernel), "strides": list(stride), "pads": [*begin, *end], "dilations": list(dilation)}  # type: ignore[misc, arg-type]
    return c.do("MaxPool", c.input, **attributes)


def _max_pool(rank: int) -> Callable[..., Tensor]:
    @lowered(
        name=f"max_pool{rank}d",
        settings=WINDOW,
        **with_places_too(f"max_pool{rank}d"),
        demand=Same(),
        idle=lambda arguments: set(sizes(arguments["kernel_size"], 1)) == {1},
        layer=Layer(window=_window(rank)),
        traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
        refuses=refuses_max_pool(rank),
        onnx=_onnx_max_pool,
        samples=(
            sample(input=IMAGES[rank], kernel_size=3, stride=2, padding=1),
            sample(input=IMAGES[rank], kernel_size=(3, 2, 2)[:rank], ceil_mode=True),
            sample(input=IMAGES[rank], kernel_size=2, stride=1, dilation=2),
        ),
    )
    def max_pool(lowering: Lowering, input: Quantized, **window: Any) -> Quantized:
        """Return the maximum over windows in one, two or three dimensions."""
        placed = window_padding(input.shape[-rank:], **window)
        return input.with_value(lowering.call(pool.max_pool, input.value, *placed))

    return max_pool


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))


def too_many(window: list[int], limit: int) -> str | None:
    """Return why a window of this size cannot be summed below the limit; None if it can."""
    terms = math.prod(window)
    return f"its sum of {terms} terms may exceed {limit}" if terms * INT8.magnitude >= limit else None


def _within(rank: int) -> Callable[[fx.Node, dict[str, Any]], dict[str, Any]]:
    """Return a normalizer that shrinks an average pool's one unpadded `ceil_mode` window to the input, as PyTorch divides."""

    def normalize(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
        input_fact = fact(arguments["input"])
        if not arguments["ceil_mode"] or not isinstance(input_fact, TensorFact):
            return arguments
        kernel, steps = kernel_and_steps(arguments["kernel_size"], arguments["stride"], rank)
        rows = zip(input_fact.shape[-rank:], fact(node).shape[-rank:], kernel, sizes(arguments["padding"], rank), strict=True)
        fitting = [size if isinstance(size, int) and count == 1 and taps > size and not pad else taps for size, count, taps, pad in rows]
        if fitting == kernel:
            return arguments
        steps = [fits if fits != taps else step for fits, taps, step in zip(fitting, kernel, steps, strict=True)]
        return {**arguments, "kernel_size": fitting, "stride": steps}

    return normalize


def window_divisor(
    shape: Sequence[Size], arguments: Mapping[str, Any], kernel: list[int], stride: list[int], begin: list[int], end: list[int]
) -> Tensor:
    """Return the divisor of each window's sum: a scalar if all agree, else one number per output position.

    `arguments` are those of the pooling operator's call; `begin` and `end` are the elements of padding before and after each dimension.
    """
    if arguments.get("divisor_override") is not None:
        return torch.tensor(float(arguments["divisor_override"]), dtype=torch.float32, device="cpu")
    counts = torch.ones((), dtype=torch.float32, device="cpu")
    for length, taps, step, padding, tail in zip(shape[-len(kernel) :], kernel, stride, begin, end, strict=True):
        if not isinstance(length, int):  # every window counts all its elements
            counts = counts * taps
            continue
        size = length
        starts = range(0, size + padding + tail - taps + 1, step)
        low, high = (0, size + 2 * padding) if arguments.get("count_include_pad", True) else (padding, padding + size)
        sizes = [float(min(start + taps, high) - max(start, low)) for start in starts]
        along = torch.tensor(sizes, dtype=torch.float32, device="cpu")
        counts = counts.unsqueeze(-1) * along
    return counts.flatten()[0] if bool((counts == counts.flatten()[0]).all()) else counts


def onnx_layer(c: Call) -> str | None:
    """Write an average as a convolution; return None where it is not one."""
    layer = c.primitive(accumulate.convolution) or c.primitive(accumulate.convolution_wide)
    if layer is None:
        return None
    _, weight, _, stride, begin, _, groups, *_ = layer.args
    attributes = {"kernel_shape": list(fact(weight).shape[2:]), "strides": list(stride), "pads": [*begin, *begin], "group": groups}  # type: ignore[misc, arg-type]
    return c.do("Conv", c.input, c.weight(), **attributes)


def onnx_average_pool(c: Call) -> str:
    """Write an average pooling as AveragePool and a Mul that corrects its divisor, or as a reduction or Conv."""
    node = c.primitive(pool.sum_pool)
    layer = onnx_layer(c)
    if layer is not None:
        return c.epilogue(layer)
    if node is None:
        if c.by_layers:
            return c.epilogue(c.reduced("ReduceMean", c.input, list(range(2, len(c.operand_shape))), keepdim=True))
        return c.epilogue(c.do("GlobalAveragePool", c.input))
    kernel, stride, begin, end = (list(value) for value in node.args[1:5])  # type: ignore[arg-type]
    if c.by_layers and c.primitive(elementwise.multiply) is not None:
        counted = bool(c.arguments.get("count_include_pad", True))
        windows = fact(c.node).shape[2:]
        rows = zip(c.operand_shape[2:], kernel, stride, begin, windows, strict=True)
        return onnx_uneven(c, [runs(*row, counted) for row in rows], stride, int(c.operand_shape[1]))  # type: ignore[arg-type]
    even = len({*begin, *end}) == 1  # onnxruntime 1.21 to 1.23 counts uneven padding wrongly, from opset 19 on: it is left out
    mean = c.do("AveragePool", c.input, kernel_shape=kernel, strides=stride, pads=[*begin, *end], count_include_pad=int(even))
    shape = c.operand_shape
    elements = math.prod(kernel) if even else window_divisor(shape, {"count_include_pad": False}, kernel, stride, begin, end)
    share = elements / window_divisor(shape, c.arguments, kernel, stride, begin, end)
    return c.epilogue(mean if bool((share == 1).all()) else c.do("Mul", mean, c.e.constant(share.float())))


def _avg_pool(rank: int) -> Callable[..., Tensor]:
    def averaged(input: Tensor, *window: Any, clamp: Clamp | None = None) -> Tensor:
        value = getattr(F, f"avg_pool{rank}d")(input, *window[: 5 if rank == 1 else 6])  # in one dimension without divisor_override
        return value if clamp is None else clamped(value, *clamp)

    @lowered(
        name=f"avg_pool{rank}d",
        function=averaged,
        normalize=_within(rank),
        idle=lambda arguments: set(sizes(arguments["kernel_size"], 1)) == {1} and arguments["divisor_override"] in (None, 1),
        absorbs=frozenset({"clamp"}),
        refuses=(
            meets("divisor_override", lambda n: n is None or n > 0, lambda n: f"divisor_override={n} is not positive"),
            slides(rank),
            lambda node, arguments: too_many(sizes(arguments["kernel_size"], rank), POOLED_EXACT),
        ),
        traits=frozenset({Trait.SPATIAL, Trait.HOMOGENEOUS}),
        onnx=onnx_average_pool,
        samples=(
            sample(input=IMAGES[rank], kernel_size=(2, 4, 3)[:rank], stride=(1, 3, 2)[:rank], ceil_mode=True),
            sample(input=IMAGES[rank], kernel_size=3, stride=2, padding=1),
            sample(input=IMAGES[rank], kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
            *([sample(input=IMAGES[rank], kernel_size=2, divisor_override=3)] if rank > 1 else []),
        ),
    )
    def avg_pool(
        lowering: Lowering, input: Quantized, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None, *, clamp: Clamp | None = None,
    ) -> Quantized:  # fmt: skip
        """Return the mean over windows in one, two or three dimensions."""
        kernel, steps, begin, end, _ = window_padding(input.shape[-rank:], kernel_size, stride, padding, 1, ceil_mode)
        counted = {"count_include_pad": count_include_pad, "divisor_override": divisor_override}
        divisor = window_divisor(input.shape, counted, kernel, steps, begin, end)
        within = all(tail <= head for head, tail in zip(begin, end, strict=True))  # as a convolution's windows are
        channels = input.shape[1] if rank == 2 and len(input.shape) == 4 else None
        layers = lowering.arithmetic.multiplies_by_layers and input.dtype.bits <= 8
        if layers and within and divisor.dim() == 0 and isinstance(channels, int):
            form = Product(accumulate.convolution, accumulate.convolution_wide, (steps, begin, [1, 1], channels), 2, in_parts=True)
            return lower_uniform(lowering, form, input, (channels, 1, *kernel), 1 / float(divisor), clamp)
        terms = math.prod(kernel)
        largest = lowering.prove(terms * input.grid.magnitude, "the sum")
        lowering.prove(terms * 2.0**7, "the sum over 8 of the operand's bits", POOLED_EXACT - 1)
        total = lowering.call(pool.sum_pool, input.value, kernel, steps, begin, end, largest >= POOLED_EXACT)
        if rank == 2 and divisor_override is None and layers:
            return lower_uneven(lowering, input, total, largest, divisor, clamp)
        return lowering.requantize(total, Ratio((input.scale,), (divisor.to(input.scale.device),)), clamp)

    return avg_pool


avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))


# ---- Pools by a power: the p-norm of windows, a composite that is 16 bits wide inside --------------------------------
#
# (Σ x^p)^(1/p) = (k · mean x^p)^(1/p)    of windows of k elements, as PyTorch has it: a sum that is negative has a root for p = 1 alone
AVERAGES = {1: avg_pool1d, 2: avg_pool2d, 3: avg_pool3d}


def _lp_pool(rank: int) -> Callable[..., Any]:
    samples = (
        sample(input=IMAGES[rank], norm_type=2.0, kernel_size=3, stride=2),
        sample(input=IMAGES[rank], norm_type=1.0, kernel_size=(2, 3, 2)[:rank] if rank > 1 else 2, ceil_mode=True, within=NORMED),
        sample(over=POSITIVE, input=IMAGES[rank], norm_type=3.0, kernel_size=2),
    )

    has_form = meets("norm_type", lambda p: is_finite(p) and p > 0, lambda p: f"the {p}-norm has no integer form")

    @composite(name=f"lp_pool{rank}d", refuses=(has_form, slides(rank)), samples=samples)
    def lp_pool(build: Builder, input: fx.Node, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Any:
        """Return the p-norm of windows in one, two or three dimensions."""
        count = float(math.prod(sizes(kernel_size, rank)))
        if norm_type == 1:
            return build(mul, build(AVERAGES[rank], input, kernel_size, stride, 0, ceil_mode, demand=WIDE), count)
        powers = build(torch.square, input, demand=WIDE) if norm_type == 2 else build(torch.pow, input, float(norm_type), demand=WIDE)
        means = build(AVERAGES[rank], powers, kernel_size, stride, 0, ceil_mode, demand=WIDE)
        return build(SHIFTED.function, means, "pow", count, 0.0, {"exponent": 1 / norm_type})

    return lp_pool


lp_pool1d, lp_pool2d, lp_pool3d = map(_lp_pool, (1, 2, 3))
