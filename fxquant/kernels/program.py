"""An integer model as steps for inputs of certain sizes and strides: kernels on held tensors, primitives where no kernel applies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import computed, is_python, nodes_in, own, resolve
from fxquant.ir.loops import bodies
from fxquant.ir.loops import reads as read_by
from fxquant.kernels.admission import is_primitive
from fxquant.kernels.kernel import SLACK, Binding, Bound, Built, ChannelsLast, Forms, Implementation, Match
from fxquant.ops.elementwise.arithmetic import add, mul
from fxquant.ops.elementwise.table import shifted
from fxquant.ops.indexing.index import getitem
from fxquant.ops.recurrent.recurrence import MARKS

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides
Step = Callable[[list[Any]], None]  # on the values, by their places
INTO: dict[Any, Any] = {torch.sigmoid: torch.sigmoid, torch.tanh: torch.tanh, add: torch.add, mul: torch.mul}  # forms with `out=`
READERS = {*INTO, shifted}  # which return memory of their own
Maker = Callable[[list[int], int, Tensor | None], Step]  # from the places that are read, the place that is written, and its memory


@dataclass(frozen=True)
class Choice:
    """How a node of an integer graph is computed on this machine."""

    kernel: str  # the name of its kernel; "" for a primitive that no kernel serves
    implementation: str | None  # the name of the implementation that runs; None where the primitives run
    refused: Mapping[str, str]  # why those before it are not used, by name; the reason of a primitive that no kernel serves is under ""
    disagrees: tuple[str, ...] = ()  # those of them that computed other bits than the primitives

    @property
    def because(self) -> str:
        """The reasons, each with the name of its implementation."""
        return "; ".join(f"{name}: {why}" if name else why for name, why in self.refused.items())


@dataclass(frozen=True)
class Chosen:
    """The implementation that runs at a node, as it was built there; None where the primitives run."""

    match: Match
    choice: Choice
    implementation: Implementation | None = None
    built: Built | None = None


@dataclass(frozen=True)
class _At:
    place: int


class Program:
    """An integer model for inputs of these sizes and strides: one step after another, on values in a list."""

    def __init__(self, model: fx.GraphModule, layouts: Mapping[fx.Node, Layout], forms: Forms, chosen: Mapping[fx.Node, Chosen]) -> None:
        self.model, self.layouts, self.forms, self.chosen = model, layouts, forms, chosen
        self.places: dict[tuple[fx.Node, bool], int] = {}  # of values, held or plain
        self.steps: list[tuple[Maker, list[int], int]] = []  # what makes the steps of an instance, what it reads, what it writes
        self.alone: list[fx.Node] = []  # the nodes that run as they are in the graph
        self.buffers: dict[int, ChannelsLast] = {}  # values in memory of the instance's own
        self.inputs: list[int] = []
        self.result: Any = None
        self.later = {other for each in chosen.values() if each.built is not None for other in each.match.results}  # results beside a root
        self.helps = any(each.built is not None for each in chosen.values())
        self._write()
        self.slots, self.slot_of = self._share()
        self.free: list[_Instance] = []  # what one thread puts there another may take: a list does either as a whole

    # -- writing it --------------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node, is_held: bool) -> int:
        return self.places.setdefault((node, is_held), len(self.places))

    def held(self, node: fx.Node) -> ChannelsLast:
        return self.forms.held(node, self.layouts[node][0])

    def _write(self) -> None:
        needed, loops = self._needed(), bodies(self.model.graph)
        within = {node for nodes in loops.values() for node in nodes}
        for node in self.model.graph.nodes:
            if node.op == "placeholder":
                self.inputs.append(self._place(node, False))
            elif node.op == "output":
                self.result = own(node.args[0], self._output)
            elif node not in needed or node in self.later or node.op == "get_attr" or node in within:
                continue
            elif node in loops:
                self._write_loop(node, loops[node])
            else:
                self._write_node(node)

    def _write_node(self, node: fx.Node) -> None:
        if node in self.chosen and self.chosen[node].built is not None:
            self._write_kernel(node, self.chosen[node])
        else:
            reads = [self._plain(read) for read in node.all_input_nodes if read.op != "get_attr"]
            self.steps.append((partial(_primitive, self.model, node, self.places), reads, self._place(node, False)))
            self.alone.append(node)

    def _write_loop(self, start: fx.Node, body: Sequence[fx.Node]) -> None:
        """Write a loop that no kernel computes as one step, of the steps of its body."""
        reads = [self._plain(each) for each in (*start.all_input_nodes, *read_by(start)) if each.op != "get_attr"]
        before, self.steps = self.steps, []
        memory, views = dict[int, Layout](), dict[int, tuple[int, Any]]()
        for node in (each for each in (start, *body) if each.op != "get_attr"):
            stays, read = self._stays(node, body), node.all_input_nodes
            whole = self.places.get((read[0], False)) if stays and node.target is getitem and len(read) == 1 else None
            if whole in (*memory, *views) and all(type(each) in (slice, int) for each in node.args[1]):  # type: ignore[union-attr]
                views[self._place(node, False)] = whole, tuple(node.args[1])  # type: ignore[arg-type]
                self.alone.append(node)
                continue
            if stays and self._writes_into(node):
                memory[self._place(node, False)] = self.layouts[node]
            self._write_node(node)
        before.append((partial(_loop, self.steps, memory, views), reads, self._place(start, False)))
        self.steps = before

    def _stays(self, node: fx.Node, body: Sequence[fx.Node]) -> bool:
        """Return whether nothing holds a value of a loop's step after the step."""
        return all(
            user in body and (user.target in READERS or user in self.chosen or (user.target is getitem and self._stays(user, body)))
            for user in node.users
        )

    def _writes_into(self, node: fx.Node) -> bool:
        """Return whether the step of a node can write its result, of floats, into given memory."""
        chosen = self.chosen.get(node)
        if chosen is None or chosen.built is None:
            return node.target in INTO and not node.kwargs and (*node.all_input_nodes, 1)[: len(node.args)] == node.args  # a factor of 1
        assert chosen.implementation is not None
        sizes, strides, _ = self.layouts[node]
        return self._is_real(node) and not chosen.implementation.strided and strides == torch.empty(sizes, device="meta").stride()

    def computed(self) -> tuple[dict[fx.Node, Choice], list[fx.Node]]:
        """Return the choice at each node with a kernel, and the nodes that run as primitives, both in the graph's order."""
        return {node: chosen.choice for node, chosen in self.chosen.items()}, [node for node in self.alone if node not in self.chosen]

    def _output(self, read: fx.Node) -> Any:
        """Return the place of a node that is returned, or its value where it is a constant."""
        return resolve(self.model, str(read.target)) if read.op == "get_attr" else _At(self._plain(read))

    def _needed(self) -> set[fx.Node]:
        """Return the nodes to compute: all but the primitives that nothing reads any more."""
        needed: set[fx.Node] = set()
        looped = {node for chosen in self.chosen.values() if chosen.built is not None for node in chosen.match.parts.get("loop", ())}
        for node in reversed(self.model.graph.nodes):
            if node in looped:
                continue
            chosen = self.chosen.get(node)
            has_others = chosen is not None and chosen.built is not None and bool(chosen.match.results)
            if node not in self.later and (node in needed or has_others or not is_primitive(node)):
                needed.add(node)
                needed.update(node.all_input_nodes if chosen is None or chosen.built is None else chosen.match.reads)
        return needed

    def _write_kernel(self, node: fx.Node, chosen: Chosen) -> None:
        assert chosen.implementation is not None
        if chosen.implementation.strided:
            forms = [self.held(read) if (read, True) in self.places else None for read in chosen.match.reads]
            reads = [self._place(read, form is not None) for read, form in zip(chosen.match.reads, forms, strict=True)]
            others = [(self._place(other, False), self.layouts[other]) for other in chosen.match.results]
            maker = partial(_strided_kernel, chosen.built, self.layouts[node], forms, others)  # type: ignore[arg-type]
            self.steps.append((maker, reads, self._place(node, False)))
            return
        if self._is_real(node):
            reads = [self._plain(read) for read in chosen.match.reads]
            self.steps.append((partial(_real_kernel, chosen.built, self.layouts[node]), reads, self._place(node, False)))  # type: ignore[arg-type]
            return
        reads_held = chosen.implementation.reads_held
        reads = [self._held(read) if reads_held and not self._is_real(read) else self._plain(read) for read in chosen.match.reads]
        place = self._place(node, True)
        self.buffers[place] = self.held(node)
        self.steps.append((partial(_into, chosen.built), reads, place))  # type: ignore[arg-type]

    def _is_real(self, node: fx.Node) -> bool:
        return self.layouts[node][2].is_floating_point

    def _plain(self, node: fx.Node) -> int:
        """Return the place of a value as primitives have it."""
        if (node, False) not in self.places and (node, True) in self.places:
            place = self._place(node, False)
            self.steps.append((partial(_plain, self.held(node), self.layouts[node]), [self.places[node, True]], place))
        return self._place(node, False)

    def _held(self, node: fx.Node) -> int:
        """Return the place of a value as kernels hold it."""
        if (node, True) not in self.places:
            place = self._place(node, True)
            form = self.buffers[place] = self.held(node)
            built = Binding(lambda: lambda inputs, held: form.pack(inputs[0], held))
            self.steps.append((partial(_into, built), [self._plain(node)], place))
        return self.places[node, True]

    def _share(self) -> tuple[list[int], dict[int, int]]:
        """Return the bytes of each piece of memory, and the piece of each buffer: memory is reused after its last read."""
        last = {place: index for index, (_, reads, _) in enumerate(self.steps) for place in reads}
        slots: list[int] = []
        slot_of: dict[int, int] = {}
        free: list[int] = []
        for index, (_, reads, writes) in enumerate(self.steps):
            if writes in self.buffers:
                form = self.buffers[writes]
                size = form.rows * form.pixel * form.dtype.itemsize
                if free:
                    fitting = [slot for slot in free if slots[slot] >= size]
                    slot = min(fitting, key=slots.__getitem__) if fitting else max(free, key=slots.__getitem__)
                    free.remove(slot)
                    slots[slot] = max(slots[slot], size)
                else:
                    slot = len(slots)
                    slots.append(size)
                slot_of[writes] = slot
            free += {slot_of[place] for place in {*reads, writes} if place in slot_of and last.get(place, index) == index}
        return slots, slot_of

    # -- running it --------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run the model and return its output. Several threads may run it at once."""
        try:
            instance = self.free.pop()
        except IndexError:
            with torch.inference_mode(False):
                instance = _Instance(self)
        try:
            return instance.run(inputs)
        finally:
            self.free.append(instance)

    def values(self, inputs: Sequence[Any]) -> tuple[dict[str, Tensor], Any]:
        """Return the stored integers of every tensor that a kernel computes, by name, in order; and the model's output."""
        with torch.inference_mode(False):
            instance = _Instance(self)
        integers: dict[str, Tensor] = {}
        kernels = {node for node, chosen in self.chosen.items() if chosen.built is not None}
        names = {place: node for (node, is_held), place in self.places.items() if node in kernels and is_held != self._is_real(node)}

        def show(place: int, value: Tensor) -> None:
            if place in names:
                node = names[place]
                integers[node.name] = value.clone() if self._is_real(node) else self.held(node).centred(value)

        return integers, instance.run(inputs, show)


class _Instance:
    """A program with its memory, for one thread at a time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        memory = [torch.empty(size + SLACK, dtype=torch.uint8, device="cpu") for size in program.slots]
        self.buffers: dict[int, Tensor] = {}
        for place, form in program.buffers.items():
            size = form.rows * form.pixel * form.dtype.itemsize
            self.buffers[place] = memory[program.slot_of[place]][:size].view(form.dtype).view(form.rows, form.pixel)
        last = {place: index for index, (_, reads, _) in enumerate(program.steps) for place in reads}
        results: set[int] = set()
        own(program.result, lambda at: results.add(at.place), _At)
        self.steps: list[tuple[Step, int, tuple[int, ...]]] = []
        for index, (maker, reads, writes) in enumerate(program.steps):
            gone = tuple(place for place in set(reads) if last[place] == index and place not in results and place not in self.buffers)
            self.steps.append((maker(reads, writes, self.buffers.get(writes)), writes, gone))

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
        return own(program.result, lambda at: values[at.place], _At)


def _into(built: Built, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
    """Return the step that computes a value in memory of the instance's own."""
    assert buffer is not None
    bound = built.bind()

    def run(values: list[Any]) -> None:
        bound([values[place] for place in reads], buffer)
        values[writes] = buffer

    return run


def _real_kernel(built: Built, layout: Layout, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
    """Return the step of a kernel with a float result, without a buffer in new memory at each call, since the model may return it."""
    bound: Bound = built.bind()
    sizes, strides, dtype = layout

    def run(values: list[Any]) -> None:
        result = torch.empty(sizes, dtype=dtype, device="cpu") if buffer is None else buffer
        bound([values[place] for place in reads], result)
        if result.stride() != strides:
            result = torch.empty_strided(sizes, strides, dtype=dtype, device="cpu").copy_(result)
        values[writes] = result

    return run


def _strided_kernel(
    built: Built, layout: Layout, forms: Sequence[ChannelsLast | None], others: Sequence[tuple[int, Layout]], reads: list[int], writes: int,
    buffer: Tensor | None,
) -> Step:  # fmt: skip
    """Return the step of a kernel that reads tensors in either form, and writes one, and others, as the primitives would."""
    bound: Bound = built.bind()

    def run(values: list[Any]) -> None:
        inputs = [values[place] if form is None else form.unpack(values[place]) for place, form in zip(reads, forms, strict=True)]
        for place, (sizes, strides, dtype) in ((writes, layout), *others):
            values[place] = torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")
        bound(inputs, [values[writes], *(values[place] for place, _ in others)] if others else values[writes])

    return run


def _plain(form: ChannelsLast, layout: Layout, reads: list[int], writes: int, buffer: Tensor | None) -> Step:
    (read,) = reads
    _, strides, dtype = layout

    def run(values: list[Any]) -> None:
        values[writes] = form.plain(values[read], dtype, strides)

    return run


def _loop(
    written: Sequence[tuple[Maker, list[int], int]], memory: Mapping[int, Layout], views: Mapping[int, tuple[int, Any]], reads: list[int],
    writes: int, buffer: Tensor | None,
) -> Step:  # fmt: skip
    """Return the step of a loop that no kernel computes: it runs the steps that are written for its body, and leaves the frame.

    Results at the places `memory` are in memory that all steps share, and `views` are parts of such results.
    """
    held = {place: torch.empty_strided(sizes, strides, dtype=dtype, device="cpu") for place, (sizes, strides, dtype) in memory.items()}
    begin, *body = [maker(places, place, held.get(place)) for maker, places, place in written]
    for place, (whole, index) in views.items():
        held[place] = held[whole][index]

    def run(values: list[Any]) -> None:
        begin(values)
        for place in views:
            values[place] = held[place]
        while values[writes].more():
            for step in body:
                step(values)

    return run


def _primitive(
    model: fx.GraphModule, node: fx.Node, place_of: Mapping[tuple[fx.Node, bool], int], reads: list[int], writes: int, buffer: Tensor | None
) -> Step:
    """Return the step of a node that no kernel computes: it calls the node's own function."""
    places = {read: place_of[read, False] for read in node.all_input_nodes if read.op != "get_attr"}
    constants = {read: resolve(model, str(read.target)) for read in node.all_input_nodes if read.op == "get_attr"}
    nested = any(nodes_in(value) for value in (*node.args, node.kwargs) if not isinstance(value, fx.Node))
    if node.op == "call_function" and not is_python(node) and not nested:
        target: Any = MARKS.get(node.target, node.target)
        target = partial(target, **node.kwargs) if buffer is None else partial(INTO[target], out=buffer)
        args, written = [], list[str]()
        for index, each in enumerate(node.args if buffer is None else node.args[:2]):
            read = isinstance(each, fx.Node) and each in places
            args.append(constants.get(each, each) if isinstance(each, fx.Node) else each)
            written.append(f"values[{places[each]}]" if read else f"args[{index}]")  # type: ignore[index]
        step: Step = eval(f"lambda values: values.__setitem__({writes}, target({', '.join(written)}))", {"target": target, "args": args})
        return step

    def run(values: list[Any]) -> None:
        values[writes] = computed(model, node, lambda read: constants[read] if read in constants else values[places[read]])

    return run
