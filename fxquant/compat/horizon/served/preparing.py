"""Horizon's functions that prepare a model, over fxquant's `prepare`."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

import fxquant as fxq
from fxquant import backends
from fxquant.compat.checkpoints import take_checkpoints
from fxquant.compat.common import Refusal, refuse_given
from fxquant.compat.deferred import keep_shapes, prepared_in_place
from fxquant.compat.horizon.served.march import required
from fxquant.compat.horizon.served.qconfig import read_attributes
from fxquant.compat.horizon.served.qconfig_dict import of_dict, of_setters, on_host
from fxquant.compat.horizon.served.stub_modules import scale_of_stubs
from fxquant.compat.horizon.served.wrapping import leaves
from fxquant.compat.tracing import BRANCH, traced
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import stage_of
from fxquant.quantization.state import State
from fxquant.support.arguments import FLAG, checked

logger = logging.getLogger("fxquant")

ARGUMENTS = {
    "mapping": Refusal("modules are traced, not replaced", "leave it out"),
    "optimize_kwargs": Refusal("operands of a concatenation have the scales that the march demands", "leave it out"),
    "convert_custom_config_dict": Refusal("custom modules have no integer graph", "leave it out"),
    "fuse_custom_config_dict": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "fuser_func": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "hybrid_dict": Refusal("it names operators of a hybrid model", "pass hybrid=True with it"),
    "prepare_custom_config_dict": Refusal("attributes are kept in any case, and other entries have no effect", "leave it out"),
}


class PrepareMethod(enum.Enum):
    """The methods of Horizon's `prepare`; here all of these trace the model."""

    EAGER = "eager"
    SYMBOLIC = "symbolic"
    JIT = "jit"
    JIT_STRIP = "jit-strip"


class QATMode(enum.Enum):
    """The behaviour of batch norms while training, as `batch_norm` of `fxquant.prepare`."""

    FuseBN = "folded"
    WithBN = "live"
    WithBNReverseFold = "live"  # folding is a function of weight and statistics in every state


_qat_mode = [QATMode.FuseBN]
PREPARED: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()  # the models that these functions created, for parts of them
OLD_SCALE = 1.0 / 128.0


@checked(hybrid=FLAG, optimize_graph=FLAG, training_branch=BRANCH)
def prepare_qat_fx(
    model: nn.Module,
    qconfig_dict: Any = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
    optimize_graph: bool = False,
    hybrid: bool = False,
    hybrid_dict: Mapping[str, Any] | None = None,
    opset_version: int | None = None,
    *,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:
    """Prepare a model for the march that is set, in state QAT and in train mode if the model is. See `fxquant.prepare`.

    qconfig_dict     operators that no rule of it covers stay in float
    optimize_graph   has no effect: every pass runs
    hybrid           with hybrid_dict, what stays on the host; operators without integers on the march stay there anyway
    example_inputs   the inputs for the trace; None: the model is prepared by its first batch, and has no parameters before
    dynamic_shapes   as `fxquant.prepare` takes it
    training_branch  whether to keep what forward computes only in train mode; None: if it can be traced, otherwise with a warning

    An attribute `qconfig` on a module overrides the dict. A QuantStub without a scale has 1/128 on marches up to bayes-e.
    """
    _check_custom("prepare_qat_fx", prepare_custom_config_dict)
    if not hybrid:
        refuse_given("prepare_qat_fx", {"hybrid_dict": hybrid_dict}, {}, ARGUMENTS)
    mapping = of_dict(qconfig_dict)
    rules = on_host(mapping, hybrid_dict) if hybrid_dict else mapping
    how = How("prepare_qat_fx", dynamic_shapes, training_branch, old=True)
    return _prepared_as(how, model, example_inputs, rules)


@checked(inplace=FLAG, hybrid=FLAG, optimize_graph=FLAG, training_branch=BRANCH)
def prepare_qat(
    model: nn.Module,
    mapping: Any = None,
    inplace: bool = False,
    optimize_graph: bool = False,
    hybrid: bool = False,
    optimize_kwargs: Any = None,
    *,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:
    """Prepare a model whose attributes `qconfig` and stubs say what is quantized, otherwise as `prepare_qat_fx`.

    inplace   whether the caller's object becomes the prepared model, and is returned
    """
    refuse_given("prepare_qat", {"mapping": mapping, "optimize_kwargs": optimize_kwargs}, {}, ARGUMENTS)
    how = How("prepare_qat", dynamic_shapes, training_branch, old=True)
    return _prepared_as(how, model, example_inputs, fxq.QConfigMapping(default=None), inplace)


@checked(training_branch=BRANCH)
def prepare(
    model: nn.Module,
    example_inputs: Any = None,
    qconfig_setter: Any = None,
    method: PrepareMethod | str = PrepareMethod.JIT_STRIP,
    example_kw_inputs: Any = None,
    fuse_mode: Any = None,
    *,
    dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:
    """Prepare the model by a setter, or by several, of which the first with a rule for an operator decides; None: attributes `qconfig`.

    The other arguments are those of `prepare_qat_fx`; `method` and `fuse_mode` have no effect: every method traces. A QuantStub without
    a scale observes it.
    """
    PrepareMethod(method)
    inputs = example_inputs
    if example_kw_inputs:
        given = example_inputs if isinstance(example_inputs, tuple | list) else () if example_inputs is None else (example_inputs,)
        inputs = dict(inspect.signature(model.forward).bind(*given, **example_kw_inputs).arguments)
    has_attributes = any("qconfig" in module.__dict__ for module in model.modules())
    setters = fxq.QConfigMapping(default=None) if qconfig_setter is None and has_attributes else qconfig_setter
    return _prepared_as(How("prepare", dynamic_shapes, training_branch, old=False), model, inputs, setters)


@dataclass(frozen=True)
class How:
    """The settings of a prepare function: its name, its arguments for the tracer, and whether it is of the plugin's first releases."""

    called: str
    dynamic_shapes: Any
    training_branch: bool | None
    old: bool

    def trace(self, model: nn.Module, example_inputs: Any) -> fx.GraphModule:
        """Return the graph of a model, with what it computes only in train mode."""
        if isinstance(model, fx.GraphModule) and stage_of(model) is not None:
            return fxq.trace(model, example_inputs)
        return traced(self.called, model, example_inputs, self.dynamic_shapes, self.training_branch, leaves(model))

    def scale(self, march: str) -> tuple[float | None, str]:
        """Return the scale of a QuantStub without its own, and the reason."""
        if self.old and not backends.get(march).name.startswith("nash"):
            return OLD_SCALE, f"the default of {self.called} for {march}; QuantStub(scale=None) observes it"
        return None, f"{self.called} for {march} observes what is given no scale"


def _prepared_as(how: How, model: nn.Module, example_inputs: Any, rules: Any, inplace: bool = False) -> fx.GraphModule:
    march, mode = required(how.called), _qat_mode[0].value
    prepare = functools.partial(_prepare, how=how, rules=rules, march=march, batch_norm=mode)
    made: fx.GraphModule = prepared_in_place(model, inplace, example_inputs, prepare, how.called, keeps=False)
    PREPARED.add(made)
    return made


def _prepare(model: nn.Module, example_inputs: Any, how: How, rules: Any, march: str, batch_norm: str) -> fx.GraphModule:
    inputs = tuple(example_inputs) if isinstance(example_inputs, list) else example_inputs
    scale, why = how.scale(march)
    with scale_of_stubs(model, scale, why), read_attributes(model):
        graph = how.trace(model, inputs)
    mapping, wide = of_setters(rules, graph, march)
    if wide:
        mapping = fxq.high_precision_outputs(graph, inputs, march, mapping)
    prepared = fxq.prepare(graph, inputs, march, mapping, batch_norm=batch_norm)
    fxq.set_state(prepared, State.TRAIN)
    keep_shapes(prepared, inputs)
    take_checkpoints(prepared)
    return prepared.train(model.training)


@checked()
def set_qat_mode(mode: QATMode) -> None:
    """Set the behaviour of batch norms while training, for models that are prepared after this call."""
    if not isinstance(mode, QATMode):
        raise ConfigurationError(
            f"{mode!r} is not a QATMode", because="it is FuseBN, WithBN or WithBNReverseFold", remedy="pass one of these"
        )
    _qat_mode[:] = [mode]


def get_qat_mode() -> QATMode:
    """Return the mode that was set; FuseBN by default."""
    return _qat_mode[0]


def _check_custom(called: str, config: Mapping[str, Any] | None) -> None:
    for key in config or {}:
        if key != "preserved_attributes":
            raise ARGUMENTS["prepare_custom_config_dict"].error(f"{called}(prepare_custom_config_dict={{{key!r}: …}}) cannot be done")
