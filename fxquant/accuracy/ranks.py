"""Calibration on several ranks: every rank takes the batches of all ranks, and does the whole work.

The ranks compare their weights first, then exchange each batch, and compare their results at the end. They may have different numbers of
batches, and all have the scales of one process with all batches. In training, DistributedDataParallel's `broadcast_buffers` gives every
rank the scales and statistics of rank 0 before each forward pass.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fxquant.errors import CalibrationError, ConfigurationError
from fxquant.options import Options
from fxquant.prepared.undo import inside_operators, tensors_of


class _End:
    """Stands for the batch of a rank that has none left."""


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
            because="all ranks observe the same batches, and get the same scales",
            remedy="load the same state_dict on every rank first, or pass options=fxq.Options(distributed=False)",
        )


def require_alone(options: Options) -> None:
    """Raise ConfigurationError where several ranks would search or tune, which each rank does by itself."""
    if options.distributed and count() > 1:
        raise ConfigurationError(
            f"{count()} ranks search and tune nothing together",
            because="only calibration exchanges batches; each rank would have another model",
            remedy="pass every rank the same model and batches, and options=fxq.Options(distributed=False)",
        )


def of_all(own: Iterable[Any], prepared: nn.Module) -> Iterator[Any]:
    """Yield the batches of all ranks, the first of every rank in the order of the ranks, then the second, on this model's device.

    Raises CalibrationError on the other ranks if a batch of one rank cannot be read.
    """
    batches, device = iter(own), next(prepared.buffers(), torch.empty(0, device="cpu")).device
    while True:
        batch: Any = None
        try:
            batch = tree_map_only(Tensor, Tensor.cpu, next(batches, _End()))
        finally:
            every = gathered(batch)  # also where it raises: the others wait
        if failed := [rank for rank, each in enumerate(every) if each is None]:
            because = "scales come from the batches of all ranks together"
            remedy = "see the error of that rank; the batches before stay observed"
            raise CalibrationError(f"rank {failed[0]} cannot read its next batch", because=because, remedy=remedy)
        if all(isinstance(each, _End) for each in every):
            return
        yield from (tree_map_only(Tensor, lambda value: value.to(device), each) for each in every if not isinstance(each, _End))


def agree(prepared: nn.Module) -> None:
    """Load rank 0's state_dict into the model, where the ranks have computed different numbers."""
    if len(set(gathered(digest(prepared.state_dict().values())))) > 1:
        prepared.load_state_dict(of_first({name: value.cpu() for name, value in prepared.state_dict().items()}))
