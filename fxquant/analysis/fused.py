"""An integer model as its kernels run it: a form that `verify` compares, and that `explain` reports on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.recording import OUTPUTS, PRIMITIVE_KINDS, GraphForm, Values, Wanted, outputs, same_draws
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.ir.integer import kernel
from fxquant.ir.model import RUNNER
from fxquant.kernels.runner import Runner, runs_here
from fxquant.primitives import PRIMITIVES


class KernelForm(GraphForm):
    """An integer model with kernels. It shows the tensors that kernels are for, and what the model returns."""

    def __init__(self, model: fx.GraphModule, runner: Runner) -> None:
        super().__init__(model)
        self.runner, self.label = runner, "kernels"
        made = (node for node in model.graph.nodes if kernel(node) is not None)
        self.tensors: Mapping[str, str] = {node.name: PRIMITIVE_KINDS[PRIMITIVES[node.target].kind] for node in made}

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


def description(model: fx.GraphModule, machine: bool) -> Iterator[str]:
    """Sentences about the kernels that have run, or are to, where they are not used; with `machine`, about every kernel there is.

    For that the model is run once, on zeros, if it has not run yet.
    """
    runner = runner_of(model)
    if runner is None:
        if machine:
            yield "it runs the primitives without kernels"
        return
    if machine and not runner.choices():
        _run_once(model, runner)
    for node, choice in runner.choices():
        because = "; ".join(f"{name}: {why}" for name, why in choice.refused.items())
        if choice.implementation is None:
            yield f"%{node} runs its primitives, not the kernel for a {choice.kernel}: {because}"
        elif machine:
            yield f"%{node} runs the kernel for a {choice.kernel}: {choice.implementation}" + (f" ({because})" if because else "")


def _run_once(model: fx.GraphModule, runner: Runner) -> None:
    inputs: list[Tensor] = []
    for node in model.graph.find_nodes(op="placeholder"):
        known = fact(node)
        assert isinstance(known, TensorFact)
        inputs.append(torch.zeros(known.at(1), dtype=known.dtype, device="cpu"))
    if all(tensor.device.type == "cpu" for tensor in model.buffers()):
        runner.program(model, inputs)
