"""Rules by node for the annotations that a Quantizer of PyTorch's, or of a user's own, writes on an exported program.

docs/guide/from-torch-ao.md has the table. A node that is annotated and has no specification is a part of a pattern: its rule is the
target's usual config, and that of the pattern's last part counts.
"""

from __future__ import annotations

import copy
import functools
import importlib
from dataclasses import fields
from typing import Any

import torch
from torch import fx

import fxquant as fxq
from fxquant.compat.common import refused
from fxquant.compat.torch_ao.reading import Asked, activation, is_dynamic
from fxquant.compat.torch_ao.reading import weight as weight_config
from fxquant.ir.graph import fused
from fxquant.numerics.grids import ACTIVATION_TYPES, IntType
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import ActivationConfig, QConfig, QConfigMapping, WeightConfig
from fxquant.support import logger

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
    own = _grid(node, marks, node)
    asked_for = (_grid(node, marks, (node, user)) for user in node.users if user in marks)
    return own or next((grid for grid in asked_for if grid is not None), None)


# ---- the other way: a target's decisions as annotations for torchao ----------------------------------------------------------------


def annotate_decisions(model: Any, target: str, mapping: QConfigMapping) -> None:
    """Annotate the operators of a program's graph that are integer on a target, with its dtypes, for the functions of torchao."""
    quantizer, observers = (importlib.import_module(f"torchao.quantization.pt2e{part}") for part in (".quantizer", ""))

    def spec(dtype: IntType, observer: Any, scheme: Any, **axis: int) -> Any:
        kind = torch.uint8 if dtype.affine else torch.int16 if dtype.bits == 16 else torch.int8
        return quantizer.QuantizationSpec(kind, observer, dtype.low, dtype.high, scheme, **axis)

    def grid(dtype: IntType) -> Any:
        return spec(dtype, observers.HistogramObserver, torch.per_tensor_affine if dtype.affine else torch.per_tensor_symmetric)

    values = [node.meta["val"] for node in model.graph.find_nodes(op="placeholder")]
    inputs = tuple(torch.zeros([int(size) for size in value.shape], dtype=value.dtype, device="cpu") for value in values)
    program: Any = torch.export.export(copy.deepcopy(model), inputs)
    options, calls = fxq.Options(dynamic_shapes={}), _calls(model)
    prepared, named = fxq.prepare(program, inputs, target, mapping, options=options), _by_name(program, inputs, options, calls)
    decided = {node.name: node for node in prepared.graph.nodes}
    grids: dict[fx.Node, Any] = {}
    usual = grid(ACTIVATION_TYPES[prepared.meta["target"].default_activation])
    for name, operator in quantized_operators(prepared).items():
        nodes = sorted((named[each] for each in (name, *fused(decided[name])) if each in named), key=calls.index)
        if not nodes or operator.plain:
            continue
        arguments = _arguments(nodes[0])
        weight = arguments.get("weight")
        read = {node: grids.get(node, usual) for node in nodes[0].all_input_nodes if node not in (weight, arguments.get("bias"))}
        if isinstance(weight, fx.Node):
            dtype, axis = operator.weight_quantizer.dtype, int("transpose" in str(nodes[0].target))
            read[weight] = spec(dtype, observers.PerChannelMinMaxObserver, torch.per_channel_symmetric, ch_axis=axis)
        for node in nodes:
            node.meta[KEY] = quantizer.QuantizationAnnotation(read if node is nodes[0] else {}, _annotated=True)
        if operator.owns_output and operator.output.dtype.bits <= 16:
            nodes[-1].meta[KEY].output_qspec = grids[nodes[-1]] = grid(operator.output.dtype)
        elif not operator.owns_output and read:  # it passes values on
            grids[nodes[-1]] = next(iter(read.values()))
