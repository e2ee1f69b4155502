"""The check of a graph's inputs: what the graph was made for is computed, anything else is refused.

The shapes and dtypes of a graph, its constants, and the proof that its accumulators fit hold for the inputs it was traced with and for
every batch size. So every form of a model (traced, prepared, integer, loaded, copied) checks its inputs before it computes. It checks
shapes, dtypes and the like, never values, so that a check takes a few microseconds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from fxquant.errors import ConfigurationError
from fxquant.frontend.batch_limits import BatchLimits, noted_limits
from fxquant.ir import graph
from fxquant.ir.facts import BatchDim, TensorFact, unusual_kind


@dataclass(frozen=True)
class Input:
    """The requirements on one input.

    sizes      of its dimensions; None for the batch
    form       the whole of it as text; None where nothing is known of it
    optional   whether it may be left out
    """

    name: str
    dtype: torch.dtype | None
    sizes: tuple[int | None, ...]
    form: str | None
    optional: bool


@dataclass(frozen=True)
class InputCheck:
    """A forward pre-hook: ConfigurationError unless a graph module is given its inputs, flat, as they were traced, with any batch size.

    made      what was done with the model to get the graph: "traced" or "prepared"
    batches   between which batch sizes the graph's shapes hold
    """

    inputs: tuple[Input, ...]
    made: str
    batches: BatchLimits

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_number(args, kwargs)
        first, batch = "", None
        for index, expected in enumerate(self.inputs):
            if expected.form is None or (index >= len(args) and expected.name not in kwargs):
                continue
            given = args[index] if index < len(args) else kwargs[expected.name]
            self._check_kind(module, expected, given)
            for dim, (size, wanted) in enumerate(zip(given.shape, expected.sizes, strict=True)):
                if wanted is not None:
                    if size != wanted:
                        fixed = "only B can vary" if None in expected.sizes else "every size of this input is fixed"
                        self._refuse(expected, f"dimension {dim} has size {size}", f"{self._made_with(expected)}, and {fixed}")
                elif batch is None:
                    first, batch = expected.name, size
                    self._check_batch(expected, size)
                elif batch != size:
                    self._refuse(expected, f"its batch is {size}", f"input {first} has a batch of {batch}, and all inputs share one")

    def _check_batch(self, expected: Input, size: int) -> None:
        if 0 < size < self.batches.smallest:
            where = f"from a batch of {self.batches.smallest} on"
        elif self.batches.largest is not None and size > self.batches.largest:
            where = f"up to a batch of {self.batches.largest}"
        else:
            return
        self._refuse(expected, f"its batch is {size}", f"the model slices its batch at a fixed index, and its shapes are valid {where}")

    def _check_number(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [expected.name for expected in self.inputs]
        taken = f"its graph takes {len(names)} input{'' if len(names) == 1 else 's'}, {', '.join(names)}"
        remedy = f"call the model with {', '.join(names)}"
        if len(args) > len(names):
            raise ConfigurationError(f"the model is given {len(args)} inputs", because=taken, remedy=remedy)
        for name in kwargs:
            if name not in names:
                raise ConfigurationError(f"the model has no input {name}", because=taken, remedy=remedy)
            if name in names[: len(args)]:
                because = "it is passed by position and by name"
                raise ConfigurationError(f"input {name} is given twice", because=because, remedy="pass it once")
        for expected in self.inputs[len(args) :]:
            if not expected.optional and expected.name not in kwargs:
                raise ConfigurationError(f"the model is not given its input {expected.name}", because=taken, remedy=remedy)

    def _check_kind(self, module: torch.nn.Module, expected: Input, given: Any) -> None:
        if not isinstance(given, torch.Tensor):
            array = type(given).__module__.partition(".")[0] == "numpy"
            kind = f"numpy.{type(given).__name__}" if array else type(given).__name__
            because = f"the model was {self.made} with a tensor, {expected.form}"
            self._refuse(expected, f"it is a {kind}", because, "convert it with torch.from_numpy(array)" if array else None)
        unusual = unusual_kind(given)
        if unusual is not None:
            self._refuse(expected, f"it is a {unusual[0]} tensor", f"{self._made_with(expected)}, a dense tensor with values", unusual[1])
        if given.dim() != len(expected.sizes):
            self._refuse(expected, f"it has {given.dim()} dimensions", self._made_with(expected))
        if given.dtype != expected.dtype:
            self._refuse(expected, f"its type is {given.dtype}", self._made_with(expected), f"convert it with .to({expected.dtype})")
        tensors = itertools.chain(module.parameters(), module.buffers())
        home = next(tensors, given).device
        if given.device != home and all(tensor.device != given.device for tensor in tensors):
            remedy = f"move one to the other: x.to({str(home)!r}), or model.to({str(given.device)!r})"
            self._refuse(expected, f"it is on {given.device}", f"the parameters and constants of the model are on {home}", remedy)

    def _made_with(self, expected: Input) -> str:
        return f"the model was {self.made} with {expected.form}"

    def _refuse(self, expected: Input, what: str, because: str, remedy: str | None = None) -> NoReturn:
        again = "prepare" if self.made == "prepared" else "trace"
        raise ConfigurationError(
            f"input {expected.name} does not fit the graph: {what}",
            because=because,
            remedy=remedy or f"pass an input of that form, or {again} the model again with an example of the new one",
        )


def input_check(module: fx.GraphModule) -> InputCheck:
    """Return the check of the inputs that the placeholders of a graph describe."""
    inputs = module.graph.find_nodes(op="placeholder")
    made = "prepared" if "target" in module.meta else "traced"
    return InputCheck(tuple(map(_described, inputs)), made, noted_limits(module.graph))


def _described(node: fx.Node) -> Input:
    fact, optional = graph.fact(node), bool(node.args)
    if not isinstance(fact, TensorFact):
        return Input(str(node.target), None, (), None, optional)
    sizes = tuple(None if isinstance(size, BatchDim) else size for size in fact.shape)
    return Input(str(node.target), fact.dtype, sizes, str(fact), optional)
