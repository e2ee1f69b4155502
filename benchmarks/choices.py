"""Digests of all that calibration and the searches choose, a line each: `diff` tells two checkouts apart. With torchrun, of several ranks.

python -m benchmarks.choices [--networks ResNet ViT] [--targets bayes-e x86] [--calls calibrate tune] > before.txt
"""

import argparse
import hashlib
import logging
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from tests.counts.networks import NETWORKS, built

CALLS = ("calibrate", "tune")
SAMPLES = (4, 16)  # batches, and samples of each


def chosen(network: str, target: str, call: str, rank: int, ranks: int) -> Iterator[str]:
    """Yield the lines of a call's log, and for each operator the digest of its observers, scale, rounding, correction and factors."""
    messages: list[str] = []
    logger, handler = logging.getLogger("fxquant"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model, batches = built(network)[0], torch.randn(*SAMPLES, *NETWORKS[network].item, generator=torch.Generator().manual_seed(1)).unbind()
    if call == "calibrate":
        prepared = fxq.calibrate(fxq.prepare(model, batches[0], target), batches[rank::ranks], show_progress=False)
    else:
        prepared = fxq.tune(model, batches, target, tolerance=0.0, steps=4, show_progress=False).prepared
    logger.removeHandler(handler)
    yield from (line for message in messages for line in message.splitlines() if not re.search(r" took \d", line))
    for name, operator in quantized_operators(prepared).items():
        hasher = hashlib.sha256()
        for path, tensor in [*operator.named_buffers(), *operator.weight_quantizer.named_parameters()]:
            hasher.update(path.encode() + tensor.detach().contiguous().numpy().tobytes())
        yield f"{name} {hasher.hexdigest()[:12]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--targets", nargs="+", default=["bayes-e", "bernoulli2", "x86"])
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=["calibrate"])
    asked = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    own = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for network, target, call in ((n, t, c) for n in asked.networks for t in asked.targets for c in asked.calls):
        for line in chosen(network, target, call, *own):
            print(f"{network}, {target}, {call}, rank {own[0]} of {own[1]}: {line}", flush=True)
