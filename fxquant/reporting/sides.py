"""The two sides of a comparison: a form of a model, the facts of its tensors, and the pairs of tensors of both sides."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.analysis.layers import layers
from fxquant.analysis.recording import QUANTIZED, GraphForm, OnnxForm, Values, Wanted
from fxquant.errors import ConfigurationError
from fxquant.frontend import trace
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import argument_name, fact, is_deployed, stage_of
from fxquant.ir.integer import QParams, channel_exponents
from fxquant.prepared.batches import example_inputs
from fxquant.prepared.channels import tensor_exponents
from fxquant.prepared.nodes import is_dequantize, is_quantize
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.state import State

STATES_OF_FLOAT = (State.FLOAT, State.CALIBRATE)


@dataclass(frozen=True)
class Facts:
    """The facts of a tensor of one side.

    operator   what computes it
    source     the user's line
    grid       its scale and dtype; None where it is computed in float
    fused      the nodes that were fused into its node
    reads      the source of a tensor that is quantized as it is; "" for any other
    because    why it is integer or float
    macs       multiply-accumulates that it takes
    parts      for several tensors on one grid: their names, and by how many dB this grid is coarser than their own
    """

    operator: str
    source: str = ""
    grid: QParams | None = None
    fused: tuple[str, ...] = ()
    reads: str = ""
    because: str = ""
    macs: int = 0
    parts: tuple[tuple[str, float], ...] = ()


class Side:
    """A form of a model with the facts of its tensors.

    facts      of every tensor that can be compared, by name, in the order they are computed
    exponents  of those that are not the float model's: they are that times 2 to these
    inputs     the names of the model's inputs
    real       whether its numbers are those of the float model: a traced graph, or a prepared model in a state that computes in float
    """

    def __init__(self, form: GraphForm | OnnxForm) -> None:
        self.form = form
        self.exponents: dict[str, Tensor] = {}
        if isinstance(form, GraphForm):
            self._of_graph(form)
        else:
            self._of_file(form)

    def _of_graph(self, form: GraphForm) -> None:
        model = form.model
        stage = stage_of(model)
        self.inputs = [node.name for node in model.graph.nodes if node.op == "placeholder"]
        self.facts: dict[str, Facts] = {}
        operands = {node.name: node.all_input_nodes for node in model.graph.nodes}
        for layer in layers(model):
            node = form.nodes[layer.name]
            if layer.name in form.tensors and not is_dequantize(model, node):
                reads = operands[layer.name][0].name if is_quantize(model, node) else ""
                because = layer.reason or "; ".join(layer.notes)
                self.facts[layer.name] = Facts(
                    layer.operator, layer.source, layer.grid, layer.fused, reads, because, layer.macs, layer.parts
                )
        state = form.state or next((operator.state for operator in quantized_operators(model).values()), State.VALIDATE)
        self.real = not is_deployed(model) and (stage != "PREPARED" or state in STATES_OF_FLOAT)
        if stage == "PREPARED":
            self.exponents = tensor_exponents(model)
        elif is_deployed(model):
            known = {node.name: channel_exponents(node) for node in model.graph.nodes}
            self.exponents = {name: torch.tensor(value, device="cpu") for name, value in known.items() if value is not None}

    def _of_file(self, form: OnnxForm) -> None:
        from fxquant.backends.onnx import reading

        opened = form.onnx
        self.inputs, self.real = list(opened.input_names), False
        made_of = {entry["tensor"]: entry["name"] for entry in opened.metadata["inputs"] if entry.get("tensor")}
        operators = reading.operators(opened)
        provenance = opened.metadata.get("provenance", {})
        self.facts = {}
        for name, kind in form.tensors.items():
            entry = opened.tensors[name]
            if kind == QUANTIZED and "scale" in entry:
                scale = entry["scale"]
                stored = entry.get("storage") == entry["dtype"]
                grid = QParams(
                    tuple(scale) if isinstance(scale, list) else scale,
                    entry["dtype"],
                    entry.get("axis"),
                    int(entry.get("zero_point", 0)) if stored else 0,
                )
                fused = tuple(provenance.get(name, {}).get("fused", ()))
                operator = "quantize" if name in made_of else operators.get(opened.value(name), "")
                self.facts[name] = Facts(operator, grid=grid, fused=fused, reads=made_of.get(name, ""))
        for name, entry in provenance.items():
            if entry.get("exponents"):
                self.exponents[name] = torch.tensor(entry["exponents"], device="cpu", dtype=torch.int64)

    def values(self, inputs: Sequence[Any], names: Sequence[str]) -> Values:
        """Return these tensors of a batch as floats; inputs of the model are as they were given. "output 0", … are the outputs."""
        wanted = Wanted(frozenset(["outputs"]), frozenset(names) - frozenset(self.inputs), real=True)
        found = self.form.run(inputs, wanted)
        return found | {name: value for name, value in zip(self.inputs, inputs, strict=True) if name in names}


def side_of(model: Any, batch: Any, state: State | str | None, beside: Any = None) -> Side:
    """Return the side of a float model, a graph at any stage, or the path of an ONNX file. Raises ConfigurationError for anything else.

    `beside` is what it is compared with: where that is a graph, a float model's batch is in the dimensions that it has there.
    """
    if isinstance(model, str | os.PathLike):
        _refuse(state, "an ONNX file has no states")
        from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel

        opened = OnnxModel(model)
        if opened.io != "float":
            raise ConfigurationError(
                f"{opened.path} cannot be compared",
                because=f"it was exported with io={opened.io!r}, and takes integers where other forms take float tensors",
                remedy="export with io='float'",
            )
        return Side(OnnxForm(opened, RUNTIME_NAMES[0]))
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
        graph = trace(model, example, _dynamic_shapes(example, inputs))
    assert isinstance(graph, fx.GraphModule)
    if stage_of(graph) != "PREPARED":
        _refuse(state, "only prepared models have states")
    return Side(GraphForm(graph, None if state is None else State(state)))


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


def _refuse(state: State | str | None, because: str) -> None:
    if state is not None:
        raise ConfigurationError(f"a state of {state!r} means nothing here", because=because, remedy="pass None in its place")


def pairs(a: Side, b: Side) -> dict[str, str]:
    """For every tensor of `b` that `a` has: the name that it has there, in the order of `b`.

    In a graph that was not prepared it is the last of the nodes that became the one; of several that one became a part of, the last has it.
    """
    order = {name: index for index, name in enumerate([*a.inputs, *a.form.tensors])}
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


def shift(a: Side, b: Side, name: str, reference: str) -> Tensor | None:
    """Return the exponents by which `a`'s tensor is to be multiplied to be on the scale of `b`'s; None where they are on the same."""
    mine, theirs = a.exponents.get(reference), b.exponents.get(name)
    if mine is None or theirs is None:
        return theirs if mine is None else -mine
    found = theirs - mine
    return found if bool(found.any()) else None


def shifted(value: Tensor, exponents: Tensor | None) -> Tensor:
    """Return a tensor times 2 to these, which are of its shape without the batch."""
    return value if exponents is None else torch.ldexp(value.double(), exponents.unsqueeze(0).to(value.device))
