"""Every primitive on integers, on the same integers as floats and as ONNX in two runtimes, against its definition on Python's integers."""

import doctest
import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

import fxquant as fxq
from fxquant import primitives
from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.backends.onnx.writer import Emitter, value_info
from fxquant.ir.graph import TensorFact
from fxquant.numerics.grids import FLOAT32_EXACT, INT8, Ratio, real_multiplier
from fxquant.ops.sampling import resize
from fxquant.primitives import BY_NAME, PRIMITIVES
from fxquant.primitives.record import FLOAT64_EXACT, Unproved, Value
from tests.shared import oracle
from tests.shared.c_cases import Case, cases
from tests.shared.oracle import Array, taps

SEEDS = 6
CASES: dict[str, list[Case]] = {}
for one in (case for seed in range(SEEDS) for case in cases(seed)):
    CASES.setdefault(one.primitive.__name__, []).append(one)


def some(name: str, count: int, seeds: int = SEEDS) -> list[Case]:
    """The cases of a primitive that the first seeds give, of more than `count` some at random."""
    result = CASES[name][: len(CASES[name]) * seeds // SEEDS]
    return result if len(result) <= count else random.Random(0).sample(result, count)


def exact(value: Any) -> Any:
    """An operand as an array of exact numbers; values without a grid stay as they are."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [exact(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    floating = value.is_floating_point() and bool(torch.isfinite(value).all())
    numbers = [Fraction(number) if floating else number for number in value.flatten().tolist()]
    return np.array([*numbers, None], dtype=object)[:-1].reshape(tuple(value.shape))


def each(function: Callable[..., Any]) -> Callable[..., Array]:
    """A function of numbers, for arrays."""
    return np.frompyfunc(lambda *numbers: function(*numbers), function.__code__.co_argcount, 1)


# ---- windows and places -----------------------------------------------------------------------------------------------
def pool_indices(
    x: Array, kernel: Any, stride: Any, begin: Any, end: Any, dilation: Any, sizes: Any, wide: bool, places: Any = None
) -> Array:
    """Of equal ones the first."""
    numbers = np.array(range(math.prod(sizes)), dtype=object).reshape(1, 1, *sizes) if places is None else places.reshape(1, 1, *sizes)
    values, named = taps(x, kernel, stride, begin, end, dilation, -(2**20)), taps(numbers, kernel, stride, begin, end, dilation, -1)
    return np.take_along_axis(np.broadcast_to(named, values.shape), np.argmax(values, -1)[..., None], -1)[..., 0]


def unpool(x: Array, indices: Array, sizes: Sequence[int], outside: int) -> Array:
    filled = np.full((*x.shape[:2], math.prod(sizes)), outside, dtype=object)
    np.put_along_axis(filled, indices.reshape(*x.shape[:2], -1).astype(int), x.reshape(*x.shape[:2], -1), 2)
    return filled.reshape(*x.shape[:2], *sizes)


def places(index: Array, dim: int) -> tuple[Array, ...]:
    """Where the elements of an index point to."""
    indices: list[Array] = list(np.indices(index.shape))
    indices[dim] = index.astype(int)
    return tuple(indices)


def put_along(x: Array, source: Array, dim: int, index: Array, number: bool = False) -> Array:
    result = x.copy()
    result[places(index, dim)] = source if number else source[tuple(map(slice, index.shape))]
    return result


def gathered(start: Array, source: Array, dim: int, index: Array, join: Any) -> Array:
    result = start.copy()
    for place, at in zip(zip(*(axis.flatten() for axis in places(index, dim)), strict=True), np.ndindex(index.shape), strict=True):
        result[place] = join(result[place], source[at])
    return result


def crop(x: Array, dims: Any, starts: Any, stops: Any, steps: Any) -> Array:
    axes = [slice(None)] * x.ndim
    for dim, *ends in zip(dims, starts, stops, steps, strict=True):
        axes[dim] = slice(*ends)
    return x[tuple(axes)]


# ---- sums of products -------------------------------------------------------------------------------------------------
def scale_channels(x: Array, weight: Array, bias: Any, trailing: int) -> Array:
    shape = -1, *[1] * trailing
    return oracle.plus(x * weight.reshape(shape), None if bias is None else bias.reshape(shape))


def resize_linear(x: Array, rows: Any, columns: Any, bits: int, wide: bool, nearest: bool = True) -> Array:
    total = x if columns is None else x @ columns.T
    total, one = total if rows is None else rows @ total, 2 ** (bits * sum(each is not None for each in (rows, columns)))
    return (total + (one // 2 if nearest else 0)) // one


def resize_nearest_to(x: Array, sizes: Any, factors: Any, exact: bool) -> Array:
    for axis, (size, factor) in enumerate(zip(sizes, factors, strict=True)):
        x = np.take(x, resize._nearest(x.shape[axis + 2], size, factor, "nearest-exact" if exact else "nearest"), axis + 2)
    return x


def resize_linear_to(x: Array, sizes: Any, factors: Any, corners: bool, bits: int, places: int, floors: bool, wide: bool) -> Array:
    matrices = []
    for length, size, factor in zip(x.shape[-len(sizes) :], sizes, factors, strict=True):
        neighbours = resize._stepped_neighbours if places else resize._neighbours
        pairs = neighbours(length, size, factor, corners, places or bits)
        matrices.append(exact(resize._weights(pairs, length, bits, torch.device("cpu")).to(torch.int32)))
    rows, columns = matrices
    if not floors:
        return resize_linear(x, rows, columns, bits, wide)
    return resize_linear(resize_linear(x, None, columns, bits, wide, False), rows, None, bits, wide, False)


# ---- images at places between their pixels ------------------------------------------------------------------------------
def inside(place: int, size: int, padding: str, corners: bool) -> int | None:
    """The pixel that stands for one outside; None for what is outside of all."""
    if padding == "reflection":
        turn = max(2 * size - 2, 1) if corners else 2 * size
        place %= turn
        place = min(place, (turn if corners else turn - 1) - place) if size > 1 else 0
    return min(max(place, 0), size - 1) if padding != "zeros" else place if 0 <= place < size else None


# ---- rounding -----------------------------------------------------------------------------------------------------------
def quantize(x: Any, scale: Any, low: int, high: int, dtype: Any, zero: int = 0) -> Any:
    def of_one(number: float, step: float) -> int:
        return oracle.quantize(float(oracle.float32(number)) if math.isfinite(number) else number, Fraction(step), low, high) + zero

    return each(of_one)(x, scale)


def truncated(q: int, scale: Fraction, margin: Fraction) -> int:
    product = oracle.float32(q * scale)
    return math.trunc(oracle.float32(product + (margin if q > 0 else -margin if q < 0 else 0)))


def wrapped(x: Array, dtype: torch.dtype) -> Array:
    limits = torch.iinfo(dtype)
    return each(lambda q: (int(q) - limits.min) % (limits.max - limits.min + 1) + limits.min)(x)


JOINED: dict[str, Any] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "quotient": operator.floordiv, "remainder": operator.mod,
    "larger": np.maximum, "smaller": np.minimum, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
REDUCED: dict[str, Any] = {"sum": np.sum, "largest": np.max, "smallest": np.min}


def reduced(x: Array, dim: Sequence[int], keepdim: bool, operation: str) -> Array:
    return REDUCED[operation](x, axis=tuple(dim), keepdims=keepdim)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "convolution": oracle.convolution,
    "convolution_wide": oracle.convolution,
    "transposed_convolution": oracle.transposed,
    "transposed_convolution_wide": oracle.transposed,
    "linear": lambda x, w, b: oracle.plus(x @ w.T, b),
    "linear_wide": lambda x, w, b: oracle.plus(x @ w.T, b),
    "matrix_product": operator.matmul,
    "matrix_product_wide": operator.matmul,
    "scale_channels": scale_channels,
    "scale_channels_wide": scale_channels,
    "rectify": lambda x, above, below, wide=False: above * np.maximum(x, 0) + below * np.minimum(x, 0),
    "transform": lambda x, matrix, dim, rank, wide: np.moveaxis(np.tensordot(matrix, x, (1, dim)), 0, dim),
    "resize_linear": resize_linear,
    "add_residual": lambda acc, r, k: acc + r * k,
    "add_residual_shifted": lambda acc, r, k, n: acc + r * k // 2**n,
    "align_fixed": lambda x, k, n, wide=False: x * k // 2**n,
    "align_real": lambda x, k, wide=False: each(lambda q, factor: oracle.align_real(q, factor))(x, k),
    "add": operator.add,
    "subtract": operator.sub,
    "add_constant": operator.add,
    "multiply": lambda x, y, wide=False: x * y,
    "widen": lambda x: x,
    "negate": operator.neg,
    "centre": operator.sub,
    "shift_right": lambda x, bits: (x + 2 ** (bits - 1)) // 2**bits,
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "clamp_accumulator": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "accumulator_output": lambda x: x,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "lookup": lambda x, table, first=None: table[(x - (-(len(table) // 2) if first is None else first)).astype(int)],
    "compare": lambda x, y, relation: getattr(operator, relation)(x, y),
    "logic": lambda x, y, operation: JOINED[operation](x, y),
    "opposite": np.logical_not,
    "choose": lambda x, y, condition: np.where(condition.astype(bool), x, y),
    "chosen": lambda x, y, condition: np.where(condition.astype(bool), x, y),
    "max_pool": lambda x, kernel, stride, begin, end, dilation: taps(x, kernel, stride, begin, end, dilation, -(2**20)).max(-1),
    "sum_pool": lambda x, kernel, stride, begin, end, wide=False: taps(x, kernel, stride, begin, end, [1] * len(kernel), 0).sum(-1),
    "pool_indices": pool_indices,
    "unpool": unpool,
    "sum": lambda x, dim, keepdim, wide=False: reduced(x, dim, keepdim, "sum"),
    "least": lambda x, dim, keepdim: reduced(x, dim, keepdim, "smallest"),
    "greatest": lambda x, dim, keepdim: reduced(x, dim, keepdim, "largest"),
    "add_counted": lambda acc, count, table: acc + table[count],
    "requantize_fixed_counted": lambda acc, at, a, m, b, *rest: DEFINITIONS["requantize_fixed"](acc, a[at], m[at], b[at], *rest),
    "requantize_real_counted": lambda acc, count, m, *rest: DEFINITIONS["requantize_real"](acc, m[count], *rest),
    "resize_nearest_to": resize_nearest_to,
    "resize_linear_to": resize_linear_to,
    "count": lambda x, dim, keepdim: reduced(x, dim, keepdim, "sum"),
    "truth": lambda x, dim, keepdim, every: reduced(x, dim, keepdim, "smallest" if every else "largest"),
    "reduced": lambda x, dim, keepdim, operation: wrapped(reduced(x, dim, keepdim, operation), torch.int64),
    "running": lambda x, dim: wrapped(np.cumsum(x, axis=dim), torch.int64),
    "arg_extremum": lambda x, dim, keepdim, largest: (np.argmax if largest else np.argmin)(x, axis=dim, keepdims=keepdim),
    "ranking": lambda x, dim, count, largest: np.take(np.argsort(-x if largest else x, axis=dim, kind="stable"), range(count), dim),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": np.transpose,
    "concatenate": np.concatenate,
    "crop": crop,
    "select": lambda x, dim, index: np.take(x, index.astype(int), dim),
    "rows": lambda table, index: table[index.astype(int)],
    "expand": lambda x, sizes: np.broadcast_to(x, [old if new == -1 else new for old, new in zip((1, *x.shape), sizes, strict=True)]),
    "tile": np.tile,
    "pad": lambda x, begin, end, value: np.pad(x, list(zip(begin, end, strict=True)), constant_values=value),
    "pick": lambda x, dim, index: np.take(x, index.astype(int), dim),
    "take_along": lambda x, dim, index: x[places(index, dim)],
    "put_along": put_along,
    "sum_along": lambda x, dim, index, size, wide: gathered(
        np.full((*x.shape[:dim], size, *x.shape[dim + 1 :]), 0, dtype=object), x, dim, index, operator.add
    ),
    "extremum_along": lambda x, source, dim, index, terms, largest: gathered(x, source, dim, index, max if largest else min),
    "quantize": quantize,
    "requantize_fixed": lambda acc, a, m, b, bits, rounding, low, high, dtype: each(
        lambda q, first, factor, last: oracle.requantize_fixed(q, first, factor, last, bits, rounding, low, high)
    )(acc, a, m, b),
    "requantize_real": lambda acc, m, low, high, dtype, zero=0: each(
        lambda q, factor: oracle.requantize_real(q, factor, low, high) + zero
    )(acc, m),
    "joined": lambda x, y, operation: wrapped(JOINED[operation](x, y), torch.int64),
    "converted": wrapped,
    "truncated": lambda x, scale, margin: each(truncated)(x, scale, margin),
}  # fmt: skip
ELSEWHERE = {"sample", "dynamic_linear", "dequantize"}  # held by the oracle in tests of operators; rounded floats
LOOPED = {record.name for record in BY_NAME.values() if record.function.__module__.endswith(".loop")}  # tests of loops hold these
ALONE = sorted(set(BY_NAME) - LOOPED)


def test_every_primitive_has_a_definition() -> None:
    assert DEFINITIONS.keys() | ELSEWHERE == CASES.keys() == set(ALONE)


def storage(case: Case) -> torch.dtype:
    """The dtype of a result: that of the grid; of a sum int32, or int64 where two int16 meet or an operand is int64."""
    record, name = PRIMITIVES[case.primitive], case.primitive.__name__
    said = next((argument for argument in case.arguments if isinstance(argument, torch.dtype)), None)
    tensors = [each for one in case.arguments for each in (one if isinstance(one, list) else [one]) if isinstance(each, Tensor)]
    if record.kind == "quantized" or name in ("converted", "shift_right"):
        return said or tensors[name == "lookup"].dtype
    if record.kind == "plain":
        return torch.bool if name in ("compare", "logic", "opposite", "truth") else torch.int64
    dtypes = [each.dtype for each in tensors]
    long = torch.int64 in dtypes and name != "sum_along"  # whose places are int64
    wide = dtypes.count(torch.int16) == 2 and name != "multiply"
    return torch.int64 if long or wide or (name == "transform" and case.arguments[-1]) else torch.int32


@pytest.mark.quick
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_primitive_is_its_definition(name: str) -> None:
    for case in some(name, 40):
        result = case.primitive(*case.arguments)
        assert result.dtype == storage(case), case
        assert result.tolist() == np.asarray(DEFINITIONS[name](*map(exact, case.arguments)), dtype=object).tolist(), case


# ---- as floats, and as ONNX ---------------------------------------------------------------------------------------------
# Those of TENSORS are floats while a model trains, as the rows of a table.
TENSORS = ("input", "other", "tensors", "source", "accumulator", "residual")
PLACES = ("index", "indices", "condition", "coordinates")


def floats(value: Tensor) -> Tensor:
    return value.double() if value.double().abs().max() >= 2**24 else value.float()


def map_tensors(case: Case, names: Sequence[str], function: Callable[[Tensor], Any]) -> list[Any]:
    """The arguments, with these tensors replaced."""

    def mapped(value: Any) -> Any:
        return [mapped(each) for each in value] if isinstance(value, list) else function(value) if isinstance(value, Tensor) else value

    parameters = PRIMITIVES[case.primitive].signature.parameters
    return [mapped(value) if name in names else value for name, value in zip(parameters, case.arguments, strict=False)]


TRAINS = [
    record.name
    for record in PRIMITIVES.values()
    if record.kind in ("quantized", "accumulator") and record.name not in ("quantize", *LOOPED)
]


@pytest.mark.quick
@pytest.mark.parametrize("name", TRAINS)
def test_integers_as_floats_give_the_same_numbers(name: str) -> None:
    quantized = PRIMITIVES[CASES[name][0].primitive].kind == "quantized" and name != "clamp_accumulator"
    for case in some(name, 40):
        arguments = map_tensors(case, (*TENSORS, "table") if name == "rows" else TENSORS, floats)
        first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
        if quantized and first.dtype == torch.float64 and not name.startswith("requantize"):
            continue  # no grid has int64: such operands are never floats
        if name.startswith("add_residual"):
            arguments[1] = arguments[1].to(first.dtype)
        actual, wanted = case.primitive(*arguments), case.primitive(*case.arguments)
        bound = PRIMITIVES[case.primitive].signature.bind(*arguments).arguments
        wide = name.endswith("_wide") or bound.get("wide", False) or first.dtype == torch.float64
        assert actual.dtype == (torch.float64 if wide and not quantized else torch.float32), case
        assert torch.equal(actual.double(), (wanted.float() if name == "accumulator_output" else wanted).double()), case


def assert_its_onnx_form_gives(wanted: Tensor, emitter: Emitter, result: str, feeds: dict[str, Tensor]) -> None:
    """Run what an emitter has collected in two runtimes; `result` may be wider than `wanted`."""
    inputs = [value_info(each, value.dtype, value.shape) for each, value in feeds.items()]
    output = value_info(result, emitter.types[result], wanted.shape)
    graph = helper.make_graph(emitter.nodes, "one", inputs, [output], emitter.initializers)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("fxquant", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10, functions=list((emitter.functions or {}).values()))
    onnx.checker.check_model(model)
    for _, level, threads in (RUNTIMES[0], RUNTIMES[-1]):
        assert torch.equal(Runner(model, level, threads, None, {})(feeds)[result].double(), wanted.double())


@pytest.mark.parametrize("name", ALONE)
def test_its_onnx_form_gives_the_same_numbers_in_two_runtimes(name: str) -> None:
    """Accumulators are floats in a file, and so are operands that are accumulators."""
    for case in some(name, 8, seeds=1):
        emitter, feeds = Emitter({}, 21, taken={f"given_{index}" for index in range(9)}), {}

        def given(value: Tensor, emitter: Emitter = emitter, feeds: dict[str, Tensor] = feeds) -> str:
            sums = torch.int32, torch.int64 if name.startswith(("add", "subtract", "requantize", "shift")) else None
            value = floats(value) if value.dtype in sums else value.long() if name == "joined" else value
            feeds[f"given_{len(feeds)}"] = value
            emitter.types[f"given_{len(feeds) - 1}"] = value.dtype
            return f"given_{len(feeds) - 1}"

        arguments = map_tensors(case, TENSORS if name in ("select", "rows") else (*TENSORS, *PLACES), given)
        result, wanted = PRIMITIVES[case.primitive].onnx(emitter, *arguments), case.primitive(*case.arguments)
        assert emitter.types[result] == wanted.dtype or PRIMITIVES[case.primitive].kind == "accumulator", case
        assert_its_onnx_form_gives(wanted, emitter, result, feeds)


@pytest.mark.parametrize(("shift", "rounding"), itertools.product((0, 8, 16), ("half_up", "floor")))
def test_a_portable_file_rounds_products_beyond_24_bits_without_float64(shift: int, rounding: str) -> None:
    """Requantize all 65,536 intermediates of 16 bits, from int32 accumulators, and from float32 accumulators below 2^24."""
    t = torch.arange(-(2**15), 2**15, dtype=torch.int32).unsqueeze(1)
    accumulator = (t << shift) + (2**shift - 1) * (t & 1)
    parameters = torch.tensor([[shift] * 3, [18284, 32767, 1], [14, 17, 3]], dtype=torch.int32)
    constants = *parameters, 16, rounding, -(2**15), 2**15 - 1, torch.int16
    for value in (accumulator, accumulator.float())[: 1 + (shift <= 8)]:
        emitter = Emitter(None, 21)
        emitter.portable, emitter.wide, emitter.types["x"] = True, torch.int32, value.dtype
        result = PRIMITIVES[primitives.quantization.requantize_fixed].onnx(emitter, "x", *constants)
        assert torch.float64 not in emitter.dtypes
        assert_its_onnx_form_gives(primitives.quantization.requantize_fixed(accumulator, *constants), emitter, result, {"x": value})


# ---- ranges -------------------------------------------------------------------------------------------------------------
def known(value: Any, constant: bool, below: int) -> Any:
    """Return a proof's knowledge of an argument: a constant, or how far a tensor reaches."""
    if isinstance(value, list):
        return [known(each, constant, below) for each in value]
    if not isinstance(value, Tensor):
        return value
    low, high = (value, value) if constant else torch.aminmax(value)
    return Value(low.double(), high.double(), TensorFact(tuple(value.shape), value.dtype), below, value if constant else None)


@pytest.mark.parametrize("name", sorted(set(ALONE) - {"dequantize", "dynamic_linear"}))
def test_every_element_lies_within_the_range_that_proofs_rest_on(name: str) -> None:
    record = BY_NAME[name]
    proved = 0
    for case, below in itertools.product(some(name, 10), (FLOAT32_EXACT, FLOAT64_EXACT)):
        pairs = zip(record.signature.parameters, case.arguments, strict=False)
        try:
            actual = record.bounds(**{part: known(value, part not in TENSORS, below) for part, value in pairs})
        except Unproved:
            continue  # the sum of these may be too large for the operator's width
        proved += 1
        result = case.primitive(*case.arguments).double()
        low, high = (torch.as_tensor(end).double().expand(result.shape) for end in (actual.low, actual.high))
        assert bool(((low <= result) & (result <= high)).all()), case
    assert proved


def test_every_primitive_has_its_public_name() -> None:
    assert len(BY_NAME) == len(PRIMITIVES)
    assert set(BY_NAME) <= set(dir(primitives))
    assert not set(BY_NAME) & set(primitives.__all__), "no module hides a function"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_primitive_has_one_record_and_says_what_it_computes(name: str) -> None:
    function = getattr(fxq.primitives, name)
    record = PRIMITIVES[function]
    assert (record.name, record.function, function.__name__) == (name, function, name)
    assert record.kind in ("quantized", "accumulator", "plain", "float", "dynamic")
    assert function.__doc__
    assert function.__doc__.strip().splitlines()[0].endswith((".", "float64."))


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="no primitive is named 'requantise'"):
        primitives.requantise  # noqa: B018


def test_a_layer_made_of_primitives_is_the_layer_of_a_model() -> None:
    """Quantize, multiply and requantize by hand, with the scales of a model: its own integers come out."""
    model, x = torch.nn.Linear(6, 4), torch.randn(8, 6)
    result = fxq.quantize(model, [x], target="nash-e", qconfig=fxq.QConfig(fxq.ActivationConfig("int8")))
    scales = fxq.qparams(result.prepared)
    s_x, s_y = (torch.tensor(scale) for scale in scales.values())  # of the quantized input, and of the output
    s_w = (model.weight.abs().amax(1) / 127).detach()
    weight = torch.round(model.weight / s_w[:, None]).to(torch.int8)
    bias = torch.round(model.bias.double() / (s_x.double() * s_w.double())).to(torch.int32)
    q = primitives.quantize(x, s_x, INT8.low, INT8.high, torch.int8)
    acc = primitives.linear(q, weight, bias)
    y = primitives.requantize_real(acc, real_multiplier(Ratio((s_x, s_w), (s_y,))), INT8.low, INT8.high, torch.int8)
    assert len(y.unique()) > 10
    assert torch.equal(primitives.dequantize(y, s_y), result.integer(x))


def test_the_example_of_the_documentation() -> None:
    outcome = doctest.testmod(primitives)
    assert outcome.attempted >= 6
    assert outcome.failed == 0
