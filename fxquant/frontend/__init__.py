"""The front end: a model's Python becomes an FX graph whose nodes know shapes, types and source lines.

Opaque Python functions and modules (`opaque`) are one node each. Their results' shapes and dtypes are inferred by running them on sample
numbers; if these runs disagree, the node's `fact` is None. Operations that forward runs only in train mode (`result.Branch`) are a second
trace, in a module next to the graph. Tensors that forward changes in train mode are detected by calling it once on copies (`state`).

Gradient rules are in the graph. The tracer inserts a `detach` between a region without gradients and its readers, and a module
(`numerics.rounding`) for a custom `torch.autograd.Function` or an in-place change without gradients. `gradients.mark` turns
detaches into annotations, which prevent no fusion and change no bits: a node that all its readers detach is computed under
`torch.no_grad()`, and a fused operator detaches some of its arguments. If only some readers detach a tensor, an identity with its scale
stays. The modules are identities until `gradients.attach` restores them between the operators of the prepared model, on dequantized
tensors: a custom function runs once more in float, for the context that its backward needs. `integer.lower` drops all of them.
"""

import bisect
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fxquant.errors import FxQuantError, TraceError
from fxquant.frontend.entry import LOST_GRADIENTS, float_model, is_traced, lost_gradients, note_batch_limits
from fxquant.frontend.environment import with_backward_hooks
from fxquant.frontend.handler import Handler, default_leaf, leaf_rule
from fxquant.frontend.inputs import ExampleInputs, InputCheck, VaryingSize, bind_inputs, note_sizes
from fxquant.frontend.onnx_files import CUT, FloatModel, read_onnx
from fxquant.frontend.onnx_files import example_inputs as inputs_of_file
from fxquant.frontend.opaque import wrap
from fxquant.frontend.result import (
    Branch,
    assumptions,
    attach_call_hooks,
    build,
    lost_parameters,
    moved_by_forward,
    note_fixed,
    note_state,
    random_by_forward,
    untrained_here,
)
from fxquant.frontend.state import NOTHING_MOVED, state_moved_by_forward
from fxquant.frontend.tracer import compare_recordings, compare_with_model, record
from fxquant.ir.model import collection_paused
from fxquant.options import DEFAULTS, Options
from fxquant.quantization.spec import attached_qconfigs
from fxquant.support import logger
from fxquant.support.arguments import checked
from fxquant.support.progress import working

_TraceAt = Callable[..., Handler]  # `record` of one model: inputs and settings

__all__ = [
    "CUT", "FloatModel", "InputCheck", "assumptions", "attach_call_hooks", "default_leaf", "float_model", "inputs_of_file", "is_traced",
    "moved_by_forward", "note_fixed", "random_by_forward", "read_onnx", "trace", "untrained_here", "wrap",
]  # fmt: skip


@checked()
@working("tracing")
def trace(model: FloatModel, example_inputs: Any = None, *, options: Options = DEFAULTS, check: bool = True) -> fx.GraphModule:
    """Return the graph of a model in eval mode; the model itself is not changed. A graph that `trace` returned is returned unchanged.

    Every node records the QConfigs that are set as the attribute `qconfig` on its module and on the enclosing modules.

    example_inputs  a tuple of forward's arguments, a dict of keyword arguments, or one tensor; None: those of the shapes in an ONNX file
    check           trace again at other batch sizes and compare; run both on the example and compare
    """
    model = float_model(model)
    if is_traced(model):
        assert isinstance(model, fx.GraphModule)
        return model
    inputs = bind_inputs(model, inputs_of_file(model) if example_inputs is None else example_inputs, options.dynamic_shapes, check)
    with collection_paused():
        state = state_moved_by_forward(model, inputs) if check else NOTHING_MOVED
        trace_at = functools.partial(record, model, leaf=leaf_rule(options.leaf, model), random=state)
        qconfigs = attached_qconfigs(model)
        inputs, recording = _at_sizes_that_vary(inputs, functools.partial(trace_at, qconfigs=qconfigs), check)
        finish = functools.partial(_finished, model, trace_at=trace_at, qconfigs=qconfigs, check=check, options=options)
        unasked = [size for size in inputs.sizes.others if not size.asked]
        try:
            traced, recording = finish(inputs, recording)
        except TraceError as error:
            if not unasked:
                raise
            inputs = inputs.with_fixed(unasked, error)  # as where a branch of forward is for small images alone
            traced, recording = finish(inputs, trace_at(inputs, qconfigs=qconfigs))
        note_state(traced, state, recording, lost_parameters(traced, inputs, state))
        for size in inputs.sizes.fixed if options.dynamic_shapes is not True else ():
            logger.warning("%s", size.sentence)
    return traced


def _finished(
    model: nn.Module, inputs: ExampleInputs, recording: Handler, trace_at: _TraceAt, qconfigs: Mapping[str, Any], *, check: bool,
    options: Options,
) -> tuple[fx.GraphModule, Handler]:  # fmt: skip
    """Return the graph module of a trace, compared with the model, and the trace that it is made of in the end."""
    hooked = with_backward_hooks(model)
    if hooked:
        logger.warning(
            "backward hooks have no effect in the new model: those of %s; write a torch.autograd.Function in forward instead",
            ", ".join(path or "the model itself" for path in hooked),
        )
    hooked = [name for name, parameter in model.named_parameters() if parameter._backward_hooks or parameter._post_accumulate_grad_hooks]
    if hooked:
        logger.warning("hooks on parameters are not copied; register them on those of the new model: %s", ", ".join(hooked))
    modes = _modes_in_training(inputs, trace_at, recording)
    if modes:
        recording = trace_at(inputs, qconfigs=qconfigs, modes=modes)
    if inputs.batch is not None:
        note_batch_limits(recording.graph, inputs.batch)
    for size in inputs.sizes.fixed:
        recording.notes[size.sentence] = None
    branch = None
    if options.training_branch:
        training = trace_at(inputs, training=True)
        if check and (inputs.batch is not None or inputs.sizes.others):
            compare_recordings(training, trace_at(inputs, again=True, training=True))
        branch = Branch(recording, training)
    traced = build(model, recording, inputs.signature, options.preserve, branch if branch is not None and branch.differs else None)
    if lost_gradients(model):
        traced.meta[LOST_GRADIENTS] = lost_gradients(model)
    if qconfigs:
        traced.meta["qconfigs"] = list(qconfigs)  # the paths of their modules
    if check:
        compare_with_model(model, traced, inputs)
    return traced, recording


STEPS = (2, 4, 8, 16, 32, 64)  # a model that halves an image five times may need multiples of 32


def _at_sizes_that_vary(inputs: ExampleInputs, trace_at: _TraceAt, check: bool) -> tuple[ExampleInputs, Handler]:
    """Trace the model with every size that can vary, in the smallest common step; return the inputs with these sizes, and the trace.

    Without a name that the user gave, a size that cannot vary is fixed, or has a smaller maximum; else raises TraceError.
    """
    while isinstance(outcome := _in_steps(inputs, trace_at, check), FxQuantError):
        sizes = inputs.sizes.others
        unasked = [size for size in sizes if not size.asked]
        if not unasked:
            names = ", ".join(size.name for size in sizes)
            largest = ", ".join(f"{size.name} = {size.largest}" for size in sizes)
            because = f"{outcome.because}; it was traced with {largest}, and in steps of up to {STEPS[-1]}"
            remedy = "change that line, or leave the size out of dynamic_shapes, which fixes it"
            raise TraceError(f"the model does not hold for every {names}", at=outcome.at, because=because, remedy=remedy) from outcome
        kept = _that_hold(inputs, outcome, trace_at, check)
        if kept == sizes:  # they fail together
            kept = tuple(size for size in sizes if size is not unasked[-1])
        names_kept = {size.name for size in kept}
        inputs = inputs.varying(*kept).with_fixed([size for size in sizes if size.name not in names_kept], outcome)
    for node in outcome[1].graph.find_nodes(op="placeholder"):  # traces in other steps have the same graph
        note_sizes(node, inputs.names.index(str(node.target)), outcome[0].sizes)
    return outcome


def _that_hold(inputs: ExampleInputs, error: FxQuantError, trace_at: _TraceAt, check: bool) -> tuple[VaryingSize, ...]:
    """Return the sizes that do not fail by themselves where all sizes together do, each with the largest maximum, of halves, that holds."""

    def fails(size: VaryingSize) -> bool:
        if size.reference == size.largest:  # there is no other size
            return True
        alone = inputs.varying(*asked, size)
        if error.reached is None:  # two traces differ
            return isinstance(_in_steps(alone, trace_at, check), FxQuantError)
        try:
            trace_at(replace(alone, until=error.reached))
        except FxQuantError:
            return True
        return False

    asked, kept = [size for size in inputs.sizes.others if size.asked], list[VaryingSize]()
    for size in inputs.sizes.others:
        least = max(size.example, size.smallest + 1)  # a table of positions may end here
        if not size.asked and fails(size):
            if size.largest == least or fails(replace(size, largest=least)):
                continue
            while fails(size):
                size = replace(size, largest=max(size.largest // 2, least))
        kept.append(size)
    return tuple(kept)


def _in_steps(inputs: ExampleInputs, trace_at: _TraceAt, check: bool) -> tuple[ExampleInputs, Handler] | FxQuantError:
    """Trace the model at its sizes, in the smallest step that succeeds; return inputs and trace, or the error of step 1."""
    sizes = inputs.sizes.others
    if not sizes:
        return inputs, _compared(inputs, trace_at, check)
    recordings: dict[Any, Handler] = {}  # by the sizes of their points

    @functools.cache
    def attempt(step: int) -> tuple[ExampleInputs, Handler] | FxQuantError:
        varying = inputs.varying(*(size.stepped(step) for size in sizes))
        points = tuple((size.reference, size.largest) for size in varying.sizes.others)
        try:
            recordings[points] = recordings.get(points) or trace_at(varying)
            if check:
                compare_recordings(recordings[points], trace_at(varying, again=True))
        except FxQuantError as error:
            return error
        return varying, recordings[points]

    first = attempt(1)
    steps = [step for step in STEPS if all(size.goes_in_steps(step) for size in sizes)]
    if not isinstance(first, FxQuantError) or not recordings or not steps or isinstance(attempt(steps[-1]), FxQuantError):
        return first
    return attempt(steps[bisect.bisect_left(steps[:-1], True, key=lambda step: not isinstance(attempt(step), FxQuantError))])


def _compared(inputs: ExampleInputs, trace_at: _TraceAt, check: bool) -> Handler:
    """Return a trace that another one, at other sizes, does not contradict."""
    try:
        recording = trace_at(inputs)
    except TraceError as error:
        if error.__cause__ is None or inputs.batch is None or inputs.sizes.others or not _runs_at_one_size(inputs, trace_at):
            raise
        what = f"the batch size of the example, {inputs.batch}, is written into forward"
        because = f"with that size forward runs; with another one this line fails: {error.because}"
        remedy = "write x.shape[0], or -1, in place of the number, or pass options=fxq.Options(dynamic_shapes={}) to fix the batch size"
        raise TraceError(what, at=error.at, because=because, remedy=remedy) from error.__cause__
    if check and (inputs.batch is not None or inputs.sizes.others):
        compare_recordings(recording, trace_at(inputs, again=True))
    return recording


def _modes_in_training(inputs: ExampleInputs, trace_at: _TraceAt, recording: Handler) -> dict[str, bool]:
    """Source lines with other gradients in train mode than in eval mode, as within `torch.set_grad_enabled(self.training)`."""
    lines = recording.gradients.lines
    if not lines:
        return {}
    try:
        again = trace_at(inputs, training=True).gradients.lines
    except FxQuantError:  # forward cannot be traced in train mode: the modes of eval mode hold
        return {}
    return {line: enabled for line, enabled in again.items() if lines.get(line, enabled) != enabled}


def _runs_at_one_size(inputs: ExampleInputs, trace_at: _TraceAt) -> bool:
    """Return whether a model that cannot be traced with a dynamic batch can be traced at the example's sizes."""
    try:
        trace_at(inputs.fixed(), again=True)
    except FxQuantError:
        return False
    return True
