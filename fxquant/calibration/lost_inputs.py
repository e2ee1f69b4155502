"""Inputs of a model most of whose values round to 0: a few large values set a scale that is too coarse for all others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from fxquant.ir.graph import argument_name, source
from fxquant.ops.core.boundary import QUANTIZE
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.target import Target

logger = logging.getLogger("fxquant")

LOST = 0.5  # the share of an input's values that are not 0, and become 0
WIDE = "int16"


def warn_of_lost_inputs(prepared: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Warn of each input of a calibrated model of which one batch loses at least half of its values, with the line that reads it."""
    target: Target = prepared.meta["target"]
    placeholders = {node.name: value for node, value in zip(prepared.graph.find_nodes(op="placeholder"), inputs, strict=False)}
    for node, operator, share in lost(prepared, placeholders):
        readers = list(node.users)
        line = next((text for reader in readers if (text := source(reader))), "")
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


def lost(prepared: fx.GraphModule, inputs: Mapping[str, object], least: float = LOST) -> Iterator[tuple[fx.Node, QuantizedOperator, float]]:
    """Yield the nodes and operators that quantize inputs, with the share of values lost there, where that is at least so large."""
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
        if nonzero > 1 and (share := int((real != 0).sum() - (torch.round(real / scale.to(real.device)) != 0).sum()) / nonzero) >= least:
            yield node, operator, share
