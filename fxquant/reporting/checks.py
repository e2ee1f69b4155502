"""Questions about one model, each answered with rows.

They cover operators that were not fused, modules that are called several times, suspicious settings and tensors that share a scale. They
also cover memory, values that are far apart or not finite, where operators run, and how weights differ.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx, nn

from fxquant.accuracy.result import Rows
from fxquant.analysis.layers import GRAPH, QUANTIZED, layers
from fxquant.analysis.recording import Form
from fxquant.errors import Interrupted
from fxquant.frontend import trace
from fxquant.ir.graph import annotation, is_parameter, module_path, stage_of, unfused
from fxquant.ops import BY_NAME, Trait
from fxquant.ops.movement.repeating import cat
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, first_batches, length, no_batches
from fxquant.prepared.stage import quantized_operator
from fxquant.quantization.spec import WeightConfig
from fxquant.reporting.advice import grid_text
from fxquant.reporting.forms import form_of
from fxquant.reporting.page import operator_graph, weights_of
from fxquant.reporting.statistics import Steps, TensorStatistics, sqnr_of
from fxquant.support.arguments import NUMBER, checked, instance, such
from fxquant.support.progress import in_one_piece, progress

PREPARED = such("a prepared model", GRAPH.take, lambda model: stage_of(model) == "PREPARED")
WIDE = 2.0**15  # the largest magnitude over the mean one, beyond which 16 bits hardly hold both
COMMON_RANGES = 32.0  # the largest ratio of the ranges of two terms of a sum


class Unfused(NamedTuple):
    """An operator that could have been fused into its operand, and was not."""

    layer: str
    operator: str
    because: str
    source: str


class Called(NamedTuple):
    """The number of calls of a module; 0 if it is never called."""

    module: str
    kind: str
    times: int
    nodes: tuple[str, ...]


class Setting(NamedTuple):
    """A setting that is legal but probably a mistake, with the reason and the remedy."""

    layer: str
    setting: str
    because: str
    remedy: str


class Weight(NamedTuple):
    """The difference of one layer's weight in two models; `channel` is the channel with the largest relative error."""

    layer: str
    cosine: float
    sqnr: float
    largest: float
    channel: int
    channel_sqnr: float


class Shared(NamedTuple):
    """Tensors on one grid."""

    grid: str
    tensors: tuple[str, ...]


class Memory(NamedTuple):
    """The memory of a layer in bytes: its weight and bias, its result, and all results that are alive after it has run."""

    layer: str
    operator: str
    dtype: str
    weights: int
    activation: int
    alive: int


class Values(NamedTuple):
    """The values of a tensor over all batches: extremes, ratio of the largest to the mean magnitude, and counts of NaN and infinity."""

    tensor: str
    low: float
    high: float
    spread: float
    not_a_number: int
    infinite: int
    remarks: str
    source: str


class Device(NamedTuple):
    """Where an operator runs, and why."""

    layer: str
    operator: str
    device: str
    dtype: str
    because: str


@checked(prepared=PREPARED)
def not_fused(prepared: fx.GraphModule) -> Rows[Unfused]:
    """Return the batch norms, additions, limits (relu, clamp) and zeros of a prepared model that were not fused, each with the reason."""
    nodes = {node.name: node for node in prepared.graph.nodes}
    reasons = [(layer, unfused(nodes[layer.name])) for layer in layers(prepared)]
    missed = [Unfused(layer.name, layer.operator, because, layer.source) for layer, because in reasons if because is not None]
    return Rows("not fused", tuple(missed), "every batch norm, addition and limit after a layer, and every zero before it, is part of it")


@checked(model=instance("an nn.Module", nn.Module))
def call_counts(model: nn.Module, example_inputs: Any) -> Rows[Called]:
    """Trace the model and return how often each module without children is called: 0 unused, above 1 a shared weight."""
    traced = trace(model, example_inputs)
    calls: dict[str, list[str]] = {}
    for node in traced.graph.nodes:
        path = str(node.target) if node.op == "call_module" else module_path(node)
        if node.op not in ("placeholder", "output", "get_attr") and path:
            calls.setdefault(path, []).append(node.name)
    leaves = [(path, module) for path, module in model.named_modules() if path and not list(module.children())]
    return Rows("calls of modules", tuple(Called(p, type(m).__name__, len(calls.get(p, ())), tuple(calls.get(p, ()))) for p, m in leaves))


@checked(prepared=PREPARED)
def suspicious_settings(prepared: fx.GraphModule) -> Rows[Setting]:
    """Return settings of a prepared model that are allowed but probably unintended, and requested settings that have no effect."""
    settings: list[Setting] = []
    nodes = {node.name: node for node in prepared.graph.nodes}
    ends: dict[str, float] = {}  # of the grids
    for layer in layers(prepared):
        if (steps := Steps.of(layer.grid)) is not None:
            ends[layer.name] = max(steps.high, -steps.low) * steps.scale
        node = nodes[layer.name]
        settings += _of_layer(prepared, node, layer.name)
        read = [ends[each.name] for each in node.all_input_nodes if each.name in ends]
        joins = (operator := BY_NAME.get(layer.operator)) is not None and (Trait.ADDS in operator.traits or operator.function is cat)
        if joins and not layer.inner and read and max(read) > COMMON_RANGES * min(read):
            because = f"it concatenates ranges that are {max(read) / min(read):.0f} times apart: of the smaller values hardly a bit is left"
            remedy = "fxq.tuning.equalize, or int16 for this layer and the operand of the larger range"
            settings.append(Setting(layer.name, "ranges", because, remedy))
    settings += [Setting("", "qconfig", sentence, "change the rule, or leave it out") for sentence in prepared.meta.get("not_done", ())]
    return Rows("suspicious settings", tuple(settings))


def _of_layer(prepared: fx.GraphModule, node: fx.Node, name: str) -> list[Setting]:
    module, spec = quantized_operator(prepared, node), annotation(node)
    if module is None or spec is None or spec.config is None:
        return []
    weight: WeightConfig = spec.config.weight
    settings = []
    has_weight = any(is_parameter(each) for each in node.all_input_nodes) and module.factors is not None
    if has_weight and not weight.per_channel:
        settings.append(Setting(name, "weight per tensor", "one scale serves all output channels", "WeightConfig(per_channel=True)"))
    if has_weight and weight.dtype == "int4":
        settings.append(Setting(name, "int4 weight", "16 steps for each channel", "WeightConfig('int8'), or train it"))
    if not module.plain and module.output.observer is None and not module.output.follows_sum and spec.config.output.scale is not None:
        because = f"calibration does not move {float(module.output.scale):.4g}"
        settings.append(Setting(name, "given scale", because, "leave scale= and threshold= out"))
    return settings


@checked(a=QUANTIZED, b=QUANTIZED)
def compare_weights(a: Any, b: Any) -> Rows[Weight]:
    """Compare the layers' weights of two prepared or integer models, worst first; an integer model's weights are dequantized."""
    one, other = weights_of(a), weights_of(b)
    weights = []
    for name, weight in one.items():
        if name not in other or other[name].shape != weight.shape:
            continue
        left, right = weight.flatten(1) if weight.dim() > 1 else weight.unsqueeze(1), other[name].reshape(len(weight), -1)
        error = (left - right).square()
        shares = error.sum(1) / left.square().sum(1).clamp_min(1e-300)
        worst = int(shares.argmax())
        cosine = float(nn.functional.cosine_similarity(left.flatten(), right.flatten(), 0))
        sqnr = sqnr_of(float(left.square().sum()), float(error.sum()))
        weights.append(Weight(name, cosine, sqnr, float(error.max().sqrt()), worst, sqnr_of(1.0, float(shares[worst]))))
    return Rows("weights", tuple(sorted(weights, key=lambda row: row.sqnr)), "no layer with a weight is in both")


@checked(model=QUANTIZED)
def shared_scales(model: fx.GraphModule) -> Rows[Shared]:
    """Return the groups of tensors of a prepared or integer model that are on one grid."""
    groups: dict[Any, list[str]] = {}
    grids: dict[Any, str] = {}
    for layer in layers(model):
        if layer.grid is not None and layer.grid.scale != ():
            node = next(node for node in model.graph.nodes if node.name == layer.name)
            spec = annotation(node)
            key = layer.grid if spec is None or spec.group is None else spec.group
            groups.setdefault(key, []).append(layer.name)
            grids[key] = grid_text(layer.grid)
    return Rows("shared scales", tuple(Shared(grids[key], tuple(names)) for key, names in groups.items() if len(names) > 1))


@checked(model=GRAPH)
def memory(model: fx.GraphModule) -> Rows[Memory]:
    """Return the memory of every operator for one item: weights, result, and all results that are still to be read after it has run."""
    every = layers(model)
    graph = operator_graph(model, every)
    order = {node.name: index for index, node in enumerate(model.graph.nodes)}
    last = {name: max(map(order.__getitem__, graph.successors(name)), default=-1) for name in graph}
    rows, alive = [], dict[str, int]()
    for layer in every:
        alive[layer.name] = layer.activation_bytes
        rows.append(Memory(layer.name, layer.operator, layer.dtype, layer.weight_bytes, layer.activation_bytes, sum(alive.values())))
        alive = {name: size for name, size in alive.items() if last[name] > order[layer.name]}
    return Rows("memory of one item", tuple(rows))


@checked(spread=NUMBER)
def value_ranges(
    model: Any, batches: Any, *, spread: float = WIDE, num_batches: int | None = None, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> Rows[Values]:  # fmt: skip
    """Return ranges of every tensor of a model over all batches, with notes on tensors that are not finite or too wide for 16 bits.

    A tensor has a note if its largest magnitude is at least `spread` times the mean one. A KeyboardInterrupt is raised as `Interrupted`,
    whose `result` holds the rows of the finished batches.
    """
    source = as_batches(batches)
    form: Form | None = None
    statistics: dict[str, TensorStatistics] = {}
    total = length(source, num_batches)
    count = 0
    try:
        for batch in progress(first_batches(source, num_batches), total, "values", show_progress):
            inputs = options.inputs(batch)
            form = form or form_of(model, inputs, None)
            values = form.values(form.inputs(inputs, count), list(form.facts))
            with in_one_piece():
                for name, value in values.items():
                    if value.is_floating_point() and name in form.facts:
                        statistics.setdefault(name, TensorStatistics(None, None)).add(value, value)
            count += 1
    except KeyboardInterrupt:
        raise Interrupted(f"value_ranges was interrupted after {count} batches", _ranges(form, statistics, spread)) from None
    if form is None:
        raise no_batches(num_batches)
    return _ranges(form, statistics, spread)


def _ranges(form: Form | None, by_name: Mapping[str, TensorStatistics], spread: float) -> Rows[Values]:
    lines = {} if form is None else {name: form.facts[name].source for name in by_name}
    return Rows("values", tuple(_values(name, lines[name], statistics, spread) for name, statistics in by_name.items()))


def _values(name: str, where: str, data: TensorStatistics, wide: float) -> Values:
    count = max(data.elements - data.not_a_number - data.infinite, 1)
    mean = math.sqrt(data.signal / count)
    largest = max(abs(data.low), abs(data.high)) if data.low <= data.high else 0.0
    spread = largest / mean if mean else 0.0
    remarks = [text for text, holds in (("NaN", data.not_a_number), ("infinite", data.infinite), ("wide range", spread > wide)) if holds]
    low, high = (data.low, data.high) if data.low <= data.high else (math.nan, math.nan)
    return Values(name, low, high, spread, data.not_a_number, data.infinite, ", ".join(remarks), where)


@checked(model=GRAPH)
def devices(model: fx.GraphModule) -> Rows[Device]:
    """Return where every operator of a graph runs: the target, or the host, and why."""
    return Rows("devices", tuple(Device(each.name, each.operator, each.device, each.dtype, each.reason) for each in layers(model)))
