"""Observations of a calibration, apart from the model: they can give scales to another dtype, observer, mapping or target.

Observed values are those of the float model, so they do not depend on integer dtypes. A tensor is identified by its name, the nodes fused
into it, its shape, the interval that its readers distinguish, and the tensors whose scale it shares. Parameters are not compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from fxquant.accuracy.states import INTERMEDIATE, require_prepared
from fxquant.errors import ConfigurationError, NotCalibrated
from fxquant.ir.graph import fact, fused
from fxquant.numerics.grids import EVERYTHING, Interval
from fxquant.ops.core.composite import QUANTIZE
from fxquant.prepared.channels import channels, exponents, multiply
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.observers import MinMaxObserver
from fxquant.quantization.observers.histogram import Gathering, gathering
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import LARGEST_EXPONENT
from fxquant.support.arguments import checked

_EXTREMES = gathering(MinMaxObserver())


@dataclass(frozen=True)
class Place:
    """A tensor of the float model that is observed."""

    # Its node's name; for a quantize, that of the node that computes the float value; with ".intermediate" appended for the tensor that a
    # residual is added to.
    name: str
    fused: tuple[str, ...]  # the nodes that are fused into it
    shape: str  # shape and dtype, as in f32[B,8,16,16]
    within: Interval  # the interval to which its values are clamped before they are observed
    exponents: tuple[int, ...] = ()  # the powers of two by which its channels were multiplied (`ChannelFactors`); () without equalization


Places = tuple[Place, ...]  # of one tensor, or of several that share a scale, in the order they are computed


@dataclass(frozen=True, eq=False)
class Observed:
    """The observations of the tensors of one scale: the buffers of observers, by `gathering` key."""

    places: Places
    gathered: Mapping[Gathering, Mapping[str, Tensor]]

    @property
    def low(self) -> float:
        """The smallest value seen."""
        return float(self._extremes["low"])

    @property
    def high(self) -> float:
        """The largest value seen."""
        return float(self._extremes["high"])

    @property
    def count(self) -> int:
        """The number of observed tensors: one for each batch and place."""
        return int(self._extremes["count"])

    @property
    def _extremes(self) -> Mapping[str, Tensor]:
        assert _EXTREMES is not None
        return self.gathered[_EXTREMES]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Observed):
            return NotImplemented
        if self.places != other.places or self.gathered.keys() != other.gathered.keys():
            return False
        return all(
            buffers.keys() == other.gathered[way].keys() and all(torch.equal(buffers[name], other.gathered[way][name]) for name in buffers)
            for way, buffers in self.gathered.items()
        )

    def __repr__(self) -> str:
        return f"Observed({', '.join(place.name for place in self.places)}: {self.low:g} to {self.high:g} in {self.count})"


class Observations(Mapping[str, Observed]):
    """The observations of every tensor whose scale is observed, by the tensor's name. Immutable; equal by value.

    Given to `prepare`, it sets scales without another calibration; `save` and `load` keep it in a file.
    """

    def __init__(self, observed: Iterable[Observed]) -> None:
        self._by_places = {entry.places: entry for entry in observed}
        self._by_name: dict[str, Observed] = {}
        for entry in self._by_places.values():
            name = ", ".join(place.name for place in entry.places)
            # A value that is quantized twice, for readers that distinguish different values, is there twice.
            self._by_name[f"{name} {_within(entry.places[0])}" if name in self._by_name else name] = entry

    def __getitem__(self, name: str) -> Observed:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"Observations({', '.join(self)})"

    def at(self, places: Places) -> Observed | None:
        """Return the observations in these places; None if there are none.

        The interval `within` depends on the dtype; observations with another interval are equal if no value reaches an end of either.
        """
        if (exact := self._by_places.get(places)) is not None:
            return exact
        everywhere = [replace(place, within=EVERYTHING) for place in places]
        for others, entry in self._by_places.items():
            if [replace(place, within=EVERYTHING) for place in others] == everywhere:
                ends = [place.within for place in (*places, *others)]
                if all(low < entry.low and entry.high < high for low, high in ends):
                    return entry
        return None

    def named(self, name: str) -> Iterator[Places]:
        """Return the places among which a tensor of this name was observed."""
        return (places for places in self._by_places if name in (place.name for place in places))


@checked()
def observations(prepared: nn.Module) -> Observations:
    """Return the observations of a calibration, to pass to `prepare` for another dtype, observer, mapping or target.

    They hold the smallest and largest value, the average of the batches' ranges and a histogram of each tensor, and the buffers of
    observers with other settings. They are a copy, which later calibration does not change. Changes by batches in state TRAIN are not
    a part of them. Tensors with a scale that was given, and 32-bit sums, are not observed. Raises NotCalibrated if nothing was observed.
    """
    require_prepared(prepared)
    all_observed = []
    for quantizer, places in _scales(prepared):
        if quantizer.observer is not None and all(observer.observed for observer in quantizer.observers):
            gathered = {
                way: {name: buffer.detach().cpu().clone() for name, buffer in observer.named_buffers()}
                for observer in quantizer.observers
                if observer is not quantizer.range and (way := gathering(observer)) is not None
            }
            all_observed.append(Observed(places, dict(sorted(gathered.items()))))
    if not all_observed:
        because = "no calibration batch has passed through it, or all of its scales were given, or are found at run time"
        remedy = "run fxq.calibrate(prepared, batches) first"
        raise NotCalibrated("nothing was observed in this model", because=because, remedy=remedy)
    return Observations(all_observed)


@torch.no_grad()
def restore(prepared: fx.GraphModule, observed: Observations) -> dict[str, str]:
    """Set every scale that the observations can give; returns the tensors whose scale they cannot, by name, and why.

    Raises ConfigurationError if they are of another model, so that not one of its tensors was observed.
    """
    _multiply(prepared, observed)
    needed = [(quantizer, places) for quantizer, places in _scales(prepared) if quantizer.observer is not None]
    reasons = [(quantizer, places, _missing(quantizer, places, observed)) for quantizer, places in needed]
    missing = {", ".join(place.name for place in places): because for _, places, because in reasons if because is not None}
    if needed and not any(observed.at(places) for _, places in needed):
        raise ConfigurationError(
            "the observations are of another model",
            because="; ".join(f"%{name}: {because}" for name, because in list(missing.items())[:4]),
            remedy="pass what fxq.observers.observations returned for this model, or calibrate it",
        )
    for quantizer, places, because in reasons:
        if because is not None:
            continue
        match = observed.at(places)
        assert match is not None
        for observer in quantizer.observers:
            way = gathering(observer)
            assert way is not None
            for name, buffer in observer.named_buffers():
                buffer.copy_(match.gathered[way][name])
        quantizer.update_scale()
    return missing


def _scales(prepared: nn.Module) -> list[tuple[Quantizer, Places]]:
    """Return every quantizer with the places that it observes."""
    assert isinstance(prepared, fx.GraphModule)
    nodes = {node.name: node for node in prepared.graph.nodes}
    channel_labels = channels(prepared)
    of_label = exponents(prepared, channel_labels)
    quantizers: dict[int, tuple[Quantizer, list[Place]]] = {}
    for name, operator in quantized_operators(prepared).items():
        node = nodes[name]
        if operator.owns_output:
            _, places = quantizers.setdefault(id(operator.output), (operator.output, []))
            places.append(_place(node, operator, of_label[channel_labels.tensors[node]]))
        if operator.intermediate is not None:
            place = Place(name + INTERMEDIATE, fused(node), str(fact(node)), EVERYTHING, _plainly(of_label[channel_labels.tensors[node]]))
            quantizers[id(operator.intermediate)] = (operator.intermediate, [place])
    return [(quantizer, tuple(places)) for quantizer, places in quantizers.values()]


def _multiply(prepared: fx.GraphModule, observed: Observations) -> None:
    """Give channels the factors that they were observed with, where all tensors that share them agree."""
    channel_labels = channels(prepared)
    low = torch.full((channel_labels.number,), LARGEST_EXPONENT, dtype=torch.int64, device="cpu")
    high = -low
    for node, labels in channel_labels.tensors.items():
        for places in observed.named(node.name):
            place = next(place for place in places if place.name == node.name)
            own = torch.tensor(place.exponents or [0], dtype=torch.int64, device="cpu")
            if len(own) in (1, labels.numel()):
                low.scatter_reduce_(0, labels.flatten(), own.expand(labels.numel()), "amin")
                high.scatter_reduce_(0, labels.flatten(), own.expand(labels.numel()), "amax")
    agreed = torch.where(low == high, low, 0)
    agreed[0] = 0
    multiply(prepared, channel_labels, agreed)


def _plainly(exponents: Tensor) -> tuple[int, ...]:
    return tuple(exponents.flatten().tolist()) if bool(exponents.any()) else ()


def _place(node: fx.Node, operator: QuantizedOperator, exponents: Tensor) -> Place:
    # A quantize passes on the float value it reads, which has one name whichever node quantizes it.
    value = node.args[0] if operator.operator is QUANTIZE else node
    assert isinstance(value, fx.Node)
    return Place(value.name, fused(value), str(fact(value)), operator.observed, _plainly(exponents))


def _missing(quantizer: Quantizer, places: Places, observed: Observations) -> str | None:
    """Return why the observations cannot give a scale; None if they can."""
    match = observed.at(places)
    if match is None:
        return _why_elsewhere(places, observed)
    for observer in quantizer.observers:
        way = gathering(observer)
        if way is None:
            return f"its observer {type(observer).__qualname__} collects statistics that no other observer collects"
        if way not in match.gathered or {name for name, _ in observer.named_buffers()} != match.gathered[way].keys():
            settings = ", ".join(f"{name}={value}" for name, value in way[1])
            return f"what {way[0]}({settings}) collects was not collected, since no observer had these settings"
    return None


def _why_elsewhere(places: Places, observed: Observations) -> str:
    """Return, in words, how a tensor differs from the one observed under its name."""
    for place in places:
        others = list(observed.named(place.name))
        if not others:
            return "it was not observed" if len(places) == 1 else f"%{place.name}, whose scale it shares, was not observed"
        before = next(other for other in others[0] if other.name == place.name)
        if before.fused != place.fused:
            return f"it was observed with {_holding(before)} fused into it, and has {_holding(place)} now"
        if before.shape != place.shape:
            return f"it was observed as {before.shape}, and is {place.shape} now"
        if before.within != place.within:
            reached = "" if EVERYTHING in (before.within, place.within) else ", and values reached an end of one of these"
            return f"it was observed {_within(before)}, and counts {_within(place)} now{reached}"
        if before.exponents != place.exponents:
            return "it was observed with equalization factors that its present readers, or tensors on its scale, do not have"
    return "it shares its scale with other tensors than those it was observed with"


def _holding(place: Place) -> str:
    return ", ".join(place.fused) or "nothing"


def _within(place: Place) -> str:
    low, high = place.within
    return "everywhere" if place.within == EVERYTHING else f"from {low:g} to {high:g}"
