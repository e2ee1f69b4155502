"""Write the tree of modules and its tensors: every module and every tensor once, however many places refer to it.

A module is written after the modules that it refers to, and refers to them by their position; so a file holds no cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.numerics.gradient import GradientRule
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES
from fxquant.ops import BY_NAME
from fxquant.prepared.operators import QuantizedOperator
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.learning import TrainableScale
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import ChannelFactors, WeightQuantizer, WeightScale
from fxquant.serialization.names import ARGUMENTS
from fxquant.serialization.values import DTYPES, cannot_save, encode, expect
from fxquant.target import Target

# ---- what `tree_reader` shares ---------------------------------------------------------------------------------------

TargetOf = Callable[[str], Target]  # a target, by its name

LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}

QUANTIZER_FIELDS = {
    "mode": (str,), "power_of_two": (bool,), "headroom": (float,), "items": (bool,), "is_output": (bool,), "frozen": (bool,),
    "name": (str,), "source": (str,), "module_path": (str,),
}  # fmt: skip
OPERATOR_FIELDS = {"name": (str,), "path": (str,), "owns_output": (bool,), "live_batch_norm": (bool,)}


def construct(kind: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Return a module without values in its tensors."""
    with torch.device("meta"):  # allocates nothing, and leaves the random numbers alone
        return kind(**arguments)


def derived_buffers(module: nn.Module) -> tuple[str, ...]:
    """Return the buffers that follow from a module's arguments, and have no place in a file."""
    return module.derived if isinstance(module, TrainableScale) else ()


def tensor_forms(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return the name, the shape and the dtype of each tensor of a module itself."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


# ---- the writer ------------------------------------------------------------------------------------------------------

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
            cannot_save(
                f"the module {path}",
                f"it calls {module.label}, which is Python, and a file holds no code",
                "keep prepared.state_dict(), for a model that fxq.prepare makes of the same float model; or save what fxq.convert returns",
            )
        if type(module) not in ARGUMENTS:
            cannot_save(
                f"the module {path}",
                f"its class {type(module).__qualname__} is not one of those a file can name; a file holds no code",
                "use PyTorch's layers and fxquant's observers, or save state_dict() and prepare the model again",
            )
        arguments = {name: _argument(module, name) for name in ARGUMENTS[type(module)]}
        _check_twin(module, arguments, path)
        return {name: encode(value) for name, value in arguments.items()}

    def _quantizer(self, module: Quantizer, path: str) -> dict[str, Any]:
        if ACTIVATION_TYPES.get(module.dtype.name) != module.dtype:
            cannot_save(f"the quantizer {path}", f"{module.dtype!r} is not a dtype of fxquant", "use a dtype by name")
        plain = {name: expect(getattr(module, name), *kinds) for name, kinds in QUANTIZER_FIELDS.items()}
        return {
            "dtype": module.dtype.name,
            **plain,
            "observer": self._module(module.observer, path + ".observer"),
            "range": self._module(module.range, path + ".range"),
        }

    def _weight_quantizer(self, module: WeightQuantizer, path: str) -> dict[str, Any]:
        if WEIGHT_TYPES.get(module.dtype.name) != module.dtype:
            cannot_save(f"the weight quantizer {path}", f"{module.dtype!r} is not a dtype of fxquant", "use a dtype by name")
        return {
            "dtype": module.dtype.name,
            "per_channel": expect(module.per_channel, bool),
            "power_of_two": expect(module.power_of_two, bool),
            "p": expect(module.p, float, NoneType),
            "learned": self._module(module.learned, path + ".learned"),
            "rounding": self._module(module.rounding, path + ".rounding"),
            **({} if module.correction is None else {"correction": self._module(module.correction, path + ".correction")}),
            **({} if module.coverage is None else {"coverage": self._module(module.coverage, path + ".coverage")}),
        }

    def _operator(self, module: QuantizedOperator, path: str) -> dict[str, Any]:
        if BY_NAME.get(module.operator.name) is not module.operator or module.arithmetic != self.arithmetic:
            cannot_save(
                f"the operator {path}",
                "its operator or its target's arithmetic is not one of fxquant's own, and a file holds no code",
                "prepare the model for a target that is known by name",
            )
        inputs = {
            name: [self._module(each, f"{path}.inputs.{name}.{index}") for index, each in enumerate(value)]
            if isinstance(value, list)
            else self._module(value, f"{path}.inputs.{name}")
            for name, value in module.inputs.items()
        }
        return {
            **{name: expect(getattr(module, name), *kinds) for name, kinds in OPERATOR_FIELDS.items()},
            "operator": module.operator.name,
            "state": module.state.value,
            "observed": [encode(bound) for bound in module.observed],
            "inputs": inputs,
            "output": None if module.plain else self._module(module.output, path + ".output"),
            "intermediate": self._module(module.intermediate, path + ".intermediate"),
            "weight_quantizer": self._module(module.weight_quantizer, path + ".weight_quantizer"),
            "factors": self._module(module.factors, path + ".factors"),
            **({"detached": module.detached if module.detached is True else list(module.detached or ())} if module.detached else {}),
        }

    def _tensor(self, tensor: Tensor | None, name: str) -> str | None:
        if tensor is None:
            return None
        if id(tensor) not in self._names:
            if type(tensor) not in (Tensor, nn.Parameter) or str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.is_meta:
                cannot_save(f"the tensor {name}", f"it is a {type(tensor).__name__} of {tensor.dtype}", "use plain tensors with values")
            layout = _layout(tensor)
            role = {"parameter": isinstance(tensor, nn.Parameter), "requires_grad": tensor.requires_grad, "layout": layout}
            self._names[id(tensor)] = name
            self.roles[name] = role
            self.tensors[name] = _plain(tensor, layout)
        return self._names[id(tensor)]


def _layout(tensor: Tensor) -> str:
    # Float kernels may sum in another order for another layout, so it is part of the model.
    if tensor.is_contiguous():
        return "contiguous"
    return next((name for name, layout in LAYOUTS.items() if tensor.is_contiguous(memory_format=layout)), "contiguous")


def _plain(tensor: Tensor, layout: str) -> Tensor:
    """Return a contiguous tensor of its own memory; tensors may share memory, and safetensors refuses that."""
    plain = tensor.detach().cpu()
    plain = plain if layout == "contiguous" else plain.movedim(1, -1)
    return plain.clone(memory_format=torch.contiguous_format)


def _argument(module: nn.Module, name: str) -> Any:
    """Return the constructor argument a module was made with, as far as it is still true."""
    if isinstance(module, nn.MultiheadAttention) and name in ("bias", "add_bias_kv"):
        return getattr(module, "in_proj_bias" if name == "bias" else "bias_k") is not None
    if name != "bias" or isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return getattr(module, name)
    return module.bias is not None


def _check_twin(module: nn.Module, arguments: Mapping[str, Any], path: str) -> None:
    """Refuse a module that its constructor would not make again: an attribute was changed afterwards."""
    twin = construct(type(module), arguments)
    for name, value in twin.__dict__.items():
        if name[0] != "_" and name != "training" and isinstance(value, bool | int | float | str | tuple) and module.__dict__[name] != value:
            cannot_save(
                f"the module {path}",
                f"its {name} is {module.__dict__[name]!r}, and {value!r} in a {type(module).__name__} made with the same arguments",
                "set such attributes through the constructor",
            )

    shapes = {name: size for name, size, _ in tensor_forms(module)}
    for name, size, _ in tensor_forms(twin):
        if shapes.get(name, size) != size:  # one that is gone was folded away
            cannot_save(
                f"the module {path}",
                f"its {name} is of shape {list(shapes[name])}, and of {list(size)} in a {type(module).__name__}"
                " made with the same arguments",
                "make the module again with arguments of its present sizes",
            )
