"""Networks of one function and its members, how near a result is to another one, and the whole contract in one call."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.shared import contract
from tests.shared.contract import Compiled
from tests.shared.written import add_members


class Network(nn.Module):
    """`function(self, x, …)` with members by name: modules, parameters, and tensors, which become buffers."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        add_members(self, members)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(self, x, *more)


def members(named: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """Make a forward function a class of modules. A new module has the members that `named` returns for its arguments."""

    def initialize(self: nn.Module, *arguments: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        add_members(self, named(*arguments, **options))

    def class_of(forward: Callable[..., Any]) -> type[nn.Module]:
        kept = {name: getattr(forward, name) for name in ("__module__", "__qualname__", "__doc__")}
        model = type(forward.__name__, (nn.Module,), {"__init__": initialize, "forward": forward, **kept})
        forward.__name__, forward.__qualname__ = "forward", f"{model.__qualname__}.forward"
        forward.__code__ = forward.__code__.replace(co_name="forward")  # as errors name the user's line
        return model

    return class_of


def sqnr(wanted: Tensor, found: Tensor) -> float:
    """The signal by the noise of a result, in dB."""
    wanted, found = wanted.detach().double(), found.detach().double()
    return float(10 * torch.log10(wanted.square().mean() / (wanted - found).square().mean().clamp_min(1e-30)))


def held(
    model: nn.Module,
    batches: Sequence[Any],
    path: Path | None = None,
    target: str = "bayes-e",
    qconfig: Any = None,
    train: bool = True,
    **options: Any,
) -> Compiled:
    """Compile a model with these options and hold it to E2 on every batch, to E1 by a file at the path, and to E3 on the first batch."""
    given = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    made = contract.compiled(model.eval(), batches, target, qconfig, **options)
    for inputs in given:
        contract.assert_validate_is_integer(*made, *inputs)
    if path is not None:
        contract.assert_integer_is_onnx(made.integer, path, given)
    if train:
        contract.assert_train_is_validate(made.prepared, *given[0])
    return made
