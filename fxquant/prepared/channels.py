"""Which channels of a prepared model may be multiplied by a factor without changing its function, and which by the same one.

Every tensor has a *label* for each of its channels, and channels with one label have one factor. The factor of a layer's output is
multiplied into its parameters. It passes through positively homogeneous functions, f(a·x) = a·f(x) for a > 0. It is divided out of
the weights of every layer that reads it. Channels that any other operator makes or reads have the label 0, and no factor.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import TensorFact, at_point, fact, is_parameter, nodes_in, shape_of
from fxquant.ops import Operator, Trait, operand_nodes
from fxquant.ops.indexing.index import getitem
from fxquant.ops.layers.linear import matmul
from fxquant.ops.movement.pad import elements, margins_of, pad
from fxquant.ops.movement.repeating import cat
from fxquant.ops.movement.shape import channel_shuffle, permute, reshape
from fxquant.prepared.operators import QuantizedOperator
from fxquant.prepared.stage import quantized_operator
from fxquant.quantization.weights import ChannelFactors


@dataclass(frozen=True)
class Channels:
    """The labels of a prepared model's channels, int64: channels that must have the same factor have the same label."""

    # The labels of every tensor with a batch dimension, of its shape without the batch, and of size 1 along dimensions in which labels do
    # not differ.
    tensors: dict[fx.Node, Tensor]
    read: dict[fx.Node, Tensor]  # the labels of the input channels of every operator with `ChannelFactors`, (input channels,)
    given: dict[fx.Node, Tensor]  # the labels of its output channels, (output channels,)
    number: int  # the number of labels, including 0, the label of channels whose factor must be 1


def channels(prepared: fx.GraphModule, *, open_alone: bool = False) -> Channels:
    """Return the labels of all channels; linear in their number.

    With `open_alone`, labels of tensors that have a scale are 0, as are those of operands and results of operators with `left_out`.
    """
    walk = _Walk()
    for node in prepared.graph.nodes:
        if is_parameter(node) or (node.op != "output" and not isinstance(fact(node), TensorFact | list | tuple | dict)):
            continue
        module = quantized_operator(prepared, node)
        labels = None if module is None or (open_alone and module.left_out) else walk.through(node, module)
        if labels is None:
            for operand in node.all_input_nodes:
                walk.pin(walk.labels.get(operand))
            rank = len(fact(node).shape) - 1 if isinstance(fact(node), TensorFact) else 0
            labels = torch.zeros([1] * rank, dtype=torch.int64, device="cpu")
        walk.labels[node] = labels
        if module is not None and not _any_grid(module, open_alone):
            walk.pin(labels)
    return walk.solved()


def _any_grid(module: QuantizedOperator, open_alone: bool) -> bool:
    """Return whether the grid of the operator's result follows observed values, so that the values may change."""
    if module.plain or module.output.follows_sum:
        return not module.plain
    return module.output.observer is not None and not (open_alone and module.output.calibrated)


def exponents(prepared: fx.GraphModule, channel_labels: Channels) -> Tensor:
    """Return the exponent of every label: int64 of shape (number,)."""
    result = torch.zeros(channel_labels.number, dtype=torch.int64, device="cpu")
    for node, labels in channel_labels.given.items():
        result[labels] = _factors(prepared, node).outputs.cpu().long()
    return result


def multiply(prepared: fx.GraphModule, channel_labels: Channels, exponents: Tensor) -> None:
    """Give every operator the factors 2^exponents of its labels; that of the label 0 is 1."""
    for node, read in channel_labels.read.items():
        _factors(prepared, node).assign(exponents[read], exponents[channel_labels.given[node]])


def tensor_exponents(prepared: fx.GraphModule) -> dict[str, Tensor]:
    """Return the exponents e, int64, of tensors that are the float model's times 2^e, by name; they broadcast to a sample's shape."""
    if not any(isinstance(module, ChannelFactors) and module.active for module in prepared.modules()):
        return {}
    channel_labels = channels(prepared)
    chosen = exponents(prepared, channel_labels)
    return {node.name: own for node, labels in channel_labels.tensors.items() if bool((own := chosen[labels]).any())}


def _factors(prepared: fx.GraphModule, node: fx.Node) -> ChannelFactors:
    module = quantized_operator(prepared, node)
    assert module is not None
    assert module.factors is not None
    return module.factors


def homogeneous(low: Any, high: Any) -> bool:
    """Return whether a clamp with these limits commutes with a multiplication by a positive number."""
    return all(bound is None or (isinstance(bound, int | float) and (bound == 0 or math.isinf(bound))) for bound in (low, high))


class _Walk:
    """The labels of a walk through the graph, and the pairs of labels that turn out to be equal."""

    def __init__(self) -> None:
        self.labels: dict[fx.Node, Tensor] = {}
        self.read: dict[fx.Node, Tensor] = {}
        self.given: dict[fx.Node, Tensor] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.number = 1

    def fresh(self, count: int) -> Tensor:
        labels = torch.arange(self.number, self.number + count, dtype=torch.int64, device="cpu")
        self.number += count
        return labels

    def same(self, one: Tensor, other: Tensor) -> None:
        self.pairs.append((one.flatten(), other.flatten()))

    def pin(self, labels: Tensor | None) -> None:
        if labels is not None:
            self.same(labels, torch.zeros_like(labels))

    def joined(self, one: Tensor, other: Tensor) -> Tensor:
        """Make the labels of two broadcast operands equal, and return them as the labels of the result."""
        both = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
        self.same(*both)
        first: Tensor = both[0]
        return first

    def along(self, labels: Tensor, dim: int, size: int) -> Tensor:
        """Return one label for each index of a dimension: all that share it are the same."""
        moved = labels.movedim(dim, 0)
        rows = moved.reshape(len(moved), -1)
        self.same(rows[:, :1].expand_as(rows), rows)
        return rows[:, 0].expand(size)

    def through(self, node: fx.Node, module: QuantizedOperator) -> Tensor | None:
        """Return the labels of an operator's result; None if factors do not pass through it."""
        arguments = module.operator.bind_call(node.args, node.kwargs)
        operands = operand_nodes(module.operator, arguments)
        node_fact = fact(node)
        if not isinstance(node_fact, TensorFact) or -1 in (sizes := _sizes(node)):
            return None
        if not operands or any(operand not in self.labels or shape_of(operand)[:1] != node_fact.shape[:1] for operand in operands):
            return None
        if module.factors is not None:
            return self._layer(node, module, arguments) if len(node_fact.shape) > 1 else None
        if not homogeneous(*(arguments.get("clamp") or (None, None))) or not homogeneous(*module.observed):
            return None
        rule = _rule(module.operator)
        labels = None if rule is None else rule(self, node, arguments)
        if labels is not None and any(
            count > 1 and largest != size for count, size, largest in zip(labels.shape, sizes, _sizes(node, 2), strict=True)
        ):
            return None  # its factors would differ along a size that varies
        return labels

    def _layer(self, node: fx.Node, module: QuantizedOperator, arguments: Mapping[str, Any]) -> Tensor:
        """Return the labels of a layer, which divides its input's factors out of its weight and multiplies its output's factors in."""
        factors, operator = module.factors, module.operator
        assert factors is not None
        assert operator.layer.channels is not None
        rank = len(shape_of(node))
        dim = operator.layer.channels(dict(arguments)) % rank - 1
        read = self.along(self.labels[arguments["input"]], dim, len(factors.inputs))
        if "weight" not in arguments:
            self.pin(read)  # a batch norm's statistics are of what it reads
        outputs, residual = self.fresh(len(factors.outputs)), arguments.get("residual")
        self.read[node], self.given[node] = read, outputs
        shaped = outputs.reshape([-1 if index == dim else 1 for index in range(rank - 1)])
        if isinstance(residual, fx.Node):
            shaped = self.joined(shaped, self.labels[residual])
        if not homogeneous(*(arguments.get("clamp") or (None, None))) or not homogeneous(*module.observed):
            self.pin(shaped)
        return shaped

    def solved(self) -> Channels:
        """Return all labels, renumbered from 0 so that labels which are the same are equal."""
        root = torch.arange(self.number, dtype=torch.int64, device="cpu")
        if self.pairs:
            one, other = (torch.cat(column) for column in zip(*self.pairs, strict=True))
            while True:
                least = torch.minimum(root[one], root[other])
                lower = root.clone()
                for side in (one, other):
                    lower.scatter_reduce_(0, root[side], least, "amin")
                    lower.scatter_reduce_(0, side, least, "amin")
                lower = lower[lower]
                if torch.equal(lower, root):
                    break
                root = lower
        number = torch.unique(root, return_inverse=True)[1]  # 0 is the least, and stays it
        tensors, read, written = ({node: number[labels] for node, labels in each.items()} for each in (self.labels, self.read, self.given))
        return Channels(tensors, read, written, int(number.max()) + 1)


Rule = Callable[[_Walk, fx.Node, dict[str, Any]], "Tensor | None"]


def _elementwise(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    if "min" in arguments and not homogeneous(arguments["min"], arguments["max"]):
        return None
    return walk.labels[arguments["input"]]


def _spatial(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    """Return the labels of a pooling's operand if they do not differ along its spatial dimensions, which the pooling mixes; else None."""
    labels = walk.labels[arguments["input"]]
    if arguments.get("divisor_override"):
        return None
    return labels if all(size == 1 for size in labels.shape[1:]) else None


def _padded(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    """Return the labels of a padded tensor: padded zero channels get the label 0, other margins the labels of the elements they copy.

    Return None for a constant other than 0, and for padding of the batch.
    """
    labels, shape = walk.labels[arguments["input"]], _sizes(arguments["input"])
    margins = margins_of(list(arguments["padding"]), len(shape) + 1)
    if arguments.get("value") or margins[0] != (0, 0):
        return None
    for dim, (begin, end) in enumerate(margins[1:]):
        if (begin, end) != (0, 0) and labels.shape[dim] > 1:
            moved = labels.movedim(dim, -1)
            if arguments["mode"] == "constant":
                labels = pad(moved, [begin, end]).movedim(-1, dim)
            else:
                labels = moved[..., elements(arguments["mode"], shape[dim], begin, end)].movedim(-1, dim)
    return labels


def _reducing(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    labels, dim = walk.labels[arguments["input"]], arguments["dim"]
    rank = labels.dim() + 1
    dims = sorted({d % rank for d in ([dim] if isinstance(dim, int) else dim or range(rank))}, reverse=True)
    if 0 in dims:
        return None
    for d in dims:
        first = labels.narrow(d - 1, 0, 1)
        walk.same(first.expand_as(labels), labels)
        labels = first if arguments["keepdim"] else first.squeeze(d - 1)
    return labels


def _added(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    one, other = (walk.labels.get(arguments[name]) if isinstance(arguments[name], fx.Node) else None for name in ("input", "other"))
    if one is None or other is None or one.dim() != other.dim():
        return None
    return walk.joined(one, other)


def _multiplied(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    """Pass on the factors of one operand; the other has none, unless it is a constant."""
    both = [arguments[name] for name in ("input", "other")]
    read = [value for value in both if isinstance(value, fx.Node) and value in walk.labels]
    passing = next((value for value in read if shape_of(value)[1:] == shape_of(node)[1:]), None)
    if passing is None:
        return None
    for value in read:
        if value is not passing or both[0] is both[1]:
            walk.pin(walk.labels[value])
    return walk.labels[passing]


def _product(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    """Pass on the factors of the right operand's columns, as of an attention's values; the left operand has none."""
    one, other = arguments["input"], arguments["other"]
    if not all(isinstance(value, fx.Node) and value in walk.labels for value in (one, other)) or one is other:
        return None
    left, right = walk.labels[one], walk.labels[other]
    if arguments["bias"] is not None or left.dim() < 2 or left.dim() != right.dim():
        return None
    walk.pin(left)
    column = right.narrow(-2, 0, 1)
    walk.same(column.expand_as(right), right)  # what is summed over has one factor
    return column


def _joined(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    tensors = list(arguments["tensors"])
    rank = len(shape_of(node))
    dim = arguments["dim"] % rank - 1
    if dim < 0 or not all(isinstance(value, fx.Node) and value in walk.labels for value in tensors):
        return None
    parts = [walk.labels[value] for value in tensors]
    shape = [max(part.shape[index] for part in parts) for index in range(rank - 1)]
    return torch.cat([part.expand([_sizes(value)[dim] if index == dim else size for index, size in enumerate(shape)])
                      for part, value in zip(parts, tensors, strict=True)], dim)  # fmt: skip


def _sizes(node: fx.Node, point: int = 0) -> list[int]:
    """Return the sizes of a tensor after the batch, at a point where they vary; -1 for a size that depends on the batch alone."""
    return [size if isinstance(size, int) else -1 if size.largest is None else at_point(size, point) for size in shape_of(node)[1:]]


def _full(walk: _Walk, operand: fx.Node) -> Tensor:
    return walk.labels[operand].expand(_sizes(operand))


def _uniform(labels: Tensor) -> Tensor:
    """Return the labels, with dimensions of size 1 where they do not differ."""
    for dim in range(labels.dim()):
        first = labels.narrow(dim, 0, 1)
        if torch.equal(first.expand_as(labels), labels):
            labels = first
    return labels


def _reshaped(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    return _uniform(_full(walk, arguments["input"]).reshape(_sizes(node)))


def _permuted(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    labels, dims = walk.labels[arguments["input"]], arguments["dims"]
    dims = [dim % (labels.dim() + 1) for dim in dims]
    return None if dims[0] != 0 else labels.permute([dim - 1 for dim in dims[1:]])


def _indexed(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    index = arguments["index"] if isinstance(arguments["index"], list | tuple) else [arguments["index"]]
    plain = all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index)
    if not plain or nodes_in(index) or not index or index[0] != slice(None):
        return None
    return _uniform(_full(walk, arguments["input"]).unsqueeze(0)[tuple(index)].squeeze(0))


def _shuffled(walk: _Walk, node: fx.Node, arguments: dict[str, Any]) -> Tensor | None:
    """Exchange the order of groups of channels with the order inside of groups."""
    labels = walk.labels[arguments["input"]]
    groups = arguments["groups"]
    return labels.reshape(groups, -1, *labels.shape[1:]).transpose(0, 1).flatten(0, 1) if len(labels) > 1 else labels


_RULES: dict[Callable[..., Any], Rule] = {pad: _padded, cat: _joined, matmul: _product}
_RULES |= {reshape: _reshaped, permute: _permuted, getitem: _indexed, channel_shuffle: _shuffled}


def _rule(operator: Operator) -> Rule | None:
    """Return the rule by which labels pass through an operator; None where they do not pass."""
    own, traits = _RULES.get(operator.function), operator.traits
    if own is not None:
        return own
    if Trait.HOMOGENEOUS not in traits:
        return _multiplied if Trait.AFFINE in traits else None
    if Trait.SPATIAL in traits:
        return _spatial
    if Trait.REDUCTION in traits:
        return _reducing
    return _added if len(operator.operands) == 2 else _elementwise
