"""Shared parts of checkpoint files: the call that a file is of, and the errors for other files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.errors import ConfigurationError


def no_checkpoint(path: str, error: Exception) -> ConfigurationError:
    """Return the error for a file that cannot be read."""
    return ConfigurationError(
        f"checkpoint={path!r} is not a checkpoint",
        because=f"reading it raises {type(error).__name__}: {error}",
        remedy="pass a path that does not exist yet, or the one of an earlier call of this function",
    )


def require_same_call(path: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a file is of another call: of other arguments, another model or other samples."""
    differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if differing:
        differences = "; ".join(f"{name} is {there.get(name, 'nothing')}, and {here.get(name, 'nothing')} here" for name in differing)
        raise ConfigurationError(
            f"checkpoint={path!r} is of another call",
            because=f"there {differences}",
            remedy="repeat the call that it is of, with the same model and batches, or pass another path",
        )


def text_digest(*documents: Any) -> str:
    """Return a number that tells documents, which JSON can hold, from others."""
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:16]


def require_whole(written: object, *documents: Any) -> None:
    """Raise ValueError if what a file says of its own digest is not so."""
    if written != text_digest(*documents):
        raise ValueError("it was changed, or damaged, since it was written")


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a number that tells tensors from others, as hexadecimal digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = tensor.resolve_conj().resolve_neg().detach().cpu().contiguous()
        found.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def model_digest(prepared: fx.GraphModule) -> str:
    """Return the digest of a model: its graph, its parameters and scales."""
    text = torch.frombuffer(bytearray(str(prepared.graph).encode()), dtype=torch.uint8)
    return digest([text, *prepared.state_dict().values()])
