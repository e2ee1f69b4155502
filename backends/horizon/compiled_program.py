"""The BPU programs inside a .bin file: their inputs and outputs, their results in the simulator, and their cost."""

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from fxquant.analysis.recording import ACCUMULATORS, QUANTIZED, Form, GraphForm, Values, Wanted, returned
from fxquant.backends.horizon.export import LAYERS, nv12_of
from fxquant.backends.horizon.tool import Tool, failure
from fxquant.backends.onnx.horizon import Connections, Place, horizon_values
from fxquant.errors import CompilationError, ExportError
from fxquant.ir.graph import BatchDim, TensorFact, fact
from fxquant.ir.integer import qparams
from fxquant.support import logger

TYPES = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "float32": np.float32}
MEMORY = 1024  # MB that the simulator reserves


class Feature(NamedTuple):
    """An input or output of a program: its name in the quantized model, its dimensions in the order of its elements, its type.

    `pyramid` says that it is an image, which the program takes as NV12 from the camera's pyramid.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pyramid: bool = False


class Program(NamedTuple):
    """One BPU program of a file; a file has several if operators on the processor separate them."""

    name: str
    march: str
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]


class LayerCost(NamedTuple):
    """The figures of one layer of a program, with the column names of the vendor's tool."""

    layer: str
    operations: str
    computing: str
    loading_and_storing: str
    active: str


@dataclass(frozen=True)
class CompiledCost:
    """The vendor's estimate for one BPU program, without the processor's part.

    name               of the program
    microseconds       latency of one run
    frames_per_second  of the program alone
    bytes              moved to and from memory in a run
    operations         twice the multiply-accumulates of a run, as the tool counts them
    layers             its table of layers
    """

    name: str
    microseconds: float
    frames_per_second: float
    bytes: int
    operations: int
    layers: tuple[LayerCost, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.microseconds:.4g} µs, {self.frames_per_second:.4g} runs a second, {self.bytes:,} bytes moved"


# Run by the environment's own Python: it returns every requested tensor, as the tool's runtime of ONNX files computes it.
INNER = """
import logging, sys
import numpy, onnx
from horizon_tc_ui import HB_ONNXRuntime
logging.disable(logging.CRITICAL)
model = onnx.load(sys.argv[1])
names = open("names").read().split("\\n")
present = {each.name for each in model.graph.output}
model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
onnx.save(model, "inner.onnx")
given = numpy.load("given.npz")
inputs = {each.name: given["arr_%d" % index] for index, each in enumerate(model.graph.input)}
results = HB_ONNXRuntime(model_file="inner.onnx").run(names, inputs)
numpy.savez("found.npz", *results)
"""


def inner_values(tool: Tool, quantized: Path, inputs: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return inner tensors of a quantized model by name, computed by the tool's own runtime from its inputs. Raises CompilationError."""
    with tempfile.TemporaryDirectory(prefix="fxquant-") as folder:
        work = Path(folder)
        (work / "names").write_text("\n".join(names), encoding="utf-8")
        np.savez(work / "given.npz", *(value.numpy() for value in inputs))
        running = tool.run("python", "-c", INNER, str(quantized.absolute()), cwd=work)
        if running.code or not (work / "found.npz").exists():
            raise failure("HB_ONNXRuntime", running.code, running.lines)
        with np.load(work / "found.npz") as arrays:
            return {name: torch.from_numpy(arrays[f"arr_{index}"]) for index, name in enumerate(names)}


class Binary:
    """A .bin or .hbm file, opened with the vendor's tool. Raises ConfigurationError without the tool, CompilationError for a bad file."""

    def __init__(self, path: Path) -> None:
        self.path, self.tool = path.absolute(), Tool.find("hbdk-sim")
        if not self.path.is_file():
            remedy = "pass what fxq.board.compile_horizon returns"
            raise CompilationError(f"{path} is missing", because="the file does not exist", remedy=remedy)
        self._folder = tempfile.TemporaryDirectory(prefix="fxquant-")
        work = Path(self._folder.name)
        # The .hbm is named after the model, not after the file.
        self.hbm = self.path if path.suffix == ".hbm" else self._run("hb_extract_hbm", str(self.path), cwd=work, makes="*.hbm")
        described = self._run("hbdk-disas", str(self.hbm), "--json", "-o", "programs.json", cwd=work, makes="programs.json")
        self.programs = [_program(entry) for entry in json.loads(described.read_text(encoding="utf-8"))]

    def _run(self, program: str, *arguments: str, cwd: Path, makes: str) -> Path:
        """Run a program of the tool in `cwd`, and return the file of this pattern that it creates."""
        running = self.tool.run(program, *arguments, cwd=cwd)
        created = next(cwd.glob(makes), None)
        if running.code or created is None:
            raise failure(program, running.code, running.lines)
        return created

    def simulate(self, program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return each output, integers as int64 or float32, for integer inputs in the program's shapes and order."""
        with tempfile.TemporaryDirectory(prefix="fxquant-") as folder:
            work, out = Path(folder), Path(folder, "out")
            out.mkdir()
            files = [_written(work, index, *each) for index, each in enumerate(zip(inputs, program.inputs, strict=True))]
            sizes = ["x".join(map(str, feature.shape[1:3])) if feature.pyramid else "" for feature in program.inputs]
            images = ["--yuv-size", ",".join(sizes)] if any(sizes) else []
            options = ["-i", ",".join(files), *images, "-o", "out", "--memory", str(MEMORY)]
            running = self.tool.run("hbdk-sim", "-f", str(self.hbm), "-n", program.name, *options, cwd=work)
            results = [_read(out, index, feature) for index, feature in enumerate(program.outputs)]
            if running.code or any(result is None for result in results):
                raise failure("hbdk-sim", running.code, running.lines)
            return [result for result in results if result is not None]

    def costs(self) -> list[CompiledCost]:
        """Return the tool's estimate for each program: the figures that hb_perf shows."""
        with tempfile.TemporaryDirectory(prefix="fxquant-") as folder:
            work = Path(folder)
            self._run("hbdk-perf", str(self.hbm), "-o", folder, cwd=work, makes="*.json")
            return [_cost(json.loads((work / f"{program.name}.json").read_text(encoding="utf-8"))["summary"]) for program in self.programs]


def _program(entry: dict[str, Any]) -> Program:
    sides = [
        tuple(
            Feature(each["feature name"], tuple(each["valid dim"]), each["element type name"], each.get("input source") == "pyramid")
            for each in entry[f"{side} features"]
        )
        for side in ("input", "output")
    ]
    return Program(entry["model name"], entry["march"], *sides)


def _written(work: Path, index: int, value: Tensor, feature: Feature) -> str:
    """Write an input in the simulator's format, and return the file's name."""
    value = value.reshape(feature.shape)
    name = f"{index}.{'yuv' if feature.pyramid else 'bin'}"
    stored = nv12_of(value).numpy() if feature.pyramid else value.contiguous().numpy().astype(TYPES[feature.dtype])
    stored.tofile(work / name)
    return name


def _read(folder: Path, index: int, feature: Feature) -> Tensor | None:
    """Return an output that the simulator wrote as text, its elements in the order of its dimensions; None if there is none."""
    kind, dtype = ("float", np.float32) if feature.dtype == "float32" else ("int", np.int64)
    path = next(folder.glob(f"hbdk_output{index}_*elem_{kind}.txt"), None)
    if path is None:
        return None
    words = [word for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#") for word in line.split()]
    return torch.from_numpy(np.array(words, dtype)).reshape(feature.shape) if len(words) == math.prod(feature.shape) else None


def _cost(summary: dict[str, Any]) -> CompiledCost:
    _, *rows = summary["layer details"]
    layers = tuple(LayerCost(row[0], row[1], row[4], row[5], row[6]) for row in rows)
    figures = float(summary["latency (us)"]), float(summary["FPS"]), int(summary["DDR bytes per run"])
    operations = int(summary.get("BPU OPs per run (effective)", 0))  # absent of a program without multiplications
    return CompiledCost(summary["model name"], *figures, operations, layers)


# ---- A compiled program in the vendor's simulator, as a form of a model that `verify` and `record` run ---------------
QUANTIZED_MODEL = "_quantized_model.onnx"
CHANNELS_LAST = ("bernoulli2",)  # marches whose programs take and return every image channels last


class SimulatedForm(Form):
    """The BPU programs of a file. Each is given the integers of the integer graph at its inputs, as many rows at a time as it takes."""

    def __init__(self, path: Path, integer: fx.GraphModule) -> None:
        self.binary, self.reference = Binary(path), GraphForm(integer)
        self.march = integer.meta["target"].march
        self.quantized = path.parent / f"{path.stem}{QUANTIZED_MODEL}"
        about = path.parent.parent / LAYERS
        described = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
        outputs, self.samples = described.get("outputs", {}), described.get("input_batch", 1)  # that one run takes
        turned = [name for name, each in outputs.items() if each["layout"] is not None]
        values, self.sequences = horizon_values(integer)
        values |= {name: values[node.name] for name, node in zip(outputs, returned(integer), strict=False) if node.name in values}
        self.connections = Connections(self.quantized, values, turned)
        self.unseen: dict[str, str] = {}  # tensors at the ends of programs that cannot be compared: name and reason
        ends = [feature for program in self.binary.programs for feature in program.outputs]
        self.places = {feature: place for feature in ends if (place := self._output(feature)) is not None}
        # Quantized tensors that programs are given but do not compute: the processor does, or the quantization of an input.
        self.given = {feature: self._input(feature) for program in self.binary.programs for feature in program.inputs}
        _require(bool(self.places), path, f"none of its outputs is a tensor of this model: {self.unseen}")
        order = list(self.reference.tensors)
        self.tensors = {name: QUANTIZED for name in sorted({place.node for place in self.places.values()}, key=order.index)}
        self.label = f"hbdk-sim for {self.march}"
        for index, node in enumerate(returned(integer)):
            if not {node.name, *(operand.name for operand in node.all_input_nodes)} & self.tensors.keys():
                self.unseen[f"output {index}"] = f"the processor computes %{node.name}"

    # ---- mapping of tensors ---------------------------------------------------------------------------------------------

    def _output(self, feature: Feature) -> Place | None:
        place = self.connections.place(feature.name) or self._sum(feature)
        because = "it is a value inside of an operator, the rest of which the processor computes"
        if place is not None and place.node in self.reference.nodes:
            described = qparams(self.reference.nodes[place.node])
            if described is not None and described.dtype.replace("int4", "int8") == feature.dtype:
                return place
            because = f"it is {feature.dtype}, and %{place.node} is {'not quantized' if described is None else described.dtype}"
        self.unseen[feature.name] = because
        return None

    def _sum(self, feature: Feature) -> Place | None:
        """Return the place of an int32 sum that the model returns: it has no pair in the file, so it is found by the output's name."""
        output = self.connections.output(feature.name) if feature.dtype == "int32" else None
        if output is None:
            return None
        index, turned = output
        ends = returned(self.reference.model)
        computed = ends[index].all_input_nodes if index < len(ends) else []
        return Place(computed[0].name, turned) if computed else None

    def _input(self, feature: Feature) -> Place:
        place = self.connections.place(feature.name)
        because = f"its input {feature.name} is not a quantized tensor of this model"
        _require(place is not None and place.node in self.reference.tensors, self.binary.path, because)
        assert place is not None
        return place

    @property
    def fed(self) -> list[str]:
        """Return the names of the tensors that are inputs of programs, and that no program computes."""
        return sorted({place.node for place in self.given.values()} - self.tensors.keys())

    # ---- running --------------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any, index: int) -> list[Any]:
        """Return the model's inputs from a batch. Raises CalibrationError if it does not fit."""
        return self.reference.inputs(batch, index)

    def run(self, inputs: Sequence[Any], selection: Wanted) -> Values:
        """Return the int64 integers that the programs compute for a batch; dequantized tensors are not returned."""
        names = set(selection.among(self.tensors))
        rows = [self._row(row, names) for row in self._rows(inputs)]
        if ACCUMULATORS in selection.kinds:  # in depth: also the tensors between the ends of the programs
            rows = [self._inner(values) | row for values, row in zip(self._rows(inputs), rows, strict=True)]
        values = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return values if self.samples == 1 else {name: value[: len(inputs[0])] for name, value in values.items()}

    def _inner(self, inputs: Sequence[Any]) -> Values:
        """Return the tensors between the ends of the programs, as the tool's runtime of the quantized model computes them."""
        places = {name: place for name in self.connections.inner if (place := self.connections.place(name)) is not None}
        nodes = frozenset(place.node for place in places.values()) & self.reference.tensors.keys()
        graph = self.reference.run(inputs, Wanted(frozenset(), nodes))
        try:
            values = inner_values(self.binary.tool, self.quantized, inputs, list(places))
        except CompilationError as error:
            logger.warning("the tensors between the ends of the programs cannot be compared: %s", error.because)
            return {}
        integers = Values()
        for name, place in places.items():
            if (expected := graph.get(place.node)) is not None and expected.numel() == values[name].numel():
                like = values[name].shape[: expected.dim()] == expected.shape
                turned = self._spatial(expected.dim(), place) and (place.channels_last or not like)
                integers[place.node] = _in_order(values[name].to(torch.int64), expected, turned)
        return integers

    def _rows(self, inputs: Sequence[Any]) -> Iterable[list[Any]]:
        """Yield the inputs of each run for a batch, the last item again where a run takes more; the batch if its size is fixed."""
        shapes = [fact(node) for node in self.reference.model.graph.find_nodes(op="placeholder")]
        batched = [isinstance(each, TensorFact) and bool(each.shape) and isinstance(each.shape[0], BatchDim) for each in shapes]
        if not any(batched):
            return [list(inputs)]
        count = next(len(value) for value, rows in zip(inputs, batched, strict=True) if rows)
        runs = torch.arange(-(-count // self.samples) * self.samples).clamp(max=count - 1).reshape(-1, self.samples)
        return ([value[items] if rows else value for value, rows in zip(inputs, batched, strict=True)] for items in runs)

    def _row(self, inputs: Sequence[Any], names: set[str]) -> Values:
        places = {place.node for place in (*self.given.values(), *self.places.values())}
        graph = self.reference.run(inputs, Wanted(frozenset(), frozenset(places)))
        integers = Values()
        for program in self.binary.programs:
            if not names & {self.places[feature].node for feature in program.outputs if feature in self.places}:
                continue
            feeds = [self._arranged(graph[self.given[feature].node], self.given[feature], feature) for feature in program.inputs]
            for feature, value in zip(program.outputs, self.binary.simulate(program, feeds), strict=True):
                if feature in self.places:
                    place = self.places[feature]
                    expected = graph[place.node]
                    integers[place.node] = _in_order(value, expected, self._last(expected.dim(), place))
        return integers

    def _last(self, rank: int, place: Place) -> bool:
        return self._spatial(rank, place) and (place.channels_last or self.march in CHANNELS_LAST)

    def _spatial(self, rank: int, place: Place) -> bool:
        """Return whether the second dimension of a node's tensor is the channels of an image in the program."""
        return rank == 4 or place.node in self.sequences

    def _arranged(self, value: Tensor, place: Place, feature: Feature) -> Tensor:
        """Return a tensor of the graph in the program's order of dimensions; an image from a camera is channels last."""
        sizes = f"its input {feature.name} has the sizes {list(feature.shape)}, and a row of the model's {list(value.shape)}"
        _require(value.numel() == math.prod(feature.shape), self.binary.path, f"{sizes}: is input_batch in its configuration?")
        turned = self._last(value.dim(), place) or feature.pyramid or (value.dim() == 4 and feature.shape != tuple(value.shape))
        return (value.movedim(1, -1) if turned else value).reshape(feature.shape)


def _in_order(value: Tensor, like: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return value.reshape(like.shape)
    rows, channels, *area = like.shape
    return value.reshape(rows, *area, channels).movedim(-1, 1)


def _require(holds: bool, path: Path, because: str) -> None:
    """Raise ExportError if a file is not the program of a model."""
    if not holds:
        remedy = "pass the .bin that fxq.board.compile_horizon made of this model's folder"
        raise ExportError(f"{path} is the program of another model", because=because, remedy=remedy)
