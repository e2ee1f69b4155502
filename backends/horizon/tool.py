"""Location and execution of the programs of the vendor's tool."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fxquant.errors import ConfigurationError

VARIABLE = "FXQUANT_HORIZON"
HOW_TO_GET = (
    "in a checkout of fxquant, `make vendor` installs it from PyPI for Python 3.10 on x86-64 Linux; "
    f"elsewhere set {VARIABLE} to the folder of its virtual environment, or add its programs to PATH"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m|[\x08\r]")


@dataclass
class Running:
    """A running program: iterate over its lines, then read `code` and `text`.

    code   the exit status; negative if a signal ended it
    lines  its output so far, standard output and error together, without colours
    """

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    code: int = 0

    def __iter__(self) -> Iterator[str]:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                plain = COLOURS.sub("", line.rstrip("\n"))
                self.lines.append(plain)
                yield plain
            self.code = self.process.wait()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def finish(self) -> Running:
        """Wait until the program ends."""
        for _ in self:
            pass
        return self

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Tool:
    """The folder of the tool's programs."""

    folder: Path

    @staticmethod
    def find(program: str = "hb_mapper") -> Tool:
        """Return the tool that FXQUANT_HORIZON names, or the one in PATH. Raises ConfigurationError if there is none."""
        named = os.environ.get(VARIABLE)
        if named:
            folders = [Path(named).absolute() / "bin", Path(named).absolute()]
            found = next((folder for folder in folders if shutil.which(program, path=str(folder))), None)
            because = f"{VARIABLE} is {named}, and there is no {program} in it"
        else:
            place = shutil.which(program)
            found = None if place is None else Path(place).absolute().parent
            because = f"there is no {program} in PATH, and {VARIABLE} is not set"
        if found is None:
            raise ConfigurationError("the compiler of Horizon's BPUs is not installed", because=because, remedy=HOW_TO_GET)
        return Tool(found)

    def start(self, program: str, *arguments: str, cwd: Path) -> Running:
        """Start a program of the tool with these arguments in its own process group. Raises ConfigurationError if it is missing."""
        place = shutil.which(program, path=str(self.folder))
        if place is None:
            raise ConfigurationError(
                f"{program} is missing", because=f"it is not next to the other programs in {self.folder}", remedy=HOW_TO_GET
            )
        environment = {**os.environ, "PATH": os.pathsep.join((str(self.folder), os.environ.get("PATH", "")))}
        process = subprocess.Popen(
            [place, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        return Running(process)

    def run(self, program: str, *arguments: str, cwd: Path) -> Running:
        """Run a program of the tool to its end. Raises what `start` does."""
        return self.start(program, *arguments, cwd=cwd).finish()
