"""Calibration on several ranks: every rank observes its shard, and at the end the observations of all ranks are merged.

The ranks communicate when a calibration begins, where their weights are compared, and when it ends, so they may have different numbers of
batches. In training, DistributedDataParallel's `broadcast_buffers` gives every rank the scales and statistics of rank 0 before each
forward pass.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxquant.errors import CalibrationError, ConfigurationError
from fxquant.prepared.undo import inside_operators, tensors_of
from fxquant.quantization.observers import Observer

Seen = dict[str, dict[str, Tensor]]  # the buffers of every observer, by the observer's path


def count() -> int:
    """Return the number of ranks; 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def index() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if count() > 1 else 0


def gathered(value: Any) -> list[Any]:
    """Return the values that all ranks pass here, in the order of the ranks; each rank calls this once."""
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def of_first(value: Any) -> Any:
    """Return the value that rank 0 passes here; each rank calls this once."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash (16 hexadecimal digits) of dtypes, shapes and elements of tensors."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = tensor.resolve_conj().resolve_neg().detach().cpu().contiguous()
        hasher.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def require_equal(prepared: nn.Module) -> None:
    """Raise ConfigurationError on every rank if the model's parameters or statistics differ between ranks; each rank calls this once."""
    inside = set(inside_operators(prepared))
    digests = gathered(digest(tensors_of(module for module in prepared.modules() if module not in inside)))
    if others := [str(rank) for rank, each in enumerate(digests) if each != digests[0]]:
        raise ConfigurationError(
            f"the model of rank {', '.join(others)} has other parameters or statistics than that of rank 0",
            because="the ranks observe parts of one model's values, and all get the same scales",
            remedy="load the same state_dict on every rank first, or pass options=fxq.Options(distributed=False)",
        )


def merge(observers: Mapping[str, Observer], batches: int | None) -> int:
    """Merge the observations of all ranks into every observer, and return the number of batches of all ranks.

    Every rank calls this once. `batches` is this rank's number of batches, None if its calibration failed: the other
    ranks then raise CalibrationError instead of waiting for it.
    """
    own = {path: {name: buffer.detach().cpu() for name, buffer in observer.named_buffers()} for path, observer in observers.items()}
    every: list[tuple[int | None, Seen]] = gathered((batches, own))
    if batches is None:
        return 0
    if failed := [rank for rank, (number, _) in enumerate(every) if number is None]:
        raise CalibrationError(
            f"the calibration of rank {', '.join(map(str, failed))} failed",
            because="scales come from what all ranks have observed together",
            remedy="see the error of that rank; nothing of this calibration is kept",
        )
    for path, observer in observers.items():
        device = next(observer.buffers()).device
        states = [{name: value.to(device) for name, value in state[path].items()} for _, state in every if int(state[path]["count"])]
        try:
            if states:
                observer.merge(states)
        except NotImplementedError:
            raise ConfigurationError(
                f"the statistics of several {type(observer).__name__} cannot be merged",
                because="it has no method `merge`, which calibration with torch.distributed needs",
                remedy="define it, use an observer of fxquant, or calibrate with options=fxq.Options(distributed=False)",
            ) from None
    return sum(number for number, _ in every if number is not None)
