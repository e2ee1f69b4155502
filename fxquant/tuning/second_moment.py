"""Weights rounded together: whether each goes up or down is chosen so that their errors cancel in what the layer reads.

    J(q) = Σ_o d_oᵀ M d_o,   d_o = q_o - w_o / s_o,   M = E[x xᵀ]

x are the numbers that one output is a product of with its weights (a window of a convolution's input), the mean is over places and samples
of the float model, and J is the mean squared error of the layer's sums, each in squares of its step. Rounded to the nearest, weights err
without regard to each other. Where the numbers that they meet are alike, as neighbours of an image are behind a ReLU, errors add up to a
shift that grows with the input: no bias makes up for it. With 8 bits this is small; with 4 it is most of the error.

From the nearest integers on, in each output the one moves by a step that lowers J most (of many weights, one in each part of them), until
none does, or each has moved so many times:

    ΔJ = 2 δ (M d)_j + M_jj,   δ = ±1

Rounding the other way so that errors cancel is Guo, Qiu, Leng et al.: SQuant, ICLR 2022, where M is assumed to have three parts; M from
samples is Frantar, Singh, Alistarh: Optimal Brain Compression, NeurIPS 2022. The M of a few samples is partly theirs alone, so two others
are tried, mixed from it and from one of SQuant's form,

    S = diag_c(v_c · ((1 - ρ) I + ρ 11ᵀ)) + m mᵀ

with the mean m and the variance v of each input channel and ρ = 0.9 for a kernel's taps; samples that were held out choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

import fxquant.quantization.distributed as ranks
from fxquant.arguments import checked
from fxquant.progress import progress
from fxquant.quantization.prepared import QuantizedOperator, quantized_operators
from fxquant.quantization.rounding import AdaptiveRounding, Nearest, Rounding
from fxquant.tuning.checkpoint import CHECKPOINT, Checkpoint
from fxquant.tuning.guard import tuning
from fxquant.tuning.learning import Learned
from fxquant.tuning.real import real_result, weight_of
from fxquant.tuning.result import TunedLayer, TuningResult
from fxquant.tuning.resumption import digest, model_digest
from fxquant.tuning.units import bound_arguments, operator_at, shared_weights, weighted_nodes
from fxquant.tuning.walk import Samples, Values, Walk, arguments_of, cut, taken

FEW_BITS, ALL_BITS = 7, 32  # of a weight; with 8 there is less to gain
ENOUGH = 64  # samples, of the first batches of a calibration
LARGEST = 2**24  # elements of all of them
ROWS = 8192  # places of all samples that M is the mean over, about
WINDOW = 64  # pixels of a larger image that are looked at, along each dimension
COLUMNS = 2048  # weights of an output that are rounded together; of more, so many at a time
SHRUNK = (0.1, 0.5, 1.0)  # shares of S in M
ALIKE = 0.9  # ρ
PARTS, FEWEST = 8, 256  # in how many parts of a row weights move at once, and how many columns a part has at least
SWEEPS = 64  # at most: the first take most of J away


@checked(checkpoint=CHECKPOINT)
def round_weights(
    prepared: fx.GraphModule,
    batches: Any,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    batch_size: int = 16,
    checkpoint: str | None = None,
    show_progress: bool | None = None,
) -> TuningResult:
    """Round weights up or down so that their errors cancel in what the layers read; the model is left in VALIDATE.

    `calibrate` does so for weights of less than 8 bits by its first samples; this takes those of any dtype, rounded before or not, and all
    samples. `batches` are as in `calibrate`. What counts is the share of noise in a layer's sums, on average over its outputs, as far as it
    comes from its weight alone. A quarter of the samples is held out, and judges: a layer whose noise there does not fall keeps the
    rounding it had. What was decided is an `AdaptiveRounding`, in the file of `save` and in `state_dict`; it stays while weights move by
    less than half a step. Layers with a rounding of the user's own, a learned scale, or a weight that others read as well, are left out.

    The same model and batches give the same bits, on one machine with one number of threads. After a kill, the same call with the same
    `checkpoint` continues behind the last layer that was finished. The inputs are kept, and of what is between the layers one value for
    each that is still to be read. Raises NotCalibrated before calibration, CalibrationError for batches that do not fit, and
    ConfigurationError for a checkpoint that is of another call; if anything is raised, the model is what it was.
    """
    with tuning(prepared):
        samples = taken(prepared, batches, num_batches, batch_fn, batch_size, show_progress)
        call = {"method": "round_weights", "batch_size": batch_size, "model": model_digest(prepared), "samples": digest(samples.tensors)}
        nodes = _open(prepared, ALL_BITS, (Nearest, AdaptiveRounding))
        return _round(prepared, samples, nodes, show_progress, Checkpoint(checkpoint, call))


class FirstSamples:
    """The first samples of a calibration, by which weights of few bits are rounded behind it; none are kept where there are no such."""

    def __init__(self, prepared: fx.GraphModule, chosen: bool | None) -> None:
        self.bits = FEW_BITS if chosen is None else ALL_BITS if chosen else 0
        self.prepared, self.samples, self.elements = prepared, 0, 0
        self.kept: list[list[Any]] = []
        self.wanted = any(_is_open(operator, self.bits, (Nearest,)) for operator in quantized_operators(prepared).values())

    def take(self, inputs: Sequence[Any]) -> None:
        """The model's inputs of the next batch."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if self.wanted and self.samples < ENOUGH and self.elements < LARGEST and tensors:
            self.kept.append([value.clone() if isinstance(value, Tensor) else value for value in inputs])  # a loader may reuse its memory
            self.samples += len(tensors[0]) if tensors[0].dim() else 1
            self.elements += sum(value.numel() for value in tensors)

    def round(self, distributed: bool, show_progress: bool | None) -> None:
        """Round by them; where ranks calibrate together, by those of the first."""
        joined = distributed and ranks.count() > 1
        if not self.wanted or not (joined or self.kept):
            return
        offsets: dict[str, Tensor] = {}
        try:
            if self.kept and not (joined and ranks.index()):
                offsets = self._offsets(show_progress)
        finally:
            if joined:
                offsets = next(iter(ranks.gathered({name: offset.cpu() for name, offset in offsets.items()})))
        for name, offset in offsets.items():
            operator = quantized_operators(self.prepared)[name]
            _settle(operator, offset.to(next(operator.weight_quantizer.buffers(), offset).device))

    def _offsets(self, show_progress: bool | None) -> dict[str, Tensor]:
        with tuning(self.prepared) as operators:
            samples = cut(self.prepared, self.kept, 4)
            nodes = _open(self.prepared, self.bits, (Nearest,))
            found = _round(self.prepared, samples, nodes, show_progress, Checkpoint(None, {}))
        roundings = {name: operators[name].weight_quantizer.rounding for layer in found.kept for name in layer.layers}
        return {name: rounding.offset for name, rounding in roundings.items() if isinstance(rounding, AdaptiveRounding)}


# ---- the layers ---------------------------------------------------------------------------------------------------------------


Roundings = tuple[type[Rounding], ...]


def _is_open(operator: QuantizedOperator, bits: int, roundings: Roundings) -> bool:
    """Whether it has a weight of at most so many bits with one of these roundings, and a scale that is not learned."""
    quantizer = operator.weight_quantizer
    return quantizer.dtype.bits <= bits and type(quantizer.rounding) in roundings and quantizer.learned is None


def _open(prepared: fx.GraphModule, bits: int, roundings: Roundings) -> list[fx.Node]:
    shared = shared_weights(prepared)
    found = [(node, operator_at(prepared, node)) for node in weighted_nodes(prepared) if node not in shared]
    return [node for node, operator in found if operator is not None and _is_open(operator, bits, roundings)]


@torch.no_grad()
def _round(
    prepared: fx.GraphModule, samples: Samples, nodes: Sequence[fx.Node], show_progress: bool | None, known: Checkpoint
) -> TuningResult:
    walk, found, skipped = Walk(prepared, samples.chunks, exact=False), [], []
    shares = SHRUNK if samples.learning else SHRUNK[-1:]  # what is judged by itself is not to be learned from in full
    for node in progress(nodes, len(nodes), "rounding weights", show_progress):
        operator = operator_at(prepared, node)
        assert operator is not None
        if node.name in known.rows:
            row = known.rows[node.name]
            if row.kept:
                _settle(operator, known.learned(row).offsets[node.name])
            found.append(row)
            continue
        layer = _Layer.of(node, operator, walk.at(node.all_input_nodes))
        moments = None if layer is None else layer.moments(samples)
        if layer is None or moments is None:
            skipped.append((node.name, "what one output is a sum of cannot be told"))
            continue
        integers, before, after = layer.best(*moments, shares)
        row = TunedLayer(node.name, (node.name,), before, after, after < before, 1.0)
        if row.kept:
            _settle(operator, integers - layer.real)
        known.add(row, Learned({node.name: integers - layer.real}, {}, {}) if row.kept else None)
        found.append(row)
    return TuningResult("round_weights", tuple(found), tuple(skipped), walk.largest)


def _settle(operator: QuantizedOperator, offset: Tensor) -> None:
    rounding = AdaptiveRounding(tuple(offset.shape)).to(offset.device)
    rounding.offset.copy_(offset)
    operator.weight_quantizer.rounding = rounding


class _Seen(Rounding):
    """Rounds to the nearest, and remembers what."""

    real: Tensor
    limits: tuple[int, int]

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        self.real, self.limits = real.detach().clone(), (low, high)
        return torch.round(self.real).clamp_(low, high)


class _Layer(NamedTuple):
    """A layer's weight in steps, and the operands of every chunk of samples.

    real      (out, in/groups, …), float32
    rounded   its integers so far
    limits    the smallest and the largest integer
    groups    of its inputs, each of which is met by as many outputs
    operands  the positional arguments of the operator by name, for each chunk
    """

    real: Tensor
    rounded: Tensor
    limits: tuple[int, int]
    groups: int
    operator: QuantizedOperator
    operands: list[dict[str, Any]]

    @staticmethod
    def of(node: fx.Node, operator: QuantizedOperator, values: Sequence[Values]) -> _Layer | None:
        quantizer = operator.weight_quantizer
        seen, previous = _Seen(), quantizer.rounding
        quantizer.rounding = seen
        try:
            real_result(operator, bound_arguments(node, operator, values[0]))
        finally:
            quantizer.rounding = previous
        calls = [operator.multiplied(*arguments_of(node, each))[0] for each in values]
        operands = [operator.operator.bind_call(positional, {}) for positional in calls]
        weight = weight_of(operator, operands[0])
        if weight is None or not hasattr(seen, "real") or seen.real.shape != weight.shape:
            return None
        return _Layer(seen.real, previous.integers(seen.real, *seen.limits), seen.limits, operands[0].get("groups", 1), operator, operands)

    @property
    def columns(self) -> int:
        """Weights of an output."""
        return self.real[0].numel()

    def moments(self, samples: Samples) -> tuple[_Moment, _Moment] | None:
        """What outputs are sums of in the samples that are learned from, and in those that judge."""
        found = []
        for chosen in (samples.learning or samples.judging, samples.judging):
            moment = _Moment.empty(self)
            for index in chosen:
                rows = self._rows(index, ROWS // len(chosen) + 1)
                if rows is None:
                    return None
                moment.add(rows)
            found.append(moment)
        return found[0], found[1]

    def _rows(self, index: int, wanted: int) -> Tensor | None:
        """What outputs of a chunk are sums of, (groups, places, columns), at about so many places.

        The layer's own function says it, of an identity in place of its weight.
        """
        given, shape, size = dict(self.operands[index]), self.real.shape, self.columns
        if given.get("bias") is not None:
            given["bias"] = None
        name = "weight" if "weight" in given else "other"
        one = torch.eye(size, device=self.real.device).reshape(size, *shape[1:]).repeat(self.groups, *[1] * (len(shape) - 1))
        given[name] = self.operator.operator.weight(**{**given, name: one})  # what arranges a weight undoes itself
        result: Tensor = self.operator.operator.function(*_few(given, index, len(shape) - 2, wanted).values())
        axis = result.dim() - 1 - max(len(shape) - 2, 0)
        if axis < 0 or result.shape[axis] != self.groups * size:
            return None
        rows = result.movedim(axis, 0).reshape(self.groups, size, -1).transpose(1, 2)
        return rows[:, :: rows.shape[1] // wanted | 1]  # odd: it meets every column of an image whose width is a power of two

    def best(self, learned: _Moment, judging: _Moment, shares: Sequence[float]) -> tuple[Tensor, float, float]:
        """The integers that leave least noise in the samples that judge, what those so far leave, and what these do."""
        real, chosen = self.real.flatten(1), self.rounded.flatten(1)
        before = after = judging.noise(chosen, real)
        for share in shares:
            parts = [_flipped(part, moment, *self.limits) for part, moment in learned.parts(real, share)]
            found = torch.cat(parts, 2).flatten(0, 1)
            noise = judging.noise(found, real)
            if noise < after:
                chosen, after = found, noise
        return chosen.reshape(self.real.shape), before, after


def _few(given: dict[str, Any], index: int, rank: int, wanted: int) -> dict[str, Any]:
    """The same with a part of its input: of a larger image a window, at another place for each chunk, and items for so many places."""
    value = given.get("input")
    if not isinstance(value, Tensor) or value.dim() < rank + 2 or sum(isinstance(each, Tensor) for each in given.values()) > 2:
        return given  # another operand, which goes with it place by place
    for axis in range(value.dim() - rank, value.dim()):
        free = max(0, value.shape[axis] - WINDOW)
        value = value.narrow(axis, int((0.5 + 0.618 * index) % 1 * free), value.shape[axis] - free)
    places = value[0].numel() // value.shape[1 if rank else -1]
    return {**given, "input": value[: wanted // max(places, 1) + 1]}


# ---- second moments -----------------------------------------------------------------------------------------------------------


class _Moment:
    """The mean of x xᵀ in blocks of `COLUMNS`, and of x: float32.

    blocks  for each, (groups, columns, columns)
    sums    (groups, columns), and of squares
    taps    columns of one input channel, beside each other
    """

    def __init__(self, groups: int, columns: int, taps: int, device: torch.device) -> None:
        width = max(taps, COLUMNS // taps * taps)
        self.bounds = [(start, min(start + width, columns)) for start in range(0, columns, width)]
        self.blocks = [torch.zeros(groups, end - start, end - start, device=device) for start, end in self.bounds]
        self.sums = torch.zeros(groups, columns, device=device)
        self.taps, self.rows = taps, 0

    @staticmethod
    def empty(layer: _Layer) -> _Moment:
        taps = layer.real[0, 0].numel() if layer.real.dim() > 2 else 1
        return _Moment(layer.groups, layer.columns, taps, layer.real.device)

    def add(self, rows: Tensor) -> None:
        """Take in (groups, places, columns)."""
        for block, (start, end) in zip(self.blocks, self.bounds, strict=True):
            part = rows[:, :, start:end]
            block += part.transpose(1, 2) @ part
        self.sums += rows.sum(1)
        self.rows += rows.shape[1]

    def parts(self, real: Tensor, share: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each block: the weights in steps, (groups, outputs, columns), and M with a share of S, (groups, columns, columns)."""
        grouped = real.view(len(self.sums), -1, real.shape[1])
        for block, (start, end) in zip(self.blocks, self.bounds, strict=True):
            moment, mean = block / self.rows, self.sums[:, start:end] / self.rows
            yield grouped[:, :, start:end], (1 - share) * moment + share * self._smooth(moment, mean)

    def _smooth(self, moment: Tensor, mean: Tensor) -> Tensor:
        """S, whose channels have the mean and the variance of all their taps."""
        taps, (groups, size) = self.taps, mean.shape
        mean = mean.view(groups, -1, taps).mean(2)
        square = torch.diagonal(moment, dim1=1, dim2=2).view(groups, -1, taps).mean(2)
        variance = (square - mean.square()).clamp_min(0)
        means = mean.repeat_interleave(taps, 1)
        smooth = means.unsqueeze(2) * means.unsqueeze(1)
        kernel = ALIKE * torch.ones(taps, taps, device=mean.device) + (1 - ALIKE) * torch.eye(taps, device=mean.device)
        channel = torch.arange(size // taps, device=mean.device)
        smooth.view(groups, -1, taps, size // taps, taps)[:, channel, :, channel, :] += variance.t().reshape(-1, groups, 1, 1) * kernel
        return smooth

    def noise(self, integers: Tensor, real: Tensor) -> float:
        """The share of noise in the sums of an output, on average over all."""
        total, signal = (torch.zeros(len(real), dtype=torch.float64, device=real.device) for _ in range(2))
        for into, value in ((total, integers - real), (signal, real)):
            grouped = value.view(len(self.sums), -1, value.shape[1])
            for block, (start, end) in zip(self.blocks, self.bounds, strict=True):
                part = grouped[:, :, start:end]
                into += ((part @ block) * part).sum(2).flatten().double()
        return float((total.clamp_min(0) / signal.clamp_min(1e-30)).clamp_max(1).mean())


def _flipped(real: Tensor, moment: Tensor, low: int, high: int) -> Tensor:
    """From the nearest integers on, those that lower J most in their row, or a part of it, move by a step `SWEEPS` times at most.

    real    weights in steps, (groups, outputs, columns)
    moment  M, (groups, columns, columns)
    """
    _, outputs, columns = real.shape
    parts = max(1, min(PARTS, columns // FEWEST))
    margin = -columns % parts
    at = torch.round(real).clamp_(low, high)
    gradient, result = ((at - real) @ moment).flatten(0, 1), at.clone().flatten(0, 1)
    at, row = at.flatten(0, 1), torch.arange(len(result), device=real.device)
    group = row // outputs
    diagonal = torch.diagonal(moment, dim1=1, dim2=2)[group]
    enough = -1e-6 * diagonal.amax(1, keepdim=True)  # what float32 tells
    starts = torch.arange(parts, device=real.device) * ((columns + margin) // parts)
    for _ in range(SWEEPS):
        step = -torch.sign(gradient)
        change = torch.addcmul(diagonal, gradient, step, value=2)
        change.masked_fill_((at + step < low) | (at + step > high), 0)
        gain, place = F.pad(change, (0, margin)).view(len(change), parts, -1).min(2)
        gain, order = gain.sort(1)
        place = (place + starts).gather(1, order).clamp_max(columns - 1)
        step = step.gather(1, place)
        lines = moment[group.unsqueeze(1), place]  # of M, for each of the places
        moved = torch.zeros_like(gain)
        for index in range(parts):  # those that were moved before count
            others = (moved * lines.gather(2, place[:, index].view(-1, 1, 1).expand(-1, parts, 1)).squeeze(2)).sum(1)
            moved[:, index] = step[:, index] * (gain[:, index] + 2 * step[:, index] * others < enough[:, 0])
        gradient += (moved.unsqueeze(1) @ lines).squeeze(1)
        at.scatter_add_(1, place, moved)
        done = ~(moved != 0).any(1)
        if bool(done.any()):
            result[row[done]] = at[done]
            row, group, gradient, diagonal, enough, at = (part[~done] for part in (row, group, gradient, diagonal, enough, at))
            if not len(row):
                break
    result[row] = at
    return result.view_as(real)
