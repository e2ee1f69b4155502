"""The vendor's compiler, its runtime and its simulator, as programs that are run: nothing of them is imported or copied.

`FXQUANT_HORIZON` names the folder of the environment that holds them, or they are in the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[np.generic]
MISSING = """the vendor's compiler is not here: install it into a virtual environment of Python 3.10,
    python3.10 -m venv FOLDER && FOLDER/bin/pip install rdkx5-yolo-mapper==1.0.0
and name it with FXQUANT_HORIZON=FOLDER, or put FOLDER/bin into the PATH"""
CONFIGURATION = """model_parameters:
  onnx_model: '{model}'
  march: '{march}'
  output_model_file_prefix: 'model'
  working_dir: '{work}'
  log_level: 'info'
input_parameters:
  input_name: '{names}'
  input_shape: '{shapes}'
  input_type_rt: '{types}'
  input_layout_rt: '{layouts}'
  input_type_train: '{types}'
  input_layout_train: '{layouts}'
  norm_type: '{norms}'
calibration_parameters:
  calibration_type: 'load'
compiler_parameters:
  compile_mode: 'latency'
  optimize_level: '{level}'
  debug: True
  core_num: 1
"""
RUNTIME = """
import logging, sys
import numpy as np
from horizon_tc_ui import HB_ONNXRuntime
logging.disable(logging.CRITICAL)
model, given, found = sys.argv[1:]
session = HB_ONNXRuntime(model_file=model)
results = {}
with np.load(given) as arrays:
    for i in range(int(arrays["count"])):
        inputs = {k.split("/", 1)[1]: arrays[k] for k in arrays.files if k.startswith(f"{i}/")}
        for j, value in enumerate(session.run(session.output_names, inputs)):
            results[f"{i}/{j}"] = value
np.savez(found, **results)
"""
TYPES = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "float32": np.float32}


class ToolError(Exception):
    """A program of the vendor's failed; holds the end of what it said."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler makes of an ONNX file: the quantized model, the programs of the BPU, and where each node runs."""

    quantized: Path
    programs: tuple[Path, ...]
    runs_on: Mapping[str, str]  # by node: "BPU" or "CPU"


def folder() -> Path:
    """The folder of the programs. Raises ToolError where there are none."""
    named = os.environ.get("FXQUANT_HORIZON")
    found = shutil.which("hb_mapper", path=None if named is None else str(Path(named) / "bin"))
    if found is None:
        raise ToolError(MISSING)
    return Path(found).parent


def run(command: Sequence[str], cwd: str | Path, timeout: float = 600) -> str:
    """What a program says. Raises ToolError where it fails."""
    path = folder()
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "2"}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    done = subprocess.run([str(path / command[0]), *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise ToolError(f"{command[0]} returned {done.returncode}: …{(done.stdout + done.stderr)[-1500:]}")
    return done.stdout + done.stderr


def compile_model(model: onnx.ModelProto, to: Path, march: str, level: str = "O0") -> Compiled:
    """A model with pairs of quantization and dequantization, compiled for a march into a folder."""
    to.mkdir(parents=True, exist_ok=True)
    path = (to / "source.onnx").resolve()
    onnx.save(model, path)
    shapes = {i.name: "x".join(str(d.dim_value) for d in i.type.tensor_type.shape.dim) for i in model.graph.input}

    def each(value: str) -> str:
        return ";".join([value] * len(shapes))

    work = (to / "out").resolve()
    text = CONFIGURATION.format(
        model=path,
        march=march,
        work=work,
        names=";".join(shapes),
        shapes=";".join(shapes.values()),
        types=each("featuremap"),
        layouts=each("NCHW"),
        norms=each("no_preprocess"),
        level=level,
    )
    (to / "model.yaml").write_text(text, encoding="utf-8")
    said = run(["hb_mapper", "makertbin", "--model-type", "onnx", "-c", str((to / "model.yaml").resolve())], to)
    if not (work / "model.bin").exists():
        raise ToolError(f"hb_mapper wrote no program: …{said[-1500:]}")
    run(["hb_extract_hbm", str(work / "model.bin")], to)
    return Compiled(work / "model_quantized_model.onnx", tuple(sorted(to.glob("*.hbm"))), _places(said))


def _places(log: str) -> dict[str, str]:
    """Where each node runs, from the compiler's table."""
    rows = (line.split() for line in log.splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 3 and row[1] in ("BPU", "CPU")}


def quantized(compiled: Compiled, batches: Sequence[Mapping[str, Array]]) -> list[list[Array]]:
    """The outputs that the vendor's runtime computes from the quantized model, for each set of inputs."""
    with tempfile.TemporaryDirectory() as work:
        arrays = {f"{i}/{name}": value for i, batch in enumerate(batches) for name, value in batch.items()}
        np.savez(Path(work) / "given.npz", count=np.asarray(len(batches)), **arrays)
        run(["python", "-c", RUNTIME, str(compiled.quantized.resolve()), "given.npz", "found.npz"], work)
        with np.load(Path(work) / "found.npz") as found:
            count = len(found.files) // len(batches)
            return [[found[f"{i}/{j}"] for j in range(count)] for i in range(len(batches))]


def features(program: Path) -> tuple[str, list[tuple[str, tuple[int, ...], str]], list[tuple[str, tuple[int, ...], str]]]:
    """The name of a program, its inputs and its outputs: name, dimensions and dtype of each."""
    with tempfile.TemporaryDirectory() as work:
        run(["hbdk-disas", str(program.resolve()), "--json", "-o", "program.json"], work)
        model = json.loads((Path(work) / "program.json").read_text(encoding="utf-8"))[0]
    inputs, outputs = (
        [(f["feature name"], tuple(f["valid dim"]), f["element type name"]) for f in model[f"{side} features"]]
        for side in ("input", "output")
    )
    return model["model name"], inputs, outputs


def simulate(program: Path, arrays: Sequence[Array]) -> dict[str, Array]:
    """The integers of each output of a program of the BPU, in the program's own order of dimensions, by name."""
    name, inputs, outputs = features(program)
    with tempfile.TemporaryDirectory() as work:
        Path(work, "out").mkdir()
        files = []
        for i, (array, (title, shape, dtype)) in enumerate(zip(arrays, inputs, strict=True)):
            turned = array.ndim == 4 and ("nchw2nhwc" in title or array.shape != shape)
            arranged = array.transpose(0, 2, 3, 1) if turned else array
            np.ascontiguousarray(arranged.reshape(shape)).astype(TYPES[dtype]).tofile(Path(work) / f"in{i}.bin")
            files.append(f"in{i}.bin")
        run(["hbdk-sim", "-f", str(program.resolve()), "-n", name, "-i", ",".join(files), "-o", "out", "--memory", "1024"], work)
        results: dict[str, Array] = {}
        for i, (title, shape, _) in enumerate(outputs):
            (path,) = Path(work, "out").glob(f"hbdk_output{i}_*elem_*.txt")
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
            results[title] = np.array(" ".join(lines).split(), np.float64).reshape(shape)
    return results
