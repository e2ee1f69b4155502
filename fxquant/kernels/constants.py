"""The constants of an integer model that kernels were built for, watched for changes of every kind.

PyTorch counts most changes in a tensor's version. It does not count those through `.data`, through NumPy, of inference tensors, or of
memory that is shared with another process. So memory is compared as well. A small model is compared in full in every call. Of a larger
model, every call compares samples of every tensor, and the rest by turns. `EACH_CALL` bounds the bytes that a call compares.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.ir.graph import resolve
from fxquant.support import Offers
from fxquant.support.files import memory_start, start

EACH_CALL = 2**16  # bytes
SAMPLE, SAMPLES = 64, 4  # bytes of a sample, and how many of each tensor there are


class Span(NamedTuple):
    """A part of a tensor's memory, of `size` bytes from `first` on."""

    tensor: Tensor
    first: int
    size: int


WATCHES = Offers[Callable[[Sequence[Span], Sequence[Span]], Any]]()  # of which one makes a watch with the methods of `Checksums`, or none


class Checksums:
    """A watch of memory for changes since it was made, in Python: slower for each byte than one in C, so it compares fewer samples."""

    def __init__(self, always: Sequence[Span], by_turns: Sequence[Span]) -> None:
        spans = [by_turns] if by_turns else [[span] for span in always]  # samples of a large model are part of what comes by turns
        self.parts = [(memory, zlib.crc32(memory)) for group in spans for memory in map(_memory, group)]
        self.next, self.turns = 0, bool(by_turns)

    def changed(self, everything: bool) -> bool:
        """Return whether a change was found in the spans for every call and in the next ones by turns, or, if `everything`, in all."""
        chosen = self.parts
        if self.turns and not everything:
            chosen, self.next = [self.parts[self.next]], (self.next + 1) % len(self.parts)
        return any(zlib.crc32(memory) != checksum for memory, checksum in chosen)


def _memory(span: Span) -> memoryview:
    """Return the bytes of a span, in the tensor's own memory."""
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(span.tensor.untyped_storage())
    begin = span.tensor.storage_offset() * span.tensor.element_size() + span.first
    return storage.numpy().data[begin : begin + span.size]


_Found = tuple[dict[str, Any], str, Any, int | None, Tensor | None, int]  # where it is held, its version, its memory


class Constants:
    """The present constants of a graph."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.found: list[_Found] = []
        self.watch: Any = None
        self.turn = -1
        for path in dict.fromkeys(str(node.target) for node in model.graph.find_nodes(op="get_attr")):
            *parents, name = path.split(".")
            module = resolve(model, ".".join(parents)) if parents else model
            value: Any = resolve(model, path)
            for holder in (module._buffers, module._parameters, module._modules):
                present: Any = holder.get(name)
                if present is value:
                    counted = isinstance(value, Tensor) and not value.is_inference()
                    # An alias keeps the memory from being reused; a value without memory on the CPU has none.
                    holds = isinstance(value, Tensor) and value.layout == torch.strided and value.is_cpu
                    alias, version = value.detach() if holds else None, value._version if counted else None
                    self.found.append((holder, name, value, version, alias, 0 if alias is None else memory_start(alias)))

    def same(self) -> bool:
        """Return whether tensors, memory and versions are unchanged; strides and dtype are compared for one tensor in each call."""
        for holder, name, value, version, alias, place in self.found:
            present: Any = holder.get(name)
            if present is not value or (version is not None and value._version != version):
                return False
            if alias is not None and memory_start(value) != place:
                return False
        self.turn = (self.turn + 1) % max(1, len(self.found))
        return not self.found or self._lies_as_it_did(self.found[self.turn])

    @staticmethod
    def _lies_as_it_did(entry: _Found) -> bool:
        """Return whether a tensor that begins at its former address has its former strides and dtype."""
        _, _, value, _, alias, _ = entry
        return alias is None or (value.is_set_to(alias) and value.dtype is alias.dtype)

    def look(self) -> None:
        """Record the present contents of memory: kernels are built from it from now on."""
        if self.watch is None:
            always, by_turns = _spans([alias for _, _, _, _, alias, _ in self.found if alias is not None and start(alias)])
            self.watch = next((watch for make in WATCHES.known if (watch := make(always, by_turns)) is not None), None)
            self.watch = self.watch or Checksums(always, by_turns)

    def changed(self, everything: bool = False) -> bool:
        """Return whether memory differs from what `look` recorded; False before that."""
        if everything and not all(map(self._lies_as_it_did, self.found)):
            return True
        return self.watch is not None and self.watch.changed(everything)


def _spans(tensors: Sequence[Tensor]) -> tuple[list[Span], list[Span]]:
    """Return the spans of memory that every call compares, and the spans that calls compare by turns, one per call."""
    whole = [Span(tensor, 0, _extent(tensor)) for tensor in tensors]
    if sum(span.size for span in whole) <= EACH_CALL:
        return whole, []
    samples = []
    for tensor, _, size in whole:
        if size <= SAMPLE * SAMPLES:
            samples.append(Span(tensor, 0, size))
        else:
            apart = (size - SAMPLE) // (SAMPLES - 1)
            samples += [Span(tensor, index * apart, SAMPLE) for index in range(SAMPLES)]
    pieces = [Span(tensor, first, min(EACH_CALL, size - first)) for tensor, _, size in whole for first in range(0, size, EACH_CALL)]
    return samples, pieces


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element to the last; 0 for a tensor without elements."""
    if not tensor.numel():
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()
