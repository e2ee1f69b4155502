"""How much of a weight's largest magnitude its scale covers: what leaves its layer nearest to the float model's, channel by channel.

    share_c = argmin over SHARES of Σ (y_c - ŷ_c)²,   ŷ with the weight rounded to the nearest on share_c · max |w_c| / divisor

over the samples that are learned from, behind the fused limits, with operands that are integers already. Errors of 4 bits are large, so
that a smaller step pays for a few weights that are cut off; which those are is not in the weight, but in what it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from fxquant.prepared.operators import QuantizedOperator
from fxquant.quantization.weights import Coverage
from fxquant.tuning.real import by_channel, real_result, weight_of
from fxquant.tuning.units import Lesson, bound_arguments
from fxquant.tuning.walk import Values, run

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
WORTH = 0.75  # of the error that is left when everything is covered; learning roundings makes up for long steps, and for nothing cut off
CHUNKS = 4  # of the samples that are learned from, at most


@torch.no_grad()
def search(lesson: Lesson, operators: Mapping[fx.Node, QuantizedOperator]) -> dict[fx.Node, Tensor]:
    """Return the shares of the weights of a unit, whose nodes see what those before them give with theirs; the model is left with them."""
    chunks = lesson.samples.learning[:CHUNKS]
    rounded = [dict(lesson.operands[index]) for index in chunks]
    real = [dict(lesson.float_operands[index]) for index in chunks]
    found: dict[fx.Node, Tensor] = {}
    for node in lesson.unit.nodes:
        for values in real:
            values[node] = run(lesson.prepared, node, values, exact=False)
        if node in lesson.unit.weighted and _is_open(operators[node]):
            share = _best(node, operators[node], rounded, real)
            if share is not None:
                found[node] = share
        for values in rounded:
            values[node] = run(lesson.prepared, node, values, exact=True)
    return found


def _is_open(operator: QuantizedOperator) -> bool:
    """Return whether its weight's scale follows from the weight, and can have any value."""
    quantizer = operator.weight_quantizer
    return quantizer.learned is None and not quantizer.power_of_two


def _best(node: fx.Node, operator: QuantizedOperator, rounded: list[Values], real: list[Values]) -> Tensor | None:
    """Return the shares of one weight, float32 of shape (C,) or (1,), and apply them; None if its channels are not those of its result."""
    quantizer, previous = operator.weight_quantizer, operator.weight_quantizer.coverage
    arguments = [bound_arguments(node, operator, values) for values in rounded]
    weight = weight_of(operator, arguments[0])
    assert weight is not None
    coverage = Coverage(len(weight) if quantizer.per_channel else 1).to(weight.device)
    quantizer.cover(coverage)
    errors = []
    for share in SHARES:
        coverage.share.fill_(share)
        error = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
        for has, values in zip(arguments, real, strict=True):
            difference = real_result(operator, has) - values[node]
            rows = by_channel(difference.double(), len(weight), weight.dim())
            if rows is None:
                quantizer.cover(previous)
                return None
            error += rows.square().sum(1)
        errors.append(error if quantizer.per_channel else error.sum(0, keepdim=True))
    found = torch.stack(errors)
    least = found.min(0)
    best = torch.where(least.values <= WORTH * found[0], least.indices, 0)
    coverage.share.copy_(torch.tensor(SHARES, device=weight.device, dtype=torch.float32)[best])
    return coverage.share.clone()
