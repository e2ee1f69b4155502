"""Each operator of the table as standard float operators of ONNX: one function per operator.

An operator that only moves elements is not here but in `MOVING`: the primitives it is made of move floats as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backends.onnx.emitter import Emitter
from fxquant.graph import fact
from fxquant.ops.pool import window_divisor
from fxquant.ops.weighted import sizes
from fxquant.primitives import pool, shape

PER_CHANNEL_OPSET = 13  # the first in which DequantizeLinear has an axis
INT16_OPSET = 21  # the first in which DequantizeLinear knows int16
LARGEST_BIAS = 2**23  # in steps; an operand that was narrowed has up to 2^8 as many steps
LARGEST_SOFTPLUS = 20.0  # beyond it, float32 does not tell softplus from its argument
MOVING = frozenset((
    "reshape", "identity", "dropout", "permute", "expand", "repeat", "getitem", "flip", "roll",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
))  # fmt: skip

Form = Callable[["Call"], str]
FORMS: dict[str, Form] = {}


@dataclass(frozen=True)
class Call:
    """One operator to be written.

    arguments   its canonical arguments, with the names of real values for activations
    constants   its parameters by role: integers, scales, and the axis these run along
    between     quantizes and dequantizes what a residual is added to, where the integer graph does
    rounded     quantizes and dequantizes a value on the scale of the result
    node        the node of the integer graph that is its result
    primitives  the nodes it was lowered to
    """

    e: Emitter
    name: str
    arguments: dict[str, Any]
    constants: dict[str, tuple[Tensor, Tensor, int | None]]
    between: Callable[[str], str] | None
    rounded: Callable[[str], str]
    node: fx.Node
    primitives: list[fx.Node]

    @property
    def input(self) -> str:
        """The real value of its one operand."""
        return str(self.arguments["input"])

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def do(self, operator: str, *inputs: str, **attributes: Any) -> str:
        return self.e.node(operator, *inputs, **attributes)

    def number(self, value: float) -> str:
        return self.e.constant(float(value))

    def integers(self, values: Sequence[int]) -> str:
        return self.e.constant(torch.tensor(list(values), dtype=torch.int64, device="cpu"))

    def operand(self, role: str) -> str:
        """An operand's real value: an activation, a parameter, or a number."""
        value = self.arguments.get(role)
        if isinstance(value, str):
            return value
        return self.e.constant(self.real(role)) if role in self.constants else self.number(self.arguments[role])

    def real(self, role: str) -> Tensor:
        """A parameter's real numbers, float32; its scales must run along its dimension `axis`."""
        integers, scale, axis = self.constants[role]
        shaped = scale if axis is None else scale.reshape(-1, *[1] * (-axis - 1))
        return (integers.double() * shaped.double()).float()

    def weight(self, arrange: Callable[[Tensor], Tensor] = lambda weight: weight, role: str = "weight") -> str:
        """A weight: integers behind DequantizeLinear, or their real numbers where the opset has no such operator.

        `arrange` puts it, and the index of its channels, in another order of dimensions.
        """
        integers, scale, axis = self.constants[role]
        e = self.e
        old = e.opset < PER_CHANNEL_OPSET or (integers.dtype == torch.int16 and e.opset < INT16_OPSET)
        if old or (axis is not None and integers.shape[axis] != scale.numel()):
            return e.constant(arrange(self.grouped(role)))
        attributes = {}
        if axis is not None:
            channels = arrange(torch.arange(scale.numel(), device="cpu").reshape(-1, *[1] * (-axis - 1)).expand(integers.shape))
            attributes["axis"] = next(d for d in range(channels.dim()) if channels.shape[d] == scale.numel() and _runs(channels, d))
        zero = torch.zeros(scale.shape, dtype=integers.dtype, device="cpu")
        return self.do("DequantizeLinear", e.constant(arrange(integers).contiguous()), e.constant(scale), e.constant(zero), **attributes)

    def grouped(self, role: str) -> Tensor:
        """The real numbers of a weight whose scales may run through groups along its first dimension."""
        integers, scale, axis = self.constants[role]
        if axis is None or integers.shape[axis] == scale.numel():
            return self.real(role).contiguous()
        groups = scale.numel() // integers.shape[axis]
        shaped = scale.reshape(groups, 1, integers.shape[axis], *[1] * (-axis - 1))
        return (integers.reshape(groups, -1, *integers.shape[1:]) * shaped).reshape(integers.shape)

    def primitive(self, target: Callable[..., Any]) -> fx.Node | None:
        """The first of its primitives of this kind."""
        return next((node for node in self.primitives if node.target is target), None)

    def epilogue(self, value: str) -> str:
        """What is fused behind it: a residual, then a clamp."""
        if self.arguments.get("residual") is not None:
            value = value if self.between is None else self.between(value)
            value = self.do("Add", value, self.arguments["residual"])
        return self.clamped(value, *(self.arguments.get("clamp") or (None, None)))

    def clamped(self, value: str, low: float | None, high: float | None) -> str:
        low, high = (None if bound is None or math.isinf(bound) else bound for bound in (low, high))
        if low is None and high is None:
            return value
        if low == 0 and high is None:
            return self.do("Relu", value)
        return self.do("Clip", value, "" if low is None else self.number(low), *([] if high is None else [self.number(high)]))

    def reduced(self, operator: str, value: str, axes: Sequence[int] | None, keepdim: bool) -> str:
        """A reduction, whose axes were an attribute once."""
        attributes: dict[str, Any] = {"keepdims": int(keepdim)}
        if axes is None:
            return self.do(operator, value, **attributes)
        if self.e.opset < (13 if operator == "ReduceSum" else 18):
            return self.do(operator, value, axes=list(axes), **attributes)
        return self.do(operator, value, self.integers(axes), **attributes)

    def unsqueezed(self, value: str, axis: int) -> str:
        return self.do("Unsqueeze", value, axes=[axis]) if self.e.opset < 13 else self.do("Unsqueeze", value, self.integers([axis]))


def _runs(channels: Tensor, dim: int) -> bool:
    """Whether the index of channels is that of this dimension."""
    return torch.equal(
        channels, torch.arange(channels.shape[dim], device="cpu").reshape(-1, *[1] * (channels.dim() - dim - 1)).expand(channels.shape)
    )


def form(*names: str) -> Callable[[Form], Form]:
    """Declare the decorated function the form of these operators."""

    def declare(function: Form) -> Form:
        FORMS.update(dict.fromkeys(names, function))
        return function

    return declare


# ---- sums of products -----------------------------------------------------------------------------------------------


def _with_bias(c: Call, sum_of: Callable[..., str], trailing: int) -> str:
    """`sum_of` the bias as an input, if there is one; a large bias is added behind.

    onnxruntime makes a bias int32, in steps of the operand's scale times the weight's, and does not mind an overflow.
    """
    if "bias" not in c.constants:
        return sum_of()
    bias = c.real("bias")
    if float(c.constants["bias"][0].abs().max()) < LARGEST_BIAS:
        return sum_of(c.e.constant(bias))
    return c.do("Add", sum_of(), c.e.constant(bias.reshape(-1, *[1] * trailing)))


def _window(c: Call, rank: int) -> dict[str, Any]:
    padding = sizes(c["padding"], rank)
    if c.arguments.get("padding_mode", "zeros") != "zeros":
        padding = [0] * rank  # it is put around the operand first
    # One size for each dimension, or the sizes before and behind each, the last dimension first.
    pads = padding * 2 if len(padding) == rank else [*padding[::2][::-1], *padding[1::2][::-1]]
    return {"strides": sizes(c["stride"], rank), "pads": pads, "dilations": sizes(c["dilation"], rank), "group": c["groups"]}


@form("conv1d", "conv2d", "conv3d")
def _convolution(c: Call) -> str:
    kernel = list(c.constants["weight"][0].shape[2:])
    attributes = {"kernel_shape": kernel, **_window(c, len(kernel))}
    operand = _selected(c)  # with its own elements around it, where it is padded with those
    return c.epilogue(_with_bias(c, lambda *bias: c.do("Conv", operand, c.weight(), *bias, **attributes), len(kernel)))


@form("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed_convolution(c: Call) -> str:
    kernel = list(c.constants["weight"][0].shape[2:])
    attributes = {"kernel_shape": kernel, **_window(c, len(kernel)), "output_padding": sizes(c["output_padding"], len(kernel))}
    return c.epilogue(_with_bias(c, lambda *bias: c.do("ConvTranspose", c.input, c.weight(), *bias, **attributes), len(kernel)))


@form("linear", "matmul")
def _linear(c: Call) -> str:
    if "weight" not in c.constants:  # a product of two activations, or with a constant that is no matrix
        return c.epilogue(c.do("MatMul", c.operand("input"), c.operand("other")))
    operand = fact(_operand_node(c))
    if len(operand.shape) == 2:
        return c.epilogue(_with_bias(c, lambda *bias: c.do("Gemm", c.input, c.weight(), *bias, transB=1), 0))
    product = c.do("MatMul", c.input, c.weight(lambda weight: weight.t()))
    return c.epilogue(c.do("Add", product, c.e.constant(c.real("bias"))) if "bias" in c.constants else product)


def _operand_node(c: Call) -> fx.Node:
    """The node of the integer graph that its first primitive reads."""
    node = c.primitives[0].args[0]
    assert isinstance(node, fx.Node)
    return node


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _scaled(c: Call, role: str) -> str:
    alpha = c.arguments.get("alpha", 1)
    return c.operand(role) if alpha == 1 else c.do("Mul", c.operand(role), c.number(alpha))


@form("add")
def _add(c: Call) -> str:
    return c.epilogue(c.do("Add", c.operand("input"), _scaled(c, "other")))


@form("sub")
def _sub(c: Call) -> str:
    return c.epilogue(c.do("Sub", c.operand("input"), _scaled(c, "other")))


@form("mul")
def _mul(c: Call) -> str:
    return c.epilogue(c.do("Mul", c.operand("input"), c.operand("other")))


@form("div")
def _div(c: Call) -> str:
    return c.epilogue(c.do("Div", c.operand("input"), c.operand("other")))


@form("maximum")
def _maximum(c: Call) -> str:
    return c.do("Max", c.operand("input"), c.operand("other"))


@form("minimum")
def _minimum(c: Call) -> str:
    return c.do("Min", c.operand("input"), c.operand("other"))


@form("clamp")
def _clamp(c: Call) -> str:
    result = c.clamped(c.input, c.arguments.get("min"), c.arguments.get("max"))
    return result if result != c.input else c.do("Identity", result)


@form("prelu")
def _prelu(c: Call) -> str:
    slope = c.real("slope")
    return c.epilogue(c.do("PRelu", c.input, c.e.constant(slope.reshape(1) if slope.dim() == 0 else slope)))


@form("batch_norm")
def _batch_norm(c: Call) -> str:
    trailing = [1] * (len(fact(_operand_node(c)).shape) - 2)
    weight, bias = (c.e.constant(c.real(role).reshape(-1, *trailing)) for role in ("weight", "bias"))
    return c.epilogue(c.do("Add", c.do("Mul", c.input, weight), bias))


@form("scale_channels")
def _scale_channels(c: Call) -> str:
    scaled = c.do("Mul", c.input, c.e.constant(c.real("weight")))
    return c.epilogue(scaled if "bias" not in c.constants else c.do("Add", scaled, c.e.constant(c.real("bias"))))


# ---- pooling --------------------------------------------------------------------------------------------------------


@form("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(c: Call) -> str:
    node = c.primitive(pool.max_pool)
    assert node is not None
    _, kernel, stride, begin, end, dilation = node.args
    attributes = {"kernel_shape": list(kernel), "strides": list(stride), "pads": [*begin, *end], "dilations": list(dilation)}  # type: ignore[misc, arg-type]
    return c.do("MaxPool", c.input, **attributes)


@form(*(f"{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in (1, 2, 3)))
def _average_pool(c: Call) -> str:
    node = c.primitive(pool.sum_pool)
    if node is None:
        return c.epilogue(c.do("GlobalAveragePool", c.input))
    kernel, stride, begin, end = (list(value) for value in node.args[1:5])  # type: ignore[arg-type]
    even = len({*begin, *end}) == 1  # onnxruntime 1.21 to 1.23 counts uneven padding wrongly, from opset 19 on: it is left out
    mean = c.do("AveragePool", c.input, kernel_shape=kernel, strides=stride, pads=[*begin, *end], count_include_pad=int(even))
    shape = fact(_operand_node(c)).shape
    elements = math.prod(kernel) if even else window_divisor(shape, {"count_include_pad": False}, kernel, stride, begin, end)
    share = elements / window_divisor(shape, c.arguments, kernel, stride, begin, end)
    return c.epilogue(mean if bool((share == 1).all()) else c.do("Mul", mean, c.e.constant(share.float())))


@form("mean", "sum")
def _reduction(c: Call) -> str:
    dims = c["dim"]
    axes = None if dims is None else list(dims) if isinstance(dims, list | tuple) else [dims]
    return c.epilogue(c.reduced("ReduceMean" if c.name == "mean" else "ReduceSum", c.input, axes or None, c["keepdim"]))


@form("amax")
def _amax(c: Call) -> str:
    dims = c["dim"]
    axes = (list(dims) if isinstance(dims, list | tuple) else [dims]) or None
    if c.e.opset >= 12:
        return c.reduced("ReduceMax", c.input, axes, c["keepdim"])
    # onnxruntime would make one operator on int8 of the three, which that opset does not have.
    return c.do("Neg", c.reduced("ReduceMin", c.do("Neg", c.input), axes, c["keepdim"]))


# ---- joining and padding --------------------------------------------------------------------------------------------


@form("cat")
def _cat(c: Call) -> str:
    return c.do("Concat", *c["tensors"], axis=c["dim"])


@form("stack")
def _stack(c: Call) -> str:
    axis = c["dim"] % len(fact(c.node).shape)
    # Each part is on the result's scale already: onnxruntime cannot move QuantizeLinear of opset 21 behind Unsqueeze by itself.
    return c.do("Concat", *(c.rounded(c.unsqueezed(tensor, axis)) for tensor in c["tensors"]), axis=axis)


@form("pad")
def _pad(c: Call) -> str:
    rank = len(fact(c.node).shape)
    pairs = list(zip(c["padding"][::2], c["padding"][1::2], strict=True))
    margins = [(0, 0)] * (rank - len(pairs)) + pairs[::-1]
    pads = [begin for begin, _ in margins] + [end for _, end in margins]
    return c.do("Pad", c.input, c.integers(pads), c.number(c["value"]))


# ---- resizing -------------------------------------------------------------------------------------------------------


@form("interpolate")
def _interpolate(c: Call) -> str:
    before, after = fact(_operand_node(c)).shape, fact(c.node).shape
    nearest = c["mode"].startswith("nearest")
    if nearest and any(new % old for old, new in zip(before[2:], after[2:], strict=True)):
        return _selected(c)  # where a pixel comes from may depend on how the runtime rounds
    factors = c["scale_factor"] or [_factor(old, new) for old, new in zip(before[2:], after[2:], strict=True)]
    align = "align_corners" if c["align_corners"] else "half_pixel"
    value, one = c.input, [1.0, 1.0]
    attributes: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": align}
    if nearest:
        attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = c.e.constant(torch.tensor([*one, *factors], dtype=torch.float32, device="cpu"))
    roi = c.e.constant(torch.zeros(0, dtype=torch.float32, device="cpu")) if c.e.opset < 13 else ""
    return c.do("Resize", value, roi, scales, **attributes)


def _factor(old: int, new: int) -> float:
    """The least float32 factor, from new/old upwards, that gives the new size."""
    factor = torch.tensor(new / old, dtype=torch.float32, device="cpu")
    while math.floor(float(factor) * old) < new or math.floor(float(factor * old)) < new:
        factor = torch.nextafter(factor, torch.full_like(factor, math.inf))
    return float(factor)


def _selected(c: Call) -> str:
    """The operand's elements as the integer graph selects them; the operand itself where it does not."""
    value = c.input
    for node in c.primitives:
        if node.target is shape.select:
            indices = c.e.constant(_constant_of(node.args[2]))
            value = c.do("Gather", value, indices, axis=node.args[1])
    return value


def _constant_of(node: Any) -> Tensor:
    value = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


# ---- unary functions ------------------------------------------------------------------------------------------------


def _unary(name: str, write: Callable[[Call, str], str]) -> None:
    FORMS[name] = lambda c: write(c, c.input)


for _name, _operator in (
    ("sigmoid", "Sigmoid"), ("tanh", "Tanh"), ("selu", "Selu"), ("softsign", "Softsign"), ("exp", "Exp"), ("log", "Log"),
    ("sqrt", "Sqrt"), ("reciprocal", "Reciprocal"), ("erf", "Erf"), ("abs", "Abs"), ("sin", "Sin"), ("cos", "Cos"), ("neg", "Neg"),
):  # fmt: skip
    _unary(_name, lambda c, x, operator=_operator: c.do(operator, x))  # type: ignore[misc]


def _hardsigmoid(c: Call, x: str) -> str:
    return c.do("HardSigmoid", x, alpha=1 / 6, beta=0.5)


def _softplus(c: Call, x: str) -> str:
    """log(1 + exp(beta · x)) / beta, and x itself where beta · x is above the threshold."""
    beta, threshold = c.arguments.get("beta", 1.0), c.arguments.get("threshold", 20.0)
    inner = x if beta == 1 else c.do("Mul", x, c.number(beta))
    value = c.do("Softplus", inner)
    value = value if beta == 1 else c.do("Div", value, c.number(beta))
    if threshold >= LARGEST_SOFTPLUS:
        return value
    return c.do("Where", c.do("Greater", inner, c.number(threshold)), x, value)


def _gelu(c: Call, x: str) -> str:
    if c.arguments.get("approximate", "none") == "tanh":
        cube = c.do("Mul", c.do("Mul", x, x), x)
        inner = c.do("Mul", c.do("Add", x, c.do("Mul", cube, c.number(0.044715))), c.number(math.sqrt(2 / math.pi)))
        bent = c.do("Tanh", inner)
    else:
        bent = c.do("Erf", c.do("Div", x, c.number(math.sqrt(2))))
    return c.do("Mul", c.do("Mul", x, c.do("Add", bent, c.number(1))), c.number(0.5))


@form("shifted")
def _shifted(c: Call) -> str:
    scaled = c.input if c["factor"] == 1 else c.do("Mul", c.input, c.number(c["factor"]))
    arguments = {"input": c.do("Add", scaled, c.number(c["offset"])), **c["settings"]}
    return FORMS[c["function"]](replace(c, name=c["function"], arguments=arguments))


_unary("silu", lambda c, x: c.do("Mul", x, c.do("Sigmoid", x)))
_unary("hardsigmoid", _hardsigmoid)
_unary("hardswish", lambda c, x: c.do("Mul", x, _hardsigmoid(c, x)))
_unary("mish", lambda c, x: c.do("Mul", x, c.do("Tanh", c.do("Softplus", x))))
_unary("tanhshrink", lambda c, x: c.do("Sub", x, c.do("Tanh", x)))
_unary("logsigmoid", lambda c, x: c.do("Neg", c.do("Softplus", c.do("Neg", x))))
_unary("rsqrt", lambda c, x: c.do("Reciprocal", c.do("Sqrt", x)))
_unary("square", lambda c, x: c.do("Mul", x, x))
_unary("softplus", _softplus)
_unary("gelu", _gelu)
_unary("leaky_relu", lambda c, x: c.do("LeakyRelu", x, alpha=float(c["negative_slope"])))
_unary("elu", lambda c, x: c.do("Elu", x, alpha=float(c["alpha"])))
_unary("pow", lambda c, x: c.do("Pow", x, c.number(c["exponent"])))
