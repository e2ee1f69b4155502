"""Horizon's qconfigs: each is a fxq.QConfig, created by name, or from fake quantizes and observers by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

import fxquant as fxq
from fxquant.compat.common import Refusal
from fxquant.compat.horizon.served.observing import (
    KINDS,
    FakeCast,
    FakeQuant,
    FakeQuantize,
    clip,
    clip_std,
    fixed_scale,
    kl,
    min_max,
    mix,
    mse,
    percentile,
)
from fxquant.errors import ConfigurationError
from fxquant.quantization.observers import Observer
from fxquant.quantization.spec import FROZEN, LEARNED, PACT, STATISTICS
from fxquant.support.arguments import FLAG, checked

FLOAT = "float"  # the training mode of a FakeCast, which has no scale

qint4, qint8, qint16, qint32 = "int4", "int8", "int16", "int32"

# Factories of observers by name; each takes the averaging constant and further settings, and removes the settings that it knows.
OBSERVERS: dict[str, Callable[[float, dict[str, Any]], Any]] = {
    min_max: lambda constant, _: fxq.MovingAverageMinMaxObserver(constant) if constant > 0 else fxq.MovingAverageMinMaxObserver,
    percentile: lambda _, given: fxq.PercentileObserver(float(given.pop("percentile", 99.99)), int(given.pop("bins", 2048))),
    mse: lambda *_: fxq.HistogramObserver,  # the squared error, also of later values; one observer for calibration and training
    clip_std: lambda _, given: fxq.ClipStdObserver(float(given.pop("std_scale", 3.0))),
    kl: lambda *_: fxq.KLObserver,
    mix: lambda *_: fxq.MixObserver,
}
WEIGHT_OBSERVERS = (None, min_max)

REFUSED = {
    "affine": Refusal("the marches' integers are symmetric", "pass a symmetric qscheme"),
    "float": Refusal(
        "it is not an integer dtype, and the host computes in float", "give the layer None in the qconfig_dict, or name it in hybrid_dict"
    ),
    "pact": Refusal("what PACT learns is where an activation is clipped", "use weight_fake_quant='lsq', or 'fake_quant'"),
    "weight": Refusal("the scale of a weight is its largest magnitude, or learned", "use 'min_max', or weight_fake_quant='lsq'"),
    "no weight": Refusal("weights are integers wherever their layer is", "give the layer None, which keeps it in float"),
    "ch_axis": Refusal("a weight has a scale for each output channel, on whatever axis those are", "leave ch_axis at 0"),
}
IGNORED = {
    "stride",
    "is_sync_quantize",
    "factory_kwargs",
    "compat_mask",
    "in_place",
    "fast_training",
    "channel_len",
    "saturate",
    "use_grad_scaling",
    "alpha",  # where PACT starts: here at the calibrated range
}


def dtype_of(value: Any) -> str:
    """Return the name of an integer dtype: "int8" for "qint8", PyTorch's dtype of this name, torch.int8 and "int8"."""
    name = str(value).removeprefix("torch.").removeprefix("q")
    if name in ("int4", "int8", "int16", "int32"):
        return name
    raise (
        REFUSED["float"].error(f"the dtype {value} cannot be used")
        if "float" in name
        else ConfigurationError(
            f"the dtype {value!r} is unknown", because="dtypes are qint4, qint8, qint16 and qint32", remedy="pass one of these"
        )
    )


def is_float_dtype(value: Any) -> bool:
    """Return whether this is a floating-point dtype, by its name."""
    return str(value).removeprefix("torch.") in ("float16", "float32", "bfloat16", "float64")


def _taken(settings: dict[str, Any], called: str) -> None:
    """Raise ConfigurationError for unknown arguments, and for those with an unsupported meaning."""
    if "symmetric" not in str(settings.pop("qscheme", "symmetric")):
        raise REFUSED["affine"].error(f"{called}(qscheme=…) cannot be done")
    if settings.pop("zero_point", 0) not in (0, None):
        raise REFUSED["affine"].error(f"{called}(zero_point=…) cannot be done")
    if settings.pop("ch_axis", 0) not in (0, -1):
        raise REFUSED["ch_axis"].error(f"{called}(ch_axis=…) cannot be done")
    for name in ("quant_min", "quant_max", *IGNORED):  # the range is the dtype's
        settings.pop(name, None)
    if settings:
        raise ConfigurationError(
            f"{called} has no argument {next(iter(settings))!r}",
            because="dtype, qscheme, ch_axis, averaging_constant, and those of the observer are known",
            remedy="leave it out",
        )


def activation(given: Any) -> fxq.ActivationConfig:
    """Return the ActivationConfig of a fake quantize. None means the int32 accumulator of a last layer."""
    if given is None:
        return fxq.ActivationConfig("int32")
    if isinstance(given, fxq.ActivationConfig):
        return given
    given = _of_torch(given)
    settings = {**getattr(given.settings.get("observer"), "settings", {}), **given.settings}
    dtype, observer, training = dtype_of(settings.pop("dtype", qint8)), settings.pop("observer", min_max), given.training
    constant = settings.pop("averaging_constant", 0.01)
    if constant == 0 and training == STATISTICS:
        training = FROZEN
    made: dict[str, Any]
    if observer == fixed_scale:
        made = {"scale": float(settings.pop("scale"))} if "scale" in settings else {}
        if not made:
            raise ConfigurationError("a fixed scale is missing", because="the observer fixed_scale has nothing else", remedy="pass scale=…")
    elif observer == clip:
        made = {"threshold": max(abs(float(settings.pop("xmin", -1.0))), abs(float(settings.pop("xmax", 1.0))))}
    else:
        made = {"observer": _observer(observer, constant, settings), "training": training}
    _taken(settings, "an activation's fake quantize")
    return fxq.ActivationConfig(dtype, **made)


def _observer(name: Any, constant: float, settings: dict[str, Any]) -> Any:
    if isinstance(name, Observer) or (isinstance(name, type) and issubclass(name, Observer)):
        return name
    if name not in OBSERVERS:
        raise ConfigurationError(
            f"the observer {name!r} is not supported",
            because=f"observers are {', '.join(OBSERVERS)}, fixed_scale and clip, and classes of fxq.Observer",
            remedy="use 'mse', which loses least, or name another of these",
        )
    return OBSERVERS[name](constant, settings)


def weight(given: Any) -> fxq.WeightConfig:
    """Return the WeightConfig of a fake quantize."""
    if isinstance(given, fxq.WeightConfig):
        return given
    if given is None:
        raise REFUSED["no weight"].error("a weight without a fake quantize cannot be done")
    given = _of_torch(given)
    if given.training == PACT:
        raise REFUSED["pact"].error("PACT of a weight is not supported")
    settings = dict(given.settings)
    settings.pop("averaging_constant", None)
    if settings.pop("observer", min_max) not in WEIGHT_OBSERVERS:
        raise REFUSED["weight"].error("this observer of a weight is not supported")
    dtype, per_channel = dtype_of(settings.pop("dtype", qint8)), "per_tensor" not in str(settings.get("qscheme", ""))
    _taken(settings, "a weight's fake quantize")
    return fxq.WeightConfig(dtype, per_channel=per_channel, training=LEARNED if given.training == LEARNED else STATISTICS)


def _of_torch(given: Any) -> FakeQuant:
    """Return a fake quantize, unwrapped from a partial of PyTorch's `with_args`. Raises ConfigurationError for anything else."""
    partial = getattr(given, "p", None)
    if partial is not None and isinstance(getattr(partial, "func", None), FakeQuant):
        return partial.func.with_args(**partial.keywords)  # type: ignore[no-any-return]
    if not isinstance(given, FakeQuant):
        raise _no_fake_quant(given)
    return given


def _no_fake_quant(given: Any) -> ConfigurationError:
    return ConfigurationError(
        f"a {type(given).__name__} is not a fake quantize",
        because="it is one of the default_… of this module, or FakeQuantize.with_args(observer=…, dtype=…)",
        remedy="pass one of these",
    )


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


def as_qconfig(given: Any) -> fxq.QConfig | None:
    """Return a qconfig: fxquant's own, None, or a tuple of activation and weight, as PyTorch's. Raises ConfigurationError for others."""
    if given is None or isinstance(given, fxq.QConfig):
        return given
    if isinstance(given, tuple) and hasattr(given, "activation") and hasattr(given, "weight"):
        return QConfig(given.activation, given.weight, getattr(given, "input", None))
    raise ConfigurationError(
        f"a {type(given).__name__} is not a qconfig",
        because="a qconfig is one of the default_… of this module, QConfig(…), or None: it stays in float",
        remedy="pass one of these",
    )


@contextmanager
def read_attributes(model: nn.Module) -> Iterator[None]:
    """Replace PyTorch's `qconfig` attributes on a model's modules by fxquant's within the context."""
    before = {module: module.__dict__["qconfig"] for module in model.modules() if "qconfig" in module.__dict__}
    try:
        for module, given in before.items():
            module.__dict__["qconfig"] = as_qconfig(given)
        yield
    finally:
        for module, given in before.items():
            module.__dict__["qconfig"] = given


_activation, _weight = activation, weight
FakeQuant.reads = staticmethod(activation)


@checked()
def get_default_qconfig(
    activation_fake_quant: str | None = "fake_quant",
    weight_fake_quant: str | None = "fake_quant",
    activation_observer: Any = min_max,
    weight_observer: Any = min_max,
    activation_qkwargs: Mapping[str, Any] | None = None,
    weight_qkwargs: Mapping[str, Any] | None = None,
) -> fxq.QConfig:
    """Return a QConfig by names of fake quantizes ("fake_quant", "lsq", "pact", None) and observers (min_max, percentile, mse, clip …)."""
    parts = ((activation_fake_quant, activation_observer, activation_qkwargs), (weight_fake_quant, weight_observer, weight_qkwargs))
    made = [
        None if kind is None else _kind(kind).with_args(**({} if observer is None else {"observer": observer}), **(more or {}))
        for kind, observer, more in parts
    ]
    return fxq.QConfig(activation(made[0]), weight(made[1]))


def _kind(name: Any) -> FakeQuant:
    if name not in KINDS:
        raise ConfigurationError(
            f"the fake quantize {name!r} is unknown", because="it is 'fake_quant', 'lsq', 'pact' or None", remedy="pass one of these"
        )
    found: FakeQuant = KINDS[name]
    return found


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
    made = as_qconfig(qconfig)
    return None if made is None else fxq.QConfig(made.output.of(dtype_of(dtype)), made.weight, made.input)


# ---- by name ------------------------------------------------------------------------------------------------------------
#
# Calibration and training have one observer, so that a calibrated state loads into the trained model. The scale minimizes the
# loss, and follows the range of the batches in training.

default_8bit_fake_quant = fxq.ActivationConfig("int8")
default_4bit_fake_quant = fxq.ActivationConfig("int4")
default_16bit_fake_quant = fxq.ActivationConfig("int16")
default_calib_fake_quant = default_8bit_fake_quant
default_8bit_fixed_act_fake_quant = fxq.ActivationConfig("int8", training=FROZEN)
default_16bit_fixed_act_fake_quant = fxq.ActivationConfig("int16", training=FROZEN)
default_8bit_lsq_quant = fxq.ActivationConfig("int8", training=LEARNED)
default_4bit_lsq_quant = fxq.ActivationConfig("int4", training=LEARNED)
default_16bit_lsq_quant = fxq.ActivationConfig("int16", training=LEARNED)
default_4bit_pact_quant = fxq.ActivationConfig("int4", training=PACT)
default_8bit_pact_quant = fxq.ActivationConfig("int8", training=PACT)
default_16bit_pact_quant = fxq.ActivationConfig("int16", training=PACT)
default_fp16_fake_cast = FakeCast
default_weight_8bit_fake_quant = per_channel_8bit_fake_quant = fxq.WeightConfig("int8")
default_weight_4bit_fake_quant = fxq.WeightConfig("int4")
default_weight_16bit_fake_quant = fxq.WeightConfig("int16")
default_weight_8bit_lsq_quant = fxq.WeightConfig("int8", training=LEARNED)
default_weight_4bit_lsq_quant = fxq.WeightConfig("int4", training=LEARNED)
default_weight_16bit_lsq_quant = fxq.WeightConfig("int16", training=LEARNED)

_SUM = fxq.ActivationConfig("int32")
NAMED: dict[str, fxq.QConfig] = {
    **{
        f"default_{use}_8bit{act}fake_quant_qconfig": fxq.QConfig(config, default_weight_8bit_fake_quant)
        for use in ("qat", "calib")
        for act, config in (("_", default_8bit_fake_quant), ("_weight_16bit_act_", default_16bit_fake_quant), ("_weight_32bit_out_", _SUM))
    },
    "default_qat_8bit_fixed_act_fake_quant_qconfig": fxq.QConfig(default_8bit_fixed_act_fake_quant),
    "default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig": fxq.QConfig(default_16bit_fixed_act_fake_quant),
    "default_qat_8bit_lsq_quant_qconfig": fxq.QConfig(default_8bit_lsq_quant, default_weight_8bit_lsq_quant),
    "default_qat_16bit_lsq_quant_qconfig": fxq.QConfig(default_16bit_lsq_quant, default_weight_8bit_lsq_quant),
    "default_qat_8bit_pact_quant_qconfig": fxq.QConfig(default_8bit_pact_quant, default_weight_8bit_fake_quant),
    "default_qat_16bit_pact_quant_qconfig": fxq.QConfig(default_16bit_pact_quant, default_weight_8bit_fake_quant),
    "per_channel_qat_8bit_qconfig": fxq.QConfig(default_8bit_fake_quant),
    # names that later releases of the plugin removed
    "default_qat_out_8bit_fake_quant_qconfig": fxq.QConfig(_SUM),
    "default_calib_out_8bit_fake_quant_qconfig": fxq.QConfig(_SUM),
    "default_qat_16bit_fake_quant_qconfig": fxq.QConfig(default_16bit_fake_quant),
    "default_calib_16bit_fake_quant_qconfig": fxq.QConfig(default_16bit_fake_quant),
}
