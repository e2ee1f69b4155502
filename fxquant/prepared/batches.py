"""Batches as users have them, and the model's inputs as it takes them."""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxquant.errors import CalibrationError, ConfigurationError
from fxquant.ir.graph import BatchDim, TensorFact, annotation, argument_name, fact, unusual_kind
from fxquant.ir.integer import qparams
from fxquant.support import logger


def no_batches(num_batches: int | None) -> CalibrationError:
    """Return the error for an empty iterable of batches."""
    because = "`batches` yielded no batch" if num_batches is None else f"`batches` yielded no batch (num_batches={num_batches})"
    remedy = "pass a list, generator or DataLoader with at least one batch; a generator that was used up yields nothing"
    return CalibrationError("there is nothing to calibrate with", because=because, remedy=remedy)


def as_batches(batches: Any) -> Iterable[Any]:
    """Return an iterable of batches; a tensor or a dict is one batch. Raises ConfigurationError for a value that is not iterable."""
    if isinstance(batches, torch.Tensor | Mapping):
        return [batches]
    try:
        iter(batches)
    except TypeError:
        because = "`batches` is a tensor, or anything that can be iterated over: a list, a generator, a DataLoader"
        raise ConfigurationError(f"a {type(batches).__name__} yields no batches", because=because, remedy="pass one of these") from None
    return batches  # type: ignore[no-any-return]


def first_batches(batches: Iterable[Any], count: int | None) -> Iterator[Any]:
    """Return the first `count` of the batches, all for None, without taking one more."""
    if count is not None and count < 0:
        raise ConfigurationError(f"num_batches={count} is negative", because="it is a number of batches", remedy="pass 1 or more, or None")
    return itertools.islice(batches, count)


def length(batches: Iterable[Any], count: int | None) -> int | None:
    """Return the number of batches, at most `count`; `count` itself where the batches have no length."""
    try:
        whole = len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return count
    return whole if count is None else min(whole, count)


def example_inputs(model: nn.Module, batch: Any) -> Any:
    """Return the part of a batch that forward requires, as a tuple or a dict of forward's arguments.

    Of a dict these are the items with the names of forward's parameters. Of a tuple or list these are the first n items, for n required
    parameters; or the first item, if it is a tuple of n items or a dict, as in ((image, mask), target).
    """
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, Mapping):
        variadic = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {str(key): value for key, value in batch.items() if variadic or key in parameters} or dict(batch)
    if not isinstance(batch, list | tuple):
        check_kind(0, "", batch)
        return batch
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return tuple(batch)
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = len([p for p in positional if p.default is p.empty]) or 1
    first = batch[0] if batch else None
    if isinstance(first, Mapping) and first.keys() <= parameters.keys():
        return dict(first)
    if required > 1 and isinstance(first, list | tuple) and len(first) >= required:
        batch = first
    for index, value in enumerate(batch[:required]):
        check_kind(0, positional[index].name if index < len(positional) else "", value)
    return tuple(batch[:required])


def model_inputs(model: fx.GraphModule, batch: Any, index: int = 0, *, finite: bool = True) -> list[Any]:
    """Return the model's inputs out of a batch: a tensor, a sequence whose leading items are inputs, or a dict by name.

    Items may be nested, as in ((image, mask), target): the leading tensors count. The rest is dropped, and logged once.
    Raises CalibrationError, naming the batch, if an input is missing, of another shape or dtype, or, where it is to be `finite`, is not.
    """
    placeholders = [node for node in model.graph.nodes if node.op == "placeholder"]
    names = [argument_name(node) for node in placeholders]
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Mapping) and set(names) <= _by_name(batch[0]).keys():
        batch = batch[0]  # (inputs, targets), the inputs by name
    if isinstance(batch, Mapping):
        items = _by_name(batch)
        missing = [name for name in names if name not in items]
        if missing:
            because = f"it has no {', '.join(missing)}; its keys are {', '.join(map(str, batch))}"
            raise bad_batch(index, because, "pass a dict with forward's argument names, or batch_fn")
        dropped = [name for name in items if name not in names]
        if dropped:
            _tell(model, "batches have %s as well; the model takes only %s", ", ".join(dropped), ", ".join(names))
        values = [items[name] for name in names]
    else:
        leaves = pytree.tree_leaves(batch) if isinstance(batch, list | tuple) else [batch]
        if len(leaves) < len(placeholders):
            because = f"it has {len(leaves)} items and the model takes {len(placeholders)} inputs"
            raise bad_batch(index, because, "yield all inputs, or pass batch_fn")
        if len(leaves) > len(placeholders):
            _tell(model, "batches have %d items; the model takes the first %d", len(leaves), len(placeholders))
        values = leaves[: len(placeholders)]
    for node, value in zip(placeholders, values, strict=True):
        _check_input(index, node, value, finite)
    _check_agreement(index, placeholders, values)
    return values


def _check_agreement(index: int, placeholders: list[fx.Node], values: list[Any]) -> None:
    """Raise CalibrationError if inputs of one batch have different batch sizes."""
    sizes = {
        node.name: value.shape[dim]
        for node, value in zip(placeholders, values, strict=True)
        if isinstance(node_fact := fact(node), TensorFact)
        for dim, size in enumerate(node_fact.shape)
        if isinstance(size, BatchDim) and size.coefficient
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} for {name!r}" for name, size in sizes.items())
        raise bad_batch(index, f"its sizes are {listed}", "yield inputs that share one batch size, or pass batch_fn")


def _by_name(batch: Mapping[Any, Any]) -> dict[str, Any]:
    """Flatten a dict to the names of the model's inputs: the items of a list "images" become images_0, images_1, …"""
    inputs: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, list | tuple | Mapping):
            inputs.update((f"{key}_{index}", leaf) for index, leaf in enumerate(pytree.tree_leaves(value)))
        else:
            inputs[str(key)] = value
    return inputs


def _tell(model: fx.GraphModule, message: str, *arguments: Any) -> None:
    """Log, once for each model, that items of the batches are dropped."""
    if not model.meta.get("warned_of_dropped_batches"):
        logger.info(message, *arguments)
        model.meta["warned_of_dropped_batches"] = True


def check_kind(index: int, name: str, value: Any) -> None:
    """Raise CalibrationError for a NumPy array, with the conversion to a tensor as remedy."""
    if type(value).__module__.partition(".")[0] == "numpy":
        what = f"its value for {name!r}" if name else "it"
        remedy = "convert it: torch.from_numpy(array), here or in batch_fn; a DataLoader does"
        raise bad_batch(index, f"{what} is a numpy.{type(value).__name__}, not a tensor", remedy)


def _check_input(index: int, node: fx.Node, value: Any, finite: bool) -> None:
    expected = fact(node)
    if not isinstance(expected, TensorFact):
        return
    remedy = f"yield tensors of shape [{', '.join(map(str, expected.shape))}] and dtype {expected.dtype}, or pass batch_fn"
    check_kind(index, node.name, value)
    if not isinstance(value, torch.Tensor):
        raise bad_batch(index, f"its value for {node.name!r} is a {type(value).__name__}, not a tensor", remedy)
    unusual = unusual_kind(value)
    if unusual is not None:
        raise bad_batch(index, f"its value for {node.name!r} is a {unusual[0]} tensor, and the model takes dense ones", unusual[1])
    if value.dtype != expected.dtype:
        raise bad_batch(index, f"its value for {node.name!r} is {value.dtype}, and the model was traced with {expected.dtype}", remedy)
    sizes = zip(expected.shape, value.shape, strict=False)
    if value.dim() != len(expected.shape) or any(isinstance(e, int) and e != v for e, v in sizes):
        if value.dim() == len(expected.shape) - 1:
            remedy += "; items of a dataset need a batch dimension, which a DataLoader gives them"
        elif value.dim() == len(expected.shape) > 1:
            remedy += "; for other sizes give fxq.quantize a list, as list(loader), or say what varies: Options(dynamic_shapes=...)"
        because = f"its value for {node.name!r} has shape {list(value.shape)}, and the model was traced with {expected}"
        raise bad_batch(index, because, remedy)
    if finite and value.is_floating_point() and not bool(torch.isfinite(value).all()):
        kind = "NaN" if bool(torch.isnan(value).any()) else "infinite values"
        if kind != "NaN" and not any(map(_quantized, node.users)):
            return  # an attention mask, say: nothing derives a scale from it
        remedy = "clean the data: a scale computed from such values would be meaningless"
        raise bad_batch(index, f"its value for {node.name!r} holds {kind}", remedy)


def _quantized(node: fx.Node) -> bool:
    """Return whether a node of a prepared or an integer model is a quantized tensor."""
    spec = annotation(node)
    return qparams(node) is not None or (spec is not None and spec.dtype is not None)


def bad_batch(index: int, because: str, remedy: str) -> CalibrationError:
    """Return the error for a batch, counted from 0, whose inputs are not the model's."""
    return CalibrationError(f"batch {index} does not fit the model", because=because, remedy=remedy)
