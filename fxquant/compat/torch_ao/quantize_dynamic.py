"""PyTorch's `quantize_dynamic` over fxquant: its specification as a mapping of dynamic QConfigs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fxquant.compat.common import Refusal
from fxquant.compat.torch_ao.reading import read
from fxquant.errors import ConfigurationError
from fxquant.quantization.mapping import Chosen, QConfigMapping
from fxquant.quantization.spec import QConfig, WeightConfig

LAYERS = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.RNNCell, nn.GRUCell)  # the layers that PyTorch makes dynamic by default
USUAL = QConfig(weight=WeightConfig(per_channel=False), dynamic=True)  # default_dynamic_qconfig
HALF = Refusal("weights become integers of 8 or 4 bits", "leave dtype out, or leave the model in float16 yourself")


def dynamic_mapping(model: nn.Module, specification: Any, dtype: Any) -> QConfigMapping:
    """Return the mapping equivalent to a specification: None, a set of module classes and names, or a dict from these to QConfigs.

    Layers that it does not name stay in float.
    """
    if dtype is not None and str(dtype).removeprefix("torch.") not in ("qint8", "int8"):
        raise HALF.error(f"dtype={dtype} cannot be read")
    rules = QConfigMapping(default=None)
    for where, qconfig in _rules(model, specification).items():
        if not isinstance(where, str) and not (isinstance(where, type) and issubclass(where, nn.Module)):
            raise ConfigurationError(
                f"{where!r} is not a module or type of a model",
                because="qconfig_spec names modules by their path or by their class",
                remedy="pass a set like {nn.Linear, 'encoder.lstm'}, or a dict from these to QConfigs",
            )
        chosen = _dynamic(where, qconfig)
        rules = rules.set_module_name(where, chosen) if isinstance(where, str) else rules.set_object_type(where, chosen)
    return rules


def _rules(model: nn.Module, specification: Any) -> Mapping[Any, Any]:
    if specification is None:
        there = {type(module) for module in model.modules()}
        return {kind: USUAL for kind in LAYERS if kind in there}
    if isinstance(specification, Mapping):
        return specification
    if isinstance(specification, str) or not isinstance(specification, Iterable):
        raise ConfigurationError(
            f"qconfig_spec={specification!r} cannot be read",
            because="it is a set of module classes and names, or a dict from these to QConfigs",
            remedy="pass one of these, or None for linear and recurrent layers",
        )
    return dict.fromkeys(specification, USUAL)


def _dynamic(where: Any, qconfig: Any) -> Chosen:
    chosen = read(qconfig)
    if chosen is not None and not chosen.dynamic:
        raise ConfigurationError(
            f"the QConfig for {where if isinstance(where, str) else where.__name__} is static",
            because="quantize_dynamic calibrates nothing",
            remedy="pass a dynamic one, like default_dynamic_qconfig, or use prepare_fx",
        )
    return chosen
