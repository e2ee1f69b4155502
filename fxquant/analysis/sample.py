"""Batches for a model from a file of arrays, or drawn at random over the range of its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx

from fxquant.errors import ConfigurationError
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.numerics.grids import ACTIVATION_TYPES, IntType
from fxquant.prepared.nodes import grid_of

FORMATS = (".npy", ".npz", ".safetensors")
Named = dict[str, Tensor]


def batches_from(path: Path, model: fx.GraphModule, size: int) -> list[Any]:
    """Return the batches in a file of arrays that hold all samples, of `size` samples, or of as many as the model is fixed to.

    Samples are along the dimension that is the batch of that input; where no size of the model varies, dimension 0.

    A model of one input takes the file's only array; otherwise arrays go by the names of the inputs, and those that
    numpy.savez numbered in their order. Raises ConfigurationError if the file cannot be read; nothing is unpickled.
    """
    arrays = _read(path)
    inputs = _inputs(model)
    if len(arrays) == 1 and len(inputs) == 1:
        arrays = {str(inputs[0].target): next(iter(arrays.values()))}
    elif all(name == f"arr_{index}" for index, name in enumerate(arrays)) and len(arrays) == len(inputs):
        arrays = dict(zip([str(node.target) for node in inputs], arrays.values(), strict=True))
    facts = {str(node.target): known for node in inputs if isinstance(known := fact(node), TensorFact) and known.shape}
    axes = {name: known.batch_axis for name, known in facts.items()}
    if all(axis is None for axis in axes.values()):
        axes = dict.fromkeys(axes, 0)
    along = {name: axis for name, axis in axes.items() if axis is not None and name in arrays and arrays[name].dim() > axis}
    counts = {arrays[name].shape[axis] for name, axis in along.items()}
    if len(counts) != 1:
        return [arrays]
    first, axis = next(iter(along.items()))
    each = facts[first].shape[axis]
    size = each if isinstance(each, int) else size
    repeated = -(-max(counts) // size)
    pieces = {name: torch.split(array, size, along[name]) if name in along else [array] * repeated for name, array in arrays.items()}
    return [dict(zip(pieces, batch, strict=True)) for batch in zip(*pieces.values(), strict=True)]


def _read(path: Path) -> Named:
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(
            f"{path} cannot be read as data",
            because=f"data is read from {', '.join(FORMATS)}; other formats can hold code",
            remedy="save it with numpy.savez or safetensors.torch.save_file",
        )
    try:
        if path.suffix.lower() == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": torch.from_numpy(loaded)}
        with loaded:
            return {name: torch.from_numpy(loaded[name]) for name in loaded.files}
    except Exception as error:  # what is read of a damaged file raises errors of many classes
        raise ConfigurationError(
            f"{path} cannot be read as data",
            because=str(error) or type(error).__name__,
            remedy="pass a file that numpy.save, numpy.savez or safetensors.torch.save_file wrote",
        ) from error


def random_batches(model: fx.GraphModule, sizes: tuple[int, ...], seed: int = 0) -> list[Any]:
    """Return a batch of each size, the same for the same seed: normal numbers that slightly exceed the range of the input's scale."""
    generator = torch.Generator().manual_seed(seed)
    return [{str(node.target): _drawn(model, node, size, generator) for node in _inputs(model)} for size in sizes]


def _drawn(model: fx.GraphModule, node: fx.Node, size: int, generator: torch.Generator) -> Any:
    known = fact(node)
    if not isinstance(known, TensorFact):
        return known
    shape = known.at(size)
    if known.dtype.is_floating_point:
        spread = next(_input_ranges(model, node), 2.0) / 2
        return (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * spread).to(known.dtype)
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(known.dtype)


def _input_ranges(model: fx.GraphModule, node: fx.Node) -> Iterator[float]:
    """Yield the largest values that the quantizers behind an input can represent."""
    for user in node.users:
        grid = grid_of(model, user)
        if grid is not None and isinstance(grid.scale, float) and math.isfinite(grid.scale):
            yield grid.scale * _reach(ACTIVATION_TYPES[grid.dtype], grid.zero_point)


def _reach(dtype: IntType, zero_point: int) -> int:
    """Return one more than the largest magnitude on the larger side."""
    return max(dtype.high - zero_point, zero_point - dtype.low - 1) + 1


def _inputs(model: fx.GraphModule) -> list[fx.Node]:
    return [node for node in model.graph.nodes if node.op == "placeholder"]
