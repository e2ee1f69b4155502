"""An integer graph as ONNX, style "exact": standard operators, every value a whole number, equal bits everywhere.

Requantization, table look-up and the splitting of wide sums are each one node that calls a model-local
function. Every node of the integer graph is a value of the same name in the ONNX graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper
from torch import fx

from fxquant.backends.emitter import DOMAIN, Emitter, value_info
from fxquant.backends.float_export import FloatRegions
from fxquant.backends.metadata import write_metadata
from fxquant.errors import ConfigurationError, ExportError
from fxquant.graph import TensorFact, annotation, fact, qparams, resolve
from fxquant.primitives import PRIMITIVES, Primitive
from fxquant.primitives.boundary import dequantize, quantize
from fxquant.version import __version__

IR_VERSION_OF_FUNCTIONS = 8  # the first in which a model can have functions of its own


class Writer:
    """Walks an integer graph once. Other styles write primitives in their own way."""

    style = "exact"

    def __init__(self, integer: fx.GraphModule, io: str, opset: int) -> None:
        self.integer, self.io, self.opset = integer, io, opset
        self.emitter = Emitter({}, opset)
        self.inputs: list[onnx.ValueInfoProto] = []
        self.values: dict[fx.Node, Any] = {}  # names of values, or constant tensors
        self.tensors: dict[str, dict[str, Any]] = {}
        self.infos: list[onnx.ValueInfoProto] = []
        self.sources: dict[str, str] = {}  # the quantized tensor that an input becomes, or an output was

    def write(self, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> onnx.ModelProto:
        placeholders = [node for node in self.integer.graph.nodes if node.op == "placeholder"]
        names = _names(input_names, [node.name for node in placeholders], "input_names")
        regions = FloatRegions(self.integer, self.opset)
        for node in self.integer.graph.nodes:
            self.emitter.scope, self.emitter.count = node.name, 0
            if node.op == "placeholder":
                self._placeholder(node, names[node.name])
            elif node.op == "get_attr":
                self.values[node] = resolve(self.integer, str(node.target))
            elif node.op == "call_function" and node.target in PRIMITIVES:
                self._primitive(node)
            elif node.op != "output":
                regions.emit(node, self.emitter, self.values)
        outputs = self._outputs(output_names)
        graph = helper.make_graph(
            self.emitter.nodes,
            "fxquant",
            self.inputs,
            outputs,
            self.emitter.initializers,
            value_info=[info for info in self.infos if info.name not in {o.name for o in outputs}],
        )
        functions = [*(function for function, _ in self.emitter.functions.values()), *regions.functions]
        own = [helper.make_opsetid(DOMAIN, 1)] if self.emitter.functions else []
        standard = helper.make_opsetid("", self.opset)
        oldest: int = helper.find_min_ir_version_for([standard])
        model = helper.make_model(
            graph,
            opset_imports=[standard, *own, *regions.opsets],
            functions=functions,
            producer_name="fxquant",
            producer_version=__version__,
            ir_version=max(oldest, IR_VERSION_OF_FUNCTIONS) if functions else oldest,
        )
        write_metadata(model, self.metadata(outputs))
        return model

    def metadata(self, outputs: list[onnx.ValueInfoProto]) -> dict[str, Any]:
        """What the file says about itself."""
        return {
            "version": __version__,
            "style": self.style,
            "io": self.io,
            "target": self.integer.meta["target"].name,
            "inputs": [_interface(info, self.sources) for info in self.inputs],
            "outputs": [_interface(info, self.sources) for info in outputs],
            "tensors": self.tensors,
            "float": _in_float(self.integer),
            "session_options": {},
        }

    def _placeholder(self, node: fx.Node, name: str) -> None:
        if self.io == "integer":
            others = [user.name for user in node.users if user.target is not quantize]
            if others:
                raise ExportError(
                    f"io='integer' cannot be used: the input {node.name!r} is also read as a real number",
                    node=node,
                    because=f"{', '.join('%' + other for other in others)} stays in float",
                    remedy="export with io='float'",
                )
            if len(node.users) > 1:
                raise ExportError(
                    f"io='integer' cannot be used: the input {node.name!r} is quantized on {len(node.users)} scales",
                    node=node,
                    because=f"{', '.join('%' + user.name for user in node.users)} are read by operators that limit it to different ranges",
                    remedy="export with io='float', or limit the input once, before anything else reads it",
                )
        self.values[node] = name
        if self.io == "float":
            self._declare_input(name, fact(node))

    def _declare_input(self, name: str, known: Any) -> None:
        if not isinstance(known, TensorFact):
            raise ExportError(
                f"the input {name!r} is no tensor", because="an ONNX input is a tensor of known type", remedy="trace with tensors as inputs"
            )
        self.inputs.append(value_info(name, known.dtype, known.shape))
        self.emitter.types[name] = known.dtype

    def _primitive(self, node: fx.Node) -> None:
        record = PRIMITIVES[node.target]  # type: ignore[index]
        if self.io == "integer" and self._stays_integer(node, record.kind):
            return
        result = self.emit(node, record)
        if result is None:
            return
        name = self._named(result, node.name)
        self.values[node] = name
        self._describe(node, name, record.kind)
        self.infos.append(value_info(name, self.emitter.types[name], fact(node).shape))
        operand: Any = node.args[0]
        if node.target is quantize and operand.op == "placeholder":
            self.sources[self.values[operand]] = name
        if node.target is dequantize:
            self.sources[name] = operand.name

    def emit(self, node: fx.Node, record: Primitive) -> str | None:
        """Append what computes a primitive; returns the value's name, or None where a later node computes it too."""
        return record.onnx(self.emitter, *fx.node.map_aggregate(node.args, self.operand))

    def operand(self, value: Any) -> Any:
        """An argument of a primitive as its ONNX form takes it."""
        return self.values[value] if isinstance(value, fx.Node) else value

    def _stays_integer(self, node: fx.Node, kind: str) -> bool:
        """Where the file takes and returns integers, its first and last nodes are left out."""
        operand: Any = node.args[0]
        if node.target is quantize and operand.op == "placeholder":
            name = self.values[node] = self.values[operand]
            self._declare_input(name, fact(node))
            self._describe(node, name, kind)
            self.sources[name] = name
            return True
        if node.target is dequantize and all(user.op == "output" for user in node.users):
            self.values[node] = self.returned_integers(operand)
            self.sources[self.values[node]] = self.values[operand]
            return True
        return False

    def returned_integers(self, node: fx.Node) -> str:
        """The value of a quantized tensor, as the file returns it if it returns integers."""
        return str(self.values[node])

    def _named(self, result: str, name: str) -> str:
        """The value under its graph name."""
        last = self.emitter.nodes[-1] if self.emitter.nodes else None
        if last is None or last.output[0] != result:
            result = self.emitter.node("Identity", result)
            last = self.emitter.nodes[-1]
        last.output[0] = last.name = name
        self.emitter.types[name] = self.emitter.types.pop(result)
        return name

    def _describe(self, node: fx.Node, name: str, kind: str) -> None:
        entry: dict[str, Any] = {"kind": kind}
        known = qparams(node)
        if known is not None:
            entry.update(scale=known.scale, dtype=known.dtype)
            if known.axis is not None:
                entry.update(axis=known.axis)
        if kind == "quantized":
            entry.update(storage=str(self.emitter.types[name]).removeprefix("torch."), zero_point=self.zero_point(name))
        self.tensors[name] = entry

    def zero_point(self, name: str) -> int:
        """What stands for 0 in a quantized value."""
        return 0

    def _outputs(self, output_names: Sequence[str] | None) -> list[onnx.ValueInfoProto]:
        returned: list[fx.Node] = []
        fx.map_arg(next(n for n in reversed(list(self.integer.graph.nodes)) if n.op == "output").args[0], returned.append)
        defaults = [str(self.values[node]) for node in returned]
        wanted = list(output_names) if output_names is not None else defaults
        if len(wanted) != len(returned):
            raise ConfigurationError(
                f"output_names has {len(wanted)} names", because=f"the model has {len(returned)} outputs", remedy="pass one name per output"
            )
        outputs, taken = [], {info.name for info in self.inputs}
        for node, value, name in zip(returned, defaults, wanted, strict=True):
            while name in taken:
                name += "_output"
            taken.add(name)
            if name != value:
                self.emitter.nodes.append(helper.make_node("Identity", [value], [name], name=name))
                if value in self.sources:
                    self.sources[name] = self.sources[value]
            known: TensorFact = fact(node)
            outputs.append(value_info(name, self.emitter.types[value], known.shape))
        return outputs


def _in_float(integer: fx.GraphModule) -> dict[str, str]:
    """Why the operators outside of the integer part are there, by name."""
    specs = {node.name: annotation(node) for node in integer.graph.nodes if node.target not in PRIMITIVES}
    return {name: spec.because for name, spec in specs.items() if spec is not None and spec.dtype is None}


def _interface(info: onnx.ValueInfoProto, sources: dict[str, str]) -> dict[str, Any]:
    """An input or output for the metadata."""
    kind = info.type.tensor_type
    shape = [size.dim_param or size.dim_value for size in kind.shape.dim]
    entry = {"name": info.name, "dtype": onnx.TensorProto.DataType.Name(kind.elem_type).lower(), "shape": shape}
    return {**entry, "tensor": sources[info.name]} if info.name in sources else entry


def _names(given: Sequence[str] | None, defaults: list[str], what: str) -> dict[str, str]:
    if given is not None and len(given) != len(defaults):
        raise ConfigurationError(
            f"{what} has {len(given)} names", because=f"the model has {len(defaults)} inputs", remedy="pass one name per input"
        )
    return dict(zip(defaults, given or defaults, strict=True))
