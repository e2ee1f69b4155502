"""The BPU programs inside a .bin file: their inputs and outputs, their results in the simulator, and their cost."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fxquant.backends.horizon.export import nv12_of
from fxquant.backends.horizon.tool import Tool, failure
from fxquant.errors import CompilationError

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
            raise CompilationError(
                f"{path} is missing", because="the file does not exist", remedy="pass what fxq.board.compile_horizon returns"
            )
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
    if len(words) != math.prod(feature.shape):
        return None
    return torch.from_numpy(np.array(words, dtype)).reshape(feature.shape)


def _cost(summary: dict[str, Any]) -> CompiledCost:
    _, *rows = summary["layer details"]
    layers = tuple(LayerCost(row[0], row[1], row[4], row[5], row[6]) for row in rows)
    return CompiledCost(
        summary["model name"],
        float(summary["latency (us)"]),
        float(summary["FPS"]),
        int(summary["DDR bytes per run"]),
        int(summary.get("BPU OPs per run (effective)", 0)),  # absent of a program without multiplications
        layers,
    )
