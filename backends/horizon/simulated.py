"""A compiled program in the vendor's simulator, as a form of a model that `verify` and `record` run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.recording import ACCUMULATORS, QUANTIZED, Form, GraphForm, Values, Wanted, returned
from fxquant.backends.horizon.compiled_program import Binary, Feature, inner_values
from fxquant.backends.horizon.export import LAYERS
from fxquant.backends.onnx.horizon import Connections, Place, horizon_values
from fxquant.errors import CompilationError, ExportError
from fxquant.ir.graph import BatchDim, TensorFact, fact
from fxquant.ir.integer import qparams
from fxquant.support import logger

QUANTIZED_MODEL = "_quantized_model.onnx"
CHANNELS_LAST = ("bernoulli2",)  # marches whose programs take and return every image channels last


class SimulatedForm(Form):
    """The BPU programs of a file. Each is given the integers of the integer graph at its inputs, one row of a batch at a time.

    unseen   tensors at the ends of programs that cannot be compared: name and reason
    given    quantized tensors that programs are given but do not compute: the processor does, or the quantization of an input
    """

    def __init__(self, path: Path, integer: fx.GraphModule) -> None:
        self.binary, self.reference = Binary(path), GraphForm(integer)
        self.march = integer.meta["target"].march
        self.quantized = path.parent / f"{path.stem}{QUANTIZED_MODEL}"
        about = path.parent.parent / LAYERS
        outputs = json.loads(about.read_text(encoding="utf-8")).get("outputs", {}) if about.is_file() else {}
        turned, values = [name for name, described in outputs.items() if described["layout"] is not None], horizon_values(integer)
        values |= {name: values[node.name] for name, node in zip(outputs, returned(integer), strict=False) if node.name in values}
        self.connections = Connections(self.quantized, values, turned)
        self.unseen: dict[str, str] = {}
        ends = [feature for program in self.binary.programs for feature in program.outputs]
        self.places = {feature: place for feature in ends if (place := self._output(feature)) is not None}
        self.given = {feature: self._input(feature) for program in self.binary.programs for feature in program.inputs}
        _require(bool(self.places), path, f"none of its outputs is a tensor of this model: {self.unseen}")
        order = list(self.reference.tensors)
        computed = {place.node for place in self.places.values()}
        self.tensors = {name: QUANTIZED for name in sorted(computed, key=order.index)}
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
        _require(
            place is not None and place.node in self.reference.tensors,
            self.binary.path,
            f"its input {feature.name} is not a quantized tensor of this model",
        )
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
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

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
            expected = graph.get(place.node)
            if expected is not None and expected.numel() == values[name].numel():
                turned = expected.dim() == 4 and (place.channels_last or values[name].shape != expected.shape)
                integers[place.node] = _in_order(values[name].to(torch.int64), expected, turned)
        return integers

    def _rows(self, inputs: Sequence[Any]) -> Iterable[list[Any]]:
        """Yield the inputs of each item of a batch; the batch as it is if the model has a fixed batch size."""
        shapes = [fact(node) for node in self.reference.model.graph.find_nodes(op="placeholder")]
        batched = [isinstance(each, TensorFact) and bool(each.shape) and isinstance(each.shape[0], BatchDim) for each in shapes]
        if not any(batched):
            return [list(inputs)]
        count = next(len(value) for value, rows in zip(inputs, batched, strict=True) if rows)
        return (
            [value[index : index + 1] if rows else value for value, rows in zip(inputs, batched, strict=True)] for index in range(count)
        )

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
        return rank == 4 and (place.channels_last or self.march in CHANNELS_LAST)

    def _arranged(self, value: Tensor, place: Place, feature: Feature) -> Tensor:
        """Return a tensor of the graph in the program's order of dimensions; an image from a camera is channels last."""
        turned = self._last(value.dim(), place) or feature.pyramid or (value.dim() == 4 and feature.shape != tuple(value.shape))
        return (value.permute(0, 2, 3, 1) if turned else value).reshape(feature.shape)


def _in_order(value: Tensor, like: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return value.reshape(like.shape)
    rows, channels, height, width = like.shape
    return value.reshape(rows, height, width, channels).permute(0, 3, 1, 2)


def _require(holds: bool, path: Path, because: str) -> None:
    """Raise ExportError if a file is not the program of a model."""
    if not holds:
        raise ExportError(
            f"{path} is the program of another model",
            because=because,
            remedy="pass the .bin that fxq.board.compile_horizon made of this model's folder",
        )
