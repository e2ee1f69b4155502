"""Checkpoint of a tuning method: after a kill the same call continues after the last finished layer, and returns the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fxquant.support.arguments import FILE
from fxquant.tuning.learning import Learned
from fxquant.tuning.result import TunedLayer
from fxquant.tuning.resumption import no_checkpoint
from fxquant.tuning.tensor_file import read_tensors, write_tensors

CHECKPOINT = FILE.or_none("nothing is kept, and each call starts from the beginning")
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
        known = read_tensors(path, self.call)
        if known is not None:
            rows, self._tensors = known
            try:
                self.rows = {row["name"]: TunedLayer(**{**row, "layers": tuple(row["layers"])}) for row in rows}
            except (KeyError, TypeError) as error:
                raise no_checkpoint(str(path), error) from None

    def learned(self, row: TunedLayer) -> Learned:
        """Return what was learned for a row that is finished."""

        def of(prefix: str) -> dict[str, Tensor]:
            start = f"{row.name}/{prefix}"
            return {name.removeprefix(start): value for name, value in self._tensors.items() if name.startswith(start)}

        return Learned(of(_OFFSET), of(_SCALE), of(_SHARE))

    def add(self, row: TunedLayer, learned: Learned | None) -> None:
        """Add a finished row, and what was learned if the model keeps it."""
        self.rows[row.name] = row
        if learned is not None:
            for prefix, values in ((_OFFSET, learned.offsets), (_SCALE, learned.scales), (_SHARE, learned.shares)):
                self._tensors.update({f"{row.name}/{prefix}{name}": value.detach().cpu().contiguous() for name, value in values.items()})
        if self.path is not None:
            write_tensors(self.path, self.call, [asdict(row) for row in self.rows.values()], self._tensors)
