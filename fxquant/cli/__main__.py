"""`python -m fxquant.cli`: the command line without its script."""

import sys

from fxquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
