"""A prepared model while it is tuned: in VALIDATE, without dropout and autocast, and as it was if anything is raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from fxquant.calibration.calibration import enter, require_prepared
from fxquant.calibration.left_out import in_float, leaving_out
from fxquant.ir.model import autocast_off
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State


@contextmanager
def tuning(prepared: fx.GraphModule) -> Iterator[dict[str, QuantizedOperator]]:
    """Yield the operators of the model by name, in state VALIDATE, where they are left; a part in state FLOAT stays unchanged.

    If anything is raised inside, every state, rounding, correction, coverage and number in the model is restored. Raises
    NotCalibrated, and changes nothing, where a scale is missing.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    modes = {module: module.training for module in prepared.modules()}
    states = {operator: operator.state for operator in operators.values()}
    weights = {operator: operator.weight_quantizer for operator in operators.values()}
    parts = {operator: (quantizer.rounding, quantizer.correction, quantizer.coverage) for operator, quantizer in weights.items()}
    trained = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
    numbers = {name: value.detach().clone() for name, value in prepared.state_dict(keep_vars=True).items()}
    out = {operator for operator in operators.values() if operator.left_out}.union(in_float(prepared))
    try:
        enter(prepared, (operator for operator in operators.values() if operator not in out), State.VALIDATE)
        prepared.eval()
        for operator in operators.values():
            if not operator.plain and operator not in out:
                operator.output.require()
        for parameter in trained:
            parameter.requires_grad_(False)  # the tuned tensors are not parameters of the model
        with leaving_out(out), autocast_off(), torch.inference_mode(False), torch.enable_grad():
            yield operators
    except BaseException:
        for operator, (rounding, correction, coverage) in parts.items():
            operator.state = states[operator]
            operator.weight_quantizer.rounding = rounding
            operator.weight_quantizer.correct(correction)
            operator.weight_quantizer.cover(coverage)
        with torch.no_grad():
            for name, value in prepared.state_dict(keep_vars=True).items():
                value.copy_(numbers[name])
        raise
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode
