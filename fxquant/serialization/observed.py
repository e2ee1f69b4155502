"""Observations as a document of plain JSON values and a dictionary of tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxquant.calibration.observations import Observations, Observed, Place
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.histogram import Gathering, gathering
from fxquant.quantization.weights import LARGEST_EXPONENT
from fxquant.serialization.names import ARGUMENTS, OBSERVERS
from fxquant.serialization.values import Malformed, decode, encode, expect, look_up

FORMAT, VERSION = "fxquant observations", 1
_SECTIONS = ["format", "version", "observed"]
LARGEST_HISTOGRAM = 2**24  # bins that a file may ask for before any tensor of them is read
_PLACE = ["name", "fused", "shape", "within", "exponents"]


def write_observations(observations: Observations) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors of observations."""
    entries, tensors = [], {}
    for index, entry in enumerate(observations.values()):
        gathered = []
        for number, ((kind, settings), buffers) in enumerate(entry.gathered.items()):
            gathered.append([kind, dict(settings)])
            tensors.update({f"{index}.{number}.{name}": buffer.contiguous() for name, buffer in buffers.items()})
        entries.append({"places": [[encode(getattr(place, part)) for part in _PLACE] for place in entry.places], "gathered": gathered})
    return {"format": FORMAT, "version": VERSION, "observed": entries}, tensors


def read_observations(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Observations:
    """Return the observations that a document describes. Raises Malformed, or what making observers raises, if it describes none."""
    if list(document) != _SECTIONS or document["format"] != FORMAT:
        raise Malformed("it holds no observations that fxquant saved")
    if document["version"] != VERSION:
        raise Malformed(f"it has version {str(document['version'])[:20]}, and this fxquant reads version {VERSION}")
    left = dict(tensors)
    found = [_observed(expect(entry, dict), index, left) for index, entry in enumerate(expect(document["observed"], list))]
    if left:
        raise Malformed("it holds tensors that belong to no observation")
    return Observations(found)


def _observed(entry: dict[str, Any], index: int, tensors: dict[str, Tensor]) -> Observed:
    if list(entry) != ["places", "gathered"]:
        raise Malformed("an observation does not have the fields of one")
    gathered: dict[Gathering, dict[str, Tensor]] = {}
    for number, part in enumerate(expect(entry["gathered"], list)):
        observer = _observer(part)
        way = gathering(observer)
        assert way is not None
        gathered[way] = {name: _buffer(f"{index}.{number}.{name}", like, tensors) for name, like in observer.named_buffers()}
    found = Observed(tuple(_place(expect(place, list)) for place in expect(entry["places"], list)), gathered)
    if not found.places or not found.count > 0:
        raise Malformed("an observation is of nothing")
    return found


def _observer(part: Any) -> Observer:
    """Return an observer that gathers in the way that is written."""
    kind, settings = expect(part, list)
    chosen = {name: expect(value, int, float) for name, value in expect(settings, dict).items()}
    observer = look_up(OBSERVERS, kind, "observer")
    if not set(chosen) <= set(ARGUMENTS[observer]) or chosen.get("bins", 0) > LARGEST_HISTOGRAM:
        raise Malformed(f"no {kind} gathers with these settings")
    with torch.device("meta"):
        made: Observer = observer(**chosen)
    if gathering(made) != (kind, tuple(chosen.items())):
        raise Malformed(f"no {kind} gathers with these settings")
    return made


def _buffer(name: str, like: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype) or not bool(torch.isfinite(tensor).all()):
        raise Malformed(f"the tensor {name} is missing, or is not what its observer gathers")
    return tensor


def _place(parts: list[Any]) -> Place:
    name, fused, shape, within, exponents = (decode(part) for part in parts)
    low, high = (expect(bound, float) for bound in expect(within, tuple))
    names = tuple(expect(other, str) for other in expect(fused, tuple))
    if not low <= high:
        raise Malformed("the observed values are not an observation")
    powers = tuple(expect(power, int) for power in expect(exponents, tuple))
    if any(abs(power) > LARGEST_EXPONENT for power in powers):
        raise Malformed("the observed factors of channels are not factors")
    return Place(expect(name, str), names, expect(shape, str), (low, high), powers)
