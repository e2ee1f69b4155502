"""Cubic interpolation of an image between its pixels: four neighbours along each axis, with weights from a table."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fxquant.primitives.bounds import Range, Value, constant_of, exact_below, need, within
from fxquant.primitives.record import Emitter, primitive
from fxquant.primitives.sampling import brought_inside, onnx_brought_inside

TAPS = 4  # the first of them lies one pixel before the one that a position is behind of


def _onnx_sample_cubic(
    e: Emitter, input: str, coordinates: str | Tensor, weights: Tensor, sizes: list[int], bits: int, padding: str, corners: bool, wide: bool
) -> str:
    width, around = torch.float64 if wide else torch.float32, 1 if padding == "zeros" else 0
    image = e.node("Cast", input, to=width)
    if around:
        image = e.node("Pad", image, e.constant([0, 0, 1, 1, 0, 0, 1, 1]), e.constant(0.0, width))
    strides = [sizes[1] + 2 * around, 1]
    pixels = e.node("Transpose", e.node("Reshape", image, e.constant([0, 0, -1])), perm=[0, 2, 1])
    where = e.constant(coordinates.float()) if isinstance(coordinates, Tensor) else e.node("Cast", coordinates, to=torch.float32)
    pixel, step, axes = e.constant(2.0**bits), e.constant(2.0**-bits), []
    for axis, size in enumerate(sizes):
        position = e.node("Gather", where, e.constant([1 - axis]), axis=3)
        first = e.node("Floor", e.node("Mul", position, step))
        fraction = e.node("Cast", e.node("Sub", position, e.node("Mul", first, pixel)), to=torch.int64)
        taps = []
        for tap in range(TAPS):
            place = e.node("Add", first, e.constant(float(tap - 1)))
            if padding == "zeros":
                place = e.node("Clip", e.node("Add", place, e.constant(1.0)), e.constant(0.0), e.constant(size + 1.0))
            else:
                place = e.node("Mul", onnx_brought_inside(e, e.node("Mul", place, pixel), size, bits, padding, corners), step)
            whole = e.node("Mul", e.node("Cast", place, to=torch.int64), e.constant(strides[axis], torch.int64))
            taps.append((whole, e.node("Gather", e.constant(weights[:, tap].contiguous(), width), fraction, axis=0)))
        axes.append(taps)
    total = ""
    for (row, down), (column, across) in itertools.product(*axes):
        found = e.node("GatherND", pixels, e.node("Add", row, column), batch_dims=1)
        found = e.node("Mul", found, e.node("Mul", down, across))
        total = e.node("Add", total, found) if total else found
    # Round is a barrier: without it the runtime may fuse a multiplier after it with the sum.
    return e.node("Transpose", e.node("Round", total), perm=[0, 3, 1, 2])


def _bounds_sample_cubic(
    input: Value, coordinates: Value, weights: Value, sizes: list[int], bits: int, padding: str, corners: bool, wide: bool
) -> Range:
    need(list(input.fact.shape[2:]) == list(sizes) and len(sizes) == 2, "its image and its annotation differ in size")
    need(coordinates.fact.shape[-1] == 2 and len(coordinates.fact.shape) == 4, "it has not one coordinate per dimension")
    need(1 <= bits <= 8 and padding in ("zeros", "border", "reflection"), "its settings are unknown")
    need(coordinates.largest + (max(sizes) + 4) * 2**bits < 2**23, f"its coordinates can reach {coordinates.largest}")
    factors = constant_of(weights, "table of weights").double()
    need(list(factors.shape) == [2**bits, TAPS], "its table of weights has another size")
    return within(input.largest * float(factors.abs().sum(1).max()) ** 2, exact_below(wide))


@primitive(_onnx_sample_cubic, bounds=_bounds_sample_cubic, kind="accumulator")
def sample_cubic(
    input: Tensor, coordinates: Tensor, weights: Tensor, sizes: list[int], bits: int, padding: str, corners: bool, wide: bool
) -> Tensor:
    """Compute Σ w·q of an image (N, C, *sizes) at every position of (N, H, W, 2), x first, in steps of 2^-bits of a pixel.

    Row r of `weights`, of shape (2^bits, 4), holds the weights of the four neighbours along an axis for a position with remainder r; w is
    the product of two of them. Outside, the image is 0 if `padding` is "zeros", and the nearest pixel if it is "border". For "reflection"
    it is mirrored, at the centres of the outermost pixels (`corners`) or at their outer edges. The result is an accumulator: int32, below
    2^24 in magnitude, or, if `wide`, int64, below 2^53.
    """
    width, around = torch.float64 if wide else torch.float32, 1 if padding == "zeros" else 0
    image = torch.nn.functional.pad(input.to(width), [around] * 4)
    strides, pixels = [sizes[1] + 2 * around, 1], image.flatten(2)
    axes = []
    for position, size, stride in zip(coordinates.to(torch.int64).flip(-1).unbind(-1), sizes, strides, strict=True):
        first, taps = position >> bits, []
        factors = weights.to(width)[position - (first << bits)]
        for tap in range(TAPS):
            place = first + (tap - 1)
            inside = (
                (place + 1).clamp(0, size + 1)
                if padding == "zeros"
                else brought_inside(place << bits, size, bits, padding, corners) >> bits
            )
            taps.append((inside * stride, factors[..., tap]))
        axes.append(taps)
    total = torch.zeros((), dtype=width, device=image.device)
    for (row, down), (column, across) in itertools.product(*axes):
        found = pixels.gather(2, (row + column).flatten(1).unsqueeze(1).expand(-1, pixels.shape[1], -1))
        total = total + found * (down * across).flatten(1).unsqueeze(1)
    total = total.reshape(*input.shape[:2], *coordinates.shape[1:3])
    return total.to(torch.float32 if not wide else width) if input.is_floating_point() else total.to(torch.int64 if wide else torch.int32)
