"""A traversal of an integer graph that emits the body of a C function: memory for every tensor, and a call for every primitive."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.analysis.recording import returned
from fxquant.errors import ExportError
from fxquant.ir.graph import BatchDim, TensorFact, annotation, argument_name, fact, resolve, source
from fxquant.prepared.copied import Step, steps_of
from fxquant.primitives import PRIMITIVES
from fxquant.support import declaring

# ---- The C functions of `functions/`: one template each, instantiated for the element types that it is called with ----
#
# A section of a file begins with `/// name: X Y`: the function's name, and the placeholders in it for element types. A section without
# a colon is a helper that has no placeholders. Functions that differ only in their comment and expression share a template; both are
# inserted on instantiation.
FOLDER = Path(__file__).parent / "functions"
FILES = ("values.c", "sums.c", "places.c")
C_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t",
    torch.int32: "int32_t", torch.int64: "int64_t",
    torch.bool: "uint8_t",  # 0 or 1
}  # fmt: skip
_SHORT = {
    "float": "f32", "double": "f64", "uint8_t": "u8", "int8_t": "i8", "int16_t": "i16", "int32_t": "i32", "int64_t": "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Template:
    """The text of a function, and its placeholders for element types."""

    text: str
    types: tuple[str, ...]


def _sections(file: str) -> dict[str, Template]:
    sections = {}
    for section in re.split(r"^/// ", (FOLDER / file).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, _, text = section.partition("\n")
        name, _, types = head.partition(":")
        sections[name.strip()] = Template(text.strip(), tuple(types.split()))
    return sections


@functools.cache
def templates() -> Mapping[str, Template]:
    """Return the functions by name."""
    return {name: template for file in FILES for name, template in _sections(file).items()}


@functools.cache
def helpers() -> Mapping[str, Template]:
    """Return the helpers that functions call, ordered so that each follows the helpers that it calls itself."""
    return _sections("helpers.c")


class Functions:
    """The functions that a program has used so far."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def name(self, template: str, name: str, dtypes: Sequence[torch.dtype], replaced: Mapping[str, str] | None = None) -> str:
        """Return the name of a template's function for these element types, and instantiate it on first use."""
        definition = templates()[template]
        types = [C_TYPES[dtype] for dtype in dtypes]
        full_name = "_".join([name, *(_SHORT[kind] for kind in types)])
        if full_name not in self._made:
            words = {template: full_name, **dict(zip(definition.types, types, strict=True)), **(replaced or {})}
            self._made[full_name] = re.sub(r"\b[A-Za-z_]+\b", lambda word: words.get(word[0], word[0]), definition.text)
        return full_name

    def text(self) -> str:
        """Return the text of all functions, preceded by the helpers that they call."""
        bodies = "\n\n".join(self._made.values())
        needed: list[str] = []
        for name, helper in reversed(list(helpers().items())):
            if re.search(rf"\b{name}\b", "\n".join([bodies, *needed])):
                needed.append(helper.text)
        return "\n\n".join([*reversed(needed), bodies])


WIDTH = 140  # of a line of numbers
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """A contiguous tensor of the program: an expression for the address of its first element."""

    text: str
    dtype: torch.dtype
    shape: Shape
    constant: Tensor | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def empty(self) -> Tensor:
        """Return a meta tensor of this shape and dtype, from which the shape of a result is inferred."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Window(NamedTuple):
    """A `struct window`: sizes for rows, depth, height and width."""

    size: list[int]
    result: list[int]
    kernel: list[int]
    stride: list[int]
    before: list[int]
    dilation: list[int]


@dataclass
class Pool:
    """Memory for the tensors of one C type, which is reused once a tensor is no longer read."""

    taken: dict[str, tuple[int, int]] = field(default_factory=dict)  # first element and number, by node
    size: int = 0

    def take(self, name: str, count: int) -> int:
        """Return the first element of the lowest free range, and reserve it."""
        at = 0
        for first, length in sorted(self.taken.values()):
            if first - at >= count:
                break
            at = max(at, first + length)
        self.taken[name] = at, count
        self.size = max(self.size, at + count)
        return at


class Call:
    """The context of a primitive's C form: the result's facts, and methods that emit the calls that compute it."""

    def __init__(self, program: "Program", node: fx.Node | Step, name: str, result: TensorFact) -> None:
        self._program, self.node, self.name = program, node, name  # of the primitive
        self.shape, self.dtype = result.at(program.batch), result.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def result(self) -> Value:
        """Return memory for the result."""
        return self._program.store(self.node, self.dtype, self.shape)

    def constant(self, value: Tensor) -> Value:
        return self._program.constant(value)

    def emit(
        self, name: str, types: Sequence[torch.dtype], *arguments: object, template: str | None = None,
        replaced: Mapping[str, str] | None = None, fails: bool = False, into: Value | None = None,
    ) -> None:  # fmt: skip
        """Append a call of a function for these element types, which writes the result, or a part of its memory, `into`.

        With `fails`, the program ends if the function returns other than 0.
        """
        arguments = (*arguments, into or self.result())
        function = self._program.functions.name(template or name, name, types, replaced)
        line = f"{function}({', '.join(map(self._program.argument, arguments))})"
        self._program.lines.append(f"if ({line} != 0) return 1;" if fails else f"{line};")


def number(value: float, dtype: torch.dtype = torch.float32) -> str:
    """Return a float value as an exact C literal; NaN and infinity are written with the names of math.h."""
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return float(value).hex() + ("f" if dtype == torch.float32 else "")


Form = Callable[..., Value | None]
FORMS: dict[Any, Form] = {}
form = declaring(FORMS)
"""Declare the decorated function the C form of primitives: it takes a `Call` and the arguments of the primitive, tensors as `Value`s.

It emits calls, or returns a value that is the result without any call."""


class Program:
    """The program of an integer model at one batch size. Raises ExportError, before anything is written, if something has no C form."""

    def __init__(self, integer: fx.GraphModule, batch: int) -> None:
        self.integer, self.batch = integer, batch
        self.functions = Functions()
        self.lines: list[str] = []
        self.sizes: dict[str, str] = {}  # arrays of sizes and strides by name
        self.windows: dict[str, str] = {}  # names of windows by their content
        self.pools: dict[str, Pool] = {}
        self.constants: dict[tuple[torch.dtype, Shape, bytes], Value] = {}
        self.values: dict[fx.Node | Step, Any] = {}
        self.inputs: list[Value] = []
        self.outputs = [self._output(index, node) for index, node in enumerate(returned(integer))]
        self._results = {node: index for index, node in enumerate(returned(integer)) if [user.op for user in node.users] == ["output"]}
        released = self._released()
        for index, node in enumerate(integer.graph.nodes):
            self._walk(node)
            for finished in released.get(index, ()):
                for pool in self.pools.values():
                    pool.taken.pop(finished.name, None)
        for node, output in zip(returned(integer), self.outputs, strict=True):
            value = self.values[node]
            value = self.constant(value) if isinstance(value, Tensor) else value
            if value.text != output.text:
                function = self.functions.name("moved", "moved", [output.dtype])
                self.lines.append(f"\n{function}({', '.join(map(self.argument, (output.count, 1, [output.count], [1], value, output)))});")
        words = set(re.findall(r"\w+", "\n".join(self.lines)))
        self.arrays = [value for value in self.constants.values() if value.text in words]  # the other constants are literals in the calls

    def fact_of(self, node: fx.Node) -> TensorFact:
        node_fact = fact(node)
        if node.op == "get_attr":
            value = resolve(self.integer, str(node.target))
            node_fact = TensorFact(tuple(value.shape), value.dtype)
        if not isinstance(node_fact, TensorFact):
            because = "every array of a C program has its size when it is compiled"
            remedy = "export it with fxq.export_onnx"
            raise ExportError("the value computed here is not a tensor of known shape", node=node, because=because, remedy=remedy)
        if node_fact.dtype not in C_TYPES:
            what = f"a tensor of {str(node_fact.dtype).removeprefix('torch.')} cannot be written in C"
            remedy = "convert it to float32 in forward, or before the model is called"
            raise ExportError(what, node=node, because="C99 has no such type", remedy=remedy)
        return node_fact

    def _released(self) -> dict[int, list[fx.Node]]:
        """Return, for each position in the graph, the nodes whose memory is no longer read after it."""
        order = {node: index for index, node in enumerate(self.integer.graph.nodes)}
        last = {node: max((order[user] for user in node.users), default=index) for node, index in order.items()}
        for node in reversed(order):
            copied = node.op == "call_function" and node.target not in PRIMITIVES  # may be views as well
            for operand in node.all_input_nodes if copied else node.args[:1] if node.target in VIEWS else ():
                if isinstance(operand, fx.Node):
                    last[operand] = max(last[operand], last[node])
        released: dict[int, list[fx.Node]] = {}
        for node, index in last.items():
            released.setdefault(index, []).append(node)
        return released

    def _walk(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._input(node)
        elif node.op == "get_attr":
            self.fact_of(node)
            self.values[node] = resolve(self.integer, str(node.target)).detach().cpu()
        elif node.op == "call_function" and node.target in PRIMITIVES:
            self._primitive(node)
        elif node.op != "output" and not self._copies(node):
            self.values[node] = self._number(node)

    def _input(self, node: fx.Node) -> None:
        input_fact = self.fact_of(node)
        name = f"input_{identifier(argument_name(node))}"
        while name in {value.text for value in self.inputs}:
            name += "_"
        self.values[node] = Value(name, input_fact.dtype, input_fact.at(self.batch))
        self.inputs.append(self.values[node])

    def _output(self, index: int, node: fx.Node) -> Value:
        output_fact = self.fact_of(node)
        return Value(f"output_{index}", output_fact.dtype, output_fact.at(self.batch))

    def _copies(self, node: fx.Node) -> bool:
        """Emit a float operator that only copies elements; return whether the node is one."""
        constants = {each: tensor for each, tensor in self.values.items() if isinstance(tensor, Tensor)}
        steps = steps_of(node, constants.get)
        if steps is None or any(step.primitive not in FORMS for step in steps.calls):
            return False
        self.lines.append(f"\n/* {node.name}: {comment(source(node))} */" if source(node) else f"\n/* {node.name} */")
        by_step: dict[Step, Value] = {}

        def argument(value: Any) -> Any:
            value = by_step[value] if isinstance(value, Step) else self.operand(value) if isinstance(value, fx.Node) else value
            return self.constant(value) if isinstance(value, Tensor) else value

        for step in steps.calls:
            arguments = fx.node.map_aggregate(step.arguments, argument)
            shown = fx.node.map_aggregate(arguments, lambda each: each.empty() if isinstance(each, Value) else each)
            result = step.primitive(*shown)
            part = step if step is not steps.result else node
            call = Call(self, part, step.primitive.__name__, TensorFact(tuple(result.shape), result.dtype))
            by_step[step] = FORMS[step.primitive](call, *arguments) or self.values[part]
        self.values[node] = argument(steps.result)
        return True

    def _number(self, node: fx.Node) -> Any:
        """Return a number that the graph computes from sizes. Raises ExportError if it is computed in float."""
        node_fact = fact(node)
        if isinstance(node_fact, TensorFact) or node_fact is None:
            spec = annotation(node)
            because = f"{spec.because if spec is not None else 'this is not an integer operator'}; C programs compute in integers only"
            remedy = "take it out of the model, to the host's side, or export with fxq.export_onnx; fxq.explain lists all of them"
            raise ExportError("the model has operators in float, which are not written in C", node=node, because=because, remedy=remedy)
        return fx.node.map_aggregate(node_fact, lambda value: value.at(self.batch) if isinstance(value, BatchDim) else value)

    def _primitive(self, node: fx.Node) -> None:
        record = PRIMITIVES[node.target]  # type: ignore[index]
        written = FORMS.get(record.function)
        if written is None:
            because = f"the C program knows {len(FORMS)} of the {len(PRIMITIVES)} primitives"
            remedy = "export it with fxq.export_onnx"
            raise ExportError(f"the primitive {record.name} has no C form yet", node=node, because=because, remedy=remedy)
        arguments = fx.node.map_aggregate(node.args, lambda value: self.operand(value) if isinstance(value, fx.Node) else value)
        self.lines.append(f"\n/* {node.name}: {comment(source(node))} */" if source(node) else f"\n/* {node.name} */")
        before = len(self.lines)
        result = written(Call(self, node, record.name, self.fact_of(node)), *arguments, **node.kwargs)
        if result is not None:
            self.values[node] = result
            if len(self.lines) == before:
                self.lines.pop()

    def operand(self, node: fx.Node) -> Any:
        """Return the value of an argument: a `Value`, or a number."""
        value = self.values[node]
        return self.constant(value) if isinstance(value, Tensor) else value

    def store(self, node: fx.Node | Step, dtype: torch.dtype, shape: Shape) -> Value:
        """Return memory for the result of a node: the caller's, if the result is an output that no node reads."""
        if node in self._results:
            self.values[node] = self.outputs[self._results[node]]
            return self.outputs[self._results[node]]
        kind = C_TYPES[dtype]
        at = self.pools.setdefault(kind, Pool()).take(node.name, max(math.prod(shape), 1))
        memory = self.values[node] = Value(f"{pool_name(kind)} + {at}", dtype, shape)
        return memory

    def constant(self, tensor: Tensor) -> Value:
        """Return an array with this value; equal values share one array."""
        tensor = tensor.detach().cpu().contiguous()
        key = tensor.dtype, tuple(tensor.shape), tensor.numpy(force=True).tobytes()
        if key not in self.constants:
            self.constants[key] = Value(f"constant_{len(self.constants)}", tensor.dtype, tuple(tensor.shape), tensor)
        return self.constants[key]

    def argument(self, value: object) -> str:
        """Return an argument of a call as C text."""
        if isinstance(value, Value):
            return value.text
        if isinstance(value, bool | int):
            return str(int(value)) if abs(int(value)) < 2**31 else f"INT64_C({int(value)})"
        if isinstance(value, float):
            return number(value)
        if isinstance(value, Window):
            return f"&{self._window(value)}"
        return "NULL" if value is None else self._numbers(value)

    def _numbers(self, value: Any) -> str:
        """Return the name of an array of sizes or strides; the name is made of its content."""
        name = "_".join(["sizes", *(str(number).replace("-", "m") for number in value)])
        self.sizes[name] = ", ".join(map(str, value))
        return name

    def _window(self, window: Window) -> str:
        text = ", ".join("{" + ", ".join(map(str, row)) + "}" for row in window)
        return self.windows.setdefault(text, f"window_{len(self.windows)}")


VIEWS: set[Any] = set()  # primitives whose result shares their operand's memory


def identifier(text: str) -> str:
    """Return a text as a C identifier: each group of other characters than letters and digits becomes one underscore."""
    return re.sub(r"[^0-9A-Za-z]+", "_", text).strip("_")


def comment(text: str) -> str:
    """Return a text that is safe inside a C comment."""
    return "".join(c if c.isprintable() else " " for c in text).replace("*/", "* /").replace("/*", "/ *").replace("??", "? ?").rstrip("\\")


def pool_name(kind: str) -> str:
    """Return the name of the memory array for tensors of a C type."""
    return f"memory_{kind.removesuffix('_t')}"
