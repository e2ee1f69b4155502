"""The quantization choices of a prepared model: its tensors and weights, and the mapping that sets how each is quantized.

A *choice* is the weight of a layer, or a quantized tensor, or a group of tensors with one scale, whose operator demands no dtype.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fxquant.accuracy.states import enter, in_float, require_prepared
from fxquant.accuracy.walk import constant_arguments, weight_of
from fxquant.analysis.explain import broken_limits
from fxquant.analysis.layers import layers
from fxquant.ir.graph import annotate, annotation, is_inner_part, matched_rules, module_path, part, stated_demand
from fxquant.ir.model import autocast_off
from fxquant.numerics.grids import ACTIVATION_TYPES, UINT8, WEIGHT_TYPES
from fxquant.ops import Own, Trait
from fxquant.ops.core.composite import QUANTIZE
from fxquant.passes.rewriting import decide
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.stage import quantized_operator
from fxquant.prepared.undo import Having, Snapshot, having, inside_operators, tensors_of
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import DEFAULT, ActivationConfig, QConfig, QConfigMapping, State, prefixes

ACTIVATION, WEIGHT = "activation", "weight"


@dataclass(frozen=True, eq=False)
class Choice:
    """A tensor, or a weight, that can have one of several dtypes."""

    name: str  # the node whose result it is, the first one of a shared scale; of a weight the layer's name with ".weight"
    kind: str  # "activation" or "weight"
    dtype: str  # the current dtype
    dtypes: tuple[str, ...]  # the possible dtypes, the narrowest first
    operators: tuple[QuantizedOperator, ...]  # the operators that compute the tensors, or the one that holds the weight
    elements: int  # the number of elements: of the weight, or of the tensors for one item of the batch
    macs: int  # the multiply-accumulates, for one item, that read it
    passes: int = 1  # the number of reads and writes: 1 for a weight; for a tensor 1 write and one read per reader

    def bytes(self, dtype: str) -> float:
        """Return its size in bytes in this dtype; two int4 take one byte."""
        return self.elements * bits(dtype) / 8


@dataclass(frozen=True)
class Products:
    """The sums of products of one layer: their number, and their factors: a tensor, and a weight or another tensor."""

    layer: str
    macs: int
    left: str  # left, right: names of choices; "" for a side without a choice
    right: str
    width: tuple[int, int]  # the bits of each side that has no choice


class Choices(Mapping[str, Choice]):
    """The activations and weights whose dtypes a search may choose, by name, in the order they run."""

    def __init__(self, prepared: fx.GraphModule, widths: Sequence[int] = (4, 8, 16)) -> None:
        self.prepared = prepared
        self.nodes = {node.name: node for node in prepared.graph.nodes}
        self.known = {layer.name: layer for layer in layers(prepared)}
        self._of: dict[int, Choice] = {}  # by the identity of a quantizer
        choices = [*self._activations(widths), *self._weights(widths)]
        order = {name: index for index, name in enumerate(self.nodes)}
        choices.sort(key=lambda choice: (order[choice.operators[0].name], choice.kind == WEIGHT))
        self._by_name = {choice.name: choice for choice in choices}
        self.products = tuple(self._products())  # the layers that form sums of products

    def __getitem__(self, name: str) -> Choice:
        return self._by_name[name]

    def __iter__(self) -> Any:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def _activations(self, widths: Sequence[int]) -> list[Choice]:
        owners: dict[int, list[QuantizedOperator]] = {}
        for operator in quantized_operators(self.prepared).values():
            if not operator.plain and operator.owns_output:
                owners.setdefault(id(operator.output), []).append(operator)
        for key, operators in owners.items():
            quantizer = operators[0].output
            if quantizer.observer is None or quantizer.frozen or not all(map(self._is_free, operators)):
                continue
            dtypes = _of_widths(ACTIVATION_TYPES, self.prepared.meta["target"].activations, widths, quantizer.dtype.name)
            dtypes = tuple(dtype for dtype in dtypes if dtype == quantizer.dtype.name or not self._breaks_limit(operators, dtype))
            elements = sum(self.known[operator.name].activation_bytes // quantizer.dtype.storage.itemsize for operator in operators)
            macs = sum(layer.macs for layer in self.known.values() if layer.macs and self._reads(layer.name, quantizer))
            readers = sum(len(self.nodes[operator.name].users) for operator in operators)
            passes = 1 + -(-readers // len(operators))
            self._of[key] = Choice(operators[0].name, ACTIVATION, quantizer.dtype.name, dtypes, tuple(operators), elements, macs, passes)
        return list(self._of.values())

    def _breaks_limit(self, operators: list[QuantizedOperator], dtype: str) -> bool:
        """Return whether a dtype of the results of these operators breaks a limit of the target that the present one keeps."""
        groups = {spec.group for operator in operators if (spec := annotation(self.nodes[operator.name])) is not None}
        specs = {node: spec for node in self.nodes.values() if (spec := annotation(node)) is not None and spec.group in groups}
        near = {each.name for node in specs for each in (node, *node.users)}
        about = tuple(layer for layer in self.known.values() if layer.name in near)

        def broken() -> set[tuple[str, str]]:
            return {(each.node, each.limit) for each in broken_limits(self.prepared, about, self.prepared.meta["target"])}

        before = broken()
        try:
            for node, spec in specs.items():
                annotate(node, replace(spec, dtype=dtype))
            return not broken() <= before
        finally:
            for node, spec in specs.items():
                annotate(node, spec)

    def _is_free(self, operator: QuantizedOperator) -> bool:
        """Return whether a rule of a mapping can say which dtype the result has."""
        node = self.nodes[operator.name]
        if operator.operator is QUANTIZE:
            return all(_has_rules(reader) and part(reader) is None for reader in node.users)
        node_part, demanded = part(node), stated_demand(node)
        own_name = node_part is None or (not node_part.inner and re.search(rf"_{node_part.role.split()[-1]}(_\d+)?$", node.name) is None)
        if demanded is None:
            demanded = operator.operator.demand
            demanded = demanded(node, operator.operator.arguments(node)) if callable(demanded) else demanded
        return _has_rules(node) and own_name and isinstance(demanded, Own) and demanded.dtype is None

    def _reads(self, layer: str, quantizer: Quantizer) -> bool:
        return any(one is quantizer for one in _operands(quantized_operator(self.prepared, self.nodes[layer])))

    def _weights(self, widths: Sequence[int]) -> list[Choice]:
        choices = []
        for name, operator in quantized_operators(self.prepared).items():
            node = self.nodes[name]
            weight = weight_of(operator, constant_arguments(self.prepared, node, operator))
            if weight is None or part(node) is not None or not _has_rules(node):
                continue
            dtype = operator.weight_quantizer.dtype.name
            dtypes = _of_widths(WEIGHT_TYPES, self.prepared.meta["target"].weights, widths, dtype)
            choices.append(Choice(f"{name}.weight", WEIGHT, dtype, dtypes, (operator,), weight.numel(), self.known[name].macs))
        return choices

    def _products(self) -> list[Products]:
        products = []
        for name, layer in self.known.items():
            operator = quantized_operator(self.prepared, self.nodes[name])
            if operator is None or not layer.macs:
                continue
            read = [(self._of.get(id(q)), q.dtype.bits) for q in _operands(operator)][:2]
            if Trait.DYNAMIC in operator.operator.traits:
                read = [(None, UINT8.bits)]  # what its operand becomes at run time
            if len(read) < 2:
                read.append((self._by_name.get(f"{name}.weight"), operator.weight_quantizer.dtype.bits))
            (left, left_bits), (right, right_bits) = read
            first, second = ("" if each is None else each.name for each in (left, right))
            products.append(Products(name, layer.macs, first, second, (left_bits, right_bits)))
        return products

    def mapping(
        self, base: QConfigMapping, dtypes: Mapping[str, str], configs: Mapping[str, ActivationConfig] | None = None
    ) -> QConfigMapping:
        """Return a copy of the base, with a rule for each node whose tensor or weight gets another dtype or config, by names of choices."""
        configs = configs or {}
        operators = {name: operator for name, operator in quantized_operators(self.prepared).items() if not operator.plain}
        rules: dict[str, QConfig] = {}
        for name, operator in operators.items():
            read = [self._of.get(id(q)) for q in self._quantized_for(operator)]
            own = [self._of.get(id(operator.output)), self._by_name.get(f"{name}.weight"), *read]
            moved = any(c is not None and (dtypes.get(c.name, c.dtype) != c.dtype or c.name in configs) for c in own)
            ruled = operator.operator is not QUANTIZE and not is_inner_part(self.nodes[name])
            if moved and ruled and (operator.owns_output or decide(self.nodes[name]).asked):
                rules[name] = self._config_of(operator, dtypes, configs)
        # A rule for a module's first call covers its other calls, too: these say what they have.
        for name, operator in operators.items():
            if name not in rules and not is_inner_part(self.nodes[name]) and rules.keys() & set(prefixes(module_path(self.nodes[name]))):
                rules[name] = self._config_of(operator, dtypes, configs)
        mapping = copy.copy(base)
        for name, config in rules.items():
            mapping.set_module_name(name, config)
        return mapping

    def _config_of(self, operator: QuantizedOperator, dtypes: Mapping[str, str], configs: Mapping[str, ActivationConfig]) -> QConfig:
        """Return the operator's config with the choices for its result, its weight and the float values that it reads."""
        spec = annotation(self.nodes[operator.name])
        assert spec is not None
        config: QConfig = spec.config
        output = self._config(operator.output, config.output, dtypes, configs)
        if (weight := self._by_name.get(f"{operator.name}.weight")) is not None:
            config = replace(config, weight=replace(config.weight, dtype=dtypes.get(weight.name, weight.dtype)))
        inputs = list(self._quantized_for(operator))
        # A float operand without an input config follows the output's config, and must not change with it. An operand that a rule
        # requantizes stays requantized; the default's input config is that of the model's inputs, not of an operator.
        asked = config.input if decide(self.nodes[operator.name]).layer != DEFAULT else None
        input = self._config(inputs[0], config.input or config.output, dtypes, configs) if inputs else asked
        return replace(config, output=output, input=input)

    def _quantized_for(self, operator: QuantizedOperator) -> list[Quantizer]:
        """Return the quantizers of the float values that an operator reads."""
        boundary = {id(one.output) for one in quantized_operators(self.prepared).values() if one.operator is QUANTIZE}
        return [quantizer for quantizer in _operands(operator) if id(quantizer) in boundary]

    def _config(
        self, quantizer: Quantizer, config: ActivationConfig, dtypes: Mapping[str, str], configs: Mapping[str, ActivationConfig]
    ) -> ActivationConfig:
        choice = self._of.get(id(quantizer))
        if choice is None:
            return config if quantizer.observer is None and not quantizer.follows_sum else config.of(quantizer.dtype.name)
        return configs.get(choice.name, config).of(dtypes.get(choice.name, choice.dtype))

    def dtypes(self) -> dict[str, str]:
        """Return the present dtype of every choice."""
        return {name: choice.dtype for name, choice in self.items()}


def bits(dtype: str) -> int:
    """Return the bits of one number."""
    return (ACTIVATION_TYPES.get(dtype) or WEIGHT_TYPES[dtype]).bits


def _of_widths(dtypes: Mapping[str, Any], offered: Sequence[str], widths: Sequence[int], dtype: str) -> tuple[str, ...]:
    """Return the current dtype and one offered dtype of each other width in `widths` (bits), the narrowest first."""
    by_width = {dtypes[dtype].bits: dtype}
    for name in offered:
        if name != "int32" and dtypes[name].bits in widths:
            by_width.setdefault(dtypes[name].bits, name)
    return tuple(by_width[width] for width in sorted(by_width))


def _has_rules(node: fx.Node) -> bool:
    """Return whether a rule of the mapping goes before all others: no QConfig stands on a module around it."""
    return all(rules[0][0].kind not in ("attribute", "call") for rules in matched_rules(node))


def _operands(operator: QuantizedOperator | None) -> list[Quantizer]:
    """Return the quantizers of an operator's operands, in order, without the residual that is fused into it."""
    quantizers: list[Quantizer] = []
    for name, quantizer in ({} if operator is None else operator.inputs).items():
        if name != "residual":
            quantizers += [one for one in (quantizer if isinstance(quantizer, list) else [quantizer]) if isinstance(one, Quantizer)]
    return quantizers


# ---- A prepared model while it is tuned: in VALIDATE, without dropout and autocast, and as it was if anything is raised ----
class Tuned(NamedTuple):
    """A prepared model that is being tuned, its operators by name, and a function that undoes all changes."""

    model: fx.GraphModule
    operators: dict[str, QuantizedOperator]
    undo: Callable[[], None]


@contextmanager
def tuning(prepared: fx.GraphModule) -> Iterator[Tuned]:
    """Yield the operators of the model, in state VALIDATE, where they are left; a part in state FLOAT stays unchanged.

    If anything is raised inside, every state, rounding, correction, coverage and number in the model is restored. Raises
    NotCalibrated, and changes nothing, where a scale is missing.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    still = [(module, {"training": False}) for module in prepared.modules()]
    untrained = [(parameter, {"requires_grad": False}) for parameter in prepared.parameters()]  # what is tuned is not
    inside = inside_operators(prepared)
    out = {operator for operator in operators.values() if operator.left_out}.union(in_float(prepared))
    with Snapshot(inside, tensors_of(inside)):
        enter(prepared, (operator for operator in operators.values() if operator not in out), State.VALIDATE)
        for operator in operators.values():
            if not operator.plain and operator not in out:
                operator.output.require()
        with (
            Having([*still, *untrained]),
            having(out, left_out=True),
            # Leaving CALIBRATE has set scales, which stay if the tuning is undone.
            Snapshot(inside, tensors_of(prepared.modules())) as start,
            autocast_off(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield Tuned(prepared, operators, start.restore)
