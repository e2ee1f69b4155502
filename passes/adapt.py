"""Operators that break a limit of the target become others that mean the same and keep it.

%y = conv2d(%x, %w)          →    %y_getitem = getitem(%x, [:, 0:5000])
                                  %y_conv2d = conv2d(%y_getitem, %y_narrow)
                                  %y_getitem_1 = getitem(%x, [:, 5000:10000])
                                  %y = conv2d(%y_getitem_1, %y_narrow_1, residual=%y_conv2d)

Runs only where it is asked for. What no remedy mends, the target cannot run: it stays in float, on the host.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxquant.analysis.breaches import Breach, Limits
from fxquant.analysis.measures import Site
from fxquant.ir.graph import annotate, annotation, made_by
from fxquant.ir.parts import part
from fxquant.ops import operand_nodes, operator_of, shares
from fxquant.passes.rewriting import eliminate_dead
from fxquant.pipeline import Context
from fxquant.prepared.stage import is_integer
from fxquant.remedies import REMEDIES, Rewriting

MOST_STEPS = 12  # remedies in a row for one operator; each reduces what remains to be changed
OF_THE_MODEL = ("batch", "bytes")  # limits that are about how the model is run: no operator is another for them


def apply(gm: fx.GraphModule, context: Context) -> int:
    """No operator breaks a limit of the target, as far as remedies and the host can help; each says what became of it, and why."""
    if not context.adapt or not context.target.limits:
        return 0
    limits, changes, narrowed = Limits(context.target), 0, set[fx.Node]()
    for node in list(gm.graph.nodes):
        spec = annotation(node)
        _follow(node, narrowed)
        changes += _mend(gm, node, limits, context, MOST_STEPS)
        now = annotation(node)
        if spec is not None and now is not None and now.dtype not in (spec.dtype, None):
            narrowed.add(node)
    if changes:  # what a remedy reads past: the flatten in front of a layer
        eliminate_dead(gm.graph.nodes, lambda node: operator_of(node) is not None)
    return changes


def _mend(gm: fx.GraphModule, node: fx.Node, limits: Limits, context: Context, steps: int) -> int:
    operator = operator_of(node)
    if operator is None or not is_integer(node):
        return 0
    broken = [found for found in limits.broken(Site(node, operator, operator.arguments(node))) if found.limit.measure not in OF_THE_MODEL]
    if not broken:
        return 0
    for breach in broken:
        made = _rewritten(gm, node, breach, context) if steps else None
        if made is not None:
            return 1 + sum(_mend(gm, one, limits, context, steps - 1) for one in made)
    known = part(node)
    if known is not None and known.inner and made_by(node) != "adapt.apply":
        return 0  # an inner tensor of a composite of the model: the whole would have to be in float
    spec = annotation(node)
    assert spec is not None
    annotate(node, replace(spec, dtype=None, because=f"it runs on the host, since {broken[0].sentence}", on_host=True))
    context.say(f"%{node.name} stays in float: {broken[0].sentence}")
    return 1


def _rewritten(gm: fx.GraphModule, node: fx.Node, breach: Breach, context: Context) -> list[fx.Node] | None:
    """Return the operators that the node became; None if none of the remedies for this limit applies."""
    operator = operator_of(node)
    assert operator is not None
    name, function = REMEDIES.get((operator.name, breach.limit.measure)) or REMEDIES.get(("*", breach.limit.measure)) or ("", None)
    if function is None:
        return None
    build = Rewriting(gm, node, operator, context.target, f"{operator.name} {name}", breach)
    result = function(build)
    if result is None or any((record := operator_of(made)) is None or record.refuses(made, record.arguments(made)) for made in build.parts):
        build.undo()
        return None
    build.finish(result)
    context.say(f"%{node.name} is {len(build.parts)} operators: {name}, since {breach.sentence}")
    for sentence in build.notes if context.batch_norm == "live" else ():
        context.not_done(gm, sentence)
    return build.parts


def _follow(node: fx.Node, narrowed: set[fx.Node]) -> None:
    """Give a node on its operand's grid the operand's dtype, where a remedy has changed that."""
    operator, spec = operator_of(node), annotation(node)
    if operator is None or spec is None or spec.dtype is None or not shares(node):
        return
    operand = operand_nodes(operator, operator.arguments(node))[0]
    taken = annotation(operand)
    if operand in narrowed and taken is not None and taken.dtype is not None:
        annotate(node, replace(spec, dtype=taken.dtype))
