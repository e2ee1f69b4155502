"""Functions of 16 bits by segments, as a chip evaluates them: six tables between two straight lines."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fxquant.numerics.grids import EVERYTHING, Grid, Interval, float32, round_away
from fxquant.support import Offers

PLACES, TABLES, LAST, STEP = 256, 6, 63, 256  # distances between places; tables; the last entry of each; positions between two entries
LEAST, OVERFLOW = 1e-6, 2.0**31  # the least operand of a function with a pole; the steps from which an entry becomes the lowest integer


@dataclass(frozen=True)
class Segments:
    """A unary function as a chip evaluates it to find the segments that replace it."""

    function: Callable[[Tensor], Tensor]  # of float32 tensors, rounding to float32 as the chip's compiler does
    parity: int = 0  # 1 for an even function and -1 for an odd one, which are computed of magnitudes
    bends: Interval = EVERYTHING  # outside of it, it is a straight line
    pole: Callable[[Tensor], Tensor] | None = None  # returns the operand at which it reaches a value, if it is infinite at 0


def evenly(start: Tensor, stop: Tensor, parts: int) -> Tensor:
    """Return parts + 1 float32 numbers from `start` to `stop` in a new last dimension, at even distances rounded to float32."""
    distance = ((stop - start) / parts).unsqueeze(-1)
    numbers = start.unsqueeze(-1) + torch.arange(parts + 1, dtype=torch.float32, device="cpu") * distance
    numbers[..., -1] = stop
    return numbers


def _knots(form: Segments, first: Tensor, last: Tensor) -> Tensor:
    """Return the ends of the tables, 7 float32 numbers: from one to the next the slope changes by a sixth of its whole change."""
    places = evenly(first, last, PLACES)
    changes = form.function(places).diff(n=2).abs().double().cumsum(0).float()
    reached = torch.searchsorted(changes / changes[-1], torch.arange(1, TABLES, device="cpu") / TABLES) + 2
    ends = [0, *(min(place, PLACES) for place in reached.tolist()), PLACES]
    at = places[ends].tolist()
    knots, before = at[:1], 0
    while before < TABLES:  # tables that would end at one place share what is before it
        after = max(index for index, end in enumerate(ends) if end == ends[before + 1])
        distance = float32(float32(at[after] - at[before]) / (after - before))
        knots += [*(float32(at[before] + float32(index * distance)) for index in range(1, after - before)), at[after]]
        before = after
    return torch.tensor(knots, dtype=torch.float32, device="cpu")


def _in_short(slope: float, offset: float) -> tuple[int, int, int]:
    """Return v = (q · multiplier + (bias << left)) / 2^right for v = slope · q + offset: multiplier and bias of 16 bits."""
    slope, offset = (number if math.isfinite(number) else 0.0 for number in (slope, offset))
    right = min(max(15 - math.frexp(slope)[1], 0), 16) if slope else 15
    multiplier = _short(slope * 2.0**right)
    shifts = math.frexp(offset * 2.0**right)[1] - 15
    lowered = min(max(shifts - 15, 0), right)
    multiplier, right = multiplier >> lowered, right - lowered
    left = min(max(shifts - lowered, 0), 15)
    return multiplier, _short(offset * 2.0 ** (right - left)) << left, right


def _short(value: float) -> int:
    """Return the nearest integer, halves away from zero, within ±32767."""
    return int(math.copysign(min(math.floor(abs(value) + 0.5), 32767), value))


def wraps(form: Segments, scale: Tensor, step: Tensor) -> bool:
    """Return whether an entry at the end of the operand's range has too many steps, so that the chip stores the lowest integer."""
    return form.pole is None and bool(form.function(32767 * scale.float().cpu()) / step.float().cpu() >= OVERFLOW)


def by_segments(form: Segments, scale: Tensor, output: Grid, integers: Tensor) -> Tensor:
    """Return the integers of a unary function of int16 integers, int64, on a scale, in the output's storage, by the chip's segments."""
    scale, step = scale.cpu(), output.scale.cpu()
    low, high = (end * scale for end in (0.0 if form.parity else -32768.0, 32767.0))
    first, last = low.clamp_min(form.bends[0]), high.clamp_max(form.bends[1])
    if form.pole is not None:
        low, first = torch.full_like(low, LEAST), form.pole(output.high * step).clamp_min(0)
    knots = _knots(form, first, last)
    points = evenly(knots[:-1], knots[1:], LAST)
    values = form.function(points)
    entries = values / step
    overflows, entries = entries >= OVERFLOW, round_away(entries).nan_to_num(0).clamp(output.low, output.high).long()
    entries[overflows] = output.low
    # The straight lines, each through two points: those of the first and of the last entries, or of the ends of what lies outside.
    below, above = torch.stack([low, first]), torch.stack([last, high])
    of_low, *of_at = form.function(torch.stack([low, first, last])).tolist()
    ends = points[0, :2] if low >= first or math.isnan(of_low) else below, points[-1, -2:] if high <= last else above
    two = torch.stack(ends)
    slopes = torch.diff(form.function(two))[:, 0] / torch.diff(two)[:, 0]
    at = torch.stack([first, last])
    outer = slopes / step * scale, (torch.tensor(of_at, dtype=torch.float32, device="cpu") - slopes * at) / step
    per_table = torch.full_like(knots[1:], STEP * LAST) / torch.diff(knots)  # a number over a tensor would be rounded twice
    inner = per_table * scale, -knots[:-1] * per_table
    (first_slope, last_slope), (first_offset, last_offset), *tables = (numbers.tolist() for numbers in (*outer, *inner))
    lines = [(first_slope, first_offset), *zip(*tables, strict=True), (last_slope, last_offset)]
    short = torch.tensor([_in_short(*line) for line in lines], dtype=torch.int64, device="cpu")
    starts = round_away(knots / scale).long()
    offered = OFFERS.first(integers) if bool((starts.diff() >= 0).all()) else None
    evaluate = _evaluate if offered is None else offered.evaluate
    return evaluate(integers, Lines(starts, short, entries, form.parity, *output.bounds)).to(output.type.storage)


class Lines(NamedTuple):
    """Eight straight lines between 7 integers, of which the inner six are followed by tables."""

    starts: Tensor  # int64 of shape (7,): where a line starts, except the first
    lines: Tensor  # int64 of shape (8, 3): multiplier, bias and right shift of each
    entries: Tensor  # int64 of shape (6, 64): the tables
    parity: int  # of the function: 1, -1, or 0 for neither
    low: int  # low, high: the limits of the result
    high: int


class Evaluating(Protocol):
    """A backend's kernel for these functions."""

    def takes(self, integers: Tensor) -> bool:
        """Return whether the kernel is for this tensor."""

    def evaluate(self, integers: Tensor, lines: Lines) -> Tensor:
        """Return the function's integers of a tensor of int16 integers, int64, as `_evaluate` does; the starts ascend."""


OFFERS = Offers[Evaluating]()


def _evaluate(integers: Tensor, lines: Lines) -> Tensor:
    """Return the function's integers of a tensor of int16 integers, int64."""
    multiplier, bias, right = lines.lines.unbind(1)
    place = integers.abs().clamp_max(32767) if lines.parity else integers
    segment = torch.searchsorted(lines.starts, place)
    value = place * multiplier[segment] + bias[segment]
    value = (value + ((1 << right[segment]) >> 1)) >> right[segment]
    position = value.clamp(0, STEP * LAST)
    entry = (position // STEP).clamp_max(LAST - 1)
    beyond, row = position - STEP * entry, (segment - 1).clamp(0, TABLES - 1)
    between = (lines.entries[row, entry] * (STEP - beyond) + lines.entries[row, entry + 1] * beyond + STEP // 2) // STEP
    result = torch.where((segment == 0) | (segment == TABLES + 1), value, between).clamp(lines.low, lines.high)
    signed = torch.where(integers < 0, lines.parity * result, result) if lines.parity else result
    return signed.clamp(lines.low, lines.high)
