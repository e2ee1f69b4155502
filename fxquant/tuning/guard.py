"""A prepared model while it is tuned: in VALIDATE, without dropout and autocast, and as it was if anything is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fxquant.calibration.calibration import enter, require_prepared
from fxquant.calibration.left_out import having, in_float
from fxquant.ir.model import autocast_off
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State
from fxquant.quantization.weights import Parts, WeightQuantizer


class Tuned(NamedTuple):
    """A prepared model that is tuned, its operators by name, and a function that undoes what was tuned so far."""

    model: fx.GraphModule
    operators: dict[str, QuantizedOperator]
    undo: Callable[[], None]


@contextmanager
def tuning(prepared: fx.GraphModule) -> Iterator[Tuned]:
    """Yield the operators of the model, in state VALIDATE, where they are left; a part in state FLOAT stays unchanged.

    If anything is raised inside, every state, rounding, correction, coverage and number in the model is restored. Raises
    NotCalibrated, and changes nothing, where a scale is missing.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    modes = {module: module.training for module in prepared.modules()}
    states = {operator: operator.state for operator in operators.values()}
    parts = {quantizer: quantizer.parts for quantizer in (operator.weight_quantizer for operator in operators.values())}
    trained = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
    numbers = _numbers(prepared, {})
    out = {operator for operator in operators.values() if operator.left_out}.union(in_float(prepared))
    try:
        enter(prepared, (operator for operator in operators.values() if operator not in out), State.VALIDATE)
        prepared.eval()
        for operator in operators.values():
            if not operator.plain and operator not in out:
                operator.output.require()
        for parameter in trained:
            parameter.requires_grad_(False)  # the tuned tensors are not parameters of the model
        with having(out, left_out=True), autocast_off(), torch.inference_mode(False), torch.enable_grad():
            # Leaving CALIBRATE has set scales, which stay if the tuning is undone.
            yield Tuned(prepared, operators, partial(_restore, prepared, parts, _numbers(prepared, numbers)))
    except BaseException:
        for operator, state in states.items():
            operator.state = state
        _restore(prepared, parts, numbers)
        raise
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode


def _numbers(prepared: fx.GraphModule, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name; those that equal a known copy are that copy."""
    state = prepared.state_dict(keep_vars=True)
    same = {name for name, value in state.items() if name in known and torch.equal(known[name], value)}
    return {name: known[name] if name in same else value.detach().clone() for name, value in state.items()}


@torch.no_grad()
def _restore(prepared: fx.GraphModule, parts: Mapping[WeightQuantizer, Parts], numbers: Mapping[str, Tensor]) -> None:
    for quantizer, before in parts.items():
        quantizer.put(before)
    for name, value in prepared.state_dict(keep_vars=True).items():
        value.copy_(numbers[name])
