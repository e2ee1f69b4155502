"""Scales of a checkpoint of the plugin's, or of PyTorch's eager training, as those of a prepared model.

key of the checkpoint                        what it becomes
conv.activation_post_process.scale           the scale of the output of the last operator of module `conv`
conv.activation_post_process.zero_point      its zero point, of an affine dtype; 0 otherwise
quant.activation_post_process.scale          the scale of what QuantStub `quant` quantizes
conv.weight_fake_quant.scale                 the scale of the weight, where that is learned; any other follows the weight itself

What else a fake quantize or an observer holds (counters, ranges, switches) has no meaning here, and is left out. `strict` is PyTorch's:
keys of the checkpoint that belong to nothing are unexpected, and operators that get no scale are missing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ops.boundary import QUANTIZE
from fxquant.quantization.calibration import owned_quantizers
from fxquant.quantization.prepared import QuantizedOperator, quantized_operators

logger = logging.getLogger("fxquant")

ACTIVATION, WEIGHT = "activation_post_process", "weight_fake_quant"


def take_checkpoints(prepared: fx.GraphModule) -> None:
    """Let `load_state_dict` of a prepared model take the plugin's checkpoints as well as its own."""
    prepared.register_load_state_dict_pre_hook(_take_keys)  # type: ignore[no-untyped-call]
    prepared.register_load_state_dict_post_hook(_take_scales)  # type: ignore[no-untyped-call]


def _take_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take out of a checkpoint what fake quantizes hold; nothing of one that this model, or one like it, has saved."""
    foreign = {key: value for key, value in state_dict.items() if f".{ACTIVATION}." in f".{key}" or f".{WEIGHT}." in f".{key}"}
    for key in foreign:
        del state_dict[key]
    if foreign:
        module.__dict__["_fxquant_foreign"] = {key.removeprefix(prefix): value for key, value in foreign.items()}


@torch.no_grad()
def _take_scales(module: nn.Module, incompatible: Any) -> None:
    foreign = module.__dict__.pop("_fxquant_foreign", None)
    if foreign is None:
        return
    operators = quantized_operators(module)
    taken: set[str] = set()
    unused = []
    for key, value in foreign.items():
        path, _, kind = key.rpartition(f".{ACTIVATION}.") if f".{ACTIVATION}." in key else key.rpartition(f".{WEIGHT}.")
        if kind != "scale":
            continue
        zero_point = foreign.get(key.removesuffix("scale") + "zero_point")
        used = _activation(operators, path, value, zero_point) if f".{ACTIVATION}." in key else _weight(operators, path, value)
        taken |= used or set()
        if used is None:
            unused.append(key)
    own = {name: f"quantized.{name}." for name in operators}
    known = {name for name in operators if name in taken or not _has_scale(operators[name])}
    incompatible.missing_keys[:] = [
        key for key in incompatible.missing_keys if not any(key.startswith(own[name]) for name in known) and "weight_quantizer" not in key
    ]
    incompatible.unexpected_keys.extend(unused)
    scales = sum(1 for key in foreign if key.endswith(f"{ACTIVATION}.scale"))
    logger.info(
        "of %d scales of the checkpoint %d were taken, for %d of %d operators that have one; those of weights follow the weights",
        scales,
        scales - sum(ACTIVATION in key for key in unused),
        len(taken),
        sum(map(_has_scale, operators.values())),
    )


def _has_scale(operator: QuantizedOperator) -> bool:
    return bool(owned_quantizers(operator)) and not operator.output.follows_sum and not operator.output.given


def _activation(operators: dict[str, QuantizedOperator], path: str, scale: Tensor, zero_point: Any) -> set[str] | None:
    """Give the output of a module's last operator this scale; the operators that have it, or None where there is no such module."""
    found = [operator for operator in operators.values() if operator.path == path and operator.owns_output and not operator.plain]
    if not found or scale.numel() != 1:
        return None
    operator = found[-1]
    if operator.output.follows_sum or operator.output.given:
        return set()
    operator.output.assign(scale.reshape(()).float(), None if zero_point is None or not operator.output.dtype.affine else int(zero_point))
    if operator.output.range is not None:
        operator.output.batches_used.copy_(operator.output.range.count)
    return {operator.name}


def _weight(operators: dict[str, QuantizedOperator], path: str, scale: Tensor) -> set[str] | None:
    """Give the weight of a module's layer this scale, where it is learned; None where there is no such module."""
    found = [operator for operator in operators.values() if operator.path == path and operator.operator is not QUANTIZE]
    if not found:
        return None
    for operator in found:
        learned = operator.weight_quantizer.learned
        if learned is not None and learned.base_scale.numel() == scale.numel():
            learned.assign(scale.reshape(learned.base_scale.shape).float())
    return set()
