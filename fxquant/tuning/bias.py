"""Bias correction: what an operator's rounded weight, and its rounded operands, shift its output by on average is taken from its bias.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction, ICCV 2019, section 4.2
and appendix D, empirical and sequential: per output channel, the mean over samples and places of what the float model has there, minus
that of what the integers have, operand after operand corrected before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.arguments import checked
from fxquant.model import repeatable
from fxquant.progress import progress
from fxquant.quantization.prepared import QuantizedOperator, quantized_operators
from fxquant.quantization.weights import BiasCorrection
from fxquant.tuning.checkpoint import CHECKPOINT
from fxquant.tuning.guard import tuning
from fxquant.tuning.journal import Journal
from fxquant.tuning.real import by_channel, real_result, weight_of
from fxquant.tuning.result import TunedLayer, TuningResult
from fxquant.tuning.resumption import digest, model_digest
from fxquant.tuning.units import Lesson, Unit, bound_arguments, layer_units
from fxquant.tuning.walk import Samples, Values, Walk, arguments_of, taken

OUTLIER = 6.0  # times the median magnitude of a channel's differences: what is beyond counts as so much


@checked(checkpoint=CHECKPOINT)
def correct_bias(
    prepared: fx.GraphModule,
    batches: Any,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    batch_size: int = 16,
    checkpoint: str | None = None,
    show_progress: bool | None = None,
) -> TuningResult:
    """Correct the bias of every weighted operator whose output is nearer to the float model's with it; the model is left in VALIDATE.

    `batches` are as in `calibrate`. A quarter of the samples is held out, and judges: a layer whose mean squared error there, behind its
    fused limits and the function that follows it, does not fall keeps the bias it had. The correction is beside the bias, not in it: the
    model in state FLOAT stays what it is, `convert`, `save` and `state_dict` know of it, and a batch norm that is trained live takes
    its place. The inputs are kept, and of what is between the layers two values, float and integer, for each that is still to be read.

    The same model and batches give the same bits, on one machine, with any number of threads. After a kill, the same call with the same
    `checkpoint` continues behind the last layer that was finished.

    Raises NotCalibrated before calibration, CalibrationError for batches that do not fit, and ConfigurationError for a checkpoint that is
    of another call; if anything is raised, the model is what it was.
    """
    with tuning(prepared) as operators:
        samples = taken(prepared, batches, num_batches, batch_fn, batch_size, show_progress)
        call = {"method": "correct_bias", "batch_size": batch_size, "model": model_digest(prepared), "samples": digest(samples.tensors)}
        with repeatable():
            return _correct(prepared, samples, operators, Journal(checkpoint, call), show_progress)


def corrections(prepared: fx.GraphModule, samples: Samples, show_progress: bool | None) -> dict[str, list[float]]:
    """Biases corrected by these samples; what is added to each now, by layer. Nothing is done with one chunk alone."""
    if len(samples.chunks) < 2:
        return {}
    with tuning(prepared) as operators, repeatable():
        result = _correct(prepared, samples, operators, Journal(None, {}), show_progress)
    added = {name: operators[name].weight_quantizer.correction for layer in result.kept for name in layer.layers}
    return {name: each.value.tolist() for name, each in added.items() if each is not None}


def settle(prepared: fx.GraphModule, found: Mapping[str, list[float]]) -> None:
    """Layers have these corrections."""
    for name, value in found.items():
        _put(quantized_operators(prepared)[name], value)


def _correct(
    prepared: fx.GraphModule, samples: Samples, operators: Mapping[str, QuantizedOperator], journal: Journal, show_progress: bool | None
) -> TuningResult:
    exact, real = Walk(prepared, samples.chunks, exact=True), Walk(prepared, samples.chunks, exact=False)
    units = layer_units(prepared)
    found, skipped = [], []
    for unit in progress(units, len(units), "correcting biases", show_progress):
        operator = operators[unit.weighted[0].name]
        known = journal.at(unit.name, partial(_found, unit, samples, exact, real, operator))
        if known is None:
            skipped.append((unit.name, "its channels are not those of its weight"))
            continue
        row = TunedLayer(**{**known["row"], "layers": tuple(known["row"]["layers"])})
        if row.kept:
            _put(operator, known["value"])
        found.append(row)
    return TuningResult("correct_bias", tuple(found), tuple(skipped), exact.largest + real.largest)


def _found(unit: Unit, samples: Samples, exact: Walk, real: Walk, operator: QuantizedOperator) -> dict[str, Any] | None:
    """What became of one layer, as a file holds it: its row, and what is added to its bias where that is better."""
    lesson = Lesson(unit, samples, exact, real)
    correction = _correction(lesson, operator)
    if correction is None:
        return None
    row = _tried(lesson, operator, correction)
    added = operator.weight_quantizer.correction
    return {"row": asdict(row), "value": added.value.tolist() if row.kept and added is not None else None}


def _put(operator: QuantizedOperator, value: list[float]) -> None:
    added = BiasCorrection(len(value))
    added.value.copy_(torch.tensor(value, dtype=torch.float32, device="cpu"))
    operator.weight_quantizer.correct(added.to(next(operator.buffers(), added.value).device))


@torch.no_grad()
def _correction(lesson: Lesson, operator: QuantizedOperator) -> Tensor | None:
    """What is to be added, shape (C,): the mean of float minus integer before the fused limits, over what is learned from."""
    node = lesson.unit.weighted[0]
    total, count = torch.zeros((), device="cpu", dtype=torch.float32), 0
    for index in lesson.samples.learning:
        has = bound_arguments(node, operator, lesson.operands[index])
        weight = weight_of(operator, has)
        assert weight is not None
        difference = _unlimited(node, operator, lesson.float_operands[index]) - real_result(operator, has, whole=False)
        rows = by_channel(difference.double(), len(weight), weight.dim())
        if rows is None:
            return None
        rows = _without_outliers(rows)
        total, count = total + rows.sum(1), count + rows.shape[1]
    return (total / max(count, 1)).float()


def _without_outliers(rows: Tensor) -> Tensor:
    """Limited to some times the median magnitude of each row: where an operand was cut off, differences are not those of rounding."""
    limit = OUTLIER * rows.abs().median(1, keepdim=True).values
    return rows.clamp(-limit, limit)


def _unlimited(node: fx.Node, operator: QuantizedOperator, values: Values) -> Tensor:
    """What its float function gives before the fused limits."""
    args, kwargs = operator.multiplied(*arguments_of(node, values))
    kwargs.pop("clamp", None)
    result: Tensor = operator.operator.function(*args, **kwargs)
    return result


def _tried(lesson: Lesson, operator: QuantizedOperator, correction: Tensor) -> TunedLayer:
    """The correction is there if it lowers the error of what is held out."""
    quantizer, previous = operator.weight_quantizer, operator.weight_quantizer.correction
    before = lesson.error()
    added = BiasCorrection(len(correction)).to(correction.device)
    added.value.copy_(correction if previous is None else previous.value + correction)
    quantizer.correct(added)
    after = lesson.error()
    if not after < before:
        quantizer.correct(previous)
    return TunedLayer(lesson.unit.name, (lesson.unit.weighted[0].name,), before, after, after < before, lesson.signal())
