"""States, calibration, and the scales of a prepared model."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxquant.errors import CalibrationError, ConfigurationError
from fxquant.graph import TensorFact, fact
from fxquant.observers import Observer
from fxquant.prepared import QuantizedOperator, quantized_operators
from fxquant.progress import progress
from fxquant.quantizer import Quantizer
from fxquant.state import State

logger = logging.getLogger("fxquant")


def require_prepared(model: nn.Module) -> None:
    """Raise ConfigurationError if this is no prepared model."""
    if not isinstance(model, fx.GraphModule) or model.meta.get("stage") != "PREPARED":
        raise ConfigurationError(
            f"{type(model).__name__} is no prepared model",
            because="it was not returned by fxq.prepare, or its preparation was stopped early with until=",
            remedy="call fxq.prepare(model, example_inputs, target=...) and pass its result",
        )


def set_state(prepared: nn.Module, state: State, modules: str | Iterable[str] | None = None) -> None:
    """Put all operators, or those of the named modules or nodes and everything below them, into a state.

    Leaving CALIBRATE sets the scales from what was observed. Raises ConfigurationError if a name matches nothing.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    chosen = operators.values() if modules is None else _select(operators, [modules] if isinstance(modules, str) else list(modules))
    for operator in chosen:
        if operator.state is State.CALIBRATE and state is not State.CALIBRATE:
            update_scales(operator)
        operator.state = State(state)


def update_scales(operator: QuantizedOperator) -> None:
    """Set the scales an operator owns from what was observed."""
    for quantizer in owned_quantizers(operator):
        quantizer.update_scale()


def owned_quantizers(operator: QuantizedOperator) -> list[Quantizer]:
    """The quantizers that belong to an operator: of its output, unless it shares another's, and before its residual."""
    return ([operator.output] if operator.owns_output else []) + ([operator.intermediate] if operator.intermediate is not None else [])


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
    show_progress: bool | None = None,
) -> None:
    """Observe the batches, set every scale, and leave the model in state VALIDATE.

    `batches` yields tensors, tuples or dicts; the leading items fill forward's inputs, and the rest (labels)
    is dropped. `batch_fn` maps a batch to the inputs. Memory does not grow with the number of batches.

    Raises CalibrationError if there is no batch, or one does not fit the model, or holds NaN or infinite
    values; what was observed before stays observed, and the state is CALIBRATE.
    """
    require_prepared(prepared)
    set_state(prepared, State.CALIBRATE)
    seen = 0
    total = num_batches if num_batches is not None else _length(batches)
    for batch in progress(itertools.islice(batches, num_batches), total, "calibrating", show_progress):
        arguments = model_inputs(prepared, batch if batch_fn is None else batch_fn(batch), seen)
        with _all_or_nothing(prepared):
            prepared(*arguments)
        seen += 1
    if seen == 0:
        raise no_batches(num_batches)
    set_state(prepared, State.VALIDATE)


@contextmanager
def _all_or_nothing(prepared: nn.Module) -> Iterator[None]:
    """A batch that fails half-way leaves no trace in the observers that had seen it by then."""
    buffers = [buffer for module in prepared.modules() if isinstance(module, Observer) for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    except BaseException:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        raise


def no_batches(num_batches: int | None) -> CalibrationError:
    """The error for an empty iterable of batches."""
    return CalibrationError(
        "there is nothing to calibrate with",
        because="`batches` yielded no batch" if num_batches is None else f"`batches` yielded no batch (num_batches={num_batches})",
        remedy="pass a list, generator or DataLoader with at least one batch; a generator that was used up yields nothing",
    )


def example_inputs(model: nn.Module, batch: Any) -> Any:
    """The part of a batch that forward requires: its leading items, as many as forward has required parameters."""
    if not isinstance(batch, list | tuple):
        return batch
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return tuple(batch) if variadic else tuple(batch[: len(positional)])


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def model_inputs(model: fx.GraphModule, batch: Any, index: int = 0) -> list[Any]:
    """The model's inputs out of a batch: a tensor, a sequence whose leading items are inputs, or a dict by name.

    Raises CalibrationError, naming the batch, if an input is missing, of another shape or dtype, NaN or infinite.
    """
    placeholders = [node for node in model.graph.nodes if node.op == "placeholder"]
    if isinstance(batch, Mapping):
        missing = [str(node.target) for node in placeholders if node.target not in batch]
        if missing:
            raise _bad_batch(
                index,
                f"it has no {', '.join(missing)}; its keys are {', '.join(map(str, batch))}",
                "pass a dict with forward's argument names, or batch_fn",
            )
        values = [batch[str(node.target)] for node in placeholders]
    else:
        items = list(batch) if isinstance(batch, list | tuple) else [batch]
        if len(items) < len(placeholders):
            raise _bad_batch(
                index, f"it has {len(items)} items and the model takes {len(placeholders)} inputs", "yield all inputs, or pass batch_fn"
            )
        if len(items) > len(placeholders) and not model.meta.get("told_dropped"):
            logger.info("batches have %d items; the model takes the first %d", len(items), len(placeholders))
            model.meta["told_dropped"] = True
        values = items[: len(placeholders)]
    for node, value in zip(placeholders, values, strict=True):
        _check_input(index, node, value)
    return values


def _check_input(index: int, node: fx.Node, value: Any) -> None:
    expected = fact(node)
    if not isinstance(expected, TensorFact):
        return
    remedy = f"yield tensors of shape {[str(size) for size in expected.shape]} and dtype {expected.dtype}, or pass batch_fn".replace(
        "'", ""
    )
    if not isinstance(value, torch.Tensor):
        raise _bad_batch(index, f"its value for {node.name!r} is a {type(value).__name__}, not a tensor", remedy)
    if value.dtype != expected.dtype:
        raise _bad_batch(index, f"its value for {node.name!r} is {value.dtype}, and the model was traced with {expected.dtype}", remedy)
    fits = value.dim() == len(expected.shape) and all(
        not isinstance(e, int) or e == v for e, v in zip(expected.shape, value.shape, strict=True)
    )
    if not fits:
        raise _bad_batch(
            index, f"its value for {node.name!r} has shape {list(value.shape)}, and the model was traced with {expected}", remedy
        )
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        kind = "NaN" if bool(torch.isnan(value).any()) else "infinite values"
        raise _bad_batch(
            index, f"its value for {node.name!r} holds {kind}", "clean the data: a scale computed from such values would be meaningless"
        )


def _bad_batch(index: int, because: str, remedy: str) -> CalibrationError:
    return CalibrationError(f"batch {index} does not fit the model", because=because, remedy=remedy)


def qparams(prepared: nn.Module) -> dict[str, float]:
    """The scale of every operator's output by node name, NaN where it is not known yet, or is that of a 32-bit sum."""
    require_prepared(prepared)
    return {name: float(operator.output.scale) for name, operator in quantized_operators(prepared).items()}


def set_qparams(prepared: nn.Module, scales: Mapping[str, float]) -> None:
    """Fix scales by module path or node name; they no longer follow any observation.

    Raises ConfigurationError, and changes nothing, if a name matches no operator or a scale is not positive and finite.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    chosen: list[tuple[QuantizedOperator, float]] = []
    for name, scale in scales.items():
        if not 0 < float(scale) < float("inf"):
            raise ConfigurationError(
                f"the scale {scale} for {name!r} is not usable",
                because="a scale is a positive, finite number",
                remedy="pass a positive scale",
            )
        for operator in _select(operators, [name]):
            if operator.output.follows_sum:
                raise ConfigurationError(
                    f"the scale of {name!r} cannot be set",
                    because=f"%{operator.name} has a 32-bit output, whose scale is that of its weight and its input",
                    remedy="give it an int8 or int16 output, or leave it out",
                )
            chosen.append((operator, float(scale)))
    for operator, scale in chosen:
        operator.output.set_scale(scale)


def freeze(prepared: nn.Module, *, scales: bool = True, batch_norm: bool = True) -> None:
    """Stop statistics from moving while training: the observed scales, and the batch norms' running statistics.

    Afterwards TRAIN in train mode computes exactly what VALIDATE does, dropout aside.
    """
    require_prepared(prepared)
    for operator in quantized_operators(prepared).values():
        if batch_norm:
            operator.live_batch_norm = False
        if scales:
            for quantizer in owned_quantizers(operator):
                quantizer.update_scale()
                quantizer.frozen = True
