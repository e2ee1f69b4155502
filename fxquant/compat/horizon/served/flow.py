"""Horizon's workflow over fxquant's: preparation, states, conversion to integers, and transfer of scales."""

import enum
import functools
import inspect
import itertools
import weakref
from collections.abc import Mapping
from operator import not_
from typing import Any

import torch
from torch import fx, nn

import fxquant as fxq
from fxquant import backends
from fxquant.accuracy.learn import adaround
from fxquant.accuracy.states import enter, owned_quantizers, require_prepared
from fxquant.compat.common import BRANCH, foreign, keeps_attributes, reading_attributes, refusals, refused, traced, unknown, unserved
from fxquant.compat.deferred import Deferred, converted, keep_shapes, prepared_in_place, set_observed_scales, take_checkpoints
from fxquant.compat.horizon.served import get_qat_mode, required
from fxquant.compat.horizon.served.markers import leaves, scale_of_stubs, with_paths
from fxquant.compat.horizon.served.qconfig import as_qconfig
from fxquant.compat.horizon.served.templates import of_dict, of_setters, on_host
from fxquant.ir.graph import is_deployed, stage_of
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.undo import all_or_nothing
from fxquant.quantization.observers.histogram import gathering
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.support import logger
from fxquant.support.arguments import FLAG, checked
from fxquant.support.files import start

ARGUMENTS = refusals(
    "horizon",
    convert_custom_config_dict=keeps_attributes,
    fuse_custom_config_dict=keeps_attributes,
    additional_fuser_method_mapping=not_,
    fuser_func=lambda function: getattr(function, "__name__", "") == "fuse_known_modules",
)
takes = foreign("horizon", ARGUMENTS)

METHODS = {"EAGER": "eager", "SYMBOLIC": "symbolic", "JIT": "jit", "JIT_STRIP": "jit-strip"}  # all of these trace the model
PrepareMethod = enum.Enum("PrepareMethod", METHODS)  # type: ignore[misc]
PREPARED: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()  # the models that these functions created, for parts of them
OLD_SCALE = 1.0 / 128.0


@takes(hybrid=FLAG, optimize_graph=FLAG, training_branch=BRANCH)
def prepare_qat_fx(
    model: nn.Module, qconfig_dict: Any = None, prepare_custom_config_dict: Mapping[str, Any] | None = None, hybrid: bool = False,
    hybrid_dict: Mapping[str, Any] | None = None, *, example_inputs: Any = None, dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:  # fmt: skip
    """Prepare a model for the march that is set, in state QAT and in train mode if the model is. See `fxquant.prepare`.

    qconfig_dict     operators that no rule of it covers stay in float
    optimize_graph   has no effect: every pass runs
    hybrid           with hybrid_dict, what stays on the host; operators without integers on the march stay there anyway
    example_inputs   the inputs for the trace; None: the model is prepared by its first batch, and has no parameters before
    dynamic_shapes   as `fxquant.prepare` takes it
    training_branch  whether to keep what forward computes only in train mode; None: if it can be traced, otherwise with a warning

    An attribute `qconfig` on a module overrides the dict. A QuantStub without a scale has 1/128 on marches up to bayes-e.
    """
    for key in [key for key in prepare_custom_config_dict or () if key != "preserved_attributes"]:
        raise refused("prepare_qat_fx(prepare_custom_config_dict)", key=key)
    if hybrid_dict is not None and not hybrid:
        raise unserved("prepare_qat_fx", "hybrid_dict", "it names operators of a hybrid model", "pass hybrid=True with it")
    mapping = of_dict(qconfig_dict)
    rules = on_host(mapping, hybrid_dict) if hybrid_dict else mapping
    return _prepared_as("prepare_qat_fx", model, example_inputs, rules, dynamic_shapes, training_branch, old=True)


@takes(inplace=FLAG, hybrid=FLAG, optimize_graph=FLAG, training_branch=BRANCH)
def prepare_qat(
    model: nn.Module, inplace: bool = False, *, example_inputs: Any = None, dynamic_shapes: Any = None, training_branch: bool | None = None
) -> fx.GraphModule:
    """Prepare a model whose attributes `qconfig` and stubs say what is quantized, otherwise as `prepare_qat_fx`.

    inplace   whether the caller's object becomes the prepared model, and is returned
    """
    rules = fxq.QConfigMapping(default=None)
    return _prepared_as("prepare_qat", model, example_inputs, rules, dynamic_shapes, training_branch, old=True, inplace=inplace)


@takes(training_branch=BRANCH)
def prepare(
    model: nn.Module, example_inputs: Any = None, qconfig_setter: Any = None, method: Any = "jit-strip", example_kw_inputs: Any = None, *,
    dynamic_shapes: Any = None, training_branch: bool | None = None,
) -> fx.GraphModule:  # fmt: skip
    """Prepare the model by one setter or several; for each operator the first setter with a rule decides. None: attributes `qconfig`.

    The other arguments are those of `prepare_qat_fx`; `method` and `fuse_mode` have no effect: every method traces. A QuantStub without
    a scale observes it.
    """
    PrepareMethod(method)
    inputs = example_inputs
    if example_kw_inputs:
        args = example_inputs if isinstance(example_inputs, tuple | list) else () if example_inputs is None else (example_inputs,)
        inputs = dict(inspect.signature(model.forward).bind(*args, **example_kw_inputs).arguments)
    has_attributes = any("qconfig" in module.__dict__ for module in model.modules())
    setters = fxq.QConfigMapping(default=None) if qconfig_setter is None and has_attributes else qconfig_setter
    return _prepared_as("prepare", model, inputs, setters, dynamic_shapes, training_branch, old=False)


def _prepared_as(
    called: str, model: nn.Module, example_inputs: Any, rules: Any, dynamic_shapes: Any, branch: bool | None, *, old: bool,
    inplace: bool = False,
) -> fx.GraphModule:  # fmt: skip
    """Return the model that is prepared by rules; `old`: as the plugin's first releases do it."""
    prepared: fx.GraphModule = prepared_in_place(
        model, inplace, example_inputs, _prepare, called, keeps=False, old=old, rules=rules, dynamic_shapes=dynamic_shapes, branch=branch,
        march=required(called), batch_norm=get_qat_mode().value,
    )  # fmt: skip
    PREPARED.add(prepared)
    return prepared


def _prepare(
    model: nn.Module, example_inputs: Any, *, called: str, old: bool, rules: Any, dynamic_shapes: Any, branch: bool | None, march: str,
    batch_norm: str,
) -> fx.GraphModule:  # fmt: skip
    inputs = tuple(example_inputs) if isinstance(example_inputs, list) else example_inputs
    scale, why = None, f"{called} for {march} observes what is given no scale"
    if old and not backends.get(march).name.startswith("nash"):
        scale, why = OLD_SCALE, f"the default of {called} for {march}; QuantStub(scale=None) observes it"
    with scale_of_stubs(model, scale, why), reading_attributes(model, as_qconfig), with_paths(model):
        if isinstance(model, fx.GraphModule) and stage_of(model) is not None:
            graph = fxq.trace(model, inputs)
        else:
            graph = traced(called, model, inputs, dynamic_shapes, branch, leaves(model))
    prepared = fxq.prepare(graph, inputs, march, of_setters(rules, graph, march), options=fxq.Options(batch_norm=batch_norm))
    fxq.set_state(prepared, State.TRAIN)
    keep_shapes(prepared, inputs)
    take_checkpoints(prepared)
    return prepared.train(model.training)


_converted: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()  # the integer models that were created, for traces of them


class FakeQuantState(enum.Enum):
    """The state of a prepared model, by Horizon's names."""

    QAT = State.TRAIN
    CALIBRATION = State.CALIBRATE
    VALIDATION = State.VALIDATE
    _FLOAT = State.FLOAT


@checked()
@all_or_nothing
def set_fake_quantize(model: nn.Module, fake_quant_state: FakeQuantState) -> None:
    """Put a prepared model, or the operators of a part of one (`prepared.backbone`), into a state. Leaving CALIBRATION sets the scales.

    In CALIBRATION batches are observed in train mode and in eval mode alike.
    """
    if not isinstance(fake_quant_state, FakeQuantState):
        raise unknown("fake_quant_state", fake_quant_state, "QAT, CALIBRATION or VALIDATION of FakeQuantState")
    if isinstance(model, Deferred):
        model.later(functools.partial(set_fake_quantize, fake_quant_state=fake_quant_state))
        return
    inner = getattr(model, "module", None)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) and isinstance(inner, nn.Module):
        model = inner
    state: State = fake_quant_state.value
    if operators := list(quantized_operators(model).values()):
        enter(model, operators, state)
        return
    whole = next((each for each in PREPARED if any(module is model for module in each.modules())), None)
    if whole is None:
        if isinstance(model, fx.GraphModule):
            require_prepared(model)
        raise refused("set_fake_quantize", kind=type(model).__name__)
    path = next(name for name, module in whole.named_modules() if module is model)
    chosen = [operator for operator in quantized_operators(whole).values() if operator.path == path or operator.path.startswith(path + ".")]
    enter(whole, chosen, state)


@takes(inplace=FLAG, fast_mode=FLAG, _remove_qconfig=FLAG)
def convert_fx(graph_module: fx.GraphModule, inplace: bool = False) -> fx.GraphModule:
    """Return the integer graph of a prepared model, which stays usable. See `fxquant.convert`.

    inplace     whether the caller's object becomes the integer model
    fast_mode   has no effect: integer models run by kernels with the reference's bits, and can be compiled all the same

    Raises ConfigurationError for operators in state _FLOAT, which would be integers here, and NotCalibrated without scales.
    """
    operators = quantized_operators(graph_module)
    in_float = [name for name, operator in operators.items() if operator.state is State.FLOAT]
    if in_float and len(in_float) < len(operators):
        logger.warning("operators in state _FLOAT are integers in the integer graph: %s", ", ".join(in_float))
    integer = converted(graph_module, inplace)
    _converted.add(integer)
    return integer


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
        for integer in _converted:
            if places and places == {start(tensor) for tensor in integer.state_dict().values() if tensor.numel()}:
                return integer
    raise refused("integer_of", called=called, kind=type(model).__name__)


@takes(inplace=FLAG)
def convert(module: fx.GraphModule, inplace: bool = False, remove_qconfig: bool = True, fast_mode: bool = False) -> Any:
    """Return the integer graph, as `convert_fx`, under its name in eager mode."""
    return convert_fx(module, inplace, None, remove_qconfig, fast_mode)


@takes()
def fuse_fx(model: nn.Module) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared."""
    return model


@takes(inplace=FLAG)
def fuse_modules(model: nn.Module) -> nn.Module:
    """Return the model unchanged, as `fuse_fx`, whether operators are listed or not."""
    return model


@takes()
def fuse_known_modules(mod_list: Any) -> Any:
    """Return the modules unchanged, as `fuse_fx`."""
    return mod_list


@checked(verbose=FLAG)
@all_or_nothing
def load_observer_params(from_model: nn.Module, to_model: nn.Module, verbose: bool = False) -> None:
    """Copy the scales of a prepared model to another by operator names, with their training state.

    For models of one float model whose qconfigs have different observers, or if only one model has learned scales, so that a
    `state_dict` of one lacks entries of the other. Scales that were given, or are frozen, stay. The dtypes must be equal.
    Scales that the first model has observed in CALIBRATION are set first. Raises ConfigurationError for a different dtype, and
    if nothing can be copied; nothing is changed then.
    """
    for model, action in ((from_model, "the scales"), (to_model, "the operators")):
        if isinstance(model, Deferred):
            raise model._unknown(action)
    require_prepared(from_model)
    require_prepared(to_model)
    set_observed_scales(from_model)
    chosen, unmatched = _matching(quantized_operators(from_model), quantized_operators(to_model))
    if not chosen:
        raise refused("load_observer_params")
    for mine, theirs in chosen:
        _take_over(mine, theirs)
        if verbose:
            print(f"{mine.name}: scale {float(mine.scale):.6g}")
    if unmatched:
        logger.warning("scales copied: %d; without one in the first model: %s", len(chosen), ", ".join(unmatched))


def _matching(
    sources: Mapping[str, QuantizedOperator], operators: Mapping[str, QuantizedOperator]
) -> tuple[list[tuple[Quantizer, Quantizer]], list[str]]:
    """Return pairs (quantizer, the source of its scale), and the names of quantizers that have no source."""
    chosen: list[tuple[Quantizer, Quantizer]] = []
    unmatched = []
    for name, operator in operators.items():
        quantizers = owned_quantizers(sources[name]) if name in sources else []
        for mine, theirs in itertools.zip_longest(owned_quantizers(operator), quantizers):
            if mine is None or mine.frozen or mine.given or mine.follows_sum:
                continue
            if theirs is None or not theirs.calibrated:
                unmatched.append(mine.name)
                continue
            if mine.dtype != theirs.dtype:
                raise refused("load_observer_params.dtype", name=name, dtype=theirs.dtype, dtype2=mine.dtype)
            chosen.append((mine, theirs))
    return chosen, unmatched


def _take_over(mine: Quantizer, theirs: Quantizer) -> None:
    mine.assign(theirs.scale, theirs.grid.zero_point)
    if mine.dtype.affine:
        mine.ends.copy_(theirs.ends)
    by_kind = {gathering(observer): observer for observer in theirs.observers}
    for observer in mine.observers:
        if gathering(observer) in by_kind:
            observer.load_state_dict(by_kind[gathering(observer)].state_dict())
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
        raise refused("weight_reconstruction", known=", ".join(map(repr, settings)))
    adaround(calib_model, batches, num_batches, steps=steps, options=fxq.Options(batch_fn=batch_process_func))  # type: ignore[arg-type]
    return calib_model
