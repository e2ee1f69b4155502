"""PyTorch's FX and eager functions of quantization over fxquant's."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx, nn

import fxquant as fxq
from fxquant.compat.checkpoints import take_checkpoints
from fxquant.compat.common import Refusal, refuse_given
from fxquant.compat.deferred import become, keep_shapes, prepared_in_place
from fxquant.compat.torch_ao.quantize_dynamic import dynamic_mapping
from fxquant.compat.torch_ao.rules import mapping_of, settings_of, with_own_qconfigs
from fxquant.compat.torch_ao.switches import (
    converted,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    engine_target,
    freeze_bn_stats,
    get_observer_dict,
    update_bn_stats,
)
from fxquant.compat.tracing import BRANCH, traced
from fxquant.errors import ConfigurationError
from fxquant.frontend import default_leaf
from fxquant.quantization.state import State
from fxquant.support.arguments import FLAG, checked

__all__ = [
    "convert",
    "convert_fx",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "freeze_bn_stats",
    "fuse_fx",
    "fuse_modules",
    "fuse_modules_qat",
    "get_observer_dict",
    "prepare",
    "prepare_fx",
    "prepare_qat",
    "prepare_qat_fx",
    "quantize_dynamic",
    "update_bn_stats",
]

ARGUMENTS = {
    "_equalization_config": Refusal("equalization is a separate step", "leave it out"),
    "additional_fuser_method_mapping": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "allow_list": Refusal("the qconfig determines what is quantized", "set qconfig = None on the modules that stay in float"),
    "backend_config": Refusal("the target determines the arithmetic", "pass target='x86' or 'qnnpack', or the name of another"),
    "convert_custom_config": Refusal("quantized custom modules have no integer graph", "leave it out"),
    "float_to_observed_custom_module_class": Refusal("modules are traced, not replaced", "leave it out"),
    "float_to_observed_mapping": Refusal("modules are traced, not replaced", "leave it out"),
    "fuse_custom_config": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "fuser_func": Refusal("operators are fused in the graph, by the compiler's own passes", "leave it out"),
    "input_quantized_indexes": Refusal(
        "inputs of graphs are float; those of files may be integers", "write the file with fxq.export_onnx(…, io='integer')"
    ),
    "is_reference": Refusal("the integer graph is the only form", "write quantize and dequantize with fxq.export_onnx(…, style='qdq')"),
    "keep_original_weights": Refusal("an integer graph holds integers", "keep the prepared model, which has the float weights"),
    "mapping": Refusal("modules are traced, not replaced", "leave it out"),
    "observer_non_leaf_module_list": Refusal("every operator of the graph is observed", "leave it out"),
    "output_quantized_indexes": Refusal(
        "outputs of graphs are float; those of files may be integers", "write the file with fxq.export_onnx(…, io='integer')"
    ),
    "prepare_custom_config_dict": Refusal("it belongs to modules that are replaced; here modules are traced", "use prepare_fx"),
    "qconfig_mapping": Refusal(
        "how operators are quantized was determined when the model was prepared", "prepare it again with this mapping"
    ),
    "standalone_module_classes": Refusal(
        "one graph is made of the whole model", "leave it out: the module's operators are quantized with the others"
    ),
    "standalone_module_names": Refusal(
        "one graph is made of the whole model", "leave it out: the module's operators are quantized with the others"
    ),
    "use_precomputed_fake_quant": Refusal("weights are quantized from their present values", "leave it out"),
}


@checked(training_branch=BRANCH)
def prepare_fx(
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: Any,
    prepare_custom_config: Any = None,
    _equalization_config: Any = None,
    backend_config: Any = None,
    *,
    target: str | None = None,
    dynamic_shapes: Any = None,
    training_branch: bool | None = False,
) -> fx.GraphModule:
    """Prepare a model for calibration, in state CALIBRATE: it observes every batch. See `fxquant.prepare`.

    qconfig_mapping         PyTorch's QConfigMapping, its dict form, a QConfig for everything, or a fxq.QConfigMapping
    prepare_custom_config   PyTorch's; its modules that are not traced stay whole, and in float
    dynamic_shapes          as `fxquant.prepare` takes it
    training_branch         whether to keep what forward computes only in train mode; None: if it can be traced
    target                  what to compile for: "x86", "qnnpack", or a march that supports the mapping's dtypes; None: that of
                            torch.backends.quantized.engine
    """
    refuse_given("prepare_fx", {"_equalization_config": _equalization_config, "backend_config": backend_config}, {}, ARGUMENTS)
    return _prepared("prepare_fx", model, qconfig_mapping, example_inputs, prepare_custom_config, target, dynamic_shapes, training_branch)


@checked(training_branch=BRANCH)
def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: Any,
    prepare_custom_config: Any = None,
    backend_config: Any = None,
    *,
    target: str | None = None,
    dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:
    """Prepare a model for training, in state TRAIN and in train mode: scales are set by the first batch and follow the rest.

    Batch norms use and update the statistics of batches until `freeze_bn_stats`. The arguments are those of `prepare_fx`, except that what
    forward computes only in train mode is kept if it can be traced; otherwise a warning says so.
    """
    refuse_given("prepare_qat_fx", {"backend_config": backend_config}, {}, ARGUMENTS)
    return _prepared_to_train(
        "prepare_qat_fx", model, qconfig_mapping, example_inputs, prepare_custom_config, target, dynamic_shapes, training_branch
    )


@checked(_remove_qconfig=FLAG, keep_original_weights=FLAG)
def convert_fx(
    graph_module: fx.GraphModule,
    convert_custom_config: Any = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: Any = None,
    backend_config: Any = None,
    keep_original_weights: bool = False,
) -> fx.GraphModule:
    """Return the integer graph of a model that `prepare_fx` or `prepare_qat_fx` returned; it stays usable. See `fxquant.convert`.

    Raises NotCalibrated if the model has observed no batch.
    """
    given = {
        "convert_custom_config": {k: v for k, v in settings_of(convert_custom_config).items() if k != "preserved_attributes"} or None,
        "qconfig_mapping": qconfig_mapping,
        "backend_config": backend_config,
        "keep_original_weights": keep_original_weights,
    }
    refuse_given("convert_fx", given, {"keep_original_weights": False}, ARGUMENTS)
    return converted(graph_module)


@checked()
def fuse_fx(model: nn.Module, fuse_custom_config: Any = None, backend_config: Any = None) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared, in train mode and in eval mode alike."""
    refuse_given(
        "fuse_fx", {"fuse_custom_config": settings_of(fuse_custom_config) or None, "backend_config": backend_config}, {}, ARGUMENTS
    )
    return model


# ---- eager: stubs in the model mark the ends of the integer part, and attributes `qconfig` say what is quantized how -------------------


@checked(inplace=FLAG, training_branch=BRANCH)
def prepare(
    model: nn.Module,
    inplace: bool = False,
    allow_list: Any = None,
    observer_non_leaf_module_list: Any = None,
    prepare_custom_config_dict: Any = None,
    *,
    example_inputs: Any = None,
    target: str | None = None,
    dynamic_shapes: Any = None,
    training_branch: bool | None = False,
) -> fx.GraphModule:
    """Prepare a model with stubs, and with QConfigs on its modules, for calibration; modules without a QConfig stay in float.

    inplace          whether the caller's object becomes the prepared model, and is returned
    example_inputs   the inputs for the trace; None: the model is prepared by its first batch

    The last three arguments are those of `prepare_fx`.
    """
    given = {
        "allow_list": allow_list,
        "observer_non_leaf_module_list": observer_non_leaf_module_list,
        "prepare_custom_config_dict": prepare_custom_config_dict,
    }
    refuse_given("prepare", given, {}, ARGUMENTS)
    return _eager("prepare", _prepared, model, inplace, example_inputs, target, dynamic_shapes, training_branch)


@checked(inplace=FLAG, training_branch=BRANCH)
def prepare_qat(
    model: nn.Module,
    mapping: Any = None,
    inplace: bool = False,
    *,
    example_inputs: Any = None,
    target: str | None = None,
    dynamic_shapes: Any = None,
    training_branch: bool | None = None,
) -> fx.GraphModule:
    """Prepare such a model for training, in state TRAIN and in train mode; what forward computes only there is kept if it can be traced.

    Its parameters are those of the float model, so that an optimizer may be made before or after, and before the first batch.
    """
    refuse_given("prepare_qat", {"mapping": mapping}, {}, ARGUMENTS)
    return _eager("prepare_qat", _prepared_to_train, model, inplace, example_inputs, target, dynamic_shapes, training_branch)


@checked(inplace=FLAG, remove_qconfig=FLAG, is_reference=FLAG, use_precomputed_fake_quant=FLAG)
def convert(
    module: fx.GraphModule,
    mapping: Any = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    is_reference: bool = False,
    convert_custom_config_dict: Any = None,
    use_precomputed_fake_quant: bool = False,
) -> fx.GraphModule:
    """Return the integer graph of a model that `prepare` or `prepare_qat` returned; with `inplace` the caller's object becomes it."""
    given = {
        "mapping": mapping,
        "is_reference": is_reference,
        "convert_custom_config": convert_custom_config_dict,
        "use_precomputed_fake_quant": use_precomputed_fake_quant,
    }
    refuse_given("convert", given, dict.fromkeys(("is_reference", "use_precomputed_fake_quant"), False), ARGUMENTS)
    integer = converted(module)
    if not inplace:
        return integer
    become(module, integer)
    return module


@checked(inplace=FLAG)
def fuse_modules(
    model: nn.Module, modules_to_fuse: Any, inplace: bool = False, fuser_func: Any = None, fuse_custom_config_dict: Any = None
) -> nn.Module:
    """Return the model unchanged: operators are fused when it is prepared, whether they are listed or not."""
    given = {"fuser_func": fuser_func, "fuse_custom_config": fuse_custom_config_dict}
    refuse_given("fuse_modules", given, {}, ARGUMENTS)
    return model


fuse_modules_qat = fuse_modules


@checked(inplace=FLAG)
def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Any = None,
    dtype: Any = None,
    mapping: Any = None,
    inplace: bool = False,
    *,
    example_inputs: Any = None,
    target: str | None = None,
    dynamic_shapes: Any = None,
) -> fx.GraphModule:
    """Return the integer graph of a model with linear and recurrent layers quantized at run time; everything else stays in float.

    qconfig_spec    module classes and names, or a dict from these to dynamic QConfigs; None: nn.Linear, and the recurrent layers and cells
    dtype           PyTorch's qint8, or None, which is equivalent
    inplace         whether the caller's object becomes the integer graph, and is returned
    example_inputs  the inputs for the trace; None: the model is traced with its first batch
    dynamic_shapes  as `fxquant.prepare` takes it

    An LSTM is unrolled to its steps: every input must have the sequence length of the example.
    """
    refuse_given("quantize_dynamic", {"mapping": mapping}, {}, ARGUMENTS)
    quantize = functools.partial(_dynamic, dynamic_mapping(model, qconfig_spec, dtype), target, dynamic_shapes)
    return prepared_in_place(model, inplace, example_inputs, quantize, "quantize_dynamic", keeps=False)  # type: ignore[no-any-return]


# ---- shared helpers -----------------------------------------------------------------------------------------------------


def _prepared(
    called: str,
    model: nn.Module,
    qconfigs: Any,
    example_inputs: Any,
    custom: Any,
    target: str | None,
    dynamic_shapes: Any,
    training_branch: bool | None,
) -> fx.GraphModule:
    if example_inputs is None:
        raise ConfigurationError(
            f"{called} needs example_inputs",
            because="the model is traced with them, for its shapes",
            remedy=f"pass one batch of its inputs: {called}(…, example_inputs=(x,))",
        )
    settings = settings_of(custom)
    whole = {
        name: settings.pop(name, ())
        for name in (
            "non_traceable_module_names",
            "non_traceable_module_name",
            "non_traceable_module_classes",
            "non_traceable_module_class",
        )
    }
    settings.pop("preserved_attributes", None)
    for name in settings:
        raise ARGUMENTS.get(name, Refusal("it is unknown", "leave it out")).error(
            f"{called}(prepare_custom_config={{{name!r}: …}}) cannot be done"
        )
    names = {*whole["non_traceable_module_names"], *whole["non_traceable_module_name"]}
    kinds = (*whole["non_traceable_module_classes"], *whole["non_traceable_module_class"])
    own = with_own_qconfigs(model)
    leaf = (lambda module, path: path in names or isinstance(module, kinds) or default_leaf(module, path)) if names or kinds else None
    graph = traced(called, own, example_inputs, dynamic_shapes, training_branch, leaf)
    prepared = fxq.prepare(graph, example_inputs, target or engine_target(), mapping_of(qconfigs, graph))
    keep_shapes(prepared, example_inputs)
    take_checkpoints(prepared)
    return prepared


def _prepared_to_train(called: str, model: nn.Module, *rest: Any) -> fx.GraphModule:
    prepared = _prepared(called, model, *rest)
    fxq.set_state(prepared, State.TRAIN)
    return prepared.train()


def _eager(called: str, prepare: Any, model: nn.Module, inplace: bool, example_inputs: Any, *rest: Any) -> fx.GraphModule:
    """Return the prepared model of a model with attributes `qconfig`: now, or with its first batch if there are no example inputs."""
    by_attributes = functools.partial(_with_attributes, prepare, called, rest)
    return prepared_in_place(model, inplace, example_inputs, by_attributes, called, keeps=True)  # type: ignore[no-any-return]


def _with_attributes(prepare: Any, called: str, rest: Any, model: nn.Module, example_inputs: Any) -> fx.GraphModule:
    return prepare(called, model, fxq.QConfigMapping(default=None), example_inputs, None, *rest)  # type: ignore[no-any-return]


def _dynamic(rules: fxq.QConfigMapping, target: str | None, dynamic_shapes: Any, model: nn.Module, example_inputs: Any) -> fx.GraphModule:
    return converted(_prepared("quantize_dynamic", model, rules, example_inputs, None, target, dynamic_shapes, False))
