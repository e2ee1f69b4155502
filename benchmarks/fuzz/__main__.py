"""Does any model break the contract?   python -m benchmarks.fuzz --minutes 10

Models are drawn from fresh seeds: any mixture of operators, shapes, dtypes, configurations and targets, with training in between.
Each is compiled and held to the contract: E1 integer = ONNX, E2 VALIDATE = integer, compared as bytes, E3 TRAIN = VALIDATE, E4 no
accumulator beyond what was proved; saving, loading and copying keep the bits; what is refused is refused by an FxQuantError.

A model that fails is shrunk, and printed as a program that fails in the same way; the exit status is 1 then.
`--models 1 --seed S --target T` draws a model again. Outputs far from the float model are listed as suspicious; they are no
failure, since some functions magnify the smallest error.
"""

import argparse
import faulthandler
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from benchmarks.fuzz.check import CHECKS, FAILED, INVALID, PASSED, REFUSED
from benchmarks.fuzz.generate import TARGETS
from benchmarks.fuzz.loop import Tally, fuzz
from benchmarks.fuzz.spellings import UNWRITTEN
from fxquant.ops import OPERATORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw")
    parser.add_argument("--models", type=int, help="how many models at most")
    parser.add_argument("--target", choices=TARGETS, help="one target; all by default")
    parser.add_argument("--seed", type=int, help="the seed of the first model; the next ones follow")
    parser.add_argument("--without", nargs="*", default=[], choices=list(CHECKS), metavar="CHECK", help="checks that are left out")
    parser.add_argument("--processes", type=int, default=1, help="models drawn at once, each on one thread")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    targets = TARGETS if options.target is None else (options.target,)
    print(f"--seed {seed}", flush=True)
    tally = Tally()
    if options.processes <= 1:
        tally = fuzz(seed, 1, options.minutes, options.models, targets, options.without)
    else:
        models = None if options.models is None else -(-options.models // options.processes)
        with ProcessPoolExecutor(options.processes, get_context("spawn"), faulthandler.enable) as pool:
            parts = [
                pool.submit(fuzz, seed + part, options.processes, options.minutes, models, targets, options.without)
                for part in range(options.processes)
            ]
            for part in parts:
                tally.merge(part.result())
    show(tally)
    raise SystemExit(1 if tally.failures else 0)


def show(tally: Tally) -> None:
    """The tables: models by target, what was refused and why, failures, operators that were never reached."""
    console = Console(width=140)
    models = Table("target", "models", PASSED, REFUSED, FAILED, title="models drawn")
    for target in [*TARGETS, "in all"]:
        counts = {
            kind: sum(n for (t, k), n in tally.kinds.items() if k == kind and target in (t, "in all")) for kind in (PASSED, REFUSED, FAILED)
        }
        if sum(counts.values()):
            models.add_row(target, str(sum(counts.values())), *map(str, counts.values()))
    console.print(models)
    for title, counted in (("refused", tally.refused), (FAILED, tally.failures)):
        if counted:
            table = Table("during", "error", "models", title=title)
            for (during, error), number in counted.most_common():
                table.add_row(during, error, str(number))
            console.print(table)
    names = [record.name for record in OPERATORS.values() if record.name not in UNWRITTEN]
    reached = [name for name in names if tally.operators[name]]
    missing = ", ".join(name for name in names if name not in reached) or "none"
    console.print(f"operators that became integer: {len(reached)} of {len(names)}; not reached: {missing}")
    if tally.suspicious:
        worst = [f"{ratio:.1f} dB (seed {seed}, {target})" for ratio, seed, target in sorted(tally.suspicious)[:12]]
        console.print(f"suspicious, {len(tally.suspicious)} models far from the float model: {', '.join(worst)}")
    invalid = sum(number for (_, kind), number in tally.kinds.items() if kind == INVALID)
    console.print(f"{invalid} drawn models do not run in PyTorch and were left out; memory {' MiB, '.join(map(str, tally.memory))} MiB")


if __name__ == "__main__":
    faulthandler.enable()  # if a runtime crashes, the names of the files have the seed
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
