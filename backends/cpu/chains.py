"""The kernel of elementwise chains in `chains.c`: it reads and writes tensors of any dtype and strides."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxquant.backends.cpu import native
from fxquant.ir.graph import fact
from fxquant.kernels.kernel import Bound, Built, NotApplicable, Site, implementation, in_order
from fxquant.numerics.grids import accumulator_bound
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.steps import Op, Step, Writer
from fxquant.support.files import address

DIMENSIONS = 8  # of a tensor, at most
BLOCK = 512  # elements that a chain's step computes at once
MOST_REGISTERS = 64
READ, WRITE, PART, SUM = range(len(Op), len(Op) + 4)  # steps of a program: moves of memory, columns of a register, sums of products
TOGETHER = 64  # columns of sums that are computed together
WHOLE: dict[int, Callable[[int, int], int]] = {  # the operations of two integers
    Op.ADD: operator.add,
    Op.SUBTRACT: operator.sub,
    Op.MULTIPLY: operator.mul,
    Op.SHIFT: operator.rshift,
    Op.LEAST: min,
    Op.LARGEST: max,
}
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
    wide = is_wide(site, writer, registers)
    steps, places, used = packed(writer.steps, [register for register, _ in writer.operands], lambda _: BLOCK, registers[site.match.root])
    if used > MOST_REGISTERS * BLOCK:
        raise NotApplicable(f"it needs {used // BLOCK} registers, of {MOST_REGISTERS}")
    values = [value for _, value in writer.operands]
    constants = [constant(value, torch.int64 if wide else torch.int32) for value in values]
    zeros = [zero(site, value) if isinstance(value, fx.Node) else 0 for value in values]
    rows, tables = structures(steps, [0] * len(steps))
    made = _Chain(operands=len(values), count=len(steps), used=used, wide=wide)
    made.steps = ctypes.addressof(rows)
    registers_of = [*(register for register, _ in writer.operands), registers[site.match.root]]
    held = torch.tensor([places[register] for register in registers_of], dtype=torch.int64, device="cpu")
    made.registers = address(held)
    return _Built(library.fxq_chain, made, constants, zeros, (rows, tables, held))


def constant(value: Any, whole: torch.dtype) -> Tensor | None:
    """Return a constant as a chain reads it; None for an activation."""
    return value.detach().to(torch.float32 if value.is_floating_point() else whole) if isinstance(value, Tensor) else None


def zero(site: Site, read: fx.Node) -> int:
    """Return what is subtracted from bytes that stand for int8."""
    return site.held(read).zero if fact(read).dtype == torch.int8 else 0


def structures(steps: Sequence[Step], columns: Sequence[int]) -> tuple[Any, list[Tensor]]:
    """Return the steps as chains.c reads them, and the tables that they point to."""
    tables: dict[int, Tensor] = {}
    for step in steps:
        if step.table is not None and id(step.table) not in tables:
            table = step.table.detach()
            tables[id(step.table)] = _pairs(table) if step.op == SUM else table.to(torch.int32).contiguous()
    rows = (_Step(*step[:6], size, address(tables[id(step.table)]) if id(step.table) in tables else 0) for step, size in zip(steps, columns, strict=True))
    return (_Step * len(steps))(*rows), list(tables.values())


def _pairs(weight: Tensor) -> Tensor:
    """Return a weight (columns, depth) as sums read it, int8 of shape (columns / TOGETHER, depth / 2, TOGETHER, 2), with zeros around it."""
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
    kept, free, made = used, dict[int, list[int]](), list[Step]()
    for index, step in enumerate(steps):
        a, b = places.get(step.a, 0), places.get(step.b, 0)
        if not free.setdefault(size(step.to), []):
            free[size(step.to)].append(used)
            used += size(step.to)
        places[step.to] = free[size(step.to)].pop()
        made.append(step._replace(to=places[step.to], a=a, b=b))
        for register in {step.a, step.b}:
            if last.get(register) == index and places.get(register, 0) >= kept:
                free.setdefault(size(register), []).append(places[register])
    return made, places, used


def is_wide(site: Site, writer: Writer, nodes: Iterable[fx.Node]) -> bool:
    """Return whether steps need 64 bits: the primitives do, or say so, and the ranges of the operands allow numbers beyond int32."""
    if not writer.wide and all(node.op == "get_attr" or fact(node).dtype != torch.int64 for node in nodes):
        return False
    return any(known is not None and (known[0] < -(2**31) or known[1] >= 2**31) for known in ranges(site, writer).values())


def ranges(site: Site, writer: Writer) -> dict[int, tuple[int, int] | None]:
    """Return the smallest and the largest integer that each register can hold; None for floats."""
    found = {register: _range(site, value) for register, value in writer.operands}
    for step in writer.steps:
        found[step.to] = _reached(site, step, found.get(step.a), found.get(step.b))
    return found


def _range(site: Site, value: Any) -> tuple[int, int] | None:
    """Return the smallest and the largest integer of an operand; None for one of floats."""
    if isinstance(value, Tensor):
        return None if value.is_floating_point() else (int(value.min()), int(value.max()))
    if fact(value).dtype.itemsize <= 2:
        return torch.iinfo(fact(value).dtype).min, torch.iinfo(fact(value).dtype).max
    known = site.forms.ranges[value]
    return int(known.low.min()), int(known.high.max())


def _reached(site: Site, step: Step, a: Any, b: Any) -> tuple[int, int] | None:
    """Return the smallest and the largest integer that a step can have as its result, from those of its operands; None for floats."""
    if step.op == READ:
        return _range(site, site.match.reads[step.high])
    if step.op == SUM:
        bound = int(accumulator_bound(step.table, None, 0, max(map(abs, a))).max())
        return b[0] - bound, b[1] + bound
    if step.op == Op.LOOK_UP:
        return _range(site, step.table)
    if step.op in (Op.CLIP, Op.ROUND):
        return step.low, step.high
    if step.op in (WRITE, Op.SCALE):
        return None
    if step.op == PART:
        return a  # type: ignore[no-any-return]
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
        known: dict[Any, Any] = {}

        def bound(inputs: Sequence[Tensor], output: Tensor, _keeps: Any = (own, self.keeps, data)) -> None:
            given = iter(inputs)
            tensors = [next(given) if constant is None else constant for constant in self.constants]
            key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (*inputs, output))
            if key not in known:
                known.clear()
                known[key] = self.plan(tensors, output)
            own.kinds, own.offsets, own.sizes, own.strides = map(address, known[key])
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

