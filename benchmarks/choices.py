"""Digests of all that calibration and the searches choose, a line each: `diff` tells two checkouts apart.

python -m benchmarks.choices [--networks ResNet ViT] [--targets bayes-e x86] [--calls calibrate observers tune] [--ranks 2] > before.txt
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.multiprocessing.spawn import spawn

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from tests.counts.networks import NETWORKS, built

CALLS = ("calibrate", "observers", "tune")
BATCHES, SAMPLES = 4, 16


def batches_of(network: str) -> list[Tensor]:
    """Return BATCHES batches (SAMPLES, …) of random numbers of a network's sizes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, *NETWORKS[network].item, generator=generator) for _ in range(BATCHES)]


def lines_of(prepared: fx.GraphModule) -> Iterator[str]:
    """Yield for each operator the digest of its observers, scale, rounding, correction and factors."""
    for name, operator in quantized_operators(prepared).items():
        hasher = hashlib.sha256()
        for path, tensor in [*operator.named_buffers(), *operator.weight_quantizer.named_parameters()]:
            hasher.update(path.encode() + tensor.detach().contiguous().numpy().tobytes())
        yield f"{name} {hasher.hexdigest()[:12]}"


def chosen(network: str, target: str, call: str, rank: int, ranks: int) -> Iterator[str]:
    """Yield the lines of a call's log, and the digests of the model that the call returns."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fxquant")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model, _ = built(network)
    batches, every = batches_of(network)[rank::ranks], batches_of(network)
    try:
        if call == "calibrate":
            prepared = fxq.prepare(model, every[0], target)
            fxq.calibrate(prepared, batches, show_progress=False)
        elif call == "observers":
            prepared = fxq.search.search_observers(model, every, target, show_progress=False).prepared
        else:
            prepared = fxq.tune(model, every, target, tolerance=0.0, steps=4, show_progress=False).prepared
    finally:
        logger.removeHandler(handler)
    yield from (line for message in messages for line in message.splitlines() if not re.search(r" took \d", line))
    yield from lines_of(prepared)


def on_rank(rank: int, folder: str, network: str, target: str, call: str, ranks: int) -> None:
    """Write the lines of one rank into a file in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in chosen(network, target, call, rank, ranks))
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the lines of each network, target and call, after what they are of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--targets", nargs="+", default=["bayes-e", "bernoulli2", "x86"])
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=["calibrate"])
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args(arguments)
    for network, target, call in ((n, t, c) for n in asked.networks for t in asked.targets for c in asked.calls):
        start = f"{network}, {target}, {call}: "
        if asked.ranks == 1:
            for line in chosen(network, target, call, 0, 1):
                print(start + line, flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (folder, network, target, call, asked.ranks), asked.ranks)
            for rank in range(asked.ranks):
                with open(f"{folder}/{rank}", encoding="utf-8") as file:
                    for line in file:
                        print(f"{start}rank {rank}: {line}", end="")


if __name__ == "__main__":
    main()
