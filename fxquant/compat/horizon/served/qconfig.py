"""Horizon's observers, fake quantizes, dtypes and qconfigs. A qconfig is a fxq.QConfig, by name or made of fake quantizes and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

import fxquant as fxq
from fxquant.accuracy.simulation import taking_over
from fxquant.accuracy.states import owned_quantizers, require_prepared
from fxquant.compat.common import Refusal, refusals, refused, unknown
from fxquant.errors import ConfigurationError
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.undo import all_or_nothing
from fxquant.quantization.observers import Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import FROZEN, LEARNED, PACT, STATISTICS
from fxquant.support.arguments import FLAG, checked

FLOAT = "float"  # the training mode of a FakeCast, which has no scale


class NamedObserver(str):
    """An observer by its name, with settings: `MinMaxObserver`, `MSEObserver.with_args(stride=10)`, `FixedScaleObserver(scale=0.5)`."""

    settings: Mapping[str, Any] = {}

    def with_args(self, **settings: Any) -> NamedObserver:
        observer = NamedObserver(self)
        observer.settings = {**self.settings, **settings}
        return observer

    __call__ = with_args

    @all_or_nothing
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
            raise unknown("method", method, "'mse' or 'percentile'")
        share = float((method_kwargs or {}).get("percentile", 0.9999))
        chosen = fxq.observers.PercentileObserver(100 * share) if method == "percentile" else fxq.observers.HistogramObserver()
        dtype_name = None if dtype is None else str(dtype).removeprefix("torch.").removeprefix("q")
        count = 0
        for operator in quantized_operators(model).values():
            inside = not prefix or operator.path == prefix or operator.path.startswith(prefix + ".")
            for quantizer in owned_quantizers(operator) if inside else ():
                if dtype_name in (None, quantizer.dtype.name) and not (quantizer.given or quantizer.frozen or quantizer.follows_sum):
                    observer = taking_over(quantizer, fxq.ActivationConfig(observer=chosen))
                    if observer is not None and observer.observed:
                        quantizer.assign(observer.scale(quantizer.dtype) * quantizer.headroom)
                        count += 1
        if not count:
            raise refused("reset_scale")
        return count


min_max, fixed_scale, clip, percentile, mse = (NamedObserver(name) for name in ("min_max", "fixed_scale", "clip", "percentile", "mse"))
clip_std, kl, mix = (NamedObserver(name) for name in ("clip_std", "kl", "mix"))
MinMaxObserver = MovingAverageMinMaxObserver = PerChannelMinMaxObserver = MovingAveragePerChannelMinMaxObserver = min_max
FixedScaleObserver, ClipObserver, PercentileObserver, MSEObserver = fixed_scale, clip, percentile, mse
ClipStdObserver, KLObserver, MixObserver = clip_std, kl, mix
CalibObserver = percentile
HistogramObserver = mse  # both minimize the squared error


@dataclass(frozen=True)
class FakeQuant:
    """A description of a fake quantize: how its scale is found, and its other arguments. Its instances are a model's quantizers."""

    training: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def with_args(self, **settings: Any) -> FakeQuant:
        return replace(self, settings={**self.settings, **settings})

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigurationError: quantizers are parts of prepared models."""
        raise refused("FakeQuantize.call")

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Quantizer)


FakeQuantize = CalibFakeQuantize = FakeQuant(STATISTICS)
_LearnableFakeQuantize, PACTFakeQuantize = FakeQuant(LEARNED), FakeQuant(PACT)
FakeCast = FakeQuant(FLOAT)
KINDS: dict[Any, FakeQuant] = {"fake_quant": FakeQuantize, "lsq": _LearnableFakeQuantize, "pact": PACTFakeQuantize}

qint4, qint8, qint16, qint32 = "int4", "int8", "int16", "int32"  # fxquant's dtypes
QuantDType = str


class qinfo:
    """The integers of a dtype: the smallest, the largest, and the number of bits."""

    def __init__(self, dtype: Any) -> None:
        limits = ACTIVATION_TYPES[dtype_of(dtype)]
        self.min, self.max, self.bits = limits.low, limits.high, limits.bits


# Factories of observers by name; each takes the averaging constant and further settings, and removes the settings that it knows.
OBSERVERS: dict[str, Callable[[float, dict[str, Any]], Any]] = {
    min_max: lambda constant, _: (
        fxq.observers.MovingAverageMinMaxObserver(constant) if constant > 0 else fxq.observers.MovingAverageMinMaxObserver
    ),
    percentile: lambda _, values: fxq.observers.PercentileObserver(float(values.pop("percentile", 99.99)), int(values.pop("bins", 2048))),
    mse: lambda *_: fxq.observers.HistogramObserver,  # the squared error, also of later values; one observer for calibration and training
    clip_std: lambda _, settings: fxq.observers.ClipStdObserver(float(settings.pop("std_scale", 3.0))),
    kl: lambda *_: fxq.observers.KLObserver,
    mix: lambda *_: fxq.observers.HistogramObserver,  # calibration then chooses ranges by the outputs, among more than these
}
WEIGHT_OBSERVERS = (None, min_max)

REFUSED = refusals("qconfig")
IGNORED = {
    "stride", "is_sync_quantize", "factory_kwargs", "compat_mask", "in_place", "fast_training", "channel_len", "saturate",
    "use_grad_scaling", "alpha",  # where PACT starts: here at the calibrated range
}  # fmt: skip


def dtype_of(value: Any) -> str:
    """Return the name of an integer dtype: "int8" for "qint8", PyTorch's dtype of this name, torch.int8 and "int8"."""
    name = str(value).removeprefix("torch.").removeprefix("q")
    if name in ("int4", "int8", "int16", "int32"):
        return name
    if "float" in name:
        raise REFUSED["float"].error(f"the dtype {value} cannot be used")
    raise Refusal("dtypes are qint4, qint8, qint16 and qint32", "pass one of these").error(f"the dtype {value!r} is unknown")


def is_float_dtype(value: Any) -> bool:
    """Return whether `value` is a floating-point dtype or the name of one."""
    return str(value).removeprefix("torch.") in ("float16", "float32", "bfloat16", "float64")


def _taken(settings: dict[str, Any], called: str) -> None:
    """Remove the supported arguments of `called` from `settings`; raise ConfigurationError for unknown or unsupported ones."""
    if "symmetric" not in str(settings.pop("qscheme", "symmetric")):
        raise REFUSED["affine"].error(f"{called}(qscheme=…) cannot be done")
    if settings.pop("zero_point", 0) not in (0, None):
        raise REFUSED["affine"].error(f"{called}(zero_point=…) cannot be done")
    if settings.pop("ch_axis", 0) not in (0, -1):
        raise REFUSED["ch_axis"].error(f"{called}(ch_axis=…) cannot be done")
    for name in ("quant_min", "quant_max", *IGNORED):  # the range is the dtype's
        settings.pop(name, None)
    if settings:
        raise refused("FakeQuantize.argument", called=called, value=next(iter(settings)))


def activation(fake_quant: Any) -> fxq.ActivationConfig:
    """Return the ActivationConfig of a fake quantize. None means the int32 accumulator of a last layer."""
    if fake_quant is None:
        return fxq.ActivationConfig("int32")
    if isinstance(fake_quant, fxq.ActivationConfig):
        return fake_quant
    fake_quant = _of_torch(fake_quant)
    settings = {**getattr(fake_quant.settings.get("observer"), "settings", {}), **fake_quant.settings}
    dtype, observer, training = dtype_of(settings.pop("dtype", qint8)), settings.pop("observer", min_max), fake_quant.training
    constant = settings.pop("averaging_constant", 0.01)
    if constant == 0 and training == STATISTICS:
        training = FROZEN
    arguments: dict[str, Any]
    if observer == fixed_scale:
        if "scale" not in settings:
            raise ConfigurationError("a fixed scale is missing", because="the observer fixed_scale has nothing else", remedy="pass scale=…")
        arguments = {"scale": float(settings.pop("scale"))}
    elif observer == clip:
        arguments = {"threshold": max(abs(float(settings.pop("xmin", -1.0))), abs(float(settings.pop("xmax", 1.0))))}
    else:
        arguments = {"observer": _observer(observer, constant, settings), "training": training}
    _taken(settings, "an activation's fake quantize")
    return fxq.ActivationConfig(dtype, **arguments)


def _observer(name: Any, constant: float, settings: dict[str, Any]) -> Any:
    if isinstance(name, Observer) or (isinstance(name, type) and issubclass(name, Observer)):
        return name
    if name not in OBSERVERS:
        raise refused("FakeQuantize.observer", name=name, known=", ".join(OBSERVERS))
    return OBSERVERS[name](constant, settings)


def weight(fake_quant: Any) -> fxq.WeightConfig:
    """Return the WeightConfig of a fake quantize."""
    if isinstance(fake_quant, fxq.WeightConfig):
        return fake_quant
    if fake_quant is None:
        raise REFUSED["no-weight"].error("a weight without a fake quantize cannot be done")
    fake_quant = _of_torch(fake_quant)
    if fake_quant.training == PACT:
        raise REFUSED["pact"].error("PACT of a weight is not supported")
    settings = dict(fake_quant.settings)
    settings.pop("averaging_constant", None)
    if settings.pop("observer", min_max) not in WEIGHT_OBSERVERS:
        raise REFUSED["weight"].error("this observer of a weight is not supported")
    dtype, per_channel = dtype_of(settings.pop("dtype", qint8)), "per_tensor" not in str(settings.get("qscheme", ""))
    _taken(settings, "a weight's fake quantize")
    return fxq.WeightConfig(dtype, per_channel=per_channel, training=LEARNED if fake_quant.training == LEARNED else STATISTICS)


def _of_torch(fake_quant: Any) -> FakeQuant:
    """Return a fake quantize, unwrapped from a partial of PyTorch's `with_args`. Raises ConfigurationError for anything else."""
    partial = getattr(fake_quant, "p", None)
    if partial is not None and isinstance(getattr(partial, "func", None), FakeQuant):
        return partial.func.with_args(**partial.keywords)  # type: ignore[no-any-return]
    if not isinstance(fake_quant, FakeQuant):
        raise refused("FakeQuantize", kind=type(fake_quant).__name__)
    return fake_quant


@checked()
def QConfig(activation: Any = None, weight: Any = None, input: Any = None, output: Any = None) -> fxq.QConfig | None:
    """Return the fxq.QConfig of fake quantizes; `activation` and `output` are synonyms. Without either, the output has 32 bits.

    With a FakeCast for any of these, return None: the operator stays in float.
    """
    if any(isinstance(one, FakeQuant) and one.training == FLOAT for one in (activation, weight, input, output)):
        return None
    return fxq.QConfig(
        _activation(output if activation is None else activation),
        fxq.WeightConfig() if weight is None else _weight(weight),
        None if input is None else _activation(input),
    )


def as_qconfig(qconfig: Any) -> fxq.QConfig | None:
    """Return a qconfig: fxquant's own, None, or a tuple of activation and weight, as PyTorch's. Raises ConfigurationError for others."""
    if qconfig is None or isinstance(qconfig, fxq.QConfig):
        return qconfig
    if isinstance(qconfig, tuple) and hasattr(qconfig, "activation") and hasattr(qconfig, "weight"):
        return QConfig(qconfig.activation, qconfig.weight, getattr(qconfig, "input", None))
    raise refused("QConfig of Horizon", kind=type(qconfig).__name__)


_activation, _weight = activation, weight


@checked()
def get_default_qconfig(
    activation_fake_quant: str | None = "fake_quant", weight_fake_quant: str | None = "fake_quant", activation_observer: Any = min_max,
    weight_observer: Any = min_max, activation_qkwargs: Mapping[str, Any] | None = None, weight_qkwargs: Mapping[str, Any] | None = None,
) -> fxq.QConfig:  # fmt: skip
    """Return a QConfig by names of fake quantizes ("fake_quant", "lsq", "pact", None) and observers (min_max, percentile, mse, clip …)."""
    for name, kind in (("activation_fake_quant", activation_fake_quant), ("weight_fake_quant", weight_fake_quant)):
        if kind is not None and kind not in KINDS:
            raise unknown(name, kind, "'fake_quant', 'lsq', 'pact' or None")
    parts = ((activation_fake_quant, activation_observer, activation_qkwargs), (weight_fake_quant, weight_observer, weight_qkwargs))
    fake_quants = [
        None if kind is None else KINDS[kind].with_args(**({} if observer is None else {"observer": observer}) | dict(more or {}))
        for kind, observer, more in parts
    ]
    return fxq.QConfig(activation(fake_quants[0]), weight(fake_quants[1]))


@checked(fix_scale=FLAG)
def get_qconfig(
    observer: Any = mse, in_dtype: Any = None, weight_dtype: Any = qint8, out_dtype: Any = qint8, fix_scale: bool = False
) -> fxq.QConfig:
    """Return a QConfig by dtypes; with `fix_scale` scales stay as calibrated while training."""
    settings = {"observer": observer, **({"averaging_constant": 0} if fix_scale else {})}
    input = None if in_dtype is None else activation(FakeQuantize.with_args(dtype=in_dtype, **settings))
    return fxq.QConfig(
        activation(FakeQuantize.with_args(dtype=out_dtype, **settings)), weight(FakeQuantize.with_args(dtype=weight_dtype)), input
    )


def get_default_qat_qconfig(
    dtype: Any = qint8, weight_dtype: Any = qint8, activation_qkwargs: Any = None, weight_qkwargs: Any = None, backend: str = ""
) -> fxq.QConfig:
    """Return the QConfig for training, of the plugin's first releases; `backend` has no effect."""
    return get_default_qconfig(
        activation_qkwargs={"dtype": dtype, **(activation_qkwargs or {})}, weight_qkwargs={"dtype": weight_dtype, **(weight_qkwargs or {})}
    )


def get_default_calib_qconfig(dtype: Any = qint8, calib_qkwargs: Any = None, backend: str = "") -> fxq.QConfig:
    """Return the QConfig for calibration, of the plugin's first releases; `backend` has no effect."""
    return get_default_qconfig(activation_observer=percentile, activation_qkwargs={"dtype": dtype, **(calib_qkwargs or {})})


def get_default_qat_out_qconfig(
    dtype: Any = qint8, weight_dtype: Any = qint8, weight_qkwargs: Any = None, backend: str = ""
) -> fxq.QConfig:
    """Return the QConfig of a last layer, whose output is its int32 accumulator; `dtype` and `backend` have no effect."""
    return get_default_qconfig(None, weight_qkwargs={"dtype": weight_dtype, **(weight_qkwargs or {})})


def replace_qconfig_dtype(qconfig: Any, dtype: Any) -> fxq.QConfig | None:
    """Return the QConfig with another dtype of the output."""
    converted = as_qconfig(qconfig)
    return None if converted is None else fxq.QConfig(converted.output.of(dtype_of(dtype)), converted.weight, converted.input)


# ---- by name ------------------------------------------------------------------------------------------------------------
#
# Calibration and training have one observer, so that a calibrated state loads into the trained model. The scale minimizes the
# loss, and follows the range of the batches in training.
TRAININGS = {"fake": STATISTICS, "fixed_act_fake": FROZEN, "lsq": LEARNED, "pact": PACT}
ACTIVATIONS = {
    f"{bits}bit_{how}": fxq.ActivationConfig(f"int{bits}", training=training) for bits in (4, 8, 16) for how, training in TRAININGS.items()
}
WEIGHTS = {f"{bits}bit_{how}": fxq.WeightConfig(f"int{bits}", training=TRAININGS[how]) for bits in (4, 8, 16) for how in ("fake", "lsq")}
NARROW, WIDE, SUM = ACTIVATIONS["8bit_fake"], ACTIVATIONS["16bit_fake"], fxq.ActivationConfig("int32")
FAKE_QUANTS = {
    **{f"default_{name}_quant": config for name, config in ACTIVATIONS.items()},
    **{f"default_weight_{name}_quant": config for name, config in WEIGHTS.items()},
    "default_calib_fake_quant": NARROW,
    "per_channel_8bit_fake_quant": WEIGHTS["8bit_fake"],
    "default_fp16_fake_cast": FakeCast,
}
NAMED = {
    **{
        f"default_{use}_{name}_fake_quant_qconfig": fxq.QConfig(config)
        for use in ("qat", "calib")
        for name, config in (("8bit", NARROW), ("8bit_weight_16bit_act", WIDE), ("8bit_weight_32bit_out", SUM),
                             ("out_8bit", SUM), ("16bit", WIDE))  # the last two: names that later releases of the plugin removed
    },
    **{
        f"default_qat_{bits}bit_{how}_quant_qconfig": fxq.QConfig(ACTIVATIONS[f"{bits}bit_{how}"], WEIGHTS[weight])
        for bits in (8, 16)
        for how, weight in (("lsq", "8bit_lsq"), ("pact", "8bit_fake"))
    },
    "default_qat_8bit_fixed_act_fake_quant_qconfig": fxq.QConfig(ACTIVATIONS["8bit_fixed_act_fake"]),
    "default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig": fxq.QConfig(ACTIVATIONS["16bit_fixed_act_fake"]),
    "per_channel_qat_8bit_qconfig": fxq.QConfig(NARROW),
}  # fmt: skip
globals().update(FAKE_QUANTS, **NAMED)
