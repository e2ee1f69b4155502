"""Run an unedited program written for torch.ao.quantization: `python -m fxquant.compat.torch_ao program.py [arguments]`."""

import sys

from fxquant.compat.common import run_program
from fxquant.compat.torch_ao import install

if __name__ == "__main__":
    sys.exit(run_program("fxquant.compat.torch_ao", install, sys.argv[1:]))
