"""Checkpoints of long calls: after a kill the same call continues from its file, and returns the same bits.

A search's trials are independent of each other, so the ranks of torch.distributed share them: each computes a part, and all gather the
results, which are a few numbers for each trial.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx

import fxquant.calibration.distributed as ranks
from fxquant.errors import ConfigurationError
from fxquant.support.files import check_place, write_file
from fxquant.support.progress import progress
from fxquant.tuning.learning import Learned
from fxquant.tuning.result import TunedLayer
from fxquant.tuning.walk import Samples


def call_of(prepared: fx.GraphModule, samples: Samples, **arguments: Any) -> dict[str, Any]:
    """Return the description of a call that a checkpoint belongs to: its arguments, with the digests of the model and of the samples."""
    return {**arguments, "model": model_digest(prepared), "samples": digest(samples.tensors)}


class Checkpoint:
    """The results of one call so far: `document`, values that JSON can hold by name, and `tensors` by name.

    `write` replaces the file, whole or not at all; without a path, nothing is kept. `call` identifies the call: the function with its
    arguments, the model and the samples. Raises ConfigurationError for the file of another call, and for any other file.

    In a `shared` call the ranks of torch.distributed divide the tasks of `gather`. Rank 0 writes to `path`, rank N to `path`.rank-N, and a
    repeated call, by any number of ranks, reads all of these files.
    """

    def __init__(self, path: str | None, call: Mapping[str, Any], shared: bool = False) -> None:
        self.call, self.shared = {name: str(value) for name, value in call.items()}, shared and ranks.count() > 1
        self.path = f"{path}.rank-{ranks.index()}" if path is not None and self.shared and ranks.index() else path
        self.document: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        for file in [] if path is None else [path, *sorted(glob.glob(f"{glob.escape(path)}.rank-*"))]:
            if os.path.exists(file):
                self._read(file)
            else:
                check_place(file)

    def _read(self, path: str) -> None:
        try:
            with safetensors.safe_open(path, "pt") as opened:
                metadata = opened.metadata() or {}
                names = opened.keys()
                tensors = {name: opened.get_tensor(name) for name in names}
            there, document = dict(json.loads(metadata["call"])), dict(json.loads(metadata["document"]))
            if metadata["digest"] != _digest_of(there, document, tensors):
                raise ValueError("it was changed, or damaged, since it was written")
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"checkpoint={path!r} is not a checkpoint",
                because=f"reading it raises {type(error).__name__}: {error}",
                remedy="pass a path that does not exist yet, or the one of an earlier call of this function",
            ) from None
        pairs = [(name, there.get(name, "nothing"), self.call.get(name, "nothing")) for name in {**there, **self.call}]
        differences = "; ".join(f"{name} is {value}, and {own} here" for name, value, own in pairs if value != own)
        if differences:
            raise ConfigurationError(
                f"checkpoint={path!r} is of another call",
                because=f"there {differences}",
                remedy="repeat the call that it is of, with the same model and batches, or pass another path",
            )
        self.document |= document
        self.tensors |= tensors

    def at(self, name: str, find: Callable[[], Any]) -> Any:
        """Return the value of this name in the document; without one, call `find`, write its result to the file, and return it."""
        return self.gather({name: find})[name]

    def gather(self, tasks: Mapping[str, Callable[[], Any]], title: str = "", show_progress: bool | None = False) -> dict[str, Any]:
        """Return the value of each task by its name: from the document, or computed now and written to the file.

        In a shared call each rank computes a part of the tasks, and every rank returns the values of all. Raises ConfigurationError if
        the ranks' models, samples or arguments differ, and on the other ranks if a task of one rank raises.
        """
        self._exchange()
        missing = [name for name in tasks if name not in self.document]
        own = missing[ranks.index() :: ranks.count()] if self.shared else missing
        try:
            for name in progress(own, len(own), title, show_progress):
                self.document[name] = tasks[name]()
                self.write()
        finally:
            self._exchange()  # also where a task raises: the other ranks wait
        if lost := [name for name in missing if name not in self.document]:
            raise ConfigurationError(
                f"{len(lost)} of {len(missing)} trials of this search failed on another rank",
                because=f"{lost[0]} has no result",
                remedy="see the error of that rank; with a checkpoint the same call continues from the finished trials",
            )
        return {name: self.document[name] for name in tasks}

    def _exchange(self) -> None:
        if not self.shared:
            return
        for call, document in ranks.gathered((self.call, self.document)):
            if differences := [name for name in self.call if call.get(name) != self.call[name]]:
                raise ConfigurationError(
                    f"the ranks search with different {' and '.join(differences)}",
                    because="they divide the trials of one search, whose results must not depend on the rank",
                    remedy="pass every rank the same model, batches and arguments, or options=fxq.Options(distributed=False)",
                )
            self.document |= document

    def write(self) -> None:
        """Replace the file by one with the present document and tensors."""
        if self.path is not None:
            tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
            metadata = {"call": json.dumps(self.call), "document": json.dumps(self.document)}
            metadata["digest"] = _digest_of(self.call, self.document, tensors)
            write_file(self.path, safetensors.torch.save(tensors, metadata))


class LayerCheckpoint(Checkpoint):
    """The checkpoint of a method that tunes layer by layer: `rows` holds the finished layers, and the tensors what they learned."""

    def __init__(self, path: str | None, call: Mapping[str, Any]) -> None:
        super().__init__(path, call)
        self.rows = {name: TunedLayer.of(row) for name, row in self.document.items()}

    def learned(self, row: TunedLayer) -> Learned:
        """Return the learned tensors of a finished row, by name."""
        start = f"{row.name}/"
        return {name.removeprefix(start): value for name, value in self.tensors.items() if name.startswith(start)}

    def add(self, row: TunedLayer, learned: Learned) -> None:
        """Add a finished row and its learned tensors, empty if the model does not keep them; write the file."""
        self.rows[row.name], self.document[row.name] = row, asdict(row)
        self.tensors.update({f"{row.name}/{name}": value.detach().clone() for name, value in learned.items()})
        self.write()


def _digest_of(call: Mapping[str, str], document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    names = sorted(tensors)
    return hashlib.sha256(json.dumps([call, document, digest(tensors[name] for name in names), names]).encode()).hexdigest()[:16]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a number that tells tensors from others, as hexadecimal digits."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = tensor.resolve_conj().resolve_neg().detach().cpu().contiguous()
        hasher.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def model_digest(prepared: fx.GraphModule) -> str:
    """Return the digest of a model: its graph, its parameters and scales."""
    return digest([torch.frombuffer(bytearray(str(prepared.graph).encode()), dtype=torch.uint8), *prepared.state_dict().values()])
