"""Reading of the compiler's log: its progress, and the reason of a failure as an error with the layer and the user's source line."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from fxquant.errors import CompilationError

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
    (r"unsupported model|does not support|not support", "fxq.check names operators beyond the limits; prepare(adapt=True) rewrites some"),
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
        found = MESSAGE.match(line)
        if found:
            inside = found[1] in ("ERROR", "CRITICAL", "FATAL")
            if inside:
                messages.append(found[2].partition("error message:")[2].strip() or found[2])
        elif inside or line.startswith(("ERROR", "FATAL", "unsupported")):
            messages.append(line)
    kept = [line.strip() for line in messages if not NOISE.search(line)]
    if not kept:
        plain = [found[2] if (found := MESSAGE.match(line)) else line for line in lines]
        kept = [line.strip() for line in plain if not NOISE.search(line)][-3:]
    return "\n".join(list(dict.fromkeys(kept))[:LONGEST_REASON]) or "its log is empty"


def layer_of(text: str, layers: Mapping[str, str]) -> str | None:
    """Return the layer that a text names: the first of these names that begins the name of an ONNX node in it."""
    found = {name: re.search(rf"(?<![\w/.]){re.escape(name)}(?=/\w|_quantized|\b(?!\w))", text) for name in layers}
    places = {name: match.start() for name, match in found.items() if match}
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
        text = f"{died}" + (f" behind {begun[-1]!r}" if begun else "") + f"; its last words:\n{text}"
    name = layer_of(text, layers)
    remedy = next((remedy for words, remedy in REMEDIES if re.search(words, text, re.IGNORECASE)), OTHERWISE)
    layer = "" if name is None else f" at layer %{name}"
    return CompilationError(
        f"{program} failed{layer}",
        at=layers.get(name, None) if name is not None else None,
        because=text,
        remedy=remedy if log is None else f"{remedy}\nthe log is {log}",
    )
