"""The kernels of `fxquant.training.fused_elementwise` in `joining.c`, for float32 tensors in CPU memory."""

import ctypes
from functools import partial

import torch
from torch import Tensor

from fxquant.backends.cpu import native
from fxquant.backends.cpu.native import FIXED, REAL
from fxquant.backends.cpu.training import constants, numbers
from fxquant.training import fused_elementwise, fused_layers
from fxquant.training.fused_elementwise import Join
from fxquant.training.fused_layers import Rounded

PRODUCT, DOWN, NEAREST = 0, 1, 2

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Join(ctypes.Structure):
    """The arguments of one fused kernel: the structure of `joining.c`."""

    _fields_ = [
        *((name, _pointer) for name in ("a", "b", "c", "multiplier", "half", "first", "product", "ratio", "of_integers", "of_real")),
        *((name, _pointer) for name in ("integers", "real", "of_a", "of_b", "inside", "totals", "ends", "mask")),
        *((name, _int64) for name in ("rows", "columns", "b_rows", "b_stride", "b_step", "c_rows", "c_stride", "c_step")),
        *((name, _int64) for name in ("kind", "mode", "wide", "each", "outside", "threads")),
        *((name, ctypes.c_double) for name in ("factor_a", "factor_b", "sign_a", "sign_b", "limit", "add")),
        *((name, ctypes.c_float) for name in ("low", "high", "bottom", "top", "least", "most", "scale")),
    ]


class NativeJoining:
    """`Joining` in C, for fused elementwise operators."""

    def takes(self, value: Tensor) -> bool:
        """Return whether there is a library, and the tensor is float32 in CPU memory."""
        return value.device.type == "cpu" and value.dtype == torch.float32 and not isinstance(native.joining_library(), str)

    def ends(self, join: Join) -> Tensor:
        width = join.columns if join.each else 1
        ends = torch.empty(2 * width, dtype=torch.float64, device="cpu")
        _call("join_ends", _structure(join), _operands(join) | {"ends": ends})
        return ends.view(2, -1)

    def forward(self, join: Join, how: Rounded, ratio: Tensor, marks: bool) -> tuple[Tensor, Tensor, Tensor | None, int]:
        shape = join.a.shape
        integers, real = (torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(2))
        inside = torch.empty(shape, dtype=torch.uint8, device="cpu") if marks else None
        structure = _structure(join)
        for name, number in numbers(how).items():
            setattr(structure, name, number)
        written = {"ratio": _each(join, ratio, torch.float64), "integers": integers, "real": real, "inside": inside}
        _call("join_forward", structure, _operands(join) | constants(how, partial(_each, join)) | written)
        return integers, real, inside, structure.outside

    def backward(
        self, join: Join, scale: Tensor, ratio: Tensor, inside: Tensor | None, of_integers: Tensor | None, of_real: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        gradient = of_integers if of_integers is not None else of_real
        assert gradient is not None
        of_a = torch.empty(gradient.shape, dtype=torch.float32, device="cpu")
        structure = _structure(join)
        structure.factor_a, structure.factor_b = join.slopes
        structure.scale = float(scale)
        totals = torch.empty(2 * join.columns, dtype=torch.float64, device="cpu") if join.each else None
        of_b = None if join.each else torch.empty(gradient.numel() if join.of_b.step else join.rows, dtype=torch.float32, device="cpu")
        gradients = {"of_integers": of_integers, "of_real": of_real, "mask": inside, "ratio": _each(join, ratio, torch.float64)}
        operands = {"a": join.a, "b": join.b} if join.product else {"b": gradient}
        _call("join_backward", structure, operands | gradients | {"of_a": of_a, "of_b": of_b, "totals": totals})
        if totals is None:
            return of_a, of_b, None
        of_c, of_b = totals.float().view(2, -1).unbind()
        return of_a, of_b, of_c

    def occurs(self, value: Tensor, low: int, high: int) -> Tensor:
        marks = torch.zeros(high - low + 1, dtype=torch.uint8, device="cpu")
        _call("occurs", _Join(rows=value.numel(), low=low), {"a": value, "inside": marks})
        return marks.bool()

    def look_up(self, value: Tensor, table: Tensor, low: int, scale: Tensor, keeps: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        integers, real = (torch.empty(value.shape, dtype=torch.float32, device="cpu") for _ in range(2))
        wide = len(table) > 2**8
        places = torch.empty(value.shape, dtype=torch.int16 if wide else torch.uint8, device="cpu") if keeps else None
        structure = _Join(rows=value.numel(), low=low, scale=float(scale), wide=wide)
        _call("look_up", structure, {"a": value, "multiplier": table, "integers": integers, "real": real, "inside": places})
        return integers, real, places

    def look_back(self, places: Tensor, slopes: Tensor, scale: Tensor, of_integers: Tensor | None, of_real: Tensor | None) -> Tensor:
        gradient = torch.empty(places.shape, dtype=torch.float32, device="cpu")
        join = _Join(rows=places.numel(), scale=float(scale), wide=len(slopes) > 2**8)
        _call("look_back", join, {"mask": places, "multiplier": slopes, "of_integers": of_integers, "of_real": of_real, "of_a": gradient})
        return gradient

    def to_bytes(self, value: Tensor) -> Tensor | None:
        integers = torch.empty(value.shape, dtype=torch.int8, device="cpu")
        structure = _Join(rows=value.numel())
        _call("to_bytes", structure, {"a": value, "inside": integers})
        return None if structure.outside else integers


class NativeMarks:
    """The kernels `Marks` in C, for saturation masks."""

    def takes(self, inside: Tensor) -> bool:
        """Return whether there is a library, and the mask is in CPU memory."""
        return inside.device.type == "cpu" and not isinstance(native.joining_library(), str)

    def places(self, marks: Tensor, count: int) -> Tensor:
        places = torch.empty(count, dtype=torch.int32, device="cpu")
        _call("places", _Join(rows=marks.numel()), {"mask": marks, "integers": places})
        return places

    def marks(self, places: Tensor, size: int) -> Tensor:
        marks = torch.empty(size, dtype=torch.uint8, device="cpu")
        _call("marks", _Join(rows=size, columns=places.numel()), {"a": places, "inside": marks})
        return marks


fused_layers.MASKS.add(NativeMarks())
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
    none = torch.zeros(1, dtype=torch.float32, device="cpu") if join.b is None else join.b  # multiplied by 0
    return {"a": join.a, "b": none, "c": join.c}


def _each(join: Join, value: Tensor, dtype: torch.dtype) -> Tensor:
    value = value.detach().to(dtype).flatten()
    return value.expand(join.columns) if join.each else value


def _call(function: str, structure: _Join, tensors: dict[str, Tensor | None]) -> None:
    plain = [(name, tensor.detach().contiguous()) for name, tensor in tensors.items() if tensor is not None]
    native.run(native.joining_library(), function, structure, plain)
