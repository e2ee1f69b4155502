"""The kernels of `chains.c`, which read and write tensors of any dtype and strides: elementwise chains, and programs of recurrences.

In a program a register holds the last dimension of a node for some rows of its other dimensions, and no row depends on another one.
Beside elementwise steps there are sums of products, parts of a register's columns, and moves from and to memory.
"""

import ctypes
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.backends.cpu import native
from fxquant.ir import loops
from fxquant.ir.graph import fact
from fxquant.kernels.kernel import Binding, Bound, Built, NotApplicable, Site, implementation, in_order
from fxquant.kernels.patterns import reduction
from fxquant.numerics.grids import accumulator_bound
from fxquant.primitives import PRIMITIVES, Role, loop, role_of, shape
from fxquant.primitives.steps import Op, Step, Writer
from fxquant.support.files import address

DIMENSIONS = 8  # of a tensor, at most
BLOCK = 512  # elements that a chain's step computes at once
MOST_REGISTERS = 64
AFFINE = len(Op)  # (a · factor + summand) >> shift, limited to [low, high], once or twice: `low` times, by five numbers of the table each
# steps of a program: moves of memory, columns of a register, one column as many, sums of products
READ, WRITE, PART, SPREAD, SUM = range(AFFINE + 1, AFFINE + 6)
TOGETHER = 64  # columns of sums that are computed together
MOST_ROWS, MOST_LANES = 16, 2048  # that a step computes at once
View = Callable[[Tensor], Any]
WHOLE: dict[int, Callable[[int, int], int]] = {  # the operations of two integers
    Op.ADD: operator.add,
    Op.SUBTRACT: operator.sub,
    Op.MULTIPLY: operator.mul,
    Op.SHIFT: operator.rshift,
    Op.LEAST: min,
    Op.LARGEST: max,
}
Ranges = dict[int, tuple[int, int] | None]  # by register, the smallest and the largest integer; None of floats
STAGES = {Op.MULTIPLY: 0, Op.ADD: 1, Op.SUBTRACT: 1, Op.SHIFT: 2, Op.CLIP: 3}  # of AFFINE, in order
KINDS = {dtype: kind for kind, dtype in enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32))}


class _Step(ctypes.Structure):
    """One step: the structure of chains.c."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("op", "to", "a", "b", "low", "high", "columns")), ("table", ctypes.c_void_p)]


class _Chain(ctypes.Structure):
    """The arguments of a chain: the structure of chains.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("steps", "registers", "kinds", "offsets", "sizes", "strides", "data")),
        *((name, ctypes.c_int64) for name in ("operands", "count", "used", "wide", "threads")),
    ]


@implementation("native elementwise chain", strided=True)
def chain(site: Site) -> Built:
    """Build the chain of elementwise primitives at a site, which reads integer tensors of any strides and writes one."""
    library = native.chains_library()
    if isinstance(library, str):
        raise NotApplicable(library)
    writer = Writer()
    registers: dict[fx.Node, Any] = {read: writer.operand(read) for read in site.match.reads}  # or the constants themselves
    for node in in_order(registers, site.match.root):
        if node.op == "get_attr":
            registers[node] = site.constant(node)
            continue
        write, (args, kwargs) = PRIMITIVES[node.target].steps, fx.map_arg((node.args, node.kwargs), registers.__getitem__)  # type: ignore[index]
        registers[node] = None if write is None else write(writer, *args, **kwargs)
        if registers[node] is None:
            raise NotApplicable(f"{node.target.__name__} has no elementwise steps for its arguments")  # type: ignore[union-attr]
    ranges = _ranges(site, writer)
    wide = _is_wide(ranges, writer, registers)
    needed, operands, result = fused(ranges, writer, registers[site.match.root])
    steps, places, used = packed(needed, [register for register, _ in operands], lambda _: BLOCK, result)
    NotApplicable.unless(used <= MOST_REGISTERS * BLOCK, f"it needs {used // BLOCK} registers, of {MOST_REGISTERS}")
    values = [value for _, value in operands]
    constants = [_constant(value, torch.int64 if wide else torch.int32) for value in values]
    zeros = [_zero(site, value) if isinstance(value, fx.Node) else 0 for value in values]
    rows, tables = _structures(steps, [0] * len(steps))
    structure = _Chain(operands=len(values), count=len(steps), used=used, wide=wide)
    structure.steps = ctypes.addressof(rows)
    registers_of = [*(register for register, _ in operands), result]
    lanes = torch.tensor([places[register] for register in registers_of], dtype=torch.int64, device="cpu")
    structure.registers = address(lanes)
    return _Built(library.fxq_chain, structure, constants, zeros, (rows, tables, lanes))


def _constant(value: Any, whole: torch.dtype) -> Tensor | None:
    return value.detach().to(torch.float32 if value.is_floating_point() else whole) if isinstance(value, Tensor) else None


def _zero(site: Site, read: fx.Node) -> int:
    """Return the zero point with which a kernel stores an int8 tensor as bytes; 0 for other dtypes."""
    return site.held(read).zero if fact(read).dtype == torch.int8 else 0


def _structures(steps: Sequence[Step], columns: Sequence[int]) -> tuple[Any, list[Tensor]]:
    """Return the steps as chains.c reads them, and the tables that they point to."""
    tables: dict[int, Tensor] = {}
    for step in steps:
        if step.table is not None and id(step.table) not in tables:
            table = step.table.detach()
            narrow = torch.int16 if table.dtype.itemsize <= 2 else torch.int64 if step.op == AFFINE else torch.int32
            tables[id(step.table)] = _pairs(table) if step.op == SUM else table.to(narrow).contiguous()
    places = {key: address(table) for key, table in tables.items()}
    is_narrow = {key for key, table in tables.items() if table.dtype == torch.int16}
    highs = [0 if step.op == READ else int(id(step.table) in is_narrow) if step.op == Op.LOOK_UP else step.high for step in steps]
    steps = [step._replace(high=high) for step, high in zip(steps, highs, strict=True)]
    rows = (_Step(*step[:6], size, places.get(id(step.table), 0)) for step, size in zip(steps, columns, strict=True))
    return (_Step * len(steps))(*rows), list(tables.values())


def _pairs(weight: Tensor) -> Tensor:
    """Return a weight (columns, depth) as sums read it, int8 (columns / TOGETHER, depth / 2, TOGETHER, 2), with zeros around it."""
    columns, depth = weight.shape
    whole = F.pad(weight, (0, depth % 2, 0, -columns % TOGETHER))
    return whole.reshape(-1, TOGETHER, whole.shape[1] // 2, 2).transpose(1, 2).contiguous()


def packed(
    steps: Sequence[Step], operands: Sequence[int], size: Callable[[int], int], result: int | None = None
) -> tuple[list[Step], dict[int, int], int]:
    """Return steps on the first lanes of registers, these places, and the number of lanes; what was read last makes room for others.

    Operands keep their lanes: one that does not vary is read once, for all blocks.
    """
    last = {register: index for index, step in enumerate(steps) for register in (step.a, step.b)}
    if result is not None:
        last[result] = len(steps)
    places, used = dict[int, int](), 0
    for register in operands:
        places[register] = used
        used += size(register)
    reserved, free, placed = used, dict[int, list[int]](), list[Step]()
    for index, step in enumerate(steps):
        a, b = places.get(step.a, 0), places.get(step.b, 0)
        if not free.setdefault(size(step.to), []):
            free[size(step.to)].append(used)
            used += size(step.to)
        places[step.to] = free[size(step.to)].pop()
        placed.append(step._replace(to=places[step.to], a=a, b=b))
        for register in {step.a, step.b}:
            if last.get(register) == index and places.get(register, -1) >= reserved:
                free.setdefault(size(register), []).append(places[register])
    return placed, places, used


def _ranges(site: Site, writer: Writer) -> Ranges:
    ranges = {register: _range(site, value) for register, value in writer.operands}
    for step in writer.steps:
        ranges[step.to] = _reached(site, step, ranges.get(step.a), ranges.get(step.b))
    return ranges


def fused(ranges: Ranges, writer: Writer, result: int = -1) -> tuple[list[Step], list[tuple[int, Any]], int]:
    """Return the writer's steps, with steps by constant numbers fused, the operands that the steps read, and the register of the result.

    A step that changes no number that its operand can be is left out. A product, a sum, a shift and limits that follow each other are one
    step, AFFINE, where no other step reads what is between them.
    """
    constants = {register: value for register, value in writer.operands if isinstance(value, Tensor)}
    readers = Counter(register for step in writer.steps for register in {step.a, step.b})
    readers[result] += 1
    same, steps, stages = dict[int, int](), dict[int, Step](), dict[int, int]()
    for whole in writer.steps:
        step = whole._replace(a=same.get(whole.a, whole.a), b=same.get(whole.b, whole.b))
        reached, by = ranges.get(step.a), ranges.get(step.b)
        stage = STAGES.get(step.op, -1)
        one = stage >= 0 and reached is not None and step.a not in constants
        if not one or (step.op != Op.CLIP and (step.b not in constants or by is None or by[0] != by[1])):
            steps[step.to] = step
            continue
        number = by[0] if by is not None and step.op != Op.CLIP else 0
        if (step.low <= reached[0] and reached[1] <= step.high) if step.op == Op.CLIP else number == (stage == 0):  # type: ignore[index]
            same[step.to] = step.a
            readers[step.a] += readers[step.to] - 1
            continue
        own, numbers = [1, 0, 0], list[int]()
        if step.a in stages and readers[step.a] == 1 and (stages[step.a] < stage or steps[step.a].low == 1):
            first = steps.pop(step.a)
            assert first.table is not None
            numbers, step = first.table.tolist(), step._replace(a=first.a)
            if stages[first.to] < stage:
                own, numbers = numbers[-5:-2], numbers[:-5]
        if stage < 3:
            own[stage] = -number if step.op == Op.SUBTRACT else number
        numbers += [*own, *ranges[step.to]]  # type: ignore[misc]
        steps[step.to] = Step(AFFINE, step.to, step.a, step.a, len(numbers) // 5, 0, torch.tensor(numbers, device="cpu"))  # type: ignore[arg-type]
        stages[step.to] = stage
    read = {register for step in steps.values() for register in (step.a, step.b)}
    return list(steps.values()), [each for each in writer.operands if each[0] not in constants or each[0] in read], same.get(result, result)


def _is_wide(ranges: Ranges, writer: Writer, nodes: Iterable[fx.Node]) -> bool:
    """Return whether steps need 64 bits: the primitives do, or say so, and the ranges of the operands allow numbers beyond int32."""
    if any(ends is not None and (ends[0] < -(2**63) or ends[1] >= 2**63) for ends in ranges.values()):
        raise NotApplicable("its numbers may have more than 64 bits")  # a comparison by the sign of a difference would be wrong
    says = writer.wide or any(node.op != "get_attr" and fact(node).dtype == torch.int64 for node in nodes)
    return says and any(ends is not None and (ends[0] < -(2**31) or ends[1] >= 2**31) for ends in ranges.values())


def _range(site: Site, value: Any) -> tuple[int, int] | None:
    """Return the smallest and the largest integer of an operand; None for one of floats."""
    if isinstance(value, Tensor):
        return None if value.is_floating_point() else (int(value.min()), int(value.max()))
    dtype = fact(value).dtype
    if dtype.itemsize > 2 and (proved := site.forms.ranges.get(value)) is not None:  # nothing is proved of the model's inputs
        return int(proved.low.min()), int(proved.high.max())
    return (0, 1) if dtype == torch.bool else None if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _reached(site: Site, step: Step, a: Any, b: Any) -> tuple[int, int] | None:
    """Return the bounds (low, high) of a step's integer result, from the bounds `a` and `b` of its operands; None for floats."""
    if step.op == READ:
        return _range(site, step.high)
    if step.op == SUM:
        NotApplicable.unless(a[0] >= -(2**15) and a[1] < 2**15, "it multiplies integers of more than 16 bits")
        assert step.table is not None
        bound = int(accumulator_bound(step.table, None, 0, max(map(abs, a))).max())
        return b[0] - bound, b[1] + bound
    if step.op == Op.LOOK_UP:
        return _range(site, step.table)
    if step.op in (Op.CLIP, Op.ROUND):
        return step.low, step.high
    if step.op in (WRITE, Op.SCALE):
        return None
    if step.op in (PART, SPREAD, Op.LOWEST, Op.HIGHEST):
        return a  # type: ignore[no-any-return]
    if step.op == Op.TOTAL:
        return step.high * a[0], step.high * a[1]
    ends = [WHOLE[step.op](x, y) for x in a for y in b]
    return min(ends), max(ends)


@dataclass(frozen=True)
class _Built:
    """A chain at one place."""

    function: Any
    structure: _Chain
    constants: Sequence[Tensor | None]
    zeros: Sequence[int]  # of bytes that stand for int8
    keeps: Any

    def bind(self) -> Bound:
        own = _Chain.from_buffer_copy(self.structure)
        place, count = ctypes.addressof(own), len(self.constants) + 1
        data = (ctypes.c_void_p * count)()
        own.data = ctypes.addressof(data)
        plans: dict[Any, Any] = {}

        def bound(inputs: Sequence[Tensor], output: Tensor, _keeps: Any = (own, self.keeps, data)) -> None:
            operands = iter(inputs)
            tensors = [next(operands) if constant is None else constant for constant in self.constants]
            key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (*inputs, output))
            if key not in plans:
                plans.clear()
                plans[key] = self.plan(tensors, output)
            own.kinds, own.offsets, own.sizes, own.strides = map(address, plans[key])
            for index, tensor in enumerate((*tensors, output)):
                data[index] = address(tensor)
            own.threads = torch.get_num_threads()
            self.function(place)

        return bound

    def plan(self, tensors: Sequence[Tensor], output: Tensor) -> list[Tensor]:
        """Return the dtypes and offsets of operands, the sizes, the outermost first, and the strides of each tensor: int64."""
        every = [*(tensor.expand(output.shape) for tensor in tensors), output]
        order = sorted(range(output.dim()), key=output.stride, reverse=True)
        dims: list[tuple[int, tuple[int, ...]]] = []
        for dim in order:
            size, strides = output.shape[dim], tuple(tensor.stride(dim) for tensor in every)
            if size == 1:
                continue
            if dims and all(outer == inner * size for outer, inner in zip(dims[-1][1], strides, strict=True)):
                dims[-1] = (dims[-1][0] * size, strides)
            else:
                dims.append((size, strides))
        if len(dims) > DIMENSIONS:
            raise RuntimeError(f"it has {len(dims)} dimensions")
        dims = [(1, (0,) * len(every))] * (DIMENSIONS - len(dims)) + dims
        kinds = [KINDS[tensor.dtype] for tensor in every]
        offsets = [zero if tensor.dtype == torch.uint8 else 0 for tensor, zero in zip(tensors, self.zeros, strict=True)]
        strides_of = [[strides[index] for _, strides in dims] for index in range(len(every))]
        return [torch.tensor(each, dtype=torch.int64, device="cpu") for each in (kinds, offsets, [size for size, _ in dims], strides_of)]


class _Program(ctypes.Structure):
    """The arguments of a program: the structure of chains.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("steps", "moves", "places", "data", "constants")),
        *((name, ctypes.c_int64) for name in ("rows", "most", "fixed", "used", "depth", "count", "wide", "threads", "once", "repeats")),
    ]


@implementation("native program on rows", strided=True)
def program(site: Site) -> Built:
    """Build the program of the nodes at a site, which reads and writes tensors of any strides."""
    library = native.chains_library()
    if isinstance(library, str):
        raise NotApplicable(library)
    rows = _Rows(site)
    for node in site.match.parts["nodes"]:
        rows.add(node)
    if "loop" in site.match.parts:
        rows.repeat(site.match.parts["loop"])
    return rows.built(library.fxq_program)


def _whole(whole: Tensor) -> Tensor:
    return whole


def _step_of(whole: Tensor, dim: int, backwards: bool, step: int) -> Tensor:
    """Return what a sequence has at a step along `dim`; at its last one where it has no such step."""
    last = whole.shape[dim] - 1
    return whole.select(dim, max(0, last - step) if backwards else min(step, last))


def _stride_of(whole: Tensor, dim: int, backwards: bool) -> int:
    return -whole.stride(dim) if backwards else whole.stride(dim)


class _Kept(NamedTuple):
    """A tensor that a state is written to: its place, the parts for the first step and the next, and the stride of later ones, if any."""

    place: int
    first: View = _whole
    others: View = _whole
    stride: View | None = None


@dataclass
class _Rows:
    """A program while it is being written."""

    site: Site
    writer: Writer = field(default_factory=Writer)
    columns: dict[int, int] = field(default_factory=dict)  # of each register
    registers: dict[fx.Node, Any] = field(default_factory=dict)  # of the nodes; constants are tensors
    # What is read and written: the place of a tensor among those read and the results, the part of it, and the stride of repeats.
    moves: list[tuple[int, View, View | None]] = field(default_factory=list)
    once: int | None = None  # the first register of the steps that are repeated; None where none are
    steps_of: tuple[int, int] = (0, 0)  # the place of the sequence that they run along, and its dimension
    scratch: list[tuple[int, torch.dtype]] = field(default_factory=list)  # columns and dtype of states that are not results
    copies: dict[tuple[int, int], int] = field(default_factory=dict)  # the registers of one column that are also registers of a width
    shapes: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # of the nodes whose steps read constants, by the registers of these
    varying: list[Tensor] = field(default_factory=list)  # constants that differ between rows, which are read like tensors

    def add(self, node: fx.Node) -> None:
        """Write the steps of a node, and its result where others read that."""
        match, arguments, begin = self.site.match, cast(tuple[Any, ...], node.args), 0
        results = (match.root, *match.results)
        place = len(match.reads) + results.index(node) if node in results else None
        if node.target is shape.concatenate:
            for operand in arguments[0]:
                size: Any = fact(operand).shape[arguments[1]]
                self.write(place, operand, partial(torch.narrow, dim=arguments[1], start=begin, length=size))
                begin += size
            return
        width: Any = fact(node).shape[-1]
        self.registers[node] = self.computed(node, width, arguments)
        if place is not None:
            self.write(place, node, _whole)

    def repeat(self, nodes: Sequence[fx.Node]) -> None:
        """Write the steps of a loop's body, which is repeated: states are read from memory, and written there for the next step."""
        match = self.site.match
        results, begun = (match.root, *match.results), len(match.reads) + 1 + len(match.results)
        kept: dict[Any, list[_Kept]] = {}  # by position of a state, first the memory that the next step reads
        for place, mark in enumerate(results, len(match.reads)):
            arguments: Any = mark.args
            if mark.target is loop.last:
                kept.setdefault(arguments[2], []).insert(0, _Kept(place))
            elif mark.target is loop.stack:
                along = {"dim": arguments[3], "backwards": arguments[5]}
                first, others = (partial(_step_of, **along, step=step) for step in (0, 1))
                kept.setdefault(arguments[2], []).append(_Kept(place, first, others, partial(_stride_of, **along)))
        for state in (node for node in nodes if node.target is loop.state):
            arguments = state.args
            every = kept.setdefault(arguments[2], [])
            if not every or every[0].stride is not None:
                self.scratch.append((fact(state).shape[-1], fact(state).dtype))
                every.insert(0, _Kept(begun + len(self.scratch) - 1))
            for each in every:
                self.write(each.place, arguments[0], each.first)
        self.once = max(self.columns, default=-1) + 1
        self.registers = {node: value for node, value in self.registers.items() if isinstance(value, Tensor)}
        for node in (node for node in nodes if node.op != "get_attr" and node.target not in (loops.begin, loops.end)):
            arguments, width = node.args, fact(node).shape[-1]
            if node.target is loop.item:
                sequence, _, dim, backwards = arguments
                self.steps_of = match.reads.index(sequence), dim
                view = partial(_step_of, dim=dim, backwards=backwards, step=1)
                self.registers[node] = self.read(sequence, width, view, partial(_stride_of, dim=dim, backwards=backwards))
            elif node.target is loop.state:
                self.moves.append((kept[arguments[2]][0].place, _whole, None))
                self.registers[node] = self.step(READ, width, -1, -1, len(self.moves) - 1, node)
            elif node.target is loop.carry:
                for each in kept[arguments[2]]:
                    self.write(each.place, arguments[0], each.others, each.stride)
            else:
                self.add(node)

    def computed(self, node: fx.Node, width: int, arguments: tuple[Any, ...]) -> int:
        """Write the steps of a node of `width` columns and return its register."""
        result: Any
        before = max(self.columns, default=-1) + 1
        if node.target is shape.crop:
            operand, _, starts, stops, _ = arguments
            if operand in self.site.match.reads:
                return self.read(operand, width, lambda whole: shape.crop(whole, *arguments[1:]))
            whole: Any = fact(operand).shape[-1]
            return self.step(PART, width, self.value(operand), None, range(whole)[slice(starts[0], stops[0])].start, whole)
        if PRIMITIVES[node.target].view:  # type: ignore[index]
            return self.value(arguments[0])  # type: ignore[no-any-return]
        if (reduces := reduction(node)) is not None:
            return self.step(reduces, 1, self.value(arguments[0]), None, 0, fact(arguments[0]).shape[-1])
        if role_of(node.target) is Role.LINEAR:
            operand, weight, bias = map(self.value, arguments[:3])
            bias = torch.zeros((), dtype=torch.int32, device="cpu") if bias is None else bias
            result = self.step(SUM, width, operand, bias, 0, weight.shape[1], weight)
        else:
            args, kwargs = fx.map_arg((arguments, node.kwargs), lambda operand: self.spread(operand, width))
            result = PRIMITIVES[node.target].steps(self.writer, *args, **kwargs)  # type: ignore[index, misc]
            if result is None:
                raise NotApplicable(f"{PRIMITIVES[node.target].name} has no elementwise steps for its arguments")  # type: ignore[index]
        for register in range(before, result + 1):
            self.columns.setdefault(register, width)  # what is read has its own
            self.shapes.setdefault(register, fact(node).shape)
        return result  # type: ignore[no-any-return]

    def value(self, node: Any) -> Any:
        """Return the register of a node, which may be one that is read, or the tensor of a constant."""
        if isinstance(node, fx.Node) and node not in self.registers:
            is_constant = node.op == "get_attr"
            self.registers[node] = self.site.constant(node) if is_constant else self.read(node, fact(node).shape[-1], _whole)
        return self.registers[node] if isinstance(node, fx.Node) else node

    def spread(self, node: fx.Node, width: int) -> Any:
        """Return the value of a node as one of `width` columns."""
        value = self.value(node)
        if isinstance(value, Tensor) or self.columns[value] == width:
            return value
        if (value, width) not in self.copies:
            self.copies[value, width] = self.step(SPREAD, width, value)
        return self.copies[value, width]

    def step(self, op: int, width: int, *arguments: Any) -> int:
        register = self.writer.write(op, *arguments)  # type: ignore[arg-type]
        self.columns[register] = width
        return register

    def read(self, node: fx.Node, width: int, view: View, stride: View | None = None) -> int:
        self.moves.append((self.site.match.reads.index(node), view, stride))
        return self.step(READ, width, -1, -1, len(self.moves) - 1, node)

    def write(self, place: int | None, node: fx.Node, view: View, stride: View | None = None) -> None:
        assert place is not None
        value = self.value(node)  # which may be read first
        self.moves.append((place, view, stride))
        self.step(WRITE, 0, value, None, len(self.moves) - 1)

    def built(self, function: Any) -> Built:
        ranges = _ranges(self.site, self.writer)
        wide = _is_wide(ranges, self.writer, self.registers)
        needed, operands, _ = fused(ranges, self.writer)
        same: dict[Any, int] = {}  # a constant has one register, however often it is read
        names: dict[int, int] = {}
        values: list[Tensor] = []
        first: list[Step] = []
        for register, value in operands:
            width = self.columns[register]
            constant = _constant(value, torch.int64 if wide else torch.int32)
            assert constant is not None
            NotApplicable.unless(not wide or not constant.is_floating_point(), "it needs integers of 64 bits and floats")
            if constant.numel() not in (1, constant.shape[-1] if constant.dim() else 1):
                NotApplicable.unless(self.once is None, "its constants differ between rows")
                first.append(self.differing(register, constant))
                continue
            row = constant.flatten().expand(width).contiguous()
            key = row.dtype, row.numpy().tobytes()
            names[register] = same.setdefault(key, register)
            if names[register] == register:
                values.append(row.view(torch.int32) if row.is_floating_point() else row)
        steps = [*first, *(step._replace(a=names.get(step.a, step.a), b=names.get(step.b, step.b)) for step in needed)]
        widths = [self.columns[step.a if step.op == WRITE else step.to] for step in steps]
        written, _, used = packed(steps, list(same.values()), self.columns.__getitem__)
        structures_of, tables = _structures(written, widths)
        constants = torch.cat(values) if values else torch.zeros(1, dtype=torch.int32, device="cpu")
        fixed, most = sum(map(len, values)), max(1, min(MOST_ROWS, MOST_LANES // max(widths)))
        depth = max(((step.high + 1) // 2 for step in steps if step.op == SUM), default=1)
        structure = _Program(most=most, fixed=fixed, used=used - fixed, depth=depth, count=len(steps), wide=wide)
        structure.steps, structure.constants = ctypes.addressof(structures_of), address(constants)
        structure.once = sum(self.once is None or step.to < self.once for step in steps)
        keeps = structures_of, tables, constants

        def bind() -> Bound:
            own, plans = _Program.from_buffer_copy(structure), dict[Any, tuple[Tensor, Tensor]]()

            def bound(inputs: Sequence[Tensor], output: Any, _keeps: Any = keeps) -> None:
                tensors = [*inputs, *(output if isinstance(output, list) else [output]), *self.varying, *self.scratch_for(inputs)]
                own.repeats = 0 if self.once is None else inputs[self.steps_of[0]].shape[self.steps_of[1]] - 1
                key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
                if key not in plans:
                    plans.clear()
                    plans[key] = self.plan(tensors)
                    own.rows = plans[key][1].shape[1]
                    own.moves, own.places = map(address, plans[key])
                data = (ctypes.c_void_p * len(tensors))(*map(address, tensors))
                own.data, own.threads = ctypes.addressof(data), torch.get_num_threads()
                function(ctypes.addressof(own))

            return bound

        return Binding(bind)

    def scratch_for(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return memory (rows, columns) for each of the states that are carried and are not results."""
        if not self.scratch:
            return []
        place, dim = self.steps_of
        sequence = inputs[place]
        rows = sequence.numel() // max(1, sequence.shape[dim] * sequence.shape[-1])
        return [torch.empty(rows, width, dtype=dtype, device="cpu") for width, dtype in self.scratch]

    def differing(self, register: int, constant: Tensor) -> Step:
        """Return the step that reads a constant with different rows; the constant is repeated for each item of the batch."""
        _, *sizes = self.shapes[register]
        NotApplicable.unless(all(isinstance(size, int) for size in sizes), "its constants differ between rows, of a number that varies")
        self.moves.append((len(self.site.match.reads) + 1 + len(self.site.match.results) + len(self.varying), _whole, None))
        self.varying.append(constant.expand(constant.shape[0] if constant.dim() > len(sizes) else 1, *sizes))
        return Step(READ, register, -1, -1, len(self.moves) - 1)  # type: ignore[arg-type]

    def plan(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return a row of int64 for each move (tensor, dtype, strides of columns and repeats, zero point), and the offset of each row."""
        moves, places, reads = list[tuple[int, ...]](), list[Tensor](), self.site.match.reads
        for place, view, onwards in self.moves:
            whole, part = tensors[place], view(tensors[place])
            first = torch.tensor(int(part.storage_offset() - whole.storage_offset()), dtype=torch.int64, device="cpu")
            for size, stride in zip(part.shape[:-1], part.stride()[:-1], strict=True):
                first = first[..., None] + torch.arange(size, device="cpu") * stride
            first = first.flatten()
            places.append(first.repeat(len(places[0]) // len(first)) if places else first)
            subtracted = _zero(self.site, reads[place]) if place < len(reads) and whole.dtype == torch.uint8 else 0
            moves.append((place, KINDS[whole.dtype], part.stride(-1), 0 if onwards is None else onwards(whole), subtracted))
        return torch.tensor(moves, dtype=torch.int64, device="cpu"), torch.stack(places)
