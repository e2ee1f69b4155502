"""Tensors whose calibrated range clips a few outlier samples, and the batch norms behind them.

Where a few samples of a batch have a far larger norm than all others, a calibrated range may leave them out (`observers.loudness`).
Most of the float model's variance comes from these samples, but not that of the quantized model. A batch norm that took the
statistics of batches would multiply every other sample by the missing part. Behind such a tensor batch norms therefore keep their
running statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.observers.histogram import HistogramObserver
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.state import State

logger = logging.getLogger("fxquant")

KEPT = 0.75  # of the power of what was observed: a deviation that is a seventh smaller


def keep_statistics(prepared: nn.Module) -> None:
    """Freeze the statistics of batch norms behind tensors that clip much of the observed power; a warning names these tensors.

    The observations of calibration decide, not the scales that training has changed, so that resumed training decides the same. A state
    that is loaded later decides again.
    """
    if _decide_anew not in prepared._load_state_dict_post_hooks.values():
        prepared.register_load_state_dict_post_hook(_decide_anew)  # type: ignore[no-untyped-call]
    operators = quantized_operators(prepared)
    if not any(operator.live_batch_norm for operator in operators.values()):
        return
    graphs = [module.graph for module in prepared.modules() if isinstance(module, fx.GraphModule)]
    normed = {node.name for graph in graphs for node in graph.nodes if node.kwargs.get("batch_norm") is not None}
    cut: dict[Quantizer, str] = {}  # with the name of the tensor that does it
    known: dict[Quantizer, bool] = {}
    found: dict[str, list[str]] = {}
    for operator in operators.values():
        source = next((cut[quantizer] for quantizer in operand_quantizers(operator) if quantizer in cut), None)
        if source is not None and operator.live_batch_norm:
            operator.live_batch_norm = False
            if operator.name in normed or not graphs:  # a part of a model has no graph
                found.setdefault(source, []).append(operator.name)
        if operator.plain:
            continue
        if source is None and operator.owns_output:
            if operator.output not in known:
                known[operator.output] = not _equalized(operator) and _cuts(operator.output)
            source = operator.output.name if known[operator.output] else None
        if source is not None:
            cut.setdefault(operator.output, source)
    for source, names in found.items():
        logger.warning(
            "batch norms keep their running statistics in training at %s: calibration clipped a few outlier samples in %%%s, "
            "which the statistics of a batch would include; tensors with another observer, such as 'minmax', are not clipped",
            ", ".join(f"%{name}" for name in names[:8]) + (", …" if len(names) > 8 else ""),
            source,
        )


def _decide_anew(prepared: nn.Module, _: Any) -> None:
    """Decide again after a state was loaded in TRAIN."""
    if any(operator.state is State.TRAIN for operator in quantized_operators(prepared).values()):
        keep_statistics(prepared)


def operand_quantizers(operator: QuantizedOperator) -> Iterator[Quantizer]:
    """Yield the quantizers of its operands."""
    for quantizers in operator.inputs.values():
        yield from (each for each in (quantizers if isinstance(quantizers, list) else [quantizers]) if each is not None)


def _equalized(operator: QuantizedOperator) -> bool:
    """Return whether its channels are multiplied: their powers then have no common unit, and the outliers are channels, not samples."""
    return operator.factors is not None and bool(operator.factors.outputs.any())


@torch.no_grad()
def _cuts(quantizer: Quantizer) -> bool:
    """Return whether the calibrated range leaves out more than a quarter of the observed power."""
    observer = quantizer.observer
    if not isinstance(observer, HistogramObserver) or quantizer.shown or not observer.observed or not observer.loud:
        return False
    points, counts = observer.points()
    low, high = quantizer.covered()
    power = (points.square() * counts).sum()
    kept = (points.clamp(low.double(), high.double()).square() * counts).sum()
    return bool(kept < KEPT * power)
