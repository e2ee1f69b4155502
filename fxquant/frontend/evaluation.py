"""Evaluate the operations on traced tensors: on tensors without data, or on constants, once for equal arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxquant.errors import FxQuantError
from fxquant.frontend.arguments import Arguments
from fxquant.frontend.fake import Evaluator, Outcome, is_data_dependent, refuse_data
from fxquant.frontend.shapes import known_result

READS_CONTENT = frozenset((
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "numpy", "__array__", "is_nonzero",
    "__contains__",
))  # fmt: skip


def evaluate(evaluator: Evaluator, name: str, function: Callable[..., Any], args: Any, kwargs: Any, arguments: Arguments) -> Outcome:
    """Return what an operation returns. Raises TraceError if that depends on data, and what the function raises."""
    key: Any = tuple(arguments.key) if arguments.fake else None
    try:
        outcome = evaluator.cache.get(key)
    except TypeError:  # something unhashable among the arguments
        key = outcome = None
    if outcome is None:
        outcome = _run(evaluator, name, function, args, kwargs, arguments)
        if key is not None and not outcome.from_content:
            evaluator.cache[key] = outcome
    return outcome


def _run(evaluator: Evaluator, name: str, function: Callable[..., Any], args: Any, kwargs: Any, arguments: Arguments) -> Outcome:
    fake = arguments.fake
    if fake and name in READS_CONTENT:
        refuse_data(name)
    known = known_result(function, args, kwargs) if fake else None
    if known is not None:
        return Outcome(known, None, same_place=False)
    try:
        return evaluator.run(function, args, kwargs, fake, arguments.substitutes)
    except FxQuantError:
        raise
    except Exception as error:
        depends = is_data_dependent(error)
        again = evaluator.run_on_content if depends else evaluator.run_on_zeros
        found = again(function, args, kwargs, arguments.substitutes) if (arguments.known if depends else fake) else None
        if found is None and not depends:
            raise
        return found or refuse_data(name)
