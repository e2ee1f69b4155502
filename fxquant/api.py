"""The public functions: the only module that uses front end, passes and backends together."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxquant import backends
from fxquant.analysis.check import Findings, broken_limits, findings
from fxquant.analysis.explain import explain, summary
from fxquant.analysis.layers import layers
from fxquant.analysis.report import Report
from fxquant.analysis.text import text
from fxquant.backends.onnx.layouts import LAYOUTS
from fxquant.calibration import calibration
from fxquant.calibration.left_out import leaving_out
from fxquant.calibration.lost_inputs import warn_of_lost_inputs
from fxquant.calibration.observations import Observations, restore
from fxquant.calibration.unseen import follow_unseen
from fxquant.errors import ConfigurationError
from fxquant.frontend import attach_branch, attach_input_check, attach_signature, float_model, is_traced, moved_by_forward, trace
from fxquant.frontend.fixed_batch import with_fixed_batch
from fxquant.ir.copying import copy_parameters
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_deployed, stage_of
from fxquant.ir.integer import set_channel_exponents
from fxquant.ir.model import CALLS, CARRIED, RUNNER, Model, autocast_off, collection_paused, copy_graph, look_at_constants
from fxquant.kernels.runner import Runner
from fxquant.passes import CONVERT, PREPARE
from fxquant.passes.matching import attributes
from fxquant.pipeline import BATCH_NORM_MODES, Context, Dial, Pass, check_until, run, with_own
from fxquant.prepared.batches import as_batches, no_batches
from fxquant.prepared.batches import example_inputs as batch_inputs
from fxquant.prepared.channels import tensor_exponents
from fxquant.prepared.hooks import attach_hooks
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.stage import Stage
from fxquant.quantization.mapping import DEFAULT, QConfigMapping, as_mapping, attached_qconfigs
from fxquant.quantization.spec import QConfig
from fxquant.quantization.state import State
from fxquant.reporting.forms import Batches, verify
from fxquant.serialization import load_file, save_model, save_observations
from fxquant.support.arguments import FOLDER, PATH, POSITIVE, checked, instance
from fxquant.support.files import write_files
from fxquant.support.progress import working
from fxquant.target import Target
from fxquant.tuning.equalization import by_first_batch
from fxquant.tuning.first_samples import FirstSamples

if TYPE_CHECKING:
    from fxquant.reporting.comparison import Comparison

logger = logging.getLogger("fxquant")

SHOWN_MISSING = 12  # tensors without a scale that are logged, a line each
OBSERVATIONS = instance("what fxq.observations returned", Observations).or_none("calibration observes")


@checked(observations=OBSERVATIONS)
def prepare(
    model: nn.Module,
    example_inputs: Any,
    target: str | Target = "bayes-e",
    qconfig: QConfig | QConfigMapping | None = None,
    *,
    dynamic_shapes: Any = None,
    batch_norm: str = "live",
    observations: Observations | None = None,
    adapt: bool = False,
    leaf: Any = None,
    preserve: Sequence[str] = (),
    training_branch: bool = False,
    passes: Mapping[str, Any] | None = None,
    until: str | Stage | None = None,
    debug: int | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> fx.GraphModule:
    """Return a trainable model of quantized operators, in state CALIBRATE, with its own parameters.

    `qconfig` is the QConfig of every operator, or a mapping from operators to QConfigs. An attribute `qconfig` on one of the
    model's modules overrides it for everything below that module (None: float); the nearest one takes precedence.
    The caller's model is not modified. The result also has its attributes and methods (`class_names`, `postprocess`),
    except those whose names a GraphModule has; methods are bound to the result. `until` stops after a pass ("activation.fuse")
    or stage and returns the graph of that moment.

    `observations`, from fxq.observations of a model prepared from the same float model, give the scales that calibration with the same
    batches would: for any dtypes, observers, mapping and target. If they give all, the result is in state VALIDATE. Those that they
    cannot give are logged with the reason, and fxq.calibrate(prepared, batches, only_missing=True) finds them. They hold no samples:
    weights of less than 8 bits are rounded to the nearest, and a line of the log says how to round them as `calibrate` does.

    `batch_norm` sets the behaviour of batch norms while training:

        "live"    they use and update batch statistics, as in the float model
        "frozen"  they keep their running statistics; their weight and bias are trained
        "folded"  those after a layer are multiplied into its weight and bias once, here. The layer's parameters keep their
                  names in `state_dict` (`conv.weight`), a bias that was missing is new (`conv.bias`), and the batch norm's are
                  removed. A layer called several times has parameters for each call, named after its node (`conv.weight_conv_1`).
                  Batch norms that cannot be folded into a layer are frozen.

    `adapt` replaces operators that break a limit of the target (see `check`) by equivalent ones: a large kernel or too many
    channels by a sum of convolutions, a linear layer by a 1×1 convolution, a large pooling by two. If that is not possible, the
    operator runs on the host, in float. `explain` names each, with the limit.

    `leaf` keeps modules whole, which then run as Python, in float: a class of modules, the path of one, several of these, or a function
    of a module and its path that decides for every module (see `trace`). Functions are kept by `fxq.wrap`.

    `preserve` names attributes, methods and modules of the model that this model and the integer one must have under the same names.
    Names in submodules are dotted ("head.strides", "head.decode"). Values are also in files that `save` writes. A method is not, since
    files hold no code. A module named here stays unchanged, in float, next to the graph.

    With `training_branch` the prepared model in train mode, after `prepared.train()`, returns what the float model does there. The part
    of forward under `self.training` (auxiliary heads, raw outputs for a loss) is computed in float, from the quantized tensors that it
    reads, and its parameters train. In eval mode, in the integer model and in its files it is absent. A layer may not be called
    on other tensors in train mode than in eval mode (TraceError). A prepared model with such a branch cannot be saved as a file, but its
    `state_dict` can.

    `passes` are the user's own passes: {"canonical.rewrite": fuse} runs `fuse(graph_module, context)`, or several functions in order, right
    after that pass. Each rewrites the graph in place and returns how many changes it made. The graph is then verified against the table
    of the stage, as after the compiler's own passes.

    Raises UnknownTarget, TraceError, ScaleConflict or ConfigurationError, and StageViolation for an invalid graph after an own pass.
    """
    chosen, mapping = backends.get(target), _rules(qconfig)
    pipeline = with_own(PREPARE, passes or {})
    if batch_norm not in BATCH_NORM_MODES:
        raise ConfigurationError(
            f"batch_norm={batch_norm!r} is unknown", because="it is one of 'live', 'frozen' and 'folded'", remedy="pass one of these"
        )
    if until is not None and observations is not None:
        raise ConfigurationError(
            "observations cannot be used with until=",
            because="they give scales, which a graph has once it is prepared whole",
            remedy="leave one of them out",
        )
    check_until(until, pipeline)
    dial = Dial.of(debug, dump)
    traced = trace(model, example_inputs, dynamic_shapes, leaf=leaf, preserve=preserve, training_branch=training_branch)
    with collection_paused(), autocast_off(), torch.inference_mode(False):  # the result can be trained, in whatever mode it was created
        prepared = _prepare(traced, chosen, mapping, batch_norm, dial, until, adapt, pipeline)
        if observations is not None:
            _restore(prepared, observations)
        return prepared


def _restore(prepared: fx.GraphModule, observations: Observations) -> None:
    missing = restore(prepared, observations)
    first = FirstSamples(prepared)
    if first.rounds:
        logger.warning(
            "weights of less than 8 bits are rounded to the nearest, since observations hold no samples;"
            " fxq.tuning.round_weights(prepared, batches) rounds them so that their errors cancel, as calibration does"
        )
    if first.corrects:
        logger.info(
            "biases are not corrected, since observations hold no samples;"
            " fxq.tuning.correct_bias(prepared, batches) corrects them, as calibration does by 64 samples"
        )
    if not missing:
        calibration.set_state(prepared, State.VALIDATE)
        return
    tensors = "\n".join(f"  %{name}: {because}" for name, because in list(missing.items())[:SHOWN_MISSING])
    logger.warning(
        "scales that the observations cannot give: %d; fxq.calibrate(prepared, batches, only_missing=True) finds them\n%s%s",
        len(missing),
        tensors,
        f"\n  and {len(missing) - SHOWN_MISSING} more" if len(missing) > SHOWN_MISSING else "",
    )


def _rules(qconfig: QConfig | QConfigMapping | None) -> QConfigMapping:
    """Return the mapping a user means. Warns of one whose setter was called, and whose result was dropped."""
    mapping = as_mapping(qconfig)
    rules = ", ".join(str(rule) for rule, _ in mapping.rules())
    if rules:
        logger.info("rules of the qconfig: %s", rules)
    elif mapping.lost_rules:
        logger.warning(
            "the QConfigMapping has no rules, only a default, and the mapping that its setter returned is gone: setters return a new"
            " mapping and change none, as in mapping = mapping.set_module_name(...)"
        )
    return mapping


def _prepare(
    traced: fx.GraphModule,
    target: Target,
    qconfig: QConfigMapping,
    batch_norm: str,
    dial: Dial,
    until: str | Stage | None,
    adapt: bool,
    passes: Sequence[Pass] = PREPARE,
) -> fx.GraphModule:
    _require_float32(traced)
    attached = attached_qconfigs(traced)
    backends.require_dtypes(target, [*attributes(traced, attached), *qconfig.rules(), (DEFAULT, qconfig.default)])
    prepared = Model.of(copy_parameters(traced), copy_graph(traced.graph))
    prepared.meta = {**traced.meta, "target": target}
    attach_signature(prepared)
    attach_input_check(prepared)
    _carry(prepared)
    attach_branch(prepared)
    dial.write("trace", prepared)
    context = Context(target, qconfig, batch_norm, dial.debug, attached, adapt=adapt)
    stopped = run(prepared, passes, context, dial, until)
    if not stopped:
        known = layers(prepared)
        logger.info("%s", summary(known))
        broken = sum(1 for _ in broken_limits(prepared, known, target))
        if broken:
            logger.warning("limits of %s that are broken: %d; fxq.check says where, and what to do", target.name, broken)
        _warn_of_state(prepared)
        attach_hooks(prepared, traced.graph)
    return prepared


def _warn_of_state(prepared: fx.GraphModule) -> None:
    found = [name + f" ({line})" * bool(line) for name, line in moved_by_forward(prepared).items()]
    if found:
        logger.warning(
            "forward moves tensors in train mode that training here does not move: %d; move them in your training loop, replace them by "
            "constants first (torch.nn.utils.parametrize.remove_parametrizations), or keep their module whole, in float, by leaf=\n%s",
            len(found),
            "\n".join(
                f"  {line}"
                for line in [*found[:SHOWN_MISSING], *([f"and {len(found) - SHOWN_MISSING} more"] * (len(found) > SHOWN_MISSING))]
            ),
        )


def _require_float32(traced: fx.GraphModule) -> None:
    """Raise ConfigurationError for a half-precision input, and for float64 in place of float32."""
    inputs = {
        str(node.target): known.dtype for node in traced.graph.find_nodes(op="placeholder") if isinstance(known := fact(node), TensorFact)
    }
    refused = (torch.float16, torch.bfloat16, *([] if torch.float32 in inputs.values() else [torch.float64]))
    for input, dtype in inputs.items():
        if dtype in refused:
            name = str(dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"a {name} model cannot be prepared",
                because=f"its input {input} is {name}, and integers and scales are those of float32 tensors",
                remedy="convert model and inputs first: model.float() and x.float()",
            )


@checked()
def check(
    model: nn.Module,
    example_inputs: Any = None,
    target: str | Target = "bayes-e",
    qconfig: QConfig | QConfigMapping | None = None,
    *,
    dynamic_shapes: Any = None,
    adapt: bool = False,
    leaf: Any = None,
) -> Findings:
    """Find what of the model a target does not support, before calibration: broken limits, and operators left in float.

    The result is true if nothing was found; it iterates over the findings, and prints as a table of layer, operator,
    limit, source line and remedy. The model is not changed. A batch size that is not fixed is not
    checked; pass `dynamic_shapes={}` to check the example's. `adapt` leaves out what `prepare(…, adapt=True)` would replace.

    A prepared model is checked against the target it was prepared for; all other arguments are ignored.

    Raises UnknownTarget, TraceError or ConfigurationError.
    """
    if isinstance(model, fx.GraphModule) and stage_of(model) == "PREPARED":
        return findings(model, model.meta["target"])
    chosen, mapping = backends.get(target), _rules(qconfig)
    traced = trace(model, example_inputs, dynamic_shapes, leaf=leaf)
    with collection_paused(), autocast_off():
        # Fusion comes first: a target's limits are about the operators it runs.
        annotated = _prepare(traced, chosen, mapping, "live", Dial(0, None), "boundary.insert", adapt)
    return findings(annotated, chosen)


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
    _run_with_kernels(integer)
    integer.training = False
    integer.meta.pop(CALLS, None)
    attach_signature(integer)
    attach_input_check(integer)
    _carry(integer)
    return integer


def _carry(model: fx.GraphModule) -> None:
    """Give a model the preserved attributes of submodules."""
    if CARRIED in model.meta:
        model.meta[CARRIED].dress(model)


def _run_with_kernels(integer: fx.GraphModule) -> None:
    """Let a fused model run with the kernels that are admitted on this machine."""
    if integer.meta["stage"] == Stage.FUSED.name:
        integer.__dict__[RUNNER] = Runner(backends.kernels)


@checked()
def calibrate(
    prepared: fx.GraphModule,
    batches: Batches,
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    distributed: bool = True,
    only_missing: bool = False,
    equalize: bool = True,
    round_weights: bool | None = None,
    correct_bias: bool | None = None,
    balance_samples: bool | None = None,
    show_progress: bool | None = None,
) -> fx.GraphModule:
    """Observe the batches, set every scale, and leave the model in state VALIDATE; return it.

    `batches` yields tensors, tuples or dicts (a DataLoader does); a tensor or a dict is one batch. The leading items,
    nested or not, or those that are named like forward's parameters, fill the model's inputs; the rest (labels) is
    dropped, with one log line. `batch_fn` maps a batch to the inputs. `num_batches` is the number of batches to take, and no more are read.
    Memory does not grow with their number.

    If torch.distributed is in use, every rank calls this with its own shard, with any number of batches, and all
    get equal scales, those of everything observed. `distributed=False` is for a rank that calibrates alone.

    Calibrating again adds to what was observed, with bits equal to one call with all batches: the first samples are kept with
    the model, but in no file, and weights and biases are rounded and corrected again. If samples of observed batches are missing,
    a warning says so. Operators that `set_state` has put into FLOAT are left out and stay there, as are those in TRAIN or VALIDATE with
    known scales while others are in CALIBRATE; a line of the log names them. A tensor of an operator in FLOAT is still
    observed for readers that take it as integers. `only_missing` observes only tensors without a scale, and leaves the others
    unchanged; if there are none, no batch is taken.

    Before observation, channels whose ranges in the first batch differ much are equalized by powers of two, if that
    clearly reduces the error of weights and activations (`fxq.equalize`); `equalize=False` disables this. After observation, weights of
    less than 8 bits are rounded so that their errors cancel on the first 64 samples and in the model's outputs
    (`fxq.tuning.round_weights`): with `round_weights=True` all weights are, with False none. With 64 samples or more, biases then
    compensate the mean shift of outputs by rounding (`fxq.tuning.correct_bias`): with `correct_bias=True` with fewer as well, with False
    never. With as many samples, ranges minimize the noise of each sample in decibels, instead of the squared error of all, if that
    lowers the noise of the outputs: with `balance_samples=True` always, with False never.

    Raises CalibrationError if batches are missing, do not fit the model, or hold NaN or infinite
    values, and ConfigurationError for unusable arguments; what was observed before stays observed.
    """
    calibration.require_prepared(prepared)
    batches = as_batches(batches)
    out = calibration.out_of_calibration(prepared)
    if out:
        names = ", ".join(f"%{each.name} ({each.state.value})" for each in out)
        logger.info("left out of calibration, by the state they are in: %s", names)
    with leaving_out(out):
        samples = FirstSamples(prepared, round_weights, correct_bias, balance_samples)
        first_inputs: list[Any] = []

        def take(inputs: Sequence[Any]) -> None:
            samples.take(inputs)
            if not first_inputs:  # a loader may reuse its memory
                first_inputs.extend(value.clone() if isinstance(value, torch.Tensor) else value for value in inputs)

        if samples.lost and not only_missing and (samples.rounds or samples.corrects):
            logger.warning(
                "this calibration goes on from batches whose samples are not there any more: weights are rounded, and biases corrected,"
                " by the samples of this call alone; to have what one call gives, calibrate a model that fxq.prepare has just returned"
            )
        with samples.remembered():
            observed = calibration.calibrate(
                prepared,
                batches,
                num_batches,
                batch_fn,
                distributed=distributed,
                only_missing=only_missing,
                show_progress=show_progress,
                first=by_first_batch(prepared, distributed) if equalize else None,
                each=take,
            )
            if observed:
                samples.use(distributed, show_progress)
                warn_of_lost_inputs(prepared, first_inputs)
    return prepared


@checked(layouts=LAYOUTS, batch_size=POSITIVE.or_none("it varies where the model was traced so"))
@working("writing ONNX")
def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    style: str = "auto",
    io: str = "float",
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    external_data: bool | None = None,
    layouts: Mapping[str, str] | None = None,
    example_inputs: Any = None,
    batch_size: int | None = None,
) -> Path:
    """Write a model as an ONNX file, and return its path: an integer model, a prepared one, or a float one.

    style  "auto": "fast" if this target requantizes by float32 numbers and every kernel is exact here without session options, else
           "exact"; the log says which, and so does `onnx_metadata`. For a prepared model "qdq".
           "exact": standard operators on integers, equal bits in every runtime, at any optimisation
           "fast": equal bits by 8-bit kernels, proved in onnxruntime before it is written. Its metadata names session options to
           run it with, above all on x86 processors without VNNI. If the target requantizes by shifts (bayes-e, bernoulli2, …), those
           processors compute other results whatever the options, as the metadata and a line of the log report.
           "qdq": float operators between QuantizeLinear and DequantizeLinear, for other compilers. Its bits
           differ: `verify` measures the difference. Below opset 13 weights are floats on their quantized grid, and below 21 tensors of
           int16 are rounded by Div, Round, Clip and Mul.
    io     "float" takes and returns what the float model does; "integer" takes and returns the integers.
    opset  17 to 21, by default 21; in style "qdq" 11 to 21, by default 17; for a float model 11 to 21, by default 18.
           Float operators of PyTorch's exporters below opset 18 are compared in onnxruntime first.
    external_data  True writes tensors of a kilobyte and more to `path`.data, False never does; by default it is
           done if one file cannot hold the model.
    layouts        {"image": "NHWC"}: inputs of the file, by name, that are given channels last. A Transpose inside converts
           them to PyTorch's order; `verify` and `record` take PyTorch's layout all the same.
    example_inputs the inputs for tracing a float model that is not traced yet
    batch_size     the fixed number of rows of a batch, for compilers that need every size: each input, output and inner value has a
           fixed shape, as if the model was traced with dynamic_shapes={}, and `verify` takes batches of this size. By default the batch
           is dynamic if the model was traced so.

    A prepared model is written with the current weights and scales, as fxq.convert(model) would be: its grids are in the file's
    QuantizeLinear. A float model is traced in eval mode and written by PyTorch's exporter, in style "float"; onnxruntime's results are
    compared with PyTorch's before the file appears.

    `onnx_metadata` reads the file's metadata: scales, zero points and dtypes of its inputs, outputs
    and inner tensors. Numbers and None among the model's outputs are left out of the file. The file is checked before it
    appears, and is written atomically. Raises ConfigurationError or ExportError.
    """
    from fxquant.backends.onnx.export import export_integer
    from fxquant.backends.onnx.float_file import export_float

    look_at_constants(model)
    options: dict[str, Any] = {"external_data": external_data, "layouts": layouts}
    if isinstance(model, fx.GraphModule) and stage_of(model) == Stage.PREPARED.name:
        model, style = convert(model, kernels="reference"), "qdq" if style == "auto" else style
    elif isinstance(model, nn.Module) and not is_deployed(model):
        if style not in ("auto", "float") or io != "float":
            raise ConfigurationError(
                f"a float model cannot be written with style={style!r} and io={io!r}",
                because="it has no integers",
                remedy="leave both out, or pass what fxq.prepare or fxq.convert returns",
            )
        if example_inputs is None and not is_traced(model):
            raise ConfigurationError(
                "a float model cannot be exported without example inputs",
                because="they give its graph shapes and dtypes",
                remedy="pass example_inputs=, or what fxq.convert returns if the integer model was meant",
            )
        traced = trace(model, example_inputs)
        fixed = traced if batch_size is None else with_fixed_batch(traced, batch_size)
        return export_float(fixed, path, opset, input_names, output_names, **options)
    if example_inputs is not None:
        raise ConfigurationError(
            "example_inputs mean nothing here", because="a prepared and an integer model are graphs already", remedy="leave them out"
        )
    if batch_size is not None and isinstance(model, fx.GraphModule) and is_deployed(model):
        model = with_fixed_batch(model, batch_size)
    return export_integer(model, path, style, io, opset, input_names, output_names, **options)  # type: ignore[arg-type]


@dataclass
class Result:
    """The result of `quantize`: the model in every form, and methods to export and verify it."""

    float: nn.Module
    prepared: fx.GraphModule
    integer: fx.GraphModule

    @checked()
    def export(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the integer model as ONNX; options are those of `export_onnx`."""
        return export_onnx(self.integer, path, **options)

    @checked(path=PATH)
    def verify(self, path: str | os.PathLike[str], batches: Batches) -> Report:
        """Compare the integer model with the exported file."""
        return verify(self.integer, path, batches)

    @checked()
    def compare(self, batches: Batches, **options: Any) -> Comparison:
        """Compare the integer model with the float one, layer by layer, with remedies; options are those of `compare`."""
        from fxquant.reporting.comparison import compare

        return compare(self.float, self.integer, batches, **{"prepared": self.prepared, **options})

    @checked()
    def report(self, path: str | os.PathLike[str], batches: Any = None, **options: Any) -> Path:
        """Write a report of the model as one HTML file, compared with the float one on batches; options are those of `report`."""
        from fxquant.reporting.page import report as write_report

        reference = None if batches is None else self.float
        return write_report(self.integer, path, batches, **{"reference": reference, "prepared": self.prepared, **options})


@checked(model=instance("an nn.Module", nn.Module, torch.export.ExportedProgram), observations=OBSERVATIONS)
def quantize(
    model: nn.Module,
    batches: Batches,
    target: str | Target = "bayes-e",
    qconfig: QConfig | QConfigMapping | None = None,
    *,
    dynamic_shapes: Any = None,
    batch_norm: str = "live",
    observations: Observations | None = None,
    adapt: bool = False,
    leaf: Any = None,
    preserve: Sequence[str] = (),
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    distributed: bool = True,
    equalize: bool = True,
    show_progress: bool | None = None,
) -> Result:
    """Prepare, calibrate and convert in one call. The first batch also serves as example input.

    The arguments are those of `prepare` and `calibrate`; with `dynamic_shapes={}` every batch must have the size of the first.
    With `observations`, batches are observed only for the scales that these cannot give.
    Raises what `prepare`, `calibrate` and `convert` raise.
    """
    as_written = float_model(model)
    backends.get(target), as_mapping(qconfig)  # before a batch is taken
    batches = as_batches(batches)
    iterator = iter(batches)
    try:
        first = next(iterator)
    except StopIteration:
        raise no_batches(num_batches) from None
    example = batch_inputs(as_written, first if batch_fn is None else batch_fn(first))
    prepared = prepare(
        as_written, example, target, qconfig, dynamic_shapes=dynamic_shapes, batch_norm=batch_norm, observations=observations, adapt=adapt,
        leaf=leaf, preserve=preserve,
    )  # fmt: skip
    calibrate(
        prepared,
        itertools.chain([first], iterator),
        num_batches,
        batch_fn,
        distributed=distributed,
        only_missing=observations is not None,
        equalize=equalize,
        show_progress=show_progress,
    )
    return Result(model, prepared, convert(prepared))


@checked(path=FOLDER)
def dump(model: fx.GraphModule, path: str | os.PathLike[str]) -> Path:
    """Write the graph's text to `path`/graph.txt, and its explanation to `path`/explain.txt; return the directory."""
    directory = Path(path)
    write_files(directory, {"graph.txt": text(model, steps=True), "explain.txt": explain(model)})
    return directory


@checked()
@working("saving")
def save(model: fx.GraphModule | Observations, path: str | os.PathLike[str]) -> Path:
    """Write a traced, prepared or integer model, or observations, to one file, atomically; return its path.

    The file holds the graph as JSON and the tensors as safetensors, and no code; equal models give equal bytes.
    A loaded model continues from the state of this one: its state, scales, observations and frozen statistics are kept. Other
    attributes and methods of the float model are not in the file.

    Raises ExportError, and writes nothing, if something cannot be stored in a file: hooks, a class or function that
    is neither PyTorch's nor fxquant's.
    """
    look_at_constants(model)
    return save_observations(model, path) if isinstance(model, Observations) else save_model(model, path, backends.get)


@checked(path=PATH)
@working("loading")
def load(path: str | os.PathLike[str], *, kernels: str = "auto") -> Any:
    """Load what `save` wrote: a GraphModule, on the CPU, or Observations. No name in a file is imported.

    An integer model runs with the kernels of this machine; kernels="reference" disables them, as for `convert`.

    Raises ExportError if the file is missing, damaged, or in a format that this fxquant cannot read.
    """
    loaded = load_file(path, backends.get)
    if kernels == "auto" and isinstance(loaded, fx.GraphModule) and is_deployed(loaded):
        fused = [step for step in CONVERT if step.reaches is Stage.FUSED]
        run(loaded, fused, Context(loaded.meta["target"], QConfigMapping(), kernels=backends.kernels()), Dial(0, None))
        _run_with_kernels(loaded)
    elif isinstance(loaded, fx.GraphModule):
        follow_unseen(loaded)
    return loaded
