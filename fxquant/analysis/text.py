"""Graphs as text: readable, deterministic, diffable.

%conv1 = conv2d(%x, %conv1_weight, stride=2, padding=1)   f32[B,8,4,4]   int8 s=0.02351 g1   # conv1, bn1, relu
"""

import ast
import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn

from fxquant.errors import ConfigurationError
from fxquant.ir import graph as facts
from fxquant.ir.graph import annotation, fact, is_parameter, origins, resolve, stage_of
from fxquant.ir.integer import kernel
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME, Operator
from fxquant.ops.core.weighted import OF_PARAMETERS
from fxquant.prepared.stage import called, grid_of, is_dynamic, primitive_of, record_of
from fxquant.primitives import PRIMITIVES, Primitive
from fxquant.quantization.spec import DEFAULT, QConfig
from fxquant.support.arguments import TEXT, checked, instance


@checked(gm=instance("a traced, prepared or integer model", fx.GraphModule))
def text(gm: fx.GraphModule, *, kernels: str = "auto") -> str:
    """Return the graph, one line per node; equal graphs give equal text. Raises ConfigurationError for a model that is not a graph.

    With kernels="reference" an integer model is shown as a file holds it, by its primitives alone.
    """
    shows = kernels == "auto"
    rows = [_row(gm, node, shows) for node in gm.graph.nodes]
    stage = (stage_of(gm) or "traced").lower()
    stage = "integer" if stage == "fused" and not shows else stage
    return "\n".join([f"graph   # {stage}", *("  " + line for line in aligned(rows, most=100))]) + "\n"


def aligned(rows: Sequence[Sequence[str]], most: int | None = None, left: int | None = None) -> list[str]:
    """Return rows of cells as lines of columns, two spaces apart; the first column is as wide as its longest cell, at most `most`.

    Cells are aligned to the left; if `left` is given, only those of the first `left` columns and of the last one.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if most is not None and widths:
        widths[0] = min(widths[0], most)
    texts = range(len(widths)) if left is None else (*range(left), len(widths) - 1)

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.ljust(width) if place in texts else cell.rjust(width) for place, (cell, width) in cells).rstrip()

    return list(map(line, rows))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows under their head; the first `left` columns and the last are aligned to the left, all others to the right."""
    return "\n".join(aligned([head, *rows], left=left))


def _row(gm: fx.GraphModule, node: fx.Node, kernels: bool) -> tuple[str, str, str, str]:
    if node.op == "output":
        return f"return {_value(node.args[0])}", "", "", ""
    return f"%{node.name} = {_call(gm, node)}", _fact_text(fact(node)), _quantization(gm, node), _comment(node, kernels)


def _call(gm: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        path = str(node.target)
        value = resolve(gm, path)
        if isinstance(value, nn.Module):
            return f"{type(value).__name__}[{path}]"
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return f"[{path}] #{hashlib.sha256(value.contiguous().numpy(force=True).tobytes()).hexdigest()[:8]}"
        return f"[{path}]"
    record = record_of(gm, node) or primitive_of(node)
    name, arguments = called(gm, node), _arguments(record, node)
    if record is None and node.op == "call_module":
        return f"{name}[{node.target}]({arguments})"
    return f"{'.' if node.op == 'call_method' else ''}{name}({arguments})"


def _arguments(record: Operator | Primitive | None, node: fx.Node) -> str:
    """Return the arguments as text, by name after the first, without arguments that equal their default."""
    parameters = _parameters(record)
    shown = []
    for index, value in enumerate(node.args):
        name, default = parameters[index] if index < len(parameters) else ("", inspect.Parameter.empty)
        if default is not inspect.Parameter.empty and _plain(default) == _plain(value):
            continue
        shown.append(f"{name}={_value(value)}" if name and index > 0 and not isinstance(value, fx.Node) else _value(value))
    shown.extend(f"{name}={_value(value)}" for name, value in node.kwargs.items())
    return ", ".join(shown)


def _parameters(record: Operator | Primitive | None) -> list[tuple[str, Any]]:
    """Return the names and defaults of positional arguments, from the record's `parameters` or its function's signature."""
    if isinstance(record, Operator) and record.parameters:
        return list(record.parameters.items())
    try:
        parameters = [] if record is None else list(inspect.signature(record.function).parameters.values())
    except ValueError:
        parameters = []
    return [(each.name, each.default) for each in parameters]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value).__name__ + "(" + ", ".join(f"{n}={_value(v)}" for n, v in zip(value._fields, value, strict=True)) + ")"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _fact_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_fact_text(item) for item in value) + ")"
    return "" if value is None else str(value)


def _quantization(gm: fx.GraphModule, node: fx.Node) -> str:
    spec, grid = annotation(node), grid_of(gm, node)
    if spec is None:
        return ""
    if spec.dtype is None:
        return "dynamic" if is_dynamic(gm, node) else "float"
    scale = ""
    if grid is not None and isinstance(grid.scale, float):
        scale = f" s={grid.scale:.4g}" + (f" z={grid.zero_point}" if ACTIVATION_TYPES[grid.dtype].affine else "")
    return f"{spec.dtype}{scale}" + ("" if spec.group is None else f" g{spec.group}")


def _comment(node: fx.Node, kernels: bool) -> str:
    names, runs = origins(node), kernel(node) if kernels else None
    remarks = [f"was: {', '.join(names)}"] if len(names) > 1 else []
    remarks += [f"kernel: {runs[0]}"] if runs is not None else []
    return f"# {'; '.join(remarks)}" if remarks else ""


# ---- A text as a graph: it holds no values of parameters, no modules, no rules of the qconfig, and four digits of a float -------------
@checked(written=TEXT, attributes=instance("a dict of tensors and modules by their paths", dict).or_none("parameters are zeros"))
def parse(written: str, attributes: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """Return the canonical, annotated, bounded or integer graph of a text of `fxq.text`: text in, pass, text out is a test of a pass.

    `attributes` holds tensors and modules by path; other parameters are zeros. Every operator has the default rule, without a reason.
    Raises ConfigurationError with the number of a line that cannot be read.
    """
    reader = _Reader(attributes or {})
    for number, line in enumerate(written.splitlines(), 1):
        try:
            reader.read(*re.split(r"\s{2,}", line.strip()))
        except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:
            because = f"{error.args[0]!r} is not known" if isinstance(error, KeyError) else str(error)
            remedy = "write it as fxq.text does, with two spaces before its shape; pass what it calls by a path in `attributes`"
            raise ConfigurationError(f"line {number} cannot be read: {line.strip()}", because=because, remedy=remedy) from error
    gm = fx.GraphModule(reader.root, reader.graph)
    gm.meta["stage"] = reader.stage
    return gm


class _Reader:
    """Makes a graph from the lines of a text."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.root, self.graph, self.stage = nn.Module(), fx.Graph(), "CANONICAL"
        self.attributes, self.nodes = attributes, dict[str, fx.Node]()

    def read(self, call: str, *cells: str) -> None:
        """Add the node of a line, from its call and the cells after it."""
        if call.startswith("graph") and cells:
            self.stage = cells[0].removeprefix("# ").upper()
            if self.stage in ("TRACED", "PREPARED"):
                raise ValueError(f"a {self.stage.lower()} graph calls modules, which its text does not hold")
        elif call.startswith("return "):
            self.graph.output(self.values(call.removeprefix("return "))[0][0])
        elif call:
            name, called = re.fullmatch(r"%(\w+) = (.+)", call).groups()  # type: ignore[union-attr]
            described = next((_described(cell) for cell in cells if re.match(r"\(?[\w.]+\[", cell)), None)
            node = self.nodes[name] = self.node(name, called, described)
            facts.set_fact(node, described)
            facts.set_matched_rules(node, ((DEFAULT, QConfig()),))
            if node.all_input_nodes and all(map(is_parameter, node.all_input_nodes)):
                facts.mark_parameter(node)
            for cell in cells:
                if cell.startswith("# was: "):
                    node.meta["fused"] = tuple(cell.removeprefix("# was: ").partition(";")[0].split(", "))
                elif (spec := re.fullmatch(r"(float|u?int\d+)\b(?:.* g(\d+))?.*", cell)) is not None:
                    group = None if spec[2] is None else int(spec[2])
                    facts.annotate(node, facts.Annotation(None if spec[1] == "float" else spec[1], "", QConfig(), group))

    def node(self, name: str, called: str, described: Any) -> fx.Node:
        """Return a new node for the text of its call."""
        if called == "input":
            return self.graph.placeholder(name)
        if (path := re.fullmatch(r"\w*\[(.+)\](?: #\w+)?", called)) is not None:
            is_given = described is None or path[1] in self.attributes
            zeros = None if is_given else torch.zeros(described.at(1), dtype=described.dtype, device="cpu")
            facts.attach(self.root, path[1], self.attributes[path[1]] if zeros is None else zeros)
            return self.graph.create_node("get_attr", path[1], name=name)
        operator, _, arguments = called.removesuffix(")").partition("(")
        args, named = self.values(arguments)
        table: dict[str, Any] = {**BY_NAME}
        if self.stage in ("INTEGER", "FUSED"):
            table |= {each.name: each for each in PRIMITIVES.values()}
        if operator not in table:
            function = (
                self.attributes.get(operator) or {each.__name__: each for each in OF_PARAMETERS}.get(operator) or getattr(torch, operator)
            )
            return self.graph.create_node("call_function", function, args, named, name=name)
        record, defaults = table[operator], dict(_parameters(table[operator]))
        fused = {key: named.pop(key) for key in [*named] if key in getattr(record, "absorbs", ())}
        named |= zip((each for each in defaults if each not in named), args, strict=False)
        values = record.bind((), named) if isinstance(record, Operator) else {**defaults, **named}
        return self.graph.create_node("call_function", record.function, tuple(values.values()), fused, name=name)

    def values(self, arguments: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of a call written as text; keyword arguments may come first in the text."""
        tree: Any = ast.parse(re.sub(r"(\w+)=", r"\1:=", re.sub(r"%(\w+)", r"{\1}", f"_({arguments})")), mode="eval").body
        named = {each.target.id: self.value(each.value) for each in tree.args if isinstance(each, ast.NamedExpr)}
        return tuple(self.value(each) for each in tree.args if not isinstance(each, ast.NamedExpr)), named

    def value(self, tree: Any) -> Any:
        """Return the value of an argument: of a set of one name its node, of a word a dtype of PyTorch or a string."""
        match tree:
            case ast.Set(elts=[ast.Name(id=name)]):
                return self.nodes[name]
            case ast.Name(id=word):
                value = float(word) if word in ("inf", "nan") else getattr(torch, word, word)
                return value if isinstance(value, float | torch.dtype) else word
            case ast.List() | ast.Tuple():
                return (list if isinstance(tree, ast.List) else tuple)(map(self.value, tree.elts))
            case ast.Call(func=ast.Name(id="slice")):
                return slice(*map(self.value, tree.args))
        return ast.literal_eval(tree)


def _described(cell: str) -> Any:
    """Return the fact of which `_fact_text` makes this cell."""
    if cell.startswith("("):
        return tuple(map(_described, re.findall(r"[\w.]+\[.*?\]", cell)))
    dtype, sizes = cell.removesuffix("]").split("[")
    shape = []
    for size in filter(None, sizes.split(",")):
        size, _, largest = size.partition("≤")
        factor, batch, rest = size.rpartition("B")
        divisor, offset = re.fullmatch(r"(?:/(\d+))?(.*)", rest).groups()  # type: ignore[union-attr]
        coefficient, most = Fraction(int(factor or 1), int(divisor or 1)) if batch else Fraction(0), int(largest) if largest else None
        shape.append(facts.BatchDim(coefficient, Fraction(offset or 0), most) if batch or largest else int(size))
    names = {name: key for key, name in facts.DTYPE_NAMES.items()}
    return facts.TensorFact(tuple(shape), names.get(dtype) or getattr(torch, dtype.removeprefix("torch.")))
