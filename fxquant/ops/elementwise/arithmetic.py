"""Addition, subtraction, multiplication and division: of activations, of constants, of numbers.

The terms of a sum are brought to a common scale, 2^-14 of the largest term's, added, and requantized once; a number or a constant
tensor is rounded to that scale, which is coarser where the constant is much larger than the terms. Products are formed from the
operands' integers directly: a constant with one element for each channel is the weight of a layer, which has a scale for each; any other
constant tensor has one scale, and 16 bits beside 16-bit operands; a number is an exact factor.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import absorb, is_parameter
from fxquant.lowering.lowering import Lowering, Quantized
from fxquant.numerics.grids import to_float32
from fxquant.ops.core import FLOAT32_EXACT, OPERATORS, WIDE, Builder, Call, Clamp, Instead, Ratio, TensorFact, Trait, clamped, fact
from fxquant.ops.core.declare import composite, is_finite, is_tensor, lowered, meets, needs
from fxquant.ops.core.samples import ALIGNED, POSITIVE, sample, sampled
from fxquant.ops.core.sums import Operand, lower_add
from fxquant.ops.core.weighted import Product, lower_uniform, lower_weighted, per_channel
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.elementwise.functions import floor_divided, floor_quotient, quotient_of, trunc_divided, trunc_quotient
from fxquant.ops.elementwise.table import SHIFTED, of_inverse, with_offset
from fxquant.ops.elementwise.whole import WHOLE, alike
from fxquant.primitives import elementwise, product
from fxquant.primitives.arithmetic import PRODUCT

IMAGE = 4  # dimensions of a batch of images
RATIOS = 2.0**-7, 2.0**8  # of the scales of two terms, for which 127 of them is a multiplier that is not 0 and has 15 bits
SCALED = Product(product.scale_channels, product.scale_channels_wide, (0,), layout=torch.flatten)  # by one number


def by_channels(trailing: int) -> Product:
    """Return the product of channels, before `trailing` other dimensions, with a weight (C, 1): one factor for each channel."""
    return Product(product.scale_channels, product.scale_channels_wide, (trailing,), trailing, layout=torch.flatten, channels=1)


def limited(value: Tensor, clamp: Clamp | None) -> Tensor:
    """Apply a fused clamp."""
    return value if clamp is None else clamped(value, *clamp)


def needs_activation(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why a node must stay in float, or None: one operand must be an activation, the other an activation or a constant."""
    operands = [arguments["input"], arguments["other"]]
    if not any(isinstance(o, fx.Node) and not is_parameter(o) and isinstance(fact(o), TensorFact) for o in operands):
        return "none of its operands is an activation"
    if any(isinstance(o, fx.Node) and not isinstance(fact(o), TensorFact) and not is_parameter(o) for o in operands):
        return "one of its operands depends on the batch size"
    numbers = [arguments.get("alpha", 1), *(o for o in operands if not isinstance(o, fx.Node))]
    return None if all(isinstance(n, int | float) and math.isfinite(to_float32(n)) for n in numbers) else "one of its numbers is not finite"


def constant_operand(lowering: Lowering, operand: Operand, role: str, beside: Operand) -> Quantized | float:
    """Quantize a constant tensor with one scale, to 16 bits beside a 16-bit operand; return activations and numbers unchanged."""
    wide = isinstance(beside, Quantized) and beside.dtype.bits > 8
    return lowering.quantize_constant(operand, role, wide) if isinstance(operand, Tensor) else operand


def _channels_of(input: Operand, other: Operand) -> tuple[Quantized, Tensor, int] | None:
    """Return (tensor, constant, dimensions after the channels) where one operand is a constant with an element for each channel."""
    for tensor, constant in ((input, other), (other, input)):
        if isinstance(tensor, Quantized) and isinstance(constant, Tensor) and len(tensor.shape) >= constant.dim():
            trailing = next((after for after, size in enumerate(reversed(constant.shape)) if size != 1), len(tensor.shape))
            if trailing < len(tensor.shape) - 1 and constant.numel() == constant.shape[-1 - trailing] == tensor.shape[-1 - trailing]:
                return tensor, constant, trailing
    return None


def _is_layer(lowering: Lowering, input: Operand, other: Operand, alpha: float) -> bool:
    """Return whether a sum is a layer with the weight `alpha`, to whose accumulator the first operand is added: of bytes of one shape."""
    arithmetic = lowering.arithmetic
    if not isinstance(input, Quantized) or not isinstance(other, Quantized) or input.shape != other.shape or len(input.shape) != IMAGE:
        return False
    if not arithmetic.multiplies_by_layers or any(dtype.bits > 8 for dtype in (input.dtype, other.dtype, lowering.output.dtype)):
        return False
    if arithmetic.rescales_by_layers:  # its own addition has 6 bits and rounds down, and it cannot subtract
        return alpha != 1 or RATIOS[0] <= float(input.scale) / float(other.scale) <= RATIOS[1]
    return alpha not in (1, -1)


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _scaled(c: Call, role: str) -> str:
    if role not in c.arguments and role not in c.constants:  # a constant of zeros, which is not held
        return c.number(0)
    alpha = c.arguments.get("alpha", 1)
    return c.operand(role) if alpha == 1 else c.do("Mul", c.operand(role), c.number(alpha))


def _term(c: Call) -> str:
    return c.operand("input") if "input" in c.arguments or "input" in c.constants else c.number(0)


def _onnx_number_layer(c: Call, alpha: float) -> str:
    """Write the sum of a tensor and a number as a depthwise Conv, with the tensor's factor as weight and the number as bias."""
    first = isinstance(c["input"], str)
    tensor, number = (c["input"], c["other"]) if first else (c["other"], c["input"])
    weight = torch.full((int(c.operand_shape[1]), 1, 1, 1), 1.0 if first else float(alpha), dtype=torch.float32, device="cpu")  # type: ignore[arg-type]
    bias = torch.full((len(weight),), float(number) * (alpha if first else 1), dtype=torch.float32, device="cpu")
    return c.epilogue(c.do("Conv", tensor, c.e.constant(weight), c.e.constant(bias), kernel_shape=[1, 1], group=len(weight)))


def _onnx_add(c: Call) -> str:
    layer = c.primitive(product.scale_channels)
    numbers = any(isinstance(c.arguments.get(role), int | float) for role in ("input", "other"))
    if layer is not None and c.by_layers and numbers and len(c.operand_shape) == 4:
        return _onnx_number_layer(c, c["alpha"])
    if layer is not None and c.by_layers and not numbers and c["alpha"] == 1:
        channels = int(c.operand_shape[1])  # type: ignore[arg-type]
        weight = c.e.constant(torch.ones((channels, 1, 1, 1), dtype=torch.float32, device="cpu"))
        return c.epilogue(c.do("Add", c.input, c.do("Conv", c["other"], weight, group=channels, kernel_shape=[1, 1])))
    return c.epilogue(c.do("Add", _term(c), _scaled(c, "other")))


def _onnx_sub(c: Call) -> str:
    layer = c.primitive(product.scale_channels)
    if layer is not None and c.by_layers and all(isinstance(c.arguments.get(role), str) for role in ("input", "other")):
        return c.epilogue(c.do("Add", c["input"], c.do("Mul", c["other"], c.number(-c["alpha"]))))
    if layer is not None and c.by_layers and len(c.operand_shape) == 4:
        return _onnx_number_layer(c, -c["alpha"])
    other = c.arguments.get("other")
    if c.by_layers and isinstance(other, int | float):  # the tool would subtract the tensor from the number, and multiply by -M
        return c.epilogue(c.do("Add", _term(c), c.number(-other * c["alpha"])))
    return c.epilogue(c.do("Sub", _term(c), _scaled(c, "other")))


SUMS: dict[str, Any] = {
    "absorbs": frozenset({"clamp"}),
    "traits": frozenset({Trait.ADDS, Trait.AFFINE, Trait.HOMOGENEOUS, Trait.KEEPS_INTEGERS, Trait.POINTWISE}),
    "refuses": needs_activation,
    "samples": (sample(within=ALIGNED, input=(3, 6), other=(3, 6)),),
}


@sampled("torch.add(x, other=y).relu()", "torch.add(x, y, alpha=-1.3)", "torch.add(x, 0.8)", "1.5 + x", "x + x", within=ALIGNED)
@sampled("torch.add(x, {P(3, 1, 1)})", "{P(6, 6)} + x", within=ALIGNED)
def _lower_add(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    """input + alpha · other, and a fused clamp."""
    tensor, number = (input, other) if isinstance(input, Quantized) else (other, input)
    if lowering.arithmetic.rescales_by_layers and isinstance(tensor, Quantized) and isinstance(number, int | float):
        factor, bias = (1.0, number * alpha) if tensor is input else (alpha, number)
        return lower_uniform(lowering, SCALED, tensor, (1, 1), float(factor), clamp, float(bias))
    if _is_layer(lowering, input, other, alpha):
        assert isinstance(input, Quantized)
        assert isinstance(other, Quantized)
        return lower_uniform(lowering, SCALED, other, (1, 1), float(alpha), clamp, residual=input)
    return lower_add(lowering, input, other, alpha, clamp=clamp)


add = lowered(
    *(operator.add, operator.iadd, "__add__", "__radd__", "__iadd__"),
    name="add",
    function=lambda input, other, alpha=1, *, clamp=None: limited(
        torch.add(input, other, alpha=alpha) if isinstance(input, Tensor) else input + alpha * other, clamp
    ),
    operands=("input", "other"),
    idle=lambda arguments: _is(arguments["input"], 0) or _is(arguments["other"], 0),
    onnx=_onnx_add,
    integers=alike("add"),
    **(SUMS | {"traits": SUMS["traits"] | {Trait.DISJUNCTION}}),
)(_lower_add)


@lowered(
    *("subtract", operator.sub, operator.isub, "__sub__", "__isub__"),
    calls={torch.rsub: lambda input, other, alpha=1: {"input": other, "other": input, "alpha": alpha}},
    function=lambda input, other, alpha=1, *, clamp=None: limited(
        torch.sub(input, other, alpha=alpha) if isinstance(input, Tensor) else input - alpha * other, clamp
    ),
    operands=("input", "other"),
    idle=lambda arguments: _is(arguments["other"], 0),
    onnx=_onnx_sub,
    integers=alike("sub"),
    **SUMS,
)
@sampled("torch.sub(x, y, alpha=0.4).relu()", "torch.sub(x, 0.8)", "torch.sub(x, {P(3, 1, 1)})", within=ALIGNED)
@sampled("torch.rsub(x, y, alpha=0.4)", "torch.rsub(x, 0.8)", "1 - x", "{P(6, 6)} - x", within=ALIGNED)
def sub(lowering: Lowering, input: Operand, other: Operand, alpha: float = 1, *, clamp: Clamp | None = None) -> Quantized:
    """Compute input - alpha · other, and a fused clamp."""
    return _lower_add(lowering, input, other, -alpha, clamp=clamp)


@sampled("torch.mul(x, other=y[:, :, :1]).relu()", "torch.mul(x, x)", "torch.mul(x, {P(3, 1, 1)})", "{P(3, 6, 6)} * x")
def _lower_mul(lowering: Lowering, input: Operand, other: Operand, *, clamp: Clamp | None = None) -> Quantized:
    """Compute input · other, and a fused clamp.

    Return the product of the integers; a number only changes the step and, if negative, the sign.
    """
    of_channels = _channels_of(input, other)
    if of_channels is not None:
        channels, factors, trailing = of_channels
        return lower_weighted(lowering, by_channels(trailing), channels, factors.float().reshape(-1, 1), None, clamp=clamp)
    left, right = constant_operand(lowering, input, "input", other), constant_operand(lowering, other, "other", input)
    if isinstance(left, Quantized) and isinstance(right, Quantized):
        largest = lowering.prove(left.grid.magnitude * right.grid.magnitude, "the product")
        multiplied = lowering.call(elementwise.multiply, left.value, right.value, largest >= FLOAT32_EXACT)
        steps = Ratio(lowering.arithmetic.step(left.scale, right.scale))
        return lowering.requantize(multiplied, steps, clamp, kind=PRODUCT)
    tensor, number = (left, right) if isinstance(left, Quantized) else (right, left)
    assert isinstance(tensor, Quantized)
    assert not isinstance(number, Quantized)
    if lowering.arithmetic.segments and tensor.dtype.bits > 8 and len(tensor.shape) != IMAGE:  # the chip has layers for images alone
        factor = lowering.quantize_constant(torch.tensor(number, dtype=torch.float32, device=tensor.scale.device), "factor")
        multiplied = lowering.call(elementwise.multiply, tensor.value, factor.value)
        return lowering.requantize(multiplied, Ratio(lowering.arithmetic.step(tensor.scale, factor.scale)), clamp, kind=PRODUCT)
    if lowering.arithmetic.multiplies_by_layers:
        return lower_uniform(lowering, SCALED, tensor, (1, 1), float(number), clamp)
    step = Ratio((tensor.scale, torch.tensor(abs(to_float32(number)), dtype=torch.float64, device=tensor.scale.device)))
    return lowering.requantize(lowering.call(elementwise.widen if number > 0 else elementwise.negate, tensor.value), step, clamp)


def _onnx_mul(c: Call) -> str:
    if "weight" not in c.constants:
        return c.epilogue(c.do("Mul", c.operand("input"), c.operand("other")))
    tensor = next(c[role] for role in ("input", "other") if isinstance(c.arguments.get(role), str))
    return onnx_scaled(c, tensor, c.primitives[0].args[3])  # type: ignore[arg-type]


def onnx_scaled(c: Call, tensor: str, trailing: int) -> str:
    """Write a factor for each channel, and a bias if there is one: as a depthwise Conv of an image where layers are of images alone."""
    rank, bias = len(c.operand_shape), [c.real("bias")] if "bias" in c.constants else []
    if c.by_layers and rank < IMAGE:
        image: dict[str, Any] = {"shape": fact(c.primitives[0].all_input_nodes[0]).at(1)} | ({"axes": [0, 1, 2]} if trailing else {})
        weight = c.real("weight").reshape(-1, 1, 1, 1)
        layer = c.do("Conv", c.do("ToImage", tensor, **image), *map(c.e.constant, (weight, *bias)), group=len(weight))
        return c.do("FromImage", c.epilogue(layer), **image)
    value = c.do("Mul", tensor, c.e.constant(per_channel(c.real("weight"), trailing)))
    return c.epilogue(c.do("Add", value, *(c.e.constant(per_channel(each, trailing)) for each in bias)) if bias else value)


def _multiplied(input: Any, other: Any) -> dict[str, Any] | Instead:
    """Turn a product with booleans into a choice: the tensor where they are true, else 0. A product with 0 is a clamp to 0."""
    for mask, tensor in ((input, other), (other, input)):
        operand_fact = fact(mask) if isinstance(mask, fx.Node) and not is_parameter(mask) else None
        if isinstance(operand_fact, TensorFact) and operand_fact.dtype == torch.bool and isinstance(tensor, fx.Node):
            return Instead(where, {"condition": mask, "input": tensor, "other": 0.0})
        operand_fact = fact(tensor) if isinstance(tensor, fx.Node) and not is_parameter(tensor) else None
        if _is(mask, 0) and isinstance(operand_fact, TensorFact) and operand_fact.dtype == torch.float32:
            return Instead(clamp, {"input": tensor, "min": 0.0, "max": 0.0})
    return {"input": input, "other": other}


mul = lowered(
    *("multiply", operator.mul, operator.imul, "__mul__", "__rmul__", "__imul__"),
    name="mul",
    function=lambda input, other, *, clamp=None: limited(input * other, clamp),
    adapt=_multiplied,
    operands=("input", "other"),
    idle=lambda arguments: _is(arguments["input"], 1) or _is(arguments["other"], 1),
    absorbs=frozenset({"clamp"}),
    refuses=(lambda node, arguments: "it multiplies by zero" if 0 in to_float32((*arguments.values(),)) else None, needs_activation),
    traits=frozenset({Trait.AFFINE, Trait.KEEPS_INTEGERS, Trait.POINTWISE, Trait.CONJUNCTION}),
    integers=alike("mul"),
    samples=(sample(input=(3, 6), other=(3, 6)), sample(input=(3, 6), other=-0.3)),
    onnx=_onnx_mul,
)(_lower_mul)


@lowered(
    *("negative", operator.neg, "__neg__"),
    function=torch.neg,
    traits=frozenset({Trait.HOMOGENEOUS, Trait.KEEPS_INTEGERS, Trait.POINTWISE}),
    integers=lambda arguments, operand: (WHOLE["sub"], {"input": 0, "other": arguments["input"], "alpha": 1}),
    onnx=lambda c: c.do("Mul", c.input, c.number(-1)) if c.by_layers else c.do("Neg", c.input),
    samples=(sample(input=(3, 6)),),
)
def neg(lowering: Lowering, input: Quantized) -> Quantized:
    """Return the elements with the other sign."""
    return _lower_mul(lowering, input, -1.0)


# ---- Division: by a number, of a number, and of two tensors, which is a composite ------------------------------------
#
# x / y = x · (1 / y)     with the reciprocal by a table, 16 bits wide
def reciprocal_of(build: Builder, divisor: fx.Node) -> Any:
    """Compute 1 / divisor, 16 bits wide; a divisor x + ε becomes one table of x, so that rounding does not lose ε."""
    if is_parameter(divisor):
        return build.host(torch.reciprocal, divisor)
    inverse = of_inverse(divisor)
    if isinstance(inverse, Instead):
        return build(inverse.function, *inverse.arguments.values(), demand=WIDE)
    shifted = with_offset(OPERATORS[torch.reciprocal], {"input": divisor}, divisor)
    if shifted is None:
        return build(torch.reciprocal, divisor, demand=WIDE)
    absorb(build.node, divisor)
    return build(SHIFTED.function, *shifted.values(), demand=WIDE)


ROUNDED = {"floor": (floor_quotient, floor_divided), "trunc": (trunc_quotient, trunc_divided)}  # by a tensor, and by a number


def _divided(input: Any, other: Any, rounding_mode: str | None = None) -> dict[str, Any] | str | Instead:
    """Adapt a division: which of several operators it is depends on its operands."""
    if rounding_mode is not None:
        by_a_tensor, by_a_number = ROUNDED[rounding_mode]
        return Instead(by_a_tensor if is_tensor(other) else by_a_number, {"input": input, "other": other})
    if not is_tensor(other):
        return {"input": input, "other": other}
    if is_tensor(input):
        return Instead(true_divide, {"input": input, "other": other})
    if isinstance(input, fx.Node):
        return "it divides a number that is computed"
    inverse = of_inverse(other) if input == 1 else None
    return inverse if isinstance(inverse, Instead) else Instead(quotient_of, {"input": other, "numerator": input})


@lowered(
    *("divide", "true_divide", operator.truediv, operator.itruediv, "__truediv__", "__div__", "__itruediv__", "__idiv__"),
    function=lambda input, other, *, clamp=None: limited(input / other, clamp),
    adapt=_divided,
    calls=dict.fromkeys(("__rtruediv__", "__rdiv__"), lambda input, other: _divided(other, input)),
    idle=lambda arguments: isinstance(arguments["other"], int | float) and arguments["other"] == 1,
    traits=frozenset({Trait.AFFINE, Trait.POINTWISE}),
    absorbs=frozenset({"clamp"}),
    refuses=(
        needs("it divides by a number that is computed", lambda arguments: not isinstance(arguments["other"], fx.Node)),
        meets("other", lambda other: is_finite(to_float32(other)) and to_float32(other) != 0, lambda other: f"it divides by {other}"),
    ),
    onnx=lambda c: c.epilogue(c.do("Div", c.operand("input"), c.operand("other"))),
    samples=(sample(input=(3, 6), other=3), sample(input=(3, 6), other=-0.7)),
)
def div(lowering: Lowering, input: Quantized, other: float, *, clamp: Clamp | None = None) -> Quantized:
    """Compute input / other, where `other` is a number, and then a fused clamp."""
    if lowering.arithmetic.segments and input.dtype.bits > 8:
        return _lower_mul(lowering, input, 1 / to_float32(other), clamp=clamp)
    step = Ratio((input.scale,), (torch.tensor(abs(to_float32(other)), dtype=torch.float64, device=input.scale.device),))
    return lowering.requantize(lowering.call(elementwise.widen if other > 0 else elementwise.negate, input.value), step, clamp)


@composite(function=lambda input, other: torch.true_divide(input, other), by_name=False, traits=frozenset({Trait.DIVIDES, Trait.POINTWISE}))
@sampled("divide(x, y)", "true_divide(x, y)", "x / y", "x.__div__(y)", "x.clone().__idiv__(y)", over=POSITIVE)
@sampled("operator.itruediv(x.clone(), y)", "x.clone().__itruediv__(y)", over=POSITIVE)
def true_divide(build: Builder, input: fx.Node, other: fx.Node) -> Any:
    """Compute input / other for two tensors."""
    return build(mul, input, reciprocal_of(build, other))
