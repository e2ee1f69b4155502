"""Small networks of one function and its members, steps that tests take with them, and the whole contract in one call."""

import copy
import functools
import inspect
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from tests.shared import contract
from tests.shared.contract import Compiled


def add_members(model: nn.Module, members: dict[str, Any]) -> None:
    """Give a module members by name; a tensor other than a parameter becomes a buffer."""
    for name, member in members.items():
        if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
            model.register_buffer(name, member)
        else:
            setattr(model, name, member)


def written(forward: Callable[..., Any], /, **parts: Any) -> nn.Module:
    """A module with these attributes, in train mode; a tensor other than a parameter is a buffer. `forward` takes the module first."""
    model = type("Written", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    add_members(model, parts)
    return model


class Network(nn.Module):
    """`function(self, x, …)` with members by name: modules, parameters, and tensors, which become buffers."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        add_members(self, members)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(self, x, *more)


def members(named: Callable[..., dict[str, Any]], seed: int | None = None) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """Make a forward function a class of modules. A new module has the members that `named` returns for its arguments, after the seed."""

    def initialize(self: nn.Module, *arguments: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        if seed is not None:
            torch.manual_seed(seed)
        add_members(self, named(*arguments, **options))

    def class_of(forward: Callable[..., Any]) -> type[nn.Module]:
        kept = {name: getattr(forward, name) for name in ("__module__", "__qualname__", "__doc__")}
        model = type(forward.__name__, (nn.Module,), {"__init__": initialize, "forward": forward, **kept})
        forward.__name__, forward.__qualname__ = "forward", f"{model.__qualname__}.forward"
        forward.__code__ = forward.__code__.replace(co_name="forward")  # as errors name the user's line
        return model

    return class_of


def copies(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function compute a result once for the same arguments, and give copies of the result."""
    cached, signature = functools.cache(make), inspect.signature(make)

    @functools.wraps(make)
    def copied(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        return copy.deepcopy(cached(*bound.args, **bound.kwargs))

    return copied


def stored(value: Any, weights_only: bool = False) -> Any:
    """Return what torch.load reads of what torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def to_train(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state and mode TRAIN."""
    fxq.set_state(prepared, fxq.State.TRAIN)
    return prepared.train()


def to_validate(prepared: fx.GraphModule) -> fx.GraphModule:
    """The prepared model itself, in state VALIDATE and eval mode."""
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return prepared.eval()


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def descend(
    model: nn.Module, batches: Iterable[Any], rate: float = 0.01, loss: Callable[[Any], Tensor] = mean_square, optimizer: Any = None
) -> None:
    """Take one step down the loss of each batch, by stochastic gradient descent unless an optimizer is given."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), rate)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()


def dtypes(prepared: nn.Module) -> dict[str, str]:
    """Return the dtype of each layer, by its name."""
    return {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}


def sqnr(wanted: Tensor, actual: Tensor) -> float:
    """The signal by the noise of a result, in dB."""
    wanted, actual = wanted.detach().double(), actual.detach().double()
    return float(10 * torch.log10(wanted.square().mean() / (wanted - actual).square().mean().clamp_min(1e-30)))


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
    samples = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    compiled_model = contract.compiled(model.eval(), batches, target, qconfig, **options)
    for inputs in samples:
        contract.assert_validate_is_integer(*compiled_model, *inputs)
    if path is not None:
        contract.assert_integer_is_onnx(compiled_model.integer, path, samples)
    if train:
        contract.assert_train_is_validate(compiled_model.prepared, *samples[0])
    return compiled_model
