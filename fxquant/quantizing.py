"""Quantize a model in one call."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxquant import backends
from fxquant.accuracy.observations import Observations
from fxquant.accuracy.observations import observations as observations_of
from fxquant.accuracy.walk import inputs_of
from fxquant.analysis.report import Report
from fxquant.api.files import export_onnx
from fxquant.api.preparing import OBSERVATIONS, calibrate, convert, example_of, prepare
from fxquant.frontend import FloatModel, float_model
from fxquant.ir.model import SAMPLES
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, no_batches
from fxquant.quantization.spec import QConfig, QConfigMapping, as_mapping
from fxquant.reporting.forms import Batches, verify
from fxquant.search.bit_widths import Widened, Work, require_wide, widen
from fxquant.support.arguments import PATH, checked
from fxquant.target import Target

if TYPE_CHECKING:
    from fxquant.reporting.comparing import Comparison


@dataclass
class Result:
    """The result of `quantize`: the model in every form, what has 16 bits for an accuracy, and methods to export and verify it."""

    float: nn.Module
    prepared: fx.GraphModule
    integer: fx.GraphModule
    widened: Widened | None = None

    @checked()
    def export(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the integer model as ONNX; options are as in `export_onnx`."""
        return export_onnx(self.integer, path, **options)

    @checked(path=PATH)
    def verify(self, path: str | os.PathLike[str], batches: Batches, *, runtime: str | None = None) -> Report:
        """Compare the integer model with the exported file; `runtime` is as in `fxq.verify`."""
        return verify(self.integer, path, batches, runtime=runtime)

    @checked()
    def compare(self, batches: Batches, **options: Any) -> Comparison:
        """Compare the integer model with the float one, layer by layer, with remedies; `options` are passed to `fxq.compare`."""
        from fxquant.reporting.comparing import compare

        return compare(self.float, self.integer, batches, **{"prepared": self.prepared, **options})

    @checked()
    def report(self, path: str | os.PathLike[str], batches: Any = None, **options: Any) -> Path:
        """Write a report of the model as one HTML file, compared with the float one on batches; `options` are passed to `fxq.report`."""
        from fxquant.reporting.page import report as write_report

        reference = None if batches is None else self.float
        return write_report(self.integer, path, batches, **{"reference": reference, "prepared": self.prepared, **options})


@checked(observations=OBSERVATIONS)
def quantize(
    model: FloatModel, batches: Batches, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    observations: Observations | None = None, num_batches: int | None = None, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> Result:  # fmt: skip
    """Prepare, calibrate and convert in one call. The first batch also serves as example input.

    The arguments are those of `prepare` and `calibrate`; with the option `dynamic_shapes={}` every batch must have the size of the first.
    Sizes besides the batch that differ in a list of batches vary, as `torch.export.Dim.AUTO` lets them.
    With `observations`, batches are observed only for the scales that these cannot give.
    With the option `accuracy` the tensors and weights have 16 bits with which the outputs reach it at the least cost (`Result.widened`).
    Raises the errors of `prepare`, `calibrate` and `convert`, and ConfigurationError for an accuracy where a target has no 16 bits.
    """
    as_written = float_model(model)
    chosen, mapping = backends.get(target), as_mapping(qconfig)  # before a batch is taken
    if options.accuracy is not None:
        require_wide(chosen, options)
    batches = as_batches(batches)
    iterator = iter(batches)
    try:
        first = next(iterator)
    except StopIteration:
        raise no_batches(num_batches) from None
    example, options = example_of(as_written, first, batches, num_batches, options)
    prepared = prepare(as_written, example, target, qconfig, observations=observations, options=options)
    every = itertools.chain([first], iterator)
    calibrate(prepared, every, num_batches, only_missing=observations is not None, options=options, show_progress=show_progress)
    widened = None
    if options.accuracy is not None:
        kept = prepared.__dict__[SAMPLES].inputs or inputs_of(prepared, [first], None, options)
        now = prepared, observations_of(prepared), kept, replace(options, batch_fn=None), show_progress
        prepared, widened = widen(Work(as_written, example, mapping, *now), options.accuracy)
    as_given: Any = model if isinstance(model, nn.Module | torch.export.ExportedProgram) else as_written
    return Result(as_given, prepared, convert(prepared), widened)
