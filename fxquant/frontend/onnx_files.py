"""Read a float ONNX file as a module: a graph of the functions of `onnx_operators`, with the file's weights as parameters that train.

The module's forward takes the file's inputs by their names. What depends on no input is computed while the file is read. Initializers of
floats are parameters; what a file holds in nodes `Constant` is not trained. Nodes keep their names of the file: as the modules to which
rules of precision, reports and errors refer, with a dot for each slash.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxquant.errors import ConfigurationError
from fxquant.frontend.environment import exported_at
from fxquant.frontend.onnx_operators import OPERATORS, OnnxOperator, as_numbers, as_row, convolution, linear, simplified, written_norm
from fxquant.frontend.onnx_shapes import reshape
from fxquant.ir.graph import resolve
from fxquant.support import logger
from fxquant.support.arguments import Kind

if TYPE_CHECKING:
    import onnx

FloatModel: TypeAlias = "nn.Module | torch.export.ExportedProgram | str | os.PathLike[str] | onnx.ModelProto"  # what can be quantized
MODEL = Kind("an nn.Module, an ExportedProgram, the path of an ONNX file or an onnx.ModelProto", lambda model: model)
_EXAMPLES = "fxquant.onnx_inputs"  # in `meta` of a module that was read: the shapes and dtypes of its inputs
_QUANTIZED = re.compile("QuantizeLinear|QLinear|Integer$|QGemm|QAttention|MatMulNBits")
_INITIAL_BATCH = 2  # of example inputs, where the file has a name for the batch


def is_onnx(model: Any) -> bool:
    """Return whether a model is given as an ONNX file: its path, or an onnx.ModelProto."""
    if isinstance(model, (str, os.PathLike)):
        return Path(model).suffix.lower() == ".onnx"
    onnx = sys.modules.get("onnx")
    return onnx is not None and isinstance(model, onnx.ModelProto)


def read_onnx(model: Any) -> fx.GraphModule:
    """Return the module of a float ONNX file, in eval mode. Raises ConfigurationError for what cannot be read, with the node's name."""
    import onnx
    from onnx import inliner

    path = None if isinstance(model, onnx.ModelProto) else os.path.expanduser(os.fspath(model))
    name = "the onnx.ModelProto" if path is None else os.path.basename(path)
    try:
        proto = model if path is None else onnx.load(path)
    except Exception as error:  # of the file, of protobuf, or of files with the weights beside it
        remedy = "give the path of a float ONNX file, with the files of its weights beside it"
        raise ConfigurationError(f"{path} cannot be read", because=f"{type(error).__name__}: {error}", remedy=remedy) from error
    opset = next((each.version for each in proto.opset_import if each.domain in ("", "ai.onnx")), 1)
    return _Reader(inliner.inline_local_functions(proto) if len(proto.functions) else proto, name, opset).module()


def example_inputs(module: nn.Module) -> tuple[Tensor, ...] | None:
    """Return random inputs of the shapes in the file that a module was read from; None for any other module.

    A batch without a number has 2 rows. Raises ConfigurationError if another size has no number.
    """
    declared = module.meta.get(_EXAMPLES) if isinstance(module, fx.GraphModule) else None
    for name, _, sizes in declared or ():
        if None in sizes[1:]:
            because = f"its input {name} has sizes without a number in the file: {', '.join('?' if each is None else str(each) for each in sizes)}"
            raise ConfigurationError("the model needs example inputs", because=because, remedy="pass example inputs, or batches")
    return None if declared is None else _drawn(module, 0)


def _drawn(module: nn.Module, seed: int) -> tuple[Tensor, ...]:
    """Return normal numbers, and integers of 0 and 1, of the shapes in the file; a batch without a number has 2 rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes: Any = module.meta[_EXAMPLES]
    named = [(dtype, [_INITIAL_BATCH if size is None else size for size in sizes]) for _, dtype, sizes in shapes]
    normal = [(dtype, torch.randn(sizes, generator=generator)) for dtype, sizes in named]
    return tuple((drawn if dtype.is_floating_point else drawn > 0).to(dtype) for dtype, drawn in normal)


@dataclass
class _Constant:
    """A value that depends on no input of the file."""

    value: Any  # a tensor, a number, or a tuple of numbers
    trains: bool = False


def _dtype(number: int) -> torch.dtype:
    from onnx import helper

    return torch.from_numpy(helper.tensor_dtype_to_np_dtype(number).type([0])).dtype if number != 16 else torch.bfloat16


def _tensor(proto: Any) -> Tensor:
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(proto).copy())


class _Reader:
    """Makes the graph of one file, node by node."""

    def __init__(self, proto: Any, name: str, opset: int) -> None:
        self.proto, self.name, self.opset = proto, name, opset
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[str, Any] = {"": None}  # of each tensor of the file, its node or constant
        self.registered: dict[int, tuple[Any, fx.Node]] = {}
        self.uses: Counter[str] = Counter()

    def module(self) -> fx.GraphModule:
        """Return the module of the whole file."""
        graph, declared = self.proto.graph, []
        self._constants(graph)
        for each in graph.input:
            if each.name in self.values:  # an initializer, which old files list again
                continue
            kind = each.type.tensor_type
            declared.append((each.name, _dtype(kind.elem_type), [dim.dim_value if dim.dim_value > 0 else None for dim in kind.shape.dim]))
            self.values[each.name] = self.graph.placeholder(re.sub(r"\W", "_", each.name))
        if not declared:
            because, remedy = "integers are those of its inputs, and it has none", "give a file with inputs"
            raise ConfigurationError(f"{self.name} computes a constant", because=because, remedy=remedy)
        self.start = next(reversed(self.graph.nodes))
        self._read(graph)
        outputs = [self._argument(self.values[each.name], False) for each in graph.output]
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        module = fx.GraphModule(self.root, self.graph).eval()
        module.meta[_EXAMPLES] = declared
        if all(sizes and None not in sizes for _, _, sizes in declared):
            _free_batch(module)
        return module

    def _constants(self, graph: Any) -> None:
        for each in graph.initializer:
            value = _tensor(each)
            self.values[each.name] = _Constant(simplified(value), value.is_floating_point())
        self.uses.update(name for node in graph.node for name in node.input)
        self.uses.update(each.name for each in graph.output)

    def _read(self, graph: Any) -> None:
        """Read the nodes of the file, or of a branch of it."""
        normed = _layer_norms(graph, self.values, self.uses)
        for index, node in enumerate(graph.node):
            norm = normed.get(index)
            if norm is not None and isinstance(self.values[norm[0]], fx.Node):
                settings = {"axis": norm[1], "epsilon": norm[2]}
                self.values[node.output[0]] = self._call(node, OnnxOperator(written_norm), [self.values[norm[0]], None, None], settings)
            elif index not in normed:
                self._node(node)

    def _node(self, node: Any) -> None:
        attributes = {each.name: self._attribute(node, each) for each in node.attribute}
        inputs = [self.values[name] for name in node.input]
        if node.op_type == "Constant":
            value = next(iter(attributes.values()))
            self.values[node.output[0]] = _Constant(simplified(value if isinstance(value, Tensor) else torch.tensor(value)))
            return
        if node.op_type == "If":
            self._branch(node, inputs[0], attributes)
            return
        row = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if row is None:
            self._refuse(node)
        if row.opset:
            attributes["opset"] = self.opset
        if row.results:
            attributes["results"] = len(node.output)
        if all(each is None or isinstance(each, _Constant) for each in inputs):
            result = self._folded(node, row, inputs, attributes)
        else:
            row, inputs, attributes = self._as_layer(row, inputs, attributes)
            result = None if row.elementwise and self._joined(node) else self._call(node, row, inputs, attributes)
        if result is None:
            return
        several = row.results and len(node.output) > 1
        for index, name in enumerate(node.output):
            if name:
                self.values[name] = self._item(result, index) if several else result

    def _item(self, result: Any, index: int) -> Any:
        if isinstance(result, _Constant):
            return _Constant(result.value[index], result.trains)
        return self.graph.call_function(operator.getitem, (result, index))

    def _attribute(self, node: Any, attribute: Any) -> Any:
        from onnx import helper

        value = helper.get_attribute_value(attribute)
        if attribute.name == "to":
            return _dtype(value)
        if attribute.type == attribute.TENSOR:
            return _tensor(value) if node.op_type == "Constant" else _tensor(value).item()
        return value.decode() if isinstance(value, bytes) else list(value) if isinstance(value, (list, tuple)) else value

    def _folded(self, node: Any, row: OnnxOperator, inputs: list[Any], attributes: dict[str, Any]) -> _Constant:
        """Compute what depends on constants alone. Movements of parameters give parameters."""
        plain = [each if each is None else as_numbers(each.value) if index in row.numbers else each.value for index, each in enumerate(inputs)]
        with torch.no_grad():
            value = self._computed(node, row.function, plain, attributes)
        trains = any(each is not None and each.trains for each in inputs)
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            return _Constant(tuple(map(simplified, value)), trains)
        return _Constant(simplified(value), trains)

    def _computed(self, node: Any, function: Callable[..., Any], inputs: list[Any], attributes: dict[str, Any]) -> Any:
        try:
            return function(*inputs, **attributes)
        except (NotImplementedError, TypeError, RuntimeError, IndexError, ValueError) as error:
            self._refuse(node, str(error).splitlines()[0] if str(error) else type(error).__name__)

    def _call(self, node: Any, row: OnnxOperator, inputs: list[Any], attributes: dict[str, Any]) -> fx.Node:
        path = re.sub(r"\.+", ".", re.sub(r"[/:]", ".", node.name or node.output[0])).strip(".")
        for index in (*row.weights, *row.statistics):
            if index < len(inputs) and isinstance(inputs[index], _Constant):
                inputs[index].trains = index in row.weights
        arguments = [self._argument(each, row.elementwise, index in row.numbers) for index, each in enumerate(inputs)]
        self.graph.call_function(exported_at, (path, f"{self.name}: {node.op_type} {node.name or node.output[0]}"))
        return self.graph.call_function(row.function, tuple(arguments), attributes)

    def _argument(self, value: Any, elementwise: bool, number: bool = False) -> Any:
        """Return a node, or a number or tuple in its place."""
        if not isinstance(value, _Constant):
            return value
        content = value.value
        if isinstance(content, Tensor) and (number or (elementwise and content.numel() == 1 and content.dim() < 2)):
            return as_numbers(content if number else content.reshape(()))
        return self._registered(value) if isinstance(content, Tensor) else content

    def _registered(self, constant: _Constant) -> fx.Node:
        """Return the node of a constant as a parameter or buffer, which has the name of its tensor in the file."""
        known = self.registered.get(id(constant))
        if known is not None:
            return known[1]
        name = next((name for name, value in self.values.items() if value is constant), "constant")
        parts = name.split(".") if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) else [re.sub(r"\W+", "_", name).strip("_")]
        owner = self.root
        for part in parts[:-1]:
            if part not in dict(owner.named_children()):
                if hasattr(owner, part):
                    owner, parts = self.root, ["_".join(parts)]
                    break
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        while hasattr(owner, parts[-1]):
            parts[-1] += "_"
        if constant.trains and constant.value.is_floating_point():
            owner.register_parameter(parts[-1], nn.Parameter(constant.value))
        else:
            owner.register_buffer(parts[-1], constant.value)
        path = next(f"{path}.{parts[-1]}".lstrip(".") for path, module in self.root.named_modules() if module is owner)
        with self.graph.inserting_after(self.start):
            node = self.graph.get_attr(path)
        self.registered[id(constant)] = (constant, node)
        return node

    # ---- layers ------------------------------------------------------------------------------------------------------
    def _changed(self, constant: _Constant, function: Callable[[Tensor], Tensor]) -> _Constant:
        changed = _Constant(function(constant.value).contiguous(), constant.trains)
        name = next((name for name, value in self.values.items() if value is constant), "constant")
        self.values.setdefault(f"{name}_changed", changed)
        return changed

    def _as_layer(self, row: OnnxOperator, inputs: list[Any], attributes: dict[str, Any]) -> tuple[OnnxOperator, list[Any], dict[str, Any]]:
        """Return a product with a constant matrix as a linear layer, the matrix as PyTorch holds it; anything else unchanged."""
        if row not in (OPERATORS["MatMul"], OPERATORS["Gemm"]) or not isinstance(inputs[1], _Constant) or isinstance(inputs[0], _Constant):
            return row, inputs, attributes
        matrix, bias = inputs[1], inputs[2] if len(inputs) > 2 else None
        if not isinstance(matrix.value, Tensor) or matrix.value.dim() != 2 or attributes.get("transA"):
            return row, inputs, attributes
        if not attributes.get("transB"):
            matrix = self._changed(matrix, Tensor.t)
        if (alpha := attributes.get("alpha", 1.0)) != 1:
            matrix = self._changed(matrix, lambda value: value * alpha)
        if bias is not None:
            outputs, beta = matrix.value.shape[0], attributes.get("beta", 1.0)
            if not isinstance(bias, _Constant) or not isinstance(bias.value, Tensor) or bias.value.numel() not in (1, outputs):
                return row, inputs, attributes
            if bias.value.shape != (outputs,) or beta != 1:
                bias = self._changed(bias, lambda value: (value.flatten() * beta).expand(outputs))
        return OnnxOperator(linear, weights=(1, 2)), [inputs[0], matrix, bias], {}

    def _joined(self, node: Any) -> bool:
        """Give a constant that is added to a layer's result to that layer as its bias, or a norm its factor; return whether it was one."""
        place = {"Add": 2, "Mul": 1}.get(node.op_type)
        for name, other in (tuple(node.input), tuple(node.input)[::-1]) if place else ():
            layer, constant = self.values[name], self.values[other]
            if not isinstance(layer, fx.Node) or not isinstance(constant, _Constant) or not isinstance(constant.value, Tensor):
                continue
            if self.uses[name] == 1 and self._fits(layer, place, constant.value.shape):
                vector = constant if constant.value.dim() == 1 else self._changed(constant, Tensor.flatten)
                arguments = [*layer.args, *([None] * (3 - len(layer.args)))]
                vector.trains = True
                arguments[place] = self._registered(vector)
                layer.args = tuple(arguments)
                self.values[node.output[0]] = layer
                return True
        return False

    def _fits(self, layer: fx.Node, place: int, shape: torch.Size) -> bool:
        """Return whether a tensor of this shape can be the factor (1) or the bias (2) of a layer or a norm that has none."""
        if layer.target is written_norm:
            return len(shape) == 1 and layer.args[place] is None and (place == 2 or layer.args[2] is None)
        if place == 1 or layer.target not in (linear, convolution) or (len(layer.args) > 2 and layer.args[2] is not None):
            return False
        weight = layer.args[1]
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return False
        sizes = resolve(self.root, str(weight.target)).shape
        along = (sizes[0],) if layer.target is linear else (sizes[0], *(1 for _ in sizes[2:]))
        return shape in (along, (1, *along))

    # ---- branches and refusals ---------------------------------------------------------------------------------------
    def _branch(self, node: Any, condition: Any, branches: dict[str, Any]) -> None:
        """Read the branch that a constant condition chooses."""
        if not isinstance(condition, _Constant):
            self._refuse(node, "its condition depends on the inputs, and a graph has no branches")
        branch = branches["then_branch" if condition.value else "else_branch"]
        self._constants(branch)
        self._read(branch)
        for name, result in zip(node.output, branch.output, strict=True):
            self.values[name] = self.values[result.name]

    def _refuse(self, node: Any, because: str | None = None) -> NoReturn:
        kind, at = f"{node.domain}.{node.op_type}".removeprefix("ai.onnx.").lstrip("."), f"{self.name}: {node.name or node.output[0]}"
        if because is None and _QUANTIZED.search(kind):
            what, because = f"{self.name} is quantized already", f"its operator {kind} computes with integers whose scales another tool chose"
            raise ConfigurationError(what, at=at, because=because, remedy="give the float file that it was made from")
        because = because or "it has no row among the operators that are read: fxquant.frontend.onnx_operators and onnx_shapes"
        remedy = "export the network without it, or pass the nn.Module that the file was exported from"
        raise ConfigurationError(f"the ONNX operator {kind} is not read", at=at, because=because, remedy=remedy)


def _layer_norms(graph: Any, values: dict[str, Any], uses: Counter[str]) -> dict[int, tuple[str, int, float] | None]:
    """Return the norms that files before opset 17 write out, by the number of their last nodes; None at the other nodes of each.

    A norm is the name of its input, its axis and its epsilon. `values` are the constants of the file besides those of nodes `Constant`.
    """
    written = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"}
    readers: dict[str, list[Any]] = {}
    for index, node in enumerate(graph.node):
        for name in {*node.input}:
            readers.setdefault(name, []).append((index, node))

    def number(name: str) -> Any:
        held = _tensor(written[name]) if name in written else getattr(values.get(name), "value", None)
        return held.item() if isinstance(held, Tensor) and held.numel() == 1 else held

    def follow(node: Any, kind: str, count: int = 1) -> Any:
        following = readers.get(node.output[0], ())
        return next((each for each in following if each[1].op_type == kind), None) if uses[node.output[0]] == count else None

    def axis(node: Any) -> Any:
        held = {each.name: each for each in node.attribute}
        axes = list(held["axes"].ints) if "axes" in held else as_row(number(node.input[1])) if len(node.input) > 1 else ()
        return axes[0] if len(axes) == 1 and ("keepdims" not in held or held["keepdims"].i) else None

    found: dict[int, tuple[str, int, float] | None] = {}
    for index, node in enumerate(graph.node):
        if node.op_type != "ReduceMean" or axis(node) is None:
            continue
        sub = follow(node, "Sub")
        if sub is None or sub[1].input[0] != node.input[0]:
            continue
        square = follow(sub[1], "Pow", 2) or follow(sub[1], "Mul", 3)
        parts = [(index, node), sub, square]
        for kind in ("ReduceMean", "Add", "Sqrt", "Div"):
            parts.append(follow(parts[-1][1], kind) if parts[-1] is not None else None)
        if None in parts or parts[-1][1].input[0] != sub[1].output[0] or axis(parts[3][1]) != axis(node):
            continue
        epsilon = next((value for name in parts[4][1].input if isinstance(value := number(name), float)), None)
        if epsilon is None or (square[1].op_type == "Pow" and number(square[1].input[1]) != 2):
            continue
        found |= {each: None for each, _ in parts[:-1]} | {parts[-1][0]: (node.input[0], axis(node), epsilon)}
    return found


# ---- the batch ---------------------------------------------------------------------------------------------------------------
def _free_batch(module: fx.GraphModule) -> None:
    """Replace the batch size that a file holds in its shapes by -1, if every sample is then computed as before.

    The graph runs on random inputs of the file's batch size, and on twice as many, which begin with the same. A reshape of a tensor that
    is larger in the second run gets -1 in the place of the batch. What the two runs return of the same samples is compared: if it differs,
    or if a shape does not fit, nothing is replaced, and the batch size of the file is fixed.
    """
    before = {node: node.args for node in module.graph.nodes}
    once, more = (_drawn(module, seed) for seed in (0, 1))
    runs = fx.Interpreter(module), fx.Interpreter(module)
    runs[0].args_iter, runs[1].args_iter = iter(once), iter(map(torch.cat, zip(once, more, strict=True)))  # type: ignore[assignment]
    try:
        with torch.no_grad():
            for node in module.graph.nodes:
                if node.target is reshape:
                    (tensor, shape), (twice, again) = (run.map_nodes_to_values(node.args[:2], node) for run in runs)  # type: ignore[misc]
                    if isinstance(shape, tuple) and isinstance(tensor, Tensor) and shape == again and tensor.shape != twice.shape:
                        node.args = (node.args[0], _freed(shape, tensor.shape, twice.shape))
                for run in runs:
                    run.env[node] = run.run_node(node)
        pairs = list(zip(*(tree_leaves(run.env[node]) for run in runs), strict=True))
        if all(isinstance(each, Tensor) and _begins_with(twice, each) for each, twice in pairs):
            module.recompile()
            return
        because = "samples depend on each other"
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        because = str(error).splitlines()[0]
    for node, args in before.items():
        node.args = args
    logger.info("the batch size of the ONNX file is fixed: %s", because)


def _begins_with(twice: Tensor, once: Tensor) -> bool:
    """Return whether a tensor is larger than another in one dimension, and begins with it."""
    differing = [dim for dim, (a, b) in enumerate(zip(once.shape, twice.shape, strict=True)) if a != b]
    return len(differing) == 1 and torch.allclose(twice.narrow(differing[0], 0, once.shape[differing[0]]), once, 1e-3, 1e-4)


def _freed(shape: tuple[int, ...], once: torch.Size, twice: torch.Size) -> tuple[int, ...]:
    """Return the shape of a reshape with -1 for the dimension that the batch is in, which follows the same elements as it did before."""
    sizes = [once[dim] if size == 0 else size for dim, size in enumerate(shape)]
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(once) // -math.prod(sizes)
    dim = next(dim for dim, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b)
    place = next((at for at, size in enumerate(sizes) if math.prod(sizes[:at]) == math.prod(once[:dim]) and size != 1), None)
    return shape if place is None else (*sizes[:place], -1, *sizes[place + 1 :])
