"""An integer model as its kernels run it, which `verify` compares and `explain` reports on; and the layers alike in a recurrence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.layers import Layer, layers
from fxquant.analysis.recording import OUTPUTS, PRIMITIVE_KINDS, GraphForm, Values, Wanted, outputs, same_draws
from fxquant.ir.graph import TensorFact, fact
from fxquant.ir.integer import kernel, origin
from fxquant.ir.model import RUNNER
from fxquant.kernels.program import Choice
from fxquant.kernels.runner import Runner, runs_here
from fxquant.prepared.stage import primitive_of
from fxquant.primitives import PRIMITIVES, Role, role_of

PRODUCTS = frozenset({Role.CONVOLUTION, Role.LINEAR, Role.MATRIX_PRODUCT})  # roles of multiply-accumulates


class KernelForm(GraphForm):
    """An integer model with kernels. It shows the tensors that kernels are for, and what the model returns."""

    def __init__(self, model: fx.GraphModule, runner: Runner) -> None:
        super().__init__(model)
        self.runner, self.label = runner, "kernels"
        made = (node for node in model.graph.nodes if kernel(node) is not None)
        self.tensors = {node.name: PRIMITIVE_KINDS[PRIMITIVES[node.target].kind] for node in made}

    def run(self, inputs: Sequence[Any], wanted: Wanted) -> Values:
        if not runs_here(inputs):
            return Values()
        with torch.no_grad():
            with same_draws():
                program = self.runner.program(self.model, inputs)
            with same_draws():
                found, result = program.values(inputs)
        values = {name: found[name] for name in wanted.among(self.tensors) if name in found}
        return values | (outputs(result) if OUTPUTS in wanted.kinds else {})


def runner_of(model: Any) -> Runner | None:
    """Return the runner of a model; None if the graph itself is run."""
    found = getattr(model, "__dict__", {}).get(RUNNER)
    return found if isinstance(found, Runner) else None


def kernel_forms(*models: Any) -> list[KernelForm]:
    """Return the forms of those of the models that run with kernels."""
    return [KernelForm(model, runner) for model in models if (runner := runner_of(model)) is not None]


@dataclass(frozen=True)
class OperatorRun:
    """How one operator of an integer model is computed on this machine: by kernels, or by its primitives, and why.

    layer       the operator, with its name and its multiply-accumulates
    kernels     the choice at each of its nodes with a kernel, by name
    primitives  its other nodes that compute, by name, each with the reason why no kernel serves it; "" for a primitive without a kernel
    moves       whether it only moves memory: its result holds the elements of its operands
    because     why nodes of it run without a kernel; "" where all have one
    macs        its multiply-accumulates, if kernels compute them; else 0
    """

    layer: Layer
    kernels: Mapping[str, Choice]
    primitives: Mapping[str, str]
    moves: bool
    because: str
    macs: int

    @property
    def fast(self) -> bool:
        """Whether kernels compute all of it."""
        return not self.because

    @property
    def disagrees(self) -> tuple[str, ...]:
        """The implementations that are not used because they computed other bits; others were not applicable."""
        return tuple(name for choice in self.kernels.values() for name in choice.disagrees)


def operator_runs(model: fx.GraphModule) -> tuple[OperatorRun, ...]:
    """Return how each operator of an integer model is computed for inputs of the sizes that came last.

    A model that has not run yet is run once, on zeros. A model without kernels, or on another device than the CPU, runs its primitives.
    """
    runner = runner_of(model)
    choices = {} if runner is None else runner.choices(model, prove=True) or _run_once(model, runner)
    at: dict[str, dict[fx.Node, Choice]] = {}
    for node, choice in choices.items():
        at.setdefault(origin(node), {})[node] = choice
    without = "" if choices else "it runs the primitives without kernels" if runner is None else "kernels are for the CPU"
    return tuple(_operator_run(layer, at.get(layer.name, {}), without) for layer in layers(model))


def _operator_run(layer: Layer, choices: Mapping[fx.Node, Choice], without: str) -> OperatorRun:
    kernels = {node.name: choice for node, choice in choices.items() if choice.kernel}
    alone = {node: choice.because for node, choice in choices.items() if not choice.kernel}
    unused = [f"the kernel for a {each.kernel} is not used ({each.because})" for each in kernels.values() if each.implementation is None]
    names = dict.fromkeys(record.name for node in alone if (record := primitive_of(node)) is not None)
    if not layer.integer and not layer.dynamic and not layer.boundary:
        reasons = ["it stays in float"]
    elif without:
        reasons = [without]
    else:
        inner = [because for because in alone.values() if because] or [f"no kernel computes {', '.join(names)}"] * bool(alone)
        own = [because for node, because in alone.items() if node.name == layer.name and because]
        reasons = unused + (own or inner)
    roles = {role_of(node.target) for node in alone}
    moves = roles == {Role.MOVEMENT} and not kernels
    in_kernels = not reasons or (bool(kernels) and not unused and not without and PRODUCTS.isdisjoint(roles))
    primitives = {node.name: because for node, because in alone.items()}
    return OperatorRun(layer, kernels, primitives, moves, "; ".join(dict.fromkeys(reasons)), layer.macs * in_kernels)


def description(model: fx.GraphModule, machine: bool, steps: bool) -> Iterator[str]:
    """Sentences about operators whose kernels are not used on this machine; with `machine`, about every operator.

    With `machine` the model is run once, on zeros, if it has not run yet. Without `steps`, operators of a recurrence that are computed
    alike at each of its steps have one sentence.
    """
    runner = runner_of(model)
    if not machine and (runner is None or not runner.choices(model)):
        return
    runs = {run.layer.name: run for run in operator_runs(model)}
    known = tuple(run.layer for run in runs.values())
    for layer, again in ((layer, []) for layer in known) if steps else alike(known):
        told: dict[str, list[str]] = {}
        for each in (layer, *again):
            run = runs[each.name]
            if machine or any(choice.implementation is None for choice in run.kernels.values()):
                told.setdefault(_sentence(run), []).append(each.name)
        for sentence, (first, *others) in told.items():
            yield f"%{first} {sentence}" + (f"; at {len(others) + 1} steps, up to %{others[-1]}" if others else "")


def _sentence(run: OperatorRun) -> str:
    ran = [choice for choice in run.kernels.values() if choice.implementation is not None]
    used = [f"the kernel for a {each.kernel}: {each.implementation}" + (f" ({each.because})" if each.refused else "") for each in ran]
    if run.moves:
        return "only moves memory, without a kernel"
    if not used and not run.because:
        return "is computed by the kernel of an operator that reads it"
    if not used:
        return f"runs its primitives: {run.because}"
    return f"runs {', '.join(used)}" + (f"; the rest by its primitives: {run.because}" if run.because else "")


def _run_once(model: fx.GraphModule, runner: Runner) -> dict[fx.Node, Choice]:
    inputs: list[Tensor] = []
    for node in model.graph.find_nodes(op="placeholder"):
        known = fact(node)
        assert isinstance(known, TensorFact)
        inputs.append(torch.zeros(known.at(1), dtype=known.dtype, device="cpu"))
    if all(tensor.device.type == "cpu" for tensor in model.buffers()):
        runner.program(model, inputs)
    return runner.choices(model)


# ---- the operations of a recurrence that are alike at each of its steps ----------------------------------------------


def alike(known: tuple[Layer, ...]) -> list[tuple[Layer, list[Layer]]]:
    """Return pairs of a layer and its repetitions: in a recurrence, a layer of the first step and its counterparts at later steps."""
    grouped: list[tuple[Layer, list[Layer]]] = []
    there: dict[Any, list[Layer]] = {}
    at: dict[Any, int] = {}  # how many of a kind there were at the current step
    number, before = 0, -1
    for layer in known:
        if layer.step is None:
            grouped.append((layer, []))
            continue
        if layer.step != before:
            number, before, at = number + (layer.step < before), layer.step, {}
        kind = number, layer.part, layer.reason, layer.notes, layer.grid, layer.dtype
        at[kind] = at.get(kind, 0) + 1
        if (kind, at[kind]) in there:
            there[kind, at[kind]].append(layer)
        else:
            there[kind, at[kind]] = []
            grouped.append((layer, there[kind, at[kind]]))
    return grouped


def recurrent_parts(known: tuple[Layer, ...]) -> frozenset[str]:
    """Return the names of all layers of recurrent composites, also of layers that are computed once for all steps."""
    composites = {_composite(layer) for layer in known if layer.step is not None}
    return frozenset(layer.name for layer in known if layer.part and _composite(layer) in composites)


def _composite(layer: Layer) -> tuple[str, str]:
    return layer.part.split(":", 1)[0], layer.module
