"""Run an integer model with its kernels. The results of a program have the bits and the strides of the primitives' results."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.graph import BatchDim, Interpreter, fact, is_python, own, reads_sizes
from fxquant.ir.integer import kernel
from fxquant.ir.loops import bodies
from fxquant.ir.model import autocast_off
from fxquant.kernels.admission import prove
from fxquant.kernels.constants import Constants
from fxquant.kernels.kernel import Disagrees, Kernel, Match, NotApplicable, Site
from fxquant.kernels.patterns import forms_of
from fxquant.kernels.program import Choice, Chosen, Layout, Program
from fxquant.primitives import PRIMITIVES
from fxquant.support import disagreed, logger
from fxquant.support.progress import progress

PROVED = 2  # images that an implementation is compared with the primitives on, at most
PROOFS: list[Callable[[], Any]] = []  # of which the first returns the proofs of earlier processes: `known`, `key` and `add`; or None
MOST_PROGRAMS = 16  # sizes and strides of inputs that are remembered; those used longest ago are forgotten first


class Runner:
    """The runner of an integer model; a copy of the model gets a new one, without programs.

    source  returns the available kernels
    fix     returns a model with the sizes of inputs as numbers, and its kernels found: they take no constants that depend on sizes

    Both are functions with names, so that only these are pickled.
    """

    def __init__(self, source: Callable[[], tuple[Kernel, ...]], fix: Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]) -> None:
        self.source, self.fix = source, fix
        self.lock = threading.RLock()
        self.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return Runner, (self.source, self.fix)

    def reset(self) -> None:
        """Forget everything that was made for the graph and its constants."""
        with self.lock:
            self.made_for: tuple[Any, ...] | None = None
            self.programs: OrderedDict[Any, Program | Mapping[fx.Node, Layout]] = OrderedDict()  # the latter before it is made
            self.chosen: OrderedDict[Any, Chosen] = OrderedDict()
            self.constants: Constants | None = None

    def __call__(self, model: fx.GraphModule, reference: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Run the model on inputs that have passed its checks, and return its output."""
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
            if self._is_of(model) and key not in self.programs:
                self._keep(key, recorder.layouts)
        return result

    def program(self, model: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        key = _key(inputs)
        with self.lock:
            self._follow(model, everything=True)
            if key not in self.programs:
                recorder = _Recorder(model)
                recorder.run(*inputs)
                self._keep(key, recorder.layouts)
            program = self._known(model, key)
        assert program is not None
        return program

    def _known(self, model: fx.GraphModule, key: Any) -> Program | None:
        """Return the program for inputs that were seen before, and make it at the first request; None for other inputs."""
        entry = self.programs.get(key)
        if entry is None:
            return None
        if not isinstance(entry, Program):
            with torch.inference_mode(False), torch.no_grad(), autocast_off():
                nodes = model.graph.nodes
                if any(map(depends_on_sizes, nodes)) and not bodies(model.graph) and not any(map(is_python, nodes)):
                    inputs = [each and torch.empty_strided(*each[:2], dtype=each[2]).zero_() for each in key]
                    recorder = _Recorder(self.fix(model, inputs))
                    recorder.run(*inputs)
                    entry = self._make(recorder.module, recorder.layouts)  # type: ignore[arg-type]
                else:
                    entry = self._make(model, entry)
        self._keep(key, entry)
        return entry

    def _keep(self, key: Any, entry: Program | Mapping[fx.Node, Layout]) -> None:
        self.programs[key] = entry
        self.programs.move_to_end(key)
        while len(self.programs) > MOST_PROGRAMS:
            self.programs.popitem(last=False)

    def follow(self, model: fx.GraphModule) -> None:
        """Compare every constant of the model; forget everything that was made for other constants."""
        with self.lock:
            if self.made_for is not None:
                self._follow(model, everything=True)

    def _follow(self, model: fx.GraphModule, everything: bool = False) -> None:
        current = self._is_of(model)
        if current and self.constants is not None and self.constants.changed(everything):
            logger.warning(
                "a constant of the integer model was written to where PyTorch does not count it (.data, NumPy, inference mode): "
                "its kernels are built again. Write to it under torch.no_grad(), which is seen at once"
            )
            current = False
        if not current:
            self.reset()
            self.made_for, self.constants = (id(model), id(model.graph)), Constants(model)

    def choices(self, model: fx.GraphModule, prove: bool = False) -> dict[fx.Node, Choice]:
        """Return the `Choice` of kernel by node, for the input sizes of the last run; empty if no kernels were proved yet.

        With `prove` kernels are proved now, if the model has run.
        """
        with self.lock:
            keys = list(reversed(self.programs)) if self._is_of(model) else []
            proved = [key for key in keys if prove or isinstance(self.programs[key], Program)]
            program = self._known(model, proved[0]) if proved else None
        if program is None:
            return {}
        choices, alone = program.computed()
        covered = {each for node, choice in choices.items() for each in program.chosen[node].match.covers if choice.implementation is None}
        for node in alone:
            if node not in covered:
                reasons = (kernel.match(node) for kernel in self.source())
                choices[node] = Choice("", None, {"": next((because for because in reasons if isinstance(because, str)), "")})
        return choices

    def _is_of(self, model: fx.GraphModule) -> bool:
        return self.made_for == (id(model), id(model.graph)) and self.constants is not None and self.constants.same()

    def _make(self, model: fx.GraphModule, layouts: Mapping[fx.Node, Layout]) -> Program:
        if self.constants is not None:
            self.constants.look()
        sizes = {node: layout[0] for node, layout in layouts.items()}
        forms = forms_of(model)
        chosen: dict[fx.Node, Chosen] = {}
        loops = {node for nodes in bodies(model.graph).values() for node in nodes}
        # In a loop that runs step by step: kernels that allocate their results, floats, at each step.
        runs = {node for node in layouts if node not in loops or layouts[node][2].is_floating_point}
        fused = [(node, entry[0]) for node in model.graph.nodes if (entry := kernel(node)) is not None and node in runs]
        begun, proofs = time.monotonic(), next((of() for of in PROOFS), None)
        before = 0 if proofs is None else len(proofs.known)
        within: set[fx.Node] = set()  # what kernels that were proved compute: those of the most nodes come first
        largest = sorted(fused, key=lambda each: -len(kernel(each[0])[1]))  # type: ignore[index]
        for node, name in progress(largest, len(fused), "proving kernels"):
            if node in within:
                continue
            candidate = next((each for each in self.source() if each.name == name), None)
            matched = None if candidate is None else candidate.match(node)
            match = matched if isinstance(matched, Match) else None
            key = (model.graph, node.name, _proved_for(sizes, node, () if match is None else match.reads))
            if key not in self.chosen:
                if candidate is None or match is None:
                    refused = {"": "its pattern is not there any more"}
                    self.chosen[key] = Chosen(Match(node, (node,), ()), Choice(name, None, refused))
                else:
                    self.chosen[key] = _choose(candidate, Site(model, match, _few(candidate, match, sizes), forms), proofs)
                while len(self.chosen) > MOST_PROGRAMS * len(fused):
                    self.chosen.popitem(last=False)
            chosen[node] = self.chosen[key]
            if chosen[node].built is not None:
                within.update(chosen[node].match.covers)
        if proofs is not None:
            took = time.monotonic() - begun
            logger.info(
                "kernels: %d, of which %d were proved on this machine for the first time, %.2f s",
                len(chosen),
                len(proofs.known) - before,
                took,
            )
        return Program(model, layouts, forms, {node: chosen[node] for node, _ in fused if node in chosen})


def depends_on_sizes(node: fx.Node) -> bool:
    """Return whether a primitive has constants instead, where sizes are numbers."""
    record = PRIMITIVES.get(node.target)  # type: ignore[arg-type]
    return record is not None and (record.fixed is not None or reads_sizes(node))


def _few(kernel: Kernel, match: Match, sizes: Mapping[fx.Node, tuple[int, ...]]) -> dict[fx.Node, tuple[int, ...]]:
    """Return the sizes of what a kernel reads and writes, with `PROVED` images at most in tensors whose first dimension is the batch."""
    nodes = (*match.reads, match.root)
    varying = {node for node in nodes if sizes[node] and isinstance(fact(node).shape[0], BatchDim)}
    same = {node for node in nodes if sizes[node][:1] == sizes[match.root][:1]}
    if not varying and not kernel.implementations[0].strided and len(sizes[match.root]) > 1:
        varying = same  # a batch of a fixed size; constants of strided implementations may have that size, too, and a vector has no batch
    others = any(isinstance(size, BatchDim) for node in nodes for size in fact(node).shape[1:])  # a batch in another dimension
    if others or any(node not in varying and len(sizes[node]) == len(sizes[match.root]) for node in same):
        varying = set()
    return {node: (min(sizes[node][0], PROVED), *sizes[node][1:]) if node in varying else sizes[node] for node in nodes}


def _choose(kernel: Kernel, site: Site, proofs: Any = None) -> Chosen:
    """Return the first implementation that is proved at this site, now or before; the primitives if none is."""
    refused: dict[str, str] = {}
    disagrees: list[str] = []
    for implementation in kernel.implementations:
        if any(0 in site.sizes[read] for read in site.match.reads):
            refused[implementation.name] = "its operand is empty"
            continue
        key = None if proofs is None else proofs.key(site, implementation)
        is_proved = key is not None and key in proofs.known
        try:
            built = implementation.build(replace(site, proved=is_proved))
            if not is_proved:
                prove(site, implementation, built)
                if proofs is not None:
                    proofs.add(key)
        except NotApplicable as error:
            refused[implementation.name] = str(error)
        except Disagrees as error:
            refused[implementation.name] = str(error)
            disagrees.append(implementation.name)
            instead = "another implementation or its primitives run instead"
            disagreed(site.model, f"the kernel '{implementation.name}'", [f"%{site.match.root.name}"], str(error), instead)
        else:
            return Chosen(site.match, Choice(kernel.name, implementation.name, refused, tuple(disagrees)), implementation, built)
    return Chosen(site.match, Choice(kernel.name, None, refused, tuple(disagrees)))


def _key(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(input.shape), input.stride(), input.dtype) if isinstance(input, Tensor) else None for input in inputs)


def _proved_for(sizes: Mapping[fx.Node, tuple[int, ...]], root: fx.Node, reads: Sequence[fx.Node]) -> Any:
    """Return the key of a proof: the sizes around a node but for the number of images, and which tensors have that number in common."""
    shapes = [sizes[node] for node in (root, *reads) if node in sizes]
    return tuple((size[1:], size[:1] == shapes[0][:1], 0 in size) for size in shapes)


def runs_here(inputs: Sequence[Any]) -> bool:
    """Return whether kernels can take these inputs: plain tensors with values, on the CPU, which nothing traces or transforms."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(input) in (Tensor, torch.nn.Parameter) and input.device.type == "cpu" for input in inputs if input is not None)


class _Recorder(Interpreter):
    """Runs the primitives, and records sizes, strides and dtypes."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.layouts: dict[fx.Node, Layout] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.layouts[n] = tuple(result.shape), result.stride(), result.dtype
        return result

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        assert isinstance(self.module, fx.GraphModule)
        (node,) = self.module.graph.find_nodes(op="output")
        return own(node.args[0], self.env.__getitem__)
