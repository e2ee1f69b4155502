"""Style "fast": the same integers by uint8 kernels, for targets with float32 requantization.

An int8 tensor is stored as uint8 with zero point 128, for which runtimes have fast kernels on every processor; an affine one
has its own. A sum of products and its requantization become one QLinearConv or QLinearMatMul, or a MatMulInteger and what follows; its
multiplier is their weight's scale, with all other scales one, so that there is one number and no order of
multiplication. What only moves or compares elements works on uint8 as it stands, since the zero point moves along. All
else is as in style "exact", on real whole numbers.

Kernels are compared with PyTorch, one by one and all together, before the file is written. One that differs is
written in the form of style "exact" instead, which the metadata and the log say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.arithmetic import Arithmetic
from fxquant.backends.onnx.emitter import Emitter, value_info
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ExportError
from fxquant.facts import BATCH_SIZES, TensorFact
from fxquant.graph import by_name, fact, qparams, resolve, zero_point
from fxquant.numerics import ACTIVATION_TYPES, BOUNDARY_LIMIT, INT8
from fxquant.primitives import PRIMITIVES, Primitive, accumulate, elementwise, pool, product, resize, shape, transposed
from fxquant.primitives.boundary import as_float32, dequantize, quantize
from fxquant.primitives.requantize import requantize_real

logger = logging.getLogger("fxquant")

ZERO_POINT = 128  # of what is stored as int8 elsewhere
EIGHT_BITS = (torch.int8, torch.uint8)

CONVOLUTIONS = (accumulate.convolution, accumulate.convolution_wide)
LINEARS = (accumulate.linear, accumulate.linear_wide)
PRODUCTS = (product.matrix_product, product.matrix_product_wide)
# Their ONNX forms give the same elements, so many more, for elements that are so many more.
SHIFTED: frozenset[Callable[..., Any]] = frozenset((
    shape.reshape, shape.permute, shape.concatenate, shape.crop, shape.select, shape.expand, shape.tile,
    pool.max_pool, product.maximum, product.minimum, resize.resize_linear,
))  # fmt: skip
# Their ONNX forms begin with a cast of their quantized operands to float.
READ_FLOATS: frozenset[Callable[..., Any]] = frozenset((
    *CONVOLUTIONS, *LINEARS, *PRODUCTS, transposed.transposed_convolution, pool.sum_pool, pool.sum,
    elementwise.align_real, elementwise.multiply, elementwise.widen, elementwise.negate, product.rectify, product.scale_channels,
    accumulate.add_residual,
))  # fmt: skip


def has_kernels(arithmetic: Arithmetic) -> bool:
    """Whether ONNX's integer operators, which multiply by a float32 number, can requantize as this arithmetic does."""
    return requantize_real in arithmetic.primitives


def write_fast(
    integer: fx.GraphModule, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """The model in memory, compared with the integer graph. Raises ExportError if it differs as a whole."""
    kernels = FastWriter(integer, io, opset).kernels()
    settings: dict[str, str] = {}
    refused = [node for node in kernels if not _kernel_is_exact(integer, node, opset, settings)]
    if refused:
        settings = PRECISE
        refused = [node for node in kernels if not _kernel_is_exact(integer, node, opset, settings)]
        logger.warning("style 'fast': onnxruntime needs the session options %s for exact kernels here", settings)
    if refused:
        logger.warning(
            "style 'fast': onnxruntime's kernels are not exact here for %d of %d operators, which are written as in style 'exact': %s",
            len(refused),
            len(kernels),
            ", ".join(node.name for node in refused),
        )
    names = [node.name for node in refused]
    model = FastWriter(integer, io, opset, names, settings).write(input_names, output_names)
    whole = FastWriter(integer, "float", opset, names).write(None, None) if io == "integer" else model
    for options in (settings, PRECISE):
        _check_whole(integer, whole, options)
    return model


class FastWriter(Writer):
    """Walks an integer graph once.

    `refused` names the requantizations that are not to be part of an integer kernel; `settings` are the session
    options without which the kernels are not exact on this machine.
    """

    style = "fast"

    def __init__(
        self, integer: fx.GraphModule, io: str, opset: int, refused: Collection[str] = (), settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(integer, io, opset)
        self.refused = refused
        self.settings = settings or {}
        self.converted: dict[tuple[str, torch.dtype], str] = {}

    def kernels(self) -> list[fx.Node]:
        """The requantizations that become part of an integer kernel."""
        return [node for node in self.integer.graph.nodes if self.kernel_of(node) is not None]

    def metadata(self, outputs: list[onnx.ValueInfoProto]) -> dict[str, Any]:
        kernels = {"integer": [node.name for node in self.kernels()], "refused": list(self.refused)}
        options = {"session_options": dict(self.settings), "session_options_without_vnni": PRECISE}
        return {**super().metadata(outputs), **options, "kernels": kernels}

    def zero_point(self, node: fx.Node, name: str) -> int:
        return stored_zero_point(node) if self.emitter.types[name] == torch.uint8 else 0

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
        if self._is_part(node) or plain(node) is not node:
            return None  # a later node computes it too
        own = FORMS.get(node.target)
        result = None if own is None else own(self, node, *node.args)
        return result if result is not None else super().emit(node, record)

    def exact(self, node: fx.Node, take: Callable[[Any], Any]) -> str:
        """Append a primitive in its own form, with its arguments as `take` gives them."""
        return PRIMITIVES[node.target].onnx(self.emitter, *fx.node.map_aggregate(node.args, take))  # type: ignore[index]

    def _is_part(self, node: fx.Node) -> bool:
        """Whether a sum is part of the kernel that its requantization becomes."""
        return len(node.users) == 1 and self.kernel_of(next(iter(node.users))) is node

    def kernel_of(self, node: fx.Node) -> fx.Node | None:
        """The sum of 8-bit products that becomes one kernel with this requantization; None if there is none."""
        if node.target is not requantize_real or node.args[4] not in EIGHT_BITS or node.name in self.refused:
            return None
        total = node.args[0]
        assert isinstance(total, fx.Node)
        known = total.target in CONVOLUTIONS or total.target in LINEARS or total.target in PRODUCTS
        if not known or len(total.users) != 1:
            return None
        return total if all(_is_8_bits(plain(operand)) for operand in total.args[:2]) else None

    def operand(self, value: Any) -> Any:
        """An int8 value as the real whole numbers, which an exact form reads; an affine one as it is stored, or centred."""
        if plain(value) is not value:
            return self.real(value)
        found = super().operand(value)
        shifted = isinstance(found, str) and self._is_shifted(found) and fact(value).dtype == torch.int8
        return self._as(found, torch.int8, ZERO_POINT) if shifted else found

    def real(self, value: Any) -> Any:
        """The same as float32; of an affine value, too, the whole numbers that its zero point is taken from."""
        known = plain(value)
        found = super().operand(known)
        if isinstance(found, str) and self._is_shifted(found):
            return self._as(found, torch.float32, stored_zero_point(known))
        return found

    def shifted(self, value: Any) -> str:
        """An 8-bit tensor, or a constant, as uint8."""
        value = plain(value)
        found = super().operand(value)
        if isinstance(found, Tensor):
            return self.emitter.constant(found if found.dtype == torch.uint8 else (found.to(torch.int16) + ZERO_POINT).to(torch.uint8))
        return str(found) if self._is_shifted(found) else self._as(found, torch.uint8, ZERO_POINT)

    def zero(self, value: Any) -> str:
        """The zero point of what `shifted` gives."""
        return self.emitter.constant(stored_zero_point(plain(value)), torch.uint8)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _is_shifted(self, name: str) -> bool:
        return self.emitter.types.get(name) == torch.uint8 and (name not in self.foreign or name in self.tensors)

    @property
    def foreign(self) -> set[str]:
        """The inputs of the model, which may be uint8 for reasons of their own; those that are quantized tensors are described."""
        return {info.name for info in self.inputs}

    def _as(self, name: str, dtype: torch.dtype, zero_point: int) -> str:
        """A quantized value in another storage."""
        if (name, dtype) not in self.converted:
            e = self.emitter
            value = e.node("Cast", name, to=torch.float32)
            if dtype == torch.uint8:
                value = e.node("Cast", e.node("Add", value, e.constant(float(zero_point))), to=dtype)
            else:
                value = e.node("Sub", value, e.constant(float(zero_point))) if zero_point else value
                value = value if dtype == torch.float32 else e.node("Cast", value, to=dtype)
            self.converted[name, dtype] = value
        return self.converted[name, dtype]


def plain(value: Any) -> Any:
    """What a node of centred integers is made of: kernels know of zero points themselves; any other value as it is."""
    return value.args[0] if isinstance(value, fx.Node) and value.target is elementwise.centre else value


def stored_zero_point(node: Any) -> int:
    """What stands for 0 where a node's value is uint8; a constant beside it is int8."""
    return zero_point(node) if isinstance(node, fx.Node) and fact(node).dtype == torch.uint8 else ZERO_POINT


# ---- forms ----------------------------------------------------------------------------------------------------------
# Each takes a primitive's node and arguments, appends it and returns its value, or None to have it as in style "exact".

FORMS: dict[Callable[..., Any], Callable[..., str | None]] = {}


def form(*primitives: Callable[..., Any]) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    """Declare the decorated function the form of these primitives."""

    def declare(function: Callable[..., str | None]) -> Callable[..., str | None]:
        FORMS.update(dict.fromkeys(primitives, function))
        return function

    return declare


def _is_8_bits(node: Any) -> bool:
    return isinstance(node, fx.Node) and fact(node).dtype in EIGHT_BITS


def _clipped(e: Emitter, value: str, low: int, high: int, zero_point: int) -> str:
    """A uint8 value within these limits of the whole numbers it stands for."""
    return e.node("Clip", value, e.constant(low + zero_point, torch.uint8), e.constant(high + zero_point, torch.uint8))


def _limited(e: Emitter, value: str, low: int, high: int, zero_point: int) -> str:
    """The same for a value that lies between 0 and 255 anyhow."""
    return value if (low + zero_point, high + zero_point) == (0, 255) else _clipped(e, value, low, high, zero_point)


@form(quantize)
def _quantize(
    w: FastWriter, node: fx.Node, input: fx.Node, scale: fx.Node, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str | None:
    if dtype not in EIGHT_BITS:
        return None
    e, step = w.emitter, w.values[scale]
    value = as_float32(e, w.values[input])
    value = e.node("Where", e.node("IsNaN", value), e.constant(0.0), value)
    value = e.node("Clip", value, e.constant(-step * BOUNDARY_LIMIT), e.constant(step * BOUNDARY_LIMIT))
    return _limited(e, e.node("QuantizeLinear", value, e.constant(step), w.zero(node)), low, high, stored_zero_point(node))


@form(requantize_real)
def _requantize(
    w: FastWriter, node: fx.Node, accumulator: fx.Node, multiplier: fx.Node, low: int, high: int, dtype: torch.dtype, zero_point: int = 0
) -> str | None:
    if dtype not in EIGHT_BITS:
        return None
    e, factor = w.emitter, w.values[multiplier]
    kernel = w.kernel_of(node)
    if kernel is None:
        value = w.real(accumulator)  # or a quantized tensor that gets another scale
        value = value if e.dtype(value) == torch.float32 else e.node("Cast", value, to=torch.float32)
        result = _rounded(w, node, e.node("Round", value), factor)  # a barrier, as in `requantize_real`'s own form
    elif kernel.target in CONVOLUTIONS:
        result = _convolution(w, node, factor, *kernel.args)
    elif kernel.target in LINEARS:
        result = _linear(w, node, factor, *kernel.args)
    else:
        result = _product(w, node, factor, *kernel.args)
    return _limited(e, result, low, high, stored_zero_point(node))


def _rounded(w: FastWriter, node: fx.Node, value: str, multiplier: Tensor) -> str:
    """round_half_even(value · multiplier), saturated, as the node stores it."""
    e = w.emitter
    return e.node("QuantizeLinear", e.node("Mul", value, e.constant(multiplier)), e.constant(1.0), w.zero(node))


def _convolution(
    w: FastWriter,
    node: fx.Node,
    multiplier: Tensor,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    cut: Any = None,
) -> str:
    e, one, zero = w.emitter, w.emitter.constant(1.0), w.zero(node)
    scale = multiplier.flatten() if multiplier.numel() > 1 else multiplier.reshape(())
    # onnxruntime rewrites weights and their zero points in place for "x64quantprecision", so each kernel has its own.
    stored, weight_zero = e.own_constant(w.values[weight]), e.own_constant(torch.zeros_like(scale, dtype=torch.int8))
    inputs = [w.shifted(x), one, w.zero(x), stored, e.constant(scale), weight_zero, one, zero]
    inputs += [] if bias is None else [e.constant(w.values[bias])]
    attributes = {"kernel_shape": list(w.values[weight].shape[2:]), "strides": list(stride), "pads": list(padding) * 2}
    return e.node("QLinearConv", *inputs, dilations=list(dilation), group=groups, **attributes)


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


@form(dequantize)
def _dequantize(w: FastWriter, node: fx.Node, input: fx.Node, *_: Any) -> str | None:
    return w.exact(node, w.real if fact(input).dtype == torch.int8 else w.operand)


@form(elementwise.lookup)
def _lookup(w: FastWriter, node: fx.Node, input: fx.Node, table: fx.Node, first: int | None = None) -> str | None:
    entries: Tensor = w.values[table]
    if not _is_8_bits(input) or entries.numel() != 256:
        return None
    e = w.emitter
    stored = w.shifted(table) if entries.dtype in EIGHT_BITS else e.constant(entries)
    return e.node("Gather", stored, e.node("Cast", w.shifted(input), to=torch.int64))


def _moved_by(input: fx.Node) -> int:
    """How much more than the node's integers their uint8 is."""
    return ZERO_POINT if fact(input).dtype == torch.int8 else 0


@form(elementwise.clamp)
def _clamp(w: FastWriter, node: fx.Node, input: fx.Node, low: int, high: int) -> str | None:
    return _clipped(w.emitter, w.shifted(input), low, high, _moved_by(input)) if _is_8_bits(input) else None


@form(shape.pad)
def _pad(w: FastWriter, node: fx.Node, input: fx.Node, begin: list[int], end: list[int], value: int) -> str | None:
    if not _is_8_bits(input):
        return None
    e = w.emitter
    return e.node(
        "Pad",
        w.shifted(input),
        e.constant(torch.tensor([*begin, *end], dtype=torch.int64, device="cpu")),
        e.constant(value + _moved_by(input), torch.uint8),
    )


@form(*SHIFTED)
def _moved(w: FastWriter, node: fx.Node, *arguments: Any) -> str | None:
    if fact(node).dtype not in EIGHT_BITS:
        return None

    def take(value: Any) -> Any:
        return w.shifted(value) if _is_8_bits(value) else w.values[value] if isinstance(value, fx.Node) else value

    return w.exact(node, take)


@form(*READ_FLOATS)
def _reads_floats(w: FastWriter, node: fx.Node, *arguments: Any) -> str | None:
    return w.exact(node, w.real)


# ---- proof ----------------------------------------------------------------------------------------------------------


def _run(model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Mapping[str, str]) -> dict[str, Tensor]:
    """The model in onnxruntime, with all optimisations and these session options."""
    _, level, threads = RUNTIMES[0]
    return Runner(model, level, threads, None, settings)(feeds)


def _whole_range(operand: fx.Node, generator: torch.Generator) -> Tensor:
    """Integers of every size, a third of them the smallest and the largest there are, where sums in too few bits saturate."""
    described = qparams(operand)
    dtype = INT8 if described is None else ACTIVATION_TYPES[described.dtype]
    size = fact(operand).at(BATCH_SIZES[0])
    values = torch.randint(dtype.low, dtype.high + 1, size, generator=generator, device="cpu")
    choice = torch.randint(0, 6, size, generator=generator, device="cpu")
    return values.masked_fill(choice == 0, dtype.low).masked_fill(choice == 1, dtype.high).to(dtype.storage)


def _kernel_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int, settings: Mapping[str, str]) -> bool:
    """Whether one integer kernel, alone, gives PyTorch's integers for operands of the whole range."""
    writer = FastWriter(integer, "integer", opset)
    kernel = writer.kernel_of(node)
    assert kernel is not None
    generator = torch.Generator().manual_seed(0)
    given: dict[fx.Node, Tensor] = {}
    for operand in (*map(plain, kernel.all_input_nodes), *node.all_input_nodes):
        if operand.op == "get_attr":
            given[operand] = writer.values[operand] = resolve(integer, str(operand.target)).cpu()
        elif operand is not kernel:
            given[operand] = _whole_range(operand, generator)
            writer.values[operand] = operand.name
            writer.emitter.types[operand.name] = torch.uint8
    fed = {
        operand.name: (given[operand].to(torch.int16) + _moved_by(operand)).to(torch.uint8) for operand in given if operand.op != "get_attr"
    }
    result = writer.emit(node, PRIMITIVES[node.target])  # type: ignore[index]
    assert result is not None
    sizes = {name: value_info(name, torch.uint8, value.shape) for name, value in fed.items()}
    graph = helper.make_graph(
        writer.emitter.nodes,
        "kernel",
        list(sizes.values()),
        [helper.make_tensor_value_info(result, onnx.TensorProto.UINT8, None)],
        writer.emitter.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with torch.no_grad():
        for centred in kernel.all_input_nodes:
            if centred not in given:
                given[centred] = given[plain(centred)].to(torch.int32) - zero_point(plain(centred))
        given[kernel] = kernel.target(*fx.map_arg(kernel.args, given.__getitem__))  # type: ignore[operator]
        wanted: Tensor = node.target(*fx.map_arg(node.args, given.__getitem__))  # type: ignore[operator]
    return torch.equal(_run(model, fed, settings)[result].to(torch.int16) - _moved_by(node), wanted.to(torch.int16))


def _check_whole(integer: fx.GraphModule, model: onnx.ModelProto, settings: Mapping[str, str]) -> None:
    """Raise ExportError if the model's outputs differ from the integer graph's on random inputs."""
    generator = torch.Generator().manual_seed(0)
    placeholders = [node for node in integer.graph.nodes if node.op == "placeholder"]
    inputs = [_random_input(integer, node, generator) for node in placeholders]
    if _float_nodes(integer):
        return  # operators on the host round in their own ways; the kernels have been compared one by one
    with torch.no_grad():
        wanted: list[Tensor] = []
        device = next((buffer.device for buffer in integer.buffers()), torch.device("cpu"))
        results = integer(**by_name(integer, [value.to(device) for value in inputs]))
        fx.node.map_aggregate(results, lambda value: wanted.append(value.cpu()) if isinstance(value, Tensor) else None)
    found = _run(model, dict(zip((info.name for info in model.graph.input), inputs, strict=True)), settings)
    for value, output in zip(wanted, model.graph.output, strict=True):
        if not torch.equal(found[output.name], value):
            raise ExportError(
                "the model in style 'fast' does not give the integer model's numbers in this onnxruntime",
                because=f"{int((found[output.name] != value).sum())} elements of the output {output.name!r} differ on random inputs, "
                "though every kernel alone is exact",
                remedy="export with style='exact', and report this with the version of onnxruntime and the processor",
            )


def _float_nodes(integer: fx.GraphModule) -> list[fx.Node]:
    """The nodes that are neither primitives nor constants nor the ends of the graph."""
    return [
        node
        for node in integer.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output") and not (node.op == "call_function" and node.target in PRIMITIVES)
    ]


def _random_input(integer: fx.GraphModule, node: fx.Node, generator: torch.Generator) -> Tensor:
    """Real numbers over the range of the quantize that reads them; any others are normal, and integers are 0 or 1."""
    known: TensorFact = fact(node)
    size = known.at(BATCH_SIZES[0])
    if not known.dtype.is_floating_point:
        return torch.randint(0, 2, size, generator=generator, device="cpu").to(known.dtype)
    reader = next((user for user in node.users if user.target is quantize), None)
    step = 1.0
    if reader is not None:
        low, high = (int(limit) for limit in reader.args[2:4])  # type: ignore[arg-type]
        step = float(resolve(integer, str(reader.args[1].target))) * max(high, -low - 1) / 2  # type: ignore[union-attr]
    return (torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") * step).to(known.dtype)
