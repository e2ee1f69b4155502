"""Operators that stay in float, as ONNX: PyTorch's own exporter writes them, one region at a time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.errors import ExportError
from fxquant.graph import BATCH_SIZES, BatchDim, TensorFact, fact, resolve
from fxquant.primitives import PRIMITIVES

OLDEST_OPSET = 18  # that PyTorch's exporter writes in every version


class FloatRegions:
    """The maximal runs of consecutive float nodes of an integer graph, each exported when its first node is met.

    Consecutive in the graph's order means that no value leaves a region and comes back.
    """

    def __init__(self, integer: fx.GraphModule, opset: int) -> None:
        self.integer, self.opset = integer, opset
        self.opsets: list[onnx.OperatorSetIdProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.exported: dict[Any, onnx.ModelProto] = {}  # of regions that differ in nothing but names
        self.region_of: dict[fx.Node, list[fx.Node]] = {}
        current: list[fx.Node] = []
        for node in integer.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.op == "call_function" and node.target in PRIMITIVES:
                current = []
                continue
            current.append(node)
            self.region_of[node] = current

    def emit(self, node: fx.Node, emitter: Any, values: dict[fx.Node, Any]) -> None:
        """Append the region that begins with this node; nothing for any later node of it."""
        region = self.region_of[node]
        if node is not region[0]:
            return
        inside = set(region)
        inputs = list(dict.fromkeys(o for n in region for o in n.all_input_nodes if o not in inside and o.op != "get_attr"))
        outputs = [n for n in region if any(user not in inside for user in n.users)]
        key = _key(self.integer, region, inputs, outputs)
        if key is None or key not in self.exported:
            self.exported[key] = self._export(region, inputs, outputs)
        exported = self.exported[key]
        self._append(exported, emitter, [values[i] for i in inputs], outputs)
        for output in outputs:
            values[output] = output.name

    def _export(self, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> onnx.ModelProto:
        graph = fx.Graph()
        environment = {node: graph.placeholder(node.name) for node in inputs}
        for node in region:
            for operand in node.all_input_nodes:
                if operand.op == "get_attr" and operand not in environment:
                    environment[operand] = graph.node_copy(operand)
            environment[node] = graph.node_copy(node, environment.__getitem__)
        graph.output(tuple(environment[node] for node in outputs))
        part = fx.GraphModule(self.integer, graph).eval()  # holds only what this region reads
        examples = tuple(_example(fact(node)) for node in inputs)
        shapes = tuple(_dynamic(fact(node)) for node in inputs)
        try:
            with _quiet():
                program: Any = torch.onnx.export(
                    part,
                    examples,
                    dynamo=True,
                    opset_version=max(self.opset, OLDEST_OPSET),
                    dynamic_shapes=shapes,
                    verbose=False,
                    input_names=[f"region_input_{i}" for i in range(len(inputs))],
                    output_names=[node.name for node in outputs],
                )
                if self.opset < OLDEST_OPSET:
                    from onnxscript.version_converter import convert_version  # takes a second, and is seldom wanted

                    convert_version(program.model, self.opset, fallback=True)
        except Exception as error:
            raise ExportError(
                "an operator that stays in float cannot be exported",
                node=region[0],
                because=f"PyTorch's ONNX exporter says: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                remedy="replace the operator, or cut the model before it",
            ) from error
        model: onnx.ModelProto = program.model_proto
        written = next(entry.version for entry in model.opset_import if entry.domain == "")
        if written != self.opset:  # the conversion says nothing if it cannot
            raise ExportError(
                f"an operator that stays in float cannot be exported with opset={self.opset}",
                node=region[0],
                because=f"PyTorch's ONNX exporter writes opset {written}, and cannot convert it",
                remedy=f"export with opset={written} or later",
            )
        return model

    def _append(self, model: onnx.ModelProto, emitter: Any, inputs: list[str], outputs: list[fx.Node]) -> None:
        renamed = dict(zip((i.name for i in model.graph.input), inputs, strict=True))
        renamed.update({o.name: node.name for o, node in zip(model.graph.output, outputs, strict=True)})

        def name(value: str) -> str:
            return renamed.setdefault(value, f"{outputs[0].name}/{value}") if value else value

        for initializer in model.graph.initializer:
            copied_tensor = onnx.TensorProto()
            copied_tensor.CopyFrom(initializer)
            copied_tensor.name = name(initializer.name)
            emitter.initializers.append(copied_tensor)
        for node in model.graph.node:
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            copied.input[:] = [name(value) for value in node.input]
            copied.output[:] = [name(value) for value in node.output]
            copied.name = f"{outputs[0].name}/{node.name}"
            emitter.nodes.append(copied)
        known = {f.name for f in self.functions}
        self.functions.extend(f for f in model.functions if f.name not in known)
        domains = {o.domain for o in self.opsets} | {""}
        self.opsets.extend(helper.make_opsetid(o.domain, o.version) for o in model.opset_import if o.domain not in domains)
        for node in outputs:
            value = fact(node)
            if isinstance(value, TensorFact):
                emitter.types[node.name] = value.dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's remarks about its own insides are kept from the user; its errors are not."""
    loggers = {logging.getLogger(name): level for name, level in (("torch.onnx", logging.ERROR), ("onnxscript", logging.CRITICAL))}
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def _key(integer: fx.GraphModule, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Any:
    """What determines a region's export besides names; None for a region that reads parameters or buffers."""
    index = {node: position for position, node in enumerate([*inputs, *region])}
    modules = {node: resolve(integer, str(node.target)) for node in region if node.op == "call_module"}
    if any(module.state_dict() for module in modules.values()) or any(o not in index for node in region for o in node.all_input_nodes):
        return None
    calls = [
        (node.op, modules.get(node, node.target), fx.map_arg((node.args, node.kwargs), lambda operand: index[operand])) for node in region
    ]
    return repr([calls, [str(fact(node)) for node in inputs], [index[node] for node in outputs]])


def _example(value: Any) -> Tensor | int:
    if isinstance(value, TensorFact):
        return torch.zeros(value.at(BATCH_SIZES[0]), dtype=value.dtype)
    return value.at(BATCH_SIZES[0]) if isinstance(value, BatchDim) else int(value)


def _dynamic(value: Any) -> Any:
    if not isinstance(value, TensorFact):
        return torch.export.Dim.DYNAMIC if isinstance(value, BatchDim) else None
    return {index: torch.export.Dim.DYNAMIC for index, size in enumerate(value.shape) if isinstance(size, BatchDim)} or None
