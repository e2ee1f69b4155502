"""The criteria of traits and of facts about primitives, run on samples of everything that has them."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
class Trial(NamedTuple):
    """An operator, and arguments that it is tried on."""

    operator: Operator
    arguments: Arguments

    def activations(self) -> list[int]:
        """The positions of the operands that are tensors, or lists of tensors."""
        names = self.operator.parameter_names[: len(self.arguments)]
        operands = [at for at, name in enumerate(names) if name in self.operator.operands]
        return [at for at in operands if isinstance(self.arguments[at], Tensor | list)]

    def changed(self, function: Callable[[Tensor], Tensor], *chosen: int) -> Tensor:
        """Compute the operator after changing the chosen operands, or all; return its result."""
        actual, number = list(self.arguments), itertools.count()
        for position in self.activations():
            value = actual[position]
            values = value if isinstance(value, list) else [value]
            values = [function(each) if not chosen or next(number) in chosen else each for each in values]
            actual[position] = values if isinstance(value, list) else values[0]
        return self.call(*actual)

    def call(self, *arguments: Any) -> Tensor:
        return self.operator.function(*arguments)

    @property
    def value(self) -> Tensor:
        return self.call(*self.arguments)


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.allclose(one.nan_to_num(), other.nan_to_num(), rtol=1e-5, atol=1e-5)


def shuffled(value: Tensor, dim: int) -> Tensor:
    return value.index_select(dim, torch.randperm(value.shape[dim], generator=torch.Generator().manual_seed(3)))


def mixed(value: Tensor) -> Tensor:
    return shuffled(value.flatten(), 0).view_as(value)


def reduction(trial: Trial) -> bool:
    value, moved = trial.value, trial.arguments[0]
    for dim in trial.arguments[1]:
        moved = shuffled(moved, dim)
    return value.numel() < moved.numel() and equal(trial.call(moved, *trial.arguments[1:]), value)


def statistic(trial: Trial) -> bool:
    value, twice = trial.value, trial.changed(lambda x: 2 * x)
    return equal(trial.changed(torch.neg), value) and any(equal(twice, factor * value) for factor in (2, 4))


def ranks_rows(trial: Trial) -> bool:
    value, dim = trial.value, trial.arguments[trial.operator.parameter_names.index("dim")]
    order = trial.arguments[0].argsort(dim)
    kept = KEEP.gather(dim, order) if "keep" in trial.operator.parameter_names else torch.ones_like(KEEP)
    rising = value.gather(dim, order).masked_fill(~kept, -torch.inf).cummax(dim).values
    sorted_alike = bool((value.gather(dim, order) >= rising - 1e-6)[kept].all())
    return sorted_alike and equal(trial.changed(lambda x: x + 4), value)


def matrix_product(trial: Trial) -> bool:
    halves = [trial.changed(lambda x: 2 * x, which) / 2 for which in (0, 1)]
    return not equal(trial.value, X * Y) and all(equal(half, trial.value) for half in halves)


def chooses(trial: Trial) -> bool:
    if len(trial.arguments) == 1:
        return bool(trial.call(torch.full_like(X, torch.nan)).isfinite().all())
    return bool(trial.call(KEEP, X.masked_fill(~KEEP, torch.nan), Y).isfinite().all())


def reshapes(trial: Trial) -> bool:
    """Elements in the order of their first occurrence."""
    result = trial.call(torch.arange(trial.arguments[0].numel()).view_as(trial.arguments[0]), *trial.arguments[1:])
    first = list(dict.fromkeys(result.flatten().tolist()))
    return first == list(range(trial.arguments[0].numel()))


def rearranges(trial: Trial) -> bool:
    read = [value for value in trial.arguments if isinstance(value, Tensor | float)]
    elements = {float(each) for value in read for each in (value.flatten().tolist() if isinstance(value, Tensor) else [value])}
    return elements.issuperset(trial.value.flatten().tolist())


def extremum(trial: Trial) -> bool:
    x, y = trial.arguments
    value = trial.call(x, y)
    return bool(((value == x) | (value == y)).all()) and torch.equal(value, trial.call(y, x))


def sums(trial: Trial) -> bool:
    input, rest = trial.arguments[0], trial.arguments[1:]
    added = drawn(*input.shape, seed=4)
    return equal(trial.call(input + added, *rest), trial.call(input, *rest) + trial.call(added, *rest))


def outputs_first(trial: Trial) -> bool:
    input, weight = trial.arguments
    factors = torch.ones(len(weight)).index_fill(0, torch.tensor([1]), 2.0)
    assert trial.operator.layer.channels is not None
    result, channel = trial.call(input, weight), trial.operator.layer.channels({})
    scaled = trial.call(input, weight * factors.view(-1, *[1] * (weight.dim() - 1)))
    return equal(scaled.movedim(channel, -1), result.movedim(channel, -1) * factors)


def pads_zeros(trial: Trial) -> bool:
    (input, weight), around = trial.arguments, [2, 0, 1, 1, 3, 2][: 2 * (trial.arguments[0].dim() - 2)]
    before, after = around[: len(around) // 2], around[len(around) // 2 :]
    padded = F.pad(input, [size for pair in zip(before[::-1], after[::-1], strict=True) for size in pair])
    return torch.equal(trial.call(input, weight, None, 1, around), trial.call(padded, weight))


def collects(trial: Trial) -> bool:
    """Numbers besides the tensors are operands, too."""
    zeros = [0.0 if isinstance(value, float) else value for value in trial.arguments]
    if Trial(trial.operator, tuple(zeros)).changed(torch.zeros_like).any():
        return False
    count = sum(len(value) if isinstance(value := trial.arguments[at], list) else 1 for at in trial.activations())
    if count == 1:
        return bool(trial.changed(torch.zeros_like).any())

    def alone(index: int) -> Tensor:
        numbers = itertools.count()
        return Trial(trial.operator, tuple(zeros)).changed(lambda x: torch.full_like(x, float(next(numbers) == index)))

    return all(bool(alone(index).any()) for index in range(count))


def pointwise(trial: Trial) -> bool:
    of_one_shape = all(value.shape == X.shape for value in trial.arguments if isinstance(value, Tensor))
    value = trial.call(*(mixed(each) if isinstance(each, Tensor) else each for each in trial.arguments))
    return of_one_shape and equal(value.float(), mixed(trial.value.float()))


def compares_with_zero(trial: Trial) -> bool:
    tensors = [(value, value != 0) if isinstance(value, Tensor) else (value, value) for value in trial.arguments]
    return torch.equal(*(trial.call(*values) for values in zip(*tensors, strict=True)))


CRITERIA: dict[Trait, Callable[[Trial], bool]] = {
    Trait.ELEMENTWISE: lambda trial: equal(trial.changed(mixed), mixed(trial.value)),
    Trait.HOMOGENEOUS: lambda trial: torch.equal(trial.changed(lambda x: 2 * x), 2 * trial.value),
    Trait.AFFINE: lambda trial: equal(trial.call((X + Y) / 2, 3.0), (trial.call(X, 3.0) + trial.call(Y, 3.0)) / 2),
    Trait.SPATIAL: lambda trial: equal(trial.changed(lambda x: shuffled(x, 1)), shuffled(trial.value, 1)),
    Trait.REDUCTION: reduction,
    Trait.SUMMATION: sums,
    Trait.STATISTIC: statistic,
    Trait.SOFTMAX: ranks_rows,
    Trait.MATRIX_PRODUCT: matrix_product,
    Trait.DIVIDES: lambda trial: not trial.call(X, torch.zeros_like(X)).isfinite().any(),
    Trait.CHOOSES: chooses,
    Trait.BOUNDED_BELOW: lambda trial: trial.arguments[1] is None or bool((trial.value >= trial.arguments[1]).all()),
    Trait.RESHAPES: reshapes,
    Trait.REARRANGES: rearranges,
    Trait.EXTREMUM: extremum,
    Trait.INTEGERS: lambda trial: torch.equal(trial.value, trial.value.round()),
    Trait.KEEPS_INTEGERS: lambda trial: torch.equal(value := trial.changed(lambda x: (3 * x).round()), value.round()),
    Trait.ADDS: lambda trial: equal(trial.changed(lambda x: x + 3, 0), trial.value + 3),
    Trait.SUMS: sums,
    Trait.DYNAMIC: lambda trial: not trial.operator.operands and sums(trial),
    Trait.VIEWS: lambda trial: torch.equal(trial.changed(lambda x: x > 0), trial.value > 0),
    Trait.COLLECTS: collects,
    Trait.POINTWISE: pointwise,
    Trait.COMPARES_WITH_ZERO: compares_with_zero,
    Trait.CONJUNCTION: lambda trial: torch.equal(trial.call((X > 0).float(), (Y > 0).float()) != 0, (X > 0) & (Y > 0)),
    Trait.DISJUNCTION: lambda trial: torch.equal(trial.call((X > 0).float(), (Y > 0).float()) != 0, (X > 0) | (Y > 0)),
    Trait.LEAVES_INTEGERS: lambda trial: torch.equal(trial.changed(lambda x: (3 * x).round()), (3 * X).round()),
    Trait.SINGULAR_AT_ZERO: lambda trial: bool(trial.changed(torch.zeros_like).isinf().all()),
    Trait.OUTPUTS_FIRST: outputs_first,
    Trait.PADS_ZEROS: pads_zeros,
}


def broken(operator: Operator) -> list[Trait]:
    """The traits whose criteria an operator does not meet, or has no sample to be tried on."""
    trials = [Trial(operator, arguments) for arguments in samples(operator)]
    return [trait for trait in operator.traits if not trials or not all(CRITERIA[trait](trial) for trial in trials)]


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
