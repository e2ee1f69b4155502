"""The patterns of primitives that kernels replace. A pattern depends on the graph alone, and is the same on every machine."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from fxquant.ir import loops
from fxquant.ir.graph import POINTS, TensorFact, at_point, fact, reads_sizes
from fxquant.ir.integer import qparams
from fxquant.kernels.kernel import Forms, Match, Matched, in_order
from fxquant.primitives import PRIMITIVES, Role, ZeroPoint, elementwise, loop, pool, role_of, runtime_scales, shape
from fxquant.primitives.accumulate import sides
from fxquant.primitives.quantization import accumulator_output, quantize
from fxquant.primitives.steps import Op
from fxquant.support import reached

BYTES = (torch.int8, torch.uint8)
INTEGERS = (*BYTES, torch.int16, torch.int32, torch.int64)
CONVOLUTIONS = {
    Role.CONVOLUTION: ("weight", "bias", "stride", "padding", "dilation", "groups"),
    Role.TRANSPOSED: ("weight", "bias", "stride", "padding", "output_padding", "dilation", "groups"),
}  # the arguments after the operand
PRODUCTS = frozenset({*CONVOLUTIONS, Role.LINEAR})
SUMS = PRODUCTS | {Role.SUM}
RANKS = (2, 3, 4, 5)
IMAGES = RANKS[1:]  # of tensors with channels and one to three dimensions after them
LONGEST_ROW = 2**14  # columns: some rows of every intermediate result have to stay in the cache
LONGEST = 8  # quantized tensors in a chain: its constants and intermediate results have to stay in the cache
# What each part of a window is along a depth and a height that a sequence does not have.
WINDOW = {"kernel": 1, "stride": 1, "begin": 0, "end": 0, "padding": 0, "dilation": 1}


def known_tensor(node: Any, *dtypes: torch.dtype, ranks: Sequence[int] = RANKS) -> bool:
    """Return whether a value is a tensor of one of these dtypes and ranks."""
    node_fact = fact(node) if isinstance(node, fx.Node) else None
    return isinstance(node_fact, TensorFact) and node_fact.dtype in dtypes and len(node_fact.shape) in ranks


def bytes_of(node: Any, ranks: Sequence[int] = RANKS) -> fx.Node | None:
    """Return the quantized tensor of 8 bits that is read: the operand itself, or the operand of its centring; None for others."""
    if isinstance(node, fx.Node) and node.target is elementwise.centre:
        node = node.args[0]
    if not known_tensor(node, *BYTES, ranks=ranks) or node.op == "get_attr" or qparams(node) is None:
        return None
    return node  # type: ignore[no-any-return]


def _lacking(verb: str, node: Any, ranks: Sequence[int] = RANKS) -> str:
    """Return why kernels cannot read or write (`verb`) the tensor of a node."""
    node_fact = fact(node) if isinstance(node, fx.Node) else None
    if not isinstance(node_fact, TensorFact):
        return f"it {verb}s what is not a tensor"
    if node_fact.dtype not in BYTES:
        return f"it {verb}s {str(node_fact.dtype).removeprefix('torch.')}; kernels {verb} 8 bits"
    if len(node_fact.shape) in ranks:
        return f"it {verb}s 8 bits inside of an operator, where they have no scale"
    count, allowed = len(node_fact.shape), " or ".join(map(str, ranks))
    return f"it {verb}s a tensor of {count} dimension{'s' * (count != 1)}; kernels {verb} {allowed} dimensions"


def sum_of_products(root: fx.Node) -> Matched:
    """Match a convolution, transposed or not, a linear layer or a sum over windows, on bytes, with what follows it.

    That is the residual added to it, and the requantization to bytes. The sum itself is the result where it is the output of a last
    layer, becomes integers of more bits, or is divided by the elements of each window. A sum over windows, or over height and width, is
    a depthwise convolution whose weight is 1: its part "weight" is None.
    """
    requantized, alone = role_of(root.target) is Role.REQUANTIZATION, role_of(root.target) in SUMS
    if not requantized and root.target is not accumulator_output and not (alone and _stays_wide(root)):
        return None
    covers, total = ([], root) if alone else ([root], root.args[0])
    residual, factor, factor_shift = None, None, None
    if isinstance(total, fx.Node) and role_of(total.target) is Role.RESIDUAL:
        covers.append(total)
        total, added, factor, *shift = total.args
        factor_shift = shift[0] if shift else None
        residual = bytes_of(added)
        if residual is None:
            return f"of its residual: {_lacking('read', added)}"
    assert isinstance(total, fx.Node)
    window = _summed(total) if role_of(total.target) in SUMS else None
    if window is None or isinstance(window, str):
        return window
    covers.append(total)
    if any(len(covered.users) != 1 for covered in covers[1:]):
        return "its accumulator has other readers; kernels keep it to themselves"
    if requantized and not known_tensor(root, *BYTES):
        return _lacking("write", root)
    if window["weight"] is None and any(math.prod(_sizes(node)) != 1 for node in root.all_input_nodes[1:]):
        return "its divisor depends on the place of a window; kernels take one divisor"
    parts = {"factor": factor, "factor_shift": factor_shift, "sum": total, **window}
    reads = tuple(read for read in (bytes_of(total.args[0]), residual) if read is not None)
    return Match(root, tuple(reversed(covers)), reads, parts)


def _stays_wide(total: fx.Node) -> bool:
    """Return whether an int32 sum becomes an int16 or int32 tensor, or is one over images or windows that is not requantized at once."""
    (user, *_) = total.users or (None,)
    if user is not None and role_of(total.target) is Role.SUM:
        return role_of(user.target) is not Role.REQUANTIZATION or any(math.prod(_sizes(node)) != 1 for node in user.all_input_nodes[1:])
    if user is not None and role_of(user.target) is Role.RESIDUAL:
        (user, *_) = user.users or (None,)
    if user is None or role_of(user.target) is not Role.REQUANTIZATION:
        return False
    return known_tensor(total, torch.int32) and known_tensor(user, torch.int16, torch.int32)


def _summed(total: fx.Node) -> dict[str, Any] | str:
    """Return the weight, the bias and the window of a sum of products; or why kernels do not compute it."""
    args: Any = total.args
    operand, *arguments = args
    one: dict[str, Any] = {"weight": None, "bias": None, "stride": [1], "padding": [0], "end": [0], "dilation": [1], "groups": 1}
    if role_of(total.target) is Role.LINEAR:
        one["weight"], one["bias"], *_ = arguments
    elif (names := CONVOLUTIONS.get(role_of(total.target))) is not None:  # type: ignore[arg-type]
        one |= zip(names, arguments, strict=False)
        one["padding"], one["end"] = sides(one["padding"], len(one["stride"]))
    elif total.target is pool.sum_pool:
        one["kernel"], one["stride"], one["padding"], one["end"], *_ = arguments
    elif sorted(dim % len(_sizes(operand)) for dim in arguments[0]) != list(range(2, len(_sizes(operand)))):
        return "it sums over other dimensions than height and width of images"
    one |= {name: _volume(one[name], value) for name, value in WINDOW.items() if name in one}
    ranks = RANKS if role_of(total.target) is Role.LINEAR else IMAGES
    if bytes_of(operand, ranks) is None:
        return _lacking("read", operand, ranks)
    for name, dtype in (("weight", torch.int8), ("bias", torch.int32)):
        if one[name] is not None and not known_tensor(one[name], dtype, ranks=range(1, 6)):
            return f"its {name} is not {str(dtype).removeprefix('torch.')}"
    return one


def _volume(values: Sequence[int], missing: int) -> list[int]:
    """Return a window's values for depth, height and width (3,); the dimensions that its tensor lacks have the value `missing`."""
    return [missing, missing, *values][-3:]


def _sizes(node: Any) -> tuple[Any, ...]:
    node_fact = fact(node)
    assert isinstance(node_fact, TensorFact)
    return tuple(node_fact.shape)


def product(root: fx.Node) -> Matched:
    """Match the product of two tensors of bytes over their last two dimensions, with the centrings of its operands."""
    if role_of(root.target) is not Role.MATRIX_PRODUCT:
        return None
    ranks = range(2, 6)
    reads = [bytes_of(operand, ranks) for operand in root.args]
    centred = [operand for operand in root.args if isinstance(operand, fx.Node) and operand.target is elementwise.centre]
    if None in reads:
        return next(_lacking("read", operand, ranks) for operand, read in zip(root.args, reads, strict=True) if read is None)
    parts = {name: operand in centred for name, operand in zip(("input", "other"), root.args, strict=True)}
    if any(qparams(read).zero_point and not parts[name] for name, read in zip(parts, reads, strict=True)):  # type: ignore[arg-type, union-attr]
        return "it reads integers that are not centred"
    covers = [operand for operand in dict.fromkeys(centred) if len(operand.users) == 1]
    return Match(root, (*covers, root), tuple(reads), parts)  # type: ignore[arg-type]


def quantization(root: fx.Node) -> Matched:
    """Match the quantization of a float32 tensor to bytes."""
    if root.target is not quantize:
        return None
    if not known_tensor(root, *BYTES):
        return _lacking("write", root)
    if not known_tensor(root.args[0], torch.float32):
        return "it reads another dtype than float32"
    return Match(root, (root,), (root.args[0],))  # type: ignore[arg-type]


def maximum(root: fx.Node) -> Matched:
    """Match a max pool of one to three dimensions."""
    if root.target is not pool.max_pool:
        return None
    if bytes_of(root.args[0], IMAGES) is None:
        return _lacking("read", root.args[0], IMAGES)
    names = ("kernel", "stride", "begin", "end", "dilation")
    window = {name: _volume(values, WINDOW[name]) for name, values in zip(names, root.args[1:], strict=True)}  # type: ignore[arg-type]
    return Match(root, (root,), (root.args[0],), window)  # type: ignore[arg-type]


def pointwise(root: fx.Node) -> Matched:
    """Match elementwise functions from one or two tensors of bytes to bytes, whose constants are the same for all elements.

    Constants of a function of one tensor may differ between channels: the part "channels" says whether they do.
    """
    if not _is_elementwise(root):
        return None
    if not known_tensor(root, *BYTES) or qparams(root) is None:
        return _lacking("write", root)
    covers: list[fx.Node] = []
    reads: list[fx.Node] = []
    vary: list[fx.Node] = []
    for operand in root.all_input_nodes:
        because = _apart(operand, covers, reads, vary)
        if because is not None:
            return because
    if not 1 <= len(reads) <= 2:
        return f"it reads {len(reads)} tensors; kernels read 1 or 2"
    if vary and (len(reads) == 2 or not all(_differs_between_channels(constant, root) for constant in vary)):
        return "its constants differ between elements; kernels take one for all, or of one operand one for each channel"
    if len(reads) == 2 and len(sizes := _sizes(reads[0])) > 2 and set(sizes[2:]) == {1}:
        reads.reverse()  # what has one pixel comes second
    return Match(root, (*covers, root), tuple(reads), {"channels": bool(vary)})


def _is_elementwise(node: fx.Node) -> bool:
    record = PRIMITIVES.get(node.target)  # type: ignore[arg-type]
    return record is not None and record.steps is not None


def _differs_between_channels(constant: fx.Node, root: fx.Node) -> bool:
    """Return whether a constant has the channels of a result as its only dimension with more than one element."""
    channels, *area = _sizes(root)[1:]
    scales = any(role_of(user.target) is Role.CHANNEL_SCALING and user.args[3] == len(area) for user in constant.users)
    return _sizes(constant) == (channels, *[1] * (0 if scales else len(area)))


def _apart(node: fx.Node, covers: list[fx.Node], reads: list[fx.Node], vary: list[fx.Node]) -> str | None:
    """Append a node and its elementwise operands to `covers`, tensors of bytes to `reads`; return why a kernel cannot compute it, or None.

    Constants of more than one element are appended to `vary`.
    """
    node_fact = fact(node)
    if not isinstance(node_fact, TensorFact):
        return _lacking("read", node)
    if node.op == "get_attr":
        if any(size != 1 for size in node_fact.shape) and any(user.target is not elementwise.lookup for user in node.users):
            vary.append(node)
        return None
    if node_fact.dtype in BYTES and qparams(node) is not None:
        if node not in reads:
            reads.append(node)
        return None if len(node_fact.shape) in RANKS else _lacking("read", node)
    if not _is_elementwise(node):
        record = PRIMITIVES.get(node.target)  # type: ignore[arg-type]
        if record is None or record.kind == "quantized":
            return _lacking("read", node)
        return f"it follows {record.name}, which no kernel computes"
    if len(node.users) != 1 and node.target is not elementwise.centre:
        return f"%{node.name} inside of it has other readers" if qparams(node) is None else _lacking("read", node)
    if len(node.users) == 1:
        covers.append(node)
    return next((because for operand in node.all_input_nodes if (because := _apart(operand, covers, reads, vary)) is not None), None)


def elementwise_chain(root: fx.Node) -> Matched:
    """Match the last of elementwise primitives on tensors of one size, each but the last read by the next alone."""
    if not _is_step(root) or _is_passed_on(root) or fact(root).dtype == torch.bool:
        return None
    covers, reads, waiting = [root], dict[fx.Node, None](), [root]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand.op == "get_attr":
                continue
            if _is_step(operand) and _is_passed_on(operand):
                covers.append(operand)
                waiting.append(operand)
            elif known_tensor(operand, *INTEGERS, ranks=range(9)):
                reads[operand] = None
            else:
                return _lacking("read", operand)
    return Match(root, tuple(reversed(covers)), tuple(reads))


def _is_step(node: fx.Node) -> bool:
    return _is_elementwise(node) and known_tensor(node, *INTEGERS, torch.float32, torch.bool, ranks=range(9))


def _is_passed_on(node: fx.Node) -> bool:
    """Return whether the kernel of its only reader computes a node: it does not after `LONGEST` quantized tensors, counted from the end."""
    if not _has_next(node):
        return False
    if qparams(node) is None:
        return True
    count, last = 1, next(iter(node.users))
    while _has_next(last):
        count += qparams(last) is not None
        last = next(iter(last.users))
    return count % LONGEST != 0


def _has_next(node: fx.Node) -> bool:
    """Return whether one step on tensors of the same size alone reads a node that is not quantized bytes, which tables read."""
    (user, *others) = node.users or (None,)
    if user is None or others or not _is_step(user) or _sizes(user) != _sizes(node):
        return False
    return not known_tensor(node, *BYTES, ranks=range(9)) or qparams(node) is None


def _is_product(node: fx.Node) -> bool:
    """Return whether a node is a linear layer with a constant weight of 8 bits, whose sums have 32 bits."""
    return role_of(node.target) is Role.LINEAR and known_tensor(node.args[1], torch.int8, ranks=(2,)) and known_tensor(node, torch.int32)


def recurrence(root: fx.Node) -> Matched:
    """Match a recurrence: linear layers with one weight that read each other's results, and all row-wise primitives between the layers.

    The root is the concatenation of the states of all steps, or the first of the last nodes. Other nodes that are read outside are results.
    """
    joins = _joins(root)
    first: Any = root.args[0][0] if joins else root  # type: ignore[index]
    if not _is_row_step(first) or (not joins and any(_connects(root, user) for user in root.users)):
        return None
    nodes, waiting = {first}, [first]
    while waiting:
        node = heappop(waiting)  # the earliest one: what is not the first of the last nodes soon finds one before it
        near = {*(each for each in node.all_input_nodes if _connects(each, node)), *(each for each in node.users if _connects(node, each))}
        for each in near - nodes:
            if not joins and each < root and not any(_connects(each, user) for user in each.users):
                return None
            heappush(waiting, each)
        nodes |= near
    if not any(map(_is_product, nodes)):
        return None
    order = {node: index for index, node in enumerate(root.graph.nodes)}
    owners = {user for node in nodes for user in node.users if _joins(user) and nodes.issuperset(user.args[0])}
    ends = owners or {node for node in nodes if nodes.isdisjoint(node.users)}
    if root is not min(ends, key=lambda node: (-len(node.all_input_nodes) * bool(owners), order[node])) or not _repeats(nodes, order):
        return None
    nodes.add(root)
    ordered = tuple(sorted(nodes, key=order.__getitem__))
    operands = dict.fromkeys(operand for node in ordered for operand in node.all_input_nodes)
    reads = tuple(operand for operand in operands if operand not in nodes and operand.op != "get_attr")
    unfit = next((read for read in reads if not known_tensor(read, *INTEGERS, ranks=range(1, 9))), None)
    if unfit is not None:
        return _lacking("read", unfit)
    outside = {node: [user for user in node.users if user not in nodes] for node in nodes}
    for node in nodes:  # kernels read the operand of a centring
        outside[node] += [user for centred in node.users if centred.target is elementwise.centre for user in outside.get(centred, ())]
    if any(order[root] < order[read] for read in reads) or any(order[user] < order[root] for node in nodes for user in outside[node]):
        return "what lies between its steps is read elsewhere, or computed elsewhere"
    results = tuple(node for node in ordered if outside[node] and node is not root)
    return Match(root, ordered, reads, {"nodes": ordered}, results)


def repeated(root: fx.Node) -> Matched:
    """Match a loop of row-wise primitives, with its first step. The root is the first node that reads what the loop carried."""
    if role_of(root.target) is not Role.LEAVING:
        return None
    frame: Any = root.args[1]
    marks = [user for user in frame.users if role_of(user.target) is Role.LEAVING]
    order = {node: index for index, node in enumerate(root.graph.nodes)}
    if root is not min(marks, key=order.__getitem__):
        return None
    body = loops.body(frame)
    computing = (node for node in body if node.op != "get_attr" and node.target is not loops.end and role_of(node.target) is not Role.LOOP)
    unfit = next((node for node in computing if not _is_product(node) and not _is_row_step(node)), None)
    if unfit is not None:
        return f"%{unfit.name} is not computed row by row"
    inside, first = {frame, *body, *marks}, list[fx.Node]()
    waiting = [node.args[0] for node in body if node.target is loop.state]
    rows = _rows(waiting[0])  # type: ignore[arg-type]
    while waiting:
        node: Any = max(waiting, key=order.__getitem__)
        waiting = [each for each in waiting if each is not node]
        if inside.issuperset(node.users) and _is_row_step(node) and _rows(node) == rows:
            inside.add(node)
            first.append(node)
            waiting += [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
    computed = [node for node in body if node.op != "get_attr" and node.target is not loops.end]
    covers = (*reversed(first), *computed, *sorted(marks, key=order.__getitem__))
    outside = dict.fromkeys(read for node in covers for read in node.all_input_nodes if read not in inside and read.op != "get_attr")
    reads = tuple(read for read in outside if isinstance(fact(read), TensorFact))
    unfit = next((read for read in reads if not known_tensor(read, *INTEGERS, ranks=range(1, 9))), None)
    if unfit is not None:
        return _lacking("read", unfit)
    results = tuple(mark for mark in covers[-len(marks) :] if mark is not root)
    return Match(root, covers, reads, {"nodes": tuple(reversed(first)), "loop": (frame, *body)}, results)


def _joins(node: fx.Node) -> bool:
    """Return whether a node concatenates tensors along another dimension than the last."""
    return node.target is shape.concatenate and len(node.args[0]) > 1 and node.args[1] not in (-1, len(_sizes(node)) - 1)  # type: ignore[arg-type]


def _repeats(nodes: set[fx.Node], order: Mapping[fx.Node, int]) -> bool:
    """Return whether the last linear layer among these nodes reads what another one with its weight computed."""
    last = max(nodes, key=lambda node: (_is_product(node), order[node]))
    before = reached([last], lambda node: nodes.intersection(node.all_input_nodes))
    return _is_product(last) and any(_is_product(node) and node.args[1] is last.args[1] for node in before if node is not last)


def rows(root: fx.Node) -> Matched:
    """Match the last primitive of a group that computes and reduces rows, as a layer norm does; others read the last one alone."""
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
    if all(reduction(node) is None for node in covers):
        return None
    outer = tuple(read for read in reads if read not in covers)
    ordered = tuple(node for node in in_order(outer, root) if node in covers)
    if any(_sizes(read)[0] != _sizes(root)[0] for read in outer):
        return "its operands have other numbers of items than its result"
    return Match(root, ordered, outer, {"nodes": ordered})


def _is_bytes(node: fx.Node) -> bool:
    """Return whether a node ends a group: it is quantized to 8 bits, has more than one column, and does not only reshape its operand."""
    return _sizes(node)[-1] != 1 and not _moves(node) and known_tensor(node, *BYTES, ranks=range(9)) and qparams(node) is not None


def reduction(node: fx.Node) -> Op | None:
    """Return the operation by which a node reduces each row to one element; None for a node that reduces no row."""
    record = PRIMITIVES.get(node.target)  # type: ignore[arg-type]
    if record is None or record.reduces is None:
        return None
    return record.reduces(_sizes(node.args[0]), *node.args[1:], **node.kwargs)


def _moves(node: fx.Node) -> bool:
    """Return whether a node only reshapes its operand."""
    return node.target is shape.reshape or (node.target is shape.permute and list(node.args[1]) == list(range(len(_sizes(node)))))  # type: ignore[arg-type]


def _is_on_rows(node: Any) -> bool:
    """Return whether each row (last dimension) of a node is computed from one row, or one element, of each operand."""
    if not known_tensor(node, *INTEGERS, torch.float32, ranks=range(1, 9)) or not node.all_input_nodes:
        return False
    operands = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
    if not all(known_tensor(operand, *INTEGERS, ranks=range(1, 9)) for operand in operands) or not operands:
        return False
    width, widths = _sizes(node)[-1], [_sizes(operand)[-1] for operand in operands]
    fits = all(isinstance(size, int) and size <= LONGEST_ROW for size in widths)
    if not fits or any(_count(operand) != _count(node) for operand in operands):
        return False
    if reduction(node) is not None:
        return True
    if _moves(node):
        return widths[0] == width  # type: ignore[no-any-return]
    record = PRIMITIVES.get(node.target)
    return record is not None and record.steps is not None and all(size in (1, width) for size in widths)


def _count(node: fx.Node) -> tuple[int, ...]:
    """Return the number of rows at each point of sizes."""
    return tuple(math.prod(at_point(size, point) for size in _sizes(node)[:-1]) for point in POINTS)


def _is_row_step(node: Any) -> bool:
    """Return whether a node computes each row of its last dimension from a row of each of its operands."""
    if not isinstance(node, fx.Node) or not known_tensor(node, *INTEGERS, torch.float32, ranks=range(1, 9)) or not node.all_input_nodes:
        return False
    if role_of(node.target) is Role.LINEAR:
        return _is_product(node) and len(node.args[1].users) > 1  # type: ignore[union-attr]
    if node.target is shape.crop and not reads_sizes(node):  # of columns, or of what has other rows
        within = node.args[1] in ([-1], [len(_sizes(node)) - 1])
        return set(node.args[4]) == {1} and (within or _rows(node.args[0]) != _rows(node))  # type: ignore[arg-type]
    operands = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
    if reads_sizes(node):
        return False
    record = PRIMITIVES.get(node.target)  # type: ignore[arg-type]
    is_step = node.target is shape.reshape or (record is not None and record.steps is not None)
    return is_step and all(_rows(operand) == _rows(node) and _sizes(operand)[-1:] == _sizes(node)[-1:] for operand in operands)


def _rows(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a tensor before its last dimension, without sizes of 1."""
    return tuple(size for size in _sizes(node)[:-1] if size != 1)


def _connects(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a value of `_is_row_step` is read by another one, on the same rows."""
    return _is_row_step(node) and _is_row_step(user) and _rows(node) == _rows(user)


def moved(root: fx.Node) -> Matched:
    """Match a concatenation or permutation of channels, a crop, padding or choice of rows, unless a reshaping reads it as a view."""
    record, concatenates = PRIMITIVES.get(root.target), root.target is shape.concatenate  # type: ignore[arg-type]
    if root.target is shape.permute:
        order = [*range(len(_sizes(root)))]
        if root.args[1] not in ([0, *order[2:], 1], [0, order[-1], *order[1:-1]]):
            return None
    elif record is None or record.layout != "same" or not known_tensor(root, *BYTES, ranks=range(9)):
        return None
    if not concatenates and any(user.target is shape.reshape for user in root.users):
        return None
    if not known_tensor(root, *BYTES, ranks=IMAGES):
        return _lacking("write", root, IMAGES)
    if concatenates and root.args[1] % len(_sizes(root)) != 1:  # type: ignore[operator]
        return "it joins along another dimension than the channels"
    operands: Any = tuple(root.args[0]) if concatenates else (root.args[0],)  # type: ignore[arg-type]
    unfit = next((operand for operand in operands if bytes_of(operand, IMAGES) is not operand), None)
    if unfit is not None:
        return _lacking("read", unfit, IMAGES)
    if any(_sizes(operand)[0] != _sizes(root)[0] for operand in operands) or (root.target is shape.select and not root.args[1]):
        return "it takes items of a batch, or adds some"
    return Match(root, (root,), operands)


def dynamic_layer(root: fx.Node) -> Matched:
    """Match a linear layer on float tensors, whose operand is quantized to bytes at run time."""
    if root.target is not runtime_scales.dynamic_linear:
        return None
    input, weight, scale, bias = root.args
    return Match(root, (root,), (input,), {"weight": weight, "scale": scale, "bias": bias})  # type: ignore[arg-type]


def forms_of(model: fx.GraphModule) -> Forms:
    """Return the facts by which kernels hold the tensors of an integer graph."""
    return Forms(_without_negatives(model), _channels_first(model), model)


def _channels_first(model: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the tensors whose dimension 1 is the channels: what convolutions and pools read and write, and images but for linear layers'.

    Elementwise primitives pass this on, so that their operands and results lie alike.
    """
    alike: dict[fx.Node, set[fx.Node]] = {
        node: set() for node in model.graph.nodes if known_tensor(node, torch.int8, torch.uint8, torch.int32, ranks=IMAGES)
    }
    windows, linear = list[fx.Node](), list[fx.Node]()
    for node in alike:
        record, role = PRIMITIVES.get(node.target), role_of(node.target)  # type: ignore[arg-type]
        layout = "" if record is None else record.layout
        if role in CONVOLUTIONS or layout == "windows":
            windows.append(node)
        elif role is Role.LINEAR:
            linear.append(node)
        elif not _is_elementwise(node) and role is not Role.RESIDUAL and layout != "same":
            continue
        for operand in node.all_input_nodes:
            if operand in alike and operand.op != "get_attr":
                alike[node].add(operand)
                alike[operand].add(node)
    near_windows, near_linear = (set(reached(start, alike.__getitem__)) for start in (windows, linear))
    return frozenset(node for node in alike if node in near_windows or (node not in near_linear and len(_sizes(node)) > 3))


def _without_negatives(model: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the quantized tensors that never hold negative centred integers."""
    non_negative: set[fx.Node] = set()
    for node in model.graph.nodes:
        record = PRIMITIVES.get(node.target)
        if record is None:
            continue
        low = record.signature.bind(*node.args, **node.kwargs).arguments.get("low")
        if isinstance(low, int):
            never = low >= 0
        elif record.zero_point is ZeroPoint.EQUIVARIANT and not record.shifted:
            operands = [
                operand for operand in node.all_input_nodes if operand.op != "get_attr" and known_tensor(operand, *BYTES, ranks=range(9))
            ]
            never = bool(operands) and len(operands) == len(node.all_input_nodes) and non_negative.issuperset(operands)
        else:
            continue
        if never:
            non_negative.add(node)
    return frozenset(non_negative)
