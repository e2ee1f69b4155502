"""The kernels of training.c and `joining.c` for float32 tensors in CPU memory: passes of training, and counts of observers."""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxquant.backends.cpu import native
from fxquant.backends.cpu.native import FIXED, REAL, Count, Pass, fields
from fxquant.numerics import grids
from fxquant.numerics.grids import FixedWidths, Grid, Lines
from fxquant.quantization.observers import ranges
from fxquant.support import disagreed
from fxquant.support.files import address, point, readable
from fxquant.training import fused_elementwise, fused_layers
from fxquant.training.fused_elementwise import Join
from fxquant.training.fused_layers import Accumulator, Form, Gradients, Passes, Rounded


def run(library: Any, function: str, structure: Any, tensors: Iterable[tuple[str, Tensor | None]]) -> Any:
    """Write the addresses of tensors into the fields of a structure, call a function in C with the structure, and return it."""
    structure.threads = torch.get_num_threads()
    arguments = point(structure, tensors)
    getattr(library, f"fxq_{function}")(ctypes.addressof(structure))
    del arguments
    return structure


class NativePasses(Passes):
    """`Passes` in C with bit-equal results, except gradients, whose sums are accumulated in another order."""

    def takes(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return whether there is a library, and the tensors are large enough to be worth a call."""
        present = [t for t in tensors if t is not None]
        fits = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in present)
        return fits and present[0].numel() >= SMALLEST and not isinstance(native.training_library(), str)

    def collect(self, sums: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        totals, ends = _vector(2 * form.channels, torch.float64), _vector(2 * form.channels)
        _call("collect", form, sums=sums, totals=totals, ends=ends)
        mean, variance = totals.view(2, -1).unbind()
        return mean, variance, ends.view(2, -1)

    def ends(self, accumulator: Accumulator) -> Tensor:
        form = accumulator.form
        ends = _vector(2 * form.channels)
        _call("ends", form, sums=accumulator.sums, **_added(accumulator), ends=ends)
        return ends.view(2, -1)

    def finish(self, accumulator: Accumulator, how: Rounded, ratio: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, int]:
        sums, form = accumulator.sums, accumulator.form
        integers, real = torch.empty_like(sums), torch.empty_like(sums)
        own = constants(how, lambda value, dtype: _each(value, form, dtype))
        marks = {} if ratio is None else {"inside": torch.empty_like(sums, dtype=torch.uint8), "ratio": _each(ratio, form)}
        operands = {"sums": sums, **_added(accumulator), **own, **marks}
        structure = _call("finish_forward", form, numbers(how), **operands, integers=integers, real=real)
        return integers, real, marks.get("inside"), structure.outside

    def mark_back(
        self, form: Form, inside: Tensor | None, factor: Tensor | None, ratio: Tensor, scale: Tensor, gradients: Gradients, like: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        of_sums = torch.empty_strided(like.shape, like.stride(), dtype=torch.float32, device="cpu")
        totals = _vector(form.channels, torch.float64)
        of_residual = None if factor is None else torch.empty_like(of_sums)
        operands = {"inside": inside, "factor": None if factor is None else _each(factor, form), "ratio": _each(ratio, form)}
        results = {"of_sums": of_sums, "of_residual": of_residual, "totals": totals}
        _call("marked_backward", form, {"scale": float(scale)}, **operands, **_gradients(gradients, scale, of_sums), **results)
        return of_sums, of_residual, totals.float()

    def finish_back(
        self, accumulator: Accumulator, ratio: Tensor, how: Rounded, gradients: Gradients
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
        sums, form, _, residual, _ = accumulator
        of_sums = torch.empty_like(sums)
        of_residual = None if residual is None else torch.empty_like(sums)
        totals = _vector(3 * form.channels, torch.float64)
        operands = {"sums": sums, **_added(accumulator), "ratio": _each(ratio, form), **_gradients(gradients, how.scale, sums)}
        _call("finish_backward", form, numbers(how), **operands, of_sums=of_sums, of_residual=of_residual, totals=totals)
        of_bias, of_ratio, of_factor = totals.float().view(3, -1).unbind()
        return of_sums, of_residual, of_bias, of_ratio, None if residual is None else of_factor

    def centre(self, gradient: Tensor, sums: Tensor, form: Form, mean: Tensor, offset: Tensor, slope: Tensor, own: bool) -> Tensor:
        result = gradient if own else gradient.clone() if gradient.stride() == sums.stride() else _like(gradient, sums).clone()
        _call("centre", form, sums=sums, bias=-mean, offset=offset, slope=slope, of_sums=result)
        return result

    def quantize(self, value: Tensor, grid: Grid, bounds: tuple[float, float] | None) -> tuple[Tensor, tuple[Tensor | None, int]]:
        if not value.is_contiguous():
            return super().quantize(value, grid, bounds)
        integers = torch.empty_like(value)
        inside = None if bounds is None else torch.empty_like(value, dtype=torch.uint8)
        bottom, top = bounds or (0.0, 0.0)
        limits = {"low": grid.low, "high": grid.high, "bottom": bottom, "top": top, "scale": float(grid.scale)}
        structure = _call("quantize", Form(value.numel(), 1, 1, ()), limits, sums=value, integers=integers, inside=inside)
        return integers, (inside, structure.outside)

    def quantize_back(self, gradient: Tensor, inside: Tensor | None, scale: Tensor) -> Tensor:
        gradient, form = gradient.contiguous(), Form(gradient.numel(), 1, 1, ())
        result = torch.empty_like(gradient)
        _call("quantize_backward", form, {"scale": float(scale)}, of_integers=gradient, inside=inside, of_sums=result)
        return result

    def weight_ends(self, weight: Tensor) -> Tensor:
        ends = _vector(len(weight))
        _call("weight_ends", _rows(weight), sums=weight.contiguous(), ends=ends)
        return ends

    def weight_pairs(self, weight: Tensor, gain: Tensor | None) -> Tensor:
        form, ends = _rows(weight)._replace(outer=weight[0, 0].numel()), _vector(len(weight))
        _call("weight_pairs", form, sums=weight.contiguous(), ratio=_gain(gain, form), ends=ends)
        return ends

    def weigh(self, weight: Tensor, gain: Tensor | None, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        form, weight = _rows(weight), weight.contiguous()
        integers, totals = torch.empty_like(weight), _vector(len(weight), torch.float64)
        factors = {"ratio": _gain(gain, form), "multiplier": _each(scale, form)}
        _call("weight_forward", form, {"low": low, "high": high}, sums=weight, **factors, integers=integers, totals=totals)
        return integers, totals

    def weigh_back(self, weight: Tensor, gain: Tensor | None, scale: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        form, weight = _rows(weight), weight.contiguous()
        of_weight, totals = torch.empty_like(weight), _vector(len(weight), torch.float64)
        factors = {"ratio": _gain(gain, form), "multiplier": _each(scale, form)}
        _call("weight_backward", form, sums=weight, **factors, of_integers=_like(gradient, weight), of_sums=of_weight, totals=totals)
        return of_weight, None if gain is None else totals.float()


SMALLEST = 2**12  # elements of a tensor
fused_layers.OFFERS.add(NativePasses())


def _call(function: str, form: Form, numbers: dict[str, float] | None = None, /, **tensors: Tensor | None) -> Pass:
    """Call a function of training.c, and return its arguments; all tensors are contiguous or have equal strides."""
    structure = Pass(outer=form.outer, channels=form.channels, inner=form.inner, **(numbers or {}))
    run(native.training_library(), function, structure, tensors.items())
    return structure


def numbers(how: Rounded) -> dict[str, float]:
    """Return the constants of a requantization that are the same for all channels, as fields of a structure in C."""
    (bottom, top), (least, most) = how.bounds, how.clamp
    limits = {"low": how.low, "high": how.high, "bottom": bottom, "top": top, "least": least, "most": most}
    return {**limits, "mode": FIXED if how.fixed else REAL, "limit": how.limit, "add": how.add, "scale": float(how.scale)}


def constants(how: Rounded, each: Callable[[Tensor, torch.dtype], Tensor]) -> dict[str, Tensor]:
    """Return the constants of a requantization that may differ between channels, by name, as `each` arranges a tensor in a dtype."""
    names = ("half", "first", "product") if how.fixed else ("multiplier",)
    dtype = torch.float64 if how.fixed else torch.float32
    return {name: each(value, dtype) for name, value in zip(names, how.factors, strict=True)}


def _added(accumulator: Accumulator) -> dict[str, Any]:
    """Return the bias and the residual that are added to sums, as arguments of a kernel."""
    sums, form, bias, residual, factor = accumulator
    added = {"bias": torch.zeros(form.channels, dtype=torch.float32, device="cpu") if bias is None else _each(bias, form)}
    if residual is not None and factor is not None:
        added |= {"residual": _like(residual, sums), "factor": _each(factor, form)}
    return added


def _gradients(gradients: Gradients, scale: Tensor, like: Tensor) -> dict[str, Tensor]:
    """Return the gradients as arguments of a kernel, which always reads that of the integers; with the strides of another tensor."""
    of_integers, of_real = gradients
    if of_integers is None or of_real is None:
        return {"of_integers": _like(gradients.of_steps(scale), like)}
    return {"of_integers": _like(of_integers, like), "of_real": _like(of_real, like)}


def _vector(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _each(value: Tensor, form: Form, dtype: torch.dtype = torch.float32) -> Tensor:
    if value.dtype == dtype and value.shape == (form.channels,) and value.is_contiguous():
        return value
    return value.detach().to(dtype).flatten().expand(form.channels).contiguous()


def _like(value: Tensor, other: Tensor) -> Tensor:
    return value if value.stride() == other.stride() else torch.empty_like(other).copy_(value)


def _rows(weight: Tensor) -> Form:
    return Form(1, len(weight), weight.numel() // len(weight), (len(weight),))


def _gain(gain: Tensor | None, form: Form) -> Tensor:
    return torch.ones(form.channels, dtype=torch.float32, device="cpu") if gain is None else _each(gain, form)


SMALLEST_COUNTED = 2**10  # elements of a tensor


class NativeCounting:
    """The counts of observers in C, with equal results."""

    def takes(self, value: Tensor) -> bool:
        """Return whether there is a library, and the tensor is large, contiguous and in CPU memory."""
        fits = value.device.type == "cpu" and value.dtype == torch.float32 and value.is_contiguous()
        return fits and value.numel() >= SMALLEST_COUNTED and type(value) in PLAIN and _admitted()

    def ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.empty(2, len(rows), dtype=torch.float32, device="cpu").unbind()
        structure = Count(rows=len(rows), columns=rows.shape[1])
        run(native.training_library(), "row_ends", structure, (("value", rows), ("low", low), ("high", high)))
        return low, high

    def magnitudes(self, value: Tensor, places: Tensor | None, bins: int, reach: float) -> tuple[Tensor, Tensor]:
        counts, negative = torch.empty(2, bins, dtype=torch.float32, device="cpu").unbind()
        structure = Count(bins=bins, last=reach, count=value.numel() if places is None else len(places))
        tensors = ("value", value), ("counts", counts), ("negative", negative), ("places", places)
        run(native.training_library(), "magnitudes", structure, tensors)
        return counts, negative

    def signed(self, rows: Tensor, chosen: Sequence[int], apart: int, bins: int, top: float) -> Tensor:
        counts = torch.zeros(bins + 1, dtype=torch.float32, device="cpu")  # the last counts the values outside
        structure = Count(bins=bins, columns=rows.shape[1], step=apart, first=-top, last=top)
        structure.counts, rows = address(counts), readable(rows)
        for row in chosen:
            structure.value = address(rows) + row * rows.shape[1] * rows.element_size()
            native.training_library().fxq_signed(ctypes.addressof(structure))
        return counts[:bins]


@functools.cache
def _admitted() -> bool:
    """Return whether there is a library that counts as this PyTorch's torch.histc does: values in all bins, and at their ends."""
    if isinstance(native.training_library(), str):
        return False
    bins, reach = 512, 0.7
    edges = torch.linspace(-reach, reach, bins + 1, dtype=torch.float32, device="cpu")
    between = (torch.arange(2**13, dtype=torch.float32, device="cpu") / 2**12 - 1) * reach
    value = torch.cat((edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1), between)).clamp_(-reach, reach)
    counted = NativeCounting().signed(value.unsqueeze(0), range(1), 1, bins, reach)
    counts, negative = NativeCounting().magnitudes(value, None, bins, reach)
    expected = [torch.histc(each, bins, 0.0, reach) for each in (value.abs(), -value[value < 0])]
    signed = torch.histc(value, bins, -reach, reach)
    pairs = ((counted, signed), (counts, expected[0]), (negative, expected[1]))
    apart = [int((one != other).sum()) for one, other in pairs]
    if any(apart):
        because = f"it differs from torch.histc in {sum(apart)} bins on this machine"
        disagreed(None, "the counting of observers in C", ["histograms"], because, "torch.histc counts")
    return not any(apart)


PLAIN = (Tensor, torch.nn.Parameter)
ranges.OFFERS.add(NativeCounting())


# ---- The kernels of `fxquant.training.fused_elementwise` -------------------------------------------------------------
PRODUCT, DOWN, NEAREST = 0, 1, 2
NONE = torch.zeros(1, dtype=torch.float32, device="cpu")  # an operand of one number, which is multiplied by 0


class _Join(ctypes.Structure):
    """The arguments of one fused kernel: the structure of `joining.c`."""

    _fields_ = [
        *fields(ctypes.c_void_p, "a b c multiplier half first product ratio of_integers of_real"),
        *fields(ctypes.c_void_p, "integers real of_a of_b inside totals ends mask"),
        *fields(ctypes.c_int64, "rows columns b_rows b_stride b_step c_rows c_stride c_step kind mode wide each outside threads"),
        *fields(ctypes.c_double, "factor_a factor_b sign_a sign_b limit add"),
        *fields(ctypes.c_float, "low high bottom top least most scale"),
    ]


class NativeJoining:
    """The kernels of fused elementwise operators and lookup tables in C."""

    def takes(self, value: Tensor) -> bool:
        """Return whether there is a library, and the tensor is float32 in CPU memory."""
        return value.device.type == "cpu" and value.dtype == torch.float32 and not isinstance(native.joining_library(), str)

    def ends(self, join: Join) -> Tensor:
        """Return the least and the largest accumulator: float64, of shape (2, columns) where constants are per column, else (2, 1)."""
        width = join.columns if join.each else 1
        ends = torch.empty(2 * width, dtype=torch.float64, device="cpu")
        _join_call("join_ends", _structure(join), _operands(join) | {"ends": ends})
        return ends.view(2, -1)

    def forward(self, join: Join, how: Rounded, ratio: Tensor, marks: bool) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return the integers, the dequantized tensor, never -0.0, a mask if `marks`, and the number of elements without gradient."""
        shape = join.a.shape
        integers, real = (torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(2))
        inside = torch.empty(shape, dtype=torch.uint8, device="cpu") if marks else None
        structure = _structure(join)
        for name, number in numbers(how).items():
            setattr(structure, name, number)
        written = {"ratio": _each_row(join, ratio, torch.float64), "integers": integers, "real": real, "inside": inside}
        _join_call("join_forward", structure, _operands(join) | constants(how, partial(_each_row, join)) | written)
        return integers, real, inside, structure.outside

    def backward(
        self, join: Join, scale: Tensor, ratio: Tensor, inside: Tensor | None, of_integers: Tensor | None, of_real: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of a, of b and of c, float32.

        That of b has the shape of a, or one element for each row; where `each`, b and c have one element for each column. Where not
        `each`, the gradient of c is None.
        """
        gradient = of_integers if of_integers is not None else of_real
        assert gradient is not None
        of_a = torch.empty(gradient.shape, dtype=torch.float32, device="cpu")
        structure = _structure(join)
        structure.factor_a, structure.factor_b = join.slopes
        structure.scale = float(scale)
        totals = torch.empty(2 * join.columns, dtype=torch.float64, device="cpu") if join.each else None
        of_b = None if join.each else torch.empty(gradient.numel() if join.of_b.step else join.rows, dtype=torch.float32, device="cpu")
        gradients = {"of_integers": of_integers, "of_real": of_real, "mask": inside, "ratio": _each_row(join, ratio, torch.float64)}
        operands = {"a": join.a, "b": join.b} if join.product else {"b": gradient}
        _join_call("join_backward", structure, operands | gradients | {"of_a": of_a, "of_b": of_b, "totals": totals})
        if totals is None:
            return of_a, of_b, None
        of_c, of_b = totals.float().view(2, -1).unbind()
        return of_a, of_b, of_c

    def occurs(self, value: Tensor, low: int, high: int) -> Tensor:
        """Return which integers from low to high a tensor holds, as booleans."""
        marks = torch.zeros(high - low + 1, dtype=torch.uint8, device="cpu")
        _join_call("occurs", _Join(rows=value.numel(), low=low), {"a": value, "inside": marks})
        return marks.bool()

    def look_up(self, value: Tensor, table: Tensor, low: int, scale: Tensor, keeps: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return table[value - low], and this times the scale, never -0.0: float32; and, if `keeps`, the indices value - low.

        The indices are uint8, or the bits of uint16 as int16 where the table has more than 2^8 entries.
        """
        integers, real = (torch.empty(value.shape, dtype=torch.float32, device="cpu") for _ in range(2))
        wide = len(table) > 2**8
        places = torch.empty(value.shape, dtype=torch.int16 if wide else torch.uint8, device="cpu") if keeps else None
        structure = _Join(rows=value.numel(), low=low, scale=float(scale), wide=wide)
        _join_call("look_up", structure, {"a": value, "multiplier": table, "integers": integers, "real": real, "inside": places})
        return integers, real, places

    def look_back(self, places: Tensor, slopes: Tensor, scale: Tensor, of_integers: Tensor | None, of_real: Tensor | None) -> Tensor:
        """Return (of_integers + of_real · scale) · slopes[places], with the indices `places` as `look_up` returns them."""
        gradient = torch.empty(places.shape, dtype=torch.float32, device="cpu")
        join = _Join(rows=places.numel(), scale=float(scale), wide=len(slopes) > 2**8)
        gradients = {"of_integers": of_integers, "of_real": of_real, "of_a": gradient}
        _join_call("look_back", join, gradients | {"mask": places, "multiplier": slopes})
        return gradient

    def to_bytes(self, value: Tensor) -> Tensor | None:
        """Return integers as int8; None where they are not all within its limits."""
        integers = torch.empty(value.shape, dtype=torch.int8, device="cpu")
        structure = _Join(rows=value.numel())
        _join_call("to_bytes", structure, {"a": value, "inside": integers})
        return None if structure.outside else integers


class NativeNumbers:
    """The kernels of `fxquant.numerics.grids` in C. Constants are None where a ratio is so near a tie that float64 cannot decide."""

    def takes(self, value: Tensor) -> bool:
        """Return whether there is a library, and a plain tensor of float64 or int64 is in CPU memory."""
        plain = fused_layers.plain(value, dtypes=(torch.float64, torch.int64))
        return plain and value.is_cpu and not isinstance(native.joining_library(), str)

    def segments(self, integers: Tensor, lines: Lines) -> Tensor:
        """Return the integers of a function by segments, as `_evaluate` does; the starts ascend."""
        result = torch.empty(integers.shape, dtype=torch.int64, device="cpu")
        structure = _Join(rows=integers.numel(), kind=lines.parity, low=lines.low, high=lines.high)
        constants = {"b": lines.starts, "c": lines.lines, "half": lines.entries}
        _join_call("segments", structure, {"a": integers, **constants, "real": result})
        return result

    def mantissas(self, ratio: Tensor, bits: int, largest: int, carries: bool) -> tuple[Tensor, ...] | None:
        """Return (M, k) of `Ratio.mantissa`."""
        structure = _Join(rows=ratio.numel(), columns=bits, c_rows=largest, wide=carries)
        return _of_ratios("mantissas", structure, ratio, ("integers", "real"), torch.int64)

    def constants(
        self, ratio: Tensor, widths: FixedWidths, largest: int, high: int, shifted_bits: int, measured: tuple[int, int, int] | None = None
    ) -> tuple[Tensor, ...] | None:
        """Return shift, multiplier and right shift, int32; of `MeasuredWidths`, if the limits of its shifts are given."""
        structure = _Join(rows=ratio.numel(), columns=widths.multiplier_bits, c_rows=largest, wide=measured is None, c_stride=high)
        structure.b_rows, structure.c_step, structure.each = widths.largest_shift, widths.intermediate_bits, shifted_bits
        structure.b_stride, structure.b_step, structure.mode = measured or (0, 0, 0)
        return _of_ratios("fixed_constants" if measured is None else "measured_constants", structure, ratio)


def _of_ratios(
    function: str, structure: _Join, ratio: Tensor, names: Sequence[str] = ("of_a", "integers", "real"), dtype: torch.dtype = torch.int32
) -> tuple[Tensor, ...] | None:
    results = {name: torch.empty(ratio.shape, dtype=dtype, device="cpu") for name in names}
    _join_call(function, structure, {"c": ratio, **results})
    return None if structure.outside else tuple(results.values())


class NativeMarks:
    """The kernels of saturation masks in C."""

    def takes(self, inside: Tensor) -> bool:
        """Return whether there is a library, and the mask is in CPU memory."""
        return inside.device.type == "cpu" and not isinstance(native.joining_library(), str)

    def places(self, marks: Tensor, count: int) -> Tensor:
        """Return the int32 indices of the `count` bytes that are 0."""
        places = torch.empty(count, dtype=torch.int32, device="cpu")
        _join_call("places", _Join(rows=marks.numel()), {"mask": marks, "integers": places})
        return places

    def marks(self, places: Tensor, size: int) -> Tensor:
        """Return a uint8 tensor (size,) that is 0 at the indices `places` and 1 elsewhere."""
        marks = torch.empty(size, dtype=torch.uint8, device="cpu")
        _join_call("marks", _Join(rows=size, columns=places.numel()), {"a": places, "inside": marks})
        return marks


fused_layers.MASKS.add(NativeMarks())
grids.OFFERS.add(NativeNumbers())
fused_elementwise.OFFERS.add(NativeJoining())


def _structure(join: Join) -> _Join:
    """Return the structure for an accumulator, without its tensors."""
    structure = _Join(rows=join.rows, columns=join.columns, wide=join.wide, each=join.each)
    structure.kind = PRODUCT if join.product else DOWN if join.down else NEAREST
    structure.mode = REAL if structure.kind == NEAREST else FIXED  # equal accumulators; forward sets the mode
    structure.b_rows, structure.b_stride, structure.b_step = join.of_b
    structure.c_rows, structure.c_stride, structure.c_step = join.of_c
    structure.factor_a, structure.factor_b = join.factors
    structure.sign_a, structure.sign_b = join.signs
    return structure


def _operands(join: Join) -> dict[str, Tensor | None]:
    return {"a": join.a, "b": NONE if join.b is None else join.b, "c": join.c}


def _each_row(join: Join, value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dim() == 0 and value.dtype == dtype and not join.each:
        return value
    value = value.detach().to(dtype).flatten()
    return value.expand(join.columns) if join.each else value


def _join_call(function: str, structure: _Join, tensors: dict[str, Tensor | None]) -> None:
    contiguous = ((name, tensor.contiguous()) for name, tensor in tensors.items() if tensor is not None)
    run(native.joining_library(), function, structure, contiguous)
