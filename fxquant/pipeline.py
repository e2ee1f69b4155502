"""Running passes: the loop, and its debug output.

A pass is a function `(gm, context) -> int` that rewrites the graph in place and returns how many changes it
made. The debug dial: `FXQUANT_DEBUG` 1 (a line per pass), 2 (the graph after each pass that changed it),
3 (every rewrite and near-miss); `FXQUANT_DUMP` a directory for the graph after each pass.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from fxquant.analysis.text import text
from fxquant.errors import ConfigurationError
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.stage import Stage, verify_stage
from fxquant.quantization.spec import QConfig, QConfigMapping, Rule
from fxquant.support import logger
from fxquant.support.arguments import FOLDER, KINDS, accepted, of_environment, shown
from fxquant.support.files import write_file
from fxquant.support.progress import progress
from fxquant.target import Target


@dataclass
class Context:
    """The information that every pass receives besides the graph."""

    target: Target
    qconfig: QConfigMapping
    options: Options = DEFAULTS  # those of `prepare`
    debug: int = 0
    # The QConfigs on modules of the traced model itself; those of its source model are on the nodes.
    attached: Mapping[str, QConfig | None] = field(default_factory=dict)
    rewrites: list[str] = field(default_factory=list)
    kernels: Sequence[Any] = ()  # the available kernels, which report where they can replace primitives
    open: set[Rule] = field(default_factory=set)  # the rules that give outputs neither a dtype nor a scale, as `rules.match` finds them

    def say(self, line: str) -> None:
        """Report a rewrite, or a near-miss with its reason; shown at debug level 3."""
        if self.debug >= 3:
            print(f"    {line}", file=sys.stderr)

    def not_done(self, gm: fx.GraphModule, sentence: str) -> None:
        """Record that a request of the user is not done; `explain` ends with these sentences, and each is logged."""
        gm.meta.setdefault("not_done", []).append(sentence)
        logger.warning("%s", sentence)


@dataclass(frozen=True)
class Pass:
    """A pass of the pipeline: its function, and the stage that the graph reaches by it."""

    function: Callable[[fx.GraphModule, Context], int]
    reaches: Stage
    own: bool = False  # whether it is the user's: its graph is verified against the stage's table whatever number of changes it returns

    @property
    def name(self) -> str:
        """Return module.verb, as in "batchnorm.fold"."""
        return f"{self.function.__module__.rsplit('.', 1)[-1]}.{getattr(self.function, '__name__', type(self.function).__name__)}"


@dataclass
class Dial:
    """The amount of output: `debug` 0–3, and the directory for dumps of graphs. The environment sets the defaults."""

    debug: int
    dump: Path | None
    count: int = 0

    @staticmethod
    def of(options: Options) -> "Dial":
        """Return the dial requested by the options, or else by the environment. Raises ConfigurationError if that cannot be used."""
        asked = of_environment("FXQUANT_DEBUG", "0", KINDS["FXQUANT_DEBUG"]) if options.debug is None else options.debug
        chosen = options.dump if options.dump is not None else os.environ.get("FXQUANT_DUMP") or None
        return Dial(asked, None if chosen is None else Path(accepted("the environment", "FXQUANT_DUMP", chosen, FOLDER)))

    def show(self, name: str, gm: fx.GraphModule, changes: int, milliseconds: float) -> None:
        """Show the result of a pass; called after every pass."""
        if self.debug >= 1:
            print(
                f"{self.count:02d} {name:<22} {changes:6d} rewrites {len(gm.graph.nodes):7d} nodes {milliseconds:9.1f} ms", file=sys.stderr
            )
        if self.debug >= 2 and changes:
            print(text(gm), file=sys.stderr)
        self.write(name, gm)

    def write(self, name: str, gm: fx.GraphModule) -> None:
        """Write the graph as NN-name.txt if dumping is on."""
        if self.dump is not None:
            write_file(self.dump / f"{self.count:02d}-{name}.txt", text(gm))
        self.count += 1


def run(gm: fx.GraphModule, passes: Sequence[Pass], context: Context, dial: Dial, until: str | Stage | None = None) -> bool:
    """Run the passes over the graph in place, verifying after each one that changed it; the graph is recompiled once, at the end.

    `until` names the last pass to run, or the stage to stop at. Return True if it was met. An exception raised
    in a pass names the pass, and a graph is shown and dumped before it is verified.
    """
    for step in progress(passes, len(passes), "compiling"):
        start = time.perf_counter()
        try:
            changes = step.function(gm, context)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"raised by pass {step.name}")
            raise
        if step.own:
            changes = _counted(step, changes)
        before, gm.meta["stage"] = gm.meta.get("stage"), step.reaches.name
        dial.show(step.name, gm, changes, (time.perf_counter() - start) * 1e3)
        if changes or step.own or before != step.reaches.name:  # else the graph is unchanged since the previous pass
            verify_stage(gm, step.reaches, step.name)
        if until == step.name or (until is step.reaches and step is [each for each in passes if each.reaches is until][-1]):
            gm.recompile()
            return True
    gm.recompile()
    return False


def _counted(step: Pass, changes: Any) -> int:
    if isinstance(changes, bool) or not isinstance(changes, int) or changes < 0:
        because = "a pass returns how many changes it made"
        remedy = "return an integer: 0 where the graph is unchanged"
        raise ConfigurationError(f"the pass {step.name} returned {shown(changes)}", because=because, remedy=remedy)
    return changes


def with_own(passes: Sequence[Pass], own: Mapping[str, Sequence[Callable[..., int]]]) -> tuple[Pass, ...]:
    """Return the pipeline with the user's passes, each after the pass that its key names. Raises ConfigurationError for unknown names."""
    unknown = [name for name in own if name not in [step.name for step in passes]]
    if unknown:
        because = f"the passes are {', '.join(step.name for step in passes)}"
        remedy = "name the pass after which yours runs"
        raise ConfigurationError(f"passes={{{unknown[0]!r}: …}} names no pass", because=because, remedy=remedy)
    steps: list[Pass] = []
    for step in passes:
        steps += [step, *(Pass(function, step.reaches, own=True) for function in own.get(step.name, ()))]
    return tuple(steps)


def check_until(until: str | Stage | None, passes: Sequence[Pass]) -> None:
    """Raise ConfigurationError if `until` is neither the name of a pass nor a stage that the passes reach."""
    names, stages = [step.name for step in passes], dict.fromkeys(step.reaches for step in passes)
    reached = stages if isinstance(until, Stage) else names if isinstance(until, str) else ()
    if until is not None and until not in reached:
        because = f"the passes are {', '.join(names)}, and the stages they reach {', '.join(stage.name for stage in stages)}"
        remedy = "pass the name of a pass, or a fxq.results.Stage that is reached"
        raise ConfigurationError(f"until={shown(until)} names no pass", because=because, remedy=remedy)
