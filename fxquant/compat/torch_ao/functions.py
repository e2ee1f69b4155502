"""PyTorch's FX and eager functions of quantization over fxquant's."""

import functools
from collections.abc import Callable
from typing import Any

from torch import fx, nn

import fxquant as fxq
from fxquant.accuracy.states import follow_unseen, keep_statistics, owned_quantizers, require_prepared, update_scales
from fxquant.compat.common import BRANCH, Refusal, foreign, keeps_attributes, reading_attributes, refusals, refused, settings_of, traced
from fxquant.compat.deferred import Deferred, converted, keep_shapes, prepared_in_place, take_checkpoints
from fxquant.compat.torch_ao.reading import dynamic_mapping, mapping_of, own_qconfig
from fxquant.frontend import default_leaf
from fxquant.frontend.entry import is_quantized_by_torch
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.undo import all_or_nothing
from fxquant.quantization.spec import State
from fxquant.support.arguments import FLAG, checked

ATTRIBUTES_ALONE = fxq.QConfigMapping(default=None)  # rules for a model whose attributes `qconfig` say what is quantized
ARGUMENTS = refusals(
    "torch_ao",
    backend_config=lambda config: getattr(config, "name", "") in ("native", "fbgemm", "x86", "qnnpack", "onednn", "executorch"),
    convert_custom_config=keeps_attributes,
    fuse_custom_config=lambda config: not settings_of(config),
)
takes = foreign("torch_ao", ARGUMENTS)


@takes(training_branch=BRANCH)
def prepare_fx(
    model: nn.Module, qconfig_mapping: Any, example_inputs: Any = None, prepare_custom_config: Any = None, *, target: str = "x86",
    dynamic_shapes: Any = None, training_branch: bool | None = False,
) -> fx.GraphModule:  # fmt: skip
    """Prepare a model for calibration, in state CALIBRATE: it observes every batch. See `fxquant.prepare`.

    qconfig_mapping         PyTorch's QConfigMapping, its dict form, a QConfig for everything, or a fxq.QConfigMapping
    example_inputs          the inputs for the trace; None: the model is prepared by its first batch
    prepare_custom_config   PyTorch's; its modules that are not traced stay whole, and in float
    dynamic_shapes          as `fxquant.prepare` takes it
    training_branch         whether to keep what forward computes only in train mode; None: if it can be traced
    target                  what to compile for: "x86", with the arithmetic of all of PyTorch's engines, or a march that supports the
                            mapping's dtypes
    """
    return prepared_in_place(  # type: ignore[no-any-return]
        model, False, example_inputs, _prepared, "prepare_fx", keeps=True, qconfigs=qconfig_mapping, custom=prepare_custom_config,
        target=target, dynamic_shapes=dynamic_shapes, training_branch=training_branch,
    )  # fmt: skip


@takes(training_branch=BRANCH)
def prepare_qat_fx(
    model: nn.Module, qconfig_mapping: Any, example_inputs: Any = None, prepare_custom_config: Any = None, *, target: str = "x86",
    dynamic_shapes: Any = None, training_branch: bool | None = None,
) -> fx.GraphModule:  # fmt: skip
    """Prepare a model for training, in state TRAIN and in train mode: scales are set by the first batch and follow the rest.

    Batch norms use and update the statistics of batches until `freeze_bn_stats`. The arguments are those of `prepare_fx`, except that what
    forward computes only in train mode is kept if it can be traced; otherwise a warning says so.
    """
    return prepared_in_place(  # type: ignore[no-any-return]
        model, False, example_inputs, _prepared, "prepare_qat_fx", keeps=True, qconfigs=qconfig_mapping, custom=prepare_custom_config,
        train=True, target=target, dynamic_shapes=dynamic_shapes, training_branch=training_branch,
    )  # fmt: skip


@takes(_remove_qconfig=FLAG, keep_original_weights=FLAG)
def convert_fx(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the integer graph of a model that `prepare_fx` or `prepare_qat_fx` returned; it stays usable. See `fxquant.convert`.

    Raises NotCalibrated if the model has observed no batch.
    """
    return converted(graph_module)


@takes()
def fuse_fx(model: nn.Module) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared, in train mode and in eval mode alike."""
    return model


# ---- eager: stubs in the model mark the ends of the integer part, and attributes `qconfig` say what is quantized how -------------------
@takes(inplace=FLAG, training_branch=BRANCH)
def prepare(
    model: nn.Module, inplace: bool = False, *, example_inputs: Any = None, target: str = "x86", dynamic_shapes: Any = None,
    training_branch: bool | None = False,
) -> fx.GraphModule:  # fmt: skip
    """Prepare a model with stubs, and with QConfigs on its modules, for calibration; modules without a QConfig stay in float.

    inplace          whether the caller's object becomes the prepared model, and is returned
    example_inputs   the inputs for the trace; None: the model is prepared by its first batch

    The last three arguments are those of `prepare_fx`.
    """
    return prepared_in_place(  # type: ignore[no-any-return]
        model, inplace, example_inputs, _prepared, "prepare", keeps=True, target=target, dynamic_shapes=dynamic_shapes,
        training_branch=training_branch,
    )  # fmt: skip


@takes(inplace=FLAG, training_branch=BRANCH)
def prepare_qat(
    model: nn.Module, inplace: bool = False, *, example_inputs: Any = None, target: str = "x86", dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:  # fmt: skip
    """Prepare such a model for training, in state TRAIN and in train mode; what forward computes only there is kept if it can be traced.

    Its parameters are those of the float model, so that an optimizer may be made before or after, and before the first batch.
    """
    return prepared_in_place(  # type: ignore[no-any-return]
        model, inplace, example_inputs, _prepared, "prepare_qat", keeps=True, train=True, target=target, dynamic_shapes=dynamic_shapes,
        training_branch=training_branch,
    )  # fmt: skip


@takes(inplace=FLAG, remove_qconfig=FLAG, is_reference=FLAG, use_precomputed_fake_quant=FLAG)
def convert(module: fx.GraphModule, inplace: bool = False) -> fx.GraphModule:
    """Return the integer graph of a model that `prepare` or `prepare_qat` returned; with `inplace` the caller's object becomes it."""
    return converted(module, inplace)


@takes(inplace=FLAG)
def quantize(model: nn.Module, run_fn: Callable[..., Any], run_args: Any, inplace: bool = False) -> fx.GraphModule:
    """Prepare a model, call run_fn(model, *run_args), which calibrates it, and return its integer graph."""
    prepared = prepare(model, inplace)
    run_fn(prepared, *run_args)
    return convert(prepared, inplace=True)


@checked(inplace=FLAG)
def quantize_qat(model: nn.Module, run_fn: Callable[..., Any], run_args: Any, inplace: bool = False) -> fx.GraphModule:
    """Prepare a model for training, call run_fn(model, *run_args), which trains it, and return its integer graph."""
    prepared = prepare_qat(model.train(), inplace=inplace)
    run_fn(prepared, *run_args)
    return convert(prepared, inplace=True)


@takes(inplace=FLAG)
def fuse_modules(model: nn.Module) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared, whether they are listed or not."""
    return model


fuse_modules_qat = fuse_modules


@takes(inplace=FLAG)
def quantize_dynamic(
    model: nn.Module, qconfig_spec: Any = None, dtype: Any = None, inplace: bool = False, *, example_inputs: Any = None,
    target: str = "x86", dynamic_shapes: Any = None,
) -> fx.GraphModule:  # fmt: skip
    """Return the integer graph of a model with linear and recurrent layers quantized at run time; everything else stays in float.

    qconfig_spec    module classes and names, or a dict from these to dynamic QConfigs; None: nn.Linear, and the recurrent layers and cells
    dtype           PyTorch's qint8, or None, which is equivalent
    inplace         whether the caller's object becomes the integer graph, and is returned
    example_inputs  the inputs for the trace; None: the model is traced with its first batch
    dynamic_shapes  as `fxquant.prepare` takes it

    An LSTM is a loop of as many steps as the example has: every input must have its length, unless `dynamic_shapes` lets it vary.
    """
    return prepared_in_place(  # type: ignore[no-any-return]
        model, inplace, example_inputs, lambda *args, **how: converted(_prepared(*args, **how)), "quantize_dynamic", keeps=False,
        qconfigs=dynamic_mapping(model, qconfig_spec, dtype), target=target, dynamic_shapes=dynamic_shapes,
    )  # fmt: skip


def _prepared(
    model: nn.Module, example_inputs: Any, called: str, qconfigs: Any = ATTRIBUTES_ALONE, custom: Any = None, *, train: bool = False,
    target: str, dynamic_shapes: Any, training_branch: bool | None = False,
) -> fx.GraphModule:  # fmt: skip
    """Return the prepared model, in state CALIBRATE, or with `train` in state TRAIN and in train mode."""
    settings = settings_of(custom)
    names = {path for key in ("names", "name") for path in settings.pop(f"non_traceable_module_{key}", ())}
    kinds = tuple(kind for key in ("classes", "class") for kind in settings.pop(f"non_traceable_module_{key}", ()))
    settings.pop("preserved_attributes", None)
    for name in settings:
        raise ARGUMENTS.get(name, Refusal("it is unknown", "leave it out")).error(
            f"{called}(prepare_custom_config={{{name!r}: …}}) cannot be done"
        )
    leaf = (lambda module, path: path in names or isinstance(module, kinds) or default_leaf(module, path)) if names or kinds else None
    with reading_attributes(model, own_qconfig):
        graph = traced(called, model, example_inputs, dynamic_shapes, training_branch, leaf)
    prepared = fxq.prepare(graph, example_inputs, target, mapping_of(qconfigs, graph))
    keep_shapes(prepared, example_inputs)
    take_checkpoints(prepared)
    if train:
        fxq.set_state(prepared, State.TRAIN)
        prepared.train()
    return prepared


# ---- Switches of observers and fake quantization, for `prepared.apply(...)` or for a prepared model as a whole ---------
#
# observer  fake quantize   state
# on        on              TRAIN
# on        off             CALIBRATE
# off       on              TRAIN with frozen scales
# off       off             FLOAT
def _switch(switch: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Apply a switch to a model that is not prepared yet as soon as it is."""
    switch = all_or_nothing(switch)

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
        raise refused("switch", module=type(module).__module__, kind=type(module).__qualname__)
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
            raise refused("enable_observer", name=operator.name)
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
