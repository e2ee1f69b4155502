"""Runs compiled programs on a board: a model of your own, or the probe programs of a conformance kit.

    python3 run.py                     on inputs.npz; writes what the programs return into results/
    python3 run.py --inputs FILE.npz   on other inputs: arrays by the names of the inputs, with the sample as dimension 0
    python3 run.py --images FILE…      on pictures, if the program takes NV12 from a camera; needs cv2
    python3 run.py --results DIR --runtime hobot_dnn

It reads the programs (.bin), inputs.npz and programs.json from its own folder. It needs Python 3.8 or later, numpy, and a runtime:
hobot_dnn, which RDK images have, bpu_infer_lib or hbm_runtime. The outputs of inputs.npz are compared with the integers of expected.npz, if
the folder has it, and those of --inputs with --expected. The exit status is 1 if a program fails or an integer differs.

Of a conformance kit, copy the folder of results back, and run `fxquant conformance KIT --results DIR`. On a PC with the vendor's tool, its
HB_ONNXRuntime runs the quantized models in a kit: `--runtime HB_ONNXRuntime`.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent


# ---- runtimes: a function that loads a program, and returns one from inputs to outputs, both by name -----------------
def named(outputs: Any, data: str) -> Any:
    """Return the arrays in this attribute of outputs, by name; by number if the runtime gives no names."""
    return {getattr(output, "name", "") or index: getattr(output, data) for index, output in enumerate(outputs)}


def hobot_dnn(path: str) -> Any:
    """Load a program by the runtime of RDK images."""
    model = importlib.import_module("hobot_dnn.pyeasy_dnn").load(path)[0]
    return lambda inputs: named(model.forward([*inputs.values()] if len(inputs) > 1 else next(iter(inputs.values()))), "buffer")


def bpu_infer_lib(path: str) -> Any:
    """Load a program by the runtime of the vendor's model zoo."""
    model = importlib.import_module("bpu_infer_lib").Infer(False)
    model.load_model(path)

    def run(inputs: Any) -> Any:
        for index, value in enumerate(inputs.values()):
            model.read_input(value, index)
        model.forward()
        model.get_output()
        return named(model.outputs, "data")

    return run


def hbm_runtime(path: str) -> Any:
    """Load a program by the runtime of newer images."""
    model = importlib.import_module("hbm_runtime").HB_HBMRuntime(path)
    name = model.model_names[0]
    takes = model.input_names[name]  # in their order, if they are other names
    return lambda inputs: model.run({name: inputs if set(takes) == set(inputs) else dict(zip(takes, inputs.values()))})[name]  # noqa: B905


def horizon_tc_ui(path: str) -> Any:
    """Load a quantized model by the vendor's HB_ONNXRuntime, on a PC."""
    model = importlib.import_module("horizon_tc_ui").HB_ONNXRuntime(model_file=path.replace(".bin", "_quantized_model.onnx"))
    return lambda inputs: dict(zip(model.output_names, model.run(list(model.output_names), inputs)))  # noqa: B905  (Python 3.8)


RUNTIMES = {"hobot_dnn": hobot_dnn, "bpu_infer_lib": bpu_infer_lib, "hbm_runtime": hbm_runtime, "HB_ONNXRuntime": horizon_tc_ui}
ON_BOARD = list(RUNTIMES)[:3]


def chosen(name: str) -> str:
    """Return the runtime of this name; for "auto", the first of the board's that is installed."""
    if name != "auto":
        return name
    installed = [each for each in ON_BOARD if importlib.util.find_spec(each) is not None]
    if not installed:
        raise SystemExit(f"none of {', '.join(ON_BOARD)} is installed: run this on the board, by the Python that has one of them")
    return installed[0]


def nv12(path: str, rows: int, width: int) -> Any:
    """Return a picture as NV12, uint8 (1, rows, width), resized: full swing, chroma as means of two by two pixels, rounded once."""
    cv2: Any = importlib.import_module("cv2")
    image, height = cv2.imread(path), rows * 2 // 3
    if image is None:
        raise RuntimeError(f"{path} is not a picture that cv2 reads")
    to_yuv = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], np.float32)
    yuv = cv2.resize(image, (width, height))[..., ::-1].astype(np.float64) @ to_yuv.T + (0, 128, 128)
    chroma = yuv[..., 1:].reshape(height // 2, 2, width // 2, 2, 2).mean((1, 3)).reshape(height // 2, width)
    return np.clip(np.floor(np.concatenate([yuv[..., 0], chroma]) + 0.5), 0, 255).astype(np.uint8)[None]


def inputs_of(program: Any, options: Any) -> Any:
    """Return the inputs of a program by name, with the sample as dimension 0."""
    if not options.images:
        arrays = np.load(options.inputs or str(HERE / "inputs.npz"), allow_pickle=False)
        return {name: arrays[name] for name in program["inputs"]}
    if program.get("camera") != "nv12":
        raise RuntimeError("it does not take NV12, and how it takes a picture is not known here: give --inputs FILE.npz")
    ((name, (_, rows, width)),) = program["inputs"].items()
    return {name: np.concatenate([nv12(path, rows, width) for path in options.images])}


def ordered(order: Any, outputs: Any) -> Any:
    """Return the arrays of outputs in the wanted order of their names; in their own if they have other names."""
    if len(outputs) != len(order):
        raise RuntimeError(f"it has {len(outputs)} outputs, and {len(order)} are expected")
    return [np.array(outputs[name]) for name in (order if set(order) == set(outputs) else outputs)]


def results_of(program: Any, load: Any, inputs: Any) -> Any:
    """Return the outputs of a program by name, with the samples along their first dimension."""
    run, shapes = load(str(HERE / (program["name"] + ".bin"))), program["inputs"].values()
    rows = []
    for values in zip(*inputs.values()):  # noqa: B905  (Python 3.8)
        sample = [np.ascontiguousarray(value).reshape(shape) for value, shape in zip(values, shapes)]  # noqa: B905
        rows.append(ordered(program["outputs"], run(dict(zip(inputs, sample)))))  # noqa: B905
    return {name: np.concatenate(column) for name, column in zip(program["outputs"], zip(*rows))}  # noqa: B905


UNKNOWN = np.iinfo(np.int64).min  # for a value that is not an integer
SLACK = 1e-3, 2.0**-22  # tolerance of a quotient from its integer, absolute and relative: float32 keeps 24 bits


def integers(value: Any, step: Any) -> Any:
    """Return a runtime's output as int64: integers unchanged, float values divided by the step; UNKNOWN unless a multiple of it."""
    if value.dtype.kind in "iu":
        return value.astype(np.int64)
    with np.errstate(all="ignore"):
        quotient = value.astype(np.float64) / step
        nearest = np.rint(quotient)
        absolute, relative = SLACK
        right = np.isfinite(quotient) & (np.abs(quotient - nearest) <= absolute + relative * np.abs(nearest))
        return np.where(right, np.where(right, nearest, 0).astype(np.int64), UNKNOWN)


def equal(results: Any, expected: Any) -> bool:
    """Print how each output compares with its expected integers, then the first that differs; return whether all are equal."""
    first = ""
    for name, value in results.items():
        reference = expected[name]
        value = value.reshape(reference.shape)
        if reference.dtype.kind == "f":
            print(f"  {name}: computed in float, at most {np.abs(value - reference).max(initial=0):.3g} off")
            continue
        value = integers(value, expected.get(f"{name}/step", 1))
        places = np.argwhere(value != reference)
        print(f"  {name}: {len(places)} of {reference.size} integers differ")
        if len(places) and not first:
            place = tuple(places[0].tolist())
            actual = "no multiple of its scale" if value[place] == UNKNOWN else value[place]
            first = f"{name} is the first that differs: at {place} it is {actual}, and {reference[place]} is expected"
    print(f"  {first or 'equal'}")
    return not first


def write(path: Path, arrays: Any) -> None:
    """Write arrays as a .npz file atomically."""
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(str(partial), **arrays)
    os.replace(str(partial), str(path))


def main() -> int:
    """Run all programs; return 1 if one could not be run, or an integer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default="results", metavar="DIR", help="the folder of results (default: results)")
    parser.add_argument(
        "--runtime", default="auto", choices=["auto", *RUNTIMES], help="what runs the programs (default: what is installed)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--inputs", metavar="FILE", help="arrays by the names of the inputs, .npz (default: inputs.npz)")
    group.add_argument("--images", nargs="+", metavar="FILE", help="pictures, each resized to the program's image")
    parser.add_argument("--expected", metavar="FILE", help="the integers to compare with, .npz (default: expected.npz, for inputs.npz)")
    options = parser.parse_args()
    name = chosen(options.runtime)
    about = json.loads((HERE / "programs.json").read_text(encoding="utf-8"))
    own = HERE / "expected.npz"
    expected = options.expected or (str(own) if own.is_file() and not (options.inputs or options.images) else None)
    of_kit = {"kit": np.array(about["kit"]), "runtime": np.array(name)} if "kit" in about else {}
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for index, program in enumerate(about["programs"]):
        print(f"{index + 1} of {len(about['programs'])}: {program['name']}", flush=True)
        try:
            results = results_of(program, RUNTIMES[name], inputs_of(program, options))
            write(folder / (program["name"] + ".npz"), {**of_kit, **results})
            failed += expected is not None and not equal(results, dict(np.load(expected, allow_pickle=False)))
        except Exception as error:  # the other programs may run
            failed += 1
            print(f"  failed: {error}", file=sys.stderr)
            if of_kit:
                write(folder / (program["name"] + ".npz"), {**of_kit, "error": np.array(f"{type(error).__name__}: {error}")})
    print(f"results are in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
