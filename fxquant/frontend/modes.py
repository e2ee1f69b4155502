"""The effects of a model's own `train` besides train mode: a graph has none of its code, so they are kept by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fxquant.frontend.snapshot import Snapshot
from fxquant.frontend.state import overrides_train, own_parameters

SHOWN = 8  # names in a sentence


@dataclass(frozen=True)
class TrainMode:
    """The differences between `model.train()` and `nn.Module.train`.

    eval_paths         paths of modules that it keeps in eval mode
    frozen_parameters  names of parameters for which it turns requires_grad off
    note               a sentence that says so; empty where nothing differs
    """

    eval_paths: tuple[str, ...] = ()
    frozen_parameters: tuple[str, ...] = ()
    note: str = ""


def own_train_mode(model: nn.Module) -> TrainMode:
    """Return the effects of the `train` methods that the user's classes override. They are found on shells; the model is not changed."""
    own = [type(module).__name__ for module in model.modules() if overrides_train(module)]
    if not own:
        return TrainMode()
    shells = Snapshot(model, own_buffers=True)
    copies = own_parameters(shells.modules)
    asked = {name: copies[id(parameter)] for name, parameter in model.named_parameters() if parameter.requires_grad}
    method = " and ".join(f"{name}.train" for name in dict.fromkeys(own))
    try:
        shells.root.train(True)
        frozen = tuple(name for name, copy in asked.items() if not copy.requires_grad)
    except Exception as error:  # whatever the user's code raises
        return TrainMode(note=f"{method} raised {type(error).__name__}: {error}; its effect in train mode is left out")
    kept = tuple(path for path, module in shells.root.named_modules() if not module.training)
    said = [*([f"keeps {_listed(kept)} in eval mode"] if kept else []), *([f"freezes {_listed(frozen)}"] if frozen else [])]
    return TrainMode(kept, frozen, f"{method} {' and '.join(said)}, and so does train() of this model" if said else "")


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
