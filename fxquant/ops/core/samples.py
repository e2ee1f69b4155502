"""Small samples of an operator's arguments, on its record, from which tests and benchmarks make their inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fxquant.numerics.grids import Interval

# Intervals that samples are uniform in.
POSITIVE, ABOVE_ONE, WITHIN_ONE, SHARES = (0.3, 3.0), (1.2, 3.0), (-0.9, 0.9), (0.1, 0.9)

Meaning = TypeVar("Meaning", bound=Callable[..., Any])
IMAGES = {1: (3, 9), 2: (3, 6, 6), 3: (3, 4, 5, 6)}  # shapes, by the number of spatial dimensions
# Distances from the float function, in steps of the result's scale. Half a step is the last rounding.
EXACT = 0.0  # values are moved or chosen, never computed
LIMITED = 0.501  # limits are rounded to the grid; values are exact
ROUNDED = 0.52  # the requantization multiplier has 15 bits, and the accumulator 16 when it is multiplied
ALIGNED = 0.54  # operands are brought to a common scale first
COMPOSED = 0.6  # a last rounding of what was computed in 16 bits
NORMED = 1.5  # the result does not grow with the operand, so its largest values may saturate
ATTENDED = 1.6  # shares are rounded to the output's dtype before they are summed
FOLDED = 3.0  # the batch norm moves the weights off the grid they were on
JUMPS = 4.0  # the function jumps from its largest value: it comes near it where no batch did
HEADS = 4.0  # what is attended to is projected before and after
SAMPLED = 4.0  # positions are rounded to a part of a pixel, and neighbours may differ by the whole range
RECURRENT = 6.0  # the state of a step, rounded, is an operand of the next one


@dataclass(frozen=True)
class Sample:
    """One call of an operator."""

    # By canonical parameter: of one that takes an activation the shape of a float32 tensor, without the batch; of any other the value
    # itself. A parameter that is absent has its default. Of a text: the shapes of its operands, by name.
    arguments: Mapping[str, Any]
    over: Interval | None = None  # the interval in which activations are uniform; None: they are normal
    # The largest distance of the integer result from the float function, in steps of the result's scale, for int8 activations that lie on
    # their grid; None: the limit of its kind of operator. A result without a grid has to be equal.
    within: float | None = None
    share: float = 0.0  # the share of elements that may be farther off, where rounding crosses a jump of the function, or changes an order
    text: str = ""  # the call as it is written in a model; "": it has the canonical arguments, in each call form


def sample(over: Interval | None = None, within: float | None = None, share: float = 0.0, **arguments: Any) -> Sample:
    """Return a sample with these arguments, by name; see `Sample`."""
    return Sample(arguments, over, within, share)


def written(
    *texts: str, over: Interval | None = None, within: float | None = None, share: float = 0.0, **shapes: tuple[int, ...]
) -> tuple[Sample, ...]:
    """Return one sample for each text, a call written as in a model.

    A text is an expression of x, y and z, or the constructor of a module. Braces are evaluated once: {P(3, 1)} is a parameter.
    A call of a bare name, "relu(x)", stands for the functions and methods of PyTorch of that name. Operands are images, unless `shapes`
    has other ones; the last shape serves for the operands that follow as well.
    """
    return tuple(Sample(shapes or {"x": IMAGES[2]}, over, within, share, text) for text in texts)


def sampled(*texts: str, **settings: Any) -> Callable[[Meaning], Meaning]:
    """Return a decorator that adds samples, see `written`, to an operator's declaration, before the samples it already has."""

    def decorate(meaning: Meaning) -> Meaning:
        further = getattr(meaning, "samples", ())
        vars(meaning)["samples"] = (*written(*texts, **settings), *further)
        return meaning

    return decorate
