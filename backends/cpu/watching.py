"""Checksums of the constants of integer models, by native.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from fxquant.backends.cpu import native
from fxquant.kernels import constants
from fxquant.kernels.constants import Span
from fxquant.support.addresses import address


class NativeWatch:
    """A `Watch` in C. It keeps the tensors of its spans, and so their memory, alive."""

    def __init__(self, always: Sequence[Span], by_turns: Sequence[Span]) -> None:
        self.spans = (*always, *by_turns)
        count = len(self.spans)
        self.starts = (ctypes.c_void_p * count)(*(address(tensor) + first for tensor, first, _ in self.spans))
        self.sizes = (ctypes.c_int64 * count)(*(size for _, _, size in self.spans))
        self.known = (ctypes.c_uint64 * count)()
        self.structure = native.Watch(always=len(always), count=count, next=len(always))
        for name in ("starts", "sizes", "known"):
            setattr(self.structure, name, ctypes.addressof(getattr(self, name)))
        self.function, self.place = native.library().fxq_watch, ctypes.addressof(self.structure)
        self._run(remember=1, everything=0)

    def changed(self, everything: bool) -> bool:
        """Return whether a watched span was edited: any of them, or any of those that are next."""
        return self._run(remember=0, everything=int(everything))

    def _run(self, remember: int, everything: int) -> bool:
        self.structure.remember, self.structure.everything = remember, everything
        self.function(self.place)
        return bool(self.structure.changed)


constants.WATCHES.add(lambda *spans: None if isinstance(native.library(), str) else NativeWatch(*spans))
