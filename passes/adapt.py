"""Replace operators that break a limit of the target by equivalent ones within the limit.

%y = conv2d(%x, %w)          →    %y_getitem = getitem(%x, [:, 0:5000])
                                  %y_conv2d = conv2d(%y_getitem, %y_narrow)
                                  %y_getitem_1 = getitem(%x, [:, 5000:10000])
                                  %y = conv2d(%y_getitem_1, %y_narrow_1, residual=%y_conv2d)

Runs with `Options(adapt=True)`, and always for operators that the vendor's compiler refuses. With `adapt`, operators without a remedy
stay in float, on the host.
"""

from dataclasses import replace

import networkx as nx
from torch import fx

from fxquant.analysis.explain import Breach, Limits
from fxquant.analysis.measures import Site
from fxquant.ir.graph import annotate, annotation, computes_tensor, is_inner_part, is_parameter, made_by, part, reads_shape_only
from fxquant.ops import has_weights, operands_of, operator_of, shares
from fxquant.passes.rewriting import decide, eliminate_dead, keep_in_float
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer
from fxquant.remedies import REMEDIES, Rewriting

MOST_STEPS = 12  # remedies in a row for one operator; each reduces what remains to be changed
OF_THE_MODEL = ("batch", "bytes")  # limits that are about how the model is run: no operator is another for them


def apply(gm: fx.GraphModule, context: Context) -> int:
    """Replace operators that break a limit of the target, or leave them to the host where no remedy helps, each with the reason."""
    limits, changes, narrowed = Limits(context.target, always=not context.options.adapt), 0, set[fx.Node]()
    for node in list(gm.graph.nodes):
        spec = annotation(node)
        _follow(node, narrowed)
        changes += _mend(gm, node, limits, context, MOST_STEPS)
        now = annotation(node)
        if spec is not None and now is not None and now.dtype not in (spec.dtype, None):
            narrowed.add(node)
    if changes:  # what a remedy reads past: the flatten in front of a layer
        eliminate_dead(gm.graph.nodes, lambda node: operator_of(node) is not None and not node.is_impure())
    return changes


def _mend(gm: fx.GraphModule, node: fx.Node, limits: Limits, context: Context, steps: int) -> int:
    operator = operator_of(node)
    if operator is None or not is_integer(node):
        return 0
    broken = [each for each in limits.broken(Site(node, operator, operator.arguments(node))) if each.limit.measure not in OF_THE_MODEL]
    if not broken:
        return 0
    for breach in broken:
        added = _rewritten(gm, node, breach, context) if steps else None
        if added is not None:
            return 1 + sum(_mend(gm, one, limits, context, steps - 1) for one in added)
    if not context.options.adapt or (is_inner_part(node) and made_by(node) != "adapt.apply"):
        return 0  # the whole composite of the model would have to be in float
    keep_in_float(node, f"it runs on the host, since {broken[0].sentence}", context, on_host=True)
    return 1


def _rewritten(gm: fx.GraphModule, node: fx.Node, breach: Breach, context: Context) -> list[fx.Node] | None:
    """Return the operators that the node became; None if none of the remedies for this limit applies."""
    operator = operator_of(node)
    assert operator is not None
    name, function = REMEDIES.get((operator.name, breach.limit.measure)) or REMEDIES.get(("*", breach.limit.measure)) or ("", None)
    if function is None:
        return None
    build = Rewriting(gm, node, operator, context.target, f"{operator.name} {name}", breach, context.options.adapt)
    result = function(build)
    if result is None or any((record := operator_of(part)) is None or record.refuses(part, record.arguments(part)) for part in build.parts):
        build.discard()
        return None
    build.finish(result)
    context.say(f"%{node.name} is {len(build.parts)} operators: {name}, since {breach.sentence}")
    for sentence in build.notes if context.options.batch_norm == "live" else ():
        context.not_done(gm, sentence)
    return build.parts


def _follow(node: fx.Node, narrowed: set[fx.Node]) -> None:
    """Give a node on its operand's grid the operand's dtype, where a remedy has changed that."""
    spec = annotation(node)
    if spec is None or spec.dtype is None or not shares(node):
        return
    operand = operands_of(node)[0]
    operand_spec = annotation(operand)
    if operand in narrowed and operand_spec is not None and operand_spec.dtype is not None:
        annotate(node, replace(spec, dtype=operand_spec.dtype))


# ---- Islands --------------------------------------------------------------------------------------------------------
#
# Integers between float operators that gain nothing by being integers stay in float: values then cross once less each way.
#
# %a = fft(%x)                           %a = fft(%x)
# %b = reshape(%a)   (integer)     →     %b = reshape(%a)   (float)
# %c = fft(%b)                           %c = fft(%b)
#
# An island is a set of integer operators that are connected with each other and with no other integer operators. It stays in float if
# three conditions hold. Every operand is computed by a float operator, or is an input that the island only moves. Every reader is a
# float operator. The island computes no sums of products. Operators that a rule of the qconfig makes integer are left unchanged.
def keep_islands(gm: fx.GraphModule, context: Context) -> int:
    """Keep islands in float whose values would cross from float to integer and back without a gain."""
    connected = nx.Graph()
    for node in gm.graph.nodes:
        if operator_of(node) is not None and is_integer(node):
            connected.add_node(node)
            connected.add_edges_from((node, operand) for operand in operands_of(node) if is_integer(operand))
    changes = 0
    for island in nx.connected_components(connected):
        because = _why(island)
        if because is None:
            continue
        for node in island:
            keep_in_float(node, because, context)
        changes += len(island)
    return changes


def _why(island: set[fx.Node]) -> str | None:
    """Return why an island stays in float; None if it is worth its quantize and dequantize."""
    if any(has_weights(node) or decide(node).asked for node in island):
        return None
    readers = {user for node in island for user in node.users if user not in island and not reads_shape_only(user)}
    if not readers or not all(_computes_in_float(user) for user in readers):
        return None
    moves = all(shares(node) and part(node) is None for node in island)
    read = {operand for node in island for operand in operands_of(node) if operand not in island}
    if not all(_computes_in_float(operand) or (moves and operand.op == "placeholder") for operand in read):
        return None
    names = " and ".join(sorted(f"%{user.name}" for user in readers)[:2])
    return f"it lies between operators in float, and is read only by {names}"


def _computes_in_float(node: fx.Node) -> bool:
    return computes_tensor(node) and not is_parameter(node) and not is_integer(node)
