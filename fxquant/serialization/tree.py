"""The tree of modules and its tensors: every module and every tensor once, however many places refer to it.

A module is written after the modules it refers to, and refers to them by their position; so a file holds no cycles. `tree_writer` writes
the tree and `tree_reader` reads it; this module has the facts they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxquant.quantization.learning import TrainableScale
from fxquant.target import Target

TargetOf = Callable[[str], Target]  # a target, by its name

LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}

QUANTIZER_FIELDS = {
    "mode": (str,), "power_of_two": (bool,), "headroom": (float,), "items": (bool,), "shown": (bool,), "frozen": (bool,),
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
