"""Horizon's workflow over fxquant's: states, conversion to integers, and transfer of scales."""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

import fxquant as fxq
from fxquant.calibration.calibration import enter, owned_quantizers, require_prepared, update_scales
from fxquant.compat.common import refuse_given
from fxquant.compat.deferred import Deferred, become
from fxquant.compat.horizon.served.preparing import ARGUMENTS, PREPARED
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import is_deployed
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.observers import gathering
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.state import State
from fxquant.support.addresses import start
from fxquant.support.arguments import FLAG, checked
from fxquant.tuning.rounding import adaround

logger = logging.getLogger("fxquant")

_converted: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()  # the integer models that were created, for traces of them


class FakeQuantState(enum.Enum):
    """The state of a prepared model, by Horizon's names."""

    QAT = State.TRAIN
    CALIBRATION = State.CALIBRATE
    VALIDATION = State.VALIDATE
    _FLOAT = State.FLOAT


@checked()
def set_fake_quantize(model: nn.Module, fake_quant_state: FakeQuantState) -> None:
    """Put a prepared model, or the operators of a part of one (`prepared.backbone`), into a state. Leaving CALIBRATION sets the scales.

    In CALIBRATION batches are observed in train mode and in eval mode alike.
    """
    if not isinstance(fake_quant_state, FakeQuantState):
        raise ConfigurationError(
            f"{fake_quant_state!r} is not a FakeQuantState",
            because="it is QAT, CALIBRATION or VALIDATION",
            remedy="pass FakeQuantState.QAT",
        )
    if isinstance(model, Deferred):
        model.later(functools.partial(set_fake_quantize, fake_quant_state=fake_quant_state))
        return
    inner = getattr(model, "module", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) and isinstance(inner, nn.Module):
        model = inner
    state: State = fake_quant_state.value
    operators = list(quantized_operators(model).values())
    if operators:
        enter(model, operators, state)
        return
    whole = next((known for known in PREPARED if any(module is model for module in known.modules())), None)
    if whole is None:
        if isinstance(model, fx.GraphModule):
            require_prepared(model)
        raise ConfigurationError(
            f"a {type(model).__name__} is not part of a known prepared model",
            because="a part does not refer to its model, and a copy of a model is a different model",
            remedy="name it: fxq.set_state(prepared, 'float', 'path.of.the.module')",
        )
    path = next(name for name, module in whole.named_modules() if module is model)
    chosen = [operator for operator in quantized_operators(whole).values() if operator.path == path or operator.path.startswith(path + ".")]
    enter(whole, chosen, state)


@checked(inplace=FLAG, fast_mode=FLAG, _remove_qconfig=FLAG)
def convert_fx(
    graph_module: fx.GraphModule,
    inplace: bool = False,
    convert_custom_config_dict: Any = None,
    _remove_qconfig: bool = True,
    fast_mode: bool = False,
) -> fx.GraphModule:
    """Return the integer graph of a prepared model, which stays usable. See `fxquant.convert`.

    inplace     whether the caller's object becomes the integer model
    fast_mode   has no effect: integer models run by kernels with the reference's bits, and can be compiled all the same

    Raises ConfigurationError for operators in state _FLOAT, which would be integers here, and NotCalibrated without scales.
    """
    refuse_given("convert_fx", {"convert_custom_config_dict": _unpreserved(convert_custom_config_dict)}, {}, ARGUMENTS)
    if isinstance(graph_module, Deferred):
        raise graph_module._unknown("the integer graph")
    require_prepared(graph_module)
    operators = quantized_operators(graph_module)
    in_float = [name for name, operator in operators.items() if operator.state is State.FLOAT]
    if in_float and len(in_float) < len(operators):
        logger.warning("operators in state _FLOAT are integers in the integer graph: %s", ", ".join(in_float))
    for operator in operators.values():
        if operator.state is State.CALIBRATE:
            update_scales(operator)
    integer = fxq.convert(graph_module)
    if inplace:
        become(graph_module, integer)
        integer = graph_module
    _converted.add(integer)
    return integer


def _unpreserved(config: Any) -> Any:
    """Return the entries of a custom config besides the attributes to keep, which are kept anyway."""
    return {key: value for key, value in (config or {}).items() if key != "preserved_attributes"} or None


def integer_of(model: Any, called: str) -> fx.GraphModule:
    """Return the integer graph of what a program compiles: itself, that of a prepared model, or the source of a trace.

    A trace shares its tensors with its source. Raises ConfigurationError if this process has no such model.
    """
    if isinstance(model, fx.GraphModule):
        return model if is_deployed(model) else convert_fx(model)
    carried = getattr(model, "fxquant_integer", None)
    if isinstance(carried, fx.GraphModule):
        return carried
    if isinstance(model, torch.jit.ScriptModule):
        places = {start(tensor) for tensor in model.state_dict().values() if tensor.numel()}
        for known in _converted:
            if places and places == {start(tensor) for tensor in known.state_dict().values() if tensor.numel()}:
                return known
    raise ConfigurationError(
        f"{called} cannot find the integer graph of this {type(model).__name__}",
        because="a TorchScript program holds none; one that torch.jit.trace has made of a model of convert_fx shares its tensors with it",
        remedy="pass the model that convert_fx returned, or save the trace with horizon.jit.save, which saves the graph with it",
    )


@checked(inplace=FLAG)
def convert(
    module: fx.GraphModule, mapping: Any = None, inplace: bool = False, remove_qconfig: bool = True, fast_mode: bool = False
) -> Any:
    """Return the integer graph, as `convert_fx`, under its name in eager mode."""
    refuse_given("convert", {"mapping": mapping}, {}, ARGUMENTS)
    return convert_fx(module, inplace, None, remove_qconfig, fast_mode)


@checked()
def fuse_fx(model: nn.Module, fuse_custom_config_dict: Any = None) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared."""
    refuse_given("fuse_fx", {"fuse_custom_config_dict": _unpreserved(fuse_custom_config_dict)}, {}, ARGUMENTS)
    return model


@checked(inplace=FLAG)
def fuse_modules(
    model: nn.Module, modules_to_fuse: Any, inplace: bool = False, fuser_func: Any = None, fuse_custom_config_dict: Any = None
) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared, whether they are listed or not."""
    given = {"fuser_func": None if fuser_func is fuse_known_modules else fuser_func, "fuse_custom_config_dict": fuse_custom_config_dict}
    refuse_given("fuse_modules", given, {}, ARGUMENTS)
    return model


def fuse_known_modules(mod_list: Any, is_qat: bool = False, additional_fuser_method_mapping: Any = None) -> Any:
    """Return the modules unchanged: operators are fused when the model is prepared."""
    refuse_given("fuse_known_modules", {"fuser_func": additional_fuser_method_mapping or None}, {}, ARGUMENTS)
    return mod_list


@checked(verbose=FLAG)
def load_observer_params(from_model: nn.Module, to_model: nn.Module, verbose: bool = False) -> None:
    """Copy the scales of a prepared model to another by operator names, with their training state.

    For models of one float model whose qconfigs have different observers, or of which only one has learned scales, so that a
    `state_dict` of one lacks entries of the other. Scales that were given, or are frozen, stay. The dtypes must be equal.
    Scales that the first model has observed in CALIBRATION are set first. Raises ConfigurationError for a different dtype, and
    if nothing can be copied; nothing is changed then.
    """
    for model, action in ((from_model, "the scales"), (to_model, "the operators")):
        if isinstance(model, Deferred):
            raise model._unknown(action)
    require_prepared(from_model)
    require_prepared(to_model)
    chosen, left = _matching(quantized_operators(from_model), quantized_operators(to_model))
    if not chosen:
        raise ConfigurationError(
            "no scale was copied",
            because="no operator of the two has one name, or none of these has a scale in the first model",
            remedy="calibrate the first model, and prepare both from one float model",
        )
    for mine, theirs in chosen:
        _take_over(mine, theirs)
        if verbose:
            print(f"{mine.name}: scale {float(mine.scale):.6g}")
    if left:
        logger.warning("scales copied: %d; without one in the first model: %s", len(chosen), ", ".join(left))


def _matching(
    sources: Mapping[str, QuantizedOperator], operators: Mapping[str, QuantizedOperator]
) -> tuple[list[tuple[Quantizer, Quantizer]], list[str]]:
    """Return the quantizers that take over a scale, each paired with its source, and the names of those without a source."""
    chosen: list[tuple[Quantizer, Quantizer]] = []
    left = []
    for operator in sources.values():
        if operator.state is State.CALIBRATE:
            update_scales(operator)
    for name, operator in operators.items():
        known = owned_quantizers(sources[name]) if name in sources else []
        for mine, theirs in itertools.zip_longest(owned_quantizers(operator), known):
            if mine is None or mine.frozen or mine.given or mine.follows_sum:
                continue
            if theirs is None or not theirs.calibrated:
                left.append(mine.name)
                continue
            if mine.dtype != theirs.dtype:
                raise ConfigurationError(
                    f"the scale of %{name} cannot be copied",
                    because=f"it is that of {theirs.dtype} there, and of {mine.dtype} here",
                    remedy="calibrate this model itself, or prepare it with fxq.prepare(…, observations=fxq.observations(from_model))",
                )
            chosen.append((mine, theirs))
    return chosen, left


def _take_over(mine: Quantizer, theirs: Quantizer) -> None:
    mine.assign(theirs.scale, theirs.grid.zero_point)
    if mine.dtype.affine:
        mine.ends.copy_(theirs.ends)
    known = {gathering(observer): observer for observer in theirs.observers}
    for observer in mine.observers:
        if gathering(observer) in known:
            observer.load_state_dict(known[gathering(observer)].state_dict())
    if mine.range is not None:
        mine.batches_used.copy_(mine.range.count)


@checked()
def weight_reconstruction(
    calib_model: nn.Module, batches: Any, batch_process_func: Any = None, custom_config_dict: Mapping[str, Any] | None = None
) -> nn.Module:
    """Learn for each weight whether to round it up or down (`fxquant.tuning.adaround`); return the model, which is changed.

    `custom_config_dict` may hold num_batches, by default 10, and num_steps, by default 100. Raises the errors of `adaround`, and
    ConfigurationError for other keys: a layer without a gain is left unchanged, so none has to be excluded by name.
    """
    settings = dict(custom_config_dict or {})
    num_batches, steps = settings.pop("num_batches", 10), settings.pop("num_steps", 100)
    if settings:
        raise ConfigurationError(
            f"custom_config_dict holds {', '.join(map(repr, settings))}",
            because="num_batches and num_steps are what can be set",
            remedy="leave it out, or call fxq.tuning.adaround",
        )
    adaround(calib_model, batches, num_batches, batch_process_func, steps=steps)  # type: ignore[arg-type]
    return calib_model
