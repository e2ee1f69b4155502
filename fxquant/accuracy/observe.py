"""Observe the batches that set scales in the float model, batch by batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from fxquant.accuracy.states import enter, owned_quantizers
from fxquant.accuracy.step import Run
from fxquant.ir.graph import argument_name, by_name, source
from fxquant.ir.model import repeatable
from fxquant.ops.core.composite import QUANTIZE
from fxquant.prepared.batches import no_batches
from fxquant.prepared.operators import QuantizedOperator, operand_quantizers, quantized_operators
from fxquant.prepared.undo import Snapshot, having, inside_operators, tensors_of
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.ranges import Method
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.quantization.weights import ChannelFactors
from fxquant.support import logger
from fxquant.target import Target

OBSERVED = Observer, ChannelFactors  # modules that hold what batches have shown, which stays where a calibration does not end


def _open(run: Run) -> list[QuantizedOperator]:
    """Return the prepared operators that this run may calibrate: all without `left_out`."""
    return [operator for operator in quantized_operators(run.prepared).values() if not operator.left_out]


def _observing(run: Run) -> list[Quantizer]:
    """Return the quantizers of calibrated operators and of their operands, each once."""
    each = (quantizer for operator in _open(run) for quantizer in (*owned_quantizers(operator), *_read(operator)))
    return list({id(quantizer): quantizer for quantizer in each}.values())


def is_missing(run: Run) -> bool:
    """Return whether a run has anything to observe; if not, calibrated operators are put into VALIDATE."""
    if not run.only_missing or not all(quantizer.calibrated for quantizer in _observing(run)):
        return True
    enter(run.prepared, _open(run), State.VALIDATE)
    return False


@torch.no_grad()
def find(run: Run) -> int:
    """Observe all batches, and return their number.

    Where anything is raised in a batch, observers, the factors of channels and the samples that are kept are as before it. Raises
    CalibrationError without batches, unless something was observed before and is not in the scales yet.
    """
    prepared, quantizers = run.prepared, _observing(run)
    calibrated = [quantizer for quantizer in quantizers if run.only_missing and quantizer.calibrated]
    with _computing(prepared, _open(run)):
        enter(prepared, _open(run), State.CALIBRATE)
        with having(calibrated, paused=True):
            count = _observe(run)
            if not count and not any(quantizer.pending for quantizer in quantizers if quantizer not in calibrated):
                raise no_batches(run.num_batches)
    return count


@torch.no_grad()
def apply(run: Run, count: int) -> str:
    """Set the scales from what was observed, each by the squared error of its own tensor."""
    with repeatable():
        enter(run.prepared, _open(run), State.VALIDATE)
    for quantizer in run.observed().values():
        if quantizer.can_choose:
            quantizer.choose_by(Method.ERROR)
    return f"{count} batch{'es' * (count != 1)}"


def _observe(run: Run) -> int:
    for inputs in run.inputs:
        with _observations(run), repeatable():
            run.prepared(**by_name(run.prepared, inputs))
            run.take(inputs)
    return run.taken


def _observations(run: Run) -> Snapshot:
    """Return what a batch changes: the observers, the factors of channels by which it is observed, and the samples that are kept."""
    modules = [module for module in inside_operators(run.prepared) if isinstance(module, OBSERVED)]
    return Snapshot([run, *modules], tensors_of(modules))


@contextmanager
def _computing(model: nn.Module, others: Iterable[QuantizedOperator]) -> Iterator[None]:
    """Inside, operators with `left_out` compute as in their state, but their scales and statistics do not change.

    An operator in state FLOAT whose result `others` read as integers observes it, since they need the scale of their operand.
    """
    out = [operator for operator in quantized_operators(model).values() if operator.left_out]
    needed = {id(quantizer) for operator in others for quantizer in _read(operator)}
    observing = [each for each in out if each.state is State.FLOAT and not each.plain and each.owns_output and id(each.output) in needed]
    with (
        having([operator for operator in out if operator.state is State.TRAIN], state=State.VALIDATE),
        having(observing, state=State.CALIBRATE),
        having([operator.intermediate for operator in observing if operator.intermediate is not None], paused=True),
    ):
        yield
    for operator in observing:
        operator.output.update_scale()


def _read(operator: QuantizedOperator) -> Iterator[Quantizer]:
    """Yield the quantizers of an operator's quantized operands, and of its result."""
    yield from operand_quantizers(operator)
    if not operator.plain:
        yield operator.output


# ---- Inputs whose values are lost to rounding -------------------------------------------------------------------------
LOST = 0.5  # the share of an input's values that are not 0, and become 0
WIDE = "int16"


def warn_of_lost_inputs(prepared: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Warn of each model input that rounding makes 0 in at least half of its values other than 0, and name the line that reads it."""
    target: Target = prepared.meta["target"]
    placeholders = {node.name: value for node, value in zip(prepared.graph.find_nodes(op="placeholder"), inputs, strict=False)}
    for node, operator, share in lost(prepared, placeholders):
        line = next((text for reader in node.users if (text := source(reader))), "")
        logger.warning(
            "%.0f %% of the values of input %s that are not 0 become 0 at its scale of %.4g%s: its few large values set the scale; %s, or"
            " give the model its logarithm or its root; fxq.compare shows what this costs",
            100 * share,
            argument_name(node.all_input_nodes[0]),
            float(operator.output.scale),
            f", read in {line}" if line else "",
            _finer(operator, target),
        )


def _finer(operator: QuantizedOperator, target: Target) -> str:
    if operator.output.dtype.name == WIDE:
        return f"{WIDE} is too coarse for it: leave what reads it in float"
    if WIDE not in target.activations:
        return f"{target.name} has no {WIDE} to round it more finely"
    return f"where it is read, QConfig(input=ActivationConfig({WIDE!r})) rounds it more finely"


def lost(prepared: fx.GraphModule, inputs: Mapping[str, object]) -> Iterator[tuple[fx.Node, QuantizedOperator, float]]:
    """Yield the nodes and operators that quantize inputs, with the share of values lost there, where that is at least `LOST`."""
    operators = quantized_operators(prepared)
    for node in prepared.graph.nodes:
        operator = operators.get(node.name) if node.op == "call_module" else None
        read = node.all_input_nodes
        if operator is None or operator.operator is not QUANTIZE or not read or not isinstance(value := inputs.get(read[0].name), Tensor):
            continue
        scale = operator.output.scale
        if not value.is_floating_point() or scale.numel() != 1 or not bool(torch.isfinite(scale)):
            continue
        real = value.detach()
        nonzero = int((real != 0).sum())
        if nonzero > 1 and (share := int((real != 0).sum() - (torch.round(real / scale.to(real.device)) != 0).sum()) / nonzero) >= LOST:
            yield node, operator, share
