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
from fxquant.backends.export import export_onnx
from fxquant.backends.runtime import RUNTIME_NAMES, OnnxModel
from fxquant.progress import progress
from fxquant.trace import trace
from fxquant.verify import Form, IntegerForm, OnnxForm, Report, _count, check_batches, compare, form_of

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


def verify(first: Any, second: Any, batches: Batches, *, show_progress: bool | None = None) -> Report:
    """Compare two forms of a model bit for bit: prepared, integer, or the path of an exported ONNX file.

    An ONNX file is run with all optimisations, with none, with one thread and two, and by the reference
    evaluator. Every quantized tensor is compared, not only the outputs. Where float operators stand between
    integer segments, each segment is fed from PyTorch and must be equal; what the float operators flipped is
    counted apart, as `flips`.

    The report is true if nothing differed; `mismatches` counts differing elements; `first` locates the first.
    """
    graph = next((m for m in (first, second) if isinstance(m, fx.GraphModule)), None)
    if graph is None:
        raise ConfigurationError("two ONNX files cannot be compared", because="the batches are checked against a graph", remedy="pass the integer model as one of the two")
    integer = next((m for m in (first, second) if isinstance(m, fx.GraphModule) and m.meta.get("stage") == "INTEGER"), None)
    inputs = list(check_batches(graph, [batches] if isinstance(batches, torch.Tensor) else batches))
    report = Report()
    a, *others = (first, second) if isinstance(first, fx.GraphModule) else (second, first)
    left = form_of(a)
    feed = left.crossings if isinstance(left, IntegerForm) else []
    steps: list[tuple[Form, list[str]]] = []
    if isinstance(others[0], str | os.PathLike):
        opened = OnnxModel(others[0])
        steps = [(OnnxForm(opened, runtime, feed), feed) for runtime in RUNTIME_NAMES]
    else:
        steps = [(form_of(others[0]), [])]
    for form, _ in progress(steps, len(steps), "verifying", show_progress):
        compare(left, form, inputs, integer, report)
    if feed:
        report.flips = _flips(left, OnnxForm(OnnxModel(others[0]), RUNTIME_NAMES[0], []), inputs)
    return report


def _flips(left: Form, whole: OnnxForm, inputs: list[list[torch.Tensor]]) -> int:
    """Elements that differ where float operators hand over, when the file runs on its own."""
    count = Report()
    for batch in inputs:
        a, b = left.run(batch, False), whole.run(batch, False)
        names = getattr(left, "crossings", [])
        _count({n: a[n] for n in names}, b, count)
    return count.mismatches
