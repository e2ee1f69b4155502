"""Are the files still the same, byte for byte?   python -m benchmarks.replay --write before.json, then --against before.json

Every network of the zoo is compiled for every target, with int8 and int16 where the target has it, exported in style "exact",
and the SHA-256 of the file is taken. A change that must not change any number is held to that: write the hashes before it,
and compare after it. They belong to one machine and one PyTorch: calibration runs float kernels, which differ between
processors. Each network runs on one thread, so they do not depend on how many there are.
"""

import argparse
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

import fxquant as fxq
from benchmarks.zoo import zoo
from fxquant import backends
from fxquant.support.progress import progress

TARGETS = ("bernoulli", "bernoulli2", "bayes", "bayes-e", "nash-e", "nash-m", "x86", "qnnpack")
DTYPES = ("int8", "int16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(zoo()), choices=list(zoo()), metavar="MODEL", help="which models of the zoo")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES), help="of the activations; targets that do not have one are left out")
    parser.add_argument("--processes", type=int, default=1, help="models compiled at once, each on one thread")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, help="a file for the hashes")
    way.add_argument("--against", type=Path, help="a file of hashes to compare with; the exit status is 1 if one differs")
    options = parser.parse_args()
    pairs = [(t, d) for t in options.targets for d in options.dtype if d in backends.get(t).activations]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        rows = pool.map(partial(hashes, pairs=pairs), options.models)
        by_file = {key: value for row in progress(rows, len(options.models), "networks") for key, value in row.items()}
    if options.write is not None:
        options.write.write_text(json.dumps(by_file, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{len(by_file)} hashes written to {options.write}")
        return
    before: dict[str, str] = json.loads(options.against.read_text(encoding="utf-8"))
    different = [key for key in by_file if before.get(key) != by_file[key]]
    for key in different:
        print(f"{key}: {'differs' if key in before else 'is new'}")
    print(f"{len(by_file) - len(different)} of {len(by_file)} files are the same")
    raise SystemExit(1 if different else 0)


def hashes(name: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    """The hash of a network's file for each target and dtype, by "network, target, dtype"."""
    return {f"{name}, {target}, {dtype}": digest for target, dtype, digest in _hashes(name, pairs)}


def _hashes(name: str, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    torch.set_num_threads(1)
    logging.getLogger("fxquant").setLevel(logging.ERROR)
    entry = zoo()[name]()
    for target, dtype in pairs:
        weight = dtype if dtype in backends.get(target).weights else "int8"
        qconfig = fxq.QConfig(fxq.ActivationConfig(dtype), fxq.WeightConfig(weight))
        prepared = fxq.prepare(entry.model, entry.example_inputs, target, qconfig)
        fxq.calibrate(prepared, entry.calibration_batches, show_progress=False)
        with tempfile.TemporaryDirectory() as directory:
            path = fxq.export_onnx(fxq.convert(prepared), Path(directory) / "model.onnx", style="exact")
            yield target, dtype, hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
