"""Style "horizon": the input of the vendor's compiler of bernoulli2, bayes and bayes-e, whose program computes the integer graph.

    %y = conv2d(%x, …)     →     y = DequantizeLinear(QuantizeLinear(Clip(Conv(x, w, bias))))

The tool derives the integers of a program from the scale of each tensor and of each weight (CHIP.md). A quantization and
its dequantization stand next to each other. `horizon::HzQuantize` and `horizon::HzDequantize` carry what QuantizeLinear of opset 11 cannot:
int16, and the scales of a weight that are not its largest magnitudes over 127.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx

from fxquant.backends.onnx.qdq import QdqWriter
from fxquant.backends.onnx.runtime import keep, prune
from fxquant.errors import ExportError
from fxquant.ir.integer import QParams
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_INT8, scale_from_range
from fxquant.ops import BY_NAME
from fxquant.ops.core.form import Call, channel_axis
from fxquant.ops.layers.convolution import conv1d
from fxquant.primitives import PRIMITIVES

DOMAIN = "horizon"
OPSET = 11
IMAGES_ALONE = ("bernoulli2",)  # marches whose programs hold images alone; the processor computes what has another rank
BITS = {torch.int8: 8, torch.int16: 16}
MOVES = ("Reshape", "Transpose")
Shape = tuple[int, ...]


def pair(e: Any, value: str, scale: Tensor, storage: torch.dtype, axis: int | None = None) -> str:
    """Write the pair that rounds a float value to integers on a scale, or on one for each index of `axis`; return its float value."""
    scales = scale.reshape(-1).float()
    zeros = torch.zeros(scales.shape, dtype=storage, device="cpu")
    place = {} if axis is None else {"axis": axis}
    quantized = e.node("HzQuantize", value, e.constant(scales), e.constant(zeros), domain=DOMAIN, bits=BITS[storage], **place)
    e.types[quantized] = storage
    result: str = e.node("HzDequantize", quantized, e.constant(scales), e.constant(zeros), domain=DOMAIN, **place)
    e.types[result] = torch.float32
    return result


class HorizonCall(Call):
    """One operator in the form that the tool reads."""

    by_layers = True  # GlobalAveragePool and AveragePool round twice in the tool
    on_grid = staticmethod(pair)  # writes the nodes that round a float value

    uncarried = "a transposed convolution of groups has several scales for an index of its weight, which the file cannot say"
    remedy = "quantize its weight by statistics, which the compiler computes again: fxq.WeightConfig()"

    def stays(self, role: str) -> bool:
        """Return whether a weight needs no nodes that round it, because the tool derives its scales."""
        return _derived(*self._per_channel(role))

    @property
    def images_alone(self) -> bool:
        graph = self.node.graph.owning_module
        return graph is not None and graph.meta["target"].name in IMAGES_ALONE

    def weight(self, arrange: Any = lambda weight: weight, role: str = "weight") -> str:
        """Return a weight's float values on their grid, rounded by nodes of the tool's own unless it `stays`."""
        integers, scale, axis = self._per_channel(role)
        value = self.e.constant(arrange(self.grouped(role)).contiguous())
        if self.stays(role):
            return value
        if axis is not None and integers.shape[axis] != scale.numel():
            what = f"the weight scales of %{self.node.name} cannot be carried to the chip"
            raise ExportError(what, node=self.node, because=self.uncarried, remedy=self.remedy)
        return self.on_grid(self.e, value, scale, integers.dtype, None if axis is None else channel_axis(integers, scale, axis, arrange))

    def as_convolution(self) -> bool:
        """Return whether to write a convolution: if the weight needs a pair, if it has a residual, or it is one-dimensional.

        The tool crashes on a Gemm whose weight has a pair, and runs such a MatMul, and every one-dimensional Conv, on the processor. It
        adds a residual in the accumulators of convolutions alone.
        """
        layers = BY_NAME[self.name].function is conv1d or self.images_alone or self.arguments.get("residual") is not None
        return layers or not _derived(*self._per_channel("weight"))

    def operand(self, role: str) -> str:
        if isinstance(self.arguments.get(role), str) or role not in self.constants:
            return super().operand(role)
        integers, scale, axis = self.constants[role]
        value = self.e.constant(self.real(role))
        if scale.numel() == 0 or integers.dtype not in BITS:
            return value
        return self.on_grid(self.e, value, scale, integers.dtype, None if axis is None else integers.dim() + axis)

    def _per_channel(self, role: str) -> tuple[Tensor, Tensor, int | None]:
        """Return a weight's integers and scales; the tool takes one scale for each output channel."""
        integers, scale, axis = self.constants[role]
        if axis is None and scale.numel() == 1 and integers.dim() > 0:
            return integers, scale.expand(len(integers)).contiguous(), -integers.dim()
        return integers, scale, axis


def _derived(integers: Tensor, scale: Tensor, axis: int | None) -> bool:
    """Return whether the scales of a weight equal the tool's: the largest magnitude of each channel over 127."""
    if integers.dtype != torch.int8 or axis is None:
        return False
    channels = integers.shape[axis]
    groups = scale.numel() // channels  # more than one where scales run through groups along the first dimension
    parts = integers.reshape(groups, -1, *integers.shape[1:]).movedim(axis, 1).reshape(groups * channels, -1)
    largest = parts.abs().amax(1).float() * scale
    return torch.equal(scale_from_range(-largest, largest, WEIGHT_INT8), scale)


def float_nodes(integer: fx.GraphModule, model: onnx.ModelProto) -> list[str]:
    """Return the names of the file's nodes for float operators, which run on the processor.

    Between quantized tensors the tool makes integers of whatever it can unless it is instructed otherwise, of convolutions above all.
    """
    floats = {node.name for node in integer.graph.nodes if node.op.startswith("call_") and node.target not in PRIMITIVES}
    return [node.name for node in model.graph.node if node.input and node.name.partition("/")[0] in floats]


def fixed_shape(info: onnx.ValueInfoProto) -> list[int]:
    """Return the sizes of a value at a batch of 1."""
    return [_at_one(dim.dim_param) if dim.dim_param else dim.dim_value for dim in info.type.tensor_type.shape.dim]


def turn_outputs(model: onnx.ModelProto) -> None:
    """Let the outputs (N, C, H, W) of a file be (N, H, W, C); the compiler joins the transposition with the last layer."""
    for output in model.graph.output:
        dims, name = output.type.tensor_type.shape.dim, output.name
        if len(dims) != 4:
            continue
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [f"{name}/NCHW" if each == name else each for each in names]
        model.graph.node.append(helper.make_node("Transpose", [f"{name}/NCHW"], [name], f"{name}/NHWC", perm=[0, 2, 3, 1]))
        for dim, size in zip(dims, [dims[axis].dim_value for axis in (0, 2, 3, 1)], strict=True):
            dim.dim_value = size


def _at_one(size: str) -> int:
    """Return a size as it is written in a file, such as "3batch/2+1", at a batch of 1."""
    factor, _, rest = size.partition("batch")
    divisor, sign, offset = re.fullmatch(r"(?:/(\d+))?([+-]?)(.*)", rest).groups()  # type: ignore[union-attr]
    return int(Fraction(factor or 1) / int(divisor or 1) + (Fraction(f"{sign}{offset}") if offset else 0))


class HorizonWriter(QdqWriter):
    """Writes the operators of an integer graph in one traversal. A quantized tensor is represented by its float value."""

    style = "horizon"
    in_bytes = False
    renames = False
    calls = HorizonCall
    unrolls = True
    sequences: Sequence[str] = ()  # the values (N, C, L) that are images in the file

    @property
    def in_floats(self) -> list[fx.Node]:
        return []  # the tool's own pairs support int16

    def _quantized(self, value: str, described: QParams, limited: bool = False) -> str:
        e, dtype = self.emitter, ACTIVATION_TYPES[described.dtype]
        scale = torch.tensor(described.scale, dtype=torch.float32, device="cpu")
        if dtype.storage == torch.int16:
            return pair(e, value, scale, dtype.storage)
        zero = e.constant(0, dtype.storage)
        return e.node("DequantizeLinear", e.node("QuantizeLinear", value, e.constant(scale), zero), e.constant(scale), zero)

    def _dequantize(self, value: str, described: QParams) -> str:
        return value

    def _dequantized(self, name: str) -> str:
        return self.emitter.node("Identity", super()._dequantized(name))

    def write(self, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> onnx.ModelProto:
        model = super().write(input_names, output_names)
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        sizes = {info.name: tuple(fixed_shape(info)) for info in [*model.graph.input, *model.graph.value_info, *model.graph.output]}
        join_moves(model.graph, sizes)
        self.sequences = write_images(model.graph, sizes, self.integer.meta["target"].name in IMAGES_ALONE)
        join_means(model.graph)
        for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for dim, size in zip(info.type.tensor_type.shape.dim, fixed_shape(info), strict=True):
                dim.dim_value = size
        return model

    def _describe(self, node: fx.Node, name: str, kind: str) -> None:
        self.tensors[name] = {"kind": "float"}


def join_moves(graph: onnx.GraphProto, sizes: Mapping[str, Shape]) -> None:
    """Remove the pairs between moves, which are on one scale, and write the sizes of reshapes for a batch of one.

    Reshape → Transpose → Reshape is a channel shuffle to the tool where nothing is between them and no size is -1.
    """
    readers, constants = readers_of(graph), {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type in MOVES and node.output[0] in readers]:
        quantize, *others = readers[node.output[0]]
        dequantize = readers.get(quantize.output[0], [quantize])[0]
        after = readers.get(dequantize.output[0], [])
        if not others and "Dequantize" in dequantize.op_type and after and all(reader.op_type in MOVES for reader in after):
            for reader in after:
                reader.input[0] = node.output[0]
            readers[node.output[0]] = after
            graph.node.remove(quantize)
            graph.node.remove(dequantize)
    _turn_first(graph, sizes)
    for node in [node for node in graph.node if node.op_type == "Reshape" and node.input[1] in constants]:
        written = numpy_helper.to_array(constants[node.input[1]])
        wanted = np.array(sizes.get(node.output[0].partition("/")[0], ()), np.int64)
        if len(written) == len(wanted) and bool((written != wanted).any()) and bool(((written == wanted) | (written == -1)).all()):
            graph.initializer.append(numpy_helper.from_array(wanted, f"{node.output[0]}/shape"))
            node.input[1] = f"{node.output[0]}/shape"


def _turn_first(graph: onnx.GraphProto, sizes: Mapping[str, Shape]) -> None:
    """Transpose rows before they are split into heads: of the keys of an attention, the tool estimates a fortieth of the time.

    Reshape (N, L, H · D) to (N, L, H, D) → Transpose to (N, H, D, L)     →     Transpose to (N, H · D, L) → Reshape
    """
    produced, readers = {node.output[0]: node for node in graph.node}, readers_of(graph)
    for node in [node for node in graph.node if node.op_type == "Transpose"]:
        order, chain = _order(node), [node]
        while (last := produced.get(chain[-1].input[0])) is not None and last.op_type == "Transpose":
            order = [_order(last)[dim] for dim in order]
            chain.append(last)
        if last is None or last.op_type != "Reshape" or any(len(readers[each.output[0]]) > 1 for each in (last, *chain[1:])):
            continue
        rows, heads = (sizes.get(name.partition("/")[0], ()) for name in (last.input[0], last.output[0]))
        if order == [0, 2, 3, 1] and len(rows) == 3 and rows[:2] == heads[:2]:
            shape = numpy_helper.from_array(np.array([heads[dim] for dim in order], np.int64), f"{node.output[0]}/shape")
            graph.initializer.append(shape)
            last.CopyFrom(helper.make_node("Transpose", [last.input[0]], list(last.output), last.name, perm=[0, 2, 1]))
            node.CopyFrom(helper.make_node("Reshape", [last.output[0], shape.name], list(node.output), node.name))
            for each in chain[1:]:
                graph.node.remove(each)


def _order(node: onnx.NodeProto) -> list[int]:
    return next((list(entry.ints) for entry in node.attribute if entry.name == "perm"), [])


def join_means(graph: onnx.GraphProto) -> None:
    """Remove the pair after a Flatten or Reshape of a mean, before a layer that alone reads it, if it shares its operand's scale.

    Flatten → QuantizeLinear → DequantizeLinear → Gemm     →     Flatten → Gemm: with the pair, bernoulli2 flattens means on the processor
    """
    produced = {node.output[0]: node for node in graph.node}
    readers, sizes = readers_of(graph), {info.name: fixed_shape(info) for info in graph.value_info}
    for node in [node for node in graph.node if node.op_type in ("Reshape", "Flatten")]:
        chain = [node]
        while len(chain) < 3 and len(following := readers.get(chain[-1].output[0], [])) == 1:
            chain += following
        operand, after = produced.get(node.input[0]), readers.get(chain[-1].output[0], [])
        same = operand is not None and (operand.op_type, operand.input[1:]) == (chain[-1].op_type, chain[-1].input[1:])
        if not same or "Dequantize" not in chain[-1].op_type or {reader.op_type for reader in after} != {"Gemm"}:
            continue
        if sizes[node.input[0]][2:] == [1, 1]:
            for reader in after:
                reader.input[0] = node.output[0]
            for each in chain[1:]:
                graph.node.remove(each)


def readers_of(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes that read each value, by its name."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def horizon_values(integer: fx.GraphModule) -> tuple[dict[str, str], frozenset[str]]:
    """Return the nodes of an integer graph by their values' names in its file of style "horizon", and the nodes that are sequences."""
    writer = HorizonWriter(integer, "float", OPSET)
    by_value = named_values(writer.write(None, None))
    values = {value: name for name, value in writer.reals.items()} | by_value  # operators that only move elements have no pair
    return values, frozenset(values[name] for name in writer.sequences if name in values)


# ---- the tensors of the vendor's quantized model ---------------------------------------------------------------------
#
# The tool names its tensors after those of the file that it reads, and inserts reshapes and transposes. A tensor of its quantized model
# is followed through these to a value of that file, which is named after a node of the integer graph.
BEHIND = {"Transpose", "Reshape", "Identity", "Flatten", "Squeeze", "Unsqueeze", "HzDequantize"}
BEFORE = BEHIND | {"HzQuantize"}
SUFFIX = "_quantized"


@dataclass(frozen=True)
class Place:
    """The position of a tensor of the quantized model in the integer graph."""

    node: str  # the name of the node whose integers it holds
    channels_last: bool  # whether its dimensions are N, H, W, C if those of the node are N, C, H, W


def named_values(model: onnx.ModelProto) -> dict[str, str]:
    """Map values of a file of style "horizon" to nodes of the integer graph: the values before and after a pair, and their copies."""
    produced = {node.output[0]: node for node in model.graph.node}
    by_value = {}
    for node in model.graph.node:
        name = node.output[0]
        if node.op_type in ("DequantizeLinear", "HzDequantize") and node.input[0] in produced and "/" not in name:
            by_value[name] = name
            by_value.setdefault(produced[node.input[0]].input[0], name)
        elif node.op_type == "Identity" and node.input[0] in by_value:
            by_value[name] = by_value[node.input[0]]
    return by_value


class Connections:
    """The quantized model that the tool wrote, as a graph of names; outputs in `last` are channels last in the file that it read."""

    def __init__(self, path: Path, values: Mapping[str, str], last: Collection[str] = ()) -> None:
        try:
            model = onnx.load(str(path))
        except Exception as error:
            because = "the names of a program's tensors are in the quantized model that the compiler writes into the same folder"
            remedy = "keep the folder that fxq.board.compile_horizon fills together"
            raise ExportError(f"{path} cannot be read", because=because, remedy=remedy) from error
        self.values, self.last = values, last
        self.outputs = [output.name for output in model.graph.output]
        self.producers = {name: node for node in model.graph.node for name in node.output}
        self.readers = readers_of(model.graph)
        self.inner = [name for name in self.producers if name.endswith(SUFFIX)]

    def place(self, tensor: str) -> Place | None:
        """Return the node whose integers a tensor holds; None if it is not a value of the file."""
        node = self._named(tensor)
        for name, turned in (*self._after(tensor), *self._before(tensor)):
            named = self._named(name)
            if name != tensor and named is not None and node in (None, named):
                return Place(named, turned != self._of_layer(name))
        return None if node is None else Place(node, self._of_layer(tensor))

    def _of_layer(self, tensor: str) -> bool:
        """Return whether a layer of the tool's own computes a tensor, which is channels last; others keep the order of the file."""
        producer = self.producers.get(tensor)
        return producer is not None and producer.op_type not in BEFORE and producer.domain == DOMAIN

    def output(self, tensor: str) -> tuple[int, bool] | None:
        """Return which output of the file has a tensor's elements, and whether it is transposed relative to it; None if none has."""
        return next(((self.outputs.index(name), turned) for name, turned in self._after(tensor) if name in self.outputs), None)

    def _named(self, tensor: str) -> str | None:
        return self.values.get(tensor) or self.values.get(tensor.removesuffix(SUFFIX))

    def _after(self, tensor: str) -> Iterator[tuple[str, bool]]:
        """Yield the values after a tensor that hold its elements, and whether they are transposed relative to it."""
        waiting, visited = [(tensor, False)], {tensor}
        while waiting:
            name, turned = waiting.pop(0)
            yield name, turned
            for node in self.readers.get(name, []):
                if node.op_type in BEHIND and node.input[0] == name and node.output[0] not in visited:
                    visited.add(node.output[0])
                    waiting.append((node.output[0], turned ^ _turns(node) ^ (node.output[0] in self.last)))

    def _before(self, tensor: str) -> Iterator[tuple[str, bool]]:
        """Yield the values before a tensor that hold its elements, and whether they are transposed relative to it."""
        name, turned = tensor, False
        while name in self.producers and self.producers[name].op_type in BEFORE:
            node = self.producers[name]
            name, turned = node.input[0], turned != _turns(node)
            yield name, turned


def _turns(node: onnx.NodeProto) -> bool:
    """Return whether a node transposes to channels last or back."""
    return node.op_type == "Transpose" and _order(node) in ([0, 2, 3, 1], [0, 3, 1, 2])


# ---- Files for the vendor's compiler of the nash marches, at opset 19 with `horizon::HzCalibration` nodes ------------------
#
#     %y = conv2d(%x, …)     →     y = HzCalibration(Conv(HzCalibration(x), HzCalibration(weight), bias))
#
# A node rounds a float tensor to integers on a scale, or on one for each index of `axis`, and returns their float values. Its name and
# attributes are those of the `*_calibrated_model.onnx` that hb_mapper 1.24 writes for bayes-e. Whether hb_compile reads them is untested.
CALIBRATED_OPSET = 19  # the largest that hb_compile's documents name


def calibration(e: Any, value: str, scale: Tensor, storage: torch.dtype, axis: int | None = None) -> str:
    """Write the node that rounds a float32 value to int8 or int16 on a scale, or on one for each index of `axis`; return its result."""
    bits, scales = BITS[storage], scale.reshape(-1).float()
    largest = 2 ** (bits - 1) - 1
    place = {} if axis is None else {"axis": axis}
    numbers = {"scales": scales.tolist(), "thresholds": (scales * largest).tolist()}
    result: str = e.node("HzCalibration", value, domain=DOMAIN, qtype=f"int{bits}", constant=1, switch="ON", **numbers, **place)
    e.types[result] = torch.float32
    return result


class CalibratedCall(HorizonCall):
    """One operator, whose constants are rounded by HzCalibration nodes."""

    on_grid = staticmethod(calibration)
    uncarried = "an HzCalibration node has one scale for each index of one dimension, and this weight has more"
    remedy = "quantize this layer with one scale per output channel, or without groups"

    def stays(self, role: str) -> bool:
        return False


class CalibratedWriter(HorizonWriter):
    """Writes an integer graph of a nash target in one traversal. A quantized tensor is represented by its float value."""

    calls = CalibratedCall

    def _quantized(self, value: str, described: QParams, limited: bool = False) -> str:
        scale = torch.tensor(described.scale, dtype=torch.float32, device="cpu")
        return calibration(self.emitter, value, scale, ACTIVATION_TYPES[described.dtype].storage)


# ---- Images ----------------------------------------------------------------------------------------------------------
# The operators that compute each element by itself, and so may read images.
POINTWISE = {
    *("QuantizeLinear", "DequantizeLinear", "HzQuantize", "HzDequantize", "HzCalibration", "Identity"),
    *("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"),
    *("Abs", "Clip", "Elu", "Erf", "Exp", "HardSigmoid", "LeakyRelu", "Log", "Neg", "Reciprocal", "Relu", "Selu", "Sigmoid"),
    *("Softplus", "Sqrt", "Tanh", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Atanh"),
    *("Ceil", "Floor", "Round", "Sign", "Softsign"),
}
AXES = {2: (0, 1), 3: (0, 2, 1)}  # the dimensions of a vector (N, C), and of (N, T, C), in its image
SEQUENCE = (0, 1, 2)  # the dimensions of a sequence (N, C, L) in its image (N, C, L, 1)


def write_images(graph: onnx.GraphProto, sizes: Mapping[str, Shape], alone: bool) -> list[str]:
    """Rewrite a file of a batch of one so that layers of vectors and sequences read images; return the names of sequences (N, C, L).

    `alone`: whether every quantized tensor of two or three dimensions is an image. Values get their sizes; nodes without readers go.
    """
    images = Images(graph, sizes, alone)
    ends = {output.name for output in graph.output}
    for node in graph.node:
        if not images.written(node, node.output[0] in ends):
            images.add(node, [images.alias.get(name) or images.tensor(name) for name in node.input])
    prune(graph, images.nodes)
    keep(graph.value_info, (info for info in graph.value_info if info.name not in images.image))
    return [name for name, (_, _, axes) in images.image.items() if axes == SEQUENCE]


class Images:
    """A file that is being rewritten."""

    def __init__(self, graph: onnx.GraphProto, sizes: Mapping[str, Shape], alone: bool) -> None:
        self.graph, self.sizes, self.alone = graph, sizes, alone
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.image: dict[str, tuple[str, Shape, Shape]] = {}  # by a tensor's name: its image's, its shape, and its dimensions there
        entries = [node for node in graph.node if node.op_type == "ToImage" and any(entry.name == "axes" for entry in node.attribute)]
        self.wanted = dict.fromkeys((node.input[0] for node in entries), SEQUENCE)  # the dimensions in which layers read a tensor
        self.alias: dict[str, str] = {}  # the image that is read in place of a ToImage's result
        self.nodes: list[onnx.NodeProto] = []
        self.producers: dict[str, onnx.NodeProto] = {}

    def add(self, node: onnx.NodeProto, inputs: list[str]) -> None:
        node.input[:] = inputs
        self.nodes.append(node)
        self.producers.update(dict.fromkeys(node.output, node))

    def tensor(self, name: str) -> str:
        """Return the name of a value in its own shape."""
        if name not in self.image:
            return name
        value, shape, axes = self.image[name]
        if f"{name}/tensor" not in self.producers:
            if axes == AXES[3]:
                self.add(helper.make_node("Transpose", [], [f"{name}/last"], f"{name}/last", perm=[0, 2, 3, 1]), [value])
                value = f"{name}/last"
            self._reshape(value, f"{name}/tensor", shape)
        return f"{name}/tensor"

    def _reshape(self, value: str, result: str, shape: Shape) -> None:
        self.add(helper.make_node("Reshape", [], [result], result), [value, self._constant(f"{result}/shape", np.array(shape, np.int64))])

    def _constant(self, name: str, value: Any) -> str:
        if name not in self.constants:
            self.constants[name] = value
            self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _enter(self, name: str, shape: Shape, result: str, axes: Shape) -> None:
        """Write the image of a tensor."""
        if axes != AXES[3]:
            self._reshape(name, result, (*shape, 1, 1)[:4])
        else:
            self._reshape(name, f"{result}/last", (1, shape[1], 1, shape[2]))
            self.add(helper.make_node("Transpose", [], [result], result, perm=[0, 3, 1, 2]), [f"{result}/last"])
        self.image[name] = result, shape, axes

    def written(self, node: onnx.NodeProto, last: bool) -> bool:
        """Write a node on images, and return whether there is a way to; the `last` ones of a file stay tensors."""
        first, result, operator = node.input[0] if node.input else "", node.output[0], node.op_type
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        shape = tuple(attributes.get("shape", ()))
        axes = tuple(attributes.get("axes", AXES.get(len(shape), ())))
        if operator == "FromImage":
            self.image[result] = first, shape, axes
        elif operator == "ToImage":
            if first not in self.image or self.image[first][2] != axes:
                first = self.tensor(first)
                self._enter(first, shape, result, axes)
            self.alias[result] = self.image[first][0]
        elif last:
            return False
        elif operator == "Transpose" and len(self.image.get(first, ((), ()))[1]) == 3:
            value, shape, axes = self.image[first]
            self.image[result] = value, tuple(shape[dim] for dim in attributes["perm"]), tuple(axes[dim] for dim in attributes["perm"])
            return self.image[result][2] in (AXES[3], SEQUENCE) or self.image.pop(result) is None
        elif operator == "MaxPool" and len(attributes["kernel_shape"]) == 1:
            self._largest(node, first, result, attributes)
        elif operator in ("Reshape", "Flatten"):
            return self._flattened(node, first, result)
        elif operator in (*POINTWISE, "Slice", "Concat"):
            quantized = self.sizes.get(result.partition("/")[0], ())
            if self.alone and operator in ("QuantizeLinear", "HzQuantize") and first not in self.image and len(quantized) in AXES:
                self._enter(first, quantized, f"{first}/image", self.wanted.get(result.partition("/")[0], AXES[len(quantized)]))
            return self._pointwise(node, result, attributes)
        else:
            return False
        return True

    def _largest(self, node: onnx.NodeProto, first: str, result: str, attributes: dict[str, Any]) -> None:
        """Write the maxima of a sequence's windows as maxima of its image: the tool takes no dilations in one dimension."""
        if first not in self.image or self.image[first][2] != SEQUENCE:
            shape, first = self.sizes[first], self.tensor(first)
            self._enter(first, shape, f"{first}/sequence", SEQUENCE)
        begin, end = attributes.pop("pads", (0, 0))
        attributes |= {name: [*attributes[name], 1] for name in ("kernel_shape", "strides", "dilations") if name in attributes}
        pooled = helper.make_node("MaxPool", [], [result], node.name, pads=[begin, 0, end, 0], **attributes)
        self.add(pooled, [self.image[first][0]])
        self.image[result] = result, self.sizes[result.partition("/")[0]], SEQUENCE

    def _flattened(self, node: onnx.NodeProto, first: str, result: str) -> bool:
        """Record the operand's image as the image of a reshape's result if both are one vector; return whether it was done."""
        value, shape, _ = self.image.get(first, (first, self.sizes.get(first, ()), ()))
        rank = 2 if node.op_type == "Flatten" else len(self.constants.get(node.input[1], ()))
        if rank not in AXES or max(shape, default=0) != math.prod(shape) or (first not in self.image and len(shape) != 4):
            return False
        self.image[result] = value, (*[1] * (rank - 1), math.prod(shape)), AXES[rank]
        return True

    def _pointwise(self, node: onnx.NodeProto, result: str, attributes: dict[str, Any]) -> bool:
        slices = node.op_type == "Slice"
        read = [self.image.get(name) for name in (node.input[:1] if slices else node.input) if name not in self.constants]
        operands = [each for each in read if each is not None]
        if not operands or len(operands) < len(read) or len({axes for *_, axes in operands}) > 1:
            return False
        inputs, shape, axes = [name for name, *_ in operands], list(operands[0][1]), operands[0][2]
        if slices:
            begins, ends, dims, *steps = (self.constants[name].tolist() for name in node.input[1:])
            dims = [dim % len(shape) for dim in dims]
            for dim, *limits in zip(dims, begins, ends, *steps, strict=True):
                shape[dim] = len(range(*slice(*limits).indices(shape[dim])))
            turned = np.array([axes[dim] for dim in dims], np.int64)
            inputs = [*inputs, *node.input[1:3], self._constant(f"{result}/axes", turned), *node.input[4:]]
        elif node.op_type == "Concat":
            dim = attributes["axis"] % len(shape)
            shape[dim] = sum(each[dim] for _, each, _ in operands)
            next(entry for entry in node.attribute if entry.name == "axis").i = axes[dim]
        else:
            arrays = {name: self.constants[name] for name in node.input if name in self.constants and self.constants[name].size > 1}
            shape = list(np.broadcast_shapes(*(array.shape for array in arrays.values()), *(each for _, each, _ in operands)))
            arranged = {name: self._constant(f"{name}/image/{axes[-1]}", _arranged(array, axes)) for name, array in arrays.items()}
            inputs = [arranged[name] if name in arrays else self.image.get(name, (name,))[0] for name in node.input]
            inner = self.producers.get(inputs[0])
            if inner is not None and "uantize" in node.op_type and "Dequantize" in inner.op_type and inner.input[1:] == inputs[1:]:
                self.image[result] = inputs[0], tuple(shape), axes  # it is on this grid
                return True
        self.add(node, inputs)
        self.image[result] = result, tuple(shape), axes
        return True


def _arranged(array: np.ndarray[Any, Any], axes: Shape) -> np.ndarray[Any, Any]:
    """Return a constant operand of a tensor as an operand of the tensor's image; `axes` are the tensor's dimensions in the image."""
    wide = array.reshape((1,) * (len(axes) - array.ndim) + array.shape).transpose(np.argsort(axes))
    return np.ascontiguousarray(wide.reshape((*wide.shape, 1, 1)[:4]))
