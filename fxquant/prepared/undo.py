"""Put a prepared model back as it was: the one way to undo what a call has changed when an error, or Ctrl-C at any moment, ends it.

A call that changes operators one by one takes a `Snapshot` first. So the model is in the state from before the call, or in the one that
the call leaves, and never between them. What has another value only for a while has it in `Having`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from fxquant.prepared.operators import quantized_operators

P = ParamSpec("P")
R = TypeVar("R")


class Snapshot:
    """The attributes of objects, with the entries of their dicts (modules, buffers, hooks), and the numbers of tensors, at one moment.

    `restore` puts them into the same objects and tensors, and may be called more than once; a context does so at its end, `always` or if
    anything is raised inside.
    """

    def __init__(self, objects: Iterable[Any], tensors: Iterable[Tensor] = (), *, always: bool = False) -> None:
        attributes = [vars(each) for each in objects]
        dicts = [*attributes, *(value for had in attributes for value in had.values() if isinstance(value, dict))]
        self.dicts = [(each, dict(each)) for each in dicts]
        self.always, self.gradients = always, torch.is_grad_enabled()
        self.numbers = [(tensor, tensor.detach().clone()) for tensor in {id(tensor): tensor for tensor in tensors}.values()]

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind not in (None, GeneratorExit)  # that is an interrupt after all was done, when a context's generator is thrown away
        if failed:
            torch.set_grad_enabled(self.gradients)  # PyTorch's no_grad leaves them off where an interrupt meets it just as it begins
        if failed or self.always:
            self.restore()

    def restore(self) -> None:
        """Put all attributes and numbers back, also where an interrupt meets the restoring."""
        _surely(self._restore)

    @torch.no_grad()
    def _restore(self) -> None:
        for there, before in self.dicts:
            if list(there) != list(before):
                there.clear()
            there.update(before)
        for tensor, value in self.numbers:
            with torch.inference_mode(tensor.is_inference()):  # a tensor of this mode is changed in it alone
                tensor.copy_(value)


def _surely(step: Callable[[], None]) -> None:
    """Call a function that may be called again, and once more where Ctrl-C interrupts it."""
    try:
        step()
    except BaseException:
        step()
        raise


def inside_operators(model: nn.Module) -> list[nn.Module]:
    """Return the operators of a prepared model, or of a part of one, with all modules in them."""
    return [module for operator in quantized_operators(model).values() for module in operator.modules()]


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of these modules, without the parameters and buffers of their submodules."""
    return [tensor for module in modules for each in (module.parameters, module.buffers) for tensor in each(recurse=False)]


def all_or_nothing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it leaves the operators of the models among its positional arguments as they were if it raises."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        modules = [module for model in args if isinstance(model, nn.Module) for module in inside_operators(model)]
        with Snapshot(modules, tensors_of(modules)):
            return function(*args, **kwargs)

    return cast(Callable[P, R], call)


class Having:
    """A context in which objects have other values of some attributes, as in `Having([(module, {"training": False})])`."""

    def __init__(self, values: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
        self.inside = list(values)
        self.before = [(each, {name: getattr(each, name) for name in values}) for each, values in self.inside]

    def __enter__(self) -> None:
        try:
            _set(self.inside)
        except BaseException:
            _set(self.before)
            raise

    def __exit__(self, *_: object) -> None:
        _surely(functools.partial(_set, self.before))


def _set(values: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
    for each, attributes in values:
        for name, value in attributes.items():
            setattr(each, name, value)


def having(objects: Iterable[Any], **values: Any) -> Having:
    """Return a context in which attributes of these objects have other values, as in `having(operators, left_out=True)`."""
    return Having([(each, values) for each in objects])
