"""Read a float ONNX file as a module: a graph of the functions of `onnx_operators`, with the file's weights as parameters that train.

The module's forward takes the file's inputs by their names. What depends on no input is computed while the file is read. Initializers of
floats, and weights of layers, are parameters. Nodes keep their names, with a dot for each slash, as the modules to which rules of precision
and reports refer.
"""

import inspect
import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxquant.errors import ConfigurationError
from fxquant.frontend import onnx_operators
from fxquant.frontend.environment import exported_at
from fxquant.frontend.onnx_operators import OPERATORS, OnnxOperator, as_numbers, as_tensor, by_direction, linear, reshape, simplified
from fxquant.quantization.spec import ActivationConfig, QConfig
from fxquant.support import logger

if TYPE_CHECKING:
    import onnx

FloatModel: TypeAlias = "nn.Module | torch.export.ExportedProgram | str | os.PathLike[str] | onnx.ModelProto"  # what is quantized
_INPUTS = "fxquant.onnx_inputs"  # in `meta` of a module that was read: name, dtype and sizes of each input, None for a size without number
CUT = "fxquant.onnx_cut"  # in the same `meta`: the names of the nodes that became its outputs
_QUANTIZED = re.compile("DynamicQuantizeLinear|QLinear|Integer$|QGemm|QAttention|MatMulNBits")
_BATCH = 2  # of example inputs, where the file has a name in place of the number


def is_onnx(model: Any) -> bool:
    """Return whether a model is given as an ONNX file: its path, or an onnx.ModelProto."""
    if isinstance(model, (str, os.PathLike)):
        return Path(model).suffix.lower() == ".onnx"
    onnx = sys.modules.get("onnx")
    return onnx is not None and isinstance(model, onnx.ModelProto)


def read_onnx(model: Any, outputs: Sequence[str] | None = None) -> fx.GraphModule:
    """Return the module of a float ONNX file, in eval mode. Raises ConfigurationError for what cannot be read, with the node's name.

    `outputs` names nodes of the file whose results the module returns in place of the file's outputs; none: the last convolutions.
    """
    import onnx
    from onnx import inliner

    path = None if isinstance(model, onnx.ModelProto) else os.path.expanduser(os.fspath(model))
    try:
        proto = model if path is None else onnx.load(path)
    except Exception as error:  # of the file system, of protobuf, or of weights in other files
        remedy = "give the path of a float ONNX file, with the files of its weights beside it"
        raise ConfigurationError(f"{path} cannot be read", because=f"{type(error).__name__}: {error}", remedy=remedy) from error
    style = next((each.value for each in proto.metadata_props if each.key == "fxquant.style"), "")
    if style in ("exact", "fast"):
        because, remedy = f"fxquant wrote it in style {style!r}, of integer operators", "give the float model, or a file in style 'qdq'"
        raise ConfigurationError(f"{path or 'the ONNX model'} is quantized already", because=because, remedy=remedy)
    proto = inliner.inline_local_functions(proto) if len(proto.functions) else proto
    ends = [] if outputs is None else _cut(proto.graph, outputs)
    opset = next((each.version for each in proto.opset_import if each.domain in ("", "ai.onnx")), 1)
    module = _Reader("the ONNX model" if path is None else os.path.basename(path), opset).module(proto.graph)
    module.meta[CUT] = ends
    return module


def example_inputs(module: nn.Module) -> tuple[Tensor, ...] | None:
    """Return random inputs of the shapes in the file that a module was read from; None for any other module.

    A batch without a number has 2 rows. Raises ConfigurationError if another size has no number.
    """
    declared = module.meta.get(_INPUTS) if isinstance(module, fx.GraphModule) else None
    for name, _, sizes in declared or ():
        if None in sizes[1:]:
            because = f"the file has no numbers for all sizes of its input {name}: {', '.join(map(str, sizes)).replace('None', '?')}"
            raise ConfigurationError(
                "the model needs example inputs",
                because=because,
                remedy="pass example inputs, or batches; --shape or --size at the command line",
            )
    return None if declared is None else _drawn(declared, 0)


def _drawn(declared: list[tuple[str, torch.dtype, list[int | None]]], seed: int) -> tuple[Tensor, ...]:
    """Return normal numbers, and integers of 0 and 1, for the inputs of a file."""
    generator = torch.Generator().manual_seed(seed)
    normal = [(dtype, torch.randn([size or _BATCH for size in sizes], generator=generator)) for _, dtype, sizes in declared]
    return tuple((drawn if dtype.is_floating_point else drawn > 0).to(dtype) for dtype, drawn in normal)


# ---- a part of a file --------------------------------------------------------------------------------------------------------
def _cut(graph: Any, names: Sequence[str]) -> list[str]:
    """Let the results of the named nodes be the outputs of a file's graph, and return their names; by default, the last convolutions."""
    from onnx import ValueInfoProto

    produced = {name: node for node in graph.node for name in node.output}
    ended = _behind(graph, [each.name for each in graph.output], lambda node: _is_head(node, produced))
    heads = [node.name for node in ended if _is_head(node, produced)]
    ends = [node for node in graph.node if node.name in (names or heads)]
    if not ends or len(ends) < len(names):
        absent = ", ".join(sorted({*names} - {node.name for node in ends})) or "no convolution is before its outputs"
        remedy = f"name nodes of the file; its last convolutions are {', '.join(heads) or 'none'}"
        raise ConfigurationError("the ONNX model cannot be cut", because=f"there is no such node in it: {absent}", remedy=remedy)
    needed = _behind(graph, [node.output[0] for node in ends], lambda node: False)
    del graph.output[:], graph.node[:]
    graph.output.extend(ValueInfoProto(name=node.output[0]) for node in ends)
    graph.node.extend(needed)
    return [node.name for node in ends]


def _behind(graph: Any, names: Sequence[str], ends: Callable[[Any], bool]) -> list[Any]:
    """Return the nodes that compute values, in the file's order; not the nodes before one that `ends` accepts."""
    wanted, needed = set(names), []
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            needed.append(node)
            wanted.update([] if ends(node) else node.input)
    return needed[::-1]


def _is_head(node: Any, produced: dict[str, Any]) -> bool:
    """Return whether a node is a convolution of features: not of a softmax, as the mean of a YOLO's distances is."""
    operand = produced.get(node.input[0]) if node.op_type == "Conv" else None
    while operand is not None and operand.op_type in ("Reshape", "Transpose"):
        operand = produced.get(operand.input[0])
    return node.op_type == "Conv" and (operand is None or operand.op_type != "Softmax")


@dataclass
class _Constant:
    """A value that depends on no input of the file: a tensor, a number, or a tuple."""

    value: Any
    name: str
    trains: bool = False


def _dtype(number: int) -> torch.dtype:
    from onnx import helper

    return torch.from_numpy(helper.tensor_dtype_to_np_dtype(number).type([0])).dtype


def _tensor(proto: Any) -> Tensor:
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(proto).copy())


class QuantStub(nn.Module):
    """Marks an input whose grid the file gives."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class _Reader:
    """Makes the graph of one file, node by node."""

    def __init__(self, name: str, opset: int) -> None:
        self.name, self.opset = name, opset
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[str, Any] = {"": None}  # of each tensor of the file, its node or constant
        self.attributes: dict[int, tuple[_Constant, fx.Node]] = {}  # of constants that are parameters and buffers, by their identity
        self.uses: Counter[str] = Counter()
        self.dtypes: dict[str, torch.dtype] = {}  # of constants of the file
        self.rules: dict[str, QConfig] = {}  # by the path of what they are for
        self.paths: dict[fx.Node, str] = {}

    def module(self, graph: Any) -> fx.GraphModule:
        """Return the module of a file's graph."""
        inputs = [each for each in graph.input if each.name not in {constant.name for constant in graph.initializer}]
        types = [(each.name, each.type.tensor_type) for each in inputs]
        declared = [(name, _dtype(kind.elem_type), [dim.dim_value or None for dim in kind.shape.dim]) for name, kind in types]
        for each in inputs:
            self.values[each.name] = self.start = self.graph.placeholder(re.sub(r"\W", "_", each.name))
        for each in graph.initializer:
            value = _tensor(each)
            self.values[each.name], self.dtypes[each.name] = _Constant(simplified(value), each.name, value.is_floating_point()), value.dtype
        self.uses.update([name for node in graph.node for name in node.input] + [each.name for each in graph.output])
        for node in graph.node:
            self._read(node)
        outputs = [self._argument(self.values[each.name]) for each in graph.output]
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        module = fx.GraphModule(self.root, self.graph).eval()
        module.meta[_INPUTS] = declared
        for path, rule in self.rules.items():
            module.add_submodule(path, module.get_submodule(path) if hasattr(module, path) else nn.Module())
            module.get_submodule(path).qconfig = rule  # type: ignore[assignment]
        if all(sizes and None not in sizes for _, _, sizes in declared):
            _free_batch(module)
        return module

    def _read(self, node: Any) -> None:
        """Note the results of a node of the file: nodes of the graph, or constants."""
        attributes = {each.name: self._attribute(node, each) for each in node.attribute}
        inputs = [self.values[name] for name in node.input]
        if node.op_type == "Constant":
            value = next(iter(attributes.values()))
            self.values[node.output[0]] = _Constant(simplified(as_tensor(value)), node.output[0])
            self.dtypes[node.output[0]] = as_tensor(value).dtype
            return
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            self.values[node.output[0]] = self._on_grid(node, inputs, attributes)
            return
        row = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if row is None:
            self._refuse(node)
        facts = {"opset": self.opset, "results": len(node.output), "operator": node.op_type}
        attributes |= {name: value for name, value in facts.items() if name in inspect.signature(row.function).parameters}
        if row.elementwise and self._joined(node):
            return
        constant = all(each is None or isinstance(each, _Constant) for each in inputs)
        try:
            if not constant:
                row, inputs, attributes = self._as_layer(node, row, inputs, attributes)
            inspect.signature(row.function).bind(*inputs, **attributes)
            results = (self._folded if constant else self._call)(node, row, inputs, attributes)
        except (NotImplementedError, TypeError, RuntimeError, IndexError, ValueError) as error:
            self._refuse(node, str(error))
        if "results" not in attributes and any(self.uses[name] for name in node.output[1:]):
            self._refuse(node, "only its first result is read")
        if "results" not in attributes or len(node.output) == 1:
            self.values[node.output[0]] = results
            return
        for index, name in enumerate(node.output):
            if isinstance(results, fx.Node):
                self.values[name] = self.graph.call_function(operator.getitem, (results, index))
            else:
                self.values[name] = _Constant(results.value[index], name)

    def _attribute(self, node: Any, attribute: Any) -> Any:
        from onnx import helper

        value = helper.get_attribute_value(attribute)
        if attribute.type == attribute.TENSOR:
            return _tensor(value) if node.op_type == "Constant" else _tensor(value).item()
        if attribute.name == "to":
            return _dtype(value)
        return value.decode() if isinstance(value, bytes) else list(value) if isinstance(value, (list, tuple)) else value

    def _folded(self, node: Any, row: OnnxOperator, inputs: list[Any], attributes: dict[str, Any]) -> _Constant:
        """Compute an operator of constants alone; its result is a parameter where one of the constants is."""
        plain = [each and each.value for each in inputs]
        value = row.function(*(as_numbers(each) if index in row.numbers else each for index, each in enumerate(plain)), **attributes)
        return _Constant(simplified(value), node.output[0], any(each is not None and each.trains for each in inputs))

    def _call(self, node: Any, row: OnnxOperator, inputs: list[Any], attributes: dict[str, Any]) -> fx.Node:
        for index, each in enumerate(inputs):
            if isinstance(each, _Constant) and index in (*row.weights, *row.statistics):
                each.trains = index in row.weights
        arguments = [
            [self._argument(part) for part in each] if isinstance(each, list) else self._argument(each, row, index)
            for index, each in enumerate(inputs)
        ]
        name = node.name or node.output[0]
        path = re.sub(r"[^\w.]+|\.+", ".", name).strip(".")
        self.graph.call_function(exported_at, (path, f"{self.name}: {node.op_type} {name}"))
        called = self.graph.call_function(row.function, tuple(arguments), attributes)
        self.paths[called] = path
        return called

    def _argument(self, value: Any, row: OnnxOperator | None = None, index: int = 0) -> Any:
        """Return the node of a constant, or a number or tuple in its place; any other value unchanged."""
        if not isinstance(value, _Constant):
            return value
        content = as_tensor(value.value) if row is not None and index in row.weights and value.value is not None else value.value
        if not isinstance(content, Tensor):
            return content
        if row is not None and index in row.numbers:
            return as_numbers(content)
        if row is not None and row.elementwise and content.numel() == 1 and content.dim() < 2:
            return content.item()
        if id(value) not in self.attributes:
            name = re.sub(r"\W+", "_", value.name).strip("_")
            while hasattr(self.root, name):
                name += "_"
            if value.trains and content.is_floating_point():
                self.root.register_parameter(name, nn.Parameter(content))
            else:
                self.root.register_buffer(name, content)
            with self.graph.inserting_after(self.start):
                self.attributes[id(value)] = value, self.graph.get_attr(name)
        return self.attributes[id(value)][1]

    # ---- grids that another tool chose -------------------------------------------------------------------------------
    def _on_grid(self, node: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        """Return the value of a QuantizeLinear or DequantizeLinear: a constant on its grid, or its operand, whose grid becomes a rule."""
        value, scale, zero = (*inputs, _Constant(0, ""))[:3]
        if not isinstance(scale, _Constant) or not isinstance(zero, _Constant) or attributes.get("block_size"):
            self._refuse(node, "its grid is computed, or differs between blocks")
        dtype = self.dtypes.get(node.input[2] if len(node.input) > 2 else "", torch.uint8)
        steps, zeros, quantizes = as_tensor(scale.value), as_tensor(zero.value), node.op_type == "QuantizeLinear"
        if isinstance(value, _Constant):
            content, axis = as_tensor(value.value).float(), attributes.get("axis", 1)
            shape = [-1 if dim == axis % content.dim() else 1 for dim in range(content.dim())] if steps.numel() > 1 else []
            steps, zeros = steps.reshape(shape), zeros.reshape(shape if zeros.numel() > 1 else [])
            limits = torch.iinfo(dtype)
            result = torch.round(content / steps).add(zeros).clamp(limits.min, limits.max) if quantizes else (content - zeros) * steps
            return _Constant(result, node.output[0], True)
        if not quantizes:
            return value
        if steps.numel() > 1 or dtype not in (torch.uint8, torch.int8):
            self._refuse(node, "only tensors of bytes with one scale are read")
        zero_point = int(zeros) + 128 * (dtype == torch.int8)
        affine = dtype == torch.uint8 or zero_point != 128  # int8 has a zero point of 0 here
        rule = QConfig(ActivationConfig("uint8" if affine else "int8", scale=float(steps), zero_point=zero_point if affine else None))
        path = self.paths.get(value)
        if path is None:  # an input of the file
            path = f"{value.name}_quant"
            self.root.add_module(path, QuantStub())
            value = self.graph.call_module(path, (value,))
        if self.rules.setdefault(path, rule) != rule:
            self._refuse(node, "its operand is quantized on another grid, too")
        return value

    # ---- layers ------------------------------------------------------------------------------------------------------
    def _changed(self, constant: _Constant, function: Callable[[Tensor], Tensor]) -> _Constant:
        return _Constant(function(constant.value).contiguous(), constant.name, True)

    def _as_layer(
        self, node: Any, row: OnnxOperator, inputs: list[Any], attributes: dict[str, Any]
    ) -> tuple[OnnxOperator, list[Any], dict[str, Any]]:
        """Return a product with a constant matrix as a linear layer, and a recurrent layer, with weights as PyTorch holds them."""
        if row.function is onnx_operators.recurrent:
            inputs = [*inputs, *([None] * (8 - len(inputs)))]
            (x, *weights), (lengths, h, c, peepholes) = inputs[:4], inputs[4:]
            if any(isinstance(each, fx.Node) for each in weights) or lengths is not None or peepholes is not None:
                raise NotImplementedError("only layers of constant weights are read, without lengths and peepholes")
            h, c = (None if isinstance(each, _Constant) and not as_tensor(each.value).any() else each for each in (h, c))
            split = [by_direction(attributes["operator"], each.value, at // 2 + 1) for at, each in enumerate(weights) if each is not None]
            ordered = [part for direction in zip(*split, strict=True) for parts in direction for part in parts]
            parameters = [_Constant(part, f"{node.output[0]}_{at}", True) for at, part in enumerate(ordered)]
            return row, [x, parameters, h, c], attributes
        product = row in (OPERATORS["MatMul"], OPERATORS["Gemm"]) and isinstance(inputs[1], _Constant) and not attributes.get("transA")
        if not product or not isinstance(inputs[1].value, Tensor) or inputs[1].value.dim() != 2:
            return row, inputs, attributes
        matrix, bias = inputs[1], inputs[2] if len(inputs) > 2 else None
        outputs = matrix.value.shape[0 if attributes.get("transB") else 1]
        if bias is not None and not (isinstance(bias, _Constant) and bias.value.numel() in (1, outputs)):
            return row, inputs, attributes
        alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
        matrix = self._changed(matrix, lambda value: alpha * (value if attributes.get("transB") else value.t()))
        if bias is not None:
            bias = self._changed(bias, lambda value: (beta * value.flatten()).expand(outputs))
        return OnnxOperator(linear, weights=(1, 2)), [inputs[0], matrix, bias], {}

    def _joined(self, node: Any) -> bool:
        """Give a constant that is added to a layer's result to the layer, if it can be its bias; return whether it was."""
        for name, other in (tuple(node.input), tuple(node.input)[::-1]) if node.op_type == "Add" else ():
            layer, bias = self.values[name], self.values[other]
            free = isinstance(layer, fx.Node) and layer.target in (linear, onnx_operators.convolution) and layer.args[2:] in ((), (None,))
            if not free or self.uses[name] > 1 or not isinstance(bias, _Constant) or not isinstance(bias.value, Tensor):
                continue
            weight = getattr(self.root, str(getattr(layer.args[1], "target", "")), None)
            if weight is None:
                continue
            along = (len(weight), *((1,) * (weight.dim() - 2)))
            if bias.value.shape in (along, (1, *along)):
                layer.args = (*layer.args[:2], self._argument(self._changed(bias, Tensor.flatten)))
                self.values[node.output[0]] = layer
                return True
        return False

    def _refuse(self, node: Any, because: str = "") -> NoReturn:
        kind = f"{node.domain}.{node.op_type}".removeprefix("ai.onnx.").lstrip(".")
        at = f"{self.name}: {node.op_type} {node.name or node.output[0]}"
        if not because and _QUANTIZED.search(kind):
            because = f"its operator {kind} computes with integers whose scales another tool chose"
            remedy = "give the float file it was made from"
            raise ConfigurationError(f"{self.name} is quantized already", at=at, because=because, remedy=remedy)
        because = because or "no function computes it in PyTorch's calls"
        remedy = "export the network without it, or pass the nn.Module that the file was exported from"
        raise ConfigurationError(f"the ONNX operator {kind} is not read", at=at, because=because, remedy=remedy)


# ---- the batch ---------------------------------------------------------------------------------------------------------------
def _free_batch(module: fx.GraphModule) -> None:
    """Replace the batch size that a file holds in its shapes by -1, if every sample is then computed as before.

    The graph runs on random inputs of the file's batch size, and on twice as many, which begin with the same. A reshape of a tensor that
    is larger in the second run gets -1 in the place of the batch. What the two runs return of the same samples is compared, up to the
    order of float32 sums, which follows the batch size: if it differs, or a shape does not fit, the file's batch size stays fixed.
    """
    before = {node: node.args for node in module.graph.nodes}
    once, more = (_drawn(module.meta[_INPUTS], seed) for seed in (0, 1))
    runs: list[Any] = [fx.Interpreter(module), fx.Interpreter(module)]
    runs[0].args_iter, runs[1].args_iter = iter(once), iter(map(torch.cat, zip(once, more, strict=True)))
    try:
        with torch.no_grad():
            for node in module.graph.nodes:
                if node.target is reshape:
                    (tensor, shape), (twice, again) = (run.map_nodes_to_values(node.args[:2], node) for run in runs)
                    if isinstance(shape, tuple) and isinstance(tensor, Tensor) and shape == again and tensor.shape != twice.shape:
                        node.args = (node.args[0], _freed(shape, tensor.shape, twice.shape))
                for run in runs:
                    run.env[node] = run.run_node(node)
        pairs = list(zip(*(tree_leaves(run.env[node]) for run in runs), strict=True))
        if all(isinstance(each, Tensor) and _begins_with(twice, each, len(once[0])) for each, twice in pairs):
            module.recompile()
            return
        because = "samples depend on each other"
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        because = str(error).splitlines()[0]
    for node, args in before.items():
        node.args = args
    logger.info("the batch size of the ONNX file is fixed: %s", because)


def _begins_with(twice: Tensor, once: Tensor, batch: int) -> bool:
    """Return whether two tensors differ in the size of one dimension, that is the batch of the second, and the first begins with it."""
    differing = [dim for dim, (a, b) in enumerate(zip(once.shape, twice.shape, strict=True)) if a != b]
    alone = len(differing) == 1 and once.shape[differing[0]] == batch
    return alone and torch.allclose(twice.narrow(differing[0], 0, batch), once, 1e-3, 1e-4)


def _freed(shape: tuple[int, ...], once: torch.Size, twice: torch.Size) -> tuple[int, ...]:
    """Return the shape of a reshape with -1 for the dimension that the batch is in, which follows the same elements as it did before."""
    sizes = [once[dim] if size == 0 else size for dim, size in enumerate(shape)]
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(once) // -math.prod(sizes)
    dim = next(dim for dim, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b)
    place = next((at for at in range(len(sizes)) if math.prod(sizes[:at]) == math.prod(once[:dim])), None)
    return shape if place is None else (*sizes[:place], -1, *sizes[place + 1 :])
