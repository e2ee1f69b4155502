"""Read the tree of modules. Nothing but classes and dtypes of closed tables is made."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from torch import Tensor, nn

from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES, Interval
from fxquant.numerics.rounding import Rounding
from fxquant.ops import BY_NAME, Operator
from fxquant.prepared.operators import QuantizedOperator, Quantizers
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.learning import METHODS
from fxquant.quantization.observers import MinMaxObserver, Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import FROZEN, STATISTICS, State
from fxquant.quantization.weights import LARGEST_EXPONENT, BiasCorrection, ChannelFactors, Coverage, WeightQuantizer, WeightScale
from fxquant.serialization.names import ARGUMENTS, LAYERS
from fxquant.serialization.tree_writer import LAYOUTS, OPERATOR_FIELDS, QUANTIZER_FIELDS, construct, derived_buffers, tensor_forms
from fxquant.serialization.values import Malformed, decode, expect, look_up

_OWN = (Quantizer, QuantizedOperator, ChannelFactors, WeightQuantizer, WeightScale, Observer)


MODES = (STATISTICS, *METHODS, FROZEN)


def _interval(content: Any) -> Interval:
    """Return the interval of an operator's values that is observed."""
    low, high = (expect(decode(bound), float) for bound in expect(content, list))
    if not low <= high:
        raise Malformed("the interval of observed values is empty")
    return low, high


def _detached(content: Any, operator: Operator) -> bool | tuple[str, ...]:
    """Return whether an operator is computed without gradients, or the names of its arguments that have none."""
    if content is True:
        return True
    known = (*operator.parameter_names, *operator.absorbs)
    if not all(name in known for name in expect(content, list)):
        raise Malformed(f"a {operator.name} has no such arguments as are detached")
    return tuple(content)


class TreeReader:
    """Makes the modules of a file. Raises Malformed, or what the constructors raise, if they cannot be made."""

    def __init__(self, roles: Any, tensors: Mapping[str, Tensor], arithmetic: Arithmetic | None) -> None:
        if set(expect(roles, dict)) != set(tensors):
            raise Malformed("the tensors in the file are not those its graph names")
        self.arithmetic = arithmetic
        self._tensors = {name: _restored(tensors[name], role) for name, role in roles.items()}
        self._modules: list[nn.Module] = []

    def read(self, entries: Any) -> None:
        """Make every module, in the order of the file."""
        for entry in expect(entries, list):
            self._modules.append(self._make(expect(entry, dict)))

    def fill(self, module: nn.Module, entry: Mapping[str, Any]) -> nn.Module:
        """Put everything the file says into a module, and take out everything else."""
        module.__dict__["training"] = expect(entry.get("training", False), bool)
        derived = {name: module._buffers[name] for name in derived_buffers(module)}
        order = list(module._buffers)
        for part in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            module.__dict__[part].clear()
        for name, tensor in expect(entry.get("parameters", {}), dict).items():
            module.register_parameter(name, self._tensor(tensor))  # type: ignore[arg-type]
        transient = expect(entry.get("transient", []), list)
        for name, tensor in expect(entry.get("buffers", {}), dict).items():
            module.register_buffer(name, self._tensor(tensor), persistent=name not in transient)
        if derived:
            found = {**module._buffers, **derived}
            module.__dict__["_buffers"].clear()
            module.__dict__["_buffers"].update({name: found.pop(name) for name in order if name in found}, **found)
        for name, child in expect(entry.get("modules", {}), dict).items():
            module.add_module(name, self._module(child))
        return module

    def _make(self, entry: dict[str, Any]) -> nn.Module:
        name, arguments = entry["class"], expect(entry["arguments"], dict)
        module: nn.Module
        if name == "Quantizer":
            module = self._quantizer(arguments)
        elif name == "QuantizedOperator":
            module = self._operator(arguments)
        elif name == "WeightQuantizer":
            module = self._weight_quantizer(arguments)
        elif name == "ChannelFactors":
            module = self._factors(arguments, expect(entry["buffers"], dict))
        elif name == "WeightScale":
            module = self._learned(arguments, expect(entry["buffers"], dict))
        else:
            module = self._layer(look_up(LAYERS, name, "class"), arguments, len(expect(entry.get("parameters", {}), dict)))
        form = tensor_forms(module)
        self.fill(module, entry)
        if isinstance(module, Quantizer):
            others = module._modules.get("others")
            if not isinstance(others, nn.ModuleDict) or not all(isinstance(other, Observer) for other in others.values()):
                raise Malformed("the additional observers of a Quantizer are not observers")
        if isinstance(module, _OWN) and tensor_forms(module) != form:
            raise Malformed(f"the buffers of a {name} are not what they should be")
        shapes = {tensor: size for tensor, size, _ in tensor_forms(module)}
        for tensor, size, _ in form:
            if shapes.get(tensor, size) != size:  # one that is gone was folded away
                raise Malformed(f"the {tensor} of a {name} does not have the shape that its arguments give it")
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        return module

    @staticmethod
    def _layer(kind: type[nn.Module], arguments: dict[str, Any], parameters: int) -> nn.Module:
        if list(arguments) != list(ARGUMENTS[kind]):
            raise Malformed(f"a {kind.__name__} is made of {', '.join(ARGUMENTS[kind]) or 'nothing'}")
        chosen = {name: decode(value) for name, value in arguments.items()}
        if "num_layers" in chosen and expect(chosen["num_layers"], int) > parameters:
            raise Malformed(f"a {kind.__name__} has more layers than parameters")
        return construct(kind, chosen)

    def _quantizer(self, arguments: dict[str, Any]) -> Quantizer:
        plain = {name: expect(arguments[name], *kinds) for name, kinds in QUANTIZER_FIELDS.items()}
        if plain["mode"] not in MODES:
            raise Malformed("a Quantizer has an unknown training mode")
        observer, range = self._module(arguments["observer"]), self._module(arguments["range"])
        if not isinstance(range, MinMaxObserver if observer is not None else NoneType):
            raise Malformed("the range of a Quantizer is not a range")
        if not isinstance(observer, Observer | None):
            raise Malformed("the observer of a Quantizer is not an observer")
        quantizer = Quantizer(look_up(ACTIVATION_TYPES, arguments["dtype"], "dtype"), observer, training=plain["mode"])
        for name, value in plain.items():
            setattr(quantizer, name, value)
        return quantizer

    def _weight_quantizer(self, arguments: dict[str, Any]) -> WeightQuantizer:
        learned, rounding = self._module(arguments["learned"]), self._module(arguments["rounding"])
        correction, coverage = (self._module(arguments.get(name)) for name in ("correction", "coverage"))
        if not isinstance(learned, WeightScale | None) or not isinstance(rounding, Rounding):
            raise Malformed("the scale or the rounding of a WeightQuantizer has a wrong type")
        if not isinstance(correction, BiasCorrection | None):
            raise Malformed("the correction of a WeightQuantizer has a wrong type")
        if not isinstance(coverage, Coverage | None):
            raise Malformed("the coverage of a WeightQuantizer has a wrong type")
        quantizer = WeightQuantizer(
            look_up(WEIGHT_TYPES, arguments["dtype"], "dtype"),
            per_channel=expect(arguments["per_channel"], bool),
            power_of_two=expect(arguments["power_of_two"], bool),
            p=expect(arguments["p"], float, NoneType),
            learned=learned,
            rounding=rounding,
        )
        quantizer.correction, quantizer.coverage = correction, coverage
        return quantizer

    def _learned(self, arguments: dict[str, Any], buffers: dict[str, Any]) -> WeightScale:
        base_scale = self._tensor(buffers["base_scale"])
        if base_scale is None:
            raise Malformed("a WeightScale has no scale")
        method = expect(arguments["method"], str, NoneType)
        weight_scale = WeightScale(base_scale.numel(), None if method is None else look_up(METHODS, method, "method"))
        weight_scale.frozen = expect(arguments["frozen"], bool)
        return weight_scale

    def _factors(self, arguments: dict[str, Any], buffers: dict[str, Any]) -> ChannelFactors:
        for name in ("inputs", "outputs"):
            tensor = self._tensor(buffers[name])
            if tensor is None or tensor.numel() != expect(arguments[name], int) or bool((tensor.abs() > LARGEST_EXPONENT).any()):
                raise Malformed("the factors of a layer's channels are not what they should be")
        return ChannelFactors(arguments["inputs"], arguments["outputs"])

    def _operator(self, arguments: dict[str, Any]) -> QuantizedOperator:
        plain = {name: expect(arguments[name], *kinds) for name, kinds in OPERATOR_FIELDS.items()}
        operator = BY_NAME.get(expect(arguments["operator"], str))
        output = self._as_quantizer(arguments["output"])
        weight_quantizer = self._module(arguments["weight_quantizer"])
        factors = self._module(arguments["factors"])
        if operator is None or self.arithmetic is None or (output is None and plain["owns_output"]):
            raise Malformed("a QuantizedOperator has no operator, no target or no output")
        if not isinstance(weight_quantizer, WeightQuantizer):
            raise Malformed(f"a {type(weight_quantizer).__name__} is in the place of a WeightQuantizer")
        if not isinstance(factors, ChannelFactors | None):
            raise Malformed(f"a {type(factors).__name__} is in the place of ChannelFactors")
        module = QuantizedOperator(
            plain["name"],
            operator,
            self.arithmetic,
            Quantizers(
                {name: self._inputs(value) for name, value in expect(arguments["inputs"], dict).items()},
                output,
                plain["owns_output"],
                self._as_quantizer(arguments["intermediate"]),
                weight_quantizer,
                factors,
                _interval(arguments["observed"]),
            ),
            live_batch_norm=plain["live_batch_norm"],
            path=plain["path"],
            detached=_detached(arguments.get("detached", []), operator),
        )
        module.state = State(arguments["state"])
        return module

    def _inputs(self, value: Any) -> Any:
        return [self._as_quantizer(item) for item in value] if isinstance(value, list) else self._as_quantizer(value)

    def _as_quantizer(self, place: Any) -> Quantizer | None:
        module = self._module(place)
        if not isinstance(module, Quantizer | None):
            raise Malformed(f"a {type(module).__name__} is in the place of a Quantizer")
        return module

    def _module(self, place: int | None) -> nn.Module | None:
        if place is None:
            return None
        if not 0 <= expect(place, int) < len(self._modules):
            raise Malformed(f"module {place} does not precede the one that refers to it")
        return self._modules[place]

    def _tensor(self, name: Any) -> Tensor | None:
        found: Tensor | None = None if name is None else look_up(self._tensors, name, "tensor")
        return found


def _restored(tensor: Tensor, role: Any) -> Tensor:
    if list(expect(role, dict)) != ["parameter", "requires_grad", "layout"]:
        raise Malformed("a tensor says whether it is a parameter, whether it requires a gradient, and its layout")
    if role["layout"] != "contiguous":
        look_up(LAYOUTS, role["layout"], "layout")
        tensor = tensor.movedim(-1, 1)
    if expect(role["parameter"], bool):
        return nn.Parameter(tensor, expect(role["requires_grad"], bool))
    return tensor.requires_grad_(expect(role["requires_grad"], bool))
