"""A model with unknown inputs: it is prepared by its first batch, or by a checkpoint of a prepared model.

Programs for the plugin's first releases give `prepare_qat_fx` no example inputs, and calibrate its result. The first call provides the
inputs. The object then *becomes* the prepared model: its class and its attributes are those of the prepared model, so that references
to it stay valid.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.calibration.calibration import require_prepared, update_scales
from fxquant.errors import ConfigurationError
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import State
from fxquant.support import logger

SHAPES = "fxquant.example_inputs"  # in the metadata of a state_dict: shape and dtype of the inputs that the model was traced with


def become(model: nn.Module, other: nn.Module) -> None:
    """Turn an object into another model: it takes over that model's class and attributes."""
    object.__setattr__(model, "__class__", type(other))
    object.__setattr__(model, "__dict__", other.__dict__)
    for hook in other._load_state_dict_pre_hooks.values():
        if isinstance(getattr(hook, "module", None), weakref.ref):  # it does not keep the other object alive
            hook.module = weakref.ref(model)  # type: ignore[attr-defined]


def prepared_in_place(
    model: nn.Module, inplace: bool, example_inputs: Any, prepare: Callable[..., fx.GraphModule], called: str, keeps: bool, **how: Any
) -> Any:
    """Return the prepared model of a model and its example inputs; without these, a model that is prepared by its first batch.

    prepare   a function of a model, example inputs, and `called` and `how` by name
    inplace   whether the caller's object becomes that model. Its parameters stay those that an optimizer may hold, with their new values.
    keeps     whether the prepared model has all parameters of the float model, and no others, so that they exist before the first batch
    """
    source, prepare = model, functools.partial(prepare, called=called, **how)
    if inplace:  # the model's class and attributes, while the caller's object becomes another
        source = object.__new__(type(model))
        object.__setattr__(source, "__dict__", model.__dict__)
    if example_inputs is None:
        made: nn.Module = Deferred(source if inplace else copy.deepcopy(model), prepare, called, keeps)
    else:
        made = prepare(source, example_inputs)
    if not inplace:
        return made
    if not isinstance(made, Deferred):
        _keep_parameters(source, made)
    become(model, made)
    return model


@torch.no_grad()
def _keep_parameters(model: nn.Module, prepared: nn.Module) -> None:
    """Put a model's own parameter objects into the prepared model, under the names that both have."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for path, value in list(prepared.named_parameters(remove_duplicate=False)):
        if path in own and own[path].shape == value.shape and own[path] is not value:
            own[path].copy_(value)
            where, _, name = path.rpartition(".")
            prepared.get_submodule(where)._parameters[name] = own[path]


class _Shapes:
    """A hook that records the shapes of a model's inputs in every state_dict."""

    def __init__(self, shapes: Any) -> None:
        self.shapes = shapes

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        if not prefix and hasattr(state_dict, "_metadata"):
            state_dict._metadata.setdefault("", {})[SHAPES] = self.shapes


def keep_shapes(prepared: nn.Module, example_inputs: Any) -> None:
    """Make every state_dict of a prepared model record the shapes and dtypes of its inputs."""
    shapes = pytree.tree_map(
        lambda value: ("tensor", tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value, example_inputs
    )
    prepared.register_state_dict_post_hook(_Shapes(shapes))  # type: ignore[no-untyped-call]


def shapes_of(state_dict: Any) -> Any:
    """Return zero inputs of the shapes that a state_dict records; None if it records none."""
    shapes = getattr(state_dict, "_metadata", {}).get("", {}).get(SHAPES)
    if shapes is None:
        return None
    return pytree.tree_map(
        lambda value: torch.zeros(value[1], dtype=value[2], device="cpu") if _is_shape(value) else value, shapes, is_leaf=_is_shape
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and value[0] == "tensor"


class Deferred(nn.Module):
    """A model that its first batch prepares. `prepared_in_place` constructs it from its own arguments."""

    def __init__(self, model: nn.Module, prepare: Callable[[nn.Module, Any], fx.GraphModule], called: str, keeps: bool = False) -> None:
        super().__init__()
        self.__dict__.update(_model=model, _prepare=prepare, _called=called, _keeps=keeps, _pending=[])
        self.training = model.training

    def _become(self, example_inputs: Any, how: str) -> None:
        prepared, pending, training = self._prepare(self._model, example_inputs), self._pending, self.training
        logger.info("%s: the model is prepared with the shapes of %s", self._called, how)
        _keep_parameters(self._model, prepared)
        become(self, prepared)
        self.train(training)
        for action in pending:
            action(self)

    def later(self, action: Callable[[Any], None]) -> None:
        """Apply an action to the prepared model as soon as it exists."""
        self._pending.append(action)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments if kwargs else None
        self._become(args if bound is None else dict(bound), "its first batch")
        return self(*args, **kwargs)

    def train(self, mode: bool = True) -> Deferred:
        self.training = mode
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state_dict of a prepared model, which records its inputs; any other is loaded once the model is prepared."""
        known = shapes_of(state_dict)
        if known is not None:
            self._become(known, "the model whose state_dict is loaded")
            return self.load_state_dict(state_dict, strict)
        self.later(functools.partial(nn.Module.load_state_dict, state_dict=state_dict, strict=strict))
        return nn.modules.module._IncompatibleKeys([], [])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Deferred:
        self.__dict__["_model"] = self._model._apply(fn, recurse)
        return self

    def _unknown(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what} of a model that is not prepared yet does not exist",
            because=f"{self._called} was given no example_inputs, so that the model is prepared by its first batch",
            remedy=f"pass {self._called}(…, example_inputs=(x,)), run one batch first, or load the state_dict of a calibrated model",
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the float model. Raises ConfigurationError if the prepared model has others: folded weights."""
        if not self._keeps:
            raise self._unknown("the parameters")
        yield from self._model.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigurationError: the model does not have scales yet."""
        raise self._unknown("the state_dict")

    def __getattr__(self, name: str) -> Any:
        if name in ("graph", "code", "meta") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_model"], name)


def set_observed_scales(prepared: nn.Module) -> None:
    """Set the scales from everything observed so far; the states of operators stay."""
    for operator in quantized_operators(prepared).values():
        if operator.state is State.CALIBRATE:
            update_scales(operator)


def converted(prepared: fx.GraphModule, inplace: bool = False) -> fx.GraphModule:
    """Return the integer graph of a prepared model in any state, which is kept; with `inplace` the caller's object becomes it."""
    if isinstance(prepared, Deferred):
        raise prepared._unknown("the integer graph")
    require_prepared(prepared)
    set_observed_scales(prepared)
    integer = fxq.convert(prepared)
    if inplace:
        become(prepared, integer)
    return prepared if inplace else integer
