"""Casts: between float dtypes, from float values to integers, and from integers to float values.

A cast of a quantized tensor to another float dtype leaves its integers and scale unchanged; the host casts the dequantized values.
A cast to float16 and back rounds to 11 bits, and one to bfloat16 to 8: an int8 grid has no more. On a wider grid the
rounding is left out, as it is for every operator between two grids.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir import functional, graph
from fxquant.ir.graph import BatchDim, TensorFact, computed, fact, is_parameter, is_random, parameter_value, refusal
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.ops.core.composite import CONSTANT
from fxquant.ops.core.declare import lowered, one_of
from fxquant.ops.core.record import OPERATORS, Instead, Operator, Plain, Same, Trait, operator_of
from fxquant.ops.core.samples import NORMED, ROUNDED, sampled
from fxquant.ops.elementwise.comparison import where
from fxquant.primitives import whole as primitives
from fxquant.primitives.whole import DTYPES

WHOLE_NUMBERS = Plain("int64")
CASTS: dict[str, torch.dtype] = {  # methods that only change the dtype
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16, "bool": torch.bool,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip
REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if arguments["dtype"] != torch.bfloat16 or all(user.target in (in_dtype, "float", "to", "type") for user in node.users):
        return None
    return "bfloat16 is computed on the host: no ONNX runtime returns it"


@lowered(function=lambda input, dtype=torch.float32: input.to(dtype), demand=Same(), carries=("input",), refuses=_refuses)
@sampled("x.half().float() * 2", "x.bfloat16().float() * 2", within=ROUNDED)
def in_dtype(lowering: Lowering, input: Quantized, dtype: torch.dtype = torch.float32) -> Quantized:
    """Return float values in another float dtype."""
    return input.with_value(lowering.call(primitives.converted, input.value, dtype)) if lowering.plain else input


IN_DTYPE = OPERATORS[in_dtype]


@lowered(
    function=lambda input, dtype=torch.int64: input.to(dtype),
    demand=WHOLE_NUMBERS,
    reads=("input",),
    refuses=one_of("dtype", *DTYPES, because=lambda dtype: f"it converts integers to {str(dtype).removeprefix('torch.')}"),
)
@sampled("(x > 0).long()")
def to_integer(lowering: Lowering, input: Any, dtype: torch.dtype = torch.int64) -> Any:
    """Return booleans or integers in an integer dtype."""
    return lowering.call(primitives.converted, input, dtype)


@lowered(function=lambda input, whole=False: input.to(torch.int64), demand=WHOLE_NUMBERS)
@sampled("(x * 3).long()", "(x * 3).int()", "(x * 3).short()", "(x * 3).char()", "(x * 3).abs().byte()", share=0.1)
def truncated(lowering: Lowering, input: Quantized, whole: bool = False) -> Any:
    """Return float values without their fraction, as int64; `whole` states that they have none except for the rounding to a grid.

    Lower a truncation; with `whole`, round to the nearest integer, since a grid need not hold integers exactly.
    """
    margin = torch.tensor(0.5 if whole else 0.0, dtype=torch.float32, device=input.scale.device)
    constants = [lowering.constant(role, value.detach(), torch.float32) for role, value in (("scale", input.scale), ("margin", margin))]
    return lowering.call(primitives.truncated, input.value, *constants)


@lowered(function=lambda input: input.to(torch.float32), carries=("input",), reads=("input",), traits=frozenset({Trait.INTEGERS}))
@sampled("(x > 0).sum(1).float() * 0.3", within=NORMED)
def to_real(lowering: Lowering, input: Any) -> Any:
    """Convert a bool or integer tensor to float: quantized on the output's scale, or a float32 tensor if the result is not quantized."""
    if lowering.plain:
        return lowering.call(primitives.converted, input, torch.float32)
    return lowering.quantize(input.float() if isinstance(input, Tensor) else input)


def _has_no_fraction(value: Any) -> bool:
    """Return whether a number, a node's float values or all items of a list are integers, judged by the operators that compute them."""
    if isinstance(value, list | tuple):
        return all(map(_has_no_fraction, value))
    if not isinstance(value, fx.Node):
        return value is None or float(value).is_integer()
    record = operator_of(value)
    if record is None:
        return False
    if Trait.KEEPS_INTEGERS in record.traits or record.moves:
        read = (*record.operands, "min", "max", "alpha")
        return all(_has_no_fraction(argument) for name, argument in record.arguments(value).items() if name in read)
    return Trait.INTEGERS in record.traits


def changed(input: fx.Node, before: torch.dtype, dtype: torch.dtype) -> str | Instead:
    """Return the operator that a cast to another dtype is."""
    if dtype == torch.bool:
        return Instead(torch.ne, {"input": input, "other": 0})
    if before == torch.bool and dtype == torch.float32:
        return Instead(where, {"condition": input, "input": 1.0, "other": 0.0})
    if dtype in DTYPES:
        if before == torch.bool or before in DTYPES:
            return Instead(to_integer, {"input": input, "dtype": dtype})
        return Instead(truncated, {"input": input, "whole": _has_no_fraction(input)}) if before in REAL_DTYPES else "it changes the dtype"
    if dtype == torch.float32 and before in DTYPES:
        return Instead(to_real, {"input": input})
    if dtype in REAL_DTYPES and (before == torch.float32 or input.target is in_dtype):
        return Instead(in_dtype, {"input": input, "dtype": dtype})
    return "it changes the dtype"


def asked_dtype(asked: Any) -> torch.dtype | None:
    """Return the dtype that an argument of a cast asks for; None of a device."""
    value = fact(asked) if isinstance(asked, fx.Node) else asked
    if isinstance(value, TensorFact | torch.dtype):
        return value if isinstance(value, torch.dtype) else value.dtype
    name = str(asked)
    if name.startswith("torch.") and name.endswith("Tensor"):  # "torch.FloatTensor"
        return torch.empty(0, dtype=torch.float32, device="cpu").type(name).dtype if ".cuda." not in name else None
    return None


# ---- Tensors that a model computes of sizes and constants alone, as grids of positions, or `zeros` of the batch's size ----

# What fills a tensor with a number, and reads no more than the shape of its operand. An uninitialized tensor may hold any number.
_FILLS = {
    torch.zeros, torch.zeros_like, "new_zeros", functional.zero, torch.empty, torch.empty_like, "new_empty", torch.ones, torch.ones_like,
    "new_ones", torch.full, torch.full_like, "new_full", functional.fill, "new_tensor",
}  # fmt: skip
MADE = "made"  # the prefix of constants that the model creates at every run
_BROADCASTING = {Trait.AFFINE, Trait.EXTREMUM, Trait.CHOOSES}


def made_of_sizes(gm: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """Return the tensors that a model computes of sizes and constants alone, by node, with 1 for each size that varies.

    A grid of positions that forward makes for the batch is such a tensor. It is computed at several sizes, along which it must be equal.
    """
    varies = any(graph.varies_beyond_batch(fact(node)) for node in gm.graph.find_nodes(op="placeholder"))
    points = graph.POINTS if varies else graph.POINTS[:2]
    at_points: list[dict[fx.Node, Any]] = [{} for _ in points]
    constants: dict[fx.Node, Tensor] = {}
    for node in gm.graph.nodes:
        for point, values in zip(points, at_points, strict=True):
            if (value := _value_at(gm, node, point, values)) is not None:
                values[node] = value
        computed_tensors = [value for values in at_points if isinstance(value := values.get(node), Tensor)]
        if len(computed_tensors) < len(points) or is_parameter(node):
            continue
        row = computed_tensors[0][tuple(slice(1) if isinstance(size, BatchDim) else slice(None) for size in graph.shape_of(node))]
        if all(torch.equal(each, row.expand_as(each)) for each in computed_tensors):
            constants[node] = row.clone()
    return constants


def _value_at(gm: fx.GraphModule, node: fx.Node, point: int, values: Mapping[fx.Node, Any]) -> Any:
    """Return a number, or a tensor that is computed of `values` alone, at one of `POINTS`; None for any other node."""
    node_fact = fact(node)
    if isinstance(node_fact, int | float | BatchDim):
        return graph.on_meta(node_fact, point)
    if node.op == "get_attr":
        return parameter_value(gm, node) if str(node.target).startswith(CONSTANT) else None
    if not isinstance(node_fact, TensorFact) or node.op not in ("call_function", "call_method"):
        return None
    if refusal(node) is not None or is_random(node) or node.target is functional.quant_stub:
        return None
    read = {operand: values.get(operand) for operand in node.all_input_nodes}
    if node.target in _FILLS:  # which read the shape of an activation alone
        like = {operand: graph.on_meta(of, point) for operand in read if isinstance(of := fact(operand), TensorFact)}
        read |= {operand: torch.empty_like(of, device="cpu") for operand, of in like.items()}
    if (not read and node.target not in _FILLS) or any(value is None for value in read.values()):
        return None
    with torch.no_grad():
        value = computed(gm, node, lambda operand: value.clone() if isinstance(value := read[operand], Tensor) else value)
        return torch.zeros_like(value) if "empty" in graph.target_name(node) else value


def made_number(node: Any) -> float | None:
    """Return the number that a tensor made of sizes holds everywhere; None for anything else."""
    while isinstance(node, fx.Node) and not is_parameter(node) and getattr(node.target, "__name__", "") == "expand":
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "get_attr" or not str(node.target).startswith(f"{MADE}."):
        return None
    value = parameter_value(node.graph.owning_module, node).flatten()  # type: ignore[arg-type]
    return float(value[0]) if len(value) and bool((value == value[0]).all()) else None


def is_broadcast(node: fx.Node, reader: fx.Node, record: Operator | None) -> bool:
    """Return whether a batch of 1 is enough for the constant `node` as an operand of `reader`: an activation has the result's shape."""
    if record is None or record.traits.isdisjoint(_BROADCASTING):
        return False
    others = [operand for operand in reader.all_input_nodes if operand is not node and not is_parameter(operand)]
    shapes = [other_fact.shape for other in others if isinstance(other_fact := fact(other), TensorFact)]
    result = fact(reader)
    return isinstance(result, TensorFact) and result.dtype == torch.float32 and result.shape in shapes
