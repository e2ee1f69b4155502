"""Networks of one function and its members, how near a result is to another one, and the whole contract in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.shared import contract
from tests.shared.contract import Compiled


class Network(nn.Module):
    """`function(self, x, …)` with members by name: modules, parameters, and tensors, which become buffers."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(self, x, *more)


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
