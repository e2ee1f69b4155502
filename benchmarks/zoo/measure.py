"""Measure a model that nobody adapted: one row of `python -m benchmarks.zoo`."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fxquant as fxq
from benchmarks.zoo.ideal import ideal
from fxquant.analysis.layers import left_in_float
from fxquant.ir.graph import computes_tensor
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.quantization import dequantize, quantize

Inputs = dict[str, Tensor]
WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")  # of float layers, as PyTorch calls them


@dataclass
class Row:
    """The measurements of one model.

    stage      how far it came: "traced", "prepared", "converted", "exported", "verified"
    error      what stopped it there
    macs       share of its multiply-accumulates that is integer
    nodes      share of its operators that is integer
    integer    how many operators are integer
    floats     for each reason, the operators left in float
    crossings  tensors that cross from float to integer, or back, inside of the model
    e1, e2     mismatching elements: of the ONNX file and the integer graph, of that and the prepared model
    sqnr       signal to quantization noise at the outputs in dB, by name
    ideal      that of the worst output where only operands of products and of sums of branches have 8 bits: see `ideal`
    seconds    by step
    """

    name: str
    stage: str = ""
    error: str = ""
    macs: float = float("nan")
    nodes: float = float("nan")
    integer: int = 0
    floats: dict[str, list[str]] = field(default_factory=dict)
    crossings: int = 0
    e1: int = -1
    e2: int = -1
    sqnr: dict[str, float] = field(default_factory=dict)
    ideal: float = float("nan")
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether it compiled and no bit differs."""
        return not self.error and self.e1 <= 0 and self.e2 == 0

    @property
    def worst(self) -> float:
        """The ratio of signal to noise of the worst output."""
        return min(self.sqnr.values(), default=float("nan"))


class _Clock:
    def __init__(self, row: Row) -> None:
        self.row, self.started = row, time.perf_counter()

    def reached(self, stage: str) -> None:
        now = time.perf_counter()
        self.row.stage, self.row.seconds[stage] = stage, now - self.started
        self.started = now


def measure(
    name: str, model: nn.Module, calibration: Sequence[Inputs], test: Sequence[Inputs], target: str, qconfig: Any, export: bool = True
) -> Row:
    """One row; a step that fails ends it, with the error."""
    row = Row(name)
    try:
        _measure(row, model, calibration, test, target, qconfig, export)
    except Exception as error:  # whatever stops a model is what the row tells
        row.error = f"{type(error).__name__}: {error}"
    return row


def _measure(
    row: Row, model: nn.Module, calibration: Sequence[Inputs], test: Sequence[Inputs], target: str, qconfig: Any, export: bool
) -> None:
    clock = _Clock(row)
    traced = fxq.trace(model, calibration[0])
    clock.reached("traced")
    prepared = fxq.prepare(traced, calibration[0], target, qconfig)
    clock.reached("prepared")
    count_operators(row, prepared)
    fxq.calibrate(prepared, calibration, show_progress=False)
    clock.reached("calibrated")
    integer = fxq.convert(prepared)
    clock.reached("converted")
    row.crossings = count_crossings(integer)
    row.macs = integer_share(traced, integer, test[0])
    row.sqnr = signal_to_noise(model, integer, test)
    row.ideal = ideal(model, calibration, lambda run: min(signal_to_noise(model, run, test).values()))
    clock.reached("compared")
    row.e2 = fxq.verify(prepared, integer, test[:1], show_progress=False).mismatches
    clock.reached("validated")
    if not export:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        fxq.export_onnx(integer, path, style="exact")
        clock.reached("exported")
        few = [{key: value[:size] for key, value in test[0].items()} for size in (2, 3)]
        row.e1 = fxq.verify(integer, path, few, show_progress=False).mismatches
        clock.reached("verified")


def count_operators(row: Row, prepared: fx.GraphModule) -> None:
    """How many operators are integer, a composite as one, and why the others are not.

    An operator on booleans or integers is exact wherever it runs, and counts as integer.
    """
    layers = fxq.inspect.layers(prepared)
    whole = [layer for layer in left_in_float(layers) if layer.dtype in WHOLE]
    row.integer = sum(layer.integer and not layer.inner and not layer.boundary for layer in layers) + len(whole)
    for layer in left_in_float(layers):
        if layer in whole:
            continue
        row.floats.setdefault(layer.reason, []).append(f"{layer.name} ({layer.operator})")
    row.nodes = row.integer / max(row.integer + sum(map(len, row.floats.values())), 1)


def count_crossings(integer: fx.GraphModule) -> int:
    """The values that go from float operators to integer ones, or back: model inputs and outputs are not counted."""
    count = 0
    for node in integer.graph.nodes:
        if node.target is quantize:
            count += node.args[0].op != "placeholder"
        elif node.target is dequantize:
            count += any(user.op != "output" for user in node.users)
    return count


def integer_share(traced: fx.GraphModule, integer: fx.GraphModule, batch: Inputs) -> float:
    """The share of a model's multiply-accumulates that its float operators do not compute any more."""
    total = sum(_products(traced, batch, lambda node: True))
    in_float = sum(_products(integer, batch, lambda node: node.target not in PRIMITIVES and computes_tensor(node)))
    return 1 - in_float / total if total else float("nan")


def _products(model: fx.GraphModule, batch: Inputs, counted: Any) -> Iterator[int]:
    products: list[int] = []

    class Counting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.op in ("placeholder", "output", "get_attr") or not counted(n):
                return super().run_node(n)
            # A fused kernel of attention is not counted; its products are.
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                result = super().run_node(n)
            products.append(counter.get_total_flops() // 2)
            return result

    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        Counting(model).run(*(batch[name] for name in names))
    yield from products


def signal_to_noise(model: nn.Module, integer: Callable[..., Any], batches: Sequence[Inputs]) -> dict[str, float]:
    """Return the ratio in dB for every float output of both models."""
    signal: Counter[str] = Counter()
    noise: Counter[str] = Counter()
    with torch.no_grad():
        for batch in batches:
            expected, actual = dict(named_tensors(model(**batch))), dict(named_tensors(integer(**batch)))
            for name, tensor in expected.items():
                if tensor.is_floating_point() and name in actual:
                    signal[name] += float(tensor.double().square().sum())
                    noise[name] += float((tensor.double() - actual[name].double()).square().sum())
    return {name: _decibel(signal[name], noise[name]) for name in signal}


def _decibel(signal: float, noise: float) -> float:
    return float("inf") if noise == 0 else 10 * float(torch.log10(torch.tensor(signal / noise)))


def named_tensors(output: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested result, by the way there."""
    for path, leaf in torch.utils._pytree.tree_flatten_with_path(output)[0]:
        if isinstance(leaf, Tensor):
            yield name + torch.utils._pytree.keystr(path), leaf
