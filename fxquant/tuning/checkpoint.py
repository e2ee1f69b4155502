"""What a method has finished, in a file: after a kill the same call continues behind it, and ends with the same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fxquant.arguments import FILE
from fxquant.tuning.learning import Learned
from fxquant.tuning.result import TunedLayer
from fxquant.tuning.resumption import digest, no_checkpoint, require_same_call, require_whole, text_digest, write_whole

CHECKPOINT = FILE.or_none("nothing is kept, and a call begins anew")
_OFFSET, _SCALE, _SHARE = "offset/", "scale/", "share/"


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
            require_whole(document["digest"], call, rows, digest(tensors[name] for name in sorted(tensors)), sorted(tensors))
            found = {row["name"]: TunedLayer(**{**row, "layers": tuple(row["layers"])}) for row in rows}
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise no_checkpoint(path, error) from None
        require_same_call(path, call, self.call)
        self.rows, self._tensors = found, tensors

    def learned(self, row: TunedLayer) -> Learned:
        """What was learned of a row that is finished."""

        def of(prefix: str) -> dict[str, Tensor]:
            start = f"{row.name}/{prefix}"
            return {name.removeprefix(start): value for name, value in self._tensors.items() if name.startswith(start)}

        return Learned(of(_OFFSET), of(_SCALE), of(_SHARE))

    def add(self, row: TunedLayer, learned: Learned | None) -> None:
        """A row is finished; what was learned is kept where it is in the model."""
        self.rows[row.name] = row
        if learned is not None:
            for prefix, values in ((_OFFSET, learned.offsets), (_SCALE, learned.scales), (_SHARE, learned.shares)):
                self._tensors.update({f"{row.name}/{prefix}{name}": value.detach().cpu().contiguous() for name, value in values.items()})
        if self.path is not None:
            rows = [asdict(row) for row in self.rows.values()]
            tensors = self._tensors or {"nothing": torch.zeros(0, device="cpu")}
            whole = text_digest(self.call, rows, digest(tensors[name] for name in sorted(tensors)), sorted(tensors))
            metadata = {"call": json.dumps(self.call), "rows": json.dumps(rows), "digest": whole}
            write_whole(self.path, lambda part: safetensors.torch.save_file(tensors, part, metadata))
