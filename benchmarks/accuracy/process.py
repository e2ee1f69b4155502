"""One row of one peer, in the process of an environment of its own: reads the checkpoint, writes the outputs.

python -m benchmarks.accuracy.process PEER TASK NETWORK SEED SETTING MODE CACHE OUTPUT
"""

import sys
from pathlib import Path

import torch

from benchmarks.accuracy.floats import checkpoint, outputs_of
from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.settings import SETTINGS


def main() -> None:
    name, task, network, seed, setting, mode, cache, output = sys.argv[1:]
    torch.set_num_threads(1)
    trained = checkpoint(task, network, int(seed), Path(cache))
    quantized = PEERS[name].quantize(trained, SETTINGS[setting], mode)
    torch.save(outputs_of(quantized, trained.data.test_inputs), output)


if __name__ == "__main__":
    main()
