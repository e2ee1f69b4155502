"""Read and write the facts on nodes, change a graph in the few ways that passes do, and run it: as generated code, or node by node.

All static facts about a node are in `node.meta`. They are read and written through this module and `integer`,
so no other file names a key. Facts survive `copy.deepcopy` of a GraphModule.
"""

from __future__ import annotations

import copy
import functools
import keyword
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen, PythonCode

from fxquant.ir import loops
from fxquant.ir.integer import Constant, Operation, QParams, Reads, Reference, marks, noted, reads, writes  # noqa: F401  a pickled model names them here

# ---- Facts of a tensor before it is computed: its shape for every size that varies, and its dtype ---------------------
#
# Three points stand for all sizes of the inputs. At the first two points the batch differs, and the other sizes are the example's: what
# differs there grows with the batch. At the third point every other size is the largest that it may be: what differs there depends on
# these sizes, and sums along it have at most so many terms. Symbolic shapes of PyTorch would tell more, and take six times as long per
# operator.


# Both are even, so that `batch // 2` is exact, and neither is 1, so that nothing broadcasts by accident.
BATCH_SIZES = (4, 6)
POINTS = range(3)


@dataclass(frozen=True)
class BatchDim:
    """A size that varies: `coefficient * batch + offset` at the example's other sizes."""

    coefficient: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)
    largest: int | None = None  # its value at the third point, if it depends on other sizes than the batch

    @staticmethod
    def between(a: int, b: int, c: int | None = None) -> int | BatchDim:
        """Return the size that has these values at the three points: a plain int if they agree; `c` is None if it is `b`."""
        largest = None if c == b else c
        if a == b and largest is None:
            return int(a)
        coefficient = Fraction(b - a, BATCH_SIZES[1] - BATCH_SIZES[0])
        return BatchDim(coefficient, a - coefficient * BATCH_SIZES[0], largest)

    def at(self, batch: int) -> int:
        """Return the size at this batch size, and the example's other sizes; raises ValueError where it is not an integer."""
        value = self.coefficient * batch + self.offset
        if value.denominator != 1:
            raise ValueError(f"{self} is not an integer at batch size {batch}")
        return int(value)

    def __str__(self) -> str:
        numerator, denominator = self.coefficient.numerator, self.coefficient.denominator
        text = ("" if numerator == 1 else str(numerator)) + "B" + ("" if denominator == 1 else f"/{denominator}")
        text = text if self.offset == 0 else f"{text}{'+' if self.offset > 0 else ''}{self.offset}"
        return text if self.largest is None else f"{text if numerator else self.offset}≤{self.largest}"


Size = int | BatchDim


def largest_size(size: Size) -> int | None:
    """Return the largest value of a size; None for one that grows with the batch, which has no bound."""
    return size if isinstance(size, int) else None if size.coefficient else size.largest


def at_point(size: Size, point: int) -> int:
    """Return the value of a size at one of `POINTS`."""
    if isinstance(size, int):
        return size
    return size.largest if point == 2 and size.largest is not None else size.at(BATCH_SIZES[min(point, 1)])


@dataclass(frozen=True)
class TensorFact:
    """Shape and dtype of a tensor, for all sizes at once."""

    shape: tuple[Size, ...]
    dtype: torch.dtype

    @staticmethod
    def between(*seen: torch.Tensor) -> TensorFact:
        """Return the fact of a tensor seen at the points: two where only the batch varies, else three."""
        return TensorFact(tuple(BatchDim.between(*sizes) for sizes in zip(*(each.shape for each in seen), strict=True)), seen[0].dtype)

    def at(self, batch: int) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else size.at(batch) for size in self.shape)

    @property
    def batch_axis(self) -> int | None:
        """The first dimension whose size depends on the batch: of an input, the batch itself. None if no size does."""
        return next((axis for axis, size in enumerate(self.shape) if isinstance(size, BatchDim) and size.coefficient), None)

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{','.join(str(size) for size in self.shape)}]"


def on_meta(value: Any, point: int) -> Any:
    """Return a tensor without data for a TensorFact, and an integer for a BatchDim, at a point; any other value as it is."""
    if isinstance(value, TensorFact):
        return torch.empty([at_point(size, point) for size in value.shape], dtype=value.dtype, device="meta")
    return at_point(value, point) if isinstance(value, BatchDim) else value


def varies_beyond_batch(value: Any) -> bool:
    """Return whether a fact depends on other sizes than the batch."""
    sizes = value.shape if isinstance(value, TensorFact) else (value,)
    return any(isinstance(size, BatchDim) and size.largest is not None for size in sizes)


def inferred(node: fx.Node, run: Callable[[int], torch.Tensor]) -> TensorFact:
    """Return the fact of a node that `run` computes at a point, from operands with facts."""
    points = POINTS if any(varies_beyond_batch(fact(operand)) for operand in node.all_input_nodes) else POINTS[:2]
    return TensorFact.between(*map(run, points))


DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def unusual_kind(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return the kind of a tensor that is not a dense strided one, and the remedy as text; None for a dense tensor."""
    if tensor.is_nested:
        return "nested", "pad it to one size with .to_padded_tensor(0.0)"
    if getattr(tensor, "is_quantized", False):  # PyTorch is removing them
        return "quantized", "convert it with .dequantize()"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch."), "convert it with .to_dense()"
    if tensor.is_meta:
        return "meta", "pass a tensor on the device of the model"
    return None


def argument_name(node: fx.Node) -> str:
    """Return the user's name of the input that a placeholder stands for; as a rule, the placeholder's own."""
    return str(node.meta.get("argument", node.target))


def by_name(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """Return inputs in the graph's order as a dict of keyword arguments, by the names of its placeholders."""
    return dict(zip((str(node.target) for node in module.graph.find_nodes(op="placeholder")), inputs, strict=True))


# In the notes of an input: "2:height:1:512:32", dimension, name, smallest, largest and step, for each with a space between; the example's
# size comes last where its fact has another one, since the largest size is the example's.
SIZES = "sizes"
SIZE = re.compile(r"(\d+):(\w+):(\d+):(\d+):([1-9]\d*)(?::(\d+))?")


def sizes_of_input(node: fx.Node) -> dict[int, tuple[str, int, int, int]]:
    """Return name, smallest and largest value, and step of each size of an input that varies besides the batch, by dimension."""
    return {int(entry[1]): (entry[2], int(entry[3]), int(entry[4]), int(entry[5])) for entry in _noted_sizes(node)}


def _noted_sizes(node: fx.Node) -> Iterator[re.Match[str]]:
    return filter(None, map(SIZE.fullmatch, (noted(node, SIZES) or "").split()))


def example_of_input(node: fx.Node) -> torch.Tensor | None:
    """Return a tensor without data of an input's sizes in the example, in a batch of any size; None for an input that is not a tensor."""
    if not isinstance(fact(node), TensorFact):
        return None
    sizes = [at_point(size, 0) for size in shape_of(node)]
    for entry in _noted_sizes(node):
        sizes[int(entry[1])] = int(entry[6] or sizes[int(entry[1])])
    return torch.empty(sizes, dtype=fact(node).dtype, device="meta")


def set_matched_rules(node: fx.Node, *rules: Any) -> None:
    """Write the rules of the qconfig that cover the node, and each node fused into it."""
    node.meta["matched_rules"] = rules


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """Return the node's shape; raises TypeError if its value is not one tensor."""
    value = fact(node)
    if not isinstance(value, TensorFact):
        raise TypeError(f"%{node.name} is not a tensor of known shape")
    return value.shape


def reshape_sizes(shape: Sequence[Size], read: Callable[[int], Any]) -> list[Any]:
    """Return a shape for a reshape: numbers, -1 for the first size that varies, and what `read` returns for the dimensions of others."""
    first = next((dim for dim, size in enumerate(shape) if not isinstance(size, int)), None)
    return [size if isinstance(size, int) else -1 if dim == first else read(dim) for dim, size in enumerate(shape)]


def size_node(tensor: fx.Node, dim: int, before: fx.Node, made_by: str = "canonical.rewrite") -> int | fx.Node:
    """Return the size of a tensor's dimension: a number, or, where it varies, a node before `before` that reads it."""
    size, dim = shape_of(tensor)[dim], dim % len(shape_of(tensor))
    if isinstance(size, int):
        return size
    with tensor.graph.inserting_before(before):
        added: fx.Node = inherit(tensor.graph.call_method("size", (tensor, dim)), before, made_by)
    set_fact(added, size)
    return added


def product_node(sizes: Sequence[int | fx.Node], before: fx.Node, made_by: str = "canonical.rewrite") -> int | fx.Node:
    """Return the product of sizes: a number, or a node before `before`."""
    product: int | fx.Node = 1
    for size in sizes:
        if isinstance(product, int) and (product == 1 or isinstance(size, int)):
            product = size if product == 1 else product * size  # type: ignore[operator]
            continue
        with before.graph.inserting_before(before):
            added: fx.Node = inherit(before.graph.call_function(operator.mul, (product, size)), before, made_by)
        both = [fact(value) if isinstance(value, fx.Node) else value for value in (product, size)]
        set_fact(added, BatchDim.between(*(at_point(both[0], point) * at_point(both[1], point) for point in POINTS)))
        product = added
    return product


def reads_shape_only(node: fx.Node) -> bool:
    """Return whether the node asks a tensor for its size, and not for its values."""
    return node.op == "call_method" and node.target in ("size", "dim")


def reads_sizes(node: fx.Node) -> bool:
    """Return whether an argument of a primitive is a size that varies, which the primitive alone takes."""
    return not all(isinstance(fact(operand), TensorFact) for operand in node.all_input_nodes if operand.target is not loops.begin)


def target_name(node: fx.Node) -> str:
    """Return the name of the method, the function or the module that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def batch_norm_path(node: fx.Node) -> str:
    """Return the dotted path of the module in which the batch norm of this node was called; an empty string for the model itself."""
    return str(node.meta.get("batch_norm", module_path(node)))


@dataclass(frozen=True)
class Part:
    """The composite operator of the model, such as attention, that a node was expanded from, and the node's role in it."""

    composite: str  # the operator's name
    role: str  # the part's name
    inner: bool = True  # whether only other parts read its value; the last part's is the operator's result

    def __str__(self) -> str:
        return f"{self.composite}: {self.role}"


def is_inner_part(node: fx.Node) -> bool:
    """Return whether a node holds an inner tensor of a composite."""
    node_part = part(node)
    return node_part is not None and node_part.inner


def set_inner(node: fx.Node, inner: bool) -> None:
    """Write whether only other parts read the value of this part."""
    node.meta["part"] = replace(node.meta["part"], inner=inner)


def tie(node: fx.Node, name: str) -> None:
    """Add a name to the node's ties: all nodes with a common name share one scale."""
    node.meta["ties"] = (*ties(node), name)


# ---- what quantization knows about a node ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Annotation:
    """Whether a node becomes integer, and why."""

    dtype: str | None  # the name of its integer dtype, or None if it stays in float
    because: str  # the reason, for `explain`
    config: Any = None  # the QConfig that applies to it
    group: int | None = None  # the id of the group of tensors that share its scale, once scales are shared
    on_host: bool = False  # whether the host computes it by choice: it would break a limit of the target, or lose accuracy at an output


def is_on_host(node: fx.Node) -> bool:
    """Return whether the host computes the node by choice, although the target has integers for it."""
    spec = annotation(node)
    return "on_host" in node.meta if spec is None else spec.on_host


def refuse(node: fx.Node, because: str, *, python: bool = False, on_host: bool = False) -> None:
    """Write why the node stays in float; `python`: it calls the user's Python as it is; `on_host`: it has integers, too."""
    node.meta["refusal"] = because
    if on_host:
        node.meta["on_host"] = True
    node.meta.pop("python", None)
    if python:
        node.meta["python"] = True


WRAPPED, LEAF = "it is kept as Python, by fxq.wrap", "it is kept as one module, by the option leaf"


def is_parameter(node: fx.Node) -> bool:
    """Return whether the node is a parameter, buffer or constant, or is computed only from parameters, buffers and constants."""
    return node.op == "get_attr" or bool(node.meta.get("parameter"))


def computes_tensor(node: fx.Node) -> bool:
    """Return whether the node computes tensors: it is neither an input nor the output, a parameter or a number."""
    if node.op in ("placeholder", "output") or is_parameter(node):
        return False
    node_fact = fact(node)
    return isinstance(node_fact, TensorFact | list | tuple | dict) or (node_fact is None and refusal(node) is not None)  # kept as Python


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers, in training or always."""
    packet = getattr(torch.ops.aten, re.sub(r"(?<=dropout)\dd$", "", target_name(node)), None)  # aten has no operator dropout2d
    return packet is not None and any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())


def is_detached(node: fx.Node) -> bool:
    """Return whether the node is computed without gradients while the prepared model trains; False for a parameter, detached by a node."""
    return bool(node.meta.get("detached")) and not is_parameter(node)


def detach_arguments(node: fx.Node, *names: int | str) -> None:
    """Write the positions and the keywords of arguments that have no gradient; the node itself has one."""
    node.meta.pop("detached", None)
    node.meta["detached_arguments"] = names


def gradient_changes(node: fx.Node) -> dict[int, str]:
    """Return the paths of the rules that change the gradient of a node, or of the output's values by position; an empty path stops it."""
    return dict(node.meta.get("gradient_changes", {}))


def change_gradient(node: fx.Node, rule: str, position: int = 0) -> None:
    """Write the path of the rule that changes the gradient; an empty one stops it."""
    node.meta["gradient_changes"] = {**gradient_changes(node), position: rule}


def parameter_value(root: torch.nn.Module, node: fx.Node) -> Any:
    """Return the present value of a parameter, or of a node computed from parameters; without gradients, which some functions lack."""
    if node.op == "get_attr":
        return resolve(root, str(node.target))
    with torch.no_grad():
        return computed(root, node, lambda operand: parameter_value(root, operand))


def spell(node: fx.Node, *written: Any) -> None:
    """Add functions, or classes of modules, that the user called for this node."""
    node.meta["spelling"] = (*spelling(node), *written)


def absorb(node: fx.Node, other: fx.Node) -> None:
    """Record in `node` that `other`, a node before or after `node`, was fused into `node`.

    If `node` is detached and a later node is not, the arguments of `node` that do not come from operands of `other` are marked as detached.
    """
    parts = [node, other] if node < other else [other, node]
    if is_detached(node) and not is_detached(other) and parts[0] is node:
        brought = {operand for operand in other.all_input_nodes if operand is not node}
        own = [name for name, value in node.kwargs.items() if not brought.intersection(nodes_in(value))]
        detach_arguments(node, *range(len(node.args)), *own)
    set_matched_rules(node, *matched_rules(node), *matched_rules(other))
    node.meta["fused"] = tuple(name for part in parts for name in origins(part))
    if passed_on(other):
        node.meta["passed_on"] = (*passed_on(node), *passed_on(other))
    spell(node, *spelling(other))


def origins(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the nodes fused into `node`, including its own name, in the order of the graph in which they were fused."""
    names: tuple[str, ...] = node.meta.get("fused", ())
    return names if node.name in names else (node.name, *names)


def fused(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the nodes that were fused into `node`, without its own name."""
    return tuple(name for name in origins(node) if name != node.name)


def pass_on(operand: fx.Node, node: fx.Node) -> None:
    """Record that the readers of `node` read its operand from now on."""
    operand.meta["passed_on"] = (*passed_on(operand), *passed_on(node), (node.name, operand.name))


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in a nest of arguments, in order."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def model_meta(model: Any) -> dict[str, Any]:
    """Return the `meta` of a graph module; empty for any other module, and for subclasses whose constructors leave it out."""
    meta = getattr(model, "meta", None) if isinstance(model, fx.GraphModule) else None
    return meta if isinstance(meta, dict) else {}


def stage_of(model: Any) -> str | None:
    """Return the stage that the passes have brought a graph to; None for a module that they have not rewritten."""
    return model_meta(model).get("stage")


def is_deployed(model: Any) -> bool:
    """Return whether `model` is an integer model, with kernels or without."""
    return stage_of(model) in ("INTEGER", "FUSED")


# ---- facts under one key each: the function that reads it, and the one that writes it --------------------------------
fact: Reads[Any] = reads("fact", None)  # its `TensorFact`, or a nest of them, or a number; None if nothing is known
set_fact = writes("fact", object)
source = reads("source", "")  # the user's line: "model.py:41 in forward:  y = self.act(y)"
module_path = reads("module", "")  # the dotted path of the user's module that the node came from: "layer1.0.conv1"
made_by = reads("made_by", "trace")  # the pass that created the node
# The QConfigs (None: float) that are attached to the modules around the call, each after the path of its module, the nearest first.
attached_qconfigs: Reads[tuple[tuple[str, Any], ...]] = reads("qconfig", ())
attach_qconfigs = writes("qconfig", tuple)
matched_rules: Reads[tuple[Any, ...]] = reads("matched_rules", ())  # a `spec.MatchedRules` for the node, and for each fused into it
set_argument_name = writes("argument", str)  # what the user calls an input whose name is none in Python, or is one of generated code
set_batch_norm_path = writes("batch_norm", str)  # the dotted path of the module in which a batch norm was called that is fused into it
stated_demand: Reads[Any] = reads("demand", None)  # the demand (an `ops.Demand`) of the composite on the grid of this part of it
state_demand = writes("demand", object)
part: Reads[Part | None] = reads("part", None)  # the composite operator that the node is a part of; None if it is a whole operator
set_part = writes("part", Part)
ties: Reads[tuple[str, ...]] = reads("ties", ())  # nodes with one tie in common share one grid
annotation: Reads[Annotation | None] = reads("annotation", None)  # None before `specs.annotate`
annotate = writes("annotation", Annotation)
observed: Reads[tuple[float, float] | None] = reads("observed", None)  # beyond this interval its values make no difference to any reader
set_observed = writes("observed", tuple)
refusal: Reads[str | None] = reads("refusal", None)  # why the node could not be brought to canonical form
is_python = reads("python", False)  # whether the node calls the user's Python as it is
trains_only = reads("trains_only", False)  # whether it is there for training alone: the integer model goes without it
mark_training = marks("trains_only")
mark_parameter = marks("parameter")  # computed from parameters alone
detach = marks("detached")  # computed without gradients while the prepared model trains
detached_arguments: Reads[tuple[int | str, ...]] = reads("detached_arguments", ())  # positions and keywords of arguments without gradient
# The path of the user's module that draws noise in train mode: on the node that calls it, or on the layer before it.
noise: Reads[str | None] = reads("noise", None)
set_noise = writes("noise", str)
dropped_in_training = reads("dropped_in_training", 0.0)  # the probability with which an attention drops weights in train mode
drop_in_training = writes("dropped_in_training", float)
spelling: Reads[tuple[Any, ...]] = reads("spelling", ())  # the functions, or classes of modules, that the user called for the node
passed_on: Reads[tuple[tuple[str, str], ...]] = reads("passed_on", ())  # a removed node and the operand that its readers read instead
unfused: Reads[str | None] = reads("unfused", None)  # why the node was not fused into its operand
set_unfused = writes("unfused", str)


def inherit(node: fx.Node, parent: fx.Node, made_by: str) -> fx.Node:
    """Give a new node the source line, the module, the attached QConfigs and the matched_rules of the node it was made for.

    A node made for a node without gradients has none either.
    """
    for key in ("source", "module", "qconfig", "matched_rules", "detached"):
        if key in parent.meta:
            node.meta[key] = parent.meta[key]
    node.meta["made_by"] = made_by
    return node


def resolve(root: torch.nn.Module, path: str) -> Any:
    """Return the module, parameter or buffer at a dotted path, or else the attribute. Raises AttributeError if there is none."""
    value: Any = root
    for part in path.split("."):
        for kind in ("_modules", "_parameters", "_buffers") if isinstance(value, nn.Module) else ():
            member = value.__dict__[kind].get(part)
            if member is not None:
                value = member
                break
        else:
            value = getattr(value, part)
    return value


def attach(root: torch.nn.Module, path: str, value: torch.nn.Module | torch.Tensor) -> None:
    """Register a module, or a buffer, at a dotted path, making plain modules on the way.

    The path may be the name of an attribute of GraphModule: a user's module may be called "graph".
    """
    *parents, name = path.split(".")
    for part in parents:
        child = root._modules.get(part)
        if child is None:
            child = root._modules[part] = torch.nn.Module()
        root = child
    if isinstance(value, torch.nn.Module):
        root._modules[name] = value
    elif isinstance(value, torch.nn.Parameter):
        root._parameters[name] = value
    else:
        root._buffers[name] = value


def describe(node: fx.Node, fact: Any, source: str, module: str, made_by: str = "trace") -> None:
    """Set a new node's fact, source line, module path and the pass that made it."""
    meta = node.meta
    meta["fact"], meta["source"], meta["module"], meta["made_by"] = fact, source, module, made_by


# ---- the Python that runs a graph ------------------------------------------------------------------------------------
#
# A user's model may have names that are not Python names, or are GraphModule's own.
_REGISTERED = "_fxquant_registered"  # what reads such a name, in the generated code


@functools.cache
def own_names() -> frozenset[str]:
    """Return the names of a GraphModule's attributes, which hide modules and tensors registered under the same names."""
    return frozenset((*dir(fx.GraphModule), *vars(fx.GraphModule(nn.Module(), fx.Graph()))))


@functools.cache
def _is_plain(path: str) -> bool:
    """Return whether the expression `self.{path}` reads the module or tensor registered at the path."""
    first, *others = path.split(".")
    return not (
        first in own_names()
        or any(hasattr(nn.Module, part) for part in others)
        or any(keyword.iskeyword(part) or not part.replace("_", "a").isalnum() for part in (first, *others))
    )


class Code(CodeGen):
    """PyTorch's generator of code, with two things it does not always get right.

    Paths that are not plain expressions are looked up where modules and tensors are registered, and named tuples that are returned
    have their classes among the globals.
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[type, str] = {}

    def generate_output(self, output_args: Any, **_: Any) -> str:
        return f"return {self._written(output_args)}"

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), *((name, value) for value, name in self._classes.items())]

    def _written(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self._written, value)) + "]"
        if not isinstance(value, tuple):
            return repr(value)
        items = "(" + "".join(f"{self._written(item)}, " for item in value) + ")"
        if not hasattr(value, "_fields"):
            return items
        return self._classes.setdefault(type(value), f"{type(value).__name__}__{len(self._classes)}") + items

    def _gen_python_code(self, nodes: Any, root_module: str, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, root_module, *args, **kwargs)
        code.src = _with_loops(code.src, nodes)
        if f"    {_AT_ONCE}(" in code.src:
            code.globals[_AT_ONCE] = loops.at_once
        for node in nodes:
            if node.op in ("call_module", "get_attr") and not _is_plain(str(node.target)):
                expression = fx.graph._format_target(root_module, str(node.target))
                written = f"    {node!r} = {expression}".replace("\n", "\n    ")  # PyTorch indents lines
                if f"\n{written}" not in code.src:
                    raise AssertionError(f"%{node.name} is not in the generated code as {written.strip()}")
                code.src = code.src.replace(f"\n{written}", f"\n    {node!r} = {_REGISTERED}({root_module}, {str(node.target)!r})", 1)
                code.globals[_REGISTERED] = resolve
        return code


_AT_ONCE = "_fxquant_at_once"
_FREED = re.compile(r";  \w+ = (?:\w+ = )*None")  # values whose last reader has run


def _with_loops(source: str, nodes: Iterable[fx.Node]) -> str:
    """Return generated code with a `while` around the lines of each loop's body, and in the body without lines that free tensors."""
    starts, written, within = {f"{node!r}": node for node in nodes if node.target is loops.begin}, list[str](), ""
    if not starts:
        return source
    bodies = {name: loops.body(start) for name, start in starts.items()}
    ends = {f"{body[-1]!r}": name for name, body in bodies.items()}
    for line in source.split("\n"):
        name = line.strip().split(" ", 1)[0]
        written.append("    " + _FREED.sub("", line) if within else line)
        if name in starts:
            within = name
            values = ", ".join(f"{each.name!r}: {each!r}" for each in loops.reads(starts[name]) if not is_parameter(each))
            if any(node.op == "call_module" for node in bodies[name]):
                written.append(f"    {_AT_ONCE}(self, {starts[name].name!r}, {name}, {{{values}}})")
            written.append(f"    while {name}.more():")
        elif ends.get(name) == within:
            within = ""
    return "\n".join(written)


# ---- running a graph node by node, with the arguments that its generated code would give each call -------------------
def computed(model: nn.Module, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Call a node's function, method or module with the values of the nodes it reads; return the result."""
    args, kwargs = arguments_of(node, value)
    if node.op == "call_method":
        first, *others = args
        return getattr(first, str(node.target))(*others, **kwargs)
    function: Any = resolve(model, str(node.target)) if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def arguments_of(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node with the values of the nodes it reads, in lists and dicts of this call's own.

    The arguments of a node itself are immutable, and a user's function may write into its arguments.
    """
    return own(node.args, value), own(node.kwargs, value)


def own(argument: Any, value: Callable[[Any], Any], leaf: type | tuple[type, ...] = fx.Node) -> Any:
    """Copy a nested argument into new plain containers, with `value` applied to each node (or instance of `leaf`)."""
    if isinstance(argument, leaf):
        return value(argument)
    if isinstance(argument, dict):
        return {key: own(item, value, leaf) for key, item in argument.items()}
    if isinstance(argument, list):
        return [own(item, value, leaf) for item in argument]
    if isinstance(argument, tuple):
        items = [own(item, value, leaf) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, slice):
        return slice(*(own(end, value, leaf) for end in (argument.start, argument.stop, argument.step)))
    return argument


class Interpreter(fx.Interpreter):
    """Runs a graph as its generated code does. An error is the model's own, without PyTorch's notes."""

    def __init__(self, model: nn.Module, graph: fx.Graph | None = None) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False

    def run(self, *args: Any, **_: Any) -> Any:
        """Run the graph on inputs; `running` says in which order."""
        self.env, self.args_iter = {}, iter(args)
        looping = bool(loops.bodies(self.graph))
        for node in loops.running(self.graph.nodes, self.env.__getitem__):
            self.env[node] = self.run_node(node)
            if node.op == "output":
                return self.env[node]
            for gone in () if looping else self.user_to_last_uses.get(node, ()):
                del self.env[gone]
        raise AssertionError("a graph has an output")

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments_of(n, self.env.__getitem__)

    def fetch_attr(self, target: str) -> Any:
        return resolve(self.module, target)


# ---- copies of module trees: tensors of their own, everything once ---------------------------------------------------
def copy_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module tree: modules, tensors and containers are copied, other objects are shared. The copy's root has no hooks.

    A tensor or module that is used in several places is one tensor or module in the copy as well.
    """
    copied: torch.nn.Module = _Copier()(module)
    return copied


def own_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return lasting copies of modules and tensors, made as `copy_parameters` makes them, with modules in eval mode.

    Parameters keep `requires_grad`: PyTorch chooses kernels by it, which round differently, also where no gradients are recorded.
    """
    copies: dict[str, Any] = _Copier()(dict(values))
    for copied in copies.values():
        if isinstance(copied, torch.nn.Module):
            copied.eval()
    return copies


_SHARED = frozenset((type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device))  # most of what a module holds


class _Copier:
    """Copies modules, tensors and the containers that hold them, each once; other objects are shared."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if type(value) in _SHARED:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.Tensor):
            data = value.detach().clone()
            return self._keep(value, torch.nn.Parameter(data, value.requires_grad) if isinstance(value, torch.nn.Parameter) else data)
        if type(value) in (dict, OrderedDict):
            copied = self._keep(value, type(value)())
            copied.update((key, self(item)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple, set):
            return self._keep(value, type(value)(self(item) for item in value))
        return value

    def _keep(self, value: Any, copied: Any) -> Any:
        self._known[id(value)] = copied
        return copied

    def _module(self, module: torch.nn.Module) -> Any:
        if isinstance(module, torch.jit.ScriptModule):  # its tensors are not in its dictionary
            return self._keep(module, copy.deepcopy(module))
        root = isinstance(module, fx.GraphModule)
        copied: torch.nn.Module = self._keep(module, torch.nn.Module() if root else copy.copy(module))
        parts = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set") if root else module.__dict__
        for name in list(parts):
            value = module.__dict__[name]
            if type(value) not in _SHARED or root:  # what is shared is in the copy already, unless that is a new module
                no_hooks = type(value) is OrderedDict and not value  # of most modules and most kinds of hooks
                copied.__dict__[name] = OrderedDict() if no_hooks else self(value)
        if isinstance(copied, torch.nn.RNNBase):  # holds its parameters a second time, in lists, one of them of weak references
            copied._init_flat_weights()
        return copied
