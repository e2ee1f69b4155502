"""Weights that are alive: a network whose values have collapsed to zero agrees with anything."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from fxquant.support import seeded


def initialise(model: nn.Module, seed: int) -> None:
    """Kaiming weights; BatchNorm weights in 0.5..1.5 and biases from N(0, 0.2), so that folding them is not trivial."""
    with seeded(seed):
        initialise_with_current_seed(model)


def initialise_with_current_seed(model: nn.Module) -> None:
    """Initialise from the present state of the global generator."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, _BatchNorm | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.2)
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.normal_(module.bias, 0.0, 0.2)
    with torch.no_grad():
        for module in model.modules():
            for norm in getattr(module, "damped", ()):
                norm.weight *= 0.25


def make_alive(model: nn.Module, images: Tensor, batch_size: int = 32) -> None:
    """Set every BatchNorm's running statistics to their mean over batches of `images`; the model is left in eval mode.

    Everything but BatchNorm runs as in evaluation, so the result is a function of the weights and the images alone.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    model.eval()
    with cumulative(norms), torch.no_grad():
        for batch in torch.split(images, batch_size):
            model(batch)


@contextmanager
def cumulative(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Inside, statistics start afresh and are averaged over all batches; afterwards each norm has its former momentum."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


class Activity(NamedTuple):
    """Statistics of one activation's results: the fraction that is not positive (zeros, for a relu), and the standard deviation."""

    silent: float
    std: float
    gate: bool = False

    @property
    def is_alive(self) -> bool:
        return self.std > 0 and (self.gate or 0.1 <= self.silent <= 0.9)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the output of each activation, however the model spells it."""

    ACTIVATIONS = tuple(
        getattr(torch.ops.aten, name + suffix) for name in ("relu", "hardtanh", "hardswish", "silu", "leaky_relu") for suffix in ("", "_")
    )
    GATES = (torch.ops.aten.sigmoid, torch.ops.aten.hardsigmoid)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activities: list[Activity] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        gate = func.overloadpacket in self.GATES
        if gate or func.overloadpacket in self.ACTIVATIONS:
            self.activities.append(Activity((out <= 0).double().mean().item(), out.std().item(), gate))
        return out


def activities(model: nn.Module, images: Tensor) -> list[Activity]:
    """The activity of each activation call of `model`, in the order of execution."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        model(images)
    return recorder.activities


def check_alive(model: nn.Module, images: Tensor) -> None:
    """Raise ValueError if an activation is positive nearly everywhere (over 90 %) or hardly anywhere, or a constant."""
    dead = [f"activation {index}: {activity}" for index, activity in enumerate(activities(model, images)) if not activity.is_alive]
    if dead:
        raise ValueError("the model is not alive:\n" + "\n".join(dead))


def live(model: nn.Module, *sizes: int) -> nn.Module:
    """Set a model's batch norms to the statistics of random inputs of `sizes`; return the model, whose values stay alive."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None  # the mean of what it sees
    with torch.no_grad():
        model.train(bool(norms))
        model(torch.randn(4, *sizes, generator=torch.Generator().manual_seed(2)))
    return model.eval()
