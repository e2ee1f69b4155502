"""Write and read the tree of modules and its tensors: every module and every tensor once, however many places refer to it.

A module is written after the modules that it refers to, and refers to them by their position; so a file holds no cycles.
Nothing but classes and dtypes of closed tables is made when a file is read.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES
from fxquant.numerics.rounding import GradientRule, Rounding
from fxquant.ops import BY_NAME
from fxquant.prepared.operators import QuantizedOperator, Quantizers
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.learning import METHODS, TrainableScale
from fxquant.quantization.observers import MinMaxObserver, Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import FROZEN, STATISTICS, State
from fxquant.quantization.weights import LARGEST_EXPONENT, BiasCorrection, ChannelFactors, Coverage, WeightQuantizer, WeightScale
from fxquant.serialization.names import ARGUMENTS, LAYERS
from fxquant.serialization.values import DTYPES, Malformed, cannot_save, decode, encode, expect, look_up
from fxquant.target import Target

TargetOf = Callable[[str], Target]  # a target, by its name

LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}

QUANTIZER_FIELDS = {
    "mode": (str,), "power_of_two": (bool,), "headroom": (float,), "items": (bool,), "is_output": (bool,), "frozen": (bool,),
    "name": (str,), "source": (str,), "module_path": (str,),
}  # fmt: skip
OPERATOR_FIELDS = {"name": (str,), "path": (str,), "owns_output": (bool,), "live_batch_norm": (bool,)}
WEIGHT_FIELDS = {"per_channel": (bool,), "power_of_two": (bool,), "p": (float, NoneType)}


def _fields(value: Callable[[str], Any], types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return the values of these fields, which have to be of their types."""
    return {name: expect(value(name), *kinds) for name, kinds in types.items()}


def construct(kind: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Return a module of class `kind` on the meta device: its tensors have no memory yet."""
    with torch.device("meta"):  # allocates nothing, and leaves the random numbers alone
        return kind(**arguments)


def derived_buffers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of persistent buffers that a saved file leaves out: loading computes them from the constructor's arguments."""
    return module.derived if isinstance(module, TrainableScale) else ()


def tensor_forms(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return the name, the shape and the dtype of each tensor of a module itself."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class TreeWriter:
    """Collects the modules of a model in `modules`, and its tensors in `tensors` and `roles`."""

    def __init__(self, arithmetic: Arithmetic | None, noise: frozenset[int]) -> None:
        self.arithmetic, self.noise = arithmetic, noise  # of noise: ids of modules that are nn.Identity in the file
        self.modules: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor] = {}
        self.roles: dict[str, dict[str, Any]] = {}
        self._places: dict[int, int] = {}
        self._identity = nn.Identity()
        self._names: dict[int, str] = {}

    def contents(self, module: nn.Module, path: str) -> dict[str, Any]:
        """Return the contents that every module has; empty parts are left out."""
        parts = {
            "training": expect(module.training, bool),
            "parameters": {name: self._tensor(tensor, path + name) for name, tensor in module._parameters.items()},
            "buffers": {n: self._tensor(tensor, path + n) for n, tensor in module._buffers.items() if n not in derived_buffers(module)},
            "transient": sorted(module._non_persistent_buffers_set),
            "modules": {name: self._module(child, path + name) for name, child in module._modules.items()},
        }
        return {name: part for name, part in parts.items() if part}

    def _module(self, module: nn.Module | None, path: str) -> int | None:
        if module is None:
            return None
        if id(module) in self.noise:
            return self._module(self._identity, path)
        if id(module) not in self._places:
            if any(module.__dict__.get(hooks) for hooks in _HOOKS):
                cannot_save(f"the module {path}", "it has hooks, and a file holds no code", "remove the hooks first")
            entry = {"class": type(module).__name__, "arguments": self._arguments(module, path), **self.contents(module, path + ".")}
            self._places[id(module)] = len(self.modules)
            self.modules.append(entry)
        return self._places[id(module)]

    def _arguments(self, module: nn.Module, path: str) -> dict[str, Any]:
        if type(module) is Quantizer:
            return self._quantizer(module, path)
        if type(module) is QuantizedOperator:
            return self._operator(module, path)
        if type(module) is WeightQuantizer:
            return self._weight_quantizer(module, path)
        if type(module) is ChannelFactors:
            return {"inputs": len(module.inputs), "outputs": len(module.outputs)}
        if type(module) is WeightScale:
            return {"frozen": expect(module.frozen, bool), "method": None if module.method is None else module.method.name}
        if isinstance(module, GradientRule):
            because = f"it calls {module.label}, which is Python, and a file holds no code"
            advice = "keep prepared.state_dict(), for a model that fxq.prepare makes of the same float model"
            cannot_save(f"the module {path}", because, f"{advice}; or save what fxq.convert returns")
        if type(module) not in ARGUMENTS:
            because = f"its class {type(module).__qualname__} is not one of those a file can name; a file holds no code"
            remedy = "use PyTorch's layers and fxquant's observers, or save state_dict() and prepare the model again"
            cannot_save(f"the module {path}", because, remedy)
        arguments = {name: _argument(module, name) for name in ARGUMENTS[type(module)]}
        _check_twin(module, arguments, path)
        return {name: encode(value) for name, value in arguments.items()}

    def _quantizer(self, module: Quantizer, path: str) -> dict[str, Any]:
        if ACTIVATION_TYPES.get(module.dtype.name) != module.dtype:
            cannot_save(f"the quantizer {path}", f"{module.dtype!r} is not a dtype of fxquant", "use a dtype by name")
        return {
            "dtype": module.dtype.name,
            **_fields(partial(getattr, module), QUANTIZER_FIELDS),
            "observer": self._module(module.observer, path + ".observer"),
            "range": self._module(module.range, path + ".range"),
        }

    def _weight_quantizer(self, module: WeightQuantizer, path: str) -> dict[str, Any]:
        if WEIGHT_TYPES.get(module.dtype.name) != module.dtype:
            cannot_save(f"the weight quantizer {path}", f"{module.dtype!r} is not a dtype of fxquant", "use a dtype by name")
        parts = {name: self._module(getattr(module, name), f"{path}.{name}") for name in ("learned", "rounding", "correction", "coverage")}
        present = {name: part for name, part in parts.items() if part is not None or name in ("learned", "rounding")}
        present |= {"pairs": True} if module.pairs else {}
        return {"dtype": module.dtype.name, **_fields(partial(getattr, module), WEIGHT_FIELDS), **present}

    def _operator(self, module: QuantizedOperator, path: str) -> dict[str, Any]:
        if BY_NAME.get(module.operator.name) is not module.operator or module.arithmetic != self.arithmetic:
            because = "its operator or its target's arithmetic is not one of fxquant's own, and a file holds no code"
            cannot_save(f"the operator {path}", because, "prepare the model for a target that is known by name")
        inputs = {
            name: [self._module(each, f"{path}.inputs.{name}.{index}") for index, each in enumerate(value)]
            if isinstance(value, list)
            else self._module(value, f"{path}.inputs.{name}")
            for name, value in module.inputs.items()
        }
        return {
            **_fields(partial(getattr, module), OPERATOR_FIELDS),
            "operator": module.operator.name,
            "state": module.state.value,
            "observed": [encode(bound) for bound in module.observed],
            "inputs": inputs,
            "output": None if module.plain else self._module(module.output, path + ".output"),
            **{name: self._module(getattr(module, name), f"{path}.{name}") for name in ("intermediate", "weight_quantizer", "factors")},
            **({"detached": module.detached if module.detached is True else list(module.detached or ())} if module.detached else {}),
        }

    def _tensor(self, tensor: Tensor | None, name: str) -> str | None:
        if tensor is None:
            return None
        if id(tensor) not in self._names:
            if type(tensor) not in (Tensor, nn.Parameter) or str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.is_meta:
                cannot_save(f"the tensor {name}", f"it is a {type(tensor).__name__} of {tensor.dtype}", "use plain tensors with values")
            # Float kernels may sum in another order for another layout, so it is part of the model.
            layouts = {"contiguous": torch.contiguous_format, **LAYOUTS}
            layout = next((name for name, each in layouts.items() if tensor.is_contiguous(memory_format=each)), "contiguous")
            role = {"parameter": isinstance(tensor, nn.Parameter), "requires_grad": tensor.requires_grad, "layout": layout}
            self._names[id(tensor)] = name
            self.roles[name] = role
            plain = tensor.detach().cpu()
            plain = plain if layout == "contiguous" else plain.movedim(1, -1)
            self.tensors[name] = plain.clone(memory_format=torch.contiguous_format)  # safetensors refuses tensors that share memory
        return self._names[id(tensor)]


def _argument(module: nn.Module, name: str) -> Any:
    """Return the constructor argument a module was made with, as far as it is still true."""
    if isinstance(module, nn.MultiheadAttention) and name in ("bias", "add_bias_kv"):
        return getattr(module, "in_proj_bias" if name == "bias" else "bias_k") is not None
    if name != "bias" or isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return getattr(module, name)
    return module.bias is not None


def _check_twin(module: nn.Module, arguments: Mapping[str, Any], path: str) -> None:
    """Raise ExportError if the module's constructor does not reproduce its attributes and shapes: one was changed after construction."""
    twin = construct(type(module), arguments)
    for name, value in twin.__dict__.items():
        if name[0] != "_" and name != "training" and isinstance(value, bool | int | float | str | tuple) and module.__dict__[name] != value:
            because = f"its {name} is {module.__dict__[name]!r}, and {value!r} in a {type(module).__name__} made with the same arguments"
            cannot_save(f"the module {path}", because, "set such attributes through the constructor")

    shapes = {name: size for name, size, _ in tensor_forms(module)}
    for name, size, _ in tensor_forms(twin):
        if shapes.get(name, size) != size:  # one that is gone was folded away
            twins = f"{list(size)} in a {type(module).__name__} made with the same arguments"
            because = f"its {name} is of shape {list(shapes[name])}, and of {twins}"
            cannot_save(f"the module {path}", because, "make the module again with arguments of its present sizes")


_OWN = (Quantizer, QuantizedOperator, ChannelFactors, WeightQuantizer, WeightScale, Observer)
MODES = (STATISTICS, *METHODS, FROZEN)


class TreeReader:
    """Constructs the modules of a file. Raises Malformed, or errors of the constructors."""

    def __init__(self, roles: Any, tensors: Mapping[str, Tensor], arithmetic: Arithmetic | None) -> None:
        Malformed.unless(set(expect(roles, dict)) == set(tensors), "the tensors in the file are not those its graph names")
        self.arithmetic = arithmetic
        self._tensors = {name: _restored(tensors[name], role) for name, role in roles.items()}
        self._modules: list[nn.Module] = []

    def read(self, entries: Any) -> None:
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
            buffers = {**module._buffers, **derived}
            module.__dict__["_buffers"].clear()
            module.__dict__["_buffers"].update({name: buffers.pop(name) for name in order if name in buffers}, **buffers)
        for name, child in expect(entry.get("modules", {}), dict).items():
            module.add_module(name, self._module(child))
        return module

    def _make(self, entry: dict[str, Any]) -> nn.Module:
        name, arguments = entry["class"], expect(entry["arguments"], dict)
        module: nn.Module
        makers = {"Quantizer": self._quantizer, "QuantizedOperator": self._operator, "WeightQuantizer": self._weight_quantizer}
        made_by_buffers = {"ChannelFactors": self._factors, "WeightScale": self._learned}
        if name in makers:
            module = makers[name](arguments)
        elif name in made_by_buffers:
            module = made_by_buffers[name](arguments, expect(entry["buffers"], dict))
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
        plain = _fields(arguments.__getitem__, QUANTIZER_FIELDS)
        Malformed.unless(plain["mode"] in MODES, "a Quantizer has an unknown training mode")
        observer = self._module(arguments["observer"], Observer | None)
        self._module(arguments["range"], NoneType if observer is None else MinMaxObserver)
        quantizer = Quantizer(look_up(ACTIVATION_TYPES, arguments["dtype"], "dtype"), observer, training=plain["mode"])
        for name, value in plain.items():
            setattr(quantizer, name, value)
        return quantizer

    def _weight_quantizer(self, arguments: dict[str, Any]) -> WeightQuantizer:
        learned, rounding = self._module(arguments["learned"], WeightScale | None), self._module(arguments["rounding"], Rounding)
        correction = self._module(arguments.get("correction"), BiasCorrection | None)
        coverage = self._module(arguments.get("coverage"), Coverage | None)
        dtype, plain = look_up(WEIGHT_TYPES, arguments["dtype"], "dtype"), _fields(arguments.__getitem__, WEIGHT_FIELDS)
        quantizer = WeightQuantizer(dtype, **plain, learned=learned, rounding=rounding, pairs=expect(arguments.get("pairs", False), bool))
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
        plain = _fields(arguments.__getitem__, OPERATOR_FIELDS)
        operator = BY_NAME.get(expect(arguments["operator"], str))
        output = self._module(arguments["output"], Quantizer | None)
        weight_quantizer = self._module(arguments["weight_quantizer"], WeightQuantizer)
        factors = self._module(arguments["factors"], ChannelFactors | None)
        if operator is None or self.arithmetic is None or (output is None and plain["owns_output"]):
            raise Malformed("a QuantizedOperator has no operator, no target or no output")
        inputs = {name: self._inputs(value) for name, value in expect(arguments["inputs"], dict).items()}
        low, high = (expect(decode(bound), float) for bound in expect(arguments["observed"], list))
        Malformed.unless(low <= high, "the interval of observed values is empty")
        intermediate, observed = self._module(arguments["intermediate"], Quantizer | None), (low, high)
        quantizers = Quantizers(inputs, output, plain["owns_output"], intermediate, weight_quantizer, factors, observed)
        name, path, live = (plain[key] for key in ("name", "path", "live_batch_norm"))
        detached, names = arguments.get("detached", []), (*operator.parameter_names, *operator.absorbs)
        if detached is not True and not all(each in names for each in expect(detached, list)):
            raise Malformed(f"a {operator.name} has no such arguments as are detached")
        detached = detached if detached is True else tuple(detached)
        module = QuantizedOperator(name, operator, self.arithmetic, quantizers, live_batch_norm=live, path=path, detached=detached)
        module.state = State(arguments["state"])
        return module

    def _inputs(self, value: Any) -> Any:
        several = value if isinstance(value, list) else [value]
        modules = [self._module(item, Quantizer | None) for item in several]
        return modules if isinstance(value, list) else modules[0]

    def _module(self, place: int | None, kind: Any = nn.Module | None) -> Any:
        """Return module number `place` (None for None); raise Malformed unless it is an instance of `kind`, a class or a union."""
        if place is not None and not 0 <= expect(place, int) < len(self._modules):
            raise Malformed(f"module {place} does not precede the one that refers to it")
        module = None if place is None else self._modules[place]
        if not isinstance(module, kind):
            raise Malformed(f"a {type(module).__name__} is in the place of a {getattr(kind, '__args__', (kind,))[0].__name__}")
        return module

    def _tensor(self, name: Any) -> Tensor | None:
        tensor: Tensor | None = None if name is None else look_up(self._tensors, name, "tensor")
        return tensor


def _restored(tensor: Tensor, role: Any) -> Tensor:
    if list(expect(role, dict)) != ["parameter", "requires_grad", "layout"]:
        raise Malformed("a tensor says whether it is a parameter, whether it requires a gradient, and its layout")
    if role["layout"] != "contiguous":
        look_up(LAYOUTS, role["layout"], "layout")
        tensor = tensor.movedim(-1, 1)
    if expect(role["parameter"], bool):
        return nn.Parameter(tensor, expect(role["requires_grad"], bool))
    return tensor.requires_grad_(expect(role["requires_grad"], bool))
