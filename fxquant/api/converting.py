"""Convert a prepared model to its integer model."""

from __future__ import annotations

import os

import torch
from torch import fx

from fxquant import backends
from fxquant.calibration import calibration
from fxquant.frontend import attach_call_hooks
from fxquant.ir.carried import SETTINGS, refuse_changes
from fxquant.ir.integer import set_channel_exponents
from fxquant.ir.model import CALLS, RUNNER, Model, autocast_off, collection_paused, dress_carried
from fxquant.kernels.runner import Runner
from fxquant.passes import CONVERT, PREPARE
from fxquant.pipeline import Context, Dial, check_until, run
from fxquant.prepared.channels import tensor_exponents
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.stage import Stage
from fxquant.quantization.mapping import QConfigMapping
from fxquant.support.arguments import checked
from fxquant.target import Target


@checked()
def convert(
    prepared: fx.GraphModule,
    *,
    kernels: str = "auto",
    until: str | Stage | None = None,
    debug: int | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> fx.GraphModule:
    """Return the integer model: a graph of integer primitives with the current weights and scales.

    It takes and returns what the float model does. The prepared model is not changed.

    Unless kernels="reference", it uses fast kernels on a processor from the second call with inputs of the same sizes on. They store 8-bit
    tensors as bytes and sum products of bytes. Each is proved equal to the primitives of the graph on this machine; `explain` lists which
    run, and why others do not. The results are equal.

    Raises NotCalibrated if a scale is unknown, and AccumulatorOverflow if a sum cannot be proved to fit.
    """
    calibration.require_prepared(prepared)
    target: Target = prepared.meta["target"]
    for operator in quantized_operators(prepared).values():
        if not operator.plain:
            operator.output.require()
    refuse_changes(prepared, prepared.meta.get(SETTINGS, {}))
    check_until(until, CONVERT)
    dial = Dial.of(debug, dump)
    dial.count = len(PREPARE) + 1
    with collection_paused(), autocast_off(), torch.inference_mode(False):
        # The only pass reads this graph and writes another, so no copy is needed; its owner remains the prepared model.
        integer = Model.of(prepared, prepared.graph)
        prepared.graph.owning_module = prepared
        fuses = kernels == "auto" or any(step.reaches is Stage.FUSED and until in (step.name, Stage.FUSED) for step in CONVERT)
        passes = tuple(step for step in CONVERT if fuses or step.reaches is not Stage.FUSED)
        run(integer, passes, Context(target, QConfigMapping(), kernels=backends.kernels()), dial, until)
    exponents = tensor_exponents(prepared)
    for node in integer.graph.nodes:
        if node.name in exponents:
            set_channel_exponents(node, exponents[node.name].tolist())
    run_with_kernels(integer)
    integer.training = False
    for only_prepared in (CALLS, SETTINGS):
        integer.meta.pop(only_prepared, None)
    attach_call_hooks(integer)
    dress_carried(integer)
    return integer


def run_with_kernels(integer: fx.GraphModule) -> None:
    """Let a fused model run with the kernels that are admitted on this machine."""
    if integer.meta["stage"] == Stage.FUSED.name:
        integer.__dict__[RUNNER] = Runner(backends.kernels)
