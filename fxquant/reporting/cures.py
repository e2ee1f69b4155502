"""Rules of a mapping that change how one tensor, or one weight, is quantized: advice tells the user to give them to `prepare`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from fxquant.analysis.recording import Form, GraphForm
from fxquant.ir.graph import model_meta, resolve
from fxquant.target import Target

WIDE = "int16"
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Cures:
    """Writes rules for the tensors of a comparison.

    A rule names an operator as the float model's graph does, or the user's module. An input of the model has no operator that computes
    it: its rule is that of the operators that read it, by their `input=`. An inner tensor of a composite operator has none.
    """

    def __init__(self, left: Form, right: Form, prepared: fx.GraphModule | None = None) -> None:
        assert isinstance(left, GraphForm)
        self.model, self.nodes = left.model, left.nodes
        models = [form.model for form in (right, left) if isinstance(form, GraphForm)] + [prepared] * (prepared is not None)
        found = [target for model in models if isinstance(target := model_meta(model).get("target"), Target)]
        self.target: Target | None = found[0] if found else None
        self.known = right.facts
        self.integer = {each for name, facts in right.facts.items() if facts.grid is not None for each in (name, *facts.fused)}

    @property
    def has_wide(self) -> bool:
        """Whether the target computes with int16 activations, as far as it is known."""
        return self.target is None or WIDE in self.target.activations

    def wider(self, name: str, reference: str) -> str:
        """More bits for this tensor of the second form, or float where the target has no more, as a sentence without its end."""
        if not self.has_wide:
            assert self.target is not None
            kept = self.in_float(name, reference)
            return f"{self.target.name} has no {WIDE} activations" + (f": leave what computes it in float, {kept}" if kept else "")
        rule = self.activation(name, reference, f"ActivationConfig({WIDE!r})")
        return f"{WIDE} for it: {rule}" if rule else "no rule changes this inner tensor alone: leave the operator that has it in float"

    def apart(self, what: str, name: str, reference: str) -> str:
        """Return a cure of tensors, or channels, on one grid: what to change in the model, or more bits, or float."""
        floats = self.in_float(name, reference)
        return f"{what}; or {self.wider(name, reference)}" + (f"; or leave it in float, {floats}" if floats and self.has_wide else "")

    def activation(self, name: str, reference: str, config: str) -> str:
        """Return the rule that gives a tensor this ActivationConfig; "" where there is none."""
        if self._is_input(reference):
            both = f"QConfig({config}, input={config})"  # for a reader that passes values on, whose result has their grid
            return _mapping(
                {each: both if self._passes_on(each, name) else f"QConfig(input={config})" for each in self._readers(reference)}
            )
        return _mapping({name: f"QConfig({config})"} if name in self.nodes else {})

    def weight(self, name: str) -> str:
        """Return a cure that makes the weight of an operator of the float model's graph more exact."""
        if self.target is None or WIDE in self.target.weights:  # as far as it is known
            return f"one of more bits is nearer: {_mapping({name: f'QConfig(weight=WeightConfig({WIDE!r}))'})}"
        assert self.target is not None
        kept = _mapping({name: "None"})
        return f"{self.target.name} has no {WIDE} weights: fxq.tuning.adaround(prepared, batches), or leave it in float, {kept}"

    def in_float(self, name: str, reference: str) -> str:
        """Return the rule that leaves in float what computes a tensor, or what reads an input; "" where there is none."""
        names = self._readers(reference) if self._is_input(reference) else [name] * (name in self.nodes)
        return _mapping(dict.fromkeys(names, "None"))

    def _is_input(self, reference: str) -> bool:
        return reference in self.nodes and self.nodes[reference].op == "placeholder"

    def _readers(self, reference: str) -> list[str]:
        """Return the operators on integers that read an input of the model, as rules name them."""
        found: dict[str, None] = {}
        waiting = list(self.nodes[reference].users)
        while waiting:
            node = waiting.pop(0)
            if node.op == "output":
                continue
            module = resolve(self.model, str(node.target)) if node.op == "call_module" else None
            if isinstance(module, nn.Identity):  # which no prepared model has
                waiting += node.users
            elif node.name in self.integer or self._has_parts(node.name) or isinstance(module, DROPOUTS):  # which no integer model has
                found[node.name] = None
        return list(found)

    def _passes_on(self, reader: str, tensor: str) -> bool:
        """Return whether an operator has its operand's grid: it only moves values."""
        if reader in self.known and tensor in self.known:
            return self.known[reader].grid == self.known[tensor].grid
        return (
            isinstance(resolve(self.model, str(self.nodes[reader].target)), DROPOUTS) if self.nodes[reader].op == "call_module" else False
        )

    def _has_parts(self, name: str) -> bool:
        """Return whether an operator of the float model became several, which are named after it."""
        return any(known.startswith(f"{name}_") for known in self.known)


def _mapping(rules: Mapping[str, str]) -> str:
    return "QConfigMapping()" * bool(rules) + "".join(f".set_module_name({name!r}, {config})" for name, config in rules.items())
