"""Checkpoints of long calls: after a kill the same call continues from its file, and returns the same bits."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx

from fxquant.accuracy.ranks import digest
from fxquant.accuracy.result import TunedLayer
from fxquant.accuracy.walk import Samples
from fxquant.errors import ConfigurationError
from fxquant.support.files import check_place, write_file
from fxquant.support.progress import progress


def call_of(prepared: fx.GraphModule, samples: Samples, **arguments: Any) -> dict[str, Any]:
    """Return the description of a call that a checkpoint belongs to: its arguments, with the digests of the model and of the samples."""
    return {**arguments, "model": model_digest(prepared), "samples": digest(samples.tensors)}


class Checkpoint:
    """The results of one call so far: `document`, values that JSON can hold by name, and `tensors` by name.

    `write` replaces the file, whole or not at all; without a path, nothing is kept. `call` identifies the call: the function with its
    arguments, the model and the samples. Raises ConfigurationError for the file of another call, and for any other file.
    """

    def __init__(self, path: str | None, call: Mapping[str, Any]) -> None:
        self.path, self.call = path, {name: str(value) for name, value in call.items()}
        self.document: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        if path is not None and os.path.exists(path):
            self._read(path)
        elif path is not None:
            check_place(path)

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
        if differences := "; ".join(f"{name} is {value}, and {own} here" for name, value, own in pairs if value != own):
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
        """Return the value of each task by its name: from the document, or computed now and written to the file."""
        missing = [name for name in tasks if name not in self.document]
        for name in progress(missing, len(missing), title, show_progress):
            self.document[name] = tasks[name]()
            self.write()
        return {name: self.document[name] for name in tasks}

    def write(self) -> None:
        """Replace the file by one with the present document and tensors."""
        if self.path is not None:
            tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
            metadata = {"call": json.dumps(self.call), "document": json.dumps(self.document)}
            metadata["digest"] = _digest_of(self.call, self.document, tensors)
            write_file(self.path, safetensors.torch.save(tensors, metadata))

    def learned(self, row: TunedLayer) -> Mapping[str, Tensor]:
        """Return the learned tensors of a finished layer, by name."""
        start = f"{row.name}/"
        return {name.removeprefix(start): value for name, value in self.tensors.items() if name.startswith(start)}

    def row(self, row: TunedLayer, learned: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the entry of a finished layer, and hold its learned tensors, which are empty if the model does not keep them."""
        self.tensors.update({f"{row.name}/{name}": value.detach().cpu().clone() for name, value in learned.items()})
        return asdict(row)


def _digest_of(call: Mapping[str, str], document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    names = sorted(tensors)
    return hashlib.sha256(json.dumps([call, document, digest(tensors[name] for name in names), names]).encode()).hexdigest()[:16]


def model_digest(prepared: fx.GraphModule) -> str:
    """Return the digest of a model: its graph, its parameters and scales."""
    return digest([torch.frombuffer(bytearray(str(prepared.graph).encode()), dtype=torch.uint8), *prepared.state_dict().values()])
