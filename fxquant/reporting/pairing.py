"""Two forms of a model side by side: the pairs of tensors, and the statistics that are kept of each pair over the batches.

Tensors of a recurrence that are alike at each of its steps are one pair, under the name of the first. A float model has none of them; they
are compared with those of the prepared model in float.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxquant.analysis.fused import alike, recurrent_parts
from fxquant.analysis.layers import layers
from fxquant.analysis.recording import Form, GraphForm, Values
from fxquant.ir.graph import stage_of
from fxquant.numerics.grids import EVERYTHING
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import State
from fxquant.reporting.effects import Effects
from fxquant.reporting.model_forms import pairs, shift, shifted
from fxquant.reporting.statistics import Steps, TensorStatistics
from fxquant.reporting.tensor_rules import Judged
from fxquant.support.progress import in_one_piece


class Pairing:
    """Two forms, and the pairs of their tensors.

    left, right  the forms; the left one is the reference
    inner        the prepared model in float, that parts of recurrences are compared with; None where there is none, or no need
    found        for every name of the right form that of its reference
    inside       the names of `found` whose reference is of `inner`
    parts        the names of parts of recurrences that the left form does not have
    limits       the interval of a tensor beyond which values make no difference to what reads it
    factors      for every name the exponents that its reference is multiplied by 2 to; None without any
    firsts       for a tensor of a later step of a recurrence, the name of the first one that is like it
    seen         what was kept of each pair by the right form's name, and of each output
    """

    def __init__(self, left: Form, right: Form, prepared: fx.GraphModule | None) -> None:
        self.left, self.right = left, right
        self.found = pairs(left, right)
        self.factors: dict[str, Any] = {name: shift(left, right, name, reference) for name, reference in self.found.items()}
        self.firsts: dict[str, str] = {}
        self.inner: GraphForm | None = None
        self.inside: frozenset[str] = frozenset()
        self.parts: frozenset[str] = frozenset()
        self.limits: dict[str, tuple[float, float]] = {}
        self.seen: dict[str, TensorStatistics] = {}
        model = right.model if isinstance(right, GraphForm) else None
        if model is not None:
            known = layers(model)
            self.firsts = {other.name: layer.name for layer, others in alike(known) for other in others}
            self.parts = recurrent_parts(known) & right.facts.keys() - self.found.keys()
            prepared = model if stage_of(model) == "PREPARED" else prepared
            if self.parts and prepared is not None and left.real:
                self._compare_parts(prepared)
        for name, operator in ({} if prepared is None else quantized_operators(prepared)).items():
            if operator.observed != EVERYTHING and self.factors.get(name, 0) is None:
                self.limits[name] = operator.observed

    def _compare_parts(self, prepared: fx.GraphModule) -> None:
        self.inner = GraphForm(prepared, State.FLOAT)
        self.inside = self.parts & self.inner.facts.keys()
        operators = quantized_operators(prepared)
        for name in self.inside:
            steps = Steps.of(self.right.facts[name].grid)
            if steps is not None and operators[name].output.observer is None:
                self.limits[name] = steps.low * steps.scale, steps.high * steps.scale
        order = {name: index for index, name in enumerate(self.right.facts)}
        for name in self.inside:
            self.found[name] = name
            self.factors[name] = shift(self.inner, self.right, name, name)
        self.found = dict(sorted(self.found.items(), key=lambda pair: order[pair[0]]))

    def add(self, batch: Any, index: int) -> tuple[list[Any], Values]:
        """Take one batch into account; returns the inputs of the left form, and the values of the right one."""
        inputs = self.left.inputs(batch, index)
        mine = self.left.values(inputs, [self.found[name] for name in self.found if name not in self.inside])
        inner: Values = {}
        if self.inner is not None:
            inner = self.inner.values(self.inner.inputs(batch, index), list(self.inside))
        theirs = self.right.values(self.right.inputs(batch, index), list(self.found))
        with in_one_piece():
            for name, value in theirs.items():
                reference = inner.get(name) if name in self.inside else mine.get(self.found.get(name, name))
                if reference is None or reference.shape != value.shape or reference.is_complex():
                    continue
                if name in self.limits:
                    reference, value = (each.clamp(*self.limits[name]) for each in (reference, value))
                first = self.firsts.get(name, name)
                if first not in self.seen:
                    known = self.right.facts.get(first)
                    axis = None if reference.dim() < 2 else 1 if reference.dim() > 3 else -1  # of channels: after the batch in maps
                    self.seen[first] = TensorStatistics(None if known is None else known.grid, axis)
                self.seen[first].add(shifted(reference, self.factors.get(name)), value)
        return inputs, theirs

    def effects(self, inputs: list[Any], values: Values) -> Effects:
        """Return the effects of errors of single tensors on the outputs, on one batch."""
        others = {
            self.found[name]: shifted(value, None if (exponents := self.factors[name]) is None else -exponents)
            for name, value in values.items()
            if name in self.found and name not in self.inside
        }
        results = {int(name.removeprefix("output ")): value for name, value in values.items() if name.startswith("output ")}
        assert isinstance(self.left, GraphForm)
        return Effects(self.left, inputs, others, results)

    def judged(self) -> list[Judged]:
        """Return the pairs in the order of the right form, one for tensors of a recurrence that are alike."""
        members: dict[str, list[str]] = {}
        for name, reference in self.found.items():
            members.setdefault(self.firsts.get(name, name), []).append(reference)
        return [
            Judged(name, self.right.facts[name], self.seen[name], first, first in self.left.input_names, tuple(later))
            for name, (first, *later) in members.items()
            if name in self.seen
        ]

    def unmatched(self) -> tuple[str, ...]:
        """Tensors of the right form that have no reference."""
        return tuple(name for name in self.right.facts if self.firsts.get(name, name) not in self.seen)
