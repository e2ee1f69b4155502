"""The command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fxquant.errors import FxQuantError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 if something is not equal, 2 for an error the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except FxQuantError as error:
        print(f"fxquant: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxquant", description="Quantization whose numbers are exact: training, integer graph and ONNX agree bit for bit."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a small network on real digits, quantize it, export it, and prove the bits equal")
    demo.add_argument("--target", default="bayes-e", help="march or chip to compile for (default: bayes-e)")
    demo.add_argument("--out", default="fxquant-demo", help="directory for model.onnx and the graphs (default: fxquant-demo)")
    demo.set_defaults(run=_demo)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from fxquant.demo.run import run_demo  # pulls in the training code, which no other command needs

    outcome = run_demo(options.target, options.out)
    return 0 if outcome.report and outcome.float_nodes == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
