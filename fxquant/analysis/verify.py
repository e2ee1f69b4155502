"""Proof by running: two forms of one model compared bit for bit at every tensor they share.

The forms are the prepared model (in VALIDATE), the integer model, and an exported ONNX file, which is run
every way there is. The first difference is located: the node, its inputs, and both values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxquant.arguments import checked, such
from fxquant.errors import ConfigurationError, ExportError
from fxquant.facts import TensorFact
from fxquant.graph import by_name, fact, is_inner, qparams, resolve, zero_point
from fxquant.ops.boundary import DEQUANTIZE, QUANTIZE
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.boundary import dequantize, quantize
from fxquant.quantization.batches import model_inputs
from fxquant.quantization.prepared import QuantizedOperator, quantized_operators
from fxquant.quantization.state import State

Values = dict[str, Tensor]  # by name, integers as int64, floats as they are; in the order they are computed


class Form(Protocol):
    """One form of the model, that runs a batch and shows its tensors."""

    label: str

    def run(self, inputs: list[Tensor], deep: bool) -> Values:
        """The quantized tensors and the outputs (named "output 0", …); with `deep` the accumulators too."""


@dataclass(frozen=True)
class Difference:
    """Where two forms first differ."""

    name: str
    operator: str
    source: str
    inputs: tuple[str, ...]
    index: tuple[int, ...]
    values: tuple[float, float]
    labels: tuple[str, str]
    count: int
    inputs_equal: bool

    def __str__(self) -> str:
        index = ", ".join(map(str, self.index))
        rows = [
            f"first difference at %{self.name} = {self.operator}({', '.join('%' + i for i in self.inputs)})",
            f"  at       {self.source}" if self.source else "",
            f"  element  [{index}] is {self.values[0]:g} in {self.labels[0]} and {self.values[1]:g} in {self.labels[1]}",
            f"  extent   {self.count} elements of this tensor differ; its inputs are {'equal' if self.inputs_equal else 'not comparable'}",
        ]
        return "\n".join(row for row in rows if row)


@dataclass
class Report:
    """What a verification found. True if not one bit differed.

    mismatches  differing elements, over all tensors, batches and runtimes
    elements    elements compared; tensors: distinct tensors compared
    flips       elements that differ because a float operator before them rounds differently, when the file runs on its own:
                at a boundary where float operators hand over, and in outputs that float operators compute. They are outside
                of the contract and not counted as mismatches
    floats      how far the outputs that float operators compute are apart, by name, where the integers before them are equal
    first       where the first difference is; None if there is none
    """

    pairs: list[str] = field(default_factory=list)
    mismatches: int = 0
    elements: int = 0
    flips: int = 0
    names: set[str] = field(default_factory=set)
    first: Difference | None = None
    floats: dict[str, FloatDifference] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        return len(self.names)

    @checked(other=such("a Report", lambda other: other, lambda other: isinstance(other, Report)))
    def merge(self, other: Report) -> None:
        """Add what another verification found."""
        self.pairs += other.pairs
        self.names |= other.names
        self.mismatches += other.mismatches
        self.elements += other.elements
        self.flips += other.flips
        self.first = self.first or other.first
        for name, difference in other.floats.items():
            self.floats.setdefault(name, FloatDifference(name)).merge(difference)

    def __bool__(self) -> bool:
        return self.mismatches == 0 and self.elements > 0

    def __str__(self) -> str:
        verdict = "equal" if self else "NOT equal"
        lines = [
            f"{verdict}: {self.mismatches} mismatching elements of {self.elements} in {self.tensors} tensors ({'; '.join(self.pairs)})"
        ]
        if self.flips:
            lines.append(f"{self.flips} elements flipped behind float operators, which every runtime rounds in its own way")
        lines.extend(f"  {difference}" for difference in self.floats.values() if difference.differing)
        if self.first is not None:
            lines.append(str(self.first))
        return "\n".join(lines)


@dataclass
class FloatDifference:
    """How far an output that float operators compute is apart in two forms, over all runtimes and batches.

    largest is the largest absolute difference, infinite where one value is no number or infinite and the other is not; ulps the
    largest in steps of the dtype, None where it is none of float numbers.
    """

    name: str
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    ulps: int | None = None

    def add(self, one: Tensor, other: Tensor) -> None:
        """Take the values of one more batch into account."""
        different = _different(one, other)
        self.elements += different.numel()
        self.differing += int(different.sum())
        if one.shape != other.shape or one.dtype != other.dtype or one.is_complex():
            self.largest = math.inf if bool(different.any()) else self.largest
            return
        left, right = one[different], other[different]
        distance = torch.nan_to_num((left.double() - right.double()).abs(), nan=math.inf)
        ulps = None
        if one.is_floating_point():
            finite = torch.isfinite(left) & torch.isfinite(right)
            ulps = max((abs(a - b) for a, b in zip(_steps(left[finite]), _steps(right[finite]), strict=True)), default=0)
        self._raise(float(distance.max()) if distance.numel() else 0.0, ulps)

    def merge(self, other: FloatDifference) -> None:
        """Add what was found elsewhere."""
        self.elements += other.elements
        self.differing += other.differing
        self._raise(other.largest, other.ulps)

    def _raise(self, largest: float, ulps: int | None) -> None:
        self.largest = max(self.largest, largest)
        self.ulps = ulps if self.ulps is None else max(self.ulps, ulps or 0)

    def __str__(self) -> str:
        steps = "" if self.ulps is None else f" ({self.ulps} ulp)"
        return f"{self.name}: {self.differing} of {self.elements} elements differ, by {self.largest:.3g}{steps} at most"


@dataclass
class Deviation:
    """How far one output of a file in style "qdq" is from the integer model's, over all batches.

    largest and differing are in steps of the output's scale, or in real numbers where the output is no quantized tensor.
    """

    name: str
    scale: Tensor | None
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, wanted: Tensor, found: Tensor) -> None:
        """Take the values of one more batch into account."""
        one, other = wanted.double(), found.double()
        self.signal += float(one.square().sum())
        self.noise += float((one - other).square().sum())
        if self.scale is not None:  # whole numbers of steps
            one, other = torch.round(one / self.scale.double()), torch.round(other / self.scale.double())
        distance = (one - other).abs()
        self.elements += distance.numel()
        self.differing += int((distance != 0).sum())
        self.largest = max(self.largest, float(distance.max()) if distance.numel() else 0.0)

    @property
    def share(self) -> float:
        """The share of elements that differ."""
        return self.differing / max(self.elements, 1)

    @property
    def sqnr(self) -> float:
        """10·log10 of the output's power over that of the difference, in dB."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf

    def __str__(self) -> str:
        unit = "steps" if self.scale is not None else "(not quantized)"
        differing = f"{100 * self.share:.2f} % of {self.elements} elements differ"
        return f"{self.name}: {differing}, by {self.largest:.4g} {unit} at most; SQNR {self.sqnr:.1f} dB"


@dataclass
class DeviationReport(Report):
    """The measured distance of a file that is not exact by nature (style "qdq") from the integer model.

    Never true: even where no output differed on these batches, nothing says that none ever will. `outputs` holds a
    `Deviation` for each runtime and output.
    """

    outputs: dict[str, list[Deviation]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        lines = ["not exact by nature (style 'qdq'), measured against the integer model:"]
        for runtime, outputs in self.outputs.items():
            lines.append(f"  {runtime}")
            lines.extend(f"    {output}" for output in outputs)
        return "\n".join(lines)


# ---- the forms ------------------------------------------------------------------------------------------------------


class PreparedForm:
    """The prepared model in VALIDATE, whatever its state is; its state is restored afterwards."""

    label = "prepared"
    crossings: list[str]  # where float operators on the host hand over to an integer segment
    float_outputs: set[str]  # the outputs that float operators compute

    def __init__(self, prepared: fx.GraphModule) -> None:
        self.model = prepared
        self.crossings = [node.name for node in prepared.graph.nodes if _is_quantize(prepared, node) and node.args[0].op != "placeholder"]
        self.float_outputs = _float_outputs(prepared)

    def run(self, inputs: list[Tensor], deep: bool) -> Values:
        operators = quantized_operators(self.model)
        values: Values = {}

        def keep(module: QuantizedOperator) -> Callable[..., None]:
            def hook(_: Any, __: Any, result: Tensor) -> None:
                if not module.output.follows_sum:  # a 32-bit output is compared as the real number it becomes
                    values[module.name] = torch.round(result.double() / module.output.scale.double()).to(torch.int64)

            return hook

        hooks = [operator.register_forward_hook(keep(operator)) for operator in operators.values()]
        states = {name: operator.state for name, operator in operators.items()}
        training = {module: module.training for module in self.model.modules()}  # float operators on the host may depend on it
        self.model.eval()
        try:
            for operator in operators.values():
                operator.state = State.VALIDATE
            with torch.no_grad():
                result = self.model(**by_name(self.model, inputs))
        finally:
            for hook in hooks:
                hook.remove()
            for name, operator in operators.items():
                operator.state = states[name]
            for module, flag in training.items():
                module.training = flag
        return values | _outputs(result)


class IntegerForm:
    """The integer model, node by node."""

    label = "integer"

    def __init__(self, integer: fx.GraphModule) -> None:
        self.model = integer
        self.crossings = [node.name for node in integer.graph.nodes if node.target is quantize and node.args[0].op != "placeholder"]
        self.float_outputs = _float_outputs(integer)

    def run(self, inputs: list[Tensor], deep: bool) -> Values:
        values: Values = {}

        class Recorder(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                result = super().run_node(n)
                record = PRIMITIVES.get(n.target) if n.op == "call_function" else None  # type: ignore[arg-type]
                if record is not None and (record.kind == "quantized" or (deep and record.kind == "accumulator")):
                    values[n.name] = result.to(torch.int64) - zero_point(n)  # centred, as those of other forms
                return result

            def fetch_attr(self, target: str) -> Any:
                return resolve(self.module, target)

        with torch.no_grad():
            result = Recorder(self.model).run(*inputs)
        return values | _outputs(result)


class OnnxForm:
    """An exported file in one runtime."""

    def __init__(self, onnx_model: Any, runtime: str, feed: list[str]) -> None:
        self.onnx, self.runtime, self.feed = onnx_model, runtime, feed
        self.label = runtime
        self.runners: dict[int, Any] = {}
        self.given: Values = {}

    def run(self, inputs: list[Tensor], deep: bool) -> Values:
        kinds = ("quantized", "accumulator") if deep else ("quantized",)
        names = self.onnx.names(kinds)
        feeds = dict(zip(self.onnx.input_names, inputs, strict=True))
        feeds.update({name: self._stored(name) for name in self.feed})
        found = self._runner(names)(feeds)
        values = {name: found[name].to(torch.int64) - self._zero_point(name) for name in names if name in found}
        # Exposing inner values keeps the runtime from some fusions, so the outputs come from the file as it is.
        plain = self._runner([])(feeds)
        return values | {f"output {index}": plain[name] for index, name in enumerate(self.onnx.output_names) if name in plain}

    def _zero_point(self, name: str) -> int:
        return int(self.onnx.tensors[name].get("zero_point", 0))

    def _stored(self, name: str) -> Tensor:
        """A given value as the file stores it."""
        return (self.given[name] + self._zero_point(name)).to(_STORAGE[self.onnx.tensors[name]["storage"]])

    def _runner(self, expose: list[str]) -> Any:
        key = len(expose)
        if key not in self.runners:
            self.runners[key] = self.onnx.runner(self.runtime, expose, self.feed)
        return self.runners[key]


_STORAGE = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}


def _outputs(result: Any) -> Values:
    found: list[Tensor] = []
    fx.node.map_aggregate(result, lambda value: found.append(value) if isinstance(value, Tensor) else None)
    return {f"output {index}": value for index, value in enumerate(found)}


def _is_quantize(prepared: fx.GraphModule, node: fx.Node) -> bool:
    module = resolve(prepared, str(node.target)) if node.op == "call_module" else None
    return isinstance(module, QuantizedOperator) and module.operator is QUANTIZE


def _returned(model: fx.GraphModule) -> list[fx.Node]:
    """The nodes of the tensors that a model returns, in order."""
    returned: list[fx.Node] = []
    fx.map_arg(next(node for node in reversed(model.graph.nodes) if node.op == "output").args, returned.append)
    return [node for node in returned if isinstance(fact(node), TensorFact) or node.op == "get_attr"]


def _float_outputs(model: fx.GraphModule) -> set[str]:
    """The outputs, by the names of `_outputs`, that are neither the end of an integer segment nor an input nor a constant."""
    tensors = _returned(model)
    ends = (dequantize, DEQUANTIZE.function)
    return {
        f"output {index}" for index, node in enumerate(tensors) if node.op not in ("placeholder", "get_attr") and node.target not in ends
    }


# ---- the comparison -------------------------------------------------------------------------------------------------


def count_flips(left: PreparedForm | IntegerForm, whole: OnnxForm, batches: Iterable[list[Tensor]]) -> int:
    """Elements that differ where float operators hand over, and in the outputs they compute, when the file runs on its own."""
    report = Report()
    for inputs in batches:
        mine, other = left.run(inputs, False), whole.run(inputs, False)
        _count({name: mine[name] for name in (*left.crossings, *left.float_outputs)}, other, report)
    return report.mismatches


def compare(
    a: PreparedForm | IntegerForm, b: Form, batches: Iterable[list[Tensor]], integer: fx.GraphModule | None, report: Report
) -> None:
    """Compare two forms on batches, adding to the report; stops looking deeper once a difference is located.

    The outputs that float operators compute must be equal where PyTorch computes both; those of a file are measured.
    """
    report.pairs.append(f"{a.label} = {b.label}")
    measured = a.float_outputs if isinstance(b, OnnxForm) else set()
    for inputs in batches:
        left = a.run(inputs, False)
        if isinstance(b, OnnxForm):
            b.given = left
        right = b.run(inputs, False)
        for name in sorted(measured):
            report.names.add(name)
            report.elements += left[name].numel()
            report.floats.setdefault(name, FloatDifference(name)).add(left.pop(name), right.pop(name))
        if _count(left, right, report) and report.first is None:
            deep_left, deep_right = a.run(inputs, True), b.run(inputs, True)
            exact = {name: value for name, value in deep_left.items() if name not in measured}
            report.first = _locate(exact, deep_right, (a.label, b.label), integer)


def measure(a: Form, b: OnnxForm, batches: Iterable[list[Tensor]], report: DeviationReport) -> None:
    """Add the distance of the outputs of a file in style "qdq" from the model's, in one runtime."""
    report.pairs.append(f"{a.label} ≈ {b.label}")
    outputs = [Deviation(entry["name"], _step(b.onnx.tensors.get(entry.get("tensor")))) for entry in b.onnx.metadata["outputs"]]
    for inputs in batches:
        wanted, found = a.run(inputs, False), b.run(inputs, False)
        for index, output in enumerate(outputs):
            output.add(wanted[f"output {index}"], found[f"output {index}"])
    report.outputs[b.label] = outputs
    report.names.update(output.name for output in outputs)
    report.elements += sum(output.elements for output in outputs)
    report.mismatches += sum(output.differing for output in outputs)


def _step(entry: dict[str, Any] | None) -> Tensor | None:
    """The scale of a described tensor, shaped to broadcast."""
    if entry is None or "scale" not in entry:
        return None
    scale = torch.tensor(entry["scale"], dtype=torch.float32, device="cpu")
    return scale.reshape(-1, *[1] * (-entry["axis"] - 1)) if "axis" in entry else scale


def _count(left: Values, right: Values, report: Report) -> int:
    differing = 0
    for name in left:
        if name in right:
            report.names.add(name)
            report.elements += left[name].numel()
            differing += _differing(left[name], right[name])
    report.mismatches += differing
    return differing


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as an element, in bytes


def _different(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors have different bytes, so that 0.0 is not -0.0; what is no number equals what is none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.ones(max(one.numel(), other.numel()), dtype=torch.bool, device="cpu")
    if one.is_complex():
        return _different(torch.view_as_real(one), torch.view_as_real(other)).any(-1)
    if not one.is_floating_point():
        return one != other
    bits = _BITS[one.element_size()]
    return (one.view(bits) != other.view(bits)) & ~(torch.isnan(one) & torch.isnan(other))


def _steps(values: Tensor) -> list[int]:
    """Finite floats as whole numbers in their order: neighbours differ by one, and 0.0 is what -0.0 is."""
    raw = values.view(_BITS[values.element_size()]).to(torch.int64)
    largest = 2 ** (8 * values.element_size() - 1)
    return [number if number >= 0 else -(number + largest) for number in raw.flatten().tolist()]


def _differing(one: Tensor, other: Tensor) -> int:
    return int(_different(one, other).sum())


def _locate(left: Values, right: Values, labels: tuple[str, str], integer: fx.GraphModule | None) -> Difference | None:
    nodes = {node.name: node for node in integer.graph.nodes} if integer is not None else {}
    equal: set[str] = set()
    for name in left:
        if name not in right:
            continue
        count = _differing(left[name], right[name])
        if count == 0:
            equal.add(name)
            continue
        node = nodes.get(name)
        operands = tuple(_compared_operands(node, left.keys() & right.keys())) if node is not None else ()
        comparable = left[name].shape == right[name].shape and left[name].dtype == right[name].dtype and not left[name].is_complex()
        index = tuple(int(i) for i in torch.nonzero(_different(left[name], right[name]))[0]) if comparable else ()
        values = (float(left[name][index]), float(right[name][index])) if comparable else (float("nan"), float("nan"))
        operator = getattr(node.target, "__name__", str(node.target)) if node is not None else "value"
        source = str(node.meta.get("source", "")) if node is not None else ""
        inputs_equal = all(o in equal or (o in nodes and nodes[o].op == "placeholder") for o in operands)
        return Difference(name, operator, source, operands, index, values, labels, count, inputs_equal)
    return None


def _compared_operands(node: fx.Node, compared: Set[str]) -> Iterator[str]:
    """The nearest values before a node that both forms show, or that are inputs of the model."""
    for operand in node.all_input_nodes:
        if operand.name in compared or operand.op == "placeholder":
            yield operand.name
        elif operand.op != "get_attr":
            yield from _compared_operands(operand, compared)


def check_batches(model: fx.GraphModule, batches: Iterable[Any]) -> Iterator[list[Tensor]]:
    """The inputs of each batch. Raises CalibrationError where one does not fit."""
    for index, batch in enumerate(batches):
        yield model_inputs(model, batch, index)


def check_same_model(left: PreparedForm | IntegerForm, opened: Any) -> None:
    """Raise ExportError if a file cannot be compared with a model: another model's, or one that takes integers."""
    if opened.io != "float":
        raise ExportError(
            f"{opened.path} cannot be verified",
            because=f"it was exported with io={opened.io!r}, and takes integers where the model takes real numbers",
            remedy="export with io='float'; the inner nodes of both files are the same",
        )
    sizes = (sum(node.op == "placeholder" for node in left.model.graph.nodes), len(_returned(left.model)))
    found = (len(opened.input_names), len(opened.output_names))
    if sizes != found:
        raise ExportError(
            f"{opened.path} is the file of another model",
            because=f"it has {found[0]} inputs and {found[1]} outputs, and this model has {sizes[0]} and {sizes[1]}",
            remedy="pass the file that fxq.export_onnx wrote of this model",
        )
    if isinstance(left, IntegerForm):
        described = [node for node in left.model.graph.nodes if node.target in PRIMITIVES and qparams(node) is not None]
        names = [node.name for node in described if not is_inner(node)]
    else:
        names = [name for name, operator in quantized_operators(left.model).items() if operator.owns_output]
    missing = [name for name in names if name not in opened.tensors]
    if missing:
        raise ExportError(
            f"{opened.path} is the file of another model",
            because=f"it has no {', '.join('%' + name for name in missing[:5])}{' …' if len(missing) > 5 else ''}",
            remedy="pass the file that fxq.export_onnx wrote of this model",
        )


def form_of(model: Any) -> PreparedForm | IntegerForm:
    """The form of a model object. Raises ConfigurationError if it is neither prepared nor integer."""
    stage = getattr(model, "meta", {}).get("stage") if isinstance(model, fx.GraphModule) else None
    if stage == "PREPARED":
        return PreparedForm(model)
    if stage == "INTEGER":
        return IntegerForm(model)
    raise ConfigurationError(
        f"{type(model).__name__} cannot be verified",
        because="it is neither a prepared model, nor an integer model, nor the path of an ONNX file",
        remedy="pass the results of fxq.prepare, fxq.convert or fxq.export_onnx",
    )
