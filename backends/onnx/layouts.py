"""Inputs in another layout than PyTorch's: the file takes channels last, and a Transpose after the input moves them to PyTorch's order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from fxquant.backends.onnx.metadata import LAYOUTS as LAST
from fxquant.backends.onnx.metadata import PREFIX
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import argument_name
from fxquant.support.arguments import Kind

if TYPE_CHECKING:
    import onnx

CHANNELS_LAST = dict(zip(LAST, ("NCW", "NCHW", "NCDHW"), strict=True))
KNOWN = (*CHANNELS_LAST, *CHANNELS_LAST.values())


def _layouts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and layout in KNOWN for name, layout in value.items()):
        raise TypeError
    return dict(value)


LAYOUTS = Kind(f"a dict of layouts by names of inputs, each one of {', '.join(KNOWN)}", _layouts).or_none("every input is as in PyTorch")


def with_layouts(model: onnx.ModelProto, layouts: Mapping[str, str] | None, source: fx.GraphModule) -> onnx.ModelProto:
    """Change inputs of the model to these layouts, and record them in fxquant.inputs. The model is changed in place, and returned.

    Inputs are named as in the file, or as the arguments of forward, which `source` knows.

    Raises ConfigurationError for the name of no input, and for a layout whose number of dimensions differs from the input's.
    """
    graph = model.graph
    inputs = {info.name: info for info in graph.input}
    called = dict(zip(map(argument_name, source.graph.find_nodes(op="placeholder")), inputs, strict=True))
    for given, layout in (layouts or {}).items():
        name = given if given in inputs else called.get(given, given)
        if name not in inputs:
            raise ConfigurationError(
                f"layouts names {name!r}, which is not an input of the file",
                because=f"its inputs are {', '.join(inputs)}",
                remedy="use these names, or give others by input_names=",
            )
        sizes = inputs[name].type.tensor_type.shape.dim
        if len(sizes) != len(layout):
            raise ConfigurationError(
                f"the input {name!r} cannot be {layout}",
                because=f"it has {len(sizes)} dimensions",
                remedy=f"leave it out of layouts: {layout} is of tensors with {len(layout)}",
            )
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

    taken = {output for node in graph.node for output in node.output} | {tensor.name for tensor in graph.initializer}
    inner = f"{info.name}/{CHANNELS_LAST[layout]}"
    while inner in taken:
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
