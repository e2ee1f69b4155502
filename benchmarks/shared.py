"""Shared parts of benchmarks: tables, limits of time, timings taken in turn, rows kept in a file, and torch.ao's integer models."""

import copy
import gc
import json
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn

Result = TypeVar("Result")


def table_of(*columns: str, labels: int = 1, title: str | None = None) -> Table:
    """Return an empty table whose first columns are labels, and the others numbers on the right."""
    table = Table(*columns, title=title)
    for column in table.columns[labels:]:
        column.justify = "right"
    return table


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Inside, TimeoutError after so many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a function, and the seconds that it took."""
    gc.collect()
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def in_turn(
    forms: Mapping[str, Callable[[], Any]], runs: int, warm: int = 2, wait: Callable[[], None] = lambda: None, twice: bool = False
) -> dict[str, list[float]]:
    """Return seconds of warm runs of each form, taken in turn, so that other work of the machine slows all forms alike.

    warm   rounds before the first that counts
    wait   returns when a device has finished its work
    twice  whether the second of two runs counts, after the first has filled the caches again
    """
    times: dict[str, list[float]] = {name: [] for name in forms}
    for index in range(runs + warm):
        for name, form in forms.items():
            if twice:
                form()
            wait()
            start = time.perf_counter()
            form()
            wait()
            if index >= warm:
                times[name].append(time.perf_counter() - start)
    return times


def keep_row(path: Path | None, row: Any) -> None:
    """Append a row, which is a dataclass, to a file of rows."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the fields of the rows in a file; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def quantized_engine(engine: str) -> Iterator[None]:
    """Inside, an engine computes PyTorch's quantized operators."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def torch_ao(model: nn.Module, batches: list[Tensor], engine: str = "x86") -> nn.Module:
    """Return torch.ao's integer model of FX graph mode, in the default configuration of an engine, calibrated with the batches."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(engine), (batches[0],))
        for batch in batches:
            prepared(batch)
        converted: nn.Module = convert_fx(prepared)
        converted(batches[0])
        return converted
