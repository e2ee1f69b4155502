"""States, calibration, and the scales of a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from typing import Any

import torch
from torch import fx, nn

import fxquant.calibration.distributed as ranks
from fxquant.calibration.cutting import keep_statistics
from fxquant.calibration.left_out import in_float
from fxquant.calibration.unseen import SHOWN, follow_unseen
from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.ir.graph import by_name, stage_of
from fxquant.ir.model import repeatable
from fxquant.numerics.grids import is_scale
from fxquant.prepared.batches import first_batches, length, model_inputs, no_batches
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.observers import Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.state import State
from fxquant.support.arguments import FLAG, Kind, checked
from fxquant.support.progress import progress

logger = logging.getLogger("fxquant")

logger = logging.getLogger("fxquant")

INTERMEDIATE = ".intermediate"  # after an operator's name: the tensor that its residual is added to


def require_prepared(model: nn.Module) -> None:
    """Raise ConfigurationError if this is not a prepared model."""
    if not isinstance(model, fx.GraphModule) or stage_of(model) != "PREPARED":
        if isinstance(getattr(model, "module", None), fx.GraphModule):
            raise ConfigurationError(
                f"a {type(model).__name__} is not a prepared model",
                because="it wraps one",
                remedy="pass what it wraps, its attribute `module`",
            )
        raise ConfigurationError(
            f"{type(model).__name__} is not a prepared model",
            because="it was not returned by fxq.prepare, or its preparation was stopped early with until=",
            remedy="call fxq.prepare(model, example_inputs, target=...) and pass its result",
        )


@checked()
def set_state(prepared: nn.Module, state: State | str, modules: str | Iterable[str] | None = None) -> None:
    """Put all operators, or those of the named modules or nodes and everything below them, into a state, given as such or by its name.

    An empty list of modules names none. Leaving CALIBRATE sets the scales from the observed values. In TRAIN, batch norms behind a
    tensor that clips most of a few outlier samples are no longer live, which a warning says (see `cutting`). Raises ConfigurationError
    if a name matches nothing.
    """
    require_prepared(prepared)
    state = State(state)
    operators = quantized_operators(prepared)
    chosen = operators.values() if modules is None else _select(operators, list(modules))
    enter(prepared, chosen, state)


def enter(model: nn.Module, chosen: Iterable[QuantizedOperator], state: State) -> None:
    """Put operators of a prepared model, or of a part of one, into a state. See `set_state`."""
    zeros: list[Quantizer] = []
    for operator in chosen:
        if operator.state is State.CALIBRATE and state is not State.CALIBRATE:
            zeros += [quantizer for quantizer in owned_quantizers(operator) if quantizer.pending and quantizer.was_zero]
            update_scales(operator)
        operator.state = state
    _warn_of_zeros(zeros)
    if state is State.TRAIN:
        keep_statistics(model)
        follow_unseen(model)
        for sentence in (vars(model).get("meta") or {}).get("lost_gradients", ()):
            logger.warning("%s", sentence)


def _warn_of_zeros(quantizers: list[Quantizer]) -> None:
    """Warn of tensors that were 0 in all of calibration, and say what becomes of their scales."""
    if quantizers:
        logger.warning(
            "calibration saw only zeros in %s: their scales do not fit later values. In TRAIN they follow the batches, "
            "also where they are learned or frozen, until the model is calibrated again; without training all other values saturate",
            ", ".join(f"%{each.name} ({each.source or each.module_path or 'no source line'})" for each in quantizers[:SHOWN])
            + (f" and {len(quantizers) - SHOWN} more" if len(quantizers) > SHOWN else ""),
        )


def out_of_calibration(model: nn.Module) -> list[QuantizedOperator]:
    """Return the operators that `set_state` has taken out of calibration.

    If some are in state CALIBRATE, these are all others; of those in TRAIN and VALIDATE, only the ones whose scales are known, since
    they compute with them. If none is in CALIBRATE, these are the operators in FLOAT, unless all are.
    """
    operators = list(quantized_operators(model).values())
    states = {operator.state for operator in operators}
    if State.CALIBRATE in states:
        others = [operator for operator in operators if operator.state is not State.CALIBRATE]
        return [operator for operator in others if operator.state is State.FLOAT or _is_calibrated(operator)]
    return in_float(model)


def _is_calibrated(operator: QuantizedOperator) -> bool:
    return (operator.plain or operator.output.calibrated) and all(quantizer.calibrated for quantizer in owned_quantizers(operator))


@contextmanager
def _computing(model: nn.Module, others: Iterable[QuantizedOperator]) -> Iterator[None]:
    """Inside, operators that are left out compute what they do in their state, and nothing of them moves.

    An operator in state FLOAT whose result the others read as integers observes it for them: its grid is that of their operand.
    """
    out = [operator for operator in quantized_operators(model).values() if operator.left_out]
    states = [operator.state for operator in out]
    needed = {id(quantizer) for operator in others for quantizer in _read(operator)}
    seen = [each for each in out if each.state is State.FLOAT and not each.plain and each.owns_output and id(each.output) in needed]
    try:
        for operator in out:
            operator.state = {State.TRAIN: State.VALIDATE}.get(operator.state, operator.state)
        for operator in seen:
            operator.state = State.CALIBRATE
        with _paused(operator.intermediate for operator in seen if operator.intermediate is not None):
            yield
    finally:
        for operator in seen:
            operator.output.update_scale()
        for operator, state in zip(out, states, strict=True):
            operator.state = state


def _read(operator: QuantizedOperator) -> Iterator[Quantizer]:
    """Yield the quantizers of an operator's integer operands, and of its own result."""
    for quantizers in operator.inputs.values():
        yield from (each for each in (quantizers if isinstance(quantizers, list) else [quantizers]) if each is not None)
    if not operator.plain:
        yield operator.output


def update_scales(operator: QuantizedOperator) -> None:
    """Set the scales an operator owns from its observers."""
    if operator.weight_quantizer.learned is not None and not operator.plain and operator.output.pending:
        operator.weight_quantizer.forget_learned()
    for quantizer in owned_quantizers(operator):
        quantizer.update_scale()


def owned_quantizers(operator: QuantizedOperator) -> list[Quantizer]:
    """Return the quantizers that belong to an operator: of its output, unless that shares another's, and of its intermediate."""
    return ([operator.output] if operator.owns_output else []) + ([operator.intermediate] if operator.intermediate is not None else [])


def _scales(value: Any) -> dict[str, tuple[float, int | None]]:
    """Return names with scales, and with zero points where they are given; whether the values are valid is checked later, by name."""
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


def _select(operators: Mapping[str, QuantizedOperator], names: list[str]) -> list[QuantizedOperator]:
    chosen: dict[str, QuantizedOperator] = {}
    for name in names:
        matches = {
            node: operator
            for node, operator in operators.items()
            if node == name or operator.path == name or operator.path.startswith(name + ".")
        }
        if not matches:
            raise ConfigurationError(
                f"no operator belongs to {name!r}",
                because=f"the operators are {', '.join(operators) if len(operators) <= 12 else ', '.join(list(operators)[:12]) + ', …'}",
                remedy="pass a module path of the model, or a node name",
            )
        chosen.update(matches)
    return list(chosen.values())


@torch.no_grad()
def calibrate(
    prepared: fx.GraphModule,
    batches: Iterable[Any],
    num_batches: int | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    *,
    distributed: bool = True,
    only_missing: bool = False,
    show_progress: bool | None = None,
    first: Callable[[list[Any] | None], None] | None = None,
    each: Callable[[list[Any]], None] | None = None,
) -> bool:
    """Observe the batches, set every scale, and leave the model in state VALIDATE; returns whether any batch was asked for.

    Operators that are `left_out` keep their state and their scales.
    `batches` yields tensors, tuples or dicts; the leading items fill forward's inputs, and the rest (labels)
    is dropped. `batch_fn` maps a batch to the inputs. Memory does not grow with the number of batches. Where
    torch.distributed is in use, every rank observes its own batches, and all of them get the same scales. With
    `only_missing`, tensors that have a scale are left as they are, and no batch is taken if all have one. `first` is called
    with the first batch before that is observed, or with None on a rank without batches. `each` is called with every batch after
    that is observed.

    Raises CalibrationError if `batches` is empty, or a batch does not fit the model, or holds NaN or infinite
    values; what was observed before stays observed, and the state is CALIBRATE.
    """
    require_prepared(prepared)
    open_ = [operator for operator in quantized_operators(prepared).values() if not operator.left_out]
    known = {id(quantizer): quantizer for operator in open_ for quantizer in (*owned_quantizers(operator), *_read(operator))}.values()
    if only_missing and all(quantizer.calibrated for quantizer in known):
        enter(prepared, open_, State.VALIDATE)
        return False
    several = distributed and ranks.count() > 1
    if several and ranks.index() > 0 and show_progress is None:
        show_progress = False

    def observe() -> int:
        nonlocal first
        try:
            return take()
        finally:
            if first is not None:
                first(None)  # no other rank waits for this one

    def take() -> int:
        nonlocal first
        seen = 0
        for batch in progress(first_batches(batches, num_batches), length(batches, num_batches), "calibrating", show_progress):
            arguments = model_inputs(prepared, batch if batch_fn is None else batch_fn(batch), seen)
            if first is not None:
                prelude, first = first, None
                prelude(arguments)
            with _all_or_nothing(prepared), repeatable():
                prepared(**by_name(prepared, arguments))
            if each is not None:
                each(arguments)
            seen += 1
        return seen

    with _computing(prepared, open_):
        enter(prepared, open_, State.CALIBRATE)
        with _paused(quantizer for quantizer in known if only_missing and quantizer.calibrated):
            if not (_on_all_ranks(prepared, observe) if several else observe()):
                raise no_batches(num_batches)
        with repeatable():
            enter(prepared, open_, State.VALIDATE)
    return True


@contextmanager
def _paused(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Inside, these quantizers observe nothing."""
    chosen = list(quantizers)
    try:
        for quantizer in chosen:
            quantizer.paused = True
        yield
    finally:
        for quantizer in chosen:
            quantizer.paused = False


def _on_all_ranks(prepared: nn.Module, observe: Callable[[], int]) -> int:
    """Observe, and merge the observations of all ranks; earlier observations count once, as rank 0 has them."""
    observers = {path: module for path, module in prepared.named_modules() if isinstance(module, Observer)}
    before = ranks.copy_of(observers)
    if ranks.index() > 0:
        for observer in observers.values():
            observer.reset()
    try:
        seen = observe()
    except Exception:
        ranks.restore(observers, before)
        ranks.merge(observers, None)
        raise
    try:
        return ranks.merge(observers, seen)
    except FxQuantError:
        ranks.restore(observers, before)
        raise


@contextmanager
def _all_or_nothing(prepared: nn.Module) -> Iterator[None]:
    """Inside, an exception restores the buffers of all observers, so that a batch that fails half-way is not observed."""
    buffers = [buffer for module in prepared.modules() if isinstance(module, Observer) for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    except BaseException:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        raise


@checked()
def qparams(prepared: nn.Module) -> dict[str, float | tuple[float, int]]:
    """Return the scale of every operator's output by node name, NaN where it is not known yet, or is that of a 32-bit sum.

    For a uint8 output this is a pair: the scale and the zero point.

    Where a residual is fused into an operator, the tensor that it is added to has a scale too, "name.intermediate", for when it cannot
    be added in the accumulator.
    """
    require_prepared(prepared)
    grids = {name: quantizer.grid for name, quantizer in _by_name(quantized_operators(prepared)).items()}
    return {name: (float(grid.scale), grid.zero_point) if grid.type.affine else float(grid.scale) for name, grid in grids.items()}


def _by_name(operators: Mapping[str, QuantizedOperator]) -> dict[str, Quantizer]:
    """Return the quantizers of outputs, and of the tensors that residuals are added to, by their names in `qparams`."""
    found: dict[str, Quantizer] = {}
    for name, operator in operators.items():
        if not operator.plain:
            found[name] = operator.output
        if operator.intermediate is not None:
            found[name + INTERMEDIATE] = operator.intermediate
    return found


@checked(scales=Kind("a dict of scales, positive and finite numbers, by module path or node name", _scales))
def set_qparams(prepared: nn.Module, scales: Mapping[str, float | tuple[float, int]]) -> None:
    """Fix scales by module path or by the names of `qparams`; they no longer follow any observation.

    A pair is a scale and a zero point, as `qparams` returns for a uint8 output; with a scale alone the zero point is unchanged.

    Only the named tensors are fixed: where a residual is fused into an operator, the tensor that it is added to keeps its own statistics.

    Raises ConfigurationError, and changes nothing, if a name matches no operator or a scale is not positive and finite.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    named = _by_name(operators)
    given: Mapping[str, tuple[float, int | None]] = scales  # type: ignore[assignment]  # as `_scales` has made them
    chosen: list[tuple[str, Quantizer, tuple[float, int | None]]] = []
    for name, (scale, zero_point) in given.items():
        if not 0 < scale < float("inf"):
            raise ConfigurationError(
                f"the scale {scale} for {name!r} is not usable",
                because="a scale is a positive, finite number",
                remedy="pass a positive scale",
            )
        if not is_scale(float(scale)):
            raise ConfigurationError(
                f"the scale {scale} for {name!r} is not usable",
                because="a scale is a float32 number, which lies between 2^-126 (1.2e-38) and 3.4e38",
                remedy="pass a scale that is of the size of the tensor's values",
            )
        if name.endswith(INTERMEDIATE) and name in named:
            chosen.append((name, named[name], (scale, zero_point)))
            continue
        for operator in _select(operators, [name]):
            if operator.plain:
                raise ConfigurationError(
                    f"the scale of {name!r} cannot be set",
                    because=f"the result of %{operator.name} is "
                    + ("float" if operator.operator.dynamic else "boolean or integer")
                    + ", which has no scale",
                    remedy="leave it out",
                )
            if operator.output.follows_sum:
                raise ConfigurationError(
                    f"the scale of {name!r} cannot be set",
                    because=f"%{operator.name} has a 32-bit output, whose scale is that of its weight and its input",
                    remedy="give it an int8 or int16 output, or leave it out",
                )
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
def freeze(prepared: nn.Module, *, scales: bool = True, batch_norm: bool = True) -> None:
    """Freeze scales, followed or learned, and running statistics, which besides the model's parameters change in training.

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
