"""Write and check the metadata of an exported file, in its `metadata_props`, and the layouts of its inputs, which the metadata has.

    fxquant.version          the fxquant that wrote it
    fxquant.style            "exact", "fast", "qdq" or "horizon", or "float" of a model that is not quantized
    fxquant.io               "float" or "integer": the kind of the file's inputs and outputs
    fxquant.target           the target it was compiled for
    fxquant.inputs           JSON: for each input, in order, its name, dtype (the ONNX element type, as "float") and shape, and the
                             name of the quantized tensor it is or is made into, "tensor", where there is one; "layout", as "NHWC",
                             where it is not PyTorch's
    fxquant.outputs          JSON: as for inputs, for each output, with the quantized tensor it is or was. Where it is that tensor (io
                             "integer"), its entry in fxquant.tensors describes the numbers taken and returned
    fxquant.tensors          JSON: for each described value, by name, in the order they are computed:
                               kind        "quantized", "accumulator" (between two of them), "plain" (booleans or integers, which
                                           have no scale), "dynamic" (float values of a layer that is quantized at run time) or "float"
                               and of a quantized one
                               scale       a number, or a list along the dimension `axis`, counted from the end
                               dtype       its range: "int8", "uint8", "int16", …
                               storage     the element type it is stored with: "int8", or "uint8" in style "fast" and of an affine tensor
                               zero_point  the stored value of 0: real = (stored - zero_point) · scale
                               value       its name in the graph, if the user gave another name to it as an input or output
    fxquant.provenance       JSON: for values that differ from the float model's of the same name, by name: "fused", the nodes that were
                             fused into it, the last one's result being its value, and "exponents", the powers of two by which its
                             channels are multiplied: nested lists of its shape without the batch, of size 1 to broadcast
    fxquant.float            JSON: why operators are outside of the integer part, by name
    fxquant.session_options  JSON: session options of onnxruntime, by name, that the file's numbers rely on where it was written
    fxquant.session_options_without_vnni
                             JSON, styles "fast" and "qdq": those they rely on where an x86 processor lacks VNNI; elsewhere they
                             cost speed
    fxquant.relies_on_vnni   JSON, styles "fast" and "qdq": whether its numbers differ on x86 processors without VNNI, whatever the options
    fxquant.relies_on_float64
                             JSON: whether it computes integers in float64, which some runtimes (OpenVINO, IREE) make float32
    fxquant.kernels          JSON, style "fast": "integer", the operators that became integer kernels, "computed", those whose tables
                             are computed in float32, and "refused", operators of both kinds that were not exact where the file was
                             written, and that have the form of style "exact"

The names are stable: later additions get new names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import argument_name
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.support.arguments import PATH, by_names, checked
from fxquant.version import __version__

if TYPE_CHECKING:
    import onnx

PREFIX = "fxquant."
_PLAIN = ("version", "style", "io", "target")  # the others are JSON
_ALLOWED = {"style": ("exact", "fast", "qdq", "horizon", "float"), "io": ("float", "integer")}
KINDS = ("quantized", "accumulator", "plain", "float", "dynamic")
LARGEST_EXPONENT = 64
CHANNELS_LAST = {"NWC": "NCW", "NHWC": "NCHW", "NDHWC": "NCDHW"}  # PyTorch's layout by that of a file
STORAGES = ("int8", "uint8", "int16", "int32")
RANGES = tuple(ACTIVATION_TYPES)
# On x86 processors without VNNI, kernels add pairs of products in 16 bits, which can saturate, unless this option is set.
# Elsewhere this only makes them slower.
PRECISE = {"session.x64quantprecision": "1"}
SESSION_OPTIONS = {name: (value,) for name, value in PRECISE.items()}  # the options that a file may request, and their values


def write_metadata(model: onnx.ModelProto, entries: Mapping[str, Any]) -> None:
    """Set these properties of the model, by their names without the prefix."""
    import onnx

    onnx.helper.set_model_props(
        model, {PREFIX + name: value if name in _PLAIN else json.dumps(value, ensure_ascii=False) for name, value in entries.items()}
    )


def read_metadata(model: onnx.ModelProto, path: Path) -> dict[str, Any]:
    """Return the properties of a model that was read from this path. Raises ExportError if fxquant did not write it."""
    properties = {entry.key.removeprefix(PREFIX): entry.value for entry in model.metadata_props if entry.key.startswith(PREFIX)}
    if "tensors" not in properties:
        remedy = "pass a file written by fxq.export_onnx"
        raise ExportError(f"{path} was not written by fxquant", because="its metadata has no entry fxquant.tensors", remedy=remedy)
    try:
        entries = {name: value if name in _PLAIN else json.loads(value) for name, value in properties.items()}
        _check(entries, model)
    except (Unusable, json.JSONDecodeError, RecursionError, OverflowError) as error:
        version = properties.get("version", "")
        because = str(error) + (f"; it was written by fxquant {version}, and this is {__version__}" if version != __version__ else "")
        remedy = "export the model again with fxq.export_onnx"
        raise ExportError(f"{path} has metadata that cannot be used", because=because, remedy=remedy) from None
    return entries


class Unusable(ValueError):
    """A defect in the metadata of a file."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unusable(reason)


def _check(entries: Mapping[str, Any], model: onnx.ModelProto) -> None:
    """Raise Unusable unless every property that fxquant reads exists, has its type, and describes values of this model."""
    for name, allowed in _ALLOWED.items():
        _require(entries.get(name) in allowed, f"fxquant.{name} is {entries.get(name)!r}, not one of {', '.join(allowed)}")
    for name in ("version", "target"):
        _require(name in entries, f"it has no entry fxquant.{name}")
    graph = model.graph
    typed = {info.name for info in (*graph.input, *graph.output, *graph.value_info)}
    computed = {name for node in graph.node for name in node.output} | {info.name for info in graph.input}
    _require(isinstance(entries["tensors"], dict), "fxquant.tensors is not an object")
    for name, entry in entries["tensors"].items():
        _check_tensor(name, entry)
        value = entry.get("value", name)
        shown = entry["kind"] == "float" or (isinstance(value, str) and value in typed and value in computed)
        _require(shown, f"fxquant.tensors describes {name!r}, a value that the graph does not have")
    for what, infos in (("inputs", graph.input), ("outputs", graph.output)):
        described: Any = entries.get(what)
        _require(isinstance(described, list) and {*map(type, described)} <= {dict}, f"fxquant.{what} is not a list of objects")
        names = [entry.get("name") for entry in described]
        _require(names == [info.name for info in infos], f"fxquant.{what} names {names}, and the graph has {[info.name for info in infos]}")
        for entry in described:
            layout = entry.get("layout")
            _require(layout is None or (what == "inputs" and layout in CHANNELS_LAST), f"fxquant.{what} has a layout {layout!r}")
            tensor = entry.get("tensor")
            _require(
                tensor is None or (isinstance(tensor, str) and tensor in entries["tensors"]),
                f"fxquant.{what} names a tensor {tensor!r} that is not described",
            )
    reasons = entries.get("float", {})
    _require(isinstance(reasons, dict) and {*map(type, reasons.values())} <= {str}, "fxquant.float is not an object of texts")
    provenance = entries.get("provenance", {})
    _require(isinstance(provenance, dict), "fxquant.provenance is not an object")
    for name, entry in provenance.items():
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {"fused": None}
        names, exponents = fields.get("fused", []), fields.get("exponents", [])
        _require(
            isinstance(names, list) and all(isinstance(each, str) for each in names) and _are_exponents(exponents),
            f"fxquant.provenance of {name!r} is not an object of names and exponents",
        )
    for name in ("session_options", "session_options_without_vnni"):
        options: Any = entries.get(name, {})
        _require(isinstance(options, dict), f"fxquant.{name} is not an object")
        for option, value in options.items():
            wrong = f"fxquant.{name} asks for {option!r} = {value!r}, which fxquant never writes"
            _require(value in SESSION_OPTIONS.get(option, ()), wrong)
    for name in ("relies_on_vnni", "relies_on_float64"):
        _require(isinstance(entries.get(name, False), bool), f"fxquant.{name} is neither true nor false")


def _are_exponents(value: object) -> bool:
    """Return whether a value is nested lists, of equal lengths at each depth, of integers that are valid exponents of a factor."""
    if not isinstance(value, list):
        return False
    level = value
    while level and all(isinstance(item, list) and len(item) == len(level[0]) for item in level):
        level = [number for item in level for number in item]
    return all(type(number) is int and abs(number) <= LARGEST_EXPONENT for number in level)


def _check_tensor(name: str, entry: object) -> None:
    _require(isinstance(entry, dict) and entry.get("kind") in KINDS, f"fxquant.tensors does not say what kind of value {name!r} is")
    assert isinstance(entry, dict)
    if "scale" in entry:
        scale = entry["scale"]
        several = isinstance(scale, list)
        scales = scale if isinstance(scale, list) else [scale]
        _require(
            bool(scales) and all(type(number) in (int, float) and 0 < number <= sys.float_info.max for number in scales),
            f"the scale of {name!r} is not a positive number",
        )
        _require(entry.get("dtype") in RANGES, f"the dtype of {name!r} is {entry.get('dtype')!r}, not one of {', '.join(RANGES)}")
        axis = entry.get("axis", -1 if several else None)
        _require(isinstance(axis, int) and axis < 0 if several else axis is None, f"the axis of the scales of {name!r} is {axis!r}")
    if entry["kind"] == "quantized":
        storage, zero = entry.get("storage"), entry.get("zero_point")
        _require(storage in STORAGES, f"the storage of {name!r} is {storage!r}, not one of {', '.join(STORAGES)}")
        _require(isinstance(zero, int) and not isinstance(zero, bool), f"the zero point of {name!r} is {zero!r}, not an integer")


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model in a file, without its external data. Raises ExportError if the file does not hold one."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
        _require(all(isinstance(text, str) for text in _texts(model)), "a name in it is not a text")
        return model
    except (OSError, ValueError, DecodeError, Unusable) as error:
        because = str(error).splitlines()[0] or type(error).__name__
        raise ExportError(f"{path} cannot be read as ONNX", because=because, remedy="pass a file written by fxq.export_onnx") from None


def _texts(message: Any) -> Iterator[object]:
    """Yield the values of a message's string fields; in a damaged file they may be bytes."""
    from google.protobuf.message import Message

    for field, value in message.ListFields():
        several = (value,) if isinstance(value, str | bytes | Message) else value
        if field.type == field.TYPE_STRING:
            yield from several
        elif field.type == field.TYPE_MESSAGE:
            for each in several:
                yield from _texts(each)


@checked(path=PATH)
def onnx_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a file that `export_onnx` wrote: version, style, io, target, inputs, outputs, tensors, …

    The keys are the properties' names without "fxquant."; their JSON is parsed. backends/onnx/metadata.py documents them.
    Raises ExportError if the file cannot be read, or was not written by fxquant.
    """
    return read_metadata(read_model(Path(path)), Path(path))


# ---- inputs in another layout than PyTorch's -------------------------------------------------------------------------
#
# The file takes channels last, and a Transpose after the input moves them to PyTorch's order.
KNOWN = (*CHANNELS_LAST, *CHANNELS_LAST.values())

LAYOUTS = by_names(f"a dict of layouts by names of inputs, each one of {', '.join(KNOWN)}", lambda layout: layout in KNOWN).or_none(
    "every input is as in PyTorch"
)


def with_layouts(model: onnx.ModelProto, layouts: Mapping[str, str] | None, source: fx.GraphModule) -> onnx.ModelProto:
    """Change inputs of the model to these layouts, and record them in fxquant.inputs. The model is changed in place, and returned.

    Inputs are named as in the file, or as the arguments of forward, which `source` knows.

    Raises ConfigurationError for the name of no input, and for a layout whose number of dimensions differs from the input's.
    """
    graph = model.graph
    inputs = {info.name: info for info in graph.input}
    called = dict(zip(map(argument_name, source.graph.find_nodes(op="placeholder")), inputs, strict=True))
    for key, layout in (layouts or {}).items():
        name = key if key in inputs else called.get(key, key)
        if name not in inputs:
            because = f"its inputs are {', '.join(inputs)}"
            remedy = "use these names, or give others by input_names="
            raise ConfigurationError(f"layouts names {name!r}, which is not an input of the file", because=because, remedy=remedy)
        sizes = inputs[name].type.tensor_type.shape.dim
        if len(sizes) != len(layout):
            remedy = f"leave it out of layouts: {layout} is of tensors with {len(layout)}"
            raise ConfigurationError(f"the input {name!r} cannot be {layout}", because=f"it has {len(sizes)} dimensions", remedy=remedy)
        if layout in CHANNELS_LAST:
            _permute(graph, inputs[name], layout)
            _describe(model, name, layout)
    return model


def to_file(layout: str) -> tuple[int, ...]:
    """Return the dimensions of PyTorch's tensor in the file's order."""
    return tuple(CHANNELS_LAST[layout].index(letter) for letter in layout)


def _permute(graph: onnx.GraphProto, info: onnx.ValueInfoProto, layout: str) -> None:
    import onnx
    from onnx import helper

    names = {output for node in graph.node for output in node.output} | {tensor.name for tensor in graph.initializer}
    inner = f"{info.name}/{CHANNELS_LAST[layout]}"
    while inner in names:
        inner += "_"
    for node in graph.node:
        node.input[:] = [inner if name == info.name else name for name in node.input]
    shape = info.type.tensor_type.shape
    sizes = [onnx.TensorShapeProto.Dimension.FromString(size.SerializeToString()) for size in shape.dim]
    graph.value_info.append(onnx.ValueInfoProto.FromString(info.SerializeToString()))
    graph.value_info[-1].name = inner
    del shape.dim[:]
    shape.dim.extend(sizes[dim] for dim in to_file(layout))
    perm = [layout.index(letter) for letter in CHANNELS_LAST[layout]]
    graph.node.insert(0, helper.make_node("Transpose", [info.name], [inner], name=inner, perm=perm))
    for output in graph.output:  # an output that is the input itself
        if output.name == info.name:
            raise ConfigurationError(
                f"the input {info.name!r} cannot be {layout}", because="the model returns it as it is", remedy="leave it out of layouts"
            )


def _describe(model: onnx.ModelProto, name: str, layout: str) -> None:
    (entry,) = (entry for entry in model.metadata_props if entry.key == f"{PREFIX}inputs")
    described = json.loads(entry.value)
    for one in described:
        if one["name"] == name:
            one.update(layout=layout, shape=[one["shape"][dim] for dim in to_file(layout)])
    entry.value = json.dumps(described, ensure_ascii=False)
