"""Kernels: each is a pattern of primitives, which define it, and implementations, each with the conditions under which it is exact.

The package's docstring says how tensors are held between kernels; `ChannelsLast` describes the layout.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxquant.errors import Unless
from fxquant.ir.graph import resolve
from fxquant.ir.integer import QParams, qparams
from fxquant.primitives.proof import ranges
from fxquant.primitives.record import Value
from fxquant.support.files import readable

SIZES = tuple[int, ...]
BIASED = 128  # what is added to int8, where it has negative integers
ALIGNMENT = 4  # the elements of a pixel are a multiple of this
SLACK = 64  # bytes after a held tensor that vector instructions may read


@dataclass(frozen=True)
class Match:
    """A place in a graph where a pattern was found."""

    root: fx.Node  # the node whose value the kernel computes
    covers: tuple[fx.Node, ...]  # the primitives that are computed with it, the root last
    reads: tuple[fx.Node, ...]  # the quantized tensors, or float ones, that it reads
    parts: Mapping[str, Any] = field(default_factory=dict)  # the rest, by name: nodes of constants, numbers, primitives
    results: tuple[fx.Node, ...] = ()  # those of them beside the root that others read


def in_order(sources: Iterable[fx.Node], *roots: fx.Node) -> list[fx.Node]:
    """Return the nodes that compute the roots from the sources, constants included, each after its operands."""
    order = dict.fromkeys(sources)
    count, waiting = len(order), [*roots]
    while waiting:
        missing = [operand for operand in waiting[-1].all_input_nodes if operand not in order]
        waiting += missing
        if not missing:
            order[waiting.pop()] = None
    return list(order)[count:]


Matched = Match | str | None


@dataclass(frozen=True)
class ChannelsLast:
    """The layout of a kernel's tensor: `rows` pixels of `pixel` elements, whose first `channels` are valid."""

    sizes: SIZES
    zero: int = 0  # the byte that stands for the centred integer 0
    dtype: torch.dtype = torch.uint8  # uint8, or int32 for accumulators, which have no zero
    channels_first: bool = True  # whether dimension 1 is the channels, as of images and sequences (N, C, L); else the last one is

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        """Images, depth, height, width and channels; a depth, height or width that is missing is 1."""
        if self.channels_first:
            batch, channels, *area = self.sizes
            depth, height, width = (1, 1, *area)[-3:]
            return batch, depth, height, width, channels
        return math.prod(self.sizes[:-1]), 1, 1, 1, self.sizes[-1]

    @property
    def channels(self) -> int:
        return self.grid[-1]

    @property
    def pixel(self) -> int:
        return -(-self.channels // ALIGNMENT) * ALIGNMENT

    @property
    def rows(self) -> int:
        return math.prod(self.grid[:-1])

    def memory(self) -> Tensor:
        """Allocate memory of shape (rows, pixel), followed by the slack."""
        size = self.rows * self.pixel
        return torch.empty(size + SLACK // self.dtype.itemsize, dtype=self.dtype, device="cpu")[:size].view(self.rows, self.pixel)

    def of(self, held: Tensor) -> "ChannelsLast":
        """Return how a tensor with another number of images, or of rows, is held."""
        images = held.shape[0] // max(1, self.rows // max(1, self.sizes[0]))
        return replace(self, sizes=(images, *self.sizes[1:]))

    def unpack(self, held: Tensor) -> Tensor:
        """Return a view of a buffer that kernels hold, of the tensor's own shape `sizes`, without the padding of pixels."""
        pixels = held.view(*self.grid[:-1], self.pixel)[..., : self.channels]
        return (pixels.movedim(-1, 1) if self.channels_first else pixels).view(self.sizes)

    def pack(self, value: Tensor, held: Tensor) -> None:
        """Write the tensor `value`, in the form of primitives, into the buffer `held`, in the form of kernels."""
        batch, *area, channels = self.grid
        pixels = held.view(batch, *area, self.pixel)[..., :channels]
        value = value.reshape(batch, channels, *area).movedim(1, -1) if self.channels_first else value.reshape(pixels.shape)
        if value.dtype == torch.int8:
            value = readable(value).view(torch.uint8)
            if self.zero:
                torch.bitwise_xor(value, BIASED, out=pixels) if pixels.is_contiguous() else pixels.copy_(value ^ BIASED)
                return
        pixels.copy_(value)

    def packed(self, value: Tensor) -> Tensor:
        """Return new memory that holds a tensor."""
        memory = self.memory()
        self.pack(value, memory)
        return memory

    def plain(self, held: Tensor, dtype: torch.dtype, strides: SIZES) -> Tensor:
        """Return a copy of a buffer that kernels hold, in the form of primitives: of shape `sizes` and these strides, int8 centred."""
        value = self.unpack(held)
        result = torch.empty_strided(self.sizes, strides, dtype=value.dtype, device="cpu")
        result.copy_(value)
        if dtype == torch.int8:
            if self.zero:
                result.bitwise_xor_(BIASED)
            return result.view(torch.int8)
        return result

    def centred(self, held: Tensor) -> Tensor:
        return self.unpack(held).to(torch.int64) - self.zero


class NotApplicable(Unless):
    """Raised with the reason why an implementation does not serve a place, or this processor."""


class Disagrees(Exception):
    """Raised where an implementation, built for a place, computed other bits than the primitives there; says in how many elements."""


@dataclass(frozen=True)
class Forms:
    """The facts by which kernels hold the tensors of an integer graph, and prove that they compute them."""

    non_negative: frozenset[fx.Node]  # the quantized tensors without negative centred integers
    channels_first: frozenset[fx.Node]  # the tensors whose dimension 1 is the channels
    model: fx.GraphModule

    @cached_property
    def ranges(self) -> Mapping[fx.Node, Value]:
        """The proved range of every integer tensor."""
        return ranges(self.model)

    def held(self, node: fx.Node, sizes: SIZES) -> ChannelsLast:
        """Return the layout in which kernels hold a node's result, quantized or an accumulator, of shape `sizes`."""
        grid, dtype, first = qparams(node), node.meta["fact"].dtype, node in self.channels_first
        if dtype == torch.uint8 and grid is not None:
            return ChannelsLast(sizes, grid.zero_point, channels_first=first)
        if dtype == torch.int8:
            return ChannelsLast(sizes, 0 if node in self.non_negative else BIASED, channels_first=first)
        return ChannelsLast(sizes, 0, torch.int32, first)


@dataclass(frozen=True)
class Site:
    """One place where a kernel may run."""

    model: fx.GraphModule
    match: Match
    # Of every tensor of the graph, for as many images as the proof takes; what is built runs with any number.
    sizes: Mapping[fx.Node, SIZES]
    forms: Forms
    proved: bool = False  # whether an implementation was proved at a place like this before, on this machine

    def constant(self, node: Any) -> Any:
        return None if node is None else resolve(self.model, str(node.target)).detach()

    def tensor(self, name: str) -> Tensor:
        """Return a constant among the parts, by name."""
        constant: Tensor = self.constant(self.match.parts[name])
        return constant

    def held(self, node: fx.Node) -> ChannelsLast:
        """Return the layout in which kernels hold a node's result, quantized or an accumulator."""
        return self.forms.held(node, self.sizes[node])

    def result(self) -> ChannelsLast:
        return self.held(self.match.root)


def grid(node: fx.Node) -> QParams:
    """Return the grid of a quantized tensor."""
    described = qparams(node)
    assert described is not None
    return described


Bound = Callable[[Sequence[Tensor], Any], None]  # from what is read, as it is held, into the result; into a list with more `results`


class Built(Protocol):
    """A kernel built for the primitives of one site, for any batch size."""

    def bind(self) -> Bound:
        """Return a new function, for one thread at a time."""


@dataclass(frozen=True)
class Binding:
    """An implementation at one place that binds by a function."""

    bind: Callable[[], Bound]


@dataclass
class Implementation:
    """A way to compute a kernel."""

    name: str  # the name that `explain` shows
    build: Callable[[Site], Built]  # builds it for one place; raises NotApplicable where its conditions do not hold
    reads_held: bool = True  # whether it reads tensors in the layout of kernels (`ChannelsLast`); else in that of the primitives
    strided: bool = False  # whether it reads both, as tensors of any strides, and writes its result as the primitives would


def implementation(name: str, reads_held: bool = True, strided: bool = False) -> Callable[[Callable[[Site], Built]], Implementation]:
    """Return a decorator that makes an `Implementation` of its `build`."""
    return lambda build: Implementation(name, build, reads_held, strided)


@dataclass(frozen=True)
class Kernel:
    """A pattern of primitives, which define it, and how it may be computed, the fastest first.

    `match` returns a str, the reason, for a node that the kernel is for but does not serve, and None for any other node.
    """

    name: str
    match: Callable[[fx.Node], Matched]
    implementations: tuple[Implementation, ...]
