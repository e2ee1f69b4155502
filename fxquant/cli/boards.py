"""The command that checks a board: conformance."""

from __future__ import annotations

import argparse
from typing import Any

from fxquant.cli.options import command, path
from fxquant.errors import ConfigurationError


def add_conformance(commands: Any) -> None:
    """Add the command `conformance`."""
    conformance = command(
        commands,
        "conformance",
        "check that a board computes fxquant's integers: write probe programs for it, and compare its results",
        "With --target, write a kit: a program for each operator, compiled by the vendor's tool. Copy KIT/board to the board, and run\n"
        "`python3 run.py` there. With --results, say per operator whether every integer is equal, or how many differ and which known\n"
        "variant of the arithmetic fits; conformance.json is written into DIR. The exit status is 0 if every operator that runs on the\n"
        "BPU is equal, and 1 if one differs or was not run.",
    )
    conformance.add_argument("kit", type=path, metavar="KIT", help="the folder of the kit")
    conformance.add_argument(
        "--target", metavar="MARCH", help="write the kit for this march or chip: bernoulli2, bayes, bayes-e, x3, x5, …"
    )
    conformance.add_argument("--dtype", nargs="+", metavar="DTYPE", help="dtypes of activations of --target: int8, int16 (default: int8)")
    conformance.add_argument("--operators", nargs="+", metavar="NAME", help="operators of --target (default: all)")
    conformance.add_argument(
        "--results", type=path, metavar="DIR", help="compare the results that the board's run.py wrote into this folder"
    )
    conformance.add_argument(
        "--simulate", type=path, metavar="DIR", help="let the vendor's simulator write the results into this folder first, and compare them"
    )
    conformance.set_defaults(run=_conformance)


def _conformance(options: argparse.Namespace) -> int:
    import fxquant as fxq

    asked = [name for name in ("target", "results", "simulate") if getattr(options, name) is not None]
    if len(asked) != 1:
        raise ConfigurationError(
            "the request is not clear",
            because="--target writes a kit, --results and --simulate compare results"
            + (f"; given are --{' and --'.join(asked)}" if asked else ""),
            remedy="give one of them",
        )
    if options.target is None:
        unused = [name for name in ("dtype", "operators") if getattr(options, name) is not None]
        if unused:
            raise ConfigurationError(
                f"--{unused[0]} means nothing here", because="the kit was written for its operators and dtypes", remedy="leave it out"
            )
        folder = options.results if options.simulate is None else fxq.simulate_conformance(options.kit, options.simulate)
        found = fxq.check_conformance(options.kit, folder)
        print(found)
        print(found.to_json(folder / "conformance.json"))
        return 0 if found else 1
    print(fxq.conformance_kit(options.kit, options.target, dtypes=options.dtype or ["int8"], operators=options.operators))
    return 0
