"""Small float models written in one expression, and the steps that tests take with a prepared model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

import fxquant as fxq


def written(forward: Callable[..., Any], /, **parts: Any) -> nn.Module:
    """A module with these attributes, in train mode; a tensor that is no parameter is a buffer. `forward` takes the module first."""
    made = type("Written", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


def to_train(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state and mode TRAIN."""
    fxq.set_state(prepared, fxq.State.TRAIN)
    return prepared.train()


def to_validate(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state VALIDATE and eval mode."""
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return prepared.eval()
