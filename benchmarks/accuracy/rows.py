"""Rows of the table: a row is a checkpoint's task and network in a setting and a mode; its results are kept by a hash of their inputs."""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache as once
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from benchmarks.accuracy import environments, methods, settings, training
from benchmarks.accuracy.floats import Checkpoint, checkpoint, outputs_of, sqnr
from benchmarks.accuracy.networks import NETWORKS
from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.settings import MODES, SETTINGS, TRAINING
from benchmarks.accuracy.tasks import TASKS

OURS = "fxquant"
NOT_RUN = "not run"
STILL_FLOAT = 70.0  # dB; no 8-bit model is so near to float: one that is was not quantized
ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """A line of the table."""

    mode: str
    setting: str
    task: str
    network: str


@dataclass(frozen=True)
class Result:
    """Scores of a method and of the float network for one seed's checkpoint, and SQNR in dB; or the reason why there are none."""

    method: str
    seed: int
    unquantized: float = 0.0
    score: float = 0.0
    sqnr: float = 0.0
    reason: str = ""

    @property
    def drop(self) -> float:
        return self.unquantized - self.score


def rows(task: list[str], network: list[str], setting: list[str], mode: list[str]) -> list[Row]:
    """Every row of these names: a network with the tasks that suit it."""
    return [Row(m, s, t, n) for m in MODES if m in mode for s in setting for t in task for n in network if NETWORKS[n].suits(TASKS[t])]


def measure(row: Row, method: str, seed: int, cache: Path, *, again: bool = False, kept_only: bool = False) -> Result:
    """The result of the method; what was found before is read, unless it depends on what has changed, or is measured `again`.

    A peer that is missing, or failed, is asked again. With `kept_only`, nothing is measured: what is not kept was not run.
    """
    trained = checkpoint(row.task, row.network, seed, cache)
    path = cache / "results" / f"{trained.path.stem}-{_key(row, method, cache)}.json"
    if path.exists() and not again:
        previous = Result(**json.loads(path.read_text(encoding="utf-8")))
        if kept_only or not previous.reason:
            return previous
    if kept_only:
        refused = None if method == OURS else PEERS[method].refuses(SETTINGS[row.setting], row.mode)
        return Result(method, seed, reason=refused or NOT_RUN)
    expected = float_outputs(trained)
    outputs: Tensor | str
    if method == OURS:
        outputs = methods.quantize(trained, SETTINGS[row.setting], row.mode)
    else:
        outputs = environments.outputs(PEERS[method], trained, SETTINGS[row.setting], row.mode, cache)
    result = judged(method, trained, expected, outputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def judged(method: str, trained: Checkpoint, expected: Tensor, outputs: Tensor | str) -> Result:
    """The result of these outputs; outputs that are float's own are none."""
    score = trained.score(expected)
    if isinstance(outputs, str):
        return Result(method, trained.seed, score, reason=outputs)
    ratio = sqnr(expected, outputs)
    if not ratio < STILL_FLOAT:
        return Result(method, trained.seed, score, reason=f"SQNR of {ratio:.0f} dB: it was not quantized")
    return Result(method, trained.seed, score, trained.score(outputs), ratio)


@once
def float_outputs(trained: Checkpoint) -> Tensor:
    """Return the outputs of the float network for the whole test."""
    return outputs_of(trained.load(), trained.data.test_inputs)


def _key(row: Row, method: str, cache: Path) -> str:
    """Return the inputs of a result beside the checkpoint; a peer's result depends neither on fxquant nor on its target."""
    setting = SETTINGS[row.setting]
    steps = [inspect.getsource(part) for part in (settings, training)] if row.mode == TRAINING else []
    common = (row.mode, method, setting.asked, steps)
    own: tuple[object, ...]
    if method == OURS:
        own = (setting.target, _sources(), inspect.getsource(methods))
    else:
        peer = PEERS[method]
        module = importlib.import_module(f"benchmarks.accuracy.peers.{peer.module}")
        own = (environments.version(peer, cache), repr(peer.options), inspect.getsource(module))
    return hashlib.sha256(repr((common, own)).encode()).hexdigest()[:12]


@once
def _sources() -> str:
    """A digest of fxquant itself."""
    digest = hashlib.sha256()
    for package in ("fxquant", "passes", "backends"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def every(
    chosen: list[Row], chosen_methods: list[str], seeds: list[int], run: Callable[[Row, str, int], Result]
) -> Iterator[tuple[Row, Result]]:
    """The results row by row, ours first."""
    for row in chosen:
        for method in chosen_methods:
            for seed in seeds:
                yield row, run(row, method, seed)
