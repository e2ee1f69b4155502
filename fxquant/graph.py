"""Facts on nodes, and the few ways passes change a graph.

Everything static that fxquant knows about a node is in `node.meta` and is read and written through this
module, so no other file spells a key. Facts survive `copy.deepcopy` of a GraphModule.

    fact        `TensorFact` of the node's value, or a tuple/list/dict of them, or a number
    source      the user's line: "model.py:41 in forward:  y = self.act(y)"
    module      the dotted path of the user's module the node came from ("layer1.0.conv1")
    made_by     the pass (or "trace") that created the node
    qconfig     the QConfigs (or None) that stand on the user's modules around the call, by their paths, nearest first
    wishes      the rules of the qconfig that cover the node, and each node that was fused into it
    argument    what the user calls an input whose name is none in Python, or one that generated code needs ("torch")
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch.fx.graph import PythonCode

from fxquant.codegen import Code, own_names, registered
from fxquant.errors import ConfigurationError

# Two batch sizes stand for "any": a dimension that differs between them depends on the batch.
# Both are even, so that `batch // 2` is exact, and neither is 1, so that nothing broadcasts by accident.
BATCH_SIZES = (4, 6)


@dataclass(frozen=True)
class BatchDim:
    """A size that grows with the batch: `coefficient * batch + offset`."""

    coefficient: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)

    @staticmethod
    def between(a: int, b: int) -> int | BatchDim:
        """The size that is `a` and `b` at the two tracing batch sizes: a plain int if they agree."""
        if a == b:
            return int(a)
        coefficient = Fraction(b - a, BATCH_SIZES[1] - BATCH_SIZES[0])
        return BatchDim(coefficient, a - coefficient * BATCH_SIZES[0])

    def at(self, batch: int) -> int:
        """The size at this batch size; raises ValueError where it is not a whole number."""
        value = self.coefficient * batch + self.offset
        if value.denominator != 1:
            raise ValueError(f"{self} is not a whole number at batch size {batch}")
        return int(value)

    def __str__(self) -> str:
        numerator, denominator = self.coefficient.numerator, self.coefficient.denominator
        text = ("" if numerator == 1 else str(numerator)) + "B" + ("" if denominator == 1 else f"/{denominator}")
        return text if self.offset == 0 else f"{text}{'+' if self.offset > 0 else ''}{self.offset}"


Size = int | BatchDim


@dataclass(frozen=True)
class TensorFact:
    """Shape and dtype of a tensor, for every batch size at once."""

    shape: tuple[Size, ...]
    dtype: torch.dtype

    @staticmethod
    def between(a: torch.Tensor, b: torch.Tensor) -> TensorFact:
        """The fact of a tensor seen at the two tracing batch sizes."""
        return TensorFact(tuple(BatchDim.between(m, n) for m, n in zip(a.shape, b.shape, strict=True)), a.dtype)

    def at(self, batch: int) -> tuple[int, ...]:
        """The shape at this batch size."""
        return tuple(size if isinstance(size, int) else size.at(batch) for size in self.shape)

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{','.join(str(size) for size in self.shape)}]"


DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


# ---- typed access to node.meta ------------------------------------------------------------------------------------


def fact(node: fx.Node) -> Any:
    """The node's `TensorFact` (or nest of them, or number); None if nothing is known."""
    return node.meta.get("fact")


def set_fact(node: fx.Node, value: Any) -> None:
    node.meta["fact"] = value


def source(node: fx.Node) -> str:
    """The user's source line, or an empty string."""
    return str(node.meta.get("source", ""))


def argument_name(node: fx.Node) -> str:
    """What the user calls the input that a placeholder stands for; as a rule, its name."""
    return str(node.meta.get("argument", node.target))


def set_argument_name(node: fx.Node, name: str) -> None:
    node.meta["argument"] = name


def by_name(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """The inputs of a graph, in its order, as keyword arguments: a call with these is taken as the graph takes it."""
    return dict(zip((str(node.target) for node in module.graph.find_nodes(op="placeholder")), inputs, strict=True))


def module_path(node: fx.Node) -> str:
    """The dotted path of the user's module this node came from, or an empty string for the model itself."""
    return str(node.meta.get("module", ""))


def made_by(node: fx.Node) -> str:
    """The pass that created the node, or "trace"."""
    return str(node.meta.get("made_by", "trace"))


def attached_qconfigs(node: fx.Node) -> tuple[tuple[str, Any], ...]:
    """The QConfigs (or None, for float) that stand on the modules around the call, with their paths: the nearest first."""
    return tuple(node.meta.get("qconfig", ()))


def attach_qconfigs(node: fx.Node, value: tuple[tuple[str, Any], ...]) -> None:
    node.meta["qconfig"] = value


def wishes(node: fx.Node) -> tuple[Any, ...]:
    """What the user asked of this node, and then of each that was fused into it, in the order they run: a `spec.Wish` for each."""
    return tuple(node.meta.get("wishes", ()))


def wish(node: fx.Node, *asked: Any) -> None:
    node.meta["wishes"] = asked


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The node's shape; raises TypeError if its value is not one tensor."""
    value = fact(node)
    if not isinstance(value, TensorFact):
        raise TypeError(f"%{node.name} is not a tensor of known shape")
    return value.shape


def reads_shape_only(node: fx.Node) -> bool:
    """Whether the node asks a tensor for its size, and not for its values."""
    return node.op == "call_method" and node.target in ("size", "dim")


# ---- what quantization knows about a node -------------------------------------------------------------------------


@dataclass(frozen=True)
class Annotation:
    """Whether a node becomes integer, and why.

    dtype    the name of its integer dtype, or None if it stays in float
    because  the reason, for `explain`
    config   the QConfig that applies to it
    group    the id of the group of tensors that share its scale, once scales are shared
    """

    dtype: str | None
    because: str
    config: Any = None
    group: int | None = None


def annotation(node: fx.Node) -> Annotation | None:
    """The node's annotation; None before `specs.annotate`."""
    value = node.meta.get("annotation")
    return value if isinstance(value, Annotation) else None


def annotate(node: fx.Node, value: Annotation) -> None:
    node.meta["annotation"] = value


def observed(node: fx.Node) -> tuple[float, float] | None:
    """The interval beyond which the node's values make no difference to anything that reads them; None if all of them do."""
    return node.meta.get("observed")


def set_observed(node: fx.Node, interval: tuple[float, float]) -> None:
    node.meta["observed"] = interval


def refusal(node: fx.Node) -> str | None:
    """Why the node could not be brought to canonical form; None if it was, or was never an operator."""
    return node.meta.get("refusal")


def refuse(node: fx.Node, because: str) -> None:
    node.meta["refusal"] = because


def is_parameter(node: fx.Node) -> bool:
    """Whether the node's value follows from parameters, buffers and constants alone: it is one, or is computed from such."""
    return node.op == "get_attr" or bool(node.meta.get("parameter"))


def computes_tensor(node: fx.Node) -> bool:
    """Whether the node is something that happens to tensors: neither an input nor the output, a parameter or a number."""
    return node.op not in ("placeholder", "output") and not is_parameter(node) and isinstance(fact(node), TensorFact | list | tuple | dict)


def mark_parameter(node: fx.Node) -> None:
    """Record that the node is computed from parameters alone."""
    node.meta["parameter"] = True


def parameter_value(root: torch.nn.Module, node: fx.Node) -> Any:
    """The value that a parameter, or what is computed from parameters, has at this moment."""
    if node.op == "get_attr":
        return resolve(root, str(node.target))
    args: Any = fx.map_arg(node.args, lambda operand: parameter_value(root, operand))
    kwargs: Any = fx.map_arg(node.kwargs, lambda operand: parameter_value(root, operand))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def spelling(node: fx.Node) -> tuple[Any, ...]:
    """What the user wrote: the function, or the class of the module, the node stood for; several after fusion."""
    return tuple(node.meta.get("spelling", ()))


def spell(node: fx.Node, *written: Any) -> None:
    node.meta["spelling"] = (*spelling(node), *written)


def fused(node: fx.Node) -> tuple[str, ...]:
    """The names of the nodes fused into this one."""
    return tuple(node.meta.get("fused", ()))


def absorb(node: fx.Node, other: fx.Node) -> None:
    """Record that `other` is now part of `node`."""
    wish(node, *wishes(node), *wishes(other))
    node.meta["fused"] = (*fused(node), *fused(other), other.name)
    spell(node, *spelling(other))


def notes(node: fx.Node) -> dict[str, Any]:
    """Facts recorded while lowering: "accumulator_bits", "residual", "wide"."""
    value: dict[str, Any] = node.meta.setdefault("notes", {})
    return value


def noted(node: fx.Node, key: str) -> Any:
    """One of these facts; None where it was not recorded."""
    return node.meta.get("notes", {}).get(key)


@dataclass(frozen=True)
class QParams:
    """The scale and the integer dtype of a quantized tensor in an integer graph.

    A 32-bit output may have several scales, along dimension `axis` of the tensor, counted from the end (-1 is the last).
    """

    scale: float | tuple[float, ...]
    dtype: str
    axis: int | None = None


def qparams(node: fx.Node) -> QParams | None:
    """The scale and dtype of the quantized tensor a node of an integer graph holds; None for any other node."""
    value = node.meta.get("qparams")
    return value if isinstance(value, QParams) else None


def set_qparams(node: fx.Node, value: QParams) -> None:
    node.meta["qparams"] = value


@dataclass(frozen=True)
class Reference:
    """Stands, among the arguments of an `Operation`, for the node of this name."""

    node: str


@dataclass(frozen=True)
class Constant:
    """A parameter as integers: the node that holds them, and what one unit stands for.

    With several scales, they run along dimension `axis`, counted from the end. Those of a transposed convolution's
    weight are the output channels', group after group.
    """

    node: str
    scale: float | tuple[float, ...]
    axis: int | None = None


@dataclass(frozen=True)
class Operation:
    """What the primitives that make a quantized tensor compute together: an operator of the table.

    name          the operator's name
    arguments     its canonical arguments, with a `Reference` for every value of the graph; parameters are absent
    constants     its parameters, by role ("weight", "bias")
    intermediate  the scale and dtype of what a residual is added to, where it is not added in the accumulator
    """

    name: str
    arguments: dict[str, Any]
    constants: dict[str, Constant]
    intermediate: QParams | None = None


def operation(node: fx.Node) -> Operation | None:
    """The operator that a node of an integer graph is the result of; None for any other node."""
    value = node.meta.get("operation")
    return value if isinstance(value, Operation) else None


def set_operation(node: fx.Node, value: Operation) -> None:
    node.meta["operation"] = value


def origin(node: fx.Node) -> str:
    """The name of the prepared node an integer node was lowered from."""
    return str(node.meta.get("origin", node.name))


def is_inner(node: fx.Node) -> bool:
    """Whether a node of an integer graph stands inside of what an operator was lowered to, and is not its result."""
    return origin(node) != node.name


# ---- changing a graph -----------------------------------------------------------------------------------------------


def inherit(node: fx.Node, parent: fx.Node, made_by: str) -> fx.Node:
    """Give a new node the source line, the module, the attached QConfigs and the wishes of the node it was made for."""
    for key in ("source", "module", "qconfig", "wishes"):
        if key in parent.meta:
            node.meta[key] = parent.meta[key]
    node.meta["made_by"] = made_by
    return node


def resolve(root: torch.nn.Module, path: str) -> Any:
    """What is registered at a dotted path, or else the attribute there. Raises AttributeError if there is none."""
    return registered(root, path)


def attach(root: torch.nn.Module, path: str, value: torch.nn.Module | torch.Tensor) -> None:
    """Register a module, or a buffer, at a dotted path, making plain modules on the way.

    What the path names may be what the GraphModule has an attribute for: a user's module may be called "graph".
    """
    *parents, name = path.split(".")
    for part in parents:
        child = root._modules.get(part)
        if child is None:
            child = root._modules[part] = torch.nn.Module()
        root = child
    if isinstance(value, torch.nn.Module):
        root._modules[name] = value
    elif isinstance(value, torch.nn.Parameter):
        root._parameters[name] = value
    else:
        root._buffers[name] = value


def describe(node: fx.Node, fact: Any, source: str, module: str, made_by: str = "trace") -> None:
    """Write everything that is known about a new node."""
    meta = node.meta
    meta["fact"], meta["source"], meta["module"], meta["made_by"] = fact, source, module, made_by


class _Collection:
    """How many compilations, in all threads together, have paused the garbage collection, and whether it was on before the first."""

    lock = threading.Lock()
    pauses = 0
    was_on = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Inside, nothing is garbage collected: almost all that compiling makes is kept, and looking
    through it takes half the time. The last compilation to end puts back what the first one found."""
    with _Collection.lock:
        if _Collection.pauses == 0:
            _Collection.was_on = gc.isenabled()
            gc.disable()
        _Collection.pauses += 1
    try:
        yield
    finally:
        with _Collection.lock:
            _Collection.pauses -= 1
            if _Collection.pauses == 0 and _Collection.was_on:
                gc.enable()


@contextmanager
def autocast_off() -> Iterator[None]:
    """Inside, autocast is off for every device, in this thread: what is compiled does not depend on where the compiler was called."""
    with ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia")


CARRIED = "fxquant.carried"  # in `meta` of a model: what else the float model held


class Model(fx.GraphModule):
    """A GraphModule whose copies keep everything: unused parameters, hooks, and `meta`.

    The user's modules and parameters may have any names, also those of a GraphModule's own attributes ("graph", "meta", "code").
    Its numbers are integers in float32 tensors and scales that are float32, so it moves between devices but not to another
    float dtype. As an integer model it is what is deployed: always in eval mode.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in own_names() and not isinstance(value, torch.Tensor | torch.nn.Module):
            object.__setattr__(self, name, value)  # nn.Module would take it for the user's
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """What is registered under that name, or else what the float model carried; no attribute of this model is hidden by that."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            carried = self.__dict__.get("meta", {}).get(CARRIED)
            if carried is None or (name.startswith("__") and name.endswith("__")):
                raise
            try:
                return carried.find(self, name)
            except AttributeError as error:
                if str(error) != name:
                    raise  # raised by the user's own property
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def recompile(self) -> PythonCode:
        """Compile the graph anew."""
        self._graph.set_codegen(Code())
        return super().recompile()

    @staticmethod
    def of(root: torch.nn.Module, graph: fx.Graph) -> Model:
        """A model with the parameters, buffers and submodules of `root`, which are shared, and this graph.

        It is not compiled yet: call `recompile` before running it.
        """
        model = Model(torch.nn.Module(), fx.Graph())
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            model.__dict__[name] = root.__dict__[name].copy()
        model.meta = dict(root.meta) if isinstance(root, fx.GraphModule) else {}
        model.training = root.training
        replace_graph(model, graph)
        return model

    def train(self, mode: bool = True) -> Model:
        """As any module's; an integer model stays in eval mode."""
        super().train(mode and self.meta.get("stage") != "INTEGER")
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Model:
        """Moves to other devices pass through; a change of the float dtype is refused before anything is changed."""
        wanted = fn(torch.empty(0, dtype=torch.float32)).dtype
        if wanted != torch.float32:
            raise ConfigurationError(
                f"the model cannot be converted to {wanted}",
                because="its integers and scales are exact in float32, and would be rounded",
                remedy="leave it in float32; torch.autocast around a call lets its float operators compute in another type",
            )

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)  # .float() leaves what is float64

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Constants that a state_dict leaves out are passed over where an earlier one has them."""
        for name in self._non_persistent_buffers_set:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __copy__(self) -> Model:
        # What GraphModule makes, and DataParallel runs, would have neither hooks nor unused parameters.
        copied = Model.of(self, copy_graph(self.graph))
        for name, value in self.__dict__.items():
            if name not in _OF_EVERY_COPY:
                copied.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
        copied.recompile()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        copied = Model(torch.nn.Module(), fx.Graph(), type(self).__name__)
        memo[id(self)] = copied
        state = copy.deepcopy({name: value for name, value in self.__dict__.items() if name != "_graph"}, memo)
        copied.__dict__.update(state)
        replace_graph(copied, copy_graph(self.graph))
        copied.recompile()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # A GraphModule would be traced anew from its code, and forget every fact.
        state = {name: value for name, value in self.__dict__.items() if name != "_graph"}
        return _unpickle, (state, [_entry(node) for node in self.graph.nodes])


_OF_EVERY_COPY = ("_graph", "_code", "meta", "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _unpickle(state: dict[str, Any], entries: list[tuple[Any, ...]]) -> Model:
    model = Model(torch.nn.Module(), fx.Graph())
    model.__dict__.update(state)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, meta in entries:
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda value: nodes[value.name] if isinstance(value, _Named) else value)
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
        nodes[name].meta.update(meta)
    replace_graph(model, graph)
    model.recompile()
    return model


@dataclass(frozen=True)
class _Named:
    """Stands for a node among the arguments of a pickled one."""

    name: str


def _entry(node: fx.Node) -> tuple[Any, ...]:
    # One by one: pickling a node would recurse through all that it reads.
    def named(operand: fx.Node) -> Any:
        return _Named(operand.name)

    args, kwargs = fx.map_arg((node.args, node.kwargs), named)
    return node.op, node.name, node.target, args, dict(kwargs), node.meta


def free_name(gm: torch.nn.Module, name: str) -> str:
    """The name, with underscores behind it while something is registered under it, or the GraphModule has an attribute of that name."""
    while name in own_names() or any(name in registry for registry in (gm._modules, gm._parameters, gm._buffers)):
        name += "_"
    return name


def replace_graph(gm: fx.GraphModule, graph: fx.Graph) -> None:
    """Give the module another graph without compiling it; assigning `gm.graph` would compile at once."""
    gm._graph = graph
    graph.owning_module = gm


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same graph with nodes of its own, their names and facts unchanged."""
    copied: fx.Graph = copy.deepcopy(graph)
    return copied


def copy_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """The module tree with tensors and containers of its own; other things its modules refer to are shared. Its root has no hooks.

    A tensor or module that stands in several places is one tensor or module in the copy as well.
    """
    copied: torch.nn.Module = _Copier()(module)
    return copied


def own_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Modules and tensors copied as `copy_parameters` does, for good: in eval mode, and nothing in them asks for a gradient."""
    copier = _Copier()
    copies = {name: copier(value) for name, value in values.items()}
    for copied in copies.values():
        copied.requires_grad_(False)
        if isinstance(copied, torch.nn.Module):
            copied.eval()
    return copies


class _Copier:
    """Copies modules, tensors and the containers that hold them, everything once; what else there is stays what it is."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.Tensor):
            return self._keep(value, self._tensor(value))
        if type(value) in (dict, OrderedDict):
            copied = self._keep(value, type(value)())
            copied.update((key, self(item)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple, set):
            return self._keep(value, type(value)(self(item) for item in value))
        return value

    def _keep(self, value: Any, copied: Any) -> Any:
        self._known[id(value)] = copied
        return copied

    def _module(self, module: torch.nn.Module) -> Any:
        if isinstance(module, torch.jit.ScriptModule):  # its tensors are not in its dictionary
            return self._keep(module, copy.deepcopy(module))
        root = isinstance(module, fx.GraphModule)
        copied: torch.nn.Module = self._keep(module, torch.nn.Module() if root else copy.copy(module))
        parts = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set") if root else module.__dict__
        for name in list(parts):
            copied.__dict__[name] = self(module.__dict__[name])
        if isinstance(copied, torch.nn.RNNBase):  # holds its parameters a second time, in lists, one of them of weak references
            copied._init_flat_weights()
        return copied

    @staticmethod
    def _tensor(tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.detach().clone()
        return torch.nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else data
