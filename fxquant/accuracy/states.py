"""Put operators into states, and observe the batches that set their scales."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import fx, nn

from fxquant.errors import ConfigurationError
from fxquant.ir.graph import stage_of
from fxquant.numerics.grids import is_scale
from fxquant.ops import Trait
from fxquant.prepared.operators import QuantizedOperator, operand_quantizers, quantized_operators
from fxquant.prepared.undo import all_or_nothing
from fxquant.quantization.observers.histogram import HistogramObserver
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.support import logger
from fxquant.support.arguments import FLAG, Kind, checked


def require_prepared(model: nn.Module) -> None:
    """Raise ConfigurationError if `model` is not a prepared model."""
    if not isinstance(model, fx.GraphModule) or stage_of(model) != "PREPARED":
        if isinstance(getattr(model, "module", None), fx.GraphModule):
            remedy = "pass what it wraps, its attribute `module`"
            raise ConfigurationError(f"a {type(model).__name__} is not a prepared model", because="it wraps one", remedy=remedy)
        because = "it was not returned by fxq.prepare, or its preparation was stopped early with until="
        remedy = "call fxq.prepare(model, example_inputs, target=...) and pass its result"
        raise ConfigurationError(f"{type(model).__name__} is not a prepared model", because=because, remedy=remedy)


@checked()
@all_or_nothing
def set_state(prepared: nn.Module, state: State | str, modules: str | Iterable[str] | None = None) -> None:
    """Set the state, a `State` or its name, of all operators, or of the named modules or nodes and everything below them.

    An empty list of modules names none. Leaving CALIBRATE sets the scales from the observed values. In TRAIN, batch norms after a tensor
    whose range clips most of a few outlier samples are frozen, with a warning. Raises ConfigurationError if a name matches nothing.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    enter(prepared, operators.values() if modules is None else select(operators, list(modules)), State(state))


def enter(model: nn.Module, chosen: Iterable[QuantizedOperator], state: State) -> None:
    """Put operators of a prepared model, or of a part of one, into a state. See `set_state`."""
    zeros: list[Quantizer] = []  # what was 0 in all of calibration
    for operator in chosen:
        if operator.state is State.CALIBRATE and state is not State.CALIBRATE:
            if not operator.inputs or any(operator.inputs.values()):  # of constants alone, zeros stay zeros
                zeros += [quantizer for quantizer in owned_quantizers(operator) if quantizer.pending and quantizer.was_zero]
            update_scales(operator)
        operator.state = state
    if zeros:
        logger.warning(
            "calibration saw only zeros in %s: their scales do not fit later values. In TRAIN they follow the batches, "
            "also where they are learned or frozen, until the model is calibrated again; without training all other values saturate",
            _listed(zeros),
        )
    if state is State.TRAIN:
        keep_statistics(model)
        follow_unseen(model)
        meta = vars(model).get("meta") or {}
        for sentence in () if meta.get("told_of_training") else meta.get("lost_gradients", ()):
            logger.warning("%s", sentence)
            meta["told_of_training"] = True


def out_of_calibration(model: nn.Module) -> list[QuantizedOperator]:
    """Return the operators that `set_state` has taken out of calibration.

    If some are in state CALIBRATE, these are the operators in FLOAT, and the calibrated ones in TRAIN and VALIDATE. If none is in
    CALIBRATE, these are the operators in FLOAT, unless all are.
    """
    operators = list(quantized_operators(model).values())
    if State.CALIBRATE in {operator.state for operator in operators}:
        others = [operator for operator in operators if operator.state is not State.CALIBRATE]
        return [operator for operator in others if operator.state is State.FLOAT or _is_calibrated(operator)]
    return in_float(model)


def _is_calibrated(operator: QuantizedOperator) -> bool:
    return (operator.plain or operator.output.calibrated) and all(quantizer.calibrated for quantizer in owned_quantizers(operator))


def update_scales(operator: QuantizedOperator) -> None:
    """Set the scales an operator owns from its observers."""
    if operator.weight_quantizer.learned is not None and not operator.plain and operator.output.pending:
        operator.weight_quantizer.forget_learned()
    for quantizer in owned_quantizers(operator):
        quantizer.update_scale()


def owned_quantizers(operator: QuantizedOperator) -> list[Quantizer]:
    """Return the quantizers that an operator owns: of its output, unless shared, and of its sum before a residual, if any."""
    return ([operator.output] if operator.owns_output else []) + ([operator.intermediate] if operator.intermediate is not None else [])


def select(operators: Mapping[str, QuantizedOperator], names: list[str]) -> list[QuantizedOperator]:
    """Return the operators of modules and nodes of these names. Raises ConfigurationError if a name matches none."""
    chosen: dict[str, QuantizedOperator] = {}
    for name in names:
        matches = {node: each for node, each in operators.items() if name in (node, each.path) or each.path.startswith(f"{name}.")}
        if not matches:
            because = f"the operators are {', '.join(operators) if len(operators) <= 12 else ', '.join(list(operators)[:12]) + ', …'}"
            remedy = "pass a module path of the model, or a node name"
            raise ConfigurationError(f"no operator belongs to {name!r}", because=because, remedy=remedy)
        chosen.update(matches)
    return list(chosen.values())


def in_float(model: nn.Module) -> list[QuantizedOperator]:
    """Return the operators in state FLOAT; none if all are."""
    operators = quantized_operators(model).values()
    float_operators = [operator for operator in operators if operator.state is State.FLOAT]
    return float_operators if len(float_operators) < len(operators) else []


# ---- Tensors whose calibrated range clips a few outlier samples, and the batch norms after them ----------------------
#
# Where a few samples of a batch have a far larger norm than all others, a calibrated range may leave them out
# (`quantization.observers.histogram`). They make up most of the float model's variance. A batch norm with the statistics of quantized
# batches, without that part, would multiply every other sample by it. After such a tensor batch norms keep their running statistics.
KEPT = 0.75  # of the power of what was observed: a deviation that is a seventh smaller


def keep_statistics(prepared: nn.Module, _: Any = None) -> None:
    """Freeze the statistics of batch norms after tensors whose range clips much of the observed power; a warning names these tensors.

    The decision depends on the observations of calibration, not on scales changed by training, so that it is the same when training
    resumes. It is made again when a state_dict is loaded.
    """
    if keep_statistics not in prepared._load_state_dict_post_hooks.values():
        prepared.register_load_state_dict_post_hook(keep_statistics)  # type: ignore[no-untyped-call]
    operators = quantized_operators(prepared)
    if not any(operator.state is State.TRAIN for operator in operators.values()):
        return
    if not any(operator.live_batch_norm for operator in operators.values()):
        return
    graphs = [module.graph for module in prepared.modules() if isinstance(module, fx.GraphModule)]
    normed = {node.name for graph in graphs for node in graph.nodes if node.kwargs.get("batch_norm") is not None}
    cut: dict[Quantizer, str] = {}  # with the name of the tensor that does it
    clips: dict[Quantizer, bool] = {}
    by_cause: dict[str, list[str]] = {}
    for operator in operators.values():
        cause = next((cut[quantizer] for quantizer in operand_quantizers(operator) if quantizer in cut), None)
        if cause is not None and operator.live_batch_norm:
            operator.live_batch_norm = False
            if operator.name in normed or not graphs:  # a part of a model has no graph
                by_cause.setdefault(cause, []).append(operator.name)
        if operator.plain:
            continue
        if cause is None and operator.owns_output:
            if operator.output not in clips:
                # Where channels are multiplied, their powers have no common unit, and the outliers are channels, not samples.
                multiplied = operator.factors is not None and bool(operator.factors.outputs.any())
                clips[operator.output] = not multiplied and _cuts(operator.output)
            cause = operator.output.name if clips[operator.output] else None
        if cause is not None:
            cut.setdefault(operator.output, cause)
    for cause, names in by_cause.items():
        logger.warning(
            "batch norms keep their running statistics in training at %s: calibration clipped a few outlier samples in %%%s, "
            "which the statistics of a batch would include; tensors with another observer, such as 'minmax', are not clipped",
            ", ".join(f"%{name}" for name in names[:8]) + (", …" if len(names) > 8 else ""),
            cause,
        )


@torch.no_grad()
def _cuts(quantizer: Quantizer) -> bool:
    """Return whether the calibrated range leaves out more than a quarter of the observed power."""
    observer = quantizer.observer
    if not isinstance(observer, HistogramObserver) or quantizer.is_output or not observer.observed or not observer.has_outliers:
        return False
    points, counts = observer.points()
    low, high = quantizer.covered()
    power = (points.square() * counts).sum()
    return bool((points.clamp(low.double(), high.double()).square() * counts).sum() < KEPT * power)


# ---- Tensors that are too small for what they are added to: layer scales of 1e-6, gates next to 0 --------------------
#
# Their calibrated scales do not fit the values that training gives them: a scale that is learned from there would clip them, without a
# gradient, for many steps. They follow the batches in TRAIN, as tensors that were 0 do, and the scales of their weights these weights.
SHOWN = 8  # tensors that a warning names


@torch.no_grad()
def follow_unseen(prepared: nn.Module, _: Any = None) -> None:
    """Decide which tensors of a prepared model in TRAIN are `unseen`; a warning says which.

    Calibration decides, as in `keep_statistics`. A tensor is unseen if all its values are below half a step of every sum that it is a
    term of, or that unseen tensors alone lead to from it.
    """
    if follow_unseen not in prepared._load_state_dict_post_hooks.values():
        prepared.register_load_state_dict_post_hook(follow_unseen)  # type: ignore[no-untyped-call]
    operators = [operator for operator in quantized_operators(prepared).values() if not operator.plain]
    if not any(operator.state is State.TRAIN for operator in operators):
        return
    limits: dict[Quantizer, float] = {}  # what each tensor has to stay below, for every operator that reads it
    for operator in reversed(operators):
        for quantizer, limit in _unseen_read(operator, limits):
            limits[quantizer] = min(limits.get(quantizer, math.inf), limit)
    tensors = dict.fromkeys(each for operator in operators for each in (operator.output, operator.intermediate) if each is not None)
    for quantizer in tensors:
        quantizer.unseen = _limit(quantizer, limits) > 0
    followed = [quantizer for quantizer in tensors if quantizer.unseen and not quantizer.was_zero]
    for operator in operators:
        learned = operator.weight_quantizer.learned
        if operator.unseen and learned is not None and learned.method is not None:
            learned.forget()
    if followed:
        logger.warning(
            "in calibration %s %s below half a step of the sum that reads %s. In TRAIN all scales follow the batches, also learned and "
            "frozen ones, until the model is calibrated again",
            _listed(followed),
            "was" if len(followed) == 1 else "were",
            "it" if len(followed) == 1 else "them",
        )


def _listed(quantizers: Sequence[Quantizer]) -> str:
    """Return the names and source lines of tensors for a warning."""
    names = ", ".join(f"%{each.name} ({each.source or each.module_path or 'no source line'})" for each in quantizers[:SHOWN])
    return names + (f" and {len(quantizers) - SHOWN} more" if len(quantizers) > SHOWN else "")


def _unseen_read(operator: QuantizedOperator, limits: Mapping[Quantizer, float]) -> Iterator[tuple[Quantizer, float]]:
    """Yield the quantizers of an operator's operands and intermediate, with the limit that unseen tensors stay below; 0 where seen."""
    after = _limit(operator.output, limits)
    adds = Trait.ADDS in operator.operator.traits or operator.intermediate is not None
    of_sum = max(after, _half_step(operator.output)) if adds else after
    before = after
    if operator.intermediate is not None:
        yield operator.intermediate, of_sum
        before = of_sum if _is_below(operator.intermediate, of_sum) else 0.0
    inputs: Any
    for name, inputs in operator.inputs.items():
        limit = of_sum if Trait.ADDS in operator.operator.traits or name == "residual" else before
        for quantizer in inputs if isinstance(inputs, list) else [inputs]:
            if isinstance(quantizer, Quantizer) and quantizer is not operator.output:
                yield quantizer, 0.0 if quantizer.is_output else limit


def _limit(quantizer: Quantizer, limits: Mapping[Quantizer, float]) -> float:
    """Return the limit that an unseen tensor stays below; 0 for a tensor that is seen."""
    limit = limits.get(quantizer, 0.0)
    return limit if _is_below(quantizer, limit) else 0.0


def _is_below(quantizer: Quantizer, limit: float) -> bool:
    return limit > 0 and _observed(quantizer) and float(torch.stack(quantizer.covered()).abs().max()) < limit


def _observed(quantizer: Quantizer) -> bool:
    return quantizer.observer is not None and quantizer.observer.observed and not quantizer.frozen and not quantizer.follows_sum


def _half_step(quantizer: Quantizer) -> float:
    """Return half a step of a tensor's calibrated range; 0 if it was not observed."""
    if not _observed(quantizer):
        return 0.0
    low, high = quantizer.covered()
    return float(high - low) / (quantizer.dtype.high - quantizer.dtype.low) / 2


# ---- Read, set and freeze the scales of a prepared model -------------------------------------------------------------
INTERMEDIATE = ".intermediate"  # after an operator's name: the tensor that its residual is added to


def _scales(value: Any) -> dict[str, tuple[float, int | None]]:
    """Convert a mapping of names to scales, or to (scale, zero point); the values are validated later, by name."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise TypeError
    return {name: _scale(scale) for name, scale in value.items()}


def _scale(value: Any) -> tuple[float, int | None]:
    if isinstance(value, tuple):
        scale, zero_point = value
        return _scale(scale)[0], index(zero_point)
    if isinstance(value, str | bytes | bool):
        raise TypeError
    return float(value), None


@checked()
def qparams(prepared: nn.Module) -> dict[str, float | tuple[float, int]]:
    """Return the scale of every operator's output by node name: NaN before calibration, and no entry for a 32-bit sum.

    For a uint8 output this is a pair: the scale and the zero point. Where a residual is fused into an operator, the tensor that it is
    added to has a scale too, "name.intermediate", for when it cannot be added in the accumulator.
    """
    require_prepared(prepared)
    grids = {name: quantizer.grid for name, quantizer in _by_name(quantized_operators(prepared)).items()}
    return {name: (float(grid.scale), grid.zero_point) if grid.type.affine else float(grid.scale) for name, grid in grids.items()}


def _by_name(operators: Mapping[str, QuantizedOperator]) -> dict[str, Quantizer]:
    """Return the quantizers of outputs, and of the tensors that residuals are added to, by their names in `qparams`."""
    quantizers: dict[str, Quantizer] = {}
    for name, operator in operators.items():
        if not operator.plain and not operator.output.follows_sum:
            quantizers[name] = operator.output
        if operator.intermediate is not None:
            quantizers[name + INTERMEDIATE] = operator.intermediate
    return quantizers


@checked(scales=Kind("a dict of scales, positive and finite numbers, by module path or node name", _scales))
@all_or_nothing
def set_qparams(prepared: nn.Module, scales: Mapping[str, float | tuple[float, int]]) -> None:
    """Fix scales by module path or by the names of `qparams`; they no longer follow any observation.

    A pair is a scale and a zero point, as `qparams` returns for a uint8 output; with a scale alone the zero point is unchanged.
    Only the named tensors are fixed: where a residual is fused into an operator, the tensor that it is added to keeps its own statistics.

    Raises ConfigurationError, and changes nothing, if a name matches no operator or a scale is not positive and finite.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    named = _by_name(operators)
    pairs: Mapping[str, tuple[float, int | None]] = scales  # type: ignore[assignment]  # as `_scales` has made them
    chosen: list[tuple[str, Quantizer, tuple[float, int | None]]] = []
    for name, (scale, zero_point) in pairs.items():
        what = f"the scale {scale} for {name!r} is not usable"
        if not 0 < scale < float("inf"):
            raise ConfigurationError(what, because="a scale is a positive, finite number", remedy="pass a positive scale")
        if not is_scale(float(scale)):
            because = "a scale is a float32 number, which lies between 2^-126 (1.2e-38) and 3.4e38"
            raise ConfigurationError(what, because=because, remedy="pass a scale that is of the size of the tensor's values")
        if name.endswith(INTERMEDIATE) and name in named:
            chosen.append((name, named[name], (scale, zero_point)))
            continue
        for operator in select(operators, [name]):
            what = f"the scale of {name!r} cannot be set"
            if operator.plain:
                kind = "float" if Trait.DYNAMIC in operator.operator.traits else "boolean or integer"
                because = f"the result of %{operator.name} is {kind}, which has no scale"
                raise ConfigurationError(what, because=because, remedy="leave it out")
            if operator.output.follows_sum:
                because = f"%{operator.name} has a 32-bit output, whose scale is that of its weight and its input"
                raise ConfigurationError(what, because=because, remedy="give it an int8 or int16 output, or leave it out")
            chosen.append((name, operator.output, (scale, zero_point)))
    for name, quantizer, (_, zero_point) in chosen:
        dtype = quantizer.dtype
        if zero_point is not None and not (dtype.affine and dtype.low <= zero_point <= dtype.high):
            raise ConfigurationError(
                f"the zero point {zero_point} for {name!r} is not usable",
                because=f"%{quantizer.name} is {dtype}" + (f", {dtype.low} to {dtype.high}" if dtype.affine else ", which is symmetric"),
                remedy="pass one of these" if dtype.affine else "pass its scale alone",
            )
    for _, quantizer, (scale, zero_point) in chosen:
        quantizer.set_scale(scale, zero_point)


@checked(scales=FLAG, batch_norm=FLAG)
@all_or_nothing
def freeze(prepared: nn.Module, *, scales: bool = True, batch_norm: bool = True) -> None:
    """Freeze scales, followed or learned, and running statistics of batch norms; in training only the model's parameters then change.

    Afterwards TRAIN in train mode computes exactly what VALIDATE does, dropout aside. Scales that are frozen stay so through
    `state_dict`; which statistics are frozen is not a part of it.
    """
    require_prepared(prepared)
    for operator in quantized_operators(prepared).values():
        if batch_norm:
            operator.live_batch_norm = False
        if scales:
            if operator.state is State.CALIBRATE:
                update_scales(operator)
            for quantizer in owned_quantizers(operator):
                quantizer.freeze()
            if operator.weight_quantizer.learned is not None:
                operator.weight_quantizer.learned.stop()
