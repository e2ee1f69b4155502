"""One cell of one peer, in the process of an environment of its own.

python -m benchmarks.real.process PEER NETWORK SETTING SAMPLES OUTPUT
"""

import sys
from dataclasses import replace

import torch

from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.settings import CALIBRATION, SETTINGS
from benchmarks.real.measure import outputs_of
from benchmarks.real.networks import NETWORKS


def main() -> None:
    peer, name, setting, samples, output = sys.argv[1:]
    torch.set_num_threads(1)
    network = replace(NETWORKS[name], tested=int(samples))
    quantized = PEERS[peer].quantize(network, SETTINGS[setting], CALIBRATION)
    torch.save(outputs_of(quantized, network.data.test_inputs), output)


if __name__ == "__main__":
    main()
