"""Shared code of the layers over other toolkits: tables of unsupported names, with the reason and what to call instead."""

from __future__ import annotations

import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fxquant.errors import ConfigurationError, FxQuantError


class Refusal(NamedTuple):
    """The reason why a name of another toolkit is not supported, and the remedy."""

    because: str
    remedy: str

    def error(self, what: str) -> ConfigurationError:
        """Return the error with this reason and remedy."""
        return ConfigurationError(what, because=self.because, remedy=self.remedy)


def refusing(module: str, table: Mapping[str, Refusal]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module: ConfigurationError for a name of the table, AttributeError for any other."""

    def find(name: str) -> Any:
        if name in table:
            raise table[name].error(f"{module} has no {name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def refuse_given(called: str, given: Mapping[str, Any], usual: Mapping[str, Any], table: Mapping[str, Refusal]) -> None:
    """Raise ConfigurationError for an argument without meaning here whose value is not its usual one."""
    for name, value in given.items():
        if value is not None and value != usual.get(name):
            raise table[name].error(f"{called}({name}=…) cannot be done")


def run_program(called: str, install: Callable[[bool], None], arguments: Sequence[str]) -> int:
    """Run a program with the mirrored package installed; return 0, or 1 for an error of fxquant, printed with the program's line.

    FXQUANT_DEBUG=1 shows the whole traceback. The log is printed from INFO on, because it reports how arguments were interpreted.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m {called} program.py [arguments]\n\nruns an unedited program with fxquant in place of the toolkit")
        return 0 if arguments else 2
    program = Path(arguments[0])
    if not program.is_file():
        print(
            ConfigurationError(f"the program {program} was not found", because="it is the path of a Python file", remedy="pass one"),
            file=sys.stderr,
        )
        return 2
    logging.getLogger("fxquant").setLevel(logging.INFO)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    install(True)
    sys.argv[:] = list(arguments)
    sys.path.insert(0, str(program.resolve().parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    except FxQuantError as error:
        if os.environ.get("FXQUANT_DEBUG", "0") != "0":
            raise
        print(error, file=sys.stderr)
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(program)]
        if own:
            print(f"  program  {program}:{own[-1].lineno}: {own[-1].line}", file=sys.stderr)
        return 1
    return 0
