"""The public functions that look at models beside each other: `verify` compares their bits, `record` gives their values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from fxquant.analysis.fused import kernel_forms
from fxquant.analysis.recording import Form, GraphForm, Wanted, crossings, float_outputs
from fxquant.analysis.report import DeviationReport, Report
from fxquant.errors import ConfigurationError, Interrupted
from fxquant.ir.graph import is_deployed, stage_of
from fxquant.prepared.batches import as_batches, length
from fxquant.quantization.spec import State
from fxquant.reporting.model_forms import OnnxForm
from fxquant.reporting.verifying import check_same_model, compare, exact_form, measure
from fxquant.support.arguments import PATH, accepted, checked
from fxquant.support.progress import progress

Batches = Iterable[Any]
PROGRAMS = (".bin", ".hbm")  # files of the vendor's compiler


@checked()
def verify(first: Any, second: Any, batches: Batches, *, show_progress: bool | None = None) -> Report:
    """Compare two forms of a model bit for bit: prepared, integer, or the path of an exported ONNX file or BPU program.

    An ONNX file is run with all optimisations, with none, with one thread and two, and by the reference
    evaluator. An integer model is compared as its primitives and as its kernels compute it.
    Every quantized tensor is compared, not only the outputs, byte for byte: 0.0 is not -0.0. Where float
    operators stand between integer segments, each segment is fed from PyTorch and must be equal; what the float operators
    flipped, there or in outputs of their own, is counted apart, as `flips`, and `floats` says how far such outputs are apart.

    The report is true if something was compared and nothing differed, so never for no batches; `mismatches` counts
    differing elements; `first` locates the first.
    A .bin that `compile_horizon` made is run in the vendor's simulator, a row of a batch at a time: every BPU program in it is given the
    integers that the integer model has at its inputs, and the integers at its outputs are compared. What the processor computes before,
    between and behind the programs is not; the report's `given` and `unseen` name it. The first difference is located inside of the
    programs, too. Raises ConfigurationError where the tool is not installed, and CompilationError where it fails.

    A file in style "qdq" is not exact by nature: its outputs are measured, and the `DeviationReport` is never true.

    A KeyboardInterrupt is raised as `Interrupted`, whose `result` is the report of what was compared until then.
    """
    if isinstance(first, str | os.PathLike):
        first, second = second, first
    left, report = exact_form(first), Report()
    given = as_batches(batches)
    inputs: Iterable[list[Any]] = (left.inputs(batch, index) for index, batch in enumerate(given))
    inputs = list(inputs) if isinstance(given, Sequence) else inputs  # what is there is checked before anything is run
    integer = next((model for model in (first, second) if isinstance(model, fx.GraphModule) and is_deployed(model)), None)
    whole: OnnxForm | None = None
    others: Sequence[Form]
    if not isinstance(second, str | os.PathLike):
        others = [exact_form(second), *kernel_forms(first, second)]
    elif Path(second).suffix in PROGRAMS:
        others = [_simulated(left, Path(second), report)]
    else:
        from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, RUNTIME_NAMES, OnnxModel

        opened = OnnxModel(accepted("verify", "path", second, PATH))
        check_same_model(left, opened)
        mine = left.model.meta["target"].name
        targets = (mine, opened.target) if opened.target not in (mine, "") else None
        if opened.style == "qdq":
            deviations = DeviationReport(targets=targets)
            files = [OnnxForm(opened, runtime, []) for runtime in MEASURED_RUNTIMES]
            _complete(measure(left, files, inputs, deviations), deviations, length(given, None), len(files), show_progress)
            return deviations
        report.targets, handed = targets, crossings(left.model)
        others = [*(OnnxForm(opened, runtime, handed) for runtime in RUNTIME_NAMES), *kernel_forms(first)]
        whole = OnnxForm(opened, RUNTIME_NAMES[0], []) if handed or float_outputs(left.model) else None
    _complete(compare(left, others, inputs, integer, report, whole), report, length(given, None), len(others), show_progress)
    return report


def _simulated(left: GraphForm, path: Path, report: Report) -> Form:
    """Return the program of an integer model in the vendor's simulator; the report names what of it cannot be compared."""
    if not is_deployed(left.model):
        raise ConfigurationError(
            "a prepared model cannot be verified against a BPU program",
            because="programs are fed the integers of an integer model",
            remedy="pass fxq.convert(prepared)",
        )
    from fxquant.backends.horizon.simulated import SimulatedForm

    form = SimulatedForm(path, left.model)
    report.unseen.update(form.unseen)
    report.given = form.fed
    return form


def _complete(steps: Iterator[None], report: Report, batches: int | None, forms: int, show: bool | None) -> None:
    """Take all steps, which add to the report; a KeyboardInterrupt is raised with the report."""
    done, total = 0, None if batches is None else batches * forms
    try:
        for _ in progress(steps, total, "verifying", show):
            done += 1
    except KeyboardInterrupt:
        of = "" if total is None else f" of {total}"
        raise Interrupted(f"verify was interrupted after {done}{of} comparisons", report) from None


@checked()
def record(
    model: Any,
    batches: Batches,
    kinds: str | Sequence[str] = ("quantized",),
    *,
    real: bool = False,
    state: State | str | None = None,
    runtime: str | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the values of chosen tensors, a dict by name for each batch; a batch is taken, and run, when its values are asked for.

    `model` is a graph at any stage (a float model as `trace` returns it) or the path of an exported ONNX file. `kinds` are any of these,
    and names of tensors:

        "quantized"     the integers of quantized tensors, as int64
        "accumulators"  the sums between them, as int64; of an integer model or a file
        "float"         the results of float operators
        "outputs"       what the model returns, flattened: "output 0", "output 1", …

    Tensors are in the order they are computed, outputs last, and have one name in all forms (see `layers`). `real` gives quantized tensors
    as the float32 numbers they stand for. A prepared model is run in `state`, or in the state its operators are in, and is
    left as it was: CALIBRATE is recorded as FLOAT and TRAIN as VALIDATE, the same numbers while nothing observes. In FLOAT, and of a
    32-bit output, it has no integers, so there are none without `real`. A file is run by `runtime`: "onnxruntime", or any other that
    `verify` uses; of its float operators only the ends of integer segments are shown.

    Raises ConfigurationError for a name that no tensor has, and while iterating CalibrationError for a batch that does not fit.
    """
    wanted = Wanted.of(*kinds, real=real)
    form, taken = _recorded(model, state, runtime), as_batches(batches)
    wanted.check(form)
    return (form.run(form.inputs(batch, index), wanted) for index, batch in enumerate(taken))


def _recorded(model: Any, state: State | str | None, runtime: str | None) -> Form:
    """Return the form of a graph or a file whose tensors are recorded. Raises ConfigurationError for anything else."""
    if isinstance(model, str | os.PathLike):
        from fxquant.backends.onnx.runtime import RUNTIME_NAMES, OnnxModel

        _refuse("state", state, "an ONNX file has no states")
        return OnnxForm(OnnxModel(accepted("record", "path", model, PATH)), runtime or RUNTIME_NAMES[0])
    if not isinstance(model, fx.GraphModule):
        raise ConfigurationError(
            f"the tensors of a {type(model).__name__} cannot be recorded",
            because="only traced, prepared and integer models, and ONNX files, name them",
            remedy="pass fxq.trace(model, example_inputs)",
        )
    _refuse("runtime", runtime, "this model is run by PyTorch")
    if stage_of(model) != "PREPARED":
        _refuse("state", state, "only prepared models have states")
    return GraphForm(model, None if state is None else State(state))


def _refuse(name: str, value: Any, because: str) -> None:
    if value is not None:
        raise ConfigurationError(f"{name}={value!r} means nothing here", because=because, remedy=f"leave {name} out")
