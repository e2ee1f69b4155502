"""Programs on rows in `chains.c`: recurrences over all their steps, and layers whose results have 16 bits.

A register holds the last dimension of a node for some rows of its other dimensions, and no row depends on another one. Beside
elementwise steps there are sums of products, parts of a register's columns, and moves from and to memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backends.cpu import native
from fxquant.backends.cpu.chains import KINDS, PART, READ, SUM, WRITE, constant, is_wide, packed, ranges, structures, zero
from fxquant.ir.graph import fact
from fxquant.kernels.kernel import Bound, Built, NotApplicable, Site, implementation
from fxquant.primitives import PRIMITIVES, Role, role_of, shape
from fxquant.primitives.steps import Writer
from fxquant.support.files import address

MOST_ROWS, MOST_LANES = 16, 4096  # that a step computes at once
View = Callable[[Tensor], Tensor]


class _Program(ctypes.Structure):
    """The arguments of a program: the structure of chains.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("steps", "moves", "places", "data", "constants")),
        *((name, ctypes.c_int64) for name in ("rows", "most", "fixed", "used", "depth", "count", "wide", "threads")),
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
    return rows.built(library.fxq_program)


@dataclass
class _Rows:
    """A program while it is being written.

    columns    of each register
    registers  of the nodes; constants are tensors
    moves      what is read and written: the place of a tensor among those read and the results, and the part of it
    """

    site: Site
    writer: Writer = field(default_factory=Writer)
    columns: dict[int, int] = field(default_factory=dict)
    registers: dict[fx.Node, Any] = field(default_factory=dict)
    moves: list[tuple[int, View]] = field(default_factory=list)

    def add(self, node: fx.Node) -> None:
        """Write the steps of a node, and its result where others read that."""
        match, arguments = self.site.match, tuple(node.args)
        results = (match.root, *match.results)
        place = len(match.reads) + results.index(node) if node in results else None
        if node.target is shape.concatenate:
            tensors, dim = arguments
            begin = 0
            for operand in tensors:  # type: ignore[union-attr]
                size: Any = fact(operand).shape[dim]
                self.write(place, operand, lambda whole, begin=begin, size=size: whole.narrow(dim, begin, size))
                begin += size
            return
        self.registers[node] = self.computed(node, fact(node).shape[-1], arguments)  # type: ignore[arg-type]
        if place is not None:
            self.write(place, node, lambda whole: whole)

    def computed(self, node: fx.Node, width: int, arguments: tuple[Any, ...]) -> int:
        """Write the steps of a node with so many columns and return its register."""
        before = len(self.writer.operands), len(self.writer.steps)
        if node.target is shape.crop:
            operand, dims, starts, stops, _ = arguments
            if operand in self.site.match.reads:
                return self.read(operand, width, lambda whole: shape.crop(whole, *arguments[1:]))
            whole: Any = fact(operand).shape[-1]
            return self.step(PART, width, self.value(operand), None, range(whole)[slice(starts[0], stops[0])].start, whole)
        if node.target is shape.reshape:
            return self.value(arguments[0])  # type: ignore[no-any-return]
        if role_of(node.target) is Role.LINEAR:
            operand, weight, bias = map(self.value, arguments[:3])
            bias = torch.zeros((), dtype=torch.int32, device="cpu") if bias is None else bias
            made = self.step(SUM, width, operand, bias, 0, weight.shape[1], weight)
        else:
            args, kwargs = fx.map_arg((arguments, node.kwargs), self.value)
            made = PRIMITIVES[node.target].steps(self.writer, *args, **kwargs)  # type: ignore[index, misc]
            if made is None:
                raise NotApplicable(f"{node.target.__name__} has no elementwise steps for its arguments")  # type: ignore[union-attr]
        for register, _ in self.writer.operands[before[0] :]:
            self.columns[register] = width
        for step in self.writer.steps[before[1] :]:
            self.columns.setdefault(step.to, width)  # what is read has its own
        return made

    def value(self, node: Any) -> Any:
        """Return the register of a node, which may be one that is read, or the tensor of a constant."""
        if isinstance(node, fx.Node) and node not in self.registers:
            is_constant = node.op == "get_attr"
            self.registers[node] = self.site.constant(node) if is_constant else self.read(node, fact(node).shape[-1], lambda whole: whole)
        return self.registers[node] if isinstance(node, fx.Node) else node

    def step(self, op: int, width: int, *arguments: Any) -> int:
        made = self.writer.write(op, *arguments)  # type: ignore[arg-type]
        self.columns[made] = width
        return made

    def read(self, node: fx.Node, width: int, view: View) -> int:
        place = self.site.match.reads.index(node)
        self.moves.append((place, view))
        return self.step(READ, width, -1, -1, len(self.moves) - 1, place)

    def write(self, place: int | None, node: fx.Node, view: View) -> None:
        assert place is not None
        self.moves.append((place, view))
        self.step(WRITE, 0, self.value(node), None, len(self.moves) - 1)

    def built(self, function: Any) -> Built:
        reached = ranges(self.site, self.writer)
        for low, high in (reached[step.a] or (0, 0) for step in self.writer.steps if step.op == SUM):
            if low < -(2**15) or high >= 2**15:
                raise NotApplicable("it multiplies integers of more than 16 bits")
        wide = is_wide(self.site, self.writer, self.registers)
        same: dict[Any, int] = {}  # a constant has one register, however often it is read
        names: dict[int, int] = {}
        values: list[Tensor] = []
        for register, value in self.writer.operands:
            width = self.columns[register]
            known = constant(value, torch.int64 if wide else torch.int32)
            if known is None or known.numel() not in (1, known.shape[-1] if known.dim() else 1):
                raise NotApplicable("its constants differ between rows")
            if wide and known.is_floating_point():
                raise NotApplicable("it needs integers of 64 bits and floats")
            row = known.flatten().expand(width).contiguous()
            key = row.dtype, row.numpy().tobytes()
            names[register] = same.setdefault(key, register)
            if names[register] == register:
                values.append(row.view(torch.int32) if row.is_floating_point() else row)
        steps = [step._replace(a=names.get(step.a, step.a), b=names.get(step.b, step.b)) for step in self.writer.steps]
        widths = [self.columns[step.a if step.op == WRITE else step.to] for step in steps]
        written, _, used = packed(steps, list(same.values()), self.columns.__getitem__)
        structures_of, tables = structures(written, widths)
        constants = torch.cat(values) if values else torch.zeros(1, dtype=torch.int32, device="cpu")
        fixed, most = sum(map(len, values)), max(1, min(MOST_ROWS, MOST_LANES // max(widths)))
        depth = max(((step.high + 1) // 2 for step in steps if step.op == SUM), default=1)
        made = _Program(most=most, fixed=fixed, used=used - fixed, depth=depth, count=len(steps), wide=wide)
        made.steps, made.constants = ctypes.addressof(structures_of), address(constants)
        zeros = [zero(self.site, read) for read in self.site.match.reads]
        return _Built(function, made, self.moves, zeros, (structures_of, tables, constants))


@dataclass(frozen=True)
class _Built:
    """A program at one place."""

    function: Any
    structure: _Program
    moves: Sequence[tuple[int, View]]
    zeros: Sequence[int]  # of bytes that stand for int8
    keeps: Any

    def bind(self) -> Bound:
        own = _Program.from_buffer_copy(self.structure)
        known: dict[Any, tuple[Tensor, Tensor]] = {}

        def bound(inputs: Sequence[Tensor], output: Any, _keeps: Any = self.keeps) -> None:
            tensors = [*inputs, *(output if isinstance(output, list) else [output])]
            key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
            if key not in known:
                known.clear()
                known[key] = self.plan(tensors)
                own.rows = known[key][1].shape[1]
                own.moves, own.places = map(address, known[key])
            data = (ctypes.c_void_p * len(tensors))(*map(address, tensors))
            own.data, own.threads = ctypes.addressof(data), torch.get_num_threads()
            self.function(ctypes.addressof(own))

        return bound

    def plan(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return for each move its tensor, dtype, stride of columns and what is subtracted, and where every row begins: int64."""
        moves, places = [], []
        for place, view in self.moves:
            whole = tensors[place]
            part = view(whole)
            first = torch.full((), part.storage_offset() - whole.storage_offset(), device="cpu")
            for size, stride in zip(part.shape[:-1], part.stride()[:-1], strict=True):
                first = first[..., None] + torch.arange(size, device="cpu") * stride
            places.append(first.flatten())
            subtracted = self.zeros[place] if place < len(self.zeros) and whole.dtype == torch.uint8 else 0
            moves.append((place, KINDS[whole.dtype], part.stride(-1), subtracted))
        return torch.tensor(moves, dtype=torch.int64, device="cpu"), torch.stack(places)
