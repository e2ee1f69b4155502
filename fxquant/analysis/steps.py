"""The operations of a recurrence that are alike at each of its steps."""

from __future__ import annotations

from typing import Any

from fxquant.analysis.layers import Layer


def alike(known: tuple[Layer, ...]) -> list[tuple[Layer, list[Layer]]]:
    """Return the layers; of a recurrence those that are the first of their kind, each with those that are like it at later steps."""
    grouped: list[tuple[Layer, list[Layer]]] = []
    there: dict[Any, list[Layer]] = {}
    at: dict[Any, int] = {}  # how many of a kind there were at the current step
    number, before = 0, -1
    for layer in known:
        if layer.step is None:
            grouped.append((layer, []))
            continue
        if layer.step != before:
            number, before, at = number + (layer.step < before), layer.step, {}
        kind = number, layer.part, layer.reason, layer.notes, layer.grid, layer.dtype
        at[kind] = at.get(kind, 0) + 1
        if (kind, at[kind]) in there:
            there[kind, at[kind]].append(layer)
        else:
            there[kind, at[kind]] = []
            grouped.append((layer, there[kind, at[kind]]))
    return grouped


def recurrent_parts(known: tuple[Layer, ...]) -> frozenset[str]:
    """Return the names of all parts of recurrences, those that are computed once among them."""
    composites = {_composite(layer) for layer in known if layer.step is not None}
    return frozenset(layer.name for layer in known if layer.part and _composite(layer) in composites)


def _composite(layer: Layer) -> tuple[str, str]:
    return layer.part.split(":", 1)[0], layer.module
