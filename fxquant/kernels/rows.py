"""The pattern of primitives between tensors of bytes that sum the last dimension or take its largest element: norms and softmax."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import BATCH_SIZES, fact
from fxquant.ir.integer import qparams
from fxquant.kernels.kernel import Match, Matched
from fxquant.kernels.patterns import BYTES, INTEGERS, known_tensor
from fxquant.primitives import PRIMITIVES, pool, shape

LONGEST_ROW = 2**14  # columns: some rows of every intermediate result have to stay in the cache


def rows(root: fx.Node) -> Matched:
    """Match the last of primitives on rows, at least one of which reduces each row to one element; none but the last is read elsewhere."""
    if not _is_on_rows(root) or not (_is_bytes(root) or any(not _is_on_rows(user) for user in root.users)):
        return None
    unread, covers, reads = Counter[fx.Node](), {root: None}, dict[fx.Node, None]()
    waiting = [root]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand.op == "get_attr":
                continue
            reads[operand] = None
            unread[operand] += 1
            if unread[operand] == len(operand.users) and _is_on_rows(operand) and not _is_bytes(operand):
                covers[operand] = None
                waiting.append(operand)
    if not any(map(_reduces, covers)):
        return None
    order = {node: index for index, node in enumerate(root.graph.nodes)}
    ordered = tuple(sorted(covers, key=order.__getitem__))
    return Match(root, ordered, tuple(read for read in reads if read not in covers), {"nodes": ordered})


def _is_bytes(node: fx.Node) -> bool:
    return known_tensor(node, *BYTES, ranks=range(9)) and qparams(node) is not None


def _reduces(node: fx.Node) -> bool:
    """Return whether a node is the sum or the largest element of each row."""
    arguments: Any = node.args
    if node.target is pool.sum:
        return arguments[1] in ([-1], [len(_sizes(arguments[0])) - 1]) and bool(arguments[2])
    if node.target is not pool.max_pool:
        return False
    padded = any((*arguments[3], *arguments[4]))
    return list(arguments[1]) == [_sizes(arguments[0])[-1]] and not padded and list(arguments[5]) == [1]


def _is_on_rows(node: Any) -> bool:
    """Return whether each row of a node, in the last dimension, is computed from a row, or an element for the row, of each operand."""
    if not known_tensor(node, *INTEGERS, torch.float32, ranks=range(1, 9)) or not node.all_input_nodes:
        return False
    operands = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
    if not all(known_tensor(operand, *INTEGERS, ranks=range(1, 9)) for operand in operands) or not operands:
        return False
    if any(_count(operand) != _count(node) or not _fits(operand) for operand in operands):
        return False
    width = _sizes(node)[-1]
    if _reduces(node):
        return True
    if node.target is shape.reshape or (node.target is shape.permute and list(node.args[1]) == list(range(len(_sizes(node))))):
        return all(_sizes(operand)[-1] == width for operand in operands)
    record = PRIMITIVES.get(node.target)
    return record is not None and record.steps is not None and all(_sizes(operand)[-1] in (1, width) for operand in operands)


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    return tuple(fact(node).shape)


def _fits(node: fx.Node) -> bool:
    size = _sizes(node)[-1]
    return isinstance(size, int) and size <= LONGEST_ROW


def _count(node: fx.Node) -> tuple[int, ...]:
    """Return the number of rows at each batch size of the trace."""
    return tuple(math.prod(fact(node).at(batch)[:-1]) for batch in BATCH_SIZES)
