"""Horizon's flow over fxquant's: prepare, states, convert."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

import fxquant as fxq
from fxquant.arguments import FLAG, checked
from fxquant.compat.common import Refusal, refuse_given
from fxquant.compat.horizon.march import required
from fxquant.compat.horizon.rules import has_high_precision_outputs, of_dict, of_setters, on_host
from fxquant.errors import ConfigurationError
from fxquant.quantization.calibration import enter, owned_quantizers, require_prepared, update_scales
from fxquant.quantization.observers import gathering
from fxquant.quantization.prepared import quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.state import State
from fxquant.tuning.rounding import adaround

ARGUMENTS = {
    "mapping": Refusal("modules are traced, not replaced", "leave it out"),
    "inplace": Refusal("a new model is returned, and the caller's is left as it is", "use what is returned"),
    "convert_custom_config_dict": Refusal("modules of one's own have no integer graph", "leave it out"),
    "fuse_custom_config_dict": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "fuser_func": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "hybrid_dict": Refusal("it names operators of a hybrid model", "pass hybrid=True with it"),
    "prepare_custom_config_dict": Refusal("attributes are kept anyhow, and nothing else of it has a meaning here", "leave it out"),
}


class FakeQuantState(enum.Enum):
    """What a prepared model does, by Horizon's names."""

    QAT = State.TRAIN
    CALIBRATION = State.CALIBRATE
    VALIDATION = State.VALIDATE
    _FLOAT = State.FLOAT


class PrepareMethod(enum.Enum):
    """How Horizon's `prepare` reads a model; here all of these trace it."""

    EAGER = "eager"
    SYMBOLIC = "symbolic"
    JIT = "jit"
    JIT_STRIP = "jit-strip"


class QATMode(enum.Enum):
    """What batch norms do while training, as `batch_norm` of `fxquant.prepare`."""

    FuseBN = "folded"
    WithBN = "live"
    WithBNReverseFold = "live"  # folding is a function of weight and statistics in every state


_qat_mode = [QATMode.FuseBN]


@checked(hybrid=FLAG, optimize_graph=FLAG)
def prepare_qat_fx(
    model: nn.Module,
    qconfig_dict: Any = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
    optimize_graph: bool = False,
    hybrid: bool = False,
    hybrid_dict: Mapping[str, Any] | None = None,
    *,
    example_inputs: Any = None,
) -> fx.GraphModule:
    """The model prepared for the march that is set, in state QAT and in train mode where the model is. See `fxquant.prepare`.

    qconfig_dict     what no rule of it covers stays in float
    optimize_graph   has no effect: every pass runs
    hybrid           with hybrid_dict, what stays on the host; what the march has no integers for stays there anyhow
    example_inputs   needed: the model is traced with them

    An attribute `qconfig` on a module goes before the dict.
    """
    _check_custom("prepare_qat_fx", prepare_custom_config_dict)
    if not hybrid:
        refuse_given("prepare_qat_fx", {"hybrid_dict": hybrid_dict}, {}, ARGUMENTS)
    mapping = of_dict(qconfig_dict)
    return _prepared("prepare_qat_fx", model, example_inputs, on_host(mapping, hybrid_dict) if hybrid_dict else mapping)


@checked(inplace=FLAG, hybrid=FLAG, optimize_graph=FLAG)
def prepare_qat(
    model: nn.Module,
    mapping: Any = None,
    inplace: bool = False,
    optimize_graph: bool = False,
    hybrid: bool = False,
    *,
    example_inputs: Any = None,
) -> fx.GraphModule:
    """The same for a model that says with attributes `qconfig` and with stubs what is quantized."""
    refuse_given("prepare_qat", {"mapping": mapping, "inplace": inplace}, {"inplace": False}, ARGUMENTS)
    return _prepared("prepare_qat", model, example_inputs, fxq.QConfigMapping(default=None))


@checked()
def prepare(
    model: nn.Module, example_inputs: Any = None, qconfig_setter: Any = None, method: PrepareMethod = PrepareMethod.JIT_STRIP
) -> fx.GraphModule:
    """The model prepared as a setter says, or several, the first of which that speaks of a place decides."""
    wide = has_high_precision_outputs(qconfig_setter)
    return _prepared("prepare", model, example_inputs, of_setters(qconfig_setter), high_precision_outputs=wide)


@checked()
def set_qat_mode(mode: QATMode) -> None:
    """Say what batch norms of models that are prepared from now on do while training."""
    if not isinstance(mode, QATMode):
        raise ConfigurationError(f"{mode!r} is no QATMode", because="it is FuseBN, WithBN or WithBNReverseFold", remedy="pass one of these")
    _qat_mode[:] = [mode]


def get_qat_mode() -> QATMode:
    """What was set; FuseBN before that."""
    return _qat_mode[0]


def _check_custom(called: str, config: Mapping[str, Any] | None) -> None:
    for key in config or {}:
        if key != "preserved_attributes":
            raise ARGUMENTS["prepare_custom_config_dict"].error(f"{called}(prepare_custom_config_dict={{{key!r}: …}}) cannot be done")


def _prepared(
    called: str, model: nn.Module, example_inputs: Any, mapping: fxq.QConfigMapping, *, high_precision_outputs: bool = False
) -> fx.GraphModule:
    if example_inputs is None:
        raise ConfigurationError(
            f"{called} needs example_inputs",
            because="the model is traced with them, for its shapes",
            remedy=f"pass one batch of its inputs: {called}(…, example_inputs=(x,))",
        )
    if high_precision_outputs:
        mapping = fxq.high_precision_outputs(model, example_inputs, required(called), mapping)
    prepared = fxq.prepare(model, example_inputs, required(called), mapping, batch_norm=_qat_mode[0].value)
    fxq.set_state(prepared, State.TRAIN)
    return prepared.train(model.training)


@checked()
def set_fake_quantize(model: nn.Module, fake_quant_state: FakeQuantState) -> None:
    """Put a prepared model, or the operators inside of a part of it, into a state. Leaving CALIBRATION sets the scales.

    In CALIBRATION batches are observed in train mode and in eval mode alike.
    """
    if not isinstance(fake_quant_state, FakeQuantState):
        raise ConfigurationError(
            f"{fake_quant_state!r} is no FakeQuantState", because="it is QAT, CALIBRATION or VALIDATION", remedy="pass FakeQuantState.QAT"
        )
    state: State = fake_quant_state.value
    operators = quantized_operators(model)
    if not operators:
        require_prepared(model)
    enter(model, operators.values(), state)


@checked(inplace=FLAG, fast_mode=FLAG)
def convert_fx(
    graph_module: fx.GraphModule, inplace: bool = False, convert_custom_config_dict: Any = None, fast_mode: bool = False
) -> fx.GraphModule:
    """The integer graph of a prepared model, which may go on afterwards; `fast_mode` has no effect. See `fxquant.convert`."""
    given = {"inplace": inplace, "convert_custom_config_dict": convert_custom_config_dict}
    refuse_given("convert_fx", given, {"inplace": False}, ARGUMENTS)
    require_prepared(graph_module)
    for operator in quantized_operators(graph_module).values():
        if operator.state is State.CALIBRATE:
            update_scales(operator)
    return fxq.convert(graph_module)


@checked(inplace=FLAG)
def convert(
    module: fx.GraphModule, mapping: Any = None, inplace: bool = False, remove_qconfig: bool = True, fast_mode: bool = False
) -> Any:
    """The same, by the name it has in eager mode."""
    refuse_given("convert", {"mapping": mapping}, {}, ARGUMENTS)
    return convert_fx(module, inplace, None, fast_mode)


@checked()
def fuse_fx(model: nn.Module, fuse_custom_config_dict: Any = None) -> nn.Module:
    """The model as it is: what belongs together is fused when it is prepared."""
    refuse_given("fuse_fx", {"fuse_custom_config_dict": fuse_custom_config_dict}, {}, ARGUMENTS)
    return model


@checked(inplace=FLAG)
def fuse_modules(
    model: nn.Module, modules_to_fuse: Any, inplace: bool = False, fuser_func: Any = None, fuse_custom_config_dict: Any = None
) -> nn.Module:
    """The model as it is: what belongs together is fused when it is prepared, whether it is listed or not."""
    refuse_given("fuse_modules", {"fuser_func": fuser_func, "fuse_custom_config_dict": fuse_custom_config_dict}, {}, ARGUMENTS)
    return model


@checked(verbose=FLAG)
def load_observer_params(from_model: nn.Module, to_model: nn.Module, verbose: bool = False) -> None:
    """Give a prepared model the scales of another, by the names of operators, and what training follows of them.

    For models of one float model whose qconfigs have other observers, or whose scales are learned in one alone, so that a
    `state_dict` of one has not what the other holds. Scales that were given, or are frozen, stay. The dtypes must be the same.
    Raises ConfigurationError for a dtype that is another, and changes nothing then.
    """
    require_prepared(from_model)
    require_prepared(to_model)
    sources, chosen = quantized_operators(from_model), []
    for name, operator in quantized_operators(to_model).items():
        for mine, theirs in zip(owned_quantizers(operator), owned_quantizers(sources[name]) if name in sources else (), strict=False):
            if mine.dtype != theirs.dtype:
                raise ConfigurationError(
                    f"the scale of %{name} cannot be taken over",
                    because=f"it is that of {theirs.dtype} there, and of {mine.dtype} here",
                    remedy="calibrate this model itself, or prepare it with fxq.prepare(…, observations=fxq.observations(from_model))",
                )
            if theirs.calibrated and not (mine.frozen or mine.given or mine.follows_sum):
                chosen.append((mine, theirs))
    for mine, theirs in chosen:
        _take_over(mine, theirs)
        if verbose:
            print(f"{mine.name}: scale {float(mine.scale):.6g}")


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
    """Learn of each weight whether it is rounded up or down (`fxquant.tuning.adaround`); returns the model, which is changed.

    `custom_config_dict` may hold num_batches, 10 if it does not, and num_steps, 100. Raises what `adaround` raises, and
    ConfigurationError for other keys: a layer that does not gain is left as it was, so that none is excluded by name.
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
