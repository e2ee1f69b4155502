"""The samples that operators have on their records, as calls of each of their call forms."""

import ast
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.operators.spelling import NAMESPACE, Input, Row, Spelling, written_forms
from fxquant.ir import functional
from fxquant.ops import OPERATORS, Operator
from fxquant.ops.core.samples import Sample

Shape = tuple[int, ...]
REVERSED = ("__rdiv__", "__rtruediv__", "__rfloordiv__", "__rmod__")  # of a number by a tensor, which is another operator


class Call(NamedTuple):
    """A call of an operator: in one of its call forms with the arguments of a sample, or as a text.

    form    the call form; of a sample that is a text, one of the texts that it stands for
    shapes  of the operands, without the batch
    build   makes a model that makes the call
    """

    operator: Operator
    form: Any
    sample: Sample
    shapes: tuple[Shape, ...]
    build: Callable[[], nn.Module]


class Called(nn.Module):
    """A model of one call: `function(model, *tensors)`, which may read its layer."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(self, *arguments)


def forms_of(record: Operator) -> list[Any]:
    """The call forms of an operator that a user can write: functions, modules, methods."""
    functions, methods = filter(callable, record.calls), (form for form in record.calls if isinstance(form, str))
    forms = dict.fromkeys((record.function, *functions, *record.modules, *methods))
    return [form for form in forms if form is not record.function or not form.__module__.startswith("fxquant.")]


def calls() -> Iterator[Call]:
    """Every call form of every operator, each with its first sample, the first form with the others, too; and every text in every form."""
    for record in OPERATORS.values():
        plain = [sample for sample in record.samples if not sample.text]
        for index, form in enumerate(form for form in forms_of(record) if form not in REVERSED):
            for sample in plain[: None if index == 0 else 1]:
                yield call(record, form, sample)
        for sample in record.samples:
            yield from (written(record, form, sample) for form in (written_forms(sample.text) if sample.text else ()))


def is_first(call: Call) -> bool:
    """Whether a call is the one that stands for its sample."""
    return bool(call.form == (written_forms(call.sample.text) if call.sample.text else forms_of(call.operator))[0])


SIGNS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.Gt: operator.gt, ast.Lt: operator.lt, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip


# What the front end writes for a method, into a view, and for a function.
REPLACED = {"copy_": {functional.write, functional.copy}, "pack_padded_sequence": {functional.over_lengths}}


def forms_written(call: Call) -> set[Any]:
    """The call forms of a call: functions, classes of modules, and names of methods, as they stand in a text."""
    if not call.sample.text:
        return {call.form}
    names: set[Any] = set()
    for node in ast.walk(ast.parse(call.form.replace("{", "(").replace("}", ")"))):
        if isinstance(node, ast.Attribute):
            owner = _public(node.value)
            names.add(getattr(owner, node.attr) if owner is not None else getattr if node.attr in ("T", "mT") else node.attr)
            names |= REPLACED.get(node.attr, set())
        elif isinstance(node, ast.Subscript):
            names.add(functional.setitem if isinstance(node.ctx, ast.Store) else operator.getitem)
        names |= {SIGNS[type(sign)] for sign in (*getattr(node, "ops", ()), getattr(node, "op", None)) if type(sign) in SIGNS}
    return {form for form in names if form.__hash__ is not None}


def _public(node: ast.expr) -> Any:
    """Return the object that a dotted name refers to; None if there is none."""
    if isinstance(node, ast.Name):
        return NAMESPACE.get(node.id)
    return getattr(_public(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None


def written(record: Operator, text: str, sample: Sample) -> Call:
    """The call that is written as this text."""
    spelling = Spelling("", Row(record.name, (text,), tuple(Input(shape) for shape in sample.arguments.values())), text)
    return Call(record, text, sample, tuple(entry.shape for entry in spelling.inputs.values()), spelling.model)


def call(record: Operator, form: Any, sample: Sample) -> Call:
    """The call of this form with the arguments of a sample."""
    tensors = {name: value for name, value in sample.arguments.items() if name in record.operands and isinstance(value, tuple)}
    assert record.operands[0] in tensors, f"the sample of {record.name} begins with its operand"
    others = {name: value for name, value in sample.arguments.items() if name not in tensors}
    leads = [one for one, each in zip(record.parameter_names, tensors, strict=False) if one == each]  # the others are keywords
    layer = None
    if isinstance(form, type):
        parameters = inspect.signature(form).parameters
        layer = form(**{name: value for name, value in others.items() if name in parameters})
    name = form if isinstance(form, str) else form.__name__
    by_position = name.startswith("__") or getattr(form, "__module__", "") == "_operator"

    def forward(held: Any, *arguments: Tensor) -> Any:
        arguments = tuple(one.clone() for one in arguments) if name.endswith("_") or by_position else arguments
        if isinstance(form, type):
            return held.layer(*arguments)
        function = getattr(arguments[0], form) if isinstance(form, str) else form
        named = {**dict(zip(tensors, arguments, strict=True)), **others}
        leading = [named.pop(one) for one in leads]
        first = leading[1:] if isinstance(form, str) else leading
        return function(*first, *named.values()) if by_position else function(*first, **named)

    return Call(record, form, sample, tuple(tensors.values()), lambda: Called(forward, layer))
