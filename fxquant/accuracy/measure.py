"""The effect of a change on a model's outputs: their distance from the outputs before the change.

    noise of a part    Σ(y' - y)² / Σy² over all samples,   y' with the change

A part is an output, or one of the tensors that an output concatenates, such as boxes and scores, each with its own scale.

A change is anything that makes outputs differ: integers in place of floats, one tensor or weight that is rounded, a range, a bias. Advice,
the searches, and all that calibration and tuning choose by the outputs measure it here, on samples that nothing was learned from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxquant.accuracy.checkpoint import Checkpoint
from fxquant.accuracy.choices import tuning
from fxquant.accuracy.result import TunedLayer
from fxquant.accuracy.walk import Values, batch_axes, count_of, run
from fxquant.analysis.recording import Seen, still
from fxquant.ir.graph import by_name, reads_shape_only
from fxquant.ir.model import autocast_off, repeatable
from fxquant.lowering.eager import constants_kept
from fxquant.ops import carried
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE
from fxquant.prepared.stage import record_of
from fxquant.quantization.spec import State
from fxquant.support import logger

GAIN = 0.2228  # dB at the outputs, 5 % of the noise: what a range, an observer or a tuning has to gain; a few samples tell it from chance
QUIET = 1e-8  # noise of a part that counts as none
MOST = 16  # parts of an output: one of more is a stack of tensors that are alike, and judged as a whole

Candidate = TypeVar("Candidate")
Forward = Callable[[Sequence[Any]], list[Tensor]]  # from a model's inputs to its floating-point outputs


def is_lower(after: Noise, before: Noise) -> bool:
    """Return whether the parts of the outputs gain more than `GAIN` dB on average, and no part loses as much."""
    return after.level - before.level > GAIN and not is_lost(after, before)


def is_lost(after: Noise, before: Noise) -> bool:
    """Return whether any part loses more than `GAIN` dB."""
    return any(one > other * 10 ** (GAIN / 10) for one, other in zip(after.floored, before.floored, strict=True))


def best_of(noise: Mapping[Candidate, Noise], usual: Candidate) -> Candidate:
    """Return the candidate with the least mean noise of those clearly better than `usual` in which no part loses; else `usual`."""
    lower = [each for each in noise if each != usual and is_lower(noise[each], noise[usual])]
    return max(lower, key=lambda each: noise[each].level, default=usual)


def decibels(noise: float) -> float:
    """Return the signal to noise ratio in dB, given the noise to signal ratio; infinite without noise."""
    return math.inf if noise <= 0 else -10 * math.log10(noise)


def is_real(value: Any) -> bool:
    """Return whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def real_outputs(result: Any) -> list[Tensor]:
    """Return the floating-point tensors among a model's outputs."""
    return [value for value in pytree.tree_leaves(result) if is_real(value)]


def outputs_of(prepared: fx.GraphModule, inputs: Sequence[Any], state: State | None = None) -> list[Tensor]:
    """Return the floating-point outputs of a prepared model for its inputs, in the state `state` or, if it is None, in its present one."""
    with still(prepared, state), autocast_off():
        return real_outputs(prepared(**by_name(prepared, inputs)))


@dataclass(frozen=True)
class Noise:
    """The squared errors Σ(y' - y)² and the powers Σy² of the parts of the outputs over all samples, where y is finite.

    Where only y' is not finite, the error is infinite. A part whose power is 0 has its squared error in place of a ratio.
    """

    errors: tuple[float, ...]
    powers: tuple[float, ...]
    samples: tuple[Tensor, ...] = ()  # the errors (samples,) of each part

    @staticmethod
    def of(targets: Sequence[Sequence[Tensor]], changed: Iterable[Sequence[Tensor]], counts: Sequence[int] = ()) -> Noise:
        """Return the noise of parts from the wanted and the changed values of each chunk, with the `counts` of samples in it, or 1."""
        every = zip(targets, changed, counts or [1] * len(targets), strict=True)
        chunks = [[_errors_and_power(a, b, count) for a, b in zip(these, those, strict=True)] for these, those, count in every]
        parts = [tuple(zip(*part, strict=True)) for part in zip(*chunks, strict=True)]
        samples = tuple(torch.cat(errors) for errors, _ in parts)
        return Noise(tuple(float(errors.sum()) for errors in samples), tuple(sum(powers) for _, powers in parts), samples)

    @property
    def parts(self) -> tuple[float, ...]:
        """The noise to signal ratio of each part."""
        return tuple(error / (power or 1.0) for error, power in zip(self.errors, self.powers, strict=True))

    @property
    def floored(self) -> tuple[float, ...]:
        """The noise to signal ratio of each part, at least `QUIET`."""
        return tuple(max(part, QUIET) for part in self.parts)

    @property
    def pooled(self) -> float:
        """The mean over parts, without parts that are 0 and remain so; 0 without any."""
        there = [part for part, error, power in zip(self.parts, self.errors, self.powers, strict=True) if error or power]
        return sum(there) / len(there) if there else 0.0

    @property
    def level(self) -> float:
        """The mean signal to noise ratio of the parts that are not 0, in dB; infinite without noise."""
        there = [part for part, error, power in zip(self.floored, self.errors, self.powers, strict=True) if error or power]
        return sum(map(decibels, there)) / len(there) if any(self.errors) else math.inf


def _errors_and_power(target: Tensor, changed: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the squared errors (count,) of the samples of one part, alike where its elements do not divide, and its power."""
    reference, other = target.double(), changed.double()
    finite = torch.isfinite(reference)
    errors = (other - reference).square().where(finite, 0.0).nan_to_num(math.inf, math.inf)
    rows = errors.reshape(count, -1).sum(1) if count and errors.numel() % count == 0 else (errors.sum() / count).expand(count)
    return rows.cpu(), float(reference.square().where(finite, 0.0).sum())


def support(after: Noise, before: Noise) -> float:
    """Return the effective number of samples that gain, (Σd)² / Σd² with the gain d of each over all parts; 0 where they lose.

    It is n where n samples gain alike, and 1 where one gains all: Kish, Survey Sampling, 1965, section 11.7.
    """
    parts = zip(after.samples, before.samples, before.errors, strict=True)
    total = sum(((had - has) / (error or 1.0)).nan_to_num(1.0) for has, had, error in parts)
    return float(total.sum().clamp_min(0).square() / total.square().sum().clamp_min(1e-30))  # type: ignore[union-attr]


# ---- Parts of outputs: a fact of the graph -------------------------------------------------------------------------------
class Parts:
    """The parts of a model's outputs, of a prepared model or a traced graph.

    Numbers in place of the tensors that only copying operators read, such as concatenations and reshapes, arrive where their elements are.

    labels  for each floating-point output the number of each element's part; of size 1 in dimensions along which that is the same
    names   by number, the node of the tensor that is the part
    """

    def __init__(self, model: fx.GraphModule, inputs: Sequence[Any], state: State | None = None) -> None:
        copied, values, numbers = _copied(model), Values(), dict[fx.Node, int]()

        def see(node: fx.Node, value: Any, read: tuple[Any, ...]) -> Any:
            if node in copied:
                values[node] = run(model, node, values, exact=False)
            elif any(user in copied or user.op == "output" for user in node.users):
                values[node] = torch.full_like(value, numbers.setdefault(node, len(numbers) + 1)) if is_real(value) else value
            return value

        with torch.no_grad(), still(model, state), autocast_off():
            Seen(model, see).run(*inputs)
        (output,) = model.graph.find_nodes(op="output")
        self.labels = [_reduced(value) for value in real_outputs(fx.map_arg(output.args, values.get))]
        self.names = {number: node.name for node, number in numbers.items()}

    def of(self, outputs: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
        """Return the parts of each floating-point output with their numbers; an output without parts is its only one."""
        return [_split(value, label) for value, label in zip(outputs, self.labels, strict=True)]


def _copied(model: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that only copy elements, which only leave the model."""
    ends: set[fx.Node] = set()
    copying: set[fx.Node] = set()
    for node in reversed(model.graph.nodes):
        operator = record_of(model, node)
        copies = operator is not None and (bool(carried(operator)) or operator in (QUANTIZE, DEQUANTIZE))
        if node.op == "output" or reads_shape_only(node):
            ends.add(node)
        elif operator and copies and operator.name[:5] != "loop_" and node.users and ends.issuperset(node.users):  # loops run on
            ends.add(node)
            copying.add(node)
    return copying


def _reduced(label: Tensor) -> Tensor:
    """Return the label with one element for each dimension along which it is the same."""
    for dim in range(label.dim()):
        first = label.narrow(dim, 0, min(1, label.shape[dim]))
        label = first if bool((label == first).all()) else label
    return label


def _split(value: Tensor, label: Tensor) -> list[tuple[int, Tensor]]:
    numbers = sorted(set(label.flatten().tolist()))
    fits = label.dim() == value.dim() and all(one in (1, size) for one, size in zip(label.shape, value.shape, strict=True))
    if not fits or not 1 < len(numbers) <= MOST:
        return [(0, value)]
    return [(int(number), value[(label == number).to(value.device).expand_as(value)]) for number in numbers]


# ---- The one judge of all that calibration and tuning choose: the outputs, on samples that nothing was learned from ------
#
# An attempt puts something into the model. It is taken where the outputs are clearly nearer to the float model's with it: by more than
# `GAIN`, and no part of them loses as much.
class FloatOutputs:
    """The floating-point outputs of a prepared model in state FLOAT for chunks of inputs, to which other outputs are compared.

    current  the noise of the model as it is now, where that was measured already
    """

    def __init__(self, prepared: fx.GraphModule, chunks: Sequence[Sequence[Any]]) -> None:
        self.prepared, self.chunks, self.current = prepared, chunks, cast("Noise | None", None)
        axes = batch_axes(prepared)
        self.counts = [count_of(chunk, axes) for chunk in chunks]

    @cached_property
    def parts(self) -> Parts | None:
        """The parts of the outputs; None without chunks."""
        return Parts(self.prepared, self.chunks[0], State.FLOAT) if self.chunks else None

    @cached_property
    def wanted(self) -> list[list[Tensor]]:
        """The parts of the outputs of each chunk in float, computed when they are first asked for."""
        with torch.no_grad():
            outputs = [self.float_form(chunk) for chunk in self.chunks]
        if self.parts is not None and len({len(self.apart(each)) for each in outputs}) > 1:  # sizes of parts vary: outputs are whole
            self.parts.labels = [torch.zeros(0, device="cpu") for _ in self.parts.labels]
        return [self.apart(each) for each in outputs]

    def apart(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of floating-point outputs."""
        return [] if self.parts is None else [part for parts in self.parts.of(outputs) for _, part in parts]

    @property
    def there(self) -> bool:
        """Whether the model returns any floating-point tensor."""
        return any(self.wanted)

    def noise(self, forward: Forward, chunks: Sequence[Sequence[Any]] | None = None) -> Noise:
        """Return the noise of the outputs of `forward` against the wanted ones, for its own chunks or others, one at a time."""
        with torch.no_grad(), constants_kept():
            return Noise.of(self.wanted, (self.apart(forward(chunk)) for chunk in (self.chunks if chunks is None else chunks)), self.counts)

    def float_form(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs in float, with the changes that hooks on operators make (see `simulation`)."""
        return outputs_of(self.prepared, inputs, State.FLOAT)

    def measure(self) -> Noise:
        """Return the noise of the model as it is now, in its present state."""
        return self.noise(partial(outputs_of, self.prepared))


def pick(
    judge: FloatOutputs, attempts: Mapping[str, Callable[[], Any]], usual: str, noises: Mapping[str, Noise] = MappingProxyType({}), *,
    supported: Callable[[Noise, Noise], bool] = lambda after, before: True, show_progress: bool | None = False,
) -> tuple[str, dict[str, Noise]]:  # fmt: skip
    """Return the name of the attempt with which the outputs are clearly best, or else `usual`, and the noise of each; the model stays.

    `noises` holds the noise that is known already. An attempt counts only where its gain is `supported`, given the noise with it and
    with the usual one. Without floating-point outputs nothing is measured, and `usual` is returned.
    """
    with tuning(judge.prepared) as tuned, repeatable():

        def measured(name: str) -> Noise:
            attempts[name]()
            noise = judge.measure()
            tuned.undo()
            return noise

        asked = [name for name in attempts if name not in noises] if judge.there else []
        try:
            noise = Checkpoint(None, {}).gather({name: partial(measured, name) for name in asked}, "comparing", show_progress)
        finally:
            tuned.undo()
    noise = {**noises, **noise}
    if usual not in noise:
        return usual, {}
    return best_of({name: each for name, each in noise.items() if name == usual or supported(each, noise[usual])}, usual), noise


def judged(
    outputs: FloatOutputs, before: Noise, rows: Sequence[TunedLayer], undo: Callable[[], None], what: tuple[str, str],
    attempts: Mapping[str, Callable[[], Sequence[TunedLayer]]] | None = None, noises: Mapping[str, Noise] = MappingProxyType({}),
    usual: str = "",
) -> tuple[TunedLayer, ...]:  # fmt: skip
    """Return the rows of a tuning method if it makes the outputs clearly better; else call `undo`, and return rows that are not kept.

    With the name of an attempt as `usual` that attempt stays unless the outputs are clearly better without it or with another one.

    `before` is the noise of the outputs without it; `what` is the subject and the participle of the log line. Of several `attempts`, which
    each put something else into the model and return its rows, the best stays, and the first without floating-point outputs to judge by.
    `noises` holds the noise of some, by name.
    """
    if not any(row.kept for row in rows):
        return tuple(rows)
    attempts = attempts or {"as found": lambda: rows}
    best, noise = pick(outputs, attempts, usual, {"": before, **noises})
    if not outputs.there:
        best, noise = next(iter(attempts)), dict.fromkeys(attempts, before)
    if best:
        result = tuple(attempts[best]())
        logger.info(
            "%s are %s in %d of %d layers, %s: the outputs have %.1f dB, and had %.1f dB",
            *what, sum(row.kept for row in result), len(rows), best, noise[best].level, before.level,
        )  # fmt: skip
        return result
    undo()
    logger.info(
        "%s are not %s: the outputs have %.1f dB, and %.1f dB with it",
        *what, before.level, max(noise[name].level for name in attempts),
    )  # fmt: skip
    return tuple(replace(row, kept=False) for row in rows)
