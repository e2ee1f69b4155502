"""What a long search has found so far, in a file: after a kill the same call goes on behind it, and ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.errors import ConfigurationError


class Journal:
    """Findings by name, each a value that JSON holds; kept in a file after each, or, without a path, nowhere.

    `call` says what the file is of: the function with its arguments, the model and the samples. Raises ConfigurationError for a file
    that is of another call, or no such file.
    """

    def __init__(self, path: str | None, call: Mapping[str, Any]) -> None:
        self.path, self.call = path, {name: str(value) for name, value in call.items()}
        self.found: dict[str, Any] = {}
        if path is not None and os.path.exists(path):
            self.found = self._read(path)

    def _read(self, path: str) -> dict[str, Any]:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            call, found = dict(document["call"]), dict(document["found"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"checkpoint={path!r} is no checkpoint",
                because=f"reading it raises {type(error).__name__}: {error}",
                remedy="pass a path where there is no file yet, or the one of an earlier call",
            ) from None
        differing = [name for name in {**call, **self.call} if call.get(name) != self.call.get(name)]
        if differing:
            raise ConfigurationError(
                f"checkpoint={path!r} is of another call",
                because="there "
                + "; ".join(f"{name} is {call.get(name, 'nothing')}, and {self.call.get(name, 'nothing')} here" for name in differing),
                remedy="repeat the call that it is of, with the same model and batches, or pass another path",
            )
        return found

    def at(self, name: str, find: Callable[[], Any]) -> Any:
        """What is known under a name, or what `find` finds, which is known from then on."""
        if name not in self.found:
            self.found[name] = find()
            self.write()
        return self.found[name]

    def write(self) -> None:
        """Put what is known into the file, whole or not at all."""
        if self.path is None:
            return
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"call": self.call, "found": self.found}), encoding="utf-8")
        os.replace(part, path)


def digest(tensors: Iterable[Tensor]) -> str:
    """A number that tells tensors from others, as hexadecimal digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def model_digest(prepared: fx.GraphModule) -> str:
    """The same of a model: its graph, its parameters and scales."""
    text = torch.frombuffer(bytearray(str(prepared.graph).encode()), dtype=torch.uint8)
    return digest([text, *prepared.state_dict().values()])
