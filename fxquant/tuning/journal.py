"""Journal of a long search, in a file: after a kill the same call continues after its last entry, and returns the same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fxquant.support.files import check_place, write_file
from fxquant.tuning.resumption import no_checkpoint, require_same_call, require_whole, text_digest


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
        elif path is not None:
            check_place(path)

    def _read(self, path: str) -> dict[str, Any]:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            call, found = dict(document["call"]), dict(document["found"])
            require_whole(document["digest"], call, found)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise no_checkpoint(path, error) from None
        require_same_call(path, call, self.call)
        return found

    def at(self, name: str, find: Callable[[], Any]) -> Any:
        """Return the entry of this name; without one, call `find` and keep what it returns."""
        if name not in self.found:
            self.found[name] = find()
            self.write()
        return self.found[name]

    def write(self) -> None:
        """Put what is known into the file, whole or not at all."""
        if self.path is not None:
            text = json.dumps({"call": self.call, "found": self.found, "digest": text_digest(self.call, self.found)})
            write_file(self.path, text)
