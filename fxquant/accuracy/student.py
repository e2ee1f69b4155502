"""Learn the rounding of weights and the scales of activations from the float result of a unit of layers.

Rounding is that of Nagel, Amjad, van Baalen, Louizos, Blankevoort: Up or Down? Adaptive Rounding for Post-Training Quantization, ICML 2020,
section 3. A number v for each weight decides between the two nearest integers,

    w_q = floor(w / s) + h(v),   h(v) = clip(1.2 · sigmoid(v) - 0.1, 0, 1),   penalty 1 - |2 h(v) - 1|^β

starting where h(v) is the fraction of w / s. β falls from 20 to 2 in a cosine once a fifth of the steps is done; before, the penalty is 0.
At the end w_q is the integer that h(v) is nearer to. The loss is the squared error of the results, relative to the error with weights
rounded to the nearest, plus the mean penalty times `PENALTY`. So nothing depends on the unit of the results or on the number of weights.

Before that, `search` chooses the share of a weight's range that its scale covers. Activations inside of a unit, and its operands, are
rounded as in Wei, Gong, Li, Liu, Yu: QDrop, ICLR 2022, section 4: each element with probability one half. Scales have LSQ's gradient.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from fxquant.accuracy import walk
from fxquant.accuracy.measure import is_real
from fxquant.accuracy.walk import Lesson, Unit, Values
from fxquant.numerics.rounding import AdaptiveRounding, Nearest, clamped, straight_through
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.undo import Snapshot
from fxquant.quantization.learning import LSQ
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import Coverage, WeightQuantizer

PENALTY = 1.0
REACH = 10.0  # how far v can move in all steps together; where h(v) is one half, 2.4 decide
SCALE_REACH = 1.0  # the same of the logarithm of a scale, whose steps become shorter in a cosine
LARGEST_STEP = 0.1
WITHOUT_PENALTY = 0.2  # of the steps
SHARPEST, SOFTEST = 20.0, 2.0
_LOW, _HIGH = -0.1, 1.1  # what the sigmoid is stretched to before it is cut off at 0 and 1

# Learned values, as a checkpoint holds them: "offset/NODE" of a rounding, "share/NODE" that a weight's scale covers, "scale/QUANTIZER".
Learned = Mapping[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """The settings with which a unit learns."""

    steps: int  # the number of Adam steps, each with one chunk of samples
    # The probability with which an element of an operand or an inner tensor is rounded; None: operands are always rounded, inner tensors
    # never.
    rounded: float | None = None
    scales: bool = False  # whether the scales of inner tensors are learned


class _Choice:
    """The learned rounding of one weight."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.start = torch.zeros(shape, device="cpu", dtype=torch.float32)  # the weight in steps, as it is
        self.value: nn.Parameter | None = None  # v, a parameter of its shape

    def between(self, real: Tensor) -> Tensor:
        """Return the weight between the integers beside it; the first call says where it is."""
        if self.value is None:
            self.start = real.detach().clone()
            share = self.start - torch.floor(self.start)
            self.value = nn.Parameter(torch.logit((share - _LOW) / (_HIGH - _LOW)))
        return torch.floor(self.start) + self.share()

    def share(self) -> Tensor:
        """h(v)."""
        assert self.value is not None
        return clamped(torch.sigmoid(self.value) * (_HIGH - _LOW) + _LOW, 0, 1)

    @torch.no_grad()
    def decided(self) -> AdaptiveRounding:
        """Return a new rounding to the floor plus round(h(v)), where h(v) is the learned share of each weight, from 0 to 1."""
        rounding = AdaptiveRounding(self.shape).to(self.start.device)
        rounding.settle(self.start, torch.floor(self.start) + torch.round(self.share()))
        return rounding


class Student:
    """A unit while it learns.

    Between `study` and `settled` its operators have roundings that give no integers; whatever is raised there, `undo` is for. It restores
    the rounding, coverage and scales from before learning.
    """

    def __init__(self, lesson: Lesson, settings: Settings, seed: int) -> None:
        self.lesson, self.settings, self.unit, self.prepared = lesson, settings, lesson.unit, lesson.prepared
        self.generator = torch.Generator().manual_seed(seed)
        operators = ((node, walk.operator_at(self.prepared, node)) for node in self.unit.nodes)
        self.operators = {node: operator for node, operator in operators if operator is not None and not operator.left_out}
        self.shares: dict[fx.Node, Tensor] = {}
        weights = {node: walk.constant_weight(self.prepared, node, self.operators[node]) for node in self.unit.weighted}
        self.choices = {node: _Choice(tuple(weight.shape)) for node, weight in weights.items()}
        quantizers = _movable(self.prepared, self.operators.values()) if settings.scales else []
        self.starts = {quantizer: quantizer.current().detach().clone() for quantizer in quantizers}
        parts = [module for node in self.unit.weighted for module in self.operators[node].weight_quantizer.modules()]
        self.undo = Snapshot(parts, (number for quantizer in quantizers for number in _numbers(quantizer))).restore
        self.growth = {quantizer: nn.Parameter(torch.zeros_like(start)) for quantizer, start in self.starts.items()}

    def study(self) -> Iterator[None]:
        """Search the shares of weight scales, then train roundings and activation scales with Adam; yield after each step."""
        with torch.no_grad():
            unit = max(self._loss(index).item() for index in self.lesson.samples.learning[:4])
            for node in self.unit.weighted:
                self.operators[node].weight_quantizer.rounding = Nearest()
            self.shares = search(self.lesson, self.operators)
            for node, choice in self.choices.items():
                rounding = AdaptiveRounding(choice.shape)
                rounding.soft = choice.between
                self.operators[node].weight_quantizer.rounding = rounding
            self._loss(self.lesson.samples.learning[0])
        values = [choice.value for choice in self.choices.values() if choice.value is not None]
        size = sum(value.numel() for value in values)
        if unit <= 0 or not size:
            return
        learned, steps = [*values, *self.growth.values()], self.settings.steps
        optimizer = torch.optim.Adam([{"params": values, "lr": min(REACH / steps, LARGEST_STEP)}])
        if self.growth:
            optimizer.add_param_group({"params": list(self.growth.values())})
        for step in range(steps):
            if self.growth:
                optimizer.param_groups[1]["lr"] = min(SCALE_REACH / steps, LARGEST_STEP) * (1 + math.cos(math.pi * step / steps)) / 2
            index = int(torch.randint(len(self.lesson.samples.learning), (), generator=self.generator, device="cpu"))
            loss = self._loss(self.lesson.samples.learning[index]) / unit
            if (sharpness := _sharpness(step / steps)) is not None:
                penalties = [(1 - (2 * choice.share() - 1).abs().pow(sharpness)).sum() for choice in self.choices.values()]
                loss = loss + PENALTY / size * torch.stack(penalties).sum()
            for parameter, gradient in zip(learned, torch.autograd.grad(loss, learned, allow_unused=True), strict=True):
                parameter.grad = gradient  # of these alone: the model's own parameters have no part in this
            optimizer.step()
            yield

    def _loss(self, index: int) -> Tensor:
        """Return the mean squared error of the unit's results for one chunk, with the current parameters."""
        values, targets = self._operands(index), self.lesson.targets[index]
        for node in self.unit.nodes:
            operator = self.operators.get(node)
            if operator is None or operator.plain:
                values[node] = walk.run(self.prepared, node, values, exact=False)
                continue
            arguments = walk.bound_arguments(node, operator, values)
            weighted = walk.is_weighted(operator, arguments)
            real = walk.real_result(operator, arguments) if weighted else walk.run(self.prepared, node, values, exact=False)
            values[node] = real if self.settings.rounded is None else self._partly(real, self._rounded(real, operator.output))
        return torch.stack([(values[node] - targets[node]).square().mean() for node in self.unit.exits]).sum()

    def _operands(self, index: int) -> Values:
        real = self.lesson.float_operands[index]
        return {node: self._partly(real[node], value) if is_real(value) else value for node, value in self.lesson.operands[index].items()}

    def _partly(self, real: Tensor, rounded: Tensor) -> Tensor:
        """Return `rounded` at random elements and `real` at the others; `rounded` everywhere if the settings have no probability."""
        if real is rounded or self.settings.rounded is None:
            return rounded
        chosen = torch.rand(rounded.shape, generator=self.generator, device="cpu", dtype=torch.float32) < self.settings.rounded
        return torch.where(chosen.to(rounded.device), rounded, real)

    def _rounded(self, real: Tensor, quantizer: Quantizer) -> Tensor:
        """Return the value on its grid, with LSQ's gradients to it and to the scale."""
        if quantizer.follows_sum:
            return real
        grid = quantizer.grid
        scale = self._scale(quantizer) if quantizer in self.growth else grid.scale
        steps = clamped(real / scale, *grid.bounds)
        return straight_through(steps, torch.round(steps.detach())) * scale

    def _scale(self, quantizer: Quantizer) -> Tensor:
        return self.starts[quantizer] * torch.exp(self.growth[quantizer])

    @torch.no_grad()
    def settled(self, error: Callable[[], float]) -> tuple[Learned, float]:
        """Apply the learned parameters to the model, rounded to integers; return them and the unit's error.

        Of the learned roundings, the shares of weight scales and the scales of activations, the combination with the least error is taken.
        """
        offsets = {f"offset/{node.name}": choice.decided().offset for node, choice in self.choices.items()}
        shares = {f"share/{node.name}": share for node, share in self.shares.items()}
        scales = {f"scale/{quantizer.name}": self._scale(quantizer).detach() for quantizer in self.growth}
        candidates = [offsets | shares, shares]
        if scales:
            candidates += [offsets | shares | scales, scales]
        errors = []
        for candidate in candidates:
            self.undo()
            put_unit(self.prepared, self.unit, candidate)
            errors.append(error())
        best = errors.index(min(errors))
        self.undo()
        put_unit(self.prepared, self.unit, candidates[best])
        return candidates[best], errors[best]


@torch.no_grad()
def put_unit(prepared: fx.GraphModule, unit: Unit, learned: Learned) -> None:
    """Put the learned values of a unit into the model."""
    for node in unit.nodes:
        operator = walk.operator_at(prepared, node)
        if operator is None:
            continue
        put(operator, LearnedRounding(learned.get(f"offset/{node.name}"), learned.get(f"share/{node.name}")))
        if not operator.plain and operator.owns_output and f"scale/{operator.output.name}" in learned:
            _move(operator.output, learned[f"scale/{operator.output.name}"])


def _movable(prepared: fx.GraphModule, operators: Iterable[QuantizedOperator]) -> list[Quantizer]:
    """Return the quantizers whose scale can be learned: calibrated, not a power of two, and not shared with an operator outside."""
    inside = {operator.name for operator in operators}
    shared = {o.output for name, o in quantized_operators(prepared).items() if name not in inside and not o.plain}
    own = [each for each in dict.fromkeys(o.output for o in operators if not o.plain) if each not in shared]
    return [each for each in own if not (each.follows_sum or each.power_of_two or each.frozen or each.observer is None)]


def _numbers(quantizer: Quantizer) -> list[Tensor]:
    """Return the tensors that `_move` changes."""
    tensors = [quantizer.base_scale, *quantizer.trained.values()]
    return [*tensors, quantizer.ends, quantizer.zero_point] if quantizer.dtype.affine else tensors


@torch.no_grad()
def _move(quantizer: Quantizer, scale: Tensor) -> None:
    """Assign `scale` to the quantizer; an affine grid keeps its zero point."""
    if quantizer.dtype.affine:
        quantizer.ends.mul_(scale / quantizer.current())
    quantizer.assign(scale)


def _sharpness(share: float) -> float | None:
    """β after a share of the steps; None before anything is penalised."""
    if share < WITHOUT_PENALTY:
        return None
    remaining = 1 + math.cos(math.pi * (share - WITHOUT_PENALTY) / (1 - WITHOUT_PENALTY))
    return SOFTEST + (SHARPEST - SOFTEST) * remaining / 2


class LearnedRounding(NamedTuple):
    """The rounding decision of one layer."""

    offset: Tensor | None = None  # of its roundings, in steps, shape of the weight; None: its rounding stays
    share: Tensor | None = None  # of its largest magnitude that the scale covers, (C,) or (1,); None: all, or the scale is learned
    scale: Tensor | None = None  # where a learned scale starts, (C,) or (1,); None: the scale is not learned

    def copied(self) -> "LearnedRounding":
        """Return the same numbers in the memory of the host, which no change of the model reaches."""
        return LearnedRounding(*(None if each is None else each.to("cpu", copy=True) for each in self))


def learned_rounding(quantizer: WeightQuantizer) -> LearnedRounding:
    """Return the offset, the share and the scale of a weight that samples rounded."""
    assert isinstance(quantizer.rounding, AdaptiveRounding)
    learned = quantizer.learned if quantizer.learned is not None and quantizer.learned.method is LSQ else None
    share = None if quantizer.coverage is None else quantizer.coverage.share
    return LearnedRounding(quantizer.rounding.offset, share, None if learned is None else learned.current())


def put(operator: QuantizedOperator, decided: LearnedRounding) -> None:
    """Set the rounding, the coverage and the learned scale of the operator's weight to the parts of `decided` that are not None."""
    offset, share, scale = decided
    present = [each for each in decided if each is not None]
    if not present:
        return
    quantizer, device = operator.weight_quantizer, next(operator.buffers(), present[0]).device
    if offset is not None:
        rounding = AdaptiveRounding(tuple(offset.shape)).to(device)
        rounding.offset.copy_(offset)
        quantizer.rounding = rounding
    if share is not None:
        coverage = Coverage(len(share)).to(device)
        coverage.share.copy_(share)
        quantizer.cover(coverage)
    if scale is not None and quantizer.learned is not None and not quantizer.learned.frozen:
        quantizer.learned.assign(scale.to(device))


# ---- The share of a weight's largest magnitude that its scale covers, per channel: the one with the least error of the layer's result
#
#     share_c = argmin over SHARES of Σ (y_c - ŷ_c)²,   ŷ with the weight rounded to the nearest on share_c · max |w_c| / divisor
#
# over training samples, after the fused clamp, with quantized operands. With 4 bits a smaller scale makes up for a few clipped weights;
# how many depends on the activations that they are multiplied by.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
WORTH = 0.75  # of the error that is left when everything is covered; learning roundings makes up for long steps, and for nothing cut off
CHUNKS = 4  # of the samples that are learned from, at most


@torch.no_grad()
def search(lesson: Lesson, operators: Mapping[fx.Node, QuantizedOperator]) -> dict[fx.Node, Tensor]:
    """Choose and apply the shares of a unit's weights, node by node with the shares of earlier nodes applied; return them by node."""
    chunks = lesson.samples.learning[:CHUNKS]
    rounded = [dict(lesson.operands[index]) for index in chunks]
    real = [dict(lesson.float_operands[index]) for index in chunks]
    shares: dict[fx.Node, Tensor] = {}
    for node in lesson.unit.nodes:
        for values in real:
            values[node] = walk.run(lesson.prepared, node, values, exact=False)
        quantizer = operators[node].weight_quantizer if node in lesson.unit.weighted else None
        if quantizer is not None and quantizer.learned is None and not quantizer.power_of_two:  # else the weight does not give its scale
            share = _best(node, operators[node], rounded, real)
            if share is not None:
                shares[node] = share
        for values in rounded:
            values[node] = walk.run(lesson.prepared, node, values, exact=True)
    return shares


def _best(node: fx.Node, operator: QuantizedOperator, rounded: list[Values], real: list[Values]) -> Tensor | None:
    """Choose, apply and return the shares of one weight, float32 (C,) or (1,); None if the result does not have the weight's channels."""
    quantizer, previous = operator.weight_quantizer, operator.weight_quantizer.coverage
    arguments = [walk.bound_arguments(node, operator, values) for values in rounded]
    weight = walk.weight_of(operator, arguments[0])
    assert weight is not None
    coverage = Coverage(len(weight) if quantizer.per_channel else 1).to(weight.device)
    quantizer.cover(coverage)
    errors = []
    for share in SHARES:
        coverage.share.fill_(share)
        error = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
        for has, values in zip(arguments, real, strict=True):
            difference = walk.real_result(operator, has) - values[node]
            rows = walk.by_channel(difference.double(), len(weight), weight.dim())
            if rows is None:
                quantizer.cover(previous)
                return None
            error += rows.square().sum(1)
        errors.append(error if quantizer.per_channel else error.sum(0, keepdim=True))
    stacked = torch.stack(errors)
    least = stacked.min(0)
    best = torch.where(least.values <= WORTH * stacked[0], least.indices, 0)
    coverage.share.copy_(torch.tensor(SHARES, device=weight.device, dtype=torch.float32)[best])
    return coverage.share.clone()
