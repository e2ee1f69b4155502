"""The effects of a model's own `train` besides train mode: a graph has none of its code, so they are kept by name."""

from __future__ import annotations

from torch import nn

from fxquant.frontend.snapshot import Snapshot
from fxquant.frontend.state import overrides_train, own_parameters

SHOWN = 8  # names in a sentence


def own_train_mode(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of modules that the user's `train` keeps in eval mode, the names of parameters that it freezes, and a note on both.

    They are found on shells; the model is not changed.
    """
    own = [type(module).__name__ for module in model.modules() if overrides_train(module)]
    if not own:
        return [], [], []
    shells = Snapshot(model, own_buffers=True)
    copies = own_parameters(shells.modules)
    asked = {name: copies[id(parameter)] for name, parameter in model.named_parameters() if parameter.requires_grad}
    method = " and ".join(f"{name}.train" for name in dict.fromkeys(own))
    try:
        shells.root.train(True)
        frozen = [name for name, copy in asked.items() if not copy.requires_grad]
    except Exception as error:  # whatever the user's code raises
        return [], [], [f"{method} raised {type(error).__name__}: {error}; its effect in train mode is left out"]
    kept = [path for path, module in shells.root.named_modules() if not module.training]
    said = [*([f"keeps {_listed(kept)} in eval mode"] if kept else []), *([f"freezes {_listed(frozen)}"] if frozen else [])]
    return kept, frozen, [f"{method} {' and '.join(said)}, and so does train() of this model"] if said else []


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
