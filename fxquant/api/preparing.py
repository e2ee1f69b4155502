"""Prepare a float model, check it before, calibrate it, and convert it to integers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxquant import backends
from fxquant.accuracy import BY_SAMPLES, STEPS, observe
from fxquant.accuracy.observations import Observations, restore
from fxquant.accuracy.states import out_of_calibration, require_prepared, set_state
from fxquant.accuracy.step import Run
from fxquant.analysis.explain import Findings, broken_limits, findings, summary
from fxquant.analysis.layers import layers, left_in_float
from fxquant.errors import ConfigurationError
from fxquant.frontend import FloatModel, attach_call_hooks, moved_by_forward, note_fixed, random_by_forward, trace, untrained_here
from fxquant.frontend.inputs import input_check, sizes_that_differ
from fxquant.ir import graph as facts
from fxquant.ir.carried import SETTINGS, refuse_changes
from fxquant.ir.graph import TensorFact, copy_parameters, fact, module_path, noise, sizes_of_input, source, stage_of
from fxquant.ir.integer import set_channel_exponents
from fxquant.ir.model import CALLS, RUNNER, Model, autocast_off, collection_paused, dress_carried
from fxquant.kernels.runner import Runner
from fxquant.ops import operator_of
from fxquant.ops.elementwise.activation import dropout
from fxquant.options import DEFAULTS, Options
from fxquant.passes import CONVERT, PREPARE
from fxquant.passes.rewriting import attributes
from fxquant.pipeline import Context, Dial, Pass, check_until, run, with_own
from fxquant.prepared.batches import as_batches, model_inputs
from fxquant.prepared.batches import example_inputs as inputs_of_batch
from fxquant.prepared.channels import tensor_exponents
from fxquant.prepared.hooks import attach_hooks
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.sizes import with_fixed_sizes
from fxquant.prepared.stage import Stage, quantized_operator
from fxquant.prepared.undo import Snapshot, having, inside_operators, tensors_of
from fxquant.quantization.spec import DEFAULT, QConfig, QConfigMapping, State, as_mapping, attached_qconfigs
from fxquant.reporting.forms import Batches
from fxquant.support import logger, timed
from fxquant.support.arguments import checked, instance
from fxquant.target import Target

SHOWN_MISSING = 12  # tensors without a scale that are logged, a line each
OBSERVATIONS = instance("what fxq.observers.observations returned", Observations).or_none("calibration observes")


def example_of(model: nn.Module, first: Any, batches: Any, num_batches: int | None, options: Options) -> tuple[Any, Options]:
    """Return the example inputs in the first batch, and the options with `dynamic_shapes` of the sizes that differ in a list of batches."""
    example = inputs_of_batch(model, options.inputs(first))
    if options.dynamic_shapes is None and isinstance(batches, list | tuple):
        others = [inputs_of_batch(model, options.inputs(batch)) for batch in batches[1:num_batches]]
        options = replace(options, dynamic_shapes=sizes_that_differ([example, *others]))
    return example, options


@checked(observations=OBSERVATIONS)
def prepare(
    model: FloatModel, example_inputs: Any = None, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    observations: Observations | None = None, until: str | Stage | None = None, options: Options = DEFAULTS,
) -> fx.GraphModule:  # fmt: skip
    """Return a trainable model of quantized operators, in state CALIBRATE, with its own parameters.

    An ONNX file is given by its path; it needs no example inputs where it holds their shapes.

    `qconfig` is the QConfig of every operator, or a mapping from operators to QConfigs. An attribute `qconfig` on one of the
    model's modules overrides it for everything below that module (None: float); the nearest one takes precedence.
    The caller's model is not modified. The result also has its attributes and methods (`class_names`, `postprocess`),
    except those whose names a GraphModule has; methods are bound to the result. `until` stops after a pass ("activation.fuse")
    or stage and returns the graph of that moment.

    `observations`, from fxq.observers.observations of a model prepared from the same float model, give the scales that calibration with
    the same batches would: for any dtypes, observers, mapping and target. If they give all, the result is in state VALIDATE. Those that
    they cannot give are logged with the reason, and fxq.calibrate(prepared, batches, only_missing=True) finds them. They hold no samples:
    weights of less than 8 bits are rounded to the nearest, and a line of the log says how to round them as `calibrate` does.

    Raises UnknownTarget, TraceError, ScaleConflict or ConfigurationError, and StageViolation for an invalid graph after an own pass.
    """
    chosen, mapping = backends.get(target), _rules(qconfig)
    pipeline = with_own(PREPARE, options.passes or {})
    if until is not None and observations is not None:
        because = "observations give scales, which only a fully prepared graph has"
        raise ConfigurationError("observations cannot be used with until=", because=because, remedy="leave one of them out")
    check_until(until, pipeline)
    dial = Dial.of(options)
    traced = trace(model, example_inputs, options=options)
    with collection_paused(), autocast_off(), torch.inference_mode(False):  # the result can be trained, in whatever mode it was created
        context = Context(chosen, mapping, options, dial.debug)
        prepared = _with_open_sizes(traced, model, example_inputs, options, lambda graph: _prepare(graph, context, pipeline, until, dial))
        if observations is not None:
            _restore(prepared, observations)
        return prepared


def _restore(prepared: fx.GraphModule, observations: Observations) -> None:
    missing = restore(prepared, observations)
    run = Run(prepared, BY_SAMPLES)
    wanted = {step.option for step in BY_SAMPLES if step.is_wanted(run)}
    if "round_weights" in wanted:
        logger.warning(
            "weights of less than 8 bits are rounded to the nearest, since observations hold no samples;"
            " fxq.tuning.round_weights(prepared, batches) rounds them so that their errors cancel, as calibration does"
        )
    if "correct_bias" in wanted:
        logger.info(
            "biases are not corrected, since observations hold no samples;"
            " fxq.tuning.correct_bias(prepared, batches) corrects them, as calibration does by 16 samples"
        )
    if not missing:
        set_state(prepared, State.VALIDATE)
    sentence = "scales that the observations cannot give: %d; fxq.calibrate(prepared, batches, only_missing=True) finds them\n%s"
    if missing:
        logger.warning("%s", _listed(sentence, [f"%{name}: {because}" for name, because in missing.items()]))


def _rules(qconfig: QConfig | QConfigMapping | None) -> QConfigMapping:
    """Return the mapping for an argument `qconfig`, and log its rules."""
    mapping = as_mapping(qconfig)
    if rules := ", ".join(str(rule) for rule, _ in mapping.rules()):
        logger.info("rules of the qconfig: %s", rules)
    return mapping


def _prepare(traced: fx.GraphModule, context: Context, passes: Sequence[Pass], until: str | Stage | None, dial: Dial) -> fx.GraphModule:
    """Run the passes on a copy of a traced graph, log a summary and broken limits, and return the prepared model."""
    _require_float32(traced)
    target, qconfig, attached = context.target, context.qconfig, attached_qconfigs(traced)
    backends.require_dtypes(target, [*attributes(traced, attached), *qconfig.rules(), (DEFAULT, qconfig.default)])
    prepared = Model.of(copy_parameters(traced), copy.deepcopy(traced.graph))
    prepared.meta = {**traced.meta, "target": target}
    attach_call_hooks(prepared)
    dress_carried(prepared)
    dial.write("trace", prepared)
    options = context.options
    if options.without_vnni is None and target.pairs:
        from fxquant.backends.onnx.runtime import adds_pairs

        options = replace(options, without_vnni=adds_pairs())
    if not run(prepared, passes, replace(context, attached=attached, options=options), dial, until):
        prepared_layers = layers(prepared)
        logger.info("%s", summary(prepared_layers))
        if broken := sum(1 for _ in broken_limits(prepared, prepared_layers, target)):
            logger.warning("limits of %s that are broken: %d; fxq.check says where, and what to do", target.name, broken)
        if told := _apart_in_training(prepared):  # where somebody trains
            prepared.meta["lost_gradients"] = [*prepared.meta.get("lost_gradients", ()), *told]
        attach_hooks(prepared, traced.graph)
    return prepared


def _with_open_sizes(
    traced: fx.GraphModule, model: FloatModel, example_inputs: Any, options: Options, prepare: Callable[[fx.GraphModule], fx.GraphModule]
) -> fx.GraphModule:
    """Return what `prepare` makes of a model's graph, or of one in which the batch alone varies, where an operator is better there.

    Sizes that the user asked for vary in any case.
    """
    prepared = prepare(traced)
    worse = _worse_where_sizes_vary(prepared) if options.dynamic_shapes is True else {}
    if worse:
        fixed = prepare(trace(model, example_inputs, options=replace(options, dynamic_shapes=None)))
        still = {layer.name for layer in left_in_float(layers(fixed))}
        why = next((why for name, why in worse.items() if name not in still), None)
        if why is not None:
            note_fixed(fixed, traced, why)
            return fixed
    return prepared


def _worse_where_sizes_vary(prepared: fx.GraphModule) -> dict[str, str]:
    """Return the operators that may be worse since sizes besides the batch vary, by name, each with the reason: in float, or no layer."""
    nodes, target = {node.name: node for node in prepared.graph.nodes}, prepared.meta["target"]
    if not any(map(sizes_of_input, prepared.graph.find_nodes(op="placeholder"))):
        return {}
    worse = {}
    for layer in layers(prepared):
        node = nodes[layer.name]
        if not any(facts.varies_beyond_batch(fact(each)) for each in (node, *node.all_input_nodes)):
            continue
        operator = operator_of(node)
        refused = operator is not None and operator.refuses(node, operator.arguments(node)) is not None
        if (refused or facts.refusal(node) is not None) and left_in_float((layer,)):
            worse[layer.name] = f"{layer.operator} would stay in float, since {layer.reason} ({layer.source})"
        elif layer.operator == "mean" and target.arithmetic.rescales_by_layers:
            worse[layer.name] = f"{layer.operator} is a layer of its size on {target.name} ({layer.source})"
    return worse


def _apart_in_training(prepared: fx.GraphModule) -> list[str]:
    """Return a sentence for each way in which state TRAIN differs from the float model's training, with the lines where it does."""
    lines_by_sentence = {
        "forward moves tensors in train mode that training here does not move: %d; move them in your training loop, replace them by "
        "constants first (torch.nn.utils.parametrize.remove_parametrizations), or keep their module in float by the option leaf\n%s": [
            name + f" ({line})" * bool(line) for name, line in moved_by_forward(prepared).items()
        ],
        "forward is random in train mode where training here is not: %d; draw in a module of its own that is given one tensor, "
        "returns it in eval mode, and returns one of its shape in train mode, or use PyTorch's dropout in a part that is quantized\n%s":
            _random_in_float_alone(prepared),
        "parameters that train in the float model and have no gradient here: %d; compute with the parameter itself in eval mode too, "
        "not with what forward under no_grad, or train(False), made of it; for heads of train mode: option training_branch=True\n%s":
            untrained_here(prepared),
    }  # fmt: skip
    return [_listed(sentence, lines) for sentence, lines in lines_by_sentence.items() if lines]


def _random_in_float_alone(prepared: fx.GraphModule) -> list[str]:
    """Return each line that is random in train mode in the float model, and not in state TRAIN."""
    integer = [(node, operator) for node in prepared.graph.nodes if (operator := quantized_operator(prepared, node)) is not None]
    noisy = {noise(node) for node, _ in integer}
    drops = {
        (module_path(node), source(node))
        for node, operator in integer
        if operator.operator.function is dropout or isinstance(operator.owners[0], nn.RReLU)
    }
    asked = [(path, line) for path, line in random_by_forward(prepared) if path not in noisy and (path, line) not in drops]
    asked += [(module_path(node), source(node)) for node in prepared.graph.nodes if node.target is dropout]  # those in float
    return [line + f" (module {path})" * bool(path) for path, line in asked]


def _listed(sentence: str, lines: Sequence[str]) -> str:
    """Return a sentence with the number of lines, followed by the first lines."""
    more = [f"and {len(lines) - SHOWN_MISSING} more"] * (len(lines) > SHOWN_MISSING)
    return sentence % (len(lines), "\n".join(f"  {line}" for line in [*lines[:SHOWN_MISSING], *more]))


def _require_float32(traced: fx.GraphModule) -> None:
    """Raise ConfigurationError for a half-precision input, and for float64 in place of float32."""
    inputs = {
        str(node.target): each.dtype for node in traced.graph.find_nodes(op="placeholder") if isinstance(each := fact(node), TensorFact)
    }
    refused = (torch.float16, torch.bfloat16, *([] if torch.float32 in inputs.values() else [torch.float64]))
    for input, dtype in inputs.items():
        if dtype in refused:
            name = str(dtype).removeprefix("torch.")
            because = f"its input {input} is {name}, and integers and scales are those of float32 tensors"
            remedy = "convert model and inputs first: model.float() and x.float()"
            raise ConfigurationError(f"a {name} model cannot be prepared", because=because, remedy=remedy)


@checked()
def check(
    model: FloatModel, example_inputs: Any = None, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *,
    options: Options = DEFAULTS,
) -> Findings:  # fmt: skip
    """Return the parts of a model that a target does not support, before calibration: broken limits, and operators left in float.

    The result is true if nothing was found; it iterates over the findings, and prints as a table of layer, operator,
    limit, source line and remedy. The model is not changed. A batch size that is not fixed is not
    checked; `dynamic_shapes={}` in the options checks the example's. With `adapt=True` operators that `prepare` replaces are left out.

    A prepared model is checked against the target it was prepared for; all other arguments are ignored.

    Raises UnknownTarget, TraceError or ConfigurationError.
    """
    if isinstance(model, fx.GraphModule) and stage_of(model) == "PREPARED":
        return findings(model, model.meta["target"])
    chosen, mapping = backends.get(target), _rules(qconfig)
    traced = trace(model, example_inputs, options=options)
    with collection_paused(), autocast_off():
        # Fusion comes first: a target's limits are about the operators it runs.
        context = Context(chosen, mapping, options)
        pipeline = PREPARE, "boundary.insert", Dial(0, None)
        annotated = _with_open_sizes(traced, model, example_inputs, options, lambda graph: _prepare(graph, context, *pipeline))
    return findings(annotated, chosen)


@checked()
def calibrate(
    prepared: fx.GraphModule, batches: Batches, num_batches: int | None = None, *, only_missing: bool = False, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> fx.GraphModule:  # fmt: skip
    """Observe the batches, set every scale, and leave the model in state VALIDATE; return it.

    `batches` yields tensors, tuples or dicts (a DataLoader does); a tensor or a dict is one batch. The leading items,
    nested or not, or those that are named like forward's parameters, fill the model's inputs; the rest (labels) is
    dropped, with one log line. `num_batches` is the number of batches to take, and no more are read. Memory does not grow with their
    number. If torch.distributed is in use, every rank calls this with its own shard, and calibrates with the batches of all ranks.

    Calibrating again adds to what was observed, with bits equal to one call with all batches: the first samples are kept with
    the model, but in no file, and weights and biases are rounded and corrected again. If samples of observed batches are missing,
    a warning says so. Operators that `set_state` has put into FLOAT are left out and stay there, as are those in TRAIN or VALIDATE with
    known scales while others are in CALIBRATE; a line of the log names them. A tensor of an operator in FLOAT is still
    observed for readers that take it as integers. `only_missing` observes only tensors without a scale, and leaves the others
    unchanged; if there are none, no batch is taken. The last line of the log is the seconds that each step took.

    Whatever is raised, Ctrl-C too, the batches before stay observed, and the model has its former state, scales and weights. A warning says
    how many batches these are; a call with the others, or with [] if none is left, ends with the bits of one call.

    Raises CalibrationError if batches are missing, do not fit the model, or hold NaN or infinite values, and ConfigurationError for
    unusable arguments.
    """
    require_prepared(prepared)
    batches = as_batches(batches)
    out = out_of_calibration(prepared)
    if out:
        names = ", ".join(f"%{each.name} ({each.state.value})" for each in out)
        logger.info("left out of calibration, by the state they are in: %s", names)
    with having(out, left_out=True), timed("calibration"):
        inside = inside_operators(prepared)
        seen = [module for module in inside if isinstance(module, observe.OBSERVED)]
        before = Snapshot(inside, tensors_of(module for module in inside if module not in seen))
        untouched = Snapshot(seen, tensors_of(seen))
        run = Run(prepared, STEPS, batches, num_batches, options, show_progress, only_missing)
        run.warn_of_lost_samples()
        try:
            with before:
                if observe.is_missing(run):
                    run.perform()
                    observe.warn_of_lost_inputs(prepared, run.first_inputs)
                run.remember(ended=True)
        except BaseException:
            if run.taken:
                logger.warning("%s", _interrupted(prepared, run.taken))
            else:
                untouched.restore()
            run.remember(ended=False)
            raise
    return prepared


def _interrupted(prepared: fx.GraphModule, batches: int) -> str:
    """Return a sentence about a model whose calibration has not ended."""
    observing = any(operator.state is State.CALIBRATE for operator in quantized_operators(prepared).values())
    state = "in state CALIBRATE as before, computes in float, and observes what it is given" if observing else "as it was before"
    return (
        f"calibration was stopped after {batches} batch{'es' * (batches > 1)}, which it has observed; otherwise the model is {state};"
        " fxq.calibrate with the other batches, or with [] if there are none, ends as one call would"
    )


@checked()
def at_sizes(model: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    """Return a copy of a prepared or integer model that takes inputs of the example's sizes alone, in batches of any size.

    Chips and C programs have one size: export this copy. Its results are those of `model` for inputs of these sizes, bit for bit.
    Raises ConfigurationError or CalibrationError for an example that `model` does not take.
    """
    if stage_of(model) not in ("PREPARED", "INTEGER", "FUSED"):
        what, because = "at_sizes takes a prepared or an integer model", f"the model is a {type(model).__name__} at no such stage"
        raise ConfigurationError(what, because=because, remedy="pass what fxq.prepare or fxq.convert returns")
    inputs = model_inputs(model, example_inputs, finite=False)
    input_check(model)(model, tuple(inputs), {})
    fixed = with_fixed_sizes(model, inputs)
    if stage_of(fixed) == Stage.FUSED.name:
        find_kernels(fixed)
    attach_call_hooks(fixed)
    return fixed


# ---- Convert a prepared model to its integer model -------------------------------------------------------------------
@checked()
def convert(
    prepared: fx.GraphModule, *, kernels: str = "auto", until: str | Stage | None = None, options: Options = DEFAULTS
) -> fx.GraphModule:
    """Return the integer model: a graph of integer primitives with the current weights and scales.

    Its inputs and outputs are those of the float model. The prepared model is not changed.

    Unless kernels="reference", it uses fast kernels on a processor from the second call with inputs of the same sizes on. They store 8-bit
    tensors as bytes and sum products of bytes. Each is proved equal to the primitives of the graph on this machine; `explain` lists which
    run, and why others do not. The results are equal.

    Raises NotCalibrated if a scale is unknown, and AccumulatorOverflow if a sum cannot be proved to fit.
    """
    require_prepared(prepared)
    target: Target = prepared.meta["target"]
    for operator in quantized_operators(prepared).values():
        if not operator.plain:
            operator.output.require()
    refuse_changes(prepared, prepared.meta.get(SETTINGS, {}))
    check_until(until, CONVERT)
    dial = Dial.of(options)
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
        integer.__dict__[RUNNER] = Runner(backends.kernels, fixed_with_kernels)


def fixed_with_kernels(model: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a copy of a fused integer model in which the sizes of `inputs` are numbers; kernels are found again, tensors are shared."""
    fixed = with_fixed_sizes(model, inputs, copy.copy)
    find_kernels(fixed)
    return fixed


def find_kernels(integer: fx.GraphModule) -> None:
    """Note the kernels of this machine on a graph of primitives."""
    fused = [step for step in CONVERT if step.reaches is Stage.FUSED]
    run(integer, fused, Context(integer.meta["target"], QConfigMapping(), kernels=backends.kernels()), Dial(0, None))
