"""Run an unedited program written for Horizon's plugin: `python -m fxquant.compat.horizon program.py [arguments]`."""

import sys

from fxquant.compat.common import run_program
from fxquant.compat.horizon import install

if __name__ == "__main__":
    sys.exit(run_program("fxquant.compat.horizon", install, sys.argv[1:]))
