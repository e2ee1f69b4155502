"""A quantizer: the dtype and scale of one tensor (or of a group that shares them), and how they are found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxquant.errors import CalibrationError, NotCalibrated
from fxquant.numerics import INT32, IntType
from fxquant.observers import Observer


class Quantizer(nn.Module):
    """The dtype and the scale of one quantized tensor.

    `scale` is a float32 scalar buffer, NaN until it is known. With an observer it follows what is observed;
    without one it is fixed. `frozen` stops the following.
    """

    scale: Tensor

    def __init__(
        self,
        dtype: IntType,
        observer: Observer | None,
        *,
        scale: float | None = None,
        power_of_two: bool = False,
        name: str = "",
        source: str = "",
        module: str = "",
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.observer = observer
        self.power_of_two = power_of_two
        self.frozen = False
        self.name, self.source, self.module_path = name, source, module
        self.register_buffer("scale", torch.tensor(float("nan") if scale is None else scale, dtype=torch.float32))

    @property
    def follows_sum(self) -> bool:
        """Whether the tensor is a sum as it stands: a 32-bit output, whose scale is the sum's step and not kept here."""
        return self.dtype == INT32

    @property
    def calibrated(self) -> bool:
        """Whether the scale is known."""
        return self.follows_sum or bool(torch.isfinite(self.scale))

    @property
    def follows_training(self) -> bool:
        """Whether the scale goes on following what is observed in state TRAIN."""
        return self.observer is not None and self.observer.follows_training and not self.frozen

    @property
    def fixed(self) -> bool:
        """Whether the scale was given rather than observed."""
        return self.observer is None

    def observe(self, value: Tensor) -> None:
        """Let the observer see real values. Raises CalibrationError if any is NaN or infinite."""
        if self.observer is None or self.frozen:
            return
        try:
            self.observer.observe(value)
        except ValueError as error:
            raise CalibrationError(
                f"the values of %{self.name} cannot be observed",
                at=self.source,
                module=self.module_path,
                because=f"{error}; a scale computed from them would be meaningless",
                remedy="look at the batch and at the layers before this one; what was observed earlier is kept",
            ) from None

    def update_scale(self) -> None:
        """Set the scale from what was observed; unchanged if nothing was, or if it is fixed or frozen."""
        if self.observer is not None and self.observer.observed and not self.frozen:
            scale = self.observer.scale(self.dtype)
            self.scale.copy_(round_up_to_power_of_two(scale) if self.power_of_two else scale)

    def set_scale(self, scale: float) -> None:
        """Fix the scale at this value; it no longer follows any observation."""
        self.scale.fill_(scale)
        self.frozen = True

    def require(self) -> None:
        """Raise NotCalibrated if the scale is unknown."""
        if not self.calibrated:
            raise NotCalibrated(
                f"%{self.name} has no scale yet",
                at=self.source,
                module=self.module_path,
                because="no calibration batch has passed through it",
                remedy="run fxq.calibrate(prepared, batches) first, or set its scale with fxq.set_qparams",
            )

    def extra_repr(self) -> str:
        return f"{self.dtype}, scale={self.scale.item():.6g}{', fixed' if self.fixed or self.frozen else ''}"


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below the scale."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
