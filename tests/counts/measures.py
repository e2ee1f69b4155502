"""Counts of a network on a target: kernels, fusions, nodes of files, operators beside the chip."""

import copy
import functools
import platform
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import onnx
import onnxruntime
import torch
from torch import Tensor, fx

import fxquant as fxq
from fxquant import backends
from fxquant.analysis.explain import operator_runs
from fxquant.analysis.layers import HOST
from fxquant.analysis.recording import runner_of
from fxquant.backends.cpu import native
from fxquant.backends.cpu.training import SMALLEST
from fxquant.backends.horizon.export import FORMATS, refusals
from fxquant.backends.onnx.horizon import float_nodes
from fxquant.kernels.admission import is_primitive
from fxquant.lowering.eager import FusedLowering
from fxquant.ops import operator_of
from fxquant.ops.core import weighted
from fxquant.ops.core.weighted import multiplied_weight
from fxquant.primitives import PRIMITIVES
from fxquant.quantization.weights import WeightQuantizer
from fxquant.training import fused_elementwise, fused_layers
from tests.counts.networks import built
from tests.shared.contract import flat

TARGETS = ("bayes-e", "bernoulli2", "nash-e", "x86")


class Count(NamedTuple):
    """A count.

    number  how many there are
    of      how many there could be; None where no number limits it
    parts   the numbers of those that are missing from `of`, or of those that there are, by kind of node or by node
    nodes   the names of these nodes, by kind
    why     reasons, by the names of nodes
    """

    number: int
    of: int | None = None
    parts: Mapping[str, int] = {}
    nodes: Mapping[str, Sequence[str]] = {}
    why: Mapping[str, str] = {}


def counted(of: int | None, kinds: Iterable[tuple[str, str]], why: Mapping[str, str] | None = None) -> Count:
    """Return a `Count` of the nodes in `kinds` (kind, name): their number, or, with `of`, the number of the other nodes of `of`."""
    nodes: dict[str, list[str]] = {}
    for kind, name in kinds:
        nodes.setdefault(kind, []).append(name)
    parts = {kind: len(names) for kind, names in nodes.items()}
    total = sum(parts.values())
    return Count(total if of is None else of - total, of, parts, nodes, why or {})


class Compiled(NamedTuple):
    """A network on a target; `fused` are the counts of its passes."""

    batch: Tensor
    fused: Mapping[str, Count]
    prepared: fx.GraphModule
    integer: fx.GraphModule


@functools.cache
def compiled(network: str, target: str) -> Compiled:
    """Return a network, calibrated on its batch and converted."""
    model, batch = built(network)
    fused: dict[str, Count] = {}

    def count(gm: fx.GraphModule, _: Any) -> int:
        fused.update(_fused(gm))
        return 0

    prepared = fxq.prepare(model, batch, target, options=fxq.Options(passes={"activation.fuse": count}, without_vnni=False))
    fxq.calibrate(prepared, [batch])
    return Compiled(batch, fused, prepared, fxq.convert(prepared))


# ---- machines ---------------------------------------------------------------------------------------------------------
ANY = ""  # of counts that are the same on every machine
VNNI, AVX_VNNI, AVX2 = "AVX-512 VNNI", "AVX-VNNI", "AVX2"
NO_COMPILER = "no C compiler"


def instructions() -> str:
    """Return the instructions for sums of products of bytes, on which the forms of onnxruntime depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    named = {"avx512_vnni": VNNI, "avx_vnni": AVX_VNNI, "avx2": AVX2}
    return next((name for flag, name in named.items() if flag in flags), f"{platform.machine()} of {platform.system()}")


def compiler() -> str:
    """Return whether there are kernels in C: the same on all instructions."""
    return NO_COMPILER if isinstance(native.library(), str) else "C"


def exporter() -> str:
    """Return the version of PyTorch, whose exporter writes float functions."""
    return f"PyTorch {_version(torch)}"


def runtime() -> str:
    """Return the instructions, and the versions of onnxruntime and of the exporter."""
    return f"{instructions()}, onnxruntime {_version(onnxruntime)}, {exporter()}"


def _version(package: Any) -> str:
    return ".".join(package.__version__.split(".")[:2])


# ---- passes -----------------------------------------------------------------------------------------------------------
FUSIONS = (
    ("fused batch norms", "batch_norm", "batch_norm"),
    ("fused additions", "residual", "add"),
    ("fused activations", "clamp", "clamp"),
)  # what is counted, the argument of the layer that it becomes, the operator that it was


def _fused(gm: fx.GraphModule) -> dict[str, Count]:
    """Count the fused operators of a graph in which all fusions are done; the others are still nodes of their own."""
    operators = {node: operator.name for node in gm.graph.nodes if (operator := operator_of(node)) is not None}
    counts = {}
    for what, argument, name in FUSIONS:
        fused = sum(node.kwargs.get(argument) is not None for node in operators)
        apart = [(name, node.name) for node, operator in operators.items() if operator == name]
        counts[what] = counted(fused + len(apart), apart)
    scaled = [layer.name for node in gm.graph.nodes if node.target is multiplied_weight for layer in node.users]
    return counts | {"fused layer scales": counted(None, (("layer", name) for name in scaled))}


def passes(network: str, target: str) -> dict[str, Count]:
    """Count, by name of the count, fusions done by the passes and nodes inserted by the passes."""
    compiled_model, counts = compiled(network, target), {}
    for what in ("requantize", "quantize", "dequantize"):
        names = [layer.name for layer in fxq.inspect.layers(compiled_model.prepared) if layer.operator == what]
        counts[f"{what} nodes"] = counted(None, ((what, name) for name in names))
    return {**compiled_model.fused, **counts}


# ---- kernels of the integer graph -------------------------------------------------------------------------------------
def integer_kernels(network: str, target: str) -> dict[str, Count]:
    """Count what kernels compute in the integer graph: multiply-accumulates, and primitives."""
    compiled_model = compiled(network, target)
    runner = runner_of(compiled_model.integer)
    assert runner is not None
    runner.reset()
    choices, alone = runner.program(compiled_model.integer, (compiled_model.batch,)).computed()
    runs = operator_runs(compiled_model.integer)
    why = {name: because for run in runs for name, because in (*run.primitives.items(), (run.layer.name, run.because)) if because}
    slow = [*(node for node, choice in choices.items() if choice.implementation is None), *filter(is_primitive, alone)]
    total = sum(run.layer.macs for run in runs)
    parts = {run.layer.name: run.layer.macs - run.macs for run in runs if run.macs < run.layer.macs}
    primitives = sum(map(is_primitive, compiled_model.integer.graph.nodes))
    return {
        "multiply-accumulates in kernels": Count(total - sum(parts.values()), total, parts, {name: [name] for name in parts}, why),
        "primitives in kernels": counted(primitives, ((PRIMITIVES[node.target].name, node.name) for node in slow), why),
    }


# ---- kernels of training ----------------------------------------------------------------------------------------------
class Watch:
    """The requests of a step.

    asked  how many there were, by count
    apart  those that were not fused: the count, the kind of node, and its name
    open   whether the request that is running has been fused; empty between requests
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.apart: list[tuple[str, tuple[str, str]]] = []
        self.open: list[bool] = []

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes that the call that is running is fused."""

        def call(*arguments: Any) -> Any:
            if self.open:
                self.open[-1] = True
            return function(*arguments)

        return call

    def asks(self, what: str, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose outermost calls are counted."""

        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            if self.open:
                return function(first, *arguments, **options)
            self.open.append(False)
            try:
                result = function(first, *arguments, **options)
            finally:
                fused = self.open.pop()
            self.asked[what] += 1
            if not fused:
                self.apart.append((what, (kind, _name(first))))
            return result

        return call


def _name(asks: Any) -> str:
    """Return the node of a lowering, or of a layer's sum; "" for a weight's quantizer, which has none."""
    return str(getattr(getattr(asks, "lowering", asks), "name", ""))


@contextmanager
def watched() -> Iterator[Watch]:
    """Count, inside, calls to the fused kernels of training, and calls that run as separate operators."""
    watch = Watch()
    passes_of = fused_layers._passes

    def counting(*tensors: Any) -> Any:
        result = passes_of(*tensors)
        watch.asked["passes in C"] += 1
        if result is fused_layers._TENSORS:
            size = next(tensor.numel() for tensor in tensors if tensor is not None)
            kind = f"{'at least' if size >= SMALLEST else 'fewer than'} {SMALLEST} elements"
            watch.apart.append(("passes in C", (kind, "")))
        return result

    with ExitStack() as stack:
        for holder, name, replaced in (
            (FusedLowering, "complete", watch.asks("fused results", "layer", FusedLowering.complete)),
            (FusedLowering, "requantize_by", watch.asks("fused results", "elementwise", FusedLowering.requantize_by)),
            (FusedLowering, "look_up", watch.asks("fused results", "table", FusedLowering.look_up)),
            (weighted, "_live", watch.asks("fused statistics", "layer", weighted._live)),
            (WeightQuantizer, "folded", watch.asks("fused weights", "layer", WeightQuantizer.folded)),
            *((module, name, watch.fused(getattr(module, name))) for module, name in FUSED),
            (fused_layers, "_passes", counting),
        ):
            stack.enter_context(mock.patch.object(holder, name, replaced))
        yield watch


FUSED = (
    (fused_layers, "finished"), (fused_elementwise, "joined"), (fused_elementwise, "looked_up"), (fused_layers, "collected"),
    (fused_layers, "whole"),
)  # fmt: skip


def training_kernels(network: str, target: str) -> dict[str, Count]:
    """Count what fused kernels do in a step of training, forward and backward, and in a batch that is validated."""
    compiled_model, counts = compiled(network, target), {}
    for state in (fxq.State.TRAIN, fxq.State.VALIDATE):
        prepared = copy.deepcopy(compiled_model.prepared)
        fxq.set_state(prepared, state)
        prepared.train(state is fxq.State.TRAIN)
        with watched() as watch, torch.set_grad_enabled(state is fxq.State.TRAIN):
            outputs = prepared(compiled_model.batch)
            if state is fxq.State.TRAIN:
                sum(output.square().mean() for output in flat(outputs)).backward()
        for what, asked in watch.asked.items():
            counts[f"{what} in {state.name}"] = counted(asked, (part for which, part in watch.apart if which == what))
    return counts


# ---- ONNX files -------------------------------------------------------------------------------------------------------
def onnx_files(network: str, target: str) -> dict[str, Count]:
    """Count the nodes of the file in style "exact", and what onnxruntime makes of that in style "fast"."""
    integer = compiled(network, target).integer
    with tempfile.TemporaryDirectory() as folder:
        exact = _nodes(onnx.load(fxq.export_onnx(integer, Path(folder) / "exact.onnx", "exact", functions=True)))
        path = fxq.export_onnx(integer, Path(folder) / "fast.onnx", style="fast")
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.log_severity_level = 4
        for name, value in fxq.export.onnx_metadata(path).get("session_options", {}).items():
            options.add_session_config_entry(name, value)
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        fast = _nodes(onnx.load(options.optimized_model_filepath))
    return {
        "nodes of the exact file": counted(None, exact),
        "nodes of the fast file in onnxruntime": counted(None, fast),
        "fused and integer forms of onnxruntime": counted(None, (node for node in fast if FUSED_FORM.fullmatch(node[0]))),
    }


# Its own operators, and those on integers; not a convolution of floats that is only laid out otherwise ("com.microsoft.nchwc.Conv").
FUSED_FORM = re.compile(r"com\.microsoft\.\w+|QLinear\w+|\w+Integer")


def _nodes(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Return the kind of every node, with its domain, and its name; of a function that fxquant wrote, its name as far as any number."""
    kinds = []
    for node in model.graph.node:
        kind = re.split(r"_\d", node.op_type)[0] if node.domain == "fxquant" else node.op_type
        kinds.append((f"{node.domain}.{kind}".lstrip("."), node.name or node.output[0]))
    return kinds


# ---- devices ----------------------------------------------------------------------------------------------------------
def devices(network: str, target: str) -> dict[str, Count]:
    """Count what runs on the target and what beside it; for a board also what the vendor's compiler would compute differently."""
    integer = compiled(network, target).integer
    layers = [layer for layer in fxq.inspect.layers(integer) if not layer.boundary]
    segments = fxq.inspect.segments(integer)
    result = {
        "operators on the target": counted(len(layers), ((layer.operator, layer.name) for layer in layers if layer.device == HOST)),
        "segments": counted(None, ((segment.device, segment.nodes[0]) for segment in segments)),
    }
    if backends.get(target).compiler is None:
        return result
    refused = ((str(error).splitlines()[0], "") for error in refusals(integer))
    return result | {"nodes that the vendor's compiler refuses": counted(None, refused)}


def board_file(network: str, target: str) -> dict[str, Count]:
    """Count the nodes of the file for the vendor's compiler, and the nodes of the file that run on the processor."""
    integer, format = compiled(network, target).integer, FORMATS[str(backends.get(target).compiler)]
    model = format.writer(integer, "float", format.opset).write(None, None)
    nodes, processor = _nodes(model), set(float_nodes(integer, model))
    beside = counted(None, (node for node in nodes if node[1] in processor))
    return {"nodes of the board's file": counted(None, nodes), "its nodes on the processor": beside}


# ---- all of them ------------------------------------------------------------------------------------------------------
class Measure(NamedTuple):
    """A function that counts, and the function that returns on what machine its counts depend."""

    count: Callable[[str, str], dict[str, Count]]
    machine: Callable[[], str]


MEASURES = {
    "passes": Measure(passes, lambda: ANY),
    "integer kernels": Measure(integer_kernels, compiler),
    "training kernels": Measure(training_kernels, compiler),
    "ONNX files": Measure(onnx_files, runtime),
    "devices": Measure(devices, lambda: ANY),
    "board's file": Measure(board_file, exporter),
}
FEWER_ARE_BETTER = frozenset({
    "requantize nodes", "quantize nodes", "dequantize nodes", "nodes of the exact file", "nodes of the fast file in onnxruntime",
    "segments", "nodes of the board's file", "its nodes on the processor", "nodes that the vendor's compiler refuses",
})  # fmt: skip
