"""Is a damaged file ever more than an error?   python -m benchmarks.files --mutations 10000

Saved models, traced, prepared and integer, observations, qconfigs, ONNX files, manifests of segments, checkpoints of searches and of
learning, and arrays of data are changed at random, each change from a seed of its own: bits, ends, what their documents say, nodes,
tensors, types. Each is read as its function reads it: an ONNX file is run, a checkpoint is resumed. What is not an FxQuantError, takes
longer than a minute, ends the process, or imports something is listed with its kind and its seed; the exit status is 1 then.
"""

import argparse
import faulthandler
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from benchmarks.files.check import KINDS, Outcome, check, original
from fxquant.support.progress import progress

CHUNK = 250  # mutations of one process before the next one, so that one that ends is found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow")
    parser.add_argument("--kind", choices=KINDS, help="one kind of file; all by default")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else list(KINDS)
    each = -(-options.mutations // len(kinds))
    tally: Counter[tuple[str, str]] = Counter()
    failures: list[Outcome] = []
    chunks = [
        (kind, range(first, min(first + CHUNK, options.seed + each)))
        for kind in kinds
        for first in range(options.seed, options.seed + each, CHUNK)
    ]
    for kind in kinds:
        original(kind)  # every process has them from here
    with tempfile.TemporaryDirectory() as folder:
        for kind, seeds in progress(chunks, len(chunks), "damaging files"):
            for outcome in outcomes(kind, seeds, Path(folder)):
                tally[kind, outcome.result] += 1
                if outcome.result not in ("refused", "read"):
                    failures.append(outcome)
                    print(f"  {outcome.kind} --seed {outcome.seed}: {outcome.result}: {outcome.told}", flush=True)
    for kind in kinds:
        print(f"{kind:14}", ", ".join(f"{count} {result}" for (name, result), count in sorted(tally.items()) if name == kind))
    raise SystemExit(1 if failures else 0)


def outcomes(kind: str, seeds: range, folder: Path) -> list[Outcome]:
    """Run mutations in one new process and return their outcomes; if that process dies, run each mutation in its own process."""
    try:
        with ProcessPoolExecutor(1, get_context("fork"), faulthandler.enable) as pool:
            return pool.submit(check, kind, seeds, folder).result()
    except BrokenProcessPool:
        if len(seeds) == 1:
            return [Outcome(kind, seeds[0], "crash", "the process ended")]
        return [outcome for seed in seeds for outcome in outcomes(kind, range(seed, seed + 1), folder)]


if __name__ == "__main__":
    main()
