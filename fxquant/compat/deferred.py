"""Prepared models for programs of other toolkits: prepared by their first batch or by a checkpoint, and checkpoints of those toolkits.

Programs for the plugin's first releases give `prepare_qat_fx` no example inputs, and calibrate its result. The first call provides the
inputs. The object then *becomes* the prepared model: its class and its attributes are those of the prepared model, so that references
to it stay valid.
"""

import copy
import functools
import inspect
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.accuracy.states import owned_quantizers, require_prepared, update_scales
from fxquant.compat.common import refused
from fxquant.errors import ConfigurationError, NotCalibrated
from fxquant.ir.graph import resolve
from fxquant.ops.core.composite import QUANTIZE
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.undo import all_or_nothing
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
    """Return the prepared model of a model and its example inputs; without example inputs, a model that is prepared by its first batch.

    prepare   a function of a model, example inputs, and `called` and `how` by name
    inplace   whether the caller's object becomes that model. Its parameters stay those that an optimizer may hold, with their new values.
    keeps     whether the prepared model has all parameters of the float model, and no others, so that they exist before the first batch
    """
    source, prepare = model, functools.partial(prepare, called=called, **how)
    if inplace:  # the model's class and attributes, while the caller's object becomes another
        source = object.__new__(type(model))
        object.__setattr__(source, "__dict__", model.__dict__)
    if example_inputs is None:
        prepared: nn.Module = Deferred(source if inplace else copy.deepcopy(model), prepare, called, keeps)
    else:
        prepared = prepare(source, example_inputs)
    if not inplace:
        return prepared
    if not isinstance(prepared, Deferred):
        _keep_parameters(source, prepared)
    become(model, prepared)
    return model


@torch.no_grad()
def _keep_parameters(model: nn.Module, prepared: nn.Module) -> None:
    """Make the prepared model hold `model`'s own parameters of the same name and shape, which take its values."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for path, value in list(prepared.named_parameters(remove_duplicate=False)):
        if path in own and own[path].shape == value.shape and own[path] is not value:
            own[path].copy_(value)
            where, _, name = path.rpartition(".")
            prepared.get_submodule(where)._parameters[name] = own[path]


def _record_shapes(shapes: Any, module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    if not prefix and hasattr(state_dict, "_metadata"):
        state_dict._metadata.setdefault("", {})[SHAPES] = shapes


def keep_shapes(prepared: nn.Module, example_inputs: Any) -> None:
    """Make every state_dict of a prepared model record the shapes and dtypes of its inputs."""
    shapes = pytree.tree_map(
        lambda value: ("tensor", tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value, example_inputs
    )
    prepared.register_state_dict_post_hook(functools.partial(_record_shapes, shapes))  # type: ignore[no-untyped-call]


def shapes_of(state_dict: Any) -> Any:
    """Return example inputs: tensors of zeros of the shapes and dtypes that a state_dict records; None if it records no shapes."""
    shapes = getattr(state_dict, "_metadata", {}).get("", {}).get(SHAPES)
    if shapes is None:
        return None
    return pytree.tree_map(
        lambda value: torch.zeros(value[1], dtype=value[2], device="cpu") if _is_shape(value) else value, shapes, is_leaf=_is_shape
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and value[0] == "tensor"


class Deferred(nn.Module):
    """A model that is prepared at its first call, with that batch as example inputs; `prepared_in_place` returns it."""

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

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state_dict of a prepared model, which records its inputs; any other is loaded once the model is prepared."""
        if (shapes := shapes_of(state_dict)) is not None:
            self._become(shapes, "the model whose state_dict is loaded")
            return self.load_state_dict(state_dict, strict)
        self.later(functools.partial(nn.Module.load_state_dict, state_dict=state_dict, strict=strict))
        return nn.modules.module._IncompatibleKeys([], [])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Deferred":
        self.__dict__["_model"] = self._model._apply(fn, recurse)
        return self

    def _unknown(self, what: str) -> ConfigurationError:
        return refused("not prepared yet", what=what, called=self._called)

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


@all_or_nothing
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
    try:
        integer = fxq.convert(prepared)
    except NotCalibrated as error:
        more = f"{error.remedy}; or, for a model that was saved, {SAVED}"
        raise NotCalibrated(error.what, because=error.because, remedy=more, at=error.at, module=error.module) from None
    integer.register_state_dict_post_hook(_record_graph)  # type: ignore[no-untyped-call]
    integer.register_load_state_dict_pre_hook(_check_graph)  # type: ignore[no-untyped-call]
    logger.info("%s", WITHOUT_MODULES)
    if inplace:
        become(prepared, integer)
    return prepared if inplace else integer


WITHOUT_MODULES = (
    "the integer model is a graph, without quantized modules to be found by class: fxq.text(integer) shows its weights, scales and zero "
    "points, and fxq.qparams(prepared) returns the scales and zero points"
)
GRAPH = "fxquant.graph"  # in the metadata of an integer model's state_dict: the checksum of its graph, which has the zero points
SAVED = "load the state_dict of the prepared model before it is converted, or load the whole integer model, written by torch.save(model, …)"


def _checksum(module: nn.Module) -> int:
    return zlib.crc32(module.code.encode()) if isinstance(module, fx.GraphModule) else 0


def _record_graph(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any]) -> None:
    metadata[GRAPH] = _checksum(module)


def _check_graph(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise ConfigurationError for the state_dict of another integer model, as a hook of load_state_dict; log one without metadata."""
    if GRAPH not in metadata:
        logger.warning("the state_dict has no metadata: zero points and ranges of the integer model are assumed to be equal")
    elif metadata[GRAPH] != _checksum(module):
        raise refused("load_state_dict.graph", text=SAVED)


# ---- Scales from checkpoints of the plugin, or of PyTorch's quantization ----------------------------------------------
#
# key of the checkpoint                        what it becomes
# conv.activation_post_process.scale           the scale of the output of the last operator of module `conv`
# conv.activation_post_process.zero_point      its zero point, of an affine dtype; 0 otherwise
# quant.activation_post_process.scale          the scale of what QuantStub `quant` quantizes
# conv.weight_fake_quant.scale                 the scale of the weight, if that is learned; any other is computed from the weight itself
# activation_post_process_3.scale              of PyTorch's graphs: that of their fourth tensor, in the order they are computed; if the
#                                              numbers of tensors differ, as where a residual is fused here, none is taken
# conv.bn.weight, …                            of a fused layer: those of the batch norm after module `conv`
# head.weight of another shape                 none: it is missing, and unexpected with both shapes
#
# Zero points of signed integers, some of which are negative, count from -128, so 128 is added to all of them. Other state of a fake
# quantize or an observer (counters, ranges, switches) has no meaning here, and is ignored. `strict` is PyTorch's: keys that
# match nothing are unexpected, and operators without a scale in the checkpoint are missing.
ACTIVATION, WEIGHT = "activation_post_process", "weight_fake_quant"
NUMBERED = re.compile(rf"{ACTIVATION}_(\d+)\.(.*)")
FUSED = ".bn."  # in the names of a batch norm that PyTorch fused into a layer


def take_checkpoints(prepared: fx.GraphModule) -> None:
    """Make `load_state_dict` of a prepared model accept the plugin's and PyTorch's checkpoints as well as its own."""
    prepared.register_load_state_dict_pre_hook(_take_keys)  # type: ignore[no-untyped-call]
    prepared.register_load_state_dict_post_hook(_take_scales)  # type: ignore[no-untyped-call]


def _take_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the state of fake quantizes, and values of other shapes, from `state_dict`; a state_dict of fxquant's own stays unchanged.

    Raises ConfigurationError for the statistics of batch norms that are folded into this model's weights.
    """
    foreign = {key: value for key, value in state_dict.items() if _is_foreign(key.removeprefix(prefix))}
    for key in foreign:
        del state_dict[key]
    called = [(operator.path, node) for node, operator in (_called(module) if foreign else ())]
    read = [(layer, str(operand.target)) for layer, node in called for operand in node.all_input_nodes if operand.op == "get_attr"]
    norms = {layer: path for layer, path in read if isinstance(resolve(module, path), nn.modules.batchnorm._BatchNorm)}
    for key in [key for key in state_dict if FUSED in key.removeprefix(prefix)]:
        layer, rest = key.removeprefix(prefix).split(FUSED, 1)
        if layer in norms:
            state_dict[f"{prefix}{norms[layer]}.{rest}"] = state_dict.pop(key)
    if folded := _folded(module, [key.removeprefix(prefix) for key in state_dict if key.endswith(".running_mean")]):
        raise refused("load_state_dict.norms", known=", ".join(folded[:8]))
    own = dict(module.named_parameters())
    unlike = {key: own[key.removeprefix(prefix)].shape for key in state_dict if key.removeprefix(prefix) in own}
    unlike = {key: shape for key, shape in unlike.items() if state_dict[key].shape != shape}
    listed = [f"{key} {tuple(state_dict.pop(key).shape)} in place of {tuple(shape)}" for key, shape in unlike.items()]
    if listed:
        logger.warning("parameters of other shapes are not taken, and strict=False is needed: %s", ", ".join(listed))
    if foreign or listed:
        module.__dict__["_fxquant_foreign"] = {key.removeprefix(prefix): value for key, value in foreign.items()}, listed


def _folded(module: nn.Module, statistics: list[str]) -> list[str]:
    """Return the paths of batch norms in a checkpoint that this model has folded into the layers before them."""
    nodes = {name.lstrip("_") for layer in fxq.inspect.layers(module) for name in layer.fused} if statistics else set()  # type: ignore[arg-type]
    layers = {f"{operator.path}{FUSED}" for operator in quantized_operators(module).values()}
    own = dict(module.named_buffers())
    paths = [key.removesuffix("running_mean") for key in statistics if key not in own]
    return [path[:-1] for path in paths if path in layers or path[:-1].replace(".", "_").lstrip("_") in nodes]


def _is_foreign(key: str) -> bool:
    return f".{ACTIVATION}." in f".{key}" or f".{WEIGHT}." in f".{key}" or NUMBERED.fullmatch(key) is not None


def _called(module: nn.Module) -> list[tuple[fx.Node, QuantizedOperator]]:
    """Return the calls of quantized operators in the order they are computed; an empty list for any module but a graph."""
    operators = {f"quantized.{name}": operator for name, operator in quantized_operators(module).items()}
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return [(node, operators[str(node.target)]) for node in nodes if node.op == "call_module" and str(node.target) in operators]


def _numbered(module: nn.Module, foreign: dict[str, Any]) -> list[QuantizedOperator]:
    """Return the operators whose tensors PyTorch's graph numbers, in its order; none if the numbers of operators differ."""
    numbers = {int(match[1]) for key in foreign if (match := NUMBERED.fullmatch(key))}
    ordered = [(node, operator) for node, operator in _called(module) if not operator.plain]
    places: dict[fx.Node, float] = {node: place for place, (node, _) in enumerate(ordered)}
    for node, operator in ordered:
        if operator.operator is QUANTIZE:  # PyTorch numbers an input at its first reader
            places[node] = min((places[user] for user in node.users if user in places), default=places[node]) - 0.5
    ordered.sort(key=lambda pair: places[pair[0]])
    operators = [operator for _, operator in ordered]
    if numbers == set(range(len(operators))):
        return operators
    owners = [operator for operator in operators if operator.owns_output]  # PyTorch shares grids as well
    return owners if numbers == set(range(len(owners))) else []


@torch.no_grad()
def _take_scales(module: nn.Module, incompatible: Any) -> None:
    foreign, listed = module.__dict__.pop("_fxquant_foreign", ({}, []))
    incompatible.unexpected_keys.extend(listed)
    if not foreign:
        return
    operators = quantized_operators(module)
    assigned: set[str] = set()
    unused = []
    numbered = _numbered(module, foreign)
    single = {key: value for key, value in foreign.items() if isinstance(value, Tensor) and value.numel() == 1 and WEIGHT not in key}
    zeros = {key.removesuffix("zero_point"): int(value) for key, value in single.items() if key.endswith("zero_point")}
    lowest = -128 if min(zeros.values(), default=0) < 0 else 0
    zeros = {key: value - lowest for key, value in zeros.items()}
    for key, value in foreign.items():
        match, zero_point = NUMBERED.fullmatch(key), zeros.get(key.removesuffix("scale"))
        place = ACTIVATION if f".{ACTIVATION}." in key else WEIGHT
        path, kind = match.groups() if match else key.rpartition(f".{place}.")[::2]
        if kind != "scale":
            continue
        if match:
            used = _assign(numbered[int(path)], value, zero_point) if numbered else None
        else:
            used = _activation(operators, path, value, zero_point) if place == ACTIVATION else _weight(operators, path, value)
        assigned |= used or set()
        if used is None:
            unused.append(key)
    stems = tuple(f"quantized.{name}." for name in operators if name in assigned or not _has_scale(operators[name]))
    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not key.startswith(stems) and "weight_quantizer" not in key]
    incompatible.unexpected_keys.extend(unused)
    scales = sum(1 for key in foreign if key.endswith(f"{ACTIVATION}.scale") or (key.endswith(".scale") and NUMBERED.fullmatch(key)))
    logger.info(
        "of %d scales of the checkpoint %d were taken, for %d of %d operators that have one; those of weights follow the weights",
        scales, scales - sum(ACTIVATION in key for key in unused), len(assigned), sum(map(_has_scale, operators.values())),
    )  # fmt: skip


def _has_scale(operator: QuantizedOperator) -> bool:
    return bool(owned_quantizers(operator)) and not operator.output.follows_sum and not operator.output.given


def _activation(operators: dict[str, QuantizedOperator], path: str, scale: Tensor, zero_point: int | None) -> set[str] | None:
    """Set the output scale of a module's last operator; return the operators that have it, or None if the module does not exist."""
    matches = [operator for operator in operators.values() if operator.path == path and operator.owns_output and not operator.plain]
    return _assign(matches[-1], scale, zero_point) if matches and scale.numel() == 1 else None


def _assign(operator: QuantizedOperator, scale: Tensor, zero_point: int | None) -> set[str]:
    """Set an operator's output scale; return its name, unless the scale is another's, an accumulator's, or was given."""
    if not operator.owns_output or operator.output.follows_sum or operator.output.given:
        return set()
    operator.output.assign(scale.reshape(()).float(), zero_point if operator.output.dtype.affine else None)
    if operator.output.range is not None:
        operator.output.batches_used.copy_(operator.output.range.count)
    return {operator.name}


def _weight(operators: dict[str, QuantizedOperator], path: str, scale: Tensor) -> set[str] | None:
    """Set the weight scale of a module's layer if it is learned; return None if the module does not exist."""
    layers = [operator for operator in operators.values() if operator.path == path and operator.operator is not QUANTIZE]
    for operator in layers:
        if (learned := operator.weight_quantizer.learned) is not None and learned.base_scale.numel() == scale.numel():
            learned.assign(scale.reshape(learned.base_scale.shape).float())
    return set() if layers else None
