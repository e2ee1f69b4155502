"""What the layers over other toolkits share: what has no equal here, as tables of a name, why, and what to call instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fxquant.errors import ConfigurationError


class Refusal(NamedTuple):
    """Why something of another toolkit is not here, and what to do instead."""

    because: str
    remedy: str

    def error(self, what: str) -> ConfigurationError:
        """The error that says so."""
        return ConfigurationError(what, because=self.because, remedy=self.remedy)


def refusing(module: str, table: Mapping[str, Refusal]) -> Callable[[str], Any]:
    """A `__getattr__` for a module: ConfigurationError for a name of the table, AttributeError for any other."""

    def find(name: str) -> Any:
        if name in table:
            raise table[name].error(f"{module} has no {name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def refuse_given(called: str, given: Mapping[str, Any], usual: Mapping[str, Any], table: Mapping[str, Refusal]) -> None:
    """Raise ConfigurationError for an argument that has another value than its usual one, and no meaning here."""
    for name, value in given.items():
        if value is not None and value != usual.get(name):
            raise table[name].error(f"{called}({name}=…) cannot be done")
