"""A file of tensors beside a document, of one call: what a method has finished so far, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fxquant.support.files import check_place, write_file
from fxquant.tuning.resumption import digest, no_checkpoint, require_same_call, require_whole, text_digest


def read_tensors(path: str | None, call: Mapping[str, str]) -> tuple[Any, dict[str, Tensor]] | None:
    """Return the contents of a file; None if it does not exist. Raises ConfigurationError if it is of another call, or not such a file."""
    if path is None:
        return None
    if not os.path.exists(path):
        check_place(path)
        return None
    try:
        with safetensors.safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            names = opened.keys()
            tensors = {name: opened.get_tensor(name) for name in names}
        there, document = json.loads(metadata["call"]), json.loads(metadata["document"])
        require_whole(metadata["digest"], there, document, digest(tensors[name] for name in sorted(tensors)), sorted(tensors))
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise no_checkpoint(path, error) from None
    require_same_call(path, there, call)
    return document, tensors


def write_tensors(path: str, call: Mapping[str, str], document: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put them into the file; `document` is what JSON holds."""
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()} or {
        "nothing": torch.zeros(0, device="cpu", dtype=torch.float32)
    }
    whole = text_digest(dict(call), document, digest(held[name] for name in sorted(held)), sorted(held))
    metadata = {"call": json.dumps(dict(call)), "document": json.dumps(document), "digest": whole}
    write_file(path, safetensors.torch.save(held, metadata))
