"""Check a model against the limits of a target: every limit that is broken, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table
from torch import fx

from fxquant.analysis.layers import Layer, layers, left_in_float
from fxquant.analysis.measures import MEASURES, Site, lowered_from
from fxquant.ir.graph import annotation, is_on_host
from fxquant.ir.integer import operation
from fxquant.ops import operator_of
from fxquant.prepared.stage import record_of
from fxquant.target import Limit, Target


@dataclass(frozen=True)
class Breach:
    """A limit that an operator breaks: the values that are not allowed, and the sentence that says so."""

    limit: Limit
    values: Sequence[Any]
    sentence: str


class Limits:
    """A target's limits, by the operators they are about; with `always`, those alone that the vendor's compiler enforces."""

    def __init__(self, target: Target, always: bool = False) -> None:
        self.target = target
        limits = [limit for limit in target.limits if limit.always or not always]
        self.general = [limit for limit in limits if not limit.operators]
        self.special: dict[str, list[Limit]] = {}
        for limit in limits:
            for name in limit.operators:
                self.special.setdefault(name, []).append(limit)

    def broken(self, site: Site) -> list[Breach]:
        """Return the limits that the operator breaks; if the target does not have the operator, only that is reported."""
        mine = self.special.get(site.operator.name, [])
        absent = [limit for limit in mine if limit.measure is None]
        if absent:
            return [Breach(limit, (), f"{self.target.name} has no {site.operator.name}") for limit in absent]
        found = []
        for limit in (*self.general, *mine):
            assert limit.measure is not None
            offending = limit.broken_by(MEASURES[limit.measure](site))
            if offending:
                values = " and ".join(map(str, offending))
                found.append(Breach(limit, offending, f"its {limit.measure} is {values}; {self.target.name} allows {limit}"))
        return found


FLOAT_REMEDY = "replace it, or run it on the host: fxq.explain says where the integer part ends"


@dataclass(frozen=True)
class Finding:
    """One limit that one operator breaks.

    layer     the path of the user's module, or the node's name where it belongs to the model itself
    node      the name of the graph's node
    operator  the operator's name
    limit     what the value is and what the target allows; or why the operator stays in float
    source    the user's line
    remedy    what the user can do
    kind      "limit"; "float" for an operator that has no integer form on this target; "host" for one that breaks a limit, and that
              `adapt` has moved to the host: nothing is left to do
    """

    layer: str
    node: str
    operator: str
    limit: str
    source: str
    remedy: str
    kind: str = "limit"

    def __str__(self) -> str:
        rows = [f"{self.layer} ({self.operator}): {self.limit}"]
        rows.extend(f"  {label:<8} {value}" for label, value in (("at", self.source), ("remedy", self.remedy)) if value)
        return "\n".join(rows)


@dataclass(frozen=True)
class Findings:
    """The result of `fxq.check`: true if no limit is broken and only operators that `adapt` has moved to the host run in float.

    Iterates over the findings, in the order of the graph.
    """

    target: str
    items: tuple[Finding, ...] = field(default=())

    def __bool__(self) -> bool:
        return all(finding.kind == "host" for finding in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    @property
    def summary(self) -> str:
        """One line: how many limits are broken, and how many operators stay in float."""
        kinds = [finding.kind for finding in self.items]
        floats, broken, moved = (kinds.count(kind) for kind in ("float", "limit", "host"))
        parts = [f"{broken} limit{'' if broken == 1 else 's'} of {self.target} {'is' if broken == 1 else 'are'} broken"] if broken else []
        if floats:
            parts.append(f"{floats} operator{'' if floats == 1 else 's'} would stay in float on {self.target}")
        if not parts:
            parts.append(f"within every limit of {self.target} that is known")
        if moved:
            parts.append(f"{moved} operator{' runs' if moved == 1 else 's run'} on the host")
        return ", ".join(parts)

    def __rich__(self) -> Table | str:
        if not self.items:
            return self.summary
        table = Table(title=self.summary, title_justify="left", show_lines=True)
        for name in ("layer", "operator", "limit", "at", "remedy"):
            table.add_column(name, overflow="fold")
        for finding in self.items:
            table.add_row(*map(escape, (finding.layer, finding.operator, finding.limit, finding.source, finding.remedy)))
        return table

    def __str__(self) -> str:
        """Return the summary, then every finding as plain text: layer, operator and limit; the source line; the remedy."""
        return "\n".join([self.summary, *map(str, self.items)])


def findings(gm: fx.GraphModule, target: Target) -> Findings:
    """Everything in an annotated or prepared graph that the target does not allow, and what stays in float; linear in its nodes."""
    known = layers(gm)
    nodes = {node.name: node for node in gm.graph.nodes}
    found = [*broken_limits(gm, known, target), *(_in_float(nodes[layer.name], layer) for layer in left_in_float(known))]
    order = {layer.name: index for index, layer in enumerate(known)}
    return Findings(target.name, tuple(sorted(found, key=lambda finding: order[finding.node])))


def broken_limits(gm: fx.GraphModule, known: tuple[Layer, ...], target: Target) -> Iterator[Finding]:
    """Yield the limits that integer operators of an annotated or prepared graph, whose layers are known, break."""
    if not target.limits:
        return
    limits = Limits(target)
    nodes = {node.name: node for node in gm.graph.nodes}
    for layer in known:
        node = nodes[layer.name]
        operator = record_of(gm, node) if layer.integer and not layer.boundary else None
        if operator is None:
            continue
        for breach in limits.broken(Site(node, operator, operator.arguments(node))):
            yield Finding(layer.module or layer.name, layer.name, layer.operator, breach.sentence, layer.source, breach.limit.remedy)


def refused(integer: fx.GraphModule) -> Iterator[tuple[fx.Node, Breach]]:
    """Yield the nodes of an integer graph that the vendor's compiler refuses, each with the limit that it breaks."""
    limits, nodes = Limits(integer.meta["target"], always=True), {node.name: node for node in integer.graph.nodes}
    for node in integer.graph.nodes:
        lowered = operation(node)
        if lowered is not None and lowered.name in limits.special:
            operator, arguments = lowered_from(lowered, nodes)
            assert operator is not None
            yield from ((node, breach) for breach in limits.broken(Site(node, operator, arguments)))


def _in_float(node: fx.Node, layer: Layer) -> Finding:
    spec, place = annotation(node), layer.module or layer.name
    if is_on_host(node):
        return Finding(place, layer.name, layer.operator, layer.reason, layer.source, "nothing is left to do", "host")
    unasked = operator_of(node) is not None and spec is not None and spec.config is None
    remedy = "give it a QConfig" if unasked else FLOAT_REMEDY
    return Finding(place, layer.name, layer.operator, f"it stays in float: {layer.reason}", layer.source, remedy, "float")
