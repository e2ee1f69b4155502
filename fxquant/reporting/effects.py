"""The effect of one tensor alone on the outputs: one batch is run through the float model with that tensor changed.

effect = mean over parts of the outputs of Σ(y' - y)² / Σy²
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.accuracy.measure import Noise, Parts, is_real
from fxquant.analysis.recording import GraphForm, Seen, outputs, still
from fxquant.ir.graph import is_parameter, resolve
from fxquant.reporting.statistics import Steps
from fxquant.reporting.tensor_rules import Judged
from fxquant.support import reached

Change = Callable[[str, Any, tuple[Any, ...]], Any]  # of a tensor's name, its value and what its node read


@dataclass(frozen=True)
class Inside:
    """The error that an operator itself makes on the operands of the other form."""

    noise: float  # Σ (f(v) - v')² of the batch, of the operator f in float, the other form's operands v and its result v'
    signal: float  # Σ f(v)²
    effect: float  # the effect of that error alone on the outputs
    constants: Mapping[str, Tensor]  # its other operands: parameters and buffers, by name


class Effects:
    """Measures the effects of errors on the outputs of the float model, on one batch; each measurement is one run.

    others   the other form's tensors, with the float model's channel factors, by the float model's names
    parts    the parts of outputs, which have equal weight
    outputs  the float model's outputs; noise is the error of `results`, the other form's outputs by index, against them
    measured  the measured effects of single tensors, by name
    """

    def __init__(
        self, form: GraphForm, inputs: Sequence[Any], others: Mapping[str, Tensor], results: Mapping[int, Tensor], parts: Parts | None
    ) -> None:
        self.model, self.nodes, self.inputs, self.others = form.model, form.nodes, list(inputs), others
        self.state, self.parts, self.measured = form.state, parts, dict[str, float]()
        self.outputs = self._run((), lambda name, value, read: value)
        there = [place for place in results if place < len(self.outputs)]
        changed = [results[place].to(self.outputs[place].device) for place in there]
        self.noise = self.distance(changed, [self.outputs[place] for place in there])

    def distance(self, actual: Sequence[Tensor], expected: Sequence[Tensor] | None = None) -> float:
        """Return the mean noise of the parts of the outputs `actual` against `expected`, by default the float model's outputs."""
        return noise(*(self._apart(side) for side in (self.outputs if expected is None else expected, actual)))

    def _apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        real = [value for value in outputs if is_real(value)]
        if self.parts is None or len(real) != len(self.parts.labels):
            return outputs
        return [part for parts in self.parts.of(real) for _, part in parts]

    def of_grids(self, tensors: Iterable[Judged], steps: Steps | None = None) -> float:
        """Return the effect of quantizing these tensors together, each with its own scale, or all with `steps`."""
        with_grids = [(each, grid) for each in tensors if (grid := steps or each.statistics.steps) is not None]
        grids = {each.reference: (grid, each.factors) for each, grid in with_grids}
        return self.distance(self._run(grids, lambda name, value, read: _rounded(value, *grids[name])))

    def of(self, tensor: Judged) -> float:
        """Return the effect of quantizing one tensor with its scale; it is measured once."""
        if tensor.name not in self.measured:
            self.measured[tensor.name] = self.of_grids([tensor])
        return self.measured[tensor.name]

    def of_channels(self, reference: str, steps: Steps, exponents: Tensor | None, axis: int, chosen: Tensor) -> float:
        """Return the share of noise in the output elements that change if only `chosen`, bool (channels,) along `axis`, is rounded."""

        def change(name: str, value: Any, read: tuple[Any, ...]) -> Any:
            shape = [-1 if dim == axis % value.dim() else 1 for dim in range(value.dim())]
            return torch.where(chosen.to(value.device).reshape(shape), _rounded(value, steps, exponents), value)

        both = zip(self.outputs, self._run((reference,), change), strict=True)
        pairs = [(one[moved], other[moved]) for one, other in both if bool((moved := one != other).any())]
        return noise([one for one, _ in pairs], [other for _, other in pairs])

    def local_errors(self) -> dict[str, Tensor]:
        """Return for each tensor v' of the other form v' - f(w'), of the operator f in float and the other form's operands w'."""
        errors: dict[str, Tensor] = {}

        def see(name: str, value: Any, read: tuple[Any, ...]) -> Any:
            other = self.others[name]
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != other.shape:
                return value
            errors[name] = torch.nan_to_num(other.double() - value.double(), nan=0.0, posinf=0.0, neginf=0.0)
            return other.to(value.dtype)

        self._run(self.others, see)
        return errors

    def of_errors(self, errors: Mapping[str, Tensor]) -> float:
        """Return the effect of adding these errors to tensors of the float model."""
        return self.distance(self._run(errors, lambda name, value, read: (value.double() + errors[name]).to(value.dtype)))

    def operands(self, names: Sequence[str]) -> list[str] | None:
        """Return the operands of the nodes of these names, which became one tensor of the other form; None if there are none."""
        _, read = self._region(names)
        return [each.name for each in read] or None

    def hidden(self, names: Sequence[str]) -> list[str]:
        """Return the nodes between the operands and these nodes, which the other form splits; modules with parameters first."""

        def holds(node: fx.Node) -> bool:
            module = resolve(self.model, str(node.target)) if node.op == "call_module" else None
            return isinstance(module, nn.Module) and next(module.parameters(), None) is not None

        return [node.name for node in sorted(self._region(names)[0], key=lambda node: not holds(node))]

    def _region(self, names: Sequence[str]) -> tuple[list[fx.Node], list[fx.Node]]:
        group = [self.nodes[name] for name in names if name in self.nodes and self.nodes[name].op != "placeholder"]

        def is_end(node: fx.Node) -> bool:
            return node in group or is_parameter(node) or node.name in self.others

        near = reached([each for node in group for each in node.all_input_nodes], lambda node: () if is_end(node) else node.all_input_nodes)
        outside = [node for node in near if node not in group and not is_parameter(node)]
        hidden = [node for node in outside if node.name not in self.others and node.op != "placeholder"]  # an input is the same for both
        return hidden, [node for node in outside if node.name in self.others]

    def inside(self, names: Sequence[str]) -> Inside | None:
        """Return the error that the operator at these nodes makes, the first node being its result; None without known operands."""
        read, reference = self.operands(names), names[0]
        if read is None:
            return None
        float_values: list[Tensor] = []

        def see(name: str, value: Any, _: tuple[Any, ...]) -> Any:
            if name == reference:
                float_values.append(value)
                return value
            return self.others[name].to(value.dtype) if isinstance(value, Tensor) else value

        self._run((*read, reference), see)
        if self.others[reference].shape != float_values[0].shape:  # of all steps of a loop, of which one is seen
            return None
        error = torch.nan_to_num(self.others[reference].double() - float_values[0].double(), nan=0.0, posinf=0.0, neginf=0.0)
        signal = torch.nan_to_num(float_values[0].double(), nan=0.0, posinf=0.0, neginf=0.0)
        return Inside(float(error.square().sum()), float(signal.square().sum()), self.of_errors({reference: error}), self._constants(names))

    def _constants(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors: dict[str, Any] = {}
        nodes = [each for name in names if name in self.nodes for each in (self.nodes[name], *self.nodes[name].all_input_nodes)]
        for path in [str(node.target) for node in nodes if node.op in ("get_attr", "call_module")]:
            value = resolve(self.model, path)
            tensors |= dict(value.named_parameters(path)) if isinstance(value, nn.Module) else {path: value}
        return {name: value for name, value in tensors.items() if is_real(value)}

    def of_batch_statistics(self, name: str, mended: Sequence[str] = ()) -> float:
        """Return the effect of normalizing one batch norm with the batch's statistics, in addition to the `mended` ones."""
        expected = self._run(mended, self._with_own) if mended else self.outputs
        return self.distance(self._run((*mended, name), self._with_own), expected)

    def _with_own(self, name: str, value: Any, read: tuple[Any, ...]) -> Tensor:
        norm = resolve(self.model, str(self.nodes[name].target))
        return F.batch_norm(read[0], None, None, norm.weight, norm.bias, True, 0.0, norm.eps)

    def moved_statistics(self, mended: Sequence[str] = ()) -> dict[str, MovedStatistics]:
        """Return the difference of this batch's statistics from the running ones of every batch norm, by node, in the order they run.

        The `mended` batch norms normalize with the batch's statistics, so that they do not disturb later batch norms.
        """
        moved: dict[str, MovedStatistics] = {}

        def see(name: str, value: Any, read: tuple[Any, ...]) -> Any:
            moved[name] = MovedStatistics.of(resolve(self.model, str(self.nodes[name].target)), read[0])
            return self._with_own(name, value, read) if name in mended else value

        modules = {name: resolve(self.model, str(node.target)) for name, node in self.nodes.items() if node.op == "call_module"}
        kind = nn.modules.batchnorm._BatchNorm
        norms = [name for name, module in modules.items() if isinstance(module, kind) and isinstance(module.running_mean, Tensor)]
        if norms:
            self._run(norms, see)
        return moved

    def _run(self, names: Collection[str], change: Change) -> list[Tensor]:
        """Run the model and return its outputs, with `change` applied to the tensors of these names."""

        def see(node: fx.Node, value: Any, read: tuple[Any, ...]) -> Any:
            return change(node.name, value, read) if node.name in names else value

        with torch.no_grad(), still(self.model, self.state):
            result = Seen(self.model, see).run(*[value.clone() if isinstance(value, Tensor) else value for value in self.inputs])
        return list(outputs(result).values())


def shifted(value: Tensor, exponents: Tensor | None) -> Tensor:
    """Return value · 2**exponents (float64), where `exponents` has the shape of a sample; the value itself if `exponents` is None."""
    return value if exponents is None else torch.ldexp(value.double(), exponents.unsqueeze(0).to(value.device))


def _rounded(value: Any, steps: Steps, exponents: Tensor | None) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    finite = torch.nan_to_num(shifted(value, exponents), nan=0.0)
    rounded = shifted(steps.rounded(finite), None if exponents is None else -exponents)
    return torch.where(torch.isinf(value), value, rounded.to(value.dtype))


def noise(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the mean noise of floating-point outputs of one shape, over values that are finite in both forms, without outputs of 0."""
    pairs = [(one, other) for one, other in zip(expected, actual, strict=True) if is_real(one) and one.shape == other.shape]
    both = [(one[there], other[there]) for one, other in pairs if bool((there := torch.isfinite(one) & torch.isfinite(other)).any())]
    pairs = [pair for pair in both if bool(pair[0].any())]
    return Noise.of([[one for one, _ in pairs]], [[other for _, other in pairs]]).pooled


@dataclass(frozen=True)
class MovedStatistics:
    """The difference between a batch's statistics and the running statistics of a batch norm."""

    initial: tuple[str, ...]  # the running statistics that still have their initial value: "means of 0", "variances of 1", both, or none
    mean: float  # the root mean square over channels of the difference of means, in running standard deviations
    variance: float  # the batch's variance over the running one: the geometric mean over channels

    @staticmethod
    def of(norm: Any, value: Tensor) -> MovedStatistics:
        """Return the difference for a batch norm with this operand."""
        dims = [dim for dim in range(value.dim()) if dim != 1]
        real = value.double()
        mean, variance = real.mean(dims), real.var(dims, correction=0)
        kept_mean, kept_variance = norm.running_mean.double(), norm.running_var.double()
        new = {"means of 0": (kept_mean == 0).all(), "variances of 1": (kept_variance == 1).all()}
        initial = tuple(what for what, there in new.items() if bool(there))
        shift = (mean - kept_mean) / (kept_variance + norm.eps).sqrt()
        ratio = (variance + norm.eps) / (kept_variance + norm.eps)
        return MovedStatistics(initial, float(shift.square().mean().sqrt()), float(ratio.log().mean().exp()))
