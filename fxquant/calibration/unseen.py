"""Tensors that are too small for what they are added to: layer scales of 1e-6, gates next to 0.

In calibration they do not change the sum, and their own scales do not fit the values that training gives them. A scale that is learned
from there would clip them, without a gradient, for many steps. Such tensors follow the batches in TRAIN, as tensors that were 0 do.
The scales of the weights that they are computed from follow these weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.state import State

logger = logging.getLogger("fxquant")

SHOWN = 8  # tensors that a warning names


@torch.no_grad()
def follow_unseen(prepared: nn.Module) -> None:
    """Decide which tensors of a prepared model in TRAIN are `unseen`; a warning says which.

    The observations of calibration decide, not the scales that training has changed, so that resumed training decides the same. A state
    that is loaded later decides again. A tensor is unseen if all its values are below half a step of every sum that it is a term of,
    or that unseen tensors alone lead to from it.
    """
    if _decide_again not in prepared._load_state_dict_post_hooks.values():
        prepared.register_load_state_dict_post_hook(_decide_again)  # type: ignore[no-untyped-call]
    operators = [operator for operator in quantized_operators(prepared).values() if not operator.plain]
    if not any(operator.state is State.TRAIN for operator in operators):
        return
    limits: dict[Quantizer, float] = {}  # what each tensor has to stay below, for every operator that reads it
    for operator in reversed(operators):
        for quantizer, limit in _read(operator, limits):
            limits[quantizer] = min(limits.get(quantizer, math.inf), limit)
    found = []
    for quantizer in dict.fromkeys(each for operator in operators for each in (operator.output, operator.intermediate) if each is not None):
        quantizer.unseen = _limit(quantizer, limits) > 0
        if quantizer.unseen and not quantizer.was_zero:
            found.append(quantizer)
    for operator in operators:
        learned = operator.weight_quantizer.learned
        if operator.unseen and learned is not None and learned.method is not None:
            learned.forget()
    if found:
        logger.warning(
            "in calibration %s %s below half a step of the sum that reads %s. In TRAIN all scales follow the batches, also learned and "
            "frozen ones, until the model is calibrated again",
            ", ".join(f"%{each.name} ({each.source or each.module_path or 'no source line'})" for each in found[:SHOWN])
            + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""),
            "was" if len(found) == 1 else "were",
            "it" if len(found) == 1 else "them",
        )


def _decide_again(prepared: nn.Module, _: Any) -> None:
    """Decide again after a state was loaded in TRAIN."""
    follow_unseen(prepared)


def _read(operator: QuantizedOperator, limits: Mapping[Quantizer, float]) -> Iterator[tuple[Quantizer, float]]:
    """Yield the quantizers of an operator's operands, and of the tensor that its residual is added to, with their limits.

    An unseen tensor stays below its limit. The limit is 0 for a tensor that is seen.
    """
    behind = _limit(operator.output, limits)
    adds = operator.operator.adds or operator.intermediate is not None
    of_sum = max(behind, _half_step(operator.output)) if adds else behind
    before = behind
    if operator.intermediate is not None:
        yield operator.intermediate, of_sum
        before = of_sum if _is_below(operator.intermediate, of_sum) else 0.0
    inputs: Any
    for name, inputs in operator.inputs.items():
        for quantizer in inputs if isinstance(inputs, list) else [inputs]:
            if isinstance(quantizer, Quantizer) and quantizer is not operator.output:
                limit = of_sum if operator.operator.adds or name == "residual" else before
                yield quantizer, 0.0 if quantizer.shown else limit


def _limit(quantizer: Quantizer, limits: Mapping[Quantizer, float]) -> float:
    """Return the limit that an unseen tensor stays below; 0 for a tensor that is seen."""
    limit = limits.get(quantizer, 0.0)
    return limit if _is_below(quantizer, limit) else 0.0


def _is_below(quantizer: Quantizer, limit: float) -> bool:
    return limit > 0 and _observed(quantizer) and float(torch.stack(quantizer.covered()).abs().max()) < limit


def _observed(quantizer: Quantizer) -> bool:
    return quantizer.observer is not None and quantizer.observer.observed and not quantizer.frozen and not quantizer.follows_sum


def _half_step(quantizer: Quantizer) -> float:
    """Return half a step of the range that calibration found for a tensor; 0 where it found none."""
    if not _observed(quantizer):
        return 0.0
    low, high = quantizer.covered()
    return float(high - low) / (quantizer.dtype.high - quantizer.dtype.low) / 2
