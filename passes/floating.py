"""Operators that run in float, and nodes that stay in float for them.

A mask of -1e9 would take the whole range of an integer grid, although a softmax ignores what it hides. A small divisor
would be rounded to 0 on it, and the quotient would have no value. Both operators run in float, so nodes that lead to
nothing else are computed in float as well.
"""

from collections.abc import Callable, Collection, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import TensorFact, computes_tensor, fact, is_parameter, part, reads_shape_only, refusal, resolve
from fxquant.ops.attention.softmax import HOST, finely, may_hide
from fxquant.ops.core.casting import IN_DTYPE, truncated
from fxquant.ops.core.composite import QUANTIZE
from fxquant.ops.core.record import Operator, Own, Plain, Trait, calls, demand, has_weights, operand_nodes, operator_of, read_nodes
from fxquant.ops.elementwise.arithmetic import true_divide
from fxquant.ops.elementwise.table import STEEP, has_pole, steep
from fxquant.support import reached

RANKING = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d)
RANKING_FUNCTIONS = frozenset((
    torch.softmax, F.softmax, torch.log_softmax, F.log_softmax, F.softmin, F.gumbel_softmax,
    torch.logsumexp, torch.argmax, torch.topk, torch.sort, torch.argsort,
))  # fmt: skip
RANKING_METHODS = frozenset(("softmax", "log_softmax", "logsumexp", "argmax", "topk", "sort", "argsort"))
DIVISIONS = frozenset(("div", "divide", "true_divide", "floor_divide", "remainder", "fmod"))

_DEPENDS = "the size of its result depends on the data"
_DRAWS = "it draws random numbers"
_SPECTRUM = "a Fourier transform has no integer form"
_SOLVES = "it is linear algebra that needs float arithmetic"
_ORDER = "it sums elements by indices of the data, and any number of them may meet in one element"
_DOUBLE = "its result is float64; call .float() on it, and it is quantized like any other power"
_MADE = "it creates a tensor that does not depend on an activation"
_COMPLEX = "complex numbers have no integer form"
_NAMES = {
    _DEPENDS: "nonzero argwhere masked_select unique unique_consecutive bincount histc masked_scatter",
    _DRAWS: "FractionalMaxPool2d FractionalMaxPool3d fractional_max_pool2d fractional_max_pool3d bernoulli multinomial rand_like randn_like"
    " rand randn randint randint_like randperm normal poisson gumbel_softmax",
    _SPECTRUM: "stft istft",
    _SOLVES: "inverse inv svd qr cholesky solve det logdet slogdet pinverse lstsq eig eigh",
    _DOUBLE: "float_power",
    "the most frequent value depends on rounding": "mode",
    "its running sums exceed the range of a grid; where they are small, write exp, cumsum and log": "logcumsumexp",
    _MADE: "zeros ones full empty eye arange linspace zeros_like ones_like full_like new_zeros new_ones new_full",
    "which rows each matrix multiplies depends on the data": "grouped_mm _grouped_mm",
    _ORDER: "index_reduce index_reduce_ segment_reduce",
    _COMPLEX: "view_as_complex view_as_real complex polar angle",
}
REASONS: Mapping[str, str] = {name: because for because, names in _NAMES.items() for name in names.split()}


def reason_of(name: str) -> str | None:
    """Return why a function of PyTorch that the table does not have has no integer form; None where the reason is not known."""
    return _SPECTRUM if name.startswith("fft_") else REASONS.get(name.removeprefix("linalg_"))


Ends = Callable[[fx.Node, fx.Node], bool]


def needed_in_float(gm: fx.GraphModule, offered: Collection[str]) -> dict[fx.Node, str]:
    """Return the nodes that stay in float for a float operator that reads them, and why.

    The reason is "" where it depends on what the node itself reads. `offered` are the dtypes of activations that the target has.
    """
    leading = in_front_of_softmax(gm)
    masked = masks(gm, leading)
    return {
        **_ranked_in_float(gm, leading, masked),
        **dict.fromkeys(leading, ""),
        **dict.fromkeys(masked, "it adds an attention mask in front of a softmax, which is in float"),
        **dict.fromkeys(_computing_masks(gm), "it computes an attention mask, which stays in float"),
        **dict.fromkeys(_computing_whole_numbers(gm), "a grid would round its integers before they are truncated"),
        **dict.fromkeys(leading_to(gm, _divides), "its result is read by a divisor or a logarithm in float and must not be rounded to 0"),
        **({} if "int16" in offered else _around_poles(gm)),
    }


def _ranked_in_float(gm: fx.GraphModule, leading: set[fx.Node], masked: set[fx.Node]) -> dict[fx.Node, str]:
    """Return the softmaxes of the table that read a mask, or the result of an operator in float that may bring one in."""
    reasons: dict[fx.Node, str] = {}
    after = dict.fromkeys(masked, "its operand %{} holds an attention mask, which would take the whole range of an integer grid")
    for node in gm.graph.nodes:
        operator = operator_of(node)
        refused = refusal(node) is not None or (operator is not None and operator.refuses(node, operator.arguments(node)) is not None)
        whole = node.all_input_nodes[0] if node.target is getitem else None
        if whole is not None and isinstance(fact(whole), tuple):  # the node is an item of that tuple
            if whole in after:
                after[node] = after[whole]
        elif computes_tensor(node) and (operator is None or refused):
            after[node] = "its operand %{} is computed in float"
        because = next(((after[operand], operand) for operand in node.all_input_nodes if operand in after), None)
        if because is not None and node in leading:
            after.setdefault(node, because[0])
        if because is not None and operator is not None and _is_ranking(operator):
            reasons[node] = because[0].format(because[1].name)
    return reasons


def reads_no_activation(operator: Operator, arguments: Mapping[str, Any]) -> str | None:
    """Return why an operator has to stay in float because of its operands; None if each is an activation that can be quantized."""
    operands = operand_nodes(operator, arguments)
    because = next(filter(None, map(_no_real_numbers, operands)), None)
    if because is not None:
        return because
    if operands or read_nodes(operator, arguments):
        return None
    for name, value in arguments.items():
        if isinstance(value, fx.Node) and isinstance(fact(value), TensorFact) and not is_parameter(value):
            return f"its {name!r}, %{value.name}, is an activation, where an integer form takes a constant"
    return "none of its operands is an activation"


def _no_real_numbers(operand: fx.Node) -> str | None:
    """Return why an operand cannot be quantized; None if it can."""
    tensor = fact(operand)
    if not isinstance(tensor, TensorFact):
        return f"its operand %{operand.name} is not a tensor"
    if tensor.dtype == torch.float32 or operator_of(operand) is IN_DTYPE:
        return None
    remedy = "; convert it to float32" if tensor.dtype.is_floating_point else ""
    return f"its operand %{operand.name} is {str(tensor.dtype).removeprefix('torch.')}, and only float32 tensors are quantized{remedy}"


def in_front_of_softmax(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose results lead to softmaxes, and the like, and to nothing else, through operators without weights."""
    return leading_to(gm, lambda reader, _: _ranks(gm, reader))


def masks(gm: fx.GraphModule, leading: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes in `leading` (before a softmax) that add a mask or compute one.

    A mask is a constant that hides something, an input, or computed from constants and inputs by operators without weights.
    """
    plain = given(gm)
    nodes: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        operator = operator_of(node)
        if operator is None or node not in leading:
            continue
        operands = [operand for operand in node.all_input_nodes if isinstance(fact(operand), TensorFact) or is_parameter(operand)]
        computed = [operand for operand in operands if not is_parameter(operand)]
        given_ones = [operand for operand in operands if operand in plain and may_hide(operand)]
        adds = bool(operator.traits & {Trait.ADDS, Trait.EXTREMUM}) and len(operands) > 1 and bool(given_ones)
        # Values that are all computed from one input, as x and its maximum, hide no elements of each other.
        apart = len(computed) > 1 and not set.intersection(*map(_real_inputs, computed))
        adds = adds and (any(map(is_parameter, given_ones)) or apart)
        if adds or (node in plain and nodes.issuperset(node.users)):
            nodes.add(node)
    return nodes


def _real_inputs(node: fx.Node) -> set[fx.Node]:
    """Return the inputs that a node is computed from through float values alone: a comparison of an input gives a mask."""
    real = reached([node], lambda each: filter(_is_real, each.all_input_nodes))
    return {each for each in real if each.op == "placeholder" and _is_real(each)}


def _is_real(node: fx.Node) -> bool:
    node_fact = fact(node)
    first = node_fact[0] if isinstance(node_fact, tuple) and node_fact else node_fact  # of the largest elements and their places, say
    return isinstance(first, TensorFact) and first.dtype.is_floating_point


def given(gm: fx.GraphModule, which: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """Return the constants, sizes and `which` inputs of a graph, and the nodes computed from them by operators without weights."""
    plain: set[fx.Node] = set()
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        starts = (node.op == "placeholder" and which(node)) or is_parameter(node) or reads_shape_only(node)
        if starts or (node.op in ("call_function", "call_method") and inputs and plain.issuperset(inputs) and not has_weights(node)):
            plain.add(node)
    return plain


def _around_poles(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the tables of functions that are steepest at 0 whose operands are computed for them alone, and these operands, from layers on.

    A small square has hardly any of its 8 bits left, and the function is largest there.
    """
    leading, reasons = leading_to(gm, lambda reader, node: _is_pole(reader)), dict[fx.Node, str]()
    for node in gm.graph.nodes:
        after = next((operand for operand in node.all_input_nodes if operand in reasons and operand in leading), None)
        if node in leading and part(node) is None and (after is not None or _makes_smaller(node)):
            reads = "a divisor, a logarithm or a root reads its result, which must not be rounded to 0"
            reasons[node] = f"{reads}: the target has no 16-bit dtype"
        elif after is not None and _is_pole(node):
            reasons[node] = f"near its pole it needs %{after.name} in more than 8 bits, and the target has no 16-bit dtype"
    return reasons


def _makes_smaller(node: fx.Node) -> bool:
    """Return whether a node may round small operand values to 0: its result has its own scale, and it is not affine in one operand."""
    operator = operator_of(node)
    assert operator is not None
    keeps_steps = bool(operator.traits & {Trait.AFFINE, Trait.KEEPS_INTEGERS}) and len(node.all_input_nodes) == 1
    return demand(node) == Own() and not keeps_steps and operator is not QUANTIZE


def _is_pole(node: fx.Node) -> bool:
    """Return whether a node is a function that is infinite at 0, or, as a root, has a slope there without a bound."""
    operator = operator_of(node)
    if operator is None or part(node) is not None:
        return False
    arguments = operator.arguments(node)
    starts_steep = steep(operator.name, arguments) and abs(arguments.get("offset", 0.0)) < 1 / STEEP
    return starts_steep or has_pole(operator.name, arguments)


def _passes_on(node: fx.Node) -> bool:
    return operator_of(node) is not None and not has_weights(node)


def leading_to(gm: fx.GraphModule, ends: Ends, among: Callable[[fx.Node], bool] = _passes_on) -> set[fx.Node]:
    """Return the nodes for which `among` is true, and all of whose readers are ends or lead to ends.

    By default they are those of the table without sums of products.
    """
    nodes: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.users and among(node) and all(reader in nodes or ends(reader, node) for reader in node.users):
            nodes.add(node)
    return nodes


def _is_ranking(operator: Operator) -> bool:
    """Return whether an operator is a softmax or log-softmax without a mask argument."""
    return Trait.SOFTMAX in operator.traits and not operator.reads


def _ranks(gm: fx.GraphModule, node: fx.Node) -> bool:
    operator = operator_of(node)
    if operator is not None:
        return _is_ranking(operator)
    if node.op == "call_module":
        return isinstance(resolve(gm, str(node.target)), RANKING)
    return node.target in (RANKING_METHODS if node.op == "call_method" else RANKING_FUNCTIONS)


def _computing_masks(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that are computed from inputs and constants, and lead to masks of composites alone.

    Nodes that are computed from booleans and integers are left out: they are exact on integers.
    Nodes that distinguish the largest of a row are left out, too.
    """
    ranked = set[fx.Node]()
    for node in gm.graph.nodes:
        if node.target is finely or not ranked.isdisjoint(node.all_input_nodes):
            ranked.add(node)
    return {node for node in leading_to(gm, _reads_mask, given(gm).__contains__) - ranked if not _of_plain_values(node)}


def _computing_whole_numbers(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the float nodes that are computed from integer inputs and lead to integers alone, as for the buckets of positions.

    A logarithm of 0 that a `where` does not choose is not a defect of a batch there.
    """
    whole = given(gm, lambda node: isinstance(input_fact := fact(node), TensorFact) and not input_fact.dtype.is_floating_point)
    real = {node for node in whole if isinstance(of := fact(node), TensorFact) and of.dtype == torch.float32 and not is_parameter(node)}
    return leading_to(gm, lambda reader, _: calls(reader, truncated), real.__contains__)


def _of_plain_values(node: fx.Node) -> bool:
    operator = operator_of(node)
    return operator is not None and isinstance(demand(node), Plain) and not operand_nodes(operator, operator.arguments(node))


def _reads_mask(reader: fx.Node, node: fx.Node) -> bool:
    """Return whether the reader takes a node as an added mask, or as booleans that a composite reads."""
    record, node_fact = operator_of(reader), fact(node)
    if isinstance(node_fact, TensorFact) and node_fact.dtype == torch.int64:
        return False
    if record is None or record in HOST:
        return record is not None
    inner, outer = part(node), part(reader)
    beside = inner is not None and outer is not None and inner.composite == outer.composite  # an order or a sign, of what is computed there
    return node in read_nodes(record, record.arguments(reader)) and (outer is not None or record.expand is not None) and not beside


def _divides(reader: fx.Node, node: fx.Node) -> bool:
    """Return whether a float operator reads the node only as its divisor."""
    operator = operator_of(reader)
    if operator is not None and (operator.function is not true_divide or refusal(reader) is None):
        return False
    name = reader.target if isinstance(reader.target, str) else getattr(reader.target, "__name__", "")
    if reader.op not in ("call_function", "call_method"):
        return False
    first, second = reader.args[:1], reader.args[1:2]
    return name in DIVISIONS and node not in first and node in second
