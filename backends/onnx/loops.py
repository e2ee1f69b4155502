"""A loop of an integer graph as one Loop of ONNX, whose body is written once.

Iteration t of the file begins with what step t carried, of which the first step was computed before, and computes step t + 1; the last
iteration computes step t again, which nothing reads. So the numbers of all steps leave it in one tensor, also of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx

from fxquant.ir.graph import Size, fact
from fxquant.primitives import loop

Info = Callable[[str, torch.dtype, tuple[Size, ...]], onnx.ValueInfoProto]


class Loop:
    """A loop while it is written: its body's nodes are collected in the emitter, the nodes before it are in `outer`."""

    def __init__(self, emitter: Any, infos: list[onnx.ValueInfoProto], start: fx.Node, count: int | str) -> None:
        self.emitter, self.start, self.name = emitter, start, start.name
        self.count = emitter.constant(count, torch.int64) if isinstance(count, int) else count
        self.outer, self.converted, self.infos, self.known = emitter.nodes, emitter.converted, infos, len(infos)
        emitter.nodes, emitter.converted = [], self.converted.copy()
        self.iteration, self.going = f"{self.name}/iteration", f"{self.name}/going"
        emitter.types[self.iteration], emitter.types[self.going] = torch.int64, torch.bool
        self.shapes: dict[Any, tuple[Size, ...]] = {user.args[2]: fact(user).shape for user in start.users if user.target is loop.state}
        self.first: dict[Any, str] = {}  # by position: what the first step gave
        self.given: dict[Any, str] = {}  # what a step is given, and what it gives, which has the name of its node
        self.next: dict[Any, str] = {user.args[2]: user.name for user in start.users if user.target is loop.carry}

    @contextmanager
    def before(self) -> Iterator[None]:
        """Write nodes before the loop."""
        e, within = self.emitter, (self.emitter.nodes, self.emitter.converted)
        e.nodes, e.converted = self.outer, self.converted
        yield
        e.nodes, e.converted = within

    def place(self, e: Any, backwards: bool) -> str:
        """Return the place in the sequence of the step that an iteration computes."""
        one, last = e.constant(1, torch.int64), e.node("Sub", self.count, e.constant(1, torch.int64))
        step = e.node("Min", e.node("Add", self.iteration, one), last)
        return str(e.node("Sub", last, step) if backwards else step)

    def begun(self, index: int, first: str) -> str:
        """Return the name of what a step is given at this position; `first` is what the first step gave."""
        self.first[index], self.given[index] = first, f"{self.name}/state_{index}"
        self.emitter.types[self.given[index]] = self.emitter.types[first]
        return self.given[index]

    def carry(self, value: str) -> str:
        """Return the name of what a step gives, which no other value has."""
        return str(self.emitter.node("Identity", value))

    def close(self, info: Info) -> None:
        """Append the Loop to the nodes before it."""
        last: list[Any] = sorted({user.args[2] for user in self.start.users if user.target is loop.last})
        every: list[Any] = sorted({user.args[2] for user in self.start.users if user.target is loop.stack})
        shapes = self.shapes
        e, states = self.emitter, sorted(self.first)
        e.scope = self.name

        def typed(names: list[str], indices: Any) -> list[onnx.ValueInfoProto]:
            return [info(name, e.types[self.first[index]], shapes[index]) for name, index in zip(names, indices, strict=True)]

        going = e.node("Identity", self.going)
        leaving = {kind: [e.node("Identity", self.given[index]) for index in chosen] for kind, chosen in (("last", last), ("every", every))}
        inputs = [
            helper.make_tensor_value_info(self.iteration, onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info(self.going, onnx.TensorProto.BOOL, []),
            *typed([self.given[index] for index in states], states),
            *typed([f"{self.name}/before_{index}" for index in last], last),
        ]
        outputs = [
            helper.make_tensor_value_info(going, onnx.TensorProto.BOOL, []),
            *typed([self.next[index] for index in states], states),
            *typed(leaving["last"], last),
            *typed(leaving["every"], every),
        ]
        body = helper.make_graph(e.nodes, f"{self.name}/body", inputs, outputs, value_info=self.infos[self.known :])
        del self.infos[self.known :]
        e.nodes, e.converted = self.outer, self.converted
        names = [*(f"{self.name}/after_{index}" for index in states), *(f"{self.name}/last_{index}" for index in last)]
        names += [f"{self.name}/every_{index}" for index in every]
        operands = [self.count, e.constant(True), *(self.first[index] for index in states), *(self.first[index] for index in last)]
        e.nodes.append(helper.make_node("Loop", operands, names, name=self.name, body=body))
        for index in (*last, *every):
            for kind in ("last", "every"):
                e.types[f"{self.name}/{kind}_{index}"] = e.types[self.first[index]]

    def last(self, e: Any, index: int) -> str:
        """Return the name of what the last step gave."""
        return str(e.node("Identity", f"{self.name}/last_{index}"))

    def stacked(self, e: Any, index: int, dim: int, backwards: bool) -> str:
        """Append the nodes that put what all steps gave along a dimension, and return the result's name."""
        value = f"{self.name}/every_{index}"
        if backwards:
            start, stop, axis, step = (e.constant([number], torch.int64) for number in (-1, -(2**63) + 1, 0, -1))
            value = e.node("Slice", value, start, stop, axis, step)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(self.shapes[index]) + 1)]
        return str(e.node("Transpose", value, perm=order) if dim else e.node("Identity", value))
