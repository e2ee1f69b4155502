"""The quality of the outputs, and the composition of their noise if no single layer explains it.

    local error of a tensor     e = v' - f(w'), of the operator f in float, with the operands w' and the result v' of the other form

The effect of a set of errors on the outputs is measured: they are added to the float model's tensors, in one run over the first batch.
Errors of different layers are hardly correlated, so their shares of the outputs' noise add up.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from torch import Tensor

from fxquant.accuracy import STEPS
from fxquant.reporting.effects import Effects
from fxquant.reporting.statistics import LayerComparison, ratio
from fxquant.reporting.tensor_rules import Judged
from fxquant.support.progress import progress

GOOD, VISIBLE = 30.0, 15.0  # dB: from here on noise is 3 % of the outputs, root mean square; 18 %
SEGMENTS = 16  # in which layers are looked at together, at most
RANGE_SHARE = 0.5  # the share of the noise that a range of layers makes
NARROW = 1 / 3  # of the layers that such a range has at most
MIN_LAYERS = 6  # layers that a model has for one to be a range
OFFSET = 0.25  # the share of the noise that a constant for each channel makes
FAR = 2.0  # how many times as far as elsewhere the largest values of a range of layers are from their root mean square

# What fxq.tune tries, in its order: what calibration does, otherwise, the last step first, then wider types, and last what learns.
TRIED = (
    *("observers", *(step.name for step in reversed(STEPS) if step.remedies is not None), "16 bits", "mixed precision"),
    *(step.name for step in STEPS if step.find is None),
)
OF_ACTIVATIONS = ("observers", "16 bits")
OF_WEIGHTS = ("rounding of weights", "AdaRound")


@dataclass(frozen=True)
class Verdict:
    """The quality of the outputs, that of the worst floating-point output, or part of one."""

    grade: str  # "good", "visible" or "poor", by the thresholds GOOD and VISIBLE
    output: str  # the name of the worst output, or of a part of it: "output 0 (%sigmoid)"
    sqnr: float  # its signal-to-noise ratio in dB
    causes: tuple[str, ...] = ()  # the composition of its noise, if it is not good and no single layer dominates
    tries: tuple[str, ...] = ()  # names of the parts of `fxq.tune` to try first by these causes

    @property
    def lines(self) -> tuple[str, ...]:
        """The grade with its thresholds, the causes, and the parts of `fxq.tune` to try, as lines of text."""
        reached = "equal to the float model's" if self.sqnr == math.inf else f"{self.sqnr:.1f} dB"
        thresholds = f"good from {GOOD:.0f} dB on, visible from {VISIBLE:.0f} dB on, poor below"
        lines = [f"the outputs are {self.grade}: {self.output} is {reached} ({thresholds})", *self.causes]
        if self.causes:
            first = f"; {' and '.join(self.tries)} fit these causes" if self.tries else ""
            lines.append(f"fxq.tune(model, batches) tries {', '.join(TRIED)}, and keeps what helps{first}")
        return tuple(lines)

    def __str__(self) -> str:
        return "\n    ".join(self.lines)


def verdict_on(outputs: Sequence[LayerComparison]) -> Verdict | None:
    """Return the verdict on these outputs; None where there is none."""
    worst = min(outputs, key=lambda output: output.sqnr, default=None)
    if worst is None:
        return None
    grade = "good" if worst.sqnr >= GOOD else "visible" if worst.sqnr >= VISIBLE else "poor"
    return Verdict(grade, worst.name, worst.sqnr)


_Share = tuple[str, tuple[str, ...]]  # a part of the noise in words, and what of `fxq.tune` is to be tried for it


def causes_of(tensors: Sequence[Judged], effects: Effects, show_progress: bool | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the causes of noise that no single layer explains, in words, and which parts of `fxq.tune` to try first."""
    errors = effects.local_errors()
    total = effects.of_errors(errors)
    if total <= 0:
        return (), ()
    causes = [_kinds(tensors, effects, total)]
    causes += _range(tensors, errors, effects, show_progress)
    causes += _offsets(errors, effects, total)
    return tuple(text for text, _ in causes), tuple(dict.fromkeys(name for _, tries in causes for name in tries))


def _kinds(tensors: Sequence[Judged], effects: Effects, total: float) -> _Share:
    """Return whether activations make most of the noise, or weights."""
    share = min(ratio(effects.of_grids(tensors), total), 1.0)
    count = len({each.reference for each in tensors if each.statistics.steps is not None})
    spread = f"the noise is spread over {count} tensors: rounding activations makes about {100 * share:.0f} % of it"
    rest = f"weights, biases and tensors inside operators {100 * (1 - share):.0f} %"
    return f"{spread}, {rest}", OF_ACTIVATIONS if share >= 0.5 else OF_WEIGHTS


def _range(tensors: Sequence[Judged], errors: Mapping[str, Tensor], effects: Effects, show_progress: bool | None) -> Iterator[_Share]:
    """Yield the shortest range of layers that makes most of the noise, where it is short."""
    there = [each for each in tensors if each.reference in errors]
    if len(there) < MIN_LAYERS:
        return
    count = min(len(there), SEGMENTS)
    ends = [round(len(there) * index / count) for index in range(count + 1)]
    segments = [there[first:last] for first, last in itertools.pairwise(ends)]
    shares = [
        effects.of_errors({each.reference: errors[each.reference] for each in segment if each.reference in errors})
        for segment in progress(segments, count, "where the noise is", show_progress)
    ]
    windows = [(last - first, -sum(shares[first:last]), first) for first in range(count) for last in range(first + 1, count + 1)]
    length, noise_of, first = min(window for window in windows if -window[1] >= RANGE_SHARE * sum(shares))
    inside = [each for segment in segments[first : first + length] for each in segment]
    if len(inside) > NARROW * len(there):
        return
    names = f"%{inside[0].name} to %{inside[-1].name}, {len(inside)} of {len(there)} tensors," if len(inside) > 1 else f"%{inside[0].name}"
    cause, tries = _cause(inside, [each for each in there if each not in inside], errors)
    yield (f"{names} make{'s' * (len(inside) == 1)} {100 * -noise_of / sum(shares):.0f} % of it: {cause}", tries)


def _cause(inside: Sequence[Judged], others: Sequence[Judged], errors: Mapping[str, Tensor]) -> tuple[str, tuple[str, ...]]:
    """Return the common cause of these tensors' errors, in words, and the parts of `tune` that reduce it."""
    own = sum(ratio(each.statistics.truncation + each.statistics.rounding, each.statistics.signal) for each in inside)
    local = sum(ratio(float(errors[each.reference].square().mean()), _power(each)) for each in inside)
    if own < local / 2:
        return "by weights and biases, or tensors inside operators", OF_WEIGHTS
    if sum(each.statistics.truncation for each in inside) > sum(each.statistics.rounding for each in inside):
        return "by values that are clipped", OF_ACTIVATIONS
    far, usual = (median_high([_crest(each) for each in tensors] or [0.0]) for tensors in (inside, others))
    if far >= FAR * usual:
        times = f"{far:.0f} times the root mean square, and {usual:.0f} times elsewhere"
        return f"by rare, large values that set scales, {times}", OF_ACTIVATIONS
    return "by rounding of values", OF_ACTIVATIONS


def _power(tensor: Judged) -> float:
    return ratio(tensor.statistics.signal, tensor.statistics.elements)


def _crest(tensor: Judged) -> float:
    """Return the largest magnitude over the root mean square."""
    statistics = tensor.statistics
    return ratio(max(abs(statistics.low), abs(statistics.high)), math.sqrt(_power(tensor))) if statistics.low <= statistics.high else 0.0


def _offsets(errors: Mapping[str, Tensor], effects: Effects, total: float) -> Iterator[_Share]:
    """Yield the share of noise that a constant for each channel causes, which a bias could correct."""
    constants = {}
    for name, error in errors.items():
        if error.dim() > 1:
            channel = 1 if error.dim() > 3 else error.dim() - 1
            constants[name] = error.mean([dim for dim in range(error.dim()) if dim != channel], keepdim=True)
    share = ratio(effects.of_errors(constants), total)
    if share >= OFFSET:
        makes = f"a constant for each channel makes about {100 * min(share, 1.0):.0f} % of it"
        yield f"{makes}, which biases could take back", ("corrections",)
