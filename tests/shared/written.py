"""Small float models written in one expression, and the steps that tests take with a prepared model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

import fxquant as fxq


def add_members(model: nn.Module, members: dict[str, Any]) -> None:
    """Give a module members by name; a tensor that is no parameter becomes a buffer."""
    for name, member in members.items():
        if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
            model.register_buffer(name, member)
        else:
            setattr(model, name, member)


def written(forward: Callable[..., Any], /, **parts: Any) -> nn.Module:
    """A module with these attributes, in train mode; a tensor that is no parameter is a buffer. `forward` takes the module first."""
    model = type("Written", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    add_members(model, parts)
    return model


def to_train(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state and mode TRAIN."""
    fxq.set_state(prepared, fxq.State.TRAIN)
    return prepared.train()


def to_validate(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state VALIDATE and eval mode."""
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return prepared.eval()
