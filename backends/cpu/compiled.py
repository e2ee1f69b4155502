"""The kernel implementations of native.c."""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxquant.backends.cpu import native
from fxquant.backends.cpu.native import FIXED, REAL, SUM, Epilogue, Move, Sum
from fxquant.ir.graph import fact
from fxquant.ir.integer import qparams
from fxquant.kernels import constants
from fxquant.kernels.admission import WINDOW, Layer, enumerated
from fxquant.kernels.constants import Span
from fxquant.kernels.kernel import ALIGNMENT, BIASED, SLACK, Binding, Bound, Built, ChannelsLast, NotApplicable, Site, grid, implementation
from fxquant.numerics.grids import INT32_MAX, LARGEST_DYNAMIC, SMALLEST_DYNAMIC
from fxquant.primitives import Role, role_of, shape
from fxquant.primitives.quantization import HALF_STEPS, TIES, half_step, requantize_real
from fxquant.support.files import address, point, readable

LANES = 16  # output channels that are summed side by side
VECTOR = 32  # channels whose constants are read at once, also after the last one, at most


def loaded_library(has: str = "") -> Any:
    """Return the functions of native.c. Raises NotApplicable if there are none, or none that need these instructions of the processor."""
    loaded = native.library()
    if isinstance(loaded, str):
        raise NotApplicable(loaded)
    NotApplicable.unless(not has or getattr(loaded, f"fxq_has_{has}")(), "the processor has no instructions for sums of products of bytes")
    return loaded


@dataclass(frozen=True)
class Call:
    """A function of native.c with its structure filled in except for the tensors; `keeps` holds the tensors that it points to.

    The number of images is `batch` for each row of the first operand, over `rows`.
    """

    function: Callable[[Any], None]
    structure: Sum | Move
    names: tuple[str, ...]  # of the operands, in order
    keeps: tuple[Tensor, ...] = ()
    rows: int = 1
    batch: int = 1

    def bind(self) -> Bound:
        own = type(self.structure).from_buffer_copy(self.structure)
        place = ctypes.addressof(own)

        def bound(inputs: Sequence[Tensor], output: Tensor, _keeps: Any = (own, self.keeps)) -> None:
            operands = point(own, zip(self.names, inputs, strict=True))
            own.output = address(output)
            own.batch = inputs[0].shape[0] * self.batch // self.rows
            own.threads = torch.get_num_threads()
            self.function(place)
            del operands

        return bound


def _per_channel(tensor: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    NotApplicable.unless(tensor.numel() in (1, channels), "its requantization is not one for each channel")
    return tensor.to(dtype).flatten().expand(channels).contiguous()


@dataclass(frozen=True)
class Requantization:
    """An `Epilogue`, and the tensors that it points to; `limit` bounds every accumulator."""

    epilogue: Epilogue
    keeps: tuple[Tensor, ...]

    @staticmethod
    def of(site: Site, layer: Layer) -> "Requantization":
        """Return the requantization of a layer. Raises NotApplicable if its values do not fit in 32 bits."""
        root, epilogue = site.match.root, Epilogue()
        channels, largest = layer.weight.shape[0], layer.largest
        NotApplicable.unless(largest <= INT32_MAX, "its sums have more than 32 bits")
        constants: dict[str, Tensor] = {}
        zero_point = 0
        if role_of(root.target) is not Role.REQUANTIZATION:
            epilogue.mode = SUM
        elif root.target is requantize_real:
            _, factor, epilogue.low, epilogue.high, _, *rest = root.args
            zero_point = rest[0] if rest else 0  # type: ignore[assignment]
            epilogue.mode = REAL
            constants["factor"] = _per_channel(site.constant(factor), channels, torch.float32)
        else:
            _, shift, multiplier, right_shift, bits, rounding, epilogue.low, epilogue.high, _ = root.args
            shift, multiplier, right_shift = (
                _per_channel(site.constant(node), channels, torch.int64) for node in (shift, multiplier, right_shift)
            )
            NotApplicable.unless(rounding not in TIES, "its ties are not rounded by an added constant")
            epilogue.mode, epilogue.limit = FIXED, 2 ** (bits - 1)  # type: ignore[operator]
            before = torch.zeros_like(shift)
            if rounding in HALF_STEPS:
                before = half_step(shift, multiplier, right_shift, str(rounding)).to(torch.int64)
            half = (1 << (right_shift - 1)) if rounding == "half_up" else torch.zeros_like(shift)
            if int(before.max()) + largest > INT32_MAX or int(shift.max()) > 31 or int(right_shift.max()) > 31:
                raise NotApplicable("its requantization needs more than 32 bits")
            if epilogue.limit > 2**15 or int(multiplier.max()) >= 2**15 or int((epilogue.limit * multiplier + half).max()) > INT32_MAX:
                raise NotApplicable("its requantization needs more than a product of 16 bits")
            values = {"shift": shift, "multiplier": multiplier, "right_shift": right_shift, "half": half, "before": before}
            constants.update({name: value.to(torch.int32) for name, value in values.items()})
        if epilogue.mode != SUM:  # a sum may have no grid: a clamp that follows it has
            described = qparams(root)
            if described is None or described.zero_point != zero_point:
                raise NotApplicable("its zero point is not that of its grid")
            epilogue.zero = site.result().zero
        if "factor" in site.match.parts and site.match.parts["factor"] is not None:
            constants["residual_factor"] = _per_channel(site.tensor("factor"), channels, torch.int32)
            shift = site.constant(site.match.parts["factor_shift"])
            shifts = torch.zeros((), dtype=torch.int32, device="cpu") if shift is None else shift
            constants["residual_shift"] = _per_channel(shifts, channels, torch.int32)
            epilogue.residual_zero = site.held(site.match.reads[1]).zero
        padded = {name: _padded(tensor, site.result().pixel + VECTOR) for name, tensor in constants.items()}
        return Requantization(epilogue, tuple(point(epilogue, padded.items())))


def _padded(tensor: Tensor, size: int) -> Tensor:
    return F.pad(tensor, (0, size - tensor.shape[-1])).contiguous()


@dataclass(frozen=True)
class Summed(Call):
    """A call that requantizes sums."""

    finish: Callable[[Any], None] | None = None

    def requantized(self, sums: Tensor) -> Tensor:
        """Return rows of accumulators requantized to bytes."""
        rows, channels = sums.shape
        output = torch.empty(rows, channels, dtype=torch.uint8, device="cpu")
        structure = Sum(input=address(sums), output=address(output), batch=rows, threads=1)
        structure.out_channels = structure.out_pixel = channels
        assert isinstance(self.structure, Sum)
        structure.epilogue = self.structure.epilogue
        assert self.finish is not None
        self.finish(ctypes.addressof(structure))
        return output


TILE_QUADS = 16  # quads of input bytes that a tile of AMX multiplies


def packed(weight: Tensor, groups: int, pixel: int, run: int = 0) -> Tensor:
    """Pack as (group, block, tap, quad of input channels, 16 output channels, 4), with zeros for missing channels.

    Tiles read up to 15 quads beyond the last one, and multiply them by 0. `run` is the number of bytes that a tile's row reads side by
    side: zeros follow the weights of each run, up to a multiple of 64 bytes. 0: there are no runs, and zeros follow the last weight only.
    """
    outer, inner, *area = weight.shape
    count = outer // groups
    blocks, quads = -(-count // LANES), pixel // groups // ALIGNMENT
    full = torch.zeros(groups, blocks * LANES, quads * ALIGNMENT, math.prod(area), dtype=torch.int8, device="cpu")
    full[:, :count, :inner] = weight.reshape(groups, count, inner, -1)
    ordered = full.view(groups, blocks, LANES, quads, ALIGNMENT, -1).permute(0, 1, 5, 3, 2, 4)
    if run:
        runs = ordered.reshape(groups * blocks, -1, run // ALIGNMENT, LANES * ALIGNMENT)
        return F.pad(runs, (0, 0, 0, -runs.shape[2] % TILE_QUADS)).contiguous()
    return F.pad(ordered.flatten(), (0, (TILE_QUADS - 1) * LANES * ALIGNMENT))


def _summed(site: Site, layer: Layer, function: Callable[[Any], None], pack: Callable[[Tensor, int], Tensor], groups: int = 0) -> Built:
    """Return the call that sums with a packed weight, once its requantization is proved, or several for a transposed convolution.

    Of one group, the taps of a row may be one sum. Channels that are only padding have no bias.
    """
    own, input, result = Requantization.of(site, layer), site.held(site.match.reads[0]), site.result()
    outside = torch.full((input.pixel + SLACK,), input.zero, dtype=torch.uint8, device="cpu")
    area, calls = result.grid[1:-1], list[Summed]()
    for part, outputs in layer.convolutions(area):
        bias = _padded(part.bias(input.zero), result.pixel + VECTOR)
        sums = Sum(outside=address(outside), bias=address(bias), epilogue=own.epilogue, threads=1, groups=groups)
        sums.batch, sums.channels, sums.out_channels, sums.out_pixel = input.grid[0], input.pixel, result.channels, result.pixel
        window = (part.window[key] for key in WINDOW)
        _set_window(sums, input.grid[1:-1], outputs[0], part.weight.shape[2:], *window)
        _set_each(sums, ("whole", "first", "step"), (area, *outputs[1:]))
        sums.fused = groups == 1 and sums.kernel_width > 1 and sums.dilation_width == 1
        sums.small = input.zero == 0 and fact(site.match.reads[0]).dtype == torch.int8
        sums.in_place = groups and loaded_library().fxq_reads_in_place(ctypes.addressof(sums))
        weight = pack(part.weight, sums.in_place * sums.channels * (sums.kernel_width if sums.fused else 1))
        sums.weight = address(weight)
        weight = _arranged(sums, weight)
        names, keeps = ("input", "residual")[: len(site.match.reads)], (weight, outside, bias, *own.keeps)
        calls.append(Summed(function, sums, names, keeps, _area(input), finish=loaded_library().fxq_finish))
    layer.prove_requantization(site, calls[0].requantized)

    def bind() -> Bound:
        every = [call.bind() for call in calls]

        def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
            for each in every:
                each(inputs, output)

        return bound

    return calls[0] if len(calls) == 1 else Binding(bind)


def _arranged(sums: Sum, weight: Tensor) -> Tensor:
    """Return a packed weight as C arranges it by what its sums prove, or itself where C takes it as it is; `sums` gets its address."""
    loaded, place = loaded_library(), ctypes.addressof(sums)
    memory = torch.empty(loaded.fxq_bytes_arranged(place), dtype=torch.uint8, device="cpu")
    if not len(memory):
        return weight
    sums.output = address(memory)
    loaded.fxq_arrange(place)
    arranged = memory[: loaded.fxq_bytes_arranged(place)].clone()
    sums.weight = address(arranged)
    return arranged


def _set_window(structure: Sum | Move, area: Sequence[int], *window: Sequence[int]) -> None:
    """Set the size of the operand, and that of the result, the kernel, the stride, the padding and the dilation, of three numbers each."""
    structure.depth, structure.height, structure.width = area
    _set_each(structure, ("out", "kernel", "stride", "padding", "dilation"), window)


def _set_each(structure: Sum | Move, names: Sequence[str], values: Sequence[Sequence[int]]) -> None:
    for name, value in zip(names, values, strict=True):
        for side, number in zip(native.AREA, value, strict=True):
            setattr(structure, f"{name}_{side}", number)


@implementation("native convolution")
def convolution(site: Site) -> Built:
    """Build the kernel of a convolution of int8 or uint8, grouped or not, which requantizes its int32 sums in registers."""
    loaded, layer = loaded_library("sums_of_products"), Layer.of(site)
    groups, input = layer.window["groups"], site.held(site.match.reads[0])
    fits = [size for size in range(1, groups) if groups % size == 0 and layer.weight.shape[1] * size % ALIGNMENT == 0]
    merged = fits[0] if fits and input.pixel == input.channels else groups  # groups become one, with zeros for each other's channels

    def pack(weight: Tensor, run: int) -> Tensor:
        blocks = weight.reshape(-1, merged, weight.shape[0] // groups, 1, *weight.shape[1:])
        apart = torch.eye(merged, dtype=torch.int8, device="cpu").view(1, merged, 1, merged, *[1] * (weight.dim() - 1))
        return packed((blocks * apart).flatten(3, 4).flatten(0, 2), groups // merged, input.pixel, run)

    return _summed(site, layer, loaded.fxq_convolution, pack, groups // merged)


@implementation("native depthwise convolution")
def depthwise(site: Site) -> Built:
    """Build a convolution with one filter for each channel."""
    loaded, layer = loaded_library(), Layer.of(site)
    outer, inner, *_ = layer.weight.shape
    input = site.held(site.match.reads[0])
    is_linear = role_of(site.match.parts["sum"].target) is Role.LINEAR
    if is_linear or inner != 1 or not layer.window["groups"] == outer == input.channels:
        raise NotApplicable("it is not a depthwise convolution")

    def pack(weight: Tensor, _: int) -> Tensor:
        return _padded(weight.flatten(1).t().to(torch.int32) & 0xFFFF, input.pixel)

    return _summed(site, layer, loaded.fxq_depthwise, pack)


def _area(form: ChannelsLast) -> int:
    return math.prod(form.grid[1:-1])


def _move(input: ChannelsLast, result: ChannelsLast, **values: int) -> Move:
    sizes = dict(zip(("batch", *native.AREA, "channels"), input.grid, strict=True))
    return Move(**sizes, out_channels=result.pixel, threads=1, **values)


@implementation("native quantization", reads_held=False)
def quantize(site: Site) -> Built:
    """Build the quantization of a float tensor to bytes, channels last."""
    loaded, root, result = loaded_library(), site.match.root, site.result()
    structure = _move(result, result, low=root.args[2], high=root.args[3], zero=result.zero)  # type: ignore[arg-type]
    structure.scale = float(site.constant(root.args[1]))
    call = Call(loaded.fxq_quantize, structure, ("input",), batch=result.grid[0] // result.sizes[0])

    def bind() -> Bound:
        bound = call.bind()
        return lambda inputs, output: bound([inputs[0].contiguous()], output)

    return Binding(bind)


@implementation("native maximum")
def max_pool(site: Site) -> Built:
    """Build the largest byte of each window."""
    loaded, parts = loaded_library(), site.match.parts
    input, result = site.held(site.match.reads[0]), site.result()
    NotApplicable.unless(input.zero == result.zero, "its result and its operand have different memory layouts")
    structure = _move(input, result)
    structure.channels = input.pixel
    _set_window(structure, input.grid[1:-1], result.grid[1:-1], *(parts[key] for key in ("kernel", "stride", "begin", "dilation")))
    return Call(loaded.fxq_max_pool, structure, ("input",), rows=_area(input))


@implementation("native table")
def pointwise(site: Site) -> Built:
    """Build one byte from one or two bytes, by tables of all cases that the primitives compute, and so exact for every operand."""
    loaded, result = loaded_library(), site.result()
    forms = [site.held(read) for read in site.match.reads]
    table = enumerated(site, forms, result)
    structure = _move(forms[0], result)
    if len(forms) == 2 and forms[1].sizes != result.sizes:
        table = table.view(256, 256).t().flatten()  # what a channel needs for one byte of the second operand lies side by side
    structure.table = address(table)
    if len(forms) == 1:
        structure.channels = forms[0].pixel
        structure.out_height = int(site.match.parts["channels"])
        return Call(loaded.fxq_lookup, structure, ("input",), (table,))
    first, second = forms
    structure.channels = first.pixel
    structure.out_height = int(second.sizes != first.sizes)
    one = second.sizes == (*first.sizes[:2], *[1] * (len(first.sizes) - 2)) and first.channels_first
    NotApplicable.unless(result.sizes == first.sizes and (not structure.out_height or one), "its operands have different sizes")
    return Call(loaded.fxq_pairs, structure, ("input", "other"), (table,), rows=_area(first))


@implementation("moved bytes")
def move(site: Site) -> Built:
    """Build what moves bytes from held memory to held memory: a concatenation, crop, padding, permutation, or choice of rows."""
    root, result = site.match.root, site.result()
    if any((site.held(read).zero ^ result.zero) not in (0, BIASED) for read in site.match.reads):
        raise NotApplicable("its operands and its result have different memory layouts")
    byte: Any = root.args[3] + result.zero - grid(root).zero_point if root.target is shape.pad else None  # type: ignore[operator]

    def bind() -> Bound:
        last: list[Any] = [None, None, ()]  # an instance has the same memory in every call

        def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
            if last[0] is not inputs[0] or last[1] is not output:
                last[:] = inputs[0], output, list(_moves(site, inputs, output))
            if byte is not None:
                output.fill_(byte)
            for value, written, differs, rows in last[2]:
                value = value if rows is None else value.index_select(*rows)
                written.copy_(value ^ BIASED if differs else value)

        return bound

    return Binding(bind)


def _moves(site: Site, inputs: Sequence[Tensor], output: Tensor) -> Iterator[tuple[Tensor, Tensor, bool, tuple[int, Tensor] | None]]:
    """Yield for each operand its moved view, the view of the result that it fills, whether int8 meets uint8, and a select's indices.

    The last is the dimension and the indices of the elements that a choice takes from the operand; None for other movements.
    """
    result, root = site.result(), site.match.root
    arguments: Any = root.args[1:]
    begins = list(arguments[0]) if root.target is shape.pad else [0] * len(result.sizes)
    for form, tensor in zip(map(site.held, site.match.reads), inputs, strict=True):
        value, written = form.of(tensor).unpack(tensor), result.of(output).unpack(output)
        if root.target is shape.select:
            rows = arguments[0] % value.dim(), site.constant(arguments[1])
            order = range(1, value.dim()) if result.channels_first else ()  # a pixel's channels, which lie side by side, come last
            value, written = (each.permute(0, *order[1:], *order[:1]) if order else each for each in (value, written))
            yield value, written, form.zero != result.zero, ([0, value.dim() - 1, *order][rows[0]] if order else rows[0], rows[1])
            return
        keeps = root.target is shape.pad or root.target is shape.concatenate
        value = value if keeps else root.target(value, *arguments)  # type: ignore[operator]
        for dim, (begin, size) in enumerate(zip(begins, value.shape, strict=True)):
            written = written.narrow(dim, begin, size)
        if root.target is shape.concatenate:
            begins[arguments[0]] += value.shape[arguments[0]]
        yield value, written, form.zero != result.zero, None


@implementation("native product", strided=True)
def product(site: Site) -> Built:
    """Build the product of two activations of bytes over their last two dimensions, an int32 accumulator."""
    loaded = loaded_library("sums_of_products")
    zeros = [site.held(read).zero for read in site.match.reads]  # of bytes, also where they are those of a uint8 tensor

    def bind() -> Bound:
        own = native.Product()
        place = ctypes.addressof(own)

        def bound(inputs: Sequence[Tensor], output: Tensor) -> None:
            batch = output.shape[:-2]
            sizes = (ctypes.c_int64 * 3)(*(1,) * (3 - len(batch)), *batch)
            every = [tensor.expand(*batch, *tensor.shape[-2:]).stride() for tensor in inputs]
            strides = (ctypes.c_int64 * 10)(*(stride for each in every for stride in (*(0,) * (5 - len(each)), *each)))
            own.sizes, own.strides = ctypes.addressof(sizes), ctypes.addressof(strides)
            own.rows, own.depth, own.columns = *inputs[0].shape[-2:], inputs[1].shape[-1]
            is_byte = [tensor.dtype == torch.uint8 for tensor in inputs]  # the first operand is to be bytes, the second int8
            own.input_flip, own.input_zero = (0, zeros[0]) if is_byte[0] else (BIASED, BIASED)
            own.other_flip, own.other_zero = (BIASED, zeros[1] - BIASED) if is_byte[1] else (0, 0)
            operands = point(own, zip(("input", "other"), inputs, strict=True))
            own.output, own.threads = address(output), torch.get_num_threads()
            loaded.fxq_product(place)
            del operands

        return bound

    return Binding(bind)


@implementation("native dynamic layer", reads_held=False)
def native_dynamic(site: Site) -> Built:
    """Bind a dynamically quantized linear layer to C, which at each call chooses a grid, quantizes, sums and dequantizes."""
    loaded = loaded_library("dot_products")
    weight, scale, bias = site.tensor("weight"), site.tensor("scale"), site.constant(site.match.parts["bias"])
    outputs, inputs = weight.shape
    pixel = -(-inputs // ALIGNMENT) * ALIGNMENT
    summed = packed(weight[..., None], 1, pixel)
    tensors = {
        "totals": weight.to(torch.int32).sum(1, dtype=torch.int32),
        "scale": scale.expand(outputs).contiguous(),
        **({} if bias is None else {"bias": bias.contiguous()}),
    }
    structure = native.Dynamic(inputs=inputs, smallest=SMALLEST_DYNAMIC, largest=LARGEST_DYNAMIC)
    structure.sum.channels, structure.sum.out_channels, structure.sum.out_pixel = pixel, outputs, outputs
    structure.sum.weight = address(summed)
    keeps = summed, *point(structure, tensors.items())

    def bind() -> Bound:
        own = native.Dynamic.from_buffer_copy(structure)
        place, sums = ctypes.addressof(own), own.sum

        def bound(operands: Sequence[Tensor], output: Tensor, _keeps: Any = (own, keeps)) -> None:
            operand = readable(operands[0].contiguous())
            own.input, own.output = address(operand), address(output)
            sums.batch = operand.numel() // inputs
            sums.threads = torch.get_num_threads()
            loaded.fxq_dynamic(place)

        return bound

    return Binding(bind)


class NativeWatch:
    """`Checksums` in C. It keeps the tensors of its spans, and so their memory, alive."""

    def __init__(self, always: Sequence[Span], by_turns: Sequence[Span]) -> None:
        self.spans = (*always, *by_turns)
        count = len(self.spans)
        self.starts = (ctypes.c_void_p * count)(*(address(tensor) + first for tensor, first, _ in self.spans))
        self.sizes = (ctypes.c_int64 * count)(*(size for _, _, size in self.spans))
        self.known = (ctypes.c_uint64 * count)()
        self.structure = native.Watch(always=len(always), count=count, next=len(always))
        for name in ("starts", "sizes", "known"):
            setattr(self.structure, name, ctypes.addressof(getattr(self, name)))
        self.function, self.place = native.library().fxq_watch, ctypes.addressof(self.structure)
        self._run(remember=1, everything=0)

    def changed(self, everything: bool) -> bool:
        return self._run(remember=0, everything=int(everything))

    def _run(self, remember: int, everything: int) -> bool:
        self.structure.remember, self.structure.everything = remember, everything
        self.function(self.place)
        return bool(self.structure.changed)


constants.WATCHES.add(lambda *spans: None if isinstance(native.library(), str) else NativeWatch(*spans))
