"""Dropout in all its kinds, and the user's modules that draw: the identity, except while training.

Dropout that also acts in eval mode is not in the operator table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxquant.ops.core.operators import IMAGES, Lowering, Quantized, Same, Trait, lowered, sampled

DROPOUTS: dict[type, str] = {
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
}


OF_MODULE = "module"  # the kind of a module of the user's
SCALING = ("dropout", "dropout1d", "dropout2d", "dropout3d")  # the kinds that multiply by a number that is not negative


def _drops(kind: str) -> Callable[..., dict[str, Any]]:
    """Return an adapter that makes the canonical arguments of one of PyTorch's functions.

    The model was traced in eval mode, so dropout with training=True acts in eval mode, too, as in Monte Carlo dropout.
    It is not a function of its input, and is left as it is.
    """

    def arguments(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None) -> Any:
        if (training if train is None else train) and p > 0:
            return "it drops at random in eval mode as well (training=True), so no two runs are equal"
        return {"input": input, "p": p, "kind": kind}

    return arguments


@lowered(
    function=lambda input, p=0.5, kind="dropout": input,
    by_name=False,
    calls={
        **{getattr(F, kind): _drops(kind) for kind in DROPOUTS.values()},
        **{getattr(torch, kind): _drops(kind) for kind in ("dropout", "alpha_dropout", "feature_alpha_dropout")},
        torch.feature_dropout: _drops("dropout2d"),
    },
    modules={module: lambda m: {"p": m.p, "kind": DROPOUTS[type(m)]} for module in DROPOUTS},
    idle=lambda arguments: arguments["p"] == 0,
    traits=frozenset({Trait.HOMOGENEOUS}),
    demand=Same(),
)
@sampled("dropout(x, 0.3, self.training).relu()", "alpha_dropout(x, 0.3, self.training).relu()")
@sampled("feature_alpha_dropout(x, 0.3, self.training).relu()", "torch.feature_dropout(x, 0.3, self.training).relu()")
@sampled("F.dropout2d(x, 0.3, self.training).relu()", "{nn.Dropout2d(0.3)}(x).relu()", "{nn.FeatureAlphaDropout(0.3)}(x).relu()")
@sampled("{nn.Dropout(0.3)}(x).relu()", "{nn.AlphaDropout(0.3)}(x).relu()")
@sampled("F.dropout1d(x, 0.3, self.training).relu()", "{nn.Dropout1d(0.3)}(x).relu()", x=IMAGES[1])
@sampled("F.dropout3d(x, 0.3, self.training).relu()", "{nn.Dropout3d(0.3)}(x).relu()", x=IMAGES[3])
def dropout(lowering: Lowering, input: Quantized, p: float = 0.5, kind: str = "dropout") -> Quantized:
    """Return the input itself; in state TRAIN, in train mode, the function of torch.nn.functional named `kind` drops with probability p.

    A module's p is the present one. The noise is on float values, which need not lie on the grid; the next operator rounds them to it.
    """
    if not lowering.training or (kind == OF_MODULE and lowering.noise is None):  # a file holds no module of the user's
        return input
    real, module = input.real(), lowering.called
    if lowering.noise is not None:
        noisy = type(lowering.noise).forward(lowering.noise, real)
    else:
        noisy = getattr(F, kind)(real, module.p if isinstance(module, nn.modules.dropout._DropoutNd) else p, True)
    return input.with_value(noisy / input.scale)
