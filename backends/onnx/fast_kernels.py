"""The kernels of style "fast": the same integers by operators on uint8, for targets with float32 requantization.

An int8 tensor is stored as uint8 with zero point 128, for which runtimes have fast kernels on every processor; an affine one
has its own. A sum of products and its requantization become one QLinearConv or QLinearMatMul, or a MatMulInteger and its requantization.
The multiplier is stored as the weight's scale, and all other scales are one, so there is a single factor and no order of
multiplication. Operators that only move or compare elements work on uint8 directly, since the zero point is preserved. All
others are as in style "exact", on centred integers.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from fxquant.backends.onnx import fast_parts
from fxquant.backends.onnx.fast_parts import EIGHT_BITS, ZERO_POINT, Placed, divisor, is_8_bits, parts_of, plain, stored_zero_point
from fxquant.backends.onnx.writer import Emitter, Writer, value_info
from fxquant.ir.graph import fact
from fxquant.numerics.grids import BOUNDARY_LIMIT, power_of_two
from fxquant.primitives import PRIMITIVES, Primitive, Role, ZeroPoint, elementwise, pool, role_of, shape
from fxquant.primitives.accumulate import attributes_of, per_channel
from fxquant.primitives.quantization import as_float32, clipped, dequantize, quantize, requantize_fixed, requantize_real
from fxquant.primitives.runtime_scales import dynamic_linear
from fxquant.primitives.runtime_scales import emit as emit_dynamic
from fxquant.support import declaring

# Their ONNX forms commute with adding a constant to all elements; the rows of a table are int8, as constants are.
SHIFTED = [
    function
    for function, record in PRIMITIVES.items()
    if record.zero_point is ZeroPoint.EQUIVARIANT and not record.shifted and not record.casts and function is not shape.rows
]


class FastWriter(Writer):
    """Writes an integer graph in one traversal. `refused` names the requantizations that must not be part of an integer kernel."""

    style, in_bytes = "fast", True

    def __init__(self, integer: fx.GraphModule, io: str, opset: int, refused: Collection[str] = ()) -> None:
        super().__init__(integer, io, opset)
        self.refused = refused
        self.functions = {node for node in integer.graph.nodes if fast_parts.computes(integer, node, opset)}
        self.parts = {part for node in integer.graph.nodes for part in self.parts_of(node)}

    def kernels(self) -> list[fx.Node]:
        """Return the requantizations inside integer kernels, the dynamically quantized layers with one, and the computed tables."""
        return [node for node in self.integer.graph.nodes if self.parts_of(node) or self.signs(node) or self.computes(node)]

    def signs(self, node: fx.Node) -> bool:
        """Return whether the weight of a layer that is quantized at run time stays int8, which makes MatMulInteger faster."""
        return node.target is dynamic_linear and node.name not in self.refused

    def computes(self, node: fx.Node) -> bool:
        """Return whether a table is written as the function it is made of."""
        return node in self.functions and node.name not in self.refused

    def metadata(self, outputs: list[onnx.ValueInfoProto]) -> dict[str, Any]:
        computed = [node.name for node in self.kernels() if self.computes(node)]
        integer = [node.name for node in self.kernels() if not self.computes(node)]
        kernels = {"integer": integer, "computed": computed, "refused": list(self.refused)}
        return {**super().metadata(outputs), "kernels": kernels}

    def zero_point(self, node: fx.Node, name: str) -> int:
        return stored_zero_point(node) if self.emitter.types[name] == torch.uint8 else 0

    def stored(self, node: fx.Node, value: Tensor) -> Tensor:
        return value if value.is_floating_point() else (value.to(torch.int16) + moved_by(node)).to(torch.uint8)

    def returned_integers(self, node: fx.Node) -> str:
        value = str(self.values[node])
        if not self._is_shifted(value) or fact(node).dtype == torch.uint8:
            return value
        name = f"{node.name}_output"
        while name in self.emitter.taken:
            name += "_"
        returned = self._named(self.emitter.node("Cast", self._as(value, torch.float32, ZERO_POINT), to=torch.int8), name)
        self._describe(node, returned, "quantized")
        self.infos.append(value_info(returned, torch.int8, fact(node).shape))
        return returned

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def emit(self, node: fx.Node, record: Primitive) -> str | None:
        if node in self.parts or plain(node) is not node:
            return None  # a later node computes it too
        own = FORMS.get(node.target)
        result = None if own is None else own(self, node, *node.args)
        return result if result is not None else super().emit(node, record)

    def exact(self, node: fx.Node, take: Callable[[Any], Any]) -> str:
        """Append a primitive in its own form, with its arguments as `take` returns them."""
        return PRIMITIVES[node.target].onnx(self.emitter, *fx.node.map_aggregate(node.args, take))  # type: ignore[index]

    def parts_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that form one kernel with this requantization, in order; none if it was refused."""
        return () if node.name in self.refused else parts_of(self.integer, node, self.opset)

    def operand(self, value: Any) -> Any:
        """Return an int8 value as its actual integers, which an exact form reads; an affine value as it is stored, or centred."""
        if plain(value) is not value:
            return self.real(value)
        operand = super().operand(value)
        if not isinstance(value, fx.Node):  # a string among the arguments may also be the name of a value
            return operand
        shifted = isinstance(operand, str) and self._is_shifted(operand) and fact(value).dtype == torch.int8
        return self._as(operand, torch.int8, ZERO_POINT) if shifted else operand

    def real(self, value: Any) -> Any:
        """Return a value's integers as float32; for an affine value, the centred integers."""
        source = plain(value)
        operand = super().operand(source)
        if isinstance(source, fx.Node) and isinstance(operand, str) and self._is_shifted(operand):
            return self._as(operand, torch.float32, stored_zero_point(source))
        return operand

    def shifted(self, value: Any) -> str:
        """Return the name of an 8-bit tensor or constant as uint8; int8 is shifted by 128."""
        value = plain(value)
        stored = super().operand(value)
        if isinstance(stored, Tensor):
            return self.emitter.constant(stored if stored.dtype == torch.uint8 else (stored.to(torch.int16) + ZERO_POINT).to(torch.uint8))
        return str(stored) if self._is_shifted(stored) else self._as(stored, torch.uint8, ZERO_POINT)

    def zero(self, value: Any) -> str:
        """Return the zero point of the result of `shifted`."""
        return self.emitter.constant(stored_zero_point(plain(value)), torch.uint8)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _is_shifted(self, name: str) -> bool:
        # Inputs of the model may be uint8 for another reason; inputs that are quantized tensors are described.
        return self.emitter.types.get(name) == torch.uint8 and (name in self.tensors or all(info.name != name for info in self.inputs))

    def _as(self, name: str, dtype: torch.dtype, zero_point: int) -> str:
        e = self.emitter
        if (name, dtype) not in e.converted:
            value = e.node("Cast", name, to=torch.float32)
            if dtype == torch.uint8:
                value = e.node("Cast", e.node("Add", value, e.constant(float(zero_point))), to=dtype)
            else:
                value = e.node("Sub", value, e.constant(float(zero_point))) if zero_point else value
                value = value if dtype == torch.float32 else e.node("Cast", value, to=dtype)
            e.converted[name, dtype] = value
        return e.converted[name, dtype]


# ---- forms ----------------------------------------------------------------------------------------------------------
# Each takes a primitive's node and arguments, appends it and returns its value, or None to write it as in style "exact".
FORMS: dict[Any, Callable[..., str | None]] = {}
BYTES: dict[Any, Callable[..., str | None]] = {}  # those of targets that requantize by shifts, of the emitter and the arguments

form = declaring(FORMS)


@form(quantize)
def _quantize(
    w: FastWriter, node: fx.Node, input: fx.Node, scale: fx.Node, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str | None:
    zero = stored_zero_point(node)
    return _quantized(w.emitter, w.values[input], w.values[scale], low, high, torch.uint8, zero) if dtype in EIGHT_BITS else None


@declaring(BYTES)(quantize)
def _quantized(e: Emitter, input: str, scale: Tensor, low: int, high: int, dtype: torch.dtype, zero_point: int = 0) -> str | None:
    """Append the quantization of a float tensor to bytes; None for other dtypes."""
    if dtype not in EIGHT_BITS:
        return None
    value, zero = as_float32(e, input), e.constant(zero_point, dtype)
    # No limit before: onnxruntime saturates, and 1.21 to 1.23 cannot start a session with a Clip of a value with two readers.
    stored = clipped(e, e.node("QuantizeLinear", value, e.constant(scale), zero), low + zero_point, high + zero_point, dtype)
    return e.node("Where", e.node("IsNaN", value), zero, stored)  # a Where on bytes is four times as fast as on floats


@form(requantize_real)
def _requantize(
    w: FastWriter, node: fx.Node, accumulator: fx.Node, multiplier: fx.Node, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str | None:
    if dtype not in EIGHT_BITS:
        return None
    e, factor = w.emitter, w.values[multiplier]
    parts = w.parts_of(node)
    written = PRODUCTS.get(role_of(parts[-1].target)) if parts else None
    if not parts:
        value = w.real(accumulator)  # or a quantized tensor that gets another scale
        value = value if e.dtype(value) == torch.float32 else e.node("Cast", value, to=torch.float32)
        bits = torch.iinfo(fact(accumulator).dtype).bits
        barrier = e.node("Relu" if low == 0 else "Round", value)  # as in `requantize_real`'s own form
        result = _rounded(w, node, barrier, factor, min(bits, 32))
    elif written is not None:
        result = written(w, node, factor, *parts[-1].args)
    elif parts[-1].target is elementwise.multiply:
        left, right = parts[-1].args[:2]
        divided = divisor(w.integer, node, parts[-1], w.opset)
        assert divided is not None
        factors = (w.shifted(left), w.zero(left)), (w.shifted(right), w.zero(right))
        result = fast_parts.multiply(e, *factors, divided, w.zero(node))
    else:
        result = _sum(w, node, factor, "Add" if parts[-1].target is elementwise.add else "Sub", parts[:-1])
    zero = stored_zero_point(node)
    return clipped(e, result, low + zero, high + zero, torch.uint8)


def _rounded(w: FastWriter, node: fx.Node, value: str, multiplier: Tensor, bits: int = 32) -> str:
    """Append round_half_even(value · multiplier), saturated, in the node's storage, for a value of this number of bits."""
    e = w.emitter
    product = e.node("Mul", value, e.constant(multiplier))
    if float(multiplier.max()) >= 2 ** (32 - bits):  # not every runtime saturates beyond the range of int32
        product = e.node("Clip", product, e.constant(-BOUNDARY_LIMIT), e.constant(BOUNDARY_LIMIT))
    return e.node("QuantizeLinear", product, e.constant(1.0), w.zero(node))


def _convolution(w: FastWriter, node: fx.Node, multiplier: Tensor, x: Any, weight: Any, bias: Any, *settings: Any) -> str:
    e, one, zero = w.emitter, w.emitter.constant(1.0), w.zero(node)
    scale = multiplier.flatten() if multiplier.numel() > 1 else multiplier.reshape(())
    # onnxruntime rewrites weights and their zero points in place for "x64quantprecision", so each kernel has its own.
    stored, weight_zero = e.own_constant(w.values[weight]), e.own_constant(torch.zeros_like(scale, dtype=torch.int8))
    inputs = [w.shifted(x), one, w.zero(x), stored, e.constant(scale), weight_zero, one, zero]
    inputs += [] if bias is None else [e.constant(w.values[bias])]
    return e.node("QLinearConv", *inputs, **attributes_of(w.values[weight], *settings[:4]))


def _linear(w: FastWriter, node: fx.Node, multiplier: Tensor, x: Any, weight: Any, bias: Any) -> str:
    e = w.emitter
    total = e.node("MatMulInteger", w.shifted(x), e.own_constant(w.values[weight].t().contiguous()), w.zero(x))
    if bias is not None:
        total = e.node("Add", total, e.constant(w.values[bias]))
    return _rounded(w, node, e.node("Cast", total, to=torch.float32), multiplier)


def _product(w: FastWriter, node: fx.Node, multiplier: Tensor, left: Any, right: Any) -> str:
    e, one, zero = w.emitter, w.emitter.constant(1.0), w.zero(node)
    operands = (w.shifted(left), one, w.zero(left), w.shifted(right), e.constant(multiplier.reshape(())), w.zero(right))
    return e.node("QLinearMatMul", *operands, one, zero)


# Each appends a sum of products and its requantization.
PRODUCTS: dict[Any, Callable[..., str]] = {Role.CONVOLUTION: _convolution, Role.LINEAR: _linear, Role.MATRIX_PRODUCT: _product}


def _sum(w: FastWriter, node: fx.Node, multiplier: Tensor, kind: str, terms: tuple[fx.Node, ...]) -> str:
    """Append a sum whose numbers have at most 24 bits each, so that a runtime may use any order, as onnxruntime's QLinearAdd."""
    e = w.emitter
    apart = stored_zero_point(node) % 2  # QLinearAdd rounds with the zero point added, which would move a tie to another even number
    real = []
    for term in terms:
        scale = (w.values[term.args[1]] * multiplier * 2**apart).reshape(())  # type: ignore[index]
        real.append(e.node("DequantizeLinear", w.shifted(term.args[0]), e.constant(scale), w.zero(term.args[0])))
    total = e.node(kind, *real)
    total = e.node("Mul", total, e.constant(0.5)) if apart else total
    return e.node("QuantizeLinear", total, e.constant(1.0), w.zero(node))


@form(dequantize)
def _dequantize(w: FastWriter, node: fx.Node, input: fx.Node, *_: Any) -> str | None:
    return w.exact(node, w.real if fact(input).dtype == torch.int8 else w.operand)


@form(elementwise.lookup)
def _lookup(w: FastWriter, node: fx.Node, input: fx.Node, table: fx.Node, first: int | None = None) -> str | None:
    entries: Tensor = w.values[table]
    if not is_8_bits(input) or entries.numel() != 256:
        return None
    e = w.emitter
    if w.computes(node):
        return fast_parts.compute(e, node, w.shifted(input), w.zero)
    return _looked_up(e, w.shifted(input), w.shifted(table) if entries.dtype in EIGHT_BITS else e.constant(entries))


def _looked_up(e: Emitter, value: str, table: str) -> str:
    """Append a look-up of bytes in a table of 256 entries; int8 counts from its end where it is negative."""
    flat = e.node("Reshape", value, e.constant([-1], torch.int64))
    # onnxruntime's Gather takes four times as long.
    return e.node("Reshape", e.node("GatherElements", table, e.node("Cast", flat, to=torch.int32), axis=0), e.node("Shape", value))


def moved_by(input: fx.Node) -> int:
    """Return the offset of a node's uint8 values relative to its integers."""
    return ZERO_POINT if fact(input).dtype == torch.int8 else 0


@form(elementwise.clamp)
def _clamp(w: FastWriter, node: fx.Node, input: fx.Node, low: int, high: int) -> str | None:
    moved = moved_by(input)
    return clipped(w.emitter, w.shifted(input), low + moved, high + moved, torch.uint8) if is_8_bits(input) else None


@form(shape.pad)
def _pad(w: FastWriter, node: fx.Node, input: fx.Node, begin: list[int], end: list[int], value: int) -> str | None:
    if not is_8_bits(input):
        return None
    e = w.emitter
    return e.node("Pad", w.shifted(input), e.constant([*begin, *end], torch.int64), e.constant(value + moved_by(input), torch.uint8))


@form(*SHIFTED)
def _moved(w: FastWriter, node: fx.Node, *arguments: Any) -> str | None:
    if fact(node).dtype not in EIGHT_BITS:
        return None

    def take(value: Any) -> Any:
        return w.shifted(value) if is_8_bits(value) else w.values[value] if isinstance(value, fx.Node) else value

    return w.exact(node, take)


@form(pool.max_pool)
def _max_pool(w: FastWriter, node: fx.Node, input: fx.Node, kernel: list[int], *_: Any) -> str | None:
    """Pool uint8 if onnxruntime keeps the pixels of the image together for its convolutions; else pool float, five times faster."""
    if not is_8_bits(input) or len(kernel) != 2 or not _beside_convolution(w, input):
        return _moved(w, node)
    stride, begin, end, dilation = (list(sizes) for sizes in node.args[2:])  # type: ignore[arg-type]
    return w.emitter.node("MaxPool", w.shifted(input), kernel_shape=list(kernel), strides=stride, pads=[*begin, *end], dilations=dilation)


def _beside_convolution(w: FastWriter, value: fx.Node) -> bool:
    """Return whether an image comes from a QLinearConv, directly or through additions and pools."""
    if parts := w.parts_of(value):
        return role_of(parts[-1].target) is Role.CONVOLUTION or any(_beside_convolution(w, plain(term.args[0])) for term in parts[:-1])
    return value.target is pool.max_pool and _beside_convolution(w, value.args[0])  # type: ignore[arg-type]


@form(*(function for function, record in PRIMITIVES.items() if record.casts and record.kind == "accumulator"))
def _reads_floats(w: FastWriter, node: fx.Node, *arguments: Any) -> str | None:
    return w.exact(node, w.real)


@form(dynamic_linear)
def _dynamic_linear(writer: FastWriter, node: fx.Node, input: Any, weight: Any, scale: Any, bias: Any) -> str | None:
    if not writer.signs(node):
        return None
    return emit_dynamic(writer.emitter, *fx.node.map_aggregate((input, weight, scale, bias), writer.operand), signed=True)


# ---- targets that requantize by shifts: layers are sums of products of bytes, the rest is as in style "exact" ----------
#
# ONNX's integer operators with requantization multiply by a float32 number, which is never equal to a shift before a multiplier. So the
# sum alone is an integer kernel, ConvInteger or MatMulInteger, and the following nodes read its int32. A convolution whose requantization
# is `placed` is written together with it: shift, Floor, QuantizeLinear and a limit of bytes are all that passes over its result.
#
# onnxruntime has fast kernels for a left factor of uint8 and a right one of int8. The weights of a convolution are the left one, so they
# are stored as uint8 with zero point 128; those of a linear layer are the right one. x86 processors with VNNI add such products in 32
# bits, others add pairs of them in 16, which saturate. A session option prevents this for MatMulInteger, none does for ConvInteger.
BITWISE_OPSET = 18  # the first with BitwiseXor
LEAST_PRODUCTS = 64  # in a sum: shorter ones are as fast in float32, whose layout onnxruntime keeps from layer to layer
LEAST_CHANNELS = 4  # of an image: the bytes under a window are gathered slowly where it has fewer


class SumsWriter(Writer):
    """Writes an integer graph in one traversal. `refused` names the layers that must not be integer kernels."""

    style, in_bytes = "fast", True

    def __init__(self, integer: fx.GraphModule, io: str, opset: int, refused: Collection[str] = ()) -> None:
        super().__init__(integer, io, opset)
        self.refused = refused
        self.placed: dict[fx.Node, Placed] = {}
        self.parts: set[fx.Node] = set()

    def write(self, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> onnx.ModelProto:
        """Return the model; requantizations are written together with their convolutions where their numbers are proved."""
        for node in self.integer.graph.nodes if self.opset >= fast_parts.OPSET else ():
            parts = fast_parts.layer_of(node)
            how = fast_parts.placed_in(self.integer, node, parts, self._is_kernel(parts[0])) if parts else None
            if how is not None:
                self.placed[node] = how
                self.parts.update(parts)
        return super().write(input_names, output_names)

    def kernels(self) -> list[fx.Node]:
        """Return the convolutions and linear layers that are sums of products of bytes."""
        return [node for node in self.integer.graph.nodes if self._is_kernel(node)]

    def _is_kernel(self, node: fx.Node) -> bool:
        role = role_of(node.target)
        if node.name in self.refused or (role is not Role.CONVOLUTION and role is not Role.LINEAR):
            return False
        input, weight = (fact(each) for each in node.args[:2])  # type: ignore[arg-type]
        if node.args[1].op != "get_attr" or {input.dtype, weight.dtype} != {torch.int8} or math.prod(weight.shape[1:]) < LEAST_PRODUCTS:  # type: ignore[union-attr]
            return False
        return role is Role.LINEAR or bool(node.args[6] == 1 and weight.shape[1] >= LEAST_CHANNELS)  # grouped sums gain no speed

    def metadata(self, outputs: list[onnx.ValueInfoProto]) -> dict[str, Any]:
        kernels = {"integer": [node.name for node in self.kernels()], "computed": [], "refused": list(self.refused)}
        return {**super().metadata(outputs), "kernels": kernels}

    def relies_on_vnni(self) -> bool:
        return any(role_of(node.target) is Role.CONVOLUTION for node in self.kernels())

    def emit(self, node: fx.Node, record: Primitive) -> str | None:
        if node in self.parts:
            return None  # its requantization computes it too
        if node in self.placed:
            return self._requantized(node, self.placed[node])
        if not self._is_kernel(node):
            own = BYTES.get(node.target)
            result = None if own is None else own(self.emitter, *map(self.operand, node.args))
            return result if result is not None else super().emit(node, record)
        bias: Tensor | None = self.operand(node.args[2])
        total = self._sum(node, None if bias is None else bias.long())
        if record.wide:
            return self.emitter.node("Cast", total, to=torch.float64)
        return total if all(user.target is requantize_fixed for user in node.users) else self.emitter.node("Cast", total, to=torch.float32)

    def _sum(self, node: fx.Node, bias: Tensor | None) -> str:
        """Append a layer as a sum of products of bytes, int32, with this bias."""
        e = self.emitter
        input, weight, _, *sizes = (self.operand(argument) for argument in node.args)
        if role_of(node.target) is Role.CONVOLUTION:
            stored = e.constant((weight.to(torch.int16) + ZERO_POINT).to(torch.uint8))
            zeros = e.constant(0, torch.int8), e.constant(ZERO_POINT, torch.uint8)
            total = e.node("ConvInteger", input, stored, *zeros, **attributes_of(weight, *sizes[:4]))
        else:
            # onnxruntime rewrites weights in place for "x64quantprecision", so each kernel has its own.
            stored = e.own_constant(weight.t().contiguous())
            total = e.node("MatMulInteger", self._shifted(input), stored, e.constant(ZERO_POINT, torch.uint8))
        return total if bias is None else e.node("Add", total, e.constant(per_channel(bias.to(torch.int32), weight.dim() - 2)))

    def _requantized(self, node: fx.Node, how: Placed) -> str:
        """Append a convolution, a residual if there is one, and their requantization."""
        e, (layer, *residuals) = self.emitter, fast_parts.layer_of(node)
        shift, weight = self.operand(node.args[1]), self.operand(layer.args[1])
        axis, channels, unshifted = 1 - weight.dim(), len(weight), not bool(shift.any())
        scale = power_of_two(-shift).float()
        if self._is_kernel(layer):
            steps, zeros = e.constant(scale.flatten().expand(channels)), e.constant(torch.zeros(channels, dtype=torch.int32, device="cpu"))
            value = e.node("DequantizeLinear", self._sum(layer, how.bias), steps, zeros, axis=axis)
        else:
            value = PRIMITIVES[layer.target].onnx(e, self.operand(layer.args[0]), weight, how.bias.to(torch.int32), *layer.args[3:])  # type: ignore[index]
            value = value if unshifted else e.node("Mul", value, e.constant(scale))
        for residual in residuals:
            value = e.node("Add", value, self._residual(residual, scale, axis, channels))
        value = value if unshifted else e.node("Floor", value)
        stored = e.node("QuantizeLinear", value, e.constant(how.divisor), e.constant(how.zero), axis=axis)
        return clipped(e, stored, *node.args[6:9])  # type: ignore[arg-type]

    def _residual(self, node: fx.Node, scale: Tensor, axis: int, channels: int) -> str:
        """Append what a node adds to an accumulator, times `scale`, as float32."""
        e = self.emitter
        residual, multiplier, *shift = (self.operand(argument) for argument in node.args[1:])
        factor = multiplier.double() * (power_of_two(-shift[0]) if shift else scale.double())
        zeros = e.constant(torch.zeros(channels, dtype=torch.int8, device="cpu"))
        value = e.node("DequantizeLinear", residual, e.constant(factor.float().flatten().expand(channels)), zeros, axis=axis)
        return e.node("Mul", e.node("Floor", value), e.constant(scale)) if shift else value

    def _shifted(self, value: str) -> str:
        e = self.emitter
        if (value, torch.uint8) not in e.converted:
            if self.opset >= BITWISE_OPSET:
                moved = e.node("BitwiseXor", e.node("Cast", value, to=torch.uint8), e.constant(ZERO_POINT, torch.uint8))
            else:
                raised = e.node("Add", e.node("Cast", value, to=torch.float32), e.constant(float(ZERO_POINT)))
                moved = e.node("Cast", raised, to=torch.uint8)
            e.converted[value, torch.uint8] = moved
        return e.converted[value, torch.uint8]


@declaring(BYTES)(elementwise.lookup)
def _lookup_int8(e: Emitter, input: str, table: Tensor, first: int | None = None) -> str | None:
    if e.dtype(input) != torch.int8 or table.numel() != 256 or first is not None:
        return None
    return _looked_up(e, input, e.constant(table.roll(ZERO_POINT)))
