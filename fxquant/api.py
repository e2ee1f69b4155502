"""The public functions: the one place where front end, passes and backends meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxquant import backends, calibration
from fxquant.errors import ConfigurationError
from fxquant.graph import Model, copy_graph, copy_parameters
from fxquant.passes import CONVERT, PREPARE
from fxquant.pipeline import BATCH_NORM_MODES, Context, Dial, check_until, run
from fxquant.prepared import quantized_operators
from fxquant.spec import QConfig, QConfigMapping, as_mapping
from fxquant.stage import Stage
from fxquant.state import State
from fxquant.target import Target
from fxquant.trace import trace

Batches = Iterable[Any]


def prepare(
    model: nn.Module, example_inputs: Any, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    dynamic_shapes: Any = None, batch_norm: str = "live", until: str | Stage | None = None,
    debug: int | None = None, dump: str | os.PathLike[str] | None = None,
) -> fx.GraphModule:  # fmt: skip
    """A trainable model of quantized operators, in state CALIBRATE, with parameters of its own.

    The caller's model is not modified. `batch_norm` says what batch norms do while training: "live" ones use
    and update batch statistics, "frozen" ones keep their running statistics. `until` stops after a pass
    ("activation.fuse") or stage and returns the graph as it is then.

    Raises UnknownTarget, TraceError, ScaleConflict or ConfigurationError.
    """
    chosen = backends.get(target)
    if batch_norm not in BATCH_NORM_MODES:
        raise ConfigurationError(f"batch_norm={batch_norm!r} is unknown", because="it is one of 'live' and 'frozen'", remedy="pass one of these")
    check_until(until, PREPARE)
    dial = Dial.of(debug, dump)
    traced = trace(model, example_inputs, dynamic_shapes)
    prepared = Model.of(copy_parameters(traced), copy_graph(traced.graph))
    prepared.meta = {**traced.meta, "target": chosen.name}
    dial.write("trace", prepared)
    context = Context(chosen, as_mapping(qconfig), batch_norm, dial.debug)
    run(prepared, PREPARE, context, dial, until)
    return prepared


def convert(
    prepared: fx.GraphModule, *, until: str | Stage | None = None, debug: int | None = None, dump: str | os.PathLike[str] | None = None
) -> fx.GraphModule:
    """The integer model: a graph of integer primitives with the weights and scales of this moment.

    It takes and returns what the float model does. The prepared model is left untouched. Raises
    NotCalibrated where a scale is unknown, and AccumulatorOverflow where a sum cannot be proved to fit.
    """
    target = backends.get(calibration.prepared_target(prepared))
    for operator in quantized_operators(prepared).values():
        operator.output.require()
    check_until(until, CONVERT)
    integer = Model.of(prepared, copy_graph(prepared.graph))
    dial = Dial.of(debug, dump)
    dial.count = len(PREPARE) + 1
    run(integer, CONVERT, Context(target, QConfigMapping()), dial, until)
    integer.eval()
    return integer
