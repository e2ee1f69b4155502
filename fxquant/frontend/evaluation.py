"""Evaluate the operations on traced tensors: on tensors without data, or on constants, once for equal arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fxquant.errors import FxQuantError
from fxquant.frontend.arguments import Arguments
from fxquant.frontend.fake import Evaluator, Outcome, is_data_dependent, refuse_data
from fxquant.frontend.shapes import known_result

_READS_CONTENT = frozenset((
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "numpy", "__array__", "is_nonzero",
    "__contains__",
))  # fmt: skip


class Asked(NamedTuple):
    """An operation: the function that computes it, its arguments, and what its node calls."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    target: Any

    @property
    def name(self) -> str:
        """The name of what is called."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))


class Recorder(Protocol):
    """A trace, as far as the evaluation of its operations needs it."""

    evaluator: Evaluator

    def note(self, text: str) -> None:
        """Record something that was fixed while tracing."""


def evaluate(trace: Recorder, asked: Asked, arguments: Arguments, content: bool) -> Outcome:
    """Return what an operation returns. Raises TraceError if that depends on data, and what the function raises.

    Without `content` constants among the arguments stand for their shapes and dtypes alone.
    """
    fake = arguments.fake or not content
    if not fake:
        return _run(trace, asked, arguments, fake)
    key, cache = tuple(arguments.key), trace.evaluator.cache
    try:
        outcome = cache.get(key)
    except TypeError:  # something unhashable among the arguments
        return _run(trace, asked, arguments, fake)
    if outcome is None:
        outcome = _run(trace, asked, arguments, fake)
        if not outcome.from_content:
            cache[key] = outcome
    return outcome


def _run(trace: Recorder, asked: Asked, arguments: Arguments, fake: bool) -> Outcome:
    evaluator, (function, args, kwargs, _) = trace.evaluator, asked
    if fake and asked.name in _READS_CONTENT:
        refuse_data(asked.name)
    known = known_result(evaluator, function, args, kwargs) if fake else None
    if known is not None:
        return Outcome(known, None, same_place=False)
    try:
        outcome = evaluator.run(function, args, kwargs, fake, arguments.substitutes)
    except FxQuantError:
        raise
    except Exception as error:
        depends = is_data_dependent(error)
        again = evaluator.run_on_content if depends else evaluator.run_on_zeros
        found = again(function, args, kwargs, arguments.substitutes) if (arguments.known if depends else fake) else None
        if found is None and not depends:
            raise
        outcome = found or refuse_data(asked.name)
    if not fake and asked.name in _READS_CONTENT:
        trace.note(f"the content of a constant was read by {asked.name}")
    return outcome
