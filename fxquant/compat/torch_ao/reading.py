"""Conversion of PyTorch's QConfigs to fxquant's, from an instance of each observer and fake quantize.

torch.ao                                                  fxquant
quint8 or qint8, per_tensor_affine                        ActivationConfig("uint8"): an equal set of 256 float values
qint8 or quint8, per_tensor_symmetric                     ActivationConfig("int8")
16 integers, symmetric                                    "int4"
int16, symmetric                                          "int16"
reduce_range=True: half of the integers                   all of them; accumulators are proved to fit
MinMaxObserver, MovingAverageMinMaxObserver,              those of the same names
  HistogramObserver
FixedQParamsObserver, FixedQParamsFakeQuantize            scale=, zero_point=
is_dynamic=True, of quint8                                QConfig(dynamic=True)
FakeQuantize, FusedMovingAvgObsFakeQuantize               training="statistics"
_LearnableFakeQuantize                                    training="learned"
per_channel_symmetric                                     WeightConfig(per_channel=True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxquant.compat.common import Refusal
from fxquant.errors import ConfigurationError
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.quantization.mapping import Chosen
from fxquant.quantization.observers import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer
from fxquant.quantization.spec import LEARNED, STATISTICS, ActivationConfig, QConfig, WeightConfig

HOMES = ("torch.ao.", "torch.quantization")
BITS = {15: 4, 16: 4, 127: 8, 128: 8, 255: 8, 256: 8, 65535: 16, 65536: 16}  # by the number of integers; half of them: reduce_range

# Observers of activations, by PyTorch's names.
OBSERVERS: dict[str, Callable[[Any], Any]] = {
    "HistogramObserver": lambda made: HistogramObserver(made.bins) if made.bins != HistogramObserver().bins else HistogramObserver,
    "MovingAverageMinMaxObserver": lambda made: MovingAverageMinMaxObserver(made.averaging_constant),
    "MinMaxObserver": lambda made: MinMaxObserver,
}
WEIGHT_OBSERVERS = ("MinMaxObserver", "PerChannelMinMaxObserver")  # and their subclasses

NOT_READ = {
    "float16": Refusal("integers and scales are those of 8, 4 and 16 bits", "give the place None, which keeps it in float32"),
    "bfloat16": Refusal("integers and scales are those of 8, 4 and 16 bits", "give the place None, which keeps it in float32"),
    "float32": Refusal(
        "weights alone cannot be integers here", "give the place None, which keeps it in float32, or quantize activations too"
    ),
    "Identity": Refusal(
        "weights alone cannot be integers here", "give the place None, which keeps it in float32, or quantize activations too"
    ),
    "RecordingObserver": Refusal("it keeps every value and finds no scale", "read values with fxq.record(model, batches)"),
    "dynamic": Refusal(
        "what is quantized at run time is uint8, per tensor and affine", "pass default_dynamic_qconfig, or one of this kind"
    ),
    "PlaceholderObserver": Refusal("it finds no scale", "name an observer that does, like HistogramObserver"),
    "ReuseInputObserver": Refusal("operators that only move values have the scale of their operand, without a rule", "leave the rule out"),
    "NoopObserver": Refusal("it finds no scale", "name an observer that does, like HistogramObserver"),
    "PerChannelMinMaxObserver": Refusal("an activation has one scale for all its channels", "name MinMaxObserver"),
    "affine weight": Refusal(
        "the integers of weights are symmetric: 0 stands for 0", "pass qscheme=torch.per_tensor_symmetric or torch.per_channel_symmetric"
    ),
    "unsigned weight": Refusal("weights are signed integers", "pass dtype=torch.int8"),
    "affine": Refusal("the affine dtype is one of 8 bits", "pass qscheme=torch.per_tensor_symmetric"),
    "range": Refusal("dtypes have 4, 8 or 16 bits, whole", "leave quant_min and quant_max out"),
    "ch_axis": Refusal("a weight has a scale for each output channel, on whatever axis those are", "leave ch_axis at 0"),
    "weight observer": Refusal(
        "the scale of a weight is its largest magnitude, or learned",
        "name MinMaxObserver or PerChannelMinMaxObserver, or pass a fxq.QConfig with WeightConfig(training='learned')",
    ),
    "own": Refusal("only observers of torch.ao and of fxquant are known", "derive yours from fxq.Observer, and pass a fxq.QConfig with it"),
}


@dataclass(frozen=True)
class Asked:
    """The settings of an observer, or of the one inside a fake quantize.

    written   the class that the user named
    names     the observer's class and its base classes, by name
    observer  the observer itself
    """

    written: str
    names: tuple[str, ...]
    observer: Any
    learned: bool

    @property
    def dtype(self) -> str:
        """Return PyTorch's dtype by name, without the prefix of its quantized tensors: "uint8" for "quint8"."""
        name = str(getattr(self.observer, "dtype", "torch.float32")).removeprefix("torch.")
        return name.removeprefix("q")

    @property
    def scheme(self) -> str:
        return str(getattr(self.observer, "qscheme", "torch.per_tensor_affine")).removeprefix("torch.")

    @property
    def bits(self) -> int | None:
        """Return the number of bits of its integers, before reduce_range; None for a range that no dtype has."""
        low, high = getattr(self.observer, "quant_min", None), getattr(self.observer, "quant_max", None)
        if low is None or high is None:
            return {"int8": 8, "uint8": 8, "int16": 16}.get(self.dtype)
        return BITS.get(int(high) - int(low) + 1)

    def refused(self, key: str, what: str) -> ConfigurationError:
        return NOT_READ[key].error(f"{what} {self.written} cannot be read")


def asked(factory: Any, what: str) -> Asked:
    """Return the settings of the observer or fake quantize that a factory creates. Raises ConfigurationError if it creates neither."""
    try:
        made = factory()
    except Exception as error:
        raise ConfigurationError(
            f"{what} of this QConfig cannot be read",
            because=f"making its observer raises {type(error).__name__}: {error}",
            remedy="pass a class of torch.ao's observers, or one with_args",
        ) from error
    observer = getattr(made, "activation_post_process", made)
    kinds = [kind for kind in type(observer).__mro__ if kind.__module__.startswith(HOMES)]
    written = type(made).__name__
    if not isinstance(observer, nn.Identity) and (not kinds or kinds[0] is not type(observer)):
        raise NOT_READ["own"].error(f"{what} {written} cannot be read")
    names = tuple(kind.__name__ for kind in kinds)
    return Asked(written, names or ("Identity",), observer, learned="Learnable" in written)


def activation(factory: Any) -> ActivationConfig:
    """Return the ActivationConfig equivalent to an observer or fake quantize of an activation."""
    if isinstance(factory, ActivationConfig):
        return factory
    if isinstance(factory, type) and issubclass(factory, Observer):
        return ActivationConfig(observer=factory)
    one, what = asked(factory, "the activation"), "the activation"
    for key in (one.dtype, one.names[0], "PerChannelMinMaxObserver"):
        if key in NOT_READ and (key in one.names or key == one.dtype):
            raise one.refused(key, what)
    if one.bits is None:
        raise one.refused("range", what)
    affine = one.scheme.endswith("affine")
    dtype = f"{'u' if affine else ''}int{one.bits}"
    if dtype not in ACTIVATION_TYPES:
        raise one.refused("affine", what)
    training = LEARNED if one.learned else STATISTICS
    if "FixedQParamsObserver" in one.names:
        scale, zero_point = float(one.observer.scale), int(one.observer.zero_point)
        moved = zero_point + (128 if one.dtype == "int8" else 0)  # equal float values, with integers counted from 0
        return ActivationConfig(dtype, scale=scale, zero_point=moved if affine else None)
    found = next((OBSERVERS[name] for name in one.names if name in OBSERVERS), None)
    if found is None:
        raise one.refused("own", what)
    return ActivationConfig(dtype, observer=found(one.observer), training=training)


def weight(factory: Any) -> WeightConfig:
    """Return the WeightConfig equivalent to an observer or fake quantize of a weight."""
    if isinstance(factory, WeightConfig):
        return factory
    one, what = asked(factory, "the weight"), "the weight"
    if "PlaceholderObserver" in one.names and one.dtype == "float32":
        return WeightConfig()  # PyTorch's convention for a layer norm: only its activation is quantized
    if not any(name in one.names for name in WEIGHT_OBSERVERS):
        raise one.refused("weight observer", what)
    if one.dtype in ("float16", "bfloat16", "float32"):
        raise one.refused(one.dtype, what)
    if one.dtype != "int8":
        raise one.refused("unsigned weight", what)
    if "affine" in one.scheme:
        raise one.refused("affine weight", what)
    if one.bits not in (4, 8):
        raise one.refused("range", what)
    if getattr(one.observer, "ch_axis", 0) != 0:
        raise one.refused("ch_axis", what)
    return WeightConfig(f"int{one.bits}", per_channel="channel" in one.scheme, training=LEARNED if one.learned else STATISTICS)


def _is_dynamic(factory: Any) -> bool:
    """Return whether activations are quantized at run time to uint8, with a grid per batch. Raises ConfigurationError for another dtype."""
    if isinstance(factory, ActivationConfig) or (isinstance(factory, type) and issubclass(factory, Observer)):
        return False
    one = asked(factory, "the activation")
    if not getattr(one.observer, "is_dynamic", False):
        return False
    if one.dtype != "uint8" or one.bits != 8 or not one.scheme.endswith("affine"):
        raise NOT_READ["dynamic"].error(f"the dynamic activation {one.written} of {one.dtype} cannot be read")
    return True


def is_foreign(qconfig: Any) -> bool:
    """Return whether this is PyTorch's QConfig: a pair of an activation and a weight."""
    return isinstance(qconfig, tuple) and hasattr(qconfig, "activation") and hasattr(qconfig, "weight")


def read(qconfig: Any, *, activation_alone: bool = False) -> Chosen:
    """Convert PyTorch's QConfig to fxquant's; a fxq.QConfig, and None, which keeps its module in float, are returned unchanged.

    activation_alone   use fxquant's default for the weight
    """
    if qconfig is None or isinstance(qconfig, QConfig):
        return qconfig
    if not is_foreign(qconfig):
        raise ConfigurationError(
            f"a {type(qconfig).__name__} is not a qconfig",
            because="a qconfig is a QConfig of torch.ao.quantization, a fxq.QConfig, or None: it stays in float",
            remedy="pass one of these",
        )
    if _is_dynamic(qconfig.activation):
        return QConfig(weight=weight(qconfig.weight), dynamic=True)
    output = activation(qconfig.activation)
    return QConfig(output, WeightConfig() if activation_alone else weight(qconfig.weight))
