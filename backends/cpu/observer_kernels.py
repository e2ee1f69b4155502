"""The counts that observers take of float32 tensors, computed with training.c."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.backends.cpu import native
from fxquant.backends.cpu.native import Count
from fxquant.quantization.observers import counting
from fxquant.support.files import address, readable
from fxquant.support.offers import disagreed


class NativeCounting:
    """`Counting` in C, with equal results."""

    def takes(self, value: Tensor) -> bool:
        """Return whether there is a library, and the tensor is large, contiguous and in CPU memory."""
        fits = value.device.type == "cpu" and value.dtype == torch.float32 and value.is_contiguous()
        return fits and value.numel() >= SMALLEST and type(value) in PLAIN and _admitted()

    def ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.empty(2, len(rows), dtype=torch.float32, device="cpu").unbind()
        made = Count(rows=len(rows), columns=rows.shape[1])
        native.run(native.training_library(), "row_ends", made, (("value", rows), ("low", low), ("high", high)))
        return low, high

    def magnitudes(self, value: Tensor, places: Tensor | None, bins: int, reach: float) -> tuple[Tensor, Tensor]:
        counts, negative = torch.empty(2, bins, dtype=torch.float32, device="cpu").unbind()
        made = Count(bins=bins, last=reach, count=value.numel() if places is None else len(places))
        tensors = ("value", value), ("counts", counts), ("negative", negative), ("places", places)
        native.run(native.training_library(), "magnitudes", made, tensors)
        return counts, negative

    def signed(self, rows: Tensor, chosen: Sequence[int], apart: int, bins: int, top: float) -> Tensor:
        counts = torch.zeros(bins + 1, dtype=torch.float32, device="cpu")  # the last counts the values outside
        made = Count(bins=bins, columns=rows.shape[1], step=apart, first=-top, last=top)
        made.counts, rows = address(counts), readable(rows)
        for row in chosen:
            made.value = address(rows) + row * rows.shape[1] * rows.element_size()
            native.training_library().fxq_signed(ctypes.addressof(made))
        return counts[:bins]


@functools.cache
def _admitted() -> bool:
    """Return whether there is a library that counts as this PyTorch's torch.histc does: values in all bins, and at their ends."""
    if isinstance(native.training_library(), str):
        return False
    bins, reach = 512, 0.7
    edges = torch.linspace(-reach, reach, bins + 1, dtype=torch.float32, device="cpu")
    between = (torch.arange(2**13, dtype=torch.float32, device="cpu") / 2**12 - 1) * reach
    value = torch.cat((edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1), between)).clamp_(-reach, reach)
    found = NativeCounting().signed(value.unsqueeze(0), range(1), 1, bins, reach)
    counts, negative = NativeCounting().magnitudes(value, None, bins, reach)
    wanted = [torch.histc(each, bins, 0.0, reach) for each in (value.abs(), -value[value < 0])]
    signed = torch.histc(value, bins, -reach, reach)
    pairs = ((found, signed), (counts, wanted[0]), (negative, wanted[1]))
    apart = [int((one != other).sum()) for one, other in pairs]
    if any(apart):
        because = f"it differs from torch.histc in {sum(apart)} bins on this machine"
        disagreed(None, "the counting of observers in C", ["histograms"], because, "torch.histc counts")
    return not any(apart)


SMALLEST = 2**10  # elements of a tensor
PLAIN = (Tensor, torch.nn.Parameter)
counting.OFFERS.add(NativeCounting())
