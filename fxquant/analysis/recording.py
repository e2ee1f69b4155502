"""The values of tensors inside of a model, batch by batch, in whatever form the model is.

A form runs one batch and shows what it was asked for; nothing of a batch is kept when the next one comes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError
from fxquant.ir.graph import computes_tensor, is_deployed, stage_of
from fxquant.ir.integer import QParams, zero_point
from fxquant.ir.interpreter import Interpreter
from fxquant.prepared.batches import bad_batch, model_inputs
from fxquant.prepared.nodes import grid_of, primitive_of, quantized_operator
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.state import State

QUANTIZED, DYNAMIC, ACCUMULATORS, FLOAT, OUTPUTS = "quantized", "dynamic", "accumulators", "float", "outputs"
KINDS = (QUANTIZED, DYNAMIC, ACCUMULATORS, FLOAT, OUTPUTS)
Values = dict[str, Tensor]  # by name, in the order they are computed; the outputs, "output 0", …, come last

# What a state is recorded as: the same numbers, and nothing observes, and no statistics move.
STILL = {State.CALIBRATE: State.FLOAT, State.TRAIN: State.VALIDATE}
PRIMITIVE_KINDS = {"quantized": QUANTIZED, "plain": QUANTIZED, "accumulator": ACCUMULATORS, "float": FLOAT, "dynamic": DYNAMIC}


class Form(Protocol):
    """One form of a model.

    label    what reports call it
    tensors  the kind of every tensor it can show, by name, in the order they are computed
    """

    label: str
    tensors: Mapping[str, str]

    def inputs(self, batch: Any, index: int) -> list[Any]:
        """Return the model's inputs out of a batch. Raises CalibrationError if it does not fit."""

    def run(self, inputs: Sequence[Any], wanted: Wanted) -> Values:
        """Return the wanted tensors of one batch."""


@dataclass(frozen=True)
class Wanted:
    """The tensors that are wanted: of these kinds, and of these names; with `real`, quantized ones are dequantized."""

    kinds: frozenset[str]
    names: frozenset[str] = frozenset()
    real: bool = False

    @staticmethod
    def of(*kinds: str, real: bool = False) -> Wanted:
        return Wanted(frozenset(kinds) & frozenset(KINDS), frozenset(kinds) - frozenset(KINDS), real)

    def among(self, tensors: Mapping[str, str]) -> list[str]:
        """Return the names of the wanted ones among these tensors."""
        return [name for name, kind in tensors.items() if kind in self.kinds or name in self.names]

    def check(self, form: Form) -> None:
        """Raise ConfigurationError for a name that the form has no tensor of."""
        for name in sorted(self.names - form.tensors.keys()):
            near = difflib.get_close_matches(name, [*KINDS, *form.tensors], n=1)
            raise ConfigurationError(
                f"the model has no tensor {name!r} to record",
                because=f"kinds are {', '.join(map(repr, KINDS))}, and the names of tensors that the model computes",
                remedy=f"did you mean {near[0]!r}?" if near else "fxq.layers and fxq.text list the names",
            )


def record(form: Form, batches: Iterable[Any], wanted: Wanted) -> Iterator[Values]:
    """Yield the wanted tensors of each batch, which is taken when they are asked for."""
    wanted.check(form)
    return (form.run(form.inputs(batch, index), wanted) for index, batch in enumerate(batches))


# ---- a graph ----------------------------------------------------------------------------------------------------------


class GraphForm:
    """A graph at any stage. A prepared model is run in a state, by default its own; its state is restored after each batch."""

    def __init__(self, model: fx.GraphModule, state: State | None = None) -> None:
        self.model, self.state = model, state
        self.label = "integer" if is_deployed(model) else (stage_of(model) or "traced").lower()
        self.nodes = {node.name: node for node in model.graph.nodes}
        kinds = ((node.name, self._kind(node)) for node in model.graph.nodes)
        self.tensors: Mapping[str, str] = {name: kind for name, kind in kinds if kind is not None}

    def _kind(self, node: fx.Node) -> str | None:
        """Return the kind of a node's tensor; None for an input, a parameter, or a value that is not a tensor."""
        primitive = primitive_of(node)
        if primitive is not None:
            return PRIMITIVE_KINDS[primitive.kind]
        module = quantized_operator(self.model, node)
        if module is not None:
            return DYNAMIC if module.operator.dynamic else QUANTIZED
        return FLOAT if computes_tensor(node) else None

    def inputs(self, batch: Any, index: int) -> list[Any]:
        return model_inputs(self.model, batch, index)

    def run(self, inputs: Sequence[Any], wanted: Wanted) -> Values:
        values, chosen = Values(), frozenset(wanted.among(self.tensors))

        def take(node: fx.Node, result: Any) -> None:
            if node.name in chosen and isinstance(result, Tensor):
                value = self._shown(node, result, wanted.real)
                if value is not None:
                    values[node.name] = value

        with torch.no_grad(), still(self.model, self.state), same_draws():
            result = _Reader(self.model, take).run(*inputs)
        return values | (outputs(result) if OUTPUTS in wanted.kinds else {})

    def _shown(self, node: fx.Node, value: Tensor, real: bool) -> Tensor | None:
        """Return a tensor as it is recorded; None where integers are wanted and it has none."""
        kind, module = self.tensors[node.name], quantized_operator(self.model, node)
        if kind in (FLOAT, DYNAMIC) or (module is not None and real):
            return value.clone()  # float operators may write into their operand
        if module is None:
            grid, centred = grid_of(self.model, node), value.to(torch.int64) - zero_point(node)
            return _real(centred, grid) if real and grid is not None else centred
        if module.state is State.FLOAT or (not module.plain and module.output.follows_sum):
            return None
        if module.plain:
            return value.to(torch.int64)
        return torch.round(value.double() / module.output.scale.double()).to(torch.int64)


class _Reader(Interpreter):
    """Shows every value as it is computed. Nothing refers back to it, so that what it holds of a batch is gone when it has run."""

    def __init__(self, model: fx.GraphModule, take: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(model)
        self.take = take

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.take(n, result)
        return result


@contextmanager
def still(model: fx.GraphModule, state: State | None) -> Iterator[None]:
    """Inside, the operators of a prepared model are in `state`, or in their own, and nothing of the model changes by running it."""
    operators = quantized_operators(model).values()
    states = [operator.state for operator in operators]
    training = {module: module.training for module in model.modules()}  # float operators on the host may depend on it
    model.eval()
    try:
        for operator in operators:
            wanted = state or operator.state
            operator.state = STILL.get(wanted, wanted)
        yield
    finally:
        for operator, before in zip(operators, states, strict=True):
            operator.state = before
        for module, flag in training.items():
            module.training = flag


@contextmanager
def same_draws() -> Iterator[None]:
    """Inside, random numbers come from one seed: all forms of a model that draws them draw the same. The generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _real(value: Tensor, grid: QParams) -> Tensor:
    """Integers times their scale: float32, one product, as `dequantize` forms it."""
    scale = torch.tensor(grid.scale, dtype=torch.float32, device=value.device)
    return value.float() * (scale if grid.axis is None else scale.reshape(-1, *[1] * (-grid.axis - 1)))


def outputs(result: Any) -> Values:
    """Return the outputs of a model, by name."""
    found: list[Tensor] = []
    fx.node.map_aggregate(result, lambda value: found.append(value) if isinstance(value, Tensor) else None)
    return {f"output {index}": value for index, value in enumerate(found)}


# ---- a file -----------------------------------------------------------------------------------------------------------


class OnnxForm:
    """An exported file in one runtime; `feed` names values that are given to it, in `given`, instead of being computed."""

    def __init__(self, onnx_model: Any, runtime: str, feed: Sequence[str] = ()) -> None:
        self.onnx, self.runtime, self.feed = onnx_model, runtime, feed
        self.label = runtime
        graph = onnx_model.model.graph
        shown = {info.name for info in (*graph.value_info, *graph.output)}
        kinds = {name: PRIMITIVE_KINDS[entry["kind"]] for name, entry in onnx_model.tensors.items()}
        self.tensors: Mapping[str, str] = {name: kind for name, kind in kinds.items() if onnx_model.value(name) in shown}
        self.runners: dict[tuple[str, ...], Any] = {}
        self.given: Values = {}

    def inputs(self, batch: Any, index: int) -> list[Any]:
        """Return the leading tensors of a batch, or those of the inputs' names."""
        names = self.onnx.input_names
        found = [batch.get(name) for name in names] if isinstance(batch, Mapping) else pytree.tree_leaves(batch)[: len(names)]
        if len(found) < len(names) or not all(isinstance(value, Tensor) for value in found):
            raise bad_batch(
                index, f"the inputs of {self.onnx.path} are {', '.join(names)}", "yield a tensor for each, in this order or by name"
            )
        return found

    def run(self, inputs: Sequence[Any], wanted: Wanted) -> Values:
        names = wanted.among(self.tensors)
        feeds = dict(zip(self.onnx.input_names, inputs, strict=True))
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
        scale = entry["scale"]
        return _real(integers, QParams(tuple(scale) if isinstance(scale, list) else scale, entry["dtype"], entry.get("axis")))

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
