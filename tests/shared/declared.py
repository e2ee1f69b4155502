"""The samples that operators have on their records, as calls of each of their call forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxquant.ops import OPERATORS, Operator
from fxquant.ops.core.samples import Sample

Shape = tuple[int, ...]


class Call(NamedTuple):
    """A call form of an operator with the arguments of a sample: `forward(model, *tensors)`, whose shapes are without the batch."""

    operator: Operator
    form: Any
    sample: Sample
    shapes: tuple[Shape, ...]
    forward: Callable[..., Any]
    layer: nn.Module | None


def declared() -> list[Operator]:
    """The operators with samples of their own."""
    return [record for record in OPERATORS.values() if record.samples]


def forms_of(record: Operator) -> list[Any]:
    """The call forms of an operator that a user can write: functions, modules, methods."""
    own = [] if record.function.__module__.startswith("fxquant.") else [record.function]
    return list(dict.fromkeys([*own, *record.functions, *record.modules, *record.methods]))


def calls() -> Iterator[Call]:
    """Every call form of every operator with samples, each with its first sample; the first form with the others, too."""
    for record in declared():
        for index, form in enumerate(forms_of(record)):
            for sample in record.samples[: None if index == 0 else 1]:
                yield call(record, form, sample)


def call(record: Operator, form: Any, sample: Sample) -> Call:
    tensors = {name: value for name, value in sample.arguments.items() if name in record.operands and isinstance(value, tuple)}
    assert record.operands[0] in tensors, f"the sample of {record.name} begins with its operand"
    others = {name: value for name, value in sample.arguments.items() if name not in tensors}
    leads = [one for one, each in zip(record.parameter_names, tensors, strict=False) if one == each]  # the others are keywords
    layer = None
    if isinstance(form, type):
        known = inspect.signature(form).parameters
        layer = form(**{name: value for name, value in others.items() if name in known})
    name = form if isinstance(form, str) else form.__name__
    by_position = name.startswith("__") or getattr(form, "__module__", "") == "_operator"

    def forward(held: Any, *given: Tensor) -> Any:
        given = tuple(one.clone() for one in given) if name.endswith("_") or by_position else given
        if isinstance(form, type):
            return held.layer(*given)
        function = getattr(given[0], form) if isinstance(form, str) else form
        named = {**dict(zip(tensors, given, strict=True)), **others}
        leading = [named.pop(one) for one in leads]
        first = leading[1:] if isinstance(form, str) else leading
        return function(*first, *named.values()) if by_position else function(*first, **named)

    return Call(record, form, sample, tuple(tensors.values()), forward, layer)
