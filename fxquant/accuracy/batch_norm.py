"""Batch norm re-estimation: compute running statistics again from the results of the quantized weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, fx, nn

from fxquant.accuracy.choices import tuning
from fxquant.accuracy.result import LayerTable
from fxquant.accuracy.walk import constant_arguments, operator_at
from fxquant.ir.graph import by_name
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, first_batches, length, model_inputs, no_batches
from fxquant.prepared.operators import QuantizedOperator
from fxquant.prepared.undo import having
from fxquant.quantization.spec import FROZEN, State
from fxquant.support.arguments import checked
from fxquant.support.progress import progress


@dataclass(frozen=True)
class MovedStatistics:
    """The change of the running statistics of one batch norm."""

    name: str  # the node of the operator that it belongs to
    mean: float  # the change of the mean in units of the old standard deviation: root mean square over channels
    variance: float  # the new variance divided by the old one: geometric mean over channels


@dataclass(frozen=True)
class BatchNormResult(LayerTable[MovedStatistics]):
    """The result of `reestimate_batch_norm`: a row for each batch norm; iterates over them, and prints as a table."""

    layers: tuple[MovedStatistics, ...]
    skipped: tuple[tuple[str, str], ...]  # the batch norms that were not re-estimated, each with the reason
    batches: int  # the number of batches that were read

    def __rich__(self) -> Table:
        title = f"reestimate_batch_norm: {len(self.layers)} batch norms, {self.batches} batches"
        table = Table("layer", "mean moved by", "variance times", "", title=title, title_justify="left")
        for layer in self.layers:
            table.add_row(layer.name, f"{layer.mean:.4f} σ", f"{layer.variance:.4f}", "")
        for name, because in self.skipped:
            table.add_row(name, "", "", because)
        return table


@checked()
def reestimate_batch_norm(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> BatchNormResult:  # fmt: skip
    """Set the running statistics of every batch norm to their mean over the batches, after quantized weights; the state is VALIDATE.

    Only running means, variances and their counts change, of all batch norm modules that have them, frozen ones included; scales and
    parameters stay, and dropout is off. Statistics are computed per batch, so a batch should be as large as in training. A bias correction
    of such a layer is dropped, since the new means contain it. The outputs are not checked: the float model changes with its statistics.

    Raises NotCalibrated before calibration and CalibrationError for batches that do not fit, and then changes nothing.
    """
    with tuning(prepared):
        batch_norms, skipped = _batch_norms(prepared)
        before = [(norm.running_mean.clone(), norm.running_var.clone()) for _, _, norm in batch_norms]
        source, count = as_batches(batches), 0
        with _seeing(batch_norms), torch.no_grad():
            for batch in progress(first_batches(source, num_batches), length(source, num_batches), "batch norms", show_progress):
                prepared(**by_name(prepared, model_inputs(prepared, options.inputs(batch), count)))
                count += 1
            if not count:
                raise no_batches(num_batches)
        rows = [_row(name, norm, *statistics) for (name, _, norm), statistics in zip(batch_norms, before, strict=True)]
    return BatchNormResult(tuple(rows), tuple(skipped), count)


def _batch_norms(prepared: fx.GraphModule) -> tuple[list[tuple[str, QuantizedOperator, Any]], list[tuple[str, str]]]:
    """Return the batch norms as (name, operator, module), and the ones that cannot be re-estimated as (name, reason)."""
    batch_norms: list[tuple[str, QuantizedOperator, Any]] = []
    skipped = []
    for node in prepared.graph.nodes:
        operator = operator_at(prepared, node)
        norm = None if operator is None else constant_arguments(prepared, node, operator).get("batch_norm")
        if operator is None or operator.left_out or norm is None:
            continue
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.num_batches_tracked is None:
            skipped.append((node.name, "it is an instance norm, or a function whose momentum is written in the model"))
        else:
            batch_norms.append((node.name, operator, norm))
    return batch_norms, skipped


@contextmanager
def _seeing(batch_norms: list[tuple[str, QuantizedOperator, Any]]) -> Iterator[None]:
    """Batches count equally in the statistics of these batch norms, which start anew; nothing else moves."""
    norms, operators = [norm for _, _, norm in batch_norms], [operator for _, operator, _ in batch_norms]
    for norm in norms:
        norm.num_batches_tracked.zero_()
    with (
        having(norms, momentum=None, training=True, track_running_stats=True),
        having(operators, live_batch_norm=True, state=State.TRAIN, training=True),
        having([q for operator in operators for q in (operator.output, operator.intermediate) if q is not None], mode=FROZEN),
    ):
        yield


def _row(name: str, norm: Any, mean: Tensor, variance: Tensor) -> MovedStatistics:
    moved = (norm.running_mean - mean) / (variance + norm.eps).sqrt()
    ratio = (norm.running_var + norm.eps) / (variance + norm.eps)
    return MovedStatistics(name, float(moved.square().mean().sqrt()), float(ratio.log().mean().exp()))
