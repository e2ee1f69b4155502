"""Moving elements between channels and pixels."""

from __future__ import annotations

from fxquant.ops.core.operators import Guard, Lowering, Quantized, Same, fixed_sizes, known_sizes, lowered, sample
from fxquant.ops.movement.shape import numbers, result_varying
from fxquant.primitives import shape


def _rearrange(lowering: Lowering, input: Quantized, trailing: int, split: list[int], order: list[int], joined: list[int]) -> Quantized:
    """Split the last `trailing` dimensions into `split`, permute these by `order`, and merge them to the sizes `joined`.

    The dimensions before them are flattened into one, so that no more than one size depends on the batch.
    """
    value = lowering.call(shape.reshape, input.value, [-1, *split])
    value = lowering.call(shape.permute, value, [0, *(position + 1 for position in order)])
    return input.with_value(lowering.call(shape.reshape, value, [*numbers(input.shape[: len(input.shape) - trailing]), *joined]))


def _refuses(start: int) -> tuple[Guard, Guard]:
    """Refuse an operator that rearranges a dimension, from the dimension `start` on, whose size depends on the batch."""
    return fixed_sizes("it rearranges the batch", start=start), result_varying


@lowered(demand=Same(), carries=("input",), refuses=_refuses(-3), samples=(sample(input=(8, 2, 3), upscale_factor=2),))
def pixel_shuffle(lowering: Lowering, input: Quantized, upscale_factor: int) -> Quantized:
    """Channels moved into blocks of `upscale_factor`² pixels."""
    factor = upscale_factor
    channels, height, width = known_sizes(input.shape[-3:])
    channels //= factor * factor
    joined = [channels, height * factor, width * factor]
    return _rearrange(lowering, input, 3, [channels, factor, factor, height, width], [0, 3, 1, 4, 2], joined)


@lowered(demand=Same(), carries=("input",), refuses=_refuses(-3), samples=(sample(input=(3, 6, 6), downscale_factor=3),))
def pixel_unshuffle(lowering: Lowering, input: Quantized, downscale_factor: int) -> Quantized:
    """Blocks of `downscale_factor`² pixels moved into channels."""
    factor = downscale_factor
    channels, height, width = known_sizes(input.shape[-3:])
    height, width = height // factor, width // factor
    joined = [channels * factor * factor, height, width]
    return _rearrange(lowering, input, 3, [channels, height, factor, width, factor], [0, 2, 4, 1, 3], joined)


@lowered("native_channel_shuffle", demand=Same(), carries=("input",), refuses=_refuses(1), samples=(sample(input=(6, 2, 2), groups=2),))
def channel_shuffle(lowering: Lowering, input: Quantized, groups: int) -> Quantized:
    """Return the channels of `groups` groups in turn."""
    channels, *spatial = known_sizes(input.shape[1:])
    order = [1, 0, *range(2, 2 + len(spatial))]
    split = [groups, channels // groups, *spatial]
    return _rearrange(lowering, input, len(input.shape) - 1, split, order, [channels, *spatial])
