"""`python -m fxquant.cli`: the command line without its script."""

import sys

from fxquant.cli import main

sys.exit(main())
