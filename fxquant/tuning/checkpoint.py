"""What a method has finished, in a file: after a kill the same call continues behind it, and ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx

from fxquant.errors import ConfigurationError
from fxquant.tuning.learning import Learned
from fxquant.tuning.result import TunedLayer

_OFFSET, _SCALE = "offset/", "scale/"


class Checkpoint:
    """The rows that are finished, with what was learned of them; kept in a file after each, or, without a path, nowhere.

    `call` says what the file is of: the method with its arguments, the model and the samples. Raises ConfigurationError for a file that
    is of another call, or none of these.
    """

    def __init__(self, path: str | None, call: Mapping[str, Any]) -> None:
        self.path, self.call = path, {name: str(value) for name, value in call.items()}
        self.rows: dict[str, TunedLayer] = {}
        self._tensors: dict[str, Tensor] = {}
        if path is not None and os.path.exists(path):
            self._read(path)

    def _read(self, path: str) -> None:
        try:
            with safetensors.safe_open(path, "pt") as opened:
                document = opened.metadata() or {}
                names = opened.keys()
                tensors = {name: opened.get_tensor(name) for name in names}
            call, rows = json.loads(document["call"]), json.loads(document["rows"])
            found = {row["name"]: TunedLayer(**{**row, "layers": tuple(row["layers"])}) for row in rows}
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"checkpoint={path!r} is no checkpoint",
                because=f"reading it raises {type(error).__name__}: {error}",
                remedy="pass a path where there is no file yet, or the one of an earlier call of this method",
            ) from None
        differing = [name for name in {**call, **self.call} if call.get(name) != self.call.get(name)]
        if differing:
            raise ConfigurationError(
                f"checkpoint={path!r} is of another call",
                because="there "
                + "; ".join(f"{name} is {call.get(name, 'nothing')}, and {self.call.get(name, 'nothing')} here" for name in differing),
                remedy="repeat the call that it is of, with the same model and batches, or pass another path",
            )
        self.rows, self._tensors = found, tensors

    def learned(self, row: TunedLayer) -> Learned:
        """What was learned of a row that is finished."""

        def of(prefix: str) -> dict[str, Tensor]:
            start = f"{row.name}/{prefix}"
            return {name.removeprefix(start): value for name, value in self._tensors.items() if name.startswith(start)}

        return Learned(of(_OFFSET), of(_SCALE))

    def add(self, row: TunedLayer, learned: Learned | None) -> None:
        """A row is finished; what was learned is kept where it is in the model."""
        self.rows[row.name] = row
        if learned is not None:
            for prefix, values in ((_OFFSET, learned.offsets), (_SCALE, learned.scales)):
                self._tensors.update({f"{row.name}/{prefix}{name}": value.detach().cpu().contiguous() for name, value in values.items()})
        if self.path is None:
            return
        metadata = {"call": json.dumps(self.call), "rows": json.dumps([asdict(row) for row in self.rows.values()])}
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".part")
        safetensors.torch.save_file(self._tensors or {"nothing": torch.zeros(0, device="cpu")}, written, metadata)
        os.replace(written, path)  # whole or not at all


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
