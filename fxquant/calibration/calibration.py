"""Put operators into states, and observe the batches that set their scales."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

import fxquant.calibration.distributed as ranks
from fxquant.calibration.cutting import keep_statistics, operand_quantizers
from fxquant.calibration.left_out import having, in_float
from fxquant.calibration.unseen import SHOWN, follow_unseen
from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.ir.graph import by_name, stage_of
from fxquant.ir.model import repeatable
from fxquant.prepared.batches import first_batches, length, model_inputs, no_batches
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.observers import Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.state import State
from fxquant.support.arguments import checked
from fxquant.support.progress import progress

logger = logging.getLogger("fxquant")


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
    chosen = operators.values() if modules is None else select(operators, list(modules))
    enter(prepared, chosen, state)


def enter(model: nn.Module, chosen: Iterable[QuantizedOperator], state: State) -> None:
    """Put operators of a prepared model, or of a part of one, into a state. See `set_state`."""
    zeros: list[Quantizer] = []
    for operator in chosen:
        if operator.state is State.CALIBRATE and state is not State.CALIBRATE:
            if not operator.inputs or any(operator.inputs.values()):  # of constants alone, zeros stay zeros
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
    needed = {id(quantizer) for operator in others for quantizer in _read(operator)}
    seen = [each for each in out if each.state is State.FLOAT and not each.plain and each.owns_output and id(each.output) in needed]
    unobserved = [operator.intermediate for operator in seen if operator.intermediate is not None]
    try:
        with (
            having([operator for operator in out if operator.state is State.TRAIN], state=State.VALIDATE),
            having(seen, state=State.CALIBRATE),
            having(unobserved, paused=True),
        ):
            yield
    finally:
        for operator in seen:
            operator.output.update_scale()


def _read(operator: QuantizedOperator) -> Iterator[Quantizer]:
    """Yield the quantizers of an operator's integer operands, and of its own result."""
    yield from operand_quantizers(operator)
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


def select(operators: Mapping[str, QuantizedOperator], names: list[str]) -> list[QuantizedOperator]:
    """Return the operators of modules and nodes of these names. Raises ConfigurationError if a name matches none."""
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


@dataclass(frozen=True)
class CalibrationOptions:
    """How batches are observed.

    num_batches    the number of batches to take; None for all
    batch_fn       what maps a batch to the inputs; None where the batch itself has them
    distributed    whether the observations of all ranks are merged
    only_missing   whether only tensors without a scale are observed
    show_progress  whether a progress bar is shown; None where the terminal decides
    """

    num_batches: int | None = None
    batch_fn: Callable[[Any], Any] | None = None
    distributed: bool = True
    only_missing: bool = False
    show_progress: bool | None = None


@torch.no_grad()
def calibrate(
    prepared: fx.GraphModule,
    batches: Iterable[Any],
    options: CalibrationOptions,
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
    num_batches, batch_fn, only_missing, show_progress = options.num_batches, options.batch_fn, options.only_missing, options.show_progress
    open_ = [operator for operator in quantized_operators(prepared).values() if not operator.left_out]
    known = {id(quantizer): quantizer for operator in open_ for quantizer in (*owned_quantizers(operator), *_read(operator))}.values()
    if only_missing and all(quantizer.calibrated for quantizer in known):
        enter(prepared, open_, State.VALIDATE)
        return False
    several = options.distributed and ranks.count() > 1
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
        with having([quantizer for quantizer in known if only_missing and quantizer.calibrated], paused=True):
            if not (_on_all_ranks(prepared, observe) if several else observe()):
                raise no_batches(num_batches)
        with repeatable():
            enter(prepared, open_, State.VALIDATE)
    return True


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
