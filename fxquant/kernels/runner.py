"""Running an integer model with its kernels.

The first call with inputs of some sizes runs the primitives, and notes the sizes and strides of every tensor. The calls after it run
a `Program` made for these: kernels on held tensors, primitives on what no kernel takes. What a program gives has the bits and the
strides of the primitives' results.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.graph import kernel, resolve
from fxquant.kernels.admission import is_primitive, prove
from fxquant.kernels.patterns import without_negatives
from fxquant.kernels.record import Bound, Built, Held, Implementation, Kernel, Match, Refused, Site, held
from fxquant.model import autocast_off
from fxquant.progress import progress

PROVED = 2  # images that an implementation is compared with the primitives on, at most
MOST_PROGRAMS = 16  # sizes of inputs that are remembered; the one used longest ago is forgotten first
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides


@dataclass(frozen=True)
class Choice:
    """What runs at a node with a kernel.

    implementation  its name; None where the primitives run
    refused         why those before it were not taken, by name
    """

    kernel: str
    implementation: str | None
    refused: Mapping[str, str]


@dataclass(frozen=True)
class _Chosen:
    match: Match
    choice: Choice
    implementation: Implementation | None = None
    built: Built | None = None


class Runner:
    """What runs an integer model; copies of the model get one of their own, with nothing in it.

    `source` gives the kernels there are; it is a function, so that what is pickled is its name.
    """

    def __init__(self, source: Callable[[], tuple[Kernel, ...]]) -> None:
        self.source = source
        self.lock = threading.RLock()
        self.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return Runner, (self.source,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        return Runner(self.source)

    def reset(self) -> None:
        """Forget everything that was made for the graph and its constants."""
        with self.lock:
            self.made_for: tuple[Any, ...] | None = None
            self.programs: OrderedDict[Any, Program | Mapping[fx.Node, Layout]] = OrderedDict()  # the latter before it is made
            self.chosen: dict[Any, _Chosen] = {}
            self.constants: list[tuple[dict[str, Any], str, Any, int]] = []

    def __call__(self, model: fx.GraphModule, reference: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """What the model returns for inputs that its checks have passed."""
        if not runs_here(inputs):
            return reference(model, *inputs)
        key = _key(inputs)
        with self.lock:
            self._follow(model)
            program = self._known(model, key)
        if program is not None:
            return program.run(inputs) if program.helps else reference(model, *inputs)
        recorder = _Recorder(model)
        result = recorder.run(*inputs)
        with self.lock:
            if self._is_of(model):
                self.programs.setdefault(key, recorder.layouts)
        return result

    def program(self, model: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        """The program for inputs of these sizes."""
        key = _key(inputs)
        with self.lock:
            self._follow(model)
            if key not in self.programs:
                recorder = _Recorder(model)
                recorder.run(*inputs)
                self.programs[key] = recorder.layouts
            found = self._known(model, key)
        assert found is not None
        return found

    def _known(self, model: fx.GraphModule, key: Any) -> Program | None:
        """The program for inputs that were seen before, made where it is asked for a first time; None for others."""
        found = self.programs.get(key)
        if found is None:
            return None
        if not isinstance(found, Program):
            with torch.inference_mode(False), torch.no_grad(), autocast_off():
                found = self.programs[key] = self._make(model, found)
            while len(self.programs) > MOST_PROGRAMS:
                self.programs.popitem(last=False)
        self.programs.move_to_end(key)
        return found

    def _follow(self, model: fx.GraphModule) -> None:
        if not self._is_of(model):
            self.reset()
            self._remember(model)

    def choices(self) -> list[tuple[str, Choice]]:
        """What runs at each node with a kernel, by its name, in the order of the graph; where sizes differ, for those seen last."""
        with self.lock:
            found = {name: chosen.choice for (name, _), chosen in self.chosen.items()}
        return list(found.items())

    def _is_of(self, model: fx.GraphModule) -> bool:
        """Whether graph and constants are still those that programs were made for."""
        return self.made_for == (id(model), id(model.graph)) and all(
            holder.get(name) is tensor and _version(tensor) == version for holder, name, tensor, version in self.constants
        )

    def _remember(self, model: fx.GraphModule) -> None:
        self.made_for = (id(model), id(model.graph))
        for path in dict.fromkeys(str(node.target) for node in model.graph.find_nodes(op="get_attr")):
            *parents, name = path.split(".")
            module = resolve(model, ".".join(parents)) if parents else model
            tensor = resolve(model, path)
            for holder in (module._buffers, module._parameters, module._modules):
                if holder.get(name) is tensor:
                    self.constants.append((holder, name, tensor, _version(tensor)))

    def _make(self, model: fx.GraphModule, layouts: Mapping[fx.Node, Layout]) -> Program:
        sizes = {node: layout[0] for node, layout in layouts.items()}
        non_negative = without_negatives(model)
        chosen: dict[fx.Node, _Chosen] = {}
        fused = [node for node in model.graph.nodes if kernel(node) is not None]
        for node in progress(fused, len(fused), "proving kernels"):
            known = kernel(node)
            if known is not None:
                found = next((each for each in self.source() if each.name == known[0]), None)
                match = None if found is None else found.match(node)
                key = (node.name, _proved_for(sizes, node, () if match is None else match.reads))
                if key not in self.chosen:
                    self.chosen[key] = self._choose(model, node, known[0], found, match, sizes, non_negative)
                chosen[node] = self.chosen[key]
        return Program(model, layouts, non_negative, chosen)

    def _choose(
        self,
        model: fx.GraphModule,
        node: fx.Node,
        name: str,
        found: Kernel | None,
        match: Match | None,
        sizes: Mapping[fx.Node, tuple[int, ...]],
        non_negative: frozenset[fx.Node],
    ) -> _Chosen:
        if found is None or match is None:
            return _Chosen(Match(node, (node,), ()), Choice(name, None, {"": "its pattern is not there any more"}))
        few = {
            read: tuple(min(size, PROVED) if axis == 0 else size for axis, size in enumerate(sizes[read])) for read in (*match.reads, node)
        }
        site = Site(model, match, few, non_negative)
        refused: dict[str, str] = {}
        for implementation in found.implementations:
            if any(0 in sizes[read] for read in match.reads):
                refused[implementation.name] = "its operand is empty"
                continue
            try:
                built = implementation.build(site)
                prove(site, implementation, built)
            except Refused as error:
                refused[implementation.name] = str(error)
                continue
            return _Chosen(match, Choice(name, implementation.name, refused), implementation, built)
        return _Chosen(match, Choice(name, None, refused))


def _key(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(input.shape), input.stride(), input.dtype) if isinstance(input, Tensor) else None for input in inputs)


def _proved_for(sizes: Mapping[fx.Node, tuple[int, ...]], root: fx.Node, reads: Sequence[fx.Node]) -> Any:
    """What a proof holds for: the sizes of everything around a node but the number of images, and which have the same number."""
    found = [sizes[node] for node in (root, *reads) if node in sizes]
    return tuple((size[1:], size[:1] == found[0][:1], 0 in size) for size in found)


def runs_here(inputs: Sequence[Any]) -> bool:
    """Whether kernels can take these inputs: plain tensors with values, on the CPU, which nothing traces or transforms."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(input) in (Tensor, torch.nn.Parameter) and input.device.type == "cpu" for input in inputs if input is not None)


def _version(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


class _Recorder(fx.Interpreter):
    """Runs the primitives, and notes sizes, strides and dtypes."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.layouts: dict[fx.Node, Layout] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.layouts[n] = tuple(result.shape), result.stride(), result.dtype
        return result

    def fetch_attr(self, target: str) -> Any:
        return resolve(self.module, target)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        assert isinstance(self.module, fx.GraphModule)
        (node,) = self.module.graph.find_nodes(op="output")
        return returned(node.args[0], self.env.__getitem__)


def returned(value: Any, read: Callable[[Any], Any]) -> Any:
    """What a graph returns, in plain containers as its code has them, with what is read in the place of nodes."""
    if isinstance(value, fx.Node | _At):
        return read(value)
    if isinstance(value, dict):
        return {key: returned(item, read) for key, item in value.items()}
    if isinstance(value, list):
        return [returned(item, read) for item in value]
    if isinstance(value, tuple):
        items = [returned(item, read) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


# ---- programs -------------------------------------------------------------------------------------------------------

Step = Callable[[list[Any]], None]  # on the values, by their places


class Program:
    """An integer model for inputs of these sizes and strides: one step after another, on values in a list."""

    def __init__(
        self, model: fx.GraphModule, layouts: Mapping[fx.Node, Layout], non_negative: frozenset[fx.Node], chosen: Mapping[fx.Node, _Chosen]
    ) -> None:
        self.model, self.layouts, self.non_negative, self.chosen = model, layouts, non_negative, chosen
        self.places: dict[tuple[fx.Node, bool], int] = {}  # of values, held or plain
        self.steps: list[tuple[Any, list[int], int]] = []  # what makes the steps of an instance, what it reads, what it writes
        self.buffers: dict[int, Held] = {}  # values in memory of the instance's own
        self.inputs: list[int] = []
        self.result: Any = None
        self.helps = any(each.built is not None for each in chosen.values())
        self._write()
        self.slots, self.slot_of = self._share()
        self.free: list[_Instance] = []
        self.lock = threading.Lock()

    # -- writing it --------------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node, is_held: bool) -> int:
        return self.places.setdefault((node, is_held), len(self.places))

    def held(self, node: fx.Node) -> Held:
        """How a node's tensor is held."""
        return held(node, self.layouts[node][0], node in self.non_negative)

    def _write(self) -> None:
        needed = self._needed()
        for node in self.model.graph.nodes:
            if node.op == "placeholder":
                self.inputs.append(self._place(node, False))
            elif node.op == "output":
                self.result = returned(node.args[0], lambda read: _At(self._plain(read)))
            elif node not in needed or node.op == "get_attr":
                continue
            elif node in self.chosen and self.chosen[node].built is not None:
                self._write_kernel(node, self.chosen[node])
            else:
                reads = [self._plain(read) for read in node.all_input_nodes if read.op != "get_attr"]
                self.steps.append((_Primitive(self.model, node, self.places), reads, self._place(node, False)))

    def _needed(self) -> set[fx.Node]:
        """What has to be computed: all but the primitives that no one reads any more."""
        needed: set[fx.Node] = set()
        for node in reversed(self.model.graph.nodes):
            if node in needed or not is_primitive(node):
                needed.add(node)
                chosen = self.chosen.get(node)
                needed.update(node.all_input_nodes if chosen is None or chosen.built is None else chosen.match.reads)
        return needed

    def _write_kernel(self, node: fx.Node, chosen: _Chosen) -> None:
        assert chosen.implementation is not None
        reads_held = chosen.implementation.reads_held
        reads = [self._held(read) if reads_held and not self._is_real(read) else self._plain(read) for read in chosen.match.reads]
        place = self._place(node, True)
        self.buffers[place] = self.held(node)
        self.steps.append((_Kernel(chosen.built), reads, place))  # type: ignore[arg-type]

    def _is_real(self, node: fx.Node) -> bool:
        return self.layouts[node][2].is_floating_point

    def _plain(self, node: fx.Node) -> int:
        """The place of a value as primitives have it."""
        if (node, False) not in self.places and (node, True) in self.places:
            place = self._place(node, False)
            self.steps.append((_Plain(self.held(node), self.layouts[node]), [self.places[node, True]], place))
        return self._place(node, False)

    def _held(self, node: fx.Node) -> int:
        """The place of a value as kernels hold it."""
        if (node, True) not in self.places:
            place = self._place(node, True)
            self.buffers[place] = self.held(node)
            self.steps.append((_Hold(self.buffers[place]), [self._plain(node)], place))
        return self.places[node, True]

    def _share(self) -> tuple[list[int], dict[int, int]]:
        """Bytes of each piece of memory, and the one that each buffer has: what is read no more gives way."""
        last = {place: index for index, (_, reads, _) in enumerate(self.steps) for place in reads}
        slots: list[int] = []
        slot_of: dict[int, int] = {}
        free: list[int] = []
        for index, (_, reads, writes) in enumerate(self.steps):
            if writes in self.buffers:
                form = self.buffers[writes]
                size = form.rows * form.pixel * form.dtype.itemsize
                fitting = [slot for slot in free if slots[slot] >= size]
                if fitting:
                    slot = min(fitting, key=slots.__getitem__)
                elif free:
                    slot = max(free, key=slots.__getitem__)
                else:
                    slot = len(slots)
                    slots.append(0)
                if slot in free:
                    free.remove(slot)
                slots[slot] = max(slots[slot], size)
                slot_of[writes] = slot
            free += {slot_of[place] for place in {*reads, writes} if place in slot_of and last.get(place, index) == index}
        return slots, slot_of

    # -- running it --------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> Any:
        """What the model returns. Several threads may run it at once."""
        with self.lock:
            instance = self.free.pop() if self.free else None
        if instance is None:
            with torch.inference_mode(False):
                instance = _Instance(self)
        try:
            return instance.run(inputs)
        finally:
            with self.lock:
                self.free.append(instance)

    def values(self, inputs: Sequence[Any]) -> tuple[dict[str, Tensor], Any]:
        """The stored integers of every tensor that a kernel computes, by name, in order; and what the model returns."""
        with torch.inference_mode(False):
            instance = _Instance(self)
        found: dict[str, Tensor] = {}
        names = {place: node for (node, is_held), place in self.places.items() if is_held and node in self.chosen}

        def show(place: int, value: Tensor) -> None:
            if place in names:
                found[names[place].name] = self.held(names[place]).centred(value)

        return found, instance.run(inputs, show)


@dataclass(frozen=True)
class _At:
    place: int


class _Instance:
    """A program with memory of its own, for one thread at a time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        memory = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in program.slots]
        self.buffers: dict[int, Tensor] = {}
        for place, form in program.buffers.items():
            size = form.rows * form.pixel * form.dtype.itemsize
            self.buffers[place] = memory[program.slot_of[place]][:size].view(form.dtype).view(form.rows, form.pixel)
        last = {place: index for index, (_, reads, _) in enumerate(program.steps) for place in reads}
        kept: set[int] = set()
        returned(program.result, lambda at: kept.add(at.place))
        self.steps: list[tuple[Step, int, tuple[int, ...]]] = []
        for index, (maker, reads, writes) in enumerate(program.steps):
            gone = tuple(place for place in set(reads) if last[place] == index and place not in kept and place not in self.buffers)
            self.steps.append((maker.step(reads, writes, self.buffers.get(writes)), writes, gone))

    def run(self, inputs: Sequence[Any], show: Callable[[int, Any], None] | None = None) -> Any:
        program = self.program
        values: list[Any] = [None] * len(program.places)
        for place, input in zip(program.inputs, inputs, strict=True):
            values[place] = input
        for step, writes, gone in self.steps:
            step(values)
            if show is not None:
                show(writes, values[writes])
            for place in gone:
                values[place] = None
        return returned(program.result, lambda at: values[at.place])


@dataclass(frozen=True)
class _Kernel:
    built: Built

    def step(self, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
        bound: Bound = self.built.bind()
        assert buffer is not None

        def run(values: list[Any]) -> None:
            bound([values[place] for place in reads], buffer)
            values[writes] = buffer

        return run


@dataclass(frozen=True)
class _Hold:
    form: Held

    def step(self, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
        (read,) = reads
        assert buffer is not None

        def run(values: list[Any]) -> None:
            self.form.hold(values[read], buffer)
            values[writes] = buffer

        return run


@dataclass(frozen=True)
class _Plain:
    form: Held
    layout: Layout

    def step(self, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
        (read,) = reads
        _, strides, dtype = self.layout

        def run(values: list[Any]) -> None:
            values[writes] = self.form.plain(values[read], dtype, strides)

        return run


@dataclass(frozen=True)
class _Primitive:
    """A node as it stands in the graph."""

    model: fx.GraphModule
    node: fx.Node
    places: Mapping[tuple[fx.Node, bool], int]

    def step(self, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
        node, model = self.node, self.model
        places = {read: self.places[read, False] for read in node.all_input_nodes if read.op != "get_attr"}
        constants = {read: resolve(model, str(read.target)) for read in node.all_input_nodes if read.op == "get_attr"}
        module = resolve(model, str(node.target)) if node.op == "call_module" else None

        def run(values: list[Any]) -> None:
            def value(read: fx.Node) -> Any:
                return constants[read] if read in constants else values[places[read]]

            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            if node.op == "call_function":
                values[writes] = node.target(*args, **kwargs)  # type: ignore[operator]
            elif module is not None:
                values[writes] = module(*args, **kwargs)
            else:
                values[writes] = getattr(args[0], str(node.target))(*args[1:], **kwargs)

        return run
