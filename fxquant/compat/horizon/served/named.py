"""Horizon's predefined qconfigs by name."""

from __future__ import annotations

from typing import Any

from fxquant.compat.horizon.served.qconfig import NAMED


def __getattr__(name: str) -> Any:
    """Return a predefined qconfig."""
    if name in NAMED:
        return NAMED[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
