"""Tensors of two and three dimensions as images, for marches whose programs hold images alone.

    (1, C)        →     (1, C, 1, 1)
    (1, T, C)     →     (1, C, T, 1)

A linear layer is written as ToImage → Conv → FromImage. Slices, concatenations and elementwise operators between such layers read images
too, so that they stay in one program. The integers of a tensor, and its name, are unchanged.
"""

import math
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

# The operators that compute each element by itself, and so may read images.
POINTWISE = {
    *("QuantizeLinear", "DequantizeLinear", "HzQuantize", "HzDequantize", "Identity", "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"),
    *("Abs", "Clip", "Elu", "Erf", "Exp", "HardSigmoid", "LeakyRelu", "Log", "Neg", "Reciprocal", "Relu", "Selu", "Sigmoid"),
    *("Softplus", "Sqrt", "Tanh"),
}
AXES = {2: (0, 1), 3: (0, 2, 1)}  # the dimensions of a tensor in its image, by its rank
Shape = tuple[int, ...]


def write_images(graph: onnx.GraphProto, sizes: dict[str, Shape]) -> None:
    """Rewrite a file with a batch of one, in which values have these sizes; nodes that nothing reads are taken out."""
    images = Images(graph, sizes)
    read, nodes = {output.name for output in graph.output}, list[onnx.NodeProto]()
    for node in graph.node:
        if not images.written(node, node.output[0] in read):
            images.add(node, [images.alias.get(name) or images.tensor(name) for name in node.input])
    for node in reversed(images.nodes):
        if read & set(node.output):
            read |= set(node.input)
            nodes.insert(0, node)
    del graph.node[:]
    graph.node.extend(nodes)
    described = [info for info in graph.value_info if info.name not in images.image]
    del graph.value_info[:]
    graph.value_info.extend(described)


class Images:
    """A file that is being rewritten."""

    def __init__(self, graph: onnx.GraphProto, sizes: dict[str, Shape]) -> None:
        self.graph, self.sizes = graph, sizes
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.image: dict[str, tuple[str, Shape]] = {}  # the name of a tensor's image and the tensor's shape, by the tensor's name
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
        value, shape = self.image[name]
        if f"{name}/tensor" not in self.producers:
            if len(shape) == 3:
                self.add(helper.make_node("Transpose", [], [f"{name}/last"], f"{name}/last", perm=[0, 2, 3, 1]), [value])
                value = f"{name}/last"
            self._reshape(value, f"{name}/tensor", shape)
        return f"{name}/tensor"

    def _reshape(self, value: str, result: str, shape: Shape) -> None:
        self._constant(f"{result}/shape", np.array(shape, np.int64))
        self.add(helper.make_node("Reshape", [], [result], result), [value, f"{result}/shape"])

    def _constant(self, name: str, value: Any) -> str:
        if name not in self.constants:
            self.constants[name] = value
            self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _enter(self, name: str, shape: Shape, result: str) -> None:
        """Write the image of a tensor."""
        if len(shape) == 2:
            self._reshape(name, result, (1, shape[1], 1, 1))
        else:
            self._reshape(name, f"{result}/last", (1, shape[1], 1, shape[2]))
            self.add(helper.make_node("Transpose", [], [result], result, perm=[0, 3, 1, 2]), [f"{result}/last"])
        self.image[name] = result, shape

    def written(self, node: onnx.NodeProto, last: bool) -> bool:
        """Write a node on images, and return whether there is a way to; the `last` ones of a file stay tensors."""
        first, result, operator = node.input[0] if node.input else "", node.output[0], node.op_type
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if operator == "FromImage":
            self.image[result] = first, tuple(attributes["shape"])
        elif operator == "ToImage" and first in self.image:
            self.alias[result] = self.image[first][0]
        elif operator == "ToImage":
            self._enter(first, tuple(attributes["shape"]), result)
        elif last:
            return False
        elif operator in ("Reshape", "Flatten"):
            return self._flattened(node, first, result)
        elif operator in (*POINTWISE, "Slice", "Concat"):
            quantized = self.sizes.get(result.partition("/")[0], ())
            if operator in ("QuantizeLinear", "HzQuantize") and first not in self.image and len(quantized) in AXES:
                self._enter(first, quantized, f"{first}/image")
            return self._pointwise(node, result, attributes)
        else:
            return False
        return True

    def _flattened(self, node: onnx.NodeProto, first: str, result: str) -> bool:
        """Record the operand's image as the image of a reshape's result if both are one vector; return whether it was done."""
        value, shape = self.image.get(first, (first, self.sizes.get(first, ())))
        rank = 2 if node.op_type == "Flatten" else len(self.constants.get(node.input[1], ()))
        if rank not in AXES or max(shape, default=0) != math.prod(shape) or (first not in self.image and len(shape) != 4):
            return False
        self.image[result] = value, (*[1] * (rank - 1), math.prod(shape))
        return True

    def _pointwise(self, node: onnx.NodeProto, result: str, attributes: dict[str, Any]) -> bool:
        slices = node.op_type == "Slice"
        read = [self.image.get(name) for name in (node.input[:1] if slices else node.input) if name not in self.constants]
        operands = [each for each in read if each is not None]
        if not operands or len(operands) < len(read) or len({len(shape) for _, shape in operands}) > 1:
            return False
        inputs, shape, axes = [name for name, _ in operands], list(operands[0][1]), AXES[len(operands[0][1])]
        if slices:
            begins, ends, dims, *steps = (self.constants[name].tolist() for name in node.input[1:])
            dims = [dim % len(shape) for dim in dims]
            for dim, *limits in zip(dims, begins, ends, *steps, strict=True):
                shape[dim] = len(range(*slice(*limits).indices(shape[dim])))
            turned = np.array([axes[dim] for dim in dims], np.int64)
            inputs = [*inputs, *node.input[1:3], self._constant(f"{result}/axes", turned), *node.input[4:]]
        elif node.op_type == "Concat":
            dim = attributes["axis"] % len(shape)
            shape[dim] = sum(each[dim] for _, each in operands)
            next(entry for entry in node.attribute if entry.name == "axis").i = axes[dim]
        else:
            arrays = {name: self.constants[name] for name in node.input if name in self.constants and self.constants[name].size > 1}
            shape = list(np.broadcast_shapes(*(array.shape for array in arrays.values()), *(each for _, each in operands)))
            arranged = {name: self._constant(f"{name}/image", _arranged(array, len(shape))) for name, array in arrays.items()}
            inputs = [arranged[name] if name in arrays else self.image.get(name, (name,))[0] for name in node.input]
            inner = self.producers.get(inputs[0])
            if inner is not None and "uantize" in node.op_type and "Dequantize" in inner.op_type and inner.input[1:] == inputs[1:]:
                self.image[result] = inputs[0], tuple(shape)  # it is on this grid
                return True
        self.add(node, inputs)
        self.image[result] = result, tuple(shape)
        return True


def _arranged(array: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """Return a constant that is broadcast to a tensor of this rank as it is broadcast to the tensor's image."""
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    return np.ascontiguousarray(wide[..., None, None] if rank == 2 else wide.transpose(0, 2, 1)[..., None])
