"""Linear layers and matrix products; contractions: einsum and functions expressed by it, as a matrix product between permutations.

    Σ_k a[b, i, k] · c[b, k, j]      b in both and in the result, k in both alone, i and j in one and in the result

All dimensions of one kind are flattened to one; a dimension that only one operand has, and the result does not, is summed first.
"""

import math
import operator
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import BatchDim, TensorFact, fact, is_parameter, largest_size
from fxquant.lowering.lowering import Clamp, Lowering, Quantized, named_parameters
from fxquant.numerics.grids import FLOAT32_EXACT, INT32_MAX, INT48_MAX, accumulator_bound
from fxquant.ops.core import FOLDED, HEADS, NORMED, ROUNDED, Builder, Call, Instead, Ratio, Trait, are_fixed, sampled, sums
from fxquant.ops.core.declare import composite, function_and_method, listed, lowered, nodes
from fxquant.ops.core.form import INT16_OPSET
from fxquant.ops.core.record import Layer, operator_named
from fxquant.ops.core.sums import computed_linear, is_computed, spelled, with_vectors
from fxquant.ops.core.weighted import ABSORBED, Product, absorbing, epilogue, lower_weighted, refuses_weighted, rescaled, shape_of
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.indexing.advanced import diagonal
from fxquant.ops.movement.shape import numbers, permute, reshape, varying_sizes
from fxquant.ops.pooling.totals import sum
from fxquant.primitives import accumulate, product, runtime_scales
from fxquant.primitives.arithmetic import MATRIX
from fxquant.quantization.weights import BatchNorm, fold

LARGEST_PRODUCT = 2**17  # terms of two int8 operands that stay within int32
PRODUCT = Product(accumulate.linear, accumulate.linear_wide)


def _folded(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, **_: Any) -> tuple[Tensor, Tensor]:
    return fold(weight, bias, batch_norm, 0)


def _onnx_linear(c: Call) -> str:
    if "weight" not in c.constants:  # a product of two activations, or with a constant that is not a matrix
        return c.epilogue(c.do("MatMul", c.operand("input"), c.operand("other")))
    if c.as_convolution():
        return _onnx_convolution(c)
    if len(c.operand_shape) == 2:
        return c.epilogue(c.with_bias(lambda *bias: c.do("Gemm", c.input, c.weight(), *bias, transB=1), 0))
    product = c.do("MatMul", c.input, c.weight(lambda weight: weight.t()))
    if "bias" in c.constants:
        # From opset 21 on it has as many dimensions as the product, which keeps onnxruntime from making a Gemm of the two for fixed sizes:
        # it quantizes the reshaped operand again, and such a QuantizeLinear of opset 21 it cannot turn into one of uint8 (1.31, 1.32).
        leading = [1] * (len(c.operand_shape) - 1) if c.e.opset >= INT16_OPSET else []
        product = c.do("Add", product, c.e.constant(c.real("bias").reshape(*leading, -1)))
    return c.epilogue(product)


def _onnx_convolution(c: Call) -> str:
    """Write a linear layer as a convolution with a kernel of one, its last dimension as channels. The file has a fixed batch of one."""
    _, *sizes, features = (size.at(1) if isinstance(size, BatchDim) else size for size in c.operand_shape)
    outputs, inner, residual = c.constants["weight"][0].shape[0], range(1, len(sizes) + 1), c.arguments.get("residual")
    if len(sizes) < 2:
        image = c.do("ToImage", c.input, shape=[1, *sizes, features])
        layer = c.with_bias(lambda *bias: c.do("Conv", image, c.weight(lambda w: w[:, :, None, None]), *bias, group=1), 2)
        if residual is not None:
            c.arguments["residual"] = c.do("ToImage", residual, shape=[1, *sizes, outputs])
        return c.do("FromImage", c.epilogue(layer), shape=[1, *sizes, outputs])
    value = c.do("Reshape", c.do("Transpose", c.input, perm=[0, len(sizes) + 1, *inner]), c.integers([-1, features, math.prod(sizes), 1]))
    layer = c.with_bias(lambda *bias: c.do("Conv", value, c.weight(lambda w: w[:, :, None, None]), *bias, kernel_shape=[1, 1]), 2)
    layer = c.do("Reshape", layer, c.integers([-1, outputs, *sizes]))
    return c.epilogue(c.do("Transpose", layer, perm=[0, *(d + 1 for d in inner), 1]))


def _called(*args: Any, **kwargs: Any) -> dict[str, Any] | Instead:
    arguments = operator_named("linear").bind(args, kwargs)
    return Instead(computed_linear, arguments) if is_computed(arguments["weight"]) else arguments


@lowered(
    function=absorbing(F.linear, _folded),
    adapt=_called,
    traits=frozenset({Trait.SUMS, Trait.OUTPUTS_FIRST}),
    absorbs=ABSORBED,
    refuses=refuses_weighted,
    layer=Layer(
        weight=lambda weight, **_: weight,
        folded=_folded,
        channels=lambda arguments: -1,
        rescaled=rescaled,
        macs=lambda shapes, result: math.prod(result) * shapes["weight"][-1],
    ),
    onnx=_onnx_linear,
)
@sampled("linear(x, {P(5, 8)}, {P(5)})", "nn.Linear(8, 3)", x=(8,))
@sampled("{nn.BatchNorm1d(4)}({nn.Linear(8, 4)}(x))", within=FOLDED, x=(8,))
@sampled("nn.Linear(8, 4, bias=False)", x=(3, 5, 8))
def linear(
    lowering: Lowering, input: Quantized, weight: Tensor, bias: Tensor | None = None, *, batch_norm: BatchNorm | None = None,
    residual: Quantized | None = None, clamp: Clamp | None = None,
) -> Quantized:  # fmt: skip
    """Compute x · wᵀ + b over the last dimension, with the batch norm, residual and clamp that are fused into it."""
    return lower_weighted(lowering, PRODUCT, input, weight, bias, residual, clamp, batch_norm)


def _matmul(input: Tensor, other: Tensor, bias: Tensor | None = None, *, clamp: Clamp | None = None) -> Tensor:
    value = torch.matmul(input, other)
    return epilogue(value if bias is None else value + bias, None, clamp, None)


def _refuses_matmul(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    left, right = shape_of(arguments["input"]), shape_of(arguments["other"])
    if left is None or right is None:
        return "one of its operands is not a tensor"
    if min(len(left), len(right)) < 2:
        return "one of its operands is a vector"
    terms, weighted = largest_size(left[-1]), is_parameter(arguments["other"]) and len(right) == 2
    if terms is None:
        return "it sums over the batch, whose size is not fixed"
    if not weighted and terms >= LARGEST_PRODUCT:
        return f"its sum of {terms} terms may exceed 2^31"
    bias = arguments["bias"]
    if bias is None:
        return None
    if not weighted or shape_of(bias) != (right[-1],):
        return "the tensor added to it is not a bias of one number per column"
    return refuses_weighted(node, {"weight": None, "bias": bias})


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> dict[str, Any] | str | Instead:
    """Adapt torch.addmm: to a linear layer with a bias if `input` and `mat2` are parameters, else to a contraction and a sum."""
    if not all(isinstance(number, int | float) for number in (beta, alpha)):
        return "beta or alpha is computed"
    columns = isinstance(mat2, fx.Node) and is_parameter(mat2) and isinstance(input, fx.Node) and is_parameter(input)
    if columns and (beta, alpha) == (1, 1) and shape_of(input) == (shape_of(mat2) or (None,))[-1:]:
        return {"input": mat1, "other": mat2, "bias": input}
    arguments = {"input": input, "one": mat1, "other": mat2, "equation": "ij,jk->ik", "beta": beta, "alpha": alpha}
    return Instead(sums.added_product, arguments)


@lowered(
    operands=("input", "other"),
    function=_matmul,
    calls={
        **dict.fromkeys((torch.matmul, torch.linalg.matmul, operator.matmul, "matmul", "__matmul__"), with_vectors),
        **function_and_method(lambda input, mat2: {"input": input, "other": mat2}, "bmm", "mm"),
        **function_and_method(_addmm, "addmm"),
    },
    traits=frozenset({Trait.SUMS, Trait.MATRIX_PRODUCT}),
    absorbs=frozenset({"clamp"}),
    refuses=_refuses_matmul,
    layer=Layer(
        weight=lambda other, **_: other.t() if isinstance(other, Tensor) and other.dim() == 2 else None,  # else one scale for all
        macs=lambda shapes, result: math.prod(result) * shapes["input"][-1],
    ),
    onnx=_onnx_linear,
)
@sampled("matmul(x, y)", "x @ y.mT", "torch.linalg.matmul(x, y)", "x.__matmul__(y)", "bmm(x, y).relu()", x=(6, 6))
@sampled("torch.matmul(x, {P(6, 4)})", "torch.matmul({P(4, 6)}, x)")
@sampled("mm(x, {P(8, 3)})", "addmm({P(8)}, x, {P(8, 8)}).relu()", x=(8,))
def matmul(
    lowering: Lowering, input: Quantized | Tensor, other: Quantized | Tensor, bias: Tensor | None = None, *, clamp: Clamp | None = None
) -> Quantized:
    """Compute input · other over the last two dimensions, plus bias, and a fused clamp.

    Lower a matrix parameter on the right as a linear layer's weight; a product of two activations has one step, s_x · s_y.
    """
    if isinstance(other, Tensor):
        if isinstance(input, Quantized) and other.dim() == 2:
            return lower_weighted(lowering, PRODUCT, input, other.t(), bias, clamp=clamp)
        other = lowering.quantize_constant(other, "other")
    if isinstance(input, Tensor):
        input = lowering.quantize_constant(input, "input")
    long = min(input.dtype.bits, other.dtype.bits) > 8  # two int16 operands have accumulators of 48 bits
    bound = float(largest_size(input.shape[-1]) or 0) * input.grid.magnitude * other.grid.magnitude
    largest = lowering.prove(bound, "the sum", INT48_MAX if long else INT32_MAX)
    if largest >= FLOAT32_EXACT:
        lowering.note("wide", f"a sum can reach {largest:.0f}, beyond 2^24, so it is formed in float64")
    multiply = product.matrix_product if largest < FLOAT32_EXACT else product.matrix_product_wide
    accumulator = lowering.call(multiply, input.value, other.value)
    return lowering.requantize(accumulator, Ratio(lowering.arithmetic.step(input.scale, other.scale)), clamp, bound=largest, kind=MATRIX)


# ---- Dynamic quantization: a linear layer between float tensors, whose operand is quantized at run time ----------------
#
# For the rest of the compiler it is an operator in float: nothing of it is calibrated, and its input and output have no grid.
@lowered(
    function=lambda input, weight, bias=None: F.linear(input, weight, bias),
    layer=Layer(weight=lambda weight, **_: weight, macs=lambda shapes, result: math.prod(result) * shapes["weight"][-1]),
    traits=frozenset({Trait.DYNAMIC}),
)
def dynamic_linear(lowering: Lowering, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Compute x · wᵀ + b over the last dimension, as the float model sees it; x becomes integers on a grid that is found at run time.

    Call the primitive on float values; the weight's integers and scales are constants, and its bias stays in float.
    """
    lowering.parameters.update(named_parameters(weight, bias, None))
    bias = lowering.weight.corrected(bias)
    quantized = lowering.weight.integers(weight, keep=lowering.keeps_start)
    lowering.prove(accumulator_bound(quantized.integers, None, 0, runtime_scales.MAGNITUDE), "the sum")
    lowering.describe("weight", quantized.scale, -2)
    lowering.describe("bias", torch.ones((), dtype=torch.float32, device="cpu"))
    return lowering.call(
        runtime_scales.dynamic_linear,
        input,
        lowering.constant("weight", quantized.integers, lowering.weight.dtype.storage),
        lowering.constant("scale", quantized.scale if quantized.scale.numel() > 1 else quantized.scale.reshape(()), torch.float32),
        None if bias is None else lowering.constant("bias", bias, torch.float32),
    )


# ---- Contractions ----------------------------------------------------------------------------------------------------
def _split(equation: str) -> tuple[list[str], str]:
    left, _, right = equation.partition("->")
    return left.split(","), right


def _without_repetition(build: Builder, letters: str, value: fx.Node) -> tuple[str, fx.Node]:
    """Return an operand with one dimension for each letter: two of one letter are their diagonal."""
    while (repeated := next((letter for letter in letters if letters.count(letter) > 1), None)) is not None:
        one, other = [position for position, letter in enumerate(letters) if letter == repeated][:2]
        value = build(diagonal, value, 0, one, other)
        letters = "".join(letter for position, letter in enumerate(letters) if position not in (one, other)) + repeated
    return letters, value


def _product(build: Builder, first: tuple[str, fx.Node], second: tuple[str, fx.Node], result: str) -> Any:
    """Return the product of two operands, given with their letters."""
    one, left = _summed(build, *first, {*second[0], *result})
    other, right = _summed(build, *second, {*first[0], *result})
    batch = "".join(letter for letter in one if letter in other and letter in result)
    inner = "".join(letter for letter in one if letter in other and letter not in result)
    rows = "".join(letter for letter in one if letter not in other)
    columns = "".join(letter for letter in other if letter not in one)
    if is_parameter(left) and not batch:  # a matrix of parameters is a weight where it stands on the right
        (one, left, rows), (other, right, columns) = (other, right, columns), (one, left, rows)
    sizes = dict(zip(one + other, (*numbers(fact(left).shape), *numbers(fact(right).shape)), strict=True))
    if not inner:
        return _outer(build, (one, left), (other, right), result)
    left = _ordered(build, left, one, batch + rows + inner)
    right = _ordered(build, right, other, batch + inner + columns)
    rows_apart = len(rows) == 1 or (not batch and rows)  # PyTorch's product takes any number of them in front
    if len(inner) > 1 or not rows_apart:
        length = _length(inner, sizes)
        row_sizes = [sizes[r] for r in rows] if rows_apart else [_length(rows, sizes)]
        left = build(reshape, left, [*(sizes[b] for b in batch), *row_sizes, length])
    if len(inner) > 1 or len(columns) != 1:
        right = build(reshape, right, [*(sizes[b] for b in batch), _length(inner, sizes), _length(columns, sizes)])
    product = build(matmul, left, right)
    if not rows_apart or len(columns) != 1:
        product = build(reshape, product, [sizes[letter] for letter in batch + rows + columns])
    return _ordered(build, product, batch + rows + columns, result)


def _outer(build: Builder, first: tuple[str, fx.Node], second: tuple[str, fx.Node], result: str) -> Any:
    """Return the product, element by element, of operands that share no dimension that is summed."""

    def aligned(letters: str, value: fx.Node) -> Any:
        value = _ordered(build, value, letters, "".join(letter for letter in result if letter in letters))
        size = iter(numbers(fact(value).shape))
        shape = [next(size) if letter in letters else 1 for letter in result]
        return value if len(shape) == len(letters) else build(reshape, value, shape)

    return build(mul, aligned(*first), aligned(*second))


def _length(letters: str, sizes: dict[str, int]) -> int:
    """Return the product of the sizes of these dimensions; -1 if it depends on the batch."""
    lengths = [sizes[letter] for letter in letters]
    return -1 if -1 in lengths else math.prod(lengths)


def _summed(build: Builder, letters: str, value: fx.Node, needed: set[str]) -> tuple[str, fx.Node]:
    """Return the operand without the dimensions that nothing else has."""
    alone = [position for position, letter in enumerate(letters) if letter not in needed]
    if not alone:
        return letters, value
    return "".join(letter for letter in letters if letter in needed), build(sum, value, alone, False)


def _ordered(build: Builder, value: fx.Node, letters: str, order: str) -> Any:
    return value if letters == order else build(permute, value, [letters.index(letter) for letter in order])


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    letters, result = _split(arguments["equation"])
    sizes: dict[str, Any] = {}
    for each, operand in zip(letters, arguments["operands"], strict=True):
        for letter, size in zip(each, fact(operand).shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return "it repeats one of its operands"
    if not are_fixed(size for letter, size in sizes.items() if letter not in result):
        return "it sums over the batch, whose size is not fixed"
    return None if varying_sizes(list(sizes.values())) <= 1 else "two of its sizes depend on the batch"


def _inner(input: Any, other: Any) -> dict[str, Any] | str:
    first, second = (fact(operand) for operand in (input, other))
    if not isinstance(first, TensorFact) or not isinstance(second, TensorFact) or not first.shape or not second.shape:
        return "one of its operands is not a tensor of one or more dimensions"
    letters = string.ascii_lowercase
    one, two = letters[: len(first.shape) - 1], letters[len(first.shape) - 1 :][: len(second.shape) - 1]
    return spelled(f"{one}z,{two}z->{one}{two}", input, other)


def _chained(*matrices: Any, **_: Any) -> dict[str, Any] | str:
    chain = listed(matrices)
    letters = string.ascii_lowercase
    pairs = [letters[number : number + 2] for number in range(len(chain))]
    if any(len(fact(matrix).shape) != 2 for matrix in chain):
        return "one of its operands is not a matrix"
    return spelled(f"{','.join(pairs)}->{letters[0]}{letters[len(chain)]}", *chain)


def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> dict[str, Any] | str:
    ranks = [len(fact(operand).shape) for operand in (a, b)]
    if isinstance(dims, int):
        dims = (list(range(ranks[0] - dims, ranks[0])), list(range(dims)))
    if not isinstance(dims, list | tuple) or not all(isinstance(each, list | tuple) for each in dims):
        return "its dimensions are computed"
    first, second = ([dim % rank for dim in each] for each, rank in zip(dims, ranks, strict=True))
    one = list(string.ascii_lowercase[: ranks[0]])
    two = list(string.ascii_uppercase[: ranks[1]])
    for left, right in zip(first, second, strict=True):
        two[right] = one[left]
    result = [letter for letter in one if letter not in two] + [letter for letter in two if letter not in one]
    return spelled(f"{''.join(one)},{''.join(two)}->{''.join(result)}", a, b)


def _vecdot(x: Any, y: Any, *, dim: int = -1) -> dict[str, Any] | str:
    letters = string.ascii_lowercase[: len(fact(x).shape)]
    return spelled(f"{letters},{letters}->{letters.replace(letters[dim], '')}", x, y)


@composite(
    function=sums.einsum,
    operands=("operands",),
    by_name=False,
    traits=frozenset({Trait.MATRIX_PRODUCT}),
    calls={
        torch.einsum: lambda equation, *operands: (
            spelled(equation, *listed(operands)) if isinstance(equation, str) else "its dimensions are given as numbers"
        ),
        **function_and_method(lambda input: spelled("ii->", input), "trace"),
        **function_and_method(lambda input, vec: spelled("ij,j->i", input, vec), "mv"),
        **function_and_method(lambda input, tensor=None, **named: spelled("i,i->", input, named.get("other", tensor)), "dot", "vdot"),
        **function_and_method(lambda input, vec2: spelled("i,j->ij", input, vec2), "outer", "ger"),
        **function_and_method(_inner, "inner"),
        **dict.fromkeys((torch.chain_matmul, torch.linalg.multi_dot), _chained),
        torch.tensordot: _tensordot,
        torch.linalg.vecdot: _vecdot,
    },
    refuses=_refuses,
)
@sampled("torch.einsum('bij,bkj->bik', x, y)", "torch.einsum('bij,bij->bj', [x, y])", within=ROUNDED, x=(6, 6))
@sampled("torch.einsum('... i j, ... k j -> ... i k', x[:, 0], y[:, 0])", "torch.linalg.vecdot(x, y, dim=1)", within=ROUNDED)
@sampled("torch.einsum('bijk,kh->bhij', x, {P(6, 4)})", "torch.tensordot(x, {P(6, 6)}, 1)", within=ROUNDED)
@sampled("torch.tensordot(x, {P(6, 6)}, ([2], [1]))", "trace(x[0, 0])", within=ROUNDED)
@sampled("mv(x, {P(3, 8)}[1])", "outer(x[:, 0], {P(3, 8)}[1])", "ger(x[:, 0], x[0])", "inner(x, {P(3, 8)})", within=ROUNDED, x=(8,))
@sampled("torch.chain_matmul(x, {P(8, 3)})", "torch.linalg.multi_dot([x, {P(8, 3)}])", within=ROUNDED, x=(8,))
@sampled("dot(x[0], {P(3, 8)}[1]) + x[:, 0]", "vdot(x[0], {P(3, 8)}[1]) + x[:, 0]", within=NORMED, x=(8,))
def einsum(build: Builder, equation: str, operands: Sequence[fx.Node]) -> Any:
    """Return the contraction of the operands that an equation without spaces or dots says."""
    letters, result = _split(equation)
    values = list(operands)
    for number in range(len(values)):
        letters[number], values[number] = _without_repetition(build, letters[number], values[number])
    while len(values) > 2:  # from left to right
        later = set("".join([*letters[2:], result]))
        between = "".join(dict.fromkeys(letter for letter in letters[0] + letters[1] if letter in later))
        values[:2] = [_product(build, (letters[0], values[0]), (letters[1], values[1]), between)]
        letters[:2] = [between]
    if len(values) == 2:
        return _product(build, (letters[0], values[0]), (letters[1], values[1]), result)
    remaining, value = _summed(build, letters[0], values[0], set(result))
    return _ordered(build, value, remaining, result)


def _added(equation: str, *names: str) -> Any:
    """Return an adapter that takes the two operands that are multiplied by position or by PyTorch's names."""

    def adapt(input: Any, one: Any, other: Any, *, beta: float = 1, alpha: float = 1) -> dict[str, Any] | str:
        if not all(isinstance(number, int | float) for number in (beta, alpha)):
            return "beta or alpha is computed"
        return {"input": input, "one": one, "other": other, "equation": equation, "beta": beta, "alpha": alpha}

    return lambda input, *args, **kwargs: adapt(input, *args, *(kwargs.pop(name) for name in names[len(args) :]), **kwargs)


@composite(
    function=sums.added_product,
    operands=("input", "one", "other"),
    calls={
        **function_and_method(_added("ij,j->i", "mat", "vec"), "addmv"),
        **function_and_method(_added("i,j->ij", "vec1", "vec2"), "addr"),
        **function_and_method(_added("bij,bjk->bik", "batch1", "batch2"), "baddbmm"),
        **function_and_method(_added("bij,bjk->ik", "batch1", "batch2"), "addbmm"),
    },
    refuses=(
        nodes("one", "other", because="one of its operands is not a tensor"),
        lambda node, arguments: _refuses(node, {"equation": arguments["equation"], "operands": [arguments["one"], arguments["other"]]}),
    ),
)
@sampled("addmv(x[:, 0], x, {P(3, 8)}[1], alpha=0.5)", "addr(x, x[:, 0], {P(3, 8)}[1])", within=HEADS, x=(8,))
@sampled("addbmm(x, x[None], {P(8, 8)}[None], beta=2)", within=HEADS, x=(8,))
@sampled("baddbmm(x, x, y, beta=0.5, alpha=0.3)", "x.baddbmm(y, x, beta=0)", within=HEADS, x=(6, 6))
def added_product(build: Builder, input: fx.Node, one: fx.Node, other: fx.Node, equation: str, beta: float = 1, alpha: float = 1) -> Any:
    """Return beta · input + alpha · the contraction of the other two operands."""
    product = build(einsum, equation, [one, other])
    if beta == 0:
        return product if alpha == 1 else build(mul, product, float(alpha))
    return build(add, input if beta == 1 else build(mul, input, float(beta)), product, float(alpha))


@composite(operands=("input1", "input2"))
@sampled("bilinear(x, x.flip(1), {P(6, 6)}[None], None)", within=HEADS, x=(6, 6))
@sampled("nn.Bilinear(6, 6, 2)", within=100.0, x=(6, 6), y=(6, 6))
def bilinear(build: Builder, input1: fx.Node, input2: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Any:
    """Compute x · W_o · y + b_o for each output channel o.

    Return the products of x with every channel's matrix, and then with y.
    """
    channels, width, height = fact(weight).shape
    turned = build(reshape, build(permute, weight, [1, 0, 2]), [width, channels * height])
    shape = numbers(fact(input1).shape)
    first = build(reshape, build(matmul, input1, turned), [*shape[:-1], channels, height])
    column = build(reshape, input2, [*shape[:-1], height, 1])
    result = build(reshape, build(matmul, first, column), [*shape[:-1], channels])
    return result if bias is None else build(add, result, bias)
