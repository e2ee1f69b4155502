"""The public functions: the one place where front end, passes and backends meet."""

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
from fxquant.ir.graph import fact, is_deployed, set_channel_exponents, stage_of
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

SHOWN_MISSING = 12  # tensors without a scale, in a line of the log each
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
    """A trainable model of quantized operators, in state CALIBRATE, with parameters of its own.

    `qconfig` says how everything is quantized, or with a mapping what is quantized how; an attribute `qconfig` on one of the
    model's modules goes before it, for everything below that module (None: float), and the nearest goes first.
    The caller's model is not modified. Its attributes and methods (`class_names`, `postprocess`) are those of the result as well,
    as far as a GraphModule has none of that name; methods are bound to the result. `until` stops after a pass ("activation.fuse")
    or stage and returns the graph as it is then.

    `observations`, from fxq.observations of a model prepared from the same one, give the scales that calibration with the same batches
    would: for any dtypes, observers, mapping and target. If they give all, the result is in state VALIDATE; those that they cannot give
    are logged with the reason, and fxq.calibrate(prepared, batches, only_missing=True) finds them. They hold no samples: weights of less
    than 8 bits are rounded to the nearest, and a line of the log says how to round them as `calibrate` does.

    `batch_norm` says what batch norms do while training:

        "live"    they use and update batch statistics, as in the float model
        "frozen"  they keep their running statistics; their weight and bias are trained
        "folded"  those behind a layer are multiplied into its weight and bias once, here. The layer's parameters keep their
                  names in `state_dict` (`conv.weight`), a bias that was missing is new (`conv.bias`), and the batch norm's are
                  gone. A layer called several times has parameters for each call, named after its node (`conv.weight_conv_1`).
                  Batch norms behind nothing that absorbs them are frozen.

    `adapt` makes operators that break a limit of the target (see `check`) into others that mean the same: a large kernel or too many
    channels into a sum of convolutions, a linear layer into a 1×1 convolution, a large pooling into two. Where that is not possible, the
    operator runs on the host, in float. `explain` names each, with the limit.

    `leaf` keeps modules whole, which then run as Python, in float: a class of modules, the path of one, several of these, or a function
    of a module and its path that decides for every module (see `trace`). Functions are kept by `fxq.wrap`.

    `preserve` names attributes, methods and modules of the model, dotted where they are a submodule's ("head.strides", "head.decode"), that
    this model and the integer one are to have under the same names. Values are also in files that `save` writes; a method is not, since
    files hold no code, and a module named here stays as it is, in float, beside the graph.

    With `training_branch` the prepared model returns in train mode, after `prepared.train()`, what the float model does there: what forward
    computes only under `self.training` (auxiliary heads, raw outputs for a loss) is computed in float, from the quantized tensors it
    reads, and its parameters train. In eval mode, in the integer model and in its files there is nothing of it. A layer may not be called
    on other tensors in train mode than in eval mode (TraceError); a prepared model with such a branch cannot be saved as a file, its
    `state_dict` can.

    `passes` are passes of your own: {"canonical.rewrite": fuse} runs `fuse(graph_module, context)`, or several functions in order, right
    behind that pass; each rewrites the graph in place and returns how many changes it made, and the graph is then held against the table
    of the stage as it is behind the compiler's own passes.

    Raises UnknownTarget, TraceError, ScaleConflict or ConfigurationError, and StageViolation for what a pass of your own has left.
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
    with collection_paused(), autocast_off(), torch.inference_mode(False):  # what is made can be trained, wherever it is made
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
    """The mapping a user means. Warns of one whose setter was called, and whose result was dropped."""
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
    """Raise ConfigurationError for a half-precision input, and where float64 stands in place of float32."""
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
    """What of the model a target does not allow, before anything is calibrated: limits broken, and operators left in float.

    The result is true if there is nothing; it iterates over the findings, and prints as a table of layer, operator,
    limit, source line and remedy. The model is not changed. A batch size that is not fixed is not
    checked; pass `dynamic_shapes={}` to check the example's. `adapt` says what would be left with `prepare(…, adapt=True)`.

    A prepared model is held against the target it was prepared for; all other arguments are left out.

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
    """The integer model: a graph of integer primitives with the weights and scales of this moment.

    It takes and returns what the float model does. The prepared model is left untouched.

    Unless kernels="reference" it runs on a processor, from the second call with inputs of some sizes on, with kernels that hold 8-bit
    tensors as bytes and sum products of bytes, each proved equal to the primitives of the graph on this machine; `explain` tells which
    run, and why others do not. The numbers are the same.

    Raises NotCalibrated where a scale is unknown, and AccumulatorOverflow where a sum cannot be proved to fit.
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
        # The one pass reads this graph and writes another, so it need not be copied; its owner stays the prepared model.
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
    """Let a model have what is preserved of submodules."""
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
    """Observe the batches, set every scale, and leave the model in state VALIDATE; returns it.

    `batches` yields tensors, tuples or dicts (a DataLoader does); a tensor or a dict is one batch. The leading items,
    nested or not, or those that are named like forward's parameters, fill the model's inputs; the rest (labels) is
    dropped, with one log line. `batch_fn` maps a batch to the inputs. `num_batches` takes so many and not one more.
    Memory does not grow with their number.

    Where torch.distributed is in use, every rank calls this with its own shard, as many batches as it has, and all
    get the same scales, those of everything observed. `distributed=False` is for a rank that calibrates alone.

    Calibrating again adds to what was observed, and ends with the bits that one call with all batches has: the first samples stay with
    the model, in no file, and weights and biases are rounded and corrected again. Where batches were observed whose samples are not there,
    a warning says so. Operators that `set_state` has put into FLOAT are left out and stay there, as are those in TRAIN or VALIDATE with
    known scales while others are in CALIBRATE; a line of the log names them. Of the first, a tensor that others read as integers is
    observed for these. `only_missing` observes only tensors that have no scale yet, and leaves the others
    as they are; if there are none, no batch is taken.

    Before anything is observed, channels whose ranges in the first batch are far apart are brought nearer by powers of two, where that
    leaves clearly less of the error of weights and activations (`fxq.equalize`); `equalize=False` leaves them alone. Behind it, weights of
    less than 8 bits are rounded so that their errors cancel in what the first 64 samples make them meet, and in what the model returns
    (`fxq.tuning.round_weights`): with `round_weights=True` all weights are, with False none. If there are 64 samples or more, biases then
    take back what rounding shifts outputs by on average (`fxq.tuning.correct_bias`): with `correct_bias=True` by fewer as well, with False
    never. By as many samples, ranges are chosen by the noise of each sample in decibels, in place of the squared error of all, where that
    lowers the noise of the outputs: with `balance_samples=True` always, with False never.

    Raises CalibrationError if there is no batch, or one does not fit the model, or holds NaN or infinite
    values, and ConfigurationError for arguments it cannot use; what was observed before stays observed.
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

    style  "auto": "fast" where this target requantizes by float32 numbers and every kernel is exact here without session options, else
           "exact"; the log says which, and so does `onnx_metadata`. Of a prepared model "qdq".
           "exact": standard operators on whole numbers, the same bits in every runtime, at any optimisation
           "fast": the same bits by kernels of bytes, proved in onnxruntime before it is written. Its metadata names session options to
           run it with, above all on x86 processors without VNNI; where the target requantizes by shifts (bayes-e, bernoulli2, …) those
           compute other numbers whatever the options, which the metadata and a line of the log say.
           "qdq": float operators between QuantizeLinear and DequantizeLinear, for other compilers. Not the same
           bits: `verify` measures the difference. Below opset 13 weights are floats on their quantized grid, and below 21 tensors of
           int16 are rounded by Div, Round, Clip and Mul.
    io     "float" takes and returns what the float model does; "integer" takes and returns the integers.
    opset  17 to 21, and 21 unless given; in style "qdq" 11 to 21, and 17 unless given; of a float model 11 to 21, and 18 unless given.
           What PyTorch's exporters write of float operators below 18 is compared in onnxruntime first.
    external_data  True writes tensors of a kilobyte and more to `path`.data, False never does; by default it is
           done where one file cannot hold the model.
    layouts        {"image": "NHWC"}: inputs of the file, by name, that are given with their channels last. A Transpose inside puts
           them where PyTorch has them; `verify` and `record` take PyTorch's layout all the same.
    example_inputs of a float model that `trace` has not made, what it is called with
    batch_size     so many rows are the batch of the file, for compilers that need every size: each input, output and value inside has a
           fixed shape, as if the model was traced with dynamic_shapes={}, and `verify` takes batches of this size. By default the batch
           is dynamic where the model was traced so.

    A prepared model is written with the weights and scales of this moment, as fxq.convert(model) would be: its grids are in the file's
    QuantizeLinear. A float model is traced in eval mode and written by PyTorch's exporter, in style "float"; onnxruntime's numbers are
    compared with PyTorch's before the file appears.

    What the file says about itself is read by `onnx_metadata`: scales, zero points and dtypes of its inputs, outputs
    and inner tensors. Numbers and None beside the tensors that the model returns are no part of the file. The file is checked before it
    appears, and appears whole or not at all. Raises ConfigurationError or ExportError.
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
    """What `quantize` returns: the model in every form, and how to write and prove it."""

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
        """How far the integer model is from the float one, layer by layer, and what to do; options are those of `compare`."""
        from fxquant.reporting.comparison import compare

        return compare(self.float, self.integer, batches, **{"prepared": self.prepared, **options})

    @checked()
    def report(self, path: str | os.PathLike[str], batches: Any = None, **options: Any) -> Path:
        """Write what is known of the model as one HTML file, compared with the float one on batches; options are those of `report`."""
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
    """Prepare, calibrate and convert in one call. The first batch serves as example input as well.

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
    """Write the graph's text to `path`/graph.txt, and its explanation to `path`/explain.txt; returns the directory."""
    directory = Path(path)
    write_files(directory, {"graph.txt": text(model, steps=True), "explain.txt": explain(model)})
    return directory


@checked()
@working("saving")
def save(model: fx.GraphModule | Observations, path: str | os.PathLike[str]) -> Path:
    """Write a traced, prepared or integer model, or observations, to one file, whole or not at all; returns its path.

    The file holds the graph as JSON and the tensors as safetensors, and no code; equal models give equal bytes.
    A loaded model continues where this one is: its state, scales, observations and frozen statistics are kept. Attributes and
    methods that the float model had besides are not in the file.

    Raises ExportError, and writes nothing, if something has no place in a file: hooks, a class or function that
    is neither PyTorch's nor fxquant's.
    """
    look_at_constants(model)
    return save_observations(model, path) if isinstance(model, Observations) else save_model(model, path, backends.get)


@checked(path=PATH)
@working("loading")
def load(path: str | os.PathLike[str], *, kernels: str = "auto") -> Any:
    """What `save` wrote: a GraphModule, on the CPU, or Observations. Nothing a file names is imported.

    An integer model runs with the kernels of this machine; kernels="reference" leaves them out, as for `convert`.

    Raises ExportError if the file is missing, damaged, or nothing that this fxquant reads.
    """
    loaded = load_file(path, backends.get)
    if kernels == "auto" and isinstance(loaded, fx.GraphModule) and is_deployed(loaded):
        fused = [step for step in CONVERT if step.reaches is Stage.FUSED]
        run(loaded, fused, Context(loaded.meta["target"], QConfigMapping(), kernels=backends.kernels()), Dial(0, None))
        _run_with_kernels(loaded)
    elif isinstance(loaded, fx.GraphModule):
        follow_unseen(loaded)
    return loaded
