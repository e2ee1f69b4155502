"""The facts of a model's operators, as values: the common source of `explain`, `check`, `inspect` and every report; and its segments."""

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx
from torch.utils import _pytree as pytree

from fxquant.analysis.measures import cost_of
from fxquant.errors import ConfigurationError
from fxquant.ir import graph as facts
from fxquant.ir.graph import TensorFact
from fxquant.ir.integer import QParams, Reference, is_inner, noted, notes, operation, origin
from fxquant.ops import BY_NAME, carried
from fxquant.prepared import stage as stages
from fxquant.prepared.stage import called, dtype_of, grid_of, in_float16, is_dequantize, is_dynamic, primitive_of, quantized_operator
from fxquant.support.arguments import checked, instance, such

HOST = "host"  # where float operators run
NOTES = {"accumulator_bits": "accumulator of {} bits", "residual": "residual {}"}
NOTES |= dict.fromkeys(("wide", "narrowed", "equalized", "tuned"), "{}")


@dataclass(frozen=True)
class Intermediate:
    """A quantized tensor between the primitives of one operator.

    name       its node's name
    primitive  the name of the primitive that computes it
    grid       its scale and dtype
    """

    name: str
    primitive: str
    grid: QParams


@dataclass(frozen=True)
class Layer:
    """One operator of a model, with everything that was fused into it.

    name              its node's name: the same in the prepared model, the integer model and the ONNX file
    operator          PyTorch's name of the operator ("conv2d"); in a traced graph the user's call ("Conv2d")
    integer           whether its result is a quantized tensor, or a bool or int64 tensor computed from quantized ones
    dynamic           whether it is a linear layer whose operand is quantized at run time, and whose result is dequantized
    boundary          whether it is a quantize or a dequantize
    dtype             the dtype of its result: "int8", … of a quantized tensor, else PyTorch's ("float32", "bool"); "" if it is not a tensor
    grid              the scale and dtype of its quantized result: one scale, NaN before calibration, or several along an axis; none, (), in
                      a prepared model whose 32-bit output has the scale of its sum. None for a float operator, and before there
                      are quantizers
    shape             the shape of its result, with sizes that depend on the batch as text ("B"); () if it is not one tensor
    source            the user's line
    module            the dotted path of the user's module; "" for the model itself
    device            the device it runs on: the target's name ("bayes-e") if it is integer, or a float operator that the target computes in
                      float16; else "host"
    reason            why it is integer or float; "" before that is decided, and for integer operators in an integer model, which have
                      `notes`
    notes             for an integer model: the proved accumulator, the path of a residual, the decomposition of a long sum
    accumulator_bits  the proved width of its accumulators in an integer model; 0 without sums
    macs              multiply-accumulates of convolutions, linear layers and matrix products; 0 for others
    weight_bytes      bytes of its weight and bias in the integer model: int4 and int8 in one byte, int16 in two; a bias in four, with an
                      int16 weight in eight; 0 without a weight. For a float operator, bytes of its parameters and buffers
    activation_bytes  bytes of its result: int4 and int8 in one byte for each element, int16 in two, int32 in four; a float result as
                      PyTorch holds it
    fused             the names of the nodes that were fused into it
    part              its name as a part of a composite operator ("softmax: exp"); "" if it is not a part
    inner             whether only other parts of its composite read it
    intermediates     the quantized tensors inside of it, in an integer model
    parts             for a tensor composed of several with one scale: their names, and each one's loss in dB against its own scale

    `macs` and `activation_bytes` are those of one item, or of the whole batch where the model is fixed to a batch size.
    """

    name: str
    operator: str
    integer: bool
    dynamic: bool
    boundary: bool
    dtype: str
    grid: QParams | None
    shape: tuple[int | str, ...]
    source: str
    module: str
    device: str
    reason: str
    notes: tuple[str, ...]
    accumulator_bits: int
    macs: int
    weight_bytes: int
    activation_bytes: int
    fused: tuple[str, ...]
    part: str = ""
    inner: bool = False
    intermediates: tuple[Intermediate, ...] = ()
    parts: tuple[tuple[str, float], ...] = ()


GRAPH = instance("a traced, prepared or integer model", fx.GraphModule)
QUANTIZED = such("a prepared or integer model", GRAPH.take, lambda model: facts.stage_of(model) in ("PREPARED", "INTEGER", "FUSED"))


@checked(model=GRAPH)
def layers(model: fx.GraphModule) -> tuple[Layer, ...]:
    """Return the operators of a graph at any stage, in the order they run.

    An operator that has no counterpart in integers (an identity, a dropout) is not a layer of the integer model; all others have the
    same names in both. Linear in the nodes. Raises ConfigurationError for a model that is not a graph.
    """
    target = facts.model_meta(model).get("target")
    device = HOST if target is None else target.name
    nodes = {node.name: node for node in model.graph.nodes}
    inside: dict[str, list[Intermediate]] = {}
    all_layers = []
    for node in model.graph.nodes:
        primitive = primitive_of(node)
        if primitive is not None and is_inner(node):
            if (grid := grid_of(model, node)) is not None:
                inside.setdefault(origin(node), []).append(Intermediate(node.name, primitive.name, grid))
        elif facts.annotation(node) is not None or facts.computes_tensor(node):
            all_layers.append(_layer(model, node, nodes, device, tuple(inside.pop(node.name, ()))))
    return tuple(all_layers)


def left_in_float(all_layers: tuple[Layer, ...]) -> list[Layer]:
    """Return the layers that the compiler left in float, without boundary nodes and without layers that are integer inside."""
    return [layer for layer in all_layers if not layer.integer and layer.reason and not layer.boundary and not layer.dynamic]


def _layer(
    model: fx.GraphModule, node: fx.Node, nodes: Mapping[str, fx.Node], device: str, intermediates: tuple[Intermediate, ...]
) -> Layer:
    spec, lowered, grid, result = facts.annotation(node), operation(node), grid_of(model, node), facts.fact(node)
    dtype = dtype_of(model, node)
    macs, weight_bytes, activation_bytes = cost_of(model, node, nodes, dtype)
    tensor = result if isinstance(result, TensorFact) else None
    reason = "" if spec is None else spec.because
    if (module := quantized_operator(model, node)) is not None:
        changed = ("" if module.factors is None else module.factors.description, module.weight_quantizer.description)
        reason = "; ".join(text for text in (reason, *changed) if text)
    at_boundary = stages.is_quantize(model, node) or is_dequantize(model, node)
    where = HOST if dtype is None and not is_dynamic(model, node) else device
    if dtype is None and not at_boundary and in_float16(model, node):
        reason = "; ".join([*([reason] if reason else []), f"{device} computes it in float16, outside the integer contract"])
        where = device
    operator = called(model, node) if lowered is None else lowered.name
    shown = dtype or ("" if tensor is None else str(tensor.dtype).removeprefix("torch."))
    shape = () if tensor is None else tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    remarks = () if lowered is None else tuple(NOTES[key].format(value) for key, value in notes(node).items() if key in NOTES)
    return Layer(
        node.name, operator, dtype is not None, is_dynamic(model, node), at_boundary, shown, grid, shape, facts.source(node),
        facts.module_path(node), where, reason, remarks, noted(node, "accumulator_bits") or 0, macs, weight_bytes, activation_bytes,
        facts.fused(node), str(facts.part(node) or ""), facts.is_inner_part(node), intermediates,
        coarser(model, node, nodes),
    )  # fmt: skip


# ---- operators that hold several tensors on one grid, which is coarser than theirs -----------------------------------
CLEARLY = 6.0  # dB: half of the steps


def coarser(model: fx.GraphModule, node: fx.Node, nodes: Mapping[str, fx.Node]) -> tuple[tuple[str, float], ...]:
    """Return the tensors that share a node's scale by concatenation, with each one's loss in dB; () for one tensor, or an unknown scale."""
    module, lowered, grid = quantized_operator(model, node), operation(node), grid_of(model, node)
    if grid is None or not isinstance(grid.scale, float) or math.isnan(grid.scale):
        return ()
    if module is not None:
        operator, arguments = module.operator, module.operator.bind_call(node.args, dict(node.kwargs))
    elif lowered is not None and (record := BY_NAME.get(lowered.name)) is not None:
        operator, arguments = record, lowered.arguments
    else:
        return ()
    operands = pytree.tree_leaves([arguments.get(name) for name in carried(operator)])
    tensors = [nodes[value.node] if isinstance(value, Reference) else value for value in operands]
    tensors = [value for value in dict.fromkeys(tensors) if isinstance(value, fx.Node) and not facts.is_parameter(value)]
    scales = {value.name: each.scale for value in tensors if (each := grid_of(model, value)) is not None}
    if len(scales) < 2 or not all(isinstance(scale, float) and scale > 0 for scale in scales.values()):
        return ()
    return tuple((name, max(20 * math.log10(grid.scale / scale), 0.0)) for name, scale in scales.items())  # type: ignore[operator]


def description(parts: tuple[tuple[str, float], ...]) -> str:
    """Return a sentence about the tensors (name, loss in dB) that lose `CLEARLY` dB or more by a shared scale; "" without any."""
    lose = [f"%{name} loses {loss:.0f} dB" for name, loss in parts if loss >= CLEARLY]
    return f"all its tensors share one scale: {' and '.join(lose)}; a rule that names it can give it more bits, or None" if lose else ""


def recurrent_parts(all_layers: tuple[Layer, ...]) -> frozenset[str]:
    """Return the names of all parts of recurrent layers and cells."""
    recurrent = {name for name, operator in BY_NAME.items() if operator.recurs}
    return frozenset(layer.name for layer in all_layers if layer.part.split(":", 1)[0] in recurrent)


# ---- Partition of a model into segments, run one after another, each on one device: the target for integers, or the host for float
#
# Segments are convex: data that leaves one does not come back into it. There are as few as possible, in either order of the devices: every
# operator is in the first segment of its device at which all its operands are available.
@dataclass(frozen=True)
class Segment:
    """One segment.

    device   where it runs: the target's name ("bayes-e"), or "host" for float operators that the target does not compute in float16
    nodes    the names of its operators, in the order they run
    inputs   the names of the tensors it takes: inputs of the model, and outputs of segments before it
    outputs  the names of the tensors that later segments take, or that the model returns
    """

    device: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@checked(model=QUANTIZED)
def segments(model: fx.GraphModule, cut: Sequence[str | Sequence[str]] = ()) -> tuple[Segment, ...]:
    """Return the segments of a prepared or an integer model, in the order they run.

    `cut` names tensors, in order, after which the model is cut as well: the operators that such a tensor depends on, without those of an
    earlier cut, are before the cut, all others after it. A path of the user's module means its last tensor. A nested list of
    names is one cut. Raises ConfigurationError for a model at another stage, and for a name that no tensor has.
    """
    groups = grouped(model, cut)
    place = {node: number for number, (_, nodes) in enumerate(groups) for node in nodes}
    readers = [node for node in model.graph.nodes if _works(node) or node.op == "output"]
    leaving = {read for node in readers for read in _reads(node) if place.get(read) != place.get(node)}
    all_segments = []
    for number, (device, nodes) in enumerate(groups):
        entering = dict.fromkeys(read for node in nodes for read in _reads(node) if place.get(read) != number)
        all_segments.append(Segment(device, _names(nodes), _names(entering), _names(node for node in nodes if node in leaving)))
    return tuple(all_segments)


def grouped(model: fx.GraphModule, cut: Sequence[str | Sequence[str]]) -> list[tuple[str, list[fx.Node]]]:
    """Return the device and the nodes of every segment, in the order they run."""
    working = [node for node in model.graph.nodes if _works(node)]
    stage = _stages(model, working, cut)
    device = {node: _device(model, node) for node in working}
    groups: list[tuple[str, list[fx.Node]]] = []
    for number in sorted(set(stage.values())):
        mine = [node for node in working if stage[node] == number]
        tried = [_levels(mine, device, first) for first in dict.fromkeys(device[node] for node in mine)]
        levels = min(tried, key=lambda levels: len(set(levels.values())))
        for level in sorted(set(levels.values())):
            nodes = [node for node in mine if levels[node] == level]
            groups.append((device[nodes[0]], nodes))
    return groups


def _works(node: fx.Node) -> bool:
    """Return whether a node is an operator. Sizes and functions of parameters are none: every segment that reads one computes it again."""
    return node.op not in ("placeholder", "get_attr", "output") and not facts.is_parameter(node) and facts.computes_tensor(node)


def _device(model: fx.GraphModule, node: fx.Node) -> str:
    integer = primitive_of(node) is not None or quantized_operator(model, node) is not None or is_dequantize(model, node)
    return str(model.meta["target"].name) if integer or in_float16(model, node) else HOST


def _levels(nodes: list[fx.Node], device: Mapping[fx.Node, str], first: str) -> dict[fx.Node, int]:
    """Return the segment number of every node, with segment 0 on device `first`; the primitives of an operator stay together."""
    levels: dict[fx.Node, int] = {}
    for _, together in itertools.groupby(nodes, origin):
        operator = list(together)
        before = [levels[read] + (device[read] != device[node]) for node in operator for read in _reads(node) if read in levels]
        level = max(before, default=int(device[operator[0]] != first))
        levels.update(dict.fromkeys(operator, level))
    return levels


def _reads(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operators and inputs that a node reads, also through numbers and computed parameters."""
    for operand in node.all_input_nodes:
        if _works(operand) or operand.op == "placeholder":
            yield operand
        else:
            yield from _reads(operand)


def _stages(model: fx.GraphModule, working: list[fx.Node], cut: Sequence[str | Sequence[str]]) -> dict[fx.Node, int]:
    """Return the number of cuts before every operator."""
    edges = nx.DiGraph()
    edges.add_nodes_from(working)
    edges.add_edges_from((read, node) for node in working for read in _reads(node))
    stage: dict[fx.Node, int] = {}
    for number, names in enumerate(cut):
        for name in [names] if isinstance(names, str) else names:
            node = _named(model, working, name)
            for one in (node, *nx.ancestors(edges, node)):
                stage.setdefault(one, number)
    for node in working:
        # Dequantized values are in the stage of their integers, and a part of a value that is not a tensor is in the stage of that value.
        reads = [
            read for read in _reads(node) if read in stage and (is_dequantize(model, node) or not isinstance(facts.fact(read), TensorFact))
        ]
        if reads:
            stage[node] = stage[reads[0]]
        stage.setdefault(node, len(cut))
    return {node: stage[node] for node in working}


def _named(model: fx.GraphModule, working: list[fx.Node], name: str) -> fx.Node:
    records = {node: primitive_of(node) for node in working if isinstance(facts.fact(node), TensorFact)}
    between = {node for node, record in records.items() if record is not None and (record.kind == "accumulator" or is_inner(node))}
    tensors = {node.name: node for node in records if node not in between}  # of the model
    if name in tensors:
        return tensors[name]
    inside = [node for node in tensors.values() if facts.module_path(node) == name or facts.module_path(node).startswith(f"{name}.")]
    inside = [node for node in inside if not is_dequantize(model, node)]
    inside = inside or [node for node in tensors.values() if name.replace(".", "_") in facts.fused(node)]
    if name and inside:
        return inside[-1]
    near = difflib.get_close_matches(name, [*tensors, *dict.fromkeys(map(facts.module_path, working))], n=1)
    because = "a cut is named after a tensor that the model computes, or the path of a module in the user's model"
    remedy = f"did you mean {near[0]!r}?" if near else "fxq.inspect.layers and fxq.text list the names"
    raise ConfigurationError(f"the model has no tensor {name!r} to cut after", because=because, remedy=remedy)


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
