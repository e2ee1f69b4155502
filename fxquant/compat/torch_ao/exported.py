"""PyTorch's quantization of exported programs (PT2E): its functions, and two of its quantizers as rules for targets."""

from __future__ import annotations

import functools
from dataclasses import fields
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
from fxquant.compat.torch_ao.reading import BITS, Asked, activation, is_dynamic
from fxquant.compat.torch_ao.reading import weight as weight_config
from fxquant.frontend.entry import is_unpacked
from fxquant.ir.graph import fused
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import ActivationConfig, QConfig, QConfigMapping, State, WeightConfig
from fxquant.support import logger
from fxquant.support.arguments import FLAG, checked


class Quantizer:
    """Rules for the operators of an exported program: a global config, and configs by type of module or function and by module name.

    It is for `prepare_pt2e` of this package: torchao's own takes its own quantizers.

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        because = "it holds rules for a target, which finds the patterns of operators itself"
        remedy = "call set_global, set_module_name, set_module_type or set_function_type, or pass torchao's own quantizer"
        raise MissingName(f"{type(self).__name__} has no {name}", because=because, remedy=remedy)

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
    prepared = fxq.prepare(program, inputs, target or "x86", mapping, options=options)
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
    """Set the model to train mode, in place, and return it; an exported module that is not prepared is left to PyTorch's function."""
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


# ---- Rules by node for the annotations that a Quantizer writes on an exported program --------------------------------
#
# docs/guide/from-torch-ao.md has the table. A node that is annotated and has no specification is a part of a pattern: its rule is the
# target's usual config, and that of the pattern's last part counts.
Pair = tuple[str, str]  # the names of two nodes
KEY = "quantization_annotation"  # in the meta of a node


def annotations_mapping(
    quantizer: Any, program: torch.export.ExportedProgram, inputs: Any, options: fxq.Options, train: bool
) -> tuple[QConfigMapping, list[Pair]]:
    """Let a Quantizer annotate the program's graph; return its annotations as rules by node, and the pairs of nodes that share a scale.

    What has no annotation stays in float.

    Raises ConfigurationError for an annotation that no QConfig can say, and for a Quantizer that rewrites the graph.
    """
    model = program.module()
    before = _calls(model)
    names = {node.name: name for name, node in _by_name(program, inputs, options, before).items()}
    changed = quantizer.transform_for_annotation(model) if hasattr(quantizer, "transform_for_annotation") else model
    if [node.name for node in _calls(changed)] != [node.name for node in before]:
        raise refused("transform_for_annotation", kind=type(quantizer).__name__)
    for norm in [] if train else [node for node in changed.graph.nodes if "batch_norm" in str(node.target)]:
        if len(norm.args[0].users) == 1 and "weight" in _arguments(norm.args[0]):  # a Quantizer sees the norm's readers
            norm.replace_all_uses_with(norm.args[0])
            changed.graph.erase_node(norm)
    quantizer.annotate(changed)
    quantizer.validate(changed)
    marks = {node: node.meta[KEY] for node in changed.graph.nodes if node.meta.get(KEY) is not None}
    configs = {node: _config(node, marks) for node in marks if node.op == "call_function"}
    specs = [(where, spec) for node, mark in marks.items() for where, spec in ((node, mark.output_qspec), *mark.input_qspec_map.items())]
    pairs = [(where.name, _tensor(spec.edge_or_node).name) for where, spec in specs if hasattr(spec, "edge_or_node")]
    shared = [(names.get(a, a), names.get(b, b)) for a, b in pairs]
    return QConfigMapping(None, names={names[node.name]: config for node, config in configs.items() if config is not None}), shared


def _tensor(where: Any) -> fx.Node:
    return where[0] if isinstance(where, tuple) else where  # type: ignore[no-any-return]


def report_unshared(called: str, prepared: fx.GraphModule, shared: list[Pair]) -> None:
    """Log the pairs of integer tensors of a SharedQuantizationSpec whose scales differ in the prepared model."""
    operators = quantized_operators(prepared)
    quantizers: dict[str, Any] = {}
    for node in prepared.graph.nodes:
        operator = operators.get(str(node.target).removeprefix("quantized."))
        if operator is not None and not operator.plain:
            inputs = (read.name for read in node.all_input_nodes if read.op == "placeholder")
            quantizers.update(dict.fromkeys((node.name, *fused(node), *inputs), operator.output))
    apart = [f"%{a} and %{b}" for a, b in shared if a in quantizers and b in quantizers and quantizers[a] is not quantizers[b]]
    if apart:
        logger.warning("%s: a SharedQuantizationSpec joins operators that compute, which have a scale each: %s", called, ", ".join(apart))


def _by_name(program: Any, inputs: Any, options: fxq.Options, calls: list[fx.Node]) -> dict[str, fx.Node]:
    """Return the calls of a program by their names in fxquant's graphs, where `relu_` is `relu`, so that later numbers differ."""
    traced = [node for node in fxq.trace(program, inputs, options=options).graph.nodes if node.op.startswith("call_")]
    return dict(zip((node.name for node in (traced if len(traced) == len(calls) else calls)), calls, strict=True))


def _calls(model: Any) -> list[fx.Node]:
    return [node for node in model.graph.nodes if node.op == "call_function"]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of an ATen operator by name."""
    schema = getattr(node.target, "_schema", None)
    return {} if schema is None else {**{each.name: value for each, value in zip(schema.arguments, node.args, strict=False)}, **node.kwargs}


def _spec(where: Any, marks: dict[fx.Node, Any]) -> Any:
    """Return the specification of a node's output or, for a pair, of an edge, after all SharedQuantizationSpecs; None if there is none."""
    for _ in range(2 * len(marks) + 1):
        mark = marks.get(where[1] if isinstance(where, tuple) else where)
        spec = None if mark is None else mark.input_qspec_map.get(where[0]) if isinstance(where, tuple) else mark.output_qspec
        if spec is None or not hasattr(spec, "edge_or_node"):
            return spec
        where = spec.edge_or_node
    return None


def _grid(node: fx.Node, marks: dict[fx.Node, Any], where: Any) -> ActivationConfig | None:
    """Return the ActivationConfig for the tensor of a node or of an edge; None for one in float."""
    spec = _spec(where, marks)
    if spec is None or getattr(spec, "dtype", None) in (torch.float32, torch.float):
        return None
    if hasattr(spec, "derive_qparams_fn"):
        raise refused("DerivedQuantizationSpec", name=node.name)
    what = f"the activation on %{node.name}"
    if hasattr(spec, "scale"):
        return activation(Asked(type(spec).__name__, ("FixedQParamsObserver",), spec, learned=False), what)
    return activation(_factory(spec), what)


@functools.lru_cache(maxsize=64)  # equal specifications are equal configs, with observers of a user's own, too
def _factory(spec: Any) -> Any:
    """Return the factory of a QuantizationSpec's observer or fake quantize, with the settings of the specification."""
    settings = {field.name: getattr(spec, field.name) for field in fields(spec) if getattr(spec, field.name) is not None}
    factory = settings.pop("observer_or_fake_quant_ctr")
    if "PerChannel" not in repr(factory):
        settings.pop("ch_axis", None)
    return functools.partial(factory, **settings)


def _config(node: fx.Node, marks: dict[fx.Node, Any]) -> QConfig | None:
    arguments, mark = _arguments(node), marks[node]
    sides = {arguments.get("weight"), arguments.get("bias")} if "weight" in arguments else set()
    by_node, config = mark.input_qspec_map, WeightConfig()
    weighted = by_node.get(arguments.get("weight")) if sides else None
    if weighted is not None:
        factory = _factory(weighted)
        if "PerChannel" in repr(factory) and "transpose" in str(node.target) and weighted.ch_axis == 1:  # its output channels
            factory = functools.partial(factory, ch_axis=0)
        config = weight_config(factory, f"the weight of %{node.name}")
    edges = {source: _spec((source, node), marks) for source in by_node if source not in sides}
    if any(getattr(spec, "is_dynamic", False) and is_dynamic(_factory(spec)) for spec in edges.values()):
        return QConfig(weight=config, dynamic=True)
    read = {source: _grid(node, marks, (source, node)) for source in edges}
    if not any(read.values()) and weighted is None and mark.output_qspec is None and not mark._annotated:
        return None
    entered = [grid for source, grid in read.items() if grid is not None and grid != _output(source, marks)]
    if any(grid != entered[0] for grid in entered):
        raise refused("input_qspec_map", name=node.name, value=len(entered))
    return QConfig(_output(node, marks) or ActivationConfig(), config, entered[0] if entered else None)


def _output(node: fx.Node, marks: dict[fx.Node, Any]) -> ActivationConfig | None:
    """Return the grid of a node's output: its own, or else the first that one of its readers asks for, if it has an annotation itself."""
    if node not in marks:
        return None
    asked_for = (_grid(node, marks, (node, user)) for user in node.users if user in marks)
    return _grid(node, marks, node) or next((grid for grid in asked_for if grid is not None), None)
