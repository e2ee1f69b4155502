"""PyTorch's switches of observers and fake quantization, for `prepared.apply(...)` or for a prepared model as a whole.

observer  fake quantize   state
on        on              TRAIN
on        off             CALIBRATE
off       on              TRAIN with frozen scales
off       off             FLOAT
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from fxquant.calibration.calibration import follow_unseen, keep_statistics, owned_quantizers, require_prepared, update_scales
from fxquant.compat.deferred import Deferred
from fxquant.errors import ConfigurationError
from fxquant.frontend.entry import is_quantized_by_torch
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.spec import State


def _switch(switch: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Apply a switch to a model that is not prepared yet as soon as it is."""

    @functools.wraps(switch)
    def apply(module: nn.Module) -> None:
        if isinstance(module, Deferred):
            module.later(apply)
        else:
            switch(module)

    return apply


def _operators(module: nn.Module) -> list[QuantizedOperator]:
    """Return a quantized operator, all of a prepared model, or none: `apply` calls a switch with every module."""
    if isinstance(module, QuantizedOperator):
        return [module]
    if is_quantized_by_torch(type(module)):
        raise ConfigurationError(
            f"a switch of fxquant was applied to a {type(module).__module__}.{type(module).__qualname__}",
            because="it switches the operators of a model that fxquant has prepared, and PyTorch has prepared this one",
            remedy="prepare the float model by prepare_qat_fx of fxquant.compat.torch_ao, or call the module's own method",
        )
    return list(quantized_operators(module).values()) if getattr(module, "meta", {}).get("stage") == "PREPARED" else []


@_switch
def disable_observer(module: nn.Module) -> None:
    """Freeze all scales, including learned ones; batch norms continue."""
    for operator in _operators(module):
        if operator.state is State.CALIBRATE:
            update_scales(operator)
            operator.state = State.FLOAT
        for quantizer in owned_quantizers(operator):
            quantizer.freeze()
        if operator.weight_quantizer.learned is not None:
            operator.weight_quantizer.learned.stop()


@_switch
def enable_observer(module: nn.Module) -> None:
    """Make scales follow the batches in train mode. Raises ConfigurationError if they were frozen."""
    for operator in _operators(module):
        if any(quantizer.frozen for quantizer in owned_quantizers(operator)):
            raise ConfigurationError(
                f"the scale of %{operator.name} cannot follow batches again",
                because="it was frozen, and forgot what it followed",
                remedy="prepare the model again, and load what was trained: fresh.load_state_dict(prepared.state_dict())",
            )
        operator.state = {State.VALIDATE: State.TRAIN, State.FLOAT: State.CALIBRATE}.get(operator.state, operator.state)


@_switch
def enable_fake_quant(module: nn.Module) -> None:
    """Compute the integer function."""
    for operator in _operators(module):
        if operator.state is State.CALIBRATE:
            update_scales(operator)
        operator.state = {State.CALIBRATE: State.TRAIN, State.FLOAT: State.VALIDATE}.get(operator.state, operator.state)
    if not isinstance(module, QuantizedOperator) and any(operator.state is State.TRAIN for operator in _operators(module)):
        keep_statistics(module)
        follow_unseen(module)


@_switch
def disable_fake_quant(module: nn.Module) -> None:
    """Compute the float function."""
    for operator in _operators(module):
        frozen = operator.state is State.VALIDATE or all(quantizer.frozen for quantizer in owned_quantizers(operator))
        operator.state = State.FLOAT if frozen else State.CALIBRATE


@_switch
def freeze_bn_stats(module: nn.Module) -> None:
    """Make batch norms use their running statistics without updating them."""
    for operator in _operators(module):
        operator.live_batch_norm = False


@_switch
def update_bn_stats(module: nn.Module) -> None:
    """Make batch norms use and update the statistics of batches, in train mode."""
    for operator in _operators(module):
        operator.live_batch_norm = True


def get_observer_dict(mod: nn.Module, target_dict: dict[str, nn.Module], prefix: str = "") -> None:
    """Add the observers of a prepared model to a dict, each under its operator's name and ".activation_post_process"."""
    require_prepared(mod)
    for name, operator in quantized_operators(mod).items():
        if not operator.plain and operator.owns_output and operator.output.observer is not None:
            target_dict[f"{prefix}.{name}.activation_post_process".lstrip(".")] = operator.output.observer


def engine_target() -> str:
    """Return the target of PyTorch's global setting: "qnnpack" for that engine, and "x86" for any other."""
    return "qnnpack" if torch.backends.quantized.engine == "qnnpack" else "x86"
