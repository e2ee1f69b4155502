"""Every function that writes files, in a process of its own: on a disk that is full, and killed while it writes.

    python -m tests.shared.file_writers FOLDER

A limit of the size of files stands for the full disk: half of the size of a function's largest file. The kernel refuses what is beyond it,
or kills the process there. Prints a JSON document: for each function what happened, and whether the files of before are unchanged.
"""

import functools
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fxquant as fxq
from fxquant.accuracy.checkpoint import Checkpoint
from fxquant.cli import _parser
from fxquant.cli.quantizing import run

SMALL = 200  # bytes, for a function that has written nothing before


def network() -> nn.Module:
    """Return the same network at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


class World:
    """A model in every form, and what reports are made of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.float, self.batches = network(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
        self.prepared = fxq.prepare(self.float, self.batches[0], "nash-e")
        fxq.calibrate(self.prepared, self.batches)
        self.integer = fxq.convert(self.prepared)
        self.mapping = fxq.QConfigMapping()
        for index in range(100):
            self.mapping = self.mapping.set_module_name(f"layer{index}", None)


def dumped(world: World, folder: Path) -> None:
    """Prepare with the graphs written where the environment says."""
    os.environ["FXQUANT_DUMP"] = str(folder / "environment")
    try:
        fxq.prepare(world.float, world.batches[0], "nash-e")
    finally:
        del os.environ["FXQUANT_DUMP"]


def checkpoint(path: Path) -> None:
    """Write a checkpoint with a document and a tensor."""
    checkpoint_file = Checkpoint(str(path), {"call": "search"})
    checkpoint_file.document, checkpoint_file.tensors = {f"layer{index}": index for index in range(100)}, {"weight": torch.zeros(500)}
    checkpoint_file.write()


def quantized(world: World, folder: Path) -> None:
    """Run the command `quantize`, on samples that are next to the folder."""
    samples = folder.parent / "samples.npy"
    if not samples.exists():
        np.save(samples, torch.randn(10, 3, 8, 8).numpy())
    command = ["quantize", "tests.shared.file_writers:network", "--data", str(samples), "--out", str(folder), "--no-report", "--horizon"]
    run(_parser().parse_args(command))


Writer = Callable[[World, Path], Any]
WRITERS: dict[str, Writer] = {
    "save": lambda world, folder: fxq.save(world.integer, folder / "m.fxq"),
    "save prepared": lambda world, folder: fxq.save(world.prepared, folder / "m.fxq"),
    "save observations": lambda world, folder: fxq.save(fxq.observers.observations(world.prepared), folder / "o.fxq"),
    "save_qconfig": lambda world, folder: fxq.save_qconfig(world.mapping, folder / "q.json"),
    "export_onnx": lambda world, folder: fxq.export_onnx(world.integer, folder / "m.onnx", style="exact"),
    "export_onnx external": lambda world, folder: fxq.export_onnx(world.integer, folder / "m.onnx", style="exact", external_data=True),
    "export_onnx qdq": lambda world, folder: fxq.export_onnx(world.prepared, folder / "m.onnx"),
    "export_onnx float": lambda world, folder: fxq.export_onnx(world.float, folder / "m.onnx", example_inputs=world.batches[0]),
    "export_c": lambda world, folder: fxq.export.export_c(world.integer, folder / "m.c"),
    "export_c external": lambda world, folder: fxq.export.export_c(world.integer, folder / "m.c", external_data=True),
    "export_pt2": lambda world, folder: fxq.export.export_pt2(world.integer, folder / "m.pt2"),
    "export_segments": lambda world, folder: fxq.export.export_segments(world.integer, folder),
    "report": lambda world, folder: fxq.report(world.integer, folder / "r.html"),
    "quantize": quantized,
    "dump": lambda world, folder: fxq.dump(world.integer, folder),
    "prepare dump": lambda world, folder: fxq.prepare(world.float, world.batches[0], "nash-e", options=fxq.Options(dump=folder)),
    "FXQUANT_DUMP": dumped,
    "checkpoint": lambda world, folder: checkpoint(folder / "checkpoint"),
}
# These continue where a file of before ends, and write nothing if it is complete: so they begin without one.
BEGINNINGS: dict[str, Writer] = {
    "distill": lambda world, folder: fxq.tuning.distill(
        world.prepared, world.batches * 4, steps=10, options=fxq.Options(checkpoint=str(folder / "d"))
    ),
    "sensitivity": lambda world, folder: fxq.search.sensitivity(
        world.float, world.batches, "nash-e", options=fxq.Options(checkpoint=str(folder / "s"))
    ),
    "tune": lambda world, folder: fxq.tune(
        world.float, world.batches, "nash-e", tolerance=1e-4, steps=1, options=fxq.Options(checkpoint=str(folder / "t"))
    ),
}


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file below a folder, by relative path, without temporary files of a process that was killed."""
    result = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in result if ".fxquant-" not in str(path)}


def limit(before: Mapping[str, bytes]) -> tuple[int, int]:
    half = max((len(content) for content in before.values()), default=2 * SMALL) // 2
    return half, resource.RLIM_INFINITY


def full(world: World, folder: Path, write: Writer, fresh: bool) -> dict[str, Any]:
    """Write the files of before, and write them again where there is no space."""
    if not fresh:
        write(world, folder)
    before = files(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit(before))
    try:
        write(world, folder)
        outcome = "nothing raised"
    except fxq.FxQuantError as error:
        outcome = str(error).replace(str(folder), "FOLDER")
    except Exception as error:
        outcome = f"raw: {type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = [path.name for path in folder.rglob("*") if path.name.startswith(".fxquant-")]
    return {"full": outcome, "full: unchanged": files(folder) == before, "files": len(before), "left": left}


def killed(world: World, folder: Path, write: Writer) -> dict[str, Any]:
    before = files(folder)

    def die() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # as SIGKILL does, it ends the process where it stands; Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit(before))
        write(world, folder)

    status, _ = in_a_copy(die)
    outcome = "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ else f"ended with status {status}"
    return {"kill": outcome, "kill: unchanged": files(folder) == before}


def in_a_copy(act: Callable[[], object]) -> tuple[int, Any]:
    """Act in a copy of this process, which has no threads yet; returns its status, and what `act` returned there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                json.dump(act(), pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], json.loads(said or "{}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world, by_name = World(), {}
    for name, write in {**WRITERS, **BEGINNINGS}.items():
        place = folder / name
        place.mkdir()
        status, said = in_a_copy(functools.partial(full, world, place, write, name in BEGINNINGS))
        by_name[name] = {"full": f"ended with status {status}", **said, **killed(world, place, write)}
        shutil.rmtree(place)
    print(json.dumps(by_name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
