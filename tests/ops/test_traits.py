"""The criteria of traits and of facts about primitives, run on samples of everything that has them."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.backends.onnx.writer import Emitter
from fxquant.ops import OPERATORS, Operator, Trait
from fxquant.ops.elementwise.table import INPUT, UNARY
from fxquant.primitives import POINTWISE, PRIMITIVES, Primitive, Role, ZeroPoint
from tests.shared.c_cases import cases

pytestmark = pytest.mark.quick

Arguments = tuple[Any, ...]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = drawn(2, 4, 6, 6), drawn(2, 4, 6, 6, seed=1)
IMAGES = {rank: drawn(2, 4, *[6] * rank) for rank in (1, 2, 3)}
KEEP = drawn(2, 4, 6, 6, seed=2) > 0
PLACES = torch.tensor([2, 0, 0, 3]).view(1, 4, 1, 1).expand_as(X)

# The arguments of a call of each operator that has traits; a unary function is called with its defaults.
SAMPLES: dict[str, list[Arguments]] = {
    "shifted": [(X, "exp", 2.0, 1.0, {})],
    "clamp": [(X, 0.0, None), (X, None, 0.0)],
    **{f"max_pool{rank}d": [(image, 3), (image, 2, 1, 1)] for rank, image in IMAGES.items()},
    **{f"avg_pool{rank}d": [(image, 3), (image, 2, 1, 1, False, False)] for rank, image in IMAGES.items()},
    **{f"adaptive_{kind}_pool{rank}d": [(image, 4)] for kind in ("avg", "max") for rank, image in IMAGES.items()},
    **{name: [(X, [1, 2], True), (X, [1, 2, 3])] for name in ("mean", "sum", "amax", "amin")},
    **{name: [(X, [2, 3]), (X, [1], 1, True)] for name in ("var", "std")},
    "norm": [(X, 2.0, [1]), (X, 2.0, [2, 3], True)],
    **{name: [(X,)] for name in ("requantize", "identity", "neg", "dropout", "nan_to_num")},
    "curve": [(X, ("sub", INPUT, 1.0, 1))],
    "where": [(KEEP, X, Y), (KEEP, X, 0.5)],
    "reshape": [(X, [8, -1])],
    "permute": [(X, [0, 3, 1, 2])],
    "expand": [(drawn(2, 1, 3), [2, 4, 3]), (drawn(3, 1), [2, 3, 5])],
    **{name: [(X, Y)] for name in ("maximum", "minimum", "mul", "true_divide")},
    **{name: [(X, Y), (X, Y, 2)] for name in ("add", "sub")},
    "div": [(X, 2.0)],
    "to_real": [(X.argmax(1),)],
    **{f"{way}_{what}": [(X, Y)] for way in ("floor", "trunc") for what in ("quotient", "remainder")},
    **{name: [(X, drawn(5, 6))] for name in ("linear", "dynamic_linear")},
    **{f"conv{way}{rank}d": [(image, drawn(4, 4, *[3] * rank))] for way in ("", "_transpose") for rank, image in IMAGES.items()},
    "matmul": [(X, Y)],
    "einsum": [("abcd,abde->abce", [X, Y])],
    **{name: [(X, -1), (X, 1)] for name in ("softmax", "log_softmax")},
    "masked_softmax": [(X, KEEP, -1)],
    "prelu": [(X, drawn(4))],
    **{name: [(X, Y)] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: [(X,)] for name in ("isnan", "isinf", "isfinite")},
    **{f"logical_{name}": [(X * KEEP, Y)] for name in ("and", "or", "xor")},
    "logical_not": [(X * KEEP,)],
    **{name: [(X * KEEP, 1)] for name in ("any", "all")},
    "getitem": [(X, [slice(1), 2, None, slice(None, None, 2), [1, 0]])],
    "repeat": [(X, [1, 2, 1, 3])],
    **{name: [([X, Y], 1)] for name in ("cat", "stack")},
    "setitem": [(X, [slice(None), 1], 0.5), (X, [slice(None), slice(1)], Y[:, :1])],
    "write": [(X, Y[:, 0], [("select", (1, 0), {})])],
    **{name: [(X, 1, PLACES, Y)] for name in ("scatter", "scatter_add")},
    "scatter_extremum": [(X, 1, PLACES, Y, True)],
    "index_add": [(X, 1, torch.tensor([0, 2]), Y[:, :2])],
    "interpolate": [(X, None, 2.0, "bilinear", False), (X, [9, 9], None, "nearest")],
}


def samples(operator: Operator) -> list[Arguments]:
    if operator.name in SAMPLES or operator.name not in UNARY:
        return SAMPLES.get(operator.name, [])
    return [tuple(operator.bind((X,), {}).values())]


# ---- the criteria of operators ------------------------------------------------------------------------------------------
def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.allclose(one.nan_to_num(), other.nan_to_num(), rtol=1e-5, atol=1e-5)


def activations(operator: Operator, arguments: Arguments) -> list[int]:
    """The positions of the operands that are tensors, or lists of tensors."""
    return [
        position
        for position, name in enumerate(operator.parameter_names[: len(arguments)])
        if name in operator.operands and isinstance(arguments[position], Tensor | list)
    ]


def changed(operator: Operator, arguments: Arguments, function: Callable[[Tensor], Tensor], *chosen: int) -> Tensor:
    """The result for operands of which all, or the chosen ones, are changed."""
    actual, number = list(arguments), itertools.count()
    for position in activations(operator, arguments):
        value = actual[position]
        values = [
            function(each) if not chosen or next(number) in chosen else each for each in (value if isinstance(value, list) else [value])
        ]
        actual[position] = values if isinstance(value, list) else values[0]
    return operator.function(*actual)


def shuffled(value: Tensor, dim: int) -> Tensor:
    return value.index_select(dim, torch.randperm(value.shape[dim], generator=torch.Generator().manual_seed(3)))


def elementwise(operator: Operator, arguments: Arguments) -> bool:
    value = changed(operator, arguments, lambda x: x)
    return equal(changed(operator, arguments, lambda x: shuffled(x.flatten(), 0).view_as(x)), shuffled(value.flatten(), 0).view_as(value))


def homogeneous(operator: Operator, arguments: Arguments) -> bool:
    return torch.equal(changed(operator, arguments, lambda x: 2 * x), 2 * changed(operator, arguments, lambda x: x))


def affine(operator: Operator, arguments: Arguments) -> bool:
    def of(x: Tensor) -> Tensor:
        return operator.function(x, 3.0)

    return equal(of((X + Y) / 2), (of(X) + of(Y)) / 2)


def spatial(operator: Operator, arguments: Arguments) -> bool:
    return equal(changed(operator, arguments, lambda x: shuffled(x, 1)), shuffled(changed(operator, arguments, lambda x: x), 1))


def reduction(operator: Operator, arguments: Arguments) -> bool:
    def mixed(x: Tensor) -> Tensor:
        for dim in arguments[1]:
            x = shuffled(x, dim)
        return x

    value = changed(operator, arguments, lambda x: x)
    return value.numel() < arguments[0].numel() and equal(changed(operator, arguments, mixed), value)


def summation(operator: Operator, arguments: Arguments) -> bool:
    rest = arguments[1:]
    return equal(operator.function(X + Y, *rest), operator.function(X, *rest) + operator.function(Y, *rest))


def statistic(operator: Operator, arguments: Arguments) -> bool:
    value = changed(operator, arguments, lambda x: x)
    twice = changed(operator, arguments, lambda x: 2 * x)
    return equal(changed(operator, arguments, torch.neg), value) and any(equal(twice, factor * value) for factor in (2, 4))


def ranks_rows(operator: Operator, arguments: Arguments) -> bool:
    value, dim = changed(operator, arguments, lambda x: x), arguments[operator.parameter_names.index("dim")]
    order = arguments[0].argsort(dim)
    kept = KEEP.gather(dim, order) if "keep" in operator.parameter_names else torch.ones_like(KEEP)
    rising = value.gather(dim, order).masked_fill(~kept, -torch.inf).cummax(dim).values
    sorted_alike = bool((value.gather(dim, order) >= rising - 1e-6)[kept].all())
    return sorted_alike and equal(changed(operator, arguments, lambda x: x + 4), value)


def matrix_product(operator: Operator, arguments: Arguments) -> bool:
    value = changed(operator, arguments, lambda x: 2 * x, 0) / 2
    twice = changed(operator, arguments, lambda x: 2 * x, 1) / 2
    summed = not equal(value, X * Y)
    return summed and equal(value, twice) and equal(value, changed(operator, arguments, lambda x: x))


def divides(operator: Operator, arguments: Arguments) -> bool:
    return not bool(operator.function(X, torch.zeros_like(X)).isfinite().any())


def chooses(operator: Operator, arguments: Arguments) -> bool:
    if len(arguments) == 1:
        return bool(operator.function(torch.full_like(X, torch.nan)).isfinite().all())
    return bool(operator.function(KEEP, X.masked_fill(~KEEP, torch.nan), Y).isfinite().all())


def bounded_below(operator: Operator, arguments: Arguments) -> bool:
    return arguments[1] is None or bool((changed(operator, arguments, lambda x: x) >= arguments[1]).all())


def reshapes(operator: Operator, arguments: Arguments) -> bool:
    """Elements in the order of their first occurrence."""
    result = operator.function(torch.arange(arguments[0].numel()).view_as(arguments[0]), *arguments[1:])
    first = list(dict.fromkeys(result.flatten().tolist()))
    return first == list(range(arguments[0].numel()))


def rearranges(operator: Operator, arguments: Arguments) -> bool:
    read = [value for value in arguments if isinstance(value, Tensor | float)]
    elements = {float(each) for value in read for each in (value.flatten().tolist() if isinstance(value, Tensor) else [value])}
    return elements.issuperset(changed(operator, arguments, lambda x: x).flatten().tolist())


def extremum(operator: Operator, arguments: Arguments) -> bool:
    x, y = arguments
    value = operator.function(x, y)
    return bool(((value == x) | (value == y)).all()) and torch.equal(value, operator.function(y, x))


def integers(operator: Operator, arguments: Arguments) -> bool:
    value = changed(operator, arguments, lambda x: x)
    return torch.equal(value, value.round())


def keeps_integers(operator: Operator, arguments: Arguments) -> bool:
    value = changed(operator, arguments, lambda x: (3 * x).round())
    return torch.equal(value, value.round())


def adds(operator: Operator, arguments: Arguments) -> bool:
    value = changed(operator, arguments, lambda x: x)
    return equal(changed(operator, arguments, lambda x: x + 3, 0), value + 3)


def sums(operator: Operator, arguments: Arguments) -> bool:
    input, rest = arguments[0], arguments[1:]
    added = drawn(*input.shape, seed=4)
    return equal(operator.function(input + added, *rest), operator.function(input, *rest) + operator.function(added, *rest))


def outputs_first(operator: Operator, arguments: Arguments) -> bool:
    input, weight = arguments
    factors = torch.ones(len(weight)).index_fill(0, torch.tensor([1]), 2.0)
    assert operator.layer.channels is not None
    result, channel = operator.function(input, weight), operator.layer.channels({})
    scaled = operator.function(input, weight * factors.view(-1, *[1] * (weight.dim() - 1)))
    return equal(scaled.movedim(channel, -1), result.movedim(channel, -1) * factors)


def pads_zeros(operator: Operator, arguments: Arguments) -> bool:
    (input, weight), around = arguments, [2, 0, 1, 1, 3, 2][: 2 * (arguments[0].dim() - 2)]
    before, after = around[: len(around) // 2], around[len(around) // 2 :]
    padded = F.pad(input, [size for pair in zip(before[::-1], after[::-1], strict=True) for size in pair])
    return torch.equal(operator.function(input, weight, None, 1, around), operator.function(padded, weight))


def views(operator: Operator, arguments: Arguments) -> bool:
    return torch.equal(changed(operator, arguments, lambda x: x > 0), changed(operator, arguments, lambda x: x) > 0)


def collects(operator: Operator, arguments: Arguments) -> bool:
    """Numbers besides the tensors are operands, too."""
    zeros = [0.0 if isinstance(value, float) else value for value in arguments]
    if changed(operator, tuple(zeros), torch.zeros_like).any():
        return False
    count = sum(len(value) if isinstance(value := arguments[at], list) else 1 for at in activations(operator, arguments))
    if count == 1:
        return bool(changed(operator, arguments, torch.zeros_like).any())

    def alone(index: int) -> Tensor:
        numbers = itertools.count()
        return changed(operator, tuple(zeros), lambda x: torch.full_like(x, float(next(numbers) == index)))

    return all(bool(alone(index).any()) for index in range(count))


def pointwise(operator: Operator, arguments: Arguments) -> bool:
    def of(function: Callable[[Tensor], Tensor]) -> Tensor:
        result: Tensor = operator.function(*(function(value) if isinstance(value, Tensor) else value for value in arguments))
        return result.float()

    def mixed(x: Tensor) -> Tensor:
        return shuffled(x.flatten(), 0).view_as(x)

    return all(value.shape == X.shape for value in arguments if isinstance(value, Tensor)) and equal(of(mixed), mixed(of(lambda x: x)))


def compares_with_zero(operator: Operator, arguments: Arguments) -> bool:
    tensors = [(value, value != 0) if isinstance(value, Tensor) else (value, value) for value in arguments]
    return torch.equal(*(operator.function(*values) for values in zip(*tensors, strict=True)))


def of_truth_values(joined: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operator, Arguments], bool]:
    return lambda operator, arguments: torch.equal(operator.function((X > 0).float(), (Y > 0).float()) != 0, joined(X > 0, Y > 0))


def leaves_integers(operator: Operator, arguments: Arguments) -> bool:
    return torch.equal(changed(operator, arguments, lambda x: (3 * x).round()), (3 * X).round())


CRITERIA: dict[Trait, Callable[[Operator, Arguments], bool]] = {
    Trait.ELEMENTWISE: elementwise, Trait.HOMOGENEOUS: homogeneous, Trait.AFFINE: affine, Trait.SPATIAL: spatial,
    Trait.REDUCTION: reduction, Trait.SUMMATION: summation, Trait.STATISTIC: statistic, Trait.SOFTMAX: ranks_rows,
    Trait.MATRIX_PRODUCT: matrix_product, Trait.DIVIDES: divides, Trait.CHOOSES: chooses, Trait.BOUNDED_BELOW: bounded_below,
    Trait.RESHAPES: reshapes, Trait.REARRANGES: rearranges, Trait.EXTREMUM: extremum, Trait.INTEGERS: integers,
    Trait.KEEPS_INTEGERS: keeps_integers, Trait.ADDS: adds, Trait.SUMS: sums,
    Trait.DYNAMIC: lambda operator, arguments: not operator.operands and sums(operator, arguments), Trait.VIEWS: views,
    Trait.COLLECTS: collects, Trait.POINTWISE: pointwise, Trait.COMPARES_WITH_ZERO: compares_with_zero,
    Trait.CONJUNCTION: of_truth_values(torch.logical_and), Trait.DISJUNCTION: of_truth_values(torch.logical_or),
    Trait.LEAVES_INTEGERS: leaves_integers,
    Trait.SINGULAR_AT_ZERO: lambda operator, arguments: bool(changed(operator, arguments, torch.zeros_like).isinf().all()),
    Trait.OUTPUTS_FIRST: outputs_first, Trait.PADS_ZEROS: pads_zeros,
}  # fmt: skip


def broken(operator: Operator) -> list[Trait]:
    """The traits whose criteria an operator does not meet, or has no sample to be tried on."""
    result = samples(operator)
    return [trait for trait in operator.traits if not result or not all(CRITERIA[trait](operator, arguments) for arguments in result)]


def test_operators_meet_the_criteria_of_their_traits() -> None:
    assert set(CRITERIA) == set(Trait)
    assert {operator.name: traits for operator in OPERATORS.values() if (traits := broken(operator))} == {}


# ---- the facts of primitives --------------------------------------------------------------------------------------------
CASES = [case for seed in range(3) for case in cases(seed)]


def named(record: Primitive, arguments: Arguments) -> dict[str, Any]:
    bound = record.signature.bind(*arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


def quantized(record: Primitive, arguments: Arguments) -> dict[str, Any]:
    """The operands that are quantized tensors."""
    return {
        name: value
        for name, value in named(record, arguments).items()
        if name in ("input", "other", "tensors", "source", "table" if record.zero_point is ZeroPoint.EQUIVARIANT else "")
        and (isinstance(value, list) or (isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool))
    }


def moves_its_zero_point(record: Primitive, arguments: Arguments) -> bool:
    """f(q + z) is f(q) + z, or f(q) of what is invariant, in int64; its own numbers are moved along as the record says."""
    zero, both = 3, named(record, arguments)
    if any(both[name] is None for name in record.shifted):
        return True  # a table of centred integers
    centred, stored = dict(both), dict(zip(both, record.stored_arguments(arguments, zero), strict=False))
    stored = {**both, **stored}
    for name, value in quantized(record, arguments).items():
        values = value if isinstance(value, list) else [value]
        for target, offset in ((centred, 0), (stored, zero)):
            moved = [each.to(torch.int64).clamp(-999, 999) + offset for each in values]
            target[name] = moved if isinstance(value, list) else moved[0]
    expected, actual = record.function(**centred), record.function(**stored)
    moved = zero if record.zero_point is ZeroPoint.EQUIVARIANT else 0
    return torch.equal(actual.to(torch.float64), expected.to(torch.float64) + moved)


def is_pointwise(record: Primitive, arguments: Arguments) -> bool:
    """With numbers for all else, f of permuted operands is the permuted f."""
    both = named(record, arguments)
    operands = {name: value for name, value in both.items() if name in ("input", "other", "accumulator") and value.dim()}
    rest = [value for name, value in both.items() if isinstance(value, Tensor) and name not in ("table", *operands)]
    size = next(iter(operands.values())).shape
    if any(value.shape != size for value in operands.values()) or any(value.numel() > 1 for value in rest):
        return True  # what is broadcast has no permutation of its own
    mixed = {name: shuffled(value.flatten(), 0).view(size) for name, value in operands.items()}
    return torch.equal(record.function(**{**both, **mixed}), shuffled(record.function(**both).flatten(), 0).view(size))


def only_moves(record: Primitive, arguments: Arguments) -> bool:
    read: list[Tensor] = []
    for value in quantized(record, arguments).values():
        read += value if isinstance(value, list) else [value]
    elements = {each for value in read for each in value.flatten().tolist()}
    return elements.issuperset(record.function(*arguments).flatten().tolist())


def shares_memory(record: Primitive, arguments: Arguments) -> bool:
    result: Tensor = record.function(*arguments)
    return result.numel() == arguments[0].numel() and result.untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr()


def casts_first(record: Primitive, arguments: Arguments) -> bool:
    """Whatever reads its operands is a cast, be they bytes or floats; it is written for both."""
    return any([_all_casts(record, arguments, dtype) for dtype in (torch.int8, torch.float32)])


def _all_casts(record: Primitive, arguments: Arguments, dtype: torch.dtype) -> bool:
    both, emitter = named(record, arguments), Emitter(None, 20)
    operands = {name for name in both if name in ("input", "other", "source", "residual")}
    emitter.types.update(dict.fromkeys(operands, dtype) | {"accumulator": torch.float32, "index": torch.int64})
    record.onnx(emitter, *(name if name in emitter.types else value for name, value in both.items()))

    return all(node.op_type == "Cast" for node in emitter.nodes if operands & set(node.input))


FACTS: dict[str, tuple[Callable[[Primitive], bool], Callable[[Primitive, Arguments], bool]]] = {
    "zero point": (lambda record: record.zero_point is not ZeroPoint.CENTRED, moves_its_zero_point),
    "pointwise": (lambda record: record.role in POINTWISE, is_pointwise),
    "movement": (lambda record: record.role is Role.MOVEMENT, only_moves),
    "view": (lambda record: record.view, shares_memory),
    "cast": (lambda record: record.casts, casts_first),
}


def untrue(record: Primitive) -> Iterator[str]:
    called = [case.arguments for case in CASES if case.primitive is record.function]
    for fact, (holds, check) in FACTS.items():
        if holds(record) and not (called and all(check(record, arguments) for arguments in called)):
            yield fact


def test_primitives_are_what_their_records_say() -> None:
    assert {
        record.name: result
        for record in PRIMITIVES.values()
        if record.role not in (Role.LOOP, Role.LEAVING) and (result := list(untrue(record)))
    } == {}
