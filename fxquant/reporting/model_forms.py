"""The forms of models that people pass: a float model, a graph at any stage, the path of an ONNX file; and the pairs of their tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.analysis.recording import (
    DYNAMIC,
    FLOAT,
    OUTPUTS,
    PRIMITIVE_KINDS,
    QUANTIZED,
    Facts,
    Form,
    GraphForm,
    Values,
    Wanted,
    real_values,
)
from fxquant.errors import ConfigurationError
from fxquant.frontend import trace
from fxquant.ir.graph import TensorFact, argument_name, fact, is_deployed, stage_of
from fxquant.ir.integer import QParams
from fxquant.options import Options
from fxquant.prepared.batches import bad_batch, example_inputs
from fxquant.quantization.spec import State


class OnnxForm(Form):
    """An exported file in one runtime; `feed` names values that are given to it, in `given`, instead of being computed."""

    def __init__(self, onnx_model: Any, runtime: str, feed: Sequence[str] = ()) -> None:
        self.onnx, self.runtime, self.feed = onnx_model, runtime, feed
        self.label, self.input_names = runtime, list(onnx_model.input_names)
        graph = onnx_model.model.graph
        shown = {info.name for info in (*graph.value_info, *graph.output)}
        kinds = {name: PRIMITIVE_KINDS[entry["kind"]] for name, entry in onnx_model.tensors.items()}
        self.tensors = {name: kind for name, kind in kinds.items() if onnx_model.value(name) in shown}
        self.runners: dict[tuple[str, ...], Any] = {}
        self.given: Values = {}

    @cached_property
    def facts(self) -> Mapping[str, Facts]:
        from fxquant.backends.onnx import reading

        made_of = {entry["tensor"]: entry["name"] for entry in self.onnx.metadata["inputs"] if entry.get("tensor")}
        operators, provenance = reading.operators(self.onnx), self.onnx.metadata.get("provenance", {})
        facts = {}
        for name, kind in self.tensors.items():
            entry = self.onnx.tensors[name]
            if kind == QUANTIZED and "scale" in entry:
                operator = "quantize" if name in made_of else operators.get(self.onnx.value(name), "")
                grid = _grid(entry, self._zero_point(name) if entry.get("storage") == entry["dtype"] else 0)
                fused = tuple(provenance.get(name, {}).get("fused", ()))
                facts[name] = Facts(operator, grid=grid, fused=fused, reads=made_of.get(name, ""))
        return facts

    @cached_property
    def exponents(self) -> Mapping[str, Tensor]:
        known = {name: entry.get("exponents") for name, entry in self.onnx.metadata.get("provenance", {}).items()}
        return {name: torch.tensor(value, device="cpu", dtype=torch.int64) for name, value in known.items() if value}

    def inputs(self, batch: Any, index: int) -> list[Any]:
        """Return the leading tensors of a batch, or those of the inputs' names."""
        names = self.input_names
        found = [batch.get(name) for name in names] if isinstance(batch, Mapping) else pytree.tree_leaves(batch)[: len(names)]
        if len(found) < len(names) or not all(isinstance(value, Tensor) for value in found):
            raise bad_batch(
                index, f"the inputs of {self.onnx.path} are {', '.join(names)}", "yield a tensor for each, in this order or by name"
            )
        return found

    def run(self, inputs: Sequence[Any], wanted: Wanted) -> Values:
        names = wanted.among(self.tensors)
        feeds = dict(zip(self.input_names, inputs, strict=True))
        feeds.update({self.onnx.value(name): self._stored(name) for name in self.feed})
        found = self._runner(names)(feeds) if names else {}
        values = {name: self._shown(name, found[value], wanted.real) for name in names if (value := self.onnx.value(name)) in found}
        if OUTPUTS not in wanted.kinds:
            return values
        # Exposing inner values keeps the runtime from some fusions, so the outputs come from the file as it is.
        plain = self._runner([])(feeds)
        return values | {f"output {index}": plain[name] for index, name in enumerate(self.onnx.output_names) if name in plain}

    def _shown(self, name: str, value: Tensor, real: bool) -> Tensor:
        entry = self.onnx.tensors[name]
        if self.tensors[name] in (FLOAT, DYNAMIC):
            return value
        integers = value.to(torch.int64) - self._zero_point(name)
        if not real or "scale" not in entry:
            return integers
        return real_values(integers, _grid(entry, 0))

    def _zero_point(self, name: str) -> int:
        return int(self.onnx.tensors[name].get("zero_point", 0))

    def _stored(self, name: str) -> Tensor:
        """Return a given value as the file stores it; booleans and integers of float operators are unchanged."""
        if "storage" not in self.onnx.tensors.get(name, {}):
            return self.given[name]
        return (self.given[name] + self._zero_point(name)).to(_STORAGE[self.onnx.tensors[name]["storage"]])

    def _runner(self, expose: Sequence[str]) -> Any:
        key = tuple(expose)
        if key not in self.runners:
            self.runners[key] = self.onnx.runner(self.runtime, [*map(self.onnx.value, expose)], [*map(self.onnx.value, self.feed)])
        return self.runners[key]


_STORAGE = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}


def _grid(entry: Mapping[str, Any], zero_point: int) -> QParams:
    scale = entry["scale"]
    return QParams(tuple(scale) if isinstance(scale, list) else scale, entry["dtype"], entry.get("axis"), zero_point)


def form_of(model: Any, batch: Any, state: State | str | None, beside: Any = None) -> Form:
    """Return the form of a float model, a graph at any stage, or the path of an ONNX file. Raises ConfigurationError for anything else.

    `beside` is what it is compared with: where that is a graph, a float model's batch is in the dimensions that it has there.
    """
    if isinstance(model, str | os.PathLike):
        refuse("state", state, "an ONNX file has no states")
        from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel

        opened = OnnxModel(model)
        if opened.io != "float":
            raise ConfigurationError(
                f"{opened.path} cannot be compared",
                because=f"it was exported with io={opened.io!r}, and takes integers where other forms take float tensors",
                remedy="export with io='float'",
            )
        return OnnxForm(opened, RUNTIME_NAMES[0])
    if not isinstance(model, nn.Module | torch.export.ExportedProgram):
        raise ConfigurationError(
            f"a {type(model).__name__} cannot be compared",
            because="it is neither a model, nor a graph of one, nor the path of an ONNX file",
            remedy="pass a float model, the result of fxq.trace, fxq.prepare or fxq.convert, or a path",
        )
    graph = model
    if not (isinstance(model, fx.GraphModule) and (stage_of(model) == "PREPARED" or is_deployed(model))):
        inputs = list(beside.graph.find_nodes(op="placeholder")) if isinstance(beside, fx.GraphModule) else []
        example = _example(model, batch, len(inputs)) if isinstance(model, nn.Module) else batch
        graph = trace(model, example, options=Options(dynamic_shapes=_dynamic_shapes(example, inputs)))
    assert isinstance(graph, fx.GraphModule)
    if stage_of(graph) != "PREPARED":
        refuse("state", state, "only prepared models have states")
    return GraphForm(graph, None if state is None else State(state))


def _tensors(nest: Any) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(nest))


def _example(model: nn.Module, batch: Any, count: int) -> Any:
    """Return a float model's arguments out of a batch: those that forward requires, and others up to so many tensors."""
    example = example_inputs(model, batch)
    if isinstance(example, tuple) and isinstance(batch, list | tuple) and _tensors(example) < count:
        longer = (tuple(batch[:number]) for number in range(len(example) + 1, len(batch) + 1))
        return next((arguments for arguments in longer if _tensors(arguments) == count), example)
    return example


def _dynamic_shapes(example: Any, inputs: Sequence[fx.Node]) -> Any:
    """Return the dimension of the batch in example inputs, as in a graph of the same model; None if it is 0, or not known."""
    axes = {argument_name(node): known.batch_axis if isinstance(known := fact(node), TensorFact) else None for node in inputs}
    arguments = (example,) if isinstance(example, Tensor) else example
    if not any(axes.values()) or _tensors(arguments) != len(axes):
        return None
    named = isinstance(arguments, Mapping) and axes.keys() == arguments.keys()
    order = iter(axes[str(name)] for name in arguments) if named else iter(axes.values())

    def said(leaf: Any) -> Any:
        axis = next(order) if isinstance(leaf, Tensor) else None
        return None if axis is None else {axis: "batch"}

    return pytree.tree_map(said, arguments)


def refuse(name: str, value: Any, because: str) -> None:
    """Raise ConfigurationError for an argument that has no meaning, unless it is None."""
    if value is not None:
        raise ConfigurationError(f"{name}={value!r} means nothing here", because=because, remedy=f"leave {name} out, or pass None")


def pairs(a: Form, b: Form) -> dict[str, str]:
    """For every tensor of `b` that `a` has: the name that it has there, in the order of `b`.

    In a graph that was not prepared it is the last of the nodes that became the one; of several that one became a part of, the last has it.
    """
    order = {name: index for index, name in enumerate([*a.input_names, *a.tensors])}
    holders = {other: name for name, known in b.facts.items() for other in known.fused}
    found = {}
    for name, known in b.facts.items():
        if name in a.facts and a.facts[name].fused == known.fused:
            found[name] = name
            continue
        there = [each for each in (name, *known.fused, known.reads) if each in order]
        last = max(there, key=order.__getitem__, default=None)
        if last is not None and holders.get(last, name) == name:
            found[name] = last
    return found


def shift(a: Form, b: Form, name: str, reference: str) -> Tensor | None:
    """Return the exponents by which `a`'s tensor is to be multiplied to be on the scale of `b`'s; None where they are on the same."""
    mine, theirs = a.exponents.get(reference), b.exponents.get(name)
    if mine is None or theirs is None:
        return theirs if mine is None else -mine
    found = theirs - mine
    return found if bool(found.any()) else None


def shifted(value: Tensor, exponents: Tensor | None) -> Tensor:
    """Return a tensor times 2 to these, which are of its shape without the batch."""
    return value if exponents is None else torch.ldexp(value.double(), exponents.unsqueeze(0).to(value.device))
