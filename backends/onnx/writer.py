"""An integer graph as ONNX, style "exact": standard operators, every value an integer, equal bits everywhere.

Requantization, table look-up and the splitting of wide sums are several nodes each or, if functions are asked for, one node that calls
a model-local function. Every node of the integer graph is a value of equal name in the ONNX graph.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, fx

from fxquant.analysis.recording import returned
from fxquant.backends.onnx.float_export import FloatRegions, rename_values
from fxquant.backends.onnx.loops import Loop
from fxquant.backends.onnx.metadata import PRECISE, write_metadata
from fxquant.backends.onnx.runtime import keep
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir import loops
from fxquant.ir.graph import Size, TensorFact, annotation, fact, fused, resolve, sizes_of_input
from fxquant.ir.integer import channel_exponents, qparams, zero_point
from fxquant.numerics.grids import LARGEST_PAIR, PLAIN_TYPES, largest_pairs
from fxquant.ops.core.form import PER_CHANNEL_OPSET
from fxquant.primitives import PRIMITIVES, Primitive, Role, loop, role_of
from fxquant.primitives.quantization import dequantize, quantize, requantize_real
from fxquant.version import __version__

# ---- The `Emitter` that collects ONNX nodes for the forms of primitives and operators --------------------------------
DOMAIN = "fxquant"
TYPES = {
    torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.float16: TensorProto.FLOAT16, torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8, torch.int16: TensorProto.INT16, torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}  # fmt: skip
# The result has the element type of the input with this index; Cast and the listed constants give theirs themselves.
_TYPE_INPUT = {"Where": 1, "QuantizeLinear": 2, "QLinearConv": 7, "QLinearMatMul": 7}
_FIXED_TYPE = {
    **dict.fromkeys(("IsNaN", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Not", "And", "Or", "Xor"), torch.bool),
    **dict.fromkeys(("ArgMax", "ArgMin", "TopK", "Shape"), torch.int64),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), torch.int32),
    "DequantizeLinear": torch.float32,
}


# Operators that runtimes must not fuse with one of these before a cast of their operand. A Transpose before a product: onnxruntime 1.24 to
# 1.31 fuses the three on x86 processors, and the operating system then ends it (microsoft/onnxruntime#28392). A Pad before a pool:
# onnxruntime makes its zeros the pool's own padding, which no maximum sees; and 1.21 to 1.23 count uneven padding of means wrongly.
_APART = {"MatMul": "Transpose", "MaxPool": "Pad", "AveragePool": "Pad"}


class Emitter:
    """Collects ONNX nodes; implements `fxquant.primitives.Emitter` for a graph or for a function's body.

    Functions are collected in `functions`; where that is None, their bodies are nodes of the graph. No constant gets a name from `taken`.
    """

    def __init__(self, functions: dict[str, onnx.FunctionProto] | None, opset: int, scope: str = "", taken: Collection[str] = ()) -> None:
        self.functions = functions
        self.opset = opset
        self.wide, self.portable = torch.float64, False
        self.scope = scope
        self.taken = taken
        self.outermost = self.nodes = list[onnx.NodeProto]()  # `nodes` are those of a loop while that is written
        self.producers: dict[str, onnx.NodeProto] = {}  # by the value that each computes
        self.types: dict[str, torch.dtype] = {}
        self.converted: dict[Any, str] = {}  # values in another dtype; those that a loop's body computes are not kept after it
        self.dtypes: set[torch.dtype] = set()  # of all that nodes compute, inside functions too
        self.constants: dict[Any, str] = {}
        self.initializers: list[onnx.TensorProto] = []
        self.count = 0

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        attributes = {name: TYPES[value] if isinstance(value, torch.dtype) else value for name, value in attributes.items()}
        if operator in _APART:
            inputs = tuple(self._kept_apart(operator, value) for value in inputs)
        output = self._fresh(operator)
        outputs = [f"{output}/values", output] if operator == "TopK" else [output]  # its second output, the indices, is the result
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, name=output, **attributes))
        self.producers[output] = self.nodes[-1]
        self.types[output] = self._result_type(operator, inputs, attributes)
        self.dtypes.add(self.types[output])
        return output

    def named(self, result: str, name: str) -> str:
        """Give the result of the last node, and the node, another name, and return it."""
        last = self.producers[name] = self.nodes[-1]
        last.output[0] = last.name = name
        self.types[name] = self.types.pop(result)
        return name

    def results(self, operator: str, dtypes: Sequence[torch.dtype], *inputs: str, **attributes: Any) -> list[str]:
        output = self._fresh(operator)
        names = [f"{output}/{index}" for index in range(len(dtypes))]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=output, **attributes))
        self.types.update(zip(names, dtypes, strict=True))
        return names

    def _kept_apart(self, operator: str, value: str) -> str:
        """Return an operand; it gets a barrier if it is a cast of a node that a runtime would fuse with the operator."""
        cast = self.producers.get(value)
        moved = None if cast is None or cast.op_type != "Cast" else self.producers.get(cast.input[0])
        return value if moved is None or moved.op_type != _APART[operator] else self.node("Round", value)

    def _result_type(self, operator: str, inputs: Sequence[str], attributes: dict[str, Any]) -> torch.dtype:
        if operator == "Cast":
            return next(dtype for dtype, code in TYPES.items() if code == attributes["to"])
        return _FIXED_TYPE.get(operator) or self.types[inputs[_TYPE_INPUT.get(operator, 0)]]

    def constant(self, value: Tensor | float | int | list[int], dtype: torch.dtype | None = None) -> str:
        if isinstance(value, float) and dtype is None:
            dtype = torch.float32
        tensor = torch.as_tensor(value, dtype=dtype, device="cpu")
        array = tensor.contiguous().numpy(force=True)
        key = _key(array)
        if key not in self.constants:
            self.constants[key] = self._store(array)
            self.types[self.constants[key]] = tensor.dtype
        return self.constants[key]

    def table(self, value: Tensor) -> str:
        key = _key(value.numpy(force=True))
        lines = None if key in self.constants else _lines(value.cpu())
        if lines is None:
            return self.constant(value)
        first, slope, steps, places, entries = map(self.constant, lines)
        nodes, self.nodes = self.nodes, []
        floors = self.node("Floor", self.node("Add", first, self.node("Mul", slope, steps)))
        flat = self.node("Reshape", self.node("Cast", floors, to=value.dtype), self.constant([-1], torch.int64))
        self.constants[key] = self.node("ScatterElements", flat, places, entries, axis=0) if len(lines[-1]) else flat
        self.outermost[:0], self.nodes = self.nodes, nodes
        return self.constants[key]

    def own_constant(self, value: Tensor) -> str:
        """Return the name of an initializer with this value that no other node shares."""
        name = f"{self.scope}/constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value.contiguous().numpy(force=True), name))
        self.types[name] = value.dtype
        return name

    def _store(self, array: np.ndarray[Any, Any]) -> str:
        name = f"constant_{len(self.constants)}"
        while name in self.taken:
            name += "_"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def call(self, name: str, body: Callable[..., str], *inputs: str) -> str:
        if self.functions is None:
            return body(self, *inputs)
        inner = FunctionEmitter(self.functions, self.opset)
        inner.dtypes, inner.wide, inner.portable = self.dtypes, self.wide, self.portable
        parameters = [f"input_{index}" for index in range(len(inputs))]
        inner.types.update(zip(parameters, (self.types[value] for value in inputs), strict=True))
        result = body(inner, *parameters)
        opsets = [helper.make_opsetid("", self.opset)]
        called = _shared(self.functions, helper.make_function(DOMAIN, name, parameters, [result], inner.nodes, opsets))
        output = self._fresh(called)
        self.nodes.append(helper.make_node(called, list(inputs), [output], name=output, domain=DOMAIN))
        self.types[output] = inner.types[result]
        return output

    def dtype(self, value: str) -> torch.dtype:
        return self.types[value]

    def _fresh(self, operator: str) -> str:
        self.count += 1
        return f"{self.scope}/{operator}_{self.count}" if self.scope else f"{operator}_{self.count}"


def _key(array: np.ndarray[Any, Any]) -> Any:
    return array.dtype.str, array.shape, array.tobytes()


SMALLEST_TABLE, PIECE = 4096, 64  # entries of a table that is written as lines, and of a line


def _lines(table: Tensor) -> tuple[Tensor, ...] | None:
    """Return float32 lines ⌊first + slope · steps⌋ of (pieces, 1) and (PIECE,), and the places and entries of a table that lie on none.

    All sums are multiples of one power of two that float32 holds. None where the table itself has fewer bytes.
    """
    if table.numel() < SMALLEST_TABLE or table.numel() % PIECE:
        return None
    bits = 24 - (int(table.long().abs().max()) + 1).bit_length()
    low, steps = table.long().view(-1, PIECE) << bits, torch.arange(PIECE, device="cpu")

    def ends(slope: Tensor) -> tuple[Tensor, Tensor]:
        begins = low - slope * steps
        return begins.amax(1, True), begins.amin(1, True)

    reach = low[:, -1:] - low[:, :1]
    least, most = (reach - 2**bits) // (PIECE - 1), (reach + 2**bits) // (PIECE - 1)
    while bool((least < most).any()):  # the slope at which the entries of a piece are nearest to one line
        middle = (least + most) // 2
        (top, bottom), (next_top, next_bottom) = ends(middle), ends(middle + 1)
        nearer = next_top - next_bottom < top - bottom
        least, most = torch.where(nearer, middle + 1, least), torch.where(nearer, most, middle)
    sums = (sum(ends(least)) + 2**bits - 1) // 2 + least * steps
    places = ((sums >> bits).flatten() != table).nonzero().flatten()
    lines = sums[:, :1] / 2**bits, least / 2**bits, steps.float(), places.int(), table[places]
    fewer = sum(each.numel() * each.element_size() for each in lines) < table.numel() * table.element_size()
    return lines if fewer and int(sums.abs().max()) <= 2**24 else None


def _shared(functions: dict[str, onnx.FunctionProto], function: onnx.FunctionProto) -> str:
    """Return the name of the one function with this body; a number is appended if another body has that name."""
    name, count = function.name, 1
    while functions.setdefault(function.name, function) != function:
        count += 1
        function.name = f"{name}_{count}"
    return str(function.name)


class FunctionEmitter(Emitter):
    """An emitter for the body of a function, in which constants are nodes."""

    table = Emitter.constant

    def _store(self, array: np.ndarray[Any, Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name


def value_info(
    name: str, dtype: torch.dtype, shape: Sequence[Size], names: Mapping[int, str] = MappingProxyType({})
) -> onnx.ValueInfoProto:
    """Return the type of a value; sizes that vary are symbolic, by the names of dimensions that have one."""

    def symbol(dim: int, size: Size) -> int | str:
        if isinstance(size, int):
            return size
        return names.get(dim) or (str(size).replace("B", "batch") if size.largest is None else f"{name}_size_{dim}")

    dims = [symbol(dim, size) for dim, size in enumerate(shape)]
    if dtype not in TYPES:
        because = f"it is {str(dtype).removeprefix('torch.')}, which has no element type in ONNX that runtimes support"
        raise ExportError(f"the value {name!r} cannot be written", because=because, remedy="convert it to another dtype in forward")
    return helper.make_tensor_value_info(name, TYPES[dtype], dims)


# ---- Products that onnxruntime adds in 16 bits -----------------------------------------------------------------------
#
# On x86 processors with AVX2 or AVX-512 and without VNNI, its kernels for uint8 and int8 (MLAS, QgemmU8S8KernelAvx2 and its like of 1.21 to
# 1.32) begin with vpmaddubsw: products 2j and 2j + 1 of a row are added in 16 bits, which saturate. A row of a convolution is a window with
# its channels last. A depthwise one with as many results as channels has kernels of its own, which are exact, as are int8 times int8 and
# uint8 times uint8. Of an int8 operand between QuantizeLinear and DequantizeLinear the optimiser makes uint8.
_REAL = {"Conv": 1, "Gemm": 1, "MatMul": 1}  # by operator, the index of the second factor
_FACTOR = {**_REAL, "MatMulInteger": 1, "QLinearConv": 3, "QLinearMatMul": 3}


def pairs_fit(e: Emitter) -> bool:
    """Return whether no two products of integer weights among an emitter's nodes can exceed 16 bits together, whatever the operands are."""
    stored = {tensor.name: tensor for tensor in e.initializers if tensor.data_type == TensorProto.INT8}
    nodes = [*e.nodes, *(node for holder in e.nodes for attribute in holder.attribute for node in attribute.g.node)]  # those of loops, too
    real = {node.output[0]: node.input[0] for node in nodes if node.op_type == "DequantizeLinear"}
    factors = [(node, node.input[_FACTOR[node.op_type]]) for node in nodes if node.op_type in _FACTOR]
    read = [(node, real.get(factor, "") if node.op_type in _REAL else factor) for node, factor in factors]
    activations = any(name and name not in stored and e.dtype(name) == torch.int8 for _, name in read)
    # Below opset 13 weights are floats, of which onnxruntime makes integers.
    return e.opset >= PER_CHANNEL_OPSET and not activations and all(_fits(node, stored[name]) for node, name in read if name in stored)


def _fits(node: onnx.NodeProto, stored: onnx.TensorProto) -> bool:
    weight = torch.from_numpy(numpy_helper.to_array(stored).astype(np.int16))
    settings = {attribute.name: attribute.i for attribute in node.attribute}
    if not weight.numel() or ("Conv" in node.op_type and weight.shape[1] == 1 and settings.get("group") == len(weight)):
        return True
    rows = weight if "Conv" in node.op_type or settings.get("transB") else weight.movedim(-2, -1).flatten(0, -2)
    return int(largest_pairs(rows).max()) <= LARGEST_PAIR


# ---- The writer ------------------------------------------------------------------------------------------------------
_WIDE = (Role.ALIGNMENT, Role.ADDITION, Role.MULTIPLICATION, Role.CONVOLUTION)  # whose ONNX forms have the emitter's dtype of wide sums


def _may_be_wide(node: fx.Node) -> bool:
    """Return whether a sum or product is formed beyond 24 bits, or adds two that may be."""
    record = PRIMITIVES[node.target]  # type: ignore[index]
    return record.wide or record.role is Role.ADDITION or record.signature.bind(*node.args, **node.kwargs).arguments.get("wide", False)


def has_kernels(integer: fx.GraphModule) -> bool:
    """Return whether a model's arithmetic requantizes by float32 numbers, as ONNX's integer operators do, which else sum products alone."""
    return "target" in integer.meta and requantize_real in integer.meta["target"].arithmetic.primitives


class Writer:
    """Writes an integer graph in one traversal. Other styles write primitives in their own way."""

    style = "exact"
    in_bytes = False  # whether onnxruntime multiplies bytes for its operators, so that the metadata speaks of processors without VNNI
    renames = True  # whether an inner value gives its name to an input or output that the user calls so

    def __init__(self, integer: fx.GraphModule, io: str, opset: int, functions: dict[str, onnx.FunctionProto] | None = None) -> None:
        self.integer, self.io, self.opset = integer, io, opset
        self.emitter = Emitter(functions, opset, taken={node.name for node in integer.graph.nodes})
        self.emitter.portable = self.style == "exact"
        self.inputs: list[onnx.ValueInfoProto] = []
        self.values: dict[fx.Node, Any] = {}  # names of values, or constant tensors
        self.tensors: dict[str, dict[str, Any]] = {}
        self.infos: list[onnx.ValueInfoProto] = []
        self.loop: Loop | None = None  # that which is being written
        self.sources: dict[str, str] = {}  # the quantized tensor that an input becomes, or that an output was

    @cached_property
    def regions(self) -> FloatRegions:
        """Return the float regions of this file, which PyTorch's exporter writes."""
        return FloatRegions(self.integer, self.opset)

    @cached_property
    def in_int32(self) -> set[fx.Node]:
        """Return sums and products that are int32 beyond 24 bits too, since what reads them requantizes them, or adds such ones."""
        nodes = [node for node in self.integer.graph.nodes if node.op == "call_function" and role_of(node.target) in _WIDE]
        nodes = nodes if self.emitter.portable or has_kernels(self.integer) else []
        chosen = {node for node in nodes if len(node.args) > 1 and fact(node).dtype == torch.int32 and _may_be_wide(node)}

        def is_mixed(node: fx.Node) -> bool:
            adds = role_of(node.target) is Role.ADDITION
            apart = adds and any(operand.op != "get_attr" and operand not in chosen for operand in node.all_input_nodes)
            return apart or any(role_of(user.target) is not Role.REQUANTIZATION and user not in chosen for user in node.users)

        while mixed := set(filter(is_mixed, chosen)):
            chosen -= mixed
        return chosen

    def write(self, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> onnx.ModelProto:
        placeholders = [node.name for node in self.integer.graph.nodes if node.op == "placeholder"]
        names = dict(zip(placeholders, _given(input_names, len(placeholders), "input") or placeholders, strict=True))
        for node in self.integer.graph.nodes:
            self.emitter.scope, self.emitter.count = node.name, 0
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self.values[node] = resolve(self.integer, str(node.target))
            elif node.target is loops.begin:
                self.loop = self.values[node] = Loop(self.emitter, self.infos, node, self.operand(node.args[0]))
            elif self.loop is not None and node.target is loops.end:
                self.loop.close(value_info)
                self.loop = None
            elif node.op == "call_function" and node.target in PRIMITIVES:
                self._primitive(node)
            elif node.op != "output":
                self.regions.emit(node, self.emitter, self.values)
                node_fact = fact(node)
                as_real = any(user.target in PRIMITIVES and PRIMITIVES[user.target].kind == "dynamic" for user in node.users)
                handed = isinstance(node_fact, TensorFact) and (node_fact.dtype in PLAIN_TYPES.values() or as_real)
                if handed and self.values.get(node) == node.name:
                    self.infos.append(value_info(node.name, node_fact.dtype, node_fact.shape))  # `verify` passes it to an integer segment
        graph = self._graph(names, output_names)
        functions = list((self.emitter.functions or {}).values())
        opsets = [helper.make_opsetid("", self.opset), *([helper.make_opsetid(DOMAIN, 1)] if functions else []), *self.regions.opsets]
        versions = {"producer_version": __version__, "ir_version": helper.find_min_ir_version_for(opsets[:1])}
        model = helper.make_model(graph, opset_imports=opsets, functions=functions, producer_name="fxquant", **versions)
        write_metadata(model, self.metadata(list(graph.output)))
        return model

    def metadata(self, outputs: list[onnx.ValueInfoProto]) -> dict[str, Any]:
        return {
            "version": __version__,
            "style": self.style,
            "io": self.io,
            "target": str(self.integer.meta["target"].name) if "target" in self.integer.meta else "",  # a float model has none
            "inputs": [_interface(info, self.sources) for info in self.inputs],
            "outputs": [_interface(info, self.sources) for info in outputs],
            "tensors": self.tensors,
            "float": _in_float(self.integer),
            "provenance": self._provenance(),
            "session_options": {},
            "relies_on_float64": torch.float64 in self.emitter.dtypes,
            **(self._without_vnni() if self.in_bytes else {}),
        }

    def _without_vnni(self) -> dict[str, Any]:
        return {"session_options_without_vnni": {} if pairs_fit(self.emitter) else PRECISE, "relies_on_vnni": self.relies_on_vnni()}

    def relies_on_vnni(self) -> bool:
        """Return whether x86 processors without VNNI compute other results, whatever the session's options."""
        return False

    def _provenance(self) -> dict[str, dict[str, Any]]:
        """Return which values of the float model the described tensors are."""
        provenance: dict[str, dict[str, Any]] = {}
        for node in self.integer.graph.nodes:
            entry = {"fused": list(fused(node)), "exponents": channel_exponents(node)}
            if node.name in self.tensors and any(entry.values()):
                provenance[node.name] = {key: value for key, value in entry.items() if value}
        return provenance

    def _placeholder(self, node: fx.Node) -> None:
        input_fact, name = fact(node), node.name
        real = isinstance(input_fact, TensorFact) and input_fact.dtype.is_floating_point
        self.values[node] = name
        input_fact = self._integers(node) if self.io == "integer" and real and node.users else input_fact
        if not isinstance(input_fact, TensorFact):
            because = "an ONNX input is a tensor of known type"
            raise ExportError(f"the input {name!r} is not a tensor", because=because, remedy="trace with tensor inputs")
        names = {dim: symbol for dim, (symbol, *_) in sizes_of_input(node).items()}
        self.inputs.append(value_info(name, input_fact.dtype, input_fact.shape, names))
        self.emitter.types[name] = input_fact.dtype
        if self.io == "float" and qparams(node) is not None:  # for a segment that begins where another one ends
            self._describe(node, name, "quantized")
            self.sources[name] = name

    def _integers(self, node: fx.Node) -> Any:
        """Return the shape and dtype of the integers that replace a float input (io="integer"); ExportError if they are not one tensor."""
        if others := [user.name for user in node.users if user.target is not quantize]:
            what = f"io='integer' cannot be used: the input {node.name!r} is also read in float"
            remedy = "export with io='float'"
            raise ExportError(what, node=node, because=f"{', '.join('%' + other for other in others)} stays in float", remedy=remedy)
        if len(node.users) > 1:
            what = f"io='integer' cannot be used: the input {node.name!r} is quantized on {len(node.users)} scales"
            because = f"{', '.join('%' + user.name for user in node.users)} are read by operators that limit it to different ranges"
            remedy = "export with io='float', or limit the input once, before anything else reads it"
            raise ExportError(what, node=node, because=because, remedy=remedy)
        return fact(next(iter(node.users)))

    def _primitive(self, node: fx.Node) -> None:
        record = PRIMITIVES[node.target]  # type: ignore[index]
        if self.io == "integer" and self._stays_integer(node, record.kind):
            return
        self.emitter.wide = torch.int32 if self.in_int32 & {node, *node.all_input_nodes} else torch.float64
        with self.loop.before() if self.loop is not None and node.target is loop.state else nullcontext():
            result = self.emit(node, record)
        if result is None:
            return
        name = self._named(result, node.name)
        self.values[node] = name
        plain = record.kind == "quantized" and fact(node).dtype in PLAIN_TYPES.values()  # primitives that move elements also move booleans
        if self.loop is None:  # nothing outside of a file reads what is inside of a loop
            self._describe(node, name, "plain" if plain else record.kind)
        self.infos.append(value_info(name, self.emitter.types[name], fact(node).shape))
        operand: Any = node.args[0]
        if node.target is quantize and operand.op == "placeholder":
            self.sources[self.values[operand]] = name
        if node.target is dequantize:
            self.sources[name] = operand.name

    def emit(self, node: fx.Node, record: Primitive) -> str | None:
        """Append a primitive's nodes; return the value's name, or None if a later node computes it too."""
        return record.onnx(self.emitter, *fx.node.map_aggregate(node.args, self.operand))

    def operand(self, value: Any) -> Any:
        """Return an argument of a primitive in the form that its ONNX form takes."""
        return self.values[value] if isinstance(value, fx.Node) else value

    def _stays_integer(self, node: fx.Node, kind: str) -> bool:
        """Leave out the first and last nodes if the file takes and returns integers; return whether this node was one."""
        operand: Any = node.args[0]
        if node.target is quantize and operand.op == "placeholder" and fact(operand).dtype.is_floating_point:
            name = self.values[node] = self.values[operand]
            self._describe(node, name, kind)
            self.sources[name] = name
            return True
        if self._ends(node):
            name = self.values[node] = self.returned_integers(operand)
            self.sources[name] = name
            return True
        return False

    @staticmethod
    def _ends(node: fx.Node) -> bool:
        """Return whether a node dequantizes integers for the outputs alone."""
        return node.target is dequantize and all(user.op == "output" for user in node.users)

    def stored(self, node: fx.Node, value: Tensor) -> Tensor:
        """Return the value of a node of the integer graph as the file stores it. Here: as it is."""
        return value

    def returned_integers(self, node: fx.Node) -> str:
        """Return the name of a quantized tensor as the file returns it if it returns integers; it is described under this name."""
        return str(self.values[node])

    def _named(self, result: str, name: str) -> str:
        nodes = self.emitter.nodes
        return self.emitter.named(result if nodes and nodes[-1].output[0] == result else self.emitter.node("Identity", result), name)

    def _describe(self, node: fx.Node, name: str, kind: str) -> None:
        entry: dict[str, Any] = {"kind": kind}
        if (grid := qparams(node)) is not None:
            entry.update(scale=grid.scale, dtype=grid.dtype)
            if grid.axis is not None:
                entry.update(axis=grid.axis)
        if kind == "quantized":
            entry.update(storage=str(self.emitter.types[name]).removeprefix("torch."), zero_point=self.zero_point(node, name))
        self.tensors[name] = entry

    def zero_point(self, node: fx.Node, name: str) -> int:
        """Return the zero point of a node's quantized value, as it is stored under this name."""
        return zero_point(node)

    def _graph(self, inputs: dict[str, str], output_names: Sequence[str] | None) -> onnx.GraphProto:
        """Return the ONNX graph with the user's names of outputs, and `inputs`, the names of all inputs by their names in the model."""
        results = returned(self.integer)
        if not results:
            because = "it returns no tensor, and an ONNX file returns tensors alone"
            remedy = "return a tensor; numbers and None among the results are left out of the file"
            raise ExportError("what the model returns cannot be written", because=because, remedy=remedy)
        names = _given(output_names, len(results), "output")
        by_node = {node: self._value(node) for node in dict.fromkeys(results)}
        values = [by_node[node][0] for node in results]
        self.sources.update({value: value for value in values if self.tensors.get(value, {}).get("kind") == "quantized"})
        renamed = self._renamed(inputs, dict(zip(names, values, strict=True)) if names else {})
        graph = helper.make_graph(self.emitter.nodes, "fxquant", self.inputs, [], self.emitter.initializers)
        graph.value_info.extend(self.infos)
        rename_values(graph, lambda value: renamed.get(value, value))
        self.inputs = list(graph.input)
        self.tensors = {inputs.get(name, name): entry for name, entry in self.tensors.items()}
        self.sources = {renamed.get(value, value): inputs.get(tensor, tensor) for value, tensor in self.sources.items()}
        inner, reserved = {name for node in graph.node for name in node.output}, set(inputs.values())
        for index, node in enumerate(results):
            value = renamed.get(values[index], values[index])
            name = names[index] if names else value
            if names and name in reserved:
                raise _taken(name, "output", "an input of the file has it")
            while name in reserved or (name in inner and name != value):
                name += "_output"
            reserved.add(name)
            if name != value:
                graph.node.append(helper.make_node("Identity", [value], [name], name=name))
                if value in self.sources:
                    self.sources[name] = self.sources[value]
            graph.output.append(value_info(name, self.emitter.types[values[index]], by_node[node][1]))
        keep(graph.value_info, (info for info in graph.value_info if info.name not in reserved))
        return graph

    def _renamed(self, inputs: dict[str, str], outputs: dict[str, str]) -> dict[str, str]:
        """Map values to other names in the file: inputs the user named, and inner values whose names the user gave to others.

        `outputs` maps the user's names of outputs to values. The metadata of a renamed inner value holds its new name.
        """
        inner = {name for node in self.emitter.nodes for name in node.output} | {tensor.name for tensor in self.emitter.initializers}
        renamed = {value: name for value, name in inputs.items() if value != name}
        reserved = {*inner, *inputs, *inputs.values(), *outputs}
        for name in dict.fromkeys((*renamed.values(), *outputs)):
            if name not in inner or outputs.get(name) == name:
                continue
            what = "output" if name in outputs else "input"
            if not self.renames:
                raise _taken(name, what, "an inner value has it, by which the compiled program is compared with the integer model")
            if what == "input" and self.io == "integer":
                raise _taken(name, what, "an inner tensor has it, and io='integer' describes both by name")
            renamed[name] = f"{name}_inner"
            while renamed[name] in reserved:
                renamed[name] += "_"
            reserved.add(renamed[name])
            if name in self.tensors:
                self.tensors[name]["value"] = renamed[name]
        return renamed

    def _value(self, node: fx.Node) -> tuple[str, Sequence[Size]]:
        """Return the name and the shape of a returned value; a constant is written as a value."""
        value, node_fact = self.values.get(node), fact(node)
        if self.io == "integer" and node.target is dequantize and not self._ends(node):  # a float operator reads the float value too
            operand: Any = node.args[0]
            value = self.returned_integers(operand)
            self.sources[value] = value
        if isinstance(value, Tensor):
            return self._named(self.emitter.node("Identity", self.emitter.constant(value)), node.name), tuple(value.shape)
        assert isinstance(value, str)
        assert isinstance(node_fact, TensorFact)
        return value, node_fact.shape


def _in_float(integer: fx.GraphModule) -> dict[str, str]:
    """Return why operators are outside of the integer part, by name."""
    specs = {node.name: annotation(node) for node in integer.graph.nodes if node.target not in PRIMITIVES}
    return {name: spec.because for name, spec in specs.items() if spec is not None and spec.dtype is None}


def _interface(info: onnx.ValueInfoProto, sources: dict[str, str]) -> dict[str, Any]:
    kind = info.type.tensor_type
    shape = [size.dim_param or size.dim_value for size in kind.shape.dim]
    entry = {"name": info.name, "dtype": onnx.TensorProto.DataType.Name(kind.elem_type).lower(), "shape": shape}
    return {**entry, "tensor": sources[info.name]} if info.name in sources else entry


def _given(names: Sequence[str] | None, count: int, what: str) -> list[str] | None:
    """Return the requested names of the inputs or the outputs; None if there are none. Raises ConfigurationError for unusable names."""
    if names is None:
        return None
    remedy = f"pass one name per {what}"
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{what}_names={names!r} is not a list of names", because="each name is a string", remedy=remedy)
    if len(names) != count:
        raise ConfigurationError(f"{what}_names has {len(names)} names", because=f"the model has {count} {what}s", remedy=remedy)
    if "" in names:
        raise ConfigurationError(f"{what}_names has an empty name", because="ONNX takes it for no value at all", remedy=remedy)
    if (again := next((name for index, name in enumerate(names) if name in names[:index]), None)) is not None:
        raise ConfigurationError(f"{what}_names has {again!r} more than once", because="each value has a different name", remedy=remedy)
    return list(names)


def _taken(name: str, what: str, because: str) -> ConfigurationError:
    return ConfigurationError(
        f"the name {name!r} in {what}_names is taken", because=because, remedy=f"pass another name for this {what}, or for the other value"
    )
