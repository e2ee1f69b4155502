"""Conversion of PyTorch's QConfigMapping, its dict form, and the QConfigs on modules to fxquant's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import fx, nn

from fxquant.compat.torch_ao.reading import is_foreign, read
from fxquant.errors import ConfigurationError
from fxquant.quantization.mapping import Call, Chosen, QConfigMapping
from fxquant.quantization.spec import QConfig

# The operators that PyTorch's default mapping always has rules for, by plain name; a model need not have them.
PRESET = {
    "hardsigmoid",
    "sigmoid",
    "softmax",
    "tanh",
    "layernorm",
    "prelu",
    "convtranspose1d",
    "convtranspose2d",
    "convtranspose3d",
    "reshape",
}
ATTRIBUTES = {
    "object_type": "object_type_qconfigs",
    "module_name_regex": "module_name_regex_qconfigs",
    "module_name": "module_name_qconfigs",
    "module_name_object_type_order": "module_name_object_type_order_qconfigs",
}


def mapping_of(given: Any, traced: fx.GraphModule) -> QConfigMapping:
    """Return the QConfigMapping equivalent to PyTorch's, a dict or one QConfig, for a traced model; fxquant's is returned unchanged.

    Rules equal to the global one are left out, and so are those of PyTorch's default mapping for operators that the model lacks.
    Every rule that is reported to match nothing is then the user's.
    """
    if isinstance(given, QConfigMapping):
        return given
    if given is None or isinstance(given, QConfig) or is_foreign(given):
        return QConfigMapping(default=read(given))
    known: dict[tuple[int, bool], Chosen] = {}

    def once(qconfig: Any, alone: bool = False) -> Chosen:
        key = (id(qconfig), alone)
        if key not in known:
            known[key] = read(qconfig, activation_alone=alone)
        return known[key]

    parts = _parts(given)
    default = once(given.get("") if isinstance(given, Mapping) else given.global_qconfig)
    written = _written(traced)
    types = {}
    for kind, qconfig in parts["object_type"]:
        plain = _plain(kind)
        if _reuses_input(qconfig) or (plain in PRESET and kind not in written):
            continue
        chosen = once(qconfig, plain == "prelu")
        if chosen != default:
            types[kind] = chosen
    patterns = {pattern: once(qconfig) for pattern, qconfig in parts["module_name_regex"]}
    names = {name: once(qconfig) for name, qconfig in parts["module_name"]}
    if "" in names:
        default = names.pop("")
    calls = {Call(*where): once(qconfig) for *where, qconfig in parts["module_name_object_type_order"]}
    return QConfigMapping(default, types, patterns, names, calls)


def _parts(given: Any) -> dict[str, list[Any]]:
    """Return the rules of a mapping by kind, as pairs."""
    if isinstance(given, Mapping):
        unknown = [key for key in given if key not in ("", *ATTRIBUTES)]
        if not unknown:
            return {key: _pairs(given.get(key, ())) for key in ATTRIBUTES}
        raise ConfigurationError(
            f"{unknown[0]!r} is not a kind of rule",
            because=f"a dict of QConfigs has the keys '', {', '.join(map(repr, ATTRIBUTES))}",
            remedy="name rules by one of these",
        )
    if not all(hasattr(given, name) for name in ("global_qconfig", *ATTRIBUTES.values())):
        raise ConfigurationError(
            f"a {type(given).__name__} is not a qconfig mapping",
            because="it is a QConfigMapping of torch.ao.quantization, a dict of QConfigs, a QConfig, or a fxq.QConfigMapping",
            remedy="pass get_default_qconfig_mapping('x86'), or one of these",
        )
    return {key: _pairs(getattr(given, name)) for key, name in ATTRIBUTES.items()}


def _pairs(rules: Any) -> list[Any]:
    """Return each rule paired with its QConfig; in an object's dict of calls, the three parts of a call are the key."""
    if not isinstance(rules, Mapping):
        return list(rules)
    return [(*key, qconfig) if isinstance(key, tuple) else (key, qconfig) for key, qconfig in rules.items()]


def _plain(kind: Any) -> str:
    """Return the plain name of an operator: "sigmoid" for nn.Sigmoid, torch.sigmoid and x.sigmoid_()."""
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return name.lower().replace("_", "")


def _written(traced: fx.GraphModule) -> set[Any]:
    """Return the targets of a model's operators: modules' classes, functions, and names of methods."""
    modules = dict(traced.named_modules())
    return {type(modules[str(node.target)]) if node.op == "call_module" else node.target for node in traced.graph.nodes}


def _reuses_input(qconfig: Any) -> bool:
    """Return whether a QConfig reuses the scale of the operator's input, which is the default here."""
    return is_foreign(qconfig) and getattr(qconfig.activation, "__name__", "") == "ReuseInputObserver"


def with_own_qconfigs(model: nn.Module) -> nn.Module:
    """Return a model whose modules have fxquant's QConfigs: a copy if some are PyTorch's, otherwise the model itself."""
    if not isinstance(model, nn.Module) or not any(is_foreign(module.__dict__.get("qconfig")) for module in model.modules()):
        return model
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if "qconfig" in module.__dict__:
            module.__dict__["qconfig"] = read(module.__dict__["qconfig"])
    return copied


def settings_of(config: Any) -> dict[str, Any]:
    """Return the non-empty settings of PyTorch's custom config, an object or its dict form, by name."""
    if config is None:
        return {}
    held = (
        dict(config)
        if isinstance(config, Mapping)
        else (
            {f.name: getattr(config, f.name) for f in fields(config)}
            if is_dataclass(config) and not isinstance(config, type)
            else dict(vars(config))
        )
    )
    return {name: value for name, value in held.items() if not isinstance(value, Iterable) or list(value)}
