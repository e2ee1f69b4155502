"""PyTorch's table of translations to ONNX, built once: its exporter rebuilds it for every export, two thirds of a small one's time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_built: dict[Any, Any] = {}


@contextmanager
def built_once() -> Iterator[None]:
    """Within the context, `torch.onnx.export` takes a copy of the table that an earlier export built for the same opset.

    The exporter has no argument for the table, so the method that builds it is replaced during the context. If a version of PyTorch has
    no such method, nothing happens. One thread at a time may be inside.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        original = ONNXRegistry.__dict__["from_torchlib"]
    except (ImportError, KeyError):  # it is not PyTorch's public interface
        yield
        return

    def from_torchlib(cls: type, *arguments: Any, **keywords: Any) -> Any:
        key = (cls, arguments, tuple(sorted(keywords.items())))
        if key not in _built:
            _built[key] = original.__func__(cls, *arguments, **keywords)
        table = copy.copy(_built[key])
        table.functions = {operator: list(functions) for operator, functions in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]
