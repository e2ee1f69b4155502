"""Turn calls on traced tensors into nodes, which happens here alone: calls of operations, and of modules that stay whole."""

import contextlib
import difflib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from fxquant.errors import ConfigurationError, TraceError
from fxquant.frontend import values as traced
from fxquant.frontend import written_out as spelled
from fxquant.frontend.entry import refuse_scripted, uncompiled
from fxquant.frontend.environment import Snapshot, source_of_error, user_source
from fxquant.frontend.fake import READS_CONTENT, Evaluator, Sequenced, evaluate, refuse_condition
from fxquant.frontend.gradients import Gradients, about_gradients, overwritten, ruled
from fxquant.frontend.opaque import record
from fxquant.frontend.values import UNKNOWN, Arguments, BatchInt, BatchNumber, Number, TracedTensor, Unknown, Value, is_tracked, refuse
from fxquant.frontend.written_out import Spelling, by_own_names, is_random, property_spelling, python_operator, spelling_of, written_out
from fxquant.ir import carried, functional, graph
from fxquant.ir.graph import LEAF, POINTS, spell
from fxquant.ir.integer import Reference
from fxquant.numerics.rounding import GradientRule
from fxquant.support import logger


class Ended(BaseException):
    """The end of a trace after as many operations as were asked for; no model catches it by `except Exception`."""


class Handler:
    """Records one trace at three points of sizes.

    batches    the two batch sizes of this trace, and two others at which numbers are computed as well
    path       dotted path of the module whose forward is executing
    line       the source line of the executing operator of an exported program; "" for a Python model
    notes      sentences about values fixed while tracing, in order
    locate     whether nodes get their source lines: true of the first trace of a model, false of the ones that are compared with it
    read       names of tensors that became constants
    reached    how many operations were begun
    until      how many are traced; None: all
    paused     true while an operation is being recorded: operations that run for that are not recorded
    """

    call_module: Callable[..., Any]  # replaces `nn.Module.__call__`: called with the original, the module, and its arguments
    random: Any  # a `MovedState`: the modules and calls that are random in train mode
    form: Any  # the nested structure of forward's result
    qconfigs: Mapping[str, Any]  # on modules, by path
    until: int | None
    draws: frozenset[tuple[str, str]]  # the calls that draw random numbers: the path of the module, and the line of the user's code

    def __init__(self, snapshot: Snapshot, evaluator: Evaluator, batches: tuple[int, ...], root_code: CodeType, locate: bool) -> None:
        self.snapshot, self.batches, self.evaluator, self.locate = snapshot, batches, evaluator, locate
        self.graph = new_graph()
        self.path = self.line = ""
        self.qconfig: tuple[tuple[str, Any], ...] = ()  # those of the modules being called, by path, the nearest first
        # Values to record when they occur as arguments, by identity: parameters, buffers, constants changed in place.
        self.known: dict[int, Any] = dict(snapshot.tensors)
        # The in-place changes.
        self.memory = traced.Memory(self.record, self.note, snapshot.tensors, self.known, functools.partial(overwritten, self))
        self.constants: dict[str, torch.Tensor] = {}  # tensors that are neither parameters nor buffers, by target
        # Methods of shells that stay Python, by the path at which the graph calls them.
        self.methods: dict[str, tuple[nn.Module, Callable[..., Any]]] = {}
        self.notes, self.read = dict[str, None](), set[str]()
        self.calls: list[tuple[Any, ...]] = []  # the calls of modules, with operands and results: `hooks.Call`
        # The module attributes that forward read, by the module's path and the attribute's name.
        self.settings: dict[str, dict[str, Any]] = {}
        self.gradients = Gradients(snapshot.names)  # the gradient rules of forward
        self.paused, self._root_code = False, root_code
        self.reached, self.until = 0, None
        self.lengths: dict[Any, torch.Tensor] = {}  # of padded sequences, by the batch sizes of their `PackedSequence`: see `written_out`
        self._attributes: dict[int, tuple[fx.Node, Value, int, torch.Tensor]] = {}
        self._sizes: dict[fx.Node, tuple[Any, ...]] = {}

    def attached(self, path: str) -> tuple[tuple[str, Any], ...]:
        """Return the QConfig on the module of a path, with the path; nothing where there is none."""
        return ((path, self.qconfigs[path]),) if path in self.qconfigs else ()

    def attribute_read(self, module: nn.Module, name: str, value: Any) -> None:
        """Note an attribute of a module that is read: a number, a string or a function becomes a part of the graph."""
        path = self.snapshot.paths.get(id(module))
        if path is not None and not self.paused:
            carried.note(self.settings.setdefault(path, {}), name, value)

    # ---- entries ---------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run or record a function that PyTorch was asked for."""
        if self.paused:
            return func(*args, **kwargs)
        if not is_tracked(args, self.known) and not (kwargs and is_tracked(kwargs.values(), self.known)) and not is_random(func):
            return func(*args, **kwargs)
        name = spelled.property_name(func)
        if name is not None:
            return self._property(name, args[0])
        if getattr(func, "__name__", "") == "__set__":
            return self._set_property(func, args)
        if len(args) == 2 and not kwargs and type(args[0]) is not TracedTensor:
            function = python_operator(func)
            if function is not None:
                result = self.operator(function, args)
                return self.memory.advance(args[0], result) if func.__name__.endswith("_") else result
        kwargs = by_own_names(func, kwargs)
        for rewritten in (about_gradients(self, func, args, kwargs), written_out(func, args, kwargs)):
            if rewritten is not NotImplemented:
                return rewritten
        return self._spelled(spelling_of(func), args, kwargs)

    def operator(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record one of Python's operators, with a tensor among its operands."""
        return self.record("call_function", function, function, args, {})

    def rows(self, tensor: TracedTensor) -> Any:
        """Return the rows of a tensor that is iterated over."""
        shapes = tensor.value.shapes
        if not shapes[0]:
            raise TypeError("iteration over a 0-d tensor")
        counts = [shape[0] for shape in shapes]
        if len(set(counts)) > 1:
            because = f"a graph has a fixed number of operations, and the number of rows depends on {traced.varying(counts)}"
            remedy = "write the loop with whole tensors, or fix sizes by options=fxq.Options(dynamic_shapes={})"
            refuse("the model iterates over rows whose number varies", because=because, remedy=remedy)
        return self.record("call_method", "unbind", torch.Tensor.unbind, (tensor, 0), {})

    def sizes(self, tensor: TracedTensor) -> tuple[Any, ...]:
        """Return the shape, with batch numbers for the sizes that vary."""
        self.memory.refresh(tensor)
        shapes = tensor.value.shapes
        if shapes.count(shapes[0]) == len(shapes):
            return tuple(shapes[0])
        node = tensor.node
        sizes = self._sizes.get(node)
        if sizes is None:
            columns = enumerate(zip(*shapes, strict=True))
            sizes = self._sizes[node] = tuple(seen[0] if len(set(seen)) == 1 else self._size(node, dim, seen) for dim, seen in columns)
        return sizes

    def _size(self, node: fx.Node, dim: int, seen: tuple[int, ...]) -> Any:
        size = self.graph.create_node("call_method", "size", (node, dim))
        self._describe(size, traced.numeric_fact(seen))
        return BatchInt(self._foreseen(seen), size)

    def arithmetic(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compute a function of numbers at all sizes; return a plain number if the results agree, else a recorded batch number."""
        values = self._everywhere(function, args)
        if all(value == values[0] or value != value for value in values):
            return values[0]
        nodes = tuple(arg.node if isinstance(arg, BatchNumber) else arg for arg in args)
        node = self.graph.create_node("call_function", function, nodes)
        seen = values[: len(POINTS)]
        self._describe(node, traced.numeric_fact(seen) if len(set(seen)) > 1 else None)
        return BatchInt(values, node) if all(isinstance(value, int) for value in values) else traced.BatchFloat(values, node)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Compare numbers that depend on sizes that vary; the result must be the same at all sizes."""
        values = self._everywhere(function, args)
        if any(other != values[0] for other in values):
            refuse_condition(values if len(set(values[: len(POINTS)])) > 1 else values[1:])
        if self.locate and not any(isinstance(arg, BatchNumber) for arg in args[1:]):
            self.note(f"a comparison of a size that depends on the batch was resolved as {values[0]}")
        return bool(values[0])

    def _everywhere(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            function(*(arg.values[index] if isinstance(arg, BatchNumber) else arg for arg in args)) for index in range(len(POINTS) + 2)
        )

    def _foreseen(self, seen: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a number at the points and the last two of `batches`, extrapolated linearly; comparing two traces proves it."""
        a, b, *_ = seen
        first, second, *others = self.batches
        rise, run = b - a, second - first
        return (*seen, *(a + (rise * (other - first) // run if isinstance(a, int) else rise * (other - first) / run) for other in others))

    # ---- recording -------------------------------------------------------------------------------------------------

    def _spelled(self, spelling: Spelling, args: Any, kwargs: Any) -> Any:
        if spelling.op == "call_method" and spelling.target in ("size", "requires_grad_", "__len__") and isinstance(args[0], TracedTensor):
            return getattr(args[0], spelling.target)(*args[1:], **kwargs)
        if spelling.swapped:
            args = args[::-1]
        if spelling.function is functional.setitem and self.memory.holds(*args):
            return None
        out = kwargs.get("out")
        target = args[0] if spelling.mutates else out
        if out is not None:
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if spelling.flag is not None:
            args, kwargs, flag = _without_flag(args, kwargs, spelling.flag)
            target = args[0] if flag else target
        result = self.record(spelling.op, spelling.target, spelling.function, args, kwargs, spelling.content)
        if target is None:
            return result
        if isinstance(target, (tuple, list)):
            return type(result)([self.memory.advance(*pair) for pair in zip(target, result, strict=True)])
        return self.memory.advance(target, result, spelling.op == "call_method" and spelling.target in functional.VIEWS)

    def record(
        self, op: str, target: Any, function: Callable[..., Any], args: Any, kwargs: Any, content: bool = True, key: Any = None
    ) -> Any:
        """Evaluate an operation and, unless its result is plain Python, add its node."""
        if self.reached == self.until:
            raise Ended
        self.reached += 1
        with self.pausing():
            arguments = Arguments(function if key is None else key, self.memory, self.attribute)
            node_args = tuple([arguments.convert(arg) for arg in args])
            node_kwargs = {name: arguments.convert(arg) for name, arg in kwargs.items()} if kwargs else {}
            if kwargs:
                arguments.key.append(tuple(kwargs))
            arguments.fake |= not content  # then constants stand for their shapes and dtypes alone
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            outcome = evaluate(self.evaluator, name, function, args, kwargs, arguments)
            if name in READS_CONTENT:
                self.note(f"the content of a constant was read by {name}")
            if not outcome.recorded:
                return _plain(outcome.template)
            node = self.graph.create_node(op, target, node_args, node_kwargs)
            self.describe(node, outcome.template)
            result = self.wrap(node, outcome.template)
            if target == "detach" and isinstance(result, TracedTensor):
                result.stopped = True
            if outcome.alias is not None:
                step = traced.view_step(self.record, op, target, function, args, kwargs) if outcome.alias == 0 else None
                traced.share_memory(arguments.traced[outcome.alias], result, outcome.same_place, step)
            return result

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside, operations are not recorded."""
        paused, self.paused = self.paused, True
        try:
            with torch._C.DisableTorchFunctionSubclass():  # modes stay: attention layers ask for them
                yield
        finally:
            self.paused = paused

    def _describe(self, node: fx.Node, fact: Any, path: str | None = None) -> None:
        if torch._C._is_any_autocast_enabled():
            because = "a graph has no place for autocast: the numbers would differ from the model's"
            remedy = "remove torch.autocast from forward, or convert explicitly with .to(dtype)"
            refuse("autocast is switched inside forward", because=because, remedy=remedy)
        graph.describe(node, fact, self.source() if self.locate else "", self.path if path is None else path)
        if share := self.random.dropped.get((graph.module_path(node), graph.source(node))):
            graph.drop_in_training(node, share)
        self.gradients.describe(node)
        if self.qconfig:
            graph.attach_qconfigs(node, self.qconfig)

    def describe(self, node: fx.Node, template: Any) -> None:
        """Set a node's fact (shape, dtype or number) from a template, and its source line."""
        self._describe(node, _fact(template))

    def wrap(self, node: fx.Node, template: Any) -> Any:
        """Return the object that stands for the result of a node while the model's Python runs: a TracedTensor, a sequence of such, …"""
        if isinstance(template, Value):
            return TracedTensor(node, template)
        if isinstance(template, Sequenced):
            names = template.keys if template.keys is not None else range(len(template.items))
            return template.rebuild([self._item(node, name, item) for name, item in zip(names, template.items, strict=True)])
        if isinstance(template, Number):
            kind = BatchInt if isinstance(template.values[0], int) else traced.BatchFloat
            return kind(self._foreseen(template.values), node)
        return Unknown(node) if template is UNKNOWN else template

    def unknown_item(self, unknown: Unknown, index: Any) -> Unknown:
        """Record a getitem, by number or name, of an `Unknown` value, and return its `Unknown` result."""
        node = self.graph.create_node("call_function", operator.getitem, (unknown.node, index))
        self._describe(node, None)
        return Unknown(node)

    def method(self, module: nn.Module, function: Callable[..., Any]) -> str:
        """Return the path at which the graph calls a method of a module that is kept as Python."""
        target = f"{self.snapshot.paths.get(id(module), self.path)}.{function.__name__}".lstrip(".")
        self.methods[target] = module, function
        return target

    def _item(self, node: fx.Node, name: Any, template: Any) -> Any:
        if not (isinstance(template, (Value, Number, Sequenced)) or template is UNKNOWN):
            return template
        item = self.graph.create_node("call_function", operator.getitem, (node, name))
        self._describe(item, _fact(template), node.meta.get("module"))
        return self.wrap(item, template)

    # ---- properties, parameters, constants -------------------------------------------------------------------------

    def _property(self, name: str, tensor: torch.Tensor) -> Any:
        tensor = self.memory.current(tensor)
        if name == "real" and not tensor.is_complex():
            return tensor
        spelling = property_spelling(name)
        if spelling is not None:
            args = (tensor, name) if spelling.op == "call_function" else (tensor,)
            return self.record(spelling.op, spelling.target, spelling.function, args, {})
        if not isinstance(tensor, TracedTensor):
            return getattr(tensor, name)
        if name == "shape":
            return tensor.shape
        if name == "requires_grad":
            return self.gradients.required(self, tensor.node)
        return None if name in ("grad", "grad_fn") else getattr(tensor.value.tensors[0], name)

    def _set_property(self, func: Any, args: Any) -> None:
        name = func.__self__.__name__
        if name not in ("requires_grad", "grad"):
            because = "a graph computes new tensors and changes none"
            remedy = "compute a new tensor instead of changing one"
            refuse(f"the model assigns to .{name} of a tensor", because=because, remedy=remedy)
        if name == "requires_grad" and isinstance(args[0], TracedTensor):
            args[0].requires_grad_(args[1])

    def nodes_of(self, values: Sequence[Any]) -> tuple[fx.Node, ...]:
        """Return the nodes of tensors and of numbers that depend on the batch."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(map(Arguments(None, self.memory, self.attribute).convert, values))

    def is_trained(self, node: fx.Node) -> bool:
        """Return whether a node is a parameter that requires a gradient, or a layer that has one."""
        try:
            resolved: Any = graph.resolve(self.snapshot.root, str(node.target))
        except AttributeError:  # a constant, or a method that is kept as Python
            return False
        return any(each.requires_grad for each in ([resolved] if isinstance(resolved, torch.Tensor) else resolved.parameters()))

    def attribute(self, tensor: torch.Tensor) -> tuple[fx.Node, Value]:
        """Return the `get_attr` node and the value of a parameter, a buffer or a constant."""
        entry = self._attributes.get(id(tensor))
        if entry is not None and entry[2] == tensor._version:
            return entry[:2]
        name = self.snapshot.tensors.get(id(tensor))
        if name is None:
            name, value = self._constant(tensor), self.evaluator.known(tensor.detach().clone())
        else:
            value = self.evaluator.intern(tensor) if isinstance(tensor, nn.Parameter) else self.evaluator.known(tensor)
        node = self.graph.create_node("get_attr", name)
        self._describe(node, value.fact)
        self._attributes[id(tensor)] = (node, value, tensor._version, tensor)  # the tensor is kept, so that its id stays taken
        return node, value

    def _constant(self, tensor: torch.Tensor) -> str:
        name = f"_constant_{len(self.constants)}"
        while name in self.snapshot.names:
            name = "_" + name
        self.constants[name] = tensor.detach().clone()
        where = self.snapshot.attributes.get(id(tensor))
        if where is not None:
            self.read.add(where)
            self.note(f"{where} is neither parameter nor buffer: its present content became a constant")
        return name

    def note(self, text: str) -> None:
        """Record something that was fixed while tracing."""
        where = self.source()
        self.notes[f"{text} ({where})" if where else text] = None

    def warn(self, text: str) -> None:
        """Note something that is not kept, and log it, once for all traces of a model."""
        self.note(text)
        if self.locate:
            logger.warning("%s: %s", self.source(), text)

    def source(self) -> str:
        """Return the line of the model that is being executed."""
        return self.line or user_source(self._root_code)


def _without_flag(args: Any, kwargs: Any, position: int) -> tuple[Any, Any, bool]:
    if "inplace" in kwargs:
        return args, {**kwargs, "inplace": False}, bool(kwargs["inplace"])
    if len(args) > position and args[position]:
        return (*args[:position], False, *args[position + 1 :]), kwargs, True
    return args, kwargs, False


def _fact(template: Any) -> Any:
    if isinstance(template, Value):
        return template.fact
    if isinstance(template, Sequenced):
        facts_of_items = [_fact(item) for item in template.items]
        return dict(zip(template.keys, facts_of_items, strict=True)) if template.keys is not None else tuple(facts_of_items)
    if template is UNKNOWN:
        return None
    return traced.numeric_fact(template.values) if isinstance(template, Number) else template


def _plain(template: Any) -> Any:
    return template.rebuild([_plain(item) for item in template.items]) if isinstance(template, Sequenced) else template


def new_graph() -> fx.Graph:
    """Return an empty graph, in which no node can take the name of the module itself in the generated code."""
    graph = fx.Graph()
    graph._graph_namespace.create_name("self", None)
    return graph


# ---- modules that stay whole: which ones do, how they are recorded, and what their results depend on -----------------
LeafRule = Callable[[nn.Module, str], bool]

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
_HOME = "torch.nn.modules."


def default_leaf(module: nn.Module, path: str) -> bool:
    """Return whether a module is one of PyTorch's own layers, and not a container of others."""
    return type(module).__module__.startswith(_HOME) and not isinstance(module, _CONTAINERS)


Leaves = Any  # a LeafRule, a class of modules, the path of one, or several of these


def leaf_rule(leaf: Leaves, model: nn.Module) -> LeafRule:
    """Return the leaf rule: besides PyTorch's layers, modules of these classes, and the modules at these paths, are not traced into.

    Raises ConfigurationError for a class or a path that no module of the model has.
    """
    if leaf is None:
        return default_leaf
    if callable(leaf) and not isinstance(leaf, type):
        return _told(leaf)
    leaves = [leaf] if isinstance(leaf, type | str) else list(leaf)
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): path for path, module in model.named_modules()}
    for one in leaves:
        there = one in modules if isinstance(one, str) else any(isinstance(module, one) for module in modules.values())
        if not there:
            near = difflib.get_close_matches(one, modules, n=1) if isinstance(one, str) else []
            what = f"leaf={one!r} names no module" if isinstance(one, str) else f"leaf={one.__name__} names no module"
            because = f"the model has none {'at that path' if isinstance(one, str) else 'of that class'}"
            remedy = f"did you mean {near[0]!r}?" if near else "its modules are what model.named_modules() lists"
            raise ConfigurationError(what, because=because, remedy=remedy)
    names = {first[id(modules[one])] for one in leaves if isinstance(one, str)}
    kinds = tuple(one for one in leaves if isinstance(one, type))
    return lambda module, path: path in names or isinstance(module, kinds) or default_leaf(module, path)


def _told(leaf: LeafRule) -> LeafRule:
    """Return the user's `leaf` function, whose errors are raised as a TraceError that names the function and not the model."""

    def is_leaf(module: nn.Module, path: str) -> bool:
        try:
            return leaf(module, path)
        except Exception as error:
            what = f"leaf= raised {type(error).__name__} for the module {path}, a {type(module).__name__}"
            remedy = "correct the function, which is called with each module and its path, or pass classes and paths"
            raise TraceError(what, at=source_of_error(error, is_leaf.__code__), because=str(error), remedy=remedy) from error

    return is_leaf


class ModuleCalls:
    """Handle the calls of modules while the model is traced."""

    def __init__(self, handler: Handler, leaf: LeafRule) -> None:
        self._handler, self._rule = handler, leaf
        self._entries = 0  # how many calls have begun
        self._keys: dict[int, Any] = {}  # of leaves by identity; None for other modules

    def __call__(self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = self._handler
        if handler.paused:
            return original(module, *args, **kwargs)
        module = uncompiled(handler.snapshot.shell(module))
        if isinstance(module, torch.jit.ScriptModule) and is_tracked((args, kwargs), handler.known):
            refuse_scripted("a module that forward calls", handler.source())
        path = handler.snapshot.paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        if isinstance(module, GradientRule) and is_tracked(args, handler.known):
            return ruled(handler, module, "again", handler.nodes_of(args), args[0].value)  # an earlier trace has written the rule
        stub = functional.stub_of(module) if len(args) == 1 and not kwargs and isinstance(args[0], TracedTensor) else None
        if isinstance(module, nn.TransformerEncoder):
            _say_padding(handler, module, path, args, kwargs)
        previous, handler.path = handler.path, path
        around = handler.qconfig
        handler.qconfig = (*handler.attached(path), *around)
        try:
            if stub is not None:
                function: Any = stub[0]
                placed = handler.record("call_function", function, function, (args[0], *stub[1:]), {})
                spell(placed.node, type(module))
                return placed
            entry, read = self._entries, (self._nest(args), self._nest(kwargs)) if path else ((), {})
            self._entries += 1
            noisy = path in handler.random.noise and not default_leaf(module, path)
            result = (self._noise if noisy else self._called)(original, module, path, args, kwargs)
        finally:
            handler.path, handler.qconfig = previous, around
        if path:
            handler.calls.append((path, entry, *read, self._nest(result)))
        return result

    def _noise(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Record a module that draws in train mode, and returns its argument in eval mode, as one node; others as their Python."""
        training, module.__dict__["training"] = module.training, False
        try:
            result = original(module, *args, **kwargs)
        finally:
            module.__dict__["training"] = training
        if result is not args[0]:
            return original(module, *args, **kwargs) if training else result
        result = self._handler.record("call_module", path, lambda input: input, args, {})
        graph.set_noise(result.node, path)
        return result

    def _called(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        handler = self._handler
        if isinstance(module, nn.RNNBase) and args and isinstance(args[0], PackedSequence):
            return spelled.over_packed(module, *args, **kwargs)
        key = self._key(module, path)
        trained = next(module.parameters(), None) is not None
        if key is None or not (trained or is_tracked(args, handler.known) or is_tracked(kwargs.values(), handler.known)):
            return original(module, *args, **kwargs)
        if not module._forward_hooks:
            return self._record(module, path, key, args, kwargs)
        module.__dict__["forward"] = lambda *a, **k: self._record(module, path, key, a, k)
        try:
            return original(module, *args, **kwargs)
        finally:
            del module.__dict__["forward"]

    def _nest(self, value: Any) -> Any:
        """Return a nested value with a `Reference` in place of each tensor, and None in place of values that a file cannot hold."""
        if isinstance(value, torch.Tensor):
            value = self._handler.memory.current(value)
            return Reference(value.node.name) if isinstance(value, TracedTensor) else None
        if isinstance(value, tuple | list):
            return [self._nest(item) for item in value] if isinstance(value, list) else tuple(map(self._nest, value))
        if isinstance(value, dict):
            return {key: self._nest(item) for key, item in value.items() if isinstance(key, str)}
        if type(value) in (type(None), bool, int, float, str):
            return value
        return Reference("")  # of an object, nothing is known

    def _key(self, module: nn.Module, path: str) -> Any:
        key = self._keys.get(id(module), self)
        if key is self:
            is_leaf = path != "" and not module._forward_pre_hooks and self._rule(module, path)
            with torch._C.DisableTorchFunction():
                key = self._keys[id(module)] = configuration(module) if is_leaf else None
        return key

    def _record(self, module: nn.Module, path: str, key: Any, args: Any, kwargs: Any) -> Any:
        if not default_leaf(module, path):
            return record(self._handler, "call_module", path, type(module).forward.__get__(module), args, kwargs, None, LEAF)
        self._handler.settings[path] = carried.of_layer(module)
        in_place = module.__dict__.get("inplace") is True
        function = _OutOfPlace(module) if in_place else type(module).forward.__get__(module)
        result = self._handler.record("call_module", path, function, args, kwargs, key=key)
        return self._handler.memory.advance(args[0], result) if in_place else result


def _say_padding(handler: Handler, module: nn.TransformerEncoder, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add a note that padded positions are computed by the layers, if PyTorch's inference fast path would write 0 there."""
    passed = {**dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)), **kwargs}
    if passed.get("src_key_padding_mask") is None or passed.get("mask") is not None or not getattr(module, "use_nested_tensor", False):
        return
    text = (
        f"positions of {path or 'the model'} that src_key_padding_mask masks hold what its layers compute there, as in training; "
        "PyTorch's path for inference writes 0 there (enable_nested_tensor=False turns that off): no output should depend on them"
    )
    handler.note(text)
    if handler.locate:
        logger.warning("%s", text)


class _OutOfPlace:
    """The forward of a module with `inplace=True`, without changing its input."""

    def __init__(self, module: nn.Module) -> None:
        self.__self__ = module  # as a method has it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copy = object.__new__(type(self.__self__))
        copy.__dict__.update(self.__self__.__dict__, inplace=False)
        return copy.forward(*args, **kwargs)


def configuration(module: nn.Module) -> tuple[Any, ...]:
    """Return everything besides its arguments that the shapes and types of a module's results depend on: equal for like modules."""
    items: list[Any] = [type(module)]
    for name, value in module.__dict__.items():
        if type(value) in traced.ATOMS:
            items.append((name, type(value), value))
        elif name == "_parameters" or name == "_buffers":
            tensors = ((key, tensor) for key, tensor in value.items() if tensor is not None)
            items.extend((key, tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for key, tensor in tensors)
        elif name == "_modules":
            items.extend((key, None if child is None else configuration(child)) for key, child in value.items())
        elif isinstance(value, tuple):
            items.append((name, value))
        elif name[0] != "_":
            items.append((name, id(value)))
    return tuple(items)
