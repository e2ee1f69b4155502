"""Random weights that are alive in a model nobody adapted: every parameter is drawn by what kind of thing it is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.zoo.life import cumulative
from fxquant.support import seeded

_SMALL = 0.1  # a constant below this stands for "nothing yet": the scale of a new layer's branch
_LINEAR = 1.0  # standard deviations that a batch norm lifts its results by
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def enliven(model: nn.Module, batches: Sequence[dict[str, Tensor]], seed: int = 0) -> None:
    """Draw every parameter anew, and take the statistics of batch norms from `batches`; the model is left in eval mode.

    A matrix gives unit variance for unit variance, so that the scores of an attention vary by about one and its softmax is neither flat
    nor a choice. A batch norm lifts its results, so that most of it passes through a relu: with as much below 0 as above, each layer
    would amplify noise by 1.7 dB, since a relu halves the noise, and leaves a third of the variance that the next batch norm makes one
    of (Yang et al., A Mean Field Theory of Batch Normalization); trained networks do not. What was constant varies around that constant;
    what was nothing, a class token or the scale of a branch, is something.
    Raises ValueError if a layer returns a constant, or values that are not finite.
    """
    with seeded(seed), torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                _draw(module, name, parameter)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    model.eval()
    with cumulative(norms), torch.no_grad():
        for batch in batches:
            model(**batch)
    dead = dead_layers(model, batches[0])
    if dead:
        raise ValueError("the model is not alive; these layers return constants, or values that are not finite: " + ", ".join(dead))


def _draw(module: nn.Module, name: str, parameter: Tensor) -> None:
    first = float(parameter.flatten()[0]) if parameter.numel() else 0.0
    constant = bool((parameter == first).all()) and parameter.dim() != 0
    if parameter.dim() > 1 and isinstance(module, _PRODUCTS):
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        parameter.normal_(0, 1 / math.sqrt(parameter.numel() / parameter.shape[int(transposed)]))
    elif parameter.dim() == 2 and type(module).__name__ == "Conv1D":  # that of transformers: [in, out]
        parameter.normal_(0, 1 / math.sqrt(parameter.shape[0]))
    elif name == "bias" and isinstance(module, _BatchNorm):
        parameter.normal_(_LINEAR, 0.3)
    elif name.endswith("bias") and parameter.dim() == 1:
        parameter.normal_(0, 0.1)
    elif constant and abs(first) >= _SMALL:
        parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    elif constant and first != 0:
        parameter.uniform_(0.3, 1)
    elif parameter.dim() > 0:
        parameter.normal_(0, 0.5)


def dead_layers(model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """The modules without children whose result is a constant, or not finite, by path."""
    dead: list[str] = []

    def look(path: str) -> object:
        def hook(module: nn.Module, inputs: object, result: object) -> None:
            if isinstance(result, Tensor) and result.is_floating_point() and result.numel() > 1:
                values = result.double()
                if not bool(torch.isfinite(values).all()) or float(values.std()) < 1e-6:
                    dead.append(path)

        return hook

    hooks = [
        module.register_forward_hook(look(path))
        for path, module in model.named_modules()
        if not list(module.children())  # type: ignore[arg-type]
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return dead
