"""Conversion of PyTorch's QConfigs to fxquant's, from an instance of each observer and fake quantize: docs/guide/from-torch-ao.md."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.compat.common import refusals, refused
from fxquant.errors import ConfigurationError
from fxquant.numerics.grids import ACTIVATION_TYPES, IntType, scale_from_range
from fxquant.quantization.observers import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer
from fxquant.quantization.observers.ranges import finite_range
from fxquant.quantization.spec import LEARNED, STATISTICS, ActivationConfig, Call, Chosen, QConfig, QConfigMapping, WeightConfig

HOMES = ("torch.ao.", "torch.quantization", "torchao.quantization.pt2e")
BITS = {15: 4, 16: 4, 127: 8, 128: 8, 255: 8, 256: 8, 65535: 16, 65536: 16}  # by the number of integers; half of them: reduce_range

# Observers of activations, by PyTorch's names.
OBSERVERS: dict[str, Callable[[Any], Any]] = {
    "HistogramObserver": lambda theirs: HistogramObserver(theirs.bins) if theirs.bins != HistogramObserver().bins else HistogramObserver,
    "MovingAverageMinMaxObserver": lambda observer: MovingAverageMinMaxObserver(observer.averaging_constant),
    "MinMaxObserver": lambda observer: MinMaxObserver,
}
WEIGHT_OBSERVERS = ("MinMaxObserver", "PerChannelMinMaxObserver")  # and their subclasses

NOT_READ = refusals("observers")


@dataclass(frozen=True)
class Asked:
    """The settings of an observer, or of the one inside a fake quantize."""

    written: str  # the class that the user named
    names: tuple[str, ...]  # the observer's class and its base classes, by name
    observer: Any  # the observer itself
    learned: bool

    @property
    def dtype(self) -> str:
        """Return PyTorch's dtype by name, without the prefix of its quantized tensors: "uint8" for "quint8"."""
        return str(getattr(self.observer, "dtype", "torch.float32")).removeprefix("torch.").removeprefix("q")

    @property
    def scheme(self) -> str:
        return str(getattr(self.observer, "qscheme", None) or torch.per_tensor_affine).removeprefix("torch.")

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
    if isinstance(factory, Asked):
        return factory
    try:
        created = factory()
    except Exception as error:
        raise refused("observer of a QConfig", what=what, kind=type(error).__name__, error=error) from error
    observer = getattr(created, "activation_post_process", created)
    kinds = [kind for kind in type(observer).__mro__ if kind.__module__.startswith(HOMES)]
    written = type(created).__name__
    if not isinstance(observer, nn.Identity) and not (kinds and hasattr(observer, "calculate_qparams")):
        raise NOT_READ["own"].error(f"{what} {written} cannot be read")
    names = tuple(kind.__name__ for kind in kinds)
    if kinds and kinds[0] is not type(observer):
        names = (type(observer).__name__, "ObserverBase")  # of the user's own, whatever it is derived from
    return Asked(written, names or ("Identity",), observer, learned="Learnable" in written)


def activation(factory: Any, what: str = "the activation") -> ActivationConfig:
    """Return the ActivationConfig equivalent to an observer or fake quantize of an activation."""
    if isinstance(factory, ActivationConfig):
        return factory
    if isinstance(factory, type) and issubclass(factory, Observer):
        return ActivationConfig(observer=factory)
    one = asked(factory, what)
    for key in (one.dtype, one.names[0], "PerChannelMinMaxObserver"):
        if key in NOT_READ and (key in one.names or key == one.dtype):
            raise one.refused(key, what)
    if "channel" in one.scheme:
        raise one.refused("PerChannelMinMaxObserver", what)
    if one.bits is None:
        raise one.refused("range", what)
    affine = one.scheme.endswith("affine")
    dtype = f"{'u' if affine else ''}int{one.bits}"
    if dtype not in ACTIVATION_TYPES:
        raise one.refused("affine", what)
    if "FixedQParamsObserver" in one.names:
        scale, zero_point = float(one.observer.scale), int(one.observer.zero_point)
        moved = zero_point + (128 if one.dtype == "int8" else 0)  # equal float values, with integers counted from 0
        return ActivationConfig(dtype, scale=scale, zero_point=moved if affine else None)
    observer = next((OBSERVERS[name](one.observer) for name in one.names if name in OBSERVERS), None)
    return ActivationConfig(dtype, observer=observer or TheirObserver(factory), training=LEARNED if one.learned else STATISTICS)


class TheirObserver(Observer):
    """An observer of a user's own, for torch.ao: its `calculate_qparams` says which float values the integers cover.

    factory   makes the observer, or a fake quantize that has one

    Where a model trains, the scale follows a moving average of ranges.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__()
        self.factory = factory
        self.reset()

    def reset(self) -> None:
        created = self.factory()
        self.theirs = getattr(created, "activation_post_process", created)
        self.count.zero_()

    def observe(self, value: Tensor) -> None:
        finite_range(value)
        self.theirs.to(value.device)(value.detach())
        self.count.add_(1)

    def interval(self, dtype: IntType) -> tuple[Tensor, Tensor]:
        scale, zero_point = (torch.as_tensor(part).reshape(()).float() for part in self.theirs.calculate_qparams()[:2])
        own = Asked("", (), self.theirs, learned=False)
        lowest = getattr(self.theirs, "quant_min", None)
        lowest = lowest if lowest is not None else 0 if own.dtype.startswith("u") else -(2 ** ((own.bits or 8) - 1))
        return (lowest - zero_point) * scale, (lowest + 2 ** (own.bits or 8) - 1 - zero_point) * scale

    def scale(self, dtype: IntType) -> Tensor:
        own, low, high = Asked("", (), self.theirs, learned=False), *self.interval(dtype)
        if own.scheme.endswith("symmetric") and own.bits == dtype.bits:
            return torch.as_tensor(self.theirs.calculate_qparams()[0]).reshape(()).float()
        return scale_from_range(low, high, dtype)


def weight(factory: Any, what: str = "the weight") -> WeightConfig:
    """Return the WeightConfig equivalent to an observer or fake quantize of a weight."""
    if isinstance(factory, WeightConfig):
        return factory
    one = asked(factory, what)
    if "PlaceholderObserver" in one.names and one.dtype == "float32":
        return WeightConfig()  # PyTorch's convention for a layer norm: only its activation is quantized
    reasons = {
        "weight-observer": not any(name in one.names for name in WEIGHT_OBSERVERS),
        one.dtype: one.dtype in ("float16", "bfloat16", "float32"),
        "unsigned-weight": one.dtype != "int8",
        "affine-weight": "affine" in one.scheme,
        "range": one.bits not in (4, 8),
        "ch_axis": getattr(one.observer, "ch_axis", 0) != 0,
    }
    for key in [key for key, holds in reasons.items() if holds]:
        raise one.refused(key, what)
    return WeightConfig(f"int{one.bits}", per_channel="channel" in one.scheme, training=LEARNED if one.learned else STATISTICS)


def is_dynamic(factory: Any) -> bool:
    """Return whether activations are quantized at run time, to 8 bits with a grid per batch; raises ConfigurationError for others."""
    if isinstance(factory, ActivationConfig) or (isinstance(factory, type) and issubclass(factory, Observer)):
        return False
    one = asked(factory, "the activation")
    if not getattr(one.observer, "is_dynamic", False):
        return False
    if one.dtype not in ("uint8", "int8") or one.bits != 8 or not one.scheme.endswith("affine"):
        raise NOT_READ["dynamic"].error(f"the dynamic activation {one.written} of {one.dtype} cannot be read")
    return True


def is_foreign(qconfig: Any) -> bool:
    """Return whether `qconfig` is PyTorch's QConfig: a named tuple of an activation and a weight."""
    return isinstance(qconfig, tuple) and hasattr(qconfig, "activation") and hasattr(qconfig, "weight")


def read(qconfig: Any, *, activation_alone: bool = False) -> Chosen:
    """Convert PyTorch's QConfig to fxquant's; a fxq.QConfig, and None, which keeps its module in float, are returned unchanged.

    activation_alone   use fxquant's default for the weight
    """
    if qconfig is None or isinstance(qconfig, QConfig):
        return qconfig
    if not is_foreign(qconfig):
        raise refused("QConfig of PyTorch", kind=type(qconfig).__name__)
    if is_dynamic(qconfig.activation):
        return QConfig(weight=weight(qconfig.weight), dynamic=True)
    return QConfig(activation(qconfig.activation), WeightConfig() if activation_alone else weight(qconfig.weight))


# The operators that PyTorch's default mapping always has rules for, by plain name; a model need not have them.
PRESET = {
    "hardsigmoid", "sigmoid", "softmax", "tanh", "layernorm", "prelu", "convtranspose1d", "convtranspose2d", "convtranspose3d", "reshape",
}  # fmt: skip
ATTRIBUTES = {key: f"{key}_qconfigs" for key in ("object_type", "module_name_regex", "module_name", "module_name_object_type_order")}


def mapping_of(mapping: Any, traced: fx.GraphModule) -> QConfigMapping:
    """Return the QConfigMapping equivalent to PyTorch's, a dict or one QConfig, for a traced model; fxquant's is returned unchanged.

    Rules equal to the global one are left out, and so are those of PyTorch's default mapping for operators that the model lacks.
    Every rule that is reported to match nothing is then the user's.
    """
    if isinstance(mapping, QConfigMapping):
        return mapping
    if mapping is None or isinstance(mapping, QConfig) or is_foreign(mapping):
        return QConfigMapping(default=read(mapping))
    parts = _parts(mapping)
    default = read(mapping.get("") if isinstance(mapping, Mapping) else mapping.global_qconfig)
    modules = dict(traced.named_modules())
    written = {type(modules[str(node.target)]) if node.op == "call_module" else node.target for node in traced.graph.nodes}
    types = {}
    for kind, qconfig in parts["object_type"]:
        plain = _plain(kind)
        reuses_input = is_foreign(qconfig) and getattr(qconfig.activation, "__name__", "") == "ReuseInputObserver"  # as usual here
        if reuses_input or (plain in PRESET and kind not in written):
            continue
        chosen = read(qconfig, activation_alone=plain == "prelu")
        if chosen != default:
            types[kind] = chosen
    patterns = {pattern: read(qconfig) for pattern, qconfig in parts["module_name_regex"]}
    names = {name: read(qconfig) for name, qconfig in parts["module_name"]}
    if "" in names:
        default = names.pop("")
    calls = {Call(*where): read(qconfig) for *where, qconfig in parts["module_name_object_type_order"]}
    return QConfigMapping(default, types, patterns, names, calls)


def _parts(mapping: Any) -> dict[str, list[Any]]:
    if isinstance(mapping, Mapping):
        unknown = [key for key in mapping if key not in ("", *ATTRIBUTES)]
        if not unknown:
            return {key: _pairs(mapping.get(key, ())) for key in ATTRIBUTES}
        raise refused("mapping.rule", value=unknown[0], known=", ".join(map(repr, ATTRIBUTES)))
    if not all(hasattr(mapping, name) for name in ("global_qconfig", *ATTRIBUTES.values())):
        raise refused("mapping", kind=type(mapping).__name__)
    return {key: _pairs(getattr(mapping, name)) for key, name in ATTRIBUTES.items()}


def _pairs(rules: Any) -> list[Any]:
    """Return each rule paired with its QConfig; in an object's dict of calls, the three parts of a call are the key."""
    if not isinstance(rules, Mapping):
        return list(rules)
    return [(*key, qconfig) if isinstance(key, tuple) else (key, qconfig) for key, qconfig in rules.items()]


def _plain(kind: Any) -> str:
    """Return the plain name of an operator: "sigmoid" for nn.Sigmoid, torch.sigmoid and x.sigmoid_()."""
    return (kind if isinstance(kind, str) else getattr(kind, "__name__", "")).lower().replace("_", "")


def own_qconfig(qconfig: Any) -> Any:
    """Return fxquant's QConfig for one of PyTorch's; any other value is returned unchanged."""
    return read(qconfig) if is_foreign(qconfig) else qconfig


LAYERS = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.RNNCell, nn.GRUCell)  # the layers that PyTorch makes dynamic by default
USUAL = QConfig(weight=WeightConfig(per_channel=False), dynamic=True)  # default_dynamic_qconfig


def dynamic_mapping(model: nn.Module, specification: Any, dtype: Any) -> QConfigMapping:
    """Return the mapping equivalent to a specification: None, a set of module classes and names, or a dict from such keys to QConfigs.

    Layers that it does not name stay in float.
    """
    if dtype is not None and str(dtype).removeprefix("torch.") not in ("qint8", "int8"):
        raise refused("quantize_dynamic(dtype)", dtype=dtype)
    there = {type(module) for module in model.modules()}
    rows: Any = [kind for kind in LAYERS if kind in there] if specification is None else specification
    usable = isinstance(rows, Iterable) and not isinstance(rows, str)
    if not usable or not all(isinstance(row, str) or (isinstance(row, type) and issubclass(row, nn.Module)) for row in rows):
        raise refused("quantize_dynamic(qconfig_spec)", specification=specification)
    rules = QConfigMapping(default=None)
    for where in rows:
        chosen = read(rows[where]) if isinstance(rows, Mapping) else USUAL
        if chosen is not None and not chosen.dynamic:
            raise refused("quantize_dynamic of a static QConfig", value=where if isinstance(where, str) else where.__name__)
        rules.set_module_name(where, chosen) if isinstance(where, str) else rules.set_object_type(where, chosen)
    return rules
