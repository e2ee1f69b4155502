"""Loading of scales from checkpoints of the plugin, or of PyTorch's quantization, into a prepared model.

key of the checkpoint                        what it becomes
conv.activation_post_process.scale           the scale of the output of the last operator of module `conv`
conv.activation_post_process.zero_point      its zero point, of an affine dtype; 0 otherwise
quant.activation_post_process.scale          the scale of what QuantStub `quant` quantizes
conv.weight_fake_quant.scale                 the scale of the weight, if that is learned; any other is computed from the weight itself
activation_post_process_3.scale              of PyTorch's graphs: that of their fourth tensor, in the order they are computed; if the
                                             numbers of tensors differ, as where a residual is fused here, none is taken
conv.bn.weight, …                            of a fused layer: those of the batch norm after module `conv`

Zero points of signed integers, some of which are negative, count from -128, so 128 is added to all of them. Other state of a fake quantize
or an observer (counters, ranges, switches) has no meaning here, and is ignored. `strict` is PyTorch's: keys of the checkpoint that
match nothing are unexpected, and operators without a scale in it are missing.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.calibration.calibration import owned_quantizers
from fxquant.ir.graph import resolve
from fxquant.ops.core.boundary import QUANTIZE
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.support import logger

ACTIVATION, WEIGHT = "activation_post_process", "weight_fake_quant"
NUMBERED = re.compile(rf"{ACTIVATION}_(\d+)\.(.*)")
FUSED = ".bn."  # in the names of a batch norm that PyTorch fused into a layer


def take_checkpoints(prepared: fx.GraphModule) -> None:
    """Make `load_state_dict` of a prepared model accept the plugin's and PyTorch's checkpoints as well as its own."""
    prepared.register_load_state_dict_pre_hook(_take_keys)  # type: ignore[no-untyped-call]
    prepared.register_load_state_dict_post_hook(_take_scales)  # type: ignore[no-untyped-call]


def _take_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the state of fake quantizes from a checkpoint; leave one that this model, or one like it, has saved."""
    foreign = {key: value for key, value in state_dict.items() if _is_foreign(key.removeprefix(prefix))}
    for key in foreign:
        del state_dict[key]
    norms = _norms(module) if foreign else {}
    for key in [key for key in state_dict if FUSED in key.removeprefix(prefix)]:
        layer, rest = key.removeprefix(prefix).split(FUSED, 1)
        if layer in norms:
            state_dict[f"{prefix}{norms[layer]}.{rest}"] = state_dict.pop(key)
    if foreign:
        module.__dict__["_fxquant_foreign"] = {key.removeprefix(prefix): value for key, value in foreign.items()}


def _is_foreign(key: str) -> bool:
    return f".{ACTIVATION}." in f".{key}" or f".{WEIGHT}." in f".{key}" or NUMBERED.fullmatch(key) is not None


def _is_zero_point(key: str, value: Any) -> bool:
    return key.endswith("zero_point") and f".{WEIGHT}." not in f".{key}" and isinstance(value, Tensor) and value.numel() == 1


def _called(module: nn.Module) -> list[tuple[fx.Node, QuantizedOperator]]:
    """Return the calls of quantized operators in the order they are computed; an empty list for any module but a graph."""
    operators = {f"quantized.{name}": operator for name, operator in quantized_operators(module).items()}
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return [(node, operators[str(node.target)]) for node in nodes if node.op == "call_module" and str(node.target) in operators]


def _norms(module: nn.Module) -> dict[str, str]:
    found = {}
    for node, operator in _called(module):
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and isinstance(resolve(module, str(operand.target)), nn.modules.batchnorm._BatchNorm):
                found[operator.path] = str(operand.target)
    return found


def _numbered(module: nn.Module, foreign: dict[str, Any]) -> list[QuantizedOperator]:
    """Return the operators whose tensors PyTorch's graph numbers, in its order; none if it has a different number of them."""
    numbers = {int(match[1]) for key in foreign if (match := NUMBERED.fullmatch(key))}
    known = [(node, operator) for node, operator in _called(module) if not operator.plain]
    places: dict[fx.Node, float] = {node: place for place, (node, _) in enumerate(known)}
    for node, operator in known:
        if operator.operator is QUANTIZE:  # PyTorch numbers an input at its first reader
            places[node] = min((places[user] for user in node.users if user in places), default=places[node]) - 0.5
    known.sort(key=lambda pair: places[pair[0]])
    operators = [operator for _, operator in known]
    if numbers == set(range(len(operators))):
        return operators
    owners = [operator for operator in operators if operator.owns_output]  # PyTorch shares grids as well
    return owners if numbers == set(range(len(owners))) else []


@torch.no_grad()
def _take_scales(module: nn.Module, incompatible: Any) -> None:
    foreign = module.__dict__.pop("_fxquant_foreign", None)
    if foreign is None:
        return
    operators = quantized_operators(module)
    taken: set[str] = set()
    unused = []
    numbered = _numbered(module, foreign)
    zeros = {key.removesuffix("zero_point"): int(value.reshape(-1)[0]) for key, value in foreign.items() if _is_zero_point(key, value)}
    lowest = -128 if min(zeros.values(), default=0) < 0 else 0
    zeros = {key: value - lowest for key, value in zeros.items()}
    for key, value in foreign.items():
        match = NUMBERED.fullmatch(key)
        if match is not None:
            if match[2] == "scale" and numbered:
                taken |= _assign(numbered[int(match[1])], value, zeros.get(key.removesuffix("scale")))
            elif match[2] == "scale":
                unused.append(key)
            continue
        path, _, kind = key.rpartition(f".{ACTIVATION}.") if f".{ACTIVATION}." in key else key.rpartition(f".{WEIGHT}.")
        if kind != "scale":
            continue
        zero_point = zeros.get(key.removesuffix("scale"))
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
    scales = sum(1 for key in foreign if key.endswith(f"{ACTIVATION}.scale") or (key.endswith(".scale") and NUMBERED.fullmatch(key)))
    logger.info(
        "of %d scales of the checkpoint %d were taken, for %d of %d operators that have one; those of weights follow the weights",
        scales,
        scales - sum(ACTIVATION in key for key in unused),
        len(taken),
        sum(map(_has_scale, operators.values())),
    )


def _has_scale(operator: QuantizedOperator) -> bool:
    return bool(owned_quantizers(operator)) and not operator.output.follows_sum and not operator.output.given


def _activation(operators: dict[str, QuantizedOperator], path: str, scale: Tensor, zero_point: int | None) -> set[str] | None:
    """Set the output scale of a module's last operator; return the operators that have it, or None if the module does not exist."""
    found = [operator for operator in operators.values() if operator.path == path and operator.owns_output and not operator.plain]
    if not found or scale.numel() != 1:
        return None
    return _assign(found[-1], scale, zero_point)


def _assign(operator: QuantizedOperator, scale: Tensor, zero_point: int | None) -> set[str]:
    """Set an operator's output scale; return its name, unless the scale is another's, an accumulator's, or was given."""
    if not operator.owns_output or operator.output.follows_sum or operator.output.given:
        return set()
    operator.output.assign(scale.reshape(()).float(), zero_point if operator.output.dtype.affine else None)
    if operator.output.range is not None:
        operator.output.batches_used.copy_(operator.output.range.count)
    return {operator.name}


def _weight(operators: dict[str, QuantizedOperator], path: str, scale: Tensor) -> set[str] | None:
    """Set the weight scale of a module's layer if it is learned; return None if the module does not exist."""
    found = [operator for operator in operators.values() if operator.path == path and operator.operator is not QUANTIZE]
    if not found:
        return None
    for operator in found:
        learned = operator.weight_quantizer.learned
        if learned is not None and learned.base_scale.numel() == scale.numel():
            learned.assign(scale.reshape(learned.base_scale.shape).float())
    return set()
