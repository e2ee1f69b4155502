"""Bias correction: subtract from an operator's bias the mean shift that its rounded weight and rounded operands cause in its output.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction, ICCV 2019, section 4.2
and appendix D, empirical and sequential. The correction is the mean of the float model's output over samples and places, minus that of
the integers', per output channel. Operators are corrected in order, so that each sees operands that are corrected already.

Where limits are fused into the operator, as of a ReLU6, means are matched after them:

    mean clamp(ŷ + c) = mean clamp(y)

A rectifier turns noise of mean zero into noise with a positive mean, so matching means before the limits leaves a shift after them. The
left side grows with c, and Newton's method finds c for each channel. A layer's sums are formed once. Its correction follows from these
sums, and so does the error on held-out samples with it and without it, after the function that alone reads the layer, if there is one.
All corrections together, and half of each, are then judged by the outputs of the model on held-out samples (`measure`): all stay unless
half of each, or none, is clearly better. Matching means is right by its derivation, and a few samples have to speak against it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import Tuned, tuning
from fxquant.accuracy.measure import FloatOutputs, Forward, judged, outputs_of, real_outputs
from fxquant.accuracy.result import TunedLayer, TuningResult
from fxquant.accuracy.step import ENOUGH, Run
from fxquant.accuracy.walk import Samples, Unit, Walk, bound_arguments, by_channel, layer_units, real_result, run, taken, weight_of
from fxquant.ir import loops
from fxquant.ir.model import repeatable
from fxquant.lowering.eager import constants_kept
from fxquant.lowering.lowering import Clamp
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.weights import BiasCorrection
from fxquant.support import logger
from fxquant.support.arguments import checked
from fxquant.support.progress import progress

SHARES = {"in full": 1.0, "by half": 0.5}  # of the corrections
NEWTON = 6  # steps: the mean after limits is nearly linear in what is added
FEWEST = 0.05  # of a channel's values that are taken to lie within the limits, at least: what is always cut off has no slope
PLACES = 2**15  # of a channel, about, by which means after limits are matched
OUTLIER = 6.0  # times the median magnitude of a channel's differences: what is beyond counts as so much


@checked()
def correct_bias(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> TuningResult:  # fmt: skip
    """Correct the bias of every weighted operator whose output is nearer to the float model's with it; the model is left in VALIDATE.

    A layer keeps the bias it had unless its mean squared error on held-out samples falls, and so do all layers where the outputs of the
    model lose 0.2 dB. A log line says what was decided, and lines of level DEBUG say it of each layer. The correction is stored next to
    the bias, which does not change. So state FLOAT is not affected, `convert`, `save` and `state_dict` include the correction, and a
    batch norm that is trained live replaces it.

    The bits do not depend on the number of threads. Batches, memory, and errors are as in `adaround`.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, options, show_progress)
        call = call_of(prepared, samples, method="correct_bias", batch_size=options.batch_size)
        with repeatable():
            judge = FloatOutputs(prepared, [samples.chunks[index] for index in samples.judging])
            return _correct(prepared, samples, judge, tuned, Checkpoint(options.checkpoint, call), show_progress)


def find(run: Run) -> dict[str, list[float]]:
    """Return the corrections (channels,) to add to the biases of layers, by layer."""
    judge = run.judge if run.kept.samples >= ENOUGH else FloatOutputs(run.prepared, run.held_out)
    return corrections(run.prepared, run.few, judge, run.show)


def apply(run: Run, by_layer: Mapping[str, list[float]]) -> str:
    """Set the bias corrections (C,) of layers, by the layer's name."""
    put_corrections(run.prepared, by_layer)
    return f"{len(by_layer)} layers"


def remedies(prepared: fx.GraphModule) -> Iterator[tuple[str, bool]]:
    """Yield no correction of biases, where calibration corrected some."""
    if any(operator.weight_quantizer.correction is not None for operator in quantized_operators(prepared).values()):
        yield "off", False


def corrections(prepared: fx.GraphModule, samples: Samples, judge: FloatOutputs, show_progress: bool | None) -> dict[str, list[float]]:
    """Correct biases by these samples, judged by the outputs; return what is added to each, by layer; the model stays.

    Nothing is done with one chunk alone.
    """
    if len(samples.chunks) < 2:
        return {}
    with tuning(prepared) as tuned, repeatable():
        result = _correct(prepared, samples, judge, tuned, Checkpoint(None, {}), show_progress)
        added = {name: tuned.operators[name].weight_quantizer.correction for layer in result.kept for name in layer.layers}
        values = {name: each.value.tolist() for name, each in added.items() if each is not None}
        tuned.undo()
    return values


def put_corrections(prepared: fx.GraphModule, by_layer: Mapping[str, list[float]]) -> None:
    """Set the bias corrections (C,) of layers, by the layer's name."""
    operators = quantized_operators(prepared)
    for name, value in by_layer.items():
        _put(operators[name], value)


def _correct(
    prepared: fx.GraphModule, samples: Samples, outputs: FloatOutputs, tuned: Tuned, checkpoint: Checkpoint, show_progress: bool | None
) -> TuningResult:
    operators = tuned.operators
    before = outputs.current or outputs.measure()
    previous = {name: operator.weight_quantizer.correction for name, operator in operators.items()}
    rows, values, skipped = list[TunedLayer](), dict[str, list[float]](), dict[str, str]()
    exact, real = Walk(prepared, samples.chunks, exact=True), Walk(prepared, samples.chunks, exact=False)

    def put(share: float) -> list[TunedLayer]:
        for name, corrected in values.items():
            value, had = torch.tensor(corrected, dtype=torch.float32, device="cpu"), previous[name]
            start = torch.zeros_like(value) if had is None else had.value.cpu()
            _put(operators[name], start + share * (value - start))
        return rows

    units = layer_units(prepared)
    for unit in progress(units, len(units), "correcting biases", show_progress):
        name = unit.name
        outcome = checkpoint.at(name, partial(_outcome, unit, samples, exact, real, operators[name]))
        if outcome is None:
            skipped[name] = "its channels are not those of its weight"
            continue
        rows.append(TunedLayer.of(outcome["row"]))
        if rows[-1].kept:
            values[name] = outcome["value"]
            _put(operators[name], outcome["value"])
    # `put` adds to a former correction with a rounding; a loop was walked before its own layers were corrected
    there = outputs.there and values and not any(previous.values()) and not loops.bodies(prepared.graph)
    noises = {"in full": outputs.noise(_walked(prepared, samples, exact))} if there else {}
    attempts = {name: partial(put, share) for name, share in SHARES.items()}
    rows_judged = judged(outputs, before, rows, tuned.undo, ("biases", "corrected"), attempts, noises, "in full")
    result = TuningResult("correct_bias", rows_judged, tuple(skipped.items()))
    logger.debug("%s", result)
    return result


def _walked(prepared: fx.GraphModule, samples: Samples, exact: Walk) -> Forward:
    """Return a function from a chunk of inputs to the model's outputs, which are taken from `exact` for the chunks that it has walked."""
    (output,) = prepared.graph.find_nodes(op="output")
    ends = dict(zip(map(id, samples.chunks), exact.at(output.all_input_nodes), strict=True))

    def run(inputs: Sequence[Any]) -> list[Tensor]:
        values = ends.get(id(inputs))
        return outputs_of(prepared, inputs) if values is None else real_outputs(fx.map_arg(output.args, values.__getitem__))

    return run


@torch.no_grad()
@constants_kept()
def _outcome(unit: Unit, samples: Samples, exact: Walk, real: Walk, operator: QuantizedOperator) -> dict[str, Any] | None:
    """Return the outcome for one layer, as a file holds it: its row, and what is added to its bias if that is better."""
    node, *after = unit.nodes
    operands, targets = exact.at(node.all_input_nodes), real.at([node])
    pairs = list[tuple[Tensor, Tensor]]()  # of each chunk: the float results and the sums before fused limits, (C, places)
    for values, target in zip(operands, targets, strict=True):
        arguments = bound_arguments(node, operator, values)
        weight, limits = weight_of(operator, arguments), arguments.get("clamp")
        assert weight is not None
        results = target[node], real_result(operator, arguments, whole=False)
        result, sums = (by_channel(each, len(weight), weight.dim()) for each in results)
        if result is None or sums is None:
            return None
        pairs.append((result, sums))
    learning, judging = ([pairs[index] for index in part] for part in (samples.learning or samples.judging, samples.judging))
    added = _correction(learning, limits).float()
    previous = operator.weight_quantizer.correction

    def function(value: Tensor) -> Tensor:  # elements of any layout
        for reader in after:
            value = run(real.prepared, reader, {node: value}, exact=False)
        return value

    wanted = [function(result) for result, _ in judging]
    before, after_it = (
        _mean(function(_within(sums + each.unsqueeze(1), limits)) - target for (_, sums), target in zip(judging, wanted, strict=True))
        for each in (torch.zeros_like(added), added)
    )
    row = TunedLayer(unit.name, (unit.name,), before, after_it, after_it < before, _mean(wanted))
    value = added if previous is None else previous.value + added
    return {"row": asdict(row), "value": value.tolist() if row.kept else None}


def _mean(values: Iterable[Tensor]) -> float:
    """Return the mean square of all elements."""
    squares = [(float(each.double().square().sum()), each.numel()) for each in values]
    return sum(square for square, _ in squares) / max(sum(count for _, count in squares), 1)


def _put(operator: QuantizedOperator, value: list[float] | Tensor) -> None:
    added = BiasCorrection(len(value)).to(next((buffer.device for buffer in operator.buffers()), "cpu"))
    added.value.copy_(torch.as_tensor(value, device="cpu", dtype=torch.float32))
    operator.weight_quantizer.correct(added)


def _correction(pairs: Sequence[tuple[Tensor, Tensor]], limits: Clamp | None) -> Tensor:
    """Return the bias correction (C,), float64, that matches the means of float results and of sums within their limits."""
    apart = max(1, sum(result.shape[1] for result, _ in pairs) // PLACES) | 1 if limits is not None else 1  # odd: it meets every column
    results, sums = (torch.cat([each[:, ::apart].double() for each in part], 1) for part in zip(*pairs, strict=True))
    difference = results - _within(sums, limits)
    # Where both are at a limit the difference is 0 and says nothing; where an operand was clipped it is not that of rounding.
    median = difference.abs().where(difference != 0, math.nan).nanmedian(1, keepdim=True).values
    limit = (OUTLIER * median).nan_to_num(math.inf)
    usual = difference.abs() <= limit
    difference = difference.clamp(-limit, limit)
    added = difference.mean(1)
    if limits is None:
        return added
    sums = torch.where(usual, sums, results - difference)
    low, high = (end if end is not None else other for end, other in zip(limits, (-math.inf, math.inf), strict=True))
    longest = difference.square().mean(1).sqrt()  # where hardly anything is within the limits a step could be of any length
    for _ in range(NEWTON):
        moved = sums + added.unsqueeze(1)
        slope = (((moved > low) & (moved < high)).sum(1).double() / moved.shape[1]).clamp_min(FEWEST)
        step = (results - moved.clamp(low, high)).mean(1) / slope
        added += torch.minimum(torch.maximum(step, -longest), longest)
    return added


def _within(sums: Tensor, limits: Clamp | None) -> Tensor:
    return sums if limits is None else sums.clamp(*limits)
