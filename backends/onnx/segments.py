"""A model as several files, one for each segment, with a manifest that connects them.

manifest.json
    fxquant     the fxquant that wrote it
    format      1
    target      the target it was compiled for
    style       the style of the files
    inputs      the names of the tensors that the model takes, in order
    outputs     the names of the tensors that it returns, in order
    segments    in the order they run: the file, where it runs ("host", or the target's name), and the names of the tensors it takes
                and returns, in the order of the file's inputs and outputs. If ONNX cannot express it, because it has functions of
                fxq.wrap or modules of leaf=, the file is null, and "python" names these calls
    tensors     for each tensor between segments: its ONNX element type, its shape, and if quantized its scale, zero point and dtype
"""

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from fxquant.analysis.layers import HOST, Segment, grouped, segments
from fxquant.analysis.recording import returned
from fxquant.backends.onnx.export import STYLES, check_arguments, save_models
from fxquant.backends.onnx.metadata import read_metadata
from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir import loops
from fxquant.ir.graph import is_python
from fxquant.ir.model import Model
from fxquant.support.arguments import FOLDER, by_names, checked, choice
from fxquant.support.progress import working
from fxquant.version import __version__

MANIFEST, FORMAT = "manifest.json", 1


@checked(folder=FOLDER)
@working("writing segments")
def export_segments(
    integer: fx.GraphModule, folder: str | os.PathLike[str], cut: Sequence[str | Sequence[str]] = (), opset: int | None = None
) -> Path:
    """Write every segment of the integer model as a separate ONNX file, and the manifest that connects them; return its path.

    The segments are those of `segments(integer, cut)`: one for each run of the target's integer operators and of the host's float
    operators, and cut after the tensors that `cut` names. Run in sequence, they give the bits of the whole model. Between integer segments
    a tensor is passed as its integers. The files are in style "exact"; `run_segments` runs them. A host segment with Python in
    it (`wrap`, `leaf=`) that no ONNX operators can express has no file: the manifest names its inputs and outputs for the user's Python.

    All files are complete before the first is put in place, and the manifest is the last. Raises ConfigurationError or ExportError;
    existing files are then unchanged.
    """
    check_arguments(integer, "exact", "float", opset)
    parts = segments(integer, cut)
    constants = [node.name for node in returned(integer) if node.op == "get_attr"]
    if constants and not parts:
        raise ExportError("there is nothing to write", because="the model only returns constants", remedy="keep them outside of the model")
    written, tensors, models = [], dict[str, Any](), dict[str, Any]()
    for index, ((_, nodes), part) in enumerate(zip(grouped(integer, cut), parts, strict=True)):
        outputs = [*part.outputs, *(constants if index == len(parts) - 1 else ())]
        file = f"{index}-{part.device}.onnx"
        entry: dict[str, Any] = {"file": file, "device": part.device, "inputs": list(part.inputs), "outputs": outputs}
        try:
            model = STYLES["exact"].write(_alone(integer, nodes, part, outputs), "float", opset or STYLES["exact"].default, (None, None))
        except ExportError:
            python_nodes = [node.name for node in nodes if is_python(node)]
            if part.device != HOST or not python_nodes:
                raise
            written.append({**entry, "file": None, "python": python_nodes})
            continue
        written.append(entry)
        models[file] = model
        tensors.update(_described(read_metadata(model, Path(folder, file)), part.inputs, outputs))
    manifest = {
        "fxquant": __version__,
        "format": FORMAT,
        "target": integer.meta["target"].name,
        "inputs": [node.name for node in integer.graph.find_nodes(op="placeholder")],
        "outputs": [node.name for node in returned(integer, everything=True)],
        "segments": written,
        "tensors": tensors,
    }
    save_models(models, folder, None, {MANIFEST: json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"})
    return Path(folder, MANIFEST)


def _alone(integer: fx.GraphModule, nodes: list[fx.Node], part: Segment, outputs: Sequence[str]) -> fx.GraphModule:
    """Return a segment as a model that shares the parameters of the whole; its nodes and inputs keep their names."""
    graph = fx.Graph()
    named = {node.name: node for node in integer.graph.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    for name in part.inputs:
        placeholder = copies[named[name]] = graph.create_node("placeholder", name, name=name)
        placeholder.meta.update(named[name].meta)

    def copied(node: fx.Node) -> fx.Node:
        """Return a node's copy; a parameter or a number is copied at its first reader."""
        if node not in copies:
            for operand in (*node.all_input_nodes, *(loops.reads(node) if node.target is loops.begin else ())):
                copied(operand)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    within = set(nodes)
    for node in integer.graph.nodes:
        if node in within or (node.target is loops.end and node.args[0] in copies):
            copied(node)
    graph.output(tuple(copied(named[name]) for name in outputs))
    return Model.of(integer, graph)


def _described(metadata: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for names, what in ((inputs, "inputs"), (outputs, "outputs")):
        for name, entry in zip(names, metadata[what], strict=True):
            tensor: dict[str, Any] = metadata["tensors"].get(entry.get("tensor", ""), {}) if entry.get("tensor") == name else {}
            fields: dict[str, Any] = {"dtype": entry["dtype"], "shape": entry["shape"]}
            fields.update((key, tensor[key]) for key in ("scale", "axis", "zero_point") if key in tensor)
            if "dtype" in tensor:
                fields["range"] = tensor["dtype"]
            described[name] = fields
    return described


@checked(
    folder=FOLDER,
    runtime=choice(*RUNTIME_NAMES),
    python=by_names("a dict of functions by names of tensors", callable).or_none("every segment has a file"),
)
def run_segments(
    folder: str | os.PathLike[str], *inputs: Tensor, runtime: str = RUNTIME_NAMES[0], python: Mapping[str, Callable[..., Any]] | None = None
) -> tuple[Any, ...]:
    """Run the segments in a folder on these inputs, in the order of its manifest; return the model's outputs, flattened.

    `runtime` is one of those that `verify` uses. `python` has a function for each segment without a file, by the name of its first output.
    It is called with the segment's inputs and returns its output, or a tuple of its outputs, in the manifest's order. Raises
    ExportError for a folder without a usable manifest, and ConfigurationError if the number of inputs is not the model's, or
    a function is missing, takes other arguments, or returns another number of outputs.
    """
    directory = Path(folder)
    manifest = _read(directory / MANIFEST)
    if len(inputs) != len(manifest["inputs"]) or not all(isinstance(value, Tensor) for value in inputs):
        because = f"the model takes {', '.join(manifest['inputs'])}"
        remedy = "pass a tensor for each, in this order"
        raise ConfigurationError(f"the segments in {directory} cannot be run with {len(inputs)} inputs", because=because, remedy=remedy)
    values = dict(zip(manifest["inputs"], inputs, strict=True))
    for entry in manifest["segments"]:
        if entry["file"] is None:
            values.update(_called(entry, python or {}, [values[name] for name in entry["inputs"]]))
            continue
        opened = OnnxModel(directory / entry["file"])
        if (len(opened.input_names), len(opened.output_names)) != (len(entry["inputs"]), len(entry["outputs"])):
            raise _unusable_manifest(directory / MANIFEST, f"{entry['file']} has other inputs or outputs than it says")
        outputs = opened.runner(runtime, ())(dict(zip(opened.input_names, (values[name] for name in entry["inputs"]), strict=True)))
        values.update(zip(entry["outputs"], (outputs[name] for name in opened.output_names), strict=True))
    return tuple(values[name] for name in manifest["outputs"])


def _called(entry: dict[str, Any], python: Mapping[str, Callable[..., Any]], inputs: list[Tensor]) -> dict[str, Any]:
    name, outputs = entry["outputs"][0], entry["outputs"]
    remedy = f"pass python={{{name!r}: …}}, a function of {', '.join(entry['inputs'])} that returns {', '.join(outputs)}"
    if name not in python:
        because = f"it has no file: {', '.join(entry['python'])} were kept as Python"
        raise ConfigurationError(f"the segment that gives {name!r} cannot be run", because=because, remedy=remedy)
    function = python[name]
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError as error:
        raise ConfigurationError(
            f"the function for {name!r} cannot be called",
            because=f"segments pass tensors alone, here {', '.join(entry['inputs'])}: {error}",
            remedy=f"{remedy}; put numbers that forward passes into it, as functools.partial does",
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    result = function(*inputs)
    results = result if len(outputs) > 1 else [result]
    if not isinstance(results, tuple | list) or len(results) != len(outputs):
        raise ConfigurationError(
            f"the outputs of the function for {name!r} cannot be used",
            because=f"the segment has {len(outputs)} outputs, {', '.join(outputs)}, and it returned {type(result).__name__}",
            remedy=remedy,
        )
    return dict(zip(outputs, results, strict=True))


def _read(path: Path) -> dict[str, Any]:
    """Return a manifest, checked: its names refer to each other, and its files are in the folder."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        because = _unusable(manifest)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        because = str(error)
    except (KeyError, TypeError, AttributeError) as error:
        because = f"it is not of the form that fxquant writes: {error}"
    if because is not None:
        raise _unusable_manifest(path, because)
    return manifest


def _unusable_manifest(path: Path, because: str) -> ExportError:
    return ExportError(f"{path} is not a usable manifest", because=because, remedy="export the segments again: fxq.export.export_segments")


def _unusable(manifest: dict[str, Any]) -> str | None:
    if manifest["format"] != FORMAT:
        return f"its format is {manifest['format']!r}, and this fxquant reads {FORMAT}"
    entries = manifest["segments"]
    lists = [manifest["inputs"], manifest["outputs"], *(entry[each] for entry in entries for each in ("inputs", "outputs"))]
    lists += [entry["python"] for entry in entries if entry["file"] is None]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        return "a value is not a list of names"
    available = set(manifest["inputs"])
    for entry in entries:
        if not entry["outputs"]:
            return f"{entry['file']} gives nothing"
        if entry["file"] is not None and Path(entry["file"]).name != entry["file"]:
            return f"{entry['file']!r} is not a file in its folder"
        missing = [name for name in entry["inputs"] if name not in available]
        if missing:
            return f"{entry['file']} takes {missing[0]!r}, which no segment before it gives"
        available.update(entry["outputs"])
    missing = [name for name in manifest["outputs"] if name not in available]
    return f"no segment gives {missing[0]!r}" if missing else None
