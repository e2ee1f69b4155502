"""Small float models written in one expression, and the steps that tests take with a prepared model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

import fxquant as fxq
from tests.shared import contract


def written(forward: Callable[..., Any], /, **parts: Any) -> nn.Module:
    """A module with these attributes, in train mode; a tensor that is no parameter is a buffer. `forward` takes the module first."""
    made = type("Written", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


def calibrated(model: nn.Module, batches: Sequence[Any], target: str = "bayes-e", qconfig: Any = None, **options: Any) -> fx.GraphModule:
    """The model prepared on the first batch and calibrated on all of them."""
    return fxq.calibrate(fxq.prepare(model, batches[0], target, qconfig, **options), batches, show_progress=False)


def to_train(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state and mode TRAIN."""
    fxq.set_state(prepared, fxq.State.TRAIN)
    return prepared.train()


def to_validate(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state VALIDATE and eval mode."""
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return prepared.eval()


def assert_contract(prepared: fx.GraphModule, path: Path | None, *inputs: Tensor, integer: fx.GraphModule | None = None) -> None:
    """E2, E1 where a path for the file is given, and E3, which freezes the model."""
    integer = fxq.convert(prepared) if integer is None else integer
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    if path is not None:
        contract.assert_integer_is_onnx(integer, path, [inputs])
    contract.assert_train_is_validate(prepared, *inputs)
