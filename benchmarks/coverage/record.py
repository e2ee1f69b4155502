"""A row of the list: a capability in a few words, and a small run that shows whether it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.analysis.layers import left_in_float

WORKS, PART, ABSENT, FAILS = "works", "part", "absent", "fails"


@dataclass(frozen=True)
class State:
    """The state of a capability, and the missing part."""

    state: str
    because: str


def part(because: str) -> State:
    """Return the state of a capability that works but for the given reason."""
    return State(PART, because)


def absent(because: str) -> State:
    """The capability is not there, and why."""
    return State(ABSENT, because)


Try = Callable[["Here"], Any]
ROWS: list[Row] = []


@dataclass
class Row:
    """A capability: its chapter, its words, and what tries it. `run` raises where it is lost, and returns a State where it is not whole."""

    chapter: str
    words: str
    run: Try

    def tried(self, here: Here) -> tuple[State, float]:
        """Return the state of the capability, and the seconds of the run."""
        start = time.perf_counter()
        try:
            outcome = self.run(here)
            state = outcome if isinstance(outcome, State) else State(WORKS, "")
        except Exception as error:  # a capability that is lost is a row, whatever it raised
            lines = (str(error).strip().splitlines() or [type(error).__name__])[0]
            state = State(FAILS, f"{type(error).__name__}: {lines}")
        return state, time.perf_counter() - start


def chapter(name: str, *rows: tuple[str, Try]) -> None:
    """Add the rows of a chapter."""
    ROWS.extend(Row(name, words, run) for words, run in rows)


def sure(condition: Any, because: str = "it is not so") -> None:
    """Raise AssertionError unless the condition holds; an assertion that is an expression."""
    if not condition:
        raise AssertionError(because)


def refused(call: Callable[[], Any], words: str) -> None:
    """Raise AssertionError unless the call is refused by an error of fxquant's that has these words."""
    try:
        call()
    except fxq.FxQuantError as error:
        sure(words in str(error), str(error))
    else:
        raise AssertionError("it is not refused")


class Network(nn.Module):
    """The network of most rows: a convolution with batch norm and residual, a pooling, a linear head."""

    names = ("cat", "dog")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((torch.relu(self.deep(x)) + x).mean((2, 3)))


class Function(nn.Module):
    """A function after a convolution, or alone."""

    def __init__(self, function: Callable[..., Any], after: bool = True) -> None:
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(3, 8, 3, padding=1) if after else nn.Identity()
        self.held = nn.ModuleList([function] if isinstance(function, nn.Module) else [])

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x))


@dataclass
class Here:
    """The context of all rows: live data, one network in its forms, a folder."""

    folder: Path
    batches: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(3)]

    @property
    def x(self) -> Tensor:
        return self.batches[0]

    @cached_property
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = Network()
        with torch.no_grad():
            for batch in self.batches:
                model(batch)
        return model.eval()

    @cached_property
    def result(self) -> fxq.results.Result:
        return self.quantized(self.model)

    def quantized(self, model: nn.Module, target: str = "nash-e", **options: Any) -> fxq.results.Result:
        return fxq.quantize(model.eval(), self.batches, target=target, show_progress=False, **options)

    def prepared(self, target: str = "nash-e", qconfig: Any = None, **options: Any) -> Any:
        prepared = fxq.prepare(self.model, self.x, target, qconfig, **options)
        return fxq.calibrate(prepared, self.batches, show_progress=False)

    def exact(self, prepared: Any) -> fxq.results.Report:
        report = fxq.verify(prepared, fxq.convert(prepared), self.batches[:1], show_progress=False)
        sure(report, str(report))
        return report

    def equal(self, result: fxq.results.Result, **options: Any) -> None:
        """Assert that prepared, integer and ONNX give the same bits."""
        report = result.verify(result.export(self.folder / "row.onnx", style="exact", **options), self.batches[:1])
        sure(report, str(report))
        self.exact(result.prepared)

    def integer(self, *functions: Callable[..., Any], target: str = "bayes-e") -> State | None:
        """Return how many functions of the network's features stay in float on a target, and why; None if all are integer."""
        reasons: list[str] = []
        for function in functions:
            torch.manual_seed(0)
            result = self.quantized(Function(function), target)
            self.exact(result.prepared)
            if any(not layer.integer and not layer.boundary for layer in fxq.inspect.layers(result.integer)):
                reasons.append(left_in_float(fxq.inspect.layers(result.prepared))[0].reason.rpartition(": ")[2])
        return part(f"{len(reasons)} of {len(functions)} stay in float: {'; '.join(dict.fromkeys(reasons))}") if reasons else None
