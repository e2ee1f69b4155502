"""Sensitivity: the error of the model's outputs if only one tensor, or one weight, is quantized, for each dtype.

measured     Σ(y' - y)² / Σy², where y' are the outputs with that tensor quantized and everything else in float
estimated    E_v Σᵢ (∂(v·y)/∂xᵢ)² (x'ᵢ - xᵢ)² / Σy²,  v = ±1 at random: the same to second order, if rounding errors are
             independent. (∂/∂x)² is the diagonal of the Fisher information of a Gaussian around the outputs (Dong et al. 2019,
             HAWQ, and Choi et al. 2017 use the curvature in this way); one pass backward serves all tensors and all dtypes
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import ACTIVATION, WEIGHT, Choice, Choices, bits
from fxquant.accuracy.measure import FloatOutputs, decibels, is_real
from fxquant.accuracy.ranks import require_alone
from fxquant.accuracy.simulation import changed, grid_for, rounded, rounded_weight, weight_name
from fxquant.accuracy.walk import Samples, inputs_of
from fxquant.analysis.recording import still
from fxquant.analysis.text import table
from fxquant.api.preparing import calibrate, example_of, prepare
from fxquant.errors import ConfigurationError
from fxquant.frontend import float_model
from fxquant.ir.graph import stage_of
from fxquant.ir.model import autocast_off
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, no_batches
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.spec import QConfig, QConfigMapping, State
from fxquant.support.arguments import CALLABLE, Kind, checked
from fxquant.target import Target

Metric = Callable[[Any], float]  # a function of a model; more is better
METRIC: Kind = CALLABLE.or_none("the error of the outputs alone")


@dataclass(frozen=True)
class TensorSensitivity:
    """The sensitivity of the outputs to the dtype of one tensor, or one weight.

    name       the node whose result it is; for a weight its layer's name with ".weight"
    kind       "activation" or "weight"
    dtype      its current dtype
    noise      by dtype: the noise-to-signal ratio of the outputs if only this tensor is quantized; empty if it was not measured
    estimate   by dtype: the second-order estimate of that ratio
    drop       by dtype: the drop of the metric; empty without a metric
    macs       the multiply-accumulates that read it, for one sample
    elements   its number of elements, for one sample
    """

    name: str
    kind: str
    dtype: str
    noise: Mapping[str, float]
    estimate: Mapping[str, float]
    drop: Mapping[str, float]
    macs: int
    elements: int

    @property
    def loss(self) -> Mapping[str, float]:
        """The measured noise by dtype, or else the estimate."""
        return self.noise or self.estimate


@dataclass(frozen=True)
class Sensitivity(Mapping[str, TensorSensitivity]):
    """The sensitivities of a model's tensors and weights by name, in the order they run; prints as a table, the most sensitive first.

    score    the metric of the float model; None without a metric
    """

    tensors: tuple[TensorSensitivity, ...]
    score: float | None = None

    def __getitem__(self, name: str) -> TensorSensitivity:
        return {tensor.name: tensor for tensor in self.tensors}[name]

    def __iter__(self) -> Iterator[str]:
        return (tensor.name for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def ranked(self, width: int | None = None) -> tuple[TensorSensitivity, ...]:
        """Return the tensors, the most sensitive first: at their current dtype, or at `width` bits, without tensors that cannot have it."""

        def losses(tensor: TensorSensitivity) -> list[float]:
            return [loss for dtype, loss in tensor.loss.items() if (dtype == tensor.dtype if width is None else bits(dtype) == width)]

        tensors = [tensor for tensor in self.tensors if losses(tensor)]
        return tuple(sorted(tensors, key=lambda tensor: max(losses(tensor)), reverse=True))

    def gains(self, width: int) -> dict[str, tuple[str, float]]:
        """Return the tensors that lose less with `width` bits, the most first, by name: that dtype, and how much less."""
        there = [(each, dtype) for each in self.tensors for dtype in each.loss if bits(dtype) == width]
        gains = {each.name: (dtype, each.loss[each.dtype] - each.loss[dtype]) for each, dtype in there}
        return dict(sorted(((name, gain) for name, gain in gains.items() if gain[1] > 0), key=lambda item: item[1][1], reverse=True))

    def __str__(self) -> str:
        """Return the table: SQNR at the outputs in dB for each dtype, and the shares of multiply-accumulates and of current bytes."""
        dtypes = sorted({dtype for tensor in self.tensors for dtype in tensor.loss}, key=lambda dtype: (bits(dtype), dtype))
        macs = sum(tensor.macs for tensor in self.tensors if tensor.kind == WEIGHT) or 1
        sizes = {kind: sum(_bytes(tensor) for tensor in self.tensors if tensor.kind == kind) or 1 for kind in (ACTIVATION, WEIGHT)}
        rows = []
        for tensor in self.ranked():
            cells = [f"{decibels(tensor.loss[dtype]):.1f}" if dtype in tensor.loss else "" for dtype in dtypes]
            drops = [f"{tensor.drop[dtype]:+.3g}" if dtype in tensor.drop else "" for dtype in dtypes if self.score is not None]
            shares = f"{100 * tensor.macs / macs:.1f} %", f"{100 * _bytes(tensor) / sizes[tensor.kind]:.1f} %"
            rows.append((tensor.name, tensor.dtype, *cells, *drops, *shares))
        measured = all(tensor.noise for tensor in self.tensors)
        head = [f"{dtype} dB" for dtype in dtypes] + [f"{dtype} drop" for dtype in dtypes if self.score is not None]
        title = f"SQNR at the outputs with one tensor alone quantized, {'measured' if measured else 'estimated to second order'}"
        return f"{title}\n{table(('tensor', 'now', *head, 'MACs', 'bytes'), rows, left=2)}"


def _bytes(tensor: TensorSensitivity) -> float:
    return tensor.elements * bits(tensor.dtype) / 8


@checked(metric=METRIC)
def sensitivity(
    model: nn.Module, batches: Any, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    metric: Metric | None = None, num_batches: int | None = None, options: Options = DEFAULTS, show_progress: bool | None = None,
) -> Sensitivity:  # fmt: skip
    """Measure the loss at the outputs if each quantized tensor or weight alone has 4, 8 or 16 bits, where the target supports them.

    `model` is a float model, which is prepared and calibrated with the batches, or a calibrated prepared model, whose own target and
    qconfig are used. Each dtype's scale is that of the tensor's observer, so one calibration serves all dtypes. The loss is measured
    in one run over the batches per tensor and dtype, and also estimated to second order for all of them at once.
    Tensors whose dtype an operator demands, whose scale is constant or frozen, and modules with an attribute `qconfig` are left out.
    The outputs of the float model are kept for all batches. The model is left unchanged.

    A `metric`, a function of a model where more is better, is evaluated for each tensor and dtype as well.

    Raises NotCalibrated for a prepared model without scales, ConfigurationError for a prepared model and a `qconfig`, and the errors of
    `prepare` and `calibrate`.
    """
    if not isinstance(model, fx.GraphModule) or stage_of(model) != "PREPARED":
        prepared, _ = calibrated(model, batches, target, qconfig, num_batches, options, show_progress)
    elif qconfig is None:
        prepared = model
        for operator in quantized_operators(prepared).values():
            if not operator.plain:
                operator.output.require()
    else:
        because = "the loss is measured with the qconfig that it was prepared with, so that this one would have no effect"
        remedy = "leave qconfig out, or pass the float model"
        raise ConfigurationError("a prepared model has a qconfig already", because=because, remedy=remedy)
    return find(prepared, inputs_of(prepared, batches, num_batches, options), options, show_progress, metric)


def calibrated(
    model: nn.Module, batches: Any, target: str | Target, qconfig: QConfig | QConfigMapping | None, num_batches: int | None,
    options: Options, show_progress: bool | None,
) -> tuple[fx.GraphModule, Any]:  # fmt: skip
    """Prepare and calibrate a float model; return it with the example inputs that it was prepared with."""
    if isinstance(model, fx.GraphModule) and stage_of(model) == "PREPARED":
        because = "its dtypes are to change, and they are those that it was prepared with"
        remedy = "pass the float model, and the qconfig"
        raise ConfigurationError("a prepared model cannot be prepared again", because=because, remedy=remedy)
    if isinstance(batches, Iterator):
        because = "a search runs the same batches again and again"
        remedy = "pass a list or a DataLoader: list(batches)"
        raise ConfigurationError(f"a {type(batches).__name__} yields its batches only once", because=because, remedy=remedy)
    require_alone(options)
    as_written, source = float_model(model), as_batches(batches)
    first = next(iter(source), None)
    if first is None:
        raise no_batches(num_batches)
    example, options = example_of(as_written, first, source, num_batches, options)
    prepared = prepare(as_written, example, target, qconfig, options=options)
    return calibrate(prepared, source, num_batches, options=options, show_progress=show_progress), example


def find(
    prepared: fx.GraphModule, samples: list[list[Any]], options: Options, show_progress: bool | None, metric: Metric | None = None,
    kinds: Sequence[str] = (ACTIVATION, WEIGHT),
) -> Sensitivity:  # fmt: skip
    """Return the sensitivities of the choices of these kinds."""
    choices = Choices(prepared, options.widths)
    chosen = [choice for choice in choices.values() if choice.kind in kinds]
    call = {"function": "sensitivity", "widths": options.widths, "kinds": tuple(kinds), "seed": options.seed}
    journal = Checkpoint(options.checkpoint, call_of(prepared, Samples(samples), **call, metric=metric is not None))
    reference = reference_of(prepared, samples)
    with still(prepared, State.FLOAT), autocast_off():
        estimates = journal.at("estimate", lambda: _estimated(reference, chosen, options.seed))
        score = None if metric is None else journal.at("score", lambda: score_of(metric, prepared))

        def trial(choice: Choice, dtype: str) -> list[float | None]:
            with rounded(choices, {choice.name: dtype}):
                noise = reference.noise(reference.float_form).pooled if options.measured else None
                return [noise, None if metric is None else score_of(metric, prepared)]

        trials = [(choice, dtype) for choice in chosen for dtype in choice.dtypes] if options.measured or metric is not None else []
        tasks = {f"{choice.name} {dtype}": partial(trial, choice, dtype) for choice, dtype in trials}
        results = journal.gather(tasks, "sensitivity", show_progress)
    tensors = []
    for choice in chosen:
        measured = {dtype: results[f"{choice.name} {dtype}"] for dtype in choice.dtypes if results}
        noise = {dtype: noise for dtype, (noise, _) in measured.items() if noise is not None}
        drop = {dtype: score - result for dtype, (_, result) in measured.items() if score is not None}
        losses = noise, estimates[choice.name], drop
        tensors.append(TensorSensitivity(choice.name, choice.kind, choice.dtype, *losses, choice.macs, choice.elements))
    return Sensitivity(tuple(tensors), score)


def reference_of(prepared: fx.GraphModule, samples: Sequence[Sequence[Any]]) -> FloatOutputs:
    """Return the outputs of the float form for these inputs. Raises ConfigurationError if none is a floating-point tensor."""
    reference = FloatOutputs(prepared, samples)
    if not reference.there:
        because = "noise is measured in float outputs"
        remedy = "pass a metric, or a model that returns its scores as well"
        raise ConfigurationError("the model returns no float tensor to measure an error of", because=because, remedy=remedy)
    return reference


def score_of(metric: Metric, model: nn.Module) -> float:
    """Return the value of a metric for a model. Raises ConfigurationError unless it is a finite number."""
    with torch.no_grad():
        value: Any = metric(model)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        what = f"the metric returned {value!r}" if not isinstance(value, Tensor) else "the metric returned no finite number"
        because = "a metric is a function of a model that returns a finite number, of which more is better"
        raise ConfigurationError(what, because=because, remedy="return a float: an accuracy, a PSNR, a loss with its sign changed")
    return number


def _estimated(reference: FloatOutputs, chosen: Sequence[Choice], seed: int) -> dict[str, dict[str, float]]:
    """Return the second-order estimate of every choice in every dtype."""
    estimates: dict[str, dict[str, float]] = {choice.name: dict.fromkeys(choice.dtypes, 0.0) for choice in chosen}
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, tuple[Tensor, Mapping[str, Any]]] = {}  # with the arguments of the call
    curvature: dict[str, Tensor] = {}  # of weights: Σ over batches of the squared gradient
    recorded: list[tuple[Choice, Tensor, Mapping[str, Any] | None]] = []

    def watch(choice: Choice, value: Any, arguments: Mapping[str, Any] | None = None) -> Any:
        if is_real(value):
            value = value.detach().clone().requires_grad_() if arguments is not None or not value.requires_grad else value
            recorded.append((choice, value, arguments))
        return value

    def watch_weight(choice: Choice, operator: QuantizedOperator, arguments: Mapping[str, Any]) -> Any:
        return watch(choice, arguments[weight_name(operator, arguments)], arguments)

    power = [sum(float(output.double().square().sum()) for output in each) or 1.0 for each in zip(*reference.wanted, strict=True)]
    with changed(chosen, watch, watch_weight):
        for inputs in reference.chunks:
            recorded.clear()
            with torch.enable_grad(), torch.inference_mode(False):
                probe = _probe(reference.apart(reference.float_form(inputs)), power, generator)
                inner = [value for _, value, _ in recorded]
                gradients = torch.autograd.grad(probe, inner, allow_unused=True) if inner and probe.requires_grad else [None] * len(inner)
            for (choice, value, arguments), gradient in zip(recorded, gradients, strict=True):
                if gradient is None:
                    continue
                squared = gradient.double().square()
                if arguments is not None:
                    curvature[choice.name] = curvature.get(choice.name, torch.zeros_like(squared)) + squared
                    weights[choice.name] = value.detach(), arguments
                    continue
                for dtype in choice.dtypes:
                    grid, real = grid_for(choice.operators[0].output, dtype), value.detach()
                    error = (grid.dequantize(grid.quantize(real)) - real).double().square()
                    estimates[choice.name][dtype] += float((squared * error).sum())
    for choice in chosen:
        if choice.name in weights:
            weight, arguments = weights[choice.name]
            for dtype in choice.dtypes:
                error = (rounded_weight(choice.operators[0], arguments, dtype) - weight).double().square()
                estimates[choice.name][dtype] = float((curvature[choice.name] * error).sum())
    return estimates


def _probe(outputs: Sequence[Tensor], powers: Sequence[float], generator: torch.Generator) -> Tensor:
    """Return the normalized sum of the outputs times random signs: the expected square of its change is their relative noise."""
    total = torch.zeros((), device="cpu", dtype=torch.float32)
    for output, power in zip(outputs, powers, strict=True):
        signs = torch.randint(0, 2, output.shape, generator=generator, device="cpu").to(output) * 2 - 1
        total = total.to(output.device) + (output * signs).sum() / (power * len(outputs)) ** 0.5
    return total
