"""The best outputs that a model can have with 8 bits, computed without fxquant: its float form, with the operands of products rounded.

The operands of convolutions, of matrix products and of additions of two branches have 8 bits, weights a scale for each channel. Nothing
else is rounded: norms, softmaxes and activations are computed in float from float. What a compiler loses beyond this is the compiler's,
or the calibration's where tensors are rounded that are not here; what is lost here already is the network's own sensitivity.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = dict[str, Tensor]
LEVELS = 127  # of int8, symmetric
CLIPPINGS = torch.arange(16, 65, dtype=torch.float64) / 64  # of a tensor's largest magnitude: what is tried to clip it at
COVERED = 1e8  # what is larger is a mask's -1e9 or -inf, and no scale covers it
SAMPLE = 2**16  # elements of a tensor that are looked at for its scale, per batch

_aten = torch.ops.aten
PRODUCTS: dict[Any, tuple[int, int]] = {  # where their two operands stand
    _aten.convolution.default: (0, 1), _aten.mm.default: (0, 1), _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2), _aten.baddbmm.default: (1, 2),
}  # fmt: skip
SUMS = (_aten.add.Tensor, _aten.add_.Tensor)


class _Sites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meets the operands that are to be rounded, counted in the order of execution, which is the same for every batch."""

    def __init__(self, parameters: set[int], meet: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters, self.meet, self.site = parameters, meet, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = PRODUCTS.get(func, ())
        if func in SUMS and _adds_branches(args):
            places = (0, 1)
        changed = list(args)
        for place in places:
            operand = changed[place]
            if operand.untyped_storage().data_ptr() in self.parameters:
                changed[place] = _weight(operand, 0 if func is _aten.convolution.default else operand.dim() - 1)
            else:
                changed[place] = self.meet(self.site, operand)
                self.site += 1
        if func in SUMS and places:  # in place, what is added to would keep its rounding, but for the sum
            return args[0].copy_(changed[0] + changed[1]) if func is _aten.add_.Tensor else func(*changed, **(kwargs or {}))
        return func(*changed, **(kwargs or {}))


def _adds_branches(args: Sequence[Any]) -> bool:
    left, right = args[0], args[1]
    return isinstance(right, Tensor) and left.is_floating_point() and right.is_floating_point() and left.shape == right.shape


def _weight(value: Tensor, channel: int) -> Tensor:
    """Rounded with one scale for each channel of the result."""
    others = [dim for dim in range(value.dim()) if dim != channel]
    step = value.abs().amax(others, keepdim=True).clamp_min(1e-30) / LEVELS
    return torch.round(value / step) * step


def ideal(model: nn.Module, calibration: Sequence[Inputs], measure: Callable[..., float]) -> float:
    """The ratio of signal to noise in dB, of the better of two choices of all scales: the largest magnitude, or the least squared error.

    `measure(run)` is that ratio for `run`, which computes outputs as the model does.
    """
    parameters = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    largest: dict[int, float] = {}
    _over(model, calibration, _Sites(parameters, _measuring(largest)))
    errors: dict[int, Tensor] = {}
    _over(model, calibration, _Sites(parameters, _trying(largest, errors)))
    clipped = {site: largest[site] * float(CLIPPINGS[int(error.argmin())]) for site, error in errors.items()}
    return max(measure(_rounded(model, parameters, limits)) for limits in (largest, clipped))


def _over(model: nn.Module, batches: Sequence[Inputs], sites: _Sites) -> None:
    for batch in batches:
        sites.site = 0
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), sites:
            model(**batch)


def _measuring(largest: dict[int, float]) -> Callable[[int, Tensor], Tensor]:
    def meet(site: int, value: Tensor) -> Tensor:
        finite = value[value.abs() < COVERED]
        largest[site] = max(largest.get(site, 0.0), float(finite.abs().max()) if finite.numel() else 0.0)
        return value

    return meet


def _trying(largest: dict[int, float], errors: dict[int, Tensor]) -> Callable[[int, Tensor], Tensor]:
    def meet(site: int, value: Tensor) -> Tensor:
        values = value.flatten()[:: max(1, value.numel() // SAMPLE)].double().unsqueeze(1)
        steps = (CLIPPINGS * largest[site] / LEVELS).clamp_min(1e-30)
        rounded = torch.clamp(torch.round(values / steps), -LEVELS, LEVELS) * steps
        errors[site] = errors.get(site, torch.zeros(len(CLIPPINGS), dtype=torch.float64)) + (values - rounded).square().sum(0)
        return value

    return meet


def _rounded(model: nn.Module, parameters: set[int], limits: dict[int, float]) -> Callable[..., Any]:
    def meet(site: int, value: Tensor) -> Tensor:
        step = max(limits[site], 1e-30) / LEVELS
        return torch.where(value.abs() < COVERED, torch.clamp(torch.round(value / step), -LEVELS, LEVELS) * step, value)

    def run(**batch: Tensor) -> Any:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Sites(parameters, meet):
            return model(**batch)

    return run
