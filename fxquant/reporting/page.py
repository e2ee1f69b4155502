"""A model as one HTML file that needs no network."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import networkx
import torch
from torch import Tensor, fx

from fxquant.analysis.explain import findings
from fxquant.analysis.layers import Layer, layers, left_in_float
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import fused, made_by, model_meta, resolve, stage_of
from fxquant.ir.integer import operation
from fxquant.ops import Trait
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, first_batches
from fxquant.prepared.operators import QuantizedOperator
from fxquant.prepared.stage import quantized_operator
from fxquant.quantization.weights import running_gain
from fxquant.reporting.advice import grid_text
from fxquant.reporting.comparing import Comparison, compare
from fxquant.reporting.statistics import LayerComparison, TensorStatistics, drawn, in_decibels, json_ready
from fxquant.support import disagreements
from fxquant.support.arguments import FILE, FLAG, TEXT, checked, instance
from fxquant.support.files import check_place, write_file
from fxquant.support.progress import working
from fxquant.version import __version__

ADVICE = ("layer", "cause", "cure", "gain", "source")  # what is shown of it
UNDEFINED = "nan dB"  # of outputs that are not floating-point
CHANNELS = 256  # of a tensor or a weight that are drawn; of more, the largest of neighbours


def contents(
    model: fx.GraphModule, comparison: Comparison | None, forms: Mapping[str, Comparison], findings: Sequence[Any], title: str
) -> dict[str, Any]:
    """Return the data of the page as values for JSON; infinite numbers and NaN are null."""
    all_layers = layers(model)
    target = model_meta(model).get("target")
    shown = drawing(model)
    names = list(shown.graph)
    compared = {} if comparison is None else dict(comparison)
    verdict = None if comparison is None else comparison.verdict
    counts = Counter(made_by(node) for node in model.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    merged = [[node.name, ", ".join(fused(node))] for node in model.graph.nodes if fused(node)]
    data: dict[str, Any] = {
        "title": title,
        "version": __version__,
        "stage": (stage_of(model) or "traced").lower(),
        "target": "" if target is None else target.name,
        "summary": _summary(all_layers, comparison),
        "forms": [_form(label, each) for label, each in forms.items()],
        "verdict": None if verdict is None else {"grade": verdict.grade, "sqnr": verdict.sqnr, "lines": list(verdict.lines)},
        "advice": [{key: getattr(each, key) for key in ADVICE} for each in (() if comparison is None else comparison.advice)],
        "compared": comparison is not None,
        "nodes": [
            {"name": name, "x": x, "y": y, **_node(shown.layers.get(name), compared.get(name), name)}
            for name, (x, y) in ((name, shown.places[name]) for name in names)
        ],
        "edges": [shown.path(one, other) for one, other in shown.graph.edges],
        "details": {} if comparison is None else {name: _details(comparison.statistics[name]) for name in compared},
        # The largest magnitude for each output channel.
        "weights": {
            name: _fewer(weight.flatten(1).abs().amax(1) if weight.dim() > 1 else weight.abs())
            for name, weight in weights_of(model).items()
            if name in shown.places
        },
        "passes": {"made": list(map(list, counts.most_common())), "fused": merged, "not_done": list(model_meta(model).get("not_done", ()))},
        "floats": [[layer.name, layer.operator, layer.reason, layer.source] for layer in left_in_float(all_layers)],
        "disagreements": [[each.place, each.implementation, each.because] for each in disagreements(model)],
        "findings": [[each.layer, each.operator, each.limit, each.remedy, each.source] for each in findings],
    }
    ready: dict[str, Any] = json_ready(data)
    return ready


def _summary(all_layers: tuple[Layer, ...], comparison: Comparison | None) -> list[list[str]]:
    operators = [layer for layer in all_layers if not layer.boundary]
    dtypes = Counter(layer.dtype for layer in operators if layer.integer)
    dynamic = sum(layer.dynamic for layer in all_layers)
    at_run_time = f"{dynamic} quantized at run time, " if dynamic else ""
    integer = sum(layer.integer for layer in operators)
    rows = [
        ["operators", f"{len(operators)}: {integer} on integers, {at_run_time}{len(left_in_float(all_layers))} in float"],
        ["dtypes", ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common()) or "none"],
        ["multiply-accumulates", f"{sum(layer.macs for layer in all_layers):,}"],
        ["weights", f"{sum(layer.weight_bytes for layer in all_layers):,} bytes"],
        ["largest activation", f"{max((layer.activation_bytes for layer in all_layers), default=0):,} bytes"],
    ]
    if comparison is not None:
        rows += [[layer.name, f"SQNR {in_decibels(layer.sqnr, UNDEFINED)}, cosine {layer.cosine:.6f}"] for layer in comparison.outputs]
        rows.append(["compared", f"{comparison.labels[1]} against {comparison.labels[0]}, {comparison.batches} batches"])
    return rows


def _form(label: str, comparison: Comparison) -> list[Any]:
    tensors = [*comparison.layers, *comparison.outputs]
    equal = sum(layer.mse == 0 for layer in tensors)
    outputs = ", ".join(f"{layer.name}: {in_decibels(layer.sqnr, UNDEFINED)}" for layer in comparison.outputs)
    return [label, f"{equal} of {len(tensors)} tensors equal", outputs]


def _node(layer: Layer | None, compared: LayerComparison | None, name: str) -> dict[str, Any]:
    if layer is None:
        return {"operator": "output" if name == "output" else "input", "kind": "end"}
    data: dict[str, Any] = {
        "operator": layer.operator,
        "kind": "boundary" if layer.boundary else "integer" if layer.integer or layer.dynamic else "float",
        "dtype": layer.dtype,
        "grid": grid_text(layer.grid) if layer.grid is not None else layer.dtype,
        "shape": ",".join(map(str, layer.shape)),
        "device": layer.device,
        "macs": layer.macs,
        "bytes": layer.weight_bytes,
        "source": layer.source,
        "module": layer.module,
        "why": layer.reason or "; ".join(layer.notes),
    }
    if compared is not None:
        keys = ("sqnr", "own", "cosine", "steps", "clipped", "zeroed", "reach", "error", "effect", "reference")
        data.update({key: getattr(compared, key) for key in keys})
        if compared.sqnr == math.inf:
            data["equal"] = True
    return data


def _details(statistics: TensorStatistics) -> dict[str, Any]:
    """Return a tensor's ends, histogram, clip limits and largest magnitude of each channel (at most CHANNELS), for the page's JSON."""
    data: dict[str, Any] = {"low": statistics.low, "high": statistics.high}
    if statistics.steps is not None:
        scale, ends = statistics.steps.scale, drawn(statistics.steps)
        data.update(
            counts=statistics.columns.tolist(),
            ends=[ends[0] * scale, ends[1] * scale],
            clip=[statistics.steps.low * scale, statistics.steps.high * scale],
        )
    if statistics.channels is not None:
        data["channels"] = _fewer(statistics.channels)
    return data


def _fewer(values: Tensor) -> list[float]:
    """At most CHANNELS numbers with four digits: the largest of neighbours."""
    flat = values.flatten().double()
    step = -(-len(flat) // CHANNELS) or 1
    return [float(f"{float(part.max()):.4g}") for part in torch.split(flat, step)]


def weights_of(model: fx.GraphModule) -> dict[str, Tensor]:
    """Return the layers' weights in the graph as float tensors with at least one dimension, by layer name."""
    nodes = {node.name: node for node in model.graph.nodes}
    return {name: weight for name, node in nodes.items() if (weight := _weight_of(model, node, nodes)) is not None and weight.dim()}


def _weight_of(model: fx.GraphModule, node: fx.Node, nodes: Mapping[str, fx.Node]) -> Tensor | None:
    """Return the weight of a layer as a float tensor, dequantized in an integer model; None if the graph holds none."""
    lowered, module = operation(node), quantized_operator(model, node)
    if lowered is not None and "weight" in lowered.constants:
        constant = lowered.constants["weight"]
        value = resolve(model, str(nodes[constant.node].target))
        if not isinstance(value, Tensor) or constant.scale == ():
            return None
        scale = torch.tensor(constant.scale, dtype=torch.float64, device=value.device)
        if constant.axis is not None:
            if scale.numel() != value.shape[constant.axis]:  # a transposed convolution in groups
                return None
            scale = scale.reshape(-1, *[1] * (-constant.axis - 1))
        real: Tensor = (value.double() - torch.tensor(constant.zero_point, dtype=torch.float64, device=value.device)) * scale
        return real
    return None if module is None else _prepared_weight(model, node, module)


def _prepared_weight(model: fx.GraphModule, node: fx.Node, module: QuantizedOperator) -> Tensor | None:
    """Return the weight that an operator of a prepared model rounds: with its batch norm and its channels' factors multiplied in."""
    arguments = module.operator.bind_call(node.args, node.kwargs)
    values: dict[str, Any] = {
        name: resolve(model, str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else value
        for name, value in arguments.items()
    }
    if not isinstance(values.get("weight"), Tensor):
        return None
    if module.factors is not None:
        values = module.factors.of(module.operator, values)
    weight: Tensor = values["weight"].detach().double()
    norm = values.get("batch_norm")
    if norm is None:
        return weight
    if isinstance(norm, fx.Node) or Trait.OUTPUTS_FIRST not in module.operator.traits:
        return None
    gain = running_gain(norm).detach().double()
    return weight * gain.reshape(-1, *[1] * (weight.dim() - 1)) if weight.dim() and len(gain) == len(weight) else None


@checked(
    model=instance("a traced, prepared or integer model", fx.GraphModule),
    path=FILE,
    prepared=instance("a prepared model", fx.GraphModule).or_none("only `model` is shown"),
    comparison=instance("what fxq.compare returned", Comparison).or_none("the model is compared with the reference"),
    title=TEXT,
    advice=FLAG,
)
@working("writing the report")
def report(
    model: fx.GraphModule, path: str | os.PathLike[str], batches: Any = None, *, reference: Any = None,
    prepared: fx.GraphModule | None = None, comparison: Comparison | None = None, title: str = "fxquant report", advice: bool = True,
    num_batches: int | None = None, options: Options = DEFAULTS, show_progress: bool | None = None,
) -> Path:  # fmt: skip
    """Write a report on a model as one HTML file, which opens without network; return its path.

    It has a summary, the comparison of the forms, advice, the graph with zoom and search, coloured by error, dtype or device,
    a table of layers that sorts and filters, the histogram of each tensor with its quantization range and channels, the channels of each
    weight, the operators in float with reasons, broken limits of the target, and the fusions and rewrites of the passes.

    reference   the form that `model` is compared with on the batches: the float model
    prepared    the prepared model of an integer one: checked for the target's limits, and compared with `model`
    comparison  a result of `compare`; then no batches are needed

    Needs plotly, of the extra "report". Raises ConfigurationError without it, for a reference without batches or batches without
    a form to compare with, and the errors of `compare`.
    """
    if reference is not None and batches is None and comparison is None:
        raise ConfigurationError("a reference needs batches", because="both models are run on them", remedy="pass batches, or leave it out")
    if batches is not None and reference is None and prepared is None:
        because = "no other form of the model is given that it could be compared with"
        remedy = "pass reference=, the float model, or leave batches out"
        raise ConfigurationError("batches mean nothing here", because=because, remedy=remedy)
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        remedy = 'pip install "fxquant[report]"'
        raise ConfigurationError("plotly is needed for this, and is not installed", because=str(error), remedy=remedy) from error
    check_place(path)
    if batches is not None:
        batches = as_batches(batches)
        batches = list(first_batches(batches, num_batches)) if isinstance(batches, Iterator) else batches  # both comparisons take them
    reading: dict[str, Any] = {"num_batches": num_batches, "options": options, "show_progress": show_progress}
    if comparison is None and reference is not None:
        comparison = compare(reference, model, batches, advice=advice, prepared=prepared, **reading)
    forms = {} if comparison is None else {f"{comparison.labels[1]} against {comparison.labels[0]}": comparison}
    if prepared is not None and batches is not None:
        forms["integer against prepared"] = compare(prepared, model, batches, advice=False, states=("validate", None), **reading)
    checked_model = prepared if prepared is not None else model if stage_of(model) == "PREPARED" else None
    results = () if checked_model is None else findings(checked_model, checked_model.meta["target"])
    limits = [each for each in results if each.kind == "limit"]
    text = json.dumps(contents(model, comparison, forms, limits, title), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head, rest = resources.files("fxquant.reporting").joinpath("page.html").read_text(encoding="utf-8").split("__DATA__")
    middle, tail = rest.split("__PLOTLY__")
    return write_file(path, head + text.replace("<", "\\u003c") + middle + get_plotlyjs() + tail)


# ---- Where each operator of the graph is drawn: a row for every step of the longest path, from top to bottom ---------
SWEEPS = 4  # in which the places in a row follow those of the neighbours
SIDE = 0.6  # how far an edge that passes rows bends beside the boxes of these rows


@dataclass(frozen=True)
class Drawing:
    """A graph with the places of its nodes."""

    graph: networkx.DiGraph  # an edge for every value that one operator reads of another; nodes are names
    layers: Mapping[str, Layer]  # the facts of each operator, by name; inputs and the output have none
    places: Mapping[str, tuple[float, float]]  # x and y of each; rows are one apart, and the first is at y = 0, the next at -1

    def path(self, one: str, other: str) -> list[tuple[float, float]]:
        """Return the points of an edge: straight to the next row, or to the right of the boxes of the rows between."""
        (x, y), (to_x, to_y) = self.places[one], self.places[other]
        between = [side for side, row in self.places.values() if to_y < row < y]
        if not between:
            return [(x, y), (to_x, to_y)]
        side = max(*between, x, to_x) + SIDE + 0.1 * min(y - to_y, 10)
        return [(x, y), (side, y - 0.6), (side, to_y + 0.6), (to_x, to_y)]


def drawing(model: fx.GraphModule) -> Drawing:
    """Lay out the operators of a graph at any stage, with inputs and output. Linear in nodes, edges, and rows that edges pass."""
    every = layers(model)
    graph = operator_graph(model, every)
    return Drawing(graph, {layer.name: layer for layer in every}, _places(graph))


def operator_graph(model: fx.GraphModule, every: tuple[Layer, ...]) -> networkx.DiGraph:
    """Return the graph of names of operators, inputs and the output, with an edge for each value that one reads of another."""
    names = {layer.name for layer in every}
    graph = networkx.DiGraph()
    shown: dict[fx.Node, frozenset[str]] = {}  # the operators that a node's value comes from
    for node in model.graph.nodes:
        read = frozenset[str]().union(*(shown.get(operand, frozenset()) for operand in node.all_input_nodes))
        if node.name in names or node.op in ("placeholder", "output"):
            graph.add_node(node.name)
            graph.add_edges_from((name, node.name) for name in sorted(read))
            shown[node] = frozenset([node.name])
        else:
            shown[node] = read
    return graph.copy()  # in which predecessors are in the order they run


def _places(graph: networkx.DiGraph) -> dict[str, tuple[float, float]]:
    for row, names in enumerate(networkx.topological_generations(graph)):
        for name in names:
            graph.nodes[name]["row"] = row
    # An input stands right above the first that reads it.
    for name in [name for name in graph if not graph.in_degree(name) and graph.out_degree(name)]:
        graph.nodes[name]["row"] = min(graph.nodes[reader]["row"] for reader in graph.successors(name)) - 1
    rows: dict[int, list[str]] = {}
    for name, data in graph.nodes(data=True):
        rows.setdefault(data["row"], []).append(name)
    x: dict[str, float] = {}
    for names in rows.values():
        x.update({name: index - (len(names) - 1) / 2 for index, name in enumerate(names)})
    for sweep in range(SWEEPS):
        for row in sorted(rows, reverse=bool(sweep % 2)):
            near = graph.successors if sweep % 2 else graph.predecessors
            names = rows[row]
            places = {name: [x[other] for other in near(name)] or [x[name]] for name in names}
            wish = {name: sum(those) / len(those) for name, those in places.items()}
            names.sort(key=wish.__getitem__)
            middle = sum(wish.values()) / len(wish)
            x.update({name: middle + index - (len(names) - 1) / 2 for index, name in enumerate(names)})
    return {name: (x[name], -float(graph.nodes[name]["row"])) for name in graph}
