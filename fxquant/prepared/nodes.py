"""The facts of one node, at whatever stage its graph is: what it calls, and the scale and dtype of its result."""

from __future__ import annotations

from torch import fx

from fxquant.ir.graph import annotation, fact, model_meta, resolve
from fxquant.ir.integer import QParams, qparams
from fxquant.numerics.grids import PLAIN_TYPES
from fxquant.ops import Operator, Trait, operator_of
from fxquant.ops.core.boundary import DEQUANTIZE, QUANTIZE
from fxquant.prepared.operators import QuantizedOperator
from fxquant.primitives import PRIMITIVES, quantization
from fxquant.primitives.record import Primitive


def called(model: fx.GraphModule, node: fx.Node) -> str:
    """Return the name of the operator, primitive, function, method or class of module that a node calls."""
    operator = record_of(model, node)
    if operator is not None:
        return operator.name
    if node.op == "call_module":
        return type(resolve(model, str(node.target))).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def kind_of(node: fx.Node) -> str:
    """Return the kind of value that a primitive's node holds; primitives that move elements move booleans and integers too."""
    record = PRIMITIVES[node.target]  # type: ignore[index]
    return "plain" if record.kind == "quantized" and fact(node).dtype in PLAIN_TYPES.values() else record.kind


def dtype_of(model: fx.GraphModule, node: fx.Node) -> str | None:
    """Return the integer dtype of a node's result, with a grid or plain ("bool", "int64"); None if it is float, or not decided yet."""
    grid, primitive = grid_of(model, node), primitive_of(node)
    if primitive is not None and kind_of(node) == "plain":
        return str(fact(node).dtype).removeprefix("torch.")
    spec = annotation(node)
    return grid.dtype if grid is not None else None if spec is None else spec.dtype


def in_float16(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node that holds no quantized tensor is one that the model's target computes itself, in float16."""
    target = model_meta(model).get("target")
    return target is not None and bool(target.float16) and target.computes_in_float16(called(model, node))


def record_of(model: fx.GraphModule, node: fx.Node) -> Operator | None:
    """Return the operator at a node, before or after it became a module; None if the table has none, or it has been lowered."""
    module = quantized_operator(model, node)
    return operator_of(node) if module is None else module.operator


def quantized_operator(model: fx.GraphModule, node: fx.Node) -> QuantizedOperator | None:
    """Return the quantized operator that a node of a prepared model calls; None if it calls none."""
    module = resolve(model, str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, QuantizedOperator) else None


def primitive_of(node: fx.Node) -> Primitive | None:
    """Return the primitive that a node of an integer graph calls; None if it calls none."""
    return PRIMITIVES.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]


def is_quantize(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node quantizes, at any stage."""
    return node.target is quantization.quantize or record_of(model, node) is QUANTIZE


def is_dequantize(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node dequantizes, at any stage."""
    return node.target is quantization.dequantize or record_of(model, node) is DEQUANTIZE


def is_dynamic(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node computes floats from floats by integers whose grid is found at run time, at any stage."""
    primitive, operator = primitive_of(node), record_of(model, node)
    return (primitive is not None and primitive.kind == "dynamic") or (operator is not None and Trait.DYNAMIC in operator.traits)


def grid_of(model: fx.GraphModule, node: fx.Node) -> QParams | None:
    """Return the scale and dtype of the quantized tensor at a node; None for other nodes, or before they have a quantizer.

    A prepared model's scale is NaN until it is calibrated, and () where the tensor is a sum, whose scale only the integer model knows.
    """
    module = quantized_operator(model, node)
    if module is None:
        return qparams(node)
    if module.plain:
        return None
    if module.output.follows_sum:
        return QParams((), module.output.dtype.name)
    grid = module.output.grid
    return QParams(float(grid.scale), grid.type.name, zero_point=grid.zero_point)
