"""Horizon's qconfig_dict and hybrid_dict as a fxq.QConfigMapping, and setters as rules for the operators of a traced model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import fx

import fxquant as fxq
from fxquant import backends
from fxquant.compat.horizon.served.qconfig import REFUSED, as_qconfig
from fxquant.compat.horizon.served.templates import UNSAID, Asked, Place, QconfigSetter
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import computes_tensor, module_path, resolve
from fxquant.ir.stubs import dequant_stub, quant_stub
from fxquant.quantization.mapping import DEFAULT, Chosen


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    return list(rules.items()) if isinstance(rules, Mapping) else [(kind, chosen) for kind, chosen in rules]


def _only(given: Any, known: tuple[str, ...], what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"a {type(given).__name__} is not a {what}", because=f"it is a dict with {', '.join(map(repr, known))}", remedy="pass one"
        )
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"{key!r} is not a key of a {what}",
                because=f"its keys are {', '.join(map(repr, known))}",
                remedy="name rules by one of these",
            )
    return given


def of_dict(qconfig_dict: Any) -> fxq.QConfigMapping:
    """Convert {"": global, "module_type": [(type, qconfig)], "module_name": [(name, qconfig)] or {name: qconfig}}. The rest is float."""
    if isinstance(qconfig_dict, fxq.QConfigMapping):
        return qconfig_dict
    if qconfig_dict is None or not isinstance(qconfig_dict, Mapping):
        return fxq.QConfigMapping(default=as_qconfig(qconfig_dict))
    parts = _only(qconfig_dict, ("", "module_type", "object_type", "module_name"), "qconfig_dict")
    types = _pairs(parts.get("module_type", ())) + _pairs(parts.get("object_type", ()))
    names = {name: as_qconfig(chosen) for name, chosen in _pairs(parts.get("module_name", ()))}
    return fxq.QConfigMapping(as_qconfig(parts.get("")), {kind: as_qconfig(chosen) for kind, chosen in types}, names=names)


def on_host(mapping: fxq.QConfigMapping, hybrid_dict: Any) -> fxq.QConfigMapping:
    """Return the mapping with what hybrid_dict names on the host: {"module_type": [type], "module_name": [name]}."""
    parts = _only(hybrid_dict, ("module_type", "module_name"), "hybrid_dict")
    return mapping.set_host(*parts.get("module_type", ()), *parts.get("module_name", ()))


# ---- setters --------------------------------------------------------------------------------------------------------------


def of_setters(setters: Any, traced: fx.GraphModule, march: str) -> tuple[fxq.QConfigMapping, bool]:
    """Return the mapping that setters define for a traced model, and whether one of them requests high-precision outputs.

    The first of several setters with a rule for an operator decides; a qconfig, a dict and a mapping are setters as well. The mapping has
    a rule for each operator that differs from the default. Raises ConfigurationError for float operands on a march without float16.
    """
    if setters is None:
        setters = QconfigSetter()
    several = list(setters) if isinstance(setters, tuple | list) else [setters]
    if len(several) == 1 and not hasattr(several[0], "of"):
        return of_dict(several[0]), False
    wide = any(getattr(setter, "high_precision_outputs", False) for setter in several)

    def chosen(place: Place) -> Chosen:
        for setter in several:
            asked = setter.of(place) if hasattr(setter, "of") else _of_mapping(of_dict(setter), place)
            if asked is not UNSAID:
                made: Chosen = asked.qconfig(place) if isinstance(asked, Asked) else asked
                if isinstance(asked, Asked) and asked.has_floats and not backends.get(march).float16:
                    raise REFUSED["float"].error(f"a float dtype of {place.path or 'all operators'} cannot be used on {march}")
                return made
        return None

    default = chosen(Place("", "", None))
    places = {place: chosen(place) for place in places_of(traced)}
    names = _by_name(traced, places, default)
    known = {part for place in places for part in _around(place)}
    for setter in several:
        names.update((name, default) for name in getattr(setter, "names", tuple)() if name and name not in known)  # `prepare` reports it
    mapping = fxq.QConfigMapping(default, names=names)
    for setter in several:
        if getattr(setter, "save_dir", None) is not None:
            fxq.save_qconfig(mapping, Path(setter.save_dir) / "qconfig.json")
    return mapping, wide


def _by_name(traced: fx.GraphModule, places: Mapping[Place, Chosen], default: Chosen) -> dict[str, Chosen]:
    """Return rules for the operators that differ from the default, by their nodes' names."""
    names = {place.name: made for place, made in places.items() if made != default}
    if default is None and any(made is not None and made.output.dtype == "int32" for made in names.values()):
        # The accumulator of a dequantized layer includes only its batch norm; operators after it would read their operands as integers.
        names.update((place.name, None) for place, made in places.items() if made is None and not place.is_batch_norm)
    of_node = {place.name: made for place, made in places.items()}
    for node in traced.graph.nodes:  # the grid of a stub is its own rule's, not that of its readers
        if node.target is quant_stub and any(of_node.get(user.name, of_node[node.name]) != of_node[node.name] for user in node.users):
            names[node.name] = of_node[node.name]
    return names


def places_of(traced: fx.GraphModule) -> Iterator[Place]:
    """Yield the operators of a traced model: name, module path, and class or function of each."""
    for node in traced.graph.nodes:
        if computes_tensor(node) and node.target is not dequant_stub:
            kind = type(resolve(traced, str(node.target))) if node.op == "call_module" else node.target
            yield Place(node.name, module_path(node), kind)


def _around(place: Place) -> list[str]:
    parts = place.path.split(".")
    return [place.name, *(".".join(parts[:end]) for end in range(1, len(parts) + 1))]


def _of_mapping(mapping: fxq.QConfigMapping, place: Place) -> Any:
    """Return the rule of a mapping for an operator; UNSAID if only its default of None covers it."""
    rule, chosen = mapping.covering(place.name, place.path, (place.kind,))[0]
    return UNSAID if rule == DEFAULT and chosen is None else chosen
