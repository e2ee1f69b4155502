"""The command line: the options of a command are next to the function that runs it.

models         quantize, check and conformance
file_commands  inspect, diff, report, segments, export and verify: of files that are there
factories      the model that a command names, and options that commands share
quantizing     the run of `quantize`, its table and its JSON summary
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from fxquant.cli.file_commands import add_diff, add_export, add_inspect, add_report, add_segments, add_verify
from fxquant.cli.models import add_check, add_conformance, add_quantize
from fxquant.errors import FxQuantError
from fxquant.support.arguments import Kind, checked, words
from fxquant.version import __version__

COMMANDS = (add_quantize, add_check, add_inspect, add_diff, add_report, add_segments, add_export, add_conformance, add_verify)

INTERRUPTED, NOT_READ = 130, 141  # the exit statuses that shells know for Ctrl-C, and for output that nobody reads any more
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a full disk, or a broken one, says of output


@checked(arguments=Kind("a list of strings", words).or_none("those of the process"))
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0, 1 if something is not equal or breaks a limit, 2 for an error the user can mend, 130 after Ctrl-C, 141 if the output was closed
    before it was written, as by `| head -1`.
    """
    options = _parser().parse_args(arguments)
    paths = list(sys.path)  # a command that imports a model adds the current folder
    try:
        status: int = options.run(options)
        print(end="", flush=True)
    except FxQuantError as error:
        print(f"fxquant: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxquant: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return NOT_READ
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        _discard_output()
        print(f"fxquant: the output cannot be written\n  because  {error.strerror}\n  remedy   free space", file=sys.stderr)
        return 2
    finally:
        sys.path[:] = paths
    return status


def _discard_output() -> None:
    """Discard Python's buffered output, which it would otherwise try to write again at exit."""
    with suppress(OSError):  # where the output is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxquant",
        description="Quantization whose numbers are exact: training, integer graph and ONNX agree bit for bit.",
        epilog="The exit status is 0, 1 if something is not equal or breaks a limit, 2 for an error, 130 after Ctrl-C, and 141 "
        "if the output was closed. "
        "`fxquant COMMAND --help` says more of a command.",
    )
    parser.add_argument("--version", action="version", version=f"fxquant {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
