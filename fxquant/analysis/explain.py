"""Explain a model on a target: why nodes are integer or float, with which dtype and scale, by which kernels; and which limits it breaks."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import fx

from fxquant.analysis.layers import HOST, Layer, description, layers, left_in_float
from fxquant.analysis.measures import MEASURES, Site, lowered_from
from fxquant.analysis.recording import runner_of
from fxquant.analysis.text import aligned
from fxquant.frontend import assumptions, moved_by_forward
from fxquant.ir.graph import TensorFact, annotation, fact, is_on_host, model_meta
from fxquant.ir.integer import QParams, operation, origin
from fxquant.kernels.program import Choice
from fxquant.kernels.runner import Runner
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME, operator_of
from fxquant.ops.elementwise.table import curve, hashable, same_as
from fxquant.prepared.stage import primitive_of, record_of
from fxquant.primitives import Role, role_of
from fxquant.support.arguments import checked
from fxquant.target import Limit, Target

PRODUCTS = frozenset({Role.CONVOLUTION, Role.TRANSPOSED, Role.LINEAR, Role.MATRIX_PRODUCT})  # roles of multiply-accumulates
SHOWN_REASONS = 4  # in the line of the summary; the table has them all


@checked()
def explain(model: fx.GraphModule, *, machine: bool = False) -> str:
    """Return a table of all operators (integer or float, dtype, scale, reason), and of what tracing, requests and calibration came to.

    For an integer model that has run, kernels that are not used on this machine follow, with the reason. With `machine` a line for every
    operator names the kernels that compute it, or the reason why its primitives do; a model that has not run yet is run once.

    `model` is a prepared or an integer model, or any graph between. Raises ConfigurationError for a model that is not a graph.
    """
    all_layers = layers(model)
    lines = [*aligned([row for layer in all_layers for row in _rows(layer)]), "", summary(all_layers)]
    fixed = [*assumptions(model)]
    for name, line in moved_by_forward(model).items():
        if not any(text.startswith(f"{name} is changed in place") for text in fixed):
            fixed.append(f"{name} is changed by forward in train mode, and not here" + f" ({line})" * bool(line))
    lines.extend(f"fixed by the model's Python: {text}" for text in fixed)
    lines.extend(model_meta(model).get("not_done", ()))
    lines.extend(f"calibration: {text}" for text in model_meta(model).get("chosen", ()))
    lines.extend(_on_this_machine(model, machine))
    return "\n".join(lines) + "\n"


def _rows(layer: Layer) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of inner tensors on another scale, then the operator's, once it is decided."""
    inner = [tensor for tensor in layer.intermediates if tensor.grid != layer.grid]
    rows = [(f"%{each.name}", "integer", each.grid.dtype, _scale(each.grid), _where(layer, f"inside of %{layer.name}")) for each in inner]
    if layer.reason or layer.grid is not None or layer.dynamic:
        reason = layer.reason or "; ".join([layer.part, *layer.notes] if layer.part else layer.notes)
        also = f"; holds {', '.join(layer.fused)}" if layer.reason and layer.fused else ""
        also += f"{'; ' if reason + also else ''}{coarse}" if (coarse := description(layer.parts)) else ""
        if layer.dynamic and layer.reason and layer.part:
            reason = f"{layer.part}; {reason}"
        kind = "integer" if layer.integer else "dynamic" if layer.dynamic else "float"
        half = kind == "float" and layer.device != HOST and not layer.boundary
        dtype = layer.dtype if layer.integer else "float16" if half else ""
        rows.append((f"%{layer.name}", kind, dtype, _scale(layer.grid), _where(layer, reason + also)))
    return rows


def _scale(grid: QParams | None) -> str:
    """Return a scale as text, or the smallest and the largest of several, or why there is none; "" without a grid."""
    if grid is None:
        return ""
    if isinstance(grid.scale, float):
        zero_point = f", zero point {grid.zero_point}" if ACTIVATION_TYPES[grid.dtype].affine else ""
        return "not calibrated" if math.isnan(grid.scale) else f"{grid.scale:.6g}{zero_point}"
    return f"{min(grid.scale):.6g}…{max(grid.scale):.6g}" if grid.scale else "its sum's"


def _where(layer: Layer, reason: str) -> str:
    place = layer.source or layer.module
    return f"{reason}   [{place}]" if place and reason else reason or place


def summary(all_layers: tuple[Layer, ...]) -> str:
    """Return one line with the numbers of integer and float layers, and reasons; a composite counts as one, a boundary not at all."""
    integer = sum(layer.integer and not layer.inner and not layer.boundary for layer in all_layers)
    dynamic = sum(layer.dynamic for layer in all_layers)
    in_float = left_in_float(all_layers)
    counted = f"{integer} operator is integer" if integer == 1 else f"{integer} operators are integer"
    if dynamic:
        counted += f", {dynamic} {'is' if dynamic == 1 else 'are'} dynamic"
    if not in_float:
        return f"{counted}, none is left in float"
    reasons = Counter(layer.reason for layer in in_float).most_common(SHOWN_REASONS)
    listed = [f"{count} because {reason}" for reason, count in reasons]
    others = len(in_float) - sum(count for _, count in reasons)
    listed += [f"{others} for other reasons"] if others else []
    return f"{counted}, {len(in_float)} {'is' if len(in_float) == 1 else 'are'} left in float: {'; '.join(listed)}"


# ---- how each operator of an integer model is computed on this machine ----------------------------------------------
@dataclass(frozen=True)
class OperatorRun:
    """The computation of one operator of an integer model on this machine: by kernels, or by its primitives, and why."""

    layer: Layer  # the operator, with its name and its multiply-accumulates
    kernels: Mapping[str, Choice]  # the choice at each of its nodes with a kernel, by name
    primitives: Mapping[str, str]  # its primitives that run without a kernel, by node name, with the reason; "" if no kernel exists
    moves: bool  # whether it only moves memory: its result holds the elements of its operands
    because: str  # why nodes of it run without a kernel; "" if all have one
    macs: int  # its multiply-accumulates, if kernels compute them; else 0

    @property
    def fast(self) -> bool:
        """Whether kernels compute all primitives of the operator: there is no reason in `because`."""
        return not self.because

    @property
    def disagrees(self) -> tuple[str, ...]:
        """The implementations that are not used because they computed other bits; others were not applicable."""
        return tuple(name for choice in self.kernels.values() for name in choice.disagrees)


def operator_runs(model: fx.GraphModule) -> tuple[OperatorRun, ...]:
    """Return the kernels and primitives that compute each operator of an integer model, for inputs of the last call's sizes.

    A model that has not run yet is run once, on zeros. A model without kernels, or on another device than the CPU, runs its primitives.
    """
    runner = runner_of(model)
    choices = {} if runner is None else runner.choices(model, prove=True) or _run_once(model, runner)
    at: dict[str, dict[fx.Node, Choice]] = {}
    for node, choice in choices.items():
        at.setdefault(origin(node), {})[node] = choice
    without = "" if choices else "it runs the primitives without kernels" if runner is None else "kernels are for the CPU"
    return tuple(_operator_run(layer, at.get(layer.name, {}), without) for layer in layers(model))


def _operator_run(layer: Layer, choices: Mapping[fx.Node, Choice], without: str) -> OperatorRun:
    kernels = {node.name: choice for node, choice in choices.items() if choice.kernel}
    alone = {node: choice.because for node, choice in choices.items() if not choice.kernel}
    unused = [f"the kernel for a {each.kernel} is not used ({each.because})" for each in kernels.values() if each.implementation is None]
    names = dict.fromkeys(record.name for node in alone if (record := primitive_of(node)) is not None)
    if not layer.integer and not layer.dynamic and not layer.boundary:
        reasons = ["it stays in float"]
    elif without:
        reasons = [without]
    else:
        inner = [because for because in alone.values() if because] or [f"no kernel computes {', '.join(names)}"] * bool(alone)
        own = [because for node, because in alone.items() if node.name == layer.name and because]
        reasons = unused + (own or inner)
    roles = {role_of(node.target) for node in alone}
    moves = roles == {Role.MOVEMENT} and not kernels
    in_kernels = not reasons or (bool(kernels) and not unused and not without and PRODUCTS.isdisjoint(roles))
    primitives = {node.name: because for node, because in alone.items()}
    return OperatorRun(layer, kernels, primitives, moves, "; ".join(dict.fromkeys(reasons)), layer.macs * in_kernels)


def _on_this_machine(model: fx.GraphModule, machine: bool) -> Iterator[str]:
    """Sentences about operators whose kernels are not used on this machine; with `machine`, about every operator.

    With `machine` the model is run once, on zeros, if it has not run yet.
    """
    runner = runner_of(model)
    if not machine and (runner is None or not runner.choices(model)):
        return
    for each in operator_runs(model):
        if machine or any(choice.implementation is None for choice in each.kernels.values()):
            yield f"%{each.layer.name} {_sentence(each)}"


def _sentence(run: OperatorRun) -> str:
    ran = [choice for choice in run.kernels.values() if choice.implementation is not None]
    used = [f"the kernel for a {each.kernel}: {each.implementation}" + (f" ({each.because})" if each.refused else "") for each in ran]
    if run.moves:
        return "only moves memory, without a kernel"
    if not used and not run.because:
        return "is computed by the kernel of an operator that reads it"
    if not used:
        return f"runs its primitives: {run.because}"
    return f"runs {', '.join(used)}" + (f"; the rest by its primitives: {run.because}" if run.because else "")


def _run_once(model: fx.GraphModule, runner: Runner) -> dict[fx.Node, Choice]:
    facts: list[TensorFact] = [fact(node) for node in model.graph.find_nodes(op="placeholder")]
    inputs = [torch.zeros(each.at(1), dtype=each.dtype, device="cpu") for each in facts]
    if all(tensor.device.type == "cpu" for tensor in model.buffers()):
        runner.program(model, inputs)
    return runner.choices(model)


# ---- the limits of a target: every one that is broken, where, and what to do about it --------------------------------
@dataclass(frozen=True)
class Breach:
    """A limit that an operator breaks: the values that are not allowed, and the sentence that says so."""

    limit: Limit
    values: Sequence[Any]
    sentence: str


class Limits:
    """A target's limits by operator; with `always`, only the limits that the vendor's compiler enforces."""

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
        same = same_as(hashable(site.arguments["steps"])) if site.operator.function is curve else None
        if same is not None:
            site = replace(site, operator=BY_NAME[same[0]], arguments={"input": site.arguments["input"], **same[1]})
        mine = self.special.get(site.operator.name, [])
        if absent := [limit for limit in mine if limit.measure is None]:
            return [Breach(limit, (), f"{self.target.name} has no {site.operator.name}") for limit in absent]
        breaches = []
        for limit in (*self.general, *mine):
            assert limit.measure is not None
            if offending := limit.broken_by(MEASURES[limit.measure](site)):
                values = " and ".join(map(str, offending))
                breaches.append(Breach(limit, offending, f"its {limit.measure} is {values}; {self.target.name} allows {limit}"))
        return breaches


FLOAT_REMEDY = "replace it, or run it on the host: fxq.explain says where the integer part ends"


@dataclass(frozen=True)
class Finding:
    """One limit that one operator breaks.

    layer     the path of the user's module, or the node's name where it belongs to the model itself
    node      the name of the graph's node
    operator  the operator's name
    limit     the value and the limit, in words; or why the operator stays in float
    source    the user's line
    remedy    what the user can do
    kind      "limit"; "float" for an operator that has no integer form on this target; "host" for one that the host computes by choice,
              since it would break a limit or lose accuracy at an output: nothing is left to do
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
    """The result of `fxq.check`: true if no limit is broken and all operators in float are on the host by choice.

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
        """Return one line with the numbers of broken limits and of operators that stay in float."""
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
    """Return the broken limits of the target, and the operators that stay in float, of an annotated or prepared graph; linear in nodes."""
    all_layers = layers(gm)
    nodes = {node.name: node for node in gm.graph.nodes}
    results = [*broken_limits(gm, all_layers, target), *(_in_float(nodes[layer.name], layer) for layer in left_in_float(all_layers))]
    order = {layer.name: index for index, layer in enumerate(all_layers)}
    return Findings(target.name, tuple(sorted(results, key=lambda finding: order[finding.node])))


def broken_limits(gm: fx.GraphModule, all_layers: tuple[Layer, ...], target: Target) -> Iterator[Finding]:
    """Yield the limits that integer operators of an annotated or prepared graph break; `all_layers` are its layers."""
    limits, nodes = Limits(target), {node.name: node for node in gm.graph.nodes}
    for layer in all_layers if target.limits else ():
        node = nodes[layer.name]
        operator = record_of(gm, node) if layer.integer and not layer.boundary else None
        for breach in [] if operator is None else limits.broken(Site(node, operator, operator.arguments(node))):
            yield Finding(layer.module or layer.name, layer.name, layer.operator, breach.sentence, layer.source, breach.limit.remedy)


def refused(integer: fx.GraphModule) -> Iterator[tuple[fx.Node, Breach]]:
    """Yield the nodes of an integer graph that the vendor's compiler refuses, each with the limit that it breaks."""
    limits, nodes = Limits(integer.meta["target"], always=True), {node.name: node for node in integer.graph.nodes}
    for node in integer.graph.nodes:
        if (lowered := operation(node)) is not None and lowered.name in limits.special:
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
