"""The effects of a model's own `train` besides train mode: a graph has none of its code, so they are kept by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fxquant.frontend.snapshot import Snapshot

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
    own = [type(module).__name__ for module in model.modules() if _overrides_train(module)]
    if not own:
        return TrainMode()
    shells = Snapshot(model, own_buffers=True)
    asked = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    method = " and ".join(f"{name}.train" for name in dict.fromkeys(own))
    try:
        shells.root.train(True)
        frozen = tuple(name for name, (parameter, before) in asked.items() if before and not parameter.requires_grad)
    except Exception as error:  # whatever the user's code raises
        return TrainMode(note=f"{method} raised {type(error).__name__}: {error}; its effect in train mode is left out")
    finally:
        for parameter, before in asked.values():
            parameter.requires_grad_(before)
    kept = tuple(path for path, module in shells.root.named_modules() if not module.training)
    said = [*([f"keeps {_listed(kept)} in eval mode"] if kept else []), *([f"freezes {_listed(frozen)}"] if frozen else [])]
    return TrainMode(kept, frozen, f"{method} {' and '.join(said)}, and so does train() of this model" if said else "")


def _overrides_train(module: nn.Module) -> bool:
    method = vars(module).get("train", type(module).train)
    return method is not nn.Module.train and not str(getattr(method, "__module__", "")).startswith("torch.")


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
