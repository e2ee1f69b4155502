"""PyTorch's quantization of exported programs (PT2E): its functions, and two of its quantizers as rules for targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

import fxquant as fxq
from fxquant import backends
from fxquant.compat.common import refused, unknown, unserved
from fxquant.compat.deferred import converted
from fxquant.compat.mirror import MissingName
from fxquant.compat.torch_ao import PROGRAM, TABLES
from fxquant.compat.torch_ao.functions import takes
from fxquant.compat.torch_ao.reading import BITS
from fxquant.compat.torch_ao.specifications import annotate_decisions, annotations_mapping, report_unshared
from fxquant.frontend.entry import is_unpacked
from fxquant.quantization.spec import State
from fxquant.support.arguments import FLAG, checked


class Quantizer:
    """Rules for the operators of an exported program: a global config, and configs by type of module or function and by module name.

    torchao's own `prepare_pt2e` takes it as well: it then annotates the operators that are integer on the target. What torchao makes of
    them rounds a float model; the integers of the target are those of `fxquant.convert`.

    target   the target of the integers
    """

    target = "x86"

    def __init__(self) -> None:
        self.mapping = fxq.QConfigMapping(default=None)

    def set_global(self, quantization_config: fxq.QConfig | None) -> Quantizer:
        """Set how operators are quantized that no other rule covers."""
        self.mapping.set_global(quantization_config)
        return self

    def set_module_name(self, module_name: str, quantization_config: fxq.QConfig | None) -> Quantizer:
        """Set how a module is quantized; None keeps it in float."""
        self.mapping.set_module_name(module_name, quantization_config)
        return self

    def set_module_type(self, module_type: Any, quantization_config: fxq.QConfig | None) -> Quantizer:
        """Set how modules of a class are quantized; None keeps them in float.

        A program has operators and no classes: a class is translated to PyTorch's functions that its modules call.
        """
        function = getattr(nn.functional, getattr(module_type, "__name__", "").lower(), module_type)
        return self.set_function_type(function, quantization_config)

    def set_function_type(self, function_type: Any, quantization_config: fxq.QConfig | None) -> Quantizer:
        """Set how calls of a function, or of an ATen operator, are quantized; None keeps them in float."""
        self.mapping.set_object_type(function_type, quantization_config)
        return self

    def transform_for_annotation(self, model: Any) -> Any:
        """Return the graph of a program unchanged."""
        return model

    def annotate(self, model: Any) -> Any:
        """Annotate the graph of a program in place, and return it: inputs, weights and results of integer operators."""
        annotate_decisions(model, self.target, self.mapping)
        return model

    def validate(self, model: Any) -> None:
        """Accept every graph."""

    def prepare_obs_or_fq_callback(self, model: Any, edge_or_node_to_obs_or_fq: Any) -> None:
        """Change no observer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingName(
            f"{type(self).__name__} has no {name}",
            because="it holds rules for a target, which finds the patterns of operators itself",
            remedy="call set_global, set_module_name, set_module_type or set_function_type, or pass torchao's own quantizer",
        )

    set_module_name_qconfig = set_module_name
    set_module_type_qconfig = set_module_type
    set_function_type_qconfig = set_operator_type = set_object_type = set_function_type


class X86InductorQuantizer(Quantizer):
    """Rules for the target "x86": uint8 activations with a zero point, and per-channel int8 weights."""


class XNNPACKQuantizer(Quantizer):
    """A quantizer with the rules of X86InductorQuantizer; a config says whether a weight has one scale or one for each output channel."""

    target = "xnnpack"


class BpuQuantizer(Quantizer):
    """Rules for a march of a BPU: every operator has the target's usual dtypes, except where a rule says otherwise.

    target   the march, as "bayes-e"
    """

    def __init__(self, target: str = "bayes-e") -> None:
        self.target, self.mapping = backends.get(target).name, fxq.QConfigMapping()


def get_default_x86_inductor_quantization_config(is_qat: bool = False, is_dynamic: bool = False, reduce_range: bool = False) -> fxq.QConfig:
    """Return uint8 activations and per-channel int8 weights. `reduce_range` has no effect: accumulators are proved to fit."""
    return fxq.QConfig(dynamic=is_dynamic)


def get_symmetric_quantization_config(
    is_per_channel: bool = False, is_qat: bool = False, is_dynamic: bool = False, act_qmin: int = -128, act_qmax: int = 127,
    weight_qmin: int = -127, weight_qmax: int = 127,
) -> fxq.QConfig:  # fmt: skip
    """Return activations and symmetric weights of 8 or 4 bits, whichever the ranges have. Raises ConfigurationError for other ranges."""
    activation, weight = BITS.get(act_qmax - act_qmin + 1), BITS.get(weight_qmax - weight_qmin + 1)
    if activation not in (4, 8) or weight not in (4, 8):
        raise unserved("get_symmetric_quantization_config", "weight_qmax", "integers have 4 or 8 bits, whole", "leave the ranges out")
    config = fxq.ActivationConfig("int4") if activation == 4 else fxq.ActivationConfig()
    return fxq.QConfig(config, fxq.WeightConfig(f"int{weight}", per_channel=is_per_channel), dynamic=is_dynamic)


def _prepared(called: str, model: Any, quantizer: Any, target: str | None, train: bool) -> fx.GraphModule:
    program: Any = getattr(model, "__dict__", {}).get(PROGRAM, model)
    if type(program) is not torch.export.ExportedProgram:
        raise refused("prepare_pt2e", called=called, kind=type(model).__name__)
    args, kwargs = program.example_inputs if program.example_inputs is not None else ((), {})
    inputs: Any = dict(kwargs) if kwargs and not args else tuple(args)
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    fixed = all(isinstance(size, int) for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    options = fxq.Options(dynamic_shapes={} if fixed else None)
    shared: list[Any] = []
    if isinstance(quantizer, Quantizer):
        target, mapping = target or quantizer.target, quantizer.mapping
    elif hasattr(quantizer, "annotate"):
        mapping, shared = annotations_mapping(quantizer, program, inputs, options, train)
    else:
        raise unknown("quantizer", quantizer, "X86InductorQuantizer, XNNPACKQuantizer, BpuQuantizer, or an object with `annotate`")
    prepared = fxq.prepare(program, inputs, target or "x86", mapping, options=options)  # type: ignore[arg-type]
    report_unshared(called, prepared, shared)
    return prepared


@checked()
def prepare_pt2e(model: Any, quantizer: Any, *, target: str | None = None) -> fx.GraphModule:
    """Prepare an exported program for calibration, in state CALIBRATE. See `fxquant.prepare`.

    quantizer   one of this module, or one with a method `annotate`, whose annotations are read
    target      what to compile for; None: what the quantizer is for, or "x86"
    """
    return _prepared("prepare_pt2e", model, quantizer, target, train=False)


@checked()
def prepare_qat_pt2e(model: Any, quantizer: Any, *, target: str | None = None) -> fx.GraphModule:
    """Prepare an exported program for quantization-aware training: a model in state TRAIN and train mode; arguments of `prepare_pt2e`."""
    prepared = _prepared("prepare_qat_pt2e", model, quantizer, target, train=True)
    fxq.set_state(prepared, State.TRAIN)
    return prepared.train()


@takes(use_reference_representation=FLAG, fold_quantize=FLAG)
def convert_pt2e(model: fx.GraphModule) -> fx.GraphModule:
    """Return the integer graph of a prepared program. Weights are integers, with or without `fold_quantize`."""
    return converted(model)


def move_exported_model_to_eval(model: nn.Module) -> nn.Module:
    """Return the model in eval mode: batch norms use running statistics, and dropouts drop nothing."""
    return _own("move_exported_model_to_eval", model) or model.eval()


def move_exported_model_to_train(model: nn.Module) -> nn.Module:
    """Return the model in train mode."""
    return _own("move_exported_model_to_train", model) or model.train()


def allow_exported_model_train_eval(model: nn.Module) -> nn.Module:
    """Return a prepared model unchanged: it supports `train` and `eval` itself."""
    return _own("allow_exported_model_train_eval", model) or model


def _own(called: str, model: nn.Module) -> Any:
    """Return what PyTorch's own function makes of the module of a program that is not prepared; None for any other model."""
    if not is_unpacked(model):
        return None
    for module in (*TABLES.own_modules("torchao.quantization.pt2e"), *TABLES.own_modules("")):
        if hasattr(module, called):
            return getattr(module, called)(model)
    raise refused("move_exported_model", called=called)
