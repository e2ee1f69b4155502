"""Runs the probe programs of a conformance kit on a board, and writes what they give into a folder.

    python3 run.py                     into results/, by the runtime that the board has
    python3 run.py --results DIR --runtime hobot_dnn

It reads the programs (.bin), inputs.npy and programs.json from its own folder. It needs Python 3.8 or later, numpy, and a runtime:
hobot_dnn, which RDK images have, or hbm_runtime. On a PC with the vendor's tool, its HB_ONNXRuntime runs the quantized models in the same
folder: `--runtime HB_ONNXRuntime`. Copy the folder of results back, and run `fxquant conformance KIT --results DIR`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent


class HobotDnn:
    """The runtime of RDK images: `from hobot_dnn import pyeasy_dnn`."""

    module = "hobot_dnn"
    suffix = ".bin"

    def __init__(self, path: str) -> None:
        dnn: Any = importlib.import_module("hobot_dnn.pyeasy_dnn")
        self.model = dnn.load(path)[0]

    def run(self, name: str, image: Any) -> Any:
        """Return the outputs of an image, as names and arrays in order."""
        outputs = self.model.forward(image)
        return [getattr(output, "name", "") for output in outputs], [np.array(output.buffer) for output in outputs]


class HbmRuntime:
    """The runtime of newer images: `import hbm_runtime`."""

    module = "hbm_runtime"
    suffix = ".bin"

    def __init__(self, path: str) -> None:
        runtime: Any = importlib.import_module("hbm_runtime")
        self.model = runtime.HB_HBMRuntime(path)
        self.name = self.model.model_names[0]

    def run(self, name: str, image: Any) -> Any:
        """Return the outputs of an image, as names and arrays in order."""
        (input_name,) = self.model.input_names[self.name]
        found = self.model.run({self.name: {input_name: image}})[self.name]
        names = list(self.model.output_names[self.name])
        return names, [np.array(found[each]) for each in names]


class HorizonOnnx:
    """The vendor's runtime of quantized models, on a PC: `from horizon_tc_ui import HB_ONNXRuntime`."""

    module = "horizon_tc_ui"
    suffix = "_quantized_model.onnx"

    def __init__(self, path: str) -> None:
        tool: Any = importlib.import_module("horizon_tc_ui")
        self.model = tool.HB_ONNXRuntime(model_file=path)

    def run(self, name: str, image: Any) -> Any:
        """Return the outputs of an image, as names and arrays in order."""
        names = list(self.model.output_names)
        return names, [np.array(each) for each in self.model.run(names, {name: image})]


RUNTIMES: dict[str, Any] = {"hobot_dnn": HobotDnn, "hbm_runtime": HbmRuntime, "HB_ONNXRuntime": HorizonOnnx}


def as_npy(array: Any) -> bytes:
    """Return an array as the content of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def chosen(name: str) -> str:
    """Return the runtime of this name; for "auto", the first of the board's that is installed."""
    if name != "auto":
        return name
    found = [each for each in ("hobot_dnn", "hbm_runtime") if importlib.util.find_spec(RUNTIMES[each].module) is not None]
    if not found:
        raise SystemExit("neither hobot_dnn nor hbm_runtime is installed: run this on the board, by the Python that has them")
    return found[0]


def ordered(program: Any, names: Any, arrays: Any) -> Any:
    """Return the arrays of a program's outputs in its order: by name if the runtime gives the names, otherwise by position."""
    wanted = program["outputs"]
    if len(arrays) != len(wanted):
        raise RuntimeError(f"it has {len(arrays)} outputs, and {len(wanted)} are expected")
    by_name = dict(zip(names, arrays))  # noqa: B905  (Python 3.8)
    return [by_name[name] for name in wanted] if set(by_name) == set(wanted) else arrays


def results_of(program: Any, runtime: Any, images: Any) -> Any:
    """Return the outputs of a program: an array for each, with the images along its first dimension."""
    model = runtime(str(HERE / (program["name"] + runtime.suffix)))
    rows = [ordered(program, *model.run(program["input"], np.ascontiguousarray(image[None]))) for image in images]
    return {str(index): np.concatenate(column) for index, column in enumerate(zip(*rows))}  # noqa: B905


def write(path: Path, arrays: Any) -> None:
    """Write arrays as a .npz file atomically."""
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(archive.getvalue())
        file.flush()
        os.fsync(file.fileno())
    os.replace(str(partial), str(path))


def main() -> int:
    """Run all programs; return 1 if one could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default="results", metavar="DIR", help="the folder of results (default: results)")
    parser.add_argument(
        "--runtime", default="auto", choices=["auto", *RUNTIMES], help="what runs the programs (default: what is installed)"
    )
    options = parser.parse_args()
    name = chosen(options.runtime)
    about = json.loads((HERE / "programs.json").read_text(encoding="utf-8"))
    images = np.load(str(HERE / "inputs.npy"))
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for index, program in enumerate(about["programs"]):
        print(f"{index + 1} of {len(about['programs'])}: {program['name']}", flush=True)
        found = {"kit": np.array(about["kit"]), "runtime": np.array(name)}
        try:
            found.update(results_of(program, RUNTIMES[name], images))
        except Exception as error:  # the other programs may run
            failed += 1
            print(f"  failed: {error}", file=sys.stderr)
            found["error"] = np.array(f"{type(error).__name__}: {error}")
        write(folder / (program["name"] + ".npz"), found)
    print(f"results are in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
