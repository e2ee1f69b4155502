"""Horizon's observers and fake quantizes by name: descriptions for fxquant's quantizers, which can also be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.calibration.calibration import owned_quantizers, require_prepared
from fxquant.errors import ConfigurationError
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import gathering
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import LEARNED, PACT, STATISTICS


class NamedObserver(str):
    """An observer by its name, with settings: `MinMaxObserver`, `MSEObserver.with_args(stride=10)`, `FixedScaleObserver(scale=0.5)`."""

    settings: Mapping[str, Any] = {}

    def with_args(self, **settings: Any) -> NamedObserver:
        """Return a copy with these settings."""
        made = NamedObserver(self)
        made.settings = {**self.settings, **settings}
        return made

    __call__ = with_args

    def reset_scale(
        self, model: nn.Module, method: str = "mse", method_kwargs: Mapping[str, Any] | None = None, dtype: Any = None, prefix: str = ""
    ) -> int:
        """Recompute scales of a calibrated model from what was observed, without batches; return their number.

        method         "percentile", with method_kwargs {"percentile": 0.9999} as a fraction, or "mse"
        dtype, prefix  only tensors of this dtype, and only operators of modules below this path

        Raises ConfigurationError for another method, and if no scale matches.
        """
        require_prepared(model)
        if method not in ("mse", "percentile"):
            raise ConfigurationError(f"method={method!r} is unknown", because="it is 'mse' or 'percentile'", remedy="pass one of these")
        share = float((method_kwargs or {}).get("percentile", 0.9999))
        chosen = fxq.PercentileObserver(100 * share) if method == "percentile" else fxq.HistogramObserver()
        wanted = None if dtype is None else str(dtype).removeprefix("torch.").removeprefix("q")
        count = 0
        for operator in quantized_operators(model).values():
            inside = not prefix or operator.path == prefix or operator.path.startswith(prefix + ".")
            for quantizer in owned_quantizers(operator) if inside else ():
                if wanted in (None, quantizer.dtype.name) and not (quantizer.given or quantizer.frozen or quantizer.follows_sum):
                    count += _reset(quantizer, chosen)
        if not count:
            raise ConfigurationError(
                "no scale was changed", because="no tensor of this dtype and prefix was observed", remedy="calibrate the model first"
            )
        return count


def _reset(quantizer: Quantizer, chosen: fxq.Observer) -> bool:
    """Set a scale as another observer with the same statistics would; return whether there is one."""
    known = next((observer for observer in quantizer.observers if gathering(observer) == gathering(chosen) and observer.observed), None)
    if known is None:
        return False
    chosen.load_state_dict(known.state_dict())
    quantizer.assign(chosen.scale(quantizer.dtype) * quantizer.headroom)
    return True


min_max, fixed_scale, clip, percentile, mse = (NamedObserver(name) for name in ("min_max", "fixed_scale", "clip", "percentile", "mse"))
clip_std, kl, mix = (NamedObserver(name) for name in ("clip_std", "kl", "mix"))
MinMaxObserver = MovingAverageMinMaxObserver = PerChannelMinMaxObserver = MovingAveragePerChannelMinMaxObserver = min_max
FixedScaleObserver, ClipObserver, PercentileObserver, MSEObserver = fixed_scale, clip, percentile, mse
ClipStdObserver, KLObserver, MixObserver = clip_std, kl, mix
CalibObserver = percentile
HistogramObserver = mse  # both minimize the squared error


@dataclass(frozen=True)
class FakeQuant:
    """A description of a fake quantize: how its scale is found, and its other arguments. A call returns it as a module."""

    training: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reads: ClassVar[Callable[[Any], fxq.ActivationConfig]]  # converts it to a config: `qconfig.activation`

    def with_args(self, **settings: Any) -> FakeQuant:
        """Return a copy with these arguments."""
        return replace(self, settings={**self.settings, **settings})

    def __call__(self, observer: Any = None, **settings: Any) -> FakeQuantizer:
        """Return a module that observes and rounds its input."""
        given = settings if observer is None else {"observer": observer, **settings}
        return FakeQuantizer(type(self).reads(self.with_args(**given)))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, FakeQuantizer)


class FakeQuantizer(nn.Module):
    """A fake quantize of a tensor: observes in train mode, and rounds to a grid: clip(round(x / scale)) · scale, straight through."""

    def __init__(self, config: fxq.ActivationConfig) -> None:
        super().__init__()
        observer = None if config.fixed_scale is not None else config.new_observer()
        self.quantizer = Quantizer(config.type, observer, scale=config.fixed_scale, zero_point=config.fixed_zero_point)
        self.observes, self.rounds = True, True

    @property
    def scale(self) -> Tensor:
        """Return the scale, float32."""
        return self.quantizer.scale

    @property
    def zero_point(self) -> Tensor:
        """Return the zero point, int64."""
        return torch.tensor(self.quantizer.grid.zero_point, dtype=torch.int64, device="cpu")

    def set_qparams(self, scale: Any, zero_point: Any = None) -> None:
        """Set a fixed scale, which later batches do not change."""
        self.quantizer.assign(torch.as_tensor(scale, dtype=torch.float32), None if zero_point is None else int(zero_point))
        self.quantizer.freeze()

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Enable rounding; False passes values through unchanged."""
        self.rounds = enabled

    def enable_observer(self, enabled: bool = True) -> None:
        """Enable observation in train mode, or disable it."""
        self.observes = enabled

    def disable_fake_quant(self) -> None:
        """Pass values through unchanged."""
        self.rounds = False

    def disable_observer(self) -> None:
        """Disable observation."""
        self.observes = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the nearest values of the grid. Raises NotCalibrated without a scale."""
        if self.training and self.observes:
            self.quantizer.observe(input.detach())
            self.quantizer.update_scale()
        if not self.rounds:
            return input
        self.quantizer.require()
        grid = self.quantizer.grid
        low, high = grid.bounds
        scale = grid.scale.detach()
        with torch.no_grad():
            rounded = grid.quantize(input) * scale
        inside = input.clamp(float(low * scale), float(high * scale))
        return inside + (rounded - inside.detach())


FakeQuantize = CalibFakeQuantize = FakeQuant(STATISTICS)
_LearnableFakeQuantize, PACTFakeQuantize = FakeQuant(LEARNED), FakeQuant(PACT)
FakeCast = FakeQuant("float")
KINDS: dict[Any, Any] = {"fake_quant": FakeQuantize, "lsq": _LearnableFakeQuantize, "pact": PACTFakeQuantize}
