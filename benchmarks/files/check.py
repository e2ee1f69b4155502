"""Read damaged files; the outcome of each is refused, read or a defect."""

import atexit
import copy
import functools
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.files.mutations import mutated_archive, mutated_bytes, mutated_onnx, mutated_text
from benchmarks.shared import at_most
from fxquant.analysis.sample import batches_from
from fxquant.reporting.inspection import describe, read

SECONDS = 60  # for one file: a hang, not a slow machine
MEMORY = 16 * 2**30  # bytes that a process may ask for


class Outcome(NamedTuple):
    """The outcome of one mutation: "refused", "read", or a defect: "error", "hang", "import", "crash"."""

    kind: str
    seed: int
    result: str
    told: str


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norm(self.conv(x))).mean((2, 3))).softmax(-1)


@functools.cache
def compiled() -> tuple[fxq.results.Result, Tensor]:
    """A small model, and a batch for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batch = torch.randn(2, 2, 5, 5)
        return fxq.quantize(Network().eval(), [batch], target="nash-e", show_progress=False), batch


@functools.cache
def original(kind: str) -> bytes:
    """A file of a kind as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"original{KINDS[kind][0]}"
        if kind == "qconfig":
            wide = fxq.QConfig(fxq.ActivationConfig("int16", observer=fxq.observers.PercentileObserver), fxq.WeightConfig("int4"))
            mapping = fxq.QConfigMapping().set_module_name("head", wide).set_object_type(nn.Conv2d, None)
            return fxq.save_qconfig(
                mapping.set_module_name_regex("he.*", fxq.QConfig()).set_module_name_object_type_order("", F.silu, 0, None), path
            ).read_bytes()
        result, _ = compiled()
        if kind == "manifest":
            return fxq.export.export_segments(result.integer, Path(folder)).read_bytes()
        if kind in RESUMED:
            RESUMED[kind](path)
            return path.read_bytes()
        if kind.startswith("data"):
            values = compiled()[1].numpy()
            (np.save if kind == "data-npy" else np.savez)(path, values)
            return path.read_bytes()
        if kind == "traced":
            return fxq.save(fxq.trace(Network().eval(), compiled()[1]), path).read_bytes()
        if kind.startswith("onnx"):
            return result.export(path, style="fast" if kind == "onnx-fast" else "exact").read_bytes()
        saved = {"prepared": result.prepared, "integer": result.integer, "observations": fxq.observers.observations(result.prepared)}
        return fxq.save(saved[kind], path).read_bytes()


def _read_model(path: Path) -> None:
    loaded = fxq.load(path)
    if not isinstance(loaded, fxq.observers.Observations):
        fxq.explain(loaded)
        fxq.text(loaded)


def _read_onnx(path: Path) -> None:
    fxq.export.onnx_metadata(path)
    describe(read(path))
    result, batch = compiled()
    fxq.verify(result.integer, path, [batch], show_progress=False)


@functools.cache
def _segments() -> Path:
    """A folder with the files that a manifest names."""
    folder = Path(tempfile.mkdtemp(prefix="segments-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fxq.export.export_segments(compiled()[0].integer, folder).parent


def _run_segments(path: Path) -> None:
    shutil.copy(path, _segments() / "manifest.json")
    fxq.export.run_segments(_segments(), compiled()[1])


def _search(path: Path) -> None:
    result, batch = compiled()
    fxq.search.sensitivity(result.prepared, [batch], options=fxq.Options(widths=(8,), checkpoint=path), show_progress=False)


def _learn(path: Path) -> None:
    result, batch = compiled()
    fxq.tuning.adaround(copy.deepcopy(result.prepared), [batch], steps=2, options=fxq.Options(checkpoint=path), show_progress=False)


RESUMED = {"search": _search, "learning": _learn}


def _read_data(path: Path) -> None:
    batches_from(path, compiled()[0].integer, 2)


Mutate = Callable[[bytes, random.Random], bytes]
Read = Callable[[Path], Any]
KINDS: dict[str, tuple[str, Mutate, Read]] = {
    "prepared": (".fxq", mutated_archive, _read_model),
    "integer": (".fxq", mutated_archive, _read_model),
    "observations": (".fxq", mutated_archive, _read_model),
    "qconfig": (".json", mutated_text, fxq.load_qconfig),
    "onnx": (".onnx", mutated_onnx, _read_onnx),
    "onnx-fast": (".onnx", mutated_onnx, _read_onnx),
    "traced": (".fxq", mutated_archive, _read_model),
    "manifest": (".json", mutated_text, _run_segments),
    "search": (".json", mutated_text, _search),
    "learning": (".safetensors", mutated_bytes, _learn),
    "data-npy": (".npy", mutated_bytes, _read_data),
    "data-npz": (".npz", mutated_bytes, _read_data),
}


def check(kind: str, seeds: range, folder: Path, limit_memory: bool = True) -> list[Outcome]:
    """Run the mutations of a kind of file one by one, in this process, and return their outcomes."""
    if limit_memory:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    suffix, mutate, load = KINDS[kind]
    return [_checked(kind, seed, suffix, mutate, load, folder) for seed in seeds]


def _checked(kind: str, seed: int, suffix: str, mutate: Mutate, load: Read, folder: Path) -> Outcome:
    path = folder / f"damaged{suffix}"
    path.write_bytes(mutate(original(kind), random.Random(f"{kind} {seed}")))
    before, start = set(sys.modules), time.perf_counter()
    result, detail = "read", ""
    try:
        with at_most(SECONDS):
            load(path)
    except fxq.FxQuantError as error:
        result, detail = "refused", error.what
    except TimeoutError:
        result, detail = "hang", f"after {time.perf_counter() - start:.0f} s"
    except Exception as error:
        result, detail = "error", f"{type(error).__name__}: {error}"
    new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in KNOWN}
    if new:
        return Outcome(kind, seed, "import", ", ".join(sorted(new)))
    return Outcome(kind, seed, result, detail)


KNOWN = {"encodings", "onnx", "onnxruntime", "numpy", "torch", "fxquant", "rich"}  # whose parts are imported when they are first needed
