"""The values of tensors inside of a model, batch by batch: of a float model, a graph at any stage, or an exported file.

A form runs one batch and returns the requested tensors; nothing of a batch is kept when the next one comes.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.layers import layers
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import Interpreter, TensorFact, computes_tensor, fact, is_deployed, nodes_in, stage_of
from fxquant.ir.integer import QParams, channel_exponents, kernel, zero_point
from fxquant.ir.model import RUNNER
from fxquant.kernels.runner import Runner, depends_on_sizes, runs_here
from fxquant.numerics.grids import PLAIN_TYPES
from fxquant.ops import Trait
from fxquant.prepared.batches import model_inputs
from fxquant.prepared.channels import tensor_exponents
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.stage import grid_of, is_dequantize, is_dynamic, is_quantize, primitive_of, quantized_operator
from fxquant.prepared.undo import Having
from fxquant.primitives import PRIMITIVES
from fxquant.quantization.spec import State
from fxquant.support import seeded

QUANTIZED, DYNAMIC, ACCUMULATORS, FLOAT, OUTPUTS = "quantized", "dynamic", "accumulators", "float", "outputs"
KINDS = (QUANTIZED, DYNAMIC, ACCUMULATORS, FLOAT, OUTPUTS)
Values = dict[str, Tensor]  # by name, in the order they are computed; the outputs, "output 0", …, come last

SEED = 0  # of what models draw: all forms of one draw the same
# What a state is recorded as: the same numbers, and nothing observes, and no statistics move.
STILL = {State.CALIBRATE: State.FLOAT, State.TRAIN: State.VALIDATE}
PRIMITIVE_KINDS = {"quantized": QUANTIZED, "plain": QUANTIZED, "accumulator": ACCUMULATORS, "float": FLOAT, "dynamic": DYNAMIC}


@dataclass(frozen=True)
class Facts:
    """The statements of a `Form` about one tensor: fields of its `Layer`, and two more."""

    operator: str
    source: str = ""
    grid: QParams | None = None
    fused: tuple[str, ...] = ()
    reads: str = ""  # the source of a tensor that is quantized as it is; "" for any other
    because: str = ""  # why it is integer or float
    parts: tuple[tuple[str, float], ...] = ()


class Form(ABC):
    """One form of a model."""

    label: str  # its name in reports
    tensors: Mapping[str, str]  # the kind of every tensor it can show, by name, in the order they are computed
    input_names: Sequence[str]  # the names of the model's inputs

    @property
    def facts(self) -> Mapping[str, Facts]:
        """The facts of every tensor that can be compared, by name, in the order they are computed."""
        return {}

    @property
    def exponents(self) -> Mapping[str, Tensor]:
        """Return, by tensor name, exponents e of tensors that are 2**e times the float model's; here none."""
        return {}

    @property
    def real(self) -> bool:
        """Whether the recorded tensors are floats of the float model, and not integers or dequantized integers."""
        return False

    @abstractmethod
    def inputs(self, batch: Any, index: int) -> list[Any]:
        """Return the model's inputs out of a batch. Raises CalibrationError if it does not fit."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], selection: Wanted) -> Values:
        """Return the wanted tensors of one batch."""

    def values(self, inputs: Sequence[Any], names: Sequence[str]) -> Values:
        """Return the named tensors of a batch as floats; inputs of the model are returned unchanged. "output 0", … are the outputs."""
        own_inputs = {name: value for name, value in zip(self.input_names, inputs, strict=True) if name in names}
        return self.run(inputs, Wanted(frozenset([OUTPUTS]), frozenset(names) - frozenset(self.input_names), real=True)) | own_inputs


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
            because = f"kinds are {', '.join(map(repr, KINDS))}, and the names of tensors that the model computes"
            remedy = f"did you mean {near[0]!r}?" if near else "fxq.inspect.layers and fxq.text list the names"
            raise ConfigurationError(f"the model has no tensor {name!r} to record", because=because, remedy=remedy)


class GraphForm(Form):
    """A graph at any stage. A prepared model is run in a state, by default its own; its state is restored after each batch."""

    def __init__(self, model: fx.GraphModule, state: State | None = None) -> None:
        self.model, self.state = model, state
        self.label = "integer" if is_deployed(model) else (stage_of(model) or "traced").lower()
        self.nodes = {node.name: node for node in model.graph.nodes}
        self.tensors = {node.name: kind for node in model.graph.nodes if (kind := self._kind(node)) is not None}
        self.input_names = [node.name for node in model.graph.find_nodes(op="placeholder")]

    @cached_property
    def facts(self) -> Mapping[str, Facts]:
        all_facts = {}
        for layer in layers(self.model):
            node = self.nodes[layer.name]
            if layer.name in self.tensors and not is_dequantize(self.model, node):
                reads = node.all_input_nodes[0].name if is_quantize(self.model, node) else ""
                because = layer.reason or "; ".join(layer.notes)
                all_facts[layer.name] = Facts(layer.operator, layer.source, layer.grid, layer.fused, reads, because, layer.parts)
        return all_facts

    @cached_property
    def exponents(self) -> Mapping[str, Tensor]:
        if stage_of(self.model) == "PREPARED":
            return tensor_exponents(self.model)
        if not is_deployed(self.model):
            return {}
        each = {name: exponents for name, node in self.nodes.items() if (exponents := channel_exponents(node)) is not None}
        return {name: torch.tensor(exponents, device="cpu") for name, exponents in each.items()}

    @cached_property
    def real(self) -> bool:
        """Whether it is a traced graph, or a prepared model in a state that computes in float."""
        state = self.state or next((operator.state for operator in quantized_operators(self.model).values()), State.VALIDATE)
        return not is_deployed(self.model) and (stage_of(self.model) != "PREPARED" or STILL.get(state, state) is State.FLOAT)

    def _kind(self, node: fx.Node) -> str | None:
        """Return the kind of a node's tensor; None for an input, a parameter, or a value that is not a tensor."""
        if (primitive := primitive_of(node)) is not None:
            return PRIMITIVE_KINDS[primitive.kind]
        if (module := quantized_operator(self.model, node)) is not None:
            return DYNAMIC if Trait.DYNAMIC in module.operator.traits else QUANTIZED
        return FLOAT if computes_tensor(node) else None

    def inputs(self, batch: Any, index: int) -> list[Any]:
        return model_inputs(self.model, batch, index)

    def run(self, inputs: Sequence[Any], selection: Wanted) -> Values:
        values, chosen = dict[str, list[Tensor]](), frozenset(selection.among(self.tensors))

        def take(node: fx.Node, result: Any, read: tuple[Any, ...]) -> Any:
            if node.name in chosen and isinstance(result, Tensor) and (value := self._shown(node, result, selection.real)) is not None:
                values.setdefault(node.name, []).append(value)
            return result

        with torch.no_grad(), still(self.model, self.state), seeded(SEED):
            result = Seen(self.model, take).run(*inputs)
        joined = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in values.items()}  # of a loop, all steps
        return joined | (outputs(result) if OUTPUTS in selection.kinds else {})

    def _shown(self, node: fx.Node, value: Tensor, real: bool) -> Tensor | None:
        """Return a tensor as it is recorded; None where integers are wanted and it has none."""
        kind, module = self.tensors[node.name], quantized_operator(self.model, node)
        if kind in (FLOAT, DYNAMIC) or (module is not None and real):
            return value.clone()  # float operators may write into their operand
        if module is None:
            grid, centred = grid_of(self.model, node), value.to(torch.int64) - zero_point(node)
            return real_values(centred, grid) if real and grid is not None else centred
        if module.state is State.FLOAT or (not module.plain and module.output.follows_sum):
            return None
        if module.plain:
            return value.to(torch.int64)
        return torch.round(value.double() / module.output.scale.double()).to(torch.int64)


class KernelForm(GraphForm):
    """An integer model run with kernels. It returns the results of kernels, and the model's outputs."""

    def __init__(self, model: fx.GraphModule, runner: Runner) -> None:
        super().__init__(model)
        self.runner, self.label = runner, "kernels"
        computed = [node for node in model.graph.nodes if kernel(node) is not None or depends_on_sizes(node)]
        self.tensors = {node.name: PRIMITIVE_KINDS[PRIMITIVES[node.target].kind] for node in computed}

    def run(self, inputs: Sequence[Any], selection: Wanted) -> Values:
        if not runs_here(inputs):
            return Values()
        with torch.no_grad(), seeded(SEED):
            program = self.runner.program(self.model, inputs)
        with torch.no_grad(), seeded(SEED):
            computed, result = program.values(inputs)
        values = {name: computed[name] for name in selection.among(self.tensors) if name in computed}
        return values | (outputs(result) if OUTPUTS in selection.kinds else {})


def runner_of(model: Any) -> Runner | None:
    """Return the runner of a model; None if the graph itself is run."""
    runner = getattr(model, "__dict__", {}).get(RUNNER)
    return runner if isinstance(runner, Runner) else None


def kernel_forms(*models: Any) -> list[KernelForm]:
    """Return a `KernelForm` for each model that runs with kernels."""
    return [KernelForm(model, runner) for model in models if (runner := runner_of(model)) is not None]


class Seen(Interpreter):
    """Calls `see` with every node, its value and its arguments, and continues with the value that `see` returns.

    There are no reference cycles, so that the values of a batch are freed after the run.
    """

    def __init__(self, model: fx.GraphModule, see: Callable[[fx.Node, Any, tuple[Any, ...]], Any]) -> None:
        super().__init__(model)
        self.see = see

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.see(n, getattr(self, n.op)(n.target, args, kwargs), () if n.op == "placeholder" else args)


def still(model: fx.GraphModule, state: State | None) -> Having:
    """Return a context in which the operators of a prepared model are in `state`, or in their own, and nothing changes by running it."""
    operators = quantized_operators(model).values()
    states = [(operator, {"state": STILL.get(state or operator.state, state or operator.state)}) for operator in operators]
    # float operators on the host may depend on the flag
    return Having([*states, *((module, {"training": False}) for module in model.modules() if module.training)])


def real_values(value: Tensor, grid: QParams) -> Tensor:
    """Integers times their scale: float32, one product, as `dequantize` forms it."""
    scale = torch.tensor(grid.scale, dtype=torch.float32, device=value.device)
    return value.float() * (scale if grid.axis is None else scale.reshape(-1, *[1] * (-grid.axis - 1)))


def outputs(result: Any) -> Values:
    """Return the outputs of a model, by name."""
    tensors: list[Tensor] = []
    fx.node.map_aggregate(result, lambda value: tensors.append(value) if isinstance(value, Tensor) else None)
    return {f"output {index}": value for index, value in enumerate(tensors)}


# ---- The boundaries between float operators on the host and the integer segments of a model --------------------------
def crossings(model: fx.GraphModule) -> list[str]:
    """Return the names of tensors that float operators pass to integers; a dynamic layer gets float values, which it quantizes itself."""
    return [node.name for node in model.graph.nodes if _is_handed(model, node)]


def _is_handed(model: fx.GraphModule, node: fx.Node) -> bool:
    if any(is_dynamic(model, user) for user in node.users):
        return computes_tensor(node) and not _is_integer(model, node)
    if is_quantize(model, node):
        return bool(node.args[0].op != "placeholder")  # type: ignore[union-attr]
    node_fact = fact(node)
    plain = isinstance(node_fact, TensorFact) and node_fact.dtype in PLAIN_TYPES.values()
    return plain and computes_tensor(node) and not _is_integer(model, node) and any(_is_integer(model, user) for user in node.users)


def _is_integer(model: fx.GraphModule, node: fx.Node) -> bool:
    return primitive_of(node) is not None or quantized_operator(model, node) is not None


def returned(model: fx.GraphModule, everything: bool = False) -> list[fx.Node]:
    """Return the nodes of the tensors that a model returns, in order; with `everything` also nodes of values without a known shape."""
    (output,) = model.graph.find_nodes(op="output")

    def counts(node: fx.Node) -> bool:
        return isinstance(fact(node), TensorFact) or node.op == "get_attr" or (everything and fact(node) is None)

    return list(filter(counts, nodes_in(output.args)))


def float_outputs(model: fx.GraphModule) -> set[str]:
    """Return the outputs, "output 0", …, that are not the end of an integer segment, a dynamic layer's result, an input or a constant."""
    return {
        f"output {index}"
        for index, node in enumerate(returned(model))
        if node.op not in ("placeholder", "get_attr") and not is_dequantize(model, node) and not is_dynamic(model, node)
    }
