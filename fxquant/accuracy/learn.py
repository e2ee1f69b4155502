"""Tune units one after the other, with a checkpoint after each: `adaround` layer by layer, `reconstruct` block by block."""

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from operator import attrgetter
from typing import Any

import networkx
from torch import fx

from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import tuning
from fxquant.accuracy.measure import FloatOutputs, Noise, is_lost, judged
from fxquant.accuracy.result import TunedLayer, TuningResult
from fxquant.accuracy.student import Settings, Student, put_unit
from fxquant.accuracy.walk import Lesson, Unit, Walk, layer_units, shared_weights, taken, weighted_nodes
from fxquant.ir.graph import is_parameter
from fxquant.numerics.rounding import AdaptiveRounding, Nearest
from fxquant.options import DEFAULTS, Options
from fxquant.support.arguments import POSITIVE, checked
from fxquant.support.progress import progress

ROUNDED = 0.5  # the probability that `reconstruct` rounds an element of an activation while a block learns


def learn(
    method: str, settings: Settings, units_of: Callable[[fx.GraphModule], list[Unit]], prepared: fx.GraphModule, batches: Any,
    num_batches: int | None, options: Options, show_progress: bool | None,
) -> TuningResult:  # fmt: skip
    """Train units one after the other; keep a unit's parameters if its error falls and the error of the outputs does not clearly rise.

    Everything is undone if the outputs of the model have no clear gain in the end.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, options, show_progress)
        call = call_of(prepared, samples, method=method, steps=settings.steps, seed=options.seed, batch_size=options.batch_size)
        checkpoint = Checkpoint(options.checkpoint, call)
        skipped = left_out(prepared)
        tried = [
            Unit(unit.nodes, free)
            for unit in units_of(prepared)
            if (free := tuple(node for node in unit.weighted if node.name not in skipped))
        ]
        outputs, everything = (
            FloatOutputs(prepared, chunks) for chunks in ([samples.chunks[index] for index in samples.judging], samples.chunks)
        )
        start, noise = everything.measure(), outputs.measure()
        exact, real = Walk(prepared, samples.chunks, exact=True), Walk(prepared, samples.chunks, exact=False)

        def run() -> Iterator[None]:
            nonlocal noise
            for unit in tried:
                if unit.name not in checkpoint.document:
                    # The seed follows from the name, so that random numbers do not depend on the units before.
                    seed = int.from_bytes(hashlib.sha256(f"{options.seed} {unit.name}".encode()).digest()[:7], "big")
                    noise = yield from _taught(Lesson(unit, samples, exact, real), settings, seed, checkpoint, outputs, noise)
                    continue
                row = TunedLayer.of(checkpoint.document[unit.name])
                if row.kept:
                    put_unit(prepared, unit, checkpoint.learned(row))
                    noise = max(noise, outputs.measure(), key=attrgetter("level"))
                for _ in range(settings.steps):
                    yield

        for _ in progress(run(), len(tried) * settings.steps, method, show_progress):
            pass
        # Units were chosen by the held-out samples, so that these alone would be too kind to the sum of all choices.
        rows = [TunedLayer.of(checkpoint.document[unit.name]) for unit in tried]
        judgements = judged(everything, start, rows, tuned.undo, ("weights", f"learned by {method}"))
        return TuningResult(method, judgements, tuple(skipped.items()))


def _taught(
    lesson: Lesson, settings: Settings, seed: int, checkpoint: Checkpoint, outputs: FloatOutputs, noise: Noise
) -> Generator[None, None, Noise]:
    """Train one unit; keep its parameters if its error falls and the outputs are not clearly noisier; return the outputs' least noise."""
    before, student = lesson.error(), Student(lesson, settings, seed)
    yield from student.study()
    learned, after = student.settled(lesson.error)
    learned_noise = outputs.measure()
    improved = after < before and not is_lost(learned_noise, noise)
    if not improved:
        student.undo()
    row = TunedLayer(lesson.unit.name, tuple(node.name for node in lesson.unit.weighted), before, after, improved, lesson.signal())
    checkpoint.document[row.name] = checkpoint.row(row, learned if improved else {})
    checkpoint.write()
    return max(noise, learned_noise, key=attrgetter("level")) if improved else noise


def left_out(prepared: fx.GraphModule) -> dict[str, str]:
    """Return the names of the nodes whose rounding must not be tuned, each with the reason."""
    shared = shared_weights(prepared)
    reasons = {}
    for node, operator in weighted_nodes(prepared).items():
        rounding = operator.weight_quantizer.rounding
        if type(rounding) not in (Nearest, AdaptiveRounding):
            reasons[node.name] = f"it has a different rounding, {type(rounding).__name__}"
        elif node in shared:
            reasons[node.name] = "other operators read its weight, too, and would round it otherwise"
    return reasons


@checked(steps=POSITIVE)
def adaround(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, steps: int = 1000, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> TuningResult:  # fmt: skip
    """Learn whether each weight is rounded up or down, so that layers return their float results; the model is left in VALIDATE.

    Nagel et al. 2020, layer by layer in the order they run: a layer reads quantized operands and learns, in `steps` steps, its float
    result, compared after its fused clamp and after an activation function that is its only reader. `batches` are as in `calibrate`. A
    quarter of the samples, also of a single batch, is held out: a layer is undone if its mean squared error there does not fall, or if the
    outputs of the model lose more than 0.2 dB, and all layers are undone unless the outputs gain 0.2 dB. Layers whose rounding the user
    set are left out. The decisions are an `AdaptiveRounding` in place of `Nearest`, in the file of `save` and in `state_dict`.

    With a checkpoint the same call continues after the last finished layer. Memory holds the inputs and, for every tensor between layers
    that is still to be read, its float and its integer value.

    Raises NotCalibrated before calibration, CalibrationError for batches that do not fit, and ConfigurationError for the checkpoint of
    another call; on any error the model is unchanged.
    """
    return learn("adaround", Settings(steps), layer_units, prepared, batches, num_batches, options, show_progress)


@checked(steps=POSITIVE)
def reconstruct(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, steps: int = 2000, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> TuningResult:  # fmt: skip
    """Learn the roundings of weights and the scales of activations of each block, so that it returns its float result.

    BRECQ (Li et al. 2021) with QDrop (Wei et al. 2022): a block is a residual block, or a few layers in a row. While it learns, each
    element of an activation is rounded with probability one half. Scales that are constant, frozen, powers of two, or shared with an
    operator outside of the block stay. On held-out samples it is decided whether a block keeps its roundings, its scales, or both, and
    whether the model keeps anything. Memory, errors and everything else are as in `adaround`.
    """
    settings = Settings(steps, rounded=ROUNDED, scales=True)
    return learn("reconstruct", settings, block_units, prepared, batches, num_batches, options, show_progress)


# ---- Blocks of a graph: stretches with one entry and one exit, between which nothing passes them by ------------------
#
# Li, Gong, Tan, Yang, Hu, Zhang, Yu, Wang, Gu: BRECQ, ICLR 2021, section 3.2, has residual blocks. Here a block is what lies between two
# nodes that every path through the graph passes; where these follow each other directly, up to `LAYERS_IN_A_ROW` layers; and where more
# than `LAYERS_TOGETHER` lie between two, as inside of a skip connection around a whole network, the blocks of what lies there.
LAYERS_IN_A_ROW = 3
LAYERS_TOGETHER = 6


def block_units(prepared: fx.GraphModule) -> list[Unit]:
    """Partition the nodes with weights into units, residual blocks or single layers, in topological order."""
    order = {node: index for index, node in enumerate(prepared.graph.nodes)}
    layers = {unit.weighted[0]: unit for unit in layer_units(prepared)}
    flow = networkx.DiGraph()
    for node in prepared.graph.nodes:
        if node.op not in ("placeholder", "output") and not is_parameter(node):
            flow.add_node(node)
            flow.add_edges_from((operand, node) for operand in node.all_input_nodes if operand in flow)
    units = []
    for block in _blocks(flow, set(layers)):
        weighted = tuple(sorted((node for node in block if node in layers), key=order.__getitem__))
        nodes = tuple(sorted(block, key=order.__getitem__))
        if weighted:
            units.append(layers[weighted[0]] if block == {weighted[0]} else Unit(nodes, weighted))
    return sorted(units, key=lambda unit: order[unit.nodes[-1]])


def _blocks(flow: networkx.DiGraph, layers: set[fx.Node]) -> Iterator[set[fx.Node]]:
    """Yield the blocks of a part of the graph."""
    for part in networkx.weakly_connected_components(flow):
        yield from _of_connected(flow.subgraph(part), layers)


def _of_connected(flow: networkx.DiGraph, layers: set[fx.Node]) -> Iterator[set[fx.Node]]:
    whole = networkx.DiGraph(flow)
    whole.add_edges_from(("in", node) for node, degree in flow.in_degree() if not degree)
    whole.add_edges_from((node, "out") for node, degree in flow.out_degree() if not degree)
    above = networkx.immediate_dominators(whole, "in")
    chain: list[object] = ["out"]  # the nodes that every path from in to out passes, these two included
    while chain[0] != "in":
        chain.insert(0, above[chain[0]])
    row: list[set[fx.Node]] = []
    for entry, exit in itertools.pairwise(chain):
        between = (networkx.descendants(whole, entry) & networkx.ancestors(whole, exit)) - {"in", "out"}
        region = between | ({exit} - {"out"})
        if not between:
            row.append(region)
            continue
        yield from _rows(row, layers)
        row = []
        if len(region & layers) <= LAYERS_TOGETHER:
            yield region
        elif len(chain) == 2:  # no node that all paths pass
            yield from ({node} for node in region)
        else:
            yield from _blocks(flow.subgraph(between), layers)
            yield region - between
    yield from _rows(row, layers)


def _rows(row: Sequence[set[fx.Node]], layers: set[fx.Node]) -> Iterator[set[fx.Node]]:
    """Split a row of consecutive regions into stretches with about equal numbers of layers; yield the nodes of each."""
    count = max(sum(len(region & layers) for region in row), 1)
    pieces = -(-count // LAYERS_IN_A_ROW)
    stretch: set[fx.Node] = set()
    total = 0
    for region in row:
        if region & layers and total and total * pieces // count != (total - 1) * pieces // count:
            yield stretch
            stretch = set()
        total += len(region & layers)
        stretch = stretch | region
    if stretch:
        yield stretch
