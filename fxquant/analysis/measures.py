"""Measures of an operator at its place in a graph: the quantities that a target limits.

A measure is a function of a `Site` that returns values, and a limit must hold for each value. It returns none where it does not apply:
for another operator, or for a size that depends on the batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.ir.graph import Size, TensorFact, annotation, fact, is_parameter, resolve
from fxquant.ir.integer import Operation, Reference, operation, qparams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME, FUNCTIONS, METHODS, MODULES, OPERATORS, Instead, Operator, Parameter, Trait, calls, operator_of
from fxquant.ops.core.composite import DEQUANTIZE
from fxquant.ops.core.record import operand_nodes
from fxquant.ops.core.weighted import shape_of, sizes
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.table import SHIFTED, UNARY, segments_of
from fxquant.ops.movement.shape import permute, reshape
from fxquant.prepared.stage import quantized_operator, record_of
from fxquant.primitives.accumulate import sides


@dataclass(frozen=True)
class Site:
    """An operator of a graph: its node, its record, and its canonical arguments by name."""

    node: fx.Node
    operator: Operator
    arguments: dict[str, Any]

    def shape(self, name: str = "input") -> tuple[Size, ...]:
        """Return the shape of an argument; empty if it is not a tensor."""
        return shape_of(self.arguments.get(name)) or ()

    @property
    def operands(self) -> list[fx.Node]:
        """The activations it reads."""
        return operand_nodes(self.operator, self.arguments)

    @property
    def shapes(self) -> list[tuple[Size, ...]]:
        """The shapes of the activations it reads."""
        return [fact(operand).shape for operand in self.operands]

    @property
    def result(self) -> tuple[Size, ...]:
        """Return the shape of the operator's result; () for a result that is not a tensor."""
        value = fact(self.node)
        return value.shape if isinstance(value, TensorFact) else ()

    @property
    def rank(self) -> int:
        """The number of spatial dimensions: 2 for conv2d."""
        return len(self.shape()) - 2

    def spatial(self, name: str) -> list[int]:
        """Return an argument's number for each spatial dimension, the larger of both sides of a padding; empty without this argument."""
        value = self.arguments.get(name)
        if name == "stride" and value in (None, [], ()):
            value = self.arguments.get("kernel_size")
        numbers = [] if value is None or isinstance(value, str) else sizes(value, self.rank)
        return [max(both) for both in zip(*sides(numbers, self.rank), strict=True)] if name == "padding" and numbers else numbers


def known(values: Any) -> list[int]:
    """Return the sizes that do not depend on the batch."""
    return [value for value in values if isinstance(value, int)]


def _kernel(site: Site) -> list[Any]:
    if "weight" in site.arguments and site.rank > 0:
        return list(site.shape("weight")[2:])
    if "output_size" in site.arguments:  # windows that are all alike, unless it pools everything at once
        return [] if _pools_everything(site) else [a // b for a, b in zip(known(site.shape()[2:]), known(site.result[2:]), strict=True)]
    return site.spatial("kernel_size")


def _pools_everything(site: Site) -> bool:
    return all(size == 1 for size in site.result[2:])


def _averaged(site: Site) -> list[int]:
    """Return the height and width of an image whose mean it returns; none of any other operator."""
    whole = _pools_everything(site) if "output_size" in site.arguments else len(site.shape()) == 4 and _reduced(site) == [2, 3]
    return known(site.shape()[2:]) if whole else []


def _dilated(site: Site) -> bool:
    return any(d > 1 for d in site.spatial("dilation"))


def _beyond(values: list[int], limits: Sequence[int | Fraction]) -> list[int]:
    """Return the excess of values over their limits, rounded up; 0 within the limit."""
    return [max(math.ceil(value - limit), 0) for value, limit in zip(values, limits, strict=True)]


def _inner_readers(site: Site) -> list[fx.Node]:
    """Return the readers of the result, besides the output."""
    return [user for user in site.node.users if user.op != "output" and user.target is not DEQUANTIZE.function]


def _weight_size(site: Site) -> list[Any]:
    weight, groups = site.shape("weight"), site.arguments["groups"]
    inputs = known(site.shape()[1:2])
    return [math.prod(known(weight[2:])) * inputs[0] // groups] if inputs else []


def _ranks(site: Site) -> list[Any]:
    if site.operator.function in (reshape, permute):  # a shuffle of channels has five dimensions inside
        return []
    result = {len(site.result)} if isinstance(fact(site.node), TensorFact) else set()
    return sorted({len(shape) for shape in site.shapes} | result)


def _aligned(site: Site) -> list[Any]:
    """Return the padded elements per item, in the smaller of two layouts: channels to 4 and columns to 8, or channels to 32."""
    if len(site.result) != 4:
        return []
    channels, rows, columns = (size if isinstance(size, int) else 1 for size in site.result[1:])
    narrow = _up(channels, 4) * rows * _up(columns, 8)
    return [min(narrow, _up(channels, 32) * rows * columns)]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _reduced(site: Site) -> list[Any]:
    dim, rank = site.arguments["dim"], len(site.shape())
    chosen = range(rank) if dim in (None, (), []) else dim if isinstance(dim, list | tuple) else [dim]
    return sorted(int(d) % rank for d in chosen)


def _pattern(shape: tuple[Size, ...], result: tuple[Size, ...]) -> str:
    """Classify how an operand's shape broadcasts to the result's: "equal", "NC11", "1111", "other"."""
    if shape == result:
        return "equal"
    if len(shape) == len(result) == 4 and shape[2:] == (1, 1) and shape[:2] in (result[:2], (1, 1)):
        return "NC11" if shape[:2] == result[:2] else "1111"
    return "other"


def _broadcast_dimensions(site: Site) -> list[Any]:
    rank = len(site.result)
    return sorted({rank + d for shape in site.shapes for d in range(-len(shape), 0) if shape[d] != site.result[d]})


def _bounds(site: Site) -> list[Any]:
    """Return the bounds of a clamp that is an operator by itself, or is fused into one."""
    if site.operator.function is clamp:
        return [(site.arguments["min"], site.arguments["max"])]
    return [] if site.arguments.get("clamp") is None else [tuple(site.arguments["clamp"])]


def _resize_factor(site: Site) -> list[Any]:
    return [Fraction(a, b) for a, b in zip(known(site.result[2:]), known(site.shape()[2:]), strict=True)]


def is_power_of_two(value: Fraction) -> bool:
    """Return whether a positive number is a power of two, or one divided by one."""
    return all(part & (part - 1) == 0 for part in (value.numerator, value.denominator))


def _bits_read(site: Site) -> list[int]:
    """Return the bits of an operator's operands, without a residual of 16 bits: that one is added behind the layer."""
    return sorted({bits for operand in operand_nodes(site.operator, {**site.arguments, "residual": None}) for bits in _bits(operand)})


def _lacks_segments(site: Site) -> bool:
    """Return whether an operator is a function of one tensor for which the chip has no segments of 16 bits, so that it needs 8 bits."""
    values = {name: value for name, value in site.arguments.items() if name != "input"}
    if site.operator is not SHIFTED:
        values = {"function": site.operator.name, "factor": 1, "offset": 0, "settings": values}
    segments = segments_of(values["function"], values["factor"], values["offset"], tuple(values["settings"].items()))
    return values["function"] in UNARY and (segments is None or min(_bits_read(site), default=0) <= 8)


def _constant_patterns(site: Site) -> list[str]:
    """Classify how each tensor of constants broadcasts to the result's rows: "equal", "NC11", "1111" or "other"."""
    constants = [value for value in map(site.arguments.get, site.operator.operands) if isinstance(value, fx.Node) and is_parameter(value)]
    rank = len(site.result)
    return [_pattern((1, *((1,) * rank + (shape_of(each) or ()))[1 - rank :]), (1, *site.result[1:])) for each in constants]


def _rearranged(site: Site) -> list[int]:
    """Return the rank of a reshape or permutation; none in a shuffle of channels, of a vector, and between sequences and rows."""
    near = [each for each in (site.node, *site.operands, *site.node.users) if calls(each, permute)]
    swapped = [[int(dim) for dim in operator.arguments(each)["dims"]] for each in near if (operator := operator_of(each))]
    vector = max(known(site.shape()[1:]), default=1) == math.prod(known(site.shape()[1:]))
    return [] if vector or any(dims in ([0, 2, 1, 3, 4], [0, 2, 1]) for dims in swapped) else [len(site.result)]


def _bits(node: fx.Node) -> list[int]:
    """Return the bits of a node's quantized result; none if it is in float."""
    spec = annotation(node) or qparams(node)
    dtype = None if spec is None else ACTIVATION_TYPES.get(spec.dtype or "")
    return [] if dtype is None else [dtype.bits]


Measure = Callable[[Site], list[Any]]
# By the names that a user reads: "its <name> is". Of channels and sizes, of every activation that an operator reads.
MEASURES: dict[str, Measure] = {
    "kernel": _kernel,
    "area of a global average": lambda site: (
        [math.prod(known(site.shape()[2:]))] if "output_size" in site.arguments and _pools_everything(site) else []
    ),
    "side of an averaged image": _averaged, "rank of an averaged image": lambda site: [len(site.result)] if _averaged(site) else [],
    "stride": lambda site: site.spatial("stride"),
    "stride where it is dilated": lambda site: site.spatial("stride") if _dilated(site) else [],
    "stride with a residual added": lambda site: site.spatial("stride") if site.arguments.get("residual") is not None else [],
    "stride beyond the kernel": lambda site: _beyond(site.spatial("stride"), _kernel(site)),
    "dilation": lambda site: site.spatial("dilation"), "padding": lambda site: site.spatial("padding"),
    "padding beyond (kernel - 1) / 2": lambda site: _beyond(site.spatial("padding"), [(k - 1) // 2 for k in _kernel(site)]),
    "padding beyond kernel / stride": lambda site: _beyond(
        site.spatial("padding"), [Fraction(k, s) for k, s in zip(_kernel(site), site.spatial("stride"), strict=True)]
    ),
    "padding that is not a multiple of half the stride": lambda site: [  # of an odd stride, of the whole
        each for each, s in zip(site.spatial("padding"), site.spatial("stride"), strict=True) if each % (s if s % 2 else s // 2)
    ],
    "output padding": lambda site: site.spatial("output_padding"),
    "count_include_pad": lambda site: [site.arguments.get("count_include_pad", True)] if any(site.spatial("padding")) else [],
    "divisor_override": lambda site: [site.arguments.get("divisor_override")], "padding mode": lambda site: [site.arguments["mode"]],
    "channels": lambda site: known(shape[1] for shape in site.shapes if len(shape) > 1),
    "output channels": lambda site: known(site.result[1:2]),
    "output channels beyond a multiple of 4": lambda site: [size % 4 for size in known(site.result[1:2])],
    "output channels inside the model": lambda site: known(site.result[1:2]) if _inner_readers(site) else [],
    "number of readers inside the model": lambda site: [len(_inner_readers(site))],
    "channels of a kernel without groups": lambda site: [site.shape("weight")[1]] if site.arguments.get("groups") == 1 else [],
    "channels of a kernel with groups": lambda site: [site.shape("weight")[1]] if site.arguments.get("groups", 1) > 1 else [],
    "groups": lambda site: [site.arguments["groups"]], "weights for one output channel": _weight_size,
    "features": lambda site: known(site.shape("weight")),
    "matrix sizes": lambda site: [*known(site.shape("input")[-2:]), *known(site.shape("other")[-2:])], "rank": _ranks,
    "batch": lambda site: known(site.result[:1]),
    "sizes": lambda site: sorted({size for shape in (*site.shapes, site.result) for size in known(shape[1:])}),
    "bytes": lambda site: [math.prod(known(site.result)) * bits // 8 for bits in _bits(site.node)], "elements, aligned": _aligned,
    "number of operands": lambda site: [len(site.operands)],
    "number of constant operands": lambda site: [  # of tensors; a number is folded into the scale
        sum(isinstance(value, fx.Node) and is_parameter(value) for value in map(site.arguments.get, site.operator.operands))
    ],
    "concatenated dimension": lambda site: [site.arguments["dim"] % len(site.result)], "reduced dimension": _reduced,
    "number of reduced dimensions": lambda site: [len(_reduced(site))],
    "reduced size": lambda site: known(site.shape()[d] for d in _reduced(site)),
    "broadcasting": lambda site: [_pattern(shape, site.result) for shape in site.shapes],
    "dimension that is broadcast": _broadcast_dimensions,
    "number of operands that are broadcast": lambda site: [sum(shape != site.result for shape in site.shapes)],
    "place of the batch": lambda site: [[int(d) % len(site.shape()) for d in site.arguments["dims"]].index(0)],  # after a permutation
    "bounds": _bounds, "resize factor": _resize_factor,
    "resize factor that is not a power of two": lambda site: [each for each in _resize_factor(site) if not is_power_of_two(each)],
    "approximation": lambda site: [site.arguments["approximate"]], "image size": lambda site: known(site.shape()[2:]),
    "image area": lambda site: [math.prod(known(site.shape()[2:]))], "align_corners": lambda site: [bool(site.arguments["align_corners"])],
    "bits": _bits_read, "bits of an averaged image": lambda site: _bits_read(site) if _averaged(site) else [],
    "bits where it is dilated": lambda site: _bits_read(site) if _dilated(site) else [],
    "bits with groups and a stride": lambda site: _bits_read(site) if site.arguments["groups"] > 1 < max(site.spatial("stride")) else [],
    "bits of the result": lambda site: [bits for bits in _bits(site.node) if bits != 32],  # which are those of the sum itself
    "interpolation": lambda site: [site.arguments["mode"]],
    "factor of a nearest resize that is not a power of two": lambda site: [
        each for each in _resize_factor(site) if site.arguments["mode"].startswith("nearest") and not is_power_of_two(each)
    ],
    "elements left over by windows of one size": lambda site: [
        size % max(1, windows) for size, windows in zip(known(site.shape()[2:]), known(site.result[2:]), strict=False)
    ],
    "bits of a function without segments": lambda site: sorted({*_bits_read(site), *_bits(site.node)}) if _lacks_segments(site) else [],
    "number added to its operand": lambda site: [site.arguments["offset"]] if _lacks_segments(site) else [],
    "number of steps": lambda site: [len(site.arguments["steps"])],
    "bounds that do not begin at 0": lambda site: [bounds for bounds in _bounds(site) if bounds[0] != 0],
    "broadcasting of a constant operand": _constant_patterns,
    "number of rearranged dimensions": _rearranged,
    "place of the channels": lambda site: [len(site.result) - 1 - site.arguments["trailing"]],
    "area of an image that is flattened before it": lambda site: [
        math.prod(known(image[2:])) for each in site.operands if calls(each, reshape) and len(image := shape_of(each.args[0]) or ()) == 4
    ],
    "number of lists of indices": lambda site: [sum(isinstance(each, list | fx.Node) for each in site.arguments["index"])],
    "number of outputs": lambda site: [len(site.node.users) - len(_inner_readers(site))],
    "reduced dimension besides those of an averaged image": lambda site: [] if _averaged(site) else _reduced(site),
    "bits of the result where it is dilated": lambda site: _bits(site.node) if _dilated(site) else [],
}  # fmt: skip


# ---- The cost of an operator: multiply-accumulates, and the bytes of its weights and of its result -------------------
#
# Sizes that depend on the batch are taken at batch size 1, so that costs are those of one item.
WEIGHT, BIAS = "weight", "bias"  # the roles of the constants of an operator with a weight


def cost_of(model: fx.GraphModule, node: fx.Node, nodes: Mapping[str, fx.Node], dtype: str | None) -> tuple[int, int, int]:
    """Return multiply-accumulates, bytes of weights and of the result at a node; `dtype` is its quantized result's, None for float."""
    lowered = operation(node)
    if lowered is not None:
        operator, values = lowered_from(lowered, nodes)
        sums = operator is not None and Trait.SUMS in operator.traits
        names = [constant.node for role, constant in lowered.constants.items() if role in (WEIGHT, BIAS) or sums]
        weight_bytes = sum(_bytes(fact(nodes[name])) for name in names)
    else:
        operator, values = _written(model, node)
        integer = operator is not None and (dtype is not None or Trait.DYNAMIC in operator.traits)
        weight_bytes = _integer_bytes(model, node, operator, values) if integer else _float_bytes(model, node)
    itemsize = ACTIVATION_TYPES[dtype].storage.itemsize if dtype is not None and dtype in ACTIVATION_TYPES else None
    return _macs(operator, values, fact(node)), weight_bytes, sum(_bytes(tensor, itemsize) for tensor in _tensors(fact(node)))


def lowered_from(lowered: Operation, nodes: Mapping[str, fx.Node]) -> tuple[Operator | None, dict[str, Any]]:
    """Return the operator that a node of an integer graph is the result of, and its arguments and constants by name."""
    values = {
        name: fx.node.map_aggregate(value, lambda each: nodes[each.node] if isinstance(each, Reference) else each)
        for name, value in lowered.arguments.items()
    }
    # A loaded model may have a function of the user's that this process has not declared.
    return BY_NAME.get(lowered.name), values | {role: nodes[constant.node] for role, constant in lowered.constants.items()}


def _macs(operator: Operator | None, values: Mapping[str, Any], result: Any) -> int:
    if operator is None or operator.layer.macs is None or not isinstance(result, TensorFact):
        return 0
    shapes = {name: _at_one(shape) for name, value in values.items() if (shape := _shape(value)) is not None}
    return math.ceil(operator.layer.macs(shapes, _at_one(result.shape)))


def _written(model: fx.GraphModule, node: fx.Node) -> tuple[Operator | None, dict[str, Any]]:
    """Return the operator at a node and its arguments by name; (None, {}) if the node is neither canonical nor a weighted layer."""
    operator = record_of(model, node)
    if operator is not None:
        return operator, operator.arguments(node)
    module: Any = resolve(model, str(node.target)) if node.op == "call_module" else None
    tables: dict[str, Mapping[Any, Any]] = {"call_module": MODULES, "call_function": FUNCTIONS, "call_method": METHODS}
    operator, take = tables.get(node.op, {}).get(node.target if module is None else type(module), (None, None))
    if operator is None or operator.layer.macs is None:
        return None, {}
    if module is not None:
        call_arguments: Any = take(module)
    else:
        call_arguments = operator.bind(node.args, node.kwargs) if take is None else take(*node.args, **node.kwargs)
    if isinstance(call_arguments, Instead):
        operator, call_arguments = OPERATORS[call_arguments.function], call_arguments.arguments
    if isinstance(call_arguments, str):
        return None, {}
    if module is None:
        return operator, call_arguments
    arguments = {name: getattr(module, value.name) if isinstance(value, Parameter) else value for name, value in call_arguments.items()}
    return operator, {**arguments, **dict(zip(operator.operands, node.args, strict=False)), **node.kwargs}


def _shape(value: Any) -> tuple[Size, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else shape_of(value)


def _at_one(shape: tuple[Size, ...]) -> tuple[int | Fraction, ...]:
    """Return the sizes at batch size 1: integers, or a Fraction for a size such as B/2. Fractions are ten times as slow as integers."""
    at_one = [size if isinstance(size, int) else size.coefficient + size.offset for size in shape]
    return tuple([size.numerator if size.denominator == 1 else size for size in at_one])


def bytes_of(facts: Any) -> int:
    """Return the bytes of all tensors of a nest of facts, of one item."""
    return sum(map(_bytes, _tensors(facts)))


def _bytes(tensor: TensorFact, itemsize: int | None = None) -> int:
    return math.ceil(math.prod(_at_one(tensor.shape))) * (itemsize or tensor.dtype.itemsize)


def _tensors(nest: Any) -> list[TensorFact]:
    """Return all tensors of a nest of facts."""
    if isinstance(nest, TensorFact):
        return [nest]
    items = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _integer_bytes(model: fx.GraphModule, node: fx.Node, operator: Operator | None, values: Mapping[str, Any]) -> int:
    """Return the bytes of weight and bias once lowered: a weight in its config's dtype, a bias or batch norm's in the accumulator's."""
    module, spec = quantized_operator(model, node), annotation(node)
    configured = None if spec is None or spec.config is None else spec.config.weight.type
    dtype = configured if module is None else module.weight_quantizer.dtype
    normalized = values.get("batch_norm") is not None
    weight = None if operator is None else operator.layer.weight(**{name: _on_meta(value) for name, value in values.items()})
    if operator is None or dtype is None or not (operator.traits & {Trait.SUMS, Trait.DYNAMIC} or normalized or weight is not None):
        return 0
    channels = fact(node).shape[1] if weight is None else len(weight)
    read = [value for name in (WEIGHT, *operator.operands) if isinstance(value := values.get(name), fx.Node) and is_parameter(value)]
    weights = [shape for value in read if (shape := _shape(value)) is not None]
    weights += [(channels,)] * (normalized and Trait.SUMS not in operator.traits)
    biases = [(channels,)] * (normalized or values.get(BIAS) is not None)
    bias = torch.int64 if dtype.bits > 8 else torch.int32
    return sum(map(_bytes, [*(TensorFact(shape, dtype.storage) for shape in weights), *(TensorFact(shape, bias) for shape in biases)]))


def _on_meta(value: Any) -> Any:
    """Return a parameter as a tensor without data; anything else as it is."""
    shape = _shape(value) if isinstance(value, fx.Node) and is_parameter(value) else None
    return value if shape is None else torch.empty([size for size in shape if isinstance(size, int)], device="meta", dtype=torch.float32)


def _float_bytes(model: fx.GraphModule, node: fx.Node) -> int:
    """Return the parameters and buffers of a module, and the parameters that a function reads."""
    read = [operand for operand in node.all_input_nodes if operand.op == "get_attr"] + [node] * (node.op == "call_module")
    values = [resolve(model, str(each.target)) for each in read]
    groups = ([*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value] for value in values)
    tensors = [tensor for group in groups for tensor in group]
    computed = [fact(operand) for operand in node.all_input_nodes if operand.op != "get_attr" and is_parameter(operand)]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
    return total + sum(_bytes(each) for each in computed if isinstance(each, TensorFact))
