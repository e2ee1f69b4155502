"""Weights rounded together: choose whether each is rounded up or down so that their errors cancel in the layer's sums.

    J(q) = Σ_o d_oᵀ M d_o,   d_o = q_o - w_o / s_o,   M = E[x xᵀ]

x are the inputs that one output multiplies with its weights (a window of a convolution's input), and the mean is over places and samples of
the float model. J is the mean squared error of the layer's sums, each in squares of its step. Rounding to the nearest ignores how the
errors of weights combine. Where their inputs are correlated, as neighbours of an image are after a ReLU, errors add up to a shift that
grows with the input. No bias can correct that. With 8 bits this is small; with 4 it is most of the error.

The search starts from the nearest integers. In each output, the weight whose step lowers J most moves by one step (of many weights, one in
each part of them). It ends when no step lowers J, or after `SWEEPS` steps:

    ΔJ = 2 δ (M d)_j + M_jj,   δ = ±1

Rounding the other way so that errors cancel is Guo, Qiu, Leng et al.: SQuant, ICLR 2022, where M is assumed to have three parts. M from
samples is Frantar, Singh, Alistarh: Optimal Brain Compression, NeurIPS 2022. The M of a few samples overfits them. So two others are tried,
mixed from it and from one of SQuant's form,

    S = diag_c(v_c · ((1 - ρ) I + ρ 11ᵀ)) + m mᵀ

with the mean m and the variance v of each input channel and ρ = 0.9 for a kernel's taps; held-out samples choose.

J weighs every output of a layer alike. So the search goes on with outputs rounded together, weighted by their effects on the model's
outputs (`output_effects`, `moments`). At last each channel's scale is multiplied so that its result, after fused operations, is as large
as in float on average over the samples: Σ y y' / Σ y². One hundredth too little adds up to a fifth over twenty layers in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.accuracy import walk as walking
from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import tuning
from fxquant.accuracy.measure import FloatOutputs, Noise, judged, real_outputs
from fxquant.accuracy.moments import Moment, flipped, flipped_together, joint_noise
from fxquant.accuracy.result import TunedLayer, TuningResult
from fxquant.accuracy.step import Run
from fxquant.accuracy.student import LearnedRounding, learned_rounding, put
from fxquant.accuracy.walk import Samples, Values, Walk, bound_arguments, by_channel, cut, real_result, run, taken, weight_of
from fxquant.ir.model import repeatable
from fxquant.numerics.rounding import AdaptiveRounding, Nearest, Rounding
from fxquant.ops.core.weighted import sizes
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.undo import having
from fxquant.quantization.learning import LSQ
from fxquant.quantization.weights import running_gain
from fxquant.support import logger
from fxquant.support.arguments import checked

FEW_BITS, ALL_BITS = 7, 32  # of a weight; with 8 there is less to gain
ROWS = 8192  # places of all samples that M is the mean over, about; half as many with 8 bits
WINDOW = 64  # pixels of a larger image that are looked at, along each dimension; twice a kernel that reaches further
SHRUNK = (0.1, 0.5, 1.0)  # shares of S in M
SHRUNK_8_BITS = (0.5,)  # the same with 8 bits, where others lose up to 0.7 dB of a pretrained network's outputs, or gain 0.2
TOGETHER = (0.1, 0.5)  # the same where outputs are rounded together
LARGEST_GAIN = 1.1  # by which a scale is multiplied, or divided


@checked()
def round_weights(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> TuningResult:  # fmt: skip
    """Round weights up or down so that their errors cancel in the layers' sums; the model is left in VALIDATE.

    `calibrate` does so for weights of less than 8 bits with its first samples; this takes weights of any dtype, rounded before or not, and
    all samples. It minimizes the noise-to-signal ratio in a layer's sums that the weight alone causes, weighted by its effect on the
    outputs of the model, or, if these are not floating-point, averaged over the layer's outputs. A quarter of the samples is held out: a
    layer whose noise there does not fall keeps its rounding. All layers of less than 8 bits, and all of 8 bits, are undone unless the
    outputs of the model gain 0.2 dB by them. The decisions are an `AdaptiveRounding`, which stays while weights move by less than half a
    step, and a `Coverage`, or for a learned scale the value that training starts from; all are in the file of `save` and in `state_dict`.
    Layers whose rounding the user set, or whose weight other layers read as well, are left out.

    The bits do not depend on the number of threads. Batches and errors are as in `adaround`.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, options, show_progress)
        call = call_of(prepared, samples, method="round_weights", batch_size=options.batch_size)
        nodes = _open(prepared, ALL_BITS, (Nearest, AdaptiveRounding))
        checkpoint = Checkpoint(options.checkpoint, call)
        with repeatable():
            return _round(prepared, samples, nodes, show_progress, checkpoint, tuned.undo)


Rounded = dict[str, LearnedRounding]  # by layer


def _bits(run: Run) -> int:
    return FEW_BITS if run.options.round_weights is None else ALL_BITS


def has_work(run: Run) -> bool:
    """Return whether the model has weights that this step rounds."""
    return any(_is_open(operator, _bits(run), (Nearest,)) for operator in quantized_operators(run.prepared).values())


def find(run: Run) -> Rounded:
    """Return the roundings of weights by the samples of a run, by layer."""
    return rounded(run.prepared, cut(run.prepared, run.kept.inputs, 4), _bits(run), run.show)


def apply(run: Run, roundings: Rounded) -> str:
    """Set the roundings of layers, by the layer's name."""
    put_roundings(run.prepared, roundings)
    run.judge.current = None
    return f"{len(roundings)} layers"


def remedies(prepared: fx.GraphModule) -> Iterator[tuple[str, bool]]:
    """Yield weights of every dtype rounded by samples; and to the nearest, where calibration rounded some by samples."""
    yield "by samples, all weights", True
    if any(isinstance(each.weight_quantizer.rounding, AdaptiveRounding) for each in quantized_operators(prepared).values()):
        yield "to the nearest", False


def rounded(prepared: fx.GraphModule, samples: Samples, bits: int, show_progress: bool | None) -> Rounded:
    """Find roundings of the weights of at most `bits` bits by samples, by layer; the model, and roundings of other kinds, stay."""
    with tuning(prepared) as tuned, repeatable():
        result = _round(prepared, samples, _open(prepared, bits, (Nearest,)), show_progress, Checkpoint(None, {}), tuned.undo)
        quantizers = {name: tuned.operators[name].weight_quantizer for layer in result.kept for name in layer.layers}
        adaptive = {name: each for name, each in quantizers.items() if isinstance(each.rounding, AdaptiveRounding)}
        roundings = {name: learned_rounding(each).copied() for name, each in adaptive.items()}
        tuned.undo()
    return roundings


def put_roundings(prepared: fx.GraphModule, roundings: Rounded) -> None:
    """Set the learned roundings of layers, by the layer's name."""
    operators = quantized_operators(prepared)
    for name, each in roundings.items():
        put(operators[name], each)


Roundings = tuple[type[Rounding], ...]


def _is_open(operator: QuantizedOperator, bits: int, roundings: Roundings) -> bool:
    """Return whether an operator has a weight of at most `bits` bits with one of these roundings, and is not left out."""
    quantizer = operator.weight_quantizer
    return not operator.left_out and quantizer.dtype.bits <= bits and type(quantizer.rounding) in roundings


def _open(prepared: fx.GraphModule, bits: int, roundings: Roundings) -> dict[fx.Node, QuantizedOperator]:
    shared, weighted = walking.shared_weights(prepared), walking.weighted_nodes(prepared)
    return {node: operator for node, operator in weighted.items() if node not in shared and _is_open(operator, bits, roundings)}


@torch.no_grad()
def _round(
    prepared: fx.GraphModule, samples: Samples, operators: Mapping[fx.Node, QuantizedOperator], show_progress: bool | None,
    checkpoint: Checkpoint, undo: Callable[[], None],
) -> TuningResult:  # fmt: skip
    walk, learning = Walk(prepared, samples.chunks, exact=False), samples.learning or samples.judging
    few = [node for node, operator in operators.items() if _has_few_bits(operator)]
    missing = not checkpoint.document.keys() >= {node.name for node in operators}
    effects = output_effects(prepared, [samples.chunks[index] for index in learning], few) if few and missing else {}

    def rounded(node: fx.Node, operator: QuantizedOperator) -> dict[str, Any] | None:
        values = walk.at((*node.all_input_nodes, node))
        layer = _Layer.of(node, operator, values)
        moments = None if layer is None else layer.moments(samples, ROWS if node in few else ROWS // 2)
        if layer is None or moments is None:
            return None
        shares = SHRUNK if node in few else SHRUNK_8_BITS
        shares = shares if samples.learning else shares[-1:]  # what is judged by itself is not to be learned from in full
        integers, before, after = layer.best(*moments, shares, effects.get(node))
        row = TunedLayer(node.name, (node.name,), before, after, after < before, 1.0)
        if row.kept:
            put(operator, LearnedRounding(integers - layer.clipped))
            if node in few:
                _level(node, operator, [values[index] for index in learning], integers)
        decided = learned_rounding(operator.weight_quantizer)._asdict() if row.kept else {}
        return checkpoint.row(row, {part: value for part, value in decided.items() if value is not None})

    # A layer's numbers are those of the float model alone, so they do not depend on which layers are rounded before it, or here.
    tasks = {node.name: partial(rounded, node, operator) for node, operator in operators.items()}
    results = checkpoint.gather(tasks, "rounding weights", show_progress)
    skipped = [(name, "the terms of an output are not known") for name, row in results.items() if row is None]
    layers = [TunedLayer.of(row) for row in results.values() if row is not None]
    put_roundings(prepared, {row.name: LearnedRounding(**checkpoint.learned(row)) for row in layers})
    rows = _judged(prepared, layers, FloatOutputs(prepared, [samples.chunks[index] for index in samples.judging]), undo)
    result = TuningResult("round_weights", rows, tuple(skipped))
    logger.debug("%s", result)
    return result


def _has_few_bits(operator: QuantizedOperator) -> bool:
    return operator.weight_quantizer.dtype.bits <= FEW_BITS


def _judged(
    prepared: fx.GraphModule, rows: Sequence[TunedLayer], outputs: FloatOutputs, undo: Callable[[], None]
) -> tuple[TunedLayer, ...]:
    """Return the rows with `kept` set by the outputs' gain: of layers below 8 bits together, then of 8-bit layers, which gain less."""
    operators, by_name = quantized_operators(prepared), {row.name: row for row in rows}
    accepted: Rounded = {}

    def put_back() -> None:
        undo()
        put_roundings(prepared, accepted)

    decided = {row.name: learned_rounding(operators[row.name].weight_quantizer) for row in rows if row.kept}
    undo()
    for few, what in ((True, "weights of few bits"), (False, "8-bit weights")):
        group = [row for row in rows if _has_few_bits(operators[row.name]) is few]
        attempt = partial(_attempt, prepared, group, {row.name: decided[row.name] for row in group if row.kept})
        before = outputs.measure() if any(row.kept for row in group) else Noise((), ())
        judgements = judged(outputs, before, group, put_back, (what, "rounded by samples"), {"as found": attempt})
        by_name.update({row.name: row for row in judgements})
        accepted = {name: decided[name] for name, row in by_name.items() if few and row.kept and _has_few_bits(operators[name])}
    return tuple(by_name.values())


def _attempt(prepared: fx.GraphModule, rows: Sequence[TunedLayer], rounded: Rounded) -> Sequence[TunedLayer]:
    put_roundings(prepared, rounded)
    return rows


def _level(node: fx.Node, operator: QuantizedOperator, values: Sequence[Values], integers: Tensor) -> None:
    """Multiply a weight's scales, its integers kept, so that the result of each channel is as large as in float on average.

    The correction is applied as far as it exceeds the samples' noise. A learned scale is set to the product; a scale that is frozen or a
    power of two stays.
    """
    quantizer, learned = operator.weight_quantizer, operator.weight_quantizer.learned
    if quantizer.power_of_two or (learned is not None and (learned.method is not LSQ or learned.frozen)):
        return
    gain = gain_of(node, operator, values, len(integers), integers.dim())
    if gain is None:
        return
    gain = gain.clamp(1 / LARGEST_GAIN, LARGEST_GAIN)
    scale = None if learned is None else learned.current() / gain
    covered = torch.ones_like(gain) if quantizer.coverage is None else quantizer.coverage.share
    share = covered / gain if learned is None else None
    assert isinstance(quantizer.rounding, AdaptiveRounding)
    put(operator, LearnedRounding(quantizer.rounding.offset, share, scale))
    layer = _Layer.of(node, operator, values)  # in steps of the new scale, which a bias may keep from being smaller
    assert layer is not None
    put(operator, LearnedRounding(integers - layer.clipped, share, scale))


class _Seen(Rounding):
    """Rounds to the nearest, and keeps its operand and the integer limits."""

    real: Tensor
    limits: tuple[int, int]

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        self.real, self.limits = real.detach().clone(), (low, high)
        return torch.round(self.real).clamp_(low, high)


class _Layer(NamedTuple):
    """A layer's weight in units of its scale, and the operands of every chunk of samples."""

    real: Tensor  # the weight, float32 (out, in/groups, …)
    clipped: Tensor  # the weight clamped to `limits`, of the same shape: its scale may not cover all of it
    rounded: Tensor  # the current integers, of the same shape
    limits: tuple[int, int]  # the smallest and the largest integer
    groups: int  # the number of groups of the layer
    operator: QuantizedOperator
    operands: list[dict[str, Any]]  # the arguments of the operator by name, for each chunk
    scale: Tensor  # the scale of each output, float32

    @staticmethod
    def of(node: fx.Node, operator: QuantizedOperator, values: Sequence[Values]) -> _Layer | None:
        quantizer = operator.weight_quantizer
        watcher, previous = _Seen(), quantizer.rounding
        with having([quantizer], rounding=watcher):
            real_result(operator, bound_arguments(node, operator, values[0]))
        calls = [operator.multiplied(*walking.arguments_of(node, each))[0] for each in values]
        operands = [operator.operator.bind_call(positional, {}) for positional in calls]
        weight = weight_of(operator, operands[0])
        if weight is None or not hasattr(watcher, "real") or watcher.real.shape != weight.shape:
            return None
        batch_norm = operands[0].get("batch_norm")
        folded = weight if batch_norm is None else weight * running_gain(batch_norm).reshape(-1, *[1] * (weight.dim() - 1))
        real = watcher.real
        inside = torch.ones_like(real) if quantizer.learned is None else ((real > watcher.limits[0]) & (real < watcher.limits[1])).to(real)
        scale = (folded.abs() * inside).flatten(1).sum(1) / (real.abs() * inside).flatten(1).sum(1).clamp_min(1e-30)
        if quantizer.learned is not None:  # others make up for what it clips
            step = scale.reshape(-1, *[1] * (weight.dim() - 1))
            real = torch.where((inside > 0) | (step == 0), real, folded / step)
        rounded = previous.integers(watcher.real, *watcher.limits)
        return _Layer(real, watcher.real, rounded, watcher.limits, operands[0].get("groups", 1), operator, operands, scale)

    @property
    def columns(self) -> int:
        """Weights of an output."""
        return self.real[0].numel()

    def moments(self, samples: Samples, places: int) -> tuple[Moment, Moment] | None:
        """Return M of the training and of the held-out samples, each from about `places` positions of the layer's result."""
        moments = []
        for chosen in (samples.learning or samples.judging, samples.judging):
            moment = Moment(self.groups, self.columns, self.real[0, 0].numel() if self.real.dim() > 2 else 1, self.real.device)
            for index in chosen:
                rows = self._rows(index, places // len(chosen) + 1)
                if rows is None:
                    return None
                moment.add(rows)
            moments.append(moment)
        return moments[0], moments[1]

    def _rows(self, index: int, count: int) -> Tensor | None:
        """Return the inputs of a layer's sums for a chunk, (groups, positions, columns), at about `count` positions; None if unknown.

        They are computed by the layer's own function, with an identity in place of its weight.
        """
        operands = {name: None if name == "bias" else value for name, value in self.operands[index].items()}
        shape, size = self.real.shape, self.columns
        name = "weight" if "weight" in operands else "other"
        one = torch.eye(size, device=self.real.device, dtype=torch.float32).repeat(self.groups, 1).reshape(-1, *shape[1:])
        operands[name] = self.operator.operator.layer.weight(**{**operands, name: one})  # what arranges a weight undoes itself
        result: Tensor = self.operator.operator.function(*_few(operands, index, shape[2:], count).values())
        channels = by_channel(result, self.groups * size, len(shape))
        if channels is None:
            return None
        rows = channels.reshape(self.groups, size, -1).transpose(1, 2)
        return rows[:, :: rows.shape[1] // count | 1]  # odd: it meets every column of an image whose width is a power of two

    def best(self, learned: Moment, judging: Moment, shares: Sequence[float], effect: Tensor | None) -> tuple[Tensor, float, float]:
        """Return the rounding with the least noise on `judging`, and that noise before and after; each share of smoothing is tried.

        Without `effect`, noise is the noise-to-signal ratio of a layer's sums, averaged over outputs.
        """
        real, chosen = self.real.flatten(1), self.rounded.flatten(1)
        before = after = judging.noise(chosen, real)
        for share in shares:
            candidates = torch.cat([flipped(part, moment, *self.limits) for part, moment in learned.parts(real, share)], 2).flatten(0, 1)
            noise = judging.noise(candidates, real)
            if noise < after:
                chosen, after = candidates, noise
        if effect is not None and self.groups == 1 and float(self.scale.max()) > 0:
            chosen, before, after = self._best_together(chosen, learned, judging, effect)
        return chosen.reshape(self.real.shape), before, after

    def _best_together(self, start: Tensor, learned: Moment, judging: Moment, effect: Tensor) -> tuple[Tensor, float, float]:
        """Return as `best` does, rounding outputs together: from `start`, the integers with the least weighted error by `effect`."""
        scale = self.scale / self.scale.max()
        effect = effect * scale.unsqueeze(1) * scale.unsqueeze(0)
        real, rounded = self.real.flatten(1), self.rounded.flatten(1)
        judges = [moment[0] for _, moment in judging.parts(real, 0.0)]

        def noise(errors: Tensor) -> float:
            pairs = zip(judging.bounds, judges, strict=True)
            return joint_noise([(errors[:, first:last], judge) for (first, last), judge in pairs], effect)

        signal = max(noise(real), 1e-30)
        candidates = [rounded, start]
        for share in TOGETHER:
            blocks = [
                flipped_together(start[:, first:last], part[0], moment[0], effect, *self.limits)
                for (part, moment), (first, last) in zip(learned.parts(real, share), learned.bounds, strict=True)
            ]
            candidates.append(torch.cat(blocks, 1))
        noises = [noise(candidate - real) / signal for candidate in candidates]
        after = min(noises)
        return candidates[noises.index(after)], noises[0], after


def _few(operands: dict[str, Any], index: int, kernel: Sequence[int], count: int) -> dict[str, Any]:
    """Return the operands with the input cropped, and its items cut to about `count` output places; the crop moves with `index`."""
    value, rank = operands.get("input"), len(kernel)
    if not isinstance(value, Tensor) or value.dim() < rank + 2 or sum(isinstance(each, Tensor) for each in operands.values()) > 2:
        return operands  # another operand, which goes with it place by place
    for axis, (size, spread) in enumerate(zip(kernel, sizes(operands.get("dilation", 1), rank), strict=True), value.dim() - rank):
        free = max(0, value.shape[axis] - max(WINDOW, 2 * spread * size))
        value = value.narrow(axis, int((0.5 + 0.618 * index) % 1 * free), value.shape[axis] - free)
    places = value[0].numel() // value.shape[1 if rank else -1]
    return {**operands, "input": value[: count // max(places, 1) + 1]}


# ---- The effect of errors of a layer's sums on the model's outputs: second moments of gradients ----------------------
#
#     B = E[g gᵀ],   g = ∂(Σ u · y) / ∂z,   u ~ N(0, 1)
#
# z are the sums of a layer at one place, with bias and what is fused into the layer but before its limits. y are the outputs of the
# model, and the mean is over places, samples and u. To first order E[Σ (Δy)²] is Σ Δzᵀ B Δz over places, if these are independent of each
# other. Together with M = E[x xᵀ] it is the approximation of Martens, Grosse: Optimizing Neural Networks with Kronecker-factored
# Approximate Curvature, ICML 2015. Rounding by it is in Tseng, Sun, Hou, De Sa: Model-Preserving Adaptive Rounding, 2025.
DRAWN = 4  # u of each chunk
ELEMENTS = 2**20  # of a model's inputs that are looked at, about: of large images a few have places enough
ALONE = 0.1  # how much of what joins outputs is left out, since a mean over few samples joins what has nothing to do with each other
FLOOR = 0.02  # of the mean effect, that an output has at least: one that is cut off everywhere is not with other numbers


def output_effects(prepared: fx.GraphModule, chunks: Sequence[Sequence[object]], nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    """Return B of nodes with weights, (outputs, outputs), with a mean diagonal of 1; a node that no float output depends on is absent.

    The float model is run with gradients.
    """
    generator = torch.Generator().manual_seed(0)
    effects: dict[fx.Node, Tensor] = {}
    elements = 0
    for chunk in chunks:
        try:
            moments = _of_chunk(prepared, chunk, set(nodes), generator)
        except RuntimeError as error:  # PyTorch's, of a function that has no gradient
            logger.warning("weights are rounded layer by layer, without regard to what the model returns: %s", error)
            return {}
        for node, moment in moments.items():
            effects[node] = effects[node] + moment if node in effects else moment
        elements += sum(value.numel() for value in chunk if isinstance(value, Tensor))
        if elements >= ELEMENTS:
            break
    scaled = {node: moment / moment.diagonal().mean() for node, moment in effects.items() if bool(moment.diagonal().mean() > 0)}
    return {
        node: (1 - ALONE) * moment
        + ALONE * torch.diag(moment.diagonal())
        + FLOOR * torch.eye(len(moment), device=moment.device, dtype=torch.float32)
        for node, moment in scaled.items()
        if bool(torch.isfinite(moment).all())
    }


def _of_chunk(
    prepared: fx.GraphModule, chunk: Sequence[object], nodes: set[fx.Node], generator: torch.Generator
) -> Mapping[fx.Node, Tensor]:
    inputs = (value.clone() if isinstance(value, Tensor) and value.is_inference() else value for value in chunk)
    values: Values = dict(zip(prepared.graph.find_nodes(op="placeholder"), inputs, strict=True))
    sums: dict[fx.Node, tuple[Tensor, Tensor, int]] = {}  # the result of each, where it is not limited, and the dimension of its channels
    with torch.enable_grad():
        for node in prepared.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            result = run(prepared, node, values, exact=False)
            if node in nodes and isinstance(result, Tensor):
                result = result if result.requires_grad else result.detach().requires_grad_()
                values[node] = result
                if (terms := _held(prepared, node, values)) is not None:
                    sums[node] = (result, *terms)
            values[node] = result
        outputs = [y for y in real_outputs(fx.map_arg(prepared.graph.output_node().args, values.__getitem__)) if y.requires_grad]
        if not outputs or not sums:
            return {}
        moments: dict[fx.Node, Tensor] = {}
        for draw in range(DRAWN):
            drawn = [torch.randn(y.shape, generator=generator, device="cpu", dtype=torch.float32).to(y) for y in outputs]
            total = torch.stack([(u * y).sum() for u, y in zip(drawn, outputs, strict=True)]).sum()
            gradients = torch.autograd.grad(total, [each[0] for each in sums.values()], retain_graph=draw < DRAWN - 1, allow_unused=True)
            for (node, (_, within, axis)), gradient in zip(sums.items(), gradients, strict=True):
                if gradient is not None:
                    rows = (gradient * within).movedim(axis, -1).reshape(-1, gradient.shape[axis])
                    moments[node] = moments.get(node, 0) + rows.t() @ rows
    return moments


def _held(prepared: fx.GraphModule, node: fx.Node, values: Values) -> tuple[Tensor, int] | None:
    """Return a mask (0 or 1) of a result's elements within its clamp, and its channel dimension; None if the weight has other channels."""
    operator = walking.operator_at(prepared, node)
    assert operator is not None
    arguments, result = bound_arguments(node, operator, values), values[node].detach()
    weight = weight_of(operator, arguments)
    assert weight is not None
    axis = result.dim() - 1 - max(weight.dim() - 2, 0)
    if axis < 0 or result.shape[axis] != len(weight):
        return None
    low, high = arguments.get("clamp") or (None, None)
    within = torch.ones_like(result)
    if low is not None:
        within *= result > low
    if high is not None:
        within *= result < high
    return within, axis


# ---- The gain of a layer's results: how much larger they are in integers than in float, as far as samples tell that from noise ----
def gain_of(node: fx.Node, operator: QuantizedOperator, values: Sequence[Values], channels: int, rank: int) -> Tensor | None:
    """Return the ratio of integer to float results, (C,), or (1,) for one scale; None if the result does not have the weight's channels."""
    product, power, noise, places = (torch.zeros(channels, dtype=torch.float64, device="cpu") for _ in range(4))
    for each in values:
        result = real_result(operator, bound_arguments(node, operator, each))
        actual, target = (by_channel(value.double().cpu(), channels, rank) for value in (result, each[node]))
        if actual is None or target is None:
            return None
        product += (actual * target).sum(1)
        power += target.square().sum(1)
        noise += (actual - target).square().sum(1)
        places += target.shape[1]
    if not operator.weight_quantizer.per_channel:
        product, power, noise, places = (value.sum(0, keepdim=True) for value in (product, power, noise, places))
    beyond = product / power.clamp_min(1e-30) - 1
    explained = (1 - noise / power.clamp_min(1e-30) / places / beyond.square().clamp_min(1e-30)).clamp(0, 1)  # of what is beyond 1
    gain = torch.where(power > 0, 1 + explained * beyond, torch.ones_like(power))
    return gain.float().to(next(operator.weight_quantizer.buffers()).device)
