"""Implementations of Horizon's names over fxquant's, which the tables of `fxquant.compat.horizon` refer to; here global settings.

The march that models are prepared for, and the behaviour of their batch norms.
"""

import enum
from typing import Any

from fxquant import backends
from fxquant.compat.common import refusals, refused, unknown
from fxquant.support.arguments import checked

__version__ = "3.3.4"  # the plugin release whose names are served: programs compare it before they import

UNKNOWN = refusals("march")
NAMES = ["bernoulli", "bernoulli2", "bayes", "bayes-e", "bayes-a825-03", "nash", "nash-b", "nash-e", "nash-h", "nash-m", "nash-p", "meta"]
SPELLED = {name.upper().replace("-", "_"): name for name in NAMES}
March = type("March", (), SPELLED | {spelled.title(): name for spelled, name in SPELLED.items()})  # the marches by Horizon's names

_march: list[str] = []


def set_march(march: Any) -> None:
    """Set the march to prepare for: a name of `March`, or any other target name. Raises UnknownTarget or ConfigurationError."""
    if isinstance(march, str) and march in UNKNOWN:
        raise UNKNOWN[march].error(f"the march {march!r} is not known")
    backends.get(march)
    _march[:] = [march]


def get_march() -> str | None:
    """Return the march that was set; None before that."""
    return _march[0] if _march else None


def required(called: str) -> str:
    """Return the march. Raises ConfigurationError if none was set."""
    if not _march:
        raise refused("set_march", called=called)
    return _march[0]


def is_nash_series(march: Any) -> bool:
    """Return whether a march belongs to nash."""
    return str(getattr(march, "value", march)).startswith("nash")


class QATMode(enum.Enum):
    """The behaviour of batch norms while training, as `batch_norm` of `fxquant.prepare`."""

    FuseBN = "folded"
    WithBN = "live"
    WithBNReverseFold = "live"  # folding is a function of weight and statistics in every state


_qat_mode = [QATMode.FuseBN]


@checked()
def set_qat_mode(mode: QATMode) -> None:
    """Set the behaviour of batch norms while training, for models that are prepared after this call."""
    if not isinstance(mode, QATMode):
        raise unknown("mode", mode, "FuseBN, WithBN or WithBNReverseFold of QATMode")
    _qat_mode[:] = [mode]


def get_qat_mode() -> QATMode:
    """Return the mode that was set; FuseBN by default."""
    return _qat_mode[0]
