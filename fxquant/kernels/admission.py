"""Admission by proof: an implementation runs only where it was shown to give the primitives' bits on this machine.

The parts that implementations share are here as well: the numbers of a sum of products, and tables of all bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir import loops
from fxquant.ir.graph import fact, resolve
from fxquant.ir.integer import qparams
from fxquant.kernels.kernel import Built, ChannelsLast, Disagrees, Implementation, Match, NotApplicable, Site, grid, in_order
from fxquant.numerics.grids import ACTIVATION_TYPES, INT32, INT32_MAX, UINT8, IntType, accumulator_bound, power_of_two
from fxquant.primitives import PRIMITIVES, Role, loop, quantization, role_of
from fxquant.primitives.accumulate import swap_channels
from fxquant.primitives.runtime_scales import dynamic_linear

WINDOW = ("stride", "padding", "dilation")
MOST_PARTS = 32  # convolutions that compute a transposed one: more of them cost more as calls than they save as sums
EXTREMES = 43  # of 256 elements so many are the smallest there is, and as many the largest
DRAWN = 2**13  # elements of pairs that a proof takes, in draws of an operand's size
MOST_DRAWS = 32
PAIRS = 24  # of 256 pairs so many are the smallest integer, and as many the largest
SMALLEST_REAL, LARGEST_REAL = -100.0, 155.0  # of operands that are quantized at run time: a step is 1


def whole_range(dtype: IntType, sizes: Sequence[int], low: int, generator: torch.Generator) -> Tensor:
    """Draw integers from `low` to the dtype's largest; a third are one of these two, at which sums in too few bits saturate."""
    values, count = _random_bits(dtype.storage, sizes, generator), dtype.high + 1 - low
    if count & (count - 1):
        values = values.to(torch.int32).remainder_(count).add_(low).to(dtype.storage)
    elif count < 2 ** (8 * dtype.storage.itemsize):
        values = values.bitwise_and_(count - 1).add_(low)
    choice = _random_bits(torch.uint8, sizes, generator)
    lowest, highest = (torch.tensor(value, dtype=dtype.storage, device="cpu") for value in (low, dtype.high))
    return torch.where(choice < EXTREMES, lowest, torch.where(choice >= 256 - EXTREMES, highest, values))


def pairs_of_ends(dtype: IntType, sizes: Sequence[int], low: int, zero: int, generator: torch.Generator) -> Tensor:
    """Draw integers at the zero point, with some pairs of neighbours, along the channels or the last dimension, at `low` or the highest.

    A sum of two products in 16 bits, as processors without VNNI compute it, saturates at such a pair. The sum of the layer stays so small
    that its output does not hide it.
    """
    lowest, highest, value = (torch.tensor(each, dtype=dtype.storage, device="cpu") for each in (low, dtype.high, zero))
    for axis in {1 if len(sizes) > 3 else len(sizes) - 1, len(sizes) - 1}:
        halved = [-(-size // 2) if dim == axis else size for dim, size in enumerate(sizes)]
        choice = _random_bits(torch.uint8, halved, generator).repeat_interleave(2, axis).narrow(axis, 0, sizes[axis])
        value = torch.where(choice < PAIRS, lowest, torch.where(choice >= 256 - PAIRS, highest, value))
    return value


def _random_bits(dtype: torch.dtype, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw every pattern of bits with equal probability, eight bytes at once: drawing is most of the cost of a proof."""
    count = math.prod(sizes)
    words = torch.empty(-(-count * dtype.itemsize // 8), dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator)
    return words.view(dtype)[:count].reshape(sizes)


def evaluate(model: fx.GraphModule, match: Match, inputs: dict[fx.Node, Tensor]) -> list[Tensor]:
    """Return the reference results: of the primitives that a kernel replaces, on these operands; the root's, then others that are read."""
    values: dict[fx.Node, Any] = dict(inputs)
    for item in (node for node in match.covers if node.target is loop.item):
        sequence, frame, dim, _ = item.args
        for size in (each for each in frame.all_input_nodes if each not in values):  # type: ignore[union-attr]
            values[size] = inputs[sequence].shape[dim]  # type: ignore[index]
    with torch.no_grad():
        for node in loops.running(between(match, values), values.__getitem__):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = resolve(model, str(node.target)) if node.op == "get_attr" else node.target(*args, **kwargs)  # type: ignore[operator]
    return [values[node] for node in (match.root, *match.results)]


def between(match: Match, sources: Iterable[fx.Node]) -> Sequence[fx.Node]:
    """Return the nodes that compute a kernel's results from its operands, constants included, in order."""
    if "loop" not in match.parts:
        return in_order(sources, match.root, *match.results)
    constants = dict.fromkeys(read for node in match.covers for read in node.all_input_nodes if read.op == "get_attr")
    marks = [node for node in match.covers if role_of(node.target) is Role.LEAVING]
    return [*constants, *match.parts["nodes"], *(node for node in match.parts["loop"] if node.op != "get_attr"), *marks]


def draws(site: Site, generator: torch.Generator) -> Iterator[dict[fx.Node, Tensor]]:
    """Yield the operands of a proof: of the whole range, and for weights also pairs of its ends, more draws for smaller operands."""
    yield operands(site, generator)
    if "weight" in site.match.parts:
        smallest = max(1, min(math.prod(site.sizes[node]) for node in site.match.reads))
        for _ in range(min(MOST_DRAWS, -(-DRAWN // smallest))):
            yield {node: _pairs(site, node, generator) for node in site.match.reads}


def _grid(site: Site, node: fx.Node) -> tuple[IntType, int, int]:
    """Return the integer type of an operand, its lowest integer, and its zero point."""
    described = grid(node)
    dtype = ACTIVATION_TYPES[described.dtype]
    return dtype, described.zero_point if node in site.forms.non_negative else dtype.low, described.zero_point


def _pairs(site: Site, node: fx.Node, generator: torch.Generator) -> Tensor:
    sizes = site.sizes[node]
    if not fact(node).dtype.is_floating_point:
        dtype, low, zero = _grid(site, node)
        return pairs_of_ends(dtype, sizes, low, zero, generator)
    value = pairs_of_ends(UINT8, sizes, 0, 0, generator) * (LARGEST_REAL / UINT8.high)
    value.view(-1)[0] = SMALLEST_REAL  # a grid made at run time then has the scale 1
    return value


def operands(site: Site, generator: torch.Generator) -> dict[fx.Node, Tensor]:
    """Draw operands of a kernel, by node, from the whole range; float operands exceed the quantization's range and include NaN and ±∞."""
    values = {}
    for node in site.match.reads:
        if fact(node).dtype.is_floating_point:
            values[node] = _real(site, node, generator)
        elif qparams(node) is None:
            values[node] = _accumulators(site, node, generator)
        else:
            dtype, low, _ = _grid(site, node)
            values[node] = whole_range(dtype, site.sizes[node], low, generator)
    return values


def _accumulators(site: Site, node: fx.Node, generator: torch.Generator) -> Tensor:
    """Draw accumulators of a proved range: some at its ends, others of every magnitude."""
    if node not in site.forms.ranges:  # integers that the model takes
        return whole_range(INT32, site.sizes[node], INT32.low, generator).to(fact(node).dtype)
    value = site.forms.ranges[node]
    part = torch.rand(site.sizes[node], generator=generator, device="cpu", dtype=torch.float64)
    scale = 2.0 ** (-40 * torch.rand(part.shape, generator=generator, device="cpu", dtype=torch.float64)).floor_()
    drawn = torch.where(part < 0.5, value.low * (1 - 2 * part) * scale, value.high * (2 * part - 1) * scale)
    ends = torch.where(part < 0.05, value.low, torch.where(part > 0.95, value.high, drawn))
    return ends.clamp(value.low, value.high).to(fact(node).dtype)


def _real(site: Site, node: fx.Node, generator: torch.Generator) -> Tensor:
    root = site.match.root
    if root.target is dynamic_linear:
        return of_any_range(site.sizes[node], generator)
    arguments: Any = root.args
    scale, low, high = site.constant(arguments[1]), int(arguments[2]), int(arguments[3])
    steps = torch.randint(2 * (low - 2), 2 * (high + 3), site.sizes[node], generator=generator, device="cpu")
    value = steps.to(torch.float32) / 2 * scale  # whole steps, and ties
    noise = torch.rand(site.sizes[node], generator=generator, device="cpu", dtype=torch.float32) * scale
    value = torch.where(torch.randint(0, 2, steps.shape, generator=generator, device="cpu") == 0, value, value + noise)
    special = torch.randint(0, 64, steps.shape, generator=generator, device="cpu")
    for index, number in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 3.4e38)):
        value.masked_fill_(special == index, number)
    return value


def of_any_range(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw float32 values of a grid of scale 1: integers, some at its ends, and some values between integers, including ties."""
    value = torch.randint(int(SMALLEST_REAL), int(LARGEST_REAL) + 1, sizes, generator=generator, device="cpu").float()
    choice = torch.randint(0, EXTREMES, sizes, generator=generator, device="cpu")
    value = value.masked_fill_(choice == 0, SMALLEST_REAL).masked_fill_(choice == 1, LARGEST_REAL)
    between = torch.randint(0, 5, sizes, generator=generator, device="cpu").float() / 4
    return torch.where(choice == 2, value + between, value).clamp_(SMALLEST_REAL, LARGEST_REAL)


def run(site: Site, implementation: Implementation, built: Built, drawn: dict[fx.Node, Tensor], like: list[Tensor]) -> list[Tensor]:
    """Return the results of an implementation for these operands, as kernels hold them, or, of a strided one, as primitives do: `like`.

    Raises Disagrees where a strided one gives different results for the two forms of its operands.
    """
    if implementation.strided:
        forms = [[drawn[node] for node in site.match.reads], [_viewed(site, node, drawn[node]) for node in site.match.reads]]
        plain, viewed = ([torch.empty_like(each) for each in like] for _ in forms)
        for inputs, outputs in zip(forms, (plain, viewed), strict=True):
            built.bind()(inputs, outputs if site.match.results else outputs[0])
        if not all(map(torch.equal, plain, viewed)):
            raise Disagrees("it differs between the two forms of its operands on this machine")
        return plain
    are_held = [implementation.reads_held and not fact(node).dtype.is_floating_point for node in site.match.reads]
    inputs = [site.held(node).packed(drawn[node]) if held else drawn[node] for node, held in zip(site.match.reads, are_held, strict=True)]
    is_real = fact(site.match.root).dtype.is_floating_point
    output = torch.empty(site.sizes[site.match.root], dtype=torch.float32, device="cpu") if is_real else site.result().memory()
    built.bind()(inputs, output)
    return [output]


def _viewed(site: Site, node: fx.Node, value: Tensor) -> Tensor:
    """Return an operand as a view of bytes that kernels hold, where it is one of bytes."""
    if value.dtype not in (torch.int8, torch.uint8) or value.dim() < 2 or value.dim() > 5:
        return value
    form = site.held(node)
    return form.unpack(form.packed(value))


def prove(site: Site, implementation: Implementation, built: Built) -> None:
    """Raise Disagrees if an implementation differs from the primitives for one of `draws`, NotApplicable if it does not run here."""
    for values in draws(site, torch.Generator().manual_seed(0)):
        try:
            expected = evaluate(site.model, site.match, values)
            results = run(site, implementation, built, values, expected)
        except RuntimeError as error:
            raise NotApplicable(f"it does not run here: {str(error).splitlines()[0]}") from error
        if expected[0].is_floating_point() or implementation.strided:
            apart = torch.cat([(one != other).flatten() for one, other in zip(results, expected, strict=True)])
        else:
            zero = grid(site.match.root).zero_point if site.result().dtype == torch.uint8 else 0
            apart = site.result().centred(results[0]) != expected[0].to(torch.int64) - zero
        if bool(apart.any()):
            raise Disagrees(f"it differs from the primitives in {int(apart.sum())} of {apart.numel()} elements on this machine")


def is_primitive(node: fx.Node) -> bool:
    """Return whether a node is a call of a primitive."""
    return node.op == "call_function" and node.target in PRIMITIVES


# ---- sums of products, the proof of their requantization, and tables of all bytes ----------------------------------------
AROUND = (-1, 0, 1, 2)  # of the sum below a step of the result, those that are compared


def magnitude(node: fx.Node) -> int:
    """Return the largest absolute value of a centred integer of a tensor of bytes."""
    described = grid(node)
    return max(described.zero_point, 255 - described.zero_point) if described.dtype == "uint8" else 128


@dataclass(frozen=True)
class Layer:
    """The constants of a sum of products."""

    weight: Tensor  # (out, in / groups, depth, height, width), int8; ones for a sum over windows
    given: Tensor | None  # the bias as it is, int32; None where there is none
    largest: float  # the largest |sum|, the residual included
    window: Mapping[str, Any]  # stride, padding, dilation, groups, and whether it is transposed, or padded unevenly

    @staticmethod
    def of(site: Site) -> Layer:
        """Return the layer of a place that matches. Raises NotApplicable where its channels are not the last dimension of held tensors."""
        parts, reads = dict(site.match.parts), site.match.reads
        is_linear = role_of(parts["sum"].target) is Role.LINEAR
        if any(len(site.sizes[node]) > 2 and site.held(node).channels_first == is_linear for node in (*reads, site.match.root)):
            raise NotApplicable("its tensors are held with another dimension as their channels")
        if parts["weight"] is None:
            _, parts["groups"], *area = site.sizes[reads[0]]
            weight = torch.ones(parts["groups"], 1, *parts.get("kernel", area), dtype=torch.int8, device="cpu")
        else:
            weight = site.tensor("weight")
        parts["uneven"] = parts["end"] != parts["padding"]
        parts["transposed"] = role_of(parts["sum"].target) is Role.TRANSPOSED
        weight = swap_channels(weight, parts["groups"]) if parts["transposed"] else weight
        weight = weight.reshape(*weight.shape[:2], *(1, 1, 1, *weight.shape[2:])[-3:])
        bias = site.constant(parts["bias"])
        bound = accumulator_bound(weight, bias, 0, magnitude(reads[0]))
        if parts["factor"] is not None:
            bound = bound + torch.ceil(residual_factor(site).flatten().abs() * magnitude(reads[1]))
        names = (*WINDOW, "groups", "transposed", "uneven")
        return Layer(weight, bias, float(bound.max()), {name: parts[name] for name in names})

    def convolutions(self, area: Sequence[int]) -> Iterator[tuple[Layer, tuple[Sequence[int], ...]]]:
        """Yield convolutions that compute the sums of an image of this area (depth, height, width) together: each with its outputs.

        These are their number, the first and the step along every dimension. The outputs of a transposed convolution whose places have
        one remainder by the stride are a convolution with those taps that meet elements of the operand.
        """
        if not self.window["transposed"]:
            yield self, (area, (0, 0, 0), (1, 1, 1))
            return
        steps = self.window["stride"]
        if math.prod(steps) > MOST_PARTS:
            raise NotApplicable(f"its strides make {math.prod(steps)} convolutions of it, more than {MOST_PARTS}")
        for first in itertools.product(*map(range, map(min, steps, area))):
            weight, paddings, dilations = self.weight, [0, 0, 0], [1, 1, 1]
            for dim, (begin, step, padding, spread) in enumerate(zip(first, *(self.window[name] for name in WINDOW), strict=True)):
                taps = [tap for tap in reversed(range(weight.shape[dim + 2])) if (begin + padding - tap * spread) % step == 0]
                if taps:
                    paddings[dim], dilations[dim] = (taps[0] * spread - begin - padding) // step, spread // math.gcd(spread, step)
                weight = weight.index_select(dim + 2, torch.tensor(taps, device="cpu")) if taps else weight.narrow(dim + 2, 0, 1) * 0
            sizes = [-(-(size - begin) // step) for size, begin, step in zip(area, first, steps, strict=True)]
            window = {**self.window, "stride": (1, 1, 1), "padding": paddings, "dilation": dilations}
            yield replace(self, weight=weight, window=window), (sizes, first, steps)

    def bias(self, zero: int) -> Tensor:
        """Return the bias for a sum of products of bytes with this zero, int32: exact modulo 2^32, as sums of 32 bits are."""
        whole = self.weight.flatten(1).to(torch.int64).sum(1) * -zero
        whole = whole if self.given is None else whole + self.given
        return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32)

    def prove_requantization(self, site: Site, requantized: Callable[[Tensor], Tensor]) -> None:
        """Raise Disagrees unless a function of int32 rows of sums gives the primitive's result, as held, for every possible sum.

        Both never fall as the sum grows, so they are equal everywhere if they are equal on both sides of every step of the result.
        """
        root = site.match.root
        if role_of(root.target) is not Role.REQUANTIZATION or site.proved:
            return
        sums = self._steps(site)
        is_linear = role_of(site.match.parts["sum"].target) is Role.LINEAR
        constants = [site.constant(node) if isinstance(node, fx.Node) else node for node in root.args[1:]]
        accumulator = sums if is_linear else sums.reshape(*sums.shape, *[1] * (len(site.sizes[root]) - 2))
        expected: Tensor = root.target(accumulator, *constants)  # type: ignore[operator]
        centred = expected.to(torch.int32).reshape(sums.shape).sub_(grid(root).zero_point)
        apart = requantized(sums).to(torch.int32).sub_(site.result().zero) != centred
        if bool(apart.any()):
            raise Disagrees(f"its requantization differs from the primitive's for {int(apart.sum())} of {apart.numel()} sums")

    def _steps(self, site: Site) -> Tensor:
        """Return for each channel the sums on both sides of every step of the result, the ends, and 0: int32, (sums, channels)."""
        root, channels = site.match.root, self.weight.shape[0]
        arguments: Any = root.args
        if root.target is quantization.requantize_real:
            ratio, low, high = site.constant(arguments[1]).double().flatten(), int(arguments[2]), int(arguments[3])
        else:
            shift, multiplier, right_shift = (site.constant(node).flatten() for node in arguments[1:4])
            ratio = multiplier.double() * power_of_two(-shift - right_shift)
            low, high = int(arguments[6]), int(arguments[7])
        steps = torch.arange(low - 1, high + 2, dtype=torch.float64, device="cpu")
        largest = min(self.largest, float(INT32_MAX))
        edges = []
        for place in (0.0, 0.5):  # where results round, and where they are floors
            below = torch.floor((steps[:, None] + place) / ratio.clamp_min(2.0**-60).expand(channels))
            edges.append(below)
            if root.target is quantization.requantize_fixed:  # a first shift moves a step to a multiple of its power, this one or the next
                first = power_of_two(shift).expand(channels)
                edges += [(torch.floor(below / first) + later) * first for later in (0, 1)]
        ends = torch.tensor([-largest, 1 - largest, -1.0, 0.0, 1.0, largest - 1, largest], dtype=torch.float64, device="cpu")
        around = torch.tensor(AROUND, dtype=torch.float64, device="cpu")[:, None, None]
        sums = (torch.cat([*edges, ends[:, None].expand(-1, channels)]) + around).clamp_(-largest, largest).flatten(0, 1)
        return sums.to(torch.int32)


def residual_factor(site: Site) -> Tensor:
    """Return the factor of a residual, float64; their product is rounded down and added."""
    shift = site.constant(site.match.parts["factor_shift"])
    factor = site.tensor("factor").double()
    return factor if shift is None else factor * power_of_two(-shift)


def enumerated(site: Site, forms: Sequence[ChannelsLast], result: ChannelsLast) -> Tensor:
    """Return the result's byte for every byte of one operand, or every pair of bytes of two; 0 where a byte is outside the tensor's range.

    The primitives compute it, so it is right for every operand. Where constants differ between channels, each byte of a pixel has 256.
    """
    valid = torch.ones((), dtype=torch.bool, device="cpu")
    values: dict[fx.Node, Tensor] = {}
    size = [256] * len(forms)
    if any(form.channels_first != result.channels_first for form in forms):
        raise NotApplicable("its operands and its result have different memory layouts")
    vary, channels = site.match.parts["channels"], result.channels if site.match.parts["channels"] else 1
    if vary and not result.channels_first and len(result.sizes) > 2:
        raise NotApplicable("its constants differ between elements of the last dimension")
    # Other constants have one element, and up to four dimensions.
    ones = [channels, *[1] * (len(result.sizes) - 2)] if vary else [1] * (4 - len(forms))
    for axis, (read, form) in enumerate(zip(site.match.reads, forms, strict=True)):
        dtype = ACTIVATION_TYPES[grid(read).dtype]
        stored = torch.arange(256, device="cpu") - form.zero + grid(read).zero_point
        shape = [256 if axis == index else 1 for index in range(len(forms))]
        valid = valid & ((stored >= dtype.low) & (stored <= dtype.high)).reshape(shape)
        stored = stored.clamp(dtype.low, dtype.high).to(dtype.storage)
        values[read] = stored.reshape(*shape, *[1] * len(ones)).expand(*size, *ones)
    integers = evaluate(site.model, site.match, values)[0].to(torch.int64) - grid(site.match.root).zero_point + result.zero
    table = torch.where(valid, integers.reshape(*size, channels).movedim(-1, 0), 0).to(torch.uint8).flatten(1)
    return F.pad(table, (0, 0, 0, result.pixel - channels if vary else 0)).flatten().contiguous()
