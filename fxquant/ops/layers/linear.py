"""Linear layers and matrix products."""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.ir.graph import largest_size
from fxquant.lowering.lowering import named_parameters
from fxquant.numerics.grids import FLOAT32_EXACT, INT32_MAX, INT48_MAX, accumulator_bound
from fxquant.ops.core import FOLDED, BatchDim, Call, Clamp, Instead, Lowering, Quantized, Ratio, Trait, is_parameter, sampled
from fxquant.ops.core.declare import function_and_method, lowered
from fxquant.ops.core.matrix import added_product, computed_linear, is_computed, with_vectors
from fxquant.ops.core.record import Layer, operator_named
from fxquant.ops.core.weighted import ABSORBED, Product, absorbing, epilogue, lower_weighted, refuses_weighted, rescaled, shape_of
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
    return c.epilogue(c.do("Add", product, c.e.constant(c.real("bias"))) if "bias" in c.constants else product)


def _onnx_convolution(c: Call) -> str:
    """Write a linear layer as a convolution with a kernel of one, its last dimension as channels. The file has a fixed batch of one."""
    _, *sizes, features = (size.at(1) if isinstance(size, BatchDim) else size for size in c.operand_shape)
    inner = range(1, len(sizes) + 1)
    if c.images_alone and len(sizes) < 2:
        image, outputs = c.do("ToImage", c.input, shape=[1, *sizes, features]), c.constants["weight"][0].shape[0]
        layer = c.with_bias(lambda *bias: c.do("Conv", image, c.weight(lambda w: w[:, :, None, None]), *bias, group=1), 2)
        return c.epilogue(c.do("FromImage", layer, shape=[1, *sizes, outputs]))
    value = c.do("Transpose", c.input, perm=[0, len(sizes) + 1, *inner]) if sizes else c.input
    value = c.do("Reshape", value, c.integers([-1, features, math.prod(sizes), 1]))
    layer = c.with_bias(lambda *bias: c.do("Conv", value, c.weight(lambda w: w[:, :, None, None]), *bias, kernel_shape=[1, 1]), 2)
    layer = c.do("Reshape", layer, c.integers([-1, c.constants["weight"][0].shape[0], *sizes]))
    return c.epilogue(c.do("Transpose", layer, perm=[0, *(d + 1 for d in inner), 1]) if sizes else layer)


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
    return Instead(added_product, arguments)


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
