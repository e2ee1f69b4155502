"""Location and execution of the programs of the vendor's tool; compilation of a folder by them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxquant.backends.horizon.export import HB_MAPPER, LAYERS, OUTPUT, SCRIPT
from fxquant.errors import CompilationError, ConfigurationError
from fxquant.support.arguments import FOLDER, checked
from fxquant.support.files import write_file
from fxquant.support.progress import progress

VARIABLE = "FXQUANT_HORIZON"
HOW_TO_GET = (
    "in a checkout of fxquant, `make vendor` installs it from PyPI for Python 3.10 on x86-64 Linux; "
    f"elsewhere set {VARIABLE} to the folder of its virtual environment, or add its programs to PATH"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m|[\x08\r]")


@dataclass
class Running:
    """A running program: iterate over its lines, then read `code` and `text`."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # its output so far, standard output and error together, without colours
    code: int = 0  # the exit status; negative if a signal ended it

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
            home = next((folder for folder in folders if shutil.which(program, path=str(folder))), None)
            because = f"{VARIABLE} is {named}, and there is no {program} in it"
        else:
            place = shutil.which(program)
            home = None if place is None else Path(place).absolute().parent
            because = f"there is no {program} in PATH, and {VARIABLE} is not set"
        if home is None:
            raise ConfigurationError("the compiler of Horizon's BPUs is not installed", because=because, remedy=HOW_TO_GET)
        return Tool(home)

    def start(self, program: str, *arguments: str, cwd: Path) -> Running:
        """Start a program of the tool with these arguments in its own process group. Raises ConfigurationError if it is missing."""
        place = shutil.which(program, path=str(self.folder))
        if place is None:
            raise ConfigurationError(
                f"{program} is missing", because=f"it is not next to the other programs in {self.folder}", remedy=HOW_TO_GET
            )
        process = subprocess.Popen(
            [place, *arguments],
            cwd=cwd,
            env={**os.environ, "PATH": os.pathsep.join((str(self.folder), os.environ.get("PATH", "")))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        return Running(process)

    def run(self, program: str, *arguments: str, cwd: Path) -> Running:
        """Run a program of the tool to its end. Raises the errors of `start`."""
        return self.start(program, *arguments, cwd=cwd).finish()


# ---- Reading of the compiler's log: its progress, and the reason of a failure as an error with the layer and the user's source line

# The messages of hb_mapper at the beginning of its steps, in order.
STEPS = (
    "Start to prepare the onnx model",
    "Start to optimize the onnx model",
    "Start to calibrate the model",
    "Start to quantize the model",
    "Start to compile the model",
    "End to compile the model",
    "start convert to *.bin file",
)
MESSAGE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,.]+ (\w+) (.*)$")
NOISE = re.compile(r"\[[WIE]:onnxruntime:|^\[[-= ]*\]|^INFO: |^\s*$")
LONGEST_REASON = 6  # lines

# Messages of the tool, and the remedy for each; the first match counts.
REMEDIES = (
    (r"not support(ed)? these cpu operators|cpu operators", "write the operator with others, or keep it out of the model"),
    (r"no node can execute on BPU|at least one .*node", "compile a model of which at least one operator runs on the BPU"),
    (r"unsupported model|does not support|not support", "fxq.check names operators beyond the limits; Options(adapt=True) rewrites some"),
    (r"memory|No space left", "free memory or disk, or compile a smaller model"),
)
OTHERWISE = "read what it says above; fxq.check(model, example_inputs, march) names operators beyond the limits of the march"


def step_of(line: str) -> int | None:
    """Return the step that a line of the log begins."""
    return next((index for index, words in enumerate(STEPS) if words in line), None)


def reason(lines: Sequence[str]) -> str:
    """Return the error messages of a log, or its last lines if there are none."""
    messages: list[str] = []
    inside = False
    for line in lines:
        match = MESSAGE.match(line)
        if match:
            inside = match[1] in ("ERROR", "CRITICAL", "FATAL")
            if inside:
                messages.append(match[2].partition("error message:")[2].strip() or match[2])
        elif inside or line.startswith(("ERROR", "FATAL", "unsupported")):
            messages.append(line)
    relevant = [line.strip() for line in messages if not NOISE.search(line)]
    if not relevant:
        plain = [match[2] if (match := MESSAGE.match(line)) else line for line in lines]
        relevant = [line.strip() for line in plain if not NOISE.search(line)][-3:]
    return "\n".join(list(dict.fromkeys(relevant))[:LONGEST_REASON]) or "its log is empty"


def layer_of(text: str, layers: Mapping[str, str]) -> str | None:
    """Return the key of `layers` that begins the name of an ONNX node in a text, the earliest one and then the longest; None without."""
    matches = {name: re.search(rf"(?<![\w/.]){re.escape(name)}(?=/\w|_quantized|\b(?!\w))", text) for name in layers}
    places = {name: match.start() for name, match in matches.items() if match}
    return min(places, key=lambda name: (places[name], -len(name)), default=None)


def failure(
    program: str, code: int, lines: Sequence[str], layers: Mapping[str, str] | None = None, log: str | None = None
) -> CompilationError:
    """Return the error of a program that failed; `layers` maps names of nodes to source lines, `log` is the file with its output."""
    layers = layers or {}
    text = reason(lines)
    if code < 0:
        died = f"it was ended by {signal.Signals(-code).name}" if -code in list(signal.Signals) else f"it was ended by signal {-code}"
        begun = [STEPS[step] for line in lines if (step := step_of(line)) is not None]
        text = f"{died}" + (f" after {begun[-1]!r}" if begun else "") + f"; its last words:\n{text}"
    name = layer_of(text, layers)
    remedy = next((remedy for words, remedy in REMEDIES if re.search(words, text, re.IGNORECASE)), OTHERWISE)
    remedy = remedy if log is None else f"{remedy}\nthe log is {log}"
    layer, at = ("", None) if name is None else (f" at layer %{name}", layers.get(name))
    return CompilationError(f"{program} failed{layer}", at=at, because=text, remedy=remedy)


# ---- Runs the vendor's compiler on a folder that `export_horizon` wrote ----------------------------------------------
LOG = "hb_mapper.log"


@checked(folder=FOLDER)
def compile_horizon(folder: str | os.PathLike[str], *, show_progress: bool | None = None) -> Path:
    """Compile the folder that `export_horizon` wrote with the vendor's hb_mapper, and return the path of the .bin file.

    The .bin, the compiler's models and its figures are in the folder's model_output, its whole output in hb_mapper.log. It takes three
    seconds for a layer, ten to thirty for a network. Files of an earlier run are replaced; if compilation fails, no old .bin remains.

    Raises ConfigurationError if the tool is not installed or the folder was not written by `export_horizon`, and CompilationError,
    with the layer, the user's source line and the remedy, if the compiler refuses the model or crashes.
    """
    directory = Path(folder).absolute()
    content = _known(directory)
    if content["march"] not in HB_MAPPER.marches:
        because = f"it is for {content['march']}, and hb_mapper compiles for {', '.join(HB_MAPPER.marches)}"
        remedy = f"run {directory / SCRIPT} where hb_compile is installed"
        raise ConfigurationError(f"{directory} cannot be compiled here", because=because, remedy=remedy)
    tool = Tool.find()
    binary = directory / OUTPUT / f"{content['name']}.bin"
    binary.unlink(missing_ok=True)
    running = tool.start("hb_mapper", "makertbin", "--model-type", "onnx", "-c", f"{content['name']}.yaml", cwd=directory)
    try:
        for _ in progress(_steps(running), len(STEPS), f"compiling for {content['march']}", show_progress):
            pass
    finally:
        write_file(directory / LOG, running.text + "\n")
    if running.code or not binary.is_file():
        binary.unlink(missing_ok=True)
        raise failure("hb_mapper", running.code, running.lines, content["layers"], str(directory / LOG))
    return binary


def _steps(running: Running) -> Iterator[int]:
    """Yield one item for each step of the compiler that has begun."""
    last = -1
    for line in running:
        if (step := step_of(line)) is not None and step > last:
            yield from range(last + 1, step + 1)
            last = step


def _known(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / LAYERS).read_text(encoding="utf-8"))
        if not isinstance(content["layers"], dict) or not (directory / f"{content['name']}.yaml").is_file():
            raise KeyError("name")
    except (OSError, ValueError, KeyError, TypeError) as error:
        because = f"it is not a folder that fxq.board.export_horizon wrote: {LAYERS} or what it names is missing or damaged"
        remedy = "pass what fxq.board.export_horizon(integer, folder) returns"
        raise ConfigurationError(f"{directory} cannot be compiled", because=because, remedy=remedy) from error
    return dict(content)
