"""Float operators that are written directly, without PyTorch's exporter, which takes seconds for any model, or as others that it writes.

They are the operators of the float parts of transformers: norms, attention, and operators that move elements. A run of float nodes that
has no others is written here. Any other run, and any call with arguments that no form here supports, is left to the exporter.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import BatchDim, Size, TensorFact, fact, is_parameter, resolve, target_name, varies_beyond_batch
from fxquant.ops import OPERATORS
from fxquant.ops.attention import attention, softmax
from fxquant.ops.core.form import WHOLE_OPSET, Call
from fxquant.ops.elementwise import activation, arithmetic, comparison, unary
from fxquant.ops.indexing import index
from fxquant.ops.layers import linear
from fxquant.ops.movement import repeating, shape
from fxquant.ops.pooling import totals
from fxquant.ops.reduction import distance, moments, progression
from fxquant.prepared.copied import Step, steps_of
from fxquant.primitives import PRIMITIVES
from fxquant.support import declaring

OPSET = 18  # the first in which all of these operators have their present definition

Read = Callable[[Any], str]  # returns the name of a node's value, or of a constant with a number's value
Plan = Callable[[Any, Read], str]  # appends the ONNX nodes of a node to an emitter, and returns the name of the result
FORMS: dict[Any, Callable[..., Plan | None]] = {}  # by the operator's function: given a node and its arguments, its plan, or None
MOVING = ("view", "reshape", "permute", "transpose", "contiguous", "unsqueeze", "squeeze")  # methods that are called on constants

form = declaring(FORMS)


class Direct:
    """The float nodes of an integer graph that can be written without the exporter."""

    def __init__(self, integer: fx.GraphModule, opset: int) -> None:
        self.integer, self.opset = integer, opset
        self.constants: dict[fx.Node, Tensor] = {}  # the results of nodes that read only constants

    def plans(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[tuple[fx.Node, Plan]] | None:
        """Return the plan of each node in a run, in order, without sizes; None if a node cannot be written."""
        if self.opset < OPSET or not all(is_size(output) or (_is_float32(output) and not self._fold(output)) for output in outputs):
            return None
        plans: list[tuple[fx.Node, Plan]] = []
        for node in nodes:
            if self._fold(node) or is_size(node):
                continue  # shapes are known without sizes
            plan = self._plan(node)
            if plan is None:
                return None
            plans.append((node, plan))
        return plans

    def emit(self, plans: Sequence[tuple[fx.Node, Plan]], outputs: Sequence[fx.Node], emitter: Any, values: dict[fx.Node, Any]) -> None:
        """Append the planned nodes; the outputs get the names of their nodes."""

        def read(value: Any) -> str:
            if not isinstance(value, fx.Node):
                return str(emitter.constant(float(value)))
            return str(emitter.constant(self.constants[value]) if self._fold(value) else values[value])

        for node, plan in plans:
            values[node] = plan(emitter, read)
            if node in outputs:
                values[node] = emitter.named(emitter.node("Identity", values[node]), node.name)

    def _plan(self, node: fx.Node) -> Plan | None:
        own = FORMS.get(node.target) if node.op == "call_function" else None
        if own is None:
            return self._copied(node)
        if not all(is_size(each) or _is_float32(each) for each in node.all_input_nodes):
            return None  # constants too: a boolean mask is not added
        try:
            return own(node, *node.args, **node.kwargs)
        except TypeError:  # arguments that the form does not take
            return None

    def _copied(self, node: fx.Node) -> Plan | None:
        """Return the plan of a node that copies elements, by the primitives that do so."""
        steps = steps_of(node, lambda each: self.constants[each] if self._fold(each) else None)
        if steps is None or any(is_size(each) and each not in self.constants for each in node.all_input_nodes):
            return None  # sizes have no names here

        def write(e: Any, read: Read) -> str:
            by_step: dict[Step, str] = {}

            def argument(value: Any) -> Any:
                return by_step[value] if isinstance(value, Step) else read(value) if isinstance(value, fx.Node) else value

            for step in steps.calls:
                by_step[step] = PRIMITIVES[step.primitive].onnx(e, *_mapped(step.arguments, argument))
            return str(argument(steps.result))

        return write

    def _fold(self, node: fx.Node) -> bool:
        """Return whether a node is a constant, and keep its value if it is."""
        if node in self.constants:
            return True
        value: Any = None
        if node.op == "get_attr":
            value = resolve(self.integer, str(node.target))
        elif self._moves(node) and all(self._fold(operand) for operand in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.constants.__getitem__)
            target: Any = node.target
            with torch.no_grad():
                value = target(*args, **kwargs) if node.op == "call_function" else getattr(args[0], target)(*args[1:], **kwargs)
        if not isinstance(value, Tensor):
            return False
        self.constants[node] = value.detach().cpu().contiguous()
        return True

    @staticmethod
    def _moves(node: fx.Node) -> bool:
        moving = (*FORMS, shape.reshape, shape.permute, shape.roll, index.getitem, operator.getitem)
        moves = node.target in (moving if node.op == "call_function" else MOVING)
        return moves and node.op in ("call_function", "call_method") and bool(node.all_input_nodes)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    return type(value)(_mapped(each, function) for each in value) if isinstance(value, list | tuple) else function(value)


def _is_float32(node: fx.Node) -> bool:
    node_fact = fact(node)
    return isinstance(node_fact, TensorFact) and node_fact.dtype == torch.float32


def is_size(node: fx.Node) -> bool:
    """Return whether a node is an integer, which may depend on the batch size."""
    return isinstance(fact(node), int | BatchDim)


def _sizes(node: fx.Node) -> tuple[Size, ...]:
    node_fact: TensorFact = fact(node)
    return node_fact.shape


@form(repeating.expand)
def _expand(node: fx.Node, input: fx.Node, sizes: list[Any]) -> Plan | None:
    """Return the plan of an expansion to sizes that do not depend on the batch, or that are multiples of a size of the first input."""
    first = next((each for each in node.graph.nodes if each.op == "placeholder" and isinstance(fact(each), TensorFact)), None)
    target = _sizes(node)
    unit = None if first is None else next((size for size in _sizes(first) if isinstance(size, BatchDim)), None)
    if 0 in [1 if size == unit else 0 for size in target if isinstance(size, BatchDim)]:
        return None

    def write(e: Any, read: Read) -> str:
        def extent(size: Size) -> str:
            if isinstance(size, int):
                return str(e.constant([size], torch.int64))
            assert first is not None
            place = e.constant([_sizes(first).index(size)], torch.int64)
            return str(e.node("Gather", e.node("Shape", read(first)), place, axis=0))

        return str(e.node("Expand", read(input), e.node("Concat", *map(extent, target), axis=0)))

    return write


@form(moments.layer_norm)
def _layer_norm(
    node: fx.Node, input: fx.Node, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Plan:
    def write(e: Any, read: Read) -> str:
        factors = e.constant(torch.ones(list(normalized_shape), device="cpu", dtype=torch.float32)) if weight is None else read(weight)
        rest = [] if bias is None else [read(bias)]
        return str(e.node("LayerNormalization", read(input), factors, *rest, axis=-len(normalized_shape), epsilon=float(eps)))

    return write


@form(softmax.softmax)
def _softmax(node: fx.Node, input: fx.Node, dim: int | None = None) -> Plan | None:
    return None if dim is None else lambda e, read: e.node("Softmax", read(input), axis=dim)


@form(attention.scaled_dot_product_attention)
def _attention(
    node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, attn_mask: Any = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Plan | None:  # fmt: skip
    width, rank = _sizes(query)[-1], len(_sizes(key))
    if is_causal or enable_gqa or not isinstance(width, int):
        return None
    order = [*range(rank - 2), rank - 1, rank - 2]
    factor = width**-0.5 if scale is None else scale

    def write(e: Any, read: Read) -> str:
        # The scores are scaled, not the operands: onnxruntime fuses two scalings of one tensor into a graph that it cannot open.
        scores = e.node("Mul", e.node("MatMul", read(query), e.node("Transpose", read(key), perm=order)), e.constant(float(factor)))
        scores = scores if attn_mask is None else e.node("Add", scores, read(attn_mask))
        result = str(e.node("MatMul", e.node("Softmax", scores, axis=-1), read(value)))
        if attn_mask is None or is_parameter(attn_mask):
            return result
        largest = e.node("ReduceMax", read(attn_mask), e.constant([-1], torch.int64), keepdims=1)
        return str(e.node("Where", e.node("Equal", largest, e.constant(-math.inf)), e.constant(0.0), result))  # rows that see nothing

    return write


@form(F.silu, torch.sigmoid, torch.tanh, unary.gelu)
def _as_recorded(node: fx.Node, *_: Any, **__: Any) -> Plan:
    """Return the plan of an operator of tensors and numbers, as its record writes it."""
    record = OPERATORS[node.target]  # type: ignore[index]
    settings = record.arguments(node)
    form = record.onnx
    assert form is not None

    def write(e: Any, read: Read) -> str:
        arguments = {name: read(value) if isinstance(value, fx.Node) else value for name, value in settings.items()}
        return form(Call(e, record.name, arguments, {}, None, lambda value: value, node, [node], str, whole=e.opset >= WHOLE_OPSET))

    return write


@form(linear.matmul)
def _matmul(node: fx.Node, input: fx.Node, other: fx.Node) -> Plan | None:
    return None if min(len(_sizes(input)), len(_sizes(other))) < 2 else lambda e, read: e.node("MatMul", read(input), read(other))


@form(arithmetic.add, arithmetic.sub, arithmetic.mul, arithmetic.div)
def _of_two(node: fx.Node, input: Any, other: Any, alpha: float = 1) -> Plan | None:
    return None if alpha != 1 or any(map(is_size, node.all_input_nodes)) else _as_recorded(node)


form(F.relu)(lambda node, input: lambda e, read: e.node("Relu", read(input)))


# ---- Operators that PyTorch's exporter cannot write, expressed by others that it can: equal results up to rounding ---
def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the operator `scaled_dot_product_attention` of tensors with any number of dimensions."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    # The scores are scaled, not the query: onnxruntime fuses two scalings of one tensor into a graph that it cannot open.
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1), -torch.inf)
    if attn_mask is None:
        return torch.softmax(scores, -1) @ value
    boolean = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    hidden = ~attn_mask.any(-1, keepdim=True) if boolean else attn_mask.amax(-1, keepdim=True) == -torch.inf
    return (torch.softmax(scores, -1) @ value).masked_fill(hidden, 0.0)


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
) -> Tensor:
    """Compute the same with the arguments of `F.scaled_dot_product_attention`, whose fifth is the dropout."""
    return attend(query, key, value, attn_mask, *rest, **options)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Compute `torch.chunk` along a dimension whose size is not fixed, into exactly this number of chunks."""
    size = input.shape[dim]
    step = (size + chunks - 1) // chunks
    return tuple(input.narrow(dim, index * step, step if index + 1 < chunks else size - index * step) for index in range(chunks))


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Compute `torch.cdist` in any norm, from the differences of all pairs of rows."""
    differences = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p == 0:
        return (differences != 0).to(x1.dtype).sum(-1)
    if p == math.inf:
        return differences.amax(-1)
    if p == 1:
        return differences.sum(-1)
    return (differences * differences).sum(-1).sqrt() if p == 2 else differences.pow(p).sum(-1).pow(1 / p)


def clamp(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Compute `torch.clamp` with an integer beside a float, for which the exporter has no overload."""
    return torch.clamp(input, None if min is None else float(min), None if max is None else float(max))


def running(combined: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Return a cumulative function (product, maximum) along a dimension of fixed size, in log2 n steps at distances 1, 2, 4, …"""

    def function(input: Tensor, dim: int) -> Tensor:
        size, reach = input.shape[dim], 1
        while reach < size:
            later = combined(input.narrow(dim, reach, size - reach), input.narrow(dim, 0, size - reach))
            input, reach = torch.cat((input.narrow(dim, 0, reach), later), dim), 2 * reach
        return input

    return function


def aminmax(input: Tensor, dim: Any, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the minima and the maxima of a tensor along the dimensions `dim`."""
    return torch.amin(input, dim, keepdim), torch.amax(input, dim, keepdim)


cumprod = running(torch.mul)
RUNNING: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.cumprod, progression.cumprod, "cumprod"), cumprod),
    **dict.fromkeys((torch.cummax, "cummax"), lambda input, dim: (running(torch.maximum)(input, dim),)),
    **dict.fromkeys((torch.cummin, "cummin"), lambda input, dim: (running(torch.minimum)(input, dim),)),
}
REDUCTIONS: dict[Any, Any] = {
    **dict.fromkeys((torch.mean, totals.mean, "mean"), torch.mean),
    **dict.fromkeys((torch.amax, comparison.amax, "amax"), torch.amax),
    **dict.fromkeys((torch.amin, comparison.amin, "amin"), torch.amin),
    **dict.fromkeys((torch.aminmax, "aminmax"), aminmax),
}


def replacement(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that a node should call instead; None if the exporter writes the node as it is."""
    if "adaptive" in target_name(node) and varies_beyond_batch(_fact(node.args[0])):
        raise ValueError("it writes adaptive pools for the example's size alone; fix the sizes with fxq.at_sizes")
    if node.target in (torch.cdist, distance.cdist):
        return cdist
    if node.target in (torch.clamp, torch.clip, activation.clamp, "clamp", "clip"):
        return clamp if {int, float}.issubset(map(type, (*node.args[1:], *node.kwargs.values()))) else None
    if node.target in RUNNING:
        input_fact, dim = _fact(node.args[0]), node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        sized = isinstance(input_fact, TensorFact) and isinstance(dim, int) and input_fact.shape and isinstance(input_fact.shape[dim], int)
        values = all(reader.target is operator.getitem and reader.args[1] == 0 for reader in node.users)
        return RUNNING[node.target] if sized and "dtype" not in node.kwargs and (values or RUNNING[node.target] is cumprod) else None
    if node.target is F.scaled_dot_product_attention:
        return None if node.kwargs.get("dropout_p") else torch_attention
    if node.target is attention.scaled_dot_product_attention:
        return attend
    if node.target is torch.chunk or (node.op == "call_method" and node.target == "chunk"):
        input_fact, dim = _fact(node.args[0]), node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        count = node.kwargs.get("chunks", node.args[1] if len(node.args) > 1 else None)
        moving = isinstance(input_fact, TensorFact) and isinstance(dim, int) and isinstance(input_fact.shape[dim], BatchDim)
        return chunk if moving and isinstance(fact(node), tuple | list) and len(fact(node)) == count else None
    return _over_everything(node) or _empty(node)


def _over_everything(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function for a reduction of all dimensions, which are named: the exporter writes invalid files, or none, without them."""
    function, operand = REDUCTIONS.get(node.target), _fact(node.args[0]) if node.args else None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if function is None or not isinstance(operand, TensorFact) or not operand.shape or dim not in (None, (), []) or "dtype" in node.kwargs:
        return None

    def reduced(input: Tensor, dim: Any = None, keepdim: bool = False, *_: Any) -> Any:
        return function(input, tuple(range(input.dim())), keepdim)

    return reduced


def _empty(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function for an empty tensor with the operand's number of items: a file cannot have -1 next to 0 in a reshape."""
    result, read = fact(node), _fact(node.args[0]) if node.args else None
    if not isinstance(result, TensorFact) or not isinstance(read, TensorFact) or 0 not in result.shape or not read.shape:
        return None
    (items, *rest), dtype = result.shape, result.dtype
    sizes = [size for size in rest if isinstance(size, int)]
    if items != read.shape[0] or len(sizes) != len(rest):
        return None

    def empty(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input.new_zeros((input.shape[0], *sizes), dtype=dtype)

    return empty


def _fact(value: Any) -> Any:
    return fact(value) if isinstance(value, fx.Node) else None
