"""The kernel of elementwise chains in `chains.c`: it reads and writes tensors of any dtype and strides."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backends.cpu import native
from fxquant.kernels.kernel import Bound, Built, NotApplicable, Site, implementation, in_order
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.steps import Step, Writer
from fxquant.support.files import address

DIMENSIONS = 8  # of a tensor, at most
MOST_REGISTERS = 64
KINDS = {dtype: kind for kind, dtype in enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32))}


class _Step(ctypes.Structure):
    """One step: the structure of chains.c."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("op", "to", "a", "b", "low", "high")), ("table", ctypes.c_void_p)]


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
    for node in in_order(site.match.root, registers):
        if node.op == "get_attr":
            registers[node] = site.constant(node)
            continue
        write, (args, kwargs) = PRIMITIVES[node.target].steps, fx.map_arg((node.args, node.kwargs), registers.__getitem__)  # type: ignore[index]
        registers[node] = None if write is None else write(writer, *args, **kwargs)
        if registers[node] is None:
            raise NotApplicable(f"{node.target.__name__} has no elementwise steps for its arguments")  # type: ignore[union-attr]
    wide = writer.wide or any(node.op != "get_attr" and node.meta["fact"].dtype == torch.int64 for node in registers)
    steps, operands, result, used = packed(writer, registers[site.match.root])
    if used > MOST_REGISTERS:
        raise NotApplicable(f"it needs {used} registers, of {MOST_REGISTERS}")
    constants = [_constant(value, torch.int64 if wide else torch.int32) for _, value in operands]
    zeros = [site.held(value).zero if isinstance(value, fx.Node) and value.meta["fact"].dtype == torch.int8 else 0 for _, value in operands]
    tables = [None if step.table is None else step.table.detach().to(torch.int32).contiguous() for step in steps]
    rows = (_Step * len(steps))(
        *(_Step(*step[:6], 0 if table is None else address(table)) for step, table in zip(steps, tables, strict=True))
    )
    made = _Chain(operands=len(operands), count=len(steps), used=used, wide=wide)
    made.steps = ctypes.addressof(rows)
    places = torch.tensor([register for register, _ in operands] + [result], dtype=torch.int64, device="cpu")
    made.registers = address(places)
    return _Built(library.fxq_chain, made, constants, zeros, (rows, tables, places))


def _constant(value: Any, whole: torch.dtype) -> Tensor | None:
    """Return a constant as a chain reads it; None for an activation."""
    return value.detach().to(torch.float32 if value.is_floating_point() else whole) if isinstance(value, Tensor) else None


def packed(writer: Writer, result: int) -> tuple[list[Step], list[tuple[int, Any]], int, int]:
    """Return steps, operands and the result with registers that are used again after their last read, and the number of registers.

    Operands keep their registers: one that does not vary is read once, for all blocks.
    """
    last = {register: index for index, step in enumerate(writer.steps) for register in (step.a, step.b)}
    last[result] = len(writer.steps)
    names = {register: index for index, (register, _) in enumerate(writer.operands)}
    kept, free, used, steps = len(names), list[int](), len(names), list[Step]()
    for index, step in enumerate(writer.steps):
        a, b = names[step.a], names.get(step.b, 0)
        if not free:
            free.append(used)
            used += 1
        names[step.to] = free.pop()
        steps.append(step._replace(to=names[step.to], a=a, b=b))
        free += {names[each] for each in (step.a, step.b) if last.get(each) == index and names.get(each, 0) >= kept}
    return steps, [(names[register], value) for register, value in writer.operands], names[result], used


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
