"""Rules for the problems of one tensor, in one table.

A rule returns the cause, the cure, and the share of the tensor's own error that the cure would leave.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.accuracy.observe import LOST
from fxquant.analysis.recording import Facts, Form, GraphForm
from fxquant.ir.graph import model_meta, resolve
from fxquant.reporting.statistics import TensorStatistics
from fxquant.support import reached
from fxquant.target import Target

WIDE = "int16"
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Cures:
    """Writes rules of a mapping for the tensors of a comparison, which advice tells the user to give to `prepare`.

    A rule names an operator as the float model's graph does, or the user's module. An input of the model has no operator that computes
    it: its rule is that of the operators that read it, by their `input=`. An inner tensor of a composite operator has none.
    """

    def __init__(self, left: Form, right: Form, prepared: fx.GraphModule | None = None) -> None:
        assert isinstance(left, GraphForm)
        self.model, self.nodes = left.model, left.nodes
        models = [form.model for form in (right, left) if isinstance(form, GraphForm)] + [prepared] * (prepared is not None)
        targets = [target for model in models if isinstance(target := model_meta(model).get("target"), Target)]
        self.target: Target | None = targets[0] if targets else None
        self.known = right.facts
        self.integer = {each for name, facts in right.facts.items() if facts.grid is not None for each in (name, *facts.fused)}

    @property
    def has_wide(self) -> bool:
        """Whether the target has int16 activations; True for an unknown target."""
        return self.target is None or WIDE in self.target.activations

    def wider(self, name: str, reference: str) -> str:
        """More bits for this tensor of the second form, or float where the target has no more, as a sentence without its end."""
        if not self.has_wide:
            assert self.target is not None
            in_float = self.in_float(name, reference)
            return f"{self.target.name} has no {WIDE} activations" + (f": leave what computes it in float, {in_float}" if in_float else "")
        rule = self.activation(name, reference, f"ActivationConfig({WIDE!r})")
        return f"{WIDE} for it: {rule}" if rule else "no rule changes this inner tensor alone: leave the operator that has it in float"

    def apart(self, what: str, name: str, reference: str) -> str:
        """Return a cure for tensors or channels with one scale: the change `what` of the model, or more bits, or float."""
        floats = self.in_float(name, reference)
        return f"{what}; or {self.wider(name, reference)}" + (f"; or leave it in float, {floats}" if floats and self.has_wide else "")

    def activation(self, name: str, reference: str, config: str) -> str:
        """Return the rule that gives a tensor this ActivationConfig; "" where there is none."""
        if self._is_input(reference):
            both, own = f"QConfig({config}, input={config})", f"QConfig(input={config})"  # a reader that passes values on has their grid
            return _mapping({each: both if self._passes_on(each, name) else own for each in self._readers(reference)})
        return _mapping({name: f"QConfig({config})"} if name in self.nodes else {})

    def weight(self, name: str) -> str:
        """Return a cure that makes the weight of an operator of the float model's graph more exact."""
        if self.target is None or WIDE in self.target.weights:  # as far as it is known
            return f"one of more bits is nearer: {_mapping({name: f'QConfig(weight=WeightConfig({WIDE!r}))'})}"
        rule = _mapping({name: "None"})
        return f"{self.target.name} has no {WIDE} weights: fxq.tuning.adaround(prepared, batches), or leave it in float, {rule}"

    def in_float(self, name: str, reference: str) -> str:
        """Return the code that keeps a tensor's operator, or an input's readers, in float; "" if there are none."""
        return _mapping(dict.fromkeys(self._readers(reference) if self._is_input(reference) else [name] * (name in self.nodes), "None"))

    def _is_input(self, reference: str) -> bool:
        return reference in self.nodes and self.nodes[reference].op == "placeholder"

    def _readers(self, reference: str) -> list[str]:
        """Return the operators on integers that read an input of the model, as rules name them."""

        def counts(node: fx.Node) -> bool:
            parts = any(each.startswith(f"{node.name}_") for each in self.known)  # of an operator that became several
            return node.name in self.integer or parts or self._is(node, DROPOUTS)  # which no integer model has

        # No prepared model has an identity: what reads it counts.
        readers = reached(self.nodes[reference].users, lambda node: node.users if self._is(node, nn.Identity) else ())
        return [node.name for node in readers if node.op != "output" and not self._is(node, nn.Identity) and counts(node)]

    def _is(self, node: fx.Node, kinds: Any) -> bool:
        """Return whether a node is the call of a module, and the module is an instance of one of these classes."""
        return node.op == "call_module" and isinstance(resolve(self.model, str(node.target)), kinds)

    def _passes_on(self, reader: str, tensor: str) -> bool:
        """Return whether an operator has its operand's grid: it only moves values."""
        if reader in self.known and tensor in self.known:
            return self.known[reader].grid == self.known[tensor].grid
        return self._is(self.nodes[reader], DROPOUTS)


def _mapping(rules: Mapping[str, str]) -> str:
    return "QConfigMapping()" * bool(rules) + "".join(f".set_module_name({name!r}, {config})" for name, config in rules.items())


GAP = 32.0  # how many times as large as all others the values of a mask are
OUTLIER = 8.0  # how many times as large as in the median channel
OUTSIDE = 2.0  # how many times as far as calibration's the range of an input is
UNUSED = 8.0  # how many times as far the grid of an input reaches
POOR = 15.0  # dB at the outputs below which a tensor deserves more bits


@dataclass(frozen=True)
class Judged:
    """The facts of one tensor that rules read."""

    name: str  # in the second form
    facts: Facts  # of it there
    statistics: TensorStatistics  # of it and its reference
    reference: str  # the name of that in the first form
    is_input: bool  # whether that is an input of the model
    factors: Tensor | None  # the exponents that the reference is multiplied by 2 to; None without any

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the first form's nodes that became the tensor: its reference, its own name, and the nodes fused into it."""
        return (self.reference, self.name, *self.facts.fused)


@dataclass(frozen=True)
class Found:
    """The finding of a rule: the cause, the cure, and the share of the tensor's own squared error that the cure would leave."""

    cause: str
    cure: str
    left: float


Rule = Callable[[Judged, Cures], "Found | None"]


def _left(tensor: Judged, noise: float) -> float:
    now = tensor.statistics.noise_at(1.0)
    return min(noise / now, 1.0) if now > 0 else 1.0


def input_range(tensor: Judged, cures: Cures) -> Found | None:
    """Detect an input with values that calibration has not seen."""
    statistics = tensor.statistics
    if not tensor.is_input or statistics.steps is None or 1 / UNUSED < statistics.reach < OUTSIDE:
        return None
    ends = f"{statistics.steps.low * statistics.steps.scale:.4g} to {statistics.steps.high * statistics.steps.scale:.4g}"
    cause = f"input {tensor.reference} has values from {statistics.low:.4g} to {statistics.high:.4g}, and its grid is from {ends}"
    cure = (
        "give the model what it was calibrated with (the same scaling, mean and standard deviation), or calibrate with batches like these; "
        "if the scale was given, leave that out"
    )
    return Found(cause, cure, _left(tensor, statistics.noise_at(statistics.best_factor())))


def masked(tensor: Judged, cures: Cures) -> Found | None:
    """Detect a few equal values far beyond all others, which stretch the scale."""
    data = tensor.statistics
    gap = data.populations() if data.steps is not None else None
    if data.steps is None or gap is None or gap[1] < GAP * gap[0]:
        return None
    count, spread = data.above(gap[1])
    limit = max(data.steps.high, -data.steps.low)
    if spread > 4 or gap[1] < limit / 8 or gap[0] > limit:  # a grid that ends before the other values do is too small, mask or not
        return None
    if data.channels is not None and data.low >= -gap[0] * data.steps.scale:  # no mask, which would be negative
        far = int((data.channels > gap[0] * data.steps.scale).sum())
        if 4 * far <= len(data.channels):
            return None
    cause = (
        f"{count} values are beyond {gap[1] * data.steps.scale:.3g}, and all others below {gap[0] * data.steps.scale:.3g}: a mask sets the "
        f"scale, {data.steps.scale:.3g}, and {100 * data.zeroed / max(data.nonzero, 1):.0f} % of the values that are not 0 become 0"
    )
    step = data.steps.scale * gap[0] / limit  # of the values below the gap; those above it do not count in what is left
    return Found(cause, mask_cure(gap[0] * data.steps.scale), _left(tensor, data.elements * step * step / 12))


def rounds_to_zero(tensor: Judged, cures: Cures) -> Found | None:
    """Most of an input's values are nearer to 0 than half a step."""
    data = tensor.statistics
    if not tensor.is_input or data.steps is None or data.nonzero < 2 or data.zeroed < LOST * data.nonzero:
        return None
    cause = (
        f"{100 * data.zeroed / data.nonzero:.0f} % of the values of input {tensor.reference} that are not 0 become 0: its largest values, "
        f"up to {max(abs(data.low), abs(data.high)):.4g}, set its scale, {data.steps.scale:.4g}"
    )
    cure = f"{cures.wider(tensor.name, tensor.reference)}; or give the model its logarithm or its root, before it or in training"
    return Found(cause, cure, 2.0**-16 if cures.has_wide else 1.0 / 16)


def outlier_channel(tensor: Judged, cures: Cures) -> Found | None:
    """Detect one channel, or a few, that reach much further than the others, and set the scale for all."""
    statistics = tensor.statistics
    if statistics.channels is None or statistics.steps is None or len(statistics.channels) < 4:
        return None
    largest, where = statistics.channels.max(0)
    median = statistics.channels.median()
    if median <= 0 or largest < OUTLIER * median:
        return None
    limit = max(statistics.steps.high, -statistics.steps.low)
    own = torch.minimum(statistics.channels / limit, torch.tensor(statistics.steps.scale, dtype=torch.float64, device="cpu"))
    noise = float((own.square() / 12).mean()) * statistics.elements
    many = int((statistics.channels >= OUTLIER * median).sum())
    cause = (
        f"channel {int(where)} reaches {float(largest):.4g}, {float(largest / median):.0f} times as far as the median channel, "
        f"and sets one scale for all; {many} of {len(statistics.channels)} channels reach {OUTLIER:.0f} times as far or more"
    )
    cure = (
        "fxq.tuning.equalize(prepared, batches), where calibrate had the option equalize=False; otherwise "
        f"{cures.wider(tensor.name, tensor.reference)}"
    )
    return Found(cause, cure, _left(tensor, noise))


def _observed(tensor: Judged, cures: Cures, observer: str) -> str:
    config = f"ActivationConfig(observer=fxq.observers.{observer}())"
    return cures.activation(tensor.name, tensor.reference, config) or f"QConfig({config}) for the operator that it is inside of"


def scale_too_small(tensor: Judged, cures: Cures) -> Found | None:
    """Detect a grid that ends long before the values do."""
    observed = tensor.statistics
    if observed.steps is None or observed.truncation <= 3 * observed.rounding:
        return None
    factor = observed.best_factor()
    if factor <= 1:
        return None
    share = 100 * observed.clipped / max(observed.elements, 1)
    cause = (
        f"its scale, {observed.steps.scale:.4g}, is about {factor:.2g} times too small: {share:.2g} % of its values are clipped, and they "
        f"reach {observed.reach:.2g} times as far as its grid"
    )
    cure = (
        "calibrate again with batches like these; if the scale was given or frozen, leave that out; if the observer clips, take one that "
        f"does so less: {_observed(tensor, cures, 'MinMaxObserver')}"
    )
    return Found(cause, cure, _left(tensor, observed.noise_at(factor)))


def scale_too_large(tensor: Judged, cures: Cures) -> Found | None:
    """Detect a quantization range that reaches far beyond the values."""
    values = tensor.statistics
    if values.steps is None or values.truncation > 3 * values.rounding or (values.reach >= 0.5 and values.zeroed < 0.2 * values.nonzero):
        return None
    factor = values.best_factor()
    if factor >= 1 / 2:
        return None
    cause = (
        f"its scale, {values.steps.scale:.4g}, is about {1 / factor:.2g} times too large: "
        f"{100 * values.zeroed / max(values.nonzero, 1):.0f} % of the values that are not 0 become 0"
    )
    cure = (
        "calibrate again with batches like these; if rare, large values set the scale, take an observer that leaves them out: "
        f"{_observed(tensor, cures, 'MSEObserver')}, or let fxq.tune try them"
    )
    return Found(cause, cure, _left(tensor, values.noise_at(factor)))


SCALES = ("scale_too_small", "scale_too_large")
RULES: tuple[Rule, ...] = (input_range, masked, rounds_to_zero, outlier_channel, scale_too_small, scale_too_large)


def mask_cure(reaches: float) -> str:
    """Return the cure for a mask whose other values reach so far."""
    return (
        f"mask with a number as large as the other values (about {-4 * reaches:.3g}), or a boolean mask: torch.where or masked_fill "
        "after this layer, or directly before a softmax, which keeps masks out of the scale"
    )


def own_error(tensor: Judged) -> float:
    """Σ of the squared error that its grid alone makes of it, over Σ of its squares."""
    statistics = tensor.statistics
    return (statistics.truncation + statistics.rounding) / statistics.signal if statistics.signal else 0.0
