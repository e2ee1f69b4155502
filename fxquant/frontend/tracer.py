"""Trace a model once, at the points that stand for all sizes, with the structure of its result; compare traces and models."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from fxquant.errors import FxQuantError, TraceError
from fxquant.frontend.entry import noted_limits
from fxquant.frontend.environment import Snapshot, prepared_environment, raised_in, source_of_error, undisturbed
from fxquant.frontend.handler import Ended, Handler, LeafRule, ModuleCalls
from fxquant.frontend.inputs import ExampleInputs, note_sizes
from fxquant.frontend.state import NOTHING_MOVED, Draws, MovedState
from fxquant.frontend.values import BatchNumber, TracedTensor, Unknown, refuse, tracing
from fxquant.ir import functional, graph
from fxquant.ir.graph import BATCH_SIZES, BatchDim, TensorFact
from fxquant.support import logger

# ---- the result of a model -------------------------------------------------------------------------------------------
#
# A graph returns tensors, numbers, and tuples, lists and dicts of them. Calling it returns the model's own type.
#
# A `ModelOutput` of two tensors is a dict of two nodes in the graph. A forward hook turns the dict of a run into a ModelOutput again. This
# works if PyTorch's pytree knows the class, or if it is a dataclass that a model traced in this process returned. A file holds the class's
# name, which is looked up there and never imported; where it is not known, the model returns the dict.
_RETURNED = "fxquant.returned"  # in `meta`: {"form": the form of what forward returned}
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_DEEPEST = 8  # of attributes of objects within objects

# A form says what stands at a place of the nest that the graph returns:
#   None                           what is there
#   ["items", [form]]              a tuple or a list
#   ["keys", [form]]               a dict, or a mapping
#   ["class", name, context, [form]]   a class that pytree knows or a dataclass, of whose parts the graph returns a list or a dict
Form = Any


@dataclass(frozen=True)
class Returned:
    """Converts the result of forward to nested lists, tuples and dicts of nodes, which a graph can return."""

    leaf: Callable[[torch.Tensor], Any]  # returns the node of a tensor
    note: Callable[[str], None]  # records a sentence about a value that was fixed

    def convert(self, output: Any) -> tuple[Any, Form]:
        """Return the nested nodes, and the form from which `rebuilt` restores the classes."""
        if isinstance(output, torch.Tensor):
            return self.leaf(output), None
        if isinstance(output, BatchNumber | Unknown):
            return output.node, None
        registered = pytree.SUPPORTED_NODES.get(type(output))
        if registered is not None and type(output).__module__.partition(".")[0] not in ("builtins", "collections", "torch"):
            return self._class(output, registered)
        if isinstance(output, Mapping):
            parts = {key: self.convert(item) for key, item in output.items()}
            return {key: part for key, (part, _) in parts.items()}, ["keys", [form for _, form in parts.values()]]
        if isinstance(output, tuple) and hasattr(output, "_fields"):
            return type(output)(*(self.convert(item)[0] for item in output)), None
        if isinstance(output, (tuple, list)):
            items = [self.convert(item) for item in output]
            nest = [item for item, _ in items]
            return nest if isinstance(output, list) else tuple(nest), ["items", [form for _, form in items]]
        if isinstance(output, _PLAIN):
            return output, None
        converted = self._dataclass(output) if is_dataclass(output) else None
        return (self._object(output), None) if converted is None else converted

    def _class(self, output: Any, registered: Any) -> tuple[Any, Form]:
        children, context = registered.flatten_fn(output)
        parts = [self.convert(child) for child in children]
        forms = [form for _, form in parts]
        entries = registered.flatten_with_keys_fn(output)[0] if registered.flatten_with_keys_fn is not None else ()
        keys = [getattr(key, "key", getattr(key, "name", None)) for key, _ in entries]
        named = len(keys) == len(parts) and all(isinstance(key, str) for key in keys)
        nest = dict(zip(keys, (part for part, _ in parts), strict=True)) if named else [part for part, _ in parts]
        name = _name_of(type(output))
        if not _is_plain(context):
            self.note(f"forward returned a {type(output).__name__}, whose parts are returned as a {'dict' if named else 'list'}")
            return nest, ["keys" if named else "items", forms]
        return nest, ["class", name, context, forms]

    def _dataclass(self, output: Any) -> tuple[Any, Form] | None:
        """Return the fields as a dict, and its form; None if a graph cannot return a field, or the class cannot be rebuilt from them."""
        own = fields(output)
        if not all(each.init for each in own) or self._attributes(output, _DEEPEST) is None:
            return None
        try:
            parts = {each.name: self.convert(getattr(output, each.name)) for each in own}
        except TraceError:
            return None
        name = _name_of(type(output))
        _DATACLASSES[name] = type(output)
        return {key: part for key, (part, _) in parts.items()}, ["class", name, None, [form for _, form in parts.values()]]

    def _object(self, output: Any) -> Any:
        """Return the attributes of an object that hold tensors, as a dict. Raises TraceError if there are none."""
        nest = self._attributes(output, _DEEPEST)
        if nest is None:
            because = "a graph returns tensors, numbers, and tuples, lists and dicts of them, and this object holds none"
            remedy = "return a tuple or a dict, or wrap the model in a module whose forward does"
            refuse(f"forward returned a {type(output).__name__}", because=because, remedy=remedy)
        dropped = [name for name in getattr(output, "__dict__", {}) if name not in nest and not name.startswith("_")]
        without = f", without {', '.join(map(repr, dropped))}" if dropped else ""
        self.note(f"forward returned a {type(output).__name__}, whose tensors are returned as a dict of its attributes{without}")
        return nest

    def _attributes(self, value: Any, depth: int) -> Any:
        """Return a nest of the tensors an object holds; None if it holds none."""
        if isinstance(value, (torch.Tensor, BatchNumber)):
            return self.convert(value)[0]
        if isinstance(value, (type, nn.Module)) or depth == 0:
            return None
        if isinstance(value, (list, tuple)):
            items = [self._attributes(item, depth - 1) for item in value]
            return items if any(item is not None for item in items) else None
        attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        nested = {key: self._attributes(item, depth - 1) for key, item in attributes.items() if isinstance(key, str)}
        return {key: item for key, item in nested.items() if item is not None} or None


def nest_of(output: Any) -> Any:
    """Return the result of a model as the nest of tensors that its graph returns."""
    return Returned(lambda tensor: tensor, lambda text: None).convert(output)[0]


def _is_plain(context: Any) -> bool:
    if isinstance(context, (list, tuple)):
        return all(map(_is_plain, context))
    return context is None or isinstance(context, (bool, int, float, str))


@dataclass(frozen=True)
class ReturnForm:
    """A forward hook that rebuilds the classes of forward's result from the graph's plain containers."""

    form: Form

    def __call__(self, module: Any, args: Any, result: Any) -> Any:
        return rebuilt(self.form, result)


def return_form(module: fx.GraphModule) -> ReturnForm | None:
    """Return the hook that makes the result of the float model of a graph's; None where they are the same."""
    form = module.meta.get(_RETURNED, {}).get("form")
    return None if form is None else ReturnForm(form)


def set_form(module: fx.GraphModule, form: Form) -> None:
    """Store the form in a traced module's `meta` if it holds classes to be rebuilt; models made from it inherit `meta`."""
    if next(_classes(form), None) is not None:
        module.meta[_RETURNED] = {"form": form}


def is_form(meta: dict[str, Any]) -> bool:
    """Return whether `meta` of a loaded model holds no form, or a valid one."""
    try:
        return _RETURNED not in meta or all(isinstance(name, str) for name in _classes(meta[_RETURNED]["form"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return False


def _classes(form: Form) -> Iterator[str]:
    if form is None:
        return
    kind, *content = form
    if kind == "class":
        yield content[0]
    elif kind not in ("items", "keys"):
        raise ValueError(kind)
    for inner in content[-1]:
        yield from _classes(inner)


def rebuilt(form: Form, value: Any) -> Any:
    """Return the nest with the classes made again that pytree knows in this process."""
    if form is None or not isinstance(value, (dict, list, tuple)):
        return value
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    if len(parts) != len(form[-1]):
        return value
    parts = [rebuilt(inner, part) for inner, part in zip(form[-1], parts, strict=True)]
    maker = _maker(form[1]) if form[0] == "class" else None
    if maker is not None:
        return maker(parts, form[2])
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else type(value)(parts)


_DATACLASSES: dict[str, type] = {}  # that models which were traced in this process returned


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _maker(name: str) -> Callable[[list[Any], Any], Any] | None:
    """Return a function that builds an object of the class of this name from its parts; None if the class is not known."""
    node_type = next((each for each in pytree.SUPPORTED_NODES if _name_of(each) == name), None)
    if node_type is not None:
        return pytree.SUPPORTED_NODES[node_type].unflatten_fn
    kind = _DATACLASSES.get(name)
    if kind is None:
        return None
    return lambda parts, context: kind(**dict(zip((each.name for each in fields(kind)), parts, strict=True)))


RETRACE_SIZES = (10, 14)


class _Mode(TorchFunctionMode):
    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not self._handler.paused:
            self._handler.gradients.switched = True
        return self._handler.call(func, args, kwargs or {})


def record(
    model: nn.Module, inputs: ExampleInputs, leaf: LeafRule, qconfigs: Mapping[str, Any] = MappingProxyType({}), *, again: bool = False,
    training: bool = False, modes: Mapping[str, bool] = MappingProxyType({}), random: MovedState = NOTHING_MOVED,
) -> Handler:  # fmt: skip
    """Trace a model in eval mode, or with its own Python in train mode; return the handler, with its graph. The model is not changed.

    qconfigs  the QConfigs of the nodes of calls inside of a module, by the module's path
    again     trace at two other batch sizes, for comparison, and without source lines
    modes     source line -> whether its operations have gradients in train mode, if eval mode differs
    random    what is random in train mode: noise modules, and attention calls with dropout
    """
    snapshot = Snapshot(model, training=training)
    batches = (*RETRACE_SIZES, *BATCH_SIZES) if again else (*BATCH_SIZES, *RETRACE_SIZES)
    batch, others = int(inputs.batch is not None), bool(inputs.sizes.others)
    inputs.evaluator.points = (0, batch, 2 if others else batch)
    handler = Handler(snapshot, inputs.evaluator, batches, _run.__code__, locate=not again)
    handler.until = inputs.until
    handler.gradients.modes, handler.random, numbers = modes, random, Draws(snapshot, _run.__code__)
    sizes = [{other.name: other.reference for other in inputs.sizes.others}] * 2
    sizes.append({other.name: other.another if again else other.largest for other in inputs.sizes.others})
    points = zip((*handler.batches[:2], handler.batches[1]), sizes, strict=True)
    shapes = [inputs.shapes(batch, others) for batch, others in points]
    traced = {name: _placeholder(handler, name, example, shapes, inputs) for name, example in inputs.tensors().items()}
    args, kwargs = inputs.arguments(traced)
    handler.call_module, handler.qconfigs = ModuleCalls(handler, leaf), qconfigs
    with tracing(handler):
        with prepared_environment(model, numbers), torch.enable_grad(), _Mode(handler):  # in which mode forward computes is recorded
            try:
                result, handler.form = _run(handler, args, kwargs)
            except Ended:
                return handler
            except FxQuantError as error:
                error.reached = None if again else handler.reached
                raise
        graph.describe(handler.graph.output(result), fx.map_arg(result, graph.fact), "", "")
        handler.gradients.finish(handler.graph)
        for node in reversed(handler.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                handler.graph.erase_node(node)
    handler.draws = frozenset(numbers.places)
    return handler


def _run(handler: Handler, args: Any, kwargs: Any) -> Any:
    """Run the model on traced arguments; return its result as a nest of nodes, with its form. Errors name a line inside the model."""
    try:
        output = handler.snapshot.root(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return Returned(lambda tensor: _returned(handler, tensor), handler.note).convert(output)
    except FxQuantError:
        raise
    except Exception as error:
        where = handler.line or source_of_error(error, _run.__code__)
        if raised_in(error, "torch/_functorch/"):
            raise TraceError(
                "a transform of torch.func cannot be traced here",
                at=where,
                because=f"vmap, grad, jvp and the like look into tensors, which have no content in a trace: {type(error).__name__}",
                remedy="write what it computes for the whole batch, by broadcasting or torch.bmm; or keep the function as Python: fxq.wrap",
            ) from None
        message = str(error)
        remedy = "call the model on the example inputs first; if that works, move what fails out of forward"
        if isinstance(error, TypeError) and message.endswith(("not _Int", "not _Float")):  # what stands in for Python's while tracing
            message = message.replace("not _Int", "not Python's int").replace("not _Float", "not Python's float")
            remedy = "name PyTorch's dtype: torch.int64 for int, torch.float64 for float"
        raise TraceError(f"the model's forward raised {type(error).__name__}", at=where, because=message, remedy=remedy) from error


def _returned(handler: Handler, tensor: torch.Tensor) -> fx.Node:
    tensor = handler.memory.current(tensor)
    if not isinstance(tensor, TracedTensor):
        return handler.attribute(tensor)[0]
    handler.memory.refresh(tensor)
    return tensor.node


def _placeholder(
    handler: Handler, name: str, example: torch.Tensor, shapes: list[dict[str, list[int]]], inputs: ExampleInputs
) -> TracedTensor:
    """Add the placeholder of the input `name`, and return its traced tensor; `shapes` has the shapes of all inputs at each point."""
    last = example.dim() == 4 and not example.is_contiguous() and example.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    with handler.evaluator.mode:
        seen = [torch.empty(each[name], dtype=example.dtype, device=example.device, memory_format=layout) for each in shapes]
    value = handler.evaluator.intern(*seen)
    node = handler.graph.placeholder(name)
    graph.describe(node, value.fact, "", "")
    note_sizes(node, inputs.names.index(name), inputs.sizes)
    if name in inputs.renamed:
        graph.set_argument_name(node, inputs.renamed[name])
    return TracedTensor(node, value)


# ---- checks that a trace means what the model means, at every batch size ---------------------------------------------
_FIX = "keep batch sizes as x.shape[0] or x.size(0) gives them, or trace with options=fxq.Options(dynamic_shapes={}) to fix the batch size"


def compare_recordings(first: Handler, second: Handler) -> None:
    """Raise a TraceError if two traces at different batch sizes are not the same graph."""
    counterpart: dict[fx.Node, fx.Node] = {}
    second_nodes = iter(second.graph.nodes)
    for node in first.graph.nodes:
        other: fx.Node | None = next(second_nodes, None)
        if other is None:
            _refuse(node, "the operation is missing at another batch size")
        if node.op != other.op or (node.target is not other.target and node.target != other.target):
            _refuse(node, f"it calls {graph.target_name(node)} at one batch size and {graph.target_name(other)} at another")
        counterpart[node] = other
        difference = _difference((node.args, node.kwargs), (other.args, other.kwargs), counterpart)
        if difference is not None:
            _refuse(node, f"an argument of {graph.target_name(node)} is {difference[0]} at one batch size and {difference[1]} at another")
        _compare_facts(node, other)
    extra = next(second_nodes, None)
    if extra is not None:
        _refuse(extra, "the operation is there at one batch size only")
    for name, constant in first.constants.items():
        if name in second.constants and not same_tensor(constant, second.constants[name]):
            _refuse(first.graph.find_nodes(op="get_attr", target=name)[0], "the content of a constant depends on the batch size")


def _difference(mine: Any, theirs: Any, counterpart: dict[fx.Node, fx.Node]) -> tuple[Any, Any] | None:
    """Return the first place where two arguments differ."""
    if isinstance(mine, fx.Node):
        return None if counterpart.get(mine) is theirs else (mine, theirs)
    if isinstance(mine, (tuple, list)):
        if not isinstance(theirs, (tuple, list)) or len(mine) != len(theirs):
            return mine, theirs
        return next(filter(None, (_difference(a, b, counterpart) for a, b in zip(mine, theirs, strict=True))), None)
    if isinstance(mine, dict):
        if not isinstance(theirs, dict) or list(mine) != list(theirs):
            return mine, theirs
        return next(filter(None, (_difference(mine[key], theirs[key], counterpart) for key in mine)), None)
    if isinstance(mine, slice) and isinstance(theirs, slice):
        return _difference((mine.start, mine.stop, mine.step), (theirs.start, theirs.stop, theirs.step), counterpart)
    same = type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs))
    return None if same else (mine, theirs)


def _compare_facts(node: fx.Node, other: fx.Node) -> None:
    """Check that a size of the first trace, a formula of the batch size, gives that of the second trace at its batch sizes.

    Other sizes may differ between the traces: one of these is the largest here, and any other there.
    """
    mine, theirs = graph.fact(node), graph.fact(other)
    if mine is theirs or not isinstance(mine, (TensorFact, BatchDim)):
        return
    sizes = zip(mine.shape, theirs.shape, strict=True) if isinstance(mine, TensorFact) else ((mine, theirs),)
    for size, other_size in sizes:
        # Facts are written for the first pair of batch sizes, also those of the second trace.
        if _at(size, RETRACE_SIZES) != _at(other_size, graph.BATCH_SIZES):
            if isinstance(mine, BatchDim):
                graph.set_fact(node, None)
                return
            _refuse(node, f"a size of its result is {size} at small batch sizes, and something else at larger ones")


def _at(size: int | BatchDim, batches: Sequence[int]) -> list[Any]:
    return [size if isinstance(size, int) else size.coefficient * batch + size.offset for batch in batches]


def _refuse(node: fx.Node, because: str) -> NoReturn:
    raise TraceError("Python code in the model turned the batch size into a constant", node=node, because=because, remedy=_FIX)


def compare_with_model(model: nn.Module, traced: fx.GraphModule, inputs: ExampleInputs) -> None:
    """Raise a TraceError if the graph and the model do not give the same bits on the example inputs, also at other sizes."""
    _compare_at(model, traced, inputs, inputs.tensors(), required=True)
    batch = None if inputs.batch is None else noted_limits(traced.graph).another(inputs.batch)
    others = {other.name: other.another for other in inputs.sizes.others}
    if batch is not None or others:
        _compare_at(model, traced, inputs, inputs.resized(batch, others), required=False)
    if _is_packed(traced):  # whoever reads all of its data reads no padding: sequences of full length do not show it
        tensors = inputs.tensors()
        for name, each in tensors.items():
            if each.dtype == torch.int64 and each.dim() == 1 and len(each):  # lengths, as it seems
                tensors[name] = (each - (torch.arange(len(each), device=each.device) - each.argmax()).abs()).clamp_min(1)
        _compare_at(model, traced, inputs, tensors, required=False)


def _is_packed(traced: fx.GraphModule) -> bool:
    return bool(traced.graph.find_nodes(op="call_function", target=functional.over_lengths))


def _compare_at(
    model: nn.Module, traced: fx.GraphModule, inputs: ExampleInputs, tensors: dict[str, torch.Tensor], *, required: bool
) -> None:
    args, kwargs = inputs.arguments({name: tensor.clone() for name, tensor in tensors.items()})
    shells = Snapshot(model, own_buffers=True)
    with torch.no_grad(), undisturbed():
        try:
            expected = shells.root(*args, **kwargs)
        except Exception as error:
            if not required:
                return
            where = source_of_error(error, _compare_at.__code__)
            note = "raised by the float model, which fxquant calls on the example inputs to compare its graph with it"
            getattr(error, "add_note", logger.error)(note + (f", at {where}" if where else ""))  # Python 3.10 has no notes
            raise
    with torch.no_grad(), undisturbed():
        actual = traced(**{name: tensor.clone() for name, tensor in tensors.items()})
    results = [[leaf for leaf in tree_leaves(nest_of(each)) if isinstance(leaf, torch.Tensor)] for each in (actual, expected)]
    packed = _is_packed(traced)  # a layer on its rows sums them in another order than on padded ones
    for index, (mine, theirs) in enumerate(zip(*results, strict=True)):
        if not same_tensor(mine, theirs) and not (packed and mine.shape == theirs.shape and torch.allclose(mine, theirs, equal_nan=True)):
            difference = ""
            if mine.shape == theirs.shape:
                difference = f" by up to {(mine.double() - theirs.double()).abs().max().item():.3g}"
            shape = tuple(next(iter(tensors.values())).shape)
            padding = ", or reads all data of a packed sequence, which has its padding in a graph" * packed
            raise TraceError(
                f"output {index} of the graph is not the model's output",
                because=f"on the example input of shape {shape} the two differ{difference}; forward keeps state between calls, "
                f"draws random numbers, or has an effect that is not an operation of the graph{padding}",
                remedy="make forward a function of its inputs and parameters alone",
            )


def same_tensor(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits; any two NaN count as the same."""
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    return torch.equal(mine, theirs) or bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())
